"""Values that stay the same during a fit, put once where workers of joblib's backends read them.

Workers on this machine map a file. Those of a cluster hold the value in their memory: dask moves
tasks to it, and ray has a store on each machine. Threads read the value itself.
"""

import mmap
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from io import BytesIO
from itertools import cycle
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from joblib.parallel import get_active_backend

try:
    from cloudpickle import Pickler  # takes classes of scripts, which client ids may be of
except ImportError:
    from pickle import Pickler

_ALIGNMENT = 64  # bytes, as of numpy's own arrays
_PARTS_PER_JOB = 4  # of rows that a cluster holds, so that workers may differ in speed


class StoredValue(NamedTuple):
    """A value of this process, and what tasks send in its place."""

    value: Any
    reference: Any


class _WorkerMemory:
    """A value in the memory of a worker of dask, which learns its size from here.

    Without the size dask would move the value to tasks, and not the tasks to the value.
    """

    def __init__(self, value):
        self.value, pickler = value, _ArrayPickler(BytesIO())
        pickler.dump(value)
        self.n_bytes = sum(buffer.raw().nbytes for buffer in pickler.buffers)
        self.n_bytes += sum(array.nbytes for array in pickler.maps)

    def __sizeof__(self):
        return self.n_bytes

    def load(self):
        """The value, in a worker."""
        return self.value


class _EveryWorkerMemory:
    """A value in the memories of all workers of dask, of which each reads its own copy."""

    def __init__(self, keys, futures=()):
        self.keys, self.futures = keys, futures  # of each address; dask frees what has no future

    def __reduce__(self):
        return _EveryWorkerMemory, (self.keys,)

    def load(self):
        """The value, in a worker."""
        from distributed import get_worker

        worker: Any = get_worker()
        key = self.keys.get(worker.address)
        if key not in worker.data:
            raise RuntimeError(
                f"worker {worker.address} of dask has no rows of this fit: it came, or lost them, "
                "while the fit ran. Fit again."
            )
        return worker.data[key].load()


class _RayObject:
    """A value in ray's store of objects."""

    def __init__(self, value):
        import ray

        self.place = ray.put(value)

    def load(self):
        """The value, in a worker."""
        import ray

        return ray.get(self.place)


class _ArrayPickler(Pickler):
    """Pickler that sets apart the contents of arrays, `buffers`, and maps of files, `maps`."""

    def __init__(self, file):
        self.buffers: list[pickle.PickleBuffer] = []
        self.maps: list[np.ndarray] = []
        super().__init__(file, protocol=5, buffer_callback=self.buffers.append)

    def persistent_id(self, obj):
        """Number of a map, or None for any other object."""
        if not _is_intact_map(obj):
            return None
        self.maps.append(obj)
        return len(self.maps) - 1


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickler of what an _ArrayPickler wrote."""

    def __init__(self, file, buffers, maps):
        super().__init__(file, buffers=buffers)
        self.maps = maps

    def persistent_load(self, pid):
        """The map of that number."""
        return self.maps[pid]


class _MappedFile:
    """A value in a file of this machine. A worker maps its arrays.

    An array that maps a file of the user's stays there: joblib sends its name and place.
    """

    def __init__(self, value, path):
        self.path, self.ends = path, []
        try:
            self.maps = self._write(value)
        except OSError as error:
            raise type(error)(
                f"rows for workers cannot be written to {path} ({error.strerror or error}); make "
                "room there, or let the environment variable JOBLIB_TEMP_FOLDER name another "
                "folder."
            ) from error

    def _write(self, value):
        """Write the value, and where its arrays end; the maps in it, which stay where they are."""
        # The file is new and is removed with the fit, so nothing is replaced.
        with open(self.path, "xb") as file:
            pickler = _ArrayPickler(file)
            pickler.dump(value)
            for buffer in pickler.buffers:
                file.write(bytes(-file.tell() % _ALIGNMENT))
                self.ends.append((file.tell(), file.tell() + file.write(buffer.raw())))
        return pickler.maps

    def load(self):
        """The value, in a worker."""
        with open(self.path, "rb") as file:
            # Writes to these stay a task's own: estimators of other packages may want such arrays.
            memory = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
            buffers = [memory[start:end] for start, end in self.ends]
            return _ArrayUnpickler(file, buffers, self.maps).load()


def _is_intact_map(array):
    """Whether an array is a map of a file, or a view of one, that joblib opens as it is."""
    # It does not see writes to a map of mode "c", and takes the first byte of a reversed view for
    # its first row.
    root = array
    while isinstance(root, np.ndarray) and not isinstance(root, np.memmap):
        root = root.base
    while isinstance(root, np.memmap) and isinstance(root.base, np.memmap):
        root = root.base
    return (
        isinstance(root, np.memmap)
        and root.mode != "c"
        and root.filename is not None
        and os.path.exists(root.filename)
        and min(array.strides, default=0) >= 0
    )


@contextmanager
def worker_storage() -> Iterator[tuple[Callable[[Any, bool], Any] | None, int]]:
    """Function from a value to what tasks of the active backend send in its place, until the end.

    Its second argument is whether every worker will need the value. The second result says in how
    many parts for each job rows should be kept: 0 if each worker can read all rows where they are.
    The function is None where tasks should get the values themselves: threads share them, and of an
    unknown backend we cannot say where its workers are.
    """
    backend, _ = get_active_backend()
    name = type(backend).__name__
    with ExitStack() as stack:
        if name in ("LokyBackend", "MultiprocessingBackend"):
            yield lambda value, _: _MappedFile(value, stack.enter_context(_temporary_path())), 0
        elif name == "DaskDistributedBackend":
            yield partial(_scatter, backend.client, cycle(backend.client.ncores())), _PARTS_PER_JOB
        elif name == "RayBackend":
            yield lambda value, _: _RayObject(value), _PARTS_PER_JOB
        else:
            yield None, 0


@contextmanager
def _temporary_path():
    """Path of a new file, in the folder that joblib's are in if its environment names one."""
    parent = os.environ.get("JOBLIB_TEMP_FOLDER")
    with TemporaryDirectory(
        prefix="pfl_sklearn_", dir=parent, ignore_cleanup_errors=True
    ) as folder:
        yield os.path.join(folder, "rows")


def _scatter(client, turns, value, everywhere):
    """Reference to a value in the next worker's memory, or to copies in those of all."""
    parcel = _WorkerMemory(value)
    if not everywhere:
        return client.scatter(parcel, workers=[next(turns)], hash=False)
    # A copy has a name of its own: dask drops copies of one name.
    futures = {
        address: client.scatter(parcel, workers=[address], hash=False)
        for address in client.ncores()
    }
    keys = {address: future.key for address, future in futures.items()}
    return _EveryWorkerMemory(keys, list(futures.values()))
