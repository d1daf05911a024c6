"""Statistics that an estimator keeps of the rows of its earlier calls of ``partial_fit``."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field, fields
from typing import Any, Self

import numpy as np
from sklearn.utils import Tags, check_consistent_length

from pfl_sklearn._clients import format_id
from pfl_sklearn._columns import validate_data
from pfl_sklearn._compat import num_samples
from pfl_sklearn._fitted import COLUMNS, fitted_attributes
from pfl_sklearn._typing import TableLike
from pfl_sklearn.statistics._client_statistics import ClientStatistics

# A regression's are a triangle for each client: 25 times its coefficients, for 50 features.
_UNKEPT = {"check_fit_score_takes_y": "fit keeps no statistics that partial_fit could go on from"}


@dataclass(slots=True)
class StatisticsTags(Tags):
    """Tags of an estimator that fits statistics, with scikit-learn's checks that it fails.

    ``check_estimator`` takes these as `expected_failed_checks`: names, with the reasons.
    """

    expected_failed_checks: dict[str, str] = field(default_factory=_UNKEPT.copy)


def check_statistics(statistics):
    """Raise TypeError for what are no ClientStatistics, ValueError without clients in order."""
    if not isinstance(statistics, ClientStatistics):
        raise TypeError(
            f"fit_statistics takes a ClientStatistics; got {type(statistics).__name__}. Make one "
            "with ClientStatistics.from_rows, from_frame, from_chunks or from_moments."
        )
    ids = statistics.clients
    if not len(ids):
        raise ValueError("statistics must be of one client or more; got none.")
    ordered = ids[1:] > ids[:-1]
    if not ordered.all():  # a client that is there twice would count twice in a private sum
        first, second = ids[np.argmin(ordered) :][:2]
        raise ValueError(
            "statistics must have each client once, and in order; got client "
            f"{format_id(second)} after {format_id(first)}."
        )


def check_accumulates(estimator):
    """Raise ValueError with a finite epsilon, and after a fit that kept no statistics."""
    # Before any row is read: an error in the rows of a private fit would show a value.
    name = type(estimator).__name__
    if math.isfinite(estimator.epsilon):
        raise ValueError(
            f"partial_fit of {name} is not private, as every call would release again; got "
            f"epsilon={estimator.epsilon:g}. Fit all rows at once, or add up ClientStatistics and "
            "call fit_statistics once."
        )
    if not hasattr(estimator, "_statistics") and hasattr(estimator, "privacy_"):
        raise ValueError(
            f"this {name} was not fitted by partial_fit, so it keeps no statistics of its rows; "
            "give a new one all rows by partial_fit, or add ClientStatistics and call "
            "fit_statistics."
        )


def accumulate_statistics(estimator, X, y, groups, sample_weight, features):
    """ClientStatistics of the rows of earlier calls and these; `features` are (n_rows, d) or None.

    The `estimator` keeps them as `_statistics`. Raises ValueError for other columns.
    """
    accumulated = getattr(estimator, "_statistics", None)
    if accumulated is not None:
        validate_data(estimator, X, reset=False, skip_check_array=True)
    check_consistent_length(X, y)
    if groups is None:
        ids, codes = estimator._encode_fit(None, num_samples(X))
        groups = ids[codes]
    rows = ClientStatistics.from_rows(features, y, groups=groups, sample_weight=sample_weight)
    return rows if accumulated is None else accumulated + rows


def fit_accumulated(estimator, statistics, more=(), **params):
    """Fit a copy of the estimator to the statistics that it keeps, and set `more` attributes."""
    # A copy is fitted, so that all attributes are set in one step.
    fitted = copy.copy(estimator).fit_statistics(statistics, **params)
    accumulated = {**fitted_attributes(fitted), **dict(more), "_statistics": statistics}
    estimator._set_fitted(accumulated)
    return estimator


class AccumulatedStatisticsMixin:
    """Mixin for estimators whose ``partial_fit`` keeps statistics of all rows."""

    def __sklearn_tags__(self) -> StatisticsTags:
        tags = super().__sklearn_tags__()  # type: ignore[misc]
        return StatisticsTags(**{tag.name: getattr(tags, tag.name) for tag in fields(tags)})

    def without(self, clients: TableLike, *, unknown: str = "error") -> Self:
        """Model of all clients but some, as if these had never been in the data.

        A copy is fitted to the statistics that ``partial_fit`` keeps of the others; this model
        stays as it is.

        Parameters
        ----------
        clients : array-like of ids
            Clients to forget.
        unknown : {"error", "ignore"}, default="error"
            What to do with unknown ids.

        Raises
        ------
        ValueError
            After a fit by other methods, which keep no statistics, and as
            :meth:`ClientStatistics.without <pfl_sklearn.statistics.ClientStatistics.without>`.
        """
        accumulated = getattr(self, "_statistics", None)
        if accumulated is None:
            raise ValueError(
                f"this {type(self).__name__} was not fitted by partial_fit, so it keeps no "
                "statistics of its rows; fit it again to the rows of the others, or to "
                "statistics.without(clients)."
            )
        others = accumulated.without(clients, unknown=unknown)
        # What fit_statistics does not learn from statistics of a target alone.
        names = [name for name in (*COLUMNS, "classes_") if hasattr(self, name)]
        more = {name: getattr(self, name) for name in names}
        model: Self = fit_accumulated(
            copy.copy(self), others, more, **self._fit_statistics_params(others)
        )
        return model

    def _fit_statistics_params(self, statistics: ClientStatistics) -> dict[str, Any]:
        """Keywords of ``fit_statistics`` for statistics that are kept."""
        return {}
