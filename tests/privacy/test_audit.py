"""End-to-end audits: private fits on neighbouring tables, and mutants that must be convicted.

The releases are calibrated to mu = 2 (Gaussian DP). A lower confidence bound on mu, from fits on
both tables, must stay below 2, and exceed 2 for every mutant.
"""

import math

import numpy as np
import pytest
from scipy import stats

from pfl_sklearn import BernoulliMean, GaussianMean, PoissonMean
from pfl_sklearn.estimation import _gaussian_release, _mean_releases
from pfl_sklearn.estimation._variance_components import client_means
from pfl_sklearn.linear_model import PersonalizedLinearRegression
from pfl_sklearn.priors import GaussianPrior
from pfl_sklearn.privacy import ClientMoments, GaussianMechanism, RegressionMoments, gdp_epsilon
from pfl_sklearn.privacy._mechanisms import _gaussian as gaussian
from pfl_sklearn.privacy.auditing import gdp_lower_bound
from tests.helpers.hostile import hostile
from tests.helpers.mutants import halve_gaussian_noise

pytestmark = [
    pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning"),
    pytest.mark.filterwarnings("ignore:The released noise variance"),
]

DELTA = 1e-5
EPSILON = gdp_epsilon(2.0, DELTA)
# Releases of each table, 20 from every fit, whose messages are the same for every seed. With 500,
# the bound for an honest mu of 2 is above 1 in 98 % of audits; with 240, the bound for halved noise
# (a mu of 4) is above 2 in all of 300 simulated audits.
N_HONEST, N_MUTANT, N_DRAWS = 500, 240, 20
GROUPS = np.repeat(np.arange(16), 2)
KNOWN = {"prior": GaussianPrior(covariance=1.0), "noise_variance": 1.0}
PRIVATE = {"epsilon": EPSILON, "delta": DELTA}


def fit_mean(value, spread, seed, **params):
    """The client under attack has rows value - spread and value + spread."""
    y = np.zeros(32)
    y[:2] = value - spread, value + spread
    model = GaussianMean(clip_norm=1.0, random_state=seed, **PRIVATE, **params)
    return model.fit(y[:, None], y, groups=GROUPS)


def central(truth, seed):
    """Far outside the ball on either side."""
    fit_mean(30.0 if truth else -30.0, 0.0, seed, **KNOWN)


def central_with_variances(truth, seed):
    """Mean, square and row variance in one joint release."""
    fit_mean(*((30.0, 0.0) if truth else (-30.0, 50.0)), seed)


def local(truth, seed):
    fit_mean(30.0 if truth else -30.0, 0.0, seed, trust="local", **KNOWN)


def local_with_variances(truth, seed):
    fit_mean(*((30.0, 0.0) if truth else (-30.0, 50.0)), seed, trust="local")


def fit_proportions(successes, trials, seed):
    model = BernoulliMean(trust="central", random_state=seed, **PRIVATE)
    model.fit_counts(np.r_[successes, np.full(15, 2)], np.r_[trials, np.full(15, 4)])


def histogram(truth, seed):
    fit_proportions(3 if truth else 0, 4, seed)


def moments(truth, seed):
    """Unequal trials: a client at the two ends of the parabola (x, 4 x (1 - x))."""
    fit_proportions(4 if truth else 0, 7, seed)


def rates(truth, seed):
    """Unequal exposures: no events, or far more than the cap."""
    counts, exposure = np.full(16, 2), np.repeat([0.5, 2.0], 8)
    counts[0] = 10**6 if truth else 0
    model = PoissonMean(trust="central", cap=6, random_state=seed, **PRIVATE)
    model.fit_counts(counts, exposure)


# Rows far outside the bounds, in two directions: once scaled, their matrices v v' are orthogonal.
ROWS = RegressionMoments(2, 1.0, 1.0, intercept=False)
COSINE = ROWS.target_scale**2
FAR = 30 * np.array([[1.0, 0.0], [COSINE, math.sqrt(1 - COSINE**2)]]), 30 * np.array([1.0, -1.0])
CLIENTS = RegressionMoments(2, 1.0, 1.0, False, "add_remove", square=False, sizes=True)


def fit_regression(X, y, groups, seed, **params):
    model = PersonalizedLinearRegression(
        fit_intercept=False, feature_bound=1.0, target_bound=1.0, random_state=seed, **PRIVATE
    )
    model.set_params(**params, **KNOWN).fit(X, y, groups=groups)


def regression_rows(truth, seed):
    """One row replaced by another."""
    X, y = np.zeros((32, 2)), np.zeros(32)
    X[0], y[0] = (part[int(not truth)] for part in FAR)
    fit_regression(X, y, GROUPS, seed, unit="row")


def regression_clients(truth, seed):
    """One client with two equal rows comes or goes."""
    X, y, start = np.zeros((32, 2)), np.zeros(32), 0 if truth else 2
    X[:2], y[:2] = (part[0] for part in FAR)
    fit_regression(X[start:], y[start:], GROUPS[start:], seed, relation="add_remove")


# Fits, and the direction in which their releases on the two tables differ.
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
every_release = pytest.mark.parametrize("fit", RELEASES, ids=lambda fit: fit.__name__)


class Released(Exception):
    """A fit that stops at its release: everything after it is post-processing."""


def lower_bound(fit, monkeypatch, n_releases=N_MUTANT):
    """Lower bound on mu from `n_releases` releases of each of two neighbouring tables."""
    privatize = GaussianMechanism.privatize

    def stop(self, messages, rng):
        raise Released([privatize(self, messages, rng) for _ in range(N_DRAWS)])

    def scores(truth, seed):
        try:
            fit(truth, seed)
        except Released as stopped:
            return [np.atleast_2d(each)[0] @ np.array(RELEASES[fit]) for each in stopped.args[0]]
        raise AssertionError("nothing was released")

    monkeypatch.setattr(GaussianMechanism, "privatize", stop)
    seeds = np.random.SeedSequence(0).generate_state(2 * n_releases // N_DRAWS).reshape(2, -1)
    found = ([scores(truth, s) for s in seeds[1 - truth].tolist()] for truth in (True, False))
    return gdp_lower_bound(*map(np.ravel, found))


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


def rows_of_any_size(monkeypatch):
    def scaled(self, X, y):
        rows = np.column_stack([X / self.feature_bound, self.target_scale * y / self.target_bound])
        return rows, np.ones(len(y))

    monkeypatch.setattr(RegressionMoments, "scaled", scaled)


@every_release
def test_a_fit_releases_once(fit, monkeypatch):
    """So that an audit of the first release is one of the fit."""
    releases, privatize = [], GaussianMechanism.privatize
    monkeypatch.setattr(
        GaussianMechanism, "privatize", lambda *args: releases.append(1) or privatize(*args)
    )
    fit(True, 0)
    assert len(releases) == 1


@pytest.mark.slow
@every_release
def test_releases_keep_their_promise(fit, monkeypatch):
    assert 1.0 < lower_bound(fit, monkeypatch, N_HONEST) <= 2.0


@every_release
def test_halved_noise_is_convicted(fit, monkeypatch):
    halve_gaussian_noise(monkeypatch)
    assert lower_bound(fit, monkeypatch) > 2.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutate", "fit"),
    [
        (noise_per_client_then_averaged, central),
        (no_clip, central),
        (fixed_seed, central),
        (radius_for_diameter, central),
        (radius_for_diameter, central_with_variances),
        (radius_for_diameter, local),
        (rows_of_any_size, regression_rows),
    ],
)
def test_mutants_are_convicted(mutate, fit, monkeypatch):
    mutate(monkeypatch)
    assert lower_bound(fit, monkeypatch) > 2.0


@pytest.mark.slow
@pytest.mark.parametrize("trust", ["central", "local"])
def test_noise_of_fits_is_calibrated_and_independent(trust):
    """Chi-square on the scale, at 1e-6, and correlations over 200 fits of four public means."""
    y, means, params = np.zeros((32, 4)), [], {"clip_norm": 1.0, **PRIVATE, **KNOWN}
    for seed in np.random.SeedSequence(1).generate_state(200).tolist():
        model = GaussianMean(trust=trust, random_state=seed, **params).fit(y, y, groups=GROUPS)
        means.append(model.population_mean_)
    means = np.array(means)
    clients = 16 if trust == "central" else math.sqrt(16)
    square = np.sum(np.square(means)) / (model.privacy_.noise_std / clients) ** 2
    below = stats.chi2(800).cdf(square)
    assert 2 * min(below, 1 - below) > 1e-6
    for one, other in ((means[:-1], means[1:]), (means[:, :-1], means[:, 1:])):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 5 / math.sqrt(one.size)


@pytest.mark.parametrize("seed", range(3))
def test_one_client_moves_nothing_but_its_own_message(seed):
    """Neighbouring tables, rows of any size: the sum of messages stays within its sensitivity."""
    rng, shape = np.random.default_rng(seed), ClientMoments(1.0, True, True, True)
    for _ in range(50):
        sizes = rng.integers(1, 4, rng.integers(1, 6))
        codes = np.repeat(np.arange(len(sizes)), sizes)
        # Refused are values that are not finite.
        tables = np.nan_to_num(hostile((2, len(codes)), 5.0, rng.integers(10**9)))
        tables[1, codes > 0] = tables[0, codes > 0]
        sums = [messages_of(shape, y[:, None], codes) for y in tables]
        np.testing.assert_array_equal(sums[0][1:], sums[1][1:])
        moved = np.linalg.norm(sums[0].sum(axis=0) - sums[1].sum(axis=0))
        assert moved <= shape.sensitivity + 1e-9


def messages_of(shape, y, codes):
    with np.errstate(over="ignore", invalid="ignore"):
        table = client_means(y, codes, codes[-1] + 1, centre=np.zeros(1))
    variances = _mean_releases.row_variances(y, codes, table)
    weights = _gaussian_release.variance_weights(table.n_rows) if len(y) > codes[-1] + 1 else 0
    messages = shape.messages(table.means, variances, weights)
    assert np.isfinite(messages).all()
    return messages


def test_a_huge_value_does_not_move_the_others_through_rounding():
    """End to end: with next to no noise, 15 clients at 1 stay at 1 whatever the first one holds."""
    means = []
    for value in (0.0, 1e200):
        y = np.ones(32)
        y[:2] = value
        model = GaussianMean(epsilon=1e9, delta=DELTA, clip_norm=1.0, random_state=0, **KNOWN)
        means.append(16 * model.fit(y[:, None], y, groups=GROUPS).population_mean_)
    assert means == pytest.approx([15.0, 16.0], abs=0.01)


def test_the_auditor_itself():
    """Over many audits: rarely above the truth, nearly always above half of it."""
    rng = np.random.default_rng(0)
    bounds = [gdp_lower_bound(rng.normal(2.0, 1, 500), rng.normal(0.0, 1, 500)) for _ in range(100)]
    assert np.mean(np.array(bounds) > 2) <= 0.02
    assert np.mean(np.array(bounds) > 1) > 0.98
    halved = [gdp_lower_bound(rng.normal(4.0, 1, 500), rng.normal(0.0, 1, 500)) for _ in range(100)]
    assert np.mean(np.array(halved) > 2) > 0.98
