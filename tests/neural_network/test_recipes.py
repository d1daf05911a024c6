"""Settings of a skorch net, and those that are refused by name rather than ignored."""

import math
import pickle

import numpy as np
import pytest
import torch
from scipy.special import softmax
from skorch import NeuralNetBinaryClassifier, NeuralNetClassifier, NeuralNetRegressor
from skorch.callbacks import LRScheduler
from torch import nn

from pfl_sklearn.neural_network import (
    MLP,
    AdaPeDClassifier,
    FedAvgClassifier,
    FedAvgRegressor,
    LocalNetClassifier,
    LocalNetRegressor,
)
from pfl_sklearn.neural_network._engine._recipe import learning_rates
from pfl_sklearn.privacy import PrivacyLedger
from tests.helpers.interruption import interrupt
from tests.helpers.net_fits import fit
from tests.helpers.nets import (
    N_CLASSES,
    N_INPUTS,
    Dropped,
    Logit,
    Normed,
    net_of,
    recipe,
    refused,
    table,
)
from tests.helpers.neural_methods import BASIC

pytestmark = pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")

NOISE = {"noise_multiplier": 1.0, "clip_norm": 0.3}
SHORT = {"n_rounds": 2, "local_steps": 2, "random_state": 0}


# Parameters ---------------------------------------------------------------------------------------

WRONG_VALUES = {
    "lr": ["auto", -0.1, math.nan, math.inf, None, [0.1], True],
    "optimizer__lr": ["auto", -0.1, math.nan],
    "batch_size": [0, -2, 2.5, 8.0, "all", None, True],
    "device": [None, 0, "gpu"],
    "optimizer": ["sgd", None, torch.optim.LBFGS, torch.optim.SparseAdam],
    "criterion__weight": [[1.0, 2.0, 1.0], np.ones(3)],
}


@pytest.mark.parametrize("name", WRONG_VALUES)
def test_values_that_torch_would_refuse_in_other_words(tmp_path, name):
    """Before anything is charged."""
    ledger = PrivacyLedger(tmp_path / "ledger.jsonl")
    for value in WRONG_VALUES[name]:
        net = net_of(**{name: value})
        refused(FedAvgClassifier(net, ledger=ledger, **NOISE), rf"\b{name}\b.* of the net")
    assert ledger.entries == []


ONE_CYCLE = {"max_lr": 0.2, "total_steps": 3}


@pytest.mark.parametrize(
    ("net", "match", "binary"),
    [
        *(
            (net_of(criterion__weight=weight), "criterion=CrossEntropyLoss", False)
            for weight in (torch.ones(4), torch.ones(3, dtype=torch.float64))
        ),
        (net_of(criterion=nn.MSELoss), "criterion=MSELoss", True),  # shapes could be broadcast
        (NeuralNetBinaryClassifier(Logit, threshold=0.7), "threshold=0.7.*no effect", True),
        (
            net_of(callbacks=[LRScheduler("StepLR", step_size=1, step_every="batch")]),
            "step_every='batch'.*once a round",
            False,
        ),
        (
            net_of(callbacks=[LRScheduler("OneCycleLR", **ONE_CYCLE)]),
            "policy='OneCycleLR' of the net .*its class",
            False,
        ),
    ],
    ids=range(6),
)
def test_recipes_that_are_refused(net, match, binary):
    refused(FedAvgClassifier(net), match, y=table()[1] > 0 if binary else None)


def test_schedulers_that_say_rates_start_from_the_nets_own():
    one_cycle = {"policy": torch.optim.lr_scheduler.OneCycleLR, "max_lr": 0.2}
    rates = [
        learning_rates(net_of(lr=lr, callbacks=[LRScheduler(**one_cycle, total_steps=n)]), 5)
        for lr, n in [(0.1, 6), (1.0, 6), (0.0, 6), (0.1, 5)]
    ]
    np.testing.assert_allclose(rates[1:3], [rates[0]] * 2, rtol=1e-12)
    # After as many steps as it has there is none, and what follows the rounds has the last rate.
    np.testing.assert_allclose(rates[3][[0, 4, 5]], [0.008, 8e-7, 8e-7], rtol=1e-12)
    several = [
        LRScheduler("StepLR", step_size=1, gamma=0.5),
        LRScheduler(**one_cycle, total_steps=6),
    ]
    halved = learning_rates(net_of(lr=0.1, callbacks=several), 5)
    np.testing.assert_allclose(halved, rates[0] * 0.5 ** np.arange(6), rtol=1e-12)


def test_a_scheduler_of_fewer_steps_than_rounds(tmp_path):
    """Before anything is charged."""
    ledger = PrivacyLedger(tmp_path / "ledger.jsonl")
    policy = torch.optim.lr_scheduler.OneCycleLR
    net = net_of(callbacks=[LRScheduler(policy, max_lr=0.2, total_steps=3)])
    for params in ({}, {**NOISE, "ledger": ledger}):
        refused(FedAvgClassifier(net, n_rounds=5, **params), "OneCycleLR .* 5 rounds")
    assert ledger.entries == []
    model = FedAvgClassifier(net, n_rounds=3, random_state=0, **NOISE, ledger=ledger)
    data = np.zeros((8, 2), dtype=np.float32), np.arange(8) % 2
    model.partial_fit(*data, groups=np.arange(8), classes=[0, 1])
    with pytest.raises(ValueError, match=r"OneCycleLR .* 6 rounds"):
        model.partial_fit(*data, groups=np.arange(8))
    assert len(ledger.entries) == 1


@pytest.mark.parametrize("name", ["train_step_single", "train_step", "predict_proba"])
def test_methods_that_rounds_do_not_call(name):
    kind = type("Own", (NeuralNetClassifier,), {name: lambda self, *given: None})
    for net in (kind, type("Nested", (kind,), {})):
        match = rf"{net.__name__} has a {name} of its own"
        refused(FedAvgClassifier(net(MLP, criterion=nn.CrossEntropyLoss)), match)


# Criteria -----------------------------------------------------------------------------------------
class Shaped(nn.CrossEntropyLoss):
    """A loss with an axis."""

    def forward(self, outputs, y):
        return super().forward(outputs, y)[None]


@pytest.mark.parametrize(
    ("criterion", "match"),
    [
        (nn.CrossEntropyLoss(reduction="none"), r"loss of shape \(2,\)"),
        (Shaped, r"loss of shape \(1,\)"),
        (nn.MSELoss, r"MSELoss .*outputs of shape \(2, 3\).* targets of shape \(2,\)"),
        (nn.L1Loss, "L1Loss"),
        (nn.BCELoss, "BCELoss"),
        (nn.BCEWithLogitsLoss, "BCEWithLogitsLoss"),
    ],
)
def test_criteria_that_do_not_go_with_classes(criterion, match):
    for module in (MLP, Dropped):
        net = recipe(module, criterion=criterion)
        refused(FedAvgClassifier(net), f"criterion=.*{match}")


def test_a_sum_is_a_loss():
    """With steps of 1/4, four rows summed move the net as their mean does."""
    X, y, groups = table(sizes=[4, 8, 12])
    found = [
        FedAvgClassifier(
            recipe(MLP, criterion__reduction=kind, lr=lr), n_rounds=3, random_state=0
        ).fit(X, y, groups=groups)
        for kind, lr in (("mean", 0.1), ("sum", 0.025))
    ]
    np.testing.assert_allclose(*(each.population_parameters_ for each in found), atol=1e-6)


def test_a_criterion_of_one_row():
    """A table of a single row is enough to see whether the criterion takes it."""
    X, y, groups = np.ones((1, 7)), np.zeros(1, dtype=int), np.array(["alone"])
    model = FedAvgClassifier(recipe(nn.Linear(7, 2)), **SHORT)
    model.partial_fit(X, y, classes=[0, 1], groups=groups)
    assert model.predict_proba(X, groups=groups).shape == (1, 2)


def margins(model):
    """Outputs of a linear net for our table, as `model` has them, and those of numpy."""
    X, y, groups = table()
    model = model.fit(X, y, groups=groups)
    layer = model.net_.module_
    weight, bias = (values.detach().numpy() for values in (layer.weight, layer.bias))
    return model, X, groups, X @ weight.T + bias


@pytest.mark.parametrize(
    ("cls", "criterion"),
    [(FedAvgClassifier, nn.MultiMarginLoss), (LocalNetClassifier, nn.MultiMarginLoss())],
)
def test_outputs_that_are_no_probabilities(cls, criterion):
    """They are never given as such; the largest is still what is predicted."""
    X, _, groups = table()
    model = fit(cls(recipe(nn.Linear(7, 3), criterion=criterion), **SHORT))
    for method in (model.predict_proba, model.predict_log_proba):
        with pytest.raises(ValueError, match="criterion=MultiMarginLoss"):
            method(X, groups=groups)
    with pytest.raises(ValueError, match="criterion=MultiMarginLoss"):
        model.for_client(0).predict_proba(X)
    own = model.for_client(0)
    layer = own.net_.module_
    outputs = X @ layer.weight.detach().numpy().T + layer.bias.detach().numpy()
    np.testing.assert_array_equal(own.predict(X), outputs.argmax(axis=1))


def test_outputs_that_the_net_says_how_to_read():
    def read(outputs):
        return torch.softmax(2 * outputs, dim=-1)

    net = recipe(nn.Linear(7, 3), criterion=nn.MultiMarginLoss, predict_nonlinearity=read)
    model, X, groups, outputs = margins(FedAvgClassifier(net, **SHORT))
    probabilities = model.predict_proba(X, groups=groups)
    np.testing.assert_allclose(probabilities, softmax(2 * outputs, axis=1), rtol=1e-5)


@pytest.mark.parametrize("how", [None, lambda outputs: torch.softmax(outputs, -1) - 1])
def test_readings_that_give_no_probabilities(how):
    net = recipe(nn.Linear(7, 3), predict_nonlinearity=how)
    model, X, groups, _ = margins(FedAvgClassifier(net, **SHORT))
    with pytest.raises(ValueError, match=r"predict_nonlinearity=.* no probabilities"):
        model.predict_proba(X, groups=groups)


def test_outputs_of_binary_nets():
    """Two criteria say what one number for a row stands for."""
    X, y, groups = table()
    refused(
        FedAvgClassifier(NeuralNetBinaryClassifier(Logit, criterion=nn.SoftMarginLoss)),
        "criterion=SoftMarginLoss",
        y=y > 0,
    )
    squashed = nn.Sequential(nn.Linear(7, 1), nn.Sigmoid())
    net = NeuralNetBinaryClassifier(squashed, criterion=nn.BCELoss)
    model = FedAvgClassifier(net, **SHORT).fit(X, y > 0, groups=groups)
    layer = model.net_.module_[0]
    logits = X @ layer.weight.detach().numpy().T + layer.bias.detach().numpy()
    expected = 1 / (1 + np.exp(-logits[:, 0]))
    found = model.predict_proba(X, groups=groups)
    np.testing.assert_allclose(found, np.stack([1 - expected, expected], axis=1), rtol=1e-5)


# Modules ------------------------------------------------------------------------------------------
class OneNumber(nn.Linear):
    """Regression with outputs (n,)."""

    def __init__(self):
        super().__init__(7, 1)

    def forward(self, X):
        return super().forward(X)[:, 0]


@pytest.mark.parametrize(
    ("cls", "params"), [(FedAvgRegressor, {"fine_tune_steps": 3}), (LocalNetRegressor, {})]
)
def test_responses_without_an_axis_of_their_own(cls, params):
    """The same numbers as with one."""
    X, _, groups = table()
    found = []
    for module in (OneNumber(), nn.Sequential(nn.Linear(7, 1))):
        with torch.no_grad():
            for k, values in enumerate(module.parameters()):
                values.fill_(0.1 * (k + 1))
        model = cls(NeuralNetRegressor(module, lr=0.1), **SHORT, **params)
        model.fit(X, X[:, 0] - 2, groups=groups)
        found.append(model.predict(X, groups=groups))
    assert found[0].shape == (len(X),)
    np.testing.assert_allclose(*found, rtol=1e-5)
    refused(cls(NeuralNetRegressor(OneNumber)), r"shape \(\) .* 2 outputs", y=X[:, :2])


class Lazy(nn.Sequential):
    """A net that takes its sizes from the rows."""

    def __init__(self):
        super().__init__(nn.LazyLinear(5), nn.ReLU(), nn.LazyLinear(3))


@pytest.mark.parametrize(
    ("cls", "noise"), [(FedAvgClassifier, {}), (LocalNetClassifier, {}), (AdaPeDClassifier, NOISE)]
)
def test_lazy_modules(cls, noise):
    """Their weights come from the seed; warm starts, pickles and copies know their sizes."""
    X, y, groups = table()
    model = cls(recipe(Lazy), warm_start=True, **SHORT, **noise).fit(X, y, groups=groups)
    again = cls(recipe(Lazy), **SHORT).fit(X, y, groups=groups)
    assert model._engines.client.stacked
    if not noise:
        np.testing.assert_array_equal(model.population_parameters_, again.population_parameters_)
    assert model.population_parameters_.shape == (8 * 5 + 6 * 3,)
    model.set_params(n_rounds=3).fit(X, y, groups=groups)
    expected = model.predict_proba(X[groups == 4], groups=groups[groups == 4])
    for own in (model.for_client(4), pickle.loads(pickle.dumps(model)).for_client(4)):
        np.testing.assert_array_equal(own.predict_proba(X[groups == 4]), expected)


@pytest.mark.parametrize(
    "normed",
    [
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.spectral_norm,
        pytest.param(
            nn.utils.weight_norm,
            marks=pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning"),
        ),
    ],
)
def test_modules_that_cannot_be_copied(normed):
    class Parametrized(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = normed(nn.Linear(7, 3))

        def forward(self, X):
            return self.last(X)

    refused(FedAvgClassifier(recipe(Parametrized)), "module of the net .*weight_norm")


@pytest.mark.parametrize("cls", BASIC)
def test_batches_of_one_row(cls):
    """BatchNorm cannot be trained on them: who has one is named."""
    X, y, groups = table(sizes=[9, 1, 13, 1, 7])
    refused(cls(recipe(Normed)), "2 clients, the first of them 1, have one row", X, y, groups)
    names = np.array(list("vwxyz"))[groups]
    keep = groups != 3
    refused(cls(recipe(Normed)), "client w has one row", X[keep], y[keep], names[keep])
    refused(cls(recipe(Normed, batch_size=1)), "batch_size is 1.*GroupNorm")
    plain = cls(recipe(Dropped, batch_size=1), **SHORT).fit(X, y, groups=groups)
    assert np.isfinite(plain.population_parameters_).all()


class Unremembering(nn.Sequential):
    """BatchNorm without running statistics."""

    def __init__(self):
        norm = nn.BatchNorm1d(5, track_running_stats=False)
        super().__init__(nn.Linear(7, 5), norm, nn.Linear(5, 3))


@pytest.mark.parametrize("sizes", [[9, 1, 13, 1, 7], [9, 8, 13, 9, 7]])
def test_noise_does_not_depend_on_who_has_one_row(sizes):
    """Nobody is named: the module is refused whether or not there is such a client."""
    cls = FedAvgClassifier
    model, (X, y, groups) = cls(recipe(Unremembering), **SHORT), table(sizes=sizes)
    if 1 not in sizes:
        model.fit(X, y, groups=groups)
    refused(
        cls(recipe(Unremembering), **NOISE), "with noise, any client may have one row", X, y, groups
    )


# Images of whole numbers --------------------------------------------------------------------------
def test_the_default_net_standardizes_whole_numbers():
    """Without noise; with it, and for other modules, they go in as they are."""
    rng = np.random.default_rng(0)
    _, y, groups = table()
    images = rng.integers(0, 256, (len(y), 1, 4, 4)).astype(np.uint8)
    bytes_, floats = (
        FedAvgClassifier(**SHORT).fit(X, y, groups=groups) for X in (images, images / 255.0)
    )
    np.testing.assert_allclose(
        bytes_.predict_proba(images, groups=groups),
        floats.predict_proba(images / 255.0, groups=groups),
        rtol=1e-4,
    )
    net = recipe(MLP, module__n_inputs=16, module__n_outputs=3, lr=1e-5)
    for noise in ({}, {"epsilon": 1e9, "clip_norm": 1.0}):
        pair = (FedAvgClassifier(net, **SHORT, **noise) for _ in range(2))
        ours, theirs = (
            model.fit(X, y, groups=groups)
            for model, X in zip(pair, (images, images.astype(float)), strict=True)
        )
        np.testing.assert_array_equal(ours.population_parameters_, theirs.population_parameters_)


# AdaPeD's start -----------------------------------------------------------------------------------
def test_where_adaped_starts():
    model = AdaPeDClassifier(net_of(), n_rounds=3, psi_init=0.4, psi_min=0.5)
    refused(model, "psi_init=0.4 .*psi_min=0.5")
    start = {"personal_start": "global", "personal_start_round": 3}
    model.set_params(psi_init=0.5, **start)
    refused(model, "personal_start_round=3 .*n_rounds=3")
    for more in ({"personal_start_round": 2}, {"warm_start": True}, {"personal_start": "own"}):
        fitted = AdaPeDClassifier(net_of(), n_rounds=3, local_steps=1, **{**start, **more})
        assert fit(fitted).n_rounds_ == 3


# Privacy without messages -------------------------------------------------------------------------
@pytest.mark.slow
def test_privacy_of_nets_that_send_nothing():
    """Its parameters change nothing but whether the fit looks at all rows together."""
    given = [
        {"epsilon": 1.0},
        {"epsilon": 1.0, "delta": 0.0},
        {"noise_multiplier": 3.0, "clip_norm": 1e-9},
        {"epsilon": 9.0, "clip_norm": 0.1, "clip_quantile": 0.5},
    ]
    cls = LocalNetRegressor
    found = [fit(cls(**SHORT, **params)) for params in given]
    for model in found:
        assert model.privacy_.epsilon == 0
        np.testing.assert_array_equal(model.parameters_, found[0].parameters_)
    plain = fit(cls(**SHORT, clip_norm=1e-9))
    bare = fit(cls(**SHORT))
    assert plain.privacy_.epsilon == math.inf
    np.testing.assert_array_equal(plain.parameters_, bare.parameters_)


# Checkpoints --------------------------------------------------------------------------------------
@pytest.mark.parametrize("given", [None, recipe(MLP, lr=0.3, batch_size=20)])
def test_a_checkpoint_of_another_learning_rate(tmp_path, given):
    """The default net is compared as if it had been given."""
    data = X, y, groups = table()
    model = FedAvgClassifier(given, **SHORT, checkpoint=tmp_path / "run", checkpoint_every=1)
    interrupt(model, data, 1)
    for lr in (0.1, 0.3):
        model.set_params(estimator=recipe(MLP, lr=lr, batch_size=20))
        if lr != (0.1 if given is None else 0.3):
            refused(model, r"checkpoint .* estimator__lr=")
    model.set_params(estimator=recipe(MLP, lr=0.1, batch_size=20) if given is None else given)
    model.fit(X, y, groups=groups)
    whole = FedAvgClassifier(given, **SHORT).fit(X, y, groups=groups)
    np.testing.assert_array_equal(model.population_parameters_, whole.population_parameters_)


def multiplied(by):
    class Multiplied(nn.Linear):
        def __init__(self):
            super().__init__(N_INPUTS, N_CLASSES)

        def forward(self, X):
            return by * super().forward(X)

    return Multiplied


def test_a_checkpoint_of_an_edited_module(tmp_path):
    """With the same noise on other sums, two runs from one file would have none together."""
    data = X, y, groups = table()
    given = {**SHORT, **NOISE, "checkpoint": tmp_path / "run", "checkpoint_every": 1}
    model = FedAvgClassifier(recipe(multiplied(2.0), lr=0.1, batch_size=20), **given)
    interrupt(model, data, 1)
    model.set_params(estimator=recipe(multiplied(3.0), lr=0.1, batch_size=20))
    refused(model, r"checkpoint .* another estimator__module=.*Multiplied.* code")
    model.set_params(estimator=recipe(multiplied(2.0), lr=0.1, batch_size=20))
    assert model.fit(X, y, groups=groups).n_rounds_ == 2
