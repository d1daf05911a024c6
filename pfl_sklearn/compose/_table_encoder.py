"""Columns of a table as a linear model takes them: words, gaps and truth values as numbers."""

import copy
from collections.abc import Mapping
from typing import Any, Self

import narwhals as nw
import numpy as np
import pandas as pd
from sklearn.base import TransformerMixin
from sklearn.utils import InputTags
from sklearn.utils.validation import check_is_fitted, validate_data

from pfl_sklearn._columns import check_distinct, check_exact, column_labels
from pfl_sklearn._compat import BaseEstimator, StrOptions, check_feature_names_in, fit_context
from pfl_sklearn._fitted import FittedMixin, columns_seen
from pfl_sklearn._parameters import AT_LEAST_ONE, parameter, with_parameters
from pfl_sklearn._typing import TableLike
from pfl_sklearn._warnings import warn_caller
from pfl_sklearn.compose._table_columns import (
    NUMBERS,
    WORDS,
    NumberPlan,
    distinct,
    exact_values,
    given_plan,
    number_plan,
    read_column,
    word_plan,
)

_ALL_MISSING = "all its values are missing"


@with_parameters
class TableEncoder(FittedMixin, TransformerMixin, BaseEstimator):
    """Transformer of a table of words, categories, truth values and gaps into numbers.

    It goes before a linear model in a pipeline. The names of columns stay, so that the model's
    `random` and its ``summary()`` speak of the table's own columns.

    Parameters
    ----------
    min_rows : int, >= 1, default=10
        Rows that a level of a column of words needs for a column of its own. Rarer levels are one
        together, "other", if they have that many rows, and so are gaps, "missing".
    max_levels : int, >= 1, default=30
        Most levels of a column of words with a column of their own, the most frequent ones.
    levels : dict of lists or None, default=None
        Levels of columns of words by name, the reference first. They are taken as they are.
    medians : dict of floats or None, default=None
        What fills the gaps of columns of numbers, by name. These columns always have an
        indicator. With both `levels` and `medians` given, nothing is learned from the rows.
    unsupported : {"error", "drop"}, default="error"
        What to do about columns that cannot be encoded, such as dates. "drop" leaves them out, with
        a warning; not with both `levels` and `medians`.

    Attributes
    ----------
    dropped_ : dict
        Why columns of `X` are left out, by name.
    n_features_in_ : int
        Number of columns of `X`.
    feature_names_in_ : ndarray of shape (`n_features_in_`,)
        Names of the columns of `X`, if it has any.

    Raises
    ------
    ValueError
        For dates and mixed types, infinite values, two columns of one name, a column that holds
        words after numbers in ``fit``, a column of floats whose given levels are integers beyond
        2**53, and, with both `levels` and `medians`, words without levels and
        ``unsupported="drop"``.

    Notes
    -----
    - Numbers keep name and values. Gaps get the median; a column "age_missing" marks them if
      ``fit`` saw at least `min_rows`. Truth values are 0 and 1.
    - Words and categories have a column of zeros and ones for each level but the first,
      "county_Kent". Levels are sorted; ordered categories keep their order.
    - A level that ``fit`` did not see counts as "other". Without such a column it is the average
      row: each column has the level's share in ``fit``, or one over the number of given levels.
    - Columns without values, and those of words with one level, are left out with a warning. So
      are ids, whose levels are all rare.
    - Names that come twice get an underscore.

    A data frame is returned as a frame of the same library, an array as an array, unless
    ``set_output`` says otherwise.

    With both `levels` and `medians` a private model behind the encoder keeps its promise; see
    :func:`~pfl_sklearn.privacy.privacy_of`. They must not come from the data. Gaps without a given
    median stay, for the model to refuse. No row is encoded by what another one holds: levels are
    matched exactly, also integers beyond 2**53, and a column of another type is refused.

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

    min_rows: int = parameter(default=10, ranges=[AT_LEAST_ONE])
    max_levels: int = parameter(default=30, ranges=[AT_LEAST_ONE])
    levels: dict[str, list[Any]] | None = parameter(default=None, ranges=[Mapping, None])
    medians: dict[str, float] | None = parameter(default=None, ranges=[Mapping, None])
    unsupported: str = parameter(default="error", ranges=[StrOptions({"error", "drop"})])

    @fit_context(prefer_skip_nested_validation=True)
    def fit(self, X: TableLike, y: Any = None) -> Self:
        """Learn levels and medians of the columns, as far as they are not given.

        Parameters
        ----------
        X : dataframe or array-like of shape (n_rows, n_columns)
            The table.
        y : None
            Ignored.

        Returns
        -------
        self
        """
        if self._is_told and self.unsupported == "drop":
            # Whether a column can be encoded may hang on one cell, and everybody would lose it.
            raise ValueError(
                "unsupported='drop' does not go with both levels and medians, as one row could "
                "take a column away from all; leave the column out of X, or set "
                "unsupported='error'."
            )
        probe = copy.copy(self)  # validation records the columns in the encoder that it is given
        frame = probe._frame(X, reset=True)
        _check_given(self.levels, self.medians, frame.columns)
        found = {name: self._plan(name, frame[name]) for name in frame.columns}
        dropped = {name: why for name, why in found.items() if isinstance(why, str)}
        if dropped:
            said = "; ".join(f"{name!r} ({why})" for name, why in dropped.items())
            warn_caller(f"{type(self).__name__} leaves out columns of X: {said}.", UserWarning)
        attributes = {
            "_plans": {name: plan for name, plan in found.items() if name not in dropped},
            "dropped_": dropped,
            "_columns": frame.columns,
            "_learned": not self._is_told,
        }
        self._set_fitted({**columns_seen(probe), **attributes})
        return self

    def _plan(self, name, column):
        """What becomes of a column, or why it is left out."""
        levels, medians = self.levels or {}, self.medians or {}
        if name in levels:
            check_exact(name, column.dtype, levels[name])
            return given_plan(levels[name])
        if self._is_told:  # no look at a value, whose errors would tell of it
            if not (column.dtype.is_numeric() or column.dtype == nw.Boolean):
                why = f"it holds {column.dtype}, and levels has none for it"
                return self._refused(name, why)
            return NumberPlan(float(medians.get(name, np.nan)), name in medians)
        kind, values = read_column(column)
        if values is None:
            return self._refused(name, f"it holds {kind}")
        if kind == WORDS:
            categories = list(column.dtype.categories) if column.dtype == nw.Enum else None
            plan = word_plan(values, categories, self.min_rows, self.max_levels)
            few = f"no two levels have min_rows={self.min_rows} rows"
            return plan or (_ALL_MISSING if pd.isna(values).all() else few)
        if np.isinf(values).any():
            return self._refused(name, "it has infinite values")
        if name in medians:
            return NumberPlan(float(medians[name]), True)
        return number_plan(values, self.min_rows) or _ALL_MISSING

    def _refused(self, name, why):
        """The reason to leave out a column; ValueError if such columns are errors."""
        if self.unsupported == "drop":
            return why
        way_out = "leave it out" if self._is_told else "leave it out, or set unsupported='drop'"
        raise ValueError(
            f"column {name!r} of X cannot be encoded: {why}; expected finite numbers, truth "
            "values, words or categories. Make numbers of it (of dates such as days since a "
            f"start), make all its values strings, {way_out}."
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
        """
        check_is_fitted(self)
        frame = self._frame(X, reset=False)
        parts = [
            plan.numbers(self._values(frame[name], plan)) for name, plan in self._plans.items()
        ]
        values = np.hstack([np.empty((len(frame), 0)), *parts])
        names = list(self.get_feature_names_out())
        if not hasattr(X, "columns"):
            return values
        if hasattr(X, "iloc"):
            return pd.DataFrame(values, index=X.index, columns=names)
        return nw.from_numpy(values, schema=names, backend=frame.implementation).to_native()

    def _values(self, column, plan):
        """Values (n,) of a column as its plan takes them."""
        if plan.kind == WORDS:
            check_exact(column.name, column.dtype, plan.levels)
        if plan.kind == WORDS and not self._learned:
            return exact_values(column)
        kind, values = read_column(column)
        name = column.name
        if values is None:
            raise ValueError(f"column {name!r} of X holds {kind}; fit saw {plan.kind}.")
        if plan.kind == NUMBERS:
            if kind == WORDS:
                if not pd.isna(values).all():
                    raise ValueError(f"column {name!r} of X holds words; fit saw numbers.")
                values = np.full(len(values), np.nan)  # gaps alone have no type of their own
            if self._learned and np.isinf(values).any():
                raise ValueError(f"column {name!r} of X has infinite values; expected finite ones.")
            return values
        values = exact_values(column)
        known = pd.unique(values[~pd.isna(values)])
        # Levels of another type would all be unseen, silently.
        types, seen = ({isinstance(each, str) for each in of} for of in (known, plan.levels))
        if types and seen and not types & seen:
            raise ValueError(
                f"column {name!r} of X holds {kind} such as {known[0]!r}; fit saw levels such as "
                f"{plan.levels[0]!r}. Give them in the same type."
            )
        return values

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
        of = dict(zip(self._columns, names, strict=True))
        made = [of[name] + end for name, plan in self._plans.items() for end in plan.suffixes]
        return np.array(distinct(made), dtype=object)

    @property
    def _is_told(self):
        """Whether all that ``fit`` may learn is given."""
        return self.levels is not None and self.medians is not None

    @property
    def _learns_nothing(self):
        """Whether neither this fit nor the last one learns from rows."""
        return self._is_told and not getattr(self, "_learned", False)

    def _frame(self, X, reset):
        """Table as a narwhals frame, with the names of ``fit`` as strings."""
        if hasattr(X, "columns"):
            names = [str(label) for label in column_labels(X)]
            check_distinct(names)
            validate_data(self, X, reset=reset, skip_check_array=True)
            if hasattr(X, "iloc"):
                X = X.set_axis(names, axis=1)
        else:
            X = validate_data(self, X, reset=reset, dtype=None, ensure_all_finite=False)
            _check_strings(X, self.levels)
            names = [f"x{k}" for k in range(X.shape[1])]
            X = pd.DataFrame(X, columns=names)
        frame = nw.from_native(X, eager_only=True)
        if reset and not len(frame):
            raise ValueError(f"X has 0 rows; {type(self).__name__} requires at least one.")
        # An array after a frame, or the other way round: scikit-learn has warned of it.
        return frame if reset else frame.rename(dict(zip(names, self._columns, strict=True)))

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags = InputTags(string=True, categorical=True, allow_nan=True)
        tags.transformer_tags.preserves_dtype = []
        return tags


def _check_strings(X, levels):
    """Raise ValueError for an array of strings where levels are others.

    One string makes strings of all cells of an array, which would be no levels any more.
    """
    others = [n for n, of in (levels or {}).items() if not all(isinstance(v, str) for v in of)]
    if X.dtype.kind in "US" and others:
        raise ValueError(
            f"X is an array of strings, but levels of {others[0]!r} are not all strings; give a "
            "data frame, or an array of objects."
        )


def _check_given(levels, medians, columns):
    """Raise ValueError for given levels or medians that fit no column."""
    for what, given in (("levels", levels or {}), ("medians", medians or {})):
        for name in given:
            if name not in columns:
                raise ValueError(f"{what} has {name!r}, which is no column of X: {columns[:20]}.")
    for name, median in (medians or {}).items():
        if not np.isfinite(median):
            raise ValueError(f"medians has {median!r} for {name!r}; expected a finite number.")
    for name, each in (levels or {}).items():
        is_list = not isinstance(each, str) and len(set(each)) == len(each) > 1
        if not is_list or any(pd.isna(level) for level in each):
            raise ValueError(
                f"levels of {name!r} must be two or more that differ, none of them missing; got "
                f"{each!r}."
            )
        if name in (medians or {}):
            raise ValueError(f"column {name!r} is in levels and in medians; give one of them.")
