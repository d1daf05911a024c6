"""Checks that every prior passes, from one registry, and what is particular to each."""

import itertools
import math
import pickle

import numpy as np
import pytest
from scipy import stats
from sklearn.base import clone

import pfl_sklearn.priors
from pfl_sklearn.priors import (
    BetaPrior,
    DirichletPrior,
    DiscretePrior,
    GammaPrior,
    GaussianMixturePrior,
    GaussianPrior,
    GridPrior,
    LaplacePrior,
    SparseDirichletPrior,
)
from pfl_sklearn.priors._grid import mixing_weights

FULL = np.array([[2.0, 0.6], [0.6, 0.5]])
MEANS, WEIGHTS = np.array([[0.0, 0.0], [4.0, 1.0], [-3.0, 3.0]]), np.array([0.5, 0.3, 0.2])
# Every public prior: known ones to sample from, components in the order that fits have.
PRIORS = {
    GaussianPrior: [
        GaussianPrior(mean=[1.0, -2.0], covariance=0.5),
        GaussianPrior(mean=[1.0, -2.0], covariance=[0.5, 3.0], covariance_type="diag"),
        GaussianPrior(mean=[1.0, -2.0], covariance=FULL, covariance_type="full"),
        GaussianPrior(mean=[1.0, -2.0], covariance=FULL, covariance_type="low_rank"),
    ],
    LaplacePrior: [LaplacePrior(location=[1.0, -2.0], scale=0.7)],
    GaussianMixturePrior: [
        GaussianMixturePrior(3, means=MEANS, covariances=[0.5, 1.0, 0.2], weights=WEIGHTS),
        GaussianMixturePrior(
            3, means=MEANS, covariances=np.ones((3, 2)), weights=WEIGHTS, covariance_type="diag"
        ),
        GaussianMixturePrior(
            2,
            means=MEANS[:2],
            covariances=[FULL, FULL / 2],
            weights=[0.6, 0.4],
            covariance_type="full",
        ),
    ],
    DiscretePrior: [DiscretePrior(3, points=MEANS, weights=WEIGHTS)],
    BetaPrior: [BetaPrior(alpha=2.0, beta=5.0), BetaPrior(alpha=0.4, beta=0.1)],
    GammaPrior: [GammaPrior(shape=2.0, rate=5.0), GammaPrior(shape=0.8, rate=0.1)],
    GridPrior: [
        GridPrior(n_points=5, weights=[0.1, 0.2, 0.3, 0.4, 0.0]),
        GridPrior(5, [0.1, 0.2, 0.3, 0.4, 0.0], high=4.0, outcome="poisson"),
    ],
    DirichletPrior: [DirichletPrior(mean=[0.2, 0.5, 0.3], concentration=8.0)],
    SparseDirichletPrior: [
        SparseDirichletPrior(
            mean=[0.2, 0.5, 0.3],
            concentration=8.0,
            weights=[0.3, 0.4, 0.3],
            sparse_concentration=2.0,
        )
    ],
}
SLOW = PRIORS[GaussianMixturePrior][2]  # the other types of covariance share its search
PROPORTIONS = (BetaPrior, GammaPrior, GridPrior)  # or rates
FREQUENCIES = (DirichletPrior, SparseDirichletPrior)
KNOWN = [prior for priors in PRIORS.values() for prior in priors]
VECTORS = [prior for prior in KNOWN if not isinstance(prior, PROPORTIONS + FREQUENCIES)]
SCALED = {"mean": 1, "covariance": 2, "location": 1, "scale": 1}
SCALED |= {"means": 1, "covariances": 2, "points": 1, "weights": 0}
OTHERS = {"alpha", "beta", "concentration", "sparse_concentration", "shape", "rate"}
every_known = pytest.mark.parametrize("prior", KNOWN, ids=repr)
every_vector = pytest.mark.parametrize("prior", VECTORS, ids=repr)


def unknown(prior):
    """The same prior with everything to be estimated."""
    values = {*SCALED, *OTHERS} & set(prior.get_params())
    return clone(prior).set_params(**dict.fromkeys(values))


def parameters(prior):
    """Numbers that say what a known prior is, in full shape."""
    values = prior.get_params()
    if "covariance" in values:
        values["covariance"] = prior.known_covariance(2)
    if "covariances" in values:
        values["covariances"] = prior.known_mixture(2)[1]
    return {name: np.asarray(value) for name, value in values.items() if name in {*SCALED, *OTHERS}}


def has_rates(prior):
    return isinstance(prior, GammaPrior) or getattr(prior, "outcome", None) == "poisson"


def inside(prior, theta):
    """Proportions moved off 0 and 1."""
    bounded = isinstance(prior, PROPORTIONS) and not has_rates(prior)
    return np.clip(theta, 1e-9, 1 - 1e-9) if bounded else theta


def test_the_registry_has_every_public_prior():
    of_clients = set(pfl_sklearn.priors.__all__) - {"GroupingPrior"}
    assert {cls.__name__ for cls in PRIORS} == of_clients


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize(
    "prior",
    [
        pytest.param(prior, marks=pytest.mark.slow if prior is SLOW else ())
        for prior in KNOWN
        if prior not in PRIORS[GaussianMixturePrior][:2]
    ],
    ids=repr,
)
def test_sample_then_fit_recovers(prior):
    theta = prior.sample(40_000 if prior is SLOW else 200_000, random_state=0)
    theta = np.clip(theta, 1e-300, 1 - 1e-16) if isinstance(prior, BetaPrior) else theta
    fitted = unknown(prior).fit(theta)
    assert fitted.is_known
    got = parameters(fitted)
    for name, value in parameters(prior).items():
        np.testing.assert_allclose(got[name], value, rtol=0.02, atol=0.02)


@every_known
def test_fit_leaves_the_prior_as_it_is_and_keeps_what_is_known(prior):
    fresh = unknown(prior)
    before = dict(vars(fresh))
    theta = inside(prior, prior.sample(50, random_state=0))
    fresh.fit(theta)
    assert vars(fresh) == before
    got = parameters(prior.fit(theta))
    for name, value in parameters(prior).items():
        np.testing.assert_array_equal(got[name], value)


@pytest.mark.slow_but_first
@every_vector
def test_rescaling(prior):
    """Priors of 8 theta (a power of two, to rounding) have 8 times the location."""
    theta = prior.sample(400, random_state=0)
    once, eight = parameters(unknown(prior).fit(theta)), parameters(unknown(prior).fit(8 * theta))
    for name, value in once.items():
        np.testing.assert_allclose(eight[name], 8.0 ** SCALED[name] * value, rtol=1e-6, atol=1e-9)


@every_known
def test_samples_repeat_with_a_seed(prior):
    first, second, third = (prior.sample(5, random_state=seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, second)
    width = 1 if isinstance(prior, PROPORTIONS) else 3 if isinstance(prior, FREQUENCIES) else 2
    assert first.shape == (5, width)
    assert not np.array_equal(first, third)


@every_known
def test_round_trip(prior):
    theta = inside(prior, prior.sample(20, random_state=0))
    for copy in (pickle.loads(pickle.dumps(prior)), clone(prior)):
        np.testing.assert_array_equal(copy.log_prob(theta), prior.log_prob(theta))


def mass_on_faces(prior, rng):
    """Integral of a density over the faces of the simplex of three labels that it covers."""
    mass, sizes = 0.0, (3,) if isinstance(prior, DirichletPrior) else (1, 2, 3)
    for size in sizes:
        for labels in itertools.combinations(range(3), size):
            theta = np.zeros((50_000, 3))
            theta[:, labels] = rng.dirichlet(np.ones(size), len(theta))
            mass += np.mean(np.exp(prior.log_prob(theta))) / math.factorial(size - 1)
    return mass


@every_known
def test_log_prob_is_a_density(prior):
    rng = np.random.default_rng(0)
    if isinstance(prior, GridPrior | DiscretePrior):
        points = prior.support if isinstance(prior, GridPrior) else prior.points
        mass = np.exp(prior.log_prob(points)).sum()
    elif isinstance(prior, FREQUENCIES):
        mass = mass_on_faces(prior, rng)
    elif isinstance(prior, GammaPrior):
        theta = rng.exponential(scale=20.0, size=400_000)
        mass = np.mean(np.exp(prior.log_prob(theta) + theta / 20) * 20)
    elif not isinstance(prior, BetaPrior):
        theta = rng.standard_t(4, size=(100_000, 2)) * 3
        proposal = stats.t(4, scale=3).logpdf(theta).sum(axis=1)
        mass = np.mean(np.exp(prior.log_prob(theta) - proposal))
    else:
        theta = rng.random(400_000)
        mass = np.mean(np.exp(prior.log_prob(theta)))
        if prior.beta < 1:  # infinite variance at the ends: compare with scipy instead
            expected = stats.beta(prior.alpha, prior.beta).logpdf(theta[:100])
            np.testing.assert_allclose(prior.log_prob(theta[:100]), expected)
            return
    assert mass == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("prior", [p for p in KNOWN if hasattr(p, "posterior")], ids=repr)
def test_posterior_is_the_conditional_mean(prior):
    """Bayes by simulation: clients with the same data, averaged."""
    theta = prior.sample(200_000, random_state=0)
    rng = np.random.default_rng(1)
    if isinstance(prior, FREQUENCIES):
        counts = rng.multinomial(6, theta)
        near = (counts == [0, 5, 1]).all(axis=1)
        mean, variance = prior.posterior(np.array([[0, 5, 1]]))
    elif not isinstance(prior, PROPORTIONS):
        seen = theta + rng.normal(size=theta.shape)
        near = np.abs(seen - [1.5, -1.0]).max(axis=1) < 0.1
        mean, variance = prior.posterior(np.array([[1.5, -1.0]]), np.array([[1.0]]))
    else:
        draws = rng.poisson(6 * theta) if has_rates(prior) else rng.binomial(6, theta)
        near = draws[:, 0] == 2
        mean, variance = (value[:, None] for value in prior.posterior(np.array([2]), np.array([6])))
    error = 5 * np.sqrt(variance[0] / near.sum()) + 3e-3
    assert np.all(np.abs(theta[near].mean(axis=0) - mean[0]) < error)
    assert np.all(np.abs(theta[near].var(axis=0) / variance[0] - 1) < 10 / np.sqrt(near.sum()))


@every_vector
def test_fits_are_maxima(prior):
    """No fitted number can be moved by a hundredth, either way, without loss."""
    theta = prior.sample(500, random_state=0)
    fitted = unknown(prior).fit(theta)
    best = fitted.log_prob(theta).sum()
    for name, value in parameters(fitted).items():
        if name in ("weights", "points"):
            continue
        for at in np.ndindex(value.shape):
            for step in (-0.01, 0.01):
                moved = value.copy()
                moved[at] += step
                if name.startswith("covariance"):
                    moved = _of_the_same_shape(fitted, moved, value, at, step)
                if moved is not None:
                    worse = clone(fitted).set_params(**{name: moved})
                    assert worse.log_prob(theta).sum() < best


def _of_the_same_shape(prior, moved, value, at, step):
    """The covariance moved within its type; None where the type has no such direction."""
    row, column = at[-2:]
    if prior.covariance_type == "low_rank" or (row == 1 and column == 0):
        return None
    if prior.covariance_type != "full" and row != column:
        return None
    part = at[:-2]
    moved = value.copy()
    change = np.eye(2) if prior.covariance_type == "spherical" else np.zeros((2, 2))
    change[row, column] = change[column, row] = 1.0
    moved[part] = moved[part] + step * change
    return moved


@pytest.mark.parametrize("prior", [GammaPrior(2.0, 5.0), BetaPrior(2.0, 5.0)], ids=repr)
def test_gamma_and_beta_fits_are_maxima(prior):
    theta = prior.sample(500, random_state=0)
    fitted = unknown(prior).fit(theta)
    best = fitted.log_prob(theta).sum()
    for name, value in fitted.get_params().items():
        for factor in (0.98, 1.02):
            shifted = clone(fitted).set_params(**{name: factor * value})
            assert shifted.log_prob(theta).sum() < best


def test_equal_rates_have_a_known_spread():
    alike = GammaPrior().fit(np.full(5, 0.3))
    assert alike.moments()[0] == pytest.approx(0.3)
    assert alike.shape == pytest.approx(1e8)


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
    with pytest.raises(ValueError, match=r"\b3 successes.*\b5 trials.*GridPrior"):
        prior.posterior(np.array([3, 0]), np.array([5, 5]))
    with pytest.raises(ValueError, match=r"low.*GridPrior.*high.*\b0\.8\b.*\b0\.2\b"):
        GridPrior(low=0.8, high=0.2).fit([0.5])


def test_a_point_that_explains_nothing_does_not_stop_the_fit():
    """Only p = 0 explains no success in 100,000 trials, and only p = 1 the opposite."""
    trials = np.array([100_000, 100_000])
    fitted = GridPrior().fit_counts(np.array([0, 100_000]), trials, np.array([3.0, 1.0]), "ml")
    np.testing.assert_allclose(np.asarray(fitted.weights)[[0, -1]], [0.75, 0.25], atol=1e-6)


@pytest.mark.parametrize(
    ("prior", "theta", "error"),
    [
        (BetaPrior(), [[0.0]], r"theta.*\(0, 1\).*BetaPrior"),
        (GammaPrior(), [[0.0]], r"theta.*above 0.*GammaPrior.*\b0\b"),
        (GridPrior(), [[1.5]], r"theta.*\[0, 1\].*GridPrior"),
        (GaussianPrior(), [[np.nan]], "NaN"),
        (DirichletPrior(), [[0.0, 1.0]], r"theta.*positive.*DirichletPrior.*\b0\b"),
        (SparseDirichletPrior(), [[0.5, 0.6]], r"theta.*sum 1.*SparseDirichletPrior.*1\.1"),
        (DirichletPrior(mean=[0.5, 0.6]), [[0.5, 0.5]], r"mean of DirichletPrior.*sum 1\.1"),
        (DirichletPrior(mean=[1.0, 0.0]), [[0.5, 0.5]], r"mean of DirichletPrior.*positive"),
        (DirichletPrior(mean=[0.5, 0.5]), [[0.2, 0.3, 0.5]], r"DirichletPrior.*\b3\b.*\b2\b"),
        (SparseDirichletPrior(weights=[0.5, 0.5]), [[0.2, 0.3, 0.5]], r"weights.*\b3\b.*\b2\b"),
        (SparseDirichletPrior(mean=[0.5, 0.5]), [[0.2, 0.3, 0.5]], r"mean.*\b3\b.*\b2\b"),
    ],
)
def test_bad_input(prior, theta, error):
    with pytest.raises(ValueError, match=error):
        prior.fit(theta)


UNKNOWN = [
    BetaPrior(),
    GammaPrior(),
    GridPrior(),
    GaussianPrior(),
    GaussianPrior(mean=0.0),
    LaplacePrior(),
    DiscretePrior(),
    GaussianMixturePrior(),
    DirichletPrior(mean=[1.0]),
    SparseDirichletPrior(),
]
USES = {
    "log_prob": [[[0.5]]],
    "sample": [],
    "moments": [],
    "posterior": [np.ones((1, 1)), np.ones((1, 1))],
    "log_frequencies": [np.ones((1, 1))],
    "log_likelihood": [np.ones((1, 1))],
    "label_numbers": [np.ones((1, 1))],
}


@pytest.mark.parametrize(
    ("prior", "use"),
    [(prior, use) for prior in UNKNOWN for use in USES if hasattr(prior, use)],
    ids=repr,
)
def test_unknown_priors_say_so(prior, use):
    args = USES[use][:1] if isinstance(prior, FREQUENCIES) else USES[use]
    with pytest.raises(
        ValueError,
        match=f"{type(prior).__name__}.*(alpha|covariance|concentration|scale|shape|weights)",
    ):
        getattr(prior, use)(*args)


@pytest.mark.parametrize(
    "prior",
    [
        GaussianPrior(mean=0.0, covariance=1.0),
        DiscretePrior(points=[[0.0, 0.0], [1.0, 0.0]], weights=[0.5, 0.5]),
        GaussianMixturePrior(means=MEANS[:2], covariances=1.0, weights=[0.5, 0.5]),
    ],
    ids=repr,
)
def test_negative_sampling_variances_are_refused(prior):
    for sampling in (np.array([[-1.0]]), np.array([[1.0, -1.0]]), -np.eye(2)[None]):
        with pytest.raises(ValueError, match=r"variances.*\b0\b.*-1\b"):
            prior.posterior(np.zeros((1, 2)), sampling)
