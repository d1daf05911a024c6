r"""Private models in which all coefficients vary, with a variance for each, from noisy rounds.

As in `_private_variances`, but the parts of a message are others. Under the population of a round a
client's standardized effects z ~ N(0, I) have the posterior mean E[z], and A is the information of
its rows on the coefficients, in units of their standard deviations: A = D^1/2 X' V^-1 X D^1/2, with
eigenvalues of at most 1 however many rows there are. A client sends

    effects       (1, E[z]) (1, E[z])',
    information   A, and the squares of its entries,
    within        w |rows less the client's own least squares|^2 / (n - their rank).

The sum of E[z] is that of A times the step to the population. With the variances x_l D_l and
rho sigma^2 in place of those of the round, E[z_k]^2 has the mean

    sum_l x_l A_kl^2 + rho (A_kk - sum_l A_kl^2),

so that the variances follow from sums. All parts are squares or positive semi-definite, so that a
replaced client moves their sum by at most the root of 2.
"""

from typing import NamedTuple

import numpy as np

from pfl_sklearn.linear_model._algebra import from_triangle, triangle
from pfl_sklearn.linear_model._private._linear_population import (
    LARGEST_ENTRY,
    whiten_batch,
    with_residuals,
)
from pfl_sklearn.linear_model._private._linear_variances import (
    CONSTANT,
    ROUND_SHARES,
    after_rounds,
    kept_shares,
    largest_scales,
    posterior_mean,
    release_mechanism,
    row_weights,
)
from pfl_sklearn.privacy._mechanisms._noise import noise_generator

# Scales of the entries: of E[z] with three coefficients, of A per root of their number, and of
# residuals in standard deviations; found by trials.
_EFFECT, _INFORMATION, _WITHIN = 2.6, 1.4, 2.0
_FIRST_EFFECT = 4.0  # of E[z], before anything is known of the population
_LARGEST_EFFECT = 1e3
_START_LEVEL, _START_SLOPE = 1 / 3, 1 / 6  # in target bounds, and over the feature bound
_COEFFICIENT_SD = 2.0  # prior, in target_bound / feature_bound, as for known variances
_CAUTION = 0.5  # standard deviations of the noise that scales add to a variance
_LEAST_SQUARE = 0.05  # of A_kk, where noise leaves less
_FASTEST_FALL = 1 / 30  # of a variance in a round, after which it could not come back
_PASSES = 3
_EXPLAINED = 1e-8  # share of a column's length within a client that is rounding
# Noise on a variance, over it, that is too much; predicted for A_kk = 1 / 2, by public numbers.
_TOO_NOISY, _TYPICAL_SQUARE = 0.5, 0.25


class SlopeState(NamedTuple):
    """What is public before a round."""

    population: np.ndarray  # (q,)
    covariance: np.ndarray  # (q, q), of its error
    between: np.ndarray  # (q,), variances
    noise: float  # sigma^2
    noise_error: float  # standard deviation of the privacy noise on sigma^2
    between_noise: np.ndarray  # (q,), of that on the variances
    most_kept: float  # share of messages that clipping kept in the round before, at most
    within_scale: float  # squared, of residuals of a client's own least squares
    effect_scales: np.ndarray  # (q,), of E[z]


class EffectSums(NamedTuple):
    """Released means over clients, and the noise on a diagonal entry of the message."""

    effects: np.ndarray  # (q,), E[z]
    squares: np.ndarray  # (q,), E[z]^2
    information: np.ndarray  # (q, q), A
    squared: np.ndarray  # (q, q), squares of the entries of A
    within: float  # sigma^2
    std: float
    within_std: float
    most_kept: float  # share of messages


class SlopeServer(NamedTuple):
    """Public numbers behind the rounds."""

    units: np.ndarray  # (q,), of coefficients: one over the feature bound, 1 for the intercept
    target_bound: float
    sizes: np.ndarray  # (m,), rows of every client
    known_noise: float | None  # sigma^2
    factor: float  # of the scales
    has_intercept: bool

    @property
    def n_random(self):
        """Number q of coefficients."""
        return len(self.units)

    @property
    def effect_scale(self):
        """Smallest scale of E[z]; q of them share one bound."""
        return _EFFECT * self.factor * (self.n_random / 3) ** 0.25

    @property
    def information_scale(self):
        """Scale of A, whose norm is at most the root of q."""
        return _INFORMATION * np.sqrt(self.n_random)

    @property
    def within_weights(self):
        """Weights (m,) of variances within clients."""
        return row_weights(self.sizes - self.n_random)

    def begin(self):
        """The SlopeState of the first round."""
        q, prior = self.n_random, (_COEFFICIENT_SD * self.target_bound * self.units) ** 2
        start = np.full(q, _START_SLOPE)
        start[: self.has_intercept] = _START_LEVEL
        noise = (_START_LEVEL * self.target_bound) ** 2
        return SlopeState(
            np.zeros(q),
            np.diag(prior),
            (start * self.target_bound * self.units) ** 2,
            noise if self.known_noise is None else self.known_noise,
            0.0,
            np.zeros(q),
            1.0,
            0.5 * self.target_bound**2,
            np.full(q, _FIRST_EFFECT / _EFFECT * self.effect_scale),
        )

    def next_state(self, total, state, noise_std):
        """The SlopeState after a round with this noisy sum of messages."""
        sums = self._sums(total, state, noise_std)
        step, covariance = self._step(sums, state)
        sds = np.sqrt(state.between)
        noise, error = self.known_noise, 0.0
        if noise is None:
            error = sums.within_std
            noise = float(min(max(sums.within, error), self.target_bound**2))
        between, release = self._variances(sums, step, covariance, state, noise)
        covariance = covariance * np.multiply.outer(sds, sds)
        # Effects of the next round are in units of the new variances.
        wider = (between + _CAUTION * release + np.diag(covariance)) / between
        scales = np.minimum(self.effect_scale * np.sqrt(wider), _LARGEST_EFFECT)
        within = (_WITHIN * self.factor) ** 2 * (noise + _CAUTION * error)
        return SlopeState(
            state.population + step * sds,
            covariance,
            between,
            noise,
            error,
            release,
            sums.most_kept,
            min(within, state.within_scale),
            scales,
        )

    def _sums(self, total, state, noise_std):
        """EffectSums of a noisy sum of messages."""
        q, m = self.n_random, len(self.sizes)
        ends = np.cumsum([(q + 1) * (q + 2) // 2, q * (q + 1) // 2, q * (q + 1) // 2])
        effects, information, squared, within = np.split(total, ends)
        effects = from_triangle(effects, q + 1)
        kept, most_kept = kept_shares(effects[0, 0], noise_std, m)
        whole, scales = kept * m, state.effect_scales
        information = from_triangle(information, q) * self.information_scale / whole
        values, vectors = np.linalg.eigh(information)
        rows = kept * max(self.within_weights.sum(), 1.0)
        return EffectSums(
            effects[0, 1:] * CONSTANT * scales / whole,
            np.diag(effects)[1:] * scales**2 / whole,
            (vectors * np.clip(values, 0.0, 1.0)) @ vectors.T,
            from_triangle(squared, q) * self.information_scale / whole,
            float(within[0]) * state.within_scale / rows,
            noise_std / whole,
            noise_std * state.within_scale / rows,
            most_kept,
        )

    def _step(self, sums, state):
        """Step (q,) of the population in standard deviations, and its covariance (q, q)."""
        prior = state.between / (_COEFFICIENT_SD * self.target_bound * self.units) ** 2
        origin = -state.population / np.sqrt(state.between)
        step, gram = np.zeros(self.n_random), sums.information
        sampling = gram / len(self.sizes)  # E[z] has the variance A
        covariance = gram
        for _ in range(_PASSES):
            moved = (sums.std * self.information_scale) ** 2 / 2 * np.sum(step**2)
            noise = (sums.std * CONSTANT * state.effect_scales) ** 2 / 2 + moved
            pulled = np.linalg.solve(np.diag(noise) + sampling, gram)
            covariance = np.linalg.inv(gram @ pulled + np.diag(prior))
            step = covariance @ (pulled.T @ sums.effects + prior * origin)
        return step, covariance

    def _variances(self, sums, step, covariance, state, noise):
        """Variances (q,) of the coefficients, and the privacy noise on them (q,)."""
        gram, ratios = sums.information, np.ones(self.n_random)
        moved, own = gram @ step, np.diag(gram)
        left = sums.squares - 2 * sums.effects * moved + moved**2
        left = left + np.diag(gram @ covariance @ gram)  # a fit of noise leaves too little
        others = sums.squared - np.diag(np.diag(sums.squared))
        weight = np.maximum(np.maximum(np.diag(sums.squared), own**2), _LEAST_SQUARE)
        by_noise = noise / state.noise * (own - weight - others.sum(axis=1))
        for _ in range(_PASSES):
            found = (left - by_noise - others @ ratios) / weight
            ratios = np.clip(found, 0.0, 1 / _LEAST_SQUARE)
        release = sums.std * state.effect_scales**2 / weight
        sampling = 2 / len(self.sizes) * np.maximum(found, 0.0) ** 2 / np.minimum(weight, 1.0)
        stds = np.sqrt(release**2 + (sums.std * self.information_scale / weight) ** 2 + sampling)
        scaled = state.between / self.units**2  # in units of the target, as the noise variance
        means = [
            posterior_mean(k * variance, std * variance, noise)
            for k, std, variance in zip(found, stds, scaled, strict=True)
        ]
        between = np.clip(means, _FASTEST_FALL * scaled, self.target_bound**2) * self.units**2
        return between, release * state.between


def slope_messages(batch, state, server):
    """Messages (b, length) of a batch of clients and their rows, before they are clipped."""
    clients, rows = batch
    q, weights = server.n_random, server.within_weights[clients]
    rows = with_residuals(rows, state.population)
    # An error would tell that a client has such a residual. NaN fails the comparison, too.
    rows[~(np.abs(rows).max(axis=2) < LARGEST_ENTRY)] = 0.0
    squares, rank = own_residuals(rows)
    ratio = np.sqrt(state.between / state.noise)
    _, whitened = whiten_batch(clients, rows, np.diag(ratio))
    columns = whitened[:, :, :q] * ratio
    information = columns.swapaxes(1, 2) @ columns
    effects = np.sum(columns * whitened[:, :, q:], axis=1) / np.sqrt(state.noise)
    effects = np.column_stack([np.ones(len(rows)) / CONSTANT, effects / state.effect_scales])
    freedom = np.maximum(server.sizes[clients] - rank, 1)
    return np.concatenate(
        [
            triangle(effects[:, :, None] * effects[:, None, :]),
            triangle(information) / server.information_scale,
            triangle(information**2) / server.information_scale,
            (weights * squares / freedom / state.within_scale)[:, None],
        ],
        axis=1,
    )


def own_residuals(rows):
    """What least squares of each client leave (b,) of rows (b, k, q + 1), and their rank (b,).

    A column that others explain, as one that is constant within the client, takes no direction: up
    to rounding it has an arbitrary one, which would take its share of the residuals.
    """
    rows = rows.copy()
    sizes, rank = np.linalg.norm(rows, axis=1), np.zeros(len(rows), int)
    for k in range(rows.shape[2] - 1):
        lengths = np.linalg.norm(rows[..., k], axis=1)
        there = lengths > _EXPLAINED * sizes[:, k]
        direction = rows[..., k] / np.where(there, lengths, np.inf)[:, None]
        rest = rows[..., k + 1 :]
        rest -= direction[..., None] * np.sum(direction[..., None] * rest, axis=1, keepdims=True)
        rank += there
    return np.sum(rows[..., -1] ** 2, axis=1), rank


def predicted_noise(n_clients, n_random, options):
    """Noise on a variance in the last round, over it; from public numbers."""
    mechanism = release_mechanism(options)
    factor = largest_scales(n_clients, mechanism)
    std = mechanism.noise_std / np.sqrt(ROUND_SHARES[-1]) / n_clients
    scale = _EFFECT * factor * (n_random / 3) ** 0.25
    return float(std * scale**2 / _TYPICAL_SQUARE)


def check_slopes(table, options):
    """Raise ValueError if the variances of all coefficients would be mostly noise."""
    q = table.n_random
    noise = predicted_noise(table.n_clients, q, options)
    if noise > _TOO_NOISY:
        raise ValueError(
            f"with epsilon={options.epsilon:g}, {table.n_clients} clients and {q} coefficients "
            f"that vary, the noise on a variance would be about {noise:.2g} of it, above "
            f"{_TOO_NOISY}. Give the variances, as GaussianPrior(covariance=...), or let the level "
            "alone vary, with random='intercept'."
        )
    if options.noise_variance is None and not (table.sizes > q).any():
        raise ValueError(
            f"noise_variance must be given when no client has more than {q} rows: least squares "
            "of a client then leave no residual."
        )


def released_slopes(table, options):
    """The SlopeState after all rounds, their mechanism together, and whether noise has a seed.

    Parameters
    ----------
    table : RotatedTable
        All its columns vary.
    options : FitParameters
    """
    mechanism = release_mechanism(options)
    units = np.full(table.n_random, 1 / options.feature_bound)
    units[: table.random_intercept] = 1.0
    server = SlopeServer(
        units,
        options.target_bound,
        table.sizes,
        options.noise_variance,
        largest_scales(table.n_clients, mechanism),
        table.random_intercept,
    )
    rng, seeded = noise_generator(options.random_state)
    batches = [(clients, np.ascontiguousarray(rows)) for clients, rows in table.batches]
    clients = [members for members, _ in batches]
    state = after_rounds(server, batches, clients, slope_messages, mechanism, rng)
    return state, mechanism, seeded
