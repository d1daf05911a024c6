"""Intervals of few clients: the variances were estimated, and that counts."""

import numpy as np
import pytest
from scipy.integrate import quad_vec
from scipy.special import betainc, betaln

from pfl_sklearn import BernoulliMean, GaussianMean
from pfl_sklearn._variance_averaging import Mixture, averaging_share
from pfl_sklearn.priors import BetaPrior, GaussianPrior


def draw_means(m, n, between, seed):
    rng = np.random.default_rng(seed)
    truth = between**0.5 * rng.normal(size=m)
    groups = np.repeat(np.arange(m), n)
    return truth, truth[groups] + rng.normal(size=m * n), groups


def fit_means(y, groups, prior="gaussian", **params):
    return GaussianMean(prior, **params).fit(np.zeros((len(y), 1)), y, groups=groups)


def test_averages_match_brute_force_integration():
    """Ratio t = tau / sigma with a half-Cauchy prior; mean and noise integrated by hand."""
    _, y, groups = draw_means(4, 3, 0.5, 0)
    model = fit_means(y, groups, unseen="population")
    means = y.reshape(4, 3).mean(axis=1)
    within = np.sum((y.reshape(4, 3) - means[:, None]) ** 2)

    def at(t):
        variance = t**2 + 1 / 3
        square = within + np.sum((means - means.mean()) ** 2) / variance
        weight = variance ** (-3 / 2) * square ** (-11 / 2) / (1 + t**2)
        own = t**2 / variance
        mean = own * means[0] + (1 - own) * means.mean()
        scale = square / 9  # posterior mean of the noise variance
        spread = scale * (own / 3 + (1 - own) ** 2 * variance / 4)
        new = scale * (t**2 + variance / 4)
        return weight * np.array([1, spread + (mean - model.means_[0]) ** 2, new])

    total, own, new = quad_vec(at, 0, np.inf)[0]
    assert model.stds_[0] ** 2 == pytest.approx(own / total, rel=1e-3)
    _, std = model.predict(np.zeros((1, 1)), groups=[-1], return_std=True)
    assert std[0] ** 2 == pytest.approx(new / total, rel=2e-2)  # a long tail


def test_proportions_match_brute_force_integration():
    successes, trials = np.array([1, 4, 6, 3]), np.array([8, 9, 10, 7])
    model = BernoulliMean().fit_counts(successes, trials)

    steps = (np.arange(250) + 0.5) / 250
    rho, mean = np.meshgrid(np.sin(steps * np.pi / 2) ** 2, steps)  # Beta(1/2, 1/2) and uniform
    a, b = mean * (1 / rho - 1), (1 - mean) * (1 / rho - 1)
    value = np.zeros_like(a)
    for z, n in zip(successes, trials, strict=True):
        value += betaln(a + z, b + n - z) - betaln(a, b)
    weight = np.exp(value - value.max())
    weight /= weight.sum()
    a, b = a + successes[0], b + trials[0] - successes[0]
    first = np.sum(weight * a / (a + b))
    second = np.sum(weight * a * (a + 1) / (a + b) / (a + b + 1))
    expected = second - first**2 + (first - model.means_[0]) ** 2
    assert model.stds_[0] ** 2 == pytest.approx(expected, rel=0.005)
    lower, upper = model.credible_interval(0.8)
    below = [np.sum(weight * betainc(a, b, x)) for x in (lower[0], upper[0])]
    assert below == pytest.approx([0.1, 0.9], abs=0.005)


def test_plug_in_intervals_are_shorter():
    _, y, groups = draw_means(8, 5, 0.3, 1)
    full, plug_in = fit_means(y, groups), fit_means(y, groups, uncertainty="plug_in")
    np.testing.assert_array_equal(full.means_, plug_in.means_)
    assert np.sum(full.stds_**2) > np.sum(plug_in.stds_**2)
    assert full.population_mean_std_ > plug_in.population_mean_std_
    both = np.column_stack([y, y[::-1]])
    diag = {"prior": GaussianPrior(covariance_type="diag"), "uncertainty": "plug_in"}
    alone = [fit_means(column, groups, **diag) for column in both.T]
    np.testing.assert_allclose(
        fit_means(both, groups, **diag).stds_, np.column_stack([one.stds_ for one in alone])
    )
    counts = np.array([2, 3, 1, 4]), np.full(4, 6)
    full = BernoulliMean().fit_counts(*counts)
    plug_in = BernoulliMean(uncertainty="plug_in").fit_counts(*counts)
    assert np.all(full.stds_ > plug_in.stds_)


@pytest.mark.parametrize("prior", [GaussianPrior(0.0, 0.3), GaussianPrior(covariance=0.3)])
def test_known_variances_leave_nothing_to_average(prior):
    _, y, groups = draw_means(6, 4, 0.3, 2)
    known = {"noise_variance": 1.0}
    full, plug_in = (
        fit_means(y, groups, prior, uncertainty=kind, **known) for kind in ("full", "plug_in")
    )
    np.testing.assert_array_equal(full.stds_, plug_in.stds_)


def test_a_known_mean_has_no_error():
    _, y, groups = draw_means(6, 4, 0.3, 3)
    model = fit_means(y, groups, GaussianPrior(mean=0.0))
    assert model.population_mean_std_ == 0
    assert np.all(model.stds_ > fit_means(y, groups, model.prior_).stds_ * 0.9)


def test_outputs_with_their_own_variances_are_averaged_on_their_own():
    _, y, groups = draw_means(6, 4, 0.3, 4)
    both = np.column_stack([y, 100 * y[::-1]])
    model = fit_means(both, groups, GaussianPrior(covariance_type="diag"))
    lower, upper = model.credible_interval()
    for k in range(2):
        alone = fit_means(both[:, k], groups)
        np.testing.assert_allclose(model.stds_[:, k], alone.stds_, rtol=1e-6)
        np.testing.assert_allclose(lower[:, k], alone.credible_interval()[0], rtol=1e-6)
    own = model.for_client(3)
    np.testing.assert_allclose(own.credible_interval()[1][0], upper[3])


def test_units_change_nothing_else():
    _, y, groups = draw_means(6, 4, 0.3, 5)
    for unit in (1e-100, 1e100):
        np.testing.assert_allclose(
            fit_means(unit * y, groups).stds_, unit * fit_means(y, groups).stds_, rtol=1e-6
        )


def test_the_share_is_continuous_and_ends():
    assert [averaging_share(m) for m in (2, 100, 1000, 10**6)] == [1, 1, 0, 0]
    shares = [averaging_share(m) for m in range(100, 1001)]
    assert np.all(np.diff(shares) < 0)
    assert np.abs(np.diff(shares)).max() < 0.005
    _, y, groups = draw_means(1000, 2, 0.3, 6)
    full, plug_in = fit_means(y, groups), fit_means(y, groups, uncertainty="plug_in")
    np.testing.assert_array_equal(full.stds_, plug_in.stds_)
    assert not hasattr(full, "_intervals")


def test_mixture_quantiles_are_those_of_draws():
    rng = np.random.default_rng(0)
    weights, means, scales = np.array([0.5, 0.3, 0.2]), rng.normal(size=(4, 3)), np.ones((4, 3))
    found = Mixture(weights, means, scales, np.inf).quantiles(0.9)
    part = rng.choice(3, p=weights, size=200_000)
    draws = means[:, part] + rng.normal(size=(4, 200_000))
    np.testing.assert_allclose(np.mean(draws < found[:, None], axis=1), 0.9, atol=0.004)


@pytest.mark.parametrize(
    ("shape", "m", "n"), [((4, 4), 50, 14), ((4, 4), 2000, 14), ((0.4, 0.4), 2000, 14)]
)
def test_intervals_of_an_estimated_grid_cover(shape, m, n):
    """Under the estimate alone, nominal 90 % intervals covered 48 to 74 %."""
    rng = np.random.default_rng(0)
    truth = BetaPrior(*shape).sample(m, random_state=0)[:, 0]
    model = BernoulliMean("grid").fit_counts(rng.binomial(n, truth), np.full(m, n))
    lower, upper = model.credible_interval(0.9)
    assert 0.85 < np.mean((lower <= truth) & (truth <= upper)) < 0.96


@pytest.mark.slow
@pytest.mark.parametrize(("m", "n", "between"), [(10, 10, 0.1), (5, 10, 0.3)])
def test_intervals_of_few_means_cover(m, n, between):
    known, new = [], []
    for seed in range(200):
        truth, y, groups = draw_means(m, n, between, seed)
        model = fit_means(y, groups, unseen="population")
        known.append(np.mean(np.abs(model.means_ - truth) < 1.96 * model.stds_))
        mean, std = model.predict(np.zeros((1, 1)), groups=[-1], return_std=True)
        client = between**0.5 * np.random.default_rng(seed + 10**6).normal()
        new.append(abs(mean[0] - client) < 1.96 * std[0])
    assert 0.9 < np.mean(known) < 0.98
    assert 0.91 < np.mean(new) < 0.99


@pytest.mark.slow
def test_intervals_of_few_proportions_cover():
    covered = []
    for seed in range(100):
        rng = np.random.default_rng(seed)
        truth = rng.beta(80, 220, size=18)
        model = BernoulliMean().fit_counts(rng.binomial(45, truth), np.full(18, 45))
        covered.append(np.mean(np.abs(model.means_ - truth) < 1.96 * model.stds_))
    assert 0.9 < np.mean(covered) < 0.985
