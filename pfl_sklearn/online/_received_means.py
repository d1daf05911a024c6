"""Unbiased means, with variances, that recipients form from the messages of a sender.

A message is a noisy running sum. The classes here hold arrays with streams last, (n_coordinates,
n_streams) or (n_streams,), in units of the largest change of a value. The variance of a mean is
the variance of a row times `data`, plus `noise`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pfl_sklearn._typing import Floats, Integers

# Pairs of agents whose means are looked at together: some arrays of 8 MB.
_PAIRS_AT_ONCE = 1 << 20


class Means(NamedTuple):
    """Means of streams (p, n), and the two parts of their variance (n,)."""

    values: Floats
    data: Floats
    noise: Floats


class ReceivedPairs(NamedTuple):
    """Received means and their variances (s, r or 1) of some recipients, by sender (s, r or 1)."""

    recipients: Integers  # (r,)
    senders: Integers
    means: Floats
    variances: Floats


class ReceivedMessages(NamedTuple):
    """Messages that the agents received, in units of the range of all values."""

    senders: Any  # of messages
    middle: Floats  # (n,), of the range of each agent's values
    width: Floats  # (n,), of that range
    variances: Floats  # (n,), of a row of each agent

    @property
    def n_agents(self) -> int:
        return len(self.width)

    @property
    def is_common(self) -> bool:
        """Whether all messages go to everybody."""
        return self.senders.is_common

    def pairs(self, recipients: Integers) -> ReceivedPairs:
        """Received means of some recipients."""
        senders, streams = self.senders.streams_to(recipients)
        received = self.senders.means(streams.ravel())
        width, shape = self.width[senders], senders.shape
        means = self.middle[senders] + width * received.values[0].reshape(shape)
        data = self.variances[senders] * received.data.reshape(shape)
        noise = width**2 * received.noise.reshape(shape)
        return ReceivedPairs(recipients, senders, means, data + noise)

    def blocks(self) -> list[Integers]:
        """Blocks of recipients whose pairs fit into memory."""
        size = max(1, _PAIRS_AT_ONCE // self.n_agents)
        agents = np.arange(self.n_agents)
        return [agents[i : i + size] for i in range(0, len(agents), size)]


class ByStream:
    """Arrays with streams last, which move when agents join."""

    def __init__(self, mechanism, sums):
        self.mechanism = mechanism
        self.sums = sums

    def move(self, n_streams: int, places: Integers) -> None:
        """Hold `n_streams` streams, the old ones at `places`, the new ones without a message."""
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray):
                setattr(self, name, with_streams_at(value, n_streams, places))
            elif isinstance(value, ByStream):
                value.move(n_streams, places)


class ReceivedMeans(ByStream):
    """Means that recipients form from the messages of streams."""

    def receive(self, streams: Any, releases: Integers, rows: Integers, sums: Floats) -> None:
        """Take in one message of each of `streams` (r,), an array or a slice.

        It is number `releases` (r,) of its stream, from 1, and holds noisy `sums` (p, r) over the
        `rows` (r,) that the sender had by then.
        """
        raise NotImplementedError

    def means(self, streams: Any, releases: Integers) -> Means:
        """Means of streams after these releases; before the first their variance is infinite."""
        raise NotImplementedError


def with_streams_at(values, n_streams, places):
    """Values (..., n) as an array (..., n_streams) that holds them at `places`, and zeros."""
    array = np.zeros((*values.shape[:-1], n_streams), values.dtype)
    array[..., places] = values
    return array


def with_room(counts, largest):
    """Counts (n,), in wider integers if theirs are too narrow for `largest`."""
    return counts if largest <= np.iinfo(counts.dtype).max else counts.astype(np.int64)


def with_levels(registers, n_levels):
    """Registers (levels, ...) with `n_levels` levels or more, the new ones zero."""
    n_missing = n_levels - len(registers)
    if n_missing <= 0:
        return registers
    return np.concatenate([registers, np.zeros((n_missing, *registers.shape[1:]), registers.dtype)])


class LastMean(ReceivedMeans):
    """The latest message alone."""

    def __init__(self, mechanism, sums):
        super().__init__(mechanism, sums)
        # Pairs of agents are many: two bytes each until somebody has more rows.
        self.rows = np.zeros(sums.shape[1], np.uint16)

    def receive(self, streams, releases, rows, sums):
        self.sums[:, streams] = sums
        self.rows = with_room(self.rows, rows.max())
        self.rows[streams] = rows

    def means(self, streams, releases):
        rows = np.maximum(self.rows[streams], 1).astype(float)
        silent = np.where(self.rows[streams] > 0, 0.0, np.inf)
        noise = self.mechanism.variance(releases) / rows**2
        return Means(self.sums[:, streams] / rows, 1 / rows + silent, noise)


class _WeightedBlocks(ReceivedMeans):
    """Linear combinations of noisy blocks, `sums`, with the weights of least noise.

    A block of n rows is a measurement of n times the mean. Where the noise has variance s2, its
    weight is n / s2, and the mean is the weighted sum of blocks over that of their rows.
    """

    def __init__(self, mechanism, sums):
        super().__init__(mechanism, sums)
        n_streams = sums.shape[1]
        self.gain = np.zeros(n_streams)  # of weights times rows
        self.spread = np.zeros(n_streams)  # of the squared weights on the rows' values

    def means(self, streams, releases):
        return least_noise_means(self.sums[:, streams], self.gain[streams], self.spread[streams])


class BestBlocks(_WeightedBlocks):
    """Blocks between two messages, whose noise is independent."""

    def __init__(self, mechanism, sums):
        super().__init__(mechanism, sums)
        self.last = np.zeros_like(sums)  # the latest message, and its rows
        self.rows = np.zeros(sums.shape[1], np.int32)

    def receive(self, streams, releases, rows, sums):
        block, n_rows = sums - self.last[:, streams], rows - self.rows[streams]
        weight = n_rows / self.mechanism.noise_std**2
        self.sums[:, streams] += weight * block
        self.gain[streams] += weight * n_rows
        self.spread[streams] += weight**2 * n_rows
        self.last[:, streams] = sums
        self.rows[streams] = rows


class BestTree(_WeightedBlocks):
    """Blocks of a binary tree, which overlap."""

    def __init__(self, mechanism, sums):
        super().__init__(mechanism, sums)
        # By length of the block: its noisy sum, rows, and total weight on its rows.
        self.blocks = np.zeros((0, len(sums) + 2, sums.shape[1]))

    def receive(self, streams, releases, rows, sums):
        new = releases & -releases  # length of the block that the release closes
        self.blocks = with_levels(self.blocks, int(releases.max()).bit_length())
        lengths = 1 << np.arange(len(self.blocks))[:, None]
        is_new, open_longer = lengths == new, (lengths & releases != 0) & (lengths != new)
        open_blocks = self.blocks[:, :, streams]
        longer = (open_blocks[:, :-1] * open_longer[:, None]).sum(axis=0)
        block = np.concatenate([sums, rows[None]]) - longer  # sums and rows of the new block
        inside = (open_blocks[:, -1] * (lengths < new)).sum(axis=0)  # weight on it so far
        stds = np.array([self.mechanism.noise_std(level) for level in range(len(lengths))])
        weight = block[-1] / (is_new * stds[:, None] ** 2).sum(axis=0)
        self.sums[:, streams] += weight * block[:-1]
        self.gain[streams] += weight * block[-1]
        # Its rows have the weights of shorter blocks already: the squares of sums.
        self.spread[streams] += 2 * weight * inside + weight**2 * block[-1]
        fresh = np.concatenate([block, (inside + weight * block[-1])[None]])
        self.blocks[:, :, streams] = open_blocks * open_longer[:, None] + fresh * is_new[:, None]


class BestSquareRoot(ReceivedMeans):
    """The same for the square-root factorization: white messages, weighted by their gain."""

    def __init__(self, mechanism, sums):
        super().__init__(mechanism, sums)
        self.last = np.zeros_like(sums)
        self.rows = np.zeros(sums.shape[1], np.int32)
        self.registers = np.zeros((len(mechanism.encoder.gaps), *sums.shape))
        self.response = mechanism.response(1)

    def receive(self, streams, releases, rows, sums):
        self._reach(int(rows.max()))
        _, weights = self.mechanism.encoder
        registers = self.registers[:, :, streams]
        registers *= self.mechanism.encoder.decay[:, None, None]
        registers += sums - self.last[:, streams]
        white = np.tensordot(weights, registers, axes=1)
        self.sums[:, streams] += self.response.gain[rows - 1] * white
        self.registers[:, :, streams] = registers
        self.last[:, streams] = sums
        self.rows[streams] = rows

    def means(self, streams, releases):
        step = self.rows[streams] - 1
        scale = self.mechanism.noise_std**2
        gain = np.where(step < 0, 0.0, self.response.squares[step] / scale)
        spread = self.response.spread[step] / scale**2
        return least_noise_means(self.sums[:, streams] / scale, gain, spread)

    def _reach(self, n_steps):
        """Extend the known response to a constant to 2 n steps, so that this is rarely needed."""
        if n_steps > len(self.response.gain):
            most = self.mechanism.horizon or 2 * n_steps
            self.response = self.mechanism.response(min(2 * n_steps, most))


def least_noise_means(sums, gain, spread):
    """Means whose noise has variance 1 / gain."""
    received = gain > 0
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.where(received, sums / gain, 0.0)
        return Means(values, np.where(received, spread / gain**2, np.inf), 1 / gain)
