"""Uncertainty of the population of a mixed model, in the order of the design."""

import numpy as np
from scipy.special import ndtri

from pfl_sklearn._variance_averaging import ClientIntervals
from pfl_sklearn.linear_model._mixed._averaged import LazyAverages


class PopulationErrors:
    """Errors of the population: averaged over the variances, the rest of `share` plug-in.

    Parameters
    ----------
    covariance : ndarray of shape (p, p)
        Of the population coefficients, given the variances. NaN where they are not identified.
    between : ndarray of shape (p, p)
        Covariance between clients.
    averages : LazyAverages or None
    share : float
    order : ndarray of shape (p,)
        Positions of the columns of `averages` in the design.
    """

    def __init__(self, covariance, between, averages=None, share=0.0, order=None):
        self._covariance, self._between = covariance, between
        self._averages, self.share, self._order = averages, share, order

    def __deepcopy__(self, memo):
        """A copy that knows nothing of single clients, so that a model may be handed out."""
        averages = self._averages
        # Averages hold means and variances of every client; the copy drops them all.
        if averages is not None:
            averages = LazyAverages(averages=averages.get().of_clients(slice(0, 0)))
        return PopulationErrors(
            self._covariance.copy(), self._between.copy(), averages, self.share, self._order
        )

    @property
    def covariance(self):
        """Covariance (p, p) of the population coefficients."""
        if self._averages is None:
            return self._covariance
        averaged = self._ordered(self._averages.get().population_covariance)
        # Averages are finite where a coefficient is not identified; 0 * NaN keeps its NaN.
        return self.share * averaged + (1 - self.share) * self._covariance + 0 * self._covariance

    def new_variances(self, x):
        """Variances (n,) of x' theta for rows x (n, p) of clients that were not seen."""
        # Where there is no standard error, the variance between clients is all that is known.
        spread = np.nan_to_num(self._covariance, nan=0.0, posinf=np.inf) + self._between
        if self._averages is not None:
            averaged = self._ordered(self._averages.get().new_covariance)
            spread = self.share * averaged + (1 - self.share) * spread
        if np.isinf(spread).any():  # a product would make NaN of infinity times 0
            return np.full(len(x), np.inf)
        return np.maximum(np.einsum("np,np->n", x @ spread, x), 0.0)

    def interval(self, estimates, level):
        """Bounds (p,) of the coefficients."""
        stds = np.sqrt(np.diag(self._covariance))
        if self._averages is None:
            half = ndtri(0.5 + level / 2) * stds
            return estimates - half, estimates + half
        mixture = self._averages.get().population
        at = np.argsort(self._order)
        mixture = mixture._replace(means=mixture.means[0][at], scales=mixture.scales[0][at])
        bounds = ClientIntervals(mixture, self.share, estimates, stds).central(level)
        # NaN where the coefficient is not identified, as above.
        return tuple(bound + 0 * stds for bound in bounds)

    def component_bounds(self, level, covariance, noise):
        """Bounds (q q + 1,) around a covariance between clients (q, q) and a noise variance.

        They are quantiles, moved to the estimate where that lies outside, and 0 for a variance that
        a likelihood ratio test at 1 - level does not tell from 0. None without averages.
        """
        if self._averages is None:
            return None
        averages, estimates = self._averages.get(), np.append(covariance, noise)
        # The estimate maximizes the likelihood; it may lie outside of the posterior's quantiles.
        lower = np.minimum(averages.component_quantiles((1 - level) / 2), estimates)
        upper = np.maximum(averages.component_quantiles((1 + level) / 2), estimates)
        variances = np.arange(len(covariance)) * (len(covariance) + 1)
        # Under the prior no variance is 0, so quantiles alone would never cover a true 0.
        lower[variances[self._averages.zero_p_values() > 1 - level]] = 0.0
        return lower, upper

    def _ordered(self, matrix):
        at = np.argsort(self._order)
        return matrix[np.ix_(at, at)]
