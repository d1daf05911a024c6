"""What estimators of one mean per client share."""

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose

from pfl_sklearn._client_means import (
    CLIENT_ATTRIBUTES,
    BaseClientMean,
    MeanRegressorMixin,
    moved_to_total,
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


# Totals.


BENCHMARKED = {
    "means": lambda: GaussianMean().fit(
        np.zeros((30, 1)), np.arange(30.0) % 7, groups=np.repeat(range(5), [2, 4, 6, 8, 10])
    ),
    "proportions": lambda: BernoulliMean().fit_counts([0, 3, 9, 5], [4, 6, 10, 9]),
    "rates": lambda: PoissonMean().fit_counts([0, 9, 31, 2], exposure=[1.0, 4.0, 5.5, 2.0]),
}


@pytest.mark.parametrize("kind", BENCHMARKED)
def test_benchmarked_means_add_up_with_the_smallest_moves(kind):
    model = BENCHMARKED[kind]()
    sizes = model.n_samples_per_client_ if kind == "means" else None
    if kind != "means":
        sizes = getattr(model, "exposure_per_client_", model.n_samples_per_client_)
    total = 1.05 * sizes @ model.means_
    moved = model.benchmark(total)
    assert moved.index.tolist() == model.clients_.tolist()
    assert sizes @ moved == pytest.approx(total)
    # No other move along the total has a smaller sum of squares.
    slopes = (moved - model.means_) / model.stds_**2
    assert_allclose(slopes / sizes, (slopes / sizes).iloc[0])
    assert_allclose(model.benchmark(sizes @ model.means_), model.means_)
    named = pd.Series(sizes, index=model.clients_)[::-1]
    assert_allclose(model.benchmark(total, weights=named), moved)
    w = np.array([1.0, 0, 2, 0, 0][: len(sizes)])
    assert w @ model.benchmark(2.5, weights=w) == pytest.approx(2.5)
    assert_allclose(model.benchmark(2.5, weights=w)[w == 0], model.means_[w == 0])


@pytest.mark.parametrize(
    ("kind", "total"), [("proportions", 28.9), ("proportions", 0.05), ("rates", 0.5)]
)
def test_benchmarked_means_stay_in_their_range(kind, total):
    model = BENCHMARKED[kind]()
    sizes = getattr(model, "exposure_per_client_", model.n_samples_per_client_)
    moved = model.benchmark(total).to_numpy()
    assert sizes @ moved == pytest.approx(total)
    assert (moved >= 0).all()
    if kind == "proportions":
        assert (moved <= 1).all()


@pytest.mark.parametrize(
    ("kind", "total", "weights", "message"),
    [
        ("proportions", 30.0, None, "between 0 and 29, the limits"),
        ("rates", -1.0, None, "total must be a finite number between 0 and inf"),
        ("means", np.nan, None, "total must be a finite number"),
        ("means", "3", None, "total must be a finite number"),
        ("means", 1.0, [1.0, 2.0], "weights must be 5 finite numbers"),
        ("means", 1.0, [1.0, 2, 3, 4, -1], "weights must be 5 finite numbers"),
        ("means", 1.0, [0.0] * 5, "not all 0"),
    ],
)
def test_totals_that_cannot_be(kind, total, weights, message):
    with pytest.raises(ValueError, match=message):
        BENCHMARKED[kind]().benchmark(total, weights=weights)
    with pytest.raises(ValueError, match="cannot make up for total=3"):
        moved_to_total(np.array([5.0, 1.0]), np.array([0.0, 1.0]), np.ones(2), 3.0, (0.0, np.inf))
    wide = PoissonMean().fit_counts([1, 2, 10**6, 0], exposure=[1.0, 1.0, 1e9, 1e-3])
    assert wide.exposure_per_client_ @ wide.benchmark(1.0) == pytest.approx(1.0)
    two = GaussianMean().fit(np.zeros((4, 1)), np.eye(4)[:, :2], groups=[0, 0, 1, 1])
    with pytest.raises(ValueError, match="means of one output"):
        two.benchmark(1.0)
