"""Independent clients in parallel: chunks of batches through joblib."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from threading import Lock, local
from typing import Any

import numpy as np
from joblib import effective_n_jobs
from sklearn.utils.parallel import Parallel, delayed
from threadpoolctl import OpenBLASController, ThreadpoolController

_CHUNKS_PER_JOB = 4  # clients differ in cost, so workers that are done early take another chunk


def map_batches(
    function: Callable[..., Any], batches: Iterable[tuple[Any, ...]], n_jobs: int | None = None
) -> list[Any]:
    """Results of ``function(*arguments)`` for every tuple of arguments, in their order.

    Linear algebra runs on one thread, here as in the workers: the results are the same bits.

    Parameters
    ----------
    function : callable
        What it computes for a client must not depend on the other clients of the batch.
    batches : iterable of tuples
        Arguments; the first array of each has the batch's clients first.
    n_jobs : int or None
        As everywhere in scikit-learn; None is one job, or what ``joblib.parallel_config`` says.

    Returns
    -------
    list
    """
    with batch_mapper(n_jobs) as (run, _):
        return run(function, batches)


@contextmanager
def batch_mapper(n_jobs: int | None = None) -> Iterator[tuple[Callable[..., list[Any]], int]]:
    """Function ``run(function, batches)`` that is :func:`map_batches`, and the number of workers.

    For many calls: threads are limited once.
    """
    with _one_thread():
        workers = effective_n_jobs(n_jobs)
        if workers == 1:
            yield _run_in_order, workers
        else:
            yield partial(_run_in_chunks, n_jobs=n_jobs, workers=workers), workers


def _run_in_order(function, batches):
    return [function(*batch) for batch in batches]


def _run_in_chunks(function, batches, n_jobs, workers):
    batches = list(batches)
    if len(batches) < 2:
        return _run_in_order(function, batches)
    # Chunks end where equal shares of the numbers in the first arguments do.
    cost = np.cumsum([batch[0].size for batch in batches])
    chunk = (cost - 1) * _CHUNKS_PER_JOB * workers // cost[-1]
    starts = np.flatnonzero(np.diff(chunk, prepend=-1))
    ends = [*starts[1:], len(batches)]
    chunks = [batches[start:end] for start, end in zip(starts, ends, strict=True)]
    run = delayed(_run)
    done = Parallel(n_jobs=n_jobs)(run(function, chunk) for chunk in chunks)
    return [result for results in done for result in results]


def _run(function, batches):
    """Results of a chunk; other processes, and other threads of this one, limit their own."""
    with _one_thread():
        return _run_in_order(function, batches)


class _ProcessLimits:
    """Limits that are the process's: its first thread to come sets them, its last one ends them.

    OpenMP counts threads for each thread of Python, torch partly so: it has an MKL of its own.
    """

    def __init__(self):
        self._lock, self._here = Lock(), local()
        self._holders: set[object] = set()
        self._blas: Any = None  # limits of the BLAS in force, while there are holders
        self._threads_of_torch: int | None = None

    @contextmanager
    def held(self, torch):
        """Hold this thread to one thread of linear algebra; torch is None if it is not loaded."""
        if getattr(self._here, "held", False):
            yield
            return
        blas, openmp = _controllers(torch is not None)
        holder = object()
        try:
            self._begin(holder, blas, torch)
            self._here.held = True
            with openmp.limit(limits=1):
                yield
        finally:
            self._here.held = False
            try:
                self._end(holder)
            except BaseException:  # Ctrl-C: a limit that stays would be every later fit's
                self._end(holder)
                raise

    def _begin(self, holder, blas, torch):
        with self._lock:
            if self._blas is None:  # BLAS has one number of threads for the whole process
                self._blas = blas.limit(limits=1)
                _let_go()
            if torch is not None:
                if self._threads_of_torch is None:
                    self._threads_of_torch = torch.get_num_threads()
                torch.set_num_threads(1)
            self._holders.add(holder)

    def _end(self, holder):
        """Let a holder go; also one whose beginning, or end, was interrupted."""
        with self._lock:
            self._holders.discard(holder)
            if self._holders or self._blas is None:  # the last one restores the limits
                return
            self._blas.restore_original_limits()
            _let_go()
            if self._threads_of_torch is not None:
                sys.modules["torch"].set_num_threads(self._threads_of_torch)
            self._threads_of_torch = self._blas = None


_LIMITS = _ProcessLimits()


def _let_go():
    """Let other threads set the pools: newer threadpoolctl keeps OpenBLAS's to one of them."""
    clear = getattr(OpenBLASController, "clear_controlling_thread", None)
    if clear is not None:
        clear()


def _one_thread():
    """Hold linear algebra to one thread, torch's own included if it is loaded."""
    return _LIMITS.held(sys.modules.get("torch"))


@cache
def _controllers(with_torch):
    """Controllers of pools of BLAS and OpenMP; any made before torch was loaded miss torch's."""
    pools = ThreadpoolController()
    return pools.select(user_api="blas"), pools.select(user_api="openmp")
