"""What ShrinkageDisplay draws: positions of every mark, against the fitted arrays."""

import re

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import Ridge

from pfl_sklearn import (
    BernoulliMean,
    ClientColumn,
    GaussianMean,
    PrivacyWarning,
    SingleClientWarning,
)
from pfl_sklearn.datasets import load_baseball, make_gaussian_clients
from pfl_sklearn.inspection import (
    ClientGainDisplay,
    CoefficientDisplay,
    ResidualsDisplay,
    ShrinkageDisplay,
)
from pfl_sklearn.linear_model import (
    PersonalizedLinearRegression,
    PersonalizedLogisticRegression,
    PersonalizedPoissonRegression,
)
from pfl_sklearn.priors import GaussianPrior
from tests.helpers.figures import (
    assert_rows_do_not_overlap,
    legend_of,
    lines_of,
    segments_of,
)


def fitted(n_clients, **parameters):
    clients = make_gaussian_clients(n_clients, 5, random_state=0, **parameters)
    model = GaussianMean().fit(clients.data, clients.target, groups=clients.groups)
    return model, clients.client_means


@pytest.mark.parametrize(("n_clients", "with_truth"), [(2, True), (5, False), (60, True)])
def test_rows(n_clients, with_truth):
    model, truth = fitted(n_clients)
    display = ShrinkageDisplay.from_estimator(
        model, truth=truth if with_truth else None, level=0.9, xlabel="score"
    )
    ax, order, at = display.ax_, np.argsort(model.means_), np.arange(n_clients)
    drawn = lines_of(ax)
    np.testing.assert_array_equal(drawn["local"], np.c_[model.local_means_[order], at])
    np.testing.assert_array_equal(drawn["personalized"], np.c_[model.means_[order], at])
    np.testing.assert_array_equal(drawn["population"][:, 0], np.full(2, model.population_mean_))
    lower, upper = model.credible_interval(0.9)
    intervals, connections = segments_of(ax)
    np.testing.assert_array_equal(intervals[:, :, 0], np.c_[lower, upper][order])
    np.testing.assert_array_equal(intervals[:, :, 1], np.c_[at, at])
    np.testing.assert_array_equal(
        connections[:, :, 0], np.c_[model.local_means_, model.means_][order]
    )
    expected = ["population", "90 % interval", "local", "personalized"]
    if with_truth:
        np.testing.assert_array_equal(drawn["truth"], np.c_[truth[order], at])
        expected.append("truth")
    assert "truth" in drawn or not with_truth
    assert legend_of(ax.get_legend()) == expected
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        str(client) for client in model.clients_[order]
    ]
    assert ax.get_xlabel() == "score"
    assert ax.get_ylim()[0] < 0 < n_clients - 1 < ax.get_ylim()[1]


@pytest.mark.parametrize("with_truth", [False, True])
def test_points(with_truth):
    model, truth = fitted(61)
    display = ShrinkageDisplay.from_estimator(model, truth=truth if with_truth else None)
    ax, drawn = display.ax_, lines_of(display.ax_)
    np.testing.assert_array_equal(drawn["personalized"], np.c_[model.local_means_, model.means_])
    ends = model.local_means_.min(), model.local_means_.max()
    np.testing.assert_array_equal(drawn["no shrinkage"], np.c_[ends, ends])
    np.testing.assert_array_equal(drawn["population"][:, 1], np.full(2, model.population_mean_))
    lower, upper = model.credible_interval()
    (intervals,) = segments_of(ax)
    np.testing.assert_array_equal(intervals[:, :, 1], np.c_[lower, upper])
    np.testing.assert_array_equal(intervals[:, 0, 0], model.local_means_)
    drawn_names = {"no shrinkage", "population", "95 % interval", "personalized"}
    assert set(legend_of(ax.get_legend())) - {"truth"} == drawn_names
    assert ("truth" in drawn) == ("truth" in legend_of(ax.get_legend())) == with_truth
    if with_truth:
        np.testing.assert_array_equal(drawn["truth"], np.c_[model.local_means_, truth])
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("local estimate", "personalized estimate")


def test_kind_can_be_chosen():
    few, many = fitted(5)[0], fitted(61)[0]
    assert "no shrinkage" in lines_of(ShrinkageDisplay.from_estimator(few, kind="points").ax_)
    rows = ShrinkageDisplay.from_estimator(many, kind="rows")
    assert len(rows.ax_.get_yticklabels()) == 61
    with pytest.raises(ValueError, match=r"kind.*'auto', 'rows' or 'points'.*'bars'"):
        ShrinkageDisplay.from_estimator(few, kind="bars")


def test_proportions():
    baseball = load_baseball()
    model = BernoulliMean().fit_counts(baseball.successes, baseball.trials, groups=baseball.groups)
    display = ShrinkageDisplay.from_estimator(model, truth=baseball.season_average)
    drawn = lines_of(display.ax_)
    assert display.ax_.get_xlabel() == "probability of 1"
    names = [label.get_text() for label in display.ax_.get_yticklabels()]
    assert names[-1] == "Roberto Clemente"
    assert names[0] == "Max Alvis"
    np.testing.assert_allclose(drawn["local"][[0, -1], 0], [7 / 45, 18 / 45])
    np.testing.assert_allclose(drawn["truth"][[0, -1], 0], [14 / 70, 127 / 367])
    assert np.ptp(drawn["personalized"][:, 0]) < np.ptp(drawn["local"][:, 0])


@pytest.mark.parametrize("output", [0, 1])
def test_outputs(output):
    model, truth = fitted(6, n_outputs=2, mean=[5.0, -5.0])
    display = ShrinkageDisplay.from_estimator(model, output=output, truth=truth[:, output])
    drawn, order = lines_of(display.ax_), np.argsort(model.means_[:, output])
    np.testing.assert_array_equal(drawn["personalized"][:, 0], model.means_[order, output])
    np.testing.assert_array_equal(drawn["truth"][:, 0], truth[order, output])
    np.testing.assert_array_equal(drawn["population"][:, 0], np.full(2, display.population))
    assert display.population == model.population_mean_[output]


def test_from_a_wrapper():
    clients = make_gaussian_clients(8, 6, random_state=0)
    X = np.column_stack([clients.data, clients.groups])
    column = ClientColumn(GaussianMean(), 1).fit(X, clients.target)
    drawn = lines_of(ShrinkageDisplay.from_estimator(column).ax_)
    np.testing.assert_array_equal(drawn["personalized"][:, 0], np.sort(column.means_))


def test_on_given_axes_and_again():
    model, _ = fitted(5)
    figure, axes = plt.subplots(1, 2)
    display = ShrinkageDisplay.from_estimator(model, ax=axes[0])
    assert display.ax_ is axes[0]
    assert display.figure_ is figure
    assert display.plot(kind="points", ax=axes[1], level=0.5) is display
    assert display.ax_ is axes[1]
    assert "50 % interval" in legend_of(axes[1].get_legend())
    assert len(plt.get_fignums()) == 1


def test_one_client():
    clients = make_gaussian_clients(1, 5, random_state=0)
    with pytest.warns(SingleClientWarning):
        model = GaussianMean().fit(clients.data, clients.target)
    for kind in ("rows", "points"):
        display = ShrinkageDisplay.from_estimator(model, kind=kind)
        display.figure_.canvas.draw()
        drawn = lines_of(display.ax_)["personalized"]
        assert drawn.shape == (1, 2)
        assert drawn[0, 0] == pytest.approx(clients.target.mean())


@pytest.mark.slow_but_first
@pytest.mark.parametrize("n_clients", [2, 60])
def test_nothing_overlaps_or_is_cut_off(n_clients):
    model, truth = fitted(n_clients)
    figure = ShrinkageDisplay.from_estimator(model, truth=truth).figure_
    (ax,) = figure.axes
    legend, label = assert_rows_do_not_overlap(figure)
    # No more than a quarter of an inch of white between them.
    assert label.y0 - legend.y1 < 0.25 * figure.dpi
    gap = np.diff([text.get_window_extent().y0 for text in ax.get_yticklabels()]).min()
    assert gap > ax.get_yticklabels()[0].get_window_extent().height


def test_faint_intervals_are_seen_in_the_legend():
    model, _ = fitted(200)
    ax = ShrinkageDisplay.from_estimator(model).ax_
    handles = dict(zip(legend_of(ax.get_legend()), ax.get_legend().legend_handles, strict=True))
    assert handles["95 % interval"].get_alpha() > 0.5 > ax.collections[0].get_alpha() > 0


def test_names_are_not_read_as_mathematics():
    model = BernoulliMean().fit_counts([3, 5, 2], [9, 9, 8], groups=["$a_1$", "$b^2$", "c"])
    ax = ShrinkageDisplay.from_estimator(model).ax_
    assert not any(label.get_parse_math() for label in ax.get_yticklabels())


@pytest.mark.slow
def test_tall_figures_stay_drawable():
    model, _ = fitted(400)
    display = ShrinkageDisplay.from_estimator(model, kind="rows")
    assert display.figure_.get_size_inches()[1] == 100


@pytest.mark.parametrize(
    ("make", "given", "message"),
    [
        (lambda: Ridge().fit([[0.0], [1.0]], [0, 1]), {}, r"\bRidge\b"),
        (GaussianMean, {}, "not fitted"),
        (lambda: fitted(5)[0], {"truth": [1.0, 2.0]}, r"truth.*\(5,\).*\(2,\)"),
        (lambda: fitted(5)[0], {"truth": pd.Series(1.0, range(1, 6))}, r"index.*truth.*\b0\b"),
        (lambda: fitted(5)[0], {"level": 95}, r"level.*\(0, 1\).*\b95\b"),
    ],
)
def test_what_cannot_be_plotted(make, given, message):
    with pytest.raises(NotFittedError if message == "not fitted" else ValueError, match=message):
        ShrinkageDisplay.from_estimator(make(), **given)
    assert plt.get_fignums() == []


@pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")
def test_a_released_model_has_nothing_to_plot():
    clients = make_gaussian_clients(50, 5, random_state=0)
    model = GaussianMean(epsilon=1.0, clip_norm=4.0, noise_variance=1.0)
    model.fit(clients.data, clients.target, groups=clients.groups)
    with pytest.raises(NotFittedError, match=r"GaussianMean.*means_"):
        ShrinkageDisplay.from_estimator(model.release())


def test_what_belongs_to_linear_models():
    means, _ = fitted(5)
    clients = make_gaussian_clients(5, 5, random_state=0)
    lines = PersonalizedLinearRegression().fit(clients.data, clients.target, groups=clients.groups)
    with pytest.raises(ValueError, match=r"local=.*PersonalizedLinearRegression"):
        ShrinkageDisplay.from_estimator(lines, feature=0)
    for given in ({"feature": 0}, {"local": lines}):
        with pytest.raises(ValueError, match=r"feature.*local.*GaussianMean"):
            ShrinkageDisplay.from_estimator(means, **given)
    assert plt.get_fignums() == []


@pytest.mark.parametrize(
    "kind",
    [PersonalizedLinearRegression, PersonalizedLogisticRegression, PersonalizedPoissonRegression],
)
def test_the_local_model_of_the_advice_is_one(kind):
    rng = np.random.default_rng(0)
    groups, X = np.repeat(np.arange(6), 20), rng.normal(size=(120, 1))
    y = rng.permuted(np.tile([0, 1], (6, 10)), axis=1).ravel()  # as many of each in every client
    model = kind(random="intercept").fit(X, y, groups=groups)
    with pytest.raises(ValueError, match="local=") as refused:
        ShrinkageDisplay.from_estimator(model)
    advised = re.search(r"such as (.*)\.$", str(refused.value))[1]
    local = eval(advised, {"np": np, "GaussianPrior": GaussianPrior, kind.__name__: kind})
    local.fit(X, y, groups=groups)
    display = ShrinkageDisplay.from_estimator(model, local=local)
    np.testing.assert_array_equal(display.local, local.intercept_)
    assert np.ptp(display.local) > 1.2 * np.ptp(display.personalized)


# Marks of privacy.

PUBLISHED = GaussianMean(unit="row", publish="clients", epsilon=0.5, bounds=(-9.0, 9.0))
LINE = PersonalizedLinearRegression(
    GaussianPrior(covariance=1.0),
    noise_variance=1.0,
    random="intercept",
    epsilon=1.0,
    feature_bound=2.0,
    target_bound=5.0,
)


def titles(display):
    return [ax.get_title(loc="left") for ax in display.figure_.axes]


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("model", "text"),
    [
        (GaussianMean(), ""),
        (GaussianMean(epsilon=1.0, clip_norm=8.0, noise_variance=1.0), "not covered"),
        (PUBLISHED, "covered"),
    ],
)
def test_what_the_promise_covers_is_said_above(model, text):
    clients = make_gaussian_clients(12, 5, random_state=0)
    model = model.fit(clients.data, clients.target, groups=clients.groups)
    display = ShrinkageDisplay.from_estimator(model)
    expected = f"clients' values are {text} by the privacy promise" if text else ""
    assert titles(display) == [expected]
    scores = ClientGainDisplay.from_estimator(
        model, clients.data, clients.target, groups=clients.groups
    )
    rows = expected.replace("are covered", "are not covered")
    assert titles(scores)[0] == rows
    if isinstance(model.population_mean_, float):
        shown = ResidualsDisplay.from_estimator(
            model, clients.data, clients.target, groups=clients.groups
        )
        assert titles(shown)[0] == rows


def test_coefficients_of_private_fits_are_marked():
    clients = make_gaussian_clients(60, 5, random_state=0)
    X = np.random.default_rng(0).uniform(-1, 1, (300, 1))
    model = clone(LINE).fit(X, clients.target, groups=clients.groups)
    for display in (
        CoefficientDisplay.from_estimator(model, feature=["intercept", "x0"]),
        CoefficientDisplay.from_effects(model),
    ):
        assert titles(display)[0] == "clients' values are not covered by the privacy promise"


def test_noised_estimates_far_out_are_drawn_at_the_edge():
    clients = make_gaussian_clients(200, 1, random_state=0)
    groups = np.append(clients.groups, np.repeat(clients.groups[:50], 200))
    y = np.append(clients.target, np.repeat(clients.target[:50], 200))
    with pytest.warns(PrivacyWarning):
        model = clone(PUBLISHED).set_params(random_state=0).fit(y[:, None], y, groups=groups)
    ax = ShrinkageDisplay.from_estimator(model).ax_
    assert ax.get_xlabel() == "noised estimate"
    shown = ax.get_lines()[-2].get_xdata()
    ends = shown.min(), shown.max()
    assert_allclose(shown, np.clip(model.local_means_, *ends))
    n_far = np.sum(shown != model.local_means_)
    assert n_far > 0
    assert legend_of(ax.get_legend())[-1] == f"further out: {n_far}"
    assert (ends[1] - ends[0]) < 0.5 * np.ptp(model.local_means_)
