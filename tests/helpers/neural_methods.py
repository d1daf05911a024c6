"""The neural estimators of the package, and groups of them that several tests go over."""

from pfl_sklearn import neural_network
from pfl_sklearn.neural_network import (
    AdaMixNetClassifier,
    AdaPeDClassifier,
    FedAvgClassifier,
    FedEMClassifier,
    FedPerClassifier,
    FedRepClassifier,
    LocalNetClassifier,
    PPSGDNetClassifier,
)


def _named(ending):
    names = sorted(name for name in neural_network.__all__ if name.endswith(ending))
    return [getattr(neural_network, name) for name in names]


CLASSIFIERS, REGRESSORS = _named("Classifier"), _named("Regressor")
# A global net, nets of the clients alone, and both.
BASIC = [FedAvgClassifier, LocalNetClassifier, AdaPeDClassifier]
MIXTURES = [FedEMClassifier, AdaMixNetClassifier]
PERSONAL_LAYERS = [FedRepClassifier, FedPerClassifier, PPSGDNetClassifier]
