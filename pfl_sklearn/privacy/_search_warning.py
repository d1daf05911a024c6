"""One warning when a scikit-learn search runs over a private estimator.

scikit-learn tells an estimator where it is: a search sets a callback context on what it fits, and
pipelines and :class:`~pfl_sklearn.compose.ClientColumn` pass it on.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from typing import Any

from pfl_sklearn._warnings import warn_caller
from pfl_sklearn.privacy._report import PrivacyWarning
from pfl_sklearn.privacy._stated import (
    SAME_NOISE,
    protect,
    relation_of,
    repeated,
    sum_of_deltas,
    total_epsilon,
)

_FITS_OF_A_SEARCH = {"candidate-split-evaluation", "refit-with-best-params"}
_warned: deque[Any] = deque(maxlen=256)  # ids of searches, of this process
_lock = threading.Lock()


def warn_of_search(estimator: Any) -> None:
    """Warn, once for every search and process, if a search is what fits a private estimator.

    Called at the start of a fit.
    """
    searches = enclosing_searches(estimator)
    if not searches or searches[-1].root_uuid in _warned:
        return
    events = estimator._privacy_events()
    if not events or not protect(events):
        return
    with _lock:
        if searches[-1].root_uuid in _warned:
            return
        _warned.append(searches[-1].root_uuid)
    warn_caller(_message(estimator, tuple(events), searches), PrivacyWarning)


def enclosing_searches(estimator: Any) -> list[Any]:
    """Root contexts of the searches that an estimator is fitted in, innermost first."""
    found, context = [], getattr(estimator, "_parent_callback_ctx", None)
    while context is not None:
        inside = {context.task_name, context.source_task_name} & _FITS_OF_A_SEARCH
        context = context.parent
        if inside:
            while context.task_name != "fit" and context.parent is not None:
                context = context.parent
            found.append(context)
    return found


def planned_fits(search: Any) -> tuple[int, bool]:
    """Number of fits of a search by its root context, and whether there may be more."""
    halving, plain = [], []
    for context in search:
        if context.parent is search and context.task_name == "search":
            plain.append(context.max_subtasks)
        elif context.task_name == "halving-iteration" and context.parent.parent is search:
            halving.append(context.max_subtasks)
    refits = (search.max_subtasks or 1) - 1
    return sum(halving or plain or [1]) + refits, bool(halving) or not plain


def _message(estimator: Any, events: tuple[Any, ...], searches: list[Any]) -> str:
    plans = [planned_fits(search) for search in searches]
    n_fits = math.prod(count for count, _ in plans)
    at_least = "at least " if any(more for _, more in plans) else ""
    relation, delta = relation_of(estimator), float(estimator.delta)
    one, total = (total_epsilon(repeated(events, count), delta, relation) for count in (1, n_fits))
    name, why = type(estimator).__name__, ""
    if getattr(estimator, "random_state", None) is not None and n_fits > 1:
        total, why = math.inf, f" ({SAME_NOISE})"
    elif math.isinf(total) and n_fits * sum_of_deltas(events, relation) >= delta:
        why = " (their deltas add up to more)"
    return (
        f"{searches[0].estimator_name} fits this private {name} {at_least}{n_fits} times on the "
        f"same clients. A fit that spends epsilon = {one:.4g} makes that {at_least}epsilon = "
        f"{total:.4g} at delta = {delta:.4g} ({relation}) for the models together{why}, if all "
        "spend the same. The scores (cv_results_) and the choice made from them are not protected "
        "at all, unless the held-out rows are public. "
        "pfl_sklearn.model_selection.PrivateSelectCV chooses within a total that you state, "
        "pfl_sklearn.privacy.search_cost(search) says what a search has cost, and ledger= of "
        f"{name} refuses fits beyond a budget."
    )
