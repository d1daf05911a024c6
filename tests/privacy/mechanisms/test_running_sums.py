"""Noise on running sums: sensitivity, variance, and that it is no more than it says."""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from pfl_sklearn.privacy._mechanisms._binary_tree import BinaryTree
from pfl_sklearn.privacy._mechanisms._printed._partial_sums import PartialSums
from pfl_sklearn.privacy._mechanisms._square_root import SquareRootSums
from tests.helpers.draws import ROUNDING
from tests.helpers.noise import OneAtATime, noise_matrix

N = 24
MECHANISMS = [
    SquareRootSums(0.7, N),
    SquareRootSums(0.7),
    SquareRootSums(0.7, 3 * N),
    BinaryTree(0.7, N),
    BinaryTree(0.7),
    PartialSums(0.7),
]
every = pytest.mark.parametrize("mechanism", MECHANISMS, ids=repr)


def costs(mechanism, n=N):
    """Gaussian-DP parameter (n,) of all releases when one value is replaced, by its step."""
    sums = np.tril(np.ones((n, n)))
    return np.linalg.norm(np.linalg.solve(noise_matrix(mechanism, n), sums), axis=0)


@every
def test_no_value_costs_more_than_promised(mechanism):
    assert costs(mechanism).max() <= 0.7 * (1 + 1e-9)
    if mechanism in (MECHANISMS[0], MECHANISMS[3], MECHANISMS[5]):  # and no less at the horizon
        assert costs(mechanism).max() == pytest.approx(0.7, rel=1e-9)


@every
def test_variance_is_that_of_the_noise(mechanism):
    np.testing.assert_allclose(
        mechanism.variance(np.arange(1, N + 1)), (noise_matrix(mechanism, N) ** 2).sum(axis=1)
    )


@every
def test_releases_are_the_sums_and_this_noise(mechanism):
    """To the rounding of the grid, which is that of the noise of a single value."""
    registers, rng = np.zeros((mechanism.n_registers(N), N)), OneAtATime()
    for k, noise in enumerate(noise_matrix(mechanism, N), 1):
        sums = np.full(N, k / 3)
        released = mechanism.privatize(sums, registers, k, rng)
        np.testing.assert_allclose(released - sums, noise, rtol=0, atol=ROUNDING / 0.7)


@pytest.mark.parametrize("mechanism", [m for m in MECHANISMS if m.horizon is not None], ids=repr)
def test_a_step_past_the_horizon_is_refused_before_any_noise_is_drawn(mechanism):
    registers, rng = np.ones((mechanism.n_registers(N), 2)), np.random.default_rng(0)
    before = rng.bit_generator.state
    late = np.array([1, mechanism.horizon + 1])  # one stream of two
    with pytest.raises(ValueError, match=f"horizon is {mechanism.horizon}; .*{late[1]}"):
        mechanism.privatize(np.zeros(2), registers, late, rng)
    assert rng.bit_generator.state == before
    np.testing.assert_array_equal(registers, 1)
    mechanism.privatize(np.zeros(2), registers, late - 1, rng)  # the last one


@every
def test_cost_of_replacing_all_values(mechanism):
    sums = np.arange(1.0, N + 1)
    expected = np.linalg.norm(np.linalg.solve(noise_matrix(mechanism, N), sums))
    assert mechanism.all_values_mu(N) == pytest.approx(expected)


def test_no_value_costs_more_than_promised_however_long_the_stream_is():
    """The first column of C, far beyond what fits into a matrix, and its squares without end."""
    mechanism, steps = SquareRootSums(0.7), np.arange(1_000_000)
    gaps, weights = mechanism.encoder
    terms = zip(gaps, weights, strict=True)
    column = sum(weight * np.exp(steps * np.log1p(-gap)) for gap, weight in terms)
    spent = np.sqrt(np.cumsum(column**2)) / mechanism.noise_std
    assert spent[9_999] < 0.9 * 0.7  # there is much to come
    assert spent[-1] <= 0.7
    # Products of two exponentials are geometric sequences.
    series = np.outer(weights, weights) / (gaps[:, None] + gaps - np.outer(gaps, gaps))
    assert math.sqrt(math.fsum(series.ravel())) == pytest.approx(0.7 * mechanism.noise_std)
    at = np.array([1e5, 1e6, 1e7])  # they follow the power that they stand for
    found = np.exp(np.outer(at, np.log1p(-gaps))) @ weights
    np.testing.assert_allclose(found * at**0.55 * math.gamma(0.45), 1, rtol=0.05)


def test_blocks_of_all_lengths_together_cost_what_is_promised():
    """Squares of mu, of which the lengths beyond S take 6 / pi**2 / S to first order."""
    tree, n = BinaryTree(0.7), 10_000
    spent = math.fsum(tree.noise_std(level) ** -2 for level in range(n))
    assert spent < 0.7**2
    assert spent + 0.7**2 * 6 / math.pi**2 / n == pytest.approx(0.7**2, rel=1e-7)


@given(horizon=st.integers(1, 200), mu=st.floats(0.01, 10))
@settings(max_examples=30, deadline=None)
def test_square_root_at_any_horizon(horizon, mu):
    mechanism = SquareRootSums(mu, horizon)
    n = min(horizon, 40)
    found = costs(mechanism, n)
    assert found.max() <= mu * (1 + 1e-9)
    if n == horizon:
        assert found[0] == pytest.approx(mu)


def test_streams_advance_each_at_its_own_release():
    tree = BinaryTree(1.0, 64)
    together = np.zeros((tree.n_registers(7), 2))
    rng = np.random.default_rng(0)
    for k in range(1, 7):
        tree.advance(together, np.array([k, min(k, 1)]), rng)
    # One stream is at release 6 = 4 + 2, the other at its first again and again.
    np.testing.assert_array_equal(together != 0, [[False, True], [True, False], [True, False]])


@pytest.mark.parametrize("horizon", [50, 1000, 30_000])
def test_exponentials_cost_hardly_any_noise(horizon):
    mechanism = SquareRootSums(1.0, horizon)
    steps = np.arange(1, horizon)
    exact = np.cumprod(np.concatenate([[1.0], (2 * steps - 1) / (2 * steps)]))
    squares = np.cumsum(exact**2)
    at = np.array([1, 20, horizon])
    assert mechanism.variance(at) / (squares[-1] * squares[at - 1]) == pytest.approx(1, abs=0.02)
    assert len(mechanism.encoder.gaps) <= 11


def test_known_variances():
    """With the paper's range of sqrt(3) and mu of (1, 1e-6): 1,012 for the square root."""
    scale = math.sqrt(3) / 0.2367
    assert scale**2 * SquareRootSums(1.0, 30_000).variance(30_000) == pytest.approx(1012, rel=0.02)
    assert BinaryTree(1.0, 30_000).variance(2**14) == pytest.approx(15)
    assert PartialSums(0.5).variance(3) == 12


@pytest.mark.parametrize("steps", [50, 300, 1000, 30_000])
def test_an_unknown_horizon_doubles_the_variance_of_the_noise(steps):
    """The best linear mean has at most 2.1 times the variance; doubled horizons have up to 3."""
    known, unknown = SquareRootSums(1.0, steps), SquareRootSums(1.0)
    ratio = unknown.noise_std**2 / unknown.response(steps).squares[-1]
    ratio /= known.noise_std**2 / known.response(steps).squares[-1]
    assert 1 < ratio < 2.1
