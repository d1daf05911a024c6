"""Client means when only noisy or quantized releases of them may be pooled.

Every client leaves its own release out of the population mean that it shrinks towards: it knows
its own mean without noise. Arrays have clients first.
"""

from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.special import gammainc, gammaincc

from pfl_sklearn._clients import segment_sums
from pfl_sklearn.estimation._variance_components import ClientMeans, estimate_components
from pfl_sklearn.privacy import ClientMoments
from pfl_sklearn.privacy._mechanisms._gaussian import clip_l2

_TIGHT = 0.9  # a noise variance above this share of its bound makes the bound suspicious


class ReleasedNoise(NamedTuple):
    """The noise variance of one coordinate, given or released."""

    variance: float
    trusted: bool = True  # False if the noise on the release makes it useless
    tight: bool = False  # True if it is close to the bound at which row variances were cut


class ReleasedMeans(NamedTuple):
    """The population after the release, and the part of it that each client uses."""

    mean: np.ndarray  # (d,), population
    mean_variance: float  # of every coordinate of `mean`
    between: float
    noise: ReleasedNoise
    others: np.ndarray  # (m, d), population mean without the client's own release
    others_variance: np.ndarray  # (m,), of every coordinate of `others`

    def for_all(self, sends):
        """The same for all clients, of whom those that sent nothing have nothing to leave out."""
        others = np.tile(self.mean, (len(sends), 1))
        variance = np.full(len(sends), float(self.mean_variance))
        others[sends], variance[sends] = self.others, self.others_variance
        return self._replace(others=others, others_variance=variance)


class Known(NamedTuple):
    """Parameters that the user gave; None is unknown."""

    mean: np.ndarray | None
    between: float | None
    noise: float | None


def client_moments(known, radius, noise_bound, trust):
    """Message that a client must send for what is unknown; something must be unknown."""
    if trust == "central":
        parts = known.mean is None, known.between is None, known.noise is None
    else:
        parts = known.mean is None or known.between is None, False, known.noise is None
    return ClientMoments(radius, *parts, noise_bound)


def row_variances(y, codes, table):
    """Variance (m,) of each client's rows, summed over coordinates; 0 for a single row.

    Infinite or NaN where squares overflow; no arithmetic is shared between clients.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.sum((y - table.means[codes]) ** 2, axis=1)
        within = segment_sums(squares, codes, len(table.means))
    return within / np.maximum(table.n_rows - 1, 1)


def variance_weights(n_rows):
    """Weights (m,) of row variances in their sum: 0 for one row, 1 from the median number on.

    They depend on the numbers of rows alone, which are public.
    """
    freedom = n_rows - 1
    return np.minimum(freedom / np.median(freedom[freedom > 0]), 1.0)


def sum_of_cut_variances(n_rows, weights, d):
    """Expected weighted sum of cut row variances, in units of their bound, as a function.

    Its argument is d times the noise variance, in the same units. A row variance over d coordinates
    is d times the noise variance times a chi-square over its degrees of freedom.
    """
    sizes, position = np.unique(n_rows, return_inverse=True)
    weight = np.bincount(position, weights)
    told = weight > 0
    weight, freedom = weight[told], d * (sizes[told] - 1)

    def expected(share):
        uncut = share * gammainc(freedom / 2 + 1, freedom / (2 * share))
        return weight @ (uncut + gammaincc(freedom / 2, freedom / (2 * share)))

    return expected


def undo_cut(total, expected, most):
    """Argument in [0, 1] at which the expected sum of cut variances, at most `most`, is `total`."""
    if total <= 0:
        return 0.0
    if expected(1.0) <= total:
        return 1.0
    lowest = 0.99 * total / most  # cutting only lowers the sum
    return brentq(lambda share: expected(share) - total, lowest, 1.0, xtol=1e-14)


def means_from_noisy_sums(table, variances, moments, mechanism, centre, known, rng):
    """Population from one noisy sum of bounded messages, which all clients see."""
    m, d = table.means.shape
    weights = variance_weights(table.n_rows) if moments.variance else 0.0
    messages = moments.messages(table.means - centre, variances, weights)
    released = moments.split(mechanism.privatize(messages, rng), d)
    noise_std = mechanism.noise_std * moments.radius  # of the summed means, in the data's units
    square_std = noise_std * moments.radius
    noise = _released_noise(known, released, weights, mechanism.noise_std, table, moments)
    sampling = noise.variance / table.weights
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
        return _around_known_mean(table, mean, between, noise)
    clipped = clip_l2(table.means - centre, moments.radius)
    n_others = max(m - 1, 1)
    others = centre + (released["mean"] - clipped) / n_others
    spread = np.nan_to_num(between) + sampling
    total = spread.sum() + noise_std**2
    variance = (total - spread) / n_others**2
    return ReleasedMeans(mean, total / m**2, between, noise, *_alone(others, variance, table))


def means_from_noisy_reports(table, variances, moments, mechanism, centre, known, method, rng):
    """Population from one noisy message per client; all clients see all messages."""
    d = table.means.shape[1]
    messages = moments.messages(table.means - centre, variances)
    released = moments.split(mechanism.privatize(messages, rng), d)
    weights = variance_weights(table.n_rows) if moments.variance else 0.0
    summed = {name: weights @ part for name, part in released.items() if name == "variance"}
    std = np.sqrt(mechanism.noise_variance) * np.linalg.norm(weights)
    noise = _released_noise(known, summed, weights, std, table, moments)
    extra = mechanism.noise_variance * moments.radius**2
    if not moments.mean:
        return _around_known_mean(table, known.mean, known.between, noise)
    return _pooled_releases(table, centre + released["mean"], extra, known, noise, method)


def means_from_quantized_reports(table, quantizer, centre, known, method, rng):
    """Population from one quantized mean per client, without privacy."""
    reports = centre + quantizer.privatize(table.means - centre, rng)
    noise = ReleasedNoise(known.noise)
    return _pooled_releases(table, reports, quantizer.noise_variance, known, noise, method)


def _pooled_releases(table, reports, extra, known, noise, method):
    """Population from unbiased reports (m, d) whose release added variance `extra`."""
    m, d = reports.shape
    reported = ClientMeans(reports, table.weights, np.ones(m, dtype=int), np.zeros(d), 0.0)
    found = estimate_components(reported, method, known.mean, known.between, noise.variance, extra)
    between = found.between
    if known.between is None:
        between = max(between, extra * np.sqrt(2 / (m * d))) if m > 1 else np.nan
    if known.mean is not None:
        return _around_known_mean(table, known.mean, between, noise)
    weights = 1 / (np.nan_to_num(between) + noise.variance / table.weights + extra)
    rest = weights.sum() - weights
    alone = np.maximum(rest, np.finfo(float).tiny)
    others = (weights @ reports - weights[:, None] * reports) / alone[:, None]
    mean = weights @ reports / weights.sum()
    return ReleasedMeans(mean, 1 / weights.sum(), between, noise, *_alone(others, 1 / alone, table))


def _released_noise(known, summed, weights, std, table, moments):
    """Noise variance, and whether its release exceeds the noise on it, `std` in units of the bound.

    The sum of cut variances is at most the sum of their weights. If even that would not exceed the
    noise, a large value is due to chance.
    """
    if known.noise is not None:
        return ReleasedNoise(known.noise)
    bound, d, most = moments.largest_variance, table.means.shape[1], np.sum(weights)
    total = min(summed["variance"][0] / bound, most)
    expected = sum_of_cut_variances(table.n_rows, weights, d)
    variance = undo_cut(total, expected, most) * bound / d
    tight = total > expected(_TIGHT) + 2 * std
    return ReleasedNoise(variance, bool(total > 2 * std), bool(tight))


def _around_known_mean(table, mean, between, noise):
    m = len(table.means)
    others = np.broadcast_to(mean, table.means.shape)
    return ReleasedMeans(mean, 0.0, between, noise, others, np.zeros(m))


def _alone(others, variance, table):
    """The others' mean and variance; a single client has nothing to shrink towards."""
    if len(table.means) > 1:
        return others, variance
    return table.means, np.full(1, np.inf)
