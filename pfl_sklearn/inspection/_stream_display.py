"""Plot of a stream over time: estimates of some clients, or the error of all."""

from __future__ import annotations

from itertools import pairwise
from numbers import Integral
from typing import Any, Self

import numpy as np
import pandas as pd
from scipy.special import ndtri
from sklearn.base import clone

from pfl_sklearn._clients import encode_clients, match_clients
from pfl_sklearn._compat import safe_indexing
from pfl_sklearn._parameters import with_parameters
from pfl_sklearn._typing import Floats, Integers, TableLike
from pfl_sklearn.base import check_level
from pfl_sklearn.inspection import _drawing as drawing
from pfl_sklearn.inspection._drawing import COLORS

_N_SHOWN = 3  # clients, by default: their panels fit on a screen
_SMALLEST_ERROR = 1e-300  # an error of 0 has no logarithm


@with_parameters
class StreamDisplay:
    """Estimates of clients over time with their intervals, or the error of all clients.

    Parameters
    ----------
    steps : ndarray of shape (n_times,)
        Steps of the stream after which estimates were taken.
    clients : ndarray of shape (n_clients,)
        Client ids.
    means, stds, local_means : ndarrays of shape (n_times, n_clients)
        Estimates, their standard deviations, and the clients' own means; NaN before a client joins.
    truth : ndarray of shape (n_clients,) or None, default=None
        True means.

    Attributes
    ----------
    axes_ : ndarray of matplotlib Axes
        One per client, or one for the error.
    figure_ : matplotlib Figure
        The figure of the axes.
    lines_ : list of matplotlib Line2D
        The line of the estimates of each axes.

    Notes
    -----
    Means and errors of single clients are theirs alone: no epsilon covers the plot.

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn.inspection import StreamDisplay
    >>> from pfl_sklearn.online import CollaborativeMean
    >>> shop, y = np.tile(np.arange(30), 40), np.random.default_rng(0).normal(size=1200)
    >>> display = StreamDisplay.from_estimator(
    ...     CollaborativeMean(), np.zeros((1200, 1)), y, groups=shop
    ... )  # doctest: +SKIP
    """

    steps: Integers
    clients: Any
    means: Floats
    stds: Floats
    local_means: Floats
    truth: Floats | None = None

    @classmethod
    def from_estimator(
        cls,
        estimator: Any,
        X: TableLike,
        y: TableLike,
        *,
        groups: TableLike,
        labels: dict[Any, Any] | None = None,
        truth: TableLike = None,
        n_times: int = 25,
        kind: str = "auto",
        clients: TableLike = None,
        level: float = 0.95,
        ax: Any = None,
    ) -> Self:
        """Run a new stream through a clone of an estimator, and plot it.

        Parameters
        ----------
        estimator : CollaborativeMean
            The estimator; it stays as it is.
        X : array-like of n_rows rows
            Rows, as ``partial_fit`` takes them.
        y : array-like of shape (n_rows,)
            Values; those of one client are in the order of time.
        groups : array-like of shape (n_rows,)
            Client id of every row.
        labels : dict or None, default=None
            Classes for ``decision="oracle"``, by client id.
        truth : Series indexed by client, array-like of shape (n_clients,) or None, default=None
            True means, in the order of the ids if it has no index.
        n_times : int, default=25
            Number of times at which estimates are taken, evenly spaced on a logarithmic scale from
            the first step to the last.
        kind : {"auto", "estimates", "error"}, default="auto"
            "estimates" draws a few clients with their intervals, "error" the mean squared error of
            all clients. "auto" is "error" if `truth` is given.
        clients : array-like or None, default=None
            Ids of the clients to draw. None: three.
        level : float in (0, 1), default=0.95
            Probability of the intervals.
        ax : matplotlib Axes, or a sequence of one per client, default=None
            Where to draw. None: a new figure.

        Notes
        -----
        A private stream spends its epsilon once more, because this is a new stream.
        """
        if not isinstance(n_times, Integral) or n_times < 1:
            raise ValueError(f"n_times must be an integer of at least 1; got {n_times!r}.")
        estimates = _estimates_by_time(
            clone(estimator), X, np.asarray(y), groups, labels, int(n_times)
        )
        if truth is not None:
            estimates["truth"] = drawing.truth_of(estimates["clients"], truth)
        return cls(**estimates).plot(kind=kind, clients=clients, level=level, ax=ax)

    def plot(
        self,
        *,
        kind: str = "auto",
        clients: TableLike = None,
        level: float = 0.95,
        ax: Any = None,
    ) -> Self:
        """Draw the display.

        Parameters
        ----------
        kind, clients, level, ax : object
            As in :meth:`from_estimator`.

        Raises
        ------
        ValueError
            If `kind` or `level` is out of range, the error is asked for without the truth, a client
            is unknown, or `ax` does not match.
        """
        drawing.check_option("kind", kind, ("auto", "estimates", "error"))
        check_level(level)
        if kind == "error" and self.truth is None:
            raise ValueError("kind='error' needs truth, the clients' true means.")
        if kind == "error" or (kind == "auto" and self.truth is not None):
            self.axes_ = drawing.axes_for(ax, "plot", (1, 1), (6.5, 4.0))
            self.lines_ = [self._draw_error(self.axes_[0], self.truth, level)]
        else:
            shown = self._places(clients)
            size = 6.5, 4.0 if len(shown) == 1 else 1.2 + 1.6 * len(shown)
            self.axes_ = drawing.axes_for(ax, "client", (len(shown), 1), size, sharex=True)
            pairs = zip(self.axes_, shown, strict=True)
            self.lines_ = [self._draw_client(one, place, level) for one, place in pairs]
            drawing.legend_inside(self.axes_[0])
        for one in self.axes_:
            one.set_xscale("log")  # errors fall with powers of the number of values
        self.axes_[-1].set_xlabel("values of a client")
        self.figure_ = self.axes_[0].figure
        return self

    def _places(self, clients):
        """Positions of the clients to draw."""
        if clients is None:
            last = len(self.clients) - 1
            # The first, the middle and the last id.
            return np.unique(np.linspace(0, last, min(_N_SHOWN, last + 1)).astype(int))
        ids = np.atleast_1d(np.asarray(clients))
        positions = match_clients(ids, len(ids), self.clients, "clients")
        if (positions < 0).any():
            raise ValueError(f"client {ids[positions < 0].tolist()[0]!r} is not in the stream.")
        return positions

    def _draw_client(self, ax, place, level):
        """Estimates of one client."""
        means, half = self.means[:, place], ndtri(0.5 + level / 2) * self.stds[:, place]
        color, label = COLORS["personalized"], f"{100 * level:g} % interval"
        drawing.draw_band(ax, self.steps, means - half, means + half, color, label)
        ax.plot(self.steps, self.local_means[:, place], color=COLORS["local"], label="alone")
        (line,) = ax.plot(self.steps, means, color=color, lw=1.8, label="with the others")
        if self.truth is not None:
            ax.axhline(self.truth[place], color=COLORS["truth"], lw=1, ls="--", label="truth")
        ax.set_ylabel("estimate")
        title = f"client {self.clients[place]}"
        ax.set_title(title, loc="left", fontsize="small", parse_math=False)
        return line

    def _draw_error(self, ax, truth, level):
        """Mean squared errors over all clients, with bands for their sampling."""
        quantile = ndtri(0.5 + level / 2)
        for name, values, label in (
            ("local", self.local_means, "alone"),
            ("personalized", self.means, "with the others"),
        ):
            squares = (values - truth) ** 2
            # Clients that have not joined yet have no error.
            n = np.isfinite(squares).sum(axis=1)
            mean = np.nansum(squares, axis=1) / n
            # Clients are the sample, so that their number divides.
            half = quantile * np.nanstd(squares, axis=1) / np.sqrt(n)
            lower = np.maximum(mean - half, mean / 100)  # the scale is logarithmic
            drawing.draw_band(ax, self.steps, lower, mean + half, COLORS[name])
            error = np.maximum(mean, _SMALLEST_ERROR)
            (line,) = ax.plot(self.steps, error, color=COLORS[name], lw=1.8, label=label)
        ax.set_yscale("log")
        ax.set_ylabel("mean squared error")
        title = f"bands: {100 * level:g} %, over clients"
        ax.set_title(title, loc="left", fontsize="x-small", color="0.3")
        drawing.legend_inside(ax)
        return line


def _estimates_by_time(model, X, y, groups, labels, n_times):
    """Estimates of a stream by time, as parameters of the display."""
    ids, codes = encode_clients(groups, len(y))
    step = pd.Series(codes).groupby(codes).cumcount().to_numpy()
    # Errors fall with powers of time, so early times matter most; rounded times may coincide.
    times = np.unique(np.geomspace(1, step.max() + 1, n_times).round().astype(int))
    shape = len(times), len(ids)
    estimates = {name: np.full(shape, np.nan) for name in ("means", "stds", "local_means")}
    options = {} if labels is None else {"labels": labels}
    for k, (before, time) in enumerate(pairwise([0, *times])):
        rows = np.flatnonzero((step >= before) & (step < time))
        model.partial_fit(safe_indexing(X, rows), y[rows], groups=ids[codes[rows]], **options)
        place = match_clients(model.clients_, len(model.clients_), ids)  # those who have joined
        for name, values in estimates.items():
            values[k, place] = getattr(model, f"{name}_")
    return {"steps": times, "clients": ids, **estimates}
