"""Trees over a personalized line: residuals of rows left out, and tables of few rows."""

import numpy as np
import pytest
from numpy.testing import assert_allclose
from sklearn.base import clone
from sklearn.linear_model import LinearRegression

from pfl_sklearn import PersonalizedLinearRegression
from pfl_sklearn.compose._client_rows import TableRows
from pfl_sklearn.compose._stack.residual import ResidualRegressor, _left_out_residuals
from tests.helpers.slow import slow


def table(sizes=(12, 5, 1, 9, 20, 3), seed=0):
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(len(sizes)), sizes)
    X = rng.normal(size=(len(groups), 2))
    slopes = 1 + rng.normal(size=(len(sizes), 2))
    y = (X * slopes[groups]).sum(axis=1) + rng.normal(size=len(sizes))[groups]
    return X, y + rng.normal(size=len(y)), groups


def line(**params):
    return PersonalizedLinearRegression(uncertainty="plug_in", unseen="population", **params)


@pytest.mark.parametrize("weighted", [False, True])
def test_residuals_are_those_of_fits_without_the_row(weighted):
    X, y, groups = table()
    weights = np.random.default_rng(1).uniform(0.5, 2, size=len(y)) if weighted else None
    fitted = line().fit(X, y, groups=groups, sample_weight=weights)
    found = _left_out_residuals(fitted, TableRows(X, y, groups, weights))
    given = line(prior=fitted.prior_, noise_variance=fitted.noise_variance_)
    given.prior = clone(fitted.prior_).set_params(mean=None)  # the population is fitted again
    for row in (0, 14, 17, 30):
        others = np.arange(len(y)) != row
        options = {} if weights is None else {"sample_weight": weights[others]}
        without = clone(given).fit(X[others], y[others], groups=groups[others], **options)
        expected = y[row] - without.predict(X[[row]], groups=groups[[row]])
        assert_allclose(found[row], expected[0], rtol=1e-6)


@pytest.mark.filterwarnings("ignore:The 5 coefficients that vary")
@pytest.mark.parametrize("sizes", [[3] * 10, *slow([[2] * 20, [1] * 10 + [2] * 3]), [1] * 25])
def test_few_rows_leave_no_huge_residuals(sizes):
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(len(sizes)), sizes)
    X = rng.normal(size=(len(groups), 4))
    y = rng.normal(size=len(sizes))[groups] + X[:, 0] + 0.5 * rng.normal(size=len(groups))
    model = ResidualRegressor(line(), LinearRegression()).fit(X, y, groups=groups)
    assert np.abs(model.predict(X, groups=groups) - y).max() < 5 * y.std()


def test_for_client_predicts_as_the_whole_model():
    X, y, groups = table()
    model = ResidualRegressor(line(), LinearRegression()).fit(X, y, groups=groups)
    alone = model.for_client(3)
    rows = groups == 3
    assert_allclose(alone.predict(X[rows]), model.predict(X[rows], groups=groups[rows]))
    assert alone.estimator_.coef_.shape == (1, 2)


@pytest.mark.filterwarnings("ignore::pfl_sklearn.SingleClientWarning")
def test_rows_that_are_fitted_exactly_leave_nothing():
    """One client with fewer rows than coefficients has neither noise nor standard errors."""
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(3, 4)), rng.normal(size=3)
    model = ResidualRegressor(PersonalizedLinearRegression(), LinearRegression())
    assert_allclose(model.fit(X, y).predict(X), y, atol=1e-6)
