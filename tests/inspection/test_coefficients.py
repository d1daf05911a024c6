"""CoefficientDisplay, and ShrinkageDisplay of slopes, against the fitted arrays."""

import functools
import itertools

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from scipy.stats import norm
from sklearn import config_context
from sklearn.base import BaseEstimator
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler

from pfl_sklearn import ClientColumn, SingleClientWarning
from pfl_sklearn.base import ClientMixin
from pfl_sklearn.inspection import CoefficientDisplay, ShrinkageDisplay
from pfl_sklearn.linear_model import PersonalizedLinearRegression, PersonalizedLogisticRegression
from pfl_sklearn.model_selection import ClientKFold
from pfl_sklearn.priors import GaussianPrior
from tests.helpers.figures import (
    assert_rows_do_not_overlap,
    legend_of,
    lines_of,
    segments_of,
)

LOCAL = GaussianPrior(covariance=np.inf)
UNIT = GaussianPrior(covariance=1.0)
# With a known noise variance too, fits take no iterations.
SHRUNK = GaussianPrior(covariance=[1.0, 0.25, 0.01])


class Fitted(ClientMixin, BaseEstimator):
    """Stand-in with the attributes of a fitted linear model."""

    _population_attributes = ("population_coef_",)
    privacy_ = None

    def __init__(self, fit_intercept=True):
        self.fit_intercept = fit_intercept

    def fit(self, X, y):
        raise NotImplementedError


def drawn(n_clients=8, n=6, seed=0):
    """Table, ids and true coefficients (n_clients, 3), the intercept first."""
    rng = np.random.default_rng(seed)
    truth = [1.0, 2.0, -1.0] + rng.normal(size=(n_clients, 3)) * [1.0, 0.5, 0.1]
    groups = np.repeat([f"c{k:04d}" for k in range(n_clients)], n)
    X = pd.DataFrame(rng.normal(size=(len(groups), 2)), columns=["dose", "age"])
    own = np.repeat(truth, n, axis=0)
    y = own[:, 0] + np.sum(own[:, 1:] * X.to_numpy(), axis=1) + 0.5 * rng.normal(size=len(X))
    return X, y, groups, truth


def linear(prior=SHRUNK, **parameters):
    return PersonalizedLinearRegression(prior, noise_variance=0.25, **parameters)


@functools.cache
def fitted(n_clients=8, prior=SHRUNK):
    """A model, which tests must not change, and the true coefficients."""
    X, y, groups, truth = drawn(n_clients)
    return linear(prior).fit(X, y, groups=groups), truth


def without_intercept():
    X, y, groups, _ = drawn()
    prior = GaussianPrior(covariance=1.0)
    return linear(prior, fit_intercept=False).fit(X, y, groups=groups)


def values_of(model, feature):
    """Column of values, their standard deviations, the population's and its error."""
    if feature == "intercept":
        population = model.population_intercept_, model.population_intercept_std_
        return model.intercept_, model.intercept_std_, *population
    k = list(model.feature_names_in_).index(feature)
    population = model.population_coef_[k], model.population_coef_std_[k]
    return model.coef_[:, k], model.coef_std_[:, k], *population


@pytest.mark.parametrize(("feature", "extras"), [("intercept", False), ("dose", True)])
def test_rows(feature, extras):
    model, truth = fitted()
    local, _ = fitted(prior=LOCAL)
    true = truth[:, ["intercept", "dose", "age"].index(feature)]
    given = {"truth": true, "local": local} if extras else {}
    display = CoefficientDisplay.from_estimator(model, feature=feature, level=0.9, **given)
    values, stds, population, error = values_of(model, feature)
    ax, order, at, half = display.ax_, np.argsort(values), np.arange(8), norm.ppf(0.95)
    lines = lines_of(ax)
    np.testing.assert_array_equal(lines["personalized"], np.c_[values[order], at])
    np.testing.assert_array_equal(lines["population"][:, 0], np.full(2, population))
    band = ax.patches[0].get_extents().transformed(ax.transData.inverted())
    np.testing.assert_allclose([band.x0, band.x1], population + half * error * np.array([-1, 1]))
    segments = segments_of(ax)
    ends = np.c_[values - half * stds, values + half * stds][order]
    np.testing.assert_allclose(segments[0][:, :, 0], ends)
    np.testing.assert_array_equal(segments[0][:, :, 1], np.c_[at, at])
    expected = ["population", "90 % interval", "personalized"]
    if extras:
        own, own_stds, *_ = values_of(local, feature)
        np.testing.assert_array_equal(lines["local"][:, 0], own[order])
        assert np.all((lines["local"][:, 1] < at) & (lines["local"][:, 1] > at - 0.5))
        whiskers = np.c_[own - half * own_stds, own + half * own_stds][order]
        np.testing.assert_allclose(segments[1][:, :, 0], whiskers)
        np.testing.assert_array_equal(lines["truth"], np.c_[true[order], at])
        expected = ["population", "90 % interval", "local", "personalized", "truth"]
    assert legend_of(ax.get_legend()) == expected
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert names == model.clients_[order].tolist()
    assert feature in ax.get_xlabel()


def test_features_by_index_and_name_are_the_same():
    model, _ = fitted()
    found = [
        lines_of(CoefficientDisplay.from_estimator(model, feature=feature).ax_)["personalized"]
        for feature in ("age", 1, np.int64(1))
    ]
    np.testing.assert_array_equal(found[0], np.c_[np.sort(model.coef_[:, 1]), np.arange(8)])
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


@pytest.mark.parametrize("extras", [False, True])
def test_points(extras):
    model, truth = fitted(61)
    given = {"truth": truth[:, 1], "local": fitted(61, prior=LOCAL)[0]} if extras else {}
    ax = CoefficientDisplay.from_estimator(model, feature="dose", **given).ax_
    values, stds, population, error = values_of(model, "dose")
    lines, order, at = lines_of(ax), np.argsort(values), np.arange(61)
    np.testing.assert_array_equal(lines["personalized"], np.c_[at, values[order]])
    np.testing.assert_array_equal(lines["population"][:, 1], np.full(2, population))
    band = ax.patches[0].get_extents().transformed(ax.transData.inverted())
    ends = population + norm.ppf(0.975) * error * np.array([-1, 1])
    np.testing.assert_allclose([band.y0, band.y1], ends)
    (intervals,) = segments_of(ax)
    half = norm.ppf(0.975) * stds
    np.testing.assert_allclose(intervals[:, :, 1], np.c_[values - half, values + half][order])
    assert ("local" in lines) == ("truth" in lines) == extras
    if extras:
        np.testing.assert_array_equal(lines["local"], np.c_[at, given["local"].coef_[order, 0]])
        np.testing.assert_array_equal(lines["truth"], np.c_[at, truth[order, 1]])
    assert "dose" in ax.get_ylabel()
    assert all(handle.get_alpha() > 0.5 for handle in ax.get_legend().legend_handles)


@pytest.mark.parametrize("kind", ["rows", "points"])
def test_several_features(kind):
    model, truth = fitted()
    features = ["dose", "intercept"]
    true = pd.DataFrame(truth[:, [1, 0]], index=model.clients_).iloc[::-1]
    display = CoefficientDisplay.from_estimator(model, feature=features, kind=kind, truth=true)
    assert display.axes_.shape == (2,)
    assert display.ax_ is display.axes_[0]
    first = np.argsort(model.coef_[:, 0])
    for ax, feature, column in zip(display.axes_, features, (1, 0), strict=True):
        values = values_of(model, feature)[0]
        order = first if kind == "rows" else np.argsort(values)
        lines, axis = lines_of(ax), 0 if kind == "rows" else 1
        np.testing.assert_array_equal(lines["personalized"][:, axis], values[order])
        np.testing.assert_array_equal(lines["truth"][:, axis], truth[order, column])
    if kind == "rows":
        assert legend_of(display.figure_.legends[0])[-1] == "truth"
        names = [label.get_text() for label in display.ax_.get_yticklabels()]
        assert names == model.clients_[first].tolist()


def test_truth_as_an_array_has_one_column_per_feature():
    model, truth = fitted()
    display = CoefficientDisplay.from_estimator(model, feature=["intercept", 0, 1], truth=truth)
    order = np.argsort(model.intercept_)
    for k, ax in enumerate(display.axes_):
        np.testing.assert_array_equal(lines_of(ax)["truth"][:, 0], truth[order, k])


def test_local_models_are_matched_by_client():
    X, y, groups, _ = drawn()
    model = linear().fit(X, y, groups=groups)
    more = np.append(groups, ["a first", "a first", "a first", "a first"])
    local = linear(LOCAL)
    local.fit(pd.concat([X, X[:4]]), np.append(y, y[:4]), groups=more)
    ax = CoefficientDisplay.from_estimator(model, feature="dose", local=local).ax_
    order = np.argsort(model.coef_[:, 0])
    np.testing.assert_array_equal(lines_of(ax)["local"][:, 0], local.coef_[1:, 0][order])


@pytest.mark.slow
def test_long_whiskers_do_not_stretch_the_axes():
    model, _ = fitted()
    local = Fitted()
    local.clients_, local.coef_, local.coef_std_ = model.clients_, model.coef_, model.coef_std_
    local.population_coef_, local.population_coef_std_ = np.ones(2), np.full(2, np.inf)
    limits = []
    for stretch in (1.0, 1e6, np.inf):
        local.coef_std_ = stretch * model.coef_std_
        ax = CoefficientDisplay.from_estimator(model, feature=0, local=local).ax_
        ax.figure.canvas.draw()
        limits.append(ax.get_xlim())
        assert len(segments_of(ax)[1]) == (8 if np.isfinite(stretch) else 0)
    assert limits[0] == limits[1] == limits[2]


def test_estimators_without_a_posterior_are_drawn_without_intervals():
    model = Fitted(fit_intercept=False)
    model.clients_, model.coef_ = np.arange(3), np.array([[2.0], [0.0], [1.0]])
    model.population_coef_, model.population_coef_std_ = np.array([1.0]), np.array([np.nan])
    display = CoefficientDisplay.from_estimator(model, feature=0)
    display.figure_.canvas.draw()
    np.testing.assert_array_equal(lines_of(display.ax_)["personalized"][:, 0], [0.0, 1.0, 2.0])
    assert not display.ax_.patches
    assert "95 % interval" not in legend_of(display.ax_.get_legend())


def test_from_wrappers():
    X, y, groups, _ = drawn()
    table = X.assign(clinic=groups)
    scaled = make_pipeline(StandardScaler(), linear())
    nameless = make_pipeline(FunctionTransformer(np.asarray), linear())
    with config_context(enable_metadata_routing=True):
        scaled.fit(X, y, groups=groups)
        nameless.fit(X, y, groups=groups)
    column = ClientColumn(scaled, "clinic").fit(table, y)
    search = GridSearchCV(
        ClientColumn(scaled, "clinic"),
        {"estimator__personalizedlinearregression__noise_variance": [0.25]},
        cv=ClientKFold(2, client_column="clinic", random_state=0),
    ).fit(table, y)
    order = np.argsort(scaled[-1].coef_[:, 1])
    for estimator in (scaled, column, search):
        ax = CoefficientDisplay.from_estimator(estimator, feature="age", local=scaled).ax_
        lines = lines_of(ax)
        np.testing.assert_array_equal(lines["personalized"][:, 0], scaled[-1].coef_[order, 1])
        np.testing.assert_array_equal(lines["local"][:, 0], scaled[-1].coef_[order, 1])
    lines = lines_of(CoefficientDisplay.from_estimator(nameless, feature="x1").ax_)
    np.testing.assert_array_equal(lines["personalized"][:, 0], np.sort(nameless[-1].coef_[:, 1]))


def test_on_given_axes_and_again():
    model, _ = fitted(5)
    _, axes = plt.subplots(1, 3)
    display = CoefficientDisplay.from_estimator(model, feature=["dose", "age"], ax=axes[:2])
    assert list(display.axes_) == list(axes[:2])
    single = CoefficientDisplay.from_estimator(model, feature="age", ax=axes[2])
    assert single.ax_ is axes[2]
    assert display.plot(kind="points") is display
    assert len(plt.get_fignums()) == 2


def test_one_client():
    X, y, _, _ = drawn(1)
    with pytest.warns(SingleClientWarning):
        model = linear().fit(X, y)
    for kind in ("rows", "points"):
        display = CoefficientDisplay.from_estimator(model, feature="dose", kind=kind)
        display.figure_.canvas.draw()
        at = lines_of(display.ax_)["personalized"]
        assert at.shape == (1, 2)
        assert at[0, 1 - (kind == "rows")] == model.coef_[0, 0]


@pytest.mark.parametrize(
    ("n_clients", "features"), [(2, ["intercept", "dose", "age"]), (60, ["dose"])]
)
def test_nothing_overlaps_or_is_cut_off(n_clients, features):
    model, truth = fitted(n_clients)
    local, _ = fitted(n_clients, LOCAL)
    display = CoefficientDisplay.from_estimator(
        model, feature=features, local=local, truth=truth[:, : len(features)]
    )
    _, *labels = assert_rows_do_not_overlap(display.figure_)
    for left, right in itertools.pairwise(labels):
        assert left.x1 < right.x0


def test_shrinkage_of_slopes():
    model, truth = fitted()
    local, _ = fitted(prior=LOCAL)
    display = ShrinkageDisplay.from_estimator(
        model, feature="dose", local=local, truth=truth[:, 1], level=0.5
    )
    lines, order, at = lines_of(display.ax_), np.argsort(model.coef_[:, 0]), np.arange(8)
    own, personalized = local.coef_[order, 0], model.coef_[order, 0]
    np.testing.assert_array_equal(lines["local"], np.c_[own, at])
    np.testing.assert_array_equal(lines["personalized"], np.c_[personalized, at])
    np.testing.assert_array_equal(lines["truth"], np.c_[truth[order, 1], at])
    np.testing.assert_array_equal(lines["population"][:, 0], np.full(2, model.population_coef_[0]))
    intervals, connections = segments_of(display.ax_)
    half = norm.ppf(0.75) * model.coef_std_[order, 0]
    np.testing.assert_allclose(
        intervals[:, :, 0], np.c_[personalized - half, personalized + half], atol=1e-12
    )
    np.testing.assert_array_equal(connections[:, :, 0], np.c_[own, personalized])
    assert display.ax_.get_xlabel() == "coefficient of dose"
    default = lines_of(ShrinkageDisplay.from_estimator(model, local=local).ax_)
    np.testing.assert_array_equal(default["personalized"][:, 0], np.sort(model.intercept_))
    points = ShrinkageDisplay.from_estimator(model, feature=1, local=local, kind="points").ax_
    np.testing.assert_array_equal(
        lines_of(points)["personalized"], np.c_[local.coef_[:, 1], model.coef_[:, 1]]
    )
    assert points.get_xlabel() == "local coefficient of age"


def other_clients():
    X, y, groups, _ = drawn()
    return linear(LOCAL).fit(X[6:], y[6:], groups=groups[6:])


@pytest.mark.parametrize(
    ("make", "given", "message"),
    [
        (lambda: Ridge().fit([[0.0], [1.0]], [0, 1]), {}, r"\bRidge\b"),
        (lambda: PersonalizedLinearRegression(), {}, "not fitted"),
        (lambda: fitted()[0], {"feature": "weight"}, r"'intercept', 'dose', 'age'.*'weight'"),
        (lambda: fitted()[0], {"feature": 2}, r"feature=2\b.*\b2 features"),
        (lambda: fitted()[0], {"feature": []}, r"feature.*empty"),
        (without_intercept, {}, r"'dose', 'age'.*'intercept'"),
        (lambda: fitted()[0], {"level": 95}, r"level.*\(0, 1\).*\b95\b"),
        (lambda: fitted()[0], {"kind": "bars"}, r"kind.*'bars'"),
        (lambda: fitted()[0], {"truth": [1.0]}, r"truth.*\(8,\).*\(1,\)"),
        (lambda: fitted()[0], {"feature": [0, 1], "truth": np.zeros(8)}, r"truth.*\b2\b.*\(8,\)"),
        (lambda: fitted()[0], {"local": other_clients}, r"local.*'c0000'"),
    ],
)
def test_bad_input(make, given, message):
    given = {name: value() if callable(value) else value for name, value in given.items()}
    with pytest.raises(NotFittedError if message == "not fitted" else ValueError, match=message):
        CoefficientDisplay.from_estimator(make(), **given)
    assert plt.get_fignums() == []


def test_each_feature_needs_axes():
    model, _ = fitted()
    _, axes = plt.subplots(1, 2)
    with pytest.raises(ValueError, match=r"\bax\b.*\b1\b.*\b2\b"):
        CoefficientDisplay.from_estimator(model, ax=axes)


def test_a_feature_called_intercept_is_taken_by_index():
    X, y, groups, _ = drawn()
    model = linear().fit(X.rename(columns={"age": "intercept"}), y, groups=groups)
    with pytest.raises(ValueError, match="feature='intercept'"):
        CoefficientDisplay.from_estimator(model, feature="intercept")
    lines = lines_of(CoefficientDisplay.from_estimator(model, feature=1).ax_)
    np.testing.assert_array_equal(lines["personalized"][:, 0], np.sort(model.coef_[:, 1]))


def shown_values(estimator, **parameters):
    """Coefficients of the first panel, by default the intercept at the features' means."""
    return CoefficientDisplay.from_estimator(estimator, **parameters).panels[0].coefficients


def assert_same_values(shown, expected, **tolerance):
    for name in set(shown._fields) - {"label", "clients"}:
        np.testing.assert_allclose(getattr(shown, name), getattr(expected, name), **tolerance)


@pytest.mark.parametrize(
    ("kind", "n_classes"),
    [
        # A given covariance is one at the given origin.
        (functools.partial(PersonalizedLinearRegression, uncertainty="plug_in"), None),
        (functools.partial(PersonalizedLogisticRegression, UNIT, random="intercept"), 3),
    ],
)
def test_the_default_is_the_intercept_of_centred_features(kind, n_classes):
    X, y, groups, _ = drawn(12, 8)
    weights = np.random.default_rng(2).uniform(0.5, 2, len(X))
    y = y if n_classes is None else pd.cut(y, n_classes, labels=False)
    centred = X - np.average(X, axis=0, weights=weights)
    model, at_zero = (
        kind().fit(rows, y, groups=groups, sample_weight=weights) for rows in (X + 1, centred)
    )
    shown = shown_values(model)
    assert shown.label.startswith("intercept at the features' means")
    assert_same_values(shown, shown_values(at_zero, feature="intercept"), rtol=1e-5, atol=1e-5)
    assert_same_values(shown_values(model, feature="level"), shown)
    assert np.abs(shown.values - shown_values(model, feature="intercept").values).max() > 0.5


def test_the_default_is_the_prediction_at_the_means():
    X, y, groups, _ = drawn(12, 10)
    X["age"] += 2000
    model = linear().fit(X, y, groups=groups)
    rows = pd.DataFrame([X.mean()] * 12)
    mean, std = model.predict(rows, groups=model.clients_, return_std=True)
    shown = shown_values(model, level=0.9)
    np.testing.assert_allclose(shown.values, mean, rtol=1e-9)
    np.testing.assert_allclose(shown.upper - shown.lower, 2 * norm.ppf(0.95) * std, rtol=1e-6)
    local = linear(LOCAL).fit(X, y, groups=groups)
    panel = CoefficientDisplay.from_estimator(model, local=local).panels[0]
    expected = local.predict(rows, groups=model.clients_)
    np.testing.assert_allclose(panel.local.values, expected, rtol=1e-9)


def test_a_feature_called_level_is_that_feature():
    X, y, groups, _ = drawn()
    model = linear().fit(X.rename(columns={"age": "level"}), y, groups=groups)
    np.testing.assert_array_equal(shown_values(model, feature="level").values, model.coef_[:, 1])
    assert shown_values(model).label == "intercept at the features' means"


@pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")
def test_without_means_the_default_is_the_plain_intercept():
    X, y, groups, _ = drawn()
    bounds = {"epsilon": 5.0, "feature_bound": 3.0, "target_bound": 5.0, "noise_variance": 1.0}
    private = PersonalizedLinearRegression(GaussianPrior(covariance=1.0), **bounds)
    one = linear().fit(X, y, groups=groups).for_client("c0003")
    for model in (private.fit(X, y, groups=groups), one):
        shown = shown_values(model)
        assert shown.label == "intercept"
        np.testing.assert_array_equal(shown.values, model.intercept_)


def test_a_local_model_needs_the_same_features():
    X, y, groups, _ = drawn()
    model = linear().fit(X, y, groups=groups)
    prior = GaussianPrior(covariance=1.0)
    other = linear(prior).fit(X[["dose"]], y, groups=groups)
    with pytest.raises(ValueError, match=r"local.*'dose', 'age'.*got.*'dose'"):
        CoefficientDisplay.from_estimator(model, local=other)


def test_logistic_models():
    X, _, groups, truth = drawn(8, 20)
    odds = truth[:, 0].repeat(20) + np.sum(truth.repeat(20, axis=0)[:, 1:] * X.to_numpy(), axis=1)
    y = np.random.default_rng(1).random(len(X)) < 1 / (1 + np.exp(-odds))
    labels = np.where(X["age"] > 1, "other", np.where(y, "yes", "no"))
    prior = GaussianPrior(mean=0.0, covariance=1.0)
    binary = PersonalizedLogisticRegression(prior).fit(X, y, groups=groups)
    ax = CoefficientDisplay.from_estimator(binary, feature="dose").ax_
    assert ax.get_xlabel() == "coefficient of dose, log odds of True"
    lines = lines_of(ax)
    np.testing.assert_array_equal(lines["personalized"][:, 0], np.sort(binary.coef_[:, 0]))
    several = PersonalizedLogisticRegression(prior).fit(X, labels, groups=groups)
    for output, name in enumerate(["no", "other", "yes"]):
        ax = CoefficientDisplay.from_estimator(several, feature="dose", output=output).ax_
        np.testing.assert_array_equal(
            lines_of(ax)["personalized"][:, 0], np.sort(several.coef_[:, output, 0])
        )
        half = norm.ppf(0.975) * several.coef_std_[:, output, 0]
        ends = np.c_[several.coef_[:, output, 0] - half, several.coef_[:, output, 0] + half]
        order = np.argsort(several.coef_[:, output, 0])
        np.testing.assert_allclose(segments_of(ax)[0][:, :, 0], ends[order])
        assert ax.get_xlabel() == f"coefficient of dose, class {name}"
        ax = CoefficientDisplay.from_estimator(several, feature="intercept", output=output).ax_
        levels = lines_of(ax)
        np.testing.assert_array_equal(
            levels["personalized"][:, 0], np.sort(several.intercept_[:, output])
        )
        assert levels["population"][0, 0] == several.population_intercept_[output]
    with pytest.raises(ValueError, match=r"output=3\b.*\b3 classes"):
        CoefficientDisplay.from_estimator(several, output=3)
    lines = lines_of(ShrinkageDisplay.from_estimator(binary, local=binary, feature=1).ax_)
    np.testing.assert_array_equal(lines["local"], lines["personalized"])


def test_effects_are_drawn_around_zero_with_the_intervals_of_their_table():
    X, y, groups, _ = drawn()
    site = np.array(["north", "south", "west"])[np.arange(len(y)) % 3]
    inner = PersonalizedLinearRegression(groupings=["site"], uncertainty="plug_in")
    model = ClientColumn(inner, "clinic").fit(X.assign(site=site, clinic=groups), y)
    cases = [
        (None, "dose", "conditional", model.effects("client")),
        ("site", "intercept", "total", model.effects("site", errors="total")),
    ]
    for grouping, term, errors, table in cases:
        display = CoefficientDisplay.from_effects(
            model, grouping=grouping, term=term, errors=errors
        )
        shown = table[table["term"] == term].sort_values("estimate", kind="stable")
        lines, intervals = lines_of(display.ax_), segments_of(display.ax_)[0]
        np.testing.assert_allclose(lines["population"][:, 0], 0.0)
        np.testing.assert_allclose(lines["personalized"][:, 0], shown["estimate"])
        np.testing.assert_allclose(intervals[:, :, 0], shown[["lower", "upper"]])
        names = [text.get_text() for text in display.ax_.get_yticklabels()]
        assert names == list(shown["level"])
        assert not display.ax_.patches  # the population's error is not drawn
        assert display.ax_.get_xlabel() == f"effect on the {term}"
    points = CoefficientDisplay.from_effects(model, grouping="site", kind="points")
    assert points.ax_.get_xlabel() == "site, sorted"
    with pytest.raises(ValueError, match=r"term must be one of \['intercept'\]; got 'dose'"):
        CoefficientDisplay.from_effects(model, grouping="site", term="dose")
    with pytest.raises(ValueError, match="one coefficient vector per client"):
        CoefficientDisplay.from_effects(Ridge().fit(X, y))
