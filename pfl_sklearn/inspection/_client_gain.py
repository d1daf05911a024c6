"""Plot of every client's score: its own model against the population model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, cast

import numpy as np
from sklearn.base import is_classifier
from sklearn.utils import check_consistent_length

from pfl_sklearn._clients import encode_clients, rows_by_client
from pfl_sklearn._compat import num_samples
from pfl_sklearn._parameters import with_parameters
from pfl_sklearn._typing import Floats, Integers, TableLike
from pfl_sklearn._unwrap import predicting_estimator
from pfl_sklearn.inspection import _drawing as drawing
from pfl_sklearn.inspection._drawing import COLORS, Axes
from pfl_sklearn.metrics import client_scores

_LARGEST_AREA, _SMALLEST_AREA = 140.0, 8.0  # of marks, in square points
_DISTINCT_AREAS = 1.5  # smallest ratio of areas that the eye distinguishes
_AXES_MARGIN = 0.05  # around the scores, so that marks at the ends are not cut


@with_parameters
class ClientGainDisplay:
    """Scores of the clients' own models against those of the population model on the same rows.

    Each mark is a client; its area is proportional to the client's rows, down to a smallest dot. It
    is filled if the client's own model is better, a ring if it is worse, and a cross if both are
    equally good. The line marks equal scores, the diamond the mean over clients. Scales are
    logarithmic if scores are positive and their 95 % quantile is ten times their 5 % quantile.

    Parameters
    ----------
    clients : ndarray of shape (n_clients,)
        Client ids.
    score, population_score : ndarrays of shape (n_clients,)
        Score of each client's own model and of the population model; NaN where it is not defined.
    n_rows : ndarray of shape (n_clients,)
        Number of rows behind the scores of each client.
    score_name : str, default="score"
        Name of the score, for the axes.
    greater_is_better : bool, default=True
        False for errors.

    Attributes
    ----------
    ax_, figure_ : matplotlib Axes and Figure
        The axes, and their figure.
    n_better_, n_worse_, n_equal_ : int
        Number of clients whose own model is better, worse, or equally good.

    Notes
    -----
    Give rows that fit did not see: on its rows, a client's own model looks better than it is.
    Scores of clients with few rows are noisy, so small marks off the line are no evidence. Scores
    are exact values of the clients' data, which no epsilon covers.

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn.estimation import GaussianMean
    >>> from pfl_sklearn.inspection import ClientGainDisplay
    >>> rng = np.random.default_rng(0)
    >>> site, X = np.repeat(np.arange(20), 10), np.zeros((200, 1))
    >>> y = rng.normal(size=20)[site] + rng.normal(size=200)
    >>> model = GaussianMean().fit(X[::2], y[::2], groups=site[::2])
    >>> display = ClientGainDisplay.from_estimator(
    ...     model, X[1::2], y[1::2], groups=site[1::2])  # doctest: +SKIP
    """

    clients: Any
    score: Floats
    population_score: Floats
    n_rows: Integers
    score_name: str = "score"
    greater_is_better: bool = True

    @classmethod
    def from_estimator(
        cls,
        estimator: Any,
        X: TableLike,
        y: TableLike,
        *,
        groups: TableLike = None,
        scoring: str | Callable[..., float] | None = None,
        client_column: str | int | None = None,
        negate_score: bool = False,
        score_name: str | None = None,
        ax: Axes | None = None,
    ) -> Self:
        """Plot the scores of a fitted estimator and of its population model.

        Parameters
        ----------
        estimator : fitted estimator
            A client-aware estimator, or a pipeline, ClientColumn or search around one.
        X : array-like of n_rows rows
            Features of rows that were held out, as the estimator's ``predict`` takes them.
        y : array-like of shape (n_rows,)
            Their true values.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed without `client_column`.
        scoring : str, scorer or None, default=None
            As in scikit-learn; larger is better. None: the mean squared error, or for classifiers
            the log-loss (the accuracy if they predict no probabilities), which clients with one row
            or one class have as well. R squared and ROC AUC need many rows per client.
        client_column : str or int, default=None
            Column of ids of `X`, for estimators wrapped in
            :class:`~pfl_sklearn.compose.ClientColumn`.
        negate_score : bool, default=False
            Draw negated scores, which are errors for scorers such as "neg_mean_squared_error".
            ``scoring=None`` draws errors.
        score_name : str or None, default=None
            Name of the score. None: made from `scoring`.
        ax : matplotlib Axes, default=None
            Where to draw. None: a new figure.

        Returns
        -------
        ClientGainDisplay
            Of the clients that fit saw; others have no model of their own.

        Raises
        ------
        ValueError
            - If `estimator` contains no client-aware estimator, or an ensemble of them.
            - If there are neither `groups` nor `client_column`, or if they differ.
            - If no client of fit has a score.
        """
        if scoring is None:
            scoring, negate_score = _default_scoring(estimator)
        table = client_scores(
            estimator, X, y, groups=groups, scoring=scoring, client_column=client_column
        )
        # Other clients have no model of their own: their gain is 0 by construction.
        table = table[table["known"]]
        sign = -1 if negate_score else 1
        display = cls(
            clients=table.index.to_numpy(),
            score=sign * table["score"].to_numpy(),
            population_score=sign * table["population_score"].to_numpy(),
            n_rows=table["n_rows"].to_numpy(),
            score_name=_name_of(scoring, negate_score) if score_name is None else score_name,
            greater_is_better=not negate_score,
        ).plot(ax=ax)
        return cast(Self, drawing.with_coverage(display, estimator, shows_rows=True))

    @classmethod
    def from_predictions(
        cls,
        y: TableLike,
        personal: TableLike,
        population: TableLike,
        *,
        groups: TableLike,
        metric: Callable[..., float],
        greater_is_better: bool = True,
        score_name: str | None = None,
        ax: Axes | None = None,
    ) -> Self:
        """Plot the scores of two models, by client.

        Parameters
        ----------
        y : array-like of shape (n_rows,)
            True values.
        personal, population : array-likes of n_rows rows
            Predictions by the clients' own models, and by the model to compare them with, as
            `metric` takes them.
        groups : array-like of shape (n_rows,)
            Client id of every row.
        metric : callable
            From true values and predictions to a number, as in :mod:`sklearn.metrics`. A client for
            whom it is NaN is left out.
        greater_is_better : bool, default=True
            False for errors.
        score_name : str or None, default=None
            Name of the score. None: made from the name of `metric`.
        ax : matplotlib Axes, default=None
            Where to draw. None: a new figure.

        Raises
        ------
        ValueError
            - If lengths differ.
            - If `metric` is not defined for any client.
        """
        check_consistent_length(y, personal, population)
        ids, codes = encode_clients(groups, num_samples(y))
        order, offsets = rows_by_client(codes, len(ids))
        rows = np.split(order, offsets[1:-1])
        y = np.asarray(y)
        score, population_score = (
            np.array([metric(y[at], predicted[at]) for at in rows], dtype=float)
            for predicted in map(np.asarray, (personal, population))
        )
        if score_name is None:
            score_name = getattr(metric, "__name__", "score").replace("_", " ")
        return cls(
            clients=ids,
            score=score,
            population_score=population_score,
            n_rows=np.diff(offsets),
            score_name=score_name,
            greater_is_better=greater_is_better,
        ).plot(ax=ax)

    def plot(self, *, ax: Axes | None = None) -> Self:
        """Draw the display.

        Parameters
        ----------
        ax : matplotlib Axes, default=None
            Where to draw. None: a new figure.

        Raises
        ------
        ValueError
            If no client has both scores.
        """
        # A score such as the area under a curve is not defined for a client of one class.
        has_scores = np.isfinite(self.score) & np.isfinite(self.population_score)
        if not has_scores.any():
            raise ValueError(
                f"no client has a score ({self.score_name}) of both models; give rows of clients "
                "that fit saw, for whom the score is defined."
            )
        own_figure = ax is None
        # Inches: nearly a square for the scores, and room for the legend on its right.
        ax = drawing.axes_for(ax, "plot", (1, 1), (7.4, 4.8))[0]
        personal, population = self.score[has_scores], self.population_score[has_scores]
        # Equal means identical, as when a client has the population's model.
        sign = np.sign(personal - population) * (1 if self.greater_is_better else -1)
        self.n_better_, self.n_worse_, self.n_equal_ = (
            int(np.sum(sign == which)) for which in (1, -1, 0)
        )
        _scale(ax, np.concatenate([personal, population]))
        entries = _draw_marks(ax, population, personal, sign, self.n_rows[has_scores])
        entries += _size_entries(ax, self.n_rows[has_scores])
        if not has_scores.all():
            label = f"not drawn, without a score: {np.sum(~has_scores)}"
            entries += ax.plot([], [], " ", label=label)
        ax.set_xlabel(f"{self.score_name}, population model")
        ax.set_ylabel(f"{self.score_name}, client's own model")
        # The legend is long: outside the axes of our own figure it hides no client.
        owner: Any = ax.figure if own_figure else ax
        loc = "outside right upper" if own_figure else "best"
        owner.legend(handles=entries, loc=loc, labelspacing=0.8, frameon=False, fontsize="small")
        self.ax_, self.figure_ = ax, ax.figure
        return self


def _default_scoring(estimator):
    """Name of a score that is defined for a client of one row, and whether it is an error."""
    if not is_classifier(estimator):
        return "neg_mean_squared_error", True
    if hasattr(predicting_estimator(estimator), "predict_proba"):
        return "neg_log_loss", True
    return "accuracy", False


def _name_of(scoring, negated):
    """Name of a score in words, without "neg" if it is negated again."""
    if not isinstance(scoring, str):
        return "score"
    return (scoring.removeprefix("neg_") if negated else scoring).replace("_", " ")


def _scale(ax, scores):
    """Same scale and limits on both axes, and the line where both scores are equal."""
    low, high = scores.min(), scores.max()
    # Quantiles, as one outlier should not squeeze all other clients into a corner.
    if low > 0 and drawing.is_wide(np.quantile(scores, [0.05, 0.95])):
        ax.set(xscale="log", yscale="log")
        margin = (high / low) ** _AXES_MARGIN
        limits = low / margin, high * margin
    else:
        margin = _AXES_MARGIN * ((high - low) or abs(high) or 1.0)
        limits = low - margin, high + margin
    ax.set(xlim=limits, ylim=limits)
    ax.plot(limits, limits, color="0.3", lw=1, ls="--", zorder=1)


def _areas(n_rows, largest):
    """Areas of marks, in proportion to the rows."""
    return np.maximum(_LARGEST_AREA * n_rows / largest, _SMALLEST_AREA)


def _draw_marks(ax, x, y, sign, n_rows):
    """Draw marks of the clients; return a legend entry for each kind, with its number."""
    color, area = COLORS["personalized"], _areas(n_rows, n_rows.max())
    alpha = float(np.clip(6 / np.sqrt(len(x)), 0.2, 0.7))  # marks overlap: many are fainter
    kinds: list[tuple[int, str, dict[str, Any]]] = [
        (1, "own model better", {"marker": "o", "color": color, "lw": 0}),
        (-1, "own model worse", {"marker": "o", "facecolor": "none", "edgecolor": color}),
        (0, "equally good", {"marker": "x", "color": "0.3", "lw": 1}),
    ]
    entries = []
    for which, name, style in kinds:
        of_kind = sign == which
        ax.scatter(x[of_kind], y[of_kind], s=area[of_kind], alpha=alpha, **style)
        if of_kind.any():
            label = f"{name}: {of_kind.sum()} of {len(sign)} ({of_kind.mean():.0%})"
            entries.append(ax.scatter([], [], s=36, label=label, **style))
    mean = ax.plot(x.mean(), y.mean(), "D", color="0.1", ms=6, label="mean of the clients")
    return [*entries, *mean]


def _size_entries(ax, n_rows):
    """Legend entries for the areas; one line of text if the areas hardly differ."""
    low, high = int(n_rows.min()), int(n_rows.max())
    if high < _DISTINCT_AREAS * low:
        label = f"{low} to {high} rows each" if low < high else f"{_n_rows_text(low)} each"
        return ax.plot([], [], " ", label=label)
    middle = round((low * high) ** 0.5)  # geometric: numbers of rows differ by factors
    return [
        ax.scatter([], [], s=_areas(n, high), color="0.6", lw=0, label=_n_rows_text(n))
        for n in sorted({low, middle, high})
    ]


def _n_rows_text(n):
    return f"{n} row" if n == 1 else f"{n} rows"
