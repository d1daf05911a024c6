"""Scores of clients: scorers that hand groups to predict, and tables with a row per client."""

from pfl_sklearn.metrics._client_scores import client_scores, known_clients
from pfl_sklearn.metrics._scorer import ClientScorer

__all__ = ["ClientScorer", "client_scores", "known_clients"]
