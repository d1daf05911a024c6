"""Where the randomness of a release comes from."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.utils import check_random_state

_RESOLUTION = 1 << 52


def noise_generator(random_state: Any) -> tuple[np.random.Generator, bool]:
    """Generator for noise, and whether somebody can draw the same noise again.

    None draws its seed from the operating system, never from numpy's global state.
    """
    if random_state is None:
        return np.random.default_rng(), False
    if isinstance(random_state, numbers.Integral):
        return np.random.default_rng(int(random_state)), True
    words = check_random_state(random_state).randint(0, 2**31 - 1, size=4)
    return np.random.default_rng(words), True


def bernoulli(
    probability: npt.NDArray[np.float64], lowest: float, rng: np.random.Generator
) -> npt.NDArray[np.bool_]:
    """Bits that are 1 with `probability`, compared as integers.

    Probabilities are rounded up to multiples of 2**-52 and kept within [lowest, 1 - lowest], so
    that rounding never raises the odds that a local randomizer promises.
    """
    floor = int(np.ceil(lowest * _RESOLUTION))
    threshold = np.clip(np.ceil(probability * _RESOLUTION), floor, _RESOLUTION - floor)
    return rng.integers(0, _RESOLUTION, size=threshold.shape) < threshold.astype(np.int64)
