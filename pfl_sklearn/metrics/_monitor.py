"""A callback that scores every client while rounds go on, and can end them."""

import math
from numbers import Integral
from typing import Any

import pandas as pd
from sklearn.utils import check_consistent_length

from pfl_sklearn._typing import TableLike
from pfl_sklearn.metrics._scorer import ClientScorer


class ClientMonitor:
    """Callback that scores every client's model after rounds, on rows that the fit does not see.

    Give it to an estimator on rounds by ``set_callbacks``, for one fit at a time: what copies in
    other processes see is lost.

    Parameters
    ----------
    X : array-like of n_rows rows
        Features to score on, as the estimator itself takes them: behind the other steps of a
        pipeline, and without a column of client ids.
    y : array-like of shape (n_rows,)
        True values.
    groups : array-like of shape (n_rows,)
        Client id of every row.
    scoring : str or scorer
        As in scikit-learn; larger is better.
    every : int >= 1, default=1
        Rounds from one look to the next. A look costs one prediction for all rows, and what the
        method has clients do after the last round: new personal nets for all of them, say.
    patience : int >= 1 or None, default=None
        End the rounds when the mean over clients has not improved for so many looks. The models
        are those of the last round; to have those of `best_round_`, fit that many rounds, unless
        what the method does in a round depends on their number, as AdaPeD's start does. None:
        never.

    Attributes
    ----------
    scores_ : DataFrame of shape (n_looks, n_clients)
        Scores, indexed by round (from 1), with a column for each client id (a string); NaN where a
        score is not defined. They go on with ``warm_start``, and start anew with a new fit.
    best_round_ : int
        The first round after which the mean over clients was highest.

    See Also
    --------
    ClientScorer : Scorer of clients, also for scikit-learn's ``ScoringMonitor``.
    pfl_sklearn.inspection.ConvergenceDisplay : Draws `scores_`, as its ``scores``.

    Notes
    -----
    The models are those of a fit that ends there: after what clients do at the end, such as the
    personal steps of pFedMe, the adaptation of Per-FedAvg, fine-tuning or new heads. Scores are
    exact, hence not private. With `patience` a fit with noise has an infinite epsilon, whether or
    not its rounds end early: their number tells of the rows. The estimator, its pickles and its
    clones hold the monitor with its rows; what ``release`` and ``for_client`` give does not.

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
        """Scores (n_looks, n_clients), indexed by round."""
        return pd.DataFrame.from_dict(self._by_round, orient="index").rename_axis("round")

    @property
    def best_round_(self) -> int:
        """First round after which the mean over clients was highest."""
        if not self._by_round:
            raise AttributeError("there are no scores yet; give the monitor to a fit of rounds.")
        rounds, scores = [*self._by_round], self.scores_
        return rounds[int(scores.mean(axis=1).argmax())]

    # What scikit-learn asks of a callback ---------------------------------------------------------

    def setup(self, estimator: Any, context: Any) -> None:
        """Nothing: rounds say by their number whether a fit begins or goes on.

        Parameters
        ----------
        estimator : estimator
            The one that is fitted.
        context : sklearn.callback.CallbackContext
            The task that it is at.
        """

    def teardown(self, estimator: Any, context: Any) -> None:
        """Nothing: the scores stay.

        Parameters
        ----------
        estimator : estimator
            The one that is fitted.
        context : sklearn.callback.CallbackContext
            The task that it is at.
        """

    def on_fit_task_begin(self, estimator: Any, context: Any) -> None:
        """Nothing: a model is scored after its round.

        Parameters
        ----------
        estimator : estimator
            The one that is fitted.
        context : sklearn.callback.CallbackContext
            The task that it is at.
        """

    def _looks_after(self, n_rounds):
        """Whether it scores the models after so many rounds; the rounds ask, too."""
        return n_rounds % self._every == 0

    def on_fit_task_end(
        self, estimator: Any, context: Any, *, fitted_estimator: Any = None
    ) -> bool:
        """Score the clients if it is time.

        Parameters
        ----------
        estimator : estimator
            The one that is fitted.
        context : sklearn.callback.CallbackContext
            The task that it is at.
        fitted_estimator : estimator
            As if it had been fitted up to here.

        Returns
        -------
        bool
            Whether the rounds are to end.
        """
        if context.task_name != "round":
            return False
        t = fitted_estimator.n_rounds_
        # Rounds that come again are of another fit, or of one that went back.
        self._by_round = {seen: each for seen, each in self._by_round.items() if seen < t}
        if not self._looks_after(t):
            return False
        scores = self._scorer(fitted_estimator, *self._rows, groups=self._groups)
        if all(map(math.isnan, scores.values())):
            raise ValueError(f"{self._scorer!r}: the score is not defined for any client.")
        self._by_round[t] = scores
        looks = [each for each in self._by_round if each > self.best_round_]
        return self._patience is not None and len(looks) >= self._patience
