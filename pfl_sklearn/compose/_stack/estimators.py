"""Stacks of boosted trees or other estimators under a personalized linear model."""

import warnings
from functools import partial
from typing import Any

import numpy as np

from pfl_sklearn._compat import num_samples
from pfl_sklearn._parameters import CLASS_WEIGHT, parameter, with_parameters
from pfl_sklearn._typing import TableLike
from pfl_sklearn.base import ClientClassifierMixin, ClientRegressorMixin
from pfl_sklearn.compose._inner_estimators import InnerEstimator, fit_inner, predict_with_std
from pfl_sklearn.compose._named_estimators import OutputsMixin
from pfl_sklearn.compose._stack.base import PersonalizedStacking
from pfl_sklearn.compose._stack.choice import (
    FINAL,
    INTERCEPT,
    STACK,
    TOL_IN_FOLDS,
    part_name,
)
from pfl_sklearn.linear_model import (
    PersonalizedLinearRegression,
    PersonalizedLogisticRegression,
)
from pfl_sklearn.linear_model._random_choice import few_rows, slopes_gain


@with_parameters
class PersonalizedStackingRegressor(ClientRegressorMixin, PersonalizedStacking):
    """Regression for tables whose rows belong to clients: trees under a personalized linear model.

    Base estimators, by default boosted trees, predict out of fold. A personalized linear
    regression of these predictions and the encoded columns gives each client its own coefficients.
    Parts of this predict alone or are averaged where that does better.

    Examples
    --------
    >>> from pfl_sklearn.compose import PersonalizedStackingRegressor
    >>> from pfl_sklearn.datasets import load_parkinsons
    >>> visits = load_parkinsons().frame.query("subject <= 8")
    >>> X, y = visits[["test_time", "PPE", "DFA"]], visits["total_UPDRS"]
    >>> model = PersonalizedStackingRegressor(cv=3, random_state=0)
    >>> model = model.fit(X, y, groups=visits["subject"])
    >>> model.losses_["known"].round(1)[["final_estimator", "hgb", "hgb_client"]]
    final_estimator     0.6
    hgb                51.6
    hgb_client          0.1
    Name: known, dtype: float64
    """

    __metadata_request__predict = {"groups": True, "return_std": True}
    _kind = "Regressor"
    _default_final = PersonalizedLinearRegression

    def predict(self, X: TableLike, *, groups: TableLike = None, return_std: bool = False) -> Any:
        """Response of every row's client; for new clients that of the population.

        Parameters
        ----------
        X : dataframe or array-like of shape (n_rows, d)
            As in ``fit``.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.
        return_std : bool, default=False
            Also return standard deviations (n_rows,). If the final estimator predicts alone, they
            are those of a client's mean response given the base estimators; otherwise they are the
            root mean squared error out of fold of the part or mixture that predicts.
        """
        if not return_std:
            return self._outputs(X, groups)
        mean, std = np.empty((2, num_samples(X)))
        mean[:] = self._outputs(X, groups)
        for rows, kind, tables, ids in self._by_kind(X, groups):
            name = part_name(self.parts_[kind])
            if name in (STACK, FINAL):
                columns = self._final_rows(kind, name, tables, ids)
                _, std[rows] = predict_with_std(self.parts_[kind][name], columns, ids)
            else:  # a fit to one client has no losses of new ones
                std[rows] = np.sqrt(self.losses_.get(kind, self.losses_["known"])[name])
        return mean, std


@with_parameters
class PersonalizedStackingClassifier(ClientClassifierMixin, OutputsMixin, PersonalizedStacking):
    """Classification for tables whose rows belong to clients: trees under personalized logits.

    Base estimators, by default boosted trees, predict out of fold. A personalized logistic
    regression of their log odds and the encoded columns gives each client its own coefficients.
    Parts of this predict alone or are averaged where that does better.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
        Sorted class labels.

    Notes
    -----
    Probabilities of a personalized logistic regression are averages over a client's posterior, or
    over the population for new clients. Log odds and losses use probabilities of at least 1e-6.

    Examples
    --------
    >>> from pfl_sklearn.compose import PersonalizedStackingClassifier
    >>> from pfl_sklearn.datasets import load_radon
    >>> homes = load_radon("MN").frame
    >>> model = PersonalizedStackingClassifier(cv=3, random_state=0)
    >>> model = model.fit(homes[["floor"]], homes["log_radon"] > 1.4, groups=homes["county"])
    >>> model.known_part_, model.new_part_
    ('random_intercept', 'pooled')
    """

    class_weight: dict[Any, float] | str | None = parameter(
        default=None,
        ranges=CLASS_WEIGHT,
        text="""
            dict, "balanced" or None
                Weights of the classes, which multiply those of their rows, in all fits and in
                `losses_`: by label (1 where none is given), or "balanced": the same sum for each
                class. Probabilities are then those of a population in which classes have these
                weights. All estimators must take `sample_weight`.
        """,
    )

    _kind = "Classifier"
    # As a rule, clients differ in how reliable a base estimator is.
    _default_final = staticmethod(partial(PersonalizedLogisticRegression, random="all"))

    def _personal_parts(self):
        personal = super()._personal_parts()
        if self.final_estimator is not None:
            return personal
        return [(INTERCEPT, self._default_final().set_params(random="intercept")), *personal]

    def _parts_alone(self, personal, columns, n_bases):
        if self.final_estimator is not None:
            return super()._parts_alone(personal, columns, n_bases)
        intercept, final = personal
        sizes, n_columns = np.bincount(columns.clients.codes), columns.X.shape[1]
        # If clients have few rows, estimates diverge when all coefficients vary.
        if few_rows(sizes, (1 + n_bases + n_columns) * (len(final.classes) - 1)):
            return [intercept], intercept._replace(name=FINAL)
        return (personal if _slopes_predict(columns, final.classes) else [intercept]), final


def _slopes_predict(columns, classes):
    """Whether held-out rows of known clients are better predicted if all coefficients vary."""
    numbers = columns.X.select_dtypes("number")
    if not numbers.shape[1]:
        return False
    model = PersonalizedLogisticRegression(uncertainty="plug_in", tol=TOL_IN_FOLDS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fits of the parts repeat them
        fitted = fit_inner(InnerEstimator(FINAL, model, classes), columns._replace(X=numbers))
    return slopes_gain(fitted.random_losses_)
