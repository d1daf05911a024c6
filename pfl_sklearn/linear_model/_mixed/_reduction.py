"""Rows of a linear mixed model, reduced client by client without loss.

Rotating the rows of a client does not change its likelihood. A first rotation makes the random
columns triangular, so they are not zero in at most q rows. The other rows say nothing about the
random coefficients; we pool them over all clients in one Gram matrix. A second rotation, by the
eigenvectors of Z Z', makes the rows independent under a spherical covariance.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from pfl_sklearn._parallel import map_batches


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
    table : RotatedTable
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
    q, p = table.n_random, table.n_columns
    if scale is None:
        scale = _scales(table, common_scale)
    reduce = partial(
        _reduce_batch, move=table.move, scale=np.append(scale, 1.0), n_random=q, spectral=spectral
    )
    stacks, remainders, squares = zip(*map_batches(reduce, table.batches, n_jobs), strict=True)
    return Reduced(
        _joined_stacks(stacks),
        sum(remainders, np.zeros((p - q + 1,) * 2)),
        table.n_rows,
        table.n_clients,
        q,
        scale,
        sum(squares),
        # Rows times roots of weights have a density that is larger by these roots.
        table.log_weights,
    )


def random_moments(reduced):
    """Mean second moments (q, q) of the clients' random columns."""
    q = reduced.n_random
    random = [stack.rows[:, :, :q].reshape(-1, q) for stack in reduced.stacks]
    return sum(rows.T @ rows for rows in random) / reduced.n_clients


def flat_rows(rows):
    """Rows (b k, p + 1) of all clients of a stack, one below the other."""
    return rows.reshape(-1, rows.shape[2])


def _scales(table, common):
    """Factors (p,) that give a client's columns a length of about 1.

    A variance ratio of about 1 is then one that the rows of a client can tell from 0.
    """
    squares = table.summed(lambda rows: np.sum(table.move(rows)[..., :-1] ** 2, axis=1))
    squares /= table.n_clients
    if common:
        squares[: table.n_random] = squares[: table.n_random].mean()
    return np.divide(1, np.sqrt(squares), out=np.ones_like(squares), where=squares > 0)


def _reduce_batch(clients, rows, move, scale, n_random, spectral):
    """Stack of one batch, the Gram matrix of its remaining rows, and its targets' squares."""
    table = move(rows) * scale
    square, size = float(np.vdot(table[..., -1], table[..., -1])), table.shape[2] - n_random
    remainder = np.zeros((size, size))
    if table.shape[1] > n_random:  # fewer rows have no zeros to gain
        triangular: Any = np.linalg.qr(table, mode="r")
        left = triangular[:, n_random:, n_random:].reshape(-1, size)
        # A copy: a view would keep all rows in memory.
        table, remainder = triangular[:, :n_random].copy(), left.T @ left
    random, values = table[:, :, :n_random], None
    if spectral and table.shape[1] == 1:  # one row is independent as it is
        values = np.sum(random**2, axis=2)
    elif spectral:
        values, vectors = np.linalg.eigh(random @ random.transpose(0, 2, 1))
        table = vectors.transpose(0, 2, 1) @ table
        values = np.maximum(values, 0.0)  # rounding errors would be negative variances
    return ReducedStack(clients, table, values), remainder, square


def _joined_stacks(stacks):
    """Join the stacks whose clients have equally many rows."""
    joined = []
    for size in sorted({stack.rows.shape[1] for stack in stacks}):
        same = [stack for stack in stacks if stack.rows.shape[1] == size]
        clients, rows, values = (list(parts) for parts in zip(*same, strict=True))
        eigenvalues = None if values[0] is None else np.concatenate(values)
        joined.append(ReducedStack(np.concatenate(clients), np.concatenate(rows), eigenvalues))
    return joined
