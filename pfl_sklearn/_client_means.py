"""What estimators of the clients' means share, whatever their likelihood: rows of X count alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from sklearn.utils.validation import validate_data

from pfl_sklearn._clients import Array
from pfl_sklearn._typing import Floats, TableLike
from pfl_sklearn.base import ClientMixin, client_values


class ClientMeansMixin(ClientMixin):
    """Mixin for estimators of `means_` (n_clients[, d]) with standard deviations `stds_`.

    A subclass sets `population_mean_`, `local_means_`, `n_samples_per_client_`, and `shrinkage_` if
    it has one; `_new_client_std` is the standard deviation of a new client's mean.
    """

    means_: Array
    stds_: Array
    local_means_: Array
    n_samples_per_client_: Array
    population_mean_: Any
    _new_client_std: Any

    def summary(self, level: float = 0.95) -> pd.DataFrame:
        """Table of the clients.

        Parameters
        ----------
        level : float in (0, 1), default=0.95
            Probability of the intervals.

        Returns
        -------
        DataFrame
            One row per client (and output), indexed by client id: rows (or trials), the client's
            own mean, the personalized one with its standard deviation and interval, and the
            shrinkage where there is one number for it.
        """
        self._require_fitted("means_")
        lower, upper = self.credible_interval(level)  # type: ignore[attr-defined]
        columns = {
            "n_samples": self.n_samples_per_client_,
            "local_mean": self.local_means_,
            "mean": self.means_,
            "std": self.stds_,
            "lower": lower,
            "upper": upper,
        }
        if hasattr(self, "shrinkage_"):
            columns["shrinkage"] = self.shrinkage_
        index = pd.Index(self.clients_, name="client")
        if self.means_.ndim == 2:
            d = self.means_.shape[1]
            index = pd.MultiIndex.from_product([index, range(d)], names=["client", "output"])
            columns = {
                name: np.repeat(values, d) if values.ndim == 1 else values.ravel()
                for name, values in columns.items()
            }
        return pd.DataFrame(columns, index=index)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()  # type: ignore[misc]
        tags.no_validation = True  # no value of X is read
        tags.input_tags.sparse = True
        tags.input_tags.allow_nan = True
        tags.input_tags.string = True
        outcome = tags.regressor_tags or tags.classifier_tags
        outcome.poor_score = True  # scikit-learn's checks score by features
        return tags


class PredictedMeansMixin(ClientMeansMixin):
    """The same for numbers, of which a prediction is a client's mean."""

    __metadata_request__predict = {"groups": True, "return_std": True}

    def predict(
        self, X: TableLike, *, groups: TableLike = None, return_std: bool = False
    ) -> Floats | tuple[Floats, Floats]:
        """Mean of every row's client; the population mean for unseen clients.

        Parameters
        ----------
        X : array-like of n_rows rows
            Only its length and feature names are read.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.
        return_std : bool, default=False
            Also return the standard deviation of the client's mean (not of a new row).

        Returns
        -------
        y : ndarray of shape (n_rows,) or (n_rows, d)
        std : ndarray of the same shape
            If `return_std`.
        """
        codes = self._encode_predict(X, groups)
        validate_data(self, X, reset=False, skip_check_array=True)
        means = client_values(getattr(self, "means_", None), self.population_mean_, codes)
        if not return_std:
            return means
        return means, client_values(getattr(self, "stds_", None), self._new_client_std, codes)
