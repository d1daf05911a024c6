"""What the server of a private fit of classes or counts makes of the noisy sums of its rounds.

Coefficients are those of a Bayesian regression of the score on the information, around a public
prior: where noise swamps the rounds, they stay near the start and say so by their errors. Spreads
are posterior medians.
"""

from typing import NamedTuple

import numpy as np

from pfl_sklearn.linear_model._private import _constants as tuned
from pfl_sklearn.linear_model._private._messages import (
    LINK,
    LinkShape,
    caveat,
    evidence,
    hidden_variances,
    listed,
    with_eigenvalues,
)


class PrivateStart(NamedTuple):
    """Public numbers from which a private fit starts."""

    level: float  # population intercept
    level_sd: float  # of its prior
    curvature: float  # largest one of a row
    remedy: str  # where the level is far from the start
    usual: float = 1.0  # curvature of a row that information is scaled for, over the largest one


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


class LinkRounds(NamedTuple):
    """The point of the next round, and all rounds so far."""

    point: RoundPoint
    n_rounds: int
    points: tuple = ()  # RoundPoints
    sums: tuple = ()  # RoundSums


class _Part(NamedTuple):
    """One part of the messages, as a regression of its score on its information.

    Each part counts by its own noise. Were the scores added up, the part within clients would add
    nothing but noise to coefficients of features that are constant within them.
    """

    score: np.ndarray  # (p,), mean over clients and rounds
    information: np.ndarray  # (p, p)
    score_noise: np.ndarray  # (p,), variances
    information_noise: np.ndarray  # (p,), variances, of the diagonal

    def error(self, n_clients, factor=1.0, more=0.0):
        """Covariance (p, p) of the score: noise, with a factor and more, and that of clients."""
        return np.diag(factor * self.score_noise + more) + self.information / n_clients

    def stated_precision(self, n_clients, distance):
        """Precision (p, p) that stated errors take, at points with a mean squared distance.

        Information may be noise: it counts less one standard deviation, and at least by half.
        """
        noise, own = np.sqrt(self.information_noise), np.diag(self.information)
        lost = np.divide(noise, own, out=np.zeros(len(own)), where=own > 0)
        root = np.sqrt(np.maximum(1 - lost, tuned.LEAST_SHARE))
        lowered = self.information * np.multiply.outer(root, root)
        error = self.error(n_clients, tuned.STATED, self.information_noise * distance)
        return lowered @ np.linalg.solve(error, lowered)


class LinkServer(NamedTuple):
    """What the server knows besides the released sums: public numbers."""

    shape: LinkShape
    start: PrivateStart
    n_clients: int
    known_variances: np.ndarray | None  # (q,), between clients

    @property
    def prior_sds(self):
        """Standard deviations (p,) of the prior of the coefficients."""
        d = self.shape.n_features
        return np.append(self.start.level_sd, np.full(d, tuned.SLOPE_SD / np.sqrt(max(d, 1))))

    @property
    def spread_scales(self):
        """Starts (q,) of the spreads, and units of their priors."""
        return spread_scales(self.shape.n_varying, np.sqrt(self.shape.n_features))

    def begin(self):
        """The RoundPoint of the first round."""
        population = np.append(self.start.level, np.zeros(self.shape.n_features))
        known = self.known_variances
        spreads = self.spread_scales if known is None else np.sqrt(known)
        # Features share the bound, and each has a square of 1.
        rows = self.shape.curvature * self.shape.max_rows_per_client
        information = np.full(self.shape.n_varying, max(float(rows), tuned.LEAST_LEVEL))
        means = np.zeros(len(population))
        covariance = np.diag(self.prior_sds**2)
        noise = np.zeros(self.shape.n_varying)
        return RoundPoint(population, spreads, information, means, covariance, noise)

    @property
    def own(self):
        """Position (p,) of the effect that a column goes with: the level's, if it does not vary."""
        q = self.shape.n_varying
        return np.append(np.arange(q), np.zeros(self.shape.n_fixed, dtype=int))

    def next_state(self, total, rounds, noise_std):
        """The LinkRounds after a round with this noisy sum of messages."""
        points, m = (*rounds.points, rounds.point), self.n_clients
        sums = (*rounds.sums, round_sums(total / m, self.shape, noise_std / m))
        n_first = rounds.n_rounds - rounds.n_rounds // 2
        # In the first half the later half of the rounds so far: those before were further away.
        first = n_first if len(sums) > n_first else len(sums) // 2
        every = stacked(sums), stacked(points)
        means, information = self.column_means(*every), self.typical_information(*every)
        averaged = stacked(sums[first:]), stacked(points[first:])
        point = self.next_point(rounds.point, *averaged, means)._replace(information=information)
        return LinkRounds(point, rounds.n_rounds, points, sums)

    def next_point(self, point, sums, points, means):
        """The RoundPoint after this one and rounds of equal noise, whose sums are averaged."""
        goal, covariance = self._goal(sums, points, means)
        move = (goal - point.population) / self.prior_sds
        move *= min(1.0, tuned.LONGEST_MOVE / max(np.abs(move).max(), tuned.LONGEST_MOVE))
        spreads, noise = point.spreads, point.variance_noise
        if self.known_variances is None:
            goals, noise = self._spreads(sums, points)
            longest = tuned.LONGEST_LOG_MOVE
            spreads = spreads * np.exp(np.clip(np.log(goals / spreads), -longest, longest))
        return point._replace(
            population=point.population + move * self.prior_sds,
            spreads=spreads,
            means=means,
            covariance=covariance,
            variance_noise=noise,
        )

    def column_means(self, sums, points):
        """Means (p,) of the columns, as all rounds tell them: information on the level goes along.

        They are posterior means around 0: the first rounds are mostly noise.
        """
        q = self.shape.n_varying
        level = np.maximum(sums.around[:, 0, 0], tuned.LEAST_LEVEL)
        weights = 2 * (level / (self.shape.scales[3] * sums.noise_std)) ** 2
        means = points.means[:, q:] + sums.around[:, 0, q:] / level[:, None]
        return np.append(np.zeros(q), weights @ means / (weights.sum() + 1.0))

    def typical_information(self, sums, points):
        """Information (q,) of a typical client on its own coefficients, as all rounds tell it.

        With information g a client has the pull u^2 g / (1 + t^2 g) for the unit u. Clipping takes
        as much of the pulls as of their squares, so their ratio is used.
        """
        weights = sums.noise_std**-2.0
        pulls = weights @ _diagonals(sums.around)[:, : self.shape.n_varying]
        squares = weights @ sums.variance[:, 1]
        units = weights @ points.units**2 / weights.sum()
        variances = weights @ points.spreads**2 / weights.sum()
        ratio = np.maximum(squares, 0.0) / np.maximum(pulls, tuned.LEAST_LEVEL * weights.sum())
        left = np.maximum(units - ratio * variances, np.finfo(float).tiny)
        known = points.information[-1]
        found = np.clip(ratio / left, known / tuned.LONGEST_FACTOR, known * tuned.LONGEST_FACTOR)
        largest = np.full(len(known), float(self.shape.curvature * self.shape.max_rows_per_client))
        largest[1:] *= self.shape.n_features  # of a feature that has the bound to itself
        return np.clip(found, tuned.LEAST_LEVEL, np.maximum(largest, tuned.LEAST_LEVEL))

    def _goal(self, sums, points, means):
        """Coefficients (p,) that the rounds point to, and the covariance of their error.

        At the coefficients b of a round the mean score is about I (goal - b), with the information
        I. Its errors are the noise of the release and the variance of clients, which is I over
        their number. The stated errors count the noise on the information, too; the estimate does
        not, as that would only pull it to the start.
        """
        # Features about their means: there the level does not depend on what is said of slopes.
        centring = _centring(means)
        at = points.population @ centring.T
        middle, prior = at.mean(axis=0), np.diag(self.prior_sds**-2)
        between, within = self._parts(sums, points, _centring(points.means - means))
        # Rounds at a small unit know more of what differs between clients: they count by it.
        known = np.maximum(_diagonals(sums.around)[:, self.own], tuned.LEAST_LEVEL)
        away = np.average(at, axis=0, weights=known / points.units[:, self.own] ** 2) - middle
        parts = between._replace(score=between.score + between.information @ away), within
        precision, pull = prior, prior @ (self.begin().population - middle)
        for part in parts:
            information, score = evidence(part.information, part.score, part.error(self.n_clients))
            precision, pull = precision + information, pull + score
        goal = middle + np.linalg.solve(precision, pull)
        distance = np.mean(np.sum((at - goal) ** 2, axis=1))
        stated = prior + sum(part.stated_precision(self.n_clients, distance) for part in parts)
        back = np.linalg.inv(centring)
        return back @ goal, back @ np.linalg.inv(stated) @ back.T

    def _parts(self, sums, points, moves):
        """Parts of the messages, between clients and within, in centred coefficients."""
        q, units = self.shape.n_varying, points.units[:, self.own]
        noise = sums.noise_std[0] / np.sqrt(len(units))
        by_score, by_information, by_pull, by_around = np.multiply(self.shape.scales, noise)
        score = np.mean(((sums.between / units)[:, None] @ moves)[:, 0], axis=0)
        around = sums.around / units[:, :, None] / units[:, None]
        moved = np.mean(moves.swapaxes(1, 2) @ around @ moves, axis=0)
        variance = by_around**2 * np.mean(units**-4.0, axis=0)
        # In units all entries have the same noise.
        unit = variance**-0.25
        outer = np.multiply.outer(unit, unit)
        moved = _shrunk(moved * outer, 1.0, tuned.LEAST_LEVEL * unit[:q] ** 2) / outer
        own = np.zeros_like(moved)
        if q < len(own):
            mean = sums.information.mean(axis=0)
            own[q:, q:] = _shrunk(mean, by_information, np.zeros(0), tuned.LEAST_WITHIN)
        alike = np.ones(len(own))  # within clients all columns have the same noise
        return (
            _Part(score, moved, by_pull**2 * np.mean(units**-2.0, axis=0), variance),
            _Part(sums.within.mean(axis=0), own, alike * by_score**2, alike * by_information**2),
        )

    def _spreads(self, sums, points):
        """Standard deviations T (q,) between clients, and those of the noise on T^2.

        At t the mean of the gaps is a little below that of the squares times (T^2 - t^2) / u^2. So
        each round tells T^2; we take the median of the posterior of T under a half-Cauchy prior.
        """
        units, noise = points.units**2, sums.noise_std[0]
        weights = units**-2 / np.sum(units**-2, axis=0)  # the errors of gaps are alike
        gaps, squares = sums.variance.swapaxes(0, 1)
        square = tuned.RESPONSE * np.maximum(squares.mean(axis=0), tuned.LEAST_OWN)
        # A population that is off lets all clients seem apart, by the square of the mean of their
        # z. Far off, gaps are cut, and would not show as much.
        shifts = sums.between[:, : self.shape.n_varying] ** 2
        gaps = gaps - np.minimum(shifts, np.maximum(gaps, 0.0))
        gaps += (self.shape.scales[2] * noise) ** 2 + tuned.LOST_GAP / self.shape.factor**3
        variance = np.sum(weights * (points.spreads**2 + units * gaps / square), axis=0)
        by_noise = (self.shape.variance_scales[0] * noise / square) ** 2
        by_noise *= np.sum((weights * units) ** 2, axis=0)
        # A client's own estimate of its squared effect has twice the square of its variance. Were
        # that to grow with T, a negative estimate would speak for the largest T.
        own = np.sum(weights * units, axis=0)
        error = by_noise + 2 * own**2 / (self.n_clients * square)
        spreads = np.multiply.outer(self.spread_scales, tuned.SPREADS)
        priors = np.where(np.arange(len(own)) > 0, tuned.SLOPE_SPREAD, tuned.SPREAD)
        logs = -((variance[:, None] - spreads**2) ** 2) / (2 * error[:, None])
        logs -= np.log1p((tuned.SPREADS / priors[:, None]) ** 2)
        density = np.exp(logs - logs.max(axis=1, keepdims=True))
        below = np.cumsum(density, axis=1) - density / 2
        share = below / density.sum(axis=1, keepdims=True)
        medians = [np.interp(0.5, *both) for both in zip(share, spreads, strict=True)]
        return np.array(medians), np.sqrt(by_noise)

    def caveats(self, rounds, columns):
        """What the released numbers of these columns themselves make doubtful, and what helps."""
        released, sums = rounds.point, stacked(rounds.sums[-(rounds.n_rounds // 2) :])
        away = np.abs(released.population - self.begin().population) / self.prior_sds
        # Where the rest of most messages is far too long, clipping leaves hardly any pull. A level
        # that is far from the start has the same effect, and a cause of its own.
        noise = self.shape.scales[3] * sums.noise_std[0] / np.sqrt(len(sums.around))
        pull, far = np.mean(sums.around[:, 0, 0]) + 2 * noise, away[0] > tuned.FAR_LEVEL
        found, doubt = [], ", so errors may be too small"
        if far:
            what = "the released level is far from the start"
            found.append(caveat(what + doubt, self.start.remedy))
        if away[1:].max(initial=0.0) > tuned.FAR_SLOPE:
            what = "the released slopes are larger than feature_bound makes plausible"
            found.append(caveat(what + doubt, "a smaller feature_bound"))
        if pull < tuned.LEAST_PULL and not far:
            what = "clipping leaves little of most messages, or clients have few rows of a rare"
            what += " outcome"
            found.append(caveat(what + doubt, "in the first case a larger feature_bound"))
        # Bounds that are off leave little but noise, too: they are the cause to remove first.
        return tuple(found or self._mostly_noise(released, columns))

    def _mostly_noise(self, released, columns):
        """Caveats on released numbers that are mostly noise."""
        found = []
        unsure = np.sqrt(np.diag(released.covariance)) > tuned.MOSTLY_NOISE * self.prior_sds
        if unsure.any():
            what = f"the released coefficients of {listed(columns, unsure)} are mostly noise"
            what += ": their errors are more than half of those without any data"
            # Noise on a slope is in units of it.
            more = ", or a smaller feature_bound if rows allow it," if unsure[1:].any() else ""
            found.append(caveat(what, f"more clients or a larger epsilon{more}"))
        remedy = "more clients, a larger epsilon, or a GaussianPrior with a covariance,"
        variances, noise = released.spreads**2, released.variance_noise
        return found + hidden_variances(columns, variances, noise, remedy)


def round_sums(mean, shape, noise_std):
    """RoundSums of a noisy mean of messages."""
    q = shape.n_varying
    slope, information, score, around, variance = LINK.split(mean, shape.layout)
    within = np.append(np.zeros(q), slope)
    return RoundSums(within, information, score, around, variance.reshape(2, q), noise_std)


def stacked(rounds):
    """One tuple for several, of the same fields, whose arrays have the rounds first."""
    return type(rounds[0])(*map(np.array, zip(*rounds, strict=True)))


def _diagonals(matrices):
    """Diagonals (r, p) of matrices (r, p, p)."""
    return np.diagonal(matrices, axis1=1, axis2=2)


def _centring(means):
    """Matrices (..., p, p) to coefficients of features less their means (..., p)."""
    p = means.shape[-1]
    matrices = np.zeros((*means.shape, p)) + np.eye(p)
    matrices[..., 0, :] += means
    return matrices


def _shrunk(matrix, noise_std, least, floor=1.0):
    """Mean information (p, p) with noise, shrunk to one that treats all features alike.

    What differs from that counts as far as it exceeds the noise (Ledoit and Wolf's idea). Without
    it, directions of which noise takes the information would have steps of any length. The first
    columns have their own information, of at least `least` (q,); the others have at least `floor`
    times the noise.
    """
    p, q = len(matrix), len(least)
    typical = max(np.trace(matrix[q:, q:]) / max(p - q, 1), floor * noise_std / np.sqrt(p))
    diagonal = np.full(p, typical)
    diagonal[:q] = np.maximum(np.diag(matrix)[:q], least)
    difference = matrix - np.diag(diagonal)
    # Entries off the diagonal have half of its variance each, and occur twice.
    by_noise = max(p * (p + 1) / 2 - 1 - q, 0.0) * noise_std**2
    share = max(0.0, 1 - by_noise / max(np.sum(difference**2), np.finfo(float).tiny))
    scale = np.sqrt(np.multiply.outer(diagonal, diagonal))
    shrunk = (np.diag(diagonal) + share * difference) / scale
    return with_eigenvalues(shrunk, tuned.LEAST_DIRECTION) * scale


def spread_scales(n_varying, feature_bound):
    """Scales (q,) of the spreads between clients: of the level, and of slopes."""
    scales = np.full(n_varying, tuned.SPREAD)
    scales[1:] /= feature_bound
    return scales
