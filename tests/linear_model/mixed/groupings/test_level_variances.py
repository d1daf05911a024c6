"""Variances of effects, given the population and in all, against dense covariances."""

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose

from pfl_sklearn.linear_model import PersonalizedLinearRegression
from pfl_sklearn.linear_model._mixed._groupings import _products, _scaled_rows
from pfl_sklearn.priors import GaussianPrior, GroupingPrior
from tests.helpers.dense_groupings import Effects, posterior


def random_table(seed, n=240, m=16, n_items=9, n_rooms=4):
    """Columns x, item and room, of which rooms hold whole clients; targets, clients, weights."""
    rng = np.random.default_rng(seed)
    client = rng.permutation(np.r_[np.arange(m), rng.integers(0, m, n - m)])
    item = rng.permutation(np.r_[np.arange(n_items), rng.integers(0, n_items, n - n_items)])
    room, x = client % n_rooms, rng.normal(2.0, 1.5, n)
    y = 1 + 0.5 * x + rng.normal(0, 0.8, m)[client] + 0.5 * rng.normal(size=m)[client] * x
    y = (
        y
        + (0.6 + 0.4 * x) * rng.normal(size=n_items)[item]
        + rng.normal(size=n_items)[item]
        + rng.normal(0, 0.7, n_rooms)[room]
    )
    y = y + rng.normal(size=n)
    return pd.DataFrame({"x": x, "item": item, "room": room}), y, client, rng.uniform(0.5, 2, n)


SLOPES = GroupingPrior(random=["intercept", "x"], covariance_type="full")
CASES = {
    "intercepts": (GaussianPrior(), "intercept", {"item": GroupingPrior()}, "reml", False),
    "slopes": (
        GaussianPrior(),
        "intercept",
        {"item": SLOPES, "room": GroupingPrior()},
        "reml",
        True,
    ),
    "full": (GaussianPrior(covariance_type="full"), "all", {"item": GroupingPrior()}, "ml", True),
    "zero": (
        GaussianPrior(),
        "intercept",
        {"item": GroupingPrior(covariance=0.0), "room": GroupingPrior()},
        "reml",
        False,
    ),
}


def fit_case(name, seed=0, **params):
    prior, random, groupings, method, weighted = CASES[name]
    X, y, client, weights = random_table(seed)
    weights = weights if weighted else None
    X = X[["x", *groupings]]
    model = PersonalizedLinearRegression(
        prior, random=random, groupings=groupings, method=method, **params
    )
    return model.fit(X, y, groups=client, sample_weight=weights), X, y, client, weights


def dense_case(model, X, y, client, weights):
    """DensePosterior at a model's variances, in the data's columns."""
    columns = np.column_stack([np.ones(len(y)), X["x"]])
    random = model._design.random
    groupings = [Effects(client, columns[:, random], model.prior_.known_covariance(len(random)))]
    for level in model._levels:
        at = model._design.order[level.positions]
        groupings.append(Effects(X[level.name].to_numpy(), columns[:, at], level.covariance))
    weights = np.ones(len(y)) if weights is None else weights
    return posterior(columns, y, weights, groupings, model.noise_variance_)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("errors", ["conditional", "total"])
@pytest.mark.parametrize("name", CASES)
def test_effects_equal_dense_algebra(name, errors):
    case = fit_case(name, uncertainty="plug_in")
    model, dense = case[0], dense_case(*case)
    table = model.effects(errors=errors)
    covariance = getattr(dense, errors)
    n_effects = sum(dense.sizes)
    assert len(table) == n_effects
    assert_allclose(table["estimate"], dense.estimates[:n_effects], rtol=1e-7, atol=1e-8)
    assert_allclose(table["sd"] ** 2, np.diag(covariance)[:n_effects], rtol=1e-8, atol=1e-12)
    for k, level in enumerate(model._levels, start=1):
        variances = model._posterior.level_variances(k, errors == "conditional")
        expected = dense.blocks(covariance, k, len(level.positions))
        assert_allclose(variances, expected, rtol=1e-8, atol=1e-12)


def test_conditional_errors_are_those_of_lme4():
    # condVar is sigma^2 L (L'Z'ZL + I)^-1 L' (Bates et al., 2015): the inverse of all
    # effects' equations, without the population's columns.
    model, X, _, client, _ = fit_case("intercepts", uncertainty="plug_in")
    item = X["item"].to_numpy()
    Z = np.hstack([np.eye(16)[client], np.eye(9)[item]])
    sds = np.repeat(
        [model.prior_.known_covariance(1)[0, 0], model._levels[0].covariance[0, 0]], [16, 9]
    )
    root = np.diag(np.sqrt(sds / model.noise_variance_))
    inverse = np.linalg.inv(root @ Z.T @ Z @ root + np.eye(25))
    expected = model.noise_variance_ * np.diag(root @ inverse @ root)
    assert_allclose(model.effects()["sd"] ** 2, expected, rtol=1e-8)


def test_iterative_fits_have_both_errors_from_draws(monkeypatch):
    covariance = np.array([[0.5, 0.1], [0.1, 0.3]])
    item = GroupingPrior(random=["intercept", "x"], covariance=covariance)
    room = GroupingPrior(covariance=0.5)
    known = GaussianPrior(covariance=0.6), "intercept", {"item": item, "room": room}, "reml", True
    monkeypatch.setitem(CASES, "known", known)
    dense = fit_case("known", noise_variance=1.0)[0]
    monkeypatch.setattr(_scaled_rows, "MOST_DENSE", 0)
    monkeypatch.setattr(_products, "MOST_EXACT", 5)  # items are large, rooms exact
    iterative = fit_case("known", noise_variance=1.0)[0]
    for errors in ("conditional", "total"):
        expected, table = (np.asarray(m.effects(errors=errors)["sd"]) for m in (dense, iterative))
        assert_allclose(table, expected, rtol=0.2)
        assert_allclose(np.mean(table / expected), 1.0, atol=0.03)
        assert_allclose(table[-4:], expected[-4:], rtol=1e-6)
