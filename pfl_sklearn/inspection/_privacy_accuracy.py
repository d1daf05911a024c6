"""Plot of scores against epsilon, from a search or from arrays."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, NamedTuple, Self

import numpy as np
import pandas as pd
from sklearn.utils.validation import check_is_fitted

from pfl_sklearn._parameters import with_parameters
from pfl_sklearn._typing import Floats, TableLike
from pfl_sklearn.inspection import _drawing as drawing
from pfl_sklearn.inspection._drawing import Axes
from pfl_sklearn.privacy._spending import stated_cost, total_epsilon, with_params

_RELATION_TEXTS = {
    "add_remove": "one {} added or removed",
    "replace_one": "one {} replaced",
    "zero_out": "contribution of one {} left out",
}


class ScoreCurve(NamedTuple):
    """Scores (n,) and their spread (n,) at epsilons (n,), in ascending order of epsilon."""

    label: str | None
    epsilon: Floats
    score: Floats
    spread: Floats


def table_of_search(search, line, metric):
    """Table (line, epsilon, score, spread) of candidates, their promise, and the line's name."""
    check_is_fitted(search)
    results = getattr(search, "cv_results_", {})
    if f"mean_test_{metric}" not in results:
        raise ValueError(
            f"search must be a fitted search whose cv_results_ holds 'mean_test_{metric}'; got "
            f"{type(search).__name__}."
        )
    candidates = results["params"]
    names = {name for params in candidates for name in params}
    searched = {name for name in names if _is_called(name, "epsilon")}
    noise = {name for name in names if _is_called(name, "noise_multiplier")}
    line = _line_of(names - searched - noise, line)
    costs = [stated_cost(with_params(search.estimator, params)) for params in candidates]
    epsilons = [
        _epsilon_of(params, searched, cost) for params, cost in zip(candidates, costs, strict=True)
    ]
    table = pd.DataFrame(
        {
            "line": [params.get(line) for params in candidates],
            "epsilon": epsilons,
            "score": results[f"mean_test_{metric}"],
            "spread": results[f"std_test_{metric}"],
        }
    )
    return table, _common_promise(costs), line


def _is_called(name, last):
    """Whether a parameter, nested or not, is called `last`."""
    return name == last or name.endswith(f"__{last}")


def _line_of(names, line):
    """Full name of the parameter that makes the lines, or None."""
    if line is None:
        return next(iter(names)) if len(names) == 1 else None
    matching = [name for name in sorted(names) if _is_called(name, line)]
    if len(matching) != 1:
        raise ValueError(
            f"line must name one parameter that was searched besides epsilon, of {sorted(names)}; "
            f"got {line!r}."
        )
    return matching[0]


def _epsilon_of(params, searched, cost):
    """Requested epsilon of a candidate, or the one that follows from its other parameters."""
    # A candidate without privacy has infinity, and one that fits several times spends more.
    if cost.events is None:  # some step learns without noise
        return math.inf
    requested = [params[name] for name in searched if name in params]
    if requested and cost.n_fits == 1:
        return float(requested[0])
    return total_epsilon(cost.events, cost.delta, cost.relation)


def _common_promise(costs):
    """Promise of all private candidates; None if none is private."""
    promises = {(c.unit, c.relation, c.delta) for c in costs if c.events is not None}
    if len(promises) > 1:
        raise ValueError(
            "the candidates differ in unit, relation or delta, so their epsilons are not "
            f"comparable: {sorted(promises)}."
        )
    return promise_of(*promises.pop()) if promises else None


def promise_of(unit: str, relation: str, delta: float) -> str:
    """Text of unit, relation and delta."""
    if relation not in _RELATION_TEXTS:
        raise ValueError(f"relation must be one of {', '.join(_RELATION_TEXTS)}; got {relation!r}.")
    return f"{_RELATION_TEXTS[relation].format(unit)}; delta = {delta:g}"


def table_of_scores(columns, lines):
    """Table (line, epsilon, score, spread) from arrays of equal length."""
    arrays = {name: np.asarray(values, dtype=float) for name, values in columns.items()}
    shape = arrays["epsilon"].shape
    for name, values in arrays.items():
        if values.shape != shape or values.ndim != 1 or not len(values):
            raise ValueError(f"{name} must have the shape of epsilon, (n,); got {values.shape}.")
    if not (arrays["epsilon"] >= 0).all():
        raise ValueError("epsilon must be numbers of at least 0; got a negative one or NaN.")
    labels = [None] * len(arrays["score"]) if lines is None else [str(label) for label in lines]
    if len(labels) != shape[0]:
        raise ValueError(f"lines must have one label for every score; got {len(labels)}.")
    table = pd.DataFrame({"spread": np.nan, **arrays})
    table["line"] = pd.Series(labels, dtype=object)  # None stays None, not NaN
    if table.duplicated(["line", "epsilon"]).any():
        raise ValueError(
            "epsilon must differ within a line, but one value occurs twice; give lines, or one "
            "score for each epsilon."
        )
    return table


def curves_of(table):
    """Curves of a table (line, epsilon, score, spread): the best score of each epsilon."""
    # Stable, so that the first of equal candidates stays, as in a search.
    best = table.sort_values("score", ascending=False, kind="stable")
    best = best.drop_duplicates(["line", "epsilon"]).sort_values("epsilon")
    return [
        ScoreCurve(label, *(rows[name].to_numpy() for name in ("epsilon", "score", "spread")))
        for label in table["line"].unique()
        for rows in [best[best["line"].isna() if label is None else best["line"] == label]]
    ]


def label_of(name, value):
    """Label of a line: the last part of the parameter's name, and its value."""
    if name is None:
        return None
    return f"{name.split('__')[-1]} = {f'{value:g}' if isinstance(value, Real) else value}"


_MOST_TICKS = 10  # labels of more ticks overlap


@with_parameters
class PrivacyAccuracyDisplay:
    """Scores against epsilon, one line for every value of another parameter.

    Epsilon is on a logarithmic scale. Dashes lead to the last tick, which means no privacy
    (infinity). A score at an epsilon of 0, which releases nothing, is a horizontal line.

    Parameters
    ----------
    curves : list of ScoreCurve
        One per line, with label, epsilons, scores and their spread (NaN for none).
    score_name : str, default="score"
        Label of the score axis.
    promise : str or None, default=None
        Unit, relation and delta of the epsilons, for the axis label.

    Attributes
    ----------
    ax_, figure_ : matplotlib Axes and Figure
        The axes, and their figure.
    lines_ : list of matplotlib Line2D
        One per curve, in order, through the finite epsilons.

    Notes
    -----
    In general the scores themselves are not private, and neither is a choice made by them.

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn.inspection import PrivacyAccuracyDisplay
    >>> display = PrivacyAccuracyDisplay.from_scores(
    ...     [0.5, 1.0, np.inf, 0.5, 1.0, np.inf], [0.6, 0.7, 0.9, 0.5, 0.6, 0.8],
    ...     lines=["a", "a", "a", "b", "b", "b"], unit="client", relation="replace_one",
    ...     delta=1e-5, ax=None)  # doctest: +SKIP
    """

    curves: list[ScoreCurve]
    score_name: str = "score"
    promise: str | None = None

    @classmethod
    def from_search(
        cls,
        search: Any,
        *,
        line: str | None = None,
        metric: str = "score",
        negate_score: bool = False,
        score_name: str | None = None,
        spread: bool = True,
        ax: Axes | None = None,
    ) -> Self:
        """Plot the mean held-out scores of a search over a private estimator.

        Parameters
        ----------
        search : fitted GridSearchCV, RandomizedSearchCV or halving search
            A search over a private estimator, or over a pipeline or ClientColumn with one.
        line : str or None, default=None
            Parameter whose values become lines, by its full or last name ("alpha" for
            "estimator__alpha"). None: the only other one that was searched than epsilon (or
            `noise_multiplier`), otherwise a single line. Of candidates with the same line and
            epsilon, the best is drawn.
        metric : str, default="score"
            Which scores to draw if the search has several: "accuracy" for
            ``mean_test_accuracy``.
        negate_score : bool, default=False
            Draw negated scores, which are errors for scorers such as "neg_mean_squared_error".
        score_name : str or None, default=None
            Label of the score axis. None: made from `metric`.
        spread : bool, default=True
            Shade one standard deviation over the folds on both sides.
        ax : matplotlib Axes, default=None
            Where to draw. None: a new figure.

        Raises
        ------
        ValueError
            - If `search` holds no such scores.
            - If `line` was not searched.
            - If the candidates differ in unit, relation or delta, which makes epsilons
              incomparable.

        Notes
        -----
        Epsilon is that of *one* fit: the parameter if it was searched, otherwise the epsilon that
        the estimator computes for the candidate (such as from a `noise_multiplier`). It is infinite
        if a step around the private estimator learns without noise, or if nothing is private. The
        whole search spent more.
        """
        table, promise, name = table_of_search(search, line, metric)
        sign = -1 if negate_score else 1
        curves = [
            curve._replace(label=label_of(name, curve.label), score=sign * curve.score)
            for curve in curves_of(table)
        ]
        if score_name is None:
            score_name = f"mean held-out {metric.replace('_', ' ')}"
        return cls(curves=curves, score_name=score_name, promise=promise).plot(spread=spread, ax=ax)

    @classmethod
    def from_scores(
        cls,
        epsilon: TableLike,
        score: TableLike,
        *,
        lines: TableLike = None,
        spread: TableLike = None,
        score_name: str = "score",
        unit: str,
        relation: str,
        delta: float,
        ax: Axes | None = None,
    ) -> Self:
        """Plot scores that were computed elsewhere.

        Parameters
        ----------
        epsilon : array-like of shape (n,)
            Epsilon of one fit for each score, 0 to infinity.
        score : array-like of shape (n,)
            One score for each epsilon.
        lines : array-like of shape (n,), default=None
            Label of the line of each score. None: a single line.
        spread : array-like of shape (n,), default=None
            Half-widths of a band around the scores.
        score_name : str, default="score"
            Label of the score axis.
        unit : {"client", "row"}
            What the epsilons protect.
        relation : {"replace_one", "zero_out", "add_remove"}
            Neighbouring relation of the epsilons.
        delta : float in [0, 1)
            Delta of every epsilon.
        ax : matplotlib Axes, default=None
            Where to draw. None: a new figure.

        Raises
        ------
        ValueError
            - If shapes differ.
            - If an epsilon is negative or occurs twice in a line.
        """
        columns = {"epsilon": epsilon, "score": score}
        if spread is not None:
            columns["spread"] = spread
        return cls(
            curves=curves_of(table_of_scores(columns, lines)),
            score_name=score_name,
            promise=promise_of(unit, relation, delta),
        ).plot(ax=ax)

    @classmethod
    def from_expected_error(cls, table: pd.DataFrame, *, ax: Axes | None = None) -> Self:
        """Plot the errors that a plan expects, against epsilon.

        Parameters
        ----------
        table : DataFrame
            As :meth:`GaussianMean.expected_error
            <pfl_sklearn.estimation.GaussianMean.expected_error>` and its like return it.
        ax : matplotlib Axes, default=None
            Where to draw. None: a new figure.

        Raises
        ------
        ValueError
            If `table` does not say what its epsilons stand for (``attrs["promise"]``).
        """
        if "promise" not in table.attrs:
            raise ValueError(
                "table must be one of expected_error, whose attrs hold the promise; got attrs with "
                f"{list(table.attrs)}."
            )
        parts = {"": table}
        if table.index.nlevels == 2:  # a line for every coefficient
            parts = {f", {name}": part for name, part in table.groupby("coefficient", sort=False)}
        curves = [
            ScoreCurve(
                f"{of}{name}",
                part.index.get_level_values("epsilon").to_numpy(dtype=float),
                part[of].to_numpy(),
                np.full(len(part), np.nan),
            )
            for name, part in parts.items()
            for of in ("population", "clients")
        ]
        promise = promise_of(**table.attrs["promise"])
        return cls(curves=curves, score_name="expected error", promise=promise).plot(ax=ax)

    def plot(self, *, spread: bool = True, ax: Axes | None = None) -> Self:
        """Draw the display.

        Parameters
        ----------
        spread : bool, default=True
            Shade the spread of the scores.
        ax : matplotlib Axes, default=None
            Where to draw. None: a new figure.
        """
        ax = drawing.axes_for(ax, "plot", (1, 1), (6.5, 4.2))[0]
        finite = np.unique(np.concatenate([c.epsilon for c in self.curves]))
        last = _place_of_infinity(finite[np.isfinite(finite) & (finite > 0)])
        colors = _colors(len(self.curves))
        self.lines_ = [
            _draw_curve(ax, curve, color, last, spread)
            for curve, color in zip(self.curves, colors, strict=True)
        ]
        _name_epsilons(ax, finite, last)
        label = "epsilon of one fit" + (f"\n({self.promise})" if self.promise else "")
        ax.set(xlabel=label, ylabel=self.score_name)
        if any(curve.label is not None for curve in self.curves):
            drawing.legend_inside(ax)
        self.ax_, self.figure_ = ax, ax.figure
        return self


def _place_of_infinity(finite):
    """Position right of the finite epsilons, one of their steps away and at least a third."""
    if not len(finite):
        return 1.0
    step = (finite[-1] / finite[0]) ** (1 / max(len(finite) - 1, 1))
    # On a logarithmic scale ticks closer than a third of their value would touch.
    return finite[-1] * max(step, 1.3)


def _colors(n_curves):
    """Colours from dark to light."""
    import matplotlib as mpl

    # The end of the map is yellow, too light for lines on white.
    return mpl.colormaps["viridis"](np.linspace(0.0, 0.85, n_curves))


def _draw_curve(ax, curve, color, last, spread):
    """One curve: nothing released, finite epsilons, and without privacy."""
    free, private = curve.epsilon == 0, np.isfinite(curve.epsilon) & (curve.epsilon > 0)
    label = curve.label
    for value in curve.score[free]:  # an epsilon of 0 has no place on a logarithmic scale
        ax.axhline(value, color=color, ls=":", label=label)
        label = None
    at = np.where(np.isinf(curve.epsilon), last, curve.epsilon)
    (line,) = ax.plot(at[private], curve.score[private], "o-", color=color, ms=4)
    line.set_label(label if private.any() else None)
    # Dashes to the last tick, because the scale has no meaning between finite and infinite epsilon.
    tail = np.flatnonzero(~free)[-2:]
    if len(tail) and np.isinf(curve.epsilon[tail[-1]]):
        only = label if not private.any() else None
        ax.plot(at[tail], curve.score[tail], "--", color=color, lw=1)
        ax.plot(at[tail[-1:]], curve.score[tail[-1:]], "D", color=color, ms=4, label=only)
    if spread and np.isfinite(curve.spread).any():
        low, high = curve.score - curve.spread, curve.score + curve.spread
        drawing.draw_band(ax, at[private], low[private], high[private], color)
    return line


def _name_epsilons(ax, epsilon, last):
    """Make the axis logarithmic, with ticks at the epsilons and infinity last."""
    finite = epsilon[np.isfinite(epsilon) & (epsilon > 0)]
    ax.set_xscale("log")
    every = -(-len(finite) // _MOST_TICKS) if len(finite) else 1
    ticks = [*finite[::-1][::every][::-1]]  # thinned from the largest, which stays
    labels = [f"{value:.3g}" for value in ticks]
    if np.isinf(epsilon).any():
        ticks, labels = [*ticks, last], [*labels, "no\nprivacy"]
    ax.set_xticks(ticks, labels)
    ax.minorticks_off()
