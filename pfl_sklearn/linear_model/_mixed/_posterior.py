"""Posterior uncertainty of clients' coefficients: the variance of x' theta_i for any x.

The two representations have the same methods. Arrays have clients first, so that `of_clients` can
take some clients out. Columns are in the order of the prior: random columns first.
"""

from typing import NamedTuple

import numpy as np
from scipy.special import ndtri

from pfl_sklearn.linear_model._algebra import row_slices, square_root

HIGHEST_TAIL = np.nextafter(1.0, 0.0)  # of an interval: rounding may leave 1, an infinite bound
_LARGEST_SIZE = 1e150  # of a row: its square is finite
_WHITENED_CELLS = 1 << 22  # numbers of the whitened rows of a block of clients: 32 MB


class RowPosterior(NamedTuple):
    """Gaussian posterior in terms of the client's k whitened rows, instead of p x p numbers.

    Given the population coefficients, x' theta_i has the variance
    ``noise * (x' P x - |T_i P x|^2)``, with P the between-client covariance over the noise variance
    and T_i the whitened rows. The error of the population coefficients enters through
    ``x - T_i' T_i P x``.
    """

    rows: np.ndarray  # (m, k, p), whitened; padded with zeros for clients with fewer rows
    ratio: np.ndarray  # (p, p), zero where a coefficient is fixed
    noise: float
    population_covariance: np.ndarray  # (p, p)
    scale: np.ndarray  # (p,), of the columns; all of the above is in this scale
    lower: np.ndarray | None = None  # (m, k, k), Cholesky factors that whiten the rows when needed
    # (p, rank), of population_covariance. For columns at a distance D from zero the covariance is
    # exact to 1e-16 D^2, this root to 1e-16 D.
    error_root: np.ndarray | None = None
    ratio_root: np.ndarray | None = None  # (p, r), of ratio; with it variances keep digits as above

    def of_clients(self, clients):
        """The posterior of the given clients alone."""
        lower = None if self.lower is None else self.lower[clients]
        return self._replace(rows=self.rows[clients], lower=lower)

    def whitened(self, clients):
        """Whitened rows (b, k, p) of the given clients."""
        rows = self.rows[clients]
        return rows if self.lower is None else np.linalg.solve(self.lower[clients], rows)

    def variances(self, x, codes):
        """Variance (n,) of x' theta for rows x (n, p) of known clients."""
        return self._summed_covariances(x[:, None], codes, with_error=True)[:, 0, 0]

    def given_population(self, x, codes):
        """Covariances (n, a, a) of x theta for x (n, a, p), were the population's known."""
        return self._summed_covariances(x, codes, with_error=False)

    def _summed_covariances(self, x, codes, with_error):
        n, a, p = x.shape
        x, result = x * self.scale, np.empty((n, a, a))
        # Rows are brought to size 1 first: squares of very large ones overflow.
        size = np.abs(x).max(axis=(1, 2), initial=0.0)[:, None, None]
        x = np.divide(x, size, out=np.zeros_like(x), where=size > 0)
        k = self.rows.shape[1]
        for part in row_slices(n, max(k * p, a * (a + k + p)), _WHITENED_CELLS):
            rows = self.whitened(codes[part])
            prior, pulled = self._pulled(rows, x[part])
            result[part] = self.noise * (prior - pulled @ pulled.transpose(0, 2, 1))
            variances = np.einsum("naa->na", result[part])
            # The difference of two variances may be rounded below 0.
            np.maximum(variances, 0.0, out=variances)
            if with_error:  # of one combination
                variances += self._error((x[part] - pulled @ rows)[:, 0])[:, None]
        return result * np.minimum(size, _LARGEST_SIZE) ** 2

    def _pulled(self, rows, x):
        """Prior covariances (b, a, a) of x theta over the noise's, and x P T' (b, a, k)."""
        flat = x.reshape(-1, x.shape[2])  # one product, and not one for each row
        if self.ratio_root is None:
            spread = (flat @ self.ratio).reshape(x.shape)
            prior = spread @ x.transpose(0, 2, 1)
        else:
            effects = flat @ self.ratio_root
            spread = (effects @ self.ratio_root.T).reshape(x.shape)
            effects = effects.reshape(*x.shape[:2], -1)
            prior = effects @ effects.transpose(0, 2, 1)
        return prior, spread @ rows.transpose(0, 2, 1)

    def coefficient_variances(self):
        """Variances (m, p) of the coefficients."""
        error_root = self.error_root
        if error_root is None:
            error_root = square_root(self.population_covariance)
        result = np.empty((len(self.rows), self.rows.shape[2]))
        for part in row_slices(len(self.rows), self.rows.shape[2] ** 2, _WHITENED_CELLS):
            rows = self.whitened(part)
            pulled = rows @ self.ratio
            moved = error_root - pulled.transpose(0, 2, 1) @ (rows @ error_root)
            result[part] = np.einsum("bpr,bpr->bp", moved, moved) + self.noise * self._own(pulled)
        return result * self.scale**2

    def shrinkage(self):
        """Posterior over prior variance (m, p) of the coefficients, given the population's."""
        prior = np.diag(self.ratio)
        # Coefficients that do not vary are the population's: 1.
        result = np.ones((len(self.rows), self.rows.shape[2]))
        for part in row_slices(len(self.rows), self.rows[:1].size, _WHITENED_CELLS):
            own = self._own(self.whitened(part) @ self.ratio)
            np.divide(own, prior, out=result[part], where=prior > 0)
        return result

    def _error(self, x):
        """Variances (b,) of x' times the error of the population coefficients."""
        if self.error_root is not None:
            return np.sum((x @ self.error_root) ** 2, axis=1)
        return np.maximum(np.einsum("np,np->n", x @ self.population_covariance, x), 0.0)

    def _own(self, pulled):
        """Posterior variances (b, p) over the noise variance, given the population."""
        return np.maximum(np.diag(self.ratio) - np.sum(pulled**2, axis=1), 0.0)


class CovariancePosterior(NamedTuple):
    """Posterior covariance matrix of every client."""

    covariances: np.ndarray  # (m, p, p)
    prior_variances: np.ndarray  # (p,), infinite where clients share nothing

    def of_clients(self, clients):
        """The posterior of the given clients alone."""
        return self._replace(covariances=self.covariances[clients])

    def variances(self, x, codes):
        """Variance (n,) of x' theta for rows x (n, p) of known clients."""
        result = np.empty(len(x))
        for part in row_slices(len(x), x.shape[1] ** 2, _WHITENED_CELLS):
            moved = (x[part, None, :] @ self.covariances[codes[part]])[:, 0]
            result[part] = np.einsum("np,np->n", moved, x[part])
        return np.maximum(result, 0.0)

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


def normal_bounds(means, variances, level):
    """Central bounds of normal values with these means and variances."""
    # A variance is often a difference, which rounding may leave below 0.
    quantile = ndtri(min(0.5 + level / 2, HIGHEST_TAIL))
    half = quantile * np.sqrt(np.maximum(variances, 0.0))
    return means - half, means + half
