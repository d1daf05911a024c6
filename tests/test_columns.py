"""Columns that are no numbers: each estimator names them and says what to do."""

import datetime
import re
import warnings

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import sklearn
from numpy.testing import assert_array_equal
from scipy.sparse import csr_array
from sklearn.base import clone
from sklearn.linear_model import LinearRegression
from sklearn.pipeline import make_pipeline

from pfl_sklearn import (
    BernoulliMean,
    ClientAsFeature,
    ClientColumn,
    ClientMeans,
    ClientSelector,
    CollaborativeMean,
    GaussianMean,
    PersonalizedLinearRegression,
    PersonalizedLogisticRegression,
    PersonalizedPoissonRegression,
    PersonalizedStackingRegressor,
    PoissonMean,
    PPSGDClassifier,
    PPSGDRegressor,
    PrivacyWarning,
    TableEncoder,
)
from pfl_sklearn.inspection import ResidualsDisplay
from pfl_sklearn.statistics import ClientStatistics
from tests.helpers.torch import WITHOUT_TORCH

N = 40
GROUPS, X0 = np.repeat(list("abcd"), 10), np.random.default_rng(0).normal(size=N)
Y = np.tile([0, 1], N // 2)
DAYS = [datetime.datetime(2024, 1, 1) + datetime.timedelta(days=k) for k in range(N)]
MODELS = [
    PersonalizedLinearRegression(),
    PersonalizedLogisticRegression(random="intercept"),
    PersonalizedPoissonRegression(random="intercept"),
    PPSGDClassifier(n_rounds=2),
    PPSGDRegressor(n_rounds=2),
]
if not WITHOUT_TORCH:
    from pfl_sklearn import FedAvgRegressor, LocalNetClassifier

    MODELS += [FedAvgRegressor(n_rounds=1), LocalNetClassifier(n_rounds=1)]
FRAMES = {"pandas": pd.DataFrame, "polars": pl.DataFrame}
WORDS = np.tile(["red", "blue"], N // 2)

every_model = pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
every_frame = pytest.mark.parametrize("frame", FRAMES)


def refused(model, X, message, method="fit"):
    with pytest.raises(ValueError, match=message) as caught:
        getattr(clone(model), method)(X, Y, groups=GROUPS)
    return str(caught.value)


@every_model
@every_frame
@pytest.mark.parametrize(
    ("values", "message"),
    [
        (WORDS, "holds strings, not numbers.*TableEncoder"),
        (DAYS, "holds dates.*days since"),
        ([day.date() for day in DAYS], "holds dates.*days since"),
        ([day - DAYS[0] for day in DAYS], "holds dates.*days since"),
        (np.where(X0 > 0, X0, np.nan), "has missing values.*TableEncoder"),
        ([None] * N, "has no values.*Leave it out"),
        (np.where(X0 > 0, X0, np.inf), "has infinite values; expected finite numbers"),
        ([[1.0, 2.0]] * N, "holds lists or arrays, not numbers.*column of each"),
    ],
    ids=["words", "times", "dates", "durations", "gaps", "only gaps", "infinite", "lists"],
)
def test_the_column_is_named(model, frame, values, message):
    X = FRAMES[frame]({"x": X0, "shade": values})
    assert "\n" not in refused(model, X, f"column 'shade' of X {message}")


@every_model
def test_columns_of_pandas_alone(model):
    categories = pd.DataFrame({"x": X0, "shade": pd.Categorical(WORDS)})
    refused(model, categories, "column 'shade' of X holds strings.*TableEncoder")
    zoned = pd.DataFrame({"x": X0, "time": pd.DatetimeIndex(DAYS).tz_localize("UTC")})
    refused(model, zoned, "column 'time' of X holds dates.*days since")
    mixed = pd.DataFrame({"x": X0, "dose": [1.5, "high"] * (N // 2)})
    said = refused(model, mixed, "column 'dose' of X holds values of several types.*all strings")
    assert "TableEncoder" not in said  # which refuses them, too


@pytest.mark.parametrize(
    "model",
    [
        # Regressions take it: their intercept is left.
        *(each for each in MODELS if not hasattr(each, "random")),
        PersonalizedStackingRegressor(),
    ],
    ids=lambda model: type(model).__name__,
)
def test_a_frame_without_columns(model):
    refused(model, pd.DataFrame(index=range(N)), "X has no columns; expected at least one feature")


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (PersonalizedPoissonRegression(random="intercept"), "exposure"),
        (PersonalizedPoissonRegression(random="intercept"), "offset"),
        (PersonalizedLogisticRegression(random="intercept"), "offset"),
        (PoissonMean(), "exposure"),
    ],
)
def test_one_number_for_all_rows(model, name):
    X = pd.DataFrame({"x": X0})
    fitted = clone(model).fit(X, Y, groups=GROUPS)
    for value in (2.0, np.array(2.0)):
        message = f"{name} must hold one number per row; got the number 2.0.*np.full"
        with pytest.raises(ValueError, match=message):
            model.fit(X, Y, groups=GROUPS, **{name: value})
        with pytest.raises(ValueError, match=message):
            fitted.predict(X, groups=GROUPS, **{name: value})
    with pytest.raises(ValueError, match=rf"{name}.*'x'.*ClientColumn\(..., {name}='x'\)"):
        model.fit(X, Y, groups=GROUPS, **{name: "x"})


@pytest.mark.parametrize("values", [WORDS, np.full(N, np.inf), [[1.0, 2.0]] * N])
def test_statistics_name_columns_too(values):
    X = pd.DataFrame({"x": X0, "shade": values})
    with pytest.raises(ValueError, match=r"^column 'shade' of X"):
        ClientStatistics.from_rows(X, Y, groups=GROUPS)


def test_one_exposure_for_the_residuals_of_all_rows():
    X = pd.DataFrame({"x": X0})
    model = PersonalizedPoissonRegression(random="intercept").fit(X, Y, groups=GROUPS)
    with pytest.raises(ValueError, match="exposure must hold one number per row"):
        ResidualsDisplay.from_estimator(model, X, Y, groups=GROUPS, exposure=2.0)


def test_one_number_of_trials_for_all_clients():
    with pytest.raises(ValueError, match="trials must hold one number per row; got the number 5"):
        BernoulliMean().fit_counts([1, 2, 3], 5)


@every_model
def test_a_wrong_call_names_the_class(model):
    name = type(model).__name__
    with pytest.raises(TypeError, match=rf"^{name}\.fit\(\): too many pos.*give groups=.* by name"):
        clone(model).fit(X0[:, None], Y, GROUPS)
    with pytest.raises(TypeError, match=rf"^{name}\.fit\(\): missing.*'y'\.$"):
        clone(model).fit(X0[:, None])


@pytest.mark.parametrize(
    "model",
    [*MODELS, PersonalizedStackingRegressor(), GaussianMean(), BernoulliMean()],
    ids=lambda model: type(model).__name__,
)
def test_no_wrong_call_names_a_base(model):
    X = X0[:, None]
    for method, given in {"fit": (X, Y), "predict": (X,), "score": (X, Y)}.items():
        with pytest.raises(TypeError, match=rf"^{type(model).__name__}\.{method}\(\).*positional"):
            getattr(clone(model), method)(*given, GROUPS)


@pytest.mark.parametrize(
    "model",
    [
        *MODELS,
        ClientSelector([("own", PersonalizedLinearRegression())]),
        ClientAsFeature(PersonalizedLinearRegression()),
        PersonalizedStackingRegressor(),
    ],
    ids=lambda model: type(model).__name__,
)
def test_two_columns_of_one_name(model):
    X = pd.DataFrame(np.c_[X0, X0**2], columns=["x", "x"])
    refused(model, X, "2 columns of X are called 'x'; rename them")


@every_model
def test_columns_of_arrays_have_positions(model):
    X = np.c_[X0.astype(object), WORDS]
    refused(model, X, "column 1 of X holds strings.*TableEncoder")


def test_arrays_of_numbers_have_the_words_of_scikit_learn():
    gaps = np.c_[X0, np.where(X0 > 0, X0, np.nan)]
    for X in (gaps, csr_array(gaps)):
        said = refused(PPSGDRegressor(n_rounds=2), X, "contains NaN")
        assert "column" not in said


@pytest.mark.slow
def test_predictions_and_later_rows_name_them_too():
    words, numbers = (pd.DataFrame({"x": X0, "shade": each}) for each in (WORDS, X0**2))
    model = PersonalizedLinearRegression()
    refused(model, words, "column 'shade' of X holds strings.*TableEncoder", "partial_fit")
    for each in MODELS:
        fitted = clone(each).fit(numbers, Y, groups=GROUPS)
        with pytest.raises(ValueError, match="column 'shade' of X holds strings"):
            fitted.predict(words, groups=GROUPS)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("frame", [pd.DataFrame, pl.DataFrame, pa.table])
@pytest.mark.parametrize(
    "model",
    [
        *MODELS,
        *(GaussianMean(), CollaborativeMean()),
        ClientAsFeature(LinearRegression()),
        ClientSelector([("line", LinearRegression())]),
        PersonalizedStackingRegressor([("line", LinearRegression())], cv=2, fallback=False),
        ClientColumn(PersonalizedLinearRegression(random="intercept"), "client"),
        make_pipeline(TableEncoder(), PersonalizedLinearRegression(random="intercept")),
        make_pipeline(ClientMeans(), LinearRegression()),
    ],
    ids=lambda model: type(model).__name__,
)
def test_columns_in_another_order(model, frame):
    columns = {"x": X0, "client": np.arange(N) // 2 % 4, "z": X0**2}
    X, turned = frame(columns), frame({name: columns[name] for name in ("z", "x", "client")})
    with sklearn.config_context(enable_metadata_routing=True):
        given = {} if isinstance(model, ClientColumn) else {"groups": GROUPS}
        model = clone(model).fit(X, Y, **given)
        with pytest.raises(ValueError, match="same order as they were in fit") as caught:
            model.predict(turned, **given)
        way_out = re.search(r"Give (X.*), whose", str(caught.value)).group(1)
        in_order = eval(way_out, {"X": turned, "model": model})
        assert_array_equal(model.predict(in_order, **given), model.predict(X, **given))


def test_other_names_have_the_words_of_scikit_learn():
    X = pd.DataFrame({"x": X0, "z": X0**2})
    model = PersonalizedLinearRegression().fit(X, Y, groups=GROUPS)
    with pytest.raises(ValueError, match=r"unseen at fit time:\n- new\n") as caught:
        model.predict(X.rename(columns={"z": "new"}), groups=GROUPS)
    assert "feature_names_in_" not in str(caught.value)


def test_what_is_wrong_with_y_is_told_of_y():
    X, words = pd.DataFrame({"x": X0, "z": X0**2}), WORDS.astype(object)
    with pytest.raises(ValueError, match="could not convert") as caught:
        PersonalizedLinearRegression().fit(X, words, groups=GROUPS)
    assert "column" not in str(caught.value)
    with pytest.raises(ValueError, match="Input y contains NaN"):
        PersonalizedLinearRegression().fit(X, np.where(Y, np.nan, 1.0), groups=GROUPS)


def test_words_are_no_matter_to_estimators_without_features():
    X = pd.DataFrame({"shade": WORDS, "when": DAYS})
    assert GaussianMean().fit(X, Y, groups=GROUPS).means_.shape == (4,)


@every_frame
def test_an_encoder_names_them_too(frame):
    X = FRAMES[frame]({"x": X0, "when": [[1, 2]] * N})
    with pytest.raises(ValueError, match="'when' of X cannot be encoded: it holds"):
        TableEncoder().fit(X)


@every_frame
@pytest.mark.parametrize("gaps", [[None] * N, [np.nan] * N])
def test_an_encoder_drops_columns_without_values(frame, gaps):
    X = FRAMES[frame]({"x": X0, "gone": gaps})
    with pytest.warns(UserWarning, match=r"'gone' \(all its values are missing\)"):
        encoder = TableEncoder().fit(X)
    assert list(encoder.get_feature_names_out()) == ["x"]


def test_a_series_is_no_table():
    with pytest.raises(ValueError, match="2-dimensional"):
        PersonalizedLinearRegression().fit(pd.Series(np.arange(9.0)), np.arange(9.0))


# Ids among the features ---------------------------------------------------------------------------

SITES = np.tile([11, 12, 15, 19], 10)
OF_SITES = pd.DataFrame({"x": X0, "site": SITES, "size": SITES**2})
SCORES = np.random.default_rng(1).normal(size=N)
IDS_FOUND = "Column 'site' of X holds the client ids as integers"
LINES = [
    PersonalizedLinearRegression(random="intercept"),
    ClientSelector([("line", LinearRegression())], random_state=0),
    ClientAsFeature(LinearRegression(), random_state=0),
    make_pipeline(TableEncoder(), PersonalizedLinearRegression(random="intercept")),
]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("model", LINES, ids=lambda model: type(model).__name__)
@pytest.mark.parametrize("frame", [pd.DataFrame, pl.DataFrame, pa.Table.from_pandas])
def test_integers_that_are_the_ids_are_named(model, frame):
    X = frame(OF_SITES) if frame is not pl.DataFrame else pl.from_pandas(OF_SITES)
    with sklearn.config_context(enable_metadata_routing=True):
        # Other numbers, such as years as floats, may describe clients.
        for others in (OF_SITES.drop(columns="site"), OF_SITES.astype(float), OF_SITES.to_numpy()):
            clone(model).fit(others, SCORES, groups=SITES)
        clone(model).fit(OF_SITES, SCORES, groups=SITES[::-1])
        clone(model).fit(OF_SITES, SCORES, groups=SITES.astype(str))
        with pytest.warns(UserWarning, match=IDS_FOUND) as caught:
            clone(model).fit(X, SCORES, groups=SITES)
    assert len(caught) == 1


def test_a_private_fit_looks_for_no_ids():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", IDS_FOUND)
        model = PersonalizedLinearRegression(
            random="intercept", epsilon=1e4, feature_bound=500.0, target_bound=4.0, random_state=0
        )
        with pytest.warns(PrivacyWarning):
            model.fit(OF_SITES, SCORES, groups=SITES)
