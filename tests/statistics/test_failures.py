"""What goes wrong in an engine, in a file or in the middle of a fit leaves everything as it was."""

import dataclasses

import duckdb
import narwhals as nw
import numpy as np
import pandas as pd
import polars as pl
import pytest

from pfl_sklearn.estimation import BernoulliMean, GaussianMean, PoissonMean
from pfl_sklearn.linear_model import PersonalizedLinearRegression
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
@pytest.mark.parametrize(
    ("read", "error"), [(failing_query, duckdb.Error), (failing_chunks, OSError)]
)
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


def state(model):
    return {name: value for name, value in vars(model).items() if name.endswith("_")} | {
        "_statistics": model._statistics
    }


@pytest.mark.parametrize(
    "model",
    [PersonalizedLinearRegression(), GaussianMean(), BernoulliMean(), PoissonMean()],
    ids=lambda model: type(model).__name__,
)
def test_a_fit_that_fails_leaves_the_last_one(model, monkeypatch):
    frame = draw()
    parts = [(part[["x"]], part["y"], part["g"]) for part in (frame[::2], frame[1::2])]
    model.partial_fit(*parts[0][:2], groups=parts[0][2])
    before = state(model)

    def fail(*args, **params):
        raise MemoryError("no room")

    module = "pfl_sklearn.linear_model._linear._fit_openly"
    if not isinstance(model, PersonalizedLinearRegression):
        module = f"pfl_sklearn.estimation.{MODULES[type(model)]}.report_of_fit"
    with monkeypatch.context() as patch:
        patch.setattr(module, fail)
        for again in (
            lambda: model.partial_fit(*parts[1][:2], groups=parts[1][2]),
            lambda: model.fit_statistics(
                ClientStatistics.from_frame(frame, groups="g", target="y", features=["x"])
            ),
        ):
            with pytest.raises(MemoryError):
                again()
            after = state(model)
            assert after.keys() == before.keys()
            assert all(after[name] is before[name] for name in before)
    model.partial_fit(*parts[1][:2], groups=parts[1][2])
    assert int(model._statistics.n_samples_per_client.sum()) == 200


MODULES = {GaussianMean: "_gaussian", BernoulliMean: "_bernoulli", PoissonMean: "_poisson"}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"packed": lambda packed: packed[:, 1:]}, "5 numbers of a client as triangle; expected 6"),
        ({"packed": lambda packed: np.where(packed == packed[3, 4], np.nan, packed)}, "client 3"),
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
