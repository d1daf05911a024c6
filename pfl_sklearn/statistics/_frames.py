"""Moments of clients by the engine of a lazy frame: a query for the scale, and some for sums."""

import contextlib
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import narwhals as nw
import numpy as np

from pfl_sklearn._clients import encode_clients
from pfl_sklearn._columns import check_exact
from pfl_sklearn.statistics._moments import CHANGED, moment_names

_GROUP, WEIGHT = "client", "weight"  # names in our own queries, whatever the columns are called
_BOUNDS = "min", "max"
_SUMS_AT_ONCE = 40  # a million clients then take an engine a gigabyte or two


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


def columns_of(groups, target, features, sample_weight, levels):
    """Columns from the parameters of a constructor, which may name one feature or target alone."""
    for what, name in (("groups", groups), ("sample_weight", sample_weight)):
        if not (isinstance(name, str) or (what == "sample_weight" and name is None)):
            raise ValueError(f"{what} must name a column by a string; got {name!r}.")
    if not (levels is None or isinstance(levels, Mapping)):
        raise ValueError(f"levels must be a dict of lists, by column; got {levels!r}.")
    features, targets = columns_named("features", features), columns_named("target", target)
    if not targets:
        raise ValueError("target must name at least one column; got none.")
    return Columns(groups, features + targets, sample_weight, dict(levels or {}), len(features))


def columns_named(what, names):
    """Tuple of names from one name or several."""
    names = (names,) if isinstance(names, str) else names
    if not isinstance(names, Iterable) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{what} must name columns by strings; got {names!r}.")
    return tuple(names)


def is_lazy(frame):
    """Whether a frame is a query that an engine has yet to run."""
    return isinstance(nw.from_native(frame), nw.LazyFrame)


@contextlib.contextmanager
def engine_of(frame):
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


def eager(chunk):
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
    for name in (*columns.values, columns.weight):
        if name is None or name in columns.levels:
            continue
        # A column without any value has no type in some engines.
        if not schema[name].is_numeric() and schema[name] not in (nw.Boolean, nw.Unknown):
            raise ValueError(
                f"column {name!r} must hold numbers; got {schema[name]}. For categories give "
                f"levels={{{name!r}: [...]}}."
            )
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
        check_exact(name, schema[name], levels)
    names = value_names(columns)
    check_distinct(names)
    return names


def check_distinct(names):
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


def numbered(frame, columns):
    """The frame's client ids, weights, and numbers v_0, v_1, ... in double precision.

    What is none of the given levels is missing.
    """
    values, k = [], 0
    for name in columns.values:
        for value in _numbers(name, columns.levels.get(name)):
            values.append(value.alias(f"v_{k}"))
            k += 1
    one = nw.lit(1.0) if columns.weight is None else _float(columns.weight)
    frame, ids = nw.from_native(frame), nw.col(columns.groups)
    if frame.collect_schema()[columns.groups].is_float():  # NaN is no client, and null neither
        ids = _null_for_nan(ids)
    return frame.select(ids.alias(_GROUP), one.alias(WEIGHT), *values)


def arrays(frame, columns):
    """Numbers (n, p), weights (n,) or None and ids (n,) of an eager frame, and rows without ids.

    Missing numbers and weights are NaN.
    """
    numbers = numbered(frame, columns)
    lost = numbers[_GROUP].is_null()
    n_lost = int(lost.sum())
    if n_lost:
        numbers = numbers.filter(~lost)
    names = [name for name in numbers.columns if name not in (_GROUP, WEIGHT)]
    values = np.empty((len(numbers), len(names)))
    for j, name in enumerate(names):
        values[:, j] = numbers[name].to_numpy()
    weights = None if columns.weight is None else numbers[WEIGHT].to_numpy().astype(float)
    return values, weights, numbers[_GROUP], n_lost


def _numbers(name, levels):
    if levels is None:
        return [_float(name)]
    column = nw.col(name)
    known = column.is_in(levels)
    return [nw.when(known).then((column == level).cast(nw.Float64)) for level in levels[1:]]


def _float(name):
    # Most engines let products of whole numbers wrap around, silently.
    return nw.col(name).cast(nw.Float64)


class Scale(NamedTuple):
    """What a first pass finds."""

    n_rows: int
    n_incomplete: int  # rows with missing values, weights or clients
    n_used: int  # complete rows of positive weight
    least_weight: float
    heaviest: float
    centre: np.ndarray  # (p,), weighted means
    spread: np.ndarray  # (p,), above 0
    lowest: np.ndarray  # (p,)
    highest: np.ndarray  # (p,)


def without_nan(frame):
    """A lazy frame of numbers whose missing ones are all null."""
    names = [name for name in frame.collect_schema().names() if name != _GROUP]
    return frame.with_columns(_null_for_nan(nw.col(name)).alias(name) for name in names)


def _null_for_nan(values):
    """Floats as they are, and null for NaN.

    Not by is_nan: DuckDB 2.0.1 takes that for false where a Parquet file of PyArrow, whose bounds
    of a column ignore NaN, says that the column is finite. Ibis has no other word for is_finite.
    """
    infinite = (values == math.inf) | (values == -math.inf)
    return nw.when((values * 0.0 == 0.0) | infinite).then(values)


def scale_of(frame, n_values):
    """Scale of a frame of numbers."""
    names = [f"v_{j}" for j in range(n_values)]
    complete = nw.all_horizontal(
        *(~nw.col(name).is_null() for name in (_GROUP, WEIGHT, *names)), ignore_nulls=True
    )
    frame = frame.with_columns(complete.alias("complete"))
    frame = frame.with_columns((nw.col("complete") & (nw.col(WEIGHT) > 0)).alias("used"))
    used = [nw.when(nw.col("used")).then(nw.col(name)).alias(name) for name in names]
    frame = frame.with_columns(*used)
    weight = nw.when(nw.col("used")).then(nw.col(WEIGHT))
    frame = frame.with_columns(
        weight.alias("weight_used"), *((nw.col(name) * weight).alias(f"w{name}") for name in names)
    )
    facts = [
        nw.len().alias("rows"),
        *(nw.col(name).cast(nw.Int64).sum() for name in ("complete", "used")),
        nw.col(WEIGHT).min().alias("least"),
        nw.col(WEIGHT).max().alias("heaviest"),
        *(nw.col(name).sum() for name in ("weight_used", *(f"w{name}" for name in names))),
    ]
    for what, name in itertools.product(_BOUNDS, names):
        facts.append(getattr(nw.col(name), what)().alias(f"{what}_{name}"))
    collected: Any = frame.select(*facts).collect()
    found = {name: collected[name].to_list()[0] for name in collected.columns}

    def of(*keys):
        return np.array([np.nan if found[key] is None else found[key] for key in keys], dtype=float)

    least, heaviest, weight = of("least", "heaviest", "weight_used")
    lowest, highest = (of(*(f"{what}_{name}" for name in names)) for what in _BOUNDS)
    # Without rows, which is refused, and of values that overflow, whose scale nobody asks for.
    with np.errstate(all="ignore"):
        centre, half_range = of(*(f"w{name}" for name in names)) / weight, (highest - lowest) / 2
    return Scale(
        int(found["rows"]),
        int(found["rows"]) - int(found["complete"] or 0),
        int(found["used"] or 0),
        float(least),
        float(heaviest),
        centre,
        # Half the range is a scale as good as a standard deviation, which takes a pass of its own.
        np.where(highest > lowest, half_range, 1.0),
        lowest,
        highest,
    )


def summed(frame, centre, scale):
    """Sorted client ids, and a dict of the moments (m,) of a frame of numbers."""
    p = len(centre)
    sums, products, lowest, highest = moment_names(p)
    values = [nw.col(f"v_{j}") for j in range(p)]
    weight = nw.col(WEIGHT)
    there = (~nw.col(name).is_null() for name in (_GROUP, WEIGHT, *(f"v_{j}" for j in range(p))))
    frame = frame.filter(*there).filter(weight > 0)
    frame = frame.with_columns(
        (weight.log()).alias("log_w"),
        *(
            ((value - float(c)) * (1 / float(s))).alias(f"u_{j}")
            for j, (value, c, s) in enumerate(zip(values, centre, scale, strict=True))
        ),
    )
    # A product inside agg is more than some engines know.
    frame = frame.with_columns(
        *((nw.col(f"u_{j}") * weight).alias(name) for j, name in enumerate(sums))
    )
    pairs = [(i, j) for i in range(p) for j in range(i, p)]
    frame = frame.with_columns(
        *(
            (nw.col(f"s_{i}") * nw.col(f"u_{j}")).alias(name)
            for (i, j), name in zip(pairs, products, strict=True)
        )
    )
    sums = {name: nw.col(name).sum() for name in (*sums, *products)}
    bounds = {
        name: getattr(value, what)().alias(name)
        for what, names in (("min", lowest), ("max", highest))
        for value, name in zip(values, names, strict=True)
    }
    counts = {
        "n": nw.len().alias("n"),
        "w": weight.sum().alias("w"),
        "log_w": nw.col("log_w").sum(),
    }
    return _collected(frame, {**counts, **sums, **bounds})


def _collected(frame, sums):
    """Sorted ids, and a dict of sums (m,): a few at a time, or the engine spills to disk."""
    found: dict[str, np.ndarray] = {}
    ids, names = None, list(sums)
    for start in range(0, len(names), _SUMS_AT_ONCE):
        part = names[start : start + _SUMS_AT_ONCE]
        collected = frame.group_by(_GROUP).agg(*(sums[name] for name in part)).collect()
        before, (ids, codes) = ids, encode_clients(collected[_GROUP], len(collected))
        if before is not None and not np.array_equal(ids, before):
            raise ValueError(CHANGED)
        order = np.argsort(codes)
        found |= {name: collected[name].to_numpy()[order] for name in part}
    return ids, found
