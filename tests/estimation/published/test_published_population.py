"""Posteriors under normal plus Laplace variables, against numerical integrals."""

import numpy as np
import pytest
from numpy.testing import assert_allclose

from pfl_sklearn.estimation._published._noisy_normal import distribution, moments
from pfl_sklearn.estimation._published._population import (
    KnownPopulation,
    PlausibleSizes,
    PublishedPosterior,
    ReleasedMeans,
    ReleasedSquares,
    plausible_populations,
)
from tests.helpers.slow import slow

UNKNOWN = KnownPopulation(None, None, None)
CASES = [(1, 1, 0.3), (1, 5, 3), (5, 0.1, 2), (0.2, 1, -3), (3, 0.001, -2.5), (1, 1e-6, 0.2)]


@pytest.mark.parametrize(("s", "b", "x"), CASES)
def test_moments_and_distribution(s, b, x):
    near, far = x + b * np.linspace(-45, 45, 100_001), s * np.linspace(-12, 12, 100_001)
    t = np.sort(np.concatenate([near, far]))
    density = np.exp(-(t**2) / (2 * s**2) - np.abs(x - t) / b)
    steps = np.diff(t) * (density[1:] + density[:-1]) / 2
    total, middle = steps.sum(), (t[1:] + t[:-1]) / 2
    mean = steps @ middle / total
    found = moments(np.float64(x), s, b)
    assert found[0] == pytest.approx(mean, rel=1e-6)
    assert found[1] == pytest.approx(steps @ (middle - mean) ** 2 / total, rel=1e-5)
    assert found[2] == pytest.approx(np.log(total / (2 * b * s * np.sqrt(2 * np.pi))), abs=1e-6)
    at = mean + np.sqrt(found[1]) * np.array([-2.0, -0.5, 0.0, 1.0, 3.0])
    expected = np.interp(at, t[1:], np.cumsum(steps) / total)
    assert_allclose(distribution(at, np.full(5, float(x)), s, b), expected, atol=5e-5)


def released(m=5, n=4, epsilon=4.0, seed=0):
    """Noised means of clients with n rows between -3 and 3, and their squares."""
    rng = np.random.default_rng(seed)
    scales = np.full(m, 6 / (n * epsilon))
    means = rng.normal(0.3, 0.8, m) + rng.normal(0, 0.9 / np.sqrt(n), m)
    squares = ReleasedSquares(0.8 * m * (n - 1), 36 / epsilon, m * (n - 1)) if n > 1 else None
    return ReleasedMeans(
        means + scales * rng.laplace(size=m), scales, np.full(m, n), (-3.0, 3.0), squares
    )


def fit_of_squares(table, sigma):
    """Log density of the squares, which are normal with the variance of their chi squares."""
    value, scale, dof, more = table.squares
    return moments(value - sigma**2 * dof, sigma**2 * np.sqrt(2 * dof + more), scale)[2]


def brute_force(table, of_table):
    """Means and standard deviations of the clients, over a dense grid of populations."""
    mu = -3 + 6 * (np.arange(60) + 0.5) / 60
    tau, sigma = (3 * (np.arange(60) + 0.5) / 60 for _ in range(2))
    mu, tau, sigma = (each.ravel() for each in np.meshgrid(mu, tau, sigma))
    spread = np.sqrt(tau[:, None] ** 2 + sigma[:, None] ** 2 / table.n_rows)
    deviation, variance, fit = moments(table.means - mu[:, None], spread, table.scales)
    weights = fit.sum(axis=1) + fit_of_squares(table, sigma)
    weights = np.exp(weights - weights.max())
    weights /= weights.sum()
    if not of_table:
        own = tau[:, None] ** 2 / spread**2
        variance = tau[:, None] ** 2 * (1 - own) + own**2 * variance
        deviation = own * deviation
    centre = mu[:, None] + deviation
    mean = weights @ centre
    return mean, np.sqrt(weights @ (variance + (centre - mean) ** 2))


@pytest.mark.slow
@pytest.mark.parametrize("of_table", [True, False])
@pytest.mark.parametrize(("m", "epsilon"), [(3, 0.5), (3, 8.0), (20, 2.0)])
def test_a_dense_grid_of_populations_gives_the_same(m, epsilon, of_table):
    table = released(m, epsilon=epsilon)
    posterior = PublishedPosterior(table, plausible_populations(table, UNKNOWN), of_table)
    mean, std, _ = posterior.moments()
    expected_mean, expected_std = brute_force(table, of_table)
    assert_allclose((mean - expected_mean) / expected_std, 0, atol=0.06)
    assert_allclose(std, expected_std, rtol=0.04)


def released_with_sizes(m, epsilon, seed=0):
    """Noised sums about 0 and numbers of rows, some of them 0, as if rounding did not matter."""
    rng = np.random.default_rng(seed)
    n, theta = rng.integers(0, 8, m), rng.normal(0.8, 0.7, m)
    noise = rng.laplace(size=(2, m)) * np.array([[3.0], [1.0]]) / epsilon
    sums, noisy = n * theta + np.sqrt(n) * rng.normal(size=m) + noise[0], np.rint(n + noise[1])
    values = np.maximum(noisy - 10, 0) + np.arange(25)[:, None]
    log_weights = -np.abs(values - noisy) * epsilon
    sizes = PlausibleSizes(sums, 3 / epsilon, np.maximum(values, 1e-6), log_weights)
    n_rows = np.maximum(noisy, 1)
    scales = np.hypot(3, sums / n_rows) / epsilon / n_rows
    squares = ReleasedSquares(0.9 * (n.sum() - m), 4.0, n.sum() - m, 2.0)
    return ReleasedMeans(sums / n_rows, scales, n_rows, (-3.0, 3.0), squares, sizes)


def brute_force_with_sizes(table):
    """As `brute_force`, over sizes, too; sums rather than means of rows."""
    sums, scale, sizes, log_weights = table.sizes
    mu = -3 + 6 * (np.arange(24) + 0.5) / 24
    tau, sigma = (3 * (np.arange(24) + 0.5) / 24 for _ in range(2))
    mu, tau, sigma = (each.ravel()[:, None, None] for each in np.meshgrid(mu, tau, sigma))
    spread = np.sqrt(sizes**2 * tau**2 + sizes * sigma**2)
    deviation, variance, fit = moments(sums - sizes * mu, spread, scale)
    fit = fit + log_weights
    most = fit.max(axis=1, keepdims=True)
    of_sizes = np.exp(fit - most)
    total = of_sizes.sum(axis=1, keepdims=True)
    weights = (most + np.log(total))[:, 0].sum(axis=1) + fit_of_squares(table, sigma[:, 0, 0])
    weights = np.exp(weights - weights.max())
    weights = weights[:, None] * (of_sizes / total).reshape(len(weights), -1)
    slope = sizes * tau**2 / spread**2  # of theta on the exact sum
    centre = mu + slope * deviation
    variance = tau**2 - slope * sizes * tau**2 + slope**2 * variance
    weights = weights.reshape(centre.shape) / weights.sum() * len(sums)
    mean = np.sum(weights * centre, axis=(0, 1))
    return mean, np.sqrt(np.sum(weights * (variance + (centre - mean) ** 2), axis=(0, 1)))


@pytest.mark.parametrize(("m", "epsilon"), [(4, 1.0), *slow([(4, 4.0), (12, 1.0)])])
@pytest.mark.slow
def test_a_dense_grid_of_populations_and_sizes_gives_the_same(m, epsilon):
    table = released_with_sizes(m, epsilon)
    posterior = PublishedPosterior(table, plausible_populations(table, UNKNOWN), False)
    mean, std, _ = posterior.moments()
    expected_mean, expected_std = brute_force_with_sizes(table)
    assert_allclose((mean - expected_mean) / expected_std, 0, atol=0.06)
    assert_allclose(std, expected_std, rtol=0.04)
    lower, upper = posterior.central(0.95)
    assert ((lower < mean) & (mean < upper)).all()


def test_known_parameters_are_taken_as_they_are():
    table = released()._replace(squares=None)
    nodes = plausible_populations(table, KnownPopulation(0.5, 0.4, 0.9))
    assert (nodes.means, nodes.taus**2, nodes.sigmas**2) == pytest.approx((0.5, 0.4, 0.9))
    means, stds, _ = PublishedPosterior(table, nodes, True).moments()
    spread = np.sqrt(0.4 + 0.9 / 4)
    expected, variance, _ = moments(table.means - 0.5, spread, table.scales)
    assert_allclose(means, 0.5 + expected, atol=1e-6)
    assert_allclose(stds, np.sqrt(variance), rtol=1e-6)


@pytest.mark.parametrize("of_table", [True, False])
def test_intervals_are_quantiles(of_table):
    table = released(m=7)
    posterior = PublishedPosterior(table, plausible_populations(table, UNKNOWN), of_table)
    lower, upper = posterior.central(0.9)
    probabilities = posterior.nodes.weights @ posterior._distribution()(upper)
    assert_allclose(probabilities, 0.95, atol=1e-4)
    probabilities = posterior.nodes.weights @ posterior._distribution()(lower)
    assert_allclose(probabilities, 0.05, atol=1e-4)
