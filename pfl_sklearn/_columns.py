"""Columns of tables that are no numbers: errors that name them and say what to do."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from numbers import Real
from typing import Any

import narwhals as nw
import numpy as np
import pandas as pd

_DATES = (nw.Date, nw.Datetime, nw.Duration, nw.Time)
# Names that pandas has for columns of Python objects of these kinds.
_DATE_OBJECTS = {"date", "datetime", "datetime64", "time", "timedelta", "timedelta64", "period"}
# What the errors say of a table that holds something else: scikit-learn's, numpy's and ours.
_OF_VALUES = ("could not convert", "bytes/strings", "must hold floating", "contains NaN")
_OF_SHAPES = "setting an array element with a sequence"  # numpy's words for rows that differ
# What errors say that show values.
_SHOWN = ("could not convert", "Complex data")
_ENCODER = "make_pipeline(TableEncoder(), ...), from pfl_sklearn.compose"
_OF_DATES = "holds dates or times, not numbers. Make numbers of them, such as days since a start"


def check_distinct(names: Sequence[str]) -> None:
    """Raise ValueError if columns share a name."""
    name, count = Counter(names).most_common(1)[0] if names else ("", 0)
    if count > 1:
        raise ValueError(f"{count} columns of X are called {name!r}; rename them.")


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


@contextmanager
def numbers_needed(X: Any = None, private: bool = False) -> Iterator[None]:
    """Name the column of a table, if there is one, in which a check finds anything but numbers.

    Names and types are looked at before the check. Values are looked at only if it fails; where a
    fit is `private` the error tells their kind, and shows none of them.
    """
    if hasattr(X, "iloc") and hasattr(X, "columns"):  # other frames have no name twice
        check_distinct([str(name) for name in X.columns])
    frame = nw.from_native(X, eager_only=True, pass_through=True)
    is_frame = isinstance(frame, nw.DataFrame)
    for name, kind in frame.schema.items() if is_frame else ():
        if isinstance(kind, _DATES):  # of which polars would make very large numbers
            raise ValueError(f"column {name!r} of X {_OF_DATES}.")
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
    if _OF_SHAPES in str(error):
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
    with suppress(ValueError, TypeError):
        gaps = np.isnan(np.asarray(values, dtype=np.float64))
        if not gaps.any() or "NaN" not in str(error):
            return None
        if gaps.all():
            return "has no values, only missing ones (NaN). Leave it out"
        return f"has missing values (NaN). Fill and mark them: {_ENCODER}"
    kind = pd.api.types.infer_dtype(np.asarray(values, dtype=object), skipna=True)
    if kind in _DATE_OBJECTS:
        return _OF_DATES
    why = "" if private else f": {str(error).rstrip('.')}"
    if kind.startswith("mixed"):  # which a TableEncoder does not take
        return f"holds values of several types{why}. Make all of them numbers, or all strings"
    kind = "words" if kind == "string" else kind
    return f"holds {kind}, not numbers{why}. Encode it: {_ENCODER}"
