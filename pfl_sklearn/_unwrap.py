"""Estimators inside pipelines, wrappers and searches, fitted or not.

A class of this package that wraps one estimator declares it with the class attribute ``_wraps``. A
parameter called ``estimator`` alone means nothing: it may be a recipe that the class itself uses.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from sklearn import config_context
from sklearn.exceptions import NotFittedError
from sklearn.frozen import FrozenEstimator
from sklearn.pipeline import Pipeline
from sklearn.utils.metadata_routing import get_routing_for_object
from sklearn.utils.validation import check_is_fitted

from pfl_sklearn._compat import BaseSearchCV

_SUGGESTION = " Did you mean "


def has_method(find: Callable[[Any], Any], method: str) -> Callable[[Any], bool]:
    """Check for ``available_if``: what `find` finds inside an estimator has a method."""

    def check(estimator: Any) -> bool:
        getattr(find(estimator), method)  # whose error says more than False does
        return True

    return check


def inner_has(method: str) -> Callable[[Any], bool]:
    """Check for ``available_if``: the fitted estimator, or else the given one, has a method."""
    return has_method(_inner_or_given, method)


def model_has(method: str) -> Callable[[Any], bool]:
    """Check for ``available_if``: the model at the end of all steps has a method."""
    return has_method(lambda estimator: final_estimator(_inner_or_given(estimator)), method)


def _inner_or_given(estimator: Any) -> Any:
    """The fitted estimator, or before a fit the given one."""
    return getattr(estimator, estimator._wraps.fitted, estimator.estimator)


@contextmanager
def suggest_nested_names(estimator: Any) -> Iterator[None]:
    """Let scikit-learn's error of an unknown parameter name those inside that are called so."""
    try:
        yield
    except ValueError as error:
        # An estimator inside may have made suggestions, which lack its own prefix.
        said = str(error).partition(_SUGGESTION)[0]
        unknown = re.match(r"Invalid parameter '(\w+)'", said)
        if unknown is None:
            raise
        nested = [name for name in estimator.get_params() if name.endswith(f"__{unknown[1]}")]
        if not nested:
            raise
        raise ValueError(f"{said}{_SUGGESTION}{' or '.join(map(repr, nested))}?") from None


class Wraps(NamedTuple):
    """Declaration of a wrapper, in its class attribute ``_wraps``."""

    parameter: str  # that holds the wrapped estimator
    fitted: str  # attribute that holds the fitted one
    fits_once: bool  # and learns nothing else from the data


def inner_estimator(estimator: Any) -> Any:
    """Fitted estimator directly inside a search, wrapper or pipeline, or None."""
    name = fitted_attribute(estimator)
    if name is not None:
        return getattr(estimator, name)
    return estimator.steps[-1][1] if hasattr(estimator, "steps") else None


def predicting_estimator(estimator: Any) -> Any:
    """`estimator` with every search replaced by its best estimator, alone or behind steps."""
    # ``predict`` of a search takes no groups. Before the fit, this is the estimator searched over.
    if hasattr(estimator, "best_estimator_"):
        return predicting_estimator(estimator.best_estimator_)
    if is_search(estimator):
        return predicting_estimator(estimator.estimator)
    if not isinstance(estimator, Pipeline):
        return estimator
    name, last = estimator.steps[-1]
    predicting = predicting_estimator(last)
    if predicting is last:
        return estimator
    # A shallow copy: the user's pipeline keeps its search.
    return copy.copy(estimator).set_params(steps=[*estimator.steps[:-1], (name, predicting)])


def is_search(estimator: Any) -> bool:
    """Whether an estimator is one of scikit-learn's searches."""
    return isinstance(estimator, BaseSearchCV)


def final_estimator(estimator: Any) -> Any:
    """Estimator at the end of pipelines, searches and frozen estimators, fitted or not."""
    if isinstance(estimator, FrozenEstimator):
        return final_estimator(estimator.estimator)
    if isinstance(estimator, Pipeline):
        return final_estimator(estimator.steps[-1][1])
    inner = predicting_estimator(estimator)
    return estimator if inner is estimator else final_estimator(inner)


def call_behind_steps(estimator: Any, method: str, *args: Any) -> Any:
    """What a method of the final estimator returns, behind copies of the steps before it."""
    if isinstance(estimator, FrozenEstimator):
        return call_behind_steps(estimator.estimator, method, *args)
    estimator = predicting_estimator(estimator)
    if not isinstance(estimator, Pipeline):
        return getattr(estimator, method)(*args)
    name, last = estimator.steps[-1]
    steps = copy.deepcopy(estimator.steps[:-1])
    return Pipeline([*steps, (name, call_behind_steps(last, method, *args))])


def transform_for_model(estimator: Any, X: Any, groups: Any) -> Any:
    """Rows as the final estimator gets them, behind the steps of pipelines."""
    if isinstance(estimator, FrozenEstimator):
        return transform_for_model(estimator.estimator, X, groups)
    estimator = predicting_estimator(estimator)
    if not isinstance(estimator, Pipeline):
        return X
    return transform_for_model(
        estimator.steps[-1][1], transform_before_last(estimator, X, groups), groups
    )


def transform_before_last(pipeline: Any, X: Any, groups: Any) -> Any:
    """`X` as the steps of a pipeline before the last make it; `groups` are None or client ids."""
    if len(pipeline.steps) < 2:  # an empty slice of a pipeline is no transformer
        return X
    steps = pipeline[:-1]
    if groups is None or not takes_groups(steps, "transform"):
        return steps.transform(X)
    with config_context(enable_metadata_routing=True):
        return steps.transform(X, groups=groups)


def transform_for_inner(
    estimator: Any, X: Any, params: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Rows, and parameters such as groups, as the estimator directly inside gets them."""
    if isinstance(estimator, FrozenEstimator):
        return transform_for_inner(estimator.estimator, X, params)
    if isinstance(estimator, Pipeline):
        return transform_before_last(estimator, X, params["groups"]), params
    if hasattr(estimator, "_inner_input"):  # a wrapper of this package
        return estimator._inner_input(X, params)
    return X, params


def takes_groups(estimator: Any, method: str, name: str = "groups") -> bool:
    """Whether a method uses client ids (or metadata `name`), or hands them on to what does."""
    if isinstance(estimator, FrozenEstimator):
        return takes_groups(estimator.estimator, method, name)
    try:
        routing = get_routing_for_object(estimator)
    except NotImplementedError:  # scikit-learn's estimators without routing
        return False
    return name in routing.consumes(method, [name])


def innermost_estimator(estimator: Any) -> Any:
    """Fitted estimator at the end of all pipelines, wrappers and searches."""
    inner = inner_estimator(estimator)
    return estimator if inner is None else innermost_estimator(inner)


def feature_names_of(estimator: Any) -> list[str] | None:
    """Names of the features of the innermost estimator, without groupings; None if unknown."""
    # These are its own names, or the output names of the steps before it.
    names = getattr(estimator, "feature_names_in_", None)
    while (inner := inner_estimator(estimator)) is not None:
        names = getattr(inner, "feature_names_in_", _output_names(estimator, inner, names))
        estimator = inner
    return None if names is None else without_groupings(estimator, [str(name) for name in names])


def without_groupings(fitted: Any, names: list[str]) -> list[str]:
    """Names of the features of a fitted model, from those of the columns or of the features."""
    columns = getattr(fitted, "_grouping_columns", None)
    # Steps of a pipeline name all the columns that they hand on.
    named_all = len(names) == getattr(fitted, "n_features_in_", None)
    return columns.others(names) if columns is not None and named_all else names


def _output_names(estimator: Any, inner: Any, names: Any) -> Any:
    """Names of the columns that the estimator inside gets, from those of `estimator`'s."""
    if not hasattr(estimator, "steps"):
        n_given, n_got = (getattr(part, "n_features_in_", None) for part in (estimator, inner))
        return names if n_given == n_got else None  # a wrapper that keeps all columns, or not
    if len(estimator.steps) < 2:
        return names
    try:
        return estimator[:-1].get_feature_names_out(names)
    except (AttributeError, ValueError):  # a step that names no outputs
        return None


def core_estimator(estimator: Any) -> Any:
    """The estimator inside pipelines and wrappers that fit it exactly once."""
    # That is: pipelines (their last step), frozen estimators and transparent wrappers.
    while is_transparent(estimator):
        estimator = _named_inner(estimator)[1]
    return estimator


def path_to_core(estimator: Any) -> tuple[str, list[tuple[str, Any]]]:
    """Prefix of the parameters of :func:`core_estimator`, and the steps that precede it."""
    prefix, steps = "", list[tuple[str, Any]]()
    while is_transparent(estimator):
        steps += estimator.steps[:-1] if type(estimator) is Pipeline else []
        name, estimator = _named_inner(estimator)
        prefix += f"{name}__"
    return prefix, steps


def _named_inner(estimator: Any) -> tuple[str, Any]:
    """Unfitted estimator directly inside a transparent one, by the name of the parameter."""
    if type(estimator) is Pipeline:
        name, last = estimator.steps[-1]
        return name, last
    declared = _declaration(estimator)
    name = "estimator" if declared is None else declared.parameter
    return name, getattr(estimator, name)


def is_transparent(estimator: Any) -> bool:
    """Whether an estimator fits the one inside it once, and learns nothing outside its steps."""
    if type(estimator) in (Pipeline, FrozenEstimator):  # a subclass may learn something itself
        return True
    declared = _declaration(estimator)
    return declared is not None and declared.fits_once and is_package_class(estimator)


def is_package_class(estimator: Any) -> bool:
    """Whether this package defines the class of an estimator, so that its report is trusted."""
    return type(estimator).__module__.startswith("pfl_sklearn.")


def _is_fitted(estimator: Any) -> bool:
    """Whether an object is a fitted estimator."""
    try:
        check_is_fitted(estimator)
    except (NotFittedError, TypeError):  # a TypeError if it is no estimator
        return False
    return True


def _declaration(estimator: Any) -> Wraps | None:
    """What a wrapper declares in ``_wraps``, or None."""
    return getattr(type(estimator), "_wraps", None)


def fitted_attribute(estimator: Any) -> str | None:
    """Attribute that holds the fitted estimator inside a wrapper or search, or None."""
    if isinstance(estimator, FrozenEstimator):  # whose attributes are those of what it holds
        return fitted_attribute(estimator.estimator)
    if hasattr(estimator, "best_estimator_"):
        return "best_estimator_"
    declared = _declaration(estimator)
    if declared is not None:
        name = declared.fitted
    elif is_package_class(estimator) or hasattr(estimator, "clients_"):
        return None  # what it holds is a recipe of its own
    else:
        name = "regressor_" if hasattr(estimator, "regressor_") else "estimator_"
    # The `estimator_` of an ensemble is a template.
    return name if _is_fitted(getattr(estimator, name, None)) else None
