"""Laplace's approximation of a regression's marginal likelihood: modes, gradients, information.

Row j of client i has the linear predictors u_j = o_j + B x_j + V_i' L' z_j, with

- a known offset o_j, mostly 0, and population coefficients B (a, p);
- a factor L (q, r) of the between-client covariance L L';
- random columns z_j, the first q of x_j;
- standard normal effects V_i (r, a).

The criterion of a client is

    log-likelihood - |V|^2 / 2 - log det(H) / 2,   H = I + sum_j W_j (x) L'z_j z_j'L,

at the mode of V. We stack clients of similar size and solve the smaller of two systems: in the
r effects or, with V = Z L' alpha, in the n rows.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from pfl_sklearn.linear_model._algebra import invert_lower, row_slices, solve_systems
from pfl_sklearn.linear_model._mixed._families import RowTerms

LAST_DECREMENT = 1e-13  # nats; the step with this squared Newton decrement is the last
CLOSE_ENOUGH = 1e-8  # the same where no gradient depends on the mode: its error is about this
MAX_NEWTON = 100
_SHORTEST = 1e-9  # of Newton's step; a shorter one changes nothing
_NEAR_STEPS = 10  # of the longest length
_PATIENCE = 40  # steps after which a search starts anew, from a smoother problem
_COOLING = 4.0  # from one smoothed problem to the next; with 10, modes at 1e7 logits were missed
_SMOOTHED_DECREMENT = 1e-2  # ends the search of a smoothed problem, per unit of its heat
_SLACK = 1e-13  # relative decrease of a mode's criterion that counts as rounding
_CELLS_AT_A_TIME = 1 << 17  # of rows by effects and parameters, so that they fit the cache
_PREDICTOR_STEP = 1e-4  # of predictors: differences of derivatives are then exact to about 1e-8


class Primal(NamedTuple):
    """Modes in the effects: the state (b, r, a) is V."""

    features: np.ndarray  # (b, n, r), Z L

    def deviation(self, state):
        """Predictors (b, n, a) less the population's."""
        return self.features @ state

    def paired(self, state, deviation):
        """Array (b, ...) whose product with another state is the inner product of effects."""
        return state

    def residual(self, score, state):
        """Slope (b, r, a) of the log-likelihood less the penalty in the effects."""
        return self.features.transpose(0, 2, 1) @ score - state

    def system(self, curvature):
        """H (b, r a, r a)."""
        products = weighted_products(self.features, curvature).transpose(0, 2, 1, 4, 3)
        b, r, a, _, _ = products.shape
        return products.reshape(b, r * a, r * a) + np.eye(r * a)

    def effects(self, state):
        """Effects (b, r, a)."""
        return state

    def mean_shift(self, inverse, slope_of):
        """Posterior mean less the mode (b, r, a) to third order, and two arrays for the slopes.

        ``slope_of`` takes variances (b, n, a, a) of predictors to the slopes of their information.
        """
        b, n, r = self.features.shape
        a = inverse.shape[1] // r
        pulled = self.features @ inverse.reshape(b, r, a * r * a)
        pulled = pulled.reshape(b, n, a, r, a)
        slope = slope_of(np.einsum("bnarc,bnr->bnac", pulled, self.features))
        shift = _stacked_products(inverse, -0.5 * self.features.transpose(0, 2, 1) @ slope)
        return shift, slope, pulled

    def by_factor(self, across, curvature, pulled):
        """Slopes (b, n, r) in the factor, from the part that does not come through log det H."""
        return across - np.einsum("bnac,bnarc->bnr", curvature, pulled)


class Dual(NamedTuple):
    """Modes in the rows: the state (b, n, a) is alpha."""

    features: np.ndarray  # (b, n, r), Z L
    kernel: np.ndarray  # (b, n, n), Z L L' Z'

    def deviation(self, state):
        """Predictors (b, n, a) less the population's."""
        return self.kernel @ state

    def paired(self, state, deviation):
        """Array (b, ...) whose product with another state is the inner product of effects."""
        return deviation

    def residual(self, score, state):
        """Scores less the state (b, n, a): 0 at the mode."""
        return score - state

    def system(self, curvature):
        """I + W (Z L L' Z' (x) I) (b, n a, n a), which has the determinant of H."""
        b, n, a, _ = curvature.shape
        system = curvature[:, :, :, None, :] * self.kernel[:, :, None, :, None]
        return system.reshape(b, n * a, n * a) + np.eye(n * a)

    def effects(self, state):
        """Effects (b, r, a)."""
        return self.features.transpose(0, 2, 1) @ state

    def mean_shift(self, inverse, slope_of):
        """As of Primal, as a state (b, n, a)."""
        b, n, _ = self.kernel.shape
        a = inverse.shape[1] // n
        blocks = inverse.reshape(b, n, a, n, a)
        spread = np.einsum("bjl,blajc->bjac", self.kernel, blocks)
        # Slopes of weights take symmetric matrices. This one is, but for rounding.
        slope = slope_of(0.5 * (spread + spread.transpose(0, 1, 3, 2)))
        return _stacked_products(inverse, -0.5 * slope), slope, blocks

    def by_factor(self, across, curvature, blocks):
        """As of Primal."""
        by_log_det = np.einsum("bjakc,bkca->bjk", blocks, curvature)
        return (across - by_log_det) @ self.features


class StackModes(NamedTuple):
    """Modes of the clients of a stack."""

    state: np.ndarray
    predictors: np.ndarray  # (b, n, a)
    terms: NamedTuple  # RowTerms
    value: np.ndarray  # (b,), log-likelihood minus penalty
    converged: np.ndarray  # (b,), bool


def choose_mode_system(x, factor):
    """The smaller of the two systems, for columns (b, n, p) and a factor (q, r)."""
    q, r = factor.shape
    b, n, _ = x.shape
    # A diagonal factor, the default, multiplies columns: no product of matrices.
    if q == r and np.array_equal(factor, np.diag(np.diag(factor))):
        features = x[:, :, :q] * np.diag(factor)
    else:
        features = (x[:, :, :q].reshape(b * n, q) @ factor).reshape(b, n, r)
    if r <= n:  # either way the systems are as small as they can be
        return Primal(features)
    return Dual(features, features @ features.transpose(0, 2, 1))


class _Smoothed(NamedTuple):
    """A family whose log-likelihood at predictors u is `heat` times the original's at u / heat.

    The higher the heat, the smoother the kinks of rows with large predictors.
    """

    family: Any
    heat: float

    @property
    def longest_step(self):
        """Longest step of a predictor: kinks are as far apart as they are smooth."""
        return self.heat * self.family.longest_step

    def terms(self, u, y, w):
        value, score, curvature = self.family.terms(u / self.heat, y, w)
        return RowTerms(self.heat * value, score, curvature / self.heat)


def find_mode(form, family, offset, stack, state=None, last_decrement=LAST_DECREMENT):
    """Modes by damped Newton steps from a state, by default 0; each client stops on its own."""
    # Where predictors reach hundreds, a log-likelihood is linear except for kinks, which stop the
    # steps. Clients that take too many steps start again from zero, through a sequence of smoothed
    # problems.
    if state is None:
        b, n, r = form.features.shape
        state = np.zeros((b, min(n, r), family.n_outputs))
    near = is_near_population(family, np.abs(form.deviation(state)).max(axis=(1, 2)))
    state = state * near[:, None, None]
    mode = _newton_modes(form, family, offset, stack, state, last_decrement, _PATIENCE)
    if mode.converged.all():
        return mode
    size = np.maximum(np.abs(offset).max(axis=(1, 2)), np.abs(form.features).max(axis=(1, 2)))
    # Non-finite predictors cannot be saved; the caller warns.
    lost = ~mode.converged & np.isfinite(size)
    form, offset = type(form)(*(array[lost] for array in form)), offset[lost]
    stack = stack.of_clients(lost)
    heat, state = max(size[lost].max(initial=1.0), 1.0), np.zeros_like(state[lost])
    while heat > 1:  # at 1 the problem is the original one
        last, smoothed = _SMOOTHED_DECREMENT * heat, _Smoothed(family, heat)
        state = _newton_modes(form, smoothed, offset, stack, state, last, MAX_NEWTON).state
        heat /= _COOLING
    again = _newton_modes(form, family, offset, stack, state, last_decrement, MAX_NEWTON)
    for values, new_values in zip(_mode_arrays(mode), _mode_arrays(again), strict=True):
        values[lost] = new_values
    return mode


def _inner(left, right):
    """Inner products (b,) of (b, k, a)."""
    return np.einsum("bka,bka->b", left, right)


def _mode_arrays(mode):
    """Arrays of StackModes, clients first."""
    return mode.state, mode.predictors, *mode.terms, mode.value, mode.converged


def _newton_modes(form, family, offset, stack, state, last_decrement, max_steps):
    """Modes after damped Newton steps from a state, as far as so many steps reach them."""

    def evaluate(state):
        deviation = form.deviation(state)
        terms = family.terms(offset + deviation, stack.y, stack.w)
        penalty = 0.5 * _inner(state, form.paired(state, deviation))
        return terms.value.sum(axis=1) - penalty, (deviation, terms)

    def newton_step(state, details):
        _, terms = details
        residual = form.residual(terms.score, state)
        step = solve_systems(form.system(terms.curvature), residual)
        shift = form.deviation(step)
        decrements = _inner(residual, form.paired(step, shift))
        return shorten_steps(family, step, np.abs(shift).max(axis=(1, 2))), decrements

    state, value, (deviation, terms), converged = damped_newton(
        state, evaluate, newton_step, last_decrement, max_steps
    )
    return StackModes(state, offset + deviation, terms, value, converged)


def shorten_steps(family, steps, shifts):
    """Newton steps (b, ...), the shorter the further they shift predictors, `shifts` (b,)."""
    if family.longest_step == np.inf:
        return steps
    with np.errstate(divide="ignore"):
        shares = np.minimum(family.longest_step / np.abs(shifts), 1.0)
    return _scale_steps(steps, shares)


def _scale_steps(steps, shares):
    """Steps (b, ...) times shares (b,)."""
    return shares.reshape(-1, *[1] * (steps.ndim - 1)) * steps


def is_near_population(family, shifts):
    """Whether (b,) Newton's method may start at predictors `shifts` (b,) from the population."""
    # The last mode may be far off under another factor, where large exponentials leave steps of 1.
    return np.abs(shifts) <= _NEAR_STEPS * family.longest_step


def damped_newton(points, evaluate, newton_step, last_decrement, max_steps):
    """Points (b, ...) of clients at which their values are largest; each client stops on its own.

    ``evaluate(points)`` returns values (b,) and details; ``newton_step(points, details)`` steps and
    squared Newton decrements (b,). A step below `last_decrement` is a client's last. Returns
    points, values, details and whether (b,) the search converged.
    """
    values, details = evaluate(points)
    moving = np.ones(len(points), dtype=bool)
    for _ in range(max_steps):
        steps, decrements = newton_step(points, details)
        # A client that stopped does not move, so its mode does not depend on the others.
        size = moving.astype(float)
        while True:
            new_points = points + _scale_steps(steps, size)
            new_values, details = evaluate(new_points)
            # NaN is worse, too: exponentials of a long step may overflow.
            worse = ~(new_values >= values - _SLACK * (1 + np.abs(values))) & (size > _SHORTEST)
            if not worse.any():
                break
            size[worse] /= 2
        points, values = new_points, new_values
        moving &= ~(decrements < last_decrement)
        if not moving.any():
            break
    return points, values, details, ~moving


def evaluate_stack(stack, state, *, family, population, factor):
    """Criterion of a stack's clients, its gradients (a, p) and (q, r), state, and whether found.

    The gradients are in the population and in the factor. Without a `state` the search starts at 0.
    """
    form = choose_mode_system(stack.x, factor)
    mode = find_mode(form, family, stack.predictors(population), stack, state)
    system = form.system(mode.terms.curvature)
    log_det = np.linalg.slogdet(system)[1]
    slope_of = partial(family.curvature_slopes, mode.predictors, stack.y, stack.w)
    score, across = criterion_slopes(form, mode, np.linalg.inv(system), slope_of)
    columns = stack.x.reshape(-1, stack.x.shape[-1])
    by_population = score.reshape(len(columns), -1).T @ columns
    by_factor = columns[:, : len(factor)].T @ across.reshape(len(columns), -1)
    value = float(np.sum(mode.value - 0.5 * log_det))
    return value, by_population, by_factor, mode.state, bool(mode.converged.all())


def weighted_products(columns, weight):
    """Sums (b, a, f, a, f) over rows of products of columns (b, n, f), weighted (b, n, a, a)."""
    (b, _, f), a = columns.shape, weight.shape[-1]
    products, across = np.empty((b, a, f, a, f)), columns.transpose(0, 2, 1)
    for k in range(a):
        for c in range(k + 1):
            block = across @ (weight[..., k, c, None] * columns)
            products[:, k, :, c] = products[:, c, :, k] = block
    return products


def _stacked_products(matrices, right):
    """Products (b, k, a) of matrices (b, k a, k a)."""
    return (matrices @ right.reshape(*matrices.shape[:2], 1)).reshape(right.shape)


def criterion_slopes(form, mode, inverse, slope_of):
    """Slopes of the criterion in u (b, n, a) and, through Z L, in the factor (b, n, r)."""
    terms, state = mode.terms, mode.state
    shift, slope, blocks = form.mean_shift(inverse, slope_of)
    # The direct part, and those through log det H and the mode.
    through_mode = (terms.curvature @ form.deviation(shift)[..., None])[..., 0]
    total = terms.score - 0.5 * slope - through_mode
    across = total @ state.transpose(0, 2, 1) + terms.score @ shift.transpose(0, 2, 1)
    return total, form.by_factor(across, terms.curvature, blocks)


def laplace_information(stack, state, *, family, population, factor, directions):
    """Minus the second derivatives (a p + t, a p + t) in the population and in t parameters.

    With these the factor moves along `directions` (t, q, r); other arguments are those of
    `evaluate_stack`. A client's criterion is c = f - log det(H) / 2 at the mode V of its penalized
    log-likelihood f, whose slope there is 0 and whose curvature is -H. With the multiplier
    mu = -H^-1 (log det H)_V / 2, the second derivatives of c are those of

        f + mu' f_V - log det(H) / 2

    along directions in which a parameter moves itself and the mode: its slope in V is 0, so the
    mode's own curvature does not matter. Differences of gradients agree, but cost one evaluation a
    parameter.
    """
    (a, p), (t, _, r) = population.shape, directions.shape
    total, cells = np.zeros((a * p + t, a * p + t)), a * a * r * (t + a * r) + a * (a * p + t)
    for part in row_slices(len(stack.x), stack.x.shape[1] * cells, _CELLS_AT_A_TIME):
        clients = stack.of_clients(part)
        total += _stack_information(clients, family, population, factor, directions, state[part])
    return total


def _stack_information(stack, family, population, factor, directions, state):
    """As `laplace_information`. Effects are in units in which H is the identity."""
    x, y, w, a = stack.x, stack.y, stack.w, len(population)
    b, n, p = x.shape
    form = choose_mode_system(x, factor)
    mode = find_mode(form, family, stack.predictors(population), stack, state)
    u, (_, score, curvature) = mode.predictors, mode.terms
    lower = np.linalg.cholesky(Primal(form.features).system(curvature))
    whitening = invert_lower(lower)  # C with C'C the inverse of H
    blocks = _whitened_blocks(form.features[:, :, None], whitening, a)[..., 0, :]  # (b, n, a, r a)
    # Slopes of features in parameters of the factor, and so of predictors and their blocks.
    by_factor = np.einsum("bnq,tqr->bntr", x[:, :, : len(factor)], directions, optimize=True)
    direct = np.einsum("bntr,bra->bnat", by_factor, form.effects(mode.state), optimize=True)
    predictors = np.concatenate([np.kron(np.eye(a), x[:, :, None]), direct], axis=3)
    by_factor = _whitened_blocks(by_factor, whitening, a)  # (b, n, a, t, r a)
    # Slopes of the mode in parameters (b, r a, a p + t), and through it of predictors.
    rows = blocks.reshape(b, n * a, -1)
    effects = -rows.swapaxes(1, 2) @ (curvature @ predictors).reshape(b, n * a, -1)
    effects[:, :, a * p :] += np.einsum("bna,bnatr->brt", score, by_factor)
    predictors += (rows @ effects).reshape(predictors.shape)
    spread = blocks @ blocks.swapaxes(2, 3)
    slope = family.curvature_slopes(u, y, w, spread)
    multiplier = -0.5 * np.einsum("bnar,bna->br", blocks, slope)
    shift = np.einsum("bnar,br->bna", blocks, multiplier)[..., None]

    def by_mode(u):
        """Minus the slopes, in predictors, of what depends on them through mode and log det H."""
        by_multiplier = (family.terms(u, y, w).curvature @ shift)[..., 0]
        return by_multiplier + 0.5 * family.curvature_slopes(u, y, w, spread)

    curvature_slope = _differences(lambda u: family.terms(u, y, w).curvature, u)
    information = _sum_products((curvature + _differences(by_mode, u)) @ predictors, predictors)
    penalized = whitening.swapaxes(1, 2) @ effects  # in the units of the penalty
    information += _sum_products(penalized, penalized)
    slopes = _slopes_of_h(blocks, by_factor, curvature, curvature_slope, predictors)
    information -= 0.5 * _sum_products(slopes, slopes)
    # A parameter of the factor rotates the blocks, and so the effect of others on the mode.
    along = curvature @ np.einsum("bnatr,br->bnat", by_factor, multiplier)
    along += np.einsum("bnctr,bndr,bncde->bnet", by_factor, blocks, curvature_slope, optimize=True)
    across = _sum_products(along, predictors)
    across -= _sum_products(np.einsum("bna,bnatr->brt", score - by_mode(u), by_factor), effects)
    information[a * p :] += across
    information[:, a * p :] += across.T
    weighted = np.einsum("bnac,bnctr->bnart", curvature, by_factor, optimize=True)
    information[a * p :, a * p :] += _sum_products(weighted, by_factor.swapaxes(3, 4))
    return information


def _whitened_blocks(features, whitening, a):
    """Whitened blocks (b, n, a, t, r a) of features (b, n, t, r), the same for every predictor."""
    b, n, t, r = features.shape
    blocks = np.zeros((b, n, a, t, r, a))
    for k in range(a):
        blocks[:, :, k, :, :, k] = features
    return blocks.reshape(b, n, a, t, r * a) @ whitening[:, None, None].swapaxes(3, 4)


def _differences(function, u):
    """Slopes (..., a) of a function of predictors u (b, n, a)."""
    steps = _PREDICTOR_STEP * np.eye(u.shape[-1])
    slopes = [(function(u + step) - function(u - step)) / (2 * _PREDICTOR_STEP) for step in steps]
    return np.stack(slopes, axis=-1)


def _slopes_of_h(blocks, feature_slopes, curvature, curvature_slope, predictors):
    """Slopes (b, r a, r a, a p + t) of the whitened H in the parameters."""
    b, n, a, r = blocks.shape
    t = feature_slopes.shape[3]
    by_predictor = np.einsum("bncde,bndr->bnecr", curvature_slope, blocks, optimize=True)
    squares = (blocks[:, :, None].swapaxes(3, 4) @ by_predictor).reshape(b, n * a, r * r)
    slopes = squares.swapaxes(1, 2) @ predictors.reshape(b, n * a, -1)
    slopes = slopes.reshape(b, r, r, -1)
    by_feature = np.einsum("bnar,bnats->brst", curvature @ blocks, feature_slopes, optimize=True)
    slopes[..., slopes.shape[3] - t :] += by_feature + by_feature.swapaxes(1, 2)
    return slopes


def _sum_products(left: Any, right: Any):
    """Products (k, l) of arrays (..., k) and (..., l), summed over all else."""
    others = tuple(range(left.ndim - 1))
    return np.tensordot(left, right, (others, others))
