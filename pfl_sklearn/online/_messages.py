"""Agents and the messages between them: what each holds, sends and has heard so far.

Agents are numbered in the order in which they join. Values are in units of the largest change that
replacing a row can make, which is 1, and have one or two coordinates: the value, and its square.
"""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import numpy as np

from pfl_sklearn._clients import rows_by_client
from pfl_sklearn.online._heard_means import (
    Means,
    heard_means,
    moved,
    with_levels,
    with_room,
)
from pfl_sklearn.privacy._mechanisms._noise import noise_generator

# Rows of agents by steps that are added up at once: a few arrays of this size in memory.
_AGENT_STEPS = 1 << 20


class NoNoise:
    """The mechanism of agents who hide nothing."""

    def n_registers(self, n_releases):
        """Numbers that the noise of a stream needs: none."""
        return 0

    def privatize(self, sums, registers, index, rng):
        """Running sums as they are."""
        return sums

    def variance(self, index):
        """Variance of the noise: none."""
        return np.zeros(np.shape(index))


class Senders:
    """What the agents hold and send: exact sums, and noise for every stream of messages.

    Attributes
    ----------
    rows : ndarray of shape (n_agents,)
        Steps of each agent.
    sums : ndarray of shape (n_coordinates, n_agents)
        Exact sums of its values.
    heard : HeardMeans
        What recipients make of the messages, by stream.
    """

    is_common: ClassVar[bool] = False  # whether everybody hears the same
    _dtype: ClassVar[type] = np.float64
    take: Any  # codes (r,) of agents and values (p, r) of their rows to messages
    _place: Any  # number of old agents to the number of streams and the places of the old ones

    def __init__(self, mechanism, weights, n_coordinates, random_state):
        self.mechanism = mechanism
        self.rng, self._seeded = noise_generator(random_state)
        self.rows = np.zeros(0, np.int64)
        self.sums = np.zeros((n_coordinates, 0))
        self.index = np.zeros(0, np.uint16)  # releases of each stream
        self.registers = np.zeros((0, n_coordinates, 0))
        self.heard = heard_means(weights, mechanism, np.zeros((n_coordinates, 0), self._dtype))

    def __getstate__(self):
        """For copies and pickles: a generator stays behind, unless its noise has a seed anyway.

        Otherwise the rows of two copies would be hidden by the same noise, and whoever saw both
        would see the difference of the rows.
        """
        return {**vars(self), "rng": self.rng if self._seeded else None}

    def __setstate__(self, state):
        vars(self).update(state)
        if self.rng is None:
            self.rng, _ = noise_generator(None)

    def join(self, n_new):
        """Take in new agents, who have no rows yet."""
        self.rows = np.append(self.rows, np.zeros(n_new, np.int64))
        self.sums = np.concatenate([self.sums, np.zeros((len(self.sums), n_new))], axis=1)
        n_streams, places = self._place(len(self.rows) - n_new)
        self.index = moved(self.index, n_streams, places)
        self.registers = moved(self.registers, n_streams, places)
        self.heard.move(n_streams, places)

    def means(self, streams: Any) -> Means:
        """What recipients know of the senders of streams."""
        return self.heard.means(streams, self.index[streams])

    def _release(self, streams, exact, rows):
        """Send the sums (p, r) over `rows` of their senders in the given streams."""
        index = self.index[streams].astype(np.int64) + 1
        self.index = with_room(self.index, index.max())
        self.index[streams] = index
        n_registers = self.mechanism.n_registers(int(index.max()))
        self.registers = with_levels(self.registers, n_registers)
        registers = self.registers[:, :, streams]
        sums = self.mechanism.privatize(exact, registers, index, self.rng)
        self.registers[:, :, streams] = registers
        self.heard.hear(streams, index, rows, sums)


class Broadcast(Senders):
    """Every agent sends one stream, a message at each of its steps, and everybody hears it."""

    is_common = True

    def take(self, codes, values):
        """Let agents `codes` (r,) receive rows, whose values (p, r) are in order of time."""
        order, offsets = steps_of(codes, len(self.rows))
        for start, stop in itertools.pairwise(offsets):
            rows = order[start:stop]
            agents = codes[rows]
            if len(agents) == len(self.rows):  # all of them: a slice copies no arrays
                rows, agents = rows[np.argsort(agents)], slice(None)
            self.sums[:, agents] += values[:, rows]
            self.rows[agents] += 1
            self._release(agents, self.sums[:, agents], self.rows[agents])

    def _place(self, n_before):
        """Number of streams, and the places of the old ones now."""
        return len(self.rows), np.arange(n_before)


class Pairwise(Senders):
    """Every agent asks one other at each of its steps, in turn, and only it hears the answer.

    The others are asked in the order in which they joined. Stream ``turn * n_agents + a`` is what
    agent a hears from the one whose turn is `turn`, from 0. What was heard has single precision;
    noise has not, or it would not cover the lowest bits of the sums.
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

    def sender(self, turn, agent):
        """Agents that are asked: turns skip the recipient itself."""
        return turn + (turn >= agent)

    def _steps_at_once(self, n):
        """Steps in which no stream is asked twice."""
        return max(1, min(n - 1, _AGENT_STEPS // n))

    def _ask(self, present, sums, counts):
        """Queries of agents where `present` (l, n), whose senders have `sums` and `counts`."""
        step, agent = np.nonzero(present)
        turn = self._whom(agent, (present.cumsum(axis=0) - 1)[step, agent])
        sender = self.sender(turn, agent)
        # Who has no row yet has nothing to tell; its turn is over all the same.
        heard = (turn >= 0) & (counts[step, sender] > 0)
        step, sender = step[heard], sender[heard]
        streams = (turn * len(self.rows) + agent)[heard]
        if len(streams):
            self._release(streams, sums[:, step, sender], counts[step, sender])

    def _whom(self, agent, ahead):
        """Whose turn it is for each agent, `ahead` steps from its next; -1 for nobody's."""
        others = len(self.rows) - 1
        turns = (self.turns[agent] + ahead) % others
        self.turns = (self.turns + np.bincount(agent, minlength=len(self.turns))) % others
        return turns

    def _place(self, n_before):
        # The others of an old agent have the turns that they had; newcomers come last.
        n = len(self.rows)
        turn, agent = np.divmod(np.arange(max(n_before - 1, 0) * n_before), max(n_before, 1))
        return (n - 1) * n, turn * n + agent


class Restricted(Pairwise):
    """Pairwise messages of those alone that a recipient took for its class one step before."""

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

    def _whom(self, agent, ahead):
        others = len(self.rows) - 1
        turns = (self.turns[agent] + np.arange(others)[:, None]) % others
        alike = np.ones(turns.shape, bool) if self.alike is None else self.alike[turns, agent]
        next_one = turns[alike.argmax(axis=0), np.arange(len(agent))]
        chosen = np.where(alike.any(axis=0), next_one, -1)
        self.turns[agent] = np.where(chosen < 0, self.turns[agent], (chosen + 1) % others)
        return chosen


def steps_of(codes, n_agents):
    """Rows in the order of steps, and where each step begins and the last one ends.

    Step j holds the j-th row of every agent that has so many.
    """
    order, offsets = rows_by_client(codes, n_agents)
    sizes = np.diff(offsets)
    step = np.arange(len(codes)) - np.repeat(offsets[:-1], sizes)
    by_step = np.argsort(step, kind="stable")
    return order[by_step], np.concatenate([[0], np.cumsum(np.bincount(step))])
