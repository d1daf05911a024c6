"""What rounds of nets send to workers: rows once a fit, then models, messages and row numbers."""

import numpy as np
import pytest
from joblib import parallel_config
from sklearn.base import clone

pytest.importorskip("torch")
pytest.importorskip("skorch")

from pfl_sklearn.neural_network import FedAvgClassifier
from tests.helpers.nets import Convolutions, personal_weights, recipe, table
from tests.helpers.processes import DaskDistributedBackend, LokyBackend

SIZES = np.full(24, 40)
SHORT = {"n_rounds": 6, "local_steps": 5, "client_fraction": 0.5, "random_state": 3}


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.slow
@pytest.mark.parametrize("backend", [LokyBackend, DaskDistributedBackend])
def test_rows_travel_once_a_fit(backend, mapped, tmp_path, monkeypatch):
    """And stay in a file that is theirs already, where workers are on this machine."""
    (folder := tmp_path / "joblib").mkdir()
    monkeypatch.setenv("JOBLIB_TEMP_FOLDER", str(folder))
    X, y, groups = table((1, 8, 8), SIZES)
    X = X.astype(np.float32)
    size, rows = X.nbytes + y.nbytes, X
    if mapped:
        np.save(tmp_path / "X.npy", X)
        rows = np.load(tmp_path / "X.npy", mmap_mode="r")
    model = FedAvgClassifier(recipe(Convolutions), fine_tune_steps=2, **SHORT)
    alone = clone(model).fit(X, y, groups=groups)
    workers = backend(folder if backend is LokyBackend else None)
    with parallel_config(workers):
        other = clone(model).set_params(n_jobs=2).fit(rows, y, groups=groups)
    for one, same in zip(personal_weights(alone), personal_weights(other), strict=True):
        np.testing.assert_array_equal(one, same)
    assert not list(folder.iterdir())
    if mapped and backend is LokyBackend:
        assert workers.counts["rows"] < 0.2 * size
    else:
        assert 0.9 * size < workers.counts["rows"] < 1.5 * size
    # The net, of 1 KB, goes to each chunk of clients, and theirs go back and forth.
    assert workers.counts["tasks"] < 2.5 * size
