"""Marginal likelihood of label counts under a sparse Dirichlet prior, and its maximum by EM."""

from typing import NamedTuple

import numpy as np
from scipy.special import expit, gammaln

from pfl_sklearn.priors._label_counts import (
    LabelCounts,
    log_likelihoods,
    log_rising,
    ml_concentration,
)

_SPARSE_GRID = np.geomspace(0.1, 500.0, 18)
_FULL_GRID = np.array([0.5, 5.0, 50.0, 500.0])
_START_STEPS = 8
_MAX_STEPS = 300
_CONCENTRATION_STEPS = 10
_TOLERANCE = 1e-7


class Parameters(NamedTuple):
    mean: np.ndarray  # (K,)
    full: float  # alpha
    weights: np.ndarray  # (K,)
    sparse: float  # a


def log_choose(n, k):
    """Log of the binomial coefficient, minus infinity for k < 0."""
    kept = np.maximum(k, 0)
    value = gammaln(n + 1.0) - gammaln(kept + 1.0) - gammaln(n - kept + 1.0)
    return np.where(k < 0, -np.inf, value)


def log_spikes(n_seen, n_rows, sparse, n_labels):
    """Log probability (p, K - 1) of a client's labels but for a product over labels seen.

    Rows are clients by labels seen and rows (p,); columns are numbers of labels below K.
    """
    size = np.arange(1, n_labels)
    unseen = size - n_seen[:, None]
    which = log_choose((n_labels - n_seen)[:, None], unseen) - log_choose(n_labels, size)
    return which - log_rising(size * sparse, n_rows[:, None])


def log_joint(table, known):
    """Log probability (m, K) of each number of labels together with the client's labels."""
    n_labels = len(known.mean)
    own = table.by_client(log_rising(known.sparse, table.values))
    spikes = log_spikes(table.n_seen, table.n_rows, known.sparse, n_labels)
    full = log_likelihoods(table, known.mean, known.full)
    return np.column_stack([spikes + own[:, None], full]) + np.log(known.weights)


class _Clients(NamedTuple):
    """What EM needs of the clients: those with equal rows and labels seen are one pair."""

    table: LabelCounts
    n_seen: np.ndarray  # (p,)
    n_rows: np.ndarray  # (p,)
    pair: np.ndarray  # (m,)

    def spikes(self, sparse, n_labels):
        """Probabilities (p, K - 1) of the pairs and what to add (m,) to the clients' logs."""
        logs = log_spikes(self.n_seen, self.n_rows, sparse, n_labels)
        largest = logs.max(axis=1, initial=-np.inf)
        largest = np.where(np.isfinite(largest), largest, 0.0)
        own = self.table.by_client(log_rising(sparse, self.table.values))
        return np.exp(logs - largest[:, None]), own + largest[self.pair]


def _paired(table):
    keys = np.column_stack([table.n_seen, table.n_rows])
    pairs, position = np.unique(keys, axis=0, return_inverse=True)
    return _Clients(table, pairs[:, 0], pairs[:, 1], position.ravel())


def maximize(table, mean, full, weights, sparse):
    """Parameters with the largest marginal likelihood; those that are not None are known."""
    clients, n_labels = _paired(table), len(mean)
    start = np.full(n_labels, 1 / n_labels) if weights is None else weights
    fulls = [full]
    if full is None:
        fulls = [ml_concentration(table, mean, np.ones(len(table.n_rows))), *_FULL_GRID]
    denses = [log_likelihoods(table, mean, each) for each in fulls]
    best = -np.inf, None
    for a in _SPARSE_GRID if sparse is None else [sparse]:
        spikes = clients.spikes(a, n_labels)
        for each, dense in zip(fulls, denses, strict=True):
            w = start
            for _ in range(_START_STEPS):
                value, w, _ = _em_step(clients, spikes, dense, w, weights is None)
            best = max(best, (value, (each, w, a)), key=lambda found: found[0])
    each, w, a = best[1]
    return _polish(clients, Parameters(mean, each, w, a), full is None, weights is None)


def _em_step(clients, spikes, dense, w, free):
    """Value of the weights w, the next weights, and each client's chance (m,) of having all labels.

    The value is the log-likelihood with one more client, spread evenly over the numbers of labels.
    """
    chances, own = spikes
    mixed = chances @ w[:-1]
    with np.errstate(divide="ignore"):
        below = np.log(mixed)[clients.pair] + own
    above = dense + np.log(w[-1])
    value = np.logaddexp(below, above).sum() + np.log(w).mean()
    has_all = expit(above - below)
    if not free:
        return value, w, has_all
    some = np.bincount(clients.pair, 1 - has_all, len(mixed))
    share = np.divide(some, mixed, out=np.zeros_like(mixed), where=mixed > 0)
    counts = np.append((share @ chances) * w[:-1], has_all.sum())
    return value, (counts + 1 / len(w)) / (len(has_all) + 1), has_all


def _polish(clients, found, free_full, free_weights):
    """Parameters after EM in the weights and the concentration of clients with all labels."""
    table, mean = clients.table, found.mean
    spikes = clients.spikes(found.sparse, len(mean))
    full, w, before = found.full, found.weights, -np.inf
    dense = log_likelihoods(table, mean, full)
    for step in range(_MAX_STEPS):
        value, w, has_all = _em_step(clients, spikes, dense, w, free_weights)
        if step % _CONCENTRATION_STEPS:
            continue
        if value - before < _TOLERANCE * len(has_all):
            break
        before = value
        if free_full:
            full = ml_concentration(table, mean, has_all)
            dense = log_likelihoods(table, mean, full)
    return Parameters(mean, full, w, found.sparse)
