"""How much clients train and how the server moves, against a plain loop over clients in torch."""

from copy import deepcopy
from functools import partial

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning

torch = pytest.importorskip("torch")
pytest.importorskip("skorch")

from skorch.callbacks import GradientNormClipping  # noqa: E402

from pfl_sklearn.neural_network import (  # noqa: E402
    AdaMixNetClassifier,
    AdaPeDClassifier,
    DittoClassifier,
    FedAvgClassifier,
    FedEMClassifier,
    FedRepClassifier,
    LocalNetClassifier,
    PerFedAvgClassifier,
    PFedMeClassifier,
    PPSGDNetClassifier,
    ScaffoldClassifier,
)
from pfl_sklearn.neural_network._engine import _engine, _held_out  # noqa: E402
from tests.helpers.interruption import interrupt  # noqa: E402
from tests.helpers.nets import (  # noqa: E402
    FIELD,
    SIZES,
    DoubleMLP,
    Normed,
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


@pytest.mark.parametrize(
    ("cls", "n_rounds"), [(FedAvgClassifier, 4), (PerFedAvgClassifier, 3), (FedRepClassifier, 2)]
)
def test_rounds_of_partial_fit_pass_over_all_rows(cls, n_rounds):
    """The largest client's 14 rows are four batches; a round has 4, 7 or 10 + 4 of them."""
    X, y, groups = table()
    for share, expected in ((1.0, 1), (0.25, n_rounds)):
        model = cls(recipe(DoubleMLP), local_epochs=1, client_fraction=share, random_state=SEED)
        assert model.partial_fit(X, y, groups=groups).n_rounds_ == expected


@pytest.mark.slow
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


# The server's step --------------------------------------------------------------------------------

FEDAVGM = partial(torch.optim.SGD, lr=1.0, momentum=0.9)
FEDADAM = partial(torch.optim.Adam, lr=0.05, betas=(0.9, 0.99), eps=1e-3)


class Momentum:
    """Averaging with momentum, in numpy."""

    def __init__(self, rate, momentum, decay=0.0):
        self.rate, self.momentum, self.decay, self.speed = rate, momentum, decay, 0.0

    def __call__(self, vector, change):
        self.speed = self.momentum * self.speed - change + self.decay * vector
        return vector - self.rate * self.speed


class Adaptive:
    """Adam with torch's correction of both moments for where they start, in numpy."""

    def __init__(self, rate, first, second, floor):
        self.rate, self.first, self.second, self.floor = rate, first, second, floor
        self.mean, self.square, self.t = 0.0, 0.0, 0

    def __call__(self, vector, change):
        self.t += 1
        self.mean = self.first * self.mean - (1 - self.first) * change
        self.square = self.second * self.square + (1 - self.second) * change**2
        mean = self.mean / (1 - self.first**self.t)
        root = np.sqrt(self.square / (1 - self.second**self.t))
        return vector - self.rate * mean / (root + self.floor)


@pytest.mark.parametrize(
    ("optimizer", "server"),
    [
        (FEDAVGM, Momentum(1.0, 0.9)),
        (partial(torch.optim.SGD, lr=0.5, weight_decay=0.1), Momentum(0.5, 0.0, 0.1)),
        (FEDADAM, Adaptive(0.05, 0.9, 0.99, 1e-3)),
    ],
    ids=["fedavgm", "decay", "fedadam"],
)
def test_the_server_steps_as_in_a_loop(optimizer, server):
    model = fitted(server_optimizer=optimizer, local_steps=3, client_fraction=0.6)
    expected = looped(model, batches_of_rounds(N_ROUNDS, SEED, 3, 0.6), deepcopy(server))
    plain = fitted(local_steps=3, client_fraction=0.6).population_parameters_
    assert np.abs(expected - plain).max() > 1e-3
    np.testing.assert_allclose(model.population_parameters_, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("optimizer", [torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.NAdam])
def test_any_optimizer_steps_as_torch_does(optimizer):
    """With memory of other kinds, from one optimizer that lives through all rounds."""
    model = fitted(server_optimizer=partial(optimizer, lr=0.01), local_steps=2)
    values = torch.nn.Parameter(torch.from_numpy(model._engines.population.start()))
    steps = optimizer([values], lr=0.01)

    def server(vector, change):
        values.grad = torch.from_numpy(-change)
        steps.step()
        return values.detach().numpy().copy()

    expected = looped(model, batches_of_rounds(N_ROUNDS, SEED, 2), server)
    np.testing.assert_allclose(model.population_parameters_, expected, rtol=0, atol=1e-10)


HALVED = [cls for cls in FIELD if cls not in (AdaMixNetClassifier, PPSGDNetClassifier)]


@pytest.mark.parametrize("cls", [FedAvgClassifier, AdaPeDClassifier, *HALVED])
def test_half_a_step_in_every_method(cls):
    """One round: nets move half as far, and what is no parameter of a net moves as before."""
    step = partial(torch.optim.SGD, lr=0.5)
    plain, half = (fitted(cls, n_rounds=1, server_optimizer=each) for each in (None, step))
    first, other = plain._progress.state.server, half._progress.state.server
    name = "nets" if "nets" in first else "global"
    start = _start_of(plain)
    np.testing.assert_allclose(2 * (other[name] - start), first[name] - start, rtol=0, atol=1e-12)
    assert np.abs(first[name] - start).max() > 1e-6
    for rest in first.keys() - {"global", "nets"}:
        np.testing.assert_array_equal(first[rest], other[rest])


def _start_of(model):
    state = model._progress.state.server
    start = model._engines.population.start()
    if "nets" not in state:
        return start
    return start[len(state["nets"]) :].reshape(state["nets"].shape)


def test_running_statistics_are_averaged():
    plain, half = (
        fitted(net=recipe(Normed), n_rounds=1, server_optimizer=each)
        for each in (None, partial(torch.optim.SGD, lr=0.5))
    )
    n, start = plain._engines.population.n_trained, plain._engines.population.start()
    first, other = plain.population_parameters_, half.population_parameters_
    assert n < len(start)
    np.testing.assert_array_equal(first[n:], other[n:])
    np.testing.assert_allclose(2 * (other - start)[:n], (first - start)[:n], rtol=0, atol=1e-9)


def test_what_the_server_remembers_goes_on(tmp_path):
    """In warm starts and from checkpoints, as if nothing had come between."""
    X, y, groups = table()
    params = {"local_steps": 2, "server_optimizer": FEDADAM, "client_fraction": 0.7}
    whole = fitted(**params, warm_start=True)
    model = FedAvgClassifier(recipe(DoubleMLP), n_rounds=2, random_state=SEED, **params)
    model.set_params(warm_start=True).fit(X, y, groups=groups)
    same_bits(model.set_params(n_rounds=N_ROUNDS).fit(X, y, groups=groups), whole)

    stopped = clone(whole).set_params(checkpoint=tmp_path / "run", checkpoint_every=1)
    interrupt(stopped, (X, y, groups), 3)
    resumed = clone(whole).set_params(checkpoint=tmp_path / "run", checkpoint_every=1)
    same_bits(resumed.fit(X, y, groups=groups), whole)


def test_another_optimizer_starts_anew():
    X, y, groups = table()
    params = {"n_rounds": 2, "local_steps": 2, "random_state": SEED, "warm_start": True}
    found = {}
    for first in (None, FEDAVGM, partial(torch.optim.SGD, lr=1.0), FEDADAM):
        model = FedAvgClassifier(recipe(DoubleMLP), server_optimizer=first, **params)
        model.fit(X, y, groups=groups)
        memory = {key for key in model._progress.state.server if key != "global"}
        found[len(found)] = memory
        model.set_params(n_rounds=3, server_optimizer=None).fit(X, y, groups=groups)
        assert model._progress.state.server.keys() == {"global"}
    assert found[0] == found[2] == set()
    assert found[1] == {"optimizer.SGD.momentum_buffer"}
    assert found[3] == {f"optimizer.Adam.{name}" for name in ("step", "exp_avg", "exp_avg_sq")}


def test_a_server_step_is_the_same_for_any_number_of_workers():
    params = {"server_optimizer": FEDADAM, "n_rounds": 3, "client_fraction": 0.7}
    same_bits(fitted(**params), fitted(**params, n_jobs=2))


def test_noise_comes_before_the_server_step():
    """The step gets the noisy average, and the promise is that of the same noise without it."""
    plain, half = (
        fitted(n_rounds=1, server_optimizer=each, **NOISE)
        for each in (None, partial(torch.optim.SGD, lr=0.5))
    )
    start = plain._engines.population.start()
    first, other = (each.population_parameters_ - start for each in (plain, half))
    np.testing.assert_allclose(2 * other, first, rtol=0, atol=1e-12)
    assert half.privacy_.epsilon == plain.privacy_.epsilon


@pytest.mark.parametrize(
    ("optimizer", "match"),
    [
        (torch.optim.LBFGS, r"server_optimizer=LBFGS.*closure"),
        (partial(torch.optim.SGD, lr=0.1, maximize=True), r"server_optimizer=SGD.*maximize"),
        (partial(torch.optim.SGD, rate=0.1), r"server_optimizer=SGD.*rate"),
        (torch.optim.SparseAdam, r"server_optimizer=SparseAdam.*gradient"),
        (list, r"server_optimizer=list gives list, no optimizer"),
        ("adam", r"server_optimizer.*'adam'"),
    ],
)
def test_server_optimizers_that_are_refused(optimizer, match):
    refused(FedAvgClassifier(recipe(DoubleMLP), server_optimizer=optimizer), match)


@pytest.mark.parametrize("cls", [AdaMixNetClassifier, PPSGDNetClassifier])
def test_methods_whose_server_has_its_own_step(cls):
    refused(cls(recipe(DoubleMLP), server_optimizer=FEDADAM), rf"server_optimizer.*{cls.__name__}")


# Weights of clients -------------------------------------------------------------------------------


def clipped(message, bound):
    return message * min(1.0, bound / np.linalg.norm(message))


@pytest.mark.parametrize("params", [{"local_steps": 3}, {"local_epochs": 2}], ids=str)
def test_weights_are_numbers_of_rows(either_way, params):
    model = fitted(weighting="samples", client_fraction=0.6, **params)
    n_steps, n_passes = params.get("local_steps", 0), params.get("local_epochs", 0)
    rounds = list(batches_of_rounds(N_ROUNDS, SEED, n_steps, 0.6, n_passes=n_passes))
    expected = looped(model, rounds, sizes=SIZES)
    assert np.abs(expected - looped(model, rounds)).max() > 1e-3
    np.testing.assert_allclose(model.population_parameters_, expected, rtol=0, atol=1e-12)


def test_weights_come_before_the_clip():
    """So that a client moves the sum by the clip norm at most, however many rows it has."""
    bound = 0.25
    model = fitted(
        weighting="samples", n_rounds=1, local_steps=3, clip_norm=bound, client_fraction=0.6
    )
    (found,) = batches_of_rounds(1, SEED, 3, 0.6)
    start, sent = model._engines.population.start(), []
    for i, batches in found:
        change = looped(model, [[(i, batches)]]) - start
        sent.append(SIZES[i] / SIZES.mean() * change)
    norms = np.linalg.norm(sent, axis=1)
    assert norms.min() < bound < norms.max()
    total = sum(clipped(message, bound) for message in sent)
    # The divisor is the expected number of clients, whose mean weight is 1.
    expected = start + total / (0.6 * len(SIZES))
    np.testing.assert_allclose(model.population_parameters_, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sizes", [SIZES, np.array([1, 1, 1, 1, 1, 1, 3, 300])], ids=str)
def test_weights_leave_noise_and_promise_as_they_are(sizes):
    """The sensitivity is the clip norm for any weights, so the noise on the sum is the same."""
    X, y, groups = table(sizes=sizes)
    noise, promises = [], []
    for weighting in ("clients", "samples"):
        params = {"n_rounds": 1, "local_steps": 2, "random_state": SEED, "weighting": weighting}
        noisy, exact = (
            FedAvgClassifier(recipe(DoubleMLP), clip_norm=0.3, noise_multiplier=z, **params)
            for z in (2.0, 0.0)
        )
        first, other = (each.fit(X, y, groups=groups) for each in (noisy, exact))
        noise.append(first.population_parameters_ - other.population_parameters_)
        promises.append(first.privacy_)
    # Noise is rounded to a grid of a millionth of its standard deviation.
    np.testing.assert_allclose(*noise, rtol=0, atol=1e-5 * 2.0 * 0.3 / len(sizes))
    assert np.std(noise[0]) == pytest.approx(2.0 * 0.3 / len(sizes), rel=0.4)
    assert promises[0].epsilon == promises[1].epsilon
    assert promises[1].relation == "zero_out"
    assert any("numbers of rows" in each for each in promises[1].assumptions)


def test_one_client_moves_the_released_sum_by_the_clip_norm_at_most():
    """All rows of the largest client changed, under a clip without noise: twice the bound."""
    sizes, bound = np.array([2, 2, 2, 40]), 0.1
    X, y, groups = table(sizes=sizes)
    params = {"n_rounds": 1, "clip_norm": bound, "random_state": SEED, "weighting": "samples"}
    found = [
        FedAvgClassifier(recipe(DoubleMLP), **params).fit(rows, y, groups=groups)
        for rows in (X, np.where((groups == 3)[:, None], -5 * X, X))
    ]
    away = np.subtract(*(each.population_parameters_ for each in found)) * len(sizes)
    assert 0.5 * bound < np.linalg.norm(away) <= 2 * bound * (1 + 1e-9)


@pytest.mark.parametrize("clip_norm", [None, 10.0])
@pytest.mark.parametrize("cls", [FedEMClassifier, ScaffoldClassifier, AdaPeDClassifier])
def test_equal_sizes_make_equal_weights(cls, clip_norm):
    X, y, groups = table(sizes=np.full(6, 7))
    params = {"n_rounds": 3, "client_fraction": 0.7, "random_state": SEED, "clip_norm": clip_norm}
    equal, weighted = (
        cls(recipe(DoubleMLP), weighting=each, **params).fit(X, y, groups=groups)
        for each in ("clients", "samples")
    )
    first, other = (each._progress.state.server for each in (equal, weighted))
    for name in first:
        np.testing.assert_allclose(other[name], first[name], rtol=0, atol=1e-12)


def test_weighted_controls_of_scaffold():
    """c is the mean of the clients' controls, weighted by their rows."""
    model = fitted(ScaffoldClassifier, weighting="samples", client_fraction=0.7, local_steps=3)
    state = model._progress.state
    expected = SIZES @ state.clients["control"] / SIZES.sum()
    np.testing.assert_allclose(state.server["control"], expected, rtol=0, atol=1e-12)


def test_weighted_shares_of_fedem():
    """All clients take part, so that the population's shares are those of this round."""
    model = fitted(FedEMClassifier, weighting="samples", n_rounds=2)
    expected = SIZES @ model.responsibilities_ / SIZES.sum()
    np.testing.assert_allclose(model.population_parameters_[:2], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("cls", [FedAvgClassifier, DittoClassifier, *slow([FedEMClassifier])])
def test_weights_do_not_depend_on_workers_and_go_on(cls):
    X, y, groups = table()
    params = {"weighting": "samples", "client_fraction": 0.7, "local_steps": 2, "warm_start": True}
    whole = fitted(cls, **params)
    same_bits(whole, fitted(cls, **params, n_jobs=2))
    model = fitted(cls, **{**params, "n_rounds": 2})
    same_bits(model.set_params(n_rounds=N_ROUNDS).fit(X, y, groups=groups), whole)


def test_held_out_losses_have_the_weights_of_training(monkeypatch):
    """One row of 4 is held out, and 30 of 120: by rows the large client counts thirty times."""
    X, y, groups = table(sizes=np.array([4, 4, 120]))
    seen, mean_loss = [], _held_out.mean_loss

    def noted(engine, nets, rows, weights, *others):
        seen.append(weights / weights[0])
        return mean_loss(engine, nets, rows, weights, *others)

    monkeypatch.setattr(_held_out, "mean_loss", noted)
    params = {"n_rounds": None, "max_rounds": 1, "validation_fraction": 0.25}
    for weighting in ("clients", "samples"):
        model = FedAvgClassifier(recipe(DoubleMLP), weighting=weighting, **params)
        with pytest.warns(ConvergenceWarning):
            model.fit(X, y, groups=groups)
    np.testing.assert_allclose(seen[0], [1, 1, 1])
    np.testing.assert_allclose(seen[-1], [1, 1, 30])


@pytest.mark.parametrize(
    ("cls", "params", "match"),
    [
        (AdaMixNetClassifier, {}, r"weighting='samples'.*AdaMixNetClassifier"),
        (PPSGDNetClassifier, {}, r"weighting='samples'.*PPSGDNetClassifier"),
        (FedAvgClassifier, {"label_prior": "client"}, r"weighting='samples'.*label_prior"),
        (FedAvgClassifier, {"sampling": "fixed", **NOISE}, r"weighting='samples'.*'poisson'"),
        (AdaPeDClassifier, {"noise": "per_step", **NOISE}, r"weighting='samples'.*on sums"),
        (FedAvgClassifier, {"weighting": "rows"}, r"weighting.*'rows'"),
    ],
)
def test_weights_that_are_refused(cls, params, match):
    refused(cls(recipe(DoubleMLP), **{"weighting": "samples", **params}), match)


# Clients that fail --------------------------------------------------------------------------------


def test_dropped_clients_skip_the_round(either_way):
    model = fitted(drop_fraction=0.4, client_fraction=0.8, local_steps=3)
    rounds = list(batches_of_rounds(N_ROUNDS, SEED, 3, 0.8, dropped=0.4))
    assert model.history_["n_clients"].tolist() == [len(found) for found in rounds]
    expected = looped(model, rounds)
    others = looped(model, batches_of_rounds(N_ROUNDS, SEED, 3, 0.8))
    assert np.abs(expected - others).max() > 1e-3
    np.testing.assert_allclose(model.population_parameters_, expected, rtol=0, atol=1e-12)


def test_dropped_clients_keep_what_they_have():
    model = fitted(DittoClassifier, drop_fraction=0.4, n_rounds=1)
    ((*found,),) = batches_of_rounds(1, SEED, 10, dropped=0.4)
    took_part = np.isin(np.arange(len(SIZES)), [i for i, _ in found])
    assert 0 < took_part.sum() < len(SIZES)
    np.testing.assert_array_equal(model._progress.state.clients["started"], took_part)


def test_the_divisor_of_a_clipped_sum_counts_those_sampled():
    model = fitted(drop_fraction=0.4, n_rounds=1, local_steps=3, clip_norm=100.0)
    (found,) = batches_of_rounds(1, SEED, 3, dropped=0.4)
    start = model._engines.population.start()
    mean = looped(model, [found]) - start
    expected = start + mean * len(found) / len(SIZES)
    np.testing.assert_allclose(model.population_parameters_, expected, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_dropping_changes_neither_noise_nor_promise(sampling):
    params = {"client_fraction": 0.5, "sampling": sampling, **NOISE}
    all_answer, some_fail = (fitted(drop_fraction=share, **params) for share in (0.0, 0.5))
    assert some_fail.privacy_ == all_answer.privacy_
    assert some_fail.noise_multiplier_ == all_answer.noise_multiplier_
    # What is left of an epsilon at the smaller rate is less: the one that is stated is a bound.
    if sampling == "poisson":
        fewer = fitted(client_fraction=0.25, **NOISE).privacy_
        assert fewer.epsilon < some_fail.privacy_.epsilon


@pytest.mark.parametrize("cls", [FedAvgClassifier, LocalNetClassifier, *slow(FIELD)])
def test_dropping_does_not_depend_on_workers_and_goes_on(cls):
    X, y, groups = table()
    params = {"drop_fraction": 0.4, "local_steps": 2, "warm_start": True}
    whole = fitted(cls, **params)
    same_bits(whole, fitted(cls, **params, n_jobs=2))
    model = fitted(cls, **{**params, "n_rounds": 2})
    same_bits(model.set_params(n_rounds=N_ROUNDS).fit(X, y, groups=groups), whole)


def test_a_pass_takes_more_rounds_if_clients_fail():
    X, y, groups = table()
    found = [
        FedAvgClassifier(recipe(DoubleMLP), local_steps=1, drop_fraction=share, random_state=SEED)
        .partial_fit(X, y, groups=groups)
        .n_rounds_
        for share in (0.0, 0.5)
    ]
    assert found == [4, 8]  # of 14 rows in batches of 4


def test_missed_rounds_of_dropped_clients_are_made_up_for():
    """A client that fails trains on as one that was not sampled."""
    params = {"local_steps": 2, "n_rounds": 3, "train_unsampled": 3, "personal_start": "own"}
    model = fitted(AdaPeDClassifier, drop_fraction=0.5, **params)
    expected = np.zeros(len(SIZES))
    for t, found in enumerate(batches_of_rounds(3, SEED, 2, dropped=0.5)):
        expected[[i for i, _ in found]] = t + 1
    assert 0 < (expected < 3).sum() < len(SIZES)
    np.testing.assert_array_equal(model._progress.state.schedule["following"], expected)
    # Those that failed have other nets than after their last round, without any answer since.
    without = fitted(AdaPeDClassifier, drop_fraction=0.5, **{**params, "train_unsampled": False})
    differ = (model.parameters_ != without.parameters_).any(axis=1)
    assert differ[expected < 3].all()


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_shares_that_are_refused(share):
    refused(FedAvgClassifier(recipe(DoubleMLP), drop_fraction=share), rf"drop_fraction.*{share}")


# Clipped gradients --------------------------------------------------------------------------------


def clipped_recipe(*bounds, order=2, **params):
    callbacks = [GradientNormClipping(bound, gradient_clip_norm_type=order) for bound in bounds]
    return recipe(DoubleMLP, callbacks=callbacks, **params)


def trained_within(module, batches, X, y, bound, order, kind=torch.optim.SGD, **options):
    """Copy of a module after steps along gradients that torch clips."""
    module = deepcopy(module)
    optimizer = kind(module.parameters(), lr=0.1, **options)
    for batch in batches:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(X[batch]), y[batch]).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), bound, norm_type=order)
        optimizer.step()
    return module


@pytest.mark.parametrize(
    ("order", "options"),
    [
        (2, {}),
        (2, {"momentum": 0.5, "weight_decay": 0.1}),
        (1, {}),
        (np.inf, {"weight_decay": 0.1}),
        (2, {"kind": torch.optim.Adam}),
    ],
    ids=str,
)
def test_gradients_are_clipped_in_every_step(either_way, order, options):
    given = {f"optimizer__{name}": value for name, value in options.items() if name != "kind"}
    given |= {"optimizer": options["kind"]} if "kind" in options else {}
    bound = {1: 2.0, 2: 0.4, np.inf: 0.15}[order]  # below some of the norms, above others
    model = fitted(net=clipped_recipe(bound, order=order, **given), local_steps=3)
    X, y, _ = table()
    X, y, vector = torch.from_numpy(X), torch.from_numpy(y), model._engines.population.start()
    for found in batches_of_rounds(N_ROUNDS, SEED, 3):
        nets = [
            weights(trained_within(moved(DoubleMLP(), vector), own, X, y, bound, order, **options))
            for _, own in found
        ]
        vector = np.mean(nets, axis=0)
    np.testing.assert_allclose(model.population_parameters_, vector, rtol=0, atol=1e-12)
    for other in (1e-3, 1e3):
        far = fitted(net=clipped_recipe(other, order=order, **given), local_steps=3)
        assert np.abs(far.population_parameters_ - vector).max() > 1e-6


def test_several_bounds_and_none():
    same_bits(fitted(net=clipped_recipe(0.3, None, 1e9)), fitted(net=clipped_recipe(0.3)))
    same_bits(fitted(net=clipped_recipe(None)), fitted())


@pytest.mark.parametrize("cls", [FedAvgClassifier, FedRepClassifier, *slow(FIELD)])
def test_stacked_nets_are_clipped_as_others_are(cls, monkeypatch):
    """Also where some layers stand still, which have no part in the norm."""
    params = {"n_rounds": 2, "net": clipped_recipe(0.2)}
    stacked, several = fitted(cls, **params), fitted(cls, **params, n_jobs=2)
    same_bits(stacked, several)
    assert stacked._engines.trained[0].stacked
    monkeypatch.setattr(_engine, "chain_of", lambda *given: None)
    alone = fitted(cls, **params)
    assert not alone._engines.trained[0].stacked
    np.testing.assert_allclose(alone.parameters_, stacked.parameters_, rtol=0, atol=1e-11)


def test_clipped_gradients_leave_noise_as_it_is():
    plain, clipping = (
        fitted(net=net, n_rounds=1, **NOISE).privacy_ for net in (recipe(), clipped_recipe(0.2))
    )
    assert clipping.epsilon == plain.epsilon
    assert clipping.noise_std == plain.noise_std


class Loud(GradientNormClipping):
    """A subclass, which may clip otherwise."""


@pytest.mark.parametrize(
    ("callback", "params", "match"),
    [
        (Loud(0.1), {}, r"callbacks=.*GradientNormClipping alone"),
        (GradientNormClipping(-1.0), {}, r"gradient_clip_value=-1.0.*above 0"),
        (
            GradientNormClipping(1.0, gradient_clip_norm_type="max"),
            {},
            r"gradient_clip_norm_type='?max.*above 0",
        ),
        (GradientNormClipping(1.0), {"noise": "per_step", **NOISE}, r"callbacks=.*'per_step'"),
    ],
)
def test_clips_that_are_refused(callback, params, match):
    cls = AdaPeDClassifier if params else FedAvgClassifier
    refused(cls(recipe(DoubleMLP, callbacks=[callback]), **params), match)


@pytest.mark.parametrize(
    ("cls", "n_nets"),
    [(FedAvgClassifier, 1), (ScaffoldClassifier, 2), (FedEMClassifier, 1), (LocalNetClassifier, 0)],
)
def test_bytes_are_those_of_the_nets_that_clients_send(cls, n_nets):
    model = fitted(cls, client_fraction=0.7)
    # In double precision; all nets of a mixture are one.
    size = 8 * n_nets * len(model.population_parameters_)
    per_client = model.history_["bytes_sent"] / np.maximum(model.history_["n_clients"], 1)
    counts = 0 if n_nets == 0 else 64  # who took part, and sums of mixing weights
    assert (size <= per_client).all()
    assert (per_client <= size + counts).all()


def test_weights_are_assumed_public_by_later_rounds_too():
    X, y, groups = table()
    model = FedAvgClassifier(recipe(DoubleMLP), weighting="samples", n_rounds=1, **NOISE)
    model.fit(X, y, groups=groups)
    assert any("numbers of rows, over a mean" in each for each in model.privacy_.assumptions)
    model.set_params(weighting="clients", warm_start=True, n_rounds=2).fit(X, y, groups=groups)
    assert any("numbers of rows, over a mean" in each for each in model.privacy_.assumptions)


@pytest.mark.parametrize("cls", [ScaffoldClassifier, FedEMClassifier])
def test_clients_without_rows_keep_their_weight(cls):
    X, y, groups = table(sizes=np.full(8, 6))
    few, found = groups < 4, []
    for weighting in ("clients", "samples"):
        model = cls(recipe(DoubleMLP), weighting=weighting, n_rounds=3, random_state=SEED)
        model.fit(X, y, groups=groups)
        found.append(model.partial_fit(X[few], y[few], groups=groups[few])._server)
    for name in found[0]:
        np.testing.assert_allclose(found[1][name], found[0][name], rtol=0, atol=1e-12)


def test_an_optimizer_that_tells_vectors_from_matrices_steps_on_one_vector():
    model = fitted(
        FedEMClassifier, server_optimizer=partial(torch.optim.Adafactor, lr=0.01), n_components=2
    )
    assert np.isfinite(model.population_parameters_).all()
