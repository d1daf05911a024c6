"""Plots of fitted client-aware estimators."""

from pfl_sklearn.inspection._coefficient_display import CoefficientDisplay
from pfl_sklearn.inspection._shrinkage import ShrinkageDisplay

__all__ = ["CoefficientDisplay", "ShrinkageDisplay"]
