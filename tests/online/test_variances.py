"""Variances of rows as exact sums and noisy messages tell them."""

import numpy as np
import pytest

from pfl_sklearn.online._received_means import Means
from pfl_sklearn.online._variances import (
    SQUARE,
    own_variances,
    received_variances,
    shared_variance,
    value_and_square,
)

N = 400


def received(n_rows, sd, noise, seed=0):
    """Exact sums (2, n) of agents whose values have `sd` (n,), and messages of these."""
    rng = np.random.default_rng(seed)
    y = rng.uniform(-0.2, 0.2, N) + sd * rng.uniform(-1, 1, (n_rows, N)) * 3**0.5
    sums = sum(value_and_square(row, True) for row in y)
    values = sums / n_rows + rng.normal(0, noise, sums.shape)
    return sums, Means(values, np.full(N, 1 / n_rows), np.full(N, noise**2))


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.03])
def test_what_all_have_in_common(noise):
    sums, means = received(20, np.full(N, 0.1), noise)
    shared = shared_variance(means, 0.25)
    assert shared.mean == pytest.approx(0.01, rel=0.2)
    assert shared.rows > 3
    variances, inflation = own_variances(np.full(N, 20), sums, shared, False)
    exact = sums[1] / SQUARE / 20 - (sums[0] / 20) ** 2
    weight = 19 / (19 + shared.rows)
    expected = weight * exact * 20 / 19 + (1 - weight) * shared.scale
    np.testing.assert_allclose(variances, expected)
    assert (inflation == pytest.approx(inflation[0])) & (1 < inflation[0] < 1.2)


def test_variances_that_noise_hides():
    """What is hidden is neither zero nor the noise: own rows alone decide."""
    sums, means = received(3, np.full(N, 0.02), 0.5)
    shared = shared_variance(means, 0.25)
    assert shared.rows < 2
    variances, inflation = own_variances(np.full(N, 3), sums, shared, True)
    assert np.median(variances) == pytest.approx(4e-4, rel=0.5)
    assert np.median(inflation) > 1.5
    assert (received_variances(means, shared) > 1e-5).all()


def test_before_anybody_has_two_rows():
    sums, means = received(1, np.full(N, 0.1), 0.0)
    shared = shared_variance(means, 0.25)
    variances, inflation = own_variances(np.ones(N), sums, shared, True)
    assert shared.rows < 1
    assert 0.1 < (variances * inflation)[0] <= 0.25
    np.testing.assert_allclose(received_variances(means, shared), shared.mean)


@pytest.mark.parametrize("noise", [0.0, 0.003])
def test_agents_of_two_kinds(noise):
    sd = np.repeat([0.05, 0.2], N // 2)
    _, means = received(2000, sd, noise)
    found = received_variances(means, shared_variance(means, 0.25))
    assert np.sqrt(found[: N // 2]).mean() == pytest.approx(0.05, rel=0.5)
    assert np.sqrt(found[N // 2 :]).mean() == pytest.approx(0.2, rel=0.1)


def test_estimates_do_not_depend_on_the_unit():
    sums, means = received(5, np.full(N, 0.1), 0.0)
    small = Means(means.values * [[1e-3], [1e-6]], means.data, means.noise)
    shared, scaled = shared_variance(means, 0.25), shared_variance(small, 0.25e-6)
    assert scaled.rows == pytest.approx(shared.rows)
    assert scaled.scale == pytest.approx(1e-6 * shared.scale)
    own, _ = own_variances(np.full(N, 5), sums, shared, False)
    own_small, _ = own_variances(np.full(N, 5), sums * [[1e-3], [1e-6]], scaled, False)
    np.testing.assert_allclose(own_small, 1e-6 * own)
