"""Linear algebra of regressions: predictors, roots and shapes of a covariance, small systems."""

from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import issparse
from scipy.special import expit, softmax

from pfl_sklearn.base import client_values

_RANK_TOLERANCE = 1e-11  # share of the largest eigenvalue; a smaller one is rounding error
_REWEIGHTING_MARGIN = 10.0  # on that share, where rows have other weights than in the fit
_OUTSIDE_TOLERANCE = 1e-5  # share outside the row space, with which nothing is estimable
_OFF_DIAGONAL = 0.3  # typical entry of a random start, where the usual one is zero
_DAMPING = 1e-6  # of correlations, before their inverse
_MOST_DECADES = 6.0  # between units of columns; beyond it products of a start lose all digits
_GATHERED_COEFFICIENTS = 1 << 20  # at a time, or every row would hold a copy of its client's
_LARGEST_ELIMINATED = 16  # size of a system up to which one elimination serves all clients at once


def row_slices(length, width, cells):
    """Slices that cut `length` rows of `width` numbers into blocks of at most `cells` numbers."""
    step = max(cells // max(width, 1), 1)
    return [slice(start, start + step) for start in range(0, length, step)]


def square_root(covariance):
    """Root L (q, q) of a possibly singular covariance L L'."""
    # The covariance is first scaled to a unit diagonal, so that small variances stay exact.
    lengths = _lengths(covariance)
    values, vectors = np.linalg.eigh(covariance / lengths / lengths[:, None])
    return lengths[:, None] * vectors * np.sqrt(np.maximum(values, 0.0))


def inverse_root(normal, scale=1.0):
    """Root L (p, rank) of a generalized inverse L L' of a matrix, and a log pseudo-determinant.

    The pseudo-determinant refers to the matrix before `scale` (p,) multiplied its rows and columns.
    """
    if not len(normal):
        return np.zeros((0, 0)), 0.0
    # Ranks are judged at columns of length 1: a column that differs only between clients has little
    # weight when clients differ much, but is as well identified.
    lengths, values, vectors, positive = _spectrum(normal)
    values, vectors = values[positive], vectors[:, positive]
    log_det = np.log(values).sum() + 2 * _log_volume(vectors, lengths / scale)
    return vectors / np.sqrt(values) / lengths[:, None], float(log_det)


def estimable(normal, combinations=None):
    """Whether (k,) the normal equations (p, p) determine combinations (k, p) of the coefficients.

    Without `combinations`: whether (p,) they determine each coefficient.
    """
    lengths, _, vectors, positive = _spectrum(normal)
    # A combination is estimable if it lies in the row space of the design.
    scaled = np.eye(len(normal)) if combinations is None else combinations
    scaled = scaled / lengths
    # A combination has to lie in the row space, however short it is.
    outside = np.linalg.norm(scaled @ vectors[:, ~positive], axis=1)
    return outside <= _OUTSIDE_TOLERANCE * np.linalg.norm(scaled, axis=1)


def near_combinations(normal):
    """Directions (p, k), at columns of length 1, along which a normal matrix nearly vanishes."""
    _, values, vectors, _ = _spectrum(normal)
    # The margin makes up for weights other than those of the fit.
    tolerance = _REWEIGHTING_MARGIN * _RANK_TOLERANCE
    return vectors[:, values < tolerance * values.max(initial=0.0)]


def n_independent(normal):
    """Rank (int) of a second-moment matrix (p, p), judged at columns of length 1."""
    return int(_spectrum(normal)[3].sum()) if len(normal) else 0


def _spectrum(normal):
    """Column lengths (p,), spectrum at columns of length 1, and which eigenvalues are not zero."""
    lengths = _lengths(normal)
    values, vectors = np.linalg.eigh(normal * np.multiply.outer(1 / lengths, 1 / lengths))
    positive = values > _RANK_TOLERANCE * max(values.max(initial=0.0), 0.0)
    return lengths, values, vectors, positive


def _lengths(matrix):
    """Square roots (p,) of the diagonal, with 1 in place of 0."""
    lengths = np.sqrt(np.maximum(np.diag(matrix), 0.0))  # rounding may leave less than 0
    lengths[lengths == 0] = 1.0
    return lengths


def _log_volume(vectors, lengths):
    """Log volume of orthonormal columns (p, rank) whose rows are multiplied by `lengths` (p,)."""
    if vectors.shape[1] == len(lengths):
        return np.log(lengths).sum()
    order = np.argsort(-lengths)  # long rows first: their rounding errors would swamp short ones
    upper = np.linalg.qr(vectors[order] * lengths[order, None], mode="r")
    return np.log(np.abs(np.diag(upper))).sum()


class CovarianceFactor(NamedTuple):
    """Shape of a between-client covariance L L': the entries of L (q, r) are parameters or zero.

    Entry ``positions[k]`` of the flat factor is parameter ``owners[k]``. A variance of zero is an
    ordinary point, so a search needs no bounds. A `basis` (q, q) multiplies the first
    `n_transformed` columns of L: it changes the search, but not the set of covariances.
    """

    shape: tuple
    positions: np.ndarray
    owners: np.ndarray
    start: np.ndarray  # (n_parameters,), a factor of the identity or near it
    n_transformed: int = 0
    basis: np.ndarray | None = None
    decades: np.ndarray | float = 0.0  # by which random starts of parameters reach further up

    @property
    def has_ridge(self):
        """Whether the factor has a common ridge and loadings ("low_rank")."""
        return self.shape[1] > self.shape[0]

    @property
    def is_diagonal(self):
        """Whether the covariance is diagonal, with a parameter for every variance."""
        return self.basis is None and len(self.start) == len(self.positions) == self.shape[1]

    def starts(self, n_random):
        """Starts (n_random + 3, n_parameters), none at a distance of 1 from zero."""
        # A quasi-Newton search begins with a step of length 1, and zero is a stationary point.
        rng = np.random.default_rng(0)  # the same starts for the same table, whatever ran before
        size = 10.0 ** rng.uniform(-1.5, 2.0 + self.decades, size=(n_random, len(self.start)))
        # Signs of the diagonal change no covariance L L'; those of the other entries do.
        signs = np.where(self.start < 1, rng.choice([-1.0, 1.0], size=size.shape), 1.0)
        drawn = size * signs * np.maximum(self.start, _OFF_DIAGONAL)
        return np.concatenate([np.multiply.outer([0.7, 0.07, 7.0], self.start), drawn])

    def row_scales(self, parameters):
        """Lengths (n_parameters,) of the rows of the factor that hold a parameter."""
        rows = np.sqrt(np.sum(self._fill(parameters) ** 2, axis=1))
        scales = np.zeros(len(self.start))
        np.maximum.at(scales, self.owners, rows[self.positions // self.shape[1]])
        return scales

    def matrix(self, parameters):
        """Factor (q, r) of parameters (n_parameters,)."""
        matrix = self._fill(parameters)
        if self.basis is not None:
            matrix[:, : self.n_transformed] = self.basis @ matrix[:, : self.n_transformed]
        return matrix

    def parameters(self, matrix):
        """Parameters (n_parameters,) of a factor (q, r) without a basis."""
        parameters = np.zeros(len(self.start))
        parameters[self.owners] = matrix.ravel()[self.positions]
        return parameters

    def pull_back(self, gradient):
        """Gradient (n_parameters,) from the gradient in the factor's entries (q, r)."""
        if self.basis is not None:
            transformed = self.basis.T @ gradient[:, : self.n_transformed]
            gradient = np.concatenate([transformed, gradient[:, self.n_transformed :]], axis=1)
        return np.bincount(self.owners, gradient.ravel()[self.positions], len(self.start))

    def _fill(self, parameters):
        flat = np.zeros(self.shape[0] * self.shape[1])
        flat[self.positions] = parameters[self.owners]
        return flat.reshape(self.shape)


def covariance_factor(covariance_type, q, rank=None, varies=None, basis=None):
    """Factor of a covariance of q coefficients; "low_rank" is B B' of `rank` plus a common ridge.

    For "diag", `varies` (q,) marks the coefficients whose variance is not 0. For "full" and the
    loadings of "low_rank", `basis` (q, q) holds the columns in which the search works, such as
    those that make the random columns uncorrelated.
    """
    diagonal = np.arange(q) * (q + 1)
    if covariance_type == "spherical" or q == 1:  # all shapes of one coefficient are one variance
        return CovarianceFactor((q, q), diagonal, np.zeros(q, dtype=np.intp), np.ones(1))
    if covariance_type == "diag":
        at = np.arange(q) if varies is None else np.flatnonzero(varies)
        free = np.arange(len(at))
        return CovarianceFactor((q, len(at)), at * len(at) + free, free, np.ones(len(at)))
    if covariance_type == "full":
        lower = np.flatnonzero(np.tril(np.ones((q, q))))
        start = np.eye(q).ravel()[lower]
        return CovarianceFactor((q, q), lower, np.arange(len(lower)), start, q, basis)
    return _low_rank(q, min(rank or 1, q), basis)


def _low_rank(q, rank, basis):
    """Factor (q, rank + q): lower triangular loadings and a common ridge."""
    shape = (q, rank + q)
    at = np.arange(q * (rank + q)).reshape(shape)
    loadings = at[:, :rank][np.tril(np.ones((q, rank), dtype=bool))]
    ridge = at[np.arange(q), rank + np.arange(q)]
    owners = np.concatenate([np.arange(len(loadings)), np.full(q, len(loadings))])
    start = np.where(loadings // (rank + q) == loadings % (rank + q), 1.0, 0.3)
    decades = np.zeros(len(start) + 1)
    if basis is not None:  # the ridge may be that of the shortest column
        lengths = np.linalg.norm(basis, axis=1)
        decades[-1] = min(np.log10(lengths.max() / lengths.min()), _MOST_DECADES)
    positions = np.concatenate([loadings, ridge])
    return CovarianceFactor(shape, positions, owners, np.append(start, 0.5), rank, basis, decades)


def uncorrelating(moments):
    """Inverse root (q, q) of second moments (q, q), lower triangular, damped where singular."""
    lengths = _lengths(moments)
    scaled = moments / lengths / lengths[:, None]
    # Without the damping equal columns would have no Cholesky factor.
    lower = np.linalg.cholesky(scaled + _DAMPING * np.eye(len(scaled)))
    return np.linalg.inv(lower).T / lengths[:, None]


def snap_to_zero(parameters, small, objective, allowed):
    """Set the `small` parameters to zero, unless the objective rises by more than it may.

    `allowed` is the largest rise, as a function of the objective at the given parameters.
    """
    if not small.any():
        return parameters
    snapped = np.where(small, 0.0, parameters)
    best, tried = objective(parameters)[0], objective(snapped)[0]
    return snapped if tried <= best + allowed(best) else parameters


def solve_lower(lower, right):
    """Solutions (b, k, c) of lower triangular systems (b, k, k), by substitution of blocks."""
    solved, first = np.empty_like(right), 0
    while first < right.shape[1]:
        block = slice(first, first + _LARGEST_ELIMINATED)
        residual = right[:, block]
        if first:
            residual = residual - lower[:, block, :first] @ solved[:, :first]
        np.matmul(invert_lower(lower[:, block, block]), residual, out=solved[:, block])
        first = block.stop
    return solved


def invert_lower(lower):
    """Inverses (b, n, n) of lower triangular matrices; n is small, so all clients go together."""
    # Clients last: each operation is on long vectors over all of them.
    rows = np.ascontiguousarray(lower.transpose(1, 2, 0))
    inverse = np.zeros_like(rows)
    for j, row in enumerate(rows):
        inverse[j, j] = 1 / row[j]
        if j:
            inverse[j, :j] = -np.sum(row[:j, None] * inverse[:j, :j], axis=0) * inverse[j, j]
    return np.ascontiguousarray(inverse.transpose(2, 0, 1))


def solve_systems(systems, right):
    """Solutions (b, k, a) of systems (b, k a, k a) whose pivots are at least 1."""
    # LAPACK goes through small systems one by one, where a call costs more than the arithmetic.
    if systems.shape[1] <= _LARGEST_ELIMINATED and right.shape[2] == 1:
        return _eliminate(systems, right[..., 0])[..., None]
    return np.linalg.solve(systems, right.reshape(*systems.shape[:2], 1)).reshape(right.shape)


def _eliminate(systems, right):
    """Solutions (b, k) of all systems at once, one column after the other, without pivoting."""
    # H, and I + W K, which a diagonal matrix makes similar to a positive definite one, have pivots
    # of at least 1, so none is exchanged.
    rows = np.ascontiguousarray(systems.transpose(1, 2, 0))
    values = np.ascontiguousarray(right.T)
    for j in range(len(rows)):
        share = rows[j + 1 :, j] / rows[j, j]
        rows[j + 1 :, j + 1 :] -= share[:, None] * rows[j, j + 1 :]
        values[j + 1 :] -= share * values[j]
    for j in range(len(rows) - 1, -1, -1):
        values[j] /= rows[j, j]
        values[:j] -= rows[:j, j] * values[j]
    return values.T


def triangle(matrices):
    """Upper triangles (b, k) of symmetric matrices (b, p, p), of the same norm."""
    rows, columns = np.triu_indices(matrices.shape[1])
    return matrices[:, rows, columns] * np.where(rows == columns, 1.0, np.sqrt(2))


def from_triangle(entries, p):
    """Symmetric matrix (p, p) of such a triangle (k,)."""
    rows, columns = np.triu_indices(p)
    matrix: Any = np.zeros((p, p))
    matrix[rows, columns] = entries / np.where(rows == columns, 1.0, np.sqrt(2))
    return matrix + np.triu(matrix, 1).T


def client_predictors(X, codes, coef, intercept, population_coef, population_intercept):
    """Linear predictors (n[, c]) of dense or sparse rows X (n, d) under their clients' models.

    `codes` (n,) are positions of clients, -1 for the population. `coef` is (m, d) or (m, c, d),
    `intercept` (m,) or (m, c); both are None if no client is known. Only the coefficients of the
    clients in `codes` are read, a block of rows at a time.
    """
    shape = np.shape(population_coef)
    predictors = np.empty((X.shape[0], *shape[:-1]))
    terms = "nd,nd->n" if len(shape) == 1 else "nd,ncd->nc"
    is_sparse = issparse(X)
    for part in row_slices(X.shape[0], np.size(population_coef), _GATHERED_COEFFICIENTS):
        # A dense block at a time: the coefficients that it meets are dense as well.
        rows = X[part].toarray() if is_sparse else X[part]
        client_coef = client_values(coef, population_coef, codes[part])
        predictors[part] = np.einsum(terms, rows, client_coef)
    # Intercepts are one number a row, so they need no blocks.
    predictors += client_values(intercept, population_intercept, codes)
    return predictors


def class_probabilities(logits):
    """Probabilities (n, K) from logits (n, K), or from logits (n,) of the second of two classes."""
    # expit of both signs: 1 - p would lose the digits of a small probability.
    if logits.ndim == 2:
        return softmax(logits, axis=1)
    return expit(np.column_stack([-logits, logits]))


def likeliest_class(classes, logits):
    """Labels (n,) of the likeliest of `classes`, from logits as for `class_probabilities`."""
    chosen = logits.argmax(axis=1) if logits.ndim == 2 else (logits > 0).astype(np.intp)
    return classes[chosen]
