"""Which modules are chains of layers, whose clients are trained together."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pfl_sklearn.neural_network import MLP
from pfl_sklearn.neural_network._engine._chain import chain_of


class Written(nn.Module):
    """Two layers, and a forward pass that is written out."""

    def __init__(self, forward):
        super().__init__()
        self.first, self.last = nn.Linear(7, 5), nn.Linear(5, 3)
        self.forward = forward.__get__(self)


class Reversed(torch.autograd.Function):
    """A rectifier with a gradient of its own."""

    @staticmethod
    def forward(ctx, rows):
        return torch.relu(rows)

    @staticmethod
    def backward(ctx, slope):
        return -slope


def partly_frozen(self, X):
    with torch.no_grad():
        rows = self.first(X)
    return self.last(rows)


def half_precise(self, X):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return self.last(self.first(X))


def hooked():
    module = nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3))
    module[0].register_full_backward_hook(lambda *given: None)
    return module


def steps_of(module):
    return chain_of(module, (7,), torch.float32, torch.device("cpu"))


CHAINS = {
    "perceptron": MLP(7, 3, (4, 4), center=[1.0] * 7, output_scale=[2.0] * 3),
    "layer": nn.Linear(7, 3, bias=False),
    "layers": nn.Sequential(nn.Flatten(), nn.Linear(7, 3), nn.Identity(), nn.LogSoftmax(dim=1)),
    "in place": nn.Sequential(nn.Linear(7, 5), nn.LeakyReLU(inplace=True), nn.Linear(5, 3)),
    "function": Written(lambda self, X: self.last(torch.relu(self.first(torch.flatten(X, 1))))),
    "method": Written(lambda self, X: self.last(self.first(X).tanh()).softmax(dim=-1)),
    "weights": Written(
        lambda self, X: self.last(F.relu(F.linear(X, self.first.weight, self.first.bias)))
    ),
}
OTHERS = {
    "sum": Written(lambda self, X: self.last(self.first(X) + 1)),
    "layer twice": Written(lambda self, X: self.last(self.first(X)) + self.last(self.first(X))),
    "unused layer": Written(lambda self, X: self.first(X)),
    "other weights": Written(lambda self, X: self.last(F.linear(X, 2 * self.first.weight))),
    "look at rows": Written(lambda self, X: self.last(self.first(X if X.sum() > 9 else X.abs()))),
    "mixed rows": nn.Sequential(nn.Linear(7, 3), nn.LogSoftmax(dim=0)),
    "own gradient": Written(lambda self, X: self.last(Reversed.apply(self.first(X)))),
    "no gradient": Written(partly_frozen),
    "backward hook": hooked(),
    "other type": Written(half_precise),
    "softmax of other type": Written(
        lambda self, X: torch.softmax(self.last(self.first(X)), 1, torch.float64)
    ),
    "pair": Written(lambda self, X: (self.last(self.first(X)), X)),
    "draws": nn.Sequential(nn.Linear(7, 3), nn.Dropout(0.5)),
}


@pytest.mark.parametrize("name", CHAINS)
def test_chains_travel_to_other_processes(name):
    steps = steps_of(CHAINS[name])
    assert steps
    assert steps == pickle.loads(pickle.dumps(steps)) == copy.deepcopy(steps)


@pytest.mark.parametrize("name", OTHERS)
def test_other_modules_are_none(name):
    assert steps_of(OTHERS[name]) is None


def test_what_a_module_raises_is_not_taken_for_an_answer():
    def broken(self, X):
        raise KeyError("no such layer")

    with pytest.raises(KeyError, match="no such layer"):
        steps_of(Written(broken))
