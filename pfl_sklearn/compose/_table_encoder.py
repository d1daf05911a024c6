"""Encoding of strings, categories, dates, booleans and missing values for a linear model."""

import copy
from collections.abc import Mapping
from numbers import Number
from typing import Any, ClassVar, Self

import narwhals as nw
import numpy as np
import pandas as pd
from sklearn.base import TransformerMixin
from sklearn.utils import InputTags
from sklearn.utils.validation import check_is_fitted

from pfl_sklearn._clients import encode_clients, warn_of_client_ids
from pfl_sklearn._columns import (
    MAX_LEVELS,
    check_distinct,
    check_exact_levels,
    column_labels,
    validate_data,
)
from pfl_sklearn._compat import (
    BaseEstimator,
    StrOptions,
    check_feature_names_in,
    fit_context,
    output_library,
)
from pfl_sklearn._dates import ISO, date_format, times_of
from pfl_sklearn._fitted import FittedMixin, column_attributes
from pfl_sklearn._parameters import AT_LEAST_ONE, parameter, with_parameters
from pfl_sklearn._typing import TableLike
from pfl_sklearn._warnings import warn_caller
from pfl_sklearn.compose._table_columns import (
    DATES,
    NUMBERS,
    PASSED,
    STRINGS,
    DatePlan,
    LevelPlan,
    NumberPlan,
    PassPlan,
    date_plan,
    distinct_names,
    exact_values,
    has_many_levels,
    join_columns,
    level_plan,
    number_plan,
    plan_of_levels,
    read_column,
    type_name,
)
from pfl_sklearn.linear_model._grouping_columns import columns_of_clients

_ALL_MISSING = "all its values are missing"


@with_parameters
class TableEncoder(FittedMixin, TransformerMixin, BaseEstimator):
    """Encode strings, categories, dates, booleans and missing values as numbers.

    Put it before a linear model in a pipeline. Columns keep their names, so the model's `random`
    and ``summary()`` refer to the table's own columns.

    Parameters
    ----------
    min_rows : int, >= 1, default=10
        Rows that a level needs for a column of its own. Rarer levels are merged into "other", and
        missing values into "missing", if the merged level has at least that many rows.
    max_levels : int, >= 1, default=30
        Number of levels of a column that get a column of their own, the most frequent ones.
    many_levels : {"merge", "pass"}, default="merge"
        What to do with columns of strings or categories that have many levels. "merge" merges
        those beyond the `max_levels` most frequent ones into "other", with a warning. "pass" hands
        a column on as it is, for a model with `groupings`, if it has more than 10 levels (or than
        `max_levels`, if that is smaller) and at most half as many as rows.
    levels : dict of lists or None, default=None
        Levels of columns of strings by name, the reference first. They are used as given.
    medians : dict of floats or None, default=None
        Fills of missing values in columns of numbers, by name. These columns always have an
        indicator. If both `levels` and `medians` are given, nothing is learned from the rows.
        Those of dates are in days since their origin.
    dates : dict of str or datetime, or None, default=None
        Origins of columns of dates by name, such as ``{"day": "2020-01-01"}``. Columns of dates
        that are not named have the first date that ``fit`` sees.
    unsupported : {"error", "drop"}, default="error"
        What to do about columns that cannot be encoded, such as lists. "drop" leaves them out with
        a warning, unless both `levels` and `medians` are given.

    Attributes
    ----------
    dropped_ : dict
        Reasons why columns of `X` are left out, by name.
    n_features_in_, feature_names_in_ : int, and ndarray of str
        Number of columns of `X`, and their names, if it has any.

    Raises
    ------
    ValueError
        For mixed types, infinite values, two columns of one name, a column of strings that held
        numbers or dates in ``fit``, a column of floats whose given levels are integers beyond
        2**53, and, with both `levels` and `medians`, strings without levels, dates without an
        origin, ``unsupported="drop"`` and ``many_levels="pass"``.

    Notes
    -----
    - Numbers keep name and values. Missing values get the median; a column "age_missing" marks
      them if ``fit`` saw at least `min_rows` of them. Booleans become 0 and 1.
    - Dates become days since an origin, with fractions for times of day, in UTC where there are
      time zones; durations become days. Columns of strings are dates if all their values have one
      format that pandas knows, such as 2016-11-08 or 11/8/2016 (the month first if that is possible
      everywhere), unless `levels` names the column.
    - Strings and categories become an indicator column for each level but the first,
      "county_Kent". Levels are sorted; ordered categories keep their order.
    - A level that ``fit`` did not see counts as "other". Without that level it becomes the average
      row: each column gets the level's share in ``fit``, or one over the number of given levels.
    - Columns without values or with one level are left out with a warning, and so are ids, all of
      whose levels are rare. Repeated names get an underscore.
    - With client ids (`groups`), columns of strings or categories with one level for each client
      are left out as well: their indicators would take the place of the clients' effects. Numbers
      and dates stay, because they may describe clients, as an income does; leave ids out
      yourself.
    - A data frame gives a frame of the same library, an array gives an array, unless ``set_output``
      says otherwise. With a column that is passed on, the array holds objects.
    - A model behind ``many_levels="pass"`` needs the columns as `groupings`, as the personalized
      linear, logistic (two classes) and Poisson regressions do, which find those with more than 10
      levels in a data frame themselves (``groupings="auto"``). Other models refuse the strings.
    - With both `levels` and `medians`, which must not come from the data, a private model behind
      the encoder keeps its promise; see :func:`~pfl_sklearn.privacy.privacy_of`. Missing values
      without a given median stay missing. No row's encoding depends on another row: levels match
      exactly, also integers beyond 2**53, and a column of another type is refused. Strings count
      as dates where `dates` names them and they have an ISO format; others are missing.

    Examples
    --------
    >>> import pandas as pd
    >>> from pfl_sklearn.compose import TableEncoder
    >>> table = pd.DataFrame({"age": [40, None, 60], "town": ["Ely", "York", "Ely"]})
    >>> TableEncoder(min_rows=1).fit_transform(table)
        age  age_missing  town_York
    0  40.0          0.0        0.0
    1  50.0          1.0        1.0
    2  60.0          0.0        0.0
    """

    __metadata_request__fit: ClassVar[dict[str, bool]] = {"groups": True}

    min_rows: int = parameter(default=10, ranges=[AT_LEAST_ONE])
    max_levels: int = parameter(default=MAX_LEVELS, ranges=[AT_LEAST_ONE])
    many_levels: str = parameter(default="merge", ranges=[StrOptions({"merge", "pass"})])
    levels: dict[str, list[Any]] | None = parameter(default=None, ranges=[Mapping, None])
    medians: dict[str, float] | None = parameter(default=None, ranges=[Mapping, None])
    dates: dict[str, Any] | None = parameter(default=None, ranges=[Mapping, None])
    unsupported: str = parameter(default="error", ranges=[StrOptions({"error", "drop"})])

    _suits_passing = staticmethod(has_many_levels)  # stacks have another rule for trees

    @fit_context(prefer_skip_nested_validation=True)
    def fit(self, X: TableLike, y: Any = None, *, groups: TableLike = None) -> Self:
        """Learn the levels and medians that are not given.

        Parameters
        ----------
        X : dataframe or array-like of shape (n_rows, n_columns)
            The table.
        y : None
            Ignored.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row, to find columns with one level for each client. Ignored if both
            `levels` and `medians` are given.
        """
        if self._is_specified and self.unsupported == "drop":
            # Whether a column can be encoded may depend on one cell, and all rows would lose it.
            raise ValueError(
                "unsupported='drop' does not go with both levels and medians, because one row "
                "could remove a column for all; leave the column out of X, or set "
                "unsupported='error'."
            )
        if self._is_specified and self.many_levels == "pass":
            # Which columns pass depends on the levels in the rows.
            raise ValueError(
                "many_levels='pass' does not go with both levels and medians, with which nothing "
                "is learned from the rows; set many_levels='merge'."
            )
        frame, columns = self._read_for_fit(X)
        _check_specified(self.levels, self.medians, self.dates, frame.columns)
        plans = {name: self._plan(name, frame[name]) for name in frame.columns}
        if groups is not None and not self._is_specified:
            clients = encode_clients(groups, len(frame)).codes
            warn_of_client_ids(frame.to_native(), groups)
            for name in columns_of_clients(frame, clients):
                # Strings that are dates become numbers, and numbers may describe clients.
                if name not in (self.levels or {}) and not isinstance(plans[name], DatePlan):
                    plans[name] = "its levels are the clients"
        dropped = {name: reason for name, reason in plans.items() if isinstance(reason, str)}
        if dropped:
            listed = "; ".join(f"{name!r} ({reason})" for name, reason in dropped.items())
            warn_caller(f"TableEncoder leaves out columns of X: {listed}.", UserWarning)
        self._warn_of_merged(plans)
        attributes = {
            "_plans": {name: plan for name, plan in plans.items() if name not in dropped},
            "dropped_": dropped,
            "_columns": frame.columns,
            "_learned": not self._is_specified,
        }
        self._set_fitted({**columns, **attributes})
        return self

    def _plan(self, name, column):
        """Plan of a column, or the reason why it is left out."""
        levels, medians, dates = self.levels or {}, self.medians or {}, self.dates or {}
        if name in levels:
            check_exact_levels(name, column.dtype, levels[name])
            return plan_of_levels(levels[name])
        origin = _time(dates[name]) if name in dates else None
        if self._is_specified:  # values are not read, because an error would reveal one
            numbers = NumberPlan(float(medians.get(name, np.nan)), name in medians)
            if origin is not None:
                return DatePlan(origin, None, numbers)
            if not (column.dtype.is_numeric() or column.dtype == nw.Boolean):
                held = f"it holds {type_name(column)}"
                return self._refuse(name, f"{held}, and neither levels nor dates names it")
            return numbers
        kind, values = read_column(column)
        if values is None:
            return self._refuse(name, f"it holds {kind}")
        format = date_format(values) if kind == STRINGS else None
        if format is not None:
            kind, values = DATES, times_of(column, format)
        if kind == DATES:
            median = float(medians[name]) if name in medians else None
            return date_plan(values, format, origin, median, self.min_rows) or _ALL_MISSING
        if origin is not None:
            return self._refuse(name, f"dates names it, and it holds {kind} of no format of dates")
        if kind == STRINGS:
            if self.many_levels == "pass" and self._suits_passing(values, self.max_levels):
                return PassPlan()
            categories = list(column.dtype.categories) if column.dtype == nw.Enum else None
            plan = level_plan(values, categories, self.min_rows, self.max_levels)
            few = f"no two levels have min_rows={self.min_rows} rows"
            return plan or (_ALL_MISSING if pd.isna(values).all() else few)
        if np.isinf(values).any():
            return self._refuse(name, "it has infinite values")
        if name in medians:
            return NumberPlan(float(medians[name]), True)
        return number_plan(values, self.min_rows) or _ALL_MISSING

    def _warn_of_merged(self, plans):
        """Warn of columns, by their plans, whose frequent levels are merged."""
        merged = {
            name: plan
            for name, plan in plans.items()
            if isinstance(plan, LevelPlan) and plan.share_merged > 0
        }
        if not merged:
            return
        listed = "; ".join(
            f"{name!r} ({plan.n_frequent} levels; {100 * plan.share_merged:.1f} % of the rows are "
            "merged)"
            for name, plan in merged.items()
        )
        advice = "raise max_levels, or set many_levels='pass' in front of a model with groupings"
        if self.many_levels == "pass":
            advice = "they have too many levels for their rows to be passed on; raise max_levels"
        warn_caller(
            f"TableEncoder merges levels into 'other', because columns of X have more "
            f"than max_levels={self.max_levels} levels of at least min_rows={self.min_rows} rows: "
            f"{listed}; {advice}.",
            UserWarning,
        )

    def _refuse(self, name, reason):
        """The reason to leave out a column; ValueError if such columns are errors."""
        if self.unsupported == "drop":
            return reason
        way_out = "leave it out"
        if not self._is_specified:
            way_out = "leave it out, or set unsupported='drop'"
        raise ValueError(
            f"column {name!r} of X cannot be encoded: {reason}; expected finite numbers, booleans, "
            "strings, categories or dates. Make numbers of it, make all its values strings, "
            f"{way_out}."
        )

    def transform(self, X: TableLike) -> Any:
        """Encode the columns of a table.

        Parameters
        ----------
        X : dataframe or array-like of shape (n_rows, n_columns)
            A table with the columns of ``fit``.

        Returns
        -------
        dataframe or ndarray of shape (n_rows, n_columns_out)
            Floats, and columns that are passed on as they are.
        """
        check_is_fitted(self)
        frame = self._read_table(X, reset=False)
        # As in fit; for an array after a frame, scikit-learn has warned.
        frame = frame.rename(dict(zip(frame.columns, self._columns, strict=True)))
        parts = [
            plan.encode(self._values(frame[name], plan))
            for name, plan in self._plans.items()
            if plan.kind != PASSED
        ]
        values = np.hstack([np.empty((len(frame), 0)), *parts])
        names = list(self.get_feature_names_out())
        sources = [(name, plan) for name, plan in self._plans.items() for _ in plan.suffixes]
        passed = {
            out: frame[name]
            for out, (name, plan) in zip(names, sources, strict=True)
            if plan.kind == PASSED
        }
        is_array = not hasattr(X, "columns")
        if is_array and not passed:
            return values
        encoded = _frame_like(frame, values, [name for name in names if name not in passed])
        if not passed:
            return encoded.to_native()
        library = output_library(self)  # which would make objects of numbers beside strings
        output = join_columns(encoded, passed, names, library).to_native()
        return output.to_numpy(dtype=object) if is_array and library is None else output

    def _values(self, column, plan):
        """Values (n,) of a column as its plan takes them."""
        name = column.name
        if plan.kind == STRINGS:
            check_exact_levels(name, column.dtype, plan.levels)
            if not self._learned:
                return exact_values(column)
        kind, values = read_column(column)
        if plan.kind == DATES and kind == STRINGS:
            return self._times_of_strings(column, values, plan)
        if plan.kind == DATES and kind == NUMBERS and np.isnan(values).all():
            return np.full(len(values), "NaT", dtype="datetime64[us]")
        if values is None or (kind == DATES) != (plan.kind == DATES):
            raise ValueError(f"column {name!r} of X holds {kind}; fit saw {plan.kind}.")
        if plan.kind == DATES:
            return values
        if plan.kind == NUMBERS:
            if kind == STRINGS:
                if not pd.isna(values).all():
                    raise ValueError(f"column {name!r} of X holds strings; fit saw numbers.")
                values = np.full(len(values), np.nan)  # missing values alone have no type
            if self._learned and np.isinf(values).any():
                raise ValueError(f"column {name!r} of X has infinite values; expected finite ones.")
            return values
        values = exact_values(column)
        present = pd.unique(values[~pd.isna(values)])
        # Levels of another type would all be unseen, silently.
        are_strings, were_strings = (
            {isinstance(level, str) for level in levels} for levels in (present, plan.levels)
        )
        if are_strings and were_strings and not are_strings & were_strings:
            raise ValueError(
                f"column {name!r} of X holds {kind} such as {present[0]!r}; fit saw levels such as "
                f"{plan.levels[0]!r}. Give them in the same type."
            )
        return values

    def _times_of_strings(self, column, values, plan):
        """Times (n,) of strings (n,) in a column that held dates in ``fit``."""
        times = times_of(column, plan.format or ISO)
        other = np.flatnonzero(np.isnat(times) & ~pd.isna(values))
        if self._learned and len(other):
            seen = "dates" if plan.format is None else f"strings of the format {plan.format}"
            raise ValueError(
                f"column {column.name!r} of X holds {values[other[0]]!r}, which is no date; fit "
                f"saw {seen}."
            )
        return times

    def get_feature_names_out(self, input_features: TableLike = None) -> np.ndarray:
        """Names of the columns of the output.

        Parameters
        ----------
        input_features : array-like of str, default=None
            Names of the columns of `X`; None: those of ``fit``, or x0, x1, ...

        Returns
        -------
        ndarray of str
        """
        check_is_fitted(self)
        names = self._columns
        if input_features is not None:
            names = check_feature_names_in(self, input_features)
        names_by_column = dict(zip(self._columns, names, strict=True))
        outputs = [
            names_by_column[name] + end
            for name, plan in self._plans.items()
            for end in plan.suffixes
        ]
        return np.array(distinct_names(outputs), dtype=object)

    @property
    def _passed_names(self):
        """Names of the columns of the output that are passed on as they are."""
        ends = [plan.kind == PASSED for plan in self._plans.values() for _ in plan.suffixes]
        return [
            name
            for name, is_passed in zip(self.get_feature_names_out(), ends, strict=True)
            if is_passed
        ]

    @property
    def _is_specified(self):
        """Whether both `levels` and `medians` are given, so that ``fit`` learns nothing."""
        return self.levels is not None and self.medians is not None

    @property
    def _learns_nothing(self):
        """Whether neither this fit nor the last one learns from rows."""
        return self._is_specified and not getattr(self, "_learned", False)

    def _read_for_fit(self, X):
        """Table as a narwhals frame, and fitted attributes of its columns."""
        probe = copy.copy(self)  # validation writes to the estimator, and a fit may still fail
        frame = probe._read_table(X, reset=True)
        if not len(frame):
            raise ValueError("X has 0 rows; TableEncoder requires at least one.")
        return frame, column_attributes(probe)

    def _read_table(self, X, reset):
        """Table as a narwhals frame, with strings as names."""
        if hasattr(X, "columns"):
            names = [str(label) for label in column_labels(X)]
            check_distinct(names)
            validate_data(self, X, reset=reset, skip_check_array=True)
            if hasattr(X, "iloc"):
                X = X.set_axis(names, axis=1)
        else:
            X = validate_data(self, X, reset=reset, dtype=None, ensure_all_finite=False)
            _check_strings(X, self.levels)
            X = pd.DataFrame(X, columns=[f"x{k}" for k in range(X.shape[1])])
        return nw.from_native(X, eager_only=True)

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags = InputTags(string=True, categorical=True, allow_nan=True)
        tags.transformer_tags.preserves_dtype = []
        return tags


def _frame_like(frame, values, names):
    """Values (n, k) as a narwhals frame with the library and the index of another."""
    native = frame.to_native()
    if hasattr(native, "iloc"):
        values = pd.DataFrame(values, index=native.index, columns=names)
        return nw.from_native(values, eager_only=True)
    return nw.from_numpy(values, schema=names, backend=frame.implementation)


def _check_strings(X, levels):
    """Raise ValueError for an array of strings if some levels are not strings."""
    # A single string turns all cells of an array into strings, which would match no level.
    others = [
        name
        for name, values in (levels or {}).items()
        if not all(isinstance(value, str) for value in values)
    ]
    if X.dtype.kind in "US" and others:
        raise ValueError(
            f"X is an array of strings, but levels of {others[0]!r} are not all strings; give a "
            "data frame, or an array of objects."
        )


def _time(origin):
    """A date as numpy's, in UTC, NaT if it is none."""
    time = pd.to_datetime(origin, errors="coerce", utc=True)
    return np.datetime64(time.tz_localize(None) if isinstance(time, pd.Timestamp) else "NaT", "us")


def _check_specified(levels, medians, dates, columns):
    """Raise ValueError for `levels`, `medians` or `dates` that are invalid or fit no column."""
    levels, medians, dates = levels or {}, medians or {}, dates or {}
    for parameter_name, names in (("levels", levels), ("medians", medians), ("dates", dates)):
        for name in names:
            if name not in columns:
                raise ValueError(
                    f"{parameter_name} has {name!r}, which is no column of X: {columns[:20]}."
                )
    for name, median in medians.items():
        if not np.isfinite(median):
            raise ValueError(f"medians has {median!r} for {name!r}; expected a finite number.")
    for name, origin in dates.items():
        if isinstance(origin, Number) or np.isnat(_time(origin)):
            raise ValueError(f"dates has {origin!r} for {name!r}; expected a date.")
    for name, values in levels.items():
        are_distinct = not isinstance(values, str) and len(set(values)) == len(values) > 1
        if not are_distinct or any(pd.isna(value) for value in values):
            raise ValueError(
                f"levels of {name!r} must be two or more that differ, none of them missing; got "
                f"{values!r}."
            )
        for parameter_name, names in (("medians", medians), ("dates", dates)):
            if name in names:
                raise ValueError(
                    f"column {name!r} is in levels and in {parameter_name}; give one of them."
                )
