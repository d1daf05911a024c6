"""Discrete Gaussian noise: private messages of integers, which take few bits."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pfl_sklearn._typing import Floats, Integers
from pfl_sklearn.privacy._accounting._concentrated import zcdp_rho
from pfl_sklearn.privacy._accounting._events import check_value
from pfl_sklearn.privacy._mechanisms._report_fields import check_positive, release_fields

_NOISE_STDS = 8.0  # that fit into a report: cut noise is rarer than 1e-14, and costs accuracy alone
_MOST_BITS = 48  # so that sums of reports are exact in double precision
_ROUNDING_SHARE = 0.01  # largest share of the sensitivity that default rounding adds


@dataclass(frozen=True)
class DiscreteGaussianMechanism:
    r"""Every client rounds its message to a public grid and adds discrete Gaussian noise.

    Rounding is random and unbiased. The library opendp draws the noise exactly, on integers: there
    is no floating-point noise to attack. A report is a vector of integers with a fixed number of
    bits.

    Parameters
    ----------
    n_coordinates : int, >= 1
        Length p of a message.
    message_sensitivity : float, > 0
        Largest L2 distance between two messages of a client, before rounding.
    epsilon, delta : float, > 0 and float in (0, 1)
        Cost of the release of a client's message.
    n_bits : int or None, default=None
        Bits per coordinate of a report, at most 48. Fewer bits make the grid coarser, and so need
        more noise. None: as many as keep what rounding adds to the sensitivity below 1 %.
    bound : float, > 0, default=1.0
        Coordinates of messages are cut at this absolute value.

    Raises
    ------
    ValueError
        If a parameter is out of range, or `n_bits` are too few for the noise alone.
    ImportError
        When noise is drawn without opendp.

    Notes
    -----
    *Sensitivity.* Rounding moves a coordinate by less than a step g of the grid. For a message
    sensitivity D, two rounded messages are therefore at most :math:`D + 2 g \sqrt p` apart,
    whatever the roundings: the promise does not rest on their randomness.

    *Accounting.* Discrete Gaussian noise with parameter :math:`\sigma` satisfies
    :math:`\rho`-zCDP with :math:`\rho` = (sensitivity / :math:`\sigma`)^2 / 2, and zCDP implies
    (epsilon, delta) (Section 2 of Canonne, Kamath and Steinke). The conversion is sound in any
    dimension, but not tight: at epsilon 1 and delta 1e-5 the noise is 8 % larger than that of the
    analytic Gaussian mechanism.

    *Deviation.* Kairouz, Liu and Steinke (2021) round conditionally, which needs less sensitivity
    in many dimensions.

    *Range.* Reports are cut to integers of `n_bits` bits, which leave room for 8 standard
    deviations of noise beyond `bound`. Cutting is post-processing.

    *Cost.* opendp takes 20 to 40 microseconds for a coordinate.

    References
    ----------
    Canonne, C. L., Kamath, G. and Steinke, T. (2020). The discrete Gaussian for differential
    privacy. NeurIPS.

    Examples
    --------
    >>> from pfl_sklearn.privacy import DiscreteGaussianMechanism
    >>> mechanism = DiscreteGaussianMechanism(1, 2.0, epsilon=1.0, delta=1e-5)
    >>> mechanism.bits, round(mechanism.noise_std / mechanism.sensitivity, 3)
    (14, 4.045)
    """

    n_coordinates: int
    message_sensitivity: float
    epsilon: float
    delta: float
    n_bits: int | None = None
    bound: float = 1.0

    def __post_init__(self) -> None:
        for name in ("message_sensitivity", "bound"):
            check_positive(name, getattr(self, name))
        for name in ("n_coordinates", "n_bits"):
            value = getattr(self, name)
            valid = value is None or (isinstance(value, int | np.integer) and int(value) >= 1)
            check_value(name, value, valid, "a positive integer")
        valid = self.n_bits is None or self.n_bits <= _MOST_BITS
        check_value("n_bits", self.n_bits, valid, f"at most {_MOST_BITS}")
        if self._room(self.bits) <= 0:
            fewest = next(b for b in range(self.bits, 1000) if self._room(b) > 0)
            raise ValueError(
                f"n_bits={self.n_bits} is too few for the noise of epsilon={self.epsilon!r} and "
                f"delta={self.delta!r} in {self.n_coordinates} coordinates; expected at least "
                f"{fewest}."
            )

    @cached_property
    def noise_multiplier(self) -> float:
        """Parameter of the noise divided by the sensitivity."""
        # From rho = (sensitivity / sigma)^2 / 2.
        return 1 / math.sqrt(2 * zcdp_rho(self.epsilon, self.delta))

    @cached_property
    def bits(self) -> int:
        """Bits per coordinate of a report."""
        if self.n_bits is not None:
            return int(self.n_bits)
        coarsest = _ROUNDING_SHARE * self.message_sensitivity / (2 * math.sqrt(self.n_coordinates))
        # One more bit for the sign.
        largest = (self.bound + self._tail) / coarsest + self._lost
        return math.ceil(math.log2(largest + 1)) + 1

    @property
    def largest(self) -> int:
        """Largest integer in a report; the smallest is its negative."""
        return 2 ** (self.bits - 1) - 1

    @property
    def grid(self) -> float:
        """Step of the public grid that messages are rounded to."""
        # The noise needs room, and grows with the step through the sensitivity. `_lost` holds what
        # grows with the step, so that the equation is solved for it.
        return (self.bound + self._tail) / self._room(self.bits)

    @property
    def sensitivity(self) -> float:
        """Largest L2 distance between two rounded messages of a client."""
        return self.message_sensitivity + 2 * math.sqrt(self.n_coordinates) * self.grid

    @property
    def noise_std(self) -> float:
        """Parameter of the noise in every coordinate, an upper bound on its standard deviation."""
        return self.noise_multiplier * self.sensitivity

    @property
    def noise_variance(self) -> float:
        """Largest variance that noise and rounding together add to a coordinate."""
        # Rounding at random to one of two neighbours has a variance of at most a quarter step^2.
        return self.noise_std**2 + self.grid**2 / 4

    @property
    def _tail(self) -> float:
        """Range of the noise in the units of messages, without what rounding adds to it."""
        return _NOISE_STDS * self.noise_multiplier * self.message_sensitivity

    @property
    def _lost(self) -> float:
        """Steps of the grid that rounding and its share of the noise take from a report."""
        return 1 + _NOISE_STDS * self.noise_multiplier * 2 * math.sqrt(self.n_coordinates)

    def _room(self, bits: int) -> float:
        """Steps of the grid that a report of `bits` bits has left for the message and its noise."""
        return 2 ** (bits - 1) - 1 - self._lost

    def rounded(self, messages: Floats, rng: np.random.Generator) -> Integers:
        """Messages (m, p) in steps of the grid, each rounded at random to one of the two nearest.

        Parameters
        ----------
        messages : ndarray of shape (m, p)
            One message per client. NaN counts as 0.
        rng : numpy.random.Generator
            Source of the choices between neighbours. They need not be secret.
        """
        cut = np.clip(np.nan_to_num(messages, nan=0.0), -self.bound, self.bound)
        steps = cut / self.grid
        lower = np.floor(steps)
        return (lower + (rng.random(steps.shape) < steps - lower)).astype(np.int64)

    def privatize(self, messages: Floats, rng: np.random.Generator) -> Floats:
        """Rounded messages (m, p) with noise: integers times `grid`.

        Parameters
        ----------
        messages : ndarray of shape (m, p)
            One message per client. NaN counts as 0.
        rng : numpy.random.Generator
            Source of the roundings alone. The noise comes from the operating system.
        """
        # The scale is in steps of the grid. Reports are cut after the noise, as post-processing.
        noisy = with_discrete_gaussian(self.rounded(messages, rng), self.noise_std / self.grid)
        return self.grid * np.clip(noisy, -self.largest, self.largest).astype(np.float64)

    def facts(self) -> dict[str, Any]:
        """Facts about this mechanism for the privacy report."""
        text = (
            "discrete Gaussian mechanism on every client's message, rounded at random to a grid, "
            f"{self.n_coordinates * self.bits} bits per message"
        )
        return release_fields(self, text, "zero-concentrated differential privacy, converted")


def with_discrete_gaussian(values: Integers, scale: float) -> Integers:
    """Integers plus independent discrete Gaussian noise with parameter `scale`."""
    if values.size == 0:
        return values
    opendp = check_opendp()
    space = opendp.vector_domain(opendp.atom_domain(T="i64")), opendp.l2_distance(T="f64")
    noisy = opendp.m.make_gaussian(*space, scale=scale)(values.ravel().tolist())
    return np.array(noisy, dtype=np.int64).reshape(values.shape)


def check_opendp() -> Any:
    """The library that draws the noise; ImportError if it is missing."""
    try:
        opendp = importlib.import_module("opendp.prelude")
    except ImportError as error:
        raise ImportError("discrete Gaussian noise needs opendp: pip install opendp.") from error
    # opendp asks for consent: its Gaussian noise is among the contributed mechanisms, whose proofs
    # are not all reviewed.
    opendp.enable_features("contrib")
    return opendp
