"""Observed over expected: numbers by hand, limits, the plot, and refusals."""

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose
from scipy import stats
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from pfl_sklearn.compose import ClientColumn
from pfl_sklearn.inspection import FunnelDisplay, observed_expected
from pfl_sklearn.linear_model import (
    PersonalizedLinearRegression,
    PersonalizedLogisticRegression,
    PersonalizedPoissonRegression,
)
from tests.helpers.three_responses import ALONE, KINDS, draw, means_of


@pytest.mark.parametrize("kind", ["classes", "counts"])
def test_totals(kind):
    x, y, codes, _ = draw(kind, np.random.default_rng(0))
    model = KINDS[kind](**ALONE).fit(x, y, groups=codes)
    table = observed_expected(model, x, y, groups=codes, level=0.9)
    assert_allclose(table["observed"], np.bincount(codes, y))
    assert_allclose(table["n_rows"], 6)
    expected = np.bincount(codes, means_of(model, kind, x, codes + 1000))  # of new clients
    assert_allclose(table["expected"], expected)
    assert_allclose(table["expected"].sum(), y.sum(), rtol=0.05)
    assert_allclose(table["ratio"], table["observed"] / expected)
    own = np.bincount(codes, means_of(model, kind, x, codes))
    assert_allclose(table["predicted_ratio"], own / expected)
    totals = model.predict_total(x, groups=codes, by=codes, level=0.9)
    assert_allclose(table["predicted_upper"], totals["upper"].to_numpy() / expected)
    # Limits at which the observed count is in the tails.
    low, high, seen = table["lower"] * expected, table["upper"] * expected, table["observed"]
    inner = (seen > 0) & (seen < 6)
    law = stats.poisson if kind == "counts" else None
    below = law.sf(seen - 1, low) if law else stats.binom.sf(seen - 1, 6, low / 6)
    above = law.cdf(seen, high) if law else stats.binom.cdf(seen, 6, high / 6)
    assert_allclose(below[inner], 0.05)
    assert_allclose(above[inner], 0.05)
    assert (low[seen == 0] == 0).all()
    if kind == "classes":
        assert_allclose(high[seen == 6], 6)


@pytest.mark.slow
def test_limits_of_ratios_cover():
    """Of clients that are all like the population."""
    outside = []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        codes, x = np.repeat(np.arange(200), 8), rng.normal(size=(1600, 1))
        y = rng.poisson(np.exp(0.5 * x[:, 0]))
        model = PersonalizedPoissonRegression(**ALONE).fit(x, y, groups=codes)
        display = FunnelDisplay.from_estimator(model, x, y, groups=codes)
        half = 1.96 / np.sqrt(display.expected) / 2
        low, high = (1 - half) ** 2, (1 + half) ** 2
        outside += [np.mean((display.ratio < low) | (display.ratio > high))]
    assert 0.03 < np.mean(outside) < 0.07


def test_in_a_pipeline_and_the_plot():
    x, y, codes, _ = draw("classes", np.random.default_rng(0))
    frame = pd.DataFrame({"x": x[:, 0], "site": [f"$ {k}" for k in codes]})
    labels = np.where(y, "died", "alive")
    steps = make_pipeline(StandardScaler(), PersonalizedLogisticRegression(**ALONE))
    model = ClientColumn(steps, "site").fit(frame, labels)
    display = FunnelDisplay.from_estimator(model, frame, labels)
    table = observed_expected(model, frame, labels)
    assert_allclose(table["observed"].sum(), y.sum())
    rings = next(line for line in display.ax_.lines if line.get_label() == "observed")
    assert_allclose(rings.get_data(), [table["expected"], table["ratio"]])
    assert display.variance_factor == pytest.approx(1 - table["expected"].sum() / len(y))
    # One client is far off, and named.
    display = FunnelDisplay(
        clients=["a", "b"],
        expected=np.array([50.0, 60.0]),
        ratio=np.array([1.0, 3.0]),
        predicted_ratio=np.ones(2),
    )
    assert [text.get_text() for text in display.plot().ax_.texts] == ["b"]


def test_models_without_expectations():
    x, y, codes, _ = draw("linear", np.random.default_rng(0))
    model = PersonalizedLinearRegression(**ALONE).fit(x, y, groups=codes)
    with pytest.raises(TypeError, match="observed_expected is for classes and counts"):
        observed_expected(model, x, y, groups=codes)
    three = PersonalizedLogisticRegression(random="intercept")
    labels = np.digitize(y, [-0.5, 0.5])
    three.fit(x, labels, groups=codes)
    with pytest.raises(ValueError, match="observed_expected needs two classes; got a model of 3"):
        observed_expected(three, x, labels, groups=codes)


def test_responses_that_do_not_fit():
    x, y, codes, _ = draw("classes", np.random.default_rng(0))
    model = PersonalizedLogisticRegression(**ALONE).fit(x, y, groups=codes)
    with pytest.raises(ValueError, match=r"y holds 7, but the classes of fit are \[0, 1\]"):
        observed_expected(model, x, np.full(len(y), 7), groups=codes)
    counts = PersonalizedPoissonRegression(**ALONE).fit(x, y, groups=codes)
    with pytest.raises(ValueError, match="y contains NaN"):
        observed_expected(counts, x, np.where(codes, 1.0, np.nan), groups=codes)
