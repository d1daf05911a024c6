"""Warnings name the line of the caller, however deep they were raised."""

import numpy as np
import pytest
import sklearn
from sklearn.pipeline import make_pipeline

from pfl_sklearn import (
    BernoulliMean,
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
