"""How much clients train and how the server moves, against a plain loop over clients in torch."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("skorch")

from pfl_sklearn.neural_network import (  # noqa: E402
    AdaPeDClassifier,
    DittoClassifier,
    FedAvgClassifier,
    FedRepClassifier,
    LocalNetClassifier,
    PerFedAvgClassifier,
    PFedMeClassifier,
    ScaffoldClassifier,
)
from pfl_sklearn.neural_network._engine import _engine  # noqa: E402
from tests.helpers.nets import (  # noqa: E402
    FIELD,
    SIZES,
    DoubleMLP,
    batches_of_rounds,
    moved,
    recipe,
    refused,
    table,
    trained,
    weights,
)
from tests.helpers.slow import slow  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")
SEED, N_ROUNDS = 3, 4
NOISE = {"noise_multiplier": 1.0, "clip_norm": 0.3, "delta": 1e-3}


@pytest.fixture(params=[True, False], ids=["stacked", "one by one"])
def either_way(request, monkeypatch):
    """Nets of a block trained at once, and one by one."""
    if not request.param:
        monkeypatch.setattr(_engine, "chain_of", lambda *given: None)


def fitted(cls=FedAvgClassifier, net=None, **params):
    given = {"n_rounds": N_ROUNDS, "random_state": SEED, **params}
    X, y, groups = table()
    return cls(recipe(DoubleMLP) if net is None else net, **given).fit(X, y, groups=groups)


def looped(model, rounds, server=None, sizes=None, **options):
    """Parameters of the global net after rounds of a loop in torch.

    `rounds` are the clients of each round with the numbers of their rows. The server averages, or
    ``server(vector, change)`` gives the new vector. Clients count equally, or by their `sizes`.
    """
    X, y, _ = table()
    X, y, net = torch.from_numpy(X), torch.from_numpy(y), DoubleMLP()
    vector = model._engines.population.start()
    for found in rounds:
        total, count = np.zeros_like(vector), 0.0
        for i, batches in found:
            weight = 1.0 if sizes is None else sizes[i]
            own = trained(moved(net, vector), batches, X, y, **{"lr": 0.1, **options})
            total, count = total + weight * (weights(own) - vector), count + weight
        change = total / max(count, 1.0)
        vector = vector + change if server is None else server(vector, change)
    return vector


def same_bits(first, second):
    """Two fits ended in the same state, to the bit."""
    first, second = first._progress.state, second._progress.state
    np.testing.assert_equal(first.server, second.server)
    np.testing.assert_equal(first.clients, second.clients)
    np.testing.assert_equal(first.own, second.own)


# Passes over a client's rows ----------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [4, -1])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_passes_are_those_of_a_loop(either_way, batch_size, momentum):
    net = recipe(DoubleMLP, batch_size=batch_size, optimizer__momentum=momentum)
    model = fitted(net=net, local_epochs=2, client_fraction=0.6)
    size = None if batch_size == -1 else batch_size
    rounds = list(batches_of_rounds(N_ROUNDS, SEED, 0, 0.6, batch_size=size, n_passes=2))
    for found in rounds:
        for i, batches in found:
            n, b = SIZES[i], SIZES[i] if size is None else min(size, SIZES[i])
            assert batches.shape == (np.ceil(2 * n / b), b)
            # From the second round on a batch may be the first with rows of a new pass.
            assert np.bincount(batches.ravel()).max() <= 4
    expected = looped(model, rounds, momentum=momentum)
    assert np.abs(expected - model._engines.population.start()).max() > 1e-3
    np.testing.assert_allclose(model.population_parameters_, expected, rtol=0, atol=1e-12)


def test_a_first_round_of_one_pass_uses_every_row():
    for i, batches in next(batches_of_rounds(1, SEED, 0, n_passes=1)):
        first = SIZES[:i].sum()
        assert set(batches.ravel()) == set(range(first, first + SIZES[i]))


def test_a_pass_in_one_batch_is_one_step():
    same_bits(
        fitted(net=recipe(DoubleMLP, batch_size=-1), local_epochs=3),
        fitted(net=recipe(DoubleMLP, batch_size=-1), local_steps=3),
    )


@pytest.mark.parametrize(
    "cls", [FedAvgClassifier, LocalNetClassifier, AdaPeDClassifier, *slow(FIELD)]
)
def test_passes_do_not_depend_on_workers_and_blocks(cls, monkeypatch):
    params = {"local_epochs": 2, "n_rounds": 2, "client_fraction": 0.7}
    alone, several = fitted(cls, **params), fitted(cls, **params, n_jobs=2)
    same_bits(alone, several)
    for limit in ("_MOST_STACKED", "_CLIENTS_ALONE", "_FEWEST_STACKED"):
        monkeypatch.setattr(_engine, limit, 1)
    same_bits(alone, fitted(cls, **params))


@pytest.mark.parametrize(
    "cls", [DittoClassifier, FedRepClassifier, PerFedAvgClassifier, PFedMeClassifier]
)
def test_one_batch_a_client_makes_passes_steps(cls):
    """Also of the steps before and after the shared ones, and of the last phase."""
    net = recipe(DoubleMLP, batch_size=-1)
    same_bits(fitted(cls, net=net, local_epochs=2), fitted(cls, net=net, local_steps=2))


def test_scaffold_with_passes_is_its_loop():
    model = fitted(ScaffoldClassifier, local_epochs=1, client_fraction=0.7)
    X, y, _ = table()
    X, y, net = torch.from_numpy(X), torch.from_numpy(y), DoubleMLP()
    vector = model._engines.population.start()
    common, controls = np.zeros_like(vector), np.zeros((len(SIZES), len(vector)))
    for found in batches_of_rounds(N_ROUNDS, SEED, 0, 0.7, n_passes=1):
        changes, before = np.zeros((len(found), len(vector))), controls.copy()
        for k, (i, batches) in enumerate(found):
            here = vector
            for batch in batches:
                one_step = weights(trained(moved(net, here), [batch], X, y, lr=0.1))
                here = one_step + 0.1 * (controls[i] - common)
            controls[i] += (vector - here) / (0.1 * len(batches)) - common
            changes[k] = here - vector
        vector = vector + changes.mean(axis=0)
        common = common + (controls - before).sum(axis=0) / len(SIZES)
    np.testing.assert_allclose(model.population_parameters_, vector, rtol=0, atol=1e-12)
    found = model._progress.state.server["control"]
    np.testing.assert_allclose(found, common, rtol=0, atol=1e-10)


def test_passes_go_on_in_warm_starts(tmp_path):
    params = {"local_epochs": 2, "client_fraction": 0.7, "warm_start": True}
    X, y, groups = table()
    model = FedAvgClassifier(recipe(DoubleMLP), n_rounds=2, random_state=SEED, **params)
    model.fit(X, y, groups=groups).set_params(n_rounds=N_ROUNDS).fit(X, y, groups=groups)
    same_bits(model, fitted(**params))


def test_a_clipped_message_does_not_grow_with_passes():
    """Noise on sums needs no number of steps: the clip bounds what a client sends."""
    few, many = (fitted(local_epochs=n, client_fraction=0.5, **NOISE).privacy_ for n in (1, 5))
    assert few.epsilon == many.epsilon == fitted(client_fraction=0.5, **NOISE).privacy_.epsilon


@pytest.mark.parametrize(
    ("cls", "params", "match"),
    [
        (FedAvgClassifier, {"local_steps": 5}, r"local_epochs=2 and local_steps=5.*=10"),
        (AdaPeDClassifier, {"train_unsampled": True}, r"local_epochs=2.*train_unsampled"),
        (
            AdaPeDClassifier,
            {"noise": "per_step", "sampling": "fixed", **NOISE},
            r"local_epochs=2.*noise='per_step'",
        ),
    ],
)
def test_passes_that_rounds_refuse(cls, params, match):
    refused(cls(recipe(DoubleMLP), local_epochs=2, **params), match)
