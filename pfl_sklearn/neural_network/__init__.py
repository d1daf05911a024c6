"""Neural networks for clients: global, local and personalized, with and without privacy.

The estimators need PyTorch and skorch, which ``pip install ".[torch]"`` in a checkout adds. They
are loaded when an estimator is first used.
"""

from typing import Any

from pfl_sklearn.neural_network._adamix_net import AdaMixNetClassifier, AdaMixNetRegressor
from pfl_sklearn.neural_network._adaped import AdaPeDClassifier
from pfl_sklearn.neural_network._apfl import APFLClassifier, APFLRegressor
from pfl_sklearn.neural_network._ditto import DittoClassifier, DittoRegressor
from pfl_sklearn.neural_network._fedavg import FedAvgClassifier, FedAvgRegressor
from pfl_sklearn.neural_network._fedem import FedEMClassifier, FedEMRegressor
from pfl_sklearn.neural_network._fedmutual import FedMutualClassifier, QuPeDClassifier
from pfl_sklearn.neural_network._fedper import (
    FedPerClassifier,
    FedPerRegressor,
    FedRepClassifier,
    FedRepRegressor,
)
from pfl_sklearn.neural_network._local import LocalNetClassifier, LocalNetRegressor
from pfl_sklearn.neural_network._perfedavg import PerFedAvgClassifier, PerFedAvgRegressor
from pfl_sklearn.neural_network._pfedme import PFedMeClassifier, PFedMeRegressor
from pfl_sklearn.neural_network._ppsgd_net import PPSGDNetClassifier, PPSGDNetRegressor
from pfl_sklearn.neural_network._scaffold import ScaffoldClassifier, ScaffoldRegressor

__all__ = [
    "MLP",
    "APFLClassifier",
    "APFLRegressor",
    "AdaMixNetClassifier",
    "AdaMixNetRegressor",
    "AdaPeDClassifier",
    "DittoClassifier",
    "DittoRegressor",
    "FedAvgClassifier",
    "FedAvgRegressor",
    "FedEMClassifier",
    "FedEMRegressor",
    "FedMutualClassifier",
    "FedPerClassifier",
    "FedPerRegressor",
    "FedRepClassifier",
    "FedRepRegressor",
    "LocalNetClassifier",
    "LocalNetRegressor",
    "PFedMeClassifier",
    "PFedMeRegressor",
    "PPSGDNetClassifier",
    "PPSGDNetRegressor",
    "PerFedAvgClassifier",
    "PerFedAvgRegressor",
    "QuPeDClassifier",
    "ScaffoldClassifier",
    "ScaffoldRegressor",
]


def __getattr__(name: str) -> Any:
    if name != "MLP":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pfl_sklearn.neural_network._base import backend

    backend()
    from pfl_sklearn.neural_network._engine._mlp import MLP

    return MLP
