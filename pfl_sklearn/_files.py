"""Files that are replaced as a whole: a full disk or a killed process leaves the last one."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]  # a module or nothing


@contextlib.contextmanager
def replaced_file(path: Any) -> Iterator[BinaryIO]:
    """Open file whose contents replace those at `path` at the end.

    They are written next to it and reach the disk before the file is renamed. An error leaves the
    old file as it was, and no other one. Raises OSError if the file cannot be written or is not a
    regular one.
    """
    target = os.path.realpath(path)  # a link stays one, to the new file
    _check_replaceable(target)
    with _partial_file(target) as file:
        # What was readable by its owner alone stays so; before anything is in it.
        with contextlib.suppress(FileNotFoundError):
            shutil.copymode(target, file.name)
        yield file
        file.flush()
        os.fsync(file.fileno())
        if fcntl is None:
            file.close()  # such systems rename no open file
        os.replace(file.name, target)


def check_writable(path: Any) -> None:
    """Raise OSError if no file could take the place of that at `path`."""
    target = os.path.realpath(path)
    _check_replaceable(target)
    with _partial_file(target):
        pass


def remove_abandoned(path: Any) -> None:
    """Delete the partial files that killed processes left next to a file."""
    for name in glob.glob(f"{glob.escape(os.path.realpath(path))}.*.partial"):
        if _is_abandoned(name):
            with contextlib.suppress(OSError):  # another process was faster
                os.remove(name)


def _check_replaceable(target):
    """Raise OSError for a folder, a device or a pipe, and for a file that is write-protected."""
    if not os.path.exists(target):
        return
    # Another file would take the place of /dev/null, too.
    code = 0 if os.access(target, os.W_OK) else errno.EACCES
    if not os.path.isfile(target):
        code = errno.EISDIR if os.path.isdir(target) else errno.EINVAL
    if code:
        raise OSError(code, os.strerror(code), target)


@contextlib.contextmanager
def _partial_file(target):
    """Open file next to another one; it is removed at the end unless it was renamed."""
    # A lock shows that the writer lives; the system drops it when the process dies.
    # Unique, because the numbers of processes are given again, and hosts that share a disk have
    # the same ones.
    partial = f"{target}.{uuid.uuid4().hex}.partial"
    with contextlib.ExitStack() as stack:
        stack.callback(Path(partial).unlink, missing_ok=True)
        file = stack.enter_context(open(partial, "wb"))
        if fcntl is not None:
            with contextlib.suppress(OSError):  # of a disk without locks: _is_abandoned is false
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield file


def _is_abandoned(path):
    """Whether no process writes a file, on this host or on another one that shares the disk."""
    if fcntl is None:  # such systems let nobody delete an open file
        return True
    try:
        with open(path, "r+b") as file:  # network disks lock only what is open for writing
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
