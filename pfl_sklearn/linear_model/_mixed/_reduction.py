"""Rows of a linear mixed model, reduced client by client without loss.

Rotating the rows of a client does not change its likelihood. A first rotation makes the random
columns triangular, so they are not zero in at most q rows. The other rows say nothing about the
random coefficients; we pool them over all clients in one Gram matrix. A second rotation, by the
eigenvectors of Z Z', makes the rows independent under a spherical covariance.
"""

from functools import partial
from typing import NamedTuple

import numpy as np

from pfl_sklearn._clients import client_batches
from pfl_sklearn._parallel import map_batches

_CELLS = 1 << 18  # of a batch: it fits the cache


class ReducedStack(NamedTuple):
    """Reduced rows of clients that have equally many of them."""

    clients: np.ndarray  # (b,)
    rows: np.ndarray  # (b, k, p + 1): random columns, fixed columns, target
    eigenvalues: np.ndarray | None  # (b, k) of Z Z', if the rows were rotated to them


class Reduced(NamedTuple):
    """What the likelihood needs to know about N rows of m clients."""

    stacks: list
    remainder: np.ndarray  # (p - q + 1, p - q + 1), Gram matrix of fixed columns and target
    n_rows: int
    n_clients: int
    n_random: int
    scale: np.ndarray  # (p,), factors that multiplied the columns
    sum_of_squares: float  # of the target
    log_weights: float

    @property
    def n_columns(self):
        return len(self.scale)

    @property
    def eigenvalues(self):
        """Eigenvalues (R,) of the rows of all stacks."""
        return np.concatenate([stack.eigenvalues.ravel() for stack in self.stacks])


def reduce_rows(
    columns,
    y,
    codes,
    n_clients,
    n_random,
    *,
    weights=None,
    spectral,
    common_scale=True,
    n_jobs=None,
    scale=None,
):
    """Reduce the rows of all clients.

    Parameters
    ----------
    columns : ndarray of shape (n_rows, p)
        The `n_random` random columns first.
    y : ndarray of shape (n_rows,)
    codes : ndarray of shape (n_rows,)
    weights : ndarray of shape (n_rows,) or None
        Precision weights, positive.
    spectral : bool
        Rotate to the eigenvectors of Z Z', of scaled columns.
    common_scale : bool
        The random columns share one scale, so that a multiple of the identity stays one.
    scale : ndarray of shape (p,), default=None
        Factors for the columns. None: they make the columns of a client about length 1.

    Returns
    -------
    Reduced
    """
    if scale is None:
        scale = _scales(columns, weights, n_clients, n_random, common_scale)
    root = None if weights is None else np.sqrt(weights)
    sum_of_squares = float(np.vdot(y, y if weights is None else weights * y))
    batches = [
        (clients, _scaled_rows(columns, y, rows, scale, root))
        for clients, rows in client_batches(codes, n_clients, _CELLS // len(scale))
    ]
    reduce = partial(_reduce_batch, n_random=n_random, spectral=spectral)
    parts = map_batches(reduce, batches, n_jobs)
    size = columns.shape[1] - n_random + 1
    remainder = sum((part[1] for part in parts), np.zeros((size, size)))
    return Reduced(
        _joined_stacks([part[0] for part in parts]),
        remainder,
        len(y),
        n_clients,
        n_random,
        scale,
        sum_of_squares,
        0.0 if weights is None else float(np.log(weights).sum()),
    )


def reduce_table(table, *, spectral, common_scale=True, scale=None, n_jobs=None):
    """Reduced rows of a Table; the parameters are those of `reduce_rows`."""
    return reduce_rows(
        table.columns,
        table.y,
        table.codes,
        table.n_clients,
        table.n_random,
        weights=table.weights,
        spectral=spectral,
        common_scale=common_scale,
        n_jobs=n_jobs,
        scale=scale,
    )


def random_moments(reduced):
    """Mean second moments (q, q) of the clients' random columns."""
    random = [stack.rows[:, :, : reduced.n_random].reshape(-1, reduced.n_random)
              for stack in reduced.stacks]  # fmt: skip
    return sum(rows.T @ rows for rows in random) / reduced.n_clients


def flat_rows(rows):
    """Rows (b k, p + 1) of all clients of a stack, one below the other."""
    return rows.reshape(-1, rows.shape[2])


def _scaled_rows(columns, y, rows, scale, root):
    """Scaled and weighted rows (b, n, p + 1) of a batch."""
    table = np.empty((*rows.shape, len(scale) + 1))
    np.multiply(columns[rows], scale, out=table[..., :-1])
    table[..., -1] = y[rows]
    if root is not None:
        table *= root[rows][..., None]
    return table


def _scales(columns, weights, n_clients, n_random, common):
    """Factors (p,) that give a client's columns a length of about 1."""
    if weights is None:
        squares = np.einsum("np,np->p", columns, columns) / n_clients
    else:
        squares = np.einsum("n,np,np->p", weights, columns, columns) / n_clients
    if common:
        squares[:n_random] = squares[:n_random].mean()
    return np.divide(1, np.sqrt(squares), out=np.ones_like(squares), where=squares > 0)


def _reduce_batch(clients, table, n_random, spectral):
    """Stack of one batch (b, n, p + 1), and the Gram matrix of its remaining rows."""
    size = table.shape[2] - n_random
    remainder = np.zeros((size, size))
    if table.shape[1] > n_random:
        triangular = np.linalg.qr(table, mode="r")
        left = triangular[:, n_random:, n_random:].reshape(-1, size)
        table, remainder = triangular[:, :n_random], left.T @ left
    if not spectral:
        return ReducedStack(clients, table, None), remainder
    random = table[:, :, :n_random]
    if table.shape[1] == 1:
        return ReducedStack(clients, table, np.sum(random**2, axis=2)), remainder
    values, vectors = np.linalg.eigh(random @ random.transpose(0, 2, 1))
    return ReducedStack(
        clients, vectors.transpose(0, 2, 1) @ table, np.maximum(values, 0.0)
    ), remainder


def _joined_stacks(stacks):
    """Join the stacks whose clients have equally many rows."""
    joined = []
    for size in sorted({stack.rows.shape[1] for stack in stacks}):
        same = [stack for stack in stacks if stack.rows.shape[1] == size]
        values = None
        if same[0].eigenvalues is not None:
            values = np.concatenate([stack.eigenvalues for stack in same])
        clients = np.concatenate([stack.clients for stack in same])
        joined.append(ReducedStack(clients, np.concatenate([stack.rows for stack in same]), values))
    return joined
