"""What PrivacyAccuracyDisplay draws, against the scores of the search that it was given."""

import math
import warnings

import matplotlib.pyplot as plt
import numpy as np
import pytest
from sklearn import config_context
from sklearn.base import clone
from sklearn.ensemble import BaggingRegressor
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler

from pfl_sklearn.compose import ClientColumn
from pfl_sklearn.estimation import GaussianMean
from pfl_sklearn.inspection import PrivacyAccuracyDisplay
from pfl_sklearn.linear_model import PPSGDRegressor
from pfl_sklearn.metrics import ClientScorer
from pfl_sklearn.model_selection import ClientKFold
from pfl_sklearn.privacy import SampledGaussian, events_epsilon, gdp_epsilon, gdp_mu
from tests.helpers.figures import legend_of

pytestmark = pytest.mark.filterwarnings("ignore::pfl_sklearn.privacy.PrivacyWarning")
PPSGD = PPSGDRegressor(n_rounds=3, learning_rate=0.1, clip_norm=1.0, random_state=0)
PROMISE = {"unit": "client", "relation": "zero_out", "delta": 1e-5}


def table(n_clients=40, n=6, seed=0):
    rng = np.random.default_rng(seed)
    who = np.repeat(np.arange(n_clients), n)
    X = rng.normal(size=(len(who), 2))
    return X, X @ [1.0, -1.0] + 0.3 * rng.normal(size=len(who)), who


def searched(estimator, grid, **options):
    X, y, who = table()
    search = GridSearchCV(
        estimator,
        grid,
        cv=ClientKFold(3, random_state=0),
        scoring=ClientScorer("neg_mean_squared_error"),
        **options,
    )
    with config_context(enable_metadata_routing=True):
        return search.fit(X, y, groups=who)


@pytest.fixture(scope="module")
def by_alpha():
    return searched(PPSGD, {"alpha": [0.1, math.inf], "epsilon": [10.0, 1.0, math.inf]})


def scores_of(search, **params):
    """Mean score and its deviation of one candidate."""
    found = search.cv_results_
    k = found["params"].index(params)
    return found["mean_test_score"][k], found["std_test_score"][k]


def test_lines_and_scores(by_alpha):
    display = PrivacyAccuracyDisplay.from_search(by_alpha)
    assert [curve.label for curve in display.curves] == ["alpha = 0.1", "alpha = inf"]
    for curve, alpha in zip(display.curves, (0.1, math.inf), strict=True):
        np.testing.assert_array_equal(curve.epsilon, [1.0, 10.0, math.inf])
        expected = [scores_of(by_alpha, alpha=alpha, epsilon=e) for e in curve.epsilon]
        np.testing.assert_array_equal(np.c_[curve.score, curve.spread], expected)
    for line, curve in zip(display.lines_, display.curves, strict=True):
        np.testing.assert_array_equal(line.get_xdata(), [1.0, 10.0])
        np.testing.assert_array_equal(line.get_ydata(), curve.score[:2])


def test_axis_names_the_promise_and_infinity_is_last(by_alpha):
    ax = PrivacyAccuracyDisplay.from_search(by_alpha).ax_
    assert "contribution of one client left out; delta = 1e-05" in ax.get_xlabel()
    assert [label.get_text() for label in ax.get_xticklabels()] == ["1", "10", "no\nprivacy"]
    assert ax.get_xticks()[-1] == pytest.approx(100.0)
    dashed = [line for line in ax.lines if line.get_linestyle() == "--"]
    assert [line.get_xdata().tolist() for line in dashed] == [[10.0, pytest.approx(100.0)]] * 2


def test_bands_are_one_deviation(by_alpha):
    display = PrivacyAccuracyDisplay.from_search(by_alpha)
    band = display.ax_.collections[0].get_paths()[0].vertices[:, 1]
    curve = display.curves[0]
    assert band.max() == pytest.approx((curve.score + curve.spread)[:2].max())
    assert band.min() == pytest.approx((curve.score - curve.spread)[:2].min())
    assert not PrivacyAccuracyDisplay.from_search(by_alpha, spread=False).ax_.collections


def test_errors_instead_of_scores(by_alpha):
    plain = PrivacyAccuracyDisplay.from_search(by_alpha)
    negated = PrivacyAccuracyDisplay.from_search(by_alpha, negate_score=True, score_name="error")
    for one, other in zip(plain.curves, negated.curves, strict=True):
        np.testing.assert_array_equal(other.score, -one.score)
        np.testing.assert_array_equal(other.spread, one.spread)
    assert negated.ax_.get_ylabel() == "error"


@pytest.mark.slow
def test_best_of_the_other_parameters():
    grid = {"epsilon": [1.0, 10.0], "alpha": [0.1, 1.0], "learning_rate": [0.01, 0.1, 0.3]}
    search = searched(PPSGD, grid, refit=False)
    one = PrivacyAccuracyDisplay.from_search(search)
    assert [curve.label for curve in one.curves] == [None]
    assert one.ax_.get_legend() is None
    two = PrivacyAccuracyDisplay.from_search(search, line="alpha")
    found = search.cv_results_
    for k, alpha in enumerate((0.1, 1.0)):
        for j, epsilon in enumerate((1.0, 10.0)):
            rows = [p["alpha"] == alpha and p["epsilon"] == epsilon for p in found["params"]]
            assert two.curves[k].score[j] == found["mean_test_score"][rows].max()
    both = np.max([curve.score for curve in two.curves], axis=0)
    np.testing.assert_array_equal(one.curves[0].score, both)
    for line in ("gamma", "epsilon"):
        with pytest.raises(ValueError, match=r"\bline\b.*\['alpha', 'learning_rate'\]"):
            PrivacyAccuracyDisplay.from_search(search, line=line)


def test_epsilon_follows_from_the_noise():
    search = searched(PPSGD, {"noise_multiplier": [2.0, 5.0, 0.0]}, refit=False)
    (curve,) = PrivacyAccuracyDisplay.from_search(search).curves
    expected = [events_epsilon([SampledGaussian(z, 3)], 1e-5, "zero_out") for z in (5.0, 2.0)]
    np.testing.assert_allclose(curve.epsilon, [*expected, math.inf])
    assert curve.score[0] == scores_of(search, noise_multiplier=5.0)[0]


def test_local_learning_is_drawn_across():
    search = searched(
        clone(PPSGD).set_params(noise_multiplier=2.0), {"alpha": [0.0, 1.0]}, refit=False
    )
    display = PrivacyAccuracyDisplay.from_search(search)
    assert [curve.epsilon[0] == 0 for curve in display.curves] == [True, False]
    across = [line for line in display.ax_.lines if line.get_linestyle() == ":"]
    assert across[0].get_ydata()[0] == scores_of(search, alpha=0.0)[0]
    assert legend_of(display.ax_.get_legend()) == ["alpha = 0", "alpha = 1"]


def test_pipelines_and_wrappers():
    X, y, who = table()
    steps = make_pipeline(FunctionTransformer(), GaussianMean(noise_variance=1.0, clip_norm=1.0))
    grid = {
        "estimator__gaussianmean__epsilon": [1.0, 4.0],
        "estimator__gaussianmean__clip_norm": [1.0, 2.0],
    }
    model, folds = ClientColumn(steps, 0), ClientKFold(2, client_column=0, random_state=0)
    search = GridSearchCV(model, grid, scoring="r2", cv=folds).fit(np.column_stack([who, X]), y)
    display = PrivacyAccuracyDisplay.from_search(search, line="clip_norm")
    assert [curve.label for curve in display.curves] == ["clip_norm = 1", "clip_norm = 2"]
    assert "one client replaced" in display.ax_.get_xlabel()


@pytest.mark.parametrize("around", ["scaler", "bagging", "search"])
def test_what_has_no_privacy_is_drawn_without(around):
    """Whatever epsilon was asked for; and several fits are not one of that epsilon."""
    X, y, who = table()
    mean, folds = GaussianMean(noise_variance=1.0, clip_norm=1.0), {"cv": 2, "scoring": "r2"}
    model, name = {
        "scaler": (ClientColumn(make_pipeline(StandardScaler(), mean), 0), "gaussianmean"),
        "bagging": (BaggingRegressor(ClientColumn(mean, 0), n_estimators=2), "estimator"),
        "search": (GridSearchCV(ClientColumn(mean, 0), {}, **folds), "estimator"),
    }[around]
    grid = {f"estimator__{name}__epsilon": [1.0, 4.0]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        search = GridSearchCV(model, grid, **folds).fit(np.column_stack([who, X]), y)
    display = PrivacyAccuracyDisplay.from_search(search)
    (curve,) = display.curves
    if around == "search":
        three = [gdp_epsilon(gdp_mu(one, 1e-5) * math.sqrt(3), 1e-5) for one in (1.0, 4.0)]
        np.testing.assert_allclose(curve.epsilon, three)
    else:
        np.testing.assert_array_equal(curve.epsilon, [math.inf])
        assert display.promise is None


def test_candidates_that_do_not_compare():
    search = searched(PPSGD, {"epsilon": [1.0], "delta": [1e-5, 1e-6]}, refit=False)
    with pytest.raises(ValueError, match=r"unit.*relation.*delta.*1e-06.*1e-05"):
        PrivacyAccuracyDisplay.from_search(search)


def test_what_is_no_search(by_alpha):
    X, y, _ = table()
    with pytest.raises(NotFittedError):
        PrivacyAccuracyDisplay.from_search(GridSearchCV(PPSGD, {"alpha": [1.0]}))
    with pytest.raises(ValueError, match=r"search.*mean_test_score.*Ridge"):
        PrivacyAccuracyDisplay.from_search(Ridge().fit(X, y))
    with pytest.raises(ValueError, match="mean_test_accuracy"):
        PrivacyAccuracyDisplay.from_search(by_alpha, metric="accuracy")


def test_scores_of_ones_own():
    epsilon, score = [math.inf, 1.0, 0.0, 2.0], [0.9, 0.6, 0.5, 0.7]
    _, ax = plt.subplots()
    display = PrivacyAccuracyDisplay.from_scores(
        epsilon, score, lines=["a", "a", "b", "a"], spread=[0.1] * 4, ax=ax, **PROMISE
    )
    assert display.ax_ is ax
    a, b = display.curves
    np.testing.assert_array_equal(a.epsilon, [1.0, 2.0, math.inf])
    np.testing.assert_array_equal(a.score, [0.6, 0.7, 0.9])
    np.testing.assert_array_equal(b.score, [0.5])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": [1.0, 1.0]}, r"epsilon.*line"),
        ({"epsilon": [-1.0, 1.0]}, r"epsilon.*negative"),
        ({"epsilon": [math.nan, 1.0]}, r"epsilon.*negative"),
        ({"score": [0.5]}, r"score.*epsilon.*\(1,\)"),
        ({"lines": ["a"]}, r"lines.*\b1\b"),
        ({"spread": [[0.1, 0.1]]}, r"spread.*epsilon.*\(1, 2\)"),
        ({"relation": "swap"}, r"relation.*add_remove, replace_one, zero_out.*'swap'"),
    ],
)
def test_bad_scores(change, message):
    with pytest.raises(ValueError, match=message):
        PrivacyAccuracyDisplay.from_scores(
            **{"epsilon": [1.0, 2.0], "score": [0.5, 0.6], **PROMISE, **change}
        )


def test_scores_without_privacy_only():
    display = PrivacyAccuracyDisplay.from_scores([math.inf], [0.5], lines=["a"], **PROMISE)
    assert legend_of(display.ax_.get_legend()) == ["a"]
    assert display.ax_.get_xticklabels()[0].get_text() == "no\nprivacy"
