"""Accounting of sampled rounds: golden values, brute force, simulation, and closed-form bounds."""

import dataclasses
import itertools
import json
import math
import sys

import numpy as np
import pytest
from dp_accounting import dp_event, privacy_accountant
from dp_accounting.pld import pld_privacy_accountant, privacy_loss_distribution
from dp_accounting.rdp import rdp_privacy_accountant
from scipy.optimize import brentq
from scipy.special import gammaln, logsumexp
from scipy.stats import binom, norm

from pfl_sklearn.privacy import (
    GaussianEvent,
    PureEvent,
    SampledGaussian,
    calibrate_rounds,
    events_epsilon,
    gdp_delta,
    gdp_epsilon,
    gdp_mu,
)
from pfl_sklearn.privacy._accounting import _calibration as calibration, _composition as composition
from pfl_sklearn.privacy._accounting._calibration import approximate_mu
from pfl_sklearn.privacy._accounting._events import event_from_dict
from pfl_sklearn.privacy._accounting._losses import (
    SampledRound,
    composed_epsilon,
    without_replacement_delta,
)

RELATIONS = ("add_remove", "replace_one", "zero_out")
RELATION_ERROR = r"relation.*add_remove, replace_one, zero_out.*'swap'"


@pytest.fixture
def coarse(monkeypatch):
    """Reports on a grid ten times as coarse: upper bounds too, and close where many steps count."""
    monkeypatch.setattr(composition, "REPORT_STEP", 1e-3)


def poisson_epsilon(z, n_rounds, rate, delta, relation="zero_out"):
    return events_epsilon([SampledGaussian(z, n_rounds, rate)], delta, relation)


def fixed_epsilon(z, n_rounds, rate, delta, relation="replace_one", adversary="clients"):
    event = SampledGaussian(z, n_rounds, rate, "fixed")
    return events_epsilon([event], delta, relation, adversary)


def known_epsilon(z, n_rounds, rate, delta, sensitivity):
    """Exact epsilon where everybody knows who takes part: a binomial mixture of Gaussians."""
    counts = np.arange(n_rounds + 1)
    weights = binom.pmf(counts, n_rounds, rate)
    likely = weights > 1e-30

    def excess(epsilon):
        deltas = [gdp_delta(sensitivity * math.sqrt(k) / z, epsilon) for k in counts[likely]]
        return weights[likely] @ deltas - delta

    return brentq(excess, 0.0, 1e4)


# Golden values ------------------------------------------------------------------------------------
@pytest.mark.slow
def test_golden_values():
    assert poisson_epsilon(1.0, 2000, 0.02, 1e-4) == pytest.approx(4.84, abs=0.005)
    assert poisson_epsilon(2.0, 1000, 0.1, 1e-5) == pytest.approx(8.2793, abs=5e-5)
    one = SampledGaussian(1.0, 1)
    assert events_epsilon([one], 1e-5, "add_remove") == math.inf
    assert events_epsilon([one], 1e-5, "zero_out") == pytest.approx(4.3772, abs=5e-5)
    assert events_epsilon([one], 1e-5, "replace_one") == pytest.approx(9.9973, abs=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rounds", "delta", "replaced", "zeroed", "outsiders"),
    [
        ((1.0, 2000, 0.02), 1e-4, 153.43, 48.33, 37.84),
        ((4.0, 1000, 0.01), 1e-5, 9.18, 3.92, 0.72),
        ((8.0, 100, 0.1), 1e-5, 3.87, 1.74, 1.03),
        ((1.5, 1, 0.05), 1e-3, 3.033, 1.143, 0.687),
    ],
)
def test_a_fixed_size_against_the_other_clients(coarse, rounds, delta, replaced, zeroed, outsiders):
    """They know together who takes part: against them participation lowers delta alone."""
    for relation, sensitivity, golden in (("replace_one", 2, replaced), ("zero_out", 1, zeroed)):
        exact = known_epsilon(*rounds, delta, sensitivity)
        assert exact == pytest.approx(golden, rel=2e-3)
        epsilon = fixed_epsilon(*rounds, delta, relation)
        assert exact * (1 - 1e-9) <= epsilon <= exact * (1 + 1e-4)
    assert fixed_epsilon(*rounds, delta, adversary="outsiders") == pytest.approx(
        outsiders, rel=5e-3
    )
    assert fixed_epsilon(*rounds, delta, "add_remove") == math.inf


def test_a_fixed_size_composes_with_other_releases(coarse):
    """Rounds and a Gaussian release: the mixture of their Gaussians, not a sum of epsilons."""
    z, n_rounds, rate, delta, mu = 3.0, 100, 0.1, 1e-5, 0.8
    rounds, release = SampledGaussian(z, n_rounds, rate, "fixed"), GaussianEvent(None, mu)
    together = events_epsilon([rounds, release], delta, "replace_one")
    counts = np.arange(n_rounds + 1)
    weights = binom.pmf(counts, n_rounds, rate)
    deltas = [gdp_delta(math.hypot(2 * math.sqrt(k) / z, mu), together) for k in counts]
    assert weights @ deltas == pytest.approx(delta, rel=1e-3)
    alone = [events_epsilon([event], delta, "replace_one") for event in (rounds, release)]
    assert max(alone) < together < 0.95 * sum(alone)


@pytest.mark.slow
def test_a_fixed_size_against_outsiders_costs_more_than_its_poisson_accountant(coarse):
    """All other clients at the bound: noise 1 against a sensitivity of 2, with probability q."""
    q, n_rounds, delta = 0.02, 2000, 1e-4
    attained = privacy_loss_distribution.from_gaussian_mechanism(
        1.0, sensitivity=2.0, sampling_prob=q, value_discretization_interval=1e-3
    ).self_compose(n_rounds)
    lower = attained.get_epsilon_for_delta(delta)
    assert lower == pytest.approx(31.0, abs=0.05)
    answers = {}
    for probability in (q, 1.0):
        accountant = pld_privacy_accountant.PLDAccountant(
            privacy_accountant.NeighboringRelation.REPLACE_ONE, 1e-3
        )
        event = dp_event.TruncatedSubsampledGaussianDpEvent(1000, probability, 20, 1.0)
        answers[probability] = accountant.compose(event, n_rounds).get_epsilon(delta)
    ours = fixed_epsilon(1.0, n_rounds, q, delta, adversary="outsiders")
    assert 4 * poisson_epsilon(1.0, n_rounds, q, delta) < answers[q] < lower < ours < answers[1.0]
    assert answers[1.0] == pytest.approx(39.7, abs=0.2)


# One round: the profile itself --------------------------------------------------------------------

GRID = np.linspace(-16, 16, 32_001)


def hockey_stick(first, second, epsilon):
    """Divergences (e,) of two mixtures of unit normals (means, weights), by a Riemann sum."""
    upper, lower = (
        sum(w * norm.pdf(GRID, m) for m, w in zip(*mixture, strict=True))
        for mixture in (first, second)
    )
    excess = upper - np.exp(epsilon)[..., None] * lower
    return np.maximum(excess, 0).sum(axis=-1) * (GRID[1] - GRID[0])


def poisson_pairs(z, rate, relation):
    mixture = ([0.0, 1 / z], [1 - rate, rate])
    other = ([0.0, -1 / z], [1 - rate, rate]) if relation == "replace_one" else ([0.0], [1.0])
    return [(mixture, other), (other, mixture)]


@pytest.mark.slow
@pytest.mark.parametrize("relation", ["zero_out", "replace_one"])
def test_one_poisson_round_is_the_divergence_of_its_mixtures(relation):
    z, rate, delta = 1.0, 0.1, 1e-3
    epsilon = poisson_epsilon(z, 1, rate, delta, relation)
    values, pairs = np.array([epsilon, epsilon - 2e-3]), poisson_pairs(z, rate, relation)
    deltas = np.max([hockey_stick(*pair, values) for pair in pairs], axis=0)
    assert deltas[0] <= delta * (1 + 1e-6) < deltas[1]


@pytest.mark.slow
def test_no_table_passes_the_profile_of_a_fixed_size():
    """All tables of 4 clients at -1, 0 or 1, samples of 2: one round, one client replaced.

    But for those that are others with all signs changed.
    """
    z, n, k = 0.8, 4, 2
    subsets = np.array([[i in s for i in range(n)] for s in itertools.combinations(range(n), k)])
    weights = np.full(len(subsets), 1 / len(subsets))
    epsilons = np.array([0.0, 0.3, 1.0, 2.0])
    bound = without_replacement_delta(2 / z, k / n, epsilons)
    share = np.zeros(len(epsilons))
    for others in itertools.combinations_with_replacement((-1.0, 0.0, 1.0), n - 1):
        for pair in ((-1.0, 0.0), (-1.0, 1.0), (0.0, -1.0)):
            mixtures = [(subsets @ np.array([x, *others]) / z, weights) for x in pair]
            share = np.maximum(share, hockey_stick(*mixtures, epsilons) / bound)
    assert np.all(share <= 1 + 1e-6)
    assert np.all(share > 0.75)


def test_profile_of_a_fixed_size_without_sampling_and_in_its_tail():
    epsilons = np.array([0.0, 1e-3, 0.5, 3.0, 8.0, 30.0, 90.0])
    for mu in (0.05, 2.0, 9.0):
        exact = np.array([gdp_delta(mu, epsilon) for epsilon in epsilons])
        np.testing.assert_allclose(
            without_replacement_delta(mu, 1.0, epsilons), exact, rtol=1e-6, atol=1e-15
        )
    far = without_replacement_delta(2.0, 0.1, np.array([10.0, 600.0, 5000.0]))
    assert far[0] == pytest.approx(0.1 * gdp_delta(2.0, math.log1p(math.expm1(10) / 0.1)), rel=1e-6)
    assert np.all(far[1:] == 0)


# Many rounds --------------------------------------------------------------------------------------
def simulated_delta(z, rate, n_rounds, relation, epsilon, n=60_000):
    """Estimates of delta, with standard errors, from sums of simulated losses: both directions."""
    rng, found = np.random.default_rng(0), []
    for (means, weights), (other_means, other_weights) in poisson_pairs(z, rate, relation):
        losses = np.zeros(n)
        for _ in range(n_rounds):
            x = rng.standard_normal(n) + rng.choice(means, n, p=weights)
            logs = [
                logsumexp([math.log(w) - (x - m) ** 2 / 2 for m, w in zip(*pair, strict=True)], 0)
                for pair in ((means, weights), (other_means, other_weights))
            ]
            losses += logs[0] - logs[1]
        excess = -np.expm1(np.minimum(epsilon - losses, 0.0))
        found.append((excess.mean(), excess.std() / math.sqrt(n)))
    return max(found)


@pytest.mark.slow
def test_many_poisson_rounds_against_simulation(coarse):
    relation = "replace_one"
    z, rate, n_rounds, delta = 0.9, 0.2, 15, 0.03
    epsilon = poisson_epsilon(z, n_rounds, rate, delta, relation)
    estimate, error = simulated_delta(z, rate, n_rounds, relation, epsilon)
    assert estimate == pytest.approx(delta, abs=5 * error)
    assert 5 * error < 0.15 * delta
    halved = poisson_epsilon(2 * z, n_rounds, rate, delta, relation)
    assert simulated_delta(z, rate, n_rounds, relation, halved)[0] > 2 * delta


def renyi_epsilon(z, rate, n_rounds, delta):
    """Upper bound by Renyi DP of whole orders (binomial expansion), simply converted."""
    best = math.inf
    for order in range(2, 200):
        k = np.arange(order + 1)
        logs = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
        logs += (order - k) * math.log1p(-rate) + k * math.log(rate) + k * (k - 1) / (2 * z * z)
        renyi = n_rounds * logsumexp(logs) / (order - 1)
        spent = renyi + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)
        best = min(best, spent)
    return best


@pytest.mark.slow
def test_renyi_bound_is_above(coarse):
    accountant = rdp_privacy_accountant.RdpAccountant()
    sampled_gaussian = dp_event.PoissonSampledDpEvent(0.1, dp_event.GaussianDpEvent(2.0))
    known = accountant.compose(sampled_gaussian, 1000).get_epsilon(1e-5)
    assert known == pytest.approx(8.947, abs=5e-4)
    assert known <= renyi_epsilon(2.0, 0.1, 1000, 1e-5) <= 1.02 * known
    for case in ((1.0, 0.02, 2000, 1e-4), (5.0, 0.3, 100, 1e-6)):
        z, rate, n_rounds, delta = case
        tight = poisson_epsilon(z, n_rounds, rate, delta)
        assert 0.8 * renyi_epsilon(*case) < tight < renyi_epsilon(*case)


@pytest.mark.parametrize("delta", [1e-12, 1e-15])
def test_a_tiny_delta_costs_no_more_than_renyi_divergences_say(coarse, delta):
    """No grid of losses holds there: rounding errors might take all of delta."""
    case = 2.0, 1000, 0.01
    less = poisson_epsilon(*case, 1e-10)
    assert less < poisson_epsilon(*case, delta) <= renyi_epsilon(2.0, 0.01, 1000, delta)
    assert poisson_epsilon(2.0, 500, 0.1, 1e-12) < 10  # 512 without credit for sampling
    replaced = poisson_epsilon(*case, delta, "replace_one")
    # Twice the cost of zeroing out, at a smaller delta.
    assert 2 * poisson_epsilon(*case, delta) < replaced < 2.5 * poisson_epsilon(*case, delta)
    mixed = [SampledGaussian(*case), PureEvent(0.5, 0.0, "zero_out"), GaussianEvent(0.01, 0.02)]
    assert less + 0.4 < events_epsilon(mixed, delta, "zero_out") < 3


@pytest.mark.parametrize("kind", ["poisson", "fixed"])
def test_sampling_nearly_everybody_costs_what_everybody_does(coarse, kind):
    """Against the exact answer, also where rounding would hide part of a small delta."""
    relation = "replace_one" if kind == "fixed" else "zero_out"
    mu = 2.0 if kind == "fixed" else 1.0
    event = SampledGaussian(math.sqrt(10_000), 10_000, 1 - 1e-9, kind)
    for delta in (1e-5, 1e-11, 1e-13):
        exact = gdp_epsilon(mu, delta)
        assert exact * (1 - 1e-6) <= events_epsilon([event], delta, relation) <= exact * 1.01


@pytest.mark.slow
def test_a_coarser_grid_never_answers_less():
    for one, count, delta in (
        (SampledRound(1.0, 0.1, "poisson", False), 500, 1e-5),
        (SampledRound(0.7, 0.1, "poisson", True), 100, 1e-6),
        (SampledRound(1.5, 0.05, "without_replacement", True), 300, 1e-5),
        (SampledRound(1.5, 0.05, "known", True), 300, 1e-5),
    ):
        steps = (2e-3, 4e-3, 1e-2)
        answers = [composed_epsilon(0.0, ((one, count),), (), delta, step) for step in steps]
        assert answers == sorted(answers)
        assert answers[1] < 1.01 * answers[0]


@pytest.mark.slow
def test_the_step_is_refined_for_small_losses():
    """Rate 1e-4: losses of 1e-4 nats; normal in the limit, with mu = q sqrt(T (e^(1/z^2) - 1))."""
    rate, n_rounds = 1e-4, 10**7
    mu = rate * math.sqrt(n_rounds * math.expm1(1.0))
    assert poisson_epsilon(1.0, n_rounds, rate, 1e-5) == pytest.approx(
        gdp_epsilon(mu, 1e-5), rel=0.02
    )


@pytest.mark.parametrize("kind", ["poisson", "fixed"])
@pytest.mark.parametrize("z", [30.0, 1e3, 1e6])
def test_small_losses_are_close_to_the_limit_of_many_rounds(z, kind):
    event = SampledGaussian(z, 1000, 0.1, kind)
    epsilon = events_epsilon([event], 1e-9, "replace_one", "outsiders")
    limit = gdp_epsilon(2 * 0.1 / z * math.sqrt(1000), 1e-9)
    assert limit <= epsilon <= 1.03 * limit


@pytest.mark.slow
@pytest.mark.parametrize("z", [1e-6, 0.1])
def test_next_to_no_noise_gets_a_finite_upper_bound(coarse, z):
    for kind, relation, mu in (("poisson", "zero_out", 1 / z), ("fixed", "replace_one", 2 / z)):
        epsilon = events_epsilon([SampledGaussian(z, 50, 0.3, kind)], 1e-5, relation)
        assert mu**2 / 2 < epsilon <= gdp_epsilon(mu * math.sqrt(50), 1e-5)


@pytest.mark.parametrize(("kind", "relation"), [("poisson", "zero_out"), ("fixed", "replace_one")])
def test_monotone(kind, relation):
    """On a coarse grid, whose answers are those of the fine one but for 1 %."""
    base = {"noise_multiplier": 1.5, "n_rounds": 200, "rate": 0.05, "sampling": kind}

    def epsilon(delta=1e-5, **changes):
        event = SampledGaussian(**base | changes)
        return composition.epsilon_on_grid(((event, 1),), delta, relation, 1e-2)

    for name, values in {
        "noise_multiplier": [3.0, 1.5, 1.3],
        "n_rounds": [0, 10, 200, 201],
        "rate": [0.01, 0.05, 1.0],
        "delta": [0.1, 1e-5, 1e-9],
    }.items():
        epsilons = [epsilon(**{name: value}) for value in values]
        assert epsilons == sorted(set(epsilons)), name


# Events together ----------------------------------------------------------------------------------
def test_gaussian_events_are_exact():
    events = [GaussianEvent(0.3, None, 4), GaussianEvent(None, 0.8), SampledGaussian(2.0, 9)]
    replaced = math.sqrt(4 * 0.6**2 + 0.8**2 + 9 * 1.0)
    assert events_epsilon(events, 1e-5, "replace_one") == gdp_epsilon(replaced, 1e-5)
    assert events_epsilon(events, 1e-5, "add_remove") == math.inf
    without = [events[0], events[2]]
    removed = math.sqrt(4 * 0.3**2 + 9 / 4)
    assert events_epsilon(without, 1e-5, "add_remove") == math.inf
    assert events_epsilon(without[:1], 1e-5, "add_remove") == gdp_epsilon(0.6, 1e-5)
    assert events_epsilon(without, 1e-5, "zero_out") == gdp_epsilon(removed, 1e-5)
    tighter = GaussianEvent(0.5, 0.7, mu_zero_out=0.3)
    for relation, mu in (("replace_one", 0.6), ("add_remove", 0.5), ("zero_out", 0.3)):
        assert events_epsilon([tighter], 1e-5, relation) == gdp_epsilon(mu, 1e-5)
    contribution = GaussianEvent(None, 0.5, mu_zero_out=0.3)
    for relation, expected in (("replace_one", 0.5), ("zero_out", 0.3)):
        assert events_epsilon([contribution], 1e-5, relation) == gdp_epsilon(expected, 1e-5)
    assert events_epsilon([contribution], 1e-5, "add_remove") == math.inf


@pytest.mark.slow
def test_mixed_events_against_the_accountant(coarse):
    """One accountant fed by hand, in any order."""
    events = [SampledGaussian(1.0, 300, 0.1), GaussianEvent(0.4, None), SampledGaussian(2.0, 4)]
    for relation, name in (("zero_out", "ADD_OR_REMOVE_ONE"), ("replace_one", "REPLACE_ONE")):
        accountant = pld_privacy_accountant.PLDAccountant(
            privacy_accountant.NeighboringRelation[name], 2e-3
        )
        gaussian = dp_event.GaussianDpEvent
        accountant.compose(dp_event.PoissonSampledDpEvent(0.1, gaussian(1.0)), 300)
        accountant.compose(gaussian(2.5)).compose(gaussian(2.0), 4)
        expected = accountant.get_epsilon(1e-5)
        together = events_epsilon(events, 1e-5, relation)
        assert expected * (1 - 1e-3) < together <= expected
        assert together == events_epsilon(events[::-1], 1e-5, relation)


def test_equal_rounds_are_the_same_in_one_event_or_in_many(coarse):
    whole = SampledGaussian(1.2, 90, 0.1)
    parts = [dataclasses.replace(whole, n_rounds=n) for n in (30, 30, 30)]
    assert events_epsilon(parts, 1e-5, "zero_out") == events_epsilon([whole], 1e-5, "zero_out")


def best_composition(epsilon, k, delta):
    """Exact composition of k pure events (Kairouz, Oh and Viswanath, 2015, Theorem 3.3)."""
    for i in range(k // 2, -1, -1):
        spent = (
            sum(
                math.comb(k, j)
                * (math.exp((k - j) * epsilon) - math.exp((k - 2 * i + j) * epsilon))
                for j in range(i)
            )
            / (1 + math.exp(epsilon)) ** k
        )
        if spent <= delta:
            return (k - 2 * i) * epsilon
    raise AssertionError


def test_pure_events(coarse):
    assert events_epsilon([PureEvent(0.7, 1e-6, "add_remove")], 1e-5, "add_remove") == 0.7
    assert events_epsilon([PureEvent(0.7, 1e-4, "add_remove")], 1e-5, "add_remove") == math.inf
    pair = [PureEvent(0.7, 0.0, "add_remove"), PureEvent(0.5, 1e-6, "add_remove")]
    assert events_epsilon(pair, 1e-5, "add_remove") <= 1.2
    many = [PureEvent(0.1, 0.0, "replace_one")] * 60
    exact = best_composition(0.1, 60, 1e-5)
    assert exact - 0.2 <= events_epsilon(many, 1e-5, "replace_one") <= exact + 1e-2
    assert exact < 0.7 * 6.0


def test_pure_events_beside_gaussian_noise(coarse):
    both = [PureEvent(0.5, 1e-6, "add_remove"), GaussianEvent(0.5, None)]
    alone = events_epsilon(both[1:], 1e-5, "add_remove")
    together = events_epsilon(both, 1e-5, "add_remove")
    assert max(alone, 0.5) < together < events_epsilon(both[1:], 9e-6, "add_remove") + 0.5
    nothing = [PureEvent(0.0, 0.0, "add_remove"), GaussianEvent(0.5, None)]
    assert events_epsilon(nothing, 1e-5, "add_remove") == pytest.approx(alone, rel=1e-4)


def test_group_privacy_of_pairs():
    removed = PureEvent(0.7, 1e-6, "add_remove")
    assert events_epsilon([removed], 1e-5, "replace_one") == 1.4
    spent = 1e-6 * (1 + math.exp(0.7))
    assert events_epsilon([removed], spent * (1 + 1e-9), "replace_one") == 1.4
    assert events_epsilon([removed], spent * (1 - 1e-9), "replace_one") == math.inf
    assert events_epsilon([PureEvent(1.0, 0, "zero_out")], 1e-5, "replace_one") == 2.0
    assert events_epsilon([removed], 1e-5, "zero_out") == 0.7
    for known, asked in (
        ("zero_out", "add_remove"),
        ("replace_one", "add_remove"),
        ("replace_one", "zero_out"),
    ):
        assert events_epsilon([PureEvent(1.0, 0.0, known)], 1e-5, asked) == math.inf
    assert events_epsilon([PureEvent(800.0, 1e-9, "zero_out")], 1e-5, "replace_one") == math.inf


@pytest.mark.slow
def test_limits(coarse):
    for relation in RELATIONS:
        assert events_epsilon([], 1e-5, relation) == 0
        nothing = [
            SampledGaussian(0.0, 0, 0.1),
            SampledGaussian(math.inf, 10, 0.1),
            GaussianEvent(0.0, None),
            GaussianEvent(None, None, 0),
        ]
        assert events_epsilon(nothing, 1e-5, relation) == 0
        for event in (
            SampledGaussian(0.0, 1, 0.1),
            SampledGaussian(1e-200, 1, 0.1),
            SampledGaussian(0.0, 1),
            PureEvent(math.inf, 0.0, relation),
            PureEvent(0.1, 1.0, relation),
            GaussianEvent(math.inf, None),
            GaussianEvent(None, None),
        ):
            assert events_epsilon([event], 1e-5, relation) == math.inf
            assert events_epsilon([event, *nothing], 1e-5, relation) == math.inf
    fixed = SampledGaussian(1.0, 5, 0.1, "fixed")
    assert events_epsilon([fixed], 1e-5, "add_remove") == math.inf
    everybody = SampledGaussian(1.0, 4, 1.0, "fixed")
    for relation, mu in (("replace_one", 4.0), ("zero_out", 2.0)):
        for adversary in ("clients", "outsiders"):
            assert events_epsilon([everybody], 1e-5, relation, adversary) == gdp_epsilon(mu, 1e-5)
    assert poisson_epsilon(1.0, 1, 1e-3, 1e-2) == 0  # a client takes part more rarely than delta
    assert poisson_epsilon(1.0, 50, 0.1, 1e-5, "add_remove") == math.inf
    event = SampledGaussian(1.0, 5, 0.1)  # of a Poisson sample, clients see as much as outsiders
    for relation in ("zero_out", "replace_one"):
        outsiders = events_epsilon([event], 1e-5, relation, "outsiders")
        assert outsiders == events_epsilon([event], 1e-5, relation)
    assert fixed_epsilon(1.0, 5, 0.1, 1e-5, "zero_out", "outsiders") == fixed_epsilon(
        1.0, 5, 0.1, 1e-5, "zero_out"
    )  # no better bound is known


# Calibration --------------------------------------------------------------------------------------


MANY = {"n_rounds": 2000, "rate": 0.02}


@pytest.mark.parametrize(
    ("epsilon", "delta", "rounds"),
    [
        (0.2, 1e-6, MANY),
        (0.2, 1e-6, {**MANY, "relation": "replace_one"}),
        (0.2, 1e-6, {**MANY, "sampling": "fixed"}),
        (0.2, 1e-6, {"n_rounds": 50, "rate": 0.1, "sampling": "fixed", "relation": "zero_out"}),
        (0.2, 1e-6, {"n_rounds": 2, "rate": 0.3}),
        (8.0, 1e-4, {"n_rounds": 100, "rate": 1.0, "relation": "replace_one"}),
        (0.2, 1e-6, {"n_rounds": 100, "rate": 1.0}),
    ],
)
def test_calibration_inverts_accounting(epsilon, delta, rounds):
    z = calibrate_rounds(epsilon, delta, **rounds)
    relation = rounds.get("relation") or (
        "replace_one" if rounds.get("sampling") == "fixed" else "zero_out"
    )
    event = {name: value for name, value in rounds.items() if name != "relation"}
    assert events_epsilon([SampledGaussian(z, **event)], delta, relation) <= epsilon
    exact = rounds["rate"] == 1
    less = SampledGaussian(z * (1 - (1e-6 if exact else 4e-3)), **event)
    assert events_epsilon([less], delta, relation) > epsilon


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    "rounds",
    [
        {"n_rounds": 50, "rate": 1.0},
        {"n_rounds": 50, "rate": 1.0, "sampling": "fixed"},
        {"n_rounds": 50, "rate": 0.1, "sampling": "fixed"},
    ],
)
@pytest.mark.parametrize("share", [0.1, 0.999])
def test_calibration_leaves_room_for_other_releases(rounds, share):
    """All of epsilon is spent; without sampling squared parameters add up."""
    relation = "replace_one" if "sampling" in rounds else "zero_out"
    mu = gdp_mu(2.0, 1e-5)
    other = GaussianEvent(None, math.sqrt(share) * mu, mu_zero_out=math.sqrt(share) * mu)
    z = calibrate_rounds(2.0, 1e-5, besides=other, **rounds)
    together = events_epsilon([SampledGaussian(z, **rounds), other], 1e-5, relation)
    assert 2.0 * (1 - (1e-6 if rounds["rate"] == 1 else 2e-3)) < together <= 2.0
    if rounds["rate"] == 1:
        sensitivity = 2 if relation == "replace_one" else 1
        assert sensitivity * math.sqrt(50) / z == pytest.approx(math.sqrt(1 - share) * mu)
    assert calibrate_rounds(2.0, 1e-5, **rounds) < z


def test_other_releases_that_leave_nothing():
    for taken in (gdp_mu(2.0, 1e-5), 100.0):
        with pytest.raises(ValueError, match=r"besides=GaussianEvent.*spends mu="):
            calibrate_rounds(2.0, 1e-5, n_rounds=5, rate=1.0, besides=GaussianEvent(taken, None))
    for other in (PureEvent(0.9, 0.0, "zero_out"), SampledGaussian(1.0, 5, 0.5)):
        with pytest.raises(ValueError, match="besides must be a GaussianEvent"):
            calibrate_rounds(2.0, 1e-5, n_rounds=5, rate=1.0, besides=other)
    unknown = {"sampling": "fixed", "relation": "zero_out", "besides": GaussianEvent(None, 0.1)}
    with pytest.raises(ValueError, match="spends mu=inf"):
        calibrate_rounds(2.0, 1e-5, n_rounds=5, rate=1.0, **unknown)


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
@pytest.mark.parametrize("rate", [0.3, 1.0])
def test_the_approximate_parameter_of_rounds_is_that_of_a_calibration(coarse, sampling, rate):
    """Within a tenth for many rounds, and never more than that of rounds with all clients."""
    z = math.sqrt(2000) * (rate if sampling == "poisson" else math.sqrt(rate))
    event = SampledGaussian(z, 2000, rate, sampling)
    exact = gdp_mu(events_epsilon([event], 1e-5, "zero_out"), 1e-5)
    assert approximate_mu(event, "zero_out") == pytest.approx(exact, rel=0.1)
    assert approximate_mu(event, "replace_one") > 1.9 * exact
    for tiny in (0.05, 1e-3):
        most = 2 * math.sqrt(9) / tiny
        assert approximate_mu(SampledGaussian(tiny, 9, rate, sampling), "replace_one") <= most


@pytest.mark.slow
def test_a_client_that_takes_part_with_probability_delta(monkeypatch):
    """The calibrated noise suffices, also where rounding errors decide."""
    monkeypatch.setattr(calibration, "_SEARCH_STEP", 1e-2)
    epsilon, delta, rate = 0.5, 1e-3, 1e-3 * (1 + 1e-9)
    how = {"n_rounds": 1, "rate": rate, "sampling": "fixed"}
    event = SampledGaussian(calibrate_rounds(epsilon, delta, **how), **how)
    reported = composition.epsilon_on_grid(((event, 1),), delta, "replace_one", 1e-4)
    assert reported <= epsilon  # kept from the calibration: no second evaluation


@pytest.mark.slow
def test_calibration_is_quick():
    """Few evaluations: at most 12 for the run whose seconds the documentation counts on."""
    calls, real = [], composition.composed_epsilon
    calibration._calibrated.cache_clear()
    composition.epsilon_on_grid.cache_clear()
    try:
        composition.composed_epsilon = lambda *args: calls.append(args[-1]) or real(*args)
        calibrate_rounds(3.9, 1e-4, n_rounds=2000, rate=0.02)
        calibrate_rounds(3.9, 1e-4, n_rounds=2000, rate=0.02)
    finally:
        composition.composed_epsilon = real
    assert 1 < len(calls) <= 12
    assert set(calls) == {1e-3}


def test_nothing_to_calibrate():
    assert calibrate_rounds(math.inf, 1e-5, n_rounds=10, rate=0.1) == 0
    assert calibrate_rounds(1.0, 1e-5, n_rounds=0, rate=0.1) == 0
    assert calibrate_rounds(1e6, 1e-5, n_rounds=5, rate=0.5) < 1e-2
    assert calibrate_rounds(1e-4, 1e-8, n_rounds=5, rate=0.5) > 1e3


# Plain values, bad input --------------------------------------------------------------------------
@pytest.mark.parametrize(
    "event",
    [
        SampledGaussian(math.inf, 5, 0.1, "fixed"),
        SampledGaussian(np.float64(1.5), np.int64(5), np.float32(0.5)),
        GaussianEvent(0.5, None, 3),
        PureEvent(math.inf, 0.0, "zero_out"),
    ],
)
def test_events_survive_json_and_hash(event):
    values = json.loads(json.dumps(event.to_dict(), allow_nan=False))
    assert type(event).from_dict(values) == event == event_from_dict(values)
    assert hash(event_from_dict(values)) == hash(event)
    with pytest.raises(ValueError, match=r"kind.*'other'"):
        type(event).from_dict({**values, "kind": "other"})
    with pytest.raises(ValueError, match=r"kind.*sampled_gaussian, gaussian, pure.*'other'"):
        event_from_dict({**values, "kind": "other"})
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.relation = "x"


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: SampledGaussian(1.0, 2.5), r"n_rounds.*\b2\.5\b"),
        (lambda: SampledGaussian(1.0, 5, 0.0), r"rate.*\(0, 1\].*\b0\.0\b"),
        (lambda: SampledGaussian(1.0, 5, 1.1), r"rate.*\(0, 1\].*\b1\.1\b"),
        (lambda: SampledGaussian(1.0, 5, 0.5, "shuffled"), r"sampling.*'poisson'.*'shuffled'"),
        (lambda: GaussianEvent(0.1, None).spending("swap"), RELATION_ERROR),
        (lambda: PureEvent(1.0, 2.0, "zero_out"), r"delta.*\[0, 1\].*\b2\.0\b"),
        (lambda: PureEvent(1.0, 0.0, "swap"), RELATION_ERROR),
        (lambda: events_epsilon([], 0.0, "add_remove"), r"delta.*\(0, 1\).*\b0\.0\b"),
        (lambda: events_epsilon([], 0.1, "zero_out", "everybody"), r"adversary.*'everybody'"),
        (lambda: events_epsilon([], 1e-5, "swap"), RELATION_ERROR),
        (lambda: calibrate_rounds(0.0, 0.1, n_rounds=1, rate=1), r"epsilon.*\b0\.0\b"),
        (lambda: calibrate_rounds(1.0, 0.0, n_rounds=1, rate=1), r"delta.*\(0, 1\).*\b0\.0\b"),
        (lambda: calibrate_rounds(1.0, 0.1, n_rounds=1, rate=0), r"rate.*\(0, 1\].*\b0\b"),
        (lambda: calibrate_rounds(1, 0.1, n_rounds=1, rate=1, relation="swap"), RELATION_ERROR),
        (
            lambda: calibrate_rounds(1, 0.1, n_rounds=1, rate=0.5, relation="add_remove"),
            r"relation.*'zero_out'.*'replace_one'.*'add_remove'",
        ),
    ],
)
def test_bad_input(call, error):
    with pytest.raises(ValueError, match=error):
        call()


def test_without_dp_accounting(monkeypatch):
    """Exact answers need nothing; the rest says what to install."""
    for name in [name for name in sys.modules if name.split(".")[0] == "dp_accounting"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    assert events_epsilon([SampledGaussian(1.0, 3)], 1e-5, "zero_out") > 0
    assert calibrate_rounds(1.1, 1e-5, n_rounds=7, rate=1.0) > 0
    assert events_epsilon([PureEvent(0.3, 0.0, "zero_out")], 1e-5, "zero_out") == 0.3
    with pytest.raises(ImportError, match=r"dp-accounting.*pip install dp-accounting"):
        events_epsilon([SampledGaussian(1.2345, 3, 0.11)], 1e-5, "zero_out")
