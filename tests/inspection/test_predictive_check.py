"""What PredictiveCheckDisplay draws and computes."""

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose

from pfl_sklearn.compose import ClientColumn
from pfl_sklearn.inspection import PredictiveCheckDisplay
from pfl_sklearn.linear_model import PersonalizedLinearRegression, PersonalizedPoissonRegression
from tests.helpers.three_responses import ALONE, KINDS, draw

check = PredictiveCheckDisplay.from_estimator


@pytest.mark.parametrize("kind", KINDS)
def test_right_models_pass(kind):
    x, y, codes, _ = draw(kind, np.random.default_rng(2))
    model = KINDS[kind](**ALONE).fit(x, y, groups=codes)
    display = check(model, x, y, groups=codes, n=100)
    assert (display.checks_["p_value"] > 0.02).all()
    assert len(display.axes_) == (1 if kind == "classes" else 2)
    assert_allclose(display.checks_.loc["mean", "observed"], y.mean())
    means = pd.Series(y).groupby(codes).mean()
    row = display.checks_.loc["standard deviation of clients' means"]
    assert_allclose(row["observed"], means.std(ddof=0))
    at, shares = display.axes_[-1].lines[0].get_data()  # of the observed clients
    assert_allclose(shares, [np.mean(means <= value + 1e-9) for value in at])


@pytest.mark.filterwarnings("ignore:The counts are overdispersed")
def test_counts_with_a_dispersion_fail():
    x, _, codes, _ = draw("counts", np.random.default_rng(0))
    rng = np.random.default_rng(0)
    y = rng.poisson(rng.gamma(0.4, 5, size=len(codes)))
    poisson, negative = (
        check(
            PersonalizedPoissonRegression(family=family, **ALONE).fit(x, y, groups=codes),
            x,
            y,
            groups=codes,
            n=100,
        ).checks_["p_value"]
        for family in ("poisson", "negative_binomial")
    )
    assert poisson["share of zeros"] < 0.03
    assert poisson["standard deviation"] < 0.03
    assert negative["share of zeros"] > 0.05


def test_weights_are_those_of_the_fit():
    rng = np.random.default_rng(0)
    codes, weights = np.repeat(np.arange(30), 8), np.tile([0.05, 5.0, 0.0, 1.0], 60)
    x = rng.normal(size=(240, 1))
    y = x[:, 0] + rng.normal(size=30)[codes] + rng.normal(size=240) / np.sqrt(weights + 0.01)
    model = PersonalizedLinearRegression(**ALONE).fit(x, y, groups=codes, sample_weight=weights)
    display = check(model, x, y, groups=codes, sample_weight=weights, n=50)
    assert display.simulated.shape == (50, 180)
    assert (display.checks_["p_value"] > 0.02).all()


def test_columns_of_ids_and_exposure():
    x, y, codes, _ = draw("counts", np.random.default_rng(0))
    frame = pd.DataFrame({"x": x[:, 0], "site": codes, "days": 1.0 + codes % 3})
    model = ClientColumn(PersonalizedPoissonRegression(**ALONE), "site", exposure="days")
    model.fit(frame, y)
    display = check(model, frame, y, n=20, kind="clients", clients="new")
    assert display.simulated.shape == (20, len(y))
    assert display.ax_.get_xlabel() == "client's mean response"


def test_input_that_does_not_fit():
    x, y, codes, _ = draw("linear", np.random.default_rng(0))
    model = PersonalizedLinearRegression(**ALONE).fit(x, y, groups=codes)
    with pytest.raises(ValueError, match="kind must be 'all', one of 'responses', 'clients'"):
        check(model, x, y, groups=codes, n=3, kind="rows")
    with pytest.raises(ValueError, match="y contains NaN"):
        check(model, x, np.full(len(y), np.nan), groups=codes)
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        check(model, x, y[:-1], groups=codes)
