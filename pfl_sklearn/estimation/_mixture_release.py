"""Client means under a mixture prior, from noisy or quantized releases.

Under central trust, k-means and then EM run on noisy sums. Under local trust and with quantizers,
EM runs on the clients' reports, whose noise is known. Where a function says so, vectors are in
units of clip_norm around the centre.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from scipy.special import softmax
from scipy.stats import chi2
from sklearn.base import clone

from pfl_sklearn._typing import Floats
from pfl_sklearn._warnings import warn_caller
from pfl_sklearn.priors import GaussianMixturePrior
from pfl_sklearn.privacy._mechanisms._gaussian import clip_l2

_HARD_STEPS = 2  # k-means first: EM needs spreads, and starting points have none
_GAIN_IN_NOISE_STDS = 2.0  # noise alone passes for a gain in one fit of 44
_IMPLAUSIBLE = 1e-3  # share of clients that keep their own means under a mixture that holds
_LEAST_SPREAD = 1e-4  # of starts in a direction, in squared units of the ball's radius
_GRADIENTS_AT_ONCE = 1 << 16  # keeps their gradients at a few MB for each component
_LEAST_RELATIVE = 1e-12  # smallest divisor, relative to numbers near 1
_USELESS = (
    "The released clusters do not help: in the noisy check they reduce the clients' error by less "
    "than twice the noise, so every client keeps its own mean. Give a larger epsilon, a smaller "
    "clip_norm or another number of components."
)
_NOT_SEEN = (
    "The reports do not show the groups: by BIC one Gaussian explains them as well, so every "
    "client keeps its own mean. Give a larger epsilon, a smaller clip_norm, or prior='gaussian'."
)


class ReleasedMixture(NamedTuple):
    """Released mixture, and what a client combines its own mean with."""

    prior: Any
    working: GaussianMixturePrior  # the prior with the uncertainty of the release
    mean: Floats  # (d,), population mean
    mean_variance: Floats  # (d,), of the population mean
    trusted: bool


class Clusters(NamedTuple):
    """Components in units of clip_norm; `noise` is the variance of a centre's coordinates."""

    centres: Floats  # (k, d)
    weights: Floats  # (k,)
    spread: Floats  # (k,)
    noise: Floats  # (k,)


def fit_released(release, table, centre, prior, noise, params, rng):
    """Release the clients' means, and fit the mixture to them; with entries of the report."""
    if release.central:
        return central_mixture(release, table, centre, prior, noise, params, rng)
    deviations, unit = table.means - centre, 1.0
    if release.private:
        # In units of the radius, where two clients are at most 2 apart.
        unit = params.clip_norm
        deviations = clip_l2(deviations, unit) / unit
    mechanism = release.mechanism(params, 2.0, deviations.shape[1])
    reports = centre + unit * mechanism.privatize(deviations, rng)
    extra = mechanism.noise_variance * unit**2
    variances = noise / table.weights + extra
    entries = {"facts": mechanism.facts()}
    if len(reports) == 1:
        return _one_report(reports[0], variances[0], prior), entries
    return reported_mixture(reports, variances, extra, prior), entries


def clipped_clients(release, table, centre, params):
    """Mask (m,) of clients whose mean was moved to fit into the bounds of a release."""
    deviations = table.means - centre
    if not release.private:  # a quantizer has a range for each coordinate
        # NaN compares as False, and counts as clipped.
        return ~(np.abs(deviations) <= params.clip_norm).all(axis=1)
    return np.any(clip_l2(deviations, params.clip_norm) != deviations, axis=1)


def implausible(working, means, sampling):
    """Mask (m,) of clients too far from every component to have come from one of them."""
    # The mean of a client of component l is normal around the released centre, with variance t_l^2
    # + s_i^2 + (noise of the centre) in every coordinate. The squared distance over that is
    # chi-square with d degrees of freedom; it exceeds the limit with probability 1e-3.
    centres, covariances, _ = working.known_mixture()
    spread = covariances[:, 0, 0]
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        nearest = np.min(
            [
                np.sum((means - centre) ** 2, axis=1) / (variance + sampling)
                for centre, variance in zip(centres, spread, strict=True)
            ],
            axis=0,
        )
    return ~(nearest <= _largest_distance(means.shape[1]))  # NaN and infinity are implausible


def _largest_distance(d):
    """Largest squared distance from a component, over its variances, of a plausible client."""
    return chi2.isf(_IMPLAUSIBLE, d)


def _one_report(report, variance, prior):
    """ReleasedMixture of a single client: its report is the mean, and spreads are unknown."""
    k, d = 1 if prior.n_components == "bic" else prior.n_components, len(report)
    # All components at the report: which of them a single client is from cannot be known.
    means, none = np.tile(report, (k, 1)), np.full(k, np.nan)
    unknown = prior.with_mixture(means, np.full((k, d, d), np.nan), none)
    working = _spherical(means, np.full(k, variance), np.full(k, 1 / k))
    return ReleasedMixture(unknown, working, report, np.full(d, variance), True)


def central_mixture(release, table, centre, prior, noise, params, rng):
    """Fit the mixture to noisy sums of bounded vectors, and check whether it helps the clients."""
    radius = params.clip_norm
    # Everything up to `working` is in units of the radius, in which sensitivities are constants.
    vectors = clip_l2(table.means - centre, radius) / radius
    sampling = noise / table.weights / radius**2
    spread = None if prior.covariances is None else float(prior.covariances) / radius**2
    clustering = release.clustering(params, vectors.shape[1], len(vectors), spread is None)
    clusters = best_start(clustering, vectors, sampling, prior.n_components, rng)
    for t in range(clustering.n_steps):
        clusters = take_step(clustering, t, vectors, sampling, clusters, spread, rng)
    order = np.lexsort((clusters.centres[:, 0], -clusters.weights))  # the heaviest first
    clusters = Clusters(*(values[order] for values in clusters))
    # The check of the gain is the last release: it must judge the components that clients will use.
    variances = radius**2 * (clusters.spread + clusters.noise)
    working = _spherical(centre + radius * clusters.centres, variances, clusters.weights)
    trusted = _helps(clustering, working, table.means, sampling * radius**2, rng)
    if not trusted:
        warn_caller(_USELESS, UserWarning)
    fitted = with_components(prior, working.means, clusters.spread * radius**2, clusters.weights)
    mean, covariance = fitted.moments()
    # The mean is a ratio of sums and counts (delta method), both of them noisy.
    noise_variance = clustering.mechanism("last").noise_variance * prior.n_components
    noise_variance = noise_variance * (radius**2 + (mean - centre) ** 2) / len(vectors) ** 2
    of_clients = np.diag(covariance) + np.mean(sampling) * radius**2
    error = noise_variance + of_clients / len(vectors)
    entries = {"facts": clustering.facts(), "rounds": len(clustering.parts)}
    return ReleasedMixture(fitted, working, mean, error, trusted), entries


def best_start(clustering, vectors, sampling, k, rng):
    """Choose the best, by noisy scores, of random starts in the leading directions."""
    # The directions and their lengths come from the released moments.
    released = clustering.mechanism("moments").privatize(clustering.moments(vectors), rng)
    mean, covariance = clustering.split_moments(released)
    values, directions = np.linalg.eigh(covariance)
    width = min(max(k - 1, 1), len(mean))  # k centres span a space of k - 1 dimensions
    # What exceeds the sampling variance is spread between clients. Noise may leave less than none.
    lengths = np.sqrt(np.maximum(values[-width:] - sampling.mean(), _LEAST_SPREAD))
    candidates = []
    for _ in range(clustering.n_candidates):
        # Random places need no data: only their scores cost privacy.
        places = rng.standard_normal((k, width))
        places -= places.mean(axis=0)
        places /= np.sqrt(np.mean(places**2, axis=0)) + _LEAST_RELATIVE
        # In the ball all scores are bounded.
        candidates.append(clip_l2(mean + (places * lengths) @ directions[:, -width:].T, 1.0))
    scores = clustering.mechanism("scores").privatize(clustering.scores(vectors, candidates), rng)
    even = np.full(k, 1 / k)
    return Clusters(candidates[int(np.argmin(scores))], even, np.zeros(k), np.zeros(k))


def take_step(clustering, t, vectors, sampling, clusters, spread, rng):
    """Update the clusters by noisy sums over clients: k-means at first, then EM."""
    # A cluster whose count does not exceed the noise stays where it is.
    part, k = clustering.step_name(t), len(clusters.weights)
    shares = cluster_shares(vectors, sampling, clusters, hard=t < _HARD_STEPS)
    mechanism = clustering.mechanism(part)
    released = mechanism.privatize(clustering.step(vectors, shares), rng)
    sums, counts, squares = clustering.split_step(released, k)
    heavy = np.maximum(counts, mechanism.noise_std)  # a noisy count may be 0 or below
    # Of three deviations or fewer: sums over counts would be noise over noise.
    centres = np.where(
        (counts > 3 * mechanism.noise_std)[:, None], sums / heavy[:, None], clusters.centres
    )
    noise = (mechanism.noise_std / heavy) ** 2
    if squares is None:
        spread = np.full(k, spread)
    else:
        d = vectors.shape[1]
        # The centre is squared with its noise, whose variance would lower the spread.
        around = squares / heavy - np.sum(centres**2, axis=1) + d * noise
        floor = clustering.square_noise(part) / (heavy * d)
        # At least one deviation of its noise: a spread of 0 by chance would be overconfident.
        spread = np.clip(around / d - sampling.mean(), floor, 1.0)
    return Clusters(clip_l2(centres, 1.0), heavy / heavy.sum(), spread, noise)


def reported_mixture(reports, variances, extra, prior):
    """Fit the mixture to unbiased reports (m, d) of variances (m,), `extra` of the release."""
    # The estimated spread of a component is at least the standard deviation of its estimate without
    # any spread. The clients' working mixture allows for more: the spread that the reports show,
    # plus one standard deviation of it, also where spreads or points are given.
    fitted = prior.fit_noisy(reports, variances)
    means, covariances, weights = fitted.known_mixture()
    d = means.shape[1]
    spread = np.einsum("kdd->k", covariances) / d
    if prior.covariances is None:
        floor = extra * np.sqrt(2 / np.maximum(len(reports) * weights * d, 1.0))
        spread = np.maximum(spread, floor)
    errors = mean_errors(fitted, reports, variances)
    # A client that is pulled to a component that does not fit pays more than one that is not.
    allowed = np.maximum(spread, shown_spread(fitted, reports, variances))
    working = _spherical(means, allowed + errors, weights)
    total = np.diag(fitted.moments()[1]) + variances[:, None]
    # d + 1: the mean of the one Gaussian and its spread.
    sizes = clone(prior).set_params(n_components=len(weights)).n_parameters(d), d + 1
    trusted = shows_groups(fitted, reports, variances, sizes)
    if not trusted:
        warn_caller(_NOT_SEEN, UserWarning)
    released = with_components(prior, means, spread, weights)
    error = 1 / np.sum(1 / total, axis=0)
    return ReleasedMixture(released, working, released.moments()[0], error, trusted)


def shown_spread(fitted, reports, variances):
    """Common spread of the reports around their components, minus the noise of the reports."""
    # It is at least the standard deviation of the estimate without any spread.
    m, d = reports.shape
    means, _, _ = fitted.known_mixture()
    shares = fitted.responsibilities(reports, variances[:, None])
    squares = sum(
        share @ np.sum((reports - mean) ** 2, axis=1)
        for share, mean in zip(shares.T, means, strict=True)
    )
    noise = variances.mean()
    return max(squares / (m * d) - noise, noise * math.sqrt(2 / (m * d)))


def shows_groups(fitted, reports, variances, sizes):
    """Whether BIC prefers the mixture to one spherical Gaussian, or has no preference.

    `sizes` holds the numbers of parameters of the two.
    """
    one = GaussianMixturePrior(1).fit_noisy(reports, variances)
    first, second = (
        size * np.log(len(reports)) - 2 * model.log_marginal(reports, variances[:, None]).sum()
        for size, model in zip(sizes, (fitted, one), strict=True)
    )
    # A mixture of one component is the Gaussian itself; rounding must not reject it.
    return bool(first <= second + _LEAST_RELATIVE * abs(second))


def mean_errors(fitted, reports, variances):
    """Sampling variances (k,) of the components' means, averaged over coordinates."""
    # They come from the information in the clients' gradients by means and weights.
    means, covariances, weights = fitted.known_mixture()
    k, d = means.shape
    spread = np.einsum("kdd->k", covariances) / d
    information = np.zeros((k * d + k - 1,) * 2)
    for start in range(0, len(reports), _GRADIENTS_AT_ONCE):
        block = slice(start, start + _GRADIENTS_AT_ONCE)
        part, noise = reports[block], variances[block]
        shares = fitted.responsibilities(part, noise[:, None])
        pull = (part[:, None, :] - means) / (spread + noise[:, None])[:, :, None]
        by_mean = (shares[:, :, None] * pull).reshape(len(part), -1)
        # Weights sum to 1, so the last one is no parameter.
        ratio = shares / np.maximum(weights, _LEAST_RELATIVE)
        gradient = np.hstack([by_mean, ratio[:, :-1] - ratio[:, -1:]])
        information += gradient.T @ gradient
    # Components that share all their clients leave directions without information.
    values, vectors = np.linalg.eigh(information)
    inverse = (vectors / np.maximum(values, _LEAST_RELATIVE * values.max())) @ vectors.T
    return np.diag(inverse)[: k * d].reshape(k, d).mean(axis=1)


def with_components(prior, means, spread, weights):
    """The prior with these components; the spreads (k,) apply unless covariances were given."""
    k, d = means.shape
    covariances = spread[:, None, None] * np.eye(d)
    if prior.covariances is not None:
        covariances = np.full((k, 1, 1), float(prior.covariances)) * np.eye(d)
    return prior.with_mixture(means, covariances, weights)


def _helps(clustering, working, means, sampling, rng):
    """Whether the clients' error falls, by a noisy sum of unbiased estimates for each client."""
    # A client that will keep its own mean counts as if it were at the limit of plausible distances;
    # otherwise that limit would bias the check.
    d = means.shape[1]
    with np.errstate(over="ignore", invalid="ignore"):
        posterior, variance = working.posterior(means, sampling[:, None])
        # Stein's identity: 2 d s^2 less this is an unbiased estimate of what a client gains.
        shift = np.sum((means - posterior) ** 2, axis=1) + 2 * variance.sum(axis=1)
        none = np.full(len(means), np.inf)
        gains = 2 - np.divide(shift, d * sampling, out=none, where=sampling > 0)
    alone = implausible(working, means, sampling)
    gains = np.where(alone, np.maximum(gains, 2 - _largest_distance(d) / d), gains)
    # Gains are in units of the sampling variance; a client of few rows gains most in the data's.
    importance = sampling / max(sampling.max(), np.finfo(float).tiny)
    released = clustering.mechanism("gain").privatize(clustering.gain(gains, importance), rng)
    gain, noise_std = clustering.split_gain(released)
    return bool(gain > _GAIN_IN_NOISE_STDS * noise_std)


def cluster_shares(vectors, sampling, clusters, hard):
    """Responsibilities (m, k) of the clusters for the clients."""
    squares = np.stack(
        [np.sum((vectors - centre) ** 2, axis=1) for centre in clusters.centres], axis=1
    )
    if hard:  # nearest centres need no variances, which are not known yet
        return np.eye(len(clusters.weights))[np.argmin(squares, axis=1)]
    total = np.maximum(clusters.spread + clusters.noise + sampling[:, None], _LEAST_RELATIVE)
    scale = 0.5 * vectors.shape[1]
    return softmax(np.log(clusters.weights) - squares / (2 * total) - scale * np.log(total), axis=1)


def _spherical(means, variances, weights):
    """Known mixture with one variance (k,) for each component."""
    k, d = means.shape
    return GaussianMixturePrior(
        k, means=means, covariances=variances[:, None, None] * np.eye(d), weights=weights
    )
