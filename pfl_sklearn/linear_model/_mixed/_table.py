"""The rows that a regression with a link reads, and stacks of those of similar clients.

Columns are in the order of the prior: the random ones first, then the fixed ones.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from pfl_sklearn._clients import client_batches, row_counts
from pfl_sklearn._columns import column_bounds
from pfl_sklearn._parallel import BatchMapper
from pfl_sklearn.linear_model._algebra import row_slices
from pfl_sklearn.linear_model._mixed._reduction import CACHED_CELLS, column_layout, gather_rows

_SIZES = 4  # stacked sizes differ by less than a share of 1 / 4,
_PADDING = 1 << 10  # unless padding takes fewer rows than these: a stack costs as much time
_STACK_CELLS = 1 << 19  # numbers of a stack's columns; more clients make another stack


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

    @property
    def random_intercept(self):
        """Whether the intercept varies."""
        return self.intercept is not None and self.intercept < self.n_random

    @property
    def intercept_only(self):
        """The same table with the random intercept, its first column, alone."""
        return self._replace(n_random=1, all_random=False)

    @property
    def random(self):
        """The random columns (n, q)."""
        return self.columns[:, : self.n_random]

    @property
    def row_weights(self):
        """Weights (n,), 1 where none were given."""
        # Ones that take no memory, and that nothing can change.
        return np.broadcast_to(1.0, len(self.y)) if self.weights is None else self.weights

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

    def stacks(self):
        """Stacks of the rows of all clients."""
        return stack_rows(
            self.columns, self.y, self.weights, self.codes, self.n_clients, self.offset
        )

    def predictors(self, population):
        """Predictors (n, a) under population coefficients (a, p) alone."""
        predictors = self.columns @ population.T
        return predictors if self.offset is None else predictors + self.offset[:, None]

    def constant(self, family):
        """Part of the log-likelihood of all rows that depends on no predictor."""
        return float(self.row_weights @ family.constants(self.y))

    def predictor_spread(self, factor):
        """Standard deviation between clients of the predictors, under a factor (q, r)."""
        # The root mean square over the rows; of all at once it would take as much as the table.
        weights, square = self.row_weights, 0.0
        for rows in row_slices(len(self.y), self.n_random, CACHED_CELLS):
            square += weights[rows] @ np.sum((self.random[rows] @ factor) ** 2, axis=1)
        return float(np.sqrt(square / weights.sum()))

    def means(self):
        """Weighted means (p + 1,) of the columns and the labels, and the sum of the weights."""
        weights = self.row_weights
        means = np.append(weights @ self.columns, weights @ self.y) / weights.sum()
        both = zip(column_bounds(self.columns), column_bounds(self.y), strict=True)
        low, high = (np.append(*bounds) for bounds in both)
        # A mean has rounding errors, and a constant column has to become exactly 0.
        return np.where(low == high, low, means), float(weights.sum())

    def squares_about(self, means):
        """Weighted products (p + 1, p + 1) of columns and labels less their means."""
        total = np.zeros((len(means), len(means)))
        for rows in row_slices(len(self.y), len(means), CACHED_CELLS):
            centred = np.column_stack([self.columns[rows], self.y[rows]]) - means
            total += centred.T @ (
                centred if self.weights is None else self.weights[rows, None] * centred
            )
        return total

    def centred_columns(self, at, centre):
        """Blocks (k, c) of the columns `at` less their centre (c,), times roots of the weights."""
        for rows in row_slices(len(self.y), len(at), CACHED_CELLS):
            centred = self.columns[rows][:, at] - centre
            yield (centred if self.weights is None else np.sqrt(self.weights[rows, None]) * centred)


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
        *column_layout(design),
        **others,
    )


def varies_within_clients(values, codes, n_clients):
    """Whether values (n, ...) differ between rows of some client; an array (...)."""
    # One row stands for its client, whichever was written last.
    representative = np.empty((n_clients, *values.shape[1:]), dtype=values.dtype)
    representative[codes] = values
    return np.any(representative[codes] != values, axis=0)


class RowStack(NamedTuple):
    """Rows of clients of similar size, padded with rows whose weight and columns are 0."""

    clients: np.ndarray  # (b,)
    x: np.ndarray  # (b, n, p), random columns first
    y: np.ndarray  # (b, n), responses
    w: np.ndarray  # (b, n)
    offset: np.ndarray | None  # (b, n), known part of the predictors; None if there is none

    def of_clients(self, at):
        """The rows of some of the clients."""
        parts: Any = (None if array is None else array[at] for array in self)
        return RowStack(*parts)

    def predictors(self, population):
        """Predictors (b, n, a) under population coefficients (a, p) alone."""
        predictors = self.x.reshape(-1, self.x.shape[-1]) @ population.T
        predictors = predictors.reshape(*self.y.shape, len(population))
        return predictors if self.offset is None else predictors + self.offset[..., None]


def stack_rows(columns, y, weights, codes, n_clients, offset=None):
    """RowStacks of the rows of all clients; `weights` and `offset` (n,) may be None."""
    cells = max(_STACK_CELLS // max(columns.shape[1], 1), 1)
    stacks = []
    for batches in _of_similar_size(client_batches(codes, n_clients, cells), cells):
        rows = [batch.rows for batch in batches]
        longest = max(block.shape[1] for block in rows)
        at = np.concatenate([
            np.pad(block, ((0, 0), (0, longest - block.shape[1])), constant_values=-1)
            for block in rows
        ])  # fmt: skip
        clients = np.concatenate([batch.clients for batch in batches])
        x, responses = gather_rows(columns, at), y[at]  # -1 takes the last row, for a moment
        w = np.broadcast_to(1.0, at.shape) if weights is None else weights[at]
        known = None if offset is None else offset[at]
        # Columns of zeros and a weight of 0 leave every sum as it is; every family takes a 1.
        absent = at < 0
        if absent.any():
            x[absent], responses[absent], w = 0.0, 1, np.where(absent, 0.0, w)
        stacks.append(RowStack(clients, x, responses, w, known))
    return stacks


def _of_similar_size(batches, cells):
    """Lists of consecutive batches, in ascending size; each list makes one stack."""
    joined: list[list] = []
    last_step, n_clients, n_rows = None, 0, 0
    for batch in batches:
        b, n = batch.rows.shape
        # Sizes share a step if they differ by less than a quarter of the power of two below them.
        height = 1 << max(n.bit_length() - _SIZES.bit_length(), 0)
        step = (n - 1) // height * height
        similar = step == last_step or n_clients * n - n_rows <= _PADDING
        if not similar or not joined or (n_clients + b) * n > cells:
            joined.append([])
            n_clients, n_rows = 0, 0
        last_step, n_clients, n_rows = step, n_clients + b, n_rows + b * n
        joined[-1].append(batch)
    return joined


class SharedStacks:
    """Stacks that stay the same for many evaluations; workers keep them, in parts."""

    def __init__(self, stacks, run=None):
        self.stacks, self._run = stacks, run or BatchMapper(1, 1)
        self._costs = [stack[1].size for stack in stacks]  # numbers in its columns
        self._places, self._by_effect = None, None

    def by_effect(self, form):
        """The same rows in another form, ``form(stack)``, which is made once."""
        if self._by_effect is None:
            self._by_effect = SharedStacks([form(stack) for stack in self.stacks], self._run)
        return self._by_effect

    def evaluate(self, function, states):
        """Results of ``function(stack, state)`` in the order of the stacks."""
        if self._places is None:  # workers keep no stacks of which nothing is asked
            self._places = self._send_to_workers()
        tasks = [(*place, state) for place, state in zip(self._places, states, strict=True)]
        return self._run(partial(_evaluate_place, function), tasks, self._costs)

    def _send_to_workers(self):
        """For every stack, the part that it belongs to and its number there."""
        ends, places = np.cumsum(self._costs), []
        parts = np.arange(len(ends))
        if self._run.stores:
            parts = (ends - 1) * self._run.n_parts // ends[-1]
        for part in np.unique(parts):
            members = [self.stacks[i] for i in np.flatnonzero(parts == part)]
            stored = self._run.store(members)
            places += [(stored, i) for i in range(len(members))]
        return places


def _evaluate_place(function, stacks, i, state):
    return function(stacks[i], state)
