"""What a fit will cost, read from an estimator's parameters alone.

A private estimator states the accounting events of its fit with ``_privacy_events()``: a tuple,
empty if nothing is released, or None (or an event of infinite epsilon) if nothing protects the
clients. Estimators whose relation or unit is no parameter have ``_privacy_relation`` or
``_privacy_unit``.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from pfl_sklearn._nesting import releasing_core
from pfl_sklearn.privacy._report import learns
from pfl_sklearn.privacy._sampled import events_epsilon


class Stated(NamedTuple):
    """What one fit spends; `events` is None if nothing protects it, and `reason` says why."""

    name: str  # class that releases
    events: tuple[Any, ...] | None
    unit: str
    relation: str
    delta: float
    reason: str = ""


def stated_cost(estimator: Any) -> Stated:
    """Cost of one fit of an unfitted estimator, or of a pipeline or wrapper around one."""
    core, _, steps = releasing_core(estimator)
    name = type(core).__name__
    if not hasattr(core, "_privacy_events"):
        return Stated(name, None, "client", "replace_one", 0.0, f"{name} states no privacy")
    events = core._privacy_events()
    stated = Stated(name, None, unit_of(core), relation_of(core), float(core.delta))
    for step_name, step in steps:
        if learns(step):
            reason = f"step {step_name!r} ({type(step).__name__}) learns without noise"
            return stated._replace(reason=reason)
    if not protect(events):
        return stated._replace(reason=f"nothing protects the clients of this {name}")
    return stated._replace(events=tuple(events))


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
