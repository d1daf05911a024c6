"""The privacy report of an estimator together with everything around it."""

from __future__ import annotations

import dataclasses
import math
from types import FunctionType
from typing import Any

from sklearn.base import BaseEstimator
from sklearn.feature_extraction import FeatureHasher
from sklearn.feature_extraction.text import HashingVectorizer
from sklearn.frozen import FrozenEstimator
from sklearn.kernel_approximation import AdditiveChi2Sampler
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import Binarizer, FunctionTransformer, Normalizer
from sklearn.utils.validation import check_is_fitted

from pfl_sklearn._fitted import check_report
from pfl_sklearn._object_graph import iter_reachable, nested_code
from pfl_sklearn._unwrap import inner_estimator, is_package_class, is_transparent
from pfl_sklearn.privacy._report import CHOSEN, PrivacyReport, chosen_by_scores, without_guarantee

# Attributes of other packages' meta-estimators, which we do not look into. They decide between a
# report without protection and the error that there is nothing to report on.
_NESTED = (
    "estimator",
    "estimator_",
    "estimators",
    "estimators_",
    "calibrated_classifiers_",
    "regressor",
    "regressor_",
)
# Transformers whose fit keeps nothing of the rows. A subclass may keep something, and so may a
# transformer that merely claims to need no fit (the tag ``requires_fit``).
_STATELESS = (
    AdditiveChi2Sampler,
    Binarizer,
    FeatureHasher,
    FunctionTransformer,
    HashingVectorizer,
    Normalizer,
)
# Their refusals of finite numbers and warnings about them: scikit-learn's checks sum all of them.
_REFUSALS_AND_WARNINGS = {
    AdditiveChi2Sampler: "refuses negative values and warns of sums that overflow",
    Binarizer: "warns of sums that overflow",
    Normalizer: "warns of sums that overflow",
}
# Their parameters that hold functions of the user, whose calls can be searched and constants
# cannot.
_FUNCTIONS = ("func", "preprocessor", "tokenizer", "analyzer")


def privacy_of(estimator: Any) -> PrivacyReport:
    """PrivacyReport of a fitted estimator, pipeline, wrapper or search as a whole.

    A pipeline protects no better than its worst step. If a step was fitted to the same data without
    noise, such as a ``StandardScaler``, or a search chose by scores without noise, ``epsilon`` is
    infinite and the report gives the reason, as it does for estimators whose privacy this package
    cannot check. The same holds for the model that a search chose.

    Parameters
    ----------
    estimator : fitted estimator
        A client-aware estimator, a :class:`~sklearn.pipeline.Pipeline` that ends in one, or a
        :class:`~pfl_sklearn.compose.ClientColumn` or search around either.

    Raises
    ------
    ValueError
        If there is no estimator of this package inside, or its report is not that of its fitted
        values.

    Notes
    -----
    *Steps.* These steps are treated as stateless: ``FunctionTransformer``,
    ``Normalizer``, ``Binarizer``, ``AdditiveChi2Sampler``, ``FeatureHasher`` and
    ``HashingVectorizer``, but not their subclasses or unions of steps; and a
    :class:`~pfl_sklearn.compose.TableEncoder` with `levels` and `medians`, which we assume, like
    its `dates`, do not come from the data. We inspect the functions of such a step, with their
    defaults, closures, globals and all that they call outside well-known libraries; if they hold an
    estimator or call ``fit``, ``epsilon`` is infinite. The report assumes that their numbers and
    arrays do not come from these data, and that they treat rows separately.

    *Fits.* ``privacy_`` of a private estimator is a statement about its own fit. If one of
    scikit-learn's searches scored or refitted it, ``privacy_.epsilon`` stays that of the fit, and
    ``privacy_.warnings`` report that the scores or the choice are not covered. ``cross_validate``
    and tools of other packages leave no such trace, nor does a new fit by hand with the parameters
    that a search found.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.pipeline import make_pipeline
    >>> from sklearn.preprocessing import StandardScaler
    >>> from pfl_sklearn.compose import ClientColumn
    >>> from pfl_sklearn.estimation import GaussianMean
    >>> from pfl_sklearn.privacy import privacy_of
    >>> X = np.column_stack([np.repeat([0, 1, 2], 4), np.ones(12)])
    >>> model = ClientColumn(make_pipeline(StandardScaler(), GaussianMean()), column=0)
    >>> report = privacy_of(model.fit(X, np.arange(12.0)))
    >>> report.epsilon
    inf
    """
    report = report_of_fits(estimator)
    # A model that a search chose carries the choice with it, even taken out of the search.
    chosen = chosen_by_scores(report) and math.isfinite(report.epsilon)
    return without_guarantee(report, CHOSEN) if chosen else report


def report_of_fits(estimator: Any) -> PrivacyReport:
    """Report of a fitted estimator as ``privacy_of`` makes it, but without a search's choice."""
    check_is_fitted(estimator)
    # Exact types: a subclass may override ``fit`` and keep something of the rows.
    if type(estimator) is Pipeline:
        return _pipeline_report(estimator)
    if type(estimator) is FrozenEstimator:
        return report_of_fits(estimator.estimator)
    # Only classes of this package are trusted to state their own privacy; see the notes.
    if is_package_class(estimator):
        inner = inner_estimator(estimator) if is_transparent(estimator) else None
        if inner is not None:
            return report_of_fits(inner)
        check_report(estimator)
        report: PrivacyReport = estimator.privacy_
        return report
    name = type(estimator).__name__
    # The best model is private; the search around it published scores and a choice without noise.
    if hasattr(estimator, "best_estimator_"):
        reason = (
            f"{name} chose by scores without noise and keeps them in cv_results_; only the models "
            "themselves are private"
        )
        return without_guarantee(report_of_fits(estimator.best_estimator_), reason)
    if isinstance(estimator, Pipeline | FrozenEstimator):
        reason = f"{name} is a subclass, which may learn something of its own"
    # Anybody can write an attribute of this name, be it by copying a fitted estimator's.
    elif hasattr(estimator, "privacy_"):
        reason = f"{name} is not part of pfl_sklearn, which cannot check its privacy_"
    # There may be a private fit inside, so the answer is infinity and not the error below.
    elif any(hasattr(estimator, attribute) for attribute in _NESTED):
        reason = f"what {name} learns around its estimators has no privacy report"
    else:
        raise ValueError(
            f"{name} has no privacy report: expected a fitted estimator of pfl_sklearn, or a "
            "pipeline, ClientColumn or search around one."
        )
    return PrivacyReport.unprotected(reason)


def _pipeline_report(pipeline: Pipeline) -> PrivacyReport:
    """Report of the last step, unless another step learnt something without noise."""
    report = report_of_fits(pipeline.steps[-1][1])
    assumptions = list(report.assumptions)
    for name, step in pipeline.steps[:-1]:
        # The first leak is enough: epsilon is infinite already.
        if leak := describe_leak(name, step):
            report = dataclasses.replace(report, assumptions=tuple(assumptions))
            return without_guarantee(report, f"{leak}; {_advice(step)}")
        assumptions += _assumptions_about(name, step)
    return dataclasses.replace(report, assumptions=tuple(assumptions))


def _assumptions_about(name: str, step: Any) -> list[str]:
    """Assumptions under which a step of a pipeline without a leak reveals nothing."""
    assumptions = []
    # The origin of arrays in a user's function cannot be seen: that stays an assumption.
    if any(callable(getattr(step, parameter, None)) for parameter in _FUNCTIONS):
        assumptions.append(
            f"step {name!r} treats every row separately, and the constants of its function do not "
            "come from these data"
        )
    if refusal := _REFUSALS_AND_WARNINGS.get(type(step)):
        assumptions.append(
            f"a refusal or warning of step {name!r} for finite numbers (it {refusal}) reveals that "
            "some client holds such numbers"
        )
    if _has_fixed_statistics(step):
        assumptions.append(
            f"levels, medians and dates of step {name!r} do not come from these data, and the "
            "columns have types that go with them: it refuses others, which reveals that some "
            "client holds such a value"
        )
    return assumptions


def describe_leak(name: str, step: Any) -> str | None:
    """Sentence about what a step of a pipeline learns without noise; None if it learns nothing."""
    # None, "passthrough" and "drop" are no estimators and learn nothing.
    if step is None or isinstance(step, str):
        return None
    # ``fit`` of a frozen estimator does nothing, but its estimator may have been fitted to these
    # rows.
    if type(step) is FrozenEstimator:
        return describe_leak(name, step.estimator)
    if _has_fixed_statistics(step):
        return None
    stateless = type(step) in _STATELESS
    leak = _leak_in_functions(step) if stateless else "is fitted to the same data without noise"
    return leak and f"step {name!r} ({type(step).__name__}) {leak}"


def _advice(step: Any) -> str:
    if is_package_class(step) and hasattr(step, "_learns_nothing"):
        return "give it levels and medians that do not come from these data"
    return "replace it by a FunctionTransformer with constants of your own"


def _has_fixed_statistics(step: Any) -> bool:
    """Whether the user gave a step of this package all that it might learn, as for TableEncoder."""
    return is_package_class(step) and getattr(step, "_learns_nothing", False)


def _leak_in_functions(step: Any) -> str | None:
    """Clause about what the functions of a stateless step learn, as far as their code shows it."""
    reachable = list(iter_reachable(step))
    # Estimators first: an estimator is a plainer reason than a call of ``fit``.
    for item in reachable:
        if _is_estimator(item) and type(item) not in _STATELESS:
            kind = type(item).__name__
            return f"holds a {kind}, which may have learnt from the same data without noise"
    # Names in the compiled code show a call without running the function.
    for item in reachable:
        codes = nested_code(item) if type(item) is FunctionType else []
        names = {name for code in codes for name in code.co_names}
        # "fit_" covers fit_transform, fit_predict and fit_resample.
        fits = [n for n in names if n in ("fit", "partial_fit") or n.startswith("fit_")]
        if fits:
            return f"learns from the data without noise: {item.__qualname__} calls {min(fits)}"
    return None


def _is_estimator(value: Any) -> bool:
    cls = type(value)  # an object may say that it is of another class
    # Duck-typed too: estimators of other libraries need not derive from BaseEstimator.
    predicts = hasattr(cls, "predict") or hasattr(cls, "transform")
    return issubclass(cls, BaseEstimator) or (hasattr(cls, "fit") and predicts)
