"""PersonalizedLinearRegression under a Gaussian prior: oracles, limits, equivariance, bad input."""

import copy
import pickle
import warnings

import numpy as np
import pandas as pd
import pytest
import sklearn
from hypothesis import example, given, settings, strategies as st
from scipy import stats
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import GridSearchCV
from statsmodels.regression.mixed_linear_model import MixedLM

from pfl_sklearn import PersonalizedLinearRegression, UnseenClientsWarning
from pfl_sklearn.linear_model._mixed import _reduction
from pfl_sklearn.metrics import ClientScorer
from pfl_sklearn.model_selection import ClientKFold
from pfl_sklearn.priors import GaussianPrior
from tests.helpers.dense_mixed_model import (
    SHAPES,
    Problem,
    coefficients,
    draw_covariance,
    draw_problem,
    predict,
    solve,
)
from tests.helpers.slow import slow

seeds = st.integers(0, 2**32 - 1)
flags = st.booleans()
shapes = st.sampled_from(SHAPES)
every_shape = pytest.mark.parametrize("covariance_type", SHAPES)


def fit(problem, prior=None, fit_intercept=True, sample_weight=None, **params):
    """Fit of a problem whose first column is the intercept, or a feature like any other."""
    model = PersonalizedLinearRegression(
        GaussianPrior() if prior is None else prior,
        fit_intercept=fit_intercept,
        **{"random": random_of(problem, fit_intercept), **params},
    )
    features = problem.X[:, 1:] if fit_intercept else problem.X
    return model.fit(features, problem.y, groups=problem.codes, sample_weight=sample_weight)


def random_of(problem, fit_intercept=True):
    if not fit_intercept:
        return problem.random.tolist()
    return ["intercept" if k == 0 else int(k) - 1 for k in problem.random]


def columns_of(model):
    """Clients' coefficients (m, p) with the intercept first."""
    return np.column_stack([model.intercept_, model.coef_])


def population_of(model):
    return np.append(model.population_intercept_, model.population_coef_)


def table(m=30, seed=0, sd=(1.0, 0.7, 0.4), noise=0.8, sizes=None):
    """Rows of a random-slopes model: features (n, 2), targets, clients, coefficients (m, 3)."""
    rng = np.random.default_rng(seed)
    codes = np.repeat(np.arange(m), rng.integers(1, 9, m) if sizes is None else sizes)
    X = rng.normal(size=(len(codes), 2))
    theta = np.array([3.0, 1.0, -2.0]) + rng.normal(size=(m, 3)) * sd
    y = theta[codes, 0] + np.einsum("nd,nd->n", X, theta[codes, 1:])
    return X, y + noise * rng.normal(size=len(y)), codes, theta


# Oracles ------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    seeds,
    shapes,
    st.sampled_from(["all", (0,), (2,), (0, 1)]),
    st.sampled_from(["reml", "ml"]),
    st.tuples(flags, flags, flags),
    flags,
    flags,
)
def test_a_fit_is_the_conditional_of_the_joint_normal(
    seed, covariance_type, random, method, known, weighted, fit_intercept
):
    """Whatever is known: likelihood, population, clients, and the variance of predictions."""
    rng = np.random.default_rng(seed)
    problem = draw_problem(rng, random=random, weighted=weighted, known=known[0])
    covariance = draw_covariance(rng, covariance_type, len(problem.random)) if known[1] else None
    model = fit(
        problem,
        GaussianPrior(problem.mean, covariance, covariance_type),
        fit_intercept,
        problem.weights if weighted else None,
        method=method,
        noise_variance=float(np.exp(rng.normal())) if known[2] else None,
        uncertainty="plug_in",
    )
    S = model.prior_.covariance
    if covariance is not None:
        np.testing.assert_allclose(S, covariance, rtol=1e-12, atol=1e-14)
    expected = solve(problem, S, model.noise_variance_, method == "reml")
    assert -2 * model.log_likelihood_ == pytest.approx(expected.criterion, abs=1e-6)
    population = population_of(model) if fit_intercept else model.population_coef_
    np.testing.assert_allclose(population, expected.population, atol=1e-7)
    np.testing.assert_allclose(model.prior_.mean, population[problem.random], atol=1e-12)
    errors = expected.population_covariance
    np.testing.assert_allclose(model.population_covariance_, errors, atol=1e-7 * errors.max())
    rows = np.column_stack([np.ones(15), rng.normal(size=(15, 2))])
    clients = np.append(np.tile(np.arange(7), 2), 99)
    mean, std = model.predict(
        rows[:, 1:] if fit_intercept else rows, groups=clients, return_std=True
    )
    pairs = zip(rows, clients, strict=True)
    oracle = np.array([predict(problem, expected, S, x, client) for x, client in pairs])
    np.testing.assert_allclose(mean, oracle[:, 0], atol=1e-7)
    np.testing.assert_allclose(std**2, oracle[:, 1], atol=1e-7 * (1 + oracle[:, 1].max()))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* may have missed the maximum")  # true at any covariance
@settings(max_examples=1, deadline=None)
@given(seeds, shapes, st.sampled_from(["all", (0,), (1, 2)]))
@example(316814, "low_rank", "all")  # whose likelihood is flat
def test_standard_deviations_of_coefficients_are_those_of_predictions_at_unit_vectors(
    seed, covariance_type, random
):
    rng = np.random.default_rng(seed)
    problem = draw_problem(rng, random=random)
    model = fit(problem, GaussianPrior(covariance_type=covariance_type), noise_variance=0.5)
    m = len(model.clients_)
    origin = model.predict(np.zeros((m, 2)), groups=model.clients_, return_std=True)
    np.testing.assert_allclose(origin[0], model.intercept_, atol=1e-9)
    np.testing.assert_allclose(origin[1], model.intercept_std_, atol=1e-9)
    bare = fit(problem, GaussianPrior(covariance_type=covariance_type), False, noise_variance=0.5)
    for k, unit in enumerate(np.eye(3)):
        mean, std = bare.predict(np.tile(unit, (m, 1)), groups=bare.clients_, return_std=True)
        np.testing.assert_allclose(mean, bare.coef_[:, k], atol=1e-9)
        np.testing.assert_allclose(std, bare.coef_std_[:, k], atol=1e-9)
    if bare.log_likelihood_ == pytest.approx(model.log_likelihood_, abs=1e-7):
        kind = {"noise_variance": 0.5, "uncertainty": "plug_in"}
        bare, plug_in = (
            fit(problem, GaussianPrior(covariance_type=covariance_type), intercept, **kind)
            for intercept in (False, True)
        )
        np.testing.assert_allclose(bare.coef_std_[:, 1:], plug_in.coef_std_, rtol=1e-3)
    S = model.prior_.covariance
    conditional = solve(problem, S, 0.5, False)._replace(population_covariance=np.zeros((3, 3)))
    shrinkage = np.column_stack([model.intercept_shrinkage_, model.shrinkage_])
    assert ((shrinkage >= 0) & (shrinkage <= 1)).all()
    for position, variance in zip(problem.random, np.diag(S), strict=True):
        if variance > 1e-6:
            x = np.eye(3)[position]
            expected = [predict(problem, conditional, S, x, k)[1] / variance for k in range(m)]
            np.testing.assert_allclose(shrinkage[:, position], expected, atol=1e-7)
    fixed = np.setdiff1d(np.arange(3), problem.random)
    np.testing.assert_array_equal(shrinkage[:, fixed], 1.0)


@pytest.mark.parametrize("method", ["reml", "ml"])
def test_the_mixed_model_of_statsmodels(method):
    X, y, codes, _ = table(40, sizes=8)
    design = np.column_stack([np.ones(len(y)), X])
    other = MixedLM(y, design, groups=codes, exog_re=design[:, :2]).fit(reml=method == "reml")
    model = PersonalizedLinearRegression(
        GaussianPrior(covariance_type="full"),
        random=["intercept", 0],
        method=method,
        uncertainty="plug_in",
    ).fit(X, y, groups=codes)
    np.testing.assert_allclose(population_of(model), other.fe_params, rtol=1e-4)
    np.testing.assert_allclose(
        np.append(model.population_intercept_std_, model.population_coef_std_),
        other.bse_fe,
        rtol=1e-2,  # theirs also count the variances' error, in part
    )
    np.testing.assert_allclose(model.prior_.covariance, other.cov_re, rtol=1e-3, atol=1e-3)
    assert model.noise_variance_ == pytest.approx(other.scale, rel=1e-3)
    deviations = columns_of(model)[:, :2] - population_of(model)[:2]
    theirs = np.array([other.random_effects[k] for k in range(40)])
    np.testing.assert_allclose(deviations, theirs, atol=2e-3)
    if method == "ml":
        assert other.llf - 1e-6 <= model.log_likelihood_ <= other.llf + 1e-3


def test_a_common_variance_is_common_in_the_units_of_the_data():
    X, y, codes, _ = table()
    X = X * [1.0, 10.0]
    spherical = GaussianPrior(covariance_type="spherical", centered=False)
    model, best = (
        PersonalizedLinearRegression(spherical, solver=solver).fit(X, y, groups=codes)
        for solver in ("quasi_newton", "spectral")
    )
    np.testing.assert_allclose(
        model.prior_.covariance, best.prior_.covariance[0, 0] * np.eye(3), rtol=1e-5, atol=1e-12
    )
    assert model.log_likelihood_ == pytest.approx(best.log_likelihood_, abs=1e-8)


@pytest.mark.slow
def test_the_ridge_of_a_low_rank_is_common_in_the_units_of_the_data():
    X, y, codes, _ = table()
    X = X * [1.0, 10.0]
    low, spherical = (
        PersonalizedLinearRegression(GaussianPrior(covariance_type=shape, centered=False))
        for shape in ("low_rank", "spherical")
    )
    values = np.linalg.eigvalsh(low.fit(X, y, groups=codes).prior_.covariance)
    assert values[0] == pytest.approx(values[1], rel=1e-6)
    assert low.log_likelihood_ > spherical.fit(X, y, groups=codes).log_likelihood_


def test_a_hierarchy_of_covariances():
    X, y, codes, _ = table()
    result = {
        shape: PersonalizedLinearRegression(GaussianPrior(covariance_type=shape), method="ml")
        .fit(X, y, groups=codes)
        .log_likelihood_
        for shape in SHAPES
    }
    assert result["spherical"] < result["diag"] < result["full"]
    assert result["spherical"] < result["low_rank"] < result["full"]
    rank_2 = PersonalizedLinearRegression(GaussianPrior(covariance_type="low_rank", rank=2))
    rank_2.set_params(method="ml").fit(X, y, groups=codes)
    assert rank_2.log_likelihood_ == pytest.approx(result["full"], abs=1e-5)


def test_unknown_population_costs_little():
    """n = 10 rows, d = 50 coefficients: errors of .4698 and .4706 at 10,000 clients."""
    m, d = 1000, 50
    rng = np.random.default_rng(0)
    codes, theta = np.repeat(np.arange(m), 10), 0.1 * rng.normal(size=d)
    theta = theta + 0.1 * rng.normal(size=(m, d))
    X = np.sqrt(0.05) * rng.normal(size=(10 * m, d))
    y = np.einsum("nd,nd->n", X, theta[codes]) + np.sqrt(0.05) * rng.normal(size=10 * m)

    def error(prior, **params):
        model = PersonalizedLinearRegression(prior, fit_intercept=False, **params)
        return np.mean(np.sum((model.fit(X, y, groups=codes).coef_ - theta) ** 2, axis=1))

    known = error(GaussianPrior(theta.mean(axis=0), 0.01), noise_variance=0.05)
    estimated = error(GaussianPrior(covariance_type="spherical"))
    pooled = error(GaussianPrior(covariance=0.0))
    assert known == pytest.approx(0.4698, rel=0.02)
    assert pooled == pytest.approx(0.502, rel=0.02)
    assert known < estimated < known + 0.2 * (pooled - known)


@pytest.mark.slow
def test_predictions_are_as_uncertain_as_they_say():
    """Of known and new clients, with the population estimated: standardized errors are N(0, 1)."""
    errors = {"known": [], "new": []}
    prior = GaussianPrior(covariance=np.diag([1.0, 0.49, 0.16]))
    for seed in range(75):
        X, y, codes, theta = table(8, seed)
        model = PersonalizedLinearRegression(prior, noise_variance=0.64)
        model.fit(X[codes > 1], y[codes > 1], groups=codes[codes > 1])
        rng = np.random.default_rng(seed + 1000)
        x = rng.normal(size=(8, 2))
        mean, std = model.predict(x, groups=np.arange(8), return_std=True)
        scores = (mean - theta[:, 0] - np.einsum("md,md->m", x, theta[:, 1:])) / std
        errors["known"] += [scores[2 + seed % 3], scores[5 + seed % 3]]
        errors["new"] += list(scores[:2])
    for scores in errors.values():
        assert stats.kstest(scores, "norm").pvalue > 1e-3
        assert np.std(scores) == pytest.approx(1.0, abs=0.2)


def test_summary():
    X, y, codes, _ = table()
    frame = pd.DataFrame(X, columns=["age", "dose"])
    model = PersonalizedLinearRegression(
        GaussianPrior(covariance_type="full"), random=["intercept", "dose"], uncertainty="plug_in"
    ).fit(frame, y, groups=codes)
    summary = model.summary()
    assert summary.index.names == ["part", "term"]
    fixed = summary.loc["fixed"]
    assert fixed.index.tolist() == ["intercept", "age", "dose"]
    np.testing.assert_array_equal(fixed["estimate"], population_of(model))
    np.testing.assert_array_equal(
        fixed["std_error"], np.append(model.population_intercept_std_, model.population_coef_std_)
    )
    between, S = summary.loc["between"], model.prior_.covariance
    at_means = "response at the features' means"
    assert between.index.tolist() == ["intercept", "dose", "intercept, dose", at_means]
    row = np.array([1.0, frame["dose"].mean()])
    assert between.loc[at_means, "estimate"] == pytest.approx(row @ S @ row)
    between = between.drop(at_means)
    np.testing.assert_allclose(between["estimate"], [S[0, 0], S[1, 1], S[0, 1]])
    np.testing.assert_allclose(between["sd"].iloc[:2], np.sqrt(np.diag(S)))
    correlation = S[0, 1] / np.sqrt(S[0, 0] * S[1, 1])
    assert between["correlation"].iloc[2] == pytest.approx(correlation)
    within = summary.loc[("within", "residual")]
    assert within["estimate"] == model.noise_variance_
    assert within["sd"] ** 2 == pytest.approx(model.noise_variance_)
    plain = PersonalizedLinearRegression(random=[0], fit_intercept=False).fit(X, y, groups=codes)
    assert plain.summary().loc["fixed"].index.tolist() == ["x0", "x1"]


def test_a_fitted_prior_is_known_when_it_is_passed_back_in():
    X, y, codes, _ = table()
    first = PersonalizedLinearRegression(
        GaussianPrior(covariance_type="full"), random=["intercept", 1]
    ).fit(X, y, groups=codes)
    again = clone(first).set_params(prior=first.prior_, noise_variance=first.noise_variance_)
    again.fit(X, y, groups=codes)
    np.testing.assert_allclose(columns_of(again), columns_of(first), atol=1e-9)
    np.testing.assert_array_equal(again.population_coef_std_[1], 0.0)
    assert again.population_coef_std_[0] > 0
    with sklearn.config_context(enable_metadata_routing=True):
        search = GridSearchCV(
            PersonalizedLinearRegression(first.prior_),
            {"prior": [first.prior_, GaussianPrior()], "random": [["intercept", 1]]},
            cv=ClientKFold(2),
            scoring=ClientScorer("neg_mean_squared_error"),
        ).fit(X, y, groups=codes)
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()


# Limits -------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::pfl_sklearn.linear_model.NotEstimableWarning")
@pytest.mark.parametrize("n", [4, 30])
@pytest.mark.parametrize(("fit_intercept", "weighted"), [(True, False), (False, True)])
@pytest.mark.parametrize("prior", [GaussianPrior(), GaussianPrior(covariance=np.inf)])
def test_one_client_is_linear_regression(n, fit_intercept, weighted, prior):
    """Also with fewer rows than coefficients: the one of minimum norm."""
    rng = np.random.default_rng(n)
    X, y = rng.normal(size=(n, 6)) + 3, rng.normal(size=n) + 10
    weights = rng.uniform(0.5, 2, n) if weighted else None
    model = PersonalizedLinearRegression(prior, fit_intercept=fit_intercept)
    model.fit(X, y, groups=["a"] * n, sample_weight=weights)
    expected = LinearRegression(fit_intercept=fit_intercept).fit(X, y, weights)
    np.testing.assert_allclose(model.coef_[0], expected.coef_, atol=1e-9)
    assert model.intercept_[0] == pytest.approx(expected.intercept_, abs=1e-9)
    np.testing.assert_array_equal(model.shrinkage_, 0.0)
    if n > 7:
        root = np.sqrt(np.ones(n) if weights is None else weights)[:, None]
        design = np.column_stack([np.ones(n)] * fit_intercept + [X]) * root
        residuals = (y - expected.predict(X)) * root[:, 0]
        noise = residuals @ residuals / (n - design.shape[1])
        assert model.noise_variance_ == pytest.approx(noise)
        errors = np.sqrt(noise * np.diag(np.linalg.inv(design.T @ design)))
        np.testing.assert_allclose(model.coef_std_[0], errors[fit_intercept:])


@pytest.mark.parametrize(("random", "weighted"), [("all", True), ("intercept", False), ([1], True)])
def test_no_variance_between_clients_is_pooled_linear_regression(random, weighted):
    X, y, codes, _ = table()
    weights = np.random.default_rng(0).uniform(0.5, 2, len(y)) if weighted else None
    model = PersonalizedLinearRegression(GaussianPrior(covariance=0.0), random=random)
    model.fit(X, y, groups=codes, sample_weight=weights)
    pooled = LinearRegression().fit(X, y, weights)
    np.testing.assert_allclose(model.coef_, np.tile(pooled.coef_, (30, 1)), atol=1e-10)
    np.testing.assert_allclose(model.intercept_, np.full(30, pooled.intercept_), atol=1e-10)
    residuals = y - pooled.predict(X)
    square = np.sum(residuals**2 * (1 if weights is None else weights))
    assert model.noise_variance_ == pytest.approx(square / (len(y) - 3))
    np.testing.assert_array_equal(model.shrinkage_, 1.0)


@pytest.mark.parametrize("fit_intercept", [True, False])
def test_infinite_variance_is_linear_regression_client_by_client(fit_intercept):
    """Clients with fewer rows than coefficients, and with a constant column, get minimum norm."""
    X, y, codes, _ = table()
    X[codes == 4, 0] = float(fit_intercept)
    model = PersonalizedLinearRegression(
        GaussianPrior(covariance=np.inf), fit_intercept=fit_intercept
    ).fit(X, y, groups=codes)
    for k in range(30):
        local = LinearRegression(fit_intercept=fit_intercept).fit(X[codes == k], y[codes == k])
        np.testing.assert_allclose(model.coef_[k], local.coef_, atol=1e-9)
        assert model.intercept_[k] == pytest.approx(local.intercept_, abs=1e-9)
    np.testing.assert_array_equal(model.shrinkage_, 0.0)
    with pytest.warns(UnseenClientsWarning):
        assert np.isinf(model.predict(X[:1], groups=[99], return_std=True)[1])


@pytest.mark.parametrize("weighted", [True, False])
def test_infinite_variance_of_intercepts_is_the_within_estimator(weighted):
    X, y, codes, _ = table()
    X = X + 1e3 * np.arange(30)[codes, None]
    rng = np.random.default_rng(0)
    weights = rng.uniform(0.5, 2, len(y)) if weighted else np.ones(len(y))
    model = PersonalizedLinearRegression(GaussianPrior(covariance=np.inf), random="intercept")
    model.fit(X, y, groups=codes, sample_weight=weights)
    dummies, root = (codes[:, None] == np.arange(30)).astype(float), np.sqrt(weights)
    design = np.column_stack([X, dummies]) * root[:, None]
    expected = np.linalg.lstsq(design, y * root)[0]
    np.testing.assert_allclose(model.population_coef_, expected[:2], atol=1e-7)
    np.testing.assert_allclose(model.intercept_, expected[2:], atol=1e-3)
    residuals = (y - model.predict(X, groups=codes)) * root
    assert model.noise_variance_ == pytest.approx(residuals @ residuals / (len(y) - 32))
    errors = model.noise_variance_ * np.linalg.inv(design.T @ design)
    errors = np.sqrt(np.diag(errors))[:2]
    np.testing.assert_allclose(model.population_coef_std_, errors, rtol=1e-6)
    np.testing.assert_allclose(model.coef_std_[3], errors, rtol=1e-6)


@pytest.mark.filterwarnings("ignore::pfl_sklearn.linear_model.NotEstimableWarning")
def test_what_is_constant_within_clients_has_no_within_estimate():
    """Rounding errors are all that is left of such a column: its coefficient is 0, not noise."""
    X, y, codes, _ = table()
    level = np.random.default_rng(0).normal(size=30)[codes]
    model = PersonalizedLinearRegression(GaussianPrior(covariance=np.inf), random="intercept")
    model.fit(level[:, None], y, groups=codes)
    np.testing.assert_array_equal(model.coef_, 0.0)
    model.fit(np.column_stack([X[:, 0], level, 2 * level + 1]), y, groups=codes)
    without = clone(model).fit(X[:, :1], y, groups=codes)
    np.testing.assert_allclose(model.population_coef_, [without.population_coef_[0], 0, 0])
    # It is not known to be 0, though.
    np.testing.assert_array_equal(np.isnan(model.population_coef_std_), [False, True, True])
    np.testing.assert_array_equal(np.isnan(model.coef_std_[0]), [False, True, True])


@pytest.mark.parametrize("sizes", [2, 3, 9])
def test_few_rows_and_many_give_the_same_under_a_known_population(sizes):
    """Clients with no more rows than coefficients are solved in the space of rows."""
    X, y, codes, _ = table(20, sizes=sizes)
    weights = np.random.default_rng(0).uniform(0.5, 2, len(y))
    S = np.array([[1.0, 0.3, 0.0], [0.3, 0.5, 0.1], [0.0, 0.1, 0.4]])
    for covariance in (S, 0.6 * np.eye(3)):
        prior = GaussianPrior([3.0, 1.0, -2.0], covariance)
        model = PersonalizedLinearRegression(prior, noise_variance=0.64)
        model.fit(X, y, groups=codes, sample_weight=weights)
        design = np.column_stack([np.ones(len(y)), X])
        problem = Problem(design, y, codes, np.arange(3), weights, prior.mean)
        expected = solve(problem, covariance, 0.64, True)
        np.testing.assert_allclose(
            columns_of(model), coefficients(problem, expected, covariance), atol=1e-9
        )
        assert -2 * model.log_likelihood_ == pytest.approx(expected.criterion)
        std = model.predict(X, groups=codes, return_std=True)[1]
        pairs = zip(design, codes, strict=True)
        oracle = [predict(problem, expected, covariance, x, k)[1] for x, k in pairs]
        np.testing.assert_allclose(std**2, oracle, atol=1e-9)


def test_a_known_mean_is_kept_whatever_else_is_not_known():
    X, y, codes, _ = table()
    mean = np.array([1.0, 2.0, 3.0])
    for covariance in (None, 0.5, 0.0, np.inf):
        prior = GaussianPrior(mean, covariance)
        model = PersonalizedLinearRegression(prior, uncertainty="plug_in")
        model.fit(X, y, groups=codes)
        np.testing.assert_array_equal(population_of(model), mean)
        np.testing.assert_array_equal(model.prior_.mean, mean)
        np.testing.assert_array_equal(model.population_covariance_, np.zeros((3, 3)))
    alone = PersonalizedLinearRegression(GaussianPrior(mean)).fit(
        X, y, groups=np.zeros(len(y), int)
    )
    np.testing.assert_array_equal(alone.prior_.mean, mean)
    np.testing.assert_allclose(alone.coef_[0], LinearRegression().fit(X, y).coef_)


# Equivariance -------------------------------------------------------------------------------------


@pytest.mark.parametrize("covariance_type", ["spherical", "low_rank", "full"])
def test_scale_of_the_target(covariance_type):
    (X, y, codes, _), factor = table(), 1e-8
    prior = GaussianPrior(covariance_type=covariance_type)
    model = PersonalizedLinearRegression(prior).fit(X, y, groups=codes)
    other = clone(model).fit(X, factor * y, groups=codes)
    np.testing.assert_allclose(columns_of(other), factor * columns_of(model), rtol=1e-6)
    np.testing.assert_allclose(other.noise_variance_, factor**2 * model.noise_variance_, rtol=1e-6)
    covariance, atol = factor**2 * model.prior_.covariance, 1e-12 * factor**2
    np.testing.assert_allclose(other.prior_.covariance, covariance, rtol=1e-4, atol=atol)
    rows = len(y) - 3
    expected = model.log_likelihood_ - rows * np.log(factor)
    assert other.log_likelihood_ == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("covariance_type", "random"),
    [("spherical", "all"), ("diag", [0]), ("low_rank", "all"), ("full", [0])],
)
def test_shift_of_the_target(covariance_type, random):
    """Targets around 1e8 with a noise of 1: what is known of them has to survive."""
    (X, y, codes, _), shift = table(), 1e8
    prior = GaussianPrior(covariance_type=covariance_type)
    model = PersonalizedLinearRegression(prior, random=random).fit(X, y, groups=codes)
    other = clone(model).fit(X, y + shift, groups=codes)
    tolerance = 1e-6 + 1e-14 * shift
    np.testing.assert_allclose(other.intercept_ - shift, model.intercept_, atol=10 * tolerance)
    np.testing.assert_allclose(other.coef_, model.coef_, atol=100 * tolerance)
    assert other.noise_variance_ == pytest.approx(model.noise_variance_, rel=1e-5)
    known = GaussianPrior(mean=0.0, covariance_type=covariance_type)
    if random == [0]:  # the intercept is fixed, and takes up the shift
        model = PersonalizedLinearRegression(known, random=random).fit(X, y, groups=codes)
        other = clone(model).fit(X, y + shift, groups=codes)
        assert other.noise_variance_ == pytest.approx(model.noise_variance_, rel=1e-5)


@pytest.mark.parametrize(
    ("covariance_type", "random", "shift"),
    [
        ("spherical", "intercept", 1e6),
        ("diag", ["intercept", 0], 1e9),
        ("low_rank", ["intercept", 0], 1e6),
        ("full", ["intercept", 0], 1e6),
        ("full", "intercept", 1e9),
    ],
)
def test_shift_of_fixed_features(covariance_type, random, shift):
    """A fixed feature far from zero (a time stamp) is not taken for another intercept."""
    X, y, codes, _ = table()
    prior = GaussianPrior(covariance_type=covariance_type)
    model = PersonalizedLinearRegression(prior, random=random, uncertainty="plug_in")
    model.fit(X, y, groups=codes)
    shifted = X + np.array([0.0, shift])
    other = clone(model).fit(shifted, y, groups=codes)
    np.testing.assert_allclose(other.coef_, model.coef_, atol=1e-5)
    mean, std = model.predict(X, groups=codes, return_std=True)
    np.testing.assert_allclose(other.predict(shifted, groups=codes), mean, atol=1e-5)
    if shift < 1e9:
        np.testing.assert_allclose(other.coef_std_, model.coef_std_, rtol=1e-4)
        stds = other.predict(shifted, groups=codes, return_std=True)[1]
        np.testing.assert_allclose(stds, std, rtol=1e-2)
    intercept = model.population_intercept_ - shift * model.population_coef_[1]
    assert other.population_intercept_ == pytest.approx(intercept, rel=1e-5)
    assert other.log_likelihood_ == pytest.approx(model.log_likelihood_, abs=1e-5)


# Extremes -----------------------------------------------------------------------------------------


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("covariance_type", "covariance"),
    [
        ("spherical", None),
        ("low_rank", None),
        ("full", None),
        ("full", 1.0),
        *slow([("diag", None)]),
    ],
)
def test_an_exact_fit(covariance_type, covariance):
    """Without noise the likelihood has no upper bound; the rows are met all the same."""
    X, _, codes, theta = table(12, sizes=6)
    y = theta[codes, 0] + np.einsum("nd,nd->n", X, theta[codes, 1:])
    prior = GaussianPrior(covariance=covariance, covariance_type=covariance_type)
    model = PersonalizedLinearRegression(prior, uncertainty="plug_in")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # it says so, or ends at a bound
        with pytest.warns(UserWarning, match=f"clients' coefficients fit all {len(X)} rows"):
            model.fit(X, y, groups=codes)
    assert 0 <= model.noise_variance_ < 1e-8
    np.testing.assert_allclose(columns_of(model), theta, atol=1e-3)
    mean, std = model.predict(X, groups=codes, return_std=True)
    np.testing.assert_allclose(mean, y, atol=1e-3)
    np.testing.assert_allclose(std, 0.0, atol=1e-3)
    if covariance is None and covariance_type in ("diag", "full"):
        np.testing.assert_allclose(population_of(model), theta.mean(axis=0), atol=1e-3)


@every_shape
def test_no_variance_between_clients_is_an_answer(covariance_type):
    """The boundary is reached exactly, and without a warning."""
    rng = np.random.default_rng(5)
    codes = np.repeat(np.arange(20), 5)
    X, noise = rng.normal(size=(100, 1)), rng.normal(size=(20, 5))
    noise = (noise - noise.mean(axis=1, keepdims=True)).ravel()
    model = PersonalizedLinearRegression(
        GaussianPrior(covariance_type=covariance_type), random="intercept"
    ).fit(X, 2 + 3 * X[:, 0] + noise, groups=codes)
    np.testing.assert_array_equal(model.prior_.covariance, 0.0)
    np.testing.assert_array_equal(model.intercept_, model.population_intercept_)
    np.testing.assert_array_equal(model.intercept_shrinkage_, 1.0)
    pooled = LinearRegression().fit(X, 2 + 3 * X[:, 0] + noise)
    np.testing.assert_allclose(model.population_coef_, pooled.coef_)


# Bad input ----------------------------------------------------------------------------------------

X, Y, CODES, _ = table(12, sizes=4)
FRAME = pd.DataFrame(X, columns=["age", "dose"])
SINGLES = np.arange(48)


def gaussian(**params):
    return {"prior": GaussianPrior(**params)}


ROWS = (X, Y, CODES)
FULL, THREE = gaussian(covariance_type="full"), gaussian(covariance=np.eye(3))
DIAG = gaussian(covariance_type="diag", centered=False)
NOT_SYMMETRIC = r"covariance.*GaussianPrior.*symmetric.*\[\[1\.0, 1\.0, 1\.0\]"
BAD = {
    "one row each": ({}, (X, Y, SINGLES), r"\b48 clients.*one row.*noise_variance.*covariance"),
    "constant column": (FULL, (FRAME.assign(one=3.0), Y, CODES), r"'one'.*random"),
    "column of zeros": ({**DIAG, "fit_intercept": False}, (X * [1, 0], Y, CODES), r"'x1'.*random"),
    "few clients": (FULL, (X, Y, CODES // 6), r"'full'.*\b2 clients\b.*\b3 coefficients.*'diag'"),
    "infinite y": ({}, (X, np.where(SINGLES == 5, -np.inf, Y), CODES), "y contains infinity"),
    "huge X": ({}, (1e200 * X, Y, CODES), r"\bX\b.*1e150"),
    "huge y": ({}, (X, 1e200 * Y, CODES), r"\by\b.*1e150"),
    "tiny column of X": ({}, (X * [1, 1e-160], Y, CODES), r"\bX\b.*too small.*1e-140"),
    "tiny y": ({}, (X, 1e-160 * Y, CODES), r"\by\b.*too small.*1e-140"),
    "two targets": ({}, (X, np.column_stack([Y, Y]), CODES), "y should be a 1d array"),
    "no column": ({"fit_intercept": False}, (X[:, :0], Y, CODES), "0 feature"),
    "unknown name": ({"random": ["dosis"]}, (FRAME, Y, CODES), r"random.*'dosis'.*'age', 'dose'"),
    "mixed column names": ({}, (FRAME.set_axis(["age", 1], axis=1), Y, CODES), r"\['age', 1\]"),
    "other prior": ({"prior": "beta"}, ROWS, r"prior='beta'.*PersonalizedLinearRegression"),
    "singular prior": (gaussian(covariance=-1.0), ROWS, r"covariance.*GaussianPrior.*-1\.0"),
    "not symmetric": (gaussian(covariance=np.triu(np.ones((3, 3)))), ROWS, NOT_SYMMETRIC),
    "partly infinite": (gaussian(covariance=[1.0, np.inf, 1.0]), ROWS, r"covariance.*\binf\b"),
    "short mean": (gaussian(mean=[1.0, 2.0]), ROWS, r"mean.*GaussianPrior.*\(3,\).*\[1\.0, 2\.0\]"),
    "long covariance": (
        {**THREE, "random": [0]},
        ROWS,
        r"covariance.*GaussianPrior.*\(1,\).*array",
    ),
    "spectral": ({**FULL, "solver": "spectral"}, ROWS, r"solver='spectral'.*'full'"),
    "printed": ({"method": "printed"}, ROWS, r"'printed'.*solver='auto'.*GaussianPrior.*reml/auto"),
    "no noise": ({"noise_variance": 0.0}, ROWS, "'noise_variance' parameter .* must be"),
    "low rank 0": (gaussian(covariance_type="low_rank", rank=0), ROWS, "'rank' param"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_explained_and_leaves_nothing_fitted(case):
    params, (X, y, groups), message = BAD[case]
    model = PersonalizedLinearRegression(**params)
    before = dict(vars(model))
    with pytest.raises((ValueError, TypeError), match=message):
        model.fit(X, y, groups=groups)
    assert vars(model) == before


def test_what_is_known_makes_single_rows_enough():
    noise = {"noise_variance": 0.5}
    for params in (noise, gaussian(covariance=0.5), gaussian(covariance_type="diag") | noise):
        model = PersonalizedLinearRegression(**params).fit(X, Y, groups=SINGLES)
        assert np.isfinite(model.log_likelihood_)


@pytest.mark.parametrize("covariance_type", ["spherical", "full"])
def test_a_search_that_is_cut_off_says_what_to_do(covariance_type):
    model = PersonalizedLinearRegression(
        GaussianPrior(covariance_type=covariance_type), max_iter=1, tol=1e-9
    )
    message = r"PersonalizedLinearRegression.*max_iter=1, tol=1e-09.*covariance_type"
    with pytest.warns(ConvergenceWarning, match=message):
        model.fit(*table()[:2], groups=table()[2])


def test_features_in_single_precision_are_read_as_they_are():
    """They are exact in double precision, which every block of rows is summed in."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(20), 15)
    X = rng.normal(size=(300, 3)).astype(np.float32)
    y = X @ [1.0, 2.0, 3.0] + rng.normal(size=20)[groups] + rng.normal(size=300)
    single = PersonalizedLinearRegression().fit(X, y, groups=groups)
    double = PersonalizedLinearRegression().fit(X.astype(float), y, groups=groups)
    np.testing.assert_array_equal(single.coef_, double.coef_)
    assert single.log_likelihood_ == double.log_likelihood_
    assert single.coef_.dtype == np.float64


def test_a_large_client_is_rotated_in_parts(monkeypatch):
    """Triangles of parts, one below the other, are rows of the whole."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(6), [400, 30, 3, 2, 1, 150])
    X, weights = rng.normal(size=(586, 2)) + 50.0, rng.uniform(0.2, 3, 586)
    X[groups == 0, 1] = 7.0  # constant within the largest client
    y = X @ [1.0, -1.0] + rng.normal(size=6)[groups] + rng.normal(size=586)
    model = PersonalizedLinearRegression()
    whole = model.fit(X, y, groups=groups, sample_weight=weights).coef_
    value = model.log_likelihood_
    monkeypatch.setattr(_reduction, "CACHED_CELLS", 64)
    parts = model.fit(X, y, groups=groups, sample_weight=weights).coef_
    np.testing.assert_allclose(parts, whole, rtol=1e-7)
    assert model.log_likelihood_ == pytest.approx(value, rel=1e-12)


def test_a_fit_cannot_set_the_parameters_of_its_estimator():
    model = PersonalizedLinearRegression(epsilon=2.0)
    options = model._fit_parameters()
    assert vars(options) == model.get_params(deep=False)
    with pytest.raises(AttributeError, match=r"epsilon.*3\.0"):
        options.epsilon = 3.0
    with pytest.raises(AttributeError, match="quadrature"):
        _ = options.quadrature  # of other regressions
    for same in (pickle.loads(pickle.dumps(options)), copy.deepcopy(options)):
        assert (vars(same), type(same)) == (vars(options), type(options))
    assert (options.replaced(epsilon=3.0).epsilon, options.epsilon) == (3.0, 2.0)
