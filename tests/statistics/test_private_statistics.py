"""Private fits from statistics: rows scaled to the bounds where they lie, and the fit's promise."""

import dataclasses
import math

import dask.dataframe
import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

from pfl_sklearn.estimation import BernoulliMean, GaussianMean, PoissonMean
from pfl_sklearn.linear_model import PersonalizedLinearRegression
from pfl_sklearn.priors import GaussianMixturePrior, GaussianPrior
from pfl_sklearn.privacy import GaussianMechanism, PrivacyLedger, RegressionMoments
from pfl_sklearn.statistics import ClientStatistics
from pfl_sklearn.statistics._clipping import scaled_triangles
from pfl_sklearn.statistics._fields import CLIENT_FIELDS
from tests.helpers.blinded import blind, what_leaves
from tests.helpers.slow import slow

BOUNDS = {"feature_bound": 2.0, "target_bound": 5.0}
COLUMNS = {"groups": "shop", "target": "sales", "features": ["price", "size"]}
pytestmark = pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")


def sales(m=150, far=20.0):
    """Rows of shops, a third of them beyond the bounds, some far and some in the target alone."""
    rng = np.random.default_rng(0)
    codes = np.repeat(np.arange(m), np.append([1, 300], rng.integers(1, 12, m - 2)))
    price = rng.normal(size=len(codes)) * 1.2
    size = rng.normal(size=m)[codes]
    noise = rng.normal(size=len(codes))
    frame = pd.DataFrame(
        {
            "shop": codes,
            "price": price,
            "size": size,
            "sales": 1 + price + rng.normal(size=m)[codes],
        }
    )
    frame["sales"] += noise
    frame.loc[::50, "price"] *= far
    frame.loc[7::50, "sales"] *= far
    frame.loc[11::50, ["price", "sales"]] *= far
    return frame.sample(frac=1, random_state=0).reset_index(drop=True)


def in_chunks(frame):
    return [frame.iloc[start : start + 200] for start in range(0, len(frame), 200)]


def of_rows(frame, **params):
    return ClientStatistics.from_rows(
        frame[COLUMNS["features"]], frame[COLUMNS["target"]], groups=frame["shop"], **params
    )


ENGINES = {
    "rows": of_rows,
    "frame": lambda frame, **params: ClientStatistics.from_frame(frame, **COLUMNS, **params),
    "chunks": lambda frame, **params: ClientStatistics.from_chunks(
        in_chunks(frame), **COLUMNS, **params
    ),
    **{
        name: lambda frame, lazy=lazy, **params: ClientStatistics.from_frame(
            lazy(frame), **COLUMNS, **params
        )
        for name, lazy in {
            "polars": lambda frame: pl.from_pandas(frame).lazy(),
            "dask": lambda frame: dask.dataframe.from_pandas(frame, npartitions=3),
            "duckdb": lambda frame: duckdb.connect().from_df(frame),
        }.items()
    },
    "days": lambda frame, **params: sum(of_rows(part, **params) for part in in_chunks(frame)),
}
# Dask takes a second a query.
ANY_ENGINE = [
    pytest.param(ENGINES[name], id=name, marks=[pytest.mark.slow] * (name == "dask"))
    for name in ENGINES
]
PRIVATE = {"epsilon": 200.0, "delta": 1e-6, "random_state": 0, **BOUNDS}
MODELS = {
    "known": {"prior": GaussianPrior(covariance=0.1)},
    "known noise": {"prior": GaussianPrior(covariance=0.1), "noise_variance": 1.0},
    "fixed slopes": {"prior": GaussianPrior(covariance=0.1), "random": ["size", "intercept"]},
    "rows": {"prior": GaussianPrior(covariance=0.1), "unit": "row"},
    "level": {"random": "intercept"},
    "slopes": {},
    "nothing": {
        "prior": GaussianPrior(mean=[1.0, 1.0, 0.0], covariance=1.0),
        "noise_variance": 1.0,
    },
}
OF_ONE_CLIENT = {"unit": "row"}
RELEASED = ("population_coef_", "population_intercept_", "noise_variance_")
OWN = ("coef_", "intercept_", "coef_std_")


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("engine", "params"),
    [
        *(pytest.param(of_rows, params, id=f"rows-{name}") for name, params in MODELS.items()),
        pytest.param(of_rows, OF_ONE_CLIENT, id="a single client"),
        pytest.param(of_rows, {"fit_intercept": False}, id="rounds scale no rows"),
        pytest.param(of_rows, {**MODELS["nothing"], "relation": "add_remove"}, id="nothing known"),
        # Of an engine the statistics alone depend, whatever is fitted to them.
        *(
            pytest.param(*each.values, MODELS["known"], id=each.id, marks=each.marks)
            for each in ANY_ENGINE[1:]
        ),
    ],
)
def test_a_private_fit_of_statistics_is_that_of_the_rows(params, engine):
    frame = sales()
    frame = frame[frame["shop"] == 1] if params is OF_ONE_CLIENT else frame
    model = PersonalizedLinearRegression(**params, **PRIVATE)
    rows = clone(model).fit(
        frame[COLUMNS["features"]], frame[COLUMNS["target"]], groups=frame["shop"]
    )
    kept = clone(model).fit_statistics(engine(frame, **BOUNDS))
    for name in (*RELEASED, *OWN):
        expected = getattr(rows, name)
        np.testing.assert_allclose(
            getattr(kept, name), expected, atol=1e-9 * np.abs(expected).max(), err_msg=name
        )
    assert kept.privacy_ == rows.privacy_
    assert kept.population_coef_.shape == (2,)
    assert not hasattr(kept, "_statistics")


@pytest.mark.parametrize("engine", ANY_ENGINE)
def test_a_hostile_row_moves_the_release_at_most_by_the_sensitivity(engine):
    """Sums without noise: where an engine does not scale rows, a row of 1e6 moves them by 1e12."""
    frame = sales(m=20, far=1.0)
    hostile = frame.copy()
    hostile.loc[frame["shop"] == 5, ["price", "sales"]] = [1e6, -1e6]
    model = PersonalizedLinearRegression(**MODELS["known noise"], **PRIVATE)
    shape = RegressionMoments(2, **BOUNDS)
    sums = [released_sum(model, engine(each, **BOUNDS)) for each in (frame, hostile)]
    moved = np.linalg.norm(sums[1] - sums[0])
    assert 0.1 * shape.replace_one_sensitivity < moved < shape.replace_one_sensitivity


SMALL_BOUNDS = {"feature_bound": 1e-45, "target_bound": 1e-20}
FAR = {1e6: ["price"], 1e20: ["price", "sales"], 1e149: ["sales"]}


@pytest.mark.parametrize(
    ("engine", "bounds"),
    [
        ("polars", BOUNDS),
        ("chunks", SMALL_BOUNDS),
        *slow([("duckdb", BOUNDS), ("chunks", BOUNDS), ("polars", SMALL_BOUNDS)]),
    ],
)
def test_no_number_of_a_client_depends_on_the_rows_of_another(engine, bounds):
    """In sums about a common mean, a client far away would take the digits of the others."""
    frame = sales(m=20, far=1.0).sort_values("shop", ignore_index=True)
    first = np.flatnonzero(frame["shop"] == 0)  # its only row, and in the first chunk
    kept = ENGINES[engine](frame, **bounds)
    shape = RegressionMoments(2, **bounds)
    for far, columns in FAR.items():
        hostile = frame.copy()
        hostile.loc[first, columns] = far
        moved = ENGINES[engine](hostile, **bounds)
        for name in ("packed", "clipped"):
            ours, theirs = getattr(moved, name)[1:], getattr(kept, name)[1:]
            # The threads of Polars add rows up in any order.
            room = 1e-12 * np.abs(theirs).max(axis=0) if engine == "polars" else 0.0
            assert (np.abs(ours - theirs) <= room).all()
        norms = [np.linalg.norm(messages(shape, each), axis=1) for each in (kept, moved)]
        assert np.max(norms) < shape.add_remove_sensitivity * (1 + 1e-9)


def messages(shape, statistics):
    """Messages (m, length) of clients from clipped triangles."""
    triangles = statistics._triangles(slice(None), clipped=True)
    roots = np.sqrt(statistics.n_samples_per_client)[:, None, None]
    return shape._summed(*scaled_triangles(shape, triangles / roots))


@pytest.mark.parametrize("engine", ["rows", "chunks", "polars", "duckdb", "days"])
def test_rows_far_beyond_small_bounds_send_no_more_than_others(engine):
    bounds = {"feature_bound": 1e-20, "target_bound": 1e-30}
    frame = sales(m=20, far=1.0)
    for where, shops in (("price", [3, 5]), ("sales", [6, 7])):
        frame.loc[frame["shop"].isin(shops), where] = 1e149
        # Not constant within one of the clients.
        frame.loc[frame.index[frame["shop"] == shops[0]][:1], where] = 1e148
    shape = RegressionMoments(2, **bounds)
    norms = np.linalg.norm(messages(shape, ENGINES[engine](frame, **bounds)), axis=1)
    assert norms.max() < shape.add_remove_sensitivity * (1 + 1e-9)


def released_sum(model, statistics):
    """What a fit releases, before the noise."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            GaussianMechanism, "privatize", lambda self, sums, rng: seen.append(sums) or sums
        )
        clone(model).fit_statistics(statistics)
    return seen[0]


@pytest.mark.parametrize(
    "model",
    [
        *(
            PersonalizedLinearRegression(**MODELS[name], **PRIVATE)
            for name in ("known", "level", "slopes")
        ),
        GaussianMean(epsilon=50.0, delta=1e-6, clip_norm=6.0, random_state=0),
    ],
)
def test_a_client_reaches_the_others_through_the_release_alone(model, monkeypatch):
    blind(monkeypatch)
    frame = sales(m=60)

    def fit(X, y, groups):
        return clone(model).fit_statistics(
            ClientStatistics.from_rows(X, y, groups=groups, **BOUNDS)
        )

    X, y, groups = frame[["price", "size"]].to_numpy(), frame["sales"].to_numpy(), frame["shop"]
    seen = []
    for value in (0.3, 1e9):
        changed = y.copy()
        changed[groups == 7] = value
        seen.append(what_leaves(fit, X, changed, groups.to_numpy(), 7))
    first, second = seen
    assert first.keys() == second.keys()
    for name in first:
        assert first[name] == second[name], name


@pytest.mark.parametrize(
    ("bounds", "params", "match"),
    [
        ({}, {}, "were not.*feature_bound=2.0 and target_bound=5.0; from_moments"),
        ({**BOUNDS, "feature_bound": 3.0}, {}, "feature_bound=2.0 must be.*feature_bound=3.0"),
        (BOUNDS, {"target_bound": 4.0}, "target_bound=4.0 must be .*target_bound=5.0"),
        (BOUNDS, {"target_bound": None}, "target_bound must be given"),
        (BOUNDS, {"fit_intercept": False}, "replace_one.*fit_intercept=False"),
        (BOUNDS, {"relation": "add_remove"}, "got relation='add_remove'"),
        (BOUNDS, {"delta": 0.0}, "delta must be above 0"),
        (BOUNDS, {"prior": GaussianPrior(), "epsilon": 0.5}, "noise on a variance would be"),
        (BOUNDS, {"prior": GaussianPrior(covariance=np.inf)}, "finite covariance"),
    ],
)
def test_refusals_come_before_the_ledger_is_charged(bounds, params, match, tmp_path):
    ledger = PrivacyLedger(tmp_path / "ledger", budget=(1e6, 1e-3))
    model = PersonalizedLinearRegression(
        **{"prior": GaussianPrior(covariance=0.1), **PRIVATE, **params}, ledger=ledger
    )
    statistics = of_rows(sales(m=30), **bounds)
    with pytest.raises(ValueError, match=match):
        model.fit_statistics(statistics)
    assert len(ledger.to_frame()) == 0
    assert not hasattr(model, "privacy_")


def test_a_fit_of_statistics_is_charged_as_one_of_rows(tmp_path):
    frame, spent = sales(m=30), []
    for name in ("rows", "statistics"):
        ledger = PrivacyLedger(tmp_path / name, budget=(1e6, 1e-3))
        model = PersonalizedLinearRegression(
            **{**PRIVATE, "random_state": None}, random="intercept", ledger=ledger
        )
        if name == "rows":
            model.fit(frame[COLUMNS["features"]], frame["sales"], groups=frame["shop"])
        else:
            model.fit_statistics(of_rows(frame, **BOUNDS))
        spent.append(ledger.to_frame().drop(columns="time"))
        released = model.release()
        assert released.privacy_ == model.privacy_
        with pytest.raises(NotFittedError, match="released population model"):
            released.coef_table()
    pd.testing.assert_frame_equal(*spent)


def test_bounds_are_those_of_a_private_regression():
    frame = sales(m=5)
    for change, match in (
        ({"target_bound": None}, "go together"),
        ({"sample_weight": np.ones(len(frame))}, "sample_weight"),
        ({"feature_bound": -1.0}, "feature_bound.*-1"),
        ({"feature_bound": "2"}, "feature_bound must be a finite number above 0; got '2'"),
        ({"target_bound": True}, "target_bound must be a finite number above 0; got True"),
    ):
        with pytest.raises(ValueError, match=match):
            of_rows(frame, **{**BOUNDS, **change})
    for X, y, match in (
        (None, frame["sales"], "without features target_bound is given alone"),
        (frame[["size"]], frame[["price", "sales"]], "features and one target"),
    ):
        with pytest.raises(ValueError, match=match):
            ClientStatistics.from_rows(X, y, groups=frame["shop"], **BOUNDS)
    kept = of_rows(frame, feature_bound=np.float32(2), target_bound=np.int64(5))
    assert [(type(each), each) for each in (kept.feature_bound, kept.target_bound)] == [
        (float, 2.0),
        (float, 5.0),
    ]
    for other in ({}, {**BOUNDS, "target_bound": 6.0}):
        with pytest.raises(ValueError, match=r"(target_bound=5|feature_bound=2)\.0 and"):
            of_rows(frame, **BOUNDS) + of_rows(frame, **other)


def test_a_file_keeps_the_bounds_and_is_held_to_them(tmp_path):
    kept = of_rows(sales(m=30), **BOUNDS)
    kept.to_parquet(tmp_path / "kept.parquet")
    again = ClientStatistics.from_parquet(tmp_path / "kept.parquet")
    for field in dataclasses.fields(ClientStatistics):
        np.testing.assert_array_equal(getattr(again, field.name), getattr(kept, field.name))
    assert kept.of_clients([3, 4]).clipped.shape == (2, 10)
    for change, match in (
        ({"clipped": kept.packed}, "rows of client .* are not scaled to feature_bound=2.0"),
        ({"clipped": None}, "has the columns .*; expected .*clipped_triangle"),
        ({"feature_bound": None, "target_bound": None}, "has the columns .*clipped_triangle.*exp"),
    ):
        dataclasses.replace(kept, **change).to_parquet(tmp_path / "other.parquet")
        with pytest.raises(ValueError, match=match):
            ClientStatistics.from_parquet(tmp_path / "other.parquet")


MEANS = {
    "central": {},
    "local": {"trust": "local"},
    "quantizer": {"mechanism": "quantizer", "n_bits": 12, "epsilon": math.inf},
    "some": {"participants": range(5, 90), "noise_variance": 1.0},
    "mixture": {"prior": GaussianMixturePrior(2), "noise_variance": 1.0},
    "known": {"prior": GaussianPrior(mean=0.0, covariance=1.0), "noise_variance": 1.0},
}


@pytest.mark.filterwarnings("ignore:The released clusters do not help")  # of 100 clients
@pytest.mark.parametrize("params", MEANS.values(), ids=MEANS)
@pytest.mark.parametrize("lazy", [False, True])
def test_private_means_of_statistics_are_those_of_the_rows(params, lazy, tmp_path):
    """What clients send are bounded means and variances, so no row is scaled to the bound."""
    frame, spent, fits = sales(m=100, far=3.0), [], []
    frame["sales"] += 6 * (frame["shop"] % 2)
    if params.get("mechanism") == "quantizer":
        params = {**params, "noise_variance": 1.0}
    for name in ("rows", "statistics"):
        model = GaussianMean(
            **{"epsilon": 50.0, "delta": 1e-6, "clip_norm": 6.0, "random_state": 0, **params},
            ledger=PrivacyLedger(tmp_path / name),
        )
        if name == "rows":
            model.fit(frame[["size"]], frame["sales"], groups=frame["shop"])
        else:
            table = pl.from_pandas(frame).lazy() if lazy else frame
            bound = {"target_bound": 0.1}
            model.fit_statistics(
                ClientStatistics.from_frame(table, groups="shop", target="sales", **bound)
            )
        fits.append(model)
        spent.append(model.ledger.to_frame().drop(columns="time"))
    rows, kept = fits
    for name in ("means_", "stds_", "population_mean_", "noise_variance_"):
        np.testing.assert_allclose(getattr(kept, name), getattr(rows, name), rtol=1e-9)
    assert kept.privacy_ == rows.privacy_
    pd.testing.assert_frame_equal(*spent)


def test_private_means_refuse_weights_of_statistics():
    frame = sales(m=10)
    for weights in (np.full(len(frame), 2.0), np.where(np.arange(len(frame)) % 2, 2.0, 0.5)):
        kept = ClientStatistics.from_rows(
            None, frame["sales"], groups=frame["shop"], sample_weight=weights
        )
        model = GaussianMean(epsilon=1.0, delta=1e-6, clip_norm=4.0)
        with pytest.raises(ValueError, match="sample_weight is not supported"):
            model.fit_statistics(kept)
        assert not hasattr(model, "privacy_")


@pytest.mark.parametrize("engine", ["polars", "chunks"])
def test_means_of_clients_do_not_depend_on_another(engine):
    frame = sales(m=20).sort_values("shop", ignore_index=True)
    columns = {"groups": "shop", "target": ["sales", "price"], "target_bound": 5.0}
    kept = []
    for far in (0.0, 1e20):
        frame.loc[frame["shop"] == 0, "sales"] = far
        if engine == "polars":
            lazy = pl.from_pandas(frame).lazy()
            kept.append(ClientStatistics.from_frame(lazy, **columns))
        else:
            kept.append(ClientStatistics.from_chunks(in_chunks(frame), **columns))
    first, second = (each._target_means(slice(1, None)) for each in kept)
    for ours, theirs in zip(first, second, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-11)


def twice(statistics, positions):
    """Statistics in which clients are twice or not in order, which no constructor makes."""
    names = ("clients", *CLIENT_FIELDS)
    values = {name: getattr(statistics, name) for name in names}
    return dataclasses.replace(
        statistics, **{name: v[positions] for name, v in values.items() if v is not None}
    )


MEAN = {"epsilon": 1.0, "delta": 1e-6, "clip_norm": 4.0}


@pytest.mark.parametrize(
    ("model", "bound", "match"),
    [
        (GaussianMean(**MEAN), None, "private fit need a public target_bound"),
        (GaussianMean(**MEAN, center=[0.0, 1.0]), 5.0, r"center must be .* shape \(1,\)"),
        (GaussianMean(**MEAN, noise_variance=[0.0, 1.0]), 5.0, "noise_variance must be"),
        (GaussianMean(**MEAN, participants=[1, 999]), 5.0, "at least two clients"),
        (BernoulliMean(epsilon=1.0, participants=[1, 999]), None, "at least two clients"),
        (PoissonMean(epsilon=1.0, cap=9, participants=[1, 999]), None, "at least two clients"),
    ],
)
def test_public_parameters_of_means_are_checked_before_the_charge(model, bound, match, tmp_path):
    model = clone(model).set_params(ledger=PrivacyLedger(tmp_path / "ledger"))
    frame = sales(m=10)
    kept = ClientStatistics.from_rows(
        None, (frame["sales"] > 0).astype(float), groups=frame["shop"], target_bound=bound
    )
    with pytest.raises(ValueError, match=match):
        model.fit_statistics(kept)
    assert len(model.ledger.to_frame()) == 0


@pytest.mark.parametrize(
    "model",
    [
        PersonalizedLinearRegression(GaussianPrior(covariance=0.1), **PRIVATE),
        GaussianMean(**MEAN),
        BernoulliMean(epsilon=1.0),
        PoissonMean(epsilon=1.0, cap=9),
    ],
    ids=lambda model: type(model).__name__,
)
def test_each_client_is_there_once(model, tmp_path):
    frame = sales(m=10)
    kept = of_rows(frame.assign(sales=(frame["sales"] > 0).astype(float)), **BOUNDS)
    model = clone(model).set_params(ledger=PrivacyLedger(tmp_path / "ledger"))
    for positions, match in (
        ([0, 1, 1, 2], "got client 1 after 1"),
        ([0, 2, 1], "got client 1 after 2"),
        ([], "one client or more"),
    ):
        with pytest.raises(ValueError, match=match):
            model.fit_statistics(twice(kept, positions))
    assert len(model.ledger.to_frame()) == 0
    for positions in ([4, 2, 7], np.isin(np.arange(10), [2, 4, 7]), [-3, 2, -6]):
        assert kept.of_clients(positions).clients.tolist() == [2, 4, 7]
    assert kept.of_clients(slice(None, None, -1)).clients.tolist() == list(range(10))
    for positions in ([0] * 3, [9, -1]):
        with pytest.raises(ValueError, match="each client once"):
            kept.of_clients(positions)
