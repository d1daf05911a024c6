"""Base estimators under a personalized final one: what each is fitted to, and what predicts."""

import pickle

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st
from scipy.optimize import minimize
from sklearn import config_context
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, clone, is_classifier
from sklearn.compose import TransformedTargetRegressor, make_column_transformer
from sklearn.dummy import DummyRegressor
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
)
from sklearn.exceptions import ConvergenceWarning
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge
from sklearn.model_selection import GridSearchCV, KFold, cross_val_predict, cross_validate
from sklearn.neighbors import KNeighborsRegressor
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler, TargetEncoder
from sklearn.svm import LinearSVC
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

from pfl_sklearn import (
    PersonalizedLinearRegression,
    PersonalizedLogisticRegression,
    PPSGDRegressor,
    SingleClientWarning,
    UnseenClientsWarning,
)
from pfl_sklearn._parallel import BatchMapper
from pfl_sklearn.compose import (
    ClientAsFeature,
    ClientColumn,
    PersonalizedStackingClassifier,
    PersonalizedStackingRegressor,
)
from pfl_sklearn.compose._client_mixtures import CandidateErrors, best_mixture
from pfl_sklearn.compose._client_rows import TableRows
from pfl_sklearn.compose._inner_estimators import InnerEstimator
from pfl_sklearn.compose._out_of_fold import out_of_fold, out_of_two_folds, simplest_not_worse
from pfl_sklearn.compose._stack.boosting import for_classes
from pfl_sklearn.compose._stack.choice import compare_by_fold
from pfl_sklearn.model_selection import ClientKFold
from pfl_sklearn.priors import GaussianPrior
from tests.helpers.slow import slow


def boosting(**params):
    return HistGradientBoostingRegressor(max_iter=10, random_state=0, **params)


def steps_and_slopes(n_clients=12, n_rows=40, seed=0):
    """Responses with a step that is common and slopes of the clients' own."""
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(n_clients), n_rows)
    X = rng.uniform(-2, 2, size=(len(groups), 2))
    slopes = rng.normal(size=n_clients)[groups]
    y = 3 * (X[:, 0] > 0.3) * (X[:, 1] > 0) + slopes * X[:, 1] + 0.3 * rng.normal(size=len(groups))
    return pd.DataFrame(X, columns=["a", "b"]), y, groups


def folds_of(n_rows, n_splits=3):
    return list(KFold(n_splits, shuffle=True, random_state=1).split(np.zeros(n_rows)))


def final(noise_variance=0.1, **params):
    """Personalized line with known variances, which takes no iterations."""
    params = {"prior": GaussianPrior(covariance=1.0), "unseen": "population"} | params
    return PersonalizedLinearRegression(noise_variance=noise_variance, **params)


def logit():
    return PersonalizedLogisticRegression(random="intercept", uncertainty="plug_in")


def stack(bases, **params):
    """Stack of little work."""
    params = {"final_estimator": final(), "cv": 3, "random_state": 0} | params
    return PersonalizedStackingRegressor(bases, **params)


def tree(**params):
    return DecisionTreeRegressor(min_samples_leaf=5, random_state=0, **params)


# What is fitted to what ---------------------------------------------------------------------------


def test_rows_of_the_final_estimator_are_out_of_fold():
    X, y, groups = steps_and_slopes()
    folds = folds_of(len(y))
    bases = [("trees", tree()), ("line", LinearRegression())]
    model = stack(bases, cv=folds, fallback=False, unseen="population")
    model.fit(X, y, groups=groups)
    beside = pd.DataFrame({name: cross_val_predict(each, X, y, cv=folds) for name, each in bases})
    peer = final().fit(beside.join(X), y, groups=groups)
    np.testing.assert_allclose(model.final_estimator_.coef_, peer.coef_, rtol=1e-9)
    assert model.final_estimator_.feature_names_in_.tolist() == ["trees", "line", "a", "b"]
    full = pd.DataFrame({name: clone(each).fit(X, y).predict(X) for name, each in bases})
    expected = peer.predict(full.join(X), groups=groups, return_std=True)
    found = model.predict(X, groups=groups, return_std=True)
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    assert (model.known_part_, model.new_part_) == ("stack", "stack")
    assert model.losses_.empty


def test_new_clients_have_the_population_of_another_fit():
    """Whose rows are predicted by fits to other clients."""
    X, y, groups = steps_and_slopes(n_rows=20)
    bases = [("trees", tree()), ("memory", ClientAsFeature(tree(), random_state=0))]
    model = stack(bases, fallback=False, unseen="population")
    model.fit(X, y, groups=groups)
    rows, new = X[:5], np.full(5, 99)
    inside = pd.DataFrame(
        {
            "trees": model.named_estimators_["trees"].predict(rows),
            "memory": model.named_estimators_["memory"].predict(rows, groups=new),
        }
    )
    peer = model.population_estimator_
    expected = peer.predict(inside.join(rows), groups=new, return_std=True)
    np.testing.assert_array_equal(model.predict(rows, groups=new, return_std=True), expected)
    assert np.abs(peer.coef_ - model.final_estimator_.coef_).max() > 0.01


def test_what_is_constant_within_clients_is_not_trusted_for_new_ones():
    """Trees tell the clients by it; the other columns say nothing."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(20), 15)
    X = np.column_stack([rng.normal(size=20)[groups], rng.normal(size=len(groups))])
    y = 3 * rng.normal(size=20)[groups] + 0.3 * rng.normal(size=len(groups))
    model = stack([("trees", tree())], unseen="population")
    model.fit(X, y, groups=groups)
    assert model.losses_.loc["trees", "known"] < 2 < 5 < model.losses_.loc["trees", "new"]
    assert not {"trees", "stack"} & model.parts_["new"].keys()
    new = model.predict(X, groups=np.full(len(y), -1))
    assert np.abs(new - y.mean()).max() < 2


@pytest.mark.parametrize(
    ("n_clients", "slope", "seed", "part"),
    [(10, 0.0, 8, "mean"), *slow([(4, 0.0, 6, "pooled"), (10, 2.0, 6, "pooled")])],
)
def test_the_better_of_mean_and_line_is_what_others_have_to_beat(n_clients, slope, seed, part):
    """With ten clients a line through columns of theirs is never clearly worse than the mean; with
    four there is no telling which of the two is better."""
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(n_clients), 8)
    X = rng.normal(size=(n_clients, 2))[groups]
    y = slope * X[:, 0] + rng.normal(size=n_clients)[groups] + 0.1 * rng.normal(size=len(groups))
    model = stack([("trees", tree())], cv=5).fit(X, y, groups=groups)
    better = model.losses_["new"][["pooled", "mean"]].idxmin()
    assert (model.new_part_, better) == (part, part if n_clients == 10 else "mean")


@settings(max_examples=12, deadline=None)
@given(sizes=st.lists(st.integers(1, 4), min_size=3, max_size=5), seed=st.integers(0, 100))
def test_fits_are_to_the_rows_outside_of_two_folds(sizes, seed):
    """Means of training rows say which these were."""
    rng = np.random.default_rng(seed)
    fold = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    y = 2.0 ** np.arange(len(fold))
    table = TableRows(np.zeros((len(y), 1)), y, fold, None)
    mean = InnerEstimator("mean", DummyRegressor(), None)
    folds = [(np.flatnonzero(fold != k), np.flatnonzero(fold == k)) for k in range(len(sizes))]
    (once,), _ = out_of_fold([(mean, (table, None))], folds, BatchMapper(1, 1))
    np.testing.assert_allclose(once, [y[fold != k].mean() for k in fold], rtol=1e-12)
    assert_means_outside_of_two(folds, table)


def test_splits_may_be_masks():
    X, y, groups = steps_and_slopes(n_clients=6, n_rows=15)
    splits = folds_of(len(y))
    masks = [tuple(np.isin(np.arange(len(y)), rows) for rows in pair) for pair in splits]
    model = stack([("line", Ridge())], cv=splits, fallback=False)
    expected = model.fit(X, y, groups=groups).predict(X, groups=groups)
    found = model.set_params(cv=masks).fit(X, y, groups=groups).predict(X, groups=groups)
    np.testing.assert_array_equal(found, expected)


def test_rows_that_a_splitter_leaves_out_stay_out():
    """Blocks of time, with a gap of a row before and after the one that is tested."""
    time, y = np.arange(12), 2.0 ** np.arange(12)
    folds = [
        (np.flatnonzero((time < first - 1) | (time > first + 4)), np.arange(first, first + 4))
        for first in (0, 4, 8)
    ]
    assert_means_outside_of_two(folds, TableRows(np.zeros((12, 1)), y, np.repeat([0, 1], 6), None))


def assert_means_outside_of_two(folds, table):
    mean = InnerEstimator("mean", DummyRegressor(), None)
    outside = out_of_two_folds([mean], (table, None), folds, BatchMapper(1, 1))
    for (train, _), (found,) in zip(folds, outside, strict=True):
        own = [next(kept for kept, test in folds if row in test) for row in train]
        expected = [table.y[np.intersect1d(train, kept)].mean() for kept in own]
        np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("n_splits", "noise", "seed", "how", "n_tested"),
    [(3, 0.2, 1, "stack", 1), *slow([(3, 0.7, 1, "rough", 2), (4, 0.5, 3, "stack", 3)])],
)
@pytest.mark.slow
def test_the_loss_of_the_stack_is_of_rows_that_nothing_saw(n_splits, noise, seed, how, n_tested):
    """It is tested in as many folds as it takes; a rough look may rule it out before."""
    X, y, groups = steps_and_slopes(n_rows=16)
    y = y + noise * np.random.default_rng(seed).normal(size=len(y))
    folds = folds_of(len(y), n_splits)
    bases = [("trees", tree()), ("own", final())]
    model = stack(bases, cv=folds).fit(X, y, groups=groups)
    outside = pd.DataFrame(index=range(len(y)), columns=["trees", "own"], dtype=float)
    for train, test in folds:
        for name, each in bases:
            kept = X.iloc[train], y[train], groups[train]
            outside.loc[test, name] = predictions(each, *kept, X.iloc[test], groups[test])
    losses = (outside - y[:, None]) ** 2
    for train, test in folds:
        kept = X.iloc[train], y[train], groups[train]
        inner = [(np.isin(train, a), np.isin(train, b)) for a, b in folds if b is not test]
        inside = pd.DataFrame(index=range(len(train)), columns=["trees", "own"], dtype=float)
        for name, each in bases:
            for _, out in inner:
                made = predictions(each, *(values[~out] for values in kept), *at(kept, out))
                inside.loc[out, name] = made
        rows = outside.iloc[test].join(X)
        for name, seen in (("stack", inside), ("rough", outside.iloc[train])):
            table = seen.reset_index(drop=True).join(kept[0].reset_index(drop=True))
            last = final().fit(table, kept[1], groups=kept[2])
            found = last.predict(rows, groups=groups[test])
            losses.loc[test, name] = (found - y[test]) ** 2
    plain = {
        "pooled": make_pipeline(StandardScaler(), Ridge()),
        "mean": DummyRegressor(),
        "final_estimator": final(),
    }
    parts = {name: np.empty(len(y)) for name in plain} | dict(outside.items())
    for train, test in folds:
        for name, each in plain.items():
            kept = X.iloc[train], y[train], groups[train]
            parts[name][test] = predictions(each, *kept, X.iloc[test], groups[test])
    errors = np.column_stack(list(parts.values())) - y[:, None]
    for train, test in folds:
        losses.loc[test, "mixture"] = (errors[test] @ weights_of_mixture(errors[train])) ** 2
    best = losses[model.losses_["known"].drop("stack")[["trees", "own", "mixture"]].idxmin()]
    judged = {k: np.concatenate([test for _, test in folds[:k]]) for k in range(1, n_splits + 1)}
    expected = {
        (name, k): best.mean() * losses[name][rows].mean() / best[rows].mean()
        for name in ("stack", "rough")
        for k, rows in judged.items()
    }
    found = model.losses_.loc["stack", "known"]
    assert found == pytest.approx(expected.pop((how, n_tested)), rel=1e-6)
    assert np.abs(np.array(list(expected.values())) - found).min() > 1e-3


def weights_of_mixture(errors):
    """Weights of the likeliest mixture, by a prior of a tenth of a row, without small weights."""
    largest, n_parts = np.abs(errors).max(), errors.shape[1]
    spread = 3 * ((errors / largest) ** 2).mean(axis=0).min()

    def objective(logits):
        weights = np.exp(logits) / np.exp(logits).sum()
        total = ((errors @ weights / largest) ** 2).sum() + spread
        return (len(errors) + 3) / 2 * np.log(total) - 0.1 * np.log(weights).mean()

    found = minimize(objective, np.zeros(n_parts), method="BFGS", options={"gtol": 1e-9}).x
    weights = np.exp(found) / np.exp(found).sum()
    kept = np.where(weights >= 0.02, weights, 0)
    return kept / kept.sum()


def at(rows, chosen=slice(None)):
    return rows[0][chosen], rows[2][chosen]


def predictions(estimator, X, y, groups, X_new, groups_new):
    if isinstance(estimator, PersonalizedLinearRegression):
        return clone(estimator).fit(X, y, groups=groups).predict(X_new, groups=groups_new)
    return clone(estimator).fit(X, y).predict(X_new)


@pytest.mark.slow
def test_clients_of_few_rows_do_not_give_away_what_is_to_be_predicted():
    """A final estimator that saw predictions made of the tested rows would do twice as well."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(100), 4)
    X = rng.normal(size=(len(groups), 1))
    y = rng.normal(size=100)[groups] + rng.normal(size=len(groups))
    folds = list(ClientKFold(4, random_state=0).split(X, groups=groups))
    line = PersonalizedLinearRegression(random="intercept", unseen="population")
    model = stack([("own", line)], final_estimator=line, cv=folds)
    model.fit(X, y, groups=groups)
    column = np.empty(len(y))
    for train, test in folds:
        column[test] = predictions(line, X[train], y[train], groups[train], X[test], groups[test])
    rows, seen = np.column_stack([column, X]), np.empty(len(y))
    for train, test in folds:
        seen[test] = predictions(
            line, rows[train], y[train], groups[train], rows[test], groups[test]
        )
    losses = model.losses_["known"]
    assert np.mean((seen - y) ** 2) < 0.7 * losses["own"]
    assert losses["stack"] > 0.99 * losses["own"]
    assert model.known_part_ == "final_estimator"


# What predicts ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_all_together_are_better_than_each():
    X, y, groups = steps_and_slopes(n_clients=60, n_rows=12)
    model = PersonalizedStackingRegressor(random_state=0).fit(X, y, groups=groups)
    losses = model.losses_["known"].dropna()
    assert "recent_targets" not in losses  # its folds do not go forward
    assert model.weights_["known"].idxmax() == "stack"
    assert losses["stack"] < 0.85 * losses.drop(["stack", "mixture"]).min()
    assert list(model.named_estimators_) == ["hgb", "hgb_client", "hgb_residual"]
    assert model.summary().loc[("fixed", "hgb_residual"), "estimate"] > 0.5


def test_a_linear_table_falls_back_to_the_final_estimator():
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(15), 10)
    X = rng.normal(size=(len(groups), 2))
    y = X[:, 0] + rng.normal(size=15)[groups] + rng.normal(size=len(groups))
    line = final(1.0, random="intercept")
    model = stack([("trees", tree(max_depth=1))], final_estimator=line, unseen="population")
    model.fit(X, y, groups=groups)
    alone = clone(line).fit(X, y, groups=groups)
    assert model.known_part_ == "final_estimator"
    assert model.estimators_ == []
    np.testing.assert_allclose(model.predict(X, groups=groups), alone.predict(X, groups=groups))


@pytest.mark.slow
def test_a_base_estimator_alone_has_the_error_of_its_folds():
    X, y, groups = steps_and_slopes(n_rows=60)
    y = np.where(X["a"] > 0, groups % 3, groups % 5)
    trees = HistGradientBoostingRegressor(max_iter=20, learning_rate=0.5, random_state=0)
    model = stack([("trees", ClientAsFeature(trees))]).fit(X, y, groups=groups)
    assert (model.known_part_, model.final_estimator_) == ("trees", None)
    mean, std = model.predict(X, groups=groups, return_std=True)
    np.testing.assert_array_equal(mean, model.estimators_[0].predict(X, groups=groups))
    np.testing.assert_allclose(std**2, model.losses_.loc["trees", "known"])
    with pytest.raises(ValueError, match=r"'trees', so.*no personalized model.*fallback=False"):
        model.summary()


@pytest.mark.parametrize(
    ("losses", "chosen"),
    [
        ({"simple": [2.0, 2, 2], "best": [1, 1, 1]}, "best"),  # for all of them
        ({"simple": [1.0, 1, 2], "best": [1, 1, 1]}, "simple"),  # for one of three
        ({"simple": [1.0, 2, 2], "best": [1, 1, 1]}, "best"),
        ({"first": [1.0, 1, 1], "second": [1, 1, 1]}, "first"),
        ({"bad": [9.0, 9, 9], "simple": [2, 2, 0.5], "best": [1, 1, 1]}, "simple"),
    ],
)
def test_the_first_part_that_is_not_clearly_worse(losses, chosen):
    """By clients, of which there are three, with two rows each."""
    codes = np.repeat(np.arange(3), 2)
    rows = {name: np.repeat(each, 2) for name, each in losses.items()}
    assert simplest_not_worse(rows, None, codes) == chosen
    assert simplest_not_worse(rows, np.full(6, 2.0), codes) == chosen


class Counted(DecisionTreeRegressor):
    """Tree that counts how often it was fitted."""

    n_fits = 0

    def fit(self, X, y, sample_weight=None, check_input=True):
        Counted.n_fits += 1
        return super().fit(X, y, sample_weight, check_input)


@pytest.mark.parametrize(
    ("noise", "seed", "n_fits", "wins"),
    [
        (0.5, 3, 5 + 5 + 4 + 3, True),
        *slow([(4.0, 0, 5 + 5, False), (0.8, 2, 5 + 5 + 4 + 3 + 2 + 1, False)]),
    ],
)
def test_clear_choices_save_fits_of_base_estimators(noise, seed, n_fits, wins):
    X, y, groups = steps_and_slopes(n_rows=20)
    y = y + noise * np.random.default_rng(seed).normal(size=len(y))
    trees = Counted(min_samples_leaf=10, random_state=0)
    model = stack([("trees", trees)], final_estimator=final(0.1 + noise**2), cv=5)
    before = Counted.n_fits
    model.fit(X, y, groups=groups)
    weight = model.weights_["known"].get("stack", 0.0)
    assert weight > 0.75 if wins else weight == 0
    assert "stack" not in model.parts_["new"]
    assert Counted.n_fits - before == n_fits + ("trees" in model.named_estimators_)


def folds_seen(own, other, codes=None, weights=None, n_folds=5, error=0.0):
    """Folds that a choice between rows' losses takes, at a rough look (with an error) and after it,
    whether the one wins, and its mean loss."""
    tests, seen = np.array_split(np.arange(len(own)), n_folds), []

    def losses_in(k, rough=False):
        seen.append(rough)
        return own[tests[k]] + rough * error

    loss, wins = compare_by_fold("own", losses_in, {"other": other}, tests, weights, codes)
    return seen.count(True), seen.count(False), wins, loss


def test_choices_take_as_many_folds_as_it_takes():
    rng = np.random.default_rng(0)
    other = rng.chisquare(3, 500)
    noise = rng.normal(size=500)
    noise -= np.repeat([noise[k : k + 100].mean() for k in range(0, 500, 100)], 100)
    better, worse = other - 0.5 + noise, other + 0.5 + noise
    assert folds_seen(better, other)[:3] == (1, 1, True)
    assert folds_seen(worse, other)[:3] == (1, 0, False)  # clearly worse
    assert folds_seen(worse, other, error=-1.0)[:3] == (1, 1, False)
    assert folds_seen(other + 0.01 + noise, other)[:3] == (2, 0, False)  # no better in two
    assert folds_seen(other + 0.01 + noise, other, error=-0.02)[:3] == (2, 2, False)
    assert folds_seen(other - 0.03 + noise, other)[:3] == (2, 5, False)  # not clearly better
    assert folds_seen(other - 0.08 + noise, other)[:3] == (2, 5, True)
    assert folds_seen(worse, other, n_folds=20)[:2] == (2, 0)  # 25 rows are too few
    assert folds_seen(worse, other, np.repeat([0, 1, 2, 3, 4], 100))[:2] == (2, 0)
    heavy = np.where(np.arange(500) % 100, 1e-9, 1.0)  # one row a fold has all of the weight
    assert folds_seen(worse, other, weights=heavy)[:2] == (2, 5)
    own = np.full(500, 0.4)
    loss = folds_seen(own, other)[3]
    assert loss == pytest.approx(other.mean() * 0.4 / other[:100].mean())


def test_losses_of_zero():
    """Trees that are always right cannot be beaten."""
    zero, own = np.zeros(500), np.full(500, 0.1)
    assert folds_seen(own, zero) == (1, 0, False, pytest.approx(0.1))
    assert folds_seen(zero, zero)[2:] == (False, 0.0)
    X, _, groups = steps_and_slopes(6, 20)
    X = X + 0.5 * np.sign(X)
    bases, last = [("tree", DecisionTreeClassifier())], LogisticRegression()
    model = PersonalizedStackingClassifier(bases, last, cv=3, random_state=0)
    model.fit(X, X["a"] > 0, groups=groups)
    assert (model.known_part_, model.losses_.loc["tree", "known"]) == ("tree", 0.0)


def test_nothing_is_clear_in_one_row():
    losses = {"simple": np.array([2.0]), "best": np.array([1.0])}
    assert simplest_not_worse(losses, None) == "simple"


@pytest.mark.parametrize("codes", [None, np.repeat(np.arange(10), 5)])
def test_losses_that_differ_by_rounding_are_the_same(codes):
    """Else the last bits would say which of two equal candidates predicts."""
    losses = 1 + 0.01 * np.random.default_rng(0).normal(size=50)
    both = {"simple": losses, "mixed": losses * (1 - 1e-12)}
    assert simplest_not_worse(both, None, codes) == "simple"


def test_for_known_clients_rows_are_drawn():
    """A part that is far better for one of three clients, in all of its many rows."""
    codes = np.repeat(np.arange(3), 50)
    noise = 0.1 * np.random.default_rng(0).random(150)
    losses = {"simple": np.where(codes == 2, 2.0, 1.0) + noise, "best": np.ones(150)}
    assert simplest_not_worse(losses, None) == "best"
    assert simplest_not_worse(losses, None, codes) == "simple"


def test_two_clients_have_no_stack_for_new_ones():
    X, y, groups = steps_and_slopes(n_clients=2)
    model = stack([("trees", tree())]).fit(X, y, groups=groups)
    assert "stack" in model.losses_["known"].dropna()
    assert "stack" not in model.losses_["new"].dropna()


def test_one_client_has_one_model():
    X, y, _ = steps_and_slopes(n_clients=1, n_rows=120)
    model = stack([("trees", tree())])
    with pytest.warns(SingleClientWarning):
        model.fit(X, y)
    assert list(model.losses_) == ["known"]
    assert model.new_part_ == model.known_part_
    assert model.population_estimator_ == model.final_estimator_
    assert np.mean((model.predict(X) - y) ** 2) < 0.5 * y.var()


def labels(n_classes=2, **sizes):
    X, y, groups = steps_and_slopes(**sizes)
    names = np.array(["high", "low", "middle"])
    return X, names[np.digitize(y, [1.0] if n_classes == 2 else [-0.5, 1.5])], groups


@pytest.mark.slow
def test_a_classifier_stacks_log_odds():
    X, y, groups = labels()
    folds = folds_of(len(y))
    base = HistGradientBoostingClassifier(max_iter=10, random_state=0)
    model = PersonalizedStackingClassifier([("trees", base)], cv=folds, fallback=False)
    model.fit(X, y, groups=groups)
    chances = cross_val_predict(base, X, y, cv=folds, method="predict_proba")
    beside = pd.DataFrame({"trees": np.log(chances[:, 1] / chances[:, 0])}).join(X)
    peer = PersonalizedLogisticRegression(random="all").fit(beside, y, groups=groups)
    np.testing.assert_allclose(model.final_estimator_.coef_, peer.coef_, rtol=1e-6)
    full = clone(base).fit(X, y).predict_proba(X)
    rows = pd.DataFrame({"trees": np.log(full[:, 1] / full[:, 0])}).join(X)
    expected = peer.predict_proba(rows, groups=groups, integrate=True)
    found = model.predict_proba(X, groups=groups)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_allclose(np.exp(model.predict_log_proba(X, groups=groups)), found)
    likeliest = model.classes_[found.argmax(axis=1)]
    np.testing.assert_array_equal(model.predict(X, groups=groups), likeliest)
    assert model.score(X, y, groups=groups) > 0.8


def test_several_classes():
    X, y, groups = labels(n_classes=3, n_rows=20)
    trees = DecisionTreeClassifier(min_samples_leaf=5, random_state=0)
    model = PersonalizedStackingClassifier([("tree", trees)], logit(), cv=3, fallback=False)
    model.set_params(random_state=0).fit(X, y, groups=groups)
    names = model.final_estimator_.feature_names_in_.tolist()
    assert names[:2] == ["tree: low", "tree: middle"]
    assert model.predict_proba(X, groups=groups).shape == (len(y), 3)
    assert model.score(X, y, groups=groups) > 0.7


@pytest.mark.parametrize("n_clients", [2, *slow([1, 3])])
@pytest.mark.filterwarnings("ignore::pfl_sklearn.UnseenClientsWarning")
@pytest.mark.filterwarnings("ignore::pfl_sklearn.linear_model.SeparationWarning")
@pytest.mark.slow
def test_a_few_clients_of_classes(n_clients):
    """Folds may leave one client, whose fit knows no variance between clients."""
    X, y, groups = steps_and_slopes(n_clients, 12)
    model = PersonalizedStackingClassifier([("own", logit())], logit(), cv=3, random_state=0)
    model.fit(X, y > 0.5, groups=groups)
    assert np.isfinite(model.losses_["known"].dropna()).all()
    assert np.isfinite(model.predict_proba(X[:3], groups=[9, 9, 9])).all()


@pytest.mark.slow
def test_a_class_that_folds_lack():
    """One client alone has it: fits to the others give it no chance."""
    X, y, groups = labels(n_clients=6, n_rows=15)
    y = np.where((groups == 3) & (y == "low"), "rare", y)
    model = PersonalizedStackingClassifier([("line", LogisticRegression())], logit(), cv=3)
    model.set_params(random_state=0, unseen="population").fit(X, y, groups=groups)
    assert model.classes_.tolist() == ["high", "low", "rare"]
    assert np.isfinite(model.losses_.loc["line"]).all()
    assert np.isfinite(model.losses_.loc["stack", "known"])
    assert np.isfinite(model.predict_proba(X, groups=groups + 100)).all()


# With others --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small():
    """Rows of named clients, and a model of little work."""
    X, y, groups = steps_and_slopes(n_clients=6, n_rows=15)
    model = stack([("trees", tree()), ("line", Ridge())])
    return X, y, np.array([f"s{k}" for k in groups]), model


@pytest.mark.slow
def test_in_tools_of_scikit_learn(small):
    X, y, groups, model = small
    table = X.assign(site=groups)
    wrapped = ClientColumn(clone(model).set_params(fallback=False), "site")
    inside = ClientKFold(2, client_column="site", random_state=0)
    found = cross_val_predict(wrapped, table, y, cv=inside)
    assert np.mean((found - y) ** 2) < y.var()
    scores = cross_validate(wrapped, table, y, cv=inside, scoring="neg_mean_squared_error")
    assert scores["test_score"].mean() == pytest.approx(-np.mean((found - y) ** 2))
    names = ["trees__max_depth", "final_estimator__prior__covariance"]
    grid = {f"estimator__{name}": [2] for name in names}
    search = GridSearchCV(wrapped, grid, cv=inside, refit=False).fit(table, y)
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()


def test_parameters_inside_have_names():
    model = PersonalizedStackingRegressor()
    model.set_params(hgb__max_depth=3, hgb_client__estimator__max_iter=7)
    inside = dict(model.estimators)
    assert (inside["hgb"].max_depth, inside["hgb_client"].estimator.max_iter) == (3, 7)
    assert clone(model).get_params()["hgb__max_depth"] == 3
    model.set_params(hgb="drop", final_estimator__random="intercept")
    assert dict(model.estimators)["hgb"] == "drop"
    assert model.final_estimator.random == "intercept"
    other = PersonalizedStackingRegressor()
    with pytest.raises(ValueError, match="Invalid parameter 'depth'"):
        other.set_params(hgb__depth=3)
    assert other.estimators is None


def test_parameters_inside_the_default_estimators_after_others():
    model = PersonalizedStackingRegressor([("line", Ridge())])
    model.set_params(estimators=None, hgb__max_depth=3)
    assert dict(model.estimators)["hgb"].max_depth == 3
    with pytest.raises(ValueError, match="nothing"):
        model.set_params(estimators=None, hgb__nothing=3)
    assert dict(model.estimators)["hgb"].max_depth == 3


def test_standard_deviations_behind_a_routed_pipeline(small):
    X, y, groups, model = small
    table = X.assign(site=groups)
    routed = make_pipeline(StandardScaler(), clone(model).set_params(fallback=False))
    piped = ClientColumn(routed, column="site").fit(table, y)
    mean, std = piped.predict(table, return_std=True)
    np.testing.assert_array_equal(mean, piped.predict(table))
    assert (std > 0).all()


@pytest.mark.slow
def test_client_aware_estimators_get_the_clients(small):
    X, y, groups, _ = small
    bases = [
        ("own", make_pipeline(StandardScaler(), final())),
        ("searched", search_inside()),
        ("line", LinearRegression()),
    ]
    model = stack(bases, cv=2, fallback=False).fit(X, y, groups=groups)
    assert len(model.named_estimators_["own"][-1].clients_) == 6
    own = model.for_client("s2")
    assert own.named_estimators_["own"][-1].clients_.tolist() == ["s2"]
    assert own.named_estimators_["searched"].clients_.tolist() == ["s2"]
    mine = groups == "s2"
    expected = model.predict(X[mine], groups=groups[mine])
    np.testing.assert_allclose(own.predict(X[mine]), expected, rtol=1e-12)


def search_inside():
    with config_context(enable_metadata_routing=True):
        inner = final().set_score_request(groups=True)
        grid = {"noise_variance": [0.1, 1.0]}
        return GridSearchCV(inner, grid, cv=ClientKFold(2, random_state=0))


def test_a_search_at_the_end(small):
    X, y, groups, _ = small
    model = PersonalizedStackingRegressor(
        [("line", Ridge())], search_inside(), cv=3, random_state=0, fallback=False
    )
    model.fit(X, y, groups=groups)
    best = model.final_estimator_.best_estimator_
    pd.testing.assert_frame_equal(model.summary(), best.summary())
    mean, std = model.predict(X, groups=groups, return_std=True)
    own = model.for_client("s2")
    assert own.final_estimator_.coef_.shape == (1, 3)
    mine = groups == "s2"
    found = own.predict(X[mine], return_std=True)
    np.testing.assert_allclose(found, (mean[mine], std[mine]), rtol=1e-12)


def test_frozen_estimators_are_not_fitted_again():
    """New clients are strangers to them, whoever they know."""
    X, y, groups = steps_and_slopes(n_clients=6, n_rows=15)
    own = final().fit(X, y + 5 * groups, groups=groups)
    bases = [("own", FrozenEstimator(own)), ("line", Ridge())]
    model = stack(bases, unseen="population")
    model.fit(X, y + 5 * groups, groups=groups, sample_weight=np.ones(len(y)))
    loss = (own.predict(X, groups=groups) - y - 5 * groups) ** 2
    assert model.losses_.loc["own", "known"] == pytest.approx(loss.mean(), rel=1e-12)
    loss = (own.predict(X, groups=np.full(len(y), 99)) - y - 5 * groups) ** 2
    assert model.losses_.loc["own", "new"] == pytest.approx(loss.mean(), rel=1e-12)
    assert model.losses_.loc["own", "new"] > 10 * model.losses_.loc["own", "known"]


def test_what_is_handed_out_holds_no_seed_of_the_server(small):
    X, y, groups, _ = small
    last = final(epsilon=1.0, noise_variance=1.0, feature_bound=9.0, target_bound=9.0)
    last.set_params(prior=GaussianPrior(mean=0.0, covariance=1.0), random_state=7)
    model = PersonalizedStackingRegressor([("line", Ridge())], last, cv=3, fallback=False)
    model.fit(X, y, groups=groups)
    one = model.for_client("s2")
    assert one.final_estimator.estimator.random_state is None
    np.testing.assert_array_equal(one.predict(X[:3]), model.predict(X[:3], groups=["s2"] * 3))


@pytest.mark.filterwarnings("ignore::pfl_sklearn.SingleClientWarning")
def test_a_frozen_final_estimator_knows_no_new_clients():
    X, y, groups = steps_and_slopes(n_clients=6, n_rows=15)
    last = final().fit(X, y + 5 * groups, groups=groups)
    model = PersonalizedStackingRegressor([("line", Ridge())], FrozenEstimator(last), cv=3)
    model.set_params(random_state=0, unseen="population", fallback=False)
    model.set_params(estimators=[("a", Ridge()), ("b", Ridge())], passthrough=False)
    model.fit(X, y, groups=groups)
    rows = pd.DataFrame({name: model.named_estimators_[name].predict(X) for name in "ab"})
    for ids in (groups, groups + 100):
        expected = last.predict(rows, groups=ids)
        np.testing.assert_allclose(model.predict(X, groups=ids), expected, rtol=1e-12)
    with pytest.raises(ValueError, match=r"'final_estimator' is a frozen model of 6 .*no groups="):
        clone(model).fit(X, y)


def test_what_is_handed_out_of_frozen_estimators_names_no_other_client():
    """A clone of a frozen one is itself; one that never knew this client has its population."""
    X, y, groups = steps_and_slopes(n_clients=6, n_rows=15)
    ids = np.array([f"patient-{k}-secret" for k in groups], dtype=object)
    own, last = (final().fit(rows, y, groups=ids) for rows in (X, X[["a"]]))
    others = final().fit(X, y, groups=np.array([f"other-{k}-secret" for k in groups]))
    bases = [("a", FrozenEstimator(own)), ("others", FrozenEstimator(others))]
    splits = folds_of(len(y))
    model = stack(bases, cv=splits, passthrough=False, fallback=False)
    model.fit(X, y, groups=ids)
    one = model.for_client("patient-3-secret")
    mine = ids == "patient-3-secret"
    expected = model.predict(X[mine], groups=ids[mine])
    np.testing.assert_allclose(one.predict(X[mine], groups=ids[mine]), expected, rtol=1e-9)
    found = pickle.dumps(one)
    assert b"patient-3-secret" in found and b"other-" not in found
    assert not any(f"patient-{k}-secret".encode() in found for k in range(6) if k != 3)
    model.set_params(estimators=bases[:1], final_estimator=FrozenEstimator(last))
    found = pickle.dumps(model.fit(X, y, groups=ids).for_client("patient-3-secret"))
    assert not any(f"patient-{k}-secret".encode() in found for k in range(6) if k != 3)


@pytest.mark.slow
def test_errors_of_new_clients_are_their_own():
    """One base estimator predicts for all, and knows the clients."""
    X, y, groups = steps_and_slopes()
    y = groups * 1.0
    bases = [("trees", ClientAsFeature(boosting()))]
    model = stack(bases, passthrough=False)
    model.set_params(unseen="population").fit(X, y, groups=groups)
    model.parts_ = {"known": {"trees": None}, "new": {"trees": None}}
    model.weights_ = pd.DataFrame(1.0, index=["trees"], columns=["known", "new"])
    model.named_estimators_["trees"] = clone(bases[0][1]).fit(X, y, groups=groups)
    model.named_estimators_["trees"].set_params(unseen="population")
    known, new = (model.predict(X[:1], groups=[k], return_std=True)[1][0] for k in (0, 99))
    losses = model.losses_.loc["trees"]
    np.testing.assert_allclose([known**2, new**2], losses[["known", "new"]])
    assert new > 2 * known


@pytest.mark.slow
def test_jobs_change_nothing(small):
    X, y, groups, model = small
    first = clone(model).fit(X, y, groups=groups)
    other = clone(model).set_params(n_jobs=2).fit(X, y, groups=groups)
    pd.testing.assert_frame_equal(first.losses_, other.losses_, check_exact=True)
    np.testing.assert_array_equal(first.predict(X, groups=groups), other.predict(X, groups=groups))


@pytest.mark.slow
def test_weights_count_everywhere(small):
    """A row of weight 0 is absent, and weights change what is learned."""
    X, y, groups, model = small
    weights = np.random.default_rng(0).integers(0, 3, len(y))
    some = weights > 0
    kept = {"groups": groups[some], "sample_weight": weights[some]}
    model = clone(model).set_params(line="drop")
    first = clone(model).fit(X, y, groups=groups, sample_weight=weights)
    second = clone(model).fit(X[some], y[some], **kept)
    pd.testing.assert_frame_equal(first.losses_, second.losses_)
    plain = clone(model).fit(X[some], y[some], groups=groups[some])
    assert np.abs(plain.losses_ - second.losses_).max(axis=None) > 1e-3
    near = clone(model).set_params(line=KNeighborsRegressor())
    with pytest.raises(ValueError, match=r"'line' \(KNeighborsRegressor\) does not take it"):
        near.fit(X, y, groups=groups, sample_weight=weights)


def test_unseen_clients(small):
    X, y, groups, model = small
    model = clone(model).fit(X, y, groups=groups)
    with pytest.warns(UnseenClientsWarning):
        everybody = model.predict(X, groups=["new"] * len(X))
    mixed = np.where(groups == "s1", "new", groups)
    found = model.predict(X, groups=mixed)
    new = mixed == "new"
    np.testing.assert_allclose(found[new], everybody[new], rtol=1e-12)
    known = model.predict(X, groups=groups)
    np.testing.assert_allclose(found[~new], known[~new], rtol=1e-12)


# Columns ------------------------------------------------------------------------------------------


def mixed_columns(**sizes):
    X, y, groups = steps_and_slopes(**sizes)
    X["partial"] = X["a"].where(X["a"] > -1)
    X["kind"] = pd.Categorical(np.where(X["b"] > 0, "up", "down"))
    X["flag"] = X["a"] > 0
    return X, y, groups


def test_the_final_estimator_sees_every_column():
    X, y, groups = mixed_columns()
    model = stack([("trees", boosting())], fallback=False).fit(X, y, groups=groups)
    names = ["trees", "a", "b", "partial", "partial_missing", "kind_up", "flag"]
    assert model.final_estimator_.feature_names_in_.tolist() == names
    assert model.feature_names_in_.tolist() == list(X)
    assert np.isfinite(model.predict(X.assign(b=np.nan, kind="new"), groups=groups)).all()


@pytest.mark.slow
def test_strings_are_categories_of_the_default_trees():
    X, y, groups = mixed_columns(n_clients=6, n_rows=20)
    inside = ("hgb", "hgb_client__estimator", "hgb_residual__residual_estimator")
    found, few = [], {f"{name}__max_iter": 5 for name in inside}
    for kind in ("category", "str"):
        frame = X.assign(kind=X["kind"].astype(kind))
        model = stack(None, cv=2, fallback=False).set_params(**few)
        found.append(model.fit(frame, y, groups=groups).predict(frame, groups=groups))
    polars = pl.DataFrame({name: frame[name].to_list() for name in frame})
    found.append(model.fit(polars, y, groups=groups).predict(polars, groups=groups))
    np.testing.assert_array_equal(found[1], found[0])
    np.testing.assert_array_equal(found[2], found[0])
    assert np.isfinite(model.predict(polars.with_columns(kind=pl.lit("new")), groups=groups)).all()


def test_a_column_that_is_left_out_is_named():
    X, y, groups = steps_and_slopes()
    X["day"] = [[1, 2]] * len(X)
    trees = make_pipeline(make_column_transformer(("passthrough", ["a", "b"])), tree())
    model = stack([("trees", trees)], fallback=False)
    with pytest.warns(UserWarning, match=r"leaves out columns of X: 'day' \(it holds mixed values"):
        model.fit(X, y, groups=groups)
    assert model.final_estimator_.feature_names_in_.tolist() == ["trees", "a", "b"]


def test_other_frames_and_arrays():
    X, y, groups = steps_and_slopes()
    found, model = [], stack([("trees", tree())], fallback=False)
    columns = {name: X[name].to_numpy() for name in X}
    for rows in (X, pl.DataFrame(columns), X.to_numpy(), pa.table(columns)):
        model.fit(rows, y, groups=groups)
        found.append(model.predict(rows, groups=groups))
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=1e-12)


@pytest.mark.filterwarnings("ignore:X has feature names", "ignore:X does not have valid feature")
def test_a_frame_in_place_of_an_array():
    """And the other way round; scikit-learn warns of both."""
    X, y, groups = steps_and_slopes()
    model = stack([("line", Ridge())], fallback=False)
    first = model.fit(X, y, groups=groups).predict(X, groups=groups)
    np.testing.assert_allclose(model.predict(X.to_numpy(), groups=groups), first)
    model.fit(X.to_numpy(), y, groups=groups)
    np.testing.assert_allclose(model.predict(X, groups=groups), first)


def test_a_transformer_makes_the_columns():
    X, y, groups = steps_and_slopes()
    X["kind"] = np.where(X["b"] > 0, "up", "down")
    made = make_column_transformer(
        (OneHotEncoder(drop="first"), ["kind"]), (StandardScaler(), ["a"])
    )
    trees = make_pipeline(make_column_transformer(("passthrough", ["a", "b"])), tree())
    model = stack([("trees", trees)], passthrough=made, fallback=False)
    model.fit(X, y, groups=groups)
    names = model.final_estimator_.feature_names_in_.tolist()
    assert names == ["trees", "onehotencoder__kind_up", "standardscaler__a"]


def test_without_columns_there_are_predictions_alone():
    X, y, groups = steps_and_slopes()
    model = stack([("trees", tree())], passthrough=False).fit(X, y, groups=groups)
    assert list(model.losses_.index) == ["mean", "trees", "mixture", "stack"]


@pytest.mark.parametrize("unit", [1.0, 1e-4, 1e4])
def test_bad_parts_do_not_hide_which_part_is_good(unit):
    rng = np.random.default_rng(0)
    own = rng.normal(size=100)
    others = np.array([1000, 1000, 500])[:, None] * rng.normal(size=(3, 100))
    values = np.column_stack([*others, own, 1.3 * own + 0.5 * rng.normal(size=100)])
    errors = CandidateErrors(values, False, np.zeros(100, dtype=int), np.full(100, unit), 1)
    weights = best_mixture(errors)
    assert weights[3] > 0.99
    assert ((values @ weights) ** 2).mean() < 1.01 * (own**2).mean()


@pytest.mark.slow
def test_parameters_of_default_estimators_leave_them_default_ones():
    """They get the encoded table, and new clients the same ones."""
    X, y, groups = mixed_columns(n_clients=6, n_rows=20)
    model = stack(None, cv=2, fallback=False, unseen="population")
    found = clone(model).set_params(hgb__max_iter=150).fit(X, y, groups=groups)
    model.fit(X, y, groups=groups)
    for ids in (groups, groups + 99):
        np.testing.assert_array_equal(found.predict(X, groups=ids), model.predict(X, groups=ids))


@pytest.mark.slow
def test_a_report_says_that_promises_inside_are_not_kept():
    X, y, groups = steps_and_slopes(n_clients=4, n_rows=20)
    private = PPSGDRegressor(epsilon=1.0, delta=1e-5, n_rounds=2, random_state=0)
    bases = [("private", private), ("line", LinearRegression())]
    model = PersonalizedStackingRegressor(bases, cv=3, fallback=False)
    with pytest.warns(UserWarning):
        model.fit(X, y, groups=groups)
    assert "whatever the estimators inside it promise alone" in model.privacy_.warnings[0]
    model.set_params(private="drop").fit(X, y, groups=groups)
    assert list(model.named_estimators_) == ["line"]
    assert str(model.privacy_).startswith("No privacy was asked for")


def test_a_table_without_columns_for_trees_is_refused():
    _, y, groups = steps_and_slopes(n_clients=4, n_rows=20)
    X = pd.DataFrame({"day": [[1, 2]] * len(y)})
    with pytest.warns(UserWarning, match="leaves out"), pytest.raises(ValueError, match="'day'"):
        PersonalizedStackingRegressor().fit(X, y, groups=groups)


# Bad input ----------------------------------------------------------------------------------------


class Odd(RegressorMixin, BaseEstimator):
    """A regressor that predicts NaN for one row."""

    def fit(self, X, y):
        self.fitted_ = True
        return self

    def predict(self, X):
        return np.append(np.zeros(len(X) - 1), np.nan)


def refused(model, words, X, y, kind=ValueError, **given):
    before = dict(vars(model))
    with pytest.raises(kind, match=words):
        model.fit(X, y, **given)
    assert vars(model) == before


class Wide(Odd):
    """A regressor of two responses."""

    def predict(self, X):
        return np.zeros((len(X), 2))


class Chances(ClassifierMixin, BaseEstimator):
    """A classifier with given probabilities, and a step through its classes."""

    def __init__(self, columns=(0.5, 0.5), step=1):
        self.columns, self.step = columns, step

    def fit(self, X, y):
        self.classes_ = np.unique(y)[:: self.step]
        return self

    def predict(self, X):
        return np.full(len(X), self.classes_[0])

    def predict_proba(self, X):
        return np.tile(self.columns, (len(X), 1))


@pytest.mark.parametrize(
    ("base", "words"),
    [
        (Odd(), r"\(Odd\) predicted nan for 1 of \d+ rows; expected finite"),
        (Wide(), r"\(Wide\) predicted an array of shape \(160, 2\); expected \(160,\)"),
        (Chances(step=-1), r"\(Chances\) has classes_=\['low', 'high'\]; expected .* sorted order"),
        (
            Chances((1.5, 1.5)),
            r"\(Chances\) predicted probabilities \[1.5, 1.5\] for 96 of 96 rows",
        ),
        (Chances((1.5, -0.5)), r"\(Chances\) predicted probabilities \[1.5, -0.5\] for 96 of 96"),
        (Chances((0.5, 0.3, 0.2)), r"\(Chances\) .* shape \(96, 3\); expected \(96, 2\)"),
        (LinearSVC(), ".*LinearSVC.*no predict_proba; expected a classifier that has it"),
    ],
    ids=repr,
)
def test_predictions_that_no_stack_can_use(base, words):
    of_classes = is_classifier(base)
    X, y, groups = labels() if of_classes else steps_and_slopes()
    model = PersonalizedStackingClassifier([("it", base)]) if of_classes else stack([("it", base)])
    refused(model, f"'it'.*{words}", X, y, groups=groups)


@pytest.mark.parametrize("missing", [None, np.nan])
def test_missing_labels(missing):
    X, y, groups = labels()
    y = np.append([missing] * 3, y[3:].astype(object))
    refused(PersonalizedStackingClassifier(), "y has 3 missing labels", X, y, groups=groups)


class Needy(Odd):
    """A regressor that needs client ids, but does not say so."""

    def fit(self, X, y, groups):
        return self


def test_estimators_that_need_ids_but_do_not_request_them():
    X, y, groups = steps_and_slopes()
    model = PersonalizedStackingRegressor([("needy", Needy()), ("line", Ridge())])
    words = r"'needy' \(Needy\) failed in one of the folds, on .*argument: 'groups'"
    refused(model, words, X, y, TypeError, groups=groups)


def test_names_of_classes_that_are_columns():
    X, y, groups = labels(n_classes=3)
    model = PersonalizedStackingClassifier([("line", LogisticRegression())])
    words = "have the name 'line: low', and a column of X"
    refused(model, words, X.rename(columns={"b": "line: low"}), y, groups=groups)


def test_lists_of_splits_of_rows_without_weight():
    X, y, groups = steps_and_slopes()
    weights = np.ones(len(y))
    weights[:5] = 0
    model = PersonalizedStackingRegressor([("line", Ridge())], cv=folds_of(len(y)))
    words = "list of splits of 480 rows, but only 475 have a positive sample_weight"
    refused(model, words, X, y, groups=groups, sample_weight=weights)


def test_no_folds_and_rows_without_weight():
    """None stands for five folds, not for a list of splits."""
    X, y, groups = steps_and_slopes(n_clients=6, n_rows=15)
    weights = np.ones(len(y))
    weights[:5] = 0
    model = stack([("line", Ridge())], fallback=False)
    five, none = (
        clone(model).set_params(cv=cv).fit(X, y, groups=groups, sample_weight=weights)
        for cv in (5, None)
    )
    np.testing.assert_array_equal(none.predict(X, groups=groups), five.predict(X, groups=groups))


def test_a_wrapper_that_cannot_hand_out_one_client(small):
    X, y, groups, _ = small
    wrapped = TransformedTargetRegressor(final())
    model = stack([("own", wrapped)], fallback=False).fit(X, y, groups=groups)
    with pytest.raises(ValueError, match=r"TransformedTargetRegressor, .* has no for_client"):
        model.for_client("s2")


def test_final_estimators_without_standard_deviations(small):
    X, y, groups, _ = small
    model = PersonalizedStackingRegressor([("line", Ridge())], Ridge(), cv=3, fallback=False)
    model.fit(X, y, groups=groups)
    with pytest.raises(ValueError, match=r"return_std=True needs .* Ridge\.predict does not"):
        model.predict(X, groups=groups, return_std=True)


def test_clients_of_one_row():
    X, y, _ = steps_and_slopes()
    words = "each of the 480 clients has one row"
    refused(PersonalizedStackingRegressor(), words, X, y, groups=np.arange(len(y)))


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"estimators": []}, "must have at least one that is not dropped"),
        ({"estimators": [("a", "drop")]}, "must have at least one that is not dropped"),
        ({"estimators": [LinearRegression()]}, r"list of \(name, estimator\); got LinearReg"),
        ({"estimators": [("a", LogisticRegression())]}, "'a', LogisticRegression.*a regressor"),
        ({"estimators": [("stack", Ridge())]}, "the name 'stack', which is reserved"),
        ({"estimators": [("b", Ridge())]}, "have the name 'b', and a column of X"),
        ({"estimators": [("cv", Ridge())]}, "conflict with constructor arguments.*cv"),
        ({"cv": 2}, "cv=2 gives 2 folds, but fallback=True needs at least 3"),
        ({"cv": [([0, 1], [2, 3])]}, "tests 478 of 480 rows never or more than once"),
        ({"cv": [([0, 1], [1, 2])]}, "fold 0 of cv has 2 rows to fit and 2 .* 1 are the same"),
        ({"cv": [([], [1, 2])]}, "fold 0 of cv has 0 rows to fit and 2 to test"),
        ({"cv": [([0, 1], [2, 480])]}, "cv has row 480; expected positions from 0 to 479"),
        ({"cv": [([0, 1], [-1])]}, "cv has row -1; expected positions from 0 to 479"),
        ({"cv": [([0, 1], [2], [3])]}, "fold 0 of cv has 3 parts; expected the rows to fit and"),
        ({"cv": [([True, False], [2])]}, "type bool and shape .2,.; expected .* mask of 480"),
        ({"cv": [([0.5, 1], [2])]}, "type float64 and shape .2,.; expected positions"),
        ({"cv": [([1, 1], [2])]}, "cv has row 1 more than once"),
        ({"cv": (fold for fold in ())}, "cv=<generator .* is used up after one fit"),
        ({"passthrough": 3}, "'passthrough' parameter"),
        ({"passthrough": TargetEncoder()}, "could not be fitted without y: .* inside an esti"),
        ({"estimators": [("a", "dropp"), ("c", Ridge())]}, "has 'a', 'dropp'; expected a regr"),
        ({"estimators": [("a", None), ("c", Ridge())]}, "has 'a', None; expected a regressor"),
        (
            {"final_estimator": PersonalizedLogisticRegression()},
            "final_estimator=PersonalizedLogisticRegression.*expected a regressor",
        ),
        (
            {"final_estimator": ClientColumn(final(), "a")},
            "final_estimator is given, a ClientColumn, but here client ids are passed on as groups",
        ),
        (
            {"final_estimator": PPSGDRegressor(checkpoint="file")},
            "final_estimator is given with checkpoint='file', but it is fitted in several folds",
        ),
    ],
)
def test_bad_parameters(params, words):
    X, y, groups = steps_and_slopes()
    refused(PersonalizedStackingRegressor(**params), words, X, y, groups=groups)


def test_folds_that_leave_too_few_rows():
    """Outside of two of three folds clients of three rows have one; a good stack needs that."""
    X, y, groups = steps_and_slopes(n_clients=200, n_rows=3)
    bases = [("trees", boosting()), ("own", PersonalizedLinearRegression())]
    model = stack(bases)
    words = r"'own' \(Pers.*\) failed in one of the folds, on 200 rows of 200 clients: each of the"
    refused(model, words, X, y, groups=groups)


@pytest.mark.slow
@pytest.mark.parametrize("n_jobs", [None, 2])
def test_warnings_of_base_estimators_that_do_not_predict_are_repeated(n_jobs):
    """It is not fitted to all rows, where it would warn again."""
    X, _, groups = steps_and_slopes(6, 20)
    y = X["a"] + 0.1 * np.random.default_rng(0).normal(size=len(groups))  # a line does
    net = MLPRegressor(hidden_layer_sizes=(2,), max_iter=2, random_state=0)
    model = stack([("net", net)], n_jobs=n_jobs)
    with pytest.warns(ConvergenceWarning, match="'net' in the folds: Stochastic Opt") as caught:
        model.fit(X, y, groups=groups)
    assert "net" not in model.named_estimators_
    assert len(caught) == 1


@pytest.mark.slow
def test_units_of_the_response_do_not_matter():
    """Squares of squares are beyond all numbers at 1e100; squares at 1e155."""
    X, y, groups = steps_and_slopes(n_rows=10)
    last = make_pipeline(StandardScaler(), LinearRegression())
    model = stack([("line", Ridge())], final_estimator=last)
    plain, huge = (clone(model).fit(X, unit * y, groups=groups) for unit in (1.0, 1e100))
    assert (huge.known_part_, huge.new_part_) == (plain.known_part_, plain.new_part_)
    np.testing.assert_allclose(huge.losses_ / 1e200, plain.losses_, rtol=1e-6)
    with pytest.raises(ValueError, match=r"^y\b.*1e150"):
        model.fit(X, 1e155 * y, groups=groups)


@pytest.mark.slow
def test_folds_do_without_averages_over_variances(monkeypatch):
    """Which take time; what predicts in the end has them."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(10), 20)
    X = pd.DataFrame({"a": rng.normal(size=200)})
    y = X["a"] + rng.normal(size=10)[groups] + rng.logistic(size=200) > 0
    seen, fit = [], PersonalizedLogisticRegression.fit

    def watched(self, *args, **kwargs):
        seen.append(self.uncertainty)
        return fit(self, *args, **kwargs)

    monkeypatch.setattr(PersonalizedLogisticRegression, "fit", watched)
    final = PersonalizedLogisticRegression(random="intercept")
    model = PersonalizedStackingClassifier([("line", LogisticRegression())], final, cv=3)
    model.set_params(random_state=0, passthrough=False).fit(X, y, groups=groups)
    assert set(seen) == {"plug_in", "full"}
    assert model.final_estimator_.uncertainty == "full"
    seen.clear()
    model.fit(X[:199], y[:199], groups=groups[:199])  # of few rows they change much
    assert set(seen) == {"full"}


class Hedged(PersonalizedLinearRegression):
    """Another's estimator, which means something else by the parameter."""

    def fit(self, X, y, *, groups=None, sample_weight=None):
        assert self.uncertainty == "full"
        return super().fit(X, y, groups=groups, sample_weight=sample_weight)


def test_final_estimators_of_others_stay_as_they_are():
    X, y, groups = steps_and_slopes(n_clients=6, n_rows=40)
    frozen = FrozenEstimator(Ridge().fit(pd.DataFrame({"line": y}), y))
    hedged = Hedged(GaussianPrior(covariance=1.0), noise_variance=0.1)
    for last in (hedged, frozen):
        model = PersonalizedStackingRegressor([("line", Ridge())], last, cv=3, passthrough=False)
        assert np.isfinite(model.fit(X, y, groups=groups).predict(X, groups=groups)).all()


@pytest.mark.parametrize(("n_classes", "expected"), [(2, 150), (3, 100), (5, 60), (40, 30)])
def test_classes_divide_the_default_iterations_but_not_given_ones(n_classes, expected):
    """Each of several classes has trees of its own."""
    model = PersonalizedStackingClassifier().set_params(hgb_client__estimator__max_iter=150)
    bases = dict(for_classes(clone(model)._checked_estimators(), np.arange(n_classes)))
    assert bases["hgb"].max_iter == expected
    assert bases["hgb_client"].estimator.max_iter == 150
    assert model.get_params()["hgb__max_iter"] == 150
