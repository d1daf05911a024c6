"""Additive models that runs of PPSGD leave: coefficients of the population and of the clients."""

from typing import Any

import numpy as np
from sklearn.utils.validation import check_is_fitted, validate_data

from pfl_sklearn._client_tables import CoefTableMixin
from pfl_sklearn._clients import Array
from pfl_sklearn._columns import numbers_needed
from pfl_sklearn._rounds.stored import stored_rows
from pfl_sklearn.linear_model._ppsgd._coordinates import (
    coordinates_in,
    predictors_of,
    with_intercept,
)
from pfl_sklearn.linear_model._ppsgd._sparse import FeaturePairs, LocalModels
from pfl_sklearn.linear_model._ppsgd._updates import iterates

_NOISE = ("settled", "variance")  # the server's account of noise that features wait for


class AdditiveModels(CoefTableMixin):
    """Models w of the population and theta_i of the clients, and predictions of their sums."""

    # Of the estimator that this is mixed into.
    n_features_in_: int
    _require_fitted: Any
    _encode_predict: Any
    _population: Any
    _local: Any
    _server: Any
    _single: bool

    def _models(self, state, ids, layout):
        """Population model (p, c) and local models (m, p, c), or LocalModels of sparse rows."""
        local: Any
        population, local = iterates(state)
        coordinates = coordinates_in(state.server)
        if coordinates is not None:
            back = coordinates.back
            population = back(population)
            # Sparse features are scaled and never centred, so their intercept needs no correction.
            sparse = layout is not None
            local = local / coordinates.scale[layout.features, None] if sparse else back(local)
        if layout is not None:
            local = LocalModels(layout, local, len(ids))
        # Noisy sums made these arrays. The account of waiting noise is closed, and says nothing.
        closed = {name: np.zeros_like(state.server[name]) for name in _NOISE if layout is not None}
        server = {**state.server, **closed}
        return {"_population": population, "_local": local, "_server": server}

    def _frozen_layout(self):
        # Only rounds on sparse rows keep account of the noise that features wait for.
        if _NOISE[0] not in self._server:
            return None
        return FeaturePairs(np.zeros(0, dtype=np.int64), len(self._server["coef"]))

    def _predictors(self, X, groups):
        """Predictors (n, c) of rows under the models of their clients; (n,) if they are single."""
        codes, stored = self._encode_predict(X, groups), stored_rows(X)
        if stored is None:
            with numbers_needed(X):
                X = validate_data(self, X, reset=False, dtype=np.float64, accept_sparse="csr")
        else:
            validate_data(self, X, reset=False, skip_check_array=True)
            with numbers_needed():
                X = checked_floats(self, stored)
        design = with_intercept(X, len(self._population) > X.shape[1])
        # A released model has no clients, only the population's coefficients.
        local = self._local if hasattr(self, "clients_") else None
        with np.errstate(over="ignore", invalid="ignore"):  # a local model may diverge under noise
            predictors = predictors_of(design, codes, self._population, local)
        predictors = np.nan_to_num(predictors)
        return predictors[:, 0] if self._single else predictors

    @property
    def population_coef_(self) -> Array:
        """Coefficients w ([c,] d) of the population model."""
        return self._coefficients(self._population)

    @property
    def population_intercept_(self) -> Any:
        """Intercepts ([c]) of the population model."""
        return self._intercepts(self._population)

    @property
    def local_coef_(self) -> Any:
        """Coefficients theta_i (n_clients, [c,] d) of the clients' own models.

        If `X` was sparse, they are a sparse array (n_clients * c, d): c rows for every client.
        """
        self._require_fitted("clients_")
        if hasattr(self._local, "matrix"):
            return self._local.matrix()[:, : self.n_features_in_]
        return self._coefficients(self._local)

    @property
    def local_intercept_(self) -> Array:
        """Intercepts (n_clients[, c]) of the clients' own models."""
        self._require_fitted("clients_")
        return self._intercepts(self._dense_local())

    def _dense_local(self):
        """Local models as an array (n_clients, p, c)."""
        return self._local.dense() if hasattr(self._local, "dense") else self._local

    @property
    def coef_(self) -> Array:
        """Coefficients w + theta_i (n_clients, [c,] d) of every client."""
        self._require_fitted("clients_")
        return self.population_coef_ + self._coefficients(self._dense_local())

    @property
    def intercept_(self) -> Array:
        """Intercepts (n_clients[, c]) of every client."""
        return self.population_intercept_ + self.local_intercept_

    def _coefficients(self, values):
        """Coefficients ([m,] [c,] d) without the intercept, of values ([m,] p, c)."""
        check_is_fitted(self)
        coef = np.moveaxis(values[..., : self.n_features_in_, :], -1, -2)
        return coef[..., 0, :] if self._single else coef

    def _intercepts(self, values):
        """Intercepts ([m,] [c]) of values ([m,] p, c); 0 without one."""
        check_is_fitted(self)
        has_intercept = values.shape[-2] > self.n_features_in_
        intercepts = values[..., -1, :] if has_intercept else np.zeros_like(values[..., 0, :])
        intercepts = intercepts[..., 0] if self._single else intercepts
        return float(intercepts) if intercepts.ndim == 0 else intercepts


def checked_floats(estimator, stored):
    """Stored rows in double precision, after the checks of an estimator's X."""
    return stored.checked(estimator, dtype=np.float64).changed(_as_floats)


def _as_floats(rows):
    return rows.astype(np.float64)
