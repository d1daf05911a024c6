"""Wrappers that make client-aware estimators work in scikit-learn's tools."""

from pfl_sklearn.compose._client_column import ClientColumn

__all__ = ["ClientColumn"]
