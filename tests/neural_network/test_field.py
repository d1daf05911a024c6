"""Methods that AdaPeD is compared with: their limits, and exact numbers of others."""

import copy
from functools import cache

import numpy as np
import pytest
import torch
from skorch import NeuralNetClassifier
from skorch.callbacks import LRScheduler
from torch import nn

from pfl_sklearn import PPSGDClassifier
from pfl_sklearn.neural_network import (
    AdaMixNetClassifier,
    APFLClassifier,
    DittoClassifier,
    FedAvgClassifier,
    FedEMClassifier,
    FedMutualClassifier,
    FedPerClassifier,
    FedRepClassifier,
    LocalNetClassifier,
    PerFedAvgClassifier,
    PFedMeClassifier,
    PPSGDNetClassifier,
    QuPeDClassifier,
)
from pfl_sklearn.neural_network._engine import _engine
from tests.helpers.fitted_rounds import initial_net, state_of
from tests.helpers.net_fits import fit, proba
from tests.helpers.nets import DoubleMLP, recipe, table
from tests.helpers.neural_methods import MIXTURES
from tests.helpers.oracles import read_oracle

MANY = {"n_rounds": 4, "local_steps": 2, "client_fraction": 0.6, "random_state": 5}
SHORT = {"n_rounds": 2, "local_steps": 2, "random_state": 0}


def fitted(cls, **params):
    return fit(cls(recipe(DoubleMLP), **{**MANY, **params}))


@cache
def reference(cls, client_fraction=0.6):
    """A fit of another method, which tests compare with and leave alone."""
    return fitted(cls, client_fraction=client_fraction)


# Limits -------------------------------------------------------------------------------------------

LAYERS = [name for name, _ in DoubleMLP().named_parameters()]
FULL = {"client_fraction": 1.0}
# A method with its parameters, and those whose global and whose personal nets it then has.
LIMITS = {
    "ditto": (DittoClassifier, {"proximal": 0.0}, FedAvgClassifier, LocalNetClassifier),
    "apfl, global": (APFLClassifier, {"mixing": 0.0}, FedAvgClassifier, FedAvgClassifier),
    "apfl, local": (APFLClassifier, {"mixing": 1.0}, FedAvgClassifier, LocalNetClassifier),
    "fedper": (FedPerClassifier, {"personal_layers": ()}, FedAvgClassifier, FedAvgClassifier),
    "fedper, local": (
        FedPerClassifier,
        {"personal_layers": LAYERS},
        LocalNetClassifier,
        LocalNetClassifier,
    ),
    "quped": (QuPeDClassifier, {"distillation": 0.0}, LocalNetClassifier, LocalNetClassifier),
    "fedmutual": (
        FedMutualClassifier,
        {"personal_loss": 1.0, "global_loss": 1.0},
        FedAvgClassifier,
        LocalNetClassifier,
    ),
    "ppsgd": (PPSGDNetClassifier, {"alpha": np.inf}, FedAvgClassifier, FedAvgClassifier),
    "ppsgd, heads": (
        PPSGDNetClassifier,
        {"alpha": 0.0, "representation_step": "lr", **FULL},
        FedPerClassifier,
        FedPerClassifier,
    ),
    "adamix_net": (AdaMixNetClassifier, {"proximal": 0.0}, None, LocalNetClassifier),
}


@pytest.mark.parametrize("name", LIMITS)
def test_limits(name):
    cls, params, shared, personal = LIMITS[name]
    model, fraction = fitted(cls, **params), params.get("client_fraction", 0.6)
    if shared is not None:
        expected = reference(shared, fraction).population_parameters_
        np.testing.assert_allclose(model.population_parameters_, expected, rtol=0, atol=1e-12)
    expected = reference(personal, fraction).parameters_
    np.testing.assert_allclose(model.parameters_, expected, rtol=0, atol=1e-12)


def test_ditto_with_an_infinite_pull_has_the_latest_global_net():
    ditto = fitted(DittoClassifier, proximal=np.inf, client_fraction=1.0)
    before = fitted(FedAvgClassifier, n_rounds=3, client_fraction=1.0).population_parameters_
    np.testing.assert_allclose(ditto.parameters_, np.tile(before, (8, 1)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("cls", [FedPerClassifier, FedRepClassifier])
def test_layers_are_shared_or_kept(cls):
    model = fitted(cls, client_fraction=1.0)
    (name,) = {name.rpartition(".")[0] for name in LAYERS[-2:]}
    own = np.concatenate(
        [
            np.full(values.numel(), key.startswith(name))
            for key, values in DoubleMLP().named_parameters()
        ]
    )
    assert (np.ptp(model.parameters_[:, ~own], axis=0) == 0).all()
    assert (np.ptp(model.parameters_[:, own], axis=0) > 0).all()
    start = initial_net(model)
    np.testing.assert_array_equal(model.population_parameters_[own], start[own])
    np.testing.assert_array_equal(model.parameters_[0, ~own], model.population_parameters_[~own])


def test_ppsgd_whose_clients_send_nothing():
    given = {"alpha": 0.0, "n_rounds": 2, "warm_start": True}
    private = PPSGDNetClassifier(recipe(DoubleMLP), epsilon=1.0, clip_norm=0.3, **given)
    fit(private)
    start = initial_net(private)
    np.testing.assert_array_equal(private.population_parameters_, start)
    assert private.privacy_.epsilon == 0
    with pytest.raises(ValueError, match=r"alpha=0.*running statistics.*representation_step='lr'"):
        fit(PPSGDNetClassifier(recipe(Running, module__bias=True), **given))


class Identity(nn.Module):
    """Logits of rows as they are; what is before the last layer does not move."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(7, 7), nn.Linear(7, 3)
        self.double()
        with torch.no_grad():
            self.first.weight.copy_(torch.eye(7))
            for values in (self.first.bias, self.last.weight, self.last.bias):
                values.zero_()
        self.first.requires_grad_(False)

    def forward(self, X):
        return self.last(self.first(X))


@pytest.mark.parametrize("alpha", [0.0, 0.1, 2.0, np.inf])
def test_ppsgd_on_the_rows_themselves_is_linear_ppsgd(alpha):
    given = {"alpha": alpha, "n_rounds": 4, "client_fraction": 0.6, "random_state": 5}
    net = NeuralNetClassifier(Identity, criterion=nn.CrossEntropyLoss, lr=0.1, batch_size=-1)
    model = fit(PPSGDNetClassifier(net, local_steps=1, clip_norm=1e9, **given))
    linear = fit(
        PPSGDClassifier(
            batch_size=None, weighting="clients", learning_rate=0.1, clip_norm=1e9, **given
        )
    )
    np.testing.assert_allclose(proba(model), proba(linear), atol=1e-12)


def test_one_component_is_fedavg():
    one, plain = fitted(FedEMClassifier, n_components=1), reference(FedAvgClassifier)
    np.testing.assert_allclose(proba(one), proba(plain), atol=1e-12)
    np.testing.assert_allclose(
        one.population_parameters_[1:], plain.population_parameters_, atol=1e-12
    )


def test_one_centre_is_the_mean_of_the_clients():
    model = fitted(AdaMixNetClassifier, n_components=1, client_fraction=1.0, proximal=1.0)
    mean = model.parameters_.mean(axis=0)
    np.testing.assert_allclose(model.population_parameters_, mean, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("cls", MIXTURES)
def test_groups_of_clients_are_found(cls):
    """Half of the clients have the labels of the others the other way round."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(20), 30)
    X = rng.normal(size=(len(groups), 7))
    y = ((X[:, 0] + X[:, 1] > 0) == (groups % 2 == 0)).astype(int)
    net = recipe(DoubleMLP, module__n_outputs=2, batch_size=10)
    model = cls(net, n_rounds=30, random_state=0).fit(X, y, groups=groups)
    belongs = model.responsibilities_.argmax(axis=1)
    assert (belongs == belongs[np.arange(20) % 2]).all()
    assert belongs[0] != belongs[1]
    np.testing.assert_array_equal(
        model.for_client(3).responsibilities_, model.responsibilities_[3:4]
    )


def test_centres_part_even_if_nobody_takes_part_in_the_first_round():
    model = AdaMixNetClassifier(recipe(DoubleMLP), client_fraction=0.01, **SHORT)
    fit(model.set_params(n_rounds=1, warm_start=True))
    assert np.ptp(state_of(model).server["centres"], axis=0).max() == 0
    np.testing.assert_array_equal(model.responsibilities_, 0.5)
    fit(model.set_params(n_rounds=2, client_fraction=1.0))
    assert np.ptp(state_of(model).server["centres"], axis=0).max() > 0


@pytest.mark.parametrize("cls", MIXTURES)
def test_one_client_has_one_component(cls):
    X, y, groups = table(sizes=[20])
    model = cls(recipe(DoubleMLP), n_rounds=1, local_steps=2).fit(X, y, groups=groups)
    assert model.responsibilities_.shape == (1, 1)


def test_an_adaptive_share_and_its_net_take_gradient_steps():
    """Both from the share before: it moves in the same round, which counts from the next step."""
    X, y, groups = table()
    once = {"n_rounds": 2, "local_steps": 1, "warm_start": True, "random_state": 0}
    model = fit(APFLClassifier(recipe(DoubleMLP, batch_size=20), mixing="adaptive", **once))
    personal, before = state_of(model).clients["personal"], model.mixing_
    shared = model.population_parameters_
    fit(model.set_params(n_rounds=3))
    change = state_of(model).clients["personal"] - personal
    assert (before != 0.5).all()
    for i, share in enumerate(before):
        rows = groups == i
        slope = gradient(share * personal[i] + (1 - share) * shared, X[rows], y[rows])
        np.testing.assert_allclose(change[i], -0.1 * share * slope, rtol=0, atol=1e-12)
        expected = np.clip(share - 0.1 * (personal[i] - shared) @ slope, 0, 1)
        np.testing.assert_allclose(model.mixing_[i], expected, rtol=0, atol=1e-12)


def gradient(parameters, X, y):
    """Gradient of the mean loss of rows."""
    module = DoubleMLP()
    nn.utils.vector_to_parameters(torch.tensor(parameters), module.parameters())
    nn.functional.cross_entropy(module(torch.tensor(X)), torch.tensor(y)).backward()
    return nn.utils.parameters_to_vector([p.grad for p in module.parameters()]).numpy()


def test_running_statistics_of_a_mixture_are_its_own():
    """Rows went through the mixture, not its parts; without a share it is the global net."""
    X, y, groups = table(sizes=[20, 30])
    for mixing in (0.0, 0.5):
        model = APFLClassifier(recipe(Running, module__bias=True), mixing=mixing, **SHORT)
        model.set_params(warm_start=True).fit(X, y, groups=groups)
        buffers = np.arange(model.parameters_.shape[1]) >= model._engines.client.n_trained
        own = state_of(model).clients["personal"][:, buffers]
        expected = own if mixing else model.population_parameters_[buffers]
        assert np.ptp(own, axis=0).min() > 0
        np.testing.assert_array_equal(
            model.parameters_[:, buffers], np.broadcast_to(expected, own.shape)
        )


def test_running_statistics_count_in_both_phases_of_fedrep():
    X, y, groups = table(sizes=[20])
    net = recipe(Running, module__bias=True)
    model = FedRepClassifier(net, n_rounds=1, warm_start=True).fit(X, y, groups=groups)
    (alone,) = state_of(model).clients["personal"]
    shared = ~state_of(model).server["is_own"]
    found = model.population_parameters_[shared]
    np.testing.assert_allclose(found, alone[shared], rtol=1e-12)
    assert (found != initial_net(model)[shared])[-11:].all()  # statistics among them


def test_running_statistics_do_not_tell_groups_apart():
    """Without steps all nets are where the centres are, whatever rows went through them."""
    X, y, groups = table()
    net = recipe(Running, module__bias=True, lr=0.0)
    model = AdaMixNetClassifier(net, **SHORT)
    model.fit(X * (1 + groups[:, None]), y, groups=groups)
    assert (np.ptp(model.responsibilities_, axis=0) == 0).all()


def test_per_fedavg_with_a_rate_that_grows():
    """Both rates are those given times the schedule, also in the first round."""
    warm = [LRScheduler(torch.optim.lr_scheduler.ConstantLR, factor=0.25, total_iters=9)]
    nets = [
        fit(
            PerFedAvgClassifier(recipe(DoubleMLP, **net), meta_learning_rate=rate, **SHORT)
        ).parameters_
        for net, rate in [({"callbacks": warm}, 0.4), ({"lr": 0.025}, 0.1)]
    ]
    np.testing.assert_allclose(*nets, rtol=0, atol=1e-12)


def test_a_common_head_that_does_not_move_gets_no_noise():
    given = {"noise_multiplier": 1.0, "clip_norm": 0.3, "n_rounds": 2, "warm_start": True}
    model = fit(PPSGDNetClassifier(recipe(DoubleMLP), alpha=0.0, representation_step="lr", **given))
    head, start = state_of(model).server["is_own"], initial_net(model)
    moved = model.population_parameters_ != start
    np.testing.assert_array_equal(moved, ~head)


@pytest.mark.parametrize("bias", [True, False])
def test_mixtures_of_nets_with_running_statistics(bias):
    """Every component has its own, also where a row of zeros would not move them."""
    X, y, groups = table(sizes=[20, 30])
    model = FedEMClassifier(recipe(Running, module__bias=bias), **SHORT)
    model.fit(X, y, groups=groups)
    nets = [copy.deepcopy(net).eval() for net in model.net_.module_.components]
    assert all(net[1].running_mean.abs().min() > 0 for net in nets)
    assert (nets[0][1].running_mean != nets[1][1].running_mean).all()
    with torch.no_grad():
        found = [torch.softmax(net(torch.from_numpy(X)), dim=1).numpy() for net in nets]
    weights = model.responsibilities_[groups]
    expected = weights[:, :1] * found[0] + weights[:, 1:] * found[1]
    np.testing.assert_allclose(model.predict_proba(X, groups=groups), expected, atol=1e-12)


class Running(nn.Sequential):
    """A net with running statistics."""

    def __init__(self, bias):
        super().__init__(nn.Linear(7, 5, bias=bias), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
        self.double()


# Numbers of others --------------------------------------------------------------------------------
def flat(arrays):
    return np.concatenate([np.ravel(values) for values in arrays])


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("name", ["pFedMe", "PerFedAvg_FO"])
def test_steps_match_the_authors(name, stacked, monkeypatch):
    """The authors' code is in single precision; the optimizer of pFedMe has a weight decay."""
    if not stacked:
        monkeypatch.setattr(_engine, "chain_of", lambda *given: None)
    given = read_oracle("pfedme_exact")
    settings = given["results"][name]
    linear = nn.Linear(4, 3).double()
    with torch.no_grad():
        linear.weight.copy_(torch.tensor(given["W0"], dtype=torch.float64))
        linear.bias.copy_(torch.tensor(given["b0"], dtype=torch.float64))
    net = NeuralNetClassifier(nn.Sequential(linear), criterion=nn.CrossEntropyLoss, batch_size=-1)
    if name == "pFedMe":
        net.set_params(lr=settings["personal_lr"], optimizer__weight_decay=1e-3)
        model = PFedMeClassifier(
            net,
            proximal=settings["lam"],
            personal_steps=settings["K"],
            local_learning_rate=settings["lr"],
        )
        exact, authors = settings["w_local_numpy"], settings["w_local_authors"]
    else:
        net.set_params(lr=settings["alpha"])
        model = PerFedAvgClassifier(net, meta_learning_rate=settings["beta"])
        exact, authors = settings["numpy"], settings["authors"]
    X, y = np.array(given["X"]), np.array(given["y"])
    model.set_params(n_rounds=1, local_steps=settings["local_rounds"])
    model.fit(X, y, groups=np.zeros(len(y), dtype=int))
    np.testing.assert_allclose(model.population_parameters_, flat(exact), rtol=0, atol=1e-15)
    np.testing.assert_allclose(flat(exact), flat(authors), rtol=0, atol=1e-6)


# Clients who took part in no round, or come later -------------------------------------------------

KEEP_NETS = [
    AdaMixNetClassifier,
    APFLClassifier,
    DittoClassifier,
    FedMutualClassifier,
    QuPeDClassifier,
]


@pytest.mark.parametrize("cls", KEEP_NETS)
def test_clients_who_never_took_part_have_the_global_net(cls):
    model = fit(cls(recipe(DoubleMLP), client_fraction=0.3, warm_start=True, **SHORT))
    started = state_of(model).clients["started"]
    assert 0 < started.sum() < len(started)
    same = (model.parameters_ == model.population_parameters_).all(axis=1)
    np.testing.assert_array_equal(same, ~started)


@pytest.mark.parametrize("cls", KEEP_NETS)
def test_newcomers_start_from_the_global_net(cls):
    X, y, groups = table()
    model, old = cls(recipe(DoubleMLP), warm_start=True, **SHORT), groups < 5
    model.fit(X[old], y[old], groups=groups[old])
    before = model.population_parameters_
    model.set_params(estimator__lr=0.0, n_rounds=3).partial_fit(X, y, groups=groups)
    state = state_of(model).clients
    assert state["started"].all()
    nets = state["personal"]
    assert (nets[5:] == before).all()  # steps of rate 0 leave them where they started
    assert (nets[:5] != before).any(axis=1).all()


@pytest.mark.parametrize("cls", MIXTURES)
def test_shares_of_the_population_last_if_nobody_takes_part(cls):
    model = cls(recipe(DoubleMLP), warm_start=True, **SHORT)
    before = fit(model).population_parameters_
    fit(model.set_params(n_rounds=3, client_fraction=1e-9))
    np.testing.assert_allclose(model.population_parameters_, before, rtol=1e-12)


@pytest.mark.parametrize("cls", MIXTURES)
def test_shares_of_the_population_are_those_of_many_rounds(cls):
    """A round of few clients moves them by as little as these are of all."""
    X, y, groups = table(sizes=[4] * 30)
    model = cls(recipe(DoubleMLP), n_rounds=5, local_steps=1, random_state=0, warm_start=True)
    model.set_params(client_fraction=1 / 30, sampling="fixed").fit(X, y, groups=groups)
    shares = [responsibilities_at(model)]
    for n_rounds in range(6, 9):
        model.set_params(n_rounds=n_rounds).fit(X, y, groups=groups)
        shares.append(responsibilities_at(model))
    steps = np.abs(np.diff(shares, axis=0)).max(axis=1)
    assert (steps <= 1 / 30 + 1e-3).all()
    assert (steps > 0).any()
    assert np.abs(shares[0] - 0.5).max() <= 5 / 30


def responsibilities_at(model):
    server = state_of(model).server
    return server["shares"] if "shares" in server else server["global"][:2]
