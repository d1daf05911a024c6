"""What goes wrong in an engine, in a file or in the middle of a fit leaves everything as it was."""

import dataclasses
import json

import duckdb
import narwhals as nw
import numpy as np
import pandas as pd
import polars as pl
import pyarrow.parquet
import pytest

from pfl_sklearn.statistics import ClientStatistics

COLUMNS = {"groups": "g", "target": "y", "features": ["x"]}


def draw(seed=0):
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"g": np.repeat(np.arange(20), 10), "x": rng.normal(size=200)})
    return frame.assign(y=(frame["x"] + rng.normal(size=200) > 0).astype(float))


def failing_query(bounds):
    """A relation that fails in a row that is read late."""
    connection = duckdb.connect()
    connection.register("rows", pd.concat([draw()] * 50).reset_index())
    query = (
        "SELECT g, y, CASE WHEN index = 199 THEN error('disk is gone') ELSE x END AS x FROM rows"
    )
    ClientStatistics.from_frame(connection.sql(query), **COLUMNS, **bounds)


def failing_chunks(bounds):
    """Chunks whose third cannot be read."""

    def chunks():
        for _ in range(2):
            yield draw()
        raise OSError("disk is gone")

    ClientStatistics.from_chunks(chunks(), **COLUMNS, **bounds)


@pytest.mark.parametrize("bounds", [{}, {"feature_bound": 1.0, "target_bound": 1.0}])
@pytest.mark.parametrize("read, error", [(failing_query, duckdb.Error), (failing_chunks, OSError)])
def test_the_engines_own_error_is_raised(read, error, bounds):
    with pytest.raises(error, match="disk is gone"):
        read(bounds)


@pytest.mark.parametrize("private", [False, True])
def test_an_engine_without_an_operation_is_named(private, monkeypatch):
    def lacking(self, *aggregates):
        raise NotImplementedError("`max` is not implemented")

    lazy = pl.from_pandas(draw()).lazy()
    monkeypatch.setattr(type(nw.from_native(lazy).group_by("g")), "agg", lacking)
    bounds = {"feature_bound": 1.0, "target_bound": 1.0} if private else {}
    with pytest.raises(NotImplementedError, match=r"polars.*`max` is not implemented.*from_chunks"):
        ClientStatistics.from_frame(lazy, **COLUMNS, **bounds)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"packed": lambda packed: packed[:, 1:]}, "5 numbers of a client as triangle; expected 6"),
        (
            {"packed": lambda packed: np.where(packed == packed[3, 4], np.nan, packed)},
            "finite numbers as tri",
        ),
        ({"packed": lambda packed: packed * [0, 1, 1, 1, 1, 1]}, "client 0 is wrong: its triangle"),
        ({"packed": lambda packed: packed + 90.0 * np.eye(6)[1]}, "triangle of rows"),
        ({"n_samples_per_client": lambda n: n - 10}, "n must be at least 1"),
        ({"lowest": lambda low: low + 20}, "lowest is above highest"),
        ({"clients": lambda ids: ids // 2}, "20 rows of 10 clients; expected one each"),
    ],
)
def test_files_that_were_changed_are_refused(change, match, tmp_path):
    kept = ClientStatistics.from_frame(draw(), **COLUMNS)
    changed = {name: of(getattr(kept, name)) for name, of in change.items()}
    dataclasses.replace(kept, **changed).to_parquet(tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match=rf"rows\.parquet.*{match}"):
        ClientStatistics.from_parquet(tmp_path / "rows.parquet")


@pytest.mark.parametrize(
    ("facts", "match"),
    [
        ({"n_features": 2.0}, "n_features=2.0"),
        ({"n_features": -1, "n_targets": 3}, "n_features=-1"),
        ({"n_features": True}, "n_features=True"),
        ({"n_left_out": -5}, "n_left_out=-5"),
        ({"feature_names": ["u", "v"]}, r"feature_names=\['u', 'v'\]"),
        ({"target_names": [1]}, r"target_names=\[1\]"),
        ({"feature_bound": "2"}, "feature_bound='2'"),
        ({"ids": "no type"}, "clients that are no ids of type 'no type'"),
        ({"ids": None}, "ids=None"),
        ({"more": 1}, "the fields"),
    ],
)
def test_facts_that_no_statistics_have_are_refused(facts, match, tmp_path):
    path = tmp_path / "rows.parquet"
    ClientStatistics.from_frame(draw(), **COLUMNS).to_parquet(path)
    table = pyarrow.parquet.read_table(path)
    known = json.loads(table.schema.metadata[b"pfl_sklearn"])
    changed = table.replace_schema_metadata({"pfl_sklearn": json.dumps({**known, **facts})})
    pyarrow.parquet.write_table(changed, path)
    with pytest.raises(ValueError, match=rf"rows\.parquet has {match}"):
        ClientStatistics.from_parquet(path)


@pytest.mark.parametrize(
    ("name", "values", "match"),
    [
        ("n", [10.5] * 20, "whole numbers as n"),
        ("n", [None] + [10] * 19, "whole numbers as n"),
        ("log_weight", [np.nan] * 20, "finite numbers as log_weight"),
        ("lowest", [[np.inf, 0.0]] * 20, "finite numbers as lowest"),
        ("highest", [None] + [[9.0, 9.0]] * 19, "1.9 numbers of a client as highest"),
        ("client", [None, *range(19)], "without a client"),
        ("triangle", None, "has the columns"),
    ],
)
def test_columns_that_no_statistics_have_are_refused(name, values, match, tmp_path):
    path = tmp_path / "rows.parquet"
    ClientStatistics.from_frame(draw(), **COLUMNS).to_parquet(path)
    table = pyarrow.parquet.read_table(path)
    at = table.column_names.index(name)
    if values is None:
        table = table.remove_column(at)
    else:
        table = table.set_column(at, name, pyarrow.array(values))
    pyarrow.parquet.write_table(table, path)
    with pytest.raises(ValueError, match=rf"rows\.parquet .*{match}"):
        ClientStatistics.from_parquet(path)


@pytest.mark.parametrize("kind", ["Int64", "category", "polars", "lazy", "float"])
def test_levels_of_large_integers_beside_a_missing_value(kind):
    """Neighbours beyond 2**53 are one float, which a missing value makes of integers in pandas."""
    codes = [2**53 + 1, 2**53 + 3, None, 2**53 + 3]
    columns = {"g": [0, 0, 1, 1], "y": [0.0, 1.0, 2.0, 3.0]}
    if kind in ("polars", "lazy"):
        frame = pl.DataFrame({**columns, "x": pl.Series(codes, dtype=pl.Int64)})
        frame = frame.lazy() if kind == "lazy" else frame
    else:
        values = pd.Series(codes) if kind == "float" else pd.Series(codes, dtype=object)
        frame = pd.DataFrame({**columns, "x": values if kind == "float" else values.astype(kind)})
    levels = {"levels": {"x": codes[:2]}, "missing": "drop"}
    if kind == "float":
        with pytest.raises(ValueError, match=r"'x' holds Float64.*2\*\*53"):
            ClientStatistics.from_frame(frame, **COLUMNS, **levels)
        return
    found = ClientStatistics.from_frame(frame, **COLUMNS, **levels)
    assert found.n_left_out == 1
    np.testing.assert_allclose(found._sums()[:, 1], [1.0, 1.0])
