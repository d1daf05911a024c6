"""Plot of a fit on rounds: losses, clipping, scores and epsilon by round."""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any, NamedTuple, Self

import numpy as np
import pandas as pd
from sklearn.utils.validation import check_is_fitted

from pfl_sklearn._parameters import with_parameters
from pfl_sklearn._rounds.privacy import epsilon_by_round, rounds_of
from pfl_sklearn._typing import Floats, Integers
from pfl_sklearn._unwrap import innermost_estimator
from pfl_sklearn.inspection import _drawing as drawing
from pfl_sklearn.inspection._drawing import COLORS
from pfl_sklearn.inspection._privacy_accuracy import promise_of
from pfl_sklearn.privacy import privacy_of

_AXIS_LABELS = {
    "loss": "mean loss",
    "clipped": "share clipped",
    "clip_norm": "clipping bound",
    "n_clients": "clients in the round",
    "bytes_sent": "bytes sent in the round",
}
_MOST_EPSILONS = 12  # each may take a second if clients are sampled
_ADVERSARIES = {
    "central": "against all other clients together; the server is trusted",
    "local": "against the server and all other clients together",
}
_NOT_COVERED = "It covers the release, not the losses, clipped shares and scores drawn here."
_LOG_COLUMNS = {  # of a ScoringMonitor, besides the scores
    "task_id_path",
    "parent_task_id_path",
    "estimator_name",
    "task_name",
    "task_id",
    "sequential_subtasks",
}


class RoundCurve(NamedTuple):
    """Values (m,) of a quantity at rounds (m,), counted from 1.

    `n_clients` (m,) is given if the values are means over so many clients. `band` (2, m) are
    deciles of the clients around a median, `target` is the value that an adaptive bound aims at,
    and `note` is a text above the panel.
    """

    name: str
    label: str
    rounds: Integers
    values: Floats
    n_clients: Integers | None = None
    band: Floats | None = None
    target: float | None = None
    note: str = ""


def round_curves(
    estimator: Any, quantities: str | list[str] | None, scores: Any
) -> list[RoundCurve]:
    """Curves of a fitted estimator: the requested quantities, then the scores."""
    check_is_fitted(estimator)
    fitted = innermost_estimator(estimator)
    history = getattr(fitted, "history_", None)
    if history is None:
        raise ValueError(
            f"{type(fitted).__name__} has no history_; expected a fitted estimator on rounds, such "
            "as PPSGDRegressor, and not the result of release() or for_client()."
        )
    report = privacy_of(estimator)
    if quantities is None:
        quantities = _default_quantities(fitted, report)
    names = [quantities] if isinstance(quantities, str) else list(quantities)
    curves = [_quantity_curve(fitted, report, name) for name in names]
    if scores is not None:
        curves += _score_curves(fitted, scores)
    if not curves:
        raise ValueError("quantities is empty; name at least one of them, or give scores.")
    return curves


def _default_quantities(fitted, report):
    """Names of the quantities to draw by default: those that are defined and not constant."""
    history = fitted.history_
    bound = history.get("clip_norm", np.array([math.inf]))
    clips = np.isfinite(bound).any()
    names = ["loss", *(name for name in _round_columns(history) if name not in _AXIS_LABELS)]
    names += ["clipped"] if clips else []
    names += ["clip_norm"] if clips and np.ptp(bound) > 0 else []  # a constant shows nothing
    return [*names, "epsilon"] if _private_events(fitted, report) else names


def _round_columns(history):
    """Names of the columns with one value per round."""
    return [name for name, values in history.items() if np.ndim(values) == 1]


def _private_events(fitted, report):
    """Events of the rounds if they have a finite epsilon above 0; () otherwise."""
    progress = getattr(fitted, "_progress", None)
    if progress is None or not 0 < report.epsilon < math.inf:
        return ()
    return progress.spent if rounds_of(progress.spent) else ()


def _quantity_curve(fitted, report, name):
    """Curve of a column of the history, or of epsilon."""
    if name == "epsilon":
        return _epsilon_curve(fitted, report)
    history = fitted.history_
    if name not in (columns := _round_columns(history)):
        raise ValueError(f"quantities must be of {[*columns, 'epsilon']}; got {name!r}.")
    values = np.asarray(history[name], dtype=float)
    curve = RoundCurve(name, _AXIS_LABELS.get(name, name), np.arange(1, len(values) + 1), values)
    if name not in ("loss", "clipped"):
        return curve
    curve = curve._replace(n_clients=np.asarray(history["n_clients"]))
    quantile = getattr(fitted, "clip_quantile", None)
    if name == "loss" or quantile is None:
        return curve
    # An adaptive bound changes until this share of the messages is clipped.
    label = f"{curve.label}\n(dotted: target {1 - quantile:.3g})"
    return curve._replace(target=1 - quantile, label=label)


def _epsilon_curve(fitted, report):
    spent = _private_events(fitted, report)
    if not spent:
        raise ValueError(
            f"there is no epsilon to draw by round: got privacy_of(...) with epsilon = "
            f"{report.epsilon:g}; expected a finite one above 0, of an estimator that release() or "
            f"for_client() did not return. {' '.join(report.warnings)}"
        )
    rounds = _rounds_of_epsilon(sum(event.n_rounds for event in rounds_of(spent)))
    values = np.array(epsilon_by_round(spent, report.delta, report.relation, rounds))
    promise = promise_of(report.unit, report.relation, report.delta)
    note = f"epsilon of the first rounds: {promise};\n{_ADVERSARIES[report.trust]}.\n{_NOT_COVERED}"
    return RoundCurve("epsilon", "epsilon", rounds, values, note=note)


def _rounds_of_epsilon(n_rounds):
    """Rounds at which to compute epsilon: all if they are few, otherwise more early ones."""
    if n_rounds <= _MOST_EPSILONS:
        return np.arange(1, n_rounds + 1)
    grid = np.linspace(0, 1, _MOST_EPSILONS) ** 2  # epsilon grows about with the root of the rounds
    return np.unique(np.maximum(np.rint(grid * n_rounds), 1)).astype(int)


def _score_curves(fitted, scores):
    """One curve per score; scores of clients make one curve together."""
    rows = ""
    if hasattr(scores, "get_logs"):
        table, rows = _monitored_scores(fitted, scores), "\n(rows of the fit)"
    elif isinstance(scores, pd.Series | pd.DataFrame):
        table = pd.DataFrame(scores).sort_index()
    else:
        raise TypeError(
            "scores must be a ScoringMonitor, or a Series or DataFrame indexed by round; got "
            f"{type(scores).__name__}."
        )
    rounds = table.index.to_numpy()
    if rounds.dtype.kind not in "iu" or (rounds < 1).any():
        raise ValueError(
            f"the index of scores must hold rounds, counted from 1; got {rounds[:3].tolist()}."
        )
    names = [str(name) for name in table.columns]
    if len(names) > 1 and set(names) <= {str(client) for client in fitted.clients_}:
        return [_clients_curve(rounds, table.to_numpy(dtype=float), rows)]
    return [
        RoundCurve(name, name + rows, rounds, table[column].to_numpy(dtype=float))
        for name, column in zip(names, table.columns, strict=True)
    ]


def _clients_curve(rounds, scores, rows):
    """Median of the scores (m, n_clients) and the deciles around it; clients may lack a score."""
    scores = scores[:, np.isfinite(scores).any(axis=0)]  # quantiles of only NaN would warn
    # Deciles, because extremes of many clients are mostly those with few rows.
    low, middle, high = np.nanquantile(scores, [0.1, 0.5, 0.9], axis=1)
    label = f"score of {scores.shape[1]} clients{rows}"
    return RoundCurve("client scores", label, rounds, middle, band=np.stack([low, high]))


def _monitored_scores(fitted, monitor):
    """Scores of the last fit that a ScoringMonitor recorded, indexed by round."""
    log = monitor.get_logs().data_as_pandas
    # It also logs the fit around the rounds.
    log = log[log["task_name"] == "round"]
    if len(log):  # it keeps the rounds of all its fits
        last = log["parent_task_id_path"].iloc[-1]
        log = log[[path == last for path in log["parent_task_id_path"]]]
    n_rounds = fitted.n_rounds_
    # After a return to the best models, rounds of the log and of the model differ.
    went_back = getattr(fitted, "_ends_when_flat", False) and (
        fitted.warm_start or len(log) < n_rounds
    )
    if not 0 < len(log) <= n_rounds or went_back:
        raise ValueError(
            f"scores holds {len(log)} rounds, which are not the {n_rounds} rounds of the model. A "
            "fit that ends when its loss is flat goes back to its best models: give it n_rounds. "
            "Otherwise give the monitor of the last fit."
        )
    names = [name for name in log.columns if name not in _LOG_COLUMNS]
    table = log[names].dropna(axis=1, how="all")
    return table.set_axis(np.arange(n_rounds - len(log), n_rounds) + 1, axis=0)


_MOST_MARKS = 40  # on a line; more would merge
_WINDOWS_PER_FIT = 25  # for automatic running means, end to end
_REACH_BACK = 4  # a window at round k reaches back by at most k / 4
_PANEL_INCHES = 1.5


@with_parameters
class ConvergenceDisplay:
    """Losses, clipping, scores and epsilon of a fit on rounds, one panel for each.

    A mean over the clients of a round is drawn in grey, and its running mean in blue. A scale is
    logarithmic if all values are positive and the largest is at least ten times the smallest.

    Parameters
    ----------
    curves : list of RoundCurve
        One per panel, with name, label, rounds, values, and what is drawn with them.

    Attributes
    ----------
    axes_ : ndarray of matplotlib Axes, of shape (n_panels,)
        The axes, one per panel, with a common horizontal axis in a figure of our own.
    lines_ : list of matplotlib Line2D
        One per panel, in order: the running mean where there is one, otherwise the values.
    figure_ : matplotlib Figure
        The figure of the axes.

    Notes
    -----
    Losses, clipped shares and scores are exact values of the clients' data: no epsilon covers
    them, and the plot is not fit for publication if the data are not.

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn import PPSGDRegressor
    >>> from pfl_sklearn.inspection import ConvergenceDisplay
    >>> rng = np.random.default_rng(0)
    >>> site, X = np.repeat(np.arange(20), 30), rng.normal(size=(600, 2))
    >>> y = X @ [1.0, 2.0] + rng.normal(size=600)
    >>> model = PPSGDRegressor(n_rounds=50).fit(X, y, groups=site)
    >>> display = ConvergenceDisplay.from_estimator(model)  # doctest: +SKIP
    """

    curves: list[RoundCurve]

    @classmethod
    def from_estimator(
        cls,
        estimator: Any,
        *,
        quantities: str | list[str] | None = None,
        scores: Any = None,
        smooth: int | str = "auto",
        xscale: str = "linear",
        ax: Any = None,
    ) -> Self:
        """Plot quantities of a fitted estimator by round.

        Parameters
        ----------
        estimator : fitted PPSGDRegressor, PPSGDClassifier or another estimator on rounds, or a \
                pipeline, wrapper or search around one
            The estimator to plot.
        quantities : str, list of str or None, default=None
            Columns of ``history_``, and "epsilon", in the order of the panels. None: the loss, all
            columns that only some methods have, the clipped share if messages are clipped, their
            bound if it changes, and epsilon if it is finite and above 0.
        scores : ScoringMonitor, Series, DataFrame or None, default=None
            Scores to draw below, one panel each: scikit-learn's ``ScoringMonitor`` of the last fit,
            or your own scores, indexed by round (from 1) with a column for each. Columns named
            after clients, such as from ``ClientScorer(..., average=None)``, become one panel: the
            median, and a band from the lowest to the highest decile.
        smooth : int >= 1 or "auto", default="auto"
            Rounds of the running mean of quantities that are means over the clients of a round. 1
            draws none. "auto" takes a twenty-fifth of the rounds.
        xscale : {"linear", "log"}, default="linear"
            Scale of the rounds.
        ax : matplotlib Axes, or a sequence of one per panel, default=None
            Where to draw. None: a new figure.

        Raises
        ------
        ValueError
            - If `estimator` has no ``history_``.
            - If `quantities` names one that it lacks, such as "epsilon" of a fit without privacy.
            - If the rounds of `scores` are not those of the model, as when PPSGD without a number
              of rounds goes back to its best models.
            - If `ax` does not match the panels.
        TypeError
            If `scores` is of another type.

        Notes
        -----
        The loss is that of the sampled clients' batches before the round, scores are those after
        it. Running means weight rounds by their clients; at round k they reach back and ahead by at
        most k / 4 rounds, because curves are steep at the start.

        Epsilon at round k covers the first k rounds, with k fixed beforehand, under the unit,
        relation, delta and adversary above its panel. It is computed at 12 rounds at most. There is
        none if ``privacy_of(estimator)`` is infinite, such as for a step around the estimator.
        """
        display = cls(curves=round_curves(estimator, quantities, scores))
        return display.plot(smooth=smooth, xscale=xscale, ax=ax)

    def plot(self, *, smooth: int | str = "auto", xscale: str = "linear", ax: Any = None) -> Self:
        """Draw the display.

        Parameters
        ----------
        smooth, xscale, ax : object
            As in :meth:`from_estimator`.
        """
        if smooth != "auto" and not (isinstance(smooth, Integral) and smooth >= 1):
            raise ValueError(f"smooth must be 'auto' or an integer of at least 1; got {smooth!r}.")
        drawing.check_option("xscale", xscale, ("linear", "log"))
        axes = _panels_below(ax, self.curves)
        labelled = axes[-1:] if ax is None else axes  # panels of our own figure share the axis
        self.lines_ = [
            _draw_panel(ax, curve, smooth, xscale)
            for ax, curve in zip(axes, self.curves, strict=True)
        ]
        for panel in labelled:
            panel.set_xlabel("round")
        _draw_legends(axes)
        self.axes_, self.figure_ = axes, axes[0].figure
        self.figure_.align_ylabels(axes)
        return self


def _panels_below(ax, curves):
    """Axes (n_panels,) below each other; the first, usually the loss, is the highest."""
    shares = [1.5 if k == 0 else 1.0 for k in range(len(curves))]
    # A line of small print takes 0.18 inches.
    lines_of_notes = sum(curve.note.count("\n") + 1 for curve in curves if curve.note)
    height = _PANEL_INCHES * sum(shares) + 0.18 * lines_of_notes + 0.6
    options = {"sharex": True, "height_ratios": shares}
    return drawing.axes_for(ax, "panel", (len(curves), 1), (6.5, height), **options)


def _draw_panel(ax, curve, smooth, xscale):
    """Draw one curve with its scales, label and note; return its main line."""
    ax.set_xscale(xscale)
    if xscale == "linear":
        # Rounds are whole numbers.
        ax.xaxis.get_major_locator().set_params(integer=True)
    if curve.band is not None:
        line = _draw_deciles(ax, curve)
    elif curve.n_clients is not None:
        line = _draw_mean(ax, curve, _window(smooth, len(curve.rounds)))
    else:
        line = _draw_values(ax, curve)
    if curve.target is not None:
        ax.axhline(curve.target, color="0.3", lw=1, ls=":")
    if curve.name == "clipped":
        ax.set_ylim(-0.03, 1.03)  # a share: the eye should compare it with 0 and 1
    elif curve.name == "epsilon":
        _finish_epsilon(ax, curve)
    elif drawing.is_wide(curve.values):
        ax.set_yscale("log")
    ax.set_ylabel(curve.label)
    ax.set_title(curve.note, loc="left", fontsize="x-small", color="0.3")
    return line


def _draw_legends(axes):
    """Draw legends that no panel before has."""
    explained = []
    for ax in axes:
        labels = ax.get_legend_handles_labels()[1]
        if labels and labels not in explained:
            drawing.legend_inside(ax)
            explained.append(labels)


def _draw_values(ax, curve, **style):
    """The values as they are, with marks if they are few."""
    marker = "o" if len(curve.rounds) <= _MOST_MARKS else None
    color = COLORS["personalized"]
    (line,) = ax.plot(curve.rounds, curve.values, color=color, lw=1.3, marker=marker, ms=3, **style)
    return line


def _draw_mean(ax, curve, window):
    """Means over the clients of each round, and their running mean if it is over several."""
    if window == 1:
        return _draw_values(ax, curve)
    faint = {"color": COLORS["local"], "lw": 0.7, "alpha": 0.7, "label": "each round"}
    ax.plot(curve.rounds, curve.values, **faint)
    mean = running_mean(curve.values, curve.n_clients, window)
    color, label = COLORS["personalized"], f"running mean, {window} rounds"
    (line,) = ax.plot(curve.rounds, mean, color=color, lw=1.8, label=label)
    return line


def _draw_deciles(ax, curve):
    """Median of the clients, and the band of their deciles with its edges."""
    low, high = curve.band
    color = COLORS["personalized"]
    drawing.draw_band(ax, curve.rounds, low, high, color, "middle 80%")
    # The band alone is too light to see where it ends.
    for edge in (low, high):
        ax.plot(curve.rounds, edge, color=color, lw=0.6, ls="--")
    return _draw_values(ax, curve, label="median")


def _finish_epsilon(ax, curve):
    """Let the axis start at 0, and print the total."""
    # Room above the curve for the number.
    ax.set_ylim(0, 1.15 * curve.values[-1])
    end = curve.rounds[-1], curve.values[-1]
    looks = {"textcoords": "offset points", "ha": "right", "fontsize": "small"}
    ax.annotate(f"{end[1]:.3g}", end, xytext=(0, 4), **looks)


def _window(smooth, n_rounds):
    """Odd number of rounds of a running mean, at most about `smooth`."""
    width = max(n_rounds // _WINDOWS_PER_FIT, 1) if smooth == "auto" else int(smooth)
    return 2 * ((width - 1) // 2) + 1  # an even window would shift the curve by half a round


def running_mean(values: Floats, weights: Floats, window: int) -> Floats:
    """Weighted means (n,) over `window` rounds around each; NaN where no value is finite."""
    # Windows are narrower where curves are steep: at the start they reach back by a quarter of the
    # rounds before, and as far ahead.
    at = np.arange(len(values))
    half = np.minimum(window // 2, at // _REACH_BACK)
    bounds = np.stack([at - half, np.minimum(at + half + 1, len(at))], axis=1).ravel()
    weights = np.where(np.isfinite(values), weights, 0.0)  # rounds may sample no client
    products = weights * np.where(weights > 0, values, 0.0)
    # Sums of each window alone: differences of running sums would carry early, large losses along.
    total, count = (
        np.add.reduceat(np.append(values, 0.0), bounds)[::2] for values in (products, weights)
    )
    return np.divide(total, count, out=np.full(len(at), np.nan), where=count > 0)
