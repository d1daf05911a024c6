"""Discrete Laplace noise: its law, its bits, and its bounds."""

import numpy as np
import pytest
from scipy.stats import chisquare

from pfl_sklearn.privacy import DiscreteLaplaceMechanism
from pfl_sklearn.privacy._mechanisms import _discrete_laplace as module


def agrees_with_the_law(draws, sensitivity, epsilon):
    """Whether the counts of draws pass a chi-squared test of the stated probabilities."""
    ratio = np.exp(-epsilon / sensitivity)
    values = np.arange(-6 * sensitivity, 6 * sensitivity + 1)
    expected = (1 - ratio) / (1 + ratio) * ratio ** np.abs(values) * len(draws)
    kept = expected > 20
    observed = np.array([np.sum(draws == value) for value in values[kept]])
    observed, expected = np.append(observed, len(draws) - observed.sum()), expected[kept]
    return chisquare(observed, np.append(expected, len(draws) - expected.sum())).pvalue > 1e-4


@pytest.mark.parametrize(("sensitivity", "epsilon"), [(1, 1.0), (1, 0.1), (5, 2.0), (1, 3.0)])
def test_draws_have_the_stated_odds(sensitivity, epsilon):
    mechanism = DiscreteLaplaceMechanism(sensitivity, epsilon)
    zeros, rng = np.zeros(40_000, dtype=int), np.random.default_rng(0)
    assert agrees_with_the_law(mechanism.privatize(zeros, rng), sensitivity, epsilon)
    # With odds of the truth that are half as large again, or noise half as large, it fails.
    bold = DiscreteLaplaceMechanism(sensitivity, epsilon + np.log(1.5))
    assert not agrees_with_the_law(bold.privatize(zeros, rng), sensitivity, epsilon)
    small = mechanism.privatize(zeros, rng) // 2
    assert not agrees_with_the_law(small, sensitivity, epsilon)


def test_the_stated_variance_is_that_of_the_law():
    mechanism = DiscreteLaplaceMechanism(3, 2.0)
    values, ratio = np.arange(-500, 501), np.exp(-2 / 3)
    law = (1 - ratio) / (1 + ratio) * ratio ** np.abs(values)
    assert mechanism.noise_variance == pytest.approx(law @ values**2)
    assert mechanism.noise_std**2 == pytest.approx(mechanism.noise_variance)


@pytest.mark.parametrize("sensitivity", [1, 1024, 2**20, 2**35])
@pytest.mark.parametrize("epsilon", [1.0, 1 / 3, 0.9, 1e7])
def test_epsilon_is_rounded_down(sensitivity, epsilon):
    mechanism = DiscreteLaplaceMechanism(sensitivity, epsilon)
    kept = sensitivity / mechanism.scale
    assert kept <= epsilon
    assert kept > 0.998 * min(epsilon, 1e6)
    drawn = mechanism.privatize(np.zeros(200, dtype=int), np.random.default_rng(0))
    assert np.std(drawn) == pytest.approx(mechanism.noise_std, rel=0.5, abs=0.5)


def test_words_that_would_favour_small_numbers_are_drawn_again():
    words = iter([[2**64 - 1, 2**64 - 2], [2**64 - 1], [4]])  # 2**64 is 1 more than 3 times a whole

    def source(size):
        return np.array(next(words), dtype=np.uint64)

    assert module._uniform_below(np.array([3, 3]), source).tolist() == [1, 2]


def test_without_a_seed_bits_come_from_the_operating_system(monkeypatch):
    mechanism, zeros = DiscreteLaplaceMechanism(1000, 0.5), np.zeros(50, dtype=int)
    np.random.seed(0)
    first = mechanism.privatize(zeros)
    np.random.seed(0)
    assert (mechanism.privatize(zeros) != first).any()
    again = [mechanism.privatize(zeros, np.random.default_rng(1)) for _ in range(2)]
    np.testing.assert_array_equal(*again)
    asked = []
    monkeypatch.setattr(module.os, "urandom", lambda n: asked.append(n) or bytes(8 * n)[:n])
    with pytest.raises(RuntimeError):
        monkeypatch.setattr(module, "_exponential_coins", _stop)
        mechanism.privatize(zeros)
    assert asked == [8 * 50]


def _stop(*_):
    raise RuntimeError


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ((0, 1.0), "sensitivity must be a whole number"),
        ((1.5, 1.0), "sensitivity must be a whole number"),
        ((2**40, 1.0), "sensitivity must be a whole number"),
        ((1, 0.0), "epsilon must be positive"),
        ((1, np.inf), "epsilon must be positive"),
        ((1, np.nan), "epsilon must be positive"),
        ((2**39, 1e-3), "epsilon must be at least 0.5 at this sensitivity"),
    ],
)
def test_parameters_out_of_range_are_refused(params, message):
    with pytest.raises(ValueError, match=message):
        DiscreteLaplaceMechanism(*params)


def test_nothing_is_released_of_no_values():
    assert DiscreteLaplaceMechanism(1, 1.0).privatize(np.zeros(0, dtype=int)).shape == (0,)
