"""What a fit spends, as accounting events that are known before the data are."""

from __future__ import annotations

import copy
import hashlib
import math
from numbers import Integral
from typing import Any

from sklearn.utils import check_random_state

from pfl_sklearn.privacy._accounting._events import Event, GaussianEvent, PureEvent
from pfl_sklearn.privacy._accounting._gaussian_dp import gdp_mu
from pfl_sklearn.privacy._search_warning import warn_of_search
from pfl_sklearn.privacy._stated import unit_of

# The event of a fit that protects nobody.
UNPROTECTED: tuple[Event, ...] = (PureEvent(math.inf, 0.0, "replace_one"),)


def charge(estimator: Any) -> None:
    """Write what a fit spends to the estimator's ledger, if it has one, or refuse the fit.

    Inside a search of scikit-learn, also warn of what that costs.
    """
    if estimator.ledger is not None:
        charge_events(estimator, estimator._privacy_events())
    warn_of_search(estimator)


def charge_events(
    estimator: Any, events: tuple[Event, ...] | None, *, first_round: int = 0
) -> None:
    """Write events, or None if nothing protects the clients, to the ledger if there is one.

    Rounds that go on from `first_round` of earlier ones have noise of their own, with one seed.
    """
    if estimator.ledger is not None:
        estimator.ledger.spend(
            UNPROTECTED if events is None else events,
            what=type(estimator).__name__,
            unit=unit_of(estimator),
            seed=estimator.random_state,
            first_round=first_round,
        )


def seed_tag(seed: Any, salt: str) -> str:
    """Short text that is the same for seeds that give the same noise."""
    if isinstance(seed, Integral):
        words: Any = int(seed)
    else:
        # What the fit is going to draw from the generator: its state may differ in other things.
        words = copy.deepcopy(check_random_state(seed)).randint(0, 2**31 - 1, size=4).tolist()
    return hashlib.blake2b(f"{salt} {words}".encode(), digest_size=8).hexdigest()


def gaussian_events(
    epsilon: float,
    delta: float,
    *,
    add_remove: float | None = None,
    replace_one: float | None = 1.0,
) -> tuple[Event, ...]:
    """Events of Gaussian releases that spend (epsilon, delta) together.

    `add_remove` and `replace_one` are the sensitivities under these relations, as a share of the
    one that the noise was calibrated to; None is not known.
    """
    if math.isinf(epsilon):
        return UNPROTECTED
    mu = gdp_mu(epsilon, delta)
    under = [None if share is None else share * mu for share in (add_remove, replace_one)]
    return (GaussianEvent(under[0], under[1]),)
