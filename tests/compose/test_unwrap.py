"""What ClientColumn holds: pipelines, searches and scikit-learn's meta-estimators."""

import math
import pickle

import numpy as np
import pandas as pd
import pytest
from sklearn import config_context
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor
from sklearn.decomposition import PCA
from sklearn.ensemble import (
    AdaBoostRegressor,
    BaggingClassifier,
    BaggingRegressor,
    StackingClassifier,
    StackingRegressor,
    VotingClassifier,
    VotingRegressor,
)
from sklearn.exceptions import NotFittedError
from sklearn.feature_selection import RFE, RFECV, SelectFromModel
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LinearRegression, LogisticRegression, RANSACRegressor, Ridge
from sklearn.metrics import accuracy_score, r2_score
from sklearn.model_selection import FixedThresholdClassifier, GridSearchCV
from sklearn.multioutput import (
    ClassifierChain,
    MultiOutputClassifier,
    MultiOutputRegressor,
    RegressorChain,
)
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import FunctionTransformer, PolynomialFeatures, StandardScaler
from sklearn.utils.validation import check_is_fitted

from pfl_sklearn import (
    BernoulliMean,
    ClientAsFeature,
    ClientColumn,
    ClientSelector,
    GaussianMean,
    PersonalizedLinearRegression,
    PersonalizedStackingRegressor,
    PrivacyWarning,
)
from pfl_sklearn._unwrap import feature_names_of, innermost_estimator
from pfl_sklearn.inspection import CoefficientDisplay
from pfl_sklearn.metrics import ClientScorer, client_scores, known_clients
from pfl_sklearn.model_selection import ClientKFold, PrivateSelectCV
from pfl_sklearn.priors import GaussianPrior
from pfl_sklearn.privacy import privacy_of

rng = np.random.default_rng(0)
N_CLIENTS, N_ROWS = 6, 120
CODES = rng.integers(0, N_CLIENTS, N_ROWS)
NAMES = np.array([f"site {k}" for k in range(N_CLIENTS)])[CODES]
FEATURES = rng.normal(size=(N_ROWS, 2))
Y = 10 + 2.0 * CODES + FEATURES[:, 0] + rng.normal(size=N_ROWS)
TWO = np.column_stack([Y, -Y])
LABELS = (rng.random(N_ROWS) < (CODES + 0.5) / N_CLIENTS).astype(int)
TWO_LABELS = np.column_stack([LABELS, 1 - LABELS])
FRAME = pd.DataFrame({"a": FEATURES[:, 0], "site": NAMES, "b": FEATURES[:, 1]})
REST = FRAME[["a", "b"]]
NUMBERS = np.column_stack([FEATURES, CODES])
PRIVATE = {"epsilon": 1.0, "clip_norm": 30.0, "noise_variance": 1.0}
INSIDE = {"cv": ClientKFold(2, random_state=0), "scoring": ClientScorer("r2")}
# With known variances, fits take no iterations.
LINE = PersonalizedLinearRegression(GaussianPrior(covariance=1.0), noise_variance=1.0)


def column(estimator, X=FRAME, y=Y):
    return ClientColumn(estimator, "site").fit(X, y)


def halves(X):
    return X / 2


def search(estimator, name="method"):
    return GridSearchCV(estimator, {name: ["reml"]}, **INSIDE)


# What holds a regression on the plain features in a way that client ids pass through.
HOLDING = {
    "alone": LINE,
    "frozen": FrozenEstimator(clone(LINE).fit(REST, Y, groups=NAMES)),
    "pipeline": make_pipeline(FunctionTransformer(halves), LINE),
    "search": search(LINE),
    "search of a pipeline": search(
        make_pipeline(FunctionTransformer(halves), LINE), "personalizedlinearregression__method"
    ),
    "search in a pipeline": make_pipeline(FunctionTransformer(halves), search(LINE)),
}


@pytest.mark.parametrize("case", HOLDING)
def test_what_the_model_inside_can_do_is_handed_on(case):
    model = column(HOLDING[case])
    scale = 2.0 if "pipeline" in case else 1.0
    direct = clone(LINE).fit(REST / scale, Y, groups=NAMES)
    pd.testing.assert_frame_equal(model.summary(), direct.summary())
    expected = direct.predict(REST / scale, groups=NAMES)
    np.testing.assert_array_equal(model.predict(FRAME), expected)
    assert model.score(FRAME, Y) == pytest.approx(r2_score(Y, expected))
    np.testing.assert_array_equal(model.clients_, np.unique(NAMES))
    np.testing.assert_array_equal(known_clients(model), np.unique(NAMES))
    assert model.privacy_.epsilon == math.inf
    assert model.feature_names_in_.tolist() == ["a", "site", "b"]
    own = NAMES == "site 2"
    alone = pickle.loads(pickle.dumps(model.for_client("site 2")))
    assert innermost_estimator(alone).clients_.tolist() == ["site 2"]
    np.testing.assert_array_equal(alone.predict(REST[own]), expected[own])
    with pytest.raises(ValueError, match=r"epsilon is infinite|chose by scores"):
        model.release()


@pytest.mark.parametrize("case", HOLDING)
def test_before_fit(case):
    model = ClientColumn(HOLDING[case], "site")
    for call in (model.summary, model.release, lambda: model.for_client("site 1")):
        with pytest.raises(NotFittedError):
            call()
    for name in ("privacy_", "clients_", "classes_"):
        with pytest.raises(NotFittedError, match="ClientColumn"):
            getattr(model, name)
        assert not hasattr(model, name)


def test_what_is_given_to_a_client_holds_no_other_client():
    model = column(make_pipeline(FunctionTransformer(halves), search(GaussianMean())))
    alone = model.for_client("site 1")
    assert type(alone) is Pipeline
    assert alone[-1].clients_.tolist() == ["site 1"]
    others = np.delete(model.estimator_[-1].best_estimator_.means_, 1)
    raw = pickle.dumps(alone)
    assert b"site 2" not in raw
    assert not any(value.tobytes() in raw for value in others)


def test_a_released_pipeline_applies_its_stateless_steps():
    bounds = {"epsilon": 1.0, "feature_bound": 4.0, "target_bound": 30.0, "random_state": 0}
    private = clone(LINE).set_params(prior__covariance=4.0, **bounds)
    with pytest.warns(PrivacyWarning):
        model = column(make_pipeline(FunctionTransformer(halves), "passthrough", private))
    released, fitted = model.release(), model.estimator_[-1]
    assert type(released[0]) is FunctionTransformer
    assert released[0] is not model.estimator_[0]
    assert not hasattr(released, "clients_")
    assert b"site" not in pickle.dumps(released)
    assert released[-1].privacy_.epsilon == privacy_of(released).epsilon == 1.0
    expected = FEATURES / 2 @ fitted.population_coef_ + fitted.population_intercept_
    np.testing.assert_allclose(released.predict(REST), expected)
    assert released[-1].random_state is None


def test_fitted_steps_are_not_released():
    model = column(make_pipeline(StandardScaler(), GaussianMean(**PRIVATE)))
    with pytest.raises(ValueError, match=r"release.*'standardscaler' \(StandardScaler\)"):
        model.release()
    with pytest.warns(PrivacyWarning):
        chosen = column(GridSearchCV(GaussianMean(**PRIVATE), {"clip_norm": [30.0]}, **INSIDE))
    with pytest.raises(ValueError, match=r"release.*GridSearchCV chose by scores"):
        chosen.release()


def test_a_private_selection_hands_out_pipelines():
    X = np.abs(FEATURES)
    select = PrivateSelectCV(
        make_pipeline(FunctionTransformer(np.log1p), GaussianMean(noise_variance=1.0)),
        {"gaussianmean__clip_norm": [30.0]},
        epsilon=1.0,
        holdout=(X, Y),
    )
    with config_context(enable_metadata_routing=True):
        select.fit(X, Y, groups=NAMES)
    released, alone = select.release(), select.for_client("site 3")
    fitted = select.best_estimator_[-1]
    np.testing.assert_array_equal(released.predict(X), np.full(N_ROWS, fitted.population_mean_))
    np.testing.assert_array_equal(alone.predict(X), np.full(N_ROWS, fitted.means_[3]))


def test_output_of_the_steps_inside():
    pipeline = make_pipeline(StandardScaler(), LINE)
    model = ClientColumn(pipeline, "site").set_output(transform="pandas")
    assert model.fit(FRAME, Y) is model
    assert model.estimator_[-1].feature_names_in_.tolist() == ["a", "b"]
    assert ("fixed", "a") in model.summary().index
    assert model.set_output(transform="default").estimator_[:-1].transform(REST).shape == (120, 2)
    assert isinstance(model.estimator_[:-1].transform(REST), np.ndarray)
    assert not hasattr(ClientColumn(GaussianMean(), "site"), "set_output")


SWAP = ColumnTransformer([("second", "passthrough", [1]), ("first", "passthrough", [0])])
REGRESSION = clone(LINE).set_params(random="intercept")
SWAPPED = ["second__b", "first__a"]
SEARCHED = GridSearchCV(REGRESSION, {}, **INSIDE)
SQUARES = PolynomialFeatures(2, include_bias=False)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("steps", "names"),
    [
        ([StandardScaler(), make_pipeline(SWAP, REGRESSION)], SWAPPED),
        ([StandardScaler(), GridSearchCV(make_pipeline(SWAP, REGRESSION), {}, **INSIDE)], SWAPPED),
        ([StandardScaler(), make_pipeline(StandardScaler(), SWAP, SEARCHED)], SWAPPED),
        ([SWAP, make_pipeline(StandardScaler(), make_pipeline(REGRESSION))], SWAPPED),
        ([StandardScaler(), make_pipeline(PCA(2), REGRESSION)], ["pca0", "pca1"]),
        ([StandardScaler(), make_pipeline(SQUARES, REGRESSION)], ["a", "b", "a^2", "a b", "b^2"]),
        ([FunctionTransformer(np.asarray), make_pipeline(PCA(1), REGRESSION)], ["pca0"]),
        ([make_pipeline(FunctionTransformer(np.asarray)), REGRESSION], ["x0", "x1"]),
        ([SWAP, make_pipeline(FunctionTransformer(np.negative), SEARCHED)], ["x0", "x1"]),
    ],
)
def test_names_of_features_pass_nested_steps(steps, names):
    """Every step sees the names that those before it made, at any depth."""
    model = ClientColumn(make_pipeline(*steps), "site").fit(FRAME, Y)
    fixed = model.summary()["estimate"].loc["fixed"]
    assert fixed.index.tolist() == ["intercept", *names]
    np.testing.assert_array_equal(fixed[1:], innermost_estimator(model).population_coef_)
    display = CoefficientDisplay.from_estimator(model, feature=names[-1])
    assert display.ax_.get_xlabel() == f"coefficient of {names[-1]}"


@pytest.mark.parametrize("wrapped", [REGRESSION, RFE(REGRESSION)], ids=["alone", "selected"])
def test_columns_that_a_wrapper_drops_lend_no_names(wrapped):
    """ClientColumn takes the ids out, RFE the weakest feature."""
    table = REST.assign(site=CODES)[["a", "site", "b"]]
    model = make_pipeline(StandardScaler(), ClientColumn(wrapped, 1)).fit(table, Y)
    assert feature_names_of(model) is None
    display = CoefficientDisplay.from_estimator(model, feature="x0")
    assert display.ax_.get_xlabel() == "coefficient of x0"


def mean_of_logs():
    """A model of the logarithms, and its predictions on the scale of the responses."""
    direct = GaussianMean().fit(FEATURES, np.log(Y), groups=NAMES)
    return direct, np.exp(direct.predict(FEATURES, groups=NAMES))


def test_targets_transformed_inside():
    model = column(TransformedTargetRegressor(GaussianMean(), func=np.log, inverse_func=np.exp))
    direct, expected = mean_of_logs()
    np.testing.assert_array_equal(model.predict(FRAME), expected)
    weight = rng.uniform(size=N_ROWS)
    assert model.score(FRAME, Y) == r2_score(Y, expected)
    assert model.score(FRAME, Y, sample_weight=weight) == r2_score(
        Y, expected, sample_weight=weight
    )
    np.testing.assert_array_equal(model.clients_, direct.clients_)
    table = client_scores(model, FRAME, Y, client_column="site", scoring="neg_mean_absolute_error")
    for name, row in table.iterrows():
        own = Y[name == NAMES]
        assert row["score"] == pytest.approx(-np.abs(own - expected[name == NAMES][0]).mean())
        population = np.exp(direct.population_mean_)
        assert row["population_score"] == pytest.approx(-np.abs(own - population).mean())
    assert "TransformedTargetRegressor" in model.privacy_.warnings[0]
    assert not hasattr(model, "release")


@pytest.mark.parametrize("inside", [False, True])
def test_transformed_targets_in_pipelines(inside):
    regressor = make_pipeline(StandardScaler(), GaussianMean()) if inside else GaussianMean()
    transformed = TransformedTargetRegressor(regressor, func=np.log, inverse_func=np.exp)
    model = column(transformed if inside else make_pipeline(StandardScaler(), transformed))
    _, expected = mean_of_logs()
    np.testing.assert_array_equal(model.predict(FRAME), expected)
    assert model.score(FRAME, Y) == r2_score(Y, expected)


def test_bagging_inside():
    model = column(BaggingRegressor(LINE, 3, random_state=0))
    predicted = []
    for rows in model.estimator_.estimators_samples_:
        one = clone(LINE).fit(FEATURES[rows], Y[rows], groups=NAMES[rows])
        predicted.append(one.predict(FEATURES, groups=NAMES))
    np.testing.assert_allclose(model.predict(FRAME), np.mean(predicted, axis=0))
    assert model.score(FRAME, Y) == pytest.approx(r2_score(Y, np.mean(predicted, axis=0)))
    assert not hasattr(model, "clients_")
    assert not hasattr(model, "for_client")
    assert "BaggingRegressor" in model.privacy_.warnings[0]
    with pytest.raises(ValueError, match=r"linear model.*got BaggingRegressor"):
        CoefficientDisplay.from_estimator(model)


@pytest.mark.parametrize(
    "ensemble",
    [
        ClientColumn(BaggingRegressor(GaussianMean(), 2, random_state=0), 2),
        VotingRegressor([("a", ClientColumn(GaussianMean(), 2))]),
    ],
    ids=["bagging", "voting"],
)
def test_ensembles_know_no_clients_but_have_scores(ensemble):
    model = ensemble.fit(NUMBERS, Y)
    with pytest.raises(ValueError, match=r"^(Bagging|Voting)Regressor knows.*ClientScorer") as got:
        client_scores(model, NUMBERS, Y, scoring="r2", client_column=2)
    assert "average=None" in str(got.value)
    by_client = ClientScorer("r2", average=None, client_column=2)(model, NUMBERS, Y)
    own = CODES == 3
    assert by_client["3.0"] == r2_score(Y[own], model.predict(NUMBERS[own]))


def test_bagged_classifiers_inside():
    model = column(BaggingClassifier(BernoulliMean(), 4, random_state=0), y=LABELS)
    probability = []
    for rows in model.estimator_.estimators_samples_:
        one = BernoulliMean().fit(FEATURES[rows], LABELS[rows], groups=NAMES[rows])
        probability.append(one.predict_proba(FEATURES, groups=NAMES))
    expected = np.mean(probability, axis=0)
    np.testing.assert_allclose(model.predict_proba(FRAME), expected)
    np.testing.assert_array_equal(model.predict(FRAME), expected.argmax(axis=1))
    assert model.score(FRAME, LABELS) == accuracy_score(LABELS, expected.argmax(axis=1))


def test_features_selected_inside():
    """A selection is fitted with ids and transforms without them."""
    model = column(SelectFromModel(GaussianMeanWithCoef()))
    assert model.transform(FRAME).shape == (N_ROWS, 1)


class GaussianMeanWithCoef(PersonalizedLinearRegression):
    """Importances of the features by the population's slopes."""

    @property
    def feature_importances_(self):
        return np.abs(self.population_coef_)


MEAN, SHARE = GaussianMean(), BernoulliMean()
# scikit-learn's meta-estimators that hand no ids to predict, by what they are around.
CLOSED = {
    "voting": (lambda each: VotingRegressor([("a", each), ("b", each)]), MEAN, Y),
    "voting classes": (lambda each: VotingClassifier([("a", each)], voting="soft"), SHARE, LABELS),
    "outputs": (MultiOutputRegressor, MEAN, TWO),
    "output classes": (MultiOutputClassifier, SHARE, TWO_LABELS),
    "chain": (RegressorChain, MEAN, TWO),
    "chain of classes": (ClassifierChain, SHARE, TWO_LABELS),
    "stacking": (lambda each: StackingRegressor([("a", each)], LinearRegression(), cv=3), MEAN, Y),
    "stacking, default end": (lambda each: StackingRegressor([("a", each)], cv=3), MEAN, Y),
    "stacked classes": (
        lambda each: StackingClassifier([("a", each)], LogisticRegression(), cv=3),
        SHARE,
        LABELS,
    ),
    "calibration": (lambda each: CalibratedClassifierCV(each, cv=3), SHARE, LABELS),
    "threshold": (lambda each: FixedThresholdClassifier(each, threshold=0.3), SHARE, LABELS),
    "outliers": (lambda each: RANSACRegressor(each, min_samples=110, max_trials=3), MEAN, Y),
    "boosting": (lambda each: AdaBoostRegressor(each, n_estimators=2), MEAN, Y),
}


@pytest.mark.parametrize("around", ["alone", "pipeline", "search"])
@pytest.mark.parametrize("case", CLOSED)
def test_others_are_refused_at_fit(case, around):
    make, inner, y = CLOSED[case]
    meta = make(inner)
    name = type(meta).__name__
    if around == "pipeline":
        meta = make_pipeline(StandardScaler(), meta)
    elif around == "search":
        meta = GridSearchCV(meta, {}, **INSIDE)
    model = ClientColumn(meta, "site")
    says = rf"^{name}\.(fit|predict) .*inside {name}.*ClientColumn\(\.\.\., 'site'\)"
    with pytest.raises(ValueError, match=says):
        model.fit(FRAME, y)
    with pytest.raises(NotFittedError):
        check_is_fitted(model)


@pytest.mark.parametrize("case", CLOSED)
def test_they_work_around_the_column(case):
    make, inner, y = CLOSED[case]
    predicted = make(ClientColumn(inner, 2)).fit(NUMBERS, y).predict(NUMBERS)
    assert len(predicted) == N_ROWS
    for k in range(N_CLIENTS):  # the means of a client are the same in all its rows
        assert len(np.unique(predicted[k == CODES], axis=0)) == 1
    assert len(np.unique(predicted, axis=0)) == (2 if y is LABELS or y is TWO_LABELS else 6)


@pytest.mark.parametrize(
    "estimator",
    [
        Ridge(),
        make_pipeline(StandardScaler(), Ridge()),
        GridSearchCV(Ridge(), {"alpha": [1.0]}, **INSIDE),
        TransformedTargetRegressor(),
        AdaBoostRegressor(),
    ],
    ids=lambda each: type(each).__name__,
)
def test_nothing_inside_reads_ids(estimator):
    with pytest.raises(ValueError, match=r"Nothing inside.*client ids.*drop.*'site'"):
        ClientColumn(estimator, "site").fit(FRAME, Y)


def test_a_frozen_model_at_the_end_of_a_pipeline_is_refused():
    frozen = FrozenEstimator(GaussianMean().fit(REST, Y, groups=NAMES))
    with pytest.raises(ValueError, match=r"^Pipeline\.fit .*inside Pipeline"):
        ClientColumn(make_pipeline(StandardScaler(), frozen), "site").fit(FRAME, Y)


@pytest.mark.parametrize("scoring", ["r2", None])
def test_searches_that_score_without_ids_are_refused(scoring):
    """All their scores would be NaN, and the first candidate the best."""
    inner = TransformedTargetRegressor(GaussianMean()) if scoring is None else GaussianMean()
    unaware = GridSearchCV(inner, {}, cv=ClientKFold(3), scoring=scoring)
    for estimator in (unaware, make_pipeline(StandardScaler(), unaware)):
        with pytest.raises(ValueError, match=r"GridSearchCV.*ClientScorer.*ClientColumn"):
            ClientColumn(estimator, "site").fit(FRAME, Y)


@pytest.mark.parametrize(
    "inside",
    [
        ClientColumn(GaussianMean(), "site"),
        GridSearchCV(
            GaussianMean(), {}, cv=ClientKFold(3, client_column="site"), scoring=ClientScorer("r2")
        ),
    ],
    ids=["column", "splitter"],
)
def test_a_column_that_is_taken_out_twice(inside):
    with pytest.raises(ValueError, match=r"'site' is not.*\['a', 'b'\].*ClientColumn.*groups"):
        column(inside)


def test_a_selection_of_features_that_scores_without_ids_is_refused():
    with pytest.raises(ValueError, match=r"RFECV.*scoring=None.*ClientScorer\.$"):
        column(RFECV(LINE, cv=INSIDE["cv"]))
    column(RFECV(LINE, **INSIDE))
    column(make_pipeline(RFECV(Ridge(), cv=2), LINE))


def test_searches_of_other_models_need_no_ids():
    search_of_slopes = GridSearchCV(Ridge(), {"alpha": [1.0]}, scoring="r2")
    chosen = SelectFromModel(
        search_of_slopes,
        importance_getter="best_estimator_.coef_",
        max_features=1,
        threshold=-np.inf,
    )
    model = column(make_pipeline(chosen, LINE))
    first = clone(LINE).fit(FEATURES[:, :1], Y, groups=NAMES)
    np.testing.assert_array_equal(
        model.predict(FRAME), first.predict(FEATURES[:, :1], groups=NAMES)
    )


OF_PRIOR = PersonalizedLinearRegression(prior=GaussianPrior())
SCALED = make_pipeline(StandardScaler(), OF_PRIOR)
STEP = "personalizedlinearregression"


@pytest.mark.parametrize(
    ("model", "name", "meant"),
    [
        (ClientColumn(OF_PRIOR, "site"), "random", "'estimator__random'"),
        (ClientColumn(OF_PRIOR, "site"), "covariance_type", "'estimator__prior__covariance_type'"),
        (ClientColumn(SCALED, "site"), "random", f"'estimator__{STEP}__random'"),
        (ClientColumn(SCALED, "site"), "estimator__random", f"'estimator__{STEP}__random'"),
        (ClientColumn(ClientAsFeature(Ridge()), 0), "estimator__alpha", "'estimator__estimator__"),
        (ClientAsFeature(Ridge()), "alpha", "'estimator__alpha'"),
        (ClientSelector([("a", Ridge()), ("b", OF_PRIOR)]), "alpha", "'a__alpha'"),
        (ClientSelector([("a", Ridge()), ("b", Ridge())]), "alpha", "'a__alpha' or 'b__alpha'"),
        (
            PersonalizedStackingRegressor(final_estimator=OF_PRIOR),
            "random",
            "'final_estimator__random'",
        ),
        (PrivateSelectCV(GaussianMean(), {}), "clip_norm", "'estimator__clip_norm'"),
        (OF_PRIOR, "covariance_type", "'prior__covariance_type'"),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "fit") else None,
)
def test_a_parameter_inside_without_its_prefix(model, name, meant):
    with pytest.raises(ValueError, match=rf"Did you mean {meant}") as caught:
        clone(model).set_params(**{name: 1})
    said = str(caught.value)
    assert said.startswith(f"Invalid parameter '{name.rpartition('__')[2]}' for estimator ")
    assert said.count("Did you mean") == 1
    with pytest.raises(ValueError, match=r"Valid parameters are: [^?]*$"):
        clone(model).set_params(nowhere=1)


def test_a_grid_without_the_prefix():
    table = pd.DataFrame({"a": FEATURES[:, 0], "site": NAMES})
    search = GridSearchCV(ClientColumn(GaussianMean(), "site"), {"noise_variance": [1.0]})
    with pytest.raises(ValueError, match="Did you mean 'estimator__noise_variance'"):
        search.fit(table, Y)
