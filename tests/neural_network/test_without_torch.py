"""A world without PyTorch: everything else works, and neural estimators say what is missing."""

import subprocess
import sys

import pytest

from pfl_sklearn import neural_network

CODE = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())

import numpy as np
import pfl_sklearn
import pfl_sklearn.neural_network as nets
from sklearn.base import clone
groups = np.repeat([0, 1], 5)
X = np.arange(20.0).reshape(10, 2) ** [1, 2]
pfl_sklearn.PersonalizedLinearRegression().fit(X, np.arange(10) % 3 - groups, groups=groups)
for name in sorted(set(nets.__all__) - {{"MLP"}}):
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
assert {package!r} not in sys.modules
"""


@pytest.mark.slow
@pytest.mark.parametrize("package", ["torch", "skorch"])
def test_without(package):
    given = [sys.executable, "-W", "error", "-c", CODE.format(package=package)]
    done = subprocess.run(given, capture_output=True, text=True)
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    message = (
        f"neural estimators need PyTorch and skorch, and {package} is not installed: "
        "pip install torch skorch cloudpickle rich"
    )
    names = sorted(set(neural_network.__all__) - {"MLP"})
    assert {"AdaPeDClassifier", "FedAvgRegressor"} < set(names)
    expected = [line for name in names for line in (f"{name}()", message)]
    assert lines == [*expected, message]
