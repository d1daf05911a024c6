"""Agents and the messages between them: what each holds, sends and has heard so far.

Agents are numbered in the order in which they join. Values are in units of the largest change that
replacing a row can make, which is 1, and have one or two coordinates: the value, and its square.
"""

import itertools

import numpy as np

from pfl_sklearn._clients import rows_by_client
from pfl_sklearn.online._heard_means import Heard, moved, statistic, with_room
from pfl_sklearn.privacy._mechanisms._noise import noise_generator

_BATCH = 1 << 20  # rows of a batch of steps


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
    heard : statistic
        What recipients make of the messages, by stream.
    """

    _dtype = np.float64

    def __init__(self, mechanism, weights, n_coordinates, random_state):
        self.mechanism = mechanism
        self.weights = weights
        self.rng, self._seeded = noise_generator(random_state)
        self.rows = np.zeros(0, np.int64)
        self.sums = np.zeros((n_coordinates, 0))
        self.index = np.zeros(0, np.uint16)  # releases of each stream
        self.registers = np.zeros((0, n_coordinates, 0))
        self.heard = None

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
        if self.heard is None:
            sums = np.zeros((len(self.sums), n_streams), self._dtype)
            self.heard = statistic(self.weights, self.mechanism, sums)
        else:
            self.heard.move(n_streams, places)

    def means(self, streams):
        """What recipients know of the senders of streams."""
        return self.heard.means(streams, self.index[streams])

    def _release(self, streams, exact, rows):
        """Send the sums (p, r) over `rows` of their senders in the given streams."""
        index = self.index[streams].astype(np.int64) + 1
        self.index = with_room(self.index, index.max())
        self.index[streams] = index
        mechanism, p = self.mechanism, len(self.sums)
        missing = mechanism.n_registers(int(index.max())) - len(self.registers)
        if missing > 0:
            more = np.zeros((missing, p, self.registers.shape[2]), self.registers.dtype)
            self.registers = np.concatenate([self.registers, more])
        registers = self.registers[:, :, streams]
        message = mechanism.privatize(exact, registers, index, self.rng)
        self.registers[:, :, streams] = registers
        self.heard.hear(Heard(streams, index, rows, message))


class Broadcast(Senders):
    """Every agent sends one stream, a message at each of its steps, and everybody hears it."""

    def take(self, codes, values):
        """Let agents `codes` (r,) receive rows, whose values (p, r) are in order of time."""
        order, offsets = steps_of(codes, len(self.rows))
        for start, stop in itertools.pairwise(offsets):
            rows = order[start:stop]
            agents = codes[rows]
            if len(agents) == len(self.rows):
                rows, agents = rows[np.argsort(agents)], slice(None)
            self.sums[:, agents] += values[:, rows]
            self.rows[agents] += 1
            self._release(agents, self.sums[:, agents], self.rows[agents])

    def _place(self, n_before):
        """Numbers of streams, and the places of the old ones now."""
        return len(self.rows), np.arange(n_before)


class Pairwise(Senders):
    """Every agent asks one other at each of its steps, in turn, and only it hears the answer.

    The others are asked in the order in which they joined. Stream ``turn * n_agents + a`` is what
    agent a hears from the one whose turn is `turn`, from 0. What was heard has single precision;
    noise has not, or it would not cover the lowest bits of the sums.
    """

    _dtype = np.float32

    def join(self, n_new):
        """Take in new agents, who have no rows yet."""
        super().join(n_new)
        turns = self.turns if hasattr(self, "turns") else np.zeros(0, int)
        self.turns = np.append(turns, np.zeros(n_new, int))  # whose turn is next, by agent

    def take(self, codes, values):
        """Let agents `codes` (r,) receive rows, whose values (p, r) are in order of time."""
        n = len(self.rows)
        order, offsets = steps_of(codes, n)
        size = self._steps_at_once(n)
        for first in range(0, len(offsets) - 1, size):
            ends = offsets[first : first + size + 1]
            rows, steps = (
                order[ends[0] : ends[-1]],
                np.repeat(np.arange(len(ends) - 1), np.diff(ends)),
            )
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
        """Agents that are asked."""
        return turn + (turn >= agent)

    def _steps_at_once(self, n):
        """Steps in which no stream is asked twice."""
        return max(1, min(n - 1, _BATCH // n))

    def _ask(self, present, sums, counts):
        """Queries of agents where `present` (l, n), whose senders have `sums` and `counts`."""
        step, agent = np.nonzero(present)
        turn = self._whom(agent, (present.cumsum(axis=0) - 1)[step, agent])
        sender = self.sender(turn, agent)
        heard = (turn >= 0) & (counts[step, sender] > 0)
        step, sender = step[heard], sender[heard]
        streams = (turn * len(self.rows) + agent)[heard]
        if len(streams):
            self._release(streams, sums[:, step, sender], counts[step, sender])

    def _whom(self, agent, ahead):
        """Whose turn it is for each agent, `ahead` steps from its next; -1 for nobody's."""
        others = len(self.rows) - 1
        found = (self.turns[agent] + ahead) % others
        self.turns = (self.turns + np.bincount(agent, minlength=len(self.turns))) % others
        return found

    def _place(self, n_before):
        n = len(self.rows)
        turn, agent = np.divmod(np.arange(max(n_before - 1, 0) * n_before), max(n_before, 1))
        return (n - 1) * n, turn * n + agent


class Restricted(Pairwise):
    """Pairwise messages of those alone that a recipient took for its class one step before."""

    accepts = None  # function that tells whom each agent takes for its class, by turn (n - 1, n)

    def join(self, n_new):
        """Take in new agents, who have no rows yet."""
        super().join(n_new)
        self.alike = None

    def _steps_at_once(self, n):
        return 1

    def _ask(self, present, sums, counts):
        super()._ask(present, sums, counts)
        self.alike = self.accepts()

    def _whom(self, agent, ahead):
        others = len(self.rows) - 1
        turns = (self.turns[agent] + np.arange(others)[:, None]) % others
        alike = np.ones(turns.shape, bool) if self.alike is None else self.alike[turns, agent]
        next_one = turns[alike.argmax(axis=0), np.arange(len(agent))]
        found = np.where(alike.any(axis=0), next_one, -1)
        self.turns[agent] = np.where(found < 0, self.turns[agent], (found + 1) % others)
        return found


def steps_of(codes, n_agents):
    """Rows in the order of steps, and where each step begins and the last one ends.

    Step j holds the j-th row of every agent that has so many.
    """
    order, offsets = rows_by_client(codes, n_agents)
    sizes = np.diff(offsets)
    step = np.arange(len(codes)) - np.repeat(offsets[:-1], sizes)
    by_step = np.argsort(step, kind="stable")
    return order[by_step], np.concatenate([[0], np.cumsum(np.bincount(step))])
