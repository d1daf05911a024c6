"""Clients' means under a mixture prior, from exact or from released statistics."""

import math
from numbers import Integral

import numpy as np

from pfl_sklearn._columns import LARGEST
from pfl_sklearn.estimation._mean_estimates import FittedMeans
from pfl_sklearn.estimation._mean_releases import noise_entries
from pfl_sklearn.estimation._mixture_release import (
    ReleasedMixture,
    clipped_clients,
    fit_released,
    implausible,
)
from pfl_sklearn.estimation._printed._discrete_points import printed_points
from pfl_sklearn.estimation._variance_components import Population, check_noise_is_identified
from pfl_sklearn.priors import _mixture as mixture
from pfl_sklearn.priors._prior import known_vector
from pfl_sklearn.privacy._mechanisms._noise import noise_generator


def check_mixture_prior(release, prior, params):
    """Refuse parameters that do not go with a mixture prior, before any data is touched."""
    if params.participants is not None:
        raise ValueError(
            f"participants goes with GaussianPrior alone; got {type(prior).__name__}. Leave it out."
        )
    # Algorithm 3 (ICLR) has a given number of points. BIC compares fits of several numbers, each of
    # which would be a release of its own.
    needs_number = params.method == "printed" or (release is not None and release.central)
    if needs_number and not isinstance(prior.n_components, Integral):
        raise ValueError(
            "n_components='bic' does not go with method='printed', nor with a finite epsilon and "
            "trust='central'; give a number."
        )
    if release is not None:
        _check_released(release, prior, params)


def mixture_prior_events(release, prior, params):
    """Accounting events of a private fit; nothing is claimed for clients that come or go."""
    # A known mixture comes from the user, so that clients send nothing.
    return () if prior.is_known else release.events(params, None)


def mixture_from_means(reduced, sends, prior, params):
    """Estimate the mixture from exact client means, and every client's mean under it."""
    table = reduced(None)
    noise = _one_noise(params.noise_variance, table.means.shape[1])
    if noise is None:
        check_noise_is_identified(table)
        # From the rows within clients: a wrong number of components cannot bias it.
        noise = table.within.sum() / (table.degrees_of_freedom * table.means.shape[1])
    if len(table.means) == 1 and not prior.is_known:  # one mean shows no components
        return _single_client(table, prior, noise)
    sampling = noise / table.weights
    if params.method == "printed" and not prior.is_known:
        fitted = printed_points(table.means, sampling, prior)
    else:
        fitted = prior.fit_noisy(table.means, sampling)
    mean, covariance = fitted.moments()
    between = np.diag(covariance).copy()
    # Without any variance the weights are equal, as in the limit; `least` keeps 1 / total finite.
    total = np.maximum(between + sampling[:, None], np.finfo(float).tiny)
    least = total.min(axis=0)
    error = np.zeros_like(mean) if prior.is_known else least / np.sum(least / total, axis=0)
    of_means = fitted.log_marginal(table.means, sampling[:, None]).sum()
    log_likelihood = of_means + within_log_likelihood(table, noise)
    population = Population(mean, between, np.full_like(mean, noise), error, log_likelihood)
    # Errors of the estimated components are left out, as the docstring of GaussianMean says.
    means, variances, own_weights, shares = posteriors(fitted, table.means, sampling[:, None])
    return FittedMeans(
        fitted, population, table, means, variances, own_weights, responsibilities=shares
    )


def mixture_from_release(release, bounded, sends, prior, params):
    """FittedMeans of all clients under the released mixture; entries of the report.

    The entries are None if nothing had to be released.
    """
    table, centre = bounded.table, bounded.centre
    noise = _one_noise(params.noise_variance, len(centre))
    if prior.is_known:
        # Nothing is pooled: no mean is clipped, and no client has to keep its own.
        known = prior.with_mixture(*prior.known_mixture(len(centre)))
        mean = known.moments()[0]
        released = ReleasedMixture(known, known, mean, np.zeros_like(centre), True)
        return shrink_released(table, released, noise, np.zeros(len(table.means), bool)), None
    rng, _ = noise_generator(params.random_state)
    released, entries = fit_released(release, table, centre, prior, noise, params, rng)
    alone = clipped_clients(release, table, centre, params)
    alone |= implausible(released.working, table.means, noise / table.weights)
    if release.private:
        entries |= noise_entries(release, params)
    # A single client is its own population: components at its report would say nothing new.
    fitted = shrink_released(table, released, noise, alone | (len(table.means) == 1))
    return fitted, entries


def shrink_released(table, released, noise, alone):
    """Estimate every client's mean under released components, whose spread includes their errors.

    Clients in the mask `alone` (m,) keep their own means, as do those whose squares overflow.
    """
    sampling = noise / table.weights[:, None]
    with np.errstate(over="ignore", invalid="ignore"):
        means, variances, own_weights, shares = posteriors(released.working, table.means, sampling)
    # Components that do not help would only add bias: all clients keep their own means then. An
    # error for a mean whose square overflows would reveal that some client has one.
    alone = alone | (np.abs(table.means) > LARGEST).any(axis=1) | (not released.trusted)
    alone = alone[:, None]
    prior, mean = released.prior, released.mean
    between = np.diag(prior.moments()[1]).copy()
    return FittedMeans(
        prior,
        Population(mean, between, np.full_like(mean, noise), released.mean_variance),
        table,
        np.where(alone, table.means, means),
        np.where(alone, sampling, variances),
        np.where(alone, 1.0, own_weights),
        responsibilities=shares,
    )


def posteriors(prior, means, sampling):
    """Posterior means, variances and weights on own means (m, d); responsibilities (m, k)."""
    centres, covariances, weights = prior.known_mixture(means.shape[1])
    components = mixture.components_of(centres, covariances)
    shares = mixture.component_shares(components, weights, means, sampling)
    posterior = mixture.mixture_posterior(components, shares, means, sampling)
    return *posterior, mixture.own_shares(components, shares, sampling), shares


def within_log_likelihood(table, noise):
    """Log-likelihood of the rows given their clients' means."""
    if noise == 0:  # a density at its only point
        return math.inf
    d, dof = table.means.shape[1], table.degrees_of_freedom
    constant = dof * math.log(2 * math.pi * noise) + np.log(table.weights).sum()
    return -0.5 * (d * (constant - table.log_weights) + table.within.sum() / noise)


def _single_client(table, prior, noise):
    """Fit to a single client: it keeps its mean, and the population's spread is unknown."""
    k = 1 if prior.n_components == "bic" else int(prior.n_components)
    mean, d = table.means[0], table.means.shape[1]
    sampling = np.full((1, d), noise / table.weights[0])
    unknown = np.full((k, d, d), np.nan), np.full(k, np.nan)
    # All components at its mean, with weights and spreads of NaN: which one it is from is unknown.
    prior = prior.with_mixture(np.tile(mean, (k, 1)), *unknown)
    population = Population(mean, np.full(d, np.nan), np.full(d, noise), sampling[0])
    own_weights, shares = np.ones((1, d)), np.full((1, k), 1 / k)
    return FittedMeans(
        prior, population, table, table.means, sampling, own_weights, responsibilities=shares
    )


def _one_noise(noise_variance, d):
    """Noise variance that the user gave, as a number that all outputs share; None if unknown."""
    noise = known_vector("noise_variance", noise_variance, d, "finite and non-negative")
    if noise is not None and np.any(noise != noise[0]):
        raise ValueError(
            "noise_variance must be the same for all outputs with a mixture prior; got "
            f"{noise_variance!r}."
        )
    return None if noise is None else float(noise[0])


def _check_released(release, prior, params):
    """Refuse releases without a noise variance, or of components that are not spherical."""
    if release.central and release.clustering is None:
        raise ValueError(
            f"mechanism={params.mechanism!r} does not go with {type(prior).__name__} and "
            "trust='central'; use mechanism='gaussian'."
        )
    if params.noise_variance is None:
        raise ValueError(
            "noise_variance must be given when means are released under a mixture prior; got None."
        )
    if params.method == "printed":
        raise ValueError("method='printed' is for epsilon=inf without a quantizer.")
    if prior.is_known:  # nothing is left to release
        return
    if prior.means is not None:
        raise ValueError(
            "a mixture prior with means and without weights or covariances cannot be released; "
            "give all of it, or one number as covariances only."
        )
    if prior.covariances is None and prior.covariance_type != "spherical":
        raise ValueError(
            f"covariance_type={prior.covariance_type!r} cannot be released; give covariances, or "
            "take 'spherical'."
        )
