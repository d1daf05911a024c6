"""Private clustering: sensitivities by brute force, the budget, and audits of whole fits."""

import math

import numpy as np
import pytest

from pfl_sklearn import GaussianMean
from pfl_sklearn.estimation import _mixture_release as release
from pfl_sklearn.priors import DiscretePrior, GaussianMixturePrior
from pfl_sklearn.privacy import GaussianMechanism, PrivateClustering, gdp_epsilon, gdp_mu
from pfl_sklearn.privacy._mechanisms._gaussian import clip_l2
from pfl_sklearn.privacy.auditing import gdp_lower_bound
from tests.helpers.hostile import hostile
from tests.helpers.mutants import halve_gaussian_noise

pytestmark = [
    pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning"),
    pytest.mark.filterwarnings("ignore:.*epsilon.*clip_norm"),
]

DELTA = 1e-5
EPSILON = gdp_epsilon(2.0, DELTA)
PARAMS = {"noise_variance": 1.0, "epsilon": EPSILON, "delta": DELTA, "clip_norm": 1.0}


def clustering(d=3, m=50, **more):
    return PrivateClustering(1.0, DELTA, d, m, **more)


def test_shares_and_noise_spend_the_budget():
    for mechanism in (clustering(), clustering(squares=True), clustering(1, n_steps=1)):
        parts = mechanism.parts
        assert sum(share for share, _ in parts.values()) == pytest.approx(1.0)
        spent = sum(
            (sensitivity / mechanism.mechanism(name).noise_std) ** 2
            for name, (_, sensitivity) in parts.items()
        )
        assert math.sqrt(spent) == pytest.approx(gdp_mu(1.0, DELTA))
        assert {mechanism.step_name(t) for t in range(mechanism.n_steps)} < set(parts)
    facts = clustering().facts()
    assert facts["noise_std"] == clustering().mechanism("last").noise_std
    assert facts["sensitivity"] == pytest.approx(2.0)
    with pytest.raises(ValueError, match=r"n_features.*\b1\b.*\b0\b"):
        clustering(0)
    with pytest.raises(ValueError, match=r"epsilon.*\b0\.0\b"):
        PrivateClustering(0.0, DELTA, 3, 50)


# Sensitivity --------------------------------------------------------------------------------------


def messages(mechanism, vector, share, gain, centres):
    """All messages of one client, by part."""
    vector = clip_l2(np.array([vector]), 1.0)
    share = np.array([share]) / np.sum(share)
    return {
        "moments": mechanism.moments(vector),
        "scores": mechanism.scores(vector, centres),
        "last": mechanism.step(vector, share),
        "gain": mechanism.gain(np.array([gain]), np.ones(1)),
    }


@pytest.mark.parametrize("squares", [False, True])
def test_sensitivities_are_never_exceeded(squares):
    mechanism, rng = clustering(squares=squares, n_candidates=4), np.random.default_rng(0)
    sensitivities = {name: part[1] for name, part in mechanism.parts.items()}
    for seed in range(60):
        centres = [clip_l2(rng.normal(size=(2, 3)), 1.0) for _ in range(4)]
        here, there = (
            messages(mechanism, values[:3], share, values[3], centres)
            for values, share in zip(
                hostile((2, 4), 2.0, seed), rng.dirichlet(np.full(4, 0.3), 2), strict=True
            )
        )
        for name, message in here.items():
            assert np.isfinite(message).all()
            moved = np.linalg.norm(message - there[name])
            assert moved <= sensitivities[name] * (1 + 1e-9)


@pytest.mark.parametrize("squares", [False, True])
@pytest.mark.parametrize("d", [1, 3])
def test_sensitivities_are_reached(d, squares):
    """Hard shares of different clusters; the same cluster at both ends; vectors at 120 degrees."""
    mechanism = clustering(d, squares=squares)
    first, other = np.zeros((1, d)), np.zeros((1, d))
    first[0, 0], other[0, 0] = 1.0, -1.0
    apart = mechanism.step(first, np.array([[1.0, 0]])) - mechanism.step(
        first, np.array([[0, 1.0]])
    )
    assert np.linalg.norm(apart) == pytest.approx(mechanism.parts["last"][1])
    ends = mechanism.step(first, np.array([[1.0, 0]])) - mechanism.step(other, np.array([[1.0, 0]]))
    assert np.linalg.norm(ends) == pytest.approx(2.0)
    if d > 1:
        other[0, :2] = -0.5, math.sqrt(0.75)
    moved = mechanism.moments(first) - mechanism.moments(other)
    assert np.linalg.norm(moved) == pytest.approx(mechanism.parts["moments"][1])
    lost = mechanism.gain(np.array([-math.inf]), np.ones(1)) - mechanism.gain(
        np.array([9.0]), np.ones(1)
    )
    assert abs(lost[0]) == pytest.approx(1.0)


def largest_move_of_the_gain(monkeypatch):
    """Over its sensitivity: when one of 50 clients with 1 to 50 rows has another mean."""
    mechanism, sizes, exact = clustering(1), np.arange(1, 51), []
    working = GaussianMixturePrior(2, means=[[-9.0], [9.0]], covariances=1e-9, weights=[0.5, 0.5])

    def spy(self, messages, rng):
        exact.append(messages)
        return messages

    monkeypatch.setattr(GaussianMechanism, "privatize", spy)
    rng, moves = np.random.default_rng(0), []
    for client in (0, 1, 25, 49):
        means = rng.choice([-9.0, 9.0], size=(50, 1))
        exact.clear()
        for value in (-9.0, 0.0, 9.0, 9.0 + 3.2 / np.sqrt(sizes[client]), 30.0, 1e200):
            means[client] = value
            release._helps(mechanism, working, means, 1.0 / sizes, rng)
        moves.append(np.ptp(exact))
    return max(moves) / mechanism.parts["gain"][1]


def test_clients_of_unequal_size_move_the_gain_by_its_sensitivity_at_most(monkeypatch):
    assert 0.9 < largest_move_of_the_gain(monkeypatch) <= 1 + 1e-9


def test_importance_relative_to_the_average_client_is_convicted(monkeypatch):
    exact = PrivateClustering.gain
    monkeypatch.setattr(
        PrivateClustering,
        "gain",
        lambda self, gains, importance: exact(self, gains, importance / importance.mean()),
    )
    assert largest_move_of_the_gain(monkeypatch) > 2


def test_messages_are_sums_over_clients_and_split_again():
    rng = np.random.default_rng(0)
    mechanism = clustering(3, 50, squares=True)
    x, share = clip_l2(rng.normal(size=(50, 3)), 1.0), rng.dirichlet(np.ones(4), 50)
    mean, covariance = mechanism.split_moments(mechanism.moments(x))
    np.testing.assert_allclose(mean, x.mean(axis=0))
    np.testing.assert_allclose(covariance, np.cov(x.T, bias=True))
    sums, counts, squares = mechanism.split_step(mechanism.step(x, share), 4)
    np.testing.assert_allclose(sums, share.T @ x)
    np.testing.assert_allclose(counts, share.sum(axis=0))
    np.testing.assert_allclose(squares, share.T @ np.sum(x**2, axis=1))
    gain, std = mechanism.split_gain(mechanism.gain(np.full(50, 0.5), np.ones(50)))
    assert gain == pytest.approx(25.0)
    assert std == pytest.approx(mechanism.mechanism("gain").noise_std * (mechanism.lowest_gain + 2))


# Audits -------------------------------------------------------------------------------------------
class Spy:
    """Everything that a fit releases, and what it would release on a neighbouring table.

    The score of a fit is the log-likelihood ratio of all releases, each given the ones before,
    over the length of the difference: one standard normal if the table is the other one.
    """

    def __init__(self, monkeypatch, own, other):
        self.own, self.other, self.parts = own, other, []
        privatize, step = GaussianMechanism.privatize, PrivateClustering.step
        self.difference = None

        def watched(mechanism, messages, rng):
            released = privatize(mechanism, messages, rng)
            if self.difference is not None:
                std = mechanism.sensitivity / gdp_mu(EPSILON, DELTA)
                base = messages if self.base is None else self.base
                self.parts.append(((released - base) / std, self.difference / std))
            self.difference = None
            return released

        def compare(method):
            def inner(clustering, vectors, *args):
                changed = vectors.copy()
                changed[0] = self.replacement
                exact, moved = (method(clustering, part, *args) for part in (vectors, changed))
                truth, lie = (exact, moved) if self.truth else (moved, exact)
                self.base, self.difference = lie, truth - lie
                return exact

            return inner

        def compared_step(clustering, vectors, shares):
            """The client's shares move with its vector."""
            changed, moved = vectors.copy(), shares.copy()
            changed[0] = self.replacement
            moved[0] = self.shares(changed[:1])[0]
            exact, else_ = step(clustering, vectors, shares), step(clustering, changed, moved)
            truth, lie = (exact, else_) if self.truth else (else_, exact)
            self.base, self.difference = lie, truth - lie
            return exact

        monkeypatch.setattr(GaussianMechanism, "privatize", watched)
        for name in ("moments", "scores"):
            monkeypatch.setattr(PrivateClustering, name, compare(getattr(PrivateClustering, name)))
        monkeypatch.setattr(PrivateClustering, "step", compared_step)
        given = release.cluster_shares

        def shares(vectors, sampling, clusters, hard):
            self.shares = lambda changed: given(changed, sampling[:1], clusters, hard)
            return given(vectors, sampling, clusters, hard)

        monkeypatch.setattr(release, "cluster_shares", shares)

    def score(self, truth, seed):
        self.truth, self.parts, self.difference = truth, [], None
        own, self.replacement = (self.own, self.other) if truth else (self.other, self.own)
        y = np.zeros((16, 2))
        y[0] = 30.0 * own  # far outside the ball
        model = GaussianMean(DiscretePrior(2), random_state=seed, **PARAMS)
        model.fit(y, y, groups=np.arange(16))
        ratio = sum(np.sum(seen * moved) for seen, moved in self.parts)
        return ratio / math.sqrt(sum(np.sum(moved**2) for _, moved in self.parts))


FIRST, OTHER = np.array([1.0, 0.0]), np.array([-0.5, math.sqrt(0.75)])


def lower_bound(monkeypatch, n_fits):
    spy = Spy(monkeypatch, FIRST, OTHER)
    seeds = np.random.SeedSequence(0).generate_state(2 * n_fits).tolist()
    return gdp_lower_bound(
        [spy.score(True, seed) for seed in seeds[:n_fits]],
        [spy.score(False, seed) for seed in seeds[n_fits:]],
    )


@pytest.mark.slow
def test_fits_keep_their_promise(monkeypatch):
    assert 0.4 < lower_bound(monkeypatch, 160) <= 2.0


@pytest.mark.slow
def test_halved_noise_is_convicted(monkeypatch):
    halve_gaussian_noise(monkeypatch)
    assert lower_bound(monkeypatch, 240) > 2.0


@pytest.mark.slow
def test_one_budget_for_every_release_is_convicted(monkeypatch):
    """Each release with the noise of the whole budget."""
    monkeypatch.setattr(
        PrivateClustering,
        "mechanism",
        lambda self, part: GaussianMechanism(self.parts[part][1], self.epsilon, self.delta),
    )
    assert lower_bound(monkeypatch, 140) > 2.0


class Reported(Exception):
    """A local fit that stops at the reports: everything after them is post-processing."""


@pytest.mark.parametrize("halve", [False, True])
def test_local_reports(halve, monkeypatch):
    """The clients' own reports, at opposite ends of the ball: each of them is a trial."""
    if halve:
        halve_gaussian_noise(monkeypatch)
    privatize = GaussianMechanism.privatize

    def stop(self, messages, rng):
        raise Reported(privatize(self, messages, rng)[:, 0])

    monkeypatch.setattr(GaussianMechanism, "privatize", stop)
    y, reports = np.tile([30.0, -30.0], 20), []
    for seed in np.random.SeedSequence(0).generate_state(20).tolist():
        model = GaussianMean(DiscretePrior(1, n_init=1), trust="local", random_state=seed, **PARAMS)
        with pytest.raises(Reported) as stopped:
            model.fit(y[:, None], y, groups=np.arange(40))
        reports.append(stopped.value.args[0])
    bound = gdp_lower_bound(*(np.ravel(reports)[side::2] for side in (0, 1)))
    assert bound > 2.0 if halve else 1.0 < bound <= 2.0
