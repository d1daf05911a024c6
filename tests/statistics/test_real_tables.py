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
from tests.helpers.slow import slow


def radon(home):
    """Counties, with basements as words and uranium that hardly varies within a county."""
    table = pd.read_csv(home / "radon_us.csv.gz")
    table["where"] = table["floor"].map({0: "basement", 1: "ground"})  # 9: unknown
    columns = {"groups": "county_fips", "target": "log_radon", "features": ["uranium_ppm", "where"]}
    return table, {**columns, "levels": {"where": ["basement", "ground"]}}


def chem97(home):
    """Pupils of schools."""
    table = pd.read_csv(home / "chem97.csv.gz")
    columns = {"groups": "school", "target": "score", "features": ["gcsescore", "age", "gender"]}
    return table, {**columns, "levels": {"gender": ["F", "M"]}}


def movielens(home):
    """Users, by the time of a rating, seconds far from zero."""
    table = pd.read_csv(home / "movielens_small_ratings.csv.gz")
    table["film"] = np.where(table["movie"] < 2000, "old", "new")
    columns = {"groups": "user", "target": "rating", "features": ["timestamp", "film"]}
    return table, {**columns, "levels": {"film": ["old", "new"]}}


def elections(home):
    """Counties, over years far from zero, weighted by votes."""
    table = pd.read_csv(home / "election_county_2000_2020.csv.gz", dtype={"fips": str})
    table["share"] = table["votes_rep"] / table["votes_total"]
    table["weight"] = table["votes_total"] / 1e4
    table["time"] = np.where(table["year"] < 2010, "before", "after")
    columns = {"groups": "fips", "target": "share", "features": ["year", "time"]}
    return table, {**columns, "levels": {"time": ["before", "after"]}}


def complete(table, columns):
    """The same with gaps, weights, a client of one row and a feature constant within clients."""
    rng, ids = np.random.default_rng(0), table[columns["groups"]]
    first = columns["features"][0]
    table = table.assign(**{first: table[first].mask(rng.random(len(table)) < 0.01)})
    if "weight" not in table:
        table["weight"] = rng.integers(0, 4, len(table)) / 2
    codes = ids.rank(method="dense").astype(int)
    table["kind"] = codes % 7 / 2
    table = table[(codes > 1) | ~codes.duplicated()]
    table.loc[table.index[codes[table.index] == 1], "weight"] = 1.5
    columns = {**columns, "features": [*columns["features"], "kind"], "sample_weight": "weight"}
    used = [columns["groups"], columns["target"], *columns["features"], "weight"]
    return table[used].sample(frac=1, random_state=0, ignore_index=True), columns


def fit_rows(model, table, columns):
    """The model, fitted to complete rows."""
    known = table.copy()
    for name, levels in columns["levels"].items():
        known[name] = table[name].map({level: float(k) for k, level in enumerate(levels)})
    known = known.dropna()
    return model.fit(
        known[columns["features"]],
        known[columns["target"]],
        groups=known[columns["groups"]],
        sample_weight=known["weight"],
    )


ENGINES = {
    "pandas": lambda table: table,
    "polars": lambda table: pl.from_pandas(table).lazy(),
    "dask": lambda table: dask.dataframe.from_pandas(table, npartitions=3),
    "duckdb": lambda table: duckdb.connect().from_df(table),
    "chunks": lambda table: (table.iloc[k : k + 5000] for k in range(0, len(table), 5000)),
}


# Many people rate within an hour, and the table has twenty years of seconds.
@pytest.mark.filterwarnings("ignore:sums of 'timestamp' lost digits:UserWarning")
@pytest.mark.parametrize("read", [radon, *slow([chem97, movielens, elections])])
def test_every_engine_gives_the_model_of_the_rows(read, data_home):
    table, columns = complete(*read(data_home))
    rows = ClientStatistics.from_frame(table, **columns, missing="drop")
    assert rows.n_left_out > 0
    assert rows.n_samples_per_client.min() == 1
    assert (rows.lowest == rows.highest).all(axis=0).any()
    estimated = PersonalizedLinearRegression(random="intercept").fit_statistics(rows)
    # Under the same variances; a search for them may end elsewhere on its flat top.
    known = {
        "prior": GaussianPrior(covariance=estimated.prior_.covariance),
        "random": "intercept",
        "noise_variance": estimated.noise_variance_,
    }
    expected = fit_rows(PersonalizedLinearRegression(**known), table, columns)
    for engine, give in ENGINES.items():
        by = ClientStatistics.from_chunks if engine == "chunks" else ClientStatistics.from_frame
        summed = by(give(table), **columns, missing="drop")
        assert summed.n_left_out == rows.n_left_out
        model = PersonalizedLinearRegression(**known).fit_statistics(summed)
        np.testing.assert_array_equal(model.clients_, expected.clients_)
        for name in ("coef_", "population_coef_", "coef_std_", "log_likelihood_"):
            ours, theirs = getattr(model, name), getattr(expected, name)
            np.testing.assert_allclose(ours, theirs, rtol=1e-9, err_msg=f"{engine}: {name}")
        scale = np.abs(expected.intercept_).max()
        np.testing.assert_allclose(model.intercept_, expected.intercept_, atol=1e-9 * scale)
