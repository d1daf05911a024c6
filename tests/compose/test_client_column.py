"""Client ids as a column of X give the numbers that routed groups give."""

import pickle
import re
import warnings

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import scipy.sparse as sp
import sklearn
from sklearn import config_context
from sklearn.base import BaseEstimator, clone, is_classifier, is_regressor
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import ColumnTransformer
from sklearn.ensemble import BaggingRegressor, StackingRegressor, VotingRegressor
from sklearn.exceptions import NotFittedError
from sklearn.inspection import partial_dependence, permutation_importance
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.metrics import mean_squared_error
from sklearn.model_selection import (
    GridSearchCV,
    PredefinedSplit,
    cross_val_predict,
    cross_val_score,
)
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

import pfl_sklearn
from pfl_sklearn import (
    BernoulliMean,
    ClientColumn,
    GaussianMean,
    PersonalizedLinearRegression,
    PersonalizedLogisticRegression,
    PersonalizedPoissonRegression,
    PoissonMean,
    PPSGDRegressor,
    UnseenClientsWarning,
)
from pfl_sklearn.inspection import CoefficientDisplay
from pfl_sklearn.linear_model import NotEstimableWarning, SeparationWarning
from pfl_sklearn.metrics import ClientScorer
from pfl_sklearn.model_selection import ClientKFold
from pfl_sklearn.priors import GaussianPrior
from pfl_sklearn.privacy import privacy_of

rng = np.random.default_rng(0)
N_CLIENTS, N_ROWS = 6, 120
CODES = rng.integers(0, N_CLIENTS, N_ROWS)
NAMES = np.array([f"site {k}" for k in range(N_CLIENTS)])[CODES]
FEATURES = rng.normal(size=(N_ROWS, 2))
Y = 2.0 * CODES + rng.normal(size=N_ROWS)
LABELS = (rng.random(N_ROWS) < (CODES + 0.5) / N_CLIENTS).astype(int)
FRAME = pd.DataFrame({"a": FEATURES[:, 0], "site": NAMES, "b": FEATURES[:, 1]})
FOLDS = ClientKFold(4, client_column="site", random_state=0)
DIRECT = GaussianMean().fit(FEATURES, Y, groups=CODES)
EXPECTED = DIRECT.predict(FEATURES, groups=CODES)


def by_hand(estimator, y, method="predict"):
    """Out-of-fold responses of fits with groups."""
    made = [None] * N_ROWS
    for train, test in FOLDS.split(FRAME):
        model = clone(estimator).fit(FEATURES[train], y[train], groups=CODES[train])
        for row, value in zip(
            test, getattr(model, method)(FEATURES[test], groups=CODES[test]), strict=True
        ):
            made[row] = value
    return np.array(made)


NUMBERS = np.column_stack([FEATURES, CODES])
TABLES = {
    "pandas, name": (FRAME, "site"),
    "pandas, position": (FRAME, 1),
    "pandas, negative": (FRAME, -2),
    "pandas, numpy position": (FRAME, np.int64(1)),
    "pandas, categorical": (FRAME.astype({"site": "category"}), "site"),
    "pandas, Int64": (FRAME.assign(site=pd.array(CODES, dtype="Int64")), "site"),
    "pandas, float": (FRAME.assign(site=CODES / 4), "site"),
    "pandas, Float64": (FRAME.assign(site=pd.array(CODES / 4, dtype="Float64")), "site"),
    "pandas, zoned times": (
        FRAME.assign(site=pd.Timestamp(2020, 1, 1, tz="UTC") + pd.to_timedelta(CODES, unit="D")),
        "site",
    ),
    "polars, name": (pl.DataFrame(FRAME.to_dict("list")), "site"),
    "polars, position": (pl.DataFrame(FRAME.to_dict("list")), 1),
    "polars, categorical": (
        pl.DataFrame(FRAME.to_dict("list"), schema_overrides={"site": pl.Categorical}),
        "site",
    ),
    "pyarrow, name": (pa.table(FRAME.to_dict("list")), "site"),
    "pyarrow, position": (pa.table(FRAME.to_dict("list")), 1),
    "numpy": (NUMBERS, 2),
    "numpy, negative": (NUMBERS, -1),
    "numpy, exact floats": (np.column_stack([FEATURES, CODES / 7]), 2),
    "numpy, objects": (np.column_stack([FEATURES.astype(object), NAMES]), 2),
    "list": (NUMBERS.tolist(), 2),
    "csr": (sp.csr_array(NUMBERS), 2),
    "coo": (sp.coo_matrix(NUMBERS), -1),
}


@pytest.mark.parametrize("case", TABLES)
def test_tables(case):
    X, column = TABLES[case]
    model = ClientColumn(GaussianMean(), column).fit(X, Y)
    np.testing.assert_array_equal(model.predict(X), EXPECTED)
    assert len(model.clients_) == N_CLIENTS
    assert model.n_features_in_ == 3
    assert model.estimator_.n_features_in_ == 2
    assert model.score(X, Y) == DIRECT.score(FEATURES, Y, groups=CODES)


def test_the_same_as_routed_groups():
    pipeline = make_pipeline(StandardScaler(), GaussianMean())
    with config_context(enable_metadata_routing=True):
        routed = clone(pipeline).fit(FRAME[["a", "b"]], Y, groups=NAMES)
        expected = routed.predict(FRAME[["a", "b"]], groups=NAMES, return_std=True)
    model = ClientColumn(pipeline, "site").fit(FRAME, Y)
    assert not sklearn.get_config()["enable_metadata_routing"]
    for got, want in zip(model.predict(FRAME, return_std=True), expected, strict=True):
        np.testing.assert_array_equal(got, want)
    pd.testing.assert_frame_equal(model.summary(level=0.8), routed[-1].summary(level=0.8))
    assert model.feature_names_in_.tolist() == ["a", "site", "b"]
    assert model.estimator_[0].feature_names_in_.tolist() == ["a", "b"]


def test_rows_of_strangers():
    """Floats are matched by their exact values."""
    model = ClientColumn(GaussianMean(), "site").fit(FRAME, Y)
    mixed = FRAME.assign(site=["stranger", *NAMES[1:]])
    X = np.column_stack([FEATURES, CODES / 7])
    of_floats = ClientColumn(GaussianMean(), 2).fit(X, Y)
    X[0, 2] = np.nextafter(X[0, 2], 1)
    for found in (model.predict(mixed), of_floats.predict(X)):
        np.testing.assert_array_equal(found, [DIRECT.population_mean_, *EXPECTED[1:]])
    with pytest.warns(UnseenClientsWarning):
        model.predict(FRAME.assign(site="stranger"))


def test_classifier_methods():
    direct = BernoulliMean().fit(FEATURES, LABELS, groups=CODES)
    model = ClientColumn(BernoulliMean(), "site").fit(FRAME, LABELS)
    assert is_classifier(model)
    assert is_regressor(ClientColumn(GaussianMean(), 0))
    assert model.classes_.tolist() == [0, 1]
    for method in ("predict", "predict_proba", "predict_log_proba"):
        np.testing.assert_array_equal(
            getattr(model, method)(FRAME), getattr(direct, method)(FEATURES, groups=CODES)
        )
    assert not hasattr(model, "transform")
    assert not hasattr(ClientColumn(GaussianMean(), 0), "predict_proba")


def test_sample_weight_is_routed_if_requested():
    weight = np.random.default_rng(1).uniform(0.5, 2, N_ROWS)
    direct = GaussianMean().fit(FEATURES, Y, groups=CODES, sample_weight=weight)
    with config_context(enable_metadata_routing=True):
        inner = GaussianMean().set_fit_request(sample_weight=True)
    model = ClientColumn(inner, "site").fit(FRAME, Y, sample_weight=weight)
    np.testing.assert_array_equal(model.estimator_.means_, direct.means_)
    assert not np.allclose(direct.means_, DIRECT.means_, rtol=1e-4)


def test_groups_beside_the_column():
    model = ClientColumn(GaussianMean(), "site")
    model.fit(FRAME, Y, groups=NAMES)
    np.testing.assert_array_equal(model.predict(FRAME, groups=list(NAMES)), EXPECTED)
    swapped = NAMES.copy()
    swapped[:2] = NAMES[:2][::-1] if NAMES[0] != NAMES[1] else ["site 0", "site 1"]
    for call in (
        lambda groups: clone(model).fit(FRAME, Y, groups=groups),
        lambda groups: model.predict(FRAME, groups=groups),
    ):
        for other in (swapped, CODES):
            with pytest.raises(ValueError, match=r"groups=.*'site'"):
                call(other)


@pytest.mark.parametrize(
    ("X", "column", "message"),
    [
        (FRAME, "clinic", r"'clinic'.*\['a', 'site', 'b'\]"),
        (NUMBERS, "site", r"'site'.*ndarray"),
        (NUMBERS, 7, r"\b7\b.*\b3 columns"),
        (FRAME.assign(site=np.where(CODES == 1, np.nan, CODES)), "site", r"'site'.*\bNaN\b"),
        (FRAME.assign(site=np.where(CODES == 1, None, NAMES)), "site", r"'site'.*\bNaN\b"),
        (FRAME.assign(site=pd.Categorical([None, *NAMES[1:]])), "site", r"'site'.*\bNaN\b"),
        (NUMBERS[:, :1], 0, "minimum of 2"),
        (FRAME, 1.5, "'column' parameter of ClientColumn"),
    ],
)
def test_bad_tables(X, column, message):
    model = ClientColumn(make_pipeline(StandardScaler(), GaussianMean()), column)
    with pytest.raises(ValueError, match=message):
        model.fit(X, Y)
    with pytest.raises(NotFittedError):
        model.predict(X)


def test_a_column_is_around_an_estimator():
    with pytest.raises(ValueError, match="'estimator' parameter of ClientColumn"):
        ClientColumn("mean", "site").fit(FRAME, Y)


def test_search_with_a_string_scorer():
    grid = {"estimator__method": ["ml", "moments"], "estimator__noise_variance": [None, 50.0]}
    search = GridSearchCV(
        ClientColumn(GaussianMean(), "site"), grid, cv=FOLDS, scoring="neg_mean_squared_error"
    ).fit(FRAME, Y)
    for params, score in zip(
        search.cv_results_["params"], search.cv_results_["mean_test_score"], strict=True
    ):
        inner = GaussianMean(**{name.removeprefix("estimator__"): v for name, v in params.items()})
        made = by_hand(inner, Y)
        per_fold = [mean_squared_error(Y[test], made[test]) for _, test in FOLDS.split(FRAME)]
        assert score == pytest.approx(-np.mean(per_fold))
    assert search.best_params_["estimator__noise_variance"] is None
    direct = GaussianMean(method=search.best_params_["estimator__method"])
    direct.fit(FEATURES, Y, groups=CODES)
    np.testing.assert_array_equal(search.predict(FRAME), direct.predict(FEATURES, groups=CODES))


def test_search_inside_the_column():
    folds = ClientKFold(4, random_state=0)
    search = GridSearchCV(
        make_pipeline(StandardScaler(), GaussianMean()),
        {"gaussianmean__noise_variance": [None, 50.0]},
        cv=folds,
        scoring=ClientScorer("neg_mean_squared_error", average="macro"),
    )
    model = ClientColumn(search, "site").fit(FRAME, Y)
    assert model.estimator_.best_params_ == {"gaussianmean__noise_variance": None}
    np.testing.assert_array_equal(model.predict(FRAME), EXPECTED)
    np.testing.assert_array_equal(model.clients_, np.unique(NAMES))
    macro = pd.Series((Y - EXPECTED) ** 2).groupby(CODES).mean().mean()
    assert model.score(FRAME, Y) == pytest.approx(-macro)


def test_cross_val_predict_and_score():
    made = by_hand(GaussianMean(), Y)
    model = ClientColumn(GaussianMean(), "site")
    np.testing.assert_array_equal(cross_val_predict(model, FRAME, Y, cv=FOLDS), made)
    scores = cross_val_score(model, FRAME, Y, cv=FOLDS, scoring="neg_mean_squared_error")
    for (_, test), score in zip(FOLDS.split(FRAME), scores, strict=True):
        assert score == pytest.approx(-mean_squared_error(Y[test], made[test]))
    proba = cross_val_predict(
        ClientColumn(BernoulliMean(), "site"), FRAME, LABELS, cv=FOLDS, method="predict_proba"
    )
    np.testing.assert_array_equal(proba, by_hand(BernoulliMean(), LABELS, "predict_proba"))


def test_folds_of_a_table_sorted_by_client_warn():
    """scikit-learn's folds are contiguous: nearly all their test rows are of unseen clients."""
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"site": np.repeat(np.arange(24), 7), "x": rng.normal(size=168)})
    y = 3 * rng.normal(size=24)[table["site"]] + rng.normal(size=168)
    model = ClientColumn(GaussianMean(), "site")
    with pytest.warns(UnseenClientsWarning, match="ClientKFold") as caught:
        scores = cross_val_score(model, table, y, cv=5)
    assert len(caught) == 5  # one of each fold
    assert scores.mean() < 0
    assert cross_val_score(model, table, y, cv=FOLDS).mean() > 0.8
    expected = model.set_params(estimator__unseen="population")
    np.testing.assert_array_equal(cross_val_score(expected, table, y, cv=5), scores)


def test_permutation_importance_sees_the_column():
    model = ClientColumn(GaussianMean(), "site").fit(FRAME, Y)
    found = permutation_importance(model, FRAME, Y, n_repeats=3, random_state=0)
    assert found.importances_mean[[0, 2]].tolist() == [0, 0]
    assert found.importances_mean[1] > 1


def test_partial_dependence_on_the_column():
    model = ClientColumn(GaussianMean(), "site").fit(FRAME, Y)
    found = partial_dependence(model, FRAME, ["site"], categorical_features=["site"])
    np.testing.assert_allclose(found["average"][0], DIRECT.means_)
    found = partial_dependence(model, FRAME, ["a"], grid_resolution=3)
    np.testing.assert_allclose(found["average"][0], EXPECTED.mean())


def test_ensembles():
    means = ClientColumn(GaussianMean(), "site")
    flat = ClientColumn(GaussianMean(noise_variance=50.0), "site")
    shrunk = GaussianMean(noise_variance=50.0).fit(FEATURES, Y, groups=CODES)
    shrunk = shrunk.predict(FEATURES, groups=CODES)
    voted = VotingRegressor([("means", means), ("flat", flat)], weights=[3, 1]).fit(FRAME, Y)
    np.testing.assert_allclose(voted.predict(FRAME), (3 * EXPECTED + shrunk) / 4)
    fold = np.zeros(N_ROWS, dtype=int)
    for k, (_, test) in enumerate(FOLDS.split(FRAME)):
        fold[test] = k
    stacked = StackingRegressor(
        [("means", means), ("flat", flat)], LinearRegression(), cv=PredefinedSplit(fold)
    ).fit(FRAME, Y)
    level = np.column_stack([by_hand(GaussianMean(), Y), by_hand(flat.estimator, Y)])
    final = LinearRegression().fit(level, Y)
    np.testing.assert_allclose(
        stacked.predict(FRAME), final.predict(np.column_stack([EXPECTED, shrunk]))
    )


def test_calibration():
    model = ClientColumn(BernoulliMean(), "site")
    calibrated = CalibratedClassifierCV(model, method="sigmoid", cv=FOLDS, ensemble=False)
    got = calibrated.fit(FRAME, LABELS).predict_proba(FRAME)[:, 1]
    direct = BernoulliMean().fit(FEATURES, LABELS, groups=CODES)
    own = direct.predict_proba(FEATURES, groups=CODES)[:, 1]
    assert len(np.unique(got)) == len(np.unique(own)) == N_CLIENTS
    made = by_hand(BernoulliMean(), LABELS, "predict_proba")[:, 1]
    # Platt's targets and logistic fit, once more.
    n_ones = LABELS.sum()
    targets = np.where(LABELS, (n_ones + 1) / (n_ones + 2), 1 / (N_ROWS - n_ones + 2))
    platt = LogisticRegression(C=np.inf, tol=1e-10, max_iter=1000).fit(
        np.tile(made, 2)[:, None],
        np.repeat([1, 0], N_ROWS),
        sample_weight=np.concatenate([targets, 1 - targets]),
    )
    np.testing.assert_allclose(got, platt.predict_proba(own[:, None])[:, 1], atol=1e-4)


@pytest.mark.slow
def test_two_workers_as_one():
    found = [
        GridSearchCV(
            ClientColumn(make_pipeline(StandardScaler(), GaussianMean()), "site"),
            {"estimator__gaussianmean__method": ["ml", "moments"]},
            cv=FOLDS,
            scoring=ClientScorer("r2", average="macro", client_column="site"),
            n_jobs=n_jobs,
        ).fit(FRAME, Y)
        for n_jobs in (1, 2)
    ]
    for name in ("mean_test_score", "split0_test_score"):
        np.testing.assert_array_equal(found[0].cv_results_[name], found[1].cv_results_[name])
    assert np.isfinite(found[0].cv_results_["mean_test_score"]).all()
    np.testing.assert_array_equal(found[0].predict(FRAME), found[1].predict(FRAME))


def test_only_what_the_estimator_has_is_handed_on():
    plain = ClientColumn(BaggingRegressor(GaussianMean(), 2), "site")
    names = ("summary", "release", "for_client", "clients_")
    assert [hasattr(plain, name) for name in (*names, "privacy_")] == [False] * 5
    plain.fit(FRAME, Y)
    assert [hasattr(plain, name) for name in names] == [False] * 4
    assert plain.privacy_ == privacy_of(plain.estimator_)
    assert plain.privacy_.epsilon == np.inf
    with pytest.raises(NotFittedError):
        ClientColumn(GaussianMean(), "site").summary()


@pytest.mark.parametrize(
    ("inside", "final"),
    [
        (True, PersonalizedLinearRegression(GaussianPrior(covariance=1.0), noise_variance=1.0)),
        (False, PersonalizedLogisticRegression(random="all")),
    ],
)
def test_names_of_features_survive_the_steps_before(inside, final):
    """Columns of a data frame that become others, of arrays without names."""
    table = pd.DataFrame({"site": NAMES, "sex": np.tile(["f", "m"], len(Y) // 2), "age": Y})
    columns = ColumnTransformer(
        [("onehot", OneHotEncoder(), ["sex"]), ("scaled", StandardScaler(), ["age"])],
        sparse_threshold=0,
    )
    names = ["onehot__sex_f", "onehot__sex_m", "scaled__age"]
    noisy = Y + np.random.default_rng(0).normal(size=len(Y))
    pipeline, target = make_pipeline(columns, final), Y > 4 if is_classifier(final) else noisy
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SeparationWarning)
        warnings.simplefilter("ignore", NotEstimableWarning)  # a full set of indicators
        if inside:
            model = ClientColumn(pipeline, "site").fit(table, target)
            summary = model.summary()
        else:
            with sklearn.config_context(enable_metadata_routing=True):
                model = pipeline.fit(table.drop(columns="site"), target, groups=NAMES)
            summary = model[-1].summary(feature_names=model[:-1].get_feature_names_out())
    assert summary.loc["fixed"].index.tolist() == ["intercept", *names]
    assert set(names) < set(summary.loc["between"].index)
    display = CoefficientDisplay.from_estimator(model, feature="onehot__sex_m")
    of_class = ", log odds of True" if is_classifier(final) else ""
    assert display.ax_.get_xlabel() == f"coefficient of onehot__sex_m{of_class}"


def test_the_summary_of_a_model_takes_as_many_names_as_features():
    model = PersonalizedLinearRegression(random="intercept").fit(FEATURES, Y, groups=NAMES)
    assert model.summary().loc["fixed"].index.tolist() == ["intercept", "x0", "x1"]
    with pytest.raises(ValueError, match=r"feature_names.*\b2 features.*\b1 names"):
        model.summary(feature_names=["a"])


def test_steps_before_a_regression_need_more_than_the_ids():
    final = make_pipeline(StandardScaler(), PersonalizedLinearRegression())
    for column in ("site", 0):
        with pytest.raises(ValueError, match=rf"only the column {column!r}.*features"):
            ClientColumn(final, column).fit(FRAME[["site"]], Y)
    model = ClientColumn(GaussianMean(), "site").fit(FRAME[["site"]], Y)
    np.testing.assert_array_equal(model.predict(FRAME[["site"]]), EXPECTED)


@pytest.mark.parametrize("column", [0, "id"])
def test_floats_that_do_not_tell_ids_apart(column):
    """One fractional cell makes floats of a whole list of rows, and would merge other clients."""
    ids = [2**53 + 1, 2**53 + 1, 2**53, 2**53]
    model = ClientColumn(GaussianMean(noise_variance=1.0), column)
    for first in (0, 0.5):
        rows = [[each, first] for each in ids]
        table = rows if column == 0 else pd.DataFrame({"id": ids, "x": first})
        if column == 0 and first:
            with pytest.raises(ValueError, match=r"client column 0 holds floats beyond 2\*\*53"):
                model.fit(table, [1.0, 2.0, 3.0, 4.0])
        else:
            np.testing.assert_array_equal(model.fit(table, np.arange(4.0)).clients_, ids[::-2])


def is_estimator(value):
    return isinstance(value, type) and hasattr(value, "predict") and value is not ClientColumn


@pytest.mark.parametrize(
    "name", [name for name in pfl_sklearn.__all__ if is_estimator(getattr(pfl_sklearn, name))]
)
def test_every_method_but_other_fits_is_handed_on(name):
    # `without` needs what partial_fit keeps; plans are made before there are columns.
    others = {"partial_fit", "fit_statistics", "fit_counts", "without"}
    others |= {"expected_error", "solve_expected_error"}
    kind = getattr(pfl_sklearn, name)
    public = {each for each in dir(kind) if not re.search("^_|^set_|_$", each)}
    assert public - {*dir(BaseEstimator)} - others <= set(dir(ClientColumn))


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    "estimator",
    [
        GaussianMean(),
        BernoulliMean(),
        PoissonMean(),
        PersonalizedLinearRegression(random="intercept"),
        PersonalizedLogisticRegression(random="intercept"),
        PersonalizedPoissonRegression(random="intercept"),
        PPSGDRegressor(n_rounds=2, random_state=0),
    ],
    ids=lambda each: type(each).__name__,
)
def test_fitted_attributes_of_the_model_are_handed_on(estimator):
    y = Y if is_regressor(estimator) and "Poisson" not in repr(estimator) else LABELS
    model = ClientColumn(make_pipeline(StandardScaler(), estimator), "site")
    assert not hasattr(model, "n_samples_per_client_")
    core = model.fit(FRAME, y).estimator_[-1]
    own = {"n_features_in_", "feature_names_in_", "privacy_"}  # of all columns, with the scaler
    names = [each for each in dir(core) if re.search("^[^_].*_$", each)]
    assert {"clients_", "n_samples_per_client_"} < set(names)
    for name in set(names) - own:
        pickled = pickle.dumps(getattr(model, name))
        assert pickled == pickle.dumps(getattr(core, name)), name
    assert model.n_features_in_ == 3
    with pytest.raises(AttributeError, match=f"{type(core).__name__}.*no attribute 'inertia_'"):
        model.inertia_  # noqa: B018


@pytest.mark.slow
def test_intervals_take_the_ids_from_the_column():
    counts = np.random.default_rng(0).poisson(2.0, N_ROWS)
    table = FRAME.assign(years=np.linspace(0.5, 2, N_ROWS))
    rows = StandardScaler().fit_transform(FRAME[["a", "b"]])
    regression = PersonalizedPoissonRegression(random="intercept")
    with config_context(enable_metadata_routing=True):
        routed = clone(regression).set_fit_request(exposure=True).set_predict_request(exposure=True)
        steps = GridSearchCV(
            make_pipeline(StandardScaler(), routed.set_score_request(exposure=True)),
            {"personalizedpoissonregression__uncertainty": ["full"]},
            cv=ClientKFold(2, random_state=0),
            scoring=ClientScorer("neg_mean_squared_error"),
        )
    model = ClientColumn(steps, "site", exposure="years").fit(table, counts)
    given = {"groups": NAMES, "exposure": table["years"]}
    direct = regression.fit(rows, counts, **given)
    options = {"level": 0.8, "new_row": True}
    expected = direct.predict_interval(rows, **given, **options)
    for got, want in zip(model.predict_interval(table, **options), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9)
    np.testing.assert_allclose(model.credible_interval(0.8), direct.credible_interval(0.8))
    intervals = direct.conf_int(0.8, feature_names=["a", "b"])
    pd.testing.assert_frame_equal(model.conf_int(0.8), intervals)


def test_new_clients_get_their_own_part_by_the_column():
    model = ClientColumn(PPSGDRegressor(n_rounds=3, random_state=0), "site").fit(FRAME, Y)
    new = FRAME.assign(site="site 9")[:20]
    assert model.personalize(new, Y[:20]) is model
    assert model.clients_[-1] == "site 9"
    alone = model.estimator_.predict(FRAME[["a", "b"]][:20], groups=["site 9"] * 20)
    np.testing.assert_array_equal(model.predict(new), alone)
