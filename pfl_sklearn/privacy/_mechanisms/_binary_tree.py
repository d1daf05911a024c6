"""Noise on the running sums of a stream from a binary tree of partial sums."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pfl_sklearn._typing import Floats
from pfl_sklearn.privacy._mechanisms._running_sums import RunningSums


@dataclass(frozen=True)
class BinaryTree(RunningSums):
    r"""Running sums as sums of few noisy blocks, whose lengths are powers of two.

    Release k consists of one block for every 1 in the binary digits of k. A value is in one block
    of each length, so the L2 length of its contribution is the square root of their number. Without
    a `horizon`, blocks of length :math:`2^s` have noise with a standard deviation proportional to
    s + 1.

    Over single values this is the tree of Dwork, Naor, Pitassi and Rothblum (STOC 2010) and of
    Chan, Shi and Song (TISSEC 2011); over the blocks between two releases it is Private Mechanism
    II of Yakimenka et al. (2024), who add up epsilons over the lengths where squares of mu add up.
    """

    mu: float
    horizon: int | None = None

    def noise_std(self, level: int) -> float:
        """Standard deviation of the noise of a block of length 2**level."""
        if self.horizon is not None:
            return math.sqrt(self.horizon.bit_length()) / self.mu
        # Over all levels, 1 / (s + 1)^2 adds up to pi^2 / 6: mu holds for any number of releases.
        return math.pi / math.sqrt(6) * (level + 1) / self.mu

    def n_registers(self, n_releases: int) -> int:
        """Numbers that the noise of a stream needs between two of its releases."""
        return n_releases.bit_length()

    def advance(self, registers: Floats, index: npt.ArrayLike, rng: np.random.Generator) -> Floats:
        """Noise of the next running sums, one of each stream."""
        # The lowest digit of the index that is 1 gives the new block, which replaces all shorter.
        fresh = rng.standard_normal(registers.shape[1:])
        new = np.bitwise_and(index, np.negative(index))
        for level in range(len(registers)):
            length = 1 << level
            registers[level] = np.where(
                new == length,
                fresh * self.noise_std(level),
                np.where(new > length, 0.0, registers[level]),
            )
        return registers.sum(axis=0)

    def variance(self, index: npt.ArrayLike) -> Floats:
        """Variance of the noise on the running sums at releases `index` (...)."""
        index = np.asarray(index)
        levels = range(int(index.max(initial=0)).bit_length())
        variances = [self.noise_std(s) ** 2 * (index >> s & 1) for s in levels]
        return np.sum([np.zeros(index.shape), *variances], axis=0)

    def all_values_mu(self, n_releases: int) -> float:
        """Gaussian-DP parameter of the first releases, one for each value, if all are replaced."""
        levels = range(n_releases.bit_length())
        # Blocks of length 2^s among the first releases; each changes by up to 2^s.
        blocks = [(n_releases + (1 << s)) >> (s + 1) for s in levels]
        squares = [blocks[s] * (2**s / self.noise_std(s)) ** 2 for s in levels]
        return math.sqrt(math.fsum(squares))
