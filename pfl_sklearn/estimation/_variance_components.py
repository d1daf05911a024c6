"""Variance components of client means: the arithmetic of one-way random effects.

Client i reports a mean with variance ``between + noise * unit_i + extra`` around the population
mean, where ``unit_i`` is known (one over the client's weight) and ``extra`` is the variance that a
release added. Arrays have clients first; `d` coordinates share the components.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import brentq

from pfl_sklearn._clients import row_counts, segment_sums
from pfl_sklearn._columns import unit_near

# Where clients are of very unequal sizes, the criterion can have two minima in a variance. A root
# finder alone would not notice; the grid covers the whole range.
_VARIANCE_GRID_POINTS = 48
_GRID_CELLS = 1 << 20  # candidates times distinct weights at once: 8 MB for each array
# Squares around the clients' means below this share of the squares that they are the difference of
# have lost six of their sixteen digits.
_CANCELLATION = 1e-6


class ClientMeans(NamedTuple):
    """Sufficient statistics of the rows of m clients."""

    means: np.ndarray  # (m, d)
    weights: np.ndarray  # (m,), summed row weights; the mean's variance is noise / weight
    n_rows: np.ndarray  # (m,)
    within: np.ndarray  # (d,), weighted squares of the rows around their client's mean
    log_weights: float  # summed logs of the row weights

    @property
    def degrees_of_freedom(self):
        """Degrees of freedom of the rows around their client's mean, in one coordinate."""
        return int(self.n_rows.sum()) - len(self.n_rows)

    def in_units(self, unit):
        """The statistics of the rows in this unit."""
        return self._replace(means=self.means / unit, within=self.within / unit**2)

    def of_clients(self, clients):
        """The statistics of some clients, whose squares alone are unknown."""
        return self._replace(
            means=self.means[clients],
            weights=self.weights[clients],
            n_rows=self.n_rows[clients],
            within=np.full_like(self.within, np.nan),
        )

    def outputs(self, outputs):
        """The statistics of a slice of the coordinates."""
        return self._replace(means=self.means[:, outputs], within=self.within[outputs])


class Population(NamedTuple):
    """Parameters of the population of d coordinates; None where they are to be estimated.

    Variances are numbers that all coordinates share, or (d,).
    """

    mean: Any  # (d,)
    between: Any  # variance of the clients' means
    noise: Any  # variance of a row around its client's mean
    mean_variance: Any = 0.0  # of every coordinate of `mean`; 0 if it was given
    log_likelihood: float = math.nan  # NaN after a release: nobody saw the rows of all clients

    @property
    def is_known(self):
        """Whether nothing is left to estimate, and nothing to release."""
        return not any(value is None for value in (self.mean, self.between, self.noise))

    def outputs(self, outputs):
        """The population of a slice of the coordinates, whose shared variances become numbers."""
        mean = None if self.mean is None else self.mean[outputs]
        return self._replace(
            mean=mean, between=_shared(self.between, outputs), noise=_shared(self.noise, outputs)
        )

    def of_width(self, d):
        """The population with an entry of every parameter for each of d coordinates."""
        mean, between, noise, mean_variance = (
            np.broadcast_to(value, d).astype(float) for value in self[:4]
        )
        return Population(mean, between, noise, mean_variance, self.log_likelihood)


def _shared(variances, outputs):
    """The variance that a slice of the coordinates shares; None if it is unknown."""
    return None if variances is None else variances[outputs][0]


def client_means(y, codes, n_clients, weights=None, centre=None):
    """Reduce rows `y` (n, d) to the statistics of their clients.

    Rows are shifted by `centre` (d,) before they are summed. None is their mean, which is the most
    precise. A release must give a constant, because with a common mean, rounding and overflow carry
    one client's values into the others' means.
    """

    def weigh(values):
        return values if weights is None else values * weights[:, None]

    n_rows = row_counts(codes, n_clients)
    totals = n_rows.astype(float) if weights is None else segment_sums(weights, codes, n_clients)
    log_weights = 0.0 if weights is None else float(np.log(weights).sum())
    if centre is None:
        centre = weigh(y).sum(axis=0) / totals.sum()
    shifted = y - centre
    weighted = weigh(shifted)
    means = segment_sums(weighted, codes, n_clients) / totals[:, None]
    square = np.einsum("nd,nd->d", weighted, shifted)
    within = square - totals @ means**2  # without a second pass over the rows, which is slow
    if np.any(within < _CANCELLATION * square):
        shifted -= means[codes]
        within = np.einsum("nd,nd->d", weigh(shifted), shifted)
    return ClientMeans(means + centre, totals, n_rows, within, log_weights)


def estimate_components(table, method, mean=None, between=None, noise=None, extra=0.0):
    """Population whose mean (d,), between and noise variance are estimated where they are None.

    `table` are ClientMeans, `method` is "reml", "ml" or "moments", and `extra` the variance that a
    release added to every mean. From a single client, `between` is NaN. An unknown noise variance
    without a client of two rows raises ValueError.
    """
    if noise is None:
        check_noise_is_identified(table)
    likelihood = likelihood_in_units(table, method == "reml", mean, between, noise, extra)
    between, noise = (_quotient(value, likelihood.unit**2) for value in (between, noise))
    return _estimate_variances(likelihood, method, between, noise)


def likelihood_in_units(table, restricted, mean, between, noise, extra=0.0):
    """MeansLikelihood in a unit that makes the numbers near 1."""
    # Precisions are squared, so variances of 1e160 or 1e-160 would overflow or vanish. The unit is
    # a power of two, which rounds nothing.
    known = [value for value in (between, noise, extra) if value is not None and np.isfinite(value)]
    spread = np.abs(table.means - table.means.mean(axis=0)).max()
    largest = max([table.within.max() / table.n_rows.sum(), *known])
    unit = unit_near(max(spread, np.sqrt(largest)))
    restricted = restricted and mean is None  # a known mean takes no degree of freedom
    return MeansLikelihood(table, restricted, mean, extra, unit)


def _quotient(value, unit):
    """Known value over a unit; None if the value is unknown."""
    return None if value is None else value / unit


def _estimate_variances(likelihood, method, between, noise):
    """The population, with the variances that are None filled in."""
    pooled = likelihood.pooled_noise() if noise is None else noise
    if likelihood.n_clients == 1 and between is None:
        # One client shows no spread between clients. Its mean is the population's, with its error.
        return likelihood.population(0.0, pooled)._replace(between=np.nan)
    if method == "moments":
        between = likelihood.moment_between(pooled) if between is None else between
        return likelihood.population(between, pooled)
    if between is not None and np.isinf(between):
        # Without pooling, client means carry no information on the noise variance.
        return likelihood.population(between, pooled)
    if between is None:
        return _search_ratio(likelihood) if noise is None else _search_between(likelihood, noise)
    if noise is None:
        return _search_noise(likelihood, between)
    return likelihood.population(between, noise)


def check_noise_is_identified(table):
    """Raise ValueError if no client has a second row."""
    if table.degrees_of_freedom == 0:
        n_rows = len(table.n_rows)
        samples = "1 sample" if n_rows == 1 else f"n_samples = {n_rows}"
        raise ValueError(
            f"every client has one row ({samples}), so the data cannot separate noise_variance "
            "from the spread between clients; give noise_variance or more rows per client."
        )


class MeansLikelihood:
    """Marginal likelihood of the client means, with the population mean profiled out.

    Clients of equal weight are summed first, so the cost of an evaluation is proportional to the
    number of distinct weights.
    """

    def __init__(self, table, restricted, mean, extra, unit):
        table, mean = table.in_units(unit), _quotient(mean, unit)
        self.table, self.restricted, self.extra = table, restricted, extra / unit**2
        self.unit = unit
        self.n_clients, self.d = table.means.shape
        # Sums of squares lose fewer digits around the plain mean than around 0.
        self.centre = table.means.mean(axis=0)
        self.known_mean = None if mean is None else np.asarray(mean) - self.centre
        self.inverse_weights, self.count, self.first, self.second = _by_weight(table, self.centre)
        self.within = table.within.sum()
        self.within_dof = table.degrees_of_freedom * self.d
        self.n_free = self.within_dof + self.n_clients * self.d - (self.d if restricted else 0)
        self.n_contrasts = int(table.n_rows.sum()) - restricted  # of one coordinate

    def weighted(self, precision):
        """GLS mean (..., d), total precision and weighted squares (...,) around the mean.

        `precision` (..., u) may hold several candidates at once.
        """
        total = precision @ self.count
        first = precision @ self.first
        mean = first / total[..., None] if self.known_mean is None else self.known_mean
        # Rounding may leave a sum of squares just below 0.
        return mean, total, np.maximum(self._squares(precision, mean), 0.0)

    def _squares(self, precision, mean):
        """Squares (...,) of the client means around `mean`, weighted by `precision`."""
        total, first = precision @ self.count, precision @ self.first
        around = np.sum(mean * (total[..., None] * mean - 2 * first), axis=-1)
        return precision @ self.second + around

    def criterion(self, between, noise):
        """Minus twice the log-likelihood, up to what does not depend on the variances.

        The variances may be vectors of candidates (k,).
        """
        value = self.of_means(between, noise)
        if self.within_dof:  # otherwise a noise variance of 0 would give 0 times minus infinity
            value = value + self.within_dof * np.log(noise) + self.within / noise
        return value

    def of_means(self, between, noise):
        """The part of the criterion that depends on `between`; the rest may swamp it."""
        between, noise = np.asarray(between)[..., None], np.asarray(noise)[..., None]
        variance = between + noise * self.inverse_weights + self.extra
        _, total, square = self.weighted(1 / variance)
        value = self.d * (np.log(variance) @ self.count) + square
        return value + self.d * np.log(total) if self.restricted else value

    def at_ratio(self, ratio):
        """Best noise variance when between = ratio * noise, and the criterion there."""
        variance = np.asarray(ratio)[..., None] + self.inverse_weights
        _, total, square = self.weighted(1 / variance)
        noise = (self.within + square) / self.n_free
        value = self.d * (np.log(variance) @ self.count) + self.n_free * (np.log(noise) + 1)
        return noise, value + self.d * np.log(total) if self.restricted else value

    def slope(self, between, noise, direction):
        """Derivative of the criterion when between (direction 0) or noise (1) grows."""
        precision = 1 / (between + noise * self.inverse_weights + self.extra)
        # Derivatives of the clients' variances.
        growth = self.inverse_weights if direction else np.ones_like(self.inverse_weights)
        mean, total, _ = self.weighted(precision)
        squared = precision**2 * growth
        value = self.d * (precision * growth) @ self.count - self._squares(squared, mean)
        if direction and self.within_dof:
            value += self.within_dof / noise - self.within / noise / noise
        return value - self.d * (squared @ self.count) / total if self.restricted else value

    def pooled_noise(self):
        """Noise variance from the rows around their client's mean alone."""
        return self.within / self.within_dof

    def moment_between(self, noise):
        """Spread of the client means less what noise and release explain, floored at 0."""
        # Without a release this is the estimator of Bühlmann and Straub, in which clients have
        # their weights.
        # Beside the noise of a release, clients' numbers of rows hardly matter.
        weights = np.ones_like(self.inverse_weights) if self.extra else 1 / self.inverse_weights
        _, total, square = self.weighted(weights)
        # The squares have the mean sum(free * variance), of variances of the clients' means.
        free = weights * (1.0 if self.known_mean is not None else 1 - weights / total) * self.count
        chance = free @ (noise * self.inverse_weights + self.extra)
        # Chance makes the difference negative where clients are alike.
        return max(0.0, float((square / self.d - chance) / free.sum()))

    def spread(self):
        """Mean square of the client means around the population mean."""
        square = self.weighted(np.ones_like(self.inverse_weights))[2]
        return square / (max(self.n_clients - self.restricted, 1) * self.d)

    def population(self, between, noise):
        """The fitted population at these variances, in the units of the data."""
        variance = between + noise * self.inverse_weights + self.extra
        if np.isinf(between):
            # In the limit all clients weigh alike, and the density of the means is 0.
            precision, error, value = np.ones_like(variance), np.inf, -np.inf
        elif not np.all(variance > 0):
            # Clients without error determine the mean alone.
            precision, error, value = np.where(variance > 0, 0.0, 1.0), 0.0, np.inf
        else:
            precision = 1 / variance
            error = 1 / (precision @ self.count)
            value = np.inf if noise == 0 else -0.5 * self._full_criterion(between, noise)
        mean, _, _ = self.weighted(precision)
        error = error if self.known_mean is None else 0.0
        square = self.unit**2
        return Population(
            (mean + self.centre) * self.unit,
            float(between) * square,
            float(noise) * square,
            error * square,
            value - self.d * self.n_contrasts * np.log(self.unit),
        )

    def _full_criterion(self, between, noise):
        """Minus twice the log-likelihood of the rows, constants included."""
        weights, log_weights = self.table.weights, self.table.log_weights
        constant = self.n_contrasts * np.log(2 * np.pi) + np.log(weights).sum() - log_weights
        return self.criterion(between, noise) + self.d * constant


def _by_weight(table, centre):
    """Distinct 1/weight (u,), clients (u,), summed means (u, d) and summed squares (u,)."""
    deviations = table.means - centre
    squares = np.einsum("md,md->m", deviations, deviations)
    if np.any(table.weights != table.n_rows):  # real weights hardly ever repeat
        return 1 / table.weights, np.ones(len(squares)), deviations, squares
    count = np.bincount(table.n_rows)
    used = np.flatnonzero(count)
    size = len(count)
    first = segment_sums(deviations, table.n_rows, size)[used]
    second = np.bincount(table.n_rows, weights=squares, minlength=size)[used]
    return 1 / used, count[used].astype(float), first, second


def _search_ratio(likelihood):
    """The population with two unknown variances: search their ratio, between / noise."""
    if likelihood.within == 0:  # the ratio would be infinite
        return _search_between(likelihood, 0.0)
    if len(likelihood.inverse_weights) == 1:  # equal sizes: analysis of variance, cut at zero
        noise = likelihood.pooled_noise()
        between = likelihood.spread() - noise * likelihood.inverse_weights[0]
        if between > 0:
            return likelihood.population(between, noise)
        # At the boundary the spread between clients estimates the noise variance, too.
        return likelihood.population(0.0, likelihood.at_ratio(0.0)[0])

    def slope(ratio):
        noise = likelihood.at_ratio(ratio)[0]
        return noise * likelihood.slope(ratio * noise, noise, 0)

    ratio = _minimize_from_zero(
        lambda ratio: likelihood.at_ratio(ratio)[1],
        slope,
        likelihood.inverse_weights.min() * 1e-6,
        1e3 * (likelihood.inverse_weights.max() + likelihood.spread() / likelihood.pooled_noise()),
        likelihood,
    )
    noise = likelihood.at_ratio(ratio)[0]
    return likelihood.population(ratio * noise, noise)


def _search_between(likelihood, noise):
    """The population with a known noise variance: search the variance between clients."""
    if noise == 0 and likelihood.extra == 0:  # the means are exact: their variance is the estimate
        return likelihood.population(
            likelihood.spread() if likelihood.n_clients > 1 else np.nan, noise
        )
    smallest = noise * likelihood.inverse_weights.min() + likelihood.extra
    largest = noise * likelihood.inverse_weights.max() + likelihood.extra + likelihood.spread()
    between = _minimize_from_zero(
        lambda value: likelihood.of_means(value, noise),
        lambda value: likelihood.slope(value, noise, 0),
        smallest * 1e-6,
        largest * 100,
        likelihood,
    )
    return likelihood.population(between, noise)


def _search_noise(likelihood, between):
    """The population with a known variance between clients: search the noise variance."""
    if likelihood.within == 0:  # the likelihood grows without bound as the noise goes to 0
        return likelihood.population(between, 0.0)
    pooled = likelihood.pooled_noise()
    noise = _minimize(
        lambda value: likelihood.criterion(between, value),
        lambda value: likelihood.slope(between, value, 1),
        pooled * 1e-3,
        10 * (pooled + likelihood.spread() / likelihood.inverse_weights.min()),
        likelihood,
    )
    return likelihood.population(between, noise)


def _minimize_from_zero(function, *arguments):
    """Minimum over [low, high] or at 0, where it is if clients differ less than by chance."""
    best = _minimize(function, *arguments)
    return 0.0 if function(0.0) <= function(best) else best  # the grid is logarithmic and lacks 0


def _minimize(function, slope, low, high, likelihood):
    """Minimum over [low, high]: the best of a grid on a log scale, then the zero of the slope.

    `function` takes several candidates at once. Each costs memory for every distinct weight.
    """
    grid = np.geomspace(low, high, _VARIANCE_GRID_POINTS)
    cells = _VARIANCE_GRID_POINTS * len(likelihood.inverse_weights)
    blocks = np.array_split(grid, min(_VARIANCE_GRID_POINTS, 1 + cells // _GRID_CELLS))
    best = int(np.argmin(np.concatenate([function(block) for block in blocks])))
    lower, upper = grid[max(best - 1, 0)], grid[min(best + 1, _VARIANCE_GRID_POINTS - 1)]
    if not slope(lower) < 0 < slope(upper):  # flat to rounding, or a minimum at the end
        return float(grid[best])
    # The zero of the slope has all digits; a minimum of the criterion itself, only half of them.
    zero = brentq(lambda point: slope(np.exp(point)), np.log(lower), np.log(upper), xtol=1e-13)
    return float(np.exp(zero))
