"""Whom an agent counts as its class, and what it makes of their means.

Arrays of pairs have shape (s, r): s senders that r recipients heard. Where all recipients heard the
same, their second axis is 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import csr_array, eye_array
from scipy.special import ndtri
from sklearn.utils.parallel import Parallel, delayed

from pfl_sklearn._typing import Floats, Integers
from pfl_sklearn.online._classes import Classes, combine, find_classes, together

# Pairs of agents whose means are looked at together: some arrays of 8 MB.
_PAIRS_AT_ONCE = 1 << 20
# Classes are looked for in this many times the range of nine tenths of the means. One outlier in
# wide bounds would otherwise make every spread on the grid far too wide for the others.
_TIMES_THE_RANGE = 4.0
# Of the information in the messages, at which classes are looked for again. They move little for
# less, and a search costs far more than a message.
_GROWTH = 1.02


class OwnMeans(NamedTuple):
    """What agents know of themselves (n,): exact means, their variances, numbers of rows.

    `doubt` is by which factor the variances are larger, since they are estimated themselves.
    """

    means: Floats
    variances: Floats
    doubt: Floats
    rows: Integers


class HeardPairs(NamedTuple):
    """What some recipients heard: means and their variances (s, r or 1), by sender (s, r or 1)."""

    recipients: Integers  # (r,)
    senders: Integers
    means: Floats
    variances: Floats


class Hearing(NamedTuple):
    """What agents heard, in units of the range of all values."""

    senders: Any  # of messages
    middle: Floats  # (n,), of the range of each agent's values
    width: Floats  # (n,), of that range
    variances: Floats  # (n,), of a row of each agent

    @property
    def n_agents(self) -> int:
        return len(self.width)

    @property
    def is_common(self) -> bool:
        """Whether all agents heard the same."""
        return self.senders.is_common

    def pairs(self, recipients: Integers) -> HeardPairs:
        """What some recipients heard."""
        n = self.n_agents
        if self.is_common:
            senders = streams = np.arange(n)[:, None]
        else:
            turn = np.arange(n - 1)[:, None]
            senders, streams = self.senders.sender(turn, recipients), turn * n + recipients
        heard = self.senders.means(streams.ravel())
        width, shape = self.width[senders], senders.shape
        means = self.middle[senders] + width * heard.values[0].reshape(shape)
        data = self.variances[senders] * heard.data.reshape(shape)
        noise = width**2 * heard.noise.reshape(shape)
        return HeardPairs(recipients, senders, means, data + noise)

    def blocks(self) -> list[Integers]:
        """Blocks of recipients whose pairs fit into memory."""
        size = max(1, _PAIRS_AT_ONCE // self.n_agents)
        agents = np.arange(self.n_agents)
        return [agents[i : i + size] for i in range(0, len(agents), size)]


class Decision:
    """Way of telling whom each agent counts as its class."""

    _help: Any  # own means and hearing to means and variances (2, n)
    _class_of: Any  # own means, hearing and recipients to pairs of recipients and senders

    def estimate(self, own: OwnMeans, hearing: Hearing) -> tuple[Floats, Floats]:
        """Means of all agents with the help of their classes, and their variances."""
        if hearing.n_agents == 1:
            return own.means, own.variances
        return self._help(own, hearing)

    def same_class(self, own: OwnMeans, hearing: Hearing) -> csr_array:
        """Sparse (n, n): whom each agent takes for its class, itself included."""
        n = hearing.n_agents
        pairs = [np.zeros((2, 0), int)]
        if n > 1:
            pairs += [self._class_of(own, hearing, block) for block in hearing.blocks()]
        rows, columns = np.concatenate(pairs, axis=1)
        others = rows != columns
        entries = np.ones(others.sum(), dtype=bool), (rows[others], columns[others])
        return (csr_array(entries, shape=(n, n)) + eye_array(n, dtype=bool, format="csr")).astype(
            bool
        )


class _Acceptance(Decision):
    """Agents that are accepted, weighted by their precision."""

    alike: Any  # own means and pairs to whether a recipient takes a sender for its class (s, r)

    def _help(self, own, hearing):
        blocks = [self._pooled(own, hearing.pairs(block)) for block in hearing.blocks()]
        return np.concatenate(blocks, axis=1)

    def _pooled(self, own, pairs):
        """Means and variances of some recipients, each with those that it accepts."""
        r = pairs.recipients
        # An agent knows its own mean exactly and does not count what it sent.
        accepted = self.alike(own, pairs) & (pairs.senders != r)
        precision = np.where(accepted, 1 / pairs.variances, 0.0)
        total = 1 / own.variances[r] + precision.sum(axis=0)
        mean = (own.means[r] / own.variances[r] + (precision * pairs.means).sum(axis=0)) / total
        return mean, 1 / total

    def _class_of(self, own, hearing, block):
        pairs = hearing.pairs(block)
        alike = self.alike(own, pairs)
        sender, recipient = np.nonzero(alike)
        senders = np.broadcast_to(pairs.senders, alike.shape)[sender, recipient]
        return np.stack([block[recipient], senders])


class TestDecision(_Acceptance):
    """Agents whose means a test does not tell apart.

    The test's level is .05 / ln(t + 1) after t rows, or one minus the given confidence.
    """

    def __init__(self, confidence):
        self.confidence = confidence

    def alike(self, own, pairs):
        r = pairs.recipients
        # The paper's level falls with t, so that errors become rare while the test gains power.
        level = 0.05 / np.log1p(own.rows[r]) if self.confidence is None else 1 - self.confidence
        distance = np.abs(own.means[r] - pairs.means)
        # A sender that was never heard has an infinite variance: it is accepted with weight 0.
        return distance < ndtri(1 - level / 2) * np.sqrt(own.variances[r] + pairs.variances)


class OracleDecision(_Acceptance):
    """Agents to whom the user gave the same label."""

    def __init__(self, labels):
        self.labels = labels

    def alike(self, own, pairs):
        return self.labels[pairs.senders] == self.labels[pairs.recipients]


class MixtureDecision(Decision):
    """Classes among all means that were heard, weighted by their posterior probability.

    The paper accepts whom a test does not reject. While noise is large that is nearly everybody,
    and worse than working alone; a posterior needs evidence for a class instead.
    """

    def __init__(self):
        self.classes: Classes | None = None
        self.width: float | None = None  # of the range of all agents' values, if it is bounded
        self.n_jobs: int | None = None

    def _help(self, own, hearing):
        if not hearing.is_common:
            return self._one_by_one(own, hearing)
        pairs = hearing.pairs(np.zeros(1, int))
        heard = np.stack([pairs.means[:, 0], pairs.variances[:, 0]])
        self._look(heard)
        return combine(self.classes, own.means, own.variances, heard)[:2]

    def _class_of(self, own, hearing, block):
        recipient, sender = np.nonzero(self._together(own, hearing, block) > 0.5)
        return np.stack([block[recipient], sender])

    def _together(self, own, hearing, block):
        """Probabilities (r, n) that agents are of the class of the recipients in a block."""
        pairs = hearing.pairs(block)
        means, variances = np.broadcast_arrays(pairs.means, pairs.variances)
        if hearing.is_common:
            heard = np.stack([means[:, 0], variances[:, 0]])
            posterior = combine(
                self.classes, own.means[block], own.variances[block], heard[:, block]
            )
            return together(self.classes, posterior.weights, heard)
        probabilities = np.zeros((len(block), hearing.n_agents))
        for k, recipient in enumerate(block):
            present = np.isfinite(variances[:, k])
            if present.any():
                heard = np.stack([means[present, k], variances[present, k]])
                classes, posterior = self._alone(own, slice(recipient, recipient + 1), heard)
                senders = pairs.senders[present, k]
                probabilities[k, senders] = together(classes, posterior.weights, heard)
        return probabilities

    def _look(self, heard):
        """Look for classes, unless little was heard since the last time."""
        before, precision = self.classes, (1 / heard[1]).sum()
        if before is None or before.n_agents != heard.shape[1]:  # newcomers may be a class
            before = None
        elif precision < _GROWTH * before.information:
            return
        self.classes = find_classes(heard, self._width(heard[0]), before)

    def _width(self, means):
        """Range in which means lie, not much wider than where most of them were heard."""
        widest = (np.ptp(means) or 1.0) if self.width is None else self.width
        return min(
            widest, _TIMES_THE_RANGE * np.subtract(*np.quantile(means, [0.95, 0.05])) or widest
        )

    def _one_by_one(self, own, hearing):
        """Means and variances (2, n) where every agent heard something else."""
        agents = np.arange(hearing.n_agents)
        estimates = Parallel(n_jobs=self.n_jobs)(
            delayed(self._estimate_of_one)(own, hearing.pairs(agents[i : i + 1])) for i in agents
        )
        return np.concatenate(estimates, axis=1)

    def _estimate_of_one(self, own, pairs):
        """Mean and variance that one recipient estimates for itself."""
        r, present = pairs.recipients, np.isfinite(pairs.variances[:, 0])
        if not present.any():
            return own.means[r], own.variances[r]
        heard = np.stack([pairs.means[present, 0], pairs.variances[present, 0]])
        return self._alone(own, r, heard)[1][:2]

    def _alone(self, own, recipient, heard):
        """Classes among the means that one recipient heard (2, s), and its posterior."""
        classes = find_classes(heard, self._width(heard[0]))
        return classes, combine(classes, own.means[recipient], own.variances[recipient])
