"""Where the stack is clearly worse than the best other model of tables.py, and totals.

python benchmarks/tables_summary.py
python benchmarks/tables_summary.py --all-lines
"""

import argparse
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
from cells import Results
from table_models import FOR_NEW
from tables import FINAL, KINDS, TASKS, Cell
from tables_page import OWN, WITHIN, Summary, summaries

PLAIN = "default"


class Verdict(NamedTuple):
    """How the stack does on a table, in one kind of splits."""

    task: str
    kind: str
    own: Summary
    best: str  # of all others, our plain models among them
    other: Summary
    ratios: dict  # of its error to those of our plain model, a pooled one and the base rate
    slower: float  # its seconds over those of CatBoost at its defaults

    @property
    def is_best(self):
        return self.other.excess >= 0

    @property
    def is_close(self):
        """Whether it is best, or within two standard errors of the best other model."""
        return -self.other.excess <= WITHIN * self.other.excess_se

    def __str__(self):
        standing = "best" if self.is_best else "close" if self.is_close else "worse"
        ratios = ", ".join(f"{value:.3f} of {name}" for name, value in self.ratios.items())
        return (
            f"{self.task} {self.kind}: {standing}; stacking {self.own.error:.4g}, {self.best} "
            f"{self.other.excess:+.2g} ± {self.other.excess_se:.2g}; {ratios}; "
            f"{self.slower:.2g} times the seconds of CatBoost"
        )


def verdicts(results):
    """Verdict on every table and kind for which the stack has been computed."""
    for task in TASKS:
        found = results.of(task)
        for kind in KINDS:
            if not any((line["method"], line["kind"]) == (OWN, kind) for line in found.values()):
                continue
            each = summaries(task, kind, found)
            own = each.pop(OWN)
            name = min(each, key=lambda other: each[other].error)
            ratios = {
                other: own.error / each[other].error for other in (PLAIN, *FOR_NEW) if other in each
            }
            rival = each.get("CatBoost")
            slower = own.seconds / rival.seconds if rival else math.nan
            yield Verdict(task, kind, own, name, each[name], ratios, slower)


def summary(results, all_lines=False):
    """Lines on the tables where another is clearly better, or on all, and totals by kind."""
    found = list(verdicts(results))
    yield from (str(each) for each in found if all_lines or not each.is_close)
    for name, tasks in (("development", set(TASKS).difference(FINAL)), ("final", set(FINAL))):
        for kind in KINDS:
            some = [each for each in found if each.kind == kind and each.task in tasks]
            if some:
                yield f"{name}, {kind}: {_totals(some)}"


def _totals(found):
    best, close = sum(each.is_best for each in found), sum(each.is_close for each in found)
    told = []
    for name in (PLAIN, *FOR_NEW):
        if ratios := [each.ratios[name] for each in found if name in each.ratios]:
            mean = np.exp(np.mean(np.log(ratios)))
            told.append(f"{mean:.3f} of {name} ({max(ratios):.3f} at most)")
    slower = np.nanmedian([each.slower for each in found])
    return (
        f"best on {best} of {len(found)} tables, best or within {WITHIN} standard errors on "
        f"{close}; errors {', '.join(told)} (geometric means); "
        f"{slower:.2g} times the seconds of CatBoost (median)"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "tables")
    parser.add_argument("--all-lines", action="store_true", help="also where none is better")
    options = parser.parse_args()
    print(*summary(Results(Cell, options.results), options.all_lines), sep="\n")


if __name__ == "__main__":
    main()
