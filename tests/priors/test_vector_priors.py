"""Gaussian and Laplace priors: covariances of every shape, posteriors, the proximal map."""

import numpy as np
import pytest
from scipy import stats
from scipy.optimize import minimize_scalar
from sklearn.decomposition import PCA

from pfl_sklearn.priors import GaussianPrior, LaplacePrior

FULL = np.array([[2.0, 0.6, 0.0], [0.6, 0.5, 0.1], [0.0, 0.1, 1.0]])


def test_low_rank_is_probabilistic_pca():
    theta = np.random.default_rng(0).normal(size=(60, 5)) @ np.diag([3.0, 2, 1, 1, 0.5])
    for rank in (1, 2, 4):
        fitted = GaussianPrior(covariance_type="low_rank", rank=rank).fit(theta)
        expected = PCA(rank).fit(theta).get_covariance() * 59 / 60
        np.testing.assert_allclose(fitted.covariance, expected, atol=1e-10)
    full = GaussianPrior(covariance_type="full").fit(theta)
    np.testing.assert_allclose(full.covariance, np.cov(theta.T, bias=True))
    several = GaussianPrior(covariance_type="low_rank", rank=9).fit(theta)
    np.testing.assert_array_equal(several.covariance, full.covariance)
    default = GaussianPrior(covariance_type="low_rank").fit(theta)
    one = GaussianPrior(covariance_type="low_rank", rank=1).fit(theta)
    np.testing.assert_array_equal(default.covariance, one.covariance)


def test_a_known_mean_is_what_the_spread_is_measured_from():
    theta = np.random.default_rng(0).normal(size=(40, 3)) + 2.0
    fitted = GaussianPrior(mean=0.0, covariance_type="full").fit(theta)
    np.testing.assert_allclose(fitted.covariance, theta.T @ theta / 40)
    np.testing.assert_array_equal(fitted.mean, np.zeros(3))


@pytest.mark.parametrize("covariance", [0.7, [0.7, 0.0, 2.0], FULL], ids=["one", "diag", "full"])
def test_posteriors_of_every_form(covariance):
    """Against the formula (S^-1 + V^-1)^-1, or the gain where S is singular."""
    rng = np.random.default_rng(0)
    prior = GaussianPrior(mean=[1.0, 2.0, 3.0], covariance=covariance)
    matrix = prior.known_covariance(3)
    estimates = rng.normal(size=(4, 3))
    root = rng.normal(size=(4, 3, 3))
    sampling = root @ root.transpose(0, 2, 1) + np.eye(3)
    for given in (np.full((4, 1), 0.3), rng.uniform(0.1, 2, (4, 3)), sampling):
        matrices = given if given.ndim == 3 else np.broadcast_to(given, (4, 3))[..., None]
        matrices = matrices if given.ndim == 3 else matrices * np.eye(3)
        mean, variance = prior.posterior(estimates, given)
        for i in range(4):
            gain = matrix @ np.linalg.inv(matrix + matrices[i])
            expected = gain @ matrices[i]
            np.testing.assert_allclose(mean[i], prior.mean + gain @ (estimates[i] - prior.mean))
            wanted = expected if given.ndim == 3 else np.diag(expected)
            np.testing.assert_allclose(variance[i], wanted, atol=1e-12)


def test_no_spread_and_no_limit():
    estimates, sampling = np.array([[1.0, 5.0]]), np.array([[[1.0, 0.2], [0.2, 2.0]]])
    mean, variance = GaussianPrior(0.0, np.inf).posterior(estimates, sampling)
    np.testing.assert_array_equal(mean, estimates)
    np.testing.assert_array_equal(variance, sampling)
    for given in (sampling, sampling * 0, np.zeros((1, 1))):
        mean, variance = GaussianPrior([3.0, 4.0], 0.0).posterior(estimates, given)
        np.testing.assert_allclose(mean, [[3.0, 4.0]])
        np.testing.assert_array_equal(variance, np.zeros_like(variance))


def test_known_covariances():
    np.testing.assert_array_equal(GaussianPrior(covariance=2.0).known_covariance(2), 2 * np.eye(2))
    np.testing.assert_array_equal(
        GaussianPrior(covariance=[1.0, 3.0]).known_covariance(2), np.diag([1.0, 3.0])
    )
    np.testing.assert_array_equal(GaussianPrior(covariance=FULL).known_covariance(3), FULL)
    endless = GaussianPrior(covariance=np.inf).known_covariance(2)
    np.testing.assert_array_equal(endless, np.diag([np.inf, np.inf]))
    assert GaussianPrior().known_covariance(2) is None
    kept = GaussianPrior(covariance_type="low_rank", rank=2).with_values(np.zeros(3), FULL)
    assert kept.get_params()["rank"] == 2
    np.testing.assert_array_equal(kept.covariance, FULL)


@pytest.mark.parametrize(
    ("covariance", "error"),
    [
        ([[1.0, 0.5], [0.4, 1.0]], r"covariance.*symmetric.*\[0\.4, 1\.0\]"),
        ([[1.0, 2.0], [2.0, 1.0]], r"covariance.*positive semi-definite.*\[2\.0, 1\.0\]"),
        ([1.0, np.inf], r"covariance.*diagonal.*\binf\b"),
        ([[np.inf, 1.0], [1.0, np.inf]], r"covariance.*diagonal.*\binf\b"),
        ([[1.0, np.nan], [np.nan, 1.0]], r"covariance.*finite.*\bnan\b"),
        ([1.0, -1.0], r"covariance.*\[1\.0, -1\.0\]"),
        ([1.0, 1.0, 1.0], r"covariance.*\(2,\).*\[1\.0, 1\.0, 1\.0\]"),
    ],
)
def test_bad_covariances(covariance, error):
    with pytest.raises(ValueError, match=error):
        GaussianPrior(covariance=covariance).known_covariance(2)


def test_gaussian_density_is_scipys_and_needs_a_spread():
    theta = np.random.default_rng(0).normal(size=(7, 3))
    for covariance in (FULL, np.diag([1.0, 2.0, 3.0])):
        expected = stats.multivariate_normal([1.0, 0.0, 2.0], covariance).logpdf(theta)
        prior = GaussianPrior([1.0, 0.0, 2.0], covariance)
        np.testing.assert_allclose(prior.log_prob(theta), expected)
    with pytest.raises(ValueError, match=r"GaussianPrior.*covariance.*\[1\.0, 0\.0, 1\.0\]"):
        GaussianPrior(0.0, [1.0, 0.0, 1.0]).log_prob(theta)


def test_laplace():
    theta = np.random.default_rng(0).normal(size=(9, 2))
    prior = LaplacePrior([0.5, -0.5], [1.0, 2.0])
    expected = stats.laplace([0.5, -0.5], [1.0, 2.0]).logpdf(theta).sum(axis=1)
    np.testing.assert_allclose(prior.log_prob(theta), expected)
    kept = LaplacePrior(scale=[1.0, 2.0]).fit(theta)
    np.testing.assert_array_equal(kept.scale, [1.0, 2.0])
    np.testing.assert_array_equal(kept.location, np.median(theta, axis=0))
    assert LaplacePrior(location=0.0).fit(theta).scale == pytest.approx(np.abs(theta).mean())


def test_prox_by_brute_force():
    prior = LaplacePrior([0.5, -0.5], [0.3, 2.0])
    theta = np.random.default_rng(0).normal(size=(20, 2)) * 2
    step = np.random.default_rng(1).uniform(0.1, 2.0, (20, 1))
    found = prior.prox(theta, step)
    for i, j in np.ndindex(theta.shape):

        def objective(v, i=i, j=j):
            away = abs(v - prior.location[j]) / prior.scale[j]
            return (v - theta[i, j]) ** 2 / (2 * step[i, 0]) + away

        best = minimize_scalar(objective, bounds=(-9, 9), method="bounded", options={"xatol": 1e-9})
        assert found[i, j] == pytest.approx(best.x, abs=1e-6)
    assert (found == prior.location).any()


@pytest.mark.parametrize(
    ("prior", "error"),
    [
        (LaplacePrior(scale=0.0), "'scale' parameter"),
        (LaplacePrior(scale=[1.0, -1.0]), r"scale.*LaplacePrior.*\[1\.0, -1\.0\]"),
        (LaplacePrior(location=[1.0, 2.0, 3.0]), r"location.*LaplacePrior.*\[1\.0, 2\.0, 3\.0\]"),
        (LaplacePrior(), r"theta.*scale.*LaplacePrior"),
        (GaussianPrior(rank=0), "'rank' parameter"),
    ],
)
def test_bad_input(prior, error):
    with pytest.raises(ValueError, match=error):
        prior.fit(np.ones((4, 2)))


def test_unknown_laplace():
    with pytest.raises(ValueError, match=r"LaplacePrior.*location.*scale"):
        LaplacePrior(location=0.0).log_prob([[1.0]])
