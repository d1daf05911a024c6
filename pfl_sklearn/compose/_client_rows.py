"""Rows that go to estimators inside others: X, y, client ids and weights."""

from numbers import Integral
from typing import Any, NamedTuple

import narwhals as nw
import numpy as np
import pandas as pd
from sklearn.base import is_classifier
from sklearn.utils import assert_all_finite, check_array, check_consistent_length
from sklearn.utils.validation import check_is_fitted, column_or_1d

from pfl_sklearn._clients import EncodedClients, encode_clients, row_counts, warn_of_client_ids
from pfl_sklearn._columns import check_distinct, check_float_range, name_bad_columns, validate_data
from pfl_sklearn._compat import check_sample_weight, num_samples, safe_indexing
from pfl_sklearn._labels import check_labels, class_weighted
from pfl_sklearn._typing import Floats, Integers


class TableRows(NamedTuple):
    """Rows X (n, ...), targets or labels y (n,), client ids (n,), and weights (n,) or None."""

    X: Any
    y: Any
    ids: Any
    weights: Floats | None

    def take(self, rows: Integers) -> "TableRows":
        """These rows alone."""
        return TableRows(*(None if part is None else safe_indexing(part, rows) for part in self))

    @property
    def clients(self) -> EncodedClients:
        """Sorted ids of the clients, and the position of each row's."""
        return encode_clients(as_groups(self.ids), len(self.y))


def read_client_rows(estimator, X, y, groups, sample_weight, has_classes, private=False):
    """Rows of ``fit`` that have a positive weight; errors show no value if the fit is `private`.

    Raises ValueError for fewer than two rows, and for y or weights of the wrong kind.
    """
    X, y = as_table(X), column_or_1d(y, warn=True)
    check_consistent_length(X, y)
    if y.dtype.kind == "O" and pd.isna(y).any():  # None would pass as a label
        raise ValueError(f"Input y has {pd.isna(y).sum()} missing labels (None or NaN).")
    with name_bad_columns(private=private):
        assert_all_finite(y, input_name="y")
        if not has_classes:
            y = check_array(y, ensure_2d=False, dtype=np.float64, input_name="y")
    if has_classes:
        check_labels(y)
        sample_weight = class_weighted(estimator, y, sample_weight)
    clients = estimator._encode_fit(groups, num_samples(X))
    if not private:
        warn_of_client_ids(X, groups)
    table = TableRows(X, y, clients.ids[clients.codes], None)
    if sample_weight is not None:
        weights = check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        table = table._replace(weights=weights)
        if not weights.all():  # a row of weight 0 is absent, also from folds and counts
            _check_listed_splits(estimator, np.count_nonzero(weights), len(weights))
            table = table.take(np.flatnonzero(weights))
    if len(table.y) < 2:  # no fold can have rows on both sides
        raise ValueError(
            f"Found array with {len(table.y)} sample(s) while a minimum of 2 is required by "
            f"{type(estimator).__name__}."
        )
    return table


def client_attributes(estimator, X, clients, groups, classes=None):
    """Fitted attributes of columns, clients, their numbers of rows and, if any, classes."""
    return {
        **({} if classes is None else {"classes_": classes}),
        **estimator._column_attributes(as_table(X)),
        "clients_": clients.ids,
        "n_samples_per_client_": row_counts(clients.codes, len(clients.ids)),
        "_fitted_with_groups": groups is not None,
    }


def check_responses(estimator, table):
    """Raise ValueError if a regressor's responses are too large or too small to be squared."""
    # A fit that may promise privacy must not call this: the error would reveal values of a client.
    if is_classifier(estimator):
        return
    # Weighted sums of squares have to stay finite, whether weights are given or are ones.
    heaviest = 1.0 if table.weights is None else max(table.weights.max(), 1.0)
    check_float_range("y", table.y, heaviest)


def as_table(X):
    """A data frame with names as strings, or an array of two axes."""
    if nw.dependencies.is_pyarrow_table(X):  # whose `columns` are values, not names
        X = X.to_pandas()
    if not hasattr(X, "columns"):
        return check_array(X, dtype=None, ensure_all_finite=False)
    check_distinct([str(name) for name in X.columns] if hasattr(X, "iloc") else ())
    # scikit-learn refuses names of several types, and columns of predictions have strings as names.
    if hasattr(X, "iloc") and not all(isinstance(name, str) for name in X.columns):
        return X.set_axis([str(name) for name in X.columns], axis=1)
    return X


def as_groups(ids):
    """Client ids for ``groups=``; floats as a categorical, so that they are compared as labels."""
    return pd.Categorical(ids) if ids.dtype.kind == "f" else ids


def _check_listed_splits(estimator, n_rows, n_given):
    """Raise ValueError if ``cv`` lists splits that still count the rows of weight 0."""
    cv = getattr(estimator, "cv", None)
    # Positions in a list would be those of other rows; a number or a splitter makes its own.
    if not (cv is None or isinstance(cv, Integral | str) or hasattr(cv, "split")):
        raise ValueError(
            f"cv is a list of splits of {n_given} rows, but only {n_rows} have a positive "
            "sample_weight; leave the others out before you make the splits, or give a splitter."
        )


def rows_to_predict(estimator, X, groups):
    """Rows as the inner estimators take them, and positions (n,) of their clients (-1: new)."""
    check_is_fitted(estimator)
    table = as_table(X)
    # An error is to say how to reorder the columns of the user's table.
    given = X if nw.dependencies.is_pyarrow_table(X) else table
    validate_data(estimator, given, reset=False, skip_check_array=True)
    return table, estimator._encode_predict(table, groups)


def row_ids(estimator, groups, codes):
    """Client id (n,) of every row; without `groups`, from its position in ``clients_``."""
    if groups is not None:
        clients = encode_clients(groups, len(codes))
        return clients.ids[clients.codes]
    ids = getattr(estimator, "clients_", np.zeros(1, dtype=np.intp))  # a released model has none
    return ids[codes]


def take_rows(X, positions):
    """Rows at sorted positions; all rows of a table are returned without a copy."""
    return X if len(positions) == num_samples(X) else safe_indexing(X, positions)
