"""What the final estimator of a stack gets: predictions, and columns of the table beside them."""

import narwhals as nw
import numpy as np
import pandas as pd
from sklearn.base import clone

from pfl_sklearn._typing import Floats, TableLike
from pfl_sklearn.compose._inner_estimators import SMALLEST


class NumberColumns:
    """Fitted transformer that keeps columns of numbers, by position, under the names given."""

    def __init__(self, columns: list[int], names: list[str]):
        self.columns, self.names = columns, names

    def transform(self, X: TableLike) -> Floats:
        """The columns (n, k) of a table, missing values as NaN."""
        if hasattr(X, "columns"):
            return _float_columns(X, [X.columns[k] for k in self.columns])
        return np.asarray(X[:, self.columns], dtype=np.float64)

    def get_feature_names_out(self) -> list[str]:
        """Names of the columns."""
        return self.names


def fitted_passthrough(passthrough, X):
    """Fitted transformer of a table that `passthrough`, a bool or a transformer, stands for.

    Raises
    ------
    ValueError
        If it is a transformer that looks at y, as it would at that of rows that are tested.
    """
    if passthrough is False:
        return NumberColumns([], [])
    if passthrough is not True:
        transformer = clone(passthrough)
        try:
            # Once for all folds: what sees no y tells a test row nothing of its response.
            _dense(transformer.fit_transform(X))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"passthrough={passthrough!r} could not be fitted without y: "
                f"{str(error).rstrip('.')}. "
                "What needs y belongs inside of an estimator, as a step of its pipeline."
            ) from error
        return transformer
    if hasattr(X, "columns"):
        names = _complete_float_columns(X)
        return NumberColumns([list(X.columns).index(name) for name in names], names)
    try:
        values = np.asarray(X, dtype=np.float64)
    except (TypeError, ValueError):  # words among the numbers
        return NumberColumns([], [])
    columns = np.flatnonzero(np.isfinite(values).all(axis=0)).tolist()
    return NumberColumns(columns, [f"x{k}" for k in columns])


def passed_columns(passthrough, X):
    """Columns of rows that a fitted passthrough makes, as a frame of numbers.

    Raises
    ------
    ValueError
        If there are missing or infinite values.
    """
    values = _dense(passthrough.transform(X))
    names = _names_of(passthrough, values.shape[1])
    bad = ~np.isfinite(values).all(axis=0)
    if bad.any():
        name = names[int(np.flatnonzero(bad)[0])]
        raise ValueError(
            f"column {name!r} of X has missing or infinite values, and the final estimator "
            "takes complete columns. It had none in fit: fill them as you would have there, or "
            "give a passthrough that does (a transformer, such as a SimpleImputer)."
        )
    return pd.DataFrame(values, columns=names)


def _complete_float_columns(X):
    """Names of a frame's columns of numbers or truth values without missing or infinite ones."""
    frame = nw.from_native(X, eager_only=True)
    kinds = frame.schema.items()
    names = [name for name, kind in kinds if kind.is_numeric() or kind == nw.Boolean]
    return [name for name in names if np.isfinite(_float_columns(X, [name])).all()]


def _float_columns(X, names):
    """Columns of a frame as an array of floats, missing values as NaN."""
    if hasattr(X, "iloc"):  # pandas' own missing values in columns of integers
        return X.loc[:, names].to_numpy(dtype=np.float64, na_value=np.nan)
    frame = nw.from_native(X, eager_only=True)
    columns = [frame.get_column(name).cast(nw.Float64).to_numpy() for name in names]
    return np.column_stack(columns) if columns else np.empty((len(frame), 0))


def _dense(values):
    """Output of a transformer as an array (n, k) of floats."""
    if hasattr(values, "columns"):
        return _float_columns(values, list(values.columns))
    if hasattr(values, "toarray"):  # sparse, as of an encoder with its defaults
        values = values.toarray()
    values = np.asarray(values, dtype=np.float64)
    return values.reshape(len(values), -1)


def _names_of(transformer, width):
    """Names of the columns that a transformer makes."""
    try:
        return [str(name) for name in transformer.get_feature_names_out()]
    except (AttributeError, ValueError):  # it names none
        return [f"x{k}" for k in range(width)]


def stacked(named, predicted, columns):
    """Predictions, as responses or log odds, beside other columns: a frame."""
    beside: dict[str, Floats] = {}
    for each, values in zip(named, predicted, strict=True):
        odds = values[:, None] if each.classes is None else log_odds(values)
        beside |= dict(zip(names_of(each), odds.T, strict=True))
    return pd.DataFrame(beside, index=columns.index).join(columns)


def names_of(named):
    """Names of the columns that an estimator's predictions make."""
    if named.classes is None or len(named.classes) == 2:
        return [named.name]
    return [f"{named.name}: {label}" for label in named.classes[1:]]


def log_odds(probabilities):
    """Log odds (n, K - 1) of all classes but the first against the first."""
    logs = np.log(np.maximum(probabilities, SMALLEST))
    return logs[:, 1:] - logs[:, :1]
