"""Clients' posteriors around a population that others released, client by client."""

from functools import partial

import numpy as np

from pfl_sklearn._clients import client_batches
from pfl_sklearn._parallel import map_batches
from pfl_sklearn.linear_model._posterior import RowPosterior
from pfl_sklearn.linear_model._roots import square_root

_CELLS = 1 << 18  # of a batch: it fits the cache
_AS_GOOD_AS_EXACT = 1e-6
_LARGEST = 1e150


def client_posteriors(table, found, covariance, n_jobs):
    """Coefficients (m, p) and their posterior under N(found.mean, covariance + its error).

    The error of the released mean adds to the prior covariance (q, q) of the random coefficients:
    a mean that is all noise makes every client keep its own regression. That of the fixed ones is
    what their posterior has; its correlation with the others' is left out. A client's own part in
    the release, one of many under noise, is not taken out of it again.

    Where the released noise variance is of no use, rows count for as good as exact: every client
    keeps its own regression, around the released mean where its rows tell nothing, and states no
    standard deviation. A client with values too large to be squared gets NaN, alone.
    """
    q, p = table.n_random, table.columns.shape[1]
    noise = found.noise if found.trusted else _AS_GOOD_AS_EXACT * found.noise
    ratio, error = np.zeros((p, p)), np.zeros((p, p))
    ratio[:q, :q] = (covariance + found.covariance[:q, :q]) / noise
    error[q:, q:] = found.covariance[q:, q:]
    with np.errstate(over="ignore", invalid="ignore"):
        residuals = table.y - table.columns @ found.mean
        solved = _solve(table, residuals, square_root(ratio[:q, :q]), n_jobs)
    coefficients = np.tile(found.mean, (table.n_clients, 1))
    # As wide for every table: the largest client's number of rows is not told to the others.
    rows = np.zeros((table.n_clients, q, p))
    for clients, whitened in solved:
        pulled = (whitened[:, None, :, -1] @ whitened[:, :, :q])[:, 0]
        coefficients[clients, :q] += pulled @ ratio[:q, :q]
        rows[clients, : whitened.shape[1]] = whitened[:, :, :-1]
    stated = found.noise if found.trusted else np.nan
    return coefficients, RowPosterior(rows, ratio, stated, error, np.ones(p))


def _solve(table, residuals, root, n_jobs):
    """Clients and whitened rows (b, k, p + 1) of every batch."""
    index = client_batches(table.codes, table.n_clients, _CELLS // table.columns.shape[1])
    batches = [
        (clients, np.concatenate([table.columns[rows], residuals[rows][..., None]], axis=-1))
        for clients, rows in index
    ]
    return map_batches(partial(_whiten_batch, root=root), batches, n_jobs)


def _whiten_batch(clients, table, root):
    """Clients, and rows (b, k, p + 1) times the inverse root of I + Z P Z', P = root root'.

    By singular values, which take rows of any size; k is at most the number q of random columns.
    """
    q = len(root)
    too_large = ~(np.abs(table).max(axis=(1, 2)) < _LARGEST)
    table[too_large] = 0.0
    if table.shape[1] > q:
        table = np.linalg.qr(table, mode="r")[:, :q]
    left, values, _ = np.linalg.svd(table[:, :, :q] @ root, full_matrices=False)
    whitened = left.transpose(0, 2, 1) @ table / np.hypot(1, values)[..., None]
    whitened[too_large] = np.nan
    return clients, whitened
