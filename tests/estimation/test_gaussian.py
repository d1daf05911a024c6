"""GaussianMean: the theorems, the limits, known parameters, several outputs, bad input."""

import math

import numpy as np
import pytest
import sklearn
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV

from pfl_sklearn import GaussianMean
from pfl_sklearn.datasets import make_gaussian_clients
from pfl_sklearn.metrics import ClientScorer
from pfl_sklearn.model_selection import ClientKFold
from pfl_sklearn.priors import BetaPrior, GaussianPrior


def fit(clients, **params):
    return GaussianMean(**params).fit(clients.data, clients.target, groups=clients.groups)


def mse(model, clients):
    return np.mean((model.means_ - clients.client_means) ** 2)


def test_theorem_1():
    """MSE of equal n with known variances is s^2 ((1 - a) / m + a); every output is a draw."""
    m, n, between, noise = 8, 4, 0.3, 1.0
    rng = np.random.default_rng(0)
    theta = np.sqrt(between) * rng.normal(size=(m, 2000))
    y = np.repeat(theta, n, axis=0) + np.sqrt(noise) * rng.normal(size=(m * n, 2000))
    model = GaussianMean(GaussianPrior(covariance=between), noise_variance=noise)
    model.fit(np.zeros((m * n, 1)), y, groups=np.repeat(np.arange(m), n))
    errors = np.mean((model.means_ - theta) ** 2, axis=0)
    own = between / (between + noise / n)
    risk = noise / n * ((1 - own) / m + own)
    assert np.mean(errors) == pytest.approx(risk, abs=4 * np.std(errors) / np.sqrt(len(errors)))
    np.testing.assert_allclose(model.stds_**2, risk)
    np.testing.assert_allclose(model.shrinkage_, 1 - own)


def test_estimated_variances_come_close_to_known_ones():
    clients = make_gaussian_clients(2000, 15, between_std=0.1, noise_std=0.5, random_state=0)
    known = fit(clients, prior=GaussianPrior(covariance=0.01), noise_variance=0.25)
    assert mse(known, clients) == pytest.approx(0.00625, rel=0.1)
    for method in ("reml", "ml", "moments"):
        assert mse(fit(clients, method=method), clients) < 1.02 * mse(known, clients)
    assert np.mean((known.local_means_ - clients.client_means) ** 2) > 2.4 * mse(known, clients)


def test_limits_of_the_prior_variance():
    clients = make_gaussian_clients(6, [1, 2, 3, 4, 5, 6], random_state=0)
    pooled = fit(clients, prior=GaussianPrior(covariance=0.0))
    np.testing.assert_allclose(pooled.means_, np.full(6, clients.target.mean()))
    np.testing.assert_array_equal(pooled.shrinkage_, 1)
    local = fit(clients, prior=GaussianPrior(covariance=1e12))
    infinite = fit(clients, prior=GaussianPrior(covariance=math.inf))
    np.testing.assert_array_equal(infinite.means_, infinite.local_means_)
    np.testing.assert_allclose(infinite.stds_, local.stds_)
    assert infinite.population_mean_ == pytest.approx(local.population_mean_)
    assert (infinite.icc_, infinite.population_mean_std_) == (1.0, math.inf)
    with pytest.raises(ValueError, match=r"covariance.*\binf"):
        fit(clients, prior=GaussianPrior(covariance=math.inf), epsilon=1.0, clip_norm=1.0)
    own = [clients.target[clients.groups == k].mean() for k in range(6)]
    np.testing.assert_allclose(local.means_, own, atol=1e-10)
    np.testing.assert_allclose(local.local_means_, own)


def test_a_fitted_prior_can_be_passed_back_in():
    clients = make_gaussian_clients(30, 4, random_state=0)
    first = fit(clients)
    again = fit(clients, prior=first.prior_, noise_variance=first.noise_variance_)
    np.testing.assert_allclose(again.means_, first.means_)
    assert again.population_mean_std_ == 0.0
    copy = clone(first.prior_)
    np.testing.assert_array_equal(copy.covariance, first.prior_.covariance)


def test_a_known_prior_stays_known_inside_a_search():
    clients = make_gaussian_clients(20, 6, random_state=0)
    with sklearn.config_context(enable_metadata_routing=True):
        search = GridSearchCV(
            GaussianMean(GaussianPrior(mean=[2.0])),
            {"prior__covariance": [0.5, 4.0]},
            cv=ClientKFold(3, random_state=0),
            scoring=ClientScorer("neg_mean_squared_error"),
        ).fit(clients.data, clients.target, groups=clients.groups)
    best = search.best_estimator_
    assert best.population_mean_ == 2.0
    assert best.prior_.covariance[0, 0] == search.best_params_["prior__covariance"]


def test_unequal_sizes_by_hand():
    y, groups = np.array([1.0, 5.0, 7.0, 6.0]), np.array(["a", "b", "b", "b"])
    model = GaussianMean(GaussianPrior(covariance=2.0), noise_variance=3.0)
    model.fit(y[:, None], y, groups=groups)
    weights = 1 / (2 + np.array([3.0, 1.0]))
    mean = weights @ [1, 6] / weights.sum()
    own = 2 * weights
    np.testing.assert_allclose(model.means_, own * [1, 6] + (1 - own) * mean)
    assert model.population_mean_std_ == pytest.approx(weights.sum() ** -0.5)
    expected = own * [3, 1] + (1 - own) ** 2 / weights.sum()
    np.testing.assert_allclose(model.stds_**2, expected)
    means, stds = model.predict(y[:3, None], groups=["b", "new", "a"], return_std=True)
    np.testing.assert_allclose(means, [model.means_[1], mean, model.means_[0]])
    np.testing.assert_allclose(stds**2, [expected[1], 2 + 1 / weights.sum(), expected[0]])


def test_precision_weights():
    """A row of weight 2 is a mean of two rows, as far as the client's mean goes."""
    y, groups = np.array([0.0, 2.0, 4.0, 6.0]), np.array([1, 1, 2, 2])
    model = GaussianMean(GaussianPrior(covariance=1.0), noise_variance=1.0)
    model.fit(y[:, None], y, groups=groups, sample_weight=[1.0, 3.0, 2.0, 2.0])
    np.testing.assert_allclose(model.local_means_, [1.5, 5.0])
    np.testing.assert_allclose(model.shrinkage_, np.full(2, 0.2))


def test_several_outputs():
    clients = make_gaussian_clients(50, 5, n_outputs=3, random_state=0)
    model = fit(clients)
    assert model.means_.shape == model.stds_.shape == model.shrinkage_.shape == (50, 3)
    assert np.ptp(np.diag(model.prior_.covariance)) == 0
    assert isinstance(model.noise_variance_, float)
    assert len(model.summary()) == 150
    assert model.predict(clients.data[:3], groups=[0, 1, 99]).shape == (3, 3)
    single = make_gaussian_clients(50, 5, random_state=0)
    column = GaussianMean().fit(single.data, single.target[:, None], groups=single.groups)
    assert column.means_.shape == (50, 1)
    np.testing.assert_array_equal(column.means_[:, 0], fit(single).means_)


def test_diagonal_prior_is_one_model_per_output():
    clients = make_gaussian_clients(40, 5, n_outputs=2, random_state=0)
    clients.target[:, 1] *= 100
    model = fit(clients, prior=GaussianPrior(covariance_type="diag"))
    for k in range(2):
        alone = GaussianMean().fit(clients.data, clients.target[:, k], groups=clients.groups)
        np.testing.assert_allclose(model.means_[:, k], alone.means_)
        np.testing.assert_allclose(model.stds_[:, k], alone.stds_)
        assert model.noise_variance_[k] == pytest.approx(alone.noise_variance_)
        assert model.icc_[k] == pytest.approx(alone.icc_)
        assert model.prior_.covariance[k, k] == pytest.approx(alone.prior_.covariance[0, 0])


def test_intervals_cover():
    clients = make_gaussian_clients(4000, 3, random_state=1)
    model = fit(clients)
    lower, upper = model.credible_interval(0.9)
    inside = (lower <= clients.client_means) & (clients.client_means <= upper)
    assert inside.mean() == pytest.approx(0.9, abs=4 * np.sqrt(0.09 / 4000))


def test_one_row_per_client_needs_the_noise_variance():
    y = np.arange(5.0)
    with pytest.raises(ValueError, match=r"one row.*n_samples = 5\b.*noise_variance"):
        GaussianMean().fit(y[:, None], y, groups=y)
    model = GaussianMean(noise_variance=0.5).fit(y[:, None], y, groups=y)
    assert model.prior_.covariance[0, 0] == pytest.approx(y.var(ddof=1) - 0.5, rel=1e-6)


QUANTIZER = {"mechanism": "quantizer", "n_bits": 2, "clip_norm": 1.0, "noise_variance": 1.0}


@pytest.mark.parametrize(
    ("params", "error"),
    [
        ({"epsilon": 1.0}, r"clip_norm.*epsilon"),
        ({"epsilon": 1.0, "clip_norm": 1.0, "delta": 0.0}, r"delta.*\b0\b"),
        ({**QUANTIZER, "epsilon": 1.0}, r"mechanism='quantizer'.*epsilon=1\.0"),
        ({**QUANTIZER, "n_bits": None}, r"n_bits.*mechanism='quantizer'.*None"),
        ({**QUANTIZER, "clip_norm": None}, r"clip_norm.*mechanism='quantizer'.*None"),
        ({**QUANTIZER, "noise_variance": None}, r"noise_variance.*mechanism='quantizer'.*None"),
        ({"epsilon": 1.0, "clip_norm": 1.0, "center": [1.0, 2.0]}, r"center.*\(1,\).*\[1\.0, 2"),
        ({"noise_variance": [1.0, 2.0]}, r"noise_variance.*\(1,\).*\[1\.0, 2\.0\]"),
        ({"prior": BetaPrior()}, r"prior=BetaPrior\(\).*GaussianMean"),
        ({"prior": GaussianPrior(covariance=-1.0)}, r"covariance.*GaussianPrior.*-1\.0"),
        ({"prior": GaussianPrior(covariance=math.nan)}, r"covariance.*GaussianPrior.*\bnan\b"),
        ({"prior": GaussianPrior(mean=[1.0, 2.0])}, r"mean.*GaussianPrior.*\[1\.0, 2\.0\]"),
        ({"prior": GaussianPrior(covariance_type="full")}, r"covariance_type='full'.*GaussianMean"),
        (
            {"prior": GaussianPrior(covariance_type="diag"), "epsilon": 1.0, "clip_norm": 1.0},
            r"covariance_type='diag'.*epsilon.*noise_variance",
        ),
    ],
)
def test_bad_parameters(params, error):
    clients = make_gaussian_clients(5, 3, random_state=0)
    model = GaussianMean(**params)
    before = dict(vars(model))
    with pytest.raises(ValueError, match=error):
        model.fit(clients.data, clients.target, groups=clients.groups)
    assert vars(model) == before


def test_targets_of_the_wrong_kind():
    with pytest.raises(ValueError, match="dim 3"):
        GaussianMean().fit(np.zeros((2, 1)), np.zeros((2, 1, 1)), groups=[1, 2])
    with pytest.raises(ValueError, match="could not convert"):
        GaussianMean().fit(np.zeros((2, 1)), ["low", "high"], groups=[1, 2])
