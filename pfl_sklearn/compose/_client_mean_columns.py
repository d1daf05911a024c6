"""Columns of client means, which tell effects within clients from those between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import narwhals as nw
import numpy as np
from sklearn.base import TransformerMixin
from sklearn.utils import check_array
from sklearn.utils.validation import check_is_fitted

from pfl_sklearn._clients import encode_clients, match_clients
from pfl_sklearn._columns import column_labels
from pfl_sklearn._compat import BaseEstimator, fit_context
from pfl_sklearn._fitted import FittedMixin
from pfl_sklearn._parameters import parameter, with_parameters
from pfl_sklearn._typing import Floats, TableLike
from pfl_sklearn.estimation import GaussianMean
from pfl_sklearn.priors import GaussianPrior

_SUFFIX = "_client_mean"


@with_parameters
class ClientMeans(FittedMixin, TransformerMixin, BaseEstimator):
    r"""Add the clients' means of columns, so that a model has effects within and between clients.

    A predictor that goes with the clients' own level (larger hospitals treat sicker patients) gives
    a random-intercept model a mixture of two effects, and intervals that miss both. With the
    client's mean as a further column, the coefficient of the column is the effect within clients,
    and that of the mean the difference of the effect between clients and the one within (Mundlak,
    1978). Put it before the model in a pipeline.

    Attributes
    ----------
    clients_ : ndarray of shape (n_clients,)
        Sorted ids.
    means_ : ndarray of shape (n_clients, n_columns)
        Means of the columns that are used, by client; new clients get `population_means_`.
    population_means_ : ndarray of shape (n_columns,)
    n_features_in_, feature_names_in_ : int, and ndarray of str
        Number of columns of `X`, and their names, if it has any.

    Raises
    ------
    ValueError
        For columns that are not there, or not finite numbers.

    Notes
    -----
    With `shrink`, the means of clients with few rows are shrunk towards the population's, as by
    :class:`~pfl_sklearn.estimation.GaussianMean`, because a mean of few rows is an inexact measure
    of a client, which would draw the effect between clients to that within. Without, and with all
    rows of the clients, the effect within is that of fixed effects exactly.

    The means are learned from the rows: in front of a private model nothing protects them.

    References
    ----------
    Mundlak, Y. (1978). On the pooling of time series and cross section data. Econometrica, 46,
    69-85. Neuhaus, J. M. and Kalbfleisch, J. D. (1998). Between- and within-cluster covariate
    effects in the analysis of clustered data. Biometrics, 54, 638-645.

    Examples
    --------
    >>> import pandas as pd
    >>> from pfl_sklearn.compose import ClientMeans
    >>> table = pd.DataFrame({"age": [40.0, 60.0, 20.0, 30.0]})
    >>> ClientMeans(shrink=False).fit_transform(table, groups=["a", "a", "b", "b"])
        age  age_client_mean
    0  40.0             50.0
    1  60.0             50.0
    2  20.0             25.0
    3  30.0             25.0
    """

    __metadata_request__fit: ClassVar[dict[str, bool]] = {"groups": True}
    __metadata_request__transform: ClassVar[dict[str, bool]] = {"groups": True}

    columns: Any = parameter(
        default=None,
        ranges=["array-like", None],
        kw_only=False,
        text="""
            list of str or int, or None
                Names or positions of the columns whose means are added; None: all.
        """,
    )
    shrink: bool = parameter(
        default=True,
        ranges=["boolean"],
        text="""
            bool
                Whether means of few rows are shrunk towards the population's.
        """,
    )

    @fit_context(prefer_skip_nested_validation=True)
    def fit(self, X: TableLike, y: Any = None, *, groups: TableLike = None) -> Self:
        """Learn the clients' means.

        Parameters
        ----------
        X : dataframe or array-like of shape (n_rows, n_columns)
            The table.
        y : None
            Ignored.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row.
        """
        columns = self._column_attributes(X)
        at = _positions(self.columns, X, columns["n_features_in_"])
        values = self._values(X, at)
        ids, codes = encode_clients(_required(groups), len(values))
        counts = np.bincount(codes, minlength=len(ids))
        means = np.column_stack([np.bincount(codes, each) / counts for each in values.T])
        population = values.mean(axis=0)
        if self.shrink and counts.max() > 1 and len(ids) > 1:
            model = GaussianMean(GaussianPrior(covariance_type="diag"), uncertainty="plug_in")
            model.fit(values, values, groups=codes)
            means = model.means_.reshape(means.shape)
            population = np.atleast_1d(model.population_mean_)
        self._set_fitted(
            {
                **columns,
                "clients_": ids,
                "means_": means,
                "population_means_": population,
                "_at": at,
            }
        )
        return self

    def fit_transform(self, X: TableLike, y: Any = None, *, groups: TableLike = None) -> Any:
        """Learn the clients' means, and add them to the same rows.

        Parameters
        ----------
        X, y, groups : rows
            As for :meth:`fit`.

        Returns
        -------
        dataframe or ndarray of shape (n_rows, n_columns + n_means)
            As of :meth:`transform`.
        """
        return self.fit(X, y, groups=groups).transform(X, groups=groups)

    def transform(self, X: TableLike, *, groups: TableLike = None) -> Any:
        """The table with the clients' means.

        Parameters
        ----------
        X : dataframe or array-like of shape (n_rows, n_columns)
            With the columns of ``fit``.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row.

        Returns
        -------
        dataframe or ndarray of shape (n_rows, n_columns + n_means)
            A frame of the same library, or an array, unless ``set_output`` says otherwise.
        """
        check_is_fitted(self)
        self._column_attributes(X, reset=False)
        codes = match_clients(_required(groups), len(X), self.clients_)
        added = self.means_[codes]
        added[codes < 0] = self.population_means_
        if not hasattr(X, "columns"):
            return np.hstack([np.asarray(X), added])
        frame = nw.from_native(X, eager_only=True)
        names = self.get_feature_names_out()[len(frame.columns) :]
        return frame.with_columns(
            nw.new_series(name, column, backend=frame.implementation).alias(name)
            for name, column in zip(names, added.T, strict=True)
        ).to_native()

    def get_feature_names_out(self, input_features: TableLike = None) -> Any:
        """Names of the columns of the output.

        Parameters
        ----------
        input_features : array-like of str, default=None
            Names of the columns of `X`; None: those of ``fit``, or x0, x1, ...

        Returns
        -------
        ndarray of str
            Those of `X`, and "..._client_mean".
        """
        check_is_fitted(self)
        names = getattr(self, "feature_names_in_", None)
        if input_features is not None:
            names = np.asarray(input_features, dtype=object)
        if names is None:
            names = np.array([f"x{k}" for k in range(self.n_features_in_)], dtype=object)
        added = [f"{names[k]}{_SUFFIX}" for k in self._at]
        return np.array([*names, *added], dtype=object)

    def _values(self, X, at) -> Floats:
        """Values (n, k) of the columns that are used."""
        if hasattr(X, "columns"):
            frame = nw.from_native(X, eager_only=True)
            X = frame.select(*[frame.columns[k] for k in at]).to_numpy()
        else:
            X = np.asarray(X)[:, at]
        return check_array(X, dtype=np.float64, estimator=self, input_name="X")


def _positions(columns: Sequence[Any] | None, X: TableLike, n: int) -> list[int]:
    """Positions of the columns that are named, or ValueError."""
    if columns is None:
        return list(range(n))
    labels, result = column_labels(X), []
    for column in columns:
        if labels is not None and column in list(labels):
            result.append(list(labels).index(column))
        elif isinstance(column, int | np.integer) and 0 <= column < n:
            result.append(int(column))
        else:
            known = f"among {list(labels)[:20]}" if labels is not None else f"from 0 to {n - 1}"
            raise ValueError(f"columns holds {column!r}; expected names or positions {known}.")
    return result


def _required(groups: TableLike) -> Any:
    if groups is None:
        raise ValueError(
            "ClientMeans needs groups, the client id of every row; got groups=None. Put the "
            "pipeline into a ClientColumn, or turn routing on: "
            "sklearn.set_config(enable_metadata_routing=True)."
        )
    return groups
