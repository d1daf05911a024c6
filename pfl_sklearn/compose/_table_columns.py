"""Encoding of single columns of a table as numbers: its plan, and what the plan is learned from."""

from typing import Any, NamedTuple

import narwhals as nw
import numpy as np
import pandas as pd

from pfl_sklearn._columns import NUMBER_KINDS, as_floats, suits_grouping
from pfl_sklearn._dates import days_of, times_of
from pfl_sklearn._typing import Floats

NUMBERS, STRINGS, DATES, PASSED = "numbers", "strings", "dates", "anything"
# pandas' names for what a column of Python objects, or of its own types, holds.
_OBJECTS = {
    "string": STRINGS,
    **dict.fromkeys(NUMBER_KINDS, NUMBERS),
    **dict.fromkeys(("date", "datetime", "datetime64", "period"), DATES),
}


class NumberPlan(NamedTuple):
    """A column of numbers: the fill of its missing values, and whether an indicator marks them."""

    fill: float
    has_indicator: bool
    kind: str = NUMBERS

    @property
    def suffixes(self):
        """Ends of the output names, behind the name of the column."""
        return ["", "_missing"] if self.has_indicator else [""]

    def encode(self, values):
        """Output (n, 1) or (n, 2) of values (n,)."""
        missing = np.isnan(values)
        filled = np.where(missing, self.fill, values)
        return np.column_stack([filled, missing] if self.has_indicator else [filled])


class DatePlan(NamedTuple):
    """A column of dates: the time that days are counted from, and the plan of these days."""

    origin: np.datetime64
    format: str | None  # of strings; None: the column held dates
    days: NumberPlan
    kind: str = DATES

    @property
    def suffixes(self):
        """Ends of the output names, behind the name of the column."""
        return self.days.suffixes

    def encode(self, times):
        """Output (n, 1) or (n, 2) of times (n,)."""
        return self.days.encode(days_of(times - self.origin))


class LevelPlan(NamedTuple):
    """A column of strings or categories: its levels, the first of which is the reference."""

    levels: list[Any]  # as they are in the table
    shares: Floats  # (k,) of rows: levels, then "other" and "missing" if these are levels
    other: int = -1  # position of "other" among the k, -1 for none
    missing: int = -1
    n_frequent: int = 0  # levels with enough rows for a column
    share_merged: float = 0.0  # of rows: those of frequent levels that are merged
    kind: str = STRINGS

    @property
    def suffixes(self):
        """Ends of the output names, behind the name of the column."""
        labels = [str(level) for level in self.levels]
        labels += ["other"] * (self.other >= 0) + ["missing"] * (self.missing >= 0)
        return [f"_{label}" for label in labels[1:]]

    def encode(self, values):
        """Output (n, k - 1) of values (n,)."""
        codes, uniques = pd.factorize(values)  # a missing value has code -1
        # By hashes of objects: 1 equals 1.0, which pandas makes of integers beside missing values.
        positions = pd.Index(self.levels, dtype=object).get_indexer(uniques)
        positions = np.append(np.where(positions < 0, self.other, positions), -1)[codes]
        if_missing = self.missing if self.missing >= 0 else self.other
        positions = np.where(codes < 0, if_missing, positions)
        # Position -1, without a level: the average row, rather than one of the reference level.
        return np.vstack([np.eye(len(self.shares)), self.shares])[positions][:, 1:]


class PassPlan(NamedTuple):
    """A column that is handed on as it is."""

    suffixes: tuple[str, ...] = ("",)
    kind: str = PASSED


def read_column(column):
    """Kind of a narwhals series and its values (n,), or a name of its content and None.

    Numbers and booleans become floats with NaN for missing, durations days, dates times in UTC;
    strings and categories, objects.
    """
    dtype = column.dtype
    if dtype.is_numeric() or dtype == nw.Boolean:
        return NUMBERS, as_floats(column)
    if isinstance(dtype, nw.Duration):
        return NUMBERS, days_of(column.to_numpy())
    if isinstance(dtype, nw.Date | nw.Datetime):
        return DATES, times_of(column)
    if dtype in (nw.String, nw.Categorical, nw.Enum):
        return STRINGS, exact_values(column)
    if dtype not in (nw.Object, nw.Unknown):
        return type_name(column), None
    values = exact_values(column)
    content = pd.api.types.infer_dtype(values, skipna=True)
    kind = _OBJECTS.get(content, f"{content} values")
    if kind == NUMBERS:
        return kind, np.where(pd.isna(values), np.nan, values).astype(np.float64)
    if kind == DATES:
        return kind, times_of(column)
    return kind, values if kind == STRINGS else None


def type_name(column):
    """Name of a narwhals series' type in the words of its library."""
    native = column.to_native()
    return str(native.type if column.implementation.is_pyarrow() else native.dtype)


def exact_values(column):
    """Values (n,) of a narwhals series as objects, with exact integers."""
    # With a missing value, an array of the column would hold floats, which change integers beyond
    # 2**53.
    return np.fromiter(map(_as_python, column.to_list()), dtype=object, count=len(column))


def _as_python(value):
    """A NumPy scalar as a Python one, which compares exactly with other types."""
    return value.item() if isinstance(value, np.number | np.bool_) else value


def date_plan(times, format, origin, median, min_rows):
    """DatePlan of times (n,), or None if all are missing; without an origin from the first."""
    if np.isnat(times).all():
        return None
    origin = np.nanmin(times) if origin is None else origin
    days = days_of(times - origin)
    if median is not None:
        return DatePlan(origin, format, NumberPlan(median, True))
    return DatePlan(origin, format, number_plan(days, min_rows))


def number_plan(values, min_rows):
    """NumberPlan of values (n,), or None if all are missing."""
    missing = np.isnan(values)
    if missing.all():
        return None
    # With fewer rows the coefficient of an indicator cannot be estimated.
    return NumberPlan(float(np.median(values[~missing])), bool(missing.sum() >= min_rows))


def level_plan(values, categories, min_rows, max_levels):
    """LevelPlan of values (n,), or None if they make one level; `categories` may give an order."""
    missing = pd.isna(values)
    counts = pd.Series(values[~missing], dtype=object).value_counts()
    if categories is None:
        order = sorted(counts.index, key=_numbers_first)
    else:
        order = [category for category in categories if category in counts.index]
    rows = np.array([counts[level] for level in order], dtype=np.float64)
    by_size = np.argsort(-rows, kind="stable")
    frequent = by_size[rows[by_size] >= min_rows]
    common = np.sort(frequent[:max_levels])
    sizes, n_missing = list(rows[common]), int(missing.sum())
    n_other = len(values) - n_missing - sum(sizes)
    if n_missing < min_rows:  # too few for a level, so they count as "other"
        n_other, n_missing = n_other + n_missing, 0
    other_at = missing_at = -1
    if n_other >= min_rows:
        other_at, sizes = len(sizes), [*sizes, n_other]
    if n_missing:
        missing_at, sizes = len(sizes), [*sizes, n_missing]
    if len(sizes) < 2:
        return None
    shares = np.array(sizes) / sum(sizes)
    share_merged = rows[frequent[max_levels:]].sum() / len(values)
    return LevelPlan(
        [order[k] for k in common], shares, other_at, missing_at, len(frequent), share_merged
    )


def has_many_levels(values, max_levels):
    """Whether values (n,) have too many levels for indicators, and rows enough to group by them."""
    return suits_grouping(pd.Series(values, dtype=object).nunique(), len(values), max_levels)


def shares_levels(values, max_levels):
    """Whether there are many levels, and half of the rows (n,) share theirs with another row.

    Levels of a row or two say little each. Yet alike rows, such as births of one mother, are the
    best predictors of each other.
    """
    sizes = pd.Series(values, dtype=object).value_counts()
    many = has_many_levels(values, max_levels)
    return many or (len(sizes) > max_levels and 2 * sizes[sizes > 1].sum() >= len(values))


def plan_of_levels(levels):
    """LevelPlan of given levels; any other value is encoded as an equal mixture of them."""
    shares = np.full(len(levels), 1 / len(levels))
    return LevelPlan([_as_python(level) for level in levels], shares)


def _numbers_first(level):
    """Sorting key for levels of mixed types: numbers by value, then strings."""
    is_number = isinstance(level, int | float | np.number)
    return (not is_number, level if is_number else 0, str(level))


def join_columns(encoded, passed, names, library=None):
    """Narwhals frame of the named columns: encoded ones of a frame, and `passed` ones by name.

    It is one of `library`, "pandas" or "polars", if that is given.
    """
    columns = [passed[name].alias(name) if name in passed else encoded[name] for name in names]
    if library in (None, encoded.implementation.value):
        return encoded.select(columns)
    values = {name: encoded[name].to_numpy() for name in encoded.columns}
    for name, column in passed.items():
        cells = exact_values(column)
        cells[pd.isna(cells)] = None  # polars takes no NaN among strings
        values[name] = cells.tolist()
    return nw.from_dict({name: values[name] for name in names}, backend=library)


def distinct_names(names):
    """Names, with underscores appended to repeated ones."""
    taken, result = set(names), []
    for k, name in enumerate(names):
        if name in names[:k]:
            while name in taken:
                name += "_"
            taken.add(name)
        result.append(name)
    return result
