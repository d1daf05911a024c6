"""Clients that mix candidates: whose weights they are, what they cost, what is refused."""

import functools
import json
import math
import pickle

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings, strategies as st
from scipy.optimize import minimize
from sklearn import config_context
from sklearn.base import BaseEstimator, RegressorMixin, clone
from sklearn.compose import TransformedTargetRegressor
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.ensemble import HistGradientBoostingRegressor, RandomForestRegressor, VotingRegressor
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.model_selection import GridSearchCV, KFold, cross_val_predict, cross_validate
from sklearn.neighbors import KNeighborsRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from pfl_sklearn import (
    BernoulliMean,
    PersonalizedLinearRegression,
    PersonalizedLogisticRegression,
    PPSGDRegressor,
)
from pfl_sklearn.compose import ClientColumn, ClientSelector
from pfl_sklearn.compose._client_mixtures import CandidateErrors, client_weights, population_mean
from pfl_sklearn.model_selection import ClientKFold
from pfl_sklearn.priors import DirichletPrior, GaussianPrior
from pfl_sklearn.privacy import PrivacyReport, privacy_of


def local(**params):
    """A model of each client alone, whose fit releases nothing."""
    given = {"noise_variance": 1.0, "epsilon": 1.0, "feature_bound": 50.0, "target_bound": 50.0}
    prior = GaussianPrior(mean=0.0, covariance=100.0)
    return PersonalizedLinearRegression(prior, unseen="population", **(given | params))


def shrunk(**params):
    """Personalized line with known variances, which takes no iterations."""
    return PersonalizedLinearRegression(GaussianPrior(covariance=1.0), noise_variance=0.1, **params)


def constant(value):
    return DummyRegressor(strategy="constant", constant=value)


def two_kinds(n_clients=20, n_rows=30, seed=0):
    """Half of the clients follow x, the others its opposite."""
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(n_clients), n_rows)
    X = rng.normal(size=(len(groups), 1))
    y = np.where(groups % 2, 1, -1) * X[:, 0] + 0.3 * rng.normal(size=len(groups))
    return X, y, groups


class Signed(RegressorMixin, BaseEstimator):
    """Predicts the first column, with a sign; knows nothing of the rows of fit."""

    def __init__(self, sign=1):
        self.sign = sign

    def fit(self, X, y, sample_weight=None):
        self.n_features_in_ = np.shape(X)[1]
        return self

    def predict(self, X):
        return self.sign * np.asarray(X)[:, 0]


SIGNS = [("plus", Signed(1)), ("minus", Signed(-1))]


# Weights ------------------------------------------------------------------------------------------


def errors(values, codes, has_classes, weights=None):
    codes = np.asarray(codes)
    weights = np.ones(len(codes)) if weights is None else weights
    return CandidateErrors(
        np.asarray(values, dtype=float), has_classes, codes, weights, codes.max() + 1
    )


@pytest.mark.parametrize("has_classes", [False, True])
@pytest.mark.parametrize("concentration", [0.5, 8.0, 300.0])
def test_weights_maximize_what_the_docstring_says(has_classes, concentration):
    """Against a search that knows neither gradients nor batches."""
    rng = np.random.default_rng(0)
    codes = np.repeat([0, 1, 2], [2, 9, 40])
    values = rng.uniform(0.05, 0.95, (51, 3)) if has_classes else rng.normal(size=(51, 3)) + 0.5
    rows, mean = rng.uniform(0.5, 2, 51), np.array([0.5, 0.3, 0.2])
    (found,) = client_weights(
        errors(values, codes, has_classes, rows), "weights", mean, [concentration]
    )

    def objective(point, client):
        own, weight = values[codes == client], rows[codes == client]
        mixture = np.append(point, 0.0)
        mixture = np.exp(mixture - mixture.max())
        mixture /= mixture.sum()
        prior = concentration * mean @ np.log(mixture)
        if has_classes:
            return -weight @ np.log(own @ mixture) - prior
        scale = 3 * (weight @ (own @ mean) ** 2) / weight.sum()
        spread = weight @ (own @ mixture) ** 2 + scale
        return (weight.sum() + 3) / 2 * np.log(spread) - prior

    for client in range(3):
        best = minimize(objective, np.zeros(2), (client,), "Nelder-Mead", options={"xatol": 1e-9})
        expected = np.exp(np.append(best.x, 0.0))
        np.testing.assert_allclose(found[client], expected / expected.sum(), atol=2e-5)


@settings(max_examples=15, deadline=None)
@given(
    n_candidates=st.integers(1, 5),
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    has_classes=st.booleans(),
    how=st.sampled_from(["weights", "best"]),
    spread=st.sampled_from([1e-3, 1.0, 1e3]),
    seed=st.integers(0, 1000),
)
def test_weights_are_on_the_simplex_and_follow_the_prior(
    n_candidates, sizes, has_classes, how, spread, seed
):
    rng = np.random.default_rng(seed)
    codes = np.repeat(np.arange(len(sizes)), sizes)
    shape = len(codes), n_candidates
    values = rng.uniform(1e-6, 1, shape) if has_classes else spread * rng.normal(size=shape)
    own = errors(values, codes, has_classes)._replace(n_clients=len(sizes) + 1)
    mean = rng.dirichlet(np.full(n_candidates, 5.0))
    strong, *_, weak = client_weights(own, how, mean, [1e6, 100.0, 1.0])
    for weights in (strong, weak):
        assert (weights >= 0).all()
        np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-12)
        expected = mean if how == "weights" else np.eye(n_candidates)[mean.argmax()]
        np.testing.assert_allclose(weights[-1], expected, rtol=1e-9)  # a client without rows
    if how == "weights":
        np.testing.assert_allclose(strong, np.tile(mean, (len(strong), 1)), atol=1e-4)


@pytest.mark.parametrize("scale", [1e-170, 1e-20, 1.0, 1e20, 1e150])
@pytest.mark.parametrize("how", ["weights", "best"])
def test_units_do_not_matter(scale, how):
    rng = np.random.default_rng(0)
    codes, values = np.repeat([0, 1], 20), rng.normal(size=(40, 2)) * [1, 0.5]
    values[20:, 0] = 0.0  # the first candidate is perfect for the second client
    found = [
        client_weights(errors(each, codes, False), how, np.array([0.5, 0.5]), [3.0])[0]
        for each in (values, scale * values)
    ]
    np.testing.assert_allclose(*found, atol=1e-9)
    assert found[1][1, 0] > 0.9


def test_candidates_that_cancel_are_mixed():
    """One is too high by what the other is too low, in the only row of the client."""
    own = errors([[1.0, -1.0]], [0], False)
    (found,) = client_weights(own, "weights", np.array([0.5, 0.5]), [3.0])
    np.testing.assert_allclose(found, [[0.5, 0.5]], atol=1e-6)


def test_population_mixture_is_the_best_one():
    rng = np.random.default_rng(1)
    truth = rng.normal(size=2000)
    values = np.column_stack([truth, -0.5 * truth, 50 + truth]) + 0.1 * rng.normal(size=(2000, 3))
    found = population_mean(errors(values, np.zeros(2000, dtype=int), False), "weights")
    np.testing.assert_allclose(found, [1 / 3, 2 / 3, 0], atol=0.01)


def test_clients_find_the_candidate_that_suits_them():
    X, y, groups = two_kinds()
    for how, least in (("weights", 0.9), ("best", 1.0)):
        model = ClientSelector(SIGNS, how=how, random_state=0, unseen="population")
        model.fit(X, y, groups=groups)
        own = model.weights_[np.arange(20), np.where(np.arange(20) % 2, 0, 1)]
        assert own.min() >= least
        assert model.losses_.loc["selector", "known"] < 0.11 < 1 < model.losses_["known"].iloc[0]
        table = model.summary()
        assert table.columns.tolist() == ["rows", "plus", "minus"]
        assert table.index.tolist() == list(range(20))
        np.testing.assert_array_equal(table["rows"], 30)


def test_a_client_of_few_rows_follows_the_population():
    rng = np.random.default_rng(2)
    sizes = np.r_[np.full(30, 40), 1]
    groups = np.repeat(np.arange(31), sizes)
    X = rng.normal(size=(len(groups), 1))
    y = X[:, 0] + rng.normal(size=len(groups))
    y[-1] = -X[-1, 0]  # the one row of the last client is the other candidate's
    prior = DirichletPrior(concentration=20.0)
    model = ClientSelector(SIGNS, prior=prior, random_state=0).fit(X, y, groups=groups)
    assert model.weights_[-1, 0] > 0.9
    assert model.prior_.concentration == 20.0


def test_losses_are_out_of_fold():
    X, y, groups = two_kinds()
    folds = list(KFold(4, shuffle=True, random_state=0).split(X))
    model = ClientSelector([("line", LinearRegression()), ("one", constant(1.0))], cv=folds)
    model.fit(X, y, groups=groups)
    expected = np.mean((cross_val_predict(LinearRegression(), X, y, cv=folds) - y) ** 2)
    assert model.losses_.loc["line", "known"] == pytest.approx(expected, rel=1e-12)
    assert model.losses_.loc["one", "new"] == pytest.approx(np.mean((y - 1) ** 2), rel=1e-12)


@pytest.mark.slow
def test_new_clients_do_not_get_what_remembers_the_known_ones():
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(20), 15)
    X = np.column_stack([rng.normal(size=20)[groups], rng.normal(size=len(groups))])
    y = 3 * rng.normal(size=20)[groups] + 0.3 * rng.normal(size=len(groups))
    trees = HistGradientBoostingRegressor(max_iter=20, learning_rate=0.3, random_state=0)
    model = ClientSelector([("mean", DummyRegressor()), ("trees", trees)], random_state=0)
    model.set_params(unseen="population").fit(X, y, groups=groups)
    assert model.weights_[:, 1].mean() > 0.7
    assert model.new_weights_.tolist() == [1.0, 0.0]
    np.testing.assert_allclose(model.predict(X[:3], groups=[-1, -1, -1]), y.mean(), rtol=1e-12)


def test_new_clients_get_a_mixture_if_it_is_clearly_better():
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(40), 10)
    X = rng.normal(size=(400, 1))
    y = 0.4 * X[:, 0] + 0.3 * rng.normal(size=400)  # .7 plus and .3 minus
    model = ClientSelector(SIGNS, random_state=0, unseen="population").fit(X, y, groups=groups)
    np.testing.assert_allclose(model.new_weights_, [0.7, 0.3], atol=0.05)
    expected = model.new_weights_ @ [X[:3, 0], -X[:3, 0]]
    np.testing.assert_allclose(model.predict(X[:3], groups=[99] * 3), expected, rtol=1e-12)
    model.set_params(how="best").fit(X, y, groups=groups)
    assert model.new_weights_.tolist() == [1.0, 0.0]


def test_weights_are_tested_on_rows_that_nothing_has_seen():
    """Of two rows of a client each is predicted by the other, with the same error.

    By these errors, a client's own mean would seem to suit exactly the clients whom it suits.
    """
    rng = np.random.default_rng(3)
    groups = np.repeat(np.arange(400), 3)
    y = rng.normal(size=len(groups))
    X = np.ones((len(groups), 1))
    candidates = [
        ("mean", DummyRegressor()),
        ("own", PersonalizedLinearRegression(GaussianPrior(0.0, 1e6), noise_variance=1.0)),
    ]
    candidates[1][1].set_params(random="intercept")
    model = ClientSelector(candidates, how="best", cv=3, random_state=0)
    model.fit(X, y, groups=groups)
    assert model.losses_.loc["selector", "known"] == pytest.approx(
        model.losses_.loc["mean", "known"], rel=0.01
    )
    assert model.weights_[:, 0].mean() > 0.95


def test_predictions_are_mixtures():
    X, y, groups = two_kinds(6)
    model = ClientSelector(SIGNS, random_state=0).fit(X, y, groups=groups)
    expected = (model.weights_[groups] * np.column_stack([X[:, 0], -X[:, 0]])).sum(axis=1)
    np.testing.assert_allclose(model.predict(X, groups=groups), expected, rtol=1e-12)
    label = (y > 0).astype(int)
    candidates = [("line", LogisticRegression()), ("share", DummyClassifier(strategy="prior"))]
    model = ClientSelector(candidates, random_state=0).fit(X, label, groups=groups)
    parts = [each.predict_proba(X) for each in model.named_estimators_.values()]
    expected = np.einsum("nk,knc->nc", model.weights_[groups], parts)
    np.testing.assert_allclose(model.predict_proba(X, groups=groups), expected, rtol=1e-12)
    np.testing.assert_array_equal(model.predict(X, groups=groups), expected.argmax(axis=1))
    logs = model.predict_log_proba(X, groups=groups)
    np.testing.assert_allclose(logs, np.log(expected), rtol=1e-12)
    accuracy = np.mean(expected.argmax(axis=1) == label)
    assert model.score(X, label, groups=groups) == pytest.approx(accuracy)


def test_a_regressor_has_no_probabilities():
    assert not hasattr(ClientSelector(SIGNS), "predict_proba")
    assert hasattr(ClientSelector([("line", LogisticRegression())]), "predict_proba")


def test_row_weights_are_repetitions():
    X, y, groups = two_kinds(4, 12)
    twice = np.arange(len(y)) % 3 == 0
    rows = np.sort(np.r_[np.arange(len(y)), np.flatnonzero(twice)])
    prior = DirichletPrior([0.5, 0.5], 5.0)
    candidates = [(name, FrozenEstimator(each.fit(X, y))) for name, each in SIGNS]
    once = ClientSelector(candidates, prior=prior).fit(
        X, y, groups=groups, sample_weight=1.0 + twice
    )
    repeated = ClientSelector(candidates, prior=prior).fit(X[rows], y[rows], groups=groups[rows])
    np.testing.assert_allclose(once.weights_, repeated.weights_, rtol=1e-9)
    assert once.losses_.loc["plus", "known"] == pytest.approx(
        repeated.losses_.loc["plus", "known"], rel=1e-12
    )


# Inside scikit-learn's tools ----------------------------------------------------------------------


@pytest.mark.slow
def test_in_searches_and_pipelines():
    X, y, groups = two_kinds(8)
    table = pd.DataFrame(X, columns=["x"]).assign(client=groups)
    candidates = [("line", LinearRegression()), ("own", local())]
    inner = ClientSelector(candidates, cv=3, random_state=0)
    model = ClientColumn(make_pipeline(StandardScaler(), inner), column="client")
    grid = {
        "estimator__clientselector__how": ["best"],
        "estimator__clientselector__prior__concentration": [100.0],
        "estimator__clientselector__line__fit_intercept": [False],
    }
    search = GridSearchCV(model, grid, cv=KFold(2, shuffle=True, random_state=0))
    search.fit(table, y)
    assert search.best_score_ > 0.8
    fitted = search.best_estimator_.estimator_[-1]
    assert (fitted.how, fitted.prior_.concentration) == ("best", 100.0)
    assert not fitted.named_estimators_["line"].fit_intercept
    with config_context(enable_metadata_routing=True):
        found = cross_validate(
            inner, X, y, cv=ClientKFold(2, random_state=0), params={"groups": groups}
        )
    assert found["test_score"].min() > 0.8


@pytest.mark.parametrize("how", ["weights", "best"])
def test_units_of_the_response_do_not_matter(how):
    """Squares of squares are beyond all numbers at 1e100."""
    X, y, groups = two_kinds()
    candidates = [("line", LinearRegression()), ("mean", DummyRegressor())]
    model = ClientSelector(candidates, how=how, random_state=0)
    plain, huge = (clone(model).fit(X, unit * y, groups=groups) for unit in (1.0, 1e100))
    np.testing.assert_allclose(huge.weights_, plain.weights_, atol=1e-6)
    np.testing.assert_allclose(huge.new_weights_, plain.new_weights_, atol=1e-6)
    np.testing.assert_allclose(huge.losses_ / 1e200, plain.losses_, rtol=1e-6)


def test_responses_that_cannot_be_squared():
    X, y, groups = two_kinds()
    model = ClientSelector([("line", LinearRegression()), ("mean", DummyRegressor())])
    for unit, limit in ((1e155, "1e150"), (1e-200, "1e-140")):
        with pytest.raises(ValueError, match=rf"^y\b.*{limit}"):
            model.fit(X, unit * y, groups=groups)
    assert not hasattr(model, "clients_")


def test_a_candidate_that_one_row_carries_away_has_an_infinite_loss():
    X, y, groups = two_kinds()
    X[7] = 1e200
    candidates = [("line", FrozenEstimator(LinearRegression().fit(X[10:], y[10:])))]
    candidates += [("mean", DummyRegressor()), ("zero", constant(0.0))]
    model = ClientSelector(candidates, how="best", random_state=0).fit(X, y, groups=groups)
    assert np.isinf(model.losses_.loc["line"]).all()
    np.testing.assert_array_equal(model.weights_[groups[7], 0], 0.0)
    assert model.new_weights_[0] == 0


# Privacy ------------------------------------------------------------------------------------------


def private(seed=0, **params):
    given = {"epsilon": 1.0, "clip_norm": 1.0, "n_rounds": 3, "learning_rate": 0.1}
    return PPSGDRegressor(random_state=seed, unseen="population", **(given | params))


EVEN = DirichletPrior([0.5, 0.5], 10.0)


@pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")
def test_choosing_among_released_candidates_costs_nothing():
    X, y, groups = two_kinds()
    released = private().fit(X, y, groups=groups).release()
    candidates = [("released", FrozenEstimator(released)), ("own", local())]
    model = ClientSelector(candidates, prior=EVEN, random_state=0).fit(X, y, groups=groups)
    report = model.privacy_
    assert (report.epsilon, report.delta) == (released.privacy_.epsilon, released.privacy_.delta)
    assert report.unit == released.privacy_.unit and report.relation == released.privacy_.relation
    assert "weights cost nothing" in report.accountant
    handed = "named_estimators_, as release() hands them out"
    assert set(report.released) == {handed, "prior_", "new_weights_"}
    kept = {"weights_", "losses_", "named_estimators_['own'].coef_"}
    assert kept <= set(report.not_released)
    assert privacy_of(model) == report
    handed = model.release()
    for name in ("weights_", "losses_", "clients_", "n_samples_per_client_"):
        assert not hasattr(handed, name)
    assert not hasattr(handed.named_estimators_["own"], "clients_")
    expected = 0.5 * released.predict(X) + 0.5 * handed.named_estimators_["own"].predict(X)
    np.testing.assert_allclose(handed.predict(X), expected, rtol=1e-12)
    np.testing.assert_allclose(handed.predict(X, groups=groups), expected, rtol=1e-12)


@pytest.mark.parametrize("value", [1e155, 1e300])
def test_no_warning_or_error_reveals_a_value_under_a_known_prior(value):
    """The losses are the clients' own."""
    X, y, groups = two_kinds()
    y[7] = value
    candidates = [("one", FrozenEstimator(constant(1.0).fit(X, y))), ("own", local())]
    model = ClientSelector(candidates, prior=EVEN, random_state=0).fit(X, y, groups=groups)
    assert model.privacy_.epsilon == 0
    assert np.isinf(model.losses_["known"]).all()
    assert np.isfinite(model.weights_).all()


@pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")
@pytest.mark.slow
def test_promises_of_several_candidates_add_up():
    X, y, groups = two_kinds()
    first, second = (private(k, epsilon=e).fit(X, y, groups=groups) for k, e in ((0, 1), (1, 2)))
    candidates = [("a", FrozenEstimator(first)), ("b", FrozenEstimator(second))]
    model = ClientSelector(candidates, prior=EVEN).fit(X, y, groups=groups)
    assert model.privacy_.epsilon == pytest.approx(3.0, rel=1e-3)
    assert model.privacy_.delta == pytest.approx(2e-5)
    assert not hasattr(model.release().named_estimators_["a"], "clients_")
    other = private(sampling="fixed", client_fraction=0.5).fit(X, y, groups=groups)
    candidates[1] = ("b", FrozenEstimator(other))
    model = ClientSelector(candidates, prior=EVEN).fit(X, y, groups=groups)
    assert math.isinf(model.privacy_.epsilon)
    assert "promise different things" in model.privacy_.warnings[0]


@pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")
def test_what_is_handed_out_names_no_other_client():
    """Not in parameters either: a clone of a frozen candidate is the candidate."""
    X, y, groups = two_kinds(8)
    ids = np.array([f"patient-{k}-secret" for k in groups], dtype=object)
    fitted = FrozenEstimator(private().fit(X, y, groups=ids))
    candidates = [("fitted", fitted), ("own", local())]
    model = ClientSelector(candidates, prior=EVEN, random_state=0).fit(X, y, groups=ids)
    assert b"secret" not in pickle.dumps(model.release())
    found = pickle.dumps(model.for_client("patient-3-secret"))
    assert b"patient-3-secret" in found
    assert not any(f"patient-{k}-secret".encode() in found for k in range(8) if k != 3)


@pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")
def test_a_frozen_wrapper_of_others_is_not_public():
    X, y, groups = two_kinds(8)
    with config_context(enable_metadata_routing=True):
        wrapped = TransformedTargetRegressor(private()).fit(X, y, groups=groups)
    candidates = [("wrapped", FrozenEstimator(wrapped)), ("own", local())]
    model = ClientSelector(candidates, prior=EVEN, random_state=0).fit(X, y, groups=groups)
    assert math.isinf(model.privacy_.epsilon)


def recursive(fitted):
    """A function beside one whose closure has no contents yet."""

    def never():
        return later

    held = (never, fitted)
    return lambda: held
    later = None


class OwnKind(PPSGDRegressor):
    """A subclass from another package, which learns of clients as ours does."""


class Holder(RegressorMixin, BaseEstimator):
    """A wrapper of another package that hides what it holds."""

    def __init__(self, hide=None):
        self.hide = hide

    def fit(self, X, y):
        self.inside_ = self.hide
        return self

    def predict(self, X):
        return np.zeros(len(X))


@pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")
@pytest.mark.parametrize(
    "hide",
    [
        lambda fitted: fitted.predict,
        lambda fitted: lambda X: fitted.predict(X),
        lambda fitted: np.array([fitted, None], dtype=object),
        lambda fitted: {"models": [(fitted,)]},
        lambda fitted: recursive(fitted),
        lambda fitted: functools.partial(print, fitted),
        lambda fitted: lambda X, model=fitted: model.predict(X),
        lambda fitted: lambda X, *, model=fitted: model.predict(X),
    ],
    ids=[
        *("method", "closure", "array", "containers", "recursion", "partial"),
        *("default", "keyword default"),
    ],
)
def test_what_others_hide_is_not_public(hide):
    X, y, groups = two_kinds(8)
    held = Holder(hide(shrunk().fit(X, y, groups=groups))).fit(X, y)
    assert math.isinf(epsilon_of_choice(held, X, y, groups))


def test_subclasses_of_others_are_not_public():
    X, y, groups = two_kinds(8)
    fitted = OwnKind(n_rounds=1, alpha=0.5, learning_rate=0.1).fit(X, y, groups=groups)
    assert math.isinf(epsilon_of_choice(fitted, X, y, groups))


def epsilon_of_choice(fitted, X, y, groups):
    zero = FrozenEstimator(constant(0.0).fit(X, y))
    candidates = [("it", FrozenEstimator(fitted)), ("zero", zero)]
    return ClientSelector(candidates, prior=EVEN).fit(X, y, groups=groups).privacy_.epsilon


@pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")
def test_a_later_fit_of_a_frozen_candidate_changes_nothing():
    X, y, groups = two_kinds(8)
    fitted = private().fit(X, y, groups=groups)
    candidates = [("it", FrozenEstimator(fitted)), ("own", local())]
    model = ClientSelector(candidates, cv=2, prior=EVEN, random_state=0).fit(X, y, groups=groups)
    before = model.release()
    fitted.set_params(epsilon=5.0).fit(X, -y, groups=groups)
    after = model.release()
    assert after.named_estimators_["it"].privacy_.epsilon <= 1.0 == round(model.privacy_.epsilon, 2)
    np.testing.assert_array_equal(before.predict(X), after.predict(X))


@pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")
def test_deltas_that_add_up_to_too_much():
    X, y, groups = two_kinds(30, 4)
    fitted = [private(k, delta=0.02).fit(X, y, groups=groups) for k in (0, 1)]
    candidates = [(name, FrozenEstimator(each)) for name, each in zip("ab", fitted, strict=True)]
    report = ClientSelector(candidates, prior=EVEN, cv=3).fit(X, y, groups=groups).privacy_
    assert report.delta == pytest.approx(0.04)
    assert "delta = 0.04 is above 1 / n_clients = 0.0333" in " ".join(report.warnings)


@pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")
def test_private_candidates_get_no_seed():
    """With which their noise could be removed."""
    X, y, groups = two_kinds(8)
    candidates = [("private", private(None)), ("trees", RandomForestRegressor(2))]
    found = []
    for _ in range(2):
        model = ClientSelector(candidates, cv=3, random_state=0).fit(X, y, groups=groups)
        found.append(model.named_estimators_["private"].population_coef_)
        assert model.named_estimators_["private"].random_state is None
    assert (found[0] != found[1]).any()
    assert isinstance(model.named_estimators_["trees"].random_state, int)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")
def test_the_report_has_assumptions_and_rounds_of_all_candidates():
    X, y, groups = two_kinds()
    first, second = (
        private(k, n_rounds=n, client_fraction=q).fit(X, y, groups=groups)
        for k, n, q in ((0, 3, 0.5), (1, 5, 0.25))
    )
    own = local()
    candidates = [("a", FrozenEstimator(first)), ("b", FrozenEstimator(second)), ("own", own)]
    prior = DirichletPrior([0.25, 0.25, 0.5], 10.0)
    report = ClientSelector(candidates, prior=prior).fit(X, y, groups=groups).privacy_
    assert (report.rounds, report.sampling_rate) == (8, 0.5)
    alone = own.fit(X, y, groups=groups).privacy_
    assert set(alone.assumptions) <= set(report.assumptions)
    assert set(first.privacy_.assumptions) <= set(report.assumptions)
    assert set(first.privacy_.warnings) <= set(report.warnings)


def test_nothing_is_released_of_the_clients_own():
    X, y, groups = two_kinds()
    public = FrozenEstimator(LinearRegression().fit([[0.0], [1.0]], [0.0, 1.0]))
    candidates = [("public", public), ("own", local())]
    model = ClientSelector(candidates, prior=EVEN, random_state=0).fit(X, y, groups=groups)
    assert model.privacy_.epsilon == 0
    assert "candidate 'public' is public" in " ".join(model.privacy_.assumptions)
    assert PrivacyReport.from_dict(json.loads(model.privacy_.to_json())) == model.privacy_
    X[0], y[0] = 5.0, -40.0  # another row of client 0 moves the weights of no other client
    again = ClientSelector(candidates, prior=EVEN, random_state=0).fit(X, y, groups=groups)
    np.testing.assert_array_equal(model.weights_[1:], again.weights_[1:])
    assert (model.weights_[0] != again.weights_[0]).any()
    one, other = model.release(), again.release()
    np.testing.assert_array_equal(one.predict(X), other.predict(X))


@pytest.mark.slow_but_first
@pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")
@pytest.mark.parametrize(
    ("candidate", "prior", "why"),
    [
        (LinearRegression(), EVEN, "'it' is fitted to the rows of all clients, and nothing"),
        (make_pipeline(StandardScaler(), local()), EVEN, "StandardScaler"),
        (private(), EVEN, "each fit costs epsilon = "),
        (local(), DirichletPrior(concentration=3.0), "the prior is learned"),
        (local(), DirichletPrior([0.5, 0.5]), "the prior is learned"),
    ],
    ids=["linear", "scaled", "private", "mean", "concentration"],
)
def test_what_is_not_protected_says_why(candidate, prior, why):
    X, y, groups = two_kinds()
    candidates = [("it", candidate), ("own", local())]
    model = ClientSelector(candidates, prior=prior, random_state=0).fit(X, y, groups=groups)
    assert math.isinf(model.privacy_.epsilon)
    assert why in model.privacy_.warnings[0]
    with pytest.raises(ValueError, match="release\\(\\) would publish unprotected values"):
        model.release()


def test_frozen_candidates_of_an_unprotected_fit():
    X, y, groups = two_kinds()
    fitted = FrozenEstimator(shrunk().fit(X, y, groups=groups))
    candidates = [("fitted", fitted), ("own", local())]
    model = ClientSelector(candidates, prior=EVEN, random_state=0).fit(X, y, groups=groups)
    assert "'fitted' is frozen, but nothing protects it" in model.privacy_.warnings[0]


# Frozen candidates --------------------------------------------------------------------------------


def test_frozen_candidates_are_not_fitted_again():
    X, y, groups = two_kinds()
    fitted = shrunk().fit(X, y, groups=groups)
    forest = RandomForestRegressor(5, random_state=0).fit(X, y)
    candidates = [("personal", FrozenEstimator(fitted)), ("forest", FrozenEstimator(forest))]
    model = ClientSelector(candidates, unseen="population", random_state=0)
    model.fit(X, -y, groups=groups)
    np.testing.assert_array_equal(model.named_estimators_["personal"].coef_, fitted.coef_)
    assert model.losses_.loc["forest", "known"] == pytest.approx(
        np.mean((forest.predict(X) + y) ** 2), rel=1e-12
    )
    # For new clients it counts what it predicts for those whom it does not know.
    stranger = fitted.set_params(unseen="population").predict(X, groups=np.full(len(y), 99))
    assert model.losses_.loc["personal", "new"] == pytest.approx(
        np.mean((stranger + y) ** 2), rel=1e-12
    )


@pytest.mark.parametrize(
    ("dtype", "unseen"), [("U3", "error"), (np.uint8, "population"), (bool, "error")]
)
def test_frozen_candidates_predict_the_population_for_new_clients(dtype, unseen):
    """Whatever ids they have: with two booleans there is no other id."""
    X, y, groups = two_kinds(2 if dtype is bool else 6, 10)
    ids = (groups + (0 if dtype is bool else 250)).astype(dtype)
    fitted = shrunk(unseen=unseen).fit(X, y, groups=ids)
    candidates = [("frozen", FrozenEstimator(fitted)), ("line", LinearRegression())]
    model = ClientSelector(candidates, random_state=0).fit(X, y, groups=ids)
    expected = np.mean((X @ fitted.population_coef_ + fitted.population_intercept_ - y) ** 2)
    assert model.losses_.loc["frozen", "new"] == pytest.approx(expected, rel=1e-9)
    assert model.losses_.loc["frozen", "new"] > 2 * model.losses_.loc["frozen", "known"]


@pytest.mark.parametrize("unseen", ["error", "warn"])
def test_the_selector_says_what_becomes_of_unseen_clients(unseen):
    """A frozen candidate may know clients that the selector does not; it is judged without them."""
    X, y, groups = two_kinds(8)
    fitted = shrunk(unseen=unseen).fit(X, y, groups=groups)
    candidates = [("frozen", FrozenEstimator(fitted)), ("own", shrunk(unseen=unseen))]
    some = groups < 4
    prior = DirichletPrior([0.9, 0.1], 10.0)
    model = ClientSelector(candidates, prior=prior, unseen="population", random_state=0)
    model.fit(X[some], y[some], groups=groups[some])
    for ids in (groups, groups + 100):
        mixed = 0.9 * (fitted.population_intercept_ + X @ fitted.population_coef_)
        own = model.named_estimators_["own"]
        mixed += 0.1 * (own.population_intercept_ + X @ own.population_coef_)
        found = model.predict(X[~some], groups=ids[~some])
        np.testing.assert_allclose(found, mixed[~some], rtol=1e-9)
    assert fitted.unseen == unseen


def test_frozen_classifiers_may_know_more_classes():
    """Theirs are public; what is released says which labels there are."""
    rng = np.random.default_rng(0)
    X, groups = rng.normal(size=(120, 1)), np.repeat(np.arange(6), 20)
    y = np.where(X[:, 0] > 0, "high", "low")
    public = LogisticRegression().fit(X, np.where(X[:, 0] > 1, "very high", y))
    rates = DummyClassifier().fit(X, y)
    candidates = [("public", FrozenEstimator(public)), ("rates", FrozenEstimator(rates))]
    model = ClientSelector(candidates, prior=EVEN).fit(X, y, groups=groups)
    assert model.classes_.tolist() == ["high", "low", "very high"]
    assert "the class labels that occur are public" in model.privacy_.assumptions
    assert "classes_" in model.privacy_.released
    chances = model.release().predict_proba(X)
    expected = public.predict_proba(X) / 2
    expected[:, :2] += rates.predict_proba(X) / 2
    np.testing.assert_allclose(chances, expected, rtol=1e-12)


def test_frozen_classifiers_are_judged_in_folds_of_one_class():
    """Nothing is fitted there, so nothing is missing."""
    X = np.linspace(-1, 1, 40)[:, None]
    y, groups = (np.arange(40) >= 20).astype(int), np.repeat(np.arange(4), 10)
    frozen = FrozenEstimator(LogisticRegression().fit(X, y))
    folds = [(np.arange(20), np.arange(20, 40)), (np.arange(20, 40), np.arange(20))]
    model = ClientSelector([("frozen", frozen), ("own", DummyClassifier())], cv=folds, prior=EVEN)
    model.fit(X, y, groups=groups)
    expected = -np.log(frozen.predict_proba(X)[np.arange(40), y]).mean()
    assert model.losses_.loc["frozen", "known"] == pytest.approx(expected, rel=1e-12)


def test_a_refit_as_a_regressor_forgets_the_classes():
    X, y, groups = two_kinds(6)
    model = ClientSelector([("line", LogisticRegression())], random_state=0)
    model.fit(X, y > 0, groups=groups)
    model.set_params(estimators=SIGNS).fit(X, y, groups=groups)
    assert not hasattr(model, "classes_")
    assert model.predict(X, groups=groups).dtype == float


# Bad input ----------------------------------------------------------------------------------------


class NoNumbers(Signed):
    def predict(self, X):
        return np.full(len(X), np.nan)


def fitted_without_groups():
    with pytest.warns(UserWarning, match="got no groups"):
        return PersonalizedLinearRegression().fit([[0.0], [1.0], [2.0]], [0.0, 1.0, 1.0])


COLUMN, SAVED = ClientColumn(LinearRegression(), 0), PPSGDRegressor(checkpoint="file")
ONE = FrozenEstimator(fitted_without_groups())


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"estimators": []}, "must have at least one"),
        ({"estimators": [("selector", LinearRegression())]}, "has the name 'selector'"),
        ({"estimators": [*SIGNS, ("c", LogisticRegression())]}, "expected a regressor"),
        ({"estimators": [*SIGNS, ("nan", NoNumbers())]}, "'nan' .* predicted nan"),
        ({"prior": DirichletPrior([0.2, 0.3, 0.5])}, "each of the 2 estimators.*got .0.2, 0.3"),
        ({"prior": DirichletPrior([1.0, 0.0])}, "mean of prior must have a positive number"),
        ({"prior": DirichletPrior([np.nan, 0.5])}, "a positive number.*got .nan, 0.5"),
        ({"prior": EVEN, "cv": []}, "tests 24 of 24 rows never"),
        ({"estimators": [*SIGNS, 3]}, r"list of \(name, estimator\); got 3 in it"),
        ({"estimators": [*SIGNS, ("column", COLUMN)]}, "'column', a ClientColumn.*groups="),
        ({"estimators": [*SIGNS, ("sgd", SAVED)]}, "'sgd' with checkpoint='file'.*several folds"),
        (
            {"estimators": [*SIGNS, ("one", ONE)]},
            "'one' .FrozenE.*failed to predict.*without groups",
        ),
        ({"prior": DirichletPrior(concentration=-1.0)}, "'concentration' parameter"),
        ({"prior": 3.0}, "'prior' parameter"),
        ({"how": "mix"}, "'how' parameter"),
        ({"cv": 2}, "cv=2 gives 2 folds.*at least 3"),
        ({"cv": iter([([0], [1])])}, "cv=.* is used up after one fit"),
        (
            {"estimators": [("votes", VotingRegressor([("c", COLUMN)]))]},
            "'votes', which holds a Cli",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_parameters(params, message):
    X, y, groups = two_kinds(4, 6)
    model = ClientSelector(SIGNS).set_params(**params)
    with pytest.raises(ValueError, match=message):
        model.fit(X, y, groups=groups)
    assert not hasattr(model, "weights_")


@pytest.mark.filterwarnings("ignore::pfl_sklearn.SingleClientWarning")
def test_frozen_models_of_many_clients_need_ids():
    X, y, groups = two_kinds(4, 6)
    fitted = shrunk().fit(X, y, groups=groups)
    model = ClientSelector([("frozen", FrozenEstimator(fitted)), *SIGNS])
    with pytest.raises(ValueError, match=r"'frozen' is a frozen model of 4 clients.*no groups="):
        model.fit(X, y)
    assert not hasattr(model, "weights_")


def test_a_candidate_that_takes_no_row_weights():
    X, y, groups = two_kinds(4, 6)
    model = ClientSelector([("near", KNeighborsRegressor())])
    with pytest.raises(ValueError, match="'near' \\(KNeighborsRegressor\\) does not take it"):
        model.fit(X, y, groups=groups, sample_weight=np.ones(len(y)))
    assert not hasattr(model, "weights_")


def test_clients_of_one_row():
    """They have the population's weights, nearly; candidates must not need more rows."""
    rng = np.random.default_rng(0)
    X, groups = rng.normal(size=(40, 1)), np.arange(40)
    model = ClientSelector(SIGNS, random_state=0).fit(X, X[:, 0], groups=groups)
    assert model.weights_[:, 0].min() > 0.9


def test_one_client():
    X, y, _ = two_kinds(1)
    model = ClientSelector(SIGNS, random_state=0)
    with pytest.warns(UserWarning, match="got no groups"):
        model.fit(X, y)
    assert model.weights_.shape == (1, 2)
    np.testing.assert_array_equal(model.predict(X).shape, y.shape)


@pytest.mark.filterwarnings("ignore::pfl_sklearn.linear_model.SeparationWarning")
@pytest.mark.slow
def test_folds_that_lack_a_class():
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(6), 10)
    X, y = rng.normal(size=(60, 1)), np.where(np.arange(60) < 2, "rare", "common")
    y[30:50] = "other"
    personal = PersonalizedLogisticRegression(GaussianPrior(covariance=1.0), random="intercept")
    candidates = [("line", LogisticRegression()), ("personal", personal)]
    model = ClientSelector(candidates, cv=3, random_state=0).fit(X, y, groups=groups)
    assert model.predict_proba(X, groups=groups).shape == (60, 3)


def test_proportions_are_no_candidates():
    with pytest.raises(ValueError, match="expected a regressor"):
        ClientSelector([("line", LinearRegression()), ("share", BernoulliMean)]).fit([[0]], [0])
