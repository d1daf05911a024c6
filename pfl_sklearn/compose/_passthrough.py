"""The columns of a table that the final estimator of a stack gets beside predictions."""

from typing import Any, NamedTuple

import narwhals as nw
import numpy as np
import pandas as pd
from sklearn.base import clone

from pfl_sklearn._typing import TableLike


class Passthrough(NamedTuple):
    """Columns by position, with the names that they get, or a fitted transformer."""

    columns: list[int]
    names: list[str]
    transformer: Any = None

    def frame(self, X: TableLike) -> pd.DataFrame:
        """Columns of rows, as a frame of numbers.

        Raises
        ------
        ValueError
            If there are missing or infinite values.
        """
        if self.transformer is not None:
            values = _dense(self.transformer.transform(X))
        elif hasattr(X, "columns"):
            values = _float_columns(X, [X.columns[k] for k in self.columns])
        else:
            values = np.asarray(X[:, self.columns], dtype=np.float64)
        bad = ~np.isfinite(values).all(axis=0)
        if bad.any():
            name = self.names[int(np.flatnonzero(bad)[0])]
            raise ValueError(
                f"column {name!r} of X has missing or infinite values, and the final estimator "
                "takes complete columns. It had none in fit: fill them as you would have there, or "
                "give a passthrough that does (a transformer, such as a SimpleImputer)."
            )
        return pd.DataFrame(values, columns=self.names)


def fitted_passthrough(passthrough, X):
    """Columns of a table that `passthrough`, a bool or a transformer, stands for.

    Raises
    ------
    ValueError
        If it is a transformer that looks at y, as it would at that of rows that are tested.
    """
    if passthrough is False:
        return Passthrough([], [])
    if passthrough is not True:
        transformer = clone(passthrough)
        try:
            # Once for all folds: what sees no y tells a test row nothing of its response.
            width = _dense(transformer.fit_transform(X)).shape[1]
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"passthrough={passthrough!r} could not be fitted without y: "
                f"{str(error).rstrip('.')}. "
                "What needs y belongs inside of an estimator, as a step of its pipeline."
            ) from error
        return Passthrough([], _names_of(transformer, width), transformer)
    if hasattr(X, "columns"):
        names = _complete_float_columns(X)
        return Passthrough([list(X.columns).index(name) for name in names], names)
    try:
        values = np.asarray(X, dtype=np.float64)
    except (TypeError, ValueError):  # words among the numbers
        return Passthrough([], [])
    columns = np.flatnonzero(np.isfinite(values).all(axis=0)).tolist()
    return Passthrough(columns, [f"x{k}" for k in columns])


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
