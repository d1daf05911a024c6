"""Marginal likelihood of label counts under a sparse Dirichlet prior, and its maximum by EM."""

from typing import NamedTuple

import numpy as np
from scipy.special import expit, gammaln

from pfl_sklearn._typing import Floats
from pfl_sklearn.priors._label_counts import (
    LabelCounts,
    log_likelihoods,
    log_rising,
    ml_concentration,
)

# Concentrations a: from one label that has nearly all rows of a client to equal frequencies.
_SPARSE_GRID = np.geomspace(0.1, 500.0, 18)
# Starts beside the fit to all clients, which is far off where few of them have all labels.
_FULL_GRID = np.array([0.5, 5.0, 50.0, 500.0])
# Steps of EM for each pair of starts: enough to rank them.
_RANKING_STEPS = 8
_EM_STEPS_TO_END = 300
# A concentration costs as much as many steps for the weights, and changes little between them.
_STEPS_PER_CONCENTRATION = 10
# Nats per client that the steps for a concentration must gain.
_GAIN_TO_GO_ON = 1e-7


class SparseParameters(NamedTuple):
    """Parameters of a sparse Dirichlet prior, in the order of its constructor."""

    mean: Floats  # (K,)
    full: float  # alpha
    weights: Floats  # (K,)
    sparse: float  # a


def log_choose(n, k):
    """Log of the binomial coefficient, minus infinity for k < 0."""
    at_least_0 = np.maximum(k, 0)
    value = gammaln(n + 1.0) - gammaln(at_least_0 + 1.0) - gammaln(n - at_least_0 + 1.0)
    return np.where(k < 0, -np.inf, value)


def log_spikes(n_seen, n_rows, sparse, n_labels):
    """Log probability (p, K - 1) of clients' labels for each number of labels below K.

    It lacks the product over the labels seen. `n_seen` (p,) labels were seen in `n_rows` (p,) rows.
    """
    size = np.arange(1, n_labels)
    unseen = size - n_seen[:, None]
    which = log_choose((n_labels - n_seen)[:, None], unseen) - log_choose(n_labels, size)
    return which - log_rising(size * sparse, n_rows[:, None])


def log_joint_of_sizes(table: LabelCounts, prior: SparseParameters) -> Floats:
    """Log probability (m, K) of each number of labels together with the client's labels."""
    n_labels = len(prior.mean)
    own = table.by_client(log_rising(prior.sparse, table.values))
    spikes = log_spikes(table.n_seen, table.n_rows, prior.sparse, n_labels)
    full = log_likelihoods(table, prior.mean, prior.full)
    return np.column_stack([spikes + own[:, None], full]) + np.log(prior.weights)


def spike_chances(table, groups, sparse, n_labels):
    """Chances (p, K - 1) of each number of labels, logs (m,) to add, and each client's row (m,).

    The largest chance in a row is 1, so that they do not all underflow.
    """
    pairs, position = groups
    logs = log_spikes(pairs[:, 0], pairs[:, 1], sparse, n_labels)
    largest = logs.max(axis=1, initial=-np.inf)
    largest = np.where(np.isfinite(largest), largest, 0.0)  # clients with all labels seen
    own = table.by_client(log_rising(sparse, table.values))
    return np.exp(logs - largest[:, None]), own + largest[position], position


def maximize(table, mean, weights, full, sparse):
    """Parameters with the largest marginal likelihood; those that are not None are known."""
    n_labels = len(mean)
    # Chances depend on these two numbers alone, and many clients may share them.
    keys = np.column_stack([table.n_seen, table.n_rows])
    groups = np.unique(keys, axis=0, return_inverse=True)
    start = np.full(n_labels, 1 / n_labels) if weights is None else weights
    fulls = [full]
    if full is None:
        fulls = [ml_concentration(table, mean, np.ones(len(table.n_rows))), *_FULL_GRID]
    denses = [log_likelihoods(table, mean, alpha) for alpha in fulls]
    fits = []
    for a in _SPARSE_GRID if sparse is None else [sparse]:
        spikes = spike_chances(table, groups, a, n_labels)
        for alpha, dense in zip(fulls, denses, strict=True):
            w = start
            for _ in range(_RANKING_STEPS):
                value, w, _ = _em_step(spikes, dense, w, weights is None)
            fits.append((value, SparseParameters(mean, float(alpha), w, float(a))))
    _, best = max(fits, key=lambda fit: fit[0])
    return _polish_weights(table, groups, best, full is None, weights is None)


def _em_step(spikes, dense, w, free_weights):
    """Value of the weights w, the next weights, and each client's chance (m,) of having all labels.

    The value is the log-likelihood with one more client, spread evenly over the numbers of labels.
    """
    chances, own, position = spikes
    mixed = chances @ w[:-1]
    with np.errstate(divide="ignore"):
        below = np.log(mixed)[position] + own
    above = dense + np.log(w[-1])
    value = np.logaddexp(below, above).sum() + np.log(w).mean()
    has_all = expit(above - below)
    if not free_weights:
        return value, w, has_all
    below_all = np.bincount(position, 1 - has_all, len(mixed))
    share = np.divide(below_all, mixed, out=np.zeros_like(mixed), where=mixed > 0)
    counts = np.append((share @ chances) * w[:-1], has_all.sum())
    return value, (counts + 1 / len(w)) / (len(has_all) + 1), has_all


def _polish_weights(table, groups, start, free_full, free_weights):
    """Parameters after EM in the weights and the concentration of clients with all labels.

    The concentration of the other clients stays on its grid, in steps of a factor of 1.65.
    """
    mean = start.mean
    spikes = spike_chances(table, groups, start.sparse, len(mean))
    full, w, before = start.full, start.weights, -np.inf
    dense = log_likelihoods(table, mean, full)
    for step in range(_EM_STEPS_TO_END):
        value, w, has_all = _em_step(spikes, dense, w, free_weights)
        if step % _STEPS_PER_CONCENTRATION:
            continue
        if value - before < _GAIN_TO_GO_ON * len(has_all):
            break
        before = value
        if free_full:
            full = ml_concentration(table, mean, has_all)
            dense = log_likelihoods(table, mean, full)
    return SparseParameters(mean, full, w, start.sparse)
