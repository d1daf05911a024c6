"""Personalized federated estimation and learning with differential privacy.

One model per client, help from the other clients, and privacy that can be stated: scikit-learn
estimators for tables whose rows belong to clients (hospitals, counties, phones, players).
"""

from pfl_sklearn import (
    compose,
    datasets,
    estimation,
    inspection,
    linear_model,
    metrics,
    model_selection,
    neural_network,
    online,
    priors,
    privacy,
    theory,
)
from pfl_sklearn._version import __version__
from pfl_sklearn.base import SingleClientWarning, UnseenClientsWarning
from pfl_sklearn.compose import ClientColumn
from pfl_sklearn.estimation import BernoulliMean, GaussianMean
from pfl_sklearn.linear_model import (
    PersonalizedLinearRegression,
    PersonalizedLogisticRegression,
    PPSGDClassifier,
    PPSGDRegressor,
)
from pfl_sklearn.neural_network import (
    AdaPeDClassifier,
    FedAvgClassifier,
    FedAvgRegressor,
    LocalNetClassifier,
    LocalNetRegressor,
)
from pfl_sklearn.online import CollaborativeMean
from pfl_sklearn.privacy import PrivacyWarning, privacy_of

__all__ = [
    "AdaPeDClassifier",
    "BernoulliMean",
    "ClientColumn",
    "CollaborativeMean",
    "FedAvgClassifier",
    "FedAvgRegressor",
    "GaussianMean",
    "LocalNetClassifier",
    "LocalNetRegressor",
    "PPSGDClassifier",
    "PPSGDRegressor",
    "PersonalizedLinearRegression",
    "PersonalizedLogisticRegression",
    "PrivacyWarning",
    "SingleClientWarning",
    "UnseenClientsWarning",
    "__version__",
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
    "privacy_of",
    "theory",
]
