"""Privacy: mechanisms, accounting, calibration, and reports of what was promised.

Nothing outside this package clips, quantizes or adds noise.
"""

from pfl_sklearn.privacy._accounting._calibration import (
    calibrate_noise,
    calibrate_rounds,
    epsilon_spent,
)
from pfl_sklearn.privacy._accounting._composition import events_epsilon
from pfl_sklearn.privacy._accounting._events import GaussianEvent, PureEvent, SampledGaussian
from pfl_sklearn.privacy._accounting._gaussian_dp import compose_gdp, gdp_delta, gdp_epsilon, gdp_mu
from pfl_sklearn.privacy._accounting._renyi import rdp_to_dp
from pfl_sklearn.privacy._accounting._selection import selection_epsilon
from pfl_sklearn.privacy._ledger import BudgetExceeded, PrivacyLedger
from pfl_sklearn.privacy._mechanisms._clipped_sum import ClippedSum
from pfl_sklearn.privacy._mechanisms._clustering import PrivateClustering
from pfl_sklearn.privacy._mechanisms._discrete_gaussian import DiscreteGaussianMechanism
from pfl_sklearn.privacy._mechanisms._discrete_laplace import DiscreteLaplaceMechanism
from pfl_sklearn.privacy._mechanisms._frequencies import FrequencyMoments
from pfl_sklearn.privacy._mechanisms._gaussian import ClientMoments, GaussianMechanism
from pfl_sklearn.privacy._mechanisms._quantizer import StochasticQuantizer
from pfl_sklearn.privacy._mechanisms._randomizers import OneBit, SubsetSelection, TwoBit
from pfl_sklearn.privacy._mechanisms._regression import RegressionMoments
from pfl_sklearn.privacy._pipeline_report import privacy_of
from pfl_sklearn.privacy._report import PrivacyReport, PrivacyWarning
from pfl_sklearn.privacy._search_cost import FitCost, SearchCost, search_cost

__all__ = [
    "BudgetExceeded",
    "ClientMoments",
    "ClippedSum",
    "DiscreteGaussianMechanism",
    "DiscreteLaplaceMechanism",
    "FitCost",
    "FrequencyMoments",
    "GaussianEvent",
    "GaussianMechanism",
    "OneBit",
    "PrivacyLedger",
    "PrivacyReport",
    "PrivacyWarning",
    "PrivateClustering",
    "PureEvent",
    "RegressionMoments",
    "SampledGaussian",
    "SearchCost",
    "StochasticQuantizer",
    "SubsetSelection",
    "TwoBit",
    "calibrate_noise",
    "calibrate_rounds",
    "compose_gdp",
    "epsilon_spent",
    "events_epsilon",
    "gdp_delta",
    "gdp_epsilon",
    "gdp_mu",
    "privacy_of",
    "rdp_to_dp",
    "search_cost",
    "selection_epsilon",
]
