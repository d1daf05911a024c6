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


CONFIGURATIONS = [
    ({}, False),
    ({**PRIVATE, "client_fraction": 0.5}, False),
    ({**PRIVATE, "clip_quantile": 0.5, "average": True}, False),
    ({**PRIVATE, "client_fraction": 0.5}, True),
    ({**PRIVATE, "average": True, "clip_quantile": 0.3}, True),
    ({"epsilon": 2.0, "clip_norm": 1.0, "learning_rate": 0.1}, False),
]


@pytest.mark.slow
@pytest.mark.parametrize(("params", "sparse"), CONFIGURATIONS, ids=str)
@pytest.mark.parametrize("at", [7, 29])
def test_an_interrupted_fit_ends_in_the_same_bits(tmp_path, params, sparse, at):
    data = X, y, groups = table(sparse)
    model = PPSGDRegressor(n_rounds=30, random_state=3, **params)
    whole = clone(model).fit(X, y, groups=groups)
    model.set_params(checkpoint=tmp_path / "run.npz", checkpoint_every=3)
    interrupt(clone(model), data, at)
    resumed = clone(model).fit(X, y, groups=groups)
    assert_same_fit(resumed, whole)
    assert os.listdir(tmp_path) == []


def test_an_interruption_at_the_very_end(tmp_path):
    """The last round was written, but the file not yet removed."""
    data = X, y, groups = table(sparse=True)
    model = PPSGDRegressor(n_rounds=6, random_state=3, **PRIVATE)
    whole = clone(model).fit(X, y, groups=groups)
    model.set_params(checkpoint=str(tmp_path / "run"), checkpoint_every=3)
    interrupt(clone(model), data, 6)
    assert_same_fit(clone(model).fit(X, y, groups=groups), whole)


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


@pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")
def test_a_warm_start_after_other_rounds(tmp_path):
    """Rounds without noise may not be taken for those of a private fit."""
    data = X, y, groups = table()
    private = PPSGDRegressor(n_rounds=4, random_state=3, warm_start=True, **PRIVATE)
    plain = clone(private).set_params(noise_multiplier=None).fit(X, y, groups=groups)
    assert plain.privacy_.epsilon == math.inf
    more = {"n_rounds": 8, "checkpoint": tmp_path / "run", "checkpoint_every": 2}
    interrupt(plain.set_params(noise_multiplier=private.noise_multiplier, **more), data, 7)
    refused(private.fit(X, y, groups=groups).set_params(**more), r"checkpoint.*after other rounds")


def test_a_classifier_resumes(tmp_path):
    X, y, groups = table()
    labels = np.array(["no", "yes"])[(y > 0).astype(int)]
    model = PPSGDClassifier(n_rounds=12, random_state=1, average=True)
    whole = clone(model).fit(X, labels, groups=groups)
    model.set_params(checkpoint=tmp_path / "run", checkpoint_every=5)
    interrupt(clone(model), (X, labels, groups), 11)
    assert_same_fit(clone(model).fit(X, labels, groups=groups), whole)


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
    with open(model.checkpoint, "rb") as file:
        written = file.read()
    before = dict(vars(model))
    with pytest.raises(ValueError, match=match):
        model.fit(X, y, groups=groups)
    assert vars(model) == before
    with open(model.checkpoint, "rb") as file:
        assert file.read() == written


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("alpha", 0.5),
        ("learning_rate", 0.2),
        ("noise_multiplier", 2.0),
        ("clip_norm", 2.0),
        ("n_rounds", 30),
        ("client_fraction", 0.5),
        ("average", True),
        ("batch_size", 3),
        ("shuffle", False),
    ],
)
def test_another_parameter(left, name, value):
    refused(left.set_params(**{name: value}), f"checkpoint.*{name}=")


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


def test_a_class_of_ours_that_moved_to_another_module(left, monkeypatch):
    X, y, groups = table()
    monkeypatch.setattr(PPSGDRegressor, "__module__", "pfl_sklearn._elsewhere._base")
    assert left.fit(X, y, groups=groups).n_rounds_ == 20


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


def corrupt(content, kind):
    if kind == "empty":
        return b""
    if kind == "truncated":
        return content[: len(content) // 2]
    if kind == "text":
        return b"dear diary"
    middle = len(content) // 3
    return content[:middle] + bytes(64) + content[middle + 64 :]


@pytest.mark.parametrize("kind", ["empty", "truncated", "text", "overwritten"])
def test_a_damaged_file(left, kind):
    with open(left.checkpoint, "rb") as file:
        content = file.read()
    with open(left.checkpoint, "wb") as file:
        file.write(corrupt(content, kind))
    refused(left, "not a checkpoint file")


@pytest.mark.parametrize("kind", ["array", "archive", "zip", "pickle", "meta", "list", "arrays"])
def test_a_foreign_file(left, kind):
    path = left.checkpoint
    meta = json.dumps({"format": 2, "parameters": {}, "data": "", "round": 1})
    with open(path, "wb") as file:
        if kind == "array":
            np.save(file, np.arange(3))
        elif kind == "archive":
            np.savez(file, a=np.arange(3))
        elif kind == "pickle":
            np.savez(file, meta=np.array([{}], dtype=object))
        elif kind == "meta":
            np.savez(file, meta="{}")
        elif kind == "list":
            np.savez(file, meta="[1]")
        elif kind == "arrays":
            np.savez(file, meta=meta)
        else:
            with zipfile.ZipFile(file, "w") as archive:
                archive.writestr("a.txt", "hello")
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


@pytest.fixture
def full_after(monkeypatch):
    """A disk that takes so many checkpoints, and is full in the middle of the next one."""

    def set_up(n_files, error=errno.ENOSPC):
        fsync, calls = os.fsync, itertools.count(1)

        def until_full(file):
            if next(calls) > n_files:
                raise OSError(error, os.strerror(error))
            fsync(file)

        monkeypatch.setattr(os, "fsync", until_full)

    return set_up


@pytest.mark.parametrize(("n_files", "after"), [(0, "starts anew"), (2, "goes on after round 8")])
def test_a_full_disk_ends_in_one_sentence_and_leaves_the_file_before(
    tmp_path, monkeypatch, full_after, n_files, after
):
    X, y, groups = table()
    model = PPSGDRegressor(
        n_rounds=20, random_state=3, checkpoint=tmp_path / "run", checkpoint_every=4, **PRIVATE
    )
    whole = clone(model).fit(X, y, groups=groups)
    full_after(n_files)
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


def test_a_file_beyond_the_limit_of_its_size_leaves_nothing(tmp_path):
    """The system's own error, in the middle of an array."""
    resource = pytest.importorskip("resource")
    X, y, groups = table()
    model = PPSGDRegressor(n_rounds=4, checkpoint=tmp_path / "run", checkpoint_every=2)
    before, limits = dict(vars(model)), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"checkpoint '.*run'.*after round 2.*Errno 27") as caught:
            model.fit(X, y, groups=groups)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert isinstance(caught.value.__cause__, OSError)
    assert vars(model) == before
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


@pytest.mark.slow
def test_what_another_process_is_writing_stays_while_it_lives(tmp_path):
    pytest.importorskip("fcntl")
    X, y, groups = table()
    path = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-c", WRITING, path], stdout=subprocess.PIPE, cwd=ROOT, text=True
    )
    try:
        assert process.stdout.readline() == "writing\n"
        written = os.listdir(tmp_path)
        PPSGDRegressor(n_rounds=2, checkpoint=path).fit(X, y, groups=groups)
        assert os.listdir(tmp_path) == written
        assert len(written) == 1
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    PPSGDRegressor(n_rounds=2, checkpoint=path).fit(X, y, groups=groups)
    assert os.listdir(tmp_path) == []


# A process in the middle of a checkpoint, which waits to be killed.
WRITING = """
import os, signal, sys
from pfl_sklearn._rounds import checkpoint, loop

def wait(file):
    print("writing", flush=True)
    signal.pause()

os.fsync = wait
state = loop.State({}, {}, {}, 1.0, round=1)
checkpoint.Checkpoint(sys.argv[1], 1, {}).observe(state)
"""
