"""Which estimators wrap another: declared, not guessed from a parameter called `estimator`."""

import math
import warnings

import numpy as np
import pytest
import sklearn
from sklearn.base import BaseEstimator, MetaEstimatorMixin, clone
from sklearn.feature_selection import RFE
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

from pfl_sklearn import ClientColumn, GaussianMean, PrivacyWarning, privacy_of
from pfl_sklearn._unwrap import (
    core_estimator,
    inner_estimator,
    innermost_estimator,
    is_transparent,
    path_to_core,
)
from pfl_sklearn.metrics import ClientScorer, known_clients
from pfl_sklearn.model_selection import ClientKFold, PrivateSelectCV
from pfl_sklearn.privacy import gdp_epsilon, gdp_mu, search_cost

GROUPS = np.repeat(np.arange(40), 5)
Y = np.random.default_rng(0).normal(size=40)[GROUPS]
X = np.random.default_rng(1).normal(size=(200, 1))
TABLE = np.column_stack([GROUPS, X])
ROWS = {"groups": GROUPS}
FOLDS = {"cv": ClientKFold(2, random_state=0), "scoring": ClientScorer("r2")}
COLUMN_FOLDS = {"cv": ClientKFold(2, client_column=0, random_state=0), "scoring": "r2"}
CLIPS = [1.0, 2.0]


class FromRecipe(GaussianMean):
    """A client-aware estimator with a recipe, of which it keeps a fitted copy for itself."""

    def __init__(
        self, estimator=None, clip_norm=2.0, epsilon=1.0, delta=1e-5, ledger=None, random_state=None
    ):
        privacy = {"clip_norm": clip_norm, "epsilon": epsilon, "delta": delta, "ledger": ledger}
        super().__init__(noise_variance=1.0, random_state=random_state, **privacy)
        self.estimator = estimator

    def fit(self, X, y=None, *, groups=None):
        super().fit(X, y, groups=groups)
        self.estimator_ = clone(self.estimator).fit([[0.0]], [0.0])
        return self


FromRecipe.__module__ = "pfl_sklearn.neural_network"  # counts as a class of the package
MODEL = FromRecipe(LinearRegression())


def fitted(estimator):
    """On the table with client ids if there is a ClientColumn, else on the features."""
    column = any(name.split("__")[-1] == "column" for name in estimator.get_params())
    with sklearn.config_context(enable_metadata_routing=True), warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        return estimator.fit(TABLE, Y) if column else estimator.fit(X, Y, **ROWS)


AROUND = {
    "alone": clone(MODEL),
    "pipeline": make_pipeline(FunctionTransformer(), MODEL),
    "column": ClientColumn(MODEL, 0),
    "pipeline in a column": ClientColumn(make_pipeline(FunctionTransformer(), MODEL), 0),
    "column in a pipeline": make_pipeline(FunctionTransformer(), ClientColumn(MODEL, 0)),
}


@pytest.mark.parametrize("estimator", AROUND.values(), ids=AROUND)
def test_a_recipe_is_not_looked_into(estimator):
    model = fitted(clone(estimator))
    np.testing.assert_array_equal(known_clients(model), np.arange(40))
    assert privacy_of(model).epsilon == 1.0
    assert privacy_of(FrozenEstimator(model)).epsilon == 1.0
    assert type(innermost_estimator(model)) is FromRecipe
    assert (
        type(innermost_estimator(FrozenEstimator(ClientColumn(MODEL, 0)))) is not LinearRegression
    )
    assert type(core_estimator(estimator)) is FromRecipe
    prefix, _ = path_to_core(estimator)
    assert estimator.get_params().get(f"{prefix}epsilon") == 1.0


def search(how):
    """Two candidates on two folds, and a refit: five fits."""
    if how == "inside":
        return GridSearchCV(ClientColumn(MODEL, 0), {"estimator__clip_norm": CLIPS}, **COLUMN_FOLDS)
    grid = GridSearchCV(MODEL, {"clip_norm": CLIPS}, **FOLDS)
    return ClientColumn(grid, 0) if how == "around" else grid


@pytest.mark.parametrize("how", ["alone", "inside", "around"])
def test_searches_over_it_are_accounted_for(how):
    model = fitted(search(how))
    expected = gdp_epsilon(gdp_mu(1.0, 1e-5) * math.sqrt(5), 1e-5)
    cost = search_cost(model)
    assert (cost.n_fits, cost.epsilon) == (5, pytest.approx(expected, rel=1e-9))
    np.testing.assert_array_equal(known_clients(model), np.arange(40))
    report = privacy_of(model)
    assert report.epsilon == math.inf
    assert "cv_results_" in report.warnings[-1]


@pytest.mark.parametrize("column", [False, True])
def test_selections_set_its_epsilon(column):
    names = ["estimator__clip_norm", "estimator__epsilon"] if column else ["clip_norm", "epsilon"]
    select = PrivateSelectCV(
        ClientColumn(MODEL, 0) if column else MODEL,
        {names[0]: CLIPS},
        epsilon=2.0,
        holdout=(TABLE, Y) if column else (X, Y),
        client_column=0 if column else None,
    )
    with sklearn.config_context(enable_metadata_routing=True):
        select = select.fit(TABLE, Y) if column else select.fit(X, Y, **ROWS)
    assert 0 < select.trial_params_[names[1]] < 2.0
    assert privacy_of(select).epsilon == 2.0
    assert privacy_of(select.best_estimator_).epsilon == 2.0
    np.testing.assert_array_equal(known_clients(select), np.arange(40))


def test_what_wraps():
    """ClientColumn declares it, but a subclass may do more; scikit-learn's classes are known."""

    class Fits(ClientColumn):
        pass

    select = PrivateSelectCV(MODEL, {"clip_norm": CLIPS})
    transparent = [*list(AROUND.values())[1:], FrozenEstimator(MODEL)]
    assert all(map(is_transparent, transparent))
    opaque = [MODEL, select, Fits(MODEL, 0), GridSearchCV(MODEL, {}), RFE(LinearRegression())]
    assert not any(map(is_transparent, opaque))
    assert inner_estimator(fitted(Fits(MODEL, 0))).epsilon == 1.0
    assert inner_estimator(FrozenEstimator(fitted(clone(AROUND["column"])))).epsilon == 1.0
    assert inner_estimator(RFE(LinearRegression()).fit(TABLE, Y)).coef_.shape == (1,)
    assert inner_estimator(fitted(clone(MODEL))) is None


class OfSomebodyElse(MetaEstimatorMixin, BaseEstimator):
    """A wrapper that is neither ours nor scikit-learn's."""

    def __init__(self, estimator):
        self.estimator = estimator

    def fit(self, X, y, groups):
        self.estimator_ = clone(self.estimator).fit(X, y, groups=groups)
        return self


def test_clients_inside_a_wrapper_of_somebody_else():
    """They are found, but what the wrapper learns is unprotected."""
    model = OfSomebodyElse(GaussianMean()).fit(X, Y, GROUPS)
    np.testing.assert_array_equal(known_clients(model), np.arange(40))
    assert privacy_of(model).epsilon == math.inf
    assert not is_transparent(model)
