"""End-to-end audits: private fits on neighbouring tables, and mutants that must be convicted.

The releases are calibrated to mu = 2 (Gaussian DP). A lower confidence bound on mu from 500 fits a
side must stay below 2, and above 2 for every mutant.
"""

import math
from functools import cached_property

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy import stats

from pfl_sklearn import BernoulliMean, GaussianMean, PoissonMean
from pfl_sklearn.estimation import _gaussian_release, _mean_releases
from pfl_sklearn.estimation._variance_components import client_means
from pfl_sklearn.linear_model import PersonalizedLinearRegression
from pfl_sklearn.priors import GaussianPrior
from pfl_sklearn.privacy import ClientMoments, GaussianMechanism, RegressionMoments, gdp_epsilon
from pfl_sklearn.privacy._mechanisms import _gaussian as gaussian
from pfl_sklearn.privacy.auditing import gdp_lower_bound

pytestmark = [
    pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning"),
    pytest.mark.filterwarnings("ignore:The released noise variance"),
]

DELTA = 1e-5
EPSILON = gdp_epsilon(2.0, DELTA)
N_FITS = 500
GROUPS = np.repeat(np.arange(16), 2)
KNOWN = {"prior": GaussianPrior(covariance=1.0), "noise_variance": 1.0}


def gaussian_release(value, spread, seed, released, **params):
    """One fit; the client under attack has rows value - spread and value + spread."""
    y = np.zeros(32)
    y[:2] = value - spread, value + spread
    model = GaussianMean(
        epsilon=EPSILON, delta=DELTA, clip_norm=1.0, random_state=seed, **params
    ).fit(y[:, None], y, groups=GROUPS)
    return model, released[-1]


def scores(make, direction):
    """Projection of 500 releases on the direction in which the two tables differ."""
    seeds = np.random.SeedSequence(0).generate_state(2 * N_FITS).tolist()
    return (
        np.array([make(True, seed) @ direction for seed in seeds[:N_FITS]]),
        np.array([make(False, seed) @ direction for seed in seeds[N_FITS:]]),
    )


@pytest.fixture
def released(monkeypatch):
    """Everything that the Gaussian mechanism lets out."""
    outputs, privatize = [], GaussianMechanism.privatize

    def spy(self, messages, rng):
        outputs.append(privatize(self, messages, rng))
        return outputs[-1]

    monkeypatch.setattr(GaussianMechanism, "privatize", spy)
    return outputs


def central(truth, seed, released):
    """Far outside the ball on either side; the public attribute is what is looked at."""
    model, _ = gaussian_release(30.0 if truth else -30.0, 0.0, seed, released, **KNOWN)
    return np.array([model.population_mean_])


def central_with_variances(truth, seed, released):
    """Mean, square and row variance in one joint release."""
    value, spread = (30.0, 0.0) if truth else (-30.0, 50.0)
    return gaussian_release(value, spread, seed, released)[1]


def local(truth, seed, released):
    value = 30.0 if truth else -30.0
    return gaussian_release(value, 0.0, seed, released, trust="local", **KNOWN)[1][0]


def local_with_variances(truth, seed, released):
    value, spread = (30.0, 0.0) if truth else (-30.0, 50.0)
    return gaussian_release(value, spread, seed, released, trust="local")[1][0]


def histogram(truth, seed, released):
    successes = np.full(16, 2)
    successes[0] = 3 if truth else 0
    BernoulliMean(epsilon=EPSILON, delta=DELTA, trust="central", random_state=seed).fit_counts(
        successes, np.full(16, 4)
    )
    return released[-1]


def moments(truth, seed, released):
    """Unequal trials: a client at the two ends of the parabola (x, 4 x (1 - x))."""
    successes, trials = np.full(16, 2), np.full(16, 4)
    successes[0], trials[0] = (4 if truth else 0), 7
    BernoulliMean(epsilon=EPSILON, delta=DELTA, trust="central", random_state=seed).fit_counts(
        successes, trials
    )
    return released[-1]


def rates(truth, seed, released):
    """Unequal exposures: no events, or far more than the cap."""
    counts, exposure = np.full(16, 2), np.repeat([0.5, 2.0], 8)
    counts[0] = 10**6 if truth else 0
    PoissonMean(epsilon=EPSILON, delta=DELTA, trust="central", cap=6, random_state=seed).fit_counts(
        counts, exposure
    )
    return released[-1]


# Rows far outside the bounds, in two directions: once scaled, their matrices v v' are orthogonal.
ROWS = RegressionMoments(2, 1.0, 1.0, intercept=False)
COSINE = ROWS.target_scale**2
FAR = 30 * np.array([[1.0, 0.0], [COSINE, math.sqrt(1 - COSINE**2)]]), 30 * np.array([1.0, -1.0])
CLIENTS = RegressionMoments(2, 1.0, 1.0, False, "add_remove", square=False, sizes=True)


def regression(X, y, groups, seed, released, **params):
    """One fit; the sum of moments that it lets out."""
    PersonalizedLinearRegression(
        fit_intercept=False,
        epsilon=EPSILON,
        delta=DELTA,
        feature_bound=1.0,
        target_bound=1.0,
        random_state=seed,
        **params,
        **KNOWN,
    ).fit(X, y, groups=groups)
    return released[-1]


def regression_rows(truth, seed, released):
    """One row replaced by another."""
    X, y = np.zeros((32, 2)), np.zeros(32)
    X[0], y[0] = (part[int(not truth)] for part in FAR)
    return regression(X, y, GROUPS, seed, released, unit="row")


def regression_clients(truth, seed, released):
    """One client with two equal rows comes or goes."""
    X, y, start = np.zeros((32, 2)), np.zeros(32), 0 if truth else 2
    X[:2], y[:2] = (part[0] for part in FAR)
    groups = GROUPS[start:]
    return regression(X[start:], y[start:], groups, seed, released, relation="add_remove")


RELEASES = {
    central: [1.0],
    central_with_variances: [2.0, 0.0, -1.0],
    local: [1.0],
    local_with_variances: [2.0, -1.0],
    histogram: [-1.0, 0.0, 0.0, 1.0, 0.0],
    moments: [4 / 7, 48 / 49],
    rates: [-1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0],
    regression_rows: -np.diff(ROWS.messages(*FAR), axis=0)[0],
    regression_clients: CLIENTS.total(*FAR, np.array([1.0, 0.0]), 0.5),
}
SLOW = {central_with_variances, local_with_variances, moments, rates, regression_rows}
every_release = pytest.mark.parametrize(
    "release",
    [pytest.param(each, marks=pytest.mark.slow if each in SLOW else ()) for each in RELEASES],
    ids=lambda release: release.__name__,
)


def lower_bound(release, released):
    def make(truth, seed):
        return release(truth, seed, released)

    return gdp_lower_bound(*scores(make, np.array(RELEASES[release])))


def half_sigma(monkeypatch):
    std = GaussianMechanism.noise_std.func
    halved = cached_property(lambda self: std(self) / 2)
    halved.__set_name__(GaussianMechanism, "noise_std")
    monkeypatch.setattr(GaussianMechanism, "noise_std", halved)


def radius_for_diameter(monkeypatch):
    right = ClientMoments.sensitivity.fget
    monkeypatch.setattr(ClientMoments, "sensitivity", property(lambda self: right(self) / 2))


def noise_per_client_then_averaged(monkeypatch):
    def privatize(self, messages, rng):
        share = self.noise_std / len(messages)
        return (messages + rng.normal(0.0, share, size=messages.shape)).sum(axis=0)

    monkeypatch.setattr(GaussianMechanism, "privatize", privatize)


def no_clip(monkeypatch):
    for module in (gaussian, _gaussian_release):
        monkeypatch.setattr(module, "clip_l2", lambda vectors, radius: vectors)


def fixed_seed(monkeypatch):
    privatize = GaussianMechanism.privatize
    monkeypatch.setattr(
        GaussianMechanism,
        "privatize",
        lambda self, messages, rng: privatize(self, messages, np.random.default_rng(0)),
    )


@pytest.mark.slow
@every_release
def test_releases_keep_their_promise(release, released):
    bound = lower_bound(release, released)
    assert 1.0 < bound <= 2.0


@pytest.mark.slow
@every_release
def test_halved_noise_is_convicted(release, released, monkeypatch):
    half_sigma(monkeypatch)
    assert lower_bound(release, released) > 2.0


@pytest.mark.slow
@pytest.mark.parametrize("mutate", [noise_per_client_then_averaged, no_clip, fixed_seed])
def test_mutants_of_the_central_release_are_convicted(mutate, monkeypatch, released):
    mutate(monkeypatch)
    released.append(None)
    assert lower_bound(central, released) > 2.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "release",
    [central, pytest.param(central_with_variances, marks=pytest.mark.slow), local],
    ids=lambda release: release.__name__,
)
def test_radius_for_diameter_is_convicted(release, released, monkeypatch):
    radius_for_diameter(monkeypatch)
    assert lower_bound(release, released) > 2.0


def rows_of_any_size(monkeypatch):
    def scaled(self, X, y):
        rows = np.column_stack([X / self.feature_bound, self.target_scale * y / self.target_bound])
        return rows, np.ones(len(y))

    monkeypatch.setattr(RegressionMoments, "scaled", scaled)


@pytest.mark.slow
def test_rows_that_are_not_scaled_are_convicted(monkeypatch, released):
    rows_of_any_size(monkeypatch)
    assert lower_bound(regression_rows, released) > 2.0


@pytest.mark.slow
@pytest.mark.parametrize("trust", ["central", "local"])
def test_noise_of_fits_is_calibrated_and_independent(trust):
    """Chi-square on the scale and correlation over 1,200 fits of the public attribute."""
    means = []
    for seed in np.random.SeedSequence(1).generate_state(1200).tolist():
        model = GaussianMean(
            epsilon=EPSILON, delta=DELTA, clip_norm=1.0, trust=trust, random_state=seed, **KNOWN
        ).fit(np.zeros((32, 1)), np.zeros(32), groups=GROUPS)
        means.append(model.population_mean_)
    clients = 16 if trust == "central" else math.sqrt(16)
    square = np.sum(np.square(means)) / (model.privacy_.noise_std / clients) ** 2
    below = stats.chi2(1200).cdf(square)
    assert 2 * min(below, 1 - below) > 1e-6
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 5 / math.sqrt(1200)


finite = st.one_of(st.floats(-5, 5), st.sampled_from([1e308, -1e308, 1e200, -1e160, 1e-300, 0.0]))
tables = st.lists(st.lists(finite, min_size=1, max_size=3), min_size=1, max_size=5)


@settings(max_examples=300, deadline=None)
@given(tables, st.lists(finite, min_size=3, max_size=3))
def test_one_client_moves_nothing_but_its_own_message(clients, replacement):
    """Neighbouring tables, rows of any size: the sum of messages stays within its sensitivity."""
    sums, shape = [], ClientMoments(1.0, True, True, True)
    codes = np.repeat(np.arange(len(clients)), [len(rows) for rows in clients])
    for first in (clients[0], replacement[: len(clients[0])]):
        y = np.concatenate([first, *clients[1:]])[:, None]
        with np.errstate(over="ignore", invalid="ignore"):
            table = client_means(y, codes, len(clients), centre=np.zeros(1))
        variances = _mean_releases.row_variances(y, codes, table)
        weights = _gaussian_release.variance_weights(table.n_rows) if len(y) > len(clients) else 0
        messages = shape.messages(table.means, variances, weights)
        assert np.isfinite(messages).all()
        sums.append(messages)
    np.testing.assert_array_equal(sums[0][1:], sums[1][1:])
    assert np.linalg.norm(sums[0].sum(axis=0) - sums[1].sum(axis=0)) <= shape.sensitivity + 1e-9


def test_a_huge_value_does_not_move_the_others_through_rounding():
    """End to end: with next to no noise, 15 clients at 1 stay at 1 whatever the first one holds."""
    means = []
    for value in (0.0, 1e200):
        y = np.ones(32)
        y[:2] = value
        model = GaussianMean(epsilon=1e9, delta=DELTA, clip_norm=1.0, random_state=0, **KNOWN).fit(
            y[:, None], y, groups=GROUPS
        )
        means.append(16 * model.population_mean_)
    assert means == pytest.approx([15.0, 16.0], abs=0.01)


def test_the_auditor_itself():
    """Over many audits: rarely above the truth, nearly always above half of it."""
    rng = np.random.default_rng(0)
    bounds = [gdp_lower_bound(rng.normal(2.0, 1, 500), rng.normal(0.0, 1, 500)) for _ in range(200)]
    assert np.mean(np.array(bounds) > 2) <= 0.02
    assert np.mean(np.array(bounds) > 1) > 0.98
    halved = [gdp_lower_bound(rng.normal(4.0, 1, 500), rng.normal(0.0, 1, 500)) for _ in range(200)]
    assert np.mean(np.array(halved) > 2) > 0.98
