"""Methods on nets against bare loops of PyTorch, on batches of all rows."""

import copy
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from pfl_sklearn.neural_network import (
    APFLClassifier,
    DittoClassifier,
    FedEMClassifier,
    FedMutualClassifier,
    FedPerClassifier,
    FedRepClassifier,
    PerFedAvgClassifier,
    PFedMeClassifier,
    PPSGDNetClassifier,
    QuPeDClassifier,
)
from pfl_sklearn.neural_network._engine import _engine
from tests.helpers.fitted_rounds import initial_net
from tests.helpers.nets import SIZES, DoubleMLP, recipe, table
from tests.helpers.slow import slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
N_ROUNDS, STEPS = 2, 2
# Estimator, its parameters, those of the loop, batches of a round, and whether own nets are whole.
METHODS = {
    "ditto": (DittoClassifier, {"proximal": 3.0}, {"proximal": 3.0}, STEPS, True),
    "pfedme": (
        PFedMeClassifier,
        {"proximal": 2.0, "personal_steps": 2, "local_learning_rate": 0.2},
        {"proximal": 2.0, "n_steps": 2, "rate": 0.2},
        STEPS,
        False,
    ),
    "per_fedavg": (PerFedAvgClassifier, {}, {"meta_rate": 0.1}, 2 * STEPS, False),
    "quped": (QuPeDClassifier, {"distillation": 0.4}, {"distillation": 0.4}, STEPS, True),
    "fml": (
        FedMutualClassifier,
        {"personal_loss": 0.3, "global_loss": 0.3},
        {"weight": 0.3},
        STEPS,
        True,
    ),
    "apfl": (APFLClassifier, {"mixing": 0.3}, {"mixing": 0.3}, STEPS, False),
    "fedper": (FedPerClassifier, {}, {}, STEPS, False),
    "fedrep": (FedRepClassifier, {"head_steps": 2}, {"head_steps": 2}, 2 + STEPS, False),
    "ppsgd": (
        PPSGDNetClassifier,
        {"alpha": 0.3},
        {"common": 1.0, "local": 1 / (0.3 * len(SIZES))},
        STEPS,
        False,
    ),
    "fedem": (FedEMClassifier, {"n_components": 2}, {}, STEPS, False),
}


@pytest.fixture
def net_loops(monkeypatch):
    """Module of the loops, with the rate of the recipe."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import net_loops

    monkeypatch.setattr(net_loops, "RATE", 0.1)
    monkeypatch.setattr(net_loops.step, "__defaults__", (0.1,))
    return net_loops


def loop_of_rounds(client_steps, net, X, y, groups, n_batches):
    """The global net after all rounds, and what every client kept."""
    X, y, kept = torch.from_numpy(X), torch.from_numpy(y), {}
    for _ in range(N_ROUNDS):
        sums = torch.zeros_like(parameters_to_vector(net.parameters()))
        for i in range(len(SIZES)):
            rows = np.flatnonzero(groups == i)
            trained, kept[i] = client_steps(net, kept.get(i), [(X[rows], y[rows])] * n_batches)
            sums += parameters_to_vector(trained.parameters()).detach()
        net = copy.deepcopy(net)
        vector_to_parameters(sums / len(SIZES), net.parameters())
    return net, kept


# One by one, those whose steps are not FedAvg's.
@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("name", "stacked"),
    [
        *((name, True) for name in METHODS),
        *((name, False) for name in ("apfl", "fedem")),
        *slow([("pfedme", False), ("fedrep", False)]),
    ],
)
def test_rounds_are_those_of_a_loop(name, stacked, net_loops, monkeypatch):
    if not stacked:
        monkeypatch.setattr(_engine, "chain_of", lambda *given: None)
    cls, params, given, n_batches, has_nets = METHODS[name]
    X, y, groups = table()
    net = recipe(DoubleMLP, batch_size=32)
    model = cls(net, n_rounds=N_ROUNDS, local_steps=STEPS, random_state=0, **params)
    model.fit(X, y, groups=groups)
    start, n = torch.from_numpy(initial_net(model)), params.get("n_components", 0)
    make = net_loops.several(DoubleMLP, n) if n else DoubleMLP
    first = make()
    vector_to_parameters(start[n:], first.parameters())
    steps = partial(getattr(net_loops, name), **given)
    last, kept = loop_of_rounds(steps, first, X, y, groups, n_batches)

    expected = parameters_to_vector(last.parameters()).detach().numpy()
    assert np.abs(expected - start[n:].numpy()).max() > 1e-3
    np.testing.assert_allclose(model.population_parameters_[n:], expected, rtol=0, atol=1e-12)
    if has_nets:
        own = [parameters_to_vector(kept[i].parameters()).detach() for i in range(len(SIZES))]
        np.testing.assert_allclose(model.parameters_, torch.stack(own), rtol=0, atol=1e-12)
    if n:
        weights = torch.stack([kept[i] for i in range(len(SIZES))])
        np.testing.assert_allclose(model.parameters_[:, :n], weights, rtol=0, atol=1e-12)
