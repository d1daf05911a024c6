"""Columns of data frames as numbers, weights and client ids, in memory or in a query."""

import contextlib
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import narwhals as nw
import numpy as np

from pfl_sklearn._clients import WRONG_KIND
from pfl_sklearn._columns import (
    NUMBER_KINDS,
    OF_DATES,
    as_floats,
    check_exact_levels,
    holds_dates,
    kind_of,
)

GROUP, WEIGHT = "client", "weight"  # names in our own queries, whatever the columns are called


class Columns(NamedTuple):
    """What a query reads of a frame."""

    groups: str
    values: tuple[str, ...]  # features, then targets
    weight: str | None
    levels: dict  # levels of columns of categories, the reference first
    n_features: int  # before they are split into levels

    @property
    def n_targets(self):
        """Number of targets."""
        return len(self.values) - self.n_features


def read_columns_argument(groups, target, features, sample_weight, levels):
    """Columns from the parameters of a constructor, which may name one feature or target alone."""
    for role, name in (("groups", groups), ("sample_weight", sample_weight)):
        if not (isinstance(name, str) or (role == "sample_weight" and name is None)):
            raise ValueError(f"{role} must name a column by a string; got {name!r}.")
    if not (levels is None or isinstance(levels, Mapping)):
        raise ValueError(f"levels must be a dict of lists, by column; got {levels!r}.")
    features, targets = column_names("features", features), column_names("target", target)
    if not targets:
        raise ValueError("target must name at least one column; got none.")
    return Columns(groups, features + targets, sample_weight, dict(levels or {}), len(features))


def column_names(role, names):
    """Tuple of names from one name or several."""
    names = (names,) if isinstance(names, str) else names
    if not isinstance(names, Iterable) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{role} must name columns by strings; got {names!r}.")
    return tuple(names)


def is_lazy(frame):
    """Whether a frame is a query that an engine has yet to run."""
    return isinstance(nw.from_native(frame), nw.LazyFrame)


@contextlib.contextmanager
def name_engine(frame):
    """Name the engine of a lazy frame where it lacks an operation; its own errors pass."""
    try:
        yield
    except NotImplementedError as error:
        name = nw.from_native(frame).implementation.value
        raise NotImplementedError(
            f"{name} lacks an operation that statistics need ({error}). Give the frame in chunks, "
            "by from_chunks."
        ) from error


def check_chunks(chunks):
    """Raise ValueError for what is no iterable of frames, but a frame say."""
    frame = nw.from_native(chunks, pass_through=True)
    if isinstance(frame, nw.DataFrame | nw.LazyFrame) or not isinstance(chunks, Iterable):
        raise ValueError(
            f"chunks must be an iterable of data frames; got one {type(chunks).__name__}. A frame "
            "as a whole is for from_frame."
        )


def collect_frame(chunk):
    """A chunk of rows as a frame in memory; batches of PyArrow are no frames yet."""
    if type(chunk).__name__ == "RecordBatch":
        import pyarrow

        chunk = pyarrow.Table.from_batches([chunk])
    frame = nw.from_native(chunk)
    return frame.collect() if isinstance(frame, nw.LazyFrame) else frame


def check_columns(frame, columns):
    """Names of the numbers that columns become; ValueError for columns that are not there."""
    schema = nw.from_native(frame).collect_schema()
    for name in (columns.groups, *columns.values, columns.weight):
        if name is not None and name not in schema:
            raise ValueError(f"the frame has no column {name!r}; it has {list(schema)[:20]}.")
    if schema[columns.groups].is_nested():  # of which engines make different things
        raise ValueError(f"groups {WRONG_KIND.format(schema[columns.groups])}")
    for name in (*columns.values, columns.weight):
        if name is not None and name not in columns.levels:
            _check_numeric(name, schema[name], frame)
    listed = (columns.groups, *columns.values)
    for name in listed:
        if listed.count(name) > 1:
            raise ValueError(f"column {name!r} is listed twice.")
    for name, levels in columns.levels.items():
        if name not in columns.values[: columns.n_features]:
            features = columns.values[: columns.n_features]
            raise ValueError(f"levels has {name!r}, which is none of the features {features}.")
        distinct = not isinstance(levels, str) and len(set(levels)) == len(levels) > 1
        if not distinct or any(level is None or level != level for level in levels):
            raise ValueError(
                f"levels of {name!r} must be two or more that differ, none of them missing; got "
                f"{levels!r}."
            )
        check_exact_levels(name, schema[name], levels)
    names = value_names(columns)
    check_distinct_columns(names)
    return names


def _check_numeric(name, dtype, frame):
    """Raise ValueError for a column that holds anything but numbers and booleans."""
    # A column without any value has no type in some engines.
    if dtype.is_numeric() or dtype in (nw.Boolean, nw.Unknown):
        return
    frame = nw.from_native(frame)
    # pandas has decimals, and booleans beside None, as Python objects.
    kind = kind_of(frame[name]) if isinstance(frame, nw.DataFrame) else None
    if kind in NUMBER_KINDS:
        return
    if holds_dates(dtype, kind):
        raise ValueError(f"column {name!r} {OF_DATES}.")
    raise ValueError(
        f"column {name!r} must hold numbers; got {dtype}. For categories give "
        f"levels={{{name!r}: [...]}}."
    )


def check_distinct_columns(names):
    """Raise ValueError for columns of the same name."""
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two columns would be called {name!r}.")


def value_names(columns):
    """Names of the numbers that columns become, with one for each level but the first."""
    names = []
    for name in columns.values:
        levels = columns.levels.get(name)
        names += [name] if levels is None else [f"{name}_{level}" for level in levels[1:]]
    return names


def select_numbers(frame, columns, needed=None):
    """A lazy frame's client ids, weights, and numbers v_0, v_1, ... in double precision.

    What is missing is null: NaN too, and what is none of the given levels. With `needed` only the
    numbers at these positions.
    """
    values, k = [], 0
    for name in columns.values:
        levels = columns.levels.get(name)
        for value in [_float(name)] if levels is None else _indicators(name, levels):
            if needed is None or k in needed:
                values.append(value.alias(f"v_{k}"))
            k += 1
    one = nw.lit(1.0) if columns.weight is None else _float(columns.weight)
    frame = nw.from_native(frame)
    return frame.select(_ids(frame, columns).alias(GROUP), one.alias(WEIGHT), *values)


def to_arrays(frame, columns):
    """Numbers (n, p), weights (n,) or None and ids (n,) of an eager frame, and rows without ids.

    Missing numbers and weights are NaN.
    """
    ids = frame.select(_ids(frame, columns).alias(GROUP))[GROUP]
    lost = ids.is_null()
    n_lost = int(lost.sum())
    if n_lost:
        frame, ids = frame.filter(~lost), ids.filter(~lost)
    values, k = np.empty((len(ids), len(value_names(columns)))), 0
    for name in columns.values:
        levels = columns.levels.get(name)
        if levels is None:
            values[:, k], k = as_floats(frame[name]), k + 1
            continue
        for indicator in _indicators(name, levels):
            values[:, k] = frame.select(indicator.alias(name))[name].to_numpy()
            k += 1
    weights = None if columns.weight is None else as_floats(frame[columns.weight])
    return values, weights, ids, n_lost


def _ids(frame, columns):
    ids = nw.col(columns.groups)
    # NaN is no client, and null neither.
    return _null_for_nan(ids) if frame.collect_schema()[columns.groups].is_float() else ids


def _indicators(name, levels):
    column = nw.col(name)
    known = column.is_in(levels)
    return [nw.when(known).then((column == level).cast(nw.Float64)) for level in levels[1:]]


def _float(name):
    # Most engines let products of whole numbers wrap around, silently.
    return _null_for_nan(nw.col(name).cast(nw.Float64))


def _null_for_nan(values):
    """Floats as they are, and null for NaN."""
    # Not by is_nan: DuckDB 2.0.1 returns false where a Parquet file of PyArrow, whose column bounds
    # ignore NaN, claims that the column is finite. Ibis has no other operation like is_finite.
    infinite = (values == math.inf) | (values == -math.inf)
    return nw.when((values * 0.0 == 0.0) | infinite).then(values)
