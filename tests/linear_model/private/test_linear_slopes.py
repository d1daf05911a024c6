"""Private coefficients that all vary, with estimated variances: the promise, and how good it is."""

import math
import warnings

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings, strategies as st

from pfl_sklearn.linear_model import PersonalizedLinearRegression
from pfl_sklearn.linear_model._private import _constants as tuned, _linear_fit as private_fit
from pfl_sklearn.linear_model._private._checks import predicted_noise
from pfl_sklearn.linear_model._private._linear_fit import own_residuals, slope_messages
from pfl_sklearn.linear_model._private._linear_server import SlopeServer
from pfl_sklearn.priors import GaussianPrior
from pfl_sklearn.privacy import ClippedSum, PrivacyWarning, gdp_epsilon, gdp_mu
from pfl_sklearn.privacy._mechanisms import _clipped_sum as clipped_sum
from pfl_sklearn.privacy.auditing import gdp_lower_bound
from tests.helpers.blinded import blind, what_leaves

pytestmark = pytest.mark.filterwarnings(f"ignore::{PrivacyWarning.__module__}.PrivacyWarning")
WIDTHS = 10, 6, 6, 1  # of the parts of a message with three coefficients


def draw(m=1000, n=24, sds=(1.0, 0.5, 0.5), seed=0):
    """Features of -1/2 and 1/2, noise 1, and clients with coefficients of their own."""
    rng, q = np.random.default_rng(seed), len(sds)
    groups = np.repeat(np.arange(m), n)
    X = rng.integers(0, 2, (m * n, q - 1)) - 0.5
    truth = np.append(1.0, 0.7 * (-1.0) ** np.arange(q - 1))
    theta = (truth + np.array(sds) * rng.normal(size=(m, q)))[groups]
    y = theta[:, 0] + np.sum(X * theta[:, 1:], axis=1) + rng.normal(size=m * n)
    return X, y, groups, truth


def model_of(epsilon=2.0, seed=0, **params):
    params = {"feature_bound": 0.75, "target_bound": 5.0, "unseen": "population", **params}
    return PersonalizedLinearRegression(epsilon=epsilon, random_state=seed, **params)


def coefficients(model):
    return np.append(model.population_intercept_, model.population_coef_)


def errors(model):
    return np.append(model.population_intercept_std_, model.population_coef_std_)


def sds(model):
    return np.sqrt(np.append(np.diag(model.prior_.covariance), model.noise_variance_))


def test_scales_of_effects_have_a_limit(monkeypatch):
    """With a tiny known noise variance and rows far beyond their bounds they would reach 1e5."""
    scales, next_state = [], SlopeServer.next_state

    def spy(*args):
        scales.append((state := next_state(*args)).effect_scales.max())
        return state

    monkeypatch.setattr(SlopeServer, "next_state", spy)
    groups = np.repeat(np.arange(400), 8)
    X = np.random.default_rng(0).normal(size=(len(groups), 2))
    far = np.where(groups % 2, 1e3, -1e3) * X[:, 0]
    model = model_of(30.0, feature_bound=3.0, target_bound=3.0, noise_variance=1e-9)
    model.fit(X, far, groups=groups)
    assert max(scales) == tuned.LARGEST_EFFECT


def test_without_noise_to_speak_of_it_is_nearly_the_exact_fit():
    X, y, groups, _ = draw()
    private = model_of(1e6).fit(X, y, groups=groups)
    exact = PersonalizedLinearRegression().fit(X, y, groups=groups)
    np.testing.assert_allclose(coefficients(private), coefficients(exact), atol=0.02)
    np.testing.assert_allclose(sds(private), sds(exact), rtol=0.04)
    np.testing.assert_allclose(private.coef_, exact.coef_, atol=0.1)
    np.testing.assert_allclose(errors(private), errors(exact), rtol=0.1)
    assert private.prior_.covariance[0, 1] == 0


def test_a_known_noise_variance_stays():
    X, y, groups, truth = draw(2000, 3)
    model = model_of(50.0, noise_variance=1.0).fit(X, y, groups=groups)
    assert model.noise_variance_ == 1.0
    np.testing.assert_allclose(coefficients(model), truth, atol=0.2)
    np.testing.assert_allclose(sds(model)[:-1], [1.0, 0.5, 0.5], atol=0.2)
    with pytest.raises(ValueError, match="noise_variance must be given"):
        model_of(50.0).fit(X, y, groups=groups)


def test_without_an_intercept():
    X, y, groups, truth = draw(sds=(0.0, 0.5, 0.5))
    model = model_of(20.0, fit_intercept=False).fit(X, y - 1, groups=groups)
    np.testing.assert_allclose(model.population_coef_, truth[1:], atol=0.1)
    np.testing.assert_allclose(sds(model), [0.5, 0.5, 1.0], atol=0.1)


def test_messages_are_posterior_means_and_information():
    """Against the marginal model of a client, written out."""
    rng = np.random.default_rng(0)
    rows = np.column_stack([np.ones(9), rng.normal(size=(9, 3)), np.ones(9)])
    server = SlopeServer(2.0, 4.0, 2, np.full(2, 9), None, 1.0)
    state = server.begin()._replace(
        population=np.array([0.3, -0.2, 0.5]), between=np.array([0.5, 2.0, 0.1]), noise=0.7
    )
    sent = slope_messages((np.zeros(1, dtype=int), rows[None]), state, server)[0]
    # One client of weight 1 whose message is whole.
    sums = server._replace(sizes=np.array([9]))._sums(sent, state, 1e-9)
    X, residuals, roots = (
        rows[:, :3],
        rows[:, 3] - rows[:, :3] @ state.population,
        state.between**0.5,
    )
    inverse = np.linalg.inv(X * state.between @ X.T + 0.7 * np.eye(9))
    information = roots[:, None] * (X.T @ inverse @ X) * roots
    np.testing.assert_allclose(sums.information, information, rtol=1e-8)
    np.testing.assert_allclose(sums.effects, roots * (X.T @ inverse @ residuals), rtol=1e-8)
    np.testing.assert_allclose(sums.squares, sums.effects**2, rtol=1e-8)
    np.testing.assert_allclose(sums.squared, information**2, rtol=1e-8)
    left = residuals - X @ np.linalg.lstsq(X, residuals, rcond=None)[0]
    assert sums.within == pytest.approx(left @ left / 6)


# What the promise rests on ------------------------------------------------------------------------


@pytest.mark.slow
def test_hostile_clients_move_a_sum_by_at_most_the_root_of_two():
    """2,000 pairs of clients with absurd rows, in absurd rounds."""
    rng, mechanism, distances = np.random.default_rng(0), ClippedSum(1.0), []
    for _ in range(2000):
        n, sums = rng.integers(1, 9), []
        bound, target = 10 ** rng.uniform(-3, 3, 2)
        server = SlopeServer(bound, target, 2, np.array([n, 3, 9]), None, 1.0)
        state = server.begin()._replace(
            population=10 ** rng.uniform(-2, 12) * rng.normal(size=3),
            between=10 ** rng.uniform(-4, 4, 3),
            noise=10 ** rng.uniform(-4, 4),
            within_scale=10 ** rng.uniform(-8, 4),
            effect_scales=10 ** rng.uniform(-2, 1, 3),
        )
        for _ in range(2):
            rows = 10 ** rng.uniform(-5, rng.choice([3, 100, 149]), 4) * rng.normal(size=(n, 4))
            batch = np.zeros(1, dtype=int), np.column_stack([rows, np.ones(n)])[None]
            with np.errstate(all="ignore"):
                sent = slope_messages(batch, state, server)
            sums.append(mechanism.release(sent, 1.0, 1, rng).total)
        assert np.isfinite(sums).all()
        distances.append(np.linalg.norm(sums[0] - sums[1]))
    assert 1.3 < max(distances) <= math.sqrt(2) + 1e-9


@pytest.mark.parametrize("value", [3.0, 1e150, 1e300, -1e-3])
def test_a_client_reaches_the_others_through_the_sums_alone(value, monkeypatch):
    blind(monkeypatch)
    X, y, groups, _ = draw(12, 9)
    own = groups == 0
    changed, other = np.where(own[:, None], value, 1.0) * X, np.where(own, -value, 1.0) * y
    first = what_leaves(model_of(1e3).fit, X, y, groups, 0)
    second = what_leaves(model_of(1e3).fit, changed, other, groups, 0)
    assert {name for name in first if first[name] != second[name]} == set()


@given(st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_absurd_rows_leave_finite_numbers(seed):
    rng = np.random.default_rng(seed)
    groups = np.append(np.repeat(np.arange(5), 4), rng.integers(0, 5, 10))
    X = rng.normal(size=(30, 2)) * 10.0 ** rng.integers(-300, 300, (30, 2))
    y = rng.normal(size=30) * 10.0 ** rng.integers(-300, 300, 30)
    first, second = 10 ** rng.uniform(-50, 50, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        noise = rng.choice([None, 10 ** rng.uniform(-10, 10) * second**2])
        bounds = {"feature_bound": first, "target_bound": second, "noise_variance": noise}
        model = model_of(1e3, **bounds).fit(X, y, groups=groups)
    for values in (coefficients(model), errors(model), sds(model)):
        assert np.isfinite(values).all()
    assert (sds(model) > 0).all()


def test_the_report_and_the_rounds(monkeypatch):
    spent, release = [], ClippedSum.release

    def spy(self, *args):
        spent.append(self.noise_multiplier)
        return release(self, *args)

    monkeypatch.setattr(ClippedSum, "release", spy)
    X, y, groups, _ = draw()
    report = model_of().fit(X, y, groups=groups).privacy_
    assert (report.epsilon, report.sensitivity, report.rounds) == (2.0, math.sqrt(2), 4)
    assert math.sqrt(sum(2 / std**2 for std in spent)) == pytest.approx(gdp_mu(2.0, 1e-5))
    assert "in each of 4 rounds" in report.mechanism


def test_too_much_noise_is_refused_with_its_figure():
    X, y, groups, _ = draw(100, 6)
    model = model_of(1.0)
    noise = predicted_noise(100, 3, model)
    with pytest.raises(ValueError, match=rf"about {noise:.2g} of it.*random='intercept'"):
        model.fit(X, y, groups=groups)
    assert noise > predicted_noise(1000, 3, model) > predicted_noise(1000, 1, model)


def test_slopes_that_noise_hides_are_named():
    X, y, groups, _ = draw(1000, 24, (1.0, 1.0, 0.0))
    told = " ".join(model_of(1.0).fit(X, y, groups=groups).privacy_.warnings)
    assert "between clients of x1:" in told
    X, y, groups, _ = draw(5000, 24)
    told = " ".join(model_of().fit(X, y, groups=groups).privacy_.warnings)
    assert "between clients" not in told


def attacked(n_fits, monkeypatch):
    """Scores of fits in which a client sends one message, far too long, or an orthogonal one."""
    X, y, groups, _ = draw(5, 9)
    sides, side, scores = {True: [], False: []}, True, []
    send, release = private_fit.slope_messages, ClippedSum.release
    # Diagonal entries of the first two parts.
    here, there = [4, 10], [7, 13]

    def sent(batch, *args):
        messages = send(batch, *args)
        messages[batch[0] == 0] = 0.0
        messages[np.ix_(batch[0] == 0, here if side else there)] = 1e6
        return messages

    def spy(self, messages, bound, n_expected, rng):
        released = release(self, messages, bound, n_expected, rng)
        left = released.total - release(ClippedSum(1.0), messages[1:], bound, n_expected, rng).total
        scores.append((left[here].sum() - left[there].sum()) / self.noise_multiplier**2)
        return released

    monkeypatch.setattr(private_fit, "slope_messages", sent)
    monkeypatch.setattr(ClippedSum, "release", spy)
    check = "pfl_sklearn.linear_model._private._checks.check_noise_on_slopes"
    monkeypatch.setattr(check, lambda *args: None)
    model = model_of(gdp_epsilon(2.0, 1e-5))
    for seed in range(2 * n_fits):
        side = seed % 2 == 0
        scores.clear()
        model.set_params(random_state=seed).fit(X, y, groups=groups)
        sides[side].append(sum(scores))
    return sides[True], sides[False]


@pytest.mark.slow
def test_an_audit_of_all_rounds(monkeypatch):
    assert 1.0 < gdp_lower_bound(*attacked(600, monkeypatch)) <= 2.0


@pytest.mark.slow
@pytest.mark.parametrize("mutant", ["noise halved", "parts clipped apart"])
def test_mutants_are_convicted(mutant, monkeypatch):
    clip = clipped_sum._clipped_sum

    def apart(messages, bound, bounded):
        parts = np.split(messages, np.cumsum(WIDTHS)[:-1], axis=1)
        kept = np.ones(len(messages), dtype=bool)
        return np.concatenate([clip(part, bound, bounded)[0] for part in parts]), kept

    if mutant == "noise halved":
        monkeypatch.setattr(tuned, "ROUND_SHARES", tuple(4 * s for s in tuned.ROUND_SHARES))
    else:
        monkeypatch.setattr(clipped_sum, "_clipped_sum", apart)
    assert gdp_lower_bound(*attacked(600, monkeypatch)) > 2.0


# How good it is -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("m", "n", "epsilon", "between"),
    [
        (1000, 24, 1.0, (1.0, 0.5, 0.5)),
        (300, 24, 2.0, (1.0, 0.5, 0.5)),
        (1000, 24, 2.0, (1.0, 0.5, 0.5, 0.5, 0.5, 0.5)),
        (1000, 24, 1.0, (0.2, 1.0)),
        (5000, 10, 2.0, (1.0, 0.5, 0.5)),
    ],
    ids=str,
)
def test_variances_and_errors(m, n, epsilon, between):
    """Means of 20 tables and draws of the noise, and coverage at .95."""
    found, hits = [], []
    for seed in range(20):
        X, y, groups, truth = draw(m, n, between, seed)
        model = model_of(epsilon, 1000 + seed, feature_bound=0.5 * math.sqrt(len(between) - 1))
        model.fit(X, y, groups=groups)
        found.append(sds(model))
        hits.append(np.abs(coefficients(model) - truth) < 1.96 * errors(model))
    np.testing.assert_allclose(np.mean(found, axis=0), [*between, 1.0], rtol=0.1, atol=0.05)
    assert np.mean(hits) > 0.9


def test_marks_of_schools(data_home):
    """Chemistry marks of 2,280 schools by earlier marks, epsilon 1: within 1 % of the exact fit."""
    marks = pd.read_csv(data_home / "chem97.csv.gz")
    X, y = marks[["gcsecnt"]].to_numpy(float), marks["score"].to_numpy(float) - 5
    groups = marks["school"].to_numpy()
    kept = np.random.default_rng(0).random(len(y)) < 0.8

    def loss(model):
        model.fit(X[kept], y[kept], groups=groups[kept])
        return math.sqrt(np.mean((y[~kept] - model.predict(X[~kept], groups=groups[~kept])) ** 2))

    exact = loss(PersonalizedLinearRegression(unseen="population"))
    private = [loss(model_of(1.0, seed, feature_bound=2.0)) for seed in range(5)]
    assert np.mean(private) < 1.01 * exact
    own = loss(PersonalizedLinearRegression(GaussianPrior(covariance=np.inf), unseen="population"))
    assert np.mean(private) < own


@pytest.mark.parametrize("turned", [False, True])
def test_a_feature_that_is_constant_within_a_client_takes_no_residual(turned):
    """Its direction is rounding, which a rotation of the rows changes."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(1, 9, 4))
    rows[..., 0], rows[..., 2] = 1.0, 0.3
    left = rows[0, :, 3] - rows[0, :, :2] @ np.linalg.lstsq(rows[0, :, :2], rows[0, :, 3])[0]
    if turned:
        rows = np.linalg.qr(rng.normal(size=(9, 9)))[0] @ rows
    squares, rank = own_residuals(rows)
    assert rank == [2]
    np.testing.assert_allclose(squares, left @ left, rtol=1e-12)
