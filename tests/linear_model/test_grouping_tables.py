"""Tables, intervals, criteria and residuals of a linear model with several groupings."""

import duckdb
import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose
from scipy.optimize import brentq, minimize

from pfl_sklearn import (
    ClientColumn,
    PersonalizedLinearRegression,
    PersonalizedLogisticRegression,
    PPSGDRegressor,
)
from pfl_sklearn.inspection import (
    CoefficientDisplay,
    ResidualsDisplay,
    ShrinkageDisplay,
    likelihood_ratio_test,
)
from pfl_sklearn.inspection._residual_values import residuals_of
from pfl_sklearn.linear_model._mixed._groupings import _scaled_rows, _variance_bounds
from pfl_sklearn.priors import GaussianPrior, GroupingPrior

SLOPES = GroupingPrior(["intercept", "age"], "full", centered=False)


@pytest.fixture(scope="module")
def table():
    """Ratings of films by users from states."""
    rng = np.random.default_rng(3)
    user, film = np.repeat(np.arange(16), 9), np.tile(np.arange(8), 18)
    age = rng.normal(1, 1, 144)
    X = pd.DataFrame(
        {"film": np.array(list("abcdefgh"))[film], "age": age, "state": user % 4 * 1.0}
    )
    effects = rng.normal(0, 1.0, 16)[user] + rng.normal(0, 0.7, 8)[film]
    slopes = rng.normal(0, 0.6, 8)[film]
    y = 2 + (1 + slopes) * age + effects + rng.normal(size=4)[user % 4] + rng.normal(size=144)
    return X, y, user


def fit(table, groupings, columns=("film", "age", "state"), **parameters):
    X, y, user = table
    parameters = {"random": "intercept", **parameters}
    model = PersonalizedLinearRegression(groupings=groupings, **parameters)
    return model.fit(X[list(columns)], y, groups=user)


@pytest.fixture(scope="module")
def crossed(table):
    return fit(table, ["film", "state"], uncertainty="plug_in")


@pytest.fixture(scope="module")
def sloped(table):
    return fit(table, {"film": SLOPES}, ("film", "age"), uncertainty="plug_in")


def designs(table, names):
    """Columns (n, levels) of the effects of users and of other groupings."""
    X, _, user = table
    codes = [user, *(pd.factorize(X[name])[0] for name in names)]
    return [np.eye(code.max() + 1)[code] for code in codes]


def projection(table, squares, variances):
    """Minus twice the restricted log-likelihood, without constants, and its matrix P (n, n)."""
    X, y, _ = table
    V = sum(v * square for v, square in zip(variances, squares, strict=True))
    A, inverse = np.column_stack([np.ones(len(X)), X["age"]]), np.linalg.inv(V)
    information = A.T @ inverse @ A
    P = inverse - inverse @ A @ np.linalg.solve(information, A.T @ inverse)
    volumes = np.linalg.slogdet(V)[1] + np.linalg.slogdet(information)[1]
    return volumes + y @ P @ y, P


def test_summary_has_a_part_for_every_grouping(crossed, sloped):
    summary = crossed.summary()
    for part, name, n_levels in (("between film", "film", 8), ("between state", "state", 4)):
        row = summary.loc[(part, "intercept")]
        assert row["estimate"] == crossed.groupings_[name].covariance[0, 0]
        assert_allclose(row["sd"] ** 2, row["estimate"])
        assert row["n_levels"] == n_levels
    assert summary.loc[("between", "intercept"), "n_levels"] == 16
    assert summary["n_levels"].isna().sum() == len(summary) - 4  # a row is at the features' means
    part = sloped.summary().loc["between film"]
    assert part.index.tolist() == ["intercept", "age", "intercept, age"]
    covariance = sloped.groupings_["film"].covariance
    assert_allclose(part["estimate"], covariance[[0, 1, 0], [0, 1, 1]])


def test_a_row_at_the_means_where_the_slopes_are_independent(table):
    prior = GroupingPrior(["intercept", "age"])
    model = fit(table, {"film": prior}, ("film", "age"), uncertainty="plug_in")
    mean, covariance = table[0]["age"].mean(), model.groupings_["film"].covariance
    row = np.array([1.0, mean])
    summary = model.summary().loc["between film"]
    assert_allclose(summary.iloc[-1]["estimate"], row @ covariance @ row)
    assert "means" in summary.index[-1]
    assert "n_levels" not in fit(table, None, ["age"]).summary()


@pytest.mark.slow
def test_names_of_the_coefficients(table, crossed):
    X, y, user = table
    assert crossed.coef_names_.tolist() == ["age"]
    unnamed = PersonalizedLinearRegression(groupings=[1]).fit(
        X[["age", "state"]].to_numpy(), y, groups=user
    )
    assert unnamed.coef_names_.tolist() == ["x0"]
    assert unnamed.summary().loc["between column 1"].index.tolist() == ["intercept"]
    for model, target in (
        (PersonalizedLinearRegression(), y),
        (PersonalizedLogisticRegression(random="intercept"), y > 3),
        (PPSGDRegressor(n_rounds=2, random_state=0), y),
    ):
        model.fit(X[["age", "state"]], target, groups=user)
        assert model.coef_names_.tolist() == model.feature_names_in_.tolist()


@pytest.mark.slow
def test_a_client_column_names_features_and_groupings(table, crossed):
    X, y, user = table
    parameters = {"random": "intercept", "uncertainty": "plug_in"}
    inner = PersonalizedLinearRegression(groupings=["film"], **parameters)
    model = ClientColumn(inner, "u").fit(X.drop(columns="state").assign(u=user), y)
    assert "age" in model.summary().loc["fixed"].index
    assert "between film" in model.conf_int().index.get_level_values("part")
    assert list(model.coef_table())[:3] == ["client", "intercept", "age"]
    for names in (["a"], ["f", "a", "s"]):  # with and without those of the groupings
        assert crossed.summary(feature_names=names).loc["fixed"].index.tolist() == [
            "intercept",
            "a",
        ]
        assert list(crossed.coef_table(names))[2] == "a"
        assert set(crossed.effects(feature_names=names)["term"]) == {"intercept"}
    with pytest.raises(ValueError, match="must name 1 features; got 2"):
        crossed.summary(feature_names=["a", "b"])


@pytest.mark.slow
def test_intervals_of_variances_are_those_of_profile_likelihood(table):
    model = fit(table, ["film"], ("film", "age"))
    squares = [np.eye(144), *(z @ z.T for z in designs(table, ["film"]))]
    names = ["within", "between", "between film"]
    estimates = model.summary()["estimate"]
    start = [model.noise_variance_, *(estimates[name, "intercept"] for name in names[1:])]
    best = projection(table, squares, start)[0]
    intervals = model.conf_int().groupby("part").last()

    def excess(log_variance, k):
        def value(others):
            variances = np.exp(np.insert(others, k, log_variance))
            value, P = projection(table, squares, variances)
            Py = P @ table[1]
            slopes = [np.sum(P * square) - Py @ square @ Py for square in squares]
            return value, np.delete(variances * slopes, k)

        return minimize(value, others, jac=True).fun - best - 1.959964**2

    for k, name in enumerate(names):
        others = np.log(np.delete(start, k))
        expected = [
            np.exp(brentq(excess, np.log(start[k]), np.log(start[k]) + s, (k,), xtol=1e-3))
            for s in (-2.5, 2.5)
        ]
        assert_allclose(intervals.loc[name], expected, rtol=0.003)


def test_a_variance_that_may_be_0_has_the_lower_bound_0(table):
    X, y, user = table
    X = X.assign(nothing=np.array(list("abcde"))[np.random.default_rng(0).integers(0, 5, 144)])
    model = fit((X, y, user), ["nothing"], ("age", "nothing"), uncertainty="plug_in")
    assert model.groupings_["nothing"].covariance[0, 0] == 0
    lower, upper = model.conf_int().loc[("between nothing", "intercept")]
    assert lower == 0
    # At the upper bound a likelihood ratio test is at its critical value.
    known = {"nothing": GroupingPrior(covariance=upper)}
    at_bound = fit((X, y, user), known, ("age", "nothing"), uncertainty="plug_in")
    statistic = 2 * (model.log_likelihood_ - at_bound.log_likelihood_)
    assert_allclose(statistic, 1.959964**2, rtol=0.02)
    assert "between nothing" not in at_bound.conf_int().index.get_level_values("part")


@pytest.mark.slow
def test_other_intervals_rest_on_average_information(table, sloped, monkeypatch):
    user, film = designs(table, ["film"])
    slopes = film * table[0]["age"].to_numpy()[:, None]
    pairs = [np.eye(144), user @ user.T, film @ film.T, film @ slopes.T + slopes @ film.T]
    pairs.append(slopes @ slopes.T)
    (between,), covariance = sloped.prior_.covariance.ravel(), sloped.groupings_["film"].covariance
    values = [sloped.noise_variance_, between, *covariance[[0, 0, 1], [0, 1, 1]]]
    P = projection(table, pairs, values)[1]
    moved = np.column_stack([pair @ P @ table[1] for pair in pairs])
    errors = np.sqrt(np.diag(np.linalg.inv(moved.T @ P @ moved / 2)))
    rows = sloped.conf_int().loc["between film"]
    half = np.diff(rows.loc["intercept, age"])[0] / 2
    assert_allclose(half, 1.959964 * errors[3], rtol=1e-5)
    for term, k in (("intercept", 2), ("age", 4)):
        factor = np.exp(1.959964 * errors[k] / values[k])
        assert_allclose(rows.loc[term], [values[k] / factor, values[k] * factor], rtol=1e-5)
    # Those of a likelihood with that many degrees of freedom.
    noise = sloped.conf_int().loc[("within", "residual")] / values[0]
    assert_allclose(np.log(noise) + 1 / noise - 1, 1.959964**2 * (errors[0] / values[0]) ** 2 / 2)
    # Large equations have no profiles.
    monkeypatch.setattr(_variance_bounds, "_MOST_PROFILED", 0)
    large = fit(table, {"film": SLOPES}, ("film", "age")).conf_int()
    factor = np.exp(1.959964 * errors[1] / values[1])
    assert_allclose(large.loc[("between", "intercept")], [between / factor, between * factor])


def test_iterative_fits_have_intervals_and_no_criteria(table, crossed, monkeypatch):
    monkeypatch.setattr(_scaled_rows, "MOST_DENSE", 0)
    model = fit(table, ["film", "state"])
    assert np.isnan([model.log_likelihood_, model.aic_, model.bic_]).all()
    assert_allclose(model.summary()["estimate"], crossed.summary()["estimate"], rtol=1e-2)
    bounds = model.conf_int().loc[("between film", "intercept")]
    estimate = model.groupings_["film"].covariance[0, 0]
    assert_allclose(bounds["lower"] * bounds["upper"], estimate**2)  # on the logarithmic scale
    with pytest.raises(ValueError, match=r"larger is NaN.*more effects"):
        likelihood_ratio_test(fit(table, None, ["age"]), model)


@pytest.mark.parametrize(
    ("smaller", "larger", "degrees", "weights"),
    [
        (None, ["film"], (0, 1), (0.5, 0.5)),
        (None, ["film", "state"], (0, 1, 2), (0.25, 0.5, 0.25)),
        (["state"], ["film", "state"], (0, 1), (0.5, 0.5)),
        (["film"], {"film": SLOPES}, (1, 2), (0.5, 0.5)),
        ({"film": GroupingPrior(covariance=0.0)}, ["film"], (0, 1), (0.5, 0.5)),
    ],
)
def test_a_grouping_is_tested_on_the_boundary(table, smaller, larger, degrees, weights):
    one, two = (
        fit(table, groupings, ["age", *(groupings or ())]) for groupings in (smaller, larger)
    )
    test = likelihood_ratio_test(one, two)
    assert (test.degrees_of_freedom, test.weights) == (degrees, weights)
    assert_allclose(test.statistic, 2 * (two.log_likelihood_ - one.log_likelihood_))
    assert test.n_parameters[1] - test.n_parameters[0] == degrees[-1]
    assert_allclose(two.aic_, 2 * (test.n_parameters[1] - two.log_likelihood_))
    with pytest.raises(ValueError, match=r"more parameters|lacks|special case"):
        likelihood_ratio_test(two, one)


def test_models_of_other_levels_do_not_compare(table, crossed):
    X, y, user = table
    renamed = fit((X.assign(film=X["film"].replace("a", "z")), y, user), ["film"], ("film", "age"))
    with pytest.raises(ValueError, match="different levels of 'film'"):
        likelihood_ratio_test(renamed, crossed)
    state = fit(table, ["state"], ("age", "state"))
    with pytest.raises(ValueError, match="smaller has the grouping 'state', which larger lacks"):
        likelihood_ratio_test(state, fit(table, {"film": SLOPES}, ("film", "age")))
    known, estimated = (
        fit(table, {"film": GroupingPrior(["intercept", "age"], covariance=c)}, ("film", "age"))
        for c in (np.eye(2), None)
    )
    with pytest.raises(ValueError, match="between levels of 'film', which is not a special case"):
        likelihood_ratio_test(known, estimated)


def test_shares_of_variance_count_every_grouping(table, sloped, crossed):
    X = table[0]
    x = np.column_stack([np.ones(144), X["age"]])
    covariance = sloped.groupings_["film"].covariance
    between = [sloped.prior_.covariance[0, 0], np.mean(np.sum(x @ covariance * x, axis=1))]
    total = sum(between) + sloped.noise_variance_
    assert_allclose(sloped.iccs_[["client", "film"]], np.array(between) / total)
    assert sloped.icc_ == sloped.iccs_["client"]
    fixed = np.var(X["age"] * sloped.population_coef_[0])
    assert_allclose(sloped.marginal_r2_, fixed / (fixed + total))
    assert_allclose(sloped.conditional_r2_, (fixed + sum(between)) / (fixed + total))
    assert_allclose(
        crossed.summary().loc[("fit", "conditional R2"), "estimate"], crossed.conditional_r2_
    )
    assert crossed.iccs_.index.tolist() == ["client", "film", "state"]
    plain = fit(table, None, ["age"])
    assert plain.iccs_.tolist() == [plain.icc_]


def test_residuals_use_the_levels(table, crossed):
    X, y, user = table
    values = residuals_of(crossed, X, y, user, None, False, 0)
    variances = [crossed.noise_variance_, crossed.prior_.covariance[0, 0]]
    variances += [crossed.groupings_[name].covariance[0, 0] for name in ("film", "state")]
    squares = [np.eye(144), *(z @ z.T for z in designs(table, ["film", "state"]))]
    noise, P = crossed.noise_variance_, projection(table, squares, variances)[1]
    residuals = noise * P @ y
    assert_allclose(values["residuals"], residuals, atol=1e-9)
    assert_allclose(values["standardized"], residuals / noise / np.sqrt(np.diag(P)), atol=1e-9)
    # Where a level is new, the residual varies by all that the prediction lacks.
    new = X.assign(film="new")
    mean, std = crossed.predict(new, groups=user, return_std=True)
    values = residuals_of(fit(table, ["film", "state"]), new, y, user, None, False, 0)
    assert_allclose(values["standardized"], (y - mean) / np.sqrt(noise + std**2))


def test_displays_take_models_with_groupings(table, crossed):
    X, y, user = table
    display = ResidualsDisplay.from_estimator(crossed, X, y, groups=user)
    assert_allclose(display.residuals, y - crossed.predict(X, groups=user))
    assert CoefficientDisplay.from_estimator(crossed, feature="age").ax_ is not None
    local = fit(table, None, ["age"], prior=GaussianPrior(covariance=np.inf))
    shown = ShrinkageDisplay.from_estimator(crossed, local=local)
    assert_allclose(shown.personalized, crossed.intercept_)


def test_joins_score_rows_as_the_model(table, sloped):
    X, _, user = table
    rows = X.assign(user=np.where(user == 3, 99, user), row=range(144))
    rows.loc[rows["film"] == "b", "film"] = "new"
    population = [float(sloped.population_intercept_), float(sloped.population_coef_[0])]
    levels = sloped.coef_table(grouping="film")
    assert list(levels) == ["level", "intercept", "age"]
    with duckdb.connect() as connection:
        connection.register("rows", rows)
        connection.register("clients", sloped.coef_table())
        connection.register("films", levels)
        scored = connection.execute(
            "SELECT COALESCE(c.intercept, $1) + COALESCE(f.intercept, 0) "
            "+ (COALESCE(c.age, $2) + COALESCE(f.age, 0)) * r.age AS predicted "
            "FROM rows r LEFT JOIN clients c ON r.user = c.client "
            "LEFT JOIN films f ON r.film = f.level ORDER BY row",
            population,
        ).df()["predicted"]
    expected = sloped.predict(rows[["film", "age"]], groups=rows["user"])
    assert_allclose(scored, expected, rtol=1e-12)
    with pytest.raises(ValueError, match=r"\['film'\]; got 'state'"):
        sloped.coef_table(grouping="state")
