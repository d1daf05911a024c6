"""The comparison of neural methods: its clients, its noise, and that it goes on where it was."""

import ast
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import minimize_scalar
from sklearn.base import BaseEstimator
from sklearn.metrics import log_loss
from sklearn.model_selection import cross_val_score

pytest.importorskip("torch")
pytest.importorskip("skorch")

from pfl_sklearn import (
    ClientColumn,
    ClientShuffleSplit,
    PersonalizedLinearRegression,
    PersonalizedStackingClassifier,
)

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize("path", sorted(BENCHMARKS.rglob("*.py")), ids=lambda path: path.stem)
def test_scripts_import_what_there_is(path):
    """Also those that are run by hand, with packages that tests do without."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("pfl_sklearn"):
            module = importlib.import_module(node.module)
            for name in node.names:
                assert hasattr(module, name.name) or importlib.util.find_spec(
                    f"{node.module}.{name.name}"
                )


@pytest.fixture
def regimes(monkeypatch):
    """Module of what is compared."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import net_regimes

    yield net_regimes
    net_regimes.table.cache_clear()  # MNIST takes 220 MB


@pytest.fixture
def compare_nets(regimes):
    """Module that compares."""
    import compare_nets

    return compare_nets


@pytest.fixture
def fits(regimes):
    """Module of one fit."""
    import net_fits

    return net_fits


def test_rows_of_a_client_are_divided(regimes):
    groups = np.random.default_rng(0).permutation(np.repeat([4, 5, 6], [300, 120, 30]))
    for n_train, trained, tested in (
        (20, [20, 20, 20], [100, 100, 10]),
        (None, [210, 84, 21], [90, 36, 9]),
    ):
        train, test = regimes.divided(groups, n_train, 0)
        assert np.bincount(groups[train])[4:].tolist() == trained
        assert np.bincount(groups[test])[4:].tolist() == tested
        assert not set(train) & set(test)


@pytest.mark.parametrize("name", ["cifar-60", "distorted-20", "femnist-20", "mnist-20"])
def test_clients_have_the_rows_that_are_stated(name, regimes, data_home):
    regime = regimes.REGIMES[name]
    train, test = regime.rows(0)
    assert np.unique(np.bincount(train.groups)).tolist() == [regime.n_train]
    assert np.unique(train.groups).tolist() == np.unique(test.groups).tolist()
    assert np.bincount(test.groups).max() <= 100
    classes = max(len(np.unique(train.y[train.groups == i])) for i in np.unique(train.groups))
    assert classes <= {"mnist-20": 3, "cifar-60": 4}.get(name, 20)
    assert train.X.min() >= 0
    assert train.X.max() <= 1


def test_distorted_images_are_those_of_their_digit(regimes, data_home):
    """Turned, faded and perhaps inverted: what all three leave is the range of grey, relative."""
    plain = regimes.some_classes(regimes.fetch_mnist, 50, 10, 20, 0)
    found = regimes.distorted(20, 0)
    np.testing.assert_array_equal(found.y, plain.y)
    spread = np.ptp(found.X, axis=(1, 2, 3)) / np.ptp(plain.X, axis=(1, 2, 3))
    for client in range(50):
        own = spread[found.groups == client]
        assert own.min() >= 0.3
        assert own.max() - own.min() < 1e-5
    assert np.ptp(spread) > 0.5


def test_printed_epsilon_is_that_of_the_theorem(regimes):
    """Theorem 5 (ICLR) in its own symbols, at the best order."""
    K, m, tau, T, C, sigma = 10, 50, regimes.LOCAL_STEPS, 3000, 0.7, 2.0

    def epsilon(log_excess):
        alpha = 1 + np.exp(log_excess)
        rate = (K / m) ** 2 * 6 * (T / tau) * (C**2 / (K * sigma**2) + C**2 / (K * sigma**2))
        return rate * alpha + np.log(1 / regimes.DELTA) / (alpha - 1)

    noise = np.sqrt(K * tau) * sigma / (tau * C)  # of a sum, over the largest change of one client
    expected = minimize_scalar(epsilon, bounds=(-10, 10), options={"xatol": 1e-10}).fun
    found = regimes.printed_epsilon(noise, T // tau, K / m)
    assert found == pytest.approx(expected, rel=1e-9)
    assert regimes.noise_for(found, T // tau, K / m) == pytest.approx(noise, rel=1e-12)


@pytest.mark.parametrize(("stated", "expected"), [(3.35, 2.92), (13.16, 12.23), (27.3, 26.02)])
def test_the_same_noise_by_the_papers_conversion(regimes, stated, expected):
    noise = regimes.noise_for(stated, 20)
    assert regimes.lemma_epsilon(noise, 20) == pytest.approx(expected, abs=0.005)


def test_scores_are_those_of_scikit_learn(fits, regimes):
    """Clients of unequal size, and labels that training had none of."""
    rng = np.random.default_rng(0)
    groups, y = rng.integers(0, 12, 300), rng.integers(0, 4, 300)
    probabilities = rng.dirichlet(np.ones(4), 300)
    probabilities[:, 1] = 0
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    model = SimpleNamespace(
        classes_=np.array([0, 2, 3]), predict_proba=lambda X, groups: probabilities[:, [0, 2, 3]]
    )
    found = fits.scores(model, regimes.Rows(np.zeros((300, 1)), y, groups))
    right = probabilities.argmax(axis=1) == y
    by_client = [right[groups == i].mean() for i in range(12)]
    assert found["accuracy"] == pytest.approx(np.mean(by_client), rel=1e-12)
    assert found["accuracy_sd"] == pytest.approx(np.std(by_client), rel=1e-12)
    assert found["worst_decile"] == pytest.approx(np.quantile(by_client, 0.1), rel=1e-12)
    clipped = np.maximum(probabilities[np.arange(300), y], np.finfo(np.float32).eps)
    assert found["log_loss"] == pytest.approx(-np.log(clipped).mean(), rel=1e-12)
    known = y != 1
    some = regimes.Rows(np.zeros((known.sum(), 1)), y[known], groups[known])
    model.predict_proba = lambda X, groups: probabilities[known][:, [0, 2, 3]]
    expected = log_loss(y[known], probabilities[known][:, [0, 2, 3]])
    assert fits.scores(model, some)["log_loss"] == pytest.approx(expected, rel=1e-9)


class Constant(BaseEstimator):
    """Says one class, whatever the rows are."""

    def __init__(self, label):
        self.label = label

    def fit(self, X, y, groups):
        self.classes_, self.privacy_ = np.array([0, 1]), self.label
        return self

    def predict_proba(self, X, groups):
        return np.tile(np.eye(2)[self.label], (len(X), 1))

    def predict(self, X, groups):
        return np.full(len(X), self.label)


def test_clients_choose_what_is_right_more_often(regimes):
    groups = np.repeat([3, 5, 7], 200)
    y = (np.random.default_rng(0).random(600) < np.repeat([0.2, 0.8, 0.3], 200)).astype(int)
    model = regimes.PersonalOrLocal(Constant(1), Constant(0)).fit(groups[:, None], y, groups)
    assert model.alone_.tolist() == [True, False, True]
    found = model.predict_proba(np.zeros((3, 1)), np.array([5, 7, 3]))
    np.testing.assert_array_equal(found, [[0, 1], [1, 0], [1, 0]])
    tied = regimes.PersonalOrLocal(Constant(1), Constant(1)).fit(groups[:, None], y, groups)
    assert not tied.alone_.any()
    assert model.privacy_ == 1


@pytest.mark.slow
def test_a_fit_in_parts_is_the_fit(fits, regimes):
    """Also of methods that share rounds, and where nets start in a round that depends on all."""
    clients = partial(regimes.some_classes, regimes.digits, 10, 3)
    names = "FedAvg", "FedAvg, fine-tuned", "AdaPeD, global start"
    settings = {"FedAvg": {}, names[1]: {"fine_tune_steps": 5}, names[2]: {}}
    whole = regimes.Regime("digits", clients, 20, 6, 0.3, 3, whole_field=True, settings=settings)
    for shared in (names[:2], names[2:]):
        cells = [fits.Cell("digits", m, settings[m], 1, False) for m in shared]
        at_once = fits.results_of(cells, whole)
        in_parts = fits.results_of(cells, whole._replace(n_looks=3))
        for one, parts in zip(at_once, in_parts, strict=True):
            assert parts["log_loss"] == one["log_loss"]
            assert [look["n_rounds"] for look in parts["curve"]] == [2, 4, 6]
            assert len({look["log_loss"] for look in parts["curve"]}) == 3


def compare(folder):
    """What a quick comparison prints, cells and table."""
    command = [sys.executable, BENCHMARKS / "compare_nets.py", "--quick", "--output", folder]
    path = os.pathsep.join([str(BENCHMARKS.parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    return {line.rsplit(": ", 1)[0] for line in lines if " | " in line}, lines


@pytest.mark.slow
def test_a_comparison_goes_on_where_it_was(compare_nets, tmp_path, monkeypatch, capsys):
    """Four settings, and two seeds of each method's best."""
    cells, lines = compare(tmp_path)
    (path,) = tmp_path.iterdir()
    written = path.read_text().splitlines(keepends=True)
    found = [json.loads(line) for line in written]
    assert len(cells) == len(found) == 8
    for method in ("FedAvg", "FedAvg, sparse labels"):
        own = [each for each in found if each["method"] == method]
        best = max((e for e in own if e["tuning"]), key=lambda e: (e["accuracy"], -e["log_loss"]))
        tests = [each for each in own if not each["tuning"]]
        assert [each["setting"] for each in tests] == [best["setting"]] * 2
        assert [each["n_train"] for each in own] == [150 if e["tuning"] else 200 for e in own]
        (row,) = (line.split('"')[1::2] for line in lines if f'"{method}"' in line)
        mean = 100 * np.mean([each["accuracy"] for each in tests])
        assert float(row[2].split()[0]) == pytest.approx(mean, abs=0.051)
        assert mean > 30  # of ten digits

    lost = next(k for k, each in enumerate(found) if not each["tuning"] and each["seed"] == 2)
    path.write_text("".join([*written[:lost], *written[lost + 1 :]]))
    # The second time in this process, which has loaded what takes most of the first one's time.
    monkeypatch.setattr(compare_nets, "ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(1))
    monkeypatch.setattr(compare_nets, "ONE_THREAD", {})
    monkeypatch.setattr(sys, "argv", ["", "--quick", "--output", str(tmp_path)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compare_nets.main()
    (again,) = (line for line in capsys.readouterr().out.splitlines() if " | " in line)
    assert again.startswith(f"digits | {found[lost]['method']} | ")
    last = json.loads(path.read_text().splitlines()[-1])
    assert last | {"cpu_seconds": 0} == found[lost] | {"cpu_seconds": 0}


@pytest.mark.slow
def test_the_page_of_the_comparison_is_of_the_results(compare_nets, regimes, tmp_path):
    results = compare_nets.Results(compare_nets.Cell, BENCHMARKS / "compare_nets")
    plan = compare_nets.Plan(regimes.REGIMES)
    found = compare_nets.completed(plan, compare_nets.tested(plan, results))
    for folder in ("user_guide", "_static"):
        (tmp_path / folder).mkdir()
    compare_nets.write_page(plan.regimes, found, tmp_path / "comparison.rst")
    docs = BENCHMARKS.parent / "docs"
    for name in ("comparison.rst", "user_guide/best_methods.inc"):
        written = (tmp_path / name).read_text(encoding="utf-8")
        assert written == (docs / name).read_text(encoding="utf-8")
        assert "MNIST, 50 clients with 3 classes, 20 rows each, 150 steps" in written
    for name in ("net_methods", "net_curves"):
        assert (tmp_path / "_static" / f"{name}.png").stat().st_size > 50_000


def test_the_guide_quotes_the_comparison():
    """Every figure with one decimal in the section on methods is one of the page's."""
    docs = BENCHMARKS.parent / "docs"
    guide = (docs / "user_guide" / "neural_networks.rst").read_text(encoding="utf-8")
    section = guide.partition(".. _which_method:")[2].partition("\nPrivacy\n-------")[0]
    quoted = set(re.findall(r"(?<![\d.])\d+\.\d(?!\d)", section))
    known = set(re.findall(r"\d+\.\d+", (docs / "comparison.rst").read_text(encoding="utf-8")))
    assert len(quoted) > 50
    assert not quoted - known


def test_the_digest_is_of_what_code_does(fits, tmp_path):
    """Not of what it says to readers, nor of the numbers of regimes."""
    import code_digest

    before = 'class A:\n    """Text."""\n    b = parameter(default=1, text="Text.")\n'
    read = '# Other\nclass A:\n    """Other."""\n\n    b = parameter(default=1, text="Other.")\n'
    changed = before.replace("default=1", "default=2")
    regimes = "SIZES = 20, 60\ndef rows():\n    return 1\n"

    def digest(folder, code, regimes):
        for part in code_digest.CODE:
            path = tmp_path / folder / (part if part.endswith(".py") else f"{part}/deep/_file.py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(regimes if path.name == "net_regimes.py" else code)
        return code_digest.present_digest(tmp_path / folder)

    expected = digest("before", before, regimes)
    assert digest("read", read, regimes) == expected
    assert digest("more", before, regimes.replace("60", "60, 100")) == expected
    assert digest("changed", changed, regimes) != expected
    assert digest("rows", before, regimes.replace("return 1", "return 2")) != expected
    here = [code_digest.ROOT / part for part in code_digest.CODE]
    assert all(path.exists() for path in here)


def lines_of_methods(digest):
    """Results of two methods in a test, two seeds each, one with a digest."""
    figures = {"accuracy": 0.5, "log_loss": 1.0, "cpu_seconds": 2.0}
    spread = {"accuracy_sd": 0.1, "worst_decile": 0.3, "setting": {}, "tuning": False}
    common = {"regime": "some", **spread, **figures}
    return [
        {**common, "method": method, "seed": seed, **more}
        for method, more in (("Local", {"digest": digest}), ("FedAvg", {}))
        for seed in (1, 2)
    ]


@pytest.mark.parametrize("shift", [1e-8, 1e-3])
def test_results_are_verified_by_one_fit(compare_nets, fits, tmp_path, shift):
    """A fit that comes out the same speaks for all of its method; else they are computed again."""
    from code_digest import present_digest

    regime = SimpleNamespace(
        methods={"Local": {}, "FedAvg": {}}, settings={"Local": {}, "FedAvg": {}}, one_seed=()
    )
    plan = compare_nets.Plan({"some": regime}, seeds=(1, 2))
    results = compare_nets.Results(fits.Cell, tmp_path)
    for line in lines_of_methods(present_digest()):
        results.add(line)
    found = results.of("some")
    (cell,) = compare_nets.unverified(plan, "some", found)
    assert (cell.method, cell.seed) == ("FedAvg", 1)
    again = found[str(cell)] | {"log_loss": 1.0 + shift}
    compare_nets.settle(results, cell, again)
    now, same = results.of("some"), shift < 1e-6
    assert [line | {"digest": 0} for line in now.values() if "differs" not in line] == [
        line | {"digest": 0} for line in found.values() if same or line["method"] == "Local"
    ]
    assert compare_nets.unverified(plan, "some", now) == []
    missing = plan.missing("some", now)
    assert [each.method for each in missing] == ([] if same else ["FedAvg"] * 2)
    compare_nets.drop_replaced(results, "some", ["Local"])
    assert len(results.of("some")) == 4
    compare_nets.drop_replaced(results, "some", ["FedAvg"])
    assert len(results.of("some")) == (4 if same else 2)
    results.add(again | {"digest": "later"})
    compare_nets.drop_replaced(results, "some", ["FedAvg"])
    assert len((tmp_path / "some.jsonl").read_text().splitlines()) == (4 if same else 3)


def test_rows_of_earlier_code_are_marked(compare_nets, regimes):
    from code_digest import present_digest

    page = compare_nets.net_page
    regime = regimes.REGIMES["mnist-20"]
    lines = lines_of_methods(present_digest())
    found = {
        method: [each for each in lines if each["method"] == method]
        for method in ("Local", "FedAvg")
    }
    for extra, mark in (({}, page.UNREPEATED), ({"differs": True}, page.REFUTED)):
        found["FedAvg"][1] |= extra
        table = page.table_of(regime, found)
        assert '"Local", ' in table
        assert f'"FedAvg {mark}", ' in table
        assert f"\n{mark} {page.EARLIER[mark]}" in table
        best = page.best({"some": regime}, {"some": found})
        assert f'"Local 50.0", "50.0{mark}", "50.0", "Local 1.000"' in best
        assert f"\n{mark} {page.EARLIER[mark]}" in best
        text = page.page({"some": regime}, {"some": found})
        assert "computed 1 of the 2 rows" in text
        assert f"- {regime.title}" not in text
    del found["Local"]
    assert f"- {regime.title}" in page.page({"some": regime}, {"some": found})
    present = [each | {"digest": present_digest()} for each in lines[:2]]
    text = page.page({"some": regime}, {"some": {"Local": present}})
    assert "All rows are results of the present code." in text
    assert not set(page.EARLIER) & set(text)


def test_settings_with_which_a_fit_diverges_give_way(compare_nets):
    """The second best setting of the grid takes over, also where another method follows."""
    methods = {"first": {"grid": {"rate": [1, 2, 3]}}, "second": {"tuned_as": "first"}}
    regime = SimpleNamespace(methods=methods, settings=None, one_seed=())
    plan = compare_nets.Plan({"some": regime}, seeds=(1, 2))
    assert plan.test_cells("some", "first", {}) == []
    cells = plan.missing("some", {})
    assert [cell.setting["rate"] for cell in cells] == [1, 2, 3]
    scores = {1: (0.5, 1.0), 2: (0.9, 1.0), 3: (0.9, 0.5)}
    found = {
        str(cell): dict(zip(("accuracy", "log_loss"), scores[cell.setting["rate"]], strict=True))
        for cell in cells
    }
    tests = plan.missing("some", found)
    names = [(cell.method, cell.setting["rate"], cell.seed) for cell in tests]
    assert names == [("first", 3, 1), ("first", 3, 2), ("second", 3, 1), ("second", 3, 2)]
    found |= {str(cell): {} for cell in tests} | {str(tests[1]): {"error": "diverged"}}
    again = [(cell.method, cell.setting["rate"], cell.seed) for cell in plan.missing("some", found)]
    assert again == [("first", 2, 1), ("first", 2, 2)]


@pytest.fixture
def tables(monkeypatch):
    """Module that compares predictions on tables, with a task that needs no file and no results."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("PFL_SKLEARN_DATA", ".")
    import tables

    def small(home):
        rng = np.random.default_rng(0)
        groups = np.repeat([f"site {k}" for k in range(10)], 20)
        X = pd.DataFrame(rng.normal(size=(200, 2)), columns=["a", "b"])
        y = X["a"].to_numpy() + np.repeat(rng.normal(size=10), 20) + rng.normal(size=200)
        latest_first = np.tile(np.arange(20)[::-1], 10)
        return tables.public_tasks.PublicTask(X, y, groups, latest_first)

    monkeypatch.setitem(tables.TASKS, "small", tables.Task(small, False, True))
    return tables


@pytest.fixture
def computed(tables, tmp_path):
    """Function that computes a cell of the small task, given the earlier results in a folder."""
    results = tables.Results(tables.Cell, tmp_path)
    return lambda *cell, deadline=math.inf: tables.computed(
        tables.Cell("small", *cell), results, deadline
    )


@pytest.mark.parametrize("kind", ["inside", "whole"])
def test_a_cell_is_a_fit_to_its_split(tables, computed, kind):
    X, y, groups, _ = tables.rows_of(tables.TASKS["small"])
    train, test = tables.splits_of(kind, groups)[1]
    shared = set(groups[train]) & set(groups[test])
    assert len(shared) == (10 if kind == "inside" else 0)
    found = computed("random intercept", kind, 1)
    model = PersonalizedLinearRegression(random="intercept", unseen="population")
    model.fit(X.iloc[train], y[train], groups=groups[train])
    expected = np.mean((model.predict(X.iloc[test], groups=groups[test]) - y[test]) ** 2)
    assert found["loss"] == pytest.approx(expected, rel=1e-9)
    assert (found["n_train"], found["n_test"]) == (160, 40)


def test_peers_are_tuned_and_may_not_be_possible(tables, computed, tmp_path, monkeypatch):
    found = computed("one-hot linear", "inside", 0)
    assert found["setting"]["penalty"] in [10.0**k for k in range(-2, 3)]
    late = computed("one-hot linear", "inside", 0, deadline=0)
    assert late is None
    monkeypatch.setattr(tables, "LIMIT", 1e-9)
    line = computed("trees, target", "inside", 0)
    assert line["not_possible"].startswith("more than")
    tables.Results(tables.Cell, tmp_path).add(line)
    monkeypatch.setattr(tables, "LIMIT", 10)
    again = computed("trees, target", "whole", 0)  # once too slow, no other split is tried
    assert again["not_possible"] == line["not_possible"]
    tables.TASKS["small"] = tables.TASKS["small"]._replace(has_classes=True)
    found = computed("MixedLM", "inside", 0)
    assert found["not_possible"] == "no mixed model of classes by likelihood"


def test_lines_of_tables_are_found_again(tables, tmp_path):
    cell = tables.Cell("small", "default", "whole", 2)
    results = tables.Results(tables.Cell, tmp_path)
    line = {**cell._asdict(), "loss": 1.5}
    results.add(line)
    assert results.of("small") == {str(cell): line}
    assert len(tables.cells_of("heart", ["default"])) == 9
    kinds = [(each.kind, each.split) for each in tables.cells_of("ohio", ["default", "merf"])]
    of_splits = [(kind, split) for kind in ("inside", "whole") for split in range(5)]
    assert kinds == [*of_splits, ("forecast", 0), ("forecast", 1)]


def test_forecasts_are_of_the_last_fifth_of_times(tables):
    sizes = {"once": 1, "thrice": 3, "eleven": 11}
    groups = np.repeat(list(sizes), list(sizes.values()))
    time = np.concatenate([np.arange(size)[::-1] for size in sizes.values()])
    twice = np.repeat(np.arange(len(groups)), 2)  # two rows of each time are on the same side
    (train, test), before, _ = tables.splits_of("forecast", groups[twice], time[twice])
    held_out = {(groups[twice[k]], int(time[twice[k]])) for k in test}
    assert held_out == {("thrice", 2), ("eleven", 9), ("eleven", 10)}
    assert sorted([*train, *test]) == list(range(2 * len(groups)))
    train, test = ({(groups[twice[k]], int(time[twice[k]])) for k in rows} for rows in before)
    assert test == {("thrice", 1), ("eleven", 7), ("eleven", 8)}
    assert train == {("once", 0), ("thrice", 0), *(("eleven", k) for k in range(7))}
    assert len(tables.forward_folds(groups, time, 5)) == 5
    assert len(tables.forward_folds(groups[:4], time[:4], 5)) == 2
    assert tables.folds_of_stack(groups, time) == "time"  # as users say it
    rows = groups[twice], time[twice]
    assert len(tables.folds_of_stack(*rows)) == 5
    # Three steps are too few to go forward.
    assert tables.folds_of_stack(*(each[:8] for each in rows)) == 5
    for train, _ in tables.folds_of_stack(*(each[8:18] for each in rows)):
        assert len(train) >= 2


def test_a_forecast_is_a_fit_to_rows_in_order(tables, computed, monkeypatch):
    """Its folds go forward for peers and for the stack, and it keeps losses of blocks."""
    import table_models

    seen = []

    class Last(table_models.NoClients):
        def __init__(self, cv, **_):
            seen.append(cv)

        def fit(self, X, y, groups):
            seen.append((X, y, groups))
            return self

        def outputs(self, X, groups):
            return np.zeros(len(X))

    monkeypatch.setitem(table_models.METHODS, "stacking", (Last, {}))
    found = computed("stacking", "forecast", 0)
    X, y, groups, time = tables.in_order(*tables.rows_of(tables.TASKS["small"]))
    past = time < 16
    folds, (fitted, targets, clients) = seen
    np.testing.assert_array_equal(fitted, X[past])
    np.testing.assert_array_equal(targets, y[past])
    assert folds == "time"
    for client in range(10):
        assert (np.diff(time[past][clients == client]) > 0).all()
    assert found["loss"] == pytest.approx(np.mean(y[~past] ** 2), rel=1e-9)
    assert found["block_rows"] == [4] * 10 + [0] * 90
    sums = np.bincount(groups[~past], y[~past] ** 2, minlength=100)
    np.testing.assert_allclose(found["block_losses"], sums, rtol=1e-5)
    assert computed("one-hot linear", "forecast", 0)["loss"] < found["loss"]


@pytest.fixture
def wordy(tables, monkeypatch):
    """The small task with words and gaps that tell of the target; one word only some rows have."""
    X, y, groups, time, _ = tables.TASKS["small"].read(None)
    words = pd.Series(np.where(y > 1, "high", "low")).astype("str")
    words[3], words[17], words[150:] = "rare", None, "late"
    X = X.assign(a=X["a"].mask(X["b"] > 1.5), **{"a: words, [few]": words})
    task = tables.public_tasks.PublicTask(X, y, groups, time)
    monkeypatch.setitem(tables.TASKS, "small", tables.Task(lambda home: task, False, True))
    return tables


@pytest.mark.parametrize("n_classes", [0, 2, 3])
@pytest.mark.parametrize(
    "method",
    [
        *("default", "one-hot linear", "trees, target", "pooled"),
        *("GPBoost boosting", "CatBoost", "CatBoost tuned", "LightGBM tuned"),
    ],
)
@pytest.mark.slow
def test_models_take_words_and_gaps(method, n_classes, wordy, computed):
    import table_peers

    pytest.importorskip(table_peers.PACKAGES.get(method, "sklearn"))
    if n_classes == 3 and method == "GPBoost boosting":
        pytest.skip("GPBoost has two classes at most")
    task = wordy.TASKS["small"].read(None)
    if n_classes:
        edges = np.quantile(task.y, np.arange(1, n_classes) / n_classes)
        task = task._replace(y=np.searchsorted(edges, task.y))
    wordy.TASKS["small"] = wordy.Task(lambda home: task, n_classes > 0, True)
    # CatBoost as it comes learns the noise of three classes from the rows before a forecast.
    for kind in ("inside", "forecast")[: 1 if n_classes == 3 else 2]:
        found, least = (computed(name, kind, 0) for name in (method, "mean"))
        assert found["loss"] < least["loss"]
    assert np.isfinite(computed(method, "whole", 0)["loss"])


_SLOW = ("trees, target", "MixedLM", "GPBoost mixed", "GPBoost boosting", "merf")


@pytest.mark.parametrize(
    "method",
    [
        *("default", "pooled", "hgb", "hgb_client"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in _SLOW),
    ],
)
def test_models_learn_effects_of_a_second_id(method, tables, computed, monkeypatch):
    """Of regions, which hold whole clients for a mixed model that does not take crossed ones."""
    import table_models
    import table_peers

    pytest.importorskip(table_peers.PACKAGES.get(method, "sklearn"))
    monkeypatch.setattr(table_models, "MOST_CATEGORIES", 2)  # the others as encoded targets
    task = tables.TASKS["small"].read(None)
    is_nested = method == "MixedLM"
    region = pd.factorize(task.groups)[0] % 4 if is_nested else np.arange(200) % 4
    names = pd.Series(np.array(["north", "east", "south", "west"])[region])
    task = task._replace(y=task.y + 10 * region, second=names)
    tables.TASKS["small"] = tables.Task(lambda home: task, False)
    kind = "whole" if is_nested else "inside"
    found, least = (computed(name, kind, 0) for name in (method, "mean"))
    assert found["loss"] < least["loss"] / 4


def test_a_package_that_is_missing_is_no_result(tables, computed, monkeypatch):
    import table_peers

    monkeypatch.setitem(table_peers.PACKAGES, "CatBoost", "no_such.package")
    with pytest.raises(tables.NotPossibleError, match=r"pip install no_such$"):
        computed("CatBoost", "inside", 0)


def test_columns_of_more_tables(tables):
    """Words and gaps stay; the client, and what gives the outcome away, do not."""
    table = pd.DataFrame(
        {"id": [7, 7, 8], "n": [1, 2, 3], "word": ["a", None, "b"], "y": [0, 1, 1]}
    )
    X, y, groups, time, _ = tables.more_tables._task(
        table, table["y"] == 1, "id", ["y"], table["n"]
    )
    assert X.dtypes.astype(str).to_dict() == {"n": "float64", "word": "str"}
    assert X["word"].isna().tolist() == [False, True, False]
    assert (y.tolist(), groups.tolist(), time.tolist()) == ([0, 1, 1], [7, 7, 8], [1, 2, 3])


def test_final_tables_have_to_be_asked_for(tables, monkeypatch, tmp_path, capsys):
    assert len(tables.FINAL) == 12
    for options, expected in (([], tables.DEVELOPMENT), (["--final"], tables.FINAL)):
        monkeypatch.setattr(sys, "argv", ["", "--plan", "--output", str(tmp_path), *options])
        tables.main()
        assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [*expected]
    monkeypatch.setattr(sys, "argv", ["", "--plan", "--only", "radon", "forbes"])
    with pytest.raises(SystemExit):
        tables.main()
    assert "['forbes'] not among" in capsys.readouterr().err


@pytest.fixture
def tables_page(tables):
    import tables_page

    return tables_page


def test_errors_of_peers_are_paired_and_corrected(tables, tables_page, tmp_path):
    """For splits that share training rows, by Nadeau and Bengio's correction."""
    results = tables.Results(tables.Cell, tmp_path)
    own, other = np.array([1.0, 4.0, 9.0, 4.0, 1.0]), np.array([4.0, 9.0, 9.0, 4.0, 4.0])
    for method, losses in (("stacking", own), ("one-hot linear", other), ("merf", own[:4])):
        for split, loss in enumerate(losses):
            facts = {"n_train": 80, "n_test": 20, "cpu_seconds": 2.0, "peak_mib": 3.0}
            cell = tables.Cell("small", method, "inside", split)
            results.add({**cell._asdict(), "loss": loss, **facts})
    found = tables_page.summaries("small", "inside", results.of("small"))
    assert list(found) == ["stacking", "one-hot linear"]  # merf has no line for one of the splits
    gaps = np.sqrt(other) - np.sqrt(own)
    expected = np.sqrt(np.var(gaps, ddof=1) * (1 / 5 + 20 / 80))
    peer = found["one-hot linear"]
    assert (peer.error, peer.excess) == (pytest.approx(2.4), pytest.approx(0.6))
    assert peer.excess_se == pytest.approx(expected)
    assert tables_page.best_peer(found)[0] == "one-hot linear"
    assert not tables_page.is_complete("small", "inside", results.of("small"))


def forecast(method, losses, groups, task="small"):
    """Line of a forecast with these losses of rows."""
    import tables

    facts = {"n_train": 80, "n_test": len(losses), "cpu_seconds": 2.0, "peak_mib": 3.0}
    cell = tables.Cell(task, method, "forecast", 0)
    blocks = tables._of_blocks(losses, groups)
    return {**cell._asdict(), "loss": float(losses.mean()), **facts, **blocks}


@pytest.mark.parametrize("has_classes", [False, True])
def test_errors_of_forecasts_are_clustered(has_classes, tables, tables_page):
    """As leaving out one block of clients after the other tells."""
    rng, groups = np.random.default_rng(0), np.random.default_rng(1).integers(400, size=3000)
    common = rng.gamma(2.0, size=400)[groups]
    losses = {"stacking": common * rng.gamma(3.0, size=3000), "merf": common * rng.gamma(4.0)}
    tables.TASKS["small"] = tables.Task(None, has_classes, True)
    found = {name: forecast(name, each, groups) for name, each in losses.items()}
    peer = tables_page.summaries("small", "forecast", found)["merf"]
    error = np.mean if has_classes else lambda each: math.sqrt(each.mean())
    left = [[error(each[groups % 100 != k]) for k in range(100)] for each in losses.values()]
    for expected, se in ((left[1], peer.error_se), (np.subtract(*left), peer.excess_se)):
        assert se == pytest.approx(math.sqrt(99 * np.var(expected)), rel=0.02)
    assert peer.excess == pytest.approx(error(losses["merf"]) - error(losses["stacking"]))


def test_the_summary_says_where_a_peer_is_better(tables, tables_page, tmp_path, monkeypatch):
    import tables_summary

    results, groups = tables.Results(tables.Cell, tmp_path), np.repeat(np.arange(50), 10)
    losses = np.random.default_rng(0).gamma(2.0, size=500)
    scales = {"stacking": 1.0, "default": 1.44, "pooled": 4.0, "mean": 6.25}
    for task, peer in (("produc", 0.81), ("rice", 1.21), ("forbes", 1.0)):
        for method, scale in {**scales, "CatBoost": peer}.items():
            results.add(forecast(method, scale * losses, groups, task))
    worse, *totals = tables_summary.summary(results)
    assert worse.startswith("produc forecast: worse; ")
    assert "0.833 of default, 0.500 of pooled, 0.400 of mean; 1 times the seconds" in worse
    assert [total.partition(";")[0] for total in totals] == [
        f"{name}, forecast: best on 1 of {n} tables, best or within 2 standard errors on 1"
        for name, n in (("development", 2), ("final", 1))
    ]
    assert len(list(tables_summary.summary(results, all_lines=True))) == 5


def test_the_pages_and_the_readme_are_of_the_results(tables_page):
    results = tables_page.Results(tables_page.Cell, BENCHMARKS / "tables")
    docs = BENCHMARKS.parent / "docs"
    paths = [docs / "tables.rst", *docs.glob("tables/*"), *docs.glob("_static/tables_*")]
    found = {path.relative_to(docs).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    assert found == tables_page.pages(results)
    table = tables_page.readme_table(results)
    assert table in (BENCHMARKS.parent / "README.md").read_text(encoding="utf-8")


def test_the_readme_has_tables_from_all_ranks(tables_page):
    """Ranks are those of the best method that is not ours, by its error over the stack's."""
    errors = {"a": (2.0, 1.0, 3.0), "b": (2.0, 3.0, 0.5), "c": (20.0, 9.0, 20.0)}
    shown = {
        task: {
            name: tables_page.Summary(error, 0.1, error - each[0], 0.1, 1.0, 1.0)
            for name, error in zip(("stacking", "merf", "default"), each, strict=True)
        }
        for task, each in errors.items()
    }
    assert tables_page.by_peers(shown) == ["c", "a", "b"]
    assert tables_page.spread(range(38)) == [0, 5, 11, 16, 21, 26, 32, 37]


def test_the_picture_marks_what_is_beyond_its_axis(tables_page):
    import tables_picture

    rows = [("a < b", {"default": 4.0, "merf": 1.0, "CatBoost tuned": 0.5})]
    drawn = list(ElementTree.fromstring(tables_picture.picture(rows)))
    assert "a < b" in [each.text for each in drawn]
    line = next(each for each in drawn if each.get("d", "").startswith("M180.0 "))
    *marks, right, left = drawn[-5:]  # those with a colour are on top
    places = [each.get("transform").split()[0] for each in marks]
    assert (line.get("class"), places) == (
        "stack",
        ["translate(180.0", "translate(346.0", "translate(14.0"],
    )
    assert {right.get("class"), left.get("class")} == {"far"}
    rows[0][1].update({"default": 1.4, "CatBoost tuned": 0.7})
    assert 'class="far"' not in tables_picture.picture(rows)


def test_where_another_is_better_the_page_says_why(tables_page):
    results = tables_page.Results(tables_page.Cell, BENCHMARKS / "tables")
    assert list(tables_page.unexplained(results)) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pfl_sklearn.linear_model.SeparationWarning")  # of gaps
def test_errors_of_a_stack_are_those_of_cross_val_score(tables, data_home):
    """In the lines that the page prints; other kernels round, and so choose, a little otherwise."""
    X, y, client = tables.TASKS["heart"].read(data_home)[:3]
    stack = PersonalizedStackingClassifier(unseen="population", random_state=0)
    model = ClientColumn(stack, column="client")
    splitter = ClientShuffleSplit(5, test_size=0.2, client_column="client", random_state=0)
    table = X.assign(client=client)
    splits = list(splitter.split(table))[:2]  # the others take time
    found = cross_val_score(model, table, y, cv=splits, scoring="neg_log_loss", error_score="raise")
    lines = tables.Results(tables.Cell, BENCHMARKS / "tables").of("heart")
    losses = [lines[f"heart | stacking | inside {k}"]["loss"] for k in range(2)]
    np.testing.assert_allclose(-found, losses, rtol=0.01)
