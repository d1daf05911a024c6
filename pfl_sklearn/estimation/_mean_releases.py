"""Releases of clients' means: one table, by trust and mechanism.

A new mechanism of GaussianMean needs its class in `pfl_sklearn.privacy`, its rows here (one for
each kind of trust, with noisy k-means if mixtures are to support it under central trust), and its
name in the docstring of GaussianMean.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from pfl_sklearn._clients import segment_sums
from pfl_sklearn.estimation._variance_components import ClientMeans, client_means
from pfl_sklearn.priors._prior import known_vector
from pfl_sklearn.privacy import (
    DiscreteGaussianMechanism,
    GaussianMechanism,
    PrivateClustering,
    PureEvent,
    StochasticQuantizer,
)
from pfl_sklearn.privacy._mechanisms._discrete_gaussian import check_opendp
from pfl_sklearn.privacy._spending import gaussian_events


def _check_clip_norm(params):
    """Refuse noise without the bound that its size follows from."""
    if params.clip_norm is None:
        raise ValueError(
            "clip_norm must be given when epsilon is finite: the L2 radius of a ball around "
            "center that holds the client means. Choose it without looking at the data."
        )


def _check_gaussian(params):
    """Refuse Gaussian noise without what its size follows from."""
    _check_clip_norm(params)
    if params.delta == 0:  # no Gaussian noise satisfies pure differential privacy
        raise ValueError("delta must be above 0 for the Gaussian mechanism; got 0.")


def _check_discrete(params):
    """Refuse what cannot be drawn, or not in `n_bits` even for a message of one coordinate."""
    _check_gaussian(params)
    check_opendp()
    _discrete_noise(params, 2.0, 1)  # more coordinates need more bits: this is the least


def _refuse_trust(params):
    """Refuse a mechanism that goes with the other kind of trust alone."""
    _check_gaussian(params)
    other = {"central": "local", "local": "central"}[params.trust]
    raise ValueError(
        f"mechanism={params.mechanism!r} needs trust={other!r}; got trust={params.trust!r}. Use "
        f"mechanism='gaussian' for {params.trust} trust."
    )


def _check_quantizer(params):
    """Refuse a promise that rounding cannot keep, and ask for what it needs."""
    if math.isfinite(params.epsilon):
        raise ValueError(
            f"mechanism='quantizer' claims no privacy and cannot go with epsilon="
            f"{params.epsilon!r}; use epsilon=inf, or mechanism='gaussian'."
        )
    for name in ("n_bits", "clip_norm", "noise_variance"):
        if getattr(params, name) is None:
            raise ValueError(f"{name} must be given for mechanism='quantizer'; got None.")


# Mechanisms, for a message of this sensitivity and number of coordinates.
def _gaussian_noise(params, sensitivity, width):
    return GaussianMechanism(sensitivity, params.epsilon, params.delta, params.trust)


def _discrete_noise(params, sensitivity, width):
    promise = params.epsilon, params.delta
    return DiscreteGaussianMechanism(width, sensitivity, *promise, params.n_bits)


def _gaussian_clustering(params, width, n_clients, squares):
    return PrivateClustering(params.epsilon, params.delta, width, n_clients, squares=squares)


def _quantizer(params, sensitivity, width):
    return StochasticQuantizer(params.n_bits, params.clip_norm)


def _gaussian_events(params, zero_out):
    """Events of Gaussian noise, which compose exactly."""
    return gaussian_events(params.epsilon, params.delta, zero_out=zero_out)


def _events_by_epsilon(params, zero_out):
    """Events of noise whose exact loss is not Gaussian: they compose by epsilon and delta."""
    return (PureEvent(params.epsilon, params.delta, "replace_one"),)


class MeanRelease(NamedTuple):
    """One way in which clients' means are released, and what that costs."""

    # Of the parameters: the sensitivity and the number of coordinates of a message follow.
    mechanism: Callable[[Any, float, int], Any]
    check: Callable[[Any], None] = _check_gaussian
    central: bool = False  # one sum is seen, with noise of a server; otherwise every message is
    # Noisy sums of k-means, at the cost of `events`; None: mixtures are refused.
    clustering: Callable[[Any, int, int, bool], Any] | None = None
    private: bool = True  # False: messages are only made short
    # Of the accounting, for the ratio of the sensitivity for a client that sends nothing.
    events: Callable[[Any, float | None], tuple[Any, ...]] = _gaussian_events
    follows_seed: bool = True  # False if the noise comes from the operating system at all times
    arithmetic: str = ""  # what the noise rests on, for the report; "": ideal floats


_DISCRETE = MeanRelease(
    _discrete_noise,
    _check_discrete,
    events=_events_by_epsilon,
    follows_seed=False,
    arithmetic="opendp draws the noise exactly, from entropy of the operating system",
)
_QUANTIZER = MeanRelease(_quantizer, _check_quantizer, private=False)
_RELEASES = {
    ("central", "gaussian"): MeanRelease(
        _gaussian_noise, central=True, clustering=_gaussian_clustering
    ),
    ("local", "gaussian"): MeanRelease(_gaussian_noise),
    ("central", "discrete_gaussian"): _DISCRETE._replace(check=_refuse_trust),
    ("local", "discrete_gaussian"): _DISCRETE,
    # Rounding protects nobody, so that it does not matter who is trusted.
    ("central", "quantizer"): _QUANTIZER,
    ("local", "quantizer"): _QUANTIZER,
}
MECHANISMS = {mechanism for _, mechanism in _RELEASES}


def selected_release(params):
    """MeanRelease of the parameters; None if clients' exact means are pooled."""
    release = _RELEASES[params.trust, params.mechanism]
    # Without a finite epsilon, noise has no purpose; a quantizer still shortens messages.
    return release if math.isfinite(params.epsilon) or not release.private else None


def check_release(release, params, sample_weight):
    """Refuse combinations of privacy parameters that no prior supports."""
    release.check(params)
    if sample_weight is not None:
        raise ValueError(
            "sample_weight is not supported when means are released (finite epsilon or "
            "quantizer): its effect on the sensitivity is not defined."
        )


def check_gaussian_prior(release, prior, params):
    """Refuse unknown variances of every output, which cannot be released."""
    # A message has one squared norm and one variance over all outputs, see ClientMoments.
    needed = prior.covariance is None or params.noise_variance is None
    if release is not None and prior.covariance_type == "diag" and needed:
        raise ValueError(
            "covariance_type='diag' with a finite epsilon or a quantizer needs a known "
            "covariance and noise_variance; only one variance for all outputs can be released."
        )


def noise_entries(release, params, *assumptions):
    """Entries of the report of a private release other than the facts of its mechanism."""
    return {
        "arithmetic": release.arithmetic,
        "assumptions": (
            f"clip_norm = {params.clip_norm:.4g}, center and known variances are the user's, not "
            "the data's",
            *assumptions,
            "noise and sensitivity are in units of the bounds",
        ),
    }


class BoundedMeans(NamedTuple):
    """Exact means of m clients, of which a release may see what its bounds leave."""

    table: ClientMeans  # without weights
    centre: Any  # (d,), of the bounds
    row_variances: Callable[[], Any]  # (m,), only read if a release has them


def bounded_means(rows, params):
    """BoundedMeans of rows. No arithmetic is shared between clients."""
    centre = known_vector("center", params.center, rows.y.shape[1])
    ids, codes = rows.clients
    with np.errstate(over="ignore", invalid="ignore"):
        table = client_means(rows.y, codes, len(ids), centre=centre)
    overflows = ~np.isfinite(table.means)
    if overflows.any():  # of the sums. A mean of NaN would count as 0, one of 1e308 is clipped.
        means = segment_sums(rows.y / table.n_rows[codes][:, None], codes, len(ids))
        table = table._replace(means=np.where(overflows, means, table.means))
    return BoundedMeans(table, centre, partial(row_variances, rows.y, codes, table))


def bounded_means_of_statistics(statistics, params):
    """BoundedMeans of ClientStatistics of rows without weights."""
    centre = known_vector("center", params.center, statistics.n_targets)
    _, means, within, _ = statistics._target_means()
    n_rows = statistics.n_samples_per_client
    table = ClientMeans(means, n_rows.astype(float), n_rows, within.sum(axis=0), 0.0)
    return BoundedMeans(table, centre, lambda: within.sum(axis=1) / np.maximum(n_rows - 1, 1))


def row_variances(y, codes, table):
    """Variance (m,) of each client's rows, summed over coordinates; 0 for a single row."""
    # Infinite or NaN where squares overflow; no arithmetic is shared between clients.
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.sum((y - table.means[codes]) ** 2, axis=1)
        within = segment_sums(squares, codes, len(table.means))
    return within / np.maximum(table.n_rows - 1, 1)
