"""Values that stay the same during a fit, put once where the workers of joblib's backends read them.

Workers on this machine map a file. Those of a cluster hold the value in their memory: dask moves
tasks to it, and ray has a store on each machine. Threads read the value itself.
"""

import mmap
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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


class Kept(NamedTuple):
    """A value of this process, and what a task sends in its place."""

    value: Any
    reference: Any


class Parcel:
    """A value that travels in one piece; in a list, dask would look for tasks of its own."""

    def __init__(self, value: Any):
        self.value = value

    def load(self) -> Any:
        """The value, in a worker."""
        return self.value


class _InStore:
    """A value in ray's store of objects."""

    def __init__(self, value):
        import ray

        self.place = ray.put(value)

    def load(self):
        """The value, in a worker."""
        import ray

        return ray.get(self.place)


class _ArrayPickler(Pickler):
    """Pickler that leaves out the contents of arrays, in `buffers`, and maps of files, in `maps`."""

    def __init__(self, file):
        self.buffers: list[pickle.PickleBuffer] = []
        self.maps: list[np.ndarray] = []
        super().__init__(file, protocol=5, buffer_callback=self.buffers.append)

    def persistent_id(self, obj):
        """Number of a map, or None for any other object."""
        if not is_mapped(obj):
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


class _InFile:
    """A value in a file of this machine. A worker maps its arrays.

    An array that maps a file of the user's stays there: joblib sends its name and place.
    """

    def __init__(self, value, path):
        self.path, self.ends = path, []
        with open(path, "xb") as file:
            pickler = _ArrayPickler(file)
            pickler.dump(value)
            for buffer in pickler.buffers:
                file.write(bytes(-file.tell() % _ALIGNMENT))
                self.ends.append((file.tell(), file.tell() + file.write(buffer.raw())))
        self.maps = pickler.maps

    def load(self):
        """The value, in a worker."""
        with open(self.path, "rb") as file:
            # A task's writes stay its own: estimators of other packages may want such arrays.
            memory = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
            buffers = [memory[start:end] for start, end in self.ends]
            return _ArrayUnpickler(file, buffers, self.maps).load()


def is_mapped(array: Any) -> bool:
    """Whether an array is a map of a file, or a view of one."""
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap):
            return True
        array = array.base
    return False


@contextmanager
def keeper() -> Iterator[tuple[Callable[[Any], Any] | None, int]]:
    """Function from a value to what tasks of the active backend send in its place, until the end.

    And in how many parts for each job rows should be kept: one for all jobs (0) if each worker can
    read all rows where they are. The function is None where tasks should take the values: threads
    have them, and of a backend that we do not know we cannot say where its workers are.
    """
    backend, _ = get_active_backend()
    name = type(backend).__name__
    with ExitStack() as stack:
        if name in ("LokyBackend", "MultiprocessingBackend"):
            folder = os.environ.get("JOBLIB_TEMP_FOLDER")

            def put(value):
                at = TemporaryDirectory(
                    prefix="pfl_sklearn_", dir=folder, ignore_cleanup_errors=True
                )
                return _InFile(value, os.path.join(stack.enter_context(at), "rows"))

            yield put, 0
        elif name == "DaskDistributedBackend":
            # hash=False: equal values of several fits would share a name, and end together.
            yield lambda value: backend.client.scatter(Parcel(value), hash=False), _PARTS_PER_JOB
        elif name == "RayBackend":
            yield _InStore, _PARTS_PER_JOB
        else:
            yield None, 0
