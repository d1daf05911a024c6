"""PoissonMean: closed forms, brute force, limits, exposure, coverage, bad input."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy.optimize import minimize
from scipy.special import gammainc, gammaln
from scipy.stats import nbinom
from sklearn import config_context
from sklearn.metrics import d2_tweedie_score
from sklearn.model_selection import GridSearchCV, KFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

from pfl_sklearn import ClientColumn, PoissonMean
from pfl_sklearn.estimation._counts import exposure_table
from pfl_sklearn.priors import BetaPrior, GammaPrior, GridPrior
from pfl_sklearn.priors._gamma import log_negative_binomial

COUNTS, EXPOSURE = np.array([0, 7, 5, 1, 9, 3]), np.array([2.0, 3.0, 4.5, 1.0, 2.5, 6.0])


def draw(m, shape, mean, seed, unequal=False):
    """Rates, counts and exposures of simulated clients."""
    rng = np.random.default_rng(seed)
    exposure = rng.gamma(1.0, size=m) + 0.1 if unequal else np.ones(m)
    exposure *= m / exposure.sum()
    rates = rng.gamma(shape, mean / shape, size=m)
    return rates, rng.poisson(rates * exposure), exposure


def log_likelihood(shape, rate, counts=COUNTS, exposure=EXPOSURE):
    return nbinom.logpmf(counts, shape, rate / (rate + exposure)).sum()


def test_posterior_by_hand():
    model = PoissonMean(GammaPrior(shape=2.0, rate=4.0)).fit_counts([0, 3, 14], [1.0, 6.0, 12.0])
    np.testing.assert_allclose(model.means_, [2 / 5, 5 / 10, 16 / 16])
    np.testing.assert_allclose(model.stds_**2, [2 / 25, 5 / 100, 16 / 256])
    np.testing.assert_allclose(model.shrinkage_, [4 / 5, 4 / 10, 4 / 16])
    np.testing.assert_allclose(model.local_means_, [0, 0.5, 14 / 12])
    assert model.population_mean_ == 0.5
    assert model.population_mean_std_ == 0.0
    assert model.icc_ == pytest.approx(1 / 5)
    lower, upper = model.credible_interval(0.8)
    np.testing.assert_allclose(gammainc([2, 5, 16], np.array([5, 10, 16]) * lower), 0.1)
    np.testing.assert_allclose(gammainc([2, 5, 16], np.array([5, 10, 16]) * upper), 0.9)


fractions = partial(
    pytest.warns, UserWarning, match=r"^y holds.*such as \d.*PoissonRegressor.*exposure="
)


@pytest.mark.parametrize("params", [{}, {"prior": "grid"}], ids=str)
def test_rates_with_weights_are_counts_with_exposure(params):
    _, counts, exposure = draw(60, 2.0, 3.0, 0, unequal=True)
    rows, groups = np.zeros((60, 1)), np.arange(60) % 20
    expected = PoissonMean(**params).fit(rows, counts, groups=groups, exposure=exposure)
    model = PoissonMean(**params)
    with fractions() as caught:
        model.fit(rows, counts / exposure, groups=groups, sample_weight=exposure)
    assert len(caught) == 1
    np.testing.assert_allclose(model.means_, expected.means_)
    np.testing.assert_allclose(model.credible_interval(), expected.credible_interval())
    np.testing.assert_array_equal(model.n_samples_per_client_, 3)
    score = model.score(rows, counts / exposure, groups=groups, sample_weight=exposure)
    assert score == pytest.approx(expected.score(rows, counts, groups=groups, exposure=exposure))


def test_fractions_of_events_are_added_up():
    model = PoissonMean(GammaPrior(shape=2.0, rate=4.0))
    with fractions():
        model.fit(np.zeros((3, 1)), [0.5, 0.25, 3.5], groups=[0, 0, 1])
    np.testing.assert_allclose(model.means_, [2.75 / 6, 5.5 / 5])
    lower, _ = model.credible_interval(0.8)
    np.testing.assert_allclose(gammainc([2.75, 5.5], np.array([6, 5]) * lower), 0.1)
    with pytest.raises(ValueError, match=r"sample_weight must hold whole numbers; got 0\.5"):
        model.fit([[0]] * 2, [1, 2], groups=[0, 1], exposure=[1, 1], sample_weight=[0.5, 1])


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e3, 1e8])
def test_log_probabilities_are_those_of_scipy(scale):
    shape, rate = np.array([[0.3, 4.0, 1e7]]), np.array([[0.2, 5.0, 1e7]])
    counts = np.rint(scale * COUNTS)
    got = log_negative_binomial(counts[:, None], EXPOSURE[:, None], shape, rate)
    expected = nbinom.logpmf(counts[:, None], shape, rate / (rate + EXPOSURE[:, None]))
    # SciPy loses digits of large counts, and of large shapes.
    np.testing.assert_allclose(got, expected, rtol=1e-7, atol=1e-5)


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 12), st.sampled_from([0.3, 3.0, 40.0]))
def test_no_starting_point_finds_a_better_prior(seed, m, mean):
    """Small tables, where the surface is flat towards alike clients."""
    _, counts, exposure = draw(m, 2.0, mean, seed, unequal=True)
    if not counts.any():
        return
    prior = PoissonMean().fit_counts(counts, exposure).prior_

    def negative(point):
        mean, shape = np.exp(np.minimum(point, [20.0, np.log(1e6)]))
        return -log_likelihood(shape, shape / mean, counts, exposure)

    found = -log_likelihood(prior.shape, prior.rate, counts, exposure)
    pooled = np.log(counts.sum() / exposure.sum())
    for start in ([pooled, 0.0], [pooled, 3.0], [pooled + 1, -2.0], [pooled - 1, 6.0]):
        options = {"xatol": 1e-8, "fatol": 1e-10, "maxiter": 4000}
        best = minimize(negative, start, method="Nelder-Mead", options=options)
        assert found <= best.fun + 1e-4


def test_likelihood_is_at_its_maximum():
    prior = PoissonMean().fit_counts(COUNTS, EXPOSURE).prior_
    best = log_likelihood(prior.shape, prior.rate)
    for shape, rate in ((1.001, 1), (0.999, 1), (1, 1.001), (1, 0.999), (1.001, 1.001)):
        assert log_likelihood(shape * prior.shape, rate * prior.rate) < best


def test_moments_are_those_of_buehlmann_and_straub():
    """By hand: rates .1, .3, .8 around 15 / 40, of which chance explains .75."""
    model = PoissonMean(method="moments").fit_counts([1, 6, 8], [10, 20, 10])
    pooled = 15 / 40
    between = (10 * 0.275**2 + 20 * 0.075**2 + 10 * 0.425**2 - 2 * pooled) / (40 - 600 / 40)
    k = pooled / between
    own = np.array([10 / (10 + k), 20 / (20 + k), 10 / (10 + k)])
    mean = own @ [0.1, 0.3, 0.8] / own.sum()
    assert between == pytest.approx(0.077)
    assert model.prior_.rate == pytest.approx(k)
    assert model.population_mean_ == pytest.approx(mean)
    np.testing.assert_allclose(1 - model.shrinkage_, own)
    np.testing.assert_allclose(model.means_, own * [0.1, 0.3, 0.8] + (1 - own) * mean)


@pytest.mark.parametrize("method", ["ml", "moments"])
def test_many_clients_give_the_population_back(method):
    for unequal in (False, True):
        _, counts, exposure = draw(40_000, 1.5, 2.0, 0, unequal)
        prior = PoissonMean(method=method).fit_counts(counts, exposure).prior_
        # Six standard errors, rounded up.
        assert prior.shape == pytest.approx(1.5, rel=0.12)
        assert prior.shape / prior.rate == pytest.approx(2.0, rel=0.05)


def test_averages_match_brute_force_integration():
    """1 / (1 + shape) is Beta(1/2, 1/2), and the mean has the prior of Jeffreys."""
    counts, exposure = COUNTS[:4], EXPOSURE[:4]
    model = PoissonMean().fit_counts(counts, exposure)
    angles = (np.arange(500) + 0.5) / 500 * np.pi / 2
    shape, log_rate = np.meshgrid(1 / np.tan(angles) ** 2, np.linspace(-14, 24, 800))
    rate = np.exp(log_rate)
    value, information = np.zeros_like(rate), np.zeros_like(rate)
    for y, e in zip(counts, exposure, strict=True):
        value += gammaln(shape + y) - gammaln(shape) - shape * np.log1p(e / rate)
        value -= y * np.log(rate + e)
        information += shape * e / (e + rate)  # on the logarithm of the rate, given the shape
    weight = np.sqrt(information) * np.exp(value - value.max())
    weight /= weight.sum()
    a, b = shape + counts[1], rate + exposure[1]
    first, second = np.sum(weight * a / b), np.sum(weight * a * (a + 1) / b**2)
    expected = second - first**2 + (first - model.means_[1]) ** 2
    assert model.stds_[1] ** 2 == pytest.approx(expected, rel=0.01)
    lower, upper = model.credible_interval(0.8)
    below = [np.sum(weight * gammainc(a, b * x)) for x in (lower[1], upper[1])]
    assert below == pytest.approx([0.1, 0.9], abs=0.005)
    # Of the population mean, whose own posterior has no variance: of its estimate, given the ratio.
    ratio, mean = 1 / shape[0], model.population_mean_ + 0.5 / exposure.sum()
    of_ratio = weight.sum(axis=0)
    spread = mean**2 * ratio[:, None] + mean / exposure
    of_mean = of_ratio @ (1 / np.sum(1 / spread, axis=1))
    assert model.population_mean_std_**2 == pytest.approx(of_mean, rel=0.02)
    of_new = (of_ratio @ ratio) * (model.population_mean_**2 + of_mean) + of_mean
    assert model._new_client_std**2 == pytest.approx(of_new, rel=0.03)


def test_the_share_of_averages_ends():
    for m, same in ((300, False), (1000, True)):
        _, counts, exposure = draw(m, 2.0, 1.0, 0, unequal=True)
        full, plug_in = (
            PoissonMean(uncertainty=kind).fit_counts(counts, exposure)
            for kind in ("full", "plug_in")
        )
        np.testing.assert_array_equal(full.means_, plug_in.means_)
        assert np.allclose(full.stds_, plug_in.stds_, rtol=1e-12, atol=0) == same
        assert (full._priors is None) == same
    _, counts, exposure = draw(8, 2.0, 2.0, 0)
    full = PoissonMean().fit_counts(counts, exposure)
    plug_in = PoissonMean(uncertainty="plug_in").fit_counts(counts, exposure)
    assert np.sum(full.stds_**2) > np.sum(plug_in.stds_**2)
    assert full.population_mean_std_ > plug_in.population_mean_std_
    assert full._new_client_std > plug_in._new_client_std
    between = plug_in.prior_.moments()[1]
    of_mean = (plug_in.population_mean_ + between) / 8  # exposures are 1
    assert plug_in.population_mean_std_**2 == pytest.approx(of_mean)
    assert plug_in._new_client_std**2 == pytest.approx(between + of_mean)


@pytest.mark.parametrize("method", ["ml", "moments"])
def test_clients_that_chance_explains_are_alike(method):
    model = PoissonMean(method=method).fit_counts(np.full(100, 5), np.full(100, 2.0))
    np.testing.assert_allclose(model.means_, 2.5)
    np.testing.assert_allclose(model.shrinkage_, 1, atol=1e-3)
    assert model.icc_ < 1e-3
    model = PoissonMean(method=method).fit_counts([5, 6, 4, 10], [5.0, 6.0, 4.0, 10.0])
    np.testing.assert_allclose(model.means_, 1)
    lower, upper = model.credible_interval()
    assert np.all((lower < 1) & (upper > 1))


@pytest.mark.parametrize("method", ["ml", "moments"])
def test_clients_far_apart_keep_their_rates(method):
    counts = np.tile([0, 1000], 50)
    model = PoissonMean(method=method).fit_counts(counts)
    # By moments the shape is 1, so that the estimate is one event over an exposure of 1.002.
    np.testing.assert_allclose(model.means_, counts, atol=1.0)
    np.testing.assert_allclose(model.shrinkage_, 0, atol=2e-3)


@pytest.mark.parametrize("prior", ["gamma", "grid"])
def test_no_events_at_all(prior):
    """Rates of 0 or nearly so, of which the data leave some doubt."""
    model = PoissonMean(prior).fit_counts(np.zeros(6), EXPOSURE)
    np.testing.assert_allclose(model.means_, 0, atol=1e-9)
    lower, upper = model.credible_interval()
    assert np.all((lower >= 0) & (upper > 0.01) & (upper < 1))
    assert np.all((model.stds_ > 0) & (model.stds_ < 1))
    assert 0 < model.population_mean_std_ < 1
    rows = np.zeros((6, 1))
    assert model.score(rows, np.zeros(6), groups=np.arange(6), exposure=EXPOSURE) <= 1


def test_one_client_has_the_posterior_of_jeffreys():
    model = PoissonMean().fit_counts([4], [8.0])
    assert (model.means_[0], model.shrinkage_[0]) == (0.5, 0.0)
    assert np.isnan(model.icc_)
    lower, upper = model.credible_interval(0.9)
    np.testing.assert_allclose(gammainc(4.5, 8 * np.array([lower[0], upper[0]])), [0.05, 0.95])
    assert model.stds_[0] ** 2 == pytest.approx(4.5 / 64 + (0.5 / 8) ** 2)


@settings(max_examples=5, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 60), st.floats(0.05, 20.0)), min_size=2, max_size=9),
    st.integers(-50, 50),
    st.sampled_from(["gamma", "grid", GammaPrior(1.5, 1.0)]),
)
@pytest.mark.slow
def test_the_unit_of_exposure_changes_the_unit_of_rates_alone(rows, digits, prior):
    counts, exposure = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    unit = 2.0 ** (3 * digits)
    model = PoissonMean(prior).fit_counts(counts, exposure)
    if isinstance(prior, GammaPrior):
        prior = GammaPrior(1.5, unit)
    other = PoissonMean(prior).fit_counts(counts, unit * exposure)
    names = ("means_", "stds_", "population_mean_", "population_mean_std_", "_new_client_std")
    for name in names:
        np.testing.assert_allclose(getattr(other, name) * unit, getattr(model, name), rtol=1e-5)
    np.testing.assert_allclose(other.shrinkage_, model.shrinkage_, rtol=1e-5, atol=1e-9)
    for bound, there in zip(model.credible_interval(), other.credible_interval(), strict=True):
        np.testing.assert_allclose(there * unit, bound, rtol=1e-5, atol=1e-9)


@pytest.mark.filterwarnings("ignore:n_points=201 is too coarse")
@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.floats(0.01, 50.0)), min_size=2, max_size=8),
    st.sampled_from(["gamma", "grid"]),
)
@pytest.mark.slow
def test_estimates_lie_between_the_own_rate_and_the_others(rows, prior):
    counts, exposure = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    model = PoissonMean(prior).fit_counts(counts, exposure)
    local = model.local_means_
    slack = 1e-6 * (1 + local.max())
    assert np.all((model.means_ >= local.min() - slack) & (model.means_ <= local.max() + slack))
    if prior == "gamma":
        mixed = (1 - model.shrinkage_) * local + model.shrinkage_ * model.population_mean_
        np.testing.assert_allclose(model.means_, mixed, rtol=1e-9, atol=1e-12)
    lower, upper = model.credible_interval()
    assert np.all((lower >= 0) & (lower < upper) & np.isfinite(upper))
    assert np.all(np.isfinite(model.stds_) & (model.stds_ > 0))


def test_counts_of_any_size():
    counts = np.array([10**9, 3 * 10**8, 6 * 10**8, 0])
    model = PoissonMean().fit_counts(counts)
    np.testing.assert_allclose(model.means_[:3], counts[:3], rtol=1e-6)
    alike = PoissonMean().fit_counts([10**9, 10**9 + 0, 10**9 - 40_000, 10**9])
    np.testing.assert_allclose(alike.means_, 1e9, rtol=1e-4)
    for fitted in (model, alike):
        assert np.all(np.isfinite(np.concatenate([fitted.stds_, *fitted.credible_interval()])))


def test_rows_counts_and_weights_agree():
    rng = np.random.default_rng(0)
    groups, y = rng.permutation(np.repeat(list("abcd"), 6)), rng.poisson(2.0, 24)
    exposure, weights = rng.uniform(0.5, 3.0, 24), rng.integers(0, 4, 24)
    rows = np.zeros((24, 1))
    model = PoissonMean().fit(rows, y, groups=groups, exposure=exposure)
    totals = [np.array([part[groups == k].sum() for k in "abcd"]) for part in (y, exposure)]
    for other in (
        PoissonMean().fit_counts(*totals, groups=list("abcd")),
        PoissonMean().fit_counts(y, exposure, groups=groups),
    ):
        np.testing.assert_allclose(model.means_, other.means_, rtol=1e-9)
        np.testing.assert_allclose(model.stds_, other.stds_, rtol=1e-6)
    np.testing.assert_allclose(model.exposure_per_client_, totals[1])
    np.testing.assert_array_equal(model.n_samples_per_client_, 6)
    often = np.repeat(np.arange(24), weights)
    repeated = PoissonMean().fit(
        rows[often], y[often], groups=groups[often], exposure=exposure[often]
    )
    weighted = PoissonMean().fit(rows, y, groups=groups, exposure=exposure, sample_weight=weights)
    np.testing.assert_allclose(weighted.means_, repeated.means_, rtol=1e-6)
    np.testing.assert_array_equal(weighted.n_samples_per_client_, repeated.n_samples_per_client_)
    table = model.summary()
    assert list(table.columns[:3]) == ["n_samples", "exposure", "local_mean"]


def test_tables_of_counts_hold_every_client():
    rng = np.random.default_rng(0)
    events, exposure = rng.integers(0, 5, 200).astype(float), rng.choice([0.3, 1.0, 2.7], 200)
    table = exposure_table(events, exposure)
    np.testing.assert_array_equal(table.per_client(table.successes), events)
    np.testing.assert_array_equal(table.per_client(table.trials), exposure)
    assert (len(table.counts), table.counts.sum()) == (15, 200)


def test_predictions_are_rates_times_exposure():
    model = PoissonMean(unseen="population").fit_counts(COUNTS, EXPOSURE, groups=list("abcdef"))
    rows, ids, exposed = np.zeros((3, 2)), ["b", "new", "a"], np.array([2.0, 10.0, 0.5])
    rates = np.array([model.means_[1], model.population_mean_, model.means_[0]])
    stds = np.array([model.stds_[1], model._new_client_std, model.stds_[0]])
    mean, std = model.predict(rows, groups=ids, exposure=exposed, return_std=True)
    np.testing.assert_allclose(mean, exposed * rates)
    np.testing.assert_allclose(std, exposed * stds)
    with pytest.raises(ValueError, match=r"fitted with exposure.*exposure="):
        model.predict(rows, groups=ids)
    with pytest.raises(ValueError, match=r"exposure must be above 0; row 1 has -1"):
        model.predict(rows, groups=ids, exposure=[1.0, -1.0, 1.0])
    with pytest.raises(ValueError, match="inconsistent numbers"):
        model.predict(rows, groups=ids, exposure=[1.0])
    own = model.for_client("b")
    assert own.predict(rows[:1], exposure=[2.0]) == pytest.approx(mean[:1])
    with pytest.raises(ValueError, match="fitted with exposure"):
        own.predict(rows[:1])
    np.testing.assert_allclose(own.credible_interval(), np.array(model.credible_interval())[:, [1]])
    plain = PoissonMean(unseen="population").fit_counts(COUNTS)
    np.testing.assert_array_equal(plain.predict(rows, groups=[0, 1, 2]), plain.means_[:3])
    np.testing.assert_array_equal(
        plain.predict(rows, groups=[0, 1, 2], exposure=exposed), exposed * plain.means_[:3]
    )


def test_the_score_is_the_explained_deviance():
    rng = np.random.default_rng(0)
    groups, exposure = rng.integers(0, 5, 60), rng.uniform(0.5, 4.0, 60)
    y, weights = rng.poisson(exposure * (1 + groups)), rng.uniform(size=60)
    rows = np.zeros((60, 1))
    model = PoissonMean().fit(rows, y, groups=groups, exposure=exposure)
    for weight in (None, weights):
        heavy = exposure * (1 if weight is None else weight)
        rates = model.predict(rows, groups=groups, exposure=exposure) / exposure
        expected = d2_tweedie_score(y / exposure, rates, sample_weight=heavy, power=1)
        got = model.score(rows, y, groups=groups, exposure=exposure, sample_weight=weight)
        assert got == pytest.approx(expected)
    assert 0.2 < got < 1
    alone = PoissonMean().fit_counts([0, 0], groups=["a", "b"])
    assert alone.score(rows[:2], [0, 0], groups=["a", "b"]) <= 1


def test_exposure_is_routed():
    rng = np.random.default_rng(0)
    groups, exposure = np.repeat(np.arange(5), 12), rng.uniform(0.5, 4.0, 60)
    y, rows = rng.poisson(exposure * (1 + groups)), rng.normal(size=(60, 1))
    data = {"groups": groups, "exposure": exposure}
    direct = PoissonMean().fit(rows, y, **data)
    column = ClientColumn(make_pipeline(FunctionTransformer(), PoissonMean()), 0)
    column.fit(np.column_stack([groups, rows]), y, exposure=exposure)
    got = column.predict(np.column_stack([groups, rows]), exposure=exposure)
    np.testing.assert_array_equal(got, direct.predict(rows, **data))
    assert column.score(np.column_stack([groups, rows]), y, exposure=exposure) == pytest.approx(
        direct.score(rows, y, **data)
    )
    folds = KFold(3, shuffle=True, random_state=0)
    with config_context(enable_metadata_routing=True):
        scores = cross_val_score(PoissonMean(), rows, y, params=data, cv=folds)
        grid = {"method": ["ml", "moments"]}
        search = GridSearchCV(PoissonMean(), grid, cv=folds).fit(rows, y, **data)
    assert search.cv_results_["mean_test_score"][0] == pytest.approx(scores.mean())
    train, test = next(folds.split(rows))
    first = PoissonMean().fit(rows[train], y[train], groups=groups[train], exposure=exposure[train])
    assert scores[0] == first.score(
        rows[test], y[test], groups=groups[test], exposure=exposure[test]
    )


def test_a_grid_maximizes_the_likelihood_and_obeys_robbins():
    """Under any prior the posterior mean is (y + 1) f(y + 1) / f(y), f the marginal."""
    rng = np.random.default_rng(0)
    rates = rng.choice([1.0, 6.0], 20_000, p=[0.7, 0.3])
    counts = rng.poisson(rates)
    model = PoissonMean("grid").fit_counts(counts)
    prior, y = model.prior_, np.arange(counts.max() + 2)
    weights = np.asarray(prior.weights)
    pmf = np.exp(y[:, None] * np.log(np.maximum(prior.support, 1e-300)) - prior.support
                 - gammaln(y + 1)[:, None])  # fmt: skip
    share = np.bincount(counts, minlength=len(y)) / len(counts)
    gradient = (share / (pmf @ weights)) @ pmf
    assert gradient.max() <= 1 + 1e-6  # Kiefer and Wolfowitz's condition
    marginal = pmf @ weights
    robbins = (y[:-1] + 1) * marginal[1:] / marginal[:-1]
    np.testing.assert_allclose(prior.posterior(y[:-1], np.ones(len(y) - 1))[0], robbins, rtol=1e-6)
    np.testing.assert_allclose(model.means_, robbins[counts], rtol=1e-6)
    empirical = (y[:-1] + 1) * share[1:] / share[:-1]
    often = share[:-1] > 0.02
    np.testing.assert_allclose(robbins[often], empirical[often], rtol=0.12)
    near = np.abs(prior.support[:, None] - [1.0, 6.0]).min(axis=1) < 0.5
    assert weights[near].sum() > 0.9
    gamma = PoissonMean().fit_counts(counts)
    errors = [np.mean((each.means_ - rates) ** 2) for each in (model, gamma)]
    assert errors[0] < 0.9 * errors[1]


def test_a_grid_of_rates_is_as_fine_as_their_errors():
    counts, exposure = np.array([50, 60, 2_000]), np.array([100.0, 100.0, 1.0])
    with pytest.warns(UserWarning, match=r"n_points=201.*exposure up to 100.*GammaPrior"):
        PoissonMean("grid").fit_counts(counts, exposure)
    PoissonMean(GridPrior(n_points=2001)).fit_counts(counts, exposure)


def test_known_grids_of_rates():
    prior = GridPrior(3, weights=[0.2, 0.5, 0.3], high=4.0, outcome="poisson")
    np.testing.assert_allclose(prior.support, [0, 1, 4])
    model = PoissonMean(prior).fit_counts([0, 2], [1.0, 0.5])
    likelihood = np.array([[1, np.exp(-1), np.exp(-4)], [0, np.exp(-0.5), 16 * np.exp(-2)]])
    posterior = likelihood * [0.2, 0.5, 0.3]
    expected = posterior @ [0, 1, 4] / posterior.sum(axis=1)
    np.testing.assert_allclose(model.means_, expected)
    assert model.prior_.outcome == "poisson"
    nobody = GridPrior(3, weights=[1.0, 0.0, 0.0], outcome="poisson")
    with pytest.raises(ValueError, match=r"3 events over an exposure of 2\.5"):
        PoissonMean(nobody).fit_counts([3], [2.5])


@pytest.mark.parametrize(
    ("params", "error"),
    [
        ({"prior": BetaPrior()}, r"prior=BetaPrior\(\).*PoissonMean.*'gamma'.*'grid'"),
        ({"prior": "beta"}, r"prior='beta'.*PoissonMean"),
        ({"prior": GammaPrior(shape=1.0)}, r"GammaPrior.*shape=1.0, rate=None"),
        ({"prior": GridPrior(outcome="binomial")}, r"outcome='binomial'.*PoissonMean.*'poisson'"),
        ({"prior": "grid", "method": "moments"}, r"method='moments'.*GridPrior.*'ml'"),
    ],
)
def test_bad_parameters(params, error):
    model = PoissonMean(**params)
    before = dict(vars(model))
    with pytest.raises(ValueError, match=error):
        model.fit(np.zeros((6, 1)), COUNTS, groups=np.arange(6))
    with pytest.raises(ValueError, match=error):
        model.fit_counts(COUNTS, EXPOSURE)
    assert vars(model) == before


@pytest.mark.parametrize(
    ("counts", "exposure", "error"),
    [
        ([3, -1], [1, 1], r"must not be negative; row 1 has -1\b"),
        ([3, 0.5], [1, 1], r"must hold whole numbers; got 0\.5"),
        ([3, 2e9], [1, 1], r"must be at most 1e9 in a row; row 1 has 2e\+09"),
        ([3, np.nan], [1, 1], "contains NaN"),
        ([3, np.inf], [1, 1], "contains infinity"),
        ([3, 1], [1, 0], r"exposure must be above 0; row 1 has 0\b"),
        ([3, 1], [1, -2.5], r"exposure must be above 0; row 1 has -2\.5"),
        ([3, 1], [1, np.nan], "exposure contains NaN"),
        ([3, 1], [1, np.inf], "exposure contains infinity"),
        ([3, 1], [1, 1e200], r"exposure must lie within 1e-60 and 1e60; row 1 has 1e\+200"),
        ([3, 1], [1, 1e-200], r"exposure must lie within 1e-60.*1e-200"),
        ([3, 1], [1], "inconsistent numbers"),
        ([[3, 1], [1, 1]], [1, 1], "1d array"),
        ([], [], "0 sample"),
    ],
)
def test_bad_counts(counts, exposure, error):
    model = PoissonMean()
    for fit in (
        lambda: model.fit_counts(counts, exposure),
        lambda: model.fit(np.zeros((len(counts), 1)), counts, groups=counts, exposure=exposure),
    ):
        with pytest.raises(ValueError, match=error):
            fit()
        assert not hasattr(model, "clients_")


def test_a_grid_of_proportions_stays_below_1():
    with pytest.raises(ValueError, match=r"GridPrior.*at most 1.*\b3\b"):
        GridPrior(high=3.0).fit([0.5])


# Share of clients, and of new ones, that nominal 95 % intervals cover.
@pytest.mark.slow
@pytest.mark.parametrize(("m", "mean", "unequal"), [(5, 0.5, True), (10, 5.0, False)])
def test_intervals_of_few_clients_cover(m, mean, unequal):
    known, new = [], []
    for seed in range(100):  # 500 or 1,000 clients: a standard error of 1 % or less
        rates, counts, exposure = draw(m, 2.0, mean, seed, unequal)
        model = PoissonMean().fit_counts(counts, exposure)
        lower, upper = model.credible_interval()
        known.append(np.mean((lower <= rates) & (rates <= upper)))
        others = np.random.default_rng(seed + 10**6).gamma(2.0, mean / 2.0, 20)
        inside = np.abs(others - model.population_mean_) < 1.96 * model._new_client_std
        new.append(np.mean(inside))
    assert 0.91 < np.mean(known) < 0.98
    assert np.mean(new) > 0.86  # of a long-tailed population, by a standard deviation
