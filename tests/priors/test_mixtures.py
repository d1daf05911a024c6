"""Mixture priors: EM against sklearn, finite differences and brute force; what may be given."""

import functools
import subprocess
import sys

import numpy as np
import pytest
from scipy import stats
from sklearn import cluster
from sklearn.mixture import GaussianMixture
from threadpoolctl import threadpool_info, threadpool_limits

from pfl_sklearn import GaussianMean
from pfl_sklearn.priors import DiscretePrior, GaussianMixturePrior, _mixture_fit as em
from tests.helpers.slow import slow

MEANS = np.array([[0.0, 0.0], [3.0, 1.0], [-2.0, 4.0]])
COVARIANCES = np.array([[[1.0, 0.3], [0.3, 0.5]], np.eye(2) * 0.2, [[0.5, -0.2], [-0.2, 1.0]]])
WEIGHTS = np.array([0.5, 0.3, 0.2])
TRUE = GaussianMixturePrior(3, means=MEANS, covariances=COVARIANCES, weights=WEIGHTS)
TYPES = ("spherical", "diag", "full")


def noisy(n=800, seed=0, truth=TRUE, common=False):
    rng = np.random.default_rng(seed)
    theta = truth.sample(n, random_state=seed)
    s = np.full(n, 0.7) if common else rng.uniform(0.05, 3.0, n)
    return theta, theta + np.sqrt(s)[:, None] * rng.normal(size=theta.shape), s


def log_likelihood(means, covariances, weights, x, s):
    """By scipy, client by client."""
    total = 0.0
    for row, variance in zip(x, s, strict=True):
        parts = [
            w * stats.multivariate_normal(mean, c + variance * np.eye(len(mean))).pdf(row)
            for mean, c, w in zip(means, covariances, weights, strict=True)
        ]
        total += np.log(sum(parts))
    return total


@pytest.mark.slow_but_first
@pytest.mark.parametrize("covariance_type", TYPES)
def test_without_noise_it_is_sklearns_mixture(covariance_type):
    theta = noisy()[0]
    ours = GaussianMixturePrior(3, covariance_type=covariance_type).fit(theta)
    theirs = GaussianMixture(
        3,
        covariance_type=covariance_type,
        tol=1e-9,
        max_iter=2000,
        n_init=5,
        reg_covar=0.0,
        random_state=0,
    ).fit(theta)
    assert ours.log_prob(theta).mean() == pytest.approx(theirs.score(theta), abs=1e-6)
    order = np.argsort(-theirs.weights_)
    np.testing.assert_allclose(ours.means, theirs.means_[order], atol=1e-2)
    np.testing.assert_allclose(ours.weights, theirs.weights_[order], atol=2e-3)


@pytest.mark.parametrize(("covariance_type", "common"), [("diag", False), *slow([("full", True)])])
@pytest.mark.slow
def test_noisy_fits_are_stationary(covariance_type, common):
    """Finite differences of the marginal likelihood, computed by scipy, vanish at the fit."""
    _, x, s = noisy(80, common=common)
    prior = GaussianMixturePrior(2, covariance_type=covariance_type).fit_noisy(x, s)
    h, (means, covariances, weights) = 1e-4, prior.known_mixture()

    def slope(change_means=0.0, change_covariances=0.0, change_weights=0.0):
        ends = [
            log_likelihood(
                means + sign * h * change_means,
                covariances + sign * h * change_covariances,
                weights + sign * h * change_weights,
                x,
                s,
            )
            for sign in (1, -1)
        ]
        return (ends[0] - ends[1]) / (2 * h)

    unit = np.zeros((2, 2))
    unit[0, 1] = 1.0
    assert abs(slope(change_means=unit)) < 0.1
    assert abs(slope(change_weights=np.array([1.0, -1.0]))) < 0.1
    first = np.zeros((2, 2, 2))
    first[0] = np.diag([1, 0]) if covariance_type == "diag" else 1 - np.eye(2)
    assert abs(slope(change_covariances=first)) < 0.1
    assert prior.log_marginal(x, s[:, None]).sum() == pytest.approx(
        log_likelihood(means, covariances, weights, x, s)
    )


@pytest.mark.slow_but_first
@pytest.mark.parametrize("common", [True, False])
@pytest.mark.parametrize("covariance_type", [*TYPES, "fixed"])
def test_every_step_raises_the_likelihood(covariance_type, common):
    _, x, s = noisy(400, common=common)
    shape = em.Shape(covariance_type)
    for seed in range(2):
        rng = np.random.RandomState(seed)
        start = x[rng.choice(400, 4)]
        vectors = np.broadcast_to(np.eye(2), (4, 2, 2)) if covariance_type == "full" else None
        mixture = em.NormalMixture(
            start, np.full((4, 2), rng.uniform(0.01, 5)), vectors, np.full(4, 0.25)
        )
        values = []
        for _ in range(40):
            r, value = em.e_step(mixture, x, s)
            np.testing.assert_allclose(r.sum(axis=0), 1)
            values.append(value)
            mixture = em.m_step(mixture, r, x, s, shape, 0.0)
        assert np.min(np.diff(values)) > -1e-8
        assert values[-1] > values[0]


@pytest.mark.parametrize("common", [True, False])
@pytest.mark.parametrize("covariance_type", [*TYPES, "fixed"])
def test_slopes_of_the_quasi_newton_steps(covariance_type, common):
    _, x, s = noisy(50, common=common)
    shape, rng = em.Shape(covariance_type), np.random.default_rng(0)
    vectors = np.linalg.qr(rng.normal(size=(3, 2, 2)))[0] if covariance_type == "full" else None
    values = np.full((3, 2), 0.4) if covariance_type != "full" else rng.uniform(0.2, 1, (3, 2))
    mixture = em.NormalMixture(MEANS, values, vectors, WEIGHTS)
    model = em._Coordinates(mixture, shape, 0.01, np.zeros(2), 1.0)
    point = model.start + 0.05 * rng.random(model.size)
    at = model.mixture(point)
    slope = model.slope(point, at, em.e_step(at, x, s)[0], x, s)
    for k, unit in enumerate(np.eye(model.size)):
        ends = [em.e_step(model.mixture(point + h * unit), x, s)[1] for h in (1e-5, -1e-5)]
        assert slope[k] == pytest.approx((ends[0] - ends[1]) / 2e-5, abs=1e-4)


def test_overlapping_groups_still_reach_the_maximum():
    """Noise far larger than what lies between the groups: EM alone would stop on the way."""
    _, x, s = noisy(1000, truth=DiscretePrior(3, points=MEANS, weights=WEIGHTS))
    x = x + 5 * np.random.default_rng(1).normal(size=x.shape)
    fitted = DiscretePrior(3).fit_noisy(x, s + 25.0)
    value = fitted.log_marginal(x, (s + 25.0)[:, None]).sum()
    other = DiscretePrior(3, n_init=3).fit_noisy(x, s + 25.0, random_state=1)
    assert other.log_marginal(x, (s + 25.0)[:, None]).sum() == pytest.approx(value, abs=0.5)


@pytest.mark.slow
def test_noise_is_taken_off():
    """Unequal noise, some of it larger than the clients' spread."""
    _, x, s = noisy(10_000)
    fitted = GaussianMixturePrior(3, covariance_type="full", n_init=2).fit_noisy(x, s)
    np.testing.assert_allclose(fitted.means, MEANS, atol=0.1)
    np.testing.assert_allclose(fitted.covariances, COVARIANCES, atol=0.15)
    np.testing.assert_allclose(fitted.weights, WEIGHTS, atol=0.02)
    points = DiscretePrior(3, points=MEANS, weights=WEIGHTS)
    _, x, s = noisy(10_000, truth=points)
    fitted = DiscretePrior(3).fit_noisy(x, s)
    np.testing.assert_allclose(fitted.points, MEANS, atol=0.05)
    np.testing.assert_allclose(fitted.weights, WEIGHTS, atol=0.02)


def test_a_spread_of_zero_is_found():
    """Groups without spread: variances at the bound, no error."""
    points = DiscretePrior(3, points=MEANS, weights=WEIGHTS)
    _, x, _ = noisy(1000, truth=points, common=True)
    fitted = GaussianMixturePrior(3).fit_noisy(x, np.full(1000, 0.7))
    assert fitted.covariances.max() < 0.05
    np.testing.assert_allclose(fitted.means, MEANS, atol=0.1)


@pytest.mark.parametrize("form", ["one", "diagonal", "matrix"])
def test_posteriors_by_brute_force(form):
    """Posterior moments and responsibilities by summing over a fine grid of theta."""
    rng = np.random.default_rng(0)
    estimates = np.array([[0.5, 1.0], [-1.0, 2.5]])
    root = rng.normal(size=(2, 2, 2))
    sampling = {
        "one": np.array([[0.3], [2.0]]),
        "diagonal": np.array([[0.3, 1.0], [2.0, 0.5]]),
        "matrix": root @ root.transpose(0, 2, 1) + 0.3 * np.eye(2),
    }[form]
    axes = np.arange(-8, 10, 0.04)
    grid = np.stack(np.meshgrid(axes, axes), axis=-1).reshape(-1, 2)
    shares = TRUE.responsibilities(estimates, sampling)
    mean, variance = TRUE.posterior(estimates, sampling)
    for i in range(2):
        noise = sampling[i] if form == "matrix" else np.diag(np.broadcast_to(sampling[i], 2))
        seen = stats.multivariate_normal(estimates[i], noise).pdf(grid)
        parts = [
            w * stats.multivariate_normal(m, c).pdf(grid) * seen
            for m, c, w in zip(MEANS, COVARIANCES, WEIGHTS, strict=True)
        ]
        mass = np.array([part.sum() for part in parts])
        np.testing.assert_allclose(shares[i], mass / mass.sum(), atol=1e-6)
        density = sum(parts) / mass.sum()
        centre = density @ grid
        np.testing.assert_allclose(mean[i], centre, atol=1e-6)
        spread = (density * (grid - centre).T) @ (grid - centre)
        wanted = spread if form == "matrix" else np.diag(spread)
        np.testing.assert_allclose(variance[i], wanted, atol=1e-5)
        log = TRUE.log_marginal(estimates, sampling)[i]
        assert np.exp(log) == pytest.approx(mass.sum() * 0.04**2, rel=1e-6)


def test_discrete_posterior():
    """Theorem 6 (ICLR) by hand, and the nearest point where there is no noise."""
    prior = DiscretePrior(2, points=[[0.0], [1.0]], weights=[0.8, 0.2])
    odds = 0.2 / 0.8 * np.exp((0.7**2 - 0.3**2) / (2 * 0.5))
    share = odds / (1 + odds)
    mean, variance = prior.posterior(np.array([[0.7]]), np.array([[0.5]]))
    assert mean[0, 0] == pytest.approx(share)
    assert variance[0, 0] == pytest.approx(share * (1 - share))
    for none in (np.zeros((1, 1)), np.zeros((1, 1, 1))):
        assert prior.posterior(np.array([[0.7]]), none)[0][0] == pytest.approx([1.0])
    far, _ = prior.posterior(np.array([[1e150]]), np.array([[1e-3]]))
    assert far[0, 0] == 1.0
    np.testing.assert_array_equal(
        np.exp(prior.log_prob([[1.0], [0.0], [0.5]])).round(9), [0.2, 0.8, 0.0]
    )


@pytest.mark.slow
def test_bic_finds_the_number_of_components():
    apart = GaussianMixturePrior(3, means=3 * MEANS, covariances=0.5, weights=WEIGHTS)
    theta, x, s = noisy(300, truth=apart)
    prior = GaussianMixturePrior("bic", covariance_type="full", n_init=2)
    assert prior.fit(theta).n_components == 3
    assert prior.fit_noisy(x, s).n_components == 3
    capped = GaussianMixturePrior("bic", max_components=2, n_init=4).fit(theta)
    assert capped.n_components == 2


@pytest.mark.slow
def test_bic_of_points():
    points = DiscretePrior(3, points=MEANS, weights=WEIGHTS)
    theta, x, s = noisy(300, truth=points)
    assert DiscretePrior("bic").fit(theta).n_components == 3
    assert DiscretePrior("bic").fit_noisy(x, s).n_components == 3
    assert DiscretePrior("bic").fit(theta + 0.1 * x).n_components == 3
    assert DiscretePrior("bic").fit(np.ones((5, 2))).n_components == 1


@pytest.mark.parametrize("prior", [GaussianMixturePrior(3), DiscretePrior(3)], ids=repr)
def test_components_do_not_depend_on_the_start(prior):
    apart = GaussianMixturePrior(3, means=3 * MEANS, covariances=0.5, weights=WEIGHTS)
    theta, _, _ = noisy(300, truth=apart)
    first, second = (prior.fit(theta, random_state=seed) for seed in (1, 2))
    np.testing.assert_allclose(
        first.log_marginal(theta, np.ones((300, 1))),
        second.log_marginal(theta, np.ones((300, 1))),
        atol=1e-3,
    )
    np.testing.assert_allclose(first.weights, second.weights, atol=1e-3)
    assert np.all(np.diff(first.weights) <= 0)
    again, once = prior.fit(theta), prior.fit(theta)
    np.testing.assert_array_equal(again.weights, once.weights)


def test_ties_are_ordered_by_the_first_coordinate():
    theta = np.array([[5.0, 0.0], [-5.0, 0.0], [0.0, 9.0]]).repeat(4, axis=0)
    fitted = DiscretePrior(3).fit(theta)
    np.testing.assert_array_equal(fitted.points[:, 0], [-5.0, 0.0, 5.0])


@pytest.mark.slow
def test_degenerate_components_stop_at_the_floor():
    """A group of equal clients next to a wide one, and a start that could fall into a point."""
    rng = np.random.default_rng(0)
    theta = np.concatenate([np.full((40, 2), 3.0), rng.normal(size=(60, 2))])
    spread = theta.var(axis=0).mean()
    fitted = GaussianMixturePrior(2, covariance_type="full").fit(theta)
    smallest = np.linalg.eigvalsh(fitted.covariances).min()
    assert smallest == pytest.approx(1e-6 * spread, rel=1e-3)
    np.testing.assert_allclose(fitted.weights, [0.6, 0.4], atol=0.02)
    plain = GaussianMixturePrior(3, covariance_type="full").fit(rng.normal(size=(40, 2)))
    assert np.linalg.eigvalsh(plain.covariances).min() > 1e-5


def test_large_tables_start_on_a_part(monkeypatch):
    """More clients than the starts look at."""
    monkeypatch.setattr(em, "_START_CLIENTS", 500)
    theta, _, _ = noisy(2000)
    fitted = GaussianMixturePrior(3, covariance_type="full", n_init=3).fit(theta)
    np.testing.assert_allclose(fitted.means, MEANS, atol=0.15)


def test_what_is_given_is_kept():
    theta, x, s = noisy(1000)
    means = GaussianMixturePrior(3, means=MEANS[::-1]).fit(theta)
    np.testing.assert_array_equal(means.means, MEANS[::-1])
    np.testing.assert_allclose(means.weights, WEIGHTS[::-1], atol=0.05)
    both = GaussianMixturePrior(
        3, means=MEANS, weights=[0.2, 0.3, 0.5], covariance_type="full"
    ).fit_noisy(x, s)
    np.testing.assert_array_equal(both.weights, [0.2, 0.3, 0.5])
    spread = GaussianMixturePrior(3, covariances=0.25).fit_noisy(x, s)
    np.testing.assert_array_equal(spread.covariances, np.tile(0.25 * np.eye(2), (3, 1, 1)))
    shapes = GaussianMixturePrior(3, means=MEANS, covariances=COVARIANCES).fit_noisy(x, s)
    np.testing.assert_array_equal(shapes.covariances, COVARIANCES)
    np.testing.assert_allclose(shapes.weights, WEIGHTS, atol=0.05)


def test_moments():
    theta = TRUE.sample(400_000, random_state=0)
    mean, covariance = TRUE.moments()
    np.testing.assert_allclose(theta.mean(axis=0), mean, atol=0.02)
    np.testing.assert_allclose(np.cov(theta.T), covariance, atol=0.05)
    points = DiscretePrior(3, points=MEANS, weights=WEIGHTS).moments()
    np.testing.assert_allclose(points[0], mean)
    within = np.einsum("k,kde->de", WEIGHTS, COVARIANCES)
    np.testing.assert_allclose(points[1], covariance - within)


def test_given_components_are_counted():
    """Without n_components there are as many as are given, and two if none are."""
    known = DiscretePrior(points=MEANS, weights=WEIGHTS)
    np.testing.assert_array_equal(known.fit(MEANS).points, MEANS)
    theta = TRUE.sample(300, random_state=0)
    assert GaussianMixturePrior(means=MEANS).fit(theta).means.shape == MEANS.shape
    for prior in (DiscretePrior, GaussianMixturePrior):
        assert len(prior().fit(theta).means) == 2
    values, groups = np.repeat(MEANS, 2, axis=0) + [[0.1], [-0.1]] * 3, np.repeat([0, 1, 2], 2)
    model = GaussianMean(known, noise_variance=0.01).fit(np.zeros((6, 1)), values, groups=groups)
    np.testing.assert_allclose(model.means_, MEANS, atol=1e-9)
    assert known.n_components is None


GIVEN = functools.partial(GaussianMixturePrior, 3, means=MEANS)


@pytest.mark.parametrize(
    ("prior", "error"),
    [
        (GaussianMixturePrior(0), "'n_components' parameter"),
        (GaussianMixturePrior("aic"), "'n_components' parameter"),
        (GaussianMixturePrior(9), r"n_components=9\b.*\b4\b"),
        (DiscretePrior(9), r"n_components=9\b.*\b4\b"),
        (GaussianMixturePrior(2, weights=[0.5, 0.5]), r"Mixture.*means.*weights=\[0\.5, 0\.5\]"),
        (GaussianMixturePrior(2, covariances=[1.0, 2.0]), r"Mixture.*means.*covariances=\[1\.0, 2"),
        (GaussianMixturePrior(2, means=MEANS), r"n_components.*Mixture.*means.*\b3\b.*\b2\b"),
        (GaussianMixturePrior("bic", means=MEANS), r"n_components.*Mixture.*means.*\b3\b.*'bic'"),
        (GaussianMixturePrior(3, means=[1.0, 2.0]), r"means.*Mixture.*\(n_components, 2\).*\(2,\)"),
        (
            GIVEN(covariances=1.0, weights=[0.5, 0.3, 0.3]),
            r"weights.*Mixture.*\b3\b.*\[0\.5, 0\.3, 0\.3\]",
        ),
        (GIVEN(covariances=[1.0, 2.0]), r"covariances.*Mixture.*\(3,\).*\[1\.0, 2\.0\]"),
        (GIVEN(covariances=-COVARIANCES), r"covariances.*Mixture.*symmetric.*\[\[-1\.0"),
        (DiscretePrior(3, points=MEANS), r"DiscretePrior.*points=array"),
        (DiscretePrior(2, points=MEANS, weights=WEIGHTS), r"n_components.*points.*\b3\b.*\b2\b"),
    ],
)
def test_bad_input(prior, error):
    with pytest.raises(ValueError, match=error):
        prior.fit(np.array([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 6.0]]))


@pytest.mark.parametrize(
    "prior",
    [
        GaussianMixturePrior("bic"),
        DiscretePrior("bic"),
        GaussianMixturePrior(1),
        GaussianMixturePrior(1, covariance_type="full"),
        GaussianMixturePrior(1, covariance_type="diag"),
        DiscretePrior(1),
    ],
    ids=repr,
)
@pytest.mark.parametrize("theta", [[[1.0, 2.0]], [[1.0, 2.0]] * 5, [[0.0, 0.0]] * 3], ids=len)
def test_clients_that_are_all_alike(prior, theta):
    """One component at the place of everybody, without spread; and no warning."""
    theta = np.array(theta)
    for found in (prior.fit(theta), prior.fit_noisy(theta, np.ones(len(theta)))):
        means, covariances, weights = found.known_mixture()
        np.testing.assert_allclose(means, theta[:1])
        np.testing.assert_allclose(covariances, 0.0, atol=1e-12)
        np.testing.assert_array_equal(weights, [1.0])
        np.testing.assert_allclose(found.posterior(theta, np.ones((len(theta), 1)))[0], theta)


@pytest.mark.parametrize("prior", [GaussianMixturePrior(3), DiscretePrior(3)], ids=repr)
def test_values_that_differ_by_rounding_are_the_same(prior):
    """Two values and their rounding are no three points."""
    x = np.repeat([[2.0], [-2.0], [2.0 + 4e-16], [-2.0 - 9e-16]], 15, axis=0)
    with pytest.raises(ValueError, match=r"n_components=3\b.*\b2\b"):
        prior.fit(x)
    assert prior.set_params(n_components="bic").fit(x).n_components == 2
    prior.set_params(n_components=3).fit(np.append(x, [[2.001]], axis=0))


def test_bad_data():
    with pytest.raises(ValueError, match=r"estimates.*sampling_variances.*finite"):
        GaussianMixturePrior().fit_noisy(np.zeros((3, 1)), np.array([1.0, -1.0, 1.0]))
    with pytest.raises(
        ValueError, match=r"estimates.*sampling_variances.*\(n_clients,\).*\(3, 2\)"
    ):
        DiscretePrior().fit_noisy(np.zeros((3, 2)), np.ones((3, 2)))
    with pytest.raises(ValueError, match=r"estimates.*\(n_clients, d\).*\(3, 2\).*\(2, 2\)"):
        TRUE.posterior(np.zeros((3, 2)), np.ones((2, 2)))
    with pytest.raises(ValueError, match=r"GaussianMixturePrior.*covariances.*positive definite"):
        GaussianMixturePrior(3, means=MEANS, covariances=0.0, weights=WEIGHTS).log_prob([[0.0, 1]])
    for prior in (GaussianMixturePrior(), DiscretePrior()):
        with pytest.raises(ValueError, match=r"(DiscretePrior|GaussianMixturePrior).*weights"):
            prior.sample(3)


@pytest.mark.slow
def test_clustering_is_imported_when_a_mixture_is_fitted():
    code = "import sys, pfl_sklearn.priors; print('sklearn.cluster' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_k_means_runs_on_one_thread(monkeypatch):
    """Its sums depend on the number of threads, and so would ties."""
    seen = []

    class Spy(cluster.KMeans):
        def fit(self, *args, **params):
            seen.extend(library["num_threads"] for library in threadpool_info())
            return super().fit(*args, **params)

    monkeypatch.setattr(cluster, "KMeans", Spy)
    with threadpool_limits(2):
        em.k_means(np.arange(6.0)[:, None], 2, np.random.RandomState(0))
    assert set(seen) == {1}


def test_rows_that_nearly_coincide_are_clustered_in_silence():
    """KMeans finds fewer clusters than it was asked for here, and would warn."""
    x = np.array([[0.0], [1e-10], [1.0]])
    points, labels = em.k_means(x, 3, np.random.RandomState(0))
    assert len(np.unique(labels)) < 3
    np.testing.assert_allclose(points[labels], x, atol=1e-9)
    assert np.isfinite(points).all()
