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


@dataclass(frozen=True)
class Products:
    """Weighted products of the rows of K groupings, p population columns and a target."""

    inner: np.ndarray  # (L, q, q), of the first grouping, by level
    cross: Any  # (L q, r), of the first grouping with the outer columns; sparse, in a fit
    outer: Any  # (r, r), of the outer columns; dense, or sparse if there are many
    inner_target: np.ndarray  # (L, q)
    outer_target: np.ndarray  # (r,)
    square: float  # of the target
    n_rows: int
    n_levels: tuple  # of every grouping
    widths: tuple  # numbers of coefficients per level
    n_columns: int  # p
    rows: Any = None  # sparse (n, L q) and (n, r), whose products these are; None if they are dense

    @cached_property
    def cross_transposed(self):
        """Transpose of `cross`, by rows."""
        return self.cross.T if isinstance(self.cross, np.ndarray) else self.cross.T.tocsr()

    def with_dense_cross(self):
        """The same products, for many points at which they are small."""
        return replace(self, cross=self.cross.toarray())

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

    def times(self, inner, outer):
        """Products of all rows' predictors, for effects (L, q[, k]) and (r[, k]), with columns."""
        flat = inner.reshape(-1, *outer.shape[1:])
        product = np.einsum("lab,lb...->la...", self.inner, inner)
        product += (self.cross @ outer).reshape(product.shape)
        return product, self.cross.T @ flat + self.outer @ outer


def products_of(groupings, columns, target, weights=None, dense=True):
    """Products of Groupings, population columns (n, p) and a target (n,); weights (n,) or None."""
    if weights is not None:
        roots = np.sqrt(weights)
        columns, target = columns * roots[:, None], target * roots
        groupings = [g._replace(columns=g.columns * roots[:, None]) for g in groupings]
    first, *others = groupings
    inner = _products_by_level(first)
    indicator = first.indicator()
    outside = sparse.hstack([*(g.indicator() for g in others), sparse.csr_array(columns)]).tocsr()
    outer = (outside.T @ outside).tocsr()
    return Products(
        inner,
        (indicator.T @ outside).tocsr(),
        outer.toarray() if dense else outer,
        (indicator.T @ target).reshape(first.n_levels, first.width),
        outside.T @ target,
        float(target @ target),
        len(target),
        tuple(g.n_levels for g in groupings),
        tuple(g.width for g in groupings),
        columns.shape[1],
        None if dense else (indicator, outside),
    )


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
