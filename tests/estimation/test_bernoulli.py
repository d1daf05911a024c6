"""BernoulliMean: published figures, limits, counts and rows, private reports, bad input."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings, strategies as st
from scipy.optimize import minimize
from scipy.special import betaln
from scipy.stats import betabinom
from sklearn.base import clone

from pfl_sklearn import BernoulliMean
from pfl_sklearn.datasets import expand_counts, load_county_elections, make_bernoulli_clients
from pfl_sklearn.estimation._plausible_betas import log_marginals
from pfl_sklearn.estimation._proportion_reports import (
    MOMENT_SENSITIVITY,
    moment_messages,
    probability_table,
)
from pfl_sklearn.priors import BetaPrior, GaussianPrior, GridPrior
from pfl_sklearn.privacy import calibrate_noise
from tests.helpers.oracles import read_oracle

ORACLE = read_oracle("bernoulli")
COLUMNS = {
    "paper_moment(uncorrected)": {"method": "printed"},
    "moment_corrected": {"method": "moments"},
    "betabinom_mle": {"method": "ml"},
    "npmle": {"prior": "grid"},
}
POPULATIONS = {
    "truncnorm(.5,.15)": "normal",
    "uniform": "uniform",
    "3spike": "3-spike",
    "beta(4,4)": "beta",
}


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("population", POPULATIONS)
def test_published_gains_over_local(population, column):
    """Mean percent reduction of the MSE over 4 draws of 10,000 clients with 14 trials."""
    gains = []
    for seed in range(4):
        clients = make_bernoulli_clients(prior=POPULATIONS[population], random_state=seed)
        model = BernoulliMean(**COLUMNS[column]).fit_counts(clients.successes, clients.trials)
        errors = [
            np.mean((values - clients.probabilities) ** 2)
            for values in (model.means_, model.local_means_)
        ]
        gains.append(100 * (1 - errors[0] / errors[1]))
    mean, spread = ORACLE["nonprivate"][population][column]
    assert np.mean(gains) == pytest.approx(mean, abs=4 * spread * np.sqrt(1 / 4 + 1 / 20))


def test_elections_match_the_reference():
    """Leave one election out: gains over the local mean, and the mean of the folds."""
    elections = load_county_elections()
    frame = elections.frame.pivot(index="fips", columns="year", values="rep_won")
    expected = {
        "printed": (None, 1.0),
        "printed_eq32": ([4.48, -1.68, -9.27, -22.08, 5.59, 4.37], -3.1),
        "moments": ([2.93, 1.90, -2.06, -6.30, 5.00, 4.06], 0.9),
        "ml": ([2.92, 1.87, -1.88, -6.05, 4.98, 4.06], 1.0),
    }
    for method, (folds, mean) in expected.items():
        gains = []
        for year in frame:
            wins = frame.drop(columns=year).sum(axis=1).to_numpy()
            model = BernoulliMean(method=method).fit_counts(wins, np.full(len(wins), 5))
            held_out = frame[year].to_numpy()
            errors = [
                np.mean((values - held_out) ** 2) for values in (model.means_, model.local_means_)
            ]
            gains.append(100 * (1 - errors[0] / errors[1]))
        assert np.mean(gains) == pytest.approx(mean, abs=0.05), method
        if folds is not None:
            np.testing.assert_allclose(gains, folds, atol=0.012)


PRIVATE_MSE = {  # x 1,000; 14 trials, 1,000 clients; epsilon = 1, 4
    ("beta", "one_bit", "printed"): (18.4, 16.6),
    ("beta", "one_bit", "printed_eq32"): (15.6, 14.6),
    ("beta", "two_bit", "ml"): (10.5, 9.6),
    ("beta", "subset_selection", "ml"): (10.4, 9.5),
    ("3-spike", "two_bit", "ml"): (12.1, 11.2),
    ("3-spike", "subset_selection", "ml"): (12.0, 10.4),
}


@pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] * (case[0] == "3-spike")) for case in PRIVATE_MSE],
    ids="-".join,
)
def test_private_risk(case):
    """Both figures are Monte Carlo means; the reference is given to one decimal."""
    population, mechanism, method = case
    prior = "grid" if case == ("3-spike", "subset_selection", "ml") else "beta"
    for epsilon, expected in zip((1.0, 4.0), PRIVATE_MSE[case], strict=True):
        errors = []
        for seed in range(12):
            rng = np.random.default_rng(seed)
            spikes = rng.choice([0.25, 0.5, 0.75], 1000)
            p = rng.beta(5, 5, 1000) if population == "beta" else spikes
            model = BernoulliMean(
                prior, epsilon=epsilon, mechanism=mechanism, method=method, random_state=seed
            ).fit_counts(rng.binomial(14, p), np.full(1000, 14))
            errors.append(1000 * np.mean((model.means_ - p) ** 2))
        tolerance = 4 * np.std(errors) / np.sqrt(len(errors)) + 0.05
        assert np.mean(errors) == pytest.approx(expected, abs=tolerance)


@pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")
@pytest.mark.parametrize(
    "params",
    [
        {"epsilon": 1.0},
        {"epsilon": 1.0, "mechanism": "two_bit"},
        {"epsilon": 1.0, "delta": 1e-5, "trust": "central"},
        {"epsilon": 1.0, "delta": 1e-5, "trust": "central", "n": "unequal"},
        {"epsilon": 1.0, "n": "unequal"},
    ],
    ids=str,
)
def test_private_fits_of_many_clients_are_close_to_the_best(params):
    params = dict(params)
    n = np.random.default_rng(0).integers(1, 28, 10000) if params.pop("n", None) else 14
    clients = make_bernoulli_clients(10000, n, random_state=0)
    best = BernoulliMean().fit_counts(clients.successes, clients.trials)
    model = BernoulliMean(random_state=0, **params).fit_counts(clients.successes, clients.trials)
    errors = [np.mean((fit.means_ - clients.probabilities) ** 2) for fit in (model, best)]
    assert errors[0] < 1.03 * errors[1]
    assert model.population_mean_ == pytest.approx(0.5, abs=5 * model.population_mean_std_)


def test_posterior_by_hand():
    model = BernoulliMean(BetaPrior(alpha=2.0, beta=3.0)).fit_counts([0, 4, 7], [1, 5, 20])
    np.testing.assert_allclose(model.means_, [2 / 6, 6 / 10, 9 / 25])
    np.testing.assert_allclose(model.stds_**2, [2 / 6 * 4 / 6 / 7, 0.6 * 0.4 / 11, 0.2304 / 26])
    np.testing.assert_allclose(model.shrinkage_, [5 / 6, 5 / 10, 5 / 25])
    assert model.population_mean_ == pytest.approx(0.4)
    assert model.population_mean_std_ == 0.0
    assert model.icc_ == pytest.approx(1 / 6)


def test_likelihood_is_at_its_maximum():
    rng = np.random.default_rng(0)
    trials = rng.integers(1, 30, 300)
    successes = rng.binomial(trials, rng.beta(2, 5, 300))
    prior = BernoulliMean().fit_counts(successes, trials).prior_

    def log_likelihood(alpha, beta):
        return betabinom.logpmf(successes, trials, alpha, beta).sum()

    best = log_likelihood(prior.alpha, prior.beta)
    for alpha, beta in ((1.01, 1), (0.99, 1), (1, 1.01), (1, 0.99), (1.01, 1.01)):
        assert log_likelihood(alpha * prior.alpha, beta * prior.beta) < best


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6))
def test_no_starting_point_finds_a_better_prior(seed):
    """Small tables, where the surface is flat towards alike clients."""
    rng = np.random.default_rng(seed)
    trials = rng.integers(1, 60, 6)
    successes = rng.binomial(trials, rng.beta(8, 2, 6))
    if successes.sum() in (0, trials.sum()) or np.all(trials == 1):
        return
    prior = BernoulliMean().fit_counts(successes, trials).prior_

    def negative(point):
        mean, total = 1 / (1 + np.exp(-point[0])), np.exp(min(point[1], np.log(1e6)))
        values = betabinom.logpmf(successes, trials, mean * total, (1 - mean) * total)
        return -np.sum(values)

    total = prior.alpha + prior.beta
    found = negative([np.log(prior.alpha / prior.beta), np.log(total)])
    for start in ([0.0, 0.0], [1.0, 2.0], [1.0, 5.0], [2.0, -1.0]):
        assert found <= minimize(negative, start, method="Nelder-Mead").fun + 1e-4


def test_private_labels_may_be_all_alike():
    """An error would reveal whether a class occurs at all."""
    for value in (0, 1):
        y = np.full(40, value)
        model = BernoulliMean(epsilon=1.0).fit(y[:, None], y, groups=np.arange(40) // 4)
        assert model.classes_.tolist() == [0, 1]
        assert np.all(model.local_means_ == value)
    with pytest.raises(ValueError, match=r"one class.*'no'"):
        BernoulliMean(epsilon=1.0).fit(np.zeros((4, 1)), ["no"] * 4, groups=[1, 1, 2, 2])


def test_one_private_client_keeps_its_share():
    model = BernoulliMean(epsilon=1.0).fit_counts([3], [4])
    assert model.means_ == pytest.approx([0.75])
    assert model.shrinkage_ == pytest.approx([0.0])
    assert np.isnan(model.icc_)
    assert model.population_mean_ != 0.75


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")
@pytest.mark.parametrize("params", [{"mechanism": "two_bit"}, {"trust": "central", "delta": 1e-3}])
def test_private_clients_with_many_trials(params):
    """Their likelihood underflows; a Beta(1, 1) posterior is within a standard deviation."""
    trials = np.array([10, 1_500, 20_000, 10**9] * 3)
    successes = np.tile([0.1, 0.5, 1.0], 4) * trials
    model = BernoulliMean(epsilon=1.0, random_state=0, **params).fit_counts(successes, trials)
    mean, variance = BetaPrior(1.0, 1.0).posterior(successes, trials)
    large = trials > 1_000
    assert np.all(np.abs(model.means_ - mean)[large] < np.sqrt(variance[large]))
    assert np.all((model.stds_ > 0) & (model.stds_ < 0.3))


@pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")
def test_private_batting_averages(data_home):
    """The likelihoods of players with more than about 1,500 at-bats underflow."""
    batting = pd.read_csv(data_home / "baseball_batting_2000_2024.csv.gz")
    career = batting.groupby("player")[["H", "AB"]].sum().query("AB > 0")
    model = BernoulliMean(epsilon=1.0, random_state=0).fit_counts(career["H"], career["AB"])
    assert np.isfinite(model.means_).all()
    large = career["AB"].to_numpy() > 1_500
    assert large.sum() == 875
    np.testing.assert_allclose(model.means_[large], model.local_means_[large], atol=0.02)


def test_one_trial_each_is_refused_in_private_fits_too():
    with pytest.raises(ValueError, match=r"one trial.*prior"):
        BernoulliMean(epsilon=1.0).fit_counts([1, 0, 1], [1, 1, 1])


def test_rows_counts_and_weights_agree():
    clients = make_bernoulli_clients(50, 9, random_state=0)
    y, groups = expand_counts(clients.successes, clients.trials)
    counts = BernoulliMean().fit_counts(clients.successes, clients.trials)
    rows = BernoulliMean().fit(np.zeros((len(y), 1)), y, groups=groups)
    weights = np.column_stack([clients.successes, 9 - clients.successes]).ravel()
    outcome, client = np.tile([True, False], 50), np.repeat(np.arange(50), 2)
    weighted = BernoulliMean().fit(outcome[:, None], outcome, groups=client, sample_weight=weights)
    np.testing.assert_array_equal(rows.means_, counts.means_)
    np.testing.assert_array_equal(weighted.means_, counts.means_)
    assert counts.predict_proba(np.zeros((2, 3)), groups=[3, 4]).shape == (2, 2)
    added = BernoulliMean().fit_counts([1, 2, 3], [4, 4, 4], groups=["b", "a", "b"])
    np.testing.assert_array_equal(added.local_means_, [2 / 4, 4 / 8])


def test_labels_of_any_kind():
    y = np.array(["no", "yes", "yes", "no", "yes", "yes"])
    model = BernoulliMean(BetaPrior(alpha=1.0, beta=1.0))
    model.fit(np.zeros((6, 1)), y, groups=[1, 1, 1, 2, 2, 2])
    assert model.classes_.tolist() == ["no", "yes"]
    assert model.predict(np.zeros((1, 1)), groups=[1]).tolist() == ["yes"]
    np.testing.assert_allclose(model.predict_proba(np.zeros((1, 1)), groups=[2]), [[0.4, 0.6]])
    assert model.score(np.zeros((6, 1)), y, groups=[1, 1, 1, 2, 2, 2]) == pytest.approx(4 / 6)


def test_extreme_populations():
    alike = BernoulliMean().fit_counts(np.full(100, 5), np.full(100, 10))
    np.testing.assert_allclose(alike.shrinkage_, 1, atol=1e-2)
    apart = BernoulliMean().fit_counts(np.tile([0, 10], 50), np.full(100, 10))
    np.testing.assert_allclose(apart.means_, np.tile([0, 1], 50), atol=1e-3)
    for successes in (np.zeros(20, int), np.full(20, 6)):
        for method in ("ml", "moments", "printed"):
            model = BernoulliMean(method=method).fit_counts(successes, np.full(20, 6))
            np.testing.assert_allclose(model.means_, successes / 6, atol=1e-3)
            lower, upper = model.credible_interval()
            assert np.all((lower <= upper) & (lower >= 0) & (upper <= 1))
            assert np.all(upper > lower) or method == "printed"


def test_moments_weigh_clients_by_their_trials():
    """Clients of one trial counted as much as those of a hundred."""
    trials, successes = np.array([1, 1, 2, 100, 60, 80]), np.array([0, 1, 0, 20, 30, 24])
    prior = BernoulliMean(method="moments").fit_counts(successes, trials).prior_
    # From moments: variances of shares are s (1 - 1 / n) + p (1 - p) / n.
    weights, shares = trials / trials.sum(), successes / trials
    pooled = weights @ shares
    free = weights * (1 - weights)
    rest = weights @ (shares - pooled) ** 2 - pooled * (1 - pooled) * (free / trials).sum()
    total = pooled * (1 - pooled) / (rest / (free * (1 - 1 / trials)).sum()) - 1
    assert prior.alpha + prior.beta == pytest.approx(total, rel=1e-9)
    mean = np.average(shares, weights=trials / (trials + total))
    assert prior.alpha / total == pytest.approx(mean, rel=1e-9)


@pytest.mark.parametrize("prior", ["beta", "known grid"])
def test_intervals_cover(prior):
    clients = make_bernoulli_clients(5000, 14, random_state=2)
    if prior == "known grid":
        prior = GridPrior().fit(BetaPrior(alpha=4.0, beta=4.0).sample(10**5, random_state=0))
    model = BernoulliMean(prior).fit_counts(clients.successes, clients.trials)
    lower, upper = model.credible_interval(0.9)
    inside = (lower <= clients.probabilities) & (clients.probabilities <= upper)
    assert inside.mean() == pytest.approx(0.9, abs=0.02)


def test_grid_intervals_are_quantiles_of_the_posterior():
    model = BernoulliMean(GridPrior(n_points=5, weights=np.full(5, 0.2)))
    model.fit_counts([1], [2], groups=["a"])
    likelihood = np.array([0, 3, 4, 3, 0]) / 10
    assert model.means_[0] == pytest.approx(0.5)
    assert model.stds_[0] ** 2 == pytest.approx(likelihood @ (np.linspace(0, 1, 5) - 0.5) ** 2)
    lower, upper = model.credible_interval(0.5)
    assert (lower[0], upper[0]) == (0.25, 0.75)


def test_a_grid_too_coarse_for_many_trials_warns():
    clients = make_bernoulli_clients(200, 100_000, random_state=0)
    with pytest.warns(UserWarning, match=r"n_points=201\b.*\b100000\b"):
        BernoulliMean("grid").fit_counts(clients.successes, clients.trials)
    BernoulliMean(GridPrior(n_points=5001)).fit_counts(clients.successes[:5], clients.trials[:5])


def test_equal_shares_are_one_point():
    model = BernoulliMean("grid", uncertainty="plug_in").fit_counts([1, 2, 3], [2, 4, 6])
    np.testing.assert_array_equal(model.means_, 0.5)
    np.testing.assert_array_equal(model.stds_, 0.0)
    np.testing.assert_array_equal(model.prior_.log_prob(model.means_), 0.0)
    above = BernoulliMean(GridPrior(low=0.7)).fit_counts([1, 2], [9, 9])
    np.testing.assert_allclose(above.means_, 0.7)


def test_a_grid_prior_at_an_epsilon_beyond_floating_point():
    model = BernoulliMean("grid", epsilon=800.0).fit_counts([0, 6] * 10, [6] * 20)
    assert np.all(np.abs(model.means_ - model.local_means_) < 0.2)


def test_probability_tables_are_beta_binomial():
    table = probability_table(7)
    np.testing.assert_allclose(table.sum(axis=0), 1, rtol=1e-10)
    alphas, betas = np.array([0.3, 40.0]), np.array([2.0, 7.0])
    for n in (7, 1500):
        z = np.array([0, 3, n])
        expected = betaln(z[:, None] + alphas, n - z[:, None] + betas) - betaln(alphas, betas)
        got = log_marginals(z, np.full(3, n), alphas, betas)
        np.testing.assert_allclose(got, expected, rtol=1e-9)


def test_moment_sensitivity_is_the_largest_distance():
    messages = np.concatenate(
        [moment_messages(np.arange(n + 1), np.full(n + 1, n)) for n in (1, 2, 3, 10, 89, 211)]
    )
    distances = np.linalg.norm(messages[:, None] - messages, axis=2)
    assert 0.999 * MOMENT_SENSITIVITY < distances.max() <= MOMENT_SENSITIVITY


ROWS = (np.zeros((6, 1)), np.array([0, 1, 1, 0, 0, 1]), np.array([1, 1, 1, 2, 2, 2]))


@pytest.mark.parametrize(
    ("params", "error"),
    [
        ({"prior": GaussianPrior()}, r"prior=GaussianPrior\(\).*BernoulliMean"),
        ({"prior": BetaPrior(alpha=1.0)}, r"BetaPrior.*alpha=1.0, beta=None"),
        ({"prior": BetaPrior(alpha=-1.0, beta=1.0)}, "'alpha' parameter of BetaPrior"),
        ({"prior": GridPrior(n_points=3, weights=[1, 1, 1])}, r"weights.*GridPrior.*\b3\b"),
        ({"prior": "grid", "method": "moments"}, r"method='moments'.*GridPrior"),
        ({"epsilon": 1.0, "method": "moments"}, r"method='moments'.*BetaPrior.*'ml'"),
        ({"epsilon": 1.0, "mechanism": "one_bit"}, r"'one_bit'.*'printed'.*'printed_eq32'"),
        (
            {"epsilon": 1.0, "prior": "grid", "mechanism": "two_bit"},
            r"GridPrior.*mechanism='two_bit'.*prior",
        ),
        ({"epsilon": 1.0, "trust": "central"}, r"delta.*trust='central'.*\b0\b"),
        ({"epsilon": 1.0, "mechanism": "gaussian"}, r"mechanism='gaussian'.*trust='central'"),
        (
            {"epsilon": 1.0, "trust": "central", "mechanism": "two_bit", "delta": 0.1},
            r"mechanism='two_bit'.*trust='central'",
        ),
    ],
)
def test_bad_parameters(params, error):
    model = BernoulliMean(**params)
    before = dict(vars(model))
    with pytest.raises(ValueError, match=error):
        model.fit(ROWS[0], ROWS[1], groups=ROWS[2])
    with pytest.raises(ValueError, match=error):
        model.fit_counts([1, 2], [3, 3])
    assert vars(model) == before


@pytest.mark.parametrize(
    ("successes", "trials", "error"),
    [
        ([4], [3], r"successes.*row 0\b.*\b4\b.*\b3\b"),
        ([-1], [3], r"successes.*-1"),
        ([0], [0], r"trials.*\b1\b.*row 0\b.*\b0 trials"),
        ([0.5], [3], r"successes.*\b0\.5"),
        ([1], [3.5], r"trials.*\b3\.5"),
        ([1, 2], [3], "inconsistent numbers"),
        ([np.nan], [3], "successes contains NaN"),
        ([1, 0, 1], [1, 1, 1], r"one trial.*prior"),
        ([1e300, 1], [1e300, 2], r"trials.*2\*\*53.*1e\+300"),
    ],
)
def test_bad_counts(successes, trials, error):
    model = BernoulliMean()
    with pytest.raises(ValueError, match=error):
        model.fit_counts(successes, trials)
    assert not hasattr(model, "clients_")


@pytest.mark.parametrize(
    ("y", "error"),
    [
        ([0, 1, 2, 0, 1, 2], "Only binary classification is supported"),
        ([0, 0, 0, 0, 0, 0], "only one class"),
        ([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], "Unknown label type"),
        ([0, 1, np.nan, 0, 1, 1], "contains NaN"),
    ],
)
def test_bad_labels(y, error):
    with pytest.raises(ValueError, match=error):
        BernoulliMean().fit(ROWS[0], y, groups=ROWS[2])


def test_fractional_weights_and_unequal_trials():
    with pytest.raises(ValueError, match=r"sample_weight.*\b0\.5"):
        BernoulliMean().fit(ROWS[0], ROWS[1], groups=ROWS[2], sample_weight=np.full(6, 0.5))
    unequal = BernoulliMean(epsilon=1.0, mechanism="subset_selection")
    with pytest.raises(ValueError, match=r"\b500\b.*\b2\b.*\b3\b.*'two_bit'"):
        unequal.fit_counts([1, 2], [2, 3])
    assert not hasattr(clone(unequal), "clients_")


@pytest.mark.parametrize("weights", [np.full(8, 1e19), np.tile([1.0, 2.0**52], 4)], ids=str)
def test_trials_beyond_whole_numbers(weights):
    """Also where only the sum of a client's is too large."""
    y, groups = np.tile([0, 1], 4), np.zeros(8, int)
    with pytest.raises(ValueError, match=r"trials.*2\*\*53.*e\+1\d"):
        BernoulliMean().fit(np.zeros((8, 1)), y, groups=groups, sample_weight=weights)
    with pytest.raises(ValueError, match=r"trials.*2\*\*53.*e\+1\d"):
        BernoulliMean().fit_counts(np.ones(8), weights, groups=groups)


@pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")
def test_noise_on_moments_is_that_of_their_sensitivity():
    model = BernoulliMean(epsilon=1.0, delta=1e-5, trust="central", random_state=0)
    report = model.fit_counts(np.full(16, 2), np.arange(4, 20)).privacy_
    expected = calibrate_noise(1.0, 1e-5, MOMENT_SENSITIVITY)
    assert report.noise_std == pytest.approx(expected, rel=1e-4)
