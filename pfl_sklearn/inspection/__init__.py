"""Plots of client-aware estimators, their rounds and streams, and tests of regressions."""

from pfl_sklearn.inspection._client_gain import ClientGainDisplay
from pfl_sklearn.inspection._coefficients import CoefficientDisplay
from pfl_sklearn.inspection._convergence import ConvergenceDisplay
from pfl_sklearn.inspection._funnel import FunnelDisplay, observed_expected
from pfl_sklearn.inspection._likelihood_ratio import likelihood_ratio_test
from pfl_sklearn.inspection._marginal_means import marginal_means
from pfl_sklearn.inspection._parametric_bootstrap import parametric_bootstrap
from pfl_sklearn.inspection._predictive_check import PredictiveCheckDisplay
from pfl_sklearn.inspection._privacy_accuracy import PrivacyAccuracyDisplay
from pfl_sklearn.inspection._residuals import ResidualsDisplay
from pfl_sklearn.inspection._shrinkage import ShrinkageDisplay
from pfl_sklearn.inspection._stream_display import StreamDisplay

__all__ = [
    "ClientGainDisplay",
    "CoefficientDisplay",
    "ConvergenceDisplay",
    "FunnelDisplay",
    "PredictiveCheckDisplay",
    "PrivacyAccuracyDisplay",
    "ResidualsDisplay",
    "ShrinkageDisplay",
    "StreamDisplay",
    "likelihood_ratio_test",
    "marginal_means",
    "observed_expected",
    "parametric_bootstrap",
]
