"""Rounds on disk: killed and resumed, and files that are not what they should be."""

import errno
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
import zipfile

import numpy as np
import pytest
from sklearn.base import clone

from pfl_sklearn import PPSGDClassifier, PPSGDRegressor
from pfl_sklearn._rounds.checkpoint import Checkpoint
from pfl_sklearn._rounds.loop import State
from pfl_sklearn.privacy import PrivacyLedger
from tests.helpers.checkpointed_run import PRIVATE, ROOT, checkpointed_run, table
from tests.helpers.interruption import interrupt

pytestmark = pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")

SCRIPT = "tests.helpers.checkpointed_run"
FITTED = ("population_coef_", "coef_", "intercept_", "n_samples_per_client_", "clients_")


def assert_same_fit(one, other):
    for name in FITTED:
        first, second = getattr(one, name), getattr(other, name)
        np.testing.assert_array_equal(first, second)
    np.testing.assert_equal(one.history_, other.history_)
    assert one.privacy_ == other.privacy_
    assert one.n_rounds_ == other.n_rounds_


@pytest.mark.parametrize(
    ("params", "sparse", "at"),  # 9: the last round was written, but the file not yet removed
    [
        ({"average": True, "client_fraction": 0.5}, False, 7),
        (PRIVATE, False, 9),
        ({**PRIVATE, "average": True, "clip_quantile": 0.3}, True, 7),
        ({"epsilon": 2.0, "clip_norm": 1.0, "learning_rate": 0.1}, False, 7),
    ],
    ids=str,
)
def test_an_interrupted_fit_ends_in_the_same_bits(tmp_path, params, sparse, at):
    data = X, y, groups = table(sparse)
    model = PPSGDRegressor(n_rounds=9, random_state=3, **params)
    whole = clone(model).fit(X, y, groups=groups)
    model.set_params(checkpoint=tmp_path / "run.npz", checkpoint_every=3)
    interrupt(clone(model), data, at)
    resumed = clone(model).fit(X, y, groups=groups)
    assert_same_fit(resumed, whole)
    assert os.listdir(tmp_path) == []


def test_an_interrupted_warm_start(tmp_path):
    data = X, y, groups = table()
    model = PPSGDRegressor(n_rounds=10, random_state=3, warm_start=True, **PRIVATE)
    whole = clone(model).set_params(n_rounds=20).fit(X, y, groups=groups)
    model.fit(X, y, groups=groups).set_params(n_rounds=20, checkpoint=tmp_path / "run")
    model.set_params(checkpoint_every=2)
    before = model.population_coef_.copy()
    interrupt(model, data, 15)
    np.testing.assert_array_equal(model.population_coef_, before)
    assert model.n_rounds_ == 10
    assert model.fit(X, y, groups=groups).privacy_ == whole.privacy_
    np.testing.assert_array_equal(model.coef_, whole.coef_)


def test_a_warm_start_after_other_rounds(tmp_path):
    """Rounds without noise may not be taken for those of a private fit."""
    data = X, y, groups = table()
    private = PPSGDRegressor(n_rounds=4, random_state=3, warm_start=True, **PRIVATE)
    plain = clone(private).set_params(noise_multiplier=None).fit(X, y, groups=groups)
    assert plain.privacy_.epsilon == math.inf
    more = {"n_rounds": 8, "checkpoint": tmp_path / "run", "checkpoint_every": 2}
    interrupt(plain.set_params(noise_multiplier=private.noise_multiplier, **more), data, 7)
    refused(private.fit(X, y, groups=groups).set_params(**more), r"checkpoint.*after other rounds")


@pytest.mark.slow
def test_a_process_that_is_killed(tmp_path):
    process = subprocess.Popen([sys.executable, "-m", SCRIPT, tmp_path], cwd=ROOT)
    deadline = time.monotonic() + 60
    while not (tmp_path / "run.npz").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert 0 < round_of(tmp_path / "run.npz") < 100
    resumed = checkpointed_run(tmp_path)
    assert not (tmp_path / "run.npz").exists()
    entries = PrivacyLedger(tmp_path / "ledger.jsonl").entries
    assert len(entries) == 1
    assert entries[0]["process"] == process.pid
    assert_same_fit(resumed, checkpointed_run(tmp_path))
    total = PrivacyLedger(tmp_path / "ledger.jsonl")
    assert len(total.entries) == 2


def test_what_a_killed_process_left_half_written_goes(tmp_path):
    X, y, groups = table()
    path, other = tmp_path / "run [1]", tmp_path / "run 1.77.partial"
    for half in (tmp_path / "run [1].77.partial", other):
        half.write_bytes(b"half of a file")
    PPSGDRegressor(n_rounds=2, checkpoint=path).fit(X, y, groups=groups)
    assert os.listdir(tmp_path) == [other.name]


def round_of(path):
    with np.load(path) as file:
        return json.loads(str(file["meta"]))["round"]


@pytest.fixture
def left(tmp_path):
    """A model with a checkpoint of round 8 of 20."""
    X, y, groups = table()
    model = PPSGDRegressor(
        n_rounds=20, random_state=3, checkpoint=tmp_path / "run", checkpoint_every=4, **PRIVATE
    )
    return interrupt(model, (X, y, groups), 9)


def refused(model, match, data=None):
    """The fit fails, with the file and the estimator as they were."""
    X, y, groups = table() if data is None else data
    written = model.checkpoint.read_bytes()
    before = dict(vars(model))
    with pytest.raises(ValueError, match=match):
        model.fit(X, y, groups=groups)
    assert vars(model) == before
    assert model.checkpoint.read_bytes() == written


OTHERS = {
    "alpha": 0.5,
    "learning_rate": 0.2,
    "noise_multiplier": 2.0,
    "clip_norm": 2.0,
    "n_rounds": 30,
    "client_fraction": 0.5,
    "average": True,
    "batch_size": 3,
    "shuffle": False,
}


def test_another_parameter(left):
    for name, value in OTHERS.items():
        model = clone(left).set_params(**{name: value})
        refused(model, f"checkpoint.*{name}=")


def test_parameters_that_do_not_matter(left):
    X, y, groups = table()
    left.set_params(n_jobs=1, unseen="error", checkpoint_every=100)
    assert left.fit(X, y, groups=groups).n_rounds_ == 20


def test_another_ledger(left, tmp_path):
    """A fit that was not charged does not end as one that was."""
    refused(left.set_params(ledger=PrivacyLedger(tmp_path / "new")), "ledger=None")
    assert left.ledger.entries == []


def test_another_class(left):
    X, y, groups = table()
    other = PPSGDClassifier(
        n_rounds=20, random_state=3, checkpoint=left.checkpoint, loss="squared_error", **PRIVATE
    )
    refused(other, r"class=PPSGDRegressor.*PPSGDClassifier", (X, y > 0, groups))


def test_another_seed(left):
    refused(left.set_params(random_state=4), r"checkpoint.*rows.*random_state")


@pytest.mark.parametrize("part", ["X", "y", "groups", "ids", "rows"])
def test_other_data(left, part):
    X, y, groups = table()
    if part == "X":
        X[3, 0] += 1e-9
    elif part == "y":
        y[0] = np.nextafter(y[0], 9)
    elif part == "groups":
        groups[groups == 4] = 5
        groups[np.flatnonzero(groups == 5)[0]] = 4
    elif part == "ids":
        groups = groups + 1
    else:
        X, y, groups = X[:-1], y[:-1], groups[:-1]
    refused(left, r"checkpoint.*X, y or groups", (X, y, groups))


def test_a_damaged_file(left):
    content = left.checkpoint.read_bytes()
    third, half = len(content) // 3, len(content) // 2
    overwritten = content[:third] + bytes(64) + content[third + 64 :]
    for damaged in (b"", content[:half], b"dear diary", overwritten):
        left.checkpoint.write_bytes(damaged)
        refused(left, "not a checkpoint file")


META = json.dumps({"format": 2, "parameters": {}, "data": "", "round": 1})
FOREIGN = {
    "array": lambda file: np.save(file, np.arange(3)),
    "archive": lambda file: np.savez(file, a=np.arange(3)),
    "pickle": lambda file: np.savez(file, meta=np.array([{}], dtype=object)),
    "meta": lambda file: np.savez(file, meta="{}"),
    "list": lambda file: np.savez(file, meta="[1]"),
    "arrays": lambda file: np.savez(file, meta=META),
    "zip": lambda file: zipfile.ZipFile(file, "w").writestr("a.txt", "hello"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_file(left, kind):
    with open(left.checkpoint, "wb") as file:
        FOREIGN[kind](file)
    refused(left, "not a checkpoint file|checkpoint.*class=")


def test_a_damaged_list_of_arrays_is_refused(left):
    """Bits of it that leave an array out, or ask for a compression that nobody knows."""
    path = left.checkpoint
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    unknown = bytearray(path.read_bytes())
    unknown[unknown.index(b"PK\x01\x02") + 10] = 77
    del arrays["round"]
    with open(path, "wb") as file:
        np.savez(file, **arrays)
    refused(left, r"checkpoint '.*run' is damaged: it lacks some")
    path.write_bytes(unknown)
    refused(left, r"checkpoint '.*run' is not a checkpoint file, or damaged")


def test_a_file_of_another_format(left):
    with np.load(left.checkpoint) as file:
        arrays = dict(file)
    meta = json.loads(str(arrays.pop("meta"))) | {"format": 99}
    with open(left.checkpoint, "wb") as file:
        np.savez(file, meta=json.dumps(meta), **arrays)
    refused(left, r"format 99\b.*\b2\b")


def test_a_directory(tmp_path):
    X, y, groups = table()
    model = PPSGDRegressor(n_rounds=2, checkpoint=tmp_path)
    before = dict(vars(model))
    with pytest.raises(ValueError, match="not a checkpoint file"):
        model.fit(X, y, groups=groups)
    assert vars(model) == before


@pytest.mark.parametrize("folder", ["none", "file", "read-only"])
def test_a_folder_that_cannot_be_written_costs_nothing(tmp_path, folder):
    X, y, groups = table()
    (tmp_path / "file").write_text("")
    (tmp_path / "read-only").mkdir(mode=0o500)
    if folder == "read-only" and os.access(tmp_path / folder, os.W_OK):
        pytest.skip("this user may write anywhere")
    ledger = PrivacyLedger(tmp_path / "ledger.jsonl")
    path = tmp_path / folder / "run"
    model = PPSGDRegressor(n_rounds=20, checkpoint=path, ledger=ledger, **PRIVATE)
    before = dict(vars(model))
    with pytest.raises(OSError, match=f"checkpoint.*{folder}/run'.*Errno"):
        model.fit(X, y, groups=groups)
    assert vars(model) == before
    assert ledger.entries == []


def test_no_file_is_left_behind_and_none_holds_code(tmp_path):
    X, y, groups = table()
    model = PPSGDRegressor(n_rounds=20, checkpoint=tmp_path / "run", checkpoint_every=1)
    model.fit(X, y, groups=groups)
    assert os.listdir(tmp_path) == []
    interrupt(model, (X, y, groups), 10)
    assert os.listdir(tmp_path) == ["run"]
    with np.load(tmp_path / "run", allow_pickle=False) as file:
        assert all(file[name].dtype.kind in "fiuU" for name in file.files)


@pytest.mark.parametrize(("n_files", "after"), [(0, "starts anew"), (2, "goes on after round 8")])
def test_a_full_disk_ends_in_one_sentence_and_leaves_the_file_before(
    tmp_path, monkeypatch, n_files, after
):
    X, y, groups = table()
    model = PPSGDRegressor(
        n_rounds=20, random_state=3, checkpoint=tmp_path / "run", checkpoint_every=4, **PRIVATE
    )
    whole = clone(model).fit(X, y, groups=groups)
    fsync, calls = os.fsync, itertools.count(1)

    def until_full(file):
        if next(calls) > n_files:  # in the middle of the next one
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(file)

    monkeypatch.setattr(os, "fsync", until_full)
    before, written = dict(vars(model)), 4 * (n_files + 1)
    with pytest.raises(
        OSError, match=rf"checkpoint '.*run'.*after round {written}.*Errno 28.*fit again.*{after}"
    ):
        model.fit(X, y, groups=groups)
    assert vars(model) == before
    assert os.listdir(tmp_path) == ["run"] * (n_files > 0)
    monkeypatch.undo()
    assert_same_fit(model.fit(X, y, groups=groups), whole)
    assert os.listdir(tmp_path) == []


def test_an_interruption_while_a_file_is_written_leaves_the_file_before(tmp_path, monkeypatch):
    X, y, groups = table()
    model = PPSGDRegressor(n_rounds=9, random_state=3, checkpoint=tmp_path / "run")
    whole = clone(model).fit(X, y, groups=groups)
    replace, calls = os.replace, itertools.count(1)

    def interrupted(*paths):
        if next(calls) == 3:
            raise KeyboardInterrupt
        replace(*paths)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.set_params(checkpoint_every=2).fit(X, y, groups=groups)
    assert os.listdir(tmp_path) == ["run"]
    assert round_of(tmp_path / "run") == 4
    assert_same_fit(model.fit(X, y, groups=groups), whole)


def test_what_another_run_is_writing_stays(tmp_path, monkeypatch):
    """Two runs with one path; the first ends while the second writes."""
    pytest.importorskip("fcntl")
    X, y, groups = table()
    path, seen = tmp_path / "run", []
    other, fsync = Checkpoint(path, 1, {}), os.fsync

    def meanwhile(file):
        fsync(file)
        monkeypatch.setattr(os, "fsync", fsync)
        written = os.listdir(tmp_path)
        PPSGDRegressor(n_rounds=2, checkpoint=path).fit(X, y, groups=groups)
        seen.append((written, os.listdir(tmp_path)))

    monkeypatch.setattr(os, "fsync", meanwhile)
    other.observe(State({}, {}, {}, 1.0, round=1))
    ((before, after),) = seen
    assert after == before
    assert len(before) == 1
    assert os.listdir(tmp_path) == ["run"]
