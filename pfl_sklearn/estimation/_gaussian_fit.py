"""Clients' means under a Gaussian prior, from exact or from released statistics."""

import math

import numpy as np

from pfl_sklearn._client_means import (
    participation,
    report_of_fit,
    rows_of,
    taking_part,
)
from pfl_sklearn._warnings import warn_caller
from pfl_sklearn.estimation import _gaussian_release as release
from pfl_sklearn.estimation._gaussian_release import Known
from pfl_sklearn.estimation._mean_estimates import (
    PRIVATE_OF_MEANS,
    PUBLIC_OF_MEANS,
    FittedMeans,
    PopulationOfMeans,
    bounded_means,
    known_noise,
)
from pfl_sklearn.estimation._mean_releases import noise_entries, release_of
from pfl_sklearn.estimation._plausible_variances import (
    AllClients,
    average_over_variances,
    join_outputs,
)
from pfl_sklearn.estimation._variance_components import (
    check_noise_is_identified,
    client_means,
    estimate_components,
)
from pfl_sklearn.privacy import PrivacyReport
from pfl_sklearn.privacy._mechanisms._noise import noise_generator
from pfl_sklearn.theory import own_weight

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


def check_gaussian_prior(prior, params):
    """Refuse unknown variances of every output, which cannot be released."""
    # A message has one squared norm and one variance over all outputs, see ClientMoments.
    needed = prior.covariance is None or params.noise_variance is None
    if release_of(params) is not None and prior.covariance_type == "diag" and needed:
        raise ValueError(
            "covariance_type='diag' with a finite epsilon or a quantizer needs a known "
            "covariance and noise_variance; only one variance for all outputs can be released."
        )


def gaussian_prior_events(prior, params):
    """Accounting events of a private fit."""
    known = Known(prior.mean, prior.covariance, params.noise_variance)
    if known.is_complete:  # clients send nothing
        return ()
    way = release_of(params)
    moments = release.client_moments(known, params, way.central)
    # A message of zero is nearer to any other than two messages are to each other. Under local
    # trust the message itself is seen, and a client that sends none shows.
    ratio = moments.zero_out_sensitivity / moments.sensitivity
    return way.events(params, ratio if way.central else None)


def fit_under_gaussian_prior(rows, prior, params):
    """Client statistics, fitted population and report, for rows of `y` (n, d)."""
    way = release_of(params)
    ids, codes = rows.clients
    known = known_values(prior, params.noise_variance, rows.y.shape[1])
    sends = taking_part(params.participants, ids)
    sent_rows = rows_of(rows, sends)
    names = PUBLIC_OF_MEANS, PRIVATE_OF_MEANS
    if way is None:
        table = _statistics(rows)
        # All clients shrink; only those that take part tell of the population (Remark 7).
        senders = table if sent_rows is rows else _statistics(sent_rows)
        clients, averaged = AllClients(table, sends), params.uncertainty == "full"
        fitted = fit_exact_means(senders, known, params.method, prior, averaged, clients)
        return table, fitted, report_of_fit(params, *names, len(senders.means))
    table, centre = bounded_means(rows, params)
    if way.private and known.is_complete:
        # With nothing to estimate nothing is sent, so every output may have its own variances.
        population = PopulationOfMeans(
            prior.with_values(*known[:2]), known.mean, 0.0 * known.mean, *known[1:]
        )
        fitted = _shrink_towards(AllClients(table, sends), population)
        return table, fitted, PrivacyReport.of_known_population(*names, len(ids))
    senders = table if sent_rows is rows else bounded_means(sent_rows, params)[0]
    if way.private:
        variances = release.row_variances(rows.y, codes, table)
        population, entries = _fit_private(
            way, senders, variances[sends], centre, params, shared_values(known), len(ids)
        )
    else:
        variances = None  # a quantizer needs a known noise variance
        population, entries = _fit_quantized(way, senders, centre, params, shared_values(known))
    report = report_of_fit(params, *names, len(senders.means), **entries)
    with np.errstate(over="ignore", invalid="ignore"):  # of clients whose own means are huge
        return table, shrink_releases(table, population.for_all(sends), prior, variances), report


def known_values(prior, noise_variance, d):
    """Mean, variance between clients and noise variance that the user gave, each (d,) or None."""
    return Known(prior.known_mean(d), prior.known_variances(d), known_noise(noise_variance, d))


def shared_values(known):
    """Known values with one variance for all outputs, as releases need them."""
    # An infinite variance asks for no pooling, and a release for it would cost privacy in vain.
    if known.between is not None and np.isinf(known.between).any():
        raise ValueError("covariance must be finite when means are released; got infinity.")
    for name, values in (("covariance", known.between), ("noise_variance", known.noise)):
        if values is not None and np.any(values != values[0]):
            raise ValueError(
                f"{name} must be the same for all outputs when means are released; got {values}."
            )
    first = [None if values is None else float(values[0]) for values in known[1:]]
    return Known(known.mean, *first)


def _statistics(rows):
    """ClientMeans of rows that are not bounded, as nothing of them is released."""
    ids, codes = rows.clients
    return client_means(rows.y, codes, len(ids), rows.weights)


def fit_exact_means(senders, known, method, prior, averaged, clients):
    """Estimate the population from the `senders`, and shrink the means of all clients towards it.

    With `averaged`, errors are averages over the variances that the senders leave plausible.
    """
    d = senders.means.shape[1]
    differ = any(values is not None and np.any(values != values[0]) for values in known[1:])
    # Outputs of one variance are estimated together: all their rows bear on it.
    apart = d > 1 and (differ or prior.covariance_type == "diag")
    blocks = [[k] for k in range(d)] if apart else [slice(None)]
    knowns = [_known_of_outputs(known, block) for block in blocks]
    components = [
        estimate_components(senders.outputs(block), method, *values)
        for block, values in zip(blocks, knowns, strict=True)
    ]
    width = d // len(blocks)  # outputs that share the variances of a block
    *moments, log_likelihoods = zip(*components, strict=True)
    mean, mean_variance, between, noise = (
        np.concatenate([np.broadcast_to(value, width) for value in values]) for values in moments
    )
    population = PopulationOfMeans(
        prior.with_values(mean, between), mean, mean_variance, between, noise
    )
    fitted = _shrink_towards(clients, population, float(sum(log_likelihoods)))
    if not averaged:
        return fitted
    averages = [
        average_over_variances(
            senders.outputs(block), values, each, clients.outputs(block), fitted.means[:, block]
        )
        for block, values, each in zip(blocks, knowns, components, strict=True)
    ]
    # None: variances are known, or cannot be averaged. It is the same for all blocks but for the
    # scatter within clients; if one output has none, no output is averaged.
    return fitted if None in averages else fitted.with_averages(join_outputs(averages))


def _known_of_outputs(known, block):
    """Known values of a block of outputs; the variances that these share become numbers."""
    mean, *variances = (None if values is None else values[block] for values in known)
    return Known(mean, *(None if values is None else values[0] for values in variances))


def _shrink_towards(clients, population, log_likelihood=math.nan):
    """Shrink every client's exact mean towards the population.

    The population mean is independent of clients that it was not estimated from, so for them its
    variance adds to `between`. The others' own means are part of it: their weights are those of
    Theorem 1.
    """
    prior, mean, mean_variance, between, noise = population
    table, sends = clients.table, clients.sends[:, None]
    sampling = noise / table.weights[:, None]
    around = between + np.where(sends, 0.0, mean_variance)
    # One client shows no spread between clients, and keeps its own mean.
    own = np.where(np.isnan(between), 1.0, own_weight(around, sampling))
    shared = (own < 1) & sends  # without pooling, `mean_variance` is infinite: 0 times infinity
    borrowed = np.where(shared, (1 - own) ** 2, 0.0) * np.where(shared, mean_variance, 0.0)
    # With `own` known, the population mean is the second source of error, by its weight.
    means, variances = own * table.means + (1 - own) * mean, own * sampling + borrowed
    per_output = prior.covariance_type == "diag"
    return FittedMeans(population, means, variances, own, log_likelihood, not per_output)


def shrink_releases(table, released, prior, variances=None):
    """Shrink clients' means towards the releases of all others (Theorem 2, own release left out).

    If the released noise variance is useless, clients keep their means, with the standard errors
    of their own rows (NaN for a single row).
    """
    d, noise = table.means.shape[1], released.noise.variance
    sampling = noise / table.weights[:, None]
    if not released.noise.trusted:
        # A client knows the variance of its own rows without noise; a single row has none.
        own_variances = np.where(table.n_rows > 1, variances / d, np.nan)
        sampling = (own_variances / table.n_rows)[:, None]
    # The others' releases do not contain the client's own, so that errors are independent.
    prior_variance = np.nan_to_num(released.between) + released.others_variance[:, None]
    total = prior_variance + sampling
    shrink = np.divide(sampling, total, out=np.zeros_like(total), where=total > 0)
    # Too much shrinkage harms a client, too little costs only the gain.
    if np.isnan(released.between) or not released.noise.trusted:
        shrink = np.zeros_like(shrink)
    own = np.broadcast_to(1 - shrink, table.means.shape)
    full = np.ones(d)
    between, mean_variance = released.between * full, released.mean_variance * full
    population = PopulationOfMeans(
        prior.with_values(released.mean, between),
        released.mean,
        mean_variance,
        between,
        noise * full,
    )
    means = own * table.means + (1 - own) * released.others
    per_output = prior.covariance_type == "diag"
    return FittedMeans(population, means, own * sampling, own, shared=not per_output)


def _fit_private(way, table, variances, centre, params, known, n_clients):
    """Estimate the population from noisy messages of the clients; with entries of the report."""
    moments = release.client_moments(known, params, way.central)
    if known.noise is None:  # numbers of rows are public, so that this refusal tells nothing
        check_noise_is_identified(table)
    rng, _ = noise_generator(params.random_state)
    mechanism = way.mechanism(params, moments.sensitivity, moments.width(len(centre)))
    pool = release.means_from_noisy_sums if way.central else release.means_from_noisy_reports
    population = pool(table, variances, moments, mechanism, centre, known, params.method, rng)
    _warn_of_noise(population.noise, moments.largest_variance, len(centre))
    assumptions = *_bounds(moments, params), *participation(len(table.means), n_clients)
    entries = noise_entries(way, params, *assumptions) | {"facts": mechanism.facts()}
    if way.central:  # a message of nothing shows under local trust
        entries["epsilon_under"] = mechanism.under_zero_out(moments.zero_out_sensitivity)
    return population, entries


def _warn_of_noise(noise, bound, d):
    """Warn if the released noise variance is useless, or its bound too tight."""
    if not noise.trusted:
        warn_caller(_TOO_NOISY.format(bound=bound), UserWarning)
    elif noise.tight:
        warn_caller(_TOO_TIGHT.format(variance=d * noise.variance, bound=bound), UserWarning)


def _bounds(moments, params):
    """Assumptions of the report on the bound on row variances."""
    if not moments.variance:  # the noise variance was given, so that no variance is released
        return ()
    source = "clip_norm squared" if params.noise_variance_bound is None else "the user's"
    return (
        f"noise_variance_bound = {moments.largest_variance:.4g}, for the sum over outputs, is "
        f"{source}, not the data's",
        "weights of row variances are public constants, made from the numbers of rows",
    )


def _fit_quantized(way, table, centre, params, known):
    """Estimate the population from quantized means of the clients; with entries of the report."""
    quantizer = way.mechanism(params, None, len(centre))
    if known.between is None:  # rounding biases nothing but the estimate of the spread
        _check_fine(quantizer, table, known.noise)
    rng, _ = noise_generator(params.random_state)
    reports = centre + quantizer.privatize(table.means - centre, rng)
    extra, noise = quantizer.noise_variance, release.ReleasedNoise(known.noise)
    population = release.pooled_releases(table, reports, extra, known, noise, params.method)
    return population, {"facts": quantizer.facts()}


def _check_fine(quantizer, table, noise):
    """Refuse rounding that is coarse beside the sampling error, as it hides the clients' spread."""
    sampling = noise * np.mean(1 / table.weights)
    if quantizer.noise_variance > _COARSEST_ROUNDING * sampling:
        raise ValueError(
            f"n_bits={quantizer.bits} is too coarse to estimate the spread between clients: "
            f"rounding adds a variance of up to {quantizer.noise_variance:.3g} to each mean, whose "
            f"sampling variance is {sampling:.3g}. Give the prior's covariance, or more bits."
        )
