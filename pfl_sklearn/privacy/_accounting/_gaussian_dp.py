"""Gaussian differential privacy (GDP): exact accounting of unsampled Gaussian mechanisms.

A Gaussian mechanism whose noise has standard deviation z times its L2 sensitivity is mu-GDP with
mu = 1/z. Composition adds the squares of mu, and mu converts exactly to (epsilon, delta).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr

from pfl_sklearn.privacy._accounting._events import check_positive_delta, check_value

# Bracket of the calibration: noise from 1e-8 to 1e12 times the sensitivity.
_LOG_MUS = (math.log(1e-12), math.log(1e8))


def gdp_delta(mu: float, epsilon: float) -> float:
    r"""Smallest delta at which a mu-GDP mechanism is (epsilon, delta)-DP.

    .. math:: \delta(\epsilon) = \Phi(\mu/2 - \epsilon/\mu) - e^\epsilon \Phi(-\mu/2 - \epsilon/\mu)

    Parameters
    ----------
    mu : float, >= 0
        Gaussian-DP parameter: L2 sensitivity divided by the standard deviation of the noise.
    epsilon : float, >= 0
        Epsilon at which delta is wanted.

    References
    ----------
    Balle, B. and Wang, Y.-X. (2018). Improving the Gaussian mechanism for differential privacy.
    ICML. Dong, J., Roth, A. and Su, W. (2022). Gaussian differential privacy. JRSS B.

    Examples
    --------
    >>> from pfl_sklearn.privacy import gdp_delta
    >>> round(gdp_delta(1.0, 4.3772), 7)
    1e-05
    """
    _check_mu(mu)
    check_value("epsilon", epsilon, epsilon >= 0, "at least 0")
    if mu == 0 or math.isinf(epsilon):
        return 0.0
    if math.isinf(mu):
        return 1.0
    # The second term in logarithms: e^epsilon overflows where the normal tail underflows.
    log_second = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    return max(0.0, float(ndtr(mu / 2 - epsilon / mu)) - math.exp(min(log_second, 0.0)))


def gdp_epsilon(mu: float, delta: float) -> float:
    """Smallest epsilon at which a mu-GDP mechanism is (epsilon, delta)-DP.

    Parameters
    ----------
    mu : float, >= 0
        Gaussian-DP parameter: L2 sensitivity divided by the standard deviation of the noise.
    delta : float in [0, 1)
        Delta at which epsilon is wanted.

    Returns
    -------
    float
        Infinity if `delta` is 0 and `mu` is not.

    Examples
    --------
    >>> from pfl_sklearn.privacy import gdp_epsilon
    >>> round(gdp_epsilon(1.0, 1e-5), 4), round(gdp_epsilon(2.0, 1e-5), 4)
    (4.3772, 9.9973)
    """
    _check_mu(mu)
    check_value("delta", delta, 0 <= delta < 1, "in [0, 1)")
    if mu == 0 or gdp_delta(mu, 0.0) <= delta:
        return 0.0  # the total variation distance is at most delta
    if delta == 0 or math.isinf(mu):
        return math.inf  # Gaussian noise has no pure epsilon
    high = 1.0
    while gdp_delta(mu, high) > delta:
        high *= 2
    return float(brentq(lambda epsilon: gdp_delta(mu, epsilon) - delta, 0.0, high, xtol=1e-12))


def gdp_mu(epsilon: float, delta: float) -> float:
    """Largest mu at which mu-GDP implies (epsilon, delta)-DP: the analytic Gaussian mechanism.

    Divide the L2 sensitivity by mu to get the standard deviation of the noise.

    Parameters
    ----------
    epsilon : float, > 0
        Unlike in the classic calibration, it may be 1 or larger.
    delta : float in (0, 1)
        Delta of the mechanism.

    Returns
    -------
    float
        Infinity if `epsilon` is infinite.

    Raises
    ------
    ValueError
        If `epsilon` or `delta` is out of range, or both are too extreme for floating point.

    Examples
    --------
    >>> from pfl_sklearn.privacy import gdp_mu
    >>> round(1 / gdp_mu(4.3772, 1e-5), 3)
    1.0
    """
    check_value("epsilon", epsilon, epsilon > 0, "above 0")
    check_positive_delta(delta)
    if math.isinf(epsilon):
        return math.inf
    return math.exp(largest_log(gdp_delta, epsilon, delta, _LOG_MUS, "Gaussian"))


def largest_log(
    delta_at: Callable[[float, float], float],
    epsilon: float,
    delta: float,
    bracket: tuple[float, float],
    noise: str,
) -> float:
    """Logarithm of the parameter at which ``delta_at(parameter, epsilon)`` reaches `delta`.

    Raises ValueError if it is not in the `bracket` of logarithms.
    """

    # On a logarithmic scale, where one absolute tolerance serves noise of any size.
    def excess(log_parameter: float) -> float:
        return delta_at(math.exp(log_parameter), epsilon) - delta

    smallest, largest = bracket
    if excess(smallest) > 0 or excess(largest) < 0:
        raise ValueError(
            f"cannot calibrate {noise} noise to epsilon={epsilon!r} and delta={delta!r} in "
            "floating point; choose less extreme values."
        )
    return float(brentq(excess, smallest, largest, xtol=1e-13))


def compose_gdp(mus: Iterable[float]) -> float:
    """Gaussian-DP parameter of several mechanisms on the same data: the root of the sum of squares.

    Parameters
    ----------
    mus : iterable of float, >= 0
        Gaussian-DP parameters of the mechanisms.

    Examples
    --------
    >>> from pfl_sklearn.privacy import compose_gdp
    >>> compose_gdp([3.0, 4.0])
    5.0
    """
    mus = list(mus)
    for mu in mus:
        _check_mu(mu, "mus")
    return math.sqrt(math.fsum(mu * mu for mu in mus))


def _check_mu(mu: float, name: str = "mu") -> None:
    """Raise ValueError unless a Gaussian-DP parameter is a number of at least 0."""
    check_value(name, mu, mu >= 0, "at least 0")
