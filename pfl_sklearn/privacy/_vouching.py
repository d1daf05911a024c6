"""Vouching: the privacy report of an estimator with everything around it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from sklearn.base import BaseEstimator
from sklearn.frozen import FrozenEstimator
from sklearn.pipeline import Pipeline
from sklearn.utils import get_tags
from sklearn.utils.validation import check_is_fitted

from pfl_sklearn._nesting import inner_estimator, is_ours, is_transparent
from pfl_sklearn.privacy._report import CHOSEN, PrivacyReport, leaking

__all__ = ["privacy_of"]

# Attributes that a meta-estimator of somebody else may have; we do not look inside it.
_NESTED = (
    "estimator",
    "estimator_",
    "estimators",
    "estimators_",
    "calibrated_classifiers_",
    "regressor",
    "regressor_",
)


def privacy_of(estimator: Any) -> PrivacyReport:
    """Privacy report of a fitted estimator, pipeline, wrapper or search as a whole.

    A pipeline protects no better than its worst step. A step that was fitted on the same data
    without noise, such as a ``StandardScaler``, leaks. So do a search that chose by scores without
    noise and the model that it chose. In these cases ``epsilon`` is infinite, and the report names
    the culprit.

    Parameters
    ----------
    estimator : fitted estimator
        A client-aware estimator, a :class:`~sklearn.pipeline.Pipeline` that ends in one, or a
        :class:`~pfl_sklearn.compose.ClientColumn` or search around either.

    Returns
    -------
    PrivacyReport
        With infinite ``epsilon`` for estimators that this package does not vouch for.

    Raises
    ------
    ValueError
        If there is no estimator of this package inside.

    Notes
    -----
    ``privacy_`` of a private estimator is a statement about its own fit. If one of scikit-learn's
    searches refitted it, or if ``cross_validate``, ``validation_curve``, ``learning_curve``,
    ``permutation_test_score`` or the like scored it, ``privacy_.epsilon`` stays that of the fit,
    and ``privacy_.warnings`` say that the choice or the scores are not covered. Tools of other
    packages leave no such trace, and neither does a choice that you carry on by hand: a new fit
    with the parameters that a search found.

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
    chosen = CHOSEN in report.warnings and math.isfinite(report.epsilon)
    return leaking(report, CHOSEN) if chosen else report


def report_of_fits(estimator: Any) -> PrivacyReport:
    """The same as ``privacy_of`` of a fitted estimator, whether or not a search chose it."""
    check_is_fitted(estimator)
    if isinstance(estimator, Pipeline):
        return _pipeline_report(estimator)
    if isinstance(estimator, FrozenEstimator):
        return report_of_fits(estimator.estimator)
    if is_ours(estimator):
        inner = inner_estimator(estimator) if is_transparent(estimator) else None
        if inner is not None:
            return report_of_fits(inner)
        report: PrivacyReport = estimator.privacy_
        return report
    if hasattr(estimator, "best_estimator_"):
        reason = (
            f"{type(estimator).__name__} chose by scores without noise and keeps them in "
            "cv_results_; only the models themselves are private"
        )
        return leaking(report_of_fits(estimator.best_estimator_), reason)
    if hasattr(estimator, "privacy_"):
        return PrivacyReport.unprotected(
            f"{type(estimator).__name__} is not part of pfl_sklearn, which does not vouch for its "
            "privacy_"
        )
    if any(hasattr(estimator, name) for name in _NESTED):
        return PrivacyReport.unprotected(
            f"what {type(estimator).__name__} learns around its estimators has no privacy report"
        )
    raise ValueError(
        f"{type(estimator).__name__} has no privacy report: expected a fitted estimator of "
        "pfl_sklearn, or a pipeline, ClientColumn or search around one."
    )


def _pipeline_report(pipeline: Pipeline) -> PrivacyReport:
    """Report of the last step, unless another step learnt something without noise."""
    report = report_of_fits(pipeline.steps[-1][1])
    for name, step in pipeline.steps[:-1]:
        if learns(step):
            return leaking(
                report,
                f"step {name!r} ({type(step).__name__}) was fitted on the same data without noise; "
                "replace it by constants of your own or by a step that learns nothing",
            )
        if getattr(step, "func", None) is not None:
            assumed = f"step {name!r} treats every row separately"
            report = dataclasses.replace(report, assumptions=(*report.assumptions, assumed))
    return report


def learns(step: Any) -> bool:
    """Whether a transformer keeps anything about the data it was fitted on."""
    if step is None or isinstance(step, str):
        return False
    return not isinstance(step, BaseEstimator) or get_tags(step).requires_fit
