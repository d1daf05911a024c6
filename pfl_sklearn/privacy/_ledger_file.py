"""A file of JSON lines that processes append to: one lock, no half line, nothing lost to a kill.

The first line is the header, every other one an entry that carries its own number.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
import uuid
from collections.abc import Callable, Iterator
from numbers import Real
from typing import Any, NamedTuple

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

_FORMAT, _VERSION = "pfl_sklearn privacy ledger", 1
_CHOICES = {"relation": ("replace_one", "add_remove"), "unit": ("client", "row")}
_SETTINGS = {"id", "budget", "delta", "relation", "unit"}
_START = json.dumps({"format": _FORMAT})[:-1].encode()


class Contents(NamedTuple):
    """What a ledger file holds."""

    header: dict[str, Any] | None  # None: not written yet
    entries: list[dict[str, Any]]
    size: int  # bytes that count; what follows is a line whose writer was killed


def create_or_read(path: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Header of the file at `path`, which is made with `settings` if it is not there.

    Raises
    ------
    OSError
        If the file can be neither read nor made.
    ValueError
        If it is something else than a ledger.
    """
    try:
        with contextlib.suppress(FileNotFoundError), _locked(path, os.O_RDONLY) as file:
            found = _read(file, path).header
            if found is not None:
                return found
        with _locked(path, os.O_RDWR | os.O_APPEND | os.O_CREAT) as file:
            found = _read(file, path).header  # by another process, meanwhile
            if found is not None:
                return found
            identity = {"format": _FORMAT, "version": _VERSION, "id": uuid.uuid4().hex}
            _append(file, 0, {**identity, **settings})
            _sync_folder(path)
            return {**identity, **settings}
    except OSError as error:
        raise type(error)(
            f"PrivacyLedger cannot open {path} ({error.strerror or error}); expected a file in an "
            "existing folder, to be read and written."
        ) from error


def checked_settings(budget: Any, delta: Any, relation: Any, unit: Any) -> dict[str, Any]:
    """Settings that were given, checked."""
    epsilon = budget
    if isinstance(budget, tuple | list) and len(budget) == 2:
        epsilon, own = budget
        if delta is not None and delta != own:
            raise ValueError(f"delta must be that of budget={budget!r}; got {delta!r}.")
        delta = own
    if epsilon is not None and not (_is_number(epsilon) and 0 < epsilon < math.inf):
        raise ValueError(
            "budget must be None, a finite epsilon above 0, or a pair (epsilon, delta); got "
            f"{budget!r}."
        )
    if delta is not None and not (_is_number(delta) and 0 < delta < 1):
        raise ValueError(f"delta must be in (0, 1); got {delta!r}.")
    for name, value in (("relation", relation), ("unit", unit)):
        if value is not None and value not in _CHOICES[name]:
            raise ValueError(
                f"{name} must be one of {', '.join(_CHOICES[name])}, or None; got {value!r}."
            )
    given = {"budget": epsilon, "delta": delta, "relation": relation, "unit": unit}
    return {
        name: float(value) if _is_number(value) else value
        for name, value in given.items()
        if value is not None
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def check_same(asked: dict[str, Any], header: dict[str, Any], path: str) -> None:
    """Raise ValueError if the file has other settings than those asked for."""
    for name, value in asked.items():
        if header.get(name) != value:
            raise ValueError(
                f"the privacy ledger {path} was made with {name}={header.get(name)!r}; got "
                f"{name}={value!r}. Leave {name} out, or take another file."
            )


def read(path: str, identity: str) -> list[dict[str, Any]]:
    """Entries of the ledger with that `identity`."""
    with _opened(path, os.O_RDONLY) as file:
        return _own_contents(file, path, identity).entries


def add(
    path: str,
    identity: str,
    make: Callable[[list[dict[str, Any]]], dict[str, Any]],
) -> None:
    """Append what `make` makes of the entries before it, unless it raises; on the disk on return.

    Nobody else reads or writes from before that until after the entry is there.
    """
    with _opened(path, os.O_RDWR | os.O_APPEND) as file:
        contents = _own_contents(file, path, identity)
        entry = make(contents.entries)
        _append(file, contents.size, {"entry": len(contents.entries) + 1, **entry})
        if not _is_at(file, path):
            raise FileNotFoundError(_gone(path))


def _own_contents(file: int, path: str, identity: str) -> Contents:
    """Contents of the file, which must still be the one that was opened first."""
    contents = _read(file, path)
    if contents.header is None or contents.header["id"] != identity:
        raise ValueError(
            f"{path} is not the ledger any more that this PrivacyLedger opened: the file was "
            "replaced. Put it back, or open the new one with PrivacyLedger(path)."
        )
    return contents


@contextlib.contextmanager
def _opened(path: str, flags: int) -> Iterator[int]:
    """The same as ``_locked``, with one sentence on what is wrong."""
    try:
        with _locked(path, flags) as file:
            yield file
    except FileNotFoundError as error:
        raise FileNotFoundError(_gone(path)) from error
    except OSError as error:
        raise type(error)(
            f"the privacy ledger {path} cannot be used ({error.strerror or error}), so that "
            "nothing was spent and no data were read."
        ) from error


@contextlib.contextmanager
def _locked(path: str, flags: int) -> Iterator[int]:
    """Descriptor of a regular file, locked against other processes and threads.

    The lock belongs to the open file, so that threads exclude each other too, and the system gives
    it back when a process dies. It is undone by name: a forked process may hold a copy of it.
    """
    if fcntl is None:
        raise OSError("this system has no fcntl, whose file locks PrivacyLedger needs")
    _check_regular(path)
    file = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX if flags & os.O_RDWR else fcntl.LOCK_SH)
        try:
            yield file
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
    finally:
        os.close(file)


def _check_regular(path: str) -> None:
    """Raise OSError for a folder, a device or a pipe, which would wait for a writer if opened."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")


def _read(file: int, path: str) -> Contents:
    """Contents of an open file."""
    return parse(os.pread(file, os.fstat(file).st_size, 0), path)


def parse(data: bytes, path: str) -> Contents:
    """Contents of the bytes of a ledger file.

    An entry is on the disk before its fit reads any data. So a last line that breaks off belongs to
    a fit that never began, and does not count; one that lacks nothing but its end of line does.
    """
    lines = data.split(b"\n")
    tail = lines.pop()
    size = len(data) - len(tail)
    if _decoded(tail) is not None:
        lines.append(tail)
        size = len(data)
    if not lines and _START[: len(data)] == data[: len(_START)]:
        return Contents(None, [], 0)
    header = _checked_header(_decoded(lines[0]) if lines else None, path)
    entries = [_decoded(line) for line in lines[1:]]
    for number, entry in enumerate(entries, 1):
        _check_entry(entry, number, path)
    return Contents(header, entries, size)  # type: ignore[arg-type]


def _decoded(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line, or None if it is no such thing."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _checked_header(header: dict[str, Any] | None, path: str) -> dict[str, Any]:
    if header is None or header.get("format") != _FORMAT:
        raise ValueError(
            f"{path} is not a privacy ledger: expected a file that PrivacyLedger made, or none."
        )
    if header.get("version") != _VERSION:
        raise ValueError(
            f"the privacy ledger {path} has version {header.get('version')!r} of the format; "
            f"expected {_VERSION}."
        )
    if _SETTINGS - header.keys():
        raise ValueError(
            f"the first line of the privacy ledger {path} must have "
            f"{', '.join(sorted(_SETTINGS))}; got {', '.join(header)}; put it back from a copy."
        )
    return header


def _check_entry(entry: dict[str, Any] | None, number: int, path: str) -> None:
    """Raise ValueError unless line `number` + 1 is the entry of that number."""
    where = f"line {number + 1} of the privacy ledger {path}"
    if entry is None or not {"entry", "time", "what", "unit", "events"} <= entry.keys():
        raise ValueError(
            f"{where} cannot be read as an entry, so that what was spent is not known; put the "
            "file back from a copy."
        )
    if entry["entry"] != number:
        raise ValueError(
            f"{where} is entry {entry['entry']!r} where {number} was expected: lines were lost or "
            "added, so that what was spent is not known; put the file back from a copy."
        )


def _append(file: int, size: int, values: dict[str, Any]) -> None:
    """Write one line after the first `size` bytes and wait until it is on the disk.

    What follows these bytes is a line that broke off. If the line cannot be written as a whole, as
    on a full disk, the file is left without it.
    """
    if os.fstat(file).st_size > size:
        os.ftruncate(file, size)
    line = json.dumps(values, allow_nan=False).encode() + b"\n"
    if size and os.pread(file, 1, size - 1) != b"\n":
        line = b"\n" + line
    try:
        if os.write(file, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(file)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(file, size)
        raise


def _is_at(file: int, path: str) -> bool:
    """Whether the open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _gone(path: str) -> str:
    return (
        f"the privacy ledger {path} is gone, or out of reach of this machine, and with it the "
        "record of what was spent. Put it back, or start a new one with PrivacyLedger(path)."
    )


def _sync_folder(path: str) -> None:
    """Wait until a new file's name is on the disk."""
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
