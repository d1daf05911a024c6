"""How much clients train and how the server moves, against a plain loop over clients in torch."""

from functools import partial

import numpy as np
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning
from skorch.callbacks import GradientNormClipping

from pfl_sklearn.neural_network import (
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
from pfl_sklearn.neural_network._engine import _engine, _held_out
from tests.helpers.fitted_rounds import assert_same_bits, initial_net, is_stacked, state_of
from tests.helpers.net_fits import fit
from tests.helpers.nets import (
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
from tests.helpers.slow import slow

pytestmark = pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")
SEED, N_ROUNDS = 3, 3
ONCE = {"n_rounds": 1, "local_steps": 2}
NOISE = {"noise_multiplier": 1.0, "clip_norm": 0.3, "delta": 1e-3}


def fitted(cls=FedAvgClassifier, net=None, **params):
    steps = {} if "local_epochs" in params else {"local_steps": 2}
    given = {"n_rounds": N_ROUNDS, "random_state": SEED, **steps, **params}
    return fit(cls(recipe(DoubleMLP) if net is None else net, **given))


def looped(model, rounds, server=None, sizes=None, **options):
    """Parameters of the global net after rounds of a loop in torch.

    `rounds` are the clients of each round with the numbers of their rows. The server averages, or
    ``server(vector, change)`` gives the new vector. Clients count equally, or by their `sizes`.
    """
    X, y, _ = table()
    X, y, net = torch.from_numpy(X), torch.from_numpy(y), DoubleMLP()
    vector = initial_net(model)
    for found in rounds:
        total, count = np.zeros_like(vector), 0.0
        for i, batches in found:
            weight = 1.0 if sizes is None else sizes[i]
            own = trained(moved(net, vector), batches, X, y, **{"lr": 0.1, **options})
            total, count = total + weight * (weights(own) - vector), count + weight
        change = total / max(count, 1.0)
        vector = vector + change if server is None else server(vector, change)
    return vector


# Passes over a client's rows ----------------------------------------------------------------------
@pytest.mark.parametrize(("batch_size", "momentum"), [(4, 0.5), (-1, 0.0)])
def test_passes_are_those_of_a_loop(batch_size, momentum):
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
    assert np.abs(expected - initial_net(model)).max() > 1e-3
    np.testing.assert_allclose(model.population_parameters_, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("cls", [FedRepClassifier, PerFedAvgClassifier, PFedMeClassifier])
def test_one_batch_a_client_makes_passes_steps(cls):
    """Also of the steps before and after the shared ones, and of the last phase."""
    given = {"net": recipe(DoubleMLP, batch_size=-1), "n_rounds": 1}
    assert_same_bits(fitted(cls, **given, local_epochs=2), fitted(cls, **given, local_steps=2))


def test_scaffold_with_passes_is_its_loop():
    model = fitted(ScaffoldClassifier, local_epochs=1, client_fraction=0.7)
    X, y, _ = table()
    X, y, net = torch.from_numpy(X), torch.from_numpy(y), DoubleMLP()
    vector = initial_net(model)
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
    found = state_of(model).server["control"]
    np.testing.assert_allclose(found, common, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("cls", "n_rounds"), [(FedAvgClassifier, 4), (PerFedAvgClassifier, 3), (FedRepClassifier, 2)]
)
def test_rounds_of_partial_fit_pass_over_all_rows(cls, n_rounds):
    """The largest client's 14 rows are four batches; a round has 4, 7 or 10 + 4 of them."""
    X, y, groups = table()
    for share, expected in ((1.0, 1), (0.25, n_rounds)):
        model = cls(recipe(DoubleMLP), local_epochs=1, client_fraction=share, random_state=SEED)
        assert model.partial_fit(X, y, groups=groups).n_rounds_ == expected


def test_a_clipped_message_does_not_grow_with_passes():
    """Noise on sums needs no number of steps: the clip bounds what a client sends."""
    given = {"n_rounds": 2, **NOISE}
    few, many = (fitted(local_epochs=n, **given).privacy_ for n in (1, 3))
    assert few.epsilon == many.epsilon == fitted(**given).privacy_.epsilon


# The server's step --------------------------------------------------------------------------------

FEDADAM = partial(torch.optim.Adam, lr=0.05, betas=(0.9, 0.99), eps=1e-3)


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(torch.optim.SGD, lr=1.0, momentum=0.9, weight_decay=0.1),
        FEDADAM,
        *slow([partial(torch.optim.RMSprop, lr=0.01), partial(torch.optim.NAdam, lr=0.01)]),
    ],
    ids=["momentum", "adam", "rmsprop", "nadam"],
)
def test_the_server_steps_as_torch_does(optimizer):
    """With one optimizer that lives through all rounds."""
    params = {"local_steps": 2, "client_fraction": 0.6}
    model = fitted(server_optimizer=optimizer, **params)
    values = torch.nn.Parameter(torch.from_numpy(initial_net(model)))
    steps = optimizer([values])

    def server(vector, change):
        values.grad = torch.from_numpy(-change)
        steps.step()
        return values.detach().numpy().copy()

    expected = looped(model, batches_of_rounds(N_ROUNDS, SEED, 2, 0.6), server)
    assert np.abs(expected - fitted(**params).population_parameters_).max() > 1e-3
    np.testing.assert_allclose(model.population_parameters_, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("cls", "noise"),
    [
        (FedAvgClassifier, NOISE),
        *((cls, {}) for cls in (AdaPeDClassifier, FedEMClassifier, ScaffoldClassifier)),
    ],
)
def test_half_a_step_in_every_method(cls, noise):
    """One round: nets move half as far, and what is no parameter of a net moves as before.

    The step gets the noisy average, and the promise is that of the same noise without it.
    """
    optimizers = (None, partial(torch.optim.SGD, lr=0.5))
    plain, half = (fitted(cls, n_rounds=1, server_optimizer=each, **noise) for each in optimizers)
    assert half.privacy_.epsilon == plain.privacy_.epsilon
    first, other = state_of(plain).server, state_of(half).server
    name = "nets" if "nets" in first else "global"
    start = _start_of(plain)
    np.testing.assert_allclose(2 * (other[name] - start), first[name] - start, rtol=0, atol=1e-12)
    assert np.abs(first[name] - start).max() > 1e-6
    for rest in first.keys() - {"global", "nets"}:
        np.testing.assert_array_equal(first[rest], other[rest])


def _start_of(model):
    state = state_of(model).server
    start = initial_net(model)
    if "nets" not in state:
        return start
    return start[len(state["nets"]) :].reshape(state["nets"].shape)


def test_running_statistics_are_averaged():
    plain, half = (
        fitted(net=recipe(Normed), n_rounds=1, server_optimizer=each)
        for each in (None, partial(torch.optim.SGD, lr=0.5))
    )
    n, start = plain._engines.population.n_trained, initial_net(plain)
    first, other = plain.population_parameters_, half.population_parameters_
    assert n < len(start)
    np.testing.assert_array_equal(first[n:], other[n:])
    np.testing.assert_allclose(2 * (other - start)[:n], (first - start)[:n], rtol=0, atol=1e-9)


def test_another_optimizer_starts_anew():
    found = []
    momentum = partial(torch.optim.SGD, lr=1.0, momentum=0.9)
    for first in (None, momentum, partial(torch.optim.SGD, lr=1.0), FEDADAM):
        model = fitted(server_optimizer=first, warm_start=True, **ONCE)
        found.append(state_of(model).server.keys() - {"global"})
        fit(model.set_params(n_rounds=2, server_optimizer=None))
        assert state_of(model).server.keys() == {"global"}
    assert found[0] == found[2] == set()
    assert found[1] == {"optimizer.SGD.momentum_buffer"}
    assert found[3] == {f"optimizer.Adam.{name}" for name in ("step", "exp_avg", "exp_avg_sq")}


# Weights of clients -------------------------------------------------------------------------------
def clipped(message, bound):
    return message * min(1.0, bound / np.linalg.norm(message))


@pytest.mark.parametrize("params", [{"local_steps": 3}, {"local_epochs": 2}], ids=str)
def test_weights_are_numbers_of_rows(params):
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
    start, sent = initial_net(model), []
    for i, batches in found:
        change = looped(model, [[(i, batches)]]) - start
        sent.append(SIZES[i] / SIZES.mean() * change)
    norms = np.linalg.norm(sent, axis=1)
    assert norms.min() < bound < norms.max()
    total = sum(clipped(message, bound) for message in sent)
    # The divisor is the expected number of clients, whose mean weight is 1.
    expected = start + total / (0.6 * len(SIZES))
    np.testing.assert_allclose(model.population_parameters_, expected, rtol=0, atol=1e-12)


def test_weights_leave_noise_and_promise_as_they_are():
    """The sensitivity is the clip norm for any weights, so the noise on the sum is the same."""
    sizes = np.array([1, 1, 1, 1, 1, 1, 3, 300])
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


def test_weighted_controls_of_scaffold():
    """c is the mean of the clients' controls, weighted by their rows."""
    model = fitted(ScaffoldClassifier, weighting="samples", client_fraction=0.7, local_steps=3)
    state = state_of(model)
    expected = SIZES @ state.clients["control"] / SIZES.sum()
    np.testing.assert_allclose(state.server["control"], expected, rtol=0, atol=1e-12)


def test_weighted_shares_of_fedem():
    """All clients take part, so that the population's shares are those of this round."""
    model = fitted(FedEMClassifier, weighting="samples", n_rounds=2)
    expected = SIZES @ model.responsibilities_ / SIZES.sum()
    np.testing.assert_allclose(model.population_parameters_[:2], expected, rtol=0, atol=1e-12)


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


# Clients that fail --------------------------------------------------------------------------------
def test_dropped_clients_skip_the_round():
    model = fitted(drop_fraction=0.4, client_fraction=0.8, local_steps=3)
    rounds = list(batches_of_rounds(N_ROUNDS, SEED, 3, 0.8, dropped=0.4))
    assert model.history_["n_clients"].tolist() == [len(found) for found in rounds]
    expected = looped(model, rounds)
    others = looped(model, batches_of_rounds(N_ROUNDS, SEED, 3, 0.8))
    assert np.abs(expected - others).max() > 1e-3
    np.testing.assert_allclose(model.population_parameters_, expected, rtol=0, atol=1e-12)


def test_dropped_clients_keep_what_they_have():
    model = fitted(DittoClassifier, drop_fraction=0.4, n_rounds=1)
    ((*found,),) = batches_of_rounds(1, SEED, 2, dropped=0.4)
    took_part = np.isin(np.arange(len(SIZES)), [i for i, _ in found])
    assert 0 < took_part.sum() < len(SIZES)
    np.testing.assert_array_equal(state_of(model).clients["started"], took_part)


def test_the_divisor_of_a_clipped_sum_counts_those_sampled():
    model = fitted(drop_fraction=0.4, n_rounds=1, local_steps=3, clip_norm=100.0)
    (found,) = batches_of_rounds(1, SEED, 3, dropped=0.4)
    start = initial_net(model)
    mean = looped(model, [found]) - start
    expected = start + mean * len(found) / len(SIZES)
    np.testing.assert_allclose(model.population_parameters_, expected, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_dropping_changes_neither_noise_nor_promise():
    params = {"client_fraction": 0.5, "n_rounds": 1, **NOISE, "noise_multiplier": 10.0}
    all_answer, some_fail = (fitted(drop_fraction=share, **params) for share in (0.0, 0.5))
    assert some_fail.privacy_ == all_answer.privacy_
    assert some_fail.noise_multiplier_ == all_answer.noise_multiplier_
    # What is left of an epsilon at the smaller rate is less: the one that is stated is a bound.
    fewer = fitted(**{**params, "client_fraction": 0.25}).privacy_
    assert fewer.epsilon < some_fail.privacy_.epsilon


def test_missed_rounds_of_dropped_clients_are_made_up_for():
    """A client that fails trains on as one that was not sampled."""
    params = {"local_steps": 2, "n_rounds": 3, "train_unsampled": 3, "personal_start": "own"}
    model = fitted(AdaPeDClassifier, drop_fraction=0.5, **params)
    expected = np.zeros(len(SIZES))
    for t, found in enumerate(batches_of_rounds(3, SEED, 2, dropped=0.5)):
        expected[[i for i, _ in found]] = t + 1
    assert 0 < (expected < 3).sum() < len(SIZES)
    np.testing.assert_array_equal(state_of(model).schedule["following"], expected)
    # Those that failed have other nets than after their last round, without any answer since.
    without = fitted(AdaPeDClassifier, drop_fraction=0.5, **{**params, "train_unsampled": False})
    differ = (model.parameters_ != without.parameters_).any(axis=1)
    assert differ[expected < 3].all()


# Clipped gradients --------------------------------------------------------------------------------
def clipped_recipe(*bounds, order=2, **params):
    callbacks = [GradientNormClipping(bound, gradient_clip_norm_type=order) for bound in bounds]
    return recipe(DoubleMLP, callbacks=callbacks, **params)


@pytest.mark.parametrize(
    ("order", "options", "stacked"),
    [
        (2, {"momentum": 0.5, "weight_decay": 0.1}, True),
        (np.inf, {"weight_decay": 0.1}, True),
        (2, {"kind": torch.optim.Adam}, False),
        *slow([(1, {}, True), (2, {"momentum": 0.5, "weight_decay": 0.1}, False)]),
    ],
    ids=str,
)
def test_gradients_are_clipped_in_every_step(order, options, stacked, monkeypatch):
    if not stacked:
        monkeypatch.setattr(_engine, "chain_of", lambda *given: None)
    given = {f"optimizer__{name}": value for name, value in options.items() if name != "kind"}
    given |= {"optimizer": options["kind"]} if "kind" in options else {}
    bound = {1: 2.0, 2: 0.4, np.inf: 0.15}[order]
    net = clipped_recipe(bound, order=order, **given)
    model = fitted(net=net, n_rounds=2, client_fraction=0.6)
    rounds, net = list(batches_of_rounds(2, SEED, 2, 0.6)), model.population_parameters_
    expected = looped(model, rounds, clip=(bound, order), **options)
    np.testing.assert_allclose(net, expected, rtol=0, atol=1e-12)
    for other in (1e-3, 1e3):  # the bound is below some of the norms, and above others
        assert np.abs(looped(model, rounds, clip=(other, order), **options) - net).max() > 1e-6


def test_several_bounds_and_none():
    def fit_of(net):
        return fitted(net=net, **ONCE)

    assert_same_bits(fit_of(clipped_recipe(0.3, None, 1e9)), fit_of(clipped_recipe(0.3)))
    assert_same_bits(fit_of(clipped_recipe(None)), fit_of(recipe(DoubleMLP)))


@pytest.mark.parametrize("cls", [FedRepClassifier, *slow([ScaffoldClassifier, FedEMClassifier])])
@pytest.mark.slow
def test_stacked_nets_are_clipped_as_others_are(cls, monkeypatch):
    """Also where some layers stand still, which have no part in the norm."""
    params = {"n_rounds": 2, "net": clipped_recipe(0.2)}
    stacked = fitted(cls, **params)
    assert is_stacked(stacked)
    monkeypatch.setattr(_engine, "chain_of", lambda *given: None)
    alone = fitted(cls, **params)
    assert not is_stacked(alone)
    np.testing.assert_allclose(alone.parameters_, stacked.parameters_, rtol=0, atol=1e-11)


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
    model = fitted(weighting="samples", **ONCE, **NOISE)
    assert any("numbers of rows, over a mean" in each for each in model.privacy_.assumptions)
    fit(model.set_params(weighting="clients", warm_start=True, n_rounds=2))
    assert any("numbers of rows, over a mean" in each for each in model.privacy_.assumptions)


@pytest.mark.parametrize("cls", [ScaffoldClassifier, FedEMClassifier])
def test_clients_without_rows_keep_their_weight(cls):
    X, y, groups = table(sizes=np.full(8, 6))
    few, found = groups < 4, []
    for weighting in ("clients", "samples"):
        model = cls(recipe(DoubleMLP), weighting=weighting, random_state=SEED, **ONCE)
        model.fit(X, y, groups=groups)
        found.append(model.partial_fit(X[few], y[few], groups=groups[few])._server)
    for name in found[0]:
        np.testing.assert_allclose(found[1][name], found[0][name], rtol=0, atol=1e-12)


def test_an_optimizer_that_tells_vectors_from_matrices_steps_on_one_vector():
    adafactor = partial(torch.optim.Adafactor, lr=0.01)
    model = fitted(FedEMClassifier, server_optimizer=adafactor, n_components=2, **ONCE)
    assert np.isfinite(model.population_parameters_).all()


# What is refused ----------------------------------------------------------------------------------
class Loud(GradientNormClipping):
    """A subclass, which may clip otherwise."""


SGD, SAMPLES = torch.optim.SGD, {"weighting": "samples"}
PER_STEP = {"noise": "per_step", **NOISE}
UNFIT = [
    (
        FedAvgClassifier,
        {"local_epochs": 2, "local_steps": 5},
        r"local_epochs=2 and .*_steps=5.*=10",
    ),
    (AdaPeDClassifier, {"local_epochs": 2, "train_unsampled": True}, "local_epochs=2.*unsampled"),
    (
        AdaPeDClassifier,
        {"local_epochs": 2, "sampling": "fixed", **PER_STEP},
        "local_epochs=2.*noise='per_step'",
    ),
    (FedAvgClassifier, {"server_optimizer": torch.optim.LBFGS}, r"server_optimizer=LBFGS.*closure"),
    (
        FedAvgClassifier,
        {"server_optimizer": partial(SGD, lr=0.1, maximize=True)},
        "server_optimizer=SGD.*maximize",
    ),
    (FedAvgClassifier, {"server_optimizer": partial(SGD, rate=0.1)}, "server_optimizer=SGD.*rate"),
    (
        FedAvgClassifier,
        {"server_optimizer": torch.optim.SparseAdam},
        "server_optimizer=SparseAdam.*gradient",
    ),
    (
        FedAvgClassifier,
        {"server_optimizer": list},
        "server_optimizer=list gives list, no optimizer",
    ),
    (FedAvgClassifier, {"server_optimizer": "adam"}, "server_optimizer.*'adam'"),
    (AdaMixNetClassifier, {"server_optimizer": FEDADAM}, "server_optimizer.*AdaMixNetClassifier"),
    (PPSGDNetClassifier, {"server_optimizer": FEDADAM}, "server_optimizer.*PPSGDNetClassifier"),
    (AdaMixNetClassifier, SAMPLES, "weighting='samples'.*AdaMixNetClassifier"),
    (PPSGDNetClassifier, SAMPLES, "weighting='samples'.*PPSGDNetClassifier"),
    (FedAvgClassifier, {**SAMPLES, "label_prior": "client"}, "weighting='samples'.*label_prior"),
    (FedAvgClassifier, {**SAMPLES, "sampling": "fixed", **NOISE}, "weighting='samples'.*'poisson'"),
    (AdaPeDClassifier, {**SAMPLES, **PER_STEP}, "weighting='samples'.*on sums"),
    (FedAvgClassifier, {"weighting": "rows"}, "weighting.*'rows'"),
    (FedAvgClassifier, {"drop_fraction": -0.1}, "drop_fraction.*-0.1"),
    (FedAvgClassifier, {"drop_fraction": 1.0}, "drop_fraction.*1.0"),
]
UNFIT_CLIPS = [
    (Loud(0.1), {}, "callbacks=.*GradientNormClipping alone"),
    (GradientNormClipping(-1.0), {}, "gradient_clip_value=-1.0.*above 0"),
    (
        GradientNormClipping(1.0, gradient_clip_norm_type="max"),
        {},
        "gradient_clip_norm_type='?max.*above 0",
    ),
    (GradientNormClipping(1.0), PER_STEP, "callbacks=.*'per_step'"),
]


@pytest.mark.parametrize(("cls", "params", "match"), UNFIT, ids=range(len(UNFIT)))
def test_options_that_are_refused(cls, params, match):
    refused(cls(recipe(DoubleMLP), **params), match)


@pytest.mark.parametrize(("callback", "params", "match"), UNFIT_CLIPS, ids=range(4))
def test_clips_that_are_refused(callback, params, match):
    cls = AdaPeDClassifier if params else FedAvgClassifier
    refused(cls(recipe(DoubleMLP, callbacks=[callback]), **params), match)
