"""Refusals of neural estimators: one sentence each, and an estimator that stays as it was."""

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from skorch import NeuralNetClassifier, NeuralNetRegressor
from skorch.callbacks import EarlyStopping, LRScheduler
from skorch.dataset import ValidSplit
from torch import nn

from pfl_sklearn.linear_model import DivergenceError, PPSGDClassifier
from pfl_sklearn.neural_network import (
    MLP,
    AdaPeDClassifier,
    APFLClassifier,
    DittoClassifier,
    FedAvgClassifier,
    FedAvgRegressor,
    FedEMClassifier,
    FedMutualClassifier,
    FedPerClassifier,
    LocalNetClassifier,
    LocalNetRegressor,
    PerFedAvgClassifier,
    QuPeDClassifier,
)
from pfl_sklearn.priors import DirichletPrior
from pfl_sklearn.privacy import PrivacyLedger
from tests.helpers.net_fits import fit
from tests.helpers.nets import (
    Convolutions,
    Dropped,
    Embedded,
    Normed,
    net_of,
    recipe,
    refused,
    table,
)
from tests.helpers.neural_methods import BASIC, MIXTURES, PERSONAL_LAYERS

pytestmark = pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")

NOISE = {"noise_multiplier": 1.0, "clip_norm": 0.3}
SHORT = {"n_rounds": 2, "local_steps": 2, "random_state": 0}
every_kind = pytest.mark.parametrize("cls", BASIC)
every_regressor = pytest.mark.parametrize("cls", [FedAvgRegressor, LocalNetRegressor])


def fedavg(net=None, **params):
    given = {"n_rounds": 1, "local_steps": 2, **params}
    return FedAvgClassifier(net_of() if net is None else net, **given)


# Rows ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("cls", "module", "shape"),
    [
        (FedAvgClassifier, Dropped, (8,)),
        (LocalNetClassifier, Dropped, (1, 8, 8)),
        (AdaPeDClassifier, Convolutions, (7,)),
    ],
)
def test_rows_that_the_module_refuses(cls, module, shape):
    rows = r"refuses rows of shape \(" + ", ".join(str(size) for size in shape)
    refused(cls(recipe(module), n_rounds=1), rows, table(shape)[0])


WRONG_ROWS = {
    "strings": (lambda X: X.astype(str), "numeric"),
    "dates": (lambda X: X.astype("datetime64[D]"), "datetime64"),
    "missing": (lambda X: np.where(X > 2, np.nan, X), "Input X contains NaN"),
    "too large": (lambda X: X * 1e200, "too large"),
}


@pytest.mark.parametrize("kind", WRONG_ROWS)
def test_rows_of_the_wrong_kind(kind):
    change, match = WRONG_ROWS[kind]
    X, y, groups = table()
    refused(fedavg(), match, change(X), y, groups)


RAGGED = [list(range(1 + k % 2)) for k in range(len(table()[1]))]
NO_ARRAYS = {
    "lists": (RAGGED, "rows of X that differ in length or shape"),
    "arrays": ([np.array(row) for row in RAGGED], "rows of X that differ in length or shape"),
    "objects": (np.array(RAGGED, dtype=object), "rows of X that differ in length or shape"),
    "a dict": ({"words": RAGGED, "mask": RAGGED}, "got a dict with the keys words, mask"),
    "dicts": ([{"words": row} for row in RAGGED], "rows of X are of type dict"),
}


@pytest.mark.parametrize("kind", NO_ARRAYS)
def test_rows_that_make_no_array(kind):
    X, match = NO_ARRAYS[kind]
    for noise in ({}, NOISE):
        refused(fedavg(**noise), match, X)
    rows, y, groups = table()
    model = fedavg().fit(rows, y, groups=groups)
    with pytest.raises(ValueError, match=match):
        model.predict(X, groups=groups)


@pytest.mark.parametrize("model", [FedAvgRegressor(), PPSGDClassifier()])
def test_rows_without_weights(model):
    """The error names the class of the estimator, not that of a base."""
    X, y, groups = table()
    for method in ("fit", "partial_fit"):
        match = rf"^{type(model).__name__}\.{method} takes no sample_weight"
        with pytest.raises(TypeError, match=match):
            getattr(clone(model), method)(X, y, groups=groups, sample_weight=np.ones(len(y)))


def test_embeddings_take_whole_numbers():
    """Not numbers beyond their table, either."""
    rng = np.random.default_rng(0)
    words = rng.integers(0, 10, (len(table()[0]), 2))
    model = fedavg(recipe(Embedded))
    refused(model, "module of the net refuses rows", words.astype(float))
    refused(model, r"index|range", np.where(words > 8, 10, words), error=(ValueError, IndexError))


# Targets ------------------------------------------------------------------------------------------
@every_regressor
def test_responses_of_the_wrong_shape(cls):
    X = table()[0]
    net = NeuralNetRegressor(MLP, module__n_outputs=1)
    refused(cls(net, n_rounds=1), r"output of shape \(1,\).* 2 outputs", y=X[:, :2])
    refused(cls(n_rounds=1), "dim 3", y=X[:, :4].reshape(-1, 2, 2))
    refused(cls(n_rounds=1), "inconsistent numbers", y=X[1:, 0])
    refused(cls(n_rounds=1), "NaN", y=np.where(X[:, 0] > 1, np.nan, 0))
    refused(cls(net_of()), "skorch.NeuralNetRegressor; got NeuralNetClassifier", y=X[:, 0])


def test_labels():
    X, y, _ = table()
    refused(fedavg(), "class", y=np.zeros(len(y)))
    refused(fedavg(), "[Cc]ontinuous", y=X[:, 0])
    refused(fedavg(), "inconsistent numbers", y=y[1:])
    refused(fedavg(), "1d array|shape", y=np.stack([y, y], axis=1))
    refused(fedavg(), "NaN", y=np.where(y == 1, np.nan, y))


@every_kind
def test_labels_that_a_client_never_saw(cls):
    """And clients with fewer rows than a batch, with one row, and with one class."""
    X, _, groups = table(sizes=[1, 2, 40, 3])
    y = np.where(groups == 2, np.arange(len(groups)) % 3, 0)
    model = cls(net_of(batch_size=10), **SHORT).fit(X, y, groups=groups)
    probabilities = model.predict_proba(X, groups=groups)
    assert probabilities.shape == (len(X), 3)
    assert (probabilities > 0).all()
    np.testing.assert_allclose(probabilities.sum(axis=1), 1)


# Recipes ------------------------------------------------------------------------------------------


UNUSED = {
    "max_epochs": 3,
    "verbose": 2,
    "train_split": ValidSplit(3),
    "warm_start": True,
    "compile": True,
    "dataset": torch.utils.data.TensorDataset,
    "iterator_train": list,
    "iterator_valid": list,
    "iterator_train__shuffle": True,
    "iterator_valid__num_workers": 1,
    "dataset__length": 3,
    "optimizer__param_groups": [("*", {"lr": 0.1})],
}


def test_parameters_without_effect():
    for name, value in UNUSED.items():
        refused(fedavg(net_of(**{name: value})), rf"^{name}\b.*no effect")


@pytest.mark.parametrize("noise", [{}, NOISE])
@pytest.mark.parametrize("criterion", [nn.MultiMarginLoss, nn.MultiMarginLoss()])
def test_methods_that_need_probabilities(tmp_path, noise, criterion):
    """They say so before anything is charged."""
    ledger = PrivacyLedger(tmp_path / "ledger.jsonl")
    net = net_of(criterion=criterion)
    for model in (AdaPeDClassifier(net), fedavg(net, label_prior="client")):
        model.set_params(ledger=ledger, **noise)
        refused(model, "criterion=MultiMarginLoss.*CrossEntropyLoss")
    assert ledger.entries == []


@pytest.mark.parametrize("device", ["meta", "mps", "ipu", "cuda"])
def test_devices_that_cannot_be_used(device):
    """One that is not there, or that cannot hold what predictions are made of."""
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a device")
    # The reason is torch's: of a build with CUDA it also names the driver's address.
    match = rf"^device='{device}' of the net cannot be used on this machine: .{{1,160}}$"
    refused(fedavg(net_of(device=device)), match)


@every_kind
def test_running_statistics_with_noise(tmp_path, cls):
    ledger = PrivacyLedger(tmp_path / "ledger.jsonl")
    refused(cls(recipe(Normed), ledger=ledger, **NOISE), "BatchNorm1d.*GroupNorm")
    assert ledger.entries == []


@every_kind
def test_more_rounds_of_another_architecture(cls):
    X, y, groups = table()
    model = cls(net_of(), n_rounds=1, local_steps=1, warm_start=True).fit(X, y, groups=groups)
    for hidden in (9, ()):
        model.set_params(n_rounds=2, estimator__module__hidden=hidden)
        refused(model, "other parameters")
    with pytest.raises(ValueError, match="other parameters"):
        model.partial_fit(X, y, groups=groups)
    assert model.n_rounds_ == 1


@pytest.mark.parametrize(
    ("keep", "message"),
    [("nothing", "its class declares none"), ("layers", "Other declares _clients_keep='layers'")],
)
def test_a_class_says_what_its_clients_keep(keep, message):
    class Other(DittoClassifier):
        _clients_keep = keep

    refused(Other(net_of()), message, error=TypeError)


# Rounds that diverge ------------------------------------------------------------------------------
def test_a_learning_rate_that_is_too_large():
    model = fedavg(net_of(lr=1e30), n_rounds=20)
    refused(model, r"diverged.*learning rate.*lr=1e\+30", error=DivergenceError)
    model = LocalNetRegressor(NeuralNetRegressor(MLP, lr=1e4), n_rounds=20)
    refused(model, r"learning rate.*lr=1e\+04", y=table()[0][:, 0], error=DivergenceError)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("module", [MLP, Dropped])
@every_kind
def test_who_diverged_and_when(cls, module):
    """Even where the loss was finite and only the change of the net was not."""
    X, y, groups = table()
    names = np.array(list("stuvwxyz"))[groups]
    X[groups == 2] *= 1e30
    units = {"module__center": [0.0] * 7, "module__scale": [1.0] * 7}  # not those of the data
    model = cls(recipe(module, **(units if module is MLP else {})), random_state=0)
    refused(model, r"in round 0 .*, at client u: ", X, y, names, error=DivergenceError)


@pytest.mark.parametrize(
    ("cls", "module"), [*((cls, MLP) for cls in BASIC), (FedAvgClassifier, Dropped)]
)
def test_noise_leaves_out_a_client_that_diverges(cls, module):
    """The fit goes on without a word, since an error would reveal something about the client."""
    X, y, groups = table()
    X[groups == 2] = 3e38
    X[0] = 1e200  # too large for single precision
    model = cls(recipe(module), **SHORT, **NOISE).fit(X, y, groups=groups)
    assert np.isfinite(model.population_parameters_).all()
    assert np.isfinite(getattr(model, "_personal", 0.0)).all()


@every_kind
def test_noise_leaves_out_a_client_whose_rows_the_module_refuses(cls):
    """As if its messages were zero, and its own net were the initial one."""
    _, y, groups = table()
    X = np.random.default_rng(0).integers(0, 10, (len(y), 2))
    plain = cls(recipe(Embedded), **SHORT)
    X[groups == 2, 0] = 10  # there are embeddings of 0 to 9
    with pytest.raises(IndexError):
        plain.fit(X, y, groups=groups)
    model = cls(recipe(Embedded), **SHORT, **NOISE)
    with pytest.warns(RuntimeWarning, match="IndexError"):
        model.fit(X, y, groups=groups)
    assert np.isfinite(model.population_parameters_).all()
    if cls is not FedAvgClassifier:
        start = model._engines.client.start().astype(np.float32)
        np.testing.assert_array_equal(model.parameters_[model.clients_ == 2], start[None])


# Predictions --------------------------------------------------------------------------------------
def test_rows_unlike_those_of_fit():
    X, y, groups = table()
    model = fedavg()
    with pytest.raises(NotFittedError):
        model.predict(X, groups=groups)
    model.fit(X, y, groups=groups)
    images = fedavg(recipe(Convolutions)).fit(table((1, 8, 8))[0], y, groups=groups)
    for fitted, rows, match in (
        (model, table((8,))[0], "8 features"),
        (model, X[:, None], r"\(1, 7\)"),
        (images, table((1, 9, 9))[0], r"\(1, 9, 9\).*\(1, 8, 8\)"),
        (images, table((64,))[0], "64"),
    ):
        with pytest.raises(ValueError, match=match):
            fitted.predict(rows, groups=groups)


def test_another_number_of_responses():
    X, _, groups = table()
    model = FedAvgRegressor(n_rounds=1).fit(X, X[:, 0], groups=groups)
    with pytest.raises(ValueError, match="y has 2 columns, but fit saw 1"):
        model.partial_fit(X, X[:, :2], groups=groups)


def test_the_default_net_of_private_rounds_is_another_one():
    model = fit(FedAvgClassifier(n_rounds=1, warm_start=True, clip_norm=1.0))
    with pytest.raises(ValueError, match="other units with noise"):
        fit(model.set_params(n_rounds=2, noise_multiplier=1.0))


# Methods with parts -------------------------------------------------------------------------------
class Twofold(nn.Module):
    """Logits that are a sum of two layers' outputs."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(7, 3), nn.Linear(7, 3)

    def forward(self, X):
        return self.one(X) + self.other(X.abs())


class Zeros(nn.Linear):
    """Logits that are 0 at first."""

    def __init__(self):
        super().__init__(7, 3)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


@pytest.mark.parametrize("cls", PERSONAL_LAYERS)
def test_personal_layers_that_cannot_be_found(cls):
    twofold, unread = recipe(Twofold), recipe(MLP, criterion=nn.MultiMarginLoss)
    match = r"personal_layers='last' needs a module that ends with .*one\.weight, .*other\.bias"
    refused(cls(twofold, n_rounds=1), match)
    match = r"personal_layers has 'head', which is no .*one\.weight"
    refused(cls(twofold, n_rounds=1, personal_layers=["head"]), match)
    match = "^personal_layers='last' cannot tell .*criterion=MultiMarginLoss"
    refused(cls(unread, n_rounds=1), match)


@pytest.mark.parametrize("cls", PERSONAL_LAYERS)
def test_rounds_with_other_personal_layers(cls):
    given = {"n_rounds": 1, "local_steps": 1, "warm_start": True}
    model = fit(cls(recipe(Twofold), personal_layers=["one"], **given))
    fit(model.set_params(n_rounds=2))
    assert np.ptp(model.parameters_, axis=0).max() > 0
    match = r"^personal_layers=\['other'\] .* rounds before.*fit anew"
    refused(model.set_params(n_rounds=3, personal_layers=["other"]), match)


LAYERS = [name for name, _ in Twofold().named_parameters()]
STOPPING = "callbacks=EarlyStopping.*ClientMonitor"
PLATEAU = torch.optim.lr_scheduler.ReduceLROnPlateau
REFUSED = [
    (fedavg(net_of().initialize()), "estimator .*initialized or fitted before"),
    (fedavg(NeuralNetClassifier), "estimator must be a skorch net.*NeuralNetClassifier"),
    (fedavg(MLP(7, 3)), "estimator must be a skorch net"),
    (fedavg(LogisticRegression()), r"estimator must be a skorch net.*LogisticRegression\(\)"),
    (fedavg(NeuralNetRegressor(MLP)), "skorch.NeuralNetClassifier; got NeuralNetRegressor"),
    (fedavg(recipe(MLP, module__n_outputs=1)), r"output of shape \(1,\) .* 3 outputs \(classes\)"),
    (fedavg(recipe(MLP, module__n_outputs=2)), r"output of shape \(2,\) .* 3 outputs \(classes\)"),
    (fedavg(net_of(callbacks=[EarlyStopping()])), STOPPING),
    (fedavg(net_of(callbacks=[("stop", EarlyStopping())])), STOPPING),
    (fedavg(net_of(callbacks=[LRScheduler("ReduceLROnPlateau")])), "ReduceLROnPlateau"),
    (fedavg(net_of(callbacks=[LRScheduler(PLATEAU)])), "ReduceLROnPlateau"),
    (fedavg(label_prior=DirichletPrior), r"such as DirichletPrior\(\); got the class"),
    (AdaPeDClassifier(net_of(optimizer=torch.optim.Adam)), "optimizer=Adam.*SGD"),
    *(
        (cls(net_of(), n_components=9), "n_components=9 is more than .* 8; expected at most one")
        for cls in MIXTURES
    ),
    # Components that would never differ, and losses that are no means of rows.
    (FedEMClassifier(recipe(MLP(7, 3))), "an instance, .*give the module's class"),
    (FedEMClassifier(recipe(Zeros)), "same weights every time.*n_components=1"),
    (
        FedEMClassifier(net_of(criterion__weight=torch.ones(3))),
        "criterion=CrossEntropyLoss .*mean of losses of rows",
    ),
    (
        FedPerClassifier(recipe(Twofold), personal_layers=LAYERS, **NOISE),
        "personal_layers names all layers.*budget would be spent on nothing",
    ),
]


@pytest.mark.parametrize(("model", "match"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_refused(model, match):
    refused(model, match)


def test_clients_of_one_row_cannot_tell_how_well_a_net_adapts():
    X, y, groups = table(sizes=[1, 5, 6, 1])
    with pytest.warns(UserWarning, match=r"^2 of 4 clients have one row, .*needs two rows"):
        PerFedAvgClassifier(net_of(), n_rounds=1).fit(X, y, groups=groups)


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (FedPerClassifier(recipe(Twofold), personal_layers=["head"]), "personal_layers"),
        (FedEMClassifier(net_of(criterion=nn.MultiMarginLoss)), "criterion"),
        (QuPeDClassifier(net_of(criterion=nn.MultiMarginLoss)), "criterion"),
        (FedMutualClassifier(net_of(criterion=nn.MultiMarginLoss)), "criterion"),
        # Momentum would mix adapted nets with the global one.
        (
            PerFedAvgClassifier(net_of(optimizer__momentum=0.9)),
            r"^optimizer__momentum=0\.9 .*leave it out",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)
def test_what_is_refused_without_data_is_not_charged(model, match, tmp_path):
    ledger = PrivacyLedger(tmp_path / "ledger.jsonl")
    refused(clone(model).set_params(ledger=ledger, **NOISE), match)
    assert ledger.entries == []


def test_rounds_with_other_mixtures():
    model = APFLClassifier(net_of(), n_rounds=1, local_steps=2, warm_start=True, mixing=0.5)
    fit(model).set_params(n_rounds=2, mixing=1.0)
    refused(model, r"^mixing=1\.0 is not that of the rounds before")
    shares = fit(model.set_params(mixing="adaptive")).mixing_
    assert (shares != 0.5).any()


@pytest.mark.parametrize("cls", MIXTURES)
def test_rounds_with_other_components(cls):
    model = fit(cls(net_of(), n_rounds=1, local_steps=1, warm_start=True))
    model.set_params(n_components=3, n_rounds=2)
    refused(model, "had 2 components, and these would have 3; fit anew")
