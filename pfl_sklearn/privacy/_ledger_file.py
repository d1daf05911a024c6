"""The file of a ledger: JSON lines that several processes append to under a lock.

The first line is the header. Every other line is an entry with its number and the SHA-256 of the
line before it. Every line ends with its own checksum, because no hash covers the last line. A
killed process leaves no half entry that counts and loses no entry.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import math
import os
import uuid
import zlib
from collections.abc import Callable, Iterator
from numbers import Real
from typing import Any, NamedTuple

from pfl_sklearn.privacy._accounting._events import check_value

try:
    import fcntl
except ImportError:  # not a POSIX system: no lock, hence no ledger, but the package can be imported
    fcntl = None  # type: ignore[assignment]

# Settings of a new ledger where none are given. The relation is "replace_one", because local
# mechanisms and private clustering have a finite epsilon under no other.
_DEFAULTS = {
    "budget": None,
    "delta": 1e-5,
    "relation": "replace_one",
    "unit": "client",
    "period": None,
}
_FORMAT, _VERSION = "pfl_sklearn privacy ledger", 3
_CHOICES = {
    "relation": ("replace_one", "zero_out", "add_remove"),
    "unit": ("client", "row", "event"),
    "period": ("year", "quarter", "month"),
}
_SETTINGS = {"id", *_DEFAULTS}
# "process", "seed", "owner" and "purpose" may be missing: the total needs none of them.
_ENTRY_KEYS = {"entry", "time", "what", "unit", "events", "previous"}
_CHECKSUM = "crc32"  # of the line without it
# Every ledger begins like this. A file that holds only a part of it was cut off when it was
# created.
_HEADER_START = json.dumps({"format": _FORMAT})[:-1].encode()


class LedgerContents(NamedTuple):
    """Contents of a ledger file."""

    header: dict[str, Any] | None  # None: not written yet
    entries: list[dict[str, Any]]
    size: int  # bytes that count; a line whose writer was killed may follow
    hash: str  # of the last line; the next entry will hold it


def create_or_read(path: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Header of the file at `path`, which must have `settings`; a missing file is created.

    Raises OSError if the file can be neither read nor created, and ValueError if it is no ledger or
    was created with other settings.
    """
    header = None
    try:
        # Reading comes first, so that one can inspect a ledger without the right to write to it.
        with contextlib.suppress(FileNotFoundError), _locked(path, os.O_RDONLY) as file:
            header = _read(file, path).header
        if header is None:
            if "period" in settings and "budget" not in settings:
                raise ValueError(
                    f"period={settings['period']!r} has no effect without a budget; give both."
                )
            with _locked(path, os.O_RDWR | os.O_APPEND | os.O_CREAT) as file:
                header = _read(file, path).header  # another process may have created it meanwhile
                if header is None:
                    identity = {"format": _FORMAT, "version": _VERSION, "id": uuid.uuid4().hex}
                    header = {**identity, **_DEFAULTS, **settings}
                    # From byte 0: a process that was killed here may have left half a line.
                    _append(file, 0, header)
                    _sync_folder(path)
    except OSError as error:
        raise type(error)(
            f"PrivacyLedger cannot open {path} ({error.strerror or error}); expected a readable "
            "and writable file in an existing folder."
        ) from error
    for name, value in settings.items():
        if header.get(name) != value:
            raise ValueError(
                f"the privacy ledger {path} was created with {name}={header.get(name)!r}; got "
                f"{name}={value!r}. Omit {name} or use another file."
            )
    return header


def checked_settings(
    budget: Any, delta: Any, relation: Any, unit: Any, period: Any
) -> dict[str, Any]:
    """Settings of a ledger that are not None, by name; ValueError if one is out of range."""
    # A pair sets delta too. Giving the same delta again is allowed, so that settings can be reused.
    epsilon = budget
    if isinstance(budget, tuple | list) and len(budget) == 2:
        epsilon, budget_delta = budget
        if delta not in (None, budget_delta):
            raise ValueError(f"delta must equal that of budget={budget!r}; got {delta!r}.")
        delta = budget_delta
    # No budget is None and not infinity, which JSON lacks.
    valid = epsilon is None or (_is_number(epsilon) and 0 < epsilon < math.inf)
    expected = "None, a finite epsilon above 0, or a pair (epsilon, delta)"
    check_value("budget", budget, valid, expected)
    valid = delta is None or (_is_number(delta) and 0 < delta < 1)
    check_value("delta", delta, valid, "in (0, 1)")
    choice = {"relation": relation, "unit": unit, "period": period}
    for name, value in choice.items():
        choices = ", ".join(_CHOICES[name])
        check_value(name, value, value in (None, *_CHOICES[name]), f"one of {choices}, or None")
    # None comes from the file. Plain floats survive JSON unchanged, so settings can be compared for
    # equality.
    settings = {"budget": epsilon, "delta": delta, **choice}
    return {
        name: float(value) if _is_number(value) else value
        for name, value in settings.items()
        if value is not None
    }


def _is_number(value: Any) -> bool:
    """Whether a value is a real number."""
    # True is a Real, too, and would be a budget of 1.
    return isinstance(value, Real) and not isinstance(value, bool)


def read_entries(path: str, identity: str) -> list[dict[str, Any]]:
    """Entries of the ledger with this `identity`."""
    with _opened(path, identity, os.O_RDONLY) as (_, contents):
        return contents.entries


def append_entry(
    path: str, identity: str, make: Callable[[list[dict[str, Any]]], dict[str, Any]]
) -> None:
    """Append the entry that `make` returns for the entries so far, unless `make` raises."""
    # The file stays locked from reading to writing. On return, the entry is on the disk.
    with _opened(path, identity, os.O_RDWR | os.O_APPEND) as (file, contents):
        entry = make(contents.entries)
        number = len(contents.entries) + 1  # counted from 1; a gap shows that lines were lost
        _append(file, contents.size, {"entry": number, **entry, "previous": contents.hash})
        # Checked after writing: if the file was replaced meanwhile, nobody will read the entry.
        if not os.path.samestat(os.fstat(file), os.stat(path)):
            raise FileNotFoundError(path)


@contextlib.contextmanager
def _opened(path: str, identity: str, flags: int) -> Iterator[tuple[int, LedgerContents]]:
    """Locked descriptor and contents of the ledger with this `identity`."""
    try:
        with _locked(path, flags) as file:
            contents = _read(file, path)
            # A new file at the same path lacks the record of what was spent.
            if contents.header is None or contents.header["id"] != identity:
                raise ValueError(
                    f"{path} is no longer the ledger that this PrivacyLedger opened: the file was "
                    "replaced. Restore it, or open the new one with PrivacyLedger(path)."
                )
            yield file, contents
    except FileNotFoundError as error:  # a file created anew would start the record at zero
        raise FileNotFoundError(
            f"the privacy ledger {path} no longer exists, or this machine cannot reach it, so the "
            "record of what was spent is missing. Restore it, or start a new one with "
            "PrivacyLedger(path)."
        ) from error
    except OSError as error:
        raise type(error)(
            f"the privacy ledger {path} cannot be used ({error.strerror or error}); nothing was "
            "spent and no data were read."
        ) from error


@contextlib.contextmanager
def _locked(path: str, flags: int) -> Iterator[int]:
    """Descriptor of a regular file, locked against other processes and threads."""
    # The lock belongs to the open file: threads exclude each other too, and the system releases it
    # when a process dies. We unlock explicitly, because a forked process may hold a copy of the
    # descriptor.
    if fcntl is None:
        raise OSError("this system lacks fcntl, so the file cannot be locked")
    # Folders, devices and pipes are refused. Opening a pipe might wait for a writer for ever.
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(errno.EINVAL, "not a regular file")
    file = os.open(path, flags | os.O_CLOEXEC, 0o666)  # less the umask
    with contextlib.ExitStack() as at_the_end:
        at_the_end.callback(os.close, file)
        # Readers share the lock. A writer excludes all others, so nobody reads half a line.
        fcntl.flock(file, fcntl.LOCK_EX if flags & os.O_RDWR else fcntl.LOCK_SH)
        at_the_end.callback(fcntl.flock, file, fcntl.LOCK_UN)  # runs before the file is closed
        yield file


def _read(file: int, path: str) -> LedgerContents:
    """Contents of an open file."""
    return parse(os.pread(file, os.fstat(file).st_size, 0), path)


def parse(data: bytes, path: str) -> LedgerContents:
    """Contents of the bytes of a ledger file."""
    # An entry is on the disk before its fit reads any data. An incomplete last line therefore
    # belongs to a fit that never began, and does not count; a last line that lacks only its newline
    # does.
    lines = data.split(b"\n")
    tail = lines.pop()
    size = len(data) - len(tail)
    # A whole object after the last newline: only the newline was lost or changed, and the fit may
    # have begun.
    if _begins_with_object(tail):
        lines.append(tail)
        size = len(data)
    # Empty, or cut off within the first line: nothing was ever spent.
    if not lines and _HEADER_START[: len(data)] == data[: len(_HEADER_START)]:
        return LedgerContents(None, [], 0, "")
    header = _checked_header(_decoded(lines[0]) if lines else None, path)
    entries = [
        _checked_entry(_decoded(line), number, _line_hash(line_before), path)
        for number, (line_before, line) in enumerate(itertools.pairwise(lines), 1)
    ]
    # Hashes cover all lines but the last.
    if not _is_intact(lines[-1]):
        raise ValueError(
            f"line {len(lines)} of the privacy ledger {path} is not as it was written, so what was "
            "spent is unknown; restore the file from a copy."
        )
    return LedgerContents(header, entries, size, _line_hash(lines[-1]))


def _line_hash(line: bytes) -> str:
    """SHA-256 of a line without its newline, in hexadecimal."""
    return hashlib.sha256(line).hexdigest()


def _decoded(line: bytes) -> dict[str, Any] | None:
    """Values of a line without its checksum; None if the line is no JSON object."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):  # RecursionError: lists in lists in lists
        return None
    if not isinstance(values, dict):
        return None
    values.pop(_CHECKSUM, None)
    return values


def _encoded(values: dict[str, Any]) -> bytes:
    """A line with these values and its checksum, without newline."""
    return _with_checksum(json.dumps(values, allow_nan=False).encode())


def _with_checksum(text: bytes) -> bytes:
    """A JSON object as text, with the checksum of that text as its last value."""
    return text[:-1] + f', "{_CHECKSUM}": "{zlib.crc32(text):08x}"}}'.encode()


def _is_intact(line: bytes) -> bool:
    """Whether a line is as it was written."""
    return line == _with_checksum(line.rpartition(f', "{_CHECKSUM}"'.encode())[0] + b"}")


def _begins_with_object(line: bytes) -> bool:
    """Whether a line begins with a whole JSON object, which half an entry never does."""
    try:
        json.JSONDecoder().raw_decode(line.decode(errors="replace"))
    except (ValueError, RecursionError):
        return False
    return line.startswith(b"{")


def _checked_header(header: dict[str, Any] | None, path: str) -> dict[str, Any]:
    """First line of a ledger, which must have the version of the format and all settings."""
    if header is None or header.get("format") != _FORMAT:
        raise ValueError(
            f"{path} is not a privacy ledger; expected a file that PrivacyLedger created, or no "
            "file."
        )
    if header.get("version") != _VERSION:
        raise ValueError(
            f"the privacy ledger {path} has version {header.get('version')!r} of the format; "
            f"expected {_VERSION}. Use the version of pfl_sklearn that wrote it."
        )
    # A default in place of a missing setting would change the promise.
    if _SETTINGS - header.keys():
        raise ValueError(
            f"the first line of the privacy ledger {path} must have the keys "
            f"{', '.join(sorted(_SETTINGS))}; got {', '.join(header)}. Restore it from a copy."
        )
    return header


def _checked_entry(
    entry: dict[str, Any] | None, number: int, previous: str, path: str
) -> dict[str, Any]:
    """Entry `number` of a ledger, which must have that number and the hash `previous`."""
    where = f"line {number + 1} of the privacy ledger {path}"
    # Any damage is an error: without the line, less would count than was spent.
    if entry is None or not entry.keys() >= _ENTRY_KEYS:
        raise ValueError(
            f"{where} is not a valid entry, so what was spent is unknown; restore the file from a "
            "copy."
        )
    if entry["entry"] != number:
        raise ValueError(
            f"{where} is entry {entry['entry']!r}; expected entry {number}. Lines were lost or "
            "added, so what was spent is unknown; restore the file from a copy."
        )
    if entry["previous"] != previous:
        raise ValueError(
            f"the lines up to line {number} of the privacy ledger {path} are not those that line "
            f"{number + 1} was written after: lines were edited, lost, added or moved, so what was "
            "spent is unknown; restore the file from a copy."
        )
    return entry


def _append(file: int, size: int, values: dict[str, Any]) -> None:
    """Write one line after the first `size` bytes and wait until it is on the disk."""
    # An incomplete line after these bytes is removed. If the new line cannot be written as a whole,
    # as on a full disk, the file is left without it.
    if os.fstat(file).st_size > size:
        os.ftruncate(file, size)
    line = _encoded(values) + b"\n"
    # The writer of the last entry may have been killed before its newline.
    if size and os.pread(file, 1, size - 1) != b"\n":
        line = b"\n" + line
    try:
        # A short write means a full disk. Half an entry is no record of the fit.
        if os.write(file, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(file)  # the fit may read data only after its cost has survived a power cut
    except OSError:
        # If this fails as well, the next reader ignores the half line: its fit never began.
        with contextlib.suppress(OSError):
            os.ftruncate(file, size)
        raise


def _sync_folder(path: str) -> None:
    """Wait until the name of a new file is on the disk."""
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
