"""Classes of agents found among noisy means: mixtures of few components, averaged."""

from typing import NamedTuple

import numpy as np
from scipy.special import logsumexp

_MOST = 5  # components
# Spreads of a class, in units of the range, and shares of agents that belong to no class; and prior
# weights of each pair. A class's variance has a uniform prior, so a spread one like itself.
_STEP = 1 / 30
_SPREADS = _STEP * np.array([*range(11), *range(3)])
_ALONE = np.array([0.05] * 11 + [0.002] * 3)
_PRIOR = np.log(np.maximum(_SPREADS, _STEP / 10)) + np.log(np.where(_ALONE < 0.05, 0.1, 1.0))
_MAX_STEPS, _TOLERANCE = 100, 1e-2  # of EM, the latter in nats
_NEGLIGIBLE = 40.0  # nats below the best fit
_MANY, _NEAR = 5000, 0.1  # agents from which those within a tenth of their sd count as equal
_TINY = 1e-300
_BLOCK = 1 << 14  # agents at once


class Fit(NamedTuple):
    """Mixtures of k components, one for each of s spreads."""

    shares: np.ndarray  # (s, k)
    centres: np.ndarray  # (s, k)
    precisions: np.ndarray  # (s, k), of the centres
    scores: np.ndarray  # (s,), log-likelihood less half of BIC's penalty


class Classes(NamedTuple):
    """Mixtures of 1, 2, ... components that noisy means support, and what they were fitted to."""

    spreads: np.ndarray  # (s,), standard deviations of a class
    fits: tuple[Fit, ...]
    density: float  # log density of an agent that belongs to no class
    information: float  # sum of the precisions of the means
    n_agents: int


class Posterior(NamedTuple):
    """Mean and variance of agents (n,), and how much each component of each fit counts (f, n)."""

    means: np.ndarray
    variances: np.ndarray
    weights: np.ndarray


def find_classes(means, variances, width, before=None):
    """Classes among means (n,) with noise of known variances (n,).

    `width` is the range of values. EM starts from the classes found `before`.
    """
    spreads, density = width * _SPREADS, -np.log(width)
    information, n = float((1 / variances).sum()), len(means)
    means, variances, counts = _grouped(means, variances)
    fits = []
    for k in range(1, min(_MOST, n) + 1):
        known = before is not None and len(before.fits) >= k
        start = before.fits[k - 1] if known else _spread_out(means, k)
        fits.append(_fit(means, variances, counts, spreads, density, start))
    return Classes(spreads, tuple(fits), density, information, n)


def _grouped(means, variances):
    """Means (g,), variances and counts of agents; of very many those that are nearly equal."""
    if len(means) <= _MANY:
        return means, variances, np.ones(len(means))
    place = np.round(means / (_NEAR * np.sqrt(variances.min())))
    kind = np.round(np.log(variances) / _NEAR)
    _, group, counts = np.unique(
        np.stack([place, kind]), axis=1, return_inverse=True, return_counts=True
    )
    return np.bincount(group, means) / counts, np.bincount(group, variances) / counts, counts


def _spread_out(means, k):
    """Components at the quantiles of the means."""
    centres = np.quantile(means, (np.arange(k) + 0.5) / k)
    shares = np.tile((1 - _ALONE)[:, None] / k, k)
    return Fit(shares, np.tile(centres, (len(shares), 1)), np.zeros_like(shares), np.zeros(0))


def _fit(means, variances, counts, spreads, density, start):
    """EM for all spreads together: (s, k, n) arrays."""
    shares, centres = start.shares, start.centres
    total, last = variances + spreads[:, None, None] ** 2, -np.inf
    for _ in range(_MAX_STEPS):
        logs = np.log(shares)[..., None] + _log_normal(means - centres[..., None], total)
        member, logs = _members(logs, np.log(_ALONE) + density)
        member *= counts
        weights = member / total
        precisions = np.maximum(weights.sum(axis=2), _TINY)
        centres = np.where(precisions > _TINY, weights @ means / precisions, centres)
        shares = np.maximum(member.sum(axis=2), 1e-6)
        shares *= ((1 - _ALONE) / shares.sum(axis=1))[:, None]
        likelihood = logs @ counts
        if np.all(likelihood - last < _TOLERANCE):
            break
        last = likelihood
    n_free = 2 * shares.shape[1] - 1
    return Fit(shares, centres, precisions, likelihood - n_free / 2 * np.log(counts.sum()))


def _members(logs, alone):
    """Probabilities (s, k, n) of components with log densities `logs`, and those of all (s, n).

    Agents that belong to no component have the log density `alone` (s,).
    """
    alone = alone[:, None]
    highest = np.maximum(logs.max(axis=1), alone)
    found = np.exp(logs - highest[:, None])
    total = found.sum(axis=1) + np.exp(alone - highest)
    found /= total[:, None]
    return found, highest + np.log(total)


def combine(classes, own, own_variances, heard=None):
    """Posterior of agents with exact means `own` (n,), whose sampling variances are known.

    `heard` (2, n) are the noisy means of the same agents and their variances, if the classes were
    fitted to them, too: each agent then leaves its own out of the centres.
    """
    blocks = [slice(i, i + _BLOCK) for i in range(0, len(own), _BLOCK)]
    parts = [
        _combine(classes, own[b], own_variances[b], None if heard is None else heard[:, b])
        for b in blocks
    ]
    return Posterior(*(np.concatenate(part, axis=-1) for part in zip(*parts, strict=True)))


def _combine(classes, own, own_variances, heard):
    logs, means, variances = [], [], []
    for fit, settings in _likely(classes):
        scores = (fit.scores + _PRIOR[settings])[:, None, None]
        centres, precisions = fit.centres[..., None], fit.precisions[..., None]
        if heard is not None:
            centres, precisions = _without(fit, settings, classes, heard)
        within = classes.spreads[settings, None, None] ** 2 + 1 / precisions
        weight = within / (within + own_variances)
        shares = np.log(fit.shares)[..., None]
        logs.append(scores + shares + _log_normal(own - centres, within + own_variances))
        means.append(centres + weight * (own - centres))
        variances.append(weight * own_variances)
        alone = len(scores), 1, len(own)
        density = np.log(_ALONE[settings])[:, None, None] + classes.density
        logs.append(np.broadcast_to(scores + density, alone))
        means.append(np.broadcast_to(own, alone))
        variances.append(np.broadcast_to(own_variances, alone))
    logs, means, variances = (_flat(values) for values in (logs, means, variances))
    weights = np.exp(logs - logsumexp(logs, axis=0))
    mean = (weights * means).sum(axis=0)
    variance = (weights * (variances + (means - mean) ** 2)).sum(axis=0)
    return Posterior(mean, variance, weights)


def _likely(classes):
    """Fits at those settings that may count for somebody, and these settings."""
    best = max((fit.scores + _PRIOR).max() for fit in classes.fits)
    for fit in classes.fits:
        settings = np.flatnonzero(fit.scores + _PRIOR > best - _NEGLIGIBLE)
        if len(settings):
            yield Fit(*(values[settings] for values in fit)), settings


def _without(fit, settings, classes, heard):
    """Centres and their precisions (s, k, n) without each agent's own noisy mean."""
    member = _memberships(fit, settings, classes, heard)
    weights = member / (heard[1] + classes.spreads[settings, None, None] ** 2)
    left = np.maximum(fit.precisions[..., None] - weights, _TINY)
    sums = (fit.precisions * fit.centres)[..., None] - weights * heard[0]
    return np.where(left > _TINY, sums / left, fit.centres[..., None]), left


def _memberships(fit, settings, classes, heard):
    """Probabilities (s, k, n) of the components, given noisy means."""
    total = heard[1] + classes.spreads[settings, None, None] ** 2
    logs = np.log(fit.shares)[..., None] + _log_normal(heard[0] - fit.centres[..., None], total)
    return _members(logs, np.log(_ALONE[settings]) + classes.density)[0]


def together(classes, weights, heard):
    """Probabilities (r, n) that agents heard (2, n) are of the class of others, of known weights.

    The weights (f, r) are those of a posterior.
    """
    members = []
    for fit, settings in _likely(classes):
        found = _memberships(fit, settings, classes, heard)
        alone = np.zeros((len(found), 1, heard.shape[1]))
        members += [found, alone]
    # As in the posterior: all components of a fit, then nobody's.
    return weights.T @ _flat(members)


def _flat(values):
    return np.concatenate([value.reshape(-1, value.shape[2]) for value in values])


def _log_normal(distance, variance):
    return -0.5 * (np.log(2 * np.pi * variance) + distance**2 / variance)
