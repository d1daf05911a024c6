"""The one place that imports scikit-learn's private names, and types of its decorators.

Private names have no deprecation promise. When a release moves one, this module is what changes.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from sklearn.base import _fit_context
from sklearn.model_selection._search import BaseSearchCV
from sklearn.utils import _safe_indexing as safe_indexing
from sklearn.utils._param_validation import HasMethods, Interval, StrOptions
from sklearn.utils._repr_html.estimator import _VisualBlock as VisualBlock
from sklearn.utils._set_output import _get_output_config
from sklearn.utils.metaestimators import available_if as _available_if
from sklearn.utils.validation import (
    _check_feature_names_in as check_feature_names_in,
    _check_method_params as check_method_params,
    _check_sample_weight as check_sample_weight,
    _num_samples,
)

if TYPE_CHECKING:
    # scikit-learn has no types. Below a base of unknown type, checkers would take any argument of a
    # constructor that comes from fields. Attributes of these may be anything, as they were.
    class _Untyped:
        def __getattr__(self, name: str) -> Any: ...

        def __sklearn_tags__(self) -> Any: ...

        def __sklearn_clone__(self) -> Any: ...

    class BaseComposition(_Untyped): ...

    class BaseCrossValidator(_Untyped): ...

    class BaseEstimator(_Untyped): ...

    class CallbackSupportMixin(_Untyped): ...

    class ClassifierMixin(_Untyped): ...

    class MetaEstimatorMixin(_Untyped): ...

    class RegressorMixin(_Untyped): ...
else:
    from sklearn.base import BaseEstimator, ClassifierMixin, MetaEstimatorMixin, RegressorMixin
    from sklearn.model_selection import BaseCrossValidator
    from sklearn.utils.metaestimators import _BaseComposition as BaseComposition

P = ParamSpec("P")
R = TypeVar("R")


def fit_context(
    *, prefer_skip_nested_validation: bool
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """scikit-learn's decorator of ``fit``, which hides no type of the method, nor whose it is."""

    def decorated(method: Callable[P, R]) -> Callable[P, R]:
        decorator = _fit_context(prefer_skip_nested_validation=prefer_skip_nested_validation)
        return names_class(_fit_a_copy(decorator(method)))

    return decorated


def _fit_a_copy(method: Callable[P, R]) -> Callable[P, R]:
    """Decorator of fits: on request, fit a copy of the estimator and take it over at the end."""
    # Another thread, or an array that runs code when it is read, may set parameters meanwhile. The
    # fit would then not be the one that was checked and charged to a ledger.

    @functools.wraps(method)
    def fit(*args: P.args, **kwargs: P.kwargs) -> R:
        estimator: Any = args[0]
        if not getattr(estimator, "_fits_a_copy", False):
            return method(*args, **kwargs)
        begun: Any = copy.copy(estimator)
        method(begun, *args[1:], **kwargs)  # type: ignore[arg-type]
        estimator._set_from_copy(begun)
        return estimator

    return fit


def names_class(method: Callable[P, R]) -> Callable[P, R]:
    """Decorator of a method that estimators inherit: a wrong call names the estimator's class."""
    # Python would name the base class. With too many positional arguments, the error lists those
    # that must be passed by name.
    signature = inspect.signature(method)
    named = [
        argument.name
        for argument in signature.parameters.values()
        if argument.kind == argument.KEYWORD_ONLY
    ]
    by_name = f"; give {', '.join(f'{name}=' for name in named)} by name" if named else ""

    @functools.wraps(method)
    def with_checked_call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            called = ".".join(
                [*(type(argument).__name__ for argument in args[:1]), method.__name__]
            )
            way_out = by_name if "positional" in str(error) else ""
            raise TypeError(f"{called}(): {error}{way_out}.") from None
        return method(*args, **kwargs)

    return with_checked_call


def with_callbacks(method: Callable[P, R]) -> Callable[P, R]:
    """scikit-learn's decorator of methods that call callbacks, which hides no type."""
    from sklearn.callback import with_callbacks  # imports rich, which only rounds need

    return with_callbacks(method)


def num_samples(X: Any) -> int:
    """Number of rows; ValueError for a dict, whose length is that of its keys."""
    if isinstance(X, Mapping):
        raise ValueError(
            f"got a {type(X).__name__} with the keys {', '.join(map(str, X))}; expected one array, "
            "or data frame, of rows."
        )
    return _num_samples(X)


def available_if(check: Callable[[Any], bool]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """scikit-learn's decorator of methods that not every instance has, which hides no type."""
    return _available_if(check)


def fit_tasks(estimator: Any) -> Iterator[str]:
    """Names of the tasks that the fit of an estimator is part of, innermost first."""
    # They come from the callback context that searches, pipelines and wrappers hand on.
    task = getattr(estimator, "_parent_callback_ctx", None)
    while task is not None:
        # A nested estimator's own task is the same as the one that it was given.
        yield from filter(None, (task.task_name, task.source_task_name))
        task = task.parent


def output_library(transformer: Any) -> str | None:
    """Library of the frames that ``set_output`` asks of a transformer; None if it asks for none."""
    library: str = _get_output_config("transform", transformer)["dense"]
    return None if library == "default" else library


def response_methods(scorer: Any) -> tuple[str, ...]:
    """Names of the methods of which a scorer needs one; () if that is unknown."""
    names = getattr(scorer, "_response_method", None) or ()
    return (names,) if isinstance(names, str) else tuple(names)


__all__ = [
    "BaseComposition",
    "BaseCrossValidator",
    "BaseEstimator",
    "BaseSearchCV",
    "ClassifierMixin",
    "HasMethods",
    "Interval",
    "MetaEstimatorMixin",
    "RegressorMixin",
    "StrOptions",
    "VisualBlock",
    "available_if",
    "check_feature_names_in",
    "check_method_params",
    "check_sample_weight",
    "fit_context",
    "fit_tasks",
    "names_class",
    "num_samples",
    "output_library",
    "response_methods",
    "safe_indexing",
    "with_callbacks",
]
