"""Client means when only noisy or quantized releases of them may be pooled.

Every client leaves its own release out of the population mean that it shrinks towards: it knows
its own mean without noise. Arrays have clients first.
"""

from typing import NamedTuple

import numpy as np

from pfl_sklearn._clients import segment_sums
from pfl_sklearn.estimation._variance_components import ClientMeans, estimate_components
from pfl_sklearn.privacy import ClientMoments
from pfl_sklearn.privacy._mechanisms._gaussian import clip_l2


class ReleasedMeans(NamedTuple):
    """The population after the release, and the part of it that each client uses."""

    mean: np.ndarray  # (d,), population
    mean_variance: float  # of every coordinate of `mean`
    between: float
    noise: float
    others: np.ndarray  # (m, d), population mean without the client's own release
    others_variance: np.ndarray  # (m,), of every coordinate of `others`
    trusted: bool  # False if the noise on the released variances makes them useless


class Known(NamedTuple):
    """Parameters that the user gave; None is unknown."""

    mean: np.ndarray | None
    between: float | None
    noise: float | None


def client_moments(known, radius, trust, d):
    """Message that a client must send for what is unknown; something must be unknown.

    Under local trust the noise of every client counts, so the bound on the sampling variance must
    be tight: a ball that holds means in d coordinates with two standard deviations to spare has a
    radius of (sqrt(d) + 2) standard deviations.
    """
    if trust == "central":
        parts, bound = (known.mean is None, known.between is None, known.noise is None), 1.0
    else:
        parts = known.mean is None or known.between is None, False, known.noise is None
        bound = d / (np.sqrt(d) + 2) ** 2
    return ClientMoments(radius, *parts, bound)


def sampling_variances(y, codes, table):
    """Estimated variance of each client's mean, summed over coordinates; 0 for a single row."""
    within = segment_sums(np.sum((y - table.means[codes]) ** 2, axis=1), codes, len(table.means))
    return within / (table.n_rows * np.maximum(table.n_rows - 1, 1))


def means_from_noisy_sums(table, own_variances, moments, mechanism, centre, known, rng):
    """Population from one noisy sum of bounded messages, which all clients see."""
    m, d = table.means.shape
    messages = moments.messages(table.means - centre, own_variances)
    released = moments.split(mechanism.privatize(messages, rng), d)
    noise_std = mechanism.noise_std * moments.radius  # of the summed means, in the data's units
    square_std = noise_std * moments.radius
    noise, trusted = _released_noise(known, released, table, moments, square_std)
    sampling = noise / table.weights
    mean = known.mean
    if mean is None:
        mean = centre + released["mean"] / m
    between = known.between
    if between is None:
        around = released["square"][0] / m - np.sum((mean - centre) ** 2)
        if known.mean is None:  # the estimated mean has noise, and follows the clients
            around = (around + d * (noise_std / m) ** 2) * m / max(m - 1, 1)
        between = max(around / d - sampling.mean(), square_std / (m * d)) if m > 1 else np.nan
    if known.mean is not None:
        return _around_known_mean(table, mean, between, noise, trusted)
    clipped = clip_l2(table.means - centre, moments.radius)
    n_others = max(m - 1, 1)
    others = centre + (released["mean"] - clipped) / n_others
    spread = np.nan_to_num(between) + sampling
    total = spread.sum() + noise_std**2
    variance = (total - spread) / n_others**2
    return ReleasedMeans(
        mean, total / m**2, between, noise, *_alone(others, variance, table), trusted
    )


def means_from_noisy_reports(table, own_variances, moments, mechanism, centre, known, method, rng):
    """Population from one noisy message per client; all clients see all messages."""
    m, d = table.means.shape
    messages = moments.messages(table.means - centre, own_variances)
    released = moments.split(mechanism.privatize(messages, rng), d)
    summed = {name: part.sum(axis=0) for name, part in released.items()}
    summed_std = np.sqrt(m) * mechanism.noise_std * moments.sampling_bound * moments.radius**2
    noise, trusted = _released_noise(known, summed, table, moments, summed_std)
    extra = (mechanism.noise_std * moments.radius) ** 2
    if not moments.mean:
        return _around_known_mean(table, known.mean, known.between, noise, trusted)
    return _pooled_releases(table, centre + released["mean"], extra, known, noise, trusted, method)


def means_from_quantized_reports(table, quantizer, centre, known, method, rng):
    """Population from one quantized mean per client, without privacy."""
    reports = centre + quantizer.privatize(table.means - centre, rng)
    return _pooled_releases(
        table, reports, quantizer.noise_variance, known, known.noise, True, method
    )


def _pooled_releases(table, reports, extra, known, noise, trusted, method):
    """Population from unbiased reports (m, d) whose release added variance `extra`."""
    m, d = reports.shape
    reported = ClientMeans(reports, table.weights, np.ones(m, dtype=int), np.zeros(d), 0.0)
    found = estimate_components(reported, method, known.mean, known.between, noise, extra)
    between = found.between
    if known.between is None:
        between = max(between, extra * np.sqrt(2 / (m * d))) if m > 1 else np.nan
    if known.mean is not None:
        return _around_known_mean(table, known.mean, between, noise, trusted)
    weights = 1 / (np.nan_to_num(between) + noise / table.weights + extra)
    rest = weights.sum() - weights
    alone = np.maximum(rest, np.finfo(float).tiny)
    others = (weights @ reports - weights[:, None] * reports) / alone[:, None]
    mean = weights @ reports / weights.sum()
    return ReleasedMeans(
        mean, 1 / weights.sum(), between, noise, *_alone(others, 1 / alone, table), trusted
    )


def _released_noise(known, summed, table, moments, std):
    """Noise variance, and whether it exceeds the noise on its release.

    The sum of cut sampling variances is at most the number of clients that have one. If even that
    would not exceed the noise, a large value is due to chance.
    """
    if known.noise is not None:
        return known.noise, True
    told = table.n_rows >= 2
    largest = np.sum(told) * moments.sampling_bound * moments.radius**2
    total = min(summed["sampling"][0], largest)
    per_unit = table.means.shape[1] * np.sum(1 / table.n_rows[told])
    return max(total, 0.0) / per_unit, bool(total > 2 * std)


def _around_known_mean(table, mean, between, noise, trusted):
    m = len(table.means)
    others = np.broadcast_to(mean, table.means.shape)
    return ReleasedMeans(mean, 0.0, between, noise, others, np.zeros(m), trusted)


def _alone(others, variance, table):
    """The others' mean and variance; a single client has nothing to shrink towards."""
    if len(table.means) > 1:
        return others, variance
    return table.means, np.full(1, np.inf)
