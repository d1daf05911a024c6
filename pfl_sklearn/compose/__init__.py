"""Estimators around others: client ids as a column or a feature, and combinations."""

from pfl_sklearn.compose._client_column import ClientColumn
from pfl_sklearn.compose._client_feature import ClientAsFeature
from pfl_sklearn.compose._client_mean_columns import ClientMeans
from pfl_sklearn.compose._selector import ClientSelector
from pfl_sklearn.compose._stack.estimators import (
    PersonalizedStackingClassifier,
    PersonalizedStackingRegressor,
)
from pfl_sklearn.compose._table_encoder import TableEncoder

__all__ = [
    "ClientAsFeature",
    "ClientColumn",
    "ClientMeans",
    "ClientSelector",
    "PersonalizedStackingClassifier",
    "PersonalizedStackingRegressor",
    "TableEncoder",
]
