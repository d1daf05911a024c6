"""Linear models with one coefficient vector per client."""

from pfl_sklearn.linear_model._linear import PersonalizedLinearRegression
from pfl_sklearn.linear_model._logistic import PersonalizedLogisticRegression, SeparationWarning

__all__ = [
    "PersonalizedLinearRegression",
    "PersonalizedLogisticRegression",
    "SeparationWarning",
]
