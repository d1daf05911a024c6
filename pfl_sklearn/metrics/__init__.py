"""Scores of clients: scorers, a callback for rounds, and tables with a row per client."""

from pfl_sklearn.metrics._client_scores import client_scores, known_clients
from pfl_sklearn.metrics._monitor import ClientMonitor
from pfl_sklearn.metrics._scorer import ClientScorer

__all__ = ["ClientMonitor", "ClientScorer", "client_scores", "known_clients"]
