"""What the server of a private fit makes of noisy sums of messages: the point of the next round.

Coefficients are those of a Bayesian regression of the score on the information, around a public
prior: where noise swamps the rounds, they stay near the start and say so by their errors. Spreads
are posterior medians. None of the constants looks at data; they were found by trials on simulated
and public tables.
"""

from typing import NamedTuple

import numpy as np

from pfl_sklearn.linear_model._glmm._private_messages import MessageShape, RoundPoint

_SLOPE_SD = 2.0  # of the prior, in predictors of a row at the feature bound
_LONGEST_MOVE = 2 / 3  # of the population in a round, in standard deviations of the prior
_SPREAD = 1.0  # scale of the half-Cauchy prior of t, and its start; over the root of d for slopes
# A narrow prior holds spreads of slopes down, and too small spreads hold slopes near 0.
_SLOPE_SPREAD = 3.0  # scale of the prior of a slope's t, over its start
_LONGEST_LOG_MOVE = 0.5  # of log t in a round
_LONGEST_FACTOR = 2.0  # of the information of a typical client in a round
LEAST_SPREAD = 0.05  # t, in its prior's scale; messages are divided by it
_SPREADS = np.linspace(LEAST_SPREAD, 5.0, 2000)  # t, in the same scale
_LEAST_SQUARE = 0.3  # of a client's information on t, in units of a typical one's: it is about 1
# Slope of gaps in T^2 over squares: of classes and counts .4 to 1.2, less for large spreads and few
# rows. It decides how fast rounds come near.
_RESPONSE = 0.8
_LOST = 0.15  # of a gap by clipping, in simulations with factor 1; with factor f about .15 / f^3
_LEAST_LEVEL = 0.3  # information on the level, per client: it has at least a row or two
_LEAST_DIRECTION = 0.1  # information in a direction, over that of a typical one
# Variance of the noise that stated errors count, over its own: it also moves the points of rounds,
# the means of features and t. By simulation, so that intervals cover .9 or more.
_STATED = 2.5
# Standard deviations of their priors, from which coefficients count as far from the start.
_FAR_LEVEL, _FAR_SLOPE = 1.5, 3.0
_LEAST_PULL = 0.5  # of clients towards their own level, in units of a typical one's


class PrivateStart(NamedTuple):
    """Public numbers from which a private fit starts."""

    level: float  # population intercept
    level_sd: float  # of its prior
    curvature: float  # largest one of a row
    remedy: str  # where the level is far from the start


class Server(NamedTuple):
    """What the server knows besides the released sums: public numbers."""

    shape: MessageShape
    start: PrivateStart
    n_clients: int
    known_variances: np.ndarray | None  # (q,), between clients

    @property
    def prior_sds(self):
        """Standard deviations (p,) of the prior of the coefficients."""
        d = self.shape.n_features
        return np.append(self.start.level_sd, np.full(d, _SLOPE_SD / np.sqrt(max(d, 1))))

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
        rows = self.shape.curvature * self.shape.rows_cap
        information = np.full(self.shape.n_varying, max(float(rows), _LEAST_LEVEL))
        means = np.zeros(len(population))
        return RoundPoint(population, spreads, information, means, np.diag(self.prior_sds**2))

    def next_point(self, sums, points, means):
        """The RoundPoint after rounds of equal noise, whose sums are averaged."""
        goal, covariance = self._goal(sums, points, means)
        move = (goal - points[-1].population) / self.prior_sds
        move *= min(1.0, _LONGEST_MOVE / max(np.abs(move).max(), _LONGEST_MOVE))
        spreads = points[-1].spreads
        if self.known_variances is None:
            found = [self._spread(sums, points, k) for k in range(len(spreads))]
            moved = np.clip(np.log(found / spreads), -_LONGEST_LOG_MOVE, _LONGEST_LOG_MOVE)
            spreads = spreads * np.exp(moved)
        return points[-1]._replace(
            population=points[-1].population + move * self.prior_sds,
            spreads=spreads,
            means=means,
            covariance=covariance,
        )

    def column_means(self, sums, points):
        """Means (p,) of the columns, as all rounds tell them: information on the level goes along.

        They are posterior means around 0: the first rounds are mostly noise.
        """
        q = self.shape.n_varying
        means, weights = np.zeros(self.shape.n_fixed), 0.0
        for each, point in zip(sums, points, strict=True):
            level = max(each.around[0, 0], _LEAST_LEVEL)
            weight = 2 * (level / (self.shape.scales[3] * each.noise_std)) ** 2
            means += weight * (point.means[q:] + each.around[0, q:] / level)
            weights += weight
        return np.append(np.zeros(q), means / (weights + 1.0))

    def typical_information(self, sums, points):
        """Information (q,) of a typical client on its own coefficients, as all rounds tell it.

        With information g a client has the pull u^2 g / (1 + t^2 g) for the unit u. Clipping takes
        as much of the pulls as of their squares, so their ratio is used.
        """
        weights = np.array([each.noise_std for each in sums]) ** -2.0
        pulls = weights @ [np.diag(each.around)[: self.shape.n_varying] for each in sums]
        squares = weights @ [each.variance[1] for each in sums]
        units = weights @ [point.units**2 for point in points] / weights.sum()
        variances = weights @ [point.spreads**2 for point in points] / weights.sum()
        ratio = np.maximum(squares, 0.0) / np.maximum(pulls, _LEAST_LEVEL * weights.sum())
        left = np.maximum(units - ratio * variances, np.finfo(float).tiny)
        known = points[-1].information
        found = np.clip(ratio / left, known / _LONGEST_FACTOR, known * _LONGEST_FACTOR)
        largest = np.full(len(known), float(self.shape.curvature * self.shape.rows_cap))
        largest[1:] *= self.shape.n_features  # of a feature that has the bound to itself
        return np.clip(found, _LEAST_LEVEL, np.maximum(largest, _LEAST_LEVEL))

    def _goal(self, sums, points, means):
        """Coefficients (p,) that the rounds point to, and the covariance of their error.

        At the coefficients b of a round the mean score is about I (goal - b), with the information
        I. Its errors are the noise of the release and the variance of clients, which is I over
        their number. The stated errors count the noise on the information, too; the estimate does
        not, as that would only pull it to the start.
        """
        # Features about their means: there the level does not depend on what is said of slopes.
        centring, moves = _centring(means), [_centring(point.means - means) for point in points]
        at = np.array([centring @ point.population for point in points])
        middle, prior = at.mean(axis=0), np.diag(self.prior_sds**-2)
        origin = self.begin().population
        score, score_noise = self._score(sums, points, moves)
        between, within, noise = self._information(sums, points, moves)
        information = between + within
        # Rounds at a small unit know more of what differs between clients: they count by it.
        own = np.append(np.arange(self.shape.n_varying), np.zeros(self.shape.n_fixed, dtype=int))
        known = [
            np.maximum(np.diag(each.around)[own], _LEAST_LEVEL) / point.column_units**2
            for each, point in zip(sums, points, strict=True)
        ]
        score = score + between @ (np.average(at, axis=0, weights=known) - middle)

        def solved(more_noise):
            error = np.diag(score_noise + more_noise) + information / self.n_clients
            pulled = np.linalg.solve(error, information)
            covariance = np.linalg.inv(information @ pulled + prior)
            return middle + covariance @ (pulled.T @ score + prior @ (origin - middle)), covariance

        goal = solved(0.0)[0]
        distance = np.mean(np.sum((at - goal) ** 2, axis=1))
        back = np.linalg.inv(centring)
        covariance = solved((_STATED - 1) * score_noise + noise * distance)[1]
        return back @ goal, back @ covariance @ back.T

    def _score(self, sums, points, moves):
        """Mean score (p,) of rounds in centred coefficients, and variances (p,) of its noise."""
        units = np.array([point.column_units for point in points])
        rounds = zip(sums, units, moves, strict=True)
        score = np.mean([s.within + a.T @ (s.between / u) for s, u, a in rounds], axis=0)
        within, _, between, _ = self.shape.scales
        variance = between**2 * np.mean(units**-2.0, axis=0)
        variance[self.shape.n_varying :] += within**2
        return score, variance * sums[0].noise_std ** 2 / len(sums)

    def _information(self, sums, points, moves):
        """Mean information between and within (p, p), and variances (p,) of the noise on both."""
        units, q = np.array([point.column_units for point in points]), self.shape.n_varying
        _, within, _, around = self.shape.scales
        noise = sums[0].noise_std / np.sqrt(len(sums))
        rounds = zip(sums, units, moves, strict=True)
        moved = np.mean(
            [a.T @ (s.around / np.multiply.outer(u, u)) @ a for s, u, a in rounds], axis=0
        )
        variance = (around * noise) ** 2 * np.mean(units**-4.0, axis=0)
        # In units all entries have the same noise.
        unit = variance**-0.25
        outer = np.multiply.outer(unit, unit)
        between = _shrunk(moved * outer, 1.0, _LEAST_LEVEL * unit[:q] ** 2) / outer
        own = np.zeros_like(between)
        if q < len(own):
            mean = np.mean([each.information for each in sums], axis=0)
            own[q:, q:] = _shrunk(mean, within * noise, np.zeros(0))
        variance[q:] += (within * noise) ** 2
        return between, own, variance

    def _spread(self, sums, points, k):
        """Standard deviation T of coefficient k between clients that the rounds point to.

        At t the mean of the gaps is a little below that of the squares times (T^2 - t^2) / u^2. So
        each round tells T^2; we take the median of the posterior of T under a half-Cauchy prior.
        """
        units = np.array([point.units[k] for point in points]) ** 2
        weights = units**-2 / np.sum(units**-2)  # the errors of gaps are alike
        gaps, squares = np.array([each.variance[:, k] for each in sums]).T
        square = _RESPONSE * max(squares.mean(), _LEAST_SQUARE)
        noise, spreads = sums[0].noise_std, _SPREADS * self.spread_scales[k]
        # A population that is off lets all clients seem apart, by the square of the mean of their
        # z. Far off, gaps are cut, and would not show as much.
        shifts = np.array([each.between[k] for each in sums]) ** 2
        gaps -= np.minimum(shifts, np.maximum(gaps, 0.0))
        gaps += (self.shape.scales[2] * noise) ** 2 + _LOST / self.shape.factor**3
        variances = np.array([point.spreads[k] for point in points]) ** 2
        variance = weights @ (variances + units * gaps / square)
        error = (self.shape.variance_scales[0] * noise / square) ** 2 * (weights**2 @ units**2)
        # A client's own estimate of its squared effect has twice the square of its variance. Were
        # that to grow with T, a negative estimate would speak for the largest T.
        own = weights @ units
        error += 2 * own**2 / (self.n_clients * square)
        logs = -((variance - spreads**2) ** 2) / (2 * error)
        logs -= np.log1p((_SPREADS / (_SLOPE_SPREAD if k else _SPREAD)) ** 2)
        density = np.exp(logs - logs.max())
        below = np.cumsum(density) - density / 2
        return np.interp(0.5, below / density.sum(), spreads)

    def caveats(self, released, sums):
        """What the released numbers themselves make doubtful, and what would help."""
        away = np.abs(released.population - self.begin().population) / self.prior_sds
        # Where the rest of most messages is far too long, clipping leaves hardly any pull. A level
        # that is far from the start has the same effect, and a cause of its own.
        noise = self.shape.scales[3] * sums[0].noise_std / np.sqrt(len(sums))
        pull = np.mean([each.around[0, 0] for each in sums]) + 2 * noise
        far = away[0] > _FAR_LEVEL
        causes = (
            (far, "the released level is far from the start", self.start.remedy),
            (
                away[1:].max(initial=0.0) > _FAR_SLOPE,
                "the released slopes are larger than feature_bound makes plausible",
                "a smaller feature_bound",
            ),
            (
                pull < _LEAST_PULL and not far,
                "clipping leaves little of most messages, or clients have few rows of a rare "
                "outcome",
                "in the first case a larger feature_bound",
            ),
        )
        return tuple(
            f"{what}, so errors may be too small; {remedy} would help, but a further fit spends "
            "its epsilon again."
            for doubtful, what, remedy in causes
            if doubtful
        )


def _centring(means):
    """Matrix (p, p) that takes coefficients to those of features less their means (p,)."""
    matrix = np.eye(len(means))
    matrix[0] += means
    return matrix


def _shrunk(matrix, noise_std, least):
    """Mean information (p, p) with noise, shrunk to one that treats all features alike.

    What differs from that counts as far as it exceeds the noise (Ledoit and Wolf's idea). Without
    it, directions of which noise takes the information would have steps of any length. The first
    columns have their own information, of at least `least` (q,).
    """
    p, q = len(matrix), len(least)
    typical = max(np.trace(matrix[q:, q:]) / max(p - q, 1), noise_std / np.sqrt(p))
    diagonal = np.full(p, typical)
    diagonal[:q] = np.maximum(np.diag(matrix)[:q], least)
    difference = matrix - np.diag(diagonal)
    # Entries off the diagonal have half of its variance each, and occur twice.
    by_noise = max(p * (p + 1) / 2 - 1 - q, 0.0) * noise_std**2
    share = max(0.0, 1 - by_noise / max(np.sum(difference**2), np.finfo(float).tiny))
    scale = np.sqrt(np.multiply.outer(diagonal, diagonal))
    values, vectors = np.linalg.eigh((np.diag(diagonal) + share * difference) / scale)
    return (vectors * np.maximum(values, _LEAST_DIRECTION)) @ vectors.T * scale


def spread_scales(n_varying, feature_bound):
    """Scales (q,) of the spreads between clients: of the level, and of slopes."""
    scales = np.full(n_varying, _SPREAD)
    scales[1:] /= feature_bound
    return scales
