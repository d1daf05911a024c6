"""Fits that search for nothing: clients that share nothing, or a population that is known."""

from functools import partial

import numpy as np

from pfl_sklearn._parallel import map_batches
from pfl_sklearn.linear_model._algebra import estimable, inverse_root, square_root
from pfl_sklearn.linear_model._mixed._posterior import CovariancePosterior, RowPosterior
from pfl_sklearn.linear_model._mixed._reduction import MixedModelEstimates, column_centre

_WITHIN = 1e-22  # share of a column's squares within clients that counts as rounding
# Singular values, relative to the columns' lengths, that count as rounding errors: those of rows
# keep more digits than the eigenvalues of a Gram matrix.
_LEAST_SINGULAR_VALUE = 1e-12


def fit_without_pooling(table, prior, options, covariance):
    """MixedModelEstimates by each client's own least squares of minimum norm.

    Fixed coefficients come from the within estimator: we project the random columns off the rows of
    each client and regress on the remainder. `covariance` (q, q) of the fitted prior is NaN for a
    single client, infinite if the prior says so.
    """
    batches = list(table.moved_batches())
    solve = partial(_least_squares_batch, intercept=table.intercept, n_random=table.n_random)
    solved = map_batches(solve, batches, 1)
    fixed, fixed_root, unidentified = _fixed_coefficients(batches, solved, table.n_random)
    m, p, q = table.n_clients, table.n_columns, table.n_random
    coefficients, covariances = np.empty((m, p)), np.zeros((m, p, p))
    square, ranks, direction = 0.0, 0, np.append(-fixed, 1.0)
    coefficients[:, q:] = fixed
    for (clients, _), (solution, inverse, residuals, rank) in zip(batches, solved, strict=True):
        coefficients[clients, :q] = solution @ direction
        residual = residuals @ direction
        square += np.vdot(residual, residual)
        ranks += int(rank.sum())
        fixed_effect = np.zeros((len(clients), p, fixed_root.shape[1]))
        fixed_effect[:, :q], fixed_effect[:, q:] = -solution[:, :, :-1] @ fixed_root, fixed_root
        covariances[clients] = fixed_effect @ fixed_effect.transpose(0, 2, 1)
        covariances[clients, :q, :q] += inverse @ inverse.transpose(0, 2, 1)
    rows = table.n_rows - (ranks + fixed_root.shape[1] if options.method == "reml" else 0)
    noise = options.noise_variance
    if noise is None:
        noise = square / rows if rows > 0 else np.nan  # each client fits its rows exactly
    covariances *= noise
    population, mean = coefficients.mean(axis=0), prior.known_mean(q)
    error, log_likelihood = covariances[0].copy(), np.nan
    first, unidentified = 0 if mean is None else q, q + unidentified
    if m == 1:  # the client is the population, so a coefficient may be open to both
        # A mean far from 0 would make a feature look like a multiple of the intercept.
        centre = np.append(column_centre(table, None, table.intercept is not None), 0.0)
        normal = table.squares_about(centre)[:-1, :-1]
        unidentified = first + np.flatnonzero(~estimable(normal)[first:])
        log_likelihood = _log_likelihood(table, noise, square, rows, options.method == "reml")
    if m > 1 or mean is not None:
        error[:q], error[:, :q] = 0.0, 0.0
    if mean is not None:
        population[:q] = mean
    elif m > 1:  # nothing bounds the mean of clients that share nothing
        error[np.arange(q), np.arange(q)] = np.inf
    return MixedModelEstimates(
        population,
        error,
        coefficients,
        CovariancePosterior(covariances, np.append(np.full(q, np.inf), np.zeros(p - q))),
        prior.with_values(population[:q], covariance),
        covariance,
        float(noise),
        log_likelihood,
        unidentified=unidentified,
        no_pooling=m > 1,
        first=first,
    )


def _least_squares_batch(clients, rows, intercept, n_random):
    """Least squares of every client's fixed columns and target on its random columns.

    Returns solutions (b, q, f + 1), maps (b, q, n), residuals (b, n, f + 1), and ranks (b,).
    """
    random = rows[:, :, :n_random]
    varies = intercept is not None and intercept < n_random
    if varies:  # project off the intercept first, by hand: slopes keep the digits of far columns
        ones = rows[:, :, intercept]
        length = np.sqrt(np.einsum("bn,bn->b", ones, ones))[:, None]
        present = length[:, 0] > 0  # not if all rows of a private fit's client count as absent
        length[~present] = 1.0
        unit = ones / length
        slopes = np.delete(random, intercept, axis=2)
        mean = (unit[:, None, :] @ slopes)[:, 0]
        slopes = slopes - unit[..., None] * mean[:, None, :]
    else:
        slopes = random
    lengths = np.sqrt(np.einsum("bnq,bnq->bq", random, random).max(axis=1, initial=0.0))
    inverse, rank = _pseudo_inverse(slopes, lengths)
    if varies:
        first = unit[:, None, :] - mean[:, None, :] @ inverse
        inverse = np.insert(inverse, intercept, first[:, 0] / length, axis=1)
        rank = rank + present
    solution = inverse @ rows[:, :, n_random:]
    residuals = rows[:, :, n_random:] - random @ solution
    return solution, inverse, residuals, rank


def _pseudo_inverse(matrices, lengths):
    """Pseudo-inverses (b, q, n) of matrices (b, n, q), and their ranks.

    Singular values count as 0 if they are rounding errors of columns of those lengths (b,).
    """
    if not matrices.shape[2]:
        return matrices.transpose(0, 2, 1), np.zeros(len(matrices), dtype=int)
    left, values, right = np.linalg.svd(matrices, full_matrices=False)
    largest = np.maximum(values[:, 0], lengths)[:, None]
    nonzero = values > _LEAST_SINGULAR_VALUE * largest
    inverse = np.divide(1, values, out=np.zeros_like(values), where=nonzero)
    ranks = nonzero.sum(axis=1)
    return (right.transpose(0, 2, 1) * inverse[:, None, :]) @ left.transpose(0, 2, 1), ranks


def _fixed_coefficients(batches, solved, q):
    """Within estimator (f,), root (f, rank) of its covariance over the noise, unidentified ones."""
    flat = (residuals.reshape(-1, residuals.shape[2]) for _, _, residuals, _ in solved)
    gram = sum(rows.T @ rows for rows in flat)
    squares = sum(np.sum(rows[..., q:-1] ** 2, axis=(0, 1)) for _, rows in batches)
    # A column that is constant within clients has no within estimator: its coefficient is 0.
    varies = np.diag(gram)[:-1] > _WITHIN * squares
    gram[:-1] *= varies[:, None]
    normal = gram[:-1, :-1] * varies
    root, _ = inverse_root(normal)
    return root @ (root.T @ gram[:-1, -1]), root, np.flatnonzero(~estimable(normal))


def _log_likelihood(table, noise, square, rows, restricted):
    """Log-likelihood of a single client's rows."""
    if not noise > 0:  # an exact fit has no density
        return np.nan
    value = rows * np.log(2 * np.pi * noise) + square / noise - table.log_weights
    if restricted:
        ((_, one_client),) = table.moved_batches()
        values = np.linalg.svd(one_client[0, :, :-1], compute_uv=False)
        value += 2 * np.log(values[: table.n_rows - rows]).sum()
    return -0.5 * float(value)


def fit_known_population(table, prior, mean, covariance, options):
    """Posterior of every client under a known N(mean, covariance) and noise variance."""
    noise = options.noise_variance
    ratio = covariance / noise
    # Products with a multiple of the identity would be wasted.
    common = np.array_equal(ratio, ratio[0, 0] * np.eye(len(ratio)))
    solve = partial(solve_in_rows, mean=mean, ratio=ratio[0, 0] if common else ratio)
    m, q = table.n_clients, table.n_random
    batches = [(clients, rows[..., :-1], rows[..., -1]) for clients, rows in table.moved_batches()]
    solved = map_batches(solve, batches, 1)
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
        RowPosterior(rows, square_root(ratio), noise, error, np.ones(q), lower),
        prior.with_values(mean, covariance),
        covariance,
        noise,
        -0.5 * float(value),
        first=q,
    )


def solve_in_rows(clients, X, y, mean, ratio):
    """Coefficients (b, q), Cholesky factors (b, n, n) of V, summed log determinants and squares."""
    half = y - X @ mean
    scaled = X if np.ndim(ratio) == 0 else X @ ratio
    covariance = scaled @ X.transpose(0, 2, 1)
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
    theta = mean + (solved[:, None, :] @ scaled)[:, 0]
    return theta, lower, 2 * np.log(diagonal).sum(), np.vdot(half, half)
