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
    of each length, so its contribution has the L2 length of the square root of their number.

    Parameters
    ----------
    mu : float, > 0
        Gaussian-DP parameter of the whole stream when one of its values is replaced.
    horizon : int or None, default=None
        Largest number of releases. None: any number. Blocks of length :math:`2^s` then have noise
        with a standard deviation proportional to s + 1.

    Notes
    -----
    All figures are in units of the largest change of a value. Over single values this is the tree
    of Dwork et al. and Chan et al.; over the blocks between two releases it is Private Mechanism II
    of Yakimenka et al. (2024), who add up epsilons over the lengths where squares of mu add up.

    References
    ----------
    Chan, T.-H. H., Shi, E. and Song, D. (2011). Private and continual release of statistics. ACM
    TISSEC. Dwork, C., Naor, M., Pitassi, T. and Rothblum, G. N. (2010). Differential privacy under
    continual observation. STOC.

    Examples
    --------
    >>> from pfl_sklearn.privacy._mechanisms._binary_tree import BinaryTree
    >>> tree = BinaryTree(mu=1.0, horizon=8)
    >>> tree.variance([7, 8])
    array([12.,  4.])
    """

    mu: float
    horizon: int | None = None

    def noise_std(self, level: int) -> float:
        """Standard deviation of the noise of a block of length 2**level."""
        # A value is in one block of each level: its contribution is as long as the root of their
        # number.
        if self.horizon is not None:
            return math.sqrt(self.horizon.bit_length()) / self.mu
        # Over all levels, 1 / (s + 1)^2 adds up to pi^2 / 6: mu holds for any number of releases.
        return math.pi / math.sqrt(6) * (level + 1) / self.mu

    def n_registers(self, n_releases: int) -> int:
        """Numbers that the noise of a stream needs between two of its releases."""
        return n_releases.bit_length()

    def advance(self, registers: Floats, index: npt.ArrayLike, rng: np.random.Generator) -> Floats:
        """Noise of the next running sums, one of each stream."""
        # The lowest digit of the index that is 1 says which block is new; it replaces all shorter.
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

    def whole_mu(self, n_releases: int) -> float:
        """Gaussian-DP parameter of the first releases, one for each value, if all are replaced."""
        levels = range(n_releases.bit_length())
        # Blocks of length 2^s among the first releases; each changes by up to 2^s.
        blocks = [(n_releases + (1 << s)) >> (s + 1) for s in levels]
        squares = [blocks[s] * (2**s / self.noise_std(s)) ** 2 for s in levels]
        return math.sqrt(math.fsum(squares))
