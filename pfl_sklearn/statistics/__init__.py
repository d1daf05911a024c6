"""Statistics of clients that stand in for their rows: from chunks, data frames and databases."""

from pfl_sklearn.statistics._client_statistics import ClientStatistics

__all__ = ["ClientStatistics"]
