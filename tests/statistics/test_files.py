"""Files of statistics: written whole or not at all, and held to what rows can be like."""

import dataclasses
import io
import json
import os
import zlib

import numpy as np
import pandas as pd
import pyarrow.parquet
import pytest

from pfl_sklearn.statistics import ClientStatistics

RNG = np.random.default_rng(0)
X, GROUPS = RNG.normal(size=(40, 1)), np.repeat([0, 1, 2, 3], 10)
Y = X[:, 0] + RNG.normal(size=40)
KEPT = ClientStatistics.from_rows(X, Y, groups=GROUPS)
PRIVATE = ClientStatistics.from_rows(X, Y, groups=GROUPS, feature_bound=1.0, target_bound=1.0)
FIELDS = [field.name for field in dataclasses.fields(ClientStatistics)]


def same(first, second):
    return all(
        np.array_equal(getattr(first, name), getattr(second, name))
        for name in FIELDS
        if getattr(second, name) is not None
    )


@pytest.fixture
def path(tmp_path):
    KEPT.to_parquet(tmp_path / "kept.parquet")
    return tmp_path / "kept.parquet"


def test_a_full_disk_leaves_the_last_file(path):
    """The system's own error, in the middle of the file."""
    resource = pytest.importorskip("resource")
    written, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"cannot be written to .*kept\.parquet.*as it was"):
            PRIVATE.to_parquet(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == written
    assert os.listdir(path.parent) == ["kept.parquet"]


def test_what_a_killed_process_left_half_written_goes(path):
    path.with_name("kept.parquet.77.partial").write_bytes(b"half of a file")
    PRIVATE.to_parquet(path)
    assert os.listdir(path.parent) == ["kept.parquet"]
    assert same(ClientStatistics.from_parquet(path), PRIVATE)


def test_a_new_file_is_as_readable_as_the_last_and_a_link_stays_one(path, tmp_path):
    path.chmod(0o600)
    (tmp_path / "link").symlink_to(path)
    PRIVATE.to_parquet(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert path.stat().st_mode & 0o777 == 0o600
    assert same(ClientStatistics.from_parquet(path), PRIVATE)


def test_only_regular_files_are_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "", "none/kept.parquet"):
        with pytest.raises(OSError, match=r"cannot be written to"):
            KEPT.to_parquet(tmp_path / name)
    assert os.listdir(tmp_path) == ["pipe"]
    assert not (tmp_path / "pipe").is_file()


def test_open_files_are_written_and_read():
    file = io.BytesIO()
    KEPT.to_parquet(file)
    assert same(ClientStatistics.from_parquet(file), KEPT)


def test_no_bit_changes_the_statistics_silently(path):
    whole, n_refused = path.read_bytes(), 0
    for at in np.random.default_rng(1).integers(8 * len(whole), size=150):
        changed = bytearray(whole)
        changed[at // 8] ^= 1 << at % 8
        try:
            assert same(ClientStatistics.from_parquet(io.BytesIO(changed)), KEPT)
        except ValueError:
            n_refused += 1
    assert n_refused > 75  # others are in smallest and largest values of pages, which nobody reads


def rewrite(path, columns=None, kept=KEPT, metadata=None, **facts):
    """Write statistics with other columns or facts, and the checksums of these."""
    kept.to_parquet(path)
    table = pyarrow.parquet.read_table(path)
    for name, values in (columns or {}).items():
        at = table.column_names.index(name)
        table = table.remove_column(at)
        if values is not None:
            table = table.add_column(at, name, pyarrow.array(values))
    known = json.loads(table.schema.metadata[b"pfl_sklearn"])
    text = json.dumps({**known, **facts}) if metadata is None else metadata
    checksum = str(zlib.crc32(text.encode()))
    metadata = {"pfl_sklearn": text, "pfl_sklearn_crc32": checksum}
    pyarrow.parquet.write_table(table.replace_schema_metadata(metadata), path)


def triangles(**entries):
    """Triangles with another entry of client 2: of ones, feature, target, row by row."""
    packed = KEPT.packed.copy()
    for name, value in entries.items():
        packed[2, int(name[1:])] = value
    return packed.tolist()


def of_client_2(values, value):
    changed = np.array(values)
    changed[2] = value
    return changed.tolist()


LARGE = np.array([1, 2, 3, 2**63 + 4], dtype=np.uint64)


@pytest.mark.parametrize(
    ("columns", "facts", "match"),
    [
        ({"client": [0.5, 1.5, 2.5, 3.5]}, {}, "clients that are no ids of type '<i8'.*double"),
        ({"client": LARGE}, {}, "clients that are no ids of type '<i8'"),
        ({"client": ["abc", "abd", "x", "y"]}, {"ids": "<U2"}, "no ids of type '<U2'"),
        ({"client": ["a", "a\0", "b", "c"]}, {"ids": "U"}, "no ids of type 'U'"),
        ({}, {"ids": "<U999999999"}, "no ids of type '<U999999999'"),
        ({"client": [[0], [1], [2], [3]]}, {"ids": "|O"}, r"no ids of type '\|O'"),
        ({"client": np.array([1, 2, 3, 4], "M8[ms]")}, {"ids": "<M8[D]"}, "no ids of type '<M8"),
        ({"n": [10, 10, 2**62, 10]}, {}, "n of more rows than can be counted"),
        ({"n": [10, 10, 11, 10]}, {}, "client 2.*n rows have no weights with its triangle"),
        ({"n": [10, 10, 1, 10]}, {}, "client 2.*triangle is no triangle of rows"),
        ({"n": np.full(4, 10, dtype=np.int8)}, {}, "whole numbers as n"),
        ({"log_weight": [0.0, 0.0, 1e300, 0.0]}, {}, "client 2.*log_weight"),
        ({"log_weight": [0.0, 0.0, -1e300, 0.0]}, {}, "client 2.*log_weight"),
        ({"triangle": triangles(_3=-1.0)}, {}, "client 2.*its triangle"),
        ({"triangle": triangles(_3=9.0)}, {}, "client 2.*its triangle"),
        ({"triangle": triangles(_4=1e200)}, {}, "client 2.*its triangle"),
        ({"lowest": of_client_2(KEPT.lowest, -1e300)}, {}, "X holds values too large"),
        ({"lowest": [[-9.0], [-9.0, -9.0, -9.0]] + [[-9.0, -9.0]] * 2}, {}, "different lengths"),
        ({"lowest": [-9.0] * 4}, {}, "a list of numbers"),
        ({}, {"feature_names": ["u", "u"], "n_features": 2}, "feature_names="),
        ({}, {"n_left_out": 2**60}, "n_left_out="),
        ({}, {"parts": ["a", "a"]}, "parts="),
        ({}, {"format": "pfl_sklearn client statistics 1"}, "format 'pfl.* 1'; expected .*2"),
        ({}, {"metadata": "[" * 5_000}, "no file that ClientStatistics"),
        ({"n": [10.5, 10, 10, 10]}, {}, "whole numbers as n"),
        ({"n": [None, 10, 10, 10]}, {}, "whole numbers as n"),
        ({"n": [10, 10, 0, 10]}, {}, "n must be at least 1"),
        ({"log_weight": [np.nan] * 4}, {}, "finite numbers as log_weight"),
        ({"lowest": of_client_2(KEPT.lowest, np.inf)}, {}, "finite numbers as lowest"),
        ({"lowest": (KEPT.lowest + 20).tolist()}, {}, "lowest is above highest"),
        ({"highest": [None, *[[9.0, 9.0]] * 3]}, {}, "1.5 numbers of a client as highest"),
        ({"client": [None, 0, 1, 2]}, {}, "without a client"),
        ({"client": [0, 0, 1, 1]}, {}, "4 rows of 2 clients; expected one each"),
        ({"triangle": None}, {}, "has the columns"),
        ({"triangle": KEPT.packed[:, 1:].tolist()}, {}, "5 numbers of a client as triangle; exp"),
        ({"triangle": triangles(_4=np.nan)}, {}, "finite numbers as tri"),
        ({"triangle": triangles(_0=0.0)}, {}, "client 2.*its triangle"),
        ({"triangle": triangles(_1=90.0)}, {}, "triangle of rows"),
        ({}, {"n_features": 2.0}, "n_features=2.0"),
        ({}, {"n_features": -1, "n_targets": 3}, "n_features=-1"),
        ({}, {"n_features": True}, "n_features=True"),
        ({}, {"n_left_out": -5}, "n_left_out=-5"),
        ({}, {"feature_names": ["u", "v"]}, r"feature_names=\['u', 'v'\]"),
        ({}, {"target_names": [1]}, r"target_names=\[1\]"),
        ({}, {"feature_bound": "2"}, "feature_bound='2'"),
        ({}, {"ids": "no type"}, "clients that are no ids of type 'no type'"),
        ({}, {"ids": None}, "ids=None"),
        ({}, {"more": 1}, "the fields"),
        ({}, {"target_bound": float("nan")}, "bounds that no statistics have"),
        ({}, {"target_bound": 10**400}, "bounds that no statistics have"),
    ],
)
def test_what_no_rows_have_is_refused(path, columns, facts, match):
    rewrite(path, columns, **facts)
    with pytest.raises(ValueError, match=rf"kept\.parquet.*{match}"):
        ClientStatistics.from_parquet(path)


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        ({"n": [10, 10, 9, 10]}, "n rows have no weights"),
        ({"lowest": [[-1.0, -1e151]] * 4, "highest": [[9.0, 1e151]] * 4}, "beyond those"),
    ],
)
def test_what_no_rows_of_a_private_fit_have_is_refused(path, columns, match):
    rewrite(path, columns, PRIVATE)
    with pytest.raises(ValueError, match=rf"kept\.parquet.*{match}"):
        ClientStatistics.from_parquet(path)


def test_repeated_columns_and_facts_without_their_checksum_are_refused(path):
    table = pyarrow.parquet.read_table(path)
    twice = table.append_column("n", table["n"])
    other = {**table.schema.metadata, b"pfl_sklearn_crc32": b"1"}
    for changed, match in (
        (twice, "the columns"),
        (table.replace_schema_metadata(other), "facts about its table that changed"),
    ):
        pyarrow.parquet.write_table(changed, path)
        with pytest.raises(ValueError, match=rf"kept\.parquet.*{match}"):
            ClientStatistics.from_parquet(path)


MOMENTS = {
    "g": [0, 1],
    "n": [2, 2],
    "w": [1.0, 1.0],
    "log_w": [2 * np.log(0.5)] * 2,
    "s_0": [0.5, 0.5],
    "p_0_0": [0.5, 0.5],
    "low_0": [0.0, 0.0],
    "high_0": [1.0, 1.0],
}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"p_0_0": [0.5, 0.6]}, "client 1 have squares that need values beyond low_j or high_j"),
        ({"log_w": [2 * np.log10(0.5)] * 2}, "client 0 are wrong.*natural logarithms"),
        ({"n": [2, 2**62]}, "n of more rows than can be counted"),
    ],
)
def test_moments_that_no_rows_have_are_refused(change, match):
    def read(moments):
        return ClientStatistics.from_moments(pd.DataFrame(moments), groups="g", target="y")

    assert read(MOMENTS).n_samples_per_client.tolist() == [2, 2]
    with pytest.raises(ValueError, match=match):
        read({**MOMENTS, **change})
