"""Plot of scores against what they cost in privacy."""

import math
from typing import NamedTuple

import numpy as np
import pandas as pd
from sklearn.base import clone
from sklearn.utils.validation import check_is_fitted

from pfl_sklearn.inspection._drawing import legend_inside, strip
from pfl_sklearn.privacy._stated import stated_cost, total_epsilon

_RELATIONS = {"add_remove": "added or removed", "replace_one": "replaced"}


class Curve(NamedTuple):
    """Scores (n,) and their spread (n,) at epsilons (n,), in ascending order of epsilon."""

    label: str | None
    epsilon: np.ndarray
    score: np.ndarray
    spread: np.ndarray


class PrivacyAccuracyDisplay:
    """Scores against epsilon, one line for every value of another parameter.

    Epsilon is on a logarithmic scale. Without privacy (infinity) is the last tick, to which dashes
    lead. What has a single score, at an epsilon of 0, releases nothing and is drawn across.

    Parameters
    ----------
    curves : list of Curve
        One per line: label, epsilons, scores and their spread (NaN for none).
    score_name : str, default="score"
    promise : str or None, default=None
        What the epsilons are about, for the axis: unit, relation, delta.

    Attributes
    ----------
    ax_ : matplotlib Axes
    figure_ : matplotlib Figure
    lines_ : list of matplotlib Line2D
        One per curve, in their order, through the finite epsilons.

    See Also
    --------
    PrivacyAccuracyDisplay.from_search : From the scores of a search.
    PrivacyAccuracyDisplay.from_scores : From scores of your own.
    pfl_sklearn.privacy.search_cost : What a search spent, as distinct from one of its fits.

    Notes
    -----
    The scores themselves are mostly not private, nor is what is chosen by them.

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn.inspection import PrivacyAccuracyDisplay
    >>> display = PrivacyAccuracyDisplay.from_scores(
    ...     [0.5, 1.0, np.inf, 0.5, 1.0, np.inf], [0.6, 0.7, 0.9, 0.5, 0.6, 0.8],
    ...     lines=["a", "a", "a", "b", "b", "b"], unit="client", relation="replace_one",
    ...     delta=1e-5, ax=None)  # doctest: +SKIP
    """

    def __init__(self, *, curves, score_name="score", promise=None):
        self.curves = curves
        self.score_name = score_name
        self.promise = promise

    @classmethod
    def from_search(
        cls,
        search,
        *,
        line=None,
        metric="score",
        negate_score=False,
        score_name=None,
        spread=True,
        ax=None,
    ):
        """Plot the mean held-out scores of a search over a private estimator.

        Parameters
        ----------
        search : fitted GridSearchCV, RandomizedSearchCV or halving search
            Around a private estimator, or a pipeline or ClientColumn with one.
        line : str or None, default=None
            Parameter that makes the lines; the end of its name is enough ("alpha" for
            "estimator__alpha"). None: the one that was searched besides epsilon, or a single line.
            Of candidates that differ in neither the best mean score is drawn.
        metric : str, default="score"
            Which scores of a search with several: "accuracy" for ``mean_test_accuracy``.
        negate_score : bool, default=False
            Draw the scores' negatives: errors, for the scorers "neg_...".
        score_name : str or None, default=None
            For the axis.
        spread : bool, default=True
            Shade a standard deviation over the folds to both sides.
        ax : matplotlib Axes, default=None

        Returns
        -------
        PrivacyAccuracyDisplay

        Raises
        ------
        ValueError
            If `search` holds no such scores, `line` was not searched over, or the candidates differ
            in unit, relation or delta, so that their epsilons do not compare.

        Notes
        -----
        Epsilon is that of *one* fit: the parameter, if it was searched, else what the estimator
        states for the candidate (for a `noise_multiplier`, say). The search spent more.
        """
        table, promise, name = _table_of(search, line, metric)
        if negate_score:
            table["score"] *= -1
        if score_name is None:
            score_name = "mean held-out " + metric.removeprefix("neg_").replace("_", " ")
        table["line"] = table["line"].map(lambda value: _label(name, value))
        display = cls(
            curves=_curves(table, best=min if negate_score else max),
            score_name=score_name,
            promise=promise,
        )
        return display.plot(spread=spread, ax=ax)

    @classmethod
    def from_scores(
        cls,
        epsilon,
        score,
        *,
        lines=None,
        spread=None,
        score_name="score",
        unit,
        relation,
        delta,
        ax=None,
    ):
        """Plot scores that were computed elsewhere.

        Parameters
        ----------
        epsilon : array-like of shape (n,)
            Of one fit each, 0 to infinity.
        score : array-like of shape (n,)
        lines : array-like of shape (n,), default=None
            Labels of the lines; None: a single one.
        spread : array-like of shape (n,), default=None
            Half-widths of a band around the scores.
        score_name : str, default="score"
        unit : {"client", "row"}
            What the epsilons protect.
        relation : {"add_remove", "replace_one"}
        delta : float in [0, 1)
        ax : matplotlib Axes, default=None

        Returns
        -------
        PrivacyAccuracyDisplay

        Raises
        ------
        ValueError
            If shapes differ, an epsilon is negative, or one occurs twice in a line.
        """
        columns = {"epsilon": epsilon, "score": score, "spread": spread}
        table = _checked({k: v for k, v in columns.items() if v is not None}, lines)
        curves = _curves(table)
        twice = [c.label for c in curves if len(c.epsilon) != (table["line"] == c.label).sum()]
        if twice and lines is not None or lines is None and table["epsilon"].duplicated().any():
            raise ValueError(
                "epsilon must differ within a line; some value occurs twice. Give `lines`, or one "
                "score for every epsilon."
            )
        display = cls(
            curves=curves, score_name=score_name, promise=_promise(unit, relation, delta)
        )
        return display.plot(spread=spread is not None, ax=ax)
