"""Modules that name a type in their forward pass, and modules that keep statistics of rows."""

import numpy as np
import pytest
import torch
from torch import nn

from pfl_sklearn.neural_network import (
    AdaPeDClassifier,
    FedAvgClassifier,
    FedEMClassifier,
    LocalNetClassifier,
)
from pfl_sklearn.privacy import PrivacyLedger
from tests.helpers.net_fits import fit, proba
from tests.helpers.nets import recipe, refused, table
from tests.helpers.slow import slow

pytestmark = pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")

SHORT = {"n_rounds": 2, "local_steps": 2, "random_state": 0}
NOISE = {"noise_multiplier": 1.0, "clip_norm": 0.3}
METHODS = [FedAvgClassifier, FedEMClassifier]  # a net, and a mixture of nets


def pairs(values):
    """One method with all values, and others, whose nets come about otherwise, with the first."""
    several = [(FedAvgClassifier, value) for value in values]
    others = slow((cls, values[0]) for cls in (AdaPeDClassifier, LocalNetClassifier))
    return [*several, (FedEMClassifier, values[0]), *others]


# Types of numbers ---------------------------------------------------------------------------------
class Single(nn.Module):
    """Logits in single precision, whatever the rows are in."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(7, 3)

    def forward(self, X):
        return self.last(X.float())


class OneHot(nn.Module):
    """Looks the sign of the first number up, by indicators."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(9, 3)

    def forward(self, X):
        signs = nn.functional.one_hot((X[:, 0] > 0).long(), 2).float()
        return self.last(torch.cat([signs, X.float()], dim=1))


class Recurrent(nn.Module):
    """Starts from a hidden state of zeros."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.GRU(1, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, X):
        state = torch.zeros(1, len(X), 3)
        return self.last(self.first(X[:, :, None], state)[0][:, -1])


class Autocast(Single):
    """Logits of type bfloat16."""

    def forward(self, X):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.last(X)


NAMING = [OneHot, Recurrent, Autocast]


@pytest.mark.parametrize(("cls", "module"), pairs(NAMING))
def test_what_is_trained_also_predicts(cls, module):
    """In the net's own precision, where double precision is not what the module takes."""
    X, y, groups = table()
    model = cls(recipe(module), **SHORT).fit(X, y, groups=groups)
    probabilities = model.predict_proba(X, groups=groups)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, atol=1e-6)
    own = groups == 4
    alone = model.for_client(4)
    np.testing.assert_allclose(alone.predict_proba(X[own]), probabilities[own], atol=1e-6)
    if module is not Autocast:  # of whose outputs skorch cannot make an array
        by_skorch = alone.net_.predict_proba(X[own].astype(np.float32))
        np.testing.assert_allclose(by_skorch, probabilities[own], atol=1e-6)


@pytest.mark.parametrize(
    ("module", "params"), [(Recurrent, {"n_rounds": None, "max_rounds": 3}), (Autocast, NOISE)]
)
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_what_is_trained_also_predicts_for_the_population(module, params):
    X, y, groups = table()
    model = FedAvgClassifier(recipe(module), unseen="population", **{**SHORT, **params})
    probabilities = model.fit(X, y, groups=groups).predict_proba(X, groups=groups + 100)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, atol=1e-6)


def test_last_layers_of_modules_that_name_a_type():
    model = fit(FedAvgClassifier(recipe(OneHot), head="bayes", **SHORT))
    assert np.isfinite(proba(model)).all()


class NoEvaluation(nn.Linear):
    """A module that can only be trained."""

    def __init__(self):
        super().__init__(7, 3)

    def forward(self, X):
        if not self.training:
            raise NotImplementedError("no evaluation")
        return super().forward(X)


class Squeezed(nn.Linear):
    """A module whose output for one row has no axis of rows."""

    def __init__(self):
        super().__init__(7, 3)

    def forward(self, X):
        return super().forward(X).squeeze()


class Typed(nn.Linear):
    """Logits by parameters of a type."""

    def __init__(self, dtype):
        super().__init__(7, 3, dtype=dtype)


class OfTwoTypes(nn.Module):
    """A module with parameters of two types."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(7, 4), nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, X):
        return self.last(self.first(X).double())


def unread(outputs):
    """A reading of outputs that fails."""
    raise TypeError("no reading")


REFUSED = {
    "no evaluation": (recipe(NoEvaluation), "cannot predict for a row.*no evaluation"),
    "no axis of rows": (recipe(Squeezed), r"shape \(3,\) for 1 row.*\(1, 3\)"),
    "no reading": (recipe(Single, predict_nonlinearity=unread), "cannot predict.*no reading"),
    "bfloat16": (recipe(Typed, module__dtype=torch.bfloat16), "bfloat16.*float32"),
    "two types": (recipe(OfTwoTypes), "float32 and float64"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_predict_is_refused_before_anything_is_charged(kind, tmp_path):
    net, match = REFUSED[kind]
    ledger = PrivacyLedger(tmp_path / "ledger.jsonl")
    for cls in METHODS:
        for more in ({}, NOISE):
            refused(cls(net, ledger=ledger, **more), match)
    assert ledger.entries == []


def test_half_precision():
    net = recipe(Typed, module__dtype=torch.float16)
    model = fit(FedAvgClassifier(net, **SHORT))
    assert model.population_parameters_.shape == (24,)
    np.testing.assert_allclose(proba(model).sum(axis=1), 1)


# Statistics of rows -------------------------------------------------------------------------------
class Centred(nn.Module):
    """Subtracts a running mean of the rows, which starts at 0, in place or by assignment."""

    def __init__(self, in_place=False):
        super().__init__()
        self.in_place, self.last = in_place, nn.Linear(7, 3)
        self.register_buffer("mean", torch.zeros(7))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, X):
        if self.training:
            mean = 0.5 * self.mean + 0.5 * X.mean(0)
            if self.in_place:
                self.mean.copy_(mean)
                self.count.add_(1)
            else:
                self.mean, self.count = mean, self.count + 1
        return self.last(X - self.mean)


class Scaled(Centred):
    """Divides by a running mean, which the gradient needs, before it assigns the next one."""

    def forward(self, X):
        scaled = self.last(X) / (1 + self.mean[:3])
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * X.mean(0)
        return scaled


class InAnAttribute(nn.Module):
    """Keeps the running mean in a plain attribute."""

    def __init__(self):
        super().__init__()
        self.mean, self.last = torch.zeros(7), nn.Linear(7, 3)

    def forward(self, X):
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * X.mean(0).detach()
        return self.last(X - self.mean)


class Noting(nn.Module):
    """Notes its latest outputs, which nothing depends on."""

    def __init__(self):
        super().__init__()
        self.last, self.latest = nn.Linear(7, 3), None

    def forward(self, X):
        self.latest = self.last(X)
        return self.latest


def buffer_of(net):
    return net.module_.mean.numpy()


@pytest.mark.parametrize(("cls", "in_place"), pairs([False, True]))
def test_running_means_that_start_at_zero(cls, in_place):
    """Rows around 5 move them towards 5, for clients and the population."""
    X, y, groups = table()
    net = recipe(Centred, module__in_place=in_place)
    model = cls(net, n_rounds=3, local_steps=3, random_state=0).fit(X + 5, y, groups=groups)
    if cls is FedEMClassifier:
        kept = model.population_parameters_[2 + 2 * 24 :]  # after the weights and all parameters
    else:
        kept = np.stack([buffer_of(model.for_client(i).net_) for i in (0, 4)])
    assert (kept > 4).all()
    assert (kept < 6).all()


def test_a_running_mean_is_averaged_like_parameters():
    """By hand: one client, two steps, and the same rows in each of them."""
    X, y, groups = table(sizes=[4])
    for net in (recipe(Centred), recipe(Centred, module__in_place=True), recipe(Scaled)):
        model = FedAvgClassifier(net, **SHORT).fit(X, y, groups=groups)
        expected = (1 - 0.5**4) * X.astype(np.float32).mean(0)
        np.testing.assert_allclose(buffer_of(model.net_), expected, rtol=1e-5, atol=1e-7)


def test_the_gradient_is_that_of_the_buffer_before():
    """As in a bare loop of torch, in which nothing writes over what the gradient needs."""
    X, y, groups = table(sizes=[4])
    model = FedAvgClassifier(recipe(Scaled, batch_size=-1), **SHORT)
    start = model.fit(X, y, groups=groups)._engines.client.net.module_
    module, rows = Scaled(), torch.as_tensor(X, dtype=torch.float32)
    module.load_state_dict(start.state_dict())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(rows), torch.as_tensor(y)).backward()
        optimizer.step()
    fitted = model.net_.module_.state_dict()
    for name, values in module.state_dict().items():
        np.testing.assert_allclose(fitted[name], values, atol=1e-6)


def test_statistics_that_rounds_cannot_average():
    for cls in METHODS:
        refused(cls(recipe(InAnAttribute), n_rounds=1), r"predicts otherwise.*register_buffer")


@pytest.mark.parametrize("module", [Centred, InAnAttribute])
def test_no_statistics_with_noise(module, tmp_path):
    ledger = PrivacyLedger(tmp_path / "ledger.jsonl")
    for cls in METHODS:
        refused(cls(recipe(module), ledger=ledger, **NOISE), "mean|predicts otherwise")
    assert ledger.entries == []


@pytest.mark.parametrize("given", [{}, NOISE])
def test_notes_that_nothing_depends_on(given):
    model = fit(FedAvgClassifier(recipe(Noting), **SHORT, **given))
    assert np.isfinite(proba(model)).all()
