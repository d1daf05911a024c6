"""Privacy: mechanisms, calibration, accounting, and the report of what was promised.

Nothing outside this package clips, quantizes or adds noise.
"""

from pfl_sklearn.privacy._accounting import calibrate_noise, epsilon_spent
from pfl_sklearn.privacy._discrete import OneBit, SubsetSelection, TwoBit
from pfl_sklearn.privacy._gaussian import ClientMoments, GaussianMechanism
from pfl_sklearn.privacy._gaussian_dp import compose_gdp, gdp_delta, gdp_epsilon, gdp_mu
from pfl_sklearn.privacy._lloyd import PrivateClustering
from pfl_sklearn.privacy._quantizer import StochasticQuantizer
from pfl_sklearn.privacy._regression import RegressionMoments
from pfl_sklearn.privacy._report import PrivacyReport, PrivacyWarning, privacy_of

__all__ = [
    "ClientMoments",
    "GaussianMechanism",
    "OneBit",
    "PrivacyReport",
    "PrivacyWarning",
    "PrivateClustering",
    "RegressionMoments",
    "StochasticQuantizer",
    "SubsetSelection",
    "TwoBit",
    "calibrate_noise",
    "compose_gdp",
    "epsilon_spent",
    "gdp_delta",
    "gdp_epsilon",
    "gdp_mu",
    "privacy_of",
]
