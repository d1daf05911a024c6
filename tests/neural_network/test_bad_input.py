"""What neural estimators refuse: one sentence each, and an estimator that stays as it was."""

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression

torch = pytest.importorskip("torch")
pytest.importorskip("skorch")

from skorch import NeuralNetClassifier, NeuralNetRegressor  # noqa: E402
from skorch.callbacks import EarlyStopping, LRScheduler  # noqa: E402
from skorch.dataset import ValidSplit  # noqa: E402
from torch import nn  # noqa: E402

from pfl_sklearn.linear_model import DivergenceError, PPSGDClassifier  # noqa: E402
from pfl_sklearn.neural_network import (  # noqa: E402
    MLP,
    AdaMixNetClassifier,
    AdaPeDClassifier,
    APFLClassifier,
    FedAvgClassifier,
    FedAvgRegressor,
    FedEMClassifier,
    FedMutualClassifier,
    FedPerClassifier,
    FedRepClassifier,
    LocalNetClassifier,
    LocalNetRegressor,
    PerFedAvgClassifier,
    PPSGDNetClassifier,
    QuPeDClassifier,
)
from pfl_sklearn.priors import DirichletPrior  # noqa: E402
from pfl_sklearn.privacy import PrivacyLedger  # noqa: E402
from tests.helpers.nets import (  # noqa: E402
    Convolutions,
    Dropped,
    Embedded,
    Normed,
    recipe,
    refused,
    table,
)

pytestmark = pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")

CLASSIFIERS = [FedAvgClassifier, LocalNetClassifier, AdaPeDClassifier]
NOISE = {"noise_multiplier": 1.0, "clip_norm": 0.3}
every_classifier = pytest.mark.parametrize("cls", CLASSIFIERS)


def net_of(**params):
    return recipe(MLP, module__hidden=5, **params)


# Rows ---------------------------------------------------------------------------------------------


@every_classifier
@pytest.mark.parametrize(
    ("module", "shape"), [(Dropped, (8,)), (Dropped, (1, 8, 8)), (Convolutions, (7,))]
)
def test_rows_that_the_module_refuses(cls, module, shape):
    rows = r"refuses rows of shape \(" + ", ".join(str(size) for size in shape)
    refused(cls(recipe(module), n_rounds=1), rows, table(shape)[0])


WRONG_ROWS = {
    "strings": (lambda X: X.astype(str), "numeric"),
    "objects": (lambda X: np.full(X.shape, "a", dtype=object), "could not convert"),
    "complex": (lambda X: X + 1j, "[Cc]omplex"),
    "dates": (lambda X: X.astype("datetime64[D]"), "datetime64"),
    "missing": (lambda X: np.where(X > 2, np.nan, X), "NaN"),
    "infinite": (lambda X: np.where(X > 2, np.inf, X), "infinity"),
    "too large": (lambda X: X * 1e200, "too large"),
    "a vector": (lambda X: X[:, 0], "1D array"),
    "no rows": (lambda X: X[:0], r"sample"),
}


@every_classifier
@pytest.mark.parametrize("kind", WRONG_ROWS)
def test_rows_of_the_wrong_kind(cls, kind):
    change, match = WRONG_ROWS[kind]
    X, y, groups = table()
    X = change(X)
    refused(cls(net_of(), n_rounds=1), match, X, y[: len(X)], groups[: len(X)])


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
        refused(FedAvgClassifier(net_of(), n_rounds=1, **noise), match, X)
    rows, y, groups = table()
    model = FedAvgClassifier(net_of(), n_rounds=1).fit(rows, y, groups=groups)
    with pytest.raises(ValueError, match=match):
        model.predict(X, groups=groups)


@pytest.mark.parametrize("model", [FedAvgClassifier(), FedAvgRegressor(), PPSGDClassifier()])
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
    model = FedAvgClassifier(recipe(Embedded), n_rounds=1)
    refused(model, "module of the net refuses rows", words.astype(float))
    refused(model, r"index|range", np.where(words > 8, 10, words), error=(ValueError, IndexError))


# Targets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [FedAvgRegressor, LocalNetRegressor])
def test_responses_of_the_wrong_shape(cls):
    X = table()[0]
    net = NeuralNetRegressor(MLP, module__n_outputs=1)
    refused(cls(net, n_rounds=1), r"output of shape \(1,\).* 2 outputs", y=X[:, :2])
    refused(cls(n_rounds=1), "dim 3", y=X[:, :4].reshape(-1, 2, 2))
    refused(cls(n_rounds=1), "inconsistent numbers", y=X[1:, 0])
    refused(cls(n_rounds=1), "NaN", y=np.where(X[:, 0] > 1, np.nan, 0))


@every_classifier
def test_labels(cls):
    X, y, _ = table()
    model = cls(net_of(), n_rounds=1)
    refused(model, "class", y=np.zeros(len(y)))
    refused(model, "[Cc]ontinuous", y=X[:, 0])
    refused(model, "inconsistent numbers", y=y[1:])
    refused(model, "1d array|shape", y=np.stack([y, y], axis=1))
    refused(model, "NaN", y=np.where(y == 1, np.nan, y))


@every_classifier
@pytest.mark.parametrize("width", [1, 2])
def test_outputs_of_the_wrong_width(cls, width):
    net = recipe(MLP, module__n_outputs=width)
    refused(cls(net, n_rounds=1), rf"output of shape \({width},\) .* 3 outputs \(classes\)")


def test_labels_that_a_client_never_saw():
    """And clients with fewer rows than a batch, with one row, and with one class."""
    X, _, groups = table(sizes=[1, 2, 40, 3])
    y = np.where(groups == 2, np.arange(len(groups)) % 3, 0)
    for cls in CLASSIFIERS:
        model = cls(net_of(batch_size=10), n_rounds=2, random_state=0).fit(X, y, groups=groups)
        found = model.predict_proba(X, groups=groups)
        assert found.shape == (len(X), 3)
        assert (found > 0).all()
        np.testing.assert_allclose(found.sum(axis=1), 1)


# Recipes ------------------------------------------------------------------------------------------


@every_classifier
def test_what_is_no_recipe(cls):
    refused(cls(net_of().initialize()), "estimator .*initialized or fitted before")
    refused(cls(NeuralNetClassifier), "estimator must be a skorch net.*NeuralNetClassifier")
    refused(cls(MLP(7, 3)), "estimator must be a skorch net")
    refused(cls(LogisticRegression()), r"estimator must be a skorch net.*LogisticRegression\(\)")
    refused(cls(NeuralNetRegressor(MLP)), "skorch.NeuralNetClassifier; got NeuralNetRegressor")


@pytest.mark.parametrize("cls", [FedAvgRegressor, LocalNetRegressor])
def test_a_classifier_as_the_recipe_of_a_regressor(cls):
    refused(cls(net_of()), "skorch.NeuralNetRegressor; got NeuralNetClassifier", y=table()[0][:, 0])


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


@pytest.mark.parametrize("name", UNUSED)
def test_parameters_without_effect(name):
    refused(FedAvgClassifier(net_of(**{name: UNUSED[name]})), rf"^{name}\b.*no effect")


def test_parameters_with_the_values_that_rounds_have():
    given = {"max_epochs": 10, "verbose": False, "train_split": None, "callbacks": "disable"}
    X, y, groups = table()
    found = [
        FedAvgClassifier(net, n_rounds=1, random_state=0).fit(X, y, groups=groups)
        for net in (net_of(), net_of(**given))
    ]
    np.testing.assert_array_equal(found[0]._population, found[1]._population)


@pytest.mark.parametrize("callbacks", [[EarlyStopping()], [("stop", EarlyStopping())]])
def test_other_callbacks(callbacks):
    refused(FedAvgClassifier(net_of(callbacks=callbacks)), "callbacks=EarlyStopping.*ClientMonitor")


@pytest.mark.parametrize(
    "policy", ["ReduceLROnPlateau", torch.optim.lr_scheduler.ReduceLROnPlateau]
)
def test_schedulers_that_follow_a_score(policy):
    net = net_of(callbacks=[LRScheduler(policy)])
    refused(FedAvgClassifier(net), "ReduceLROnPlateau")


@pytest.mark.parametrize("cap", [0, -1, 2.5, None, "all"])
def test_caps_of_missed_rounds(cap):
    refused(AdaPeDClassifier(net_of(), train_unsampled=cap), "'train_unsampled' parameter")


def test_adaped_takes_its_own_steps():
    refused(AdaPeDClassifier(net_of(optimizer=torch.optim.Adam)), "optimizer=Adam.*SGD")


@pytest.mark.parametrize("noise", [{}, NOISE])
@pytest.mark.parametrize("criterion", [nn.MultiMarginLoss, nn.MultiMarginLoss()])
def test_methods_that_need_probabilities(tmp_path, noise, criterion):
    """They say so before anything is charged."""
    ledger = PrivacyLedger(tmp_path / "ledger.jsonl")
    net = net_of(criterion=criterion)
    for model in (AdaPeDClassifier(net), FedAvgClassifier(net, label_prior="client")):
        model.set_params(ledger=ledger, **noise)
        refused(model, "criterion=MultiMarginLoss.*CrossEntropyLoss")
    assert ledger.entries == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
@every_classifier
def test_a_device_that_is_not_there(cls):
    refused(cls(net_of(device="cuda")), "device='cuda'")


@pytest.mark.parametrize("device", ["meta", "mps", "ipu"])
def test_devices_without_double_precision(device):
    """One that this torch was not built for, or that cannot hold what predictions are made of."""
    words = rf"^device='{device}' of the net cannot be used on this machine: .{{1,80}}$"
    refused(FedAvgClassifier(net_of(device=device)), words)


@every_classifier
def test_running_statistics_with_noise(tmp_path, cls):
    ledger = PrivacyLedger(tmp_path / "ledger.jsonl")
    refused(cls(recipe(Normed), ledger=ledger, **NOISE), "BatchNorm1d.*GroupNorm")
    assert ledger.entries == []


@pytest.mark.parametrize(
    "change", [{"estimator__module__hidden": 9}, {"estimator__module__hidden": ()}]
)
@every_classifier
def test_more_rounds_of_another_architecture(cls, change):
    X, y, groups = table()
    model = cls(net_of(), n_rounds=1, warm_start=True).fit(X, y, groups=groups)
    model.set_params(n_rounds=2, **change)
    refused(model, "other parameters")
    with pytest.raises(ValueError, match="other parameters"):
        model.partial_fit(X, y, groups=groups)
    assert model.n_rounds_ == 1


# Rounds that diverge ------------------------------------------------------------------------------


@every_classifier
def test_a_learning_rate_that_is_too_large(cls):
    model = cls(net_of(lr=1e30), n_rounds=20)
    refused(model, r"diverged.*learning rate.*lr=1e\+30", error=DivergenceError)


@pytest.mark.parametrize("cls", [FedAvgRegressor, LocalNetRegressor])
def test_a_learning_rate_that_is_too_large_for_responses(cls):
    X = table()[0]
    net = NeuralNetRegressor(MLP, lr=1e4)
    model = cls(net, n_rounds=20)
    refused(model, r"learning rate.*lr=1e\+04", y=X[:, 0], error=DivergenceError)


@pytest.mark.parametrize("module", [MLP, Dropped])
@every_classifier
def test_who_diverged_and_when(cls, module):
    """Even where the loss was finite and only the change of the net was not."""
    X, y, groups = table()
    names = np.array(list("stuvwxyz"))[groups]
    X[groups == 2] *= 1e30
    units = {"module__center": [0.0] * 7, "module__scale": [1.0] * 7}  # not those of the data
    net = recipe(module, **(units if module is MLP else {}))
    refused(
        cls(net, random_state=0),
        r"in round 0 .*, at client u: ",
        X,
        y,
        names,
        error=DivergenceError,
    )


@pytest.mark.parametrize("module", [MLP, Dropped])
@every_classifier
def test_noise_leaves_out_a_client_that_diverges(cls, module):
    """The fit goes on without a word, since an error would reveal something about the client."""
    X, y, groups = table()
    X[groups == 2] = 3e38
    X[0] = 1e200  # too large for single precision
    noise = {} if cls is LocalNetClassifier else {"epsilon": 1.0, "clip_norm": 0.3}
    model = cls(recipe(module), n_rounds=3, **noise, **({} if noise else NOISE))
    model.fit(X, y, groups=groups)
    assert np.isfinite(model._population).all()
    assert np.isfinite(getattr(model, "_personal", 0.0)).all()


@every_classifier
def test_noise_leaves_out_a_client_whose_rows_the_module_refuses(cls):
    """As if its messages were zero, and its own net were the initial one."""
    _, y, groups = table()
    X = np.random.default_rng(0).integers(0, 10, (len(y), 2))
    plain = cls(recipe(Embedded), n_rounds=2)
    X[groups == 2, 0] = 10  # there are embeddings of 0 to 9
    with pytest.raises(IndexError):
        plain.fit(X, y, groups=groups)
    model = cls(recipe(Embedded), n_rounds=2, **NOISE)
    with pytest.warns(RuntimeWarning, match="IndexError"):
        model.fit(X, y, groups=groups)
    assert np.isfinite(model.population_parameters_).all()
    if cls is not FedAvgClassifier:
        start = model._engines.client.start().astype(np.float32)
        np.testing.assert_array_equal(model.parameters_[model.clients_ == 2], start[None])


# Predictions --------------------------------------------------------------------------------------


@every_classifier
def test_rows_unlike_those_of_fit(cls):
    X, y, groups = table()
    model = cls(net_of(), n_rounds=1)
    with pytest.raises(NotFittedError):
        model.predict(X, groups=groups)
    model.fit(X, y, groups=groups)
    with pytest.raises(ValueError, match="8 features"):
        model.predict(table((8,))[0], groups=groups)
    with pytest.raises(ValueError, match=r"\(1, 7\)"):
        model.predict(X[:, None], groups=groups)
    images = cls(recipe(Convolutions), n_rounds=1).fit(table((1, 8, 8))[0], y, groups=groups)
    with pytest.raises(ValueError, match=r"\(1, 9, 9\).*\(1, 8, 8\)"):
        images.predict(table((1, 9, 9))[0], groups=groups)
    with pytest.raises(ValueError, match="64"):
        images.predict(table((64,))[0], groups=groups)


def test_another_number_of_responses():
    X, _, groups = table()
    model = FedAvgRegressor(n_rounds=1).fit(X, X[:, 0], groups=groups)
    with pytest.raises(ValueError, match="y has 2 columns, but fit saw 1"):
        model.partial_fit(X, X[:, :2], groups=groups)


def test_a_prior_that_is_no_instance():
    refused(
        FedAvgClassifier(label_prior=DirichletPrior), r"such as DirichletPrior\(\); got the class"
    )


def test_missing_values_are_those_of_x():
    X, y, groups = table()
    X[0, 0] = np.nan
    with pytest.raises(ValueError, match="Input X contains NaN"):
        FedAvgClassifier(n_rounds=1).fit(X, y, groups=groups)


def test_what_release_would_publish():
    X, y, groups = table()
    model = FedAvgClassifier(n_rounds=1, label_prior="client").fit(X, y, groups=groups)
    with pytest.raises(ValueError, match=r"\(the population model, label_prior_\)"):
        model.release()


def test_the_default_net_of_private_rounds_is_another_one():
    X, y, groups = table()
    model = FedAvgClassifier(n_rounds=1, warm_start=True, clip_norm=1.0).fit(X, y, groups=groups)
    with pytest.raises(ValueError, match="other units with noise"):
        model.set_params(n_rounds=2, noise_multiplier=1.0).fit(X, y, groups=groups)


# Methods with parts -------------------------------------------------------------------------------


class Twofold(nn.Module):
    """Logits that are a sum of two layers' outputs."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(7, 3), nn.Linear(7, 3)

    def forward(self, X):
        return self.one(X) + self.other(X.abs())


@pytest.mark.parametrize("cls", [FedEMClassifier, AdaMixNetClassifier])
def test_more_components_than_clients(cls):
    words = "n_components=9 is more than the number of clients, 8; expected at most one"
    refused(cls(net_of(), n_components=9, n_rounds=1), words)


@pytest.mark.parametrize("cls", [FedRepClassifier, FedPerClassifier, PPSGDNetClassifier])
def test_personal_layers_that_cannot_be_told(cls):
    refused(
        cls(recipe(Twofold), n_rounds=1),
        r"personal_layers='last' needs a module that ends with .*one\.weight, .*other\.bias",
    )
    refused(
        cls(recipe(Twofold), n_rounds=1, personal_layers=["head"]),
        r"personal_layers has 'head', which is no .*one\.weight",
    )
    X, y, groups = table()
    model = cls(recipe(Twofold), n_rounds=1, personal_layers=["other"]).fit(X, y, groups=groups)
    assert np.ptp(model.parameters_, axis=0).max() > 0


def test_clients_of_one_row_cannot_tell_how_well_a_net_adapts():
    X, y, groups = table(sizes=[1, 5, 6, 1])
    with pytest.warns(UserWarning, match=r"^2 of 4 clients have one row, .*needs two rows"):
        PerFedAvgClassifier(net_of(), n_rounds=1).fit(X, y, groups=groups)


class Zeros(nn.Linear):
    """Logits that are 0 at first."""

    def __init__(self):
        super().__init__(7, 3)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


def test_components_that_would_never_differ():
    refused(
        FedEMClassifier(recipe(MLP(7, 3)), n_rounds=1), "an instance, .*give the module's class"
    )
    refused(FedEMClassifier(recipe(Zeros), n_rounds=1), "same weights every time.*n_components=1")


def test_momentum_would_mix_adapted_nets_with_the_global_one():
    net = net_of(optimizer__momentum=0.9)
    refused(PerFedAvgClassifier(net, n_rounds=1), r"^optimizer__momentum=0\.9 .*leave it out")


@pytest.mark.parametrize(
    "model",
    [
        FedPerClassifier(recipe(Twofold), personal_layers=["head"]),
        FedEMClassifier(net_of(criterion=nn.MultiMarginLoss)),
        QuPeDClassifier(net_of(criterion=nn.MultiMarginLoss)),
        FedMutualClassifier(net_of(criterion=nn.MultiMarginLoss)),
        PerFedAvgClassifier(net_of(optimizer__momentum=0.9)),
    ],
    ids=lambda model: type(model).__name__,
)
def test_what_is_refused_without_data_is_not_charged(model, tmp_path):
    ledger = PrivacyLedger(tmp_path / "ledger.jsonl")
    refused(clone(model).set_params(ledger=ledger, **NOISE), "criterion|personal_layers|momentum")
    assert ledger.entries == []


def test_nothing_that_is_shared():
    names = [name for name, _ in Twofold().named_parameters()]
    model = FedPerClassifier(recipe(Twofold), personal_layers=names, **NOISE)
    refused(model, "personal_layers names all layers.*budget would be spent on nothing")


@pytest.mark.parametrize("cls", [FedRepClassifier, FedPerClassifier, PPSGDNetClassifier])
def test_a_last_layer_whose_outputs_nobody_can_read(cls):
    net = recipe(MLP, criterion=nn.MultiMarginLoss)
    refused(cls(net, n_rounds=1), "^personal_layers='last' cannot tell .*criterion=MultiMarginLoss")


def test_rounds_with_other_mixtures():
    X, y, groups = table()
    model = APFLClassifier(net_of(), n_rounds=1, warm_start=True, mixing=0.5)
    model.fit(X, y, groups=groups).set_params(n_rounds=2)
    with pytest.raises(ValueError, match=r"^mixing=1\.0 is not that of the rounds before"):
        model.set_params(mixing=1.0).fit(X, y, groups=groups)
    shares = model.set_params(mixing="adaptive").fit(X, y, groups=groups).mixing_
    assert (shares != 0.5).any()


def test_losses_that_are_no_means_of_rows():
    net = net_of(criterion__weight=torch.ones(3))
    refused(FedEMClassifier(net, n_rounds=1), "criterion=CrossEntropyLoss .*mean of losses of rows")


@pytest.mark.parametrize("cls", [FedRepClassifier, FedPerClassifier, PPSGDNetClassifier])
def test_rounds_with_other_personal_layers(cls):
    X, y, groups = table()
    model = cls(recipe(Twofold), n_rounds=1, warm_start=True, personal_layers=["one"])
    model.fit(X, y, groups=groups)
    model.set_params(n_rounds=2).fit(X, y, groups=groups)
    model.set_params(n_rounds=3, personal_layers=["other"])
    with pytest.raises(
        ValueError, match=r"^personal_layers=\['other'\] .* rounds before.*fit anew"
    ):
        model.fit(X, y, groups=groups)


@pytest.mark.parametrize("cls", [FedEMClassifier, AdaMixNetClassifier])
def test_rounds_with_other_components(cls):
    X, y, groups = table()
    model = cls(net_of(), n_rounds=1, warm_start=True).fit(X, y, groups=groups)
    model.set_params(n_components=3, n_rounds=2)
    with pytest.raises(ValueError, match="had 2 components, and these would have 3; fit anew"):
        model.fit(X, y, groups=groups)
