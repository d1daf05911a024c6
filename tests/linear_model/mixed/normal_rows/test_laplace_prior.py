"""The Laplace prior: optimality conditions, sklearn's Lasso on an expanded design, limits."""

import warnings

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import Lasso, LinearRegression

from pfl_sklearn import PersonalizedLinearRegression
from pfl_sklearn.priors import GaussianPrior, LaplacePrior

seeds = st.integers(0, 2**32 - 1)
BEST = {"tol": 1e-11, "max_iter": 100000}


def table(rng, m=10, d=2, sizes=None):
    """Clients that differ from the population in few coefficients (intercept first)."""
    codes = rng.permutation(
        np.repeat(np.arange(m), rng.integers(1, 8, m) if sizes is None else sizes)
    )
    theta = 2.0 * rng.normal(size=d + 1) + (rng.random((m, d + 1)) < 0.3) * rng.laplace(
        size=(m, d + 1)
    )
    X = rng.normal(size=(len(codes), d))
    y = theta[codes, 0] + np.einsum("nd,nd->n", X, theta[codes, 1:])
    return X, y + 0.5 * rng.normal(size=len(y)), codes, theta


def columns_of(model):
    return np.column_stack([model.intercept_, model.coef_])


def population_of(model):
    return np.append(model.population_intercept_, model.population_coef_)


def objective(X, y, codes, weights, noise, scale, theta, mu):
    """Minus the log posterior, up to constants: squares over 2 noise, deviations over scale."""
    design = np.column_stack([np.ones(len(y)), X])
    residuals = y - np.einsum("nd,nd->n", design, theta[codes])
    return weights @ residuals**2 / (2 * noise) + np.sum(np.abs(theta - mu) / scale)


@settings(max_examples=12, deadline=None)
@given(seeds, st.booleans(), st.booleans(), st.sampled_from(["all", "intercept", [1]]))
def test_the_conditions_of_the_optimum(seed, weighted, located, random):
    """Every client's gradient is a subgradient of its deviations, and all add up to zero."""
    rng = np.random.default_rng(seed)
    X, y, codes, theta = table(rng)
    weights = rng.uniform(0.5, 2, len(y)) if weighted else np.ones(len(y))
    positions = {"all": [0, 1, 2], "intercept": [0]}.get(
        random if isinstance(random, str) else "", [2]
    )
    scale, noise = rng.uniform(0.1, 1, len(positions)), float(rng.uniform(0.1, 1))
    location = theta.mean(axis=0)[positions] if located else None
    model = PersonalizedLinearRegression(
        LaplacePrior(location, scale), random=random, noise_variance=noise, **BEST
    ).fit(X, y, groups=codes, sample_weight=weights)
    theta, mu = columns_of(model), population_of(model)
    design = np.column_stack([np.ones(len(y)), X])
    residuals = weights * (y - np.einsum("nd,nd->n", design, theta[codes]))
    pull = np.array([design[codes == k].T @ residuals[codes == k] for k in range(10)]) / noise
    difference = theta - mu
    fixed = np.setdiff1d(np.arange(3), positions)
    np.testing.assert_array_equal(difference[:, fixed], 0.0)
    np.testing.assert_allclose(pull[:, fixed].sum(axis=0), 0.0, atol=1e-6)
    pull, difference = pull[:, positions] * scale, difference[:, positions]
    shifted = np.abs(difference) > 1e-9
    np.testing.assert_allclose(pull[shifted], np.sign(difference[shifted]), atol=1e-5)
    assert (np.abs(pull) <= 1 + 1e-5).all()
    if located:
        np.testing.assert_array_equal(model.population_intercept_, mu[0])
        np.testing.assert_allclose(model.prior_.location, location)
        np.testing.assert_allclose(mu[positions], location)
    else:
        np.testing.assert_allclose((pull / scale).sum(axis=0), 0.0, atol=1e-6)
    np.testing.assert_allclose(model.prior_.scale, scale)


@pytest.mark.parametrize("seed", range(2))
def test_lasso_on_an_expanded_design(seed):
    """Deviations are Lasso's coefficients, once the population's columns are projected off."""
    rng = np.random.default_rng(seed)
    X, y, codes, _ = table(rng, sizes=6)
    scale, noise = np.array([0.5, 0.2, 0.4]), 0.3
    model = PersonalizedLinearRegression(LaplacePrior(scale=scale), noise_variance=noise, **BEST)
    model.fit(X, y, groups=codes)
    design = np.column_stack([np.ones(60), X])
    blocks = np.hstack([design * scale * (codes == k)[:, None] for k in range(10)])
    off = np.eye(60) - design @ np.linalg.pinv(design)
    lasso = Lasso(alpha=noise / 60, fit_intercept=False, tol=1e-10, max_iter=10**5)
    result = lasso.fit(off @ blocks, off @ y).coef_
    mu, deviations = np.linalg.pinv(design) @ (y - blocks @ result), result.reshape(10, 3) * scale
    weights = np.ones(60)
    value = objective(X, y, codes, weights, noise, scale, columns_of(model), population_of(model))
    other = objective(X, y, codes, weights, noise, scale, mu + deviations, mu)
    assert value == pytest.approx(other, abs=1e-7)
    np.testing.assert_allclose(population_of(model), mu, atol=1e-3)
    np.testing.assert_allclose(columns_of(model), mu + deviations, atol=1e-3)
    exact = columns_of(model) == population_of(model)
    assert 0.2 < exact.mean() < 0.95


def test_unknown_scale_and_noise_match_the_variances_of_a_normal_prior():
    X, y, codes, _ = table(np.random.default_rng(0), 40)
    spherical = GaussianPrior(covariance_type="spherical", centered=False)
    normal = PersonalizedLinearRegression(spherical).fit(X, y, groups=codes)
    model = PersonalizedLinearRegression(LaplacePrior()).fit(X, y, groups=codes)
    assert 2 * model.prior_.scale**2 == pytest.approx(normal.prior_.covariance[0, 0], rel=1e-6)
    assert model.noise_variance_ == pytest.approx(normal.noise_variance_, rel=1e-6)
    known = clone(model).set_params(prior=model.prior_, noise_variance=model.noise_variance_)
    known.fit(X, y, groups=codes)
    np.testing.assert_allclose(columns_of(known), columns_of(model), atol=1e-3)
    half = clone(model).set_params(noise_variance=0.3).fit(X, y, groups=codes)
    other = clone(normal).set_params(noise_variance=0.3).fit(X, y, groups=codes)
    assert 2 * half.prior_.scale**2 == pytest.approx(other.prior_.covariance[0, 0], rel=1e-5)
    assert half.noise_variance_ == 0.3
    scaled = clone(model).set_params(prior=LaplacePrior(scale=0.7)).fit(X, y, groups=codes)
    assert scaled.prior_.scale == 0.7
    assert scaled.noise_variance_ == pytest.approx(normal.noise_variance_, rel=1e-6)


@pytest.mark.slow
def test_limits_of_the_scale():
    X, y, codes, _ = table(np.random.default_rng(0), 12, sizes=9)
    tight = PersonalizedLinearRegression(LaplacePrior(scale=1e-8), noise_variance=1.0)
    tight.fit(X, y, groups=codes)
    pooled = LinearRegression().fit(X, y)
    np.testing.assert_allclose(tight.coef_, np.tile(pooled.coef_, (12, 1)), atol=1e-9)
    np.testing.assert_array_equal(columns_of(tight), np.tile(population_of(tight), (12, 1)))
    loose = PersonalizedLinearRegression(LaplacePrior(scale=1e6), noise_variance=1.0, tol=1e-9)
    loose.set_params(max_iter=20000).fit(X, y, groups=codes)
    for k in range(12):
        local = LinearRegression().fit(X[codes == k], y[codes == k])
        np.testing.assert_allclose(loose.coef_[k], local.coef_, atol=1e-5)


def test_differences_in_few_coefficients_are_found():
    """The Laplace prior leaves the others exactly where they are, and wins for that."""
    rng = np.random.default_rng(0)
    codes, theta = np.repeat(np.arange(60), 8), np.tile(np.arange(6.0), (60, 1))
    odd = rng.random((60, 6)) < 0.1
    theta = theta + 3.0 * odd
    X = rng.normal(size=(480, 6))
    y = np.einsum("nd,nd->n", X, theta[codes]) + 0.5 * rng.normal(size=480)
    sparse = PersonalizedLinearRegression(
        LaplacePrior(scale=0.25), fit_intercept=False, noise_variance=0.25
    ).fit(X, y, groups=codes)
    normal = PersonalizedLinearRegression(GaussianPrior(), fit_intercept=False)
    normal.fit(X, y, groups=codes)
    errors = [np.mean((model.coef_ - theta) ** 2) for model in (sparse, normal)]
    assert errors[0] < 0.8 * errors[1]
    stays = sparse.coef_ == sparse.population_coef_
    assert stays[~odd].mean() > 0.5
    assert stays[odd].mean() < 0.1


@pytest.mark.parametrize(("factor", "shift"), [(1e6, 0.0), (1e-6, 100.0)])
def test_scale_and_shift_of_the_target(factor, shift):
    X, y, codes, _ = table(np.random.default_rng(0), 30)
    model = PersonalizedLinearRegression(LaplacePrior(), tol=1e-9, max_iter=20000)
    model.fit(X, y, groups=codes)
    other = clone(model).fit(X, factor * y + shift, groups=codes)
    np.testing.assert_allclose(other.coef_, factor * model.coef_, atol=1e-4 * factor)
    np.testing.assert_allclose((other.intercept_ - shift) / factor, model.intercept_, atol=1e-4)


def test_features_of_zeros_and_unlike_scales():
    rng = np.random.default_rng(0)
    X, y, codes, _ = table(rng, 12, sizes=9)
    X = np.column_stack([X, np.zeros(len(y))])
    X[codes == 3] = 0.0
    model = PersonalizedLinearRegression(LaplacePrior(scale=0.5), noise_variance=0.3)
    model.fit(X, y, groups=codes)
    np.testing.assert_array_equal(model.coef_[:, 2], 0.0)
    np.testing.assert_array_equal(model.coef_[3], model.population_coef_)
    wide = PersonalizedLinearRegression(
        LaplacePrior(scale=0.5 / np.array([1, 100, 1, 1])), noise_variance=0.3, **BEST
    ).fit(X * [100, 1, 1], y, groups=codes)
    best = clone(model).set_params(**BEST).fit(X, y, groups=codes)
    np.testing.assert_allclose(wide.coef_ * [100, 1, 1], best.coef_, atol=1e-4)


def test_there_is_a_mode_and_no_posterior():
    X, y, codes, _ = table(np.random.default_rng(0))
    model = PersonalizedLinearRegression(LaplacePrior(scale=0.5), noise_variance=0.3)
    model.fit(X, y, groups=codes)
    with pytest.raises(ValueError, match=r"return_std=True.*prior=LaplacePrior\(scale=0\.5\)"):
        model.predict(X, groups=codes, return_std=True)
    with pytest.raises(AttributeError, match=r"posterior.*prior=LaplacePrior.*method='reml'"):
        model.coef_std_  # noqa: B018
    for name in ("coef_std_", "shrinkage_", "intercept_std_", "responsibilities_"):
        assert not hasattr(model, name)
    assert np.isnan(model.log_likelihood_)
    assert np.isnan(model.population_coef_std_).all()
    summary = model.summary()
    np.testing.assert_allclose(summary.loc["between"]["estimate"], 2 * 0.5**2)


def test_a_search_that_is_cut_off_says_so():
    X, y, codes, _ = table(np.random.default_rng(0))
    model = PersonalizedLinearRegression(LaplacePrior(scale=0.5), max_iter=2)
    with pytest.warns(ConvergenceWarning, match="max_iter=2, tol=1e-06"):
        model.fit(X, y, groups=codes)


@pytest.mark.parametrize("target", ["constant", "exact"])
def test_a_constant_target_and_an_exact_fit(target):
    X, _, codes, theta = table(np.random.default_rng(0), sizes=6)
    y = np.full(60, 4.0)
    if target == "exact":
        y = theta[codes, 0] + np.einsum("nd,nd->n", X, theta[codes, 1:])
    model = PersonalizedLinearRegression(LaplacePrior(), max_iter=20000)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(X, y, groups=codes)
    messages = [str(w.message) for w in caught if w.category is UserWarning]
    assert ["population" in text and "all 60 rows" in text for text in messages] == (
        [True] if target == "constant" else []
    )
    np.testing.assert_allclose(model.predict(X, groups=codes), y, atol=1e-2)


@pytest.mark.parametrize(
    ("prior", "params", "groups", "message"),
    [
        (LaplacePrior(), {}, "one", r"client.*scale.*LaplacePrior.*groups"),
        (LaplacePrior(), {}, "rows", r"\b31 clients.*one row.*noise_variance"),
        (LaplacePrior(scale=1.0), {}, "rows", r"\b31 clients.*one row"),
        (LaplacePrior(scale=[1.0, 2.0]), {}, "codes", r"scale.*LaplacePrior.*\(3,\)"),
        (LaplacePrior(scale=[1.0, 0.0, 1.0]), {}, "codes", r"scale.*LaplacePrior.*1\.0, 0\.0"),
        (LaplacePrior(scale=0.0), {}, "codes", "'scale' parameter"),
        (LaplacePrior([1.0, np.nan, 1.0], 1.0), {}, "codes", r"location.*LaplacePrior.*nan"),
        (LaplacePrior(), {"solver": "spectral"}, "codes", r"solver='spectral'.*LaplacePrior"),
        (LaplacePrior(), {"method": "printed"}, "codes", r"method='printed'.*LaplacePrior"),
    ],
)
def test_bad_input_is_explained_and_leaves_nothing_fitted(prior, params, groups, message):
    X, y, codes, _ = table(np.random.default_rng(0))
    groups = {"one": 0 * codes, "rows": np.arange(len(y)), "codes": codes}[groups]
    model = PersonalizedLinearRegression(prior, **params)
    before = dict(vars(model))
    with pytest.raises(ValueError, match=message):
        model.fit(X, y, groups=groups)
    assert vars(model) == before


def test_what_is_known_is_enough_for_one_client_and_for_single_rows():
    X, y, codes, _ = table(np.random.default_rng(0))
    model = PersonalizedLinearRegression(LaplacePrior(0.0, 0.5), noise_variance=0.3, **BEST)
    alone = clone(model).fit(X, y, groups=0 * codes)
    design = np.column_stack([np.ones(len(y)), X])
    lasso = Lasso(alpha=0.3 / 0.5 / len(y), fit_intercept=False, tol=1e-12).fit(design, y)
    np.testing.assert_allclose(columns_of(alone)[0], lasso.coef_, atol=1e-6)
    single = clone(model).fit(X, y, groups=np.arange(len(y)))
    first = Lasso(alpha=0.3 / 0.5, fit_intercept=False, tol=1e-12).fit(design[:1], y[:1])
    fitted = columns_of(single)[0] @ design[0]
    assert fitted == pytest.approx(first.coef_ @ design[0], abs=1e-6)
