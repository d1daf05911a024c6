"""What a client tells the server in a round of a private fit, and what it keeps for itself.

The level varies, and maybe some slopes: q coefficients, the first of the columns. Under the current
population (coefficients b, standard deviations t between clients) a client integrates its own
effects z ~ N(0, I) out: one of them by quadrature, several by Laplace's approximation. With scores
s_j and curvatures v_j of its rows, averaged over z, let Z be the varying columns, G = Z'VZ, and C
the coefficients (q, p) of a regression of all columns on Z with weights V. Its score in b is the
sum of two parts, and so is its information:

    within   sum_j s_j (x_j - C'z_j),       sum_j v_j (x_j - C'z_j) (x_j - C'z_j)'
    between  C' T^-1 E[z],                  C' T^-1 A T^-1 C,    A = I - (I + T G T)^-1

with T = diag(t). The first is 0 for coefficients that vary, and grows with a client's rows. The
second does not, so each has a scale of its own. If the level alone varies, C is the mean of the
columns weighted by v. A third part is for the variances between clients: the gaps
r^2 (E[z^2] - 1), which are the slopes in log t but for their factors, and squares of r^2 times the
diagonal of A.

The server chooses the units u, standard deviations of what a typical client finds for its own
coefficients, from public numbers: u^2 = t^2 + 1 / g for its information g. The factors r = u / t
give the parts between clients their usual size whatever t is; without them these parts vanish with
t, and the noise on them does not. Features whose coefficients do not vary are less their means,
which the server knows from earlier rounds, in the part between clients.

All parts together are clipped to norm 1, once, by the mechanism of the round: that alone bounds
what a client can change. Scales are public. They decide how much is clipped and how much noise an
entry has, not the privacy.

A client's message is the same bits whoever else is in the table: sums over rows run row by row
over at least two clients, rows of weight 0 at the end add exactly 0, and systems are solved entry
by entry. Rounding may be all that is left of a message whose rows cancel, so nothing less would do.
"""

from typing import NamedTuple

import numpy as np

from pfl_sklearn.linear_model._algebra import from_triangle, triangle
from pfl_sklearn.linear_model._mixed._quadrature import EffectRows, nodes_of

_POINTS = 15  # of the quadrature over z
_NEWTON_STEPS = 6  # as many for every client: more for some would depend on who else is there
_LONGEST_STEP = 3.0  # in predictors, of Newton's method
_LARGEST_EFFECT, _LARGEST_GAP = 3.0, 6.0  # r E[z] and gaps are cut, times the factor of the scales
_CELLS = 1 << 17  # rows times nodes at a time
# Typical norms of the parts over the largest ones that rows within the bound can reach.
_WITHIN, _BETWEEN, _BETWEEN_INFORMATION = 0.7, 1.6, 2.3
_APART = 0.25  # share of a squared row by which means of clients differ
_GAP, _SQUARE = 5.0, 8.0  # scales of the third part, whose entries are about 1
_RIDGE = 1e-9  # of a regression on varying columns, which may be the same within a client
_NO_PIVOT = 1e-12  # share of a diagonal entry that is rounding


class RoundPoint(NamedTuple):
    """Where a round is: released or public numbers."""

    population: np.ndarray  # (p,)
    spreads: np.ndarray  # (q,), t
    information: np.ndarray  # (q,), of a typical client on its own coefficients
    means: np.ndarray  # (p,), of the columns, by curvature; 0 where coefficients vary
    covariance: np.ndarray  # (p, p), of the population's error
    variance_noise: np.ndarray | float = 0.0  # (q,), standard deviations of the noise on t^2

    @property
    def units(self):
        """Standard deviations (q,) of what a typical client finds for its own coefficients."""
        return np.sqrt(self.spreads**2 + 1 / self.information)

    @property
    def column_units(self):
        """Those of all columns (p,): features that do not vary go with the level."""
        n_fixed = len(self.population) - len(self.spreads)
        return np.append(self.units, np.full(n_fixed, self.units[0]))


class MessageShape(NamedTuple):
    """Public numbers behind a message of the columns 1, x_1, ..., x_d.

    Features are in a unit in which a row at their bound has the L2 norm of the root of d.
    """

    n_features: int
    rows_cap: float  # rows of a client, beyond which its within part is scaled down
    curvature: float  # largest one of a row
    factor: float = 1.0  # of the scales: the larger, the less is clipped, and the more is noise
    n_varying: int = 1
    usual: float = 1.0  # curvature of a row that information is scaled for, over the largest one

    @property
    def n_fixed(self):
        """Features whose coefficients do not vary."""
        return self.n_features + 1 - self.n_varying

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
        return self.factor * np.sqrt(self.n_varying) * np.array([_GAP, _SQUARE])

    @property
    def scales(self):
        """Divisors of the parts: scores and information within, scores and information between."""
        q, n_fixed = self.n_varying, self.n_fixed
        whole = q + _APART * n_fixed  # of the columns' coefficients C, squared
        within = self.curvature * self.rows_cap
        scales = (
            np.sqrt(within * max(n_fixed, 1)),
            # Spread over d directions, the Frobenius norm is the trace over the root of d.
            _WITHIN * self.usual * within * np.sqrt(max(n_fixed, 1)),
            _BETWEEN * np.sqrt(whole),
            _BETWEEN_INFORMATION * whole / np.sqrt(q),
        )
        return tuple(self.factor * scale for scale in scales)

    @property
    def widths(self):
        """Lengths of the parts."""
        p, n_fixed = self.n_features + 1, self.n_fixed
        return n_fixed, n_fixed * (n_fixed + 1) // 2, p, p * (p + 1) // 2, 2 * self.n_varying

    def messages(self, within, between, variance):
        """Messages (b, k), before they are clipped; clients come last in what they are made of."""
        slope, information = within
        score, around = between
        parts = (slope, triangle(information.T).T, score, triangle(around.T).T)
        scaled = [part / scale for part, scale in zip(parts, self.scales, strict=True)]
        scaled += [part / scale for part, scale in zip(variance, self.variance_scales, strict=True)]
        return np.concatenate(scaled).T

    def split(self, total, noise_std):
        """RoundSums of a noisy mean of messages."""
        ends = np.cumsum(self.widths)[:-1]
        q, n_fixed, scales = self.n_varying, self.n_fixed, self.scales
        slope, information, score, around, variance = np.split(total, ends)
        return RoundSums(
            np.concatenate([np.zeros(q), scales[0] * slope]),
            scales[1] * from_triangle(information, n_fixed),
            scales[2] * score,
            scales[3] * from_triangle(around, q + n_fixed),
            self.variance_scales[:, None] * variance.reshape(2, q),
            noise_std,
        )


class RoundSums(NamedTuple):
    """Means over clients of what a round released, and the noise on an entry of the message.

    Parts between clients are in units: the score in b is within + between / u.
    """

    within: np.ndarray  # (p,), score; 0 for coefficients that vary
    information: np.ndarray  # (p - q, p - q), within
    between: np.ndarray  # (p,)
    around: np.ndarray  # (p, p), information between
    variance: np.ndarray  # (2, q), gaps and squares
    noise_std: float


class ClientView(NamedTuple):
    """What clients of a stack know of themselves under a population."""

    effects: np.ndarray  # (q, b), modes of z
    rows: np.ndarray  # (q, p, b), whitened: their products are C' T^-1 A T^-1 C


def client_messages(stack, effects, shape, outcome, point):
    """Messages (b, k) of the clients of an EffectStack at a RoundPoint, and modes (q, b).

    `effects` (q, b) are modes of the round before.
    """
    rows = effect_rows(stack, outcome, point)
    modes = fixed_modes(rows, effects)
    scores, curvatures, first, second = _averages(rows, modes)
    x, q = stack.columns * _signs(stack), shape.n_varying
    squares, own = _regression(x, curvatures, q)
    moved = x[q:].copy()
    for k in range(q):
        moved -= own[k, q:, None] * x[k]
    share = np.minimum(1.0, shape.rows_cap / np.maximum((stack.w > 0).sum(axis=0), 1))
    slope = np.sum(scores * _signs(stack) * moved, axis=1) * share
    information = _products(moved, curvatures) * share
    raised = (point.units / point.spreads)[:, None]
    mean = np.clip(raised * first, -shape.largest_effect, shape.largest_effect)
    pulls = _pulls(squares, point.spreads) * raised[:, None] * raised
    own[:, q:] *= (point.units[0] / point.units)[:, None, None]
    own[0] -= point.means[:, None]
    gaps = np.clip(raised**2 * (second - 1), -shape.largest_gap, shape.largest_gap)
    diagonal = np.minimum(np.einsum("kkb->kb", pulls) ** 2, shape.largest_gap)
    between = np.sum(own * mean[:, None], axis=0), _sandwich(own, pulls)
    return shape.messages((slope, information), between, (gaps, diagonal)), modes


def client_view(stack, outcome, point):
    """ClientView of the clients of an EffectStack, from a public start."""
    rows = effect_rows(stack, outcome, point)
    q, _, b = rows.features.shape
    # Twice as many steps as in a round: there is no round before.
    modes = fixed_modes(rows, fixed_modes(rows, np.zeros((q, b))))
    state = np.empty(rows.y.shape)
    _values(rows, modes, state)
    squares, own = _regression(stack.columns * _signs(stack), rows.information(state), q)
    inverse = 1 / point.spreads[:, None]
    roots = _roots(_pulls(squares, point.spreads) * inverse[:, None] * inverse)
    return ClientView(modes, np.sum(roots[:, :, None] * own, axis=1))


def effect_rows(stack, outcome, point):
    """EffectRows of clients, with features (q, n, b) of their effects."""
    predictors = np.zeros(stack.y.shape)
    for coefficient, column in zip(point.population, stack.columns, strict=True):
        predictors += coefficient * column
    if stack.offset is not None:
        predictors += stack.offset
    q = len(point.spreads)
    features = point.spreads[:, None, None] * stack.columns[:q]
    return EffectRows(outcome, features, predictors, stack.y, stack.w)


def fixed_modes(rows, effects):
    """Modes (q, b) of effects, by a fixed number of Newton steps of bounded length."""
    state = np.empty(rows.y.shape)
    for _ in range(_NEWTON_STEPS):
        _values(rows, effects, state)
        slope = np.sum(rows.features * rows.scores(state), axis=1) - effects
        inverse = _inverse(_plus_identity(_products(rows.features, rows.information(state))))
        step = np.sum(inverse * slope, axis=1)
        longest = np.abs(np.sum(rows.features * step[:, None], axis=0)).max(axis=0)
        effects = effects + step * np.minimum(1.0, _LONGEST_STEP / longest)
    return effects


def _values(rows, effects, state):
    """Log-likelihoods (b,) at effects (q, b); `state` (n, b) becomes that of the outcome."""
    predictors = rows.offset.copy()
    for feature, effect in zip(rows.features, effects, strict=True):
        predictors += feature * effect
    return rows.family.summed_log_likelihood(predictors, rows.y, rows.w, state)


def _averages(rows, modes):
    """Scores and curvatures (n, b), E[z] and E[z^2] (q, b), averaged over the posterior of z."""
    if len(modes) > 1:
        return _laplace(rows, modes)
    rows = rows._replace(features=rows.features[0])
    parts = [
        _by_quadrature(rows.of_clients(part), modes[0, part]) for part in _in_pairs(*rows.y.shape)
    ]
    scores, curvatures = (np.concatenate([part[k] for part in parts], axis=1) for k in (0, 1))
    first, second = (np.concatenate([part[k] for part in parts])[None] for k in (2, 3))
    return scores, curvatures, first, second


def _by_quadrature(rows, modes):
    """As `_averages`, for one effect, features (n, b) and modes (b,)."""
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


def _laplace(rows, modes):
    """As `_averages`, by Laplace's approximation.

    They are slopes of its log-likelihood, with the curvature that moves with the mode: E[z] is the
    mode and a shift. Without it variances of few rows would be far too small.
    """
    state, features = np.empty(rows.y.shape), rows.features
    _values(rows, modes, state)
    scores, curvatures = rows.scores(state), rows.information(state)
    bend = rows.curvature_slopes(state)
    posterior = _inverse(_plus_identity(_products(features, curvatures)))
    leverage = np.zeros(rows.y.shape)
    for feature, row in zip(features, posterior, strict=True):
        leverage += feature * np.sum(row[:, None] * features, axis=0)
    bend = bend * leverage
    shift = -0.5 * np.sum(posterior * np.sum(features * bend, axis=1), axis=1)
    scores = scores - 0.5 * bend - curvatures * np.sum(features * shift[:, None], axis=0)
    own = np.einsum("kkb->kb", posterior)
    return scores, curvatures, modes + shift, modes**2 + 2 * modes * shift + own


def _regression(x, curvatures, q):
    """Products (q, q, b) of the varying columns, and coefficients (q, p, b) of all on them.

    Columns x (p, n, b) are weighted by curvatures (n, b).
    """
    p, _, b = x.shape
    products = np.empty((q, p, b))
    for k in range(q):
        weighted = curvatures * x[k]
        for j in range(p):
            products[k, j] = np.sum(weighted * x[j], axis=0)
    squares = products[:, :q]
    ridge = squares.copy()
    # Any coefficients give the same score. Without information they are 0, as the effects are.
    for k in range(q):
        ridge[k, k] += _RIDGE * squares[k, k] + np.finfo(float).tiny
    own = np.zeros((q, p, b))
    own[np.arange(q), np.arange(q)] = 1.0
    own[:, q:] = np.sum(_inverse(ridge)[:, :, None] * products[:, q:], axis=1)
    return squares, own


def _pulls(squares, spreads):
    """A (q, q, b), with squares Z'VZ (q, q, b) and spreads (q,)."""
    scaled = squares * spreads[:, None, None] * spreads[:, None]
    pulls = -_inverse(_plus_identity(scaled))
    for k in range(len(spreads)):
        pulls[k, k] += 1.0
    return pulls


def _sandwich(own, middle):
    """Products (p, p, b) of coefficients (q, p, b) with a matrix (q, q, b) between them."""
    right = np.sum(middle[:, :, None] * own, axis=1)
    return np.sum(own[:, :, None] * right[:, None], axis=0)


def _plus_identity(matrices):
    """Matrices (q, q, b) plus I."""
    for k in range(len(matrices)):
        matrices[k, k] += 1.0
    return matrices


def _inverse(matrices):
    """Inverses (q, q, b) of positive definite matrices, by elimination entry by entry."""
    inverse = matrices.copy()
    for k in range(len(inverse)):
        pivot = inverse[k, k].copy()
        inverse[k, k] = 1.0
        row = inverse[k] / pivot
        column = inverse[:, k].copy()
        column[k] = 0.0
        inverse[:, k] = 0.0
        inverse -= column[:, None] * row
        inverse[k] = row
    return inverse


def _roots(matrices):
    """Upper triangles R (q, q, b) with R'R = matrices, which have no negative eigenvalues."""
    left, roots = matrices.copy(), np.zeros(matrices.shape)
    for k in range(len(left)):
        pivot = left[k, k].copy()
        kept = pivot > _NO_PIVOT * matrices[k, k]
        root = np.sqrt(np.where(kept, pivot, 1.0))
        roots[k, k:] = np.where(kept, left[k, k:] / root, 0.0)
        left -= roots[k][:, None] * roots[k]
    return roots


def _signs(stack):
    """Signs (n, b) of the outcome: the first column is 1 times them."""
    return stack.columns[0]


def _in_pairs(n, b):
    """Slices of b >= 2 clients with n rows that fit the cache, none of a single client."""
    size = max(_CELLS // (_POINTS * n), 2)
    starts = list(range(0, b - 1, size))
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], b], strict=True)]


def _products(x, weights):
    """Sums (d, d, b) over the rows of x x', weighted, for x (d, n, b) and weights (n, b)."""
    d, _, b = x.shape
    products = np.empty((d, d, b))
    for i in range(d):
        weighted = weights * x[i]
        for j in range(i + 1):
            products[i, j] = products[j, i] = np.sum(weighted * x[j], axis=0)
    return products
