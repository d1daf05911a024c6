"""Gaussian DP, calibration and the facade: golden values and inverses."""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from pfl_sklearn.privacy import (
    GaussianEvent,
    calibrate_noise,
    compose_gdp,
    epsilon_spent,
    events_epsilon,
    gdp_delta,
    gdp_epsilon,
    gdp_mu,
)
from pfl_sklearn.privacy._accounting._calibration import largest_affordable_rate


def test_golden_values():
    """A noise multiplier of 1 at delta = 1e-5, under either relation."""
    assert gdp_epsilon(1.0, 1e-5) == pytest.approx(4.3772, abs=5e-5)
    assert gdp_epsilon(2.0, 1e-5) == pytest.approx(9.9973, abs=5e-5)
    for sensitivity, relation in ((1.0, "add_remove"), (2.0, "replace_one"), (1.0, "zero_out")):
        expected = 9.9973 if relation == "replace_one" else 4.3772
        got = epsilon_spent(1.0, sensitivity, delta=1e-5, relation=relation)
        assert got == pytest.approx(expected, abs=5e-5)
    for under, expected in (("replace_one", 9.9973), ("zero_out", 4.3772)):
        got = epsilon_spent(1.0, 1.0, delta=1e-5, relation="add_remove", under=under)
        assert got == pytest.approx(expected, abs=5e-5)


def test_printed_noise_for_many_coordinates_is_too_small():
    """Per-coordinate calibration at d = 100: a claimed epsilon of 1 is 10.1."""
    bound, epsilon, delta, d = 1.0, 1.0, 1e-5, 100
    printed = bound / epsilon * math.sqrt(8 * math.log(2 / delta))
    real = epsilon_spent(printed, 2 * bound * math.sqrt(d), delta=delta)
    assert real == pytest.approx(10.1, abs=0.05)


@pytest.mark.parametrize(("mu", "epsilon"), [(0.3, 0.5), (1.0, 2.0), (3.0, 10.0), (1.0, 0.0)])
def test_delta_is_the_hockey_stick_divergence(mu, epsilon):
    def excess(x):
        return max(norm.pdf(x, mu) - math.exp(epsilon) * norm.pdf(x), 0.0)

    threshold = epsilon / mu + mu / 2
    expected = quad(excess, threshold, threshold + 40, epsabs=1e-14)[0]
    assert gdp_delta(mu, epsilon) == pytest.approx(expected, rel=1e-7)


@settings(max_examples=100, deadline=None)
@given(st.floats(0.01, 50), st.floats(-12, -1), st.integers(1, 1000))
def test_calibration_inverts_accounting(epsilon, log_delta, n_releases):
    delta = 10**log_delta
    std = calibrate_noise(epsilon, delta, 2.5, n_releases=n_releases)
    spent = epsilon_spent(std, 2.5, delta=delta, n_releases=n_releases)
    assert spent == pytest.approx(epsilon, rel=1e-5, abs=1e-7)
    assert epsilon_spent(0.99 * std, 2.5, delta=delta, n_releases=n_releases) > epsilon


def test_composition():
    assert compose_gdp([3.0, 4.0]) == 5.0
    together = epsilon_spent(3.0, 1.0, delta=1e-6, n_releases=9)
    assert together == pytest.approx(gdp_epsilon(1.0, 1e-6))
    nothing = GaussianEvent(None, None, n_releases=0)  # its cost does not matter
    assert events_epsilon([nothing], 1e-6, "replace_one") == 0


@settings(max_examples=100, deadline=None)
@given(st.floats(1e-4, 50), st.floats(0.3, 3), st.floats(1e-3, 1e3))
def test_the_largest_rate_within_an_epsilon(guess, power, scale):
    """Of a cost that is a power of the rate, and infinite at large rates."""
    low, high, epsilon = 1e-4, 50.0, 2.0

    def spent(rate):
        assert low * (1 - 1e-12) <= rate <= high
        return scale * rate**power if rate < 30 else math.inf

    exact = min((epsilon / scale) ** (1 / power), 30.0)
    found = largest_affordable_rate(epsilon, spent, low, high, guess)
    if exact < low:
        assert found is None
    else:
        assert spent(found) <= epsilon
        assert found == pytest.approx(exact, rel=2e-4)
    assert largest_affordable_rate(epsilon, lambda rate: 0.0, low, high, guess) == high


def test_limits():
    assert gdp_epsilon(0.0, 1e-5) == 0
    assert gdp_epsilon(1.0, 0.0) == math.inf
    assert gdp_epsilon(1e-9, 0.5) == 0
    assert gdp_delta(math.inf, 1.0) == 1
    assert gdp_delta(1.0, math.inf) == 0
    assert gdp_mu(math.inf, 1e-5) == math.inf
    assert np.isfinite(gdp_mu(1e-6, 1e-12))


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: gdp_mu(0.0, 1e-5), r"epsilon.*\b0\.0\b"),
        (lambda: gdp_mu(1e40, 1e-5), r"epsilon=1e\+40\b.*delta=1e-05"),
        (lambda: gdp_mu(1.0, 0.0), r"delta.*\(0, 1\).*\b0\.0\b"),
        (lambda: gdp_epsilon(1.0, 1.0), r"delta.*\[0, 1\).*\b1\.0\b"),
        (lambda: epsilon_spent(0.0, 1.0, delta=0.1), r"noise_std.*\b0\.0\b"),
        (lambda: epsilon_spent(1.0, 1.0, delta=0.1, n_releases=0), r"n_releases.*\b0\b"),
        (
            lambda: epsilon_spent(1.0, 1.0, delta=0.1, relation="swap"),
            r"relation.*add_remove, replace_one, zero_out.*'swap'",
        ),
        (
            lambda: epsilon_spent(1.0, 1.0, delta=0.1, under="swap"),
            r"under.*add_remove, replace_one, zero_out.*'swap'",
        ),
        (
            lambda: epsilon_spent(1.0, 2.0, delta=0.1, under="add_remove"),
            r"relation='replace_one'.*under='add_remove'",
        ),
    ],
)
def test_bad_input(call, error):
    with pytest.raises(ValueError, match=error):
        call()
