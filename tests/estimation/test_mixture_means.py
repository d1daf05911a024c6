"""GaussianMean with mixture priors, all pooled: Theorem 6 (ICLR), EM, BIC."""

import math

import numpy as np
import pytest
import sklearn
from scipy import stats
from scipy.optimize import minimize
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV

from pfl_sklearn import GaussianMean
from pfl_sklearn.base import UnseenClientsWarning
from pfl_sklearn.metrics import ClientScorer
from pfl_sklearn.model_selection import ClientKFold
from pfl_sklearn.priors import DiscretePrior, GaussianMixturePrior
from tests.helpers.client_groups import POINTS, WEIGHTS, fit, make_groups, mse

MIXTURES = ["gaussian_mixture", "discrete"]


def test_theorem_6_by_hand():
    """Known points; unequal numbers of rows; y of one dimension."""
    y, groups = np.array([0.4, 0.1, 0.9, 0.8]), np.array(["a", "b", "b", "b"])
    prior = DiscretePrior(points=[[0.0], [1.0]], weights=[0.7, 0.3])
    model = fit(y, groups, prior, noise_variance=0.5)
    own, n = np.array([0.4, 0.6]), np.array([1, 3])
    odds = 0.3 / 0.7 * np.exp(n * (own**2 - (1 - own) ** 2) / (2 * 0.5))
    share = odds / (1 + odds)
    np.testing.assert_allclose(model.means_, share)
    np.testing.assert_allclose(model.stds_, np.sqrt(share * (1 - share)))
    np.testing.assert_allclose(model.responsibilities_, np.stack([1 - share, share], axis=1))
    np.testing.assert_array_equal(model.shrinkage_, [1.0, 1.0])
    assert (model.population_mean_, model.population_mean_std_) == (0.3, 0.0)
    assert model.icc_ == pytest.approx(0.21 / 0.71)
    mean, std = model.predict(np.zeros((1, 1)), groups=["b"], return_std=True)
    assert (mean[0], std[0]) == (model.means_[1], model.stds_[1])
    with pytest.warns(UnseenClientsWarning):
        mean, std = model.predict(np.zeros((1, 1)), groups=["new"], return_std=True)
    assert mean[0] == pytest.approx(0.3)
    assert std[0] == pytest.approx(math.sqrt(0.21))


def test_gaussian_components_by_hand():
    y, groups = np.array([0.4, 0.1, 0.9, 0.8]), np.array([1, 2, 2, 2])
    centres, spreads, weights = np.array([0.0, 1.0]), np.array([0.2, 0.4]), np.array([0.7, 0.3])
    prior = GaussianMixturePrior(means=centres[:, None], covariances=spreads, weights=weights)
    model = fit(y, groups, prior, noise_variance=0.5)
    for i, (own, s) in enumerate(((0.4, 0.5), (0.6, 0.5 / 3))):
        parts = weights * stats.norm(centres, np.sqrt(spreads + s)).pdf(own)
        r, a = parts / parts.sum(), spreads / (spreads + s)
        estimates = a * own + (1 - a) * centres
        assert model.means_[i] == pytest.approx(r @ estimates)
        variance = r @ (a * s + (estimates - r @ estimates) ** 2)
        assert model.stds_[i] ** 2 == pytest.approx(variance)
        assert model.shrinkage_[i] == pytest.approx(1 - r @ a)


def test_one_component_is_the_gaussian_prior():
    y, groups, _, _ = make_groups(200, spread=1.0)
    plain = fit(y, groups, method="ml", noise_variance=1.0, uncertainty="plug_in")
    one = fit(y, groups, GaussianMixturePrior(1), noise_variance=1.0)
    np.testing.assert_allclose(one.means_, plain.means_, atol=1e-4)
    np.testing.assert_allclose(one.shrinkage_, plain.shrinkage_, atol=1e-4)
    np.testing.assert_allclose(one.population_mean_, plain.population_mean_, atol=1e-4)
    np.testing.assert_allclose(one.population_mean_std_, plain.population_mean_std_, rtol=1e-4)
    assert one.log_likelihood_ == pytest.approx(plain.log_likelihood_, abs=1e-5)


def test_em_finds_the_maximum_of_the_marginal_likelihood():
    """Against a general optimizer started at the truth, and scipy's density of rows."""
    y, groups, _, _ = make_groups(60, points=POINTS[:2, :1], weights=[0.6, 0.4], spread=0.1)
    model = fit(y[:, 0], groups, "gaussian_mixture")
    noise = model.noise_variance_
    means = np.array([y[groups == k, 0].mean() for k in range(60)])
    sizes = np.bincount(groups)

    def negative(point):
        weight = 1 / (1 + np.exp(-point[0]))
        spread = np.exp(point[3:])[:, None] + noise / sizes
        pdf = np.exp(-((means - point[1:3, None]) ** 2) / spread / 2) / np.sqrt(2 * np.pi * spread)
        return -np.log(weight * pdf[0] + (1 - weight) * pdf[1]).sum()

    best = minimize(negative, [0.4, 0, 2, -2, -2], method="Nelder-Mead", options={"maxiter": 9000})
    rows = sum(
        stats.multivariate_normal(np.zeros(n), noise * np.eye(n)).logpdf(part - part.mean())
        - stats.norm(0, math.sqrt(noise / n)).logpdf(0)
        for n, part in ((n, y[groups == k, 0]) for k, n in enumerate(sizes))
    )
    assert model.log_likelihood_ == pytest.approx(rows - best.fun, abs=1e-3)


def test_noise_is_pooled_within_clients_whatever_the_components():
    y, groups, _, _ = make_groups()
    within = sum(
        ((part - part.mean(0)) ** 2).sum() for part in (y[groups == k] for k in range(400))
    )
    pooled = within / ((len(y) - 400) * 2)
    for k in (1, 3):
        np.testing.assert_allclose(fit(y, groups, DiscretePrior(k)).noise_variance_, [pooled] * 2)


@pytest.mark.parametrize("spread", [0.0, 0.2])
def test_estimated_priors_come_close_to_known_ones(spread):
    y, groups, theta, labels = make_groups(1500, spread=spread)
    known = GaussianMixturePrior(3, means=POINTS, covariances=spread, weights=WEIGHTS)
    oracle = fit(y, groups, known, noise_variance=1.0)
    found = fit(y, groups, GaussianMixturePrior(3))
    gaussian = fit(y, groups)
    assert mse(found.means_, theta) < 1.03 * mse(oracle.means_, theta)
    assert mse(oracle.means_, theta) < 0.85 * mse(gaussian.means_, theta)
    if spread == 0:
        assert mse(fit(y, groups, DiscretePrior(3)).means_, theta) < 1.02 * mse(
            oracle.means_, theta
        )
    right = found.responsibilities_.argmax(axis=1) == labels
    best = oracle.responsibilities_.argmax(axis=1) == labels
    assert right.mean() > best.mean() - 0.01
    np.testing.assert_allclose(found.responsibilities_.sum(axis=1), 1)


@pytest.mark.slow
def test_intervals_cover():
    y, groups, theta, _ = make_groups(1500, spread=0.2)
    lower, upper = fit(y, groups, GaussianMixturePrior(3)).credible_interval(0.9)
    assert ((lower <= theta) & (theta <= upper)).mean() == pytest.approx(0.9, abs=0.02)


@pytest.mark.slow
def test_a_fitted_prior_is_known():
    y, groups, _, _ = make_groups(200)
    first = fit(y, groups, GaussianMixturePrior(3))
    again = fit(y, groups, clone(first.prior_), noise_variance=first.noise_variance_)
    np.testing.assert_array_equal(again.means_, first.means_)
    np.testing.assert_array_equal(again.population_mean_std_, [0.0, 0.0])
    with sklearn.config_context(enable_metadata_routing=True):
        search = GridSearchCV(
            GaussianMean(DiscretePrior()),
            {"prior__n_components": [1, 3]},
            cv=ClientKFold(3, random_state=0),
            scoring=ClientScorer("neg_mean_squared_error"),
        ).fit(np.zeros((len(y), 1)), y, groups=groups)
    assert search.best_params_ == {"prior__n_components": 3}


@pytest.mark.parametrize("prior", MIXTURES)
def test_one_client_keeps_its_mean(prior):
    y = np.arange(6.0)
    model = fit(y, np.zeros(6), prior)
    assert model.means_ == pytest.approx([2.5])
    assert model.shrinkage_ == pytest.approx([0.0])
    assert model.stds_[0] == pytest.approx(math.sqrt(np.var(y, ddof=1) / 6))
    assert math.isnan(model.icc_)
    with pytest.warns(UnseenClientsWarning):
        assert math.isnan(model.predict([[0]], groups=[9], return_std=True)[1][0])


@pytest.mark.parametrize("prior", MIXTURES)
def test_weights_are_precisions(prior):
    """A row of weight 2 is the mean of two rows, as far as the client's mean goes."""
    y, groups, _, _ = make_groups(80, sizes=(2,))
    means = y.reshape(80, 2, 2).mean(axis=1)
    weighted = GaussianMean(prior, noise_variance=1.0).fit(
        means, means, groups=np.arange(80), sample_weight=np.full(80, 2.0)
    )
    plain = fit(y, groups, prior, noise_variance=1.0)
    np.testing.assert_allclose(weighted.means_, plain.means_, atol=1e-6)


def test_clients_without_any_noise():
    """Rows of a client all alike: no noise, so that clients are at points."""
    y = np.repeat([1.0, 1.0, 5.0, 5.0, 1.0], 2)
    model = fit(y, np.repeat(np.arange(5), 2), "discrete")
    np.testing.assert_allclose(model.means_, [1, 1, 5, 5, 1])
    assert model.noise_variance_ == 0.0


@pytest.mark.parametrize("noise", [None, 1.0])
@pytest.mark.parametrize("prior", [GaussianMixturePrior("bic"), DiscretePrior("bic")], ids=repr)
def test_clients_that_are_all_alike(prior, noise):
    model = fit(np.ones(6), np.repeat(np.arange(3), 2), prior, noise_variance=noise)
    np.testing.assert_array_equal(model.means_, 1.0)
    np.testing.assert_allclose(model.stds_, 0.0, atol=1e-6)
    assert model.population_mean_ == 1.0


@pytest.mark.parametrize(
    ("params", "error"),
    [
        ({"prior": "discrete", "method": "moments"}, r"method='moments'.*DiscretePrior"),
        ({"prior": "gaussian_mixture", "method": "printed"}, r"method='printed'.*GaussianMixture"),
        ({"method": "printed"}, r"method='printed'.*GaussianPrior"),
        ({"prior": DiscretePrior("bic"), "method": "printed"}, r"'bic'.*method='printed'"),
        ({"prior": DiscretePrior(9)}, r"n_components=9\b.*\b5\b"),
        ({"prior": DiscretePrior(9), "method": "printed"}, r"n_components=9\b.*\b5\b"),
        ({"prior": "discrete", "noise_variance": [1.0, 2.0]}, r"noise_variance.*\[1\.0, 2\.0\]"),
        (
            {"prior": DiscretePrior(2, points=[[1.0], [2.0]], weights=[0.5, 0.5])},
            r"points.*DiscretePrior.*\(2, 1\)",
        ),
        (
            {"prior": GaussianMixturePrior(2, weights=[0.5, 0.5])},
            r"Mixture.*weights=\[0\.5, 0\.5\]",
        ),
    ],
)
def test_bad_parameters(params, error):
    y, groups, _, _ = make_groups(5, sizes=(3,))
    model = GaussianMean(**params)
    before = dict(vars(model))
    with pytest.raises(ValueError, match=error):
        model.fit(np.zeros((len(y), 1)), y, groups=groups)
    assert vars(model) == before
