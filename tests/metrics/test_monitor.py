import math

import numpy as np
import pytest
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from pfl_sklearn import PPSGDClassifier, PPSGDRegressor
from pfl_sklearn.compose import ClientColumn
from pfl_sklearn.inspection import ConvergenceDisplay
from pfl_sklearn.metrics import ClientMonitor, ClientScorer

ROUNDS = {"learning_rate": 0.1, "client_fraction": 0.5, "random_state": 0}


def table(seed=0, n_clients=6):
    rng = np.random.default_rng(seed)
    groups, X = np.repeat([f"site {k}" for k in range(n_clients)], 10), rng.normal(size=(60, 2))
    return X, X @ [1.0, -2.0] + rng.normal(size=60), groups


def monitor(**params):
    X, y, groups = table(seed=1)
    return ClientMonitor(X, y, groups, **{"scoring": "r2", **params})


def fitted(watching, cls=PPSGDRegressor, **params):
    X, y, groups = table()
    model = cls(**{"n_rounds": 12, **ROUNDS, **params}).set_callbacks(watching)
    return model.fit(X, y, groups=groups)


def test_a_look_scores_the_model_of_its_round():
    watching = monitor(every=3)
    fitted(watching)
    X, y, groups = table()
    seen_X, seen_y, seen_groups = table(seed=1)
    assert watching.scores_.index.tolist() == [3, 6, 9, 12]
    for t, scores in watching.scores_.iterrows():
        model = PPSGDRegressor(n_rounds=t, **ROUNDS).fit(X, y, groups=groups)
        expected = ClientScorer("r2", average=None)(model, seen_X, seen_y, groups=seen_groups)
        assert scores.to_dict() == pytest.approx(expected, rel=1e-12)


def test_patience_ends_the_rounds():
    class Falling(ClientMonitor):
        """The mean is highest after round 3; one client has no score."""

        def __init__(self, *args, **params):
            super().__init__(*args, **params)
            self._scorer = lambda model, X, y, groups: {
                "a": -abs(model.n_rounds_ - 3.0),
                "b": math.nan,
            }

    watching = Falling(*table(), scoring="r2", patience=4)
    assert fitted(watching).n_rounds_ == 7
    assert watching.best_round_ == 3
    assert len(watching.scores_) == 7
    assert fitted(Falling(*table(), scoring="r2")).n_rounds_ == 12


def test_scores_go_on_with_a_warm_start_and_start_anew_with_a_fit():
    watching, (X, y, groups) = monitor(every=2), table()
    model = fitted(watching, warm_start=True, n_rounds=4)
    first = watching.scores_
    model.set_params(n_rounds=8).fit(X, y, groups=groups)
    assert watching.scores_.index.tolist() == [2, 4, 6, 8]
    np.testing.assert_array_equal(watching.scores_.loc[:4], first)
    fitted(watching, n_rounds=2)
    assert watching.scores_.index.tolist() == [2]


@pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")
def test_rounds_that_scores_ended_promise_nothing():
    private = {"noise_multiplier": 50.0, "clip_norm": 1.0, "client_fraction": 1.0, "delta": 1e-3}
    watched = fitted(monitor(), **private)
    assert watched.n_rounds_ == 12
    assert watched.privacy_.epsilon < math.inf
    assert "what callbacks recorded" in " ".join(watched.privacy_.not_released)
    # That the rounds did not end tells of the rows as well.
    for patience in (1, 100):
        ended = fitted(monitor(patience=patience), **private)
        assert (ended.n_rounds_ < 12) == (patience == 1)
        assert ended.privacy_.epsilon == math.inf
    X, y, groups = table()
    ended.set_callbacks().set_params(warm_start=True, n_rounds=14).fit(X, y, groups=groups)
    assert ended.privacy_.epsilon == math.inf


def test_scores_of_an_earlier_fit_do_not_stay():
    watching = monitor(every=3)
    fitted(watching, n_rounds=6)
    fitted(watching, n_rounds=2)
    assert watching.scores_.empty


def test_rounds_that_come_again_keep_those_before():
    watching, (X, y, groups) = monitor(), table()
    model = fitted(watching, warm_start=True, n_rounds=4)
    again = fitted(watching, warm_start=True, n_rounds=6)
    model.set_params(n_rounds=5).fit(X, y, groups=groups)
    assert watching.scores_.index.tolist() == [1, 2, 3, 4, 5]
    assert again.n_rounds_ == 6


def test_inside_of_a_pipeline_and_a_client_column():
    X, y, groups = table()
    scaled = StandardScaler().fit(X)
    seen_X, seen_y, seen_groups = table(seed=1)
    watching = ClientMonitor(scaled.transform(seen_X), seen_y, seen_groups, scoring="r2")
    inner = PPSGDRegressor(n_rounds=5, **ROUNDS).set_callbacks(watching)
    ClientColumn(make_pipeline(StandardScaler(), inner), 0).fit(
        np.column_stack([groups, X.astype(object)]), y
    )
    alone = ClientMonitor(scaled.transform(seen_X), seen_y, seen_groups, scoring="r2")
    model = PPSGDRegressor(n_rounds=5, **ROUNDS).set_callbacks(alone)
    model.fit(scaled.transform(X), y, groups=groups)
    np.testing.assert_allclose(watching.scores_, alone.scores_, rtol=1e-12)


def test_scores_can_be_drawn():
    watching = monitor()
    display = ConvergenceDisplay.from_estimator(fitted(watching), scores=watching.scores_)
    assert display.curves[-1].name == "client scores"
    np.testing.assert_allclose(display.curves[-1].values, watching.scores_.median(axis=1))


def test_bad_input():
    X, y, groups = table()
    for params in ({"every": 0}, {"patience": 0}, {"every": 1.5}):
        with pytest.raises(ValueError, match=f"{next(iter(params))} must be an integer"):
            monitor(**params)
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        ClientMonitor(X, y[1:], groups, scoring="r2")
    with pytest.raises(ValueError, match="scoring"):
        monitor(scoring="no such score")
    with pytest.raises(AttributeError, match="no scores yet"):
        _ = monitor().best_round_


def test_a_score_that_no_client_has():
    X, _, groups = table()
    one_class = ClientMonitor(X, np.zeros(60, dtype=int), groups, scoring="roc_auc", patience=2)
    with pytest.raises(ValueError, match="score is not defined for any client"):
        fitted_classes(one_class)


def fitted_classes(watching):
    X, y, groups = table()
    model = PPSGDClassifier(n_rounds=3, **ROUNDS).set_callbacks(watching)
    return model.fit(X, (y > 0).astype(int), groups=groups)
