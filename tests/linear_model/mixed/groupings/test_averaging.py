"""Errors averaged over the variances of groupings, against sums over dense covariances."""

import pickle

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from pfl_sklearn.linear_model import PersonalizedLinearRegression
from pfl_sklearn.linear_model._mixed._groupings import _averaging, _points
from pfl_sklearn.linear_model._mixed._groupings._averaging import AveragedGroupings
from pfl_sklearn.linear_model._mixed._groupings._posterior import GroupingsPosterior
from pfl_sklearn.linear_model._mixed._groupings._search import RatioShape
from pfl_sklearn.priors import GaussianPrior, GroupingPrior
from tests.helpers.dense_groupings import Effects, posterior
from tests.helpers.slow import slow


def crossed(m=5, n_items=4, seed=0, scale=0.7):
    """Columns, targets and clients of a crossed table with one row a cell."""
    rng = np.random.default_rng(seed)
    client, item = np.repeat(np.arange(m), n_items), np.tile(np.arange(n_items), m)
    y = 1 + rng.normal(0, scale, m)[client] + rng.normal(0, scale, n_items)[item]
    return pd.DataFrame({"item": item}), y + rng.normal(size=len(y)), client


def fitted(X, y, client, groupings=("item",), **params):
    model = PersonalizedLinearRegression(groupings=list(groupings), **params)
    return model.fit(X, y, groups=client)


def dense_at(X, y, client, ratios, noise=1.0):
    ones = np.ones((len(y), 1))
    codes = client, X["item"].to_numpy()
    groupings = [
        Effects(code, ones, np.array([[noise * ratio]]))
        for code, ratio in zip(codes, ratios, strict=True)
    ]
    return posterior(ones, y, np.ones(len(y)), groupings, noise)


def dense_mixture(X, y, client, values, weights=None):
    """Covariance of all effects and the population around the mixture's mean.

    Without weights, at values on a grid of equal steps, those of the posterior.
    """
    points = [dense_at(X, y, client, np.exp(2 * value)) for value in values]
    n_free = len(y) - 1
    if weights is None:
        logs = []
        for point, value in zip(points, values, strict=True):
            volume = point.log_likelihood + point.square / 2
            prior = np.log(np.exp(value) / (1 + np.exp(2 * value))).sum()
            logs.append(volume - n_free / 2 * np.log(point.square) + prior)
        weights = np.exp(np.array(logs) - max(logs))
    weights = weights / np.sum(weights)
    means = np.array([point.estimates for point in points])
    away = means - weights @ means
    noises = [point.square / (n_free - 2) for point in points]
    within = sum(
        w * noise * point.total for w, noise, point in zip(weights, noises, points, strict=True)
    )
    return within + (weights[:, None] * away).T @ away


@pytest.mark.slow
def test_the_same_points_give_the_same_moments():
    X, y, client = crossed()
    posterior = fitted(X, y, client)._posterior
    case = posterior._averages.args[0]
    dense_products = case.products.with_dense_cross()
    points = _points.find_points(case._replace(products=dense_products).log_density, case.start())
    covariance = dense_mixture(X, y, client, points.values, points.weights)
    averages = posterior.averages
    assert_allclose(averages.level_variances(0)[:, 0], np.diag(covariance)[:5], rtol=1e-8)
    assert_allclose(averages.level_variances(1)[:, 0], np.diag(covariance)[5:9], rtol=1e-8)
    assert_allclose(averages.population_covariance, covariance[9:, 9:], rtol=1e-8)
    loadings = np.zeros((5, 10))
    loadings[np.arange(5), np.arange(5)], loadings[:, 9] = 1.0, 1.0
    expected = np.diag(loadings @ covariance @ loadings.T)
    assert_allclose(averages.coefficient_variances()[:, 0], expected, rtol=1e-8)


def test_predictions_count_the_averages_of_known_and_unknown_clients_and_levels():
    X, y, client = crossed()
    model = fitted(X, y, client)
    averages = model._posterior.averages
    new = pd.DataFrame({"item": [2, 2, 99]})
    std = model.predict(new, groups=[1, 77, 1], return_std=True)[1]
    item, population = averages.outer[2, 2], averages.outer[4, 4]
    both = population + 2 * averages.outer[2, 4]
    own = averages.clients[1, 0, 0] + 2 * averages.cross[1, 0, 4]
    expected = [
        own + item + both + 2 * averages.cross[1, 0, 2],
        averages.between[0][0, 0] + item + both,
        own + population + averages.between[1][0, 0],
    ]
    assert_allclose(std**2, expected, rtol=1e-10)
    lower, upper = model.predict_interval(X, groups=client)
    half = (upper - lower) / 2 / 1.959963984540054
    assert_allclose(half, model.predict(X, groups=client, return_std=True)[1], rtol=1e-10)


@pytest.mark.parametrize("scale", [0.7, *slow([0.0, 20.0, 0.005])])
@pytest.mark.slow
def test_the_points_stand_for_the_whole_posterior(scale):
    X, y, client = crossed(seed=1, scale=scale)
    averages = fitted(X, y, client)._posterior.averages
    axis = np.linspace(np.log(1e-4), np.log(2e3), 28)
    grid = np.stack(np.meshgrid(axis, axis, indexing="ij"), axis=-1).reshape(-1, 2)
    covariance = np.diag(dense_mixture(X, y, client, grid))
    assert_allclose(averages.level_variances(0)[:, 0] ** 0.5, covariance[:5] ** 0.5, rtol=0.03)
    assert_allclose(averages.level_variances(1)[:, 0] ** 0.5, covariance[5:9] ** 0.5, rtol=0.03)


def test_plug_in_errors_are_shorter_and_left_as_they_are():
    X, y, client = crossed(m=12, n_items=8, seed=2)
    full, plug_in = fitted(X, y, client), fitted(X, y, client, uncertainty="plug_in")
    assert isinstance(plug_in._posterior, GroupingsPosterior)
    assert_array_equal(full.coef_, plug_in.coef_)
    assert_array_equal(full.intercept_, plug_in.intercept_)
    assert np.all(full.intercept_std_ > plug_in.intercept_std_)
    assert full.population_intercept_std_ > plug_in.population_intercept_std_
    total, conditional = full.effects(errors="total"), full.effects()
    assert np.all(total["sd"] > plug_in.effects(errors="total")["sd"])
    assert_array_equal(conditional["sd"], plug_in.effects()["sd"])


@pytest.mark.slow
def test_order_of_rows_and_groupings_changes_nothing():
    rng = np.random.default_rng(3)
    X, y, client = crossed(m=8, n_items=6, seed=3)
    X = X.assign(room=rng.integers(0, 6, len(y)))  # as many as items: sizes give no order
    order = rng.permutation(len(y))
    first = fitted(X, y, client, ["item", "room"])
    second = fitted(X.iloc[order], y[order], client[order], ["room", "item"])
    assert_allclose(first.intercept_std_, second.intercept_std_, rtol=1e-3)
    keys = ["grouping", "level"]
    one, other = (m.effects(errors="total").sort_values(keys) for m in (first, second))
    assert_array_equal(one["level"], other["level"])
    assert_allclose(one["sd"], other["sd"], rtol=1e-3)


def test_large_groupings_stay_at_their_estimates_and_the_share_falls(monkeypatch):
    rng = np.random.default_rng(4)
    for m, n_items, n_averaged, share in (
        (900, 40, 2, 1.0),
        (1000, 40, 1, 1.0),
        (600, 316, 2, 0.5),
    ):
        client = np.repeat(np.arange(m), 3)
        X = pd.DataFrame({"item": np.arange(len(client)) * 7 % n_items})
        y = rng.normal(size=m)[client] + rng.normal(size=len(client))
        case, _, of_average = fitted(X, y, client)._posterior._averages.args
        assert len(case.start()) == n_averaged
        assert_allclose(of_average, share, atol=1e-3)
    monkeypatch.setattr(_averaging, "_MOST_OUTER", 40)
    assert isinstance(fitted(X, y, client)._posterior, GroupingsPosterior)


def test_known_variances_are_not_averaged():
    X, y, client = crossed(m=8, n_items=6, seed=5)
    model = fitted(X, y, client, prior=GaussianPrior(covariance=0.5))
    case = model._posterior._averages.args[0]
    assert len(case.start()) == 1
    assert case.noise == model.noise_variance_
    known = PersonalizedLinearRegression(
        GaussianPrior(covariance=0.5), groupings={"item": GroupingPrior(covariance=0.5)}
    )
    assert isinstance(known.fit(X, y, groups=client)._posterior, GroupingsPosterior)


@pytest.mark.slow
@pytest.mark.parametrize("covariance_type", ["diag", "full"])
def test_importance_sampling_agrees_with_a_grid(covariance_type):
    rng = np.random.default_rng(6)
    X, y, client = crossed(m=12, n_items=9, seed=6)
    X = X.assign(x=rng.normal(size=len(y)))
    y = y + rng.normal(size=12)[client] * X["x"]
    model = fitted(X, y, client, prior=GaussianPrior(covariance_type=covariance_type))
    posterior = model._posterior
    case, plug_in, share = posterior._averages.args
    sampled = posterior.averages
    # Three or four parameters: a coarse grid is exact, since the density is smooth.
    dense = case._replace(products=case.products.with_dense_cross())
    axes = [np.linspace(-2.6, 1.4, 11)] * (3 if covariance_type == "diag" else 2)
    if covariance_type == "full":
        axes = [*axes, np.linspace(-2.5, 2.5, 9), np.linspace(-2.6, 1.4, 11)]
    grid = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, len(axes))
    logs = np.array([dense.log_density(value) for value in grid])
    near = logs > logs.max() - 7
    points = _points.Points(grid[near], np.exp(logs[near] - logs.max()))
    points = points._replace(weights=points.weights / points.weights.sum())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_averaging, "find_points", lambda *_: points)
        expected = _averaging.average_moments(case, plug_in, share)
    for k in (0, 1):
        ratio = np.sqrt(sampled.level_variances(k) / expected.level_variances(k))
        assert_allclose(ratio, 1.0, atol=0.03)


@pytest.mark.parametrize("q", [2, 3, 5])
def test_parameters_of_a_full_covariance_are_those_of_its_root(q):
    rng = np.random.default_rng(q)
    shape = RatioShape("full", np.ones(q, bool))
    values = rng.normal(0, 0.5, _points.n_parameters(shape))
    root = _points.root_at(shape, values)
    ratio = root @ root.T
    assert_allclose(np.sqrt(np.diag(ratio)), np.exp(values[:q]))
    shrunk = ratio * (1 - 0.1 * (1 - np.eye(q)))
    again = _points.root_at(shape, _points.parameters_near(shape, ratio))
    assert_allclose(again @ again.T, shrunk, rtol=1e-10)


def test_correlations_are_uniform_under_the_prior():
    # In three dimensions every correlation of a uniform matrix has the variance 1 / 4.
    shape, rng = RatioShape("full", np.ones(3, bool)), np.random.default_rng(0)
    angles = rng.normal(0, 1.2, (2000, 3))
    logs = np.array([
        _points.log_variance_prior(shape, np.concatenate([np.zeros(3), each])) for each in angles
    ]) + 0.5 * np.sum((angles / 1.2) ** 2, axis=1)  # fmt: skip
    weights = np.exp(logs - logs.max())
    roots = [_points.root_at(shape, np.concatenate([np.zeros(3), each])) for each in angles]
    matrices = np.array([root @ root.T for root in roots])
    squares = np.tensordot(weights / weights.sum(), matrices**2, 1)
    assert_allclose(squares[np.tril_indices(3, -1)], 0.25, atol=0.025)


@pytest.mark.slow
def test_a_model_can_be_stored_and_handed_to_a_client():
    X, y, client = crossed(m=8, n_items=6, seed=7)
    model = fitted(X, y, client)
    stored = pickle.loads(pickle.dumps(model))
    assert_array_equal(stored.intercept_std_, model.intercept_std_)
    assert isinstance(stored._posterior, AveragedGroupings)
    own = model.for_client(3)
    assert_array_equal(own.intercept_std_, model.intercept_std_[3:4])
    assert own.population_intercept_std_ == model.population_intercept_std_
    lower, upper = model.credible_interval()
    assert_allclose(upper - lower, 2 * 1.959963984540054 * model.intercept_std_[:, None])


def coverage(m, n_items, scales, n_sets):
    """Shares of clients, levels ("total") and populations inside their intervals."""
    rng, inside = np.random.default_rng(8), []
    client, item = np.repeat(np.arange(m), n_items), np.tile(np.arange(n_items), m)
    for _ in range(n_sets):
        u, v = rng.normal(0, scales[0], m), rng.normal(0, scales[1], n_items)
        y = 1 + u[client] + v[item] + rng.normal(size=len(client))
        model = fitted(pd.DataFrame({"item": item}), y, client)
        levels = model.effects("item", errors="total")
        pairs = [
            (1 + u - model.intercept_, model.intercept_std_),
            (v - levels["estimate"], levels["sd"]),
            (1 - model.population_intercept_, model.population_intercept_std_),
        ]
        inside.append([np.mean(np.abs(error) <= 1.96 * std) for error, std in pairs])
    return np.mean(inside, axis=0)


@pytest.mark.slow
def test_intervals_cover_with_few_clients_and_items():
    # Plug-in intervals of these effects cover .71 to .87 of the time.
    shares = coverage(12, 8, (1.0, 0.3), 100)
    assert np.all((shares >= 0.88) & (shares <= 0.99))
