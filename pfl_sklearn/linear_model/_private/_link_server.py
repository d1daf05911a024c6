"""Server of private fits of classes and counts, which updates the population from noisy sums.

Coefficients come from a Bayesian regression of the score on the information, around a public prior:
where the sums are mostly noise, they stay near the start with large errors. Spreads, the standard
deviations between clients, are posterior medians.
"""

from typing import NamedTuple

import numpy as np

from pfl_sklearn.linear_model._private import _constants as tuned
from pfl_sklearn.linear_model._private._messages import (
    LINK_MESSAGE,
    LinkShape,
    clip_eigenvalues,
    format_caveat,
    gaussian_score,
    list_columns,
    variance_caveats,
)


class PrivateStart(NamedTuple):
    """Public numbers from which a private fit starts."""

    intercept: float  # of the population
    intercept_sd: float  # of its prior
    curvature: float  # largest one of a row
    remedy: str  # if the intercept is far from the start
    typical_curvature: float = 1.0  # of a row, over the largest one; scales information


class RoundPoint(NamedTuple):
    """Released or public numbers at which a round is evaluated."""

    population: np.ndarray  # (p,)
    spreads: np.ndarray  # (q,), t
    information: np.ndarray  # (q,), of a typical client on its own coefficients
    means: np.ndarray  # (p,), of the columns, by curvature; 0 where coefficients vary
    covariance: np.ndarray  # (p, p), of the population's error
    variance_noise: np.ndarray | float = 0.0  # (q,), standard deviations of the noise on t^2

    @property
    def units(self):
        """Standard deviations (q,) of a typical client's own estimates."""
        return np.sqrt(self.spreads**2 + 1 / self.information)


class RoundSums(NamedTuple):
    """Released means over clients of a round, and the noise on an entry of the message.

    Parts between clients are in units: the score in b is within + between / u.
    """

    within: np.ndarray  # (p,), score; 0 for coefficients that vary
    information: np.ndarray  # (p - q, p - q), within
    between: np.ndarray  # (p,), score
    between_information: np.ndarray  # (p, p)
    variance: np.ndarray  # (2, q), excess and squares
    noise_std: float


class LinkRounds(NamedTuple):
    """The point of the next round, and all rounds so far."""

    point: RoundPoint
    n_rounds: int
    points: tuple = ()  # RoundPoints
    sums: tuple = ()  # RoundSums


class _ScoreRegression(NamedTuple):
    """One part of the messages, as a regression of its score on its information.

    Each part is weighted by its own noise. In a sum of scores, the part within clients would add
    nothing but noise to the coefficients of features that are constant within clients.
    """

    score: np.ndarray  # (p,), mean over clients and rounds
    information: np.ndarray  # (p, p)
    score_noise: np.ndarray  # (p,), variances
    information_noise: np.ndarray  # (p,), variances, of the diagonal

    def error(self, n_clients, factor=1.0, more=0.0):
        """Covariance (p, p) of the score: `factor` times the noise, plus `more`, and sampling."""
        return np.diag(factor * self.score_noise + more) + self.information / n_clients

    def stated_precision(self, n_clients, distance):
        """Precision (p, p) behind the standard errors, at points of a mean squared `distance`."""
        # The information may be noise, so it is lowered by one standard deviation, but at most by
        # half.
        noise, diagonal = np.sqrt(self.information_noise), np.diag(self.information)
        share = np.divide(noise, diagonal, out=np.zeros(len(diagonal)), where=diagonal > 0)
        root = np.sqrt(np.maximum(1 - share, tuned.LEAST_SHARE))
        lowered = self.information * np.multiply.outer(root, root)
        error = self.error(n_clients, tuned.STATED, self.information_noise * distance)
        return lowered @ np.linalg.solve(error, lowered)


class LinkServer(NamedTuple):
    """The server's public numbers, and its updates from released sums."""

    shape: LinkShape
    start: PrivateStart
    n_clients: int
    known_variances: np.ndarray | None  # (q,), between clients

    @property
    def prior_sds(self):
        """Standard deviations (p,) of the prior of the coefficients."""
        d = self.shape.n_features
        return np.append(self.start.intercept_sd, np.full(d, tuned.SLOPE_SD / np.sqrt(max(d, 1))))

    @property
    def spread_scales(self):
        """Starts (q,) of the spreads, and units of their priors."""
        return spread_scales(self.shape.n_varying, np.sqrt(self.shape.n_features))

    def initial_state(self):
        """The RoundPoint of the first round."""
        population = np.append(self.start.intercept, np.zeros(self.shape.n_features))
        known = self.known_variances
        spreads = self.spread_scales if known is None else np.sqrt(known)
        # Features share the bound, with a mean square of 1 each.
        rows = self.shape.curvature * self.shape.max_rows_per_client
        information = np.full(self.shape.n_varying, max(float(rows), tuned.LEAST_INFORMATION))
        means = np.zeros(len(population))
        covariance = np.diag(self.prior_sds**2)
        noise = np.zeros(self.shape.n_varying)
        return RoundPoint(population, spreads, information, means, covariance, noise)

    @property
    def effect_of_column(self):
        """Position (p,) of each column's effect; for columns that do not vary, the intercept's."""
        q = self.shape.n_varying
        return np.append(np.arange(q), np.zeros(self.shape.n_fixed, dtype=int))

    def next_state(self, total, rounds, noise_std):
        """The LinkRounds after a round with this noisy sum of messages."""
        points, m = (*rounds.points, rounds.point), self.n_clients
        sums = (*rounds.sums, unpack_sums(total / m, self.shape, noise_std / m))
        n_first = rounds.n_rounds - rounds.n_rounds // 2
        # In the first half, average the later half of the rounds so far, which are nearer.
        first = n_first if len(sums) > n_first else len(sums) // 2
        all_rounds = stack_rounds(sums), stack_rounds(points)
        means = self.column_means(*all_rounds)
        information = self.typical_information(*all_rounds)
        averaged = stack_rounds(sums[first:]), stack_rounds(points[first:])
        point = self.next_point(rounds.point, *averaged, means)._replace(information=information)
        return LinkRounds(point, rounds.n_rounds, points, sums)

    def next_point(self, point, sums, points, means):
        """The RoundPoint after `point`, from the averaged sums of rounds of equal noise."""
        estimate, covariance = self._estimate_population(sums, points, means)
        move = (estimate - point.population) / self.prior_sds
        move *= min(1.0, tuned.LONGEST_MOVE / max(np.abs(move).max(), tuned.LONGEST_MOVE))
        spreads, noise = point.spreads, point.variance_noise
        if self.known_variances is None:
            estimates, noise = self._estimate_spreads(sums, points)
            longest = tuned.LONGEST_LOG_MOVE
            spreads = spreads * np.exp(np.clip(np.log(estimates / spreads), -longest, longest))
        return point._replace(
            population=point.population + move * self.prior_sds,
            spreads=spreads,
            means=means,
            covariance=covariance,
            variance_noise=noise,
        )

    def column_means(self, sums, points):
        """Means (p,) of the columns from all rounds, weighted by information on the intercept."""
        # These are posterior means around 0, because the first rounds are mostly noise.
        q = self.shape.n_varying
        intercept = np.maximum(sums.between_information[:, 0, 0], tuned.LEAST_INFORMATION)
        weights = 2 * (intercept / (self.shape.scales[3] * sums.noise_std)) ** 2
        means = points.means[:, q:] + sums.between_information[:, 0, q:] / intercept[:, None]
        return np.append(np.zeros(q), weights @ means / (weights.sum() + 1.0))

    def typical_information(self, sums, points):
        """Information (q,) of a typical client on its own coefficients, from all rounds."""
        # A client with information g has the reliability u^2 g / (1 + t^2 g) in the unit u.
        # Clipping shrinks reliabilities and their squares alike, so we use their ratio.
        weights = sums.noise_std**-2.0
        reliabilities = weights @ _diagonals(sums.between_information)[:, : self.shape.n_varying]
        reliabilities = np.maximum(reliabilities, tuned.LEAST_INFORMATION * weights.sum())
        ratio = np.maximum(weights @ sums.variance[:, 1], 0.0) / reliabilities
        units = weights @ points.units**2 / weights.sum()
        variances = weights @ points.spreads**2 / weights.sum()
        inverse = np.maximum(units - ratio * variances, np.finfo(float).tiny)
        last, factor = points.information[-1], tuned.LONGEST_FACTOR
        estimates = np.clip(ratio / inverse, last / factor, last * factor)
        largest = np.full(len(last), float(self.shape.curvature * self.shape.max_rows_per_client))
        largest[1:] *= self.shape.n_features  # of a feature that has the bound to itself
        least = tuned.LEAST_INFORMATION
        return np.clip(estimates, least, np.maximum(largest, least))

    def _estimate_population(self, sums, points, means):
        """Estimates (p,) of the coefficients, and the covariance of their error."""
        # At the coefficients b of a round the mean score is about I (estimate - b), with
        # information I. Its errors are the noise of the release and the sampling variance, I over
        # the number of clients. Standard errors also count the noise on the information; the
        # estimate does not, as that would only shrink it to the start.
        # With centred features, the intercept is nearly independent of the slopes.
        centring = _centring(means)
        at = points.population @ centring.T
        middle, prior = at.mean(axis=0), np.diag(self.prior_sds**-2)
        between, within = self._score_regressions(sums, points, _centring(points.means - means))
        # Rounds at a small unit have more information between clients, and count by it.
        weights = _diagonals(sums.between_information)[:, self.effect_of_column]
        weights = np.maximum(weights, tuned.LEAST_INFORMATION)
        weights = weights / points.units[:, self.effect_of_column] ** 2
        shift = np.average(at, axis=0, weights=weights) - middle
        parts = between._replace(score=between.score + between.information @ shift), within
        precision, total = prior, prior @ (self.initial_state().population - middle)
        for part in parts:
            error = part.error(self.n_clients)
            information, score = gaussian_score(part.information, part.score, error)
            precision, total = precision + information, total + score
        estimate = middle + np.linalg.solve(precision, total)
        distance = np.mean(np.sum((at - estimate) ** 2, axis=1))
        stated = prior + sum(part.stated_precision(self.n_clients, distance) for part in parts)
        back = np.linalg.inv(centring)
        return back @ estimate, back @ np.linalg.inv(stated) @ back.T

    def _score_regressions(self, sums, points, shifts):
        """Both parts of the messages, between clients and within, in centred coefficients."""
        q, units = self.shape.n_varying, points.units[:, self.effect_of_column]
        noise = sums.noise_std[0] / np.sqrt(len(units))
        within_score, within_noise, between_score, between_noise = np.multiply(
            self.shape.scales, noise
        )
        score = np.mean(((sums.between / units)[:, None] @ shifts)[:, 0], axis=0)
        information = sums.between_information / units[:, :, None] / units[:, None]
        between = np.mean(shifts.swapaxes(1, 2) @ information @ shifts, axis=0)
        variance = between_noise**2 * np.mean(units**-4.0, axis=0)
        # In these units all entries have the same noise.
        unit = variance**-0.25
        outer = np.multiply.outer(unit, unit)
        least = tuned.LEAST_INFORMATION * unit[:q] ** 2
        between = _shrink_information(between * outer, 1.0, least) / outer
        within = np.zeros_like(between)
        if q < len(within):
            mean = sums.information.mean(axis=0)
            within[q:, q:] = _shrink_information(
                mean, within_noise, np.zeros(0), tuned.LEAST_WITHIN
            )
        ones = np.ones(len(within))  # within clients all columns have the same noise
        score_noise = between_score**2 * np.mean(units**-2.0, axis=0)
        return (
            _ScoreRegression(score, between, score_noise, variance),
            _ScoreRegression(
                sums.within.mean(axis=0), within, ones * within_score**2, ones * within_noise**2
            ),
        )

    def _estimate_spreads(self, sums, points):
        """Standard deviations T (q,) between clients, and those of the noise on T^2."""
        # At t the mean excess is a little below that of the squares times (T^2 - t^2) / u^2. So
        # each round estimates T^2; we take the posterior median of T under a half-Cauchy prior.
        units, noise = points.units**2, sums.noise_std[0]
        weights = units**-2 / np.sum(units**-2, axis=0)  # all excesses have the same noise
        excess, squares = sums.variance.swapaxes(0, 1)
        square = tuned.RESPONSE * np.maximum(squares.mean(axis=0), tuned.LEAST_OWN)
        # An error of the population adds the squared mean of z to the excess. If it is large,
        # the excess is clipped and includes less of it.
        shifts = sums.between[:, : self.shape.n_varying] ** 2
        excess = excess - np.minimum(shifts, np.maximum(excess, 0.0))
        excess += (self.shape.scales[2] * noise) ** 2 + tuned.CLIPPED_EXCESS / self.shape.factor**3
        variance = np.sum(weights * (points.spreads**2 + units * excess / square), axis=0)
        by_noise = (self.shape.variance_scales[0] * noise / square) ** 2
        by_noise *= np.sum((weights * units) ** 2, axis=0)
        # The square of a client's estimate has twice the square of its variance. It is taken at the
        # present t: if it grew with T, a negative estimate would favour the largest T.
        sampling = 2 * np.sum(weights * units, axis=0) ** 2 / (self.n_clients * square)
        error = by_noise + sampling
        spreads = np.multiply.outer(self.spread_scales, tuned.SPREADS)
        priors = np.where(np.arange(len(variance)) > 0, tuned.SLOPE_SPREAD, tuned.SPREAD)
        logs = -((variance[:, None] - spreads**2) ** 2) / (2 * error[:, None])
        logs -= np.log1p((tuned.SPREADS / priors[:, None]) ** 2)
        density = np.exp(logs - logs.max(axis=1, keepdims=True))
        below = np.cumsum(density, axis=1) - density / 2
        share = below / density.sum(axis=1, keepdims=True)
        medians = [np.interp(0.5, *both) for both in zip(share, spreads, strict=True)]
        return np.array(medians), np.sqrt(by_noise)

    def caveats(self, rounds, columns):
        """Doubts about the released numbers that they reveal themselves, with remedies."""
        released, sums = rounds.point, stack_rounds(rounds.sums[-(rounds.n_rounds // 2) :])
        distances = np.abs(released.population - self.initial_state().population) / self.prior_sds
        # If other parts of most messages are far too long, clipping leaves little reliability. An
        # intercept far from the start has the same effect, but another remedy.
        noise = self.shape.scales[3] * sums.noise_std[0] / np.sqrt(len(sums.between_information))
        reliability = np.mean(sums.between_information[:, 0, 0]) + 2 * noise
        far = distances[0] > tuned.FAR_INTERCEPT
        caveats, doubt = [], ", so errors may be too small"
        if far:
            finding = "the released intercept is far from the start"
            caveats.append(format_caveat(finding + doubt, self.start.remedy))
        if distances[1:].max(initial=0.0) > tuned.FAR_SLOPE:
            finding = "the released slopes are larger than feature_bound makes plausible"
            caveats.append(format_caveat(finding + doubt, "a smaller feature_bound"))
        if reliability < tuned.LEAST_RELIABILITY and not far:
            finding = "clipping leaves little of most messages, or clients have few rows of a rare"
            finding += " outcome"
            caveats.append(
                format_caveat(finding + doubt, "in the first case a larger feature_bound")
            )
        # Wrong bounds also leave little but noise, so they are the first cause to remove.
        return tuple(caveats or self._noise_caveats(released, columns))

    def _noise_caveats(self, released, columns):
        """Caveats on released numbers that are mostly noise."""
        caveats = []
        noisy = np.sqrt(np.diag(released.covariance)) > tuned.MOSTLY_NOISE * self.prior_sds
        if noisy.any():
            finding = (
                f"the released coefficients of {list_columns(columns, noisy)} are mostly noise"
            )
            finding += ": their errors are more than half of those without any data"
            # The noise on a slope is in units of the slope.
            more = ", or a smaller feature_bound if rows allow it," if noisy[1:].any() else ""
            caveats.append(format_caveat(finding, f"more clients or a larger epsilon{more}"))
        remedy = "more clients, a larger epsilon, or a GaussianPrior with a covariance,"
        variances, noise = released.spreads**2, released.variance_noise
        return caveats + variance_caveats(columns, variances, noise, remedy)


def unpack_sums(mean, shape, noise_std):
    """RoundSums of a noisy mean of messages."""
    q = shape.n_varying
    slope, information, score, between_information, variance = LINK_MESSAGE.split(
        mean, shape.layout
    )
    within = np.append(np.zeros(q), slope)
    return RoundSums(
        within, information, score, between_information, variance.reshape(2, q), noise_std
    )


def stack_rounds(rounds):
    """One NamedTuple for those of several rounds, with the rounds first in every array."""
    return type(rounds[0])(*map(np.array, zip(*rounds, strict=True)))


def _diagonals(matrices):
    """Diagonals (r, p) of matrices (r, p, p)."""
    return np.diagonal(matrices, axis1=1, axis2=2)


def _centring(means):
    """Matrices (..., p, p) to the coefficients of features centred at means (..., p)."""
    p = means.shape[-1]
    matrices = np.zeros((*means.shape, p)) + np.eye(p)
    matrices[..., 0, :] += means
    return matrices


def _shrink_information(matrix, noise_std, least, floor=1.0):
    """Noisy mean information (p, p), shrunk to one that treats all features alike.

    Differences count as far as they exceed the noise (as in Ledoit and Wolf's estimator). Otherwise
    steps would be unbounded in directions where noise cancels the information. The first q columns
    keep their own information, of at least `least` (q,); the others have at least `floor` times
    the noise.
    """
    p, q = len(matrix), len(least)
    typical = max(np.trace(matrix[q:, q:]) / max(p - q, 1), floor * noise_std / np.sqrt(p))
    diagonal = np.full(p, typical)
    diagonal[:q] = np.maximum(np.diag(matrix)[:q], least)
    difference = matrix - np.diag(diagonal)
    # Off-diagonal entries have half the variance of diagonal ones, and occur twice.
    by_noise = max(p * (p + 1) / 2 - 1 - q, 0.0) * noise_std**2
    share = max(0.0, 1 - by_noise / max(np.sum(difference**2), np.finfo(float).tiny))
    scale = np.sqrt(np.multiply.outer(diagonal, diagonal))
    shrunk = (np.diag(diagonal) + share * difference) / scale
    return clip_eigenvalues(shrunk, tuned.LEAST_DIRECTION) * scale


def spread_scales(n_varying, feature_bound):
    """Scales (q,) of the spreads between clients: of the intercept, and of slopes."""
    scales = np.full(n_varying, tuned.SPREAD)
    scales[1:] /= feature_bound
    return scales
