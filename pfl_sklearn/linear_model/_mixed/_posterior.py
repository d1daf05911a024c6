"""Posterior uncertainty of clients and population: the variance of x' theta for any x.

Whitened rows come from `_normal_rows/_profiled_likelihood.py`, from `_client_posterior.py` (with a
link), and from `_private/`.
Arrays have clients first, so that `of_clients` can take some out; random columns come first.
"""

from copy import copy
from typing import NamedTuple

import numpy as np
from scipy.special import ndtri

from pfl_sklearn._variance_averaging import ClientIntervals, blend
from pfl_sklearn.linear_model._algebra import row_slices, solve_lower, square_root

_HIGHEST_TAIL = np.nextafter(1.0, 0.0)  # of an interval: rounding may leave 1, an infinite bound
_MOST_SKEWED = 1.0  # of a half-normal density; beyond it the expansion is not monotone
_LARGEST_SIZE = 1e150  # of a row: its square is finite
_WHITENED_CELLS = 1 << 22  # numbers of the whitened rows of a block of clients: 32 MB


class RowPosterior(NamedTuple):
    """Gaussian posterior in terms of the client's k whitened rows, instead of p x p numbers.

    Given the population, x' theta_i has the variance ``noise * (x' P x - |T_i P x|^2)``, with P the
    between-client covariance over the noise variance and T_i the whitened rows. The population's
    error enters through ``x - T_i' T_i P x``.
    """

    rows: np.ndarray  # (m, k, p), whitened; padded with zeros for clients with fewer rows
    # Roots keep digits: for columns at a distance D from zero a covariance is exact to 1e-16 D^2,
    # its root to 1e-16 D.
    ratio_root: np.ndarray  # (p, r), of P; zero where a coefficient is fixed
    noise: float
    error_root: np.ndarray  # (p, rank), of the covariance of the population coefficients
    scale: np.ndarray  # (p,), of the columns; all of the above is in this scale
    lower: np.ndarray | None = None  # (m, k, k), Cholesky factors that whiten the rows when needed

    @property
    def ratio(self):
        """Covariance between clients over the noise variance (p, p)."""
        return self.ratio_root @ self.ratio_root.T

    def of_clients(self, clients):
        """The posterior of the given clients alone."""
        lower = None if self.lower is None else self.lower[clients]
        return self._replace(rows=self.rows[clients], lower=lower)

    def whitened(self, clients):
        """Whitened rows (b, k, p) of the given clients."""
        rows = self.rows[clients]
        return rows if self.lower is None else solve_lower(self.lower[clients], rows)

    def variances(self, x, codes):
        """Variance (n,) of x' theta for rows x (n, p) of known clients."""
        return self._summed_covariances(x[:, None], codes, with_error=True)[:, 0, 0]

    def given_population(self, x, codes):
        """Covariances (n, a, a) of x theta for x (n, a, p), were the population's known."""
        return self._summed_covariances(x, codes, with_error=False)

    def error_effects(self, x, codes):
        """Effects (n, rank) on x' theta, for x (n, p), of independent errors of the population."""
        x, result = x * self.scale, np.empty((len(x), self.error_root.shape[1]))
        for part in row_slices(len(x), self.rows[0].size, _WHITENED_CELLS):
            rows = self.whitened(codes[part])
            pulled = np.einsum("bkp,bp->bk", rows, x[part] @ self.ratio)
            result[part] = (x[part] - np.einsum("bk,bkp->bp", pulled, rows)) @ self.error_root
        return result

    def _summed_covariances(self, x, codes, with_error):
        n, a, p = x.shape
        result, k = np.empty((n, a, a)), self.rows.shape[1]
        for part in row_slices(n, max(k * p, a * (a + k + p)), _WHITENED_CELLS):
            rows = self.whitened(codes[part])
            scaled, squares = scale_to_unit(x[part] * self.scale)
            # One product with all rows, and not one for each.
            effects = scaled.reshape(-1, p) @ self.ratio_root
            pulled = (effects @ self.ratio_root.T).reshape(-1, a, p) @ rows.transpose(0, 2, 1)
            effects = effects.reshape(len(rows), a, -1)
            prior = effects @ effects.transpose(0, 2, 1)
            result[part] = self.noise * (prior - pulled @ pulled.transpose(0, 2, 1))
            variances = np.einsum("naa->na", result[part])
            # The difference of two variances may be rounded below 0.
            np.maximum(variances, 0.0, out=variances)
            if with_error:
                error = (scaled - pulled @ rows) @ self.error_root
                result[part] += error @ error.transpose(0, 2, 1)
            result[part] *= squares
        return result

    def coefficient_variances(self):
        """Variances (m, p) of the coefficients."""
        result, ratio, root = np.empty(self.rows.shape[::2]), self.ratio, self.error_root
        for part in row_slices(len(self.rows), self.rows.shape[2] ** 2, _WHITENED_CELLS):
            rows = self.whitened(part)
            pulled = rows @ ratio
            errors = root - pulled.transpose(0, 2, 1) @ (rows @ root)
            conditional = _given_population(ratio, pulled)
            result[part] = np.einsum("bpr,bpr->bp", errors, errors) + self.noise * conditional
        return result * self.scale**2

    def deviation_variances(self, conditional):
        """Variances (m, p) of deviations from the population, given its coefficients or in all."""
        result, ratio, root = np.empty(self.rows.shape[::2]), self.ratio, self.error_root
        for part in row_slices(len(self.rows), self.rows.shape[2] ** 2, _WHITENED_CELLS):
            rows = self.whitened(part)
            pulled = rows @ ratio
            result[part] = self.noise * _given_population(ratio, pulled)
            if not conditional:
                errors = pulled.transpose(0, 2, 1) @ (rows @ root)
                result[part] += np.einsum("bpr,bpr->bp", errors, errors)
        return result * self.scale**2

    def shrinkage(self):
        """Posterior over prior variance (m, p) of the coefficients, given the population's."""
        ratio = self.ratio
        # Coefficients that do not vary are the population's: 1.
        result = np.ones(self.rows.shape[::2])
        for part in row_slices(len(self.rows), self.rows[:1].size, _WHITENED_CELLS):
            conditional = _given_population(ratio, self.whitened(part) @ ratio)
            np.divide(conditional, np.diag(ratio), out=result[part], where=np.diag(ratio) > 0)
        return result


def _given_population(ratio, pulled):
    """Posterior variances (b, p) over the noise variance, from whitened rows times the ratio."""
    return np.maximum(np.diag(ratio) - np.sum(pulled**2, axis=1), 0.0)


class CovariancePosterior(NamedTuple):
    """Posterior covariance matrix of every client."""

    covariances: np.ndarray  # (m, p, p)
    prior_variances: np.ndarray  # (p,), infinite where clients share nothing

    def of_clients(self, clients):
        """The posterior of the given clients alone."""
        return self._replace(covariances=self.covariances[clients])

    def variances(self, x, codes):
        """Variance (n,) of x' theta for rows x (n, p) of known clients."""
        return np.maximum(client_products(x, self.covariances, codes, x), 0.0)

    def coefficient_variances(self):
        """Variances (m, p) of the coefficients."""
        return np.maximum(np.einsum("mpp->mp", self.covariances), 0.0)

    def shrinkage(self):
        """Posterior over prior variance (m, p) of the coefficients, at most 1."""
        variances = self.coefficient_variances()
        # Infinite prior variances share nothing: 0. Zero ones leave nothing to a client: 1.
        share = np.tile(np.where(np.isinf(self.prior_variances), 0.0, 1.0), (len(variances), 1))
        shrinks = (self.prior_variances > 0) & np.isfinite(self.prior_variances)
        np.divide(variances, self.prior_variances, out=share, where=shrinks)
        return np.minimum(share, 1.0)


def client_products(left, matrices, codes, right):
    """Products (n,) of rows left (n, q) and right (n, p) with matrices (m, q, p) of clients."""
    result = np.empty(len(left))
    for part in row_slices(len(left), matrices[:1].size, _WHITENED_CELLS):
        products = (left[part, None, :] @ matrices[codes[part]])[:, 0]
        result[part] = np.einsum("np,np->n", products, right[part])
    return result


def scale_to_unit(x):
    """Features x (n, ...) over their size, and its square (n, 1, ...), which may overflow."""
    size = np.abs(x).max(axis=tuple(range(1, x.ndim)), initial=0.0, keepdims=True)
    scaled = np.divide(x, size, out=np.zeros_like(x), where=size > 0)
    return scaled, np.minimum(size, _LARGEST_SIZE) ** 2


def normal_bounds(means, variances, level):
    """Central bounds of normal values with these means and variances."""
    return skewed_bounds(means, (0.0, variances, 0.0), level)


def skewed_bounds(modes, moments, level):
    """Central bounds of values with shifts of the mean from the mode, variances and thirds."""
    shifts, variances, thirds = moments
    # Rounding may leave a tail of 0, whose bound would be infinite.
    quantile = ndtri(min(0.5 + level / 2, _HIGHEST_TAIL))
    means = modes + shifts
    return tuple(skewed_quantile(means, variances, thirds, z) for z in (-quantile, quantile))


def skewed_quantile(means, variances, thirds, z):
    """Quantiles of values with these central moments, at the normal quantile z."""
    # By Cornish and Fisher's (1938) expansion in the skewness. For a half-normal density, that of a
    # client without events under a wide prior, tails of 2.5 % come out as .032 and .020.
    spread = np.sqrt(np.maximum(variances, 0.0))  # differences, which rounding may leave below 0
    with np.errstate(over="ignore", under="ignore"):  # a spread whose cube overflows is not skewed
        cubes = spread**3
    skewness = np.divide(thirds, cubes, out=np.zeros_like(spread), where=cubes > 0)
    skewness = np.clip(skewness, -_MOST_SKEWED, _MOST_SKEWED)
    quantile = z + skewness * (z**2 - 1) / 6 - skewness**2 * (2 * z**3 - 5 * z) / 36
    return means + spread * quantile


class ColumnScaling(NamedTuple):
    """How the columns of the fit were centred and scaled, and the way back."""

    scale: np.ndarray  # (p,), that multiplied the columns
    centre: np.ndarray  # (p,), that was subtracted from the columns before
    intercept: int | None

    def rows(self, x):
        """Rows x (n, p) of the data, centred and scaled."""
        if self.centre.any():
            x = x - x[:, [self.intercept]] * self.centre
        return x * self.scale

    @property
    def back(self):
        """Matrix (p, p) from coefficients of centred, scaled columns to those of the data."""
        matrix = np.diag(self.scale)
        if self.centre.any():
            matrix[self.intercept] -= self.centre * self.scale
        return matrix


class AveragedPosterior:
    """Posterior of clients: a mean, weighted by `share`, of the averaged and the plug-in one.

    `averages` are Averages, or a function that computes them on first use (it may take a second);
    `holds_rows` says that it holds rows of a table, which a file of the model need not. `p_values`
    is a function that computes p-values (q,) of variances of zero; 0 for estimates without a
    likelihood.
    """

    def __init__(self, plug_in, coefficients, share, averages, p_values=0.0, holds_rows=False):
        self.plug_in, self.coefficients, self.share = plug_in, coefficients, share
        self._averages, self._p_values, self._holds_rows = averages, p_values, holds_rows

    def __getstate__(self):
        if self._holds_rows:  # the averages stand in for the function
            self._averages = self.averages
        return self.__dict__

    @property
    def averages(self):
        """The Averages."""
        if callable(self._averages):
            self._averages = self._averages()
        return self._averages

    def component_bounds(self, level, covariance, noise):
        """Bounds of a covariance between clients (q, q), and of a noise variance."""
        if callable(self._p_values):
            self._p_values = self._p_values()
        return self.averages.components.bounds(level, covariance, noise, self._p_values)

    def of_clients(self, clients):
        """The posterior of some clients alone."""
        plug_in, averages = self.plug_in.of_clients(clients), self.averages.of_clients(clients)
        return type(self)(plug_in, self.coefficients[clients], self.share, averages)

    def blended(self, averaged, plug_in):
        """Averaged values, and for the rest of the share those of a function ``plug_in()``."""
        if self.share == 1:  # most tables: the plug-in need not be computed
            return averaged
        return blend(self.share, averaged, plug_in())

    def variances(self, x, codes):
        """Variance (n,) of x' theta for rows x (n, p) of known clients."""
        averaged = self.averages.variances(x, codes)
        return self.blended(averaged, lambda: self.plug_in.variances(x, codes))

    def given_population(self, x, codes):
        """Covariances (n, a, a) of x theta for x (n, a, p), were population and variances known."""
        return self.plug_in.given_population(x, codes)

    def coefficient_variances(self):
        """Variances (m, p) of the coefficients."""
        averaged = self.averages.coefficient_variances()
        return self.blended(averaged, self.plug_in.coefficient_variances)

    def deviation_variances(self, conditional):
        """Variances (m, p) of deviations from the population; conditional ones are plug-in."""
        if conditional:
            return self.plug_in.deviation_variances(True)
        averaged = self.averages.deviation_variances()
        return self.blended(averaged, lambda: self.plug_in.deviation_variances(False))

    def shrinkage(self):
        """Posterior over prior variance (m, p) of the coefficients, given the population's."""
        return self.plug_in.shrinkage()

    def interval(self, level):
        """Bounds (m, p) of the clients' coefficients."""
        averages, means = self.averages, self.coefficients
        m, q = averages.blocks.shape[:2]
        stds = np.sqrt(self.plug_in.coefficient_variances())
        random_part = ClientIntervals(averages.clients, self.share, means[:, :q], stds[:, :q])
        fixed_part = ClientIntervals(averages.population, self.share, means[:1], stds[:1])
        # Fixed coefficients are the population's for every client.
        return tuple(
            np.hstack([random, np.repeat(fixed[:, q:], m, axis=0)])
            for random, fixed in zip(
                random_part.central(level), fixed_part.central(level), strict=True
            )
        )


def with_averages(estimates, share, averages, **options):
    """Estimates with an AveragedPosterior in place of theirs; `options` are further parameters."""
    coefficients = estimates.coefficients.reshape(len(estimates.coefficients), -1)
    posterior = AveragedPosterior(estimates.posterior, coefficients, share, averages, **options)
    return estimates._replace(posterior=posterior)


class PopulationErrors:
    """Errors of the population: averaged over the variances, the rest of the share plug-in.

    `covariance` (p, p) is that of the coefficients given the variances: a generalized inverse,
    right for estimable combinations, and NaN without errors. `between` (p, p) is the covariance
    between clients, `posterior` that of the clients, whose columns are at `order` (p,) of the
    design; `is_open` (p,) marks coefficients that are not estimable. With `roots` (p, rank) and (p,
    r) of both matrices, variances at columns a distance D from zero are exact to 1e-16 D; without,
    to 1e-16 D^2.
    """

    def __init__(self, covariance, between, posterior, order, is_open, roots=None):
        self._covariance, self._between, self._roots = covariance, between, roots
        self.averaged = posterior if isinstance(posterior, AveragedPosterior) else None
        self._order, self.is_open = order, is_open

    def __deepcopy__(self, memo):
        """A copy that knows nothing of single clients, so that a model may be handed out."""
        copied = copy(self)  # its arrays are never written to
        # Averages hold means and variances of every client; the copy drops them all.
        if self.averaged is not None:
            # A slice would be a view, which holds on to the arrays.
            copied.averaged = self.averaged.of_clients(np.arange(0))
        return copied

    @property
    def covariance(self):
        """Covariance (p, p) of the population coefficients; NaN where they are not estimable."""
        return np.where(self.is_open | self.is_open[:, None], np.nan, self._estimable_covariance)

    @property
    def _estimable_covariance(self):
        return self.estimable_covariance(averaged=True)

    def estimable_covariance(self, averaged):
        """Matrix (p, p) of which v' C v is the variance of an estimable combination v.

        It is `averaged` over the variances, or else takes these as known.
        """
        if self.averaged is None or not averaged:
            return self._covariance
        at = np.argsort(self._order)
        over_variances = self.averaged.averages.population_covariance[np.ix_(at, at)]
        return blend(self.averaged.share, over_variances, self._covariance)

    def root(self):
        """Root (p, r) of the covariance of the coefficients given the variances."""
        if self._roots is not None:
            return self._roots[0]
        return square_root(np.nan_to_num(self._covariance, nan=0.0))

    def variances(self, x):
        """Variances (n,) of x' beta for rows x (n, p) of the population, which are estimable."""
        # Rounding may leave a small variance below 0.
        return np.maximum(np.sum((x @ self._estimable_covariance) * x, axis=1), 0.0)

    def new_variances(self, x):
        """Variances (n,) of x' theta for rows x (n, p) of clients that were not seen."""
        if self.averaged is None:
            return np.maximum(self._plug_in_variances(x), 0.0)
        averaged = self.averaged.averages.new_variances(x[:, self._order])
        variances = self.averaged.blended(averaged, lambda: self._plug_in_variances(x))
        return np.maximum(variances, 0.0)

    def between_covariances(self, x):
        """Covariances (n, a, a) of x theta for x (n, a, p), given the population."""
        if self._roots is not None:
            effects = x @ self._roots[1]
            return effects @ effects.transpose(0, 2, 1)
        return x @ self._between @ x.transpose(0, 2, 1)

    def _plug_in_variances(self, x):
        if self._roots is not None:
            return np.sum((x @ np.hstack(self._roots)) ** 2, axis=1)
        # Where there is no standard error, the variance between clients is all that is known.
        spread = np.nan_to_num(self._covariance, nan=0.0, posinf=np.inf) + self._between
        if np.isinf(spread).any():  # a product would make NaN of infinity times 0
            return np.full(len(x), np.inf)
        return np.einsum("np,np->n", x @ spread, x)

    def interval(self, estimates, level):
        """Bounds (p,) of the coefficients."""
        if self.averaged is None:
            return normal_bounds(estimates, np.diag(self.covariance), level)
        stds = np.sqrt(np.diag(self._covariance))
        at, mixture = np.argsort(self._order), self.averaged.averages.population
        if mixture is None:  # moments alone
            return normal_bounds(estimates, np.diag(self.covariance), level)
        mixture = mixture._replace(means=mixture.means[0][at], scales=mixture.scales[0][at])
        bounds = ClientIntervals(mixture, self.averaged.share, estimates, stds).central(level)
        return tuple(np.where(self.is_open, np.nan, bound) for bound in bounds)
