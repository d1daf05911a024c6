"""Errors of mixed models with few clients, and fits of clients with few rows."""

import functools
import pickle

import numpy as np
import pytest
from scipy.integrate import quad_vec
from sklearn.base import clone

from pfl_sklearn import PersonalizedLinearRegression
from pfl_sklearn.priors import GaussianPrior

FULL, DIAG = GaussianPrior(covariance_type="full"), GaussianPrior(covariance_type="diag")


def draw(m, n, q, seed=0, sd=1.0):
    """Rows of clients whose q coefficients vary, the first of them the intercept."""
    rng = np.random.default_rng(seed)
    codes = np.repeat(np.arange(m), n)
    X = rng.normal(size=(len(codes), q - 1))
    theta = sd * rng.normal(size=(m, q))
    y = theta[codes, 0] + np.einsum("nd,nd->n", X, theta[codes, 1:]) + rng.normal(size=len(codes))
    return X, y, codes, theta


@functools.cache
def fit_of_8(uncertainty="full"):
    """A fit to 8 clients of 6 rows that no test changes, and its table."""
    X, y, codes, _ = draw(8, 6, 2)
    model = PersonalizedLinearRegression(FULL, uncertainty=uncertainty, unseen="population")
    return model.fit(X, y, groups=codes), X, y, codes


def columns(model):
    return np.column_stack([model.intercept_, model.coef_])


def test_a_random_intercept_matches_brute_force_integration():
    """Ratio t = tau / sigma with a half-Cauchy prior, everything else by dense algebra."""
    rng = np.random.default_rng(0)
    codes, X = np.repeat(np.arange(5), [2, 3, 4, 3, 2]), rng.normal(size=(14, 1))
    y = X[:, 0] + rng.normal(size=5)[codes] + rng.normal(size=14)
    model = PersonalizedLinearRegression(random="intercept").fit(X, y, groups=codes)
    design, Z = np.column_stack([np.ones(14), X]), np.eye(5)[codes]
    estimate = model.intercept_[0]

    def at(t):
        V = np.eye(14) + t**2 * Z @ Z.T
        inverse = np.linalg.inv(V)
        information = design.T @ inverse @ design
        beta = np.linalg.solve(information, design.T @ inverse @ y)
        residual = y - design @ beta
        square = residual @ inverse @ residual
        weight = (np.linalg.det(V) * np.linalg.det(information)) ** -0.5 * square**-6 / (1 + t**2)
        gain = t**2 * Z[:, 0] @ inverse
        shifted = np.array([1.0, 0.0]) - gain @ design
        scale = square / 10  # posterior mean of the noise variance
        variance = scale * (
            t**2 - t**2 * gain @ Z[:, 0] + shifted @ np.linalg.solve(information, shifted)
        )
        bias = (beta[0] + gain @ residual - estimate) ** 2
        error = scale * np.linalg.inv(information)[0, 0]
        wrong = (beta[0] - model.population_intercept_) ** 2
        return weight * np.array([1.0, variance + bias, error + wrong])

    total, variance, error = quad_vec(at, 0, np.inf, epsrel=1e-6)[0]
    assert model.intercept_std_[0] ** 2 == pytest.approx(variance / total, rel=2e-3)
    assert model.population_intercept_std_**2 == pytest.approx(error / total, rel=5e-3)


@pytest.mark.slow
def test_draws_of_one_variance_agree_with_its_quadrature():
    """A slope that explains nothing adds little to the errors of the intercept."""
    X, y, codes, _ = draw(40, 8, 2, sd=0.7)
    y = y - X[:, 0] * columns(PersonalizedLinearRegression(DIAG).fit(X, y, groups=codes))[codes, 1]
    one = PersonalizedLinearRegression(random="intercept").fit(X, y, groups=codes)
    two = PersonalizedLinearRegression(DIAG).fit(X, y, groups=codes)
    np.testing.assert_allclose(two.intercept_std_, one.intercept_std_, rtol=0.06)


@pytest.mark.slow
def test_errors_do_not_depend_on_units_and_zeros():
    model, X, y, codes = fit_of_8()
    shifted = PersonalizedLinearRegression(FULL).fit(1440 * X + 2e5, y, groups=codes)
    stds = (
        model.predict(X, groups=codes, return_std=True)[1],
        shifted.predict(1440 * X + 2e5, groups=codes, return_std=True)[1],
    )
    np.testing.assert_allclose(*stds, rtol=1e-3)


@pytest.mark.slow
def test_errors_are_the_same_in_every_process_and_copy():
    first, X, y, codes = fit_of_8()
    second = pickle.loads(pickle.dumps(clone(first).fit(X, y, groups=codes)))
    np.testing.assert_array_equal(first.coef_std_, second.coef_std_)
    alone = first.for_client(2)
    np.testing.assert_allclose(alone.coef_std_[0], first.coef_std_[2], rtol=1e-12)
    np.testing.assert_array_equal(alone.population_covariance_, first.population_covariance_)
    rows = np.array([[0.5]])
    mean, std = alone.predict(rows, groups=[99], return_std=True)
    expected = first.predict(rows, groups=[99], return_std=True)
    np.testing.assert_allclose([mean, std], expected, rtol=1e-12)


@pytest.mark.slow
def test_plug_in_counts_variances_as_known():
    full, X, y, codes = fit_of_8()
    plug_in = fit_of_8("plug_in")[0]
    np.testing.assert_array_equal(full.coef_, plug_in.coef_)
    np.testing.assert_array_equal(full.shrinkage_, plug_in.shrinkage_)
    assert np.mean(full.coef_std_**2) > np.mean(plug_in.coef_std_**2)
    assert full.population_coef_std_[0] > plug_in.population_coef_std_[0]
    known = GaussianPrior(covariance=0.5)
    pair = [
        PersonalizedLinearRegression(known, noise_variance=1.0, uncertainty=kind)
        .fit(X, y, groups=codes)
        .coef_std_
        for kind in ("full", "plug_in")
    ]
    np.testing.assert_array_equal(*pair)


@pytest.mark.filterwarnings("ignore:.* may have missed the maximum")  # by rounding of residuals
@pytest.mark.parametrize("random", ["all", "intercept"])
def test_an_exact_fit_leaves_nothing_to_average(random):
    """There is no noise; the averages' likelihoods would overflow."""
    X, _, codes, _ = draw(8, 6, 3)
    for y in (np.zeros(48), np.full(48, 3.0), 2 * X[:, 0] + 1):
        model = PersonalizedLinearRegression(random=random, unseen="population")
        with pytest.warns(UserWarning, match="population's coefficients fit all 48 rows exactly"):
            model.fit(X, y, groups=codes)
        mean, std = model.predict(X[:2], groups=[0, -1], return_std=True)
        np.testing.assert_allclose(mean, y[:2], atol=1e-9)
        assert (std < 2 * np.sqrt(np.finfo(float).eps)).all()  # residuals of rounding, squared


def test_coefficients_that_no_row_tells_of_have_no_intervals():
    X, y, codes, _ = draw(8, 6, 2)
    model = PersonalizedLinearRegression().fit(np.zeros_like(X), y, groups=codes)
    lower, upper = model.credible_interval()
    assert (lower[:, 0] < upper[:, 0]).all()
    np.testing.assert_array_equal(lower[:, 1:], np.nan)
    np.testing.assert_array_equal(upper[:, 1:], np.nan)


@pytest.mark.parametrize(("m", "share"), [(316, 0.5), (1000, None)])
def test_the_averages_fade_out(m, share):
    X, y, codes, _ = draw(m, 3, 2)
    model = PersonalizedLinearRegression(DIAG).fit(X, y, groups=codes)
    if share is None:
        assert not hasattr(model._posterior, "share")
    else:
        assert model._posterior.share == pytest.approx(share, abs=0.01)
    plug_in = PersonalizedLinearRegression(DIAG, uncertainty="plug_in").fit(X, y, groups=codes)
    np.testing.assert_allclose(model.coef_std_, plug_in.coef_std_, rtol=0.15)


@pytest.mark.slow
def test_few_rows_warn_and_keep_their_noise():
    """Restricted likelihood ended at noise variances of 1e-13 to 1e-8 for 1."""
    X, y, codes, _ = draw(6, 2, 3, seed=3)
    with pytest.warns(UserWarning, match=r"'intercept', 'x0', 'x1'.*\b2 to 2 rows"):
        model = PersonalizedLinearRegression(DIAG, random="all").fit(X, y, groups=codes)
    assert model.noise_variance_ > 1e-3


@pytest.mark.filterwarnings("ignore::pfl_sklearn.linear_model.NotEstimableWarning")
@pytest.mark.parametrize(("shape", "n_features"), [("spherical", 11), ("diag", 20)])
def test_a_population_that_fits_all_rows_warns(shape, n_features):
    rng = np.random.default_rng(0)
    X, y, codes = rng.normal(size=(12, n_features)), rng.normal(size=12), np.repeat(range(4), 3)
    prior = GaussianPrior(covariance_type=shape)
    with pytest.warns(UserWarning, match="fit all 12 rows exactly") as caught:
        PersonalizedLinearRegression(prior).fit(X, y, groups=codes)
    # With more coefficients than rows there is another one.
    assert len(caught) == 1 + (n_features > 11)


@pytest.mark.slow
def test_posterior_means_go_back_in_as_known():
    X, y, codes, _ = draw(15, 3, 4)
    with pytest.warns(UserWarning, match="'intercept', 'x0', 'x1', 'x2'"):
        model = PersonalizedLinearRegression(FULL).fit(X, y, groups=codes)
    assert np.isnan(model.log_likelihood_)
    assert model.noise_variance_ > 1e-3
    known = PersonalizedLinearRegression(model.prior_, noise_variance=model.noise_variance_)
    known.fit(X, y, groups=codes)
    assert np.corrcoef(known.coef_.ravel(), model.coef_.ravel())[0, 1] > 0.98


@pytest.mark.slow
def test_a_given_noise_variance_needs_no_posterior_means():
    X, y, codes, _ = draw(15, 3, 4)
    model = PersonalizedLinearRegression(FULL, noise_variance=1.0).fit(X, y, groups=codes)
    assert np.isfinite(model.log_likelihood_)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prior", "m", "n", "q", "sd", "least", "n_tables"),
    [
        ("gaussian", 5, 10, 1, 0.55, 0.9, 30),
        (FULL, 8, 10, 2, 0.5, 0.91, 12),
        (FULL, 6, 2, 3, 1.0, 0.88, 10),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_intervals_cover(prior, m, n, q, sd, least, n_tables):
    """Plug-in intervals cover .80 of the time in the first case, and .60 in the last."""
    known, new = [], []
    for seed in range(n_tables):
        X, y, codes, theta = draw(m, n, q, seed, sd)
        X = X if q > 1 else np.random.default_rng(seed).normal(size=(len(y), 1))
        random = "all" if q > 1 else "intercept"
        model = PersonalizedLinearRegression(prior, random=random, unseen="population")
        model.fit(X, y, groups=codes)
        lower, upper = model.credible_interval()
        known.append(np.mean((lower[:, :q] <= theta) & (theta <= upper[:, :q])))
        row, client = np.zeros((1, X.shape[1])), sd * np.random.default_rng(seed + 10**6).normal()
        mean, std = model.predict(row, groups=[-1], return_std=True)
        new.append(abs(mean[0] - client) <= 1.96 * std[0])
    assert least - 0.015 <= np.mean(known) < 0.985
    assert np.mean(new) > 0.86
