"""Client means when only noisy or quantized releases of them may be pooled.

Every client leaves its own release out of the population mean that it shrinks towards: it knows
its own mean without noise. Arrays have clients first.
"""

from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.special import gammainc, gammaincc

from pfl_sklearn._clients import segment_sums
from pfl_sklearn._typing import Floats
from pfl_sklearn.estimation._variance_components import ClientMeans, estimate_components
from pfl_sklearn.privacy import ClientMoments
from pfl_sklearn.privacy._mechanisms._gaussian import clip_l2

# A noise variance above this share of its bound makes the bound suspicious: cut there, the sum of
# variances hardly grows with them, and a small error of it becomes a large one of the variance.
_TIGHT = 0.9


class ReleasedNoise(NamedTuple):
    """The noise variance of one coordinate, given or released."""

    variance: float
    trusted: bool = True  # False if the noise on the release makes it useless
    tight: bool = False  # True if it is close to the bound at which row variances were cut


class ReleasedMeans(NamedTuple):
    """Released estimates of the population, and those that leave out a client's own release."""

    mean: Floats  # (d,), population
    mean_variance: float  # of every coordinate of `mean`
    between: float
    noise: ReleasedNoise
    others: Floats  # (m, d), population mean without the client's own release
    others_variance: Floats  # (m,), of every coordinate of `others`

    def for_all(self, sends):
        """Release for all clients; those that sent nothing have nothing to leave out."""
        others = np.tile(self.mean, (len(sends), 1))
        variance = np.full(len(sends), float(self.mean_variance))
        others[sends], variance[sends] = self.others, self.others_variance
        return self._replace(others=others, others_variance=variance)


class Known(NamedTuple):
    """Parameters of the population that the user gave; None where they are to be estimated."""

    mean: Any
    between: Any
    noise: Any

    @property
    def is_complete(self):
        """Whether nothing is left to estimate, and nothing to release."""
        return all(value is not None for value in self)


def client_moments(known, params, central):
    """Message of a client that unknown parameters need; at least one must be unknown."""
    mean, square = known.mean is None, known.between is None
    if not central:
        # Each noisy mean is seen by itself, and their spread shows the variance between clients.
        mean, square = mean or square, False
    noise, bound = known.noise is None, params.noise_variance_bound
    return ClientMoments(params.clip_norm, mean, square, noise, bound)


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
    # A variance of few rows is noisy. Weights above 1 would raise the sensitivity of the sum; the
    # median lets half of the clients have all of it.
    return np.minimum(freedom / np.median(freedom[freedom > 0]), 1.0)


def sum_of_cut_variances(n_rows, weights, d):
    """Expected weighted sum of cut row variances, in units of their bound, as a function.

    Its argument is d times the noise variance, in the same units. A row variance over d coordinates
    is d times the noise variance times a chi-square over its degrees of freedom.
    """
    sizes, position = np.unique(n_rows, return_inverse=True)  # one integral for each size
    weight = np.bincount(position, weights)
    several = weight > 0  # clients of one row have no variance, and a chi-square of 0 degrees
    weight, freedom = weight[several], d * (sizes[several] - 1)

    def expected(share):
        # E min(V, 1) = E[V; V < 1] + P(V > 1). The first factor of a gamma density raises its
        # shape by one, so both are incomplete gamma functions.
        below = share * gammainc(freedom / 2 + 1, freedom / (2 * share))
        return weight @ (below + gammaincc(freedom / 2, freedom / (2 * share)))

    return expected


def undo_cut(total, expected, most):
    """Share of the bound at which the expected sum of cut variances, at most `most`, is `total`."""
    if total <= 0:  # which noise can do
        return 0.0
    if expected(1.0) <= total:  # the parameter of the user says that no variance is larger
        return 1.0
    # Cutting only lowers the sum, so the answer is at least total / most; .99 leaves room for
    # rounding, where nothing is cut and that is the answer itself.
    lowest = 0.99 * total / most
    return brentq(lambda share: expected(share) - total, lowest, 1.0, xtol=1e-14)


def means_from_noisy_sums(table, variances, moments, mechanism, centre, known, method, rng):
    """Estimate the population, by moments, from one noisy sum of bounded messages."""
    m, d = table.means.shape
    weights = variance_weights(table.n_rows) if moments.variance else 0.0
    messages = moments.messages(table.means - centre, variances, weights)
    released = moments.split(mechanism.privatize(messages, rng), d)
    noise_std = mechanism.noise_std * moments.radius  # of the summed means, in the data's units
    square_std = noise_std * moments.radius
    noise = _released_noise(
        known.noise, released.get("variance"), weights, mechanism.noise_std, table, moments
    )
    sampling = noise.variance / table.weights
    mean = centre + released["mean"] / m if known.mean is None else known.mean
    between = known.between
    if between is None:
        around = released["square"][0] / m - np.sum((mean - centre) ** 2)
        if known.mean is None:  # the estimated mean has noise, and follows the clients
            around = (around + d * (noise_std / m) ** 2) * m / max(m - 1, 1)
        # Shrinking too little does less harm than too much, so chance must not make it 0.
        between = max(around / d - sampling.mean(), square_std / (m * d)) if m > 1 else np.nan
    if known.mean is not None:
        return _around_known_mean(table, mean, between, noise)
    # What the server added of the client itself is its clipped mean, which the client knows.
    clipped = clip_l2(table.means - centre, moments.radius)
    n_others = max(m - 1, 1)
    others = centre + (released["mean"] - clipped) / n_others
    spread = np.nan_to_num(between) + sampling
    total = spread.sum() + noise_std**2
    variance = (total - spread) / n_others**2
    return ReleasedMeans(mean, total / m**2, between, noise, *_of_others(others, variance, table))


def means_from_noisy_reports(table, variances, moments, mechanism, centre, known, method, rng):
    """Estimate the population from one noisy message per client, all of which are seen."""
    d = table.means.shape[1]
    # Without weights: under local trust everybody weighs the noisy variances afterwards.
    messages = moments.messages(table.means - centre, variances)
    released = moments.split(mechanism.privatize(messages, rng), d)
    weights = variance_weights(table.n_rows) if moments.variance else 0.0
    summed = weights @ released["variance"] if moments.variance else None
    std = np.sqrt(mechanism.noise_variance) * np.linalg.norm(weights)
    noise = _released_noise(known.noise, summed, weights, std, table, moments)
    extra = mechanism.noise_variance * moments.radius**2
    if not moments.mean:
        return _around_known_mean(table, known.mean, known.between, noise)
    return pooled_releases(table, centre + released["mean"], extra, known, noise, method)


def pooled_releases(table, reports, extra, known, noise, method):
    """Estimate the population from unbiased reports (m, d) whose release added variance `extra`."""
    m, d = reports.shape
    # Rows of a report are not seen: one each, with no squares around their mean.
    reported = ClientMeans(reports, table.weights, np.ones(m, dtype=int), np.zeros(d), 0.0)
    components = estimate_components(
        reported, method, known.mean, known.between, noise.variance, extra
    )
    between = components.between
    if known.between is None:
        # One standard deviation of a variance that release noise alone would show, see above.
        between = max(between, extra * np.sqrt(2 / (m * d))) if m > 1 else np.nan
    if known.mean is not None:
        return _around_known_mean(table, known.mean, between, noise)
    weights = 1 / (np.nan_to_num(between) + noise.variance / table.weights + extra)
    # Nothing is left where there are no others; _of_others replaces these values.
    left = np.maximum(weights.sum() - weights, np.finfo(float).tiny)
    others = (weights @ reports - weights[:, None] * reports) / left[:, None]
    mean = weights @ reports / weights.sum()
    of_others = _of_others(others, 1 / left, table)
    return ReleasedMeans(mean, 1 / weights.sum(), between, noise, *of_others)


def _released_noise(known, summed, weights, std, table, moments):
    """Noise variance from the noisy sum of cut variances `summed` (1,), and whether it is of use.

    That noise has the standard deviation `std`, in units of the bound. The sum of cut variances is
    at most the sum of their weights. If even that would not exceed the noise, a large value is due
    to chance.
    """
    if known is not None:
        return ReleasedNoise(known)
    bound, d, most = moments.largest_variance, table.means.shape[1], np.sum(weights)
    total = min(summed[0] / bound, most)
    expected = sum_of_cut_variances(table.n_rows, weights, d)
    variance = undo_cut(total, expected, most) * bound / d
    # Two standard deviations: noise alone passes for a signal in one fit of 44.
    tight = total > expected(_TIGHT) + 2 * std
    return ReleasedNoise(variance, bool(total > 2 * std), bool(tight))


def _around_known_mean(table, mean, between, noise):
    """ReleasedMeans around a known mean, which has no error and holds no client's release."""
    others = np.broadcast_to(mean, table.means.shape)
    return ReleasedMeans(mean, 0.0, between, noise, others, np.zeros(len(table.means)))


def _of_others(others, variance, table):
    """Mean and variance of the others; a single client gets its own mean, infinitely uncertain."""
    if len(table.means) > 1:
        return others, variance
    return table.means, np.full(1, np.inf)
