"""Rows that stay in a file and are read when a round, or a pass over all of them, wants them."""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import narwhals.dependencies as nwd
import numpy as np
from sklearn.utils import check_array

from pfl_sklearn._typing import Integers

_NUMBERS_AT_ONCE = 1 << 20  # of a pass over all rows: eight megabytes


@dataclass(frozen=True)
class StoredRows:
    """Rows (n, ...) of a mapped file, or of an Arrow table; an index of any shape reads some.

    With an `order` (n,) row i is the row ``order[i]`` of the `source`. What is read goes through
    the functions of `steps`, which leads to rows of `row_shape` and `dtype`.
    """

    source: Any
    row_shape: tuple[int, ...]
    dtype: np.dtype
    order: Integers | None = None
    steps: tuple[Callable[[np.ndarray], np.ndarray], ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of rows, and the shape of one."""
        return (len(self), *self.row_shape)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return 1 + len(self.row_shape)

    def __len__(self) -> int:
        return len(self.source) if self.order is None else len(self.order)

    def __getitem__(self, rows: Any) -> np.ndarray:
        if self.order is not None:
            rows = self.order[rows]
        if isinstance(rows, slice):
            return self._after_steps(self.source[rows])
        values = self._after_steps(self.source[np.ravel(rows)])
        return values.reshape(*np.shape(rows), *self.row_shape)

    def _after_steps(self, values):
        for step in self.steps:
            values = step(values)
        return np.asarray(values)

    def only(self, rows: Integers) -> "StoredRows":
        """The chosen rows, which stay where they are."""
        return replace(self, order=rows if self.order is None else self.order[rows])

    def changed(self, step: Callable[[np.ndarray], np.ndarray]) -> "StoredRows":
        """The same rows, which go through a function of rows, one by one, when they are read."""
        example = step(np.zeros((1, *self.row_shape), self.dtype))
        return replace(
            self, row_shape=example.shape[1:], dtype=example.dtype, steps=(*self.steps, step)
        )

    def checked(self, estimator: Any, **options: Any) -> "StoredRows":
        """The rows, each of which has been read once; errors are those of ``check_array``."""
        for _, rows in blocks_of(self):
            check_array(rows, estimator=estimator, input_name="X", **options)
        return self


def stored_rows(X: Any) -> StoredRows | None:
    """Rows of a ``numpy.memmap`` or a ``pyarrow.Table`` of numbers; None for anything else."""
    source: Any = None
    if isinstance(X, np.memmap) and X.ndim > 1:
        source = X
    elif nwd.is_pyarrow_table(X):
        source = _arrow_rows(X)
    if source is None or not len(source) or not source.dtype.isnative:
        return None
    return (
        StoredRows(source, source.shape[1:], source.dtype) if source.dtype.kind in "fiu" else None
    )


def blocks_of(values: Any) -> Iterator[tuple[slice, Any]]:
    """Slices of rows, and the rows: all at once, unless they are in a file."""
    if not isinstance(values, StoredRows):
        yield slice(None), values
        return
    step = max(_NUMBERS_AT_ONCE // math.prod(values.row_shape), 1)
    for start in range(0, len(values), step):
        block = slice(start, start + step)
        yield block, values[block]


def chosen_rows(values: Any, rows: Integers) -> Any:
    """Some rows: a copy, unless they are in a file."""
    return values.only(rows) if isinstance(values, StoredRows) else values[rows]


def _arrow_rows(table):
    """Rows of a table without missing values; None if a column is no plain array of numbers."""
    from pyarrow.types import is_floating, is_integer

    if not all(is_floating(kind) or is_integer(kind) for kind in table.schema.types):
        return None
    try:
        batches = [
            [column.to_numpy(zero_copy_only=True) for column in batch.columns]
            for batch in table.to_batches()
            if batch.num_rows
        ]
    except ValueError:  # PyArrow's, of what has to be copied: nulls
        return None
    return _ArrowRows(batches) if batches and batches[0] else None


class _ArrowRows:
    """Columns of batches of rows, as one matrix."""

    def __init__(self, batches):
        self._batches = batches
        self._starts = np.cumsum([0, *(len(batch[0]) for batch in batches)])
        self.dtype = np.result_type(*(column.dtype for column in batches[0]))
        self.shape = int(self._starts[-1]), len(batches[0])

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, rows):
        """Rows of a slice, or with numbers (k,)."""
        rows = np.arange(len(self))[rows] if isinstance(rows, slice) else rows
        values = np.empty((len(rows), self.shape[1]), self.dtype)
        batches = np.searchsorted(self._starts, rows, side="right") - 1
        for k in np.unique(batches):
            (here,) = (batches == k).nonzero()
            within = rows[here] - self._starts[k]
            for j, column in enumerate(self._batches[k]):
                values[here, j] = column.take(within)
        return values


def shape_and_type_of(X: Any) -> tuple[Any, Any]:
    """Shape and type of a row of an array or a table, read off none of them; None if unknown."""
    stored = stored_rows(X)
    if stored is not None:
        return stored.row_shape, stored.dtype
    if not (hasattr(X, "dtype") or hasattr(X, "columns")):
        return None, None
    options = {"allow_nd": True, "dtype": "numeric", "ensure_min_samples": 0}
    # Other input may raise anything here; the fit refuses it with a message of its own.
    with suppress(Exception):
        empty = check_array(X[:0], **options)
        return empty.shape[1:], empty.dtype
    return None, None
