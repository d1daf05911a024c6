"""Values of any size, which a mechanism has to bound."""

import math

import numpy as np

EXTREMES = [math.nan, math.inf, -math.inf, 1e308, -1e308, 1e200, -1e160, 1e-160, 1e-308, 5e-324]


def hostile(shape, usual=3.0, seed=0):
    """Uniform values from -usual to usual; extremes, zeros and ones take the place of many.

    That is a third of the values, and in a quarter of the rows (of the last axis) all.
    """
    rng = np.random.default_rng(seed)
    strange = rng.choice([*EXTREMES, 0.0, 1.0], shape)
    share = rng.choice([1 / 3, 1.0], (*strange.shape[:-1], 1), p=[0.75, 0.25])
    return np.where(rng.random(shape) < share, strange, rng.uniform(-usual, usual, shape))
