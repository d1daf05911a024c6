"""Running sums of streams with noise: the base of all mechanisms."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from pfl_sklearn._typing import Bools, Floats
from pfl_sklearn.privacy._mechanisms._noise import public_grid


class RunningSums(ABC):
    """Running sums of streams, released again and again.

    All figures are in units of the largest change of a value: replacing a value (or the vector of
    its coordinates) moves it by an L2 distance of at most 1. `mu` is the Gaussian-DP parameter of
    all releases of a stream together when one of its values is replaced. `horizon` is the largest
    number of releases; None means any number.
    """

    mu: float
    horizon: int | None = None

    @abstractmethod
    def n_registers(self, n_releases: int) -> int:
        """Numbers that the noise of a stream needs between two of its releases."""

    @abstractmethod
    def advance(self, registers: Floats, index: npt.ArrayLike, rng: np.random.Generator) -> Floats:
        """Noise (...) of the next running sums, one of each stream.

        It changes the state `registers` (n_registers, ...) of the streams. `index` is the number of
        each release, from 1.
        """

    @abstractmethod
    def variance(self, index: npt.ArrayLike) -> Floats:
        """Variance of the noise on the running sums at releases `index` (...)."""

    @abstractmethod
    def all_values_mu(self, n_releases: int) -> float:
        """Gaussian-DP parameter of the first releases, one per value, if all values are
        replaced."""

    def privatize(
        self, sums: Floats, registers: Floats, index: npt.ArrayLike, rng: np.random.Generator
    ) -> Floats:
        """Exact `sums` (...) with the noise of :meth:`advance`, rounded to a public grid.

        Raises ValueError if a release is beyond the horizon, for which `mu` would not hold.
        """
        if self.horizon is not None and np.max(index, initial=0) > self.horizon:
            raise ValueError(f"horizon is {self.horizon}; got release {int(np.max(index))}.")
        # One grid for all releases: the noise has a standard deviation of at least 1 / mu.
        grid = public_grid(1 / self.mu)
        return np.rint((sums + self.advance(registers, index, rng)) / grid) * grid


def bounded(values: Floats, low: Floats, high: Floats) -> tuple[Floats, Bools]:
    """Values (n,) clipped to their ranges, as numbers from -1/2 to 1/2, and which were clipped."""
    clipped = np.clip(values, low, high)
    # Cut again, as rounding may exceed 1/2: the width of the range is the sensitivity.
    return np.clip((clipped - low) / (high - low) - 0.5, -0.5, 0.5), clipped != values
