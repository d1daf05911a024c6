"""Whitened rows of clients: their squares are the information on the population coefficients."""

import numpy as np


def whitened_rows(whitening, x):
    """Rows T (b, k, a p) with T'T = X' (W^-1 + Z L L' Z')^-1 X, from columns x (b, n, p)."""
    if whitening.ndim == 3:
        return whitening
    b, k, a, n = whitening.shape
    return (whitening.reshape(b, k * a, n) @ x).reshape(b, k, -1)


def whiten(form, roots, x):
    """What `whitened_rows` takes, and the summed log det H, for roots (b, n, a, c) of W.

    Many effects: a small matrix (b, k, a, n), to be multiplied by x where memory for the product
    is at hand. Few: the rows themselves.
    """
    features = form.features
    b, n, a, c = roots.shape
    r, p = features.shape[2], x.shape[2]
    if n * c < r * a:
        system = np.einsum("bjac,bjk,bkad->bjckd", roots, form.gram(), roots)
        lower = np.linalg.cholesky(system.reshape(b, n * c, n * c) + np.eye(n * c))
        log_det = 2 * np.log(np.einsum("bkk->bk", lower)).sum()
        inverse = invert_lower(lower).reshape(b, n * c, n, c)
        return np.einsum("bmjc,bjac->bmaj", inverse, roots), log_det
    across = roots.transpose(0, 1, 3, 2)[..., None]
    stacked = np.zeros((b, n * c + r * a, (r + p) * a))
    stacked[:, : n * c, : r * a] = (across * features[:, :, None, None, :]).reshape(b, n * c, -1)
    stacked[:, : n * c, r * a :] = (across * x[:, :, None, None, :]).reshape(b, n * c, -1)
    stacked[:, n * c :, : r * a] = np.eye(r * a)
    triangle = np.linalg.qr(stacked, mode="r")
    log_det = 2 * np.log(np.abs(np.einsum("bkk->bk", triangle[:, : r * a, : r * a]))).sum()
    return triangle[:, r * a :, r * a :], log_det


def invert_lower(lower):
    """Inverses (b, n, n) of lower triangles: all clients at a time, since n is small."""
    rows = np.ascontiguousarray(lower.transpose(1, 2, 0))
    inverse = np.zeros_like(rows)
    for j, row in enumerate(rows):
        inverse[j, j] = 1 / row[j]
        if j:
            inverse[j, :j] = -np.sum(row[:j, None] * inverse[:j, :j], axis=0) * inverse[j, j]
    return np.ascontiguousarray(inverse.transpose(2, 0, 1))
