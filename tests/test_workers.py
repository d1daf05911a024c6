"""What travels to workers: rows once a fit, then states and messages. Workers that die."""

import os
import pickle
import signal
from collections import Counter
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
from joblib import parallel_config
from joblib.externals.loky.process_executor import TerminatedWorkerError
from joblib.parallel import ThreadingBackend
from sklearn.base import clone
from sklearn.linear_model import Ridge

from pfl_sklearn import (
    ClientSelector,
    PersonalizedLinearRegression,
    PersonalizedLogisticRegression,
    PersonalizedPoissonRegression,
    PersonalizedStackingRegressor,
    PPSGDClassifier,
)
from pfl_sklearn._kept import is_mapped
from pfl_sklearn._parallel import batch_mapper

_MEMORY: dict[int, bytes] = {}  # of the workers of a cluster


def from_memory(key):
    return pickle.loads(_MEMORY[key])


class _Future:
    """A value in a worker's memory, which a task gets in its place."""

    def __init__(self, key):
        self.key = key

    def __reduce__(self):
        return from_memory, (self.key,)


class _Client:
    def __init__(self, counts):
        self.counts = counts

    def ncores(self):
        return {"first": 1, "second": 1}

    def scatter(self, value, workers, hash):
        (address,) = workers
        data = pickle.dumps(value)
        _MEMORY[key := len(_MEMORY)] = data
        self.counts["rows"] += len(data)
        self.counts[address] += len(data)
        return _Future(key)


class Processes(ThreadingBackend):
    """Threads that take their tasks as other processes would, and count what they are sent."""

    def __init__(self, folder=None, **params):
        super().__init__(**params)
        self.counts = Counter()
        self.client, self.folder = _Client(self.counts), folder

    def submit(self, func, callback=None):
        data = cloudpickle.dumps(func)
        self.counts["tasks"] += len(data)
        if self.folder is not None:
            files = [each for each in Path(self.folder).rglob("*") if each.is_file()]
            self.counts["rows"] = max(self.counts["rows"], sum(f.stat().st_size for f in files))
        return super().submit(cloudpickle.loads(data), callback)


class LokyBackend(Processes):
    """As joblib's, by name."""


class DaskDistributedBackend(Processes):
    """As joblib's, by name."""


class Elsewhere(Processes):
    """A backend that nobody knows."""


BACKENDS = [LokyBackend, DaskDistributedBackend, Elsewhere]


def table(m=60, n=40, d=6):
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(m), n)
    X = rng.normal(size=(m * n, d))
    slopes = rng.normal(size=d) + 0.5 * rng.normal(size=(m, d))
    target = (X * slopes[groups]).sum(axis=1) + rng.normal(size=m * n)
    return X, target, groups


X, TARGET, GROUPS = table()
LABELS, COUNTS = (TARGET > 0).astype(int), np.floor(np.exp(np.clip(TARGET / 4, -2, 2)))
BASES = [("line", Ridge()), ("mixed", PersonalizedLinearRegression())]
FITS = {
    "logistic": (PersonalizedLogisticRegression(random="all"), LABELS),
    "one effect": (PersonalizedLogisticRegression(random="intercept"), LABELS),
    "poisson": (PersonalizedPoissonRegression(random="all"), COUNTS),
    "ppsgd": (PPSGDClassifier(n_rounds=12, batch_size=20, random_state=0), LABELS),
    "stacking": (PersonalizedStackingRegressor(BASES, random_state=0, cv=3), TARGET),
    "selector": (ClientSelector(BASES, random_state=0, cv=3), TARGET),
    "linear": (PersonalizedLinearRegression(), TARGET),
}


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    """Several stacks and blocks of so small a table."""
    monkeypatch.setattr("pfl_sklearn.linear_model._glmm._likelihood._STACK_CELLS", 1 << 11)
    monkeypatch.setattr("pfl_sklearn._rounds.rows._NUMBERS_OF_A_BLOCK", 1 << 9)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where joblib's temporary files go."""
    monkeypatch.setenv("JOBLIB_TEMP_FOLDER", str(tmp_path))
    return tmp_path


def fitted(name, n_jobs=1):
    model, y = FITS[name]
    return clone(model).set_params(n_jobs=n_jobs).fit(X, y, groups=GROUPS)


def assert_same(one, other):
    """Fitted attributes that are arrays of numbers, to the bit."""
    arrays = {k: v for k, v in vars(one).items() if isinstance(v, np.ndarray) and v.dtype != object}
    assert arrays
    for name, values in arrays.items():
        np.testing.assert_array_equal(getattr(other, name), values, err_msg=name)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FITS)
def test_rows_travel_once_a_fit(name, backend, folder):
    alone, workers = fitted(name), backend(folder if backend is LokyBackend else None)
    with parallel_config(workers):
        assert_same(alone, fitted(name, n_jobs=2))
    counts, size = workers.counts, X.nbytes + TARGET.nbytes
    assert not list(folder.iterdir())
    if name == "linear":
        assert not counts
    elif backend is not Elsewhere:
        # Folds need all rows on each worker. Stacks of rows have a constant and weights besides.
        copies = 2 if name in ("stacking", "selector") and backend is not LokyBackend else 1
        assert 0.5 * size < counts["rows"] < 1.5 * copies * size
        assert counts["tasks"] < 3 * size
    if backend is DaskDistributedBackend and name != "linear":
        assert abs(counts["first"] - counts["second"]) < 0.2 * size
