"""The row space of a design: errors of what the rows determine, none of what they leave open."""

import pickle
from functools import cache, partial

import numpy as np
import pandas as pd
import pytest
from sklearn.dummy import DummyRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder

from pfl_sklearn import (
    PersonalizedLinearRegression,
    PersonalizedLogisticRegression,
    PersonalizedPoissonRegression,
)
from pfl_sklearn.compose import ClientColumn, PersonalizedStackingRegressor, TableEncoder
from pfl_sklearn.inspection import CoefficientDisplay, ResidualsDisplay
from pfl_sklearn.linear_model import NotEstimableWarning
from pfl_sklearn.linear_model._mixed._table import RegressionTable
from pfl_sklearn.linear_model._row_space import find_row_space
from pfl_sklearn.priors import GaussianPrior
from pfl_sklearn.statistics import ClientStatistics
from tests.helpers.slow import slow

N_CLIENTS, N = 12, 96
CODES = np.repeat(np.arange(N_CLIENTS), 8)
RNG = np.random.default_rng(0)
X1, KIND = RNG.normal(size=N), RNG.integers(0, 3, N)
LATENT = 1 + X1 + RNG.normal(0, 0.7, N_CLIENTS)[CODES] + RNG.normal(size=N)
TARGETS = {
    "linear": LATENT,
    "two classes": LATENT > 1,
    "three classes": np.digitize(LATENT, [0.5, 1.5]),
    "counts": RNG.poisson(np.exp(0.5 * LATENT - 0.5)),
}
MODELS = {
    "linear": PersonalizedLinearRegression,
    "two classes": PersonalizedLogisticRegression,
    "three classes": PersonalizedLogisticRegression,
    "counts": PersonalizedPoissonRegression,
}
every = pytest.mark.parametrize("kind", ["linear", "three classes", "counts"])
open_fit = partial(
    pytest.warns, NotEstimableWarning, match="standard errors of the coefficients of"
)
outside = partial(pytest.warns, NotEstimableWarning, match="break what held in all rows of fit")


def fitted(kind, X, **params):
    params = {"random": "intercept", "unseen": "population", **params}
    return MODELS[kind](**params).fit(X, TARGETS[kind], groups=CODES)


def errors_of(model, X, groups):
    """Standard deviations, or bounds of class probabilities."""
    if hasattr(model, "predict_proba"):
        return np.hstack(model.predict_interval(X, groups=groups))
    return model.predict(X, groups=groups, return_std=True)[1]


def doubled(x):
    return pd.DataFrame({"dose": x, "twice": 2 * x})


UNDEFINED = doubled(np.array([100.0])).assign(twice=-50.0)


def indicators(kinds):
    """A column of numbers, and a full set of indicators."""
    return pd.DataFrame(np.column_stack([X1[: len(kinds)], np.eye(4)[kinds][:, :3]])).set_axis(
        ["x", "a", "b", "c"], axis=1
    )


@cache
def of_doubled(kind):
    with open_fit():
        return fitted(kind, doubled(X1))


@cache
def of_indicators(kind):
    with open_fit(match="'intercept', 'a', 'b', 'c' are NaN.* 'c' is 1 - 'a' - 'b'"):
        return fitted(kind, indicators(KIND))


@every
@pytest.mark.parametrize("uncertainty", ["plug_in", *slow(["full"])])
def test_rows_inside_have_the_errors_of_the_smaller_model(kind, uncertainty):
    """Known clients and new ones: what is estimable depends on no column that adds nothing."""
    small = fitted(kind, doubled(X1)[["dose"]], uncertainty=uncertainty, tol=1e-7)
    with open_fit() as caught:
        model = fitted(kind, doubled(X1), uncertainty=uncertainty, tol=1e-7)
    assert len(caught) == 1
    assert "'dose', 'twice' are NaN, because in all rows 'twice' is 2 'dose':" in str(
        caught[0].message
    )
    rows, groups = doubled(np.array([0.0, 1.0, -3.0, 2.0])), [0, 3, 5, 99]
    expected = errors_of(small, rows[["dose"]], groups)
    np.testing.assert_allclose(errors_of(model, rows, groups), expected, rtol=2e-5)


@pytest.mark.parametrize("kind", ["linear", "two classes", "counts"])
def test_groupings_leave_no_error_to_coefficients_that_the_rows_do_not_tell_apart(kind):
    level = np.resize(["a", "b", "c", "d", "e"], len(X1))
    with open_fit(match="'dose', 'twice' are NaN, because in all rows 'twice' is 2 'dose':"):
        model = fitted(kind, doubled(X1).assign(level=level), groupings=["level"])
    errors = model.summary().loc["fixed", "std_error"]
    assert errors[["dose", "twice"]].isna().all() and errors["intercept"] > 0
    small = fitted(kind, pd.DataFrame({"dose": X1, "level": level}), groupings=["level"])
    rows, groups = doubled(np.array([0.0, 1.0, -3.0, 2.0])).assign(level="b"), [0, 3, 5, 99]
    expected = errors_of(small, rows.drop(columns="twice"), groups)
    np.testing.assert_allclose(errors_of(model, rows, groups), expected, rtol=1e-4)
    with outside():
        assert np.isnan(errors_of(model, rows.assign(twice=50.0), groups)).all()


@pytest.mark.parametrize("kind", ["linear", "two classes"])
def test_a_relation_up_to_single_precision_leaves_no_errors_beside_groupings(kind):
    """Errors of the slope that was kept were a fifteenth of the distance to the truth."""
    x = np.float32(np.random.default_rng(0).normal(size=len(X1)))
    X = pd.DataFrame(
        {"x": x, "t": 2 * x + np.float32(3000), "level": np.resize(list("abcde"), len(x))}
    )
    with open_fit(match="'intercept', 'x', 't' are NaN, because .* 't' is 3e\\+03 \\+ 2 'x' up to"):
        model = fitted(kind, X, groupings=["level"])
    assert model.summary().loc["fixed", "std_error"].isna().all()
    with outside():
        assert np.isnan(errors_of(model, X[:1].assign(t=3050.0), [0])).all()


def test_a_column_of_zeros_takes_no_error_from_others_beside_groupings():
    rng = np.random.default_rng(1)
    X = pd.DataFrame({"x": X1, "t": 2 * X1 + 2e-5 * rng.normal(size=len(X1)), "zero": 0.0})
    X["level"] = np.resize(list("abcde"), len(X1))
    model = fitted("linear", X, groupings=["level"])
    errors = model.summary().loc["fixed", "std_error"]
    assert np.isnan(errors["zero"]) and (errors[["intercept", "x", "t"]] > 0).all()


@every
@pytest.mark.parametrize("group", [0, 99])
def test_rows_outside_have_a_prediction_and_no_error(kind, group):
    model = of_doubled(kind)
    rows = pd.DataFrame([[100.0, -50.0], [1.0, 2.0], [1.0, 2.01]], columns=["dose", "twice"])
    groups = [group] * 3
    with outside() as caught:
        errors = errors_of(model, rows, groups)
    assert len(caught) == 1
    assert str(caught[0].message).startswith("2 of 3 rows ")
    assert "('twice' is 2 'dose')" in str(caught[0].message)
    assert np.isnan(errors).reshape(3, -1).all(axis=1).tolist() == [True, False, True]
    assert np.isfinite(errors[1]).all()
    with outside():
        assert np.isfinite(model.predict(rows, groups=groups).astype(float)).all()
    if hasattr(model, "predict_proba"):
        with outside():
            assert np.isfinite(model.predict_proba(rows, groups=groups)).all()
    else:
        with outside():
            bounds = model.predict_interval(rows, groups=groups, new_row=True)
        assert np.isnan(bounds).tolist() == [[True, False, True]] * 2


@every
def test_coefficients_that_are_not_estimable_have_no_errors_anywhere(kind):
    model = of_indicators(kind)
    slopes = [False, True, True, True]  # of x, a, b and c
    shape = model.population_coef_.shape
    np.testing.assert_array_equal(
        np.isnan(model.population_coef_std_), np.broadcast_to(slopes, shape)
    )
    assert np.isnan(model.population_intercept_std_).all()
    np.testing.assert_array_equal(
        np.isnan(model.coef_std_), np.broadcast_to(slopes, model.coef_.shape)
    )
    assert np.isnan(model.intercept_std_).all()
    every_one = np.broadcast_to([True, *slopes], (*shape[:-1], 5)).ravel()
    for bound in model.credible_interval():
        np.testing.assert_array_equal(np.isnan(bound[0]).ravel(), every_one)
    np.testing.assert_array_equal(np.isnan(np.diag(model.population_covariance_)), every_one)
    assert np.isnan(model.summary().loc["fixed", "std_error"]).tolist() == every_one.tolist()
    assert np.isnan(model.conf_int().loc["fixed", "upper"]).tolist() == every_one.tolist()
    table = model.coef_table()
    stds = table[[name for name in table.columns if name.endswith("_std")]]
    assert np.isnan(stds.iloc[0]).tolist() == every_one.tolist()


@every
def test_known_levels_of_a_full_set_have_errors_and_unknown_ones_do_not(kind):
    model, groups = of_indicators(kind), [0, 5, 11, 99]
    assert np.isfinite(errors_of(model, indicators(np.array([0, 1, 2, 2])), groups)).all()
    if kind == "linear":  # they are those of the smaller model
        more = {"tol": 1e-7, "uncertainty": "plug_in"}
        with open_fit():
            whole = fitted(kind, indicators(KIND), **more)
        small = fitted(kind, indicators(KIND)[["x", "a", "b"]], **more)
        rows = indicators(np.array([0, 1, 2, 2]))
        expected = errors_of(small, rows[["x", "a", "b"]], groups)
        np.testing.assert_allclose(errors_of(whole, rows, groups), expected, rtol=2e-5)
    with outside(match=r"1 of 4 rows .*\('c' is 1 - 'a' - 'b'\)"):
        errors = errors_of(model, indicators(np.array([0, 3, 1, 2])), groups)
    assert np.isnan(errors).reshape(4, -1).any(axis=1).tolist() == [False, True, False, False]


def test_an_encoder_that_ignores_unknown_levels_is_told_of_at_predict():
    table = pd.DataFrame({"kind": np.array(["up", "down", "left"])[KIND], "ward": CODES})
    encoder = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    model = ClientColumn(
        make_pipeline(encoder, PersonalizedLinearRegression(random="intercept")), "ward"
    )
    with open_fit() as caught:
        model.fit(table, LATENT)
    assert len(caught) == 1
    assert "OneHotEncoder(drop='first') or TableEncoder" in str(caught[0].message)
    model.predict(table)  # warnings are errors
    for advised in (OneHotEncoder(drop="first", sparse_output=False), TableEncoder()):
        line = PersonalizedLinearRegression(random="intercept")
        ClientColumn(make_pipeline(advised, line), "ward").fit(table, LATENT)
    with outside(match="^3 of 96 rows") as caught:
        model.predict(table.assign(kind=["right"] * 3 + table["kind"].tolist()[3:]))
    assert len(caught) == 1


@every
def test_a_column_of_zeros_is_worth_a_warning_where_it_is_not_zero(kind):
    """A model without features has one, and so has a fold without a rare level."""
    X = doubled(X1).assign(twice=0.0)
    model = fitted(kind, X, uncertainty="plug_in")  # warnings are errors
    assert np.isnan(model.population_coef_std_[..., 1]).all()
    assert np.isfinite(model.population_intercept_std_).all()
    assert np.isfinite(errors_of(model, X, CODES)).all()
    with outside(match=r"1 of 2 rows .*\('twice' is 0\)"):
        errors = errors_of(model, X[:2].assign(twice=[0.0, 1e-9]), CODES[:2])
    assert np.isnan(errors).reshape(2, -1).all(axis=1).tolist() == [False, True]


def random_design(seed):
    """Columns of unlike units and origins, of which some are combinations of others; rows to try.

    The first row is inside, by how it is made; the second is not.
    """
    rng = np.random.default_rng(seed)
    p, extra = int(rng.integers(1, 5)), int(rng.integers(1, 4))
    mixing = rng.integers(-2, 3, size=(p + 1, extra)).astype(float)

    def rows(n):
        free = rng.normal(size=(n, p))
        return np.hstack([free, np.column_stack([np.ones(n), free]) @ mixing])

    X, tried = rows(60), rows(2) * [[3.0], [1.0]]
    tried[0] = rows(1)[0]
    tried[1, p + int(rng.integers(extra))] += 0.1
    scale = 10.0 ** rng.uniform(-6, 6, size=p + extra)
    shift = scale * rng.choice([0.0, 10.0, 1e5], size=p + extra)
    return X * scale + shift, tried * scale + shift


@pytest.mark.parametrize("seed", range(6))
def test_what_is_estimable_depends_on_no_unit_and_no_origin(seed):
    X, tried = random_design(seed)
    codes = np.repeat(np.arange(6), 10)
    columns = np.column_stack([np.ones(60), X])
    p, names = columns.shape[1], [f"x{k}" for k in range(columns.shape[1])]
    table = RegressionTable(columns, np.zeros(60), codes, 6, None, p, 0, names, True)
    space = find_row_space(table, np.arange(p), 0)
    assert not space.violated(columns).any()
    violated = space.violated(np.column_stack([np.ones(2), tried])).any(axis=1)
    assert violated.tolist() == [False, True]


@pytest.mark.parametrize("distance", [1e-9, 1e-6])
def test_rows_of_a_fit_keep_to_what_nearly_holds(distance):
    rng = np.random.default_rng(1)
    X = pd.DataFrame(rng.normal(size=(N, 2)), columns=["age", "weight"])
    X["index"] = X["age"] - X["weight"] + distance * rng.standard_t(5, size=N)
    with open_fit(match=r"'index' is 'age' - 'weight' up to a relative \de-"):
        model = fitted("linear", X, uncertainty="plug_in")
    assert np.isfinite(model.predict(X, groups=CODES, return_std=True)[1]).all()
    with outside():
        model.predict(X.assign(index=X["index"] + 1e-3), groups=CODES)


def test_many_columns_are_not_all_listed():
    X = np.eye(20)[RNG.permutation(np.arange(N) % 20)]
    with open_fit(match="'x19' is a combination of 'x0', .* and 13 more:"):
        fitted("linear", X)


def test_statistics_of_rows_say_the_same():
    X = indicators(KIND)
    statistics = ClientStatistics.from_rows(X, LATENT, groups=CODES)
    model = PersonalizedLinearRegression(random="intercept", uncertainty="plug_in")
    with open_fit() as of_rows:
        by_rows = fitted("linear", X, uncertainty="plug_in")
    with open_fit() as of_statistics:
        model.fit_statistics(statistics)
    assert str(of_rows[0].message) == str(of_statistics[0].message)
    rows, groups = indicators(np.array([0, 3, 1])), [0, 1, 2]
    with outside():
        np.testing.assert_allclose(
            errors_of(model, rows, groups), errors_of(by_rows, rows, groups), rtol=1e-8
        )


@every
def test_one_clients_model_and_a_copy_know_the_row_space(kind):
    model = of_indicators(kind)
    rows = indicators(np.array([0, 3]))
    with outside():
        expected = errors_of(model, rows, [4, 4])
    with outside():
        np.testing.assert_array_equal(errors_of(model.for_client(4), rows, None), expected)
    with outside():
        np.testing.assert_array_equal(
            errors_of(pickle.loads(pickle.dumps(model)), rows, [4, 4]), expected
        )
    again = pickle.loads(pickle.dumps(model))
    plain = again.fit(X1[:, None], TARGETS[kind], groups=CODES)
    assert plain._row_space is None  # nothing stays of the earlier fit


@pytest.mark.filterwarnings("ignore::pfl_sklearn.privacy.PrivacyWarning")
def test_private_models_keep_nothing_of_the_row_space():
    """Relations between columns are exact facts of the rows."""
    linear = PersonalizedLinearRegression(
        random="intercept", epsilon=5.0, feature_bound=3.0, target_bound=5.0, random_state=0
    )
    counts = PersonalizedPoissonRegression(
        epsilon=5.0,
        feature_bound=3.0,
        max_rows_per_client=8,
        rate_range=(0.1, 10.0),
        random_state=0,
    )
    for model, y in ((linear, LATENT), (counts, TARGETS["counts"])):
        model.fit(doubled(X1), y, groups=CODES)
        assert model._row_space is None
        assert model.release()._row_space is None
        assert np.isfinite(errors_of(model, UNDEFINED, [0])).all()


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        (
            "linear",
            {"prior": GaussianPrior(mean=0.0), "random": "all", "uncertainty": "plug_in"},
        ),
        ("two classes", {"population_penalty": 1.0}),
        ("counts", {"prior": GaussianPrior(mean=0.0, covariance=0.5), "random": "all"}),
    ],
)
def test_a_known_mean_or_a_penalty_leaves_nothing_open(kind, params):
    model = fitted(kind, doubled(X1), **params)  # warnings are errors
    assert np.isfinite(errors_of(model, UNDEFINED, [0])).all()


@pytest.mark.parametrize("prior", ["gaussian_mixture", "discrete"])
def test_mixtures_have_the_same_rule(prior):
    with open_fit():
        model = fitted("linear", indicators(KIND), prior=prior)
    with outside():
        errors = errors_of(model, indicators(np.array([0, 3])), [0, 0])
    assert np.isnan(errors).tolist() == [False, True]
    assert np.isnan(model.coef_std_).all(axis=0).tolist() == [False, True, True, True]


def test_displays_draw_what_has_no_errors():
    model = of_indicators("linear")
    for kind in ("rows", "points"):
        # The level is that at the means of the features, which is estimable.
        display = CoefficientDisplay.from_estimator(model, feature=["a", "level"], kind=kind)
        slope, level = (panel.coefficients for panel in display.panels)
        assert np.isnan([*slope.lower, slope.population_lower]).all()
        assert np.isfinite([*level.lower, level.population_lower]).all()


def test_residuals_of_rows_outside_are_not_standardized():
    model = of_indicators("linear")
    rows = indicators(np.array([0, 3, 1]))
    with outside():
        display = ResidualsDisplay.from_estimator(
            model, rows, LATENT[:3], groups=[0, 1, 2], held_out=True
        )
    assert np.isnan(display.standardized).tolist() == [False, True, False]


def test_a_level_at_the_means_of_other_rows_may_have_no_error():
    """The second model saw two kinds alone, and the level is at the means of three."""
    model = of_indicators("linear")
    with open_fit():
        local = fitted("linear", indicators(np.minimum(KIND, 1)))
    panel = CoefficientDisplay.from_estimator(model, local=local).panels[0]
    assert np.isfinite(panel.coefficients.lower).all()
    assert np.isnan(panel.local.lower).all()


def test_a_stack_is_told_of_rows_alone():
    """An encoder marks missing values of two columns by the same indicator."""
    rng = np.random.default_rng(2)
    X = pd.DataFrame(rng.normal(size=(N, 2)), columns=["age", "weight"])
    X[::5] = np.nan
    stack = PersonalizedStackingRegressor(
        [("average", DummyRegressor())], passthrough=TableEncoder(), cv=3, fallback=False
    )
    stack.fit(X, LATENT, groups=CODES)  # warnings are errors
    stack.predict(X, groups=CODES)
    half_missing = X[:4].assign(age=[np.nan, 1.0, 1.0, 1.0], weight=[np.nan, np.nan, 1.0, 1.0])
    with outside(match=r"^1 of 4 rows .*\('weight_missing' is 'age_missing'\)"):
        stack.predict(half_missing, groups=CODES[:4])
