"""Messages between pairs of agents, by Algorithm 1 of Yakimenka et al. (2024), and their readers.

Every pair has noise of its own, so that all recipients together know far more than one of them. One
stream of messages for everybody protects against all of them with less noise.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from sklearn.utils.parallel import Parallel, delayed

from pfl_sklearn.online._decisions import (
    MixtureDecision,
    combine,
    find_classes,
    same_class_probabilities,
)
from pfl_sklearn.online._messages import Senders, steps_of

# Rows of agents by steps that are added up at once: a few arrays of this size in memory.
_AGENT_STEPS = 1 << 20
_LEAK = (
    "schedule='restricted' asks only those whose means seem equal, so whom an agent asks tells its "
    "exact mean: nothing protects the agents. Use schedule='round_robin'."
)
_COLLUSION = (
    "every pair of agents has noise of its own, so epsilon={:.4g} was bought against a single "
    "recipient, and all recipients together know far more: epsilon is what it comes to against "
    "them. mechanism='sqrt' protects against all of them with less noise."
)


class Pairwise(Senders):
    """Every agent asks one other at each of its steps, in turn; nobody else gets the answer.

    The others are asked in the order in which they joined. Stream ``turn * n_agents + a`` is what
    agent a receives from the one whose turn is `turn`, from 0. Received sums have single precision.
    Noise has double precision, or it would not cover the lowest bits of the sums.
    """

    _dtype = np.float32

    def __init__(self, *args):
        super().__init__(*args)
        self.turns = np.zeros(0, int)  # whose turn is next, by agent

    def join(self, n_new):
        """Take in new agents, who have no rows yet."""
        super().join(n_new)
        self.turns = np.append(self.turns, np.zeros(n_new, int))

    def take(self, codes, values):
        """Let agents `codes` (r,) receive rows, whose values (p, r) are in order of time."""
        n = len(self.rows)
        order, offsets = steps_of(codes, n)
        size = self._steps_at_once(n)
        for first in range(0, len(offsets) - 1, size):
            ends = offsets[first : first + size + 1]
            rows = order[ends[0] : ends[-1]]
            steps = np.repeat(np.arange(len(ends) - 1), np.diff(ends))
            present = np.zeros((len(ends) - 1, n), dtype=bool)
            present[steps, codes[rows]] = True
            received = np.zeros((len(values), *present.shape))
            received[:, steps, codes[rows]] = values[:, rows]
            sums = self.sums[:, None] + received.cumsum(axis=1)
            counts = self.rows + present.cumsum(axis=0)
            self.sums, self.rows = sums[:, -1], counts[-1]
            if n > 1:
                self._ask(present, sums, counts)

    def streams_to(self, recipients):
        """Senders (n - 1, r), by turn, whom each recipient asks, and their streams."""
        turn = np.arange(len(self.rows) - 1)[:, None]
        return asked_agents(turn, recipients), turn * len(self.rows) + recipients

    def costs(self, steps):
        """Gaussian-DP parameters of a row against all recipients, and of all rows of an agent."""
        # The noise is independent for each of the others.
        mu = self.mechanism.mu * math.sqrt(self._n_others)
        # They exchange messages at any time: at worst all rows of an agent lie between two of them.
        return mu, steps * mu

    def caveats(self, epsilon):
        """Warnings of the report: recipients may pool their messages."""
        return (_COLLUSION.format(epsilon),) if self._n_others > 1 else ()

    @property
    def _n_others(self):
        return max(len(self.rows) - 1, 1)

    def _steps_at_once(self, n):
        """Steps in which no stream is asked twice."""
        return max(1, min(n - 1, _AGENT_STEPS // n))

    def _ask(self, present, sums, counts):
        """Queries of agents where `present` (l, n), whose senders have `sums` and `counts`."""
        step, agent = np.nonzero(present)
        turn = self._next_turns(agent, (present.cumsum(axis=0) - 1)[step, agent])
        sender = asked_agents(turn, agent)
        # Who has no row yet has nothing to tell; its turn is over all the same.
        received = (turn >= 0) & (counts[step, sender] > 0)
        step, sender = step[received], sender[received]
        streams = (turn * len(self.rows) + agent)[received]
        if len(streams):
            self._release(streams, sums[:, step, sender], counts[step, sender])

    def _next_turns(self, agent, ahead):
        """Whose turn it is for each agent, `ahead` steps from its next; -1 for nobody's."""
        others = len(self.rows) - 1
        turns = (self.turns[agent] + ahead) % others
        self.turns = (self.turns + np.bincount(agent, minlength=len(self.turns))) % others
        return turns

    def _stream_places(self, n_before):
        # The others of an old agent have the turns that they had; newcomers come last.
        n = len(self.rows)
        turn, agent = np.divmod(np.arange(max(n_before - 1, 0) * n_before), max(n_before, 1))
        return (n - 1) * n, turn * n + agent


class Restricted(Pairwise):
    """Pairwise messages of those alone that a recipient took for its class one step before."""

    leak = _LEAK
    accepts: Any = None  # function that tells whom each agent takes for its class: (n - 1, n)

    def join(self, n_new):
        """Take in new agents, who have no rows yet."""
        super().join(n_new)
        self.alike = None  # newcomers are asked before anybody is left out

    def _steps_at_once(self, n):
        return 1  # whom to ask depends on the answers of the step before

    def _ask(self, present, sums, counts):
        super()._ask(present, sums, counts)
        self.alike = self.accepts()

    def _next_turns(self, agent, ahead):
        others = len(self.rows) - 1
        turns = (self.turns[agent] + np.arange(others)[:, None]) % others
        alike = np.ones(turns.shape, bool) if self.alike is None else self.alike[turns, agent]
        next_one = turns[alike.argmax(axis=0), np.arange(len(agent))]
        chosen = np.where(alike.any(axis=0), next_one, -1)
        self.turns[agent] = np.where(chosen < 0, self.turns[agent], (chosen + 1) % others)
        return chosen


def asked_agents(turn, agent):
    """Agents whose turn it is: turns skip the recipient itself."""
    return turn + (turn >= agent)


def means_by_pair(own_means, messages):
    """Means and variances (n, n) of senders, by recipient first; own ones in the diagonal.

    NaN and infinity without messages.
    """
    pairs = messages.pairs(np.arange(messages.n_agents))
    means, variances = np.diag(own_means.means), np.diag(own_means.variances)
    means[pairs.recipients, pairs.senders] = np.where(
        np.isinf(pairs.variances), np.nan, pairs.means
    )
    variances[pairs.recipients, pairs.senders] = pairs.variances
    return means, variances


def pooled_by_sender(messages):
    """Means (k,) of senders with messages, pooled over their recipients, and their variances."""
    n = messages.n_agents
    precision, sums = np.zeros(n), np.zeros(n)
    for block in messages.blocks():
        pairs = messages.pairs(block)
        weight = 1 / pairs.variances
        precision += np.bincount(pairs.senders.ravel(), weight.ravel(), n)
        sums += np.bincount(pairs.senders.ravel(), (weight * pairs.means).ravel(), n)
    received = precision > 0
    # Noise is new for every recipient, the rows are the same.
    data = messages.variances[received] / messages.senders.rows[received]
    return sums[received] / precision[received], np.maximum(1 / precision[received], data)


class PairwiseMixture(MixtureDecision):
    """Classes that each recipient finds by itself, among the means that it received."""

    def _estimate(self, own_means, messages):
        agents = np.arange(messages.n_agents)
        estimates = Parallel(n_jobs=self.n_jobs)(
            delayed(self._estimate_of_one)(own_means, messages.pairs(agents[i : i + 1]))
            for i in agents
        )
        return np.concatenate(estimates, axis=1)

    def _estimate_of_one(self, own_means, pairs):
        """Mean and variance that one recipient estimates for itself."""
        r, present = pairs.recipients, np.isfinite(pairs.variances[:, 0])
        if not present.any():
            return own_means.means[r], own_means.variances[r]
        received = np.stack([pairs.means[present, 0], pairs.variances[present, 0]])
        return self._alone(own_means, r, received)[1][:2]

    def _alone(self, own_means, recipient, received):
        """Classes among the means that one recipient received (2, s), and its posterior."""
        classes = find_classes(received, self._width(received[0]))
        return classes, combine(classes, own_means.means[recipient], own_means.variances[recipient])

    def _same_class_probabilities(self, own_means, messages, block):
        pairs = messages.pairs(block)
        probabilities = np.zeros((len(block), messages.n_agents))
        for k, recipient in enumerate(block):
            present = np.isfinite(pairs.variances[:, k])
            if present.any():
                received = np.stack([pairs.means[present, k], pairs.variances[present, k]])
                classes, (*_, weights) = self._alone(
                    own_means, slice(recipient, recipient + 1), received
                )
                senders = pairs.senders[present, k]
                probabilities[k, senders] = same_class_probabilities(classes, weights, received)
        return probabilities
