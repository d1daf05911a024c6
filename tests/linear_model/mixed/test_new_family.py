"""A family that the package does not have: gamma responses with a log link."""

import numpy as np
import pytest
from scipy import stats
from scipy.special import logsumexp, polygamma

from pfl_sklearn.inspection import ResidualsDisplay
from pfl_sklearn.privacy import PrivacyLedger
from tests.helpers.exact_posterior import exact_posterior
from tests.helpers.gamma_regression import Gamma, GammaRegression

SLOPES, INTERCEPT, SD, SHAPE = np.array([0.5, -0.3]), 0.4, 0.6, 3.0


def draw(m, n, seed=0, sd=SD, shape=SHAPE):
    """Features, responses, clients, and the expectations of m clients with n rows on average."""
    rng = np.random.default_rng(seed)
    codes = np.repeat(np.arange(m), rng.integers(n // 2, n + n // 2 + 1, m))
    X = rng.normal(size=(len(codes), 2))
    mean = np.exp(INTERCEPT + X @ SLOPES + sd * rng.normal(size=m)[codes])
    return X, rng.gamma(shape, mean / shape), codes, mean


def dense_log_likelihood(X, y, codes, intercept, slopes, variance, dispersion):
    """Log marginal likelihood by sums over 2,001 equally spaced effects."""
    effects, distance = np.linspace(-8, 8, 2001, retstep=True)
    total, shape = 0.0, 1 / dispersion
    for client in np.unique(codes):
        members = codes == client
        u = intercept + X[members] @ slopes + np.sqrt(variance) * effects[:, None]
        rows = stats.gamma(shape, scale=np.exp(u) / shape).logpdf(y[members]).sum(axis=1)
        total += logsumexp(rows + stats.norm.logpdf(effects)) + np.log(distance)
    return total


@pytest.fixture(scope="module")
def fitted():
    X, y, codes, mean = draw(60, 25)
    model = GammaRegression(random="intercept", unseen="population")
    return model.fit(X, y, groups=codes), X, y, codes, mean


@pytest.mark.parametrize("dispersion", [0.2, 2.5])
def test_derivatives_are_those_of_the_density(dispersion):
    family, rng, h = Gamma(dispersion), np.random.default_rng(0), 1e-5
    u, y, w = 2 * rng.normal(size=(7, 1)), rng.gamma(2.0, size=7), rng.random(7) + 0.1
    terms = family.terms(u, y, w)
    exact = w * family.distribution(np.exp(u[:, 0])).logpdf(y)
    np.testing.assert_allclose(terms.value + w * family.constants(y), exact, rtol=1e-12, atol=1e-12)
    up, down = family.terms(u + h, y, w), family.terms(u - h, y, w)
    slopes = [(a - b) / (2 * h) for a, b in zip(up, down, strict=True)]
    np.testing.assert_allclose(slopes[0], terms.score[:, 0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(-slopes[1], terms.curvature[..., 0], rtol=1e-6)
    spread = np.ones((7, 1, 1))
    bent = family.curvature_slopes(u, y, w, spread)
    np.testing.assert_allclose(slopes[2][..., 0], bent, rtol=1e-6)


@pytest.mark.slow
def test_a_fit_recovers_coefficients_and_shape(fitted):
    model, _, y, *_ = fitted
    far = np.abs(model.population_coef_ - SLOPES) / model.population_coef_std_
    assert far.max() < 3
    assert abs(model.population_intercept_ - INTERCEPT) < 3 * model.population_intercept_std_
    # The error of a shape k is the inverse root of the information n (trigamma(k) - 1 / k).
    error = (len(y) * (polygamma(1, SHAPE) - 1 / SHAPE)) ** -0.5
    assert abs(1 / model.dispersion_ - SHAPE) < 3 * error
    lower, upper = model._component_bounds(0.95)[0]
    assert lower[0, 0] < SD**2 < upper[0, 0]


@pytest.mark.parametrize("quadrature", ["auto", 31])
def test_the_likelihood_is_that_of_dense_quadrature_and_a_maximum(quadrature):
    X, y, codes, _ = draw(5, 4, seed=3)
    model = GammaRegression(random="intercept", quadrature=quadrature).fit(X, y, groups=codes)
    variance = model.prior_.covariance[0, 0]
    at = [model.population_intercept_, model.population_coef_, variance, model.dispersion_]
    best = dense_log_likelihood(X, y, codes, *at)
    assert model.log_likelihood_ == pytest.approx(best, abs=1e-5)
    for k in range(len(at)):
        for size in (0.98, 1.02):
            shifted = [value * size if j == k else value for j, value in enumerate(at)]
            assert dense_log_likelihood(X, y, codes, *shifted) < best


def test_predictions_are_means_over_the_exact_posterior(fitted):
    model, X, y, codes, _ = fitted
    predicted, shape = model.predict(X, groups=codes), 1 / model.dispersion_
    sd = np.sqrt(model.prior_.covariance[0, 0])
    base = model.population_intercept_ + X @ model.population_coef_
    for client in (0, 1, 2):
        members = codes == client

        def log_likelihood(effects, members=members):
            u = base[members] + sd * effects
            return stats.gamma(shape, scale=np.exp(u) / shape).logpdf(y[members]).sum(axis=1)

        effects, weights = exact_posterior(log_likelihood, 1)
        exact = weights @ np.exp(base[members] + sd * effects)
        np.testing.assert_allclose(predicted[members], exact, rtol=1e-3)
    new = model.predict(X[:5], groups=np.full(5, 99))
    np.testing.assert_allclose(new, np.exp(base[:5] + sd**2 / 2))


@pytest.mark.slow
def test_intervals_cover(fitted):
    model, X, _, codes, mean = fitted
    X, codes, mean = X[::3], codes[::3], mean[::3]  # a row takes a millisecond
    lower, upper = model.predict_interval(X, groups=codes)
    inside = np.bincount(codes, (lower < mean) & (mean < upper)) / np.bincount(codes)
    # Rows of a client share its error, so clients count; 60 of them have an error of 0.03.
    assert inside.mean() > 0.95 - 3 * 0.03
    y = np.random.default_rng(1).gamma(SHAPE, mean / SHAPE)
    lower, upper = model.predict_interval(X, groups=codes, level=0.8, new_row=True)
    error = np.sqrt(0.1 * 0.9 / len(y))
    assert np.mean(y < lower) == pytest.approx(0.1, abs=4 * error)
    assert np.mean(y > upper) == pytest.approx(0.1, abs=4 * error)


def test_bounds_without_uncertainty_are_quantiles():
    X, y, *_ = draw(1, 4000)
    with pytest.warns(UserWarning, match="client"):
        model = GammaRegression().fit(X, y)
    family = model._row_family
    lower, upper = model.predict_interval(X[:9], level=0.9, new_row=True)
    law = family.distribution(model.predict(X[:9], integrate=False))
    np.testing.assert_allclose([lower, upper], [law.ppf(0.05), law.ppf(0.95)], rtol=5e-3)


@pytest.mark.slow
def test_held_out_rows_choose_what_varies_and_residuals_are_normal(fitted):
    model, X, y, codes, _ = fitted
    shown = ResidualsDisplay.from_estimator(model, X[::5], y[::5], groups=codes[::5])
    assert stats.kstest(shown.standardized, "norm").pvalue > 0.01
    X, y, codes, _ = draw(30, 20)
    model = GammaRegression().fit(X, y, groups=codes)
    assert model.random_losses_["intercept"] < 1.005 * model.random_losses_["all"]
    X, y, codes, _ = draw(20, 20, seed=1)
    y = y * np.exp(X[:, 0] * np.random.default_rng(2).normal(size=20)[codes])
    varying = GammaRegression().fit(X, y, groups=codes)
    assert varying.random_losses_["all"] < varying.random_losses_["intercept"]
    assert varying.prior_.covariance.shape == (3, 3)


def test_without_a_private_fit_the_ledger_is_not_charged(tmp_path):
    X, y, codes, _ = draw(60, 5)
    ledger = PrivacyLedger(tmp_path / "ledger")
    private = {"epsilon": 2.0, "feature_bound": 3.0, "max_rows_per_client": 10}
    with pytest.raises(ValueError, match=r"GammaRegression has no private fit.*got 2\.0"):
        GammaRegression(ledger=ledger, **private).fit(X, y, groups=codes)
    assert not ledger.entries
