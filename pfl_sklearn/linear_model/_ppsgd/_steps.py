"""Step sizes of both models: from alpha, from the theorems, and from the steepest batch."""

import math
from typing import NamedTuple

import numpy as np
from scipy.sparse import issparse

from pfl_sklearn._rounds.privacy import is_private
from pfl_sklearn.theory import ppsgd_learning_rate, smoothness_alpha

_CHUNK = 32  # rows: a longer batch is no steeper than the steepest chunk of it
_PART = 64
_MOST = 1024
_LARGEST = 1e150  # of values that are to be squared
_UNIT_SCALE = 3.0  # root mean square of a column that needs no scaling


class Steps(NamedTuple):
    """Step sizes of both models on average gradients.

    Parameters
    ----------
    population : float
        On the average over the clients expected in a round.
    local : float
        On a client's own average over its rows, of a client with the average number of them.
    """

    population: float
    local: float


def step_sizes(alpha, learning_rate, n_expected):
    """Steps of the two models; `learning_rate` is the larger of them.

    With ``a = alpha * n_expected`` they are (a, 1) for a <= 1 and (1, 1 / a) beyond, in units of
    `learning_rate`. In the paper's symbols they are alpha eta and eta / (q N).
    """
    if math.isinf(alpha):
        return Steps(learning_rate, 0.0)
    ratio = alpha * n_expected
    if ratio <= 1:
        return Steps(ratio * learning_rate, learning_rate)
    return Steps(learning_rate, learning_rate / ratio)


def check_learning_rate(model):
    """Raise ValueError if 'theory' lacks its constants, or if 'auto' would leak."""
    given = {name: getattr(model, name) for name in ("smoothness", "solution_norm", "gradient_std")}
    if model.learning_rate == "auto" and is_private(model):
        raise ValueError(
            "learning_rate='auto' looks at the data, which would leak when noise is added; give a "
            "number, or 'theory' with smoothness."
        )
    if model.learning_rate != "theory":
        return
    if given["smoothness"] is None:
        raise ValueError(
            "learning_rate='theory' needs smoothness: a bound on the curvature of a row's loss in "
            "both models together (for the squared loss twice the largest squared norm of a row of "
            "X). It is yours, never taken from the data."
        )
    if (given["solution_norm"] is None) != (given["gradient_std"] is None):
        raise ValueError(
            "solution_norm and gradient_std belong together; got "
            f"solution_norm={given['solution_norm']!r}, gradient_std={given['gradient_std']!r}."
        )


def theory_learning_rate(model, rows, n_expected):
    """Larger of the two steps at the step eta of the theorems."""
    smoothness = smoothness_alpha(
        model.smoothness,
        model.alpha,
        rows.n_clients,
        batch_sizes=rows.schedule.batch_sizes,
        client_fraction=n_expected / rows.n_clients,
        weighting=model.weighting,
    )
    norm, std = model.solution_norm or 1.0, model.gradient_std or 0.0
    eta = ppsgd_learning_rate(smoothness, norm, std, model.n_rounds)
    return eta if math.isinf(model.alpha) else eta * max(model.alpha, 1 / n_expected)


def auto_learning_rate(rows, loss, weighting, alpha, sampling):
    """Half the inverse curvature of the steepest batch: it looks at the data.

    Less if the population model steps, and so few clients are expected in a round that there are
    often many more.
    """
    relative = np.ones(rows.n_clients)
    if weighting == "samples":
        relative = rows.schedule.batch_sizes / rows.schedule.batch_sizes.mean()
    steepest = steepest_batch(rows.X, rows.offsets, rows.schedule.batch_sizes, relative)
    if sampling.n_fixed is None:
        n_expected = sampling.rate * rows.n_clients
        steepest *= 1 + min(alpha * n_expected, 1.0) * (1 - sampling.rate) / n_expected
    return 0.5 / (loss.curvature * steepest) if steepest > 0 else 1.0


def divergence_advice(table, learning_rate, private):
    """What to say if the rounds diverge; in a private fit it does not depend on the data."""
    found = f"learning_rate={learning_rate:.4g} is too large"
    if private:
        return f"{found} for these features. Lower it, or scale the features."
    if table.y.dtype.kind == "f" and np.abs(table.y).max(initial=0.0) > _LARGEST:
        return "y holds values too large to be squared (above about 1e150). Rescale it."
    if _largest_size(table.features) > _UNIT_SCALE:
        return f"{found} for these features. Scale them, or lower it."
    return f"{found}, although the features have unit scale. Lower it."


def _largest_size(X):
    """Largest root mean square of a column of X (n, d), dense or CSR.

    Methods of a sparse X may add up its duplicates in place, and its arrays are the caller's.
    """
    with np.errstate(over="ignore"):
        if issparse(X):
            squares = np.bincount(X.indices, X.data**2, X.shape[1])
        else:
            squares = np.einsum("nd,nd->d", X, X)
        return float(np.sqrt(squares.max(initial=0.0) / X.shape[0]))


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
        curvatures = weights[part] * _batch_curvatures(X, first[part], sizes[part])
        found = max(found, float(curvatures.max()))
    return found


def _chunks(offsets, sizes):
    """First row and client of chunks of `sizes` (m,) rows that cover every client's."""
    counts = -(-np.diff(offsets) // sizes)
    owner = np.repeat(np.arange(len(sizes)), counts)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    last = offsets[owner + 1] - sizes[owner]
    return np.minimum(offsets[owner] + number * sizes[owner], last), owner


def _batch_curvatures(X, first, sizes):
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
