"""What a client computes does not depend, to the bit, on who else is in its block.

That holds between fits on one machine and kernel of the linear algebra, not between machines.
"""

from itertools import product

import numpy as np
import pytest
import torch
from skorch import NeuralNetClassifier, NeuralNetRegressor
from skorch.callbacks import GradientNormClipping

from pfl_sklearn.neural_network import MLP, AdaPeDClassifier, FedAvgClassifier, FedAvgRegressor
from pfl_sklearn.neural_network._engine import _chain, _engine
from tests.helpers.fitted_rounds import parts_of
from tests.helpers.nets import DoubleMLP

N_CLIENTS, N_ROWS = 67, 50
CLIP = GradientNormClipping(0.1)


def rows(n_features):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(N_CLIENTS * N_ROWS, n_features))
    return X, np.repeat(np.arange(N_CLIENTS), N_ROWS), rng


def classifier(kind, hidden, batch_size, n_rounds=2, given=(), module=MLP, **params):
    net = NeuralNetClassifier(
        module,
        module__hidden=hidden,
        criterion=torch.nn.CrossEntropyLoss,
        lr=0.1,
        batch_size=batch_size,
        **params,
    )
    return kind(net, n_rounds=n_rounds, local_steps=3, random_state=0, **dict(given))


def unsampled():
    given = {"train_unsampled": 2, "client_fraction": 0.4}
    return classifier(AdaPeDClassifier, 5, 33, n_rounds=5, given=given)


def regressor(hidden, batch_size):
    net = NeuralNetRegressor(MLP, module__hidden=hidden, lr=0.1, batch_size=batch_size)
    return FedAvgRegressor(net, n_rounds=2, local_steps=3, proximal=0.3, random_state=0)


CASES = {
    "odd batch": (lambda: classifier(FedAvgClassifier, 5, 33), 7),
    "momentum": (lambda: classifier(FedAvgClassifier, 5, 33, optimizer__momentum=0.9), 7),
    "clipped wide": (lambda: classifier(FedAvgClassifier, 300, 33, callbacks=[CLIP]), 200),
    "adaped": (lambda: classifier(AdaPeDClassifier, 5, 33), 7),
    "unsampled": (unsampled, 7),
    "deep": (lambda: classifier(AdaPeDClassifier, (6, 1, 3), 20, module=DoubleMLP), 7),
    "no hidden layer": (lambda: classifier(AdaPeDClassifier, (), 13), 37),
    "one by one": (lambda: classifier(FedAvgClassifier, 5, 129), 7),
    "one output": (lambda: regressor((), 48), 13),
    "one feature": (lambda: regressor((48, 5), 41), 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_any_block_gives_the_same_bits(monkeypatch, name):
    make, n_features = CASES[name]
    X, groups, rng = rows(n_features)
    model = make()
    is_classifier = not isinstance(model, FedAvgRegressor)
    y = rng.integers(0, 3, len(X)) if is_classifier else rng.normal(size=len(X))
    fits = []
    for at_once in (64, 1):
        for limit in ("_MOST_STACKED", "_CLIENTS_ALONE", "_FEWEST_STACKED"):
            monkeypatch.setattr(_engine, limit, at_once)
        fits.append(parts_of(model.fit(X, y, groups=groups)))
    np.testing.assert_equal(*fits)


@pytest.mark.parametrize("n_rows", [1, 2, 41, 64])
def test_a_layer_alone_is_that_among_others(n_rows):
    """Some processors have routines of their own for products of vectors."""
    generator = torch.Generator().manual_seed(0)
    for n_inputs, n_outputs in product([1, 7, 64], [1, 2, 48]):
        sizes = (n_outputs, n_inputs), (n_outputs,), (n_rows, n_inputs), (n_rows, n_outputs)
        values = [torch.randn(6, *size, generator=generator) for size in sizes]
        for alone, together in zip(passes(values, 1), passes(values, 3), strict=True):
            assert torch.equal(alone, together)


def passes(values, at_once):
    """Outputs, gradients and steps of six layers, so many of them at once."""
    parts = []
    for first in range(0, 6, at_once):
        *layer, X, slopes = (
            _chain.empty_aligned((at_once, *each.shape[1:]), each).copy_(each[first:][:at_once])
            for each in values
        )
        chain = _chain.Chain([_chain.Linear(0, 1)], layer)
        outputs = chain(X).detach().clone()
        back = _chain._product(slopes, layer[0])
        chain.follow(slopes, 0.1, 0.5)
        gradient = _chain._product(slopes.transpose(1, 2), X)
        parts.append([outputs, back, gradient, *layer])
    return [torch.cat(each) for each in zip(*parts, strict=True)]
