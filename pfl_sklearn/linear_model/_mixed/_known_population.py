"""Linear regressions under a known population: a ridge regression for every client.

No client has more rows than coefficients here, so we solve the systems in the space of rows.
"""

from functools import partial

import numpy as np

from pfl_sklearn._parallel import map_batches
from pfl_sklearn.linear_model._posterior import RowPosterior
from pfl_sklearn.linear_model._table import MixedModelEstimates


def is_known_with_few_rows(table, mean, covariance, noise):
    """Whether everything is known and no client has more rows than coefficients."""
    known = mean is not None and covariance is not None and noise is not None
    few = table.sizes.max() <= table.n_random  # or a rotation would shorten the rows
    return known and few and table.n_random == table.n_columns


def fit_known_population(table, prior, mean, covariance, options):
    """Posterior of every client under a known N(mean, covariance) and noise variance."""
    noise = options.noise_variance
    ratio = covariance / noise
    # Products with a multiple of the identity would be wasted.
    if np.array_equal(ratio, ratio[0, 0] * np.eye(len(ratio))):
        solve = partial(solve_in_rows, mean=mean, ratio=ratio[0, 0])
    else:
        solve = partial(solve_in_rows, mean=mean, ratio=ratio)
    m, q = table.n_clients, table.n_random
    batches = [(clients, rows[..., :-1], rows[..., -1]) for clients, rows in table.moved_batches()]
    solved = map_batches(solve, batches, options.n_jobs)
    size = max(batch[1].shape[1] for batch in batches)
    coefficients = np.empty((m, q))
    # Rows of zeros with factors of 1 fill up smaller clients: they change nothing.
    rows, lower = np.zeros((m, size, q)), np.tile(np.eye(size), (m, 1, 1))
    value = table.n_rows * np.log(2 * np.pi * noise) - table.log_weights
    for (clients, X, _), (theta, root, log_det, square) in zip(batches, solved, strict=True):
        n = X.shape[1]
        coefficients[clients] = theta
        rows[clients, :n] = X
        lower[clients, :n, :n] = root
        value += log_det + square / noise
    error = np.zeros((q, q))  # the population is known
    return MixedModelEstimates(
        mean,
        error,
        coefficients,
        RowPosterior(rows, ratio, noise, error, np.ones(q), lower),
        prior.with_values(mean, covariance),
        covariance,
        noise,
        -0.5 * float(value),
        1,
        True,
    )


def solve_in_rows(clients, X, y, mean, ratio):
    """Coefficients (b, q), Cholesky factors (b, n, n) of V, summed log determinants and squares."""
    half = y - X @ mean
    moved = X if np.ndim(ratio) == 0 else X @ ratio
    covariance = moved @ X.transpose(0, 2, 1)
    if np.ndim(ratio) == 0:
        covariance *= ratio
    covariance += np.eye(X.shape[1])
    lower = np.linalg.cholesky(covariance)
    diagonal = np.einsum("bkk->bk", lower)
    # Substitution by hand: all clients of a batch advance together, and their factors are small.
    for j in range(X.shape[1]):
        half[:, j] -= np.einsum("bk,bk->b", lower[:, j, :j], half[:, :j])
        half[:, j] /= diagonal[:, j]
    solved = half.copy()
    for j in reversed(range(X.shape[1])):
        solved[:, j] -= np.einsum("bk,bk->b", lower[:, j + 1 :, j], solved[:, j + 1 :])
        solved[:, j] /= diagonal[:, j]
    if np.ndim(ratio) == 0:
        solved *= ratio
    theta = mean + (solved[:, None, :] @ moved)[:, 0]
    return theta, lower, 2 * np.log(diagonal).sum(), np.vdot(half, half)
