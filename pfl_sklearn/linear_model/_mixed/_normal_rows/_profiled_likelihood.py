"""Marginal likelihood of a linear mixed model, with population coefficients profiled out.

Rotating the rows of a client does not change its likelihood. A first rotation makes the random
columns triangular, so they are not zero in at most q rows. The other rows say nothing about the
random coefficients; we pool them over all clients in one Gram matrix. A second rotation, by the
eigenvectors of Z Z', makes the rows independent under a spherical covariance.

All covariances are relative to the noise variance. The reduced rows of a client have the covariance
``noise * V`` with ``V = I + Z P Z'``, where P is the between-client covariance over the noise
variance. Whitened rows are the reduced rows times the inverse root of V.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from pfl_sklearn._parallel import map_batches
from pfl_sklearn.linear_model._algebra import estimable, inverse_root, row_slices, solve_lower

_BLOCK_CELLS = 1 << 17  # of the clients whose rows are whitened together, in the cache
_BLOCK_ROWS = 1024  # of a product that then fits the processor's cache
_SMALLEST_SQUARES = 1e-280  # residual squares where all targets are 0, which have no logarithm
_EXACT_FIT = 1e-28  # residual squares over squares of the target that count as rounding


class ReducedStack(NamedTuple):
    """Reduced rows of clients that have equally many of them."""

    clients: np.ndarray  # (b,)
    rows: np.ndarray  # (b, k, p + 1): random columns, fixed columns, target
    eigenvalues: Any  # (b, k) of Z Z'; None unless the rows were rotated to them


class ReducedRows(NamedTuple):
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
    def least_square(self):
        """Residual squares, in all, that count as rounding; their logarithm is finite."""
        return max(_EXACT_FIT * self.sum_of_squares, _SMALLEST_SQUARES)

    @property
    def rows(self):
        """Rows (b, k, p + 1) of every stack."""
        return [stack.rows for stack in self.stacks]

    def by_client(self, parts):
        """Values (m, ...) of all clients, from those (b, ...) of the clients of every stack."""
        values = np.concatenate(parts)
        ordered = np.empty_like(values)
        ordered[np.concatenate([stack.clients for stack in self.stacks])] = values
        return ordered

    def remaining_square(self, fixed):
        """Residual squares of the rows without random columns, for fixed coefficients (p - q,)."""
        direction = np.append(-fixed, 1.0)
        return direction @ self.remainder @ direction


def reduce_table(table, *, spectral, common_scale=True, scale=None):
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
    stacks, remainders, squares = zip(*map_batches(reduce, table.batches, 1), strict=True)
    return ReducedRows(
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


class Whitened(NamedTuple):
    """Whitened rows (b, k, p + 1) of every stack, and log diagonals (b, k) of the roots of V."""

    rows: list
    logs: list

    @property
    def log_det(self):
        """Summed log determinants of V."""
        return 2 * sum(logs.sum() for logs in self.logs)


class LikelihoodSettings(NamedTuple):
    """What is known; `first` is the first column with a free population coefficient."""

    restricted: bool
    first: int
    noise: float | None


class Profile(NamedTuple):
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
    rows, logs = [], []
    for k, stack in enumerate(reduced.stacks):
        weights = 1 / (1 + ratio * stack.eigenvalues)
        logs.append(-0.5 * np.log(weights))
        # Fresh memory for each of many steps would cost more than the products.
        out = None if reuse is None else reuse.rows[k]
        roots = np.sqrt(weights).astype(stack.rows.dtype)
        rows.append(np.multiply(stack.rows, roots[..., None], out=out))
    return Whitened(rows, logs)


def whiten(reduced, factor, reuse=None):
    """Whiten under P = factor factor' (q, r), or a diagonal P with the given roots (q,).

    The result takes the memory of `reuse`, as in `whiten_spectral`.
    """
    whitened, logs = [], []
    for number, stack in enumerate(reduced.stacks):
        rows = np.empty_like(stack.rows) if reuse is None else reuse.rows[number]
        diagonals = np.empty(stack.rows.shape[:2])
        for part in row_slices(len(rows), rows[:1].size, _BLOCK_CELLS):
            random = stack.rows[part, :, : reduced.n_random]
            moved = random * factor if factor.ndim == 1 else random @ factor
            covariance = moved @ moved.transpose(0, 2, 1)
            covariance += np.eye(covariance.shape[1])
            lower = np.linalg.cholesky(covariance)
            diagonals[part] = np.einsum("bkk->bk", lower)
            rows[part] = solve_lower(lower, stack.rows[part])
        logs.append(np.log(diagonals))
        whitened.append(rows)
    return Whitened(whitened, logs)


def profile(reduced, whitened, settings):
    """Population coefficients, noise variance and criterion under whitened rows."""
    first = settings.first
    gram = normal_matrix(reduced, whitened.rows, first)
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
    return Profile(coefficients, root, residuals, float(noise), float(value))


def open_coefficients(reduced, whitened, point, first):
    """Positions of the population coefficients (p_free,) that are not identified."""
    if point.root.shape[1] == len(point.root):
        return np.zeros(0, dtype=np.intp)
    return np.flatnonzero(~estimable(normal_matrix(reduced, whitened.rows, first)[:-1, :-1]))


def normal_matrix(reduced, rows, first):
    """Gram matrix (p_free + 1, p_free + 1) of the free columns and the target, over all rows.

    `rows` are those of every stack, whitened or not.
    """
    gram = sum(flat.T @ flat for flat in (flat_rows(stack)[:, first:] for stack in rows))
    fixed = reduced.n_random - first
    gram[fixed:, fixed:] += reduced.remainder
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
    fixed = coefficients[len(coefficients) - len(reduced.remainder) + 1 :]
    residuals, square = [], reduced.remaining_square(fixed)
    for rows in whitened.rows:
        flat = flat_rows(rows)
        residual = flat[:, -1] - flat[:, first:-1] @ coefficients
        square += residual @ residual
        residuals.append(residual.reshape(rows.shape[:2]))
    return residuals, max(square, reduced.least_square)


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
    for _, random, projected, pulled in _slope_parts(reduced, whitened, point, settings):
        slope += flat_rows(random).T @ flat_rows(projected) - pulled.T @ pulled / point.noise
    return slope


class Curvature(NamedTuple):
    """Slope of the criterion in the variances of a diagonal P, and its second derivatives."""

    slope: np.ndarray  # (q,)
    average: np.ndarray  # (q, q), mean of the observed and the expected ones, nearly
    expected: np.ndarray  # (q,), on the diagonal, with noise and population known


def slope_diagonal(reduced, whitened, point, settings):
    """Curvature at diagonal P by average information (Gilmour, Thompson and Cullis, 1995).

    With the columns z_k of a client's whitened rows, its residual r and h_k = z_k' r, the second
    derivatives in two variances are the products of the vectors z_k h_k less their projections on
    the columns of the population, and on the residual if the noise is unknown. These are large
    products for all clients, as the expected derivatives are not.
    """
    q, first = reduced.n_random, settings.first
    slope, explained, expected = np.zeros(q), np.zeros(q), np.zeros(q)
    average, across = np.zeros((q, q)), np.zeros((len(point.root), q))
    for rows, random, projected, pulled in _slope_parts(reduced, whitened, point, settings):
        slope += np.einsum("bkq,bkq->q", random, projected)
        explained += np.einsum("bq,bq->q", pulled, pulled) / point.noise
        expected += np.sum(np.einsum("bkq,bkq->bq", random, random) ** 2, axis=0)
        moved = flat_rows(random * pulled[:, None, :])
        average += moved.T @ moved
        across += flat_rows(rows)[:, first:-1].T @ moved
    across = point.root.T @ across
    average = (average - across.T @ across) / point.noise
    if settings.noise is None:
        free = reduced.n_rows - (point.root.shape[1] if settings.restricted else 0)
        average -= np.multiply.outer(explained, explained) / max(free, 1)
    np.fill_diagonal(average, np.maximum(np.diag(average), 0.0))  # rounding may leave less
    return Curvature(slope - explained, average, expected)


def _slope_parts(reduced, whitened, point, settings):
    """Rows (b, k, p + 1) of some clients, and what slopes need of them.

    That is their random columns z (b, k, q), these without what the population explains of them,
    and z' r (b, q) with the residuals r.
    """
    q = reduced.n_random
    for stack, residual in zip(whitened.rows, point.residuals, strict=True):
        for part in row_slices(len(stack), stack[:1].size, _BLOCK_CELLS):
            rows, random = stack[part], stack[part, :, :q]
            pulled, projected = (residual[part, None, :] @ random)[:, 0], random
            if settings.restricted:
                leverage = flat_rows(rows)[:, settings.first : -1] @ point.root
                leverage = leverage.reshape(*rows.shape[:2], -1)
                projected = leverage @ leverage.transpose(0, 2, 1) @ random
                np.subtract(random, projected, out=projected)
            yield rows, random, projected, pulled


def client_deviations(reduced, whitened, residuals, ratio):
    """Conditional means (m, q) of the random coefficients, minus their population mean."""
    q = reduced.n_random
    pairs = zip(whitened.rows, residuals, strict=True)
    pulled = [(residual[:, None, :] @ rows[:, :, :q])[:, 0] for rows, residual in pairs]
    return reduced.by_client(pulled) @ ratio
