"""Gaussian priors of centred columns: neither the unit nor the zero of a feature matters."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings, strategies as st
from sklearn.base import clone

from pfl_sklearn.linear_model import PersonalizedLinearRegression, PersonalizedLogisticRegression
from pfl_sklearn.priors import GaussianPrior

MODELS = [
    PersonalizedLinearRegression(unseen="population", uncertainty="plug_in"),
    PersonalizedLogisticRegression(random="all", unseen="population"),
]
every = pytest.mark.parametrize("model", MODELS, ids=["linear", "logistic"])
N, M = 400, 40


def make_rows(model, seed=0, d=2):
    """Clients whose intercepts and slopes differ, and a table for the model."""
    rng = np.random.default_rng(seed)
    X, groups = rng.normal(size=(N, d)), np.arange(N) % M
    theta = rng.normal(size=(M, d + 1)) * np.linspace(1, 0.3, d + 1) + np.arange(d + 1)
    response = theta[groups, 0] + np.sum(X * theta[groups, 1:], axis=1)
    if isinstance(model, PersonalizedLinearRegression):
        return X, response + 0.5 * rng.normal(size=N), groups
    return X, rng.random(N) < 1 / (1 + np.exp(-response)), groups


def predicted(model, X, groups):
    if hasattr(model, "predict_proba"):
        return model.predict_proba(X, groups=groups, integrate=False)[:, 1]
    return model.predict(X, groups=groups)


@pytest.mark.parametrize(
    ("model", "covariance_type", "mean"),
    [
        (MODELS[0], "diag", False),
        (MODELS[0], "full", True),
        (MODELS[1], "diag", False),
        (MODELS[1], "full", True),
        pytest.param(
            clone(MODELS[0]).set_params(uncertainty="full"), "diag", False, marks=pytest.mark.slow
        ),
    ],
    ids=["linear", "linear, known mean", "logistic", "logistic, known mean", "averaged errors"],
)
def test_units_and_zeros_do_not_matter(model, covariance_type, mean):
    X, y, groups = make_rows(model)
    unit, zero = np.array([1440.0, 1e-3]), np.array([2e5, -7.0])
    shifted = X * unit + zero
    known = {"mean": [0.1, 1.0, 2.0]} if mean else {}
    prior = GaussianPrior(covariance_type=covariance_type, **known)
    first = clone(model).set_params(prior=prior).fit(X, y, groups=groups)
    if mean:
        slopes = np.array([1.0, 2.0]) / unit
        prior.set_params(mean=[0.1 - slopes @ zero, *slopes])
    second = clone(model).set_params(prior=prior).fit(shifted, y, groups=groups)
    difference = predicted(first, X, groups) - predicted(second, shifted, groups)
    assert np.abs(difference).max() < 1e-6 * np.std(y)
    assert second.log_likelihood_ == pytest.approx(
        first.log_likelihood_
        - (0 if mean or hasattr(model, "predict_proba") else np.log(unit).sum()),
        abs=1e-6,
    )
    new = predicted(first, X, groups + M) - predicted(second, shifted, groups + M)
    assert np.abs(new).max() < 1e-6 * np.std(y)
    # What they share in the units of the data.
    back = np.array([[1, *(-zero / unit)], [0, 1 / unit[0], 0], [0, 0, 1 / unit[1]]])
    np.testing.assert_allclose(
        second.prior_.covariance, back @ first.prior_.covariance @ back.T, rtol=1e-4
    )
    if not mean:
        assert first.population_coef_std_ / unit == pytest.approx(
            second.population_coef_std_, rel=1e-5
        )


@settings(max_examples=4, deadline=None)
@given(
    st.integers(0, 1000),
    st.floats(-1e5, 1e5),
    st.floats(1e-4, 1e4),
    st.sampled_from(["spherical", "diag", "low_rank"]),
    st.booleans(),
)
def test_zeros_do_not_matter_to_any_shape(seed, zero, unit, covariance_type, weighted):
    """Nor units, where all features have the same."""
    model = PersonalizedLinearRegression(GaussianPrior(covariance_type=covariance_type))
    X, y, groups = make_rows(model, seed)
    weights = np.random.default_rng(seed).uniform(0.5, 2, N) if weighted else None
    if covariance_type != "diag":
        unit = 1.0
    shifted = X * unit + zero
    first = clone(model).fit(X, y, groups=groups, sample_weight=weights)
    second = clone(model).fit(shifted, y, groups=groups, sample_weight=weights)
    difference = predicted(first, X, groups) - predicted(second, shifted, groups)
    assert np.abs(difference).max() < 1e-4 * y.std()


@every
def test_columns_that_are_constant_within_every_client_stay_common(model):
    X, y, groups = make_rows(model)
    level = np.random.default_rng(1).normal(size=M)
    wide = np.column_stack([X, level[groups]])
    fitted = clone(model).fit(wide, y, groups=groups)
    assert not fitted.prior_.covariance[3].any()
    assert np.ptp(fitted.coef_[:, 2]) == 0
    assert np.isfinite(fitted.population_coef_std_).all()
    named = clone(model).set_params(random=["intercept", 0, 1]).fit(wide, y, groups=groups)
    assert named.log_likelihood_ == pytest.approx(fitted.log_likelihood_, abs=1e-5)
    np.testing.assert_allclose(
        predicted(named, wide, groups), predicted(fitted, wide, groups), atol=1e-4
    )
    # Named, it varies as it was asked to.
    asked = clone(model).set_params(random=["intercept", 0, 1, 2]).fit(wide, y, groups=groups)
    assert asked.log_likelihood_ >= fitted.log_likelihood_ - 1e-6
    # It goes back in as known, and so does a fit to other rows, where it varies.
    other = clone(model).set_params(prior=fitted.prior_)
    other.fit(wide[: N // 2], y[: N // 2], groups=groups[: N // 2])
    assert not other.prior_.covariance[3].any()


@every
def test_a_column_of_one_value_stays_common(model):
    X, y, groups = make_rows(model)
    with pytest.warns(UserWarning, match="'intercept', 'x2' are NaN, because .* 'x2' is 1:"):
        fitted = clone(model).fit(np.column_stack([X, np.ones(N)]), y, groups=groups)
    without = clone(model).fit(X, y, groups=groups)
    np.testing.assert_allclose(
        predicted(fitted, np.column_stack([X, np.ones(N)]), groups),
        predicted(without, X, groups),
        atol=1e-5,
    )
    assert np.isnan(fitted.population_coef_std_[2])


@every
def test_without_centring_the_zero_matters(model):
    X, y, groups = make_rows(model)
    prior = GaussianPrior(covariance_type="diag", centered=False)
    first = clone(model).set_params(prior=prior).fit(X, y, groups=groups)
    second = clone(model).set_params(prior=prior).fit(X + 20.0, y, groups=groups)
    assert not first.prior_.covariance[~np.eye(3, dtype=bool)].any()
    difference = predicted(first, X, groups) - predicted(second, X + 20.0, groups)
    assert np.abs(difference).max() > 0.01


@every
def test_the_summary_explains_itself(model):
    X, y, groups = make_rows(model)
    frame = pd.DataFrame(X * [1, 10] + [3, 40], columns=["dose", "age"])
    fitted = clone(model).fit(frame, y, groups=groups)
    between = fitted.summary().loc["between"]
    row = np.array([1.0, *frame.mean()])
    at_means = between.loc["response at the features' means"]
    assert at_means["estimate"] == pytest.approx(row @ fitted.prior_.covariance @ row, rel=1e-9)
    assert at_means["sd"] ** 2 == pytest.approx(at_means["estimate"])
    # Slopes are independent of it, and one of the other.
    slopes = fitted.prior_.covariance[1:]
    np.testing.assert_allclose(slopes @ row, 0, atol=1e-9 * np.abs(slopes).max())
    assert ("intercept, dose" in between.index) == (fitted.prior_.covariance[1, 1] > 0)
    known = clone(model).set_params(prior=GaussianPrior(covariance=1.0)).fit(X, y, groups=groups)
    assert "response at the features' means" not in known.summary().loc["between"].index


@every
def test_columns_of_zeros_alone(model):
    """Nothing can vary, and nothing needs to."""
    _, y, groups = make_rows(model)
    fitted = clone(model).set_params(fit_intercept=False).fit(np.zeros((N, 2)), y, groups=groups)
    assert not fitted.coef_.any()
    assert np.isfinite(fitted.prior_.covariance).all()
