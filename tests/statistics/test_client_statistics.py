"""Statistics of clients: what models fitted from them have in common with models of the rows."""

import dataclasses

import dask.dataframe
import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow.parquet
import pytest
from hypothesis import given, settings, strategies as st
from sklearn.base import clone
from sklearn.utils import get_tags

from pfl_sklearn.compose import ClientColumn
from pfl_sklearn.estimation import BernoulliMean, GaussianMean, PoissonMean
from pfl_sklearn.linear_model import PersonalizedLinearRegression
from pfl_sklearn.priors import GaussianMixturePrior, GaussianPrior, LaplacePrior
from pfl_sklearn.statistics import ClientStatistics
from tests.helpers.slow import slow


def table(seed=0, m=40, d=3):
    """Rows with a client of one row, one of many, and a feature that is constant in clients."""
    rng = np.random.default_rng(seed)
    sizes = np.concatenate([[1, 300], rng.integers(1, 12, m - 2)])
    codes = np.repeat(np.arange(m), sizes)
    X = rng.normal(size=(len(codes), d)) + 2.0
    X[:, 0] = rng.normal(size=m)[codes]
    theta = np.array([1.0, 0.5, -1.0]) + 0.5 * rng.normal(size=(m, d))
    y = 3.0 + rng.normal(size=m)[codes] + np.einsum("nd,nd->n", X, theta[codes])
    order = rng.permutation(len(codes))
    return X[order], (y + 0.7 * rng.normal(size=len(codes)))[order], codes[order]


PRIORS = {
    "intercept": {"random": "intercept"},
    "slope": {"random": [1]},
    "ml": {"method": "ml", "random": "intercept"},
    "origin": {"fit_intercept": False, "random": [1]},
    "noise": {"noise_variance": 0.5, "random": [1]},
    "laplace": {"prior": LaplacePrior()},
    "mixture": {"prior": GaussianMixturePrior(2), "random": "intercept"},
    "known": {"prior": GaussianPrior(covariance=0.3), "noise_variance": 0.5},
}
FITTED = (
    "coef_",
    "intercept_",
    "population_coef_",
    "population_intercept_",
    "noise_variance_",
    "population_covariance_",
)


def assert_same(model, other, rtol=1e-9):
    """The likelihood is as good; a search for variances may end elsewhere on its flat top."""
    np.testing.assert_array_equal(model.clients_, other.clients_)
    np.testing.assert_array_equal(model.n_samples_per_client_, other.n_samples_per_client_)
    np.testing.assert_allclose(model.log_likelihood_, other.log_likelihood_, rtol=1e-9)
    for name in FITTED:
        expected = np.asarray(getattr(other, name))
        scale = np.max(np.abs(expected)) if np.isfinite(expected).all() else 1.0
        np.testing.assert_allclose(
            getattr(model, name), expected, rtol=rtol, atol=rtol * scale, err_msg=name
        )


@pytest.mark.parametrize(
    "name", ["slope", "known", *slow(["intercept", "ml", "origin", "noise", "laplace", "mixture"])]
)
def test_a_fit_of_statistics_is_that_of_the_rows(name):
    params = PRIORS[name]
    X, y, groups = table()
    weights = np.random.default_rng(1).integers(0, 3, len(y)).astype(float)
    model = PersonalizedLinearRegression(**params)
    rows = model.fit(X, y, groups=groups, sample_weight=weights)
    kept = ClientStatistics.from_rows(X, y, groups=groups, sample_weight=weights)
    again = PersonalizedLinearRegression(**params).fit_statistics(kept)
    assert_same(again, rows, 1e-9 if "noise_variance" in params else 1e-6)


def test_a_fit_of_statistics_is_that_of_the_rows_where_the_likelihood_is_flat():
    """Clients hardly differ, and features are far from zero: both searches end at the maximum."""
    rng = np.random.default_rng(1)
    groups = np.repeat(np.arange(30), 8)
    X = rng.normal(size=(240, 2)) * [10, 0.1] + [50, 3]
    y = 1 + X @ [-1, 2] + 0.02 * rng.normal(size=30)[groups] + rng.normal(size=240)
    full = GaussianPrior(covariance_type="full")
    model = PersonalizedLinearRegression(full, uncertainty="plug_in")
    rows = clone(model).fit(X, y, groups=groups)
    kept = ClientStatistics.from_rows(X, y, groups=groups)
    assert_same(model.fit_statistics(kept), rows, 1e-8)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), n_parts=st.integers(2, 4), weighted=st.booleans())
@pytest.mark.slow
def test_parts_of_a_table_add_up(seed, n_parts, weighted):
    X, y, groups = table(seed, m=12)
    rng = np.random.default_rng(seed)
    weights = rng.integers(0, 3, len(y)).astype(float) if weighted else np.ones(len(y))
    weights[0] = 1.0
    parts = rng.integers(0, n_parts, len(y))
    parts[0] = 0
    whole = ClientStatistics.from_rows(X, y, groups=groups, sample_weight=weights)
    rows = [parts == k for k in range(n_parts)]
    total = sum(
        ClientStatistics.from_rows(X[at], y[at], groups=groups[at], sample_weight=weights[at])
        for at in rows
        if weights[at].any()
    )
    assert_equal_statistics(total, whole)


def assert_equal_statistics(total, whole, rtol=1e-10):
    np.testing.assert_array_equal(total.clients, whole.clients)
    np.testing.assert_array_equal(total.n_samples_per_client, whole.n_samples_per_client)
    np.testing.assert_array_equal(total.lowest, whole.lowest)
    np.testing.assert_array_equal(total.highest, whole.highest)
    np.testing.assert_allclose(total.log_weights, whole.log_weights, rtol=1e-12, atol=1e-12)
    # Triangles are unique up to signs of their rows where they have full rank; products always are.
    for block in whole._blocks():
        ours, theirs = total._triangles(block), whole._triangles(block)
        products = np.einsum("bki,bkj->bij", theirs, theirs)
        sizes = np.sqrt(np.einsum("bii->bi", products))
        np.testing.assert_array_less(
            np.abs(np.einsum("bki,bkj->bij", ours, ours) - products),
            rtol * np.einsum("bi,bj->bij", sizes, sizes) + 1e-300,
        )


def in_chunks(frame):
    return [frame.iloc[start : start + 70] for start in range(0, len(frame), 70)]


ENGINES = {
    "chunks": in_chunks,
    "pandas": lambda frame: frame,
    "polars": lambda frame: pl.from_pandas(frame).lazy(),
    "eager polars": pl.from_pandas,
    "dask": lambda frame: dask.dataframe.from_pandas(frame, npartitions=3),
    "duckdb": lambda frame: duckdb.connect().from_df(frame),
}


# Dask takes seconds.
@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(engine, id=name, marks=[pytest.mark.slow] * (name == "dask"))
        for name, engine in ENGINES.items()
    ],
)
def test_every_engine_has_the_statistics_of_the_rows(engine):
    frame, kept = gaps()
    read = ClientStatistics.from_chunks if engine is in_chunks else ClientStatistics.from_frame
    statistics = read(
        engine(frame),
        groups="g",
        target="y",
        features=["x", "k", "c"],
        sample_weight="w",
        levels={"c": ["a", "b", "z"]},
        missing="drop",
    )
    assert statistics.feature_names == ("x", "k", "c_b", "c_z")
    assert statistics.target_names == ("y",)
    assert statistics.n_left_out == 7
    used = frame[kept]
    X = np.column_stack([used["x"], used["k"], used["c"] == "b", used["c"] == "z"])
    rows = ClientStatistics.from_rows(X, used["y"], groups=used["g"], sample_weight=used["w"])
    assert_equal_statistics(statistics, rows, 1e-12)


def gaps():
    """Rows with whole numbers whose products do not fit their type, and with gaps."""
    rng = np.random.default_rng(0)
    n = 600
    frame = pd.DataFrame(
        {
            "g": rng.integers(0, 90, n).astype(str),
            "x": rng.normal(size=n) + 1e4,
            "k": (rng.integers(0, 5, n) * 100_000).astype(np.int32),
            "c": rng.choice(["a", "b", "z"], n),
            "y": rng.normal(size=n),
            "w": rng.integers(0, 4, n).astype(float),
        }
    )
    frame.loc[3, "x"] = np.nan
    frame.loc[[5, 6], "y"] = np.nan
    frame.loc[9, "c"] = "other"
    frame.loc[10, "c"] = None
    frame.loc[11, "g"] = None
    frame.loc[12, "w"] = np.nan
    gone = [3, 5, 6, 9, 10, 11, 12]
    return frame, ~frame.index.isin(gone)


def test_means_of_statistics_are_those_of_the_rows():
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 25, 300)
    y = rng.normal(size=(300, 2)) + rng.normal(size=(25, 2))[codes]
    weights = rng.integers(0, 3, 300).astype(float)
    for target, params in (
        (y[:, 0], {}),
        (y, {"method": "ml"}),
        (y[:, 0], {"prior": GaussianMixturePrior(2)}),
        (y[:, 0], {"participants": list(range(3, 20))}),
    ):
        rows = GaussianMean(**params).fit(y, target, groups=codes, sample_weight=weights)
        kept = ClientStatistics.from_rows(None, target, groups=codes, sample_weight=weights)
        model = GaussianMean(**params).fit_statistics(kept)
        for name in ("means_", "stds_", "population_mean_", "noise_variance_", "log_likelihood_"):
            np.testing.assert_allclose(
                getattr(model, name), getattr(rows, name), rtol=1e-9, err_msg=name
            )
        np.testing.assert_array_equal(
            model.predict(y, groups=codes).shape, rows.predict(y, groups=codes).shape
        )


def test_proportions_and_rates_of_statistics_are_those_of_the_rows():
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 25, 300)
    labels = (rng.random(300) < rng.random(25)[codes]).astype(int)
    counts, exposure = rng.poisson(2.0, 300), rng.uniform(1, 3, 300)
    kept = ClientStatistics.from_rows(None, labels, groups=codes)
    model = BernoulliMean().fit_statistics(kept)
    rows = BernoulliMean().fit(labels, labels, groups=codes)
    np.testing.assert_array_equal(model.means_, rows.means_)
    table = pd.DataFrame({"hours": exposure})
    kept = ClientStatistics.from_rows(table, counts, groups=codes)
    model = PoissonMean().fit_statistics(kept, exposure="hours")
    rows = PoissonMean().fit(table, counts, groups=codes, exposure=exposure)
    # The search for the prior may end elsewhere on its flat top; under one prior they agree.
    np.testing.assert_allclose(model.means_, rows.means_, rtol=1e-6)
    known = PoissonMean(rows.prior_).fit_statistics(kept, exposure="hours")
    again = PoissonMean(rows.prior_).fit(table, counts, groups=codes, exposure=exposure)
    np.testing.assert_allclose(known.means_, again.means_, rtol=1e-9)
    np.testing.assert_array_equal(model.n_samples_per_client_, rows.n_samples_per_client_)


@pytest.mark.parametrize("kind", [np.int64, str, "datetime64[D]"])
def test_a_parquet_file_gives_back_the_statistics(tmp_path, kind):
    X, y, groups = table()
    kept = ClientStatistics.from_rows(
        pd.DataFrame(X, columns=["a", "b", "c"]), y, groups=groups.astype(kind)
    )
    kept.to_parquet(tmp_path / "rows.parquet")
    again = ClientStatistics.from_parquet(tmp_path / "rows.parquet")
    for field in dataclasses.fields(ClientStatistics):
        np.testing.assert_array_equal(getattr(again, field.name), getattr(kept, field.name))
    halves = again.of_clients(slice(20)) + kept.of_clients(slice(20, None))
    assert halves.clients.dtype.kind == kept.clients.dtype.kind
    pd.DataFrame({"client": [1]}).to_parquet(tmp_path / "other.parquet")
    with pytest.raises(ValueError, match=r"other\.parquet"):
        ClientStatistics.from_parquet(tmp_path / "other.parquet")


TINY = pd.DataFrame({"g": [1, 1, 2, 2], "x": [0.0, 1.0, 2.0, 4.0], "y": [1.0, 2.0, 3.0, 5.0]})


def moments_of(frame):
    """Moments as a query would sum them, about 0."""
    rows = frame.assign(p_0_0=frame.x**2, p_0_1=frame.x * frame.y, p_1_1=frame.y**2)
    by_client = rows.groupby("g")
    return pd.DataFrame(
        {
            "n": by_client.size(),
            "s_0": by_client.x.sum(),
            "s_1": by_client.y.sum(),
            **{name: by_client[name].sum() for name in ("p_0_0", "p_0_1", "p_1_1")},
            **{
                f"{what}_{j}": getattr(by_client[name], how)()
                for j, name in enumerate("xy")
                for what, how in (("low", "min"), ("high", "max"))
            },
        }
    ).reset_index()


def test_moments_of_a_query_give_the_statistics_of_the_rows():
    kept = ClientStatistics.from_moments(moments_of(TINY), groups="g", target="y", features=["x"])
    rows = ClientStatistics.from_rows(TINY[["x"]], TINY["y"], groups=TINY["g"])
    assert_equal_statistics(kept, rows, 1e-13)
    assert kept.feature_names == rows.feature_names == ("x",)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"n": 0}, "n must be a whole number above 0"),
        ({"n": 1.5}, "client 1"),
        ({"p_0_1": 50.0}, "client 1 .*not positive semidefinite"),
        ({"p_1_1": -1.0}, "positive semidefinite"),
        ({"s_0": np.nan}, "s_0=nan"),
        ({"low_0": 7.0}, "low_j"),
        ({"g": 2}, "2 twice"),
    ],
)
def test_moments_that_no_rows_have_are_refused(change, match):
    moments = moments_of(TINY).astype({"n": float})
    for name, value in change.items():
        moments.loc[0, name] = value
    with pytest.raises(ValueError, match=match):
        ClientStatistics.from_moments(moments, groups="g", target="y", features=["x"])


def test_moments_lack_columns():
    moments = moments_of(TINY).drop(columns=["p_0_1", "high_1"])
    with pytest.raises(ValueError, match=r"p_0_1.*high_1"):
        ClientStatistics.from_moments(moments, groups="g", target="y", features=["x"])


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(
    ("change", "params", "match"),
    [
        ({"x": [np.nan, 1, 2, 3]}, {}, "1 of 4 rows lack"),
        ({"x": [np.inf, 1, 2, 3]}, {}, "infinity"),
        ({"x": [1e200, 1, 2, 3]}, {}, "too large"),
        ({}, {"features": ["z"]}, "no column 'z'"),
        ({}, {"features": ["x", "x"]}, "'x' is listed twice"),
        ({}, {"levels": {"y": [1, 2]}}, "levels has 'y', which is none of the features"),
        ({"x": list("abab")}, {}, r"'x' must hold numbers; got String.* levels={'x'"),
        ({}, {"missing": "keep"}, "missing must be"),
        ({}, {"target": []}, "at least one column"),
        ({}, {"features": [2]}, "features must name columns"),
        ({}, {"groups": None}, "groups must name a column by a string; got None"),
        ({}, {"sample_weight": 3}, "sample_weight must name a column"),
        ({}, {"levels": ["a", "b"]}, "levels must be a dict of lists"),
        (
            {"x_b": 1.0, "x": list("abab")},
            {"features": ["x", "x_b"], "levels": {"x": ["a", "b"]}},
            "two columns would be called 'x_b'",
        ),
        ({"x": list("abab")}, {"levels": {"x": "ab"}}, "levels of 'x' must be"),
        ({"x": list("abab")}, {"levels": {"x": [None, "a"]}}, "none of them missing"),
        ({"w": [-1.0, 1, 1, 1]}, {"sample_weight": "w"}, "at least 0; got -1"),
        ({"w": [0.0, 0, 0, 0]}, {"sample_weight": "w"}, "found 4 rows, none"),
    ],
)
def test_bad_frames_are_refused(lazy, change, params, match):
    frame = TINY.assign(**change)
    given = {"groups": "g", "target": "y", "features": ["x"], **params}
    with pytest.raises(ValueError, match=match):
        ClientStatistics.from_frame(pl.from_pandas(frame).lazy() if lazy else frame, **given)
    if not lazy:
        with pytest.raises(ValueError, match=match):
            ClientStatistics.from_chunks([frame], **given)


def test_statistics_of_other_columns_do_not_add_up():
    one = ClientStatistics.from_rows(TINY[["x"]], TINY["y"], groups=TINY["g"])
    other = ClientStatistics.from_rows(TINY[["x"]].to_numpy(), TINY["y"], groups=TINY["g"])
    with pytest.raises(ValueError, match="feature_names=\\('x',\\) and None"):
        one + other
    words = ClientStatistics.from_rows(TINY[["x"]], TINY["y"], groups=TINY["g"].astype(str))
    with pytest.raises(ValueError, match=r"string ids .* but those before have"):
        one + words


def assert_same_predictions(model, other, X, **params):
    ours, theirs = model.predict(X, **params), other.predict(X, **params)
    if ours.dtype.kind == "U":
        np.testing.assert_array_equal(ours, theirs)
    else:
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.slow
def test_partial_fits_are_those_of_all_rows():
    X, y, groups = table()
    labels, counts = (y > 3).astype(int), np.abs(np.rint(y))
    exposure = np.random.default_rng(1).uniform(1, 2, len(y))
    for model, target, params in (
        (PersonalizedLinearRegression(random="intercept"), y, {}),
        (GaussianMean(), y, {}),
        (BernoulliMean(), np.array(["no", "yes"])[labels], {}),
        (PoissonMean(), counts, {"exposure": exposure}),
    ):
        halves = np.arange(len(y)) % 3 == 0, np.arange(len(y)) % 3 != 0
        for half in halves:
            extra = {name: values[half] for name, values in params.items()}
            model.partial_fit(X[half], target[half], groups=groups[half], **extra)
        rows = clone(model).fit(X, target, groups=groups, **params)
        assert_same_predictions(model, rows, X, groups=groups, **params)
        own = model.for_client(model.clients_[1])
        assert own._statistics.clients.tolist() == [model.clients_[1]]
        with pytest.raises(ValueError, match="was not fitted by partial_fit"):
            rows.partial_fit(X, target, groups=groups, **params)
        assert list(get_tags(rows).expected_failed_checks) == ["check_fit_score_takes_y"]
        assert not get_tags(ClientColumn(rows, "site")).expected_failed_checks
        assert not hasattr(model.fit(X, target, groups=groups, **params), "_statistics")


@pytest.mark.parametrize(
    "model",
    [
        PersonalizedLinearRegression(epsilon=1.0),
        GaussianMean(epsilon=1.0, delta=1e-5),
        BernoulliMean(epsilon=1.0),
        PoissonMean(epsilon=1.0, cap=10),
    ],
    ids=lambda model: type(model).__name__,
)
def test_no_private_fit_goes_on(model):
    X, y, groups = table()
    with pytest.raises(ValueError, match="epsilon=1"):
        model.partial_fit(X, (y > 3).astype(int), groups=groups)
    assert not hasattr(model, "privacy_")


def test_constants_are_those_of_the_query():
    moments = moments_of(TINY.assign(x=TINY["x"] - 9.0))
    moments[["low_0", "high_0"]] += 9.0
    kept = ClientStatistics.from_moments(
        moments, groups="g", target="y", features=["x"], centre=[9.0, 0.0]
    )
    rows = ClientStatistics.from_rows(TINY[["x"]], TINY["y"], groups=TINY["g"])
    assert_equal_statistics(kept, rows, 1e-12)
    with pytest.raises(ValueError, match="client 1 have means outside"):
        ClientStatistics.from_moments(moments, groups="g", target="y", features=["x"])
    for groups, table in (("county", moments), ("g", moments[:0])):
        with pytest.raises(ValueError, match=r"county|found 0 rows"):
            ClientStatistics.from_moments(table, groups=groups, target="y", features=["x"])


def test_chunks_may_be_batches_and_queries(tmp_path):
    frame, _ = gaps()
    frame = frame[["g", "x", "y"]].dropna()
    columns = {"groups": "g", "target": "y", "features": ["x"]}
    frame.to_parquet(tmp_path / "rows.parquet")
    batches = pyarrow.parquet.ParquetFile(tmp_path / "rows.parquet").iter_batches(100)
    queries = [pl.from_pandas(part).lazy() for part in in_chunks(frame)]
    rows = ClientStatistics.from_frame(frame, **columns)
    for chunks in (batches, queries):
        kept = ClientStatistics.from_chunks(chunks, **columns)
        assert_equal_statistics(kept, rows, 1e-12)


@pytest.mark.parametrize("chunks", [TINY, pl.from_pandas(TINY).lazy(), None], ids=type)
def test_chunks_are_no_frame(chunks):
    with pytest.raises(ValueError, match="must be an iterable of data frames; got one"):
        ClientStatistics.from_chunks(chunks, groups="g", target="y", features=["x"])


@pytest.mark.parametrize("lazy", [False, True])
def test_nan_is_no_client(lazy):
    frame = TINY.assign(g=[1.0, np.nan, 2.0, 2.0])
    given = pl.from_pandas(frame).lazy() if lazy else pl.from_pandas(frame)
    columns = {"groups": "g", "target": "y", "features": ["x"]}
    kept = ClientStatistics.from_frame(given, **columns, missing="drop")
    assert kept.clients.tolist() == [1, 2]
    assert kept.n_left_out == 1
    with pytest.raises(ValueError, match="1 of 4 rows lack"):
        ClientStatistics.from_frame(given, **columns)


@pytest.mark.parametrize(
    "ids",
    [
        pd.Categorical([0.5, 0.5, 1.5, 1.5]),
        np.array([1, 1, 2, 2], dtype=np.uint64) + np.uint64(2**63),
        np.array(["2020-01-01T00"] * 2 + ["2020-01-01T01"] * 2, dtype="datetime64[h]"),
        np.array([True, True, False, False]),
    ],
    ids=["floats", "unsigned", "hours", "flags"],
)
def test_ids_of_every_kind_add_up_and_are_stored(ids, tmp_path):
    def of(part):
        return ClientStatistics.from_rows(TINY[["x"]][part], TINY["y"][part], groups=ids[part])

    whole, total = of(slice(None)), of(slice(0, 3)) + of(slice(3, None))
    np.testing.assert_array_equal(total.clients, whole.clients)
    assert_equal_statistics(total, whole)
    whole.to_parquet(tmp_path / "rows.parquet")
    again = ClientStatistics.from_parquet(tmp_path / "rows.parquet")
    np.testing.assert_array_equal(again.clients, whole.clients)


def test_signed_and_unsigned_ids_add_up_without_becoming_floats():
    first, second = np.array([2**60, 2**60 + 1]), np.array([2**60 + 2, 2**60 + 3], dtype=np.uint64)
    one, two = (
        ClientStatistics.from_rows(TINY[["x"]][:2], TINY["y"][:2], groups=ids)
        for ids in (first, second)
    )
    assert [int(each) for each in (one + two).clients] == [2**60 + k for k in range(4)]


def test_bad_calls_of_partial_fit_leave_nothing_fitted():
    X, labels, groups = np.zeros((4, 1)), np.array(["a", "a", "b", "b"]), [0, 0, 1, 1]
    model = BernoulliMean()
    for bad, match in (
        (lambda: model.partial_fit(X, labels[:3], groups=groups[:3]), "inconsistent"),
        (lambda: model.partial_fit(X[:2], labels[:2], groups=groups[:2]), "class"),
        (lambda: model.partial_fit(X, list("abca"), groups=groups), "two classes; got"),
        (
            lambda: model.partial_fit(
                pd.DataFrame(X, columns=[1]).assign(a=1), labels, groups=groups
            ),
            "strings",
        ),
    ):
        with pytest.raises((ValueError, TypeError), match=match):
            bad()
        assert not hasattr(model, "privacy_")
        assert not hasattr(model, "_statistics")
    model.partial_fit(X[:2], labels[:2], ["a", "b"], groups=groups[:2])
    with pytest.raises(ValueError, match="the first call had"):
        model.partial_fit(X[2:], labels[2:], ["b", "c"], groups=groups[2:])
    model.partial_fit(X[2:], labels[2:], groups=groups[2:])
    rows = BernoulliMean().fit(X, labels, groups=groups)
    np.testing.assert_array_equal(model.means_, rows.means_)


@pytest.mark.parametrize(
    ("model", "statistics", "match"),
    [
        (
            PersonalizedLinearRegression(epsilon=1.0),
            ([[0.0], [1], [2]], [0.0, 1, 2]),
            "feature_bound must be given",
        ),
        (
            PersonalizedLinearRegression(fit_intercept=False),
            (None, [0.0, 1, 2]),
            "0 features and 1 targets",
        ),
        (BernoulliMean(), (None, [0.0, 1, 2]), "client 0 is not"),
        (BernoulliMean(), (None, [0.5, 1, 2]), "whole numbers"),
        (PoissonMean(), (None, [0.0, 1, -2]), "got -2"),
        (PoissonMean(), (None, [0.0, 1, 2e9]), "got 2e"),
        (PoissonMean(), "rows", "ClientStatistics; got str"),
    ],
)
def test_bad_statistics_are_refused(model, statistics, match):
    if statistics != "rows":
        X, y = statistics
        statistics = ClientStatistics.from_rows(X, y, groups=[0, 0, 0])
    with pytest.raises((ValueError, TypeError), match=match):
        model.fit_statistics(statistics)
    assert not hasattr(model, "privacy_")


def test_moments_of_columns_that_are_nearly_combinations_are_those_of_the_rows():
    """Two columns are others plus a little, so that a factorization without pivots loses digits."""
    rng = np.random.default_rng(0)
    m = 300
    g = np.repeat(np.arange(m), rng.integers(2, 9, m))
    X = rng.normal(size=(len(g), 5))
    X[:, 3] = X[:, 0] + 10.0 ** rng.uniform(-6, -4, m)[g] * X[:, 3]
    X[:, 4] = X[:, 1] - X[:, 3] + 10.0 ** rng.uniform(-6, -4, m)[g] * X[:, 4]
    frame = pd.DataFrame(X, columns=list("abcde")).assign(y=rng.normal(size=len(g)), g=g)
    columns = {"groups": "g", "target": "y", "features": list("abcde")}
    rows = ClientStatistics.from_frame(frame, **columns)
    for kept in (
        ClientStatistics.from_frame(pl.from_pandas(frame).lazy(), **columns),
        ClientStatistics.from_chunks(in_chunks(frame), **columns),
    ):
        # Of a column that counts as a combination, what is left out has 1e-11 of its square at
        # most, and so a product of the root of that with another column.
        assert_equal_statistics(kept, rows, 1e-5)


@pytest.mark.parametrize("gap", [1e-3, 1e-5, 1e-7, 1e-9])
def test_clients_of_few_rows_may_have_nearly_equal_ones(gap):
    """Their products about the mean are off by more than those of other columns."""
    rng = np.random.default_rng(0)
    m = 300
    g = np.repeat(np.arange(m), rng.integers(2, 5, m))
    X = rng.normal(size=(len(g), 3))
    X[:, 1] = rng.normal(size=m)[g] + gap * X[:, 1]
    frame = pd.DataFrame(X, columns=list("aby")).assign(g=g)
    columns = {"groups": "g", "target": "y", "features": ["a", "b"]}
    rows = ClientStatistics.from_frame(frame, **columns)
    with pytest.warns(UserWarning, match="of 'b' lost digits"):
        kept = ClientStatistics.from_frame(pl.from_pandas(frame).lazy(), **columns)
    # Of a column that counts as constant, a product has the root of the rounding errors.
    assert_equal_statistics(kept, rows, 1e-6)
    kept = ClientStatistics.from_chunks(in_chunks(frame), **columns)
    assert_equal_statistics(kept, rows, 1e-6)


def test_an_outlier_takes_digits_of_others_with_a_warning_or_not_at_all():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"g": np.repeat(np.arange(100), 10), "x": rng.normal(size=1000)})
    frame["y"] = frame["x"] + rng.normal(size=1000)
    frame.loc[0, "x"] = 1e10
    columns = {"groups": "g", "target": "y", "features": ["x"]}
    rows = ClientStatistics.from_frame(frame, **columns)
    for chunks in (in_chunks(frame), in_chunks(frame[::-1])):
        assert_equal_statistics(ClientStatistics.from_chunks(chunks, **columns), rows, 1e-12)
    with pytest.warns(UserWarning, match=r"of 'x' lost digits of (100|99) of 100 clients"):
        ClientStatistics.from_frame(pl.from_pandas(frame).lazy(), **columns)
