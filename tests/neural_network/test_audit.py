"""End-to-end audits of private nets: fits on neighbouring tables, and mutants to be convicted.

Every release is made for mu = 2 (Gaussian DP) under replacement of a client. A lower confidence
bound on mu from 500 fits a side must stay below 2, and above 2 for every mutant. Seeds are fixed.
Over seeds, a sound release is convicted with a probability of at most 1e-3, and a mutant escapes
with one below 0.02, or 0.3 where two parts are clipped apart (mu = 2.83).
"""

import math
from functools import partial

import numpy as np
import pytest
from sklearn.base import clone

from pfl_sklearn.neural_network import (
    AdaMixNetClassifier,
    AdaPeDClassifier,
    FedAvgClassifier,
    FedEMClassifier,
    FedMutualClassifier,
    PPSGDNetClassifier,
)
from pfl_sklearn.neural_network._base import BaseNeural
from pfl_sklearn.neural_network._fedem import _FedEM
from pfl_sklearn.priors import DirichletPrior
from pfl_sklearn.privacy import gdp_epsilon
from pfl_sklearn.privacy._mechanisms import _clipped_sum, _frequencies
from pfl_sklearn.privacy._mechanisms._gaussian import clip_l2
from pfl_sklearn.privacy._mechanisms._printed import _noisy_steps
from pfl_sklearn.privacy._mechanisms._printed._noisy_steps import NoisySteps
from pfl_sklearn.privacy.auditing import gdp_lower_bound

torch = pytest.importorskip("torch")
skorch = pytest.importorskip("skorch")

from pfl_sklearn.neural_network import MLP  # noqa: E402
from pfl_sklearn.neural_network._engine._engine import StackedModels  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning"),
    pytest.mark.slow,
]

N_FITS, STEPS, DELTA = 500, 4, 1e-5
BOUND, PSI_BOUND, PSI = 1e-4, 1e-2, 4.0
N_CLIENTS, RATE, PSI_RATE = 4, 10.0, 0.1
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


SETTINGS = {"n_rounds": 1, "local_steps": STEPS, "delta": DELTA, "clip_norm": BOUND}
ADAPED = {
    "psi_init": PSI,
    "psi_min": 0.5,
    "psi_clip_norm": PSI_BOUND,
    "psi_learning_rate": PSI_RATE,
}
ADAPED |= {"global_loss": 0.0}  # both parts of a message then move by what the bounds allow
fedavg = FedAvgClassifier(noise_multiplier=1.0, **SETTINGS)
fedavg_with_quantile = FedAvgClassifier(noise_multiplier=1.0, clip_quantile=0.5, **SETTINGS)
adaped = AdaPeDClassifier(noise_multiplier=1.0, **SETTINGS, **ADAPED)
adaped_per_step = AdaPeDClassifier(
    noise_multiplier=STEPS * math.sqrt(2), noise="per_step", **SETTINGS, **ADAPED
)
# Squared parameters add up: 0.01 in the round, and 3.99 in the sum of label frequencies.
labels = FedAvgClassifier(
    noise_multiplier=20.0,
    label_prior=DirichletPrior(),
    label_prior_share=3.99 / (3.99 + 20.0**-2),
    **SETTINGS,
)
# One step: the gradients of both labels are opposite in every layer, and longer than the bound.
N_HIDDEN, N_WEIGHTS = 6, 12  # parameters of the hidden layer, and of both
ONE_STEP = {**SETTINGS, "noise_multiplier": 1.0, "local_steps": 1}
FIELD = {
    "fedem": FedEMClassifier(n_components=3, **ONE_STEP),
    "fedmutual": FedMutualClassifier(**ONE_STEP),
    "ppsgd_net": PPSGDNetClassifier(alpha=0.5, **ONE_STEP),
    "adamix_net": AdaMixNetClassifier(n_components=2, proximal=0.0, **ONE_STEP),
}
TWO_NETS = [N_WEIGHTS, 2 * N_WEIGHTS]  # where they end
PARTS = {"fedem": TWO_NETS, "ppsgd_net": [N_HIDDEN], "adamix_net": TWO_NETS}
RELEASES = {
    **FIELD,
    "fedavg": fedavg,
    "fedavg_with_quantile": fedavg_with_quantile,
    "adaped": adaped,
    "adaped_per_step": adaped_per_step,
    "labels": labels,
}
every_release = pytest.mark.parametrize("name", RELEASES)
sums = pytest.mark.parametrize("name", ["fedavg", "adaped"])


@pytest.fixture(autouse=True)
def one_engine(monkeypatch):
    """The same recipe and weights to start from in all fits, so they are looked at only once."""
    made = []
    for owner in (BaseNeural, _FedEM):
        make = owner._make_engines

        def engines(self, *given, make=make):
            if not made:
                made.append(make(self, *given))
            return made[0]

        monkeypatch.setattr(owner, "_make_engines", engines)
    for owner in (BaseNeural, AdaPeDClassifier):
        monkeypatch.setattr(owner, "_check_parameters", lambda self: None)


@pytest.fixture
def seen(monkeypatch):
    """What clients send that add noise, noise of gradients, and sums that the server gets.

    Noise is that of each step, part and client.
    """
    found = {"messages": [], "noise": [], "sums": []}
    drawn, release = _noisy_steps.gaussian_on_grid, NoisySteps.release
    release_sum = _clipped_sum.ClippedSum.release

    def spy_on_noise(exact, std, rng):
        noisy = drawn(exact, std, rng)
        found["noise"].append(noisy - exact)
        return noisy

    def spy_on_messages(self, messages, *rest):
        found["messages"].append(messages)
        return release(self, messages, *rest)

    def spy_on_sums(self, *given, **settings):
        released = release_sum(self, *given, **settings)
        found["sums"].append(released.total.ravel())
        return released

    monkeypatch.setattr(_clipped_sum.ClippedSum, "release", spy_on_sums)
    monkeypatch.setattr(_noisy_steps, "gaussian_on_grid", spy_on_noise)
    monkeypatch.setattr(NoisySteps, "release", spy_on_messages)
    return found


def fitted(estimator, truth, seed):
    """A fit in which the first client's rows are of the first class, or of the second."""
    X, y = np.zeros((2 * N_CLIENTS, 2)), np.tile([0, 1], N_CLIENTS)
    X[:2], y[:2] = (1.0, 0.0), (0 if truth else 1)
    groups = np.repeat(np.arange(N_CLIENTS), 2)
    return estimator.set_params(random_state=seed).fit(X, y, groups=groups)


def projection(net, psi, psi_share):
    """How far a change goes in the canary's direction, in units of the bounds of its parts."""
    return net @ TOWARDS_FIRST / BOUND + psi_share * psi / PSI_BOUND


def score_of_sum(estimator, seen, truth, seed, psi_share=0.05):
    """The sum of messages, as the released models show it; the canary moves psi but a little."""
    model = fitted(estimator, truth, seed)
    psi = model.history_["psi"][-1] if "psi" in model.history_ else PSI
    start = model._engines.population.start()
    return N_CLIENTS * projection(model._population - start, psi - PSI, psi_share)


def score_of_message(estimator, seen, truth, seed):
    """The message of the client less the noise of its earlier steps, in units of a step."""
    for found in seen.values():
        found.clear()
    fitted(estimator, truth, seed)
    sent, own = seen["messages"][0][0], seen["noise"][::N_CLIENTS][: 2 * (STEPS - 1)]
    net, psi = sent[:-1] / RATE + sum(own[::2]), sent[-1] / PSI_RATE + sum(own[1::2])[0]
    return projection(net, psi, 1.0)


def score_of_labels(estimator, seen, truth, seed):
    """How far the released sum of label frequencies goes towards the canary's class."""
    return fitted(estimator, truth, seed)._label_sums["frequencies"] @ [1.0, -1.0]


def score_along(estimator, seen, truth, seed, direction):
    """The released sum in the canary's direction, in units of the bound."""
    return released_sum(estimator, seen, truth, seed) @ direction / BOUND


def released_sum(estimator, seen, truth, seed):
    seen["sums"].clear()
    fitted(estimator, truth, seed)
    return seen["sums"][0]


def canary_direction(estimator, seen):
    """Unit vector in which the sum moves with the canary's label, found without noise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_clipped_sum, "gaussian_on_grid", lambda exact, std, rng: exact)
        moved = np.subtract(*(released_sum(estimator, seen, truth, 0) for truth in (True, False)))
    if isinstance(estimator, AdaMixNetClassifier):  # weights of its nets differ from seed to seed
        mean = moved[: TWO_NETS[1]].reshape(2, -1).mean(axis=0)
        moved = np.concatenate([mean, mean, [0.0, 0.0]])
    return moved / np.linalg.norm(moved)


SCORES = {"adaped_per_step": score_of_message, "labels": score_of_labels}


def lower_bound(name, seen, **given):
    """Lower confidence bound on mu of a release."""
    module, rate = (Layers, 1e4) if name in FIELD else (linear(), RATE)
    net = skorch.NeuralNetClassifier(module, criterion=torch.nn.CrossEntropyLoss)
    estimator = RELEASES[name].set_params(estimator=net.set_params(lr=rate, batch_size=2))
    score = partial(SCORES.get(name, score_of_sum), estimator, seen, **given)
    if name in FIELD:
        estimator.set_params(random_state=0)
        score = partial(score_along, *score.args, direction=canary_direction(estimator, seen))
    seeds = np.random.SeedSequence(0).generate_state(2 * N_FITS).tolist()
    with_canary = np.array([score(True, seed) for seed in seeds[:N_FITS]])
    without = np.array([score(False, seed) for seed in seeds[N_FITS:]])
    return gdp_lower_bound(with_canary, without)


@every_release
def test_releases_keep_their_promise(name, seen):
    bound = lower_bound(name, seen)
    assert 1.0 < bound <= 2.0
    report = RELEASES[name].privacy_
    figures = {report.relation: report.epsilon, **dict(report.epsilon_under)}
    assert figures["replace_one"] == pytest.approx(gdp_epsilon(2.0, DELTA))


@pytest.mark.parametrize("name", ["fedavg", "fedavg_with_quantile", "adaped", "labels", *FIELD])
def test_halved_noise_is_convicted(name, seen, monkeypatch):
    full = _clipped_sum.gaussian_on_grid
    for module in (_clipped_sum, _frequencies):
        monkeypatch.setattr(
            module, "gaussian_on_grid", lambda exact, std, rng: full(exact, std / 2, rng)
        )
    assert lower_bound(name, seen) > 2.0


def unclipped(monkeypatch):
    """Let the release add its noise to messages as they are."""

    def summed(messages, bound, bounded):
        return messages.sum(axis=0), np.ones(len(messages), dtype=bool)

    monkeypatch.setattr(_clipped_sum, "_clipped_sum", summed)


@sums
def test_a_clip_of_every_step_is_convicted(name, seen, monkeypatch):
    """Steps of the global net are clipped one by one, not what they add up to."""
    unclipped(monkeypatch)
    step = StackedModels.step

    def clipped_step(self, losses, rate):
        before = self.values.clone()
        step(self, losses, rate)
        change = (self.values - before).double().numpy()
        if self._start.ndim == 1:  # the global net
            self.values.copy_(before + torch.from_numpy(clip_l2(change, BOUND)))

    monkeypatch.setattr(StackedModels, "step", clipped_step)
    assert lower_bound(name, seen) > 2.0


def test_parts_that_are_clipped_apart_are_convicted(seen, monkeypatch):
    def apart(messages, bound, bounded):
        net, psi = np.split(messages, [6], axis=1)
        kept = np.concatenate([clip_l2(net, bound), clip_l2(psi, bound)], axis=1)
        return kept.sum(axis=0), np.ones(len(messages), dtype=bool)

    monkeypatch.setattr(_clipped_sum, "_clipped_sum", apart)
    assert lower_bound("adaped", seen, psi_share=1.0) > 2.0


@pytest.mark.parametrize("name", PARTS)
def test_nets_and_layers_that_are_clipped_apart_are_convicted(name, seen, monkeypatch):
    def apart(messages, bound, bounded):
        parts = np.split(messages.reshape(len(messages), -1), PARTS[name], axis=1)
        kept = np.concatenate([clip_l2(part, bound) for part in parts], axis=1)
        return kept.sum(axis=0).reshape(messages.shape[1:]), np.ones(len(messages), dtype=bool)

    monkeypatch.setattr(_clipped_sum, "_clipped_sum", apart)
    assert lower_bound(name, seen) > 2.0


def test_noise_that_counts_every_step_is_convicted(seen, monkeypatch):
    """What would do if the steps were releases of their own; with 4 steps it is half the noise."""
    too_little = clone(adaped_per_step).set_params(noise_multiplier=math.sqrt(2 * STEPS))
    monkeypatch.setitem(RELEASES, "adaped_per_step", too_little)
    assert lower_bound("adaped_per_step", seen) > 2.0
