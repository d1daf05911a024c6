"""Spending: the cost of a fit, derived from an estimator's parameters before any data are read.

A private estimator gives the accounting events of its fit by ``_privacy_events()``: a tuple, which
is empty if nothing is released. None, or an event with infinite epsilon, means that nothing
protects the clients. Estimators without a parameter for the relation or the unit have
``_privacy_relation`` or ``_privacy_unit``; those whose `random_state` is not always the seed of
their noise have ``_noise_seed``.

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

from pfl_sklearn._unwrap import core_estimator, path_to_core
from pfl_sklearn.privacy._accounting._composition import events_epsilon
from pfl_sklearn.privacy._accounting._events import Event, GaussianEvent, PureEvent
from pfl_sklearn.privacy._accounting._gaussian_dp import gdp_mu
from pfl_sklearn.privacy._pipeline_report import describe_leak

# Events of a fit that protects nobody: infinite under every relation.
UNPROTECTED: tuple[Event, ...] = (PureEvent(math.inf, 0.0, "replace_one"),)
SAME_NOISE = (
    "random_state gives all of its fits the same noise, which anyone can cancel by taking "
    "differences of their models; use random_state=None"
)


class StatedCost(NamedTuple):
    """Cost of one fit.

    One fit of a search fits the private estimator `n_fits` times. `events` holds the events of all
    of these fits.
    """

    events: tuple[Any, ...] | None  # None: nothing protects the clients
    unit: str
    relation: str
    delta: float
    reason: str = ""  # why nothing protects them
    n_fits: int = 1
    seeded: bool = False


def stated_cost(estimator: Any) -> StatedCost:
    """Cost of one fit of an unfitted estimator, alone or inside a pipeline, wrapper or search."""
    core = core_estimator(estimator)
    _, steps = path_to_core(estimator)
    # A subclass of GridSearchCV may fit more often, and other searches choose candidates at random
    # or by scores: before the fit, nobody knows how often they fit which candidate.
    stated = _grid_cost(core) if type(core) is GridSearchCV else _core_cost(core)
    # A step that learns without noise breaks the promise of the estimator after it.
    for name, step in steps:
        if leak := describe_leak(name, step):
            return stated._replace(events=None, reason=leak)
    return stated


def cost_if_repeated(stated: StatedCost, n_fits: int) -> StatedCost:
    """Cost of one of `n_fits` fits, which is unprotected if a seed gives all the same noise."""
    # A single fit may have a seed: it shares its noise with no other fit.
    if stated.events and stated.seeded and n_fits > 1:
        return stated._replace(events=None, reason=SAME_NOISE)
    return stated


def with_params(estimator: Any, params: dict[str, Any]) -> Any:
    """Unfitted estimator with the parameters of a candidate."""
    return clone(estimator).set_params(**clone(params, safe=False))


def _core_cost(core: Any) -> StatedCost:
    """Cost of one fit of an estimator that is no pipeline, wrapper or grid search."""
    name = type(core).__name__
    # The class, because a frozen estimator has the attributes of the estimator that it holds.
    if not hasattr(type(core), "_privacy_events"):
        return StatedCost(None, "client", "replace_one", 0.0, f"{name} gives no privacy guarantee")
    # None takes the seed from the operating system, so no other fit has the same noise.
    seeded = noise_seed(core) is not None
    promise = unit_of(core), relation_of(core), float(core.delta)
    events = core._privacy_events()
    # None and an event with infinite epsilon mean the same and are counted alike.
    if not have_finite_epsilon(events):
        reason = f"nothing protects the clients of this {name}"
        return StatedCost(None, *promise, reason, seeded=seeded)
    return StatedCost(tuple(events), *promise, seeded=seeded)


def _grid_cost(search: Any) -> StatedCost:
    """Cost of one fit of a grid search: every candidate on every split, and one refit."""
    costs = [
        stated_cost(with_params(search.estimator, params))
        for params in ParameterGrid(search.param_grid)
    ]
    n_splits, n_refits = number_of_splits(search.cv), int(bool(search.refit))
    # Splits by groups or by a generator are known only once the data are there.
    if n_splits is None:
        reason = "how often the inner GridSearchCV fits depends on the data: cv is not a number"
        return costs[0]._replace(events=None, reason=reason)
    n_fits = n_splits * sum(cost.n_fits for cost in costs)
    # Which candidate is refitted is unknown: we count the one that fits most often.
    n_fits += n_refits * max(cost.n_fits for cost in costs)
    costs = [cost_if_repeated(cost, n_fits) for cost in costs]
    # One unprotected candidate decides. Otherwise a candidate that releases something represents
    # all, as those that release nothing cost nothing.
    unprotected = [cost for cost in costs if cost.events is None]
    decisive = unprotected or [cost for cost in costs if cost.events] or costs
    stated = decisive[0]._replace(n_fits=n_fits)
    if unprotected:
        return stated
    # Fits on the splits could be added up, but the refit has the events of an unknown candidate.
    # Seeds do not matter here: if several fits had the same noise, they would be unprotected.
    spent = {(cost.events, cost.unit, cost.relation, cost.delta) for cost in decisive}
    if stated.events and len(spent) > 1:
        reason = (
            "the candidates of the inner GridSearchCV spend different amounts, and it is unknown "
            "which of them is refitted"
        )
        return stated._replace(events=None, reason=reason)
    return stated._replace(events=(stated.events or ()) * (n_splits * len(decisive) + n_refits))


def number_of_splits(cv: Any) -> int | None:
    """Number of splits of a search, or None if it depends on the data."""
    if cv is None or isinstance(cv, Integral) or hasattr(cv, "n_splits"):
        return int(check_cv(cv).get_n_splits())
    return None


def relation_of(core: Any) -> str:
    """Neighbouring relation that the release of an estimator is stated for."""
    # "replace_one" by default, as mechanisms are calibrated to it.
    return str(getattr(core, "_privacy_relation", None) or getattr(core, "relation", "replace_one"))


def unit_of(core: Any) -> str:
    """Unit that the release of an estimator protects."""
    return str(getattr(core, "_privacy_unit", None) or getattr(core, "unit", "client"))


def noise_seed(core: Any) -> Any:
    """Seed with which the noise of an estimator can be drawn again, or None."""
    return getattr(core, "_noise_seed", getattr(core, "random_state", None))


def have_finite_epsilon(events: Iterable[Any] | None) -> bool:
    """Whether events have a finite epsilon; without any event it is 0."""
    if events is None:
        return False
    # Gaussian events have a mu and no epsilon; estimators state None where there is no noise.
    return all(math.isfinite(getattr(event, "epsilon", 0.0)) for event in events)


def total_epsilon(events: Iterable[Any], delta: float, relation: str) -> float:
    """Epsilon of all events together; at delta = 0 it is finite for pure events only."""
    # Gaussian noise and loss distributions need a delta above 0. Without it only pure epsilons add
    # up.
    if delta > 0:
        return float(events_epsilon(events, delta, relation))
    spendings = [event.spending(relation) for event in events]
    pairs = [pair for spending in spendings for pair in spending.pure]
    noisy = any(spending.mu > 0 or spending.rounds for spending in spendings)
    if noisy or any(own_delta > 0 for _, own_delta in pairs):
        return math.inf
    return math.fsum(epsilon for epsilon, _ in pairs)


def sum_of_deltas(events: Iterable[Any], relation: str) -> float:
    """Sum of the deltas that events state; epsilon is infinite at any smaller delta."""
    spendings = [event.spending(relation) for event in events]
    return math.fsum(delta for spending in spendings for _, delta in spending.pure)


def merge_events(events: Iterable[Any], n_fits: int = 1) -> tuple[Any, ...]:
    """Events of `n_fits` fits, with equal ones merged where an event has a count."""
    merged: list[Any] = []
    for event, count in Counter(events).items():
        # An event with a count costs what its repetitions cost, and is read and stored as one.
        for name in ("n_rounds", "n_releases"):
            if hasattr(event, name):
                more = getattr(event, name) * count * n_fits
                merged.append(dataclasses.replace(event, **{name: more}))
                break
        else:  # a pair (epsilon, delta) has no count
            merged += [event] * (count * n_fits)
    return tuple(merged)


def seed_tags(seed: Any, salt: str, end: int) -> list[str]:
    """Digests for the rounds before `end`, equal for seeds that give them the same noise."""
    if isinstance(seed, Integral):
        state: Any = int(seed)  # numpy's integers print differently, but seed the same noise
    else:
        # The integers that the fit will draw: generators may differ without changing the noise.
        state = copy.deepcopy(check_random_state(seed)).randint(0, 2**31 - 1, size=4).tolist()
    # Salted by the ledger's id, so that tags in two ledgers do not reveal a common seed. Hashes of
    # 64 bits collide by chance once in 10^19, and then too much is counted, never too little.
    texts = (f"{salt} {number} {state}" for number in range(end))
    return [hashlib.blake2b(text.encode(), digest_size=8).hexdigest() for text in texts]


def gaussian_events(
    epsilon: float,
    delta: float,
    *,
    add_remove: float | None = None,
    zero_out: float | None = None,
    replace_one: float | None = 1.0,
) -> tuple[Event, ...]:
    """Events of Gaussian releases that together spend (epsilon, delta).

    `add_remove`, `zero_out` and `replace_one` are the sensitivities under these relations, divided
    by the sensitivity that the noise was calibrated to. None means unknown.
    """
    if math.isinf(epsilon):
        return UNPROTECTED
    # Noise is sensitivity / mu: the same noise at a share of the sensitivity has that share of mu.
    mu = gdp_mu(epsilon, delta)
    removed, replaced, zeroed = (
        None if share is None else share * mu for share in (add_remove, replace_one, zero_out)
    )
    return (GaussianEvent(removed, replaced, mu_zero_out=zeroed),)
