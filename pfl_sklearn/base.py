"""Mixins of client-aware estimators: client ids, unseen clients, and models to publish."""

from __future__ import annotations

import copy
from numbers import Real
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import pandas as pd
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils import check_consistent_length
from sklearn.utils.validation import check_is_fitted

from pfl_sklearn._clients import Array, Codes, EncodedClients, encode_clients, match_clients
from pfl_sklearn._compat import (
    ClassifierMixin,
    RegressorMixin,
    check_sample_weight,
    names_class,
    num_samples,
)
from pfl_sklearn._fitted import COLUMNS, FittedMixin, check_report, set_copied
from pfl_sklearn._unwrap import suggest_nested_names
from pfl_sklearn._warnings import warn_caller
from pfl_sklearn.privacy._report import PrivacyReport

__all__ = ["ClientMixin", "SingleClientWarning", "UnseenClientsWarning"]


# Parameters that stay with the server: seeds reproduce the noise, files list other fits,
# participants are ids of clients.
_SERVER_ONLY = ("random_state", "ledger", "checkpoint", "participants")

_UNSEEN = (
    "At least half of the rows belong to clients that fit did not see; they get the population "
    "model. Check for folds of whole clients (pfl_sklearn.model_selection.ClientKFold splits "
    "inside them), for the first rows of a sorted table (shuffle it), and for ids of another "
    "table. If you expect new clients, or many have one row only, set unseen='population'."
)


class SingleClientWarning(UserWarning):
    """``fit`` got no client ids and treated all rows as one client's."""


class UnseenClientsWarning(UserWarning):
    """At least half of the rows belong to clients that ``fit`` did not see."""


class ClientMixin(FittedMixin):
    """Mixin for estimators that learn one model per client and a population model.

    Client ids travel as ``groups``, one per row, through scikit-learn's metadata routing. They are
    requested by default, so you need not call ``set_fit_request``. In scikit-learn's tools you
    either turn routing on (``sklearn.set_config(enable_metadata_routing=True)``), or keep the ids
    as a column of `X` and let :class:`~pfl_sklearn.compose.ClientColumn` take them out.

    A subclass calls ``_encode_fit`` in ``fit`` and ``_encode_predict`` wherever it predicts. It
    names its fitted attributes in three tuples:

    - `_client_attributes`: arrays with clients first (those that are not set are skipped);
    - `_population_attributes`: the population model;
    - `_state_attributes`: further attributes that its methods need, independent of the data.
    """

    __metadata_request__fit = {"groups": True}
    __metadata_request__partial_fit = {"groups": True}
    __metadata_request__predict = {"groups": True}
    __metadata_request__predict_proba = {"groups": True}
    __metadata_request__predict_log_proba = {"groups": True}
    __metadata_request__decision_function = {"groups": True}
    __metadata_request__transform = {"groups": True}
    __metadata_request__score = {"groups": True}

    _client_attributes: ClassVar[tuple[str, ...]] = ()
    _population_attributes: ClassVar[tuple[str, ...]] = ()
    _state_attributes: ClassVar[tuple[str, ...]] = ()

    # Set by fit; these are no defaults.
    clients_: Array
    privacy_: PrivacyReport
    unseen: str
    _fitted_with_groups: bool

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "privacy_")

    def set_params(self, **params: Any) -> Self:
        """Set the parameters of this estimator.

        A nested parameter of a component that is given by name (or None) first puts the object
        behind the name in its place: ``set_params(prior__covariance_type="diag")`` works with
        ``prior="gaussian"``. If a parameter is refused, none of the estimator's own changes.

        Parameters
        ----------
        **params : dict
            Parameters by name, nested ones as ``<component>__<parameter>``; their order does not
            matter.

        Returns
        -------
        self
        """
        previous = self.get_params(deep=False)  # type: ignore[attr-defined]
        nested = {name.partition("__")[0] for name in params if "__" in name}
        values = {name: params.get(name, previous[name]) for name in nested & previous.keys()}
        components = {name: self._resolve_component(name, value) for name, value in values.items()}
        try:
            with suggest_nested_names(self):
                return super().set_params(**{**params, **components})  # type: ignore[misc]
        except Exception:  # a grid with one bad value leaves the estimator as it was
            for name, value in previous.items():
                setattr(self, name, value)
            raise

    def _resolve_component(self, name: str, value: Any) -> Any:
        """The component that takes a nested parameter: the given one, or that of its name."""
        if hasattr(value, "set_params"):
            return value
        component = self._default_component(name, value)
        if component is None:
            raise ValueError(
                f"{name}={value!r} of {type(self).__name__} is no estimator, so it has no "
                f"parameters of its own; {name}__... cannot be set."
            )
        return component

    def _default_component(self, name: str, value: Any) -> Any:
        """Object behind parameter `name` when it is a name or None; None if there is none."""
        # Subclasses with components override it.
        return None

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
        if known is None:  # a released population model knows no clients
            return np.full(n_rows, -1, dtype=np.intp)
        if groups is None:
            return self._codes_without_groups(n_rows, known)
        if not self._fitted_with_groups:
            raise ValueError(
                f"groups= was given, but this {type(self).__name__} was fitted without groups, as "
                "one client; fit it with groups=, or predict without them."
            )
        codes = match_clients(groups, n_rows, known)
        self._check_unseen(codes, groups)
        return codes

    def _codes_without_groups(self, n_rows: int, known: Array) -> Codes:
        if len(known) > 1:
            raise ValueError(
                f"This {type(self).__name__} was fitted with {len(known)} clients and must know "
                "whose rows these are. Pass groups= (inside scikit-learn's tools: "
                "sklearn.set_config(enable_metadata_routing=True) and a "
                "pfl_sklearn.metrics.ClientScorer as scoring), or keep the ids as a column of X "
                "and wrap the estimator in pfl_sklearn.compose.ClientColumn, or take one client's "
                "model with for_client(client_id)."
            )
        return np.zeros(n_rows, dtype=np.intp)

    def _check_unseen(self, codes: Codes, groups: Any) -> None:
        unseen, n_rows, answer = codes < 0, len(codes), self.unseen
        n_unseen = int(unseen.sum())
        if not n_unseen or answer == "population" or (answer == "warn" and 2 * n_unseen < n_rows):
            return
        if answer == "error":
            example = np.asarray(groups).ravel()[unseen][:1].tolist()[0]
            raise ValueError(
                f"{n_unseen} of {n_rows} rows belong to clients that fit did not see (such as "
                f"{example!r}), and unseen='error'."
            )
        warn_caller(_UNSEEN, UnseenClientsWarning)

    def for_client(self, client_id: Any) -> Self:
        """Model of one client alone: the population model and that client's own parameters.

        It holds nothing of the other clients but the population model, so you can send it to the
        client. Its ``predict`` needs no ``groups``; its class is the same, and ``clients_`` is
        ``[client_id]``.

        Parameters
        ----------
        client_id : int, str, ...
            One of ``clients_``.

        Raises
        ------
        ValueError
            If `client_id` was not seen in fit, or `privacy_` is not the report of the fitted
            values.
        """
        check_is_fitted(self)
        self._require_fitted("clients_")
        check_report(self)
        clients = self.clients_
        if not np.isscalar(client_id) and np.ndim(client_id):
            raise ValueError(f"client_id must be one id; got {client_id!r}.")
        # A categorical, so that a float id is matched by its exact value.
        position = match_clients(pd.Categorical([client_id]), 1, clients, "client_id")
        if position[0] < 0:
            raise ValueError(
                f"client_id={client_id!r} is not one of the {len(clients)} clients of fit."
            )
        model = self._population_copy()
        personal = {
            name: _select_clients(getattr(self, name), position)
            for name in ("clients_", *self._client_attributes)
            if hasattr(self, name)
        }
        personal["_fitted_with_groups"] = self._fitted_with_groups
        model._set_fitted(personal, dropped=())
        return model

    def release(self) -> Self:
        """Population model alone, which the privacy statement covers and which is safe to publish.

        It is a fitted estimator of the same class that predicts the population model for every row.
        It holds no ``clients_``, no array with a row per client, no messages and no seed.

        Raises
        ------
        ValueError
            If ``privacy_.epsilon`` is infinite, because nothing then protects the population model,
            or if `privacy_` is not the report of the fitted values, for example because attributes
            were set by hand.
        """
        check_is_fitted(self)
        check_report(self)
        report = self.privacy_
        if not np.isfinite(report.epsilon):
            fitted = [name for name in self._population_attributes if hasattr(self, name)]
            public = [name for name in fitted if not name.startswith("_")]
            if len(public) < len(fitted):
                public.insert(0, "the population model")
            name = type(self).__name__
            private = "epsilon" in self.get_params(deep=False)  # type: ignore[attr-defined]
            way_out = "fit with a finite epsilon first" if private else f"{name} has no private fit"
            raise ValueError(
                f"release() of this {name} would publish unprotected values "
                f"({', '.join(public)}), because epsilon is infinite; {way_out}."
            )
        return self._population_copy()

    def _population_copy(self) -> Self:
        """Clone with the population attributes, without those of clients and of the server."""
        model = clone(self)
        model.__dict__.pop("_skl_callbacks", None)  # they may hold scores of all clients
        for name in _SERVER_ONLY:
            if name in model.get_params(deep=False):
                model.set_params(**{name: None})
        shared = ("privacy_", *COLUMNS, *self._state_attributes, *self._population_attributes)
        shared_values = {name: getattr(self, name) for name in shared if hasattr(self, name)}
        set_copied(
            model, {name: copy.deepcopy(value) for name, value in shared_values.items()}, self
        )
        return model

    def _require_fitted(self, attribute: str) -> None:
        """Raise NotFittedError before a fit, and where a released population model lacks it."""
        check_is_fitted(self)
        if not hasattr(self, attribute):
            raise NotFittedError(
                f"This {type(self).__name__} is a released population model; it has no {attribute}."
            )


class ClientRegressorMixin(RegressorMixin):
    """Mixin for regressors with one model per client."""

    @names_class
    def score(
        self, X: Any, y: Any = None, *, groups: Any = None, sample_weight: Any = None
    ) -> float:
        """Coefficient of determination of the predictions, each row by its own client's model.

        Parameters
        ----------
        X : {array-like, sparse matrix} of shape (n_rows, d)
            Rows, as ``predict`` takes them.
        y : array-like of shape (n_rows,) or (n_rows, n_outputs)
            Observed targets.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.
        sample_weight : array-like of shape (n_rows,), default=None
            Weights of the rows in the score.
        """
        predicted = self.predict(X, groups=groups)
        return float(r2_score(y, predicted, sample_weight=sample_weight))


class ClientClassifierMixin(ClassifierMixin):
    """Mixin for classifiers with one model per client."""

    @names_class
    def score(
        self, X: Any, y: Any = None, *, groups: Any = None, sample_weight: Any = None
    ) -> float:
        """Accuracy of the predictions, each row by its own client's model.

        Parameters
        ----------
        X : {array-like, sparse matrix} of shape (n_rows, d)
            Rows, as ``predict`` takes them.
        y : array-like of shape (n_rows,)
            Observed classes.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.
        sample_weight : array-like of shape (n_rows,), default=None
            Weights of the rows in the score.
        """
        predicted = self.predict(X, groups=groups)
        return float(accuracy_score(y, predicted, sample_weight=sample_weight))


class FitRows(NamedTuple):
    """Observations (n,) or (n, d), their clients, and their weights (n,) or None."""

    y: Array
    clients: EncodedClients
    weights: Array | None


def read_rows(estimator: ClientMixin, X: Any, y: Array, groups: Any, sample_weight: Any) -> FitRows:
    """Rows of fit with a positive weight; `y` is validated, and only the length of `X` is read."""
    # A row of weight 0 is absent, and so is a client that has no other rows.
    n_rows = num_samples(X)
    if n_rows == 0:
        raise ValueError(
            f"Found array with 0 sample(s) while a minimum of 1 is required by "
            f"{type(estimator).__name__}."
        )
    check_consistent_length(X, y)
    ids, codes = estimator._encode_fit(groups, n_rows)
    if sample_weight is None:
        return FitRows(y, EncodedClients(ids, codes), None)
    weights = check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
    present = weights > 0  # weight 0 is absence everywhere, so no client is known by it alone
    if present.all():
        return FitRows(y, EncodedClients(ids, codes), weights)
    used = np.bincount(codes[present], minlength=len(ids)) > 0
    remaining = EncodedClients(ids[used], (np.cumsum(used) - 1)[codes[present]])
    return FitRows(y[present], remaining, weights[present])


def client_values(values: Array | None, population: Any, codes: Codes) -> Array:
    """Values (n, ...) of the clients at `codes`; those of the population where a code is -1."""
    if values is None:
        return np.full((len(codes), *np.shape(population)), population)
    personal = values[codes]
    personal[codes < 0] = population
    return personal


def check_level(level: float) -> None:
    """Raise ValueError if a level is no probability."""
    if not (isinstance(level, Real) and 0 < float(level) < 1):
        raise ValueError(f"level must be a number in (0, 1); got {level!r}.")


def _select_clients(value: Any, clients: Codes) -> Any:
    """Rows of some clients, from an array with clients first or from a posterior."""
    return value.of_clients(clients) if hasattr(value, "of_clients") else value[clients]
