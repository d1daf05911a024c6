"""Information criteria, intraclass correlation and R2 of the regressions."""

import warnings

import numpy as np
import pandas as pd
import pytest
import statsmodels.formula.api as smf
from sklearn.exceptions import NotFittedError

from pfl_sklearn import (
    PersonalizedLinearRegression,
    PersonalizedLogisticRegression,
    PersonalizedPoissonRegression,
)
from pfl_sklearn.linear_model._mixed._identifiability import row_moments
from pfl_sklearn.linear_model._mixed._table import RegressionTable
from pfl_sklearn.priors import DiscretePrior, GaussianMixturePrior, GaussianPrior, LaplacePrior
from tests.helpers.dense_mixed_model import rotated
from tests.helpers.oracles import read_oracle

NAMES = ("aic_", "bic_", "icc_", "marginal_r2_", "conditional_r2_")


def draw(m=30, n=8, seed=0):
    rng = np.random.default_rng(seed)
    codes = np.repeat(np.arange(m), n)
    X = pd.DataFrame(rng.normal([3.0, -1.0], size=(m * n, 2)), columns=["dose", "age"])
    theta = rng.normal(size=(m, 2)) * [1.0, 0.5]
    y = theta[codes, 0] + X["dose"].to_numpy() * (1 + theta[codes, 1]) + rng.normal(size=m * n)
    return X, y, codes


def linear(prior="gaussian", **params):
    X, y, codes = draw()
    return PersonalizedLinearRegression(prior, **params).fit(X, y, groups=codes)


def private(**params):
    X, y, codes = draw()
    return PersonalizedLinearRegression(
        GaussianPrior(covariance=0.5), noise_variance=1.0, epsilon=5.0, feature_bound=6.0,
        target_bound=10.0, **params,
    ).fit(X, y, groups=codes)  # fmt: skip


def test_criteria_are_those_of_statsmodels():
    """Population coefficients, three entries of the covariance, and the noise variance."""
    X, y, codes = draw()
    model = linear(GaussianPrior(covariance_type="full"), random=["intercept", 0], method="ml")
    frame = X.assign(y=y, client=codes)
    other = smf.mixedlm("y ~ dose + age", frame, groups="client", re_formula="~dose")
    other = other.fit(reml=False)
    assert model.aic_ == pytest.approx(other.aic, abs=1e-5)
    assert model.bic_ == pytest.approx(other.bic, abs=1e-5)


@pytest.mark.parametrize("method", ["reml", "ml"])
def test_criteria_of_a_random_intercept(method):
    """As lme4's: minus twice the (restricted) log-likelihood, and a penalty on three parameters."""
    oracle = read_oracle("random_intercept")
    y, codes = np.array(oracle["y"]), np.array(oracle["groups"])
    model = PersonalizedLinearRegression(random="intercept", method=method)
    model.fit(np.zeros((len(y), 1)), y, groups=codes)
    deviance = oracle[method]["minus2_log_likelihood"]
    assert model.aic_ == pytest.approx(deviance + 6, abs=1e-6)
    assert model.bic_ == pytest.approx(deviance + 3 * np.log(len(y)), abs=1e-6)


@pytest.mark.parametrize("model", [PersonalizedLogisticRegression, PersonalizedPoissonRegression])
def test_weights_of_classes_and_counts_are_repeated_rows(model):
    """For linear regression they are precisions, and a row stays one observation."""
    X, y, codes = draw()
    y = np.clip(np.round(np.abs(y)), 0, 1 if model is PersonalizedLogisticRegression else 5)
    weights = np.random.default_rng(0).integers(1, 5, len(y))
    weighted = model(random="intercept").fit(X, y, groups=codes, sample_weight=weights)
    repeated = np.repeat(np.arange(len(y)), weights)
    other = model(random="intercept")
    other.fit(X.iloc[repeated], y[repeated], groups=np.asarray(codes)[repeated])
    for name in ("aic_", "bic_"):
        assert getattr(weighted, name) == pytest.approx(getattr(other, name), abs=1e-6)
    linear = PersonalizedLinearRegression(random="intercept", method="ml")
    linear.fit(X, y, groups=codes, sample_weight=weights)
    gap = linear.bic_ - linear.aic_
    # Two features, the intercept, and the variances between clients and of the rows.
    assert gap == pytest.approx(5 * (np.log(len(y)) - 2), abs=1e-9)


@pytest.mark.parametrize(
    ("prior", "params", "expected"),
    [
        ("gaussian", {}, 3 + 3 + 1),
        ("gaussian", {"random": "intercept"}, 3 + 1 + 1),
        ("gaussian", {"random": "intercept", "noise_variance": 1.0}, 3 + 1),
        (GaussianPrior(covariance_type="spherical"), {}, 3 + 1 + 1),
        (GaussianPrior(covariance_type="low_rank"), {}, 3 + 4 + 1),
        (GaussianPrior(covariance_type="low_rank", rank=2), {}, 3 + 6 + 1),
        (GaussianPrior(covariance=1.0), {}, 3 + 1),
        (GaussianPrior(mean=0.0), {"random": "intercept"}, 2 + 1 + 1),
        (GaussianPrior(mean=0.0, covariance=1.0), {"noise_variance": 1.0}, 0),
        (GaussianMixturePrior(2), {}, 2 * 3 + 2 + 1 + 1),
        (DiscretePrior(3), {"random": "intercept"}, 3 + 2 + 2 + 1),
    ],
)
def test_estimated_parameters_count(prior, params, expected):
    model = linear(prior, **params)
    assert (model.aic_ + 2 * model.log_likelihood_) / 2 == pytest.approx(expected)


def test_what_is_not_identified_does_not_count():
    X, y, codes = draw()
    plain = PersonalizedLinearRegression().fit(X, y, groups=codes)
    more = X.assign(none=0.0, twice=2 * X["dose"], place=codes % 2)
    expected = plain._evidence.n_parameters
    for column, added in (("none", 0), ("twice", 1), ("place", 1)):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*'twice' is 2 'dose'")
            model = PersonalizedLinearRegression().fit(X.join(more[column]), y, groups=codes)
        assert model._evidence.n_parameters == expected + added  # "twice" has a variance
    assert model._evidence.form.varying.tolist() == [0, 1, 2]  # "place" is constant in clients


@pytest.mark.parametrize(("n_classes", "expected"), [(2, 3 + 1), (3, 2 * 3 + 1)])
def test_parameters_of_classes_count(n_classes, expected):
    X, y, codes = draw()
    labels = np.digitize(y, np.quantile(y, np.arange(1, n_classes) / n_classes))
    model = PersonalizedLogisticRegression(random="intercept").fit(X, labels, groups=codes)
    assert model.aic_ == pytest.approx(2 * expected - 2 * model.log_likelihood_)


def test_rows_of_weight_zero_do_not_count():
    X, y, codes = draw()
    weights = np.where(np.arange(len(y)) % 4 == 0, 0.0, 1.0)
    model = PersonalizedLinearRegression().fit(X, y, groups=codes, sample_weight=weights)
    some = weights > 0
    same = PersonalizedLinearRegression().fit(X[some], y[some], groups=codes[some])
    for name in NAMES:
        assert getattr(model, name) == pytest.approx(getattr(same, name), rel=1e-6)
    assert model._evidence.moments.n_rows == some.sum()


def test_moments_are_those_of_the_rows():
    rng = np.random.default_rng(0)
    columns, y = rng.normal([1e6, 0, 5], size=(70_000, 3)), rng.normal(size=70_000)
    weights = rng.uniform(0.1, 3, size=70_000)
    codes, names = rng.integers(0, 700, size=70_000), ["a", "b", "c"]
    table = RegressionTable(columns, y, codes, 700, weights, 2, None, names, True)
    for given in (weights, None):
        both = np.column_stack([columns[:, [1, 2, 0]], y])
        expected = np.cov(both.T, aweights=given, ddof=0)
        rotated_table = rotated(columns, y, codes, 700, 2, given)
        for read in (table._replace(weights=given), rotated_table):
            moments = row_moments(read, np.array([2, 0, 1]))
            np.testing.assert_allclose(moments.covariance, expected, rtol=1e-7, atol=1e-8)
            np.testing.assert_allclose(moments.means, np.average(both, axis=0, weights=given))


def test_intraclass_correlation():
    model = linear(random="intercept")
    between = model.prior_.covariance[0, 0]
    assert model.icc_ == pytest.approx(between / (between + model.noise_variance_))
    model = linear(GaussianPrior(covariance_type="full"), random=["intercept", "dose"])
    x = np.column_stack([np.ones(240), draw()[0]["dose"]])
    between = np.mean(np.einsum("nq,qr,nr->n", x, model.prior_.covariance, x))
    assert model.icc_ == pytest.approx(between / (between + model.noise_variance_))


def test_intraclass_correlation_of_log_odds():
    X, y, codes = draw()
    model = PersonalizedLogisticRegression(random="intercept").fit(X, y > 3, groups=codes)
    between = model.prior_.covariance[0, 0]
    assert model.icc_ == pytest.approx(between / (between + np.pi**2 / 3))
    assert 0 < model.marginal_r2_ < model.conditional_r2_ < 1
    several = PersonalizedLogisticRegression(random="intercept").fit(
        X, np.digitize(y, [2, 4]), groups=codes
    )
    for name in ("icc_", "marginal_r2_"):
        with pytest.raises(AttributeError, match=rf"{name} needs two classes.*got 3 classes"):
            getattr(several, name)
    with pytest.raises(AttributeError, match=r"icc_ needs two classes.*got 3 classes"):
        several.for_client(several.clients_[0]).icc_  # noqa: B018
    terms = several.summary().loc["fit"].index
    assert not [term for term in terms if "R2" in term]


@pytest.mark.parametrize("weighted", [False, True])
def test_explained_variance(weighted):
    X, y, codes = draw()
    weights = np.random.default_rng(1).uniform(0.5, 2, len(y)) if weighted else np.ones(len(y))
    model = PersonalizedLinearRegression(uncertainty="plug_in")
    model.fit(X, y, groups=codes, sample_weight=weights)
    x = np.column_stack([np.ones(len(y)), X])
    fixed = np.cov(X.to_numpy() @ model.population_coef_, aweights=weights, ddof=0)
    between = np.average(np.einsum("np,pq,nq->n", x, model.prior_.covariance, x), weights=weights)
    total = fixed + between + model.noise_variance_
    assert model.marginal_r2_ == pytest.approx(fixed / total)
    assert model.conditional_r2_ == pytest.approx((fixed + between) / total)
    table = model.summary()
    assert table.loc["fit", "estimate"].to_dict() == {
        "marginal R2": model.marginal_r2_,
        "conditional R2": model.conditional_r2_,
    }


def test_ordinary_regression_is_explained_as_usual():
    """Without a variance between clients the marginal R2 is that of least squares, nearly."""
    X, y, _ = draw()
    model = linear(GaussianPrior(covariance=0.0), method="ml")
    squares = np.var(X.to_numpy() @ model.population_coef_) / np.var(y)
    assert model.marginal_r2_ == pytest.approx(squares)
    assert model.conditional_r2_ == model.marginal_r2_
    assert model.icc_ == 0


def test_an_unknown_likelihood_leaves_criteria_unknown():
    model = linear(GaussianPrior(covariance=np.inf))
    for name in NAMES:
        assert np.isnan(getattr(model, name))
    assert "fit" not in model.summary().index.get_level_values("part")


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize(
    ("prior", "params"),
    [
        (LaplacePrior(), {}),
        (GaussianMixturePrior(2), {"method": "printed", "noise_variance": 1.0, "max_iter": 3}),
        (GaussianPrior(covariance=0.5), {"solver": "gd", "noise_variance": 1.0}),
    ],
)
def test_fits_without_likelihood_refuse(prior, params):
    model = linear(prior, **params)
    for name in ("aic_", "bic_"):
        with pytest.raises(AttributeError, match=rf"{name} needs a likelihood; a fit with pri"):
            getattr(model, name)


def test_models_without_all_clients_refuse():
    alone, protected = linear(random="intercept"), private()
    for model in (protected, protected.release(), linear(uncertainty="plug_in").for_client(3)):
        for name in NAMES:
            with pytest.raises(AttributeError, match=rf"{name} needs a fit of all clients without"):
                getattr(model, name)
        assert "fit" not in model.summary().index.get_level_values("part")
    assert alone.for_client(3).icc_ == alone.icc_  # which the population model says


def test_private_fits_keep_no_moments():
    """Neither the fit nor its release, even where the estimator was fitted openly before."""
    X, y, codes = draw()
    model = linear()
    assert hasattr(model, "_evidence")
    model.set_params(**private().get_params(deep=False)).fit(X, y, groups=codes)
    for selected in (model, model.release(), model.for_client(3)):
        assert not hasattr(selected, "_evidence")


def test_unfitted_models_say_so():
    for name in NAMES:
        with pytest.raises(NotFittedError):
            getattr(PersonalizedLinearRegression(), name)
        with pytest.raises(NotFittedError):
            getattr(PersonalizedLogisticRegression(), name)
