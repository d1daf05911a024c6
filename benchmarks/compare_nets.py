"""Accuracy of neural methods on clients of MNIST, FEMNIST and CIFAR-10, as in AdaPeD's paper.

Every method is tuned on its own grid with validation rows inside clients and one seed. Then it is
fitted to all training rows with three seeds, which draw the clients, their rows and the net, and
scored on test rows. Every fit is a cell, a line of the file of its clients in --output: a run that
was stopped goes on where it was. Remove the lines of what has changed. Two workers with one thread
each; the images come from PFL_SKLEARN_DATA.

    python benchmarks/compare_nets.py --plan                         # cells and hours left
    python benchmarks/compare_nets.py --budget-minutes 60            # go on for an hour
    python benchmarks/compare_nets.py --only mnist-20 private-3.35   # some of the clients
    python benchmarks/compare_nets.py --quick                        # a check, in seconds
    python benchmarks/compare_nets.py --page docs/comparison.rst \
        --best docs/user_guide/best_methods.inc                      # write what is complete
"""

import argparse
import copy
import math
import multiprocessing
import os
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from cells import Results
from net_regimes import DELTA, REGIMES, Regime, digits, noise_for, recipe, some_classes
from run import ONE_THREAD
from sklearn.model_selection import ParameterGrid

from pfl_sklearn.model_selection import ClientShuffleSplit

_NOTHING = {"accuracy": 0.0, "accuracy_sd": 0.0, "worst_decile": 0.0, "log_loss": math.inf}
TUNING_SEED, SEEDS = 0, (1, 2, 3)
VALIDATION, SMALLEST = 0.25, float(np.finfo(np.float32).eps)
WORKERS = 2
QUICK = {"digits": Regime("Digits", partial(some_classes, digits, 10, 3), 20, 30, 0.3)}
QUICK_METHODS = "FedAvg", "FedAvg, sparse labels"
PAGE = """\
.. Written by benchmarks/compare_nets.py.

Comparison on images
====================

Every method was tuned on its own grid with validation rows of the clients and one seed, then fitted
to all training rows with three others, which draw the clients, their rows and the net. Every method
has the same net, two convolutions and three linear layers, and the same decaying learning rate. In
each of {n_rounds} rounds a tenth of the clients takes ten steps, or twenty if clients learn alone,
on batches of ten rows, or twenty where they have all rows. :ref:`which_method` draws conclusions.

**These fits are short.** Without noise their rounds are half of the 300 in which AdaPeD's paper
trains on MNIST (480 on FEMNIST, 1,000 or more on CIFAR-10), and "Local" takes twice as many steps
as the other methods. So the tables compare methods at this budget; they say nothing about methods
as their papers run them. With the paper's 300 rounds and settings (MNIST, 50 clients with 3
classes, all rows), AdaPeD as printed has 97.9 % right with this package and 98.3 % in plain
PyTorch, and nets alone with equally many steps have 98.2 %; the paper states 98.5 % for AdaPeD.

"FedAvg, fine-tuned" has `fine_tune_steps`, "heads" a `head`, "sparse labels" stands for
``label_prior="client"`` and "Dirichlet labels" for ``label_prior=DirichletPrior()``. AdaPeD
with a global start is the default of :class:`~pfl_sklearn.neural_network.AdaPeDClassifier` but for
the floor of psi: here it is the paper's, 0.5, by default it is where psi starts. With sparse labels
it has the setting that was best without them. Where a fit of the test diverged, the next best
setting takes over.

Accuracy is a mean over clients, in percent, with the standard deviation over seeds; "between
clients" is its standard deviation over clients, and "lowest tenth" the accuracy that nine of ten
clients exceed. Log-loss is over test rows, whose probabilities are at least {smallest:.1e}. Times
are processor seconds of one fit, on machines of which one was two to three times as fast as the
others: compare them roughly.
"""

PRIVACY = """\
Where there is noise, its size is that for which the paper's Theorem 5 would state the epsilon of
the title at a delta of 1e-5, after 20 rounds of all clients. That statement does not hold; the
epsilon of the fits' reports does, for whole clients against anyone who sees what is released, and
is given for each neighbouring relation. Tuning is not covered by either. "DP-AdaPeD or local" lets
each client choose by a quarter of its rows, which neither net has seen.
"""


# Cells --------------------------------------------------------------------------------------------


class Cell(NamedTuple):
    """One fit: of a method with a setting, to clients of a regime drawn with a seed."""

    regime: str
    method: str
    setting: dict
    seed: int
    tuning: bool

    def __str__(self):
        setting = (f"{name}={value}" for name, value in sorted(self.setting.items()))
        words = (self.regime, self.method, *setting, "tuning" if self.tuning else "test")
        return " | ".join((*words, f"seed {self.seed}"))


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
        cells = ([cell for cell in some if str(cell) not in found] for some in (tuning, test))
        return next(filter(None, cells), [])


def rounds_of(cell, regime):
    """What the rounds of a cell's fit depend on; cells that agree in it share them."""
    method = regime.methods[cell.method]
    setting = {k: v for k, v in cell.setting.items() if k not in method.get("after", ())}
    return method.get("rounds", cell.method), sorted(setting.items()), cell.seed, cell.tuning


def model_of(cell, regime, train):
    """The model of a cell before its fit."""
    method, noise = regime.methods[cell.method], {}
    if "noise" in method:
        multiplier = noise_for(regime.printed_epsilon, regime.n_rounds, regime.client_fraction)
        noise = {method["noise"]: multiplier}
    model = method["estimator"](
        recipe(train.X, train.y, regime),
        n_rounds=regime.n_rounds,
        client_fraction=regime.client_fraction,
        sampling="fixed" if regime.client_fraction < 1 else "poisson",
        random_state=cell.seed,
        local_steps=regime.local_steps,
    )
    given, prefix = {**method["fixed"], **cell.setting, **noise}, method.get("prefix", "")
    return model.set_params(**{prefix + name: value for name, value in given.items()})


def read_by(cell, regime, model, train):
    """The model of a cell that begins where the rounds of another one's are."""
    method = regime.methods[cell.method]
    goes_on = copy.deepcopy(model).set_params(warm_start=True, n_rounds=model.n_rounds_)
    goes_on.set_params(**{**method["fixed"], **cell.setting})
    return goes_on.fit(train.X, train.y, groups=train.groups)


class StopAt:
    """Callback that ends a fit after a round; a warm start goes on as if there had been no end."""

    def __init__(self, n_rounds):
        self.left = n_rounds

    def setup(self, estimator, context):
        """The rounds are counted in ``on_fit_task_end``."""

    def on_fit_task_begin(self, estimator, context):
        """See ``setup``."""

    def on_fit_task_end(self, estimator, context):
        """Whether that was the last round."""
        self.left -= context.task_name == "round"
        return self.left <= 0

    def teardown(self, estimator, context):
        """See ``setup``."""


def parts_of_fit(cell, regime, train):
    """Rounds so far and the fitted model, which goes on, after each part of its rounds."""
    model = model_of(cell, regime, train)
    if regime.n_looks == 1:
        yield regime.n_rounds, model.fit(train.X, train.y, groups=train.groups)
        return
    model.set_params(warm_start=True)
    for k in range(regime.n_looks):
        first, last = (j * regime.n_rounds // regime.n_looks for j in (k, k + 1))
        model.set_callbacks(StopAt(last - first))
        yield last, model.fit(train.X, train.y, groups=train.groups)


def scores(model, rows):
    """Accuracy over clients, and log-loss over rows.

    A class that no training row had has probability 0.
    """
    probabilities = model.predict_proba(rows.X, groups=rows.groups)
    right = model.classes_[probabilities.argmax(axis=1)] == rows.y
    clients, codes = np.unique(rows.groups, return_inverse=True)
    by_client = np.bincount(codes, right) / np.bincount(codes)
    truth = (probabilities * (model.classes_ == rows.y[:, None])).sum(axis=1)
    return {
        "accuracy": by_client.mean(),
        "accuracy_sd": by_client.std(),
        "worst_decile": np.quantile(by_client, 0.1),
        "log_loss": -np.log(np.clip(truth, SMALLEST, 1)).mean(),
        "n_clients": len(clients),
        "n_rows": len(rows.y),
    }


def rows_of(cell, regime):
    """Rows to fit to, and rows to judge by: the test rows or, in tuning, some of the others."""
    train, test = regime.rows(cell.seed)
    if not cell.tuning:
        return train, test
    split = ClientShuffleSplit(1, test_size=VALIDATION, random_state=cell.seed)
    rest, held = next(split.split(train.X, groups=train.groups))
    return train.take(rest), train.take(held)


def results_of(cells, regime):
    """What the files of cells that share their rounds say; a fit that diverged has accuracy 0."""
    train, test = rows_of(cells[0], regime)
    common = {"n_rounds": regime.n_rounds, "n_train": len(train.y)}
    found = [{**cell._asdict(), **common, "cpu_seconds": 0.0, "curve": []} for cell in cells]
    method, began = regime.methods[cells[0].method], time.process_time()
    shares = "rounds" in method
    plain = plain_cell(cells[0], method) if shares else cells[0]
    try:
        for n_rounds, model in parts_of_fit(plain, regime, train):
            shared = time.process_time() - began
            for cell, each in zip(cells, found, strict=True):
                began = time.process_time()
                if "error" not in each:
                    each |= look_at(cell, regime, model, train, test)
                    at = {"n_rounds": n_rounds, "accuracy": each["accuracy"]}
                    each["curve"].append({**at, "log_loss": each["log_loss"]})
                each["cpu_seconds"] += shared + time.process_time() - began
            began = time.process_time()
    except ArithmeticError as error:
        for each in found:
            each |= {"error": str(error), **_NOTHING}
    else:
        if "noise" in method:
            report = model.privacy_
            found[0]["epsilon"] = {report.relation: report.epsilon, **dict(report.epsilon_under)}
    return found


def look_at(cell, regime, model, train, test):
    """Scores of a cell at this point of its rounds, or of those that it shares."""
    try:
        if "rounds" in regime.methods[cell.method]:
            model = read_by(cell, regime, model, train)
        return scores(model, test)
    except ArithmeticError as error:
        return {"error": str(error), **_NOTHING}


def plain_cell(cell, method):
    """The cell of rounds that another one goes on from."""
    setting = {k: v for k, v in cell.setting.items() if k not in method["after"]}
    return cell._replace(method=method["rounds"], setting=setting)


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


def _run_all(pool, task, cells):
    """Run cells, the longest first."""
    regime, bundles = task.keywords["regime"], {}
    for cell in cells:
        bundles.setdefault(str(rounds_of(cell, regime)), []).append(cell)
    cost = {name: method["cost"] for name, method in regime.methods.items()}
    ordered = sorted(bundles.values(), key=lambda some: -sum(cost[cell.method] for cell in some))
    for bundle, done in zip(ordered, pool.map(task, ordered), strict=True):
        for cell, each in zip(bundle, done, strict=False):  # nothing is done when it is late
            print(f"{cell}: {each['accuracy']:.4f}, {each['cpu_seconds']:.1f} s", flush=True)


def print_plan(plan, results):
    """Print the cells and the hours that are left."""
    _begin_worker()
    total = 0.0
    for name in plan.regimes:
        n_left, seconds = left_of(plan, name, results.of(name))
        total += seconds / WORKERS
        print(f"{name}: {n_left} fits, {seconds / WORKERS / 60:.0f} minutes", flush=True)
    print(f"all: {total / 3600:.1f} hours with {WORKERS} workers")


def left_of(plan, name, found):
    """Fits of a regime that are left, and their seconds, as those of a method's other fits."""
    regime, n_left, total, unit = plan.regimes[name], 0, 0.0, None
    for method in plan.methods_of(regime):
        tuning, test = plan.tuning_cells(name, method), plan.test_cells(name, method, found)
        done = [found[str(cell)] for cell in tuning + test if str(cell) in found]
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


# Tables -------------------------------------------------------------------------------------------


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


def table_of(regime, by_method):
    """Table of a regime's methods, and a line on the paper's figures."""
    columns = ["Method", "Setting", "Accuracy", "Between clients", "Lowest tenth", "Log-loss"]
    columns.append("Seconds")
    columns += ["Paper"] * (regime.paper is not None)
    lines = [regime.title, "-" * len(regime.title), "", ".. csv-table::", "   :header-rows: 1", ""]
    lines.append("   " + ", ".join(columns))
    for method, cells in by_method.items():
        cell = _row(method, cells)
        if regime.paper is not None:
            figure = regime.paper.get(method)
            cell.append("" if figure is None else _percent(*figure))
        lines.append("   " + ", ".join(f'"{value}"' for value in cell))
    lines += ["", *_epsilons(by_method), *_differences(regime, by_method)]
    return "\n".join(lines)


def _row(method, cells):
    means = {key: np.mean([cell[key] for cell in cells]) for key in ("accuracy_sd", "worst_decile")}
    accuracy = 100 * np.array([cell["accuracy"] for cell in cells])
    setting = cells[0]["setting"].items()
    return [
        method,
        ", ".join(f"{name.split('__')[-1]}={_short(value)}" for name, value in setting),
        _percent(accuracy.mean(), accuracy.std()),
        f"{100 * means['accuracy_sd']:.1f}",
        f"{100 * means['worst_decile']:.1f}",
        f"{np.mean([cell['log_loss'] for cell in cells]):.3f}",
        f"{np.mean([cell['cpu_seconds'] for cell in cells]):.0f}",
    ]


def _percent(mean, sd):
    return f"{mean:.1f}\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}{sd:.1f}"


def _short(value):
    return value if isinstance(value, str) else f"{value:g}"


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


def page(plan, results, complete):
    """Page of all tables; of regimes whose methods all have results, if it is to be `complete`."""
    found = tested(plan, results)
    if complete:
        found = completed(plan, found)
    regimes = [plan.regimes[name] for name in found]
    n_rounds = {regime.n_rounds for regime in regimes if regime.printed_epsilon is None}
    private = any(plan.regimes[name].printed_epsilon is not None for name in found)
    parts = [table_of(plan.regimes[name], by_method) for name, by_method in found.items()]
    text = PAGE.format(smallest=SMALLEST, n_rounds=" or ".join(map(str, sorted(n_rounds))))
    return "\n".join([text, *[PRIVACY] * private, *parts])


def completed(plan, found):
    """Regimes whose methods all have results."""
    sizes = {name: len(plan.methods_of(regime)) for name, regime in plan.regimes.items()}
    return {name: some for name, some in found.items() if len(some) == sizes[name]}


def best(plan, results):
    """Table of the best methods of every complete regime, beside one net for all and nets alone."""
    head = "Clients, Highest accuracy, One net for all, Each alone, Lowest log-loss"
    lines = [".. Written by benchmarks/compare_nets.py.", "", ".. csv-table::"]
    lines += ["   :header-rows: 1", "   :widths: 30 38 8 8 16", "", f"   {head}"]
    for name, by_method in completed(plan, tested(plan, results)).items():
        row = plan.regimes[name].title, *_best_of(by_method)
        lines.append("   " + ", ".join(f'"{value}"' for value in row))
    return "\n".join([*lines, ""])


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
    close = [f"{method} {figure}" for figure, method in list(figures.items())[:-4:-1]]
    common = accuracy.get("FedAvg", accuracy.get("DP-FedAvg"))
    sharpest = min(loss, key=loss.get)
    last = f"{sharpest} {loss[sharpest]:.3f}"
    return "; ".join(close), f"{common:.1f}", f"{accuracy['Local']:.1f}", last


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", choices=REGIMES, metavar="CLIENTS", help=", ".join(REGIMES)
    )
    parser.add_argument("--methods", nargs="+", help="their names; default all")
    parser.add_argument("--budget-minutes", type=float, default=math.inf)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "compare_nets")
    parser.add_argument("--page", type=Path, help="write the page of complete tables here")
    parser.add_argument("--best", type=Path, help="write the table of the best methods here")
    parser.add_argument("--plan", action="store_true", help="print what is left to do")
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
    elif options.page or options.best:
        if options.page:
            options.page.write_text(page(plan, results, complete=True), encoding="utf-8")
        if options.best:
            options.best.write_text(best(plan, results), encoding="utf-8")
    else:
        run(plan, results, time.time() + 60 * options.budget_minutes)
        print(page(plan, results, complete=False))


if __name__ == "__main__":
    main()
