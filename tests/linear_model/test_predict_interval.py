"""Intervals of predictions: closed forms, simulated posteriors, coverage, bad input."""

import warnings

import numpy as np
import pytest
import sklearn
import statsmodels.api as sm
from hypothesis import given, settings, strategies as st
from scipy import stats
from scipy.special import logit, ndtri, softmax

from pfl_sklearn.linear_model import (
    PersonalizedLinearRegression,
    PersonalizedLogisticRegression,
    PersonalizedPoissonRegression,
)
from pfl_sklearn.linear_model._mixed._families import (
    Binomial,
    Categorical,
    NegativeBinomial,
    Poisson,
    helmert_contrasts,
)
from pfl_sklearn.linear_model._mixed._predictions import probability_bounds, response_bounds
from pfl_sklearn.priors import GaussianPrior

_SPHERICAL = GaussianPrior(covariance_type="spherical")
_DESCENT = {"prior": _SPHERICAL, "solver": "gd", "variance_floor": 0.1}
NEW = 1000  # a client that no fit saw
MODELS = {
    "linear": PersonalizedLinearRegression,
    "classes": PersonalizedLogisticRegression,
    "counts": PersonalizedPoissonRegression,
}


def draw(kind, m=15, n=8, seed=0, n_classes=2, level=0.5):
    """X (n_rows, 1), responses and clients, whose predictors have other intercepts."""
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(m), n)
    X = rng.normal(size=(m * n, 1))
    if kind == "classes":
        logits = rng.normal(size=(m, n_classes))[groups] + 0.5 * X * np.arange(n_classes)
        return X, (logits + rng.gumbel(size=logits.shape)).argmax(axis=1), groups
    predictors = level + 0.5 * X[:, 0] + 0.7 * rng.normal(size=m)[groups]
    noisy = predictors + rng.normal(size=m * n)
    return X, rng.poisson(np.exp(predictors)) if kind == "counts" else noisy, groups


def fit(kind, known=None, params=None, **rows):
    X, y, groups = rows = draw(kind, **rows)
    model = MODELS[kind](random="intercept", unseen="population", **(params or {}))
    return model.fit(X, y, groups=groups, **(known or {})), rows


def inside(lower, value, upper):
    return np.all((lower <= value) & (value <= upper))


@pytest.mark.parametrize("level", [0.5, 0.95])
def test_linear_bounds_are_normal(level):
    model, (X, _, groups) = fit("linear")
    ids = np.append(groups[:5], [NEW, NEW])
    mean, std = model.predict(X[:7], groups=ids, return_std=True)
    z = stats.norm.ppf((1 + level) / 2)
    for new_row, spread in ((False, std), (True, np.sqrt(std**2 + model.noise_variance_))):
        lower, upper = model.predict_interval(X[:7], groups=ids, level=level, new_row=new_row)
        np.testing.assert_allclose(lower, mean - z * spread)
        np.testing.assert_allclose(upper, mean + z * spread)
    mean_response = model.predict_interval(X[:7], groups=ids)
    np.testing.assert_array_equal(
        mean_response, model.predict_interval(X[:7], groups=ids, level=0.95, new_row=False)
    )


@pytest.mark.parametrize(
    "params",
    [
        {"prior": "laplace"},
        _DESCENT,
        {"prior": "discrete", "method": "printed", "noise_variance": 1.0},
    ],
)
def test_models_without_a_posterior_have_no_interval(params):
    X, y, groups = draw("linear")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # these fits may miss their maximum
        model = PersonalizedLinearRegression(random_state=0, **params).fit(X, y, groups=groups)
    with pytest.raises(ValueError, match="posterior") as by_std:
        model.predict(X, groups=groups, return_std=True)
    with pytest.raises(ValueError, match="predict_interval") as by_interval:
        model.predict_interval(X, groups=groups)
    assert str(by_interval.value) == str(by_std.value)


def test_a_private_model_has_the_interval_of_its_std():
    X, y, groups = draw("linear", m=40)
    model = PersonalizedLinearRegression(
        GaussianPrior(covariance=0.5),
        random="intercept",
        epsilon=5.0,
        feature_bound=3.0,
        target_bound=5.0,
        random_state=0,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the promise
        model.fit(X, y, groups=groups)
    mean, std = model.predict(X[:4], groups=groups[:4], return_std=True)
    _, upper = model.predict_interval(X[:4], groups=groups[:4], new_row=True)
    half = ndtri(0.975) * np.hypot(std, model.noise_variance_**0.5)
    np.testing.assert_allclose(upper, mean + half)
    released = model.release()
    mean, std = released.predict(X[:4], groups=[NEW] * 4, return_std=True)
    lower, _ = released.predict_interval(X[:4], groups=[NEW] * 4, level=0.5)
    np.testing.assert_allclose(lower, mean - ndtri(0.75) * std)


def test_bounds_of_two_classes_are_those_of_the_log_odds():
    model, (X, _, groups) = fit("classes")
    lower, upper = model.predict_interval(X, groups=groups, level=0.9)
    assert lower.shape == upper.shape == (len(X), 2)
    np.testing.assert_allclose(lower[:, 0], 1 - upper[:, 1])
    np.testing.assert_allclose(upper[:, 0], 1 - lower[:, 1])
    assert inside(lower, model.predict_proba(X, groups=groups), upper)
    model, _ = fit("classes", params={"uncertainty": "plug_in"})
    at_zero = model.predict_interval(np.zeros((15, 1)), groups=model.clients_, level=0.9)
    for bound, odds in zip(at_zero, model.credible_interval(0.9), strict=True):
        np.testing.assert_allclose(logit(bound[:, 1]), odds[:, 0], rtol=1e-9)
    # Log odds of a new client are normal.
    new = model.predict_interval(np.zeros((1, 1)), groups=[NEW], level=0.9)
    variance = model.population_intercept_std_**2 + model.prior_.covariance[0, 0]
    half = ndtri(0.95) * np.sqrt(variance)
    for bound, sign in zip(new, (-1, 1), strict=True):
        odds = model.population_intercept_ + sign * half
        assert logit(bound[0, 1]) == pytest.approx(odds, abs=1e-9)


def test_small_probabilities_keep_their_digits():
    model, _ = fit("classes", {"offset": np.zeros(120)})
    rows = {"X": np.zeros((15, 1)), "groups": model.clients_}
    bounds = model.predict_interval(offset=np.zeros(15), **rows)
    for offset, rare in ((60.0, 0), (-60.0, 1)):
        far = model.predict_interval(offset=np.full(15, offset), **rows)
        for near, bound in zip(bounds, far, strict=True):
            np.testing.assert_allclose(bound[:, rare], np.exp(logit(near[:, rare]) - 60), rtol=1e-9)
    with pytest.raises(ValueError, match="offset"):
        model.predict_interval(**rows)


def test_bounds_of_several_classes_by_simulation():
    """A bound may leave another share outside than asked for; 512 nodes are off by up to .02."""
    n_classes, rng = 5, np.random.default_rng(5)
    contrasts = helmert_contrasts(n_classes)
    root = contrasts @ rng.normal(size=(n_classes - 1, n_classes - 1))
    logits = rng.normal(size=(4, n_classes))
    draws = rng.normal(size=(100_000, n_classes - 1)) @ root.T
    chances = [softmax(mean + draws, axis=1) for mean in logits]

    def moments_of(g):
        return np.zeros(4), np.full(4, np.sum((g @ root) ** 2)), np.zeros(4)

    for level in (0.5, 0.9, 0.95):
        bounds = probability_bounds(logits, moments_of, contrasts, level)
        for bound, below in zip(bounds, ((1 - level) / 2, (1 + level) / 2), strict=True):
            share = [(of_row < b).mean(axis=0) for of_row, b in zip(chances, bound, strict=True)]
            np.testing.assert_allclose(share, below, atol=0.006)


def test_intervals_of_several_classes():
    prior = GaussianPrior(mean=0.0, covariance=1.5)
    model, (X, _, groups) = fit("classes", n_classes=3, params={"prior": prior})
    lower, upper = model.predict_interval(X[:9], groups=groups[:9])
    assert lower.shape == upper.shape == (9, 3)
    assert inside(0, lower, upper) and inside(lower, upper, 1)
    assert inside(lower, model.predict_proba(X[:9], groups=groups[:9]), upper)
    # A new client's deviations are those of the prior, and the population has an error on top.
    lower, upper = model.predict_interval(np.zeros((1, 1)), groups=[NEW], level=0.8)
    rng = np.random.default_rng(0)
    spread = model.population_covariance_[::2, ::2] + 1.5 * np.eye(3)
    logits = model.population_intercept_ + rng.multivariate_normal(np.zeros(3), spread, 200_000)
    share = [(softmax(logits, axis=1) < bound).mean(axis=0) for bound in (lower, upper)]
    np.testing.assert_allclose(share[0], 0.1, atol=0.006)
    np.testing.assert_allclose(share[1], 0.9, atol=0.006)


@pytest.mark.parametrize("n_classes", [2, 4])
def test_without_variance_both_bounds_are_the_probability(n_classes):
    outcome = Binomial() if n_classes == 2 else Categorical(n_classes)
    logits = np.random.default_rng(0).normal(size=(3, len(outcome.coding)))
    # Where features are far from zero, a variance of 0 may come out below it.
    for nothing in (0.0, -1e-20):
        moments = np.zeros(3), np.full(3, nothing), np.zeros(3)
        lower, upper = probability_bounds(logits, lambda _, m=moments: m, outcome.coding, 0.95)
        np.testing.assert_allclose(lower, upper, rtol=1e-9)
        np.testing.assert_allclose(lower.sum(axis=1), 1)


@pytest.mark.parametrize(
    ("family", "uncertainty"), [("poisson", "full"), ("negative_binomial", "plug_in")]
)
def test_bounds_of_expected_counts_are_log_normal(family, uncertainty):
    X, _, groups = draw("counts")
    years = np.linspace(0.5, 2, len(X))
    params = {"family": family, "uncertainty": uncertainty}
    model, _ = fit("counts", {"exposure": years}, params)
    ids = np.append(groups[:20:4], [NEW, NEW])
    rows = {"groups": ids, "exposure": years[:7], "offset": np.full(7, 0.3)}
    mean, std = model.predict(X[:7], return_std=True, **rows)
    variance = np.log1p((std / mean) ** 2)
    lower, upper = model.predict_interval(X[:7], level=0.9, **rows)
    middle = np.log(model.predict(X[:7], integrate=False, **rows))
    half = ndtri(0.95) * np.sqrt(variance)
    # Log rates of new clients are normal, and those of known ones nearly.
    np.testing.assert_allclose(lower[-2:], np.exp(middle - half)[-2:])
    np.testing.assert_allclose(upper[-2:], np.exp(middle + half)[-2:])
    np.testing.assert_allclose(np.log(lower), middle - half, atol=0.3 * half.max())
    twice = model.predict_interval(X[:7], level=0.9, **{**rows, "exposure": 2 * years[:7]})
    np.testing.assert_allclose(twice, 2 * np.array([lower, upper]))
    with pytest.raises(ValueError, match="exposure"):
        model.predict_interval(X, groups=groups)


@pytest.mark.parametrize(
    ("family", "uncertainty"), [("poisson", "full"), ("negative_binomial", "plug_in")]
)
def test_bounds_of_new_counts_by_simulation(family, uncertainty):
    params = {"family": family, "uncertainty": uncertainty}
    model, (X, _, groups) = fit("counts", params=params, level=2.0)
    ids = np.append(groups[:40:8], NEW)
    rng, n = np.random.default_rng(0), 60_000
    law, x = model._predictor_law(X[:6], ids, None)
    moments = model._posterior_moments(x, law)
    middle = np.log(model.predict(X[:6], groups=ids, integrate=False)) + moments[0]
    rates = np.exp(middle + np.sqrt(moments[1]) * rng.normal(size=(n, 6)))
    if model.dispersion_ > 0:
        rates = rates * rng.gamma(1 / model.dispersion_, model.dispersion_, rates.shape)
    counts = rng.poisson(rates)
    for level in (0.5, 0.95):
        lower, upper = model.predict_interval(X[:6], groups=ids, level=level, new_row=True)
        tail = (1 - level) / 2
        close = 4 * np.sqrt(tail * (1 - tail) / n)  # standard errors of a share
        assert np.all((counts <= lower).mean(axis=0) >= tail - close)
        assert np.all((counts < lower).mean(axis=0) <= tail + close)
        assert np.all((counts > upper).mean(axis=0) <= tail + close)
        assert np.all((counts >= upper).mean(axis=0) >= tail - close)
    expected = model.predict_interval(X[:6], groups=ids)
    assert np.all(upper - lower > expected[1] - expected[0])


@pytest.mark.parametrize("dispersion", [0.0, 0.4])
def test_without_variance_counts_have_their_own_quantiles(dispersion):
    means = np.array([1e-3, 0.3, 2.0, 40.0, 1e4, 1e8])
    k = 1 / dispersion if dispersion else np.inf
    outcome = NegativeBinomial(dispersion) if dispersion else Poisson()
    law = stats.nbinom(k, k / (k + means)) if dispersion else stats.poisson(means)
    for level in (0.5, 0.95, 0.999):
        lower, upper = response_bounds(outcome, np.log(means), np.zeros(6), level)
        np.testing.assert_array_equal(lower, law.ppf((1 - level) / 2))
        np.testing.assert_array_equal(upper, law.isf((1 - level) / 2))


@given(st.floats(-4, 12), st.floats(0.01, 3), st.sampled_from([0.0, 0.2]), st.floats(0.3, 0.99))
@settings(max_examples=8, deadline=None)
def test_count_bounds_by_a_fine_grid(mean, std, dispersion, level):
    """Of large counts 129 nodes are too few: their conditional cdf is a step between two."""
    outcome = NegativeBinomial(dispersion) if dispersion else Poisson()
    nodes = np.linspace(-9, 9, 40_001)
    weights = stats.norm.pdf(nodes) / stats.norm.pdf(nodes).sum()
    law, tail = outcome.distribution(np.exp(mean + std * nodes)), (1 - level) / 2
    lower, upper = (
        bound[0] for bound in response_bounds(outcome, np.array([mean]), np.array([std**2]), level)
    )
    close = 1e-4
    assert weights @ law.cdf(lower) >= tail - close
    assert lower == 0 or weights @ law.cdf(lower - 1) < tail + close
    assert weights @ law.sf(upper) <= tail + close
    assert upper == 0 or weights @ law.sf(upper - 1) > tail - close


def test_huge_counts_are_log_normal():
    lower, upper = response_bounds(Poisson(), np.array([30.0, 650.0]), np.array([4.0, 4.0]), 0.95)
    half = 2 * ndtri(0.975)
    assert np.log(lower[0]) == pytest.approx(30 - half, abs=1e-6)
    assert np.log(upper[0]) == pytest.approx(30 + half, abs=1e-6)
    assert np.isfinite(upper[1])  # exponentials end before


@pytest.mark.parametrize("kind", MODELS)
def test_without_differences_bounds_are_those_of_one_model(kind):
    X, y, groups = draw(kind)
    prior, ids = GaussianPrior(covariance=0.0), [0, NEW, NEW, 1]
    model = MODELS[kind](prior, random="intercept", unseen="population").fit(X, y, groups=groups)
    family = {"linear": sm.families.Gaussian, "classes": sm.families.Binomial}.get(
        kind, sm.families.Poisson
    )
    peer = sm.GLM(y, sm.add_constant(X), family=family()).fit(tol=1e-12)
    expected = peer.get_prediction(np.column_stack([np.ones(4), X[:4]])).conf_int(alpha=0.1)
    bounds = np.transpose(model.predict_interval(X[:4], groups=ids, level=0.9))
    bounds = bounds[1] if kind == "classes" else bounds
    np.testing.assert_allclose(bounds, expected, rtol=1e-6)


@pytest.mark.parametrize("kind", MODELS)
def test_an_interval_needs_a_fit_clients_and_a_level(kind):
    with pytest.raises(sklearn.exceptions.NotFittedError):
        MODELS[kind]().predict_interval(np.zeros((1, 1)), groups=[0])
    model, (X, _, groups) = fit(kind, m=6, params={"uncertainty": "plug_in"})
    with pytest.raises(ValueError, match="groups"):
        model.predict_interval(X)
    for level in (0, 1, 1.5, -0.1, "95 %", np.nan):
        with pytest.raises(ValueError, match=r"level.*\(0, 1\)"):
            model.predict_interval(X, groups=groups, level=level)


def test_bounds_of_several_classes_end_at_a_level_of_99_percent():
    """Its tails of .5 % are 41 of 8,192 values; at .9999 there would be none."""
    model, (X, _, groups) = fit("classes", n_classes=3)
    lower, upper = model.predict_interval(X[:3], groups=groups[:3], level=0.99)
    narrow = model.predict_interval(X[:3], groups=groups[:3], level=0.98)
    assert np.all((lower < narrow[0]) & (narrow[1] < upper))
    with pytest.raises(ValueError, match=r"level must be at most 0\.99.*got 0\.995"):
        model.predict_interval(X[:3], groups=groups[:3], level=0.995)


def test_extreme_levels_and_rates_have_bounds():
    model, (X, _, groups) = fit("counts")
    highest = np.nextafter(1.0, 0.0)
    for rows in ([[-80.0]], [[0.3]]):
        for new_row in (False, True):
            bounds = model.predict_interval(rows, groups=[0], level=highest, new_row=new_row)
            assert np.isfinite(bounds).all()
    steep = MODELS["counts"](random="intercept").fit(X, np.exp(8 + 2 * X[:, 0]) // 1, groups=groups)
    assert steep.predict_interval([[-400.0]], groups=[0], new_row=True) == (0.0, 0.0)


@pytest.mark.slow
def test_intervals_of_counts_cover():
    """One new row of each of 20 known and 20 new clients in each of 30 tables.

    Hits of one table share the population's error, so a share of them has a standard deviation of
    at most sqrt(level (1 - level) / 30), and of 1 / sqrt(20) of that if that error is small. Counts
    are discrete, so their intervals cover more: by less than .1 here, where a count has at most
    that probability.
    """
    n_tables, levels = 30, (0.8, 0.95)
    hits = np.zeros((2, 2, 2))  # level, whose row, mean or new row
    for seed in range(n_tables):
        rng = np.random.default_rng(seed)
        groups, X = np.repeat(np.arange(20), 10), rng.normal(size=(200, 1))
        intercepts = 2.5 + 0.5 * rng.normal(size=40)  # the last 20 are the new clients'
        y = rng.poisson(np.exp(intercepts[groups] + 0.3 * X[:, 0]))
        model = PersonalizedPoissonRegression(random="intercept", unseen="population")
        model.fit(X, y, groups=groups)
        x, ids = rng.normal(size=(40, 1)), np.append(np.arange(20), np.full(20, NEW))
        rate = np.exp(intercepts + 0.3 * x[:, 0])
        for new_row, value in enumerate((rate, rng.poisson(rate))):
            for k, level in enumerate(levels):
                lower, upper = model.predict_interval(
                    x, groups=ids, level=level, new_row=bool(new_row)
                )
                inside = (lower <= value) & (value <= upper)
                hits[k, :, new_row] += inside.reshape(2, 20).mean(axis=1)
    for covered, level in zip(hits / n_tables, levels, strict=True):
        band = 0.5 * 3 * np.sqrt(level * (1 - level) / n_tables)
        assert np.all(np.abs(covered[:, 0] - level) < band)
        assert np.all(covered[:, 1] > level - band)
        assert np.all(covered[:, 1] < level + 0.1 * (1 - level) / 0.2 + band)
