"""What engines of lazy frames see otherwise than a table in memory: types, NaN, and their own files."""

from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet
import pytest

from pfl_sklearn.statistics import ClientStatistics

COLUMNS = {"groups": "g", "target": "y", "features": ["x"]}


FILES = {
    "duckdb": lambda path: duckdb.connect().read_parquet(str(path)),
    "polars": pl.scan_parquet,
}


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
