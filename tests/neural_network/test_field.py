"""Methods that AdaPeD is compared with: their limits, and exact numbers of others."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("skorch")

from skorch import NeuralNetClassifier  # noqa: E402
from skorch.callbacks import LRScheduler  # noqa: E402
from torch import nn  # noqa: E402

from pfl_sklearn import PPSGDClassifier  # noqa: E402
from pfl_sklearn.neural_network import (  # noqa: E402
    MLP,
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
from pfl_sklearn.neural_network._engine import _engine  # noqa: E402
from tests.helpers.nets import DoubleMLP, recipe, table  # noqa: E402
from tests.helpers.oracles import read_oracle  # noqa: E402

MANY = {"n_rounds": 6, "local_steps": 3, "client_fraction": 0.6, "random_state": 5}


@pytest.fixture(params=["stacked", "one by one"])
def stacking(request, monkeypatch):
    """Clients of a block are trained at once, or one after another."""
    if request.param == "one by one":
        monkeypatch.setattr(_engine, "chain_of", lambda *given: None)


def fitted(cls, **params):
    X, y, groups = table()
    return cls(recipe(DoubleMLP), **{**MANY, **params}).fit(X, y, groups=groups)


def assert_same_nets(one, other, population=True):
    np.testing.assert_allclose(one.parameters_, other.parameters_, rtol=0, atol=1e-12)
    if population:
        first, second = one.population_parameters_, other.population_parameters_
        np.testing.assert_allclose(first, second, rtol=0, atol=1e-12)


# Limits -------------------------------------------------------------------------------------------


def test_ditto_without_a_pull_is_local(stacking):
    ditto = fitted(DittoClassifier, proximal=0.0)
    assert_same_nets(ditto, fitted(LocalNetClassifier), population=False)
    global_net = fitted(FedAvgClassifier).population_parameters_
    np.testing.assert_allclose(ditto.population_parameters_, global_net, rtol=0, atol=1e-12)


def test_ditto_with_an_infinite_pull_has_the_latest_global_net(stacking):
    ditto = fitted(DittoClassifier, proximal=np.inf, client_fraction=1.0)
    before = fitted(FedAvgClassifier, n_rounds=5, client_fraction=1.0).population_parameters_
    np.testing.assert_allclose(ditto.parameters_, np.tile(before, (8, 1)), rtol=0, atol=1e-12)


def test_a_mixture_with_nothing_of_its_own_is_global(stacking):
    assert_same_nets(fitted(APFLClassifier, mixing=0.0), fitted(FedAvgClassifier))


def test_a_mixture_of_ones_own_net_alone_is_local(stacking):
    mixed = fitted(APFLClassifier, mixing=1.0)
    assert_same_nets(mixed, fitted(LocalNetClassifier), population=False)
    global_net = fitted(FedAvgClassifier).population_parameters_
    np.testing.assert_allclose(mixed.population_parameters_, global_net, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_shares_adapt_towards_the_better_net(stacking):
    """Shares fall where own nets are worse; they are steps along the gradient, within [0, 1]."""
    model = fitted(APFLClassifier, mixing="adaptive", n_rounds=40, client_fraction=1.0)
    shares = model.mixing_
    assert ((shares >= 0) & (shares <= 1)).all()
    assert (shares != 0.5).all()
    assert shares.std() > 1e-3


def test_without_personal_layers_fedper_is_fedavg(stacking):
    assert_same_nets(fitted(FedPerClassifier, personal_layers=()), fitted(FedAvgClassifier))


def test_with_personal_layers_alone_fedper_is_local(stacking):
    names = [name for name, _ in DoubleMLP().named_parameters()]
    every = fitted(FedPerClassifier, personal_layers=names)
    assert_same_nets(every, fitted(LocalNetClassifier))


@pytest.mark.parametrize("cls", [FedPerClassifier, FedRepClassifier])
def test_layers_are_shared_or_kept(cls, stacking):
    model = fitted(cls, client_fraction=1.0)
    (name,) = {name.rpartition(".")[0] for name in last_names()}
    own = np.concatenate(
        [
            np.full(values.numel(), key.startswith(name))
            for key, values in DoubleMLP().named_parameters()
        ]
    )
    assert (np.ptp(model.parameters_[:, ~own], axis=0) == 0).all()
    assert (np.ptp(model.parameters_[:, own], axis=0) > 0).all()
    start = fitted(cls, n_rounds=1, client_fraction=1.0, epsilon=np.inf)._engines.client.start()
    np.testing.assert_array_equal(model.population_parameters_[own], start[own])
    np.testing.assert_array_equal(model.parameters_[0, ~own], model.population_parameters_[~own])


def last_names():
    return [name for name, _ in DoubleMLP().named_parameters()][-2:]


def test_without_distillation_quped_is_local(stacking):
    model = fitted(QuPeDClassifier, distillation=0.0)
    assert_same_nets(model, fitted(LocalNetClassifier), population=False)
    start = model._engines.client.start()
    np.testing.assert_array_equal(model.population_parameters_, start)


def test_without_teachers_mutual_learning_is_local_and_global(stacking):
    model = fitted(FedMutualClassifier, personal_loss=1.0, global_loss=1.0)
    assert_same_nets(model, fitted(LocalNetClassifier), population=False)
    global_net = fitted(FedAvgClassifier).population_parameters_
    np.testing.assert_allclose(model.population_parameters_, global_net, rtol=0, atol=1e-12)


def test_ppsgd_with_a_common_head_alone_is_fedavg(stacking):
    assert_same_nets(fitted(PPSGDNetClassifier, alpha=np.inf), fitted(FedAvgClassifier))


def test_ppsgd_with_own_heads_and_full_steps_below_is_fedper(stacking):
    own = fitted(PPSGDNetClassifier, alpha=0.0, representation_step="lr", client_fraction=1.0)
    assert_same_nets(own, fitted(FedPerClassifier, client_fraction=1.0))


def listed_nets(X, y, groups, alpha, rate, n_rounds, start):
    """Algorithm 3 of PPSGD with all clients and all of their rows: w is all but the heads' offsets.

    The larger of the steps alpha eta and eta / N is `rate`.
    """
    clients, eta = np.unique(groups), rate / max(alpha, 1 / len(np.unique(groups)))
    w = [torch.from_numpy(values) for values in start]
    theta = [[torch.zeros_like(values) for values in w[-2:]] for _ in clients]
    for _ in range(n_rounds):
        total = [torch.zeros_like(values) for values in w]
        for i, own in zip(clients, theta, strict=True):
            net = DoubleMLP()
            with torch.no_grad():
                values = [*w[:-2], w[-2] + own[0], w[-1] + own[1]]
                for parameter, value in zip(net.parameters(), values, strict=True):
                    parameter.copy_(value)
            rows = torch.from_numpy(X[groups == i]), torch.from_numpy(y[groups == i])
            loss = nn.functional.cross_entropy(net(rows[0]), rows[1])
            slopes = torch.autograd.grad(loss, list(net.parameters()))
            for offset, slope in zip(own, slopes[-2:], strict=True):
                offset -= eta / len(clients) * slope  # line 8
            for summed, slope in zip(total, slopes, strict=True):
                summed += slope
        w = [  # line 13
            value - alpha * eta * summed / len(clients)
            for value, summed in zip(w, total, strict=True)
        ]
    return np.concatenate([value.numpy().ravel() for value in w])


@pytest.mark.parametrize("alpha", [0.0, 0.05, 0.5])
def test_ppsgd_is_its_listing(alpha):
    """The representation is a part of w, which takes no step at all with an alpha of 0."""
    X, y, groups = table()
    net = recipe(DoubleMLP, batch_size=-1)
    model = PPSGDNetClassifier(net, alpha=alpha, n_rounds=3, local_steps=1, random_state=0)
    model.fit(X, y, groups=groups)
    first, start = model._engines.client.start(), []
    for values in DoubleMLP().parameters():
        start.append(first[: values.numel()].reshape(values.shape))
        first = first[values.numel() :]
    expected = listed_nets(X, y, groups, alpha, 0.1, 3, start)
    np.testing.assert_allclose(model.population_parameters_, expected, rtol=0, atol=1e-12)
    assert (model.history_["bytes_sent"] == 0).all() == (alpha == 0)


def test_ppsgd_whose_clients_send_nothing():
    X, y, groups = table()
    given = {"alpha": 0.0, "n_rounds": 2, "warm_start": True}
    private = PPSGDNetClassifier(recipe(DoubleMLP), epsilon=1.0, clip_norm=0.3, **given)
    private.fit(X, y, groups=groups)
    start = private._engines.client.start()
    np.testing.assert_array_equal(private.population_parameters_, start)
    assert private.privacy_.epsilon == 0
    with pytest.raises(ValueError, match=r"alpha=0.*running statistics.*representation_step='lr'"):
        PPSGDNetClassifier(recipe(Running, module__bias=True), **given).fit(X, y, groups=groups)


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


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.3, 2.0, np.inf])
def test_ppsgd_on_the_rows_themselves_is_linear_ppsgd(stacking, alpha):
    X, y, groups = table()
    given = {"alpha": alpha, "n_rounds": 6, "client_fraction": 0.6, "random_state": 5}
    net = NeuralNetClassifier(Identity, criterion=nn.CrossEntropyLoss, lr=0.1, batch_size=-1)
    model = PPSGDNetClassifier(net, local_steps=1, clip_norm=1e9, **given).fit(X, y, groups=groups)
    linear = PPSGDClassifier(
        batch_size=None, weighting="clients", learning_rate=0.1, clip_norm=1e9, **given
    ).fit(X, y, groups=groups)
    np.testing.assert_allclose(
        model.predict_proba(X, groups=groups), linear.predict_proba(X, groups=groups), atol=1e-12
    )


def test_one_component_is_fedavg(stacking):
    one, plain = fitted(FedEMClassifier, n_components=1), fitted(FedAvgClassifier)
    X, _, groups = table()
    np.testing.assert_allclose(
        one.predict_proba(X, groups=groups), plain.predict_proba(X, groups=groups), atol=1e-12
    )
    np.testing.assert_allclose(
        one.population_parameters_[1:], plain.population_parameters_, atol=1e-12
    )


def test_centres_without_a_pull_leave_clients_alone(stacking):
    model = fitted(AdaMixNetClassifier, proximal=0.0)
    assert_same_nets(model, fitted(LocalNetClassifier), population=False)


def test_one_centre_is_the_mean_of_the_clients(stacking):
    model = fitted(AdaMixNetClassifier, n_components=1, client_fraction=1.0, proximal=1.0)
    mean = model.parameters_.mean(axis=0)
    np.testing.assert_allclose(model.population_parameters_, mean, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("cls", [AdaMixNetClassifier, FedEMClassifier])
def test_groups_of_clients_are_found(cls):
    """Half of the clients have the labels of the others the other way round."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(20), 30)
    X = rng.normal(size=(len(groups), 7))
    y = ((X[:, 0] + X[:, 1] > 0) == (groups % 2 == 0)).astype(int)
    net = recipe(DoubleMLP, module__n_outputs=2, batch_size=10)
    model = cls(net, n_rounds=60, random_state=0).fit(X, y, groups=groups)
    belongs = model.responsibilities_.argmax(axis=1)
    assert (belongs == belongs[np.arange(20) % 2]).all()
    assert belongs[0] != belongs[1]
    np.testing.assert_array_equal(
        model.for_client(3).responsibilities_, model.responsibilities_[3:4]
    )


def test_centres_part_even_if_nobody_takes_part_in_the_first_round():
    X, y, groups = table()
    model = AdaMixNetClassifier(recipe(DoubleMLP), n_rounds=1, client_fraction=0.01, random_state=0)
    model.set_params(warm_start=True).fit(X, y, groups=groups)
    assert np.ptp(model._progress.state.server["centres"], axis=0).max() == 0
    np.testing.assert_array_equal(model.responsibilities_, 0.5)
    model.set_params(n_rounds=2, client_fraction=1.0).fit(X, y, groups=groups)
    assert np.ptp(model._progress.state.server["centres"], axis=0).max() > 0


@pytest.mark.parametrize("cls", [FedEMClassifier, AdaMixNetClassifier])
def test_one_client_has_one_component(cls):
    X, y, groups = table(sizes=[20])
    model = cls(recipe(DoubleMLP), n_rounds=1).fit(X, y, groups=groups)
    assert model.responsibilities_.shape == (1, 1)


@pytest.mark.parametrize("mixing", [0.3, 0.7])
def test_a_fixed_share_stays(mixing):
    X, y, groups = table()
    model = APFLClassifier(recipe(MLP, module__n_inputs=7), n_rounds=2, mixing=mixing)
    model.set_params(warm_start=True).fit(X, y, groups=groups).set_params(n_rounds=3).fit(
        X, y, groups=groups
    )
    np.testing.assert_array_equal(model.partial_fit(X, y, groups=groups).mixing_, mixing)


def test_the_first_step_of_a_mixture_takes_the_share_before_it():
    """The share moves in the same round, which counts from the next step on."""
    X, y, groups = table()
    once = {"n_rounds": 1, "local_steps": 1, "warm_start": True, "mixing": "adaptive"}
    model = APFLClassifier(recipe(DoubleMLP, batch_size=20), **once).fit(X, y, groups=groups)
    before, shared = model._progress.state.clients["personal"], model.population_parameters_
    model.set_params(n_rounds=2).fit(X, y, groups=groups)
    change = model._progress.state.clients["personal"] - before
    assert (model.mixing_ != 0.5).all()
    for client, own in enumerate(before):
        mine = groups == client
        slope = gradient(0.5 * own + 0.5 * shared, X[mine], y[mine])
        np.testing.assert_allclose(change[client], -0.1 * 0.5 * slope, rtol=0, atol=1e-12)


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
        model = APFLClassifier(recipe(Running, module__bias=True), n_rounds=2, mixing=mixing)
        model.set_params(warm_start=True).fit(X, y, groups=groups)
        buffers = np.arange(model.parameters_.shape[1]) >= model._engines.client.n_trained
        own = model._progress.state.clients["personal"][:, buffers]
        expected = own if mixing else model.population_parameters_[buffers]
        assert np.ptp(own, axis=0).min() > 0
        np.testing.assert_array_equal(
            model.parameters_[:, buffers], np.broadcast_to(expected, own.shape)
        )


def test_running_statistics_count_in_both_phases_of_fedrep():
    X, y, groups = table(sizes=[20])
    net = recipe(Running, module__bias=True)
    model = FedRepClassifier(net, n_rounds=1, warm_start=True).fit(X, y, groups=groups)
    (alone,) = model._progress.state.clients["personal"]
    shared = ~model._progress.state.server["is_own"]
    found = model.population_parameters_[shared]
    np.testing.assert_allclose(found, alone[shared], rtol=1e-12)
    assert (found != model._engines.client.start()[shared])[-11:].all()  # statistics among them


def test_running_statistics_do_not_tell_groups_apart():
    """Without steps all nets are where the centres are, whatever rows went through them."""
    X, y, groups = table()
    net = recipe(Running, module__bias=True, lr=0.0)
    model = AdaMixNetClassifier(net, n_rounds=4, random_state=0)
    model.fit(X * (1 + groups[:, None]), y, groups=groups)
    assert (np.ptp(model.responsibilities_, axis=0) == 0).all()


def test_both_rates_of_per_fedavg_follow_a_scheduler():
    """A rate of 0 from the second round on."""
    X, y, groups = table()
    nets = []
    for n_rounds in (1, 3):
        schedule = [("rates", LRScheduler("StepLR", step_size=1, gamma=0.0))]
        net = recipe(DoubleMLP, callbacks=schedule)
        model = PerFedAvgClassifier(net, n_rounds=n_rounds, local_steps=2, random_state=0)
        nets.append(model.fit(X, y, groups=groups).population_parameters_)
    np.testing.assert_array_equal(*nets)
    assert (nets[0] != model._engines.client.start()).any()


def test_per_fedavg_with_a_rate_that_grows():
    """Both rates are those given times the schedule, also in the first round."""
    X, y, groups = table()
    warm = [LRScheduler(torch.optim.lr_scheduler.ConstantLR, factor=0.25, total_iters=9)]
    nets = [
        PerFedAvgClassifier(recipe(DoubleMLP, **net), n_rounds=2, meta_learning_rate=rate)
        .set_params(random_state=0)
        .fit(X, y, groups=groups)
        .parameters_
        for net, rate in [({"callbacks": warm}, 0.4), ({"lr": 0.025}, 0.1)]
    ]
    np.testing.assert_allclose(*nets, rtol=0, atol=1e-12)


def test_a_global_net_that_learns_nothing_does_not_decay():
    X, y, groups = table()
    net = recipe(DoubleMLP, optimizer__weight_decay=0.1)
    model = QuPeDClassifier(net, n_rounds=2, distillation=0.0).fit(X, y, groups=groups)
    start = model._engines.client.start()
    np.testing.assert_array_equal(model.population_parameters_, start)


@pytest.mark.parametrize("cls", [FedPerClassifier, FedRepClassifier, PPSGDNetClassifier])
def test_the_last_layer_among_others(cls):
    X, y, groups = table()
    own = []
    for names in (["layers.1", "last"], ["layers.1", "layers.3"]):
        model = cls(recipe(DoubleMLP), personal_layers=names, n_rounds=2, warm_start=True)
        own.append(model.fit(X, y, groups=groups)._progress.state.server["is_own"])
    np.testing.assert_array_equal(*own)
    assert own[0].all()


def test_layers_have_the_same_names_whether_rows_are_looked_at_or_not():
    X, y, groups = table()
    for noise in ({}, {"noise_multiplier": 1.0, "clip_norm": 0.3}):
        model = FedPerClassifier(n_rounds=1, personal_layers=["layers.3"], **noise)
        model.fit(X, y, groups=groups)
        assert np.ptp(model.parameters_, axis=0).astype(bool).sum() == 64 * 3 + 3


def test_a_common_head_that_does_not_move_gets_no_noise():
    X, y, groups = table()
    given = {"noise_multiplier": 1.0, "clip_norm": 0.3, "n_rounds": 2, "warm_start": True}
    model = PPSGDNetClassifier(recipe(DoubleMLP), alpha=0.0, representation_step="lr", **given).fit(
        X, y, groups=groups
    )
    head, start = model._progress.state.server["is_own"], model._engines.client.start()
    moved = model.population_parameters_ != start
    np.testing.assert_array_equal(moved, ~head)


@pytest.mark.parametrize("bias", [True, False])
def test_mixtures_of_nets_with_running_statistics(bias):
    """Every component has its own, also where a row of zeros would not move them."""
    X, y, groups = table(sizes=[20, 30])
    model = FedEMClassifier(recipe(Running, module__bias=bias), n_rounds=3, random_state=0)
    model.fit(X, y, groups=groups)
    nets = [copy.deepcopy(net).eval() for net in model.net_.module_.components]
    assert all(net.norm.running_mean.abs().min() > 0 for net in nets)
    assert (nets[0].norm.running_mean != nets[1].norm.running_mean).all()
    with torch.no_grad():
        found = [torch.softmax(net(torch.from_numpy(X)), dim=1).numpy() for net in nets]
    weights = model.responsibilities_[groups]
    expected = weights[:, :1] * found[0] + weights[:, 1:] * found[1]
    np.testing.assert_allclose(model.predict_proba(X, groups=groups), expected, atol=1e-12)


class Running(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.first, self.norm = nn.Linear(7, 5, bias=bias), nn.BatchNorm1d(5)
        self.last = nn.Linear(5, 3)
        self.double()

    def forward(self, X):
        return self.last(torch.relu(self.norm(self.first(X))))


def test_a_pass_takes_every_row_once():
    """Where steps take two batches, a pass has half as many rounds."""
    X, y, groups = table(sizes=[40, 40])
    given = {"local_steps": 2, "random_state": 0}
    plain = FedAvgClassifier(recipe(DoubleMLP), **given).partial_fit(X, y, groups=groups)
    meta = PerFedAvgClassifier(recipe(DoubleMLP), **given).partial_fit(X, y, groups=groups)
    assert (plain.n_rounds_, meta.n_rounds_) == (5, 3)


# Numbers of others --------------------------------------------------------------------------------


def oracle_net(rate, **params):
    given = read_oracle("pfedme_exact")
    linear = nn.Linear(4, 3).double()
    with torch.no_grad():
        linear.weight.copy_(torch.tensor(given["W0"], dtype=torch.float64))
        linear.bias.copy_(torch.tensor(given["b0"], dtype=torch.float64))
    net = NeuralNetClassifier(
        nn.Sequential(linear), criterion=nn.CrossEntropyLoss, lr=rate, batch_size=-1, **params
    )
    X, y = np.array(given["X"]), np.array(given["y"])
    return net, X, y, np.zeros(len(y), dtype=int), given["results"]


def flat(arrays):
    return np.concatenate([np.ravel(values) for values in arrays])


def test_pfedme_matches_the_authors(stacking):
    """Their optimizer has a weight decay of 1e-3."""
    settings = read_oracle("pfedme_exact")["results"]["pFedMe"]
    net, X, y, groups, _ = oracle_net(settings["personal_lr"], optimizer__weight_decay=1e-3)
    model = PFedMeClassifier(
        net,
        n_rounds=1,
        local_steps=settings["local_rounds"],
        proximal=settings["lam"],
        personal_steps=settings["K"],
        local_learning_rate=settings["lr"],
    ).fit(X, y, groups=groups)
    expected = flat(settings["w_local_numpy"])
    np.testing.assert_allclose(model.population_parameters_, expected, rtol=0, atol=1e-15)
    np.testing.assert_allclose(expected, flat(settings["w_local_authors"]), rtol=0, atol=1e-6)


def test_per_fedavg_matches_the_authors(stacking):
    settings = read_oracle("pfedme_exact")["results"]["PerFedAvg_FO"]
    net, X, y, groups, _ = oracle_net(settings["alpha"])
    model = PerFedAvgClassifier(
        net,
        n_rounds=1,
        local_steps=settings["local_rounds"],
        meta_learning_rate=settings["beta"],
    ).fit(X, y, groups=groups)
    expected = flat(settings["numpy"])
    np.testing.assert_allclose(model.population_parameters_, expected, rtol=0, atol=1e-15)
    np.testing.assert_allclose(expected, flat(settings["authors"]), rtol=0, atol=1e-6)
