"""Clients who took part in no round, or come later; and what the others leave behind."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("skorch")

from pfl_sklearn.neural_network import (  # noqa: E402
    AdaMixNetClassifier,
    APFLClassifier,
    DittoClassifier,
    FedEMClassifier,
    FedMutualClassifier,
    QuPeDClassifier,
)
from tests.helpers.nets import DoubleMLP, recipe, table  # noqa: E402

KEEP_NETS = [
    AdaMixNetClassifier,
    APFLClassifier,
    DittoClassifier,
    FedMutualClassifier,
    QuPeDClassifier,
]


@pytest.mark.parametrize("cls", KEEP_NETS)
def test_clients_who_never_took_part_have_the_global_net(cls):
    X, y, groups = table()
    model = cls(recipe(DoubleMLP), n_rounds=2, client_fraction=0.3, random_state=0)
    model.set_params(warm_start=True).fit(X, y, groups=groups)
    started = model._progress.state.clients["started"]
    assert 0 < started.sum() < len(started)
    same = (model.parameters_ == model.population_parameters_).all(axis=1)
    np.testing.assert_array_equal(same, ~started)


@pytest.mark.parametrize("cls", KEEP_NETS)
def test_newcomers_start_from_the_global_net(cls):
    X, y, groups = table()
    model = cls(recipe(DoubleMLP), n_rounds=3, random_state=0, warm_start=True)
    old = groups < 5
    model.fit(X[old], y[old], groups=groups[old])
    before = model.population_parameters_
    model.set_params(estimator__lr=0.0, n_rounds=4).partial_fit(X, y, groups=groups)
    state = model._progress.state.clients
    assert state["started"].all()
    nets = state["personal"]
    assert (nets[5:] == before).all()  # steps of rate 0 leave them where they started
    assert (nets[:5] != before).any(axis=1).all()


@pytest.mark.parametrize("cls", [FedEMClassifier, AdaMixNetClassifier])
def test_shares_of_the_population_last_if_nobody_takes_part(cls):
    X, y, groups = table()
    model = cls(recipe(DoubleMLP), n_rounds=3, random_state=0, warm_start=True)
    before = model.fit(X, y, groups=groups).population_parameters_
    model.set_params(n_rounds=4, client_fraction=1e-9).fit(X, y, groups=groups)
    np.testing.assert_allclose(model.population_parameters_, before, rtol=1e-12)


@pytest.mark.parametrize("cls", [FedEMClassifier, AdaMixNetClassifier])
def test_shares_of_the_population_are_those_of_many_rounds(cls):
    """A round of few clients moves them by as little as these are of all."""
    X, y, groups = table(sizes=[9] * 30)
    model = cls(recipe(DoubleMLP), n_rounds=5, random_state=0, warm_start=True)
    model.set_params(client_fraction=1 / 30, sampling="fixed").fit(X, y, groups=groups)
    shares = [shares_of(model)]
    for n_rounds in range(6, 16):
        model.set_params(n_rounds=n_rounds).fit(X, y, groups=groups)
        shares.append(shares_of(model))
    steps = np.abs(np.diff(shares, axis=0)).max(axis=1)
    assert (steps <= 1 / 30 + 1e-3).all()
    assert (steps > 0).any()
    assert np.abs(shares[0] - 0.5).max() <= 5 / 30


def shares_of(model):
    server = model._progress.state.server
    return server["shares"] if "shares" in server else server["global"][:2]
