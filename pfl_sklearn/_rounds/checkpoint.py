"""Rounds on disk: a run that was killed goes on from its last checkpoint."""

from __future__ import annotations

import dis
import hashlib
import json
import os
import zipfile
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from numbers import Number
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import numpy as np
from joblib.hashing import NumpyHasher

from pfl_sklearn._files import check_writable, remove_abandoned, replaced_file
from pfl_sklearn._object_graph import (
    captured_values,
    is_library_code,
    iter_reachable,
    named_globals,
    nested_code,
)
from pfl_sklearn._rounds.out_of_core import blocks_of
from pfl_sklearn._rounds.rows import is_sparse

if TYPE_CHECKING:
    from pfl_sklearn._rounds.loop import State

_CHECKPOINT_FORMAT = 2
_MEMORY = "memory."
# What reading a damaged zip file raises, RuntimeError for unknown compression or encryption.
_DAMAGES = OSError, ValueError, KeyError, EOFError, TypeError, RuntimeError, zipfile.BadZipFile
# What a run may change from one start to the next.
_UNRELATED = ("n_jobs", "ledger", "checkpoint", "checkpoint_every", "unseen", "random_state")
_SHOWN_PARAMETER = 60  # characters of a value in a message
# Globals and attributes of a class of these types count as part of the code that names them.
_DATA = Number | str | bytes | tuple | list | dict | np.ndarray
_CODE = FunctionType | type
# What leads from code to more code. Other objects may change while a run goes on.
_MADE_OF = (
    _CODE | MethodType | staticmethod | classmethod | property | partial | dict | list | tuple
)


class Checkpoint:
    """A file with the state of a run, written after every so many rounds.

    The file holds numpy arrays and JSON, no code. Keep it private: it has every client's model and
    the entropy of the noise, so rounds that are run again have the same noise.

    There are `every` rounds between two writes. `parameters` are what the run depends on besides
    data, as :func:`describe_parameters` gives them.

    Raises ValueError if the file exists and is not a checkpoint, or belongs to a run with other
    parameters, and OSError if it cannot be written.
    """

    def __init__(self, path: Any, every: int, parameters: dict[str, Any]) -> None:
        self.path, self.every = os.fspath(path), every
        self.parameters = json.loads(json.dumps(parameters))  # as the file has them
        self.data: str | None = None
        self._saved = self._read()
        self._check_writable()
        # The noise of a run that goes on is what it would have been: drawn again, it would be new.
        meta = {"round": None, "entropy": np.random.SeedSequence().entropy}
        meta = meta if self._saved is None else self._saved[0]
        self.round, self.entropy = meta["round"], meta["entropy"]

    @property
    def resumes(self) -> bool:
        """Whether the file has a run to continue."""
        return self._saved is not None

    def restore(self, state: State, data: Iterable[Any]) -> State:
        """State in the file, or `state` if there is none; `data` are the run's arrays."""
        self.data = _digest(data)
        if self._saved is None:
            return state
        meta, arrays = self._saved
        if meta["data"] != self.data:
            raise ValueError(
                f"checkpoint {self.path!r} was written with other rows of X, y or groups, with "
                "another random_state, or after other rounds; remove it to start anew."
            )
        memory = {
            name.removeprefix(_MEMORY): values
            for name, values in arrays.items()
            if name.startswith(_MEMORY)
        }
        return replace(state.restored(arrays), memory=memory)

    def observe(self, state: State) -> bool:
        """Write the file if it is due. This never ends a run."""
        if state.round % self.every == 0:
            self._write(state)
        return False

    def remove(self) -> None:
        """Delete the file, and temporary ones of killed processes next to it: the run has ended."""
        remove_abandoned(self.path)
        Path(self.path).unlink(missing_ok=True)

    def _check_writable(self):
        """Raise OSError now rather than after many rounds."""
        try:
            check_writable(self.path)
        except OSError as error:
            raise OSError(
                f"checkpoint {self.path!r} cannot be written: {error}. Give a path in an existing "
                "folder that can be written to."
            ) from error

    def _write(self, state):
        """Replace the file as a whole, so that a killed process leaves the one before.

        Raises OSError if the disk is full, say. The file from before stays as it was.
        """
        meta = {
            "format": _CHECKPOINT_FORMAT,
            "parameters": self.parameters,
            "data": self.data,
            "entropy": self.entropy,
            "round": state.round,
        }
        memory = {f"{_MEMORY}{name}": values for name, values in state.memory.items()}
        arrays = {**state.packed(), **memory}
        meta["arrays"] = sorted(arrays)
        try:
            with replaced_file(self.path) as file:
                np.savez(file, meta=json.dumps(meta), **arrays)
        except OSError as error:
            after = "starts anew" if self.round is None else f"goes on after round {self.round}"
            raise OSError(
                f"checkpoint {self.path!r} cannot be written after round {state.round}: {error}. "
                f"Make room on its disk and call fit again, which {after}."
            ) from error
        self.round = state.round

    def _read(self):
        """Facts and arrays of the file; None if there is none."""
        if not os.path.exists(self.path):
            return None
        try:
            with open(self.path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            meta = json.loads(str(arrays.pop("meta")))
            written, listed = meta["format"], meta["arrays"]
        except _DAMAGES as error:
            raise ValueError(
                f"checkpoint {self.path!r} is not a checkpoint file, or damaged."
            ) from error
        if written != _CHECKPOINT_FORMAT:
            raise ValueError(
                f"checkpoint {self.path!r} has format {written!r}; expected {_CHECKPOINT_FORMAT}. "
                "Remove it to start anew."
            )
        # Every array has a checksum, but the list of them in a zip file has none.
        if sorted(arrays) != listed:
            raise ValueError(f"checkpoint {self.path!r} is damaged: it lacks some of its arrays.")
        self._check_parameters(meta["parameters"])
        return meta, arrays

    def _check_parameters(self, written):
        """Raise ValueError if the run that wrote the file had other parameters."""
        for name in {**self.parameters, **written}:
            then, now = (values.get(name, ["", "-"]) for values in (written, self.parameters))
            if then[0] != now[0]:
                how = f"{name}={then[1]}, not {now[1]}"
                if then[1] == now[1]:  # by name
                    how = f"another {name}={now[1]}, whose code or values differ"
                raise ValueError(
                    f"checkpoint {self.path!r} belongs to a run with {how}; remove it to start "
                    "anew."
                )


def describe_parameters(estimator: Any, /, **more: Any) -> dict[str, tuple[str, str]]:
    """Parameters that a run depends on, nested ones included: digest and text of each.

    Values are compared by digest, since the text of a neural network, say, hides its learning rate.
    """
    params = estimator.get_params(deep=True)
    related = {name: value for name, value in params.items() if name not in _UNRELATED}
    related = {"class": type(estimator), **related, **more}
    return {name: (_value_digest(value), _parameter_text(value)) for name, value in related.items()}


class _Hasher(NumpyHasher):
    """That of joblib, but for sets: their order, and that of frozensets, differs by process."""

    def save_any_set(self, values):
        self.save(["set", sorted(map(_hash, values))])

    dispatch = {**NumpyHasher.dispatch, set: save_any_set, frozenset: save_any_set}


def _hash(value):
    """Digest of a value that can be pickled, equal in every process."""
    return _Hasher().hash(value)


def _value_digest(value, with_code=True, inside=False):
    """Digest of a parameter; of an estimator that of its class, since its parameters follow.

    Those of one `inside` a list do not, as those of a network's callbacks.
    """
    if hasattr(value, "get_params") and not isinstance(value, type):
        value = [type(value), value.get_params(deep=False)] if inside else type(value)
    if with_code and isinstance(value, FunctionType | type) and not is_library_code(value):
        return _code_digest(value)
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, partial):
        value = [value.func, value.args, value.keywords]
    if isinstance(value, dict | list | tuple):
        parts = value.items() if isinstance(value, dict) else value
        digests = [_value_digest(part, with_code, inside=True) for part in parts]
        return _hash([type(value).__name__, *digests])
    held = iter_reachable(value, lambda item: not isinstance(item, _CODE)) if with_code else ()
    classes = {type(item) for item in held}
    codes = sorted(_code_digest(item) for item in classes if not is_library_code(item))
    return _hash([_hash(value), codes]) if codes else _hash(value)


def _code_digest(value):
    """Digest of a function or class that is not of a library: of all code that it is made of.

    That is also the code of other functions and classes that it names, and the constants that these
    use. We compare compiled code: a notebook has no source to read, and a file may have been edited
    since it was imported.
    """
    # What a function imports when it is called is not there yet when the first run begins.
    parts = iter_reachable(value, lambda part: isinstance(part, _MADE_OF), imports=False)
    user_parts = [part for part in parts if isinstance(part, _CODE) and not is_library_code(part)]
    name = f"{value.__module__}.{value.__qualname__}"
    codes = (
        code for part in user_parts if isinstance(part, FunctionType) for code in nested_code(part)
    )
    steps = (step for code in codes for step in dis.get_instructions(code))
    # What a ``global`` statement is for changes while the code runs.
    changing = {step.argval for step in steps if step.opname == "STORE_GLOBAL"}
    return _hash([name, sorted(_part_digest(part, changing) for part in user_parts)])


def _part_digest(part, changing):
    """Digest of one function or class by its name, its own code and the constants that it uses.

    Globals with names among the `changing` ones are no constants.
    """
    codes, held = [], []
    if isinstance(part, type):
        named = [pair for pair in vars(part).items() if not pair[0].startswith("__")]
    else:
        held = [_constant_digest(value) for value in captured_values(part)]
        named = [pair for pair in named_globals(part) if pair[0] not in changing]
        for code in nested_code(part):
            constants = [const for const in code.co_consts if not isinstance(const, CodeType)]
            # One by one: a digest tells equal tuples from one tuple that occurs twice.
            codes.append([code.co_code, *map(_hash, (code.co_names, *constants))])
    used = sorted(
        (key, _constant_digest(value)) for key, value in named if isinstance(value, _DATA)
    )
    return _hash([f"{part.__module__}.{part.__qualname__}", codes, held, used])


def _constant_digest(value):
    """Digest of a value that code uses; of one that cannot be pickled, its class."""
    try:
        return _value_digest(value, with_code=False)
    except Exception:  # objects decide what they raise, and cycles end in a RecursionError
        return f"{type(value).__module__}.{type(value).__qualname__}"


def _parameter_text(value):
    """Text of a parameter for messages, cut short; checkpoints have it, so it stays as it is."""
    shown = getattr(value, "__qualname__", None) or repr(value)
    return shown if len(shown) <= _SHOWN_PARAMETER else shown[: _SHOWN_PARAMETER - 3] + "..."


def _digest(data):
    """Hash of arrays, sparse or not; objects by their texts, since their bytes are addresses."""
    digest = hashlib.blake2b(digest_size=16)
    for values in data:
        parts = (values.data, values.indices, values.indptr) if is_sparse(values) else (values,)
        for part in parts:
            digest.update(f"{part.dtype.str} {part.shape}".encode())
            for _, rows in blocks_of(part):
                plain = rows.astype("U") if part.dtype.kind == "O" else rows
                digest.update(np.ascontiguousarray(plain).view(np.uint8).data)
    return digest.hexdigest()
