"""GaussianMean through releases: Theorem 2 (ICLR) and beyond, variances, quantizer, fallbacks."""

import math
import warnings

import numpy as np
import pytest
from scipy import stats

from pfl_sklearn import GaussianMean, privacy_of
from pfl_sklearn.datasets import make_gaussian_clients
from pfl_sklearn.estimation import _gaussian_release, _mean_estimates, _mean_releases
from pfl_sklearn.priors import GaussianPrior
from pfl_sklearn.privacy import (
    GaussianMechanism,
    StochasticQuantizer,
    calibrate_noise,
    epsilon_spent,
)
from tests.helpers.draws import ROUNDING, Ones

pytestmark = pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")
KNOWN = {"prior": GaussianPrior(covariance=0.01), "noise_variance": 0.25}


def fit(clients, **params):
    model = GaussianMean(**{"random_state": 0, **params})
    return model.fit(clients.data, clients.target, groups=clients.groups)


def mse(model, clients):
    return np.mean((model.means_ - clients.client_means) ** 2)


def paper_clients(n_clients=10_000, seed=0):
    return make_gaussian_clients(n_clients, 15, between_std=0.1, noise_std=0.5, random_state=seed)


@pytest.mark.slow
def test_own_release_left_out_beats_theorem_2():
    """m = 5, prior variance .2, sampling variance 1, release variance 5: .636 against .673.

    Every output is a draw: 4,000 of them lie far inside the ball, so that none is clipped.
    """
    m, between, extra, radius, delta = 5, 0.2, 5.0, 1000.0, 1e-5
    epsilon = epsilon_spent(math.sqrt(extra), 2 * radius, delta=delta)
    rng = np.random.default_rng(0)
    theta = math.sqrt(between) * rng.normal(size=(m, 4000))
    known = {"prior": GaussianPrior(covariance=between), "noise_variance": 1.0}
    private = {"epsilon": epsilon, "delta": delta, "clip_norm": radius, "trust": "local"}
    model = GaussianMean(random_state=1, **known, **private)
    model.fit(np.zeros((m, 1)), theta + rng.normal(size=(m, 4000)), groups=np.arange(m))
    errors = np.mean((model.means_ - theta) ** 2, axis=0)
    others = (between + 1 + extra) / (m - 1)
    own = (between + others) / (between + others + 1)
    assert own == pytest.approx(0.636, abs=5e-4)
    assert np.mean(errors) == pytest.approx(own, abs=4 * np.std(errors) / math.sqrt(len(errors)))
    assert model.stds_[0, 0] ** 2 == pytest.approx(own, rel=1e-6)


@pytest.mark.parametrize("epsilon", [0.1, 0.4, 0.8])
def test_local_release_has_the_risk_that_it_states(epsilon):
    """10,000 clients; clip at 3.5 standard deviations of a client's mean."""
    clients = paper_clients()
    radius = 3.5 * math.sqrt(0.01 + 0.25 / 15)
    model = fit(clients, **KNOWN, epsilon=epsilon, delta=1e-4, clip_norm=radius, trust="local")
    extra = model.privacy_.noise_std**2 * radius**2
    others = (0.01 + 0.25 / 15 + extra) / 9999
    own = (0.01 + others) / (0.01 + others + 0.25 / 15)
    assert model.shrinkage_[0] == pytest.approx(1 - own, rel=1e-6)
    assert mse(model, clients) == pytest.approx(own * 0.25 / 15, rel=0.15)
    assert model.stds_[0] ** 2 == pytest.approx(own * 0.25 / 15, rel=1e-6)


@pytest.mark.parametrize("epsilon", [0.1, 1.0])
def test_a_trusted_server_costs_next_to_nothing(epsilon):
    clients = paper_clients()
    params = {"epsilon": epsilon, "delta": 1e-4, "clip_norm": 0.6}
    plain = mse(fit(clients), clients)
    assert mse(fit(clients, **KNOWN, **params), clients) < 1.01 * plain
    if epsilon == 1.0:
        bought = fit(clients, **params)
        assert mse(bought, clients) < 1.01 * plain
        assert bought.prior_.covariance[0, 0] == pytest.approx(0.01, rel=0.1)
        assert bought.noise_variance_ == pytest.approx(0.25, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("m", [3])
def test_bought_spread_is_unbiased_for_few_clients(m):
    """Next to no noise, and a floor far below: the estimated mean follows the clients."""
    found = []
    for seed in range(600):
        clients = make_gaussian_clients(m, 4, between_std=3.0, random_state=seed)
        model = fit(clients, noise_variance=1.0, epsilon=1e10, clip_norm=50.0, random_state=seed)
        found.append(model.prior_.covariance[0, 0])
    assert np.mean(found) == pytest.approx(9.0, abs=4 * np.std(found) / math.sqrt(len(found)))


def test_variances_bought_locally():
    clients = paper_clients()
    best, own = mse(fit(clients), clients), 0.25 / 15
    for epsilon, bound in ((2.0, 0.8 * own), (8.0, 1.05 * best)):
        model = fit(clients, epsilon=epsilon, delta=1e-5, clip_norm=0.6, trust="local")
        assert model.noise_variance_ == pytest.approx(0.25, rel=0.25)
        assert mse(model, clients) < bound


@pytest.mark.parametrize("trust", ["central", "local"])
def test_much_epsilon_and_a_wide_ball_are_no_privacy(trust):
    clients = make_gaussian_clients(40, [1, 3, 5, 7] * 10, random_state=0)
    prior = GaussianPrior(covariance=1.0)
    plain = fit(clients, prior=prior, noise_variance=1.0)
    model = fit(clients, prior=prior, noise_variance=1.0, epsilon=1e9, clip_norm=10.0, trust=trust)
    if trust == "local":
        np.testing.assert_allclose(model.means_, plain.means_, atol=1e-3)
        np.testing.assert_allclose(model.stds_, plain.stds_, rtol=1e-3)
    else:  # the server's sum weighs all clients alike
        assert model.population_mean_ == pytest.approx(plain.local_means_.mean(), abs=1e-3)


@pytest.mark.parametrize("trust", ["central", "local"])
def test_the_centre_moves_with_the_data(trust):
    clients = make_gaussian_clients(60, 5, mean=1000.0, n_outputs=2, random_state=0)
    params = {"epsilon": 2.0, "clip_norm": 5.0, "trust": trust, "noise_variance": 1.0}
    there = fit(clients, center=[1000.0, 1000.0], **params)
    clients.target -= 1000
    here = fit(clients, **params)
    np.testing.assert_allclose(there.means_ - 1000, here.means_, atol=1e-6)
    assert there.means_.shape == (60, 2)


def test_values_outside_the_ball_are_pulled_in_for_the_others_only():
    clients = make_gaussian_clients(50, 4, random_state=0)
    clients.target[clients.groups == 0] = 1e6
    model = fit(
        clients, prior=GaussianPrior(covariance=1.0), noise_variance=1.0, epsilon=1e6, clip_norm=3.0
    )
    assert model.population_mean_ < 3.0
    assert model.local_means_[0] == pytest.approx(1e6)
    assert model.means_[0] > 7e5


SIZES = {
    "two rows": [2] * 400,
    "five rows": [5] * 400,
    "unequal, some with one row": [1] * 100 + [2] * 150 + [5] * 150 + [40] * 50,
}


@pytest.mark.parametrize("share", [0.2, 0.85])
@pytest.mark.parametrize("d", [1, 3])
@pytest.mark.parametrize("sizes", SIZES)
def test_the_cut_of_row_variances_is_undone(sizes, d, share):
    """The noise variance is unbiased; the mean of the cut variances is not, with few rows."""
    n_rows, truth, rng = np.array(SIZES[sizes]), 3.0, np.random.default_rng(0)
    bound, weights = truth * d / share, _gaussian_release.variance_weights(n_rows)
    expected = _gaussian_release.sum_of_cut_variances(n_rows, weights, d)
    freedom = np.maximum(d * (n_rows - 1), 1)
    found, naive = [], []
    for _ in range(200):
        variances = truth * d * rng.chisquare(freedom) / freedom * (n_rows > 1)
        total = weights @ np.minimum(variances, bound)
        share_found = _gaussian_release.undo_cut(total / bound, expected, weights.sum())
        found.append(share_found * bound / d)
        naive.append(total / weights.sum() / d)
    error = np.std(found) / math.sqrt(200)
    assert np.mean(found) == pytest.approx(truth, abs=4 * error)
    if share == 0.85:
        assert np.mean(naive) < truth - 10 * error


@pytest.mark.parametrize(
    ("total", "share"), [(-3.0, 0.0), (0.0, 0.0), (1e-12, 1e-12 / 3), (3.0, 1.0), (1e9, 1.0)]
)
def test_undoing_the_cut_at_the_ends(total, share):
    n_rows, weights = np.array([1, 3, 5, 9]), np.array([0.0, 1.0, 1.0, 1.0])
    expected = _gaussian_release.sum_of_cut_variances(n_rows, weights, 2)
    assert _gaussian_release.undo_cut(total, expected, 3.0) == pytest.approx(share, rel=1e-9)


def test_row_variances_and_their_weights():
    """Clients with one row say nothing; nobody counts more than the median of the others."""
    n_rows = np.array([1, 2, 4, 7, 1, 100])
    weights = _gaussian_release.variance_weights(n_rows)
    np.testing.assert_allclose(weights, [0, 1 / 4.5, 3 / 4.5, 1, 0, 1])
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(6), n_rows)
    y = rng.normal(size=(len(groups), 2))
    table = _gaussian_release.ClientMeans(
        np.array([y[groups == k].mean(axis=0) for k in range(6)]), n_rows, n_rows, 0, 0
    )
    expected = [y[groups == k].var(axis=0, ddof=1).sum() if n_rows[k] > 1 else 0 for k in range(6)]
    np.testing.assert_allclose(_mean_releases.row_variances(y, groups, table), expected)


@pytest.mark.parametrize("trust", ["central", "local"])
def test_bought_noise_variance_of_clients_of_any_size(trust):
    """Two outputs, one to nine rows; an epsilon that leaves no noise to speak of."""
    found = []
    for seed in range(40):
        clients = make_gaussian_clients(
            200, [1, 2, 4, 9] * 50, n_outputs=2, noise_std=2.0, random_state=seed
        )
        params = {"prior": GaussianPrior(covariance=1.0), "epsilon": 1e9, "clip_norm": 9.0}
        model = fit(clients, **params, noise_variance_bound=12.0, trust=trust, random_state=seed)
        found.append(model.noise_variance_)
    assert np.mean(found) == pytest.approx(4.0, abs=4 * np.std(found) / math.sqrt(40))


def noise_on_the_third_part(model, clients, monkeypatch, factor=1.0):
    """Noise of 300 fits on the sum of row variances, in standard deviations of the report."""
    drawn, privatize = [], GaussianMechanism.privatize

    def spy(self, messages, rng):
        released, exact = privatize(self, messages, rng), messages.sum(axis=0)
        released[2] = exact[2] + factor * (released[2] - exact[2])
        drawn.append(released[2] - exact[2])
        return released

    monkeypatch.setattr(GaussianMechanism, "privatize", spy)
    for seed in range(300):
        model.set_params(random_state=seed)
        model.fit(clients.data, clients.target, groups=clients.groups)
    return np.array(drawn) / model.privacy_.noise_std


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The released noise variance")
@pytest.mark.parametrize(("factor", "right"), [(1.0, True), (0.5, False)])
def test_noise_on_the_row_variances(factor, right, monkeypatch):
    """As much as on the means, for a sensitivity of sqrt(5); half of it is noticed."""
    model = GaussianMean(epsilon=1.0, clip_norm=3.0, noise_variance_bound=0.5)
    clients = make_gaussian_clients(4, 3, random_state=0)
    drawn = noise_on_the_third_part(model, clients, monkeypatch, factor)
    below = stats.chi2(300).cdf(np.sum(drawn**2))
    assert (2 * min(below, 1 - below) > 1e-6) == right
    model.fit(clients.data, clients.target, groups=clients.groups)
    assert model.privacy_.sensitivity == pytest.approx(math.sqrt(5))
    assert model.privacy_.noise_std == pytest.approx(math.sqrt(5) * 3.73063, rel=1e-5)


@pytest.mark.filterwarnings("ignore:The released noise variance")
@pytest.mark.parametrize("trust", ["central", "local"])
def test_row_variances_are_paid_for(trust):
    """In the sensitivity that the noise is calibrated to, under either trust."""
    clients = make_gaussian_clients(300, 5, random_state=0)
    how = {"epsilon": 1.0, "clip_norm": 3.0, "trust": trust}
    for known, sensitivity in ((None, math.sqrt(5)), (1.0, 2.0)):
        report = fit(clients, noise_variance=known, **how).privacy_
        assert report.sensitivity == pytest.approx(sensitivity)
        assert report.noise_std == pytest.approx(calibrate_noise(1.0, 1e-5, sensitivity))


def test_noise_does_not_call_a_bound_too_tight():
    """Half of the bound is the truth; a large release is due to chance."""
    clients = make_gaussian_clients(18, 10, noise_std=1.0, random_state=0)
    for seed in range(20):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            params = {"epsilon": 1.0, "clip_norm": 3.0, "noise_variance_bound": 2.0}
            fit(clients, **params, random_state=seed)
        messages = " ".join(str(warning.message) for warning in caught)
        assert "larger noise_variance_bound" not in messages


def test_the_report_states_the_bound_on_row_variances():
    clients = make_gaussian_clients(300, 5, random_state=0)
    default = fit(clients, epsilon=1.0, clip_norm=3.0)
    given = fit(clients, epsilon=1.0, clip_norm=3.0, noise_variance_bound=2.5)
    known = fit(clients, epsilon=1.0, clip_norm=3.0, noise_variance=1.0)
    assert "noise_variance_bound = 9" in str(default.privacy_)
    assert "noise_variance_bound = 2.5" in str(given.privacy_)
    assert "noise_variance_bound" not in str(known.privacy_)
    assert given.noise_variance_ == pytest.approx(1.0, rel=0.2)


def test_a_bound_that_is_too_tight_is_named_once():
    clients = make_gaussian_clients(300, 5, random_state=0)
    with pytest.warns(UserWarning, match=r"\b0\.5\b.*larger noise_variance_bound") as caught:
        model = fit(clients, epsilon=4.0, clip_norm=3.0, noise_variance_bound=0.5)
    assert sum(warning.category is UserWarning for warning in caught) == 1
    assert model.noise_variance_ == 0.5
    shrunk = fit(clients, noise_variance=1.0).shrinkage_[0]
    assert 0 < model.shrinkage_[0] < 0.7 * shrunk


@pytest.mark.parametrize("trust", ["central", "local"])
def test_rows_of_any_size_raise_no_warning(trust):
    """A warning of numpy would reveal something of the data."""
    rng = np.random.default_rng(0)
    for value in (1e160, -1e308, 1.7e308, 1e-320):
        y = rng.normal(size=(60, 2))
        y[:3], y[3] = value, -value
        for rows in (y[:, 0], y):
            model = GaussianMean(epsilon=500.0, clip_norm=3.0, trust=trust, random_state=0)
            model.fit(y, rows, groups=np.repeat(np.arange(20), 3))
            assert np.isfinite(model.population_mean_).all()
            assert np.all(model.noise_variance_ <= 9)


def test_a_noise_variance_too_noisy_to_use_leaves_local_means():
    clients = make_gaussian_clients(18, 5, random_state=0)
    remedies = r"smaller noise_variance_bound.*\b25\b.*center.*clip_norm.*epsilon"
    with pytest.warns(UserWarning, match=remedies) as caught:
        model = fit(clients, epsilon=0.5, clip_norm=5.0)
    assert sum(warning.category is UserWarning for warning in caught) == 1
    np.testing.assert_array_equal(model.means_, model.local_means_)
    np.testing.assert_array_equal(model.shrinkage_, 0)
    own = [np.std(clients.target[clients.groups == k], ddof=1) / math.sqrt(5) for k in range(18)]
    np.testing.assert_allclose(model.stds_, own)


@pytest.mark.parametrize("trust", ["central", "local"])
@pytest.mark.parametrize("between", [0.0, 0.01, 1.0])
def test_never_much_worse_than_local(trust, between):
    """With variances bought at small epsilon the floor on the between-client variance protects."""
    worst = []
    for seed in range(10):
        clients = make_gaussian_clients(
            300, 5, between_std=math.sqrt(between), noise_std=1.0, random_state=seed
        )
        params = {"noise_variance": 1.0, "epsilon": 0.5, "clip_norm": 3.0, "trust": trust}
        model = fit(clients, **params, random_state=seed)
        worst.append(mse(model, clients))
    assert np.mean(worst) < 1.05 * 0.2


def test_single_private_client_keeps_its_mean():
    y, params = np.arange(6.0), {"noise_variance": 1.0, "epsilon": 1.0, "clip_norm": 9.0}
    for trust in ("central", "local"):
        known, unknown, around = (
            GaussianMean(prior, trust=trust, random_state=0, **params).fit(
                y[:, None], y, groups=np.full(6, "a")
            )
            for prior in (GaussianPrior(covariance=1.0), GaussianPrior(), GaussianPrior(mean=0.2))
        )
        for model in (known, unknown, around):
            assert model.means_ == pytest.approx([2.5])
        assert known.shrinkage_ == pytest.approx([0.0])
        assert math.isnan(unknown.icc_)
        assert around.stds_ == pytest.approx([1 / math.sqrt(6)])


def test_a_chance_noise_variance_is_not_trusted():
    """Two clients at epsilon .5: whatever is drawn, the largest possible sum would drown."""
    for seed in range(60):
        clients = make_gaussian_clients(2, 6, random_state=seed)
        with pytest.warns(UserWarning, match=r"noise_variance.*clip_norm.*epsilon"):
            model = fit(clients, epsilon=0.5, clip_norm=3.0, random_state=seed)
        np.testing.assert_array_equal(model.means_, model.local_means_)


def test_a_known_population_needs_no_fit_on_the_side(monkeypatch):
    clients = paper_clients(100)
    params = {"prior": GaussianPrior(mean=0.0, covariance=0.01), "noise_variance": 0.25}
    plain = fit(clients, **params)
    monkeypatch.setattr(_mean_estimates, "estimate_components", None)
    private = fit(clients, epsilon=1.0, clip_norm=1.0, **params)
    np.testing.assert_allclose(private.means_, plain.means_, rtol=1e-13)
    np.testing.assert_allclose(private.stds_, plain.stds_, rtol=1e-13)
    assert private.privacy_.epsilon == 0
    assert math.isnan(private.log_likelihood_)


def test_quantizer():
    clients = paper_clients(2000)
    params = {"mechanism": "quantizer", "clip_norm": 0.6}
    plain = fit(clients, **KNOWN)
    estimated = fit(clients, noise_variance=0.25, **params, n_bits=6)
    assert estimated.prior_.covariance[0, 0] == pytest.approx(0.01, rel=0.15)
    coarse = fit(clients, **KNOWN, **params, n_bits=1)
    fine = fit(clients, **KNOWN, **params, n_bits=16)
    np.testing.assert_allclose(fine.means_, plain.means_, atol=1e-4)
    assert mse(coarse, clients) < 1.05 * mse(plain, clients)
    extra = StochasticQuantizer(1, 0.6).noise_variance
    others = (0.01 + 0.25 / 15 + extra) / 1999
    own = (0.01 + others) / (0.01 + others + 0.25 / 15)
    assert coarse.shrinkage_[0] == pytest.approx(1 - own, rel=1e-6)
    assert privacy_of(coarse).epsilon == math.inf


@pytest.mark.parametrize("n_bits", [1, 2, 3])
def test_coarse_rounding_hides_the_spread(n_bits):
    clients = paper_clients(100)
    with pytest.raises(ValueError, match=rf"n_bits={n_bits}\b.*covariance"):
        fit(clients, mechanism="quantizer", clip_norm=0.6, n_bits=n_bits, noise_variance=0.25)


def test_the_report_states_the_noise_that_was_drawn(monkeypatch):
    """Where every draw is 1, and the sum of 20 means is off by one standard deviation."""
    drawn = []
    privatize = GaussianMechanism.privatize

    def spy(self, messages, rng):
        drawn.append(privatize(self, messages, Ones()) - messages.sum(axis=0))
        return privatize(self, messages, rng)

    monkeypatch.setattr(GaussianMechanism, "privatize", spy)
    clients = make_gaussian_clients(20, 3, n_outputs=2, random_state=0)
    prior = GaussianPrior(covariance=1.0)
    model = fit(clients, prior=prior, noise_variance=1.0, epsilon=1.0, clip_norm=100.0)
    std = model.privacy_.noise_std
    np.testing.assert_allclose(drawn, [[std, std]], rtol=ROUNDING)
    of_sum = 20 * (1 + 1 / 3) + (100 * std) ** 2
    assert model.population_mean_std_ == pytest.approx(math.sqrt(of_sum) / 20)
