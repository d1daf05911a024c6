"""Zero-concentrated differential privacy (zCDP) of unsampled discrete Gaussian noise.

Integer noise with parameter sigma on vectors of integers with L2 sensitivity D is rho-zCDP with
rho = D^2 / (2 sigma^2), in any dimension, like continuous noise (Section 2 of Canonne, Kamath and
Steinke, 2020).
"""

from __future__ import annotations

import math

from scipy.optimize import brentq

from pfl_sklearn.privacy._accounting._events import check_positive_delta, check_value
from pfl_sklearn.privacy._accounting._gaussian_dp import largest_log

# Bracket of the calibration: noise from about 1e-6 to 1e10 times the sensitivity.
_LOG_RHOS = (math.log(1e-20), math.log(1e12))
_SMALLEST_LOG_EXCESS = math.log(1e-12)  # of alpha over 1


def zcdp_delta(rho: float, epsilon: float) -> float:
    r"""Delta at which rho-zCDP implies (epsilon, delta)-DP.

    .. math:: \delta = \min_{\alpha > 1} \frac{e^{(\alpha - 1)(\alpha \rho - \epsilon)}}{\alpha - 1}
              \Bigl(1 - \frac{1}{\alpha}\Bigr)^\alpha

    Every alpha gives a sound bound (Section 2.3 of Canonne, Kamath and Steinke, 2020).
    """

    def slope(log_excess: float) -> float:
        # Derivative of the logarithm of the bound by alpha, which increases with alpha.
        excess = math.exp(log_excess)
        return (1 + 2 * excess) * rho - epsilon - math.log1p(1 / excess)

    low, high = _SMALLEST_LOG_EXCESS, math.log((epsilon + 1) / (2 * rho) + 2)
    # Every alpha is sound, so an inexact minimum costs noise and no privacy.
    excess = math.exp(low if slope(low) >= 0 else brentq(slope, low, high, xtol=1e-12))
    power = (1 + excess) * rho - epsilon
    log_delta = excess * power - (1 + excess) * math.log1p(1 / excess) - math.log(excess)
    return math.exp(min(log_delta, 0.0))


def zcdp_rho(epsilon: float, delta: float) -> float:
    """Largest rho at which rho-zCDP implies (epsilon, delta)-DP.

    Raises ValueError if `epsilon` or `delta` is out of range or too extreme for floating point.
    """
    check_value("epsilon", epsilon, 0 < epsilon < math.inf, "in (0, inf)")
    check_positive_delta(delta)
    log_rho = largest_log(zcdp_delta, epsilon, delta, _LOG_RHOS, "discrete Gaussian")
    # The root is within 1e-13 on either side; ten times that below it, rho never overspends.
    return math.exp(log_rho - 1e-12)
