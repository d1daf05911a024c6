"""Rounds that diverge before anything overflows."""

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from skorch import NeuralNetClassifier, NeuralNetRegressor
from torch import nn

from pfl_sklearn import neural_network
from pfl_sklearn.linear_model import DivergenceError
from pfl_sklearn.neural_network import (
    AdaPeDClassifier,
    FedAvgClassifier,
    FedAvgRegressor,
    LocalNetRegressor,
    PFedMeRegressor,
)

pytestmark = pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")

RNG = np.random.default_rng(0)
GROUPS = np.repeat(np.arange(12), 8)
X = RNG.normal(size=(96, 3))
Y = 10 * X[:, 0]
REGRESSORS = sorted(name for name in neural_network.__all__ if name.endswith("Regressor"))


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, rows):
        return self.last(self.first(rows))


# Modules, learning rates and local steps that leave something finite.
PACE = {
    "FedPerRegressor": (TwoLayers, 0.5, 2),
    "FedRepRegressor": (TwoLayers, 0.1, 1),
    "PPSGDNetRegressor": (TwoLayers, 0.5, 2),
    "PFedMeRegressor": (nn.Linear, 0.9, 1),
}


def recipe(lr, module=nn.Linear, **params):
    if module is nn.Linear:
        params |= {"module__in_features": 3, "module__out_features": 1}
    return NeuralNetRegressor(module, lr=lr, batch_size=8, **params)


def classifier(lr):
    sizes = {"module__in_features": 3, "module__out_features": 2}
    return NeuralNetClassifier(nn.Linear, criterion=nn.CrossEntropyLoss, lr=lr, **sizes)


@pytest.mark.parametrize("name", REGRESSORS)
def test_a_loss_far_above_that_of_a_constant(name):
    """All that is left after one round is finite: losses of 1e6 to 1e20 times a constant's."""
    module, rate, n_steps = PACE.get(name, (nn.Linear, 1.2, 10))
    params = {"n_rounds": 1, "local_steps": n_steps, "random_state": 0}
    model = getattr(neural_network, name)(recipe(rate, module), **params)
    match = rf"training loss of \S+, where the best constant has 120: .*lr={rate}\b"
    with pytest.raises(DivergenceError, match=match):
        model.fit(X, Y, groups=GROUPS)
    assert not hasattr(model, "privacy_")


def test_the_rates_that_may_be_too_large_are_named():
    model = PFedMeRegressor(recipe(0.5), local_steps=2, n_rounds=1, random_state=0)
    rates = r"lr=0\.5\) or local_learning_rate=0\.1 or server_learning_rate=1\b"
    with pytest.raises(DivergenceError, match=rates):
        model.fit(X, Y, groups=GROUPS)
    far = {"server_optimizer": lambda params: torch.optim.SGD(params, lr=1e4)}
    with pytest.raises(DivergenceError, match="that of server_optimizer"):
        FedAvgRegressor(recipe(0.01), n_rounds=2, **far).fit(X, Y, groups=GROUPS)


def test_a_loss_of_a_few_times_that_of_a_constant_is_a_warning():
    y = (X[:, 0] > 0).astype(int)
    y[::4] = 1 - y[::4]  # of labels that nothing separates no loss is near 0
    model = FedAvgClassifier(classifier(20.0), n_rounds=3, random_state=0)
    with pytest.warns(ConvergenceWarning, match=r"best constant has 0\.6\d+: .*lr=20\b"):
        model.fit(X, y, groups=GROUPS)
    assert model.n_rounds_ == 3


def test_a_start_that_is_far_off_is_no_divergence():
    """Steps are small, and the loss falls, but a mean of 1000 is still far away."""
    model = FedAvgRegressor(recipe(1e-4), n_rounds=2, random_state=0).fit(
        X, Y + 1000, groups=GROUPS
    )
    assert model.history_["loss"][1] < model.history_["loss"][0]


@pytest.mark.parametrize("seed", range(4))
def test_clients_that_no_round_sampled_yet_are_no_divergence(seed):
    """A round of a client that is trained has a small loss, those that wait have a large one."""
    model = LocalNetRegressor(recipe(0.1), client_fraction=0.25, local_steps=20, warm_start=True)
    model.set_params(n_rounds=1, random_state=seed)
    groups = np.repeat(np.arange(4), 24)
    for n_rounds in range(1, 5):
        model.set_params(n_rounds=n_rounds).fit(X, 1000 + RNG.normal(size=96), groups=groups)
    assert model.n_rounds_ == 4


def test_a_loss_whose_constant_is_not_known_says_nothing():
    """A Poisson loss may begin and end anywhere, at either sign."""
    y = 500 * np.exp(X[:, 0])
    net = recipe(1e-5, criterion=nn.PoissonNLLLoss)
    FedAvgRegressor(net, n_rounds=1, random_state=0).fit(X, y, groups=GROUPS)


@pytest.mark.parametrize("cls", [FedAvgClassifier, AdaPeDClassifier])
def test_noise_hides_the_loss(cls):
    """The same fit without noise would end; with it no row may decide that."""
    y = (RNG.random(96) < 0.5).astype(int)
    model = cls(classifier(1e6), n_rounds=1, random_state=0)
    with pytest.raises(DivergenceError, match=r"lr=1e\+06"):
        model.fit(X, y, groups=GROUPS)
    model.set_params(epsilon=1.0, delta=1e-3, clip_norm=1.0).fit(X, y, groups=GROUPS)
    assert model.n_rounds_ == 1


@pytest.mark.parametrize(
    "model", [LocalNetRegressor(n_rounds=1), FedAvgRegressor(n_rounds=1, fine_tune_steps=10)]
)
def test_a_new_client_whose_steps_diverge(model):
    """Also where all of them come after the rounds."""
    model = clone(model).set_params(estimator=recipe(0.001), random_state=0)
    model.fit(X, Y, groups=GROUPS)
    with pytest.raises(DivergenceError, match=r"training loss of .* at client 20,.*lr=1\.2\b"):
        model.set_params(estimator__lr=1.2).personalize(X[:8], Y[:8], groups=[20] * 8)
    assert 20 not in model.clients_
