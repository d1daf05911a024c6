"""What estimators of one mean per client share."""

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose
from scipy import stats

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
from pfl_sklearn.priors import BetaPrior, GammaPrior, GaussianPrior

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


# Exceedance.


KNOWN = {
    "means": (
        lambda: GaussianMean(GaussianPrior(1.0, 4.0), noise_variance=2.0).fit(
            np.zeros((30, 1)), np.arange(30.0) % 7, groups=np.repeat(range(5), [2, 4, 6, 8, 10])
        ),
        lambda model, t: stats.norm.sf(t, model.means_, model.stds_),
    ),
    "proportions": (
        lambda: BernoulliMean(BetaPrior(2.0, 3.0)).fit_counts([0, 3, 9, 5], [4, 6, 10, 9]),
        lambda model, t: stats.beta.sf(
            t, 2.0 + np.array([0, 3, 9, 5]), 3.0 + np.array([4, 3, 1, 4])
        ),
    ),
    "rates": (
        lambda: PoissonMean(GammaPrior(2.0, 1.0)).fit_counts([0, 9, 31], exposure=[1.0, 4.0, 5.5]),
        lambda model, t: stats.gamma.sf(
            t, 2.0 + np.array([0, 9, 31]), scale=1 / (1 + np.array([1.0, 4.0, 5.5]))
        ),
    ),
}


@pytest.mark.parametrize("kind", KNOWN)
def test_exceedance_is_of_the_posterior(kind):
    fit, expected = KNOWN[kind]
    model = fit()
    thresholds = {
        "means": [-9.0, 2.0, 2.9],
        "proportions": [0.02, 0.4, 0.99],
        "rates": [0.1, 1.5, 9.0],
    }
    for threshold in thresholds[kind]:
        found = model.exceedance(threshold)
        assert_allclose(found, expected(model, threshold), atol=3e-4)
    assert found.index.tolist() == model.clients_.tolist()
    own = pd.Series(model.means_, index=model.clients_)
    assert_allclose(model.exceedance(own[::-1]), expected(model, model.means_), atol=3e-4)


@pytest.mark.parametrize("kind", BENCHMARKED)
@pytest.mark.slow
def test_exceedance_at_the_bounds_of_intervals(kind):
    """Also where errors are averaged over variances."""
    model = BENCHMARKED[kind]()
    lower, upper = model.credible_interval(0.9)
    assert_allclose(model.exceedance(lower), 0.95, atol=2e-3 if kind == "means" else 1e-9)
    assert_allclose(model.exceedance(upper), 0.05, atol=2e-3 if kind == "means" else 1e-9)


@pytest.mark.parametrize("kind", ["proportions", "rates"])
def test_ranks_are_drawn_with_the_population(kind):
    """Draws have the distance from the estimates that the standard deviations state."""
    model = BENCHMARKED[kind]()
    priors, *counts = model._averaged_posterior()
    draws = priors.draws(*counts, 40_000, np.random.RandomState(0))
    distance = np.sqrt(np.mean((draws - model.means_) ** 2, axis=0))
    assert_allclose(distance, model.stds_, rtol=0.03)
    assert_allclose(model.ranks()["rank"].sum(), len(counts[0]) * (len(counts[0]) + 1) / 2)


@pytest.mark.parametrize(
    ("kind", "threshold", "message"),
    [
        ("proportions", 1.5, "threshold must be one number or 4, between 0 and 1; got 1.5"),
        ("rates", -1.0, "between 0 and inf"),
        ("means", [1.0, 2.0], "threshold must be one number or 5"),
        ("means", np.nan, "threshold must be one number or 5"),
    ],
)
def test_thresholds_that_cannot_be(kind, threshold, message):
    with pytest.raises(ValueError, match=message):
        BENCHMARKED[kind]().exceedance(threshold)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("kind", KNOWN)
def test_ranks_are_of_the_posterior(kind):
    fit, tail = KNOWN[kind]
    model = fit()
    table = model.ranks(n_draws=4000)
    assert table["rank"].is_monotonic_increasing
    own = table.sort_index()
    assert_allclose(own["estimate"], model.means_)
    # The probability of the largest, by integrating the others' tails over one client's quantiles.
    levels = (np.arange(2000) + 0.5) / 2000
    at = np.linspace(*_range_of(kind), 4001)
    below = np.array([1 - tail(model, t) for t in at])  # (t, client)
    for k, found in enumerate(own["probability_largest"]):
        quantiles = np.interp(levels, below[:, k], at)
        others = [np.interp(quantiles, at, each) for each in np.delete(below, k, axis=1).T]
        assert_allclose(found, np.mean(np.prod(others, axis=0)), atol=0.03)


def _range_of(kind):
    return {"means": (-9.0, 14.0), "proportions": (0.0, 1.0), "rates": (0.0, 30.0)}[kind]


# Meta-analysis: the trials of the BCG vaccine, as metafor prints them.


def bcg_trials():
    """Log relative risks and their variances."""
    treated = np.array([4, 6, 3, 62, 33, 180, 8, 505, 29, 17, 186, 5, 27])
    well = [119, 300, 228, 13536, 5036, 1361, 2537, 87886, 7470, 1699, 50448, 2493, 16886]
    control = np.array([11, 29, 11, 248, 47, 372, 10, 499, 45, 65, 141, 3, 29])
    others = [128, 274, 209, 12619, 5761, 1079, 619, 87892, 7232, 1600, 27197, 2338, 17825]
    sizes = treated + well, control + others
    effects = np.log(treated / sizes[0]) - np.log(control / sizes[1])
    return effects, 1 / treated - 1 / sizes[0] + 1 / control - 1 / sizes[1]


@pytest.mark.parametrize(
    ("method", "mean", "error", "between"),
    [
        ("reml", -0.7145, 0.1798, 0.3132),
        ("moments", -0.7141, 0.1787, 0.3088),  # DerSimonian and Laird
        ("ml", -0.7112, 0.1719, 0.2800),
    ],
)
def test_random_effects_meta_analysis(method, mean, error, between):
    effects, variances = bcg_trials()
    model = GaussianMean(method=method, noise_variance=1.0, uncertainty="plug_in")
    model.fit(np.zeros((13, 1)), effects, groups=np.arange(13), sample_weight=1 / variances)
    assert model.population_mean_ == pytest.approx(mean, abs=5e-5)
    assert model.population_mean_std_ == pytest.approx(error, abs=5e-5)
    assert float(np.squeeze(model.prior_.covariance)) == pytest.approx(between, abs=5e-5)
