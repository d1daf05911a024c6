"""Adaptive quadrature over a client's single effect, against numerical integration."""

import warnings

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import gammaln
from sklearn.exceptions import ConvergenceWarning

from pfl_sklearn import PersonalizedLogisticRegression
from pfl_sklearn.linear_model import SeparationWarning
from pfl_sklearn.linear_model._mixed._families import Binomial, NegativeBinomial, Poisson
from pfl_sklearn.linear_model._mixed._laplace import evaluate_stack
from pfl_sklearn.linear_model._mixed._marginal_likelihood import (
    DENSE,
    effect_stack,
    evaluate_quadrature,
)
from pfl_sklearn.linear_model._mixed._table import stack_rows
from pfl_sklearn.priors import GaussianPrior
from tests.helpers.slow import slow

BINOMIAL = Binomial()


def draw(m, n, sd, seed=0):
    rng = np.random.default_rng(seed)
    codes, X = np.repeat(np.arange(m), n), rng.normal(size=(m * n, 1))
    logits = X[:, 0] + sd * rng.normal(size=m)[codes]
    return X, (rng.random(m * n) < 1 / (1 + np.exp(-logits))).astype(int), codes


def fit(X, y, codes, **params):
    model = PersonalizedLogisticRegression(**{"random": "intercept", **params})
    return model.fit(X, y, groups=codes)


def evaluate(stacks, population, factor, n_points=None, outcome=BINOMIAL):
    """Value, gradient in the population and in the factor, summed over stacks."""
    common = {"population": population, "factor": factor, "family": outcome}
    if n_points is None:
        parts = [evaluate_stack(stack, None, **common) for stack in stacks]
    else:
        shifted = [effect_stack(stack, outcome) for stack in stacks]
        parts = [evaluate_quadrature(stack, None, n_points=n_points, **common) for stack in shifted]
    return [sum(part[k] for part in parts) for k in range(3)]


OUTCOMES = [BINOMIAL, Poisson(), NegativeBinomial(0.7)]


@pytest.fixture(params=OUTCOMES, ids=lambda outcome: type(outcome).__name__)
def problem(request):
    """Stacks and a point; counts have an offset."""
    rng, outcome = np.random.default_rng(0), request.param
    codes = np.repeat(np.arange(6), [4, 2, 3, 4, 5, 1])
    columns = np.column_stack([np.ones(19), rng.normal(size=(19, 2))])
    y, weights = rng.integers(0, 2, 19), rng.uniform(0.5, 2, 19)
    offset = None
    if outcome is not BINOMIAL:
        y, offset = 1.0 * rng.poisson(2.0, 19), rng.normal(size=19)
    stacks = stack_rows(columns, y, weights, codes, 6, offset)
    return outcome, stacks, np.array([[0.3, -0.5, 0.8]]), np.array([[1.7]])


def log_likelihoods(outcome, u, y):
    """Log-likelihoods; those of scipy are the same, and take a hundred times as long."""
    if outcome is BINOMIAL:
        return y * u - np.logaddexp(0, u)
    if outcome.dispersion == 0:
        return y * u - np.exp(u) - gammaln(y + 1)
    k = 1 / outcome.dispersion
    constant = gammaln(y + k) - gammaln(k) - gammaln(y + 1) + k * np.log(k)
    return constant + y * u - (y + k) * np.log(k + np.exp(u))


def test_values_are_integrals(problem):
    outcome, stacks, population, factor = problem
    total = 0.0
    for stack in stacks:
        predictors = stack.predictors(population)[..., 0]
        for x, y, w, u in zip(stack.x, stack.y, stack.w, predictors, strict=True):

            def density(v, x=x, y=y, w=w, u=u):
                value = w @ log_likelihoods(outcome, u + x[:, 0] * factor[0, 0] * v, y)
                return np.exp(value - v * v / 2) / np.sqrt(2 * np.pi)

            total += np.log(quad(density, -12, 12, epsabs=1e-13)[0]) - w @ outcome.constants(y)
    errors = [
        abs(evaluate(stacks, population, factor, k, outcome)[0] - total) for k in (1, 5, 15, 61)
    ]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 2e-6
    assert errors[3] < 1e-10


def test_one_point_is_laplaces_approximation(problem):
    outcome, stacks, population, factor = problem
    laplace, one = (evaluate(stacks, population, factor, k, outcome) for k in (None, 1))
    for ours, theirs in zip(one, laplace, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10)


def test_clients_with_thousands_of_rows_are_no_different():
    """Their likelihood is a product that no float can hold."""
    rng = np.random.default_rng(1)
    codes, columns = np.repeat([0, 1], [2500, 700]), np.ones((3200, 1))
    y, population, factor = rng.integers(0, 2, 3200), np.array([[0.2]]), np.array([[0.8]])
    stacks = stack_rows(columns, y, None, codes, 2)
    laplace, one = evaluate(stacks, population, factor), evaluate(stacks, population, factor, 1)
    for ours, theirs in zip(one, laplace, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-9)


@pytest.mark.parametrize("n_points", [1, 2, 7, 15, DENSE])
def test_gradients_are_exact(problem, n_points):
    (outcome, stacks, population, factor), step = problem, 1e-5

    def value(population, factor):
        return evaluate(stacks, population, factor, n_points, outcome)[0]

    _, by_population, by_factor = evaluate(stacks, population, factor, n_points, outcome)
    for k, unit in enumerate(np.eye(3)):
        shifted = [value(population + s * step * unit, factor) for s in (1, -1)]
        assert by_population[0, k] == pytest.approx((shifted[0] - shifted[1]) / 2 / step, abs=1e-7)
    shifted = [value(population, factor + s * step) for s in (1, -1)]
    assert by_factor[0, 0] == pytest.approx((shifted[0] - shifted[1]) / 2 / step, abs=1e-7)


@pytest.mark.parametrize(("n", "sd"), [(2, 1.0), (10, 2.0), (2, 3.0)])
def test_fifteen_points_are_enough(n, sd):
    rows = draw(300, n, sd, seed=2)
    few, many, laplace = (
        fit(*rows, quadrature=kind).prior_.covariance[0, 0] ** 0.5
        for kind in ("auto", 61, "laplace")
    )
    assert abs(few - many) < 0.005 * max(sd, 1)
    assert laplace < few - 0.03
    assert few == pytest.approx(sd, rel=0.25)


def test_a_slope_that_varies_is_integrated_too():
    X, y, codes = draw(200, 5, 0.0)
    auto, laplace = (fit(X, y, codes, random=[0], quadrature=kind) for kind in ("auto", "laplace"))
    assert auto.log_likelihood_ != laplace.log_likelihood_
    assert fit(X, y, codes, random=[0], quadrature=1).log_likelihood_ == laplace.log_likelihood_


def test_a_known_variance_is_integrated_as_well():
    X, y, codes = draw(100, 3, 1.0)
    estimated = fit(X, y, codes)
    known = fit(X, y, codes, prior=GaussianPrior(covariance=estimated.prior_.covariance))
    assert known.log_likelihood_ == pytest.approx(estimated.log_likelihood_, abs=1e-6)
    np.testing.assert_allclose(known.population_coef_, estimated.population_coef_, atol=1e-4)


def test_several_coefficients_have_laplaces_approximation_only():
    X, y, codes = draw(50, 10, 1.0)
    with pytest.raises(ValueError, match=r"quadrature=15.*one coefficient.*2 varying"):
        fit(X, y, codes, random="all", quadrature=15)
    auto, laplace = (fit(X, y, codes, random="all", quadrature=k) for k in ("auto", "laplace"))
    assert auto.log_likelihood_ == laplace.log_likelihood_
    with pytest.raises(ValueError, match=r"quadrature=15.*3 classes"):
        fit(X, np.arange(len(y)) % 3, codes, quadrature=15)


@pytest.mark.parametrize("quadrature", ["auto", "laplace"])
def test_no_table_is_changed_and_labels_are_a_convention(quadrature):
    """Stacks of one client and one column are views of the user's own array."""
    rng = np.random.default_rng(3)
    codes = np.repeat(np.arange(4), [10, 20, 30, 60])
    X = rng.normal(size=(120, 1)) + 0.5
    odds = X[:, 0] * np.array([-2.0, 0.0, 1.0, 2.0])[codes]
    y = (rng.random(120) < 1 / (1 + np.exp(-odds))).astype(int)
    before = X.copy()
    for prior in ("gaussian", GaussianPrior(mean=[0.5], covariance=1.0)):
        params = {"random": "all", "fit_intercept": False, "prior": prior, "quadrature": quadrature}
        one = fit(X, y, codes, **params)
        np.testing.assert_array_equal(X, before)
        if prior == "gaussian":
            other = fit(X, 1 - y, codes, **params)
            np.testing.assert_allclose(other.coef_, -one.coef_, rtol=1e-3)
            assert other.log_likelihood_ == pytest.approx(one.log_likelihood_, abs=1e-6)


def test_a_single_row_of_the_first_class_counts_as_such():
    X, y, codes = draw(20, 6, 1.0, seed=2)
    X, y, codes = np.vstack([X, [[0.3]]]), np.append(y, 0), np.append(codes, 20)
    model = fit(X, y, codes)
    mirrored = fit(X, 1 - y, codes)
    assert mirrored.log_likelihood_ == pytest.approx(model.log_likelihood_, abs=1e-6)
    assert model.intercept_[-1] < model.population_intercept_
    sd = model.prior_.covariance[0, 0] ** 0.5
    total = 0.0
    for client in range(21):
        u = model.population_intercept_ + X[codes == client] @ model.population_coef_
        labels = y[codes == client]

        def density(v, u=u, labels=labels):
            value = labels @ (u + sd * v) - np.logaddexp(0, u + sd * v).sum()
            return np.exp(value - v * v / 2) / np.sqrt(2 * np.pi)

        total += np.log(quad(density, -12, 12, epsabs=1e-13)[0])
    assert model.log_likelihood_ == pytest.approx(total, abs=1e-5)


def test_clients_far_apart_have_more_points():
    X, y, codes = draw(60, 8, 6.0)
    auto, few, many = (fit(X, y, codes, quadrature=kind) for kind in ("auto", 15, 100))
    assert auto.log_likelihood_ == pytest.approx(many.log_likelihood_, abs=1e-4)
    assert auto.log_likelihood_ != pytest.approx(few.log_likelihood_, abs=1e-4)


def integrated(columns, y, codes, population, sd):
    """Log-likelihood of a random intercept by brute force: a sum over a fine grid of effects."""
    v = np.linspace(-9, 9, 1_501)
    total = 0.0
    for client in np.unique(codes):
        members = codes == client
        turned = np.where(y[members] > 0, 1.0, -1.0)[:, None]
        odds = turned * ((columns[members] @ population)[:, None] + sd * v)
        density = np.exp(-np.logaddexp(0, -odds).sum(axis=0) - v * v / 2)
        total += np.log(density.sum() * (v[1] - v[0]) / np.sqrt(2 * np.pi))
    return total


@pytest.mark.parametrize("sd", [12.0, 50.0])
def test_dense_points_see_the_edge_of_a_pure_client(sd):
    """61 points of Gauss and Hermite do not, which is why the dense ones exist."""
    columns, y, codes = np.ones((24, 1)), np.repeat([1, 0], 12), np.repeat([0, 1], 12)
    y[-1] = 1
    exact = integrated(columns, y, codes, np.array([0.3]), sd)
    stacks = stack_rows(columns, y, None, codes, 2)
    population, factor = np.array([[0.3]]), np.array([[sd]])
    assert evaluate(stacks, population, factor, DENSE)[0] == pytest.approx(exact, abs=1e-6)
    assert abs(evaluate(stacks, population, factor, 61)[0] - exact) > 1e-4


@pytest.mark.parametrize(("sd", "error"), [(12.0, 3e-4), (50.0, 5e-3)])
def test_dense_points_where_the_edge_is_away_from_the_mode(sd, error):
    """The population predicts the class of all 12 rows of a client, more and more surely."""
    columns, y, codes = np.ones((12, 1)), np.ones(12), np.zeros(12, int)
    stacks, worst = stack_rows(columns, y, None, codes, 1), {DENSE: 0.0, 61: 0.0}
    for off in sd * np.linspace(-1, 3, 17):
        exact = integrated(columns, y, codes, np.array([off]), sd)
        for n_points in worst:
            result = evaluate(stacks, np.array([[off]]), np.array([[sd]]), n_points)[0]
            worst[n_points] = max(worst[n_points], abs(result - exact))
    assert worst[DENSE] < error
    assert worst[61] > 10 * error


def mostly_pure(*mixed):
    """30 clients of 12 rows: pure ones of the two classes in turn, then those given."""
    labels = [12 * str((k + 1) % 2) for k in range(30 - len(mixed))]
    y = np.array([int(label) for label in "".join([*labels, *mixed])])
    X = np.random.default_rng(0).normal(size=(360, 2)).round(6)
    return X, y, np.repeat(np.arange(30), 12)


@pytest.mark.slow
def test_separation_is_not_divergence():
    """25 of 30 clients are pure, and yet the likelihood has a maximum; it was held at 17.

    glmer with nAGQ = 25 has a variance of 198 and a log-likelihood of -67.3, as do 25 points of
    ours. That is above the exact maximum, -67.444 at 230.6: 25 points err by .1 nats here.
    """
    X, y, codes = mostly_pure(
        "000010000100", "110011010001", "011100010100", "111111110111", "010001001011"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = fit(X, y, codes)
        glmer = fit(X, y, codes, quadrature=25)
    assert glmer.prior_.covariance[0, 0] == pytest.approx(198, abs=0.5)
    assert glmer.log_likelihood_ == pytest.approx(-67.3, abs=0.05)
    columns = np.column_stack([np.ones(360), X])

    def exact(result, times=1.0):
        population = np.append(result.population_intercept_, result.population_coef_)
        sd = result.prior_.covariance[0, 0] ** 0.5
        return integrated(columns, y, codes, population, times * sd)

    assert model.log_likelihood_ == pytest.approx(exact(model), abs=1e-5)
    assert model.log_likelihood_ == pytest.approx(-67.44431, abs=1e-5)
    assert model.prior_.covariance[0, 0] == pytest.approx(230.61, abs=0.1)
    assert max(exact(model, 0.97), exact(model, 1.03), exact(glmer)) < model.log_likelihood_


@pytest.mark.parametrize(("seed", "pure"), [(5, 0), *slow([(3, 7)])])
@pytest.mark.slow
def test_a_likelihood_that_is_flat_far_away_has_no_maximum_there(seed, pure):
    """Standard deviations of 479 and 300 stood: ten times as far the search lost the population."""
    rng = np.random.default_rng(seed)
    x, codes = rng.normal(size=40).round(2), np.repeat(np.arange(8), 5)
    thresholds = 1.5 * rng.normal(size=8)
    thresholds[8 - pure :] = -np.inf
    with pytest.warns(SeparationWarning, match=r"\b10 logits.*\b1\b"):
        model = fit(x[:, None], (x > thresholds[codes]).astype(int), codes)
    assert model.prior_.covariance[0, 0] ** 0.5 < 5


@pytest.mark.slow
def test_too_few_points_for_clients_far_apart_warn():
    """Two of 40 clients have rows of both classes; 61 points say 18,000 for 1,135."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(40), 5)
    y = rng.integers(0, 2, 40)[groups]
    y[groups < 2] = np.tile(np.arange(5) % 2, 2)
    X = rng.normal(size=(200, 1))
    model = PersonalizedLogisticRegression(random="intercept").fit(X, y, groups=groups)
    assert model.prior_.covariance[0, 0] == pytest.approx(1135, rel=0.02)
    with pytest.warns(ConvergenceWarning, match=r"quadrature=61.*'auto'"):
        model.set_params(quadrature=61).fit(X, y, groups=groups)
