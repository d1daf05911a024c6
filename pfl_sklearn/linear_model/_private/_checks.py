"""Checks and privacy charges of private fits, from parameters and public numbers alone.

All checks run before the ledger is charged, and read no value of a row. Client ids are read only to
count clients and rows, where these numbers are public.
"""

import math

import numpy as np

from pfl_sklearn._clients import encode_clients
from pfl_sklearn.linear_model._design import column_names, resolve_design
from pfl_sklearn.linear_model._grouping_columns import check_no_groupings
from pfl_sklearn.linear_model._private import _constants as tuned
from pfl_sklearn.linear_model._private._link_server import spread_scales
from pfl_sklearn.linear_model._private._messages import (
    LINK_MESSAGE,
    SLOPE_MESSAGE,
    LinkShape,
    effect_scale,
    moments_message,
    protects_sizes,
)
from pfl_sklearn.privacy._spending import UNPROTECTED, gaussian_events

_TWO_UNITS = (
    "does not go with a finite epsilon: a row would belong to two units, a client and a level"
)

# Bounds that a private fit needs: the range of each, what it means, and what to rescale.
_SCALED = "Rows beyond it are scaled down. Choose it without looking at the data."
_LINEAR_RANGE = tuned.SMALLEST_BOUND, 1 / tuned.SMALLEST_BOUND
LINEAR_BOUNDS = {
    "feature_bound": (
        _LINEAR_RANGE,
        f": a bound on the L2 norm of a row of X. {_SCALED}",
        "the data",
    ),
    "target_bound": (_LINEAR_RANGE, f": a bound on the absolute y. {_SCALED}", "the data"),
}
_WITHOUT_DATA = "; choose it without looking at the data."
_LINK_RANGE = 1 / tuned.LARGEST_BOUND, tuned.LARGEST_BOUND
LINK_BOUNDS = {
    "feature_bound": (_LINK_RANGE, _WITHOUT_DATA, "X, and the bound with it"),
    "max_rows_per_client": ((1, tuned.LARGEST_CAP), _WITHOUT_DATA, None),
}


def check_private_bounds(params, bounds, sample_weight, instead):
    """Raise ValueError for a missing bound, one out of range, a delta of 0, or weights."""
    for name, ((low, high), meaning, rescaled) in bounds.items():
        value = getattr(params, name)
        if value is None:
            raise ValueError(f"{name} must be given when epsilon is finite{meaning}")
        if not low <= value <= high:
            remedy = f" Rescale {rescaled}." if rescaled else ""
            raise ValueError(
                f"{name} must lie between {low:g} and {high:g}; got {value!r}.{remedy}"
            )
    if params.delta == 0:  # no scale of Gaussian noise gives pure differential privacy
        raise ValueError("delta must be above 0 for the Gaussian mechanism; got 0.")
    if sample_weight is not None:
        raise ValueError(f"sample_weight is not supported when epsilon is finite: {instead}")


# Linear regressions -------------------------------------------------------------------------------


def check_linear_parameters(params, prior, sample_weight):
    """Raise ValueError if the parameters allow no private fit; no data is touched."""
    if type(prior).__name__ != "GaussianPrior":
        raise ValueError(
            f"prior={prior!r} does not go with a finite epsilon; expected a GaussianPrior."
        )
    check_no_groupings(params.groupings, _TWO_UNITS)
    unknown = "its effect on the sensitivity is undefined."
    check_private_bounds(params, LINEAR_BOUNDS, sample_weight, unknown)


def check_linear_rows(params, prior, X, groups):
    """Raise ValueError if too little is known for a private fit of these rows."""
    shape = np.shape(X)
    if len(shape) != 2:
        return  # the check of the data raises
    if not shape[1]:  # bounds and scales of messages are those of features
        raise ValueError(
            f"a private {type(params).__name__} needs features; got X of shape {shape}. Use "
            "GaussianMean to estimate clients' means alone."
        )
    design = resolve_design(params.random, shape[1], params.fit_intercept, column_names(X))
    codes = np.zeros(0 if protects_sizes(params) else shape[0], dtype=np.intp)
    if groups is not None and len(codes):
        codes = encode_clients(groups, shape[0]).codes
    _check_linear_prior(params, prior, design, np.bincount(codes))


def check_linear_statistics(params, prior, design, statistics):
    """Raise ValueError if statistics of rows allow no private fit; no sum of rows is read."""
    for name in LINEAR_BOUNDS:
        bound = getattr(statistics, name)
        if bound is None:
            raise ValueError(
                "a private fit needs statistics of rows that were scaled to its bounds; these rows "
                "were not. Make them by from_rows, from_frame or from_chunks with "
                f"feature_bound={params.feature_bound!r} and target_bound={params.target_bound!r}; "
                "from_moments cannot scale rows."
            )
        if bound != getattr(params, name):
            raise ValueError(
                f"{name}={getattr(params, name)!r} must be that of the statistics, whose rows were "
                f"scaled to {name}={bound!r}; give the same numbers."
            )
    sizes = statistics.n_samples_per_client
    _check_linear_prior(
        params, prior, design, np.zeros(0, int) if protects_sizes(params) else sizes
    )
    as_scaled = params.relation == "replace_one" and design.fit_intercept
    if not as_scaled and linear_release(params, prior, len(sizes)) == "moments":
        raise ValueError(
            "rows of statistics are scaled as for relation='replace_one' with an intercept; got "
            f"relation={params.relation!r} and fit_intercept={design.fit_intercept}. Fit the rows."
        )


def linear_events(params, prior):
    """Accounting events of a fit, which must not depend on the data."""
    # The number of features is unknown here. The ratio of the two sensitivities is largest for one
    # feature under add/remove, and the same for any number under replacement.
    if math.isinf(params.epsilon):
        return UNPROTECTED
    if prior.mean is not None:  # a known population: nothing is released
        return ()
    moments = moments_message(1, params.fit_intercept, params)
    # Without a unit: the unit is removed, or zeroed where the number of units is public.
    without = "add_remove" if params.relation == "add_remove" else "zero_out"
    return gaussian_events(
        params.epsilon,
        params.delta,
        replace_one=moments.replace_one_sensitivity / moments.sensitivity,
        **{without: moments.add_remove_sensitivity / moments.sensitivity},
    )


def known_population(params, prior, q, n_clients):
    """Mean and covariance of q coefficients, None if unknown, and whether there is one client."""
    mean, covariance = prior.known_mean(q), prior.known_covariance(q)
    # The fit may depend on this only where the number of clients is public.
    alone = n_clients == 1 and not protects_sizes(params)
    if covariance is not None and alone and np.isinf(covariance).any():
        covariance = None
    return mean, covariance, alone


def linear_release(params, prior, n_clients):
    """What a linear fit releases: "rounds" of sums, one sum of "moments", or "nothing"."""
    # Estimating variances between clients that the prior leaves unknown takes rounds.
    if prior.covariance is None and n_clients > 1 and not protects_sizes(params):
        return "rounds"
    return "moments" if prior.mean is None else "nothing"


def _check_linear_prior(params, prior, design, sizes):
    """Raise ValueError if too little is known; sizes (m,) are empty where they are protected."""
    q, m = len(design.random), len(sizes)
    all_vary = q == len(design.names)
    if linear_release(params, prior, m) != "rounds":
        mean, covariance, _ = known_population(params, prior, q, m)
        _check_known(params, mean, covariance, m, all_vary)
        return
    intercept_only = q == 1 and design.fit_intercept and design.random[0] == 0
    _check_estimable(params, prior, intercept_only, all_vary)
    if not intercept_only:
        check_noise_on_slopes(m, q, params)
    if params.noise_variance is None and not (sizes > q).any():
        reason = "every client has one row, which does not identify it"
        if not intercept_only:
            reason = f"no client has more than {q} rows, so that least squares leaves no residual"
        raise ValueError(f"noise_variance must be given when {reason}.")


def _check_estimable(params, prior, intercept_only, all_vary):
    """Raise ValueError if the variances between clients cannot be estimated."""
    possible = intercept_only or (all_vary and prior.covariance_type == "diag")
    if not possible or params.unit == "row" or prior.mean is not None:
        raise ValueError(
            "with a finite epsilon and several clients, either the prior needs a finite "
            "covariance, as GaussianPrior(covariance=...), or its variances are estimated: that "
            "takes unit='client', no known mean, and random='intercept', or random='all' with "
            "covariance_type='diag'."
        )
    noise, square = params.noise_variance, params.target_bound**2
    low, high = tuned.LEAST_NOISE * square, square / tuned.LEAST_NOISE
    if noise is not None and not low <= noise <= high:
        raise ValueError(
            f"noise_variance must lie between {low:.4g} and {high:.4g} for "
            f"target_bound={params.target_bound!r}; got {noise!r}."
        )


def _check_known(params, mean, covariance, n_clients, all_vary):
    """Raise ValueError if too little, or too much, is known about the population."""
    protected = protects_sizes(params)
    if (protected or n_clients > 1) and (covariance is None or np.isinf(covariance).any()):
        when = "relation='add_remove'" if protected else "several clients"
        raise ValueError(
            f"with {when} and a finite epsilon the prior needs a finite covariance, as "
            f"GaussianPrior(covariance=...); got {covariance}."
        )
    several_rows = n_clients > 1 and params.unit == "row"
    if several_rows and params.relation == "add_remove" and mean is None:
        raise ValueError(
            "unit='row' with relation='add_remove' is for one client; with several, the standard "
            "errors of the population need their numbers of rows, which only "
            "relation='replace_one' takes as public."
        )
    everything = covariance is not None and params.noise_variance is not None
    if mean is not None and not (everything and all_vary):
        raise ValueError(
            "a prior with a known mean goes with a finite epsilon only if nothing has to be "
            "released: give its covariance and noise_variance too, with random='all', or no mean."
        )


def predicted_noise(n_clients, n_random, params):
    """Relative noise on a variance of a linear fit in the last round; from public numbers."""
    std = SLOPE_MESSAGE.mechanism(params).noise_std / np.sqrt(tuned.ROUND_SHARES[-1]) / n_clients
    scale = effect_scale(SLOPE_MESSAGE.factor(n_clients, params), n_random)
    return float(std * scale**2 / tuned.TYPICAL_SQUARE)


def check_noise_on_slopes(m, q, params):
    """Raise ValueError if the variances of q coefficients would be mostly noise with m clients."""
    noise = predicted_noise(m, q, params)
    if noise > tuned.TOO_NOISY:
        raise ValueError(
            f"with epsilon={params.epsilon:g}, {m} clients and {q} coefficients that vary, the "
            f"noise on a variance would be about {noise:.2g} of it; expected at most "
            f"{tuned.TOO_NOISY}. Give the variances, as GaussianPrior(covariance=...), or let the "
            "intercept alone vary by random='intercept'."
        )


# Classes and counts -------------------------------------------------------------------------------


def check_link_parameters(params, prior, sample_weight):
    """Raise ValueError if the parameters allow no private fit; no data is touched."""
    check_no_groupings(params.groupings, _TWO_UNITS)
    instead = "max_rows_per_client limits how much a client counts."
    check_private_bounds(params, LINK_BOUNDS, sample_weight, instead)
    if prior.mean is not None or params.population_penalty:
        raise ValueError(
            f"a private {type(params).__name__} takes a prior without a mean, and no "
            f"population_penalty; got {prior!r} and population_penalty="
            f"{params.population_penalty}."
        )


def check_link_rows(params, prior, X, groups):
    """Raise ValueError if too many coefficients vary for a private fit of these rows."""
    # This depends on the names and the number of columns and, if the variances of slopes are
    # unknown, on the number of clients, which is public.
    name, q = type(params).__name__, 1
    if private_random(params.random) not in ("intercept", ["intercept"]):
        shape = np.shape(X)
        if len(shape) != 2:
            return  # the check of the data raises
        random, names = private_random(params.random), column_names(X)
        design = resolve_design(random, shape[1], params.fit_intercept, names)
        q = len(design.random) if design.fit_intercept and design.random[0] == 0 else 0
    if not params.fit_intercept or q == 0:
        raise ValueError(
            f"in a private {name} the intercept varies by client; got random={params.random!r} and "
            f"fit_intercept={params.fit_intercept}."
        )
    known = prior.known_variances(q)
    least = (tuned.LEAST_SPREAD * spread_scales(q, params.feature_bound)) ** 2
    if known is not None and not ((known >= least) & np.isfinite(known)).all():
        raise ValueError(
            f"known variances have to be finite and at least {least[0]:.2g} in a private {name} "
            f"(over the squared feature_bound for slopes), as messages are divided by their "
            f"roots; got {prior.covariance!r}."
        )
    if q == 1 or known is not None:  # a random intercept alone is never refused for its noise
        return
    if prior.covariance_type != "diag":
        raise ValueError(
            f"a private {name} estimates a diagonal covariance; got covariance_type="
            f"{prior.covariance_type!r}."
        )
    n_clients = 1 if groups is None else max(len(encode_clients(groups, shape[0]).ids), 1)
    _check_noise_on_spreads(params, q, n_clients)


def private_random(random):
    """`random` in a private fit, where "auto" means an intercept, as the data must not choose."""
    return "intercept" if isinstance(random, str) and random == "auto" else random


def _check_noise_on_spreads(params, q, n_clients):
    """Raise ValueError if the variances of q coefficients would be mostly noise."""
    # The scale of the excess depends only on the number of columns that vary.
    shape = LinkShape(
        q - 1, params.max_rows_per_client, 1.0, LINK_MESSAGE.factor(n_clients, params), q
    )
    # Of the second half of the rounds, whose sums are averaged.
    late = LINK_MESSAGE.mechanism(params).noise_std / np.sqrt(1 - tuned.FIRST_SHARE_OF_SLOPES)
    noise = shape.variance_scales[0] * late / n_clients
    if noise >= tuned.TOO_NOISY:
        raise ValueError(
            f"with {n_clients} clients and epsilon={params.epsilon:g} the noise on the variance of "
            f"each of {q} coefficients would be {noise:.3g} times a coefficient's own variance; "
            f"expected less than {tuned.TOO_NOISY}. More clients, a larger epsilon, or fewer "
            "coefficients in random lower it."
        )
