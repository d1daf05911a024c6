"""Clients who come after the rounds: their own part, against a population model that stays."""

import copy
import pickle
import warnings

import numpy as np
import pytest
from scipy.sparse import csr_array

from pfl_sklearn import PPSGDClassifier, PPSGDRegressor
from pfl_sklearn.privacy import PrivacyLedger
from tests.helpers.torch import WITHOUT_TORCH

if not WITHOUT_TORCH:
    import torch

    from pfl_sklearn.datasets import load_digits_clients
    from pfl_sklearn.neural_network import (
        AdaPeDClassifier,
        DittoClassifier,
        FedAvgClassifier,
        ScaffoldClassifier,
    )
needs_torch = pytest.mark.skipif(WITHOUT_TORCH, reason="without torch")
RNG = np.random.default_rng(0)
GROUPS = np.repeat(np.arange(12), 10)
X = RNG.normal(size=(120, 3))
Y = X @ [1.0, 2.0, 0.0] + GROUPS / 3 * X[:, 0]
LABELS = (Y > 0).astype(int)
NEW = GROUPS >= 9
SHORT = {"n_rounds": 4, "local_steps": 3, "random_state": 0}


def fitted(model, y=LABELS, rows=X):
    return model.fit(rows[~NEW], y[~NEW], groups=GROUPS[~NEW])


def personalized(model, y=LABELS, rows=X):
    return model.personalize(rows[NEW], y[NEW], groups=GROUPS[NEW])


@pytest.mark.parametrize(
    ("form", "params"), [(np.asarray, {}), (csr_array, {"learning_rate": 0.1})]
)
def test_new_clients_of_ppsgd_come_to_fit_their_rows(form, params):
    rows = form(X)
    model = fitted(PPSGDRegressor(n_rounds=150, random_state=0, **params), Y, rows)
    own = GROUPS[NEW]
    model.set_params(unseen="population")
    before = np.mean((model.predict(rows[NEW], groups=own) - Y[NEW]) ** 2)
    personalized(model, Y, rows)
    after = np.mean((model.predict(rows[NEW], groups=own) - Y[NEW]) ** 2)
    assert after < 0.2 * before
    known = np.mean((model.predict(rows[~NEW], groups=GROUPS[~NEW]) - Y[~NEW]) ** 2)
    assert known < 1  # they still have their models


@pytest.mark.parametrize("average", [False, True])
def test_a_client_takes_the_steps_by_hand(average):
    """Gradient steps of the local model alone, on all rows, at the weights of the fit."""
    params = {"learning_rate": 0.1, "batch_size": None, "fit_intercept": False, "alpha": 0.1}
    model = PPSGDRegressor(n_rounds=7, average=average, random_state=0, **params)
    fitted(model, Y)
    w, rows, y = model._server["coef"][:, 0], X[GROUPS == 9][:4], Y[GROUPS == 9][:4]
    model.personalize(rows, y, groups=np.full(4, 9))
    theta, seen = np.zeros(3), []
    for _ in range(7):  # alpha * 9 clients = 0.9: the local step is the larger one
        theta = theta - 0.1 / 10 * rows.T @ (rows @ (w + theta) - y)  # 10 rows: the fit's batch
        seen.append(theta)
    # The average iterate is that after each round, with the start in place of the last one.
    expected = np.mean([np.zeros(3), *seen[:-1]], axis=0) if average else theta
    np.testing.assert_allclose(model.local_coef_[-1], expected, rtol=1e-9)


def test_rounds_that_go_on_forget_personalized_clients():
    plain = fitted(PPSGDClassifier(n_rounds=5, warm_start=True, random_state=0))
    other = personalized(copy.deepcopy(plain))
    assert len(other.clients_) == 12
    for model in (plain, other):
        model.partial_fit(X[GROUPS < 6], LABELS[GROUPS < 6], groups=GROUPS[GROUPS < 6])
    np.testing.assert_array_equal(other.clients_, plain.clients_)
    np.testing.assert_array_equal(other.coef_, plain.coef_)
    assert not any("personalize" in name for name in other.privacy_.not_released)
    for model in (plain, personalized(other)):
        fitted(model.set_params(n_rounds=20))
    np.testing.assert_array_equal(other.coef_, plain.coef_)


def test_a_private_fit_spends_nothing_at_home(tmp_path):
    ledger = PrivacyLedger(tmp_path / "ledger.jsonl")
    noise = {"clip_norm": 1.0, "learning_rate": 0.1, "epsilon": 1.0, "delta": 1e-4}
    model = fitted(PPSGDClassifier(n_rounds=5, ledger=ledger, **noise))
    spent, written = model.privacy_.epsilon, (tmp_path / "ledger.jsonl").read_bytes()
    home = model.release()
    assert set(home._server) == {"coef"}
    home.personalize(X[GROUPS == 9], LABELS[GROUPS == 9])
    assert home.clients_.tolist() == [0]
    assert home.predict(X[GROUPS == 9]).shape == (10,)
    personalized(model)
    assert home.privacy_.epsilon == model.privacy_.epsilon == spent
    assert (tmp_path / "ledger.jsonl").read_bytes() == written
    assert not hasattr(model.release(), "clients_")


def test_a_client_goes_on_with_its_model_at_home():
    model = fitted(PPSGDClassifier(n_rounds=20, random_state=0))
    home = model.for_client(3).set_params(random_state=0)
    rows = GROUPS == 4
    home.personalize(X[rows], LABELS[rows])
    model.personalize(X[rows], LABELS[rows], groups=np.full(10, 3))
    assert home.clients_.tolist() == [3]
    np.testing.assert_array_equal(home.coef_[0], model.coef_[3])


@pytest.mark.parametrize(
    ("rows", "labels", "groups", "message"),
    [
        (X[:4], [0, 1, 2, 1], [20] * 4, "the label 2"),
        (X[:4, :2], LABELS[:4], [20] * 4, "2 features.*3 features"),
        (X[:4], LABELS[:4], None, "knows 9 clients; pass groups="),
        (X[:4], LABELS[:3], [20] * 4, "inconsistent numbers"),
        (X[:4], LABELS[:4], ["a"] * 4, "groups"),
        (X[:4], LABELS[:4], [20] * 3, "3 ids, but X has 4 rows"),
    ],
)
def test_bad_input(rows, labels, groups, message):
    model = fitted(PPSGDClassifier(n_rounds=3, random_state=0))
    before = dict(vars(model))
    with pytest.raises(ValueError, match=message):
        model.personalize(rows, labels, groups=groups)
    assert vars(model) == before


def test_partial_fit_warns_of_few_clients():
    model = fitted(PPSGDClassifier(n_rounds=3, random_state=0))
    few, many = GROUPS < 4, GROUPS < 5
    with pytest.warns(UserWarning, match="4 clients after a fit of 9.*personalize"):
        model.partial_fit(X[few], LABELS[few], groups=GROUPS[few])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.partial_fit(X[many], LABELS[many], groups=GROUPS[many])


@needs_torch
def test_methods_whose_clients_keep_nothing_say_so():
    for cls in (FedAvgClassifier, ScaffoldClassifier):
        with pytest.raises(ValueError, match="keep nothing of their own"):
            personalized(fitted(cls(**SHORT)))
    released = fitted(FedAvgClassifier(**SHORT))
    with pytest.raises(ValueError, match="changed since fit"):
        personalized(released.set_params(fine_tune_steps=3))


@needs_torch
@pytest.mark.parametrize("fraction", [1.0, 0.3])
def test_steps_have_the_learning_rates_of_rounds_spread_over_the_fit(monkeypatch, fraction):
    model = fitted(DittoClassifier(n_rounds=10, client_fraction=fraction, random_state=0))
    rounds, method = [], DittoClassifier._method

    def watched(self, setup):
        plain = method(self, setup)

        def update(server, t, batch, clients):
            rounds.append(t)
            return plain.client_update(server, t, batch, clients)

        return plain._replace(client_update=update)

    monkeypatch.setattr(DittoClassifier, "_method", watched)
    model.personalize(X[:5], LABELS[:5], groups=[20] * 5)
    assert rounds == (list(range(10)) if fraction == 1 else [1, 5, 8])


@needs_torch
def test_label_frequencies_are_the_clients_and_their_prior_the_populations():
    model = fitted(FedAvgClassifier(label_prior="client", **SHORT))
    prior = model.label_prior_
    personalized(model)
    assert model.label_prior_ is prior
    counts = np.array([np.bincount(LABELS[each == GROUPS], minlength=2) for each in (9, 10, 11)])
    expected = prior.log_frequencies(counts.astype(float)) - np.log(prior.mean)
    np.testing.assert_allclose(model._offsets[9:], expected)


@needs_torch
@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    []
    if WITHOUT_TORCH
    else [
        FedAvgClassifier(head=1.0),
        FedAvgClassifier(label_prior="client", fine_tune_steps=20),
        AdaPeDClassifier(),
    ],
    ids=repr,
)
def test_late_clients_are_as_well_off_as_those_of_the_start(model):
    digits = load_digits_clients(24, classes_per_client=3, random_state=0)
    rows, y, who = digits.data, digits.target, digits.groups
    test, late = np.random.default_rng(0).random(len(y)) < 0.4, who % 3 == 0
    model.set_params(n_rounds=8, client_fraction=0.5, random_state=0)
    scores = []
    for known in (~test, ~test & ~late):
        model.fit(rows[known], y[known], groups=who[known])
        if not (known & late).any():
            own = ~test & late
            model.personalize(rows[own], y[own], groups=who[own])
        scored = test & late  # 8 clients
        scores.append(model.score(rows[scored], y[scored], groups=who[scored]))
    assert scores[1] > scores[0] - 0.01


@needs_torch
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"fine_tune_steps": 3, "label_prior": "client"}, {"label_prior": None}),
        ({"fine_tune_steps": 3}, {"label_prior": "client"}),
        ({"fine_tune_steps": 3}, {"fine_tune_steps": 0, "head": "bayes"}),
        ({"head": 1.0, "label_prior": "client"}, {"head": None}),
    ],
    ids=str,
)
def test_parts_of_another_kind_are_refused(before, after):
    """One client would get the part of another, whose numbers stay where they were."""
    model = fitted(FedAvgClassifier(**before, **SHORT))
    home = model.for_client(0).set_params(**after)
    model.set_params(**after)
    state = pickle.dumps(model)
    for groups in ([20] * 5, [0] * 5):
        with pytest.raises(ValueError, match="changed since fit"):
            model.personalize(X[:5], LABELS[:5], groups=groups)
    with pytest.raises(ValueError, match="changed since fit"):
        home.personalize(X[:5], LABELS[:5])
    assert pickle.dumps(model) == state


@needs_torch
@pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")
def test_an_error_of_the_net_on_the_clients_rows_is_reported():
    """In a fit with noise the client would count as 0; at home there is nobody to hide it from."""
    from tests.helpers.nets import recipe

    class Fails(torch.nn.Linear):
        def __init__(self):
            super().__init__(3, 2)

        def forward(self, rows):
            if (rows > 1e5).any():
                raise RuntimeError("the row is too large")
            return super().forward(rows)

    private = {"noise_multiplier": 1.0, "clip_norm": 1.0, "delta": 1e-3, "fine_tune_steps": 3}
    model = fitted(FedAvgClassifier(recipe(Fails), **private, **SHORT))
    with pytest.raises(ValueError, match=r"training failed on the rows of client 20 \(.*Error"):
        model.personalize(np.full((5, 3), 1e6), LABELS[:5], groups=[20] * 5)
