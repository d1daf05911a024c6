"""The same seed gives the same bits, and nothing global changes.

Two fits are compared, both of this run: on one machine, with one build of torch and one kernel of
the linear algebra. Other machines give other last bits. Nothing here is compared to stored ones.
"""

import copy
import pickle
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import joblib
import numpy as np
import pytest
import torch
from sklearn.base import clone
from skorch import NeuralNetRegressor
from torch import nn

from pfl_sklearn.neural_network import (
    MLP,
    AdaPeDClassifier,
    FedAvgClassifier,
    FedAvgRegressor,
    FedEMClassifier,
    FedRepClassifier,
    LocalNetClassifier,
)
from pfl_sklearn.neural_network._engine import _engine
from pfl_sklearn.neural_network._engine._recipe import seeded
from tests.helpers.fitted_rounds import assert_same_bits, is_stacked, parts_of
from tests.helpers.interruption import interrupt
from tests.helpers.net_fits import fit
from tests.helpers.nets import FIELD, Convolutions, Dropped, Normed, recipe, table

pytestmark = pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")

IMAGES = (1, 8, 8)
NETS = {
    "linear": lambda: (recipe(MLP, module__hidden=()), table()),
    "perceptron": lambda: (recipe(MLP, module__hidden=5), table()),
    "convolutions": lambda: (recipe(Convolutions), table(IMAGES)),
    "dropout": lambda: (recipe(Dropped), table()),
    "batchnorm": lambda: (recipe(Normed), table()),
}
MANY = {"n_rounds": 4, "local_steps": 2, "client_fraction": 0.6, "random_state": 3}
NOISE = {"noise_multiplier": 1.0, "clip_norm": 0.3}
METHODS = {
    "fedavg": lambda net: FedAvgClassifier(net, fine_tune_steps=3, **MANY),
    "local": lambda net: LocalNetClassifier(net, **MANY),
    "adaped": lambda net: AdaPeDClassifier(net, personal_start="global", **MANY),
    "unsampled": lambda net: AdaPeDClassifier(net, train_unsampled=2, personal_start="own", **MANY),
    # All clients: what a sample amplifies takes seconds to account.
    "private": lambda net: AdaPeDClassifier(
        net, clip_quantile=0.5, **NOISE, **{**MANY, "client_fraction": 1.0}
    ),
}
METHODS |= {
    name: lambda net, cls=cls, params=params: cls(net, **{**MANY, **params})
    for name, cls, params in [
        ("passes", FedRepClassifier, {"local_steps": 10, "local_epochs": 1}),
        ("weights", FedEMClassifier, {"weighting": "samples"}),
        ("dropped", FedAvgClassifier, {"drop_fraction": 0.4}),
        ("server step", FedAvgClassifier, {"server_optimizer": partial(torch.optim.Adam, lr=0.05)}),
        ("head", FedAvgClassifier, {"head": "bayes"}),
        ("global net", AdaPeDClassifier, {"global_estimator": recipe(MLP, module__hidden=())}),
    ]
}
OTHERS = [cls for cls in FIELD if cls not in (FedRepClassifier, FedEMClassifier)]
METHODS |= {cls.__name__: lambda net, cls=cls: cls(net, **MANY) for cls in OTHERS}
PAIRS = [
    *(("fedavg", net) for net in NETS),
    *((method, "perceptron") for method in METHODS if method != "fedavg"),
    ("unsampled", "dropout"),
    ("weights", "batchnorm"),
]


def fitted(model, X, y, groups):
    return model.fit(X, y, groups=groups)


def model_and_data(method, net):
    net, data = NETS[net]()
    return METHODS[method](net), data


@pytest.mark.slow
@pytest.mark.parametrize(("method", "net"), PAIRS)
def test_threads_blocks_interruptions_and_warm_starts(tmp_path, monkeypatch, method, net):
    model, data = model_and_data(method, net)
    whole = fitted(clone(model), *data)
    with joblib.parallel_config("threading"):
        assert_same_bits(fitted(clone(model).set_params(n_jobs=2), *data), whole)
    resumed = clone(model).set_params(checkpoint=tmp_path / "run", checkpoint_every=2)
    interrupt(clone(resumed), data, 3)
    assert_same_bits(fitted(resumed, *data), whole)
    warm = fitted(clone(model).set_params(warm_start=True, n_rounds=2), *data)
    warm.set_params(n_rounds=4)
    if method != "adaped":  # its default round of the start depends on n_rounds
        np.testing.assert_equal(parts_of(fitted(warm, *data)), parts_of(whole))
    for name in ("_MOST_STACKED", "_CLIENTS_ALONE", "_FEWEST_STACKED"):
        monkeypatch.setattr(_engine, name, 1)
    assert_same_bits(fitted(clone(model), *data), whole)


def test_rows_of_the_clients_in_turn():
    """The order of a client's own rows is kept; here by a net that draws numbers in training."""
    model, (X, y, groups) = model_and_data("fedavg", "dropout")
    mixed = np.random.default_rng(1).permutation(groups)
    order = np.empty(len(groups), dtype=int)
    for client in np.unique(groups):
        order[mixed == client] = np.flatnonzero(groups == client)
    whole = fitted(clone(model), X, y, groups)
    assert_same_bits(fitted(clone(model), X[order], y[order], mixed), whole)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "net"), [("unsampled", "perceptron"), ("fedavg", "dropout")])
def test_processes(method, net):
    model, data = model_and_data(method, net)
    whole = fitted(clone(model), *data)
    with joblib.parallel_config("loky"):
        assert_same_bits(fitted(clone(model).set_params(n_jobs=2), *data), whole)


def test_units_of_the_data_do_not_depend_on_the_order_of_clients():
    """Nor those of the responses, which the default net takes from the data, too."""
    X, _, groups = table()
    y = 1e3 + X[:, 0] + groups
    order = np.argsort(-groups, kind="stable")
    model = FedAvgRegressor(**MANY)
    whole = fitted(clone(model), X, y, groups)
    assert_same_bits(fitted(model, X[order], y[order], groups[order]), whole)
    for name, values in whole.net_.module_.named_buffers():
        assert torch.equal(model.net_.module_.get_buffer(name), values)


def test_large_blocks_of_regressors():
    """Where the matrices are vectors."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(34), 23)
    X = rng.normal(size=(len(groups), 1))
    net = NeuralNetRegressor(MLP, module__hidden=(), lr=0.05, batch_size=17)
    model = FedAvgRegressor(net, n_rounds=2, local_steps=3, fine_tune_steps=2, random_state=3)
    check_blocks(model, X, X[:, 0], groups)


def check_blocks(model, X, y, groups):
    whole = fitted(clone(model), X, y, groups)
    assert is_stacked(whole)
    for most in (1, 13):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_engine, "_FEWEST_STACKED", 1)
            patch.setattr(_engine, "_MOST_STACKED", most)
            part = fitted(clone(model), X, y, groups)
            assert part._engines.client.clients_at_once == most
        assert_same_bits(part, whole)


@pytest.mark.parametrize(("module", "seed"), [(Dropped, None), (Convolutions, 0)])
def test_global_generators_stay(module, seed):
    X, y, groups = table(IMAGES if module is Convolutions else (7,))
    model = FedAvgClassifier(recipe(module), n_rounds=2, fine_tune_steps=1, random_state=seed)
    before = torch.get_rng_state(), np.random.get_state()
    fitted(model, X, y, groups).predict(X, groups=groups)
    assert torch.equal(torch.get_rng_state(), before[0])
    np.testing.assert_equal(np.random.get_state(), before[1])


def test_global_generators_are_not_used():
    X, y, groups = table()
    found = []
    for seed in (1, 2):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            found.append(fitted(FedAvgClassifier(recipe(Dropped), **MANY), X, y, groups))
    assert_same_bits(*found)


def test_a_module_instance_stays():
    (X, y, groups), given = table(), Normed()
    before, model = copy.deepcopy(given), FedAvgClassifier(recipe(given), **MANY)
    fitted(model, X, y, groups).predict(X, groups=groups)
    assert model.estimator.module is given
    assert not getattr(model.estimator, "initialized_", False)
    assert given.training
    for name, values in before.state_dict().items():
        assert torch.equal(given.state_dict()[name], values)
    assert all(values.grad is None for values in given.parameters())


def test_an_instance_is_where_training_starts():
    """Its weights do not come from the seed, but dropout does."""
    (X, y, groups), given = table(), Dropped()
    still = recipe(given, lr=0.0)
    start = fitted(FedAvgClassifier(still, n_rounds=1), X, y, groups).net_.module_.state_dict()
    for name, values in given.state_dict().items():
        assert torch.equal(start[name], values)
    one, other = (FedAvgClassifier(recipe(given), random_state=seed) for seed in (1, 2))
    for model in (one, other):
        fitted(model.set_params(n_rounds=1, local_steps=1), X[:4], y[:4], groups[:4])
    assert (one._population != other._population).any()


def test_seeds_of_one_device_leave_the_others_alone(monkeypatch):
    cards = [torch.Generator() for _ in range(3)]
    monkeypatch.setattr(torch.cuda, "default_generators", cards)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    everyone = [torch.default_generator, *cards]
    states = [generator.get_state() for generator in everyone]
    with seeded(5, torch.device("cuda:1")):
        seeds = [generator.initial_seed() for generator in everyone]
        torch.rand(3, generator=cards[1])
    assert [seed == 5 for seed in seeds] == [True, False, True, False]
    for generator, state in zip(everyone, states, strict=True):
        assert torch.equal(generator.get_state(), state)


def test_fits_leave_one_another_alone():
    """A second fit starts anew, and a client's net is its own."""
    X, y, groups = table()
    model = METHODS["fedavg"](recipe(MLP))
    first = parts_of(fitted(model, X, y, groups))
    net = model.for_client(3).net_
    with torch.no_grad():
        for values in net.module_.parameters():
            values.zero_()
    model.net_.module_.double()
    np.testing.assert_equal(parts_of(model), first)
    np.testing.assert_equal(parts_of(fitted(model, X, y, groups)), first)


# Threads of a process, and copies -----------------------------------------------------------------

SHORT = {"n_rounds": 1, "local_steps": 2}


@pytest.fixture
def busy():
    """Threads take turns after every few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("net", [None, recipe(Dropped)], ids=["stacked", "one by one"])
def test_fits_in_threads_give_the_same_bits(busy, net):
    X, y, groups = table(sizes=[4, 5])

    def fitted(seed):
        return (
            AdaPeDClassifier(net, random_state=seed, **SHORT).fit(X, y, groups=groups).parameters_
        )

    seeds = range(4)
    expected = [fitted(seed) for seed in seeds]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(fitted, seeds))
    np.testing.assert_array_equal(found, expected)


def test_filters_of_warnings_stay_as_they_are():
    """They are the process's: a thread that puts them back may put back another one's."""
    X, y, groups = table()
    seen = []

    class Looking(nn.CrossEntropyLoss):
        def forward(self, outputs, y):
            seen.append(list(warnings.filters))
            return super().forward(outputs, y)

    FedAvgClassifier(recipe(criterion=Looking), **SHORT).fit(X, y, groups=groups)
    assert seen
    assert all(filters == warnings.filters for filters in seen)


def test_copies_of_a_model_are_made_without_another_look_at_its_net(monkeypatch):
    model = fit(AdaPeDClassifier(random_state=0, **SHORT))
    monkeypatch.setattr(_engine, "chain_of", None)
    for each in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model), model.for_client(1)):
        assert each._engines.client.chain == model._engines.client.chain
