"""The published gradient descent for linear regression, against plain loops over clients."""

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import Ridge

from pfl_sklearn import PersonalizedLinearRegression
from pfl_sklearn.priors import GaussianPrior
from tests.helpers.dense_mixed_model import Problem, coefficients, solve
from tests.helpers.printed_regression import fit, table

SPHERICAL = GaussianPrior(covariance_type="spherical", centered=False)
FULL = GaussianPrior(covariance_type="full")


def listing(X, y, codes, n_steps, rate, between, noise, known=(False, True, True), floor=None):
    """Algorithm 4 (ICLR), by the numbers of its lines.

    Every line reads theta, mu and the variances of t - 1. What is `known` (the mean, the noise
    variance, the variance between clients) keeps its value, and the others stop at the `floor`.
    """
    m, d = codes.max() + 1, X.shape[1]
    rows = [(X[codes == i], y[codes == i]) for i in range(m)]
    theta, mu = [np.zeros(d)] * m, np.zeros(d)  # line 1
    for _ in range(n_steps):  # line 2
        thetas, mus, noises, betweens = [], [], [], []
        for i, (features, target) in enumerate(rows):  # lines 4 and 5
            residual, difference = target - features @ theta[i], mu - theta[i]
            thetas.append(
                theta[i] + rate * (features.T @ residual / noise + difference / between)
            )  # 6
            mus.append(mu - rate * difference / between)  # 7
            n, square = len(target), residual @ residual
            noises.append(noise - rate * (n / (2 * noise) - square / (2 * noise**2)))  # 8
            square = difference @ difference
            betweens.append(between - rate * (d / (2 * between) - square / (2 * between**2)))  # 9
        theta = thetas
        mu = mu if known[0] else np.mean(mus, axis=0)  # 12
        between = between if known[2] else max(np.mean(betweens), floor)  # 13
        noise = noise if known[1] else max(np.mean(noises), floor)  # 14
    return np.array(theta), mu, noise, between


@pytest.mark.parametrize("n_steps", [1, 2, 7])
def test_descent_is_the_listing(n_steps):
    X, y, codes = table()
    model = PersonalizedLinearRegression(
        GaussianPrior(covariance=0.4),
        fit_intercept=False,
        noise_variance=0.5,
        solver="gd",
        learning_rate=0.01,
        max_iter=n_steps,
    )
    with pytest.warns(ConvergenceWarning):
        model.fit(X, y, groups=codes)
    theta, mu, _, _ = listing(X, y, codes, n_steps, 0.01, 0.4, 0.5)
    np.testing.assert_allclose(model.coef_, theta, atol=1e-12)
    np.testing.assert_allclose(model.population_coef_, mu, atol=1e-12)
    assert model.n_iter_ == n_steps


def test_descent_of_unknown_variances_is_the_listing():
    X, y, codes = table()
    params = {"learning_rate": 0.002, "variance_floor": 1e-3, "max_iter": 9}
    model = PersonalizedLinearRegression(SPHERICAL, fit_intercept=False, solver="gd", **params)
    with pytest.warns(ConvergenceWarning):
        model.fit(X, y, groups=codes)
    start = y @ y / len(y)
    theta, mu, noise, between = listing(
        X, y, codes, 9, 0.002, 1.0, start, known=(False, False, False), floor=1e-3
    )
    np.testing.assert_allclose(model.coef_, theta, atol=1e-12)
    np.testing.assert_allclose(model.population_coef_, mu, atol=1e-12)
    assert model.noise_variance_ == pytest.approx(noise, rel=1e-12)
    assert model.prior_.covariance[0, 0] == pytest.approx(between, rel=1e-12)


@pytest.mark.parametrize(
    ("mean", "weighted", "fit_intercept"),
    [(None, True, True), (None, False, False), (0.5, True, False), (0.5, False, True)],
)
def test_descent_reaches_the_joint_mode_under_known_variances(fit_intercept, weighted, mean):
    X, y, codes = table()
    y = y + 3 * fit_intercept
    weights = np.random.default_rng(0).uniform(0.5, 2, len(y)) if weighted else np.ones(len(y))
    model = PersonalizedLinearRegression(
        GaussianPrior(mean, 0.4),
        fit_intercept=fit_intercept,
        noise_variance=0.5,
        solver="gd",
        tol=1e-10,
        max_iter=20000,
    ).fit(X, y, groups=codes, sample_weight=weights)
    design = np.column_stack([np.ones(len(y)), X]) if fit_intercept else X
    p = design.shape[1]
    known = None if mean is None else np.full(p, mean)
    problem = Problem(design, y, codes, np.arange(p), weights, known)
    expected = solve(problem, 0.4 * np.eye(p), 0.5, False)
    theta = coefficients(problem, expected, 0.4 * np.eye(p))
    result = np.column_stack([model.intercept_, model.coef_]) if fit_intercept else model.coef_
    np.testing.assert_allclose(result, theta, atol=1e-6)
    population = np.append([model.population_intercept_] * fit_intercept, model.population_coef_)
    np.testing.assert_allclose(population, expected.population, atol=1e-6)
    if mean is None:
        np.testing.assert_allclose(population, result.mean(axis=0), atol=1e-6)
    for name in ("coef_std_", "shrinkage_"):
        assert not hasattr(model, name)
    with pytest.raises(ValueError, match=r"return_std=True.*prior=GaussianPrior\(covariance=0\.4"):
        model.predict(X, groups=codes, return_std=True)


def test_descent_of_one_client_is_ridge():
    X, y, _ = table()
    model = fit(
        X, y, ["a"] * len(y), GaussianPrior(0.0, 0.4), noise_variance=0.5, solver="gd", tol=1e-12
    )
    ridge = Ridge(alpha=0.5 / 0.4, fit_intercept=False).fit(X, y)
    np.testing.assert_allclose(model.coef_[0], ridge.coef_, atol=1e-8)


def test_a_step_too_long_is_explained():
    X, y, codes = table()
    largest = 2 / (
        max(np.linalg.eigvalsh(X[codes == k].T @ X[codes == k])[-1] for k in range(8)) / 0.5
        + 1 / 0.4
    )
    params = {"noise_variance": 0.5, "solver": "gd", "max_iter": 3000}
    model = PersonalizedLinearRegression(
        GaussianPrior(0.0, 0.4), fit_intercept=False, learning_rate=2 * largest, **params
    )
    before = dict(vars(model))
    message = (
        rf"solver='gd'.*learning_rate={2 * largest:.3g}\b.*\b{largest:.3g}\b.*"
        r"variance_floor.*'auto'"
    )
    with pytest.raises(ValueError, match=message):
        model.fit(X, y, groups=codes)
    assert vars(model) == before
    slow = clone(model).set_params(learning_rate=0.95 * largest, tol=1e-9).fit(X, y, groups=codes)
    best = fit(X, y, codes, GaussianPrior(0.0, 0.4), noise_variance=0.5)
    np.testing.assert_allclose(slow.coef_, best.coef_, atol=1e-5)


def test_a_mean_that_moves_with_its_clients_halves_the_longest_step():
    X, y, codes = table()
    curvature = max(np.linalg.eigvalsh(X[codes == k].T @ X[codes == k])[-1] for k in range(8))
    largest = 2 / (curvature + 2 / 0.01)
    model = PersonalizedLinearRegression(
        GaussianPrior(covariance=0.01),
        fit_intercept=False,
        noise_variance=1.0,
        solver="gd",
        max_iter=5000,
        learning_rate=1.5 * largest,
    )
    with pytest.raises(ValueError, match=rf"stable below {largest:.3g}\b"):
        model.fit(X, y, groups=codes)
    slow = model.set_params(learning_rate=0.99 * largest, tol=1e-10).fit(X, y, groups=codes)
    np.testing.assert_allclose(slow.population_coef_, slow.coef_.mean(axis=0), atol=1e-6)


@pytest.mark.parametrize(
    ("d", "noise", "named"),
    [
        (8, None, "the noise variance and the variance between clients"),
        (4, 0.09, "the variance between clients"),
    ],
)
def test_the_floor_is_named_when_it_is_reached(d, noise, named):
    """The joint objective falls without bound as clients move to the population, or to no noise."""
    rng = np.random.default_rng(0)
    codes, X = np.repeat(np.arange(10), 3), rng.normal(size=(30, d))
    y = 0.1 * X @ np.ones(d) + 0.1 * rng.normal(size=30)
    params = {"noise_variance": noise, "variance_floor": 0.04, "learning_rate": 1.5e-3}
    with pytest.warns(UserWarning, match=f"solver='gd'.*{named}.*variance_floor=0.04"):
        model = fit(X, y, codes, SPHERICAL, solver="gd", max_iter=50000, **params)
    assert model.prior_.covariance[0, 0] == 0.04
    assert model.noise_variance_ == (noise or 0.04)


NOISE = {"noise_variance": 1.0}
NO_FLOOR = "covariance.*noise_variance.*variance_floor"


@pytest.mark.parametrize(
    ("prior", "params", "message"),
    [
        (SPHERICAL, {}, f"solver='gd'.*{NO_FLOOR}"),
        (GaussianPrior(covariance=1.0), {}, f"solver='gd'.*{NO_FLOOR}"),
        (FULL, {"variance_floor": 0.1}, r"solver='gd'.*covariance_type='full'"),
        (
            GaussianPrior(covariance=[1.0, 2.0, 3.0]),
            NOISE,
            r"solver='gd'.*covariance=\[1\.0, 2\.0, 3\.0\]",
        ),
        (GaussianPrior(covariance=0.0), NOISE, r"solver='gd'.*covariance=0\.0"),
        (GaussianPrior(covariance=np.inf), NOISE, "solver='gd'.*covariance=inf"),
        (GaussianPrior(covariance=1.0), NOISE | {"random": [0]}, r"random='all'"),
    ],
)
def test_what_descent_does_not_do(prior, params, message):
    X, y, codes = table()
    model = PersonalizedLinearRegression(prior, fit_intercept=False, solver="gd", **params)
    before = dict(vars(model))
    with pytest.raises(ValueError, match=message):
        model.fit(X, y, groups=codes)
    assert vars(model) == before
