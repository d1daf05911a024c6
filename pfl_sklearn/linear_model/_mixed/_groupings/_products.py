"""Cross-products of rows that belong to several groupings: all that their mixed model needs.

The first grouping is eliminated exactly, so its products are blocks of one level each. The levels
of the others and the population's columns come after one another as outer columns.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse

from pfl_sklearn.linear_model._algebra import row_slices

MOST_EXACT = 300  # effects of a grouping that conjugate gradients leave to an exact solve
CELLS_AT_ONCE = 1 << 22  # numbers of a block of rows or levels by columns: 32 MB
_DENSE_SHARE = 0.1  # of products that are not 0, from which on dense ones are faster


class Grouping(NamedTuple):
    """Levels of the rows in one grouping, and the columns whose coefficients vary by level."""

    codes: np.ndarray  # (n,), -1 for rows of no level
    columns: np.ndarray  # (n, q)
    n_levels: int

    @property
    def width(self):
        """Number q of coefficients per level."""
        return self.columns.shape[1]

    @property
    def n_effects(self):
        """Number of coefficients of all levels."""
        return self.n_levels * self.width

    def indicator(self):
        """Sparse matrix (n, L q) that takes all effects to the rows' predictors."""
        n, q = self.columns.shape
        at = np.arange(n + 1) * q
        columns = np.maximum(self.codes, 0)[:, None] * q + np.arange(q)
        values = np.where(self.codes[:, None] < 0, 0.0, self.columns)
        matrix = sparse.csr_array((values.ravel(), columns.ravel(), at), (n, self.n_effects))
        matrix.eliminate_zeros()
        return matrix


def as_dense(matrix):
    """A dense or sparse matrix as a dense one."""
    return matrix if isinstance(matrix, np.ndarray) else matrix.toarray()


@dataclass(frozen=True)
class Products:
    """Weighted products of the rows of K groupings, p population columns and a target."""

    inner: np.ndarray  # (L, q, q), of the first grouping, by level
    cross: Any  # (L q, r), of the first grouping with the outer columns; sparse unless few are 0
    outer: Any  # (r, r), of the outer columns; dense, or sparse if there are many
    inner_target: np.ndarray  # (L, q)
    outer_target: np.ndarray  # (r,)
    square: float  # of the target
    n_rows: int
    n_levels: tuple  # of every grouping
    widths: tuple  # numbers of coefficients per level
    n_columns: int  # p
    rows: Any = None  # sparse (n, L q) and (n, e) of the groupings; None if products are dense

    @cached_property
    def cross_transposed(self):
        """Transpose of `cross`, by rows."""
        return self.cross.T if isinstance(self.cross, np.ndarray) else self.cross.T.tocsr()

    def with_dense_cross(self):
        """The same products, for many points at which they are small."""
        return replace(self, cross=as_dense(self.cross))

    @cached_property
    def large_cross(self):
        """`cross` with the columns of the large groupings alone, by rows."""
        return self.cross[:, : self.n_large_effects].tocsr()

    @cached_property
    def large_cross_transposed(self):
        """Its transpose, by rows."""
        return self.large_cross.T.tocsr()

    @cached_property
    def large_outer(self):
        """`outer` of the large groupings alone, sparse."""
        large = self.n_large_effects
        return sparse.csr_array(self.outer)[:large, :large]

    @property
    def n_outer_effects(self):
        """Number of the outer effects, which come before the population's columns."""
        return len(self.outer_target) - self.n_columns

    @property
    def outer_slices(self):
        """Places among the outer columns of the groupings after the first."""
        ends = np.cumsum(np.array(self.n_levels[1:]) * self.widths[1:], dtype=int)
        return [
            slice(end - n * q, end)
            for end, n, q in zip(ends, self.n_levels[1:], self.widths[1:], strict=True)
        ]

    @property
    def n_large_effects(self):
        """Number of effects of the groupings, first among the outer ones, with many of them."""
        sizes = np.array(self.n_levels[1:]) * self.widths[1:]
        return int(sizes[sizes > MOST_EXACT].sum())

    def by_level(self, outer):
        """Effects (L, q) of the groupings after the first, from outer values (r,)."""
        slices = zip(self.outer_slices, self.widths[1:], strict=True)
        return [outer[at].reshape(-1, q) for at, q in slices]

    def with_penalty(self, penalty):
        """The same products, with a penalty (p, p) on the population's coefficients."""
        p, r = self.n_columns, len(self.outer_target)
        if isinstance(self.outer, np.ndarray):
            outer = self.outer.copy()
            outer[r - p :, r - p :] += penalty
        else:
            outer = self.outer + sparse.block_diag([sparse.csr_array((r - p, r - p)), penalty])
        return replace(self, outer=outer)

    def times(self, inner, outer):
        """Products of all rows' predictors, for effects (L, q[, k]) and (r[, k]), with columns."""
        flat = inner.reshape(-1, *outer.shape[1:])
        product = (self.inner @ inner.reshape(*self.inner.shape[:2], -1)).reshape(inner.shape)
        product += (self.cross @ outer).reshape(product.shape)
        return product, self.cross.T @ flat + self.outer @ outer


class GroupedDesign(NamedTuple):
    """Columns of the rows of K groupings, which are sparse, and of the population."""

    first: Grouping
    indicator: Any  # sparse (n, L q), of the first grouping
    others: Any  # sparse (n, e), of the others
    columns: np.ndarray  # (n, p), of the population
    n_levels: tuple  # of every grouping
    widths: tuple  # numbers of coefficients per level
    dense: bool  # whether products of outer columns are

    def predictors(self, inner, outer):
        """Predictors (n[, k]) of effects (L q[, k]) and outer values (r[, k])."""
        n_effects = self.others.shape[1]
        result = self.indicator @ inner + self.others @ outer[:n_effects]
        return result + self.columns @ outer[n_effects:]

    def sums(self, values):
        """Sums (L q[, k]) and (r[, k]) of the columns times values (n[, k])."""
        outer = self.others.T @ values, self.columns.T @ values
        return self.indicator.T @ values, np.concatenate(outer)

    def products(self, pull, weights=None):
        """Products weighted by `weights` (n,), with the rows' pull (n,) in place of a target.

        Without weights the pull is the target of least squares.
        """
        first, columns, others = self.first, self.columns, self.others
        if weights is not None:
            first = first._replace(columns=first.columns * np.sqrt(weights)[:, None])
            columns, others = columns * weights[:, None], scale_rows_of(others, weights)
        within = (self.others.T @ others).tocsr()
        border, square = self.others.T @ columns, self.columns.T @ columns
        outer: Any
        if self.dense:
            outer = np.block([[within.toarray(), border], [border.T, square]])
        else:
            outer = sparse.block_array([[within, border], [border.T, square]], format="csr")
        cross: Any = sparse.hstack(
            [self.indicator.T @ others, self.indicator.T @ columns], format="csr"
        )
        if self.dense and cross.nnz > _DENSE_SHARE * np.prod(cross.shape):
            cross = cross.toarray()
        inner_target, outer_target = self.sums(pull)
        return Products(
            _products_by_level(first),
            cross,
            outer,
            inner_target.reshape(first.n_levels, first.width),
            outer_target,
            float(pull @ pull),
            len(pull),
            self.n_levels,
            self.widths,
            self.columns.shape[1],
            None if self.dense else self._weighted(weights),
        )

    def _weighted(self, weights):
        """Columns of groupings times roots of the weights, as the posterior's draws need them."""
        if weights is None:
            return self.indicator, self.others
        roots = np.sqrt(weights)
        return scale_rows_of(self.indicator, roots), scale_rows_of(self.others, roots)


def grouped_design(groupings, columns, dense=True):
    """GroupedDesign of Groupings and population columns (n, p)."""
    first, *others = groupings
    return GroupedDesign(
        first,
        first.indicator(),
        sparse.hstack(
            [sparse.csr_array((len(columns), 0)), *(g.indicator() for g in others)], "csr"
        ),
        columns,
        tuple(g.n_levels for g in groupings),
        tuple(g.width for g in groupings),
        dense,
    )


def products_of(groupings, columns, target, weights=None, dense=True):
    """Products of Groupings, population columns (n, p) and a target (n,); weights (n,) or None."""
    if weights is not None:
        roots = np.sqrt(weights)
        columns, target = columns * roots[:, None], target * roots
        groupings = [g._replace(columns=g.columns * roots[:, None]) for g in groupings]
    return grouped_design(groupings, columns, dense).products(target)


def scale_rows_of(matrix: Any, factors) -> Any:
    """Sparse matrix (n, k), by rows, times factors (n,) of its rows."""
    values = matrix.data * np.repeat(factors, np.diff(matrix.indptr))
    return sparse.csr_array((values, matrix.indices, matrix.indptr), matrix.shape)


def _products_by_level(grouping):
    """Sums (L, q, q) of the products of a grouping's columns, by level."""
    q, seen = grouping.width, grouping.codes >= 0
    result = np.zeros((grouping.n_levels, q * q))
    columns, codes = grouping.columns[seen], grouping.codes[seen]
    for part in row_slices(len(codes), q * q, CELLS_AT_ONCE):
        rows = columns[part]
        pairs = (rows[:, :, None] * rows[:, None, :]).reshape(len(rows), -1)
        sums = sparse.csr_array(
            (np.ones(len(rows)), codes[part], np.arange(len(rows) + 1)),
            (len(rows), grouping.n_levels),
        )
        result += sums.T @ pairs
    return result.reshape(-1, q, q)
