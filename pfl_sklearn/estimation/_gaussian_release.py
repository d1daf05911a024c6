"""Client means under a Gaussian prior, from noisy or quantized releases.

Every client leaves its own release out of the population mean that it shrinks towards, because it
knows its own mean without noise. Arrays have clients first.
"""

from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.special import gammainc, gammaincc

from pfl_sklearn._client_means import participation_assumption
from pfl_sklearn._typing import Floats
from pfl_sklearn._warnings import warn_caller
from pfl_sklearn.estimation._mean_estimates import FittedMeans, given_population, shrink_towards
from pfl_sklearn.estimation._mean_releases import noise_entries
from pfl_sklearn.estimation._variance_components import (
    ClientMeans,
    Population,
    check_noise_is_identified,
    estimate_components,
)
from pfl_sklearn.privacy import ClientMoments
from pfl_sklearn.privacy._mechanisms._gaussian import clip_l2
from pfl_sklearn.privacy._mechanisms._noise import noise_generator

# A noise variance above this share of its bound makes the bound suspicious: cut there, the sum of
# variances hardly grows with them, and a small error of it becomes a large one of the variance.
_TIGHT = 0.9
# Rounding has its largest variance halfway between levels. We subtract that from the spread of the
# reports, so rounding that may add more than this share of the sampling variance biases the rest.
_COARSEST_ROUNDING = 0.1
_TOO_NOISY = (
    "The released noise variance is too noisy to use, so every client keeps its own mean. Give "
    "noise_variance, a smaller noise_variance_bound (now {bound:.4g}; without one it is clip_norm "
    "squared, and a center close to the clients allows a smaller clip_norm), or a larger epsilon."
)
_TOO_TIGHT = (
    "The released noise variance, {variance:.4g} summed over outputs, is above 90 % of its bound "
    "{bound:.4g}. The bound may be too small, and clients then shrink too little. Give a larger "
    "noise_variance_bound."
)


class ReleasedMeans(NamedTuple):
    """Released estimates of the population, and those that leave out a client's own release."""

    mean: Floats  # (d,), population
    mean_variance: float  # of every coordinate of `mean`
    between: float
    noise: float  # variance of a row around its client's mean
    noise_is_useful: bool  # False if the noise on a released `noise` is as large as itself
    others: Floats  # (m, d), population mean without the client's own release
    others_variance: Floats  # (m,), of every coordinate of `others`

    def for_all(self, sends):
        """Release for all clients; those that sent nothing have nothing to leave out."""
        others = np.tile(self.mean, (len(sends), 1))
        variance = np.full(len(sends), float(self.mean_variance))
        others[sends], variance[sends] = self.others, self.others_variance
        return self._replace(others=others, others_variance=variance)


def gaussian_prior_events(release, prior, params):
    """Accounting events of a private fit."""
    known = Population(prior.mean, prior.covariance, params.noise_variance)
    if known.is_known:  # clients send nothing
        return ()
    moments = client_moments(known, params, release.central)
    # A message of zero is nearer to any other than two messages are to each other. Under local
    # trust the message itself is seen, and a client that sends none shows.
    ratio = moments.zero_out_sensitivity / moments.sensitivity
    return release.events(params, ratio if release.central else None)


def gaussian_from_release(release, bounded, sends, prior, params):
    """FittedMeans of all clients, shrunk towards the released population; entries of the report.

    The entries are None if nothing had to be released.
    """
    table, centre = bounded.table, bounded.centre
    known = given_population(prior, params.noise_variance, len(centre))
    if release.private and known.is_known:
        # With nothing to estimate nothing is sent, so every output may have its own variances.
        return shrink_towards(known, table, sends, prior), None
    known = _with_shared_variances(known)
    senders = table if sends.all() else table.of_clients(sends)
    if release.private:
        variances = bounded.row_variances()
        released, entries = _from_noisy_messages(
            release, senders, variances, sends, centre, params, known
        )
    else:
        variances = None  # a quantizer needs a known noise variance
        released, entries = _from_quantized_means(release, senders, centre, params, known)
    with np.errstate(over="ignore", invalid="ignore"):  # of clients whose own means are huge
        return _shrink_releases(table, released.for_all(sends), prior, variances), entries


def _with_shared_variances(known):
    """Known parameters with one variance for all outputs, as releases need them."""
    # An infinite variance asks for no pooling, and a release for it would cost privacy in vain.
    if known.between is not None and np.isinf(known.between).any():
        raise ValueError("covariance must be finite when means are released; got infinity.")
    for name, values in (("covariance", known.between), ("noise_variance", known.noise)):
        if values is not None and np.any(values != values[0]):
            raise ValueError(
                f"{name} must be the same for all outputs when means are released; got {values}."
            )
    return known.outputs(slice(None))


def _from_noisy_messages(release, table, variances, sends, centre, params, known):
    """Estimate the population from noisy messages of the clients; with entries of the report."""
    moments = client_moments(known, params, release.central)
    if known.noise is None:  # numbers of rows are public, so that this refusal tells nothing
        check_noise_is_identified(table)
    rng, _ = noise_generator(params.random_state)
    mechanism = release.mechanism(params, moments.sensitivity, moments.width(len(centre)))
    pool = means_from_noisy_sums if release.central else means_from_noisy_reports
    released = pool(table, variances[sends], moments, mechanism, centre, known, params.method, rng)
    assumptions = *_variance_bound_assumptions(moments, params), *participation_assumption(sends)
    entries = noise_entries(release, params, *assumptions) | {"facts": mechanism.facts()}
    if release.central:  # a message of nothing shows under local trust
        entries["epsilon_under"] = mechanism.under_zero_out(moments.zero_out_sensitivity)
    return released, entries


def _variance_bound_assumptions(moments, params):
    """Assumptions of the report on the bound on row variances."""
    if not moments.variance:  # the noise variance was given, so that no variance is released
        return ()
    source = "clip_norm squared" if params.noise_variance_bound is None else "the user's"
    return (
        f"noise_variance_bound = {moments.largest_variance:.4g}, for the sum over outputs, is "
        f"{source}, not the data's",
        "weights of row variances are public constants, made from the numbers of rows",
    )


def _from_quantized_means(release, table, centre, params, known):
    """Estimate the population from quantized means of the clients; with entries of the report."""
    quantizer = release.mechanism(params, None, len(centre))
    if known.between is None:  # rounding biases nothing but the estimate of the spread
        _check_fine(quantizer, table, known.noise)
    rng, _ = noise_generator(params.random_state)
    reports = centre + quantizer.privatize(table.means - centre, rng)
    released = pooled_releases(table, reports, quantizer.noise_variance, known, params.method)
    return released, {"facts": quantizer.facts()}


def _check_fine(quantizer, table, noise):
    """Refuse rounding that is coarse relative to the sampling error: it hides the spread."""
    sampling = noise * np.mean(1 / table.weights)
    if quantizer.noise_variance > _COARSEST_ROUNDING * sampling:
        raise ValueError(
            f"n_bits={quantizer.bits} is too coarse to estimate the spread between clients: "
            f"rounding adds a variance of up to {quantizer.noise_variance:.3g} to each mean, whose "
            f"sampling variance is {sampling:.3g}. Give the prior's covariance, or more bits."
        )


def client_moments(known, params, central):
    """Message of a client that unknown parameters need; at least one must be unknown."""
    mean, square = known.mean is None, known.between is None
    if not central:
        # Each noisy mean is seen by itself, and their spread shows the variance between clients.
        mean, square = mean or square, False
    noise, bound = known.noise is None, params.noise_variance_bound
    return ClientMoments(params.clip_norm, mean, square, noise, bound)


def variance_weights(n_rows):
    """Weights (m,) of row variances in their sum: 0 for one row, 1 from the median number on."""
    # They depend on the numbers of rows only, which are public.
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
    noise, is_useful = known.noise, True
    if noise is None:
        noise, is_useful = _released_noise(
            released["variance"], weights, mechanism.noise_std, table, moments
        )
    sampling = noise / table.weights
    mean = centre + released["mean"] / m if known.mean is None else known.mean
    between = known.between
    if between is None:
        around = released["square"][0] / m - np.sum((mean - centre) ** 2)
        if known.mean is None:  # the estimated mean has noise, and follows the clients
            around = (around + d * (noise_std / m) ** 2) * m / max(m - 1, 1)
        # Shrinking too little does less harm than too much, so chance must not make it 0.
        between = max(around / d - sampling.mean(), square_std / (m * d)) if m > 1 else np.nan
    if known.mean is not None:
        return _around_known_mean(table, mean, between, noise, is_useful)
    # What the server added of the client itself is its clipped mean, which the client knows.
    clipped = clip_l2(table.means - centre, moments.radius)
    n_others = max(m - 1, 1)
    others = centre + (released["mean"] - clipped) / n_others
    spread = np.nan_to_num(between) + sampling
    total = spread.sum() + noise_std**2
    variance = (total - spread) / n_others**2
    of_others = _of_others(others, variance, table)
    return ReleasedMeans(mean, total / m**2, between, noise, is_useful, *of_others)


def means_from_noisy_reports(table, variances, moments, mechanism, centre, known, method, rng):
    """Estimate the population from one noisy message per client, all of which are seen."""
    d = table.means.shape[1]
    # Without weights: under local trust everybody weighs the noisy variances afterwards.
    messages = moments.messages(table.means - centre, variances)
    released = moments.split(mechanism.privatize(messages, rng), d)
    noise, is_useful = known.noise, True
    if noise is None:
        weights = variance_weights(table.n_rows)
        std = np.sqrt(mechanism.noise_variance) * np.linalg.norm(weights)
        noise, is_useful = _released_noise(
            weights @ released["variance"], weights, std, table, moments
        )
    known = known._replace(noise=noise)
    if moments.mean:
        extra = mechanism.noise_variance * moments.radius**2
        pooled = pooled_releases(table, centre + released["mean"], extra, known, method)
        return pooled._replace(noise_is_useful=is_useful)
    return _around_known_mean(table, known.mean, known.between, noise, is_useful)


def pooled_releases(table, reports, extra, known, method):
    """Estimate the population from unbiased reports (m, d) whose release added variance `extra`."""
    m, d = reports.shape
    # Rows of a report are not seen: one each, with no squares around their mean.
    reported = ClientMeans(reports, table.weights, np.ones(m, dtype=int), np.zeros(d), 0.0)
    between = estimate_components(
        reported, method, known.mean, known.between, known.noise, extra
    ).between
    if known.between is None:
        # One standard deviation of a variance that release noise alone would show, see above.
        between = max(between, extra * np.sqrt(2 / (m * d))) if m > 1 else np.nan
    if known.mean is not None:
        return _around_known_mean(table, known.mean, between, known.noise)
    weights = 1 / (np.nan_to_num(between) + known.noise / table.weights + extra)
    # A single client has no others; _of_others replaces its values.
    of_rest = np.maximum(weights.sum() - weights, np.finfo(float).tiny)
    others = (weights @ reports - weights[:, None] * reports) / of_rest[:, None]
    mean = weights @ reports / weights.sum()
    of_others = _of_others(others, 1 / of_rest, table)
    return ReleasedMeans(mean, 1 / weights.sum(), between, known.noise, True, *of_others)


def _released_noise(summed, weights, std, table, moments):
    """Noise variance from the noisy sum of cut variances `summed` (1,), and whether it is of use.

    That noise has the standard deviation `std`, in units of the bound. The sum of cut variances is
    at most the sum of their weights. If even that would not exceed the noise, a large value is due
    to chance.
    """
    bound, d, most = moments.largest_variance, table.means.shape[1], np.sum(weights)
    total = min(summed[0] / bound, most)
    expected = sum_of_cut_variances(table.n_rows, weights, d)
    variance = undo_cut(total, expected, most) * bound / d
    # Two standard deviations: noise alone passes for a signal in one fit of 44.
    if total <= 2 * std:
        warn_caller(_TOO_NOISY.format(bound=bound), UserWarning)
        return variance, False
    if total > expected(_TIGHT) + 2 * std:
        warn_caller(_TOO_TIGHT.format(variance=d * variance, bound=bound), UserWarning)
    return variance, True


def _around_known_mean(table, mean, between, noise, noise_is_useful=True):
    """ReleasedMeans around a known mean, which has no error and holds no client's release."""
    others = np.broadcast_to(mean, table.means.shape)
    variance = np.zeros(len(table.means))
    return ReleasedMeans(mean, 0.0, between, noise, noise_is_useful, others, variance)


def _of_others(others, variance, table):
    """Mean and variance of the others; a single client gets its own mean, infinitely uncertain."""
    if len(table.means) > 1:
        return others, variance
    return table.means, np.full(1, np.inf)


def _shrink_releases(table, released, prior, variances):
    """Shrink clients' means towards the releases of all others (Theorem 2, ICLR; own left out)."""
    # If the released noise variance is useless, clients keep their means, with the standard errors
    # of their own rows (NaN for a single row).
    d, noise = table.means.shape[1], released.noise
    sampling = noise / table.weights[:, None]
    if not released.noise_is_useful:
        # A client knows the variance of its own rows without noise; a single row has none.
        own_variances = np.where(table.n_rows > 1, variances / d, np.nan)
        sampling = (own_variances / table.n_rows)[:, None]
    # The others' releases do not contain the client's own, so that errors are independent.
    prior_variance = np.nan_to_num(released.between) + released.others_variance[:, None]
    total = prior_variance + sampling
    shrink = np.divide(sampling, total, out=np.zeros_like(total), where=total > 0)
    # Too much shrinkage harms a client, too little costs only the gain.
    if np.isnan(released.between) or not released.noise_is_useful:
        shrink = np.zeros_like(shrink)
    own_weights = np.broadcast_to(1 - shrink, table.means.shape)
    population = Population(released.mean, released.between, noise, released.mean_variance)
    population = population.of_width(d)
    fitted = prior.with_values(population.mean, population.between)
    means = own_weights * table.means + (1 - own_weights) * released.others
    per_output = prior.covariance_type == "diag"
    return FittedMeans(
        fitted, population, table, means, own_weights * sampling, own_weights, not per_output
    )
