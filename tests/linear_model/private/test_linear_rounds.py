"""Private linear regressions with estimated variances: privacy, refusals, and accuracy."""

import math
import warnings

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings, strategies as st

from pfl_sklearn.linear_model import PersonalizedLinearRegression
from pfl_sklearn.linear_model._private import _constants as tuned, _linear_fit as private_fit
from pfl_sklearn.linear_model._private._checks import predicted_noise
from pfl_sklearn.linear_model._private._linear_fit import (
    intercept_messages,
    least_squares_residuals,
    slope_messages,
)
from pfl_sklearn.linear_model._private._linear_server import (
    InterceptServer,
    LinearState,
    SlopeServer,
)
from pfl_sklearn.priors import GaussianPrior
from pfl_sklearn.privacy import ClippedSum, PrivacyLedger, PrivacyWarning, gdp_mu
from tests.helpers.blinded import blind, what_leaves
from tests.helpers.round_noise import check_noise, record_noise

pytestmark = pytest.mark.filterwarnings(f"ignore::{PrivacyWarning.__module__}.PrivacyWarning")
SLOPES = np.array([0.7, -0.7])
every_model = pytest.mark.parametrize("random", ["intercept", "all"])


def draw(m=300, n=24, sd=1.0, seed=0):
    """Two binary features, targets with noise 1, and clients with intercepts of their own."""
    rng = np.random.default_rng(seed)
    groups, X = np.repeat(np.arange(m), n), rng.integers(0, 2, (m * n, 2)).astype(float)
    y = 1.0 + X @ SLOPES + sd * rng.normal(size=m)[groups] + rng.normal(size=m * n)
    return X, y, groups


def draw_slopes(m=1000, n=24, sds=(1.0, 0.5, 0.5), seed=0):
    """Features of -1/2 and 1/2, noise 1, and clients with coefficients of their own."""
    rng, q = np.random.default_rng(seed), len(sds)
    groups = np.repeat(np.arange(m), n)
    X = rng.integers(0, 2, (m * n, q - 1)) - 0.5
    truth = np.append(1.0, 0.7 * (-1.0) ** np.arange(q - 1))
    theta = (truth + np.array(sds) * rng.normal(size=(m, q)))[groups]
    y = theta[:, 0] + np.sum(X * theta[:, 1:], axis=1) + rng.normal(size=m * n)
    return X, y, groups, truth


def table_of(random, m, n):
    return draw(m, n) if random == "intercept" else draw_slopes(m, n)[:3]


def model_of(epsilon=2.0, seed=0, random="intercept", **params):
    bounds = {"feature_bound": math.sqrt(2) if random == "intercept" else 0.75, "target_bound": 5.0}
    params = {**bounds, "unseen": "population", "epsilon": epsilon, "random": random, **params}
    return PersonalizedLinearRegression(random_state=seed, **params)


def coefficients(model):
    return np.append(model.population_intercept_, model.population_coef_)


def errors(model):
    return np.append(model.population_intercept_std_, model.population_coef_std_)


def sds(model):
    """Standard deviations between clients and of the noise."""
    return np.sqrt(np.append(np.diag(model.prior_.covariance), model.noise_variance_))


@pytest.mark.parametrize(
    ("random", "m", "share", "rtol", "atol"),
    [("intercept", 300, 0.6, 0.01, 0.05), ("all", 1000, 1.0, 0.04, 0.1)],
)
def test_without_noise_to_speak_of_it_is_nearly_the_exact_fit(random, m, share, rtol, atol):
    X, y, groups = table_of(random, m, 24)
    keep = np.random.default_rng(0).random(len(y)) < share
    X, y, groups = X[keep], y[keep], groups[keep]
    private = model_of(1e6, random=random).fit(X, y, groups=groups)
    exact = model_of(math.inf, random=random).fit(X, y, groups=groups)
    np.testing.assert_allclose(coefficients(private), coefficients(exact), atol=0.02)
    np.testing.assert_allclose(sds(private), sds(exact), rtol=rtol)
    np.testing.assert_allclose(private.intercept_, exact.intercept_, atol=atol)
    np.testing.assert_allclose(private.coef_, exact.coef_, atol=atol)
    np.testing.assert_allclose(errors(private), errors(exact), rtol=0.15)


def test_without_an_intercept():
    X, y, groups, truth = draw_slopes(sds=(0.0, 0.5, 0.5))
    model = model_of(20.0, random="all", fit_intercept=False).fit(X, y - 1, groups=groups)
    np.testing.assert_allclose(model.population_coef_, truth[1:], atol=0.1)
    np.testing.assert_allclose(sds(model), [0.5, 0.5, 1.0], atol=0.1)


def test_a_known_noise_variance_stays(tmp_path):
    ledger = PrivacyLedger(tmp_path / "ledger")
    for random, m, n in (("intercept", 3000, 1), ("all", 2000, 3)):
        X, y, groups = table_of(random, m, n)
        model = model_of(50.0, random=random, noise_variance=1.0).fit(X, y, groups=groups)
        assert model.noise_variance_ == 1.0
        np.testing.assert_allclose(coefficients(model), [1.0, *SLOPES], atol=0.2)
        assert sds(model)[0] == pytest.approx(1.0, abs=0.2)
        with pytest.raises(ValueError, match="noise_variance must be given"):
            model_of(50.0, random=random, ledger=ledger).fit(X, y, groups=groups)
    assert not ledger.entries  # refused before it was charged


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
    model = model_of(30.0, random="all", feature_bound=3.0, target_bound=3.0, noise_variance=1e-9)
    model.fit(X, far, groups=groups)
    assert max(scales) == tuned.LARGEST_EFFECT


def test_messages_are_posterior_means_and_information():
    """Against the marginal model of a client, written out."""
    rng = np.random.default_rng(0)
    rows = np.column_stack([np.ones(9), rng.normal(size=(9, 3)), np.ones(9)])
    server = SlopeServer(2.0, 4.0, 2, np.full(2, 9), None, 1.0)
    state = server.initial_state()._replace(
        population=np.array([0.3, -0.2, 0.5]), between=np.array([0.5, 2.0, 0.1]), noise=0.7
    )
    sent = slope_messages((np.zeros(1, dtype=int), rows[None]), state, server)[0]
    # One client of weight 1 whose message is whole.
    sums = server._replace(sizes=np.array([9]))._sums(sent, state, 1e-9)
    X, roots = rows[:, :3], state.between**0.5
    residuals = rows[:, 3] - X @ state.population
    inverse = np.linalg.inv(X * state.between @ X.T + 0.7 * np.eye(9))
    information = roots[:, None] * (X.T @ inverse @ X) * roots
    np.testing.assert_allclose(sums.information, information, rtol=1e-8)
    np.testing.assert_allclose(sums.effects, roots * (X.T @ inverse @ residuals), rtol=1e-8)
    np.testing.assert_allclose(sums.squares, sums.effects**2, rtol=1e-8)
    np.testing.assert_allclose(sums.squared, information**2, rtol=1e-8)
    left = residuals - X @ np.linalg.lstsq(X, residuals, rcond=None)[0]
    assert sums.within == pytest.approx(left @ left / 6)


@pytest.mark.parametrize("turned", [False, True])
def test_a_feature_that_is_constant_within_a_client_takes_no_residual(turned):
    """Its direction is rounding, which a rotation of the rows changes."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(1, 9, 4))
    rows[..., 0], rows[..., 2] = 1.0, 0.3
    left = rows[0, :, 3] - rows[0, :, :2] @ np.linalg.lstsq(rows[0, :, :2], rows[0, :, 3])[0]
    if turned:
        rows = np.linalg.qr(rng.normal(size=(9, 9)))[0] @ rows
    squares, rank = least_squares_residuals(rows)
    assert rank == [2]
    np.testing.assert_allclose(squares, left @ left, rtol=1e-12)


# Privacy ------------------------------------------------------------------------------------------


@every_model
def test_rounds_together_spend_the_epsilon(random, monkeypatch):
    """A replaced client moves a sum by sqrt(2); squares of that over noise_std add up to mu^2."""
    rounds = record_noise(monkeypatch)
    X, y, groups = table_of(random, 1000, 5)
    report = model_of(random=random).fit(X, y, groups=groups).privacy_
    assert len(rounds) == len(tuned.ROUND_SHARES)
    check_noise(rounds, report, math.sqrt(2), gdp_mu(2.0, 1e-5))


def server_of(sizes, feature_bound=2.0, target_bound=5.0, d=2):
    return InterceptServer(feature_bound, target_bound, d, np.asarray(sizes), None, 1.0)


def message(values, server, state):
    """One client's message (1, length) for features and targets (n, d + 1)."""
    ones = np.ones(len(values))
    rows = np.column_stack([ones, values, ones])[None]
    with np.errstate(all="ignore"):
        return intercept_messages((np.zeros(1, dtype=int), rows), state, server)


def absurd_intercept_round(rng):
    """Messages of a round with absurd bounds and estimates, as a function of a client's rows."""
    n = rng.integers(1, 12)
    server = server_of([n, 3, 9], *10 ** rng.uniform(-3, 3, 2))
    state = LinearState(
        10 ** rng.uniform(-2, 12) * rng.normal(size=3),
        np.eye(3),
        *10 ** rng.uniform(-4, 4, 3),
        0.0,
        1.0,
        *10 ** rng.uniform(-8, 4, 2),
        10 ** rng.uniform(-4, 4, 2),
    )
    return n, 200, 3, lambda values: message(values, server, state)


def absurd_slope_round(rng):
    n = rng.integers(1, 9)
    bound, target = 10 ** rng.uniform(-3, 3, 2)
    server = SlopeServer(bound, target, 2, np.array([n, 3, 9]), None, 1.0)
    state = server.initial_state()._replace(
        population=10 ** rng.uniform(-2, 12) * rng.normal(size=3),
        between=10 ** rng.uniform(-4, 4, 3),
        noise=10 ** rng.uniform(-4, 4),
        within_scale=10 ** rng.uniform(-8, 4),
        effect_scales=10 ** rng.uniform(-2, 1, 3),
    )

    def send(rows):
        batch = np.zeros(1, dtype=int), np.column_stack([rows, np.ones(n)])[None]
        with np.errstate(all="ignore"):
            return slope_messages(batch, state, server)

    return n, 149, 4, send


@pytest.mark.slow
@pytest.mark.parametrize("draw_round", [absurd_intercept_round, absurd_slope_round])
def test_hostile_clients_move_a_sum_by_at_most_the_root_of_two(draw_round):
    """500 pairs of clients with absurd rows, in absurd rounds."""
    rng, mechanism, distances = np.random.default_rng(0), ClippedSum(1.0), []
    for _ in range(500):
        n, largest, width, send = draw_round(rng)
        sums = []
        for _ in range(2):
            scales = 10 ** rng.uniform(-5, rng.choice([3, 100, largest]), width)
            sent = send(scales * rng.normal(size=(n, width)))
            sums.append(mechanism.release(sent, 1.0, 1, rng).total)
        assert np.isfinite(sums).all()
        distances.append(np.linalg.norm(sums[0] - sums[1]))
    assert 1.3 < max(distances) <= math.sqrt(2) + 1e-9


def test_both_parts_share_one_bound():
    rows = 30 * np.random.default_rng(0).normal(size=(400, 3)) + 30
    server = server_of([400, 400])
    sent = message(rows, server, server.initial_state())
    assert min(np.linalg.norm(part) for part in np.split(sent[0], [6])) > 1
    total = ClippedSum(1.0).release(sent, 1.0, 1, np.random.default_rng(0)).total
    assert np.linalg.norm(total) == pytest.approx(1)


def test_weights_come_from_numbers_of_rows():
    server = server_of([1, 2, 4, 9, 1000])
    np.testing.assert_allclose(server.within_weights, np.array([0, 2, 6, 11, 11]) / 11)
    state = server.initial_state()._replace(noise=4.0, between=1.0)
    expected = np.array([1, 2, 4, 9, 1000]) / (np.array([1, 2, 4, 9, 1000]) + 4)
    np.testing.assert_allclose(server.between_weights(state), expected / expected[-1])


@pytest.mark.parametrize(
    ("random", "value"), [("intercept", 3.0), ("intercept", 1e300), ("all", 1e150), ("all", -1e-3)]
)
def test_a_client_reaches_the_others_through_the_sums_alone(random, value, monkeypatch):
    blind(monkeypatch)
    X, y, groups = draw(12, 9)
    own, model = groups == 0, model_of(1e3, random=random)
    changed, other = np.where(own[:, None], value, 1.0) * X, np.where(own, -value, 1.0) * y
    first = what_leaves(model.fit, X, y, groups, 0)
    second = what_leaves(model.fit, changed, other, groups, 0)
    assert {name for name in first if first[name] != second[name]} == set()


def test_a_scale_from_the_data_is_convicted(monkeypatch):
    """What the blinded test is for: a server that looks at a client's targets."""
    blind(monkeypatch)
    send, next_state, seen = private_fit.intercept_messages, InterceptServer.next_state, []

    def peeking(batch, *args):
        seen.append(np.abs(batch[1][..., -2].mean(axis=1)).max())
        return send(batch, *args)

    def scaled(self, *args):
        return next_state(self, *args)._replace(within_scale=seen[-1] ** 2)

    monkeypatch.setattr(private_fit, "intercept_messages", peeking)
    monkeypatch.setattr(InterceptServer, "next_state", scaled)
    X, y, groups = draw(12, 9)
    first, second = (
        what_leaves(model_of().fit, X, np.where(groups == 0, by, 1.0) * y, groups, 0)
        for by in (1.0, 50.0)
    )
    assert any(first[name] != second[name] for name in first if "population_coef_" in name)


def test_the_report_names_what_is_promised():
    X, y, groups = draw(60)
    model = model_of().fit(X, y, groups=groups)
    report = model.privacy_
    assert (report.epsilon, report.delta, report.unit) == (2.0, 1e-5, "client")
    assert (report.relation, report.trust, report.n_clients) == ("replace_one", "central", 60)
    assert (report.sensitivity, report.rounds) == (math.sqrt(2), 4)
    assert report.noise_std == pytest.approx(math.sqrt(2) / gdp_mu(2.0, 1e-5))
    assert 1 < dict(report.epsilon_under)["zero_out"] < 2
    assert "in each of 4 rounds" in report.mechanism
    assert "coef_" in report.not_released
    assert "prior_" in report.released
    assert math.isnan(model.log_likelihood_)
    assert not hasattr(model, "_evidence")
    assert model.icc_ == pytest.approx(sds(model)[0] ** 2 / np.sum(sds(model) ** 2))
    # The variances have no intervals: they come from noisy sums, not from a likelihood.
    assert set(model.conf_int().index.get_level_values("part")) == {"fixed"}


@pytest.mark.parametrize(
    "params",
    [
        {"random": "all"},  # for which there are too few clients
        {"random": "all", "prior": GaussianPrior(covariance_type="full")},
        {"random": ["intercept", 0]},
        {"random": [0]},
        {"unit": "row"},
        {"prior": GaussianPrior(mean=0.0)},
        {"relation": "add_remove"},
    ],
)
def test_otherwise_the_covariance_has_to_be_given(params, tmp_path):
    X, y, groups = draw(20)
    ledger = PrivacyLedger(tmp_path / "ledger", budget=(3.0, 1e-4))
    with pytest.raises(ValueError, match=r"GaussianPrior\(covariance=") as caught:
        model_of(ledger=ledger, **params).fit(X, y, groups=groups)
    assert not ledger.entries  # a refusal by public numbers spends nothing
    if params.get("relation") is None:  # the other way out
        assert "random='intercept'" in str(caught.value)


@pytest.mark.parametrize("random", ["intercept", "all"])
@pytest.mark.parametrize("noise", [1e-200, 1e300])
def test_an_absurd_noise_variance_is_refused(noise, random, tmp_path):
    X, y, groups = draw(20)
    ledger = PrivacyLedger(tmp_path / "ledger", budget=(2000.0, 1e-4))
    model = model_of(1e3, ledger=ledger, random=random, noise_variance=noise)
    with pytest.raises(ValueError, match="noise_variance must lie between"):
        model.fit(X, y, groups=groups)
    assert not ledger.entries


@every_model
@given(st.integers(0, 10**6))
@settings(max_examples=8, deadline=None)
def test_absurd_rows_leave_finite_numbers(random, seed):
    rng = np.random.default_rng(seed)
    groups = np.append(np.repeat(np.arange(4), 4), rng.integers(0, 4, rng.integers(1, 20)))
    n = len(groups)
    X = rng.normal(size=(n, 2)) * 10.0 ** rng.integers(-300, 300, (n, 2))
    y = rng.normal(size=n) * 10.0 ** rng.integers(-300, 300, n)
    feature_bound, target_bound = 10 ** rng.uniform(-50, 50, 2)
    noise = rng.choice([None, 10 ** rng.uniform(-10, 10) * target_bound**2])
    bounds = {"feature_bound": feature_bound, "target_bound": target_bound, "noise_variance": noise}
    epsilon = float(rng.choice([0.01, 1e3])) if random == "intercept" else 1e3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = model_of(epsilon, random=random, **bounds).fit(X, y, groups=groups)
    for values in (coefficients(model), errors(model), sds(model)):
        assert np.isfinite(values).all()
    assert (sds(model) > 0).all()


def test_too_much_noise_is_refused_with_its_figure():
    X, y, groups, _ = draw_slopes(100, 6)
    model = model_of(1.0, random="all")
    noise = predicted_noise(100, 3, model)
    with pytest.raises(ValueError, match=rf"about {noise:.2g} of it.*random='intercept'"):
        model.fit(X, y, groups=groups)
    assert noise > predicted_noise(1000, 3, model) > predicted_noise(1000, 1, model)


def test_lost_variances_are_warned_of():
    X, y, groups = draw(20)
    with pytest.warns(PrivacyWarning, match="mostly noise"):
        model_of(0.1).fit(X, y, groups=groups)


def warned_of(model, *data):
    """What the report of a fit warns of, besides its seed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        texts = model.fit(*data[:2], groups=data[2]).privacy_.warnings
    return " ".join(text for text in texts if "random_state" not in text)


@pytest.mark.slow
def test_variances_that_noise_hides_are_named():
    X, y, groups = draw(300, 10, 0.0)
    assert "variance between clients of intercept" in warned_of(model_of(1.0), X, y, groups)
    assert warned_of(model_of(), *draw(1000, 10)) == ""
    table = draw_slopes(1000, 24, (1.0, 1.0, 0.0))[:3]
    assert "between clients of x1:" in warned_of(model_of(1.0, random="all"), *table)
    assert "between clients" not in warned_of(model_of(random="all"), *draw_slopes(5000, 10)[:3])


@pytest.mark.parametrize("bound", ["feature_bound", "target_bound"])
def test_clipping_most_of_the_messages_is_warned_of(bound):
    X, y, groups = draw(1000, 10)
    text = warned_of(model_of(**{bound: 0.1}), 2 * X - 1, y, groups)
    assert "a larger feature_bound or target_bound" in text


# Accuracy -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("n", "sd"), [(5, 0.2), (24, 3.0), (100, 1.0)])
def test_variances_and_errors(n, sd):
    """300 clients, epsilon 2: means of 20 tables and draws of the noise, and coverage at .95."""
    found, hits = [], []
    for seed in range(20):
        X, y, groups = draw(300, n, sd, seed)
        model = model_of(seed=1000 + seed, target_bound=max(5.0, 10 * sd / 3))
        model.fit(X, y, groups=groups)
        found.append(sds(model))
        hits.append(np.abs(coefficients(model) - [1.0, *SLOPES]) < 1.96 * errors(model))
    # Noise does not tell .2 from .3.
    np.testing.assert_allclose(np.mean(found, axis=0), [sd, 1.0], rtol=0.1, atol=0.1)
    assert np.mean(hits) > 0.9


@pytest.mark.slow
def test_stated_errors_cover():
    """Nominal .95, 20 tables of 200 clients with 2 to 30 rows, epsilon 1, 6 features."""
    d, hits = 6, []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        groups = np.repeat(np.arange(200), rng.integers(2, 31, 200))
        X = rng.integers(0, 2, (len(groups), d)).astype(float)
        truth = np.append(-1.0, 0.5 * np.where(np.arange(d) % 2, -1, 1))
        y = truth[0] + X @ truth[1:] + 0.7 * rng.normal(size=200)[groups]
        model = model_of(1.0, 1000 + seed, feature_bound=0.75 * math.sqrt(d))
        model.fit(X, y + rng.normal(size=len(y)), groups=groups)
        hits.append(np.abs(coefficients(model) - truth) < 1.96 * errors(model))
    assert np.mean(hits, axis=0).min() > 0.8
    assert np.mean(hits) > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.5, 3.0])
def test_features_that_fill_or_exceed_their_bound(share):
    """Two features of -1 and 1; the bound is this share of their norm. 28 tables of 10 rows."""
    m, epsilon, estimates, hits = 200, 1.0, [], []
    for seed in range(27000, 27028):
        X, y, groups = draw(m, 10, seed=seed)
        # The same model in other units, with the level at features of 0.
        X, truth = 2 * X - 1, np.append(1 + SLOPES.sum() / 2, SLOPES / 2)
        model = model_of(epsilon, 1000 + seed, feature_bound=share * math.sqrt(2)).fit(
            X, y, groups=groups
        )
        estimates.append(sds(model))
        hits.append(np.abs(coefficients(model) - truth) < 1.96 * errors(model))
    np.testing.assert_allclose(np.mean(estimates, axis=0), 1.0, atol=0.15)
    assert np.mean(hits, axis=0).min() > 0.85


@pytest.mark.slow
@pytest.mark.parametrize(
    ("m", "n", "epsilon", "between"),
    [
        (300, 24, 2.0, (1.0, 0.5, 0.5)),
        (1000, 24, 2.0, (1.0, 0.5, 0.5, 0.5, 0.5, 0.5)),
        (1000, 24, 1.0, (0.2, 1.0)),
    ],
    ids=str,
)
def test_variances_of_slopes_and_errors(m, n, epsilon, between):
    """Means of 20 tables and draws of the noise, and coverage at .95."""
    found, hits = [], []
    for seed in range(20):
        X, y, groups, truth = draw_slopes(m, n, between, seed)
        model = model_of(
            epsilon, 1000 + seed, "all", feature_bound=0.5 * math.sqrt(len(between) - 1)
        )
        model.fit(X, y, groups=groups)
        found.append(sds(model))
        hits.append(np.abs(coefficients(model) - truth) < 1.96 * errors(model))
    np.testing.assert_allclose(np.mean(found, axis=0), [*between, 1.0], rtol=0.1, atol=0.05)
    assert np.mean(hits) > 0.9


@pytest.mark.slow
def test_radon_of_counties(data_home):
    """Held-out homes of 100 counties: excess over the exact fit at epsilon 1 and 2.

    Better than a fit that is given the variances, but whose targets have noise at their bound.
    """
    homes = pd.read_csv(data_home / "radon_us.csv.gz")
    rng = np.random.default_rng(0)
    counties = rng.choice(homes["county_fips"].unique(), 100, replace=False)
    homes = homes[homes["county_fips"].isin(counties)]
    X, y = (homes[["floor"]] != 0).to_numpy(float), homes["log_radon"].to_numpy()
    groups = homes["county_fips"].to_numpy()
    kept = rng.random(len(y)) < 0.8

    def loss(model):
        model.fit(X[kept], y[kept], groups=groups[kept])
        return math.sqrt(np.mean((y[~kept] - model.predict(X[~kept], groups=groups[~kept])) ** 2))

    exact = model_of(math.inf)
    best, variances = loss(exact), sds(exact) ** 2
    given_variances = {
        "prior": GaussianPrior(covariance=variances[0]),
        "noise_variance": variances[1],
    }
    for epsilon, bar in ((1.0, 0.12), (2.0, 0.04)):
        bounds = {"epsilon": epsilon, "feature_bound": 1.0, "target_bound": 4.0}
        losses = [
            (loss(model_of(seed=s, **bounds)), loss(model_of(seed=s, **bounds, **given_variances)))
            for s in range(20)
        ]
        estimated, given_them = np.mean(losses, axis=0)
        assert estimated < best * (1 + bar)
        assert estimated < given_them


@pytest.mark.slow
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
    private = [loss(model_of(1.0, seed, "all", feature_bound=2.0)) for seed in range(5)]
    assert np.mean(private) < 1.01 * exact
    own = loss(PersonalizedLinearRegression(GaussianPrior(covariance=np.inf), unseen="population"))
    assert np.mean(private) < own
