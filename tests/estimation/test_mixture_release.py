"""GaussianMean with mixture priors through releases: figures, fallbacks, what is known and said."""

import math
import warnings

import numpy as np
import pytest

from pfl_sklearn import GaussianMean, privacy_of
from pfl_sklearn.estimation import _mean_releases, _mixture_release as release
from pfl_sklearn.priors import DiscretePrior, GaussianMixturePrior
from pfl_sklearn.privacy import GaussianMechanism, PrivateClustering, calibrate_noise, gdp_epsilon
from tests.helpers.blinded import blind, what_leaves
from tests.helpers.draws import ROUNDING, Ones
from tests.helpers.slow import slow

pytestmark = pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")


def make_groups(m, d=10, k=3, sampling=0.05, spread=0.0, sizes=(4,), seed=0, weights=None):
    """Clients at k points of norm 1; client means scatter with `sampling` per coordinate."""
    rng = np.random.default_rng(seed)
    points = rng.normal(size=(k, d))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    theta = points[rng.choice(k, m, p=weights)] + math.sqrt(spread) * rng.normal(size=(m, d))
    n_rows = np.resize(sizes, m)
    noise = sampling / np.mean(1 / n_rows)
    groups = np.repeat(np.arange(m), n_rows)
    y = theta[groups] + math.sqrt(noise) * rng.normal(size=(len(groups), d))
    return y, groups, theta, noise


def fit(y, groups, prior, noise, **params):
    model = GaussianMean(prior, noise_variance=noise, **{"random_state": 0, **params})
    return model.fit(np.zeros((len(y), 1)), y, groups=groups)


def mse(estimates, theta):
    return np.mean(np.sum((estimates - theta) ** 2, axis=1))


def is_local(model):
    return np.array_equal(model.means_, model.local_means_)


def quietly(*args, **params):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*epsilon.*clip_norm")
        return fit(*args, **params)


@pytest.mark.slow
def test_central_trust_at_small_epsilon():
    """10,000 clients, d = 10, three points, epsilon = .5: below .011 where local has .50."""
    errors = []
    for seed in range(3):
        y, groups, theta, noise = make_groups(10_000, seed=seed)
        private = fit(
            y, groups, DiscretePrior(3), noise, epsilon=0.5, clip_norm=2.0, random_state=seed
        )
        plain = fit(y, groups, DiscretePrior(3), noise)
        estimates = (y.reshape(-1, 4, 10).mean(axis=1), plain.means_, private.means_)
        errors.append([mse(means, theta) for means in estimates])
    local, plain, private = np.mean(errors, axis=0)
    assert local == pytest.approx(0.5, rel=0.02)
    assert plain < 0.0045
    assert private < 0.011


@pytest.mark.parametrize("prior", [DiscretePrior(3), GaussianMixturePrior(3)], ids=repr)
def test_a_thousand_clients_need_a_larger_epsilon(prior):
    y, groups, theta, noise = make_groups(1000, seed=1)
    assert mse(fit(y, groups, prior, noise, epsilon=4.0, clip_norm=2.0).means_, theta) < 0.05
    with pytest.warns(UserWarning, match=r"clusters.*epsilon.*clip_norm"):
        model = fit(y, groups, prior, noise, epsilon=0.1, clip_norm=2.0)
    assert is_local(model)
    np.testing.assert_array_equal(model.shrinkage_, 0.0)
    np.testing.assert_allclose(model.stds_, math.sqrt(0.05), rtol=1e-9)


@pytest.mark.slow
def test_starts_are_selected(monkeypatch):
    """One start alone ends, now and then, with two groups in one cluster."""
    errors = {1: [], 32: []}
    for n_candidates, found in errors.items():
        monkeypatch.setattr(
            _mean_releases,
            "PrivateClustering",
            lambda *args, n=n_candidates, **more: PrivateClustering(*args, n_candidates=n, **more),
        )
        for seed in range(12):
            y, groups, theta, noise = make_groups(5000, k=4, sampling=0.02, seed=seed)
            model = quietly(
                y, groups, DiscretePrior(4), noise, epsilon=4.0, clip_norm=1.5, random_state=seed
            )
            found.append(mse(model.means_, theta))
    assert np.mean(errors[32]) < 0.5 * np.mean(errors[1])


@pytest.mark.slow
@pytest.mark.parametrize("trust", ["central", "local"])
@pytest.mark.parametrize("prior", [DiscretePrior(2, n_init=2), GaussianMixturePrior(2, n_init=2)])
def test_never_much_worse_than_local(prior, trust):
    """Too few points for the groups, no groups at all, too few clients: over seeds and epsilons."""
    ratios = []
    for seed in range(1):
        for epsilon in (0.3, 2.0, 10.0):
            for m, k, spread in ((1000, 5, 0.0), (1000, 1, 0.5), (40, 2, 0.0)):
                y, groups, theta, noise = make_groups(m, 2, k, spread=spread, seed=seed)
                params = {"epsilon": epsilon, "trust": trust, "random_state": seed}
                model = quietly(y, groups, prior, noise, clip_norm=2.0, **params)
                ratios.append(mse(model.means_, theta) / mse(model.local_means_, theta))
    assert np.max(ratios) < 1.1
    assert np.mean(ratios) < 1.0 + 1e-9


@pytest.mark.parametrize("sizes", [(4,), (2, 4, 12)])
@pytest.mark.parametrize("trust", ["central", "local"])
def test_much_epsilon_is_no_privacy(trust, sizes):
    y, groups, theta, noise = make_groups(900, 3, sizes=sizes)
    plain = fit(y, groups, DiscretePrior(3), noise)
    model = fit(y, groups, DiscretePrior(3), noise, epsilon=1e8, clip_norm=5.0, trust=trust)
    assert mse(model.means_, plain.means_) < 0.05 * mse(plain.local_means_, theta)
    assert model.responsibilities_.shape == (900, 3)


@pytest.mark.parametrize(("trust", "m"), [("central", 2500), *slow([("local", 6000)])])
def test_spreads_are_estimated_or_kept(trust, m):
    y, groups, theta, noise = make_groups(m, 3, spread=0.03, sampling=0.02)
    params = {"epsilon": 60.0, "clip_norm": 2.0, "trust": trust}
    model = fit(y, groups, GaussianMixturePrior(3), noise, **params)
    spreads = np.einsum("kdd->k", model.prior_.covariances) / 3
    np.testing.assert_allclose(spreads, 0.03, atol=0.008 if trust == "central" else 0.02)
    assert mse(model.means_, theta) < 1.15 * mse(
        fit(y, groups, GaussianMixturePrior(3), noise).means_, theta
    )
    given = fit(y, groups, GaussianMixturePrior(3, covariances=0.03), noise, **params)
    np.testing.assert_array_equal(given.prior_.covariances, np.tile(0.03 * np.eye(3), (3, 1, 1)))
    assert is_local(given) is False


@pytest.mark.slow
def test_local_trust_with_enough_epsilon():
    y, groups, theta, noise = make_groups(20_000, 1, 2, sampling=0.2)
    prior = DiscretePrior(2)
    model = fit(y, groups, prior, noise, epsilon=10.0, clip_norm=1.8, trust="local")
    theta, own = theta[:, 0], model.local_means_[:, 0]
    assert np.mean((model.means_[:, 0] - theta) ** 2) < 0.5 * np.mean((own - theta) ** 2)
    bic = fit(y, groups, DiscretePrior("bic"), noise, epsilon=10.0, clip_norm=1.8, trust="local")
    assert bic.prior_.n_components == 2
    with pytest.warns(UserWarning, match=r"BIC.*epsilon.*prior='gaussian'"):
        assert is_local(fit(y, groups, prior, noise, epsilon=0.1, clip_norm=2.0, trust="local"))


def test_one_point_for_everybody_is_not_believed():
    """BIC may take one point; a spread that the reports show speaks against it."""
    y, groups, _, noise = make_groups(4000, 2, 1, spread=0.5)
    with pytest.warns(UserWarning, match=r"BIC.*epsilon.*prior='gaussian'"):
        model = fit(y, groups, DiscretePrior(1), noise, epsilon=8.0, clip_norm=2.0, trust="local")
    assert is_local(model)


@pytest.mark.slow
def test_errors_of_the_means_are_those_over_many_reports():
    """Empirical variance of the fitted means of a noisy mixture against the stated one."""
    points, found, stated = np.array([[0.0, 0.0], [2.0, 1.0]]), [], []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        reports = points[rng.choice(2, 1500, p=[0.7, 0.3])] + rng.normal(size=(1500, 2))
        fitted = DiscretePrior(2, n_init=2).fit_noisy(reports, np.ones(1500))
        found.append(fitted.points)
        stated.append(release.mean_errors(fitted, reports, np.ones(1500)))
    np.testing.assert_allclose(np.mean(stated, 0), np.var(found, axis=0).mean(axis=1), rtol=0.35)


@pytest.mark.slow
def test_the_centre_moves_with_the_data():
    y, groups, _, noise = make_groups(1000, 2)
    for trust in ("central", "local"):
        params = {"epsilon": 40.0, "clip_norm": 2.0, "trust": trust}
        here = fit(y, groups, DiscretePrior(3), noise, **params)
        there = fit(y + 1000, groups, DiscretePrior(3), noise, center=1000.0, **params)
        np.testing.assert_allclose(there.means_ - 1000, here.means_, atol=1e-5)


def test_values_of_any_size():
    """Clients outside the ball, and one that overflows, are theirs alone."""
    y, groups, _, noise = make_groups(1000, 2)
    y[groups == 0] = 1e6
    y[groups == 1] = 1e200
    for trust in ("central", "local"):
        prior = DiscretePrior(3)
        model = quietly(y, groups, prior, noise, epsilon=20.0, clip_norm=2.0, trust=trust)
        assert np.abs(model.prior_.points).max() < 4
        assert np.isfinite(model.means_[2:]).all()


def test_nothing_is_released_of_a_known_mixture():
    y, groups, _, noise = make_groups(50, 2)
    prior = DiscretePrior(2, points=[[0.0, 1.0], [1.0, 0.0]], weights=[0.5, 0.5])
    model = fit(y, groups, prior, noise, epsilon=1.0, clip_norm=1.0)
    assert model.privacy_.epsilon == 0
    assert "responsibilities_" in model.privacy_.not_released
    np.testing.assert_allclose(model.means_, fit(y, groups, prior, noise).means_, atol=1e-12)


def test_quantized_means():
    y, groups, theta, noise = make_groups(2000, 2, sampling=0.02)
    plain = fit(y, groups, DiscretePrior(3), noise)
    model = fit(y, groups, DiscretePrior(3), noise, mechanism="quantizer", clip_norm=2.0, n_bits=6)
    assert mse(model.means_, theta) < 1.3 * mse(plain.means_, theta)
    assert privacy_of(model).epsilon == math.inf
    assert "responsibilities_" in model.privacy_.not_released


@pytest.mark.parametrize("trust", ["central", "local"])
def test_reports(trust):
    y, groups, _, noise = make_groups(200, 2)
    model = quietly(y, groups, DiscretePrior(3), noise, epsilon=3.0, clip_norm=2.0, trust=trust)
    report = model.privacy_
    assert (report.epsilon, report.delta, report.trust) == (3.0, 1e-5, trust)
    assert {"prior_", "population_mean_"} <= set(report.released)
    assert {"means_", "responsibilities_"} <= set(report.not_released)
    assert report.rounds == (8 if trust == "central" else 1)
    assert report.epsilon_under == ()
    released = model.release()
    assert not hasattr(released, "responsibilities_")
    assert released.predict(np.zeros((1, 1)))[0] == pytest.approx(model.population_mean_)
    assert type(report).from_dict(report.to_dict()) == report


def test_the_noise_that_is_drawn_spends_the_budget(monkeypatch):
    """Noise over sensitivity of all releases composes to epsilon; every draw is 1."""
    drawn, privatize = [], GaussianMechanism.privatize

    def spy(self, messages, rng):
        drawn.append((privatize(self, messages, Ones()) - messages).mean())
        return privatize(self, messages, rng)

    monkeypatch.setattr(GaussianMechanism, "privatize", spy)
    y, groups, _, noise = make_groups(2000, 10, seed=2)
    model = fit(y, groups, GaussianMixturePrior(3), noise, epsilon=2.0, clip_norm=2.0)
    q = 0.5
    sensitivities = [math.sqrt(4.5), math.sqrt(32), *[math.sqrt(4 + 2 * q**2)] * 5, 1.0]
    mu = np.linalg.norm(np.array(sensitivities) / drawn)
    assert gdp_epsilon(mu, 1e-5) == pytest.approx(2.0, rel=1e-5)
    assert model.privacy_.noise_std == pytest.approx(drawn[-2], rel=ROUNDING)


@pytest.mark.parametrize(
    ("prior", "trust"), [(DiscretePrior(2), "local"), (GaussianMixturePrior(2), "central")], ids=str
)
def test_the_mechanism_is_the_only_way_out_of_a_client(prior, trust, monkeypatch):
    """With mechanisms that ignore their input, nobody learns what one client's rows hold."""
    blind(monkeypatch)
    y, groups, _, noise = make_groups(40, 1)
    how = {"epsilon": 8.0, "clip_norm": 2.0, "trust": trust}

    def private(X, y, groups):
        return fit(y, groups, prior, noise, **how)

    found = []
    for value in (0.0, -30.0, 1e200):
        y[groups == 3] = value
        found.append(what_leaves(private, np.zeros((len(y), 1)), y, groups, 3))
    assert found[1:] == found[:1] * 2


def test_messages_of_local_trust_are_clipped_and_paid_for(monkeypatch):
    """Two vectors in the unit ball are at most 2 apart."""
    sent, privatize = [], GaussianMechanism.privatize

    def spy(self, messages, rng):
        sent.append(np.linalg.norm(messages, axis=1).max())
        return privatize(self, messages, rng)

    monkeypatch.setattr(GaussianMechanism, "privatize", spy)
    y, groups, _, noise = make_groups(50, 2)
    how = {"epsilon": 3.0, "clip_norm": 0.5, "trust": "local"}
    report = quietly(y, groups, DiscretePrior(3), noise, **how).privacy_
    assert sent == [pytest.approx(1.0)]
    assert report.noise_std == pytest.approx(calibrate_noise(3.0, 1e-5, 2.0))


@pytest.mark.parametrize(
    ("prior", "params", "error"),
    [
        ("discrete", {"noise_variance": None}, r"noise_variance.*None"),
        (DiscretePrior("bic"), {}, r"n_components='bic'.*trust='central'"),
        ("discrete", {"method": "printed", "trust": "local"}, r"method='printed'.*epsilon=inf"),
        (GaussianMixturePrior(covariance_type="full"), {}, r"covariance_type='full'.*'spherical'"),
        (
            GaussianMixturePrior(2, means=[[0.0, 0.0], [1.0, 1.0]]),
            {"trust": "local"},
            r"means.*weights.*covariances",
        ),
        ("discrete", {"clip_norm": None}, r"clip_norm.*epsilon"),
        ("discrete", {"delta": 0.0}, r"delta.*\b0\b"),
    ],
)
def test_refused_releases(prior, params, error):
    y, groups, _, noise = make_groups(30, 2)
    params = {"epsilon": 1.0, "clip_norm": 2.0, "noise_variance": noise, **params}
    with pytest.raises(ValueError, match=error):
        fit(y, groups, prior, **{"noise": params.pop("noise_variance"), **params})


def test_sums_without_noisy_k_means_are_refused(monkeypatch):
    """A mechanism that has none would state other events than the noise that k-means gets."""
    table = _mean_releases._RELEASES
    row = table["central", "gaussian"]._replace(clustering=None)
    monkeypatch.setitem(table, ("central", "gaussian"), row)
    model = GaussianMean("discrete", epsilon=1.0, clip_norm=1.0, noise_variance=1.0)
    with pytest.raises(ValueError, match=r"mechanism.*DiscretePrior.*trust='central'"):
        model.fit(np.zeros((4, 1)), np.zeros(4), groups=[0, 0, 1, 1])
