"""The columns that a warning of separation names, against data that were made with them."""

import numpy as np
import pandas as pd
import pytest
from scipy.special import expit

from pfl_sklearn.linear_model import (
    PersonalizedLogisticRegression,
    PersonalizedPoissonRegression,
    SeparationWarning,
)
from pfl_sklearn.linear_model._fit_warnings import Separation, find_separation
from pfl_sklearn.linear_model._mixed._families import Binomial, Categorical, Poisson
from pfl_sklearn.linear_model._mixed._table import RegressionTable

LEVELS = 11


def draw_shops(seed=0, n=200):
    """Indicators of all shops but the first, an age, the shops, and labels that follow the age."""
    rng = np.random.default_rng(seed)
    shop = rng.integers(0, LEVELS, n)
    frame = pd.DataFrame(
        {f"shop_{k}": (shop == k).astype(float) for k in range(1, LEVELS)}
        | {"age": rng.normal(size=n)}
    )
    return frame, shop, (rng.random(n) < expit(frame["age"])).astype(int)


def warning_of(model, frame, y):
    with pytest.warns(SeparationWarning) as caught:
        model.set_params(random="intercept").fit(frame, y, groups=np.arange(len(y)) % 20)
    return str(caught[0].message)


def table_of(x, y, intercept=True):
    """RegressionTable of rows x (n, d) of one client."""
    x = np.column_stack([np.ones(len(x)), x]) if intercept else x
    names = ["intercept"] * intercept + [f"x{k}" for k in range(x.shape[1] - intercept)]
    codes = np.zeros(len(x), dtype=int)
    at = 0 if intercept else None
    return RegressionTable(x, np.asarray(y), codes, 1, None, len(names), at, names, True)


@pytest.mark.parametrize("kind", ["two", "three", "counts"])
def test_a_reference_level_is_named_and_not_the_others(kind):
    """All ten other levels were named, and never that of which all rows are alike."""
    frame, shop, y = draw_shops()
    model = PersonalizedLogisticRegression()
    if kind == "three":
        y = np.random.default_rng(1).integers(0, 3, len(y))
    if kind == "counts":
        model, y = PersonalizedPoissonRegression(), 1 + 2 * y
    pure = np.where(shop == 0, 0, y)
    text = warning_of(model, frame, pure)
    assert text.startswith("The reference level of 'shop_1', 'shop_2'") and "'age'" not in text
    outcome = {"two": Binomial(), "three": Categorical(3), "counts": Poisson()}[kind]
    table = table_of(frame.to_numpy(), np.where(shop == 4, 0, y))
    assert find_separation(table, outcome, 0) == Separation((4,), (), False)


def test_both_a_level_and_the_reference_are_named_if_each_separates():
    frame, shop, y = draw_shops()
    table = table_of(frame.to_numpy(), np.where(np.isin(shop, [0, 4]), 1, y))
    text = find_separation(table, Binomial(), 0).text(table.names)
    assert text.startswith("The feature 'x3', and the reference level of 'x0', 'x1'")


@pytest.mark.parametrize("outcome", [Binomial(), Categorical(3), Poisson()])
def test_innocent_columns_are_left_out(outcome):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 8))
    both = x[:, 2] + 10 * x[:, 5]
    cuts = [-8, 8] if isinstance(outcome, Categorical) else [0]
    y = np.digitize(both, cuts)
    if isinstance(outcome, Poisson):
        # Of counts above 0 the columns have to be constant along the direction.
        positive = y > 0
        x[positive, 2] = -10 * x[positive, 5]
        y = y * (1 + rng.poisson(3, len(y)))
    assert find_separation(table_of(x, y), outcome, 0) == Separation((3, 6), (), True)
    x[:, 0] = x[:, 2] + 10 * x[:, 5]  # now one column does it
    assert find_separation(table_of(x, y), outcome, 0) == Separation((1,), (), False)


def test_without_an_intercept_columns_separate_at_zero():
    x = np.random.default_rng(0).normal(size=(200, 3))
    shifted, at_zero = x[:, 1] > 0.5, x[:, 1] > 0
    assert find_separation(table_of(x, at_zero * 1, False), Binomial(), 0).columns == (1,)
    assert find_separation(table_of(x, shifted * 1, False), Binomial(), 0).columns == ()
    assert find_separation(table_of(x, shifted * 1), Binomial(), 0).columns == (2,)


def test_columns_of_known_coefficients_are_not_named():
    x = np.random.default_rng(0).normal(size=(200, 3))
    x[:, 2] = x[:, 0] + 1e3
    result = find_separation(table_of(x, (x[:, 0] > 0) * 1), Binomial(), 2)
    assert result.columns == ()  # the third needs an intercept, which is known too
    assert result.text([]) == "A combination of the features separates"


def test_overlapping_columns_do_not_separate():
    x = np.random.default_rng(0).normal(size=(200, 3))
    y = (x[:, 1] > 0) * 1
    y[np.argmax(x[:, 1])] = 0
    assert find_separation(table_of(x, y), Binomial(), 0).columns == ()


@pytest.mark.slow
def test_one_column_of_many_is_found_and_a_combination_of_many_is_not_sought():
    x = np.random.default_rng(0).normal(size=(200, 62))
    result = find_separation(table_of(x, (x[:, 40] > 0) * 1), Binomial(), 0)
    assert result == Separation((41,), (), False)
    result = find_separation(table_of(x, (x.sum(axis=1) > 0) * 1), Binomial(), 0)
    assert result == Separation((), (), True)
