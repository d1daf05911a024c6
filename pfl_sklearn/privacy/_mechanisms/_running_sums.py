"""Running sums of streams with noise: what all mechanisms share."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from pfl_sklearn._typing import Bools, Floats
from pfl_sklearn.privacy._mechanisms._noise import public_grid


class RunningSums(ABC):
    """Running sums of streams, released again and again.

    A stream is one array of values whose largest change is 1: replacing one of them moves the
    value (or the vector of its coordinates) by an L2 distance of at most 1. `mu` is the Gaussian-DP
    parameter of all releases of the stream together.
    """

    mu: float
    horizon: int | None = None

    @abstractmethod
    def n_registers(self, n_releases: int) -> int:
        """Numbers that the noise of a stream needs between two of its releases."""

    @abstractmethod
    def advance(self, registers: Floats, index: npt.ArrayLike, rng: np.random.Generator) -> Floats:
        """Noise of the next running sums, one of each stream.

        Parameters
        ----------
        registers : ndarray of shape (n_registers, ...)
            State of the streams; it is changed.
        index : int or ndarray
            Number of each release, from 1.
        rng : numpy.random.Generator
            Source of the noise.

        Returns
        -------
        ndarray of shape (...)
        """

    @abstractmethod
    def variance(self, index: npt.ArrayLike) -> Floats:
        """Variance of the noise on the running sums at releases `index` (...)."""

    @abstractmethod
    def whole_mu(self, n_releases: int) -> float:
        """Gaussian-DP parameter of the first releases, one for each value, if all are replaced."""

    def privatize(
        self, sums: Floats, registers: Floats, index: npt.ArrayLike, rng: np.random.Generator
    ) -> Floats:
        """Running sums with noise, rounded to a public grid.

        Parameters
        ----------
        sums : ndarray of shape (...)
            Exact running sums, one of each stream and coordinate.
        registers : ndarray of shape (n_registers, ...)
            State of the streams; it is changed.
        index : int or ndarray
            Number of each release, from 1.
        rng : numpy.random.Generator
            Source of the noise.

        Returns
        -------
        ndarray of shape (...)

        Raises
        ------
        ValueError
            If a release is beyond the horizon, for which `mu` would not hold.
        """
        if self.horizon is not None and np.max(index, initial=0) > self.horizon:
            raise ValueError(f"horizon is {self.horizon}; got release {int(np.max(index))}.")
        # One grid for all releases: every mechanism's noise has a standard deviation of 1 / mu or
        # more.
        grid = public_grid(1 / self.mu)
        return np.rint((sums + self.advance(registers, index, rng)) / grid) * grid


def bounded(values: Floats, low: Floats, high: Floats) -> tuple[Floats, Bools]:
    """Values (n,) clipped to their ranges, as numbers from -1/2 to 1/2, and which were clipped."""
    inside = np.clip(values, low, high)
    # Cut again, as rounding may exceed 1/2: the width of the range is the sensitivity.
    return np.clip((inside - low) / (high - low) - 0.5, -0.5, 0.5), inside != values
