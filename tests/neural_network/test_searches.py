"""Neural estimators inside scikit-learn's tools and ours."""

import json

import numpy as np
import pandas as pd
import pytest
import sklearn
from sklearn.base import clone
from sklearn.callback import ScoringMonitor
from sklearn.model_selection import GridSearchCV, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler

torch = pytest.importorskip("torch")
pytest.importorskip("skorch")

from pfl_sklearn import ClientColumn, privacy_of  # noqa: E402
from pfl_sklearn.metrics import ClientScorer  # noqa: E402
from pfl_sklearn.model_selection import ClientKFold, PrivateSelectCV  # noqa: E402
from pfl_sklearn.neural_network import MLP, AdaPeDClassifier, FedAvgClassifier, LocalNetClassifier  # noqa: E402
from pfl_sklearn.privacy import (  # noqa: E402
    BudgetExceeded,
    PrivacyLedger,
    SampledGaussian,
    events_epsilon,
    search_cost,
)
from tests.helpers.callbacks import StopAfter, scores_of  # noqa: E402
from tests.helpers.nets import Dropped, population_weights, recipe, table  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")

SCORER = ClientScorer("accuracy")
NOISE = {"noise_multiplier": 2.0, "clip_norm": 0.3}
METHODS = [FedAvgClassifier, LocalNetClassifier, AdaPeDClassifier]
every_method = pytest.mark.parametrize(
    "cls", [METHODS[0], *(pytest.param(cls, marks=pytest.mark.slow) for cls in METHODS[1:])]
)


@pytest.fixture
def routing():
    with sklearn.config_context(enable_metadata_routing=True):
        yield


def net_of(**params):
    return recipe(MLP, module__hidden=5, **params)


def model_of(cls=FedAvgClassifier, **params):
    return cls(net_of(), **{"n_rounds": 3, "local_steps": 3, "random_state": 0, **params})


@pytest.mark.usefixtures("routing")
@every_method
def test_a_grid_search_over_the_recipe(cls):
    """Every candidate is the fit with its parameters; the recipe that was given stays."""
    X, y, groups = table()
    grid = {"estimator__lr": [1e-3, 0.1], "estimator__module__hidden": [(), 3]}
    search = GridSearchCV(model_of(cls), grid, cv=ClientKFold(2, random_state=0), scoring=SCORER)
    search.fit(X, y, groups=groups)
    assert search.best_params_["estimator__lr"] == 0.1
    scores = []
    for train, test in ClientKFold(2, random_state=0).split(X, y, groups):
        model = clone(search.estimator).set_params(**search.cv_results_["params"][3])
        model.fit(X[train], y[train], groups=groups[train])
        scores.append(model.score(X[test], y[test], groups=groups[test]))
    assert search.cv_results_["mean_test_score"][3] == pytest.approx(np.mean(scores))
    whole = model_of(cls).set_params(**search.best_params_).fit(X, y, groups=groups)
    found = population_weights(search.best_estimator_)
    np.testing.assert_array_equal(found, population_weights(whole))
    assert search.estimator.estimator.lr == 0.1
    assert search.estimator.estimator.module__hidden == 5


@pytest.mark.slow
@pytest.mark.usefixtures("routing")
def test_a_grid_search_in_two_processes_is_the_same():
    X, y, groups = table()
    grid, folds = {"estimator__lr": [1e-3, 0.1]}, ClientKFold(2, random_state=0)
    found = [
        GridSearchCV(model_of(), grid, cv=folds, scoring=SCORER, n_jobs=n_jobs)
        .fit(X, y, groups=groups)
        .cv_results_["mean_test_score"]
        for n_jobs in (None, 2)
    ]
    np.testing.assert_array_equal(*found)


def test_the_default_recipe_is_searchable():
    model = FedAvgClassifier().set_params(estimator__lr=0.3, estimator__module__hidden=(4, 4))
    assert model.get_params()["estimator__lr"] == 0.3
    X, y, groups = table()
    model.set_params(n_rounds=1).fit(X, y, groups=groups)
    layers = model.net_.module_.layers
    assert [layer.out_features for layer in layers if hasattr(layer, "weight")] == [4, 4, 3]


@pytest.mark.usefixtures("routing")
@every_method
def test_cross_validation_with_client_scores(cls):
    X, y, groups = table()
    model, folds = make_pipeline(StandardScaler(), model_of(cls)), ClientKFold(2, random_state=0)
    scoring = {"micro": SCORER, "macro": ClientScorer("accuracy", average="macro")}
    given = {"params": {"groups": groups}, "cv": folds, "scoring": scoring, "error_score": "raise"}
    found = cross_validate(model, X, y, **given)
    for k, (train, test) in enumerate(folds.split(X, y, groups)):
        fitted = clone(model).fit(X[train], y[train], groups=groups[train])
        right = pd.Series(fitted.predict(X[test], groups=groups[test]) == y[test])
        assert found["test_micro"][k] == pytest.approx(right.mean())
        assert found["test_macro"][k] == pytest.approx(right.groupby(groups[test]).mean().mean())


@every_method
@pytest.mark.parametrize("frame", [False, True])
def test_a_column_of_clients(cls, frame):
    X, y, groups = table()
    names = [f"x{k}" for k in range(X.shape[1])]
    data = pd.DataFrame(X, columns=names).assign(site=groups)
    column = "site" if frame else X.shape[1]
    given = data if frame else data.to_numpy()
    wrapped = ClientColumn(model_of(cls), column).fit(given, y)
    inner = pd.DataFrame(X, columns=names) if frame else X
    alone = model_of(cls).fit(inner, y, groups=groups)
    np.testing.assert_array_equal(
        wrapped.predict_proba(given), alone.predict_proba(inner, groups=groups)
    )
    np.testing.assert_array_equal(
        wrapped.for_client(4).predict(inner), alone.for_client(4).predict(inner)
    )
    assert wrapped.privacy_ == alone.privacy_


def started(cls, **params):
    """A model whose personal nets start in a round that is no share of all rounds."""
    start = {"personal_start_round": 1} if cls is AdaPeDClassifier else {}
    return model_of(cls, **start, **params)


@every_method
def test_a_scoring_monitor_sees_every_round(cls):
    X, y, groups = table()
    monitor = ScoringMonitor(scoring={"accuracy": SCORER})
    model = started(cls, n_rounds=4).set_callbacks(monitor).fit(X, y, groups=groups)
    scores = scores_of(monitor)
    assert len(scores) == 4
    shorter = started(cls, n_rounds=2).fit(X, y, groups=groups)
    assert scores["accuracy"].iloc[1] == pytest.approx(shorter.score(X, y, groups=groups))
    assert scores["accuracy"].iloc[3] == pytest.approx(model.score(X, y, groups=groups))


@every_method
def test_callbacks_end_a_fit(cls):
    X, y, groups = table()
    model = started(cls, n_rounds=50).set_callbacks(StopAfter(2)).fit(X, y, groups=groups)
    assert model.n_rounds_ == 2
    np.testing.assert_array_equal(
        population_weights(model),
        population_weights(started(cls, n_rounds=2).fit(X, y, groups=groups)),
    )


# Privacy ------------------------------------------------------------------------------------------


def epsilon_of(n_rounds, rate=1.0, z=2.0, relation="zero_out"):
    event = SampledGaussian(z, n_rounds, rate)
    return events_epsilon((event,), 1e-5, relation)


@pytest.mark.slow
@pytest.mark.parametrize("cls", [FedAvgClassifier, AdaPeDClassifier])
def test_the_report_is_that_of_sampled_gaussian_sums(cls):
    """It survives JSON, and epsilon adds up over warm starts."""
    X, y, groups = table()
    model = model_of(cls, client_fraction=0.5, warm_start=True, **NOISE).fit(X, y, groups=groups)
    assert model.privacy_.epsilon == pytest.approx(epsilon_of(3, 0.5))
    assert model.privacy_.unit == "client"
    model.set_params(n_rounds=7).fit(X, y, groups=groups)
    assert model.privacy_.epsilon == pytest.approx(epsilon_of(7, 0.5))
    assert json.loads(json.dumps(model.privacy_.to_dict()))["epsilon"] == model.privacy_.epsilon


def test_local_nets_cost_nothing(tmp_path):
    X, y, groups = table()
    ledger = PrivacyLedger(tmp_path / "ledger.jsonl")
    free = LocalNetClassifier(recipe(Dropped), n_rounds=3, random_state=0).fit(X, y, groups=groups)
    model = clone(free).set_params(ledger=ledger, **NOISE).fit(X, y, groups=groups)
    assert model.privacy_.epsilon == 0
    np.testing.assert_array_equal(model._personal, free._personal)


def test_noise_is_on_the_changes_of_the_net():
    """Its sd is z times the clipping norm, over the expected number of clients."""
    X, y, groups = table()
    still = net_of(lr=0.0)  # every change is 0
    model = FedAvgClassifier(still, n_rounds=1, noise_multiplier=2.0, clip_norm=0.3)
    found = []
    for seed in range(8):
        noisy = clone(model).set_params(random_state=seed).fit(X, y, groups=groups)
        free = FedAvgClassifier(still, n_rounds=1, random_state=seed).fit(X, y, groups=groups)
        found.append(noisy._population - free._population)
    found = np.ravel(found)
    expected = 2.0 * 0.3 / 8
    assert np.std(found) == pytest.approx(expected, rel=5 / np.sqrt(2 * found.size))
    assert abs(np.mean(found)) < 5 * expected / np.sqrt(found.size)


def test_a_ledger_refuses_what_is_too_much(tmp_path):
    X, y, groups = table()
    ledger = PrivacyLedger(
        tmp_path / "ledger.jsonl", budget=1.5 * epsilon_of(3, relation="replace_one")
    )
    model = model_of(ledger=ledger, **NOISE).fit(X, y, groups=groups)
    assert len(ledger.entries) == 1
    before = dict(vars(model))
    with pytest.raises(BudgetExceeded):
        clone(model).set_params(random_state=1, n_rounds=30).fit(X, y, groups=groups)
    assert vars(model) == before
    assert len(ledger.entries) == 1


@pytest.mark.usefixtures("routing")
@pytest.mark.parametrize("cls", [FedAvgClassifier, AdaPeDClassifier])
def test_what_a_search_costs(cls):
    """Two candidates on two folds and the last fit: five times the rounds of one."""
    X, y, groups = table()
    grid = {"estimator__lr": [1e-3, 0.1]}
    search = GridSearchCV(
        model_of(cls, random_state=None, **NOISE), grid, cv=ClientKFold(2), scoring=SCORER
    )
    search.fit(X, y, groups=groups)
    assert search_cost(search).epsilon == pytest.approx(epsilon_of(15))


@pytest.mark.usefixtures("routing")
@pytest.mark.parametrize("cls", [FedAvgClassifier, AdaPeDClassifier])
def test_a_private_selection(cls):
    X, y, groups = table()
    model = cls(net_of(), n_rounds=3, clip_norm=0.3)
    grid = {"estimator__lr": [0.01, 0.1], "clip_norm": [0.1, 0.3]}
    search = PrivateSelectCV(
        model, grid, expected_trials=2, epsilon=5.0, scoring="accuracy", random_state=0
    ).fit(X, y, groups=groups)
    assert search.privacy_.epsilon == pytest.approx(5.0, rel=0.01)
    best = search.best_estimator_
    assert best.get_params()["estimator__lr"] == search.best_params_["estimator__lr"]
    assert best.privacy_.epsilon == search.privacy_.epsilon
    assert search.predict(X, groups=groups).shape == y.shape
    with pytest.raises(ValueError, match="handed out"):
        best.partial_fit(X, y, groups=groups)


def test_steps_before_a_private_net():
    """What a scaler learned from the same rows is not covered."""
    X, y, groups = table()
    with sklearn.config_context(enable_metadata_routing=True):
        for step, finite in ((FunctionTransformer(np.tanh), True), (StandardScaler(), False)):
            model = make_pipeline(step, model_of(**NOISE)).fit(X, y, groups=groups)
            assert np.isfinite(privacy_of(model).epsilon) == finite
