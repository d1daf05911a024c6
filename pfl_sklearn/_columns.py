"""Columns of tables that are no numbers: errors that name them and say what to do."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from numbers import Real
from typing import Any

import narwhals as nw
import numpy as np
import pandas as pd

from pfl_sklearn._compat import num_samples

_DATES = (nw.Date, nw.Datetime, nw.Duration, nw.Time)
# Names that pandas has for columns of Python objects of these kinds.
_DATE_OBJECTS = {"date", "datetime", "datetime64", "time", "timedelta", "timedelta64", "period"}
# What the errors say of a table that holds something else: scikit-learn's, numpy's and ours.
_OF_VALUES = (
    *("could not convert", "bytes/strings", "must hold floating", "setting an array element"),
    *("contains NaN", "contains infinity", "truth value of an array"),
)
# What they say of a data frame without columns: pandas', and scikit-learn's of a polars one.
_NO_COLUMNS = ("at least one array or dtype", "(shape=(0, 0))")
_OF_SHAPES = "setting an array element with a sequence"  # numpy's words for rows that differ
# What errors say that show values.
_SHOWN = ("could not convert", "Complex data")
# pandas' names for Python objects that are numbers, some of which may be missing.
NUMBER_KINDS = {"boolean", "integer", "floating", "decimal", "mixed-integer-float", "empty"}
_ENCODER = "make_pipeline(TableEncoder(), ...), from pfl_sklearn.compose"
OF_DATES = "holds dates or times, not numbers. Make numbers of them, such as days since a start"


def check_distinct(names: Sequence[str]) -> None:
    """Raise ValueError if columns share a name."""
    name, count = Counter(names).most_common(1)[0] if names else ("", 0)
    if count > 1:
        raise ValueError(f"{count} columns of X are called {name!r}; rename them.")


def check_one_per_row(name: str, values: Any) -> None:
    """Raise ValueError for a single number or string where rows have a number each."""
    if isinstance(values, str):
        raise ValueError(
            f"{name} must hold one number per row; got the string {values!r}. To name a column of "
            f"X: ClientColumn(..., {name}={values!r})."
        )
    if np.isscalar(values) or (isinstance(values, np.ndarray) and values.ndim == 0):
        number = np.asarray(values)
        raise ValueError(
            f"{name} must hold one number per row; got the number {number}. For rows that have the "
            f"same: np.full(n_rows, {number})."
        )


def check_exact(name: str, dtype: Any, levels: Iterable[Any]) -> None:
    """Raise ValueError if a column of floats was given levels that floats do not hold.

    One missing value makes floats of a pandas column of integers; beyond 2**53 all its codes would
    be other ones.
    """
    if not dtype.is_float():
        return
    bits = 24 if dtype == nw.Float32 else 53
    for level in levels:
        if isinstance(level, Real) and abs(level) >= 2**bits:
            raise ValueError(
                f"column {name!r} holds {dtype}, which does not tell apart whole numbers from "
                f"2**{bits} on, and levels has {level!r}; give the column as integers (of a type "
                "that takes missing values, such as pandas' Int64) or strings."
            )


def column_labels(X: Any) -> Any:
    """Labels of a data frame's columns, a list; None for other tables."""
    if not hasattr(X, "columns"):
        return None
    # `columns` of a pyarrow.Table are its values.
    return list(X.column_names if nw.dependencies.is_pyarrow_table(X) else X.columns)


def without_columns(X: Any) -> Any:
    """X, or an array (n, 0) for a table without columns, in which checks find no type."""
    return np.empty((len(X), 0)) if column_labels(X) == [] else X


def kind_of(column: Any) -> str | None:
    """pandas' name for what a narwhals series of Python objects holds; None for other series."""
    native = column.to_native()
    if not (hasattr(native, "iloc") and native.dtype.kind == "O"):
        return None
    return str(pd.api.types.infer_dtype(native, skipna=True))


def holds_dates(dtype: Any, kind: str | None = None) -> bool:
    """Whether a narwhals type, or pandas' name for objects, is one of dates, times or durations."""
    return isinstance(dtype, _DATES) or kind in _DATE_OBJECTS


def as_floats(column: Any) -> Any:
    """Numbers or booleans of a narwhals series in double precision (n,); missing ones are NaN."""
    native = column.to_native()
    if hasattr(native, "iloc"):  # narwhals keeps pandas' own missing values in columns of integers
        return native.to_numpy(dtype=np.float64, na_value=np.nan)
    if column.implementation.is_pyarrow():
        # Its cast refuses integers beyond 2**53, which all others round.
        native = native.cast("float64", safe=False)
        return native.to_numpy()
    return np.asarray(column.cast(nw.Float64).to_numpy(), dtype=np.float64)


@contextmanager
def numbers_needed(X: Any = None, private: bool = False) -> Iterator[None]:
    """Name the column of a table, if there is one, in which a check finds anything but numbers.

    Names and types are looked at before the check. Values are looked at only if it fails; where a
    fit is `private` the error tells their kind, and shows none of them.
    """
    if isinstance(X, Mapping):
        num_samples(X)  # raises, by name
    if hasattr(X, "iloc") and hasattr(X, "columns"):  # other frames have no name twice
        check_distinct([str(name) for name in X.columns])
    frame = nw.from_native(X, eager_only=True, pass_through=True)
    is_frame = isinstance(frame, nw.DataFrame)
    for name, kind in frame.schema.items() if is_frame else ():
        if holds_dates(kind):  # of which polars would make very large numbers
            raise ValueError(f"column {name!r} of X {OF_DATES}.")
    try:
        # scikit-learn sums all values first, and the sum of finite ones may overflow.
        with np.errstate(over="ignore", invalid="ignore"):
            yield
    except (TypeError, ValueError) as error:
        retold = _retold(error, frame if is_frame else X, is_frame, private)
        if retold is None:
            raise
        # A traceback would show the values of the error before.
        raise retold from None if private else error


def _retold(error, X, is_frame, private):
    """The error of a check, with the column's name or without values; None if it may stay."""
    if is_frame and not X.columns and any(words in str(error) for words in _NO_COLUMNS):
        return ValueError("X has no columns; expected at least one feature.")
    if not is_frame and _OF_SHAPES in str(error):
        of_x = "" if X is None else " of X"
        return ValueError(
            f"got rows{of_x} that differ in length or shape; expected an array (n_rows, ...). Pad "
            "them to one shape."
        )
    # An array of other objects is named by no column, and numpy's words say enough.
    of_objects = isinstance(error, TypeError) and is_frame
    if of_objects or any(words in str(error) for words in _OF_VALUES):
        for name, values in _columns_of(X):
            if reason := _reason(values, error, private):
                return ValueError(f"column {name!r} of X {reason}.")
    # It was in y, or in what is no table.
    shows_values = isinstance(error, TypeError) or any(words in str(error) for words in _SHOWN)
    if private and shows_values:
        return type(error)("got values that are no numbers; expected numbers.")
    return None


def _columns_of(X):
    """Names, or positions, and values (n,) of the columns of a narwhals frame or an array."""
    if isinstance(X, nw.DataFrame):
        for name in X.columns:
            yield name, X[name].to_numpy()
        return
    values = np.asarray(X)  # of a sparse matrix it has no axes
    # Of arrays of numbers scikit-learn's words say enough.
    if values.ndim == 2 and values.dtype.kind in "OUS":
        yield from enumerate(values.T)


def _reason(values, error, private):
    """What a column (n,) holds that is no number, and what to do about it; None if nothing."""
    cells = values if values.dtype == object or values.ndim > 1 else ()
    if any(np.ndim(cell) for cell in cells):
        return "holds lists or arrays, not numbers. Make a column of each of their elements"
    with suppress(ValueError, TypeError):
        numbers = np.asarray(values, dtype=np.float64)
        if "contains infinity" in str(error) and np.isinf(numbers).any():
            return "has infinite values; expected finite numbers"
        missing = np.isnan(numbers)
        if not missing.any() or "NaN" not in str(error):
            return None
        if missing.all():
            return "has no values, only missing ones (NaN). Leave it out"
        return f"has missing values (NaN). Fill and mark them: {_ENCODER}"
    kind = pd.api.types.infer_dtype(np.asarray(values, dtype=object), skipna=True)
    if kind in _DATE_OBJECTS:
        return OF_DATES
    why = "" if private else f": {str(error).rstrip('.')}"
    if kind.startswith("mixed"):  # which a TableEncoder does not take
        return f"holds values of several types{why}. Make all of them numbers, or all strings"
    kind = "words" if kind == "string" else kind
    return f"holds {kind}, not numbers{why}. Encode it: {_ENCODER}"
