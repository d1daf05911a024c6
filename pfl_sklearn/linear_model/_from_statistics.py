"""Fits of linear regressions to statistics of clients' rows, given or kept."""

from __future__ import annotations

import math
from typing import Any, Self

from pfl_sklearn._clients import check_no_name
from pfl_sklearn._columns import numbers_needed
from pfl_sklearn._compat import fit_context
from pfl_sklearn._typing import TableLike
from pfl_sklearn.linear_model._base import BasePersonalizedRegression, check_dense
from pfl_sklearn.linear_model._design import column_names, resolve_design
from pfl_sklearn.linear_model._mixed._normal_rows._linear_fits import check_fit
from pfl_sklearn.linear_model._mixed._reduction import table_of_statistics
from pfl_sklearn.linear_model._private._checks import (
    check_linear_parameters,
    check_linear_statistics,
)
from pfl_sklearn.linear_model._private._linear_fit import private_table_of_statistics
from pfl_sklearn.priors._support import resolve_prior
from pfl_sklearn.privacy._ledger import charge
from pfl_sklearn.statistics import ClientStatistics
from pfl_sklearn.statistics._kept import (
    KeepsStatisticsMixin,
    check_statistics,
    fit_kept,
    with_kept,
)


class FitsStatisticsMixin(KeepsStatisticsMixin, BasePersonalizedRegression):
    """Regression that needs nothing of the rows but their statistics."""

    # Of the estimator that this is mixed into.
    method: str
    solver: str
    _fit_table: Any

    @fit_context(prefer_skip_nested_validation=True)
    def fit_statistics(self, statistics: ClientStatistics) -> Self:
        """Estimate the population and every client's coefficients from statistics of the rows.

        The model is that of the rows, up to rounding; with a finite `epsilon` and the same
        `random_state` its noise, its promise and its report are, too.

        Parameters
        ----------
        statistics : ClientStatistics
            With features and one target; with a finite `epsilon` of rows that were scaled to
            `feature_bound` and `target_bound`, which the constructors of statistics take.

        Returns
        -------
        self

        Raises
        ------
        ValueError
            For statistics of several targets, and for those without features unless there is an
            intercept and no privacy. With a finite `epsilon` for statistics of rows that were not
            scaled, or to other bounds, and, where all variances are known, with
            ``relation="add_remove"`` or without an intercept, which scale rows otherwise. Nothing
            is charged to the ledger then.
        """
        check_statistics(statistics)
        prior: Any = resolve_prior(self)
        options, private = self._fit_parameters(), math.isfinite(self.epsilon)
        check_fit(prior, self.method, self.solver, self.noise_variance)
        if private:
            check_linear_parameters(self, prior, None)
        needed = 0 if self.fit_intercept and not private else 1
        if statistics.n_targets != 1 or statistics.n_features < needed:
            raise ValueError(
                "a regression needs statistics of features and one target; got "
                f"{statistics.n_features} features and {statistics.n_targets} targets."
            )
        X = statistics._header()
        design = resolve_design(
            self.random, X.shape[1], self.fit_intercept, column_names(X), self._random_words
        )
        if private:
            check_linear_statistics(self, prior, design, statistics)
        charge(self)
        if private:
            table: Any = private_table_of_statistics(design, statistics, prior, self)
        else:
            table = table_of_statistics(statistics, design)
        return self._fit_table(X, table, design, statistics.clients, prior, options, True)

    @fit_context(prefer_skip_nested_validation=True)
    def partial_fit(
        self, X: TableLike, y: TableLike, *, groups: TableLike = None, sample_weight: Any = None
    ) -> Self:
        """Fit to the rows of earlier calls and to these.

        The model keeps statistics of all rows and is fitted again from them: it is that of all rows
        together.

        Parameters
        ----------
        X : array-like of shape (n_rows, d)
            Features of the new rows.
        y : array-like of shape (n_rows,)
            Responses.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row, seen before or new. None: all rows belong to one client, with a
            warning.
        sample_weight : array-like of shape (n_rows,), default=None
            Precision weights; a row of weight 0 is absent.

        Returns
        -------
        self

        Raises
        ------
        ValueError
            As ``fit``, with a finite `epsilon`, and after a fit by other methods, which keep no
            statistics.
        """
        check_dense(X, self, "PPSGDRegressor")
        check_no_name(groups)
        with numbers_needed(X):
            features, checked = self._checked_xy(X, y, groups, dtype="float64", y_numeric=True)
        features = X if features.shape[1] else None
        statistics = with_kept(self, X, checked, groups, sample_weight, features)
        fitted: Self = fit_kept(self, statistics)
        return fitted
