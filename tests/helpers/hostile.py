"""Values of any size, which a mechanism has to bound."""

import math

import numpy as np

EXTREMES = [math.nan, math.inf, -math.inf, 1e308, -1e308, 1e200, -1e160, 1e-160, 1e-308, 5e-324]


def hostile(shape, usual=3.0, seed=0):
    """Uniform values from -usual to usual, a third of which give way to extremes, zeros or ones."""
    rng = np.random.default_rng(seed)
    strange = rng.choice([*EXTREMES, 0.0, 1.0], shape)
    return np.where(rng.random(shape) < 1 / 3, strange, rng.uniform(-usual, usual, shape))
