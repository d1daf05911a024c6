"""An end-to-end audit of streams: what all messages together reveal of a single value.

Every agent is a trial of its own: half of them received one value at one end of the bounds, half at
the other. The statistic is the likelihood ratio of all messages of an agent's stream. Messages are
calibrated to mu = 2; a lower confidence bound on mu from 500 agents a side must stay below it, and
above it for every mutant.
"""

import math

import numpy as np
import pytest

from pfl_sklearn.online import CollaborativeMean, _variances
from pfl_sklearn.privacy import gdp_epsilon
from pfl_sklearn.privacy._mechanisms._binary_tree import BinaryTree
from pfl_sklearn.privacy._mechanisms._noise import public_grid
from pfl_sklearn.privacy._mechanisms._printed._partial_sums import PartialSums
from pfl_sklearn.privacy._mechanisms._running_sums import RunningSums
from pfl_sklearn.privacy._mechanisms._square_root import SquareRootSums
from pfl_sklearn.privacy.auditing import gdp_lower_bound
from tests.helpers.noise import noise_matrix

pytestmark = pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")

MU = 2.0
DELTA = 1e-6
N_STEPS = 8
N_AGENTS = 1000
TRUTH = np.arange(N_AGENTS) < N_AGENTS // 2
STREAMS = {"epsilon": gdp_epsilon(MU, DELTA), "delta": DELTA, "bounds": (-1.0, 3.0)}
BROADCASTS = [
    {"mechanism": "sqrt", "horizon": N_STEPS},
    {"mechanism": "sqrt"},
    {"mechanism": "sqrt", "horizon": N_STEPS, "noise_variance": 1.0},
    {"mechanism": "tree", "horizon": N_STEPS},
    {"mechanism": "tree"},
    {"mechanism": "pm1", "schedule": "broadcast"},
]


@pytest.fixture
def messages(monkeypatch):
    """Everything that the mechanisms let out."""
    sent, privatize = [], RunningSums.privatize

    def spy(self, *args):
        sent.append((self, privatize(self, *args)))
        return sent[-1][1]

    monkeypatch.setattr(RunningSums, "privatize", spy)
    return sent


def run(params, messages, first=(3.0, -1.0), seed=0):
    """Messages (n_steps, n_coordinates, n_agents) of agents whose first values are as given."""
    y = np.full((N_STEPS, N_AGENTS), 1.0)
    y[0] = np.where(TRUTH, *first)
    model = CollaborativeMean(**STREAMS, **params, decision="test", random_state=seed)
    model.fit(np.zeros((y.size, 1)), y.ravel(), groups=np.tile(np.arange(N_AGENTS), N_STEPS))
    return np.stack([message for _, message in messages]), model.privacy_


def attacked_mu(sent, weights, direction):
    """Lower bound on mu from the likelihood ratios of the agents."""
    ratio = np.einsum("tpn,t,p->n", sent, weights, direction)
    return gdp_lower_bound(ratio[TRUTH], ratio[~TRUTH])


def likelihood(mechanism):
    """Weights of the messages of a stream in the ratio: all sums contain the first value."""
    noise = noise_matrix(mechanism, N_STEPS)
    return np.linalg.solve(noise @ noise.T, np.ones(N_STEPS))


def spent(mechanism):
    """Largest mu of the first messages: all of it at the horizon, less without one."""
    so_far = {SquareRootSums: 1.367, BinaryTree: 1.861}
    return MU if mechanism.horizon else so_far.get(type(mechanism), MU)


@pytest.mark.parametrize("params", BROADCASTS, ids=repr)
def test_messages_keep_their_promise(params, messages):
    sent, report = run(params, messages)
    mechanism = messages[0][0]
    bound = attacked_mu(sent, likelihood(mechanism), np.eye(sent.shape[1])[0])
    assert 0.4 * spent(mechanism) < bound < spent(mechanism) <= MU
    assert report.epsilon == pytest.approx(STREAMS["epsilon"])


@pytest.mark.parametrize("params", BROADCASTS, ids=repr)
def test_half_the_noise_is_convicted(params, messages, monkeypatch):
    for kind in (SquareRootSums, BinaryTree, PartialSums):
        advance = kind.advance
        monkeypatch.setattr(kind, "advance", lambda *args, advance=advance: advance(*args) / 2)
    sent, _ = run(params, messages)
    mechanism = messages[0][0]
    bound = attacked_mu(sent, likelihood(mechanism), np.eye(sent.shape[1])[0])
    assert bound > spent(mechanism)


def test_squares_that_weigh_more_are_convicted(messages, monkeypatch):
    """From the middle of the range to its end: half the value, and the whole square."""
    params = {"mechanism": "sqrt", "horizon": N_STEPS}
    sent, _ = run(params, messages, first=(3.0, 1.0))
    weights, direction = likelihood(messages[0][0]), np.array([0.5, _variances.SQUARE / 4])
    assert attacked_mu(sent, weights, direction / np.linalg.norm(direction)) < MU
    messages.clear()
    monkeypatch.setattr(_variances, "SQUARE", 2.5 * _variances.SQUARE)
    sent, _ = run(params, messages, first=(3.0, 1.0))
    assert attacked_mu(sent, weights, np.array([0.0, 1.0])) > MU


@pytest.mark.slow
def test_all_recipients_together_learn_what_the_report_says(messages):
    """Every pair has noise of its own: together the others see mu times the root of their number.

    In its first step every agent asks the first one.
    """
    n_trials, n = 500, 6
    bound = {}
    for value in (1.0, -1.0):
        sums = []
        for trial in range(n_trials):
            y = np.zeros(n)
            y[0] = value
            model = CollaborativeMean(
                epsilon=gdp_epsilon(0.5, DELTA),
                delta=DELTA,
                bounds=(-1.0, 1.0),
                mechanism="pm1",
                noise_variance=1.0,
                decision="test",
                random_state=2 * trial + int(value > 0),
            ).fit(np.zeros((n, 1)), y, groups=np.arange(n))
            sums.append(model.received_means_[1:, 0].sum())
        bound[value] = np.array(sums)
    report, joint_mu = model.privacy_, 0.5 * math.sqrt(n - 1)
    assert 0.4 * joint_mu < gdp_lower_bound(bound[1.0], bound[-1.0]) < joint_mu
    assert report.epsilon == pytest.approx(gdp_epsilon(joint_mu, DELTA))
    assert report.epsilon_per_recipient == pytest.approx(gdp_epsilon(0.5, DELTA))


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", ["sqrt", "tree", "pm1"])
def test_lowest_bits_of_messages_reveal_nothing(mechanism):
    """Noise that has grown large still covers the sums to the last bit of a message."""
    rng, n_steps = np.random.default_rng(0), 4_000
    model = CollaborativeMean(
        epsilon=1.0, bounds=(0, 1), noise_variance=0.1, mechanism=mechanism, random_state=0
    )
    model.fit(np.zeros((2 * n_steps, 1)), rng.random(2 * n_steps), groups=np.tile([0, 1], n_steps))
    senders, same = model._stream.senders, []
    noise = senders.mechanism
    grid = public_grid(1 / noise.mu)

    class Spy:
        def __getattr__(self, name):
            return getattr(noise, name)

        def privatize(self, sums, *state):
            messages = noise.privatize(sums, *state)
            same.extend((np.rint(messages / grid) - np.rint(sums / grid)).ravel() % 2 == 0)
            return messages

    senders.mechanism = Spy()
    for _ in range(500):
        senders.take(np.array([0, 1]), (rng.random(2) - 0.5)[None])
    assert len(same) == 1000
    assert np.mean(same) == pytest.approx(0.5, abs=0.08)
