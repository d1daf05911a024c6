"""Warnings name the line of the caller, however deep they were raised."""

import subprocess
import sys
import warnings

import numpy as np
import pytest
import sklearn
from sklearn.model_selection import GridSearchCV, KFold, cross_val_score, learning_curve
from sklearn.pipeline import make_pipeline

from pfl_sklearn import (
    BernoulliMean,
    ClientColumn,
    GaussianMean,
    PrivacyWarning,
    SingleClientWarning,
    UnseenClientsWarning,
)

X, GROUPS = np.zeros((6, 1)), [1, 1, 1, 2, 2, 2]
Y = np.array([0, 1, 0, 1, 1, 0])


@pytest.mark.parametrize("estimator", [GaussianMean, BernoulliMean])
def test_warnings_point_here(estimator):
    with pytest.warns(SingleClientWarning) as single:
        estimator().fit(X, Y)
    model = estimator().fit(X, Y, groups=GROUPS)
    with pytest.warns(UnseenClientsWarning) as unseen:
        model.predict(X, groups=[7] * 6)
    with pytest.warns(PrivacyWarning) as seeded:
        BernoulliMean(epsilon=1.0, random_state=0).fit_counts([1, 2], [3, 3])
    with (
        sklearn.config_context(enable_metadata_routing=True),
        pytest.warns(SingleClientWarning) as nested,
    ):
        make_pipeline(estimator()).fit(X, Y)
    for caught in (single, unseen, seeded, nested):
        assert caught[0].filename == __file__


SORTED = np.repeat(np.arange(12), 5)
TABLE, TARGETS = np.column_stack([SORTED, np.zeros(60)]), SORTED + np.arange(60) % 5
MODEL = ClientColumn(GaussianMean(), 0)
CALLS = {
    "folds": lambda model: cross_val_score(model, TABLE, TARGETS, cv=6),
    "search": lambda model: GridSearchCV(model, {"column": [0, -2]}, cv=3).fit(TABLE, TARGETS),
    "first rows": lambda model: learning_curve(
        model, TABLE, TARGETS, train_sizes=[0.1, 0.2], cv=KFold(3, shuffle=True, random_state=0)
    ),
}


@pytest.mark.parametrize("filtered", ["default", "always"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_one_call_tells_of_unseen_clients_once(call, filtered):
    for _ in range(2):  # and the next call tells of them again
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter(filtered)
            call(MODEL)
        assert [one.category for one in caught] == [UnseenClientsWarning]
        assert caught[0].filename == __file__
    call(ClientColumn(GaussianMean(unseen="population"), 0))


def test_an_unseen_client_that_is_an_error_is_one_in_every_fold():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnseenClientsWarning)
        scores = cross_val_score(MODEL, TABLE, TARGETS, cv=6, scoring=raising)
    assert scores.tolist() == [-1.0] * 6


def raising(model, X, y):
    try:
        model.predict(X)
    except UnseenClientsWarning:
        return -1.0


@pytest.mark.slow
def test_every_worker_tells_of_unseen_clients_once():
    script = """if True:
        import numpy as np
        from sklearn.model_selection import cross_val_score
        from pfl_sklearn import ClientColumn, GaussianMean
        ids = np.repeat(np.arange(12), 5)
        table = np.column_stack([ids, np.zeros(60)])
        cross_val_score(ClientColumn(GaussianMean(), 0), table, ids, cv=6, n_jobs=2)
    """
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert 1 <= done.stderr.count("UnseenClientsWarning") <= 2
