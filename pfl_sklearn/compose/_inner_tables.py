"""Tables that are handed on to estimators inside others: rows, targets, client ids and weights."""

from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from sklearn import config_context
from sklearn.base import is_classifier
from sklearn.utils import assert_all_finite, check_array, check_consistent_length
from sklearn.utils.metadata_routing import get_routing_for_object
from sklearn.utils.validation import column_or_1d, has_fit_parameter

from pfl_sklearn._clients import encode_clients
from pfl_sklearn._compat import check_sample_weight, num_samples, safe_indexing
from pfl_sklearn._float_range import check_float_range
from pfl_sklearn._labels import check_labels


class Table(NamedTuple):
    """Rows X (n, ...), targets or labels y (n,), client ids (n,), and weights (n,) or None."""

    X: Any
    y: np.ndarray
    ids: np.ndarray
    weights: np.ndarray | None

    def take(self, rows):
        """Some of the rows."""
        weights = None if self.weights is None else self.weights[rows]
        return Table(safe_indexing(self.X, rows), self.y[rows], self.ids[rows], weights)

    @property
    def clients(self):
        """Sorted ids of the clients, and the position of each row's."""
        return encode_clients(as_groups(self.ids), len(self.y))


def read_table(estimator, X, y, groups, sample_weight, classes):
    """Table of the rows of ``fit`` that have a positive weight; `classes` says whether y has them.

    Raises
    ------
    ValueError
        If there are fewer than two rows, or y or the weights are of the wrong kind.
    """
    X, y = as_table(X), column_or_1d(y, warn=True)
    check_consistent_length(X, y)
    if y.dtype.kind == "O" and pd.isna(y).any():
        raise ValueError(f"Input y has {pd.isna(y).sum()} missing labels (None or NaN).")
    assert_all_finite(y, input_name="y")
    if classes:
        check_labels(y)
    else:
        y = check_array(y, ensure_2d=False, dtype=np.float64, input_name="y")
    clients = estimator._encode_fit(groups, num_samples(X))
    table = Table(X, y, clients.ids[clients.codes], None)
    if sample_weight is not None:
        weights = check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        table = table._replace(weights=weights)
        if not weights.all():
            table = table.take(np.flatnonzero(weights))
    if len(table.y) < 2:
        raise ValueError(
            f"Found array with {len(table.y)} sample(s) while a minimum of 2 is required by "
            f"{type(estimator).__name__}."
        )
    return table


def check_responses(estimator, table):
    """Raise ValueError if a regressor's responses are too large or too small to be squared.

    A fit that may promise privacy must not call this: the error would reveal a client's values.
    """
    if is_classifier(estimator):
        return
    heaviest = 1.0 if table.weights is None else max(table.weights.max(), 1.0)
    check_float_range("y", table.y, heaviest)


def as_table(X):
    """A data frame with names as strings, or an array of two axes."""
    if not hasattr(X, "columns"):
        return check_array(X, dtype=None, ensure_all_finite=False)
    if hasattr(X, "iloc") and not all(isinstance(name, str) for name in X.columns):
        return X.set_axis([str(name) for name in X.columns], axis=1)
    return X


def as_groups(ids):
    """Ids as ``fit`` and ``predict`` take them: floats as categories, which are labels."""
    return pd.Categorical(ids) if ids.dtype.kind == "f" else ids


def check_splits(cv, kept, given):
    """Raise ValueError if splits, given as a list, are of more rows than have a weight."""
    if not isinstance(cv, Integral) and not hasattr(cv, "split") and len(kept) < len(given):
        raise ValueError(
            f"cv is a list of splits of {len(given)} rows, but only {len(kept)} have a positive "
            "sample_weight; leave the others out before you make the splits, or give a splitter."
        )


def check_takes_weights(estimator, name):
    """Raise ValueError if an estimator, whose name this is, takes no sample_weight."""
    with config_context(enable_metadata_routing=True):
        routed = hasattr(estimator, "get_metadata_routing") and "sample_weight" in (
            get_routing_for_object(estimator).consumes("fit", ["sample_weight"])
        )
    if not (routed or has_fit_parameter(estimator, "sample_weight")):
        raise ValueError(
            f"sample_weight was given, but {name!r} ({type(estimator).__name__}) does not take it. "
            "A pipeline or a search takes it if what is inside requests it: "
            "set_fit_request(sample_weight=True)."
        )


def ids_of_rows(estimator, groups, codes):
    """Ids (n,) of the clients of rows, whose positions in ``clients_`` these are."""
    if groups is not None:
        given = encode_clients(groups, len(codes))
        return given.ids[given.codes]
    known = getattr(estimator, "clients_", np.zeros(1, dtype=np.intp))  # a released model has none
    return known[codes]
