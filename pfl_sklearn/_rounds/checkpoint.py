"""Rounds on disk: a killed run goes on where its last checkpoint was."""

import hashlib
import json
import os
import zipfile
from dataclasses import replace

import numpy as np
from scipy.sparse import issparse

_FORMAT = 1
_GROUPS = ("server", "clients", "history")


class Checkpoint:
    """A file with the state of a run after every so many rounds.

    The file holds no code (numpy arrays and JSON). It is private: it has every client's model, and
    what the noise was drawn from: rounds that are run again, as the file is older than they are,
    have the same noise.

    Parameters
    ----------
    path : path-like
    every : int
        Rounds between two writes.
    parameters : dict
        What the run depends on besides data; JSON-able.

    Raises
    ------
    ValueError
        If the file is there and belongs to a run with other parameters, or is no checkpoint.
    OSError
        If the file cannot be written.
    """

    def __init__(self, path, every, parameters):
        self.path, self.every = os.fspath(path), every
        self.parameters = json.loads(json.dumps(parameters, sort_keys=True))
        self.data = None
        self._found = self._read()
        self._check_writable()
        drawn = np.random.SeedSequence().entropy
        self.entropy = self._found[0]["entropy"] if self.resumes else drawn

    @property
    def resumes(self):
        """Whether there is a run to go on with."""
        return self._found is not None

    def restore(self, state, data):
        """State of the file, or `state` if there is none; `data` are the run's arrays."""
        self.data = _digest(data)
        if self._found is None:
            return state
        meta, arrays = self._found
        if meta["data"] != self.data:
            raise ValueError(
                f"checkpoint {self.path!r} was written with other rows of X, y or groups, or with "
                "another random_state; remove it to start anew."
            )
        parts = {group: {} for group in _GROUPS}
        for name, values in arrays.items():
            group, _, key = name.partition(".")
            parts.setdefault(group, {})[key] = values
        return replace(
            state,
            server=parts["server"],
            clients=parts["clients"],
            used=arrays["used"],
            history={name: values.tolist() for name, values in parts["history"].items()},
            bound=float(arrays["bound"]),
            round=meta["round"],
        )

    def observe(self, state):
        """Write the file if it is time to; a run is never ended."""
        if state.round % self.every == 0:
            self._write(state)
        return False

    def remove(self):
        """Delete the file: the run has ended."""
        if os.path.exists(self.path):
            os.remove(self.path)

    def _check_writable(self):
        """Raise OSError now rather than after many rounds."""
        try:
            with open(self._partial, "wb"):
                pass
            os.remove(self._partial)
        except OSError as error:
            raise OSError(f"checkpoint {self.path!r} cannot be written: {error}.") from error

    @property
    def _partial(self):
        """File that is written before it takes the place of the checkpoint."""
        return f"{self.path}.{os.getpid()}.partial"

    def _write(self, state):
        """Replace the file as a whole: a killed process leaves the one before."""
        meta = {
            "format": _FORMAT,
            "parameters": self.parameters,
            "data": self.data,
            "entropy": self.entropy,
            "round": state.round,
        }
        arrays = {
            f"{group}.{name}": np.asarray(values)
            for group in _GROUPS
            for name, values in getattr(state, group).items()
        }
        with open(self._partial, "wb") as file:
            np.savez(file, meta=json.dumps(meta), used=state.used, bound=state.bound, **arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(self._partial, self.path)

    def _read(self):
        """Facts and arrays of the file; None if there is none."""
        if not os.path.exists(self.path):
            return None
        try:
            with open(self.path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            meta = json.loads(str(arrays.pop("meta")))
            written = meta["format"]
        except (OSError, ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile) as error:
            raise ValueError(f"checkpoint {self.path!r} is not a checkpoint file.") from error
        if written != _FORMAT:
            raise ValueError(
                f"checkpoint {self.path!r} has format {written!r}; expected {_FORMAT}."
            )
        for name, value in self.parameters.items():
            if meta["parameters"].get(name) != value:
                raise ValueError(
                    f"checkpoint {self.path!r} belongs to a run with {name}="
                    f"{meta['parameters'].get(name)!r}, not {value!r}; remove it to start anew."
                )
        return meta, arrays


def _digest(data):
    """Hash of arrays, sparse or not."""
    digest = hashlib.blake2b(digest_size=16)
    for values in data:
        parts = (values.data, values.indices, values.indptr) if issparse(values) else (values,)
        for part in parts:
            digest.update(f"{part.dtype.str} {part.shape}".encode())
            plain = part.astype("S") if part.dtype.kind in "UO" else part
            digest.update(np.ascontiguousarray(plain).view(np.uint8))
    return digest.hexdigest()
