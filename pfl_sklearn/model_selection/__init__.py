"""Splitters that keep rows of every client on both sides, and private selection."""

from pfl_sklearn.model_selection._private_select import PrivateSelectCV
from pfl_sklearn.model_selection._split import (
    ClientKFold,
    ClientShuffleSplit,
    ClientTimeSeriesSplit,
)

__all__ = ["ClientKFold", "ClientShuffleSplit", "ClientTimeSeriesSplit", "PrivateSelectCV"]
