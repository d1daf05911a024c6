"""Batches in parallel: order, chunks, backends, threads of the linear algebra.

The same bits are those of workers on one machine, with the same kernel of the linear algebra.
"""

import math
import subprocess
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from joblib import parallel_config
from threadpoolctl import threadpool_info, threadpool_limits

from pfl_sklearn import _parallel
from pfl_sklearn._clients import client_batches
from pfl_sklearn._parallel import map_batches
from tests.helpers.interruption import run_until
from tests.helpers.slow import slow


def squares(clients, rows):
    """What a batch is, and a product that rounds differently if its order changes."""
    return clients, rows @ rows.transpose(0, 2, 1)


def threads(clients):
    """Threads that the linear algebra may use in a worker."""
    return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]


def worker(clients):
    return threading.get_ident()


def fail(clients):
    raise ValueError(f"client {clients[0]} is bad")


def batches(sizes):
    rng = np.random.default_rng(0)
    first, found = 0, []
    for size in sizes:
        found.append((np.arange(first, first + size), rng.normal(size=(size, 4, 3))))
        first += size
    return found


@pytest.mark.parametrize("sizes", [[5], [1] * 3, [7] * 20, [1, 1, 1, 500, 1, 1], [500, 1, 1]])
@pytest.mark.parametrize("n_jobs", [None, 1, 2, 3, -1])
def test_results_come_in_the_order_of_the_batches_with_the_same_bits(sizes, n_jobs):
    given = batches(sizes)
    with parallel_config(backend="threading"):
        found = map_batches(squares, given, n_jobs)
    assert len(found) == len(sizes)
    for (clients, rows), (same, products) in zip(given, found, strict=True):
        np.testing.assert_array_equal(same, clients)
        np.testing.assert_array_equal(products, rows @ rows.transpose(0, 2, 1))


@pytest.mark.slow
def test_processes_give_the_same_bits():
    given = batches([3, 40, 1, 7, 7])
    alone, together = (map_batches(squares, given, n_jobs) for n_jobs in (1, 2))
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one[1], other[1])


def test_nothing_to_do():
    assert map_batches(squares, [], 2) == []
    assert map_batches(squares, [], None) == []


@pytest.mark.parametrize("n_jobs", [1, *slow([2])])
def test_linear_algebra_runs_on_one_thread_and_gets_its_threads_back(n_jobs):
    with threadpool_limits(2, "blas"):
        before = threads(None)
        given = [(np.arange(3),), (np.arange(3),)]
        found = map_batches(threads, given, n_jobs)
        assert threads(None) == before
    assert len(before) > 0
    assert all(count == 1 for counts in found for count in counts)
    assert all(len(counts) == len(before) for counts in found)


def test_threads_as_workers_leave_the_linear_algebra_as_it_was():
    """Limits of their own would end each other: the last to leave restores what the first set."""
    barrier = threading.Barrier(2)

    def meet(clients):
        barrier.wait(timeout=30)
        time.sleep(0.2 * clients[0])
        return threads(clients)

    with threadpool_limits(2, "blas"):
        before = threads(None)
        with parallel_config(backend="threading", n_jobs=2):
            found = map_batches(meet, [(np.array([0]),), (np.array([1]),)])
        after = threads(None)
    assert all(count == 1 for counts in found for count in counts)
    assert after == before


def test_calls_from_several_threads_may_end_in_any_order(monkeypatch):
    """The second one must keep its limit when the first one ends, and leave nothing behind."""
    torch, events = FakeTorch(), [threading.Event() for _ in range(3)]
    first_began, second_began, first_ended = events
    monkeypatch.setitem(sys.modules, "torch", torch)

    def first(clients):
        first_began.set()
        assert second_began.wait(timeout=30)

    def second(clients):
        second_began.set()
        assert first_ended.wait(timeout=30)
        return [*threads(None), torch.threads]

    def call_first():
        map_batches(first, [(np.zeros(1),)])
        first_ended.set()

    with ThreadPoolExecutor(1) as other:
        limits = other.submit(threadpool_limits, 2, "blas").result()
        before = threads(None)
        call = other.submit(call_first)
        assert first_began.wait(timeout=30)
        (found,) = map_batches(second, [(np.zeros(1),)])
        call.result()
        after = threads(None)
        other.submit(limits.restore_original_limits).result()
    assert set(found) == {1}
    assert set(before) == {2}
    assert after == before
    assert torch.threads == 2


def test_an_interruption_at_any_call_leaves_the_threads_as_they_were(monkeypatch):
    """Also while the limits are set or given back; a limit that stays is every later fit's."""
    torch = FakeTorch()
    monkeypatch.setitem(sys.modules, "torch", torch)

    def act():
        map_batches(squares, batches([1, 2]))
        raise KeyboardInterrupt

    with threadpool_limits(2, "blas"):
        before = threads(None)
        for _ in range(2):  # the second one without what is done once and kept
            n_calls = run_until(act, math.inf)
        for place in range(1, n_calls + 1):
            assert run_until(act, place) == place
            assert [*threads(None), torch.threads] == [*before, 2]
            assert map_batches(threads, [(np.zeros(1),)]) == [[1] * len(before)]
    assert n_calls > 5


def test_the_number_of_jobs_of_joblib_is_taken_over():
    given = [(np.arange(1),)] * 40
    assert set(map_batches(worker, given)) == {threading.get_ident()}
    with parallel_config(backend="threading", n_jobs=2):
        assert set(map_batches(worker, given)) != {threading.get_ident()}
        assert set(map_batches(worker, given, 1)) == {threading.get_ident()}


def test_chunks_are_of_like_cost(monkeypatch):
    """Few chunks a job, contiguous, none empty, and no batch twice."""
    chunks = []

    class Recorder:
        def __init__(self, n_jobs):
            assert n_jobs == 2

        def __call__(self, tasks):
            return [function(*arguments) for function, arguments, _ in tasks]

    def run(function, part, references):
        assert not references
        chunks.append([int(batch[0].size) for batch in part])
        return [function(*batch) for batch in part]

    monkeypatch.setattr(_parallel, "Parallel", Recorder)
    monkeypatch.setattr(_parallel, "delayed", lambda function: lambda *args: (function, args, {}))
    monkeypatch.setattr(_parallel, "_run_chunk", run)
    sizes = [10] * 80 + [200] + [1] * 50
    found = map_batches(lambda clients: clients.size, [(np.zeros(size),) for size in sizes], 2)
    assert found == sizes
    assert [size for chunk in chunks for size in chunk] == sizes
    assert 2 <= len(chunks) <= 8
    assert all(chunks)
    even = sum(sizes) / 8
    assert max(sum(chunk) for chunk in chunks) <= 2 * even + 200


@pytest.mark.parametrize("n_jobs", [1, *slow([2])])
def test_errors_come_through(n_jobs):
    with pytest.raises(ValueError, match="client 4 is bad"):
        map_batches(fail, [(np.array([4]),), (np.array([4]),)], n_jobs)


@pytest.mark.slow
def test_batches_of_clients_as_they_are_used():
    codes = np.random.default_rng(0).permutation(np.repeat(np.arange(30), np.arange(1, 31)))
    values = np.random.default_rng(1).normal(size=len(codes))
    given = [(batch.clients, values[batch.rows]) for batch in client_batches(codes, 30, 40)]
    sums = np.empty(30)
    for (clients, _), found in zip(given, map_batches(totals, given, 2), strict=True):
        sums[clients] = found
    np.testing.assert_allclose(sums, np.bincount(codes, values), atol=1e-12)


def totals(clients, values):
    return values.sum(axis=1)


class FakeTorch(types.ModuleType):
    """Stands in for torch, which sets its threads by itself."""

    def __init__(self):
        super().__init__("torch")
        self.threads = 2

    def get_num_threads(self):
        return self.threads

    def set_num_threads(self, threads):
        self.threads = threads


def test_torch_runs_on_one_thread_if_it_is_loaded(monkeypatch):
    """Even if the thread pools were listed before it was."""
    map_batches(squares, batches([1, 2]))
    torch = FakeTorch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert map_batches(lambda clients, rows: torch.threads, batches([1, 2])) == [1, 1]
    assert torch.threads == 2
    with pytest.raises(ValueError, match="client 0"):
        map_batches(lambda clients, rows: fail(clients), batches([1]))
    assert torch.threads == 2


@pytest.mark.slow
def test_the_real_torch_runs_on_one_thread():
    script = """
import numpy as np
from pfl_sklearn._parallel import map_batches
batch = [(np.zeros(3),)]
map_batches(np.sum, batch)
import torch
torch.set_num_threads(2)
assert map_batches(lambda x: torch.get_num_threads(), batch) == [1]
assert torch.get_num_threads() == 2
"""
    pytest.importorskip("torch")
    subprocess.run([sys.executable, "-c", script], check=True)
