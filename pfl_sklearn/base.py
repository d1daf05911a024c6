"""What every client-aware estimator shares: client ids, unseen clients, and who may get what."""

from __future__ import annotations

import copy
from typing import Any, Self

import numpy as np
import pandas as pd
from sklearn.base import ClassifierMixin, RegressorMixin, clone
from sklearn.exceptions import NotFittedError
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils.validation import check_is_fitted

from pfl_sklearn._clients import Array, Codes, EncodedClients, encode_clients, match_clients
from pfl_sklearn._compat import num_samples
from pfl_sklearn._warnings import warn_caller

__all__ = ["ClientMixin", "SingleClientWarning", "UnseenClientsWarning"]


# Parameters that stay with the server: a seed rebuilds the noise, files tell what else was fitted.
_SERVER_ONLY = ("random_state", "ledger", "checkpoint")


class SingleClientWarning(UserWarning):
    """Fit got no client ids, so all rows were taken to belong to one client."""


class UnseenClientsWarning(UserWarning):
    """Not one of the clients asked for was seen in fit, so all got the population model."""


class ClientMixin:
    """Mixin for estimators that learn one model per client and a population model.

    Client ids travel as ``groups``, one per row, through scikit-learn's metadata routing. They
    are requested by default, so no call to ``set_fit_request`` is needed; in scikit-learn's tools
    routing has to be on (``sklearn.set_config(enable_metadata_routing=True)``), or the ids stay a
    column of `X` and :class:`~pfl_sklearn.compose.ClientColumn` takes them out.

    A subclass calls ``_encode_fit`` in ``fit`` and ``_encode_predict`` wherever it predicts, and
    names its fitted attributes in `_client_attributes` (with clients first, those that are set),
    `_population_attributes` (what the population model consists of) and `_state_attributes` (what
    its methods need besides, and does not depend on the data).
    """

    __metadata_request__fit = {"groups": True}
    __metadata_request__partial_fit = {"groups": True}
    __metadata_request__predict = {"groups": True}
    __metadata_request__predict_proba = {"groups": True}
    __metadata_request__predict_log_proba = {"groups": True}
    __metadata_request__decision_function = {"groups": True}
    __metadata_request__transform = {"groups": True}
    __metadata_request__score = {"groups": True}

    _client_attributes: tuple[str, ...] = ()
    _population_attributes: tuple[str, ...] = ()
    _state_attributes: tuple[str, ...] = ()

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "privacy_")

    def _encode_fit(self, groups: Any, n_rows: int) -> EncodedClients:
        """Clients of the rows of fit; without `groups` all rows are one client's."""
        if groups is None:
            warn_caller(
                f"{type(self).__name__}.fit got no groups=, so all {n_rows} rows are taken as one "
                "client and nothing is personalized. If groups was given to a scikit-learn tool, "
                "turn routing on: sklearn.set_config(enable_metadata_routing=True).",
                SingleClientWarning,
            )
            return EncodedClients(np.zeros(1, dtype=np.intp), np.zeros(n_rows, dtype=np.intp))
        return encode_clients(groups, n_rows)

    def _encode_predict(self, X: Any, groups: Any) -> Codes:
        """Position in ``clients_`` of every row's client; -1 for the population model."""
        check_is_fitted(self)
        n_rows = num_samples(X)
        known = getattr(self, "clients_", None)
        if known is None:
            return np.full(n_rows, -1, dtype=np.intp)
        if groups is None:
            return self._without_groups(n_rows, known)
        if not self._fitted_with_groups:  # type: ignore[attr-defined]
            raise ValueError(
                f"groups= was given, but this {type(self).__name__} was fitted without groups, as "
                "one client; fit it with groups= or predict without."
            )
        codes = match_clients(groups, n_rows, known)
        self._check_unseen(codes, groups)
        return codes

    def _without_groups(self, n_rows: int, known: Array) -> Codes:
        if len(known) > 1:
            raise ValueError(
                f"This {type(self).__name__} was fitted with {len(known)} clients and has to "
                "know whose rows these are. Pass groups= (inside scikit-learn's tools: "
                "sklearn.set_config(enable_metadata_routing=True) and a "
                "pfl_sklearn.metrics.ClientScorer as scoring), or keep the ids as a column of X "
                "and wrap the estimator in pfl_sklearn.compose.ClientColumn, or take one client's "
                "model with for_client(client_id)."
            )
        return np.zeros(n_rows, dtype=np.intp)

    def _check_unseen(self, codes: Codes, groups: Any) -> None:
        unseen = codes < 0
        if not unseen.any():
            return
        if self.unseen == "error":  # type: ignore[attr-defined]
            example = np.asarray(groups).ravel()[unseen][:1].tolist()[0]
            raise ValueError(
                f"groups holds clients that fit did not see, such as {example!r} "
                f"({int(unseen.sum())} of {len(codes)} rows), and unseen='error'."
            )
        if unseen.all():
            warn_caller(
                f"None of the clients in groups was seen in fit, so all {len(codes)} rows get the "
                "population model. Are these the same ids?",
                UnseenClientsWarning,
            )

    def for_client(self, client_id: Any) -> Self:
        """Fitted model of one client alone: the population model and that client's own parameters.

        It holds nothing of the other clients beyond the population model, so it can be handed to
        that client. Its ``predict`` needs no ``groups``.

        Parameters
        ----------
        client_id : int, str, ...
            One of ``clients_``.

        Returns
        -------
        estimator
            Of the same class, fitted, with ``clients_ == [client_id]``.

        Raises
        ------
        ValueError
            If `client_id` was not seen in fit.
        """
        check_is_fitted(self)
        self._require_fitted("clients_")
        clients = self.clients_  # type: ignore[attr-defined]
        if not np.isscalar(client_id) and np.ndim(client_id):
            raise ValueError(f"client_id must be one id; got {client_id!r}.")
        found = match_clients(pd.Categorical([client_id]), 1, clients, "client_id")
        if found[0] < 0:
            raise ValueError(
                f"client_id={client_id!r} is not one of the {len(clients)} clients of fit."
            )
        model = self._population_copy()
        model._fitted_with_groups = self._fitted_with_groups  # type: ignore[attr-defined]
        for name in ("clients_", *self._client_attributes):
            if hasattr(self, name):
                setattr(model, name, _of_clients(getattr(self, name), found))
        return model

    def release(self) -> Self:
        """Fitted population model alone: what the privacy statement covers, safe to publish.

        It holds no ``clients_``, no array with a row per client, no messages and no seed. It
        predicts the population model for every row.

        Returns
        -------
        estimator
            Of the same class, fitted.

        Raises
        ------
        ValueError
            If nothing protects the population model (``privacy_.epsilon`` is infinite).
        """
        check_is_fitted(self)
        report = self.privacy_  # type: ignore[attr-defined]
        if not np.isfinite(report.epsilon):
            public = [name for name in self._population_attributes if not name.startswith("_")]
            raise ValueError(
                f"release() of this {type(self).__name__} would publish unprotected values "
                f"({', '.join(public) or 'the population model'}): epsilon is infinite. "
                "Fit with a finite epsilon first."
            )
        return self._population_copy()

    def _population_copy(self) -> Self:
        """Clone with the population attributes alone, and nothing that is the server's."""
        model = clone(self)
        model.__dict__.pop("_skl_callbacks", None)  # they may hold scores of all clients
        for name in _SERVER_ONLY:
            if name in model.get_params(deep=False):
                model.set_params(**{name: None})
        shared = ("privacy_", "n_features_in_", "feature_names_in_", *self._state_attributes)
        for name in (*shared, *self._population_attributes):
            if hasattr(self, name):
                setattr(model, name, copy.deepcopy(getattr(self, name)))
        return model

    def _require_fitted(self, attribute: str) -> None:
        """Raise NotFittedError, or say that a released population model has no such thing."""
        check_is_fitted(self)
        if not hasattr(self, attribute):
            raise NotFittedError(
                f"This {type(self).__name__} is a released population model; it has no {attribute}."
            )


class ClientRegressorMixin(RegressorMixin):
    """Mixin for regressors with one model per client."""

    def score(
        self, X: Any, y: Any = None, *, groups: Any = None, sample_weight: Any = None
    ) -> float:
        """Coefficient of determination of the predictions for the rows' own clients.

        Parameters
        ----------
        X : {array-like, sparse matrix} of shape (n_rows, d)
            As for ``predict``.
        y : array-like of shape (n_rows,) or (n_rows, n_outputs)
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.
        sample_weight : array-like of shape (n_rows,), default=None

        Returns
        -------
        float
        """
        predicted = self.predict(X, groups=groups)
        return float(r2_score(y, predicted, sample_weight=sample_weight))


class ClientClassifierMixin(ClassifierMixin):
    """Mixin for classifiers with one model per client."""

    def score(
        self, X: Any, y: Any = None, *, groups: Any = None, sample_weight: Any = None
    ) -> float:
        """Accuracy of the predictions for the rows' own clients.

        Parameters
        ----------
        X : {array-like, sparse matrix} of shape (n_rows, d)
            As for ``predict``.
        y : array-like of shape (n_rows,)
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.
        sample_weight : array-like of shape (n_rows,), default=None

        Returns
        -------
        float
        """
        predicted = self.predict(X, groups=groups)
        return float(accuracy_score(y, predicted, sample_weight=sample_weight))


def client_values(values: Array | None, population: Any, codes: Codes) -> Array:
    """Values (n, ...) of the clients at `codes`, and the population's where a code is -1.

    `values` (m, ...) has clients first; None if no client is known.
    """
    if values is None:
        return np.full((len(codes), *np.shape(population)), population)
    own = values[codes]
    own[codes < 0] = population
    return own


def _of_clients(value: Any, clients: Codes) -> Any:
    """Part of some clients of an array with clients first, or of a posterior."""
    return value.of_clients(clients) if hasattr(value, "of_clients") else value[clients]
