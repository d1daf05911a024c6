"""Predictions on real grouped tables, against what a user would take instead.

Thirteen tasks, each with splits inside clients (80 % of the rows of each to train) and splits of
whole clients. Estimators of this package are fitted with default parameters. Peers choose the best
setting of a small grid by three folds of the training rows, inside clients or of whole clients as
the split is; times include that. Every fit is a cell, a line of the file of its task in --output,
in a process of its own; a run that was stopped goes on where it was. The tables come from
PFL_SKLEARN_DATA.

    python benchmarks/tables.py --plan                       # cells that are left
    python benchmarks/tables.py --budget-minutes 60
    python benchmarks/tables.py --only radon chem97 --methods stacking "GPBoost boosting"
"""

import argparse
import math
import multiprocessing
import os
import resource
import signal
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from cells import Results
from run import ONE_THREAD
from sklearn.model_selection import GroupKFold
from table_models import FOR_NEW, METHODS, OURS, NotPossibleError, losses, tuned_fit

from pfl_sklearn.model_selection import ClientKFold, ClientShuffleSplit

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tests.helpers import public_tasks  # noqa: E402

SPLITS, TEST_SIZE, INNER_FOLDS, WORKERS = 5, 0.2, 3, 2
LIMIT = 10  # minutes of the processor for a cell; a peer that takes longer is left out of the task
KINDS = ("inside", "whole")


def elections(home):
    """Republican share of the two-party vote by county, from the year."""
    table = pd.read_csv(home / "election_county_2000_2020.csv.gz").query("in_panel == 1")
    share = table["votes_rep"] / (table["votes_rep"] + table["votes_dem"])
    return public_tasks.PublicTask(
        table[["year"]].astype(float), share.to_numpy(), table["fips"].to_numpy()
    )


def baseball(home):
    """Batting average of a season by player, from the year and the age."""
    table = pd.read_csv(home / "baseball_batting_2000_2024.csv.gz")
    table = table.query("AB >= 50 and pitcher == 0")
    return public_tasks.PublicTask(
        table[["year", "age"]].astype(float),
        (table["H"] / table["AB"]).to_numpy(),
        table["player"].to_numpy(),
    )


class Task(NamedTuple):
    """How a table is read, and whether its targets are classes."""

    read: Any
    has_classes: bool


TASKS = {
    **{each.__name__: Task(each, False) for each in public_tasks.REGRESSION},
    "elections": Task(elections, False),
    "baseball": Task(baseball, False),
    **{each.__name__: Task(each, True) for each in public_tasks.CLASSIFICATION},
}


class Cell(NamedTuple):
    """One fit, to one split of a task."""

    task: str
    method: str
    kind: str
    split: int

    def __str__(self):
        return f"{self.task} | {self.method} | {self.kind} {self.split}"


def rows_of(task):
    """Features (n, d) as a frame, targets (n,), and clients as numbers (n,)."""
    X, y, groups = task.read(Path(os.environ["PFL_SKLEARN_DATA"]))
    return X.reset_index(drop=True), y, pd.factorize(groups, sort=True)[0]


def splits_of(kind, groups, n_splits=SPLITS, seed=0):
    """Training and test rows of every split."""
    if kind == "inside":
        splitter = ClientShuffleSplit(n_splits, test_size=TEST_SIZE, random_state=seed)
    else:
        n_splits = min(n_splits, len(np.unique(groups)))
        splitter = GroupKFold(n_splits, shuffle=True, random_state=seed)
    return list(splitter.split(groups[:, None], groups=groups))


def inner_folds(kind, groups):
    """Folds that peers are tuned in."""
    if kind == "inside":
        folds = ClientKFold(INNER_FOLDS, random_state=1)
    else:
        folds = GroupKFold(INNER_FOLDS, shuffle=True, random_state=1)
    return list(folds.split(groups[:, None], groups=groups))


def computed(cell, results, deadline):
    """What the line of a cell says; None if it is too late to begin."""
    if time.time() > deadline:
        return None
    for found in results.of(cell.task).values():
        if found["method"] == cell.method and found.get("not_possible") == _TOO_LONG:
            return {**cell._asdict(), "not_possible": _TOO_LONG}
    warnings.simplefilter("ignore")
    task = TASKS[cell.task]
    X, y, groups = rows_of(task)
    train, test = splits_of(cell.kind, groups)[cell.split]
    known = np.isin(groups[test], groups[train])
    table = X.iloc[train].reset_index(drop=True), y[train], groups[train]
    began, before = time.process_time(), _peak()
    found = {**cell._asdict(), "n_train": len(train), "n_test": len(test)}
    if cell.method not in OURS:
        signal.signal(signal.SIGPROF, _too_slow)
        signal.setitimer(signal.ITIMER_PROF, 60 * LIMIT)
    try:
        folds = inner_folds(cell.kind, groups[train])
        model, setting = tuned_fit(cell.method, task.has_classes, table, folds)
    except NotPossibleError as error:
        return {**found, "not_possible": str(error)}
    except Exception as error:
        if cell.method in OURS:
            raise
        return {**found, "not_possible": f"{type(error).__name__}: {error}"}
    signal.setitimer(signal.ITIMER_PROF, 0)
    seconds = time.process_time() - began
    outputs = model.outputs(X.iloc[test], np.where(known, groups[test], -1))
    loss = losses(np.asarray(outputs, dtype=float), y[test], task.has_classes).mean()
    parts = {name: getattr(getattr(model, "estimator", None), name, None) for name in _PARTS}
    if cell.method == "stacking + selector":
        alone = model.of_candidates(X.iloc[test], np.where(known, groups[test], -1))
        parts["candidates"] = {
            name: float(losses(each, y[test], task.has_classes).mean())
            for name, each in alone.items()
        }
    return {
        **found,
        "loss": float(loss),
        "cpu_seconds": seconds,
        "peak_mib": _peak() - before,
        "setting": setting,
        **{name: part for name, part in parts.items() if part is not None},
    }


_PARTS = ("known_part_", "new_part_")
_TOO_LONG = f"more than {LIMIT} minutes of the processor"


def _too_slow(*_):
    raise NotPossibleError(_TOO_LONG)


def _peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# Runs ---------------------------------------------------------------------------------------------


def cells_of(task, methods):
    """All cells of a task; heart disease has four hospitals, hence four splits of whole ones."""
    n_whole = 4 if task == "heart" else SPLITS
    return [
        Cell(task, method, kind, split)
        for kind in KINDS
        for split in range(SPLITS if kind == "inside" else n_whole)
        for method in methods
        if kind == "whole" or method not in FOR_NEW
    ]


def run(cells, results, deadline):
    """Compute cells, each in a process of its own, and write their lines."""
    os.environ.update(ONE_THREAD)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(WORKERS, context, max_tasks_per_child=1) as pool:
        done = pool.map(partial(computed, results=results, deadline=deadline), cells)
        for cell, found in zip(cells, done, strict=True):
            if found is None:
                continue
            results.add(found)
            said = found.get("not_possible") or f"{found['loss']:.5g}, {found['cpu_seconds']:.1f} s"
            print(f"{cell}: {said}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--budget-minutes", type=float, default=math.inf)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "tables")
    parser.add_argument("--plan", action="store_true", help="print how many cells are left")
    options = parser.parse_args()
    results = Results(Cell, options.output)
    missing = []
    for task in options.only:
        found = results.of(task)
        left = [cell for cell in cells_of(task, options.methods) if str(cell) not in found]
        missing += left
        if options.plan:
            print(f"{task}: {len(left)} of {len(cells_of(task, options.methods))} cells left")
    if not options.plan:
        run(missing, results, time.time() + 60 * options.budget_minutes)


if __name__ == "__main__":
    main()
