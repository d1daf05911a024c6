"""Monitors see the models that a fit would give if it ended after their round."""

import numpy as np
import pytest
from sklearn.base import clone

pytest.importorskip("torch")
pytest.importorskip("skorch")

from pfl_sklearn._rounds import estimator
from pfl_sklearn.metrics import ClientMonitor, client_scores
from pfl_sklearn.neural_network import (
    FedAvgClassifier,
    PerFedAvgClassifier,
    PFedMeClassifier,
)
from tests.helpers.nets import recipe, table

MODELS = {
    "pFedMe": PFedMeClassifier(recipe(lr=0.3), client_fraction=0.6),
    "Per-FedAvg": PerFedAvgClassifier(recipe(lr=0.3), adapt_steps=4, client_fraction=0.6),
    "fine-tuned": FedAvgClassifier(recipe(), fine_tune_steps=6),
    "heads": FedAvgClassifier(recipe(), head=1.0, label_prior="client"),
    "noise": PerFedAvgClassifier(recipe(), noise_multiplier=1.0, clip_norm=1.0),
}


@pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")
@pytest.mark.parametrize("name", MODELS)
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
    looks, ended = [], estimator.as_if_ended
    monkeypatch.setattr(estimator, "as_if_ended", lambda *given: looks.append(0) or ended(*given))
    monitor = ClientMonitor(X, y, groups, scoring="accuracy", every=3)
    model = clone(MODELS["pFedMe"]).set_params(n_rounds=7, local_steps=1).set_callbacks(monitor)
    model.fit(X, y, groups=groups)
    assert monitor.scores_.index.tolist() == [3, 6]
    assert len(looks) == 2
