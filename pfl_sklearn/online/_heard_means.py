"""What a recipient makes of the messages of one sender: an unbiased mean, and its variance.

A message is a noisy running sum. The classes here hold arrays with streams last, (n_coordinates,
n_streams) or (n_streams,), in units of the largest change of a value. The variance of a mean is
the variance of a row times `data`, plus `noise`.
"""

from typing import NamedTuple

import numpy as np

from pfl_sklearn.privacy._mechanisms._binary_tree import BinaryTree
from pfl_sklearn.privacy._mechanisms._partial_sums import PartialSums
from pfl_sklearn.privacy._mechanisms._square_root import SquareRootSums


class Heard(NamedTuple):
    """Messages of one release of some streams: arrays with streams last."""

    streams: np.ndarray  # (r,), which of them
    index: np.ndarray  # (r,), number of the release of each stream, from 1
    rows: np.ndarray  # (r,), rows that the sender had by then
    sums: np.ndarray  # (p, r), noisy sums over these rows


class Means(NamedTuple):
    """Means of streams (p, n), and the two parts of their variance (n,)."""

    values: np.ndarray
    data: np.ndarray
    noise: np.ndarray


class Statistic:
    """What recipients make of the messages of streams.

    ``means(streams, index)`` is what they know after the releases `index` of these streams.
    """

    def move(self, n_streams, places):
        """Hold `n_streams` streams, the old ones at `places`, the new ones without a message."""
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray):
                setattr(self, name, moved(value, n_streams, places))
            elif isinstance(value, Statistic):
                value.move(n_streams, places)


def moved(values, n_streams, places):
    """Values (..., n) as an array (..., n_streams) that holds them at `places`, and zeros."""
    found = np.zeros((*values.shape[:-1], n_streams), values.dtype)
    found[..., places] = values
    return found


def with_room(counts, largest):
    """Counts (n,), in larger integers if they have to hold `largest`."""
    return counts if largest <= np.iinfo(counts.dtype).max else counts.astype(np.int64)


class LastMean(Statistic):
    """The latest message alone."""

    def __init__(self, mechanism, sums):
        self.mechanism = mechanism
        self.sums = sums
        self.rows = np.zeros(sums.shape[1], np.uint16)

    def hear(self, heard):
        """Take in the messages of a release."""
        self.sums[:, heard.streams] = heard.sums
        self.rows = with_room(self.rows, heard.rows.max())
        self.rows[heard.streams] = heard.rows

    def means(self, streams, index):
        """Means of streams; their variance is infinite before the first message."""
        rows = np.maximum(self.rows[streams], 1).astype(float)
        silent = np.where(self.rows[streams] > 0, 0.0, np.inf)
        noise = self.mechanism.variance(index) / rows**2
        return Means(self.sums[:, streams] / rows, 1 / rows + silent, noise)


class MeanOfMeans(Statistic):
    """The mean of all messages so far, each divided by its number of rows.

    With a `window` it is the mean of those since the last release whose number is a power of two.
    """

    def __init__(self, mechanism, sums, window=False):
        n_streams = sums.shape[1]
        self.mechanism = mechanism
        self.window = window
        self.sums = sums  # of the messages' means
        self.count = np.zeros(n_streams, np.int32)  # of these means
        self.data = np.zeros((2, n_streams))
        is_tree = isinstance(mechanism, BinaryTree)
        self.noise = (_TreeNoiseOfMeans if is_tree else _BlockNoiseOfMeans)(mechanism, n_streams)

    def hear(self, heard):
        """Take in the messages of a release."""
        streams, index = heard.streams, heard.index
        kept = np.where(self.window & (index & (index - 1) == 0), 0.0, 1.0)
        self.sums[:, streams] = self.sums[:, streams] * kept + heard.sums / heard.rows
        self.count[streams] = self.count[streams] * kept + 1
        self.data[:, streams] = _with_release(
            self.data[:, streams] * kept, heard.rows.astype(float), heard.rows
        )
        self.noise.hear(heard, kept)

    def means(self, streams, index):
        """Means of streams; their variance is infinite before the first message."""
        count = np.maximum(self.count[streams], 1)
        silent = np.where(self.count[streams] > 0, 0.0, np.inf)
        return Means(
            self.sums[:, streams] / count,
            self.data[0, streams] / count**2 + silent,
            self.noise.variance()[streams] / count**2,
        )


def _with_release(moments, variance, rows):
    """Variance of a sum of running means, and its covariance with the next running sum (2, r)."""
    total, cross = moments
    return np.stack([total + 2 * cross / rows + variance / rows**2, cross + variance / rows])


class _BlockNoiseOfMeans(Statistic):
    """Variance of the noise in a sum of running means, from noise of single blocks or none."""

    def __init__(self, mechanism, n_streams):
        self.mechanism = mechanism
        self.moments = np.zeros((2, n_streams))

    def hear(self, heard, kept):
        # A restart forgets the messages before it, not the noise of their blocks.
        noise = self.mechanism.variance(heard.index)
        self.moments[:, heard.streams] = _with_release(
            self.moments[:, heard.streams] * kept, noise, heard.rows
        )

    def variance(self):
        return self.moments[0]


class _TreeNoiseOfMeans(Statistic):
    """The same for noise of blocks of a binary tree, which keeps the weight of each open block."""

    def __init__(self, mechanism, n_streams):
        self.mechanism = mechanism
        self.total = np.zeros(n_streams)
        self.weights = np.zeros((0, n_streams))

    def hear(self, heard, kept):
        streams, index = heard.streams, heard.index
        self.weights = with_levels(self.weights, int(index.max()))
        new = index & -index
        total = self.total[streams] * kept
        for level, weights in enumerate(self.weights):
            length = 1 << level
            before = np.where(new == length, 0.0, weights[streams] * kept)
            after = np.where(index & length, before + 1 / heard.rows, 0.0)
            grown = np.where(index & length, after**2 - before**2, 0.0)
            total += self.mechanism.noise_std(level) ** 2 * grown
            weights[streams] = after
        self.total[streams] = total

    def variance(self):
        return self.total


def with_levels(registers, n_releases):
    """Registers (levels, ...) with a level for every binary digit of `n_releases`."""
    missing = n_releases.bit_length() - len(registers)
    if missing <= 0:
        return registers
    more = np.zeros((missing, *registers.shape[1:]), registers.dtype)
    return np.concatenate([registers, more])


class BestBlocks(Statistic):
    """Noisy blocks weighted by how many rows they hold: best linear where noise dominates.

    Block b of n rows is a measurement of n times the mean. Where the noise has variance s2, its
    weight is n / s2, and the mean is the weighted sum of blocks over that of their rows.
    """

    def __init__(self, mechanism, sums):
        n_streams = sums.shape[1]
        self.mechanism = mechanism
        self.sums = sums  # of weighted blocks
        self.gain = np.zeros(n_streams)  # of weights times rows
        self.spread = np.zeros(n_streams)  # of the squared weights on the rows' values
        self.last = np.zeros_like(sums)  # the latest message, and its rows
        self.rows = np.zeros(n_streams, np.int32)

    def hear(self, heard):
        """Take in the messages of a release."""
        streams = heard.streams
        block, rows = heard.sums - self.last[:, streams], heard.rows - self.rows[streams]
        weight = rows / self.mechanism.noise_std**2
        self.sums[:, streams] += weight * block
        self.gain[streams] += weight * rows
        self.spread[streams] += weight**2 * rows
        self.last[:, streams] = heard.sums
        self.rows[streams] = heard.rows

    def means(self, streams, index):
        """Means of streams; their variance is infinite before the first message."""
        return _best(self.sums[:, streams], self.gain[streams], self.spread[streams])


class BestTree(Statistic):
    """The same for the blocks of a binary tree, which overlap."""

    def __init__(self, mechanism, sums):
        p, n_streams = sums.shape
        self.mechanism = mechanism
        self.sums = sums
        self.gain, self.spread = np.zeros(n_streams), np.zeros(n_streams)
        # By length of the block: its noisy sum, rows, and total weight on its rows.
        self.blocks = np.zeros((0, p + 2, n_streams))

    def hear(self, heard):
        """Take in the messages of a release."""
        streams, new = heard.streams, heard.index & -heard.index
        self.blocks = with_levels(self.blocks, int(heard.index.max()))
        lengths = 1 << np.arange(len(self.blocks))[:, None]
        is_new, kept = lengths == new, (lengths & heard.index != 0) & (lengths != new)
        open_blocks = self.blocks[:, :, streams]
        longer = (open_blocks[:, :-1] * kept[:, None]).sum(axis=0)
        total = np.concatenate([heard.sums, heard.rows[None]])
        block = total - longer  # sums and rows of the new block
        inside = (open_blocks[:, -1] * (lengths < new)).sum(axis=0)  # weight on it so far
        stds = np.array([self.mechanism.noise_std(level) for level in range(len(lengths))])
        weight = block[-1] / (is_new * stds[:, None] ** 2).sum(axis=0)
        self.sums[:, streams] += weight * block[:-1]
        self.gain[streams] += weight * block[-1]
        self.spread[streams] += 2 * weight * inside + weight**2 * block[-1]
        fresh = np.concatenate([block, (inside + weight * block[-1])[None]])
        self.blocks[:, :, streams] = open_blocks * kept[:, None] + fresh * is_new[:, None]

    def means(self, streams, index):
        """Means of streams; their variance is infinite before the first message."""
        return _best(self.sums[:, streams], self.gain[streams], self.spread[streams])


class BestSquareRoot(Statistic):
    """The same for the square-root factorization: white messages, weighted by their gain."""

    def __init__(self, mechanism, sums):
        self.mechanism = mechanism
        self.sums = sums
        self.last = np.zeros_like(sums)
        self.rows = np.zeros(sums.shape[1], np.int32)
        self.registers = np.zeros((len(mechanism.encoder.gaps), *sums.shape))
        self.response = mechanism.response(1)

    def hear(self, heard):
        """Take in the messages of a release."""
        self._reach(int(heard.rows.max()))
        streams, (_, weights) = heard.streams, self.mechanism.encoder
        registers = self.registers[:, :, streams]
        registers *= self.mechanism.encoder.decay[:, None, None]
        registers += heard.sums - self.last[:, streams]
        white = np.tensordot(weights, registers, axes=1)
        self.sums[:, streams] += self.response.gain[heard.rows - 1] * white
        self.registers[:, :, streams] = registers
        self.last[:, streams] = heard.sums
        self.rows[streams] = heard.rows

    def means(self, streams, index):
        """Means of streams; their variance is infinite before the first message."""
        step = self.rows[streams] - 1
        scale = self.mechanism.noise_std**2
        gain = np.where(step < 0, 0.0, self.response.squares[step] / scale)
        spread = self.response.spread[step] / scale**2
        return _best(self.sums[:, streams] / scale, gain, spread)

    def _reach(self, n):
        """Know the answer to a constant for n steps."""
        if n > len(self.response.gain):
            most = self.mechanism.horizon or 2 * n
            self.response = self.mechanism.response(min(2 * n, most))


def _best(sums, gain, spread):
    """Means whose noise has variance 1 / gain."""
    heard = gain > 0
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.where(heard, sums / gain, 0.0)
        return Means(values, np.where(heard, spread / gain**2, np.inf), 1 / gain)


def statistic(weights, mechanism, sums):
    """Statistic of streams, whose `sums` (p, n_streams) are zeros of the type to be held."""
    if weights == "last":
        return LastMean(mechanism, sums)
    if weights == "blue":
        return _BEST[type(mechanism)](mechanism, sums)
    return MeanOfMeans(mechanism, sums, window=weights == "wmom")


_BEST = {PartialSums: BestBlocks, BinaryTree: BestTree, SquareRootSums: BestSquareRoot}
