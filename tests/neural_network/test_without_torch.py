"""A world without PyTorch: everything else works, and neural estimators say what is missing."""

import subprocess
import sys

import pytest

from pfl_sklearn import neural_network

CODE = """
import sys

class Missing:
    package = "torch"

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == self.package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, missing := Missing())

import numpy as np
import pfl_sklearn
import pfl_sklearn.neural_network as nets
from sklearn.base import clone
groups = np.repeat([0, 1], 5)
X = np.arange(20.0).reshape(10, 2) ** [1, 2]
pfl_sklearn.PersonalizedLinearRegression().fit(X, np.arange(10) % 3 - groups, groups=groups)
for missing.package in ("torch", "skorch"):
    for name in sorted(set(nets.__all__) - {"MLP"}):
        model = getattr(nets, name)()
        print(repr(clone(model)))
        try:
            model.fit(X, groups, groups=groups)
        except ImportError as error:
            print(error)
        assert not hasattr(model, "clients_")
    try:
        nets.MLP
    except ImportError as error:
        print(error)
    assert missing.package not in sys.modules
"""


@pytest.mark.slow
def test_without_torch_and_without_skorch():
    given = [sys.executable, "-W", "error", "-c", CODE]
    done = subprocess.run(given, capture_output=True, text=True)
    assert done.stderr == ""
    names = sorted(set(neural_network.__all__) - {"MLP"})
    assert {"AdaPeDClassifier", "FedAvgRegressor"} < set(names)
    expected = []
    for package in ("torch", "skorch"):
        message = (
            f"neural estimators need PyTorch and skorch, and {package} is not installed: "
            "pip install torch skorch cloudpickle rich"
        )
        expected += [line for name in names for line in (f"{name}()", message)] + [message]
    assert done.stdout.splitlines() == expected
