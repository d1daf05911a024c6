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
from pfl_sklearn.linear_model._algebra import (
    estimable,
    inverse_root,
    row_slices,
    solve_lower,
    square_root,
)
from pfl_sklearn.linear_model._mixed._reduction import sum_of_clients

_WHITENED_BLOCK = 1 << 17  # of the clients whose rows are whitened together, in the cache
_BLOCK_ROWS = 1024  # of a product that then fits the processor's cache
_SMALLEST_SQUARES = 1e-280  # residual squares where all targets are 0, which have no logarithm
_EXACT_FIT = 1e-28  # residual squares over squares of the target that count as rounding


class ReducedStack(NamedTuple):
    """Reduced rows of clients that have equally many of them."""

    clients: np.ndarray  # (b,)
    rows: np.ndarray  # (b, k, p + 1): random columns, fixed columns, target
    eigenvalues: Any  # (b, k) of Z Z'; None unless the rows were rotated to them


class ReducedRows(NamedTuple):
    """Reduced rows of m clients with N rows: all that the likelihood depends on."""

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

    @property
    def size(self):
        """Numbers in all of these."""
        return sum(rows.size for rows in self.rows)

    @property
    def is_spectral(self):
        """Whether rows were rotated to the eigenvectors of Z Z'."""
        return self.stacks[0].eigenvalues is not None

    def by_client(self, parts):
        """Values (m, ...) of all clients, from those (b, ...) of the clients of every stack."""
        values = np.concatenate(parts)
        ordered = np.empty_like(values)
        ordered[np.concatenate([stack.clients for stack in self.stacks])] = values
        return ordered

    def padded(self, rows):
        """Rows (m, k, ...) of all clients, padded with zeros, from those of every stack."""
        # Clients of one size are in order as they are: no copy of what may fill half the memory.
        if len(rows) == 1 and np.all(np.diff(self.stacks[0].clients) > 0):
            return rows[0]
        longest = max(block.shape[1] for block in rows)
        padded = np.zeros((self.n_clients, longest, rows[0].shape[2]))
        for stack, block in zip(self.stacks, rows, strict=True):
            padded[stack.clients, : block.shape[1]] = block
        return padded

    def remaining_square(self, fixed):
        """Residual squares of the rows without random columns, for fixed coefficients (p - q,)."""
        direction = np.append(-fixed, 1.0)
        return direction @ self.remainder @ direction

    def gram(self, rows, first=0):
        """Products (p - first + 1, ...) of columns from `first` on and the target, of all rows."""
        gram = sum(flat.T @ flat for flat in (flat_rows(stack)[:, first:] for stack in rows))
        fixed = self.n_random - first
        gram[fixed:, fixed:] += self.remainder
        return gram

    def random_moments(self):
        """Mean second moments (q, q) of the clients' random columns."""
        return self.gram(self.rows)[: self.n_random, : self.n_random] / self.n_clients

    def deviations(self, rows, residuals, ratio):
        """Conditional means (m, q) of the random coefficients less their population mean."""
        pairs = zip(rows, residuals, strict=True)
        pulled = [(r[:, None, :] @ x[:, :, : self.n_random])[:, 0] for x, r in pairs]
        return self.by_client(pulled) @ ratio


def reduce_table(table, *, spectral, common_scale=True, scale=None):
    """ReducedRows of a RotatedTable.

    `spectral` rotates to the eigenvectors of Z Z'. With `common_scale` the random columns share one
    scale, so that a multiple of the identity stays one. Without `scale` (p,) the columns of a
    client get a length of about 1.
    """
    q = table.n_random
    if scale is None:
        scale = _scales(table, common_scale)
    reduce = partial(
        _reduce_batch, move=table.move, scale=np.append(scale, 1.0), n_random=q, spectral=spectral
    )
    stacks, remainders, squares = zip(*map_batches(reduce, table.batches, 1), strict=True)
    return ReducedRows(
        _joined_stacks(stacks),
        sum(remainders),
        table.n_rows,
        table.n_clients,
        q,
        scale,
        sum(squares),
        # Rows times roots of weights have a density that is larger by these roots.
        table.log_weights,
    )


def flat_rows(rows):
    """Rows (b k, p + 1) of all clients of a stack, one below the other."""
    return rows.reshape(len(rows) * rows.shape[1], rows.shape[2])


def _scales(table, common):
    """Factors (p,) that give a client's columns a length of about 1."""
    parts = [(at, np.sum(rows[..., :-1] ** 2, axis=1)) for at, rows in table.moved_batches()]
    squares = sum_of_clients(parts, table.n_clients) / table.n_clients
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
        remaining = triangular[:, n_random:, n_random:].reshape(-1, size)
        # A copy: a view would keep all rows in memory.
        table, remainder = triangular[:, :n_random].copy(), remaining.T @ remaining
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


def whiten(reduced, factor, reuse=None):
    """Whiten under P = factor factor' (q, r), a diagonal P with roots (q,), or P = factor^2 I.

    The last, a number, is for spectral rows. The result overwrites `reuse`, whitened rows.
    """
    if np.ndim(factor) == 0:
        return _whiten_spectral(reduced, factor, reuse)
    whitened, logs = [], []
    for number, stack in enumerate(reduced.stacks):
        rows = np.empty_like(stack.rows) if reuse is None else reuse.rows[number]
        diagonals = np.empty(stack.rows.shape[:2])
        for part in row_slices(len(rows), rows[:1].size, _WHITENED_BLOCK):
            random = stack.rows[part, :, : reduced.n_random]
            if factor.ndim == 1:  # two arrays: for a product of one with itself BLAS takes longer
                covariance = (random * factor**2) @ random.transpose(0, 2, 1)
            else:
                scaled = random @ factor
                covariance = scaled @ scaled.transpose(0, 2, 1)
            covariance += np.eye(covariance.shape[1])
            lower = np.linalg.cholesky(covariance)
            diagonals[part] = np.einsum("bkk->bk", lower)
            rows[part] = solve_lower(lower, stack.rows[part])
        logs.append(np.log(diagonals))
        whitened.append(rows)
    return Whitened(whitened, logs)


def _whiten_spectral(reduced, factor, reuse):
    rows, logs = [], []
    for number, stack in enumerate(reduced.stacks):
        weights = 1 / (1 + factor**2 * stack.eigenvalues)
        logs.append(-0.5 * np.log(weights))
        # Fresh memory for each of many steps would cost more than the products.
        out = None if reuse is None else reuse.rows[number]
        roots = np.sqrt(weights).astype(stack.rows.dtype)
        rows.append(np.multiply(stack.rows, roots[..., None], out=out))
    return Whitened(rows, logs)


class Profile(NamedTuple):
    """The profile at one between-client covariance, in the scale of the reduction."""

    ratio: np.ndarray  # (q, q), covariance between clients over the noise variance
    whitened: Whitened
    coefficients: np.ndarray  # (p,), of the population; 0 where they are not free
    root: np.ndarray  # (p, rank); its square, times the noise variance, is their covariance
    residuals: list  # whitened (b, k), of every stack
    square: float  # residual squares of all rows
    n_free: int  # rows, less the coefficients that restricted likelihood charges
    noise: float
    criterion: float  # minus twice the log-likelihood
    n_iter: int = 0  # of the search that ended here
    converged: bool = True

    def covariance(self):
        """Covariance (p, p) of the coefficients."""
        return self.noise * self.root @ self.root.T


class Curvature(NamedTuple):
    """Slope of the criterion in the variances of a diagonal P, and its second derivatives."""

    slope: np.ndarray  # (q,)
    average: np.ndarray  # (q, q), mean of the observed and the expected ones, nearly
    expected: np.ndarray  # (q,), on the diagonal, with noise and population known


class ProfiledLikelihood(NamedTuple):
    """Marginal likelihood of reduced rows, a function of the between-client covariance alone."""

    reduced: ReducedRows
    restricted: bool
    first: int  # first column with a free population coefficient
    noise: float | None  # None: profiled out, too

    def at(self, factor, reuse=None):
        """Profile under P = factor factor', as for `whiten`; `reuse` is one that has served."""
        reduced, first = self.reduced, self.first
        whitened = whiten(reduced, factor, None if reuse is None else reuse.whitened)
        gram = reduced.gram(whitened.rows, first)
        # Ranks are judged after whitening, but the determinant is that of the data's own columns.
        free, log_det = inverse_root(gram[:-1, :-1], reduced.scale[first:])
        root = np.pad(free, ((first, 0), (0, 0)))  # of the precision of the rows, as `free`
        coefficients = root @ (free.T @ gram[:-1, -1])
        residuals, square = self._residuals(whitened, coefficients)
        n_free = reduced.n_rows - (root.shape[1] if self.restricted else 0)
        noise = float(square / max(n_free, 1) if self.noise is None else self.noise)
        log_det_rows = 2 * sum(logs.sum() for logs in whitened.logs)
        value = log_det_rows + n_free * np.log(2 * np.pi) - reduced.log_weights
        with np.errstate(divide="ignore", invalid="ignore"):  # no rows left, or a noise of 0
            value += n_free * np.log(noise) + (n_free if self.noise is None else square / noise)
        if self.restricted:
            value += log_det
        ratio = factor @ factor.T if np.ndim(factor) == 2 else factor**2 * np.eye(reduced.n_random)
        return Profile(
            ratio, whitened, coefficients, root, residuals, square, n_free, noise, float(value)
        )

    def at_ratio(self, ratio):
        """Refined profile at a ratio (q, q); spectral rows have a multiple of the identity."""
        factor = np.sqrt(ratio[0, 0]) if self.reduced.is_spectral else square_root(ratio)
        return self.refined(self.at(factor))._replace(ratio=ratio)

    def refined(self, point):
        """The same point, without the rounding errors of its normal equations."""
        reduced, q, first = self.reduced, self.reduced.n_random, self.first
        coefficients, residuals, square = point.coefficients, point.residuals, point.square
        remainder = reduced.remainder
        for _ in range(2):  # each step of iterative refinement gains the digits that solving lost
            slope = np.zeros(len(coefficients))
            slope[q:] = remainder[:-1, -1] - remainder[:-1, :-1] @ coefficients[q:]
            for rows, residual in zip(point.whitened.rows, residuals, strict=True):
                slope[first:] += residual.ravel() @ flat_rows(rows)[:, first:-1]
            coefficients = coefficients + point.root @ (point.root.T @ slope)
            residuals, square = self._residuals(point.whitened, coefficients)
        return point._replace(coefficients=coefficients, residuals=residuals, square=square)

    def _residuals(self, whitened, coefficients):
        """Whitened residuals (b, k) of every stack, and the residual squares of all rows."""
        reduced, free = self.reduced, coefficients[self.first :]
        residuals, square = [], reduced.remaining_square(coefficients[reduced.n_random :])
        for rows in whitened.rows:
            flat = flat_rows(rows)
            residual = flat[:, -1] - flat[:, self.first : -1] @ free
            square += residual @ residual
            residuals.append(residual.reshape(rows.shape[:2]))
        return residuals, max(square, reduced.least_square)

    def unidentified_coefficients(self, point):
        """Positions of the free population coefficients that are not identified."""
        if point.root.shape[1] == len(point.root) - self.first:
            return np.zeros(0, dtype=np.intp)
        gram = self.reduced.gram(point.whitened.rows, self.first)
        return self.first + np.flatnonzero(~estimable(gram[:-1, :-1]))

    def slope_spectral(self, point):
        """Slope in the ratio of spectral rows; sum and sum of squares of the slopes of log V."""
        slope, first_sum, second_sum = 0.0, 0.0, 0.0
        stacks = zip(self.reduced.stacks, point.whitened.rows, point.residuals, strict=True)
        for stack, rows, residual in stacks:
            share = stack.eigenvalues / (1 + point.ratio[0, 0] * stack.eigenvalues)
            slope -= np.vdot(share, residual**2) / point.noise
            first_sum += share.sum()
            second_sum += np.vdot(share, share)
            if self.restricted:
                slope -= share.ravel() @ _leverages(flat_rows(rows)[:, :-1], point.root)
        return slope + first_sum, first_sum, second_sum

    def slope_matrix(self, point):
        """Derivative (q, q) of the criterion in P."""
        slope = np.zeros_like(point.ratio)
        for random, _, projected, pulled in self._slope_parts(point):
            slope += flat_rows(random).T @ flat_rows(projected) - pulled.T @ pulled / point.noise
        return slope

    def slope_diagonal(self, point):
        """Curvature at diagonal P by average information (Gilmour, Thompson and Cullis, 1995)."""
        # With columns z_k of a client's whitened rows, residual r and h_k = z_k' r, the second
        # derivatives are the products of the vectors z_k h_k less their projections on the
        # population's columns, and on the residual if the noise is unknown: large products for all
        # clients at once.
        q, length = self.reduced.n_random, np.sqrt(point.square / self.reduced.n_rows)
        slope, explained, expected = np.zeros(q), np.zeros(q), np.zeros(q)
        average, across = np.zeros((q, q)), np.zeros((point.root.shape[1], q))
        for random, leverage, projected, pulled in self._slope_parts(point):
            slope += np.einsum("bkq,bkq->q", random, projected)
            explained += np.einsum("bq,bq->q", pulled, pulled) / point.noise
            # Single precision: curvatures are for the length of a step, not for where steps end.
            singles = (part.astype(np.float32) for part in (random, leverage, pulled / length))
            random, leverage, pulled = singles
            expected += np.sum(np.einsum("bkq,bkq->bq", random, random) ** 2, axis=0)
            products = flat_rows(random * pulled[:, None, :])
            average += products.T @ products
            across += flat_rows(leverage).T @ products
        average = (average - across.T @ across) * (length**2 / point.noise)
        if self.noise is None:
            average -= np.multiply.outer(explained, explained) / max(point.n_free, 1)
        np.fill_diagonal(average, np.maximum(np.diag(average), 0.0))  # rounding may leave less
        return Curvature(slope - explained, average, expected)

    def _slope_parts(self, point):
        """Random columns z (b, k, q) of some clients, leverages l (b, k, r), and two products.

        Products of the leverages are the part of the rows that the population explains. The two are
        z without that part if it is restricted likelihood, and z' r (b, q) with the residuals r.
        """
        q, first = self.reduced.n_random, self.first
        for stack, residual in zip(point.whitened.rows, point.residuals, strict=True):
            for part in row_slices(len(stack), stack[:1].size, _WHITENED_BLOCK):
                rows, random = stack[part], stack[part, :, :q]
                leverage = flat_rows(rows)[:, first:-1] @ point.root[first:]
                leverage = leverage.reshape(*rows.shape[:2], -1)
                pulled, projected = (residual[part, None, :] @ random)[:, 0], random
                if self.restricted:
                    projected = leverage @ leverage.transpose(0, 2, 1) @ random
                    np.subtract(random, projected, out=projected)
                yield random, leverage, projected, pulled


def _leverages(rows, root):
    """Squared lengths (R,) of rows (R, p) @ root, in blocks that fit the cache."""
    squares = np.empty(len(rows))
    for part in row_slices(len(rows), 1, _BLOCK_ROWS):
        product = rows[part] @ root
        squares[part] = np.einsum("rk,rk->r", product, product)
    return squares
