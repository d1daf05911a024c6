"""Neural estimators against bare loops of torch, in double precision."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from sklearn.base import clone
from skorch import NeuralNetRegressor
from skorch.callbacks import LRScheduler
from torch.nn import functional as F

from pfl_sklearn.neural_network import (
    AdaPeDClassifier,
    FedAvgClassifier,
    FedAvgRegressor,
    LocalNetClassifier,
    LocalNetRegressor,
)
from pfl_sklearn.neural_network._engine import _engine
from tests.helpers.fitted_rounds import is_stacked
from tests.helpers.net_fits import fit
from tests.helpers.nets import (
    SIZES,
    DoubleMLP,
    batches_of_last_phase,
    batches_of_rounds,
    descend,
    gap_of,
    moved,
    personal_weights,
    population_weights,
    recipe,
    table,
    trained,
    weights,
)
from tests.helpers.slow import slow

SEED, RATE, CLOSE, N_ROUNDS, STEPS = 5, 0.6, 1e-7, 4, 2
MANY = {
    "n_rounds": N_ROUNDS,
    "local_steps": STEPS,
    "client_fraction": RATE,
    "random_state": SEED,
}
PRINTED = {"global_loss": 0.0, "personal_start": "own"}  # the paper's AdaPeD


def module_of(hidden=5, n_outputs=3):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return DoubleMLP(7, n_outputs, hidden)


def tensors(X, y):
    return torch.from_numpy(X), torch.from_numpy(y)


def both_ways(model, X, y, groups):
    """The model after a fit for all clients of a block at once, and after one client by client."""
    model.fit(X, y, groups=groups)
    assert is_stacked(model)
    yield model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_engine, "chain_of", lambda *given: None)
        model.fit(X, y, groups=groups)
    assert not is_stacked(model)
    yield model


def assert_population(model, module):
    np.testing.assert_allclose(population_weights(model), weights(module), rtol=0, atol=CLOSE)


def assert_personal(model, modules):
    expected = [weights(module) for module in modules]
    np.testing.assert_allclose(personal_weights(model), expected, rtol=0, atol=CLOSE)


OPTIONS = [
    {},
    {"momentum": 0.9, "dampening": 0.2, "weight_decay": 0.03},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.03},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_one_client_is_plain_sgd(options):
    """Momentum starts anew in every round."""
    local_steps = 7
    (X, y, groups), module = table(sizes=[30]), module_of()
    given = {f"optimizer__{name}": value for name, value in options.items()}
    model = FedAvgClassifier(
        recipe(module, **given), n_rounds=4, local_steps=local_steps, random_state=SEED
    )
    for ((_, batches),) in batches_of_rounds(4, SEED, local_steps, sizes=[30]):
        module = trained(module, batches, *tensors(X, y), lr=0.1, **options)
    for fitted in both_ways(model, X, y, groups):
        assert_population(fitted, module)


SCHEDULES = {
    "StepLR": {"step_size": 2, "gamma": 0.5},
    # Rates, rather than shares of the net's own.
    "CosineAnnealingLR": {"T_max": 6, "eta_min": 0.03},
    "OneCycleLR": {"max_lr": 0.3, "total_steps": 6, "cycle_momentum": False},
}


@pytest.mark.parametrize("policy", SCHEDULES)
def test_a_scheduler_steps_once_a_round(policy):
    (X, y, groups), module = table(sizes=[30]), module_of()
    kind = getattr(torch.optim.lr_scheduler, policy)
    scheduler = LRScheduler(kind, **SCHEDULES[policy])
    net = recipe(module, callbacks=[("rates", scheduler)])
    model = FedAvgClassifier(net, n_rounds=6, local_steps=2, random_state=SEED)
    data, module = tensors(X, y), copy.deepcopy(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    rates = kind(optimizer, **SCHEDULES[policy])
    for ((_, batches),) in batches_of_rounds(6, SEED, 2, sizes=[30]):
        for batch in batches:
            descend(optimizer, F.cross_entropy(module(data[0][batch]), data[1][batch]))
        rates.step()
    for fitted in both_ways(model, X, y, groups):
        assert_population(fitted, module)


@pytest.mark.parametrize("proximal", [0.0, 0.7])
def test_fedavg_client_by_client(proximal):
    (X, y, groups), module = table(), module_of()
    given = {"optimizer__weight_decay": 0.03, "optimizer__momentum": 0.5 * (not proximal)}
    model, data = (
        FedAvgClassifier(recipe(module, **given), proximal=proximal, **MANY),
        tensors(X, y),
    )
    for batches in batches_of_rounds(N_ROUNDS, SEED, STEPS, RATE):
        done = [client_of_fedprox(module, own, *data, proximal) for _, own in batches]
        module = moved(module, np.mean(done, axis=0)) if done else module
    for fitted in both_ways(model, X, y, groups):
        assert_population(fitted, module)


def client_of_fedprox(module, batches, X, y, proximal):
    """Weights after a client's steps; each ends with the exact minimum of its proximal term."""
    start = weights(module)
    if not proximal:
        return weights(trained(module, batches, X, y, lr=0.1, weight_decay=0.03, momentum=0.5))
    for batch in batches:
        step = trained(module, [batch], X, y, lr=0.1, weight_decay=0.03)
        module = moved(module, (weights(step) + 0.1 * proximal * start) / (1 + 0.1 * proximal))
    return weights(module)


@pytest.mark.parametrize(
    ("proximal", "callbacks"),
    [(1e12, None), (np.inf, [LRScheduler("LambdaLR", lr_lambda=np.sign)])],
)
def test_an_infinite_proximal_weight_keeps_the_first_net(proximal, callbacks):
    """Also in rounds whose learning rate is 0."""
    data, module = table(), module_of()
    net = recipe(module, callbacks=callbacks)
    for fitted in both_ways(FedAvgClassifier(net, proximal=proximal, **MANY), *data):
        assert_population(fitted, module)


@pytest.mark.slow
def test_fine_tuning_client_by_client():
    (X, y, groups), module = table(), module_of()
    net = recipe(module, optimizer__momentum=0.5)
    model = FedAvgClassifier(net, fine_tune_steps=3, **MANY)
    whole = FedAvgClassifier(net, **MANY).fit(X, y, groups=groups)
    start = moved(module, population_weights(whole))
    expected = [
        trained(start, batches, *tensors(X, y), lr=0.1, momentum=0.5)
        for _, batches in batches_of_last_phase(N_ROUNDS, SEED, 3)
    ]
    for fitted in both_ways(model, X, y, groups):
        assert_population(fitted, start)
        assert_personal(fitted, expected)


@pytest.mark.slow
def test_regressors_client_by_client():
    (X, _, groups), module = table(), module_of(n_outputs=1)
    y = X[:, 1:2] * X[:, 2:3]
    net, data = NeuralNetRegressor(module, lr=0.1, batch_size=4), tensors(X, y)
    shared, personal = module, [module] * len(SIZES)
    given = {"criterion": torch.nn.MSELoss(), "lr": 0.1}
    for batches in batches_of_rounds(N_ROUNDS, SEED, STEPS, RATE):
        done = [weights(trained(shared, own, *data, **given)) for _, own in batches]
        shared = moved(shared, np.mean(done, axis=0)) if done else shared
        for i, own in batches:
            personal[i] = trained(personal[i], own, *data, **given)
    with torch.no_grad():
        expected = shared(data[0]).numpy()
    for fitted in both_ways(FedAvgRegressor(net, **MANY), X, y[:, 0], groups):
        assert_population(fitted, shared)
        found = fitted.predict(X, groups=groups)
        np.testing.assert_allclose(found, expected[:, 0], rtol=0, atol=1e-6)
    for fitted in both_ways(LocalNetRegressor(net, **MANY), X, y[:, 0], groups):
        assert_personal(fitted, personal)


# AdaPeD -------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_huge_psi_is_local_training():
    data, module = table(), module_of()
    model = AdaPeDClassifier(
        recipe(module), psi_init=1e12, psi_learning_rate=0.0, **MANY, **PRINTED
    )
    local = LocalNetClassifier(recipe(module), **MANY).fit(*data[:2], groups=data[2])
    expected = personal_weights(local)
    for fitted in both_ways(model, *data):
        np.testing.assert_allclose(personal_weights(fitted), expected, rtol=0, atol=CLOSE)
        assert_population(fitted, module)


def naive_adaped(module, data, direction, global_loss, start_round, options):
    """Global net, personal nets and psi of Algorithm 2 (ICLR), client by client, step by step."""
    shared, psi, psis = module, 3.0, []
    personal, late = [module] * len(SIZES), set() if start_round is None else set(range(len(SIZES)))
    client = partial(naive_client, data, direction, global_loss, options)
    for t, batches in enumerate(batches_of_rounds(N_ROUNDS, SEED, STEPS, RATE)):
        sent = []
        for i, numbers in batches:
            if i in late and t >= start_round:
                personal[i] = shared
                late.remove(i)
            mu, personal[i], own = client(shared, personal[i], psi, numbers)
            sent.append((weights(mu), own))
        if sent:
            shared = moved(shared, np.mean([mu for mu, _ in sent], axis=0))
            psi = np.mean([own for _, own in sent])
        psis.append(psi)
    return shared, [shared if i in late else net for i, net in enumerate(personal)], psis


def naive_client(data, direction, global_loss, options, mu, theta, psi, batches):
    """Global net, personal net and psi after a client's steps."""
    mu, theta = copy.deepcopy(mu), copy.deepcopy(theta)
    steps = [torch.optim.SGD(net.parameters(), lr=0.1, **options) for net in (theta, mu)]
    for batch in batches:
        X, y = (values[batch] for values in data)

        def gap(X=X):
            pair = (mu(X), theta(X))
            return gap_of(*(pair if direction == "global_to_personal" else pair[::-1]))

        descend(steps[0], F.cross_entropy(theta(X), y) + gap() / (2 * psi))
        descend(steps[1], gap() / (2 * psi) + global_loss * F.cross_entropy(mu(X), y))
        psi = max(psi - 0.2 * (1 / (2 * psi) - float(gap().detach()) / (2 * psi**2)), 2.8)
    return mu, theta, psi


@pytest.mark.slow
@pytest.mark.parametrize(
    ("direction", "global_loss", "start_round", "options"),
    [
        ("global_to_personal", 0.4, None, {"weight_decay": 0.03}),
        ("personal_to_global", 0.4, 2, {}),
        ("global_to_personal", 0.0, None, {"momentum": 0.5, "nesterov": True}),
    ],
)
def test_adaped_client_by_client(direction, global_loss, start_round, options):
    (X, y, groups), module = table(), module_of()
    given = {f"optimizer__{name}": value for name, value in options.items()}
    model = AdaPeDClassifier(
        recipe(module, **given),
        psi_init=3.0,
        psi_min=2.8,
        psi_learning_rate=0.2,
        kd_direction=direction,
        global_loss=global_loss,
        personal_start="own" if start_round is None else "global",
        personal_start_round=start_round,
        **MANY,
    )
    settings = (direction, global_loss, start_round, options)
    shared, personal, psis = naive_adaped(module, tensors(X, y), *settings)
    for fitted in both_ways(model, X, y, groups):
        assert_population(fitted, shared)
        assert_personal(fitted, personal)
        np.testing.assert_allclose(fitted.history_["psi"], psis, rtol=1e-9)
    assert psis[0] > 2.9
    assert psis[-1] == pytest.approx(2.8)  # the floor


@pytest.mark.slow
def test_the_global_start_comes_late_by_default():
    """In the last quarter of the rounds."""
    given = {**MANY, "n_rounds": 8, "local_steps": 1}
    model = AdaPeDClassifier(recipe(), personal_start="global", **given)
    starts = (clone(model).set_params(personal_start_round=t) for t in (None, 6, 7))
    default, late, later = (fit(each).parameters_ for each in starts)
    np.testing.assert_array_equal(default, late)
    assert (default != later).any()


def test_a_warm_start_may_let_nets_that_started_from_the_global_one_go_on():
    """As nets that had their own start: another round changes those of its clients alone."""
    model = AdaPeDClassifier(recipe(), personal_start="global", personal_start_round=1, **MANY)
    before = fit(model.set_params(n_rounds=6, warm_start=True)).parameters_.copy()
    fit(model.set_params(personal_start="own", n_rounds=7))
    moved = (model.parameters_ != before).any(axis=1)
    assert model.history_["n_clients"][-1] == np.sum(moved) > 0


NOISE = {"noise_multiplier": 1.0, "clip_norm": 1.0, "client_fraction": 1.0}


@pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")
@pytest.mark.parametrize(("given", "start"), [(NOISE, "own"), *slow([({}, "global")])])
@pytest.mark.slow
def test_where_personal_nets_start_by_default(given, start):
    """A noisy global net is a bad start."""
    models = {
        where: AdaPeDClassifier(recipe(), personal_start=where, **{**MANY, **given})
        for where in (None, "own", "global")
    }
    weights = {name: fit(m).parameters_ for name, m in models.items()}
    np.testing.assert_array_equal(weights[None], weights[start])
    assert (weights["own"] != weights["global"]).any()
