"""Fits that protect rows and publish every client: parameters, checks, and what is handed out."""

from __future__ import annotations

import math
import reprlib
from typing import Any, Self

import numpy as np
from sklearn.utils.validation import check_is_fitted

from pfl_sklearn._fitted import check_report
from pfl_sklearn.base import ClientMixin
from pfl_sklearn.privacy import PureEvent
from pfl_sklearn.privacy._report import private_report
from pfl_sklearn.statistics import ClientStatistics

_ADVERSARY = (
    "anyone who sees what is published, even with knowledge of all other rows; the server that "
    "adds the noise is trusted with the rows"
)
_TABLES = (
    "values never cause a refusal: what is no number counts as the middle of the bounds, and the "
    "rest is cut to them; only shapes and the public ids do"
)


# Parameters that other fits do not use, and their defaults.
_OF_PUBLISHED = {
    **dict.fromkeys(("bounds", "grid", "clients", "rows_per_person")),
    "target": "population",
}


def is_publishing(params: Any, unit: str) -> bool:
    """Whether a fit publishes clients; refuses combinations that promise nothing sensible."""
    if params.publish is None and params.unit == "client":
        for name, default in _OF_PUBLISHED.items():
            value = getattr(params, name, default)
            if value is not None if default is None else value != default:
                raise ValueError(
                    f"{name} has no effect without publish='clients'; got "
                    f"{name}={reprlib.repr(value)}."
                )
        return False
    if params.publish is None:
        raise ValueError(
            f"unit={params.unit!r} needs publish='clients', which prints every client's estimate; "
            "without it, a fit protects whole clients (unit='client')."
        )
    if params.unit != unit:
        raise ValueError(
            f"publish='clients' needs unit={unit!r}; got unit={params.unit!r}, which would hide "
            "the clients that are to be published."
        )
    if math.isinf(params.epsilon):
        raise ValueError(
            "publish='clients' needs a finite epsilon, the loss of one "
            f"{unit}; got inf, which protects nobody."
        )
    return True


def refuse_left_out(statistics: ClientStatistics) -> None:
    """Refuse statistics without the rows that had missing values, whose numbers would tell."""
    if statistics.n_left_out > 0:
        raise ValueError(
            "statistics that left out rows with missing values are not supported with "
            "publish='clients', because numbers of rows are public; give those rows a value."
        )


def refuse_unused(params: Any, names: tuple[str, ...]) -> None:
    """Refuse parameters of other releases, which would have no effect."""
    for name in names:
        if getattr(params, name) is not None:
            raise ValueError(f"{name} has no effect with publish='clients'; leave it at None.")


def published_events(params: Any) -> tuple[PureEvent, ...]:
    """Accounting events of a fit that publishes."""
    return (PureEvent(float(params.epsilon), 0.0, relation_of(params)),)


def relation_of(params: Any) -> str:
    """Relation of a fit that publishes: an event is there or not, a row has another value."""
    # Given the list of clients, a row of one of them, too, is there or not.
    has_list = getattr(params, "clients", None) is not None
    return "add_remove" if params.unit == "event" or has_list else "replace_one"


def published_report(
    params: Any,
    released: tuple[str, ...],
    facts: dict[str, Any],
    n_clients: int,
    *more: str,
    tables: str = _TABLES,
) -> Any:
    """Report of a fit that publishes every client."""
    one = "an event" if params.unit == "event" else f"a {params.unit}"
    sizes = "the number of clients and of rows of each client are public"
    membership = f"which client {one} belongs to is public"
    if getattr(params, "clients", None) is not None:
        sizes = "the list of clients is public"
        membership = "rows of other clients are left out, and ids of rows are valid"
    return private_report(
        facts,
        unit=params.unit,
        relation=relation_of(params),
        rows_per_person=params.rows_per_person,
        adversary=_ADVERSARY,
        tables=tables,
        arithmetic="noise and sums are whole numbers, drawn and added exactly",
        n_clients=n_clients,
        seeded=params.random_state is not None,
        released=released,
        assumptions=(membership, *more),
        public=sizes,
    )


class PublishesClients(ClientMixin):
    """Estimators of means whose fits may protect rows and publish every client."""

    def for_client(self, client_id: Any) -> Self:
        """Model of one client alone, or the whole model where every client is published.

        Parameters
        ----------
        client_id : int, str, ...
            One of ``clients_``.

        Raises
        ------
        ValueError
            If `client_id` was not seen in fit, or `privacy_` is not the report of the fitted
            values. Also as :meth:`release`, where every client is published.
        """
        alone = super().for_client(client_id)
        return self.release() if self._is_published else alone

    def release(self) -> Self:
        """What the privacy statement covers: the population, or with ``publish="clients"`` all.

        Raises
        ------
        ValueError
            If ``privacy_.epsilon`` is infinite; if every client was published with a seed, with
            which the noise can be removed; or if `privacy_` is not the report of the fitted values.
        """
        population = super().release()
        if not self._is_published:
            return population
        if self.privacy_.noise_reproducible:
            raise ValueError(
                "release() of a fit with random_state would publish estimates whose noise anyone "
                "who knows the seed can remove; fit with random_state=None."
            )
        return self._whole_copy()

    @property
    def _privacy_relation(self):
        return None if self.publish is None else relation_of(self)  # type: ignore[attr-defined]

    def _spread_between(self):
        """Standard deviation of clients' values in the population."""
        return float(np.sqrt(self.prior_.moments()[1]).item())  # type: ignore[attr-defined]

    @property
    def _is_published(self):
        check_is_fitted(self)
        check_report(self)
        return self.privacy_.unit != "client"

    def _whole_copy(self):
        """Copy of the model with all clients, without the ledger."""
        model = self._population_copy()
        names = ("clients_", "_fitted_with_groups", *self._client_attributes)
        values = {name: getattr(self, name) for name in names if hasattr(self, name)}
        model._set_fitted(values, dropped=())
        return model
