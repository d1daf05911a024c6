"""What goes wrong in an engine is its own error, and large integers stay whole."""

import duckdb
import narwhals as nw
import numpy as np
import pandas as pd
import polars as pl
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
