"""Nets with more outputs than labels, and nets that list their classes."""

import numpy as np
import pytest
import torch
from scipy.special import softmax
from skorch import NeuralNetRegressor
from torch import nn

from pfl_sklearn.neural_network import MLP, AdaPeDClassifier, FedAvgClassifier, FedAvgRegressor
from tests.helpers.nets import recipe, refused, table

pytestmark = pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")

SHORT = {"n_rounds": 2, "local_steps": 2, "random_state": 0}
# Labels of the three classes, and their outputs in a net of five.
LABELS = {
    "floats": (np.array([0.0, 2.0, 3.0]), [0, 2, 3]),
    "strings": (np.array(["a", "b", "c"]), [0, 1, 2]),
}


def linear(n_outputs, **params):
    return recipe(nn.Sequential(nn.Linear(7, n_outputs)), **params)


def by_hand(net, X, columns):
    """Probabilities of the classes with these outputs, from a linear net."""
    weight, bias = (values.detach().numpy() for values in net.module_.parameters())
    return softmax((X @ weight.T + bias)[:, columns], axis=1)


@pytest.mark.parametrize("labels", LABELS)
def test_more_outputs_than_labels(labels):
    """A label that is the number of an output has this one; others have the first ones."""
    (X, y, groups), (names, columns) = table(), LABELS[labels]
    model = FedAvgClassifier(linear(5, lr=1.0), n_rounds=10, random_state=0)
    model.fit(X, names[y], groups=groups)
    np.testing.assert_array_equal(model.classes_, names)
    probabilities = model.predict_proba(X, groups=groups)
    np.testing.assert_allclose(probabilities, by_hand(model.net_, X, columns), rtol=1e-5)
    assert model.score(X, names[y], groups=groups) > 0.6
    # Training lowers what no label belongs to, from two fifths.
    assert by_hand(model.net_, X, range(5))[:, columns].sum(axis=1).mean() > 0.8
    assert model.net_.classes_.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "params",
    [
        {"label_prior": "client"},
        {"label_prior": "client", "head": "bayes"},
        {"label_prior": "client", "noise_multiplier": 1.0, "clip_norm": 0.3},
        {"label_prior": "client", "n_rounds": None, "max_rounds": 2, "fine_tune_steps": 1},
    ],
)
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_label_frequencies_with_spare_outputs(params):
    """They shift the outputs of their labels, in the client's net, too."""
    (X, y, groups), columns = table(), np.array([0, 1, 4])
    model = FedAvgClassifier(linear(5), **{**SHORT, **params}).fit(X, columns[y], groups=groups)
    assert model._offsets[:, [2, 3]].tolist() == np.zeros((8, 2)).tolist()
    assert np.ptp(model._offsets[:, columns]) > 0.1
    for i in (0, 4):
        alone, rows = model.for_client(i), X[groups == i]
        expected = by_hand(alone.net_, rows, columns)
        np.testing.assert_allclose(alone.predict_proba(rows), expected, rtol=1e-5)


def test_probabilities_with_spare_outputs():
    X, y, groups = table()
    module = nn.Sequential(nn.Linear(7, 5), nn.Softmax(-1))
    model = FedAvgClassifier(recipe(module, criterion=nn.NLLLoss), **SHORT)
    probabilities = model.fit(X, y, groups=groups).predict_proba(X, groups=groups)
    with torch.no_grad():
        given = model.net_.module_(torch.as_tensor(X, dtype=torch.float32))[:, :3].numpy()
    np.testing.assert_allclose(probabilities, given / given.sum(axis=1, keepdims=True), rtol=1e-5)


# Classes that the net lists -----------------------------------------------------------------------
def test_classes_that_the_net_lists():
    """In its order; those without rows are among the estimator's."""
    X, y, groups = table()
    names = np.array(["b", "c", "d"])
    net = linear(4, classes=["d", "c", "b", "a"], lr=1.0)
    model = FedAvgClassifier(net, n_rounds=5, random_state=0)
    model.fit(X, names[y], groups=groups)
    assert model.classes_.tolist() == ["a", "b", "c", "d"]
    probabilities = model.predict_proba(X, groups=groups)
    np.testing.assert_allclose(probabilities, by_hand(model.net_, X, [3, 2, 1, 0]), rtol=1e-5)
    assert probabilities[:, 0].mean() < 0.2
    positions = model.net_.predict(X.astype(np.float32))
    by_skorch = model.net_.classes_[positions]
    np.testing.assert_array_equal(by_skorch, model.predict(X, groups=groups))


def test_listed_classes_set_the_size_of_the_default_module():
    X, y, groups = table()
    listed = recipe(MLP, classes=[0, 1, 2, 3])
    model = FedAvgClassifier(listed, label_prior="client", **SHORT).fit(X, y, groups=groups)
    assert model.predict_proba(X, groups=groups).shape == (len(X), 4)
    assert np.isfinite(model.predict_proba(X, groups=groups)).all()


@pytest.mark.parametrize("classes", [[], [0], [0, 1, 1]])
def test_lists_of_classes_that_are_none(classes):
    refused(FedAvgClassifier(linear(3, classes=classes)), "^classes=.* two or more labels")


def test_labels_that_the_net_does_not_list():
    X, y, groups = table()
    refused(FedAvgClassifier(linear(3, classes=[0, 1])), "label 2, .*2 classes")
    refused(FedAvgClassifier(linear(2, classes=[0, 1, 2])), r"shape \(2,\).*3 outputs")
    model = FedAvgClassifier(linear(3, classes=[0, 1, 2]), **SHORT)
    with pytest.raises(ValueError, match=r"classes=\[0, 1\].*the net lists \[0, 1, 2\]"):
        model.partial_fit(X, y, [0, 1], groups=groups)
    model.partial_fit(X[y < 2], y[y < 2], [0, 1, 2], groups=groups[y < 2])
    model.partial_fit(X, y, groups=groups)
    assert model.classes_.tolist() == [0, 1, 2]


def test_nets_that_follow_each_other_have_the_same_outputs():
    model = AdaPeDClassifier(linear(4), global_estimator=linear(5))
    refused(model, r"estimator.*\(4,\).*global_estimator.*\(5,\)")
    model.set_params(global_estimator=linear(4, classes=[2, 1, 0]))
    refused(model, r"global_estimator has classes=\[2, 1, 0\] and estimator None")


def test_responses_need_as_many_outputs():
    X = table()[0]
    refused(FedAvgRegressor(NeuralNetRegressor(nn.Linear(7, 3))), "2 outputs", y=X[:, :2])
