"""Rows with grouping columns: how a regression reads them in a fit, and to predict."""

from collections.abc import Mapping
from functools import partial
from numbers import Integral
from typing import Any, ClassVar

import numpy as np
from sklearn.utils import check_array
from sklearn.utils.validation import check_is_fitted

from pfl_sklearn._compat import StrOptions
from pfl_sklearn._parameters import parameter
from pfl_sklearn._warnings import format_names
from pfl_sklearn.linear_model._base import BasePersonalizedRegression
from pfl_sklearn.linear_model._grouping_columns import (
    check_grouped_prior,
    positions_of,
    read_groupings,
)
from pfl_sklearn.linear_model._mixed._groupings._posterior import SharedLevels
from pfl_sklearn.linear_model._mixed._groupings._scaled_rows import GroupedRows

GROUPINGS = parameter(
    default="auto",
    ranges=[StrOptions({"auto"}), "array-like", Mapping, str, Integral, None],
    text="""
        "auto", name or index of a column, list of them, dict of GroupingPrior, or None
            Columns of X whose levels have shrunken effects, as clients do. Levels may be crossed
            with clients (the movie of a user's rating) or contain them (the state of a county).
            These columns are not features: `random` and `coef_` refer to the others.

            - "auto": columns of strings or categories of a data frame that have more than 10
              levels, and at most half as many levels as rows. None in a private fit.
            - A dict gives each column a :class:`~pfl_sklearn.priors.GroupingPrior`. A search tries
              whole values: ``{"groupings": [None, {"movie": GroupingPrior()}]}``.

            Levels are matched by value. An unknown level or a missing value has the effect 0, with
            the variance between levels. A column with one level, or whose levels are the clients,
            is left out with a warning. (Integers in a data frame that hold the client ids stay
            a feature, with a warning.) Groupings need a Gaussian prior with finite variances that
            is not of low rank; variances are then always found by average information. The
            :ref:`user guide <groupings>` has examples.
    """,
)


class GroupedRegression(BasePersonalizedRegression):
    """Base of the regressions that take `groupings`.

    Attributes
    ----------
    groupings_ : dict of GroupingPrior
        Prior of each grouping, with the covariance of the fit, by the column's name (its index in
        a table without names). Not set if no column has effects.
    levels_ : dict of ndarrays of shape (n_levels,)
        Sorted levels of each of these columns; empty if there are none.
    """

    # Effects of levels are estimates from everybody's rows, as the population is.
    _population_attributes: ClassVar[tuple[str, ...]] = (
        *BasePersonalizedRegression._population_attributes,
        "groupings_",
        "_levels",
        "_grouping_columns",
        "_posterior_of_levels",
    )

    def _check_groupings(self, prior):
        """Raise ValueError if the parameters do not go with groupings."""
        check_grouped_prior(prior)

    def _grouped_state(
        self, X, columns, values, priors, state, features, rows, sample_weight, keeps_rows=False
    ):
        """State of the grouping columns of a table: their levels, and the rows for the fit."""
        design, codes = state["_design"], rows.clients.codes
        if len(codes) < len(values[0]):  # the others have weight 0
            present = np.asarray(sample_weight) > 0
            values = [column[present] for column in values]
        resolve = partial(positions_of, design=design)
        columns, groupings = read_groupings(columns, values, priors, codes, resolve, keeps_rows)
        matrix = design.matrix(features.astype(np.float64))[:, design.order]
        grouped = GroupedRows(matrix, rows.y, rows.weights, codes, groupings)
        return {
            **self._column_attributes(X),
            "_grouping_columns": columns,
            "_grouped": grouped if groupings else None,
        }

    def _notes_on_privacy(self, state):
        columns = state.get("_grouping_columns")
        if columns is None or not columns.names:
            return ()
        named = format_names(map(str, columns.names))
        return (
            f"a row belongs to more than one unit: to a client and a level of {named}; for_client "
            "hands on the ids, numbers of rows and effects of all levels, which are estimates from "
            "the rows of all clients, and the joint errors of these effects, which show which "
            "levels have clients in common",
        )

    def _fitted_state(self, state, table, estimates):
        fitted = super()._fitted_state(state, table, estimates)
        if estimates.levels is not None:
            fitted["_levels"] = estimates.levels
            fitted["_component_variances"] = estimates.variances
            fitted["groupings_"] = {level.name: level.prior for level in estimates.levels}
            fitted["_posterior_of_levels"] = SharedLevels(estimates.posterior)
        return fitted

    @property
    def levels_(self) -> dict[str | int, np.ndarray]:
        """Sorted levels of each grouping, by the column's name; empty if there are none."""
        check_is_fitted(self)
        columns = getattr(self, "_grouping_columns", None)
        return {} if columns is None else dict(zip(columns.names, columns.levels, strict=True))

    def _checked_features(self, X):
        if getattr(self, "_grouping_columns", None) is None:
            return super()._checked_features(X)
        # The names and the number of the whole table's columns have been checked.
        return check_array(X, dtype=np.float64, ensure_min_features=0, estimator=self)

    def _row_predictions(self, X, groups):
        """Linear predictors (n[, K]), rows of the design, and codes of clients and of levels."""
        columns = getattr(self, "_grouping_columns", None)
        if columns is None:
            predictors, X, codes = self._predictors(X, groups)
            return predictors, self._design.matrix(X), codes, None
        columns.check_present(X)
        self._column_attributes(X, reset=False)
        features, levels = columns.read(X)
        predictors, features, codes = self._predictors(features, groups)
        x = self._design.matrix(features)
        predictors += self._level_predictors(x, levels, "effects")
        return predictors, x, codes, levels

    def _level_predictors(self, x, levels, values):
        """What levels, by their codes, add to predictors (n,): their effects, or other values."""
        ordered, total = x[:, self._design.order], np.zeros(len(x))
        for fitted, level in zip(getattr(self, "_levels", []), levels, strict=True):
            known = level >= 0
            added = getattr(fitted, values)[level[known]]
            total[known] += np.sum(ordered[known][:, fitted.positions] * added, axis=1)
        return total

    def _row_variances(self, x, codes, levels):
        """Variances (n,) of the predictors of rows x (n, p) of the design."""
        if not levels:
            return self._variances(x, codes)
        return self._grouped_posterior().variances(x[:, self._design.order], codes, levels)

    def _grouped_posterior(self) -> Any:
        # Copies without clients have levels alone.
        return getattr(self, "_posterior", self._posterior_of_levels.posterior)
