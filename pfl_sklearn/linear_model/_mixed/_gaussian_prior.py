"""Linear regressions under a Gaussian prior: the linear mixed model with one grouping factor."""

import numpy as np

from pfl_sklearn._variance_averaging import averaging_share
from pfl_sklearn.linear_model._algebra import factor_of, uncorrelating
from pfl_sklearn.linear_model._mixed._averaged import Case, Frame, LazyAverages, with_averages
from pfl_sklearn.linear_model._mixed._few_rows import (
    posterior_means,
    rows_to_spare,
    warn_of_few_rows,
)
from pfl_sklearn.linear_model._mixed._identified import flat_variances, warn_of_flat_variances
from pfl_sklearn.linear_model._mixed._known_population import (
    fit_known_population,
    is_known_with_few_rows,
)
from pfl_sklearn.linear_model._mixed._no_pooling import fit_without_pooling
from pfl_sklearn.linear_model._mixed._profile import Settings, client_deviations, open_coefficients
from pfl_sklearn.linear_model._mixed._reduction import random_moments, reduce_table
from pfl_sklearn.linear_model._mixed._variance_points import Family, can_average
from pfl_sklearn.linear_model._mixed._variance_search import (
    at_ratio,
    search_factor,
    search_noise,
    search_ratio,
)
from pfl_sklearn.linear_model._posterior import RowPosterior
from pfl_sklearn.linear_model._table import (
    Estimates,
    centred,
    check_covariance_identified,
    is_centred,
    uncentred,
    varying_columns,
)

_INFINITE = 1e12
_NO_NOISE = 1e-5  # the same share, which is zero where no client has rows to spare
_NEARLY_EXACT = 1e-10  # the same share, below which draws of a covariance lose their digits
_EXACT = 1e-20  # noise variance over mean square of the targets, below which it is rounding


def fit_gaussian_prior(table, prior, options):
    """Population, variance components and clients by restricted or full maximum likelihood.

    Parameters
    ----------
    table : Table
    prior : GaussianPrior
        We estimate the parameters that it leaves None.
    options : Options

    Returns
    -------
    Estimates
    """
    q = table.n_random
    mean, covariance, varies = prior.known_mean(q), prior.known_covariance(q), None
    if covariance is None:
        if table.n_clients == 1:
            return fit_without_pooling(table, prior, options, np.full((q, q), np.nan))
        check_variances_identified(table, prior, options.noise_variance)
        varies = varying_columns(table, prior)
        if not varies.any():
            covariance = np.zeros((q, q))
    elif np.isinf(covariance).any():
        return fit_without_pooling(table, prior, options, covariance)
    if is_known_with_few_rows(table, mean, covariance, options.noise_variance):
        return fit_known_population(table, prior, mean, covariance, options)
    given, shaped = table, covariance is None and is_centred(table, prior)
    table, offset, centre = centred(table, mean, shaped)
    spectral = use_spectral(prior.covariance_type, covariance, options.solver)
    common_shape = covariance is None and prior.covariance_type in ("spherical", "low_rank")
    reduced = reduce_table(
        table, spectral=spectral, common_scale=spectral or common_shape, n_jobs=options.n_jobs
    )
    if covariance is not None and _is_as_good_as_infinite(reduced, covariance, options):
        return fit_without_pooling(given, prior, options, covariance)
    settings = Settings(options.method == "reml", 0 if mean is None else q, options.noise_variance)
    around = offset, centre
    unknown = covariance is None and options.noise_variance is None
    few = unknown and len(table.y) > reduced.n_columns  # or else the population fits all rows
    family = None if covariance is not None else Family(prior.covariance_type, varies)
    any_shape = few and family.shape == "full" and not family.has_one_ratio
    if any_shape and rows_to_spare(table, varies) == 0:
        return _posterior_estimates(table, reduced, settings, prior, family, around, shaped)
    found = _search_variances(reduced, settings, prior, covariance, varies, spectral, options)
    no_noise = few and found.point.noise < _NO_NOISE * reduced.sum_of_squares / reduced.n_rows
    if no_noise and rows_to_spare(table, varies) == 0:
        if can_average(family):
            return _posterior_estimates(table, reduced, settings, prior, family, around, shaped)
        warn_of_few_rows(table, averaged=False)
    unbounded, all_fitted = None, found.point.root.shape[1] == reduced.n_rows
    if options.noise_variance is None and (all_fitted or _is_exact(found, reduced, _EXACT)):
        found = found._replace(converged=True)  # more iterations find nothing
    if family is not None and not all_fitted:
        found, unbounded = _zero_where_flat(table, reduced, settings, family, found, centre)
    estimates = _gaussian_estimates(table, reduced, found, prior, around, mean is None, shaped)
    estimates = estimates._replace(unbounded=unbounded)
    if family is None or options.uncertainty == "plug_in":
        return estimates
    return _with_averages(estimates, table, reduced, settings, family, found, around)


def _is_exact(found, reduced, least):
    """Whether the noise variance is less than a share `least` of the targets' mean square."""
    mean_square = reduced.sum_of_squares / reduced.n_rows
    return mean_square == 0 or found.point.noise < least * mean_square


def _zero_where_flat(table, reduced, settings, family, found, centre):
    """Variances that are 0 where the data say nothing of them, and which (q,) have no upper bound.

    A search leaves a flat variance wherever it started. 0 is what full likelihood says, and the
    clients' coefficients are the same under every value.
    """
    flat, spanning = flat_variances(reduced, settings.first)
    flat &= family.varies
    if family.shape in ("spherical", "low_rank") and not flat[family.varies].all():
        flat[:] = False  # the coefficients share a variance, of which the others tell
    if not flat.any():
        return found, None
    warn_of_flat_variances(table, flat, spanning)
    ratio = np.where(flat[:, None] | flat, 0.0, found.ratio)
    moved = at_ratio(reduced, settings, ratio)
    back = Frame(reduced.scale, centre, table.intercept).back[: len(flat), : len(flat)]
    return moved._replace(n_iter=found.n_iter, converged=found.converged), (back != 0) @ flat


def _with_averages(estimates, table, reduced, settings, family, found, around):
    """The same estimates, with errors that are averaged over the variances, where they may be."""
    share, (offset, centre) = averaging_share(table.n_clients), around
    least = _EXACT if family.has_one_ratio else _NEARLY_EXACT
    if share == 0 or _is_exact(found, reduced, least) or not can_average(family):
        return estimates
    population = np.zeros(reduced.n_columns)
    population[settings.first :] = found.point.coefficients
    deviations = client_deviations(reduced, found.whitened, found.point, found.ratio)
    frame = Frame(reduced.scale, centre, table.intercept)
    case = Case(reduced, settings, family, found.ratio, frame, population, deviations, offset)
    return with_averages(estimates, share, LazyAverages(case))


def _posterior_estimates(table, reduced, settings, prior, family, around, shaped):
    """Posterior means, where restricted likelihood has no maximum with noise."""
    warn_of_few_rows(table)
    (offset, centre), q = around, table.n_random
    frame = Frame(reduced.scale, centre, table.intercept)
    none = np.zeros((q, q))
    empty = np.zeros(reduced.n_columns), np.zeros((table.n_clients, q))
    case, source, covariance, noise = posterior_means(
        Case(reduced, settings, family, none, frame, *empty, offset)
    )
    found = at_ratio(reduced, settings._replace(noise=noise), covariance / noise)
    estimates = _gaussian_estimates(
        table, reduced, found, prior, around, settings.first == 0, shaped
    )
    population = offset + frame.back @ case.population
    moved = case.deviations @ frame.back[:, :q].T
    return with_averages(
        estimates._replace(
            population=population,
            coefficients=population + moved,
            prior=estimates.prior.with_values(population[:q], estimates.covariance),
            log_likelihood=np.nan,
        ),
        1.0,
        source,
    )


def _is_as_good_as_infinite(reduced, covariance, options):
    """Whether known variances are so large that the prior changes no digit of the estimates.

    An unknown noise variance is at most the mean square of the targets.
    """
    scaled = np.diag(covariance) / reduced.scale[: reduced.n_random] ** 2
    noise = options.noise_variance or reduced.sum_of_squares / reduced.n_rows
    return scaled.min() > _INFINITE * max(noise, 1e-280)


def use_spectral(covariance_type, covariance, solver):
    """Whether the spectral reduction applies: one variance for all random coefficients."""
    if covariance is None:
        common = covariance_type == "spherical"
    else:
        common = np.array_equal(covariance, covariance[0, 0] * np.eye(len(covariance)))
    if solver == "spectral" and not common:
        raise ValueError(
            "solver='spectral' needs one variance for all random coefficients; got a prior with "
            f"covariance_type={covariance_type!r}."
        )
    return common and solver != "quasi_newton"


def check_variances_identified(table, prior, noise_variance):
    """Raise ValueError if the data do not identify the variances."""
    m = table.n_clients
    if noise_variance is None and len(table.y) == m:
        raise ValueError(
            f"each of the {m} clients has one row, so the data cannot separate the noise variance "
            "from the variance between clients; give noise_variance, or a prior with a known "
            "covariance."
        )
    check_covariance_identified(table, prior)


def _search_variances(reduced, settings, prior, covariance, varies, spectral, options):
    """Covariance and noise variance, those of them that are unknown."""
    q, noise = reduced.n_random, options.noise_variance
    if covariance is None:
        if spectral:
            return search_ratio(reduced, settings, options.max_iter, options.tol)
        basis = uncorrelating(random_moments(reduced))
        factor = factor_of(prior.covariance_type, q, prior.rank, varies, basis)
        return search_factor(reduced, settings, factor, options.max_iter, options.tol)
    scaled = covariance / np.multiply.outer(reduced.scale[:q], reduced.scale[:q])
    if spectral:
        scaled = scaled[0, 0]
    if noise is None:
        return search_noise(reduced, settings, scaled)
    return at_ratio(reduced, settings, scaled / noise)


def _gaussian_estimates(table, reduced, found, prior, around, free_mean, shaped):
    """Estimates in the units of the data."""
    offset, centre = around
    m, q, p = table.n_clients, table.n_random, table.columns.shape[1]
    scale, point = reduced.scale, found.point
    free = slice(0 if free_mean else q, p)
    population, error = np.zeros(p), np.zeros((p, p))
    population[free] = point.coefficients * scale[free]
    population = offset + uncentred(population, table.intercept, centre)
    error[free, free] = point.covariance()
    deviations = client_deviations(reduced, found.whitened, point, found.ratio)
    coefficients = np.tile(population, (m, 1))
    spread = np.hstack([deviations * scale[:q], np.zeros((m, p - q))])
    coefficients += uncentred(spread, table.intercept, centre)
    ratio = np.zeros((p, p))
    ratio[:q, :q] = found.ratio
    rows, error, ratio = _uncentred_covariances(
        _by_client(reduced, found.whitened), error, ratio, table, centre, scale
    )
    squares = np.multiply.outer(scale, scale)
    stated = error * squares
    left_open = open_coefficients(reduced, found.whitened, point, free.start) + free.start
    stated[left_open], stated[:, left_open] = np.nan, np.nan
    covariance = point.noise * (ratio * squares)[:q, :q]
    return Estimates(
        population,
        stated,
        coefficients,
        RowPosterior(rows, ratio, point.noise, error, scale),
        prior.with_values(population[:q], covariance),
        covariance,
        point.noise,
        -0.5 * point.criterion,
        found.n_iter,
        found.converged,
        centre=centre if shaped else None,
    )


def _uncentred_covariances(rows, error, ratio, table, centre, scale):
    """Whitened columns (m, k, p) and two covariances (p, p) for the columns before centring.

    All of them are in the scale of the reduction.
    """
    if not centre.any():
        return rows, error, ratio
    shift = centre * scale / scale[table.intercept]
    back = np.eye(len(scale))
    back[table.intercept] -= shift
    if np.any(centre[: table.n_random]):
        ratio = back @ ratio @ back.T
    return rows + rows[..., table.intercept, None] * shift, back @ error @ back.T, ratio


def _by_client(reduced, whitened):
    """Whitened columns (m, k, p) of all clients, padded with rows of zeros."""
    if len(whitened.rows) == 1 and np.all(np.diff(reduced.stacks[0].clients) > 0):
        return whitened.rows[0][:, :, :-1]
    sizes = [rows.shape[1] for rows in whitened.rows]
    padded = np.zeros((reduced.n_clients, max(sizes), reduced.n_columns))
    for stack, rows in zip(reduced.stacks, whitened.rows, strict=True):
        padded[stack.clients, : rows.shape[1]] = rows[:, :, :-1]
    return padded
