"""Personalized federated estimation and learning with differential privacy.

One model per client, help from the other clients, and privacy that can be stated: scikit-learn
estimators for tables whose rows belong to clients (hospitals, counties, phones, players).
"""

import importlib
from typing import TYPE_CHECKING, Any

from pfl_sklearn._version import __version__ as __version__

if TYPE_CHECKING:  # what __getattr__ finds at run time; "as" makes it public to type checkers
    from pfl_sklearn import (
        compose as compose,
        datasets as datasets,
        estimation as estimation,
        inspection as inspection,
        linear_model as linear_model,
        metrics as metrics,
        model_selection as model_selection,
        neural_network as neural_network,
        online as online,
        priors as priors,
        privacy as privacy,
        statistics as statistics,
        theory as theory,
    )
    from pfl_sklearn.base import (
        SingleClientWarning as SingleClientWarning,
        UnseenClientsWarning as UnseenClientsWarning,
    )
    from pfl_sklearn.compose import (
        ClientAsFeature as ClientAsFeature,
        ClientColumn as ClientColumn,
        ClientSelector as ClientSelector,
        PersonalizedStackingClassifier as PersonalizedStackingClassifier,
        PersonalizedStackingRegressor as PersonalizedStackingRegressor,
        TableEncoder as TableEncoder,
    )
    from pfl_sklearn.estimation import (
        BernoulliMean as BernoulliMean,
        GaussianMean as GaussianMean,
        PoissonMean as PoissonMean,
    )
    from pfl_sklearn.inspection import (
        ClientGainDisplay as ClientGainDisplay,
        CoefficientDisplay as CoefficientDisplay,
        ConvergenceDisplay as ConvergenceDisplay,
        PrivacyAccuracyDisplay as PrivacyAccuracyDisplay,
        ResidualsDisplay as ResidualsDisplay,
        ShrinkageDisplay as ShrinkageDisplay,
        StreamDisplay as StreamDisplay,
        likelihood_ratio_test as likelihood_ratio_test,
    )
    from pfl_sklearn.linear_model import (
        PersonalizedLinearRegression as PersonalizedLinearRegression,
        PersonalizedLogisticRegression as PersonalizedLogisticRegression,
        PersonalizedPoissonRegression as PersonalizedPoissonRegression,
        PPSGDClassifier as PPSGDClassifier,
        PPSGDRegressor as PPSGDRegressor,
    )
    from pfl_sklearn.metrics import (
        ClientMonitor as ClientMonitor,
        ClientScorer as ClientScorer,
        client_scores as client_scores,
    )
    from pfl_sklearn.model_selection import (
        ClientKFold as ClientKFold,
        ClientShuffleSplit as ClientShuffleSplit,
        ClientTimeSeriesSplit as ClientTimeSeriesSplit,
        PrivateSelectCV as PrivateSelectCV,
    )
    from pfl_sklearn.neural_network import (
        AdaMixNetClassifier as AdaMixNetClassifier,
        AdaMixNetRegressor as AdaMixNetRegressor,
        AdaPeDClassifier as AdaPeDClassifier,
        APFLClassifier as APFLClassifier,
        APFLRegressor as APFLRegressor,
        DittoClassifier as DittoClassifier,
        DittoRegressor as DittoRegressor,
        FedAvgClassifier as FedAvgClassifier,
        FedAvgRegressor as FedAvgRegressor,
        FedEMClassifier as FedEMClassifier,
        FedEMRegressor as FedEMRegressor,
        FedMutualClassifier as FedMutualClassifier,
        FedPerClassifier as FedPerClassifier,
        FedPerRegressor as FedPerRegressor,
        FedRepClassifier as FedRepClassifier,
        FedRepRegressor as FedRepRegressor,
        LocalNetClassifier as LocalNetClassifier,
        LocalNetRegressor as LocalNetRegressor,
        PerFedAvgClassifier as PerFedAvgClassifier,
        PerFedAvgRegressor as PerFedAvgRegressor,
        PFedMeClassifier as PFedMeClassifier,
        PFedMeRegressor as PFedMeRegressor,
        PPSGDNetClassifier as PPSGDNetClassifier,
        PPSGDNetRegressor as PPSGDNetRegressor,
        QuPeDClassifier as QuPeDClassifier,
        ScaffoldClassifier as ScaffoldClassifier,
        ScaffoldRegressor as ScaffoldRegressor,
    )
    from pfl_sklearn.online import (
        CollaborativeMean as CollaborativeMean,
    )
    from pfl_sklearn.priors import (
        BetaPrior as BetaPrior,
        DirichletPrior as DirichletPrior,
        DiscretePrior as DiscretePrior,
        GammaPrior as GammaPrior,
        GaussianMixturePrior as GaussianMixturePrior,
        GaussianPrior as GaussianPrior,
        GridPrior as GridPrior,
        LaplacePrior as LaplacePrior,
        SparseDirichletPrior as SparseDirichletPrior,
    )
    from pfl_sklearn.privacy import (
        PrivacyLedger as PrivacyLedger,
        PrivacyReport as PrivacyReport,
        PrivacyWarning as PrivacyWarning,
        privacy_of as privacy_of,
    )
    from pfl_sklearn.statistics import (
        ClientStatistics as ClientStatistics,
    )

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
    "statistics",
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
        "TableEncoder",
    ],
    "estimation": ["BernoulliMean", "GaussianMean", "PoissonMean"],
    "inspection": [
        "ClientGainDisplay",
        "CoefficientDisplay",
        "ConvergenceDisplay",
        "PrivacyAccuracyDisplay",
        "ResidualsDisplay",
        "ShrinkageDisplay",
        "StreamDisplay",
        "likelihood_ratio_test",
    ],
    "linear_model": [
        "PersonalizedLinearRegression",
        "PersonalizedLogisticRegression",
        "PersonalizedPoissonRegression",
        "PPSGDClassifier",
        "PPSGDRegressor",
    ],
    "metrics": ["ClientMonitor", "ClientScorer", "client_scores"],
    "model_selection": [
        "ClientKFold",
        "ClientShuffleSplit",
        "ClientTimeSeriesSplit",
        "PrivateSelectCV",
    ],
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
        "ScaffoldClassifier",
        "ScaffoldRegressor",
    ],
    "online": ["CollaborativeMean"],
    "priors": [
        "BetaPrior",
        "DirichletPrior",
        "DiscretePrior",
        "GammaPrior",
        "GaussianMixturePrior",
        "GaussianPrior",
        "GridPrior",
        "LaplacePrior",
        "SparseDirichletPrior",
    ],
    "privacy": ["PrivacyLedger", "PrivacyReport", "PrivacyWarning", "privacy_of"],
    "statistics": ["ClientStatistics"],
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted([*_SUBMODULES, *_MODULE_OF, "__version__"])


if not TYPE_CHECKING:  # which would take any name for one of ours

    def __getattr__(name: str) -> Any:
        """Import a submodule, or the module of a class, when it is first asked for."""
        if name in _SUBMODULES:
            return importlib.import_module(f"{__name__}.{name}")
        if name in _MODULE_OF:
            return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
