"""PersonalizedLogisticRegression: limits, published fits, quadrature, real data, bad input."""

import warnings

import numpy as np
import pandas as pd
import pytest
from scipy.integrate import quad
from scipy.optimize import minimize, minimize_scalar
from scipy.special import expit, logsumexp, softmax
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from pfl_sklearn import SingleClientWarning, UnseenClientsWarning
from pfl_sklearn.linear_model import (
    PersonalizedLogisticRegression,
    PPSGDClassifier,
    SeparationWarning,
)
from pfl_sklearn.linear_model._mixed._families import helmert_contrasts
from pfl_sklearn.linear_model._mixed._predictions import PredictorLaw, averaged_probabilities
from pfl_sklearn.priors import BetaPrior, GaussianPrior
from tests.helpers.exact_posterior import client_posterior
from tests.helpers.slow import slow


def make_clients(m=30, n=12, d=2, n_classes=2, between=1.0, seed=0):
    """Rows of clients whose intercept and slopes are N(population, between^2)."""
    rng = np.random.default_rng(seed)
    groups = rng.permutation(np.repeat(np.arange(m), rng.integers(n // 2, n + n // 2 + 1, m)))
    X = rng.normal(size=(len(groups), d))
    theta = rng.normal(size=(n_classes, d + 1)) + between * rng.normal(size=(m, n_classes, d + 1))
    design = np.column_stack([np.ones(len(X)), X])
    logits = np.einsum("np,nkp->nk", design, theta[groups])
    y = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
    return X, y, groups


def fit(rows, **params):
    X, y, groups = rows
    model = PersonalizedLogisticRegression(**{"random": "all", **params})
    return model.fit(X, y, groups=groups)


def sklearn_fit(X, y, weights=None, **params):
    model = LogisticRegression(tol=1e-10, max_iter=10_000, solver="newton-cholesky", **params)
    return model.fit(X, y, sample_weight=weights)


def centred(values):
    return values - values.mean(axis=0)


@pytest.mark.parametrize("n_classes", [2, 3])
@pytest.mark.parametrize(("fit_intercept", "weighted"), [(True, False), (False, True)])
def test_one_client_is_logistic_regression_without_penalty(n_classes, fit_intercept, weighted):
    X, y, _ = make_clients(n_classes=n_classes)
    weights = np.random.default_rng(1).random(len(y)) if weighted else None
    model = PersonalizedLogisticRegression(fit_intercept=fit_intercept)
    with pytest.warns(SingleClientWarning):
        model.fit(X, y, sample_weight=weights)
    peer = sklearn_fit(X, y, weights, C=np.inf, fit_intercept=fit_intercept)
    coef, intercept = peer.coef_[0], peer.intercept_[0]
    if n_classes > 2:
        coef, intercept = centred(peer.coef_), centred(peer.intercept_)
    np.testing.assert_allclose(model.coef_[0], coef, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(model.intercept_[0], intercept, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(model.population_coef_, model.coef_[0])
    np.testing.assert_array_equal(model.coef_std_[0], model.population_coef_std_)
    p = model.predict_proba(X, integrate=False)
    np.testing.assert_allclose(p, peer.predict_proba(X), atol=1e-6)
    assert np.isnan(model.prior_.covariance).all()
    assert not model.shrinkage_.any()
    log_likelihood = np.log(p[np.arange(len(y)), y])
    expected = log_likelihood.sum() if weights is None else weights @ log_likelihood
    assert model.log_likelihood_ == pytest.approx(expected)


@pytest.mark.parametrize("n_classes", [2, 3])
@pytest.mark.parametrize("covariance", [0.0, [1e-16, 0.0, 0.0]])
def test_no_variance_is_the_pooled_model(n_classes, covariance):
    X, y, groups = make_clients(n_classes=n_classes)
    model = fit((X, y, groups), prior=GaussianPrior(covariance=covariance))
    peer = sklearn_fit(X, y, C=np.inf)
    expected = peer.coef_[0] if n_classes == 2 else centred(peer.coef_)
    np.testing.assert_allclose(model.population_coef_, expected, atol=1e-5)
    np.testing.assert_allclose(model.coef_ - expected, 0, atol=1e-5)
    np.testing.assert_allclose(model.shrinkage_, 1)
    np.testing.assert_allclose(model.coef_std_ - model.population_coef_std_, 0, atol=1e-7)


@pytest.mark.parametrize("n_classes", [2, 3])
@pytest.mark.parametrize(("n", "d"), [(40, 2), (6, 9)], ids=["primal", "dual"])
def test_known_prior_around_zero_is_ridge_per_client(n_classes, n, d):
    (X, y, groups), variance = make_clients(8, n, d, n_classes), 0.25
    prior = GaussianPrior(mean=0.0, covariance=variance)
    model = fit((X, y, groups), prior=prior, fit_intercept=False)
    fitted = 0
    for client in range(8):
        members = groups == client
        if len(np.unique(y[members])) < n_classes:
            continue
        peer = sklearn_fit(X[members], y[members], C=variance, fit_intercept=False)
        expected = peer.coef_[0] if n_classes == 2 else peer.coef_
        np.testing.assert_allclose(model.coef_[client], expected, rtol=1e-5, atol=1e-6)
        fitted += 1
    assert fitted >= 3
    assert not model.population_coef_.any()
    assert not model.population_coef_std_.any()


def test_known_mean_and_full_covariance_by_brute_force():
    X, y, groups = make_clients(5, 10, 1)
    mean, covariance = np.array([0.5, -1.0]), np.array([[1.0, 0.6], [0.6, 0.5]])
    model = fit((X, y, groups), prior=GaussianPrior(mean, covariance))
    precision = np.linalg.inv(covariance)
    for client in range(5):
        members = groups == client
        design = np.column_stack([np.ones(members.sum()), X[members]])
        signs = 2 * y[members] - 1

        def minus(theta, design=design, signs=signs):
            remaining = theta - mean
            return (
                np.logaddexp(0, -signs * (design @ theta)).sum()
                + remaining @ precision @ remaining / 2
            )

        expected = minimize(minus, mean, tol=1e-12).x
        got = np.append(model.intercept_[client], model.coef_[client])
        np.testing.assert_allclose(got, expected, atol=1e-5)
        p = expit(design @ got)
        inverse = np.linalg.inv(precision + (design.T * p * (1 - p)) @ design)
        stds = np.append(model.intercept_std_[client], model.coef_std_[client])
        np.testing.assert_allclose(stds, np.sqrt(np.diag(inverse)), rtol=1e-6)
        assert model.shrinkage_[client, 0] == pytest.approx(inverse[1, 1] / 0.5)


def test_stds_count_the_uncertainty_of_the_population():
    """Against dense matrices at the fitted values: posterior, and what beta's error adds."""
    X, y, groups = make_clients(6, 15, 2, between=2.0, seed=1)
    model = fit((X, y, groups), random=["intercept", 1], uncertainty="plug_in")
    design = np.column_stack([np.ones(len(X)), X])
    theta = np.column_stack([model.intercept_, model.coef_])
    between = np.zeros((3, 3))
    between[np.ix_([0, 2], [0, 2])] = model.prior_.covariance
    p = expit(np.einsum("np,np->n", design, theta[groups]))
    inverses, information = [], np.zeros((3, 3))
    for client in range(6):
        members = groups == client
        x, weight = design[members], np.diag((p * (1 - p))[members])
        inverses.append(np.linalg.inv(np.linalg.inv(weight) + x @ between @ x.T))
        information += x.T @ inverses[-1] @ x
    error = np.linalg.inv(information)
    np.testing.assert_allclose(model.population_covariance_, error, rtol=1e-6)
    for client, inverse in enumerate(inverses):
        x = design[groups == client]
        shifted = np.eye(3) - between @ x.T @ inverse @ x
        posterior = between - between @ x.T @ inverse @ x @ between + shifted @ error @ shifted.T
        stds = np.append(model.intercept_std_[client], model.coef_std_[client])
        np.testing.assert_allclose(stds, np.sqrt(np.diag(posterior)), rtol=1e-6)
    assert (model.shrinkage_[:, 0] == 1).all()
    assert (model.shrinkage_[:, 1] < 1).all()


@pytest.mark.parametrize(("n", "d"), [(20, 1), (4, 4)], ids=["primal", "dual"])
def test_stds_of_several_classes(n, d):
    """Against dense matrices with a deviation per class, centred over the classes afterwards."""
    X, y, groups = make_clients(4, n, d, 3)
    variances = np.arange(1.0, d + 2)
    model = fit((X, y, groups), prior=GaussianPrior(mean=0.0, covariance=variances))
    p = model.predict_proba(X, groups=groups, integrate=False)
    centring = np.kron(np.eye(3) - 1 / 3, np.eye(d + 1))
    for client in range(4):
        precision = np.kron(np.eye(3), np.diag(1 / variances))
        for x, pj in zip(X[groups == client], p[groups == client], strict=True):
            row = np.append(1, x)
            precision += np.kron(np.diag(pj) - np.outer(pj, pj), np.outer(row, row))
        posterior = np.diag(centring @ np.linalg.inv(precision) @ centring).reshape(3, d + 1)
        np.testing.assert_allclose(model.intercept_std_[client] ** 2, posterior[:, 0], rtol=1e-6)
        np.testing.assert_allclose(model.coef_std_[client] ** 2, posterior[:, 1:], rtol=1e-6)
        share = posterior[:, 1:] / (2 / 3 * variances[1:])
        np.testing.assert_allclose(model.shrinkage_[client], share, rtol=1e-6)


def contraception(data_home):
    table = pd.read_csv(data_home / "contraception.csv.gz")
    X = pd.DataFrame({"age": table.age, "age2": table.age**2})
    X["urban"] = (table.urban == "Y").astype(float)
    for level in ("1", "2", "3+"):
        X[f"livch{level}"] = (table.livch == level).astype(float)
    return X, table.use.to_numpy(), table.district.to_numpy()


def verbal_aggression(data_home):
    table = pd.read_csv(data_home / "verbagg.csv.gz")
    X = np.column_stack(
        [
            table.Anger - 20,
            table.Gender == "M",
            table.btype == "scold",
            table.btype == "shout",
            table.situ == "self",
            table["mode"] == "want",
        ]
    ).astype(float)
    return X, table.r2.to_numpy(), table.id.to_numpy()


def test_published_fit_of_contraception(data_home):
    """lme4's glmer(use ~ age + I(age^2) + ch + urban + (1 | district)), Laplace."""
    X, y, groups = contraception(data_home)
    children = X[["livch1", "livch2", "livch3+"]].sum(axis=1)
    X = X[["age", "age2", "urban"]].assign(ch=children)
    model = fit((X, y, groups), random="intercept", quadrature="laplace", uncertainty="plug_in")
    assert -2 * model.log_likelihood_ == pytest.approx(2373.18581907321, abs=2e-4)
    assert model.prior_.covariance[0, 0] ** 0.5 == pytest.approx(0.473985228740739, rel=1e-4)
    coefficients = np.append(model.population_intercept_, model.population_coef_)
    published = [-1.00637368953914, 0.00625611018864605, -0.00463527887823825, 0.692921941313297]
    np.testing.assert_allclose(coefficients, [*published, 0.860382098849009], rtol=1e-4)
    stds = np.append(model.population_intercept_std_, model.population_coef_std_)
    np.testing.assert_allclose(stds, [0.167892, 0.007840, 0.000716, 0.119668, 0.147353], rtol=1e-3)
    standardized = [-1.56655252109295, -0.0451095377205166, 0.453409972754753, 0.35265189198274]
    effects = (model.intercept_ - model.population_intercept_) / 0.473985228740739
    np.testing.assert_allclose(effects[:4], standardized, rtol=1e-3)


def quadrature(X, y, codes, coefficients, std, n_nodes):
    """Log marginal likelihood of a random intercept by adaptive Gauss-Hermite quadrature."""
    offset, m = coefficients[0] + X @ coefficients[1:], codes.max() + 1
    mode = np.zeros(m)
    for _ in range(50):
        p = expit(offset + std * mode[codes])
        curvature = 1 + std**2 * np.bincount(codes, p * (1 - p), m)
        mode += (std * np.bincount(codes, y - p, m) - mode) / curvature
    nodes, weights = np.polynomial.hermite_e.hermegauss(n_nodes)
    effects = mode[:, None] + nodes / np.sqrt(curvature)[:, None]
    total = 0.5 * (nodes**2 - effects**2)
    for k in range(n_nodes):
        signed = (2 * y - 1) * (offset + std * effects[codes, k])
        total[:, k] -= np.bincount(codes, np.logaddexp(0, -signed), m)
    values = logsumexp(total, axis=1, b=weights / np.sqrt(2 * np.pi))
    return np.sum(values - 0.5 * np.log(curvature))


@pytest.mark.parametrize(
    ("table", "close"), [(contraception, 0.01), (verbal_aggression, 0.006)], ids=["60", "316"]
)
def test_laplace_against_adaptive_quadrature(data_home, table, close):
    """One node is Laplace; with 15 the standard deviation is larger by 0.7 % and 0.5 %."""
    X, y, groups = table(data_home)
    model = fit((X, y, groups), random="intercept", quadrature="laplace")
    X, y = np.asarray(X), (y == "Y").astype(float)
    codes = np.searchsorted(model.clients_, groups)
    coefficients = np.append(model.population_intercept_, model.population_coef_)
    std = model.prior_.covariance[0, 0] ** 0.5
    laplace = quadrature(X, y, codes, coefficients, std, 1)
    assert model.log_likelihood_ == pytest.approx(laplace, abs=1e-6)
    best = minimize_scalar(
        lambda s: -quadrature(X, y, codes, coefficients, s, 15),
        bracket=(std, 1.02 * std),
        options={"maxiter": 12},
    )
    assert 0 < best.x / std - 1 < close
    assert 0 < -best.fun - laplace < 2.5
    auto = fit((X, y, groups), random="intercept")
    coefficients = np.append(auto.population_intercept_, auto.population_coef_)
    std = auto.prior_.covariance[0, 0] ** 0.5
    assert auto.log_likelihood_ == pytest.approx(
        quadrature(X, y, codes, coefficients, std, 15), abs=1e-6
    )
    assert auto.log_likelihood_ > -best.fun


@pytest.mark.slow
def test_covariance_of_a_simulation_is_recovered():
    rng = np.random.default_rng(0)
    m, n = 800, 30
    groups = np.repeat(np.arange(m), n)
    covariance = np.array([[1.0, -0.5], [-0.5, 0.8]])
    theta = np.array([0.5, 1.0]) + rng.multivariate_normal(np.zeros(2), covariance, m)
    X = rng.normal(size=(m * n, 2))
    odds = theta[groups, 0] + theta[groups, 1] * X[:, 0] - X[:, 1]
    y = rng.random(m * n) < expit(odds)
    prior = GaussianPrior(covariance_type="full")
    model = fit((X, y, groups), random=["intercept", 0], prior=prior)
    np.testing.assert_allclose(model.prior_.covariance, covariance, atol=0.11)
    np.testing.assert_allclose(model.prior_.mean, [0.5, 1.0], atol=0.12)
    assert model.population_coef_[1] == pytest.approx(-1, abs=0.06)
    spread = np.column_stack([model.intercept_, model.coef_[:, 0]]) - theta
    stds = np.column_stack([model.intercept_std_, model.coef_std_[:, 0]])
    assert np.mean(np.abs(spread) < 1.645 * stds) == pytest.approx(0.9, abs=0.02)


@pytest.mark.parametrize(
    ("covariance_type", "n_classes"),
    [("diag", 2), *slow([("spherical", 2), ("low_rank", 2), ("full", 3)])],
)
def test_every_shape_is_fitted_to_its_maximum(covariance_type, n_classes):
    """No step from the estimate, in any direction that its shape allows, is a gain."""
    rows = make_clients(40 if n_classes == 2 else 25, 12, 2, n_classes, seed=1)
    prior = GaussianPrior(covariance_type=covariance_type, centered=False)
    model = fit(rows, prior=prior)
    covariance = model.prior_.covariance
    rng = np.random.default_rng(0)
    for _ in range(4):
        if covariance_type == "full":
            root = np.linalg.cholesky(covariance + 1e-12 * np.eye(3))
            root += 0.03 * rng.normal(size=(3, 3))
            shifted = root @ root.T
        elif covariance_type == "diag":
            shifted = covariance * np.diag(np.exp(0.1 * rng.normal(size=3)))
        else:
            shifted = covariance * np.exp(0.1 * rng.normal())
        other = fit(rows, prior=GaussianPrior(covariance=shifted))
        assert other.log_likelihood_ < model.log_likelihood_
    shape = {
        "spherical": np.ptp(np.diag(covariance)) == 0,
        "diag": not covariance[~np.eye(3, dtype=bool)].any(),
        "full": covariance[~np.eye(3, dtype=bool)].all(),
        "low_rank": np.ptp(np.linalg.eigvalsh(covariance)[:2]) < 1e-10,
    }
    assert shape[covariance_type]


def test_a_fitted_prior_can_be_passed_back_in():
    rows = make_clients(12, n_classes=3)
    first = fit(rows, prior=GaussianPrior(covariance_type="full"))
    again = fit(rows, prior=clone(first.prior_))
    np.testing.assert_allclose(again.coef_, first.coef_, atol=1e-7)
    np.testing.assert_allclose(again.population_coef_, first.population_coef_, atol=1e-12)
    assert again.log_likelihood_ == pytest.approx(first.log_likelihood_, abs=1e-8)
    assert not again.population_coef_std_.any()
    assert (again.coef_std_ < first.coef_std_).all()


def test_integrated_probabilities_of_two_classes():
    X, y, groups = make_clients(between=2.0)
    model = fit((X, y, groups))
    rows, clients = X[:4], np.append(groups[:3], -1)
    got = model.predict_proba(rows, groups=clients)[:, 1]
    design = np.column_stack([np.ones(4), rows])
    for k in range(3):
        members = groups == clients[k]
        coefficients, weights = client_posterior(model, X[members], y[members])
        assert got[k] == pytest.approx(weights @ expit(coefficients @ design[k]), rel=0.01)
    # A new client's predictor is normal under the prior; the population's error takes no part.
    std = np.sqrt(design[3] @ model.prior_.covariance @ design[3])
    logit = model.decision_function(rows, groups=clients, integrate=False)[3]

    def integrand(z):
        return expit(logit + std * z) * np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)

    assert got[3] == pytest.approx(quad(integrand, -12, 12)[0], abs=1e-9)
    plain = model.predict_proba(rows, groups=clients, integrate=False)[:, 1]
    assert (np.abs(got - 0.5) < np.abs(plain - 0.5)).all()


def law_of_new_clients(logits, contrasts, covariances):
    """PredictorLaw of clients that fit did not see, with covariances (n, c, c) of predictors."""
    codes = np.full(len(logits), -1)
    return PredictorLaw(
        logits, contrasts, None, logits, codes, lambda rows, g: g @ covariances[rows] @ g.T
    )


def test_integrated_probabilities_of_rounded_variances():
    """Where features are far from zero, a variance of 0 may come out below it."""
    law = law_of_new_clients(np.zeros((2, 1)), np.ones((1, 1)), np.array([[[-1]], [[0.0]]]))
    np.testing.assert_allclose(averaged_probabilities(law), 0.5, atol=1e-12)


def test_integrated_probabilities_of_several_classes():
    X, y, groups = make_clients(n_classes=3)
    prior = GaussianPrior(mean=0.0, covariance=1.5)
    model = fit((X, y, groups), prior=prior)
    rng = np.random.default_rng(0)
    rows = X[:3]
    deviations = np.sqrt(1.5) * rng.normal(size=(100_000, 3, 3))
    expected = softmax(np.einsum("np,skp->nsk", np.column_stack([np.ones(3), rows]), deviations), 2)
    with pytest.warns(UnseenClientsWarning):
        got = model.predict_proba(rows, groups=[-1, -2, -3])
    np.testing.assert_allclose(got, expected.mean(axis=1), atol=5e-3)
    known = model.predict_proba(rows, groups=groups[:3])
    np.testing.assert_allclose(known.sum(axis=1), 1)
    modes = model.predict_proba(rows, groups=groups[:3], integrate=False)
    assert (known.max(axis=1) < modes.max(axis=1)).all()


def test_averages_over_correlated_logits():
    n_classes = 5
    rng = np.random.default_rng(n_classes)
    contrasts = helmert_contrasts(n_classes)
    root = contrasts @ rng.normal(size=(n_classes - 1, n_classes - 1))
    logits = rng.normal(size=(3, n_classes))
    law = law_of_new_clients(logits, contrasts, np.tile(root @ root.T, (3, 1, 1)))
    got = averaged_probabilities(law)
    draws = rng.normal(size=(200_000, n_classes - 1)) @ root.T
    for mean, p in zip(logits, got, strict=True):
        np.testing.assert_allclose(p, softmax(mean + draws, axis=1).mean(axis=0), atol=5e-3)


def test_new_clients_beside_a_single_one_are_averaged_over_its_error_alone():
    X, y, _ = make_clients()
    model = PersonalizedLogisticRegression().fit(X, y, groups=np.zeros(len(y), int))
    known = model.predict_proba(X, groups=np.zeros(len(y), int))
    with pytest.warns(UnseenClientsWarning):
        new = model.predict_proba(X, groups=np.ones(len(y), int))
    np.testing.assert_allclose(new, known, atol=1e-12)


@pytest.mark.parametrize("n_classes", [2, 3])
def test_predictions_agree_with_one_another(n_classes):
    X, y, groups = make_clients(30 if n_classes == 2 else 12, n_classes=n_classes)
    names = np.array(["low", "mid", "top"])[y]
    model = fit((X, names, groups))
    assert model.classes_.tolist() == ["low", "mid", "top"][:n_classes]
    p = model.predict_proba(X, groups=groups)
    modes = model.predict_proba(X, groups=groups, integrate=False)
    logits = model.decision_function(X, groups=groups, integrate=False)
    averaged = model.decision_function(X, groups=groups)
    log_odds = np.log(p[:, 1] / p[:, 0]) if n_classes == 2 else centred(np.log(p).T).T
    np.testing.assert_allclose(averaged, log_odds, atol=1e-9)
    assert logits.shape == ((len(X),) if n_classes == 2 else (len(X), 3))
    coef, intercept = model.coef_[groups], model.intercept_[groups]
    by_hand = np.einsum("nd,n...d->n...", X, coef) + intercept
    np.testing.assert_allclose(logits, by_hand, atol=1e-12)
    expected = expit(by_hand) if n_classes == 2 else softmax(by_hand, axis=1)[:, 1]
    np.testing.assert_allclose(modes[:, 1], expected, atol=1e-12)
    np.testing.assert_array_equal(model.predict(X, groups=groups), model.classes_[p.argmax(axis=1)])
    np.testing.assert_allclose(model.predict_log_proba(X, groups=groups), np.log(p))
    accuracy = np.mean(model.predict(X, groups=groups) == names)
    assert model.score(X, names, groups=groups) == pytest.approx(accuracy)
    weights = np.arange(len(y))
    assert model.score(X, names, groups=groups, sample_weight=weights) != accuracy


@pytest.mark.slow
def test_weights_count_rows():
    X, y, groups = make_clients(12, n_classes=3)
    weights = np.random.default_rng(0).integers(0, 4, len(y))
    weights[groups == 4] = 0
    repeated = np.repeat(np.arange(len(y)), weights)
    first = PersonalizedLogisticRegression(random="all")
    first.fit(X, y, groups=groups, sample_weight=weights)
    second = fit((X[repeated], y[repeated], groups[repeated]))
    assert 4 not in first.clients_
    np.testing.assert_allclose(first.coef_, second.coef_, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(first.coef_std_, second.coef_std_, rtol=1e-6)
    assert first.log_likelihood_ == pytest.approx(second.log_likelihood_, rel=1e-9)


def test_no_differences_between_clients_is_an_answer():
    X, y, groups = make_clients(between=0.0, m=20, n=40, seed=4)
    model = fit((X, y, groups), random="intercept")
    assert model.prior_.covariance[0, 0] == 0.0
    peer = sklearn_fit(X, y, C=np.inf)
    np.testing.assert_allclose(model.coef_, np.tile(peer.coef_, (20, 1)), rtol=1e-5)
    np.testing.assert_array_equal(model.shrinkage_, 1)


@pytest.mark.parametrize(("random", "single"), [("all", False), ("intercept", True)])
def test_the_warning_names_the_features_that_separate(random, single):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(300, 4)) * [1.0, 10.0, 0.1, 1.0], columns=list("abcd"))
    frame = frame.rename(columns={"b": "dose"})
    groups = 0 * frame.index if single else frame.index % 10
    prior = GaussianPrior(covariance_type="spherical", centered=False)
    model = PersonalizedLogisticRegression(prior, random=random)
    with pytest.warns(SeparationWarning, match="feature 'dose' separates the classes"):
        model.fit(frame, frame["dose"] > 1, groups=groups)
    both = frame["a"] + 10 * frame["c"] > 0
    with pytest.warns(SeparationWarning, match="combination of the features 'a', 'c' separates"):
        model.fit(frame, both, groups=groups)
    with pytest.warns(SeparationWarning, match="feature 'x1' separates"):
        PersonalizedLogisticRegression(random="intercept").fit(
            frame.to_numpy(), frame["dose"] > 1, groups=groups
        )


def test_the_warning_counts_the_features_that_it_does_not_name():
    X = np.random.default_rng(0).normal(size=(300, 13))
    with pytest.warns(
        SeparationWarning, match=r"features ('x\d+', ){9}'x\d+' and 3 more separates"
    ):
        PersonalizedLogisticRegression(random="intercept").fit(
            X, X.sum(axis=1) > 0, groups=np.arange(300) % 10
        )


@pytest.mark.parametrize("n_classes", [2, 3])
@pytest.mark.parametrize("known", [False, True])
def test_separated_classes_get_a_finite_answer_and_a_warning(n_classes, known):
    X, _, groups = make_clients()
    y = np.searchsorted(np.quantile(X[:, 0], np.arange(1, n_classes) / n_classes), X[:, 0])
    prior = GaussianPrior(covariance=1.0) if known else GaussianPrior()
    with pytest.warns(SeparationWarning, match=r"separate.*\b2\.5\b"):
        model = fit((X, y, groups), prior=prior)
    assert np.abs(model.coef_).max() < 50
    assert np.isfinite(model.population_coef_std_).all()
    assert model.score(X, y, groups=groups) > 0.95
    with pytest.warns(SeparationWarning):
        alone = PersonalizedLogisticRegression().fit(X, y, groups=np.zeros(len(y), int))
    spread = X.std(axis=0)

    def minus(t):
        coef, intercept = t[1:].reshape(2, -1), t[:1]
        u = intercept + X @ coef[:, 0]
        penalty = 0.5 * np.sum((coef[:, 0] * spread / 2.5) ** 2)
        return np.logaddexp(0, np.where(y > 0, -u, u)).sum() + penalty

    if n_classes == 2:
        expected = minimize(minus, np.zeros(3), tol=1e-10).x
        np.testing.assert_allclose(alone.coef_[0], expected[1:], rtol=1e-4, atol=1e-5)


def test_clients_of_one_class_each():
    X, _, groups = make_clients()
    y = groups % 2
    with pytest.warns(SeparationWarning, match=r"two classes.*\b2\.5\b"):
        model = fit((X, y, groups), random="intercept")
    assert 1 < model.prior_.covariance[0, 0] ** 0.5 < 20
    assert np.isfinite(model.coef_).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit((X, y, groups), random="intercept", prior=GaussianPrior(covariance=1.0))


def test_summary():
    X, y, groups = make_clients()
    frame = pd.DataFrame(X, columns=["dose", "age"])
    prior = GaussianPrior(covariance_type="full")
    model = fit((frame, y, groups), random=["intercept", "age"], prior=prior)
    table = model.summary()
    assert list(table.columns) == ["estimate", "std_error", "sd", "correlation"]
    assert table.loc[("fixed", "dose"), "estimate"] == model.population_coef_[0]
    assert table.loc[("fixed", "intercept"), "std_error"] == model.population_intercept_std_
    covariance = model.prior_.covariance
    assert table.loc[("between", "age"), "sd"] == pytest.approx(covariance[1, 1] ** 0.5)
    correlation = covariance[0, 1] / np.sqrt(covariance[0, 0] * covariance[1, 1])
    assert table.loc[("between", "intercept, age"), "correlation"] == pytest.approx(correlation)
    clients = make_clients(n_classes=3)
    several = fit(clients, random="intercept").summary()
    assert list(several.index[:2]) == [("fixed", "0: intercept"), ("fixed", "0: x0")]
    assert len(several) == 17
    np.testing.assert_allclose(several.loc["fit", "estimate"][-6::2].sum(), len(clients[1]))


def test_too_few_iterations_are_said():
    with pytest.warns(
        ConvergenceWarning, match=r"PersonalizedLogisticRegression.*max_iter=1, tol=0.0001"
    ):
        fit(make_clients(), max_iter=1)


ROWS = make_clients()


X0, Y0, GROUPS0 = ROWS


def prior(**params):
    return {"prior": GaussianPrior(**params), "random": "all"}


@pytest.mark.parametrize(
    ("rows", "params", "error"),
    [
        ((X0, Y0, np.arange(len(Y0))), {}, r"\b373 clients.*one row.*covariance"),
        ((X0, 0 * Y0, GROUPS0), {}, r"one class.*\b0\b"),
        ((X0, Y0 + 0.5 * X0[:, 0], GROUPS0), {}, "Unknown label type"),
        ((1e200 * X0, Y0, GROUPS0), {}, r"^X\b.*1e150"),
        ((X0 * [1, 0] + [0, 3], Y0, GROUPS0), prior(centered=False), r"'x1'.*random"),
        ((X0, Y0, GROUPS0 % 2), prior(covariance_type="full"), r"'full'.*\b2 clients.*\b3\b"),
        (ROWS, {"prior": BetaPrior()}, r"prior=BetaPrior\(\).*PersonalizedLogisticRegression"),
        (ROWS, prior(covariance=np.inf), r"covariance.*GaussianPrior.*\binf\b"),
        (ROWS, prior(mean=[1.0, 2.0]), r"mean.*GaussianPrior.*\(3,\).*\[1\.0, 2\.0\]"),
        (ROWS, {"random": ["dose"]}, r"random.*'dose'"),
    ],
)
def test_bad_input(rows, params, error):
    X, y, groups = rows
    model = PersonalizedLogisticRegression(**params)
    before = dict(vars(model))
    with pytest.raises(ValueError, match=error):
        model.fit(X, y, groups=groups)
    assert vars(model) == before


@pytest.mark.filterwarnings("ignore::pfl_sklearn.linear_model.NotEstimableWarning")
def test_a_constant_column_is_fine_where_it_is_identified():
    X, y, groups = ROWS
    constant = X * [1, 0] + [0, 1]
    diagonal = GaussianPrior(covariance_type="diag", centered=False)
    without = fit((constant, y, groups), prior=diagonal, fit_intercept=False)
    with_intercept = fit((X[:, :1], y, groups), prior=diagonal)
    np.testing.assert_allclose(without.coef_[:, 1], with_intercept.intercept_, rtol=1e-5)
    fit((constant, y, groups), random=["intercept", 0], prior=diagonal)


@pytest.mark.parametrize("n_classes", [2, 3])
@pytest.mark.parametrize("weighted", [True, False])
def test_a_population_penalty_is_that_of_scikit_learn(weighted, n_classes):
    (X, y, groups), penalty = make_clients(n_classes=n_classes), 20.0
    X = X * [1.0, 30.0] + [5.0, -2.0]
    weights = np.random.default_rng(0).integers(1, 4, len(y)) if weighted else None
    scaler = StandardScaler().fit(X, sample_weight=weights)
    plain = LogisticRegression(C=1 / penalty, tol=1e-10, max_iter=10_000)
    plain.fit(scaler.transform(X), y, sample_weight=weights)
    pooled = PersonalizedLogisticRegression(
        GaussianPrior(covariance=0.0), population_penalty=penalty
    ).fit(X, y, groups=groups, sample_weight=weights)
    expected = plain.coef_ / scaler.scale_
    np.testing.assert_allclose(
        pooled.population_coef_, expected[0] if n_classes == 2 else expected, rtol=1e-4
    )


@pytest.mark.slow
def test_a_population_penalty_is_a_limit_of_none_and_of_no_slopes():
    X, y, groups = make_clients(15)
    free, held, none = (
        PersonalizedLogisticRegression(population_penalty=penalty).fit(X, y, groups=groups)
        for penalty in (0.0, 1e-7, 1e7)
    )
    np.testing.assert_allclose(held.coef_, free.coef_, atol=1e-4)
    np.testing.assert_allclose(none.population_coef_, 0, atol=1e-4)
    assert np.abs(none.coef_).max() > 0.1  # clients differ all the same
    assert none.log_likelihood_ < free.log_likelihood_
    with pytest.raises(ValueError, match=r"'population_penalty'.*-1"):
        PersonalizedLogisticRegression(population_penalty=-1.0).fit(X, y, groups=groups)


def test_a_population_penalty_keeps_separated_slopes_finite():
    X = np.random.default_rng(0).normal(size=(60, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error", SeparationWarning)
        model = PersonalizedLogisticRegression(random="intercept", population_penalty=1.0)
        model.fit(X, X[:, 0] > 0, groups=np.arange(60) % 5)
    assert np.isfinite(model.population_coef_).all()


def test_a_fitted_prior_goes_back_in_for_features_far_from_zero():
    """Timestamps: intercepts and slopes are all but perfectly correlated."""
    rng = np.random.default_rng(4)
    codes, seconds = np.repeat(np.arange(15), 20), rng.uniform(1.6e9, 1.7e9, size=(300, 1))
    years = (seconds[:, 0] - 1.65e9) / 2.9e7
    odds = rng.normal(size=15)[codes] + years * (1 + 0.7 * rng.normal(size=15)[codes])
    y = (rng.random(300) < 1 / (1 + np.exp(-odds))).astype(int)
    prior = GaussianPrior(covariance_type="full")
    model = PersonalizedLogisticRegression(prior, random="all")
    model.fit(seconds, y, groups=codes)
    again = PersonalizedLogisticRegression(model.prior_).fit(seconds, y, groups=codes)
    assert again.log_likelihood_ == pytest.approx(model.log_likelihood_, abs=1e-6)
    np.testing.assert_allclose(
        again.decision_function(seconds, groups=codes, integrate=False),
        model.decision_function(seconds, groups=codes, integrate=False),
        atol=1e-4,
    )


def counts(n=240):
    """Rows, their counts of 0 to 66 (52 values, of which 11 occur once), and their clients."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(n, 1)), rng.negative_binomial(2, 0.1, n), np.repeat(np.arange(12), 20)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(
            PersonalizedLogisticRegression(random="intercept", max_iter=1), marks=pytest.mark.slow
        ),
        PPSGDClassifier(n_rounds=1, random_state=0),
    ],
    ids=["logistic", "ppsgd"],
)
def test_counts_are_not_taken_for_classes_in_silence(model):
    X, y, groups = counts()
    values, sizes = np.unique(y, return_counts=True)
    said = rf"{type(model).__name__}.* {len(values)} .* {values[-1]}\b.* {np.sum(sizes == 1)} .*"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        with pytest.warns(UserWarning, match=said + "PersonalizedPoissonRegression"):
            model.fit(X, y, groups=groups)


@pytest.mark.parametrize(
    "labels",
    [
        lambda y: np.minimum(y, 20),  # few enough to be digits, ratings or months
        lambda y: np.arange(len(y)) % 60,  # codes, each with several rows
        lambda y: np.maximum(np.arange(len(y)) % 60, [7] + [8] * (len(y) - 1)),  # 7 has one row
        lambda y: y.astype(str),
    ],
    ids=["few", "codes", "rare code", "names"],
)
def test_classes_are_not_taken_for_counts(labels):
    X, y, groups = counts()
    PPSGDClassifier(n_rounds=1, random_state=0).fit(X, labels(y), groups=groups)


def test_a_private_fit_says_nothing_of_single_rows():
    X, y, groups = counts()
    noise = {"epsilon": 1.0, "clip_norm": 1.0, "learning_rate": 0.1}
    PPSGDClassifier(n_rounds=1, **noise).fit(X, y, groups=groups)
