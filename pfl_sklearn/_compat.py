"""The one place that imports scikit-learn's private names.

They have no deprecation promise. When a release moves one, this module is what changes.
"""

import functools
import inspect

from sklearn.base import _fit_context
from sklearn.model_selection import cross_validate
from sklearn.model_selection._search import BaseSearchCV
from sklearn.utils import _safe_indexing as safe_indexing
from sklearn.utils._param_validation import HasMethods, Interval, StrOptions
from sklearn.utils.metaestimators import _BaseComposition as BaseComposition
from sklearn.utils.validation import _check_method_params as check_method_params
from sklearn.utils.validation import _check_sample_weight as check_sample_weight
from sklearn.utils.validation import _num_samples as num_samples

FIT_OF_A_SEARCH = inspect.unwrap(BaseSearchCV.fit).__code__
VALIDATION_MODULE = cross_validate.__module__


def fit_context(*, prefer_skip_nested_validation):
    """Decorator of ``fit``: scikit-learn's, but unknown arguments are an error of the estimator's.

    Without it the message names the class that defines the method, which may be a private one.
    """

    def decorate(method):
        signature = inspect.signature(method)

        @functools.wraps(method)
        def checked(estimator, *args, **kwargs):
            try:
                signature.bind(estimator, *args, **kwargs)
            except TypeError as error:
                name = f"{type(estimator).__name__}.{method.__name__}"
                raise TypeError(f"{name}() {error}") from None
            return method(estimator, *args, **kwargs)

        return _fit_context(prefer_skip_nested_validation=prefer_skip_nested_validation)(checked)

    return decorate


def response_methods(scorer):
    """Names of the methods of which a scorer needs one; () if that is unknown."""
    found = getattr(scorer, "_response_method", None) or ()
    return (found,) if isinstance(found, str) else tuple(found)


__all__ = [
    "FIT_OF_A_SEARCH",
    "VALIDATION_MODULE",
    "BaseComposition",
    "BaseSearchCV",
    "HasMethods",
    "Interval",
    "StrOptions",
    "check_method_params",
    "check_sample_weight",
    "fit_context",
    "num_samples",
    "response_methods",
    "safe_indexing",
]
