"""Checks that every mechanism passes, from one registry: noise, sensitivity, exact odds.

Every check is also run on mutants with a known defect, which it has to catch.
"""

import dataclasses
import itertools
import math

import numpy as np
import pytest

import pfl_sklearn.privacy as privacy
from pfl_sklearn.privacy import (
    ClientMoments,
    ClippedSum,
    DiscreteGaussianMechanism,
    DiscreteLaplaceMechanism,
    FrequencyMoments,
    GaussianMechanism,
    OneBit,
    PrivateClustering,
    RegressionMoments,
    StochasticQuantizer,
    SubsetSelection,
    TwoBit,
    gdp_delta,
)
from pfl_sklearn.privacy._mechanisms._gaussian import clip_l2
from pfl_sklearn.privacy._mechanisms._noise import bernoulli, noise_generator
from pfl_sklearn.privacy._mechanisms._sparse_sum import SparseClippedSum, SparseMessages
from pfl_sklearn.privacy.auditing import odds_lower_bound
from tests.helpers.draws import ROUNDING, Ones
from tests.helpers.hostile import hostile
from tests.helpers.noise import is_calibrated

MECHANISMS = [
    GaussianMechanism(sensitivity=2.0, epsilon=1.0, delta=1e-5),
    GaussianMechanism(sensitivity=0.5, epsilon=8.0, delta=1e-6, trust="local"),
    DiscreteGaussianMechanism(2, message_sensitivity=2.0, epsilon=1.0, delta=1e-5),
    DiscreteLaplaceMechanism(sensitivity=3, epsilon=1.0),
    StochasticQuantizer(bits=3, bound=2.0),
    OneBit(epsilon=1.0),
    TwoBit(epsilon=0.5),
    SubsetSelection(n_categories=15, epsilon=1.0),
]
every = pytest.mark.parametrize("mechanism", MECHANISMS, ids=repr)


def test_the_registry_has_every_public_mechanism():
    public = {
        value
        for value in vars(privacy).values()
        if isinstance(value, type) and hasattr(value, "privatize")
    }
    assert public == {type(mechanism) for mechanism in MECHANISMS}


@every
def test_mechanisms_are_frozen_and_state_their_facts(mechanism):
    with pytest.raises(dataclasses.FrozenInstanceError):
        mechanism.epsilon = 2.0
    facts = mechanism.facts()
    assert facts["sensitivity"] == mechanism.sensitivity > 0
    assert mechanism.noise_variance > 0
    assert {"mechanism", "epsilon", "delta", "noise_std", "trust", "accountant"} <= set(facts)
    is_quantizer = isinstance(mechanism, StochasticQuantizer)
    assert facts["epsilon"] == (math.inf if is_quantizer else mechanism.epsilon)


# Gaussian noise -----------------------------------------------------------------------------------
@pytest.mark.parametrize("trust", ["central", "local"])
def test_noise_scale(trust):
    mechanism = GaussianMechanism(sensitivity=2.0, epsilon=1.0, delta=1e-5, trust=trust)
    assert mechanism.noise_std == pytest.approx(2 * 3.73063, rel=1e-5)
    rng = np.random.default_rng(0)
    draws = mechanism.privatize(np.zeros((1, 4000)), rng).ravel()
    assert is_calibrated(draws, mechanism.noise_std)
    assert not is_calibrated(draws / 2, mechanism.noise_std)
    assert not is_calibrated(draws * 2, mechanism.noise_std)
    assert not is_calibrated(np.zeros(4000), mechanism.noise_std)


@pytest.mark.parametrize("trust", ["central", "local"])
def test_noise_is_exactly_what_is_stated(trust):
    """Every draw is 1: a release is one standard deviation away from what is exact."""
    mechanism = GaussianMechanism(sensitivity=2.0, epsilon=1.0, delta=1e-5, trust=trust)
    messages = np.array([[1.0, -2.0], [3.0, 4.0]])
    exact = messages if trust == "local" else messages.sum(axis=0)
    noise = mechanism.privatize(messages, Ones()) - exact
    np.testing.assert_allclose(noise, mechanism.noise_std, rtol=ROUNDING)
    assert gdp_delta(2.0 / mechanism.noise_std, 1.0) == pytest.approx(1e-5, rel=1e-9)


def test_epsilon_under_zero_out_is_that_of_the_same_noise():
    mechanism = GaussianMechanism(sensitivity=2.0, epsilon=1.0, delta=1e-5)
    ((relation, epsilon),) = mechanism.under_zero_out(1.0)
    assert relation == "zero_out"
    assert gdp_delta(1.0 / mechanism.noise_std, epsilon) == pytest.approx(1e-5, rel=1e-9)


def test_local_noise_is_not_shared_and_not_repeated():
    mechanism = GaussianMechanism(sensitivity=1.0, epsilon=1.0, delta=1e-5, trust="local")
    rng = np.random.default_rng(0)
    fits = np.array([mechanism.privatize(np.zeros((20, 2)), rng) for _ in range(1000)])
    for first, second in itertools.combinations(range(0, 20, 5), 2):
        correlation = np.corrcoef(fits[:, first, 0], fits[:, second, 0])[0, 1]
        assert abs(correlation) < 5 / np.sqrt(1000)
    assert abs(np.corrcoef(fits[:-1, 0, 0], fits[1:, 0, 0])[0, 1]) < 5 / np.sqrt(1000)
    assert abs(np.corrcoef(fits[:, 0, 0], fits[:, 0, 1])[0, 1]) < 5 / np.sqrt(1000)


def test_central_noise_is_added_once_to_the_sum():
    mechanism = GaussianMechanism(sensitivity=1.0, epsilon=1.0, delta=1e-5)
    messages = np.full((50, 2000), 1.0)
    noise = mechanism.privatize(messages, np.random.default_rng(0)) - 50
    assert not np.any(noise % mechanism.grid)
    assert 2**-21 < mechanism.grid / mechanism.noise_std <= 2**-20
    assert np.log2(mechanism.grid) % 1 == 0
    assert is_calibrated(noise, mechanism.noise_std)
    per_client = dataclasses.replace(mechanism, trust="local")
    averaged = per_client.privatize(messages, np.random.default_rng(0)).mean(axis=0) * 50 - 50
    assert not is_calibrated(averaged, mechanism.noise_std)


def test_seeds():
    assert noise_generator(None)[1] is False
    assert noise_generator(3)[1] is True
    state = np.random.RandomState(0)
    assert noise_generator(state)[1] is True
    first, second = (noise_generator(3)[0].normal() for _ in range(2))
    assert first == second
    np.random.seed(0)
    once = noise_generator(None)[0].normal()
    np.random.seed(0)
    assert noise_generator(None)[0].normal() != once


# Sensitivity --------------------------------------------------------------------------------------
PARTS = [parts for parts in itertools.product((True, False), repeat=3) if any(parts)]


def largest_moves(shape, first, second, weights=1.0):
    """How far clients with means (n, 3) and variances (n,) move if replaced, and if zeroed out."""
    with np.errstate(invalid="ignore", over="ignore"):
        one, other = shape.messages(*first, weights), shape.messages(*second, weights)
    assert np.isfinite([one, other]).all()
    zeroed = max(np.linalg.norm(each, axis=1).max() for each in (one, other))
    return np.linalg.norm(one - other, axis=1).max(), zeroed


@pytest.mark.parametrize("parts", PARTS)
def test_sensitivity_is_never_exceeded(parts):
    weights, (first, second) = np.random.default_rng(0).uniform(0, 2, 500), hostile((2, 500, 4))
    for radius, bound in itertools.product((0.5, 3.0, 1e6), (None, 1e-3, 40.0)):
        shape = ClientMoments(radius, *parts, bound)
        pair = [(each[:, :3], each[:, 3]) for each in (first, second)]
        replaced, zeroed = largest_moves(shape, *pair, weights)
        assert replaced <= shape.sensitivity * (1 + 1e-12)
        assert zeroed <= shape.zero_out_sensitivity * (1 + 1e-12)


@pytest.mark.parametrize("parts", PARTS)
def test_sensitivity_is_attained(parts):
    shape, extremes = ClientMoments(2.0, *parts), [(2.0, 4.0), (-2.0, 0.0), (0.0, 0.0), (2.0, 0.0)]
    pairs = np.array(list(itertools.product(extremes, repeat=2)))
    pair = [(each[:, :1] * [1.0, 0, 0], each[:, 1]) for each in pairs.swapaxes(0, 1)]
    replaced, zeroed = largest_moves(shape, *pair)
    assert replaced == pytest.approx(shape.sensitivity)
    assert zeroed == pytest.approx(shape.zero_out_sensitivity)


@pytest.mark.parametrize("bound", [None, 0.5, 100.0])
def test_variances_are_cut_at_their_bound_and_weighted(bound):
    shape = ClientMoments(2.0, False, False, True, bound)
    assert shape.largest_variance == (4.0 if bound is None else bound)
    share = np.array([0.0, 0.25, 1.0, 7.0])
    variances, weights = share * shape.largest_variance, np.array([1.0, 0.5, 1.0, 1.0])
    messages = shape.messages(np.zeros((4, 1)), variances, weights)
    np.testing.assert_allclose(messages[:, 0], [0.0, 0.125, 1.0, 1.0])
    split = shape.split(messages, 1)["variance"][:, 0]
    np.testing.assert_allclose(split, weights * np.minimum(variances, shape.largest_variance))


@pytest.mark.parametrize("radius", [1e-3, 0.7, 2.0, 1e3])
def test_clipping(radius):
    rows = hostile((2000, 3))
    with np.errstate(invalid="ignore", over="ignore"):
        clipped = clip_l2(rows, radius)
    assert np.all(np.linalg.norm(clipped, axis=1) <= radius * (1 + 1e-12))
    np.testing.assert_array_equal(clipped[~np.isfinite(rows).all(axis=1)], 0)
    usual = np.abs(rows).max(axis=1) < 1e100
    lengths = np.linalg.norm(rows[usual], axis=1, keepdims=True)
    expected = rows[usual] * np.minimum(1, radius / np.maximum(lengths, 1e-300))
    np.testing.assert_allclose(clipped[usual], expected, atol=1e-9)


def test_no_clients_is_no_error():
    messages = ClientMoments(1.0, True, True, True).messages(np.empty((0, 2)), np.empty(0))
    assert messages.shape == (0, 4)


# Finite alphabets: exact odds ---------------------------------------------------------------------
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0, 20.0])
def test_one_bit_odds_and_bias_are_exact(epsilon):
    mechanism = OneBit(epsilon)
    x = np.linspace(0, 1, 101)
    ones = mechanism.probability(x)
    for odds in (ones, 1 - ones):
        assert odds.max() / odds.min() == pytest.approx(math.exp(epsilon), rel=1e-6)
    decoded = mechanism.decode(np.array([False, True]))
    np.testing.assert_allclose(ones * decoded[1] + (1 - ones) * decoded[0], x, atol=1e-9)
    assert decoded[1] == pytest.approx(math.exp(epsilon) / math.expm1(epsilon))
    variance = ones * decoded[1] ** 2 + (1 - ones) * decoded[0] ** 2 - x**2
    assert variance.max() == pytest.approx(mechanism.noise_variance)


@pytest.mark.parametrize("epsilon", [0.05, 0.5, 1.0, 2.5, 6.0])
@pytest.mark.parametrize("k", [2, 3, 6, 8])
def test_subset_selection_odds_are_exact(k, epsilon):
    """Probability of every subset under every category."""
    mechanism = SubsetSelection(k, epsilon)
    s, inside = mechanism.subset_size, mechanism.inside_probability
    subsets = list(itertools.combinations(range(k), s))
    table = np.array(
        [
            [
                inside / math.comb(k - 1, s - 1)
                if z in subset
                else (1 - inside) / math.comb(k - 1, s)
                for subset in subsets
            ]
            for z in range(k)
        ]
    )
    np.testing.assert_allclose(table.sum(axis=1), 1)
    ratio = table.max(axis=0) / table.min(axis=0)
    assert ratio.max() == pytest.approx(math.exp(epsilon))
    member = np.array([[z in subset for z in range(k)] for subset in subsets])
    likelihood = np.exp(mechanism.log_likelihood(member, np.eye(k)))
    np.testing.assert_allclose(likelihood / likelihood.max(), table.T / table.max())


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 3.0])
def test_subset_size_has_the_smaller_risk(epsilon):
    """Risk of the unbiased frequency estimate, from the chances of all categories to be in."""
    k, stated = 15, {}
    for size in range(1, k):
        mechanism = SubsetSelection(k, epsilon)
        mechanism.__dict__["subset_size"] = size
        inside = mechanism.inside_probability
        rates = np.append(np.full(k - 1, (size - inside) / (k - 1)), inside)
        stated[size] = mechanism._l2_risk(size)
        risk = np.sum(rates * (1 - rates)) / (inside - rates[0]) ** 2
        assert stated[size] == pytest.approx(risk, rel=1e-9)
    assert SubsetSelection(k, epsilon).subset_size == min(stated, key=stated.get)


@pytest.mark.parametrize("epsilon", [0.5, 3.0])
def test_drawn_subsets_have_the_stated_chances(epsilon):
    mechanism, n = SubsetSelection(15, epsilon), 40_000
    subsets = mechanism.privatize(np.full(n, 3), np.random.default_rng(0))
    assert (subsets.sum(axis=1) == mechanism.subset_size).all()
    inside = mechanism.inside_probability
    expected = np.full(15, (mechanism.subset_size - inside) / 14)
    expected[3] = inside
    # Five standard errors: of 30 shares none is that far off by chance in 1 of 50,000 runs.
    errors = 5 * np.sqrt(expected * (1 - expected) / n)
    assert (np.abs(subsets.mean(axis=0) - expected) < errors).all()


def odds_are_kept(privatize, event, truth, other, epsilon, n=100_000):
    """Whether draws are consistent with odds of at most exp(epsilon), at 1e-6."""
    rng = np.random.default_rng(0)
    counts = [int(np.sum(event(privatize(value, n, rng)))) for value in (truth, other)]
    return odds_lower_bound(*counts, n) <= epsilon


def two_bit(epsilon):
    return lambda z, n, rng: TwoBit(epsilon).privatize(np.full(n, z), np.full(n, 4), rng)


# Randomizer by epsilon, the output that is counted, and two answers of a client.
AUDITS = {
    "one_bit": (
        lambda epsilon: lambda x, n, rng: OneBit(epsilon).privatize(np.full(n, x), rng),
        lambda bits: bits,
        1.0,
        0.0,
    ),
    "two_bit, mean": (two_bit, lambda reports: reports.bits & ~reports.asks_spread, 4, 0),
    "two_bit, spread": (two_bit, lambda reports: reports.bits & reports.asks_spread, 2, 0),
    "subset_selection": (
        lambda epsilon: lambda z, n, rng: SubsetSelection(8, epsilon).privatize(np.full(n, z), rng),
        lambda subsets: subsets[:, 3] & ~subsets[:, 5],
        3,
        5,
    ),
}


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
@pytest.mark.parametrize("name", AUDITS)
def test_drawn_odds_and_a_mutant_with_half_more(name, epsilon):
    make, event, truth, other = AUDITS[name]
    assert odds_are_kept(make(epsilon), event, truth, other, epsilon)
    assert not odds_are_kept(make(epsilon + math.log(1.5)), event, truth, other, epsilon)


def test_odds_hold_where_rounding_would_break_them():
    """At epsilon = 40 the true category is left out with a chance below the resolution."""
    mechanism, rng = SubsetSelection(15, 40.0), np.random.default_rng(0)
    asked = []

    class Recorder:
        def integers(self, low, high, size):
            asked.append(high)
            return np.zeros(size, dtype=np.int64)  # the smallest draw: left out if ever possible

        def random(self, size):
            return rng.random(size)

    subsets = mechanism.privatize(np.array([3, 4]), Recorder())
    assert asked == [1 << 52]
    assert not subsets[0, 3]
    assert not subsets[1, 4]


def test_two_bit_asks_without_looking():
    trials = np.array([1, 2, 3, 50] * 20_000)
    rng = np.random.default_rng(0)
    asked = [
        TwoBit(1.0).privatize(z, trials, rng).asks_spread.reshape(-1, 4).mean(axis=0)
        for z in (0 * trials, trials, trials // 2)
    ]
    np.testing.assert_allclose(asked, np.tile([0, 0.5, 0.5, 0.5], (3, 1)), atol=0.02)


def test_fixed_point_bits_never_pass_their_bounds():
    rng = np.random.default_rng(0)
    bits = bernoulli(np.array([0.0, 1.0, 0.5]).repeat(300_000), 0.1, rng).reshape(3, -1)
    np.testing.assert_allclose(bits.mean(axis=1), [0.1, 0.9, 0.5], atol=0.005)


# Quantizer ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("bits", [1, 2, 5])
def test_quantizer_is_unbiased_on_its_levels(bits):
    mechanism = StochasticQuantizer(bits, bound=2.0)
    x = np.linspace(-2, 2, 9)
    draws = mechanism.privatize(np.tile(x, (40_000, 1)), np.random.default_rng(0))
    levels = np.linspace(-2, 2, 2**bits)
    assert np.abs(draws - levels[np.rint((draws + 2) / mechanism.step).astype(int)]).max() < 1e-12
    np.testing.assert_allclose(draws.mean(axis=0), x, atol=5 * mechanism.step / 2 / 200)
    assert draws.var(axis=0).max() <= mechanism.noise_variance * 1.02
    middle = mechanism.privatize(np.full(40_000, levels[:2].mean()), np.random.default_rng(1))
    assert middle.var() == pytest.approx(mechanism.noise_variance, rel=0.02)
    assert mechanism.noise_variance == pytest.approx((2.0 / (2**bits - 1)) ** 2)


def test_quantizer_bounds_anything():
    odd = np.array([math.nan, math.inf, -math.inf, 1e300])
    draws = StochasticQuantizer(4, 1.0).privatize(odd, np.random.default_rng(0))
    assert np.abs(draws).max() <= 1


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: StochasticQuantizer(0, 1.0), r"bits.*\b1\b.*\b32\b.*\b0\b"),
        (lambda: StochasticQuantizer(2.5, 1.0), r"bits.*\b1\b.*\b32\b.*\b2\.5\b"),
        (lambda: StochasticQuantizer(2, 0.0), r"bound.*\b0\.0\b"),
        (lambda: OneBit(0.0), r"epsilon.*\b0\.0\b"),
        (lambda: SubsetSelection(1, 1.0), r"n_categories.*\b2\b.*\b1\b"),
        (lambda: GaussianMechanism(0.0, 1.0, 1e-5), r"sensitivity.*\b0\.0\b"),
        (
            lambda: GaussianMechanism(1.0, 1.0, 1e-5, "nobody"),
            r"trust.*'central'.*'local'.*'nobody'",
        ),
        (lambda: GaussianMechanism(1.0, 1.0, 0.0).noise_std, r"delta.*\(0, 1\).*\b0\.0\b"),
    ],
)
def test_bad_parameters(call, error):
    with pytest.raises(ValueError, match=error):
        call()


def _clipped_total(values):
    mechanism = ClippedSum(1e-3, 1.0)
    return mechanism.release(values, mechanism.start(), 3, np.random.default_rng(0)).total


def _sparse_total(values):
    mechanism = SparseClippedSum(ClippedSum(1e-3, 1.0))
    owner = np.arange(len(values))
    messages = SparseMessages(values, 0 * owner, owner, len(values))
    return mechanism.release(messages, mechanism.start(), 3, np.random.default_rng(0)).total.values


BOUNDED = {
    "clip_l2": lambda values: clip_l2(values, 1e-3),
    "ClientMoments": lambda x: ClientMoments(1e-3, True, True, True).messages(x, np.abs(x[:, 0])),
    "FrequencyMoments": lambda values: FrequencyMoments().messages(values),
    "RegressionMoments.messages": lambda x: RegressionMoments(2, 1e-3, 1e-3).messages(x, x[:, 0]),
    "RegressionMoments.total": lambda x: RegressionMoments(2, 1e-3, 1e-3).total(x, x[:, 0]),
    "ClippedSum": _clipped_total,
    "ClippedSum of float32": lambda x: _clipped_total(np.clip(x, -3e38, 3e38).astype("f4")),
    "SparseClippedSum": _sparse_total,
    "PrivateClustering.gain": lambda values: PrivateClustering(1.0, 1e-5, 1, 3).gain(
        values[:, 0], np.ones(3)
    ),
    "StochasticQuantizer": lambda values: StochasticQuantizer(3, 1e-3).privatize(
        values, np.random.default_rng(0)
    ),
    "OneBit": lambda values: OneBit(1.0).probability(values[:, 0]),
}


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.parametrize("value", [1e160, 1e308, -1e308], ids=repr)
def test_what_mechanisms_bound_may_have_any_size(name, value):
    """Neither a warning, which would reveal the value, nor NaN or infinity."""
    values = np.array([[0.0, 1.0], [value, 1.0], [1.0, -value]])
    assert np.isfinite(BOUNDED[name](values)).all()
