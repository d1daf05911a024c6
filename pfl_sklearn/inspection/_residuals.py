"""Plots of residuals within clients and of clients' deviations: checks of a mixed model."""

from __future__ import annotations

from typing import Any, Self, cast

import numpy as np

from pfl_sklearn._clients import Codes, rows_by_client
from pfl_sklearn._parameters import with_parameters
from pfl_sklearn._typing import Floats, RandomState, TableLike
from pfl_sklearn.inspection import _drawing as drawing
from pfl_sklearn.inspection._drawing import COLORS
from pfl_sklearn.inspection._residual_summaries import (
    binned_residuals,
    client_spreads,
    quantile_limits,
    spread_limits,
)
from pfl_sklearn.inspection._residual_values import deviations_of, residuals_of

_PANELS = ("fitted", "clients", "residual_quantiles", "client_quantiles")
_MOST_DRAWN = 5000  # points of a panel: more take seconds and look the same
_FEWEST_IN_A_BOX = 5  # residuals; a box shows five numbers
_INCHES_PER_NAME = 0.11  # the height of a line of small print


@with_parameters
class ResidualsDisplay:
    r"""Model checks: residuals within clients, and deviations of clients from the population.

    - "fitted": residuals by the prediction of the row's own client. The line is their mean in up to
      20 bins of equally many rows, with a band of one standard deviation. The dotted line is the
      mean that the model expects.
    - "clients": a box of residuals per client, ordered by the median, for up to 60 clients; clients
      with fewer than five rows show their rows. For more clients: root mean square of a client's
      standardized residuals by their degrees of freedom, with 95 % limits.
    - "residual_quantiles", "client_quantiles": normal quantile plots of standardized residuals and
      of standardized deviations of clients, with pointwise 95 % limits of ordered independent
      normal values. If the model holds, fewer than one point in twenty lies outside, because the
      model was fitted to the same rows.

    At most 5,000 rows are drawn; lines and limits use all.

    Parameters
    ----------
    clients : ndarray of shape (n_clients,)
        Ids of the clients of the rows.
    codes : ndarray of shape (n_rows,)
        Position of every row's client in `clients`.
    fitted : ndarray of shape (n_rows,)
        Predictions of the rows' own clients, or probabilities of the second class.
    residuals : ndarray of shape (n_rows,)
        Residuals, times the root of the row's weight.
    standardized : ndarray of shape (n_rows,)
        Residuals over their standard deviations; NaN for a row that its client fits exactly.
    variance_share : ndarray of shape (n_rows,), default=None
        Variance of a residual over that of the noise. None: 1.
    expected : ndarray of shape (n_rows,), default=None
        Mean of a residual given its prediction. None: not drawn.
    deviation_clients, deviations : ndarrays of shape (n_informed,), default=None
        Client ids, and standardized deviations of these clients from the population.
    without_deviations : str, default=None
        Why there are none.
    fitted_label, residual_label, deviation_label : str
        Labels of the axes.

    Attributes
    ----------
    axes_ : ndarray of matplotlib Axes
        The axes, one per panel.
    ax_, figure_ : matplotlib Axes and Figure
        The first of the axes, and their figure.

    Notes
    -----
    The plot shows residuals of single rows, which no epsilon covers: keep it where the data are.

    - *Standardized residuals* of a linear model divide by the root of :math:`\sigma^2 / w - m` if
      fit saw the row, and of :math:`\sigma^2 / w + m` if it did not (`held_out`, or a new client),
      with noise variance :math:`\sigma^2`, weight w and posterior variance m of the row's mean (0
      without a posterior). Variances are taken as known.
    - *Expected means*: shrinkage makes residuals rise with the prediction, by :math:`m / (s - m)`
      times its distance from the population's prediction, with the prior variance s of the row's
      mean.
    - *Classes and counts* have randomized quantile residuals (Dunn and Smyth, 1996): the normal
      quantile of a uniform number between the probability of smaller responses and that of
      responses up to the observed one, with the first of two classes as the smaller. They are
      standard normal if the probabilities are right. Rows that fit saw use probabilities at the
      mode, which reduces the spread by 6 percent in clients with two to five rows.
    - *Deviations of clients* are posterior means over the root of :math:`\tau^2 (1 - \lambda)`,
      with the prior variance :math:`\tau^2` of the coefficient and the client's shrinkage
      :math:`\lambda`. Clients with :math:`\lambda = 1` are left out. For logistic regression this
      approximation hides departures from normality if clients have few rows.

    References
    ----------
    Dunn, P. K. and Smyth, G. K. (1996). Randomized quantile residuals. Journal of Computational and
    Graphical Statistics, 5, 236-244.

    Examples
    --------
    >>> from pfl_sklearn.datasets import load_radon
    >>> from pfl_sklearn.inspection import ResidualsDisplay
    >>> from pfl_sklearn.linear_model import PersonalizedLinearRegression
    >>> houses = load_radon("MN").frame
    >>> X, y, county = houses[["floor"]], houses["log_radon"], houses["county_fips"]
    >>> model = PersonalizedLinearRegression(random="intercept").fit(X, y, groups=county)
    >>> display = ResidualsDisplay.from_estimator(model, X, y, groups=county)  # doctest: +SKIP
    """

    clients: Any
    codes: Codes
    fitted: Floats
    residuals: Floats
    standardized: Floats
    variance_share: Floats | None = None
    expected: Floats | None = None
    deviation_clients: Any = None
    deviations: Floats | None = None
    without_deviations: str | None = None
    fitted_label: str = "prediction"
    residual_label: str = "residual"
    deviation_label: str = "deviation of the client"

    @classmethod
    def from_estimator(
        cls,
        estimator: Any,
        X: TableLike,
        y: TableLike,
        *,
        groups: TableLike = None,
        sample_weight: TableLike = None,
        feature: str | int | None = None,
        held_out: bool = False,
        kind: str | list[str] = "all",
        ax: Any = None,
        random_state: RandomState = 0,
        exposure: TableLike = None,
        offset: TableLike = None,
    ) -> Self:
        """Plot the residuals of a fitted estimator.

        Parameters
        ----------
        estimator : fitted PersonalizedLinearRegression, PersonalizedLogisticRegression, \
                PersonalizedPoissonRegression or GaussianMean, or a pipeline, ClientColumn or \
                search around one
            The model to check. Behind a ``TransformedTargetRegressor`` residuals are those of the
            transformed target.
        X : array-like of n_rows rows
            Features, as the estimator's ``fit`` takes them. With a
            :class:`~pfl_sklearn.compose.ClientColumn`, also the ids.
        y : array-like of shape (n_rows,)
            Responses, labels of two classes, or counts.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row. Rows of clients that fit did not see get the population model.
        sample_weight : array-like of shape (n_rows,), default=None
            Weights, as in ``fit``; rows of weight 0 are left out.
        feature : "intercept", or name or index of a feature, default=None
            Coefficient of a linear model whose deviations are checked. None: the first that varies
            by client, which is the intercept unless `random` leaves it out.
        held_out : bool, default=False
            Whether fit did not see the rows, although it saw their clients.
        kind : str or list of str, default="all"
            Panels to draw: "fitted", "clients", "residual_quantiles", "client_quantiles".
        ax : matplotlib Axes, or a sequence of one per panel, default=None
            Where to draw. None: a new figure.
        random_state : int, RandomState instance or None, default=0
            Seed of the randomized residuals of classes and counts.
        exposure, offset : array-like of shape (n_rows,), default=None
            As in ``fit``; not for columns that a ``ClientColumn`` takes out.

        Raises
        ------
        TypeError
            If `estimator` is of another type.
        ValueError
            - If there are more than two classes or several targets.
            - If `X`, `y`, `groups`, `sample_weight` or `feature` does not go with `estimator`.
            - If `kind` names "client_quantiles" and the model has no deviations of clients, such as
              a released one or one without a normal prior. (With "all", the panel says so.)
        """
        metadata = {"exposure": exposure, "offset": offset}
        residuals = residuals_of(
            estimator, X, y, groups, sample_weight, held_out, random_state, metadata
        )
        deviations = deviations_of(estimator, feature)
        display = cls(**residuals, **deviations).plot(kind=kind, ax=ax)
        return cast(Self, drawing.with_coverage(display, estimator, shows_rows=True))

    def plot(self, *, kind: str | list[str] = "all", ax: Any = None) -> Self:
        """Draw the display.

        Parameters
        ----------
        kind, ax : object
            As in :meth:`from_estimator`.

        Raises
        ------
        ValueError
            If `kind` names an unknown panel or one that this model lacks, or if `ax` holds another
            number of axes.
        """
        panels = _panels(kind)
        if kind != "all" and "client_quantiles" in panels and self.deviations is None:
            raise ValueError(f"there is nothing to draw in 'client_quantiles': {self._reason()}.")
        n_columns = 2 if len(panels) == 4 else len(panels)
        n_rows = len(panels) // n_columns
        size = (7.0, 4.6) if len(panels) == 1 else (4.8 * n_columns, 3.9 * n_rows)
        axes = drawing.axes_for(ax, "panel", (n_rows, n_columns), size)
        for name, panel in zip(panels, axes, strict=True):
            getattr(self, f"_draw_{name}")(panel)
        self.axes_, self.ax_, self.figure_ = axes, axes[0], axes[0].figure
        return self

    def _draw_fitted(self, ax):
        """Residuals over predictions, with means and spread in bins."""
        drawn = _thinned(len(self.fitted))
        faint = float(np.clip(12 / np.sqrt(len(drawn)), 0.1, 0.6))
        # As pixels: thousands of points make a slow vector graphic.
        rows = {"color": COLORS["local"], "ms": 4, "alpha": faint, "rasterized": True}
        ax.plot(self.fitted[drawn], self.residuals[drawn], ".", zorder=1, **rows)
        ax.axhline(0, color="0.3", lw=0.8, zorder=1)
        at, mean, std, expected = binned_residuals(self.fitted, self.residuals, self.expected)
        color = COLORS["personalized"]
        drawing.draw_band(ax, at, mean - std, mean + std, color, "± 1 sd")
        ax.plot(at, mean, "o-", color=color, ms=3, lw=1.5, label="mean in bins")
        if expected is not None:
            style = {"color": COLORS["population"], "lw": 1.5, "ls": ":"}
            ax.plot(at, expected, label="expected mean", **style)
        ax.set(xlabel=self.fitted_label, ylabel=self.residual_label)
        drawing.legend_inside(ax, faint_marks=False)

    def _draw_clients(self, ax):
        """A box per client, or the spreads of many clients."""
        if drawing.in_rows("auto", len(self.clients)):
            self._draw_boxes(ax)
        else:
            self._draw_spreads(ax)

    def _draw_boxes(self, ax):
        """Boxes of the clients' residuals, ordered by the median."""
        order, offsets = rows_by_client(self.codes, len(self.clients))
        by_client = np.split(self.residuals[order], offsets[1:-1])
        # Medians, because one outlier among few residuals would decide the order by means.
        ranked = np.argsort([np.median(values) for values in by_client], kind="stable")
        ax.axhline(0, color=COLORS["population"], lw=1, zorder=1)
        for at, client in enumerate(ranked):
            _draw_box(ax, at, by_client[client])
        ax.set(ylabel=self.residual_label, xlim=(-0.8, len(ranked) - 0.2))
        width = ax.get_window_extent().width / ax.figure.dpi
        if len(ranked) * _INCHES_PER_NAME <= width:  # otherwise names would overlap
            names = [str(name) for name in self.clients[ranked]]
            looks = {"rotation": 90, "fontsize": "x-small", "parse_math": False}
            ax.set_xticks(np.arange(len(ranked)), names, **looks)
        else:
            ax.set_xticks([])
        ax.set_xlabel("client, by median residual")

    def _draw_spreads(self, ax):
        """Root mean squares of the clients' residuals over their degrees of freedom."""
        share = np.ones(len(self.codes)) if self.variance_share is None else self.variance_share
        dof, spread = client_spreads(self.standardized, share, self.codes, len(self.clients))
        lower, upper = spread_limits(dof)
        outside = (spread < lower) | (spread > upper)
        # Limits depend on the degrees of freedom alone, so they are curves.
        at = np.sort(dof)
        for limit in spread_limits(at):
            ax.plot(at, limit, color="0.3", lw=1, ls="--")
        ax.plot([], [], color="0.3", lw=1, ls="--", label="95 % limits of a client")
        ax.axhline(1, color=COLORS["population"], lw=1, zorder=1)
        color, label = COLORS["personalized"], f"outside: {outside.sum()} of {len(dof)}"
        ax.plot(dof[~outside], spread[~outside], ".", color=COLORS["local"], ms=5, alpha=0.6)
        ax.plot(dof[outside], spread[outside], ".", color=color, ms=6, label=label)
        ax.set_xlabel("degrees of freedom of the client's residuals")
        ax.set_ylabel("root mean square, standardized")
        if drawing.is_wide(dof):
            ax.set_xscale("log")
        drawing.legend_inside(ax, faint_marks=False)

    def _draw_residual_quantiles(self, ax):
        """Normal quantile plot of the standardized residuals."""
        values = self.standardized[np.isfinite(self.standardized)]
        if not len(values):
            _write_reason(
                ax, "No standardized residuals: the model leaves no variance within clients."
            )
            return
        _draw_quantiles(ax, values)
        same = np.array_equal(self.standardized, self.residuals)  # those of classes are
        ax.set_ylabel(self.residual_label if same else "standardized residual")

    def _draw_client_quantiles(self, ax):
        """Normal quantile plot of the clients' standardized deviations."""
        if self.deviations is None:
            _write_reason(ax, f"No deviations of clients: {self._reason()}.")
            return
        _draw_quantiles(ax, self.deviations)
        ax.set_ylabel(f"standardized {self.deviation_label}")

    def _reason(self):
        """Why there are no deviations of clients."""
        return self.without_deviations or "none were given"


def _panels(kind):
    """Names of the panels for a parameter `kind`."""
    if isinstance(kind, str):
        panels = list(_PANELS) if kind == "all" else [kind]
    else:
        panels = list(kind)
    if not panels or not set(panels) <= set(_PANELS):
        names = ", ".join(map(repr, _PANELS))
        raise ValueError(f"kind must be 'all', one of {names}, or a list of these; got {kind!r}.")
    return panels


def _thinned(n):
    """Positions of up to 5000 of n rows, at random: rows may be in some order within clients."""
    if n <= _MOST_DRAWN:
        return np.arange(n)
    # A fixed seed: a display looks the same whenever it is drawn.
    return np.sort(np.random.default_rng(0).choice(n, _MOST_DRAWN, replace=False))


def _thinned_ranks(n):
    """Ranks of up to 5000 of n ordered values, with all of both tails."""
    if n <= _MOST_DRAWN:
        return np.arange(1, n + 1)
    ends = _MOST_DRAWN // 10  # of each tail, where departures from normality show
    inner = np.linspace(ends + 1, n - ends, _MOST_DRAWN - 2 * ends).astype(int)
    return np.unique(np.r_[np.arange(1, ends + 1), inner, np.arange(n - ends + 1, n + 1)])


def _draw_quantiles(ax, values):
    """Ordered values over the medians of those of a standard normal distribution."""
    ranks = _thinned_ranks(len(values))
    lower, median, upper = quantile_limits(len(values), ranks)
    drawing.draw_band(ax, median, lower, upper, "0.3", "95 % limits")
    ax.plot(median, median, color="0.3", lw=1)
    ordered = np.sort(values)[ranks - 1]
    ax.plot(median, ordered, ".", color=COLORS["personalized"], ms=4, alpha=0.8, rasterized=True)
    ax.set_xlabel("normal quantile")
    # Points run from lower left to upper right.
    drawing.legend_inside(ax, "upper left", faint_marks=False)


def _draw_box(ax, at, values):
    """Box of a client's residuals, or the residuals if there are few."""
    color = COLORS["personalized"]
    if len(values) < _FEWEST_IN_A_BOX:
        ax.plot(np.full(len(values), at), values, ".", color=color, ms=4)
        return
    line = {"color": color, "lw": 0.8}
    ax.boxplot(
        values,
        positions=[at],
        widths=0.6,
        manage_ticks=False,
        boxprops=line,
        whiskerprops=line,
        capprops={"lw": 0},
        medianprops={"color": color, "lw": 2},
        flierprops={"marker": ".", "ms": 5, "mfc": COLORS["local"], "mec": "none"},
    )


def _write_reason(ax, text):
    """Write why a panel is empty."""
    looks = {"ha": "center", "va": "center", "fontsize": "small", "wrap": True}
    ax.text(0.5, 0.5, text, transform=ax.transAxes, parse_math=False, **looks)
    ax.set_axis_off()
