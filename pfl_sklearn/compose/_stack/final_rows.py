"""Rows of a stack's final estimator: predictions of base estimators, and columns of the table."""

import narwhals as nw
import numpy as np
import pandas as pd
from sklearn.base import clone

from pfl_sklearn._columns import as_floats, name_bad_columns
from pfl_sklearn._compat import num_samples
from pfl_sklearn._typing import Floats, TableLike
from pfl_sklearn.compose._client_rows import as_groups
from pfl_sklearn.compose._inner_estimators import SMALLEST_PROBABILITY
from pfl_sklearn.compose._table_columns import shares_levels
from pfl_sklearn.compose._table_encoder import TableEncoder


class NoColumns:
    """Fitted transformer that keeps no column."""

    def transform(self, X: TableLike) -> Floats:
        """No columns (n, 0)."""
        return np.empty((num_samples(X), 0))

    def get_feature_names_out(self) -> list[str]:
        """No names."""
        return []


class EncoderForTrees(TableEncoder):
    """Encoder that passes on columns that trees take, though models with groupings don't."""

    _suits_passing = staticmethod(shares_levels)


def fit_encoder(table, takes_levels=True, for_trees=False):
    """Fitted encoder that passes on columns of many levels, and more of them `for_trees`."""
    many_levels = "pass" if takes_levels else "merge"
    kind = EncoderForTrees if for_trees else TableEncoder
    encoder = kind(unsupported="drop", many_levels=many_levels)
    return _for_frames(encoder.fit(table.X, groups=as_groups(table.ids)))


def fit_passthrough(passthrough, table, takes_levels=True):
    """Fitted transformer for `passthrough`, a bool or a transformer.

    Columns of many levels are passed on if estimators behind it take them (`takes_levels`). Raises
    ValueError if the transformer needs y, because y of tested rows would leak.
    """
    X = table.X
    if passthrough is False:
        return NoColumns()
    if passthrough is True:
        return fit_encoder(table, takes_levels)
    transformer = clone(passthrough)
    try:
        # Once for all folds: without y, nothing about a test row's response can leak.
        output = transformer.fit_transform(X)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"passthrough={passthrough!r} could not be fitted without y: "
            f"{str(error).rstrip('.')}. "
            "Put a transformer that needs y inside an estimator, as a step of its pipeline."
        ) from error
    if levels := passed_levels(transformer):
        if not takes_levels:
            raise ValueError(
                f"passthrough={passthrough!r} hands on column {levels[0]!r} as it is, but the "
                "final estimator has no groupings='auto'; set many_levels='merge'."
            )
        return _for_frames(transformer)
    with name_bad_columns(output):
        _dense(output)
    return transformer


def passed_levels(transformer):
    """Names of the columns of many levels that a fitted transformer passes on as they are."""
    return getattr(transformer, "_passed_names", [])


def _for_frames(encoder):
    """A fitted encoder that returns frames of pandas if it passes on columns of many levels."""
    return encoder.set_output(transform="pandas") if passed_levels(encoder) else encoder


def passed_columns(passthrough, X):
    """Frame of the columns that a fitted passthrough makes of rows: finite ones, then categories.

    Raises ValueError for numbers that are not finite.
    """
    output, levels = passthrough.transform(X), passed_levels(passthrough)
    values = _dense(output.drop(columns=levels) if levels else output)
    names = _output_names(passthrough, values.shape[1])
    names = [name for name in names if name not in levels]
    bad = ~np.isfinite(values).all(axis=0)
    if bad.any():
        name = names[int(np.flatnonzero(bad)[0])]
        raise ValueError(
            f"column {name!r} of X has missing or infinite values, but the final estimator takes "
            "complete columns, and the column was complete in fit. Fill its values, or give a "
            "passthrough that does (a transformer, such as a SimpleImputer)."
        )
    frame = pd.DataFrame(values, columns=names)
    # Categories declare labels, also where strings read as numbers or dates.
    return frame.assign(**{name: pd.Categorical(output[name]) for name in levels})


def _float_columns(X, names):
    """Columns of a frame as an array of floats, missing values as NaN."""
    if hasattr(X, "iloc"):  # pandas' own missing values in columns of integers
        return X.loc[:, names].to_numpy(dtype=np.float64, na_value=np.nan)
    frame = nw.from_native(X, eager_only=True)
    columns = [as_floats(frame.get_column(name)) for name in names]
    return np.column_stack(columns) if columns else np.empty((len(frame), 0))


def _dense(values):
    """Output of a transformer as an array (n, k) of floats."""
    if hasattr(values, "columns"):
        return _float_columns(values, list(values.columns))
    if hasattr(values, "toarray"):  # sparse, as of an encoder with its defaults
        values = values.toarray()
    values = np.asarray(values, dtype=np.float64)
    return values.reshape(len(values), -1)


def _output_names(transformer, width):
    """Names of the columns that a transformer makes, or x0, x1, ..."""
    try:
        return [str(name) for name in transformer.get_feature_names_out()]
    except (AttributeError, ValueError):
        return [f"x{k}" for k in range(width)]


def join_predictions(named, predicted, columns):
    """Frame of predictions, as responses or log odds, on the left of other columns."""
    predictions: dict[str, Floats] = {}
    for inner, values in zip(named, predicted, strict=True):
        made = values[:, None] if inner.classes is None else log_odds(values)
        predictions |= dict(zip(names_of_predictions(inner), made.T, strict=True))
    return pd.DataFrame(predictions, index=columns.index).join(columns)


def names_of_predictions(named):
    """Names of the columns of an estimator's predictions."""
    if named.classes is None or len(named.classes) == 2:
        return [named.name]
    return [f"{named.name}: {label}" for label in named.classes[1:]]


def log_odds(probabilities):
    """Log odds (n, K - 1) of all classes but the first against the first."""
    logs = np.log(np.maximum(probabilities, SMALLEST_PROBABILITY))
    return logs[:, 1:] - logs[:, :1]


def check_names(named, columns):
    """Raise ValueError if a base estimator's predictions share a name with a column."""
    names = [name for inner in named for name in names_of_predictions(inner)]
    shared = [name for name in names if name in columns.columns]
    if shared:
        raise ValueError(
            f"predictions of an estimator have the name {shared[0]!r}, and a column of X for the "
            "final estimator has it as well; rename one of them."
        )


def encode_table(encoder, table):
    """The table as base estimators take it; without an encoder, as it is."""
    return table if encoder is None else table._replace(X=passed_columns(encoder, table.X))
