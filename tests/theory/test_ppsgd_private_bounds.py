"""PPSGD's norm, private bounds and threshold; the excess risk of linear models; bad input."""

import math

import numpy as np
import pytest
from scipy.optimize import minimize

from pfl_sklearn.privacy import epsilon_spent
from pfl_sklearn.theory import (
    alpha_norm,
    linear_excess_risk,
    minimal_norm_solution,
    personalization_threshold,
    ppsgd_bound,
    ppsgd_learning_rate,
    ppsgd_noise_std,
    ppsgd_private_bound,
    smoothness_alpha,
    total_gradient_variance,
)

SIZES = np.array([1, 1, 2, 3, 5])
N = len(SIZES)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 7.0, math.inf])
def test_minimal_norm_solution(alpha):
    coef = np.random.default_rng(0).normal(size=(4, 2))
    w, thetas = minimal_norm_solution(coef, alpha)
    np.testing.assert_allclose(w + thetas, coef)
    if alpha in (0.0, math.inf):
        np.testing.assert_allclose(w, coef.mean(axis=0) if alpha else 0, atol=1e-12)
    else:
        found = minimize(lambda w: alpha_norm(w, coef - w, alpha) ** 2, np.zeros(2), tol=1e-10)
        np.testing.assert_allclose(w, found.x, atol=1e-6)
    v = np.array([2.0, -1.0])
    w, thetas = minimal_norm_solution(v, alpha, 4)
    if not math.isinf(alpha):
        np.testing.assert_allclose(w, 4 * alpha * v / (4 * alpha + 1))
        np.testing.assert_allclose(thetas, np.tile(v / (4 * alpha + 1), (4, 1)))
        assert alpha_norm(w, thetas, alpha) ** 2 == pytest.approx(4 / (4 * alpha + 1) * (v @ v))


def test_alpha_norm_at_its_limits():
    assert alpha_norm([3.0], [[4.0]], 0.25) == math.sqrt(9 / 0.25 + 16)
    assert alpha_norm([0.0], [[3.0], [4.0]], 0.0) == 5
    assert math.isinf(alpha_norm([1.0], [[0.0]], 0.0))
    assert alpha_norm([3.0, 4.0], [[0.0, 0.0]], math.inf) == 5
    assert math.isinf(alpha_norm([1.0], [[1.0]], math.inf))
    assert math.isinf(ppsgd_bound(1.0, math.inf, 0.0, 10))


def test_large_alpha_tends_to_the_global_limit():
    """In units of the global step; the same for bounds, which have no unit."""
    v, given = np.array([1.0, 2.0]), {"w_variance": 0.3, "theta_variance": 0.3, "n_rounds": 20}
    given |= {"clip_norm": 1.0, "epsilon": 1.0, "delta": 1e-5, "client_fraction": 0.5}
    rates, bounds = [], []
    for alpha in (1e9, math.inf):
        split = minimal_norm_solution(v, alpha, 6)
        bounds.append(ppsgd_private_bound(2.0, alpha, *split, **given))
        smoothness = smoothness_alpha(2.0, alpha, 6, client_fraction=0.5)
        variance = total_gradient_variance(alpha, 6, 0.3, 0.3, client_fraction=0.5)
        rate = ppsgd_learning_rate(smoothness, alpha_norm(*split, alpha), variance**0.5, 20)
        rates.append(rate if math.isinf(alpha) else alpha * rate)
    assert rates[0] == pytest.approx(rates[1], rel=1e-6)
    np.testing.assert_allclose(bounds[0], bounds[1], rtol=1e-6)


@pytest.mark.parametrize(("weighting", "divisor"), [("samples", 12), ("clients", 5)])
def test_private_bound(weighting, divisor):
    """The noise of T unsampled releases; its term is the same for every T."""
    w, thetas = minimal_norm_solution([1.0, 2.0], 0.4, N)
    rounds = {"batch_sizes": SIZES, "client_fraction": 0.5, "weighting": weighting}
    given = {"w_variance": 0.3, "theta_variance": 0.2, "clip_norm": 2.0, **rounds}
    found = [
        ppsgd_private_bound(2.0, 0.4, w, thetas, n_rounds=t, epsilon=1.5, delta=1e-5, **given)
        for t in (10, 1000)
    ]
    assert found[0].privacy == pytest.approx(found[1].privacy)
    assert found[0].bias == pytest.approx(100 * found[1].bias)
    assert found[0].variance == pytest.approx(10 * found[1].variance)
    norm = alpha_norm(w, thetas, 0.4)
    noise_std = found[0].privacy * math.sqrt(10) / (3 * norm * math.sqrt(0.4 * 2))
    multiplier = noise_std * 0.5 * divisor / 2.0
    spent = epsilon_spent(multiplier, 1.0, delta=1e-5, relation="add_remove", n_releases=10)
    assert spent == pytest.approx(1.5)
    assert noise_std == pytest.approx(ppsgd_noise_std(multiplier, 2.0, N, **rounds))
    smoothness = smoothness_alpha(2.0, 0.4, N, **rounds)
    variance = total_gradient_variance(
        0.4, N, 0.3, 0.2, n_features=2, noise_std=noise_std, **rounds
    )
    total = ppsgd_bound(smoothness, norm, math.sqrt(variance), 10)
    assert found[0].total == pytest.approx(total)
    assert found[0].total < sum(found[0])
    by_multiplier = ppsgd_private_bound(
        2.0, 0.4, w, thetas, n_rounds=10, noise_multiplier=multiplier, **given
    )
    np.testing.assert_allclose(by_multiplier, found[0])
    assert ppsgd_private_bound(2.0, 0.4, w, thetas, n_rounds=10, **given).privacy == 0


def test_local_learning_has_no_cost_of_privacy():
    given = {"w_variance": 1.0, "theta_variance": 1.0, "n_rounds": 9, "clip_norm": 1.0}
    split = minimal_norm_solution([1.0], 0.0, 4)
    assert ppsgd_private_bound(1.0, 0.0, *split, noise_multiplier=5.0, **given).privacy == 0
    reached = ppsgd_private_bound(1.0, 0.0, [1.0], np.zeros((4, 1)), **given)
    assert math.isinf(reached.total)


@pytest.mark.parametrize(("factor", "sign"), [(0.98, -1), (1.02, 1)])
def test_personalization_threshold(factor, sign):
    """The variance term falls with alpha just below the threshold, and grows just above."""
    n_clients, variance, n_features, epsilon, delta = 30, 0.7, 4, 0.8, 1e-4
    rows = personalization_threshold(n_clients, variance, 2.0, n_features, epsilon, delta)
    terms = []
    for alpha in (0.01, 0.1, 1.0, 10.0):
        split = minimal_norm_solution(np.ones(n_features), alpha, n_clients)
        bound = ppsgd_private_bound(
            1.0,
            alpha,
            *split,
            w_variance=variance,
            theta_variance=variance,
            n_rounds=factor * rows,
            clip_norm=2.0,
            noise_multiplier=math.sqrt(factor * rows) * noise_of_one_round(epsilon, delta),
        )
        terms.append(math.hypot(bound.variance, bound.privacy))
    assert (sign * np.diff(terms) > 0).all()


def noise_of_one_round(epsilon, delta):
    """Multiplier by bisection on the accountant."""
    low, high = 1e-3, 1e6
    for _ in range(100):
        middle = math.sqrt(low * high)
        spent = epsilon_spent(middle, 1.0, delta=delta, relation="add_remove")
        low, high = (middle, high) if spent > epsilon else (low, middle)
    return high


def test_threshold_goes_with_the_square_of_epsilon():
    epsilons = np.array([0.01, 0.1, 1.0, 4.0])
    exact, order, printed = (
        np.array([personalization_threshold(9, 1.0, 1.0, 2, e, 1e-6, version=v) for e in epsilons])
        for v in ("exact", "order", "printed")
    )
    assert np.ptp(np.log(exact / order)) < math.log(4)
    assert np.ptp(np.log(exact / printed)) > math.log(100)
    np.testing.assert_allclose(order, 9 * 8 * epsilons**2 / (2 * math.log(1e6)))
    assert math.isinf(personalization_threshold(9, 1.0, 1.0, 2, math.inf, 1e-6))


def test_linear_excess_risk():
    rng = np.random.default_rng(0)
    coef, true_coef, root = (rng.normal(size=shape) for shape in ((4, 3), (4, 3), (3, 3)))
    x = rng.normal(size=(200_000, 3)) @ root
    weights = np.array([1.0, 2.0, 3.0, 4.0])
    squares = (x @ (coef - true_coef).T) ** 2 @ weights / 10
    risk = linear_excess_risk(coef, true_coef, root.T @ root, weights)
    assert risk == pytest.approx(squares.mean(), abs=4 * squares.std() / math.sqrt(200_000))
    diagonal = linear_excess_risk(coef, true_coef, [1.0, 2.0, 3.0])
    assert diagonal == pytest.approx(linear_excess_risk(coef, true_coef, np.diag([1.0, 2.0, 3.0])))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: smoothness_alpha(1.0, 1.0, 5, client_fraction=0.0),
            r"client_fraction.*\(0, 1\].*\b0\.0\b",
        ),
        (
            lambda: smoothness_alpha(1.0, 1.0, 5, weighting="rows"),
            r"weighting.*samples, clients.*'rows'",
        ),
        (
            lambda: smoothness_alpha(1.0, 1.0, 5, version="tight"),
            r"version.*sharp, lemma, printed.*'tight'",
        ),
        (
            lambda: smoothness_alpha(1.0, 1.0, 5, batch_sizes=[1, 2]),
            r"batch_sizes.*\b5\b.*\[1, 2\]",
        ),
        (
            lambda: smoothness_alpha(1.0, 1.0, 2, batch_sizes=[1, 0]),
            r"batch_sizes.*\b1\b.*\[1, 0\]",
        ),
        (lambda: smoothness_alpha(1.0, 1.0, 0), r"n_clients.*\b1\b.*\b0\b"),
        (lambda: minimal_norm_solution([1.0], 1.0), r"n_clients.*one model.*None"),
        (lambda: minimal_norm_solution([[1.0]], 1.0, 2), r"n_clients.*coef.*\b1\b.*\b2\b"),
        (
            lambda: personalization_threshold(5, 1.0, 1.0, 1, 1.0, 1e-5, version="x"),
            r"version.*exact, order, printed.*'x'",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"epsilon": 1.0}, r"delta.*epsilon.*None"),
        (
            {"epsilon": 1.0, "delta": 1e-5, "noise_multiplier": 1.0},
            r"epsilon.*noise_multiplier.*\b1\.0\b.*\b1\.0\b",
        ),
    ],
)
def test_bad_privacy(given, message):
    rest = {"w_variance": 1.0, "theta_variance": 1.0, "n_rounds": 5, "clip_norm": 1.0}
    with pytest.raises(ValueError, match=message):
        ppsgd_private_bound(1.0, 1.0, [1.0], [[1.0]], **rest, **given)
