"""Page, tables and pictures of what compare_nets.py found."""

import itertools
import math
import textwrap

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from code_digest import present_digest
from net_fits import SMALLEST
from net_regimes import DELTA, lemma_epsilon, noise_for
from scipy.optimize import brentq

PAGE = """\
.. Written by benchmarks/compare_nets.py.

Comparison on images
====================

Within a table, all methods, "Local" included, use the same network and the same number of local
gradient steps per client (given in the title). There are two kinds of tables. In the first,
nothing is tuned: methods run with a fixed budget and fixed settings, either those of AdaPeD's
paper ("paper's budget", where an asterisk marks methods with one seed), or, for clients with
Dirichlet(0.1) labels, 600 and 2,000 steps with a plain network and pixels from -1 to 1. The
others are *short fits* of 150 rounds in which a tenth of the clients takes ten steps, a small
budget for every method, and fits with noise, of 20 rounds in which every client takes ten steps.
There, each method is tuned on its own grid with validation rows of the clients and one seed, and
then fitted to all training rows with seeds that draw the clients, their rows
and the network. :ref:`which_method` draws conclusions.

.. image:: _static/net_methods.png
   :alt: Accuracy of every method on every kind of clients
   :width: 100%

How much a client trains and sends decides which method is best. The curves show the first kind of
tables. A client sends its shared parameters in the network's precision; local networks send
nothing.

.. image:: _static/net_curves.png
   :alt: Accuracy against the steps of a client and against the megabytes that it sends
   :width: 100%

A step is one gradient on one batch, or the method's equivalent: AdaPeD, QuPeD, FML, Ditto, APFL
and FedEM train two networks, pFedMe takes three gradients in a step, and Per-FedAvg two. "FedAvg,
fine-tuned" has `fine_tune_steps` after the rounds, and "heads" a `head`. "Sparse labels" means
``label_prior="client"``, and "Dirichlet labels" ``label_prior=DirichletPrior()``. "AdaPeD, global
start" is the default of :class:`~pfl_sklearn.neural_network.AdaPeDClassifier`, except in short
fits, where psi may fall to the paper's floor of 0.5. With sparse labels it uses the setting that
was best without them. If a test fit diverged, the next best setting replaces it.

Accuracy is the mean over clients, in percent, with the standard deviation over seeds. "Between
clients" is its standard deviation over clients, and "lowest tenth" the accuracy that nine of ten
clients exceed. Log loss is over test rows, with probabilities of at least {smallest:.1e}. Times
are CPU seconds of one fit; machine speeds differ by a factor of two to three, so compare them
roughly. The fits of the tables took {hours:.1f} CPU hours, without tuning.

Where a share of the clients takes part, every round has the same number of them, drawn at random
(``sampling="fixed"``); by default, fits draw each client independently. A fit has the accuracy of
its last round, not a mean over rounds. {scatter}

{versions}
"""
SCATTER = """\
Fits of a method with several seeds differ: the standard
deviation over seeds is {median:.1f} points in the median row, {tenth:.1f} points or more in a tenth
of the rows, and at most {largest:.1f} ({where}).
Smaller differences between methods say little."""
VERSIONS = """\
The present code computed {n_present} of the {n_rows} rows, or repeated one fit of a row with the
same accuracy and log loss. The others are results of earlier code. {unrepeated} marks rows of which
no fit has been repeated, {refuted} those of which a repeated fit had other figures. The pictures do
not have these marks."""
ALL_EARLIER = """

All rows of these tables are results of earlier code:
"""
UNREPEATED, REFUTED = "\N{DAGGER}", "\N{DOUBLE DAGGER}"
EARLIER = {
    UNREPEATED: "Computed by earlier code, and not repeated with the present code.",
    REFUTED: "Computed by earlier code; a fit that was repeated had other figures.",
}
PRIVACY = """\
Where there is noise, its size is that for which the paper's Theorem 5 (ICLR) would state the
epsilon of the title after 20 rounds of all clients, at a delta of 1e-5 (our choice, as the paper
states none), with a divergence of :math:`\\rho \\lambda` at order :math:`\\lambda` converted by
:math:`\\epsilon = \\rho + 2 \\sqrt{\\rho \\log(1 / \\delta)}`. The paper converts by its Lemma 1
(ICLR), :func:`~pfl_sklearn.privacy.rdp_to_dp`, which states less for the same noise; the tables
have both. The theorem does not hold; the epsilon of the fits' reports does, for whole clients
against anyone who sees what is released, and is given for each neighbouring relation. Tuning is not
covered by either. "DP-AdaPeD or local" lets each client choose by a quarter of its rows, which
neither net has seen.
"""


# Tables -------------------------------------------------------------------------------------------


def titled(regime):
    """Title of a regime with the gradient steps of a client."""
    title = regime.title.replace("all rows each", "all rows of each")
    return f"{title}, {regime.steps:.0f} steps"


def table_of(regime, by_method):
    """Table of a regime's methods, and a line on the paper's figures."""
    columns = ["Method", "Setting", "Accuracy", "Between clients", "Lowest tenth", "Log-loss"]
    columns.append("Seconds")
    columns += ["Paper"] * (regime.paper is not None)
    title = titled(regime)
    lines = [title, "-" * len(title), "", ".. csv-table::", "   :header-rows: 1"]
    lines += ["   :class: table-sm small", ""]
    lines.append("   " + ", ".join(columns))
    for method, cells in by_method.items():
        cell = _row(method, cells)
        if regime.paper is not None:
            figure = regime.paper.get(method)
            cell.append("" if figure is None else _percent(*figure))
        lines.append("   " + ", ".join(f'"{value}"' for value in cell))
    lines += [
        "",
        *_notes_on_versions(by_method),
        *_epsilons(by_method),
        *_as_printed(regime),
        *_differences(regime, by_method),
    ]
    return "\n".join(lines)


def _row(method, cells):
    means = {key: np.mean([cell[key] for cell in cells]) for key in ("accuracy_sd", "worst_decile")}
    accuracy = 100 * np.array([cell["accuracy"] for cell in cells])
    setting = cells[0]["setting"].items()
    return [
        _marked(method, cells),
        ", ".join(f"{name.split('__')[-1]}={_short(value)}" for name, value in setting),
        _percent(accuracy.mean(), accuracy.std() if len(cells) > 1 else None),
        f"{100 * means['accuracy_sd']:.1f}",
        f"{100 * means['worst_decile']:.1f}",
        f"{np.mean([cell['log_loss'] for cell in cells]):.3f}",
        f"{np.mean([cell['cpu_seconds'] for cell in cells]):.0f}",
    ]


def _percent(mean, sd):
    return (
        f"{mean:.1f}" if sd is None else f"{mean:.1f}\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}{sd:.1f}"
    )


def _marked(method, cells):
    one_seed = "\\*" if len(cells) == 1 else ""
    return " ".join(filter(None, (method, one_seed, version_mark(cells))))


def version_mark(cells):
    """Mark of a row whose fits are not all of the present code, by whether one was repeated."""
    if any("differs" in cell for cell in cells):
        return REFUTED
    return "" if all(cell.get("digest") == present_digest() for cell in cells) else UNREPEATED


def _notes_on_versions(by_method):
    """Sentences on the marks of a table, each with an empty line after it."""
    marks = {version_mark(cells) for cells in by_method.values()}
    return [
        line for mark, note in EARLIER.items() if mark in marks for line in (f"{mark} {note}", "")
    ]


def _versions(regimes, found):
    """Paragraph on which rows are of the present code, and tables that have none."""
    marks = {name: [version_mark(cells) for cells in found[name].values()] for name in found}
    rows = [mark for some in marks.values() for mark in some]
    if not any(rows):
        return "All rows are results of the present code."
    counts = {"n_present": rows.count(""), "n_rows": len(rows)}
    text = VERSIONS.format(unrepeated=UNREPEATED, refuted=REFUTED, **counts)
    old = [f"- {titled(regimes[name])}" for name, some in marks.items() if all(some)]
    return "\n".join([text + ALL_EARLIER, *old]) if old else text


def _scatter(regimes, found):
    """Sentences on standard deviations over seeds, in points; none without several seeds."""
    deviations = {
        f"{method}, {titled(regimes[name])}": 100 * np.std([cell["accuracy"] for cell in cells])
        for name, by_method in found.items()
        for method, cells in by_method.items()
        if len(cells) > 1
    }
    if not deviations:
        return ""
    values = [*deviations.values()]
    return SCATTER.format(
        median=np.median(values),
        tenth=np.quantile(values, 0.9),
        largest=max(values),
        where=max(deviations, key=deviations.get),
    )


def _short(value):
    return f"{value:g}" if isinstance(value, float | int) else str(value)


def _epsilons(by_method):
    """A line on the epsilon of fits with noise, all of which have the same."""
    stated = [
        cell["epsilon"] for cells in by_method.values() for cell in cells if "epsilon" in cell
    ]
    if not stated:
        return []
    if any(each != stated[0] for each in stated):
        raise ValueError(f"fits with the same noise have different epsilons: {stated}")
    values = " and ".join(f"{value:.3g} under {name}" for name, value in stated[0].items())
    return [f"Epsilon of what the fits release, at a delta of {DELTA:g}: {values}.", ""]


def _as_printed(regime):
    """A line on the epsilon that the paper would state for the noise of a regime."""
    epsilon, run = regime.printed_epsilon, (regime.n_rounds, regime.client_fraction)
    if epsilon is None:
        return []
    noise = noise_for(epsilon, *run)
    enough = brentq(lambda share: lemma_epsilon(share * noise, *run) - epsilon, 0.5, 1.0)
    return [
        f"For this noise the paper's Lemma 1 (ICLR) states {lemma_epsilon(noise, *run):.2f} rather "
        f"than {epsilon:g}, for which {enough:.3f} of the noise are enough.",
        "",
    ]


def _differences(regime, by_method):
    """A line on accuracies that are more than two standard deviations from the paper's."""
    if regime.paper is None:
        return []
    far = []
    for method, (theirs, their_sd) in regime.paper.items():
        ours = 100 * np.array([cell["accuracy"] for cell in by_method.get(method, ())] or [np.nan])
        if abs(ours.mean() - theirs) > 2 * np.hypot(ours.std(), their_sd):
            far.append(f"{method} {ours.mean():.1f} here, {theirs:.1f} there")
    close = "; no accuracy is more than two standard deviations from its."
    end = f": {'; '.join(far)}." if far else close
    return [f"The paper has {regime.differs}{end}", ""]


def page(regimes, found):
    """Page of all tables: cells of the test by regime and method."""
    private = any(regimes[name].printed_epsilon is not None for name in found)
    # The longest fits first: they are what the papers did.
    names = sorted(found, key=lambda name: (regimes[name].settings is None, [*found].index(name)))
    parts = [table_of(regimes[name], found[name]) for name in names]
    cells = (cell for some in found.values() for cells in some.values() for cell in cells)
    hours = sum(cell["cpu_seconds"] for cell in cells) / 3600
    text = PAGE.format(
        smallest=SMALLEST,
        hours=hours,
        scatter=_scatter(regimes, found),
        versions=_versions(regimes, found),
    )
    return "\n".join([text, *[PRIVACY] * private, *parts])


def best(regimes, found):
    """Table of the best methods of every regime, beside one net for all and nets alone."""
    head = "Clients, Highest accuracy, One net for all, Each alone, Lowest log-loss"
    lines = [".. Written by benchmarks/compare_nets.py.", "", ".. csv-table::"]
    lines += ["   :header-rows: 1", "   :widths: 28 36 8 8 20", "", f"   {head}"]
    for name, by_method in found.items():
        row = titled(regimes[name]), *_best_of(by_method)
        lines.append("   " + ", ".join(f'"{value}"' for value in row))
    marks = [mark for mark in EARLIER if any(mark in line for line in lines)]
    return "\n".join([*lines, "", *(f"{mark} {EARLIER[mark]}\n" for mark in marks)])


def _best_of(by_method):
    """Up to three methods within a standard deviation of the best, and others beside them.

    Of those whose figures are the same the first one stands for all.
    """
    seeds = {m: 100 * np.array([each["accuracy"] for each in by_method[m]]) for m in by_method}
    accuracy = {method: values.mean() for method, values in seeds.items()}
    loss = {m: np.mean([each["log_loss"] for each in by_method[m]]) for m in by_method}
    ranked = sorted(accuracy, key=lambda method: -round(accuracy[method], 1))
    floor = accuracy[ranked[0]] - seeds[ranked[0]].std()
    figures = {f"{accuracy[m]:.1f}": m for m in reversed(ranked) if accuracy[m] >= floor}
    marks = {method: version_mark(cells) for method, cells in by_method.items()}
    close = [f"{m} {figure}{marks[m]}" for figure, m in list(figures.items())[:-4:-1]]
    common = "FedAvg" if "FedAvg" in accuracy else "DP-FedAvg"
    alone = (f"{accuracy[m]:.1f}{marks[m]}" for m in (common, "Local"))
    sharpest = min(loss, key=loss.get)
    return "; ".join(close), *alone, f"{sharpest} {loss[sharpest]:.3f}{marks[sharpest]}"


# Pictures -----------------------------------------------------------------------------------------

SHORT = {
    "paper-mnist": "MNIST, 3 classes, paper's budget",
    "paper-femnist-66": "digits of FEMNIST, 66 clients, paper's budget",
    "paper-femnist-66-third": "digits of FEMNIST, a third in a round, paper's budget",
    "paper-femnist-30": "digits of FEMNIST, 30 clients, paper's budget",
    "paper-cifar": "CIFAR-10, 4 classes, paper's budget",
    "dirichlet-600": "MNIST, Dirichlet(0.1), 200 rows, 600 steps",
    "dirichlet-2000": "MNIST, Dirichlet(0.1), 200 rows, 2,000 steps",
    "mnist-20": "MNIST, 3 classes, 20 rows",
    "mnist-60": "MNIST, 3 classes, 60 rows",
    "mnist-all": "MNIST, 3 classes, all rows",
    "cifar-60": "CIFAR-10, 4 classes, 60 rows",
    "cifar-all": "CIFAR-10, 4 classes, all rows",
    "femnist-20": "FEMNIST, 20 rows",
    "femnist-all": "FEMNIST, all rows",
    "distorted-20": "MNIST, images of their own, 20 rows",
    "groups-20": "MNIST, half reverse the digits, 20 rows",
    "dirichlet-20": "MNIST, Dirichlet(0.3), 20 rows",
    "dirichlet-all": "MNIST, Dirichlet(0.3), all rows",
}
DRAWN = (  # as curves
    "Local",
    "FedAvg",
    "FedAvg, fine-tuned",
    "FedAvg, sparse labels",
    "AdaPeD, as printed",
    "AdaPeD, global start",
    "pFedMe",
    "QuPeD",
    "FML",
)
_COLUMNS = 3  # of the picture of curves
_FADES = 15  # points below the best of a column at which a cell is white


def draw_methods(found, path):
    """Heat map of accuracies, methods by regimes; the darker, the nearer to the best."""
    names = [name for name in SHORT if name in found]
    methods = [*dict.fromkeys(itertools.chain.from_iterable(found[name] for name in names))]
    accuracy = np.full((len(methods), len(names)), math.nan)
    for j, name in enumerate(names):
        for method, cells in found[name].items():
            accuracy[methods.index(method), j] = 100 * np.mean([each["accuracy"] for each in cells])
    below = accuracy - np.nanmax(accuracy, axis=0)
    fig, ax = plt.subplots(figsize=(2.6 + 0.52 * len(names), 2.6 + 0.25 * len(methods)))
    ax.set_facecolor("0.9")
    ax.imshow(below, cmap="Blues", vmin=-_FADES, vmax=2, aspect="auto")
    for i, j in np.argwhere(np.isfinite(accuracy)):
        is_best, dark = below[i, j] > -0.05, below[i, j] > -0.4 * _FADES
        weight, color = "bold" if is_best else "normal", "white" if dark else "black"
        one = "*" if len(found[names[j]][methods[i]]) == 1 else ""
        text = f"{accuracy[i, j]:.1f}{one}"
        ax.text(j, i, text, ha="center", va="center", fontsize=7, color=color, weight=weight)
    ax.set_yticks(range(len(methods)), methods, fontsize=8)
    labels = [SHORT[name] for name in names]
    ax.set_xticks(
        range(len(names)), labels, rotation=50, ha="right", rotation_mode="anchor", fontsize=8
    )
    ax.tick_params(length=0)
    ax.set_title(
        f"Accuracy in percent; white: {_FADES} points or more below the best of a column (bold); "
        "grey: not computed; *: one seed",
        fontsize=9,
        loc="left",
    )
    fig.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(fig)


def draw_curves(regimes, found, path):
    """Accuracy against the steps of a client, and against the megabytes that it sends."""
    names = [name for name in found if regimes[name].n_looks > 1]
    blocks = -(-len(names) // _COLUMNS)  # of two rows
    size = 2.75 * _COLUMNS, 5.0 * blocks + 0.8
    fig, axes = plt.subplots(
        2 * blocks, _COLUMNS, figsize=size, squeeze=False, layout="constrained"
    )
    pairs = [(axes[2 * k, j], axes[2 * k + 1, j]) for k in range(blocks) for j in range(_COLUMNS)]
    for unused in itertools.chain.from_iterable(pairs[len(names) :]):
        unused.axis("off")
    styles = dict(
        zip(DRAWN, zip(plt.get_cmap("tab10").colors, "osDv^<>Px", strict=False), strict=False)
    )
    for (top, bottom), name in zip(pairs, names, strict=False):
        regime, lowest = regimes[name], 100.0
        for method, (color, marker) in styles.items():
            if method not in found[name]:
                continue
            curves = [cell["curve"] for cell in found[name][method]]
            values = {
                key: np.mean([[look[key] for look in curve] for curve in curves], axis=0)
                for key in ("n_rounds", "accuracy", "megabytes")
            }
            steps = values["n_rounds"] * regime.client_fraction * regime.local_steps
            look = {"color": color, "marker": marker, "ms": 4, "lw": 1.2, "label": method}
            top.plot(steps, 100 * values["accuracy"], **look)
            if values["megabytes"].any():
                bottom.plot(values["megabytes"], 100 * values["accuracy"], **look)
            lowest = min(lowest, 100 * values["accuracy"][1:].min())
        title = SHORT[name].replace(", paper's budget", "")
        top.set_title(textwrap.fill(title, 26), fontsize=8)
        top.set_xlabel("steps of a client", fontsize=8)
        bottom.set_xlabel("megabytes that a client sent", fontsize=8)
        for ax in (top, bottom):
            ax.set_ylim(bottom=lowest - 2)
            ax.tick_params(labelsize=7)
            ax.grid(alpha=0.3)
    for ax in axes[:, 0]:
        ax.set_ylabel("accuracy, %", fontsize=8)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=8)
    fig.savefig(path, dpi=120)
    plt.close(fig)
