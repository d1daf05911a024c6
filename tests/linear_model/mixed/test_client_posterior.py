"""Means, intervals and losses under clients' own posteriors, against integration on a fine grid."""

import pickle

import numpy as np
import pytest
from scipy.special import expit, softmax
from sklearn.preprocessing import StandardScaler

from pfl_sklearn.datasets import load_baseball, load_heart_disease
from pfl_sklearn.linear_model import PersonalizedLogisticRegression, PersonalizedPoissonRegression
from pfl_sklearn.linear_model._mixed._client_posterior import axis_nodes, product_nodes
from pfl_sklearn.priors import GaussianPrior
from tests.helpers.exact_posterior import client_posterior
from tests.helpers.slow import slow


def draw(kind, m=60, n=3, q=1, sd=1.0, seed=0):
    """X, responses with rare events, and clients; q coefficients vary, the intercept first."""
    rng = np.random.default_rng(seed)
    groups, X = np.repeat(np.arange(m), n), rng.normal(size=(m * n, max(q - 1, 1)))
    design = np.column_stack([np.ones(m * n), X])[:, :q]
    effects = rng.normal(size=(m, q)) * np.append(sd, np.full(q - 1, sd / 2))
    predictors = np.sum(design * effects[groups], axis=1)
    if kind == "three":
        logits = np.column_stack([predictors + 1.5, -predictors, predictors / 2 - 1])
        return X, (logits + rng.gumbel(size=logits.shape)).argmax(axis=1), groups
    if kind == "classes":
        return X, (rng.random(m * n) < expit(predictors - 1.5)).astype(int), groups
    return X, rng.poisson(np.exp(predictors - sd)), groups


def model_of(kind, **params):
    if kind in ("classes", "three"):
        return PersonalizedLogisticRegression(unseen="population", **params)
    family = "negative_binomial" if kind == "dispersed" else "poisson"
    return PersonalizedPoissonRegression(family=family, unseen="population", **params)


def known_fit(kind, rows, q, sd):
    """Fit of the population under a known spread, so that every client keeps some of its own."""
    X, y, groups = rows
    covariance = np.diag(np.append(sd, np.full(q - 1, sd / 2)) ** 2)
    prior = GaussianPrior(covariance=covariance)
    random = "intercept" if q == 1 else "all"
    return model_of(kind, random=random, prior=prior).fit(X, y, groups=groups)


def means(model, X, groups, **params):
    if hasattr(model, "classes_"):
        return model.predict_proba(X, groups=groups, **params)
    return model.predict(X, groups=groups, **params)[:, None]


def exact_means(model, rows, at, clients):
    """Exact posterior means (m, c) of the responses of rows `at` (m, d) of some clients."""
    X, y, groups = rows
    result = []
    for x, client in zip(at, clients, strict=True):
        members = groups == client
        coefficients, weights = client_posterior(model, X[members], y[members])
        predictors = coefficients @ model._design.matrix(x[None])[0]
        if hasattr(model, "classes_"):
            logits = (
                predictors if predictors.ndim == 2 else np.array([0 * predictors, predictors]).T
            )
            result.append(weights @ softmax(logits, axis=1))
        else:
            result.append([weights @ np.exp(predictors)])
    return np.array(result)


# One effect has its own quadrature, two and three a product grid; the spread sets its size.
CASES = [
    ("counts", 1, 2.0),
    ("classes", 1, 1.0),
    ("classes", 2, 1.0),
    *slow([("counts", 3, 1.0), ("dispersed", 2, 2.0), ("classes", 3, 2.0), ("three", 1, 2.0)]),
]


@pytest.mark.parametrize("kind, q, sd", CASES)
def test_means_are_those_of_the_exact_posterior(kind, q, sd):
    rows = draw(kind, q=q, sd=sd)
    X, y, groups = rows
    model = known_fit(kind, rows, q, sd)
    totals = np.bincount(groups, y)
    clients = np.concatenate([np.flatnonzero(totals == 0)[:3], np.argsort(totals)[-3:]])
    at = np.random.default_rng(1).normal(size=(len(clients), X.shape[1]))
    expected, got = exact_means(model, rows, at, clients), means(model, at, clients)
    np.testing.assert_allclose(got, expected, rtol=0.03)
    np.testing.assert_allclose(got.sum(axis=0), expected.sum(axis=0), rtol=0.01)
    if hasattr(model, "classes_"):
        np.testing.assert_allclose(got.sum(axis=1), 1.0, atol=1e-12)
    # At the mode, and averaged over a normal density there, they are further away.
    assert np.abs(means(model, at, clients, integrate=False) / expected - 1).max() > 0.05


@pytest.mark.parametrize("kind, sd", [("counts", 1.0), ("counts", 2.0), ("classes", 2.0)])
def test_predictions_sum_to_the_responses(kind, sd):
    """With one varying coefficient and a canonical link the intercept's score is 0 at the fit."""
    X, y, groups = draw(kind, m=500, n=4, sd=sd)
    model = model_of(kind, random="intercept").fit(X, y, groups=groups)
    assert means(model, X, groups)[:, -1].sum() == pytest.approx(y.sum(), rel=1e-3)
    at_mode = means(model, X, groups, integrate=False)[:, -1].sum()
    assert at_mode < 0.98 * y.sum()


@pytest.mark.parametrize("kind, q", [("counts", 2), ("classes", 2), ("three", 1)])
def test_predictions_of_laplace_fits_sum_to_the_responses_within_3_percent(kind, q):
    X, y, groups = draw(kind, m=150, n=6, q=q)
    model = model_of(kind, random="all").fit(X, y, groups=groups)
    got = means(model, X, groups).sum(axis=0)
    observed = [y.sum()] if kind == "counts" else np.bincount(y)
    np.testing.assert_allclose(got, observed, rtol=0.03)


def test_many_effects_have_the_mean_to_third_order():
    """Beyond six effects a grid is too large."""
    assert axis_nodes(7, 1.0, 15) is None
    X, y, groups = draw("counts", m=200, n=8, q=8, sd=0.7)
    model = known_fit("counts", (X, y, groups), 8, 0.7)
    assert means(model, X, groups).sum() == pytest.approx(y.sum(), rel=0.02)
    assert means(model, X, groups, integrate=False).sum() < 0.97 * y.sum()


@pytest.mark.parametrize("n_effects", range(2, 7))
def test_grids_are_small_and_integrate_the_normal_density(n_effects):
    nodes, log_weights = product_nodes(n_effects, axis_nodes(n_effects, np.inf, 15))
    weights = np.exp(log_weights)
    assert len(nodes) <= 729
    assert weights.sum() == pytest.approx(1, abs=1e-6)
    np.testing.assert_allclose((nodes.T * weights) @ nodes, np.eye(n_effects), atol=1e-5)


@pytest.mark.parametrize("sd", [1.0, 2.0, 3.0])
def test_intervals_hold_their_share_of_the_exact_posterior(sd):
    """Normal ones around the mode hold .944, .928 and .910 of three rows."""
    rows = draw("classes", m=300, sd=sd)
    X, y, groups = rows
    model = known_fit("classes", rows, 1, sd)
    none, some = (np.flatnonzero(np.bincount(groups, y) == k)[:1] for k in (0, 1))
    clients = np.concatenate([none, some])
    coefficient_bounds = model.credible_interval()
    bounds = model.predict_interval(np.zeros((2, 1)), groups=clients)
    for k, client in enumerate(clients):
        members = groups == client
        intercepts, weights = client_posterior(model, X[members], y[members])
        for lower, upper, values in (
            (bounds[0][k, 1], bounds[1][k, 1], expit(intercepts[:, 0])),
            (*(bound[client, 0] for bound in coefficient_bounds), intercepts[:, 0]),
        ):
            held = weights[(values >= lower) & (values <= upper)].sum()
            assert 0.94 < held < 0.975


def test_a_handed_out_model_predicts_as_the_whole_one():
    X, y, groups = draw("counts", q=2)
    model = model_of("counts", random="all").fit(X, y, groups=groups)
    members = groups == 7
    alone = pickle.loads(pickle.dumps(model.for_client(7)))
    expected = model.predict(X[members], groups=groups[members], return_std=True)
    np.testing.assert_array_equal(alone.predict(X[members], return_std=True), expected)
    assert len(alone._effects.weights) == 1
    assert not hasattr(model.for_client(7)._population_copy(), "_effects")


@pytest.mark.parametrize("kind", ["classes", *slow(["counts"])])
@pytest.mark.parametrize("random", ["intercept", "all"])
def test_columns_far_from_zero_change_no_prediction(kind, random):
    X, y, groups = draw(kind, m=30, n=12, q=3)
    far = X + 1e7
    near = far - 1e7  # the very numbers that the far columns hold
    fits = [model_of(kind, random=random).fit(columns, y, groups=groups) for columns in (far, near)]
    at = list(zip(fits, (far[::6], near[::6]), strict=True))
    for ids in (groups[::6], np.full(60, 1000)):
        np.testing.assert_allclose(*(means(model, rows, ids) for model, rows in at), rtol=1e-5)
        bounds = (model.predict_interval(rows, groups=ids) for model, rows in at)
        np.testing.assert_allclose(*bounds, rtol=1e-5)


def sums_of(model):
    """Observed and expected sums (k,) of the responses, from the summary."""
    table = model.summary().loc["fit", "estimate"]
    return [table[table.index.str.startswith(name)].to_numpy() for name in ("observed", "expected")]


def test_shipped_tables_are_balanced():
    heart, baseball = load_heart_disease(), load_baseball()
    X = StandardScaler().fit_transform(heart.data)
    model = model_of("classes", random="intercept", uncertainty="plug_in")
    model.fit(X, heart.target, groups=heart.groups)
    observed, expected = sums_of(model)
    np.testing.assert_array_equal(observed, heart.target.sum())
    np.testing.assert_allclose(expected, observed, rtol=1e-3)
    hits, at_bats = baseball.successes, baseball.trials
    model = model_of("counts", random="intercept", uncertainty="plug_in")
    model.fit(np.zeros((18, 1)), hits, groups=baseball.groups, exposure=at_bats)
    np.testing.assert_allclose(*sums_of(model), rtol=1e-3)
    assert not hasattr(model.for_client(baseball.groups[0]), "_balance")


@pytest.mark.parametrize("kind", ["counts", "dispersed", "classes", "three"])
@pytest.mark.parametrize("covariance", [None, 1.0])
def test_one_client_has_every_prediction(kind, covariance):
    X, y, _ = draw(kind, m=20, n=2)
    groups = np.zeros(len(y), dtype=int)
    prior = GaussianPrior(covariance=covariance)
    model = model_of(kind, random="all", prior=prior).fit(X, y, groups=groups)
    got = means(model, X[:3], groups[:3])
    lower, upper = model.predict_interval(X[:3], groups=groups[:3])
    assert np.all((lower.reshape(3, -1) < got) & (got < upper.reshape(3, -1)))
    if not hasattr(model, "classes_"):
        mean, std = model.predict(X[:3], groups=groups[:3], return_std=True)
        np.testing.assert_array_equal(mean, got[:, 0])
        assert np.all(std > 0)
    if covariance is None:  # without a prior the client is its own population
        at_mode = means(model, X[:3], groups[:3], integrate=False)
        np.testing.assert_allclose(got, at_mode, rtol=1e-12)
    lower, upper = model.credible_interval()
    assert np.all(lower < upper)
    assert np.isfinite(model.score(X, y, groups=groups))
