"""Classes of agents found among noisy means: mixtures of few components, averaged.

A *setting* is a number of components, their spread, and the share of agents that belong to none.
Arrays over components have shape (s, k): settings with fewer components leave the last ones empty.
"""

from typing import NamedTuple

import numpy as np
from scipy.special import logsumexp

_MOST = 5  # components
# Spreads of a class, in units of the range, and shares of agents that belong to no class. A class's
# variance has a uniform prior, so the weight of a spread is proportional to it; those below a step
# share the weight of a tenth of a step.
_STEP = 1 / 30
_SMALL = 3.0 ** -np.arange(1, 7)
_SPREADS = _STEP * np.array([*range(11), *range(3), *_SMALL])
_ALONE = np.array([0.05] * 11 + [0.002] * 9)
_PRIOR = np.log(np.where(_SPREADS >= _STEP, _SPREADS, _STEP / 70))
_PRIOR += np.where(_ALONE < 0.05, np.log(0.1), 0.0)
_MAX_STEPS, _TOLERANCE = 100, 1e-2  # of EM, the latter in nats
_NEGLIGIBLE = 40.0  # nats below the best setting
_MANY, _NEAR = 5000, 0.1  # agents from which those within a tenth of their sd count as equal
_TINY = 1e-300
_BLOCK = 1 << 14  # agents at once


class Classes(NamedTuple):
    """Mixtures that noisy means support, one for each setting, and what they were fitted to."""

    sizes: np.ndarray  # (s,), numbers of components
    spreads: np.ndarray  # (s,), standard deviations of a class
    alone: np.ndarray  # (s,), log densities of agents that belong to none, times their share
    shares: np.ndarray  # (s, k)
    centres: np.ndarray  # (s, k)
    precisions: np.ndarray  # (s, k), of the centres
    scores: np.ndarray  # (s,), log-likelihoods less half of BIC's penalty, plus the prior
    information: float  # sum of the precisions of the means
    n_agents: int

    def at(self, settings):
        """A copy for some settings."""
        arrays = {name: getattr(self, name)[settings].copy() for name in self._fields[:-2]}
        return self._replace(**arrays)


class Posterior(NamedTuple):
    """Mean and variance of agents (n,), and how much each component counts (s * (k + 1), n)."""

    means: np.ndarray
    variances: np.ndarray
    weights: np.ndarray


def find_classes(means, variances, width, before=None):
    """Classes among means (n,) with noise of known variances (n,).

    `width` is the range of values. EM starts from the classes found `before`.
    """
    information, n = float((1 / variances).sum()), len(means)
    means, variances, counts = _grouped(means, variances)
    found = _spread_out(means, width, n)
    if before is not None:
        found = found._replace(shares=before.shares.copy(), centres=before.centres.copy())
    moving = np.arange(len(found.sizes))
    for _ in range(_MAX_STEPS):
        stepped = _step(found.at(moving), means, variances, counts)
        still = stepped.scores - found.scores[moving] >= _TOLERANCE
        for name in ("shares", "centres", "precisions", "scores"):
            getattr(found, name)[moving] = getattr(stepped, name)
        moving = moving[still]
        if not len(moving):
            break
    found.scores[:] -= (2 * found.sizes - 1) / 2 * np.log(n)
    found.scores[:] += np.tile(_PRIOR, len(found.sizes) // len(_PRIOR))
    return found._replace(information=information, n_agents=n)


def _step(classes, means, variances, counts):
    """A step of EM; the score is the log-likelihood before it."""
    total = variances + classes.spreads[:, None, None] ** 2
    member, logs = _members(classes, means, total)
    member *= counts
    weights = member / total
    precisions = np.maximum(weights.sum(axis=2), _TINY)
    centres = np.where(precisions > _TINY, weights @ means / precisions, classes.centres)
    shares = np.where(classes.shares > 0, np.maximum(member.sum(axis=2), 1e-6), 0.0)
    shares *= (classes.shares.sum(axis=1) / shares.sum(axis=1))[:, None]
    return classes._replace(
        shares=shares, centres=centres, precisions=precisions, scores=logs @ counts
    )


def _spread_out(means, width, n):
    """Components at the quantiles of the means."""
    most = min(_MOST, n)
    sizes = np.repeat(np.arange(1, most + 1), len(_SPREADS))
    quantiles = (np.arange(most) + 0.5) / sizes[:, None]
    used = quantiles < 1
    alone = np.tile(_ALONE, most)
    return Classes(
        sizes=sizes,
        spreads=width * np.tile(_SPREADS, most),
        alone=np.log(alone) - np.log(width),
        shares=used * ((1 - alone) / sizes)[:, None],
        centres=np.quantile(means, np.minimum(quantiles, 1.0)),
        precisions=np.zeros(used.shape),
        scores=np.full(len(sizes), -np.inf),
        information=0.0,
        n_agents=n,
    )


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


def _members(classes, means, total):
    """Probabilities (s, k, n) of components, and log densities (s, n), of means with variances.

    `total` (s, 1, n) are the variances, the spread included.
    """
    with np.errstate(divide="ignore"):  # empty components
        shares = np.log(classes.shares)[..., None]
    logs = shares + _log_normal(means - classes.centres[..., None], total)
    alone = classes.alone[:, None]
    highest = np.maximum(logs.max(axis=1), alone)
    found = np.exp(logs - highest[:, None])
    density = found.sum(axis=1) + np.exp(alone - highest)
    found /= density[:, None]
    return found, highest + np.log(density)


def combine(classes, own, own_variances, heard=None):
    """Posterior of agents with exact means `own` (n,), whose sampling variances are known.

    `heard` (2, n) are the noisy means of the same agents and their variances, if the classes were
    fitted to them, too: each agent then leaves its own out of the centres.
    """
    likely = _likely(classes)
    blocks = [slice(i, i + _BLOCK) for i in range(0, len(own), _BLOCK)]
    parts = [
        _combine(likely, own[b], own_variances[b], None if heard is None else heard[:, b])
        for b in blocks
    ]
    return Posterior(*(np.concatenate(part, axis=-1) for part in zip(*parts, strict=True)))


def _combine(classes, own, own_variances, heard):
    centres, precisions = classes.centres[..., None], classes.precisions[..., None]
    if heard is not None:
        centres, precisions = _without(classes, heard)
    within = classes.spreads[:, None, None] ** 2 + 1 / precisions
    weight = within / (within + own_variances)
    with np.errstate(divide="ignore"):  # empty components
        shares = np.log(classes.shares)[..., None]
    logs = shares + _log_normal(own - centres, within + own_variances)
    alone = len(logs), 1, len(own)
    scores = classes.scores[:, None, None]
    logs = _with_alone(logs, np.broadcast_to(classes.alone[:, None, None], alone)) + scores
    means = _with_alone(centres + weight * (own - centres), np.broadcast_to(own, alone))
    variances = _with_alone(weight * own_variances, np.broadcast_to(own_variances, alone))
    logs, means, variances = (one.reshape(-1, len(own)) for one in (logs, means, variances))
    weights = np.exp(logs - logsumexp(logs, axis=0))
    mean = (weights * means).sum(axis=0)
    variance = (weights * (variances + (means - mean) ** 2)).sum(axis=0)
    return Posterior(mean, variance, weights)


def _with_alone(of_components, alone):
    """Values of the components and, after them, of agents that belong to none: (s, k + 1, n)."""
    shape = len(of_components), of_components.shape[1], alone.shape[2]
    return np.concatenate([np.broadcast_to(of_components, shape), alone], axis=1)


def _likely(classes):
    """Settings that may count for somebody."""
    return classes.at(np.flatnonzero(classes.scores > classes.scores.max() - _NEGLIGIBLE))


def _without(classes, heard):
    """Centres and their precisions (s, k, n) without each agent's own noisy mean."""
    total = heard[1] + classes.spreads[:, None, None] ** 2
    weights = _members(classes, heard[0], total)[0] / total
    left = np.maximum(classes.precisions[..., None] - weights, _TINY)
    sums = (classes.precisions * classes.centres)[..., None] - weights * heard[0]
    return np.where(left > _TINY, sums / left, classes.centres[..., None]), left


def together(classes, weights, heard):
    """Probabilities (r, n) that agents heard (2, n) are of the class of others, of known weights.

    The weights (s * (k + 1), r) are those of a posterior.
    """
    likely = _likely(classes)
    total = heard[1] + likely.spreads[:, None, None] ** 2
    members = _members(likely, heard[0], total)[0]
    members = _with_alone(members, np.zeros((len(members), 1, heard.shape[1])))
    return weights.T @ members.reshape(-1, heard.shape[1])


def _log_normal(distance, variance):
    return -0.5 * (np.log(2 * np.pi * variance) + distance**2 / variance)
