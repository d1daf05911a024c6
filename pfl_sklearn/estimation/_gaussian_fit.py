"""Clients' means under a Gaussian prior, from exact or from released statistics."""

import math

import numpy as np

from pfl_sklearn._warnings import warn_caller
from pfl_sklearn.estimation import _gaussian_release as release
from pfl_sklearn.estimation._gaussian_release import Known
from pfl_sklearn.estimation._mean_estimates import (
    PRIVATE,
    RELEASED,
    FittedMeans,
    bounded_means,
    known_noise,
    local_mechanism,
    noisy_report,
    open_report,
    participation,
    release_events,
    releases,
    rows_of,
    taking_part,
)
from pfl_sklearn.estimation._variance_components import (
    check_noise_is_identified,
    client_means,
    estimate_components,
)
from pfl_sklearn.estimation._variance_uncertainty import (
    Everyone,
    average_over_variances,
    joined,
)
from pfl_sklearn.privacy import GaussianMechanism, PrivacyReport, StochasticQuantizer
from pfl_sklearn.privacy._mechanisms._noise import noise_generator
from pfl_sklearn.privacy._spending import UNPROTECTED
from pfl_sklearn.theory import own_weight

METHODS = ("reml", "ml", "moments")

_COARSE = 0.1  # largest rounding variance, as a share of the sampling variance
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


def check(prior, params):
    """Refuse a method that does not go with the prior, and unknowns that cannot be released."""
    if params.method not in METHODS:
        raise ValueError(
            f"method={params.method!r} does not go with GaussianPrior; expected "
            f"{' or '.join(map(repr, METHODS))}."
        )
    needed = prior.covariance is None or params.noise_variance is None
    if releases(params) and prior.covariance_type == "diag" and needed:
        raise ValueError(
            "covariance_type='diag' with a finite epsilon or a quantizer needs a known "
            "covariance and noise_variance; only one variance for all outputs can be released."
        )


def events(prior, params):
    """Accounting events of a fit."""
    if math.isinf(params.epsilon):
        return UNPROTECTED
    known = Known(prior.mean, prior.covariance, params.noise_variance)
    if all(values is not None for values in known):
        return ()
    moments = _client_moments(known, params)
    ratio = moments.zero_out_sensitivity / moments.sensitivity
    return release_events(params, ratio if params.trust == "central" else None)


def fit(rows, prior, params):
    """Client statistics, fitted population and report, for rows of `y` (n, d)."""
    ids, codes = rows.clients
    known = known_values(prior, params.noise_variance, rows.y.shape[1])
    sends = taking_part(params.participants, ids)
    sent = rows_of(rows, sends)
    if not releases(params):
        table = _of_rows(rows)
        told = table if sent is rows else _of_rows(sent)
        averaged = params.uncertainty == "full"
        found = fit_exact(told, known, params.method, prior, averaged, Everyone(table, sends))
        return table, found, open_report(len(told.means), PRIVATE)
    table, centre = bounded_means(rows, params)
    told, variances = table if sent is rows else bounded_means(sent, params)[0], None
    if params.mechanism == "quantizer":
        found, report = _fit_quantized(told, centre, params, shared_values(known))
    elif all(values is not None for values in known):
        everyone = Everyone(table, sends)
        found = _shrunk(everyone, prior, known.mean, 0.0 * known.mean, known.between, known.noise)
        return table, found, PrivacyReport.of_known_population(RELEASED, PRIVATE, len(ids))
    else:
        variances = release.row_variances(rows.y, codes, table)
        found, report = _fit_private(
            told, variances[sends], centre, params, shared_values(known), len(ids)
        )
    with np.errstate(over="ignore", invalid="ignore"):
        return table, shrink_releases(table, found.for_all(sends), prior, variances), report


def known_values(prior, noise_variance, d):
    """Given mean, between-client and noise variances as arrays (d,), or None."""
    return Known(prior.known_mean(d), prior.known_variances(d), known_noise(noise_variance, d))


def shared_values(known):
    """The same with one variance for all outputs."""
    if known.between is not None and np.isinf(known.between).any():
        raise ValueError("covariance must be finite when means are released; got infinity.")
    for name, values in (("covariance", known.between), ("noise_variance", known.noise)):
        if values is not None and np.any(values != values[0]):
            raise ValueError(
                f"{name} must be the same for all outputs when means are released; got {values}."
            )
    first = [None if values is None else float(values[0]) for values in known[1:]]
    return Known(known.mean, *first)


def _of_rows(rows):
    """Statistics of the clients of exact rows."""
    ids, codes = rows.clients
    return client_means(rows.y, codes, len(ids), rows.weights)


def fit_exact(table, known, method, prior, averaged, everyone):
    """Population from exact statistics of those that send, and all clients around it.

    Errors are `averaged` over the variances.
    """
    d = table.means.shape[1]
    diagonal = prior.covariance_type == "diag"
    differ = any(values is not None and np.any(values != values[0]) for values in known[1:])
    blocks = [table.coordinate(k) for k in range(d)] if diagonal or differ else [table]
    found, given = [], []
    for k, block in enumerate(blocks):
        mean, between, noise = known
        if len(blocks) > 1:
            mean = None if mean is None else mean[[k]]
        between, noise = (None if value is None else value[k] for value in (between, noise))
        given.append((mean, between, noise))
        found.append(estimate_components(block, method, *given[-1]))
    width = d // len(found)
    mean = np.concatenate([part.mean for part in found])
    mean_variance, between, noise = (
        np.repeat([getattr(part, name) for part in found], width).astype(float)
        for name in ("mean_variance", "between", "noise")
    )
    value = float(sum(part.log_likelihood for part in found))
    shrunk = _shrunk(everyone, prior, mean, mean_variance, between, noise, value)
    if not averaged:
        return shrunk
    columns = np.split(np.arange(d), len(blocks))
    parts = [
        average_over_variances(*parts, everyone.outputs(at), shrunk.means[:, at])
        for *parts, at in zip(blocks, given, found, columns, strict=True)
    ]
    return shrunk if None in parts else shrunk.with_averages(joined(parts))


def _shrunk(everyone, prior, mean, mean_variance, between, noise, log_likelihood=math.nan):
    """Every client's posterior around a population, from its own exact mean.

    The population mean is independent of clients that it was not estimated from, so for them its
    variance adds to `between`. The others' own means are part of it: their weights are those of
    Theorem 1.
    """
    table, sends = everyone.table, everyone.sends[:, None]
    sampling = noise / table.weights[:, None]
    around = between + np.where(sends, 0.0, mean_variance)
    own = np.where(np.isnan(between), 1.0, own_weight(around, sampling))
    shared = (own < 1) & sends
    borrowed = np.where(shared, (1 - own) ** 2, 0.0) * np.where(shared, mean_variance, 0.0)
    return FittedMeans(
        prior.with_values(mean, between),
        mean,
        mean_variance,
        between,
        noise,
        own * table.means + (1 - own) * mean,
        own * sampling + borrowed,
        own,
        log_likelihood,
        prior.covariance_type != "diag",
    )


def shrink_releases(table, found, prior, variances=None):
    """Clients' means given all other clients' releases (Theorem 2, own release left out).

    If the released noise variance is useless, clients keep their means, with the standard errors
    of their own rows (NaN for a single row).
    """
    d, noise = table.means.shape[1], found.noise.variance
    sampling = noise / table.weights[:, None]
    if not found.noise.trusted:
        own = np.where(table.n_rows > 1, variances / d, np.nan)
        sampling = (own / table.n_rows)[:, None]
    prior_variance = np.nan_to_num(found.between) + found.others_variance[:, None]
    total = prior_variance + sampling
    shrink = np.divide(sampling, total, out=np.zeros_like(total), where=total > 0)
    if np.isnan(found.between) or not found.noise.trusted:
        shrink = np.zeros_like(shrink)
    own = np.broadcast_to(1 - shrink, table.means.shape)
    full = np.ones(d)
    return FittedMeans(
        prior.with_values(found.mean, found.between * full),
        found.mean,
        found.mean_variance * full,
        found.between * full,
        noise * full,
        own * table.means + (1 - own) * found.others,
        own * sampling,
        own,
        math.nan,
        prior.covariance_type != "diag",
    )


def _client_moments(known, params):
    """Message that a client must send."""
    return release.client_moments(
        known, params.clip_norm, params.noise_variance_bound, params.trust
    )


def _fit_private(table, variances, centre, params, known, n_clients):
    """Released population and report of noisy means or sums of the clients that send some."""
    moments = _client_moments(known, params)
    if known.noise is None:
        check_noise_is_identified(table)
    rng, _ = noise_generator(params.random_state)
    if params.trust == "central":
        mechanism = GaussianMechanism(moments.sensitivity, params.epsilon, params.delta)
        found = release.means_from_noisy_sums(
            table, variances, moments, mechanism, centre, known, rng
        )
        under = mechanism.under_zero_out(moments.zero_out_sensitivity)
    else:
        mechanism = local_mechanism(params, moments.sensitivity, moments.width(len(centre)))
        found = release.means_from_noisy_reports(
            table, variances, moments, mechanism, centre, known, params.method, rng
        )
        under = ()
    _warn_of_noise(found.noise, moments.largest_variance, len(centre))
    report = noisy_report(
        params,
        mechanism.facts(),
        PRIVATE,
        n_clients=len(table.means),
        epsilon_under=under,
        bounds=(*_bounds(moments, params), *participation(len(table.means), n_clients)),
    )
    return found, report


def _warn_of_noise(noise, bound, d):
    """Say that the released noise variance is useless, or that its bound is too tight."""
    if not noise.trusted:
        warn_caller(_TOO_NOISY.format(bound=bound), UserWarning)
    elif noise.tight:
        warn_caller(_TOO_TIGHT.format(variance=d * noise.variance, bound=bound), UserWarning)


def _bounds(moments, params):
    """What the report assumes of the bound on row variances."""
    if not moments.variance:
        return ()
    source = "clip_norm squared" if params.noise_variance_bound is None else "the user's"
    return (
        f"noise_variance_bound = {moments.largest_variance:.4g}, for the sum over outputs, is "
        f"{source}, not the data's",
        "weights of row variances are public constants, made from the numbers of rows",
    )


def _fit_quantized(table, centre, params, known):
    """Released population and report of quantized means."""
    quantizer = StochasticQuantizer(params.n_bits, params.clip_norm)
    if known.between is None:
        _check_fine(quantizer, table, known.noise)
    rng, _ = noise_generator(params.random_state)
    found = release.means_from_quantized_reports(
        table, quantizer, centre, known, params.method, rng
    )
    return found, open_report(len(table.means), PRIVATE, quantizer.facts())


def _check_fine(quantizer, table, noise):
    """Refuse rounding that hides the clients' spread: it must be below the sampling error."""
    if quantizer.noise_variance > _COARSE * noise * np.mean(1 / table.weights):
        raise ValueError(
            f"n_bits={quantizer.bits} is too coarse to estimate the spread between clients: "
            f"rounding adds a variance of up to {quantizer.noise_variance:.3g} to each mean, whose "
            f"sampling variance is {noise * np.mean(1 / table.weights):.3g}. Give the prior's "
            "covariance, or more bits."
        )
