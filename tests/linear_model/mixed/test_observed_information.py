"""Standard errors of the population against the curvature of likelihoods integrated here."""

import numpy as np
import pytest
from scipy.special import expit, gammaln, log_expit, logsumexp

from pfl_sklearn.linear_model import PersonalizedLogisticRegression, PersonalizedPoissonRegression
from pfl_sklearn.linear_model._mixed._families import NegativeBinomial, Poisson, class_family
from pfl_sklearn.linear_model._mixed._marginal_likelihood import MarginalLikelihood
from pfl_sklearn.linear_model._mixed._marginal_maximum import MarginalMaximum
from pfl_sklearn.linear_model._mixed._table import RegressionTable, SharedStacks, stack_rows
from pfl_sklearn.priors import GaussianPrior


def stds_of(model):
    """Standard errors of intercept and slopes, class by class."""
    intercepts = np.atleast_1d(model.population_intercept_std_)
    return np.column_stack([intercepts, np.atleast_2d(model.population_coef_std_)])


def hessian_of(function, point, step=0.01):
    """Second derivatives (k, k) of a function, by differences of its values."""
    moves, result = step * np.eye(len(point)), np.empty((len(point), len(point)))
    for j, first in enumerate(moves):
        for k, second in enumerate(moves[: j + 1]):
            corners = [
                s * t * function(point + s * first + t * second) for s in (1, -1) for t in (1, -1)
            ]
            result[j, k] = result[k, j] = sum(corners) / (2 * step) ** 2
    return result


def clients(m, n, sd, intercept=0.5, slope=0.8, seed=0):
    """Rows of m clients, their predictors, and ids."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(m, n))
    predictors = intercept + slope * x + rng.normal(0, sd, size=(m, 1))
    return x.reshape(-1, 1), predictors.ravel(), np.repeat(np.arange(m), n), rng


def integrated(gather_rows, x, groups, n_points=101):
    """Log-likelihood of (intercept, slope, log sd, ...), integrated over intercepts by a grid."""
    effects = np.linspace(-8, 8, n_points)
    log_weights = -(effects**2) / 2 - np.log(np.sqrt(2 * np.pi)) + np.log(effects[1] - effects[0])
    starts = np.flatnonzero(np.diff(groups, prepend=-1))

    def value(parameters):
        intercept, slope, log_sd = parameters[:3]
        predictors = (intercept + slope * x)[:, None] + np.exp(log_sd) * effects
        by_client = np.add.reduceat(gather_rows(predictors, parameters[3:]), starts, axis=0)
        return logsumexp(by_client + log_weights, axis=1).sum()

    return value


def assert_errors(model, value, *more):
    """The errors are those of the inverse curvature of `value` at the estimates."""
    sd = np.sqrt(model.prior_.covariance[0, 0])
    point = [model.population_intercept_, model.population_coef_[0], np.log(sd), *more]
    information = -hessian_of(value, np.array(point))
    expected = np.sqrt(np.diag(np.linalg.inv(information)))[:2]
    np.testing.assert_allclose(stds_of(model)[0], expected, rtol=1e-3)
    # What a known spread (and dispersion) would leave, so that the test can tell the two.
    return expected / np.sqrt(np.diag(np.linalg.inv(information[:2, :2])))


def test_errors_of_two_classes_count_that_the_spread_was_estimated():
    X, predictors, groups, rng = clients(1000, 2, 2.5)
    y = (rng.random(len(predictors)) < expit(predictors)).astype(int)
    model = PersonalizedLogisticRegression(random="intercept").fit(X, y, groups=groups)
    sign = np.where(y == 1, 1.0, -1.0)[:, None]
    value = integrated(lambda u, _: log_expit(sign * u), X[:, 0], groups)
    assert assert_errors(model, value)[1] > 1.05


def test_errors_of_counts_count_that_the_dispersion_was_estimated():
    X, predictors, groups, rng = clients(1000, 2, 0.7)
    mean = np.exp(predictors)
    y = rng.negative_binomial(2.0, 2.0 / (2.0 + mean))
    model = PersonalizedPoissonRegression(random="intercept", family="negative_binomial")
    model.fit(X, y, groups=groups)

    def gather_rows(u, log_dispersion):
        size = np.exp(-log_dispersion[0])
        constant = gammaln(y + size) - gammaln(size) + size * np.log(size)
        return constant[:, None] + y[:, None] * u - (y + size)[:, None] * np.log(size + np.exp(u))

    value = integrated(gather_rows, X[:, 0], groups, n_points=61)
    assert_errors(model, value, np.log(model.dispersion_))


def laplace(x, chosen, contrasts):
    """Log-likelihood of coefficients (a, p) and log sds (p,), by Laplace's approximation.

    All columns x (m, n, p) vary between clients, with the same variances for all contrasts (K, a);
    `chosen` (m, n, K) marks the classes.
    """
    m, p, a = len(x), x.shape[2], contrasts.shape[1]

    def value(parameters):
        coefficients, sds = parameters[: a * p].reshape(a, p), np.exp(parameters[a * p :])
        effects = np.zeros((m, a, p))
        for _ in range(12):  # Newton's steps
            logits = np.einsum("mnp,map,ka->mnk", x, coefficients + effects * sds, contrasts)
            total = logsumexp(logits, axis=2, keepdims=True)
            p_hat = np.exp(logits - total)
            centred = contrasts - (p_hat @ contrasts)[:, :, None]
            score = np.einsum("mnk,ka,mnp->map", chosen - p_hat, contrasts, x * sds) - effects
            weights = np.einsum("mnk,mnka,mnkc->mnac", p_hat, centred, centred)
            precision = np.einsum("mnac,mnp,mnq->mapcq", weights, x * sds, x * sds)
            precision = precision.reshape(m, a * p, a * p) + np.eye(a * p)
            step = np.linalg.solve(precision, score.reshape(m, a * p, 1))
            effects = effects + step.reshape(m, a, p)
        log_likelihood = np.sum(chosen * (logits - total))
        return log_likelihood - np.sum(effects**2) / 2 - np.linalg.slogdet(precision)[1].sum() / 2

    return value


def contrasts_of(n_classes):
    """Orthonormal contrasts (K, K - 1); two classes have the logit of the second one."""
    if n_classes == 2:
        return np.array([[0.0], [1.0]])
    centring = np.eye(n_classes) - 1 / n_classes
    return np.linalg.qr(centring)[0][:, : n_classes - 1]


@pytest.mark.slow
@pytest.mark.parametrize("n_classes", [2, 3])
def test_errors_of_several_coefficients_count_that_their_variances_were_estimated(n_classes):
    rng = np.random.default_rng(1)
    m, n = 16, 8
    X, groups = rng.normal(size=(m * n, 1)), np.repeat(np.arange(m), n)
    logits = rng.normal(size=(m, n_classes))[groups] + X * rng.normal(size=(m, n_classes))[groups]
    logits += [0.0, 1.0, -0.5][:n_classes] * (1 + X)
    y = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
    model = PersonalizedLogisticRegression(random="all", tol=1e-6).fit(X, y, groups=groups)
    contrasts = contrasts_of(n_classes)
    columns = np.column_stack([np.ones(m * n), X - X.mean()]).reshape(m, n, 2)
    value = laplace(columns, np.eye(n_classes)[y].reshape(m, n, -1), contrasts)
    coefficients = np.column_stack(
        [np.atleast_1d(model.population_intercept_), np.atleast_2d(model.population_coef_)]
    )
    # The covariance has its shape, and the likelihood its columns, at the mean.
    back = np.array([[1.0, -X.mean()], [0.0, 1.0]])  # from coefficients there to those at zero
    at_mean = coefficients @ np.linalg.inv(back).T
    outputs = contrasts.T @ at_mean if n_classes > 2 else at_mean
    shift = np.linalg.inv(back)
    variances = np.diag(shift @ model.prior_.covariance @ shift.T)
    point = np.concatenate([outputs.ravel(), np.log(variances) / 2])
    information = -hessian_of(value, point)
    coding = np.kron(contrasts if n_classes > 2 else np.eye(1), back)
    free = outputs.size
    for selected, rtol in ((len(point), 2e-3), (free, None)):
        covariance = np.linalg.inv(information[:selected, :selected])[:free, :free]
        expected = np.sqrt(np.diag(coding @ covariance @ coding.T)).reshape(-1, 2)
        if rtol:
            np.testing.assert_allclose(stds_of(model), expected, rtol=rtol)
        else:
            assert np.abs(stds_of(model) / expected - 1).max() > 5e-3


@pytest.mark.parametrize(
    ("outcome", "shape", "n", "n_points"),
    [
        (class_family(2), (3, 3), 8, 1),
        (class_family(2), (3, 4), 2, 1),  # more effects than rows
        (class_family(3), (2, 2), 8, 1),
        (class_family(3), (2, 1), 6, 1),
        (Poisson(), (2, 2), 6, 1),
        (NegativeBinomial(0.7), (2, 1), 6, 1),
        (class_family(2), (2, 1), 6, 31),
        (NegativeBinomial(0.7), (2, 1), 6, 31),
    ],
)
def test_the_information_is_that_of_differences_of_gradients(outcome, shape, n, n_points):
    """With an offset, weights, and factors of any shape."""
    rng, a, m, p = np.random.default_rng(0), outcome.n_outputs, 25, 4
    X, codes = rng.normal(size=(m * n, p)), np.repeat(np.arange(m), n)
    y = rng.integers(0, 3 if a > 1 else 2, size=m * n)
    weights = rng.uniform(0.5, 2, size=m * n)
    offset = rng.normal(size=m * n) if a == 1 else None
    table = RegressionTable(X, y, codes, m, weights, shape[0], None, list("abcd"), True, offset)
    population, factor = 0.5 * rng.normal(size=(a, p)), rng.normal(size=shape)
    directions = rng.normal(size=(2, *shape))
    shared = SharedStacks(stack_rows(X, y, weights, codes, m, offset))
    start = MarginalMaximum(population, factor, outcome, 0, True)
    criterion = MarginalLikelihood(table, shared, start, n_points)

    def gradient(shifted):
        _, by_population, by_factor = criterion(
            population + shifted[: a * p].reshape(a, p),
            factor + np.tensordot(shifted[a * p :], directions, 1),
        )
        by_directions = np.tensordot(directions, by_factor, ((1, 2), (0, 1)))
        return np.append(by_population.ravel(), by_directions)

    steps = 1e-4 * np.eye(a * p + 2)
    expected = np.array([gradient(-step) - gradient(step) for step in steps]) / 2e-4
    information = criterion.information(population, factor, directions)
    # Quadrature and its derivatives are exact to about 1e-5 here, Laplace's to rounding.
    rtol = 1e-6 if n_points == 1 else 1e-4
    np.testing.assert_allclose(information, expected, atol=rtol * np.abs(expected).max())


def pairs(counts):
    """A case-control table of matched pairs, from counts of (response if 1, response if 0)."""
    y = np.concatenate([np.tile(pair, count) for pair, count in counts.items()])
    return np.tile([[1.0], [0.0]], (len(y) // 2, 1)), y, np.repeat(np.arange(len(y) // 2), 2)


def test_matched_pairs_have_the_error_of_conditional_logistic_regression():
    X, y, groups = pairs({(0, 0): 360, (0, 1): 108, (1, 0): 252, (1, 1): 480})
    model = PersonalizedLogisticRegression(random="intercept").fit(X, y, groups=groups)
    assert model.population_coef_[0] == pytest.approx(np.log(252 / 108), abs=1e-3)
    assert 0.1145 < model.population_coef_std_[0] < 0.1151  # sqrt(1 / 252 + 1 / 108) = 0.1150


def test_a_given_spread_leaves_the_curvature_in_the_coefficients():
    X, predictors, groups, rng = clients(300, 2, 2.5)
    y = (rng.random(len(predictors)) < expit(predictors)).astype(int)
    prior = GaussianPrior(covariance=[[2.5**2]])
    model = PersonalizedLogisticRegression(prior=prior, random="intercept")
    model.fit(X, y, groups=groups)
    sign = np.where(y == 1, 1.0, -1.0)[:, None]
    value = integrated(lambda u, _: log_expit(sign * u), X[:, 0], groups)

    def given(parameters):
        return value(np.append(parameters, np.log(2.5)))

    point = np.append(model.population_intercept_, model.population_coef_)
    information = -hessian_of(given, point)
    expected = np.sqrt(np.diag(np.linalg.inv(information)))
    np.testing.assert_allclose(stds_of(model)[0], expected, rtol=1e-3)


def test_equal_clients_have_the_errors_of_a_fit_without_clients():
    rng = np.random.default_rng(0)
    X, groups = rng.normal(size=(4000, 2)), np.repeat(np.arange(1000), 4)
    alike = np.tile([0, 1, 1, 0], 1000)  # closer than chance, so the likeliest spread is 0
    model = PersonalizedLogisticRegression(random="intercept").fit(X, alike, groups=groups)
    assert model.prior_.covariance[0, 0] == 0
    p = expit(model.population_intercept_ + X @ model.population_coef_)
    columns = np.column_stack([np.ones(len(X)), X])
    expected = np.linalg.inv((columns.T * p * (1 - p)) @ columns)
    np.testing.assert_allclose(model.population_covariance_, expected, rtol=1e-6)


def test_weak_priors_leave_the_spread_out():
    """Where only a prior keeps coefficients finite, the curvature is that of the prior."""
    X, _, groups, _ = clients(1000, 3, 1.0)
    y = (X[:, 0] > 0).astype(int)
    full, plug_in = (
        PersonalizedLogisticRegression(random="intercept", uncertainty=uncertainty)
        for uncertainty in ("full", "plug_in")
    )
    for model in (full, plug_in):
        with pytest.warns(UserWarning, match="separates"):
            model.fit(X, y, groups=groups)
    np.testing.assert_array_equal(stds_of(full), stds_of(plug_in))


def test_all_that_states_errors_takes_the_same_ones():
    X, predictors, groups, rng = clients(1000, 3, 2.0)
    y = (rng.random(len(predictors)) < expit(predictors)).astype(int)
    model = PersonalizedLogisticRegression(random="intercept", unseen="population")
    model.fit(X, y, groups=groups)
    stds, covariance = stds_of(model)[0], model.population_covariance_
    np.testing.assert_allclose(stds**2, np.diag(covariance))
    summary = model.summary()["std_error"]["fixed"].to_numpy()
    np.testing.assert_allclose(summary, stds)
    half = stds * 1.959964
    bounds = model.conf_int().loc["fixed"].to_numpy()
    np.testing.assert_allclose(np.diff(bounds, axis=1)[:, 0] / 2, half, rtol=1e-6)
    # A client that was not seen has the error of the population, and the spread.
    lower, upper = model.predict_interval([[0.0]], groups=[-1])
    width = np.diff(np.log([lower[0, 1], upper[0, 1]]) - np.log1p([-lower[0, 1], -upper[0, 1]]))
    variance = covariance[0, 0] + model.prior_.covariance[0, 0]
    assert width[0] / 2 == pytest.approx(1.959964 * np.sqrt(variance), rel=1e-4)
    root = model._posterior.error_root * model._posterior.scale[:, None]
    np.testing.assert_allclose(root @ root.T, covariance, rtol=1e-8)


@pytest.mark.slow
def test_stated_errors_are_those_of_repeated_tables():
    """With the variance taken as known, they are .67 of those of rare classes and of the slope."""
    m, n, intercept, slope, sd = 1500, 2, 0.0, 2.0, 3.0
    estimates, stated = [], []
    for seed in range(40):
        X, predictors, groups, rng = clients(m, n, sd, intercept, slope, seed)
        y = (rng.random(m * n) < expit(predictors)).astype(int)
        model = PersonalizedLogisticRegression(random="intercept").fit(X, y, groups=groups)
        estimates.append([model.population_intercept_, model.population_coef_[0]])
        stated.append(stds_of(model)[0])
    # A standard deviation of 40 values has an error of 11 %, and .67 would be three of them off.
    ratio = np.mean(stated, axis=0) / np.std(estimates, axis=0, ddof=1)
    assert (np.abs(ratio - 1) < 0.2).all()
