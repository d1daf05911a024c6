"""Offsets and exposures: the known parts of linear predictors."""

import numpy as np
from sklearn.utils import check_array

from pfl_sklearn._columns import check_one_per_row
from pfl_sklearn._compat import num_samples

LARGEST_OFFSET = 250.0  # exponentials of 700 overflow, and predictors come on top


def checked_offset(values, X, name="offset", largest=LARGEST_OFFSET, cut=False):
    """Finite values (n_rows,) of the rows of `X`, of at most a size, or None.

    Larger ones are an error, or are cut to that size.
    """
    if values is None:
        return None
    check_one_per_row(name, values)
    values = check_array(values, dtype=np.float64, ensure_2d=False, input_name=name)
    if values.shape != (num_samples(X),):
        raise ValueError(f"{name} must have shape ({num_samples(X)},); got {values.shape}.")
    if cut:
        return np.clip(values, -largest, largest)
    if np.abs(values).max(initial=0.0) > largest:
        wrong = values[np.abs(values) > largest][0]
        raise ValueError(f"{name} must be between -{largest:g} and {largest:g}; got {wrong:g}.")
    return values


def check_one_predictor(offset, n_outputs):
    """Raise ValueError if an offset is given for more than two classes."""
    if offset is not None and n_outputs > 1:
        raise ValueError(
            "offset goes with two classes; with more, one number for all of them would not change "
            "their probabilities."
        )


def squares_of(offset, weights):
    """Weighted mean and mean square of an offset, by which fits to other ones can be told."""
    if offset is None:
        return 0.0, 0.0
    moments = np.average([offset, offset**2], axis=1, weights=weights)
    return float(moments[0]), float(moments[1])
