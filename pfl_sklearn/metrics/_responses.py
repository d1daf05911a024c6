"""Responses of a fitted estimator, computed once for all rows and scored by subsets of rows."""

import warnings
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import numpy as np
from sklearn.exceptions import UndefinedMetricWarning
from sklearn.metrics import get_scorer, log_loss, make_scorer
from sklearn.utils import get_tags

from pfl_sklearn._compat import BaseEstimator, available_if
from pfl_sklearn._typing import Floats, Integers, TableLike
from pfl_sklearn._unwrap import has_method, takes_groups

# Scores that are means over rows, computed for all clients at once.
ROW_SCORES: dict[str, Callable[[Floats, Floats], Floats]] = {
    "neg_mean_squared_error": lambda y, predicted: -((y - predicted) ** 2),
    "neg_mean_absolute_error": lambda y, predicted: -np.abs(y - predicted),
}


def scorer_for(scoring: Any, estimator: Any) -> Callable[..., float]:
    """Scorer of `scoring`. The log loss gets all classes, because a client may lack some."""
    if isinstance(scoring, str) and scoring == "neg_log_loss":
        return make_scorer(
            log_loss,
            response_method="predict_proba",
            greater_is_better=False,
            labels=estimator.classes_,
        )
    return get_scorer(scoring)


_ESTIMATOR = attrgetter("estimator")


class Responses(BaseEstimator):
    """Stand-in for `estimator` whose predictions for `X` are made once, with groups and params.

    scikit-learn's scorers treat it as an estimator; :meth:`only` restricts it to some rows.
    """

    def __init__(
        self, estimator: Any, X: TableLike, groups: TableLike, params: dict[str, Any] | None = None
    ) -> None:
        self.estimator = estimator
        self.X = X
        self.groups = groups
        self.params = params
        self._made: dict[str, np.ndarray] = {}
        self._rows: Any = slice(None)

    def only(self, rows: Integers) -> "Responses":
        """The same responses, for these rows alone."""
        narrowed = Responses(self.estimator, self.X, self.groups, self.params)
        narrowed._made, narrowed._rows = self._made, rows
        return narrowed

    @available_if(has_method(_ESTIMATOR, "predict"))
    def predict(self, X: object) -> np.ndarray:
        """Predictions for the rows; `X` is ignored."""
        return self._response("predict")

    @available_if(has_method(_ESTIMATOR, "predict_proba"))
    def predict_proba(self, X: object) -> np.ndarray:
        """Class probabilities for the rows; `X` is ignored."""
        return self._response("predict_proba")

    @available_if(has_method(_ESTIMATOR, "decision_function"))
    def decision_function(self, X: object) -> np.ndarray:
        """Decision function for the rows; `X` is ignored."""
        return self._response("decision_function")

    @property
    def classes_(self) -> np.ndarray:
        """Class labels of the estimator."""
        return self.estimator.classes_

    def __sklearn_tags__(self):
        return get_tags(self.estimator)

    def __sklearn_is_fitted__(self):
        return True

    def _response(self, method):
        """Predictions by one method, made once for all rows, for the rows in use."""
        if method not in self._made:
            # Only if the estimator, or one inside it, requests them.
            routed = self.groups is not None and takes_groups(self.estimator, method)
            metadata = {"groups": self.groups} if routed else {}
            for name, values in (self.params or {}).items():
                if takes_groups(self.estimator, method, name):
                    metadata[name] = values
            self._made[method] = getattr(self.estimator, method)(self.X, **metadata)
        return self._made[method][self._rows]


def row_scores(scoring: Any, y: np.ndarray, responses: Responses) -> Floats | None:
    """Score (n,) of every row if a client's score is the mean over its rows, else None."""
    # For several targets, scores have their own averages.
    if not isinstance(scoring, str) or scoring not in ROW_SCORES or y.ndim > 1:
        return None
    predicted = np.asarray(responses.predict(None))
    if predicted.shape != y.shape or not {y.dtype.kind, predicted.dtype.kind} <= set("fiub"):
        return None  # scikit-learn's scorer raises the error
    return ROW_SCORES[scoring](y.astype(float), predicted.astype(float))


def mean_row_scores(rows: Floats, order: Integers, offsets: Integers) -> Floats:
    """Means (m,) over the clients' rows; each client has some."""
    # reduceat would give a client without rows the first row of the next client.
    return np.add.reduceat(rows[order], offsets[:-1]) / np.diff(offsets)


def score_clients(scoring, scorer, responses, y, order, offsets):
    """Scores (m,) of clients with rows ``order[offsets[i]:offsets[i + 1]]``; NaN if undefined.

    `scorer` is the one that `scoring` names. Every client must have rows.
    """
    y = np.asarray(y)
    rows = row_scores(scoring, y, responses)
    # The scorer refuses a row that is not finite, by name.
    if rows is not None and np.isfinite(rows[order]).all():
        return mean_row_scores(rows, order, offsets)
    return _score_one_by_one(scorer, responses, y, order, offsets)


def _score_one_by_one(scorer, responses, y, order, offsets):
    """Scores (m,) by one call of the scorer for each client."""
    scores = np.empty(len(offsets) - 1)
    with warnings.catch_warnings():
        # Expected: a client with one class has no ROC AUC, for example, and gets NaN.
        warnings.simplefilter("ignore", UndefinedMetricWarning)
        warnings.filterwarnings("ignore", "y_pred contains classes not in y_true")
        for i in range(len(scores)):
            rows = order[offsets[i] : offsets[i + 1]]
            try:
                scores[i] = scorer(responses.only(rows), rows, y[rows])
            except ValueError as error:
                # Some scorers refuse a client that lacks a class; any other error is the user's.
                lacks_class = len(np.unique(y[rows])) < len(np.unique(y))
                if "class" not in str(error) or not lacks_class:
                    raise
                scores[i] = np.nan
    return scores
