"""Bounds of columns."""

import numpy as np
import pytest

from pfl_sklearn._columns import column_bounds


@pytest.mark.parametrize(
    "shape", [(0, 3), (9, 0), (99, 0), (1, 3), (63, 2), (64, 5), (65, 1), (500, 4), (130,)]
)
def test_bounds_are_those_of_every_column(shape):
    values = np.random.default_rng(0).normal(size=shape) + 5.0
    if not values.size:
        np.testing.assert_array_equal(column_bounds(values), np.zeros((2, shape[1])))
        return
    for k in (0, len(values) // 2, len(values) - 1):  # in the blocks and behind them
        for extreme in (-100.0, 100.0):
            moved = values.copy()
            moved[k] = extreme
            low, high = column_bounds(moved)
            np.testing.assert_array_equal(low, moved.min(axis=0))
            np.testing.assert_array_equal(high, moved.max(axis=0))
