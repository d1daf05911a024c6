"""Checks that every prior passes, from one registry, and what is particular to each."""

import pickle

import numpy as np
import pytest
from scipy import stats
from sklearn.base import clone

import pfl_sklearn.priors
from pfl_sklearn.priors import BetaPrior, GaussianPrior, GridPrior
from pfl_sklearn.priors._grid import mixing_weights

# Every public prior: an unknown one, and known ones to sample from.
PRIORS = {
    GaussianPrior: [
        GaussianPrior(mean=[1.0, -2.0], covariance=0.5),
        GaussianPrior(mean=[1.0, -2.0], covariance=[0.5, 3.0], covariance_type="diag"),
    ],
    BetaPrior: [BetaPrior(alpha=2.0, beta=5.0), BetaPrior(alpha=0.4, beta=0.1)],
    GridPrior: [GridPrior(n_points=5, weights=[0.1, 0.2, 0.3, 0.4, 0.0])],
}
KNOWN = [prior for priors in PRIORS.values() for prior in priors]
every_known = pytest.mark.parametrize("prior", KNOWN, ids=repr)


def unknown(prior):
    """The same prior with everything to be estimated."""
    values = {"mean", "covariance", "alpha", "beta", "weights"} & set(prior.get_params())
    return clone(prior).set_params(**dict.fromkeys(values))


def test_the_registry_has_every_public_prior():
    assert {cls.__name__ for cls in PRIORS} == set(pfl_sklearn.priors.__all__)


@pytest.mark.filterwarnings("ignore:divide by zero")
@every_known
def test_sample_then_fit_recovers(prior):
    theta = prior.sample(200_000, random_state=0)
    theta = np.clip(theta, 1e-300, 1 - 1e-16) if isinstance(prior, BetaPrior) else theta
    fitted = unknown(prior).fit(theta)
    for name, value in prior.get_params().items():
        got = fitted.get_params()[name]
        if name == "covariance":
            np.testing.assert_allclose(np.diag(got), np.broadcast_to(value, 2), rtol=0.02)
        elif not isinstance(value, str | None):
            np.testing.assert_allclose(got, value, rtol=0.02, atol=0.01)


@every_known
def test_fit_leaves_the_prior_as_it_is_and_keeps_what_is_known(prior):
    fresh = unknown(prior)
    before = dict(vars(fresh))
    theta = np.clip(prior.sample(50, random_state=0), 1e-9, None)
    theta = np.minimum(theta, 1 - 1e-9) if not isinstance(prior, GaussianPrior) else theta
    fresh.fit(theta)
    assert vars(fresh) == before
    known = prior.fit(theta)
    for name, value in prior.get_params().items():
        got = known.get_params()[name]
        if name == "covariance":
            got = np.diag(got)
            value = np.broadcast_to(value, 2)
        np.testing.assert_array_equal(got, value)


@every_known
def test_samples_repeat_with_a_seed(prior):
    first, second, third = (prior.sample(5, random_state=seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, second)
    assert first.shape == (5, 2 if isinstance(prior, GaussianPrior) else 1)
    assert not np.array_equal(first, third)


@every_known
def test_round_trip(prior):
    copy = pickle.loads(pickle.dumps(prior))
    theta = np.clip(prior.sample(20, random_state=0), 1e-9, 1 - 1e-9)
    np.testing.assert_array_equal(copy.log_prob(theta), prior.log_prob(theta))


@every_known
def test_log_prob_is_a_density(prior):
    rng = np.random.default_rng(0)
    if isinstance(prior, GaussianPrior):
        theta = rng.normal(size=(200_000, 2)) * 4
        proposal = stats.norm(scale=4).logpdf(theta).sum(axis=1)
        mass = np.mean(np.exp(prior.log_prob(theta) - proposal))
    elif isinstance(prior, GridPrior):
        mass = np.exp(prior.log_prob(prior.support)).sum()
    else:
        theta = rng.random(400_000)
        mass = np.mean(np.exp(prior.log_prob(theta)))
        if prior.beta < 1:  # infinite variance at the ends: compare with scipy instead
            expected = stats.beta(prior.alpha, prior.beta).logpdf(theta[:100])
            np.testing.assert_allclose(prior.log_prob(theta[:100]), expected)
            return
    assert mass == pytest.approx(1.0, abs=0.02)


@every_known
def test_posterior_is_the_conditional_mean(prior):
    """Bayes by simulation: clients with the same data, averaged."""
    theta = prior.sample(400_000, random_state=0)
    rng = np.random.default_rng(1)
    if isinstance(prior, GaussianPrior):
        seen = theta + rng.normal(size=theta.shape)
        near = np.abs(seen - [1.5, -1.0]).max(axis=1) < 0.1
        mean, variance = prior.posterior(np.array([[1.5, -1.0]]), np.array([[1.0]]))
    else:
        near = rng.binomial(6, theta[:, 0]) == 2
        mean, variance = (value[:, None] for value in prior.posterior(np.array([2]), np.array([6])))
    error = 5 * np.sqrt(variance[0] / near.sum()) + 1e-3
    assert np.all(np.abs(theta[near].mean(axis=0) - mean[0]) < error)
    assert np.all(np.abs(theta[near].var(axis=0) / variance[0] - 1) < 8 / np.sqrt(near.sum()))


def test_beta_fit_is_a_maximum():
    theta = BetaPrior(alpha=2.0, beta=5.0).sample(500, random_state=0)
    fitted = BetaPrior().fit(theta)
    best = fitted.log_prob(theta).sum()
    for alpha, beta in ((1.02, 1), (0.98, 1), (1, 1.02), (1, 0.98)):
        moved = BetaPrior(alpha=alpha * fitted.alpha, beta=beta * fitted.beta)
        assert moved.log_prob(theta).sum() < best


def test_mixing_weights_meet_the_optimality_condition():
    rng = np.random.default_rng(0)
    trials = rng.integers(1, 40, 400)
    successes = rng.binomial(trials, rng.choice([0.2, 0.7], 400))
    counts = rng.integers(1, 9, 400).astype(float)
    likelihood = GridPrior().likelihood(successes, trials)
    weights = mixing_weights(likelihood, counts)
    assert weights.min() >= 0
    assert weights.sum() == pytest.approx(1.0)
    gradient = (counts / (likelihood @ weights)) @ likelihood / counts.sum()
    assert gradient.max() <= 1 + 1e-6
    near = [np.abs(np.linspace(0, 1, 201) - spike) < 0.1 for spike in (0.2, 0.7)]
    assert weights[near[0]].sum() + weights[near[1]].sum() > 0.9


def test_the_grid_is_as_fine_as_the_data():
    """Rates of a few in 10,000 on a grid that spans them, not on steps of .005."""
    rng = np.random.default_rng(0)
    rates = rng.uniform(1e-4, 4e-4, 200)
    trials = np.full(200, 10**6)
    successes = rng.binomial(trials, rates)
    prior = GridPrior().fit_counts(successes, trials, np.ones(200), "ml")
    mean, variance = prior.posterior(successes, trials)
    assert np.mean((mean - rates) ** 2) < 1.1 * np.mean((successes / trials - rates) ** 2)
    assert np.median(np.sqrt(variance)) > 1e-6
    assert (prior.low, prior.high) == (successes.min() / 10**6, successes.max() / 10**6)


def test_impossible_counts_are_named():
    prior = GridPrior(n_points=3, weights=[0.5, 0.0, 0.5])
    with pytest.raises(ValueError, match="3 successes in 5 trials are impossible"):
        prior.posterior(np.array([3, 0]), np.array([5, 5]))
    with pytest.raises(ValueError, match="low of GridPrior must not be above high"):
        GridPrior(low=0.8, high=0.2).fit([0.5])


def test_a_point_that_explains_nothing_does_not_stop_the_fit():
    """Only p = 0 explains no success in 100,000 trials beside p = 1 for the opposite."""
    trials = np.array([100_000, 100_000])
    fitted = GridPrior().fit_counts(np.array([0, 100_000]), trials, np.array([3.0, 1.0]), "ml")
    np.testing.assert_allclose(np.asarray(fitted.weights)[[0, -1]], [0.75, 0.25], atol=1e-6)


@pytest.mark.parametrize(
    ("prior", "theta", "error"),
    [
        (BetaPrior(), [[0.0]], r"theta must lie within \(0, 1\)"),
        (GridPrior(), [[1.5]], r"theta must lie within \[0, 1\]"),
        (GridPrior(n_points=1), [[0.5]], "'n_points' parameter"),
        (GaussianPrior(covariance_type="round"), [[0.5]], "'covariance_type' parameter"),
        (GaussianPrior(), [[np.nan]], "NaN"),
    ],
)
def test_bad_input(prior, theta, error):
    with pytest.raises(ValueError, match=error):
        prior.fit(theta)


def test_unknown_priors_have_no_posterior():
    with pytest.raises(ValueError, match="not known yet"):
        GaussianPrior(mean=0.0).log_prob([[1.0]])
