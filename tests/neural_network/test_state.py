"""Nets, criteria and modules that remember, draw or fail: what they do stays with their client."""

import pickle
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from skorch import NeuralNetClassifier, NeuralNetRegressor
from skorch.callbacks import LRScheduler
from torch import nn

from pfl_sklearn._rounds.privacy import JointSum
from pfl_sklearn.neural_network import (
    MLP,
    AdaPeDClassifier,
    FedAvgClassifier,
    FedAvgRegressor,
    FedEMClassifier,
    LocalNetClassifier,
)
from tests.helpers.fitted_rounds import is_stacked
from tests.helpers.net_fits import fit
from tests.helpers.nets import recipe, table
from tests.helpers.neural_methods import CLASSIFIERS
from tests.helpers.slow import slow

pytestmark = pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")
SHORT = {"n_rounds": 2, "local_steps": 2, "random_state": 0}
NOISE = {"noise_multiplier": 1.0, "clip_norm": 0.3}


def others_differ(cls, net, **params):
    """Whether another client's net, or what is handed out with it, follows the rows of client 0."""
    X, y, groups = table()
    changed = np.where((groups == 0)[:, None], -3 * X, X)
    found = []
    for rows in (X, changed):
        model = cls(net, **SHORT, **params).fit(rows, y, groups=groups)
        own = model.for_client(1)
        found.append((own.parameters_, vars(own._engines.client.net.criterion_)))
    (first, state), (second, other) = found
    return bool(np.any(first != second)) or repr(state) != repr(other)


class Remembering(nn.CrossEntropyLoss):
    """A criterion that divides by a mean of the losses that it has seen."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, outputs, y):
        loss = super().forward(outputs, y)
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss / (1 + self.mean)


class Lasso(NeuralNetClassifier):
    """A net with a penalty, as skorch's documentation adds one, which keeps its latest loss."""

    def get_loss(self, y_pred, y_true, *args, **kwargs):
        loss = super().get_loss(y_pred, y_true, *args, **kwargs)
        self.latest_ = loss.item()
        return loss + 10.0 * sum(w.abs().sum() for w in self.module_.parameters())


class Telling(NeuralNetClassifier):
    """A net that notes its losses wherever it can, and whose loss follows what was noted."""

    def get_loss(self, y_pred, y_true, *args, **kwargs):
        loss = super().get_loss(y_pred, y_true, *args, **kwargs)
        holders = (self, self.module, self.module_, self.criterion, self.criterion_)
        own = [vars(each) for each in holders] + [self.optimizer_.defaults]
        notes = [self.history, self.callbacks_, *(each.setdefault("notes", []) for each in own)]
        told = sum(float(note.removeprefix("taint ")) for place in notes for note in place)
        for place in notes:
            place.append(f"taint {loss.item()}")
        return loss * (1 + told)


def telling():
    """Its module and its criterion are instances, which the net holds twice."""
    return Telling(MLP(7, 3, 4), criterion=nn.CrossEntropyLoss(), lr=0.01, batch_size=4)


class SometimesDropped(nn.Module):
    """A net that drops out where rows are large, which no pass of zeros shows."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(7, 3)

    def forward(self, X):
        return self.last(nn.functional.dropout(X, 0.5) if X.abs().max() > 1 else X)


class Mixing(nn.Sequential):
    """A net whose rows are not independent of one another."""

    def __init__(self):
        super().__init__(nn.Linear(7, 3), nn.LogSoftmax(dim=0))


class Picky(nn.Module):
    """A net that refuses large rows."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(7, 4), nn.Linear(4, 3)

    def forward(self, X):
        if X.abs().max() > 1e5:
            raise AssertionError(f"too large: {X.abs().max()}")
        return self.last(torch.relu(self.first(X)))


class Renormed(nn.Module):
    """A net that changes its own parameters in its forward pass."""

    def __init__(self):
        super().__init__()
        self.embedding, self.last = nn.Embedding(40, 4, max_norm=1.0), nn.Linear(4, 3)

    def forward(self, X):
        return self.last(self.embedding(X).mean(dim=1))


@pytest.mark.parametrize(
    "net",
    [
        recipe(MLP, criterion=Remembering),
        recipe(SometimesDropped),
        recipe(Mixing),
        Lasso(MLP, criterion=nn.CrossEntropyLoss, lr=0.01, batch_size=4),
        telling(),
    ],
    ids=["criterion", "dropout", "mixing", "net", "history"],
)
def test_clients_that_train_alone_do_not_affect_one_another(net):
    torch.manual_seed(5)
    assert not others_differ(LocalNetClassifier, net, **NOISE)


@pytest.mark.parametrize(
    ("cls", "net"),
    [
        (FedAvgClassifier, recipe(MLP)),
        *slow(
            (cls, recipe(MLP))
            for cls in CLASSIFIERS
            if cls not in (FedAvgClassifier, LocalNetClassifier)
        ),
        (FedAvgClassifier, telling()),
        *slow([(AdaPeDClassifier, telling())]),
    ],
)
def test_labels_of_a_client_change_its_own_messages_alone(cls, net, monkeypatch):
    X, y, groups = table()
    sent, release = [], JointSum.release

    def noting(self, messages, *given):
        sent.append({name: np.array(part) for name, part in messages.items()})
        return release(self, messages, *given)

    monkeypatch.setattr(JointSum, "release", noting)
    for labels in (y, np.where(groups == 0, (y + 1) % 3, y)):
        model = cls(net, **{**SHORT, "n_rounds": 1}, **NOISE).fit(X, labels, groups=groups)
        assert is_stacked(model) == (type(net) is not Telling)
    first, second = sent
    assert any(np.any(first[name][0] != second[name][0]) for name in first)
    for name in first:
        np.testing.assert_array_equal(first[name][1:], second[name][1:])


@pytest.mark.parametrize("cls", [AdaPeDClassifier, *slow([FedAvgClassifier, LocalNetClassifier])])
def test_what_a_net_notes_of_clients_is_in_no_model_that_is_handed_out(cls):
    model = fit(cls(telling(), epsilon=5.0, clip_norm=0.3, **SHORT))
    for handed_out in (model.release(), model.for_client(1)):
        assert b"taint" not in pickle.dumps(handed_out)


@pytest.mark.parametrize("net", [None, recipe(MLP)], ids=["default", "given"])
def test_the_report_says_what_the_clients_nets_share(net):
    report = fit(FedAvgClassifier(net, **SHORT, **NOISE)).privacy_
    assert any("hooks" in text for text in report.assumptions) == (net is not None)


def test_a_penalty_is_on_the_net_that_is_trained():
    sizes = []
    for kind in (NeuralNetClassifier, Lasso):
        net = kind(MLP, criterion=nn.CrossEntropyLoss, lr=0.004, batch_size=4)
        model = fit(FedAvgClassifier(net, **{**SHORT, "n_rounds": 5}))
        sizes.append(np.abs(model.population_parameters_).sum())
    assert sizes[1] < 0.5 * sizes[0]


@pytest.mark.parametrize("cls", [FedAvgClassifier, *slow([LocalNetClassifier, FedEMClassifier])])
def test_a_module_may_refuse_the_rows_of_a_client_under_noise(cls):
    X, y, groups = table()
    X[groups == 2] *= 1e7
    with pytest.raises(AssertionError, match="too large"):
        cls(recipe(Picky), **SHORT).fit(X, y, groups=groups)
    with pytest.warns(RuntimeWarning, match="AssertionError"):
        model = cls(recipe(Picky), **SHORT, **NOISE).fit(X, y, groups=groups)
    assert np.isfinite(model.population_parameters_).all()


class PickyLater(Picky):
    """It refuses large rows where it is not trained."""

    def forward(self, X):
        return self.last(torch.relu(self.first(X))) if self.training else super().forward(X)


FAILURES = {
    "rounds": (FedAvgClassifier, Picky, {}),
    "last phase": (
        FedAvgClassifier,
        Picky,
        {"fine_tune_steps": 1, "client_fraction": 1e-6, "noise_multiplier": 20.0},
    ),
    "head": (FedAvgClassifier, PickyLater, {"head": "bayes"}),
    "noisy steps": (AdaPeDClassifier, Picky, {"noise": "per_step"}),
}


@pytest.mark.parametrize(
    ("name", "n_jobs"),
    [("rounds", 1), *slow([("head", 1), ("noisy steps", 1), ("rounds", 2), ("last phase", 1)])],
)
def test_a_failure_under_noise_is_reported_by_its_class_alone(name, n_jobs):
    """Neither the values that it names, nor whose they are, nor how many clients failed."""
    X, y, groups = table()
    cls, module, params = FAILURES[name]
    model, texts = cls(recipe(module), n_jobs=n_jobs, **SHORT, **{**NOISE, **params}), set()
    for failing in ([2], [3, 5]):
        spoilt = np.where(np.isin(groups, failing)[:, None], 1e7, X)
        with pytest.warns(RuntimeWarning) as record:
            model.fit(spoilt, y, groups=groups)
        (warning,) = (each for each in record if each.category is RuntimeWarning)
        texts.add(str(warning.message))
    (text,) = texts
    assert "AssertionError" in text
    assert "too large" not in text
    assert not any(character.isdigit() and character != "0" for character in text)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        model.set_params(n_jobs=1).fit(X, y, groups=groups)  # what failed before is forgotten


@pytest.mark.parametrize("head", ["bayes", 1.0])
def test_a_client_whose_rows_are_refused_keeps_the_global_last_layer(head):
    X, y, groups = table()
    spoilt = np.where((groups == 2)[:, None], 1e7, X)
    found = []
    for rows, warned in ((X, nullcontext()), (spoilt, pytest.warns(RuntimeWarning))):
        model = FedAvgClassifier(recipe(Picky), head=head, **SHORT, **NOISE)
        with warned:
            model.fit(rows, y, groups=groups)
        found.append(model.parameters_ - model.population_parameters_)
    at = model.clients_ == 2
    assert np.all(found[1][at] == 0)
    assert np.any(found[0][at] != 0)
    assert np.isfinite(found[1]).all()
    assert np.all(np.abs(found[1][~at]).max(axis=1) > 0)


def test_a_criterion_may_refuse_the_targets_of_a_client_under_noise():
    X, _, groups = table()
    y = (groups % 2).astype(float)
    y[0] = 1.01
    module = nn.Sequential(nn.Linear(7, 1), nn.Sigmoid())
    net = NeuralNetRegressor(module, criterion=nn.BCELoss, lr=0.1, batch_size=4)
    model = FedAvgRegressor(net, **SHORT, **NOISE)
    with pytest.warns(RuntimeWarning, match="RuntimeError"):
        model.fit(X, y, groups=groups)
    assert np.isfinite(model.population_parameters_).all()


def test_steps_with_noise_ignore_what_a_forward_pass_changes():
    """Norms of embeddings would tell which of them a client looked up."""
    _, y, groups = table()
    X = np.random.default_rng(0).choice([3, 17, 29], (len(y), 3))
    model = AdaPeDClassifier(recipe(Renormed), noise="per_step", **SHORT, **NOISE)
    model.fit(X, y, groups=groups)
    norms = np.linalg.norm(model.population_parameters_[:160].reshape(40, 4), axis=1)
    assert norms[[3, 17, 29]].min() > 1.01


@pytest.mark.parametrize("cls", [FedAvgClassifier, *slow([AdaPeDClassifier])])
def test_rounds_with_noise_go_on_whatever_the_numbers_of_rows(cls):
    X, y, groups = table()
    model = cls(recipe(MLP), **SHORT, **NOISE)
    for _ in range(3):
        model.partial_fit(X, y, groups=groups)
    assert model.n_rounds_ == 6


def test_the_last_rate_is_that_after_the_rounds():
    """It must not follow the number of rows of the largest client, as the rounds of a pass do."""
    X, y, groups = table()
    more = np.flatnonzero(groups == 5).repeat(100)
    rows = np.concatenate([np.arange(len(y)), more])
    schedule = LRScheduler(policy="StepLR", step_size=5, gamma=0.1)
    net = recipe(MLP, callbacks=[schedule], module__hidden=3)
    moved = []
    for some in (np.arange(len(y)), rows):
        model = FedAvgClassifier(net, fine_tune_steps=20, **SHORT, **NOISE)
        model.fit(X[some], y[some], groups=groups[some])
        moved.append(np.abs(model.for_client(0).parameters_ - model.population_parameters_).max())
    assert moved[1] > 0.1 * moved[0]


def test_a_prior_must_say_that_it_is_known():
    class Silent:
        mean = np.full(3, 1 / 3)

        def fit_counts(self, counts):
            return self

        def log_frequencies(self, counts):
            return np.zeros_like(counts)

    with pytest.raises(ValueError, match="noise does not cover"):
        fit(FedAvgClassifier(label_prior=Silent(), **SHORT, **NOISE))


def test_noise_stays_where_it_is():
    model = AdaPeDClassifier(recipe(MLP), warm_start=True, **SHORT, **NOISE)
    fit(model)
    model.set_params(noise="per_step", n_rounds=4)
    with pytest.raises(ValueError, match="had their noise on the sum"):
        fit(model)
