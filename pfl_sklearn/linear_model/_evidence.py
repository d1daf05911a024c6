"""Evidence for comparisons of models: moments of the rows, and what a fit estimated of them.

A private fit keeps none of it.
"""

from typing import NamedTuple

import numpy as np

from pfl_sklearn.linear_model._algebra import factor_of, n_independent
from pfl_sklearn.linear_model._mixed._reduction import flat_rows
from pfl_sklearn.linear_model._mixed._regression_em import MixtureModel
from pfl_sklearn.linear_model._table import is_centred, varying_columns

_CONSTANT_COLUMN = 1e-24  # variance over squared mean; a smaller one is rounding error


class RowMoments(NamedTuple):
    """Weighted moments of the columns in the order of the design, with the response last."""

    n_rows: int  # of positive weight
    weight: float  # sum of the weights
    means: np.ndarray  # (p + 1,)
    covariance: np.ndarray  # (p + 1, p + 1)

    def mean_square(self, matrix):
        """Mean (float) of x' A x over the rows, for a matrix A (p, p); NaN if A is not finite."""
        if not np.isfinite(matrix).all():  # clients share nothing, or there is one alone
            return np.nan
        means, covariance = self.means[:-1], self.covariance[:-1, :-1]
        return max(float(np.sum(matrix * covariance) + means @ matrix @ means), 0.0)

    def variance(self, coefficients):
        """Variance (float) of x' beta over the rows, for coefficients (p,)."""
        return max(float(coefficients @ self.covariance[:-1, :-1] @ coefficients), 0.0)


class Form(NamedTuple):
    """Known and estimated parts of a Gaussian model, in the order of the design."""

    means: np.ndarray  # (c, p), given population coefficients of c outputs; NaN where estimated
    varying: np.ndarray  # (v,), positions of the coefficients that vary by client
    shape: str  # "zero", "given", "spherical", "diag", "low_rank" or "full"
    rank: int  # of "low_rank"
    covariance: np.ndarray | None  # (p, p), if the shape is "given"
    centre: np.ndarray | None  # (p,), at which the covariance has its shape
    noise: float | None  # given noise variance
    criterion: str  # name of the log-likelihood: models compare if it is the same


class Evidence(NamedTuple):
    """Moments of the rows, number of estimated parameters, and the form of a Gaussian model."""

    moments: RowMoments
    n_parameters: int | None  # None without a likelihood
    form: Form | None
    n_coefficients: int = 0  # those of the parameters that are population coefficients


def row_moments(table, order):
    """Moments of the rows of a rotated table, whose columns are those of the design in `order`."""
    means, weight = table.means()
    # About the means: squares about a far origin, such as years, cancel.
    moved = (flat_rows(rows[..., :-1] - rows[..., -1:] * means) for _, rows in table.batches)
    squares = sum(rows.T @ rows for rows in moved)
    back = np.append(np.argsort(order), len(order))
    return RowMoments(table.n_rows, weight, means[back], squares[np.ix_(back, back)] / weight)


def n_identified(moments, free, intercept):
    """Rank (int) of the `free` (p,) columns; `intercept` is the position of the intercept or None.

    Beside a free intercept it is that of the centred columns.
    """
    means, covariance = moments.means[:-1], moments.covariance[:-1, :-1]
    if intercept is None or not free[intercept]:
        seconds = covariance + np.multiply.outer(means, means)
        return n_independent(seconds[np.ix_(free, free)])
    varying = free & (np.diag(covariance) > _CONSTANT_COLUMN * means**2)
    varying[intercept] = False
    return 1 + n_independent(covariance[np.ix_(varying, varying)])


def n_covariance_parameters(shape, q, rank=1):
    """Free parameters of a covariance of q coefficients."""
    if shape in ("zero", "given") or q == 0:
        return 0
    return len(factor_of(shape, q, rank).start)


def gaussian_evidence(table, design, prior, noise, criterion, n_outputs=1):
    """Evidence of a model under a Gaussian prior.

    A noise variance is known, estimated (None) or absent (0). The criterion is a name, or a
    function of the covariance's shape, its number of coefficients and its rank that gives one.
    """
    moments, order, m = row_moments(table, design.order), design.order, table.n_clients
    q, p = table.n_random, len(order)
    n_classes = 1 if n_outputs == 1 else n_outputs + 1
    mean, covariance = prior.known_mean(n_classes * q), prior.known_covariance(q)
    means = np.full((n_classes, p), np.nan)
    # NaN: the population's mean is estimated.
    if mean is not None:
        means[:, order[:q]] = mean.reshape(n_classes, q)
    given, varying, shape, rank, centre = None, order[:q], "zero", 0, None
    if covariance is not None:
        given = design.embedded(covariance)
        shape = "given" if covariance.any() else "zero"
        varying = varying[np.diag(covariance) > 0]
    elif m > 1:  # one client has no covariance to estimate
        varying = varying[varying_columns(table, prior)]
        shape, rank = _free_shape(prior, len(varying))
        centre = moments.means[:-1].copy() if is_centred(table, prior) else np.zeros(p)
    form = Form(
        means,
        varying if shape != "zero" else varying[:0],
        shape,
        rank,
        given if shape == "given" else None,
        centre,
        noise,
        criterion if isinstance(criterion, str) else criterion(shape, len(varying), rank),
    )
    intercept = 0 if design.fit_intercept else None
    free = np.isnan(means[0])
    n_coefficients = n_outputs * n_identified(moments, free, intercept)
    n_parameters = n_coefficients + n_covariance_parameters(shape, len(varying), rank)
    return Evidence(moments, n_parameters + (noise is None), form, n_coefficients)


def _free_shape(prior, q):
    """Simplest name and rank of the set of covariances of q coefficients that a prior allows."""
    # Two models with one set of covariances must have one name, or a test would compare them.
    rank = prior.rank or 1 if prior.covariance_type == "low_rank" else 0
    if q == 0:
        return "zero", 0
    if q == 1 or rank >= q - 1 > 0:
        return "full", 0
    return prior.covariance_type, rank


def mixture_evidence(table, design, prior, estimates, noise):
    """Evidence of a linear model under a mixture prior, fitted as `estimates`."""
    moments = row_moments(table, design.order)
    free = np.zeros(len(design.order), dtype=bool)
    free[design.fixed] = True
    n_fixed = n_identified(moments, free, 0 if design.fit_intercept else None)
    if prior.is_known:
        return Evidence(moments, n_fixed + (noise is None), None)
    # A DiscretePrior is a mixture whose components have no covariance.
    model = MixtureModel(getattr(prior, "covariance_type", "zero"), noise)
    n_components = estimates.responsibilities.shape[1]
    return Evidence(moments, model.n_parameters(n_components, table.n_random, n_fixed), None)


def variance_shares(fixed, between, noise):
    """Marginal and conditional R2, from the variances of three parts of the response.

    Parameters
    ----------
    fixed, between, noise : float
        Variance of the population's predictors over the rows, mean variance between clients, and
        variance within clients.
    """
    with np.errstate(invalid="ignore"):  # a response without variance has no shares
        shares = np.array([fixed, fixed + between]) / np.float64(fixed + between + noise)
    return float(shares[0]), float(shares[1])
