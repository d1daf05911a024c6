"""Clients with linear models, and digits dealt out by class."""

import numpy as np
import pytest
from scipy.stats import kstest
from sklearn.datasets import load_digits

from pfl_sklearn.datasets import (
    load_digits_clients,
    make_label_skew_clients,
    make_ppsgd_regression,
)
from pfl_sklearn.theory import linear_excess_risk


def test_regression_follows_the_paper():
    """Moments to four standard errors."""
    clients = make_ppsgd_regression(2000, 5, noise_std=0.5, random_state=0)
    assert clients.data.shape == (10_000, 100)
    np.testing.assert_array_equal(clients.groups, np.repeat(np.arange(2000), 5))
    own = clients.coef - clients.population_coef
    assert (own[:, :95] == 0).all()
    assert kstest(own[:, 95:].ravel(), "norm", (0, 0.01)).pvalue > 1e-3
    assert kstest(clients.population_coef, "norm", (0, 10)).pvalue > 1e-3
    np.testing.assert_allclose(clients.feature_variance, 1 / np.arange(1, 101))
    scaled = clients.data * np.sqrt(np.arange(1, 101))
    np.testing.assert_allclose(np.mean(scaled**2, axis=0), 1, atol=4.5 * np.sqrt(2 / 10_000))
    assert abs(np.mean(scaled[:, :-1] * scaled[:, 1:])) < 4 / np.sqrt(99 * 10_000)
    noise = clients.target - np.sum(clients.data * clients.coef[clients.groups], axis=1)
    assert kstest(noise, "norm", (0, 0.5)).pvalue > 1e-3


def test_excess_risk_is_what_new_rows_cost():
    clients = make_ppsgd_regression(50, 2000, n_features=8, random_state=0)
    fitted = clients.coef + np.random.default_rng(1).normal(size=clients.coef.shape)
    losses = (clients.target - np.sum(clients.data * fitted[clients.groups], axis=1)) ** 2
    risk = linear_excess_risk(fitted, clients.coef, clients.feature_variance)
    error = 4 * losses.std() / np.sqrt(len(losses))
    assert losses.mean() - 0.01**2 == pytest.approx(risk, abs=error)


def test_seeded_clients_are_those_of_the_authors_code():
    """Excess risk after one local step of 1/2, from a run of that code (N=40, d=12, 5 rows)."""
    clients = make_ppsgd_regression(40, 1, n_features=12, random_state=3)
    rng = np.random.RandomState(3)
    rng.randn(12), rng.randn(40, 12)
    x = rng.randn(5, 40, 12) * np.sqrt(clients.feature_variance)
    y = np.sum(x * clients.coef, axis=-1) + 0.01 * rng.randn(5, 40)
    step = 0.5 * np.mean(y[..., None] * x, axis=0)
    risk = linear_excess_risk(step, clients.coef, clients.feature_variance)
    assert risk == pytest.approx(229.76596695158915, rel=1e-12)


def test_regression_sizes_and_seeds():
    clients = make_ppsgd_regression(3, [1, 4, 2], 6, 6, random_state=0)
    assert clients.groups.tolist() == [0, 1, 1, 1, 1, 2, 2]
    assert (clients.coef != clients.population_coef).all()
    alike = make_ppsgd_regression(3, 2, 6, 0, random_state=0)
    np.testing.assert_array_equal(alike.coef, np.tile(alike.population_coef, (3, 1)))
    again = make_ppsgd_regression(3, [1, 4, 2], 6, 6, random_state=0)
    np.testing.assert_array_equal(clients.target, again.target)
    other = make_ppsgd_regression(3, [1, 4, 2], 6, 6, random_state=1)
    assert (clients.target != other.target).all()
    with pytest.raises(ValueError, match=r"n_private_features.*n_features=4.*\b5\b"):
        make_ppsgd_regression(3, 2, 4)
    with pytest.raises(ValueError, match=r"n_rows.*\b1\b.*\b0\b"):
        make_ppsgd_regression(3, 0)


def test_digits_are_distributed_as_other_tables():
    digits, original = load_digits_clients(23, 4), load_digits()
    np.testing.assert_array_equal(digits.data * 16, original.data)
    np.testing.assert_array_equal(digits.target, original.target)
    expected = make_label_skew_clients(original.data, original.target, 23, 4, random_state=0)
    np.testing.assert_array_equal(digits.groups, expected.groups)


def test_digits_in_other_forms():
    digits = load_digits_clients()
    data, target, groups = load_digits_clients(return_X_y=True)
    for given, wanted in ((data, digits.data), (target, digits.target), (groups, digits.groups)):
        np.testing.assert_array_equal(given, wanted)
    framed = load_digits_clients(as_frame=True)
    assert digits.frame is None
    assert framed.frame.columns[-2:].tolist() == ["target", "client"]
    assert framed.data.columns.tolist() == digits.feature_names
    np.testing.assert_array_equal(framed.frame["client"], digits.groups)
    np.testing.assert_array_equal(framed.data, digits.data)
    assert digits.target_names == list(range(10))
    parts = load_digits_clients(return_X_y=True, as_frame=True)
    assert [type(part).__name__ for part in parts] == ["DataFrame", "Series", "Series"]
