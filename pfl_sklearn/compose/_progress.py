"""Progress of a fit of many fits, as scikit-learn's callbacks see it.

The fit has a task for each of its phases, with a task for each fit in it. Callbacks are told of
tasks, and of no rows.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias

# From the name of a phase and a BatchMapper to a context with the mapper to use in that phase.
Phase: TypeAlias = Callable[[str, Any], AbstractContextManager[Any]]


@contextmanager
def phases(estimator: Any, n_phases: int) -> Iterator[Phase]:
    """Phases of a fit that is decorated with ``with_callbacks``; without callbacks they do nothing.

    A callback that asks for an end of the fit is not heard: half of the folds are no model.
    """
    if not getattr(estimator, "_skl_callbacks", []):
        yield lambda name, run: nullcontext(run)
        return
    root = estimator._init_callback_context(max_subtasks=n_phases)
    root.call_on_fit_task_begin(estimator=estimator)
    yield partial(_phase, estimator, root)
    root.call_on_fit_task_end(estimator=estimator)


@contextmanager
def _phase(estimator, root, name, run):
    # How many fits there will be is not known: folds decide whether there are more.
    with _task(estimator, root, name, None) as task:
        yield partial(_run, run, partial(_task, estimator, task))


@contextmanager
def _task(estimator, parent, name, max_subtasks=0):
    task = parent.subcontext(task_name=name, max_subtasks=max_subtasks)
    task.call_on_fit_task_begin(estimator=estimator)
    yield task
    task.call_on_fit_task_end(estimator=estimator)


def _run(run, task, function, batches, costs=None):
    """Results as of the mapper `run`, in a task for each; workers' results come all together."""
    if run.n_workers > 1:
        with task("parallel-fits"):
            return run(function, batches, costs)
    results = []
    for batch in batches:
        with task("fit"):
            results += run(function, [batch])
    return results
