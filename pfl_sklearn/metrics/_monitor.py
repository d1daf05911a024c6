"""A callback that scores every client after rounds, and can end them."""

import math
from numbers import Integral
from typing import Any

import pandas as pd
from sklearn.utils import check_consistent_length

from pfl_sklearn._typing import TableLike
from pfl_sklearn.metrics._scorer import ClientScorer


class ClientMonitor:
    """Callback that scores every client's model after rounds, on rows that the fit does not see.

    Give it to an estimator on rounds by ``set_callbacks``, for one fit at a time; scores of copies
    in other processes are lost.

    Parameters
    ----------
    X : array-like of n_rows rows
        Features as the estimator itself takes them: after the other steps of a pipeline, and
        without a column of client ids.
    y : array-like of shape (n_rows,)
        True values.
    groups : array-like of shape (n_rows,)
        Client id of every row.
    scoring : str or scorer
        As in scikit-learn; larger is better.
    every : int >= 1, default=1
        Rounds from one scoring to the next. Scoring costs one prediction for all rows, and the
        method's final steps on clients, such as new personal networks for all of them.
    patience : int >= 1 or None, default=None
        End the rounds when the mean over clients has not improved in so many scorings. The models
        are those of the last round; for those of `best_round_`, fit that many rounds (unless the
        method depends on the number of rounds, as AdaPeD's start does). None: never.

    Attributes
    ----------
    scores_ : DataFrame of shape (n_scorings, n_clients)
        Scores, indexed by round (from 1), with a column for each client id (a string); NaN where a
        score is not defined. They continue with ``warm_start`` and restart with a new fit.
    best_round_ : int
        The first round after which the mean over clients was highest.

    Notes
    -----
    The models are those of a fit that ends there, including the method's final steps on clients,
    such as the personal steps of pFedMe, the adaptation of Per-FedAvg, fine-tuning or new heads.
    Scores are exact, hence not private. With `patience` a noisy fit has an infinite epsilon even if
    its rounds do not end early, because their number depends on the rows. The estimator, its
    pickles and its clones hold the monitor with its rows; results of ``release`` and ``for_client``
    do not.

    Examples
    --------
    >>> from pfl_sklearn.datasets import load_digits_clients
    >>> from pfl_sklearn.metrics import ClientMonitor
    >>> from pfl_sklearn.neural_network import FedAvgClassifier
    >>> digits = load_digits_clients(10, classes_per_client=3)
    >>> X, y, who = digits.data, digits.target, digits.groups
    >>> monitor = ClientMonitor(X[::4], y[::4], who[::4], scoring="accuracy", every=2)
    >>> model = FedAvgClassifier(n_rounds=6, random_state=0).set_callbacks(monitor)
    >>> held = [row % 4 > 0 for row in range(len(y))]
    >>> model = model.fit(X[held], y[held], groups=who[held])
    >>> monitor.scores_.shape, monitor.scores_.index.tolist()
    ((3, 10), [2, 4, 6])
    """

    def __init__(
        self,
        X: TableLike,
        y: TableLike,
        groups: TableLike,
        *,
        scoring: Any,
        every: int = 1,
        patience: int | None = None,
    ) -> None:
        check_consistent_length(X, y, groups)
        for name, value in (("every", every), ("patience", 1 if patience is None else patience)):
            if not (isinstance(value, Integral) and value >= 1):
                raise ValueError(f"{name} must be an integer of at least 1; got {value!r}.")
        self._scorer = ClientScorer(scoring, average=None)
        self._rows, self._groups = (X, y), groups
        self._every, self._patience = every, patience
        self._by_round: dict[int, dict[str, float]] = {}
        self.may_end_rounds = patience is not None

    @property
    def scores_(self) -> pd.DataFrame:
        """Scores (n_scorings, n_clients), indexed by round."""
        return pd.DataFrame.from_dict(self._by_round, orient="index").rename_axis("round")

    @property
    def best_round_(self) -> int:
        """First round after which the mean over clients was highest."""
        if not self._by_round:
            raise AttributeError("there are no scores yet; give the monitor to a fit on rounds.")
        rounds, scores = [*self._by_round], self.scores_
        return rounds[int(scores.mean(axis=1).argmax())]

    # scikit-learn's protocol of callbacks ---------------------------------------------------------

    def setup(self, estimator: Any, context: Any) -> None:
        """Does nothing; the number of rounds shows whether a fit is new.

        Parameters
        ----------
        estimator, context : object
            Ignored.
        """

    def teardown(self, estimator: Any, context: Any) -> None:
        """Does nothing, so that the scores stay.

        Parameters
        ----------
        estimator, context : object
            Ignored.
        """

    def on_fit_task_begin(self, estimator: Any, context: Any) -> None:
        """Does nothing; a model is scored after its round.

        Parameters
        ----------
        estimator, context : object
            Ignored.
        """

    def _looks_after(self, n_rounds):
        """Whether to score the models after so many rounds; the loop over rounds asks as well."""
        return n_rounds % self._every == 0

    def on_fit_task_end(
        self, estimator: Any, context: Any, *, fitted_estimator: Any = None
    ) -> bool:
        """Score the clients if it is time.

        Parameters
        ----------
        estimator : estimator
            Ignored.
        context : sklearn.callback.CallbackContext
            The current task.
        fitted_estimator : estimator
            The estimator as if fitted up to here.

        Returns
        -------
        bool
            Whether the rounds are to end.
        """
        if context.task_name != "round":
            return False
        t = fitted_estimator.n_rounds_
        # Later rounds come from an earlier fit, or from before a return to earlier models.
        self._by_round = {past: scores for past, scores in self._by_round.items() if past < t}
        if not self._looks_after(t):
            return False
        scores = self._scorer(fitted_estimator, *self._rows, groups=self._groups)
        if all(map(math.isnan, scores.values())):
            raise ValueError(f"{self._scorer!r}: the score is not defined for any client.")
        self._by_round[t] = scores
        since_best = [past for past in self._by_round if past > self.best_round_]
        return self._patience is not None and len(since_best) >= self._patience
