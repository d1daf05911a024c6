"""What estimators of one mean per client share."""

import numpy as np
import pytest

from pfl_sklearn._client_means import (
    CLIENT_ATTRIBUTES,
    BaseClientMean,
    MeanRegressorMixin,
    participant_mask,
    report_of_fit,
)
from pfl_sklearn._clients import row_counts, segment_sums
from pfl_sklearn.base import read_rows
from pfl_sklearn.estimation import BernoulliMean, GaussianMean, PoissonMean
from pfl_sklearn.online import CollaborativeMean

X, GROUPS = np.zeros((8, 2)), np.repeat(["a", "b", "c", "d"], 2)
Y = np.array([0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0])
every_mean = pytest.mark.parametrize(
    "kind", [GaussianMean, BernoulliMean, PoissonMean, CollaborativeMean]
)


@every_mean
@pytest.mark.parametrize("level", ["wide", None, 0.0, 1.0, np.nan])
def test_levels_that_are_no_probability_are_refused(kind, level):
    model = kind().fit(X, Y, groups=GROUPS)
    for method in (model.credible_interval, model.summary):
        with pytest.raises(ValueError, match=rf"level must be a number in \(0, 1\); got {level!r}"):
            method(level)


class HalfwayMean(MeanRegressorMixin, BaseClientMean):
    """A likelihood without a private fit: own means, moved half the way to 0."""

    _likelihood = "mean"
    _population_attributes = ("population_mean_", "_new_client_std")

    def __init__(self, prior="gaussian", unseen="warn"):
        self.prior, self.unseen = prior, unseen

    def fit(self, X, y, *, groups=None):
        self._charged_prior(None)
        rows = read_rows(self, X, y, groups, None)
        ids, codes = rows.clients
        n_rows = row_counts(codes, len(ids))
        local = segment_sums(rows.y, codes, len(ids)) / n_rows
        attributes = {
            "n_samples_per_client_": n_rows,
            "local_means_": local,
            "means_": local / 2,
            "stds_": np.ones(len(ids)),
            "population_mean_": 0.0,
            "_new_client_std": 2.0,
        }
        report = report_of_fit(self, (), CLIENT_ATTRIBUTES, participant_mask(None, ids), {})
        return self._store(ids, attributes, report, with_groups=groups is not None, X=X)


def test_a_likelihood_without_a_private_fit_needs_no_privacy_parameters():
    model = HalfwayMean(unseen="population").fit(X, Y, groups=GROUPS)
    means, stds = model.predict(X[:2], groups=["b", "new"], return_std=True)
    np.testing.assert_array_equal(means, [0.5, 0.0])
    np.testing.assert_array_equal(stds, [1.0, 2.0])
    assert list(model.summary().columns[:3]) == ["n_samples", "local_mean", "mean"]
    assert model.n_features_in_ == 2
    assert model.privacy_.epsilon == np.inf
    with pytest.raises(ValueError, match="HalfwayMean has no private fit"):
        model.release()
