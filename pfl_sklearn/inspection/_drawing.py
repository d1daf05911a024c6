"""Parts that displays of clients share: rows or points, axes, marks and legends."""

import numpy as np

COLORS = {
    "local": "#8c8c8c",
    "personalized": "#1f5fa8",
    "population": "#c1440e",
    "truth": "#2a7f3f",
}
_MOST_ROWS = 60
_MOST_INCHES = 100.0
_WIDE = 10.0  # ratio of values from which on they are drawn on a logarithmic scale


def in_rows(kind, n_clients):
    """Whether to draw clients one per row, given the parameter `kind`."""
    if kind not in ("auto", "rows", "points"):
        raise ValueError(f"kind must be 'auto', 'rows' or 'points'; got {kind!r}.")
    return n_clients <= _MOST_ROWS if kind == "auto" else kind == "rows"


def new_axes(n_clients, rows, n_axes=1):
    """Axes (n_axes,) side by side in a new figure that is high enough for all rows."""
    import matplotlib.pyplot as plt

    height = np.clip(0.26 * n_clients + 1.6, 2.5, _MOST_INCHES) if rows else 5.0
    width = 7.0 if n_axes == 1 else 1.2 + 3.2 * n_axes
    _, axes = plt.subplots(
        1, n_axes, figsize=(width, height), layout="constrained", sharey=rows, squeeze=False
    )
    return axes[0]


def given_axes(ax, n_axes, what):
    """Array (n_axes,) of the given axes, one for each `what`; None if none are given."""
    if ax is None:
        return None
    axes = np.ravel(np.array(ax, dtype=object))
    if len(axes) != n_axes:
        raise ValueError(f"ax must hold one axes per {what}, {n_axes}; got {len(axes)}.")
    return axes


def is_wide(values):
    """Whether values are positive and differ so much that they need a logarithmic scale."""
    values = values[np.isfinite(values)]
    return bool(len(values) and values.min() > 0 and values.max() >= _WIDE * values.min())


def draw_intervals(ax, at, lower, upper, level, *, rows):
    """Draw the clients' intervals at the positions `at` (n_clients,), if there are any."""
    if not np.isfinite(lower).any():
        return
    faint = float(np.clip(20 / len(at), 0.03, 0.35))
    (ax.hlines if rows else ax.vlines)(
        at,
        lower,
        upper,
        color=COLORS["personalized"],
        alpha=0.35 if rows else faint,
        lw=3 if rows else 1,
        label=f"{level:.0%} interval",
    )


def draw_local(ax, x, y):
    """Draw rings at the local estimates."""
    ax.plot(x, y, "o", mfc="white", mec=COLORS["local"], ms=5, label="local")


def draw_personalized(ax, x, y, *, rows):
    """Draw dots at the personalized estimates."""
    style = {"marker": "o"} if rows else {"marker": ".", "alpha": 0.7}
    color = COLORS["personalized"]
    ax.plot(x, y, ls="none", color=color, ms=5, label="personalized", **style)


def draw_truth(ax, x, y, *, rows):
    """Draw crosses at the true values."""
    style = {"ms": 6} if rows else {"ms": 3, "alpha": 0.4}
    ax.plot(x, y, "x", color=COLORS["truth"], label="truth", **style)


def name_rows(ax, clients):
    """Label the rows 0, 1, ... with the clients' names."""
    ax.set_yticks(np.arange(len(clients)), [str(client) for client in clients], parse_math=False)
    ax.set_ylim(-0.8, len(clients) - 0.2)


def legend_below(ax):
    """Draw the legend below the axis label; the padding is in font sizes for any height."""
    ax.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        borderaxespad=5.0,
        ncols=3,
        frameon=False,
        fontsize="small",
    )


def legend_inside(ax, loc="best"):
    """Draw a legend with visible handles: faint marks add up in the plot, not in the legend."""
    legend = ax.legend(frameon=False, fontsize="small", loc=loc)
    for handle in legend.legend_handles:
        handle.set_alpha(0.8)


def strip(ax):
    """Remove the frame on the upper and right side."""
    ax.spines[["top", "right"]].set_visible(False)


def truth_of(clients, truth):
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
