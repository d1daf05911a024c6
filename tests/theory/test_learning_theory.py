"""The error of local regressions by simulation, and the prior of distillation by integration."""

import numpy as np
import pytest
from scipy.integrate import dblquad, quad
from scipy.stats import beta

from pfl_sklearn.theory import distillation_log_density, local_coef_error


@pytest.mark.parametrize("n_rows", [3, 12])
def test_error_of_least_squares_of_minimum_norm(n_rows):
    rng = np.random.default_rng(0)
    X, coef = rng.normal(size=(n_rows, 5)), np.arange(5.0)
    y = X @ coef + 0.5 * rng.normal(size=(20_000, n_rows))
    errors = np.sum((y @ np.linalg.pinv(X).T - coef) ** 2, axis=1)
    expected = local_coef_error(X, 0.25, coef)
    assert abs(errors.mean() - expected) < 5 * errors.std() / np.sqrt(len(errors))


def test_error_with_independent_columns_is_the_printed_trace():
    X = np.random.default_rng(1).normal(size=(12, 5))
    expected = 0.25 * np.trace(np.linalg.inv(X.T @ X))
    assert local_coef_error(X, 0.25) == pytest.approx(expected, rel=1e-12)
    assert local_coef_error(X, 0.25, np.ones(5)) == pytest.approx(expected, rel=1e-12)


def test_error_without_rows_or_with_a_column_twice():
    assert local_coef_error(np.zeros((0, 2)), 1.0, [3.0, 4.0]) == 25.0
    twice = np.repeat(np.random.default_rng(0).normal(size=(9, 1)), 2, axis=1)
    assert local_coef_error(twice, 0.0, [1.0, -1.0]) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: local_coef_error(np.ones((1, 2)), 1.0), r"coef .* 2 columns and rank 1; got None"),
        (lambda: local_coef_error(np.ones(3), 1.0), r"X .* \(3,\)"),
        (lambda: local_coef_error(np.eye(2), 1.0, [1.0]), r"coef .* \(2,\).* \(1,\)"),
        (lambda: local_coef_error(np.eye(2), [1.0, 2.0]), r"noise_variance .* single .* \(2,\)"),
        (lambda: distillation_log_density([0.5], [0.5], [2.0, 4.0]), r"psi .* single .* \(2,\)"),
        (lambda: distillation_log_density([0.5, 0.5], [0.5], 1.0), r"\(2,\) and \(1,\)"),
        (lambda: distillation_log_density([0.5], [0.5], 1.0, [0.4]), r"input_shares .* \[0\.4\]"),
        (lambda: distillation_log_density([0.5], [0.5], 1.0, version="old"), r"version .* 'old'"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_density_integrates_to_one_and_the_printed_one_does_not():
    shared, shares = np.array([0.3, 0.8]), np.array([0.25, 0.75])

    def density(b, a, version="sound"):
        return np.exp(distillation_log_density([a, b], shared, 6.0, shares, version=version))

    total = dblquad(density, 0, 1, 0, 1)[0]
    assert total == pytest.approx(1.0, abs=1e-6)
    assert abs(dblquad(density, 0, 1, 0, 1, args=("printed",))[0] - 1) > 0.01


def test_the_density_falls_with_the_divergence():
    shared, psi = np.array([0.3, 0.8]), 6.0
    near, far = np.array([[0.35, 0.7], [0.9, 0.1]])
    log_densities = distillation_log_density([near, far], shared, psi)

    def divergence(q):
        return np.mean(shared * np.log(shared / q) + (1 - shared) * np.log((1 - shared) / (1 - q)))

    fall = -psi * (divergence(far) - divergence(near))
    assert log_densities[1] - log_densities[0] == pytest.approx(fall, rel=1e-12)
    one = distillation_log_density([0.4], [0.3], 2.0)
    assert one == pytest.approx(beta.logpdf(0.4, 1.6, 2.4), rel=1e-12)
    assert quad(lambda q: np.exp(distillation_log_density([q], [0.3], 2.0)), 0, 1)[0] == (
        pytest.approx(1.0)
    )
