"""What a client tells the server in a round of a private fit, and what it keeps for itself.

One coefficient varies, the level. Under the current population (coefficients b, standard deviation
t between clients) a client integrates its own effect z ~ N(0, 1) out. Its score in b is the sum of
two parts, and so is its information:

    within   sum_j s_j (x_j - xbar),        sum_j v_j (x_j - xbar) (x_j - xbar)'
    between  r E[z] xbar,                   r^2 a xbar xbar'

with scores s_j and curvatures v_j averaged over z, xbar the mean of the columns weighted by v,
d the sum of v, and a = t^2 d / (1 + t^2 d). The first grows with a client's rows, the second does
not, so each has a scale of its own. A third part is for the variance between clients: the gap
r^2 (E[z^2] - 1), which is the slope in log t but for its factor, and (r^2 a)^2.

The server chooses the unit u, the standard deviation of what a typical client finds for its own
level, from public numbers: u^2 = t^2 + 1 / d for its d. The factor r = u / t gives the parts
between clients their usual size whatever t is; without it they vanish with t, and the noise on them
does not. The slope in b is within + between / u.

All parts together are clipped to norm 1, once, by the mechanism of the round: that alone bounds
what a client can change. Scales are public. They decide how much is clipped and how much noise an
entry has, not the privacy.

A client's message is the same bits whoever else is in the table: sums over rows run row by row
over at least two clients, and rows of weight 0 at the end add exactly 0. Rounding may be all that
is left of a message whose rows cancel, so nothing less would do.
"""

from typing import Any, NamedTuple

import numpy as np

from pfl_sklearn.linear_model._glmm._quadrature import EffectRows, nodes_of

_POINTS = 15  # of the quadrature over z
_NEWTON_STEPS = 6  # as many for every client: more for some would depend on who else is there
_LONGEST_STEP = 3.0  # in predictors, of Newton's method
_LARGEST_EFFECT, _LARGEST_GAP = 3.0, 6.0  # r E[z] and the gap are cut, times the scales' factor
_CELLS = 1 << 17  # rows times nodes at a time
# Typical norms of the parts over the largest ones that rows within the bound can reach.
_WITHIN, _BETWEEN, _BETWEEN_INFORMATION, _APART = 0.7, 1.6, 2.3, 0.25
_GAP, _SQUARE = 5.0, 8.0  # scales of the third part, whose entries are about 1


class MessageShape(NamedTuple):
    """Public numbers behind a message of the columns 1, x_1, ..., x_d."""

    n_features: int
    feature_bound: float  # L2 norm of a row's features
    rows_cap: float  # rows of a client, beyond which its within part is scaled down
    curvature: float  # largest one of a row
    factor: float = 1.0  # of the scales: the larger, the less is clipped, and the more is noise

    @property
    def largest_effect(self):
        """Where r E[z] is cut."""
        return self.factor * _LARGEST_EFFECT

    @property
    def largest_gap(self):
        """Where a gap is cut, and a square."""
        return self.factor * _LARGEST_GAP

    @property
    def variance_scales(self):
        """Divisors (2,) of gaps and squares."""
        return self.factor * np.array([_GAP, _SQUARE])

    @property
    def scales(self):
        """Divisors of the parts: scores and information within, scores and information between."""
        d, size = self.n_features, self.feature_bound
        whole = 1 + _APART * size**2  # of the columns' client means, squared
        within = self.curvature * self.rows_cap
        scales = (
            np.sqrt(within) * size,
            # Spread over d directions, the Frobenius norm is the trace over the root of d.
            _WITHIN * within * size**2 / np.sqrt(max(d, 1)),
            _BETWEEN * np.sqrt(whole),
            _BETWEEN_INFORMATION * whole,
        )
        return tuple(self.factor * scale for scale in scales)

    @property
    def widths(self):
        """Lengths of the parts."""
        d = self.n_features
        return d, d * (d + 1) // 2, d + 1, (d + 1) * (d + 2) // 2, 2

    def messages(self, within, between, variance):
        """Messages (b, k), before they are clipped."""
        slope, information = within
        score, around = between
        parts = (slope, _triangle(information), score, _triangle(around))
        scaled = [part / scale for part, scale in zip(parts, self.scales, strict=True)]
        return np.concatenate([*scaled, variance / self.variance_scales], axis=1)

    def split(self, total, noise_std):
        """RoundSums of a noisy mean of messages."""
        ends = np.cumsum(self.widths)[:-1]
        d, scales = self.n_features, self.scales
        slope, information, score, around, variance = np.split(total, ends)
        return RoundSums(
            np.concatenate([[0.0], scales[0] * slope]),
            scales[1] * _matrix(information, d),
            scales[2] * score,
            scales[3] * _matrix(around, d + 1),
            self.variance_scales * variance,
            noise_std,
        )


class RoundSums(NamedTuple):
    """Means over clients of what a round released, and the noise on an entry of the message."""

    within: np.ndarray  # (p,), score; 0 for the intercept
    information: np.ndarray  # (d, d), within
    between: np.ndarray  # (p,), r E[z] xbar
    around: np.ndarray  # (p, p), r^2 a xbar xbar'
    variance: np.ndarray  # (2,), gap and square
    noise_std: float


class ClientView(NamedTuple):
    """What clients of a stack know of themselves under a population."""

    effects: np.ndarray  # (b,), modes of z
    total: np.ndarray  # (b,), d
    centre: np.ndarray  # (p, b), xbar


def client_messages(stack, effects, shape, outcome, population, t, unit, means):
    """Messages (b, k) of the clients of an EffectStack, and modes (b,).

    `effects` (b,) are modes of the round before, `unit` is the server's u, and `means` (p,) are
    about those of the columns, 0 for the level.
    """
    rows = effect_rows(stack, outcome, population, t)
    modes = fixed_modes(rows, effects)
    parts = [_averages(rows.of_clients(part), modes[part]) for part in _in_pairs(*rows.y.shape)]
    scores, curvatures = (np.concatenate([part[k] for part in parts], axis=1) for k in (0, 1))
    first, second = (np.concatenate([part[k] for part in parts]) for k in (2, 3))
    total, centre, x = _centre(stack, curvatures)
    moved = x[1:] - centre[1:, None]
    share = np.minimum(1.0, shape.rows_cap / np.maximum((stack.w > 0).sum(axis=0), 1))[:, None]
    slope = np.sum(scores * _signs(stack) * moved, axis=1).T * share
    information = _products_over_rows(moved, curvatures) * share[..., None]
    raised = unit / t
    mean = np.clip(raised * first, -shape.largest_effect, shape.largest_effect)
    pull = unit**2 * total / (1 + t**2 * total)
    apart = centre - means[:, None]
    around = np.einsum("b,pb,qb->bpq", pull, apart, apart)
    gap = np.clip(raised**2 * (second - 1), -shape.largest_gap, shape.largest_gap)
    square = np.minimum(pull**2, shape.largest_gap)
    messages = shape.messages(
        (slope, information),
        ((mean * apart).T, around),
        np.column_stack([gap, square]),
    )
    return messages, modes


def client_view(stack, outcome, population, t):
    """ClientView of the clients of an EffectStack, from a public start."""
    rows = effect_rows(stack, outcome, population, t)
    effects = np.zeros(rows.features.shape[1])
    # Twice as many steps as in a round: there is no round before.
    modes = fixed_modes(rows, fixed_modes(rows, effects))
    state = np.empty(rows.features.shape)
    rows.log_likelihoods(modes, state)
    total, centre, _ = _centre(stack, rows.information(state))
    return ClientView(modes, total, centre)


def effect_rows(stack, outcome, population, t):
    """EffectRows of clients whose level varies with standard deviation t."""
    predictors = np.zeros(stack.y.shape)
    for coefficient, column in zip(population, stack.columns, strict=True):
        predictors += coefficient * column
    if stack.offset is not None:
        predictors += stack.offset
    return EffectRows(outcome, t * stack.columns[0], predictors, stack.y, stack.w)


def fixed_modes(rows, effects):
    """Modes (b,) of effects, by a fixed number of Newton steps of bounded length."""
    state, longest = np.empty(rows.features.shape), np.abs(rows.features).max(axis=0)
    for _ in range(_NEWTON_STEPS):
        rows.log_likelihoods(effects, state)
        slope = np.sum(rows.features * rows.scores(state), axis=0) - effects
        curvature = 1 + np.sum(rows.features**2 * rows.information(state), axis=0)
        step = slope / curvature
        limit = np.divide(_LONGEST_STEP, longest, out=np.full(len(step), np.inf), where=longest > 0)
        effects = effects + np.clip(step, -limit, limit)
    return effects


def _averages(rows, modes):
    """Scores and curvatures (n, b), E[z] and E[z^2] (b,), averaged over the posterior of z."""
    nodes, log_weights = nodes_of(_POINTS)
    state = np.empty(rows.features.shape)
    rows.log_likelihoods(modes, state)
    size = (1 + np.sum(rows.features**2 * rows.information(state), axis=0)) ** -0.5
    effects = modes + size * nodes[:, None]  # (k, b)
    states = np.empty((_POINTS, *rows.features.shape))
    logs = np.stack([
        rows.log_likelihoods(effect, state)
        for effect, state in zip(effects, states, strict=True)
    ])  # fmt: skip
    # exp(x^2 / 2) undoes the weight of the rule, which is for a normal density.
    logs += (log_weights + nodes**2 / 2)[:, None] - effects**2 / 2
    share = np.exp(logs - logs.max(axis=0))
    share /= share.sum(axis=0)
    scores, curvatures = np.zeros(rows.features.shape), np.zeros(rows.features.shape)
    for weight, each in zip(share, states, strict=True):
        scores += weight * rows.scores(each)
        curvatures += weight * rows.information(each)
    return scores, curvatures, np.sum(share * effects, axis=0), np.sum(share * effects**2, axis=0)


def _centre(stack, curvatures):
    """Sums (b,) of curvatures, means (p, b) of the columns weighted by them, and the columns."""
    x = stack.columns * _signs(stack)
    total = np.sum(curvatures, axis=0)
    weighted = np.sum(x * curvatures, axis=1)
    # Without information there is no mean; the effect then has none either.
    centre = np.divide(weighted, total, out=np.zeros_like(weighted), where=total > 0)
    return total, centre, x


def _signs(stack):
    """Signs (n, b) of the outcome: the first column is 1 times them."""
    return stack.columns[0]


def _in_pairs(n, b):
    """Slices of b >= 2 clients with n rows that fit the cache, none of a single client."""
    size = max(_CELLS // (_POINTS * n), 2)
    starts = list(range(0, b - 1, size))
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], b], strict=True)]


def _products_over_rows(x, weights):
    """Sums (b, d, d) over the rows of x x', weighted, for x (d, n, b) and weights (n, b)."""
    d, _, b = x.shape
    products = np.empty((b, d, d))
    for i in range(d):
        weighted = weights * x[i]
        for j in range(i + 1):
            products[:, i, j] = products[:, j, i] = np.sum(weighted * x[j], axis=0)
    return products


def _triangle(matrices):
    """Upper triangles (b, k) of symmetric matrices (b, p, p), of the same norm."""
    rows, columns = np.triu_indices(matrices.shape[1])
    return matrices[:, rows, columns] * np.where(rows == columns, 1.0, np.sqrt(2))


def _matrix(triangle, p):
    """Symmetric matrix (p, p) of such a triangle (k,)."""
    rows, columns = np.triu_indices(p)
    matrix: Any = np.zeros((p, p))
    matrix[rows, columns] = triangle / np.where(rows == columns, 1.0, np.sqrt(2))
    return matrix + np.triu(matrix, 1).T
