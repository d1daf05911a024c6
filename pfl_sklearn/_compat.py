"""The one place that imports scikit-learn's private names.

They have no deprecation promise. When a release moves one, this module is what changes.
"""

from sklearn.base import _fit_context as fit_context
from sklearn.model_selection._search import BaseSearchCV
from sklearn.utils import _safe_indexing as safe_indexing
from sklearn.utils._param_validation import HasMethods, Interval, StrOptions
from sklearn.utils.validation import _check_method_params as check_method_params
from sklearn.utils.validation import _check_sample_weight as check_sample_weight
from sklearn.utils.validation import _num_samples as num_samples


def response_methods(scorer):
    """Names of the methods of which a scorer needs one; () if that is unknown."""
    found = getattr(scorer, "_response_method", None) or ()
    return (found,) if isinstance(found, str) else tuple(found)


__all__ = [
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
