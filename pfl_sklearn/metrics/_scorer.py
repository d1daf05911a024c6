"""A scorer that passes client ids to predict and averages over clients."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np
from sklearn.metrics import get_scorer
from sklearn.utils import check_consistent_length
from sklearn.utils.metadata_routing import MetadataRequest, get_routing_for_object

from pfl_sklearn._clients import encode_clients, ids_of_rows, match_clients, rows_by_client
from pfl_sklearn._compat import num_samples
from pfl_sklearn._typing import Floats, TableLike
from pfl_sklearn._unwrap import predicting_estimator
from pfl_sklearn.base import UnseenClientsWarning
from pfl_sklearn.metrics._client_scores import known_clients, level_codes
from pfl_sklearn.metrics._responses import Responses, score_clients, scorer_for

_SUBSETS = ("all", "known", "new")
_CLIENTS_KEY = "groups"  # stands for the clients among the columns of a subset


class ClientScorer:
    """Scorer for ``scoring=`` of scikit-learn's tools that passes groups to ``predict``.

    scikit-learn's own string scorers do not pass them, so that a personalized estimator cannot know
    whose rows it predicts. The scorer needs metadata routing, or `client_column`.

    Parameters
    ----------
    scoring : str or scorer
        As in scikit-learn; larger is better.
    average : {"micro", "macro"}, callable or None, default="micro"
        How to average:

        - "micro" scores all rows together;
        - "macro" is the mean of the clients' scores;
        - a callable gets the array of the clients' scores and returns a float;
        - None returns a dict of scores by client id (a string), NaN where a score is not defined.
          scikit-learn's ``ScoringMonitor`` then keeps every client's score in every round.

        "macro" and callables leave out clients without a defined score (such as the ROC AUC of one
        class).
    subset : {"all", "known", "new"} or dict, default="all"
        Rows that count: those of all clients, of clients seen in fit, or of clients not seen. A
        dict such as ``{"groups": "known", "movie": "new"}`` has conditions, all of which a row must
        meet. "groups" stands for the clients; other keys are grouping columns of the fitted model
        (the keys of its `levels_`). Missing values count as new. Positions are those in the table
        that the model itself gets; names may be without the prefix of a ColumnTransformer.
    client_column : str or int, default=None
        Column of ids of `X`, for estimators wrapped in
        :class:`~pfl_sklearn.compose.ClientColumn`.

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn.estimation import GaussianMean
    >>> from pfl_sklearn.metrics import ClientScorer
    >>> X, y, site = np.zeros((6, 1)), np.array([1.0, 2, 3, 7, 8, 9]), np.array([1, 1, 1, 2, 2, 2])
    >>> model = GaussianMean().fit(X, y, groups=site)
    >>> scorer = ClientScorer("neg_mean_squared_error", average="macro")
    >>> round(scorer(model, X, y, groups=site), 2)
    -0.67
    """

    def __init__(
        self,
        scoring: Any,
        *,
        average: str | Callable[[Floats], float] | None = "micro",
        subset: str | Mapping[str | int, str] = "all",
        client_column: str | int | None = None,
    ) -> None:
        if average not in ("micro", "macro", None) and not callable(average):
            raise ValueError(
                f"average must be 'micro', 'macro', a callable or None; got {average!r}."
            )
        if not _is_subset(subset):
            raise ValueError(
                f"subset must be one of {', '.join(_SUBSETS)}, or a dict with 'known' or 'new' for "
                f"each column; got {subset!r}."
            )
        self.scoring = scoring
        self.average = average
        self.subset = subset
        self.client_column = client_column
        get_scorer(scoring)  # raises if there is no such scorer
        self._metadata_request = MetadataRequest(owner=self)
        # Requested by default, unlike scikit-learn's scorers, because predictions need them.
        for name in ("groups", "exposure", "offset"):
            self._metadata_request.score.add_request(param=name, alias=True)
        self._metadata_request.score.add_request(param="sample_weight", alias=None)

    def set_score_request(self, **requests: Any) -> Self:
        """Set the metadata that the scorer requests.

        By default it requests ``groups``, ``exposure`` and ``offset``.

        Parameters
        ----------
        **requests : dict
            ``sample_weight=True``, for "micro" averages.
        """
        for name, alias in requests.items():
            self._metadata_request.score.add_request(param=name, alias=alias)
        return self

    def get_metadata_routing(self) -> MetadataRequest:
        """Metadata that the scorer requests."""
        return get_routing_for_object(self._metadata_request)

    def __call__(
        self,
        estimator: Any,
        X: TableLike,
        y: TableLike,
        *,
        groups: TableLike = None,
        sample_weight: Any = None,
        **params: Any,
    ) -> Any:
        """Score of a fitted estimator: a float, or a dict of floats if `average` is None.

        Parameters
        ----------
        estimator : fitted estimator
            A client-aware estimator, or a pipeline, ClientColumn or search around one.
        X, y : array-likes of n_rows rows
            Features, as the estimator's ``predict`` takes them, and true values.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row.
        sample_weight : array-like of shape (n_rows,), default=None
            Weights of the rows, for "micro" averages.
        **params : dict
            Other arguments of the predictions, such as ``exposure``.

        Raises
        ------
        ValueError
            If `subset` has no row, or names a column that is not a grouping of the model.
        """
        check_consistent_length(X, y)
        ids = groups if groups is not None else ids_of_rows(X, None, self.client_column)
        if ids is None and (_CLIENTS_KEY in self._conditions or self.average != "micro"):
            raise ValueError(
                f"{self!r} needs groups= (sklearn.set_config(enable_metadata_routing=True)) or "
                "client_column=."
            )
        rows = self._rows(estimator, X, groups, ids)
        with warnings.catch_warnings():
            if _CLIENTS_KEY in self._conditions:  # new clients are intended, or do not count
                warnings.simplefilter("ignore", UnseenClientsWarning)
            # The predict of a search takes no client ids; that of its best estimator does.
            responses = Responses(predicting_estimator(estimator), X, groups, params)
            return self._score(estimator, responses, y, ids, rows, sample_weight)

    def __repr__(self):
        return (
            f"ClientScorer({self.scoring!r}, average={self.average!r}, subset={self.subset!r}, "
            f"client_column={self.client_column!r})"
        )

    # scikit-learn's protocol of scorers.
    def _accept_sample_weight(self):
        return self.average == "micro"

    def _routing_repr(self):
        return repr(self)

    @property
    def _conditions(self):
        """Whether clients ("groups") and the levels of columns are to be "known" or "new"."""
        if isinstance(self.subset, str):
            return {} if self.subset == "all" else {_CLIENTS_KEY: self.subset}
        return self.subset

    def _rows(self, estimator, X, groups, ids):
        """Positions of the rows that count, with clients `ids`."""
        n_rows = num_samples(X)
        codes = {}
        if _CLIENTS_KEY in self._conditions:
            codes[_CLIENTS_KEY] = match_clients(ids, n_rows, known_clients(estimator))
        columns = [name for name in self._conditions if name != _CLIENTS_KEY]
        if columns:
            by_column = level_codes(estimator, X, groups, columns)
            codes |= dict(zip(columns, by_column, strict=True))
        in_subset = np.ones(n_rows, dtype=bool)
        for name, condition in self._conditions.items():
            in_subset &= (codes[name] >= 0) == (condition == "known")
        rows = np.flatnonzero(in_subset)
        if not len(rows) and self._conditions:
            of = f"rows of {self.subset} clients" if isinstance(self.subset, str) else "such rows"
            raise ValueError(f"subset={self.subset!r}: there are no {of} to score.")
        return rows

    def _score(self, estimator, responses, y, ids, rows, sample_weight):
        """Score of the rows that count, with clients `ids`."""
        scorer = scorer_for(self.scoring, estimator)
        if self.average != "micro":
            return self._average(scorer, responses, y, ids, rows, sample_weight)
        # A scorer that takes no weights must not get None either.
        weights = {}
        if sample_weight is not None:
            weights["sample_weight"] = np.asarray(sample_weight)[rows]
        return float(scorer(responses.only(rows), rows, np.asarray(y)[rows], **weights))

    def _average(self, scorer, responses, y, ids, rows, sample_weight):
        """Average of the clients' scores, or all of them by id."""
        if sample_weight is not None:  # weights of rows, but clients are averaged
            raise ValueError(
                f"sample_weight is supported for average='micro' only; got {self.average!r}."
            )
        clients, codes = encode_clients(ids, num_samples(responses.X))
        scored, codes = np.unique(codes[rows], return_inverse=True)
        order, offsets = rows_by_client(codes, len(scored))
        scores = score_clients(self.scoring, scorer, responses, y, rows[order], offsets)
        if self.average is None:
            names = clients[scored]
            # Strings, because monitors make columns of them.
            return {str(name): float(score) for name, score in zip(names, scores, strict=True)}
        # An undefined score of one client must not make the average undefined.
        scores = scores[np.isfinite(scores)]
        if not len(scores):
            raise ValueError(f"{self!r}: the score is not defined for any client.")
        return float(self.average(scores) if callable(self.average) else np.mean(scores))


def _is_subset(subset):
    if isinstance(subset, Mapping):
        return len(subset) > 0 and all(kind in ("known", "new") for kind in subset.values())
    return subset in _SUBSETS
