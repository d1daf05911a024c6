"""Statistics that Spark sums: those of the rows. `make spark` installs it and runs this."""

import sys

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone

from pfl_sklearn.linear_model import PersonalizedLinearRegression
from pfl_sklearn.statistics import ClientStatistics

pa = pytest.importorskip("pyarrow")
pyspark_sql = pytest.importorskip("pyspark.sql", reason="pyspark is missing; `make spark` has it")
# Of Spark's own code, and of what it calls.
pytestmark = pytest.mark.filterwarnings("default")
COLUMNS = {"groups": "g", "target": "y", "features": ["x", "k", "c"]}
COLUMNS |= {"sample_weight": "w", "levels": {"c": ["a", "b"]}}


@pytest.fixture(scope="module")
def spark():
    builder = pyspark_sql.SparkSession.builder.master("local[2]")
    for name, value in {"spark.ui.enabled": "false", "spark.sql.shuffle.partitions": "4"}.items():
        builder = builder.config(name, value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", sys.executable)  # else the first Python of the path
        session = builder.getOrCreate()
        yield session
        session.stop()


def table():
    """Weighted rows of whole numbers, words and numbers, with clients of one row and with gaps."""
    rng = np.random.default_rng(0)
    n = 2000
    return pd.DataFrame(
        {
            "g": np.append(rng.integers(0, 60, n - 3), [100, 101, 102]),
            "x": 1e3 + rng.normal(size=n),
            "k": rng.integers(2**20, 2**20 + 50, n),  # squares do not fit in 32 bits
            "c": rng.choice(["a", "b", "unknown"], n, p=[0.5, 0.45, 0.05]),
            "w": rng.integers(0, 4, n) / 2,
            "y": rng.normal(size=n),
        }
    )


def with_gaps(frame):
    """The table for Spark, where some numbers are NaN and others null, and for memory."""
    rng = np.random.default_rng(1)
    nan, null = rng.random((2, len(frame))) < 0.02
    of_spark = frame.astype({"x": object, "y": object, "k": int})
    of_spark.loc[null, "x"] = None
    of_spark.loc[nan, "y"] = float("nan")
    return of_spark, frame.assign(x=frame["x"].mask(null), y=frame["y"].mask(nan))


def test_spark_has_the_statistics_of_the_rows(spark):
    of_spark, rows = with_gaps(table())
    schema = "g long, x double, k int, c string, w double, y double"
    frame = spark.createDataFrame(list(of_spark.itertuples(index=False, name=None)), schema)
    summed = ClientStatistics.from_frame(frame, **COLUMNS, missing="drop")
    expected = ClientStatistics.from_frame(rows, **COLUMNS, missing="drop")  # by from_rows
    assert summed.n_left_out == expected.n_left_out > 0
    np.testing.assert_array_equal(summed.clients, expected.clients)
    np.testing.assert_array_equal(summed.n_samples_per_client, expected.n_samples_per_client)
    np.testing.assert_allclose(summed._sums(), expected._sums(), rtol=1e-9)
    np.testing.assert_allclose(summed.log_weights, expected.log_weights, rtol=1e-9, atol=1e-12)
    first, second = (
        PersonalizedLinearRegression(random="intercept").fit_statistics(each)
        for each in (summed, expected)
    )
    for name in ("coef_", "intercept_", "noise_variance_"):
        ours, theirs = getattr(first, name), getattr(second, name)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-9 * np.abs(theirs).max())


def test_spark_refuses_gaps_that_are_errors(spark):
    frame = spark.createDataFrame([(0, 1.0, 2.0), (0, None, 2.0)], "g long, x double, y double")
    with pytest.raises(ValueError, match="1 of 2 rows"):
        ClientStatistics.from_frame(frame, groups="g", target="y", features=["x"])


QUERY = """
SELECT g, COUNT(*) AS n, SUM(u) AS s_0, SUM(v) AS s_1,
       SUM(u * u) AS p_0_0, SUM(u * v) AS p_0_1, SUM(v * v) AS p_1_1,
       MIN(x) AS low_0, MAX(x) AS high_0, MIN(y) AS low_1, MAX(y) AS high_1
FROM (SELECT g, x, y, x - 1000 AS u, y AS v FROM homes) GROUP BY g
"""


def test_every_partition_has_posteriors_of_its_clients(spark):
    """As the guide does it: the population comes from some clients, and is known to all workers."""
    rows = table()[["g", "x", "y"]]
    columns = {"groups": "g", "target": "y", "features": ["x"]}
    statistics = ClientStatistics.from_frame(rows, **columns)
    fitted = PersonalizedLinearRegression().fit_statistics(statistics.of_clients(slice(0, 40)))
    known = PersonalizedLinearRegression(fitted.prior_, noise_variance=fitted.noise_variance_)

    def posteriors(batches):
        for batch in batches:
            moments = pa.Table.from_batches([batch])
            part = ClientStatistics.from_moments(moments, **columns, centre=[1000, 0], scale=[1, 1])
            model = clone(known).fit_statistics(part)
            result = {"g": model.clients_, "level": model.intercept_, "x": model.coef_[:, 0]}
            yield pa.RecordBatch.from_pydict(result)

    frame = spark.createDataFrame(
        list(rows.itertuples(index=False, name=None)), "g long, x double, y double"
    )
    frame.createOrReplaceTempView("homes")
    by_client = spark.sql(QUERY).mapInArrow(posteriors, "g long, level double, x double")
    found = pd.DataFrame(by_client.collect(), columns=["g", "level", "x"]).sort_values("g")
    expected = known.fit_statistics(statistics)
    np.testing.assert_array_equal(found["g"], expected.clients_)
    np.testing.assert_allclose(found["x"], expected.coef_[:, 0], rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(found["level"], expected.intercept_, rtol=1e-6)
