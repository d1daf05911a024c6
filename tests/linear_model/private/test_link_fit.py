"""Private fits of classes and counts: what is released, what it rests on, and how good it is."""

import math
import warnings

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings, strategies as st
from scipy.optimize import minimize
from scipy.special import expit
from sklearn.base import clone
from sklearn.metrics import log_loss

from pfl_sklearn.linear_model import PersonalizedLogisticRegression, PersonalizedPoissonRegression
from pfl_sklearn.linear_model._mixed._families import Binomial, Poisson
from pfl_sklearn.linear_model._mixed._table import stack_rows
from pfl_sklearn.linear_model._private._link_fit import client_messages, message_stack
from pfl_sklearn.linear_model._private._link_server import (
    LinkServer,
    PrivateStart,
    RoundPoint,
    RoundSums,
    stack_rounds,
    unpack_sums,
)
from pfl_sklearn.linear_model._private._messages import LINK_MESSAGE, LinkShape
from pfl_sklearn.priors import GaussianPrior
from pfl_sklearn.privacy import ClippedSum, PrivacyLedger, PrivacyWarning, gdp_mu
from tests.helpers.blinded import blind
from tests.helpers.round_noise import check_noise, record_noise
from tests.helpers.slow import slow

pytestmark = pytest.mark.filterwarnings(f"ignore::{PrivacyWarning.__module__}.PrivacyWarning")
BOUNDS = {"feature_bound": math.sqrt(2), "max_rows_per_client": 24}
SLOPES = np.array([0.7, -0.7])


def draw(m=300, n=24, level=-1.0, sd=1.0, seed=0, kind="classes"):
    """Two binary features, responses, and clients with a level of their own."""
    rng = np.random.default_rng(seed)
    groups, X = np.repeat(np.arange(m), n), rng.integers(0, 2, (m * n, 2)).astype(float)
    predictors = level + X @ SLOPES + sd * rng.normal(size=m)[groups]
    if kind == "counts":
        return X, rng.poisson(np.exp(predictors)), groups
    return X, (rng.random(m * n) < expit(predictors)).astype(int), groups


def draw_slopes(m, n=24, sds=(1.0, 0.7, 0.7, 0.2), seed=0, kind="classes"):
    """Three normal features, responses, and clients with a level and slopes of their own."""
    rng = np.random.default_rng(seed)
    groups, X = np.repeat(np.arange(m), n), rng.normal(size=(m * n, 3))
    scale = 1.0 if kind == "classes" else 0.5
    own = [-0.5, 0.7, -0.7, 0.7] + scale * np.array(sds) * rng.normal(size=(m, 4))
    predictors = own[groups, 0] + np.sum(X * own[groups, 1:], axis=1)
    if kind == "counts":
        return X, rng.poisson(np.exp(predictors)), groups
    return X, (rng.random(m * n) < expit(predictors)).astype(int), groups


def model_of(kind="classes", epsilon=2.0, seed=0, **params):
    params = {**BOUNDS, "random_state": seed, "unseen": "population", "epsilon": epsilon, **params}
    if kind == "counts":
        return PersonalizedPoissonRegression(**{"rate_range": (0.05, 20.0), **params})
    return PersonalizedLogisticRegression(**params)


def coefficients(model):
    return np.append(model.population_intercept_, model.population_coef_)


def errors(model):
    return np.append(model.population_intercept_std_, model.population_coef_std_)


def spread(model):
    return math.sqrt(model.prior_.covariance[0, 0])


@pytest.mark.parametrize("kind", ["classes", "counts"])
def test_without_noise_to_speak_of_it_is_nearly_the_exact_fit(kind):
    """With little noise the scales are large, so hardly anything is clipped."""
    X, y, groups = draw(kind=kind)
    private = model_of(kind, epsilon=1e5).fit(X, y, groups=groups)
    exact = model_of(kind, epsilon=math.inf, random="intercept").fit(X, y, groups=groups)
    np.testing.assert_allclose(coefficients(private), coefficients(exact), atol=0.02)
    assert 0.97 < spread(private) / spread(exact) < 1.03
    np.testing.assert_allclose(private.intercept_, exact.intercept_, atol=0.1)


@pytest.mark.parametrize(
    ("random", "kind"), [*slow([("all", "classes")]), (["intercept", 1], "counts")]
)
def test_without_noise_slopes_are_nearly_those_of_the_exact_fit(kind, random):
    """Both by Laplace's approximation, with a diagonal covariance of the columns as they are."""
    X, y, groups = draw_slopes(400 if kind == "classes" else 200, kind=kind)
    bounds = {"feature_bound": math.sqrt(3), "random": random}
    private = model_of(kind, epsilon=1e5, **bounds).fit(X, y, groups=groups)
    prior = GaussianPrior(covariance_type="diag", centered=False)
    exact = model_of(kind, epsilon=math.inf, prior=prior, quadrature="laplace", **bounds)
    exact.fit(X, y, groups=groups)
    np.testing.assert_allclose(coefficients(private), coefficients(exact), atol=0.08)
    sds, exact_sds = (np.sqrt(np.diag(each.prior_.covariance)) for each in (private, exact))
    np.testing.assert_allclose(sds, exact_sds, rtol=0.04, atol=0.02)
    np.testing.assert_allclose(private.coef_, exact.coef_, atol=0.15)
    np.testing.assert_allclose(private.coef_std_, exact.coef_std_, rtol=0.1, atol=0.02)


def test_a_known_variance_stays():
    X, y, groups = draw()
    model = model_of(epsilon=1e5, prior=GaussianPrior(covariance=0.49)).fit(X, y, groups=groups)
    assert model.prior_.covariance.item() == 0.49
    exact = PersonalizedLogisticRegression(GaussianPrior(covariance=0.49), random="intercept")
    exact.fit(X, y, groups=groups)
    np.testing.assert_allclose(coefficients(model), coefficients(exact), atol=0.12)


def test_slopes_of_the_fitted_prior_are_those_of_the_columns_as_they_are():
    X, y, groups = draw(100)
    for random, centered in (("all", False), ("auto", True)):
        prior = model_of(epsilon=50.0, random=random).fit(X, y, groups=groups).prior_
        assert prior.centered is centered


def test_whole_numbers_are_as_good_as_floats():
    X, y, groups = draw(40, kind="counts")
    params = {"epsilon": 5, "feature_bound": 2, "max_rows_per_client": 20, "rate_range": (1, 10)}
    whole = model_of("counts", **params).fit(X, y, groups=groups)
    floats = {"epsilon": 5.0, "feature_bound": 2.0, "rate_range": (1.0, 10.0)}
    same = model_of("counts", **{**params, **floats}).fit(X.astype(int), y, groups=groups)
    np.testing.assert_array_equal(coefficients(whole), coefficients(same))


@pytest.mark.parametrize(
    ("random", "factor"), [("auto", 0.1), (["intercept", 1], 2.0**13)], ids=str
)
def test_the_unit_of_the_features_does_not_matter(random, factor):
    """With a bound in the same unit, coefficients, errors and spreads are over the factor."""
    X, y, groups = draw_slopes(300)
    base = model_of(feature_bound=2.0, random=random).fit(X, y, groups=groups)
    other = clone(base).set_params(feature_bound=2.0 * factor).fit(X * factor, y, groups=groups)
    exactly = {"rtol": 1e-6, "atol": 1e-9}
    for name in ("population_coef_", "population_coef_std_", "coef_", "coef_std_"):
        np.testing.assert_allclose(getattr(other, name) * factor, getattr(base, name), **exactly)
    for name in ("population_intercept_std_", "intercept_", "intercept_std_"):
        np.testing.assert_allclose(getattr(other, name), getattr(base, name), **exactly)
    spreads, others = (np.sqrt(np.diag(each.prior_.covariance)) for each in (base, other))
    others[1:] *= factor
    np.testing.assert_allclose(others, spreads, **exactly)


# What the promise rests on ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("epsilon", "n_rounds", "more"),
    [(2.0, 2, {}), (0.3, 5, {"random": "all", "prior": GaussianPrior(covariance=1.0)})],
    ids=["intercept", "slopes"],
)
def test_rounds_together_spend_the_epsilon(epsilon, more, n_rounds, monkeypatch):
    """A replaced client moves each sum by 2; squares of 2 / noise_std add up to mu^2."""
    rounds = record_noise(monkeypatch)
    X, y, groups = draw(40)
    model = model_of(epsilon=epsilon, n_rounds=n_rounds, **more).fit(X, y, groups=groups)
    assert len(rounds) == n_rounds
    check_noise(rounds, model.privacy_, 2.0, gdp_mu(epsilon, 1e-5))


def message(columns, y, shape, population, t, outcome=None, offset=None, unit=None, means=None):
    """One client's message (1, k), for columns (n, p); units are t, or `unit`; means are 0."""
    outcome, codes = outcome or Binomial(), np.zeros(len(y), dtype=int)
    with np.errstate(all="ignore"):
        stack = message_stack(stack_rows(columns, y, None, codes, 1, offset)[0], outcome)
        t = np.broadcast_to(t, (shape.n_varying,))
        effects = np.zeros((len(t), stack.y.shape[1]))
        at = point(population, t, unit)
        at = at if means is None else at._replace(means=means)
        return client_messages(stack, effects, shape, outcome, at)[0][:1]


def point(population, t, unit=None):
    """RoundPoint with spreads t (q,) and units of t, or `unit`."""
    information = np.full(len(t), np.inf) if unit is None else 1 / (unit**2 - t**2)
    return RoundPoint(population, t, information, np.zeros(len(population)), None)


@pytest.mark.parametrize("kind", ["classes", "counts"])
@pytest.mark.parametrize("others", [1, 3, 700])
@pytest.mark.parametrize("q", [1, 3])
def test_a_message_is_the_same_bits_whoever_else_is_there(q, kind, others):
    """Rows that cancel leave nothing but rounding, which clipping may bring to any length."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(301, 2)) * 1e16
    x[150:300], x[300] = -x[:150][::-1], 0.0
    first = np.column_stack([np.ones(301), x]), np.ones(301), np.full(301, -250.0)
    outcome = Binomial() if kind == "classes" else Poisson()
    found = []
    for sizes in ([], [others], [others, 301, 5], [301, 302, others]):
        columns, y, offset = (
            np.concatenate([own, *(rng.random((n, *own.shape[1:])).round() for n in sizes)])
            for own in first
        )
        codes = np.repeat(np.arange(len(sizes) + 1), [301, *sizes])
        with np.errstate(all="ignore"):
            for rows in stack_rows(columns, y, None, codes, len(sizes) + 1, offset):
                stack = message_stack(rows, outcome)
                effects = np.zeros((q, stack.y.shape[1]))
                shape = LinkShape(2, 20, 0.25, n_varying=q)
                at = point(np.array([0.1, 0.2, -0.3]), np.ones(q), 1.1)
                at = at._replace(means=np.append(np.zeros(q), [0.3, -1e3, 1.0][: 3 - q]))
                sent, _ = client_messages(stack, effects, shape, outcome, at)
                found += list(sent[: len(rows.clients)][rows.clients == 0])
    assert len(found) == 4
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


@pytest.mark.slow
def test_hostile_clients_move_a_sum_by_at_most_two():
    """300 pairs of clients with absurd rows, under absurd populations."""
    rng = np.random.default_rng(0)
    mechanism, worst = ClippedSum(1.0), 0.0
    for _ in range(300):
        sums = []
        q = rng.integers(1, 4)
        shape = LinkShape(2, rng.integers(1, 100), 0.25, n_varying=q)
        population, t = 10 ** rng.uniform(-2, 4) * rng.normal(size=3), rng.uniform(0.05, 5)
        outcome = Binomial() if rng.random() < 0.5 else Poisson()
        for _ in range(2):
            n, size = rng.integers(1, 40), 10 ** rng.uniform(-5, rng.choice([3, 160]))
            columns = np.column_stack([np.ones(n), size * rng.normal(size=(n, 2))])
            y = rng.integers(0, 2, n) if isinstance(outcome, Binomial) else rng.poisson(9, n) * 1e8
            sent = message(columns, y, shape, population, t, outcome)
            sums.append(mechanism.release(sent, 1.0, 1, rng).total)
        worst = max(worst, np.linalg.norm(sums[0] - sums[1]))
        assert np.isfinite(sums).all()
    assert 1.0 < worst <= 2 + 1e-9


@pytest.mark.parametrize("q", [1, 2])
def test_all_parts_share_one_bound(q):
    """Clipped apart, five parts at their bounds would have a norm of the root of 5."""
    rng, shape = np.random.default_rng(0), LinkShape(2, 400, 0.25, n_varying=q)
    columns = np.column_stack([np.ones(400), 30 * rng.normal(size=(400, 2))])
    sent = message(columns, np.ones(400), shape, np.zeros(3), 2.0)
    ends = np.cumsum(LINK_MESSAGE.widths(shape.layout))[:-1]
    sizes = [np.linalg.norm(part) for part in np.split(sent[0], ends)]
    assert np.sum(np.array(sizes) > 1) >= 4 - q
    total = ClippedSum(1.0).release(sent, 1.0, 1, rng).total
    assert np.linalg.norm(total) == pytest.approx(1)


def test_rows_beyond_the_cap_count_no_more_within_a_client():
    rng = np.random.default_rng(0)
    columns = np.column_stack([np.ones(20), rng.normal(size=(20, 2))])
    y, shape = rng.integers(0, 2, 20), LinkShape(2, 20, 0.25)
    few = message(columns, y, shape, np.zeros(3), 0.05)[0]
    many = message(np.tile(columns, (50, 1)), np.tile(y, 50), shape, np.zeros(3), 0.05)[0]
    within = slice(0, sum(LINK_MESSAGE.widths(shape.layout)[:2]))
    # The rows of the larger client move its effect a little more.
    np.testing.assert_allclose(many[within], few[within], rtol=0.05, atol=0.02)
    uncapped = LinkShape(2, 1000, 0.25)
    more = message(np.tile(columns, (50, 1)), np.tile(y, 50), uncapped, np.zeros(3), 0.05)[0]
    scale = np.array(uncapped.scales) / np.array(shape.scales)
    assert np.abs(more[:2] * scale[0]).max() > 30 * np.abs(few[:2]).max()


@pytest.mark.parametrize("outcome", [Binomial(), Poisson()], ids=lambda o: type(o).__name__)
def test_messages_are_scores_and_information_of_the_marginal_likelihood(outcome):
    """Their parts add up to its slopes, by differences of sums over 4,001 nodes."""
    rng = np.random.default_rng(3)
    columns = np.column_stack([np.ones(7), rng.normal(size=(7, 2))])
    y = rng.integers(0, 2, 7) if isinstance(outcome, Binomial) else rng.poisson(1.5, 7)
    population, t, shape = np.array([0.2, -0.5, 0.4]), 0.8, LinkShape(2, 7, 0.25)
    unit, means = 1.1, np.array([0.0, 0.4, -0.3])
    offset = rng.normal(size=7)
    sent = message(columns, y.astype(float), shape, population, t, outcome, offset, unit, means)
    sums = unpack_sums(sent[0], shape, 0.0)
    nodes = np.linspace(-10, 10, 4001)

    def marginal(b, log_t):
        u = (offset + columns @ b)[:, None] + np.exp(log_t) * nodes
        rows = outcome.terms(u[..., None], y[:, None].astype(float), np.ones(1)).value
        return np.log(np.sum(np.exp(rows.sum(axis=0) - nodes**2 / 2)))

    def slope(function, at, h=1e-4):
        steps = h * np.eye(len(at))
        return np.array([(function(at + s) - function(at - s)) / (2 * h) for s in steps])

    score = slope(lambda b: marginal(b, np.log(t)), population)
    # The part between clients is that of features less their means.
    raw = np.eye(3) + np.outer([1.0, 0.0, 0.0], means)
    np.testing.assert_allclose(sums.within + sums.between @ raw / unit, score, atol=2e-4)
    in_log_t = slope(lambda at: marginal(population, at[0]), np.array([np.log(t)]))
    assert sums.variance[0, 0] == pytest.approx((unit / t) ** 2 * in_log_t[0], abs=5e-4)
    information = raw.T @ sums.between_information @ raw / unit**2
    information[1:, 1:] += sums.information
    # The information given the effects' posterior is that of complete data less what they lose; the
    # negative Hessian differs from it by terms of mean 0.
    hessian = -slope(lambda b: slope(lambda c: marginal(c, np.log(t)), b), population, 1e-3)
    assert np.linalg.eigvalsh(information).min() > 0
    np.testing.assert_allclose(np.diag(information), np.diag(hessian), rtol=0.5)


@pytest.mark.parametrize("q", [2, 3])
@pytest.mark.parametrize("outcome", [Binomial(), Poisson()], ids=lambda o: type(o).__name__)
def test_messages_with_slopes_are_scores_of_laplace_s_likelihood(outcome, q):
    """Their parts add up to its slopes, by differences around modes that SciPy finds."""
    rng = np.random.default_rng(3)
    columns = np.column_stack([np.ones(9), rng.normal(size=(9, 2))])
    y = (rng.integers(0, 2, 9) if isinstance(outcome, Binomial) else rng.poisson(1.5, 9)) * 1.0
    population, t = np.array([0.2, -0.5, 0.4]), np.array([0.8, 0.5, 1.1])[:q]
    # A factor of 4 cuts nothing.
    shape, offset = LinkShape(2, 9, 0.25, 4.0, q), rng.normal(size=9)
    unit, means = np.array([1.3, 0.9, 1.2])[:q], np.append(np.zeros(q), [0.4] * (3 - q))
    sent = message(columns, y, shape, population, t, outcome, offset, unit, means)
    sums, units = unpack_sums(sent[0], shape, 0.0), np.append(unit, [unit[0]] * (3 - q))

    def marginal(b, log_t):
        features = columns[:, :q] * np.exp(log_t)

        def terms(z):
            return outcome.terms((offset + columns @ b + features @ z)[:, None], y, np.ones(9))

        mode = minimize(
            lambda z: z @ z / 2 - terms(z).value.sum(),
            np.zeros(q),
            jac=lambda z: z - features.T @ terms(z).score[:, 0],
            tol=1e-12,
        ).x
        hessian = np.eye(q) + features.T @ (terms(mode).curvature[:, 0] * features)
        return terms(mode).value.sum() - mode @ mode / 2 - np.linalg.slogdet(hessian)[1] / 2

    def slope(function, at, h=1e-3):
        steps = h * np.eye(len(at))
        return np.array([(function(at + s) - function(at - s)) / (2 * h) for s in steps])

    score = slope(lambda b: marginal(b, np.log(t)), population)
    raw = np.eye(3) + np.outer([1.0, 0.0, 0.0], means)
    np.testing.assert_allclose(sums.within + sums.between / units @ raw, score, atol=1e-4)
    in_log_t = slope(lambda log_t: marginal(population, log_t), np.log(t))
    np.testing.assert_allclose(sums.variance[0], (unit / t) ** 2 * in_log_t, atol=1e-3)
    information = raw.T @ (sums.between_information / np.multiply.outer(units, units)) @ raw
    information[q:, q:] += sums.information
    assert np.linalg.eigvalsh(information).min() > 0


@pytest.mark.parametrize(("mean", "known"), [(0.0, 1.9), (0.5, 0.6)])
def test_rounds_estimate_the_means_of_columns_and_the_information_of_a_client(mean, known):
    """From any earlier estimates; here there is one client, whose numbers are known."""
    rng, t, means = np.random.default_rng(0), np.array([0.8]), np.array([0.0, mean, mean])
    columns = np.column_stack([np.ones(30), rng.normal(0.3, 1.0, (30, 2))])
    y, population = rng.integers(0, 2, 30) * 1.0, np.zeros(3)
    shape = LinkShape(2, 30, 0.25, 4.0)
    server = LinkServer(shape, PrivateStart(0.0, 3.0, 0.25, ""), 1, None)
    exact = 30 / 4  # curvatures are averages over the level, which are a little smaller
    unit = np.sqrt(t**2 + 1 / (known * exact))
    sent = message(columns, y, shape, population, t, unit=unit, means=means)
    sums = stack_rounds([unpack_sums(sent[0], shape, 1e-6)])
    points = stack_rounds([point(population, t, unit)._replace(means=means)])
    estimates = server.column_means(sums, points)
    np.testing.assert_allclose(estimates[1:], columns[:, 1:].mean(axis=0), atol=0.05)
    assert server.typical_information(sums, points)[0] == pytest.approx(exact, rel=0.15)


@pytest.mark.parametrize(("sizes", "more"), [([5, 5, 5], 1), ([1, 7, 30], 60)], ids=str)
@pytest.mark.parametrize("random", ["auto", "all"])
def test_a_client_s_numbers_do_not_tell_how_many_rows_others_have(sizes, more, random, monkeypatch):
    """Nothing but the release depends on them, to the last bit."""
    blind(monkeypatch)
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(3), sizes)
    X, y = rng.normal(size=(len(groups), 2)), np.arange(len(groups)) % 2
    model = model_of(random=random, prior=GaussianPrior(covariance=1.0))
    before = clone(model).fit(X, y, groups=groups)
    added = np.full(more, 2)
    wider = np.concatenate([X, rng.normal(size=(more, 2))])
    after = model.fit(wider, np.append(y, added % 2), groups=np.append(groups, added))
    for name in ("population_coef_", "population_covariance_"):
        np.testing.assert_array_equal(getattr(after, name), getattr(before, name))
    for name in ("coef_", "intercept_", "coef_std_", "intercept_std_"):
        np.testing.assert_array_equal(getattr(after, name)[:2], getattr(before, name)[:2])
    at = np.repeat(np.arange(2), 4)
    chances = [fitted.predict_proba(X[:8], groups=at) for fitted in (after, before)]
    np.testing.assert_array_equal(*chances)


def test_the_report_names_what_is_promised():
    X, y, groups = draw(60)
    model = model_of().fit(X, y, groups=groups)
    report = model.privacy_
    assert (report.epsilon, report.delta, report.unit) == (2.0, 1e-5, "client")
    assert (report.relation, report.trust, report.n_clients) == ("replace_one", "central", 60)
    assert (report.sensitivity, report.rounds) == (2.0, 12)
    assert report.noise_std == pytest.approx(2 / gdp_mu(2.0, 1e-5))
    assert dict(report.epsilon_under)["zero_out"] < 1
    assert "coef_" in report.not_released
    assert "population_coef_" in report.released
    assert math.isnan(model.log_likelihood_)
    assert not hasattr(model, "_evidence")
    assert model.summary().loc[("fixed", "intercept"), "std_error"] > 0


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"feature_bound": None}, "feature_bound must be given"),
        ({"max_rows_per_client": None}, "max_rows_per_client must be given"),
        ({"max_rows_per_client": 0}, "max_rows_per_client"),
        ({"delta": 0.0}, "delta must be above 0"),
        ({"random": "all"}, "20 clients and epsilon=2 .* of 3 .* be 2.23 times"),
        ({"random": ["intercept", 0]}, "variance of each of 2 coefficients"),
        ({"random": [0, 1]}, "the intercept varies"),
        (
            {"random": "all", "prior": GaussianPrior(covariance_type="full"), "epsilon": 100.0},
            "diagonal covariance; got covariance_type='full'",
        ),
        ({"random": "all", "prior": GaussianPrior(covariance=np.eye(3) + 0.1)}, "must be diagonal"),
        ({"fit_intercept": False}, "fit_intercept=False"),
        ({"prior": GaussianPrior(mean=0.0)}, "prior without a mean"),
        ({"population_penalty": 1.0}, "population_penalty=1.0"),
        ({"n_rounds": 1}, "n_rounds"),
        ({"rate_range": None}, "rate_range must be given"),
        ({"rate_range": (3.0, 0.1)}, "smaller one first"),
        ({"rate_range": (0.0, 1.0)}, "from 0.0001 to 10000"),
        ({"rate_range": (1.0, 1e6)}, "another unit of exposure"),
        ({"rate_range": ("a", "b")}, "two numbers"),
        ({"feature_bound": 1e7}, "between 1e-06 and 1e\\+06; got 10000000.0. Rescale X"),
        ({"feature_bound": 1e-7}, "between 1e-06 and"),
        ({"max_rows_per_client": 10**400}, "max_rows_per_client must lie between 1 and 1e\\+06"),
        ({"prior": GaussianPrior(covariance=np.eye(3))}, "covariance"),
        ({"family": "negative_binomial"}, "family='poisson'"),
    ],
)
def test_what_a_private_fit_does_not_take(params, words, tmp_path):
    """Before the ledger is charged, and before a row is read."""
    kind = "counts" if {"rate_range", "family"} & params.keys() else "classes"
    X, y, groups = draw(20, kind=kind)
    ledger = PrivacyLedger(tmp_path / "ledger", budget=(3.0, 1e-4))
    model = model_of(kind, **{"ledger": ledger, **params})
    with pytest.raises(ValueError, match=words):
        model.fit(X, y, groups=groups)
    assert not hasattr(model, "privacy_")
    assert ledger.entries == []


def test_tiny_variances_are_refused():
    X, y, groups = draw(20)
    for variance in (0.0, 0.001, math.inf):
        with pytest.raises(ValueError, match=r"at least 0\.0025"):
            model_of(prior=GaussianPrior(covariance=variance)).fit(X, y, groups=groups)


@pytest.mark.parametrize(("random", "kind"), [("auto", "counts"), ("all", "classes")])
@given(st.integers(0, 10**6))
@settings(max_examples=8, deadline=None)
def test_absurd_rows_leave_finite_numbers(random, kind, seed):
    """With the widest bounds that are taken, too."""
    rng = np.random.default_rng(seed)
    m = rng.integers(1, 6)
    groups = np.append(np.arange(m), rng.integers(0, m, rng.integers(1, 30)))
    X = rng.normal(size=(len(groups), 2)) * 10.0 ** rng.integers(-100, 100, (len(groups), 2))
    y = rng.integers(0, 2, len(groups))
    y[:2] = 0, 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wide = {"feature_bound": 10.0 ** rng.choice([-6, 0, 6]), "n_rounds": 6}
        wide["max_rows_per_client"] = 10 ** rng.choice([0, 6])
        if kind == "counts":
            wide["rate_range"] = [(0.05, 20.0), (1e-4, 1e4), (1e-4, 2e-4)][rng.integers(3)]
        epsilon = float(rng.choice([0.01, 1e3])) if random == "auto" else 1e4
        model = model_of(kind, random=random, epsilon=epsilon, seed=1, **wide)
        model.fit(X, y * (1 if kind == "classes" else 10**6), groups=groups)
    for values in (coefficients(model), model.coef_, model.intercept_, model.intercept_std_):
        assert np.isfinite(values).all()


# How good it is -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("n", "level", "sd"), [(24, -2.5, 0.2), (24, -2.5, 2.5), (5, -2.5, 2.5)])
def test_far_from_the_start(n, level, sd):
    """300 clients, epsilon 2, base rates of .08: means of 12 tables and draws of noise."""
    sds, z = [], []
    for seed in range(12):
        X, y, groups = draw(300, n, level, sd, seed=seed)
        model = model_of(seed=100 + seed, max_rows_per_client=n).fit(X, y, groups=groups)
        sds.append(spread(model))
        z.append(np.abs(coefficients(model) - [level, *SLOPES]) / errors(model))
    # Five rows of a rare outcome do not tell spreads of 1 and below apart.
    assert abs(np.mean(sds) - sd) < max(0.25 * sd, 0.1)
    assert np.mean(np.array(z) < 3) > 0.95


@pytest.mark.slow
def test_stated_errors_cover():
    """Nominal .95, 20 tables of 200 clients x 20 rows with 6 binary features, epsilon 2."""
    d, hits = 6, []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        groups, X = np.repeat(np.arange(200), 20), rng.integers(0, 2, (4000, d)).astype(float)
        truth = np.append(-1.0, 0.5 * np.where(np.arange(d) % 2, -1, 1))
        odds = truth[0] + X @ truth[1:] + rng.normal(size=200)[groups]
        y = (rng.random(4000) < expit(odds)).astype(int)
        model = model_of(
            seed=1000 + seed, feature_bound=0.75 * math.sqrt(d), max_rows_per_client=20
        )
        model.fit(X, y, groups=groups)
        hits.append(np.abs(coefficients(model) - truth) < 1.96 * errors(model))
    assert np.mean(hits, axis=0).min() > 0.8
    assert np.mean(hits) > 0.9


@pytest.mark.slow
def test_intervals_of_what_is_constant_within_clients_cover():
    """Counts of 400 clients with 10 rows; noise on parts that say nothing of it had covered .73."""
    misses, stds = [], []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        groups = np.repeat(np.arange(400), 10)
        X = rng.normal(size=(4000, 2))
        X[:, 1] = X[::10, 1][groups]
        y = rng.poisson(np.exp(X @ [0.5, -0.5] + rng.normal(size=400)[groups]))
        model = model_of("counts", seed=1000 + seed, max_rows_per_client=10).fit(
            X, y, groups=groups
        )
        misses.append(coefficients(model) - [0.0, 0.5, -0.5])
        stds.append(errors(model))
    assert np.mean(np.abs(misses) < 1.96 * np.array(stds), axis=0).min() > 0.85
    assert np.abs(np.mean(misses, axis=0)).max() < 0.12
    assert np.std(misses, axis=0).max() < 0.35


def test_a_part_that_says_nothing_of_a_coefficient_adds_no_noise_to_it():
    """The last feature is constant within clients; within, its score is three times the noise."""
    shape, noise = LinkShape(2, 20, 0.25, 4.0), 0.01
    server = LinkServer(shape, PrivateStart(0.0, 3.0, 0.25, ""), 10**6, None)
    at = server.initial_state()
    within, between = np.array([0.0, 0.4, 3 * noise * shape.scales[0]]), np.array([0.1, 0.0, 0.2])
    information = np.diag([5.0, 0.0])
    sums = RoundSums(within, information, between, np.eye(3), np.ones((2, 1)), noise)
    with np.errstate(all="ignore"):
        goal, covariance = server._estimate_population(
            stack_rounds([sums]), stack_rounds([at]), np.zeros(3)
        )
    # The score between clients is in units, and their information is 1 over the unit's square.
    np.testing.assert_allclose(goal[[0, 2]], [0.1 * at.units[0], 0.2 * at.units[0]], atol=0.05)
    assert math.sqrt(covariance[2, 2]) < 0.2


@pytest.mark.slow
def test_intervals_with_slopes_cover_and_spreads_are_near():
    """1,000 clients with 24 rows, epsilon 2, 5 tables: without noise spreads are .67 for .7."""
    truth, hits, sds = [-0.5, 0.7, -0.7, 0.7], [], []
    for seed in range(5):
        X, y, groups = draw_slopes(1000, sds=(1.0, 0.7, 0.7, 0.7), seed=seed)
        model = model_of(seed=1000 + seed, feature_bound=math.sqrt(3), random="all")
        model.fit(X, y, groups=groups)
        hits.append(np.abs(coefficients(model) - truth) < 1.96 * errors(model))
        sds.append(np.sqrt(np.diag(model.prior_.covariance)))
    assert np.mean(np.array(hits)[:, 1:]) > 0.87
    level, *slopes = np.mean(sds, axis=0) / [1.0, 0.7, 0.7, 0.7]
    assert 0.9 < level < 1.1
    assert 0.85 < np.mean(slopes) < 1.1


@pytest.mark.slow
def test_a_spread_is_not_low_by_what_clipping_takes():
    """300 clients, epsilon 2: without a correction the mean of 18 tables is .93."""
    sds = []
    for seed in range(18):
        X, y, groups = draw(seed=seed)
        sds.append(spread(model_of(seed=100 + seed).fit(X, y, groups=groups)))
    assert np.mean(sds) == pytest.approx(1.0, abs=0.04)


@pytest.mark.slow
def test_clipping_leaves_no_bias_where_clients_are_many():
    X, y, groups = draw(5000, 20, -1.0, 2.5)
    model = model_of(max_rows_per_client=20).fit(X, y, groups=groups)
    assert spread(model) == pytest.approx(2.5, rel=0.04)
    np.testing.assert_allclose(coefficients(model), [-1.0, *SLOPES], atol=0.15)


def test_coefficients_far_from_the_start_are_warned_of():
    X, y, groups = draw(300, 20, 6.0, 0.5, kind="counts")
    with pytest.warns(PrivacyWarning, match="intercept is far .* wider rate_range"):
        model_of("counts", rate_range=(0.5, 2.0)).fit(X, y, groups=groups)


@pytest.mark.parametrize(
    ("random", "factor", "words"),
    [("auto", 0.01, "a larger feature_bound"), ("all", 12.0, "a smaller feature_bound")],
)
def test_what_a_bound_that_is_off_is_warned_of(random, factor, words):
    """Classes have no rate_range, and each cause has a remedy of its own."""
    X, y, groups = draw_slopes(400, sds=(1.0, 0.3, 0.3, 0.3))
    model = model_of(epsilon=20.0, feature_bound=factor * math.sqrt(3), random=random)
    with pytest.warns(PrivacyWarning, match=words) as caught:
        model.fit(X, y, groups=groups)
    text = " ".join(str(warning.message) for warning in caught)
    assert "rate_range" not in text
    assert text.count("would help") == 1


@pytest.mark.slow_but_first
@pytest.mark.parametrize("kind", ["classes", "counts"])
@pytest.mark.parametrize(("epsilon", "m", "noisy"), [(0.1, 60, True), (50.0, 1000, False)])
def test_fits_that_released_mostly_noise_say_so(kind, epsilon, m, noisy):
    X, y, groups = draw(m, 20, kind=kind)
    with pytest.warns(PrivacyWarning) as found:
        model = model_of(kind, epsilon=epsilon, max_rows_per_client=20, delta=1e-7).fit(
            X, y, groups=groups
        )
    assert ("mostly noise" in str(found[0].message)) == noisy
    assert any("mostly noise" in text for text in model.privacy_.warnings) == noisy
    assert any("more than half of the released variance" in t for t in model.privacy_.warnings) == (
        noisy
    )


@pytest.mark.slow
def test_counts_from_a_start_that_is_a_factor_of_20_away():
    gaps = []
    for seed in range(6):
        for level in (-3.0, 3.0):
            X, y, groups = draw(300, 24, level, 0.7, seed=seed, kind="counts")
            model = model_of("counts", rate_range=(0.005, 200.0), seed=seed).fit(
                X, y, groups=groups
            )
            gaps.append(coefficients(model) - [level, *SLOPES])
    assert np.abs(gaps).max() < 1.5
    assert np.abs(np.mean(gaps, axis=0)).max() < 0.5


@pytest.mark.slow
def test_public_answers_of_persons(data_home):
    """Verbal aggression: above the exact fit, in nats for held-out answers and for new persons."""
    table = pd.read_csv(data_home / "verbagg.csv.gz")
    kinds = pd.get_dummies(table[["Gender", "btype", "situ", "mode"]], drop_first=True)
    X = kinds.assign(anger=(table["Anger"] - 25) / 10).to_numpy(float)
    y, groups = (table["r2"] == "Y").to_numpy().astype(int), pd.factorize(table["id"])[0]
    answers, persons = np.random.default_rng(0).permutation(len(y)) % 5 > 0, groups % 5 > 0
    for kept, bars in ((answers, {2.0: 0.007, 1.0: 0.015}), (persons, {2.0: 0.01, 1.0: 0.02})):

        def loss(model, kept=kept):
            model.fit(X[kept], y[kept], groups=groups[kept])
            return log_loss(y[~kept], model.predict_proba(X[~kept], groups=groups[~kept]))

        base = loss(PersonalizedLogisticRegression(random="intercept", unseen="population"))
        for epsilon, bar in bars.items():
            losses = [loss(model_of(epsilon=epsilon, seed=s, feature_bound=2.0)) for s in range(8)]
            assert np.mean(losses) - base < bar
