"""Discrete Laplace noise: sums of integers that are released with a pure epsilon, drawn exactly."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pfl_sklearn._typing import Bools, Integers
from pfl_sklearn.privacy._accounting._events import check_value
from pfl_sklearn.privacy._mechanisms._report_fields import check_positive, release_fields

# Bits of the scale of the noise in units of 1 / numerator: products with the few rounds of a trial
# stay below 2**63.
_SCALE_BITS = 51
_FINEST_EPSILON_BITS = 30  # of the fraction that stands for epsilon
_LEAST_NUMERATOR = 1 << 10  # so that rounding epsilon down costs at most a thousandth of it
_WORDS_END = 1 << 64
_MOST_TRIALS = 1 << 11  # of one coin: the probability that it needs more is below 10**-5000


@dataclass(frozen=True)
class DiscreteLaplaceMechanism:
    r"""Two-sided geometric noise on integers, with a pure epsilon.

    The noise k has the probability :math:`\propto \exp(-|k| \epsilon / \Delta)`. It is drawn from
    random integers alone, so there is no floating-point noise to attack (Mironov, 2012).

    Parameters
    ----------
    sensitivity : int, >= 1
        Largest L1 distance between the integers of two neighbouring tables.
    epsilon : float, > 0
        Cost of the release.

    Raises
    ------
    ValueError
        If a parameter is out of range, or `epsilon` too small for the sensitivity to be written as
        a fraction of 51 bits.

    Notes
    -----
    Algorithm 2 of Canonne, Kamath and Steinke (2020), for many numbers at once. Epsilon is rounded
    down to a binary fraction, by at most a thousandth of it. The mechanism keeps its promise if the
    bits are random: without a seed they come from the operating system.

    References
    ----------
    Canonne, C. L., Kamath, G. and Steinke, T. (2020). The discrete Gaussian for differential
    privacy. NeurIPS.

    Mironov, I. (2012). On significance of the least significant bits for differential privacy. CCS.

    Examples
    --------
    >>> from pfl_sklearn.privacy import DiscreteLaplaceMechanism
    >>> round(DiscreteLaplaceMechanism(sensitivity=100, epsilon=0.5).noise_std, 1)
    282.8
    """

    sensitivity: int
    epsilon: float
    delta = 0.0

    def __post_init__(self) -> None:
        valid = isinstance(self.sensitivity, int | np.integer) and 1 <= self.sensitivity < 1 << 40
        check_value("sensitivity", self.sensitivity, valid, "a whole number in [1, 2**40)")
        check_positive("epsilon", self.epsilon)
        expected = f"at least {_LEAST_NUMERATOR / self._denominator:.3g} at this sensitivity"
        check_value("epsilon", self.epsilon, self._numerator >= _LEAST_NUMERATOR, expected)

    @property
    def _denominator(self) -> int:
        """Denominator of the fraction that stands for epsilon, a power of two."""
        return 1 << min(_FINEST_EPSILON_BITS, _SCALE_BITS - int(self.sensitivity).bit_length())

    @property
    def _numerator(self) -> int:
        """Its numerator; rounded down, so that the noise never promises more than it keeps."""
        # Noise beyond an epsilon of a million would be 0 in any case.
        return math.floor(min(self.epsilon, 1e6) * self._denominator)

    @property
    def scale(self) -> float:
        """Scale of the Laplace distribution that the noise is the discrete form of."""
        return int(self.sensitivity) * self._denominator / self._numerator

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise."""
        return math.sqrt(self.noise_variance)

    @property
    def noise_variance(self) -> float:
        """Variance of the noise."""
        # 2 a / (1 - a)^2 with a = exp(-1 / scale), where 1 - a would lose digits.
        return 2 * math.exp(-1 / self.scale) / math.expm1(-1 / self.scale) ** 2

    def privatize(self, values: Integers, random_state: Any = None) -> Integers:
        """Integers (n,) plus independent noise.

        Parameters
        ----------
        values : ndarray of shape (n,) of int64
            Exact values, below 2**62 in size.
        random_state : numpy.random.Generator or None, default=None
            Source of the bits. None: the operating system.
        """
        source = _system_words if random_state is None else _words_of(random_state)
        noise = _two_sided_geometric(
            len(values), self._numerator, int(self.sensitivity) * self._denominator, source
        )
        return values + noise

    def facts(self) -> dict[str, Any]:
        """Facts about this mechanism for the privacy report."""
        text = "discrete Laplace mechanism"
        return release_fields(self, text, "exact (ratios of probabilities)", "central")


def _system_words(size: int) -> Any:
    """Random 64-bit words (n,) of the operating system."""
    return np.frombuffer(os.urandom(8 * size), dtype=np.uint64)


def _words_of(rng: np.random.Generator) -> Callable[[int], Any]:
    """Source of words (n,) of a seeded generator."""
    return lambda size: rng.integers(0, _WORDS_END, size=size, dtype=np.uint64, endpoint=False)


def _uniform_below(ends: Integers, source: Callable[[int], Any]) -> Integers:
    """Uniform integers (n,) in [0, end) for each of the positive `ends` (n,)."""
    ends = ends.astype(np.uint64)
    # Words at the end, which would make small numbers likelier, are drawn again.
    unfair = np.uint64(_WORDS_END - 1) - (np.uint64(_WORDS_END - 1) % ends + 1) % ends
    words = source(len(ends)).copy()
    while (again := np.flatnonzero(words > unfair)).size:
        words[again] = source(again.size)
    return (words % ends).astype(np.int64)


def _exponential_coins(
    numerators: Integers, denominator: int, source: Callable[[int], Any]
) -> Bools:
    """Coins (n,) that are true with probability exp(-numerator / denominator), at most 1."""
    # Algorithm 1 of Canonne, Kamath and Steinke (2020): true if the number of trials before the
    # first failure is even, where trial k succeeds with probability numerator / (denominator k).
    coins, left = np.zeros(len(numerators), dtype=bool), np.arange(len(numerators))
    for k in range(1, _MOST_TRIALS):
        if not left.size:
            break
        ends = np.full(left.size, denominator * k)
        success = _uniform_below(ends, source) < numerators[left]
        coins[left[~success]] = k % 2 == 1
        left = left[success]
    return coins


def _two_sided_geometric(
    size: int, numerator: int, denominator: int, source: Callable[[int], Any]
) -> Integers:
    """Noise (n,) with probabilities proportional to exp(-|k| numerator / denominator)."""
    noise, left = np.zeros(size, dtype=np.int64), np.arange(size)
    while left.size:
        n = left.size
        fraction = _uniform_below(np.full(n, denominator), source)
        accepted = _exponential_coins(fraction, denominator, source)
        whole, going = np.zeros(n, dtype=np.int64), np.arange(n)
        while going.size:
            going = going[_exponential_coins(np.ones(going.size, dtype=np.int64), 1, source)]
            whole[going] += 1
        size_of = (fraction + denominator * whole) // numerator
        negative = (source(n) & np.uint64(1)).astype(bool)
        # A negative zero would make 0 twice as likely.
        accepted &= ~(negative & (size_of == 0))
        noise[left[accepted]] = np.where(negative, -size_of, size_of)[accepted]
        left = left[~accepted]
    return noise
