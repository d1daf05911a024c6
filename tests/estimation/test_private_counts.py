"""Private PoissonMean: likelihoods by brute force, limits, risk, mutants, reports, bad input."""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy.special import gammainc
from scipy.stats import nbinom, poisson
from sklearn.base import clone

from pfl_sklearn import PoissonMean
from pfl_sklearn.estimation import _rate_reports
from pfl_sklearn.estimation._rate_reports import CountCells, average_of_gammas
from pfl_sklearn.priors import GridPrior
from pfl_sklearn.privacy import GaussianMechanism, PrivacyLedger, SubsetSelection, gdp_mu
from pfl_sklearn.privacy.auditing import odds_lower_bound
from tests.helpers.slow import slow

pytestmark = pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")
LOCAL = {"epsilon": 1.0, "cap": 30}
CENTRAL = {**LOCAL, "trust": "central", "delta": 1e-5}
every_trust = pytest.mark.parametrize("params", [LOCAL, CENTRAL], ids=["local", "central"])


def draw(m, mean, shape, seed, unequal=False):
    """Rates, counts and exposures; the noise of a fit gets another seed."""
    rng = np.random.default_rng(seed)
    exposure = rng.gamma(2.0, 0.5, m) + 0.05 if unequal else np.ones(m)
    rates = rng.gamma(shape, mean / shape, m)
    return rates, rng.poisson(rates * exposure), exposure


def fit(counts, exposure=None, seed=10**6, **params):
    return PoissonMean(random_state=seed, **params).fit_counts(counts, exposure)


# Cells --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("cap", [1, 2, 7, 30, 500, 10**6])
@pytest.mark.parametrize("n_cells", [8, 16])
def test_cells_are_a_partition_with_the_probabilities_of_counts(cap, n_cells):
    exposure = np.array([1.0, 2.5, 1.0])
    cells = CountCells.of(exposure, cap, n_cells)
    assert (cells.starts[0], cells.starts[-1]) == (0, cap)
    assert np.all(np.diff(cells.starts) > 0)
    assert len(cells.starts) == cap + 1 if cap < n_cells else n_cells - 3 < len(cells.starts)
    counts = np.unique(np.concatenate([cells.starts, cells.starts[1:] - 1, [10 * cap]]))
    positions = cells.positions(counts)
    assert np.all(cells.starts[positions] <= counts)
    assert np.all(counts < np.append(cells.starts, np.inf)[positions + 1])
    shapes, rates = np.array([0.05, 3.0, 200.0]), np.array([0.01, 0.4, 0.1])
    for e, table, known in zip(
        (1.0, 2.5), cells.under_gammas(shapes, rates), cells.at_rates(shapes), strict=True
    ):
        starts = cells.starts[1:, None]
        for got, below in (
            (table, nbinom.cdf(starts - 1, shapes, rates / (rates + e))),
            (known, poisson.cdf(starts - 1, e * shapes)),
        ):
            expected = np.diff(below, axis=0, prepend=0, append=1)
            np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-10)
            np.testing.assert_allclose(got.sum(axis=0), 1, rtol=1e-12)


def test_many_exposures_are_rounded_to_five_percent():
    exposure = np.exp(np.random.default_rng(0).normal(size=500))
    cells = CountCells.of(exposure, 30, 8)
    assert len(cells.exposures) < 150
    np.testing.assert_allclose(cells.exposures[cells.level], exposure, rtol=0.025)
    few = CountCells.of(exposure[:30], 30, 8)
    np.testing.assert_array_equal(few.exposures[few.level], exposure[:30])


# Likelihoods --------------------------------------------------------------------------------------
def brute_force(counts, exposure, log_likelihood, cap):
    """Posterior means over an even grid of (root of the mean, log shape) with the hyperprior."""
    roots, log_shapes = (
        axis.ravel()
        for axis in np.meshgrid(np.linspace(0.01, 3.0, 240), np.linspace(-4.6, 6.9, 160))
    )
    shapes = np.exp(log_shapes)
    rates = shapes / (cap / np.median(exposure) * roots**2)
    value = log_likelihood(shapes, rates)
    value = value - 0.5 * (roots / 0.7) ** 2 - 0.5 * ((log_shapes - math.log(3)) / 1.5) ** 2
    means = []
    for y, e in zip(counts, exposure, strict=True):
        joint = value + nbinom.logpmf(y, shapes, rates / (rates + e))
        weights = np.exp(joint - joint.max())
        means.append(weights @ ((shapes + y) / (rates + e)) / weights.sum())
    return np.array(means)


@pytest.mark.parametrize("unequal", [True, *slow([False])])
@pytest.mark.parametrize("trust", ["local", "central"])
def test_estimates_match_brute_force(trust, unequal, monkeypatch):
    """Sums over counts, clients and priors one by one; what is released is caught on its way."""
    cap, caught = 6, []
    kind = SubsetSelection if trust == "local" else GaussianMechanism
    privatize = kind.privatize

    def spy(self, *args):
        caught.append((self, privatize(self, *args)))
        return caught[-1][1]

    monkeypatch.setattr(kind, "privatize", spy)
    rng = np.random.default_rng(0)
    exposure = rng.choice([0.5, 1.0, 3.0], 40) if unequal else np.full(40, 2.0)
    counts = rng.poisson(exposure * rng.gamma(2.0, 0.7, 40))
    delta = 1e-3 if trust == "central" else 0.0
    model = fit(counts, exposure, epsilon=2.0, delta=delta, trust=trust, cap=cap)
    mechanism, released = caught[0]

    def probabilities(shapes, rates, e):
        """With a cap of 6 every count has a cell of its own."""
        table = nbinom.pmf(np.arange(cap)[:, None], shapes, rates / (rates + e))
        return np.vstack([table, 1 - table.sum(axis=0)])

    def log_likelihood(shapes, rates):
        tables = {e: probabilities(shapes, rates, e) for e in np.unique(exposure)}
        if trust == "central":
            expected = sum(tables[e] for e in exposure)
            spread = expected + mechanism.noise_variance
            return -0.5 * sum(
                (n - row) ** 2 / s + np.log(s)
                for n, row, s in zip(released, expected, spread, strict=True)
            )
        least = math.exp(-2.0)
        return sum(
            np.log(least + (1 - least) * subset @ tables[e])
            for subset, e in zip(released.astype(float), exposure, strict=True)
        )

    expected = brute_force(counts, exposure, log_likelihood, cap)
    # Steps of the grids differ, and the last pass leaves out priors that are not plausible.
    np.testing.assert_allclose(model.means_, expected, rtol=0.01)


def test_three_passes_find_a_narrow_peak():
    """Of a mean known to a thousandth, which lies between the points of the first grid."""

    def log_likelihood(shapes, rates):
        return -0.5 * ((shapes / rates - 11.3) / 0.011) ** 2 - 0.5 * ((shapes - 5) / 0.1) ** 2

    average = average_of_gammas(log_likelihood, 30.0)
    mean, std = average.mean()
    assert mean == pytest.approx(11.3, abs=0.003)
    assert std == pytest.approx(0.011, rel=0.1)
    assert average.weights @ average.a == pytest.approx(5, abs=0.02)


@pytest.mark.parametrize(
    ("params", "unequal"),
    [
        ({"epsilon": 50.0, "cap": 60}, False),
        pytest.param(
            {"epsilon": 1e3, "cap": 60, "trust": "central", "delta": 1e-5},
            True,
            marks=pytest.mark.slow,
        ),
        ({"epsilon": 800.0, "cap": 60}, False),
    ],
    ids=str,
)
def test_without_noise_it_is_the_exact_fit(params, unequal):
    """Up to what cells of 60 counts and exposures within 5 % lose."""
    _, counts, exposure = draw(3000, 10.0, 4.0, 0, unequal)
    exact, model = fit(counts, exposure), fit(counts, exposure, **params)
    assert model.population_mean_ == pytest.approx(exact.population_mean_, rel=0.01)
    assert model.prior_.shape == pytest.approx(exact.prior_.shape, rel=0.06)
    np.testing.assert_allclose(model.means_, exact.means_, rtol=0.06, atol=0.06)
    np.testing.assert_allclose(model.stds_, exact.stds_, rtol=0.06)
    np.testing.assert_allclose(model.shrinkage_, exact.shrinkage_, rtol=0.06)


# Risk ---------------------------------------------------------------------------------------------
def risks(n_draws, m, mean, shape, unequal=False, **params):
    """Mean squared errors of fits, and of clients alone, for every draw."""
    errors = []
    for seed in range(n_draws):
        rates, counts, exposure = draw(m, mean, shape, seed, unequal)
        model = fit(counts, exposure, seed + 10**6, **params)
        errors.append(
            [np.mean(exposure * (x - rates) ** 2) for x in (model.means_, model.local_means_)]
        )
    return np.array(errors).T


@pytest.mark.slow
@every_trust
@pytest.mark.parametrize(
    ("epsilon", "mean", "cap", "m", "unequal", "shape"),
    [  # every pair of levels of five factors occurs
        (0.5, 3, 12, 1000, False, 1.0),
        (0.5, 10, 30, 200, True, 5.0),
        (2.0, 3, 12, 200, True, 1.0),
        (2.0, 10, 30, 1000, False, 5.0),
    ],
)
def test_never_worse_than_clients_alone(epsilon, mean, cap, m, unequal, shape, params):
    private = {**params, "epsilon": epsilon, "cap": cap}
    pooled, alone = risks(2, m, mean, shape, unequal, **private)
    assert np.mean(pooled) < 0.985 * np.mean(alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("params", "m", "mean", "shape", "most"),
    [
        # The sketch has 6.98, and 7.55 for two-sided geometric noise.
        ({"epsilon": 1.0, "cap": 30}, 1000, 10, 5.0, 7.25),
        ({"epsilon": 0.5, "cap": 12}, 200, 3, 5.0, 2.0),
        ({**CENTRAL, "cap": 30}, 1000, 10, 5.0, 6.95),
    ],
)
def test_errors_of_private_estimates(params, m, mean, shape, most):
    pooled, _ = risks(20, m, mean, shape, **params)
    assert np.mean(pooled) < most


@every_trust
def test_many_clients_give_the_population_back(params):
    rates, counts, exposure = draw(20_000, 10.0, 3.0, 0)
    model = fit(counts, exposure, **params)
    assert model.population_mean_ == pytest.approx(10, abs=6 * model.population_mean_std_)
    assert model.population_mean_std_ < 0.4
    best = np.mean((fit(counts, exposure).means_ - rates) ** 2)
    assert np.mean((model.means_ - rates) ** 2) < 1.01 * best
    lower, upper = model.credible_interval(0.9)
    assert np.mean((lower <= rates) & (rates <= upper)) == pytest.approx(0.9, abs=0.02)
    assert model._new_client_std == pytest.approx(10 / math.sqrt(3), rel=0.15)


def test_a_grid_finds_two_kinds_of_clients():
    rng = np.random.default_rng(0)
    rates = rng.choice([2.5, 20.0], 3000, p=[0.6, 0.4])
    counts = rng.poisson(rates)
    grid, gamma = (fit(counts, epsilon=2.0, cap=40, prior=prior) for prior in ("grid", "gamma"))
    errors = [np.mean((model.means_ - rates) ** 2) for model in (grid, gamma)]
    assert errors[0] < 0.5 * errors[1]
    assert (grid.prior_.low, grid.prior_.high) == (0.0, 160.0)
    given = fit(counts, epsilon=2.0, cap=40, prior=GridPrior(low=1.0, high=30.0))
    assert (given.prior_.low, given.prior_.high) == (1.0, 30.0)
    assert np.all((given.means_ >= 1) & (given.means_ <= 30))


@pytest.mark.filterwarnings("ignore:The released population")
@every_trust
@pytest.mark.parametrize("mean", [10, 30])
def test_a_cap_below_most_counts_leaves_clients_their_rates(mean, params):
    """Their mean lies beyond the cap, where the reports show next to nothing of it."""
    pooled, alone = risks(3, 1000, mean, 5.0, **{**params, "cap": 10})
    assert np.mean(pooled) < np.mean(alone)


@every_trust
def test_a_cap_that_bites_warns(params):
    _, counts, _ = draw(2000, 30.0, 5.0, 0)
    with pytest.warns(UserWarning, match=r"The released population.*\d\d%.*cap=20\b"):
        fit(counts, **{**params, "cap": 20})
    fit(counts, **{**params, "cap": 80})


# What leaves --------------------------------------------------------------------------------------

hostile = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 60), st.sampled_from([0, 1, 10**6, 10**9])),
        st.sampled_from([1.0, 1e-60, 1e60, 0.3, 7.0]),
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.filterwarnings("ignore:The released population")
@settings(max_examples=12, deadline=None)
@given(
    hostile, st.sampled_from([LOCAL, CENTRAL, {**LOCAL, "prior": "grid"}]), st.integers(1, 10**6)
)
def test_hostile_tables_give_finite_estimates(rows, params, cap):
    counts, exposure = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    model = fit(counts, exposure, **{**params, "cap": cap})
    for values in (model.means_, model.stds_, *model.credible_interval()):
        assert np.all(np.isfinite(values) & (values >= 0))
    assert np.isfinite([model.population_mean_, model.population_mean_std_]).all()
    assert np.isfinite(model._new_client_std)


def received(monkeypatch, counts, exposure, **params):
    """What the mechanism gets from every client, or the histogram."""
    caught = []
    kind = SubsetSelection if params.get("trust", "local") == "local" else GaussianMechanism
    privatize = kind.privatize

    def spy(self, messages, rng):
        caught.append((self, np.array(messages)))
        return privatize(self, messages, rng)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "privatize", spy)
        fit(counts, exposure, **params)
    return caught[0]


def one_client_moves_only_its_own_message(monkeypatch, params):
    """Over neighbouring tables whose first client has any count."""
    _, counts, exposure = draw(5, 6.0, 2.0, 0, unequal=True)
    found = []
    for first in (0, 29, 10**9):
        counts[0] = first
        found.append(received(monkeypatch, counts, exposure, **params))
    (first, message), *others = found
    for mechanism, other in others:
        if mechanism != first or other.shape != message.shape:
            return False
        if mechanism.__class__ is SubsetSelection and np.any(other[1:] != message[1:]):
            return False
        if np.linalg.norm(other - message) > mechanism.sensitivity + 1e-12 and (
            mechanism.__class__ is GaussianMechanism
        ):
            return False
    return True


@pytest.mark.filterwarnings("ignore:The released population")
@every_trust
def test_one_client_moves_nothing_but_its_own_message(params, monkeypatch):
    assert one_client_moves_only_its_own_message(monkeypatch, params)


def cap_from_data(monkeypatch):
    release = _rate_reports.release_cells

    def leaky(events, exposure, params, rng):
        return release(events, exposure, clone(params).set_params(cap=int(events.max())), rng)

    monkeypatch.setattr(_rate_reports, "release_cells", leaky)


def sensitivity_of_zero_out(monkeypatch):
    monkeypatch.setattr("pfl_sklearn.estimation._category_reports.HISTOGRAM_SENSITIVITY", 1.0)


@pytest.mark.filterwarnings("ignore:The released population")
@pytest.mark.parametrize(
    ("mutate", "params"),
    [(cap_from_data, LOCAL), (cap_from_data, CENTRAL), (sensitivity_of_zero_out, CENTRAL)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_mutants_are_convicted(mutate, params, monkeypatch):
    mutate(monkeypatch)
    assert not one_client_moves_only_its_own_message(monkeypatch, params)


def odds_of_fits(monkeypatch, n_fits=60):
    """Lower bound on epsilon from whether a subset holds the top cell without the lowest.

    Every fit has 200 clients with the same count, each with a draw of its own.
    """
    inside = []
    privatize = SubsetSelection.privatize

    def spy(self, messages, rng):
        subsets = privatize(self, messages, rng)
        inside.append(int(np.sum(subsets[:, -1] & ~subsets[:, 0])))
        return subsets

    monkeypatch.setattr(SubsetSelection, "privatize", spy)
    for value in (10**6, 0):
        for seed in range(n_fits):
            fit(np.full(200, value), seed=seed, epsilon=1.0, cap=12)
    given_top, given_none = sum(inside[:n_fits]), sum(inside[n_fits:])
    return odds_lower_bound(given_top, given_none, 200 * n_fits)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The released population")
def test_local_reports_keep_their_promise(monkeypatch):
    """An end-to-end audit: a count far above the cap, against a count of 0."""
    assert 0.7 < odds_of_fits(monkeypatch) <= 1.0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The released population")
def test_odds_raised_by_half_are_convicted(monkeypatch):
    inside = SubsetSelection._outside

    def lower(self, size):
        """Probability that the truth is missing, where its odds are half as high again."""
        missing = inside(self, size)
        odds = 1.5 * (1 - missing) / missing
        return 1 / (1 + odds)

    monkeypatch.setattr(SubsetSelection, "_outside", lower)
    assert odds_of_fits(monkeypatch) > 1.0


def test_the_noise_of_a_histogram_is_calibrated(monkeypatch):
    _, counts, exposure = draw(12, 6.0, 2.0, 0)
    mechanism, histogram = received(monkeypatch, counts, exposure, **CENTRAL)
    assert mechanism.noise_std == pytest.approx(math.sqrt(2) / gdp_mu(1.0, 1e-5))
    assert (histogram.sum(), len(histogram)) == (12, 14)


# Reports ------------------------------------------------------------------------------------------
def test_the_report_says_what_is_protected():
    _, counts, exposure = draw(12, 6.0, 2.0, 0, unequal=True)
    model = PoissonMean(**LOCAL).fit_counts(counts, exposure)
    report = model.privacy_
    assert (report.epsilon, report.delta, report.unit) == (1.0, 0.0, "client")
    assert (report.relation, report.trust, report.n_clients) == ("replace_one", "local", 12)
    assert "2 of 8 categories" in report.mechanism
    assert "every message" in report.adversary
    assert {"population_mean_", "prior_"} <= set(report.released)
    assert {"means_", "exposure_per_client_"} <= set(report.not_released)
    assert any("exposure" in text and "public" in text for text in report.assumptions)
    assert any("cap=30" in text for text in report.assumptions)
    assert report.warnings == ()
    central = PoissonMean(**{**CENTRAL, "delta": 1e-3}).fit_counts(counts, exposure).privacy_
    assert (central.trust, central.delta) == ("central", 1e-3)
    assert central.sensitivity == pytest.approx(math.sqrt(2))
    ((relation, epsilon),) = central.epsilon_under
    assert (relation, epsilon < 0.75) == ("zero_out", True)


@every_trust
def test_what_is_handed_over(params):
    _, counts, exposure = draw(12, 6.0, 2.0, 0, unequal=True)
    model = fit(counts, exposure, unseen="population", **params)
    rows, ids = np.zeros((2, 1)), [7, 7]
    released = model.release()
    assert not hasattr(released, "means_")
    assert released.predict(rows, groups=[99, 98], exposure=[1.0, 2.0]) == pytest.approx(
        [model.population_mean_, 2 * model.population_mean_]
    )
    own = model.for_client(7)
    mean, std = own.predict(rows, exposure=[1.0, 2.0], return_std=True)
    again = model.predict(rows, groups=ids, exposure=[1.0, 2.0], return_std=True)
    np.testing.assert_array_equal((mean, std), again)
    bounds = np.array(model.credible_interval(0.8))[:, 7]
    np.testing.assert_allclose(np.ravel(own.credible_interval(0.8)), bounds)
    shape = (model.means_[7] / model.stds_[7]) ** 2
    np.testing.assert_allclose(gammainc(shape, shape / model.means_[7] * bounds), [0.1, 0.9])


@every_trust
def test_a_single_private_client_keeps_its_rate(params):
    model = fit([4], [8.0], **params)
    assert (model.means_[0], model.shrinkage_[0]) == (0.5, 0.0)
    assert np.isnan(model.icc_)
    assert model.population_mean_ != 0.5
    assert np.isfinite(model._new_client_std)


@pytest.mark.parametrize(
    ("params", "error"),
    [
        ({"epsilon": 1.0}, r"cap must be given when epsilon is finite.*None"),
        ({"epsilon": 1.0, "cap": 0}, "'cap' parameter of PoissonMean.*0"),
        ({"epsilon": 1.0, "cap": 2**60}, "'cap' parameter of PoissonMean"),
        ({**LOCAL, "trust": "central"}, r"delta.*trust='central'.*\b0\b"),
        ({**LOCAL, "method": "moments"}, r"method='moments'.*epsilon=1\.0.*'ml'"),
        ({**CENTRAL, "prior": "grid"}, r"GridPrior.*trust='central'.*'gamma'"),
    ],
)
def test_bad_parameters(params, error, tmp_path):
    ledger = PrivacyLedger(tmp_path / "ledger.jsonl")
    model = PoissonMean(ledger=ledger, **params)
    with pytest.raises(ValueError, match=error):
        model.fit_counts([1, 2], [1.0, 2.0])
    with pytest.raises(ValueError, match=error):
        model.fit(np.zeros((2, 1)), [1, 2], groups=[0, 1])
    assert ledger.entries == []
