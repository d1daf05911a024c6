"""Rounds under scikit-learn's callbacks, and observers of rounds in general."""

from collections.abc import Callable
from typing import Any

from pfl_sklearn._rounds.loop import State
from pfl_sklearn.privacy import PrivacyReport

_UNFINISHED = "The fit has not ended."


def observer(estimator, X, y, groups, n_rounds, attributes):
    """Function for `run_rounds` that runs an estimator's callbacks, and one for their end.

    The first is None if there are no callbacks.

    Parameters
    ----------
    estimator : estimator
        With scikit-learn's callback support, inside its ``fit``.
    X, y, groups
        As given to ``fit``, for the callbacks.
    n_rounds : int
        Rounds to come.
    attributes : callable
        From a state to the fitted attributes that make the estimator ready to predict.

    Notes
    -----
    Callbacks see the estimator with these attributes and a report that promises nothing. The
    arrays are views of the state, which the next round changes: a callback that keeps what it sees
    has to copy it.
    """
    context = estimator._init_callback_context(max_subtasks=n_rounds)
    if not getattr(estimator, "_skl_callbacks", []):
        return None, lambda: None
    metadata = None if groups is None else {"groups": groups}
    shared: dict[str, Any] = {"estimator": estimator, "X": X, "y": y, "metadata": metadata}
    context.call_on_fit_task_begin(**shared)

    def observe(state):
        def visible():
            # Rounds that go on may still leak, so nothing is promised yet.
            unfinished = PrivacyReport.unprotected(_UNFINISHED)
            return {"privacy_": unfinished, **attributes(state.view())}

        task = context.subcontext(task_name="round")
        task.call_on_fit_task_begin(**shared)
        return task.call_on_fit_task_end(**shared, reconstruction_attributes=visible)

    return observe, lambda: context.call_on_fit_task_end(**shared)


def both(first: Callable[[State], bool] | None, second: Callable[[State], bool]) -> Any:
    """Observer that calls two, of which the first may be None; either of them ends the run."""
    if first is None:
        return second

    def observe(state):
        stop = first(state)  # both are called, whatever the first says
        return second(state) or stop

    return observe
