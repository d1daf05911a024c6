"""Classes of agents with equal means, and estimates that combine the means of a class.

Arrays of pairs have shape (s, r): s senders whose messages r recipients have. If all recipients
have the same messages, the second axis is 1.

Classes are found among noisy means by mixtures of few components, averaged. A *setting* is a number
of components, their spread, and the share of agents that belong to none. Arrays over components
have shape (s, k): settings with fewer components leave the last ones empty.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import csr_array, eye_array
from scipy.special import logsumexp

from pfl_sklearn._typing import Floats, Integers
from pfl_sklearn.online._received_means import ReceivedMessages

# Components at most. Numbers from 1 on are averaged by their scores, not chosen.
_MOST_CLASSES = 5
# Spreads of a class, in units of the range, and shares of agents that belong to no class. A class's
# variance has a uniform prior, so the weight of a spread is proportional to it; those below a step
# share the weight of a tenth of a step.
_SPREAD_STEP = 1 / 30
_SMALL_SPREADS = 3.0 ** -np.arange(1, 7)
_SPREADS = _SPREAD_STEP * np.array([*range(11), *range(3), *_SMALL_SPREADS])
# A twentieth of the agents on their own, or hardly anybody: tight classes gain by the second.
_ALONE = np.array([0.05] * 11 + [0.002] * 9)
_LOG_PRIOR = np.log(np.where(_SPREADS >= _SPREAD_STEP, _SPREADS, _SPREAD_STEP / 70))
_LOG_PRIOR += np.where(_ALONE < 0.05, np.log(0.1), 0.0)
# Of EM. Settings are averaged, so that a hundredth of a nat moves no weight by more than 1 %.
_EM_STEPS_PER_SETTING, _GAIN_TO_STOP = 100, 1e-2
# Nats below the best setting, at which one has a weight below 1e-17.
_NEGLIGIBLE_SCORE = 40.0
# Agents from which those within a tenth of their standard deviation count as equal in EM.
_MANY_AGENTS, _NEAR = 5000, 0.1
# Precision of the centre of a component that nobody belongs to.
_NO_PRECISION = 1e-300
# Agents whose posteriors are formed together: 100 settings of 6 components, some 80 MB.
_AGENTS_AT_ONCE = 1 << 14
# Classes are looked for in this many times the range of nine tenths of the means. One outlier in
# wide bounds would otherwise make every spread on the grid far too wide for the others.
_TIMES_THE_RANGE = 4.0
# Of the information in the messages, at which classes are looked for again. They move little for
# less, and a search costs far more than a message.
_INFORMATION_GROWTH = 1.02


class OwnMeans(NamedTuple):
    """Exact means of the agents (n,), with their variances and numbers of rows.

    Where variances are estimated, an interval needs them times the factor `inflation`.
    """

    means: Floats
    variances: Floats
    inflation: Floats
    rows: Integers


class Decision:
    """Rule by which each agent finds its class."""

    _estimate: Any  # own means and messages to means and variances (2, n)
    _class_of: Any  # own means, messages and recipients to pairs of recipients and senders

    def estimate(self, own_means: OwnMeans, messages: ReceivedMessages) -> tuple[Floats, Floats]:
        """Means of all agents with the help of their classes, and their variances."""
        if messages.n_agents == 1:
            return own_means.means, own_means.variances
        return self._estimate(own_means, messages)

    def same_class(self, own_means: OwnMeans, messages: ReceivedMessages) -> csr_array:
        """Sparse (n, n): whom each agent takes for its class, itself included."""
        n = messages.n_agents
        pairs = [np.zeros((2, 0), int)]
        if n > 1:
            pairs += [self._class_of(own_means, messages, block) for block in messages.blocks()]
        rows, columns = np.concatenate(pairs, axis=1)
        others = rows != columns
        entries = np.ones(others.sum(), dtype=bool), (rows[others], columns[others])
        return (csr_array(entries, shape=(n, n)) + eye_array(n, dtype=bool, format="csr")).astype(
            bool
        )


class MixtureDecision(Decision):
    """Classes among all received means, weighted by their posterior probability.

    The paper accepts everybody whom a test does not reject. While noise is large, that is nearly
    everybody, and worse than working alone. A posterior needs evidence for a class instead.
    """

    def __init__(self):
        self.classes: Classes | None = None
        self.width: float | None = None  # of the range of all agents' values, if it is bounded
        self.n_jobs: int | None = None

    def _estimate(self, own_means, messages):
        received = means_for_all(messages)
        self._update_classes(received)
        return combine(self.classes, own_means.means, own_means.variances, received)[:2]

    def _class_of(self, own_means, messages, block):
        recipient, sender = np.nonzero(
            self._same_class_probabilities(own_means, messages, block) > 0.5
        )
        return np.stack([block[recipient], sender])

    def _same_class_probabilities(self, own_means, messages, block):
        """Probabilities (r, n) that agents are of the class of the recipients in a block."""
        received = means_for_all(messages)
        _, _, weights = combine(
            self.classes, own_means.means[block], own_means.variances[block], received[:, block]
        )
        return same_class_probabilities(self.classes, weights, received)

    def _update_classes(self, received):
        """Look for classes, unless messages brought little information since the last time."""
        before, precision = self.classes, (1 / received[1]).sum()
        if before is None or before.n_agents != received.shape[1]:  # newcomers may be a class
            before = None
        elif precision < _INFORMATION_GROWTH * before.information:
            return
        self.classes = find_classes(received, self._width(received[0]), before)

    def _width(self, means):
        """Range in which means lie, not much wider than that of most received means."""
        widest = (np.ptp(means) or 1.0) if self.width is None else self.width
        return min(
            widest, _TIMES_THE_RANGE * np.subtract(*np.quantile(means, [0.95, 0.05])) or widest
        )


def means_for_all(messages: ReceivedMessages) -> Floats:
    """Means of all senders and their variances (2, n), where all messages go to everybody."""
    pairs = messages.pairs(np.zeros(1, int))
    return np.stack([pairs.means[:, 0], pairs.variances[:, 0]])


class Classes(NamedTuple):
    """Mixtures that noisy means support, one for each setting, and what they were fitted to."""

    sizes: Integers  # (s,), numbers of components
    spreads: Floats  # (s,), standard deviations of a class
    alone: Floats  # (s,), log densities of agents that belong to none, times their share
    shares: Floats  # (s, k)
    centres: Floats  # (s, k)
    precisions: Floats  # (s, k), of the centres
    scores: Floats  # (s,), log-likelihoods less half of BIC's penalty, plus the prior
    information: float  # sum of the precisions of the means
    n_agents: int

    def at(self, settings: Integers) -> Classes:
        """Classes of some settings alone, as a copy."""
        arrays = {name: getattr(self, name)[settings].copy() for name in self._fields[:-2]}
        return self._replace(**arrays)


def find_classes(received: Floats, width: float, before: Classes | None = None) -> Classes:
    """Classes among means with noise of known variances: `received` (2, n).

    `width` is the range of values. EM starts from the classes found `before`.
    """
    information, n = float((1 / received[1]).sum()), received.shape[1]
    means, variances, counts = group_similar(*received)
    classes = starting_classes(means, width, n)
    if before is not None:
        classes = classes._replace(shares=before.shares.copy(), centres=before.centres.copy())
    active = np.arange(len(classes.sizes))
    for _ in range(_EM_STEPS_PER_SETTING):
        stepped = _step(classes.at(active), means, variances, counts)
        gains = stepped.scores - classes.scores[active]
        for name in ("shares", "centres", "precisions", "scores"):
            getattr(classes, name)[active] = getattr(stepped, name)
        active = active[gains >= _GAIN_TO_STOP]  # most settings end early
        if not len(active):
            break
    # Half of BIC's penalty: k centres and k - 1 shares.
    classes.scores[:] -= (2 * classes.sizes - 1) / 2 * np.log(n)
    classes.scores[:] += np.tile(_LOG_PRIOR, len(classes.sizes) // len(_LOG_PRIOR))
    return classes._replace(information=information, n_agents=n)


def _step(classes, means, variances, counts):
    """A step of EM; the score is the log-likelihood before it."""
    total = variances + classes.spreads[:, None, None] ** 2
    member, logs = _members(classes, means, total)
    member *= counts
    weights = member / total
    precisions = np.maximum(weights.sum(axis=2), _NO_PRECISION)
    centres = np.where(precisions > _NO_PRECISION, weights @ means / precisions, classes.centres)
    # A component that lost its members keeps a share, from which it can come back.
    shares = np.where(classes.shares > 0, np.maximum(member.sum(axis=2), 1e-6), 0.0)
    shares *= (classes.shares.sum(axis=1) / shares.sum(axis=1))[:, None]
    return classes._replace(
        shares=shares, centres=centres, precisions=precisions, scores=logs @ counts
    )


def starting_classes(means, width, n):
    """Start EM with components at the quantiles of the means."""
    most = min(_MOST_CLASSES, n)
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


def group_similar(means, variances):
    """Means (g,), variances and counts of agents; of very many those that are nearly equal."""
    if len(means) <= _MANY_AGENTS:
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
    logs = _log_shares(classes) + _log_normal(means - classes.centres[..., None], total)
    alone = classes.alone[:, None]
    highest = np.maximum(logs.max(axis=1), alone)
    member = np.exp(logs - highest[:, None])
    density = member.sum(axis=1) + np.exp(alone - highest)
    member /= density[:, None]
    return member, highest + np.log(density)


def combine(classes, own_means, own_variances, received=None) -> tuple[Floats, Floats, Floats]:
    """Posterior of agents with exact means (n,), whose sampling variances are known.

    That is their means and variances (n,), and the weights (s * (k + 1), n) of all components.

    `received` (2, n) are the noisy means of the same agents and their variances, if the classes
    were fitted to them, too: each agent then leaves its own out of the centres.
    """
    likely = likely_settings(classes)
    blocks = [slice(i, i + _AGENTS_AT_ONCE) for i in range(0, len(own_means), _AGENTS_AT_ONCE)]
    parts = [
        _combine(
            likely, own_means[b], own_variances[b], None if received is None else received[:, b]
        )
        for b in blocks
    ]
    means, variances, weights = (np.concatenate(part, axis=-1) for part in zip(*parts, strict=True))
    return means, variances, weights


def _combine(classes, own_means, own_variances, received):
    """Posterior of a block of agents: Bayes' rule for every component of every setting."""
    centres, precisions = classes.centres[..., None], classes.precisions[..., None]
    if received is not None:
        centres, precisions = _leave_one_out(classes, received)
    # A centre is uncertain, too: plugged in as known, tight classes would look too sure.
    within = classes.spreads[:, None, None] ** 2 + 1 / precisions
    weight = within / (within + own_variances)
    logs = _log_shares(classes) + _log_normal(own_means - centres, within + own_variances)
    alone = np.broadcast_to(classes.alone[:, None, None], (len(logs), 1, len(own_means)))
    logs = _with_alone(logs, alone) + classes.scores[:, None, None]
    means = _with_alone(
        centres + weight * (own_means - centres), np.broadcast_to(own_means, alone.shape)
    )
    variances = _with_alone(weight * own_variances, np.broadcast_to(own_variances, alone.shape))
    logs, means, variances = (part.reshape(-1, len(own_means)) for part in (logs, means, variances))
    weights = np.exp(logs - logsumexp(logs, axis=0))
    mean = (weights * means).sum(axis=0)
    variance = (weights * (variances + (means - mean) ** 2)).sum(axis=0)
    return mean, variance, weights


def _with_alone(of_components, alone):
    """Values of the components and, after them, of agents that belong to none: (s, k + 1, n)."""
    shape = len(of_components), of_components.shape[1], alone.shape[2]
    return np.concatenate([np.broadcast_to(of_components, shape), alone], axis=1)


def likely_settings(classes):
    """Settings whose weight is not negligible for every agent."""
    return classes.at(np.flatnonzero(classes.scores > classes.scores.max() - _NEGLIGIBLE_SCORE))


def _leave_one_out(classes, received):
    """Centres and their precisions (s, k, n) without each agent's own noisy mean."""
    total = received[1] + classes.spreads[:, None, None] ** 2
    weights = _members(classes, received[0], total)[0] / total
    precisions = np.maximum(classes.precisions[..., None] - weights, _NO_PRECISION)
    sums = (classes.precisions * classes.centres)[..., None] - weights * received[0]
    centres = np.where(precisions > _NO_PRECISION, sums / precisions, classes.centres[..., None])
    return centres, precisions


def same_class_probabilities(classes, weights, received) -> Floats:
    """Probabilities (r, n) that senders with received means (2, n) are of the recipients' classes.

    The weights (s * (k + 1), r) are those of the recipients' posteriors.
    """
    likely = likely_settings(classes)
    total = received[1] + likely.spreads[:, None, None] ** 2
    members = _members(likely, received[0], total)[0]
    members = _with_alone(members, np.zeros((len(members), 1, received.shape[1])))
    return weights.T @ members.reshape(-1, received.shape[1])


def _log_shares(classes):
    """Logs (s, k, 1) of the components' shares."""
    with np.errstate(divide="ignore"):  # empty components
        return np.log(classes.shares)[..., None]


def _log_normal(distance, variance):
    """Log of the normal density at a distance from its centre."""
    return -0.5 * (np.log(2 * np.pi * variance) + distance**2 / variance)
