"""Rows of a linear mixed model, reduced client by client without loss.

Rotating the rows of a client does not change its likelihood. A first rotation makes the random
columns triangular, so they are not zero in at most q rows. The other rows say nothing about the
random coefficients; we pool them over all clients in one Gram matrix. A second rotation, by the
eigenvectors of Z Z', makes the rows independent under a spherical covariance.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from pfl_sklearn._clients import client_batches
from pfl_sklearn._parallel import map_batches

CACHED_CELLS = 1 << 18  # numbers in a batch of rows, which then fits the processor's cache


class ReducedStack(NamedTuple):
    """Reduced rows of clients that have equally many of them."""

    clients: np.ndarray  # (b,)
    rows: np.ndarray  # (b, k, p + 1): random columns, fixed columns, target
    eigenvalues: Any  # (b, k) of Z Z'; None unless the rows were rotated to them


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
        """Number of the population's coefficients, random columns first."""
        return len(self.scale)

    @property
    def mean_square(self):
        """Mean square of the target: the largest noise variance that a fit can have."""
        return self.sum_of_squares / self.n_rows

    @property
    def rows(self):
        """Rows (b, k, p + 1) of every stack."""
        return [stack.rows for stack in self.stacks]


def reduce_table(table, *, spectral, common_scale=True, scale=None, n_jobs=None):
    """Reduce the rows of all clients.

    Parameters
    ----------
    table : RegressionTable
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
    y, weights, q = table.y, table.weights, table.n_random
    if scale is None:
        scale = _scales(table, common_scale)
    root = None if weights is None else np.sqrt(weights)
    batches = [
        (clients, _scaled_rows(table.columns, y, rows, scale, root))
        for clients, rows in client_batches(
            table.codes, table.n_clients, CACHED_CELLS // len(scale)
        )
    ]
    reduce = partial(_reduce_batch, n_random=q, spectral=spectral)
    stacks, remainders = zip(*map_batches(reduce, batches, n_jobs), strict=True)
    return Reduced(
        _joined_stacks(stacks),
        sum(remainders, np.zeros((len(scale) - q + 1,) * 2)),
        len(y),
        table.n_clients,
        q,
        scale,
        float(np.vdot(y, y if weights is None else weights * y)),
        # Rows times roots of weights have a density that is larger by these roots.
        0.0 if weights is None else float(np.log(weights).sum()),
    )


def random_moments(reduced):
    """Mean second moments (q, q) of the clients' random columns."""
    q = reduced.n_random
    random = [stack.rows[:, :, :q].reshape(-1, q) for stack in reduced.stacks]
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


def _scales(table, common):
    """Factors (p,) that give a client's columns a length of about 1.

    A variance ratio of about 1 is then one that the rows of a client can tell from 0.
    """
    columns = table.columns
    if table.weights is None:
        squares = np.einsum("np,np->p", columns, columns) / table.n_clients
    else:
        squares = np.einsum("n,np,np->p", table.weights, columns, columns) / table.n_clients
    if common:
        squares[: table.n_random] = squares[: table.n_random].mean()
    return np.divide(1, np.sqrt(squares), out=np.ones_like(squares), where=squares > 0)


def _reduce_batch(clients, table, n_random, spectral):
    """Stack of one batch (b, n, p + 1), and the Gram matrix of its remaining rows."""
    size = table.shape[2] - n_random
    remainder = np.zeros((size, size))
    if table.shape[1] > n_random:  # fewer rows have no zeros to gain
        triangular: Any = np.linalg.qr(table, mode="r")
        left = triangular[:, n_random:, n_random:].reshape(-1, size)
        table, remainder = triangular[:, :n_random], left.T @ left
    if not spectral:
        return ReducedStack(clients, table, None), remainder
    random = table[:, :, :n_random]
    if table.shape[1] == 1:  # one row is independent as it is
        return ReducedStack(clients, table, np.sum(random**2, axis=2)), remainder
    values, vectors = np.linalg.eigh(random @ random.transpose(0, 2, 1))
    values = np.maximum(values, 0.0)  # rounding errors would be negative variances
    return ReducedStack(clients, vectors.transpose(0, 2, 1) @ table, values), remainder


def _joined_stacks(stacks):
    """Join the stacks whose clients have equally many rows."""
    joined = []
    for size in sorted({stack.rows.shape[1] for stack in stacks}):
        same = [stack for stack in stacks if stack.rows.shape[1] == size]
        clients, rows, values = (list(parts) for parts in zip(*same, strict=True))
        eigenvalues = None if values[0] is None else np.concatenate(values)
        joined.append(ReducedStack(np.concatenate(clients), np.concatenate(rows), eigenvalues))
    return joined
