"""Variance components of client means: the arithmetic of one-way random effects.

Client i reports a mean with variance ``between + noise * unit_i + extra`` around the population
mean, where ``unit_i`` is known (one over the client's weight) and ``extra`` is the variance that a
release added. Arrays have clients first; `d` coordinates share the components.
"""

from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq

from pfl_sklearn._clients import row_counts, segment_sums
from pfl_sklearn._float_range import unit_near

_GRID_POINTS = 48
_CELLS = 1 << 20
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

    def coordinate(self, k):
        """The statistics of coordinate k alone."""
        return self._replace(means=self.means[:, [k]], within=self.within[[k]])


class Components(NamedTuple):
    """Parameters of the population, known or estimated, for d coordinates."""

    mean: np.ndarray  # (d,)
    mean_variance: float  # of every coordinate of `mean`; 0 if it was given
    between: float
    noise: float
    log_likelihood: float

    def times(self, unit, n_values):
        """The parameters of data times `unit`; the likelihood is that of `n_values` numbers."""
        return Components(
            self.mean * unit,
            self.mean_variance * unit**2,
            self.between * unit**2,
            self.noise * unit**2,
            self.log_likelihood - n_values * np.log(unit),
        )


def client_means(y, codes, n_clients, weights=None, centre=None):
    """Reduce rows `y` (n, d) to the statistics of their clients.

    Rows are shifted by `centre` (d,) before they are summed. None is their mean, which is the most
    precise. A release must give a constant, because with a common mean, rounding and overflow carry
    one client's values into the others' means.
    """
    n_rows = row_counts(codes, n_clients)
    if weights is None:
        totals, weighted, log_weights = n_rows.astype(float), y, 0.0
    else:
        totals = segment_sums(weights, codes, n_clients)
        weighted, log_weights = y * weights[:, None], float(np.log(weights).sum())
    if centre is None:
        centre = weighted.sum(axis=0) / totals.sum()
    shifted = y - centre
    moved = shifted if weights is None else shifted * weights[:, None]
    means = segment_sums(moved, codes, n_clients) / totals[:, None]
    square = np.einsum("nd,nd->d", moved, shifted)
    within = square - totals @ means**2
    if np.any(within < _CANCELLATION * square):
        shifted -= means[codes]
        moved = shifted if weights is None else shifted * weights[:, None]
        within = np.einsum("nd,nd->d", moved, shifted)
    return ClientMeans(means + centre, totals, n_rows, within, log_weights)


def estimate_components(table, method, mean=None, between=None, noise=None, extra=0.0):
    """Fill in what is None among population mean (d,), between and noise variance.

    Parameters
    ----------
    table : ClientMeans
    method : {"reml", "ml", "moments"}
    mean, between, noise : known values, or None
    extra : float
        Variance that a release added to every client's mean.

    Returns
    -------
    Components
        `between` is NaN if it was to be estimated from a single client.

    Raises
    ------
    ValueError
        If the noise variance is unknown and no client has a second row.
    """
    if noise is None:
        check_noise_is_identified(table)
    unit = _unit(table, between, noise, extra)
    if unit != 1:
        known = [None if value is None else value / unit**2 for value in (between, noise)]
        mean = None if mean is None else mean / unit
        found = estimate_components(table.in_units(unit), method, mean, *known, extra / unit**2)
        return found.times(unit, table.means.shape[1] * _n_contrasts(table, method, mean))
    model = _Profile(table, method == "reml" and mean is None, mean, extra)
    if len(table.means) == 1 and between is None:
        noise = model.pooled_noise() if noise is None else noise
        value = model.components(0.0, noise)
        return value._replace(between=np.nan)
    if method == "moments":
        noise = model.pooled_noise() if noise is None else noise
        between = model.moment_between(noise) if between is None else between
        return model.components(between, noise)
    if between is not None and np.isinf(between):
        return model.components(between, model.pooled_noise() if noise is None else noise)
    if between is None and noise is None:
        return _search_ratio(model)
    if between is None:
        return _search_between(model, noise)
    if noise is None:
        return _search_noise(model, between)
    return model.components(between, noise)


def profile_in_units(table, mean=None, noise=None):
    """Restricted likelihood of a table in a unit that makes the numbers near 1, and the unit."""
    unit = _unit(table, noise)
    if unit != 1:
        table, mean = table.in_units(unit), None if mean is None else mean / unit
    return _Profile(table, mean is None, mean, 0.0), unit


def _unit(table, *variances):
    """Unit in which the numbers are near 1, or can do without."""
    known = [value for value in variances if value is not None and np.isfinite(value)]
    spread = np.abs(table.means - table.means.mean(axis=0)).max()
    size = max(spread, np.sqrt(max([table.within.max() / table.n_rows.sum(), *known])))
    return unit_near(size)


def _n_contrasts(table, method, mean):
    """Rows that the criterion describes, in one coordinate."""
    return int(table.n_rows.sum()) - (method == "reml" and mean is None)


def check_noise_is_identified(table):
    """Raise ValueError if no client has a second row."""
    if table.degrees_of_freedom == 0:
        n_rows = len(table.n_rows)
        samples = "1 sample" if n_rows == 1 else f"n_samples = {n_rows}"
        raise ValueError(
            f"every client has one row ({samples}), so the data cannot separate noise_variance "
            "from the spread between clients; give noise_variance or more rows per client."
        )


class _Profile:
    """Marginal likelihood of the client means, with the population mean profiled out.

    Clients of equal weight are summed first, so the cost of an evaluation is proportional to the
    number of distinct weights.
    """

    def __init__(self, table, restricted, mean, extra):
        self.table, self.restricted, self.extra = table, restricted, extra
        self.n_clients, self.d = table.means.shape
        self.centre = table.means.mean(axis=0)
        self.known_mean = None if mean is None else np.asarray(mean) - self.centre
        self.unit, self.count, self.first, self.second = _by_weight(table, self.centre)
        self.within = table.within.sum()
        self.within_dof = table.degrees_of_freedom * self.d
        self.n_free = self.within_dof + self.n_clients * self.d - (self.d if restricted else 0)

    def weighted(self, precision):
        """GLS mean (..., d), total precision and weighted squares (...,) around the mean.

        `precision` (..., u) may hold several candidates at once.
        """
        total = precision @ self.count
        first = precision @ self.first
        mean = first / total[..., None] if self.known_mean is None else self.known_mean
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
        if self.within_dof:
            value = value + self.within_dof * np.log(noise) + self.within / noise
        return value

    def of_means(self, between, noise):
        """The part of the criterion that depends on `between`; the rest may swamp it."""
        between, noise = np.asarray(between)[..., None], np.asarray(noise)[..., None]
        variance = between + noise * self.unit + self.extra
        _, total, square = self.weighted(1 / variance)
        value = self.d * (np.log(variance) @ self.count) + square
        return value + self.d * np.log(total) if self.restricted else value

    def at_ratio(self, ratio):
        """Best noise variance when between = ratio * noise, and the criterion there."""
        variance = np.asarray(ratio)[..., None] + self.unit
        _, total, square = self.weighted(1 / variance)
        noise = (self.within + square) / self.n_free
        value = self.d * (np.log(variance) @ self.count) + self.n_free * (np.log(noise) + 1)
        return noise, value + self.d * np.log(total) if self.restricted else value

    def slope(self, between, noise, direction):
        """Derivative of the criterion when between (direction 0) or noise (1) grows."""
        precision = 1 / (between + noise * self.unit + self.extra)
        moved = self.unit if direction else np.ones_like(self.unit)
        mean, total, _ = self.weighted(precision)
        squared = precision**2 * moved
        value = self.d * (precision * moved) @ self.count - self._squares(squared, mean)
        if direction and self.within_dof:
            value += self.within_dof / noise - self.within / noise / noise
        return value - self.d * (squared @ self.count) / total if self.restricted else value

    def pooled_noise(self):
        """Noise variance from the rows around their client's mean alone."""
        return self.within / self.within_dof

    def moment_between(self, noise):
        """Spread of the client means less what noise and release explain, floored at 0."""
        deviations = (
            self.table.means - self.centre - (0.0 if self.known_mean is None else self.known_mean)
        )
        dof = self.n_clients - (self.known_mean is None)
        spread = np.sum(deviations**2) / (dof * self.d)
        return max(0.0, spread - noise * np.mean(1 / self.table.weights) - self.extra)

    def spread(self):
        """Mean square of the client means around the population mean."""
        square = self.weighted(np.ones_like(self.unit))[2]
        return square / (max(self.n_clients - self.restricted, 1) * self.d)

    def components(self, between, noise):
        """The fitted population at these variances."""
        variance = between + noise * self.unit + self.extra
        if np.isinf(between):
            precision, error, value = np.ones_like(variance), np.inf, -np.inf
        elif not np.all(variance > 0):
            precision, error, value = np.where(variance > 0, 0.0, 1.0), 0.0, np.inf
        else:
            precision, error = 1 / variance, None
            value = np.inf if noise == 0 else -0.5 * self._full_criterion(between, noise)
        mean, total, _ = self.weighted(precision)
        error = 1 / total if error is None else error
        error = 0.0 if self.known_mean is not None else error
        return Components(mean + self.centre, error, float(between), float(noise), value)

    def _full_criterion(self, between, noise):
        """Minus twice the log-likelihood of the rows, constants included."""
        table = self.table
        rows = int(table.n_rows.sum()) - self.restricted
        constant = rows * np.log(2 * np.pi) + np.log(table.weights).sum() - table.log_weights
        return self.criterion(between, noise) + self.d * constant


def _by_weight(table, centre):
    """Distinct 1/weight (u,), clients (u,), summed means (u, d) and summed squares (u,)."""
    deviations = table.means - centre
    squares = np.einsum("md,md->m", deviations, deviations)
    if np.any(table.weights != table.n_rows):
        return 1 / table.weights, np.ones(len(squares)), deviations, squares
    count = np.bincount(table.n_rows)
    used = np.flatnonzero(count)
    size = len(count)
    first = segment_sums(deviations, table.n_rows, size)[used]
    second = np.bincount(table.n_rows, weights=squares, minlength=size)[used]
    return 1 / used, count[used].astype(float), first, second


def _search_ratio(model):
    """Both variances unknown: search between / noise."""
    if model.within == 0:
        return _search_between(model, 0.0)
    if len(model.unit) == 1:  # equal sizes: analysis of variance, cut at zero
        noise = model.pooled_noise()
        between = model.spread() - noise * model.unit[0]
        if between > 0:
            return model.components(between, noise)
        return model.components(0.0, model.at_ratio(0.0)[0])

    def slope(ratio):
        noise = model.at_ratio(ratio)[0]
        return noise * model.slope(ratio * noise, noise, 0)

    ratio = _minimize(
        lambda ratio: model.at_ratio(ratio)[1],
        slope,
        model.unit.min() * 1e-6,
        1e3 * (model.unit.max() + model.spread() / model.pooled_noise()),
        len(model.unit),
    )
    if model.at_ratio(0.0)[1] <= model.at_ratio(ratio)[1]:
        ratio = 0.0
    noise = model.at_ratio(ratio)[0]
    return model.components(ratio * noise, noise)


def _search_between(model, noise):
    """Noise variance known."""
    if noise == 0 and model.extra == 0:
        return model.components(model.spread() if model.n_clients > 1 else np.nan, noise)
    smallest = noise * model.unit.min() + model.extra
    largest = noise * model.unit.max() + model.extra + model.spread()
    between = _minimize(
        lambda value: model.of_means(value, noise),
        lambda value: model.slope(value, noise, 0),
        smallest * 1e-6,
        largest * 100,
        len(model.unit),
    )
    if model.of_means(0.0, noise) <= model.of_means(between, noise):
        between = 0.0
    return model.components(between, noise)


def _search_noise(model, between):
    """Between-client variance known."""
    if model.within == 0:
        return model.components(between, 0.0)
    pooled = model.pooled_noise()
    noise = _minimize(
        lambda value: model.criterion(between, value),
        lambda value: model.slope(between, value, 1),
        pooled * 1e-3,
        10 * (pooled + model.spread() / model.unit.min()),
        len(model.unit),
    )
    return model.components(between, noise)


def _minimize(function, slope, low, high, width):
    """Minimum over [low, high]: the best of a grid on a log scale, then the zero of the slope.

    `function` takes several candidates at once; each costs memory in proportion to `width`.
    """
    grid = np.geomspace(low, high, _GRID_POINTS)
    pieces = min(_GRID_POINTS, 1 + _GRID_POINTS * width // _CELLS)
    values = np.concatenate([function(part) for part in np.array_split(grid, pieces)])
    best = int(np.argmin(values))
    left, right = grid[max(best - 1, 0)], grid[min(best + 1, _GRID_POINTS - 1)]
    if not slope(left) < 0 < slope(right):
        return float(grid[best])
    zero = brentq(lambda point: slope(np.exp(point)), np.log(left), np.log(right), xtol=1e-13)
    return float(np.exp(zero))
