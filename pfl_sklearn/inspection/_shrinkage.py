"""Plot of local and personalized estimates."""

from __future__ import annotations

from typing import Any, Self, cast

import numpy as np

from pfl_sklearn._client_tables import class_quantity
from pfl_sklearn._parameters import with_parameters
from pfl_sklearn._typing import Floats, TableLike
from pfl_sklearn._unwrap import innermost_estimator
from pfl_sklearn.inspection import _drawing as drawing
from pfl_sklearn.inspection._coefficients import (
    coefficients_of,
    is_linear_model,
    local_coefficients,
)
from pfl_sklearn.inspection._drawing import COLORS, Axes

_REACH = 1.0  # ranges of the intervals, up to which local estimates are drawn on both sides


@with_parameters
class ShrinkageDisplay:
    """Local estimates, personalized estimates with intervals, and the population.

    Few clients are drawn one per row, ordered by their personalized estimate. Many are drawn as
    points, personalized against local; the flatter the cloud, the stronger the shrinkage.

    Parameters
    ----------
    clients : ndarray of shape (n_clients,)
        Client ids.
    local, personalized, lower, upper : ndarrays of shape (n_clients,)
        Local estimates, personalized ones, and the ends of their intervals.
    population : float
        Population's estimate.
    truth : ndarray of shape (n_clients,), default=None
        True values.
    quantity : str, default="estimate"
        Name of the estimated quantity, for the axes.
    local_name : str, default="local"
        Name of the local estimates; those of published tables are "noised".

    Attributes
    ----------
    ax_, figure_ : matplotlib Axes and Figure
        The axes, and their figure.

    Examples
    --------
    >>> from pfl_sklearn.datasets import load_baseball
    >>> from pfl_sklearn.estimation import BernoulliMean
    >>> from pfl_sklearn.inspection import ShrinkageDisplay
    >>> baseball = load_baseball()
    >>> model = BernoulliMean().fit_counts(
    ...     baseball.successes, baseball.trials, groups=baseball.groups)
    >>> display = ShrinkageDisplay.from_estimator(model)  # doctest: +SKIP
    """

    clients: Any
    local: Floats
    personalized: Floats
    lower: Floats
    upper: Floats
    population: float
    truth: Floats | None = None
    quantity: str = "estimate"
    local_name: str = "local"

    @classmethod
    def from_estimator(
        cls,
        estimator: Any,
        *,
        output: int = 0,
        level: float = 0.95,
        truth: TableLike = None,
        kind: str = "auto",
        ax: Axes | None = None,
        xlabel: str | None = None,
        feature: str | int | None = None,
        local: Any = None,
    ) -> Self:
        """Plot a fitted estimator of means, or one coefficient of a linear model.

        Parameters
        ----------
        estimator : fitted GaussianMean, BernoulliMean, PoissonMean, PersonalizedLinearRegression, \
                PersonalizedLogisticRegression or PersonalizedPoissonRegression, or a pipeline or \
                search around one
            The estimator to plot.
        output : int, default=0
            Column of a two-dimensional target, or class of a multinomial model.
        level : float in (0, 1), default=0.95
            Posterior probability of the intervals.
        truth : Series indexed by client, or array-like of shape (n_clients,), default=None
            True values to add to the plot. An array is in the order of ``clients_``.
        kind : {"auto", "rows", "points"}, default="auto"
            "auto" draws rows for up to 60 clients.
        ax : matplotlib Axes, default=None
            Where to draw. None: a new figure.
        xlabel : str, default=None
            Label of the horizontal axis. None: the estimated quantity.
        feature : "intercept", or name or index of a feature, default=None
            Coefficient of a linear model to plot. None: the intercept.
        local : fitted linear model, default=None
            Second model with local coefficients, such as one fitted with
            ``GaussianPrior(covariance=np.inf)`` (for classes and counts a large number). Linear
            models need it, because they keep no local coefficients.

        Raises
        ------
        ValueError
            - If `estimator` has no local and personalized estimates.
            - If `truth` has another length or lacks a client.
            - If `feature` or `local` does not go with `estimator`.
        """
        fitted = innermost_estimator(estimator)
        if is_linear_model(fitted):
            estimates = _coefficients_as_parameters(estimator, local, feature, output, level)
        elif not hasattr(fitted, "credible_interval"):
            raise ValueError(
                "expected a fitted GaussianMean, BernoulliMean or PoissonMean, or a linear model "
                f"with one coefficient vector per client; got {type(fitted).__name__}."
            )
        elif feature is not None or local is not None:
            raise ValueError(
                f"feature and local belong to linear models; {type(fitted).__name__} has one mean "
                "per client and keeps the local means."
            )
        else:
            estimates = _means_as_parameters(fitted, output, level)
        truth = None if truth is None else drawing.truth_of(fitted.clients_, truth)
        display = cls(clients=fitted.clients_, truth=truth, **estimates)
        display = display.plot(kind=kind, ax=ax, xlabel=xlabel, level=level)
        shows_rows = truth is not None
        return cast(Self, drawing.with_coverage(display, estimator, shows_rows=shows_rows))

    def plot(
        self,
        *,
        kind: str = "auto",
        ax: Axes | None = None,
        xlabel: str | None = None,
        level: float = 0.95,
    ) -> Self:
        """Draw the display.

        Parameters
        ----------
        kind, ax, xlabel : object
            As in :meth:`from_estimator`.
        level : float, default=0.95
            Probability of the intervals, for the legend.
        """
        rows = drawing.in_rows(kind, len(self.clients))
        ax = drawing.axes_for_clients(ax, len(self.clients), rows)[0]
        (self._plot_rows if rows else self._plot_points)(ax, level)
        ax.set_xlabel(xlabel or (self.quantity if rows else f"{self.local_name} {self.quantity}"))
        self.ax_, self.figure_ = ax, ax.figure
        return self

    def _plot_rows(self, ax, level):
        """One row per client, ordered by the personalized estimate."""
        # Local estimates from few rows would be in the order of their noise.
        order = np.argsort(self.personalized, kind="stable")
        at = np.arange(len(order))
        ax.axvline(self.population, color=COLORS["population"], lw=1, label="population")
        drawing.draw_intervals(ax, at, self.lower[order], self.upper[order], level, rows=True)
        # Lines from local to personalized estimates show the shrinkage.
        ax.hlines(at, self.local[order], self.personalized[order], color=COLORS["local"], lw=0.8)
        drawing.draw_local(ax, self.local[order], at, self.local_name)
        drawing.draw_personalized(ax, self.personalized[order], at, rows=True)
        if self.truth is not None:
            drawing.draw_truth(ax, self.truth[order], at, rows=True)
        drawing.name_rows(ax, self.clients[order])
        drawing.legend_below(ax)

    def _plot_points(self, ax, level):
        """Personalized over local estimates."""
        # On the diagonal nothing is shrunk, on the horizontal line everything is.
        limits = self._shown_range()
        at = np.clip(self.local, *limits)
        ax.plot(limits, limits, color=COLORS["local"], lw=1, ls="--", label="no shrinkage")
        ax.axhline(self.population, color=COLORS["population"], lw=1, label="population")
        drawing.draw_intervals(ax, at, self.lower, self.upper, level, rows=False)
        if self.truth is not None:
            drawing.draw_truth(ax, at, self.truth, rows=False)
        drawing.draw_personalized(ax, at, self.personalized, rows=False)
        far = at != self.local
        if far.any():
            label = f"further out: {far.sum()}"
            ax.plot(at[far], self.personalized[far], "D", color=COLORS["local"], ms=4, label=label)
        ax.set_ylabel(f"personalized {self.quantity}")
        drawing.legend_inside(ax)

    def _shown_range(self):
        """Range of local estimates to draw: noise may spread a few over many times the others'."""
        ends = np.concatenate([self.lower, self.upper, self.personalized])
        low, high = np.nanmin(ends), np.nanmax(ends)
        low, high = low - _REACH * (high - low), high + _REACH * (high - low)
        return max(low, float(np.min(self.local))), min(high, float(np.max(self.local)))


def _means_as_parameters(fitted, output, level):
    """Estimates of means, as parameters of the display."""
    fitted._require_fitted("means_")
    lower, upper = fitted.credible_interval(level)
    values = [fitted.local_means_, fitted.means_, lower, upper, fitted.population_mean_]
    if fitted.means_.ndim == 2:  # several targets
        values = [value[..., output] for value in values]
    names = ("local", "personalized", "lower", "upper")
    estimates = dict(zip(names, values, strict=False))
    quantity = class_quantity(fitted, "probability") or "estimate"
    local_name = "noised" if hasattr(fitted, "noise_std_") else "local"
    texts = {"quantity": quantity, "local_name": local_name}
    return {**estimates, "population": float(values[-1]), **texts}


def _coefficients_as_parameters(estimator, local, feature, output, level):
    """Estimates of one coefficient, as parameters of the display; `local` is a second model."""
    feature = "intercept" if feature is None else feature
    shown = coefficients_of(estimator, feature, output=output, level=level)
    if local is None:
        fitted = innermost_estimator(estimator)
        # With a link function, many clients have no finite estimate of their own.
        variance = "np.inf" if hasattr(fitted, "noise_variance_") else "100.0"
        raise ValueError(
            "a linear model keeps no local coefficients; give local=, a second model that has "
            f"them, such as {type(fitted).__name__}(GaussianPrior(covariance={variance}))."
        )
    matched = local_coefficients(local, shown, feature, output=output, level=level)
    return {
        "local": matched.values,
        "personalized": shown.values,
        "lower": shown.lower,
        "upper": shown.upper,
        "population": shown.population,
        "quantity": shown.label,
    }
