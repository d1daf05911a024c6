"""The linear regression under a Gaussian prior, and which fit goes with other priors.

The fit under a Gaussian prior is that of the linear mixed model with one grouping factor.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from pfl_sklearn._variance_averaging import averaging_share
from pfl_sklearn.linear_model._algebra import row_slices, square_root
from pfl_sklearn.linear_model._mixed import _reduction
from pfl_sklearn.linear_model._mixed._identifiability import (
    EXACT_NOISE,
    NEARLY_EXACT_NOISE,
    check_covariance_identified,
    check_noise_identified,
    flat_variances,
    is_centred,
    residual_dof,
    varying_columns,
    warn_of_few_rows,
    warn_of_flat_variances,
)
from pfl_sklearn.linear_model._mixed._normal_rows._closed_form import (
    fit_known_population,
    fit_without_pooling,
)
from pfl_sklearn.linear_model._mixed._normal_rows._laplace_prior import fit_laplace_prior
from pfl_sklearn.linear_model._mixed._normal_rows._mixture_prior import fit_mixture_prior
from pfl_sklearn.linear_model._mixed._normal_rows._profiled_likelihood import (
    ProfiledLikelihood,
    reduce_table,
)
from pfl_sklearn.linear_model._mixed._normal_rows._variance_points import (
    average,
    posterior_means,
    zero_p_values,
)
from pfl_sklearn.linear_model._mixed._normal_rows._variance_search import search_variances
from pfl_sklearn.linear_model._mixed._posterior import ColumnScaling, RowPosterior, with_averages
from pfl_sklearn.linear_model._mixed._reduction import MixedModelEstimates, centre_table
from pfl_sklearn.linear_model._printed._adamix import check_noise_is_given, fit_clustered
from pfl_sklearn.linear_model._printed._gradient_descent import fit_by_gradient

# Prior variance over noise, from which on shrinkage changes fewer digits than a solve loses.
_INFINITE_RATIO = 1e12
# Share of the targets' mean square, below which a noise variance has gone to its limit of zero.
_VANISHING_NOISE = 1e-5
_MOST_VARYING = 20  # coefficients; with more, draws of variances take too long


class CovarianceShape(NamedTuple):
    """Covariances between clients that a prior allows, in the scale of the reduction."""

    name: str  # covariance_type of the prior
    rank: int | None  # of "low_rank"
    varies: np.ndarray  # (q,), bool

    @property
    def has_one_ratio(self):
        """Whether a ratio of two variances is all that is unknown."""
        return self.name == "spherical" or self.varies.sum() == 1

    @property
    def can_be_averaged(self):
        """Whether we have a prior for the covariances, and the time for draws."""
        few = self.varies.sum() <= _MOST_VARYING
        return self.has_one_ratio or (self.name in ("diag", "full") and few)


class ScaledFit(NamedTuple):
    """A fit whose errors are to be averaged; all but the frame and offset is for scaled columns."""

    likelihood: ProfiledLikelihood
    shape: CovarianceShape | None  # None: the covariance is known
    frame: ColumnScaling
    offset: np.ndarray  # (p,), of the population's coefficients of the data's columns
    # The estimates, once there are any.
    ratio: Any = None  # (q, q), covariance between clients over the noise
    population: Any = None  # (p,), without the offset
    deviations: Any = None  # (m, q)

    @property
    def reduced(self):
        """The rows of the likelihood."""
        return self.likelihood.reduced


def fit_gaussian_prior(table, prior, options):
    """MixedModelEstimates by restricted or full maximum likelihood, or known prior values."""
    q = table.n_random
    mean, covariance, shape = prior.known_mean(q), prior.known_covariance(q), None
    # A single client informs on no variance between clients, which stays unknown.
    if covariance is None and table.n_clients == 1:
        covariance = np.full((q, q), np.nan)
    if covariance is None:
        otherwise = ", or a prior with a known covariance"
        check_noise_identified(table, options.noise_variance, otherwise)
        check_covariance_identified(table, prior)
        varies = varying_columns(table, prior)
        if varies.any():
            shape = CovarianceShape(prior.covariance_type, prior.rank, varies)
        else:  # every column is constant within clients: a regression without differences
            covariance = np.zeros((q, q))
    elif not np.isfinite(covariance).all():
        return fit_without_pooling(table, prior, options, covariance)
    # Nothing is to be searched then, and systems as large as the rows are cheaper than rotations.
    if _is_known_with_few_rows(table, mean, covariance, options.noise_variance):
        return fit_known_population(table, prior, mean, covariance, options)
    spectral = use_spectral(prior.covariance_type, covariance, options.solver)
    case = _reduced_case(table, prior, mean, shape, spectral, options)
    # The inverse of a huge covariance has no digits left, but its limit is least squares.
    if shape is None and _is_effectively_infinite(case.reduced, covariance, options):
        return fit_without_pooling(table, prior, options, covariance)
    return _fit_by_likelihood(table, prior, case, covariance, options)


def _is_known_with_few_rows(table, mean, covariance, noise):
    """Whether everything is known and no client has more rows than coefficients."""
    known = mean is not None and covariance is not None and noise is not None
    few = table.sizes.max() <= table.n_random  # or a rotation would shorten the rows
    return known and few and table.n_random == table.n_columns


def _reduced_case(table, prior, mean, shape, spectral, options):
    """ScaledFit of the centred and reduced table, without estimates."""
    shaped = shape is not None and is_centred(table, prior)
    table, offset, centre = centre_table(table, mean, shaped)
    # Shapes that hold a multiple of the identity keep it only if all columns have one scale.
    common_shape = shape is not None and shape.name in ("spherical", "low_rank")
    reduced = reduce_table(table, spectral=spectral, common_scale=spectral or common_shape)
    first = 0 if mean is None else table.n_random
    restricted, noise = options.method == "reml", options.noise_variance
    likelihood = ProfiledLikelihood(reduced, restricted, first, noise)
    frame = ColumnScaling(reduced.scale, centre, table.intercept)
    return ScaledFit(likelihood, shape, frame, offset)


def _fit_by_likelihood(table, prior, case, covariance, options):
    """Estimates at the maximum of the likelihood, or posterior means where it has none."""
    reduced, shape = case.reduced, case.shape
    unknown = shape is not None and options.noise_variance is None
    # With fewer rows than columns the population alone fits all of them, whatever the variances.
    few = unknown and table.n_rows > reduced.n_columns
    # A full covariance without residual degrees of freedom: the likelihood is largest at a noise of
    # zero, so a search would only run into a wall.
    any_shape = few and shape.name == "full" and not shape.has_one_ratio
    if any_shape and residual_dof(table, shape.varies) == 0:
        return _posterior_estimates(table, prior, case)
    point = search_variances(case.likelihood, shape, covariance, options)
    # Simpler shapes often have a maximum even so, which only a search shows.
    no_noise = few and _noise_is_below(_VANISHING_NOISE, point, reduced)
    if no_noise and residual_dof(table, shape.varies) == 0:
        if shape.can_be_averaged:
            return _posterior_estimates(table, prior, case)
        warn_of_few_rows(table, averaged=False)
    all_fitted = point.root.shape[1] == reduced.n_rows
    is_exact = all_fitted or _noise_is_below(EXACT_NOISE, point, reduced)
    if is_exact and options.noise_variance is None:
        point = point._replace(converged=True)  # more iterations find nothing
    unbounded = None
    if shape is not None and not all_fitted:
        point, unbounded = _zero_flat_variances(table, case, point)
    deviations = reduced.deviations(point.whitened.rows, point.residuals, point.ratio)
    case = case._replace(ratio=point.ratio, population=point.coefficients, deviations=deviations)
    estimates = _gaussian_estimates(table, prior, case, point)._replace(unbounded=unbounded)
    share = _variance_averaging_share(case, point, options)
    if share == 0:
        return estimates
    p_values = partial(zero_p_values, case)
    return with_averages(estimates, share, partial(average, case), p_values=p_values)


def _variance_averaging_share(case, point, options):
    """Share of the errors that is averaged over the variances."""
    shape = case.shape
    if shape is None or options.uncertainty == "plug_in" or not shape.can_be_averaged:
        return 0.0
    # Draws of a covariance lose their digits long before one ratio does.
    least = EXACT_NOISE if shape.has_one_ratio else NEARLY_EXACT_NOISE
    is_exact = _noise_is_below(least, point, case.reduced)
    return 0.0 if is_exact else averaging_share(case.reduced.n_clients)


def _noise_is_below(share, point, reduced):
    """Whether the noise variance is less than a share of the targets' mean square."""
    return reduced.mean_square == 0 or point.noise < share * reduced.mean_square


def _zero_flat_variances(table, case, point):
    """Profile with 0 for variances with a flat likelihood, and the mask (q,) of unbounded ones."""
    # A search leaves a flat variance wherever it started. 0 is the estimate by full likelihood, and
    # the clients' coefficients are the same under every value.
    reduced, shape = case.reduced, case.shape
    flat, spanning = flat_variances(reduced, case.likelihood.first)
    flat &= shape.varies
    if shape.name in ("spherical", "low_rank") and not flat[shape.varies].all():
        flat[:] = False  # the coefficients share a variance, which the others identify
    if not flat.any():
        return point, None
    warn_of_flat_variances(table, flat, spanning)
    ratio = np.where(flat[:, None] | flat, 0.0, point.ratio)
    at_zero = case.likelihood.at_ratio(ratio)
    # A coefficient of the data's columns has no bound if one that it combines has none.
    back = case.frame.back[: len(flat), : len(flat)]
    return at_zero._replace(n_iter=point.n_iter, converged=point.converged), (back != 0) @ flat


def _posterior_estimates(table, prior, case):
    """Posterior means, where restricted likelihood has no maximum with noise."""
    q = table.n_random
    warn_of_few_rows(table)
    case, averages, covariance, noise = posterior_means(case._replace(ratio=np.zeros((q, q))))
    # Shrinkage and plug-in errors are those at the posterior mean variances.
    point = case.likelihood._replace(noise=noise).at_ratio(covariance / noise)
    estimates = _gaussian_estimates(table, prior, case, point)._replace(log_likelihood=np.nan)
    return with_averages(estimates, 1.0, averages)


def _is_effectively_infinite(reduced, covariance, options):
    """Whether known variances are so large that the prior changes no digit of the estimates."""
    scaled = np.diag(covariance) / reduced.scale[: reduced.n_random] ** 2
    return scaled.min() > _INFINITE_RATIO * (options.noise_variance or reduced.mean_square)


def use_spectral(covariance_type, covariance, solver):
    """Whether the spectral reduction applies: one variance for all random coefficients."""
    common = covariance_type == "spherical"
    if covariance is not None:
        common = np.array_equal(covariance, covariance[0, 0] * np.eye(len(covariance)))
    if solver == "spectral" and not common:
        raise ValueError(
            "solver='spectral' needs one variance for all random coefficients; got a prior with "
            f"covariance_type={covariance_type!r}."
        )
    return common and solver != "quasi_newton"


def _gaussian_estimates(table, prior, case, point):
    """Estimates in the units of the data; the whitened rows become those of the posterior."""
    reduced, (scale, centre, _) = case.reduced, case.frame
    q, p = table.n_random, table.n_columns
    population = case.offset + case.frame.back @ case.population
    coefficients = population + case.deviations @ case.frame.back[:, :q].T
    error_root, ratio_root = np.sqrt(point.noise) * point.root, np.zeros((p, q))
    ratio_root[:q] = square_root(point.ratio)
    # A generalized inverse does not show which coefficients the rows leave unidentified.
    unidentified = case.likelihood.unidentified_coefficients(point)
    rows = reduced.padded([rows[:, :, :-1] for rows in point.whitened.rows])
    rows, error_root, ratio_root = _uncentred_roots(rows, error_root, ratio_root, case.frame)
    posterior = RowPosterior(rows, ratio_root, point.noise, error_root, scale)
    error_root, between_root = scale[:, None] * error_root, scale[:q, None] * ratio_root[:q]
    covariance = point.noise * (between_root @ between_root.T)
    return MixedModelEstimates(
        population,
        error_root @ error_root.T,
        coefficients,
        posterior,
        prior.with_values(population[:q], covariance),
        covariance,
        point.noise,
        -0.5 * point.criterion,
        point.n_iter,
        point.converged,
        centre=centre if case.shape is not None and is_centred(table, prior) else None,
        unidentified=unidentified,
        first=case.likelihood.first,
    )


def _uncentred_roots(rows, error_root, ratio_root, frame):
    """Whitened columns (m, k, p) and roots (p, r) for the columns before centring, as scaled."""
    scale, centre, intercept = frame
    if not centre.any():
        return rows, error_root, ratio_root
    shift, back = centre * scale / scale[intercept], frame.back / scale[:, None]
    # In place, some clients at a time: the rows may fill most of the memory.
    for clients in row_slices(len(rows), rows[0].size, _reduction.CACHED_CELLS):
        rows[clients] += rows[clients, :, intercept, None] * shift
    return rows, back @ error_root, back @ ratio_root


_LIKELIHOOD = ("reml", "ml")
# (prior, method, solver): the fit. Mixtures are fitted by full likelihood, whatever the method.
LINEAR_FITS = {
    **{
        ("GaussianPrior", method, solver): fit_gaussian_prior
        for method in _LIKELIHOOD
        for solver in ("auto", "spectral", "quasi_newton")
    },
    **{("GaussianPrior", method, "gd"): fit_by_gradient for method in _LIKELIHOOD},
    **{("LaplacePrior", method, "auto"): fit_laplace_prior for method in _LIKELIHOOD},
    **{("GaussianMixturePrior", method, "auto"): fit_mixture_prior for method in _LIKELIHOOD},
    **{("DiscretePrior", method, "auto"): fit_mixture_prior for method in _LIKELIHOOD},
    ("GaussianMixturePrior", "printed", "auto"): fit_clustered,
    ("DiscretePrior", "printed", "auto"): fit_clustered,
}


def check_fit(prior, method, solver, noise_variance):
    """Raise ValueError if the prior has no such method or solver, or a variance is missing."""
    name = type(prior).__name__
    if (name, method, solver) in LINEAR_FITS:
        if method == "printed":
            check_noise_is_given(noise_variance)
        return
    pairs = [f"{key[1]}/{key[2]}" for key in LINEAR_FITS if key[0] == name]
    raise ValueError(
        f"method={method!r} with solver={solver!r} does not go with {name}; expected one of the "
        f"pairs {', '.join(pairs)}."
    )
