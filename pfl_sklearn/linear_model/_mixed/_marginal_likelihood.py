"""Marginal likelihood of regressions with a link: by Laplace's approximation, or by quadrature.

Where every client has one effect v, we integrate by adaptive Gauss-Hermite quadrature: the nodes of
a client lie around the mode of v, at distances of its standard deviation s there. With h(v) the
log-likelihood minus v^2 / 2,

    log I = log s + log sum_k w_k exp(h(mode + s x_k) + x_k^2 / 2).

One point is Laplace's approximation. The gradients are those of the sum, nodes included.

A client whose rows have one class, or counts of 0, shows only on which side its effect lies. Far
from the others, its effect has half a normal density, with an edge much sharper than s. Nodes of
Gauss and Hermite miss the edge: at 15 logits between clients, 61 of them err by up to 1.5e-3 nats
per client where the mode is at the edge, and at 50 logits by 2e-2. So `DENSE` points crowd around
the mode instead, as a trapezoidal rule in t with x = c sinh(t); their error is below 1e-8 and 1e-7
there. Where the population predicts a client's class anyway, the edge is away from the mode, and
the error up to 3e-4 at 12 logits and 5e-3 at 50 (2e-2 and 7e-2 with 61 points).

Arrays of rows have shape (n, b) here: clients come last, so that sums over rows add long vectors.
"""

from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from pfl_sklearn.linear_model._algebra import row_slices
from pfl_sklearn.linear_model._mixed._laplace import (
    CLOSE_ENOUGH,
    MAX_NEWTON,
    damped_newton,
    evaluate_stack,
    is_near_population,
    laplace_information,
    shorten_steps,
)

_MANY_NODES = 7  # points from which the sum hardly depends on where its centre lies
_EFFECT_DECREMENT = 1e-10  # nats, of the last step of one effect: the next would be its square
_CELLS_IN_CACHE = 1 << 17  # rows times nodes at a time: what belongs to them fits the cache
_ROWS_AT_A_TIME = 1 << 14  # with few nodes, so that other arrays fit the cache, too
_SCORES_AT_A_TIME = 1 << 20  # of clients at nodes, in all columns: 8 MB
_POINTS, _MANY_POINTS = 15, 61  # where the user chooses none
DENSE = 121  # points that crowd around the mode
# Logits (log rates) between clients. From 3 on, 15 points leave the standard deviation 5 to 10 %
# low; from FAR_APART on, 61 miss the sharp edge of clients with one class, and DENSE points do not.
_WIDE_SPREAD, FAR_APART = 3.0, 10.0
_GAUSS = 100  # points up to which they are those of Gauss and Hermite
_CROWDED, _REACH = 0.1, 40.0  # c, and the last x: pure clients have s above 0.18, so it is > 7 sds


class MarginalLikelihood:
    """Approximate log marginal likelihood as a function of population, factor and family.

    Each call starts at the modes of the last one, the first at those of `start`, a MarginalMaximum.
    """

    def __init__(self, table, shared, start, n_points):
        self.table, self.family, self.modes_found = table, start.family, True
        self.states = start.states or [None] * len(shared.stacks)
        self._constant = table.constant(start.family)
        self._evaluate, self._inform = (shared, evaluate_stack), (shared, laplace_information)
        if has_one_effect(start.family, start.factor):
            # With one point this is Laplace's approximation as well, in a faster form.
            effects = shared.by_effect(partial(effect_stack, family=start.family))
            self._evaluate = effects, partial(evaluate_quadrature, n_points=n_points)
            if n_points > 1:
                self._inform = effects, partial(quadrature_information, n_points=n_points)

    def __call__(self, population, factor, family=None):
        """Value in nats, gradient (a, p) in the population and (q, r) in the factor.

        None stands for the family that the criterion was made for.
        """
        family = family or self.family
        # Gamma functions of all counts cost much, so we take them once where the family stays.
        constant = self._constant if family is self.family else self.table.constant(family)
        shared, function = self._evaluate
        function = partial(function, family=family, population=population, factor=factor)
        results = shared.evaluate(function, self.states)
        self.states = [result[3] for result in results]
        self.modes_found = all(result[4] for result in results)
        # In the order of the stacks, so that the sum is the same for any number of jobs.
        value, *gradients = (sum(result[k] for result in results) for k in range(3))
        return value + constant, *gradients

    def information(self, population, factor, directions):
        """Minus the second derivatives (a p + t, ...), for factor `directions` (t, q, r)."""
        shared, function = self._inform
        at = {"population": population, "factor": factor, "directions": directions}
        return sum(shared.evaluate(partial(function, family=self.family, **at), self.states))


def choose_n_points(quadrature, family, factor, spread=0.0):
    """Points of the quadrature over a client's effect; 1 is Laplace's approximation.

    `spread` is the standard deviation between clients of the predictors.
    """
    one_effect = has_one_effect(family, factor)
    if quadrature == "laplace":
        return 1
    if quadrature == "auto":
        if not one_effect:
            return 1
        return _POINTS if spread <= _WIDE_SPREAD else _MANY_POINTS if spread <= FAR_APART else DENSE
    if quadrature > 1 and not one_effect:
        classes = f" and {family.n_outputs + 1} classes" if family.n_outputs > 1 else ""
        raise ValueError(
            f"quadrature={quadrature} needs one coefficient that varies (of two classes); got "
            f"{factor.shape[1]} varying coefficients{classes}. Take "
            "'auto' or 'laplace', or let one coefficient vary (random)."
        )
    return quadrature


def has_one_effect(family, factor):
    """Whether clients have one effect, so that a product grid needs no second dimension."""
    return family.n_outputs == 1 and factor.shape[1] == 1


class EffectStack(NamedTuple):
    """Rows of clients of nearly equal size, clients last; columns and offset times the signs."""

    clients: np.ndarray  # (b,)
    columns: np.ndarray  # (p, n, b)
    y: np.ndarray  # (n, b)
    w: np.ndarray | None  # (n, b); None if all are 1
    offset: np.ndarray | None  # (n, b)


class EffectRows(NamedTuple):
    """Rows (n, b) of some clients, and their family."""

    family: Any
    features: np.ndarray  # slopes of the predictors in the effects
    offset: np.ndarray  # predictors without effects
    y: np.ndarray
    w: np.ndarray | None  # None if all are 1

    def of_clients(self, part):
        """The rows of a slice of the clients."""
        arrays: Any = (None if values is None else values[:, part] for values in self[1:])
        return EffectRows(self.family, *arrays)

    def log_likelihoods(self, effects, state):
        """Log-likelihoods (b,) at effects (b,); `state` (n, b) becomes that of the family."""
        predictors = self.features * effects
        predictors += self.offset
        return self.family.summed_log_likelihood(predictors, self.y, self.w, state)

    def scores(self, state):
        """Slopes (n, b) of the rows' log-likelihoods in their predictors."""
        return self._weighted(self.family.score(state, self.y))

    def information(self, state):
        """Minus their second derivatives (n, b)."""
        return self._weighted(self.family.curvature(state, self.y))

    def curvature_slopes(self, state):
        """Slopes (n, b) of the information."""
        return self._weighted(self.family.curvature_slope(state, self.y))

    def _weighted(self, values):
        return values if self.w is None else values * self.w


class _Modes(NamedTuple):
    """Modes of the effects of some clients."""

    effects: np.ndarray  # (b,)
    values: np.ndarray  # (b,), log-likelihoods less penalties
    state: np.ndarray  # (n, b), of the family
    converged: bool  # all of them


@cache
def quadrature_nodes(n_points):
    """Nodes and log weights of quadrature for the standard normal density."""
    if n_points <= _GAUSS:
        nodes, weights = np.polynomial.hermite_e.hermegauss(n_points)
        return nodes, np.log(weights / weights.sum())
    last = np.arcsinh(_REACH / _CROWDED)
    t, distance = np.linspace(-last, last, n_points, retstep=True)
    nodes, slopes = _CROWDED * np.sinh(t), _CROWDED * np.cosh(t)
    return nodes, np.log(distance * slopes / np.sqrt(2 * np.pi)) - nodes**2 / 2


def effect_stack(stack, family):
    """The EffectStack of a RowStack."""
    signs = family.signs(stack.y.T)
    # A copy in either case: the stack may be a view of the user's own array.
    columns = np.ascontiguousarray(stack.x.transpose(2, 1, 0) * signs)
    y = np.ascontiguousarray(stack.y.T, dtype=float)
    # Without weights each step saves a product over all rows.
    w = None if np.all(stack.w == 1) else np.ascontiguousarray(stack.w.T)
    offset = None if stack.offset is None else np.ascontiguousarray(stack.offset.T * signs)
    return EffectStack(stack.clients, columns, y, w, offset)


def _effect_rows(stack, family, population, factor):
    """EffectRows of an EffectStack under population (1, p) and factor (q, 1)."""
    p, n, b = stack.columns.shape
    flat = stack.columns.reshape(p, -1)
    predictors = (population @ flat).reshape(n, b)
    if stack.offset is not None:
        predictors += stack.offset
    features = (factor.T @ flat[: len(factor)]).reshape(n, b)
    return EffectRows(family, features, predictors, stack.y, stack.w)


def evaluate_quadrature(stack, state, *, family, population, factor, n_points):
    """As `evaluate_stack`, for an EffectStack and a factor (q, 1), with `n_points` per client."""
    rows = _effect_rows(stack, family, population, factor)
    n, b = rows.features.shape
    # A copy: the search may come back to the states of an earlier point.
    effects = np.zeros(b) if state is None else state[:, 0, 0].copy()
    by_offset, by_features = np.empty((n, b)), np.empty((n, b))
    value, converged = 0.0, True
    # Laplace's value and slopes are at the mode; those of many nodes hardly move with their centre.
    exact = family.has_dispersion or n_points < _MANY_NODES
    last_decrement = _EFFECT_DECREMENT if exact else CLOSE_ENOUGH
    for part in row_slices(b, n, min(_ROWS_AT_A_TIME, _CELLS_IN_CACHE // n_points)):
        clients = rows.of_clients(part)
        modes = _find_modes(clients, effects[part], last_decrement)
        total, by_offset[:, part], by_features[:, part] = _integrate(clients, modes, n_points)
        effects[part] = modes.effects
        value, converged = value + total, converged and modes.converged
    flat = stack.columns.reshape(len(stack.columns), -1)
    by_population = by_offset.reshape(1, -1) @ flat.T
    by_factor = flat[: len(factor)] @ by_features.reshape(-1, 1)
    return value, by_population, by_factor, effects[:, None, None], converged


def quadrature_information(stack, state, *, family, population, factor, directions, n_points):
    """Minus the second derivatives (p + t, p + t) in the population and t parameters.

    These move the factor along `directions` (t, q, 1). By Louis (1982) they are the mean
    information of the rows at known effects, less the covariance of their scores, over the clients'
    posteriors.
    """
    (p, n, b), q = stack.columns.shape, len(factor)
    rows = _effect_rows(stack, family, population, factor)
    information = np.zeros((p + q, p + q))
    cells = min(_CELLS_IN_CACHE // n_points, n * _SCORES_AT_A_TIME // ((p + q) * n_points))
    for part in row_slices(b, n, cells):
        clients = rows.of_clients(part)
        modes = _find_modes(clients, state[part, 0, 0], CLOSE_ENOUGH)
        information += _louis_information(clients, modes, stack.columns[:, :, part], q, n_points)
    back = np.zeros((p + q, p + len(directions)))
    back[:p, :p], back[p:, p:] = np.eye(p), directions[..., 0].T
    return back.T @ information @ back


def _louis_information(rows, modes, columns, q, n_points):
    """Information (p + q, p + q) of some clients, with columns (p, n, b)."""
    nodes, log_weights = quadrature_nodes(n_points)
    curvature = 1 + _sum_over_rows(rows.features**2, rows.information(modes.state))
    effects = modes.effects + curvature**-0.5 * nodes[:, None]
    values, scores, weights = _at_nodes(rows, effects, with_information=True)
    share = _node_weights(values, nodes, log_weights)[0]
    by_column = np.einsum("pnb,knb->pkb", columns, scores, optimize=True)
    by_column = np.concatenate([by_column, effects * by_column[:q]])
    mean = np.einsum("pkb,kb->pb", by_column, share)
    by_column *= np.sqrt(share)
    by_column = by_column.reshape(len(by_column), -1)
    # Moments of the effect, weighted by the information of a row.
    moments = [np.einsum("kb,knb->nb", share * effects**j, weights).ravel() for j in range(3)]
    flat = columns.reshape(len(columns), -1)
    random = flat[:q]
    total = mean @ mean.T - by_column @ by_column.T
    total[: len(flat), : len(flat)] += (moments[0] * flat) @ flat.T
    across = (moments[1] * random) @ flat.T
    total[len(flat) :, : len(flat)] += across
    total[: len(flat), len(flat) :] += across.T
    total[len(flat) :, len(flat) :] += (moments[2] * random) @ random.T
    return total


def _find_modes(rows, effects, last_decrement):
    """Modes of the effects, from effects (b,), by damped Newton steps."""
    features, state = rows.features, np.empty(rows.features.shape)
    largest = np.abs(features).max(axis=0)
    effects = effects * is_near_population(rows.family, effects * largest)

    def evaluate(effects):
        return rows.log_likelihoods(effects, state) - effects**2 / 2, state

    def newton_step(effects, state):
        residual = _sum_over_rows(features, rows.scores(state)) - effects
        step = residual / (1 + _sum_over_rows(features, features * rows.information(state)))
        return shorten_steps(rows.family, step, step * largest), residual * step

    effects, values, _, converged = damped_newton(
        effects, evaluate, newton_step, last_decrement, MAX_NEWTON
    )
    return _Modes(effects, values, state, bool(converged.all()))


def _integrate(rows, modes, n_points):
    """Summed log integrals of clients, and slopes (n, b) in their offsets and their features."""
    features, centre = rows.features, modes.effects
    nodes, log_weights = quadrature_nodes(n_points)
    scores_there, information = rows.scores(modes.state), rows.information(modes.state)
    pulled = information * features
    curvature = 1 + _sum_over_rows(pulled, features)
    size = curvature**-0.5
    effects = centre + size * nodes[:, None]  # (k, b)
    if n_points == 1:
        values, scores = modes.values[None], scores_there[None]
    else:
        values, scores, _ = _at_nodes(rows, effects)
    slopes = np.einsum("nb,knb->kb", features, scores) - effects
    share, total, highest = _node_weights(values, nodes, log_weights)
    # The nodes move with the mode and with the curvature there, which move with the parameters.
    by_centre = np.sum(share * slopes, axis=0)
    by_size = 1 / size + np.sum(share * slopes * nodes[:, None], axis=0)
    by_curvature = -0.5 * by_size * size**3
    third = rows.curvature_slopes(modes.state) * features * features * by_curvature
    by_mode = (by_centre + _sum_over_rows(third, features)) / curvature
    by_offset, by_features = third - by_mode * pulled, centre * third + 2 * by_curvature * pulled
    by_features += by_mode * (scores_there - centre * pulled)
    by_offset += np.einsum("kb,knb->nb", share, scores)
    by_features += np.einsum("kb,knb->nb", share * effects, scores)
    return float(np.sum(np.log(size * total) + highest)), by_offset, by_features


def _node_weights(values, nodes, log_weights):
    """Posterior weights (k, b) of the nodes, their sums (b,), and logs (b,) of factors before."""
    # exp(x^2 / 2) undoes the weight of the rule, which is for a normal density.
    logs = values + (log_weights + nodes**2 / 2)[:, None]
    highest = logs.max(axis=0)  # exponentials of thousands of negative nats would all be 0
    share = np.exp(logs - highest)
    total = share.sum(axis=0)
    share /= total
    return share, total, highest


def _at_nodes(rows, effects, with_information=False):
    """Log-likelihoods less penalties (k, b) at effects (k, b), scores and information (k, n, b)."""
    scores, values = np.empty((len(effects), *rows.features.shape)), -(effects**2) / 2
    information = np.empty_like(scores) if with_information else None
    for k, effect in enumerate(effects):
        values[k] += rows.log_likelihoods(effect, scores[k])
        if information is not None:
            information[k] = rows.information(scores[k])
        scores[k] = rows.scores(scores[k])
    return values, scores, information


def _sum_over_rows(left, right):
    """Sums (b,) of products over the rows."""
    return (left * right).sum(axis=0)
