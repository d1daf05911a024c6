"""The same seed gives the same bits, and nothing global changes.

Two fits are compared, both of this run: on one machine, with one build of torch and one kernel of
the linear algebra. Other machines give other last bits. Nothing here is compared to stored ones.
"""

import copy
import os
import signal
import subprocess
import sys
import time

import joblib
import numpy as np
import pytest
from sklearn.base import clone

torch = pytest.importorskip("torch")
pytest.importorskip("skorch")

from skorch import NeuralNetRegressor  # noqa: E402

from pfl_sklearn.neural_network import (  # noqa: E402
    MLP,
    AdaPeDClassifier,
    FedAvgClassifier,
    FedAvgRegressor,
    LocalNetClassifier,
)
from pfl_sklearn.neural_network._engine import _engine  # noqa: E402
from pfl_sklearn.neural_network._engine._recipe import seeded  # noqa: E402
from tests.helpers.checkpointed_net import checkpointed_net  # noqa: E402
from tests.helpers.checkpointed_run import ROOT  # noqa: E402
from tests.helpers.interruption import interrupt  # noqa: E402
from tests.helpers.nets import (  # noqa: E402
    FIELD,
    Convolutions,
    Dropped,
    Normed,
    recipe,
    table,
)
from tests.helpers.slow import slow  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")

IMAGES = (1, 8, 8)
NETS = {
    "linear": lambda: (recipe(MLP, module__hidden=()), table()),
    "perceptron": lambda: (recipe(MLP, module__hidden=5), table()),
    "convolutions": lambda: (recipe(Convolutions), table(IMAGES)),
    "dropout": lambda: (recipe(Dropped), table()),
    "batchnorm": lambda: (recipe(Normed), table()),
}
MANY = {"n_rounds": 5, "local_steps": 3, "client_fraction": 0.6, "random_state": 3}
NOISE = {"noise_multiplier": 1.0, "clip_norm": 0.3}
METHODS = {
    "fedavg": lambda net: FedAvgClassifier(net, fine_tune_steps=3, **MANY),
    "local": lambda net: LocalNetClassifier(net, **MANY),
    "adaped": lambda net: AdaPeDClassifier(net, personal_start="global", **MANY),
    "unsampled": lambda net: AdaPeDClassifier(net, train_unsampled=2, personal_start="own", **MANY),
    "private": lambda net: AdaPeDClassifier(net, clip_quantile=0.5, **NOISE, **MANY),
}
QUICK = {("fedavg", net) for net in NETS} | {("adaped", "perceptron")}
QUICK |= {("local", "perceptron"), ("unsampled", "perceptron"), ("unsampled", "dropout")}
PAIRS = [
    pytest.param(method, net, marks=() if (method, net) in QUICK else pytest.mark.slow)
    for method in METHODS
    for net in NETS
    if (method, net) != ("private", "batchnorm")
]
METHODS |= {cls.__name__: lambda net, cls=cls: cls(net, **MANY) for cls in FIELD}
PAIRS += slow((cls.__name__, net) for cls in FIELD for net in ("perceptron", "batchnorm"))
every_pair = pytest.mark.parametrize(("method", "net"), PAIRS)


def model_and_data(method, net):
    net, data = NETS[net]()
    return METHODS[method](net), data


def fitted(model, X, y, groups):
    return model.fit(X, y, groups=groups)


def state_of(model):
    state = model._progress.state
    groups = {name: getattr(state, name) for name in ("server", "clients", "own", "schedule")}
    return {**groups, "history": state.history}


def assert_same_fit(one, other):
    np.testing.assert_equal(state_of(one), state_of(other))
    assert one.privacy_ == other.privacy_


@pytest.mark.slow
@every_pair
def test_threads_blocks_interruptions_and_warm_starts(tmp_path, monkeypatch, method, net):
    model, data = model_and_data(method, net)
    whole = fitted(clone(model), *data)
    with joblib.parallel_config("threading"):
        assert_same_fit(fitted(clone(model).set_params(n_jobs=2), *data), whole)
    resumed = clone(model).set_params(checkpoint=tmp_path / "run", checkpoint_every=2)
    interrupt(clone(resumed), data, 3)
    assert_same_fit(fitted(resumed, *data), whole)
    warm = fitted(clone(model).set_params(warm_start=True, n_rounds=2), *data)
    warm.set_params(n_rounds=5)
    if method != "adaped":  # its default round of the start depends on n_rounds
        np.testing.assert_equal(state_of(fitted(warm, *data)), state_of(whole))
    for name in ("_MOST_STACKED", "_CLIENTS_ALONE", "_FEWEST_STACKED"):
        monkeypatch.setattr(_engine, name, 1)
    assert_same_fit(fitted(clone(model), *data), whole)


@every_pair
def test_rows_of_the_clients_in_turn(method, net):
    """The order of a client's own rows is kept."""
    model, (X, y, groups) = model_and_data(method, net)
    mixed = np.random.default_rng(1).permutation(groups)
    order = np.empty(len(groups), dtype=int)
    for client in np.unique(groups):
        order[mixed == client] = np.flatnonzero(groups == client)
    whole = fitted(clone(model), X, y, groups)
    assert_same_fit(fitted(clone(model), X[order], y[order], mixed), whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "net"), [(m, n) for m in ("fedavg", "adaped", "unsampled") for n in NETS]
)
def test_processes(method, net):
    model, data = model_and_data(method, net)
    whole = fitted(clone(model), *data)
    with joblib.parallel_config("loky"):
        assert_same_fit(fitted(clone(model).set_params(n_jobs=2), *data), whole)


def test_units_of_the_data_do_not_depend_on_the_order_of_clients():
    """Nor those of the responses, which the default net takes from the data, too."""
    X, _, groups = table()
    y = 1e3 + X[:, 0] + groups
    order = np.argsort(-groups, kind="stable")
    model = FedAvgRegressor(**MANY)
    whole = fitted(clone(model), X, y, groups)
    assert_same_fit(fitted(model, X[order], y[order], groups[order]), whole)
    for name, values in whole.net_.module_.named_buffers():
        assert torch.equal(model.net_.module_.get_buffer(name), values)


BLOCKS = [  # sizes of layers, and rows of a batch
    (7, (5,), 3, 5),
    (7, (6, 1, 3), 3, 20),
    (19, (33,), 10, 20),
    (37, (), 2, 13),
    (1, (51,), 5, 3),
]


@pytest.mark.slow
@pytest.mark.parametrize("double", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sizes", BLOCKS)
def test_large_blocks_of_classifiers(sizes, double):
    """Products of matrices of odd sizes are the same, whatever is stacked with them."""
    n_inputs, hidden, n_outputs, batch_size = sizes
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(34), batch_size + 3)
    X, y = rng.normal(size=(len(groups), n_inputs)), np.arange(len(groups)) % n_outputs
    with torch.random.fork_rng():
        module = MLP(n_inputs, n_outputs, hidden).to(torch.float64 if double else torch.float32)
    net = recipe(module, batch_size=batch_size)
    model = AdaPeDClassifier(net, n_rounds=2, local_steps=3, random_state=3)
    check_blocks(model, X, y, groups)


@pytest.mark.parametrize("n_inputs", [1, 37])
@pytest.mark.parametrize("hidden", [(), (23,)])
def test_large_blocks_of_regressors(n_inputs, hidden):
    """Also where the matrices are vectors."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(34), 23)
    X = rng.normal(size=(len(groups), n_inputs))
    net = NeuralNetRegressor(MLP, module__hidden=hidden, lr=0.05, batch_size=17)
    model = FedAvgRegressor(net, n_rounds=2, local_steps=3, fine_tune_steps=2, random_state=3)
    check_blocks(model, X, X.sum(axis=1), groups)


def check_blocks(model, X, y, groups):
    whole = fitted(clone(model), X, y, groups)
    assert whole._engines.client.stacked
    for most in (1, 2, 13):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_engine, "_FEWEST_STACKED", 1)
            patch.setattr(_engine, "_MOST_STACKED", most)
            part = fitted(clone(model), X, y, groups)
            assert part._engines.client.clients_at_once == most
        assert_same_fit(part, whole)


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("module", [Dropped, Convolutions])
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
    assert_same_fit(*found)


def test_seeds_give_different_nets():
    X, y, groups = table()
    first, second, third, fourth = (
        fitted(FedAvgClassifier(recipe(Dropped), n_rounds=1, random_state=seed), X, y, groups)
        for seed in (1, 2, None, None)
    )
    for one, other in ((first, second), (third, fourth)):
        assert (one._population != other._population).any()


@pytest.mark.parametrize("module", [Dropped, Normed])
def test_a_module_instance_stays(module):
    (X, y, groups), given = table(), module()
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
    first = copy.deepcopy(state_of(fitted(model, X, y, groups)))
    net = model.for_client(3).net_
    with torch.no_grad():
        for values in net.module_.parameters():
            values.zero_()
    model.net_.module_.double()
    np.testing.assert_equal(state_of(model), first)
    np.testing.assert_equal(state_of(fitted(model, X, y, groups)), first)


@pytest.mark.slow
def test_a_process_that_is_killed(tmp_path):
    path, script = tmp_path / "run.npz", "tests.helpers.checkpointed_net"
    process = subprocess.Popen([sys.executable, "-m", script, tmp_path], cwd=ROOT)
    deadline = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    with np.load(path) as file:
        assert 0 < file["round"] < 60
    resumed = checkpointed_net(tmp_path)
    assert os.listdir(tmp_path) == []
    assert_same_fit(resumed, checkpointed_net(tmp_path))


@pytest.mark.parametrize("first", [None, "client"])
def test_a_warm_start_may_turn_the_label_prior_on_or_off(first):
    """The rounds are the same; without a last phase it matters to predictions alone."""
    X, y, groups = table()
    given = {**MANY, "warm_start": True}
    model = FedAvgClassifier(recipe(), label_prior=first, **given).fit(X, y, groups=groups)
    other = None if first else "client"
    model.set_params(label_prior=other).fit(X, y, groups=groups)
    expected = FedAvgClassifier(recipe(), label_prior=other, **MANY).fit(X, y, groups=groups)
    np.testing.assert_array_equal(
        model.predict_proba(X, groups=groups), expected.predict_proba(X, groups=groups)
    )
