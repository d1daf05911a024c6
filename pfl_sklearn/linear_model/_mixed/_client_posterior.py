"""Clients' modes and posteriors in regressions with a link, given population and spread.

Those of normal rows have a closed form; see `_normal_rows/_gaussian_prior.py`.

A normal density around the mode is no posterior where few events meet a wide prior: expected counts
would be up to half too high. So the posterior of a client with d effects is a product grid of
Gauss and Hermite around the mode, weighted by the exact density. Means of responses from it are
exact to 1 % or better for up to three effects. For more than six a grid is too large; the posterior
is then normal around its mean to third order (Tierney and Kadane, 1986, who also give the error).
"""

from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from scipy.special import softmax

from pfl_sklearn._parallel import map_batches
from pfl_sklearn.linear_model._algebra import invert_lower, row_slices
from pfl_sklearn.linear_model._mixed._laplace import (
    CLOSE_ENOUGH,
    Primal,
    choose_mode_system,
    find_mode,
)
from pfl_sklearn.linear_model._mixed._marginal_likelihood import quadrature_nodes

# Nodes an axis, by the number of effects, up to a standard deviation of the predictors between
# clients: single means are mostly exact to 1 % there, and there are at most 729 nodes (3 kB).
_AXIS_NODES = {
    2: ((2.0, 9), (np.inf, 15)),
    3: ((1.25, 5), (2.0, 7), (np.inf, 9)),
    4: ((0.75, 3), (np.inf, 5)),
    5: ((np.inf, 3),),
    6: ((np.inf, 3),),
}
_NEGLIGIBLE = np.log(1e-14)  # log weight of corners of the grid that are left out
_LARGEST_CURVATURE = 1e10  # beyond it rounding may leave no root with a triangle
_NODE_CELLS = 1 << 20  # numbers at a time: 8 MB for each temporary array
_ROWS_PER_COLUMN = 4  # of whitened rows that are kept as many as they are


class ClientModes(NamedTuple):
    """All clients, at given population values."""

    deviations: np.ndarray  # (m, a, q)
    rows: np.ndarray  # (m, k, a p), whitened: their Gram matrix is the information on B
    log_likelihood: float
    converged: bool
    states: list  # of the stacks


def client_modes(table, stacks, maximum):
    """Modes, criterion and information of all clients at the population of a MarginalMaximum."""
    family, factor, p = maximum.family, maximum.factor, table.columns.shape[1]
    a = family.n_outputs
    deviations = np.empty((table.n_clients, a, table.n_random))
    # Clients with fewer rows get rows of zeros, which say nothing.
    longest = max(n_whitened(stack.x.shape[1], p, factor.shape[1], family) for stack in stacks)
    rows = np.zeros((table.n_clients, longest, a * p))
    at = {"population": maximum.population, "factor": factor}
    function = partial(_stack_modes, family=family, **at, deviations=deviations, rows=rows)
    # The states of the search are at the modes or near them; without a search we start at zero.
    states = maximum.states or [None] * len(stacks)
    # In this process, as workers would have to send back as much as the rows are.
    results = map_batches(function, zip(stacks, states, strict=True), 1)
    values, converged, states = zip(*results, strict=True)
    value = float(sum(values)) + table.constant(family)
    return ClientModes(deviations, rows, value, all(converged), list(states))


def _stack_modes(stack, state, *, family, population, factor, deviations, rows):
    """Summed criterion, whether modes were found, state; fills deviations and whitened rows."""
    form = choose_mode_system(stack.x, factor)
    mode = find_mode(form, family, stack.predictors(population), stack, state, CLOSE_ENOUGH)
    deviations[stack.clients] = (factor @ form.effects(mode.state)).transpose(0, 2, 1)
    roots = family.curvature_roots(mode.predictors, stack.y, stack.w)
    whitened, log_det = whitened_rows(form, roots, stack.x)
    rows[stack.clients, : whitened.shape[1]] = whitened
    value = float(np.sum(mode.value) - 0.5 * log_det)
    return value, bool(mode.converged.all()), mode.state


def n_whitened(n, p, r, family):
    """Whitened rows that are left of n rows of p columns, with r effects."""
    c, a = family.coding.shape
    return n if r * a == 1 and n <= _ROWS_PER_COLUMN * p else min(n * c, p * a)


def penalized_information(rows, a, precision):
    """Information (a f, a f) on the f free coefficients, with their prior precision (f,)."""
    # The last columns of the whitened rows (m, k, a p) are the free ones.
    p, f = rows.shape[2] // a, len(precision)
    free = rows.reshape(-1, a, p)[:, :, p - f :]
    free = free.reshape(len(free), a * f)
    return free.T @ free + np.diag(np.tile(precision, a))


def whitened_rows(form, roots, x):
    """Rows T (b, k, a p) with T'T = X' (W^-1 + Z L L' Z')^-1 X, and the summed log det H.

    The columns x are (b, n, p); roots of W are (b, n, a, c).
    """
    features = form.features
    b, n, a, c = roots.shape
    r, p = features.shape[2], x.shape[2]
    if r * a == 1 and n <= _ROWS_PER_COLUMN * p:
        # Householder's reflection that takes the effect's column to the row of I: by hand it costs
        # a third, but leaves all rows.
        effect, columns = features * roots[..., 0], x * roots[..., 0]
        squares = 1 + np.sum(effect**2, axis=1, keepdims=True)
        along = effect.transpose(0, 2, 1) @ columns / (squares + np.sqrt(squares))
        return columns - effect * along, float(np.log(squares).sum())
    if n * c < r * a:
        # There are fewer rows than effects then, so the form is Dual.
        system = np.einsum("bjac,bjk,bkad->bjckd", roots, form.kernel, roots)
        lower = np.linalg.cholesky(system.reshape(b, n * c, n * c) + np.eye(n * c))
        log_det = 2 * np.log(np.einsum("bkk->bk", lower)).sum()
        inverse = invert_lower(lower).reshape(b, n * c, n, c)
        whitening = np.einsum("bmjc,bjac->bmaj", inverse, roots).reshape(b, n * c * a, n)
        return (whitening @ x).reshape(b, n * c, a * p), log_det
    across = roots.transpose(0, 1, 3, 2)[..., None]
    stacked = np.zeros((b, n * c + r * a, (r + p) * a))
    stacked[:, : n * c, : r * a] = (across * features[:, :, None, None, :]).reshape(b, n * c, -1)
    stacked[:, : n * c, r * a :] = (across * x[:, :, None, None, :]).reshape(b, n * c, -1)
    stacked[:, n * c :, : r * a] = np.eye(r * a)
    # The triangle of [roots; I] has T for its last rows: no inverse, and no square of a condition.
    triangle: Any = np.linalg.qr(stacked, mode="r")
    log_det = 2 * np.log(np.abs(np.einsum("bkk->bk", triangle[:, : r * a, : r * a]))).sum()
    return triangle[:, r * a :, r * a :], log_det


class EffectPosterior(NamedTuple):
    """Posteriors of m clients around the modes of their d = r a standard normal effects.

    A client's predictors deviate from those at its mode by ``z' factor @ V`` for random columns z
    of a row and nodes V (r, a).
    """

    factor: np.ndarray  # (q, r), of the covariance between clients; no columns of zeros
    n_outputs: int
    n_points: int  # nodes an axis
    shifts: Any  # (m, d), of the means from the modes; None with nodes
    roots: Any  # (m, d, d), of the inverse curvature at the modes; None without
    weights: Any  # (m, k), of the nodes; single precision is exact to 1e-7

    def of_clients(self, clients):
        """The posteriors of some clients alone."""
        parts: Any = (None if part is None else part[clients] for part in self[3:])
        return EffectPosterior(*self[:3], *parts)

    @property
    def has_nodes(self):
        """Whether there are nodes; otherwise the posterior is normal."""
        return self.weights is not None

    @property
    def cells(self):
        """Numbers that each row needs for its nodes."""
        return self.weights.shape[1] * self.n_outputs

    def node_deviations(self, z, codes):
        """Deviations (n, k, a) of predictors at the nodes, for random columns z (n, q)."""
        loadings = self._loadings(z, codes)
        return np.stack([x @ self._nodes.T for x in np.moveaxis(loadings, 1, 0)], axis=-1)

    def node_weights(self, codes):
        """Weights (n, k) of the nodes."""
        weights = self.weights[codes].astype(float)
        weights /= weights.sum(axis=1, keepdims=True)  # single ones sum to 1 within 1e-7 only
        return weights

    def mean_shifts(self, z, codes):
        """Posterior means (n, a) of predictors less those at the modes."""
        if self.has_nodes:
            return self.averages(lambda _, deviations: deviations, z, codes)
        result = np.empty((len(z), self.n_outputs))
        for part in row_slices(len(z), self.shifts.shape[1], _NODE_CELLS):
            effects = self.shifts[codes[part]].reshape(-1, self.factor.shape[1], self.n_outputs)
            result[part] = np.einsum("nr,nra->na", z[part] @ self.factor, effects)
        return result

    def moments(self, z, codes, combination):
        """Corrections (n,) to the normal posterior of a combination (a,) of predictors."""
        # The mean less the mode, the variance less that of the curvature, and the third central
        # moment.
        result = np.zeros((3, len(z)))
        if not self.has_nodes:
            result[0] = self.mean_shifts(z, codes) @ combination
            return result
        for part in row_slices(len(z), self.cells, _NODE_CELLS):
            loading = np.einsum("nad,a->nd", self._loadings(z[part], codes[part]), combination)
            deviations, weights = loading @ self._nodes.T, self.node_weights(codes[part])
            shift = np.einsum("nk,nk->n", weights, deviations)
            deviations -= shift[:, None]
            result[0, part] = shift
            # Moments of huge rows overflow; these keep the normal density.
            with np.errstate(over="ignore", invalid="ignore"):
                variance = np.einsum("nk,nk,nk->n", weights, deviations, deviations)
                result[1, part] = variance - np.einsum("nd,nd->n", loading, loading)
                result[2, part] = np.einsum("nk,nk->n", weights, deviations**3)
        result[1:][~np.isfinite(result[1:])] = 0.0
        return result

    def averages(self, values_at, z, codes):
        """Averages (n, ...) over the nodes of ``values_at(rows, deviations)``.

        `rows` is a slice of b rows, the deviations are (b, k, a), and the values (b, k, ...).
        """
        results = []
        for part in row_slices(len(z), self.cells, _NODE_CELLS):
            values = values_at(part, self.node_deviations(z[part], codes[part]))
            results.append(np.einsum("bk,bk...->b...", self.node_weights(codes[part]), values))
        return np.concatenate(results)

    def _loadings(self, z, codes):
        """Slopes (n, a, d) of predictors in the coordinates of the nodes."""
        spread, roots = z @ self.factor, self.roots[codes]
        (n, r), a = spread.shape, self.n_outputs
        return np.einsum("nr,nrad->nad", spread, roots.reshape(n, r, a, r * a))

    @property
    def _nodes(self):
        return product_nodes(self.factor.shape[1] * self.n_outputs, self.n_points)[0]


@cache
def product_nodes(n_effects, n_points):
    """Nodes (k, d) and log weights (k,) of a product grid for the standard normal density."""
    axis, logs = quadrature_nodes(n_points)
    grid = np.indices([len(axis)] * n_effects)
    at = grid.reshape(n_effects, len(axis) ** n_effects).T
    weights = logs[at].sum(axis=1)
    relevant = weights > _NEGLIGIBLE if n_effects > 1 else slice(None)
    return axis[at[relevant]], weights[relevant]


def axis_nodes(n_effects, spread, n_points):
    """Nodes an axis, `n_points` for one effect; None if the grid would be too large.

    `spread` is the standard deviation of the predictors between clients.
    """
    if n_effects == 1:
        return n_points
    return next((k for widest, k in _AXIS_NODES.get(n_effects, ()) if spread <= widest), None)


def point_mass_posterior(factor, n_outputs, n_clients):
    """EffectPosterior of clients that do not differ."""
    parts = np.zeros((n_clients, 0, 0)), np.ones((n_clients, 1), dtype=np.float32)
    return EffectPosterior(factor[:, :0], n_outputs, 1, None, *parts)


def effect_posterior(table, stacks, maximum, states, spread, n_points):
    """EffectPosterior of all clients, around the modes of a MarginalMaximum with these `states`."""
    family, a, varying = maximum.family, maximum.family.n_outputs, maximum.factor.any(axis=0)
    factor = maximum.factor[:, varying]
    if not varying.any():
        return point_mass_posterior(factor, a, table.n_clients)
    n_axis, parts = axis_nodes(factor.shape[1] * a, spread, n_points), []
    for stack, state in zip(stacks, states, strict=True):
        effects = choose_mode_system(stack.x, maximum.factor).effects(state)[:, varying]
        features = stack.x[:, :, : len(factor)] @ factor
        offset = stack.predictors(maximum.population)
        rows = family, features, offset, stack.y, stack.w, effects
        parts.append(normal_moments(*rows) if n_axis is None else weighted_nodes(*rows, n_axis))
    return joined_posterior(factor, a, n_axis, [stack.clients for stack in stacks], parts)


def joined_posterior(factor, n_outputs, n_axis, clients, parts):
    """EffectPosterior from arrays of `weighted_nodes` (or `normal_moments` if `n_axis` is None)."""
    order = np.argsort(np.concatenate(clients))
    arrays: Any = [np.concatenate(blocks)[order] for blocks in zip(*parts, strict=True)]
    if n_axis is None:
        return EffectPosterior(factor, n_outputs, 1, arrays[0], None, None)
    return EffectPosterior(factor, n_outputs, n_axis, None, *arrays)


def weighted_nodes(family, features, offset, y, w, effects, n_points):
    """Roots (b, d, d) and node weights (b, k) of the posteriors of clients with n rows each.

    `features` (b, n, r) are slopes of predictors in the effects, `offset` (b, n, a) predictors
    without effects, y and w (b, n), and `effects` (b, r, a) the modes; there are `n_points` nodes
    an axis.
    """
    b, n, r = features.shape
    a = offset.shape[2]
    nodes, log_weights = product_nodes(r * a, n_points)
    roots, weights = np.empty((b, r * a, r * a)), np.empty((b, len(nodes)), dtype=np.float32)
    # exp(x^2 / 2) undoes the weight of the rule, which is for a normal density.
    correction = log_weights + np.sum(nodes**2, axis=1) / 2
    for part in row_slices(b, n * len(nodes) * a, _NODE_CELLS):
        slopes, predictors = features[part], offset[part] + features[part] @ effects[part]
        curvature = Primal(slopes).system(family.terms(predictors, y[part], w[part]).curvature)
        roots[part] = _inverse_roots(curvature)
        shifts = (roots[part] @ nodes.T).reshape(-1, r, a, len(nodes))
        inside = (slopes @ shifts.reshape(len(slopes), r, -1)).reshape(len(slopes), n, a, -1)
        inside = predictors[:, :, None] + inside.transpose(0, 1, 3, 2)
        values = (effects[part][..., None] + shifts).reshape(len(slopes), r * a, -1)
        logs = family.log_likelihood_at_nodes(inside, y[part], w[part])
        logs -= np.sum(values**2, axis=1) / 2
        # Rows of private fits may overflow; their clients keep a normal density.
        logs[~np.isfinite(logs).all(axis=1)] = -np.sum(nodes**2, axis=1) / 2
        weights[part] = softmax(logs + correction, axis=1)
    return roots, weights


def _inverse_roots(curvature):
    """Roots (b, d, d) of the inverses of matrices whose eigenvalues are 1 or more."""
    curvature[~np.isfinite(curvature).all(axis=(1, 2))] = np.eye(curvature.shape[1])
    large = curvature.max(axis=(1, 2)) > _LARGEST_CURVATURE
    roots = np.empty_like(curvature)
    # A triangular root moves little if the matrix does, as eigenvectors may not.
    roots[~large] = np.linalg.inv(np.linalg.cholesky(curvature[~large])).transpose(0, 2, 1)
    values, vectors = np.linalg.eigh(curvature[large])
    roots[large] = vectors / np.sqrt(np.maximum(values, 1.0))[:, None]
    return roots


def normal_moments(family, features, offset, y, w, effects):
    """Posterior means less modes (b, d) to third order, of clients as for `weighted_nodes`."""
    (b, _, r), a = features.shape, offset.shape[2]
    shifts = np.empty((b, r * a))
    for part in row_slices(b, (r * a) ** 2, _NODE_CELLS):
        form, predictors = Primal(features[part]), offset[part] + features[part] @ effects[part]
        terms = family.terms(predictors, y[part], w[part])
        slope_of = partial(family.curvature_slopes, predictors, y[part], w[part])
        shift = form.mean_shift(np.linalg.inv(form.system(terms.curvature)), slope_of)[0]
        shifts[part] = shift.reshape(len(shift), -1)
    return (shifts,)
