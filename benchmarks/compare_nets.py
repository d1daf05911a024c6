"""Accuracy of neural methods on clients of MNIST, FEMNIST and CIFAR-10, as in AdaPeD's paper.

A method has the settings of a paper, or it is tuned on its own grid with validation rows inside
clients and one seed. Then it is fitted to all training rows with three seeds, which draw the
clients, their rows and the net, and scored on test rows. Every fit is a cell, a line of the file of
its clients in --output: a run that was stopped goes on where it was. Two workers with one thread
each; the images come from PFL_SKLEARN_DATA.

A line has a digest of the code that computed it (code_digest.py), and the page marks the methods
whose digest is not that of the present code. --verify repeats one fit of each of them: if accuracy
and log-loss are the same, all lines of the method get the present digest, else the next run
computes them again. Remove the lines of a regime or a method whose numbers you change.

    python benchmarks/compare_nets.py --plan                         # cells and hours left
    python benchmarks/compare_nets.py --budget-minutes 60            # go on for an hour
    python benchmarks/compare_nets.py --only mnist-20 private-3.35   # some of the clients
    python benchmarks/compare_nets.py --quick                        # a check, in seconds
    python benchmarks/compare_nets.py --verify --budget-minutes 20   # check older results
    python benchmarks/compare_nets.py --page docs/comparison.rst     # write what is complete
"""

import argparse
import math
import multiprocessing
import os
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import net_page
import numpy as np
import torch
from cells import Results
from code_digest import present_digest
from net_fits import Cell, model_of, results_of, rounds_of
from net_regimes import REGIMES, Regime, digits, some_classes
from run import ONE_THREAD
from sklearn.model_selection import ParameterGrid

TUNING_SEED, SEEDS = 0, (1, 2, 3)
SAME = 1e-6  # largest difference between figures of the same fit
WORKERS = 2
QUICK = {"digits": Regime("Digits", partial(some_classes, digits, 10, 3), 20, 30, 0.3)}
QUICK_METHODS = "FedAvg", "FedAvg, sparse labels"

# Cells --------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """Regimes and their methods by name, the settings of each grid, and seeds of the test."""

    regimes: dict
    methods: tuple | None = None
    most_settings: int | None = None
    seeds: tuple = SEEDS

    def methods_of(self, regime):
        """Names of a regime's methods."""
        return [m for m in regime.methods if self.methods is None or m in self.methods]

    def tuning_cells(self, name, method):
        """Cells of a method's grid; [] if it takes the setting of another method."""
        methods = self.regimes[name].methods
        if "tuned_as" in methods[method] or self.regimes[name].settings is not None:
            return []
        settings = list(ParameterGrid(methods[method]["grid"]))[: self.most_settings]
        return [Cell(name, method, setting, TUNING_SEED, True) for setting in settings]

    def seeds_of(self, name, method):
        """Seeds of a method's fits of the test."""
        return self.seeds[:1] if method in self.regimes[name].one_seed else self.seeds

    def test_cells(self, name, method, found):
        """Cells of the setting with the best validation accuracy; [] before it is known.

        Settings with which a fit of the test diverged are passed over, as a user would.
        """
        seeds, regime = self.seeds_of(name, method), self.regimes[name]
        if regime.settings is not None:
            return [Cell(name, method, regime.settings[method], seed, False) for seed in seeds]
        tuned_as = regime.methods[method].get("tuned_as", method)
        cells = self.tuning_cells(name, tuned_as)
        tried = [found.get(str(cell)) for cell in cells]
        if None in tried:
            return []
        ranks = [(-each["accuracy"], each["log_loss"]) for each in tried]
        for k in sorted(range(len(cells)), key=ranks.__getitem__):
            chosen = [Cell(name, method, cells[k].setting, seed, False) for seed in seeds]
            if not any("error" in found.get(str(cell), ()) for cell in chosen):
                break
        return chosen

    def missing(self, name, found):
        """Cells of a regime to compute next: those of the grids, and then those of the test."""
        methods = self.methods_of(self.regimes[name])
        tuning = [cell for m in methods for cell in self.tuning_cells(name, m)]
        test = [cell for m in methods for cell in self.test_cells(name, m, found)]
        cells = ([cell for cell in some if is_missing(cell, found)] for some in (tuning, test))
        return next(filter(None, cells), [])


def is_missing(cell, found):
    """Whether a cell has no result, or one that the present code does not repeat."""
    return str(cell) not in found or "differs" in found[str(cell)]


def run_cells(cells, regime, results, deadline):
    """Compute and write cells that share their rounds; [] if it is too late to begin."""
    if time.time() > deadline:
        return []
    done = []
    for found in results_of(cells, regime):
        results.add(found)
        done.append(found)
    return done


def _begin_worker():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # noise from a seed is announced in every fit


# Runs ---------------------------------------------------------------------------------------------


def run(plan, results, deadline):
    """Compute the cells that are missing, regime by regime: tuning first."""
    os.environ.update(ONE_THREAD)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(WORKERS, context, _begin_worker) as pool:
        for name, regime in plan.regimes.items():
            task = partial(run_cells, regime=regime, results=results, deadline=deadline)
            while (cells := plan.missing(name, results.of(name))) and time.time() < deadline:
                _run_all(pool, task, cells)
            if not cells:
                drop_replaced(results, name, plan.methods_of(regime))


def drop_replaced(results, name, methods):
    """Remove older lines of methods that were computed again, perhaps with other settings."""
    found = results.of(name).values()
    kept = [each for each in found if not ("differs" in each and each["method"] in methods)]
    if found:  # there is a file, also where none of these methods is compared
        results.replace(name, kept)


def verify(plan, results, deadline):
    """Repeat the first test fit of methods with results of other code, and keep what came out.

    Nothing else may write to the same files meanwhile.
    """
    _begin_worker()
    for name, regime in plan.regimes.items():
        for cells in bundles_of(unverified(plan, name, results.of(name)), regime):
            if time.time() > deadline:
                return
            for cell, again in zip(cells, results_of(cells, regime), strict=True):
                settle(results, cell, again)


def settle(results, cell, again):
    """Say in all lines of a cell's method whether the cell's fit came out as before."""
    found = results.of(cell.regime)
    stored = found[str(cell)]
    same = all(
        math.isclose(again[key], stored[key], rel_tol=0, abs_tol=SAME)
        for key in ("accuracy", "log_loss")
    )
    verdict = {"digest": present_digest()} if same else {"differs": True}
    own = {key: line | verdict for key, line in found.items() if line["method"] == cell.method}
    results.replace(cell.regime, (found | own).values())
    figures = (
        f"{each['accuracy']:.4f} and {each['log_loss']:.6f}, {each['cpu_seconds']:.0f} s"
        for each in (stored, again)
    )
    print(f"{cell}: {'; again '.join(figures)}: {'same' if same else 'DIFFERS'}", flush=True)


def unverified(plan, name, found):
    """First test cells of a regime's methods whose results are of other code, and not refuted."""
    cells = []
    for method in plan.methods_of(plan.regimes[name]):
        tests = plan.test_cells(name, method, found)
        if tests and not any(is_missing(cell, found) for cell in tests):
            digests = {found[str(cell)].get("digest") for cell in tests}
            cells += tests[:1] if digests != {present_digest()} else []
    return cells


def bundles_of(cells, regime):
    """Cells that share their rounds, together."""
    bundles = {}
    for cell in cells:
        bundles.setdefault(str(rounds_of(cell, regime)), []).append(cell)
    return list(bundles.values())


def _run_all(pool, task, cells):
    """Run cells, the longest first."""
    regime = task.keywords["regime"]
    cost = {name: method["cost"] for name, method in regime.methods.items()}
    bundles = bundles_of(cells, regime)
    ordered = sorted(bundles, key=lambda some: -sum(cost[cell.method] for cell in some))
    for bundle, done in zip(ordered, pool.map(task, ordered), strict=True):
        for cell, each in zip(bundle, done, strict=False):  # nothing is done when it is late
            print(f"{cell}: {each['accuracy']:.4f}, {each['cpu_seconds']:.1f} s", flush=True)


def print_plan(plan, results):
    """Print the cells and the hours that are left."""
    _begin_worker()
    total = 0.0
    for name in plan.regimes:
        found = results.of(name)
        n_left, seconds = left_of(plan, name, found)
        total += seconds / WORKERS
        n_old = len(unverified(plan, name, found))
        minutes = f"{seconds / WORKERS / 60:.0f} minutes"
        print(f"{name}: {n_left} fits, {minutes}; {n_old} methods to verify", flush=True)
    print(f"all: {total / 3600:.1f} hours with {WORKERS} workers")


def left_of(plan, name, found):
    """Fits of a regime that are left, and their seconds, as those of a method's other fits."""
    regime, n_left, total, unit = plan.regimes[name], 0, 0.0, None
    for method in plan.methods_of(regime):
        tuning, test = plan.tuning_cells(name, method), plan.test_cells(name, method, found)
        done = [found[str(cell)] for cell in tuning + test if not is_missing(cell, found)]
        left = len(tuning) + len(plan.seeds_of(name, method)) - len(done)
        if left and not done:
            unit = unit or seconds_of_fit(name, regime)
        seconds = [each["cpu_seconds"] for each in done] or [unit * regime.methods[method]["cost"]]
        n_left, total = n_left + left, total + left * np.mean(seconds)
    return n_left, total


def seconds_of_fit(name, regime):
    """Seconds of a fit of FedAvg, from one of few rounds."""
    train, _ = regime.rows(TUNING_SEED)
    seconds = []
    for n_rounds in (1, 1, 4):  # the first also loads libraries
        short = regime._replace(n_rounds=n_rounds, printed_epsilon=None)
        began = time.process_time()
        cell = Cell(name, "FedAvg", {}, TUNING_SEED, True)
        model_of(cell, short, train).fit(train.X, train.y, groups=train.groups)
        seconds.append(time.process_time() - began)
    return seconds[1] + (regime.n_rounds - 1) * (seconds[2] - seconds[1]) / 3


def tested(plan, results):
    """Cells of the test by regime and method, of the methods whose seeds are all there."""
    table = {}
    for name, regime in plan.regimes.items():
        found = results.of(name)
        for method in plan.methods_of(regime):
            cells = [found.get(str(cell)) for cell in plan.test_cells(name, method, found)]
            if cells and None not in cells:
                table.setdefault(name, {})[method] = cells
    return table


def completed(plan, found):
    """Regimes whose methods all have results."""
    sizes = {name: len(plan.methods_of(regime)) for name, regime in plan.regimes.items()}
    return {name: some for name, some in found.items() if len(some) == sizes[name]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", choices=REGIMES, metavar="CLIENTS", help=", ".join(REGIMES)
    )
    parser.add_argument("--methods", nargs="+", help="their names; default all")
    parser.add_argument("--budget-minutes", type=float, default=math.inf)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "compare_nets")
    parser.add_argument(
        "--page", type=Path, help="write the page, its pictures and the guide's table"
    )
    parser.add_argument("--plan", action="store_true", help="print what is left to do")
    parser.add_argument("--verify", action="store_true", help="repeat a fit of older results")
    parser.add_argument("--quick", action="store_true", help="a check on few rows")
    options = parser.parse_args()
    results = Results(Cell, options.output)
    if options.quick:
        plan = Plan(QUICK, QUICK_METHODS, most_settings=2, seeds=SEEDS[:2])
    else:
        names = options.only or REGIMES
        plan = Plan({name: REGIMES[name] for name in names}, options.methods)
    if options.plan:
        print_plan(plan, results)
    elif options.page:
        write_page(plan.regimes, completed(plan, tested(plan, results)), options.page)
    elif options.verify:
        verify(plan, results, time.time() + 60 * options.budget_minutes)
    else:
        run(plan, results, time.time() + 60 * options.budget_minutes)
        print(net_page.page(plan.regimes, tested(plan, results)))


def write_page(regimes, found, path):
    """Write the page with its pictures, and the guide's table of the best methods."""
    path.write_text(net_page.page(regimes, found), encoding="utf-8")
    best = path.parent / "user_guide" / "best_methods.inc"
    best.write_text(net_page.best(regimes, found), encoding="utf-8")
    net_page.draw_methods(found, path.parent / "_static" / "net_methods.png")
    net_page.draw_curves(regimes, found, path.parent / "_static" / "net_curves.png")


if __name__ == "__main__":
    main()
