"""Boosted trees, and whatever else predicts, under a personalized linear model."""

from typing import Any

import numpy as np

from pfl_sklearn._compat import num_samples
from pfl_sklearn._parameters import with_parameters
from pfl_sklearn._typing import TableLike
from pfl_sklearn.base import ClientClassifierMixin, ClientRegressorMixin
from pfl_sklearn.compose._base_stacking import PersonalizedStacking
from pfl_sklearn.compose._named_estimators import OutputsMixin
from pfl_sklearn.compose._out_of_fold import with_std
from pfl_sklearn.compose._stack_candidates import FINAL, STACK
from pfl_sklearn.linear_model import (
    PersonalizedLinearRegression,
    PersonalizedLogisticRegression,
)


@with_parameters
class PersonalizedStackingRegressor(ClientRegressorMixin, PersonalizedStacking):
    """Regression for tables whose rows belong to clients: trees under a personalized linear model.

    Base estimators, by default boosted trees with and without the client, predict out of fold. A
    personalized linear regression of these predictions and the numeric columns gives each client
    its own coefficients. Where parts of this do as well, they predict alone.

    See Also
    --------
    PersonalizedStackingClassifier : the same for classes.
    sklearn.ensemble.StackingRegressor : stacking without clients.

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
    hgb                50.7
    hgb_client          0.1
    Name: known, dtype: float64
    """

    __metadata_request__predict = {"groups": True, "return_std": True}
    _boosting = "HistGradientBoostingRegressor"
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
            Also return standard deviations, those of the final estimator: of a client's mean
            response given the base estimators. Where a base estimator or a model without clients
            predicts alone, it is the root mean squared error out of fold.

        Returns
        -------
        y : ndarray of shape (n_rows,)
        std : ndarray of shape (n_rows,)
            If `return_std`.
        """
        if not return_std:
            return self._outputs(X, groups)
        mean, std = np.empty((2, num_samples(X)))
        for rows, kind, part, table, ids in self._by_part(X, groups):
            name, behind = part
            if name in (STACK, FINAL):
                columns = self._final_rows(kind, name, table, ids)
                mean[rows], std[rows] = with_std(behind, columns, ids)
            else:  # of one kind of clients: with one client alone, new ones have its losses
                losses = self.losses_.get(kind, self.losses_["known"])
                mean[rows], std[rows] = self._of_part(kind, part, table, ids), np.sqrt(losses[name])
        return mean, std


@with_parameters
class PersonalizedStackingClassifier(ClientClassifierMixin, OutputsMixin, PersonalizedStacking):
    """Classification for tables whose rows belong to clients: trees under personalized logits.

    Base estimators, by default boosted trees with and without the client, predict out of fold. A
    personalized logistic regression of their log odds and the numeric columns gives each client its
    own coefficients. Where parts of this do as well, they predict alone.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
        Sorted class labels.

    See Also
    --------
    PersonalizedStackingRegressor : the same for responses.
    sklearn.ensemble.StackingClassifier : stacking without clients.

    Notes
    -----
    Probabilities of final estimators that can (by ``integrate=True``) are averages over a client's
    posterior, or over the population for new clients. Log odds are of probabilities of at least
    1e-6, and so are losses.

    Examples
    --------
    >>> from pfl_sklearn.compose import PersonalizedStackingClassifier
    >>> from pfl_sklearn.datasets import load_radon
    >>> homes = load_radon("MN").frame
    >>> model = PersonalizedStackingClassifier(cv=3, random_state=0)
    >>> model = model.fit(homes[["floor"]], homes["log_radon"] > 1.4, groups=homes["county"])
    >>> model.known_part_, model.new_part_
    ('final_estimator', 'pooled')
    """

    _boosting = "HistGradientBoostingClassifier"
    _default_final = PersonalizedLogisticRegression
