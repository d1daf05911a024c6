"""The same code on a GPU, where there is one."""

import numpy as np
import pytest
import torch
from sklearn.base import clone

from pfl_sklearn.neural_network import MLP, AdaPeDClassifier, FedAvgClassifier, LocalNetClassifier
from tests.helpers.net_fits import fit
from tests.helpers.nets import Convolutions, Dropped, Normed, recipe, table

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning"),
]
MANY = {"n_rounds": 4, "local_steps": 3, "client_fraction": 0.6, "random_state": 3}
NOISE = {"noise_multiplier": 1.0, "clip_norm": 0.3}
MODELS = {
    "fedavg": FedAvgClassifier(fine_tune_steps=3, label_prior="client", **MANY),
    "head": FedAvgClassifier(head="bayes", **MANY),
    "local": LocalNetClassifier(**MANY),
    "adaped": AdaPeDClassifier(train_unsampled=True, **MANY),
    "private": AdaPeDClassifier(**NOISE, **MANY),
    "per_step": AdaPeDClassifier(noise="per_step", **NOISE, **MANY),
}


@pytest.mark.parametrize(
    ("name", "module"), [*((name, MLP) for name in MODELS), ("head", Convolutions)]
)
def test_the_same_as_on_the_cpu(name, module):
    """Up to rounding; rows, batches and noise are drawn on the CPU in both."""
    X, y, groups = table((1, 8, 8) if module is Convolutions else (7,))
    on_cpu, on_gpu = (
        clone(MODELS[name])
        .set_params(estimator=recipe(module).set_params(device=device))
        .fit(X, y, groups=groups)
        for device in ("cpu", "cuda")
    )
    assert on_gpu.net_.device == "cuda"
    assert next(on_gpu.net_.module_.parameters()).device.type == "cuda"
    found, expected = (m.predict_proba(X, groups=groups) for m in (on_gpu, on_cpu))
    np.testing.assert_allclose(found, expected, atol=1e-3)
    assert np.ptp(expected) > 0.01


@pytest.mark.parametrize("module", [MLP, Dropped, Normed])
def test_the_same_bits_again(module):
    model = FedAvgClassifier(recipe(module).set_params(device="cuda"), **MANY)
    one, other = (fit(clone(model)) for _ in range(2))
    np.testing.assert_array_equal(one.population_parameters_, other.population_parameters_)
