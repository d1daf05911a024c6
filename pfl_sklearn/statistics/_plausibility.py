"""Tests whether moments of a client can be those of any rows."""

import numpy as np

from pfl_sklearn._columns import LARGEST_EXACT

MOMENT_ROUNDING = 1e-6  # of means and standard deviations, over the largest values of their column
_LEAST_LOG_WEIGHT = -746.0  # below the logarithm of the smallest positive number
_LOG_ROUNDING = 1e-9  # of a summed logarithm
_ZERO_ROW = 1e-10  # entries of empty rows by rounding, over their column's norm


def too_many_rows(n_rows):
    """Whether numbers of rows (m,) cannot be added up."""
    return bool(np.sum(n_rows, dtype=np.float64) > LARGEST_EXACT)


def wrong_weights(n_rows, weights, log_weights, private):
    """Whether no n rows have weights with this sum and sum of logarithms; each of shape (m,).

    The mean of the logarithms is at most the logarithm of the mean, and equal to it where all rows
    have one weight: those of a `private` fit have the weight 1.
    """
    most = n_rows * np.log(weights / n_rows)
    room = _LOG_ROUNDING * (n_rows + np.abs(most))
    wrong = (log_weights > most + room) | (log_weights < n_rows * _LEAST_LOG_WEIGHT)
    return wrong | (private & ((log_weights != 0) | (np.abs(most) > room)))


def wrong_triangles(triangles, n_rows, lowest, highest, room):
    """Whether triangles (b, P, P) are not those of n rows (b,) between bounds (b, P - 1).

    `room` (P - 1,) is left for rounding errors of means and standard deviations.
    """
    diagonal = np.diagonal(triangles, axis1=1, axis2=2)
    wrong = (diagonal[:, 0] <= 0) | (diagonal < 0).any(axis=1)
    with np.errstate(all="ignore"):  # of triangles that are wrong: NaN is none of the rows' values
        squares = triangles**2
        # A column that others combine to has an empty row, wherever it is.
        filled = (squares > _ZERO_ROW**2 * squares.sum(axis=1)[:, None]).any(axis=2)
        wrong |= filled.sum(axis=1) > n_rows
        means = triangles[:, 0, 1:] / diagonal[:, :1]
        spreads = np.sqrt(squares[:, 1:, 1:].sum(axis=1)) / diagonal[:, :1]
        # Values between two bounds vary by no more than if all lay at them.
        most = np.sqrt(np.maximum((highest - means) * (means - lowest), 0.0))
        return (
            wrong
            | outside_bounds(means, lowest, highest, room)
            | ~(spreads <= most + room).all(axis=1)
        )


def outside_bounds(means, lowest, highest, room):
    """Whether a mean (m, p) of a client lies outside of its bounds by more than rounding errors."""
    return ~((means >= lowest - room) & (means <= highest + room)).all(axis=1)
