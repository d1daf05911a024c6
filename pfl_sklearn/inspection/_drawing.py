"""Axes, marks of clients, bands and legends that the displays share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

from pfl_sklearn._client_tables import NOT_COVERED, coverage_note
from pfl_sklearn._typing import Floats
from pfl_sklearn._unwrap import innermost_estimator

if TYPE_CHECKING:  # matplotlib is optional, and slow to import
    from matplotlib.axes import Axes
else:
    Axes = Any

COLORS = {
    "local": "#8c8c8c",
    "personalized": "#1f5fa8",
    "population": "#c1440e",
    "truth": "#2a7f3f",
}
_MOST_NAMED_CLIENTS = 60  # more names of clients do not fit on a page
_MOST_INCHES = 100.0  # of height; a higher picture takes gigabytes
_WIDE_RATIO = 10.0  # smallest ratio of largest to smallest value for a logarithmic scale


def check_option(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless a parameter has one of its values."""
    if value not in choices:
        *first, last = map(repr, choices)
        raise ValueError(f"{name} must be {', '.join(first)} or {last}; got {value!r}.")


def in_rows(kind: str, n_clients: int) -> bool:
    """Whether to draw clients one per row, given the parameter `kind`."""
    check_option("kind", kind, ("auto", "rows", "points"))
    return n_clients <= _MOST_NAMED_CLIENTS if kind == "auto" else kind == "rows"


def axes_for(ax: Any, panel_of: str, shape: tuple[int, int], size: Any, **options: Any) -> Any:
    """The given axes, one per `panel_of`, or those of a new figure of this shape and size."""
    # Frames have no upper and no right side.
    if ax is None:
        import matplotlib.pyplot as plt

        options |= {"figsize": size, "layout": "constrained"}
        ax = plt.subplots(*shape, **options)[1]
    # One axes, a list of them or an array, as subplots gives.
    axes, n_axes = np.ravel(np.array(ax, dtype=object)), shape[0] * shape[1]
    if len(axes) != n_axes:
        raise ValueError(f"ax must hold one axes per {panel_of}, {n_axes}; got {len(axes)}.")
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
    return axes


def axes_for_clients(ax: Any, n_clients: int, rows: bool, n_axes: int = 1) -> Any:
    """Axes (n_axes,) side by side; a new figure is high enough for all rows."""
    # Inches: a line of text per client, and the labels and legend below.
    height = np.clip(0.26 * n_clients + 1.6, 2.5, _MOST_INCHES) if rows else 5.0
    width = 7.0 if n_axes == 1 else 1.2 + 3.2 * n_axes
    return axes_for(ax, "feature", (1, n_axes), (width, height), sharey=rows)


def is_wide(values: Floats) -> bool:
    """Whether values are positive and differ so much that they need a logarithmic scale."""
    values = values[np.isfinite(values)]
    return bool(len(values) and values.min() > 0 and values.max() >= _WIDE_RATIO * values.min())


def draw_band(
    ax: Axes, x: Any, lower: Any, upper: Any, color: Any, label: str | None = None
) -> None:
    """Shade the area between two curves, so lightly that bands may overlap."""
    ax.fill_between(x, lower, upper, color=color, alpha=0.15, lw=0, label=label)


def draw_intervals(ax: Axes, at: Any, lower: Any, upper: Any, level: float, *, rows: bool) -> None:
    """Draw the clients' intervals at the positions `at` (n_clients,), unless all are unknown."""
    if not np.isfinite(lower).any():
        return
    # Thousands of points overlap: the more there are, the fainter each is.
    faint = float(np.clip(20 / len(at), 0.03, 0.35))
    style: Any = {"alpha": 0.35, "lw": 3} if rows else {"alpha": faint, "lw": 1}
    draw = ax.hlines if rows else ax.vlines
    draw(
        at, lower, upper, color=COLORS["personalized"], label=f"{100 * level:g} % interval", **style
    )


def draw_local(ax: Axes, x: Any, y: Any, label: str = "local") -> None:
    """Draw rings at the local estimates."""
    ax.plot(x, y, "o", mfc="white", mec=COLORS["local"], ms=5, label=label)


def draw_personalized(ax: Axes, x: Any, y: Any, *, rows: bool) -> None:
    """Draw dots at the personalized estimates."""
    style: Any = {"marker": "o"} if rows else {"marker": ".", "alpha": 0.7}
    color = COLORS["personalized"]
    ax.plot(x, y, ls="none", color=color, ms=5, label="personalized", **style)


def draw_truth(ax: Axes, x: Any, y: Any, *, rows: bool) -> None:
    """Draw crosses at the true values."""
    style: Any = {"ms": 6} if rows else {"ms": 3, "alpha": 0.4}
    ax.plot(x, y, "x", color=COLORS["truth"], label="truth", **style)


def name_rows(ax: Axes, clients: Any) -> None:
    """Label the rows 0, 1, ... with the clients' names."""
    # A name such as "$5" is text, not mathematics.
    ax.set_yticks(np.arange(len(clients)), [str(client) for client in clients], parse_math=False)
    ax.set_ylim(-0.8, len(clients) - 0.2)


def legend_below(ax: Axes) -> None:
    """Draw the legend below the axis label; the padding is in font sizes for any height."""
    ax.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        borderaxespad=5.0,
        ncols=3,
        frameon=False,
        fontsize="small",
    )


def legend_inside(ax: Axes, loc: str = "best", *, faint_marks: bool = True) -> None:
    """Draw a legend inside the axes."""
    from matplotlib.patches import Patch

    legend = ax.legend(frameon=False, fontsize="small", loc=cast(Any, loc))
    if faint_marks:  # overlap darkens them in the plot, but not in the legend
        for handle in legend.legend_handles:
            if handle is not None and not isinstance(handle, Patch):  # bands are drawn as they are
                handle.set_alpha(0.8)


def with_coverage(display: Any, estimator: Any, *, shows_rows: bool = False) -> Any:
    """The display, with a line above it that says whether the promise of a private fit covers it.

    `estimator` may be a pipeline or a search around the fitted one. No promise covers exact rows.
    """
    fitted = innermost_estimator(estimator)
    note = coverage_note(fitted)
    if note:
        # A search, for example, chose the parameters by exact rows.
        covered = not (shows_rows or note == NOT_COVERED or fitted.privacy_.warnings)
        text = "covered" if covered else "not covered"
        first = np.ravel(getattr(display, "axes_", display.ax_))[0]
        first.set_title(
            f"clients' values are {text} by the privacy promise",
            loc="left",
            fontsize="x-small",
            color=COLORS["truth" if covered else "population"],
        )
    return display


def truth_of(clients: Any, truth: Any) -> Floats:
    """True values (n_clients,), matched by index if `truth` is a series."""
    if hasattr(truth, "reindex"):
        missing = ~np.isin(clients, truth.index)
        if missing.any():
            raise ValueError(f"the index of truth lacks the client {clients[missing][0]!r}.")
        truth = truth.reindex(clients)
    truth = np.asarray(truth, dtype=float)
    if truth.shape != clients.shape:
        raise ValueError(f"truth must have shape {clients.shape}; got {truth.shape}.")
    return truth
