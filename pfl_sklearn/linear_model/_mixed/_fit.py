"""Regressions with a link under a Gaussian prior: from a table of rows to estimates."""

from functools import partial

import numpy as np

from pfl_sklearn._parallel import batch_mapper
from pfl_sklearn._variance_averaging import averaging_share
from pfl_sklearn.linear_model._algebra import estimable, inverse_root, square_root
from pfl_sklearn.linear_model._mixed._client_posterior import (
    client_modes,
    effect_posterior,
    no_effects,
    penalized_information,
)
from pfl_sklearn.linear_model._mixed._identification import check_covariance_identified, is_centred
from pfl_sklearn.linear_model._mixed._population_search import (
    covariance_shape,
    criterion_of,
    find_population,
    has_one_effect,
    n_points_of,
    pooled_fit,
    predictor_spread,
)
from pfl_sklearn.linear_model._mixed._posterior import (
    ColumnScaling,
    CovariancePosterior,
    RowPosterior,
    with_averages,
)
from pfl_sklearn.linear_model._mixed._reduction import (
    MixedModelEstimates,
    centre_of,
    check_table_range,
    uncentred,
)
from pfl_sklearn.linear_model._mixed._search import WeakPriors
from pfl_sklearn.linear_model._mixed._table import SharedStacks
from pfl_sklearn.linear_model._mixed._uncertainty import EffectCase, average_effects

_LARGEST_SD = 1e7  # logits, or log rates; with much more, likelihoods lose all their digits
_HEAVIEST, _LIGHTEST = 1e6, 1e-3  # weight of a row, and of all rows together


def fit_link(table, prior, family, options):
    """Fit population and clients by maximum marginal likelihood, integrated as `options` say.

    Parameters
    ----------
    table : RegressionTable
        With labels 0 to K - 1 or counts as `y`.
    prior : GaussianPrior
        We estimate the parameters that it leaves None.
    family : Family
        If it has a dispersion, we estimate that besides.
    options : FitParameters

    Returns
    -------
    MixedModelEstimates
    """
    q, p = table.n_random, table.columns.shape[1]
    _check_fitted_to_several(prior)
    mean, covariance = _coded_mean(prior, family, q), prior.known_covariance(q)
    if covariance is None and table.n_clients == 1:
        return _fit_single(table, prior, family, options)
    _check_covariance(table, prior, covariance, family)
    # A known covariance is in the user's units, so its columns stay where they are.
    shaped = covariance is None and is_centred(table, prior)
    table, centre = _centred(table, mean, shaped)
    if mean is not None and shaped:
        # The known mean, too, is at the user's zeros: the same line at the centres.
        mean = mean.copy()
        mean[:, table.intercept] += mean @ centre[:q]
    stacks = table.stacks()
    with batch_mapper(options.n_jobs) as run:
        shared = SharedStacks(stacks, run)
        maximum, weak, search = find_population(
            table, shared, family, prior, mean, covariance, options
        )
        modes, factor = client_modes(table, stacks, maximum), maximum.factor
        spread = predictor_spread(table.columns[:, :q], table.weights, factor)
        n_points = n_points_of(options.quadrature, family, factor, spread)
        # Means of responses are by quadrature even if the fit is not.
        n_nodes = n_points_of("auto", family, factor, spread)
        effects = effect_posterior(table, stacks, maximum, modes.states, spread, n_nodes)
        if n_points > 1:  # the modes know Laplace's approximation alone
            criterion = criterion_of(table, shared, maximum, n_points)
            modes = modes._replace(log_likelihood=criterion(maximum.population, factor)[0])
        share = 0.0
        if covariance is None:
            share = _averaging_share(table, prior, maximum.family, options)
        observed = None
        # Averages count already that the variance was estimated; they need no second correction.
        if search is not None and options.uncertainty == "full" and share < 1:
            observed = search.observed_root(maximum, weak)
    information = penalized_information(modes.rows, family.n_outputs, weak.slopes)
    back = uncentred(np.eye(p), table.intercept, centre).T[:, p - len(weak.slopes) :]
    identified = estimable(information, np.kron(family.coding, back)).reshape(-1, p)
    free_root = inverse_root(information)[0]
    root = _error_root(free_root if observed is None else observed, family.n_outputs, p)
    here = maximum, modes.deviations[:, 0]
    maximum, modes, root = _uncentred_fit(maximum, modes, root, table.intercept, centre)
    if centre[:q].any():
        back = uncentred(effects.factor.T, table.intercept, centre[:q]).T
        effects = effects._replace(factor=back)
    estimates = _coded_estimates(family, prior, maximum, modes, effects, root, identified, weak)
    if shaped:
        estimates = estimates._replace(centre=centre)
    if share == 0:
        return estimates
    frame, direction = ColumnScaling(np.ones(p), centre, table.intercept), _direction(table, prior)
    case = EffectCase(table, stacks, options, *here, free_root, weak, n_points, frame, direction)
    return with_averages(estimates, share, partial(average_effects, case), holds_rows=True)


def _averaging_share(table, prior, family, options):
    """Share of the errors that is averaged over an estimated variance of one coefficient."""
    if options.uncertainty == "plug_in" or not has_one_effect(family, _direction(table, prior)):
        return 0.0
    # Single rows of classes say nothing of the variance, however many clients have one.
    repeated = max(int(np.sum(table.sizes > 1)), 1)
    return averaging_share(repeated if family.needs_repeats else table.n_clients)


def _direction(table, prior):
    """Factor (q, r) of the identity, in the shape of an unknown covariance."""
    shape = covariance_shape(table, prior)
    return shape.matrix(shape.start)


def _check_fitted_to_several(prior):
    """Raise ValueError for the `prior_` of a fit of one client, which has no covariance."""
    if prior.covariance is not None and np.isnan(np.asarray(prior.covariance, dtype=float)).any():
        raise ValueError(
            "covariance of GaussianPrior holds NaN; expected numbers or None. A fit of a single "
            "client leaves NaN there, as it cannot estimate the spread between clients. Set the "
            "covariance to None to estimate it."
        )


def _check_covariance(table, prior, covariance, family):
    """Raise ValueError if the data do not identify the covariance, or searches cannot follow it."""
    if covariance is None:
        m = table.n_clients
        # A variance then does next to nothing but rescale the population's coefficients.
        if len(table.y) == m and family.needs_repeats:
            raise ValueError(
                f"each of the {m} clients has one row, so the data do not identify the variance "
                "between clients; give a prior with a known covariance."
            )
        check_covariance_identified(table, prior)
        return
    # Without pooling, clients with rows of one class have no finite estimate.
    if np.isinf(covariance).any():
        raise ValueError(
            f"covariance of GaussianPrior must be finite here; got {prior.covariance!r}. Alone, "
            "many clients have no finite estimate."
        )
    random = table.columns[:, : table.n_random]
    spread = predictor_spread(random, table.weights, square_root(covariance))
    if spread > _LARGEST_SD:
        raise ValueError(
            "the prior's covariance gives the predictors of random coefficients a standard "
            f"deviation of {spread:.3g} logits (log rates) between clients; expected at most "
            f"{_LARGEST_SD:g}. Scale the features, or give a smaller covariance."
        )


def check_rows(table):
    """Raise ValueError if values or weights of a table are outside what searches can follow."""
    weights = table.weights
    check_table_range(table.columns, table.y, weights)
    if weights is not None and (weights.max() > _HEAVIEST or weights.sum() < _LIGHTEST):
        raise ValueError(
            f"sample_weight must be at most {_HEAVIEST:g} for a row and at least {_LIGHTEST:g} in "
            f"sum; got a largest weight of {weights.max():.3g} and a sum of {weights.sum():.3g}. A "
            "weight says how often a row counts; rescale the weights."
        )


def _centred(table, mean, random_too):
    """The table with centred columns, and the centres (p,)."""
    centre = centre_of(table, mean, random_too)
    if centre.any():
        table = table._replace(columns=table.columns - centre)
    return table, centre


def _uncentred_fit(maximum, modes, root, intercept, centre):
    """Maximum, modes and root of the population's covariance for the columns before centring."""
    if not centre.any():
        return maximum, modes, root
    (a, p), q = maximum.population.shape, modes.deviations.shape[2]
    rows = modes.rows.reshape(*modes.rows.shape[:2], a, p)
    rows = (rows + rows[..., intercept, None] * centre).reshape(modes.rows.shape)
    deviations, factor = modes.deviations, maximum.factor
    if centre[:q].any():
        deviations = uncentred(deviations, intercept, centre[:q])
        factor = uncentred(factor.T, intercept, centre[:q]).T
    root = uncentred(root.T.reshape(-1, a, p), intercept, centre).reshape(-1, a * p).T
    population = uncentred(maximum.population, intercept, centre)
    maximum = maximum._replace(population=population, factor=factor)
    return maximum, modes._replace(deviations=deviations, rows=rows), root


def _coded_mean(prior, family, q):
    """The prior's mean as population coefficients (a, q), or None.

    For K > 2 classes the prior gives one number, or K q numbers class by class.
    """
    coding = family.coding
    mean = prior.known_mean(len(coding) * q)
    return None if mean is None else coding.T @ mean.reshape(len(coding), q)


def _fit_single(table, prior, family, options):
    """Maximum of a single client's own likelihood; the spread between clients is unknown."""
    table, centre = _centred(table, None, table.intercept is not None)
    q, p = table.n_random, table.columns.shape[1]
    if family.has_dispersion:
        family = _single_dispersion(table, prior, family, options)
    offset = table.predictors(np.zeros((family.n_outputs, p)))
    pooled, precision, separated = pooled_fit(table, family, offset, 0, options.population_penalty)
    back = uncentred(np.eye(p), table.intercept, centre).T
    coding = np.kron(family.coding, back)
    root = coding @ pooled.root
    error, population = root @ root.T, family.coding @ pooled.coefficients @ back.T
    # Without a prior the client's own rows decide alone: a shrinkage of 0.
    prior_variances = np.tile(np.append(np.full(q, np.inf), np.zeros(p - q)), len(population))
    covariance = np.full((q, q), np.nan)
    return MixedModelEstimates(
        population,
        error,
        population[None],
        CovariancePosterior(error[None], prior_variances),
        prior.with_values(population[:, :q].ravel(), covariance),
        covariance,
        None,
        pooled.log_likelihood,
        pooled.n_iter,
        pooled.converged,
        estimable=estimable(pooled.normal, coding).reshape(population.shape),
        effects=no_effects(np.zeros((q, 0)), family.n_outputs, 1),
        family=family,
        weak=WeakPriors(precision, np.zeros(q), separated=separated),
    )


def _single_dispersion(table, prior, family, options):
    """The family with the likeliest dispersion of rows that have one set of coefficients."""
    nothing, shared = np.zeros((table.n_random, table.n_random)), SharedStacks(table.stacks())
    return find_population(table, shared, family, prior, None, nothing, options)[0].family


def _error_root(free, a, p):
    """Root (a p, rank) of the covariance of all coefficients, from that of the free ones."""
    f = len(free) // a
    root = np.zeros((a, p, free.shape[1]))
    root[:, p - f :] = free.reshape(a, f, free.shape[1])
    return root.reshape(a * p, free.shape[1])


def _coded_estimates(family, prior, maximum, modes, effects, root, identified, weak):
    """Estimates in the coding of the classes."""
    coding = family.coding
    (m, a, q), p = modes.deviations.shape, maximum.population.shape[1]
    coded = np.kron(coding, np.eye(p))
    root = coded @ root
    error = root @ root.T
    covariance = maximum.factor @ maximum.factor.T
    # Deviations of the classes share a covariance; the coding takes out their common shift.
    between_root = np.kron(coding, np.pad(maximum.factor, ((0, p - q), (0, 0))))
    population = coding @ maximum.population
    coefficients = np.tile(population, (m, 1, 1))
    coefficients[:, :, :q] += coding @ modes.deviations
    rows = modes.rows if a == 1 else modes.rows @ coded.T
    return MixedModelEstimates(
        population,
        error,
        coefficients,
        _scaled_posterior(rows, between_root, error, root),
        prior.with_values(population[:, :q].ravel(), covariance),
        covariance,
        None,
        modes.log_likelihood,
        maximum.n_iter,
        maximum.converged,
        estimable=identified,
        effects=effects,
        family=maximum.family,
        modes_found=modes.converged,
        weak=weak,
    )


def _scaled_posterior(rows, between_root, error, root):
    """Posterior of the clients, with all columns scaled to the population's standard errors."""
    scale = np.sqrt(np.diag(error))
    # A known coefficient has no standard error, so no scale.
    scale = scale if (scale > 0).all() else np.ones(len(scale))
    # For columns at a distance D from zero entries of covariances grow with its square and cancel
    # in the clients' variances. Those of roots grow with D, so digits are left.
    root, between_root = root / scale[:, None], between_root / scale[:, None]
    return RowPosterior(rows * scale, between_root, 1.0, root, scale)
