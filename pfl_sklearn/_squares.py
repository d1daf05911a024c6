"""Values whose squares are neither infinite nor lost among the smallest numbers."""

import numpy as np

LARGEST, SMALLEST = 1e150, 1e-140  # absolute values


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
