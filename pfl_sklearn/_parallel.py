"""Independent clients in parallel: chunks of batches through joblib, and progress of long fits.

A fit of many fits has a task for each of its phases, with a task for each fit in it, as
scikit-learn's callbacks see them; a search has one for each iteration. Callbacks see tasks, and no
rows.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, partial, wraps
from threading import Lock, local
from typing import Any, NamedTuple, ParamSpec, TypeAlias, TypeVar

import numpy as np
from joblib import effective_n_jobs, parallel_config
from sklearn.utils.parallel import Parallel, delayed
from threadpoolctl import OpenBLASController, ThreadpoolController

from pfl_sklearn._compat import with_callbacks
from pfl_sklearn._worker_storage import StoredValue, worker_storage

_CHUNKS_PER_JOB = 4  # clients differ in cost, so workers that are done early take another chunk

# From the name of a phase and a BatchMapper to a context with the mapper to use in that phase.
Phase: TypeAlias = Callable[[str, Any], AbstractContextManager[Any]]

P = ParamSpec("P")
R = TypeVar("R")
# Task of an iteration of the fit that runs, if callbacks watch it. Searches are deep inside fits.
_WATCHER: ContextVar[Callable[[], AbstractContextManager[Any]] | None]
_WATCHER = ContextVar("_WATCHER", default=None)


def map_batches(
    function: Callable[..., Any], batches: Iterable[tuple[Any, ...]], n_jobs: int | None = None
) -> list[Any]:
    """List of ``function(*arguments)`` for every tuple of arguments in `batches`, in their order.

    The first array of each tuple has the batch's clients first. A client's result must not depend
    on the other clients of its batch. `n_jobs` is as in scikit-learn. Linear algebra runs on one
    thread, here as in the workers: the results are the same bits.
    """
    with batch_mapper(n_jobs) as run:
        return run(function, batches)


class BatchMapper:
    """Function of batches on workers, as :func:`map_batches`, for many calls.

    A value from :meth:`store` travels once; tasks with it among their arguments get it as it was.
    `n_workers` is their number and `n_parts` the number of parts to keep rows in, so that no worker
    gets all of them (1 if none keeps any). `keeps` says whether kept values stay with the workers.
    """

    def __init__(self, n_jobs: int | None, n_workers: int, put: Any = None, parts_per_job: int = 0):
        self.n_jobs, self.n_workers, self._put = n_jobs, n_workers, put
        self.n_parts, self.stores = max(parts_per_job * n_workers, 1), put is not None

    def store(self, value: Any, everywhere: bool = False, sent: Any = None) -> Any:
        """The value as an argument of tasks, for the lifetime of this mapper.

        Say if tasks on every worker will need it, or if workers should be sent something else that
        does the same.
        """
        if self._put is None:
            return value
        return StoredValue(value, self._put(value if sent is None else sent, everywhere))

    def __call__(self, function, batches, costs=None):
        """Results of ``function(*arguments)``; `costs` are by default sizes of first arguments."""
        if self.n_workers == 1:
            return _run_in_order(function, batches)
        batches = list(batches)
        # A cluster may have lost its other workers, and joblib would run tasks here.
        if len(batches) < 2 or effective_n_jobs(self.n_jobs) == 1:
            return _run_in_order(
                function, [[_stored_value(argument) for argument in batch] for batch in batches]
            )
        costs = [batch[0].size for batch in batches] if costs is None else costs
        results: list[Any] = [None] * len(batches)
        chunks = _chunk_batches(batches, costs, _CHUNKS_PER_JOB * self.n_workers)
        run = delayed(_run_chunk)
        tasks = (run(function, *_with_references([batches[i] for i in chunk])) for chunk in chunks)
        with _explain_lost_worker():
            done = Parallel(n_jobs=self.n_jobs)(tasks)
        for chunk, chunk_results in zip(chunks, done, strict=True):
            for i, result in zip(chunk, chunk_results, strict=True):
                results[i] = result
        return results


@contextmanager
def _explain_lost_worker():
    """Say what it means when dask cancels a task."""
    try:
        yield
    except CancelledError as error:
        raise RuntimeError(
            "dask lost a worker, and with it rows that this fit had put there. Fit again."
        ) from error


@contextmanager
def batch_mapper(n_jobs: int | None = None) -> Iterator[BatchMapper]:
    """A :class:`BatchMapper`; threads are limited once."""
    with _single_thread():
        workers = effective_n_jobs(n_jobs)
        if workers == 1:
            yield BatchMapper(n_jobs, workers)
        else:
            with worker_storage() as (put, parts_per_job):
                yield BatchMapper(n_jobs, workers, put, parts_per_job)


def _chunk_batches(batches, costs, n_chunks):
    """Numbers of the batches of each chunk: together those with one kept value, of like costs."""
    first: dict[int, int] = {}
    parts = np.array([_stored_part(batch, first) for batch in batches])
    order = np.argsort(parts, kind="stable")
    # Chunks end where equal shares of the costs do, and where another part begins.
    cost = np.cumsum(np.take(costs, order))
    share = (cost - 1) * n_chunks // cost[-1]
    starts = np.diff(share, prepend=-1) + np.abs(np.diff(parts[order], prepend=-1))
    return np.split(order, np.flatnonzero(starts)[1:])


def _stored_part(batch, first):
    """Number of the first kept value of a batch, in the order in which they occur."""
    stored = next((argument for argument in batch if isinstance(argument, StoredValue)), None)
    return 0 if stored is None else first.setdefault(id(stored.reference), len(first))


def _stored_value(argument):
    return argument.value if isinstance(argument, StoredValue) else argument


class _Reference(NamedTuple):
    """Which of the references of a chunk stands for an argument."""

    number: int


def _with_references(batches):
    """Batches in which kept values are numbers, and their references, each of them once."""
    numbers: dict[int, int] = {}
    references: list[Any] = []

    def sent(argument):
        if not isinstance(argument, StoredValue):
            return argument
        number = numbers.setdefault(id(argument.reference), len(references))
        if number == len(references):
            references.append(argument.reference)
        return _Reference(number)

    return [tuple(sent(argument) for argument in batch) for batch in batches], references


def _run_in_order(function, batches):
    return [function(*batch) for batch in batches]


def _run_chunk(function, batches, references):
    """Results of a chunk; other processes, and other threads of this one, limit their own."""
    values = [reference.load() for reference in references]
    batches = [
        [
            values[argument.number] if isinstance(argument, _Reference) else argument
            for argument in batch
        ]
        for batch in batches
    ]
    # What a task fits itself is its own work: dask would send that on, with its rows.
    with _single_thread(), parallel_config(backend="sequential"):
        return _run_in_order(function, batches)


@contextmanager
def phases(estimator: Any, n_phases: int) -> Iterator[Phase]:
    """Phases of a fit decorated with ``with_callbacks``; without callbacks they do nothing."""
    # A callback cannot end the fit early: half of the folds are no model.
    if not getattr(estimator, "_skl_callbacks", []):
        yield lambda name, run: nullcontext(run)
        return
    with _fit_task(estimator, n_phases) as root:
        yield partial(_phase, estimator, root)


@contextmanager
def _fit_task(estimator, max_subtasks):
    root = estimator._init_callback_context(max_subtasks=max_subtasks)
    root.call_on_fit_task_begin(estimator=estimator)
    yield root
    root.call_on_fit_task_end(estimator=estimator)


@contextmanager
def _phase(estimator, root, name, run):
    # How many fits there will be is not known: folds decide whether there are more.
    with _subtask(estimator, root, name, None) as task:
        yield partial(_run_in_tasks, run, partial(_subtask, estimator, task))


@contextmanager
def _subtask(estimator, parent, name, max_subtasks=0):
    task = parent.subcontext(task_name=name, max_subtasks=max_subtasks)
    task.call_on_fit_task_begin(estimator=estimator)
    yield task
    task.call_on_fit_task_end(estimator=estimator)


def _run_in_tasks(run, task, function, batches, costs=None):
    """Results as of the mapper `run`, in a task for each; workers' results come all together."""
    if run.n_workers > 1:
        with task("parallel-fits"):
            return run(function, batches, costs)
    results = []
    for batch in batches:
        with task("fit"):
            results += run(function, [batch])
    return results


def with_iterations(fit: Callable[P, R]) -> Callable[P, R]:
    """Decorator of a fit: callbacks see each call of :func:`note_iteration` in it as a task."""

    @with_callbacks
    @wraps(fit)
    def watched_fit(*args: P.args, **kwargs: P.kwargs) -> R:
        estimator: Any = args[0]
        if not getattr(estimator, "_skl_callbacks", []):
            return fit(*args, **kwargs)
        # How many iterations there will be is not known, and callbacks cannot end them early.
        with _fit_task(estimator, None) as root:
            before = _WATCHER.set(partial(_subtask, estimator, root, "iteration"))
            try:
                return fit(*args, **kwargs)
            finally:
                _WATCHER.reset(before)

    return watched_fit


def note_iteration() -> None:
    """Tell the callbacks of the fit that runs in this thread, if any, of an iteration."""
    watcher = _WATCHER.get()
    if watcher is not None:
        with watcher():
            pass


class _ProcessLimits:
    """Limits of the process: the first thread to enter sets them, the last one to leave ends them.

    OpenMP counts threads for each thread of Python. Torch does so in part: it has an MKL of its
    own.
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
                _clear_controlling_thread()
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
            _clear_controlling_thread()
            if self._threads_of_torch is not None:
                sys.modules["torch"].set_num_threads(self._threads_of_torch)
            self._threads_of_torch = self._blas = None


_LIMITS = _ProcessLimits()


def _clear_controlling_thread():
    """Let other threads set the pools: newer threadpoolctl keeps OpenBLAS's to one of them."""
    clear = getattr(OpenBLASController, "clear_controlling_thread", None)
    if clear is not None:
        clear()


def _single_thread():
    """Hold linear algebra to one thread, torch's own included if it is loaded."""
    return _LIMITS.held(sys.modules.get("torch"))


@cache
def _controllers(with_torch):
    """Controllers of pools of BLAS and OpenMP; any made before torch was loaded miss torch's."""
    pools = ThreadpoolController()
    return pools.select(user_api="blas"), pools.select(user_api="openmp")
