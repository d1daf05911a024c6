"""Messages between pairs of agents, against the paper's figures."""

import math

import numpy as np
import pytest

import pfl_sklearn
from pfl_sklearn.online import CollaborativeMean
from pfl_sklearn.privacy import gdp_mu
from tests.helpers.oracles import read_oracle
from tests.helpers.streams import LABELS, PRINTED, PRIVATE, WIDTH, stream

pytestmark = pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")

CURVES = read_oracle("colme_oracle_class_M200")


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["last", "mom", "wmom"])
@pytest.mark.parametrize("mechanism", ["pm1", "pm2"])
def test_expected_errors_of_the_paper(mechanism, weights):
    """With the classes known, the variances of the estimates are the paper's second figure."""
    model = CollaborativeMean(mechanism=mechanism, weights=weights, **PRINTED)
    expected = CURVES["M200"][f"PM{mechanism[-1]}-{weights}"]
    before, last = 0, 30_000 if (mechanism, weights) == ("pm2", "wmom") else 1085
    for t, error in zip(CURVES["t"], expected, strict=True):
        if t > last:
            break
        X, y, groups = np.zeros(((t - before) * 200, 1)), 0.0, np.tile(np.arange(200), t - before)
        model.partial_fit(X, np.full(len(X), y), groups=groups, labels=LABELS)
        before = t
        if t in (1, 100, 225, 1085, 5227, 30_000):
            assert (model.stds_**2).mean() == pytest.approx(error, rel=1e-10)


@pytest.mark.parametrize("mechanism", ["pm1", "pm2"])
def test_noise_of_the_paper(mechanism):
    """Printed noise, and what it promises against one recipient and all."""
    model = CollaborativeMean(mechanism=mechanism, **PRINTED)
    X, y, groups, _ = stream(1)
    model.fit(X, y, groups=groups, labels=LABELS)
    senders = model._stream.senders
    name = "sigma2_dp_PM1" if mechanism == "pm1" else "sigma2_dp_PM2_paper"
    noise = WIDTH**2 * senders.mechanism.variance(1)
    assert noise == pytest.approx(CURVES[name], rel=1e-12)
    report = model.privacy_
    if mechanism == "pm1":
        assert report.epsilon_per_recipient == pytest.approx(0.78, abs=0.01)
        assert report.epsilon == pytest.approx(15.63, abs=0.01)
    assert report.epsilon_whole_client > report.epsilon
    assert "recipient" in report.warnings[0]


@pytest.mark.parametrize("mechanism", ["pm1", "pm2"])
@pytest.mark.parametrize("horizon", [None, 100])
def test_cost_of_all_values_where_they_lie_between_two_messages(mechanism, horizon):
    """One agent has all its rows before the others ask: every block of its first message."""
    params = {**PRIVATE, "horizon": horizon, "mechanism": mechanism, "noise_variance": 0.25}
    model = CollaborativeMean(**params)
    groups = np.concatenate([np.zeros(100, int), np.arange(1, 5)])
    model.fit(np.zeros((104, 1)), np.full(104, 0.5), groups=groups)
    noise = model._stream.senders.mechanism
    levels = 1
    if mechanism == "pm2":
        levels = 60 if horizon is None else (25).bit_length()
    stds = [noise.noise_std(s) if mechanism == "pm2" else noise.noise_std for s in range(levels)]
    attained = 100 * math.sqrt(4 * sum(std**-2 for std in stds))
    promised = gdp_mu(model.privacy_.epsilon_whole_client, 1e-6)
    assert attained <= promised * (1 + 1e-9)
    assert attained == pytest.approx(promised, rel=0.02)


@pytest.mark.parametrize("mechanism", ["pm1", "pm2"])
def test_pairs_receive_unbiased_means_with_the_stated_variance(mechanism):
    X, y, groups, means = stream(150, np.repeat([0, 1, 2], 15))
    model = CollaborativeMean(
        mechanism=mechanism, noise_variance=1 / 12, decision="test", **PRIVATE
    ).fit(X, y, groups=groups)
    others = ~np.eye(45, dtype=bool)
    errors = ((model.received_means_ - means) / model.received_stds_)[others]
    assert errors.mean() == pytest.approx(0, abs=0.1)
    assert errors.var() == pytest.approx(1, abs=0.1)


def test_pairs_plan_for_a_last_turn_that_is_not_full():
    """Each of eight agents asks the seven others twice in 14 steps, and one of them once more."""
    X, y, groups, _ = stream(15, np.arange(8) % 3)
    params = {**PRIVATE, "horizon": 15, "mechanism": "pm2", "noise_variance": 0.25}
    senders = CollaborativeMean(**params).fit(X, y, groups=groups)._stream.senders
    assert senders.mechanism.horizon == senders.index.max() == 3


def test_restricted_schedules_leak_and_say_so():
    X, y, groups, _ = stream(3, np.repeat([0, 1], 2))
    model = CollaborativeMean(
        mechanism="pm1",
        schedule="restricted",
        decision="test",
        noise_variance=0.1,
        **{**PRIVATE, "random_state": None},
    )
    with pytest.warns(pfl_sklearn.PrivacyWarning, match=r"restricted.*tells its exact mean"):
        model.fit(X, y, groups=groups)
    assert model.privacy_.epsilon == math.inf
    with pytest.raises(ValueError, match="release"):
        model.release()


def test_no_pair_has_more_messages_than_its_noise_allows():
    """Agents who join while others are asked in turn do not make anybody answer more often."""
    rng = np.random.default_rng(0)
    model = CollaborativeMean(
        mechanism="pm2", noise_variance=0.1, decision="test", **{**PRIVATE, "horizon": 64}
    )
    for n in (3, 3, 4, 6, 6, 9, 9, 10):
        groups = np.tile(np.arange(n), 8)
        model.partial_fit(np.zeros((8 * n, 1)), rng.random(8 * n), groups=groups)
    senders = model._stream.senders
    assert senders.mechanism.horizon == 32
    assert 8 < senders.index.max() <= 32


def test_a_restricted_agent_may_ask_the_same_one_at_every_step():
    model = CollaborativeMean(
        epsilon=50.0,
        bounds=(0.0, 1.0),
        horizon=60,
        mechanism="pm2",
        schedule="restricted",
        decision="test",
        noise_variance=1e-4,
        random_state=0,
    )
    y = np.tile(np.linspace(0.1, 0.9, 6), 60)
    model.fit(np.zeros((360, 1)), y, groups=np.tile(np.arange(6), 60))
    assert model.n_samples_per_client_.tolist() == [60] * 6
