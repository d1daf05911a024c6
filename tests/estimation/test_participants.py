"""Remark 7 (ICLR): clients who send nothing receive the population, and personalize too."""

import numpy as np
import pandas as pd
import pytest
from scipy.integrate import quad_vec
from sklearn import config_context
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, GroupKFold

from pfl_sklearn import BernoulliMean, GaussianMean, PoissonMean
from pfl_sklearn.model_selection import PrivateSelectCV
from pfl_sklearn.priors import GaussianMixturePrior, GaussianPrior
from pfl_sklearn.theory import released_mean_risk

pytestmark = pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")
KNOWN = {"prior": GaussianPrior(covariance=0.8), "noise_variance": 1.5}
M = 24
SENDS = np.arange(M) % 3 > 0


def gaussian_rows(seed=0, d=None):
    """Rows of clients of unequal sizes, and their ids."""
    rng = np.random.default_rng(seed)
    groups = np.repeat([f"c{i:02d}" for i in range(M)], rng.integers(2, 9, M))
    codes = np.unique(groups, return_inverse=True)[1]
    shape = () if d is None else (d,)
    theta = rng.normal(size=(M, *shape))
    return theta[codes] + rng.normal(size=(len(codes), *shape)), groups, np.unique(groups)


def fit(y, groups, **params):
    model = GaussianMean(random_state=0, **params)
    return model.fit(np.zeros((len(y), 1)), y, groups=groups)


@pytest.mark.parametrize("bits", [None, 4])
def test_every_client_leaves_its_own_release_out(bits):
    """A loop over clients; their means are on the quantizer's grid, so that it sends them."""
    between, noise, rng = 0.8, 1.5, np.random.default_rng(0)
    means, n = 3 * (2 * rng.integers(0, 16, (M, 2)) / 15 - 1), rng.integers(1, 6, M)
    groups, y = np.repeat(np.arange(M), n), np.repeat(means, n, axis=0)
    release = {} if bits is None else {"mechanism": "quantizer", "n_bits": bits, "clip_norm": 3.0}
    model = fit(y, groups, **KNOWN, participants=np.flatnonzero(SENDS), **release)
    extra = 0.0 if bits is None else (3.0 / (2**bits - 1)) ** 2
    for i in range(M):
        others = [j for j in range(M) if SENDS[j] and j != i]
        weights = np.array([1 / (between + noise / n[j] + extra) for j in others])
        centre, v = weights @ means[others] / weights.sum(), 1 / weights.sum()
        own = (between + v) / (between + v + noise / n[i])
        np.testing.assert_allclose(model.means_[i], own * means[i] + (1 - own) * centre, atol=1e-9)
        np.testing.assert_allclose(model.stds_[i] ** 2, own * noise / n[i], rtol=1e-9)
        if bits is not None or not SENDS[i]:  # else the weight is on a mean that holds its own
            np.testing.assert_allclose(model.shrinkage_[i], 1 - own, rtol=1e-9)


def test_stated_errors_are_those_of_the_theory():
    y, groups, ids = gaussian_rows()
    params = {"epsilon": 1.0, "clip_norm": 4.0, "trust": "local"}
    model = fit(y, groups, **KNOWN, participants=ids[SENDS], **params)
    extra = np.where(SENDS, (model.privacy_.noise_std * 4.0) ** 2, np.inf)
    weight, risk = released_mean_risk(M, model.n_samples_per_client_, 0.8, 1.5, extra)
    np.testing.assert_allclose(1 - model.shrinkage_, weight, rtol=1e-9)
    np.testing.assert_allclose(model.stds_**2, risk, rtol=1e-9)


PRIVATE = {"epsilon": 20.0, "clip_norm": 4.0, "center": 0.5}
RELEASES = {
    "exact": {},
    "plug_in": {"uncertainty": "plug_in", "method": "moments"},
    "diag": {"prior": GaussianPrior(covariance_type="diag")},
    "central": {**PRIVATE, "noise_variance_bound": 5.0},
    "central, known": {**PRIVATE, **KNOWN},
    "local": {**PRIVATE, "epsilon": 200.0, "trust": "local", "noise_variance_bound": 5.0},
    "quantizer": {**KNOWN, "mechanism": "quantizer", "n_bits": 6, "clip_norm": 4.0},
}


@pytest.mark.parametrize(
    ("name", "d"),
    [*((name, None) for name in RELEASES), *((name, 2) for name in ("diag", "central", "local"))],
)
def test_the_population_is_that_of_the_participants_alone(name, d):
    """The same draws, so equal to rounding; the others' rows may be anything."""
    params = RELEASES[name]
    y, groups, ids = gaussian_rows(d=d)
    sent = np.isin(groups, ids[SENDS])
    alone = fit(y[sent], groups[sent], **params)
    model = fit(y, groups, **params, participants=ids[SENDS])
    moved = fit(np.where(sent if d is None else sent[:, None], y, 1e6 - y), groups, **params,
                participants=ids[SENDS])  # fmt: skip
    for name in ("population_mean_", "population_mean_std_", "noise_variance_", "icc_"):
        np.testing.assert_allclose(getattr(model, name), getattr(alone, name), rtol=1e-12)
        np.testing.assert_array_equal(getattr(model, name), getattr(moved, name))
    np.testing.assert_allclose(model.prior_.covariance, alone.prior_.covariance, rtol=1e-12)
    for name in ("means_", "stds_", "shrinkage_", "local_means_"):
        np.testing.assert_allclose(getattr(model, name)[SENDS], getattr(alone, name), atol=1e-12)
    for bound, there in zip(model.credible_interval(), alone.credible_interval(), strict=True):
        np.testing.assert_allclose(bound[SENDS], there, atol=1e-9)
    assert list(model.clients_) == list(ids)
    assert model.privacy_.n_clients == SENDS.sum()
    assert model.privacy_.epsilon == alone.privacy_.epsilon
    if np.isfinite(model.privacy_.epsilon):
        stated = [text for text in model.privacy_.assumptions if "16 of 24 clients" in text]
        assert len(stated) == 1
        assert not any("clients take part" in text for text in alone.privacy_.assumptions)


@pytest.mark.parametrize("params", [{}, {**PRIVATE, "noise_variance_bound": 5.0}], ids=str)
def test_who_receives_shrinks_towards_what_was_broadcast(params):
    """With the plug-in: a normal prior around the population mean, and its standard error."""
    y, groups, ids = gaussian_rows()
    model = fit(y, groups, uncertainty="plug_in", participants=ids[SENDS], **params)
    around = model.prior_.covariance[0, 0] + model.population_mean_std_**2
    sampling = model.noise_variance_ / model.n_samples_per_client_
    own = (around / (around + sampling))[~SENDS]
    expected = own * model.local_means_[~SENDS] + (1 - own) * model.population_mean_
    np.testing.assert_allclose(model.means_[~SENDS], expected, rtol=1e-12)
    np.testing.assert_allclose(model.stds_[~SENDS] ** 2, own * sampling[~SENDS], rtol=1e-12)


def test_a_useless_noise_variance_leaves_everybody_alone():
    y, groups, ids = gaussian_rows()
    params = {"epsilon": 0.05, "clip_norm": 4.0, "prior": GaussianPrior(covariance=1.0)}
    with pytest.warns(UserWarning, match="noise_variance"):
        model = fit(y, groups, participants=ids[SENDS], **params)
    np.testing.assert_array_equal(model.means_, model.local_means_)


def test_averages_of_a_client_that_sends_nothing_match_brute_force():
    """Four clients of three rows send; the ratio t = tau / sigma has a half-Cauchy prior."""
    rng = np.random.default_rng(0)
    groups = np.append(np.repeat(np.arange(4), 3), [4, 4])
    y = np.append(0.7 * rng.normal(size=4), 1.5)[groups] + rng.normal(size=14)
    model = fit(y, groups, participants=range(4))
    rows, own_mean = y[:12].reshape(4, 3), y[12:].mean()
    means = rows.mean(axis=1)
    within = np.sum((rows - means[:, None]) ** 2)

    def at(t):
        variance = t**2 + 1 / 3
        square = within + np.sum((means - means.mean()) ** 2) / variance
        weight = variance ** (-3 / 2) * square ** (-11 / 2) / (1 + t**2)
        around = t**2 + variance / 4
        own = around / (around + 1 / 2)
        mean = own * own_mean + (1 - own) * means.mean()
        return weight * np.array([1, square / 9 * own / 2 + (mean - model.means_[4]) ** 2])

    total, own = quad_vec(at, 0, np.inf)[0]
    assert model.stds_[4] ** 2 == pytest.approx(own / total, rel=1e-3)
    lower, upper = model.credible_interval()
    assert lower[4] < model.means_[4] < upper[4]


def counts(unequal, seed=0):
    rng = np.random.default_rng(seed)
    trials = rng.integers(5, 15, M) if unequal else np.full(M, 10)
    return rng.binomial(trials, rng.beta(3, 5, M)), trials


COUNTED = {
    "ml": {},
    "grid": {"prior": "grid"},
    "moments": {"method": "moments", "uncertainty": "plug_in"},
    "subset": {"epsilon": 2.0},
    "two bits": {"epsilon": 2.0, "mechanism": "two_bit"},
    "central": {"epsilon": 2.0, "delta": 1e-5, "trust": "central"},
    "rates": {},
    "rates, subset of cells": {"epsilon": 1.0, "cap": 30},
    "rates, central": {"epsilon": 1.0, "cap": 30, "delta": 1e-5, "trust": "central"},
}


@pytest.mark.parametrize(
    ("name", "unequal"),
    # Subset selection needs equal numbers of trials; a server then releases a histogram.
    [(name, "subset" not in name) for name in COUNTED] + [("central", False)],
)
def test_the_prior_of_counts_is_that_of_the_participants_alone(name, unequal):
    """Of two clients with equal counts, the one that sends nothing gets the same estimate."""
    (successes, trials), params = counts(unequal), COUNTED[name]
    kind = PoissonMean if "rates" in name else BernoulliMean
    twins = np.flatnonzero(SENDS)[: M - SENDS.sum()]
    successes[~SENDS], trials[~SENDS] = successes[twins], trials[twins]
    model = kind(random_state=0, participants=np.flatnonzero(SENDS), **params)
    model.fit_counts(successes, trials)
    alone = kind(random_state=0, **params).fit_counts(successes[SENDS], trials[SENDS])
    for name in ("population_mean_", "population_mean_std_", "icc_"):
        assert getattr(model, name) == pytest.approx(getattr(alone, name), rel=1e-12)
    for name in ("means_", "stds_", "shrinkage_"):
        values = getattr(model, name)
        np.testing.assert_allclose(values[SENDS], getattr(alone, name), atol=1e-12)
        np.testing.assert_allclose(values[~SENDS], values[twins], atol=1e-12)
    for bound in model.credible_interval():
        np.testing.assert_allclose(bound[~SENDS], bound[twins], atol=1e-9)
    assert model.privacy_.n_clients == SENDS.sum()
    if "epsilon" in params:
        assert any("16 of 24 clients" in text for text in model.privacy_.assumptions)


def test_few_participants_are_few_among_however_many_clients():
    """The share of averaged variances follows from the number of participants."""
    rng, ids = np.random.default_rng(0), np.arange(1200)
    groups, participants = np.repeat(ids, 2), ids[:20]
    y = rng.normal(size=1200)[groups] + rng.normal(size=2400)
    model = fit(y, groups, participants=participants)
    alone = fit(y[:40], groups[:40])
    np.testing.assert_allclose(model.stds_[:20], alone.stds_, rtol=1e-9)
    successes, trials = rng.binomial(9, rng.beta(3, 5, 1200)), np.full(1200, 9)
    model = BernoulliMean(participants=participants).fit_counts(successes, trials)
    alone = BernoulliMean().fit_counts(successes[:20], trials[:20])
    np.testing.assert_allclose(model.stds_[:20], alone.stds_, rtol=1e-9)


def test_trials_of_clients_that_send_nothing_do_not_choose_the_mechanism():
    successes, trials = counts(False)
    trials[~SENDS] += 3
    model = BernoulliMean(epsilon=1.0, participants=np.flatnonzero(SENDS), random_state=0)
    assert "subset" in model.fit_counts(successes, trials).privacy_.mechanism


def test_copies_do_not_hold_the_ids():
    y, groups, ids = gaussian_rows()
    model = fit(y, groups, **PRIVATE, **KNOWN, participants=list(ids[SENDS]))
    assert clone(model).participants == list(ids[SENDS])
    assert model.release().participants is None
    own = model.for_client(ids[0])
    assert own.participants is None
    assert own.means_[0] == model.means_[0]


@pytest.mark.parametrize("kind", [set, dict.fromkeys, pd.Index])
def test_collections_of_ids(kind):
    y, groups, ids = gaussian_rows()
    model, listed = (fit(y, groups, participants=make(ids[SENDS])) for make in (kind, list))
    np.testing.assert_array_equal(model.means_, listed.means_)


def test_folds_may_lack_participants():
    y, groups, ids = gaussian_rows()
    grid = {"participants": [None, ids[SENDS]]}
    model = GaussianMean(unseen="population")
    with config_context(enable_metadata_routing=True):
        search = GridSearchCV(model, grid, cv=GroupKFold(3), error_score="raise")
        search.fit(np.zeros((len(y), 1)), y, groups=groups)
    assert len(search.cv_results_["params"]) == 2


def test_a_selection_by_scores_of_all_clients_costs_all_of_them():
    """What the others spend on the fit is not what they spend on the scores of their rows."""
    y, groups, ids = gaussian_rows()
    model = GaussianMean(clip_norm=9.0, noise_variance=1.5, participants=ids[SENDS])
    chosen = PrivateSelectCV(
        model, {"clip_norm": [9.0]}, epsilon=1.0, score_range=(-9, 0), random_state=0
    ).fit(np.zeros((len(y), 1)), y, groups=groups)
    (stated,) = (text for text in chosen.privacy_.assumptions if "16 of 24 clients" in text)
    assert "in the fit" in stated
    assert "epsilon" not in stated


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (GaussianMean(participants=["c00"]), r"participants.*1 of 24"),
        (GaussianMean(participants=["x", "y"]), r"participants.*0 of 24"),
        (GaussianMean(participants=[0, 1]), r"participants.*number.*string"),
        (GaussianMean("discrete", participants=["c00", "c01"]), "participants.*DiscretePrior"),
        (
            GaussianMean(GaussianMixturePrior(2), participants=["c00", "c01"]),
            "participants.*GaussianMixturePrior",
        ),
        (BernoulliMean(participants=["c00"]), r"participants.*1 of 24"),
        (PoissonMean(participants=["c00"]), r"participants.*1 of 24"),
        (
            BernoulliMean(method="printed", participants=["c00", "c01"]),
            r"participants.*method='printed'.*'ml'",
        ),
        (
            BernoulliMean(
                method="printed_eq32", epsilon=1.0, mechanism="one_bit", participants=["c00", "c01"]
            ),
            r"participants.*method='printed_eq32'",
        ),
    ],
)
def test_what_participants_do_not_go_with(model, message):
    y, groups, _ = gaussian_rows()
    y = y if isinstance(model, GaussianMean) else y > 0
    with pytest.raises(ValueError, match=message):
        model.fit(np.zeros((len(y), 1)), y, groups=groups)
    assert not hasattr(model, "means_")
