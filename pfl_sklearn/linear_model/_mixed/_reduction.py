"""Rotated rows of clients: all that a Gaussian linear model needs, in a few rows each.

A rotation of a client's rows [1 X y] changes no likelihood, no least squares and no second moment.
The one that makes them triangular leaves no more rows than columns that are not zero, however many
there were. A row of zeros adds a share of log(2 pi sigma^2) and nothing else, so these are counted,
not stored. Columns stay in their own units and are not centred: the rotated rows of two parts of a
table, one below the other, are rotated rows of the whole.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from pfl_sklearn._clients import client_batches, row_counts
from pfl_sklearn._columns import check_bounds, check_float_range
from pfl_sklearn._parallel import map_batches
from pfl_sklearn.linear_model._algebra import row_slices

CACHED_CELLS = 1 << 18  # numbers in a batch of rows, which then fits the processor's cache
_COLUMNS_AT_ONCE = 64  # that are put into the order of clients: 512 bytes of each


class OriginalRows(NamedTuple):
    """Rows of a table as they are."""

    features: np.ndarray  # (n, d), of any float type
    places: Any  # slice or (d,), of the features among the p columns
    ones: list  # positions of what is 1 in every row: the last of the p + 2, and an intercept
    y: np.ndarray  # (n,)
    weights: np.ndarray | None  # (n,), precision
    n_columns: int
    too_large: float | None = None  # from this size of a value on, its row counts as absent

    def values(self, rows):
        """Columns, target and a one (b, n, p + 2) of rows (b, n); zeros for an absent one."""
        values = np.empty((*rows.shape, self.n_columns + 2))
        values[..., self.ones] = 1.0
        values[..., self.places] = gather_rows(self.features, rows)
        values[..., -2] = self.y[rows]
        if self.too_large is not None:  # NaN fails the comparison, too
            values[~(np.abs(values).max(axis=-1) < self.too_large)] = 0.0
        return values

    def weighted(self, rows):
        """The same times the roots of the weights."""
        values = self.values(rows)
        return values if self.weights is None else values * np.sqrt(self.weights[rows])[..., None]


class RotatedTable(NamedTuple):
    """Rotated rows of m clients in batches, and the facts that a rotation hides.

    A batch is clients (b,) and rows (b, k, p + 2), times the roots of their weights: the q random
    columns, the fixed ones, the target, and the rotated column of ones. Clients with few rows keep
    theirs, which no rotation would shorten.
    """

    stored: list  # of clients and their rows, or a function that reads them
    sizes: np.ndarray  # (m,), rows of positive weight before the rotation
    log_weights: float  # sum of the logarithms of the weights
    totals: np.ndarray  # (p + 2,), weighted sums of the columns, the target and a one
    lowest: np.ndarray  # (m, p + 1), a client's smallest value of every column and of the target
    highest: np.ndarray  # (m, p + 1), equal to it where a column is constant
    n_random: int
    intercept: int | None  # position of the intercept among the columns
    names: list  # names of the columns
    all_random: bool  # whether all columns were asked to vary, and not certain ones
    offset: Any = 0.0  # (p,), of whose predictor `move` takes the targets' distances
    centre: Any = 0.0  # (p,), that `move` subtracts from the columns

    @property
    def batches(self):
        """Clients (b,) and rows (b, k, p + 2) of one batch after the other."""
        return ((clients, rows() if callable(rows) else rows) for clients, rows in self.stored)

    @property
    def n_clients(self):
        """Number m of clients."""
        return len(self.sizes)

    @property
    def n_columns(self):
        """Number p of columns."""
        return len(self.names)

    @property
    def n_rows(self):
        """Number of rows before the rotation."""
        return int(self.sizes.sum())

    @property
    def random_intercept(self):
        """Whether the intercept varies."""
        return self.intercept is not None and self.intercept < self.n_random

    @property
    def intercept_only(self):
        """The same table with a random intercept alone, which is the first column."""
        return self._replace(n_random=1, all_random=False)

    @property
    def varies_within(self):
        """Which columns (p,) differ between rows of some client."""
        return np.any(self.lowest != self.highest, axis=0)[:-1]

    @property
    def bounds(self):
        """Smallest and largest values (p,) of the columns."""
        return self.lowest.min(axis=0)[:-1], self.highest.max(axis=0)[:-1]

    @property
    def move(self):
        """Function from rows (..., p + 2) of a batch to moved ones (..., p + 1)."""
        return partial(_shift_rows, offset=self.offset, centre=self.centre)

    def moved_batches(self):
        """Clients and moved rows of every batch, one after the other."""
        return ((clients, self.move(rows)) for clients, rows in self.batches)

    def squares_about(self, means):
        """Weighted products (p + 1, p + 1) of columns and target less their means."""
        return sum(rows.T @ rows for rows in self.centred_columns(slice(-1), means))

    def centred_columns(self, at, centre):
        """Blocks (k, c) of the columns `at` less their centre (c,), times roots of the weights."""
        centred = (rows[..., at] - rows[..., -1:] * centre for _, rows in self.batches)
        return (rows.reshape(-1, rows.shape[2]) for rows in centred)

    def means(self):
        """Weighted means (p + 1,) of the columns and the target, and the sum of the weights."""
        weight = float(self.totals[-1])
        # A mean has rounding errors, and a constant column has to become exactly 0.
        low, high = self.lowest.min(axis=0), self.highest.max(axis=0)
        return np.where(low == high, low, self.totals[:-1] / weight), weight


def sum_of_clients(parts, n_clients):
    """Sum (k,) of values (b, k) of clients (b,), in the order of the clients, however batched."""
    width = parts[0][1].shape[1]
    total = np.empty(width)
    for columns in row_slices(width, 1, _COLUMNS_AT_ONCE):
        values = np.empty((n_clients, len(total[columns])))
        for clients, part in parts:
            values[clients] = part[:, columns]
        total[columns] = values.sum(axis=0)
    return total


def rotated_table(design, features, rows):
    """Rotated table of features (n, d); `rows` holds targets, clients and weights.

    Raises ValueError if values are too large or too small to be squared: a private fit must not
    come here, as the error would reveal a client's values.
    """
    original = original_rows(design, features, rows.y, rows.weights)
    with np.errstate(over="ignore", invalid="ignore"):  # of values that are refused below
        table = rotate(original, rows.clients, column_layout(design))
    low, high = table.lowest.min(axis=0), table.highest.max(axis=0)
    for name, at in (("X", slice(-1)), ("y", slice(-1, None))):
        check_bounds(name, low[at], high[at], _heaviest(rows.weights))
    return table


def table_of_statistics(statistics, design):
    """Rotated table of ClientStatistics of features and one target, unpacked a block at a time."""
    first = 0 if design.fit_intercept else 1  # the ones are column 0 of a triangle
    columns = design.order + first
    at = [*columns, statistics.n_features + 1, 0]

    def rows(block):
        return statistics._triangles(block)[..., at]

    blocks = statistics._blocks()
    stored = [(np.arange(block.start, block.stop), partial(rows, block)) for block in blocks]
    sums = statistics._sums()
    bounds = np.insert([statistics.lowest, statistics.highest], 0, 1.0, axis=2)[..., at[:-1]]
    return RotatedTable(
        stored,
        statistics.n_samples_per_client,
        float(statistics.log_weights.sum()),
        sums.sum(axis=0)[at],
        *bounds,
        *column_layout(design),
    )


def check_table_range(X, y, weights):
    """Raise ValueError if values are too large or too small to be squared; not for private fits."""
    for name, values in (("X", X), ("y", y)):
        check_float_range(name, values, _heaviest(weights))


def _heaviest(weights):
    """Largest weight of a row, at least 1."""
    # Squares are weighted, so a heavy row leaves less room.
    return 1.0 if weights is None else max(weights.max(), 1.0)


def column_layout(design):
    """Number of random columns, position of the intercept, names, and whether all may vary."""
    intercept = int(np.argmin(design.order)) if design.fit_intercept else None
    names = [design.names[k] for k in design.order]
    return len(design.random), intercept, names, design.all_random


def original_rows(design, features, y, weights, too_large=None):
    """OriginalRows of features (n, d), whose columns are in the order of the prior."""
    places: Any = np.argsort(design.order)
    ones = [-1]
    if design.fit_intercept:
        ones, places = [places[0], -1], places[1:]
    # Numpy copies to a slice much faster than to the same positions one by one.
    if len(places) and np.all(np.diff(places) == 1):
        places = slice(places[0], places[-1] + 1)
    return OriginalRows(features, places, ones, y, weights, len(design.order), too_large)


def gather_rows(values, rows):
    """Rows (b, n, ...) of values (n_rows, ...), without a copy if they follow one another."""
    first = rows.ravel()[0]
    if first >= 0 and np.array_equal(rows.ravel(), np.arange(first, first + rows.size)):
        return values[first : first + rows.size].reshape(*rows.shape, *values.shape[1:])
    return values[rows]


def rotate(original, clients, facts, keep=False):
    """Rotated table of OriginalRows; `facts` are those of `column_layout`.

    A client's numbers are the same bits whatever the other clients are. With `keep` the table
    copies the rows that no rotation shortens, so that the original ones are not read later.
    """
    m, width, weights = len(clients.ids), original.n_columns + 2, original.weights
    index = row_batches(clients, width)
    rotate_batch = partial(_rotate_batch, original=original, width=width, keep=keep)
    stored, totals, bounds = [], [], np.empty((2, m, width - 1))
    batches = zip(index, map_batches(rotate_batch, index, 1), strict=True)
    for (members, numbers), (block, total, *extremes) in batches:
        stored.append((members, partial(original.weighted, numbers) if block is None else block))
        totals.append((members, total))
        bounds[:, members] = extremes
    return RotatedTable(
        stored,
        row_counts(clients.codes, m),
        0.0 if weights is None else float(np.log(weights).sum()),
        sum_of_clients(totals, m),
        *bounds,
        *facts,
    )


def row_batches(clients, width):
    """Clients (b,) and the numbers (b, n) of their rows, whose `width` numbers each fit a cache."""
    return client_batches(clients.codes, len(clients.ids), CACHED_CELLS // width)


def row_parts(rows, width):
    """Slices of the rows (b, n) of a batch; a client whose rows fit no cache comes in several."""
    return row_slices(rows.shape[1], len(rows) * width, CACHED_CELLS)


def _rotate_batch(clients, rows, original, width, keep):
    """Rows (b, k, p + 2) to be stored, or None for few rows, totals (b, p + 2) and two bounds."""
    shortens = rows.shape[1] > 2 * width  # with fewer rows a rotation costs more than it saves
    blocks, lowest, highest = [], [], []
    for part in row_parts(rows, width):
        block = original.weighted(rows[:, part])
        bounded = block if original.weights is None else original.values(rows[:, part])
        lowest.append(bounded.min(axis=1)[:, :-1])
        highest.append(bounded.max(axis=1)[:, :-1])
        # Ones come first, so that a rotation keeps the digits of columns far from zero.
        blocks.append(np.linalg.qr(np.roll(block, 1, axis=-1), mode="r") if shortens else block)
    low, high = np.min(lowest, axis=0), np.max(highest, axis=0)
    joined: Any = blocks[0] if len(blocks) == 1 else np.concatenate(blocks, axis=1)
    if shortens:
        triangle: Any = joined if len(blocks) == 1 else np.linalg.qr(joined, mode="r")
        ones = triangle[..., :1]
        # Rounding errors would separate values that are constant within a client.
        triangle = np.where((low == high)[:, None], low[:, None] * ones, triangle[..., 1:])
        joined = np.concatenate([triangle, ones], axis=-1)
    totals = np.einsum("bk,bkw->bw", joined[..., -1], joined)
    return joined if shortens or keep else None, totals, low, high


def _shift_rows(rows, offset, centre):
    """Rows (..., p + 1): the centre is subtracted from columns, the offset's part from targets."""
    if not (np.any(offset) or np.any(centre)):
        return rows[..., :-1]
    shifted = rows[..., -1:] * np.append(centre, 0.0)
    np.subtract(rows[..., :-1], shifted, out=shifted)  # a second array would not fit the cache
    shifted[..., -1] -= np.einsum("...p,p->...", rows[..., :-2], offset)
    return shifted


class MixedModelEstimates(NamedTuple):
    """Fitted population and clients; random columns come first.

    Behind a link c is the number of logits: 1 for two classes and for counts, else that of classes.
    """

    population: np.ndarray  # (p,); (c, p) behind a link
    population_covariance: np.ndarray  # (p, p); (c p, c p) behind a link
    coefficients: np.ndarray  # (m, p); (m, c, p) behind a link
    posterior: Any  # of the clients; None if these have a mode only
    prior: Any  # with the fitted values
    covariance: np.ndarray  # (q, q), of the random coefficients between clients
    noise: float | None  # None behind a link
    log_likelihood: float = np.nan
    n_iter: int = 1
    converged: bool = True
    responsibilities: np.ndarray | None = None  # (m, k)
    centre: np.ndarray | None = None  # (p,), at which the covariance has its shape
    unbounded: np.ndarray | None = None  # (q,), variances that the data do not bound
    # Positions of population coefficients that the fit found open; None: it looked for none.
    unidentified: np.ndarray | None = None
    # Whether clients share nothing; `unidentified` then holds fixed columns alone.
    no_pooling: bool = False
    first: int = 0  # first column whose population coefficient is free
    row_space: Any = None  # RowSpace of these; None if the population's design has full rank
    # Of regressions with a link:
    estimable: Any = None  # (c, p), bool: whether the data identify the population coefficient
    effects: Any = None  # EffectPosterior, given the population and the covariance
    family: Any = None  # with the fitted dispersion
    modes_found: bool = True  # for all clients
    weak: Any = None  # WeakPriors that keep the maximum finite
    levels: Any = None  # FittedLevels of further groupings
    variances: Any = None  # FittedVariances of all groupings
    rows: Any = None  # FittedRows, with further groupings

    @property
    def is_open(self):
        """Which population coefficients (p,) are not estimable."""
        is_open = np.zeros(len(self.population), dtype=bool)
        if self.unidentified is not None:
            is_open[self.unidentified] = True
        # A fit of centred columns leaves no intercept open, which at 0 may well be.
        if self.row_space is not None:
            is_open |= self.row_space.unidentified_coefficients(len(is_open))
        return is_open


def column_centre(table, known_mean, random_too=False):
    """Centre (p,) of the columns of a table, whose means an intercept absorbs.

    A free intercept of the population absorbs those of the fixed columns; with `random_too`, a
    random intercept absorbs those of the random columns.
    """
    q, centre = table.n_random, np.zeros(len(table.names))
    if table.intercept is not None:
        means = table.means()[0]
        if _has_free_intercept(table, known_mean):
            centre[q:] = means[q:-1]
        if random_too:
            centre[:q] = means[:q]
        centre[table.intercept] = 0.0  # it absorbs the means, so it must stay
    return centre


def _has_free_intercept(table, known_mean):
    # A fixed intercept is free also with a known mean, which is that of the random part.
    return table.intercept is not None and (known_mean is None or table.intercept >= table.n_random)


def centre_table(table, known_mean, random_too=False):
    """The RotatedTable with shifted rows, and the offset (p,) and centre (p,) that undo it."""
    # We subtract a known mean of the random part from the targets. A free intercept of the
    # population absorbs the mean of the remainder. Add the offset to the population afterwards.
    offset, centre = np.zeros(table.n_columns), column_centre(table, known_mean, random_too)
    if known_mean is not None:
        offset[: table.n_random] = known_mean
    if _has_free_intercept(table, known_mean):
        means = table.means()[0]
        offset[table.intercept] = means[-1] - means[:-1] @ offset
    return table._replace(offset=offset, centre=centre), offset, centre


def uncentre(vectors, intercept, centre):
    """Coefficients (..., p) of the original columns, from those of the centred columns."""
    if centre.any():
        vectors = vectors.copy()
        vectors[..., intercept] -= vectors @ centre
    return vectors


def point_estimates(population, coefficients, prior, covariance, noise, n_iter, done, shares=None):
    """Estimates without a posterior."""
    unknown = np.full((len(population), len(population)), np.nan)
    return MixedModelEstimates(
        population,
        unknown,
        coefficients,
        None,
        prior,
        covariance,
        float(noise),
        np.nan,
        n_iter,
        done,
        shares,
    )
