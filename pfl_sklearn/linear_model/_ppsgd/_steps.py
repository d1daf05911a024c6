"""How steep the loss of a batch can be: what learning_rate='auto' looks at."""

import numpy as np
from scipy.sparse import issparse

_CHUNK = 32  # rows: a longer batch is no steeper than the steepest chunk of it
_PART = 64
_MOST = 1024


def steepest_batch(X, offsets, batch_sizes, weights):
    """Largest curvature of a client's batch, in units of the loss's, times the client's weight.

    That is the largest eigenvalue of the mean of x x' over rows that follow one another. Rows X
    (dense or CSR) are in client order, with `offsets` (m + 1,); `batch_sizes` and `weights` are
    (m,). It is no more than the mean squared norm of the rows, so chunks with the longest rows come
    first; after a thousand of them the others are taken to be no steeper.
    """
    sizes = np.minimum(batch_sizes, _CHUNK)
    first, owner = _chunks(offsets, sizes)
    sizes, weights = sizes[owner], weights[owner]
    with np.errstate(over="ignore", invalid="ignore"):
        squares = X.power(2).sum(axis=1) if issparse(X) else np.einsum("nd,nd->n", X, X)
        total = np.concatenate([[0.0], np.cumsum(np.asarray(squares).ravel())])
        bounds = weights * (total[first + sizes] - total[first]) / sizes
    if not np.isfinite(total[-1]):
        raise ValueError(
            "learning_rate='auto' found no step: the squares of these features overflow. Scale the "
            "features."
        )
    order, found = np.argsort(-bounds, kind="stable")[:_MOST], 0.0
    for start in range(0, len(order), _PART):
        part = order[start : start + _PART]
        if bounds[part[0]] <= found:
            break
        curvatures = weights[part] * _curvatures(X, first[part], sizes[part])
        found = max(found, float(curvatures.max()))
    return found


def _chunks(offsets, sizes):
    """First row and client of chunks of `sizes` (m,) rows that cover every client's."""
    counts = -(-np.diff(offsets) // sizes)
    owner = np.repeat(np.arange(len(sizes)), counts)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    last = offsets[owner + 1] - sizes[owner]
    return np.minimum(offsets[owner] + number * sizes[owner], last), owner


def _curvatures(X, first, sizes):
    """Largest eigenvalues (k,) of the mean of x x' over `sizes` (k,) rows from `first` (k,) on."""
    found = np.zeros(len(first))
    for size in np.unique(sizes):
        (members,) = np.nonzero(sizes == size)
        if issparse(X):
            rows = [X[start : start + size] for start in first[members]]
            products = np.array([(part @ part.T).toarray() for part in rows])
        else:
            rows = X.take(first[members][:, None] + np.arange(size), axis=0)
            products = rows @ rows.transpose(0, 2, 1)
        found[members] = np.linalg.eigvalsh(products)[:, -1] / size
    return found
