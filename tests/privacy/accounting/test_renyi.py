"""From Rényi divergences to epsilon: another library's figures, zCDP's inverse, exact Gaussians."""

import math

import numpy as np
import pytest
from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon

from pfl_sklearn.privacy import gdp_epsilon, rdp_to_dp
from pfl_sklearn.privacy._accounting._concentrated import zcdp_delta

ORDERS = 1 + np.geomspace(0.02, 1e4, 300)  # dp_accounting leaves out orders below 1.01


@pytest.mark.parametrize(("rho", "delta"), [(0.01, 1e-5), (0.5, 1e-10), (8.0, 1e-5)])
def test_linear_divergences(rho, delta):
    found = rdp_to_dp(ORDERS, rho * ORDERS, delta)
    assert found == pytest.approx(compute_epsilon(ORDERS, rho * ORDERS, delta)[0], rel=1e-12)
    log = math.log(1 / delta)
    assert found < rho + 2 * math.sqrt(rho * log)  # the older conversion at its best order
    # rho-zCDP is that of Gaussian noise, whose epsilon is known exactly.
    assert found > gdp_epsilon(math.sqrt(2 * rho), delta)


def test_the_inverse_of_zcdp():
    assert rdp_to_dp(ORDERS, 0.7 * ORDERS, zcdp_delta(0.7, 3.0)) == pytest.approx(3.0, rel=1e-4)


def test_orders_that_say_nothing():
    """One order is a sound bound, an infinite divergence is none, and epsilon is never below 0."""
    expected = 0.2 + (math.log(1e5) + 3 * math.log(3 / 4) - math.log(4)) / 3
    assert rdp_to_dp([4, 8], [0.2, math.inf], 1e-5) == pytest.approx(expected, rel=1e-12)
    assert rdp_to_dp([4], [math.inf], 1e-5) == math.inf
    assert rdp_to_dp([4], [0.0], 0.9) == 0.0


@pytest.mark.parametrize(
    ("orders", "rdp", "delta", "message"),
    [
        ([1.0, 2.0], [0.1, 0.1], 1e-5, r"orders must be in \(1, inf\); got .*1\."),
        ([2.0], [0.1], 0.0, r"delta must be in \(0, 1\); got 0\.0"),
        ([2.0, 3.0], [0.1], 1e-5, r"one length.*\(2,\) and \(1,\)"),
        ([], [], 1e-5, r"at least 1; got shapes \(0,\) and \(0,\)"),
        (2.0, 0.1, 1e-5, r"sequences.*got shapes \(\) and \(\)"),
    ],
)
def test_numbers_out_of_range(orders, rdp, delta, message):
    with pytest.raises(ValueError, match=message):
        rdp_to_dp(orders, rdp, delta)
