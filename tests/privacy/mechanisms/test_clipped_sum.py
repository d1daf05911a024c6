"""The release of one round: clipping, sensitivity, noise, the moving bound, and audits."""

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats

from pfl_sklearn.privacy import ClippedSum, PrivacyReport, SampledGaussian, auditing, events_epsilon
from pfl_sklearn.privacy._accounting import _composition
from pfl_sklearn.privacy._mechanisms import _clipped_sum as round_sum
from pfl_sklearn.privacy._mechanisms._gaussian import clip_l2
from pfl_sklearn.privacy._mechanisms._noise import gaussian_on_grid
from pfl_sklearn.privacy.auditing import gdp_lower_bound
from tests.helpers.draws import ROUNDING, Ones
from tests.helpers.hostile import hostile
from tests.helpers.noise import is_calibrated


def clip(table, bound):
    """Clipped messages, and which were within the bound."""
    return round_sum._clip_messages(np.asarray(table, float).reshape(-1, 3), bound)


def tables(n=300):
    """Tables of 1 to 5 messages of any size, and bounds for them."""
    rng = np.random.default_rng(0)
    for seed in range(n):
        bound = rng.choice([10 ** rng.uniform(-3, 3), 10 ** rng.uniform(-3, 3), 1e-100, 1e100])
        yield hostile((rng.integers(1, 6), 3), 5.0, seed), bound


# Clipping and sensitivity -------------------------------------------------------------------------
def test_clipping_is_the_projection_of_every_message():
    for table, bound in tables():
        clipped, within = clip(table, bound)
        assert np.all(np.linalg.norm(clipped / bound, axis=1) <= 1 + 1e-12)
        np.testing.assert_allclose(clipped, clip_l2(table, bound), rtol=1e-12, atol=1e-12 * bound)
        np.testing.assert_array_equal(clipped[within], table[within])
        assert not clipped[~np.isfinite(table).all(axis=1)].any()


@pytest.mark.parametrize("bounded", [clip, round_sum._normalize_messages])
def test_sensitivity_is_never_exceeded(bounded):
    """First client added, removed or replaced: nobody else's message moves, not by one bit."""
    for seed, (table, bound) in enumerate(tables()):
        replacement = hostile((1, 3), 5.0, 1000 + seed)
        clipped, within = bounded(table, bound)
        others, others_within = bounded(table[1:], bound)
        replaced, replaced_within = bounded(np.concatenate([replacement, table[1:]]), bound)
        assert clipped[1:].tobytes() == replaced[1:].tobytes() == others.tobytes()
        rounding = 1 + 1e-9
        assert np.linalg.norm(clipped.sum(0) / bound - others.sum(0) / bound) <= rounding
        assert np.linalg.norm(clipped.sum(0) / bound - replaced.sum(0) / bound) <= 2 * rounding
        bits = [np.sum(w) - len(w) / 2 for w in (within, others_within, replaced_within)]
        assert abs(bits[0] - bits[1]) <= 0.5
        assert abs(bits[0] - bits[2]) <= 1


def test_sensitivity_is_attained():
    (first, _), (second, _) = clip([[30.0, 0, 0]], 2.0), clip([[-30.0, 0, 0]], 2.0)
    assert np.linalg.norm(first) == pytest.approx(2.0)
    assert np.linalg.norm(first - second) == pytest.approx(4.0)


@pytest.mark.parametrize("bound", [1e-100, 1e-3, 5.0, 1e100])
def test_normalized_messages_have_the_length_of_the_bound(bound):
    """Or none: where the square of the norm over- or underflows, and where it is not finite."""
    for row in hostile((300, 3), 5.0):
        (got,), (counts_as_zero,) = round_sum._normalize_messages(row[None], bound)
        size = float(np.abs(row).max())
        norm = size * np.linalg.norm(row / size) if 0 < size < math.inf else size
        assert counts_as_zero == (not 1e-150 <= norm <= 1e150)
        if counts_as_zero:
            assert not got.any()
        else:
            assert got / bound == pytest.approx(row / norm, rel=1e-14, abs=1e-15)
            assert np.linalg.norm(got / bound) <= 1 + 1e-15


def farthest_move():
    """How far replacing one of 20 messages moves the normalized sum, at most over some of them."""
    mechanism, rng = ClippedSum(1.0, normalize=True), np.random.default_rng(0)
    others = np.abs(rng.normal(size=(19, 3)))
    sums = []
    for first in ([1e-9, 0, 0], [-1.0, 0, 0], [1e6, 0, 0], [-1e6, 0, 0]):
        sums.append(mechanism.release(np.vstack([first, others]), 1.0, 20, None).total)
    return max(np.linalg.norm(one - other) for one in sums for other in sums)


def test_the_sensitivity_of_normalized_messages_is_attained(monkeypatch):
    """And exceeded if messages are divided by the largest norm of the round."""
    assert farthest_move() == pytest.approx(2.0, abs=1e-12)

    def by_the_largest(messages, bound):
        norms = np.linalg.norm(messages, axis=1)
        return bound * messages / norms.max(), norms == 0

    monkeypatch.setattr(round_sum, "_normalize_messages", by_the_largest)
    assert farthest_move() > 2.5


@pytest.mark.parametrize("kind", [np.float64, np.float32])
def test_normalized_sums_keep_zero_and_forget_lengths(kind):
    table = np.array([[30.0, 40.0], [3e-3, 4e-3], [0.0, 0.0], [math.nan, 1.0]], dtype=kind)
    released = ClippedSum(5.0, normalize=True).release(table, 5.0, 4, None)
    np.testing.assert_allclose(released.total, [6.0, 8.0], rtol=1e-6)
    assert released[1:] == (5.0, 0.5)


def test_norms_are_over_all_axes_but_the_first():
    rng = np.random.default_rng(0)
    table = rng.normal(size=(6, 4, 5))
    table[2] *= 100
    table[3, 1, 1] = math.nan
    flat = ClippedSum(3.0).release(table.reshape(6, 20), 3.0, 6, rng)
    shaped = ClippedSum(3.0).release(table, 3.0, 6, rng)
    np.testing.assert_array_equal(shaped.total.ravel(), flat.total)
    assert shaped.total.shape == (4, 5)
    assert (
        shaped.clipped
        == flat.clipped
        == np.mean(~(np.linalg.norm(table.reshape(6, 20), axis=1) <= 3))
    )


def test_nothing_is_clipped_without_a_bound():
    mechanism = ClippedSum(None)
    assert mechanism.start() == math.inf
    table = np.array([[1e200, 1.0], [2.0, 3.0]])
    released = mechanism.release(table, mechanism.start(), 2, None)
    np.testing.assert_array_equal(released.total, table.sum(axis=0))
    assert released[1:] == (math.inf, 0.0)
    diverged = mechanism.release(np.array([[math.nan, 1.0]]), math.inf, 2, None)
    assert math.isnan(diverged.total[0])


def test_messages_are_not_altered():
    table = np.array([[30.0, 40.0], [math.nan, 1.0], [1.0, 1.0]])
    before = table.copy()
    rng = np.random.default_rng(0)
    ClippedSum(5.0, 1.0, 0.5).release(table, 5.0, 3, rng)
    ClippedSum(500.0, 1.0).release(table[::2], 500.0, 3, rng)
    np.testing.assert_array_equal(table, before)


# Noise --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("n_clients", [0, 50])
@pytest.mark.parametrize("quantile", [None, 0.5])
def test_noise_of_the_sum(n_clients, quantile):
    """Once on the sum, however many take part, nobody included; a bound that has moved too."""
    mechanism = ClippedSum(3.0, 0.7, quantile)
    table, bound = np.ones((n_clients, 4000)) * 1e-3, 1.5
    released = mechanism.release(table, bound, 20, np.random.default_rng(0))
    std = 0.7 * bound * (1 if quantile is None else 1 / math.sqrt(1 - 1 / 25))
    noise = released.total - table.sum(axis=0)
    assert is_calibrated(noise, std)
    assert not is_calibrated(noise / 2, std)
    assert not is_calibrated(noise * 2, std)
    assert released.clipped == 0


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("quantile", [None, 0.5])
def test_noise_is_exactly_what_is_stated(quantile, dtype):
    """Every draw is 1: the sum and, with a quantile, the bits are their deviations away."""
    mechanism = ClippedSum(3.0, 0.7, quantile, bits_noise_multiplier=1.5, clip_learning_rate=0.1)
    table = np.array([[0.5, 0.5], [2.0, 0.0]], dtype=dtype)  # one of them within 1.5
    released = mechanism.release(table, 1.5, 100, Ones())
    std = 0.7 * 1.5 * (1 if quantile is None else 1 / math.sqrt(1 - 1 / 9))
    np.testing.assert_allclose(released.total - [2.0, 0.5], std, rtol=ROUNDING)
    moved = -math.log(released.bound_next / 1.5) / 0.1 * 100
    assert moved == pytest.approx(0 if quantile is None else 1.5 * 0.7, rel=ROUNDING, abs=1e-12)


def test_noise_is_independent_between_rounds_coordinates_and_bits():
    mechanism, rng = ClippedSum(1.0, 0.4, 0.5), np.random.default_rng(0)
    rounds = [mechanism.release(np.empty((0, 3)), 1.0, 100, rng) for _ in range(3000)]
    table = np.array([[*one.total, math.log(one.bound_next)] for one in rounds])
    table = np.hstack([table[1:], table[:-1]])
    correlation = np.corrcoef(table, rowvar=False) - np.eye(8)
    assert np.abs(correlation).max() < 5 / math.sqrt(3000)


@pytest.mark.parametrize("relation", [1.0, 2.0])
@pytest.mark.parametrize("multiplier", [0.6, 2.5, 50.0])
def test_sum_and_bits_together_are_one_release_of_the_stated_noise(relation, multiplier):
    """Squared Gaussian-DP parameters add up to that of z, for either relation."""
    mechanism = ClippedSum(7.0, 1.3, 0.5, bits_noise_multiplier=multiplier)
    mu_sum = relation * 7.0 / (mechanism.sum_noise_multiplier * 7.0)
    mu_bits = relation * 0.5 / mechanism.bits_noise_std
    assert math.hypot(mu_sum, mu_bits) == pytest.approx(relation / 1.3, rel=1e-12)


@pytest.mark.parametrize("std", [1e-100, 3e-5, 1.0, 1.5, 2.0, 1e60])
def test_releases_are_on_a_public_grid(std):
    """A power of two between 2**-21 and 2**-20 of the noise; unlike the exact sum."""
    exact_sum = math.pi * std
    released = gaussian_on_grid(np.full(500, exact_sum), std, np.random.default_rng(0))
    grid = 2.0 ** (math.floor(math.log2(std)) - 20)
    steps = released / grid
    np.testing.assert_array_equal(steps, np.rint(steps))
    assert np.any(steps % 2 == 1)
    assert is_calibrated(released - exact_sum, std)


# The moving bound ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("noise_multiplier", "quantile", "start"), [(0.0, 0.2, 1e2), (1.0, 0.5, 1e-3), (1.0, 0.9, 1e2)]
)
def test_bound_finds_the_quantile(noise_multiplier, quantile, start):
    mechanism = ClippedSum(start, noise_multiplier, quantile)
    rng, bound, logs = np.random.default_rng(0), start, []
    for _ in range(400):
        table = rng.lognormal(1.0, 0.7, size=(200, 1)) * rng.choice([-1, 1], (200, 1))
        released = mechanism.release(table, bound, 200, rng)
        bound = released.bound_next
        logs.append(math.log(bound))
    expected = stats.lognorm(0.7, scale=math.exp(1.0)).ppf(quantile)
    assert np.mean(logs[200:]) == pytest.approx(math.log(expected), abs=0.05)


def test_bound_moves_by_the_formula():
    mechanism = ClippedSum(2.0, 0.0, 0.3, clip_learning_rate=0.5)
    table = np.array([[1.0], [1.5], [3.0], [math.nan]])
    released = mechanism.release(table, 2.0, 4, np.random.default_rng(0))
    assert released.bound_next == pytest.approx(2.0 * math.exp(-0.5 * (0.5 - 0.3)))
    assert released.clipped == 0.5
    assert mechanism.release(np.array([[3.0, 4.0]]), 5.0, 4, None).clipped == 0  # at the bound
    # Poisson sampling: bits are centred, so that a round with fewer clients says less.
    released = mechanism.release(table[:1], 2.0, 4, np.random.default_rng(0))
    assert released.bound_next == pytest.approx(2.0 * math.exp(-0.5 * (0.5 + 0.5 / 4 - 0.3)))


def test_bound_depends_on_noisy_bits_alone():
    """Same bits, other messages: the same next bound to the last digit."""
    mechanism = ClippedSum(2.0, 1.0, 0.5)
    tables = [[[1.0, 0], [9.0, 0]], [[0.0, 0], [math.inf, 0]], [[1.9, 0.1], [1e308, 1e308]]]
    moved = {
        mechanism.release(np.array(table), 2.0, 5, np.random.default_rng(3)).bound_next
        for table in tables
    }
    assert len(moved) == 1


@pytest.mark.parametrize("start", [1e-100, 1.0, 1e100])
@pytest.mark.parametrize("quantile", [0.0, 1.0])
def test_bound_stays_in_range(start, quantile):
    """Whatever the messages, in many rounds with almost no client expected."""
    mechanism = ClippedSum(start, 1.0, quantile, clip_learning_rate=10.0)
    rng = np.random.default_rng(0)
    for value in (0.0, 1e308, math.nan):
        bound = mechanism.start()
        for _ in range(60):
            released = mechanism.release(np.full((3, 2), value), bound, 1e-3, rng)
            bound = released.bound_next
            assert start * 1e-6 * 0.999 <= bound <= start * 1e6 * 1.001
            assert np.isfinite(released.total).all()


# Audits -------------------------------------------------------------------------------------------
def scores(mechanism, with_canary, n=500):
    """Sum and bits of releases, projected on the direction in which the two tables differ."""
    rng = np.random.default_rng([7, with_canary])
    others = np.tile([0.0, 0.1], (5, 1))
    table = np.vstack([[[1e200, 0.0]], others]) if with_canary else others
    projections = []
    for _ in range(n):
        released = mechanism.release(table, 1.0, 1000, rng)
        projections.append(released.total[0] / mechanism_variance(mechanism))
        if mechanism.clip_quantile is not None:
            bits = 1000 * math.log(released.bound_next) / mechanism.clip_learning_rate
            projections[-1] += 0.5 * bits / (2.5 * CLAIMED) ** 2
    return np.array(projections)


CLAIMED = 0.5


def mechanism_variance(mechanism):
    return (CLAIMED / (1 if mechanism.clip_quantile is None else math.sqrt(1 - 1 / 25))) ** 2


@pytest.mark.parametrize("quantile", [None, 0.5])
def test_one_round_keeps_its_promise_and_half_the_noise_is_convicted(quantile):
    mu = 1 / CLAIMED
    honest = ClippedSum(1.0, CLAIMED, quantile)
    halved = dataclasses.replace(honest, noise_multiplier=CLAIMED / 2)
    assert 1.0 < gdp_lower_bound(scores(honest, True), scores(honest, False)) <= mu
    assert gdp_lower_bound(scores(halved, True), scores(halved, False)) > mu


def test_no_clipping_is_convicted(monkeypatch):
    monkeypatch.setattr(round_sum, "_clip_messages", lambda rows, _: (rows, np.ones(len(rows))))
    mechanism = ClippedSum(1.0, CLAIMED)
    bound = gdp_lower_bound(scores(mechanism, True), scores(mechanism, False))
    assert bound > 1 / CLAIMED


N_RUNS, N_ROUNDS, RATE, Z, DELTA = 6000, 8, 0.3, 2.0, 1e-2


def losses_of_runs(noise_multiplier, rate):
    """Privacy loss, under the claim, of runs of rounds on a canary sampled at `rate`."""
    rng, mechanism = np.random.default_rng(11), ClippedSum(1.0, noise_multiplier)
    nobody = np.empty((0, N_RUNS * N_ROUNDS))
    totals = mechanism.release(nobody, 1.0, 1, rng).total.reshape(N_RUNS, N_ROUNDS)
    sampled = rng.random(totals.shape) < rate
    canary = np.array([[30.0]])
    totals[sampled] = [
        mechanism.release(canary, 1.0, 1, rng).total[0] for _ in range(np.count_nonzero(sampled))
    ]
    return np.log1p(RATE * np.expm1((totals - 0.5) / Z**2)).sum(axis=1)


def audited_epsilon(noise_multiplier, rate=RATE):
    """Lower bound on epsilon at delta, at 1e-6: half of the runs pick the threshold on the loss."""
    runs = [losses_of_runs(noise_multiplier, r) for r in (rate, 0.0)]
    half = N_RUNS // 2

    def bound(threshold, part):
        hits, false = (int(np.sum(run[part] > threshold)) for run in runs)
        low = auditing._binomial_lower(hits, half, 5e-7)
        high = 1 - auditing._binomial_lower(half - false, half, 5e-7)
        return math.log(max(low - DELTA, 1e-9) / high)

    grid = np.quantile(runs[0][:half], np.linspace(0.2, 0.98, 40))
    best = max(grid, key=lambda threshold: bound(threshold, slice(None, half)))
    return bound(best, slice(half, None))


@pytest.mark.slow
def test_sampled_rounds_keep_their_epsilon_and_mutants_are_convicted():
    """Poisson sampling end to end, by the best attack there is; halved noise, and no sampling."""
    claimed = events_epsilon([SampledGaussian(Z, N_ROUNDS, RATE)], DELTA, "zero_out")
    assert 0.2 * claimed < audited_epsilon(Z) <= claimed
    assert audited_epsilon(Z / 2) > claimed
    assert audited_epsilon(Z, rate=1.0) > claimed


# Facts, bad input ---------------------------------------------------------------------------------
def test_facts_fit_the_report(monkeypatch):
    monkeypatch.setattr(_composition, "REPORT_STEP", 1e-3)  # a coarse grid is fast
    mechanism = ClippedSum(3.0, 1.0, 0.5)
    rounds = SampledGaussian(2.0, 200, 0.1)
    facts = mechanism.facts(rounds, 1e-5, "replace_one")
    report = PrivacyReport(**facts)
    assert report.epsilon == events_epsilon([rounds], 1e-5, "replace_one")
    assert report.sensitivity == 6.0
    assert report.noise_std == pytest.approx(3 / math.sqrt(0.96))
    assert "Poisson" in report.sampling
    assert "privacy loss distributions" in report.accountant
    whole = mechanism.facts(SampledGaussian(1.0, 50), 1e-5, "zero_out")
    assert whole["sensitivity"] == 3.0
    assert whole["accountant"].startswith("exact")
    normalized = ClippedSum(1.0, 2.0, normalize=True).facts(rounds, 1e-5, "replace_one")
    assert (normalized["sensitivity"], normalized["noise_std"]) == (2.0, 2.0)
    assert "sum of normalized messages" in normalized["mechanism"]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: ClippedSum(None, 1.0), r"clip_norm.*noise_multiplier.*None"),
        (lambda: ClippedSum(None, 0.0, 0.5), r"clip_norm.*clip_quantile.*None"),
        (lambda: ClippedSum(0.0), r"clip_norm.*\[1e-100, 1e100\].*\b0\.0\b"),
        (lambda: ClippedSum(1.0, 1e-200), r"noise_multiplier.*1e-12.*1e-200"),
        (lambda: ClippedSum(1.0, 1.0, 1.5), r"clip_quantile.*\[0, 1\].*\b1\.5\b"),
        (lambda: ClippedSum(1.0, 1.0, 0.5, 0.5), r"bits_noise_multiplier.*\b0\.5\b"),
        (lambda: ClippedSum(1.0, 1.0, 0.5, 1.0, 0.0), r"clip_learning_rate.*\(0, 10\].*\b0\.0\b"),
        (lambda: ClippedSum(None, normalize=True), r"normalize=True.*clip_norm.*None"),
        (lambda: ClippedSum(1.0, 1.0, 0.5, normalize=True), r"normalize=True.*clip_quantile.*0\.5"),
    ],
)
def test_bad_parameters(call, error):
    with pytest.raises(ValueError, match=error):
        call()
