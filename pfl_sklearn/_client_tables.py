"""Tables of fitted models: summaries to be read, and clients' values to be joined with rows."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from pfl_sklearn._clients import Array
from pfl_sklearn._typing import Floats

_DECIMALS = 4  # of printed numbers: most summaries are then about 80 characters wide


class SummaryTable(pd.DataFrame):
    """A DataFrame that prints all its columns, however narrow pandas takes the page to be."""

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
            return super().__repr__()


def class_quantity(estimator: Any, quantity: str) -> str | None:
    """Name of a quantity of the second of two classes, such as "log odds of yes"; None without."""
    classes: Any = getattr(estimator, "classes_", ())
    return f"{quantity} of {classes[1]}" if len(classes) == 2 else None


def client_table(clients: Array, names: Sequence[str], values: Floats, stds: Any) -> pd.DataFrame:
    """Columns of values (m, k) of m clients, and of their standard deviations if there are any."""
    columns = ["client", *names, *(() if stds is None else [f"{name}_std" for name in names])]
    twice = [name for name in columns if columns.count(name) > 1]
    if twice:
        raise ValueError(
            f"two columns of the table would be called {twice[0]!r}; give other feature_names."
        )
    parts = [values] if stds is None else [values, stds]
    table = pd.DataFrame(np.concatenate(parts, axis=1), columns=columns[1:])
    table.insert(0, "client", clients)
    return table


class CoefTableMixin:
    """Linear predictors with coefficients of every client."""

    # Of the estimator that this is mixed into.
    clients_: Array
    coef_: Any
    intercept_: Any
    fit_intercept: bool
    n_features_in_: int

    def coef_table(self, feature_names: Sequence[str] | None = None) -> pd.DataFrame:
        """Table of the clients' coefficients, for a join with rows in a database.

        Parameters
        ----------
        feature_names : array-like of str, shape (d,), default=None
            Names of the features. None: those of `X` in ``fit``, or x0, x1, ...

        Returns
        -------
        DataFrame
            One row per client: its id as "client", as in `clients_` (dates and categories may need
            a cast before a join), "intercept" (if fitted) and a column for each feature, which
            several outputs or K > 2 classes name "output: feature"; two classes have the
            coefficients of the second. Posterior standard deviations, if any, follow as
            "intercept_std" and so on.

        Raises
        ------
        ValueError
            For another number of names, and if two columns had the same name.
        """
        self._require_fitted("clients_")  # type: ignore[attr-defined]
        labels = (
            getattr(self, "feature_names_in_", None) if feature_names is None else feature_names
        )
        if isinstance(labels, str) or not (labels is None or isinstance(labels, Iterable)):
            raise ValueError(f"feature_names must be a list of names; got {feature_names!r}.")
        d = self.n_features_in_
        names = [f"x{j}" for j in range(d)] if labels is None else [str(name) for name in labels]
        if len(names) != d:
            raise ValueError(f"feature_names must name {d} features; got {len(names)} names.")
        values = np.asarray(self.coef_)
        if self.fit_intercept:
            names = ["intercept", *names]
            values = np.concatenate([np.asarray(self.intercept_)[..., None], values], axis=-1)
        if values.ndim == 3:
            outputs = getattr(self, "classes_", range(values.shape[1]))
            names = [f"{output}: {name}" for output in outputs for name in names]
        stds, m = self._coefficient_stds(), len(values)
        stds = None if stds is None else stds.reshape(m, -1)
        return client_table(self.clients_, names, values.reshape(m, -1), stds)

    def _coefficient_stds(self) -> Any:
        """Standard deviations (m, [c,] p), the intercept first; None without a posterior."""
        return None
