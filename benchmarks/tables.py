"""Predictions on real grouped tables, against what a user would take instead.

Tasks have splits inside clients (80 % of the rows of each to train), splits of whole clients, and
where there is time forecasts of each of the last three fifths of each client's. Estimators of this
package are fitted with default parameters. Peers choose the best setting of a small grid by three
folds of the training rows, inside clients, of whole clients or forward in time as the split is;
times include that. Every fit is a cell, a line of the file of its task in --output, in a process of
its own; a run that was stopped goes on where it was. Thirteen tables come from PFL_SKLEARN_DATA,
the others from packages. Those of --final judge what was chosen on the rest: leave them alone until
then.

    python benchmarks/tables.py --plan                       # cells that are left
    python benchmarks/tables.py --budget-minutes 60
    python benchmarks/tables.py --only radon chem97 --methods stacking "GPBoost boosting"
    python benchmarks/tables.py --final
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
from table_models import METHODS, OURS, losses, tuned_fit
from table_peers import SECOND_ID, NotPossibleError, load

from pfl_sklearn.model_selection import ClientKFold, ClientShuffleSplit, ClientTimeSeriesSplit

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import more_tables  # noqa: E402

from tests.helpers import public_tasks  # noqa: E402

SPLITS, TEST_SIZE, INNER_FOLDS, WORKERS = 5, 0.2, 3, 2
FEW_SPLITS = 3  # of the five, on large tables
FEWEST_SPLITS = 2  # of whole clients on tables of ratings; of 50,000 rows with two ids: hours
FEWEST = ("flights",)
ORIGINS = 3  # of forecasts; of tables with four times the third would learn from one
FOUR_TIMES = ("airfare", "ohio", "socatt", "respiratory")
RATINGS = ("movielens", "movielens_liked", "insteval", "insteval_liked")
LARGE = (
    *(*RATINGS, "elections", "chem97", "flights"),
    *("freedom", "borrowers", "force", "covid", "birds"),  # many columns, or classes
)
STACK_FOLDS = 5  # of the stack by default
BLOCKS = 100  # of clients, at most, whose losses of a forecast are kept apart
LIMIT = 10  # CPU minutes of a cell; a peer that takes longer is left out of the task
KINDS = ("inside", "whole", "forecast")


def elections(home):
    """Republican share of the two-party vote by county, from the year."""
    table = pd.read_csv(home / "election_county_2000_2020.csv.gz").query("in_panel == 1")
    share = table["votes_rep"] / (table["votes_rep"] + table["votes_dem"])
    X, time = table[["year"]].astype(float), table["year"].to_numpy()
    groups, state = table["fips"].to_numpy(), table["state"]
    return public_tasks.PublicTask(X, share.to_numpy(), groups, time, state)


def baseball(home):
    """Batting average of a season by player, from the year and the age."""
    table = pd.read_csv(home / "baseball_batting_2000_2024.csv.gz")
    table = table.query("AB >= 50 and pitcher == 0")
    return public_tasks.PublicTask(
        table[["year", "age"]].astype(float),
        (table["H"] / table["AB"]).to_numpy(),
        table["player"].to_numpy(),
        table["year"].to_numpy(),
    )


class Task(NamedTuple):
    """How a table is read, whether targets are classes, whether rows have times; its set."""

    read: Any
    has_classes: bool
    has_time: bool = False
    part: str = "old"  # "old", "more", "held" or "final"


def _more(readers, has_classes, part):
    times = more_tables.WITH_TIME
    return {each.__name__: Task(each, has_classes, each in times, part) for each in readers}


TASKS = {
    **{
        each.__name__: Task(each, False, each is public_tasks.parkinsons)
        for each in public_tasks.REGRESSION
    },
    "elections": Task(elections, False, has_time=True),
    "baseball": Task(baseball, False, has_time=True),
    **{each.__name__: Task(each, True) for each in public_tasks.CLASSIFICATION},
    **_more(more_tables.REGRESSION, False, "more"),
    **_more(more_tables.CLASSIFICATION, True, "more"),
    **_more(more_tables.HELD_REGRESSION, False, "held"),
    **_more(more_tables.HELD_CLASSIFICATION, True, "held"),
    **_more(more_tables.FINAL_REGRESSION, False, "final"),
    **_more(more_tables.FINAL_CLASSIFICATION, True, "final"),
}
FINAL = tuple(name for name, task in TASKS.items() if task.part == "final")
HELD = tuple(name for name, task in TASKS.items() if task.part == "held")
DEVELOPMENT = tuple(name for name in TASKS if name not in FINAL)
# What tables from packages and forecasts are compared with. Mixed models of other packages would
# repeat the random intercepts of ours, and merf takes minutes.
MORE_METHODS = (
    *("default", "stacking", "CatBoost", "CatBoost tuned", "LightGBM tuned", "GPBoost boosting"),
    *("trees, target", "one-hot linear", "pooled", "mean"),
)


class Cell(NamedTuple):
    """One fit, to one split of a task."""

    task: str
    method: str
    kind: str
    split: int

    def __str__(self):
        return f"{self.task} | {self.method} | {self.kind} {self.split}"


def rows_of(task):
    """Features (n, d) as a frame, targets (n,), clients as numbers (n,), and times (n,) or None.

    A second id is one more feature, of strings.
    """
    X, y, groups, time, second = task.read(Path(os.environ["PFL_SKLEARN_DATA"]))
    X = X.reset_index(drop=True)
    if second is not None:
        X[SECOND_ID] = second.to_numpy().astype(str)
    return X, y, pd.factorize(groups, sort=True)[0], time


def in_order(X, y, groups, time):
    """The rows by client and time."""
    order = np.lexsort((time, groups))
    return X.iloc[order].reset_index(drop=True), y[order], groups[order], time[order]


def splits_of(kind, groups, time=None, n_splits=SPLITS, seed=0):
    """Training and test rows of every split."""
    if kind == "forecast":
        return [_fifth_before(groups, time, back) for back in range(ORIGINS)]
    if kind == "inside":
        splitter = ClientShuffleSplit(n_splits, test_size=TEST_SIZE, random_state=seed)
    else:
        n_splits = min(n_splits, len(np.unique(groups)))
        splitter = GroupKFold(n_splits, shuffle=True, random_state=seed)
    return list(splitter.split(groups[:, None], groups=groups))


def _fifth_before(groups, time, back):
    """Rows before and in a fifth of each client's times, so many fifths before the last one.

    A fifth is one time at least.
    """
    times = pd.Series(time).groupby(groups)
    steps, n_steps = times.rank(method="dense"), times.transform("nunique")
    held_out = np.maximum(n_steps // 5, 1) * (n_steps > 1)
    end = n_steps - back * held_out
    is_past = steps <= end - held_out
    is_tested = ~is_past & (steps <= end) & (end > held_out)
    return np.flatnonzero(is_past), np.flatnonzero(is_tested)


def inner_folds(kind, groups, time=None):
    """Folds that peers are tuned in."""
    if kind == "forecast":
        return forward_folds(groups, time, INNER_FOLDS)
    if kind == "inside":
        folds = ClientKFold(INNER_FOLDS, random_state=1)
    else:
        folds = GroupKFold(INNER_FOLDS, shuffle=True, random_state=1)
    return list(folds.split(groups[:, None], groups=groups))


def forward_folds(groups, time, n_splits):
    """So many folds forward in time, or as many as the longest client has steps for."""
    folds = ClientTimeSeriesSplit(min(n_splits, _n_steps(groups, time) - 1), time_column=0)
    return list(folds.split(time[:, None], groups=groups))


def folds_of_stack(groups, time):
    """Folds forward in time by the stack's own rule, unless rows of a client have the same time.

    Then five, or as many before which a client has two steps, as its personalized models need.
    """
    if not pd.DataFrame({"group": groups, "time": time}).duplicated().any():
        return "time"
    n_splits = min(STACK_FOLDS, _n_steps(groups, time) - 2)
    return forward_folds(groups, time, n_splits) if n_splits >= 3 else STACK_FOLDS


def _n_steps(groups, time):
    """Times of the client that has most."""
    return int(pd.Series(time).groupby(groups).nunique().max())


def computed(cell, results, deadline):
    """What the line of a cell says; None if it is too late to begin."""
    if time.time() > deadline:
        return None
    for found in results.of(cell.task).values():
        if found["method"] == cell.method and found.get("not_possible") == _TOO_LONG:
            return {**cell._asdict(), "not_possible": _TOO_LONG}
    warnings.simplefilter("ignore")
    task = TASKS[cell.task]
    X, y, groups, times = rows_of(task)
    given = {}
    if cell.method != "stacking":  # which takes dates as they are
        X = more_tables.with_days(X)
    if cell.kind == "forecast":
        X, y, groups, times = in_order(X, y, groups, times)
    train, test = splits_of(cell.kind, groups, times)[cell.split]
    past = None if times is None else times[train]
    if cell.kind == "forecast" and cell.method == "stacking":
        given["cv"] = folds_of_stack(groups[train], past)
    known = np.isin(groups[test], groups[train])
    table = X.iloc[train].reset_index(drop=True), y[train], groups[train]
    load(cell.method)  # a package that is not there is no result
    began, before = time.process_time(), _peak()
    found = {**cell._asdict(), "n_train": len(train), "n_test": len(test)}
    if cell.method not in OURS:
        signal.signal(signal.SIGPROF, _too_slow)
        # Again every second after that, because GPBoost goes on to its next setting after an error.
        signal.setitimer(signal.ITIMER_PROF, 60 * LIMIT, 1.0)
    reason = None
    try:
        folds = inner_folds(cell.kind, groups[train], past)
        model, setting = tuned_fit(cell.method, task.has_classes, table, folds, given)
    except NotPossibleError as error:
        reason = str(error)
    except Exception as error:
        if cell.method in OURS:
            raise
        reason = f"{type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    seconds = time.process_time() - began
    if cell.method not in OURS and seconds > 60 * LIMIT:  # whatever became of the interruption
        reason = _TOO_LONG
    if reason is not None:
        return {**found, "not_possible": reason}
    outputs = model.outputs(X.iloc[test], np.where(known, groups[test], -1))
    of_rows = losses(np.asarray(outputs, dtype=float), y[test], task.has_classes)
    parts = {name: getattr(getattr(model, "estimator", None), name, None) for name in _PARTS}
    return {
        **found,
        "loss": float(of_rows.mean()),
        "cpu_seconds": seconds,
        "peak_mib": _peak() - before,
        "setting": setting,
        **{name: part for name, part in parts.items() if part is not None},
        **_of_blocks(of_rows, groups[test]),
    }


def _of_blocks(of_rows, groups):
    """Rows and sums of losses of blocks of clients, for errors that are clustered by client."""
    blocks = groups % BLOCKS
    sums = np.bincount(blocks, of_rows, minlength=BLOCKS)
    return {
        "block_rows": np.bincount(blocks, minlength=BLOCKS).tolist(),
        "block_losses": [float(f"{value:.6g}") for value in sums],
    }


_PARTS = ("known_part_", "new_part_")
_TOO_LONG = f"more than {LIMIT} CPU minutes"


def _too_slow(*_):
    raise NotPossibleError(_TOO_LONG)


def _peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# Runs ---------------------------------------------------------------------------------------------


def cells_of(task, methods):
    """All cells of a task; heart disease has four hospitals, hence four splits of whole ones."""
    return [
        Cell(task, method, kind, split)
        for kind in KINDS
        for split in range(_n_splits(task, kind))
        for method in methods
        if _is_compared(task, kind, method)
    ]


def _n_splits(task, kind):
    if kind == "forecast":
        return (ORIGINS - (task in FOUR_TIMES or task in FEWEST)) * TASKS[task].has_time
    if task in FEWEST or (kind == "whole" and task in RATINGS):
        return FEWEST_SPLITS
    n_splits = FEW_SPLITS if task in LARGE else SPLITS
    return min(n_splits, 4) if (task, kind) == ("heart", "whole") else n_splits


def _is_compared(task, kind, method):
    """Whether a task and kind needs a method; GPBoost takes minutes for classes."""
    if TASKS[task].part == "old" and kind != "forecast":
        return True
    return method in MORE_METHODS and (method != "GPBoost boosting" or not TASKS[task].has_classes)


def run(cells, results, deadline, workers=WORKERS):
    """Compute cells, each in a process of its own, and write their lines."""
    os.environ.update(ONE_THREAD)
    context = multiprocessing.get_context("forkserver")
    # Else imports take longer than most fits; modules of this folder are not on the server's path.
    context.set_forkserver_preload(["pfl_sklearn.compose", "sklearn.ensemble", "pandas"])
    with ProcessPoolExecutor(workers, context, max_tasks_per_child=1) as pool:
        done = pool.map(partial(computed, results=results, deadline=deadline), cells)
        for cell, found in zip(cells, done, strict=True):
            if found is None:
                continue
            results.add(found)
            said = found.get("not_possible") or f"{found['loss']:.5g}, {found['cpu_seconds']:.1f} s"
            print(f"{cell}: {said}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--final", action="store_true", help="tables that judge what was chosen")
    parser.add_argument("--only", nargs="+", metavar="TASK", help="some of the tables")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--budget-minutes", type=float, default=math.inf)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "tables")
    parser.add_argument("--plan", action="store_true", help="print how many cells are left")
    options = parser.parse_args()
    tasks = FINAL if options.final else DEVELOPMENT
    if unknown := set(options.only or ()).difference(tasks):
        parser.error(f"{sorted(unknown)} not among the tables {', '.join(tasks)}")
    results, missing = Results(Cell, options.output), []
    for task in options.only or tasks:
        cells = [cell for cell in cells_of(task, options.methods) if cell.kind in options.kinds]
        found = results.of(task)
        left = [cell for cell in cells if str(cell) not in found]
        missing += left
        if options.plan:
            print(f"{task}: {len(left)} of {len(cells)} cells left")
    if not options.plan:
        run(missing, results, time.time() + 60 * options.budget_minutes, options.workers)


if __name__ == "__main__":
    main()
