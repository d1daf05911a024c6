"""Engines of lazy frames read what a table in memory has: types, NaN, and files of their own."""

import datetime as dt
from decimal import Decimal
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet
import pytest

from pfl_sklearn.statistics import ClientStatistics, _queries

COLUMNS = {"groups": "g", "target": "y", "features": ["x"]}


FILES = {"duckdb": lambda path: duckdb.connect().read_parquet(str(path)), "polars": pl.scan_parquet}


@pytest.mark.parametrize("read", FILES.values(), ids=FILES)
@pytest.mark.parametrize("column", ["x", "w", "g"])
def test_nan_in_a_file_whose_bounds_ignore_it_is_missing(read, column, tmp_path):
    """PyArrow's bounds of a column do not tell of NaN, and engines skip what bounds exclude."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"g": np.repeat([1.0, 2.0], 6), "w": 1.0}).assign(
        x=rng.normal(size=12), y=rng.normal(size=12)
    )
    frame.loc[2, column] = np.nan
    path = tmp_path / "rows.parquet"
    pa.parquet.write_table(pa.table({name: frame[name].to_numpy() for name in frame}), path)
    with pytest.raises(ValueError, match="1 of 12 rows lack"):
        ClientStatistics.from_frame(read(path), **COLUMNS, sample_weight="w")
    kept = ClientStatistics.from_frame(read(path), **COLUMNS, sample_weight="w", missing="drop")
    rows = ClientStatistics.from_frame(frame.drop(index=2), **COLUMNS, sample_weight="w")
    assert kept.n_left_out == 1
    np.testing.assert_array_equal(kept.n_samples_per_client, rows.n_samples_per_client)
    np.testing.assert_allclose(kept._sums(), rows._sums(), rtol=1e-12)


def test_the_query_of_the_guide_leaves_out_nan(tmp_path):
    guide = Path(__file__).parents[2] / "docs" / "user_guide" / "large_data.rst"
    query = guide.read_text(encoding="utf-8").split(".. code-block:: sql\n")[1].split("\n\n")[0]
    rng = np.random.default_rng(0)
    homes = pd.DataFrame({"county": np.repeat([1, 2], 6), "floor": np.tile([0, 1, 0], 4)})
    homes["log_radon"] = rng.normal(1.2, 0.8, 12)
    homes.loc[2, "log_radon"] = np.nan
    connection, path = duckdb.connect(), tmp_path / "homes.parquet"
    pa.parquet.write_table(pa.table({name: homes[name].to_numpy() for name in homes}), path)
    connection.execute(f"CREATE VIEW homes AS FROM '{path}'")
    columns = {"groups": "county", "target": "log_radon", "features": ["floor"]}
    kept = ClientStatistics.from_moments(
        connection.sql(query), **columns, centre=[0, 1.2], scale=[1, 0.8]
    )
    rows = ClientStatistics.from_frame(homes.drop(index=2), **columns)
    np.testing.assert_allclose(kept._sums(), rows._sums(), rtol=1e-12)


def wide(n_features, n_rows=60):
    rng = np.random.default_rng(0)
    X = pd.DataFrame(rng.normal(size=(n_rows, n_features))).add_prefix("x")
    return X.assign(g=np.arange(n_rows) % 5, y=rng.normal(size=n_rows))


def columns_of(names):
    return {"groups": "g", "target": "y", "features": [c for c in names if c.startswith("x")]}


def test_queries_read_the_columns_of_their_own_sums(monkeypatch, caplog):
    """Times grow with the cube of the number of columns if every query has all of them."""
    widths, select_numbers = [], _queries.select_numbers

    def counted(frame, columns, needed=None):
        result = select_numbers(frame, columns, needed)
        widths.append(len(result.collect_schema()) - 2)
        return result

    monkeypatch.setattr(_queries, "select_numbers", counted)
    monkeypatch.setattr(_queries, "_SUMS_AT_ONCE", 8)
    monkeypatch.setattr(_queries, "_TILE", 2)
    caplog.set_level("INFO", "pfl_sklearn.statistics")
    frame = wide(10)
    kept = ClientStatistics.from_frame(pl.from_pandas(frame).lazy(), **columns_of(frame.columns))
    assert widths[0] == 11  # of the scale
    n_sums = 2 + 3 * 11 + 11 * 12 // 2
    assert len(widths) - 1 == -(-n_sums // 8)
    assert max(widths[1:]) <= 8
    assert [record.message for record in caplog.records][-1] == "query 13 of 13"
    rows = ClientStatistics.from_frame(frame, **columns_of(frame.columns))
    np.testing.assert_allclose(kept._sums(), rows._sums(), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(np.abs(kept.packed), np.abs(rows.packed), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("at", "column"), [(1, None), (2, None), (2, "g"), (2, "x8"), (3, "g"), (3, "x8")]
)
def test_rows_that_change_between_queries_are_refused(at, column):
    """One row is gone, has another client, or another value, after so many of four queries."""
    frame, queries = pl.from_pandas(wide(9)), []
    first = pl.int_range(pl.len()) == 0

    def rows(part):
        queries.append(None)
        if len(queries) <= at:
            return part
        if column is None:
            return part[1:]
        return part.with_columns(pl.when(first).then(3).otherwise(pl.col(column)).alias(column))

    with pytest.raises(ValueError, match="the data changed between two queries"):
        ClientStatistics.from_frame(frame.lazy().map_batches(rows), **columns_of(frame.columns))


ENGINES = {
    "pandas": pa.Table.to_pandas,
    "pandas of Arrow": lambda rows: rows.to_pandas(types_mapper=pd.ArrowDtype),
    "polars": pl.from_arrow,
    "lazy": lambda rows: pl.from_arrow(rows).lazy(),
    "arrow": lambda rows: rows,
    "chunks": lambda rows: rows.to_batches(),
    "duckdb": duckdb.from_arrow,
}
SECONDS = [dt.timedelta(seconds=k) for k in (1, 1, 2, 2)]
ROME = pa.timestamp("us", "Europe/Rome")
TIMES = [dt.datetime(2020, 1, k, tzinfo=dt.UTC) for k in (1, 1, 2, 2)]


def of_engine(engine, change):
    rows = {"g": [1, 1, 2, 2], "x": [0.0, 1, 5, 3], "y": [0.0, 1, 2, 3], "w": [1.0, 1, 1, 1]}
    frame = ENGINES[engine](pa.table({**rows, **change}))
    read = ClientStatistics.from_chunks if engine == "chunks" else ClientStatistics.from_frame
    return read(frame, **COLUMNS, sample_weight="w", missing="drop")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("change", "sums"),
    [
        ({"x": [2**53 + 1, 1, 2**54 + 1, 3]}, [2.0**53, 2.0**54]),
        ({"x": [Decimal("1.5"), None, Decimal(2), Decimal(3)]}, [1.5, 5]),
        ({"x": [True, None, True, False]}, [1, 1]),
        ({"w": pa.array([2**53 + 1, 1, 1, 1])}, [1, 8]),
        ({"g": SECONDS}, [1, 8]),
        ({"g": pa.array(TIMES, type=ROME)}, [1, 8]),
    ],
    ids=["large integers", "decimals", "flags", "large weights", "durations", "zones"],
)
def test_engines_read_columns_of_the_same_types(engine, change, sums):
    kept = of_engine(engine, change)
    np.testing.assert_allclose(kept._sums()[:, 1], sums, rtol=1e-12)
    expected = {"g": [1, 2], **change}["g"]
    expected = np.unique(expected).astype(kept.clients.dtype) if "g" in change else expected
    np.testing.assert_array_equal(kept.clients, expected)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"w": [1.0, np.inf, 1, 1]}, r"^sample_weight must be finite; got infinity"),
        ({"x": [1.0, np.inf, 1, 1]}, r"^features and targets must be finite; got infinity"),
        ({"x": SECONDS}, r"^column 'x' holds dates or times, not numbers"),
        ({"x": [day.date() for day in TIMES]}, r"^column 'x' holds dates or times, not numbers"),
        ({"x": pa.nulls(4)}, r"^found 4 rows, none of which is complete"),
        ({"g": [{"a": 1}] * 4}, r"^groups holds ids of type .*; expected integers, strings"),
        ({"g": [[1]] * 4}, r"^groups holds ids of type .*; expected integers, strings"),
    ],
    ids=["weights", "features", "durations", "dates", "nulls", "structs", "lists"],
)
def test_engines_refuse_columns_of_the_same_types(engine, change, match):
    with pytest.raises(ValueError, match=match):
        of_engine(engine, change)
