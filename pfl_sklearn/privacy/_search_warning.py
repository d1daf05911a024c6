"""The warning of a search over private models, before its first fit.

A search clones its estimator once, in the thread of its caller, before it fits anything there or in
workers. The estimators that are cloned find the search on the call stack.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections import deque
from numbers import Integral
from typing import Any, NamedTuple

from sklearn.model_selection import (
    GridSearchCV,
    ParameterGrid,
    ParameterSampler,
    RandomizedSearchCV,
)

from pfl_sklearn._compat import FIT_OF_A_SEARCH, BaseSearchCV
from pfl_sklearn._nesting import releasing_core
from pfl_sklearn._warnings import callers, warn_caller
from pfl_sklearn.privacy._report import PrivacyWarning
from pfl_sklearn.privacy._spending import (
    SAME_NOISE,
    noise_seed,
    number_of_splits,
    protect,
    relation_of,
    repeated,
    sum_of_deltas,
    total_epsilon,
    with_params,
)

_FITS_OF_A_SEARCH = {"candidate-split-evaluation", "refit-with-best-params"}
_warned: deque[Any] = deque(maxlen=256)  # ids of searches in this process


class PlannedFits(NamedTuple):
    """Fits of the first private estimator that a search comes to."""

    estimator: Any
    events: tuple[Any, ...]  # of one fit
    n_fits: int
    more: bool  # whether there may be more of them


def warn_of_search() -> None:
    """Warn if a search is about to begin, once per search; call it when something is cloned."""
    search = _beginning_search()
    if search is None:
        return
    planned = _planned_fits(search)
    if planned is not None:
        warn_caller(_message(type(search).__name__, planned), PrivacyWarning)


def _beginning_search() -> Any:
    """Search that is fitted further up the call stack, unless it was found before.

    None for a search inside another one, whose warning counts its fits.
    """
    found = (frame.f_locals["self"] for frame in callers() if frame.f_code is FIT_OF_A_SEARCH)
    search = next(found, None)
    task = getattr(search, "_callback_fit_ctx", None)
    if task is None or task.root_uuid in _warned or _is_inside_a_search(task):
        return None
    _warned.append(task.root_uuid)
    return search


def _is_inside_a_search(task: Any) -> bool:
    """Whether a callback context of scikit-learn belongs to a fit of a search."""
    while task is not None:
        if {task.task_name, task.source_task_name} & _FITS_OF_A_SEARCH:
            return True
        task = task.parent
    return False


def _planned_fits(estimator: Any) -> PlannedFits | None:
    """Private fits in one fit of an estimator, or None if it is not known to have any."""
    core = releasing_core(estimator).estimator
    if not isinstance(core, BaseSearchCV):
        events = core._privacy_events() if hasattr(core, "_privacy_events") else None
        return PlannedFits(core, tuple(events), 1, False) if events and protect(events) else None
    candidates, more = _candidates(core)
    found = _first_private(core.estimator, candidates)
    if found is None:
        return None
    n_splits = getattr(core, "n_splits_", None) or number_of_splits(core.cv)
    n_fits = len(candidates) * (n_splits or 1) + bool(core.refit)
    more |= n_splits is None
    return found._replace(n_fits=n_fits * found.n_fits, more=more or found.more)


def _first_private(estimator: Any, candidates: list[dict[str, Any]]) -> PlannedFits | None:
    """Private fits in one fit of the first candidate that has any."""
    for params in candidates:
        with contextlib.suppress(Exception):  # the search will find out that it cannot be fitted
            found = _planned_fits(with_params(estimator, params))
            if found is not None:
                return found
    return None


def _candidates(search: Any) -> tuple[list[dict[str, Any]], bool]:
    """Candidates of a search, or others from the same distributions; whether there may be more."""
    if hasattr(search, "param_grid"):
        return list(ParameterGrid(search.param_grid)), not isinstance(search, GridSearchCV)
    given = getattr(search, "param_distributions", {})
    n = getattr(search, "n_iter", getattr(search, "n_candidates", 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the search itself warns if there are fewer
        drawn = list(ParameterSampler(given, n if isinstance(n, Integral) else 1, random_state=0))
    return drawn, not isinstance(search, RandomizedSearchCV)


def _message(name: str, planned: PlannedFits) -> str:
    estimator, events, n_fits, more = planned
    at_least = "at least " if more else ""
    relation, delta = relation_of(estimator), float(estimator.delta)
    one, total = (total_epsilon(repeated(events, count), delta, relation) for count in (1, n_fits))
    private, why = type(estimator).__name__, ""
    if noise_seed(estimator) is not None and n_fits > 1:
        total, why = math.inf, f": {SAME_NOISE}"
    elif math.isinf(total) and n_fits * sum_of_deltas(events, relation) >= delta:
        why = " (their deltas add up to more)"
    return (
        f"{name} fits this private {private} {at_least}{n_fits} times on the "
        f"same clients. One fit spends epsilon = {one:.4g}; if all fits spend the same, the models "
        f"together cost {at_least}epsilon = {total:.4g} at delta = {delta:.4g} ({relation}){why}. "
        "The scores (cv_results_) and the choice made by them are not protected at all, unless the "
        "held-out rows are public. "
        "pfl_sklearn.model_selection.PrivateSelectCV chooses within a total that you state, "
        "pfl_sklearn.privacy.search_cost(search) reports what a search has cost, and ledger= of "
        f"{private} refuses fits beyond a budget."
    )
