"""Fitted estimators inside pipelines, wrappers and searches."""

from __future__ import annotations

from typing import Any


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
