"""Totals and means of predictions over groups of rows, with their joint errors."""

import reprlib
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from pandas import DataFrame
from scipy.special import expit, logit, ndtri
from sklearn.utils.validation import check_is_fitted

from pfl_sklearn._client_tables import SummaryTable, mark_coverage
from pfl_sklearn._clients import encode_clients, encode_levels, format_id
from pfl_sklearn._typing import Floats, TableLike
from pfl_sklearn.base import check_level

ALL = "all"  # label of the total of all rows
_LEAST_TOTAL = 1e-300
_LEAST_LEFT = 0.25  # of a logit's variance, for shares that may be almost 0 or almost 1


class RowMeans(NamedTuple):
    """Expected responses of rows, and what an interval of their total needs."""

    x: Floats  # (n, p), rows of the design
    codes: Any  # (n,), of their clients; -1 for others
    means: Floats  # (n,)
    slopes: Floats  # (n,), of the means in the linear predictors, on average over the posterior
    noise: Floats  # (n,), variances of responses around their means
    scale: str  # on which totals are nearly normal: "identity", "log" or "logit"


class TotalsMixin:
    """Mixin of the mixed models: totals of predictions; a model has ``_row_means``."""

    def predict_total(
        self: Any,
        X: TableLike,
        *,
        groups: TableLike = None,
        by: TableLike = None,
        weights: TableLike = None,
        mean: bool = False,
        new_row: bool = False,
        level: float = 0.95,
        **known: TableLike,
    ) -> DataFrame:
        """Totals of the responses of rows, by state, region or any labels, with their errors.

        Predictions of one client's rows have errors in common, and those of all clients through the
        population, so the error of a total is not that of a sum of independent predictions.

        Parameters
        ----------
        X : array-like of shape (n_rows, d)
            Features of the rows of the totals, with the columns that ``fit`` saw.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row. New clients need ``unseen="population"``; rows with the same new
            id are of one client.
        by : array-like of shape (n_rows,), default=None
            Label of every row, such as its state; clients may have rows of several labels. None:
            one total of all rows.
        weights : array-like of shape (n_rows,), >= 0, default=None
            How often a row counts, such as the number of people that it stands for. None: once.
        mean : bool, default=False
            Whether to divide totals by their weights.
        new_row : bool, default=False
            Whether the totals are of new responses, whose noise counts too (a row of weight w as w
            times one response), and not of their means.
        level : float in (0, 1), default=0.95
            Posterior probability of the intervals.
        **known : array-likes of shape (n_rows,)
            `offset`, or for counts `exposure`, as for ``predict``.

        Returns
        -------
        DataFrame
            Indexed by the labels ("all" without `by`), with columns n_rows, total (or mean), std,
            lower and upper. For two classes totals are of the second class. NaN where the data do
            not determine the predictions (:ref:`row_space`).

        Raises
        ------
        ValueError
            For more than two classes, models with `groupings`, fits without a posterior, missing
            labels, and weights that are negative or all 0.
        TypeError
            For arguments by row that ``predict`` does not take.

        Notes
        -----
        With :math:`a_i` the weighted sum of the rows x of client i in a group, its total is
        :math:`\\sum_i a_i^\\top \\theta_i`, with the variance

        .. math:: \\sum_i a_i^\\top V_i a_i + m^\\top C m, \\qquad
                  m = \\sum_i (I - K_i) a_i,

        where :math:`V_i` is the client's posterior covariance given the population, C that of the
        population's coefficients, and :math:`K_i` the weight that a client's own rows have. Where
        errors are averaged over the variances (`uncertainty`), what that adds to the variance of
        each client's part is added, as if it were independent between clients: right for the total
        of one client, and too much for that of many whose variances are hardly known. For classes
        and counts, rows are multiplied by the slope with which a single row has its own standard
        deviation. Intervals are symmetric in the logit of the mean, or those of a lognormal
        variable.
        """
        check_is_fitted(self)
        check_level(level)
        if getattr(self, "_levels", ()):
            raise ValueError("predict_total does not support models with groupings.")
        if not hasattr(self, "_posterior") and hasattr(self, "coef_"):
            raise ValueError(
                f"predict_total needs a posterior; a fit with {self._parameter_text()} gives its "
                "mode only."
            )
        check_row_arguments(self, "predict_total", known)
        rows = self._row_means(X, groups, **known)
        labels, of_label = _labels(by, len(rows.x))
        weights = _checked_weights(weights, rows.x)
        sums = np.bincount(of_label, weights, minlength=len(labels))
        if (sums <= 0).any():
            raise ValueError(f"weights are all 0 for {format_id(labels[int(np.argmin(sums))])}.")
        totals = np.bincount(of_label, weights * rows.means, minlength=len(labels))
        variances = self._total_variances(rows, groups, weights, of_label, len(labels))
        if new_row:
            variances += np.bincount(of_label, weights**2 * rows.noise, minlength=len(labels))
        outside = np.bincount(of_label, ~self._estimable_rows(rows.x), minlength=len(labels)) > 0
        stds = np.where(outside, np.nan, np.sqrt(np.maximum(variances, 0.0)))
        lower, upper = _bounds(totals, stds, sums, rows.scale, ndtri(0.5 + level / 2))
        columns = {"total": totals, "std": stds, "lower": lower, "upper": upper}
        if mean:
            columns = {
                "mean" if name == "total" else name: values / sums
                for name, values in columns.items()
            }
        counts = {"n_rows": np.bincount(of_label, minlength=len(labels))}
        table = SummaryTable({**counts, **columns}, index=labels)
        # Totals of a released model are the population's alone, which the promise covers.
        return mark_coverage(table, self) if hasattr(self, "coef_") else table

    def _total_variances(self: Any, rows, groups, weights, of_label, n_labels):
        """Variances (n_labels,) of the totals, from the joint posterior of all clients."""
        clients = np.array(rows.codes)
        if (clients < 0).any():  # rows with the same new id are of one client
            new = clients < 0
            m = len(getattr(self, "clients_", ()))
            ids = (
                np.zeros(len(clients), dtype=int)
                if groups is None
                else encode_clients(groups, len(clients)).codes
            )
            clients[new] = m + ids[new]
        pairs, at = np.unique(np.column_stack([of_label, clients]), axis=0, return_inverse=True)
        at = at.ravel()
        parts = np.zeros((len(pairs), rows.x.shape[1]))
        np.add.at(parts, at, (weights * rows.slopes)[:, None] * rows.x)
        of_pair = np.full(len(pairs), -1)
        of_pair[at] = rows.codes
        own, errors, more = self._parts_of(parts, of_pair)
        label = pairs[:, 0]
        shared = np.zeros((n_labels, errors.shape[1]))
        np.add.at(shared, label, errors)
        return np.bincount(label, own + more, minlength=n_labels) + np.sum(shared**2, axis=1)

    def _parts_of(self: Any, parts, codes):
        """Of clients' parts (k, p): variances (k,) given the population, effects (k, r) of its
        errors, and what averaging over the variances adds to the variance of a part alone (k,).
        """
        known, ordered = codes >= 0, parts[:, self._design.order]
        posterior = getattr(self, "_posterior", None)
        plug_in: Any = getattr(posterior, "plug_in", posterior)
        own, more = np.zeros(len(parts)), np.zeros(len(parts))
        if not known.all():
            own[~known] = self._errors.between_covariances(parts[~known][:, None])[:, 0, 0]
        if known.any() and not hasattr(plug_in, "error_root"):
            # A single client is its own population.
            own[known] = plug_in.variances(ordered[known], codes[known])
            return own, np.zeros((len(parts), 1)), more
        if plug_in is None:  # of a released model
            errors = parts @ self._errors.root()
        else:  # in one basis for all clients
            errors = (ordered * plug_in.scale) @ plug_in.error_root
            own[known] = plug_in.given_population(ordered[known][:, None], codes[known])[:, 0, 0]
            errors[known] = plug_in.error_effects(ordered[known], codes[known])
        if self._errors.averaged is not None:
            more = self._variances(parts, codes) - own - np.sum(errors**2, axis=1)
        return own, errors, more


def check_row_arguments(model: Any, method: str, known: Any) -> None:
    """Raise TypeError for arguments by row that the model's predictions do not take."""
    for name in known:
        if name not in model._row_arguments:
            raise TypeError(f"{method} of {type(model).__name__} takes no {name}.")


def _labels(by, n_rows):
    """Labels (k,) and the position (n_rows,) of every row's."""
    if by is None:
        return [ALL], np.zeros(n_rows, dtype=int)
    values = by.to_numpy() if hasattr(by, "to_numpy") else np.asarray(by)
    if values.shape != (n_rows,):
        raise ValueError(f"by must have shape ({n_rows},); got {values.shape}.")
    if pd.isna(values).any():
        raise ValueError(f"by has no label in row {int(np.argmax(pd.isna(values)))}.")
    labels, codes = encode_levels(values, "by")
    return labels, codes


def _checked_weights(weights, rows):
    if weights is None:
        return np.ones(len(rows))
    weights = np.asarray(weights)
    is_good = weights.shape == (len(rows),) and weights.dtype.kind in "iufb"
    if not is_good or not (np.isfinite(weights) & (weights >= 0) & (weights <= 1e100)).all():
        raise ValueError(
            f"weights must be {len(rows)} numbers from 0 to 1e100; got {reprlib.repr(weights)}."
        )
    return weights


def _bounds(totals, stds, sums, scale, z):
    """Bounds (k,) of totals, normal on their scale."""
    if scale == "log":
        # Of a lognormal variable, whose mean and standard deviation these are.
        spread = np.sqrt(np.log1p((stds / np.maximum(totals, _LEAST_TOTAL)) ** 2))
        middle = totals * np.exp(-(spread**2) / 2)
        return middle * np.exp(-z * spread), middle * np.exp(z * spread)
    if scale == "logit":
        shares = np.clip(totals / sums, 1e-12, 1 - 1e-12)
        unit = shares * (1 - shares)
        width = stds / sums / unit
        # The logit's standard deviation, if the share's is this one, by a fit: intervals of 95 %
        # hold .93 to .97 for one up to 1, and shares of .03 to .97.
        lost = np.maximum(2.9 * unit - 0.275, 0.0) * width**2
        half = z * width / np.sqrt(np.maximum(1 - lost, _LEAST_LEFT))
        return sums * expit(logit(shares) - half), sums * expit(logit(shares) + half)
    return totals - z * stds, totals + z * stds
