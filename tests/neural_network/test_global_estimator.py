"""A global net of another kind than the personal ones."""

import numpy as np
import pytest
import torch
from skorch import NeuralNetClassifier, NeuralNetRegressor
from skorch.callbacks import LRScheduler
from torch import nn

from pfl_sklearn.neural_network import MLP, AdaPeDClassifier
from tests.helpers.nets import Convolutions, recipe, table

SHORT = {"n_rounds": 2, "local_steps": 2, "personal_start": "own", "random_state": 0}


def fit(shape=(7,), estimator=None, **params):
    X, y, groups = table(shape)
    return AdaPeDClassifier(estimator, **{**SHORT, **params}).fit(X, y, groups=groups)


def small(**params):
    return recipe(MLP, module__hidden=(), **params)


def test_the_two_nets_have_their_own_sizes():
    model = fit(global_estimator=small(), unseen="population")
    assert model.parameters_.shape == (len(model.clients_), 7 * 64 + 64 + 64 * 3 + 3)
    assert model.population_parameters_.shape == (7 * 3 + 3,)
    X, _, groups = table()
    strangers = model.predict_proba(X, groups=groups + 100)
    np.testing.assert_allclose(strangers, model.net_.predict_proba(X.astype("f4")), rtol=1e-4)
    alone = model.for_client(model.clients_[0])
    assert len(list(alone.net_.module_.parameters())) == 4


UNSAMPLED = {"train_unsampled": 2, "client_fraction": 0.4}


def test_personal_nets_that_are_held_by_nothing_train_alone():
    """With psi so large, the global net is of no consequence for them."""
    loose = {"psi_init": 1e12, "psi_learning_rate": 0.0, **UNSAMPLED}
    nets = (small(lr=0.1), recipe(MLP, module__hidden=3))
    first, second = (fit(global_estimator=net, **loose) for net in nets)
    np.testing.assert_allclose(first.parameters_, second.parameters_, atol=1e-6)


@pytest.mark.parametrize("given", [{}, UNSAMPLED], ids=str)
def test_a_global_net_of_the_same_kind(given):
    with torch.random.fork_rng():
        net = recipe(MLP(7, 3, 5))
    one, other = (fit(estimator=net, global_estimator=some, **given) for some in (None, net))
    np.testing.assert_array_equal(other.parameters_, one.parameters_)
    np.testing.assert_array_equal(other.population_parameters_, one.population_parameters_)


def test_the_global_net_has_its_own_learning_rate():
    still = fit(global_estimator=small(lr=0.1, callbacks=[LRScheduler("StepLR", step_size=1)]))
    moved = fit(global_estimator=small(lr=0.1))
    assert np.any(still.population_parameters_ != moved.population_parameters_)
    halted = fit(global_estimator=small(lr=0.0))
    np.testing.assert_array_equal(halted.population_parameters_, halted._engines.population.start())


def test_convolutions_and_a_linear_global_net():
    shape = (1, 8, 8)
    model = fit(shape, recipe(Convolutions), global_estimator=small())
    assert not model._engines.client.stacked
    X, _, groups = table(shape)
    np.testing.assert_allclose(model.predict_proba(X, groups=groups).sum(axis=1), 1.0)


def test_with_noise_nothing_is_looked_at():
    noise = {"noise_multiplier": 1.0, "clip_norm": 0.5}
    with pytest.warns(UserWarning, match="random_state"):
        model = fit(global_estimator=small(), **noise)
    assert not list(model._engines.population.net.module_.buffers())
    assert model.release().net_.module_.layers[1].in_features == 7


@pytest.mark.parametrize(
    ("params", "match"),
    [
        ({"personal_start": "global"}, "personal_start='global' with a global_estimator"),
        ({"global_estimator": NeuralNetRegressor(MLP)}, "global_estimator must be"),
        ({"global_estimator": recipe(MLP, optimizer=torch.optim.Adam)}, "optimizer=Adam"),
        ({"global_estimator": nn.Linear(2, 2)}, "global_estimator"),
        ({"global_estimator": NeuralNetClassifier(MLP, device="meta")}, "device"),
    ],
)
def test_what_is_refused(params, match):
    with pytest.raises((ValueError, TypeError), match=match):
        fit(**{"global_estimator": small(), **params})


def test_a_warm_start_keeps_the_kind_of_the_global_net():
    X, y, groups = table((7,))
    for before, after in ((small(), None), (None, small())):
        model = fit(global_estimator=before, warm_start=True)
        with pytest.raises(ValueError, match="global_estimator, and these would have"):
            model.set_params(global_estimator=after, n_rounds=5).fit(X, y, groups=groups)
