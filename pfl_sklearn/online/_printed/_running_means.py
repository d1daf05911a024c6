"""Means of a sender's messages so far, or since a power of two: the weights of the paper.

They are unbiased, but their noise is not the least possible; see Yakimenka et al. (2024).
"""

from __future__ import annotations

import numpy as np

from pfl_sklearn.online._received_means import ByStream, Means, ReceivedMeans, with_levels
from pfl_sklearn.privacy._mechanisms._binary_tree import BinaryTree


class MeanOfMeans(ReceivedMeans):
    """The mean of all messages so far, each divided by its number of rows.

    With a `window` it is the mean of those since the last release whose number is a power of two.
    """

    def __init__(self, mechanism, sums, window=False):
        super().__init__(mechanism, sums)  # the sums are of the messages' means
        n_streams = sums.shape[1]
        self.window = window
        self.count = np.zeros(n_streams, np.int32)  # of these means
        self.data = np.zeros((2, n_streams))
        is_tree = isinstance(mechanism, BinaryTree)
        self.noise = (_TreeNoiseOfMeans if is_tree else _BlockNoiseOfMeans)(mechanism, n_streams)

    def receive(self, streams, releases, rows, sums):
        # A window restarts at powers of two, so that it holds half of the releases or more.
        carried = np.where(self.window & (releases & (releases - 1) == 0), 0.0, 1.0)
        self.sums[:, streams] = self.sums[:, streams] * carried + sums / rows
        self.count[streams] = self.count[streams] * carried + 1
        self.data[:, streams] = _with_release(
            self.data[:, streams] * carried, rows.astype(float), rows
        )
        self.noise.receive(streams, releases, rows, carried)

    def means(self, streams, releases):
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


class _BlockNoiseOfMeans(ByStream):
    """Variance of the noise in a sum of running means, from noise of single blocks or none."""

    def __init__(self, mechanism, n_streams):
        super().__init__(mechanism, np.zeros((2, n_streams)))

    def receive(self, streams, releases, rows, carried):
        # A restart forgets the messages before it, not the noise of their blocks.
        noise = self.mechanism.variance(releases)
        self.sums[:, streams] = _with_release(self.sums[:, streams] * carried, noise, rows)

    def variance(self):
        return self.sums[0]


class _TreeNoiseOfMeans(ByStream):
    """The same for noise of blocks of a binary tree, which keeps the weight of each open block."""

    def __init__(self, mechanism, n_streams):
        super().__init__(mechanism, np.zeros(n_streams))
        self.weights = np.zeros((0, n_streams))

    def receive(self, streams, releases, rows, carried):
        self.weights = with_levels(self.weights, int(releases.max()).bit_length())
        new = releases & -releases  # length of the block that the release closes
        total = self.sums[streams] * carried
        for level, weights in enumerate(self.weights):
            length = 1 << level
            before = np.where(new == length, 0.0, weights[streams] * carried)
            after = np.where(releases & length, before + 1 / rows, 0.0)
            grown = np.where(releases & length, after**2 - before**2, 0.0)
            total += self.mechanism.noise_std(level) ** 2 * grown
            weights[streams] = after
        self.sums[streams] = total

    def variance(self):
        return self.sums
