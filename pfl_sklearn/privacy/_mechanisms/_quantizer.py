"""Stochastic quantization: fewer bits per message, no privacy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pfl_sklearn._typing import Floats
from pfl_sklearn.privacy._mechanisms._report_fields import check_positive, release_fields


@dataclass(frozen=True)
class StochasticQuantizer:
    """Unbiased rounding of every coordinate to one of ``2**bits`` levels on [-bound, bound].

    It saves communication and gives no privacy guarantee.

    Parameters
    ----------
    bits : int from 1 to 32
        Bits per coordinate.
    bound : float, > 0
        Half the width of the range. Values outside the range are projected onto it.

    References
    ----------
    Theorem 2 (ICLR), part 1, of Ozkara et al. (2023).

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn.privacy import StochasticQuantizer
    >>> quantizer = StochasticQuantizer(bits=1, bound=2.0)
    >>> quantizer.privatize(np.array([[5.0, -5.0]]), np.random.default_rng(0))
    array([[ 2., -2.]])
    """

    bits: int
    bound: float

    def __post_init__(self) -> None:
        if not (isinstance(self.bits, int | np.integer) and 1 <= self.bits <= 32):
            raise ValueError(f"bits must be an integer from 1 to 32; got {self.bits!r}.")
        check_positive("bound", self.bound)

    @property
    def step(self) -> float:
        """Distance between adjacent levels."""
        return 2 * self.bound / (2**self.bits - 1)

    @property
    def noise_variance(self) -> float:
        """Largest variance that rounding adds to a coordinate: a quarter of the squared step."""
        # f (1 - f) step^2 for a value at the share f between two levels, largest at f = 1/2.
        return self.step**2 / 4

    @property
    def sensitivity(self) -> float:
        """Largest change of one coordinate's report: the whole range."""
        return 2 * self.bound

    def privatize(self, values: Floats, rng: np.random.Generator) -> Floats:
        """Rounded values, in the same shape.

        Parameters
        ----------
        values : ndarray
            NaN counts as 0.
        rng : numpy.random.Generator
            Source of the choices between adjacent levels.
        """
        # NaN becomes the middle of the range, so that every report is a level.
        bounded = np.clip(np.nan_to_num(values, nan=0.0), -self.bound, self.bound)
        position = (bounded + self.bound) / self.step
        lower = np.floor(position)
        # Up with the probability of the distance from the level below: right on average.
        level = lower + (rng.random(position.shape) < position - lower)
        return level * self.step - self.bound

    def facts(self) -> dict[str, Any]:
        """Facts about this mechanism for the privacy report."""
        text = f"stochastic quantizer, {self.bits} bits per coordinate"
        return release_fields(self, text, "none (quantization is not a privacy mechanism)")
