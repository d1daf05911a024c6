"""Searches where many variances are unknown, which enter one set after the other."""

import warnings

import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning

from pfl_sklearn import PersonalizedLogisticRegression, PersonalizedPoissonRegression
from pfl_sklearn.linear_model._mixed import _population_fit
from pfl_sklearn.priors import GaussianPrior

N_FEATURES = 9


def rows_of(kind, sds, seed=0):
    """Rows (n, 9), responses and 60 clients, whose coefficients have these deviations."""
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(60), 25)
    X = rng.normal(size=(len(groups), N_FEATURES))
    effects = sds * rng.normal(size=(60, N_FEATURES + 1))
    predictors = effects[groups, 0] + np.sum(X * effects[groups, 1:], axis=1)
    if kind is PersonalizedPoissonRegression:
        return X, rng.poisson(np.exp(predictors)), groups
    noise = rng.logistic(size=(len(groups), 2))
    second = predictors + noise[:, 0] > 0
    return X, second + (second & (noise[:, 1] > 0)).astype(int), groups


@pytest.mark.parametrize("kind", [PersonalizedLogisticRegression, PersonalizedPoissonRegression])
@pytest.mark.parametrize("varying", [(), (0, 3), (3, 7), tuple(range(10))])
def test_the_maximum_is_that_of_a_search_over_all_variances(kind, varying, monkeypatch):
    sds = np.isin(np.arange(N_FEATURES + 1), varying) * 0.6
    X, y, groups = rows_of(kind, sds)
    model = kind(GaussianPrior(covariance_type="diag"), random="all")
    stepwise = model.fit(X, y, groups=groups)
    population, variances = stepwise.prior_.mean, np.diag(stepwise.prior_.covariance)
    value = stepwise.log_likelihood_
    monkeypatch.setattr(_population_fit, "MANY_VARIANCES", 100)
    at_once = model.fit(X, y, groups=groups)
    assert value == pytest.approx(at_once.log_likelihood_, abs=2e-3)
    np.testing.assert_allclose(variances, np.diag(at_once.prior_.covariance), atol=2e-3)
    np.testing.assert_allclose(population, at_once.prior_.mean, atol=2e-3)


def test_few_effects_are_searched(monkeypatch):
    """Two coefficients vary: no search has more than four effects, and few see all of them."""
    from pfl_sklearn.linear_model._mixed._marginal_likelihood import MarginalLikelihood

    seen, call = [], MarginalLikelihood.__call__

    def watched(self, population, factor, family=None):
        seen.append(factor.shape[1])
        return call(self, population, factor, family)

    monkeypatch.setattr(MarginalLikelihood, "__call__", watched)
    X, y, groups = rows_of(
        PersonalizedPoissonRegression, np.eye(N_FEATURES + 1)[[0, 3]].sum(axis=0)
    )
    PersonalizedPoissonRegression(random="all").fit(X, y, groups=groups)
    assert set(seen) <= {1, 2, 3, 4, N_FEATURES + 1}
    assert seen.count(N_FEATURES + 1) < len(seen) / 3


def test_a_search_that_ends_early_says_so():
    """Also where its last steps came near enough to ask which variances enter next."""
    X, y, groups = rows_of(PersonalizedPoissonRegression, 0.6 * np.ones(N_FEATURES + 1))
    model = PersonalizedPoissonRegression(random="all", max_iter=12)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(X, y, groups=groups)
    assert any(issubclass(each.category, ConvergenceWarning) for each in caught)


def test_no_variance_may_be_left():
    """Counts that scatter less than those of a Poisson distribution: all variances end at 0."""
    X, _, groups = rows_of(PersonalizedPoissonRegression, np.zeros(N_FEATURES + 1))
    y = np.round(np.exp(2 + 0.3 * X[:, 0])).astype(int)
    model = PersonalizedPoissonRegression(random="all").fit(X, y, groups=groups)
    assert not np.any(model.prior_.covariance)
    assert model.population_coef_[0] == pytest.approx(0.3, abs=0.02)
