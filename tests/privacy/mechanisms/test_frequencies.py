"""Label frequencies of clients as one noisy sum: sensitivity, noise, the prior from it."""

import itertools

import numpy as np
import pytest

from pfl_sklearn.priors import DirichletPrior
from pfl_sklearn.privacy import FrequencyMoments, GaussianMechanism
from pfl_sklearn.privacy._mechanisms._noise import public_grid
from tests.helpers.hostile import hostile

SHAPES = [FrequencyMoments(), FrequencyMoments(square=False), FrequencyMoments(frequencies=False)]


@pytest.mark.parametrize("shape", SHAPES, ids=repr)
def test_sensitivity_is_never_exceeded(shape):
    counts = hostile((2000, 3), usual=50.0)
    counts[::2] = np.abs(counts[::2])
    messages = shape.messages(counts)
    moves = np.linalg.norm(messages[1:] - messages[:-1], axis=1)
    assert moves.max() <= shape.sensitivity * (1 + 1e-12)
    assert np.linalg.norm(messages, axis=1).max() <= shape.zero_out_sensitivity * (1 + 1e-12)


@pytest.mark.parametrize("shape", SHAPES, ids=repr)
def test_sensitivity_is_attained(shape):
    """By clients of a single label; a client without rows is the far end of the squares."""
    messages = shape.messages(np.array([[5, 0, 0], [0, 9, 0], [0, 0, 0]]))
    moves = [np.linalg.norm(a - b) for a, b in itertools.combinations(messages, 2)]
    assert max(moves) == pytest.approx(shape.sensitivity)
    assert np.linalg.norm(messages, axis=1).max() == pytest.approx(shape.zero_out_sensitivity)


def test_messages_split_into_their_parts():
    table = np.array([[3, 1, 0], [0, 0, 2], [0, 0, 0]])
    shares = np.array([[0.75, 0.25, 0], [0, 0, 1], [0, 0, 0]])
    expected = {"frequencies": shares, "square": np.array([[0.625], [1.0], [0.0]])}
    for shape in SHAPES:
        parts = shape.split(shape.messages(table))
        assert set(parts) == {name for name in expected if getattr(shape, name)}
        for name, part in parts.items():
            np.testing.assert_array_equal(part, expected[name])


@pytest.mark.parametrize("shape", SHAPES, ids=repr)
def test_the_release_is_the_sum_with_noise(shape):
    """The noise is that of the generator, up to rounding to a public grid."""
    table = np.random.default_rng(1).multinomial(20, [0.2, 0.3, 0.5], 30)
    exact = shape.messages(table).sum(axis=0)
    noisy = exact + 2.5 * np.random.default_rng(7).standard_normal(len(exact))
    found, grid = shape.release(table, 2.5, np.random.default_rng(7)), public_grid(2.5)
    assert found.keys() == shape.split(exact).keys()
    for name, part in shape.split(noisy).items():
        np.testing.assert_allclose(found[name], part, rtol=0, atol=grid / 2)
        np.testing.assert_array_equal(found[name] / grid, np.rint(found[name] / grid))


@pytest.mark.parametrize(("m", "tolerance"), [(200, 0.5), (5000, 0.1)])
def test_the_prior_from_the_sums(m, tolerance):
    """Mean and concentration at epsilon = 4, and the gain that they are for."""
    rng = np.random.default_rng(0)
    mean, n_rows = np.array([0.1, 0.2, 0.3, 0.4]), np.resize([5, 20, 60], m)
    theta = rng.dirichlet(2 * mean, m)
    table = rng.multinomial(n_rows, theta)
    moments = FrequencyMoments()
    mechanism = GaussianMechanism(moments.sensitivity, epsilon=4.0, delta=1e-5)
    sums = moments.split(mechanism.privatize(moments.messages(table), rng))
    fitted = DirichletPrior().fit_sums(
        sums["frequencies"], sums["square"][0], n_rows, mechanism.noise_std
    )
    assert fitted.concentration == pytest.approx(2, rel=tolerance)
    np.testing.assert_allclose(fitted.mean, mean, atol=0.05)
    exact = DirichletPrior().fit_counts(table)
    losses = [-np.sum(theta * prior.log_frequencies(table)) / m for prior in (fitted, exact)]
    assert losses[0] < losses[1] + 0.02
