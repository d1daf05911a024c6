"""Marginal likelihood of a linear mixed model, with population coefficients profiled out.

All covariances are relative to the noise variance. The reduced rows of a client have the covariance
``noise * V`` with ``V = I + Z P Z'``, where P is the between-client covariance over the noise
variance. Whitened rows are the reduced rows times the inverse root of V.
"""

from typing import NamedTuple

import numpy as np

from pfl_sklearn.linear_model._algebra import estimable, inverse_root, row_slices, solve_lower
from pfl_sklearn.linear_model._mixed._reduction import flat_rows

_BLOCK_CELLS = 1 << 16  # of the clients whose rows are whitened together, in the cache
_BLOCK_ROWS = 1024  # of a product that then fits the processor's cache
_SMALLEST_SQUARES = 1e-280  # residual squares where all targets are 0, which have no logarithm
_EXACT_FIT = 1e-28  # residual squares over squares of the target that count as rounding


class Whitened(NamedTuple):
    """Whitened rows (b, k, p + 1) of every stack, and the summed log determinants of V."""

    rows: list
    log_det: float


class Settings(NamedTuple):
    """What is known; `first` is the first column with a free population coefficient."""

    restricted: bool
    first: int
    noise: float | None


class Point(NamedTuple):
    """The profile at one between-client covariance."""

    coefficients: np.ndarray  # (p_free,), in the scale of the reduction
    root: np.ndarray  # (p_free, rank); its square, times the noise variance, is their covariance
    residuals: list  # whitened (b, k), of every stack
    noise: float
    criterion: float  # minus twice the log-likelihood

    def covariance(self):
        """Covariance (p_free, p_free) of the coefficients."""
        return self.noise * self.root @ self.root.T


def whiten_spectral(reduced, ratio, reuse=None):
    """Whiten under P = ratio * I, into the memory of `reuse` (whitened rows no longer needed)."""
    rows, log_det = [], 0.0
    for k, stack in enumerate(reduced.stacks):
        weights = 1 / (1 + ratio * stack.eigenvalues)
        log_det -= np.log(weights).sum()
        # Fresh memory for each of many steps would cost more than the products.
        out = None if reuse is None else reuse.rows[k]
        roots = np.sqrt(weights).astype(stack.rows.dtype)
        rows.append(np.multiply(stack.rows, roots[..., None], out=out))
    return Whitened(rows, log_det)


def whiten(reduced, factor):
    """Whiten under P = factor factor' (q, r)."""
    whitened, log_det = [], 0.0
    for stack in reduced.stacks:
        rows, diagonals = np.empty_like(stack.rows), np.empty(stack.rows.shape[:2])
        for part in row_slices(len(rows), rows[:1].size, _BLOCK_CELLS):
            moved = stack.rows[part, :, : reduced.n_random] @ factor
            covariance = moved @ moved.transpose(0, 2, 1)
            covariance += np.eye(covariance.shape[1])
            lower = np.linalg.cholesky(covariance)
            diagonals[part] = np.einsum("bkk->bk", lower)
            rows[part] = solve_lower(lower, stack.rows[part])
        log_det += 2 * np.log(diagonals).sum()
        whitened.append(rows)
    return Whitened(whitened, log_det)


def profile(reduced, whitened, settings):
    """Population coefficients, noise variance and criterion under whitened rows."""
    first = settings.first
    gram = normal_matrix(reduced, whitened.rows)[first:, first:]
    # Ranks are judged after whitening, but the determinant is that of the data's own columns.
    root, log_det = inverse_root(gram[:-1, :-1], reduced.scale[first:])
    coefficients = root @ (root.T @ gram[:-1, -1])
    residuals, square = _residuals(reduced, whitened, coefficients, first)
    rank = root.shape[1]
    rows = reduced.n_rows - (rank if settings.restricted else 0)
    noise = square / max(rows, 1) if settings.noise is None else settings.noise
    value = whitened.log_det + rows * np.log(2 * np.pi) - reduced.log_weights
    with np.errstate(divide="ignore", invalid="ignore"):  # no rows left, or a noise of 0
        value += rows * np.log(noise) + (rows if settings.noise is None else square / noise)
    if settings.restricted:
        value += log_det
    return Point(coefficients, root, residuals, float(noise), float(value))


def open_coefficients(reduced, whitened, point, first):
    """Positions of the population coefficients (p_free,) that are not identified."""
    if point.root.shape[1] == len(point.root):
        return np.zeros(0, dtype=np.intp)
    gram = normal_matrix(reduced, whitened.rows)[first:-1, first:-1]
    return np.flatnonzero(~estimable(gram))


def normal_matrix(reduced, rows):
    """Gram matrix (p + 1, p + 1) of all rows; `rows` are those of every stack, whitened or not."""
    gram = sum(flat.T @ flat for flat in map(flat_rows, rows))
    gram[reduced.n_random :, reduced.n_random :] += reduced.remainder
    return gram


def refined(reduced, whitened, settings, point):
    """The same point, without the rounding errors of its normal equations."""
    first, coefficients = settings.first, point.coefficients
    residuals, n_fixed = point.residuals, len(reduced.remainder) - 1
    for _ in range(2):  # each step of iterative refinement gains the digits that solving lost
        slope = np.zeros(len(coefficients))
        fixed = coefficients[len(coefficients) - n_fixed :]
        slope[len(slope) - n_fixed :] = (
            reduced.remainder[:-1, -1] - reduced.remainder[:-1, :-1] @ fixed
        )
        for rows, residual in zip(whitened.rows, residuals, strict=True):
            slope += residual.ravel() @ flat_rows(rows)[:, first:-1]
        coefficients = coefficients + point.root @ (point.root.T @ slope)
        residuals, _ = _residuals(reduced, whitened, coefficients, first)
    return point._replace(coefficients=coefficients, residuals=residuals)


def _residuals(reduced, whitened, coefficients, first):
    """Whitened residuals (b, k) of every stack, and the residual squares of all rows."""
    direction = np.append(-coefficients[len(coefficients) - len(reduced.remainder) + 1 :], 1.0)
    square = direction @ reduced.remainder @ direction
    residuals = []
    for rows in whitened.rows:
        flat = flat_rows(rows)
        residual = flat[:, -1] - flat[:, first:-1] @ coefficients
        square += residual @ residual
        residuals.append(residual.reshape(rows.shape[:2]))
    return residuals, max(square, _EXACT_FIT * reduced.sum_of_squares, _SMALLEST_SQUARES)


def slope_spectral(reduced, whitened, point, settings, ratio):
    """Slope of the criterion in the ratio; sum and sum of squares of the slopes of log V (R,)."""
    slope, first_sum, second_sum = 0.0, 0.0, 0.0
    for stack, rows, residual in zip(reduced.stacks, whitened.rows, point.residuals, strict=True):
        share = stack.eigenvalues / (1 + ratio * stack.eigenvalues)
        slope -= np.vdot(share, residual**2) / point.noise
        first_sum += share.sum()
        second_sum += np.vdot(share, share)
        if settings.restricted:
            slope -= share.ravel() @ _leverages(flat_rows(rows)[:, settings.first : -1], point.root)
    return slope + first_sum, first_sum, second_sum


def _leverages(rows, root):
    """Squared lengths (R,) of rows (R, p) @ root, in blocks that fit the cache."""
    squares = np.empty(len(rows))
    for start in range(0, len(rows), _BLOCK_ROWS):
        moved = rows[start : start + _BLOCK_ROWS] @ root
        squares[start : start + _BLOCK_ROWS] = np.einsum("rk,rk->r", moved, moved)
    return squares


def slope_matrix(reduced, whitened, point, settings):
    """Derivative (q, q) of the criterion in P."""
    q = reduced.n_random
    slope = np.zeros((q, q))
    for stack, residual in zip(whitened.rows, point.residuals, strict=True):
        for part in row_slices(len(stack), stack[:1].size, _BLOCK_CELLS):
            rows, random = stack[part], stack[part, :, :q]
            pulled = (residual[part, None, :] @ random)[:, 0]
            flat = random.reshape(-1, q)
            slope += flat.T @ flat - pulled.T @ pulled / point.noise
            if settings.restricted:
                leverage = rows[:, :, settings.first : -1] @ point.root
                hat = leverage @ leverage.transpose(0, 2, 1)
                slope -= flat.T @ (hat @ random).reshape(-1, q)
    return slope


def client_deviations(reduced, whitened, point, ratio):
    """Conditional means (m, q) of the random coefficients, minus their population mean."""
    deviations = np.zeros((reduced.n_clients, reduced.n_random))
    for stack, rows, residual in zip(reduced.stacks, whitened.rows, point.residuals, strict=True):
        pulled = (residual[:, None, :] @ rows[:, :, : reduced.n_random])[:, 0]
        deviations[stack.clients] = pulled @ ratio
    return deviations
