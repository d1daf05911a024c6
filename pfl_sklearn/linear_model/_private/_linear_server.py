"""What the server of a private linear regression makes of the noisy sums of its rounds.

One release of second moments would have noise in proportion to the squared bound on the target,
which hides variances. So a round sends what the population so far leaves of the target, in units of
its standard deviations. `LevelServer` is for a random intercept, `SlopeServer` for coefficients
that all vary, each with a variance of its own.
"""

from typing import NamedTuple

import numpy as np

from pfl_sklearn.linear_model._private import _constants as tuned
from pfl_sklearn.linear_model._private._messages import (
    LEVEL,
    SLOPES,
    caveat,
    effect_scale,
    evidence,
    hidden_variances,
    with_eigenvalues,
)


class LinearState(NamedTuple):
    """What is public before a round: estimates, and scales of the messages."""

    population: np.ndarray  # (p,), the intercept first
    covariance: np.ndarray  # (p, p), of its error
    between: np.ndarray  # (q,), variances of the coefficients that vary
    noise: float  # sigma^2
    noise_error: float  # standard deviation of the privacy noise on sigma^2
    between_noise: np.ndarray | float  # (q,), and of that on the variances
    most_kept: float  # share of messages that clipping kept in the round before, at most
    within_scale: float  # squared, of residuals about a client's mean, or its own least squares
    # Of a random intercept: squared scales of clients' mean residuals, and (2,) of features about
    # their means and of the means.
    between_scale: float | None = None
    feature_scales: np.ndarray | None = None
    effect_scales: np.ndarray | None = None  # if all coefficients vary: (q,), of E[z]


class LinearServer(NamedTuple):
    """Public numbers behind the rounds."""

    feature_bound: float
    target_bound: float
    n_features: int
    sizes: np.ndarray  # (m,), rows of every client
    known_noise: float | None  # sigma^2
    factor: float  # of the scales
    has_intercept: bool = True

    @property
    def units(self):
        """Units (p,) of coefficients, over the target's; the intercept comes first."""
        units = np.full(self.n_features, 1 / self.feature_bound)
        return np.append(1.0, units) if self.has_intercept else units

    @property
    def n_random(self):
        """Number q of coefficients that vary."""
        return len(self.units)

    @property
    def prior_variances(self):
        """Prior variances (p,) of the population's coefficients."""
        return (tuned.COEFFICIENT_SD * self.target_bound * self.units) ** 2

    @property
    def within_weights(self):
        """Weights (m,) of variances within clients: degrees of freedom over their median, cut."""
        freedom = self.sizes - self.n_random
        if not (freedom > 0).any():
            return np.zeros(len(freedom))
        return np.clip(freedom / np.median(freedom[freedom > 0]), 0.0, 1.0)

    def begin(self):
        """The LinearState of the first round, without scales of what lies between clients."""
        q, noise, square = self.n_random, self.known_noise, self.target_bound**2
        start = np.full(q, tuned.START_SLOPE)
        start[: self.has_intercept] = tuned.START_SD
        return LinearState(
            np.zeros(len(self.units)),
            np.diag(self.prior_variances),
            (start * self.target_bound * self.units[:q]) ** 2,
            tuned.START_SD**2 * square if noise is None else noise,
            0.0,
            np.zeros(q),
            1.0,
            tuned.START_WITHIN * square,
        )

    def noise_variance(self, found, error):
        """Noise variance, and the standard deviation of the privacy noise on it."""
        if self.known_noise is not None:
            return self.known_noise, 0.0
        # Shrinking too little does less harm than too much, so noise must not make it 0.
        return float(min(max(found, error), self.target_bound**2)), error

    def caveats(self, state, columns):
        """What the released numbers themselves make doubtful."""
        found = []
        if state.noise_error > tuned.MOSTLY_NOISE * state.noise:
            what = "the released variances are mostly noise, so clients are shrunk by a guess"
            found.append(caveat(what, "a smaller target_bound", "noise_variance"))
        remedies = "a smaller target_bound", "a GaussianPrior with a covariance"
        found += hidden_variances(columns, state.between, state.between_noise, *remedies)
        if state.most_kept < tuned.LOW_SHARE:
            what = f"clipping kept less than {tuned.LOW_SHARE} of the messages"
            what += ", so variances may be too small"
            found.append(caveat(what, "a larger feature_bound or target_bound"))
        return tuple(found)


# A random intercept -------------------------------------------------------------------------------


class Moments(NamedTuple):
    """Released mean moments of q columns and the residual, in the units of the data."""

    gram: np.ndarray  # (q, q), of the columns
    cross: np.ndarray  # (q,), with the residual
    square: float  # of the residual
    units: np.ndarray  # (q + 1,), of a message's columns
    noise_std: float  # of a diagonal entry, in these units; off the diagonal over sqrt(2)
    features: tuple  # sum of the mean squares of features, and the noise's standard deviation

    @property
    def square_noise(self):
        """Standard deviation of the noise on the squared residual."""
        return self.noise_std * self.units[-1] ** 2

    def evidence(self, step, variance):
        """Information (q, q) on a step of the coefficients, and score (q,).

        The cross moments less gram times `step` have the noise of both, and sampling errors with
        covariance `variance` times gram.
        """
        columns = self.units[:-1]
        lengths = self.units[-1] ** 2 + np.sum((step * columns) ** 2)
        # In units of the columns, or bounds of 1e50 would be singular.
        gram = self.gram / columns[:, None]
        error = variance * gram / columns + np.eye(len(columns)) * lengths * self.noise_std**2 / 2
        return evidence(gram, self.cross / columns, error)

    def residual_square(self, step, covariance):
        """Mean squared residual after a step whose error has a covariance (q, q)."""
        # Coefficients that follow the noise leave less than the true ones do: the trace.
        fitted = 2 * step @ self.cross - step @ self.gram @ step
        return self.square - fitted + np.trace(covariance @ self.gram)


class LevelServer(LinearServer):
    """Server of `LEVEL` messages."""

    message, n_random = LEVEL, 1

    def between_weights(self, state):
        """Weights (m,) of clients' means: inverse variances, over the largest of them."""
        ratio = state.noise / max(state.between, tuned.SMALLEST_RATIO * state.noise)
        weights = 1 / (1 + ratio / self.sizes)
        return weights / weights.max()

    def units_of_parts(self, state):
        """Units of the columns and the residual within (d + 1,) and between clients (d + 2,)."""
        ones = np.ones(self.n_features)
        within, between = np.sqrt(self.factor * state.feature_scales)
        return (
            np.append(within * ones, np.sqrt(state.within_scale)),
            np.concatenate([[tuned.CONSTANT], between * ones, [np.sqrt(state.between_scale)]]),
        )

    def layout(self, state):
        """Layout of the message."""
        return [(len(u), np.multiply.outer(u, u)) for u in self.units_of_parts(state)]

    def begin(self):
        """The LinearState of the first round."""
        state = super().begin()
        return state._replace(
            between_scale=tuned.START_BETWEEN * self.target_bound**2,
            feature_scales=self._feature_scales([0.0, 0.0], [np.inf, np.inf]),
        )

    def next_state(self, total, state, noise_std):
        """The LinearState after a round with this noisy sum of messages."""
        within, between, most_kept = self._moments(total, state, noise_std)
        share = np.average(1 / self.sizes, weights=self.between_weights(state))
        step, after = np.zeros(len(state.population)), state
        for _ in range(tuned.PASSES):
            step, covariance = self._step(within, between, step, state, after)
            after = self._variances(within, between, step, covariance, share, state)
        features = np.transpose([within.features, between.features])
        return after._replace(
            population=state.population + step,
            covariance=covariance,
            most_kept=most_kept,
            feature_scales=self._feature_scales(*features),
            **self._scales(after, covariance, between.square_noise, share, state),
        )

    def _moments(self, total, state, noise_std):
        """Moments within and between clients of a noisy sum, and the most that clipping kept."""
        within, between = LEVEL.split(total, self.layout(state))
        weights, units = self.between_weights(state).sum(), self.units_of_parts(state)
        kept, most_kept = _kept_shares(between[0, 0], noise_std, weights)
        # Without a client of two rows the part within is noise, and nothing uses it.
        whole = kept * max(self.within_weights.sum(), 1.0)
        return (
            _mean_moments(within, whole, units[0], noise_std),
            _mean_moments(between, kept * weights, units[1], noise_std, has_constant=True),
            most_kept,
        )

    def _step(self, within, between, step, before, state):
        """Step of the coefficients (p,) to their posterior mean, and its covariance (p, p).

        Weights are those of the state `before`; errors are those at the variances of `state`.
        """
        prior = 1 / self.prior_variances
        weights = self.between_weights(before)
        # Means of clients have the variance t^2 + sigma^2 / n.
        variances = state.between + state.noise / self.sizes
        share = np.sum(weights**2 * variances) / weights.sum() ** 2
        information, score = between.evidence(step, share)
        information, score = information + np.diag(prior), score - prior * before.population
        weights = self.within_weights
        if weights.any():  # some client has several rows
            share = np.sum(weights**2 / np.maximum(self.sizes - 1, 1)) / weights.sum() ** 2
            own, own_score = within.evidence(step[1:], share * state.noise)
            information[1:, 1:] += own
            score[1:] += own_score
        sds = np.sqrt(self.prior_variances)
        unit = np.multiply.outer(sds, sds)
        covariance = np.linalg.inv(information * unit) * unit
        return covariance @ score, covariance

    def _variances(self, within, between, step, covariance, share, state):
        """The state with the variances that are left after a step of the coefficients.

        A `share` of sigma^2 is in the squares of clients' means.
        """
        left = within.residual_square(step[1:], covariance[1:, 1:])
        noise, error = self.noise_variance(left, within.square_noise)
        found = between.residual_square(step, covariance) - share * noise
        sampling = 2 / len(self.sizes) * (max(found, 0.0) + share * noise) ** 2
        release = np.hypot(between.square_noise, share * error)
        mean = posterior_mean(found, np.sqrt(release**2 + sampling), noise)
        return state._replace(
            between=np.minimum(mean, self.target_bound**2),
            noise=noise,
            noise_error=error,
            between_noise=release,
        )

    def _feature_scales(self, squares, noise):
        """Squared scales (2,) of features, from sums of mean squares within and between clients.

        `noise` (2,) has the standard deviations of what is on them.
        """
        bound = self.feature_bound**2
        trust = 1 / (1 + (np.divide(noise, bound) / tuned.SQUARES_SD) ** 2)
        squares = trust * np.divide(squares, bound) + (1 - trust) * tuned.SQUARES
        squares = np.clip(squares, tuned.LEAST_SQUARES, tuned.MOST_SQUARES)
        # Within, d features share their variance: a matrix that is spread over d directions has
        # the norm of its trace over the root of d.
        return bound / tuned.FEATURES * squares / [self.n_features**0.5, 1.0]

    def _scales(self, state, covariance, between_noise, share, before):
        """Squared scales of residuals in the next round, within and between clients."""
        slopes = np.trace(covariance[1:, 1:]) * self.feature_bound**2
        within = state.noise + tuned.CAUTION * state.noise_error + tuned.WITHIN_SQUARE * slopes
        between = state.between.item() + share * state.noise + tuned.CAUTION * between_noise
        between += covariance[0, 0] + tuned.MEAN_SQUARE * slopes
        within *= (tuned.LEVEL_WITHIN * self.factor) ** 2
        between *= (tuned.LEVEL_BETWEEN * self.factor) ** 2
        # The noise falls with the scale: a scale never grows back.
        return {
            "within_scale": min(within, before.within_scale),
            "between_scale": min(between, before.between_scale),
        }


def _mean_moments(total, weight, units, noise_std, has_constant=False):
    """Moments of a noisy sum (q + 1, q + 1); that of a constant column is known to be 1."""
    matrix, noise_std = total / weight, noise_std / weight
    if has_constant:
        matrix[0, 0] = 1.0
    columns, first = np.multiply.outer(units[:-1], units[:-1]), int(has_constant)
    features = np.trace(matrix[first:-1, first:-1])
    noise = noise_std * np.linalg.norm(units[first:-1] ** 2)
    gram = with_eigenvalues(matrix[:-1, :-1] / columns) * columns
    return Moments(gram, matrix[:-1, -1], matrix[-1, -1], units, noise_std, (features, noise))


# Coefficients that all vary -----------------------------------------------------------------------


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


class SlopeServer(LinearServer):
    """Server of `SLOPES` messages.

    The sum of E[z] is that of A times the step to the population. With the variances x_l D_l and
    rho sigma^2 in place of those of the round, E[z_k]^2 has the mean

        sum_l x_l A_kl^2 + rho (A_kk - sum_l A_kl^2),

    so that the variances follow from sums.
    """

    message = SLOPES

    @property
    def information_scale(self):
        """Scale of A, whose norm is at most the root of q."""
        return tuned.INFORMATION * np.sqrt(self.n_random)

    def layout(self, state):
        """Layout of the message."""
        q, information = self.n_random, self.information_scale
        effects = np.append(tuned.CONSTANT, state.effect_scales)
        return [
            (q + 1, np.multiply.outer(effects, effects)),
            (q, information),
            (q, information),
            (1, state.within_scale),
        ]

    def begin(self):
        """The LinearState of the first round."""
        scale = tuned.FIRST_EFFECT / tuned.EFFECT * effect_scale(self.factor, self.n_random)
        return super().begin()._replace(effect_scales=np.full(self.n_random, scale))

    def next_state(self, total, state, noise_std):
        """The LinearState after a round with this noisy sum of messages."""
        sums = self._sums(total, state, noise_std)
        step, covariance = self._step(sums, state)
        sds = np.sqrt(state.between)
        noise, error = self.noise_variance(sums.within, sums.within_std)
        between, release = self._variances(sums, step, covariance, state, noise)
        covariance = covariance * np.multiply.outer(sds, sds)
        # Effects of the next round are in units of the new variances.
        wider = (between + tuned.CAUTION * release + np.diag(covariance)) / between
        scales = effect_scale(self.factor, self.n_random) * np.sqrt(wider)
        within = (tuned.SLOPES_WITHIN * self.factor) ** 2 * (noise + tuned.CAUTION * error)
        return LinearState(
            state.population + step * sds,
            covariance,
            between,
            noise,
            error,
            release,
            sums.most_kept,
            min(within, state.within_scale),
            effect_scales=np.minimum(scales, tuned.LARGEST_EFFECT),
        )

    def _sums(self, total, state, noise_std):
        """EffectSums of a noisy sum of messages."""
        m = len(self.sizes)
        effects, information, squared, within = SLOPES.split(total, self.layout(state))
        kept, most_kept = _kept_shares(effects[0, 0], noise_std, m)
        whole = kept * m
        rows = kept * max(self.within_weights.sum(), 1.0)
        return EffectSums(
            effects[0, 1:] / whole,
            np.diag(effects)[1:] / whole,
            with_eigenvalues(information / whole, largest=1.0),
            squared / whole,
            float(within[0]) / rows,
            noise_std / whole,
            noise_std * state.within_scale / rows,
            most_kept,
        )

    def _step(self, sums, state):
        """Step (q,) of the population in standard deviations, and its covariance (q, q)."""
        prior = state.between / self.prior_variances
        origin = -state.population / np.sqrt(state.between)
        step, gram = np.zeros(self.n_random), sums.information
        sampling = gram / len(self.sizes)  # E[z] has the variance A
        for _ in range(tuned.PASSES):
            moved = (sums.std * self.information_scale) ** 2 / 2 * np.sum(step**2)
            noise = (sums.std * tuned.CONSTANT * state.effect_scales) ** 2 / 2 + moved
            information, score = evidence(gram, sums.effects, np.diag(noise) + sampling)
            covariance = np.linalg.inv(information + np.diag(prior))
            step = covariance @ (score + prior * origin)
        return step, covariance

    def _variances(self, sums, step, covariance, state, noise):
        """Variances (q,) of the coefficients, and the privacy noise on them (q,)."""
        gram, ratios = sums.information, np.ones(self.n_random)
        moved, own = gram @ step, np.diag(gram)
        left = sums.squares - 2 * sums.effects * moved + moved**2
        left = left + np.diag(gram @ covariance @ gram)  # a fit of noise leaves too little
        others = sums.squared - np.diag(np.diag(sums.squared))
        weight = np.maximum(np.maximum(np.diag(sums.squared), own**2), tuned.LEAST_SQUARE)
        by_noise = noise / state.noise * (own - weight - others.sum(axis=1))
        for _ in range(tuned.PASSES):
            found = (left - by_noise - others @ ratios) / weight
            ratios = np.clip(found, 0.0, 1 / tuned.LEAST_SQUARE)
        release = sums.std * state.effect_scales**2 / weight
        sampling = 2 / len(self.sizes) * np.maximum(found, 0.0) ** 2 / np.minimum(weight, 1.0)
        stds = np.sqrt(release**2 + (sums.std * self.information_scale / weight) ** 2 + sampling)
        scaled = state.between / self.units**2  # in units of the target, as the noise variance
        means = posterior_mean(found * scaled, stds * scaled, noise)
        between = np.clip(means, tuned.FASTEST_FALL * scaled, self.target_bound**2)
        return between * self.units**2, release * state.between


def posterior_mean(found, std, noise):
    """Posterior means (q,) of t^2, of which `found` (q,) are normal estimates.

    The prior of t^2 / (t^2 + sigma^2) is Beta(1, 1/2): flat near 0, with a long tail for t.
    """
    # Nodes are equally spaced in the angle whose squared sine the ratio is.
    ratio = np.sin((np.arange(tuned.NODES) + 0.5) * np.pi / 2 / tuned.NODES) ** 2
    squares = noise * ratio / (1 - ratio)
    distances = (np.reshape(found, (-1, 1)) - squares) / np.reshape(std, (-1, 1))
    logs = 0.5 * np.log(ratio) - 0.5 * distances**2
    shares = np.exp(logs - logs.max(axis=1, keepdims=True))
    return shares @ squares / shares.sum(axis=1)


def _kept_shares(found, noise_std, weight):
    """Share of messages that clipping keeps, pulled to what is usual, and the most it may be.

    `found` is the sum of the squared constant, with noise; clipped messages count less in it.
    """
    found, noise = found / weight, noise_std * tuned.CONSTANT**2 / weight
    kept = np.average([found, tuned.KEPT], weights=[noise**-2, tuned.KEPT_SD**-2])
    return float(np.clip(kept, tuned.LEAST_KEPT, 1.0)), float(found + noise)
