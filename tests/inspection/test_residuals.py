"""Residuals against matrices of the marginal model and simulated tables, and their plots."""

import contextlib
import functools

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from scipy.stats import beta, chi2, kstest, norm
from sklearn import config_context
from sklearn.base import clone
from sklearn.compose import TransformedTargetRegressor
from sklearn.exceptions import NotFittedError
from sklearn.feature_selection import RFE
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from pfl_sklearn import BernoulliMean, ClientColumn, GaussianMean, SingleClientWarning
from pfl_sklearn.inspection import ResidualsDisplay
from pfl_sklearn.inspection._residual_summaries import binned_residuals, quantile_limits
from pfl_sklearn.inspection._residual_values import deviations_of, residuals_of
from pfl_sklearn.linear_model import (
    PersonalizedLinearRegression,
    PersonalizedLogisticRegression,
    PersonalizedPoissonRegression,
)
from pfl_sklearn.metrics import ClientScorer
from pfl_sklearn.model_selection import ClientKFold
from pfl_sklearn.priors import DiscretePrior, GaussianPrior, LaplacePrior

COVARIANCE = np.diag([2.0, 0.3])
one_panel = functools.partial(ResidualsDisplay.from_estimator, kind="fitted")  # holds all values


def simulated(n_clients=12, rows=(2, 9), seed=0):
    """Rows of clients with their own intercept and slope of the first of two features."""
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(n_clients), rng.integers(*rows, size=n_clients))
    X = rng.normal(1, 1, size=(len(groups), 2))
    own = rng.normal(size=(n_clients, 2)) * np.sqrt(np.diag(COVARIANCE))
    weights = rng.uniform(0.3, 3, len(groups))
    mean = 2 + X @ [1, -1] + own[groups, 0] + own[groups, 1] * X[:, 0]
    return X, mean + rng.normal(size=len(groups)) * 1.5 / np.sqrt(weights), groups, weights


def known_model(n_clients=12, mean=None, **options):
    """A linear model with known variances, and its rows."""
    X, y, groups, weights = simulated(n_clients, **options)
    prior = GaussianPrior(mean=mean, covariance=COVARIANCE)
    model = PersonalizedLinearRegression(prior, random=["intercept", 0], noise_variance=2.25)
    return model.fit(X, y, groups=groups, sample_weight=weights), X, y, groups, weights


def labels(n_clients=60, n_rows=8, seed=0):
    rng = np.random.default_rng(seed)
    groups, X = np.repeat(np.arange(n_clients), n_rows), rng.normal(size=(n_clients * n_rows, 1))
    chances = 1 / (1 + np.exp(-X[:, 0] - rng.normal(size=n_clients)[groups]))
    return X, np.where(rng.random(len(X)) < chances, "yes", "no"), groups


@functools.cache
def label_model():
    """A logistic model, which tests must not change, and its rows."""
    X, y, groups = labels()
    model = PersonalizedLogisticRegression(random="intercept", unseen="population")
    return model.fit(X, y, groups=groups), X, y, groups


def marginal(X, groups, weights):
    """Design (n, 3), covariance of the rows' means and of the rows (n, n), and P of the GLS."""
    design = np.column_stack([np.ones(len(X)), X])
    between = design[:, :2] @ COVARIANCE @ design[:, :2].T * (groups[:, None] == groups)
    V = between + 2.25 * np.diag(1 / weights)
    inverse = np.linalg.inv(V)
    A = inverse @ design
    return design, between, V, inverse - A @ np.linalg.solve(design.T @ A, A.T)


def drawn_quantiles(ax):
    """Normal quantiles and values of the points, and the limits, of a quantile panel."""
    points = ax.lines[1].get_xydata()
    (band,) = ax.collections
    return points, band.get_paths()[0].vertices


def test_residuals_of_a_linear_model():
    model, X, y, groups, weights = known_model()
    display = one_panel(model, X, y, groups=groups, sample_weight=weights)
    P = marginal(X, groups, weights)[-1]
    noise = 2.25 / weights
    residuals = noise * (P @ y)
    variances = np.diag(noise[:, None] * P * noise)
    np.testing.assert_allclose(display.fitted, y - residuals, atol=1e-8)
    np.testing.assert_allclose(display.residuals, residuals * np.sqrt(weights), atol=1e-8)
    np.testing.assert_allclose(display.standardized, residuals / np.sqrt(variances), atol=1e-8)
    np.testing.assert_allclose(display.variance_share, variances / noise, atol=1e-8)
    np.testing.assert_array_equal(display.clients[display.codes], groups)


def test_expected_residuals_are_those_of_shrunken_predictions():
    """The regression of residuals on predictions, given the population."""
    model, X, y, groups, weights = known_model()
    display = one_panel(model, X, y, groups=groups, sample_weight=weights)
    design, between, V, _ = marginal(X, groups, weights)
    inverse, noise = np.linalg.inv(V), np.diag(2.25 / weights)
    with_prediction = np.diag(noise @ inverse @ between)
    variances = np.diag(between @ inverse @ between)
    population = np.r_[model.population_intercept_, model.population_coef_]
    expected = with_prediction / variances * (display.fitted - design @ population)
    # The display also counts the error of the population's coefficients.
    scale = np.abs(expected).max()
    np.testing.assert_allclose(display.expected / np.sqrt(weights), expected, atol=0.2 * scale)
    assert np.corrcoef(display.expected, display.residuals)[0, 1] > 0.1


@pytest.mark.parametrize(("feature", "at"), [(None, 0), ("intercept", 0), (0, 1), ("x0", 1)])
def test_deviations_of_a_linear_model(feature, at):
    model, X, y, groups, weights = known_model(30)
    given = {"groups": groups, "sample_weight": weights, "feature": feature}
    display = ResidualsDisplay.from_estimator(model, X, y, kind="client_quantiles", **given)
    design, _, V, _ = marginal(X, groups, weights)
    population = np.r_[model.population_intercept_, model.population_coef_]
    estimates = np.c_[model.intercept_, model.coef_]
    for i, client in enumerate(model.clients_):
        own = groups == client
        pull = COVARIANCE @ design[own, :2].T @ np.linalg.inv(V[np.ix_(own, own)])
        variance = (pull @ design[own, :2] @ COVARIANCE)[at, at]
        expected = (estimates[i, at] - population[at]) / np.sqrt(variance)
        assert display.deviations[i] == pytest.approx(expected, rel=1e-6)
    np.testing.assert_array_equal(display.deviation_clients, model.clients_)
    name = "intercept" if at == 0 else "coefficient of x0"
    assert display.ax_.get_ylabel() == f"standardized deviation of the {name}"


def test_clients_that_say_nothing_are_left_out():
    X, y, groups, _ = simulated(20, rows=(3, 9))
    X[groups < 5, 0] = 0.0  # nothing about the slope
    prior = GaussianPrior(covariance=COVARIANCE, centered=False)
    model = PersonalizedLinearRegression(prior, random=["intercept", 0], noise_variance=2.25)
    model.fit(X, y, groups=groups)
    display = one_panel(model, X, y, groups=groups, feature=0)
    np.testing.assert_array_equal(display.deviation_clients, np.arange(5, 20))
    assert np.isfinite(display.deviations).all()


def test_the_first_coefficient_that_varies_is_checked():
    X, y, groups, _ = simulated(20, rows=(3, 9))
    model = PersonalizedLinearRegression(random=["x1"]).fit(X, y, groups=groups)
    kind = "client_quantiles"
    if model.prior_.covariance[0, 0] > 0:
        display = ResidualsDisplay.from_estimator(model, X, y, groups=groups, kind=kind)
        assert display.deviation_label == "deviation of the coefficient of x1"
    with pytest.raises(ValueError, match=r"client_quantiles.*variance between clients is 0"):
        ResidualsDisplay.from_estimator(model, X, y, groups=groups, kind=kind, feature="intercept")


def test_held_out_and_unseen_rows_have_larger_variances():
    model, X, y, groups, weights = known_model(30)
    model.set_params(unseen="population", uncertainty="plug_in")
    of_fit, held_out = (
        residuals_of(model, X, y, groups, weights, held_out, 0) for held_out in (False, True)
    )
    share = weights * model.predict(X, groups=groups, return_std=True)[1] ** 2 / 2.25
    np.testing.assert_allclose(of_fit["variance_share"], 1 - share, atol=1e-8)
    np.testing.assert_allclose(held_out["variance_share"], 1 + share, atol=1e-8)
    assert held_out["expected"] is None
    new = one_panel(model, X, y, groups=groups + 20)
    unseen = groups + 20 >= 30
    share = model.predict(X, groups=groups + 20, return_std=True)[1] ** 2 / 2.25
    np.testing.assert_allclose(new.variance_share[unseen], 1 + share[unseen])
    population = X @ model.population_coef_ + model.population_intercept_
    np.testing.assert_allclose(new.fitted[unseen], population[unseen])
    assert new.clients.max() == 49
    assert new.deviation_clients.max() == 29
    assert (new.expected[unseen] == 0).all()


def test_rows_of_weight_zero_are_absent():
    X, y, groups, weights = simulated()
    weights[::3] = 0.0
    weights[groups == 0] = 0.0
    frame = pd.DataFrame(X, columns=["a", "b"])
    prior, options = GaussianPrior(covariance=1.0), {"noise_variance": 2.25, "unseen": "error"}
    model = PersonalizedLinearRegression(prior, random="intercept", **options)
    model.fit(frame, y, groups=groups, sample_weight=weights)
    display = one_panel(model, frame, pd.Series(y), groups=pd.Series(groups), sample_weight=weights)
    present = weights > 0
    expected = (y - model.predict(frame, groups=np.where(present, groups, 1)))[present]
    np.testing.assert_allclose(display.residuals, expected * np.sqrt(weights[present]))
    np.testing.assert_array_equal(display.clients[display.codes], groups[present])
    with pytest.raises(ValueError, match="at least one non-zero"):
        one_panel(model, frame, y, groups=groups, sample_weight=0 * weights)


def test_means_are_random_intercepts():
    _, y, groups, _ = simulated(25)
    zeros = np.zeros((len(y), 1))
    means = GaussianMean().fit(zeros, y, groups=groups)
    lines = PersonalizedLinearRegression(random="intercept").fit(zeros, y, groups=groups)
    one, other = (one_panel(model, zeros, y, groups=groups) for model in (means, lines))
    np.testing.assert_allclose(one.residuals, other.residuals, atol=1e-5)
    np.testing.assert_allclose(one.deviations, other.deviations, atol=1e-4)
    # Without the error of the population's mean.
    np.testing.assert_allclose(one.standardized, other.standardized, atol=0.1)


@pytest.mark.parametrize("held_out", [False, True])
def test_residuals_of_classes(held_out):
    model, X, y, groups = label_model()
    display = one_panel(model, X, y, groups=groups, held_out=held_out)
    chances = model.predict_proba(X, groups=groups, integrate=held_out)[:, 1]
    np.testing.assert_allclose(display.fitted, chances)
    # The residual of a label lies on its side of the quantile of the first class's probability.
    np.testing.assert_array_equal(display.residuals > norm.ppf(1 - chances), y == "yes")
    np.testing.assert_array_equal(display.standardized, display.residuals)
    again, other = (residuals_of(model, X, y, groups, None, held_out, seed) for seed in (0, 1))
    np.testing.assert_array_equal(again["residuals"], display.residuals)
    assert not np.array_equal(other["residuals"], display.residuals)
    assert display.axes_[0].get_xlabel() == "probability of yes"
    assert len(display.deviations) == 60
    assert 0.7 < display.deviations.std() < 1.3


def test_residuals_of_new_labels_are_standard_normal():
    X, y, groups = labels(300, 20)
    model = PersonalizedLogisticRegression(random="intercept")
    model.fit(X[::2], y[::2], groups=groups[::2])
    found = residuals_of(model, X[1::2], y[1::2], groups[1::2], None, True, 0)
    assert kstest(found["residuals"], "norm").pvalue > 0.01
    wrong = residuals_of(model, -X[1::2], y[1::2], groups[1::2], None, True, 0)
    assert kstest(wrong["residuals"], "norm").pvalue < 1e-6


def test_certain_labels_have_finite_residuals():
    model, X, y, groups = label_model()
    for shift in (-1e4, 1e4):
        found = residuals_of(model, X + shift, y, groups, None, False, 0)
        assert np.isfinite(found["residuals"]).all()


def test_quantile_limits():
    lower, median, upper = quantile_limits(7)
    ranks = np.arange(1, 8)
    for values, p in ((lower, 0.025), (median, 0.5), (upper, 0.975)):
        np.testing.assert_allclose(values, norm.ppf(beta.ppf(p, ranks, 8 - ranks)))
    some = quantile_limits(7, np.array([2, 6]))
    np.testing.assert_array_equal(some[0], lower[[1, 5]])


@pytest.mark.slow
def test_limits_cover_rows_and_clients_if_the_model_holds():
    inside = {"rows": [], "clients": []}
    for seed in range(60):
        model, X, y, groups, weights = known_model(40, mean=[2.0, 1.0], seed=seed)
        residuals = residuals_of(model, X, y, groups, weights, False, 0)["standardized"]
        deviations = deviations_of(model, None)["deviations"]
        for unit, values in (("rows", residuals), ("clients", deviations)):
            lower, _, upper = quantile_limits(len(values))
            inside[unit].append(np.mean((lower <= np.sort(values)) & (np.sort(values) <= upper)))
    # Fitted to the same rows, so residuals are inside more often.
    assert 0.95 < np.mean(inside["rows"]) < 1
    assert 0.92 < np.mean(inside["clients"]) < 0.98


def test_limits_find_what_is_not_normal():
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(200), 20)
    X = rng.normal(size=(4000, 1))
    y = rng.exponential(3, size=200)[groups] + rng.standard_t(3, size=4000)
    model = PersonalizedLinearRegression(random="intercept").fit(X, y, groups=groups)
    display = one_panel(model, X, y, groups=groups)
    for values in (display.standardized, display.deviations):
        lower, _, upper = quantile_limits(len(values))
        outside = (np.sort(values) < lower) | (np.sort(values) > upper)
        assert outside.mean() > 0.2


def test_panels_show_residuals_means_and_quantiles():
    model, X, y, groups, weights = known_model(12, rows=(3, 12))
    display = ResidualsDisplay.from_estimator(model, X, y, groups=groups, sample_weight=weights)
    by_fit, by_client, rows, clients = display.axes_
    assert display.ax_ is by_fit
    assert display.figure_ is by_fit.figure
    np.testing.assert_array_equal(
        by_fit.lines[0].get_xydata(), np.c_[display.fitted, display.residuals]
    )
    at, mean, _, expected = binned_residuals(display.fitted, display.residuals, display.expected)
    drawn = {line.get_label(): line.get_xydata() for line in by_fit.lines}
    np.testing.assert_array_equal(drawn["mean in bins"], np.c_[at, mean])
    np.testing.assert_array_equal(drawn["expected mean"], np.c_[at, expected])
    for ax, values in ((rows, display.standardized), (clients, display.deviations)):
        lower, median, upper = quantile_limits(len(values))
        points, band = drawn_quantiles(ax)
        np.testing.assert_array_equal(points, np.c_[median, np.sort(values)])
        assert band[:, 1].min() == pytest.approx(lower[0])
        assert band[:, 1].max() == pytest.approx(upper[-1])
    medians = [np.median(display.residuals[display.codes == i]) for i in range(12)]
    names = [label.get_text() for label in by_client.get_xticklabels()]
    assert names == [str(i) for i in np.argsort(medians)]
    assert by_fit.get_ylabel() == "residual times root of weight"


def test_bins_have_equally_many_rows():
    fitted = np.random.default_rng(0).permutation(100.0 * np.arange(200))
    at, mean, std, expected = binned_residuals(fitted, np.sin(fitted), 2 * fitted)
    order = np.argsort(fitted).reshape(10, 20)
    np.testing.assert_allclose(at, fitted[order].mean(axis=1))
    np.testing.assert_allclose(mean, np.sin(fitted)[order].mean(axis=1))
    np.testing.assert_allclose(std, np.sin(fitted)[order].std(axis=1, ddof=1))
    np.testing.assert_allclose(expected, 2 * at)


@pytest.mark.parametrize("fitted", [np.zeros(90), np.repeat([0.0, 1.0], 45), np.zeros(1)])
def test_bins_of_few_values(fitted):
    at, mean, std, _ = binned_residuals(fitted, np.ones(len(fitted)))
    np.testing.assert_array_equal(at, np.unique(fitted))
    np.testing.assert_array_equal(mean, 1.0)
    np.testing.assert_array_equal(std, 0.0)


def test_many_clients_are_points():
    X, y, groups, _ = simulated(61, rows=(1, 40))
    model = PersonalizedLinearRegression(random="intercept").fit(X, y, groups=groups)
    display = ResidualsDisplay.from_estimator(model, X, y, groups=groups, kind="clients")
    (ax,) = display.axes_
    own = [groups == client for client in model.clients_]
    dof = np.array([display.variance_share[rows].sum() for rows in own])
    squares = [np.sum(display.residuals[rows] ** 2) / model.noise_variance_ for rows in own]
    spread = np.sqrt(squares / dof)
    outside = (spread < np.sqrt(chi2.ppf(0.025, dof) / dof)) | (
        spread > np.sqrt(chi2.ppf(0.975, dof) / dof)
    )
    drawn = [line.get_xydata() for line in ax.lines if line.get_marker() == "."]
    np.testing.assert_allclose(drawn[0], np.c_[dof, spread][~outside], rtol=1e-6)
    np.testing.assert_allclose(drawn[1], np.c_[dof, spread][outside], rtol=1e-6)
    assert f"outside: {outside.sum()} of 61" in [t.get_text() for t in ax.get_legend().get_texts()]
    # A client's own intercept uses up to one row.
    sizes = np.bincount(groups)
    assert np.all((sizes - 1.2 < dof) & (dof < sizes))


def test_many_rows_are_thinned_but_all_are_counted():
    rng = np.random.default_rng(0)
    groups, y = np.repeat(np.arange(100), 120), rng.normal(size=12000)
    y[7] = 50.0
    model = GaussianMean().fit(np.zeros((12000, 1)), y + groups % 5, groups=groups)
    display = ResidualsDisplay.from_estimator(
        model, np.zeros((12000, 1)), y + groups % 5, groups=groups
    )
    assert len(display.residuals) == 12000
    assert len(display.axes_[0].lines[0].get_xdata()) == 5000
    points, _ = drawn_quantiles(display.axes_[2])
    assert len(points) <= 5000
    np.testing.assert_array_equal(points[-1, 1], display.standardized.max())
    np.testing.assert_array_equal(points[0, 1], display.standardized.min())


def test_kinds_and_axes():
    model, X, y, groups, _ = known_model()
    display = ResidualsDisplay.from_estimator(model, X, y, groups=groups, kind="fitted")
    assert len(display.axes_) == 1
    assert len(display.plot(kind=["clients", "residual_quantiles", "fitted"]).axes_) == 3
    figure, axes = plt.subplots(1, 2)
    assert display.plot(kind=["client_quantiles", "fitted"], ax=axes) is display
    assert display.figure_ is figure
    assert axes[0].get_xlabel() == "normal quantile"
    assert axes[1].get_xlabel() == "prediction of the client's model"
    n_figures = len(plt.get_fignums())
    for kind in ("bars", ["fitted", "bars"], []):
        with pytest.raises(ValueError, match=r"kind must be 'all', one of 'fitted'"):
            display.plot(kind=kind)
    with pytest.raises(ValueError, match=r"one axes per panel, 4; got 2"):
        display.plot(ax=axes)
    assert len(plt.get_fignums()) == n_figures


def test_from_wrappers():
    X, y, groups, _ = simulated(8)
    table = pd.DataFrame(X, columns=["a", "b"]).assign(site=groups)
    linear = PersonalizedLinearRegression(
        GaussianPrior(covariance=1.0), random="intercept", noise_variance=2.0
    )
    scaled = make_pipeline(StandardScaler(), linear)
    with config_context(enable_metadata_routing=True):
        pipeline = make_pipeline(StandardScaler(), linear).fit(X, y, groups=groups)
        search = GridSearchCV(
            scaled,
            {"personalizedlinearregression__noise_variance": [2.0]},
            cv=ClientKFold(2, random_state=0),
            scoring=ClientScorer("neg_mean_squared_error"),
        ).fit(X, y, groups=groups)
    column = ClientColumn(scaled, "site").fit(table, y)
    search_of_columns = GridSearchCV(
        ClientColumn(linear, "site"),
        {"estimator__noise_variance": [2.0]},
        cv=ClientKFold(2, client_column="site", random_state=0),
    ).fit(table, y)
    linear = clone(linear)
    plain = residuals_of(linear.fit(X, y, groups=groups), X, y, groups, None, False, 0)
    for estimator in (pipeline, FrozenEstimator(pipeline), FrozenEstimator(linear)):
        found = one_panel(estimator, X, y, groups=groups)
        np.testing.assert_allclose(found.standardized, plain["standardized"], atol=1e-5)
        assert len(found.deviations) == 8
    for estimator in (column, search_of_columns):
        found = one_panel(estimator, table, y)
        np.testing.assert_allclose(found.residuals, y - estimator.predict(table))
        np.testing.assert_allclose(found.standardized, plain["standardized"], atol=1e-5)
        np.testing.assert_array_equal(found.clients[found.codes], groups)
    found = one_panel(search, X, y, groups=groups)
    with config_context(enable_metadata_routing=True):
        predicted = search.best_estimator_.predict(X, groups=groups)
    np.testing.assert_allclose(found.residuals, y - predicted)
    with pytest.raises(ValueError, match=r"groups= differs from column 'site'"):
        one_panel(column, table, y, groups=groups[::-1])


def test_a_transformed_target_has_residuals_on_its_own_scale():
    X, y, groups, _ = simulated(15)
    inner = PersonalizedLinearRegression(random="intercept")
    outer = TransformedTargetRegressor(inner, func=np.log, inverse_func=np.exp)
    with config_context(enable_metadata_routing=True):
        outer.fit(X, np.exp(y), groups=groups)
    found = one_panel(outer, X, np.exp(y), groups=groups)
    plain = residuals_of(inner.fit(X, y, groups=groups), X, y, groups, None, False, 0)
    np.testing.assert_allclose(found.standardized, plain["standardized"], atol=1e-6)


def test_one_client():
    X, y, _, _ = simulated()
    with pytest.warns(SingleClientWarning):
        model = PersonalizedLinearRegression().fit(X, y)
    display = ResidualsDisplay.from_estimator(model, X, y)
    design = np.column_stack([np.ones(len(X)), X])
    hat = np.diag(design @ np.linalg.pinv(design))
    residuals = y - model.predict(X)
    variance = np.sum(residuals**2) / (len(y) - 3)
    np.testing.assert_allclose(display.standardized, residuals / np.sqrt(variance * (1 - hat)))
    assert "there is one client" in display.axes_[3].texts[0].get_text()
    display.figure_.canvas.draw()


@pytest.mark.slow
def test_constant_response():
    X, _, groups, _ = simulated(4)
    linear = PersonalizedLinearRegression
    for model, value in ((GaussianMean(), 0.0), (linear(), 0.1)):
        y = np.full(len(X), value)
        exact = pytest.warns(UserWarning, match=f"fit all {len(X)} rows exactly")
        with exact if isinstance(model, linear) else contextlib.nullcontext():
            model.fit(X, y, groups=groups)
        display = ResidualsDisplay.from_estimator(model, X, y, groups=groups)
        display.figure_.canvas.draw()
        np.testing.assert_allclose(display.residuals, 0, atol=1e-12)
        for ax in display.axes_[2:]:
            assert ax.texts[0].get_text().startswith("No ")


def test_every_client_for_itself():
    X, y, groups, _ = simulated(15, rows=(1, 9))
    model = PersonalizedLinearRegression(GaussianPrior(covariance=np.inf), random="intercept")
    model.fit(X, y, groups=groups)
    display = ResidualsDisplay.from_estimator(model, X, y, groups=groups)
    alone = np.bincount(groups)[groups] == 1
    assert alone.any()
    assert np.isnan(display.standardized[alone]).all()  # fitted exactly
    assert np.isfinite(display.standardized[~alone]).all()
    assert "share nothing" in display.axes_[3].texts[0].get_text()


@pytest.mark.parametrize(
    ("prior", "reason"),
    [
        (LaplacePrior(scale=1.0), "LaplacePrior"),
        (DiscretePrior(2), "DiscretePrior"),
        (GaussianPrior(covariance=0.0), "variance between clients is 0"),
    ],
)
def test_models_without_normal_deviations(prior, reason):
    X, y, groups, _ = simulated(15)
    model = PersonalizedLinearRegression(prior, random="intercept").fit(X, y, groups=groups)
    display = ResidualsDisplay.from_estimator(model, X, y, groups=groups)
    assert np.isfinite(display.standardized).all()
    assert display.deviations is None
    assert reason in display.axes_[3].texts[0].get_text()
    with pytest.raises(ValueError, match=f"client_quantiles.*{reason}"):
        ResidualsDisplay.from_estimator(model, X, y, groups=groups, kind=["client_quantiles"])


@pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")
def test_private_and_released_models():
    X, y, groups, _ = simulated(100)
    model = PersonalizedLinearRegression(
        GaussianPrior(covariance=1.0),
        random="intercept",
        noise_variance=2.25,
        epsilon=5.0,
        feature_bound=3.0,
        target_bound=6.0,
        random_state=0,
    ).fit(X, y, groups=groups)
    display = ResidualsDisplay.from_estimator(model, X, y, groups=groups)
    assert len(display.deviations) == 100
    assert display.deviations.std() < 2
    released = model.release()
    display = ResidualsDisplay.from_estimator(released, X, y, groups=groups)
    np.testing.assert_allclose(display.residuals, y - released.predict(X))
    assert len(display.clients) == 100
    assert "released" in display.axes_[3].texts[0].get_text()
    means = GaussianMean(epsilon=1.0, clip_norm=4.0, noise_variance=1.0, random_state=0)
    means = means.fit(X, y, groups=groups).release()
    display = ResidualsDisplay.from_estimator(means, X, y, groups=groups)
    np.testing.assert_allclose(display.residuals, y - means.population_mean_)


def test_models_without_residuals_of_one_dimension():
    X, _, groups = labels(20)
    y = np.arange(len(X)) % 3
    model = PersonalizedLogisticRegression(random="intercept").fit(X, y, groups=groups)
    with pytest.raises(ValueError, match=r"two classes.*PersonalizedLogisticRegression has 3"):
        ResidualsDisplay.from_estimator(model, X, y, groups=groups)
    X, y, groups, _ = simulated()
    model = GaussianMean().fit(X, np.c_[y, y], groups=groups)
    with pytest.raises(ValueError, match=r"one target.*GaussianMean was fitted to 2"):
        ResidualsDisplay.from_estimator(model, X, y, groups=groups)
    assert plt.get_fignums() == []


@pytest.mark.parametrize("model", [Ridge(), BernoulliMean()])
def test_other_models(model):
    X, y, groups = np.arange(8.0)[:, None], np.arange(8) % 2, np.repeat([0, 1], 4)
    model.fit(X, y, **({"groups": groups} if isinstance(model, BernoulliMean) else {}))
    with pytest.raises(TypeError, match=r"PersonalizedLinearRegression.*GaussianMean.*got \w+\."):
        ResidualsDisplay.from_estimator(model, X, y, groups=groups)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"y": np.ones(3)}, "inconsistent numbers of samples"),
        ({"y": np.full(60, np.nan)}, "y contains NaN"),
        ({"groups": None}, r"Pass groups="),
        ({"groups": np.zeros(3)}, r"groups has 3 ids"),
        ({"groups": np.repeat("a", 60)}, r"groups holds string ids"),
        ({"sample_weight": -np.ones(60)}, "sample_weight"),
        ({"feature": "x7"}, r"feature must be one of 'intercept', 'x0', 'x1'; got 'x7'"),
        ({"X": np.ones((60, 3))}, "3 features"),
    ],
)
def test_bad_input(given, message):
    rng = np.random.default_rng(0)
    X, groups = rng.normal(size=(60, 2)), np.repeat(np.arange(6), 10)
    y = rng.normal(size=60) + groups
    prior = GaussianPrior(covariance=1.0)
    model = PersonalizedLinearRegression(prior, noise_variance=1.0).fit(X, y, groups=groups)
    arguments = {"X": X, "y": y, "groups": groups, **given}
    with pytest.raises(ValueError, match=message):
        ResidualsDisplay.from_estimator(model, arguments.pop("X"), arguments.pop("y"), **arguments)
    assert plt.get_fignums() == []


def test_wrappers_that_change_rows_are_refused():
    X, y, groups, _ = simulated()
    table = np.column_stack([groups, X])
    outer = RFE(ClientColumn(PersonalizedLinearRegression(random="intercept"), 0))
    outer.estimator_ = ClientColumn(PersonalizedLinearRegression(random="intercept"), 0)
    outer.estimator_.fit(table, y)
    with pytest.raises(TypeError, match=r"rows inside RFE are unknown; give the ClientColumn"):
        ResidualsDisplay.from_estimator(outer, table, y)


def test_unseen_clients_of_classes_get_averaged_probabilities():
    model, X, y, groups = label_model()
    found = residuals_of(model, X, y, groups + 30, None, False, 0)
    new = groups + 30 >= 60
    for rows, integrate in ((new, True), (~new, False)):
        chances = model.predict_proba(X, groups=groups + 30, integrate=integrate)
        np.testing.assert_allclose(found["fitted"][rows], chances[rows, 1])


def test_one_clients_own_model_and_part_of_the_clients():
    model, X, y, groups, _ = known_model()
    for client, given in ((model.for_client(3), {}), (model, {"groups": groups[groups == 3]})):
        own = groups == 3
        display = ResidualsDisplay.from_estimator(client, X[own], y[own], **given)
        expected = residuals_of(model, X, y, groups, None, False, 0)
        np.testing.assert_allclose(display.standardized, expected["standardized"][own])
        assert len(display.clients) == 1


def test_bad_labels_and_features_of_other_models():
    model, X, y, groups = label_model()
    y = np.where(np.arange(len(y)) == 3, "maybe", y)
    with pytest.raises(ValueError, match=r"y holds 'maybe'.*\['no', 'yes'\]"):
        ResidualsDisplay.from_estimator(model, X, y, groups=groups)
    X, y, groups, _ = simulated()
    means = GaussianMean().fit(X, y, groups=groups)
    with pytest.raises(ValueError, match=r"feature=0 belongs to linear models"):
        ResidualsDisplay.from_estimator(means, X, y, groups=groups, feature=0)
    with pytest.raises(NotFittedError):
        ResidualsDisplay.from_estimator(GaussianMean(), X, y, groups=groups)


def test_residuals_of_large_counts_are_those_of_their_logs():
    """New clients differ by more than a Poisson count of 3,000 does from its mean."""
    rng = np.random.default_rng(0)
    groups, intercepts = np.repeat(np.arange(40), 5), 8 + 0.7 * rng.normal(size=40)
    model = PersonalizedPoissonRegression(random="intercept", unseen="population")
    model.fit(rng.normal(size=(200, 1)), rng.poisson(np.exp(intercepts)[groups]), groups=groups)
    y, X, new = rng.poisson(np.exp(rng.normal(8, 0.7, 300))), np.zeros((300, 1)), np.full(300, -1)
    mean, std = model.predict(X, groups=new, return_std=True)
    variance = np.log1p((std / mean) ** 2)
    # The log of a large count has the variance 1 / y around its log rate.
    middle = np.log(model.predict(X, groups=new, integrate=False))
    logs = (np.log(y) - middle) / np.sqrt(variance + 1 / y)
    found = residuals_of(model, X, y, new, None, True, 0)
    np.testing.assert_allclose(found["residuals"], logs, atol=0.01)


@pytest.mark.parametrize("dispersion", [0.0, 0.8])
def test_residuals_of_counts_are_normal(dispersion):
    rng = np.random.default_rng(0)
    groups, years = np.repeat(np.arange(20), 30), rng.uniform(0.5, 3, size=600)
    X, intercepts = rng.normal(size=(600, 1)), 0.7 * rng.normal(size=20)
    mean = years * np.exp(0.5 * X[:, 0] + intercepts[groups])
    y = rng.poisson(mean * (rng.gamma(1 / dispersion, dispersion, 600) if dispersion else 1.0))
    family = "negative_binomial" if dispersion else "poisson"
    prior = GaussianPrior(covariance=0.49)
    model = PersonalizedPoissonRegression(prior, random="intercept", family=family)
    metadata, weights = {"exposure": years}, (np.arange(600) > 10).astype(float)
    model.fit(X, y, groups=groups, sample_weight=weights, **metadata)
    for held_out in (False, True):
        found = residuals_of(model, X, y, groups, weights, held_out, 0, metadata)
        assert len(found["residuals"]) == 589
        assert kstest(found["residuals"], "norm").pvalue > 0.01
    if not dispersion:  # the same rows behind a column
        table = pd.DataFrame({"x": X[:, 0], "id": groups, "years": years})
        column = ClientColumn(model, "id", exposure="years").fit(table, y, sample_weight=weights)
        again = residuals_of(column, table, y, None, weights, True, 0)
        np.testing.assert_allclose(again["residuals"], found["residuals"], atol=1e-6)
    # Counts of another distribution have other residuals.
    wrong = residuals_of(model, X, np.minimum(y, 2), groups, weights, False, 0, metadata)
    assert kstest(wrong["residuals"], "norm").pvalue < 1e-6
    one_panel(model, X, y, groups=groups, exposure=years)
