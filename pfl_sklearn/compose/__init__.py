"""Building blocks that put client-aware estimators into scikit-learn's tools."""

from pfl_sklearn.compose._client_column import ClientColumn

__all__ = ["ClientColumn"]
