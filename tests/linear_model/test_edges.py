"""Tables at the edge: unlike scales, clients that are alike, coefficients that rows leave open."""

import warnings

import numpy as np
import pandas as pd
import pytest
from scipy.sparse import csr_array
from sklearn.base import clone

from pfl_sklearn.linear_model import PersonalizedLinearRegression, PersonalizedLogisticRegression
from pfl_sklearn.priors import GaussianPrior, LaplacePrior


def table(m, n, d, seed=0):
    """Clients with intercepts and slopes of mean 1 and variance 1."""
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(m), n)
    theta = 1 + rng.normal(size=(m, d + 1))
    X = rng.normal(size=(m * n, d))
    y = theta[groups, 0] + np.einsum("nd,nd->n", X, theta[groups, 1:]) + rng.normal(size=m * n)
    return X, y, groups


X, Y, GROUPS = table(20, 6, 2)


@pytest.mark.parametrize("factor", [1e-4, 1e3, 1e6])
def test_sparse_deviations_do_not_depend_on_the_units(factor):
    X, y, groups = table(7, 5, 3)
    units = np.array([factor, 1.0, 1.0])

    def fit(X, units):
        prior = LaplacePrior(scale=np.append(0.5, 0.5 / units))
        return PersonalizedLinearRegression(prior, noise_variance=1.0).fit(X, y, groups=groups)

    plain, moved = fit(X, np.ones(3)), fit(X * units, units)
    np.testing.assert_allclose(moved.coef_ * units, plain.coef_, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("shift", [1e3, 1e5, 1e7])
def test_a_full_covariance_does_not_depend_on_where_a_feature_is_zero(shift):
    X, y, groups = table(40, 10, 1)
    model = PersonalizedLinearRegression(GaussianPrior(covariance_type="full"))
    plain = model.fit(X, y, groups=groups)
    slopes, value, stds = plain.coef_.copy(), plain.log_likelihood_, plain.coef_std_
    mean, std = plain.predict(X[:9], groups=groups[:9], return_std=True)
    moved = model.fit(X + shift, y, groups=groups)
    np.testing.assert_allclose(moved.coef_, slopes, rtol=1e-4)
    np.testing.assert_allclose(moved.coef_std_, stds, rtol=1e-4)
    assert moved.log_likelihood_ == pytest.approx(value, abs=1e-5)
    if shift < 1e6:  # x' S x cancels as the square of the shift
        again = moved.predict(X[:9] + shift, groups=groups[:9], return_std=True)
        np.testing.assert_allclose(again[0], mean, rtol=1e-4)
        np.testing.assert_allclose(again[1], std, rtol=1e-3)


@pytest.mark.parametrize("random", ["all", "intercept"])
def test_what_the_rows_leave_open_has_no_standard_error(random):
    wide = np.column_stack([X, np.zeros(len(X)), X[:, 0]])
    model = PersonalizedLinearRegression(random=random)
    with pytest.warns(UserWarning, match="'x0', 'x2', 'x3' are NaN"):
        model.fit(wide, Y, groups=GROUPS)
    stds = model.population_coef_std_
    assert np.isnan(stds[[0, 2, 3]]).all()
    assert stds[1] > 0
    assert model.population_intercept_std_ > 0
    _, std = model.predict(wide[:3], groups=[0, 1, 99], return_std=True)
    assert np.isfinite(std).all()
    with pytest.warns(UserWarning, match="'x0', 'x2', 'x3' are NaN"):
        alone = clone(model).fit(wide, Y, groups=np.zeros(len(Y), int))
    np.testing.assert_array_equal(np.isnan(alone.population_coef_std_), np.isnan(stds))


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


@pytest.mark.parametrize("params", [{}, {"learning_rate": 0.5}, {"max_iter": 20_000}])
@pytest.mark.parametrize("floor", [1e-8, 0.01])
def test_printed_descent_that_goes_astray_says_so(params, floor):
    prior = GaussianPrior(covariance_type="spherical", centered=False)
    model = PersonalizedLinearRegression(prior, solver="gd", variance_floor=floor, **params)
    with pytest.raises(ValueError, match=r"solver='gd'.*learning_rate=0\.\d+.*variance_floor"):
        model.fit(X, Y, groups=GROUPS)


def test_a_printed_mixture_needs_its_clients():
    model = PersonalizedLinearRegression("discrete", method="printed", noise_variance=1.0)
    with pytest.raises(ValueError, match=r"n_components=2\b.*DiscretePrior.*\b1\b"):
        model.fit(X, Y, groups=np.zeros(len(Y), int))


def test_no_posterior_is_said_by_name():
    model = PersonalizedLinearRegression("laplace").fit(X, Y, groups=GROUPS)
    with pytest.raises(AttributeError, match=r"posterior.*prior='laplace'.*method='reml'"):
        model.coef_std_  # noqa: B018
    with pytest.raises(ValueError, match=r"return_std=True.*prior='laplace'"):
        model.predict(X[:1], groups=[0], return_std=True)


def test_numbers_as_strings_are_numbers():
    text = PersonalizedLinearRegression().fit(X, Y.astype(str), groups=GROUPS)
    plain = PersonalizedLinearRegression().fit(X, Y, groups=GROUPS)
    np.testing.assert_array_equal(text.coef_, plain.coef_)
    with pytest.raises(ValueError, match="could not convert string to float"):
        PersonalizedLinearRegression().fit(X, np.full(len(Y), "a"), groups=GROUPS)


def test_local_slopes_of_a_constant_column():
    """A column that does not vary within a client tells nothing of its slope."""
    X = np.array([[1.0], [1], [1], [0], [1], [0]])
    prior = GaussianPrior(covariance=np.inf)
    model = PersonalizedLinearRegression(prior).fit(X, [1.0, 2, 3, 4, 6, 5], groups=list("aaabbb"))
    np.testing.assert_allclose(model.coef_, [[0.0], [1.5]], atol=1e-12)
    np.testing.assert_allclose(model.intercept_, [2.0, 4.5])


@pytest.mark.parametrize("variance", [1e10, 1e14, 1e18])
def test_a_huge_known_variance_is_like_an_infinite_one(variance):
    wide = PersonalizedLinearRegression(GaussianPrior(covariance=variance))
    infinite = PersonalizedLinearRegression(GaussianPrior(covariance=np.inf))
    wide.fit(X, Y, groups=GROUPS)
    infinite.fit(X, Y, groups=GROUPS)
    np.testing.assert_allclose(wide.coef_, infinite.coef_, rtol=1e-6)
    assert wide.noise_variance_ == pytest.approx(infinite.noise_variance_, rel=1e-3)
    np.testing.assert_allclose(wide.coef_std_, infinite.coef_std_, rtol=1e-2)


@pytest.mark.parametrize("prior", ["gaussian", GaussianPrior(covariance=np.inf)], ids=repr)
def test_values_that_cannot_be_squared(prior):
    X, y, groups = np.ones((4, 1)), np.zeros(4), [0, 0, 1, 1]
    with pytest.raises(ValueError, match=r"^y\b.*1e150"):
        PersonalizedLinearRegression(prior).fit(X, y + 1e200, groups=groups)
    with pytest.raises(ValueError, match=r"^X\b.*1e150"):
        PersonalizedLinearRegression(prior).fit(1e200 * X, y, groups=groups)
    with pytest.raises(ValueError, match=r"^X\b.*1e150"):
        PersonalizedLogisticRegression().fit(1e200 * X, [0, 1, 0, 1], groups=groups)


@pytest.mark.parametrize("random", ["all", "intercept"])
@pytest.mark.parametrize("size", [1e100, 1e148])
def test_sparse_deviations_of_large_targets(random, size):
    """Clients that are alike get an infinite penalty, and no warning."""
    model = PersonalizedLinearRegression("laplace", random=random)
    alike = X @ [1.0, 2.0] + np.random.default_rng(1).normal(size=len(X))
    for y in (Y, alike):
        plain, huge = (clone(model).fit(X, unit * y, groups=GROUPS) for unit in (1.0, size))
        np.testing.assert_allclose(huge.coef_ / size, plain.coef_, rtol=1e-5, atol=1e-7)
    outlier = np.where(np.arange(len(Y)) == 5, size, Y)
    assert np.isfinite(model.fit(X, outlier, groups=GROUPS).coef_).all()


def test_the_smallest_values_that_can_be_squared():
    plain = PersonalizedLinearRegression().fit(X, Y, groups=GROUPS)
    tiny = PersonalizedLinearRegression().fit(X, 1e-140 * Y, groups=GROUPS)
    np.testing.assert_allclose(1e140 * tiny.coef_, plain.coef_, rtol=1e-6)
    np.testing.assert_allclose(1e140 * tiny.coef_std_, plain.coef_std_, rtol=1e-6)
    with pytest.raises(ValueError, match=r"^y\b.*too small.*1e-140"):
        PersonalizedLinearRegression().fit(X, 1e-141 / np.abs(Y).max() * Y, groups=GROUPS)
    with pytest.raises(ValueError, match=r"^X\b.*too small.*1e-140"):
        PersonalizedLogisticRegression().fit(1e-160 * X, np.arange(len(X)) % 2, groups=GROUPS)


@pytest.mark.parametrize(
    "estimator", [PersonalizedLinearRegression(), PersonalizedLogisticRegression()], ids=repr
)
def test_one_name_of_a_feature_says_what_varies(estimator):
    frame = pd.DataFrame({"age": X[:, 0], "test_time": X[:, 1]})
    target = Y if isinstance(estimator, PersonalizedLinearRegression) else Y > 0
    one = clone(estimator).set_params(random="test_time").fit(frame, target, groups=GROUPS)
    listed = clone(estimator).set_params(random=["test_time"]).fit(frame, target, groups=GROUPS)
    np.testing.assert_array_equal(one.coef_, listed.coef_)
    assert np.ptp(one.coef_[:, 0]) == 0 < np.ptp(one.coef_[:, 1])
    with pytest.raises(ValueError, match=r"random holds 'dose'.*'age', 'test_time'"):
        clone(estimator).set_params(random="dose").fit(frame, target, groups=GROUPS)


@pytest.mark.parametrize("scale", [1e-3, 1e-8, 1e-20, 1e20])
@pytest.mark.parametrize("mean", [0.0, None])
def test_estimates_under_known_variances_are_linear_in_the_targets(mean, scale):
    """However small the targets are: the prior is as strong as the noise."""
    model = PersonalizedLinearRegression(GaussianPrior(mean, 1.0), noise_variance=1.0)
    plain, moved = (clone(model).fit(X, c * Y, groups=GROUPS) for c in (1.0, scale))
    np.testing.assert_allclose(moved.coef_ / scale, plain.coef_, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(moved.coef_std_, plain.coef_std_, rtol=1e-9)


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


@pytest.mark.parametrize("seed", [0, 1, 7, 180])
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
