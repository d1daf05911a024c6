"""What StreamDisplay draws, against the stream itself."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from pfl_sklearn.inspection import StreamDisplay
from pfl_sklearn.online import CollaborativeMean

draw = StreamDisplay.from_estimator
TRUTH = np.repeat([0.2, 0.8], 5)


@pytest.fixture(scope="module")
def rows():
    """Ten clients of 40 steps each, the last of whom comes late."""
    rng = np.random.default_rng(0)
    y = (TRUTH + rng.normal(scale=0.3, size=(40, 10))).ravel()
    groups = np.tile(np.arange(10), 40)
    kept = (groups < 9) | (np.arange(400) > 200)
    return np.zeros((kept.sum(), 1)), y[kept], groups[kept]


def test_looks_are_those_of_a_stream(rows):
    X, y, groups = rows
    display = draw(CollaborativeMean(), X, y, groups=groups, n_times=6)
    assert display.steps[0] == 1
    assert display.steps[-1] == 40
    model, before = CollaborativeMean(), 0
    step = pd.Series(groups).groupby(groups).cumcount().to_numpy() + 1
    for time in display.steps:
        now = (before < step) & (step <= time)
        model.partial_fit(X[now], y[now], groups=groups[now])
        before = time
    np.testing.assert_allclose(display.means[-1], model.means_)
    np.testing.assert_allclose(display.local_means[-1], model.local_means_)
    np.testing.assert_allclose(display.stds[-1], model.stds_)
    assert len(display.axes_) == 3
    assert [ax.get_title(loc="left") for ax in display.axes_] == [f"client {k}" for k in (0, 4, 9)]
    np.testing.assert_array_equal(display.lines_[2].get_ydata(), display.means[:, 9])
    np.testing.assert_array_equal(display.lines_[0].get_xdata(), display.steps)


def test_errors_are_means_over_clients(rows):
    X, y, groups = rows
    truth = pd.Series(TRUTH, index=np.arange(10))[::-1]
    display = draw(CollaborativeMean(), X, y, groups=groups, truth=truth, n_times=6)
    (line,) = display.lines_
    expected = np.nanmean((display.means - TRUTH) ** 2, axis=1)
    np.testing.assert_allclose(line.get_ydata(), expected)
    assert display.axes_[0].get_yscale() == "log"
    labels = [text.get_text() for text in display.axes_[0].get_legend().get_texts()]
    assert labels == ["alone", "with the others"]


def test_chosen_clients_and_axes(rows):
    _, y, groups = rows
    names = np.array([f"shop {k}" for k in range(10)])[groups]
    frame = pd.DataFrame({"day": np.arange(len(y))})
    fig, axes = plt.subplots(1, 2)
    display = draw(
        CollaborativeMean(decision="test"),
        frame,
        y,
        groups=names,
        truth=TRUTH,
        kind="estimates",
        clients=["shop 3", "shop 7"],
        n_times=3,
        ax=axes,
    )
    assert display.figure_ is fig
    assert axes[1].get_title(loc="left") == "client shop 7"
    assert [line.get_label() for line in axes[0].lines] == ["alone", "with the others", "truth"]
    with pytest.raises(ValueError, match="client 'shop 99' is not in the stream"):
        display.plot(kind="estimates", clients=["shop 99"])


def test_classes_are_handed_on(rows):
    X, y, groups = rows
    labels = dict(enumerate(np.repeat(["a", "b"], 5)))
    model = CollaborativeMean(decision="oracle")
    display = draw(model, X, y, groups=groups, labels=labels, n_times=2)
    assert np.ptp(display.means[-1][:5]) < np.ptp(display.local_means[-1][:5])


@pytest.mark.parametrize(
    ("params", "error"),
    [
        ({"kind": "error"}, "kind='error' needs truth"),
        ({"kind": "magic"}, "kind must be"),
        ({"level": 95}, r"level must be a number in \(0, 1\); got 95"),
        ({"n_times": 0}, "n_times must be an integer"),
        ({"truth": TRUTH[:3]}, "truth must have shape"),
        ({"ax": np.empty(2, object)}, "one axes per client, 3; got 2"),
    ],
)
def test_bad_parameters(rows, params, error):
    X, y, groups = rows
    with pytest.raises(ValueError, match=error):
        draw(CollaborativeMean(), X, y, groups=groups, **{"n_times": 2, **params})
