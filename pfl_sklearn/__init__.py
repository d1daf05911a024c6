"""Personalized federated estimation and learning with differential privacy.

One model per client, help from the other clients, and privacy that can be stated: scikit-learn
estimators for tables whose rows belong to clients (hospitals, counties, phones, players).
"""

import importlib
from typing import TYPE_CHECKING, Any

from pfl_sklearn._version import __version__

if TYPE_CHECKING:  # what __getattr__ finds at run time
    from pfl_sklearn.base import SingleClientWarning, UnseenClientsWarning
    from pfl_sklearn.compose import (
        ClientAsFeature,
        ClientColumn,
        ClientSelector,
        PersonalizedStackingClassifier,
        PersonalizedStackingRegressor,
    )
    from pfl_sklearn.estimation import BernoulliMean, GaussianMean
    from pfl_sklearn.linear_model import (
        PersonalizedLinearRegression,
        PersonalizedLogisticRegression,
        PPSGDClassifier,
        PPSGDRegressor,
    )
    from pfl_sklearn.metrics import ClientScorer
    from pfl_sklearn.model_selection import ClientKFold, ClientShuffleSplit, PrivateSelectCV
    from pfl_sklearn.neural_network import (
        AdaMixNetClassifier,
        AdaMixNetRegressor,
        AdaPeDClassifier,
        APFLClassifier,
        APFLRegressor,
        DittoClassifier,
        DittoRegressor,
        FedAvgClassifier,
        FedAvgRegressor,
        FedEMClassifier,
        FedEMRegressor,
        FedMutualClassifier,
        FedPerClassifier,
        FedPerRegressor,
        FedRepClassifier,
        FedRepRegressor,
        LocalNetClassifier,
        LocalNetRegressor,
        PerFedAvgClassifier,
        PerFedAvgRegressor,
        PFedMeClassifier,
        PFedMeRegressor,
        PPSGDNetClassifier,
        PPSGDNetRegressor,
        QuPeDClassifier,
    )
    from pfl_sklearn.online import CollaborativeMean
    from pfl_sklearn.priors import GaussianPrior
    from pfl_sklearn.privacy import PrivacyLedger, PrivacyWarning, privacy_of

_SUBMODULES = (
    "compose",
    "datasets",
    "estimation",
    "inspection",
    "linear_model",
    "metrics",
    "model_selection",
    "neural_network",
    "online",
    "priors",
    "privacy",
    "theory",
)
_HOMES = {
    "base": ["SingleClientWarning", "UnseenClientsWarning"],
    "compose": [
        "ClientAsFeature",
        "ClientColumn",
        "ClientSelector",
        "PersonalizedStackingClassifier",
        "PersonalizedStackingRegressor",
    ],
    "estimation": ["BernoulliMean", "GaussianMean"],
    "linear_model": [
        "PersonalizedLinearRegression",
        "PersonalizedLogisticRegression",
        "PPSGDClassifier",
        "PPSGDRegressor",
    ],
    "metrics": ["ClientScorer"],
    "model_selection": ["ClientKFold", "ClientShuffleSplit", "PrivateSelectCV"],
    "neural_network": [
        "AdaMixNetClassifier",
        "AdaMixNetRegressor",
        "AdaPeDClassifier",
        "APFLClassifier",
        "APFLRegressor",
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
        "PerFedAvgClassifier",
        "PerFedAvgRegressor",
        "PFedMeClassifier",
        "PFedMeRegressor",
        "PPSGDNetClassifier",
        "PPSGDNetRegressor",
        "QuPeDClassifier",
    ],
    "online": ["CollaborativeMean"],
    "priors": ["GaussianPrior"],
    "privacy": ["PrivacyLedger", "PrivacyWarning", "privacy_of"],
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [*_SUBMODULES, *_MODULE_OF, "__version__"]


def __getattr__(name: str) -> Any:
    """Import a submodule, or the module of a class, when it is first asked for."""
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
