"""Tables at the edge: unlike scales, clients that are alike, coefficients that rows leave open."""

import warnings

import numpy as np
import pytest
from scipy.sparse import csr_array
from sklearn.base import clone

from pfl_sklearn.linear_model import PersonalizedLinearRegression, PersonalizedLogisticRegression
from pfl_sklearn.priors import GaussianPrior


def table(m, n, d, seed=0):
    """Clients with intercepts and slopes of mean 1 and variance 1."""
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(m), n)
    theta = 1 + rng.normal(size=(m, d + 1))
    X = rng.normal(size=(m * n, d))
    y = theta[groups, 0] + np.einsum("nd,nd->n", X, theta[groups, 1:]) + rng.normal(size=m * n)
    return X, y, groups


X, Y, GROUPS = table(20, 6, 2)


@pytest.mark.parametrize("prior", ["gaussian", "laplace", "gaussian_mixture", "discrete"])
@pytest.mark.parametrize("target", ["constant", "alike"])
def test_clients_that_are_alike(prior, target):
    """There is no warning but that of an exact fit."""
    y = np.full(len(Y), 3.0)
    if target == "alike":
        y = X @ [1.0, 2.0] + 1 + np.random.default_rng(1).normal(size=len(Y))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = PersonalizedLinearRegression(prior).fit(X, y, groups=GROUPS)
    exact = ["fit all 120 rows exactly" in str(w.message) for w in caught]
    assert exact == ([True] if target == "constant" else [])
    np.testing.assert_allclose(model.coef_, model.coef_[:1].repeat(20, axis=0), atol=1e-6)


def test_printed_descent_that_diverges_says_so():
    prior = GaussianPrior(covariance_type="spherical", centered=False)
    model = PersonalizedLinearRegression(prior, solver="gd", variance_floor=1e-8)
    with pytest.raises(ValueError, match=r"solver='gd'.*learning_rate=0\.\d+.*variance_floor"):
        model.fit(X, Y, groups=GROUPS)


def test_numbers_as_strings_are_numbers():
    text = PersonalizedLinearRegression().fit(X, Y.astype(str), groups=GROUPS)
    plain = PersonalizedLinearRegression().fit(X, Y, groups=GROUPS)
    np.testing.assert_array_equal(text.coef_, plain.coef_)
    with pytest.raises(ValueError, match="could not convert string to float"):
        PersonalizedLinearRegression().fit(X, np.full(len(Y), "a"), groups=GROUPS)


@pytest.mark.parametrize("variance", [1e10, 1e18])
def test_a_huge_known_variance_is_like_an_infinite_one(variance):
    wide = PersonalizedLinearRegression(GaussianPrior(covariance=variance))
    infinite = PersonalizedLinearRegression(GaussianPrior(covariance=np.inf))
    wide.fit(X, Y, groups=GROUPS)
    infinite.fit(X, Y, groups=GROUPS)
    np.testing.assert_allclose(wide.coef_, infinite.coef_, rtol=1e-6)
    assert wide.noise_variance_ == pytest.approx(infinite.noise_variance_, rel=1e-3)
    np.testing.assert_allclose(wide.coef_std_, infinite.coef_std_, rtol=1e-2)


def test_sparse_deviations_of_large_targets():
    """Clients that are alike get an infinite penalty, and no warning."""
    model, size = PersonalizedLinearRegression("laplace"), 1e148
    alike = X @ [1.0, 2.0] + np.random.default_rng(1).normal(size=len(X))
    for y in (Y, alike):
        plain, huge = (clone(model).fit(X, unit * y, groups=GROUPS) for unit in (1.0, size))
        np.testing.assert_allclose(huge.coef_ / size, plain.coef_, rtol=1e-5, atol=1e-7)
    outlier = np.where(np.arange(len(Y)) == 5, size, Y)
    assert np.isfinite(model.fit(X, outlier, groups=GROUPS).coef_).all()


def test_several_variances_of_large_targets():
    """Curvatures are in single precision, whose range ends at 3e38."""
    model = PersonalizedLinearRegression(GaussianPrior(covariance_type="diag"), random="all")
    plain, huge = (clone(model).fit(X, unit * Y, groups=GROUPS) for unit in (1.0, 1e100))
    np.testing.assert_allclose(huge.coef_ / 1e100, plain.coef_, rtol=1e-6)


def test_the_smallest_values_that_can_be_squared():
    model = PersonalizedLinearRegression(random="intercept")
    plain, tiny = (clone(model).fit(X, unit * Y, groups=GROUPS) for unit in (1.0, 1e-140))
    np.testing.assert_allclose(1e140 * tiny.coef_, plain.coef_, rtol=1e-6)
    np.testing.assert_allclose(1e140 * tiny.coef_std_, plain.coef_std_, rtol=1e-6)
    with pytest.raises(ValueError, match=r"^X\b.*too small.*1e-140"):
        PersonalizedLogisticRegression().fit(1e-160 * X, np.arange(len(X)) % 2, groups=GROUPS)


@pytest.mark.parametrize("scale", [1e-20, 1e20])
@pytest.mark.parametrize("mean", [0.0, None])
def test_estimates_under_known_variances_are_linear_in_the_targets(mean, scale):
    """However small the targets are: the prior is as strong as the noise."""
    model = PersonalizedLinearRegression(GaussianPrior(mean, 1.0), noise_variance=1.0)
    plain, shifted = (clone(model).fit(X, c * Y, groups=GROUPS) for c in (1.0, scale))
    np.testing.assert_allclose(shifted.coef_ / scale, plain.coef_, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(shifted.coef_std_, plain.coef_std_, rtol=1e-9)


@pytest.mark.parametrize(
    ("estimator", "instead"),
    [
        (PersonalizedLinearRegression(), "PPSGDRegressor"),
        (PersonalizedLogisticRegression(), "PPSGDClassifier"),
    ],
    ids=repr,
)
def test_sparse_rows_are_refused_with_the_ways_out(estimator, instead):
    with pytest.raises(
        TypeError, match=rf"dense X.*\(120, 2\).*X\.toarray\(\).*sparse_threshold=0.*{instead}"
    ):
        estimator.fit(csr_array(X), Y > 0, groups=GROUPS)


@pytest.mark.slow
def test_a_known_covariance_beyond_all_digits_is_refused():
    rng = np.random.default_rng(0)
    X, y, groups = rng.normal(size=(40, 2)), np.tile([0, 1], 20), np.repeat(range(8), 5)
    model = PersonalizedLogisticRegression(GaussianPrior(covariance=1.0))
    with pytest.raises(ValueError, match=r"covariance.*\blogits\b.*1e\+07.*Scale the features"):
        model.fit(1e10 * X, y, groups=groups)
    # The search ended where it began, at -160.5, as long as it lost modes.
    assert model.fit(1e6 * X, y, groups=groups).log_likelihood_ > -157.36


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.filterwarnings("ignore")
def test_tables_without_noise_and_with_nearly_equal_columns(seed):
    """Draws of the noise variance went to zero, until nothing was left of a covariance's digits."""
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(rng.integers(2, 6)), rng.integers(2, 5))
    x = rng.normal(size=len(groups))
    X = np.column_stack([x, x + 10.0 ** -rng.integers(3, 12) * rng.normal(size=len(x))])
    y = X.sum(axis=1) + rng.normal(size=groups[-1] + 1)[groups]
    prior = GaussianPrior(covariance_type="diag") if seed % 2 else "gaussian"
    model = PersonalizedLinearRegression(prior).fit(X, y, groups=groups)
    # Of the sizes of the responses, which are about 3: as many rows as coefficients tell no noise.
    np.testing.assert_allclose(model.predict(X, groups=groups), y, rtol=0, atol=0.1)
