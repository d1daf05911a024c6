"""Statistics of public tables by engine: models fitted from them are those of the rows."""

import dask.dataframe
import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pytest

from pfl_sklearn.linear_model import PersonalizedLinearRegression
from pfl_sklearn.priors import GaussianPrior
from pfl_sklearn.statistics import ClientStatistics


def radon(home):
    """Counties with one home, a feature that is constant in most, and basements as words."""
    table = pd.read_csv(home / "radon_us.csv.gz")
    table["where"] = table["floor"].map({0: "basement", 1: "ground"})  # 9: unknown
    columns = {"groups": "county_fips", "target": "log_radon", "features": ["where", "uranium_ppm"]}
    return table, {**columns, "levels": {"where": ["basement", "ground"]}}


def chem97(home):
    """Pupils, with words, weights and gaps."""
    table = pd.read_csv(home / "chem97.csv.gz")
    rng = np.random.default_rng(0)
    table["weight"] = rng.integers(0, 4, len(table)) / 2
    table.loc[rng.random(len(table)) < 0.01, "age"] = np.nan
    columns = {"groups": "school", "target": "score", "features": ["gcsescore", "gender", "age"]}
    return table, {**columns, "levels": {"gender": ["F", "M"]}, "sample_weight": "weight"}


def movielens(home):
    """Users, by the time of a rating."""
    table = pd.read_csv(home / "movielens_small_ratings.csv.gz")
    return table, {"groups": "user", "target": "rating", "features": ["timestamp"]}


def elections(home):
    """Counties, over years far from zero, weighted by votes."""
    table = pd.read_csv(home / "election_county_2000_2020.csv.gz", dtype={"fips": str})
    table["share"] = table["votes_rep"] / table["votes_total"]
    table["weight"] = table["votes_total"] / 1e4
    columns = {"groups": "fips", "target": "share", "features": ["year"]}
    return table, {**columns, "sample_weight": "weight"}


ENGINES = {
    "polars": lambda table: pl.from_pandas(table).lazy(),
    "dask": lambda table: dask.dataframe.from_pandas(table, npartitions=3),
    "duckdb": lambda table: duckdb.connect().from_df(table),
    "chunks": lambda table: (table.iloc[k : k + 5000] for k in range(0, len(table), 5000)),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("read", [radon, chem97, movielens, elections])
def test_every_engine_gives_the_model_of_the_rows(read, engine, data_home):
    table, columns = read(data_home)
    used = [columns["groups"], columns["target"], *columns["features"]]
    table = table[[*used, *([columns["sample_weight"]] if "sample_weight" in columns else [])]]
    rows = ClientStatistics.from_frame(table, **columns, missing="drop")
    by_engine = ClientStatistics.from_chunks if engine == "chunks" else ClientStatistics.from_frame
    summed = by_engine(ENGINES[engine](table), **columns, missing="drop")
    assert summed.n_left_out == rows.n_left_out
    estimated = PersonalizedLinearRegression(random="intercept").fit_statistics(rows)
    known = PersonalizedLinearRegression(
        GaussianPrior(covariance=estimated.prior_.covariance),
        random="intercept",
        noise_variance=estimated.noise_variance_,
    )
    expected, model = (
        PersonalizedLinearRegression(**known.get_params(deep=False)).fit_statistics(each)
        for each in (rows, summed)
    )
    np.testing.assert_array_equal(model.clients_, expected.clients_)
    for name in ("coef_", "population_coef_", "coef_std_", "log_likelihood_"):
        ours, theirs = getattr(model, name), getattr(expected, name)
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, err_msg=name)
    scale = np.abs(expected.intercept_).max()
    np.testing.assert_allclose(model.intercept_, expected.intercept_, atol=1e-9 * scale)
