"""Plot of local and personalized estimates."""

import numpy as np

from pfl_sklearn._nesting import innermost_estimator
from pfl_sklearn.inspection._coefficients import aligned, coefficients_of, is_linear_model
from pfl_sklearn.inspection._drawing import (
    COLORS,
    draw_intervals,
    draw_local,
    draw_personalized,
    draw_truth,
    in_rows,
    legend_below,
    legend_inside,
    name_rows,
    new_axes,
    strip,
    truth_of,
)


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

    Attributes
    ----------
    ax_ : matplotlib Axes
        The axes.
    figure_ : matplotlib Figure
        The figure of the axes.

    See Also
    --------
    ShrinkageDisplay.from_estimator : The usual way to make one.

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

    def __init__(
        self,
        *,
        clients,
        local,
        personalized,
        lower,
        upper,
        population,
        truth=None,
        quantity="estimate",
    ):
        self.clients = clients
        self.local = local
        self.personalized = personalized
        self.lower = lower
        self.upper = upper
        self.population = population
        self.truth = truth
        self.quantity = quantity

    @classmethod
    def from_estimator(
        cls,
        estimator,
        *,
        output=0,
        level=0.95,
        truth=None,
        kind="auto",
        ax=None,
        xlabel=None,
        feature=None,
        local=None,
    ):
        """Plot a fitted estimator of means, or one coefficient of a linear model.

        Parameters
        ----------
        estimator : fitted GaussianMean, BernoulliMean, PersonalizedLinearRegression or \
                PersonalizedLogisticRegression, or a pipeline or search around one
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
            Label of the horizontal axis. None: what is estimated.
        feature : "intercept", or name or index of a feature, default=None
            Coefficient of a linear model to plot. None: the intercept.
        local : fitted linear model, default=None
            Second model, with the clients' own coefficients, such as one fitted with
            ``GaussianPrior(covariance=np.inf)``. Needed for linear models, because they keep no
            local coefficients.

        Returns
        -------
        ShrinkageDisplay

        Raises
        ------
        ValueError
            - If `estimator` has no local and personalized estimates.
            - If `truth` has another length or lacks a client.
            - If `feature` or `local` does not go with `estimator`.
        """
        fitted = innermost_estimator(estimator)
        if is_linear_model(fitted):
            values = _slopes_of(estimator, local, feature, output, level)
        elif not hasattr(fitted, "credible_interval"):
            raise ValueError(
                "expected a fitted GaussianMean or BernoulliMean, or a linear model with one "
                f"coefficient vector per client; got {type(fitted).__name__}."
            )
        elif feature is not None or local is not None:
            raise ValueError(
                f"feature and local belong to linear models; {type(fitted).__name__} has one mean "
                "per client and keeps the local means."
            )
        else:
            values = _means_of(fitted, output, level)
        own, personalized, lower, upper, population, quantity = values
        truth = None if truth is None else truth_of(fitted.clients_, truth)
        display = cls(
            clients=fitted.clients_,
            local=own,
            personalized=personalized,
            lower=lower,
            upper=upper,
            population=float(population),
            truth=truth,
            quantity=quantity,
        )
        return display.plot(kind=kind, ax=ax, xlabel=xlabel, level=level)

    def plot(self, *, kind="auto", ax=None, xlabel=None, level=0.95):
        """Draw the display.

        Parameters
        ----------
        kind : {"auto", "rows", "points"}, default="auto"
            "auto" draws rows for up to 60 clients.
        ax : matplotlib Axes, default=None
            Where to draw. None: a new figure.
        xlabel : str, default=None
            Label of the horizontal axis. None: what is estimated.
        level : float, default=0.95
            Level of the intervals, for the legend.

        Returns
        -------
        self
        """
        rows = in_rows(kind, len(self.clients))
        if ax is None:
            ax = new_axes(len(self.clients), rows)[0]
        (self._plot_rows if rows else self._plot_points)(ax, level)
        ax.set_xlabel(xlabel or (self.quantity if rows else f"local {self.quantity}"))
        strip(ax)
        self.ax_, self.figure_ = ax, ax.figure
        return self

    def _plot_rows(self, ax, level):
        order = np.argsort(self.personalized, kind="stable")
        at = np.arange(len(order))
        ax.axvline(self.population, color=COLORS["population"], lw=1, label="population")
        draw_intervals(ax, at, self.lower[order], self.upper[order], level, rows=True)
        ax.hlines(at, self.local[order], self.personalized[order], color=COLORS["local"], lw=0.8)
        draw_local(ax, self.local[order], at)
        draw_personalized(ax, self.personalized[order], at, rows=True)
        if self.truth is not None:
            draw_truth(ax, self.truth[order], at, rows=True)
        name_rows(ax, self.clients[order])
        legend_below(ax)

    def _plot_points(self, ax, level):
        ends = [float(np.min(self.local)), float(np.max(self.local))]
        ax.plot(ends, ends, color=COLORS["local"], lw=1, ls="--", label="no shrinkage")
        ax.axhline(self.population, color=COLORS["population"], lw=1, label="population")
        draw_intervals(ax, self.local, self.lower, self.upper, level, rows=False)
        if self.truth is not None:
            draw_truth(ax, self.local, self.truth, rows=False)
        draw_personalized(ax, self.local, self.personalized, rows=False)
        ax.set_ylabel(f"personalized {self.quantity}")
        legend_inside(ax)


def _means_of(fitted, output, level):
    """Local and personalized means, bounds, population mean, and name of the quantity."""
    fitted._require_fitted("means_")
    lower, upper = fitted.credible_interval(level)
    values = [fitted.local_means_, fitted.means_, lower, upper, fitted.population_mean_]
    if fitted.means_.ndim == 2:
        values = [value[..., output] for value in values]
    return (*values, "estimate")


def _slopes_of(estimator, local, feature, output, level):
    """The same for one coefficient, with the local coefficients of a second model."""
    feature = "intercept" if feature is None else feature
    found = coefficients_of(estimator, feature, output=output, level=level)
    if local is None:
        raise ValueError(
            "a linear model keeps no local coefficients; give local=, a second model with the "
            "clients' own, such as PersonalizedLinearRegression(GaussianPrior(covariance=np.inf))."
        )
    own = aligned(found, coefficients_of(local, feature, output=output, level=level), "local")
    return own.values, found.values, found.lower, found.upper, found.population, found.label
