"""Variances of the agents' rows, estimated from messages and from an agent's own rows.

Agents' variances have a scaled inverse chi-squared distribution with four degrees of freedom about
a common one, which is estimated from messages. Noise may hide it for long. Its logarithm has a
uniform prior, so that an agent's own rows decide until then.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.special import ndtri, polygamma, psi, softmax, stdtrit

from pfl_sklearn._typing import Bools, Floats, Integers
from pfl_sklearn.online._received_means import Means

# The square of a value in units of the range, around its middle, times this: replacing a row then
# changes value and square together by no more than the value alone.
SQUARE = 3.3
# Degrees of freedom of the agents' variances around the common one: four rows weigh as much.
_SHARED_DEGREES = 4.0
# Common variances, in units of the largest: down to that of rounding.
_COMMON_VARIANCES = np.geomspace(1e-16, 1.0, 401)
# The same degrees where noise makes the common variance uncertain: down to nothing known.
_EFFECTIVE_DEGREES = np.geomspace(0.01, _SHARED_DEGREES, 200)
# Degrees of freedom whose factors are tabulated; with 10^4 of them Student's is normal.
_STUDENT_DEGREES = np.geomspace(0.1, 1e4, 400)
# Variance of the logarithm of a common variance before any message, and within a grid step.
_PRIOR_SPREAD = np.log(_COMMON_VARIANCES).var()
_STEP_SPREAD = np.log(_COMMON_VARIANCES[1] / _COMMON_VARIANCES[0]) ** 2 / 12
# Variances of equal values, in units of the largest: what they are taken to be, and what rounding
# leaves of none.
_SMALLEST_VARIANCE, _EQUAL = 1e-12, 1e-15
# Half of the central 95 % of a normal distribution.
_NORMAL_HALF_WIDTH = 1.959964


class SharedVariance(NamedTuple):
    """The variance that agents have in common, as messages show it.

    An agent's variance has about a scaled inverse chi-squared distribution with `rows` degrees of
    freedom around `scale`.
    """

    mean: float
    scale: float
    rows: float
    largest: float


def value_and_square(values: Floats, with_squares: bool) -> Floats:
    """Values (n,) in [-1/2, 1/2] and, if wanted, their scaled squares: (1 or 2, n)."""
    return np.stack([values, SQUARE * values**2]) if with_squares else values[None]


def own_variances(
    rows: Integers, sums: Floats, shared: SharedVariance, bounded: bool
) -> tuple[Floats, Floats]:
    """Variance (n,) of each agent's rows from its exact sums (2, n), and its inflation (n,).

    A mean with an estimated variance is Student's, not normal. With its variance inflated by this
    factor, a normal distribution has the same central 95 %. Equal values say little about a
    `bounded` variance, because the next one may lie at the other end.
    """
    mean = sums[0] / rows
    squares = np.maximum(sums[1] / SQUARE - rows * mean**2, 0.0)
    freedom = rows - 1 + shared.rows
    variances = (squares + shared.rows * shared.scale) / freedom
    equal = squares <= _EQUAL * rows * shared.largest
    smallest = np.where(equal, _SMALLEST_VARIANCE, 0.0) * shared.largest
    variances = np.clip(variances, smallest, shared.largest)
    inflation = student_factor(freedom)
    if bounded:
        # Laplace's rule of succession: the next row lies at the other end with chance 1 / (n + 2).
        next_one = (0.5 + np.abs(mean)) ** 2 * (rows + 1) / (rows + 2) ** 2
        inflation = np.where(
            equal & (rows > 1), np.maximum(inflation, next_one / variances), inflation
        )
    return variances, np.minimum(inflation, shared.largest / variances)


def student_factor(freedom):
    """Factor on a mean's variance, estimated with degrees of freedom, for intervals of 95 %."""
    return (stdtrit(freedom, 0.975) / _NORMAL_HALF_WIDTH) ** 2


def with_student_factor(variances, own_means):
    """Variances of estimates (n,) as far as they rest on own means of uncertain variance.

    With them come the degrees of freedom (n,) of Student's distribution with the same central
    interval of 95 %.
    """
    if own_means.inflation.max() == 1:  # variances are known
        return variances.copy(), np.full(len(variances), np.inf)
    # Weighted by precision, an estimate with a tenth of the own mean's variance is a tenth its own.
    share = np.minimum(variances / own_means.variances, 1.0)
    factor = 1 / (1 - share + share / own_means.inflation)
    freedom = np.interp(-factor, -_STUDENT_FACTORS, _STUDENT_DEGREES)
    return variances * factor, np.where(factor > _STUDENT_FACTORS[-1], freedom, np.inf)


def half_width(stds, freedom, level):
    """Half of central intervals, from standard deviations that are right for 95 %."""
    upper, normal = 0.5 + level / 2, np.isinf(freedom)
    finite = np.where(normal, 1.0, freedom)
    ratio = stdtrit(finite, upper) / stdtrit(finite, 0.975)
    ratio = np.where(normal, ndtri(upper) / _NORMAL_HALF_WIDTH, ratio)
    return _NORMAL_HALF_WIDTH * stds * ratio


def shared_variance(received: Means, largest: float) -> SharedVariance:
    """Common variance from received means of values and squares; at most `largest`."""
    values, noise, rows, _ = _unbiased_variances(received, largest)
    grid = largest * _COMMON_VARIANCES
    logs, n = np.zeros(len(grid)), len(values)  # a uniform prior of the logarithm
    if n > 1:
        common = largest
        for _ in range(2):  # weights rest on a variance, too
            # A variance v estimated with r degrees of freedom has the variance 2 v^2 / r.
            weight = 1 / (noise + 2 * max(common, grid[0]) ** 2 / rows)
            common = np.average(values, weights=weight)
        weight /= weight.sum()
        error = weight**2 @ noise + 2 * grid**2 * (weight**2 @ (1 / rows))
        error *= n / (n - 1)  # an agent learns from others
        logs = -0.5 * (np.log(error) + (common - grid) ** 2 / error)
    belief = softmax(logs)
    centre = belief @ np.log(grid)
    posterior_spread = belief @ (np.log(grid) - centre) ** 2 + _STEP_SPREAD
    # The precision of the messages alone, without the prior's.
    precision = 1 / posterior_spread - 1 / (_PRIOR_SPREAD + _STEP_SPREAD)
    spread = 1 / max(precision, np.finfo(float).tiny) + polygamma(1, _SHARED_DEGREES / 2)
    rows = np.interp(-spread, -polygamma(1, _EFFECTIVE_DEGREES / 2), _EFFECTIVE_DEGREES)
    # An inverse chi-squared distribution whose logarithm has the same mean and variance.
    scale = np.exp(centre + _log_mean(_SHARED_DEGREES) - _log_mean(rows))
    return SharedVariance(float(belief @ grid), float(scale), float(rows), largest)


def _log_mean(rows):
    """Mean logarithm of a scaled inverse chi-squared variable around 1."""
    return np.log(rows / 2) - psi(rows / 2)


def received_variances(received: Means, shared: SharedVariance) -> Floats:
    """Variances (n,) of the rows of senders, from received means of values and squares."""
    # Shrunk towards the common variance, the more the less certain they are; between a quarter of
    # it and the largest possible one. Skewed values correlate an agent's variance with its mean by
    # chance, so the error is the largest that the range of values allows.
    values, noise, rows, has_two = _unbiased_variances(received, shared.mean)
    variances = np.full(len(has_two), shared.mean)
    if has_two.any():
        # Around its mean, the fourth moment of a value is at most variance times squared range.
        error = noise + 4 * shared.largest * shared.mean / rows
        excess = np.average((values - shared.mean) ** 2 - error, weights=1 / error)
        spread = max(excess, 0.0)
        variances[has_two] += spread / (spread + error) * (values - shared.mean)
    return np.clip(variances, shared.mean / 4, shared.largest)


def _unbiased_variances(received: Means, typical: float) -> tuple[Floats, Floats, Floats, Bools]:
    """Unbiased variances (m,) of agents' rows from messages, and parts of their errors.

    The parts are the variance from the noise (m,) and the degrees of freedom of the data (m,). It
    takes two rows; who has so many (n,) comes last.
    """
    (value, square), data, noise = received
    n_rows = 1 / data  # 0 without messages
    has_two = n_rows > 1.5
    value, noise, n_rows = value[has_two], noise[has_two], n_rows[has_two]
    values = (square[has_two] / SQUARE - value**2 + noise) * n_rows / (n_rows - 1)
    if not len(values):
        return values, noise, n_rows, has_two
    # The noise of an agent's own mean would be correlated with its square.
    centre = np.average(value, weights=1 / (noise + typical / n_rows))
    # The noise of the square, and that of the squared mean: var (c + e)^2 = 4 c^2 s + 2 s^2.
    errors = noise / SQUARE**2 + 2 * noise**2 + 4 * centre**2 * noise
    return values, errors * (n_rows / (n_rows - 1)) ** 2, n_rows - 1, has_two


_STUDENT_FACTORS = student_factor(_STUDENT_DEGREES)
