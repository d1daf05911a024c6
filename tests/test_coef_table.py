"""Tables of coefficients: a join with them scores rows as the model does."""

import duckdb
import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from pfl_sklearn import (
    BernoulliMean,
    ClientColumn,
    CollaborativeMean,
    GaussianMean,
    PersonalizedLinearRegression,
    PersonalizedLogisticRegression,
    PersonalizedPoissonRegression,
    PoissonMean,
    PPSGDClassifier,
    PPSGDRegressor,
)
from pfl_sklearn.priors import LaplacePrior
from tests.helpers.slow import slow


def draw(n_classes=2):
    rng = np.random.default_rng(0)
    shops = np.array(["north", "east", "south", "west", "mall"])[rng.integers(0, 5, 200)]
    X = pd.DataFrame(rng.normal(size=(200, 2)), columns=["price", "size"])
    labels = rng.integers(0, n_classes, 200)
    return X, X["price"] + rng.normal(size=200), labels, shops


def score(table, X, shops):
    """Linear predictors of rows, by a join in a database."""
    rows = X.assign(shop=shops, row=range(len(X)))
    with duckdb.connect() as connection:
        connection.register("rows", rows)
        connection.register("coefficients", table)
        scored = connection.sql(
            "SELECT c.intercept + c.price * r.price + c.size * r.size AS predicted "
            "FROM rows r JOIN coefficients c ON shop = client ORDER BY row"
        )
        return scored.df()["predicted"].to_numpy()


@pytest.mark.parametrize(
    "model",
    [
        PersonalizedLinearRegression(random="intercept"),
        PersonalizedPoissonRegression(random="intercept"),
        PPSGDRegressor(n_rounds=5, random_state=0),
        PPSGDClassifier(n_rounds=5, random_state=0),
        *slow(
            [
                PersonalizedLinearRegression(),
                PersonalizedLinearRegression(prior=LaplacePrior()),
                PersonalizedLogisticRegression(random="intercept"),
            ]
        ),
    ],
    ids=lambda model: type(model).__name__,
)
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_a_join_scores_rows_as_the_model(model):
    X, y, labels, shops = draw()
    regression = isinstance(model, PersonalizedLinearRegression | PPSGDRegressor)
    model.fit(X, y if regression else labels, groups=shops)
    table = model.coef_table()
    names = ["intercept", "price", "size"]
    stds = [f"{name}_std" for name in names] if hasattr(model, "_posterior") else []
    assert list(table) == ["client", *names, *stds]
    assert table["client"].tolist() == model.clients_.tolist()
    code = np.searchsorted(model.clients_, shops)
    expected = model.intercept_[code] + np.sum(model.coef_[code] * X, axis=1)
    np.testing.assert_allclose(score(table, X, shops), expected, rtol=1e-12, atol=1e-12)
    if regression:
        np.testing.assert_allclose(model.predict(X, groups=shops), expected, rtol=1e-12, atol=1e-12)
    if stds:
        np.testing.assert_array_equal(table["intercept_std"], model.intercept_std_)
        np.testing.assert_array_equal(table[["price_std", "size_std"]], model.coef_std_)
    own = model.for_client("east").coef_table()
    assert own["client"].tolist() == ["east"]
    with pytest.raises(NotFittedError):
        clone(model).coef_table()


def test_names_of_the_table():
    X, y, _, shops = draw()
    model = PersonalizedLinearRegression(random=[0], fit_intercept=False).fit(
        X.to_numpy(), y, groups=shops
    )
    assert list(model.coef_table()) == ["client", "x0", "x1", "x0_std", "x1_std"]
    assert list(model.coef_table(["a", "b"]))[1:3] == ["a", "b"]
    for names, match in ((["a"], "2 features; got 1"), (["a", "client"], "called 'client'")):
        with pytest.raises(ValueError, match=match):
            model.coef_table(names)


@pytest.mark.parametrize("name", ["logistic", "ppsgd"])
def test_a_column_for_each_class_and_feature(name):
    X, _, labels, shops = draw(3)
    model = {
        "logistic": PersonalizedLogisticRegression(random="intercept"),
        "ppsgd": PPSGDClassifier(n_rounds=5, random_state=0),
    }[name].fit(X, labels, groups=shops)
    table = model.coef_table()
    for k in range(3):
        np.testing.assert_array_equal(table[f"{k}: price"], model.coef_[:, k, 0])
        np.testing.assert_array_equal(table[f"{k}: intercept"], model.intercept_[:, k])


def test_means_are_tables_too():
    X, y, labels, shops = draw()
    for model, target in (
        (GaussianMean(), y),
        (BernoulliMean(), labels),
        (PoissonMean(), labels),
        (CollaborativeMean(), y),
    ):
        table = model.fit(X, target, groups=shops).coef_table()
        assert list(table) == ["client", "mean", "mean_std"]
        np.testing.assert_array_equal(table["mean"], model.means_)
        np.testing.assert_array_equal(table["mean_std"], model.stds_)
    both = GaussianMean().fit(X, np.column_stack([y, 2 * y]), groups=shops)
    table = both.coef_table()
    assert list(table) == ["client", "mean_0", "mean_1", "mean_0_std", "mean_1_std"]
    np.testing.assert_array_equal(table[["mean_0", "mean_1"]], both.means_)


def test_a_client_column_hands_its_model_s_table_on():
    X, y, _, shops = draw()
    pipeline = make_pipeline(StandardScaler(), PersonalizedLinearRegression(random="intercept"))
    model = ClientColumn(pipeline, column="shop").fit(X.assign(shop=shops), y)
    names = ["client", "intercept", "price", "size"]
    assert list(model.coef_table())[:4] == names
    assert list(model.coef_table(feature_names=["a", "b"]))[1:4] == ["intercept", "a", "b"]
    for names in ("ab", 3):
        with pytest.raises(ValueError, match="feature_names must be a list of names; got"):
            model.coef_table(feature_names=names)
    mean = ClientColumn(GaussianMean(), column="shop").fit(X.assign(shop=shops), y)
    assert list(mean.coef_table()) == ["client", "mean", "mean_std"]
    assert not hasattr(ClientColumn(Ridge(), column="shop"), "coef_table")
