"""Step sizes of both models: from alpha, from the theorems, and from the data."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pfl_sklearn._float_range import check_float_range
from pfl_sklearn._rounds.privacy import is_private
from pfl_sklearn._rounds.rows import count_within, is_sparse
from pfl_sklearn._typing import Floats, Integers
from pfl_sklearn.theory import ppsgd_learning_rate, smoothness_alpha

if TYPE_CHECKING:
    from pfl_sklearn._rounds.run import CheckedTable

AUTO_RATIO = 30.0  # of the global step to the local ones
_POWERS = 16  # products that a largest eigenvalue takes; a few percent short is good enough
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


def alpha_of(alpha: float | str, n_expected: float) -> float:
    """Number that `alpha` stands for, with so many clients expected in a round."""
    return AUTO_RATIO / n_expected if alpha == "auto" else float(alpha)


def step_sizes(alpha: float, learning_rate: float, n_expected: float) -> Steps:
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


def check_learning_rate(model: Any) -> None:
    """Raise ValueError if 'theory' lacks its constants, or if 'auto' would leak."""
    if model.learning_rate == "auto" and is_private(model):
        raise ValueError(
            "learning_rate='auto' looks at the data, which would leak when noise is added; give a "
            "number, or 'theory' with smoothness."
        )
    if model.learning_rate != "theory":
        return
    if model.smoothness is None:
        raise ValueError(
            "learning_rate='theory' needs smoothness: a bound on the curvature of a row's loss in "
            "both models together (for the squared loss twice the largest squared norm of a row of "
            "X). It is yours, never taken from the data."
        )
    if (model.solution_norm is None) != (model.gradient_std is None):
        raise ValueError(
            "solution_norm and gradient_std belong together; got "
            f"solution_norm={model.solution_norm!r}, gradient_std={model.gradient_std!r}."
        )


def theory_learning_rate(model, rows, alpha, n_expected, n_rounds) -> float:
    """Larger of the two steps at the step eta of the theorems."""
    smoothness = smoothness_alpha(
        model.smoothness,
        alpha,
        rows.n_clients,
        batch_sizes=rows.schedule.batch_sizes,
        client_fraction=n_expected / rows.n_clients,
        weighting=model.weighting,
    )
    norm, std = model.solution_norm or 1.0, model.gradient_std or 0.0
    eta = ppsgd_learning_rate(smoothness, norm, std, n_rounds)
    # Ours are steps on averages; the paper's on sums take the number of clients out of both.
    return eta if math.isinf(alpha) else eta * max(alpha, 1 / n_expected)


def auto_steps(rows, loss, weighting, alpha, n_expected, rate=None) -> tuple[float, Floats]:
    """Learning rate, and the local step (m,) of every client: they look at the data.

    Unless it is given, the learning rate is the inverse curvature of an average round: of all rows
    together, and of the chance that `n_expected` clients and their batches are steeper. A client
    whose batches are far steeper than the others' has a smaller local step of its own.
    """
    units = step_sizes(alpha, 1.0, n_expected)
    relative = np.ones(rows.n_clients)
    if weighting == "samples":
        relative = rows.schedule.batch_sizes / rows.schedule.batch_sizes.mean()
    steepest = relative * batch_curvatures(rows.X, rows.offsets, rows.schedule.batch_sizes)
    if rate is None and steepest.any():
        sizes = np.diff(rows.offsets)
        shared = largest_eigenvalue(rows.X, np.repeat(relative / sizes, sizes) / rows.n_clients)
        share = steepest / steepest.max()  # their squares may be too large
        typical = steepest.max() * np.sum(share**2) / np.sum(share)
        total = units.population * (shared + typical / n_expected) + units.local * typical
        rate = 1 / (loss.curvature * total)
    rate = 1.0 if rate is None else float(rate)  # any will do if all features are 0
    # Steps of 2 / curvature diverge. A quarter of that bounds a client alone, whatever the others.
    most = 0.5 / (loss.curvature * np.where(steepest > 0, steepest, 1.0))
    return rate, np.minimum(rate * units.local, most)


def check_squarable(table: CheckedTable) -> None:
    """Raise ValueError if values cannot be squared; not for fits with noise.

    We scale columns inside, so they may be small.
    """
    features = table.features.data if is_sparse(table.features) else table.features
    check_float_range("X", features, smallest=0.0)
    if table.y.dtype.kind == "f":
        check_float_range("y", table.y)


def divergence_advice(table: CheckedTable, learning_rate: float, private: bool) -> str:
    """Sentence to give if the rounds diverge; in a private fit it does not depend on the data."""
    text = f"learning_rate={learning_rate:.4g} is too large"
    if private:
        return f"{text} for these features. Lower it, or scale the features."
    if _largest_size(table.features) > _UNIT_SCALE:
        return f"{text} for these features. Scale them, or lower it."
    return f"{text}, although the features have unit scale. Lower it."


def _largest_size(X):
    """Largest root mean square of a column of X (n, d), dense or CSR.

    Methods of a sparse X may add up its duplicates in place, and its arrays are the caller's.
    """
    with np.errstate(over="ignore"):
        if is_sparse(X):
            squares = np.bincount(X.indices, X.data**2, X.shape[1])
        else:
            squares = np.einsum("nd,nd->d", X, X)
        return float(np.sqrt(squares.max(initial=0.0) / X.shape[0]))


def batch_curvatures(X: Any, offsets: Integers, batch_sizes: Integers) -> Floats:
    """Bounds (m,) on the curvature of each client's batches, in units of the loss's.

    They are the largest mean squared norms of so many rows that follow one another, of rows X
    (dense or CSR) in client order.
    """
    squares = X.power(2).sum(axis=1) if is_sparse(X) else np.einsum("nd,nd->n", X, X)
    total = np.concatenate([[0.0], np.cumsum(np.asarray(squares).ravel())])
    counts = -(-np.diff(offsets) // batch_sizes)
    first = np.repeat(offsets[:-1], counts) + count_within(counts) * np.repeat(batch_sizes, counts)
    sizes = np.repeat(batch_sizes, counts)
    first = np.minimum(first, np.repeat(offsets[1:], counts) - sizes)
    # Differences of running sums may come out a little below 0.
    means = np.maximum(total[first + sizes] - total[first], 0.0) / sizes
    return np.maximum.reduceat(means, np.cumsum(counts) - counts)


def largest_eigenvalue(X: Any, weights: Floats) -> float:
    """Largest eigenvalue of the sum of x x' over rows X (n, p), with weights (n,)."""
    # From a fixed seed, so that equal data have equal steps.
    vector, eigenvalue = np.random.default_rng(0).normal(size=X.shape[1]), 0.0
    for _ in range(_POWERS):
        vector = vector / np.linalg.norm(vector)
        vector = X.T @ (weights * (X @ vector))
        size = np.abs(vector).max()  # divided by, so that the norm cannot overflow
        if size == 0:
            return 0.0
        vector = vector / size
        eigenvalue = float(size * np.linalg.norm(vector))
    return eigenvalue
