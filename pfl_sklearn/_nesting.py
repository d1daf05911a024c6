"""Fitted estimators inside pipelines, wrappers and searches."""

from __future__ import annotations

from typing import Any, NamedTuple


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

    If there is none: what is innermost.
    """
    prefix, steps = "", []
    while not hasattr(estimator, "_privacy_events"):
        if hasattr(estimator, "steps"):
            steps += estimator.steps[:-1]
            name, estimator = estimator.steps[-1]
        elif hasattr(estimator, "estimator"):
            name, estimator = "estimator", estimator.estimator
        else:
            break
        prefix += f"{name}__"
    return Core(estimator, prefix, steps)
