"""Variances of the agents' rows, which their messages let everybody estimate.

Agents' variances have a scaled inverse chi-squared distribution with four degrees of freedom about
a common one, which is heard. Noise may hide it for long, so its logarithm has a uniform prior: then
agents' own rows decide.
"""

from typing import NamedTuple

import numpy as np
from scipy.special import ndtri, polygamma, psi, softmax, stdtrit

# The square of a value in units of the range, around its middle, times this: replacing a row then
# changes value and square together by no more than the value alone.
SQUARE = 3.3
_ALIKE = 4.0  # degrees of freedom of the agents' variances around the common one
_GRID = np.geomspace(1e-16, 1.0, 401)  # common variances, in units of the largest
_DEGREES = np.geomspace(0.01, _ALIKE, 200)
_FREEDOM = np.geomspace(0.1, 1e4, 400)
_UNKNOWN = np.log(_GRID).var()
_COARSE = np.log(_GRID[1] / _GRID[0]) ** 2 / 12
_LEAST, _EQUAL = 1e-12, 1e-15  # variances of equal values, in units of the largest
_NORMAL = 1.959964  # half of the central 95 % of a normal distribution


class Shared(NamedTuple):
    """What messages tell of the variance that agents have in common.

    An agent's variance has about a scaled inverse chi-squared distribution with `rows` degrees of
    freedom around `scale`.
    """

    mean: float
    scale: float
    rows: float
    largest: float


class OwnVariances(NamedTuple):
    """Variances of agents' rows (n,), and by which factor that of a mean is larger (n,).

    A mean whose variance is estimated is Student's, not normal. With the factor a normal
    distribution has the same central interval of 95 %.
    """

    values: np.ndarray
    doubt: np.ndarray


class _Raw(NamedTuple):
    """Unbiased estimates (m,) of agents' variances from messages, and parts of their errors."""

    values: np.ndarray
    noise: np.ndarray  # variance from the noise
    rows: np.ndarray  # degrees of freedom of the data


def value_and_square(values, with_squares):
    """Values (n,) in [-1/2, 1/2] and, if wanted, their scaled squares: (1 or 2, n)."""
    return np.stack([values, SQUARE * values**2]) if with_squares else values[None]


def own_variances(rows, sums, shared, bounded):
    """Variance of each agent's rows from its exact sums (2, n).

    Equal values say little of a `bounded` variance: the next one may lie at the other end.
    """
    mean = sums[0] / rows
    squares = np.maximum(sums[1] / SQUARE - rows * mean**2, 0.0)
    freedom = rows - 1 + shared.rows
    found = (squares + shared.rows * shared.scale) / freedom
    equal = squares <= _EQUAL * rows * shared.largest
    found = np.clip(found, np.where(equal, _LEAST, 0.0) * shared.largest, shared.largest)
    doubt = in_doubt(freedom)
    if bounded:
        next_one = (0.5 + np.abs(mean)) ** 2 * (rows + 1) / (rows + 2) ** 2
        doubt = np.where(equal & (rows > 1), np.maximum(doubt, next_one / found), doubt)
    return OwnVariances(found, np.minimum(doubt, shared.largest / found))


def in_doubt(freedom):
    """Factor on a mean's variance, estimated with degrees of freedom, for intervals of 95 %."""
    return (stdtrit(freedom, 0.975) / _NORMAL) ** 2


def with_doubt(variances, own):
    """Variances of estimates (n,) as far as they rest on own means of uncertain variance.

    With them come the degrees of freedom (n,) of Student's distribution with the same central
    interval of 95 %.
    """
    if own.doubt.max() == 1:
        return variances.copy(), np.full(len(variances), np.inf)
    share = np.minimum(variances / own.variances, 1.0)
    factor = 1 / (1 - share + share / own.doubt)
    freedom = np.interp(-factor, -_DOUBTS, _FREEDOM)
    return variances * factor, np.where(factor > _DOUBTS[-1], freedom, np.inf)


def half_width(stds, freedom, level):
    """Half of central intervals, from standard deviations that are right for 95 %."""
    normal = np.isinf(freedom)
    ratio = stdtrit(np.where(normal, 1.0, freedom), 0.5 + level / 2) / stdtrit(
        np.where(normal, 1.0, freedom), 0.975
    )
    return _NORMAL * stds * np.where(normal, ndtri(0.5 + level / 2) / _NORMAL, ratio)


def shared_variance(heard, largest):
    """Common variance from means of values and squares that were heard; at most `largest`."""
    raw, _ = _raw(heard, largest)
    grid = largest * _GRID
    logs, n = np.zeros(len(grid)), len(raw.values)
    if n > 1:
        common = largest
        for _ in range(2):  # weights rest on a variance, too
            weight = 1 / (raw.noise + 2 * max(common, grid[0]) ** 2 / raw.rows)
            common = np.average(raw.values, weights=weight)
        weight /= weight.sum()
        error = weight**2 @ raw.noise + 2 * grid**2 * (weight**2 @ (1 / raw.rows))
        error *= n / (n - 1)  # an agent learns from others
        logs = -0.5 * (np.log(error) + (common - grid) ** 2 / error)
    belief = softmax(logs)
    centre = belief @ np.log(grid)
    heard_spread = belief @ (np.log(grid) - centre) ** 2 + _COARSE
    # What messages tell, without what the prior does.
    told = max(1 / heard_spread - 1 / (_UNKNOWN + _COARSE), np.finfo(float).tiny)
    spread = 1 / told + polygamma(1, _ALIKE / 2)
    rows = np.interp(-spread, -polygamma(1, _DEGREES / 2), _DEGREES)
    # An inverse chi-squared distribution whose logarithm has the same mean and variance.
    scale = np.exp(centre + _log_mean(_ALIKE) - _log_mean(rows))
    return Shared(float(belief @ grid), float(scale), float(rows), largest)


def _log_mean(rows):
    """Mean logarithm of a scaled inverse chi-squared variable around 1."""
    return np.log(rows / 2) - psi(rows / 2)


def heard_variances(heard, shared):
    """Variances (n,) of the rows of senders, from means of values and squares that were heard.

    They are shrunk to what they have in common as far as noise and few rows make them uncertain,
    and lie between a quarter of it and the largest possible one. Values may be skewed, so that an
    agent's variance goes with its mean by chance: the error of a variance is taken to be the
    largest one that the range of values allows.
    """
    raw, told = _raw(heard, shared.mean)
    found = np.full(len(told), shared.mean)
    if told.any():
        error = raw.noise + 4 * shared.largest * shared.mean / raw.rows
        apart = np.average((raw.values - shared.mean) ** 2 - error, weights=1 / error)
        spread = max(apart, 0.0)
        found[told] += spread / (spread + error) * (raw.values - shared.mean)
    return np.clip(found, shared.mean / 4, shared.largest)


def _raw(heard, typical):
    """Estimates from messages of agents with two rows or more, and who these are (n,)."""
    (value, square), data, noise = heard
    n_rows = 1 / data
    told = n_rows > 1.5
    value, noise, n_rows = value[told], noise[told], n_rows[told]
    values = (square[told] / SQUARE - value**2 + noise) * n_rows / (n_rows - 1)
    if not len(values):
        return _Raw(values, noise, n_rows), told
    # The noise of an agent's own mean would be correlated with its square.
    centre = np.average(value, weights=1 / (noise + typical / n_rows))
    errors = noise / SQUARE**2 + 2 * noise**2 + 4 * centre**2 * noise
    return _Raw(values, errors * (n_rows / (n_rows - 1)) ** 2, n_rows - 1), told


_DOUBTS = in_doubt(_FREEDOM)
