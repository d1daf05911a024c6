"""Linear regressions whose population comes from one noisy release of bounded moments.

Each client's posterior uses its own exact rows and the release. Clients share nothing else. Columns
are in the order of the prior.
"""

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from pfl_sklearn._clients import row_counts
from pfl_sklearn._warnings import warn_caller
from pfl_sklearn.linear_model._mixed._closed_form import fit_without_pooling
from pfl_sklearn.linear_model._mixed._private_population import (
    PublicSizes,
    ReleasedPopulation,
    client_posteriors,
    estimate_population,
)
from pfl_sklearn.linear_model._rotation import rotated
from pfl_sklearn.linear_model._table import MixedModelEstimates
from pfl_sklearn.privacy import GaussianMechanism, PrivacyReport, RegressionMoments, gdp_epsilon
from pfl_sklearn.privacy._mechanisms._noise import noise_generator
from pfl_sklearn.privacy._report import private_report
from pfl_sklearn.privacy._spending import UNPROTECTED, gaussian_events

_UNTRUSTED_NOISE = (
    "The released noise variance is lost in the privacy noise, so every client keeps its own "
    "regression. Give noise_variance, tighter bounds or a larger epsilon."
)
_SMALLEST_BOUND = 1e-50  # squared ratios of smaller bounds overflow


class ReleaseParameters(NamedTuple):
    """Parameters of a private fit."""

    epsilon: float
    delta: float
    feature_bound: float | None
    target_bound: float | None
    unit: str
    relation: str
    random_state: object


def check_release_parameters(prior, release, sample_weight):
    """Raise ValueError if the parameters allow no private fit; no data is touched."""
    if type(prior).__name__ != "GaussianPrior":
        raise ValueError(
            f"prior={prior!r} does not go with a finite epsilon; expected a GaussianPrior."
        )
    for name, what in (("feature_bound", "L2 norm of a row of X"), ("target_bound", "absolute y")):
        if getattr(release, name) is None:
            raise ValueError(
                f"{name} must be given when epsilon is finite: a bound on the {what}. Rows beyond "
                "it are scaled down. Choose it without looking at the data."
            )
        if not _SMALLEST_BOUND <= getattr(release, name) <= 1 / _SMALLEST_BOUND:
            raise ValueError(
                f"{name} must lie between {_SMALLEST_BOUND:g} and {1 / _SMALLEST_BOUND:g}; got "
                f"{getattr(release, name)!r}. Rescale the data."
            )
    if release.delta == 0:  # no scale of Gaussian noise gives pure differential privacy
        raise ValueError("delta must be above 0 for the Gaussian mechanism; got 0.")
    if sample_weight is not None:
        raise ValueError(
            "sample_weight is not supported when epsilon is finite: its effect on the sensitivity "
            "is undefined."
        )


def regression_events(prior, params):
    """Accounting events of a fit.

    They must not depend on the data, so we do not know the number of features. The ratio of the two
    sensitivities is largest for one feature under add/remove, and always the same under
    replacement. A release under replacement takes numbers of clients or rows as public, so without
    a unit it protects what the unit contributes.
    """
    if math.isinf(params.epsilon):
        return UNPROTECTED
    if prior.mean is not None:  # a known population: nothing is released
        return ()
    moments = RegressionMoments(
        1,
        params.feature_bound,
        params.target_bound,
        params.fit_intercept,
        params.relation,
        square=params.noise_variance is None,
        sizes=_private_sizes(params),
    )
    # Without a unit: it is gone, or only what it contributes is, where its number is public.
    without = "add_remove" if params.relation == "add_remove" else "zero_out"
    return gaussian_events(
        params.epsilon,
        params.delta,
        replace_one=moments.replace_one_sensitivity / moments.sensitivity,
        **{without: moments.add_remove_sensitivity / moments.sensitivity},
    )


def _private_sizes(params):
    """Whether the number of clients is protected: nothing may then depend on it."""
    return params.unit == "client" and params.relation == "add_remove"


def fit_private(table, prior, options, release, names):
    """ReleasedPopulation from one release, and the clients' posteriors around it.

    Parameters
    ----------
    table : RegressionTable
    prior : GaussianPrior
        Its covariance must be known, unless there is a single client and its number is public.
    options : Options
        `method`, `solver` and their parameters have no effect.
    release : ReleaseParameters
    names : pair of tuples of str
        Fitted attributes that are released, and those that are not.

    Returns
    -------
    MixedModelEstimates, PrivacyReport

    Raises
    ------
    ValueError
        If too little is known about the population.
    """
    mean, covariance = prior.known_mean(table.n_random), prior.known_covariance(table.n_random)
    # That a client is alone may be said only where the number of clients is public.
    alone = table.n_clients == 1 and not _private_sizes(release)
    if covariance is not None and alone and np.isinf(covariance).any():
        covariance = None
    _check_known(table, mean, covariance, options.noise_variance, release)
    if mean is not None:
        released = ReleasedPopulation(mean, np.zeros_like(covariance), options.noise_variance, True)
        report = _report_of_nothing(table, release, names)
    else:
        released, report = _released_population(
            table, covariance, options.noise_variance, release, names
        )
    if not released.trusted:
        warn_caller(_UNTRUSTED_NOISE, UserWarning)
    alone = alone and mean is None
    return _private_estimates(table, prior, covariance, options, released, alone), report


def _check_known(table, mean, covariance, noise, release):
    """Raise ValueError if too little, or too much, is known about the population."""
    private_sizes = _private_sizes(release)
    if (private_sizes or table.n_clients > 1) and (
        covariance is None or np.isinf(covariance).any()
    ):
        when = "relation='add_remove'" if private_sizes else "several clients"
        raise ValueError(
            f"with {when} and a finite epsilon the prior needs a finite covariance, as "
            "GaussianPrior(covariance=...): the covariance between clients is not among the "
            "released moments."
        )
    several_rows = table.n_clients > 1 and release.unit == "row"
    if several_rows and release.relation == "add_remove" and mean is None:
        raise ValueError(
            "unit='row' with relation='add_remove' is for one client; with several, the standard "
            "errors of the population need their numbers of rows, which only "
            "relation='replace_one' takes as public."
        )
    everything = covariance is not None and noise is not None
    if mean is not None and not (everything and table.n_random == table.columns.shape[1]):
        raise ValueError(
            "a prior with a known mean goes with a finite epsilon only if nothing has to be "
            "released: give its covariance and noise_variance too, with random='all', or no mean."
        )


def _released_population(table, covariance, noise, release, names):
    """Fitted population and privacy report."""
    moments, total, sizes = _messages(table, noise, release)
    # One mechanism for all moments at once: two would have to share the epsilon.
    rng, seeded = noise_generator(release.random_state)
    mechanism = GaussianMechanism(moments.sensitivity, release.epsilon, release.delta)
    noisy = moments.split(mechanism.privatize(total, rng), mechanism.noise_std)
    between = np.zeros((table.columns.shape[1],) * 2)
    if covariance is not None:
        between[: table.n_random, : table.n_random] = covariance
    order = _message_order(table)
    population = estimate_population(noisy, moments, sizes, between[np.ix_(order, order)], noise)
    report = _release_report(table, moments, mechanism, release, sizes, noisy, seeded, names)
    back = np.argsort(order)
    mean, covariance = population.mean[back], population.covariance[np.ix_(back, back)]
    return population._replace(mean=mean, covariance=covariance), report


def _message_order(table):
    """Positions (p,) of the columns, with the intercept (if there is one) first."""
    every = np.arange(table.columns.shape[1])
    if table.intercept is None:
        return every
    return np.concatenate([[table.intercept], np.delete(every, table.intercept)])


def _messages(table, noise, release):
    """Shape of the messages, their sum (length,), and public facts about the clients' sizes."""
    has_intercept = table.intercept is not None
    features = table.columns
    if has_intercept:
        features = np.delete(features, table.intercept, axis=1)
    counts = row_counts(table.codes, table.n_clients)
    by_client, public = release.unit == "client", release.relation == "replace_one"
    moments = RegressionMoments(
        features.shape[1],
        release.feature_bound,
        release.target_bound,
        has_intercept,
        release.relation,
        square=noise is None,
        sizes=_private_sizes(release),
    )
    # A client's message is the mean over its rows, so its bound does not grow with their number.
    if by_client:
        inverse = float(np.sum(1 / counts))
        total = moments.total(features, table.y, 1 / counts[table.codes], inverse)
        if not public:
            return moments, total, PublicSizes(math.inf, None, None)
        return moments, total, PublicSizes(len(counts), 1 / len(counts), inverse / len(counts))
    largest = len(table.y) if public else math.inf
    share = float(np.sum(counts**2) / len(table.y) ** 2)
    return moments, moments.total(features, table.y), PublicSizes(largest, share, 1.0)


def _private_estimates(table, prior, covariance, options, released, alone):
    """Estimates of the population and of the clients.

    A client that is `alone` keeps its own regression, as there is no other to borrow from.
    """
    q = table.n_random
    if covariance is None:
        covariance = np.full((q, q), np.nan)
    if alone:
        local = fit_without_pooling(rotated(table), prior, options, covariance)
        coefficients, posterior = local.coefficients, local.posterior
    else:
        coefficients, posterior = client_posteriors(table, released, covariance, options.n_jobs)
    return MixedModelEstimates(
        released.mean,
        released.covariance,
        coefficients,
        posterior,
        prior.with_values(released.mean[:q], covariance),
        covariance,
        released.noise,
        math.nan,  # the likelihood of the exact rows is not released
        1,
        True,
    )


def _release_report(table, moments, mechanism, release, sizes, noisy, seeded, names):
    """Report of one release; under add/remove it states no number of rows or clients."""
    public = release.relation == "replace_one"
    n_units = sizes.largest if public else max(noisy.weight, 1.0)
    other = "zero_out" if public else "replace_one"
    moved = moments.add_remove_sensitivity if public else moments.replace_one_sensitivity
    report = private_report(
        {
            **mechanism.facts(),
            "mechanism": "analytic Gaussian mechanism on the summed second moments of the "
            f"{release.unit}s, rounded to a grid",
        },
        n_clients=1,
        seeded=seeded,
        caveats=_delta_caveats(release, n_units),
        unit=release.unit,
        relation=release.relation,
        epsilon_under=((other, gdp_epsilon(moved / mechanism.noise_std, release.delta)),),
        released=names[0],
        not_released=names[1],
        assumptions=(
            f"feature_bound = {release.feature_bound:.4g}, target_bound = "
            f"{release.target_bound:.4g} and known variances are the user's, not the data's",
            "noise and sensitivity are those of the moments in units of the bounds",
        ),
    )
    # Rows under add/remove: one client, and its number of rows is not stated.
    n_clients = table.n_clients if public or release.unit == "row" else None
    return _with_public_numbers(report, public, n_clients=n_clients)


def _report_of_nothing(table, release, names):
    """Report of a fit whose population is known, under the unit and relation of the user."""
    public = release.relation == "replace_one"
    n_clients = table.n_clients if public else None
    report = PrivacyReport.of_known_population(names[0], names[1], n_clients)
    return _with_public_numbers(report, public, unit=release.unit, relation=release.relation)


def _with_public_numbers(report, public, **changes):
    """The changed report; its first assumption says that numbers of rows and clients are public."""
    assumptions = report.assumptions[0 if public else 1 :]
    return dataclasses.replace(report, assumptions=assumptions, **changes)


def _delta_caveats(release, n_units):
    """Caveat on a delta that would allow publishing a unit."""
    if release.delta <= 1 / n_units:
        return ()
    return (
        f"delta = {release.delta:.3g} is above one over the number of {release.unit}s (about "
        f"{1 / n_units:.3g}), which allows publishing a {release.unit} outright; choose a smaller "
        "delta.",
    )
