"""Fits of folds, which only have to predict, take less time than others."""

import numpy as np
import pandas as pd
import pytest
from sklearn.dummy import DummyClassifier
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from pfl_sklearn import GaussianMean, PersonalizedLinearRegression
from pfl_sklearn.compose import ClientAsFeature, PersonalizedStackingClassifier
from pfl_sklearn.compose._inner_estimators import InnerEstimator
from pfl_sklearn.compose._stack.choice import _for_folds
from pfl_sklearn.compose._stack.residual import ResidualRegressor
from pfl_sklearn.linear_model._mixed._groupings._variances import fit_of_fold
from pfl_sklearn.model_selection import ClientKFold
from pfl_sklearn.priors import GaussianPrior


class TakesUncertainty(Ridge):
    """Regressor of another package, whose parameters mean something else."""

    def __init__(self, alpha=1.0, uncertainty="full"):
        super().__init__(alpha)
        self.uncertainty = uncertainty


@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: make_pipeline(StandardScaler(), m)])
def test_personalized_models_search_less_far(wrap):
    full = InnerEstimator("line", wrap(PersonalizedLinearRegression()), None)
    params = _for_folds(full, 200).estimator.get_params()
    changed = {name for name, value in full.estimator.get_params().items() if value != params[name]}
    changed = {name.rpartition("__")[2] for name in changed} - {"steps", full.name}
    assert {"uncertainty", "tol"} <= changed
    assert _for_folds(full, 199) is full


def test_a_larger_tolerance_stays():
    line = PersonalizedLinearRegression(uncertainty="plug_in", tol=0.5)
    cheaper = _for_folds(InnerEstimator("line", line, None), 200).estimator
    assert (cheaper.tol, cheaper.uncertainty) == (0.5, "plug_in")


def test_lines_below_residuals_search_less_far_and_other_packages_do_not():
    residual = ResidualRegressor(PersonalizedLinearRegression(), TakesUncertainty())
    cheaper = _for_folds(InnerEstimator("residual", residual, None), 200).estimator
    assert (cheaper.estimator.uncertainty, cheaper.estimator.tol) == ("plug_in", 0.1)
    assert cheaper.residual_estimator.uncertainty == "full"


class Own(Ridge):
    """Regressor with a parameter whose name only ends like one of ours."""

    def __init__(self, alpha=1.0, model_uncertainty="full"):
        super().__init__(alpha)
        self.model_uncertainty = model_uncertainty


@pytest.mark.parametrize(
    "estimator", [GaussianMean(), Own(), ClientAsFeature(Own()), make_pipeline(GaussianMean())]
)
def test_models_without_a_tolerance_get_none(estimator):
    params = _for_folds(InnerEstimator("one", estimator, None), 200).estimator.get_params()
    assert not any(name.endswith("tol") for name in params)
    others = [value for name, value in params.items() if name.endswith("model_uncertainty")]
    assert set(others) <= {"full"}


def grouped_rows(n_rows=600, n_levels=40, seed=0):
    """Rows of clients and of schools that are crossed with them."""
    rng = np.random.default_rng(seed)
    groups, school = np.arange(n_rows) % 30, rng.permutation(np.arange(n_rows) % n_levels)
    X = pd.DataFrame({"x": rng.normal(size=n_rows), "school": [f"school {k}" for k in school]})
    intercepts, slopes = rng.normal(size=30), rng.normal(size=30)
    y = intercepts[groups] + slopes[groups] * X["x"] + rng.normal(size=n_levels)[school]
    return X, y + rng.normal(size=n_rows), groups


def test_a_fold_starts_where_another_ended():
    X, y, groups = grouped_rows()
    (first, _), (second, _) = list(ClientKFold(5, random_state=0).split(X, groups=groups))[:2]

    def fit(rows, start):
        with fit_of_fold(start) as found:
            model = PersonalizedLinearRegression(groupings=["school"], uncertainty="plug_in")
            return model.fit(X.iloc[rows], y.iloc[rows], groups=groups[rows]), found

    _, found = fit(first, {})
    cold, warm = fit(second, {})[0], fit(second, found)[0]
    assert warm.n_iter_ < cold.n_iter_
    np.testing.assert_allclose(warm.coef_, cold.coef_, rtol=1e-4, atol=1e-5)
    # What was found for other columns is no start.
    with fit_of_fold(found) as others:
        PersonalizedLinearRegression(groupings=["school"], random="intercept").fit(
            X.iloc[second], y.iloc[second], groups=groups[second]
        )
    assert others.keys().isdisjoint(found)


@pytest.mark.parametrize("shape", ["full", "diag"])
def test_starts_that_mislead_are_not_taken(shape):
    """A full root near 0 hardly grows, and that of an exact fit leaves the equations no digits."""
    X, y, groups = grouped_rows()
    model = PersonalizedLinearRegression(
        GaussianPrior(covariance_type=shape), groupings=["school"], uncertainty="plug_in"
    )
    with fit_of_fold({}) as found:
        cold = model.fit(X, y, groups=groups).predict(X, groups=groups)
    far = 1e-9 if shape == "full" else 5e6
    starts = {key: [far * np.eye(len(root)) for root in roots] for key, roots in found.items()}
    with fit_of_fold(starts):
        warm = model.fit(X, y, groups=groups).predict(X, groups=groups)
    np.testing.assert_allclose(warm, cold, atol=1e-4)


def test_many_levels_predict_the_same_by_conjugate_gradients():
    X, y, groups = grouped_rows(2200, 1100)
    model = PersonalizedLinearRegression(groupings=["school"], uncertainty="plug_in")
    exact = model.fit(X, y, groups=groups).predict(X, groups=groups)
    assert np.isfinite(model.log_likelihood_)
    with fit_of_fold({}):
        near = model.fit(X, y, groups=groups).predict(X, groups=groups)
    assert np.isnan(model.log_likelihood_)  # which conjugate gradients do not have
    np.testing.assert_allclose(near, exact, atol=0.05 * exact.std())


def classes_of(n_rows, slope_variance, seed=0):
    """Classes by the clients' own intercepts, and perhaps slopes."""
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(40), n_rows)
    X = pd.DataFrame(rng.normal(size=(len(groups), 2)), columns=["a", "b"])
    slopes = 1.0 + np.sqrt(slope_variance) * rng.normal(size=(40, 2))
    odds = rng.normal(size=40)[groups] + np.sum(X.to_numpy() * slopes[groups], axis=1)
    return X, (rng.random(len(groups)) < 1 / (1 + np.exp(-odds))).astype(int), groups


@pytest.mark.parametrize(
    ("n_rows", "slope_variance", "parts"),
    [
        (3, 9.0, {"random_intercept"}),  # too few rows to see slopes
        (40, 0.0, {"random_intercept"}),
        (40, 9.0, {"random_intercept", "final_estimator"}),
    ],
)
def test_slopes_of_classes_compete_where_they_predict(n_rows, slope_variance, parts):
    X, y, groups = classes_of(n_rows, slope_variance)
    base = [("prior", DummyClassifier(strategy="prior"))]
    model = PersonalizedStackingClassifier(base, cv=3, random_state=0).fit(X, y, groups=groups)
    assert {"random_intercept", "final_estimator"} & set(model.losses_.index) == parts
