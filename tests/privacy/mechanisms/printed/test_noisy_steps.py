"""Gradients inside local steps: clipping, noise of each client, and the report."""

import math

import numpy as np
import pytest

from pfl_sklearn.privacy import SampledGaussian, gdp_epsilon
from pfl_sklearn.privacy._mechanisms._printed._noisy_steps import NoisySteps
from tests.helpers.draws import ROUNDING, Ones
from tests.helpers.hostile import hostile


@pytest.mark.parametrize("part", [0, 1])
def test_without_noise_gradients_are_those_of_the_paper(part):
    """h / max(|h| / C, 1), and 0 if it is not finite."""
    steps, slopes = NoisySteps((2.0, 0.1), 5), hostile((300, 3), 5.0)
    found = steps.privatize(slopes, part, steps.generators(range(len(slopes))))
    for slope, got in zip(slopes, found, strict=True):
        bound, length = steps.clip_norms[part], math.hypot(*slope)
        # The paper's length / bound may overflow.
        share = min(bound / max(length, 1e-300), 1) if math.isfinite(length) else 0
        expected = slope * share if share else np.zeros(3)
        assert got == pytest.approx(expected, rel=1e-12, abs=1e-300)


@pytest.mark.parametrize(("part", "std"), [(0, 3.0), (1, 0.15)])
def test_noise_is_exactly_what_is_stated(part, std):
    """Every draw is 1, of both clients: a gradient is one standard deviation away."""
    steps = NoisySteps((2.0, 0.1), 5, noise_multiplier=1.5)
    found = steps.privatize(np.array([[3.0, 4.0], [0.0, 0.0]]), part, [Ones(), Ones()])
    clipped = np.array([[0.6, 0.8], [0.0, 0.0]]) * steps.clip_norms[part]
    np.testing.assert_allclose(found - clipped, std, rtol=ROUNDING)


def test_noise_is_that_of_a_client_and_new_in_every_step():
    """Whatever its block is, and whatever the others' gradients are."""
    steps = NoisySteps((1.0, 1.0), 3, noise_multiplier=1.0)
    together, alone = steps.generators([7, 8, 9]), steps.generators([8])
    draws = []
    for part in (0, 1, 0, 1):
        slopes = np.random.default_rng(part).normal(size=(3, 4))
        found = steps.privatize(slopes, part, together)
        np.testing.assert_array_equal(found[1:2], steps.privatize(slopes[1:2], part, alone))
        draws.append(found - NoisySteps((1.0, 1.0), 3).privatize(slopes, part, together))
    assert len({found.tobytes() for found in draws}) == 4


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_counts_as_zero(value):
    steps = NoisySteps((1.0,), 1, noise_multiplier=1.0)
    found = [steps.privatize(np.array([[x, 0.0]]), 0, steps.generators([3])) for x in (0.0, value)]
    np.testing.assert_array_equal(*found)


def test_the_sum_of_messages_gets_no_noise():
    steps, rng = NoisySteps((1.0,), 1, noise_multiplier=5.0), np.random.default_rng(0)
    messages = rng.normal(size=(4, 3)).astype(np.float32) * 1e6
    released = steps.release(messages, steps.start(), 4, rng)
    np.testing.assert_array_equal(released.total, messages.sum(axis=0, dtype=float))
    assert released.bound_next == math.inf


@pytest.mark.parametrize(("relation", "times"), [("replace_one", 2), ("zero_out", 1)])
def test_facts_say_what_the_last_step_certifies(relation, times):
    """Two parts, 5 steps: sensitivity 5 sqrt(2) bounds for what one client contributes."""
    steps = NoisySteps((2.0, 0.1), 5, noise_multiplier=1.5)
    rounds = SampledGaussian(1.5 / steps.largest_norm, 9, sampling="fixed")
    facts = steps.facts(rounds, 1e-5, relation)
    assert facts["noise_std"] == pytest.approx(3.0)
    assert facts["sensitivity"] == pytest.approx(times * 5 * math.sqrt(2) * 2.0)
    mu = math.sqrt(9) * facts["sensitivity"] / facts["noise_std"]
    assert facts["epsilon"] == pytest.approx(gdp_epsilon(mu, 1e-5))
    assert facts["trust"] == "local"
    assert "last local step" in facts["accountant"]


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"clip_norms": (1.0, 0.0)}, r"\[1e-100, 1e100\]; got 0\.0"),
        ({"clip_norms": (math.inf,)}, r"\[1e-100, 1e100\]; got inf"),
        ({"noise_multiplier": 1e-13}, r"at least 1e-12; got 1e-13"),
        ({"noise_multiplier": math.nan}, r"at least 1e-12; got nan"),
    ],
    ids=str,
)
def test_what_is_refused(given, error):
    with pytest.raises(ValueError, match=error):
        NoisySteps(**{"clip_norms": (1.0,), "n_steps": 2, **given})
