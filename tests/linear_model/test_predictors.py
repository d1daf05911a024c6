"""Rows times their clients' coefficients: against a loop, and in little memory."""

import tracemalloc

import numpy as np
import pytest
from scipy.sparse import csr_array

from pfl_sklearn import PersonalizedLinearRegression, PersonalizedLogisticRegression
from pfl_sklearn.linear_model import _algebra
from pfl_sklearn.linear_model._algebra import (
    class_probabilities,
    client_predictors,
    likeliest_class,
)
from pfl_sklearn.priors import GaussianPrior


@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("cells", [1, 30, 1 << 20])
@pytest.mark.parametrize("form", [np.ascontiguousarray, np.asfortranarray, csr_array])
def test_predictors_are_those_of_a_loop(shape, cells, form, monkeypatch):
    monkeypatch.setattr(_algebra, "_GATHERED_COEFFICIENTS", cells)
    rng = np.random.default_rng(0)
    coef, intercept = rng.normal(size=(7, *shape, 4)), rng.normal(size=(7, *shape))
    population = rng.normal(size=(*shape, 4)), rng.normal(size=shape)
    X, codes = rng.normal(size=(25, 4)), rng.integers(-1, 7, 25)
    expected = [
        coef[code] @ x + intercept[code] if code >= 0 else population[0] @ x + population[1]
        for x, code in zip(X, codes, strict=True)
    ]
    got = client_predictors(form(X), codes, coef, intercept, *population)
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-14)
    nobody = client_predictors(form(X), np.full(25, -1), None, None, *population)
    np.testing.assert_allclose(nobody, X @ population[0].T + population[1], rtol=1e-12, atol=1e-14)


def test_probabilities_and_classes_of_logits():
    logits = np.array([-800.0, -1.0, 0.0, 2.0, 800.0])
    both = class_probabilities(logits)
    np.testing.assert_allclose(both, class_probabilities(np.column_stack([0 * logits, logits])))
    assert likeliest_class(np.array(["a", "b"]), logits).tolist() == [*"aaabb"]
    three = np.array([[0.0, 1.0, 1.0], [3.0, 1.0, 1.0]])
    assert likeliest_class(np.array(["a", "b", "c"]), three).tolist() == ["b", "a"]


@pytest.mark.parametrize("names", [np.arange, lambda m: [f"client {k}" for k in range(m)]])
def test_one_row_costs_no_copy_of_all_clients(names):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(5000, 10))
    groups = np.asarray(names(len(X)))
    prior = GaussianPrior(mean=0.0, covariance=1.0)
    linear = PersonalizedLinearRegression(prior, noise_variance=1.0)
    logistic = PersonalizedLogisticRegression(prior)
    calls = [
        linear.fit(X, X[:, 0], groups=groups).predict,
        lambda *args, **kwargs: linear.predict(*args, return_std=True, **kwargs),
        logistic.fit(X, X[:, 0] > 0, groups=groups).predict_proba,
        lambda *args, **kwargs: logistic.predict_proba(*args, integrate=True, **kwargs),
    ]
    for call in calls:
        call(X[:1], groups=groups[:1])
        tracemalloc.start()
        try:
            call(X[:1], groups=groups[:1])
            assert tracemalloc.get_traced_memory()[1] < 30_000
        finally:
            tracemalloc.stop()
