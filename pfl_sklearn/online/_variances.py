"""Variances of the agents' rows, which their messages let everybody estimate."""

import numpy as np

# The square of a value in units of the range, around its middle, times this: replacing a row then
# changes value and square together by no more than the value alone.
SQUARE = 3.3
_LEAST = 1e-12


def coordinates(values, with_squares):
    """Values (n,) in [-1/2, 1/2] and, if wanted, their scaled squares: (1 or 2, n)."""
    return np.stack([values, SQUARE * values**2]) if with_squares else values[None]


def own_variances(rows, sums, common):
    """Variance (n,) of each agent's rows from its exact sums (2, n), with four rows at `common`."""
    mean = sums[0] / rows
    squares = np.maximum(sums[1] / SQUARE - rows * mean**2, 0.0)
    return (squares + 4 * common) / (rows + 3)


def heard_variances(heard, largest):
    """Variances (n,) of the rows of senders, from means of values and squares that were heard.

    They are shrunk to their mean as far as noise and few rows make them uncertain, and lie between
    a quarter of it and `largest`. Before anybody has two rows it is the variance of the means.
    """
    (value, square), data, noise = heard
    n_rows = np.maximum(1 / data, 1.0)
    told = n_rows > 1
    if not told.any():
        return np.full(len(value), np.clip(value.var(), _LEAST, largest))
    value, noise, n_rows = value[told], noise[told], n_rows[told]
    raw = (square[told] / SQUARE - value**2 + noise) * n_rows / (n_rows - 1)
    # Variance of `raw` from the noise; single values would be correlated with it.
    centre = np.average(value, weights=1 / (noise + 1 / n_rows))
    released = noise / SQUARE**2 + 2 * noise**2 + 4 * centre**2 * noise
    common = np.average(raw, weights=1 / (released + 2 / n_rows))
    common = np.clip(common, _LEAST, largest)
    error = released + 2 * common**2 / n_rows
    spread = max(np.average((raw - common) ** 2 - error, weights=1 / error), 0.0)
    found = np.full(len(told), common)
    found[told] += spread / (spread + error) * (raw - common)
    return np.clip(found, common / 4, largest)
