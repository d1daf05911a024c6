"""Neural nets for clients: global, local and personalized, with and without privacy.

The estimators need PyTorch and skorch, which ``pip install pfl-sklearn[torch]`` adds. They are
loaded when an estimator is first used.
"""

from typing import Any

from pfl_sklearn.neural_network._adaped import AdaPeDClassifier
from pfl_sklearn.neural_network._fedavg import FedAvgClassifier, FedAvgRegressor
from pfl_sklearn.neural_network._local import LocalNetClassifier, LocalNetRegressor

__all__ = [
    "MLP",
    "AdaPeDClassifier",
    "FedAvgClassifier",
    "FedAvgRegressor",
    "LocalNetClassifier",
    "LocalNetRegressor",
]


def __getattr__(name: str) -> Any:
    if name != "MLP":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pfl_sklearn.neural_network._base import backend

    backend()
    from pfl_sklearn.neural_network._mlp import MLP

    return MLP
