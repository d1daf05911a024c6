"""Spending: what a fit costs, known from an estimator's parameters before any data are read.

A private estimator states the accounting events of its fit with ``_privacy_events()``: a tuple,
which is empty if nothing is released. None, or an event with infinite epsilon, means that nothing
protects the clients. Estimators without a parameter for the relation or the unit have
``_privacy_relation`` or ``_privacy_unit``.

We look inside pipelines, ClientColumn and ``GridSearchCV``. For any other meta-estimator we do not
know how often it fits the private estimator, or what else it learns.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import math
from collections import Counter
from collections.abc import Iterable
from numbers import Integral
from typing import Any, NamedTuple

from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, ParameterGrid, check_cv
from sklearn.utils import check_random_state

from pfl_sklearn._nesting import releasing_core
from pfl_sklearn.privacy._accounting._composition import events_epsilon
from pfl_sklearn.privacy._accounting._events import Event, GaussianEvent, PureEvent
from pfl_sklearn.privacy._accounting._gaussian_dp import gdp_mu
from pfl_sklearn.privacy._vouching import learns

# The events of a fit that protects nobody.
UNPROTECTED: tuple[Event, ...] = (PureEvent(math.inf, 0.0, "replace_one"),)
SAME_NOISE = (
    "random_state gives all of its fits the same noise, which anyone can cancel by taking "
    "differences of their models; use random_state=None"
)


class Stated(NamedTuple):
    """What one fit spends; `events` is None if nothing protects it, and `reason` says why.

    The fit of a search is many of what releases: `n_fits`, whose events are all in `events`.
    """

    name: str  # class that releases
    events: tuple[Any, ...] | None
    unit: str
    relation: str
    delta: float
    reason: str = ""
    n_fits: int = 1
    seeded: bool = False


def stated_cost(estimator: Any) -> Stated:
    """Cost of one fit of an unfitted estimator, or of what is around one: see the module."""
    core, _, steps = releasing_core(estimator)
    stated = _of_grid(core) if type(core) is GridSearchCV else _of_core(core)
    for name, step in steps:
        if learns(step):
            reason = f"step {name!r} ({type(step).__name__}) learns without noise"
            return stated._replace(events=None, reason=reason)
    return stated


def of_all_fits(stated: Stated, n_fits: int) -> Stated:
    """The same, as one of several fits in all: noise that they share protects none of them."""
    if stated.events and stated.seeded and n_fits > 1:
        return stated._replace(events=None, reason=SAME_NOISE)
    return stated


def with_params(estimator: Any, params: dict[str, Any]) -> Any:
    """Unfitted estimator of a candidate."""
    return clone(estimator).set_params(**clone(params, safe=False))


def _of_core(core: Any) -> Stated:
    name = type(core).__name__
    if not hasattr(core, "_privacy_events"):
        return Stated(name, None, "client", "replace_one", 0.0, f"{name} states no privacy")
    seeded = getattr(core, "random_state", None) is not None
    promise = unit_of(core), relation_of(core), float(core.delta)
    events = core._privacy_events()
    if not protect(events):
        reason = f"nothing protects the clients of this {name}"
        return Stated(name, None, *promise, reason, seeded=seeded)
    return Stated(name, tuple(events), *promise, seeded=seeded)


def _of_grid(search: Any) -> Stated:
    """Cost of one fit of a grid search: all candidates on all splits, and the refit of one."""
    costs = [
        stated_cost(with_params(search.estimator, params))
        for params in ParameterGrid(search.param_grid)
    ]
    n_splits, n_refits = _n_splits(search.cv), int(bool(search.refit))
    if n_splits is None:
        reason = "how often the inner GridSearchCV fits is not known beforehand: cv is no number"
        return costs[0]._replace(events=None, reason=reason)
    n_fits = n_splits * sum(cost.n_fits for cost in costs)
    n_fits += n_refits * max(cost.n_fits for cost in costs)
    costs = [of_all_fits(cost, n_fits) for cost in costs]
    unprotected = [cost for cost in costs if cost.events is None]
    dearest = unprotected or [cost for cost in costs if cost.events] or costs
    one = dearest[0]._replace(n_fits=n_fits)
    if unprotected:
        return one
    if len(set(dearest)) > 1:
        reason = "the candidates of the inner GridSearchCV spend differently: its refit is unknown"
        return one._replace(events=None, reason=reason)
    events = (one.events or ()) * (n_splits * len(dearest) + n_refits)
    return one._replace(events=events)


def _n_splits(cv: Any) -> int | None:
    """Number of splits of a search, or None if the data decide on it."""
    if cv is None or isinstance(cv, Integral) or hasattr(cv, "n_splits"):
        return int(check_cv(cv).get_n_splits())
    return None


def relation_of(core: Any) -> str:
    """Neighbouring relation that the release of an estimator is stated for."""
    named = getattr(core, "_privacy_relation", None)
    return str(named if named is not None else getattr(core, "relation", "replace_one"))


def unit_of(core: Any) -> str:
    """What the release of an estimator protects."""
    named = getattr(core, "_privacy_unit", None)
    return str(named if named is not None else getattr(core, "unit", "client"))


def protect(events: Iterable[Any] | None) -> bool:
    """Whether events have a finite epsilon; that of no event at all is 0."""
    if events is None:
        return False
    return all(math.isfinite(getattr(event, "epsilon", 0.0)) for event in events)


def total_epsilon(events: Iterable[Any], delta: float, relation: str) -> float:
    """Epsilon of all events together; at delta = 0 that of pure ones only is finite."""
    if delta > 0:
        return float(events_epsilon(events, delta, relation))
    spent = [event.spending(relation) for event in events]
    if any(one.mu > 0 or one.rounds or any(pair[1] > 0 for pair in one.pure) for one in spent):
        return math.inf
    return math.fsum(epsilon for one in spent for epsilon, _ in one.pure)


def sum_of_deltas(events: Iterable[Any], relation: str) -> float:
    """What the deltas of events that state one add up to; no smaller delta has an epsilon."""
    spent = [event.spending(relation) for event in events]
    return math.fsum(pair[1] for one in spent for pair in one.pure)


def repeated(events: Iterable[Any], n_fits: int = 1) -> tuple[Any, ...]:
    """Events of `n_fits` fits, equal ones put together where an event can count."""
    found: list[Any] = []
    for event, count in Counter(events).items():
        for name in ("n_rounds", "n_releases"):
            if hasattr(event, name):
                more = getattr(event, name) * count * n_fits
                found.append(dataclasses.replace(event, **{name: more}))
                break
        else:
            found += [event] * (count * n_fits)
    return tuple(found)


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
