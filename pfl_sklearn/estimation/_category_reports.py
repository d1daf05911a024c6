"""Private reports of counts, each client in one of k public categories.

Categories are the counts 0 to n, or cells of counts. The clients of a group have the same
probabilities of the categories under a prior. Probabilities are tables (k, H) for H priors, one
table for each group.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from pfl_sklearn._typing import Floats
from pfl_sklearn.estimation._count_estimates import describe_fit, with_prior
from pfl_sklearn.privacy import GaussianMechanism, SubsetSelection
from pfl_sklearn.privacy._accounting._events import PureEvent
from pfl_sklearn.privacy._spending import UNPROTECTED, gaussian_events

LEAST_PRIOR_WEIGHT = 1e-9  # relative to the largest; leaving priors out saves most of the work
_SUBSETS_AT_ONCE = 2048  # times up to 2,522 priors: 41 MB for each array
_EM_STEPS = 60  # reports blur the counts; to convergence, EM would fit their noise with spikes
# A replaced client leaves one category and enters another; one that contributes nothing only
# leaves.
HISTOGRAM_SENSITIVITY = 2**0.5
HISTOGRAM_ZERO_OUT_SENSITIVITY = 1.0


class CategoryReports(NamedTuple):
    """Released reports of the clients' categories, and their likelihood."""

    mechanism: Any
    messages: Any  # distinct subsets with their counts, by group; or a noisy histogram (k,)
    log_likelihood: Callable[[Any], Floats]  # of tables of probabilities: (H,)
    epsilon_under: tuple[Any, ...] = ()


def report_subsets(categories, groups, n_categories, params, rng):
    """CategoryReports of clients who each report a subset of the categories.

    `categories` (m,) are those of the clients, and `groups` (m,) their groups, both from 0.
    """
    mechanism = SubsetSelection(n_categories, params.epsilon)
    subsets = mechanism.privatize(categories, rng)
    # Equal subsets have equal likelihoods: with few categories there are far fewer than clients.
    reports = [_distinct_rows(subsets[groups == g]) for g in range(groups.max() + 1)]

    def log_likelihood(tables):
        return sum(
            counts[start : start + _SUBSETS_AT_ONCE]
            @ mechanism.log_likelihood(distinct[start : start + _SUBSETS_AT_ONCE], table)
            for (distinct, counts), table in zip(reports, tables, strict=True)
            for start in range(0, len(distinct), _SUBSETS_AT_ONCE)
        )

    return CategoryReports(mechanism, reports, log_likelihood)


def report_histogram(categories, groups, n_categories, params, rng):
    """CategoryReports of a trusted server that adds noise to the histogram of the categories."""
    mechanism = GaussianMechanism(HISTOGRAM_SENSITIVITY, params.epsilon, params.delta)
    # Empty categories are released, too: which are empty would reveal something of the data.
    histogram = np.bincount(categories, minlength=n_categories).astype(float)
    noisy, n_clients = mechanism.privatize(histogram, rng), np.bincount(groups)

    def log_likelihood(tables):
        # Approximate: the categories count as independent Gaussians.
        expected = sum(n * table for n, table in zip(n_clients, tables, strict=True))
        variance = expected + mechanism.noise_variance  # Poisson plus noise
        return -0.5 * np.sum((noisy[:, None] - expected) ** 2 / variance + np.log(variance), axis=0)

    zero_out = mechanism.under_zero_out(HISTOGRAM_ZERO_OUT_SENSITIVITY)
    return CategoryReports(mechanism, noisy, log_likelihood, zero_out)


def grid_weights_from_subsets(weights, reports, tables):
    """Weights (K,) of a grid prior after EM steps on the likelihood of reported subsets."""
    pairs = zip(reports.messages, tables, strict=True)
    likelihood = np.exp(
        np.concatenate(
            [reports.mechanism.log_likelihood(distinct, table) for (distinct, _), table in pairs]
        )
    )
    counts = np.concatenate([counts for _, counts in reports.messages])
    for _ in range(_EM_STEPS):
        weights *= (counts / (likelihood @ weights)) @ likelihood / counts.sum()
    return weights / weights.sum()


def plausible_weights(log_weights):
    """Normalized weights of the plausible priors, and the mask (H,) that selects them."""
    weights = np.exp(log_weights - log_weights.max())
    plausible = weights > LEAST_PRIOR_WEIGHT
    weights = weights[plausible]
    return weights / weights.sum(), plausible


def estimate_from_reports(table, average, grid, senders):
    """FittedCounts of the clients of a CountTable after private reports of `senders`.

    Every client combines its own exact counts with the released population: an average of
    conjugate priors, or the grid prior `grid` if it is not None.
    """
    mean_std = average.mean()[1]
    if grid is not None:
        return with_prior(table, grid, senders, type(average))._replace(mean_std=mean_std)
    posterior = average.posterior(table.successes, table.trials)
    return describe_fit(
        average.matched(), average.moments(), mean_std, table, posterior, type(average), exact=False
    )


def count_events(prior, params, zero_out):
    """Accounting events of a fit.

    `zero_out` is the sensitivity of a trusted server's release when a client contributes nothing,
    relative to that under replacement.
    """
    if np.isinf(params.epsilon):
        return UNPROTECTED
    if prior.is_known:  # clients send nothing
        return ()
    if params.trust == "local":  # randomized response is pure, whatever delta says
        return (PureEvent(float(params.epsilon), 0.0, "replace_one"),)
    return gaussian_events(params.epsilon, params.delta, zero_out=zero_out)


def check_central_delta(params):
    """Refuse Gaussian noise without a delta, before any data is touched."""
    if params.trust == "central" and params.delta == 0:
        raise ValueError("delta must be above 0 for trust='central' (Gaussian noise); got 0.")


def _distinct_rows(subsets):
    """Distinct rows of a boolean matrix (m, k) and how often each occurs."""
    # Rows sort faster as strings of bytes than element by element.
    packed = np.ascontiguousarray(np.packbits(subsets, axis=1))
    keys = packed.view(np.dtype((np.void, packed.shape[1]))).ravel()
    _, first, counts = np.unique(keys, return_index=True, return_counts=True)
    return subsets[first], counts
