"""The rows that a regression with a link reads.

Columns are in the order of the prior: the random ones first, then the fixed ones.
"""

from typing import NamedTuple

import numpy as np

from pfl_sklearn._clients import row_counts
from pfl_sklearn._float_range import column_bounds
from pfl_sklearn.linear_model._algebra import row_slices
from pfl_sklearn.linear_model._table import CACHED_CELLS, column_facts


class RegressionTable(NamedTuple):
    """Rows of m clients."""

    columns: np.ndarray  # (n, p), the q random columns first
    y: np.ndarray  # (n,)
    codes: np.ndarray  # (n,)
    n_clients: int
    weights: np.ndarray | None  # (n,), precision
    n_random: int
    intercept: int | None  # position of the intercept among the columns
    names: list  # names of the columns
    all_random: bool  # whether all columns were asked to vary, and not certain ones
    offset: np.ndarray | None = None  # (n,), known part of the predictors
    dispersed: bool = False  # whether the outcome has a dispersion, which is unknown

    @property
    def random_intercept(self):
        """Whether the intercept varies."""
        return self.intercept is not None and self.intercept < self.n_random

    @property
    def level_alone(self):
        """The same table where nothing but the first column, the intercept, varies."""
        return self._replace(n_random=1, all_random=False)

    @property
    def sizes(self):
        """Rows (m,) of every client."""
        return row_counts(self.codes, self.n_clients)

    @property
    def varies_within(self):
        """Which columns (p,) differ between rows of some client."""
        return varies_within_clients(self.columns, self.codes, self.n_clients)

    @property
    def bounds(self):
        """Smallest and largest values (p,) of the columns."""
        return column_bounds(self.columns)

    def predictors(self, population):
        """Predictors (n, a) under population coefficients (a, p) alone."""
        predictors = self.columns @ population.T
        return predictors if self.offset is None else predictors + self.offset[:, None]

    def means(self):
        """Weighted means (p + 1,) of the columns and the labels, and the sum of the weights."""
        weights = np.ones(len(self.y)) if self.weights is None else self.weights
        means = np.append(weights @ self.columns, weights @ self.y) / weights.sum()
        both = zip(column_bounds(self.columns), column_bounds(self.y), strict=True)
        low, high = (np.append(*bounds) for bounds in both)
        # A mean has rounding errors, and a constant column has to become exactly 0.
        return np.where(low == high, low, means), float(weights.sum())

    def squares_about(self, means):
        """Weighted products (p + 1, p + 1) of columns and labels less their means."""
        total = np.zeros((len(means), len(means)))
        for rows in row_slices(len(self.y), len(means), CACHED_CELLS):
            moved = np.column_stack([self.columns[rows], self.y[rows]]) - means
            total += moved.T @ (moved if self.weights is None else self.weights[rows, None] * moved)
        return total


def make_table(design, features, rows, **others):
    """Table of features (n, d); `rows` holds targets, clients and weights."""
    columns = design.matrix(features)
    # If all coefficients vary, the columns are in order, and a second copy would be in vain.
    in_order = np.all(np.diff(design.order) == 1)
    return RegressionTable(
        columns if in_order else columns[:, design.order],
        rows.y,
        rows.clients.codes,
        len(rows.clients.ids),
        rows.weights,
        *column_facts(design),
        **others,
    )


def varies_within_clients(values, codes, n_clients):
    """Whether values (n, ...) differ between rows of some client; an array (...)."""
    # One row stands for its client, whichever was written last.
    representative = np.empty((n_clients, *values.shape[1:]), dtype=values.dtype)
    representative[codes] = values
    return np.any(representative[codes] != values, axis=0)
