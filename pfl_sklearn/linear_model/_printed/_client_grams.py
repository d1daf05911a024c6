"""Gram matrices of the clients' rows, for the printed linear regressions.

Joint gradient descent and AdaMix (Ozkara et al., 2023, ICLR) read rows only through X'X, X'y and
y'y, so a step costs the same however many rows a client has. Both work on point estimates of the
clients: we keep them to reproduce the published figures. Do not use them for analysis.
"""

from typing import NamedTuple

import numpy as np

from pfl_sklearn.linear_model._mixed._normal_rows._profiled_likelihood import reduce_table


class ClientGrams(NamedTuple):
    """Gram matrices of every client's rows; all columns are random."""

    normal: np.ndarray  # (m, q, q), X'X
    right: np.ndarray  # (m, q), X'y
    square: np.ndarray  # (m,), y'y
    n_rows: np.ndarray  # (m,)

    def gradient(self, theta):
        """X'(X theta - y), (m, q)."""
        return (self.normal @ theta[..., None])[..., 0] - self.right

    def residual_squares(self, theta):
        """Residual squares (m,)."""
        around = self.gradient(theta) - self.right
        return np.maximum(self.square + np.einsum("mq,mq->m", theta, around), 0.0)

    def curvature(self):
        """Largest eigenvalue of all clients' X'X."""
        return float(np.linalg.eigvalsh(self.normal)[:, -1].max())


def client_grams(table):
    """Gram matrices of every client; ValueError if there are fixed coefficients."""
    p = table.n_columns
    if table.n_random < p:
        raise ValueError(
            "in the printed algorithms all coefficients vary by client; expected random='all'."
        )
    reduced = reduce_table(table, spectral=True, scale=np.ones(p))
    grams = np.zeros((table.n_clients, p + 1, p + 1))
    for stack in reduced.stacks:
        grams[stack.clients] = stack.rows.transpose(0, 2, 1) @ stack.rows
    left = reduced.remainder[0, 0] / len(grams)  # of the rows beyond q; their sum is what counts
    return ClientGrams(grams[:, :-1, :-1], grams[:, :-1, -1], grams[:, -1, -1] + left, table.sizes)
