"""Proportions and rates of all clients that may be published."""

import pickle
import warnings

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy.special import logsumexp
from scipy.stats import betabinom, gamma, nbinom

from pfl_sklearn import BernoulliMean, PoissonMean, PrivacyWarning
from pfl_sklearn.estimation._published._counts import (
    BINOMIAL,
    POISSON,
    ReleasedCounts,
    _log_of_uniform,
    published_counts,
)
from pfl_sklearn.priors import BetaPrior, GammaPrior
from pfl_sklearn.privacy import BudgetExceeded, PrivacyLedger
from pfl_sklearn.privacy.auditing import odds_lower_bound

RNG = np.random.default_rng(0)
CHANCES, RATES = RNG.beta(8, 5, 40), RNG.gamma(4, 0.25, 40)
TRIALS, EXPOSURE = RNG.integers(3, 40, 40), np.exp(RNG.normal(2, 1, 40))
SUCCESSES, EVENTS = RNG.binomial(TRIALS, CHANCES), RNG.poisson(RATES * EXPOSURE)
KINDS = {
    "proportions": (BernoulliMean, "row", SUCCESSES, TRIALS, CHANCES),
    "rates": (PoissonMean, "event", EVENTS, EXPOSURE, RATES),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def fit(kind, counts=None, epsilon=1.0, **params):
    """A fit that publishes; that a seed is no protection is tested by itself."""
    estimator, unit, own, sizes, _ = KINDS[kind]
    given = {"unit": unit, "publish": "clients", "unseen": "population", "epsilon": epsilon}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "random_state was given", PrivacyWarning)
        return estimator(**{**given, **params}).fit_counts(own if counts is None else counts, sizes)


# Estimates ----------------------------------------------------------------------------------------


def predictive(family, counts, sizes, a, b):
    """Logarithms of the probabilities of counts by scipy."""
    if family is BINOMIAL:
        return betabinom.logpmf(counts, sizes, a, b)
    return nbinom.logpmf(counts, a, b / (b + sizes))


def brute_force(family, released, of_table):
    """Posterior means and standard deviations over a dense grid of priors and all counts."""
    axis = np.linspace(*family.range_of_means(released), 100)
    means, shares = (axis.ravel() for axis in np.meshgrid(axis, np.linspace(-12, 12, 100)))
    a, b = family.parameters(means, shares)
    log_prior = family.log_prior(means) + _log_of_uniform(shares)
    most = int(released.sizes.max()) if family is BINOMIAL else int(released.counts.max()) + 60
    values, log_fits, parts = np.arange(most + 1), log_prior, []
    for count, size in zip(released.counts, released.sizes, strict=True):
        log_joint = predictive(family, values, size, a[:, None], b[:, None])
        log_joint = log_joint - np.abs(count - values) / released.scale
        log_fits = log_fits + logsumexp(log_joint, axis=1)
        chances = np.exp(log_joint - logsumexp(log_joint, axis=1, keepdims=True))
        mean, variance = values / size, 0.0
        if not of_table:
            mean, variance = family.moments(values, size, a[:, None], b[:, None])
        parts.append((chances, np.broadcast_to(mean, chances.shape), variance))
    weights = np.exp(log_fits - log_fits.max())
    weights /= weights.sum()
    found = []
    for chances, mean, variance in parts:
        centre = weights @ np.sum(chances * mean, axis=1)
        square = weights @ np.sum(chances * (variance + (mean - centre) ** 2), axis=1)
        found.append((centre, np.sqrt(square)))
    return np.array(found).T


@pytest.mark.slow
@pytest.mark.parametrize("of_table", [True, False])
@pytest.mark.parametrize("epsilon", [0.3, 2.0])
@pytest.mark.parametrize("family", [BINOMIAL, POISSON], ids=["binomial", "poisson"])
def test_a_dense_grid_of_priors_gives_the_same(family, epsilon, of_table):
    sizes = np.array([3, 10, 20, 6, 1, 12])
    counts = np.array([2, 7, 9, 6, 0, 5]) + np.array([1, -2, 0, 3, -1, 0])
    released = ReleasedCounts(counts, sizes, 1 / epsilon)
    found = published_counts(family, released, None, of_table)
    mean, std = brute_force(family, released, of_table)
    assert_allclose((found.means - mean) / std, 0, atol=0.06)
    # Where six counts say hardly anything, the tail of the mean rate is longer than the grid.
    assert_allclose(found.stds, std, rtol=0.08)


@every_kind
@pytest.mark.parametrize("target", ["population", "table"])
def test_estimates_are_nearer_than_noised_counts(kind, target):
    _, _, counts, sizes, truth = KINDS[kind]
    truth = counts / sizes if target == "table" else truth
    model = fit(kind, target=target, epsilon=0.5, random_state=0)
    noised, shrunken = (
        np.average((estimates - truth) ** 2, weights=sizes)
        for estimates in (model.local_means_, model.means_)
    )
    assert shrunken < 0.9 * noised
    lower, upper = model.credible_interval()
    assert np.mean((lower <= truth + 1e-12) & (truth - 1e-12 <= upper)) > 0.8
    assert (lower <= model.means_).all()
    assert (model.means_ <= upper).all()
    assert ((model.shrinkage_ > 0) & (model.shrinkage_ < 1)).all()


@pytest.mark.slow
@every_kind
@pytest.mark.parametrize("target", ["population", "table"])
def test_intervals_cover(kind, target):
    sizes = KINDS[kind][3]
    hits = []
    for seed in range(25):
        rng = np.random.default_rng(seed)
        if kind == "proportions":
            truth = rng.beta(8, 5, 40)
            counts = rng.binomial(sizes, truth)
        else:
            truth = rng.gamma(4, 0.25, 40)
            counts = rng.poisson(truth * sizes)
        truth = counts / sizes if target == "table" else truth
        lower, upper = fit(kind, counts, target=target, random_state=seed).credible_interval()
        hits.append(np.mean((lower <= truth + 1e-12) & (truth - 1e-12 <= upper)))
    # Counts are whole numbers, and intervals of them hold at least what they say.
    assert 0.92 < np.mean(hits) < (0.985 if target == "population" else 1)


@every_kind
def test_without_much_noise_they_are_those_of_exact_counts(kind):
    estimator, _, counts, sizes, _ = KINDS[kind]
    exact = estimator().fit_counts(counts, sizes)
    published = fit(kind, epsilon=50.0)
    assert_array_equal(published.local_means_, exact.local_means_)
    # These are averages over priors, and those of exact counts are under the likeliest.
    assert_allclose(published.means_, exact.means_, rtol=0.08)
    assert_allclose(published.stds_, exact.stds_, rtol=0.15)
    of_table = fit(kind, epsilon=50.0, target="table")
    assert_allclose(of_table.means_, exact.local_means_, atol=1e-9)


def test_known_priors():
    found = fit("proportions", prior=BetaPrior(8.0, 5.0))
    assert (found.population_mean_, found.population_mean_std_) == pytest.approx((8 / 13, 0))
    assert found.prior_.alpha == 8.0
    found = fit("rates", prior=GammaPrior(4.0, 4.0))
    assert (found.population_mean_, found.prior_.rate) == pytest.approx((1.0, 4.0))


def test_rows_and_tables_agree():
    y, groups = np.repeat([0, 1, 1, 0], [3, 4, 2, 6]), np.repeat([0, 0, 1, 1], [3, 4, 2, 6])
    params = {"unit": "row", "publish": "clients", "epsilon": 50.0}
    rows = BernoulliMean(**params).fit(np.zeros((15, 1)), y, groups=groups)
    table = BernoulliMean(**params).fit_counts([4, 2], [7, 8])
    assert_allclose(rows.means_, table.means_)
    assert_array_equal(rows.n_samples_per_client_, table.n_samples_per_client_)


# What is handed out -------------------------------------------------------------------------------


@every_kind
def test_everything_is_covered(kind):
    model = fit(kind, rows_per_person=2, epsilon=1.5)
    report = model.privacy_
    expected = {"proportions": ("row", "replace_one"), "rates": ("event", "add_remove")}[kind]
    assert (report.unit, report.relation) == expected
    assert (report.epsilon, report.delta, report.not_released) == (1.5, 0.0, ())
    assert f"epsilon = 3 for a person, who has at most 2 {expected[0]}s" in str(report)
    for again in (model.release(), model.for_client(3), pickle.loads(pickle.dumps(model))):
        pd.testing.assert_frame_equal(again.summary(), model.summary())
    assert "noise_std" in model.summary()


@every_kind
def test_every_fit_is_a_release(kind, tmp_path):
    unit = KINDS[kind][1]
    relation = "add_remove" if unit == "event" else "replace_one"
    ledger = PrivacyLedger(tmp_path / "ledger", budget=(2.5, 1e-9), unit=unit, relation=relation)
    for _ in range(2):
        fit(kind, ledger=ledger)
    with pytest.raises(BudgetExceeded):
        fit(kind, ledger=ledger)


@every_kind
def test_the_promise_holds_and_is_used(kind):
    """One more success or event of a client, at an epsilon of 1, against its published count."""
    estimator, unit = KINDS[kind][:2]
    prior = BetaPrior(8.0, 5.0) if unit == "row" else GammaPrior(4.0, 1.0)
    model = estimator(prior, unit=unit, publish="clients", epsilon=1.0)
    counts = []
    for more in (1, 0):
        # Clients are disjoint, so a table of many is as many releases.
        found = model.fit_counts(np.full(50_000, 2 + more), np.full(50_000, 5))
        counts.append(int(np.sum(np.rint(5 * found.local_means_) >= 3)))
    assert 0.9 < odds_lower_bound(*counts, 50_000) < 1
    halved = model.set_params(epsilon=2.0).fit_counts(np.full(50_000, 2), np.full(50_000, 5))
    few = int(np.sum(np.rint(5 * halved.local_means_) >= 3))
    assert odds_lower_bound(counts[0], few, 50_000) > 1


# Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        ("rates", {"unit": "client"}, "needs unit='event'"),
        ("rates", {"publish": None}, "unit='event' needs publish='clients'"),
        ("proportions", {"publish": None}, "unit='row' needs publish='clients'"),
        ("proportions", {"epsilon": np.inf}, "needs a finite epsilon"),
        ("rates", {"cap": 9}, "cap has no effect"),
        ("rates", {"participants": [1, 2]}, "participants has no effect"),
        ("rates", {"prior": "grid"}, "needs a GammaPrior"),
        ("proportions", {"prior": "grid"}, "needs a BetaPrior"),
        ("proportions", {"unit": "event"}, "'unit' parameter"),
    ],
)
def test_parameters_that_do_not_go_together(kind, params, message):
    with pytest.raises(ValueError, match=message):
        fit(kind, **params)


def test_weights_are_refused():
    X, y, groups = np.zeros((4, 1)), [0, 1, 1, 0], [0, 0, 1, 1]
    for model in (
        BernoulliMean(unit="row", publish="clients", epsilon=1.0),
        PoissonMean(unit="event", publish="clients", epsilon=1.0),
    ):
        with pytest.raises(ValueError, match="sample_weight is not supported"):
            model.fit(X, y, groups=groups, sample_weight=[1, 1, 1, 2])


def test_a_tiny_epsilon_is_refused():
    with pytest.raises(ValueError, match=r"epsilon must be at least 0.01 to publish counts"):
        fit("rates", epsilon=1e-3)


@pytest.mark.parametrize(("alpha", "beta"), [(10, 4990), (999, 1)])
def test_rare_and_almost_certain_outcomes(alpha, beta):
    """Narrow maxima far from the middle are found."""
    rng = np.random.default_rng(3)
    trials = np.full(50, 10_000)
    successes = rng.binomial(trials, rng.beta(alpha, beta, 50))
    published = BernoulliMean(unit="row", publish="clients", epsilon=1.0)
    published = published.fit_counts(successes, trials)
    exact = BernoulliMean().fit_counts(successes, trials)
    distance = published.population_mean_ - exact.population_mean_
    assert abs(distance) < 2 * exact.population_mean_std_


def test_one_large_exposure_does_not_bound_the_rates_of_others():
    rng = np.random.default_rng(3)
    exposure = np.append(np.full(19, 10.0), 1e5)
    events = rng.poisson(np.append(rng.gamma(2, 0.5, 19), 0.02) * exposure)
    model = PoissonMean(unit="event", publish="clients", epsilon=1.0)
    assert 0.4 < model.fit_counts(events, exposure).population_mean_ < 2


def test_intervals_are_quantiles_of_mixtures():
    released = ReleasedCounts(np.array([186]), np.array([1.0]), 100.0)
    found = published_counts(POISSON, released, (0.5, 0.002), False)
    counts = np.arange(3000)
    log_chances = predictive(POISSON, counts, 1.0, 0.5, 0.002) - np.abs(186 - counts) / 100
    chances = np.exp(log_chances - logsumexp(log_chances))
    for bound, tail in zip(found.central(0.95), (0.025, 0.975), strict=True):
        assert chances @ gamma.cdf(bound[0], 0.5 + counts, scale=1 / 1.002) == pytest.approx(
            tail, abs=1e-3
        )


@pytest.mark.parametrize("kind", ["rates", "proportions"])
def test_clients_of_all_sizes_have_intervals(kind):
    if kind == "rates":
        model = PoissonMean(unit="event", publish="clients", epsilon=1.0)
        model = model.fit_counts([1, 5, 100, 0], exposure=[1e-6, 1.0, 1e12, 1e3])
    else:
        model = BernoulliMean(unit="row", publish="clients", epsilon=1.0)
        model = model.fit_counts([0, 10**6, 3, 1], [1, 10**6, 9, 10**5])
    lower, upper = model.credible_interval()
    assert (lower <= upper).all()
    assert (lower >= 0).all()


def test_clients_that_are_alike_are_computed_once():
    sizes = np.array([4.0, 4.0, 4.0, 6.0])
    many = published_counts(
        POISSON, ReleasedCounts(np.array([3, 5, 3, 3]), sizes, 1.0), None, False
    )
    assert len(many.chances) == 3
    assert many.means[0] == many.means[2] != many.means[3]
    some = many.of_clients(slice(2, 4))
    assert len(some.chances) == 2
    assert_array_equal(some.central(0.9), [bound[2:] for bound in many.central(0.9)])
