"""Linear models with one coefficient vector per client."""

from pfl_sklearn._rounds.loop import DivergenceError
from pfl_sklearn.linear_model._fit_warnings import SeparationWarning
from pfl_sklearn.linear_model._linear import PersonalizedLinearRegression
from pfl_sklearn.linear_model._logistic import PersonalizedLogisticRegression
from pfl_sklearn.linear_model._poisson import PersonalizedPoissonRegression
from pfl_sklearn.linear_model._ppsgd._estimators import PPSGDClassifier, PPSGDRegressor
from pfl_sklearn.linear_model._row_space import NotEstimableWarning

__all__ = [
    "DivergenceError",
    "NotEstimableWarning",
    "PPSGDClassifier",
    "PPSGDRegressor",
    "PersonalizedLinearRegression",
    "PersonalizedLogisticRegression",
    "PersonalizedPoissonRegression",
    "SeparationWarning",
]
