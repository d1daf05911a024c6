"""Rows in files: the models are those of rows in memory, and the file is never copied."""

import os
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from pfl_sklearn import PPSGDClassifier, PPSGDRegressor
from pfl_sklearn._rounds import out_of_core
from pfl_sklearn._rounds.out_of_core import blocks_of, stored_rows
from pfl_sklearn.neural_network import FedAvgClassifier, FedAvgRegressor

pa = pytest.importorskip("pyarrow")
N, D = 1200, 3


def mapped(path, values):
    """The values in a file, mapped into memory."""
    file = np.memmap(path, dtype=values.dtype, mode="w+", shape=values.shape)
    file[:] = values
    file.flush()
    return np.memmap(path, dtype=values.dtype, mode="r", shape=values.shape)


def arrow(path, values):
    """The values in a file of several batches, mapped into memory."""
    frame = pd.DataFrame(values, columns=[f"x{j}" for j in range(values.shape[1])])
    table = pa.Table.from_pandas(frame, preserve_index=False)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=len(values) // 3 - 7)
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


def needs_torch_for_nets(model):
    if "neural" in type(model).__module__:
        pytest.importorskip("torch")
        pytest.importorskip("skorch")


def stored(store, dtype, path):
    """Rows in a file, the same rows in memory, labels and clients in any order."""
    rng = np.random.default_rng(0)
    X = (100 * rng.normal(size=(N, D))).astype(dtype)
    y, groups = (X[:, 0] + 100 * rng.normal(size=N) > 0).astype(int), rng.integers(0, 20, N)
    return store(path / "rows", X), X, y, groups


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
    monkeypatch.setattr(out_of_core, "_NUMBERS_AT_ONCE", 500)


@pytest.mark.slow_but_first
@pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")
@pytest.mark.parametrize(
    ("model", "store", "dtype"),
    [
        (PPSGDClassifier(), arrow, "float64"),
        (PPSGDClassifier(n_rounds=5, fit_intercept=False, average=True), mapped, "int16"),
        (PPSGDRegressor(n_rounds=5, client_fraction=0.5), mapped, "float32"),
        (PPSGDClassifier(n_rounds=5, epsilon=3.0, delta=1e-3), mapped, "float32"),
        (FedAvgClassifier(n_rounds=2, local_steps=2, fine_tune_steps=1), mapped, "float32"),
        (FedAvgRegressor(n_rounds=2, local_steps=2, client_fraction=0.5), arrow, "float64"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_models_of_stored_rows_are_those_of_rows_in_memory(model, store, dtype, tmp_path):
    needs_torch_for_nets(model)
    file, X, y, groups = stored(store, dtype, tmp_path)
    model.set_params(random_state=0)
    memory = model.fit(X, y, groups=groups).predict(X, groups=groups)
    rounds = model.n_rounds_
    from_file = model.fit(file, y, groups=groups).predict(file, groups=groups)
    assert model.n_rounds_ == rounds
    np.testing.assert_allclose(from_file, memory, rtol=1e-9, atol=1e-9)
    if isinstance(file, pa.Table):
        assert list(model.feature_names_in_) == file.column_names


@pytest.mark.parametrize(("store", "dtype"), [(mapped, "int16"), (arrow, "float64")])
def test_any_rows_are_read(store, dtype, tmp_path):
    file, X, *_ = stored(store, dtype, tmp_path)
    rows = stored_rows(file)
    assert rows.shape == X.shape
    numbers = np.random.default_rng(0).integers(0, N, (3, 4))
    np.testing.assert_array_equal(rows[numbers], X[numbers])
    np.testing.assert_array_equal(rows[5:700:3], X[5:700:3])
    order = np.random.default_rng(1).permutation(N)[:900]
    chosen = rows.only(order).only(np.arange(800)).changed(lambda values: 2.0 * values[:, :2])
    np.testing.assert_array_equal(chosen[numbers % 800], 2.0 * X[order][numbers % 800, :2])
    blocks = [values for _, values in blocks_of(chosen)]
    assert len(blocks) > 1
    np.testing.assert_array_equal(np.concatenate(blocks), 2.0 * X[order[:800], :2])


@pytest.mark.parametrize(
    ("model", "value"), [(PPSGDClassifier(), np.nan), (FedAvgClassifier(), np.inf)], ids=repr
)
def test_bad_values_of_a_file_are_found(model, value, tmp_path):
    needs_torch_for_nets(model)
    X = np.zeros((3_000, D))  # more than a block
    X[-1, 1] = value
    y, groups = np.arange(len(X)) % 2, np.arange(len(X)) % 7
    with pytest.raises(ValueError, match="Input X contains"):
        model.fit(mapped(tmp_path / "rows", X), y, groups=groups)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda path: pa.table({"a": [1.0, None] * 10, "b": [1, 2] * 10}), "column .a. .*NaN"),
        (lambda path: pa.table({"a": ["x", "y"] * 10}), "could not convert string"),
        (lambda path: mapped(path, np.zeros(20)), "Expected 2D array"),
        (lambda path: mapped(path, np.zeros((20, 1), dtype=complex)), "Complex data"),
    ],
)
def test_other_files_are_arrays_and_refused_as_such(make, match, tmp_path):
    X = make(tmp_path / "rows")
    assert stored_rows(X) is None
    with pytest.raises(ValueError, match=match):
        PPSGDClassifier().fit(X, np.arange(20) % 2, groups=np.arange(20) % 4)


_SCRIPT = """
import resource, sys
from pathlib import Path
import numpy as np, pyarrow as pa, torch
from pfl_sklearn import PPSGDClassifier
from pfl_sklearn.neural_network import FedAvgClassifier

folder, n, d = Path(sys.argv[1]), *map(int, sys.argv[2:])
tables = [
    pa.ipc.open_file(pa.memory_map(str(folder / "arrow"))).read_all(),
    np.memmap(folder / "mapped", dtype="float32", mode="r", shape=(n, d)),
]
rng = np.random.default_rng(0)
y, groups = rng.integers(0, 2, n), rng.integers(0, 500, n)
torch.set_num_threads(1)
models = [
    PPSGDClassifier(n_rounds=5, client_fraction=0.05, batch_size=10, random_state=0),
    FedAvgClassifier(n_rounds=3, client_fraction=0.05, random_state=0),
]
few = rng.normal(size=(1000, d))
for model in models:  # whatever is imported or kept for later is there before the limit
    model.fit(few, y[:1000], groups=groups[:1000]).predict(few, groups=groups[:1000])

# A mapped file takes addresses, not memory: what is left is for everything else.
mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + int(0.9 * 4 * n * d),) * 2)
try:
    np.ones((n, d), dtype=np.float32)
except MemoryError:
    pass
else:
    sys.exit("the limit does not keep anybody from copying the rows")
for X in tables:
    for model in models:
        model.fit(X, y, groups=groups).predict(X, groups=groups)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the system does not limit addresses")
def test_a_file_may_be_larger_than_the_memory(tmp_path):
    """A fit and predictions allocate less than the rows would take as float32."""
    pytest.importorskip("torch")
    pytest.importorskip("skorch")
    n, d = 50_000, 300
    X = np.random.default_rng(0).random(size=(n, d), dtype="float32")
    mapped(tmp_path / "mapped", X)
    arrow(tmp_path / "arrow", X)
    command = [sys.executable, "-c", _SCRIPT, str(tmp_path), str(n), str(d)]
    # What the C library keeps of freed memory, for later, is no copy of the rows.
    own = {**os.environ, "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "131072"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=own)
    assert not done.returncode, done.stderr
