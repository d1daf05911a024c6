"""Last layers of the clients' own, against scipy, quadrature and scikit-learn."""

import numpy as np
import pytest
import torch
from scipy.special import log_softmax
from sklearn.linear_model import LogisticRegression
from torch import nn

from pfl_sklearn.neural_network import MLP, FedAvgClassifier
from pfl_sklearn.neural_network._engine import _head
from pfl_sklearn.neural_network._engine._head import (
    VARIANCES,
    best_variances,
    evidence_curves,
    head_columns,
    head_modes,
    log_prior,
)
from pfl_sklearn.priors import DirichletPrior
from tests.helpers.fitted_rounds import state_of
from tests.helpers.net_fits import fit, proba
from tests.helpers.nets import SIZES, Convolutions, DoubleMLP, Normed, Probabilities, recipe, table

pytestmark = pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")

FEW = {"n_rounds": 2, "local_steps": 3, "random_state": 3}
NOISE = {"noise_multiplier": 1.0, "clip_norm": 0.3}
SHAPES = [(5, 3, 2), (20, 4, 3), (4, 12, 4), (3, 3, 4), (90, 5, 3)]  # n, r, K


def rows_of(n, r, n_classes, g=3):
    """Columns, logits and labels of clients; classes overlap."""
    rng = np.random.default_rng(n)
    x = rng.normal(size=(g, n, r))
    x[..., -1] = 1.0
    return x, rng.normal(size=(g, n, n_classes)), rng.integers(n_classes, size=(g, n))


def criterion(deviation, x, logits, labels, variance):
    """Log-likelihood less the penalty of one client's deviation (r, K)."""
    log_p = log_softmax(logits + x @ deviation, axis=1)
    fit = log_p[np.arange(len(x)), labels].sum()
    return fit - (deviation**2).sum() / (2 * variance)


def fitted(head="bayes", net=None, data=None, **params):
    X, y, groups = table() if data is None else data
    net = recipe() if net is None else net
    return FedAvgClassifier(net, head=head, **{**FEW, **params}).fit(X, y, groups=groups)


# Modes and evidence -------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", SHAPES)
def test_the_gradient_is_zero_at_a_mode(shape):
    """The objective is concave, so that this is the maximum."""
    x, logits, labels = rows_of(*shape)
    for variance in (1e-3, 0.05, 1.0, 300.0, 1e6):
        modes = head_modes(x, logits, labels, np.full(3, variance))[0]
        p = np.exp(log_softmax(logits + x @ modes, axis=2))
        slope = x.transpose(0, 2, 1) @ (np.eye(shape[2])[labels] - p)
        np.testing.assert_allclose(slope * variance, modes, atol=1e-5 * np.abs(modes).max())


@pytest.mark.parametrize("shape", SHAPES)
def test_the_evidence_is_laplaces(shape):
    """The Hessian by differences of the gradient."""
    (_, r, n_classes), variance = shape, 1.7
    x, logits, labels = rows_of(*shape)
    modes, evidence = head_modes(x, logits, labels, np.full(3, variance))

    def slope(i, flat):
        deviation = flat.reshape(r, n_classes)
        p = np.exp(log_softmax(logits[i] + x[i] @ deviation, axis=1))
        return (x[i].T @ (np.eye(n_classes)[labels[i]] - p) - deviation / variance).ravel()

    for i in range(3):
        at, step = modes[i].ravel(), 1e-5 * np.eye(r * n_classes)
        hessian = np.array([slope(i, at - e) - slope(i, at + e) for e in step]) / 2e-5
        value = criterion(modes[i], x[i], logits[i], labels[i], variance)
        expected = value - 0.5 * np.linalg.slogdet(variance * hessian)[1]
        np.testing.assert_allclose(evidence[i], expected, rtol=1e-7)


@pytest.mark.parametrize(("n", "variance"), [(6, 0.05), (60, 1.0)])
def test_the_evidence_is_close_to_the_marginal_likelihood(n, variance):
    """Two classes and one column: only the difference of the two deviations counts."""
    x, logits, labels = rows_of(n, 1, 2, g=1)
    nodes, shares = np.polynomial.hermite_e.hermegauss(200)
    values = []
    for node in nodes * np.sqrt(variance / 2):
        log_p = log_softmax(logits[0] + x[0] * np.array([-node, node]), axis=1)
        values.append(log_p[np.arange(n), labels[0]].sum())
    values = np.array(values)
    exact = values.max() + np.log(np.exp(values - values.max()) @ shares / shares.sum())
    found = head_modes(x, logits, labels, np.array([variance]))[1][0]
    assert found == pytest.approx(exact, abs=0.01)


@pytest.mark.parametrize("shape", [(4, 9, 3), (200, 3, 2)])
def test_curves_are_the_evidence_at_each_variance(shape):
    x, logits, labels = rows_of(*shape)
    first = slice(128)
    for at, variance in enumerate(VARIANCES):
        s = np.full(3, variance / shape[1])
        expected = head_modes(x[:, first], logits[:, first], labels[:, first], s)[1]
        np.testing.assert_allclose(evidence_curves(x, logits, labels)[:, at], expected, atol=1e-5)


def test_the_systems_in_rows_and_in_weights_agree(monkeypatch):
    x, logits, labels = rows_of(12, 7, 4)
    both = []
    for choice in (True, False):
        monkeypatch.setattr(_head, "_by_rows", lambda *given, choice=choice: choice)
        both.append(head_modes(x, logits, labels, np.array([0.0, 1.0, 50.0])))
    for first, second in zip(*both, strict=True):
        np.testing.assert_allclose(first, second, rtol=1e-8, atol=1e-10)


def test_no_variance_leaves_the_global_layer():
    x, logits, labels = rows_of(5, 8, 3)
    deviations, evidence = head_modes(x, logits, labels, np.zeros(3))
    assert not deviations.any()
    log_p = log_softmax(logits, axis=2)
    expected = np.take_along_axis(log_p, labels[..., None], axis=2).sum(axis=(1, 2))
    np.testing.assert_allclose(evidence, expected, rtol=1e-12)


def test_a_large_variance_is_an_unpenalized_logistic_regression():
    """Where classes overlap, so that one exists."""
    x, logits, labels = rows_of(90, 5, 3)
    found = head_modes(x, logits, labels, np.full(3, 1e9))[0]
    constant = np.zeros_like(logits)
    assert np.abs(found).max() < 100
    found = head_modes(x, constant, labels, np.full(3, 1e9))[0]
    for i in range(3):
        model = LogisticRegression(C=np.inf, fit_intercept=False, tol=1e-10, max_iter=1000)
        model.fit(x[i], labels[i])
        np.testing.assert_allclose(
            log_softmax(x[i] @ found[i], axis=1), model.predict_log_proba(x[i]), atol=1e-4
        )


def test_the_best_variance_lies_between_neighbours():
    logs = np.log(np.maximum(VARIANCES, 1e-9))
    curves = -((logs - np.array([[0.4], [2.5]])) ** 2)
    curves[:, 0] = -100
    np.testing.assert_allclose(np.log(best_variances(curves)), [0.4, 2.5], atol=1e-6)


def test_without_evidence_for_differences_the_variance_is_zero():
    falling = -np.arange(len(VARIANCES), dtype=float)[None]
    assert best_variances(falling) == 0
    assert best_variances(np.zeros((1, len(VARIANCES)))) == 0
    assert best_variances(-falling) == VARIANCES[-1]
    assert best_variances(np.zeros((1, len(VARIANCES))) + log_prior()) == pytest.approx(1.0)


def test_units_of_features_do_not_matter():
    rng = np.random.default_rng(0)
    features, labels = rng.normal(size=(2, 9, 4)), rng.integers(3, size=(2, 9))
    logits, found = rng.normal(size=(2, 9, 3)), []
    for scale in (1.0, 1e3):
        x, units = head_columns(scale * features, True)
        np.testing.assert_allclose(units, scale * np.sqrt((features**2).mean(axis=(1, 2))))
        found.append(head_modes(x, logits, labels, np.ones(2))[0])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-9)
    assert np.isfinite(head_columns(np.zeros((1, 2, 3)), False)[0]).all()


# The estimator ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("module", "label_prior"),
    [(DoubleMLP, None), (Probabilities, DirichletPrior(np.full(3, 1 / 3), 2.0))],
)
def test_a_clients_net_has_the_mode_as_its_last_layer(module, label_prior):
    """The gradient of the docstring's objective, by torch's own derivatives."""
    X, y, groups = table()
    criterion = nn.NLLLoss if module is Probabilities else nn.CrossEntropyLoss
    net = recipe(module, criterion=criterion)
    model = fitted(2.5, net, label_prior=label_prior)
    shared = model._population_copy().net_.module_.double()
    *_, start = (layer for layer in shared.modules() if isinstance(layer, nn.Linear))
    for i in model.clients_:
        rows, own = torch.from_numpy(X[groups == i]), model.for_client(i).net_.module_.double()
        features, read = [], [layer for layer in own.modules() if isinstance(layer, nn.Linear)][-1]
        read.register_forward_pre_hook(lambda _, given, seen=features: seen.append(given[0]))
        own(rows)
        logits, bias = read(features[0].detach()), read.bias
        if label_prior is not None:  # the net that a client takes along holds its frequencies
            bias = bias - torch.from_numpy(model._offsets[i])
        fit = nn.functional.cross_entropy(logits, torch.from_numpy(y[groups == i]), reduction="sum")
        square = features[0].detach().square().mean()
        distance = square * (read.weight - start.weight.detach()).square().sum()
        distance = distance + (bias - start.bias.detach()).square().sum()
        loss = fit + (read.in_features + 1) / (2 * 2.5) * distance
        slopes = torch.autograd.grad(loss, [read.weight, read.bias])
        assert max(float(slope.abs().max()) for slope in slopes) < 1e-5


def test_clients_share_the_variance_of_largest_evidence():
    model = fitted(n_rounds=1)
    assert len(set(model.head_variances_)) == 1
    evidence = state_of(model).phase_arrays["evidence"]
    assert model.head_variances_[0] == best_variances(evidence.sum(axis=0)[None])[0]
    assert model.head_variances_[0] > 0


def test_with_noise_clients_choose_by_their_own_rows():
    model = fitted(**NOISE)
    evidence = state_of(model).phase_arrays["evidence"]
    expected = best_variances(evidence + log_prior())
    np.testing.assert_array_equal(model.head_variances_, expected)
    assert len(set(model.head_variances_)) > 1
    assert "head_variances_" in model.privacy_.not_released


def test_the_label_prior_enters_the_head():
    """It explains labels that a head would otherwise have to explain."""
    prior = DirichletPrior(np.full(3, 1 / 3), 0.5)
    X, y, groups = table(sizes=np.full(8, 12))
    y = np.where(groups % 2, y % 2, 2 - y % 2)
    plain, corrected = (fitted(data=(X, y, groups), label_prior=p) for p in (None, prior))
    assert corrected.head_variances_[0] < plain.head_variances_[0]


@pytest.mark.filterwarnings("ignore:partial_fit got rows of:UserWarning")
def test_clients_without_rows_keep_how_they_deviate():
    X, y, groups = table()
    model = fitted()
    before, some = model._heads.copy(), groups < 3
    model.partial_fit(X[some], y[some], groups=groups[some])
    np.testing.assert_array_equal(model._heads[3:], before[3:])
    assert (model._heads[:3] != before[:3]).any()
    model.partial_fit(X[:5], y[:5], groups=np.full(5, 50))
    assert model._heads.shape == (len(SIZES) + 1, 3, 6)
    assert model.parameters_.shape[0] == len(SIZES) + 1


@pytest.mark.slow
def test_another_fit_forgets_what_clients_had():
    plain = fitted(None)
    for given in ({"head": 2.0}, {"fine_tune_steps": 2}, {"label_prior": "client"}):
        model = fit(fitted(None).set_params(**given))
        fit(model.set_params(head=None, fine_tune_steps=0, label_prior=None))
        np.testing.assert_array_equal(model.parameters_, plain.parameters_)
        expected = proba(plain)
        np.testing.assert_array_equal(proba(model), expected)
        assert not hasattr(model, "head_variances_")


@pytest.mark.parametrize(("module", "shape"), [(Normed, (7,)), (Convolutions, (1, 8, 8))])
def test_nets_that_run_client_by_client(module, shape):
    X, y, groups = data = table(shape)
    model = fitted(50.0, recipe(module), data)
    assert model.score(X, y, groups=groups) > fitted(None, recipe(module), data).score(
        X, y, groups=groups
    )
    own = model.for_client(4)
    rows = groups == 4
    np.testing.assert_array_equal(
        own.predict_proba(X[rows]), model.predict_proba(X[rows], groups=groups[rows])
    )


class Cut(nn.Sequential):
    """A net whose outputs are not those of its last linear layer."""

    def __init__(self):
        super().__init__(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3), nn.ReLU())


class Tied(nn.Sequential):
    """A net whose last layer has the weights of another one."""

    def __init__(self):
        super().__init__(nn.Linear(7, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
        self[2].weight = self[4].weight


class Frozen(nn.Sequential):
    """A net whose last layer is not trained."""

    def __init__(self):
        super().__init__(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3).requires_grad_(False))


@pytest.mark.parametrize("module", [Cut, Tied, Frozen])
def test_other_ends_of_a_module_are_refused(module):
    with pytest.raises(ValueError, match=r"head needs a module that ends with a .*Linear"):
        fitted(net=recipe(module))


@pytest.mark.parametrize(
    ("head", "params", "match"),
    [
        ("bayes", {"fine_tune_steps": 3}, r"head='bayes' and fine_tune_steps=3"),
        (-1.0, {}, "'head' parameter"),
        ("map", {}, "'head' parameter"),
        (np.inf, {}, "head"),
    ],
)
def test_other_heads_are_refused(head, params, match):
    with pytest.raises(ValueError, match=match):
        fitted(head, **params)


def test_a_layer_without_bias():
    class Plain(MLP):
        def __init__(self):
            super().__init__(7, 3, 5)
            self.layers[-1] = nn.Linear(5, 3, bias=False)

    model = fitted(3.0, recipe(Plain))
    assert model._heads.shape == (len(SIZES), 3, 5)
    assert model._heads.any()
