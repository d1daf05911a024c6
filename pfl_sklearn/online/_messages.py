"""Agents and the messages between them: exact sums, noise, and received means.

Agents are numbered in the order in which they join. Values are in units of the largest change that
replacing a row can make, which is 1, and have one or two coordinates: the value, and its square.
"""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import numpy as np

from pfl_sklearn._clients import rows_by_client
from pfl_sklearn.online._printed._running_means import MeanOfMeans
from pfl_sklearn.online._received_means import (
    BestBlocks,
    BestSquareRoot,
    BestTree,
    LastMean,
    Means,
    ReceivedMeans,
    with_levels,
    with_room,
    with_streams_at,
)
from pfl_sklearn.privacy._mechanisms._binary_tree import BinaryTree
from pfl_sklearn.privacy._mechanisms._noise import noise_generator
from pfl_sklearn.privacy._mechanisms._printed._partial_sums import PartialSums
from pfl_sklearn.privacy._mechanisms._square_root import SquareRootSums

# Linear combinations of messages with the least noise, by their mechanism.
_BEST: dict[type, type[ReceivedMeans]] = {
    PartialSums: BestBlocks,
    BinaryTree: BestTree,
    SquareRootSums: BestSquareRoot,
}


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
    """Exact sums of the agents, and noise for every stream of messages.

    `rows` (n_agents,) are the agents' steps, `sums` (n_coordinates, n_agents) the exact sums of
    their values, and `received` the ReceivedMeans that recipients form from the messages, by
    stream.
    """

    is_common: ClassVar[bool] = False  # whether all messages go to everybody
    leak: ClassVar[str] = ""  # warning of the report where nothing protects the agents
    _dtype: ClassVar[type] = np.float64
    take: Any  # codes (r,) of agents and values (p, r) of their rows to messages
    streams_to: Any  # recipients (r,) to their senders and streams, both (s, r or 1)
    costs: Any  # steps of an agent to Gaussian-DP parameters of a row, and of all of its rows
    caveats: Any  # the epsilon asked for to warnings of the report
    _stream_places: (
        Any  # number of old agents to the number of streams and the places of the old ones
    )

    def __init__(self, mechanism, weights, n_coordinates, random_state):
        self.mechanism = mechanism
        self.rng, self._seeded = noise_generator(random_state)
        self.rows = np.zeros(0, np.int64)
        self.sums = np.zeros((n_coordinates, 0))
        self.index = np.zeros(0, np.uint16)  # releases of each stream
        self.registers = np.zeros((0, n_coordinates, 0))
        self.received = received_means(
            weights, mechanism, np.zeros((n_coordinates, 0), self._dtype)
        )

    def __getstate__(self):
        """For copies and pickles: a generator stays behind, unless its noise has a seed anyway."""
        # Otherwise the same noise would hide the rows of two copies, and the difference of two
        # messages would reveal the difference of the rows.
        return {**vars(self), "rng": self.rng if self._seeded else None}

    def __setstate__(self, state):
        vars(self).update(state)
        if self.rng is None:
            self.rng, _ = noise_generator(None)

    def join(self, n_new):
        """Take in new agents, who have no rows yet."""
        self.rows = np.append(self.rows, np.zeros(n_new, np.int64))
        self.sums = np.concatenate([self.sums, np.zeros((len(self.sums), n_new))], axis=1)
        n_streams, places = self._stream_places(len(self.rows) - n_new)
        self.index = with_streams_at(self.index, n_streams, places)
        self.registers = with_streams_at(self.registers, n_streams, places)
        self.received.move(n_streams, places)

    def means(self, streams: Any) -> Means:
        """Means of the senders of streams, as recipients know them."""
        return self.received.means(streams, self.index[streams])

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
        self.received.receive(streams, index, rows, sums)


class Broadcast(Senders):
    """Every agent sends one stream, a message at each of its steps, to everybody."""

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

    def streams_to(self, recipients):
        """All agents (n, 1), whatever the recipients; everybody has one stream."""
        everyone = np.arange(len(self.rows))[:, None]
        return everyone, everyone

    def costs(self, steps):
        """Gaussian-DP parameters of a row against everybody, and of all rows of an agent."""
        # Of everybody's messages the mechanism knows what all rows of an agent cost together.
        return self.mechanism.mu, max(self.mechanism.all_values_mu(steps), self.mechanism.mu)

    def caveats(self, epsilon):
        """Warnings of the report: none."""
        return ()

    def _stream_places(self, n_before):
        """Number of streams, and the places of the old ones now."""
        return len(self.rows), np.arange(n_before)


def steps_of(codes, n_agents):
    """Rows in the order of steps, and where each step begins and the last one ends."""
    # Step j holds the j-th row of every agent that has so many.
    order, offsets = rows_by_client(codes, n_agents)
    sizes = np.diff(offsets)
    step = np.arange(len(codes)) - np.repeat(offsets[:-1], sizes)
    by_step = np.argsort(step, kind="stable")
    return order[by_step], np.concatenate([[0], np.cumsum(np.bincount(step))])


def received_means(weights, mechanism, sums) -> ReceivedMeans:
    """Means of streams by their weights; `sums` (p, n_streams) are zeros of the type to be held."""
    if weights == "last":
        return LastMean(mechanism, sums)
    if weights == "blue":
        return _BEST[type(mechanism)](mechanism, sums)
    return MeanOfMeans(mechanism, sums, window=weights == "wmom")
