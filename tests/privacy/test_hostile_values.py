"""Finite values of one client, of any size, are cut to public ranges: no refusal, no warning."""

import math

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LinearRegression, LogisticRegression

from pfl_sklearn import (
    BernoulliMean,
    ClientSelector,
    CollaborativeMean,
    GaussianMean,
    PersonalizedLinearRegression,
    PoissonMean,
    PPSGDRegressor,
)
from pfl_sklearn.model_selection import PrivateSelectCV
from pfl_sklearn.priors import (
    BetaPrior,
    DirichletPrior,
    DiscretePrior,
    GammaPrior,
    GaussianMixturePrior,
    GaussianPrior,
)
from pfl_sklearn.statistics import ClientStatistics

pytestmark = [
    pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning"),
    pytest.mark.filterwarnings("ignore:The released noise variance"),
    pytest.mark.filterwarnings("ignore:The re(leased clusters|ports) do not"),
    pytest.mark.filterwarnings("ignore:The released population has .* at cap"),
]
# The first client's rows; the columns have other signs, so that sums over them are NaN.
SIZES = [1.7e308, 1e-300, 1e150, 1e151, 1e-140, 1e-160, 2.0**60, 5e-324, -3.0, 0.5]
VALUES = {
    **{f"{size:.3g}": np.full(8, size) for size in SIZES},
    **{f"+-{size:.3g}": np.resize([size, -size], 8) for size in (1.7e308, 1e151)},
    "all": np.resize(SIZES, 8),
}
FEW = {name: VALUES[name] for name in ("+-1.7e+308", "+-1e+151", "1e-160", "all")}
N_CLIENTS = 12
GROUPS = np.repeat(np.arange(N_CLIENTS), 8)
FIRST, REST = GROUPS == 0, GROUPS > 0
BOUNDS = {"feature_bound": 2.0, "target_bound": 4.0}
LINEAR = {"epsilon": 1.0, "random_state": 0, **BOUNDS}
NAMES = {"groups": "g", "target": "y", "features": ["a", "b"]}


def table(values=None):
    """Features (n, 2) and targets (n,), those of the first client with the given values (8,)."""
    rng = np.random.default_rng(0)
    X, noise = rng.normal(size=(len(GROUPS), 2)), rng.normal(size=len(GROUPS))
    y = X[:, 0] + rng.normal(size=N_CLIENTS)[GROUPS] + noise
    if values is not None:
        X[FIRST], y[FIRST] = np.outer(values, [1.0, -1.0]), values
    return X, y


# Statistics ---------------------------------------------------------------------------------------
def frame_of(X, y):
    return pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "y": y, "g": GROUPS})


ENGINES = {
    "rows": lambda X, y: ClientStatistics.from_rows(X, y, groups=GROUPS, **BOUNDS),
    "frame": lambda X, y: ClientStatistics.from_frame(frame_of(X, y), **NAMES, **BOUNDS),
    "polars": lambda X, y: ClientStatistics.from_frame(
        pl.from_pandas(frame_of(X, y)).lazy(), **NAMES, **BOUNDS
    ),
    "duckdb": lambda X, y: ClientStatistics.from_frame(
        duckdb.connect().from_df(frame_of(X, y)), **NAMES, **BOUNDS
    ),
    "chunks": lambda X, y: ClientStatistics.from_chunks(
        [frame_of(X, y)[start::3] for start in range(3)], **NAMES, **BOUNDS
    ),
    "sum": lambda X, y: sum(
        ClientStatistics.from_rows(X[k::3], y[k::3], groups=GROUPS[k::3], **BOUNDS)
        for k in range(3)
    ),
}


@pytest.mark.slow_but_first
@pytest.mark.parametrize("engine", ENGINES)
def test_statistics_with_bounds(engine, tmp_path):
    """They are made of any finite values, and no other client's message changes."""
    known = PersonalizedLinearRegression(GaussianPrior(covariance=1.0), **LINEAR)
    plain = ENGINES[engine](*table())
    for name, values in (VALUES if engine == "rows" else FEW).items():
        found = ENGINES[engine](*table(values))
        for field in ("packed", "clipped", "lowest", "highest"):
            ours, theirs = getattr(found, field), getattr(plain, field)
            assert np.isfinite(ours).all(), (name, field)
            # Polars adds a client's rows in an order of its own.
            np.testing.assert_allclose(ours[1:], theirs[1:], rtol=1e-9, atol=1e-9)
            assert engine == "polars" or ours[1:].tobytes() == theirs[1:].tobytes()
        if name == "all":
            found.to_parquet(tmp_path / "file")
            found = ClientStatistics.from_parquet(tmp_path / "file")
        model = known.fit_statistics(found)
        assert np.isfinite(model.population_coef_).all()
        assert np.isfinite(model.coef_).all()


@pytest.mark.parametrize("params", [{"random": "intercept"}, {"epsilon": 300.0}], ids=repr)
def test_rounds_on_statistics(params):
    for values in FEW.values():
        model = PersonalizedLinearRegression(**{**LINEAR, **params})
        model.fit_statistics(ENGINES["rows"](*table(values)))
        assert np.isfinite(model.population_coef_).all()
        assert np.isfinite(model.coef_).all()


def test_statistics_without_bounds_name_what_is_wrong_as_before():
    for values, message in ((1e151, "y holds values too large"), (1e-141, "too small")):
        y = np.where(FIRST, values, 0.0)
        with pytest.raises(ValueError, match=message):
            ClientStatistics.from_rows(None, y, groups=GROUPS)
        bounded = ClientStatistics.from_rows(None, y, groups=GROUPS, target_bound=1.0)
        GaussianMean(epsilon=1.0, clip_norm=1.0, noise_variance=1.0).fit_statistics(bounded)


def test_rows_far_beyond_tiny_bounds_overflow_in_their_clients_model_alone():
    bounds = {"feature_bound": 1e-45, "target_bound": 1e-20}
    model = PersonalizedLinearRegression(GaussianPrior(covariance=1.0), epsilon=1.0, **bounds)
    X, y = table(np.resize([9e149, -1e77, 1e140], 8))
    model.fit(X, y, groups=GROUPS)
    assert np.isfinite(model.population_coef_).all()
    assert np.isfinite(model.coef_[1:]).all()


# Counts and proportions ---------------------------------------------------------------------------

COUNTS = {
    "local": PoissonMean(epsilon=1.0, cap=4, random_state=0),
    "central": PoissonMean(epsilon=1.0, delta=1e-3, trust="central", cap=4, random_state=0),
    "known": PoissonMean(GammaPrior(2.0, 1.0), epsilon=1.0),
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts_and_exposure(name):
    model = COUNTS[name]
    rng = np.random.default_rng(0)
    for values in FEW.values():
        counts, exposure = rng.poisson(2.0, len(GROUPS)) * 1.0, rng.uniform(1, 2, len(GROUPS))
        counts[FIRST], exposure[FIRST] = values, values
        X, given = np.zeros((len(GROUPS), 1)), {"groups": GROUPS, "exposure": exposure}
        frame = pd.DataFrame({"a": exposure, "b": exposure, "y": counts, "g": GROUPS})
        statistics = ClientStatistics.from_frame(frame, **NAMES, **BOUNDS)
        for fit in (
            lambda X=X, y=counts, given=given: model.fit(X, y, **given),
            lambda y=counts, given=given: model.fit_counts(y, **given),
            lambda statistics=statistics: model.fit_statistics(statistics, exposure="a"),
        ):
            fit()
            assert np.isfinite(model.population_mean_)
            assert np.isfinite(model.means_).all()


def test_counts_are_rounded_and_cut():
    X, counts = np.zeros((len(GROUPS), 1)), np.tile([0.0, 1.0, 2.0, 3.0], len(GROUPS) // 4)
    strange = counts.copy()
    strange[:4] = [-1e308, 0.9, 2.3, 3.0]
    model = COUNTS["local"]
    plain = model.fit(X, counts, groups=GROUPS).means_.copy()
    np.testing.assert_array_equal(model.fit(X, strange, groups=GROUPS).means_, plain)
    assert any("others are rounded and cut" in each for each in model.privacy_.assumptions)
    with pytest.raises(ValueError, match="y must not be negative; row 0 has -1e"):
        PoissonMean().fit(X, np.where(FIRST, -1e308, counts), groups=GROUPS)


@pytest.mark.parametrize(
    "model",
    [
        BernoulliMean(epsilon=1.0, random_state=0),
        BernoulliMean(epsilon=1.0, mechanism="two_bit", random_state=0),
        BernoulliMean(epsilon=1.0, delta=1e-3, trust="central", random_state=0),
        BernoulliMean(BetaPrior(2.0, 2.0), epsilon=1.0),
    ],
    ids=repr,
)
def test_successes(model):
    for value in (1.7e308, -1.7e308, 1e-300, 2.0**60, -5e-324, 0.5):
        successes = np.full(N_CLIENTS, 3.0)
        successes[0] = value
        model.fit_counts(successes, np.full(N_CLIENTS, 8))
        assert 0 <= model.local_means_[0] <= 1
        y = np.where(FIRST, value, GROUPS % 2)
        bounded = ClientStatistics.from_rows(None, y, groups=GROUPS, target_bound=1.0)
        model.fit_statistics(bounded)
        assert 0 <= model.local_means_[0] <= 1
        assert np.isfinite(model.population_mean_)


def test_trials_are_public_but_no_row_is_named():
    model = BernoulliMean(epsilon=1.0)
    for trials in (0, 2.5, 2.0**60):
        with pytest.raises(ValueError, match="trials must be whole numbers from 1") as caught:
            model.fit_counts(np.full(4, 3.0), [8, 8, trials, 8])
        assert "row" not in str(caught.value)


# Others -------------------------------------------------------------------------------------------

X_PUBLIC = np.random.default_rng(1).normal(size=(40, 2))
Y_PUBLIC = 3 * X_PUBLIC[:, 0] - 2 * X_PUBLIC[:, 1]
OF_OWN_ROWS = PersonalizedLinearRegression(
    GaussianPrior(0.0, 1.0), noise_variance=1.0, unseen="population", **LINEAR
)


def selector(model, own, **params):
    return ClientSelector(
        [("public", FrozenEstimator(model)), ("own", own)],
        prior=DirichletPrior([0.5, 0.5], 10.0),
        random_state=0,
        **params,
    )


def _selectors():
    line = LinearRegression().fit(X_PUBLIC, Y_PUBLIC)
    classes = LogisticRegression(C=1e6).fit(X_PUBLIC, (Y_PUBLIC > 1).astype(int))
    return {
        "weights": selector(line, OF_OWN_ROWS),
        "best": selector(line, OF_OWN_ROWS, how="best"),
        "classes": selector(classes, FrozenEstimator(classes)),
    }


@pytest.mark.parametrize("name", ["weights", "best", "classes"])
def test_selectors_of_public_and_own_models(name):
    """Whose public candidate predicts infinity for some rows."""
    model, of_classes = _selectors()[name], name == "classes"

    def fitted(values=None):
        X, y = table(values)
        return model.fit(X, (table()[1] > 0).astype(int) if of_classes else y, groups=GROUPS)

    plain = fitted().weights_.copy()
    assert model.privacy_.epsilon == 0
    for values in ("+-1.7e+308", "all"):
        weights = fitted(VALUES[values]).weights_
        assert np.isfinite(weights).all()
        np.testing.assert_array_equal(weights[1:], plain[1:])


def test_a_selector_without_privacy_says_what_was_predicted():
    line = LinearRegression().fit(X_PUBLIC, Y_PUBLIC)
    X, y = table(np.full(8, 1.7e308))[0], table()[1]
    model = ClientSelector([("public", FrozenEstimator(line)), ("own", LinearRegression())])
    with pytest.raises(ValueError, match=r"'public' .* predicted inf"):
        model.set_params(prior=DirichletPrior([0.5, 0.5], 10.0)).fit(X, y, groups=GROUPS)


SHORT = {"n_rounds": 2, "learning_rate": 0.1}
SELECTIONS = {
    "mean": (GaussianMean(noise_variance=1.0), "clip_norm"),
    "linear": (
        PersonalizedLinearRegression(
            GaussianPrior(covariance=1.0), noise_variance=1.0, target_bound=4.0
        ),
        "feature_bound",
    ),
    "rounds": (PPSGDRegressor(**SHORT), "clip_norm"),
}


@pytest.mark.parametrize(
    ("name", "scoring"), [("mean", "r2"), ("linear", None), ("linear", "r2"), ("rounds", None)]
)
def test_private_selections(name, scoring):
    estimator, bound = SELECTIONS[name]
    select = PrivateSelectCV(
        estimator,
        {bound: [1.0, 4.0]},
        epsilon=4.0,
        expected_trials=2,
        scoring=scoring,
        score_range=(-20.0, 0.0),
        random_state=0,
    )
    for values in ("+-1.7e+308", "all"):
        select.fit(*table(VALUES[values]), groups=GROUPS)
        assert math.isfinite(select.best_score_)


@pytest.mark.parametrize(
    "model",
    [
        GaussianMean(DiscretePrior(), noise_variance=1.0, epsilon=8.0, clip_norm=4.0),
        GaussianMean(GaussianMixturePrior(), noise_variance=1.0, epsilon=8.0, clip_norm=4.0),
        GaussianMean(epsilon=1.0, delta=1e-3, clip_norm=4.0),
    ],
    ids=repr,
)
def test_means_of_several_outputs(model):
    for name in ("+-1.7e+308", "1e-300", "all"):
        y = table(VALUES[name])[0]
        model.set_params(random_state=0).fit(np.zeros((len(y), 1)), y, groups=GROUPS)
        assert np.isfinite(model.population_mean_).all()


def test_streams_that_go_on():
    model = CollaborativeMean(epsilon=8.0, bounds=(-4.0, 4.0), random_state=0)
    X, y = table()
    model.fit(X, y, groups=GROUPS)
    for values in FEW.values():
        model.partial_fit(*table(values), groups=GROUPS)
        assert np.isfinite(model.means_[1:]).all()
        assert np.isfinite(model.population_mean_)


@pytest.mark.parametrize("stored", ["memmap", "pyarrow"])
def test_rounds_on_stored_rows(stored, tmp_path):
    X, y = table(VALUES["+-1.7e+308"])
    rows = pa.table({"a": X[:, 0], "b": X[:, 1]})
    if stored == "memmap":
        rows = np.memmap(tmp_path / "rows", dtype=float, mode="w+", shape=X.shape)
        rows[:] = X
    model = PPSGDRegressor(epsilon=1.0, n_rounds=2, random_state=0).fit(rows, y, groups=GROUPS)
    assert np.isfinite(model.population_coef_).all()


def test_the_report_lists_the_rule():
    X, y = table()
    for model in (OF_OWN_ROWS, PPSGDRegressor(epsilon=1.0, n_rounds=2, random_state=0)):
        assumptions = " ".join(model.fit(X, y, groups=GROUPS).privacy_.assumptions)
        assert "a finite number is never refused: beyond a bound it counts as the" in assumptions
