"""What ConvergenceDisplay draws, against the history of the fit, its monitor and its report."""

import copy
import itertools
import math

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from sklearn.callback import ScoringMonitor
from sklearn.exceptions import NotFittedError
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler

from pfl_sklearn.compose import ClientColumn
from pfl_sklearn.estimation import GaussianMean
from pfl_sklearn.inspection import ConvergenceDisplay
from pfl_sklearn.inspection._convergence import running_mean
from pfl_sklearn.linear_model import PPSGDRegressor
from pfl_sklearn.metrics import ClientScorer
from pfl_sklearn.privacy import SampledGaussian, events_epsilon
from tests.helpers.callbacks import StopAfter, scores_of
from tests.helpers.figures import assert_nothing_is_cut_off, legend_of
from tests.helpers.ppsgd import table

pytestmark = pytest.mark.filterwarnings("ignore::pfl_sklearn.privacy.PrivacyWarning")
SETTINGS = {"n_rounds": 60, "learning_rate": 0.05, "random_state": 0}
PRIVATE = {**SETTINGS, "noise_multiplier": 8.0, "clip_norm": 1.0}
draw = ConvergenceDisplay.from_estimator


def fitted(callback=None, **params):
    X, y, groups = table()
    model = PPSGDRegressor(**{**SETTINGS, **params})
    if callback is not None:
        model.set_callbacks(callback)
    return model.fit(X, y, groups=groups)


@pytest.fixture(scope="module")
def plain():
    return fitted()


@pytest.fixture(scope="module")
def private():
    return fitted(**PRIVATE, client_fraction=0.5, clip_quantile=0.3)


def names_of(display):
    return [curve.name for curve in display.curves]


def drawn(display, name):
    """Line of a quantity."""
    return display.lines_[names_of(display).index(name)]


def test_loss_of_every_round(plain):
    display = draw(plain, smooth=1)
    assert names_of(display) == ["loss"]
    (line,) = display.lines_
    np.testing.assert_array_equal(line.get_xdata(), np.arange(1, 61))
    np.testing.assert_array_equal(line.get_ydata(), plain.history_["loss"])
    assert display.axes_[0].get_xlabel() == "round"
    assert display.axes_[0].get_legend() is None


@pytest.mark.slow
def test_running_means_weigh_rounds_by_their_clients(private):
    display = draw(private, smooth=9)
    loss, n = private.history_["loss"], private.history_["n_clients"]
    assert len(np.unique(n)) > 1
    seen = drawn(display, "loss").get_ydata()
    counts = np.where(np.isfinite(loss), n, 0)
    some = slice(30 - 4, 30 + 5)  # round 31
    expected = np.nansum(loss[some] * counts[some]) / counts[some].sum()
    assert seen[30] == pytest.approx(expected, rel=1e-14)
    assert seen[0] == loss[0]
    last = slice(60 - 5, 60)
    expected = np.nansum(loss[last] * counts[last]) / counts[last].sum()
    assert seen[-1] == pytest.approx(expected, rel=1e-14)
    raw = display.axes_[0].lines[0]
    np.testing.assert_array_equal(raw.get_ydata(), loss)


def test_running_mean_of_rounds_without_a_loss():
    values = np.array([np.nan, 2.0, np.inf, 4.0, 6.0, 1.0, 1.0, 1.0, 1e300, 1.0])
    weights = np.array([0, 1, 1, 1, 3, 1, 1, 1, 1, 0])
    found = running_mean(values, weights, 3)
    expected = [np.nan, 2, np.nan, 4, (4 + 18 + 1) / 5, 20 / 5, 1, 1e300 / 3, 1e300 / 2, 1e300]
    np.testing.assert_allclose(found, expected, rtol=1e-15)
    np.testing.assert_array_equal(running_mean(values[3:5], weights[3:5], 1), [4, 6])


@pytest.mark.slow
def test_clipping_where_there_was_any(private):
    display = draw(private)
    assert names_of(display) == ["loss", "clipped", "clip_norm", "epsilon"]
    bound = private.history_["clip_norm"]
    np.testing.assert_array_equal(drawn(display, "clip_norm").get_ydata(), bound)
    dotted = [line for line in display.axes_[1].lines if line.get_linestyle() == ":"]
    assert dotted[0].get_ydata()[0] == 0.7
    fixed = draw(fitted(clip_norm=1.0))
    assert names_of(fixed) == ["loss", "clipped"]


def test_epsilon_is_that_of_the_first_rounds(private):
    display = draw(private, quantities="epsilon")
    (line,) = display.lines_
    rounds, epsilon = line.get_data()
    assert rounds[0] == 1
    assert rounds[-1] == 60
    assert len(rounds) <= 12
    for k in (0, 5, 9):
        first = SampledGaussian(8.0, int(rounds[k]), 0.5)
        assert epsilon[k] == events_epsilon([first], 1e-5, "zero_out")
    assert epsilon[-1] == private.privacy_.epsilon
    said = display.axes_[0].get_title(loc="left")
    for part in ("one client left out", "delta = 1e-05", "all other clients", "server is trusted"):
        assert part in said


@pytest.mark.slow
def test_epsilon_of_fixed_samples_is_against_clients():
    model = fitted(**{**PRIVATE, "n_rounds": 3}, client_fraction=0.5, sampling="fixed")
    display = draw(model, quantities=["epsilon"])
    rounds, epsilon = display.lines_[0].get_data()
    np.testing.assert_array_equal(rounds, [1, 2, 3])
    first = SampledGaussian(8.0, 2, 0.5, "fixed")
    assert epsilon[1] == events_epsilon([first], 1e-5, "replace_one")
    assert "one client replaced" in display.axes_[0].get_title(loc="left")


def test_epsilon_goes_on_with_the_rounds():
    X, y, groups = table()
    model = PPSGDRegressor(**{**PRIVATE, "n_rounds": 4}, warm_start=True)
    model.fit(X, y, groups=groups)
    model.set_params(n_rounds=8, noise_multiplier=4.0).fit(X, y, groups=groups)
    rounds, epsilon = draw(model, quantities="epsilon").lines_[0].get_data()
    np.testing.assert_array_equal(rounds, np.arange(1, 9))
    for k in (3, 6, 8):
        spent = [SampledGaussian(8.0, min(k, 4)), SampledGaussian(4.0, max(k - 4, 0))]
        assert epsilon[k - 1] == events_epsilon(spent, 1e-5, "zero_out")
    assert epsilon[-1] == model.privacy_.epsilon


@pytest.mark.parametrize("case", ["no noise", "stopped", "nothing sent"])
def test_no_epsilon_where_none_is_promised(case):
    model = {
        "no noise": lambda: fitted(),
        "stopped": lambda: fitted(StopAfter(3), **PRIVATE),
        "nothing sent": lambda: fitted(alpha=0.0, **PRIVATE),
    }[case]()
    assert "epsilon" not in names_of(draw(model))
    with pytest.raises(ValueError, match=r"epsilon = (inf|0)"):
        draw(model, quantities="epsilon")


@pytest.mark.parametrize("step", [FunctionTransformer(), StandardScaler()])
def test_a_step_that_leaks_leaves_no_epsilon(step):
    X, y, groups = table()
    model = ClientColumn(make_pipeline(step, PPSGDRegressor(**PRIVATE)), 0)
    display = draw(model.fit(np.column_stack([groups, X]), y))
    leaks = isinstance(step, StandardScaler)
    assert names_of(display) == ["loss", "clipped", *([] if leaks else ["epsilon"])]


def test_columns_of_other_methods(plain):
    model = copy.copy(plain)
    model.history_ = {**plain.history_, "psi": np.linspace(5, 1, 60), "weights": np.ones((60, 2))}
    display = draw(model)
    assert names_of(display) == ["loss", "psi"]
    np.testing.assert_array_equal(display.lines_[1].get_ydata(), model.history_["psi"])
    assert display.axes_[1].get_ylabel() == "psi"
    chosen = draw(model, quantities=["psi", "n_clients"])
    assert names_of(chosen) == ["psi", "n_clients"]


def test_logarithmic_only_for_wide_positive_values(plain):
    model = copy.copy(plain)
    for low, scale in [(0.1, "log"), (0.2, "linear"), (0.0, "linear"), (-1.0, "linear")]:
        model.history_ = {**plain.history_, "loss": np.linspace(1, low, 60)}
        assert draw(model).axes_[0].get_yscale() == scale
    axes = draw(model, quantities=["loss", "n_clients"], xscale="log").axes_
    assert [ax.get_xscale() for ax in axes] == ["log", "log"]


def test_scores_of_a_monitor():
    monitor = ScoringMonitor(scoring={"r2": ClientScorer("r2")})
    model = fitted(monitor, n_rounds=7)
    display = draw(model, scores=monitor)
    rounds, score = drawn(display, "r2").get_data()
    np.testing.assert_array_equal(rounds, np.arange(1, 8))
    np.testing.assert_array_equal(score, scores_of(monitor)["r2"])
    X, y, groups = table()
    assert score[-1] == pytest.approx(model.score(X, y, groups=groups))


def test_a_monitor_of_a_warm_start_has_the_last_rounds():
    monitor, (X, y, groups) = ScoringMonitor(scoring={"r2": ClientScorer("r2")}), table()
    model = fitted(monitor, n_rounds=4, warm_start=True).set_params(n_rounds=9)
    display = draw(model.fit(X, y, groups=groups), scores=monitor)
    rounds, score = display.lines_[-1].get_data()
    np.testing.assert_array_equal(rounds, np.arange(5, 10))
    assert score[-1] == pytest.approx(model.score(X, y, groups=groups))


def test_a_monitor_of_a_pipeline_inside_a_wrapper():
    monitor, (X, y, groups) = ScoringMonitor(scoring={"r2": ClientScorer("r2")}), table()
    rounds = PPSGDRegressor(**{**SETTINGS, "n_rounds": 5}).set_callbacks(monitor)
    model = ClientColumn(make_pipeline(FunctionTransformer(), rounds), 0)
    model.fit(np.column_stack([groups, X]), y)
    np.testing.assert_array_equal(
        draw(model, scores=monitor).lines_[-1].get_ydata(), scores_of(monitor)["r2"]
    )


def test_scores_of_all_clients_are_a_median_and_deciles():
    scorer = ClientScorer("neg_mean_absolute_error", average=None)
    monitor = ScoringMonitor(scoring=scorer)
    model = fitted(monitor, n_rounds=5)
    display = draw(model, scores=monitor)
    found = scores_of(monitor)[[str(client) for client in model.clients_]].to_numpy(dtype=float)
    np.testing.assert_allclose(display.lines_[-1].get_ydata(), np.median(found, axis=1))
    low, high = display.curves[-1].band
    np.testing.assert_allclose(low, np.quantile(found, 0.1, axis=1))
    np.testing.assert_allclose(high, np.quantile(found, 0.9, axis=1))
    assert legend_of(display.axes_[-1].get_legend()) == ["middle 80%", "median"]


def test_scores_of_ones_own(plain):
    errors = pd.DataFrame({"test": [1.0, 3.0], "train": [0.5, 0.6]}, index=[60, 10])
    display = draw(plain, scores=errors)
    assert names_of(display) == ["loss", "test", "train"]
    np.testing.assert_array_equal(drawn(display, "test").get_data(), [[10, 60], [3.0, 1.0]])
    only = draw(plain, quantities=[], scores=pd.Series([1.0], index=[2], name="error"))
    assert names_of(only) == ["error"]


def test_a_fit_that_ends_by_itself_went_back():
    monitor = ScoringMonitor(scoring={"r2": ClientScorer("r2")})
    model = fitted(monitor, n_rounds=None, learning_rate="auto", max_rounds=400, tol=0.01)
    assert model.n_rounds_ < len(scores_of(monitor))
    with pytest.raises(ValueError, match=rf"scores.*\b{model.n_rounds_}\b.*n_rounds"):
        draw(model, scores=monitor)


@pytest.mark.slow
@pytest.mark.parametrize("quantities", [None, "clip_norm"])
def test_nothing_is_cut_off(private, quantities):
    display = draw(private, quantities=quantities, scores=pd.Series([1e-7], index=[3], name="r2"))
    assert_nothing_is_cut_off(display.figure_)
    for above, below in itertools.pairwise(display.axes_):
        assert below.get_tightbbox().y1 <= above.get_tightbbox().y0


def test_given_axes(plain):
    _, axes = plt.subplots(2)
    display = draw(plain, quantities=["loss", "n_clients"], ax=axes)
    assert list(display.axes_) == list(axes)
    assert [ax.get_xlabel() for ax in axes] == ["round", "round"]
    assert draw(plain, ax=axes[0]).axes_[0] is axes[0]
    with pytest.raises(ValueError, match=r"\bax\b.*panel.*\b1\b.*\b2\b"):
        draw(plain, ax=axes)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"quantities": "psi"}, ValueError, r"quantities.*'loss'.*'epsilon'.*'psi'"),
        ({"quantities": []}, ValueError, "quantities"),
        ({"smooth": 0}, ValueError, r"smooth.*\b0\b"),
        ({"smooth": 2.5}, ValueError, r"smooth.*2\.5"),
        ({"xscale": "logit"}, ValueError, r"xscale.*'logit'"),
        ({"scores": [1.0, 2.0]}, TypeError, r"scores.*list"),
        ({"scores": pd.Series([1.0], index=[0])}, ValueError, r"index.*scores.*\[0\]"),
        ({"scores": pd.Series([1.0], index=["a"])}, ValueError, r"index.*scores.*'a'"),
    ],
)
def test_what_cannot_be_drawn(plain, options, error, message):
    with pytest.raises(error, match=message):
        draw(plain, **options)


def test_what_has_no_rounds(plain, private):
    with pytest.raises(NotFittedError):
        draw(PPSGDRegressor())
    with pytest.raises(ValueError, match=r"GaussianMean.*history_"):
        draw(GaussianMean().fit(np.zeros((4, 1)), np.arange(4.0), groups=[0, 0, 1, 1]))
    with pytest.raises(ValueError, match="history_"):
        draw(private.release())
    assert math.isinf(plain.privacy_.epsilon)
