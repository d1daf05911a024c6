"""Servers of private linear regressions, which update the population from noisy sums of rounds.

In one release of second moments the noise is in proportion to the squared bound on the target and
hides variances. So the messages of a round are about residuals under the population so far, in
units of their standard deviations. `InterceptServer` is for a random intercept, `SlopeServer` for
coefficients that all vary, each with its own variance.
"""

from typing import NamedTuple

import numpy as np

from pfl_sklearn.linear_model._private import _constants as tuned
from pfl_sklearn.linear_model._private._messages import (
    INTERCEPT_MESSAGE,
    SLOPE_MESSAGE,
    clip_eigenvalues,
    effect_scale,
    format_caveat,
    gaussian_score,
    variance_caveats,
)


class LinearState(NamedTuple):
    """Public state before a round: estimates, and scales of the messages."""

    population: np.ndarray  # (p,), the intercept first
    covariance: np.ndarray  # (p, p), of its error
    between: np.ndarray  # (q,), variances of the coefficients that vary
    noise: float  # sigma^2
    noise_error: float  # standard deviation of the privacy noise on sigma^2
    between_noise: np.ndarray | float  # (q,), and of that on the variances
    most_retained: float  # upper limit to the share of messages that the last clipping retained
    within_scale: float  # squared, of residuals about a client's mean, or its least squares
    # For a random intercept: squared scales of clients' mean residuals, and (2,) of features about
    # their means and of the means.
    between_scale: float | None = None
    feature_scales: np.ndarray | None = None
    effect_scales: np.ndarray | None = None  # if all coefficients vary: (q,), of E[z]


class LinearServer(NamedTuple):
    """Public numbers, and what both servers compute from them."""

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
        """Weights (m,) of variances within clients: degrees of freedom over their median, <= 1."""
        freedom = self.sizes - self.n_random
        if not (freedom > 0).any():
            return np.zeros(len(freedom))
        return np.clip(freedom / np.median(freedom[freedom > 0]), 0.0, 1.0)

    def initial_state(self):
        """The LinearState of the first round, but for scales between clients."""
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

    def noise_variance(self, estimate, error):
        """Noise variance, and the standard deviation of the privacy noise on it."""
        if self.known_noise is not None:
            return self.known_noise, 0.0
        # Privacy noise must not make it 0: too small a value would undo all shrinkage.
        return float(min(max(estimate, error), self.target_bound**2)), error

    def caveats(self, state, columns):
        """Doubts about the released numbers that they reveal themselves."""
        caveats = []
        if state.noise_error > tuned.MOSTLY_NOISE * state.noise:
            finding = "the released variances are mostly noise, so clients are shrunk by a guess"
            caveats.append(format_caveat(finding, "a smaller target_bound", "noise_variance"))
        remedies = "a smaller target_bound", "a GaussianPrior with a covariance"
        caveats += variance_caveats(columns, state.between, state.between_noise, *remedies)
        if state.most_retained < tuned.LOW_RETAINED:
            finding = f"clipping retained less than {tuned.LOW_RETAINED} of the messages"
            finding += ", so variances may be too small"
            caveats.append(format_caveat(finding, "a larger feature_bound or target_bound"))
        return tuple(caveats)


# A random intercept -------------------------------------------------------------------------------


class ReleasedMoments(NamedTuple):
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

    def gaussian_score(self, step, variance):
        """Information (q, q) on a step of the coefficients, and score (q,).

        The cross moments less gram times `step` have the noise of both, and sampling errors with
        covariance `variance` times gram.
        """
        columns = self.units[:-1]
        lengths = self.units[-1] ** 2 + np.sum((step * columns) ** 2)
        # In units of the columns, or bounds of 1e50 would be singular.
        gram = self.gram / columns[:, None]
        error = variance * gram / columns + np.eye(len(columns)) * lengths * self.noise_std**2 / 2
        return gaussian_score(gram, self.cross / columns, error)

    def residual_square(self, step, covariance):
        """Mean squared residual after a step whose error has a covariance (q, q)."""
        # Estimates that follow the noise leave smaller residuals than the true ones; the trace
        # corrects for it.
        fitted = 2 * step @ self.cross - step @ self.gram @ step
        return self.square - fitted + np.trace(covariance @ self.gram)


class InterceptServer(LinearServer):
    """Server of `INTERCEPT_MESSAGE` messages."""

    message, n_random = INTERCEPT_MESSAGE, 1

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

    def initial_state(self):
        """The LinearState of the first round."""
        state = super().initial_state()
        return state._replace(
            between_scale=tuned.START_BETWEEN * self.target_bound**2,
            feature_scales=self._feature_scales([0.0, 0.0], [np.inf, np.inf]),
        )

    def next_state(self, total, state, noise_std):
        """The LinearState after a round with this noisy sum of messages."""
        within, between, most_retained = self._moments(total, state, noise_std)
        share = np.average(1 / self.sizes, weights=self.between_weights(state))
        step, after = np.zeros(len(state.population)), state
        for _ in range(tuned.PASSES):
            step, covariance = self._step(within, between, step, state, after)
            after = self._variances(within, between, step, covariance, share, state)
        features = np.transpose([within.features, between.features])
        return after._replace(
            population=state.population + step,
            covariance=covariance,
            most_retained=most_retained,
            feature_scales=self._feature_scales(*features),
            **self._scales(after, covariance, between.square_noise, share, state),
        )

    def _moments(self, total, state, noise_std):
        """Moments within and between clients, and an upper limit to the share that was retained."""
        within, between = INTERCEPT_MESSAGE.split(total, self.layout(state))
        weights, units = self.between_weights(state).sum(), self.units_of_parts(state)
        retained, most_retained = _retained_shares(between[0, 0], noise_std, weights)
        # Without a client of two rows the part within is noise, and nothing uses it.
        within_weight = retained * max(self.within_weights.sum(), 1.0)
        return (
            _released_moments(within, within_weight, units[0], noise_std),
            _released_moments(between, retained * weights, units[1], noise_std, has_constant=True),
            most_retained,
        )

    def _step(self, within, between, step, before, state):
        """Step of the coefficients (p,) to their posterior mean, and its covariance (p, p).

        Weights follow the state `before` the round, errors the variances of `state`.
        """
        prior = 1 / self.prior_variances
        weights = self.between_weights(before)
        # Means of clients have the variance t^2 + sigma^2 / n.
        variances = state.between + state.noise / self.sizes
        share = np.sum(weights**2 * variances) / weights.sum() ** 2
        information, score = between.gaussian_score(step, share)
        information, score = information + np.diag(prior), score - prior * before.population
        weights = self.within_weights
        if weights.any():  # some client has several rows
            share = np.sum(weights**2 / np.maximum(self.sizes - 1, 1)) / weights.sum() ** 2
            added, added_score = within.gaussian_score(step[1:], share * state.noise)
            information[1:, 1:] += added
            score[1:] += added_score
        sds = np.sqrt(self.prior_variances)
        unit = np.multiply.outer(sds, sds)
        covariance = np.linalg.inv(information * unit) * unit
        return covariance @ score, covariance

    def _variances(self, within, between, step, covariance, share, state):
        """The state with the variances of the residuals after a step of the coefficients.

        Squares of clients' means include a `share` of sigma^2.
        """
        square = within.residual_square(step[1:], covariance[1:, 1:])
        noise, error = self.noise_variance(square, within.square_noise)
        estimate = between.residual_square(step, covariance) - share * noise
        sampling = 2 / len(self.sizes) * (max(estimate, 0.0) + share * noise) ** 2
        release = np.hypot(between.square_noise, share * error)
        mean = posterior_mean(estimate, np.sqrt(release**2 + sampling), noise)
        return state._replace(
            between=np.minimum(mean, self.target_bound**2),
            noise=noise,
            noise_error=error,
            between_noise=release,
        )

    def _feature_scales(self, squares, noise):
        """Squared scales (2,) of features, from sums of mean squares within and between clients.

        `noise` (2,) holds their standard deviations.
        """
        bound = self.feature_bound**2
        trust = 1 / (1 + (np.divide(noise, bound) / tuned.SQUARES_SD) ** 2)
        squares = trust * np.divide(squares, bound) + (1 - trust) * tuned.SQUARES
        squares = np.clip(squares, tuned.LEAST_SQUARES, tuned.MOST_SQUARES)
        # A matrix within clients that spreads its trace over d directions has the Frobenius norm of
        # the trace over the root of d.
        return bound / tuned.FEATURES * squares / [self.n_features**0.5, 1.0]

    def _scales(self, state, covariance, between_noise, share, before):
        """Squared scales of residuals in the next round, within and between clients."""
        slopes = np.trace(covariance[1:, 1:]) * self.feature_bound**2
        within = state.noise + tuned.CAUTION * state.noise_error + tuned.WITHIN_SQUARE * slopes
        between = state.between.item() + share * state.noise + tuned.CAUTION * between_noise
        between += covariance[0, 0] + tuned.MEAN_SQUARE * slopes
        within *= (tuned.INTERCEPT_WITHIN * self.factor) ** 2
        between *= (tuned.INTERCEPT_BETWEEN * self.factor) ** 2
        # The noise falls with the scale, so a scale never grows back.
        return {
            "within_scale": min(within, before.within_scale),
            "between_scale": min(between, before.between_scale),
        }


def _released_moments(total, weight, units, noise_std, has_constant=False):
    """ReleasedMoments of a noisy sum (q + 1, q + 1); a constant column has the known square 1."""
    matrix, noise_std = total / weight, noise_std / weight
    if has_constant:
        matrix[0, 0] = 1.0
    columns, first = np.multiply.outer(units[:-1], units[:-1]), int(has_constant)
    features = np.trace(matrix[first:-1, first:-1])
    noise = noise_std * np.linalg.norm(units[first:-1] ** 2)
    gram = clip_eigenvalues(matrix[:-1, :-1] / columns) * columns
    return ReleasedMoments(
        gram, matrix[:-1, -1], matrix[-1, -1], units, noise_std, (features, noise)
    )


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
    most_retained: float  # upper limit to the share of messages


class SlopeServer(LinearServer):
    """Server of `SLOPE_MESSAGE` messages.

    The sum of E[z] has the mean of A times the step to the population. If the variances are x_l D_l
    and rho sigma^2 instead of those of the round, E[z_k]^2 has the mean

        sum_l x_l A_kl^2 + rho (A_kk - sum_l A_kl^2),

    a linear equation for the variances.
    """

    message = SLOPE_MESSAGE

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

    def initial_state(self):
        """The LinearState of the first round."""
        scale = tuned.FIRST_EFFECT / tuned.EFFECT * effect_scale(self.factor, self.n_random)
        return super().initial_state()._replace(effect_scales=np.full(self.n_random, scale))

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
            sums.most_retained,
            min(within, state.within_scale),
            effect_scales=np.minimum(scales, tuned.LARGEST_EFFECT),
        )

    def _sums(self, total, state, noise_std):
        """EffectSums of a noisy sum of messages."""
        m = len(self.sizes)
        effects, information, squared, within = SLOPE_MESSAGE.split(total, self.layout(state))
        retained, most_retained = _retained_shares(effects[0, 0], noise_std, m)
        weight = retained * m
        within_weight = retained * max(self.within_weights.sum(), 1.0)
        return EffectSums(
            effects[0, 1:] / weight,
            np.diag(effects)[1:] / weight,
            clip_eigenvalues(information / weight, largest=1.0),
            squared / weight,
            float(within[0]) / within_weight,
            noise_std / weight,
            noise_std * state.within_scale / within_weight,
            most_retained,
        )

    def _step(self, sums, state):
        """Step (q,) of the population in standard deviations, and its covariance (q, q)."""
        prior = state.between / self.prior_variances
        origin = -state.population / np.sqrt(state.between)
        step, gram = np.zeros(self.n_random), sums.information
        sampling = gram / len(self.sizes)  # E[z] has the variance A
        for _ in range(tuned.PASSES):
            from_gram = (sums.std * self.information_scale) ** 2 / 2 * np.sum(step**2)
            noise = (sums.std * tuned.CONSTANT * state.effect_scales) ** 2 / 2 + from_gram
            information, score = gaussian_score(gram, sums.effects, np.diag(noise) + sampling)
            covariance = np.linalg.inv(information + np.diag(prior))
            step = covariance @ (score + prior * origin)
        return step, covariance

    def _variances(self, sums, step, covariance, state, noise):
        """Variances (q,) of the coefficients, and the privacy noise on them (q,)."""
        gram, ratios = sums.information, np.ones(self.n_random)
        shift, diagonal = gram @ step, np.diag(gram)
        squares = sums.squares - 2 * sums.effects * shift + shift**2
        squares = squares + np.diag(gram @ covariance @ gram)  # the step follows noise: see above
        others = sums.squared - np.diag(np.diag(sums.squared))
        weight = np.maximum(np.maximum(np.diag(sums.squared), diagonal**2), tuned.LEAST_SQUARE)
        from_rows = noise / state.noise * (diagonal - weight - others.sum(axis=1))
        for _ in range(tuned.PASSES):
            estimates = (squares - from_rows - others @ ratios) / weight
            ratios = np.clip(estimates, 0.0, 1 / tuned.LEAST_SQUARE)
        release = sums.std * state.effect_scales**2 / weight
        sampling = 2 / len(self.sizes) * np.maximum(estimates, 0.0) ** 2 / np.minimum(weight, 1.0)
        stds = np.sqrt(release**2 + (sums.std * self.information_scale / weight) ** 2 + sampling)
        scaled = state.between / self.units**2  # in units of the target, as the noise variance
        means = posterior_mean(estimates * scaled, stds * scaled, noise)
        between = np.clip(means, tuned.FASTEST_FALL * scaled, self.target_bound**2)
        return between * self.units**2, release * state.between


def posterior_mean(estimates, std, noise):
    """Posterior means (q,) of variances t^2, from normal estimates (q,) with errors `std` (q,).

    The prior of t^2 / (t^2 + sigma^2) is Beta(1, 1/2): flat near 0, with a long tail for t.
    """
    # Nodes are equally spaced in the angle whose squared sine the ratio is.
    ratio = np.sin((np.arange(tuned.NODES) + 0.5) * np.pi / 2 / tuned.NODES) ** 2
    squares = noise * ratio / (1 - ratio)
    distances = (np.reshape(estimates, (-1, 1)) - squares) / np.reshape(std, (-1, 1))
    logs = 0.5 * np.log(ratio) - 0.5 * distances**2
    shares = np.exp(logs - logs.max(axis=1, keepdims=True))
    return shares @ squares / shares.sum(axis=1)


def _retained_shares(total, noise_std, weight):
    """Share of messages that clipping retains, shrunk to its prior mean, and its upper limit.

    `total` is the noisy sum of the squared constant, to which clipped messages contribute less.
    """
    share, noise = total / weight, noise_std * tuned.CONSTANT**2 / weight
    mean = np.average([share, tuned.RETAINED], weights=[noise**-2, tuned.RETAINED_SD**-2])
    return float(np.clip(mean, tuned.LEAST_RETAINED, 1.0)), float(share + noise)
