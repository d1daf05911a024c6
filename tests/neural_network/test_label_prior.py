"""Nets that are read through the clients' label frequencies."""

from functools import cache

import numpy as np
import pytest
from torch import nn

from pfl_sklearn import FedAvgClassifier, LocalNetClassifier
from pfl_sklearn.datasets import load_digits_clients
from pfl_sklearn.priors import DirichletPrior, SparseDirichletPrior
from tests.helpers.nets import N_CLASSES, N_INPUTS, Probabilities, recipe, table


class Scaled(nn.Linear):
    """A net whose outputs are half of its logits."""

    def forward(self, rows):
        return super().forward(rows) / 2


SHORT = {"n_rounds": 5, "local_steps": 3, "random_state": 0}
DIGITS = load_digits_clients(12, classes_per_client=3)
DATA = DIGITS.data, DIGITS.target
COUNTS = np.zeros((12, 10))
np.add.at(COUNTS, (DIGITS.groups, DIGITS.target), 1)


def fit(kind=FedAvgClassifier, groups=DIGITS.groups, **params):
    return kind(**{**SHORT, **params}).fit(*DATA, groups=groups)


@cache
def plain_fit(kind=FedAvgClassifier):
    """A fit without a prior, which no test changes."""
    return fit(kind)


def proba(model, groups=DIGITS.groups):
    return model.predict_proba(DIGITS.data, groups=groups)


def by_bayes(plain, prior):
    """Probabilities of a net, times the ratio of label frequencies, made to sum to 1."""
    own = np.exp(prior.log_frequencies(COUNTS))[DIGITS.groups]
    found = proba(plain) * own / prior.mean
    return found / found.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("prior", [DirichletPrior(), "client"])
def test_the_global_net_is_read_by_bayes_rule(prior):
    plain, model = plain_fit(), fit(label_prior=prior)
    np.testing.assert_array_equal(model.population_parameters_, plain.population_parameters_)
    fitted = (SparseDirichletPrior() if prior == "client" else prior).fit_counts(COUNTS)
    assert type(model.label_prior_) is type(fitted)
    np.testing.assert_allclose(model.label_prior_.mean, fitted.mean)
    np.testing.assert_allclose(proba(model), by_bayes(plain, fitted), rtol=1e-9, atol=1e-300)
    assert model.score(*DATA, groups=DIGITS.groups) > plain.score(*DATA, groups=DIGITS.groups) + 0.1


@pytest.mark.slow
def test_an_infinite_concentration_changes_nothing():
    """Up to its rounding: every client then has the population's label frequencies."""
    even = DirichletPrior(np.full(10, 0.1), 1e15)
    plain, model = fit(fine_tune_steps=2), fit(label_prior=even, fine_tune_steps=2)
    np.testing.assert_allclose(proba(model), proba(plain), rtol=1e-4)


def test_own_nets_are_trained_through_the_frequencies():
    """A net that is trained alone then leaves to them what they say already."""
    plain, model = plain_fit(LocalNetClassifier), fit(LocalNetClassifier, label_prior="client")
    first, second = (m.parameters_[:, -10:] for m in (plain, model))  # biases of the outputs
    seen = COUNTS > 0
    assert np.mean(first[seen]) - np.mean(first[~seen]) > 0.05
    assert abs(np.mean(second[seen]) - np.mean(second[~seen])) < 0.02


@pytest.mark.parametrize(
    ("net", "params"),
    [
        (recipe(), {"head": 1.0}),
        (recipe(), {"fine_tune_steps": 2}),
        (recipe(Probabilities, criterion=nn.NLLLoss), {}),
    ],
)
def test_a_net_that_a_client_takes_along_holds_its_frequencies(net, params):
    """Also for skorch alone, and on into a file."""
    X, y, groups = table()
    model = FedAvgClassifier(net, label_prior="client", **params, **SHORT).fit(X, y, groups=groups)
    before, own = model.for_client(4).parameters_.copy(), groups == 4
    mine = model.for_client(4)
    given = X[own].astype(model._engines.client.array_dtype)
    expected = mine.predict_proba(X[own])
    np.testing.assert_allclose(mine.net_.predict_proba(given), expected, atol=1e-5)
    np.testing.assert_array_equal(mine.parameters_, before)
    plain = model.net_.predict_proba(given)  # the population's
    assert np.abs(plain - expected).max() > 0.05


@pytest.mark.parametrize("net", [recipe(nn.Linear, module__bias=False), recipe(Scaled)])
def test_a_net_that_cannot_hold_frequencies_is_not_given(net):
    net = net.set_params(module__in_features=N_INPUTS, module__out_features=N_CLASSES)
    X, y, groups = table()
    model = FedAvgClassifier(net, label_prior="client", **SHORT).fit(X, y, groups=groups)
    mine = model.for_client(4)
    with pytest.raises(AttributeError, match=r"label_prior.*nn.Linear.*bias.*predict_proba"):
        mine.net_  # noqa: B018
    assert mine.predict_proba(X).shape == (len(X), N_CLASSES)
    assert model.net_.predict_proba(X.astype(np.float32)).shape == (len(X), N_CLASSES)


def test_with_noise_the_prior_is_known():
    noise = {"noise_multiplier": 1.0, "clip_norm": 1.0, "random_state": None}
    model = fit(label_prior="client", **noise)
    assert model.label_prior_.concentration == 10.0
    np.testing.assert_array_equal(model.label_prior_.mean, np.full(10, 0.1))
    assert not hasattr(model.release(), "_offsets")


@pytest.mark.parametrize("noise", [{}, {"noise_multiplier": 1.0, "clip_norm": 1.0}])
def test_a_prior_of_other_labels(noise):
    prior = DirichletPrior(np.full(5, 0.2), 5.0)
    with pytest.raises(ValueError, match=r"one number for each of 10 labels; got 5"):
        fit(label_prior=prior, **noise)


@pytest.mark.filterwarnings("ignore:partial_fit got rows of:UserWarning")
def test_later_rows_count_and_absent_clients_keep_theirs():
    model = fit(label_prior=DirichletPrior())
    rows = DIGITS.groups == 2
    model.partial_fit(DIGITS.data[rows], DIGITS.target[rows], groups=DIGITS.groups[rows])
    np.testing.assert_array_equal(model._label_counts, COUNTS)
    model.partial_fit(DIGITS.data[:5], DIGITS.target[:5], groups=[99] * 5)
    assert model._label_counts.shape == (13, 10)
    np.testing.assert_array_equal(model._label_counts[12].sum(), 5)
