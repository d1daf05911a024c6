"""Rows and labels of all kinds, and the nets that are handed out."""

import tracemalloc
import warnings

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from skorch import NeuralNetBinaryClassifier, NeuralNetClassifier, NeuralNetRegressor
from torch import nn
from torch.nn import functional as F

from pfl_sklearn._rounds.rows import Block, ClientRows
from pfl_sklearn.neural_network import (
    MLP,
    AdaPeDClassifier,
    FedAvgClassifier,
    FedAvgRegressor,
    LocalNetClassifier,
    LocalNetRegressor,
)
from tests.helpers.nets import (
    Convolutions,
    DoubleMLP,
    Dropped,
    Embedded,
    Logit,
    Normed,
    Probabilities,
    batches_of_rounds,
    net_of,
    population_weights,
    recipe,
    table,
    trained,
    weights,
)
from tests.helpers.slow import slow

pytestmark = pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")

METHODS = {
    "fedavg": lambda net, **more: FedAvgClassifier(net, fine_tune_steps=5, **more),
    "local": LocalNetClassifier,
    "adaped": AdaPeDClassifier,
}


def fitted(method, net, X, y, groups, **more):
    given = {"n_rounds": 10, "local_steps": 3, "random_state": 0, **more}
    return METHODS[method](net, **given).fit(X, y, groups=groups)


KINDS = {
    "images": (recipe(Convolutions), (1, 8, 8)),
    "flattened images": (net_of(), (1, 8, 8)),
    "double precision": (recipe(DoubleMLP), (7,)),
    "dropout": (recipe(Dropped), (7,)),
    "running statistics": (recipe(Normed), (7,)),
    "probabilities": (recipe(Probabilities, criterion=nn.NLLLoss), (7,)),
    "class weights": (net_of(criterion__weight=torch.tensor([1.0, 2.0, 3.0])), (7,)),
    "all rows": (net_of(batch_size=-1), (7,)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "kind"),
    [*(("fedavg", kind) for kind in KINDS), ("local", "dropout"), ("adaped", "running statistics")],
)
def test_clients_nets(method, kind):
    """A client's net is a fitted skorch net that says what the estimator says."""
    net, shape = KINDS[kind]
    X, y, groups = table(shape)
    model = fitted(method, net, X, y, groups)
    probabilities = model.predict_proba(X, groups=groups)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, atol=1e-6)
    assert model.score(X, y, groups=groups) > 0.6
    for i in (0, 4):
        alone, own = model.for_client(i), groups == i
        given = X[own].astype(np.float64 if kind == "double precision" else np.float32)
        alone.net_.check_is_fitted()
        assert isinstance(alone.net_, NeuralNetClassifier)
        np.testing.assert_allclose(alone.net_.predict_proba(given), probabilities[own], atol=1e-5)
        np.testing.assert_allclose(alone.predict_proba(X[own]), probabilities[own], rtol=1e-12)
        np.testing.assert_array_equal(alone.net_.predict(given), alone.predict(X[own]))


def test_rows_of_integers_for_an_embedding():
    rng, (_, _, groups) = np.random.default_rng(0), table()
    X = rng.integers(0, 10, (len(groups), 2))
    y = X[:, 0] % 3
    model = fitted("fedavg", recipe(Embedded, lr=0.5), X, y, groups)
    assert model.score(X, y, groups=groups) > 0.7
    expected = model.predict_proba(X, groups=groups)
    np.testing.assert_array_equal(model.predict_proba(X.astype(float), groups=groups), expected)
    with pytest.raises(ValueError, match="whole numbers"):
        model.predict(X + 0.5, groups=groups)


def test_labels_that_are_strings():
    X, y, groups = table()
    names = np.array(["z", "a", "m"])[y]
    model = fitted("fedavg", net_of(), X, names, groups, n_rounds=2)
    assert model.classes_.tolist() == ["a", "m", "z"]
    expected = fitted("fedavg", net_of(), X, (y + 2) % 3, groups, n_rounds=2)  # alphabetically
    proba = model.predict_proba(X, groups=groups)
    np.testing.assert_array_equal(proba, expected.predict_proba(X, groups=groups))
    assert set(model.predict(X, groups=groups)) <= {"a", "m", "z"}
    rows = X[groups == 4].astype(np.float32)
    positions = model.for_client(4).net_.predict(rows)
    np.testing.assert_array_equal(model.classes_[positions], model.for_client(4).predict(rows))
    objects = fitted("fedavg", net_of(), X, names.astype(object), groups, n_rounds=2)
    np.testing.assert_array_equal(objects.predict_proba(X, groups=groups), proba)


@pytest.mark.slow
def test_two_classes_by_one_logit():
    X, y, groups = table()
    y = np.array(["no", "yes"])[(y == 0).astype(int)]
    net = NeuralNetBinaryClassifier(Logit, lr=0.1, batch_size=4)
    model = fitted("fedavg", net, X, y, groups)
    found = model.predict_proba(X, groups=groups)
    assert found.shape == (len(X), 2)
    np.testing.assert_allclose(found.sum(axis=1), 1)
    assert model.score(X, y, groups=groups) > 0.7
    own = X[groups == 4].astype(np.float32)
    alone = model.for_client(4)
    np.testing.assert_allclose(alone.net_.predict_proba(own), alone.predict_proba(own), atol=1e-6)
    words = model.classes_[alone.net_.predict(own).astype(int)]
    np.testing.assert_array_equal(words, alone.predict(own))
    with pytest.raises(ValueError, match="two classes"):
        fitted("fedavg", net, *table())


def test_one_logit_or_two():
    """One logit is the difference of two, so AdaPeD takes the same steps."""
    X, y, groups = table()
    y = (y == 0).astype(int)
    single = nn.Sequential(nn.Linear(7, 1), nn.Flatten(0)).double()
    double = nn.Linear(7, 2).double()
    with torch.no_grad():
        for name in ("weight", "bias"):
            values = getattr(single[0], name)
            getattr(double, name).copy_(torch.cat([0 * values, values]))
    settings = {"n_rounds": 3, "local_steps": 2, "random_state": 0, "psi_learning_rate": 0.0}
    one = AdaPeDClassifier(
        NeuralNetBinaryClassifier(single, lr=0.2, batch_size=4), psi_init=2.0, **settings
    )
    two = AdaPeDClassifier(recipe(double), psi_init=2.0, **settings)  # moves both by half
    found = [each.fit(X, y, groups=groups).predict_proba(X, groups=groups) for each in (one, two)]
    np.testing.assert_allclose(*found, atol=1e-9)


@pytest.mark.parametrize(
    ("module", "criterion", "options"),
    [
        (Probabilities, nn.NLLLoss, {}),
        (DoubleMLP, nn.CrossEntropyLoss, {"weight": torch.tensor([1.0, 2.0, 3.0]).double()}),
        (DoubleMLP, nn.CrossEntropyLoss, {"label_smoothing": 0.1}),
        (DoubleMLP, nn.MultiMarginLoss, {}),
    ],
)
def test_criteria(module, criterion, options):
    """As skorch reads them: logarithms of the outputs for NLLLoss."""
    (X, y, groups), module = table(sizes=[30]), module().double()
    given = {f"criterion__{name}": value for name, value in options.items()}
    net = recipe(module, criterion=criterion, **given)
    model = FedAvgClassifier(net, n_rounds=4, local_steps=5, random_state=0)
    model.fit(X, y, groups=groups)

    def loss(outputs, labels):
        if criterion is nn.NLLLoss:
            return F.nll_loss(torch.log(outputs), labels)
        return criterion(**options)(outputs, labels)

    expected, data = module, (torch.from_numpy(X), torch.from_numpy(y))
    for ((_, batches),) in batches_of_rounds(4, 0, 5, sizes=[30]):
        expected = trained(expected, batches, *data, criterion=loss, lr=0.1)
    np.testing.assert_allclose(population_weights(model), weights(expected), atol=1e-7)


@pytest.mark.parametrize(
    ("cls", "n_outputs"), [(FedAvgRegressor, 2), *slow([(LocalNetRegressor, 1)])]
)
@pytest.mark.slow
def test_nets_of_regressors(cls, n_outputs):
    """In the units of the responses."""
    X, _, groups = table()
    y = 1e3 + 50 * X[:, :n_outputs]
    y = y[:, 0] if n_outputs == 1 else y
    net = NeuralNetRegressor(MLP, module__hidden=(8,), lr=0.1, batch_size=4)
    model = cls(net, n_rounds=10, random_state=0).fit(X, y, groups=groups)
    found = model.predict(X, groups=groups)
    assert found.shape == y.shape
    assert model.score(X, y, groups=groups) > 0.9
    alone, own = model.for_client(4), groups == 4
    np.testing.assert_allclose(alone.predict(X[own]), found[own], rtol=1e-12)
    by_skorch = alone.net_.predict(X[own].astype(np.float32)).reshape(found[own].shape)
    np.testing.assert_allclose(by_skorch, found[own], rtol=1e-5)


# Nets that are handed out -------------------------------------------------------------------------
def test_skorch_goes_on_with_a_net():
    """It trains what was handed out, and nothing else."""
    X, y, groups = table()
    net = net_of(optimizer=torch.optim.Adam)
    model = FedAvgClassifier(net, n_rounds=2, local_steps=2, fine_tune_steps=1)
    before = model.fit(X, y, groups=groups).parameters_.copy()
    net = model.for_client(4).net_.set_params(max_epochs=2)
    net.partial_fit(X.astype(np.float32), y)
    assert (weights(net.module_) != before[4]).any()
    assert len(net.history_) == 2
    np.testing.assert_array_equal(model.parameters_, before)
    np.testing.assert_array_equal(weights(model.for_client(4).net_.module_), before[4])
    assert len(model.net_.history_) == 0


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("kind", "n_rounds", "sorted_rows"),
    [
        (np.uint8, 2, False),
        (np.uint8, None, True),
        (np.int16, 2, True),
        (np.float16, None, False),
        (">f4", 2, True),
        (bool, 2, False),
    ],
)
def test_types_that_fit_give_the_bits_of_a_conversion_before(kind, n_rounds, sorted_rows):
    rng = np.random.default_rng(0)
    groups = rng.integers(0, 4, 60)
    groups = np.sort(groups) if sorted_rows else groups
    X, y = rng.integers(0, 200, (60, 1, 8, 8)).astype(kind), rng.integers(0, 3, 60)
    model = FedAvgClassifier(recipe(Convolutions, lr=1e-4), local_steps=2, random_state=0)
    model.set_params(n_rounds=n_rounds, max_rounds=2 if n_rounds is None else 1000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        given, converted = (
            clone(model).fit(rows, y, groups=groups) for rows in (X, X.astype(np.float32))
        )
    assert given.population_parameters_.any()
    np.testing.assert_array_equal(given.population_parameters_, converted.population_parameters_)
    np.testing.assert_array_equal(given.history_["loss"], converted.history_["loss"])


def test_data_sets_of_torch_are_refused_with_what_to_give():
    X, y, groups = table()
    pairs = torch.utils.data.TensorDataset(torch.as_tensor(X), torch.as_tensor(y))
    model = FedAvgClassifier(recipe(DoubleMLP), n_rounds=1)
    with pytest.raises(ValueError, match=r"TensorDataset.*numpy\.stack"):
        model.fit(pairs, None, groups=groups)
    assert not hasattr(model, "population_parameters_")


def test_rows_in_another_order_of_memory_are_not_copied_for_a_batch():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 200, (500, 24, 24, 10)).astype(np.uint8).transpose(0, 3, 1, 2)
    rows = ClientRows(images, np.zeros(500), np.array([0, 500]), np.zeros(1, dtype=int), None)
    block = Block(np.zeros(1, int), np.zeros(1, int), rows, np.arange(4)[None], None)
    tracemalloc.start()
    batch = block.batch
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(batch.X[0], images[:4])
    assert peak < images.nbytes / 10
