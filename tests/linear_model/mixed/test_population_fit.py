"""PersonalizedLogisticRegression where the data tell too little: spread, centring, rank, advice."""

import numpy as np
import pytest
from scipy.special import expit
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss

from pfl_sklearn.linear_model import (
    PersonalizedLogisticRegression,
    PersonalizedPoissonRegression,
    SeparationWarning,
)
from pfl_sklearn.linear_model._mixed import _laplace as laplace
from pfl_sklearn.linear_model._mixed._marginal_maximum import _Descent, _newton_distance
from pfl_sklearn.priors import GaussianPrior
from tests.helpers.slow import slow

FULL = GaussianPrior(covariance_type="full")
SPHERICAL = GaussianPrior(covariance_type="spherical", centered=False)


def fit(rows, **params):
    X, y, groups = rows
    model = PersonalizedLogisticRegression(**{"random": "all", **params})
    return model.fit(X, y, groups=groups)


def simulate(m, n, d=2, sd=1.0, seed=0):
    """Rows of m clients whose coefficients are N((0, 1, 1, ...), sd^2)."""
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(m), n)
    X = rng.normal(size=(m * n, d))
    theta = np.append(0, np.ones(d)) + sd * rng.normal(size=(m, d + 1))
    odds = theta[groups, 0] + np.sum(X * theta[groups, 1:], axis=1)
    return X, (rng.random(m * n) < expit(odds)).astype(int), groups


@pytest.mark.parametrize("covariance_type", ["spherical", "full"])
def test_fewer_rows_than_coefficients_do_not_run_away(covariance_type):
    """Standard deviation 1; it came out as 16, and the held-out loss as 2.3."""
    X, y, groups = simulate(400, 4)
    train = np.tile([True, True, False, False], 400)
    prior = GaussianPrior(covariance_type=covariance_type)
    with pytest.warns(SeparationWarning, match=r"\b10 logits.*\b1\b"):
        model = fit((X[train], y[train], groups[train]), prior=prior)
    sds = np.sqrt(np.diag(model.prior_.covariance))
    assert ((sds > 0.7) & (sds < 1.5)).all()
    np.testing.assert_allclose(model.population_coef_, 1, atol=0.4)
    loss = log_loss(y[~train], model.predict_proba(X[~train], groups=groups[~train]))
    everybody = LogisticRegression(C=np.inf).fit(X[train], y[train])
    assert loss < log_loss(y[~train], everybody.predict_proba(X[~train])) - 0.01


def test_the_held_fit_maximizes_the_criterion_with_the_stated_prior():
    X, y, groups = simulate(400, 4)
    train = np.tile([True, True, False, False], 400)
    rows = X[train], y[train], groups[train]
    with pytest.warns(SeparationWarning):
        model = fit(rows, prior=SPHERICAL)
    square = 1 + np.mean(rows[0] ** 2, axis=0).sum()

    def held(sd):
        known = fit(rows, prior=GaussianPrior(covariance=sd**2))
        return known.log_likelihood_ - 0.5 * square * sd**2

    sd = model.prior_.covariance[0, 0] ** 0.5
    values = [held(sd * factor) for factor in (0.97, 1.0, 1.03)]
    assert np.argmax(values) == 1


@pytest.mark.slow
def test_one_client_with_two_classes_among_pure_ones():
    groups = np.repeat(np.arange(40), 8)
    y = groups % 2
    y[0] = 1
    X = np.random.default_rng(0).normal(size=(320, 1))
    with pytest.warns(SeparationWarning, match=r"\b10 logits.*\b1\b"):
        model = fit((X, y, groups), random="intercept")
    assert 2 < model.prior_.covariance[0, 0] ** 0.5 < 8


@pytest.mark.slow
def test_a_large_spread_that_the_data_support_is_left_alone():
    """13.9 logits between clients, with 100 rows each."""
    rows = simulate(40, 100, sd=8.0)
    model = fit(rows)
    sd = model.prior_.covariance[0, 0] ** 0.5
    assert sd == pytest.approx(8, rel=0.2)
    best = model.log_likelihood_
    for factor in (0.97, 1.03):
        assert fit(rows, prior=GaussianPrior(covariance=(factor * sd) ** 2)).log_likelihood_ < best


@pytest.mark.parametrize(
    ("covariance_type", "fit_intercept", "n_classes"),
    [("spherical", False, 2), ("diag", True, 3), ("full", True, 2)],
)
def test_known_mean_and_unknown_covariance(covariance_type, fit_intercept, n_classes):
    X, y, groups = simulate(40, 10)
    y = y + (n_classes > 2) * (X[:, 0] > 0.5)
    params = {"fit_intercept": fit_intercept}
    prior = GaussianPrior(mean=0.0, covariance_type=covariance_type)
    model = fit((X, y, groups), prior=prior, **params)
    assert not model.population_coef_.any()
    assert not model.population_coef_std_.any()
    for factor in (0.95, 1.05):
        other = GaussianPrior(mean=0.0, covariance=factor * model.prior_.covariance)
        assert fit((X, y, groups), prior=other, **params).log_likelihood_ < model.log_likelihood_


@pytest.mark.parametrize(
    ("n_classes", "one_client", "random", "prior", "shift"),
    [
        (2, False, "intercept", GaussianPrior(), 1e7),
        (3, True, "all", FULL, 1e7),
        *slow([(2, False, "all", FULL, 1e4), (3, False, "all", FULL, 1e7)]),
    ],
)
def test_columns_far_from_zero(n_classes, one_client, random, prior, shift):
    X, y, groups = simulate(40, 12)
    y = y + (n_classes > 2) * (X[:, 0] > 0.5)
    groups = 0 * groups if one_client else groups
    near = fit((X, y, groups), random=random, prior=prior)
    far = fit((X + np.array([shift, 0]), y, groups), random=random, prior=prior)
    np.testing.assert_allclose(far.population_coef_, near.population_coef_, rtol=1e-4)
    np.testing.assert_allclose(far.population_coef_std_, near.population_coef_std_, rtol=1e-4)
    np.testing.assert_allclose(far.coef_, near.coef_, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(far.coef_std_, near.coef_std_, rtol=1e-3)
    shifted = near.intercept_ - shift * far.coef_[..., 0]
    np.testing.assert_allclose(far.intercept_, shifted, atol=1e-3)
    assert far.log_likelihood_ == pytest.approx(near.log_likelihood_, abs=1e-5)
    if not one_client and shift == 1e7:  # 16 - 7 digits are left, where its square left 2
        np.testing.assert_allclose(far.coef_std_, near.coef_std_, rtol=1e-7)
        np.testing.assert_allclose(far.shrinkage_, near.shrinkage_, rtol=1e-6)
    if not one_client and shift < 1e5:
        expected = near.predict_proba(X, groups=groups, integrate=True)
        got = far.predict_proba(X + np.array([shift, 0]), groups=groups, integrate=True)
        np.testing.assert_allclose(got, expected, atol=1e-4)


@pytest.mark.parametrize(("n_classes", "one_client"), [(3, False), (2, True)])
def test_what_is_not_identified_has_no_standard_error(n_classes, one_client):
    X, y, groups = simulate(30, 10)
    y = y + (n_classes > 2) * (X[:, 0] > 0.5)
    groups = 0 * groups if one_client else groups
    plain = fit((X, y, groups), random="intercept", tol=1e-6)
    none = np.zeros(len(X))
    with pytest.warns(UserWarning, match="'x0', 'x2', 'x3' are NaN"):
        model = fit((np.column_stack([X, X[:, 0], none]), y, groups), random="intercept", tol=1e-6)
    stds = model.population_coef_std_
    assert np.isnan(stds[..., [0, 2, 3]]).all()
    np.testing.assert_allclose(stds[..., 1], plain.population_coef_std_[..., 1], rtol=1e-5)
    np.testing.assert_allclose(
        model.population_intercept_std_, plain.population_intercept_std_, rtol=1e-5
    )
    errors = model.summary()["std_error"]["fixed"].to_numpy().reshape(-1, 5)
    np.testing.assert_array_equal(np.isnan(errors), np.tile([0, 1, 0, 1, 1], (len(errors), 1)))
    with pytest.warns(UserWarning, match="'intercept', 'x2' are NaN, because .* 'x2' is 3.3:"):
        constant = fit((np.column_stack([X, none + 3.3]), y, groups), random="intercept", tol=1e-6)
    assert np.isnan(constant.population_coef_std_[..., 2]).all()
    assert np.isnan(constant.population_intercept_std_).all()
    np.testing.assert_allclose(
        constant.population_coef_std_[..., :2], plain.population_coef_std_, rtol=1e-5
    )


@pytest.mark.slow
def test_advice_on_rounding_is_not_to_iterate(monkeypatch):
    for limit in ("_PATIENCE", "MAX_NEWTON"):  # no table is known whose modes are not found
        monkeypatch.setattr(laplace, limit, 2)
    with pytest.warns(
        ConvergenceWarning, match=r"PersonalizedLogisticRegression.*rounding.*covariance"
    ) as caught:
        fit(simulate(6, 10), prior=GaussianPrior(covariance=1e4))
    assert not any("max_iter" in str(w.message) for w in caught)


@pytest.mark.slow
def test_a_step_from_afar_loses_no_modes():
    """The log-likelihood came out as -8e6: the search for modes stopped halfway."""
    with pytest.warns(ConvergenceWarning, match="max_iter"):
        model = fit(simulate(10, 10), prior=GaussianPrior(covariance=1e10), max_iter=1)
    assert model.log_likelihood_ > -700


def test_the_prior_of_a_single_client_is_refused_with_the_reason():
    X, y, groups = simulate(30, 10)
    single = fit((X, y, 0 * groups))
    with pytest.raises(ValueError, match=r"covariance.*GaussianPrior.*NaN.*None"):
        fit((X, y, groups), prior=single.prior_)


def test_the_intercepts_of_pure_clients_of_several_classes_follow_the_prior():
    X, _, groups = simulate(30, 10)
    with pytest.warns(SeparationWarning, match=r"two classes.*\b2\.5\b.*sets their size"):
        fit((X, groups % 3, groups), random="intercept")
    with pytest.warns(SeparationWarning) as caught:
        fit((X, groups % 2, groups), random="intercept")
    assert not any("their size" in str(w.message) for w in caught)


def test_a_constant_column_is_no_obstacle_to_one_common_variance():
    X, y, groups = simulate(30, 10)
    constant = np.column_stack([X, np.ones(len(X))])
    with pytest.warns(UserWarning, match="'x2' is 1:") as caught:
        model = fit((constant, y, groups), prior=SPHERICAL)
    assert len(caught) == 1
    assert np.ptp(np.diag(model.prior_.covariance)) == 0
    with pytest.raises(ValueError, match=r"'x2'.*random"):
        fit((constant, y, groups), prior=GaussianPrior(covariance_type="low_rank"))


def test_weights_that_no_search_can_follow_are_refused():
    """With weights of 1e12 the standard deviation between clients came out as 0.2 for 6.7."""
    X, y, groups = simulate(30, 8)
    model = PersonalizedLogisticRegression(random="intercept")
    for weights, named in (
        (np.full(len(y), 1e-12), "sum of 2.4e-10"),
        (np.where(groups == 3, 1e12, 1.0), "largest weight of 1e[+]12"),
    ):
        with pytest.raises(ValueError, match=named):
            model.fit(X, y, groups=groups, sample_weight=weights)
        assert not hasattr(model, "coef_")
    shares = np.random.default_rng(0).dirichlet(np.ones(len(y)))  # that sum to 1
    model.fit(X, y, groups=groups, sample_weight=shares)
    assert np.isfinite(model.coef_).all()
    model.fit(X, y, groups=groups, sample_weight=np.where(np.arange(len(y)) == 0, 1e6, 1.0))
    assert np.isfinite(model.coef_).all()


def wide_counts():
    """Few rows of clients that are far apart: the likelihood is flat in their spread."""
    rng = np.random.default_rng(34)
    groups = np.repeat(np.arange(21), 2)
    X = rng.normal(size=(42, 2)) * [1, 0.3]
    return X, rng.poisson(np.exp(np.clip(4.4 * rng.normal(size=21)[groups] - 1, -9, 6))), groups


@pytest.mark.parametrize("quadrature", ["auto", "laplace"])
def test_the_end_of_a_search_is_as_near_as_its_tolerance_says(quadrature):
    """In the units of the start slopes were small where the maximum was far: a spread of 80."""
    X, y, groups = wide_counts()

    def found(**params):
        model = PersonalizedPoissonRegression(random="intercept", quadrature=quadrature, **params)
        return model.fit(X, y, groups=groups).log_likelihood_

    best = found(tol=1e-7, max_iter=1000)
    # So many standard errors away the log-likelihood is lower by half their square.
    assert best - found(tol=1e-2) < 1e-3
    assert best - found() < 1e-6


def test_the_distance_to_the_minimum_is_newtons():
    """Of a quadratic function, whose curvatures differ from those of the metric."""
    rng = np.random.default_rng(0)
    root = rng.normal(size=(4, 4)) * [1, 1, 0.1, 0.01]
    hessian, start = root.T @ root + 1e-6 * np.eye(4), rng.normal(size=4)

    def objective(point):
        return 0.5 * point @ hessian @ point, hessian @ point

    for metric in (np.eye(4), np.linalg.cholesky(np.linalg.inv(hessian))):
        descent = _Descent(start, *objective(start), metric, 0)
        exact = np.sqrt(start @ hessian @ start)
        assert _newton_distance(objective, descent) == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize("quadrature", ["auto", *slow([5])])
@pytest.mark.slow
def test_divergence_is_seen_whatever_the_points(quadrature):
    """Nearly pure clients: 5 points had a variance of 775, and 15 one of 932, without a word."""
    groups = np.repeat(np.arange(63), 4)
    y = np.concatenate([np.ones(8), np.zeros(240), [0, 1, 0, 1]]).astype(int)
    with pytest.warns(SeparationWarning, match="differences between clients diverged"):
        model = fit((np.zeros((252, 1)), y, groups), random="intercept", quadrature=quadrature)
    assert 7 < model.prior_.covariance[0, 0] < 8.5
