"""Estimators inside pipelines, wrappers and searches, fitted or not.

A class of this package that wraps one estimator declares it with the class attribute ``_wraps``. A
parameter called ``estimator`` alone means nothing: it may be a recipe that the class itself uses.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sklearn.frozen import FrozenEstimator
from sklearn.pipeline import Pipeline


class Wraps(NamedTuple):
    """Declaration of a wrapper, in its class attribute ``_wraps``."""

    parameter: str  # that holds the wrapped estimator
    fitted: str  # attribute that holds the fitted one
    fits_once: bool  # and learns nothing else from the data


class Core(NamedTuple):
    """The estimator that releases something inside a pipeline or wrapper."""

    estimator: Any
    prefix: str  # of the names of its parameters, as in ``set_params``
    steps: list[tuple[str, Any]]  # that precede it


def inner_estimator(estimator: Any) -> Any:
    """Fitted estimator directly inside a search, wrapper or pipeline, or None."""
    name = _fitted_attribute(estimator)
    if name is not None:
        return getattr(estimator, name)
    return estimator.steps[-1][1] if hasattr(estimator, "steps") else None


def predicting_estimator(estimator: Any) -> Any:
    """Best estimator of a search, whose own ``predict`` takes no groups, or `estimator` itself."""
    return getattr(estimator, "best_estimator_", estimator)


def innermost_estimator(estimator: Any) -> Any:
    """Fitted estimator at the bottom of all nesting."""
    inner = inner_estimator(estimator)
    return estimator if inner is None else innermost_estimator(inner)


def feature_names_of(estimator: Any) -> list[str] | None:
    """Names of the features of the innermost estimator; None if nobody gives any.

    They are its own, or else those that the steps before it, or a wrapper around it, give.
    """
    names = getattr(innermost_estimator(estimator), "feature_names_in_", None)
    while names is None and estimator is not None:
        names = _names_out(estimator)
        estimator = inner_estimator(estimator)
    return None if names is None else [str(name) for name in names]


def _names_out(estimator: Any) -> Any:
    """Names of the columns that the last step of a pipeline gets; None if unknown."""
    if len(getattr(estimator, "steps", ())) < 2:
        return None
    try:
        return estimator[:-1].get_feature_names_out()
    except (AttributeError, ValueError):  # a step that names no outputs
        return None


def releasing_core(estimator: Any) -> Core:
    """The estimator inside pipelines and wrappers that fit it exactly once.

    These are pipelines (their last step), frozen estimators and transparent wrappers.
    """
    prefix, steps = "", list[tuple[str, Any]]()
    while is_transparent(estimator):
        if isinstance(estimator, Pipeline):
            steps += estimator.steps[:-1]
            name, estimator = estimator.steps[-1]
        else:
            declared = _declared(estimator)
            name = "estimator" if declared is None else declared.parameter
            estimator = getattr(estimator, name)
        prefix += f"{name}__"
    return Core(estimator, prefix, steps)


def is_transparent(estimator: Any) -> bool:
    """Whether an estimator fits what it holds once, and learns nothing else except in its steps."""
    if isinstance(estimator, Pipeline | FrozenEstimator):
        return True
    declared = _declared(estimator)
    return declared is not None and declared.fits_once and is_ours(estimator)


def is_ours(estimator: Any) -> bool:
    """Whether this package defines the class of an estimator, and so vouches for it."""
    return type(estimator).__module__.startswith("pfl_sklearn.")


def _declared(estimator: Any) -> Wraps | None:
    """Declaration of a wrapper, or None."""
    return getattr(type(estimator), "_wraps", None)


def _fitted_attribute(estimator: Any) -> str | None:
    """Attribute that holds the fitted estimator inside a wrapper or search, or None."""
    if isinstance(estimator, FrozenEstimator):  # whose attributes are those of what it holds
        return _fitted_attribute(estimator.estimator)
    if hasattr(estimator, "best_estimator_"):
        return "best_estimator_"
    declared = _declared(estimator)
    if declared is not None:
        name = declared.fitted
    elif is_ours(estimator) or hasattr(estimator, "clients_"):
        return None  # what it holds is a recipe of its own
    else:
        name = "estimator_"
    return name if hasattr(estimator, name) else None
