"""Observed and expected totals of clients: ratios for league tables, and a funnel plot."""

from __future__ import annotations

from typing import Any, Self, cast

import numpy as np
import pandas as pd
from scipy.special import betaincinv, gammaincinv, ndtri
from sklearn.base import is_classifier
from sklearn.utils import check_consistent_length

from pfl_sklearn._client_tables import mark_coverage
from pfl_sklearn._clients import encode_clients, segment_sums
from pfl_sklearn._parameters import with_parameters
from pfl_sklearn._typing import Floats, TableLike
from pfl_sklearn.base import check_level
from pfl_sklearn.inspection import _drawing as drawing
from pfl_sklearn.inspection._drawing import COLORS
from pfl_sklearn.inspection._parametric_bootstrap import simulating_model
from pfl_sklearn.inspection._residual_values import (
    checked_responses,
    present_rows,
    rows_inside,
)
from pfl_sklearn.linear_model._totals import check_row_arguments

_LIMITS = (0.95, "--"), (0.998, ":")  # of Spiegelhalter (2005): a warning and an alarm


def observed_expected(
    estimator: Any,
    X: TableLike,
    y: TableLike,
    *,
    groups: TableLike = None,
    level: float = 0.95,
    **known: TableLike,
) -> pd.DataFrame:
    """Ratios of what clients observed to what is expected of the population on their rows.

    Parameters
    ----------
    estimator : fitted PersonalizedLogisticRegression or PersonalizedPoissonRegression, or a \
            pipeline, ClientColumn or search around one
        Its features are the case mix: what is no merit or fault of a client.
    X : array-like of n_rows rows
        Rows to count, as the estimator's ``fit`` takes them.
    y : array-like of shape (n_rows,)
        Their counts, or labels of two classes.
    groups : array-like of shape (n_rows,), default=None
        Client id of every row.
    level : float in (0, 1), default=0.95
        Level of the intervals.
    **known : array-likes of shape (n_rows,)
        `offset`, or for counts `exposure`, as for ``predict``.

    Returns
    -------
    DataFrame
        Indexed by client: n_rows; observed, the sum of the counts, or of rows of the second class;
        expected, their expectation for a client drawn from the population; ratio, of both, with
        lower and upper: exact limits of the ratio's expectation; predicted_ratio, with the client's
        posterior mean in place of the observation, and predicted_lower and predicted_upper.

    Raises
    ------
    TypeError
        For other estimators.
    ValueError
        For more than two classes, and models with `groupings`.

    Notes
    -----
    Limits of ratios are those of Poisson counts, or of a binomial count (Clopper and Pearson);
    overdispersed counts vary more. The expectation counts as known. A ratio of few rows is mostly
    chance: the predicted ratio is shrunken by what the rows say, as in the league tables of
    Normand, Glickman and Gatsonis (1997). Neither says that the features hold all of the case mix.

    References
    ----------
    Normand, S.-L. T., Glickman, M. E. and Gatsonis, C. A. (1997). Statistical methods for profiling
    providers of medical care: issues and applications. JASA, 92, 803-814.

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn.inspection import observed_expected
    >>> from pfl_sklearn.linear_model import PersonalizedPoissonRegression
    >>> rng = np.random.default_rng(0)
    >>> ward, X = np.repeat(["a", "b", "c", "d", "e"], 12), rng.normal(size=(60, 1))
    >>> rate = np.repeat([0.5, 1.0, 1.0, 1.0, 2.0], 12)
    >>> falls = rng.poisson(rate * np.exp(0.3 * X[:, 0]))
    >>> model = PersonalizedPoissonRegression(random="intercept").fit(X, falls, groups=ward)
    >>> table = observed_expected(model, X, falls, groups=ward)
    >>> table[["observed", "ratio", "predicted_ratio"]].round(2).iloc[[0, -1]]
            observed  ratio  predicted_ratio
    client
    a            4.0   0.23             0.36
    e           36.0   2.00             1.89
    """
    model = simulating_model(estimator)
    check_level(level)
    if hasattr(model, "noise_variance_"):
        raise TypeError(
            "observed_expected is for classes and counts; for a linear model compare the clients' "
            f"effects(); got a {type(model).__name__}."
        )
    if getattr(model, "_levels", ()):
        raise ValueError("observed_expected does not support models with groupings.")
    if len(getattr(model, "classes_", ())) > 2:
        raise ValueError(
            f"observed_expected needs two classes; got a model of {len(model.classes_)}."
        )
    y = checked_responses(model, y)
    check_consistent_length(X, y)
    inside = rows_inside(estimator, present_rows(X, None, groups, None, known))
    is_class = is_classifier(model)
    check_row_arguments(model, "observed_expected", inside.metadata)
    ids = np.zeros(len(y), dtype=int) if inside.groups is None else inside.groups
    clients, codes = encode_clients(ids, len(y))
    options = {"groups": inside.groups, **inside.metadata}
    totals = model.predict_total(inside.X, by=codes, level=level, **options)
    population = model._population_copy()
    if is_class:
        means = population.predict_proba(inside.X, **options)[:, 1]
    else:
        means = population.predict(inside.X, **options)
    m = len(clients)
    observed, expected = (segment_sums(values, codes, m) for values in (y, means))
    n_rows = totals["n_rows"].to_numpy()
    lower, upper = _exact_limits(observed, n_rows if is_class else None, level)
    columns = {
        "n_rows": n_rows,
        "observed": observed,
        "expected": expected,
        "ratio": observed / expected,
        "lower": lower / expected,
        "upper": upper / expected,
    }
    for name, total in (("ratio", "total"), ("lower", "lower"), ("upper", "upper")):
        columns[f"predicted_{name}"] = totals[total].to_numpy() / expected
    return mark_coverage(pd.DataFrame(columns, index=pd.Index(clients, name="client")), model)


def _exact_limits(observed, n_rows, level):
    """Limits (m,) of the expectations of Poisson counts, or of binomial ones of n_rows (m,)."""
    tail = 0.5 - level / 2
    above = observed + 1
    positive = np.maximum(observed, 1)
    if n_rows is None:
        lower, upper = gammaincinv(positive, tail), gammaincinv(above, 1 - tail)
    else:
        others = np.maximum(n_rows - observed, 1)
        lower = n_rows * betaincinv(positive, n_rows - observed + 1, tail)
        upper = n_rows * betaincinv(above, others, 1 - tail)
        upper = np.where(observed == n_rows, n_rows, upper)
    return np.where(observed == 0, 0.0, lower), upper


@with_parameters
class FunnelDisplay:
    r"""Funnel plot: observed over expected totals of clients, and how far chance alone goes.

    Rings are the clients' ratios, dots what is left of them after shrinkage. The dashed and dotted
    limits hold 95 and 99.8 % of the ratios of clients that all are like the population.

    Parameters
    ----------
    clients : ndarray of shape (n_clients,)
        Client ids.
    expected, ratio, predicted_ratio : ndarrays of shape (n_clients,)
        Expected totals; ratios of the observed and the predicted totals to them.
    variance_factor : float, default=1.0
        Variance of a total over its expectation: 1 for Poisson counts, 1 - p for classes.

    Attributes
    ----------
    ax_, figure_ : matplotlib Axes and Figure
        The axes, and their figure.

    Notes
    -----
    The limits are :math:`(1 \pm z \sqrt{v / E} / 2)^2`, normal for the root of the ratio, with the
    variance factor v and the expected total E (Spiegelhalter, 2005, has those of the ratio).

    References
    ----------
    Spiegelhalter, D. J. (2005). Funnel plots for comparing institutional performance. Statistics in
    Medicine, 24, 1185-1202.
    """

    clients: Any
    expected: Floats
    ratio: Floats
    predicted_ratio: Floats
    variance_factor: float = 1.0

    @classmethod
    def from_estimator(
        cls,
        estimator: Any,
        X: TableLike,
        y: TableLike,
        *,
        groups: TableLike = None,
        ax: Any = None,
        **known: TableLike,
    ) -> Self:
        """Plot the clients of a fitted estimator.

        Parameters
        ----------
        estimator, X, y, groups, **known : object
            As for :func:`~pfl_sklearn.inspection.observed_expected`.
        ax : matplotlib Axes, default=None
            Where to draw. None: a new figure.
        """
        table = observed_expected(estimator, X, y, groups=groups, **known)
        is_class = is_classifier(simulating_model(estimator))
        share = table["expected"].sum() / table["n_rows"].sum() if is_class else 0.0
        display = cls(
            clients=table.index.to_numpy(),
            expected=table["expected"].to_numpy(),
            ratio=table["ratio"].to_numpy(),
            predicted_ratio=table["predicted_ratio"].to_numpy(),
            variance_factor=1 - share,
        ).plot(ax=ax)
        return cast(Self, drawing.with_coverage(display, estimator, shows_rows=True))

    def plot(self, *, ax: Any = None) -> Self:
        """Draw the display.

        Parameters
        ----------
        ax : object
            As in :meth:`from_estimator`.
        """
        ax = drawing.axes_for(ax, "plot", (1, 1), (7.0, 4.6))[0]
        at = np.geomspace(self.expected.min() / 1.1, self.expected.max() * 1.1, 200)
        for level, style in _LIMITS:
            half = ndtri(0.5 + level / 2) * np.sqrt(self.variance_factor / at) / 2
            label = f"{100 * level:g} % limits"
            ax.plot(at, (1 + half) ** 2, color="0.3", lw=1, ls=style, label=label)
            ax.plot(at, np.maximum(1 - half, 0.0) ** 2, color="0.3", lw=1, ls=style)
        ax.axhline(1, color=COLORS["population"], lw=1, label="population")
        ax.vlines(self.expected, self.predicted_ratio, self.ratio, color=COLORS["local"], lw=0.5)
        drawing.draw_local(ax, self.expected, self.ratio, "observed")
        drawing.draw_personalized(ax, self.expected, self.predicted_ratio, rows=False)
        half = ndtri(0.999) * np.sqrt(self.variance_factor / self.expected) / 2
        low, high = np.maximum(1 - half, 0.0) ** 2, (1 + half) ** 2
        for k in np.flatnonzero((self.ratio < low) | (self.ratio > high)):
            point = self.expected[k], self.ratio[k]
            text = ax.annotate(str(self.clients[k]), point, (4, 4), textcoords="offset points")
            text.set(fontsize="x-small", parse_math=False)
        if drawing.is_wide(self.expected):
            ax.set_xscale("log")
        ax.set(xlabel="expected total", ylabel="observed over expected")
        drawing.legend_inside(ax, faint_marks=False)
        self.ax_, self.figure_ = ax, ax.figure
        return self
