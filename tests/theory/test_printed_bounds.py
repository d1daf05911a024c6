"""Theorems 3, 4 and 5 and Lemma 3 (ICLR), against simulations and closed forms."""

import math

import numpy as np
import pytest
from scipy.stats import beta as beta_distribution, chi

from pfl_sklearn import BernoulliMean, PrivacyWarning
from pfl_sklearn.theory import beta_risk_bound, mixture_mean_radius, printed_adaped_rdp

ALPHA, BETA, TRIALS = 3.0, 5.0, 14
PROPORTIONS = beta_distribution(ALPHA, BETA)
LOCAL_RISK = PROPORTIONS.expect(lambda p: p * (1 - p)) / TRIALS


def width_of(epsilon):
    """Width of the range of the values that one-bit messages stand for."""
    if math.isinf(epsilon):
        return 1.0
    e = math.exp(epsilon)
    return e / (e - 1) - -1 / (e - 1)


def risk(weight, off):
    """Expected squared error of a client that shrinks towards a value `off` from the mean."""
    return weight**2 * LOCAL_RISK + (1 - weight) ** 2 * (PROPORTIONS.var() + off**2)


@pytest.mark.parametrize("epsilon", [0.5, 2.0, np.inf])
@pytest.mark.parametrize("version", ["sound", "printed"])
def test_theorems_3_and_4(epsilon, version):
    m, weight = 300, np.array([-0.2, 0.0, 0.6, 1.0, 1.3])
    log = math.log((4 if version == "printed" else 2) * m**2 * TRIALS)
    factor = 1 / 2 if version == "sound" else 3.0 if math.isinf(epsilon) else 1 / 3
    off = width_of(epsilon) * math.sqrt(factor * log / (m - 1))
    found = beta_risk_bound(ALPHA, BETA, TRIALS, m, weight, epsilon=epsilon, version=version)
    np.testing.assert_allclose(found, risk(weight, off), rtol=1e-9)


def test_the_bound_is_attained_where_the_mean_is_off_by_its_limit():
    """Simulated errors; five standard errors, so chance fails below 1e-6."""
    m, weight, rng = 50, 0.6, np.random.default_rng(0)
    off = math.sqrt(math.log(2 * m**2 * TRIALS) / (2 * (m - 1)))
    p = rng.beta(ALPHA, BETA, 200_000)
    centre = ALPHA / (ALPHA + BETA) + off
    errors = (weight * rng.binomial(TRIALS, p) / TRIALS + (1 - weight) * centre - p) ** 2
    expected = beta_risk_bound(ALPHA, BETA, TRIALS, m, weight)
    assert abs(errors.mean() - expected) < 5 * errors.std() / math.sqrt(len(errors))


@pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")
@pytest.mark.parametrize("epsilon", [1.0, np.inf])
def test_estimates_of_equation_6_keep_the_bound(epsilon):
    """Risks of all clients given the others' reports; each draw may fail with chance 1 / (m n)."""
    m, rng = 200, np.random.default_rng(0)
    for seed in range(20):
        successes = rng.binomial(TRIALS, rng.beta(ALPHA, BETA, m))
        private = {"epsilon": epsilon, "mechanism": "one_bit"} if math.isfinite(epsilon) else {}
        model = BernoulliMean(method="printed", random_state=seed, **private)
        model.fit_counts(successes, np.full(m, TRIALS))
        own = 1 - model.shrinkage_
        others = (model.means_ - own * model.local_means_) / (1 - own)
        bound = beta_risk_bound(ALPHA, BETA, TRIALS, m, own, epsilon=epsilon)
        assert (risk(own, others - PROPORTIONS.mean()) <= bound).all()


@pytest.mark.parametrize("d", [1, 10, 1000])
def test_lemma_1(d):
    """The norm of a client's mean around its point is a chi variable, of which we know the tail."""
    m, n, std, r = 300, 7, 2.0, 1.5
    sound, printed = (
        mixture_mean_radius(m, n, std, n_features=d, point_bound=r, version=version)
        for version in ("sound", "printed")
    )
    assert sound <= printed
    exceeded = chi(d).sf((sound - r) * math.sqrt(n) / std)
    assert 0 < exceeded <= 1 / (m**2 * n)
    printed_there = 4 * math.sqrt(d * std**2 / n) + 2 * math.sqrt(math.log(m**2 * n) * std**2 / n)
    assert printed == pytest.approx(printed_there + r)


@pytest.mark.parametrize("local_steps", [3, 4, 10])
def test_the_printed_privacy_of_dp_adaped_is_exceeded_from_four_steps_on(local_steps):
    """All clients take part with gradients at their bounds; a client's are replaced by opposite."""
    order, n_rounds, k, bounds, stds = 3.0, 20, 8, np.array([2.0, 0.3]), np.array([5.0, 0.9])
    with pytest.warns(PrivacyWarning, match=r"printed_adaped_rdp.*noise='per_step'"):
        stated = printed_adaped_rdp(order, n_rounds, k, k, bounds[0], stds[0], bounds[1], stds[1])
    assert stated == pytest.approx(6 * 20 * 3 * (4 / (8 * 25) + 0.09 / (8 * 0.81)))
    moved = 2 * local_steps * bounds / k  # of the averages of a round, at learning rates of 1
    variance = local_steps * stds**2 / k
    attained = n_rounds * order * np.sum(moved**2 / (2 * variance))
    assert (attained > stated) == (local_steps > 3)


def test_the_printed_privacy_of_dp_adaped_falls_with_the_square_of_the_share():
    values = []
    for n_clients in (8, 16):
        with pytest.warns(PrivacyWarning):
            values.append(printed_adaped_rdp(2.0, 1, n_clients, 8, 1.0, 1.0, 1.0, 1.0))
    assert values == [pytest.approx(3.0), pytest.approx(0.75)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: beta_risk_bound(1.0, 1.0, 5, 1, 0.5), r"n_clients\b.*\b1\b"),
        (lambda: beta_risk_bound(1.0, 1.0, 5, 9, 0.5, version="exact"), r"version.*'exact'"),
        (lambda: mixture_mean_radius(9, 5, 1.0, version="exact"), r"version.*'exact'"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
