"""Checks of the columns of tables, whose errors name them and say what to do.

A column holds numbers, whose squares are neither infinite nor lost among the smallest ones.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from numbers import Real
from typing import Any

import narwhals as nw
import numpy as np
import pandas as pd
from sklearn.utils import validation

from pfl_sklearn._compat import num_samples

_DATES = (nw.Date, nw.Datetime, nw.Duration, nw.Time)
# Names that pandas has for columns of Python objects of these kinds.
_DATE_OBJECTS = {"date", "datetime", "datetime64", "time", "timedelta", "timedelta64", "period"}
# What the errors say of a table that holds something else: scikit-learn's, numpy's and ours.
_ERRORS_OF_VALUES = (
    *("could not convert", "bytes/strings", "must hold floating", "setting an array element"),
    *("contains NaN", "contains infinity", "truth value of an array"),
)
# What they say of a data frame without columns: pandas', and scikit-learn's of a polars one.
_ERRORS_WITHOUT_COLUMNS = ("at least one array or dtype", "(shape=(0, 0))")
_ERROR_OF_SHAPES = "setting an array element with a sequence"  # numpy's, of rows that differ
_ERROR_OF_ORDER = "in the same order as they were in fit"  # scikit-learn's, of names
# What errors say that show values.
_ERRORS_WITH_VALUES = ("could not convert", "Complex data")
# pandas' names for Python objects that are numbers, some of which may be missing.
NUMBER_KINDS = {"boolean", "integer", "floating", "decimal", "mixed-integer-float", "empty"}
_ENCODER = "make_pipeline(TableEncoder(), ...), from pfl_sklearn.compose"
OF_DATES = (
    "holds dates or times, not numbers. Make numbers of them, such as days since a start, as a "
    "TableEncoder from pfl_sklearn.compose does"
)
MAX_LEVELS = 30  # of a column that indicators encode
# Levels of a column that models with groupings encode by indicators. Measured on ten development
# tables: from 12 levels on a variance between them did as well or better, below 9 neither did.
_FEW_LEVELS = 10
LARGEST_EXACT = 2**53  # floats beyond it do not tell whole numbers apart
LARGEST, SMALLEST = 1e150, 1e-140  # whose squares, and sums of them, keep all digits
_SMALLEST_FOR_FOURTH_POWERS = 1e-60  # products of two variances are fourth powers
_ROWS_PER_BLOCK = 64  # where we look for the bounds of columns


def check_distinct(names: Sequence[str]) -> None:
    """Raise ValueError if columns share a name."""
    name, count = Counter(names).most_common(1)[0] if names else ("", 0)
    if count > 1:
        raise ValueError(f"{count} columns of X are called {name!r}; rename them.")


def validate_data(estimator: Any, X: Any, *, reset: bool, **params: Any) -> Any:
    """scikit-learn's check of X, which also says how to bring columns into the order of fit."""
    try:
        return validation.validate_data(estimator, X, reset=reset, **params)
    except ValueError as error:
        if _ERROR_OF_ORDER not in str(error):
            raise
        # Only pandas has no `select`, and pyarrow takes no list of names in brackets.
        names = "model.feature_names_in_"
        reordered = f"X[{names}]" if hasattr(X, "iloc") else f"X.select({names})"
        raise ValueError(f"{error}Give {reordered}, whose columns are in that order.") from None


def suits_grouping(n_levels: int, n_rows: int, max_levels: int = MAX_LEVELS) -> bool:
    """Whether levels are too many for indicators, but few enough to have two rows on average.

    Such a column of strings or categories is a grouping of models with `groupings`, and trees get
    it as a category or as target means (``suits_category``). Others are encoded by indicators.
    """
    return min(max_levels, _FEW_LEVELS) < n_levels <= n_rows / 2


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


def check_exact_levels(name: str, dtype: Any, levels: Iterable[Any]) -> None:
    """Raise ValueError if a column of floats was given levels that floats do not hold."""
    # A missing value turns a pandas column of integers into floats, which round codes beyond 2**53.
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


def replace_empty_frame(X: Any) -> Any:
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
def name_bad_columns(X: Any = None, private: bool = False) -> Iterator[None]:
    """Name the column of a table, if any, in which a check finds anything but numbers."""
    # Names and types are checked first, values only after a failure. In a `private` fit the error
    # names the kind of the values and shows none of them.
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
        retold = _error_of_column(error, frame if is_frame else X, is_frame, private)
        if retold is None:
            raise
        # A traceback would show the values of the error before.
        raise retold from None if private else error


def _error_of_column(error, X, is_frame, private):
    """The error of a check, with the column's name or without values; None if it may stay."""
    if is_frame and not X.columns and any(text in str(error) for text in _ERRORS_WITHOUT_COLUMNS):
        return ValueError("X has no columns; expected at least one feature.")
    if not is_frame and _ERROR_OF_SHAPES in str(error):
        of_x = "" if X is None else " of X"
        return ValueError(
            f"got rows{of_x} that differ in length or shape; expected an array (n_rows, ...). Pad "
            "them to one shape."
        )
    # An array of other objects is named by no column, and numpy's own message says enough.
    of_objects = isinstance(error, TypeError) and is_frame
    if of_objects or any(text in str(error) for text in _ERRORS_OF_VALUES):
        for name, values in _iter_columns(X):
            if reason := _describe_values(values, error, private):
                return ValueError(f"column {name!r} of X {reason}.")
    # It was in y, or in what is no table.
    shows_values = isinstance(error, TypeError) or any(
        phrase in str(error) for phrase in _ERRORS_WITH_VALUES
    )
    if private and shows_values:
        return type(error)("got values that are no numbers; expected numbers.")
    return None


def _iter_columns(X):
    """Names, or positions, and values (n,) of the columns of a narwhals frame or an array."""
    if isinstance(X, nw.DataFrame):
        for name in X.columns:
            yield name, X[name].to_numpy()
        return
    values = np.asarray(X)  # of a sparse matrix it has no axes
    # Of arrays of numbers scikit-learn's own messages say enough.
    if values.ndim == 2 and values.dtype.kind in "OUS":
        yield from enumerate(values.T)


def _describe_values(values, error, private):
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
    kind = "strings" if kind == "string" else kind
    return f"holds {kind}, not numbers{why}. Encode it: {_ENCODER}"


def check_float_range(name, values, heaviest=1.0, smallest=SMALLEST):
    """Largest absolute values, () or (p,), of values (n,) or (n, p) that can be squared and summed.

    Otherwise ValueError; zeros pass. `heaviest` is the largest weight of a square, at least 1. A
    fit with privacy must not call this: the error would reveal a client's values.
    """
    low, high = column_bounds(values)
    return check_bounds(name, low, high, heaviest, smallest)


def check_bounds(name, low, high, heaviest=1.0, smallest=SMALLEST):
    """The same for the smallest and largest value, each of shape () or (p,)."""
    sizes = np.maximum(np.maximum(high, -low), 0.0)
    if (sizes > LARGEST / np.sqrt(heaviest)).any():
        raise ValueError(
            f"{name} holds values too large to be squared (above about 1e150); rescale it."
        )
    if ((sizes > 0) & (sizes < smallest)).any():
        raise ValueError(
            f"{name} holds values too small to be squared (below about 1e-140); rescale it."
        )
    return sizes


def column_bounds(values):
    """Smallest and largest of values (n,), or of every column of (n, p); 0 without rows."""
    # Blocks of rows lie side by side, as NumPy goes through the rows of a narrow table one by one.
    if not len(values):
        return (np.zeros(values.shape[1:]),) * 2
    whole = len(values) // _ROWS_PER_BLOCK * _ROWS_PER_BLOCK
    rest, width = values[whole:], values[:1].size
    blocks = values[:whole].reshape(whole // _ROWS_PER_BLOCK, _ROWS_PER_BLOCK * width)
    bounds = []
    for bound in (np.min, np.max):
        parts = [bound(rest, axis=0)] if len(rest) else []
        if whole:
            parts.append(
                bound(bound(blocks, axis=0).reshape(_ROWS_PER_BLOCK, *values.shape[1:]), axis=0)
            )
        bounds.append(bound(parts, axis=0))
    return tuple(bounds)


def unit_near(size):
    """Power of two that brings numbers of this size near 1; 1 if their fourth powers are fine."""
    if size == 0 or _SMALLEST_FOR_FOURTH_POWERS < size < 1 / _SMALLEST_FOR_FOURTH_POWERS:
        return 1.0
    return 2.0 ** np.frexp(size)[1]
