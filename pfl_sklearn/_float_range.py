"""Values whose powers are neither infinite nor lost among the smallest numbers."""

import numpy as np

LARGEST, SMALLEST = 1e150, 1e-140  # whose squares, and sums of them, keep all digits
_SMALLEST_FOR_FOURTH_POWERS = 1e-60  # products of two variances are fourth powers
_SIDE_BY_SIDE = 64  # where we look for the bounds of columns


def check_float_range(name, values, heaviest=1.0, smallest=SMALLEST):
    """Raise ValueError if values (n,), or a column of (n, p), cannot be squared and summed.

    Zeros can. `heaviest` is the largest weight of a square, at least 1. A fit with privacy must not
    call this: the error would reveal a client's values.

    Returns
    -------
    float or ndarray of shape (p,)
        Largest absolute values.
    """
    low, high = column_bounds(values)
    return check_bounds(name, low, high, heaviest, smallest)


def check_bounds(name, low, high, heaviest=1.0, smallest=SMALLEST):
    """The same for the smallest and largest value, each of shape () or (p,)."""
    sizes = np.maximum(np.maximum(high, -low), 0.0)
    if (sizes > LARGEST / np.sqrt(heaviest)).any():
        raise ValueError(
            f"{name} holds values too large to be squared (above about 1e150); rescale it."
        )
    if ((sizes > 0) & (sizes < smallest)).any():
        raise ValueError(
            f"{name} holds values too small to be squared (below about 1e-140); rescale it."
        )
    return sizes


def column_bounds(values):
    """Smallest and largest of values (n,), or of every column of (n, p); 0 without rows.

    Blocks of rows lie side by side, as NumPy goes through the rows of a narrow table one by one.
    """
    if not len(values):
        return (np.zeros(values.shape[1:]),) * 2
    whole = len(values) // _SIDE_BY_SIDE * _SIDE_BY_SIDE
    rest, width = values[whole:], values[:1].size
    blocks = values[:whole].reshape(whole // _SIDE_BY_SIDE, _SIDE_BY_SIDE * width)
    bounds = []
    for bound in (np.min, np.max):
        parts = [bound(rest, axis=0)] if len(rest) else []
        if whole:
            parts.append(
                bound(bound(blocks, axis=0).reshape(_SIDE_BY_SIDE, *values.shape[1:]), axis=0)
            )
        bounds.append(bound(parts, axis=0))
    return tuple(bounds)


def unit_near(size):
    """Power of two that brings numbers of this size near 1; 1 if their fourth powers are fine."""
    if size == 0 or _SMALLEST_FOR_FOURTH_POWERS < size < 1 / _SMALLEST_FOR_FOURTH_POWERS:
        return 1.0
    return 2.0 ** np.frexp(size)[1]
