"""Columns of dates: which strings are dates, and the times of a column."""

import re
import warnings
from typing import Any

import numpy as np
import pandas as pd
from pandas.tseries.api import guess_datetime_format

# Years of two digits, which pandas does not guess; months go first, as in its own guesses.
_SHORT_YEARS = ("%m/%d/%y", "%d/%m/%y")
# Digits alone are codes, such as those of places; "2016 11" or "10:15" are no dates of their own.
_LOOKS_LIKE_A_DATE = re.compile(r"\d{1,4}[-/. ]\w{1,9}([-/. ]|$)|[A-Za-z]{3,9}\.? \d")
ISO = "ISO8601"


def date_format(values: Any) -> str | None:
    """Format, as pandas takes it, that all strings (n,) have as dates; None if they are none.

    Where a month could be a day, months go first if all values allow it.
    """
    levels = pd.Series(values, dtype=object).dropna().drop_duplicates()
    if not len(levels) or not all(isinstance(level, str) for level in levels):
        return None
    first = str(levels.iloc[0])  # pandas takes no string of NumPy's own
    if not _LOOKS_LIKE_A_DATE.match(first):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pandas warns of days before months
        guesses = [guess_datetime_format(first, dayfirst=days) for days in (False, True)]
        # A table may have times of day in some rows only, which ISO dates allow.
        for guess in (ISO, *guesses, *_SHORT_YEARS):
            if guess is None:
                continue
            found = pd.to_datetime(levels, format=guess, errors="coerce", utc=True)
            if found.notna().all():
                return guess
    return None


def times_of(column: Any, format: str | None = None) -> np.ndarray:
    """Times (n,) of a narwhals series of dates, or of strings in a format, in UTC.

    Missing values, and strings in another format, are NaT.
    """
    values = column.to_native()
    if not hasattr(values, "iloc"):
        values = pd.Series(column.to_numpy())
    if isinstance(values.dtype, pd.PeriodDtype):
        values = values.dt.to_timestamp()
    if isinstance(values.dtype, pd.CategoricalDtype):
        values = values.astype(object)
    times = pd.to_datetime(values, format=format, errors="coerce", utc=True)
    return times.dt.tz_localize(None).to_numpy("datetime64[us]")


def days_of(spans: Any) -> np.ndarray:
    """Days (n,) of durations, or of differences of times; missing ones are NaN."""
    return np.asarray(spans, dtype="timedelta64[us]") / np.timedelta64(1, "D")
