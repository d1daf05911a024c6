"""Outcomes with one predictor: likelihoods against scipy's, derivatives against differences."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy import stats

from pfl_sklearn.linear_model._mixed._families import Binomial, NegativeBinomial, Poisson

OUTCOMES = [Binomial(), Poisson(), NegativeBinomial(0.3), NegativeBinomial(20.0)]


def responses(outcome, rng, shape):
    if isinstance(outcome, Binomial):
        return rng.integers(0, 2, shape)
    return rng.poisson(rng.choice([0.5, 3.0, 40.0], shape)).astype(float)


def log_likelihood(outcome, u, y):
    if isinstance(outcome, Binomial):
        return stats.bernoulli(1 / (1 + np.exp(-u))).logpmf(y)
    k = 1 / outcome.dispersion if outcome.dispersion else None
    law = stats.poisson(np.exp(u)) if k is None else stats.nbinom(k, k / (k + np.exp(u)))
    return law.logpmf(y)


@pytest.mark.parametrize("outcome", OUTCOMES)
@given(st.integers(0, 10_000))
@settings(max_examples=25, deadline=None)
def test_likelihoods_and_their_derivatives(outcome, seed):
    rng = np.random.default_rng(seed)
    u, w, y = 2 * rng.normal(size=(7, 1)), rng.random(7) + 0.1, responses(outcome, rng, 7)
    terms, spread = outcome.terms(u, y, w), rng.normal(size=(7, 1, 1))
    exact = w @ log_likelihood(outcome, u[:, 0], y)
    assert terms.value.sum() + w @ outcome.constants(y) == pytest.approx(exact, rel=1e-9)
    roots = outcome.curvature_roots(u, y, w)
    np.testing.assert_allclose(roots @ roots.transpose(0, 2, 1), terms.curvature, rtol=1e-9)
    up, down = outcome.terms(u + 1e-5, y, w), outcome.terms(u - 1e-5, y, w)
    slopes = [(first - second) / 2e-5 for first, second in zip(up, down, strict=True)]
    np.testing.assert_allclose(slopes[0], terms.score[:, 0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(-slopes[1], terms.curvature[..., 0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(
        slopes[2] * spread,
        outcome.curvature_slopes(u, y, w, spread)[..., None],
        rtol=1e-6,
        atol=1e-6,
    )


@pytest.mark.parametrize("outcome", OUTCOMES)
@pytest.mark.parametrize("weighted", [True, False])
def test_sums_over_rows_say_the_same(outcome, weighted):
    rng = np.random.default_rng(0)
    u, y = 3 * rng.normal(size=(2500, 4)), responses(outcome, rng, (2500, 4))
    w = rng.random((2500, 4)) if weighted else None
    ones = np.ones((2500, 4)) if w is None else w
    terms, state, signs = outcome.terms(u[..., None], y, ones), np.empty_like(u), outcome.signs(y)
    signs = 1.0 if signs is None else signs
    value = outcome.summed_log_likelihood(signs * u, y, w, state)
    np.testing.assert_allclose(value, terms.value.sum(axis=0), rtol=1e-12)
    slope = signs * ones * outcome.score(state, y)
    np.testing.assert_allclose(slope, terms.score[..., 0], atol=1e-9)
    expected = terms.curvature[..., 0, 0]
    np.testing.assert_allclose(ones * outcome.curvature(state, y), expected, atol=1e-9)
    bend = outcome.curvature_slopes(u[..., None], y, ones, np.ones((2500, 4, 1, 1)))[..., 0]
    np.testing.assert_allclose(signs * ones * outcome.curvature_slope(state, y), bend, atol=1e-9)


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_predictors_of_any_size_overflow_nowhere(outcome):
    u, y = np.array([[-1e4], [-800.0], [800.0], [1e4]]), np.array([0, 1, 0, 1])
    terms = outcome.terms(u, y, np.ones(4))
    assert np.isfinite(terms.value).all()
    assert np.isfinite(terms.score).all()
    assert (terms.curvature >= 0).all()


def test_a_small_dispersion_is_none():
    y, u = np.arange(40.0), np.log(np.arange(1.0, 41.0))[:, None]
    poisson, w = Poisson(), np.ones(40)
    exact = poisson.terms(u, y, w).value + w @ poisson.constants(y) / 40
    for dispersion in (1e-4, 1e-6, 1.1e-8):
        outcome = NegativeBinomial(dispersion)
        value = outcome.terms(u, y, w).value.sum() + w @ outcome.constants(y)
        assert value == pytest.approx(exact.sum(), abs=1e5 * dispersion + 1e-6)
    assert isinstance(NegativeBinomial(0.3).with_dispersion(1e-14), Poisson)
    assert isinstance(NegativeBinomial(0.3).with_dispersion(0.1), NegativeBinomial)


@pytest.mark.parametrize("dispersion", [0.0, 0.5])
def test_distributions_of_counts(dispersion):
    outcome, mean = NegativeBinomial().with_dispersion(dispersion), np.array([0.1, 2.0, 50.0])
    law = outcome.distribution(mean)
    np.testing.assert_allclose(law.mean(), mean)
    np.testing.assert_allclose(law.var(), mean + dispersion * mean**2)
