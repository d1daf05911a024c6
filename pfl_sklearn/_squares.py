"""Values whose powers are neither infinite nor lost among the smallest numbers."""

import numpy as np

LARGEST, SMALLEST = 1e150, 1e-140  # absolute values
_SMALLEST_FOR_FOURTH_POWERS = 1e-60


def check_squares(name, values, heaviest=1.0, smallest=SMALLEST):
    """Raise ValueError if values (n,), or a column of (n, p), cannot be squared and summed.

    Zeros can. `heaviest` is the largest weight of a square, at least 1. A fit with privacy must not
    call this: the error would reveal a client's values.
    """
    sizes = np.maximum(values.max(axis=0, initial=0.0), -values.min(axis=0, initial=0.0))
    if (sizes > LARGEST / np.sqrt(heaviest)).any():
        raise ValueError(
            f"{name} holds values too large to be squared (above about 1e150); rescale it."
        )
    if ((sizes > 0) & (sizes < smallest)).any():
        raise ValueError(
            f"{name} holds values too small to be squared (below about 1e-140); rescale it."
        )


def unit_near(size):
    """Power of two that brings numbers of this size near 1; 1 if their fourth powers are fine."""
    if size == 0 or _SMALLEST_FOR_FOURTH_POWERS < size < 1 / _SMALLEST_FOR_FOURTH_POWERS:
        return 1.0
    return 2.0 ** np.frexp(size)[1]
