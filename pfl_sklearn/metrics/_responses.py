"""Responses of a fitted estimator, computed once for all rows and scored by subsets of rows."""

import warnings

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.exceptions import UndefinedMetricWarning
from sklearn.metrics import get_scorer, log_loss, make_scorer
from sklearn.utils import get_tags

from pfl_sklearn._compat import available_if
from pfl_sklearn._nesting import takes_groups


def _estimator_has(method):
    def check(self):
        getattr(self.estimator, method)
        return True

    return check


def scorer_for(scoring, estimator):
    """Scorer of `scoring`. The log loss gets all classes, because a client may lack some."""
    if isinstance(scoring, str) and scoring == "neg_log_loss":
        return make_scorer(
            log_loss,
            response_method="predict_proba",
            greater_is_better=False,
            labels=estimator.classes_,
        )
    return get_scorer(scoring)


class Responses(BaseEstimator):
    """Stand-in for `estimator` whose predictions for `X` are made once, with groups.

    scikit-learn's scorers treat it as an estimator; :meth:`only` restricts it to some rows.
    """

    def __init__(self, estimator, X, groups):
        self.estimator = estimator
        self.X = X
        self.groups = groups
        self._made = {}
        self._rows = slice(None)

    def only(self, rows):
        """The same responses, for these rows alone."""
        narrowed = Responses(self.estimator, self.X, self.groups)
        narrowed._made, narrowed._rows = self._made, rows
        return narrowed

    @available_if(_estimator_has("predict"))
    def predict(self, X):
        """Predictions for the rows; `X` is ignored."""
        return self._response("predict")

    @available_if(_estimator_has("predict_proba"))
    def predict_proba(self, X):
        """Class probabilities for the rows; `X` is ignored."""
        return self._response("predict_proba")

    @available_if(_estimator_has("decision_function"))
    def decision_function(self, X):
        """Decision function for the rows; `X` is ignored."""
        return self._response("decision_function")

    @property
    def classes_(self):
        """Class labels of the estimator."""
        return self.estimator.classes_

    def __sklearn_tags__(self):
        return get_tags(self.estimator)

    def __sklearn_is_fitted__(self):
        return True

    def _response(self, method):
        if method not in self._made:
            self._made[method] = getattr(self.estimator, method)(self.X, **self._metadata(method))
        return self._made[method][self._rows]

    def _metadata(self, method):
        """Groups, if the estimator or anything inside it requests them."""
        if self.groups is None or not takes_groups(self.estimator, method):
            return {}
        return {"groups": self.groups}


# Scores that are means over rows, computed for all clients at once.
ROW_SCORES = {
    "neg_mean_squared_error": lambda y, predicted: -((y - predicted) ** 2),
    "neg_mean_absolute_error": lambda y, predicted: -np.abs(y - predicted),
}


def score_clients(scoring, scorer, responses, y, order, offsets):
    """Scores (m,) of clients with rows ``order[offsets[i]:offsets[i + 1]]``; NaN if undefined.

    `scorer` is the one that `scoring` names. Every client must have rows.
    """
    y = np.asarray(y)
    if isinstance(scoring, str) and scoring in ROW_SCORES and y.ndim == 1:
        predicted = np.asarray(responses.predict(None))
        if predicted.shape == y.shape and {y.dtype.kind, predicted.dtype.kind} <= set("fiub"):
            rows = ROW_SCORES[scoring](y.astype(float), predicted.astype(float))[order]
            if np.isfinite(rows).all():
                return np.add.reduceat(rows, offsets[:-1]) / np.diff(offsets)
    return _score_one_by_one(scorer, responses, y, order, offsets)


def _score_one_by_one(scorer, responses, y, order, offsets):
    scores = np.empty(len(offsets) - 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UndefinedMetricWarning)
        warnings.filterwarnings("ignore", "y_pred contains classes not in y_true")
        for i in range(len(scores)):
            rows = order[offsets[i] : offsets[i + 1]]
            try:
                scores[i] = scorer(responses.only(rows), rows, y[rows])
            except ValueError as error:
                lacks_class = len(np.unique(y[rows])) < len(np.unique(y))
                if "class" not in str(error) or not lacks_class:
                    raise
                scores[i] = np.nan
    return scores
