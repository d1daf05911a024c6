"""Whom an agent counts as its class, and what it makes of their means.

Arrays of pairs have shape (s, r): s senders that r recipients heard. Where all recipients heard the
same, their second axis is 1.
"""

from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_array, eye_array
from scipy.special import ndtri
from sklearn.utils.parallel import Parallel, delayed

from pfl_sklearn.online import _classes
from pfl_sklearn.online._messages import Broadcast

_BLOCK = 1 << 20  # pairs of agents at once
_WIDER = 4.0  # times the range of nine tenths of the means
_GROWTH = 1.02  # of the information, at which classes are looked for again


class Own(NamedTuple):
    """What agents know of themselves (n,): exact means, their variances, numbers of rows.

    `doubt` is by which factor the variances are larger, since they are estimated themselves.
    """

    means: np.ndarray
    variances: np.ndarray
    doubt: np.ndarray
    rows: np.ndarray


class Estimates(NamedTuple):
    """Means of agents and their variances (n,)."""

    means: np.ndarray
    variances: np.ndarray


class Pairs(NamedTuple):
    """What some recipients heard: means and their variances (s, r or 1), by sender (s, r or 1)."""

    recipients: np.ndarray  # (r,)
    senders: np.ndarray
    means: np.ndarray
    variances: np.ndarray


class Hearing(NamedTuple):
    """What agents heard, in units of the range of all values."""

    senders: object
    middle: np.ndarray  # (n,), of the range of each agent's values
    width: np.ndarray  # (n,), of that range
    variances: np.ndarray  # (n,), of a row of each agent

    @property
    def n_agents(self):
        return len(self.width)

    @property
    def is_common(self):
        """Whether all agents heard the same."""
        return isinstance(self.senders, Broadcast)

    def pairs(self, recipients):
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
        variances = self.variances[senders] * heard.data.reshape(shape)
        return Pairs(recipients, senders, means, variances + width**2 * heard.noise.reshape(shape))

    def blocks(self):
        """Recipients, a block at a time."""
        size = max(1, _BLOCK // self.n_agents)
        agents = np.arange(self.n_agents)
        return [agents[i : i + size] for i in range(0, len(agents), size)]


class Test:
    """Agents whose means a test does not tell apart, weighted by their precision.

    The test's level is .05 / ln(t + 1) after t rows, or one minus the given confidence.
    """

    def __init__(self, confidence):
        self.confidence = confidence

    def alike(self, own, pairs):
        """Which senders (s, r) a recipient takes for its class."""
        rows, r = own.rows[pairs.recipients], pairs.recipients
        level = 0.05 / np.log1p(rows) if self.confidence is None else 1 - self.confidence
        distance = np.abs(own.means[r] - pairs.means)
        return distance < ndtri(1 - level / 2) * np.sqrt(own.variances[r] + pairs.variances)


class Oracle:
    """Agents of the same given class, weighted by their precision."""

    def __init__(self, labels):
        self.labels = labels

    def alike(self, own, pairs):
        """Which senders (s, r) a recipient takes for its class."""
        return self.labels[pairs.senders] == self.labels[pairs.recipients]


def pooled(decide, own, hearing):
    """Estimates from the means of those who are alike, and who is (n, n)."""
    found = [_pooled(decide, own, hearing.pairs(block)) for block in hearing.blocks()]
    return Estimates(*np.concatenate(found, axis=1))


def _pooled(decide, own, pairs):
    r = pairs.recipients
    precision = np.where(_others(decide.alike(own, pairs), pairs), 1 / pairs.variances, 0.0)
    total = 1 / own.variances[r] + precision.sum(axis=0)
    mean = (own.means[r] / own.variances[r] + (precision * pairs.means).sum(axis=0)) / total
    return mean, 1 / total


def _others(alike, pairs):
    """Which senders are alike, and not the recipient itself."""
    return alike & (pairs.senders != pairs.recipients)


def same_class(decide, own, hearing):
    """Sparse (n, n): whom each agent takes for its class, itself included."""
    rows, columns = [np.zeros(0, int)], [np.zeros(0, int)]
    for block in hearing.blocks():
        pairs = hearing.pairs(block)
        alike = _others(decide.alike(own, pairs), pairs)
        sender, recipient = np.nonzero(alike)
        rows.append(block[recipient])
        columns.append(np.broadcast_to(pairs.senders, alike.shape)[sender, recipient])
    return _matrix(np.concatenate(rows), np.concatenate(columns), hearing.n_agents)


def _matrix(rows, columns, n):
    found = csr_array((np.ones(len(rows), dtype=bool), (rows, columns)), shape=(n, n))
    return (found + eye_array(n, dtype=bool, format="csr")).astype(bool)


class Mixture:
    """Classes among all means that were heard, weighted by their posterior probability."""

    def __init__(self):
        self.classes = None
        self.width = None  # of the range of all agents' values, if it is bounded
        self.n_jobs = None

    def estimate(self, own, hearing):
        """Posterior means and variances of all agents."""
        if not hearing.is_common:
            return self._one_by_one(own, hearing)
        pairs = hearing.pairs(np.zeros(1, int))
        heard = np.stack([pairs.means[:, 0], pairs.variances[:, 0]])
        self._look(heard)
        found = _classes.combine(self.classes, own.means, own.variances, heard)
        return Estimates(found.means, found.variances)

    def same_class(self, own, hearing):
        """Sparse (n, n): who is of an agent's class with a probability above one half."""
        n = hearing.n_agents
        if n == 1:
            return _matrix([], [], n)
        rows, columns = [np.zeros(0, int)], [np.zeros(0, int)]
        for block in hearing.blocks():
            together = self._together(own, hearing, block)
            recipient, sender = np.nonzero(together > 0.5)
            rows.append(block[recipient])
            columns.append(sender)
        rows, columns = np.concatenate(rows), np.concatenate(columns)
        return _matrix(rows[rows != columns], columns[rows != columns], n)

    def _together(self, own, hearing, block):
        """Probabilities (r, n) that agents are of the class of the recipients in a block."""
        pairs = hearing.pairs(block)
        means, variances = np.broadcast_arrays(pairs.means, pairs.variances)
        if hearing.is_common:
            heard = np.stack([means[:, 0], variances[:, 0]])
            known = _classes.combine(
                self.classes, own.means[block], own.variances[block], heard[:, block]
            )
            return _classes.together(self.classes, known.weights, heard)
        found = np.zeros((len(block), hearing.n_agents))
        for k, recipient in enumerate(block):
            told = np.isfinite(variances[:, k])
            if told.any():
                heard = np.stack([means[told, k], variances[told, k]])
                classes = _classes.find_classes(*heard, self._width(heard[0]))
                one = slice(recipient, recipient + 1)
                known = _classes.combine(classes, own.means[one], own.variances[one])
                found[k, pairs.senders[told, k]] = _classes.together(classes, known.weights, heard)
        return found

    def _look(self, heard):
        """Look for classes, unless little was heard since the last time."""
        before, precision = self.classes, (1 / heard[1]).sum()
        if before is None or before.n_agents != heard.shape[1]:
            before = None
        elif precision < _GROWTH * before.information:
            return
        self.classes = _classes.find_classes(*heard, self._width(heard[0]), before)

    def _width(self, means):
        """Range in which means lie, not much wider than where most of them were heard."""
        widest = (np.ptp(means) or 1.0) if self.width is None else self.width
        return min(widest, _WIDER * np.subtract(*np.quantile(means, [0.95, 0.05])) or widest)

    def _one_by_one(self, own, hearing):
        """Estimates where every agent heard something else."""
        agents = np.arange(hearing.n_agents)
        found = Parallel(n_jobs=self.n_jobs)(
            delayed(self._alone)(own, hearing.pairs(agents[i : i + 1])) for i in agents
        )
        return Estimates(*np.concatenate(found, axis=1))

    def _alone(self, own, pairs):
        """Estimate of one recipient."""
        r, heard = pairs.recipients, np.isfinite(pairs.variances[:, 0])
        if not heard.any():
            return own.means[r], own.variances[r]
        means, variances = pairs.means[heard, 0], pairs.variances[heard, 0]
        classes = _classes.find_classes(means, variances, self._width(means))
        found = _classes.combine(classes, own.means[r], own.variances[r])
        return found.means, found.variances
