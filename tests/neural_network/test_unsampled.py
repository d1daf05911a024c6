"""Personal nets that go on in rounds which their clients miss, against a bare loop of torch."""

import copy
from itertools import product

import numpy as np
import pytest
import torch
from skorch.callbacks import LRScheduler
from torch.nn import functional as F

from pfl_sklearn.neural_network import MLP, AdaPeDClassifier
from pfl_sklearn.neural_network._engine import _engine
from tests.helpers.fitted_rounds import parts_of, state_of
from tests.helpers.net_fits import fit
from tests.helpers.nets import (
    SIZES,
    DoubleMLP,
    batches_with_missed_rounds,
    descend,
    gap_of,
    moved,
    personal_weights,
    population_weights,
    recipe,
    table,
    weights,
)

SEED, RATE, N_ROUNDS, STEPS, CLOSE = 5, 0.35, 9, 2, 1e-7
MANY = {"n_rounds": N_ROUNDS, "local_steps": STEPS, "client_fraction": RATE, "random_state": SEED}
PRINTED = {"global_loss": 0.0, "personal_start": "own"}  # the paper's algorithm


def adaped(net=None, **params):
    return AdaPeDClassifier(
        net or recipe(), **{**MANY, **PRINTED, "psi_min": 0.5, "train_unsampled": 2, **params}
    )


class Listing:
    """The algorithm as printed: in each round every client takes its steps, or waits."""

    def __init__(self, module, data, start_round=None, gamma=1.0, **options):
        self.shared, self.psi, self.data, self.start_round = module, 3.0, data, start_round
        self.personal = [module] * len(SIZES)
        self.received = [(module, 3.0)] * len(SIZES)
        self.begun = [start_round is None] * len(SIZES)
        self.gamma, self.options = gamma, options

    def run(self, most):
        since = -1 if self.start_round is None else self.start_round
        taken, self.rows_of = batches_with_missed_rounds(N_ROUNDS, SEED, STEPS, RATE, most, since)
        self.waited = 0
        for t in range(N_ROUNDS):
            for i in set(range(len(SIZES))) - set(taken[t]):
                later = [s for s in range(t, N_ROUNDS) if i in taken[s]]
                self.miss(t, i, min(later, default=N_ROUNDS), most)
            self.take_part(t, taken[t])
        assert not self.rows_of
        return self

    def miss(self, t, i, following, most):
        """Steps of a client that takes part in round `following` again."""
        if not self.begun[i]:
            return
        if following - t > most:
            self.waited += 1
            return
        theta = copy.deepcopy(self.personal[i])
        shared, psi = self.received[i]
        optimizer = self.optimizer(theta, t)
        for X, y in self.batches(t, i):
            descend(optimizer, F.cross_entropy(theta(X), y) + gap_of(shared(X), theta(X)) / 2 / psi)
        self.personal[i] = theta

    def take_part(self, t, clients):
        sent = []
        for i in clients:
            self.received[i] = self.shared, self.psi
            if not self.begun[i] and t >= self.start_round:
                self.personal[i], self.begun[i] = self.shared, True
            sent.append(self.client(t, i))
        if sent:
            self.shared = moved(self.shared, np.mean([weights(mu) for mu, _ in sent], axis=0))
            self.psi = np.mean([psi for _, psi in sent])

    def client(self, t, i):
        theta, mu = copy.deepcopy(self.personal[i]), copy.deepcopy(self.shared)
        first, second, psi = self.optimizer(theta, t), self.optimizer(mu, t), self.psi
        for X, y in self.batches(t, i):
            descend(first, F.cross_entropy(theta(X), y) + gap_of(mu(X), theta(X)) / (2 * psi))
            descend(second, gap_of(mu(X), theta(X)) / (2 * psi))
            gap = float(gap_of(mu(X), theta(X)).detach())
            psi = max(psi - 0.1 * (1 / (2 * psi) - gap / (2 * psi**2)), 0.5)
        self.personal[i] = theta
        return mu, psi

    def batches(self, t, i):
        for batch in self.rows_of.pop((t, i)):
            yield tuple(values[batch] for values in self.data)

    def optimizer(self, net, t):
        return torch.optim.SGD(net.parameters(), lr=0.1 * self.gamma**t, **self.options)

    @property
    def models(self):
        pairs = zip(self.begun, self.personal, strict=True)
        return [weights(own if begun else self.shared) for begun, own in pairs]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("most", "start_round", "options", "stacked"),
    [
        (2, None, {"gamma": 0.8, "momentum": 0.5, "weight_decay": 0.03}, True),
        (100, None, {"gamma": 0.8}, True),
        (100, 3, {}, False),
        (1, 3, {"gamma": 0.8}, True),
    ],
)
def test_a_client_in_every_round(stacked, most, start_round, options, monkeypatch):
    X, y, groups = table()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        module = DoubleMLP()
    if not stacked:
        monkeypatch.setattr(_engine, "chain_of", lambda *given: None)
    gamma = options.get("gamma", 1.0)
    given = {f"optimizer__{name}": value for name, value in options.items() if name != "gamma"}
    net = recipe(module, callbacks=[LRScheduler("ExponentialLR", gamma=gamma)], **given)
    start = {} if start_round is None else {"personal_start": "global"}
    model = adaped(net, train_unsampled=most, psi_init=3.0, psi_learning_rate=0.1, **start)
    model.set_params(personal_start_round=start_round).fit(X, y, groups=groups)
    data = torch.from_numpy(X), torch.from_numpy(y)
    expected = Listing(module, data, start_round, **options).run(most)
    assert model._engines.client.stacked == stacked
    assert (expected.waited > 0) == (most < 100)
    np.testing.assert_allclose(personal_weights(model), expected.models, rtol=0, atol=CLOSE)
    found = population_weights(model)
    np.testing.assert_allclose(found, weights(expected.shared), rtol=0, atol=CLOSE)
    assert model.history_["psi"][-1] == pytest.approx(expected.psi, rel=1e-9)


def test_rounds_with_all_clients_are_the_same_bits():
    given = {"client_fraction": 1.0, "n_rounds": 3}
    plain, model = (fit(adaped(train_unsampled=on, **given)) for on in (False, True))
    one, other = parts_of(plain), parts_of(model)
    assert other["phase_arrays"].pop("personal") is not None
    for name in ("received", "received_psi"):
        other["clients"].pop(name)
    other["schedule"].pop("following")
    np.testing.assert_equal(other, one)
    np.testing.assert_array_equal(model.parameters_, plain.parameters_)


@pytest.mark.slow
def test_true_is_a_cap_of_its_own():
    given = {"n_rounds": 9, "local_steps": 1, "client_fraction": 0.05}
    found = [
        fit(adaped(train_unsampled=some, **given)).parameters_
        for some in (True, np.True_, 5, 1, False, np.False_)
    ]
    for i, j in product(range(6), repeat=2):
        same = (found[i] == found[j]).all()
        assert same == ({i, j} <= {0, 1, 2} or {i, j} <= {4, 5} or i == j)


def test_idle_clients_wait():
    """Rounds leave them alone: what they missed is made up for after the last round, on copies."""
    model = fit(adaped(n_rounds=1))
    state, start = state_of(model), model._engines.client.start().astype(np.float64)
    waiting = (state.clients["personal"] == start).all(axis=1)
    assert 0 < waiting.sum() == len(SIZES) - model.history_["n_clients"][0]
    assert (model.parameters_[waiting] != start).any(axis=1).all()
    trained = state.clients["personal"][~waiting]
    np.testing.assert_array_equal(model.parameters_[~waiting], trained)


def test_turned_on_late_it_starts_from_what_the_server_has_then():
    model = fit(adaped(recipe(MLP), train_unsampled=False, warm_start=True))
    before = model.parameters_.copy()
    fit(model.set_params(train_unsampled=True))  # no round more
    np.testing.assert_array_equal(model.parameters_, before)
    clients, server = state_of(model).clients, state_of(model).server
    expected = np.broadcast_to(server["global"].astype(np.float32), clients["received"].shape)
    np.testing.assert_array_equal(clients["received"], expected)
    assert (clients["received_psi"] == server["psi"]).all()
    fit(model.set_params(n_rounds=N_ROUNDS + 1))
    assert (model.parameters_ != before).any(axis=1).all()  # they took part in it, or missed it
    fit(model.set_params(train_unsampled=False))
    kept = state_of(model).clients["personal"]
    np.testing.assert_array_equal(model.parameters_, kept)


@pytest.mark.slow
def test_clients_that_come_and_go():
    """Who is new missed no round before, and knows the net that there was; who left stays."""
    X, y, groups = table()
    model = adaped(recipe(batch_size=-1), local_steps=3).fit(X, y, groups=groups)
    left, server = model.parameters_[3].copy(), state_of(model).copy().server
    model.partial_fit(X, y, groups=np.where(groups == 3, 99, groups))  # one round
    state, net = state_of(model), model._engines.client
    assert state.round == N_ROUNDS + 1
    np.testing.assert_array_equal(state.schedule["following"][[-1]], N_ROUNDS)
    np.testing.assert_array_equal(model.parameters_[3], left)
    np.testing.assert_array_equal(state.clients["received"][-1], server["global"])
    assert state.clients["received_psi"][-1] == server["psi"]
    np.testing.assert_array_equal(state.clients["personal"][-1], net.start())
    assert (model.parameters_[-1] != net.start()).any()
