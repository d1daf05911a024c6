"""The privacy ledger under copies, threads, processes and kills: nothing gets lost."""

import copy
import math
import os
import pickle
import random
import resource
import signal
import time

import joblib
import numpy as np
import pytest
import sklearn
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV

from pfl_sklearn import GaussianMean
from pfl_sklearn.datasets import make_gaussian_clients
from pfl_sklearn.metrics import ClientScorer
from pfl_sklearn.model_selection import ClientKFold
from pfl_sklearn.priors import GaussianPrior
from pfl_sklearn.privacy import (
    BudgetExceeded,
    PrivacyLedger,
    PureEvent,
    _ledger_file,
    gdp_epsilon,
    gdp_mu,
)
from tests.helpers.ledgers import DELTA, FORK, in_child, numbers, run_at_once, spend
from tests.helpers.slow import slow

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")

# Copies, threads and processes.


def test_copies_are_the_same_ledger(path, monkeypatch):
    monkeypatch.chdir(path.parent)
    ledger = PrivacyLedger(path.name, budget=(4.0, DELTA))
    copies = [copy.copy(ledger), copy.deepcopy(ledger), pickle.loads(pickle.dumps(ledger))]
    copies.append(clone(GaussianMean(ledger=ledger)).ledger)
    monkeypatch.chdir("/")
    for each in copies:
        assert each == ledger
        assert hash(each) == hash(ledger)
        spend(each)
    assert numbers(ledger) == [1, 2, 3, 4]
    assert ledger != PrivacyLedger(path.with_name("other"))


def test_a_link_is_the_same_ledger(path):
    ledger = PrivacyLedger(path)
    link = path.with_name("link")
    link.symlink_to(path.name)
    linked = PrivacyLedger(link)
    assert linked == ledger
    assert hash(linked) == hash(ledger)
    assert linked.path == str(path)
    assert numbers(spend(linked)) == numbers(ledger) == [1]
    dangling = path.with_name("dangling")
    dangling.symlink_to("not yet")
    assert PrivacyLedger(dangling) == PrivacyLedger(path.with_name("not yet"))
    circle = path.with_name("circle")
    circle.symlink_to(circle.name)
    with pytest.raises(OSError, match=r"PrivacyLedger.*circle.*Too many levels of symbolic links"):
        PrivacyLedger(circle)


CLIENTS = make_gaussian_clients(60, 6, random_state=0)
EPSILONS = [0.5, 1.0, 2.0]


def search(ledger, n_jobs=2, **params):
    """7 fits: 3 candidates in 2 folds, and the refit."""
    estimator = GaussianMean(
        GaussianPrior(covariance=1.0), noise_variance=1.0, clip_norm=4.0, ledger=ledger
    )
    with sklearn.config_context(enable_metadata_routing=True):
        return GridSearchCV(
            estimator,
            {"epsilon": EPSILONS},
            scoring=ClientScorer("r2"),
            cv=ClientKFold(2, random_state=0),
            n_jobs=n_jobs,
            **params,
        ).fit(CLIENTS.data, CLIENTS.target, groups=CLIENTS.groups)


@pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")
@pytest.mark.parametrize("backend", ["threading", *slow(["loky"])])
def test_seven_fits_are_seven_entries(backend, path):
    ledger = PrivacyLedger(path)
    with joblib.parallel_config(backend=backend):
        chosen = search(ledger).best_params_["epsilon"]
    assert numbers(ledger) == list(range(1, 8))
    spent = sorted(entry["events"][0]["mu_replace_one"] for entry in ledger.entries)
    expected = sorted(gdp_mu(epsilon, DELTA) for epsilon in [*EPSILONS, *EPSILONS, chosen])
    np.testing.assert_allclose(spent, expected, rtol=1e-9)
    assert ledger.total() == pytest.approx(gdp_epsilon(np.linalg.norm(expected), DELTA))
    processes = {entry["process"] for entry in ledger.entries}
    assert (processes == {os.getpid()}) == (backend != "loky")


@pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")
def test_a_search_stops_at_its_budget(path):
    ledger = PrivacyLedger(path, budget=(1.5, DELTA))
    with pytest.raises(BudgetExceeded, match=r"GaussianMean.*epsilon = 1\b.*\b1\.5\b"):
        search(ledger, n_jobs=1, error_score="raise")
    n_before = len(ledger.entries)
    assert 2 <= n_before < 7
    assert ledger.total() <= 1.5


def test_four_processes_at_once(path):
    """They make one ledger, and none of their entries is lost."""
    queue, start = FORK.SimpleQueue(), FORK.Barrier(4)

    def work():
        start.wait()
        ledger = PrivacyLedger(path, budget=(50.0, DELTA))
        queue.put(ledger)
        spend(ledger, 5)

    assert run_at_once([work] * 4) == [0] * 4
    assert len({queue.get() for _ in range(4)}) == 1
    ledger = PrivacyLedger(path)
    assert numbers(ledger) == list(range(1, 21))
    assert len({entry["process"] for entry in ledger.entries}) == 4
    assert ledger.total() == pytest.approx(gdp_epsilon(0.2 * math.sqrt(20), DELTA))


@pytest.mark.slow
def test_a_budget_holds_between_threads_and_processes(path):
    """Checking and writing are one step: 10 of 32 fits that start together are allowed."""

    def attempt(ledger):
        try:
            spend(ledger, events=[PureEvent(0.25, 0.0, "replace_one")])
        except BudgetExceeded:
            return 0
        return 1

    def threads(ledger):
        tasks = (joblib.delayed(attempt)(ledger) for _ in range(8))
        return sum(joblib.Parallel(n_jobs=4, backend="threading")(tasks))

    ledger = PrivacyLedger(path, budget=(2.5, 1e-9))
    queue = FORK.SimpleQueue()
    run_at_once([lambda: queue.put(threads(ledger))] * 4)
    assert sum(queue.get() for _ in range(4)) == 10
    assert numbers(ledger) == list(range(1, 11))


# Kills and broken lines.


@pytest.mark.slow
def test_killed_processes_lose_no_entry(path):
    """Every entry whose writer returned is in the file, and at most one more of each writer."""
    ledger = PrivacyLedger(path)
    draw = random.Random(0)
    n_acknowledged = 0
    for _ in range(4):
        before = len(ledger.entries)
        receiver, sender = os.pipe()
        processes = [FORK.Process(target=_spend_forever, args=(path, sender)) for _ in range(2)]
        for process in processes:
            process.start()
        os.close(sender)
        time.sleep(draw.uniform(0.005, 0.03))
        for process in processes:
            os.kill(process.pid, signal.SIGKILL)
        for process in processes:
            process.join()
        with open(receiver, "rb") as file:
            acknowledged = len(file.read())
        added = len(PrivacyLedger(path).entries) - before
        assert acknowledged <= added <= acknowledged + len(processes)
        n_acknowledged += acknowledged
    assert n_acknowledged > 4
    spend(ledger)
    assert path.read_bytes().endswith(b"\n")
    assert numbers(ledger) == list(range(1, len(ledger.entries) + 1))


def _spend_forever(path, sender):
    ledger = PrivacyLedger(path)
    while True:
        spend(ledger)
        os.write(sender, b"x")


def test_a_writer_killed_in_the_middle_of_its_line(path):
    """The half line belongs to a fit that never began; its lock goes with it."""
    ledger = spend(PrivacyLedger(path), 2)
    whole = path.read_bytes()

    def work():
        write = os.write

        def half(file, line):
            write(file, line[: len(line) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

        _ledger_file.os.write = half
        spend(ledger)

    process = FORK.Process(target=work)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert len(path.read_bytes()) > len(whole)
    assert numbers(ledger) == [1, 2]
    spend(ledger)
    assert numbers(ledger) == [1, 2, 3]
    assert path.read_bytes().startswith(whole)


def test_a_line_that_breaks_off_anywhere_does_not_count(path):
    ledger = spend(PrivacyLedger(path), 3)
    data = path.read_bytes()
    start = data[:-1].rindex(b"\n") + 1
    for end in range(start, len(data)):
        path.write_bytes(data[:end])
        n_entries = 3 if end == len(data) - 1 else 2  # but for its end of line it is all there
        assert len(ledger.entries) == n_entries
        if end % 7 == 0 or end >= len(data) - 2:
            spend(ledger)
            assert numbers(ledger) == list(range(1, n_entries + 2))
    path.write_bytes(data + bytes(50))  # as a power cut may leave it
    assert numbers(spend(ledger)) == [1, 2, 3, 4]


def test_a_header_that_breaks_off_is_written_again(path):
    PrivacyLedger(path, budget=4.0)
    header = path.read_bytes()
    for end in range(len(header) - 1):
        path.write_bytes(header[:end])
        assert PrivacyLedger(path, budget=3.0).budget == (3.0, DELTA)
    path.write_bytes(header[:-1])
    assert PrivacyLedger(path).budget == (4.0, DELTA)
    assert numbers(spend(PrivacyLedger(path), 2)) == [1, 2]


def test_a_full_disk_leaves_the_file_as_it_was(path):
    ledger = spend(PrivacyLedger(path), 2)
    before = path.read_bytes()

    def work():
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 40, -1))
        spend(ledger)

    message = in_child(work)
    assert message.startswith(f"OSError: the privacy ledger {path} cannot be used (No space left")
    assert path.read_bytes() == before
    assert numbers(spend(ledger)) == [1, 2, 3]
