"""What travels to workers: rows once a fit, then states and messages. Workers that die."""

import os
import signal
import sys
import tempfile
from types import SimpleNamespace

import numpy as np
import pytest
from joblib import parallel_config
from joblib.externals.loky.process_executor import TerminatedWorkerError
from sklearn.base import clone
from sklearn.linear_model import Ridge

from pfl_sklearn import (
    ClientSelector,
    PersonalizedLinearRegression,
    PersonalizedLogisticRegression,
    PersonalizedPoissonRegression,
    PersonalizedStackingRegressor,
    PPSGDClassifier,
    _parallel,
    _worker_storage,
)
from pfl_sklearn._parallel import batch_mapper
from pfl_sklearn.priors import GaussianPrior
from tests.helpers.processes import DaskDistributedBackend, Data, Elsewhere, LokyBackend
from tests.helpers.slow import slow


def test_a_full_disk_is_named_with_the_folder_that_may_be_another(tmp_path):
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"written to .*rows \(File too large\).*JOBLIB_TEMP"):
            _worker_storage._MappedFile(np.zeros(1000), tmp_path / "rows")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def table(m=60, n=120, d=6):
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(m), n)
    X = rng.normal(size=(m * n, d))
    slopes = rng.normal(size=d) + 0.5 * rng.normal(size=(m, d))
    target = (X * slopes[groups]).sum(axis=1) + rng.normal(size=m * n)
    return X, target, groups


X, TARGET, GROUPS = table()
LABELS, COUNTS = (TARGET > 0).astype(int), np.floor(np.exp(np.clip(TARGET / 4, -2, 2)))
PRIOR = GaussianPrior(covariance=0.25)
BASES = [("line", Ridge()), ("mixed", PersonalizedLinearRegression(PRIOR, noise_variance=1.0))]
FITS = {
    "one effect": (PersonalizedLogisticRegression(random="intercept"), LABELS),
    "poisson": (PersonalizedPoissonRegression(PRIOR, random="all"), COUNTS),
    "ppsgd": (PPSGDClassifier(n_rounds=12, batch_size=20, random_state=0), LABELS),
    "stacking": (PersonalizedStackingRegressor(BASES, BASES[1][1], random_state=0, cv=3), TARGET),
    "selector": (ClientSelector(BASES, random_state=0, cv=3), TARGET),
    "linear": (PersonalizedLinearRegression(), TARGET),
}


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    """Several stacks and blocks of so small a table."""
    monkeypatch.setattr("pfl_sklearn.linear_model._mixed._table._STACK_CELLS", 1 << 12)
    monkeypatch.setattr("pfl_sklearn._rounds.rows.NUMBERS_OF_A_BLOCK", 1 << 10)


@pytest.fixture(autouse=True)
def worker_of_dask(monkeypatch):
    worker = SimpleNamespace(address="first", data=Data())
    monkeypatch.setitem(sys.modules, "distributed", SimpleNamespace(get_worker=lambda: worker))


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


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *(("one effect", LokyBackend), ("linear", LokyBackend)),
        *(("ppsgd", DaskDistributedBackend), ("ppsgd", Elsewhere)),
        *slow([(name, LokyBackend) for name in ("poisson", "stacking", "selector")]),
        *slow([(name, DaskDistributedBackend) for name in ("one effect", "stacking")]),
    ],
)
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
        assert counts["largest task"] < 0.03 * size  # states alone, however many passes
    if backend is DaskDistributedBackend and name != "linear":
        assert abs(counts["first"] - counts["second"]) < 0.2 * size


def mean_of(rows, factor):
    return rows.mean() * factor


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["loky", "multiprocessing"])
def test_processes_read_files(backend, folder):
    """A map of a file stays in that file: what is kept of it is its name and place."""
    np.save(folder / "X.npy", X)
    with parallel_config(backend), batch_mapper(2) as run:
        rows = [X, np.load(folder / "X.npy", mmap_mode="r")[3:, 1:]]
        kept = [run.store(each) for each in rows]
        sizes = [each.stat().st_size for each in folder.rglob("rows")]
        found = run(mean_of, [(kept[k % 2], k) for k in range(6)], np.ones(6, dtype=int))
    assert found == [rows[k % 2].mean() * k for k in range(6)]
    assert min(sizes) < 1000 < X.nbytes < max(sizes)
    assert [each.name for each in folder.iterdir()] == ["X.npy"]


def stop(rows, error):
    raise error


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_files_go_with_the_fit(error, folder):
    with pytest.raises(type(error)), parallel_config(LokyBackend()), batch_mapper(2) as run:
        kept = run.store(X)
        assert len(list(folder.rglob("rows"))) == 1
        run(stop, [(kept, error)] * 2, [1, 1])
    assert not list(folder.iterdir())


def test_values_are_those_of_this_process_where_threads_work():
    with parallel_config("threading"), batch_mapper(2) as run:
        assert run.store(X) is X
    with batch_mapper(1) as run:
        assert run.store(X) is X


class Killer:
    """An argument whose worker dies of it: within a task, when it holds no lock of joblib's queues.

    One that dies with half a message in the pipe leaves joblib waiting for the other half.
    """

    def load(self):
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="processes cannot be killed so")
@pytest.mark.parametrize("name", ["ppsgd", "stacking"])
def test_a_killed_worker_is_one_error_and_no_half_a_fit(name, folder, monkeypatch):
    model, y = FITS[name]
    model, sent = clone(model).set_params(n_jobs=2), _parallel._with_references
    calls = []

    def killing(batches):
        calls.append(len(batches))
        batches, references = sent(batches)
        return batches, [*references, Killer()] if len(calls) == 6 else references

    with parallel_config("loky"):
        with monkeypatch.context() as patch:
            patch.setattr(_parallel, "_with_references", killing)
            with pytest.raises(TerminatedWorkerError):
                model.fit(X, y, groups=GROUPS)
        assert not [each for each in vars(model) if each.endswith("_")]
        assert not list(folder.glob("pfl_sklearn_*"))
        assert_same(fitted(name), model.fit(X, y, groups=GROUPS))


@pytest.mark.parametrize("view", ["changed", "reversed", "without a name", "gone", "plain"])
def test_only_maps_that_workers_find_as_they_are_stay_in_their_file(view, tmp_path):
    """joblib opens a map anew: it would miss changes, and start a reversed view at its end."""
    path = tmp_path / "rows"
    X.tofile(path)
    mapped = np.memmap(path, "f8", "c" if view == "changed" else "r", shape=X.shape)
    if view == "without a name":
        with tempfile.TemporaryFile(dir=tmp_path) as file:
            X.tofile(file)
            mapped = np.memmap(file, "f8", "r+", shape=X.shape)
    elif view == "changed":
        mapped[:, 0] *= -1
    elif view == "reversed":
        mapped = mapped[::-1]
    elif view == "gone":
        path.unlink()
    kept = _worker_storage._MappedFile([mapped], tmp_path / "kept")
    assert len(kept.maps) == (view == "plain")
    np.testing.assert_array_equal(kept.load()[0], mapped)


@pytest.mark.slow
@pytest.mark.parametrize("view", ["changed", "reversed"])
def test_workers_see_the_rows_of_a_map(view, tmp_path):
    X.tofile(tmp_path / "rows")
    mapped = np.memmap(tmp_path / "rows", "f8", "c", shape=X.shape)
    mapped[:, 0] *= -1
    rows = mapped[::-1] if view == "reversed" else mapped
    model = PPSGDClassifier(n_rounds=3, random_state=0)
    alone = clone(model).fit(rows, LABELS, groups=GROUPS)
    both = clone(model).set_params(n_jobs=2).fit(rows, LABELS, groups=GROUPS)
    np.testing.assert_array_equal(both.coef_, alone.coef_)
