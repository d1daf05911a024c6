"""Tables of fitted models: summaries to be read, and clients' values to be joined with rows."""

import html
import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import rankdata
from sklearn.utils.validation import check_is_fitted

from pfl_sklearn._clients import Array
from pfl_sklearn._fitted import has_own_report
from pfl_sklearn._typing import Floats
from pfl_sklearn._unwrap import without_groupings

NOT_COVERED = (
    "The privacy promise of this fit (privacy_) does not cover the clients' values in this table. "
    "Show each client its own alone (for_client), and publish the population (release)."
)
_DECIMALS = 4  # of printed numbers: most summaries are then about 80 characters wide


class SummaryTable(pd.DataFrame):
    """A DataFrame that prints all its columns, and below them a note in ``attrs["privacy"]``."""

    @property
    def _constructor(self):
        return SummaryTable  # of what its methods return, such as round

    def __repr__(self) -> str:
        sizes = self.select_dtypes("float").abs().to_numpy(dtype=np.float64, na_value=np.nan)
        # For one smaller number, pandas would give its whole column exponents.
        small = ((sizes > 0) & (sizes < 10.0**-_DECIMALS)).any()
        asked = pd.get_option("display.precision")
        decimals = asked if small else min(_DECIMALS, asked)
        whole = ("display.max_columns", None, "display.expand_frame_repr", False)
        with pd.option_context(*whole, "display.precision", decimals):
            return "\n".join([super().__repr__(), *textwrap.wrap(self._note, 96)])

    def _repr_html_(self) -> str | None:
        table = super()._repr_html_()  # type: ignore[misc]
        return f"{table}\n<p>{html.escape(self._note)}</p>" if table and self._note else table

    @property
    def _note(self) -> str:
        return str(self.attrs.get("privacy", ""))


def mark_coverage(table: pd.DataFrame, estimator: Any) -> SummaryTable:
    """The table, with a note on whether the promise of a private fit covers it."""
    table, note = SummaryTable(table), coverage_note(estimator)
    if note:
        table.attrs["privacy"] = note
    return table


def coverage_note(estimator: Any) -> str:
    """What the promise of a private fit says of its clients' values; empty without a promise."""
    report = getattr(estimator, "privacy_", None)
    if report is None or math.isinf(report.epsilon):
        return ""
    if report.not_released or not has_own_report(estimator):
        return NOT_COVERED
    if report.noise_reproducible:
        return "The noise of this table had a seed: anyone who knows it can remove the noise."
    return (
        f"The privacy promise of this fit covers this table: epsilon = {report.epsilon:.4g}, delta "
        f"= {report.delta:.4g}, unit one {report.unit}, relation {report.relation}; adversary: "
        f"{report.adversary}.{' Its warnings are in privacy_.' if report.warnings else ''}"
    )


def class_quantity(estimator: Any, quantity: str) -> str | None:
    """Name of a quantity of the second of two classes, such as "log odds of yes"; None without."""
    classes: Any = getattr(estimator, "classes_", ())
    return f"{quantity} of {classes[1]}" if len(classes) == 2 else None


def rank_table(draws: Floats, estimates: Floats, clients: Array, level: float) -> pd.DataFrame:
    """Ranks of m clients, the largest first, from draws (n, m) of their joint posterior."""
    ranks = rankdata(-draws, axis=1)
    lower, upper = np.quantile(ranks, [0.5 - level / 2, 0.5 + level / 2], axis=0)
    is_largest = draws == draws.max(axis=1, keepdims=True)  # clients that are alike share it
    columns = {
        "estimate": estimates,
        "rank": ranks.mean(axis=0),
        "lower": lower,
        "upper": upper,
        "probability_largest": np.mean(is_largest / is_largest.sum(axis=1, keepdims=True), axis=0),
    }
    table = pd.DataFrame(columns, index=pd.Index(clients, name="client"))
    return table.sort_values("rank", kind="stable")


def client_table(
    id_name: str, ids: Array, names: Sequence[str], values: Floats, stds: Any
) -> pd.DataFrame:
    """Columns of values (m, k) of m ids, and of their standard deviations if there are any."""
    columns = [id_name, *names, *(() if stds is None else [f"{name}_std" for name in names])]
    twice = [name for name in columns if columns.count(name) > 1]
    if twice:
        raise ValueError(
            f"two columns of the table would be called {twice[0]!r}; give other feature_names."
        )
    parts = [values] if stds is None else [values, stds]
    table = pd.DataFrame(np.concatenate(parts, axis=1), columns=columns[1:])
    table.insert(0, id_name, ids)
    return table


class CoefTableMixin:
    """Linear predictors with coefficients of every client."""

    # Of the estimator that this is mixed into.
    clients_: Array
    coef_: Any
    intercept_: Any
    fit_intercept: bool
    n_features_in_: int

    @property
    def coef_names_(self) -> Array:
        """Names of the columns of `coef_`: the features of ``fit``, or x0, x1, ..."""
        check_is_fitted(self)
        names = getattr(self, "feature_names_in_", None)
        if names is None:
            return np.array([f"x{j}" for j in range(self._n_coefficients)], dtype=object)
        return np.array(without_groupings(self, list(names)), dtype=object)

    @property
    def _n_coefficients(self) -> int:
        """Number of features, which are the columns that are not groupings."""
        return self.n_features_in_

    def coef_table(
        self,
        feature_names: Sequence[str] | None = None,
        *,
        grouping: str | int | None = None,
    ) -> pd.DataFrame:
        """Table of the clients' coefficients, for a join with rows in a database.

        Parameters
        ----------
        feature_names : array-like of str, shape (d,), default=None
            Names of the features, with or without those of groupings. None: those of `X` in
            ``fit``, or x0, x1, ...
        grouping : str or int, default=None
            A column of `groupings`, by its name or index, for the table of its levels. None: the
            clients.

        Returns
        -------
        DataFrame
            One row per client: its id as "client", as in `clients_` (dates and categories may need
            a cast before a join), "intercept" (if fitted) and a column for each feature, which
            several outputs or K > 2 classes name "output: feature"; two classes have the
            coefficients of the second. Posterior standard deviations, if any, follow as
            "intercept_std" and so on.

            With `grouping`, one row per level with the columns "level" and, for each coefficient
            that varies by level, the effect to add to the client's coefficient. Levels that have no
            row add nothing.

            After a private fit, which leaves the clients' values as they are, a note below the
            table says so (``attrs["privacy"]``).

        Raises
        ------
        ValueError
            For another number of names, if two columns had the same name, and for a `grouping` that
            has no effects.
        """
        self._require_fitted("clients_")  # type: ignore[attr-defined]
        names = self._names_of_coefficients(feature_names)
        if self.fit_intercept:
            names = ["intercept", *names]
        if grouping is not None:
            return self._table_of_levels(grouping, names)
        values = np.asarray(self.coef_)
        if self.fit_intercept:
            values = np.concatenate([np.asarray(self.intercept_)[..., None], values], axis=-1)
        if values.ndim == 3:
            outputs = getattr(self, "classes_", range(values.shape[1]))
            names = [f"{output}: {name}" for output in outputs for name in names]
        stds, m = self._coefficient_stds(), len(values)
        stds = None if stds is None else stds.reshape(m, -1)
        table = client_table("client", self.clients_, names, values.reshape(m, -1), stds)
        return mark_coverage(table, self)

    def _names_of_coefficients(self, feature_names):
        """Names of the features, checked if they are given."""
        if feature_names is None:
            return [str(name) for name in self.coef_names_]
        if isinstance(feature_names, str) or not isinstance(feature_names, Iterable):
            raise ValueError(f"feature_names must be a list of names; got {feature_names!r}.")
        names = without_groupings(self, [str(name) for name in feature_names])
        d = self._n_coefficients
        if len(names) != d:
            raise ValueError(f"feature_names must name {d} features; got {len(names)} names.")
        return names

    def _table_of_levels(self, grouping, names):
        """Table of the effects of a grouping's levels."""
        fitted = {levels.name: levels for levels in getattr(self, "_levels", ())}
        if grouping not in fitted:
            raise ValueError(
                f"grouping must be one of the groupings with effects, {list(fitted)}; got "
                f"{grouping!r}."
            )
        levels = fitted[grouping]
        at = self._design.order[levels.positions]  # type: ignore[attr-defined]
        names = [names[k] for k in at]
        return client_table("level", levels.levels, names, levels.effects, None)

    def _coefficient_stds(self) -> Any:
        """Standard deviations (m, [c,] p), the intercept first; None without a posterior."""
        return None
