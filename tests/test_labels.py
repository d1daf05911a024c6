"""Class labels that are none."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from pfl_sklearn import BernoulliMean, PersonalizedLogisticRegression, PPSGDClassifier
from pfl_sklearn.compose import ClientSelector
from tests.helpers.torch import WITHOUT_TORCH

CLASSIFIERS = [
    BernoulliMean(),
    BernoulliMean(epsilon=1.0),
    PersonalizedLogisticRegression(),
    PPSGDClassifier(),
    ClientSelector([("line", LogisticRegression())]),
]
if not WITHOUT_TORCH:
    from pfl_sklearn import FedAvgClassifier

    CLASSIFIERS.append(FedAvgClassifier())


@pytest.mark.parametrize("estimator", CLASSIFIERS, ids=repr)
@pytest.mark.parametrize("value", [1e19, -1e155, 1e300])
def test_numbers_that_floats_do_not_tell_apart_are_no_labels(estimator, value):
    """Without a warning of a cast, which would tell that there are some."""
    y = np.tile([0.0, value], 6)
    with pytest.raises(ValueError, match=r"Unknown label type.*\by\b.*2\*\*53"):
        estimator.fit(np.arange(12.0)[:, None], y, groups=np.repeat([0, 1, 2], 4))


@pytest.mark.parametrize("estimator", CLASSIFIERS, ids=repr)
def test_shares_are_no_labels(estimator):
    y = np.linspace(0.05, 0.95, 12)
    with pytest.raises(ValueError, match=r"Unknown label type.*shares.*sample_weight.*fit_counts"):
        estimator.fit(np.arange(12.0)[:, None], y, groups=np.repeat([0, 1, 2], 4))


def test_large_whole_numbers_are_labels():
    y = np.tile([0.0, 2.0**53], 6)
    model = BernoulliMean().fit(np.zeros((12, 1)), y, groups=np.repeat([0, 1, 2], 4))
    assert model.classes_.tolist() == [0.0, 2.0**53]
