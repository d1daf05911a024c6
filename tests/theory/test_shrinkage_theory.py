"""Risks and weights of shrunken means and proportions, against simulations of the populations."""

import math

import numpy as np
import pytest
from scipy.stats import beta as beta_distribution, norm

from pfl_sklearn import BernoulliMean, GaussianMean
from pfl_sklearn.priors import BetaPrior, GaussianPrior
from pfl_sklearn.privacy import StochasticQuantizer, epsilon_spent
from pfl_sklearn.theory import (
    beta_moments,
    beta_own_weight,
    beta_risk,
    beta_shrinkage,
    debiased_share_variance,
    local_noise_std,
    mean_half_width,
    mean_risk,
    own_weight,
    quantizer_variance,
    released_mean_risk,
)

RUNS = 20_000


def draw_means(m, n, between, noise, d=1):
    """True and observed means (RUNS, m, d) of clients, and a generator for more."""
    rng = np.random.default_rng(0)
    theta = 3 + math.sqrt(between) * rng.normal(size=(RUNS, m, d))
    own = theta + np.sqrt(noise / np.broadcast_to(n, m))[:, None] * rng.normal(size=theta.shape)
    return theta, own, rng


def assert_mean(draws, expected, axis=0):
    error = 4 * draws.std(axis=axis) / math.sqrt(draws.shape[axis])
    assert (np.abs(draws.mean(axis=axis) - expected) < error).all()


@pytest.mark.parametrize(("between", "d"), [(0.0, 1), (0.3, 2), (5.0, 1)])
def test_theorem_1_is_an_identity(between, d):
    m, n, noise = 4, 3, 0.9
    theta, own, _ = draw_means(m, n, between, noise, d)
    weight, risk = mean_risk(m, n, between, noise, d)
    estimate = weight * own + (1 - weight) * own.mean(axis=1, keepdims=True)
    assert_mean(np.sum((estimate - theta) ** 2, axis=-1)[:, 0], risk)
    for other in (weight - 0.1, weight + 0.1):
        other = other * own + (1 - other) * own.mean(axis=1, keepdims=True)
        assert np.mean((other - theta) ** 2) > risk / d


def test_theorem_2_and_leaving_ones_own_out():
    m, n, between, noise, extra = 5, 1, 0.2, 1.0, 5.0
    theta, own, rng = draw_means(m, n, between, noise)
    released = own + math.sqrt(extra) * rng.normal(size=own.shape)
    total = released.sum(axis=1, keepdims=True)
    found = {}
    for version, others in (("printed", total / m), ("left_out", (total - released) / (m - 1))):
        weight, risk = released_mean_risk(m, n, between, noise, extra, version=version)
        errors = (weight * own + (1 - weight) * others - theta) ** 2
        assert_mean(errors[:, 0, 0], risk)
        found[version] = risk
    assert found["left_out"] == pytest.approx(0.636, abs=5e-4)
    assert found["printed"] == pytest.approx(0.673, abs=5e-4)


def test_releases_of_unequal_clients_and_of_few():
    """One client has no noise on its release, one releases nothing."""
    n, extra = np.array([1, 2, 8, 3]), np.array([4.0, 0.0, 1.0, math.inf])
    between, noise = 0.5, 2.0
    theta, own, rng = draw_means(4, n, between, noise)
    released = own[..., 0] + np.sqrt([4.0, 0.0, 1.0, 0.0]) * rng.normal(size=(RUNS, 4))
    sends = np.array([1, 1, 1, 0]) / (between + noise / n + np.where(extra < 9, extra, 0))
    others = (sends @ released.T)[:, None] - sends * released
    others /= sends.sum() - sends
    weight, risk = released_mean_risk(4, n, between, noise, extra)
    errors = (weight * own[..., 0] + (1 - weight) * others - theta[..., 0]) ** 2
    assert_mean(errors, risk)
    np.testing.assert_allclose(risk, weight * noise / n)


def test_free_releases_are_theorem_1():
    _, risk = released_mean_risk(7, 3, 0.4, 1.1, 0.0)
    assert risk == pytest.approx(mean_risk(7, 3, 0.4, 1.1).risk)
    printed = released_mean_risk(7, 3, 0.4, 1.1, 0.0, version="printed")
    assert printed == pytest.approx(mean_risk(7, 3, 0.4, 1.1))


def test_estimator_states_the_same_risks():
    rng = np.random.default_rng(0)
    y, groups = rng.normal(size=24), np.repeat(np.arange(8), 3)
    params = {"prior": GaussianPrior(covariance=0.3), "noise_variance": 1.2}
    plain = GaussianMean(**params).fit(y[:, None], y, groups=groups)
    weight, risk = mean_risk(8, 3, 0.3, 1.2)
    np.testing.assert_allclose(plain.shrinkage_, 1 - weight)
    np.testing.assert_allclose(plain.stds_**2, risk)
    rounded = GaussianMean(**params, mechanism="quantizer", n_bits=2, clip_norm=4.0)
    rounded.fit(y[:, None], y, groups=groups)
    extra = quantizer_variance(4.0, 2)
    np.testing.assert_allclose(
        rounded.stds_**2, released_mean_risk(8, 3, 0.3, 1.2, extra).risk, rtol=1e-12
    )


def test_own_weight_at_its_limits():
    prior = np.array([0.0, 0.0, 1.0, np.inf, 3.0])
    sampling = np.array([0.0, 1.0, 0.0, 1.0, 1.0])
    np.testing.assert_array_equal(own_weight(prior, sampling), [0, 0, 1, 1, 0.75])
    assert own_weight(3.0, 1.0) == 0.75


def test_half_width_and_its_printed_version():
    """Chance that some client lies outside, with one of the two deviations negligible."""
    m, n = 10_000, 15
    outside = {
        version: -math.expm1(m * math.log1p(-2 * norm.sf(width)))
        for version in ("sound", "printed")
        for width in [mean_half_width(m, n, 1.0, 0.0, version=version)]
    }
    assert outside["sound"] < 1 / (m * n)
    assert outside["printed"] == pytest.approx(0.042, abs=1e-3)
    assert outside["printed"] > 1000 * 2 / (m * n)
    # Both deviations add up to more than the mean's own one; coordinates are counted.
    width = mean_half_width(50, 4, 0.3, 1.0, mean_bound=2.0, n_features=6)
    assert 300 * 2 * norm.sf((width - 2) / math.hypot(0.3, 0.5)) < 1 / 200


def test_quantizer_variance_is_reached_halfway_between_levels():
    quantizer = StochasticQuantizer(2, 3.0)
    rng = np.random.default_rng(0)
    assert_mean((quantizer.privatize(np.full(40_000, 1e-3), rng) - 1e-3) ** 2, 1 - 1e-6)
    spread = (quantizer.privatize(np.full(40_000, 1.4), rng) - 1.4) ** 2
    assert_mean(spread, 0.4 * 1.6)
    assert quantizer_variance(3.0, 2) == pytest.approx((3 / (2**2 - 1)) ** 2)


def test_local_noise_and_its_printed_version():
    for d in (1, 100):
        std = local_noise_std(2.0, 0.7, 1e-4, d)
        assert epsilon_spent(std, 4 * math.sqrt(d), delta=1e-4) == pytest.approx(0.7)
    for delta, spent in ((1e-4, 10.29), (1e-5, 10.14)):
        printed = local_noise_std(2.0, 1.0, delta, 100, version="printed")
        assert epsilon_spent(printed, 4.0, delta=delta) < 1
        assert epsilon_spent(printed, 40.0, delta=delta) == pytest.approx(spent, abs=0.01)


@pytest.mark.parametrize(("alpha", "beta"), [(0.5, 2.0), (4.0, 4.0), (30.0, 1.0)])
def test_beta_moments_and_weights(alpha, beta):
    mean, variance = beta_moments(alpha, beta)
    assert (mean, variance) == pytest.approx(beta_distribution(alpha, beta).stats("mv"))
    trials = np.array([1, 5, 40])
    own = beta_own_weight(np.array(mean), np.array(variance), trials)
    np.testing.assert_allclose(own, trials / (alpha + beta + trials))
    icc = variance / (mean * (1 - mean))
    np.testing.assert_allclose(beta_shrinkage(icc, trials), 1 - own)
    without = beta_own_weight(np.array(mean), np.array(variance), trials, minus_one=False)
    np.testing.assert_allclose(without, trials / (alpha + beta + 1 + trials))


def test_beta_risk_and_the_variance_of_shares():
    alpha, beta, n = 2.0, 3.0, 7
    rng = np.random.default_rng(0)
    p = rng.beta(alpha, beta, 400_000)
    shares = rng.binomial(n, p) / n
    mean, variance = beta_moments(alpha, beta)
    own = beta_own_weight(mean, variance, np.array(n))
    assert_mean((own * shares + (1 - own) * mean - p) ** 2, beta_risk(alpha, beta, n))
    assert beta_risk(alpha, beta, n) == pytest.approx(own * np.mean((shares - p) ** 2), rel=0.01)
    debiased = debiased_share_variance(shares.mean(), shares.var(), 1 / n)
    assert debiased == pytest.approx(variance, rel=0.01)
    assert shares.var() > 1.5 * variance  # what the printed weights take for it


def test_estimator_uses_the_same_weights():
    model = BernoulliMean(BetaPrior(2.0, 3.0)).fit_counts([1, 4, 0], [2, 9, 5])
    trials = np.array([2, 9, 5])
    np.testing.assert_allclose(model.shrinkage_, 5 / (5 + trials))
    mean, variance = beta_moments(2.0, 3.0)
    own = beta_own_weight(np.array(mean), np.array(variance), trials)
    np.testing.assert_allclose(model.means_, own * model.local_means_ + (1 - own) * mean)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: released_mean_risk(1, 1, 1.0, 1.0, 1.0), r"n_clients.*\b2\b.*\b1\b"),
        (
            lambda: released_mean_risk(3, 1, 1.0, 1.0, 1.0, version="x"),
            r"version.*left_out, printed.*'x'",
        ),
        (
            lambda: released_mean_risk(2, [1, 2], 1.0, 1.0, 1.0, version="printed"),
            r"version='printed'.*n_rows.*release_variance",
        ),
        (lambda: mean_half_width(3, 1, 1.0, 1.0, version="x"), r"version.*sound, printed.*'x'"),
        (lambda: local_noise_std(1.0, 1.0, 1e-5, version="x"), r"version.*sound, printed.*'x'"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
