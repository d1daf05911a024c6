"""The published clustering algorithms for linear regression, against plain loops over clients."""

import re

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture

from pfl_sklearn import PersonalizedLinearRegression
from pfl_sklearn.priors import DiscretePrior, GaussianMixturePrior
from tests.helpers.printed_regression import fit, table


def cluster(X, y, codes, n_steps, rate, noise, discrete):
    """The listings of the clustering algorithms, client by client, from pseudo-inverse fits."""
    m, d = codes.max() + 1, X.shape[1]
    theta = np.array([np.linalg.pinv(X[codes == i]) @ y[codes == i] for i in range(m)])
    means = None
    for _ in range(n_steps):
        if discrete:
            start = "k-means++" if means is None else means
            result = KMeans(2, n_init=1, init=start, random_state=0).fit(theta)
            means, spread = result.cluster_centers_, None
            weights = np.bincount(result.labels_, minlength=2) / m
        else:
            result = GaussianMixture(
                2, covariance_type="spherical", means_init=means, random_state=0
            )
            result.fit(theta)
            means, spread, weights = result.means_, result.covariances_, result.weights_
        new = np.empty_like(theta)
        for i in range(m):
            features, target = X[codes == i], y[codes == i]
            if discrete:
                squares = [np.sum((target - features @ mean) ** 2) for mean in means]
                joint = weights * np.exp(-np.array(squares) / (2 * noise))
                new[i] = joint @ means / joint.sum()
                continue
            difference = theta[i] - means
            joint = weights * spread ** (-d / 2) * np.exp(-np.sum(difference**2, 1) / (2 * spread))
            pull = (joint / joint.sum() / spread) @ difference
            gradient = features.T @ (features @ theta[i] - target) / noise
            new[i] = theta[i] - rate * (gradient + pull)
        theta = new
    return theta, means, weights


@pytest.mark.parametrize("n_steps", [1, 2, 5])
@pytest.mark.parametrize("discrete", [True, False])
def test_clustering_is_the_listing(discrete, n_steps):
    X, y, codes = table(14, groups=True)
    prior = DiscretePrior(2, n_init=1) if discrete else GaussianMixturePrior(2)
    model = PersonalizedLinearRegression(
        prior,
        fit_intercept=False,
        method="printed",
        noise_variance=2.0,
        learning_rate=0.004,
        max_iter=n_steps,
        tol=1e-300,
    )
    with pytest.warns(ConvergenceWarning):
        model.fit(X, y, groups=codes)
    theta, means, weights = cluster(X, y, codes, n_steps, 0.004, 2.0, discrete)
    np.testing.assert_allclose(model.coef_, theta, atol=1e-8)
    result = model.prior_.known_mixture()
    np.testing.assert_allclose(result[0], means, atol=1e-8)
    np.testing.assert_allclose(result[2], weights, atol=1e-8)
    assert model.responsibilities_.shape == (14, 2)
    np.testing.assert_allclose(model.responsibilities_.sum(axis=1), 1.0)


def test_a_capped_learning_rate_is_said_with_both_numbers():
    """The cap is one over the largest curvature, at the smallest variance of a component."""
    X, y, codes = table(14, groups=True)
    model = PersonalizedLinearRegression(
        GaussianMixturePrior(2),
        fit_intercept=False,
        method="printed",
        noise_variance=2.0,
        learning_rate=0.5,
        max_iter=1,
        tol=1e9,
    )
    blocks = [X[codes == i] for i in range(codes.max() + 1)]
    start = [np.linalg.pinv(X[codes == i]) @ y[codes == i] for i in range(len(blocks))]
    clusters = GaussianMixture(2, covariance_type="spherical", random_state=0).fit(start)
    sharpest = max(np.linalg.eigvalsh(rows.T @ rows)[-1] for rows in blocks) / 2.0
    used = 1 / (sharpest + 1 / clusters.covariances_.min())
    with pytest.warns(UserWarning, match=rf"learning_rate=0\.5\b.*{re.escape(f'{used:.3g}')}"):
        model.fit(X, y, groups=codes)
    model.set_params(learning_rate=0.99 * used).fit(X, y, groups=codes)  # no warning
    model.set_params(learning_rate=None).fit(X, y, groups=codes)  # ours to choose


@pytest.mark.parametrize("prior", [GaussianMixturePrior(2), DiscretePrior(2)], ids=str)
def test_clusters_of_point_estimates_inherit_their_errors(prior):
    """With fewer rows than coefficients the listing is far from what the same model can do."""
    rng = np.random.default_rng(0)
    m, n, d = 40, 6, 20
    theta = rng.choice([-1.0, 1.0], size=(m, 1)) + 0.03 * rng.normal(size=(m, d))
    codes, X = np.repeat(np.arange(m), n), rng.normal(size=(m * n, d))
    y = np.einsum("nd,nd->n", X, theta[codes]) + 0.3 * rng.normal(size=m * n)
    printed = PersonalizedLinearRegression(
        prior, fit_intercept=False, method="printed", noise_variance=0.09, max_iter=20, tol=0.5
    ).fit(X, y, groups=codes)
    sound = fit(X, y, codes, prior, noise_variance=0.09)
    errors = [np.mean(np.sum((model.coef_ - theta) ** 2, axis=1)) for model in (printed, sound)]
    assert errors[0] > 20 * errors[1]


@pytest.mark.slow
def test_clustering_does_not_depend_on_the_origin_of_the_target():
    shift = 1e8
    X, y, codes = table(14, groups=True)
    model = PersonalizedLinearRegression(
        GaussianMixturePrior(2), method="printed", noise_variance=0.09, tol=1e-3
    ).fit(X, y, groups=codes)
    other = clone(model).fit(X, y + shift, groups=codes)
    np.testing.assert_allclose(other.coef_, model.coef_, atol=1e-4)
    np.testing.assert_allclose(other.intercept_ - shift, model.intercept_, atol=1e-4)


BIC = "n_components='bic'"


@pytest.mark.parametrize(
    ("prior", "params", "message"),
    [
        (GaussianMixturePrior("bic"), {}, rf"'printed'.*GaussianMixturePrior.*{BIC}"),
        (
            DiscretePrior(2, points=np.eye(2, 3), weights=[0.5, 0.5]),
            {},
            rf"method='printed'.*DiscretePrior.*{BIC}",
        ),
        (DiscretePrior(9), {}, r"n_components=9\b.*DiscretePrior.*\b8\b"),
        (DiscretePrior(), {"random": [1]}, r"random='all'"),
        (DiscretePrior(), {"solver": "gd"}, r"method='printed'.*solver='gd'.*DiscretePrior"),
        # The listings have no step for the noise variance.
        (
            GaussianMixturePrior(2),
            {"noise_variance": None},
            r"method='printed' needs noise_variance.*got noise_variance=None",
        ),
        (DiscretePrior(2), {"noise_variance": None}, r"got noise_variance=None"),
    ],
)
def test_what_clustering_does_not_do(prior, params, message):
    X, y, codes = table()
    params = {"method": "printed", "noise_variance": 1.0, **params}
    model = PersonalizedLinearRegression(prior, fit_intercept=False, **params)
    before = dict(vars(model))
    with pytest.raises(ValueError, match=message):
        model.fit(X, y, groups=codes)
    assert vars(model) == before
