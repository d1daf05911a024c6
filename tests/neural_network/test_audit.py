"""Audits of private nets: what fits on neighbouring tables release, and mutants to be convicted.

Every release is made for mu = 2 (Gaussian DP) under replacement of a client. A fit is one release:
what reaches it is recorded, and it is repeated 1000 times a side. A lower confidence bound on mu
must stay below 2, and above 2 for every mutant. Seeds are fixed. Over seeds, a sound release is
convicted with a probability of at most 1e-3, a mutant of mu = 4 escapes with one below 1e-3, and
one of mu = 2.83, where two parts are clipped apart, with one below 0.02.
"""

import math
from functools import cache

import numpy as np
import pytest
import skorch
import torch
from sklearn.base import clone

from pfl_sklearn.neural_network import (
    MLP,
    AdaMixNetClassifier,
    AdaPeDClassifier,
    FedAvgClassifier,
    FedEMClassifier,
    FedMutualClassifier,
    PPSGDNetClassifier,
)
from pfl_sklearn.neural_network._engine._engine import StackedModels
from pfl_sklearn.priors import DirichletPrior
from pfl_sklearn.privacy import ClippedSum, FrequencyMoments, gdp_epsilon
from pfl_sklearn.privacy._mechanisms import _clipped_sum, _frequencies
from pfl_sklearn.privacy._mechanisms._gaussian import clip_l2
from pfl_sklearn.privacy._mechanisms._printed import _noisy_steps
from pfl_sklearn.privacy._mechanisms._printed._noisy_steps import NoisySteps
from pfl_sklearn.privacy.auditing import gdp_lower_bound
from tests.helpers.slow import slow

pytestmark = pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")

N_RELEASES, STEPS, DELTA = 1000, 4, 1e-5
BOUND, PSI_BOUND, PSI_RATE, RATE = 1e-4, 1e-2, 0.1, 10.0
TOWARDS_FIRST = np.array([1.0, 0.0, -1.0, 0.0, 1.0, -1.0]) / 2  # weights (2, 2), biases (2,)


def linear():
    """Softmax regression that starts at odds of exp(5) for the second class at x = (1, 0)."""
    module = MLP(2, 2, hidden=())
    with torch.no_grad():
        module.layers[-1].weight.copy_(torch.tensor([[-1.25, 0.0], [1.25, 0.0]]))
        module.layers[-1].bias.copy_(torch.tensor([-1.25, 1.25]))
    return module


class Layers(torch.nn.Sequential):
    """Two layers of two units, whose weights are drawn."""

    def __init__(self):
        super().__init__(torch.nn.Linear(2, 2), torch.nn.Tanh(), torch.nn.Linear(2, 2))


def recipe(module, lr):
    criterion = torch.nn.CrossEntropyLoss
    return skorch.NeuralNetClassifier(module, criterion=criterion, lr=lr, batch_size=2)


SETTINGS = {
    "estimator": recipe(linear(), RATE),
    "n_rounds": 1,
    "local_steps": STEPS,
    "delta": DELTA,
    "clip_norm": BOUND,
    "random_state": 0,
}
ADAPED = {
    "psi_init": 4.0,
    "psi_min": 0.5,
    "psi_clip_norm": PSI_BOUND,
    "psi_learning_rate": PSI_RATE,
}
ADAPED |= {"global_loss": 0.0}  # both parts of a message then move by what the bounds allow
# One step: the gradients of both labels are opposite in every layer, and longer than the bound.
ONE_STEP = {**SETTINGS, "local_steps": 1, "noise_multiplier": 1.0, "estimator": recipe(Layers, 1e4)}
SUMS = {
    "fedavg": FedAvgClassifier(noise_multiplier=1.0, **SETTINGS),
    "fedavg_with_quantile": FedAvgClassifier(noise_multiplier=1.0, clip_quantile=0.5, **SETTINGS),
    "adaped": AdaPeDClassifier(noise_multiplier=1.0, **SETTINGS, **ADAPED),
    "fedem": FedEMClassifier(n_components=3, **ONE_STEP),
    "fedmutual": FedMutualClassifier(**ONE_STEP),
    "ppsgd_net": PPSGDNetClassifier(alpha=0.5, **ONE_STEP),
    "adamix_net": AdaMixNetClassifier(n_components=2, proximal=0.0, **ONE_STEP),
    # Squared parameters add up: 0.01 in the round, and 3.99 in the sum of label frequencies.
    "labels": FedAvgClassifier(
        noise_multiplier=20.0,
        label_prior=DirichletPrior(),
        label_prior_share=3.99 / (3.99 + 20.0**-2),
        **SETTINGS,
    ),
}
PER_STEP = AdaPeDClassifier(
    noise_multiplier=STEPS * math.sqrt(2), noise="per_step", **SETTINGS, **ADAPED
)
N_HIDDEN, N_WEIGHTS, N_LINEAR = 6, 12, 6  # parameters of a hidden layer, of both, of one alone
# Where parts of a message end that might be clipped apart.
PARTS = {
    "adaped": [N_LINEAR],
    "fedem": [N_WEIGHTS, 2 * N_WEIGHTS],
    "ppsgd_net": [N_HIDDEN],
    "adamix_net": [N_WEIGHTS, 2 * N_WEIGHTS],
}


def fitted(estimator, truth, n_clients=4):
    """A fit in which the first client's rows are of the first class, or of the second."""
    X, y = np.zeros((2 * n_clients, 2)), np.tile([0, 1], n_clients)
    X[:2], y[:2] = (1.0, 0.0), (0 if truth else 1)
    return clone(estimator).fit(X, y, groups=np.repeat(np.arange(n_clients), 2))


def recorded_fit(name, truth):
    """A function of a generator that releases once more what a fit released, and its report."""
    mechanism, calls = FrequencyMoments if name == "labels" else ClippedSum, []
    release = mechanism.release

    def recording(*given):
        calls.append(given[:-1])
        return release(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mechanism, "release", recording)
        report = fitted(SUMS[name], truth).privacy_
    ((owner, *given),) = calls

    def released(rng):
        again = release(owner, *given, rng)
        return (again["frequencies"] if name == "labels" else again.total).ravel()

    return released, report


# A fit is one release: what reaches it depends neither on the noise nor on how it is clipped.
shared_fit = cache(recorded_fit)


def scale_noise(patch, factor):
    for module in (_clipped_sum, _frequencies):
        full = module.gaussian_on_grid
        patch.setattr(
            module,
            "gaussian_on_grid",
            lambda exact, std, rng, full=full: full(exact, factor * std, rng) if factor else exact,
        )


def lower_bound(name, recorded=shared_fit):
    """Lower confidence bound on mu of a released sum, along the line on which the canary moves."""
    releases = [recorded(name, truth)[0] for truth in (True, False)]
    with pytest.MonkeyPatch.context() as patch:
        scale_noise(patch, 0)
        direction = np.subtract(*(release(None) for release in releases))
    rng = np.random.default_rng(0)
    scores = [[release(rng) @ direction for _ in range(N_RELEASES)] for release in releases]
    return gdp_lower_bound(*map(np.array, scores))


def assert_promise(report):
    figures = {report.relation: report.epsilon, **dict(report.epsilon_under)}
    assert figures["replace_one"] == pytest.approx(gdp_epsilon(2.0, DELTA))


every_sum = pytest.mark.parametrize("name", SUMS)


@pytest.mark.slow_but_first
@every_sum
def test_sums_keep_their_promise(name):
    assert 1.3 < lower_bound(name) <= 2.0
    assert_promise(shared_fit(name, True)[1])


@every_sum
def test_a_published_model_knows_the_canary_by_its_sums_alone(name, monkeypatch):
    """Where the sums are those of constants, neighbouring tables give the same model."""
    for mechanism in (ClippedSum, FrequencyMoments):
        monkeypatch.setattr(mechanism, "release", of_constants(mechanism.release))
    one, other = (fitted(SUMS[name], truth).release() for truth in (True, False))
    np.testing.assert_equal(one._server, other._server)
    if name == "labels":
        np.testing.assert_equal(vars(one.label_prior_), vars(other.label_prior_))


def of_constants(release):
    return lambda mechanism, sent, *given: release(mechanism, np.ones_like(sent), *given)


@pytest.mark.parametrize("name", ["fedavg", "labels"])  # one of each mechanism
def test_halved_noise_is_convicted(name, monkeypatch):
    scale_noise(monkeypatch, 0.5)
    assert lower_bound(name) > 2.0


@pytest.mark.parametrize("name", ["fedavg", "adaped"])
def test_a_clip_of_every_step_is_convicted(name, monkeypatch):
    """Steps of the global net are clipped one by one, not what they add up to."""
    monkeypatch.setattr(
        _clipped_sum, "_clipped_sum", lambda messages, *_: (messages.sum(axis=0), within(messages))
    )
    step = StackedModels.step

    def clipped_step(self, losses, rate):
        before = self.values.clone()
        step(self, losses, rate)
        change = (self.values - before).double().numpy()
        if self._start.ndim == 1:  # the global net
            self.values.copy_(before + torch.from_numpy(clip_l2(change, BOUND)))

    monkeypatch.setattr(StackedModels, "step", clipped_step)
    assert lower_bound(name, recorded_fit) > 2.0


def within(messages):
    return np.ones(len(messages), dtype=bool)


@pytest.mark.parametrize("name", ["ppsgd_net", *slow(["adaped", "fedem", "adamix_net"])])
def test_parts_that_are_clipped_apart_are_convicted(name, monkeypatch):
    def apart(messages, bound, bounded):
        parts = np.split(messages.reshape(len(messages), -1), PARTS[name], axis=1)
        clipped = np.concatenate([clip_l2(part, bound) for part in parts], axis=1)
        return clipped.sum(axis=0).reshape(messages.shape[1:]), within(messages)

    monkeypatch.setattr(_clipped_sum, "_clipped_sum", apart)
    assert lower_bound(name) > 2.0


# Noise in every step ------------------------------------------------------------------------------
def scores_of_messages(estimator, truth):
    """The canary's message less the noise of its earlier steps, in units of a step.

    One fit has as many clients with the canary's rows, each of which adds noise of its own.
    """
    messages, noise = [], {}  # noise of each step and part, by the generator of a client
    draw, release = _noisy_steps.gaussian_on_grid, NoisySteps.release

    def recorded_draw(exact, std, rng):
        noisy = draw(exact, std, rng)
        noise.setdefault(rng, []).append(noisy - exact)
        return noisy

    def recorded_release(self, sent, *given):
        messages.append(sent)
        return release(self, sent, *given)

    X, y = np.tile([1.0, 0.0], (2 * N_RELEASES + 2, 1)), np.full(2 * N_RELEASES + 2, 1 - truth)
    y[-2:] = [0, 1]  # of a further client, so that both classes occur
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NoisySteps, "release", recorded_release)
        patch.setattr(_noisy_steps, "gaussian_on_grid", recorded_draw)
        clone(estimator).fit(X, y, groups=np.arange(len(X)) // 2)
    found = []
    for sent, drawn in zip(messages[0][:-1], noise.values(), strict=False):
        assert len(drawn) == 2 * STEPS
        earlier = drawn[:-2]
        net = sent[:-1] / RATE + sum(earlier[::2])
        psi = sent[-1] / PSI_RATE + sum(earlier[1::2])[0]
        found.append(net @ TOWARDS_FIRST / BOUND + psi / PSI_BOUND)
    return np.array(found)


def lower_bound_of_messages(estimator):
    return gdp_lower_bound(*(scores_of_messages(estimator, truth) for truth in (True, False)))


@pytest.mark.slow
def test_messages_with_noise_in_every_step_keep_their_promise():
    assert 1.3 < lower_bound_of_messages(PER_STEP) <= 2.0
    assert_promise(fitted(PER_STEP, True).privacy_)


@pytest.mark.slow
def test_noise_that_counts_every_step_is_convicted():
    """What would do if the steps were releases of their own; with 4 steps it is half the noise."""
    too_little = clone(PER_STEP).set_params(noise_multiplier=math.sqrt(2 * STEPS))
    assert lower_bound_of_messages(too_little) > 2.0
