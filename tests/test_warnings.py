"""Warnings name the line of the caller, however deep they were raised."""

import warnings

import numpy as np
import pytest
import sklearn
from sklearn.model_selection import cross_val_score
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


def test_folds_of_unseen_clients_warn_at_the_callers_line():
    with pytest.warns(UnseenClientsWarning) as caught:
        cross_val_score(MODEL, TABLE, TARGETS, cv=6)
    assert {each.filename for each in caught} == {__file__}
    assert len(caught) == 6
