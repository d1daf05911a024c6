"""Running sums whose noise grows with the number of releases: Private Mechanism I of a paper."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pfl_sklearn._typing import Floats
from pfl_sklearn.privacy._mechanisms._running_sums import RunningSums


@dataclass(frozen=True)
class PartialSums(RunningSums):
    """Running sums as sums of noisy blocks: between two releases lies one block.

    A value is in one block, so the promise of one release is that of the whole stream. The noise of
    the sum grows with the number of releases. This is Private Mechanism I of Yakimenka et al.
    (2024), the Simple Counting Mechanism II of Chan, Shi and Song (TISSEC 2011).
    """

    mu: float

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise of a block."""
        return 1 / self.mu  # a value is in one block, so its contribution has length 1

    def n_registers(self, n_releases: int) -> int:
        """Numbers that the noise of a stream needs between two of its releases."""
        return 1

    def advance(self, registers: Floats, index: npt.ArrayLike, rng: np.random.Generator) -> Floats:
        """Noise of the next running sums, one of each stream."""
        # The noise of the blocks adds up: no later release takes any of it back.
        registers[0] += rng.standard_normal(registers.shape[1:]) * self.noise_std
        return registers[0].copy()

    def variance(self, index: npt.ArrayLike) -> Floats:
        """Variance of the noise on the running sums at releases `index` (...)."""
        return self.noise_std**2 * np.asarray(index, dtype=float)

    def all_values_mu(self, n_releases: int) -> float:
        """Gaussian-DP parameter of the first releases, one for each value, if all are replaced."""
        # Every block changes by 1, and their noise is independent.
        return math.sqrt(n_releases) / self.noise_std
