"""Fitted estimators inside pipelines, wrappers and searches."""

from __future__ import annotations

from typing import Any, NamedTuple

from sklearn.frozen import FrozenEstimator
from sklearn.pipeline import Pipeline

_PACKAGE = "pfl_sklearn."


def inner_estimator(estimator: Any) -> Any:
    """Fitted estimator directly inside a search, wrapper or pipeline, or None."""
    for name in ("best_estimator_", "estimator_"):
        if hasattr(estimator, name):
            return getattr(estimator, name)
    return estimator.steps[-1][1] if hasattr(estimator, "steps") else None


def predicting_estimator(estimator: Any) -> Any:
    """What a search predicts with (its own ``predict`` takes no groups), or the estimator."""
    return getattr(estimator, "best_estimator_", estimator)


def innermost_estimator(estimator: Any) -> Any:
    """Fitted estimator at the bottom of all nesting."""
    inner = inner_estimator(estimator)
    return estimator if inner is None else innermost_estimator(inner)


class Core(NamedTuple):
    """What releases inside a pipeline or wrapper: see :func:`releasing_core`."""

    estimator: Any
    prefix: str  # of the names of its parameters, as in ``set_params``
    steps: list[tuple[str, Any]]  # that come before it


def releasing_core(estimator: Any) -> Core:
    """The first estimator, fitted or not, from the outside in that states what its fit releases.

    Looks into what fits its estimator exactly once: pipelines (the last step), ClientColumn,
    FrozenEstimator. If there is none in these: what is innermost of them.
    """
    prefix, steps = "", []
    while True:
        if isinstance(estimator, Pipeline):
            steps += estimator.steps[:-1]
            name, estimator = estimator.steps[-1]
        elif _fits_once(estimator):
            name, estimator = "estimator", estimator.estimator
        else:
            return Core(estimator, prefix, steps)
        prefix += f"{name}__"


def is_transparent(estimator: Any) -> bool:
    """Whether a wrapper fits what it holds once, and all that it learns itself is in its steps."""
    return isinstance(estimator, Pipeline) or _fits_once(estimator)


def _fits_once(estimator: Any) -> bool:
    """Whether an estimator is a ClientColumn, the package's one wrapper, or frozen."""
    if isinstance(estimator, FrozenEstimator):
        return True
    ours = type(estimator).__module__.startswith(_PACKAGE)
    return ours and hasattr(estimator, "estimator") and not hasattr(estimator, "_privacy_events")
