"""Nets that are fitted in several threads of a process, or that travel to other processes."""

import copy
import pickle
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("skorch")

from torch import nn

from pfl_sklearn.neural_network import AdaPeDClassifier, FedAvgClassifier
from pfl_sklearn.neural_network._engine import _engine
from tests.helpers.nets import Dropped, recipe, table
from tests.helpers.slow import slow

SHORT = {"n_rounds": 1, "local_steps": 2}


@pytest.fixture
def busy():
    """Threads take turns after every few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("net", [None, *slow([recipe(Dropped)])], ids=["stacked", "one by one"])
def test_fits_in_threads_give_the_same_bits(busy, net):
    X, y, groups = table(sizes=[4, 5])

    def fitted(seed):
        return (
            AdaPeDClassifier(net, random_state=seed, **SHORT).fit(X, y, groups=groups).parameters_
        )

    seeds = range(16)
    expected = [fitted(seed) for seed in seeds]
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(fitted, seeds))
    np.testing.assert_array_equal(found, expected)


def test_filters_of_warnings_stay_as_they_are():
    """They are the process's: a thread that puts them back may put back another one's."""
    X, y, groups = table()
    seen = []

    class Looking(nn.CrossEntropyLoss):
        def forward(self, outputs, y):
            seen.append(list(warnings.filters))
            return super().forward(outputs, y)

    FedAvgClassifier(recipe(criterion=Looking), **SHORT).fit(X, y, groups=groups)
    assert seen
    assert all(filters == warnings.filters for filters in seen)


def test_copies_of_a_model_are_made_without_another_look_at_its_net(monkeypatch):
    X, y, groups = table()
    model = AdaPeDClassifier(random_state=0, **SHORT).fit(X, y, groups=groups)
    monkeypatch.setattr(_engine, "chain_of", None)
    for each in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model), model.for_client(1)):
        assert each._engines.client.chain == model._engines.client.chain
