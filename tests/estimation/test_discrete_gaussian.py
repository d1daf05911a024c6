"""GaussianMean with discrete Gaussian noise, which no seed can repeat."""

import math
import sys
import warnings

import numpy as np
import pytest
import sklearn
from scipy.optimize import brentq
from sklearn.model_selection import GridSearchCV

from pfl_sklearn import GaussianMean
from pfl_sklearn.datasets import make_gaussian_clients
from pfl_sklearn.model_selection import ClientKFold
from pfl_sklearn.priors import GaussianMixturePrior, GaussianPrior
from pfl_sklearn.privacy import (
    DiscreteGaussianMechanism,
    PrivacyLedger,
    PrivacyWarning,
    events_epsilon,
    search_cost,
)
from pfl_sklearn.privacy._accounting._concentrated import zcdp_delta
from pfl_sklearn.privacy._mechanisms import _discrete_gaussian
from pfl_sklearn.privacy.auditing import gdp_lower_bound

DISCRETE = {"mechanism": "discrete_gaussian", "trust": "local", "clip_norm": 0.6}
KNOWN = {"prior": GaussianPrior(covariance=0.01), "noise_variance": 0.25}


def fit(clients, **params):
    return GaussianMean(**params).fit(clients.data, clients.target, groups=clients.groups)


def mse(model, clients):
    return np.mean((model.means_ - clients.client_means) ** 2)


def paper_clients(n_clients, seed=0):
    return make_gaussian_clients(n_clients, 15, between_std=0.1, noise_std=0.5, random_state=seed)


@pytest.mark.parametrize("n_bits", [None, 10])
def test_the_variance_of_noise_and_rounding_goes_into_the_shrinkage(n_bits):
    clients = paper_clients(2000)
    model = fit(clients, **KNOWN, **DISCRETE, epsilon=2.0, n_bits=n_bits)
    mechanism = DiscreteGaussianMechanism(1, 2.0, 2.0, 1e-5, n_bits)
    assert mechanism.noise_variance == mechanism.noise_std**2 + mechanism.grid**2 / 4
    others = (0.01 + 0.25 / 15 + mechanism.noise_variance * 0.6**2) / 1999
    own = (0.01 + others) / (0.01 + others + 0.25 / 15)
    assert model.shrinkage_[0] == pytest.approx(1 - own, rel=1e-9)
    assert model.privacy_.noise_std == mechanism.noise_std
    assert model.privacy_.sensitivity == mechanism.sensitivity
    assert f"{mechanism.bits} bits per message" in model.privacy_.mechanism


@pytest.mark.slow
def test_the_error_is_the_stated_one():
    """Two outputs and everything else known: the released mean scatters as its variance says."""
    clients = make_gaussian_clients(50, 5, n_outputs=2, random_state=0)
    means = []
    for _ in range(300):
        model = fit(
            clients,
            prior=GaussianPrior(covariance=1.0),
            noise_variance=1.0,
            **{**DISCRETE, "clip_norm": 5.0},
            epsilon=4.0,
        )
        means.append(model.population_mean_)
    extra = DiscreteGaussianMechanism(2, 2.0, 4.0, 1e-5).noise_variance * 25 / 50
    # Chi-square with 299 degrees of freedom, twice: fails by chance in fewer than 1 of 5e6 runs.
    np.testing.assert_allclose(np.var(means, axis=0), extra, rtol=6 * math.sqrt(2 / 300))


def test_unknown_variances_are_released_too():
    clients = paper_clients(5000)
    model = fit(clients, **DISCRETE, epsilon=12.0)
    # Chances of failing: 1e-13, since .026 is one standard deviation; and 1e-8, from the tail of
    # the error in 2,000 fits on continuous noise, 0.39 of the local one in the mean.
    assert model.noise_variance_ == pytest.approx(0.25, rel=0.2)
    assert mse(model, clients) < 0.75 * 0.25 / 15


def test_mixtures():
    y = np.repeat([0.0, 1.0], 500) + np.random.default_rng(0).normal(size=1000) * 0.1
    params = {**DISCRETE, "clip_norm": 1.5, "epsilon": 100.0, "noise_variance": 0.01}
    model = GaussianMean(GaussianMixturePrior(), **params).fit(y[:, None], y, groups=range(1000))
    # Noise moves a mean by .017 (standard deviation), and 0.1 is 5.6 of them or more from where the
    # means lie without it: fails by chance in fewer than 1 of 1e7 runs.
    np.testing.assert_allclose(np.sort(model.prior_.means[:, 0]), [0, 1], atol=0.1)
    assert model.privacy_.accountant.startswith("zero-concentrated")


def test_no_seed_repeats_the_noise():
    """In three coordinates: one alone, on its grid, is the same by chance in 1 of 10,000 pairs."""
    clients = make_gaussian_clients(30, 15, n_outputs=3, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, second = (
            fit(clients, **KNOWN, **DISCRETE, epsilon=2.0, random_state=0) for _ in range(2)
        )
    assert np.any(first.population_mean_ != second.population_mean_)
    assert first.privacy_.noise_reproducible is False
    assert first.privacy_.warnings == ()
    assert "opendp draws the noise exactly" in first.privacy_.assumptions[-1]


def test_ledgers_count_epsilon_and_delta_and_no_seed(tmp_path):
    ledger = PrivacyLedger(tmp_path / "ledger.jsonl", budget=(4.5, 1e-5))
    clients = paper_clients(30)
    params = {**KNOWN, **DISCRETE, "delta": 1e-6, "random_state": 0, "ledger": ledger}
    for _ in range(2):
        fit(clients, epsilon=2.0, **params)
    assert [entry.keys() & {"seed", "seed_of"} for entry in ledger.entries] == [set()] * 2
    assert 2.0 < ledger.total() <= 4.0 + 1e-9
    with pytest.raises(ValueError, match=r"above the budget"):
        fit(clients, epsilon=2.0, **params)
    model = GaussianMean(epsilon=2.0, **params)
    assert events_epsilon(model._privacy_events(), 1e-6, "replace_one") == pytest.approx(2.0)
    assert math.isinf(events_epsilon(model._privacy_events(), 1e-5, "add_remove"))


def test_a_search_with_a_seed_is_not_said_to_repeat_noise():
    clients = paper_clients(30)
    model = GaussianMean(**KNOWN, **DISCRETE, delta=1e-7, random_state=0)
    search = GridSearchCV(model, {"epsilon": [0.5, 1.0]}, cv=ClientKFold(2))
    routed = sklearn.config_context(enable_metadata_routing=True)
    with routed, pytest.warns(PrivacyWarning) as caught:
        search.fit(clients.data, clients.target, groups=clients.groups)
    assert not any("random_state" in str(warning.message) for warning in caught)
    assert 1.0 < search_cost(search, delta=1e-5).epsilon <= 4.0


def test_without_privacy_it_is_the_ordinary_fit(monkeypatch):
    monkeypatch.setitem(sys.modules, "opendp.prelude", None)
    clients = paper_clients(30)
    np.testing.assert_array_equal(fit(clients, **DISCRETE).means_, fit(clients).means_)


def test_what_is_refused(monkeypatch, tmp_path):
    clients = paper_clients(30)
    with pytest.raises(ValueError, match=r"discrete_gaussian.*trust='local'.*'central'"):
        fit(clients, **{**DISCRETE, "trust": "central"}, epsilon=1.0)
    ledger = PrivacyLedger(tmp_path / "ledger.jsonl", budget=(1.0, 1e-5))
    with pytest.raises(ValueError, match=r"n_bits=4.*at least 8"):
        fit(clients, **KNOWN, **DISCRETE, epsilon=1.0, n_bits=4, ledger=ledger)
    monkeypatch.setitem(sys.modules, "opendp.prelude", None)
    with pytest.raises(ImportError, match=r"pip install opendp"):
        fit(clients, **DISCRETE, epsilon=1.0, ledger=ledger)
    assert not ledger.entries


# Audit: mu = 2, as if the noise were continuous ---------------------------------------------------

EPSILON = brentq(lambda epsilon: math.log(zcdp_delta(2.0, epsilon) / 1e-5), 0.5, 50.0)


def attacked_mu():
    """Lower bound on mu from 600 clients a side, all of them far outside the ball.

    No seed repeats the fits. By the binomial distributions of the counts, averaged over thresholds,
    the bound is above 2 with a chance of 2e-8 and below .5 with one of 3e-9 where mu is 2, and not
    above 2 with one of 5e-14 where mu is 4.
    """
    released, privatize = [], DiscreteGaussianMechanism.privatize

    def spy(self, messages, rng):
        released.append(privatize(self, messages, rng))
        return released[-1]

    params = {**DISCRETE, "prior": GaussianPrior(covariance=1.0), "noise_variance": 1.0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiscreteGaussianMechanism, "privatize", spy)
        for value in (30.0, -30.0):
            y = np.full(600, value)
            GaussianMean(epsilon=EPSILON, **params).fit(y[:, None], y, groups=np.arange(600))
    return gdp_lower_bound(*(messages[:, 0] for messages in released), alpha=1e-4)


def test_releases_keep_their_promise_and_half_the_noise_does_not(monkeypatch):
    assert 0.5 < attacked_mu() <= 2.0
    draw = _discrete_gaussian.with_discrete_gaussian
    monkeypatch.setattr(
        _discrete_gaussian, "with_discrete_gaussian", lambda values, scale: draw(values, scale / 2)
    )
    assert attacked_mu() > 2.0
