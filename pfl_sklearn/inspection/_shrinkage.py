"""Plot of local and personalized estimates."""

import numpy as np

from pfl_sklearn._nesting import innermost_estimator

_MOST_ROWS = 60
_MOST_INCHES = 100.0
_COLORS = {
    "local": "#8c8c8c",
    "personalized": "#1f5fa8",
    "population": "#c1440e",
    "truth": "#2a7f3f",
}


class ShrinkageDisplay:
    """Local estimates, personalized ones with their intervals, and the population.

    Few clients are drawn one per row, ordered by their personalized estimate. Many are drawn as
    points, personalized against local: the flatter the cloud, the stronger the shrinkage.

    Parameters
    ----------
    clients : ndarray of shape (n_clients,)
    local, personalized, lower, upper : ndarrays of shape (n_clients,)
    population : float
    truth : ndarray of shape (n_clients,), default=None

    Attributes
    ----------
    ax_ : matplotlib Axes
    figure_ : matplotlib Figure

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

    def __init__(self, *, clients, local, personalized, lower, upper, population, truth=None):
        self.clients = clients
        self.local = local
        self.personalized = personalized
        self.lower = lower
        self.upper = upper
        self.population = population
        self.truth = truth

    @classmethod
    def from_estimator(
        cls, estimator, *, output=0, level=0.95, truth=None, kind="auto", ax=None, xlabel=None
    ):
        """Plot a fitted estimator of means.

        Parameters
        ----------
        estimator : fitted GaussianMean or BernoulliMean, or a pipeline or search around one
        output : int, default=0
            Which column of a two-dimensional target.
        level : float in (0, 1), default=0.95
            Of the intervals.
        truth : Series indexed by client, or array-like of shape (n_clients,), default=None
            True values to draw beside; an array in the order of ``clients_``.
        kind : {"auto", "rows", "points"}, default="auto"
            "auto" draws rows for up to 60 clients.
        ax : matplotlib Axes, default=None
        xlabel : str, default=None

        Returns
        -------
        ShrinkageDisplay

        Raises
        ------
        ValueError
            If `estimator` has no local and personalized means, or `truth` has another length or
            lacks a client.
        """
        fitted = innermost_estimator(estimator)
        if not hasattr(fitted, "credible_interval"):
            raise ValueError(
                f"expected a fitted GaussianMean or BernoulliMean; got {type(fitted).__name__}."
            )
        fitted._require_fitted("means_")
        if truth is not None:
            truth = _truth_of(fitted.clients_, truth)
        lower, upper = fitted.credible_interval(level)
        values = [fitted.local_means_, fitted.means_, lower, upper, fitted.population_mean_]
        if fitted.means_.ndim == 2:
            values = [value[..., output] for value in values]
        local, personalized, lower, upper, population = values
        display = cls(
            clients=fitted.clients_,
            local=local,
            personalized=personalized,
            lower=lower,
            upper=upper,
            population=float(population),
            truth=truth,
        )
        return display.plot(kind=kind, ax=ax, xlabel=xlabel, level=level)

    def plot(self, *, kind="auto", ax=None, xlabel=None, level=0.95):
        """Draw the display.

        Parameters
        ----------
        kind : {"auto", "rows", "points"}, default="auto"
        ax : matplotlib Axes, default=None
        xlabel : str, default=None
        level : float, default=0.95
            Named in the legend.

        Returns
        -------
        self
        """
        import matplotlib.pyplot as plt

        if kind not in ("auto", "rows", "points"):
            raise ValueError(f"kind must be 'auto', 'rows' or 'points'; got {kind!r}.")
        rows = len(self.clients) <= _MOST_ROWS if kind == "auto" else kind == "rows"
        if ax is None:
            height = np.clip(0.26 * len(self.clients) + 1.6, 2.5, _MOST_INCHES) if rows else 5.0
            _, ax = plt.subplots(figsize=(7.0, height), layout="constrained")
        (self._plot_rows if rows else self._plot_points)(ax, level)
        ax.set_xlabel(xlabel or ("estimate" if rows else "local estimate"))
        ax.spines[["top", "right"]].set_visible(False)
        self.ax_, self.figure_ = ax, ax.figure
        return self

    def _plot_rows(self, ax, level):
        order = np.argsort(self.personalized, kind="stable")
        at = np.arange(len(order))
        ax.axvline(self.population, color=_COLORS["population"], lw=1, label="population")
        ax.hlines(
            at,
            self.lower[order],
            self.upper[order],
            color=_COLORS["personalized"],
            alpha=0.35,
            lw=3,
            label=f"{level:.0%} interval",
        )
        ax.hlines(at, self.local[order], self.personalized[order], color=_COLORS["local"], lw=0.8)
        ax.plot(self.local[order], at, "o", mfc="white", mec=_COLORS["local"], ms=5, label="local")
        ax.plot(
            self.personalized[order],
            at,
            "o",
            color=_COLORS["personalized"],
            ms=5,
            label="personalized",
        )
        if self.truth is not None:
            ax.plot(self.truth[order], at, "x", color=_COLORS["truth"], ms=6, label="truth")
        ax.set_yticks(at, [str(client) for client in self.clients[order]], parse_math=False)
        ax.set_ylim(-0.8, len(order) - 0.2)
        # Below the axis label; the padding is in font sizes, whatever the height of the axes.
        ax.legend(
            loc="upper center",
            bbox_to_anchor=(0.5, 0.0),
            borderaxespad=5.0,
            ncols=3,
            frameon=False,
            fontsize="small",
        )

    def _plot_points(self, ax, level):
        low, high = float(np.min(self.local)), float(np.max(self.local))
        ax.plot(
            [low, high], [low, high], color=_COLORS["local"], lw=1, ls="--", label="no shrinkage"
        )
        ax.axhline(self.population, color=_COLORS["population"], lw=1, label="population")
        ax.vlines(
            self.local,
            self.lower,
            self.upper,
            color=_COLORS["personalized"],
            alpha=float(np.clip(20 / len(self.local), 0.03, 0.35)),
            lw=1,
            label=f"{level:.0%} interval",
        )
        if self.truth is not None:
            ax.plot(
                self.local, self.truth, "x", color=_COLORS["truth"], ms=3, alpha=0.4, label="truth"
            )
        ax.plot(
            self.local,
            self.personalized,
            ".",
            color=_COLORS["personalized"],
            ms=5,
            alpha=0.7,
            label="personalized",
        )
        ax.set_ylabel("personalized estimate")
        legend = ax.legend(frameon=False, fontsize="small")
        for handle in legend.legend_handles:
            handle.set_alpha(0.8)  # faint marks add up on the plot, not in the legend


def _truth_of(clients, truth):
    """True values (n_clients,), of a series by its index."""
    if hasattr(truth, "reindex"):
        missing = ~np.isin(clients, truth.index)
        if missing.any():
            raise ValueError(f"the index of truth lacks the client {clients[missing][0]!r}.")
        truth = truth.reindex(clients)
    truth = np.asarray(truth, dtype=float)
    if truth.shape != clients.shape:
        raise ValueError(f"truth must have shape {clients.shape}; got {truth.shape}.")
    return truth
