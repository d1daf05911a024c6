"""Plot of observed responses among responses simulated from the fitted model."""

from __future__ import annotations

from typing import Any, Self, cast

import numpy as np
import pandas as pd
from sklearn.base import is_classifier

from pfl_sklearn._clients import Codes, encode_clients, row_counts, segment_sums
from pfl_sklearn._parameters import with_parameters
from pfl_sklearn._typing import Floats, RandomState, TableLike
from pfl_sklearn.inspection import _drawing as drawing
from pfl_sklearn.inspection._drawing import COLORS
from pfl_sklearn.inspection._parametric_bootstrap import simulating_model
from pfl_sklearn.inspection._residual_values import (
    checked_responses,
    present_rows,
    rows_inside,
)

_PANELS = ("responses", "clients")
_MOST_STEPS = 400  # of a distribution function, more than a picture resolves


@with_parameters
class PredictiveCheckDisplay:
    """Posterior predictive check: what the fitted model simulates, and what was observed.

    Each panel has the distribution function of the observed values, and the band that holds those
    of 95 % of the simulated tables at each point: of all responses (not for classes), and of the
    clients' means. A model that lacks a dispersion, zeros or heavy tails leaves the first band; one
    with the wrong distribution of clients the second.

    Parameters
    ----------
    observed : ndarray of shape (n_rows,)
        Responses; 0 and 1 for two classes.
    simulated : ndarray of shape (n, n_rows)
        Simulated responses.
    codes : ndarray of shape (n_rows,)
        Clients of the rows, as numbers from 0.
    is_class : bool, default=False
        Whether responses are classes.
    label : str, default="response"
        Name of the response, for the axes.

    Attributes
    ----------
    checks_ : DataFrame
        Observed statistics, the bounds of 95 % of the simulated ones, and two-sided p-values: of
        the mean, the standard deviation, the smallest and the largest response, for counts the
        share of zeros, and the standard deviation of the clients' means.
    axes_ : ndarray of matplotlib Axes
        The axes, one per panel.
    ax_, figure_ : matplotlib Axes and Figure
        The first of the axes, and their figure.

    Notes
    -----
    The model has seen the responses that it is compared with, so p-values are rather too large
    (Gelman, Meng and Stern, 1996): small ones count. The plot shows responses of rows, which no
    epsilon covers.

    References
    ----------
    Gelman, A., Meng, X.-L. and Stern, H. (1996). Posterior predictive assessment of model fitness
    via realized discrepancies. Statistica Sinica, 6, 733-760.

    Examples
    --------
    >>> from pfl_sklearn.datasets import load_radon
    >>> from pfl_sklearn.inspection import PredictiveCheckDisplay
    >>> from pfl_sklearn.linear_model import PersonalizedLinearRegression
    >>> homes = load_radon("MN").frame
    >>> X, y, county = homes[["floor"]], homes["log_radon"], homes["county_fips"]
    >>> model = PersonalizedLinearRegression(random="intercept").fit(X, y, groups=county)
    >>> display = PredictiveCheckDisplay.from_estimator(
    ...     model, X, y, groups=county)  # doctest: +SKIP
    >>> display.checks_.loc["minimum"]  # doctest: +SKIP
    """

    observed: Floats
    simulated: Floats
    codes: Codes
    is_class: bool = False
    label: str = "response"

    @classmethod
    def from_estimator(
        cls,
        estimator: Any,
        X: TableLike,
        y: TableLike,
        *,
        groups: TableLike = None,
        sample_weight: TableLike = None,
        clients: str = "same",
        n: int = 200,
        kind: str | list[str] = "all",
        ax: Any = None,
        random_state: RandomState = 0,
        exposure: TableLike = None,
        offset: TableLike = None,
    ) -> Self:
        """Check a fitted estimator.

        Parameters
        ----------
        estimator : fitted mixed model, or a pipeline, ClientColumn or search around one
            The model to check.
        X : array-like of n_rows rows
            Features, as the estimator's ``fit`` takes them.
        y : array-like of shape (n_rows,)
            Responses, labels of two classes, or counts.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row.
        sample_weight : array-like of shape (n_rows,), default=None
            Precision weights of linear models, as in ``fit``; rows of weight 0 are left out.
        clients : {"same", "new"}, default="same"
            Whether simulated clients are those of ``fit``, or new ones of the same population,
            which is the check for models with `groupings`.
        n : int, default=200
            Number of simulated tables.
        kind : str or list of str, default="all"
            Panels to draw: "responses", "clients". For classes "all" is the second alone.
        ax : matplotlib Axes, or a sequence of one per panel, default=None
            Where to draw. None: a new figure.
        random_state : int, RandomState instance or None, default=0
            Seed of the simulated responses.
        exposure, offset : array-like of shape (n_rows,), default=None
            As in ``fit``; not for columns that a ``ClientColumn`` takes out.

        Raises
        ------
        TypeError
            If `estimator` is of another type, or the target is transformed.
        ValueError
            As ``simulate``, and for an unknown panel.
        """
        model = simulating_model(estimator)
        known = {"exposure": exposure, "offset": offset}
        rows = present_rows(X, checked_responses(model, y), groups, sample_weight, known)
        weights = {} if rows.weights is None else {"sample_weight": rows.weights}
        inside = rows_inside(estimator, rows)
        y = inside.y
        simulated = model.simulate(
            inside.X,
            groups=inside.groups,
            n=n,
            clients=clients,
            random_state=random_state,
            **weights,
            **inside.metadata,
        )
        label = "response"
        if is_classifier(model):
            label = f"share of {model.classes_[1]}"
            simulated = simulated == model.classes_[1]
        ids = np.zeros(len(y), dtype=int) if inside.groups is None else inside.groups
        display = cls(
            observed=y,
            simulated=simulated.astype(np.float64),
            codes=encode_clients(ids, len(y)).codes,
            is_class=is_classifier(model),
            label=label,
        ).plot(kind=kind, ax=ax)
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
            If `kind` names an unknown panel, or `ax` holds another number of axes.
        """
        possible = _PANELS[self.is_class :]
        panels = list(possible) if kind == "all" else [kind] if isinstance(kind, str) else [*kind]
        if not panels or not set(panels) <= set(possible):
            names = ", ".join(map(repr, possible))
            raise ValueError(f"kind must be 'all', one of {names}, or a list; got {kind!r}.")
        axes = drawing.axes_for(ax, "panel", (1, len(panels)), (4.8 * len(panels), 3.9))
        means = [self._client_means(values) for values in (self.observed, *self.simulated)]
        self.checks_ = self._checks(np.array(means))
        for panel, name in zip(axes, panels, strict=True):
            if name == "responses":
                _draw_distribution(panel, self.observed, self.simulated)
                panel.set(xlabel=self.label, ylabel="share of rows at or below")
            else:
                _draw_distribution(panel, means[0], np.array(means[1:]))
                name = self.label if self.is_class else f"mean {self.label}"
                panel.set(xlabel=f"client's {name}", ylabel="share of clients at or below")
        self.axes_, self.ax_, self.figure_ = axes, axes[0], axes[0].figure
        return self

    def _client_means(self, values):
        m = int(self.codes.max()) + 1
        return segment_sums(values, self.codes, m) / row_counts(self.codes, m)

    def _checks(self, means):
        """Table of statistics, from the means of clients (1 + n, m), the observed ones first."""
        values = np.vstack([self.observed, self.simulated])
        found = {"mean": values.mean(axis=1)}
        if not self.is_class:
            found["standard deviation"] = values.std(axis=1)
            found["minimum"], found["maximum"] = values.min(axis=1), values.max(axis=1)
            if np.all(values == np.floor(values)):
                found["share of zeros"] = np.mean(values == 0, axis=1)
        found["standard deviation of clients' means"] = means.std(axis=1)
        table = np.array(list(found.values()))
        # The observed table is one more of them.
        tails = np.mean(table >= table[:, :1], axis=1), np.mean(table <= table[:, :1], axis=1)
        lower, upper = np.quantile(table[:, 1:], (0.025, 0.975), axis=1)
        columns = {
            "observed": table[:, 0],
            "lower": lower,
            "upper": upper,
            "p_value": np.minimum(1.0, 2 * np.minimum(*tails)),
        }
        return pd.DataFrame(columns, index=pd.Index(found, name="statistic"))


def _draw_distribution(ax, observed, simulated):
    """Distribution function of observed values (k,), and the band of simulated ones (n, k)."""
    at = np.unique(np.concatenate([observed, simulated.ravel()]))
    if len(at) > _MOST_STEPS:
        at = np.quantile(at, np.linspace(0, 1, _MOST_STEPS))
    k = len(observed)
    shares = np.array([np.searchsorted(np.sort(row), at, side="right") for row in simulated]) / k
    lower, upper = np.quantile(shares, (0.025, 0.975), axis=0)
    color = COLORS["personalized"]
    ax.fill_between(
        at,
        lower,
        upper,
        step="post",
        color=color,
        alpha=0.3,
        lw=0,
        label="95 % of simulated tables",
    )
    own = np.searchsorted(np.sort(observed), at, side="right") / k
    ax.step(at, own, where="post", color="0.1", lw=1.2, label="observed")
    drawing.legend_inside(ax, "lower right")
