"""PPSGD's constants and bounds, against the algorithms themselves, run many times over at once."""

import itertools
import math

import numpy as np
import pytest

from pfl_sklearn.theory import (
    alpha_norm,
    minimal_norm_solution,
    ppsgd_bound,
    ppsgd_learning_rate,
    smoothness_alpha,
    total_gradient_variance,
)

SIZES = np.array([1, 1, 2, 3, 5])
N, D, TAU = len(SIZES), 3, 0.5
ROUNDS = [
    {"batch_sizes": 1, "client_fraction": 1.0, "weighting": "samples"},
    {"batch_sizes": SIZES, "client_fraction": 1.0, "weighting": "samples"},
    {"batch_sizes": SIZES, "client_fraction": 0.3, "weighting": "samples"},
    {"batch_sizes": SIZES, "client_fraction": 0.3, "weighting": "clients"},
]
SAMPLED = [rounds for rounds in ROUNDS if rounds["client_fraction"] < 1]


def written_out(rounds):
    """Rows, shares of the objective, and the factor on a row's gradient: arrays (N,)."""
    sizes = np.broadcast_to(rounds["batch_sizes"], (N,)).astype(float)
    if rounds["weighting"] == "clients":
        return sizes, np.full(N, 1 / N), 1 / (rounds["client_fraction"] * N * sizes)
    m = sizes.sum()
    return sizes, sizes / m, np.full(N, 1 / (rounds["client_fraction"] * m))


def draw_gradients(rng, gaps, rounds, n_runs):
    """Summed gradients (n_runs, N, D) of half the squared error; rows on the unit sphere."""
    sizes, _, factor = written_out(rounds)
    present = np.arange(int(sizes.max())) < sizes[:, None]
    x = rng.normal(size=(n_runs, *present.shape, D))
    x /= np.linalg.norm(x, axis=-1, keepdims=True)
    noise = TAU * rng.normal(size=(n_runs, *present.shape))
    residual = (np.einsum("rnkd,rnd->rnk", x, gaps) - noise) * present
    sampled = rng.random((n_runs, N, 1)) < rounds["client_fraction"]
    return np.einsum("rnk,rnkd->rnd", residual, x) * sampled * factor[:, None]


def run_ppsgd(coef, alpha, rate, noise_std, rounds, n_rounds, n_runs, seed):
    """Excess risks (n_runs,) of the averaged iterate of Algorithms 1, 2 and 3."""
    rng = np.random.default_rng(seed)
    on_w, on_theta = (rate, 0.0) if math.isinf(alpha) else (alpha * rate, rate)
    w, theta = np.zeros((n_runs, 1, D)), np.zeros((n_runs, N, D))
    total = np.zeros((n_runs, N, D))
    for _ in range(n_rounds):
        total += w + theta
        step = draw_gradients(rng, w + theta - coef, rounds, n_runs)
        theta = theta - on_theta * step
        noise = noise_std * rng.normal(size=w.shape)
        w = w - on_w * (step.sum(axis=1, keepdims=True) + noise)
    gaps = np.sum((total / n_rounds - coef) ** 2, axis=-1) / D
    return gaps @ written_out(rounds)[1] / 2


def below(values, bound):
    """Whether a mean is below a bound by four standard errors."""
    return values.mean() + 4 * values.std() / math.sqrt(len(values)) < bound


@pytest.mark.parametrize(
    ("rounds", "alpha", "noise_std"),
    [
        (ROUNDS[0], 0.0, 0.0),
        (ROUNDS[1], 1.0, 0.3),
        (ROUNDS[2], 0.05, 0.3),
        (ROUNDS[2], math.inf, 0.0),
        (ROUNDS[3], 1.0, 0.0),
        (ROUNDS[3], 0.05, 0.3),
    ],
)
def test_bound_holds_and_is_not_idle(rounds, alpha, noise_std):
    """Rows of norm 1 make L = 2 and the gradient variances tau^2."""
    n_rounds, rng = 60, np.random.default_rng(0)
    spread = 0.0 if math.isinf(alpha) else 0.5
    coef = 1 + spread * rng.normal(size=(N, D))
    norm = alpha_norm(*minimal_norm_solution(coef, alpha), alpha)
    smoothness = smoothness_alpha(2.0, alpha, N, **rounds)
    gradient_std = math.sqrt(
        total_gradient_variance(
            alpha, N, TAU**2, TAU**2, n_features=D, noise_std=noise_std, **rounds
        )
    )
    rate = ppsgd_learning_rate(smoothness, norm, gradient_std, n_rounds)
    bound = ppsgd_bound(smoothness, norm, gradient_std, n_rounds)
    risks = run_ppsgd(coef, alpha, rate, noise_std, rounds, n_rounds, 300, seed=1)
    assert below(risks, bound)
    assert bound < 20 * risks.mean()


@pytest.mark.parametrize("alpha", [0.02, 1.0, math.inf])
def test_bound_is_the_last_step_of_its_proof(alpha):
    """(23): |z|^2 / (eta T) + 2 eta sigma^2, at the learning rate; equal where sigma sets it."""
    smoothness, norm, n_rounds = smoothness_alpha(2.0, alpha, 10), 0.7, 50
    for gradient_std in (0.0, 1e-3, 0.1, 30.0):
        rate = ppsgd_learning_rate(smoothness, norm, gradient_std, n_rounds)
        assert rate <= 1 / (4 * smoothness)
        proved = norm**2 / (rate * n_rounds) + 2 * rate * gradient_std**2
        bound = ppsgd_bound(smoothness, norm, gradient_std, n_rounds)
        assert proved <= bound * (1 + 1e-12)
        if rate < 1 / (4 * smoothness):
            bias = 4 * smoothness * norm**2 / n_rounds
            assert proved == pytest.approx(bound - bias)


def mean_square_of_difference(gradients, alpha, rounds):
    """E |g - g*|^2 (inverse norm) over who is sampled, for gradients (N,) in w and in theta."""
    q, share = rounds["client_fraction"], written_out(rounds)[1]
    on_w, on_theta = gradients
    total = 0.0
    for sampled in itertools.product([0, 1], repeat=N):
        steps = np.array(sampled) * share / q
        square = alpha * (steps @ on_w) ** 2 + np.sum((steps * on_theta) ** 2)
        total += q ** sum(sampled) * (1 - q) ** (N - sum(sampled)) * square
    return total


@pytest.mark.parametrize("rounds", SAMPLED)
def test_smoothness_is_attained_and_the_printed_one_too_small(rounds):
    """Lemma B.3: E |g - g*|^2 <= 2 L_alpha (f - f*), for quadratics of curvature L = 3."""
    curvature, alpha, ones = 3.0, 5.0, np.ones(N)
    share = written_out(rounds)[1]
    needed = mean_square_of_difference((curvature * ones, 0 * ones), alpha, rounds) / curvature
    by_version = {
        version: smoothness_alpha(curvature, alpha, N, version=version, **rounds)
        for version in ("sharp", "lemma", "printed")
    }
    assert needed <= by_version["sharp"] * (1 + 1e-12) < by_version["lemma"]
    if rounds["weighting"] == "clients":
        assert needed == pytest.approx(by_version["sharp"])
    assert needed > by_version["printed"]
    # Only the largest client has a local part, and learning is local.
    largest = np.where(np.arange(N) == np.argmax(share), curvature, 0.0)
    square = mean_square_of_difference((0 * ones, largest), 0.0, rounds)
    needed = square / (curvature * share.max())
    assert needed == pytest.approx(smoothness_alpha(curvature, 0.0, N, **rounds))
    assert needed > smoothness_alpha(curvature, 0.0, N, version="printed", **rounds)


def test_smoothness_of_everybody_is_theorem_4_5():
    for alpha in (0.0, 0.1, 0.2, 3.0):
        assert smoothness_alpha(2.0, alpha, 5) == 2 * max(alpha, 1 / 5)
    assert smoothness_alpha(2.0, math.inf, 5) == 2
    # "We recover the same bound", Section 5, is true of the sharp constant only.
    assert smoothness_alpha(2.0, 3.0, 5, version="lemma") == pytest.approx(2 * (3 + 3 / 5))


@pytest.mark.parametrize(
    ("rounds", "alpha"), [(ROUNDS[1], 0.5), (ROUNDS[2], 4.0), (ROUNDS[3], 0.0), (ROUNDS[3], 4.0)]
)
def test_gradient_variance(rounds, alpha):
    """Only coordinate 0 is personal, so that clients pull w apart at the minimizer."""
    coef = np.random.default_rng(5).normal(size=(N, D))
    share = written_out(rounds)[1]
    gaps = share @ coef - coef
    gaps[:, 0] = 0
    squares, noise_std = np.sum(gaps**2, axis=1), 0.1
    moments = {
        "w_variance": squares / D + TAU**2 - squares / D**2,
        "theta_variance": squares / (D * (D + 2)) + TAU**2 / D,
        "gradient_norms": np.sqrt(squares) / D,
    }
    given = {"n_features": D, "noise_std": noise_std, **moments, **rounds}
    rng = np.random.default_rng(6)
    steps = draw_gradients(rng, np.broadcast_to(gaps, (20_000, N, D)), rounds, 20_000)
    on_w = steps.sum(axis=1) + noise_std * rng.normal(size=(20_000, D))
    draws = alpha * np.sum(on_w**2, axis=1) + np.sum(steps[..., 0] ** 2, axis=1)
    error = 4 * draws.std() / math.sqrt(20_000)
    assert total_gradient_variance(alpha, N, **given) == pytest.approx(draws.mean(), abs=error)
    printed = total_gradient_variance(alpha, N, version="printed", **given)
    if alpha == 0 or rounds["client_fraction"] == 1:
        assert printed == pytest.approx(draws.mean(), abs=error)
    else:
        assert printed < draws.mean() - error


def test_printed_variance_breaks_the_bound():
    """f_i = (w - c_i)^2 / 2: one client in a hundred is sampled."""
    n_clients, q, n_rounds, n_runs = 100, 0.01, 100, 1000
    shape = {"gradient_norms": 1.0, "client_fraction": q, "weighting": "clients"}
    smoothness = smoothness_alpha(1.0, 1.0, n_clients, client_fraction=q, weighting="clients")
    signs = np.tile([-1.0, 1.0], n_clients // 2)
    for version, holds in (("sound", True), ("printed", False)):
        gradient_std = math.sqrt(
            total_gradient_variance(1.0, n_clients, 0.0, 0.0, version=version, **shape)
        )
        best = 3 * gradient_std / math.sqrt(n_rounds)
        rate = ppsgd_learning_rate(smoothness, best, gradient_std, n_rounds)
        rng, w, total = np.random.default_rng(0), np.zeros(n_runs), np.zeros(n_runs)
        for _ in range(n_rounds):
            total += w
            sampled = (rng.random((n_runs, n_clients)) < q).astype(float)
            step = sampled.sum(axis=1) * (w - best) - sampled @ signs
            w = w - rate * step / (q * n_clients)
        risks = (total / n_rounds - best) ** 2 / 2
        bound = ppsgd_bound(smoothness, best, gradient_std, n_rounds)
        assert below(risks, bound) if holds else below(-risks, -bound)


def exact_risk(rate, q, n_clients, n_rounds):
    """Risk of the averaged iterate of f_i = (w - 1)^2 / 2: its errors are products of factors."""
    k = np.arange(n_clients + 1)
    ways = np.array([math.comb(n_clients, j) for j in k])
    chance = ways * q**k * (1 - q) ** (n_clients - k)
    factors = 1 - rate * k / (q * n_clients)
    first, second = chance @ factors, chance @ factors**2
    s, t = np.meshgrid(np.arange(n_rounds), np.arange(n_rounds))
    products = second ** np.minimum(s, t) * first ** np.abs(s - t)
    return products.mean() / 2


@pytest.mark.parametrize("weighting", ["samples", "clients"])
def test_printed_smoothness_diverges(weighting):
    n_clients, q, n_rounds = 5, 0.02, 400
    given = {"client_fraction": q, "weighting": weighting}
    for version, holds in (("sharp", True), ("lemma", True), ("printed", False)):
        smoothness = smoothness_alpha(1.0, 1.0, n_clients, version=version, **given)
        rate = ppsgd_learning_rate(smoothness, 1.0, 0.0, n_rounds)
        bound = ppsgd_bound(smoothness, 1.0, 0.0, n_rounds)
        risk = exact_risk(rate, q, n_clients, n_rounds)
        assert risk < bound if holds else risk > 1000 * bound
