"""Discrete Gaussian noise: rounding, sensitivity, noise, and accounting against exact sums."""

import itertools
import math
import sys

import numpy as np
import pytest
from scipy import stats

from pfl_sklearn.privacy import ClientMoments, DiscreteGaussianMechanism, gdp_mu
from pfl_sklearn.privacy._accounting._concentrated import zcdp_delta, zcdp_rho
from pfl_sklearn.privacy._mechanisms import _discrete_gaussian
from tests.helpers.hostile import hostile

DELTA = 1e-5


def mechanism(p=1, epsilon=1.0, n_bits=None, sensitivity=2.0):
    return DiscreteGaussianMechanism(p, sensitivity, epsilon, DELTA, n_bits)


# Noise --------------------------------------------------------------------------------------------
def half_scale(monkeypatch):
    draw = _discrete_gaussian.with_discrete_gaussian
    monkeypatch.setattr(
        _discrete_gaussian, "with_discrete_gaussian", lambda values, scale: draw(values, scale / 2)
    )


def has_the_stated_scale(each):
    """Two-sided chi-square test, at 1e-9, on messages that need no rounding; no seed repeats it."""
    draws = each.privatize(np.zeros((1500, each.n_coordinates)), np.random.default_rng(0))
    below = stats.chi2(draws.size).cdf(np.sum(draws**2) / each.noise_std**2)
    return 2 * min(below, 1 - below) > 1e-9


@pytest.mark.parametrize(
    "each", [mechanism(), mechanism(2, 4.0, sensitivity=math.sqrt(5)), mechanism(n_bits=9)]
)
def test_noise_scale(each, monkeypatch):
    assert has_the_stated_scale(each)
    half_scale(monkeypatch)
    assert not has_the_stated_scale(each)


@pytest.mark.parametrize("each", [mechanism(), mechanism(3, 4.0, n_bits=9)])
def test_the_noise_is_drawn_with_exactly_what_is_stated(each, monkeypatch):
    """Parameter of whole numbers, times the grid; over the sensitivity it spends the budget."""
    scales = []
    monkeypatch.setattr(
        _discrete_gaussian,
        "with_discrete_gaussian",
        lambda values, scale: scales.append(scale) or values,
    )
    each.privatize(np.zeros((2, each.n_coordinates)), np.random.default_rng(0))
    assert scales == [pytest.approx(each.noise_std / each.grid, rel=1e-12)]
    rho = (each.sensitivity / each.noise_std) ** 2 / 2
    assert zcdp_delta(rho, each.epsilon) == pytest.approx(DELTA, rel=1e-6)


def test_noise_is_independent_and_not_repeated():
    each = mechanism(2)
    first, second = (
        each.privatize(np.zeros((2000, 2)), np.random.default_rng(0)) for _ in range(2)
    )
    # Six standard deviations: three correlations fail by chance in fewer than 1 of 1e8 runs.
    for one, other in ((first, second), (first, first[:, ::-1]), (first[1:], first[:-1])):
        assert abs(np.corrcoef(one[:, 0], other[:, 0])[0, 1]) < 6 / math.sqrt(2000)


def test_reports_are_whole_numbers_of_the_stated_bits():
    each = mechanism(3, 8.0, n_bits=6)
    messages = np.tile([5.0, -0.3, math.nan], (1000, 1))
    steps = each.privatize(messages, np.random.default_rng(0)) / each.grid
    np.testing.assert_allclose(steps, np.rint(steps), atol=1e-9)
    assert np.abs(np.rint(steps)).max() <= each.largest == 31
    assert "18 bits per message" in each.facts()["mechanism"]


@pytest.mark.parametrize(("p", "epsilon"), [(1, 0.1), (1, 1.0), (1, 30.0), (50, 1.0)])
def test_default_bits(p, epsilon):
    """The grid is so fine that rounding adds less than 1 % to the sensitivity, and no finer."""
    each = mechanism(p, epsilon)
    assert 2.0 < each.sensitivity < 2.02
    assert mechanism(p, epsilon, each.bits - 1).sensitivity > 2.01
    assert each.largest * each.grid >= each.bound + each.grid + 8 * each.noise_std - 1e-9


# Rounding -----------------------------------------------------------------------------------------
def test_rounding_is_unbiased_and_its_variance_is_counted():
    each = mechanism(n_bits=5, epsilon=20.0)
    x = np.linspace(-1, 1, 9)
    steps = each.rounded(np.tile(x, (40_000, 1)), np.random.default_rng(0)) * each.grid
    np.testing.assert_allclose(steps.mean(axis=0), x, atol=5 * each.grid / 2 / 200)
    middle = each.rounded(np.full((40_000, 1), each.grid / 2), np.random.default_rng(0))
    added = each.noise_variance - each.noise_std**2
    assert np.var(middle * each.grid) == pytest.approx(added, rel=0.02)


class Chosen:
    """A generator whose draws make all roundings go down (near 1) or up (0)."""

    def __init__(self, draw):
        self.draw = draw

    def random(self, shape):
        return np.full(shape, self.draw)


UP, DOWN = Chosen(0.0), Chosen(1 - 1e-16)


def distance(each, first, second, roundings):
    """Largest L2 distance between rounded messages, in units of messages."""
    pair = zip((first, second), roundings, strict=True)
    one, other = (each.rounded(messages, rounding) for messages, rounding in pair)
    return np.linalg.norm(one - other, axis=1).max() * each.grid


@pytest.mark.parametrize(
    "shape", [ClientMoments(0.5), ClientMoments(3.0, True, False, True, 2.0)], ids=repr
)
@pytest.mark.parametrize("n_bits", [None, 6, 9])
def test_sensitivity_is_never_exceeded(shape, n_bits):
    """Whatever the messages, and whichever way each rounding goes."""
    each = mechanism(shape.width(2), 20.0, n_bits, shape.sensitivity)
    with np.errstate(over="ignore", invalid="ignore"):
        messages = [shape.messages(rows[:, :2], rows[:, 2]) for rows in hostile((2, 500, 3))]
    for roundings in itertools.product((UP, DOWN), repeat=2):
        assert distance(each, *messages, roundings) <= each.sensitivity * (1 + 1e-12)


@pytest.mark.parametrize("n_bits", [5, 8])
def test_without_its_part_for_rounding_the_sensitivity_is_exceeded(n_bits):
    each = mechanism(n_bits=n_bits, epsilon=20.0)
    edge = np.array([[(math.ceil(1 / each.grid) - 1 + 1e-6) * each.grid]])
    moved = distance(each, edge, -edge, (UP, DOWN))
    assert each.message_sensitivity < moved <= each.sensitivity


# Accounting ---------------------------------------------------------------------------------------
def exact_delta(shift, scale, epsilon):
    """Delta at which noise and noise moved by `shift` (p,), in steps, differ: a sum over points."""
    reach = np.arange(-math.ceil(9 * scale), math.ceil(9 * scale) + max(shift) + 1)
    points = np.stack(np.meshgrid(*[reach] * len(shift), indexing="ij"))
    shift = np.reshape(shift, (-1, *[1] * len(shift)))
    here, there = (
        np.exp(-np.sum((points - each) ** 2, axis=0) / (2 * scale**2)) for each in (0, shift)
    )
    return np.sum(np.maximum(here / here.sum() - math.exp(epsilon) * there / there.sum(), 0.0))


@pytest.mark.parametrize(("epsilon", "n_bits"), [(0.5, None), (1.0, 10), (20.0, None)])
def test_one_coordinate_keeps_its_promise(epsilon, n_bits):
    """The exact delta of a single coordinate is below the stated one, and not with half the noise.

    A coarse grid takes few steps, so the largest shift may be well below the sensitivity.
    """
    each = mechanism(epsilon=epsilon, n_bits=n_bits)
    shift, scale = [math.floor(each.sensitivity / each.grid)], each.noise_std / each.grid
    assert exact_delta(shift, scale, epsilon) <= DELTA < exact_delta(shift, scale / 2, epsilon)


@pytest.mark.parametrize("epsilon", [2.0, 20.0])
def test_two_coordinates_keep_their_promise(epsilon):
    """In every direction on the grid, and not with half the noise."""
    each = mechanism(2, epsilon, n_bits=9 if epsilon == 2.0 else 6)
    reach, scale = each.sensitivity / each.grid, each.noise_std / each.grid
    shifts = [(math.floor(math.sqrt(reach**2 - k**2)), k) for k in range(0, int(reach), 2)]
    assert max(exact_delta(shift, scale, epsilon) for shift in shifts) <= DELTA
    assert min(exact_delta(shift, scale / 2, epsilon) for shift in shifts[:2]) > DELTA


def test_accounting_of_other_libraries():
    """opendp states the same; the losses that dp_accounting computes cost less."""
    opendp = _discrete_gaussian.check_opendp()
    space = opendp.vector_domain(opendp.atom_domain(T="i64")), opendp.l2_distance(T="f64")
    losses = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    for epsilon in (0.5, 3.0):
        each = mechanism(epsilon=epsilon)
        shift, scale = each.sensitivity / each.grid, each.noise_std / each.grid
        noise = opendp.m.make_gaussian(*space, scale=scale)
        assert noise.map(shift) == pytest.approx(zcdp_rho(epsilon, DELTA))
        stated = opendp.c.make_zCDP_to_approxDP(noise).map(shift).epsilon(DELTA)
        assert stated == pytest.approx(epsilon, rel=1e-9)
        exact = losses.from_discrete_gaussian_mechanism(
            scale, math.floor(shift), value_discretization_interval=1e-4
        ).get_epsilon_for_delta(DELTA)
        assert 0.85 * epsilon < exact <= epsilon


@pytest.mark.parametrize(("epsilon", "delta"), [(0.01, 1e-9), (1.0, 1e-5), (8.0, 0.01), (1e4, 0.1)])
def test_calibration(epsilon, delta):
    rho = zcdp_rho(epsilon, delta)
    assert zcdp_delta(rho, epsilon) == pytest.approx(delta, rel=1e-6)
    assert zcdp_delta(rho, epsilon) <= delta
    assert 1 < gdp_mu(epsilon, delta) / math.sqrt(2 * rho) < 1.5
    alphas = 1 + np.geomspace(1e-6, 1e6, 2001)
    logs = (alphas - 1) * (alphas * rho - epsilon) + alphas * np.log1p(-1 / alphas)
    assert zcdp_delta(rho, epsilon) <= np.exp(np.min(logs - np.log(alphas - 1))) * (1 + 1e-9)


# Errors -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: mechanism(0), r"n_coordinates.*\b0\b"),
        (lambda: mechanism(n_bits=2.5), r"n_bits.*\b2\.5\b"),
        (lambda: mechanism(n_bits=49), r"n_bits.*\b48\b.*\b49\b"),
        (lambda: mechanism(n_bits=5), r"n_bits=5\b.*epsilon=1\.0.*at least 8\b"),
        (lambda: DiscreteGaussianMechanism(1, 2.0, 1.0, DELTA, bound=0.0), r"bound.*\b0\.0\b"),
        (lambda: mechanism(epsilon=0.0), r"epsilon.*\b0\.0\b"),
        (lambda: DiscreteGaussianMechanism(1, 2.0, 1.0, 0.0), r"delta.*\(0, 1\).*\b0\.0\b"),
    ],
)
def test_bad_parameters(call, error):
    with pytest.raises(ValueError, match=error):
        call()


def test_without_opendp(monkeypatch):
    monkeypatch.setitem(sys.modules, "opendp.prelude", None)
    with pytest.raises(ImportError, match=r"opendp.*pip install opendp"):
        mechanism().privatize(np.zeros((1, 1)), np.random.default_rng(0))


def test_no_clients_is_no_error():
    assert mechanism(2).privatize(np.empty((0, 2)), np.random.default_rng(0)).shape == (0, 2)
