"""Pages of what tables.py found: the documentation's, the README's table, and what is left to wish.

python benchmarks/tables_page.py --page docs/tables.rst
python benchmarks/tables_page.py --readme
python benchmarks/tables_page.py --bars
"""

import argparse
import math
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
from cells import Results
from table_models import FOR_NEW, METHODS, OURS, PARTS
from tables import KINDS, TASKS, Cell, cells_of

OWN = "stacking"
README = ("default", "GPBoost boosting", "trees, target", "trees, category", "one-hot linear")
_WITHIN = 2  # standard errors
TITLES = {"inside": "Rows of known clients", "whole": "New clients"}
NAMES = {
    "chem97": ("A-level chemistry marks by school", "schools"),
    "parkinsons": ("Parkinson's: total UPDRS by patient", "patients"),
    "movielens": ("MovieLens ratings by user", "users"),
    "insteval": ("Lecture ratings by lecturer", "lecturers"),
    "radon": ("Radon in homes by county", "counties"),
    "elections": ("Republican share of the vote by county, from the year", "counties"),
    "baseball": ("Batting average by player, from year and age", "players"),
    "landmine": ("Land mines by field", "fields"),
    "movielens_liked": ("MovieLens ratings of 4 and more by user", "users"),
    "insteval_liked": ("Lecture ratings of 4 and more by lecturer", "lecturers"),
    "contraception": ("Use of contraception by district", "districts"),
    "verbagg": ("Verbal aggression by person", "persons"),
    "heart": ("Heart disease by hospital", "hospitals"),
}
# Why another is better, where one is.
_PENALTY = (
    "The best of the others tunes a penalty on all 32 columns, which pays with so few rows. With "
    '``population_penalty=3`` and ``random="intercept"`` the personalized model has {}.'
)
_PLAIN = (
    "The personalized linear model alone ({}) is about as good as the best of the others. In {} "
    "splits a model without clients was not clearly worse out of fold, and predicted."
)
WHY = {
    ("heart", "inside"): _PENALTY.format("0.3923"),
    ("heart", "whole"): _PENALTY.format("0.4812"),
    ("baseball", "inside"): (
        "GPBoost fits its trees and the players' levels together. The trees of the stack have "
        "default parameters and gain nothing here: all together have 0.0359."
    ),
    ("insteval", "whole"): _PLAIN.format("1.331", "all"),
    ("insteval_liked", "whole"): _PLAIN.format("0.6857", "all"),
    ("contraception", "whole"): _PLAIN.format("0.6320", "two"),
}

_INTRODUCTION = """.. Written by benchmarks/tables_page.py.

.. _table_comparison:

Comparison on tables
====================

Thirteen real tables with clients, five splits inside clients (80 % of the rows of each to train)
and five of whole clients (four for the four hospitals). Estimators of this package have default
parameters; new clients get the population. Probabilities of the personalized logistic model, alone
or in a stack, are averages over the posterior. The others are tuned by three folds, inside clients
or of whole clients as the split is: boosted trees over learning rates .03 and .1, depths 3 and 6,
with early stopping; penalties from .01 to 100. ``merf`` has a depth of 3 alone. A method that needs
more than ten minutes of the processor for a split of a table is left out there.

Errors are root mean squared errors for responses and log-losses for classes, as means over splits
with standard errors, which are corrected for training rows that splits share (Nadeau and Bengio,
2003); "more than stacking" is the paired difference. Seconds are of the processor, tuning included,
on one core of machines of which some are 1.6 times as fast as others; stacking, its parts, our
linear models and GPBoost boosting on the nine smaller tables ran on the same one. MiB is what a fit
added to the peak memory of its process.

"stacking + selector" is a :class:`~pfl_sklearn.compose.ClientSelector` with three folds of a model
without clients, a personalized one and a stack. :ref:`tables` draws conclusions.
"""


class Summary(NamedTuple):
    """Error of a method and its excess over ours, each with a standard error; seconds and MiB."""

    error: float
    error_se: float
    excess: float
    excess_se: float
    seconds: float
    mebibytes: float


def is_complete(task, found):
    """Whether all cells of a task have been computed."""
    return all(str(cell) in found for cell in cells_of(task, METHODS))


def summaries(task, kind, found):
    """Summary of every method that was possible, by name."""
    by_method = {}
    for line in found.values():
        if line["kind"] == kind and "loss" in line:
            by_method.setdefault(line["method"], {})[line["split"]] = line
    own, result = by_method[OWN], {}
    for method in METHODS:
        lines = by_method.get(method, {})
        if len(lines) < len(own):
            continue
        lines = [lines[split] for split in sorted(own)]
        errors, ours = (
            np.array([_error(task, line) for line in each])
            for each in (lines, [own[split] for split in sorted(own)])
        )
        overlap = np.mean([line["n_test"] / line["n_train"] for line in lines])
        result[method] = Summary(
            errors.mean(),
            _standard_error(errors, overlap),
            (errors - ours).mean(),
            _standard_error(errors - ours, overlap),
            np.mean([line["cpu_seconds"] for line in lines]),
            np.mean([line["peak_mib"] for line in lines]),
        )
    return result


def _error(task, line):
    return line["loss"] if TASKS[task].has_classes else math.sqrt(line["loss"])


def _standard_error(values, overlap):
    """Of a mean over splits, of which each has `overlap` tested rows for a training row."""
    return math.sqrt(values.var(ddof=1) * (1 / len(values) + overlap))


def unexplained(results):
    """Complete tasks and kinds where another is better by over a standard error, without a why."""
    for task in TASKS:
        if is_complete(task, found := results.of(task)):
            for kind in KINDS:
                _, peer = best_peer(summaries(task, kind, found))
                if -peer.excess > peer.excess_se and (task, kind) not in WHY:
                    yield task, kind


def best_peer(found):
    """Name and summary of the best method that is not ours."""
    peers = {name: each for name, each in found.items() if name not in (*OURS, *PARTS)}
    name = min(peers, key=lambda each: peers[each].error)
    return name, peers[name]


# Documentation ------------------------------------------------------------------------------------


def page(results):
    """Page of all tasks that are complete."""
    tasks = {task: found for task in TASKS if is_complete(task, found := results.of(task))}
    parts = [_INTRODUCTION]
    for kind in KINDS:
        rows = [_overview(task, summaries(task, kind, found)) for task, found in tasks.items()]
        header = ["Table", "Stacking", "Best of the others", "", "More than stacking"]
        parts.append(_heading(f"{TITLES[kind]}: overview", "-") + _csv(header, rows))
    for task, found in tasks.items():
        parts.append(_heading(NAMES[task][0], "-"))
        for kind in KINDS:
            each = summaries(task, kind, found)
            parts.append(_heading(TITLES[kind], "~") + _csv(_HEADER, list(map(_row, each.items()))))
            parts.append(_words(task, kind, found))
    return "\n".join(part.rstrip("\n") + "\n" for part in parts if part)


_HEADER = ["Method", "Error", "More than stacking", "Seconds", "MiB"]


def _overview(task, found):
    name, peer = best_peer(found)
    own = found[OWN]
    return [
        NAMES[task][0],
        _shown(own.error),
        _shown(peer.error),
        name,
        f"{_shown(peer.excess)} ± {_shown(peer.excess_se)}",
    ]


def _row(item):
    name, each = item
    return [
        PARTS.get(name, name),
        f"{_shown(each.error)} ± {_shown(each.error_se)}",
        "" if name == OWN else f"{_shown(each.excess)} ± {_shown(each.excess_se)}",
        f"{each.seconds:.3g}",
        f"{max(each.mebibytes, 0):.0f}",
    ]


def _words(task, kind, found):
    """Which parts of the stack predicted, what was not possible, and why another is better."""
    lines = [line for line in found.values() if line["kind"] == kind]
    part = {"inside": "known_part_", "whole": "new_part_"}[kind]
    parts = Counter(line[part] for line in lines if line["method"] == OWN)
    told = ", ".join(f"{name} ({times})" for name, times in parts.most_common())
    words = [f"What predicted in the stacks, and in how many splits: {told}."]
    missing = {
        line["method"]: line["not_possible"]
        for line in lines
        if "not_possible" in line and line["not_possible"] != "no classes"
    }
    if missing:
        words.append("Left out: " + "; ".join(f"{k} ({v})" for k, v in missing.items()) + ".")
    each = summaries(task, kind, found)
    name, peer = best_peer(each)
    if peer.excess < 0:
        words.append(
            f"{name} is better by {_shown(-peer.excess)}, "
            f"{-peer.excess / peer.excess_se:.1f} standard errors of that difference."
        )
    if (task, kind) in WHY:
        words.append(WHY[task, kind])
    return "\n" + " ".join(words) + "\n"


def _heading(text, line):
    return f"{text}\n{line * len(text)}\n"


def _csv(header, rows):
    if not rows:
        return "\nNo table is complete yet.\n"
    lines = ["", ".. csv-table::", "   :header-rows: 1", "", "   " + ", ".join(header)]
    lines += ["   " + ", ".join(f'"{cell}"' for cell in row) for row in rows]
    return "\n".join(lines) + "\n"


def _shown(value):
    return f"{value:.4f}" if abs(value) < 1 else f"{value:.3f}"


def readme_table(results):
    """The README's table of errors for rows of known clients, the smallest in bold."""
    columns = (OWN, *README)
    lines = ["| rows of known clients | " + " | ".join(columns) + " |", "|---" * 7 + "|"]
    for task in TASKS:
        if not is_complete(task, found := results.of(task)):
            continue
        each = summaries(task, "inside", found)
        errors = [each[name].error if name in each else math.inf for name in columns]
        shown = ["" if math.isinf(error) else _shown(error) for error in errors]
        best = shown[int(np.argmin(errors))]
        cells = [f"**{cell}**" if cell == best else cell for cell in shown]
        lines.append(f"| {NAMES[task][0]} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


# Bars ---------------------------------------------------------------------------------------------


def bars(results):
    """Lines that say, task by task, how far ours are from the best of what they should match."""
    for task in TASKS:
        found = results.of(task)
        for kind in KINDS:
            try:
                each = summaries(task, kind, found)
                name, peer = best_peer(each)
            except (KeyError, ValueError):
                yield f"{task} {kind}: not computed"
                continue
            own = each[OWN]
            within = peer.excess > 0 or -peer.excess <= _WITHIN * peer.excess_se
            alone = _candidates(task, kind, found)
            # Inside, the best part is the bar; for new clients, what everybody could have.
            of_kind = FOR_NEW if kind == "whole" else (*PARTS, "default")
            parts = {part: each[part].error for part in of_kind if part in each}
            if kind == "inside" and "stack" in alone:
                parts["stack"] = alone["stack"]
            if not parts:
                continue
            least = min(parts, key=parts.get)
            line = (
                f"{task} {kind}: stacking {own.error:.4f}; {name} {peer.excess:+.4f} "
                f"± {peer.excess_se:.4f}{'' if within else ' CLEARLY BETTER'}; part {least} "
                f"{100 * (own.error / parts[least] - 1):+.2f} %"
            )
            if "stacking + selector" in each:
                mixed, least = each["stacking + selector"].error, min(alone, key=alone.get)
                line += f"; selector {mixed:.4f}, {least} {100 * (mixed / alone[least] - 1):+.2f} %"
            seconds = [_seconds_of_folds(task, kind, each)]
            if "GPBoost boosting" in each:
                seconds.append(each["GPBoost boosting"].seconds)
            line += f"; {own.seconds:.1f} s, {own.seconds / max(seconds):.2f} of the larger of "
            yield line + ", ".join(f"{value:.1f} s" for value in seconds)


def _seconds_of_folds(task, kind, found):
    """Seconds of the base estimators in folds of both kinds and to all rows, and of a final fit."""
    folds_of_clients = {"inside": 4, "whole": 3}[kind] if task == "heart" else 5
    bases = found["hgb"].seconds + found["hgb_client"].seconds
    return (5 + folds_of_clients + 1) * bases + found["default"].seconds


def _candidates(task, kind, found):
    """Mean errors of the selector's candidates, by name."""
    lines = [line for line in found.values() if line["kind"] == kind and "candidates" in line]
    names = lines[0]["candidates"] if lines else ()
    return {
        name: np.mean([_error(task, {"loss": line["candidates"][name]}) for line in lines])
        for name in names
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "tables")
    parser.add_argument("--page", type=Path, help="write the page of complete tasks here")
    parser.add_argument("--readme", action="store_true", help="print the README's table")
    parser.add_argument("--bars", action="store_true", help="print what ours should match")
    options = parser.parse_args()
    results = Results(Cell, options.results)
    if options.page:
        options.page.write_text(page(results), encoding="utf-8")
    if options.readme:
        print(readme_table(results), end="")
    if options.bars:
        print(*bars(results), sep="\n")


if __name__ == "__main__":
    main()
