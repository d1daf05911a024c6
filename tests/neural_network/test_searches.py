"""Neural estimators inside scikit-learn's tools and ours."""

import numpy as np
import pytest
import sklearn
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV

from pfl_sklearn._rounds import estimator
from pfl_sklearn.metrics import ClientMonitor, ClientScorer, client_scores
from pfl_sklearn.model_selection import ClientKFold, PrivateSelectCV
from pfl_sklearn.neural_network import FedAvgClassifier, PerFedAvgClassifier, PFedMeClassifier
from tests.helpers.net_fits import fit
from tests.helpers.nets import net_of, population_weights, recipe, table
from tests.helpers.slow import slow

pytestmark = pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")

SCORER = ClientScorer("accuracy")
NOISE = {"noise_multiplier": 2.0, "clip_norm": 0.3}


@pytest.fixture
def routing():
    with sklearn.config_context(enable_metadata_routing=True):
        yield


def model_of(**params):
    given = {"n_rounds": 2, "local_steps": 3, "random_state": 0, **params}
    return FedAvgClassifier(net_of(), **given)


@pytest.mark.slow
@pytest.mark.usefixtures("routing")
def test_a_grid_search_over_the_recipe():
    """Every candidate is the fit with its parameters; the recipe that was given stays."""
    X, y, groups = table()
    grid = {"estimator__lr": [1e-3, 0.1], "estimator__module__hidden": [(), 3]}
    search = GridSearchCV(model_of(), grid, cv=ClientKFold(2, random_state=0), scoring=SCORER)
    search.fit(X, y, groups=groups)
    assert search.best_params_["estimator__lr"] == 0.1
    scores = []
    for train, test in ClientKFold(2, random_state=0).split(X, y, groups):
        model = clone(search.estimator).set_params(**search.cv_results_["params"][3])
        model.fit(X[train], y[train], groups=groups[train])
        scores.append(model.score(X[test], y[test], groups=groups[test]))
    assert search.cv_results_["mean_test_score"][3] == pytest.approx(np.mean(scores))
    whole = model_of().set_params(**search.best_params_).fit(X, y, groups=groups)
    found = population_weights(search.best_estimator_)
    np.testing.assert_array_equal(found, population_weights(whole))
    assert search.estimator.estimator.lr == 0.1
    assert search.estimator.estimator.module__hidden == 5


def test_the_default_recipe_is_searchable():
    model = FedAvgClassifier().set_params(estimator__lr=0.3, estimator__module__hidden=(4, 4))
    assert model.get_params()["estimator__lr"] == 0.3
    fit(model.set_params(n_rounds=1))
    layers = model.net_.module_.layers
    assert [layer.out_features for layer in layers if hasattr(layer, "weight")] == [4, 4, 3]


@pytest.mark.usefixtures("routing")
def test_a_private_selection():
    X, y, groups = table()
    model = FedAvgClassifier(net_of(), n_rounds=2, local_steps=2, clip_norm=0.3)
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


# Monitors see the models of a fit that ends after their round -------------------------------------

MODELS = {
    "pFedMe": PFedMeClassifier(recipe(lr=0.3), client_fraction=0.6),
    "Per-FedAvg": PerFedAvgClassifier(recipe(lr=0.3), adapt_steps=4, client_fraction=0.6),
    "heads": FedAvgClassifier(recipe(), head=1.0, label_prior="client"),
    "noise": FedAvgClassifier(recipe(), fine_tune_steps=6, noise_multiplier=1.0, clip_norm=1.0),
}


@pytest.mark.parametrize("name", ["heads", *slow(["pFedMe", "Per-FedAvg", "noise"])])
@pytest.mark.slow
def test_scores_are_those_of_shorter_fits(name):
    """And looks change nothing."""
    X, y, groups = table()
    model = clone(MODELS[name]).set_params(local_steps=2, n_rounds=3, random_state=3)
    monitor = ClientMonitor(X, y, groups, scoring="neg_log_loss", every=2)
    watched = clone(model).set_callbacks(monitor).fit(X, y, groups=groups)
    np.testing.assert_array_equal(watched.parameters_, model.fit(X, y, groups=groups).parameters_)
    ended = model.set_params(n_rounds=2).fit(X, y, groups=groups)
    expected = client_scores(ended, X, y, groups=groups, scoring="neg_log_loss")["score"]
    np.testing.assert_array_equal(monitor.scores_.loc[2], expected)


def test_a_monitor_makes_personal_nets_only_where_it_looks(monkeypatch):
    X, y, groups = table()
    looks, ended = [], estimator.with_last_phase
    monkeypatch.setattr(estimator, "with_last_phase", lambda *its: looks.append(0) or ended(*its))
    monitor = ClientMonitor(X, y, groups, scoring="accuracy", every=3)
    model = clone(MODELS["pFedMe"]).set_params(n_rounds=7, local_steps=1).set_callbacks(monitor)
    model.fit(X, y, groups=groups)
    assert monitor.scores_.index.tolist() == [3, 6]
    assert len(looks) == 2
