"""Data for workers of rounds of nets: rows once a fit, then models, messages and row numbers."""

import numpy as np
import pytest
import torch
from joblib import parallel_config
from sklearn.base import clone
from torch import nn

from pfl_sklearn.neural_network import FedAvgClassifier
from tests.helpers.nets import N_CLASSES, N_INPUTS, Convolutions, personal_weights, recipe, table
from tests.helpers.processes import LokyBackend

SIZES = np.full(24, 40)
SHORT = {"n_rounds": 6, "local_steps": 5, "client_fraction": 0.5, "random_state": 3}


@pytest.mark.slow
def test_rows_of_a_file_do_not_travel(tmp_path, monkeypatch):
    """They stay in the file that is theirs already, where workers are on this machine."""
    (folder := tmp_path / "joblib").mkdir()
    monkeypatch.setenv("JOBLIB_TEMP_FOLDER", str(folder))
    X, y, groups = table((1, 8, 8), SIZES)
    X = X.astype(np.float32)
    np.save(tmp_path / "X.npy", X)
    rows, size = np.load(tmp_path / "X.npy", mmap_mode="r"), X.nbytes + y.nbytes
    model = FedAvgClassifier(recipe(Convolutions), fine_tune_steps=2, **SHORT)
    alone = clone(model).fit(X, y, groups=groups)
    with parallel_config(workers := LokyBackend(folder)):
        other = clone(model).set_params(n_jobs=2).fit(rows, y, groups=groups)
    for one, same in zip(personal_weights(alone), personal_weights(other), strict=True):
        np.testing.assert_array_equal(one, same)
    assert not list(folder.iterdir())
    assert workers.counts["rows"] < 0.2 * size
    # The net, of 1 KB, goes to each chunk of clients, and theirs go back and forth.
    assert workers.counts["largest task"] < 0.08 * size


def of_a_script(kind):
    """The class as a script has it: no worker can import it."""
    kind.__module__, kind.__qualname__ = "__main__", kind.__name__
    return kind


@of_a_script
class Net(nn.Linear):
    def __init__(self):
        super().__init__(N_INPUTS, N_CLASSES)


@of_a_script
class Loss(nn.CrossEntropyLoss):
    pass


@of_a_script
class Descent(torch.optim.SGD):
    pass


FROM_A_SCRIPT = {
    "module": recipe(Net),
    "instance": recipe(Net()),
    "loss": recipe(Net, criterion=Loss),
    "optimizer": recipe(Net, optimizer=Descent),
}


@pytest.mark.parametrize(
    ("part", "store"), [*((part, "memmap") for part in FROM_A_SCRIPT), ("module", "arrow")]
)
def test_classes_of_a_script_and_rows_in_a_file(part, store, tmp_path, monkeypatch):
    """Rows of another type than the net's, which workers convert."""
    (folder := tmp_path / "joblib").mkdir()
    monkeypatch.setenv("JOBLIB_TEMP_FOLDER", str(folder))
    X, y, groups = table()
    if store == "memmap":
        np.save(tmp_path / "X.npy", X)
        rows = np.load(tmp_path / "X.npy", mmap_mode="r")
    else:
        arrow = pytest.importorskip("pyarrow")
        rows = arrow.table({f"x{j}": X[:, j] for j in range(N_INPUTS)})
    model = FedAvgClassifier(FROM_A_SCRIPT[part], n_rounds=1, local_steps=2, random_state=0)
    alone = clone(model).fit(rows, y, groups=groups).population_parameters_
    with parallel_config(LokyBackend(folder)):
        other = model.set_params(n_jobs=2).fit(rows, y, groups=groups)
    np.testing.assert_array_equal(other.population_parameters_, alone)
