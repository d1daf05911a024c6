"""What ClientGainDisplay draws, against client_scores and scores by hand."""

import copy

import matplotlib.pyplot as plt
import numpy as np
import pytest
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import mean_absolute_error, roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import LinearSVC

from pfl_sklearn.compose import ClientAsFeature, ClientColumn
from pfl_sklearn.estimation import GaussianMean
from pfl_sklearn.inspection import ClientGainDisplay
from pfl_sklearn.linear_model import PersonalizedLinearRegression
from pfl_sklearn.metrics import client_scores
from pfl_sklearn.priors import GaussianPrior
from tests.helpers.figures import assert_nothing_is_cut_off
from tests.helpers.ppsgd import table
from tests.helpers.slow import slow

METRIC = "neg_mean_squared_error"
y = np.array([1.0, 2, 3, 4, 5, 6, 7])
GROUPS = np.array(list("abababc"))
OWN = np.array([1.0, 2, 3, 5, 5, 6, 7])
POPULATION = np.array([2.0, 2, 3, 4, 5, 6, 7])


LINE = PersonalizedLinearRegression(GaussianPrior(covariance=1.0), noise_variance=1.0)


@pytest.fixture(scope="module")
def model():
    X, target, groups = table()
    return clone(LINE).fit(X, target, groups=groups)


def marks(display):
    """Positions of the clients: better, worse, equal."""
    return [part.get_offsets().data for part in display.ax_.collections if len(part.get_offsets())]


def texts(display):
    """Texts of the legend, whether the figure's or the axes'."""
    legend = display.ax_.get_legend() or display.figure_.legends[0]
    return [text.get_text() for text in legend.get_texts()]


def by_hand(**options):
    given = {"groups": GROUPS, "metric": mean_absolute_error, "greater_is_better": False}
    return ClientGainDisplay.from_predictions(y, OWN, POPULATION, **{**given, **options})


def test_predictions_by_client():
    display = by_hand()
    assert list(display.clients) == ["a", "b", "c"]
    np.testing.assert_allclose(display.score, [0, 1 / 3, 0])
    np.testing.assert_allclose(display.population_score, [1 / 3, 0, 0])
    np.testing.assert_array_equal(display.n_rows, [3, 3, 1])
    better, worse, equal = marks(display)
    np.testing.assert_allclose(better, [[1 / 3, 0]])
    np.testing.assert_allclose(worse, [[0, 1 / 3]])
    np.testing.assert_allclose(equal, [[0, 0]])
    assert (display.n_better_, display.n_worse_, display.n_equal_) == (1, 1, 1)
    assert display.ax_.get_xlabel() == "mean absolute error, population model"
    assert texts(display)[0] == "own model better: 1 of 3 (33%)"


def test_scores_turn_around():
    display = by_hand(greater_is_better=True, score_name="agreement")
    np.testing.assert_allclose(marks(display)[0], [[0, 1 / 3]])  # b is better now
    assert display.ax_.get_ylabel() == "agreement, client's own model"


def test_areas_are_in_proportion_to_rows():
    display = by_hand()
    sizes = [part.get_sizes() for part in display.ax_.collections if len(part.get_offsets())]
    np.testing.assert_allclose(np.concatenate(sizes), [140.0, 140.0, 140.0 / 3])
    assert texts(display)[-3:] == ["1 row", "2 rows", "3 rows"]
    alike = by_hand(groups=np.array(list("aaabbbb")))
    assert texts(alike)[-1] == "3 to 4 rows each"


def test_the_diagonal_and_the_mean():
    ax = by_hand().ax_
    assert ax.get_xlim() == ax.get_ylim()
    line, mean = ax.lines
    np.testing.assert_array_equal(*line.get_data())
    np.testing.assert_allclose(np.ravel(mean.get_data()), [1 / 9, 1 / 9])


def test_clients_without_a_score_are_counted():
    def metric(truth, predicted):
        return np.nan if len(truth) < 3 else float(np.mean(np.abs(truth - predicted)))

    display = by_hand(metric=metric)
    assert display.n_better_ + display.n_worse_ + display.n_equal_ == 2
    assert "not drawn, without a score: 1" in texts(display)
    with pytest.raises(ValueError, match="no client"):
        by_hand(metric=lambda truth, predicted: np.nan)


def test_scores_of_an_estimator(model):
    X, target, groups = table(seed=1)
    expected = client_scores(model, X, target, groups=groups, scoring=METRIC)
    display = ClientGainDisplay.from_estimator(
        model, X, target, groups=groups, scoring=METRIC, negate_score=True
    )
    np.testing.assert_array_equal(display.clients, expected.index)
    np.testing.assert_array_equal(display.score, -expected["score"])
    np.testing.assert_array_equal(display.population_score, -expected["population_score"])
    assert display.n_better_ == int((expected["gain"] > 0).sum())
    assert display.ax_.get_xlabel() == "mean squared error, population model"
    plain = ClientGainDisplay.from_estimator(model, X, target, groups=groups, scoring=METRIC)
    assert plain.n_better_ == display.n_better_
    assert plain.ax_.get_xlabel() == "neg mean squared error, population model"


def test_the_default_scores_clients_of_one_row_and_one_class(model):
    X, target, groups = table(seed=1)
    display = ClientGainDisplay.from_estimator(model, X, target, groups=groups)
    errors = (target - model.predict(X, groups=groups)) ** 2
    np.testing.assert_allclose(display.score, [errors[groups == g].mean() for g in display.clients])
    assert display.ax_.get_xlabel() == "mean squared error, population model"
    one_each = np.unique(groups, return_index=True)[1]
    few = X[one_each], target[one_each]
    display = ClientGainDisplay.from_estimator(model, *few, groups=groups[one_each])
    np.testing.assert_allclose(display.score, errors[one_each])


@pytest.mark.parametrize(
    ("inner", "score"), [(LogisticRegression(), "log loss"), (LinearSVC(), "accuracy")]
)
def test_the_default_of_classifiers(inner, score):
    X, target, groups = table(seed=1)
    labels = np.where(target > 0, "high", "low")
    labels[groups == 0] = "low"
    model = ClientAsFeature(inner).fit(X, labels, groups=groups)
    display = ClientGainDisplay.from_estimator(model, X, labels, groups=groups)
    right = model.predict_proba if score == "log loss" else model.predict
    own = right(X, groups=groups)[groups == 0]
    expected = -np.log(own[:, 1]) if score == "log loss" else own == "low"
    assert display.score[0] == pytest.approx(expected.mean())
    assert display.ax_.get_ylabel() == f"{score}, client's own model"
    assert display.greater_is_better == (score == "accuracy")


def test_new_clients_are_left_out(model):
    X, target, groups = table(seed=1)
    shifted = groups + 3  # 8, 9 and 10 are new
    model = copy.copy(model).set_params(unseen="population")
    display = ClientGainDisplay.from_estimator(model, X, target, groups=shifted, scoring=METRIC)
    np.testing.assert_array_equal(display.clients, [3, 4, 5, 6, 7])


def test_pipeline_inside_a_wrapper():
    X, target, groups = table()
    Z = np.column_stack([groups, X])
    model = ClientColumn(make_pipeline(StandardScaler(), LINE), 0)
    display = ClientGainDisplay.from_estimator(
        model.fit(Z, target), Z, target, scoring="r2", client_column=0
    )
    expected = client_scores(model, Z, target, scoring="r2", client_column=0)
    np.testing.assert_array_equal(display.score, expected["score"])


def test_probabilities_and_a_metric_of_them():
    rng = np.random.default_rng(0)
    groups, truth = np.repeat([0, 1], 50), rng.integers(0, 2, 100)
    own, population = rng.uniform(size=(2, 100))
    display = ClientGainDisplay.from_predictions(
        truth, own, population, groups=groups, metric=roc_auc_score
    )
    expected = [roc_auc_score(truth[groups == g], own[groups == g]) for g in (0, 1)]
    np.testing.assert_array_equal(display.score, expected)


@pytest.mark.parametrize(("low", "scale"), [(0.01, "log"), (0.9, "linear"), (-1.0, "linear")])
def test_logarithmic_only_for_wide_positive_scores(low, scale):
    scores = np.linspace(low, 1.0, 50) if low < 0 else np.geomspace(low, 1.0, 50)
    display = ClientGainDisplay(
        clients=np.arange(50), score=scores, population_score=scores[::-1], n_rows=np.full(50, 4)
    ).plot()
    assert (display.ax_.get_xscale(), display.ax_.get_yscale()) == (scale, scale)
    assert texts(display)[-1] == "4 rows each"


@pytest.mark.parametrize("unit", [1e6, *slow([1e-6, 1.0])])
def test_nothing_is_cut_off(unit):
    scores = unit * np.random.default_rng(0).uniform(0.2, 1, size=(2, 200))
    display = ClientGainDisplay(
        clients=np.arange(200),
        score=scores[0],
        population_score=scores[1],
        n_rows=np.arange(200) + 1,
        score_name="root mean squared error",
    ).plot()
    assert_nothing_is_cut_off(display.figure_)
    assert display.figure_.legends[0].get_window_extent().x0 >= display.ax_.get_window_extent().x1


def test_given_axes():
    _, ax = plt.subplots()
    display = by_hand(ax=ax)
    assert display.ax_ is ax
    assert not display.figure_.legends


def test_bad_input():
    with pytest.raises(ValueError, match="inconsistent"):
        ClientGainDisplay.from_predictions(
            y, OWN[:3], POPULATION, groups=GROUPS, metric=mean_absolute_error
        )
    with pytest.raises(ValueError, match="groups"):
        by_hand(groups=GROUPS[:3])
    X, target, groups = table()
    mean = GaussianMean().fit(X, target, groups=groups)
    with pytest.raises(ValueError, match="groups"):
        ClientGainDisplay.from_estimator(mean, X, target, scoring=METRIC)


def test_displays_store_their_parameters():
    values = np.arange(3.0)
    display = ClientGainDisplay(
        clients=values, score=values, population_score=values, n_rows=values, score_name="error"
    )
    assert display.score is values and display.greater_is_better
    assert display.score_name == "error"
    assert not hasattr(ClientGainDisplay, "score_name")  # it would look like a public attribute
    assert display == display and hash(display) == hash(display)
    twin = ClientGainDisplay(clients=values, score=values, population_score=values, n_rows=values)
    assert display != twin  # not a comparison of arrays, which has no single truth value
    with pytest.raises(TypeError, match="positional"):
        ClientGainDisplay(values, values, values, values)
