"""Splitters that keep rows of every client on both sides."""

from pfl_sklearn.model_selection._split import ClientKFold, ClientShuffleSplit

__all__ = ["ClientKFold", "ClientShuffleSplit"]
