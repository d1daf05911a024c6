"""What a client computes does not depend, to the bit, on who else is in its block.

That holds between fits on one machine and kernel of the linear algebra, not between machines.
"""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("skorch")

from skorch import NeuralNetClassifier, NeuralNetRegressor  # noqa: E402
from skorch.callbacks import GradientNormClipping  # noqa: E402

from pfl_sklearn.neural_network import MLP, AdaPeDClassifier, FedAvgClassifier, FedAvgRegressor  # noqa: E402
from pfl_sklearn.neural_network._engine import _chain, _engine  # noqa: E402
from tests.helpers.nets import FIELD  # noqa: E402

N_CLIENTS, N_ROWS = 67, 50
CLIP = GradientNormClipping(0.1)


def rows(n_features):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(N_CLIENTS * N_ROWS, n_features))
    return X, np.repeat(np.arange(N_CLIENTS), N_ROWS), rng


def classifier(kind, hidden, batch_size, n_rounds=2, given=(), **params):
    net = NeuralNetClassifier(
        MLP,
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
    "odd": (lambda: classifier(FedAvgClassifier, 5, 20), 7),
    "odd batch": (lambda: classifier(FedAvgClassifier, 5, 33), 7),
    "momentum": (lambda: classifier(FedAvgClassifier, 5, 33, optimizer__momentum=0.9), 7),
    "clipped": (lambda: classifier(FedAvgClassifier, 5, 33, callbacks=[CLIP]), 7),
    "clipped wide": (lambda: classifier(FedAvgClassifier, 300, 33, callbacks=[CLIP]), 200),
    "adaped": (lambda: classifier(AdaPeDClassifier, 5, 33), 7),
    "unsampled": (unsampled, 7),
    **{cls.__name__: (lambda cls=cls: classifier(cls, 5, 33), 7) for cls in FIELD},
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
    found = []
    for at_once in (64, 3, 2, 1):
        for limit in ("_MOST_STACKED", "_CLIENTS_ALONE", "_FEWEST_STACKED"):
            monkeypatch.setattr(_engine, limit, at_once)
        found.append(model.fit(X, y, groups=groups)._progress.state)
    for state in found[1:]:
        np.testing.assert_equal(state.server, found[0].server)
        np.testing.assert_equal(state.clients, found[0].clients)
        np.testing.assert_equal(state.own, found[0].own)
        assert state.history["loss"] == found[0].history["loss"]


@pytest.mark.parametrize("n_outputs", [1, 2, 48])
@pytest.mark.parametrize("n_inputs", [1, 7, 64])
@pytest.mark.parametrize("n_rows", [1, 2, 41, 64])
def test_a_layer_alone_is_that_among_others(n_rows, n_inputs, n_outputs):
    """Some processors have routines of their own for products of vectors."""
    generator = torch.Generator().manual_seed(0)
    sizes = (n_outputs, n_inputs), (n_outputs,), (n_rows, n_inputs), (n_rows, n_outputs)
    given = [torch.randn(6, *size, generator=generator) for size in sizes]

    def found(at_once):
        parts = []
        for first in range(0, 6, at_once):
            *own, X, slopes = (
                _chain.empty_aligned((at_once, *values.shape[1:]), values).copy_(
                    values[first:][:at_once]
                )
                for values in given
            )
            chain = _chain.Chain([_chain.Linear(0, 1)], own)
            outputs = chain(X).detach().clone()
            back = _chain._product(slopes, own[0])
            chain.follow(slopes, 0.1, 0.5)
            gradient = _chain._product(slopes.transpose(1, 2), X)
            parts.append([outputs, back, gradient, *own])
        return [torch.cat(values) for values in zip(*parts, strict=True)]

    for alone, together in zip(found(1), found(3), strict=True):
        assert torch.equal(alone, together)
