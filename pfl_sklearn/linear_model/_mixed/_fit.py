"""Regressions with a link under a Gaussian prior: from a table of rows to estimates."""

from functools import partial

import numpy as np

from pfl_sklearn._parallel import batch_mapper
from pfl_sklearn._variance_averaging import averaging_share
from pfl_sklearn.linear_model._algebra import estimable, inverse_root, square_root
from pfl_sklearn.linear_model._mixed._client_posterior import (
    client_modes,
    effect_posterior,
    penalized_information,
    point_mass_posterior,
)
from pfl_sklearn.linear_model._mixed._identifiability import check_covariance_identified, is_centred
from pfl_sklearn.linear_model._mixed._marginal_likelihood import (
    MarginalLikelihood,
    choose_n_points,
    has_one_effect,
)
from pfl_sklearn.linear_model._mixed._marginal_maximum import WeakPriors
from pfl_sklearn.linear_model._mixed._population_fit import find_population, pooled_fit
from pfl_sklearn.linear_model._mixed._posterior import (
    ColumnScaling,
    CovariancePosterior,
    RowPosterior,
    with_averages,
)
from pfl_sklearn.linear_model._mixed._reduction import (
    MixedModelEstimates,
    check_table_range,
    column_centre,
    uncentre,
)
from pfl_sklearn.linear_model._mixed._table import SharedStacks
from pfl_sklearn.linear_model._mixed._uncertainty import EffectCase, average_effects

_LARGEST_SD = 1e7  # logits, or log rates; with much more, likelihoods lose all their digits
_HEAVIEST, _LIGHTEST = 1e6, 1e-3  # weight of a row, and of all rows together


def fit_link(table, prior, family, options):
    """MixedModelEstimates of a RegressionTable by maximum marginal likelihood.

    `y` holds labels 0 to K - 1 or counts. We estimate what the GaussianPrior leaves None, and the
    dispersion of a family that has one.
    """
    q = table.n_random
    check_fitted_to_several(prior)
    mean, covariance = coded_mean(prior, family, q), prior.known_covariance(q)
    if covariance is None and table.n_clients == 1:
        return _fit_single(table, prior, family, options)
    check_covariance(table, prior, covariance, family)
    # A known covariance is in the user's units, so its columns stay where they are.
    shaped = covariance is None and is_centred(table, prior)
    table, frame = _centred(table, mean, shaped)
    if mean is not None:
        # The known mean, too, is at the user's zeros: the same line at the centres.
        mean = uncentre(mean, table.intercept, -frame.centre[:q])
    with batch_mapper(options.n_jobs) as run:
        shared = SharedStacks(table.stacks(), run)
        maximum, search = find_population(table, shared, family, prior, mean, covariance, options)
        n_points, value = search.n_points(maximum), None
        if n_points > 1:  # the modes know Laplace's approximation alone
            likelihood = MarginalLikelihood(table, shared, maximum, n_points)
            value = likelihood(maximum.population, maximum.factor)[0]
            del likelihood
        share = _averaging_share(table, maximum, options) if covariance is None else 0.0
        observed = None
        # Averages count already that the variance was estimated; they need no second correction.
        if options.uncertainty == "full" and share < 1:
            observed = search.observed_root(maximum)
    stacks, weak, direction = shared.stacks, search.weak, search.shape.matrix(search.shape.start)
    del shared, search  # the likelihood's copy of all rows goes before there are whitened ones
    modes = client_modes(table, stacks, maximum)
    modes = modes if value is None else modes._replace(log_likelihood=value)
    spread = table.predictor_spread(maximum.factor)
    # Means of responses are by quadrature even if the fit is not.
    n_nodes = choose_n_points("auto", family, maximum.factor, spread)
    effects = effect_posterior(table, stacks, maximum, modes.states, spread, n_nodes)
    information = penalized_information(modes.rows, family.n_outputs, weak.slopes)
    root = inverse_root(information)[0]
    errors = information, root if observed is None else observed
    estimates = _original_estimates(prior, frame, maximum, modes, effects, errors, weak)
    if shaped:
        estimates = estimates._replace(centre=frame.centre)
    if share == 0:
        return estimates
    rows, estimate = (table, stacks, options), (maximum, modes.deviations[:, 0], root)
    case = EffectCase(*rows, *estimate, weak, n_points, frame, direction)
    return with_averages(estimates, share, partial(average_effects, case), holds_rows=True)


def _averaging_share(table, maximum, options):
    """Share of the errors that is averaged over an estimated variance of one coefficient."""
    family = maximum.family
    if options.uncertainty == "plug_in" or not has_one_effect(family, maximum.factor):
        return 0.0
    # Single rows of classes say nothing of the variance, however many clients have one.
    repeated = max(int(np.sum(table.sizes > 1)), 1)
    return averaging_share(repeated if family.needs_repeats else table.n_clients)


def check_fitted_to_several(prior):
    """Raise ValueError for the `prior_` of a fit of one client, which has no covariance."""
    if prior.covariance is not None and np.isnan(np.asarray(prior.covariance, dtype=float)).any():
        raise ValueError(
            "covariance of GaussianPrior holds NaN; expected numbers or None. A fit of a single "
            "client leaves NaN there, as it cannot estimate the spread between clients. Set the "
            "covariance to None to estimate it."
        )


def check_covariance(table, prior, covariance, family):
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
    spread = table.predictor_spread(square_root(covariance))
    if spread > _LARGEST_SD:
        raise ValueError(
            "the prior's covariance gives the predictors of random coefficients a standard "
            f"deviation of {spread:.3g} logits (log rates) between clients; expected at most "
            f"{_LARGEST_SD:g}. Scale the features, or give a smaller covariance."
        )


def check_row_ranges(table):
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
    """The table with centred columns, and the ColumnScaling that leads back."""
    centre = column_centre(table, mean, random_too)
    if centre.any():
        table = table._replace(columns=table.columns - centre)
    return table, ColumnScaling(np.ones(len(centre)), centre, table.intercept)


def coded_mean(prior, family, q):
    """The prior's mean as population coefficients (a, q), or None."""
    # For K > 2 classes the prior gives one number, or K q numbers class by class.
    coding = family.coding
    mean = prior.known_mean(len(coding) * q)
    return None if mean is None else coding.T @ mean.reshape(len(coding), q)


def _fit_single(table, prior, family, options):
    """Maximum of a single client's own likelihood; the spread between clients is unknown."""
    table, frame = _centred(table, None, table.intercept is not None)
    q, p = table.n_random, table.columns.shape[1]
    if family.has_dispersion:  # the likeliest one of rows that have one set of coefficients
        alike, shared = np.zeros((q, q)), SharedStacks(table.stacks())
        maximum, _ = find_population(table, shared, family, prior, None, alike, options)
        family = maximum.family
    offset = table.predictors(np.zeros((family.n_outputs, p)))
    pooled = pooled_fit(table, family, offset, 0, options.population_penalty)
    coding = np.kron(family.coding, frame.back)
    root = coding @ pooled.root
    error, population = root @ root.T, family.coding @ pooled.coefficients @ frame.back.T
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
        effects=point_mass_posterior(np.zeros((q, 0)), family.n_outputs, 1),
        family=family,
        weak=WeakPriors(pooled.precision, np.zeros(q), separated=pooled.separated),
    )


def _original_estimates(prior, frame, maximum, modes, effects, errors, weak):
    """MixedModelEstimates in the coding of the classes, for the columns before centring.

    `errors` are the information on the free coefficients, and a root of their covariance. The rows
    of `modes` become those of the posterior, so that there is no copy of all rows.
    """
    coding, intercept, centre = maximum.family.coding, frame.intercept, frame.centre
    (m, a, q), p = modes.deviations.shape, len(centre)
    free = np.kron(coding, frame.back[:, p - len(weak.slopes) :])
    information, root = errors[0], free @ errors[1]
    population = coding @ uncentre(maximum.population, intercept, centre)
    deviations = uncentre(modes.deviations, intercept, centre[:q])
    factor = uncentre(maximum.factor.T, intercept, centre[:q]).T
    covariance = factor @ factor.T
    coefficients = np.tile(population, (m, 1, 1))
    coefficients[:, :, :q] += coding @ deviations
    rows = modes.rows.reshape(*modes.rows.shape[:2], a, p)
    for k in np.flatnonzero(centre):
        rows[..., k] += centre[k] * rows[..., intercept]
    if a > 1:
        rows = coding @ rows
    # Deviations of the classes share a covariance; the coding takes out their common shift.
    between_root = np.kron(coding, np.pad(factor, ((0, p - q), (0, 0))))
    return MixedModelEstimates(
        population,
        root @ root.T,
        coefficients,
        _scaled_posterior(rows.reshape(*rows.shape[:2], -1), between_root, root),
        prior.with_values(population[:, :q].ravel(), covariance),
        covariance,
        None,
        modes.log_likelihood,
        maximum.n_iter,
        maximum.converged,
        estimable=estimable(information, free).reshape(-1, p),
        effects=effects._replace(factor=uncentre(effects.factor.T, intercept, centre[:q]).T),
        family=maximum.family,
        modes_found=modes.converged,
        weak=weak,
    )


def _scaled_posterior(rows, between_root, root):
    """Posterior of the clients, with all columns scaled to the population's standard errors.

    It keeps the rows, which are scaled in place.
    """
    scale = np.linalg.norm(root, axis=1)
    # A known coefficient has no standard error, so no scale.
    scale = scale if (scale > 0).all() else np.ones(len(scale))
    # For columns at a distance D from zero entries of covariances grow with its square and cancel
    # in the clients' variances. Those of roots grow with D, so digits are left.
    root, between_root = root / scale[:, None], between_root / scale[:, None]
    rows *= scale
    return RowPosterior(rows, between_root, 1.0, root, scale)
