"""Privacy loss distributions of sampled rounds, by dp_accounting: always an upper estimate.

The discretization connects the dots of the privacy profile, which can only raise the profile.
"""

from __future__ import annotations

import functools
import importlib
import math
from typing import Any, NamedTuple

import numpy as np
from scipy.special import erfcx, log_ndtr, ndtr

from pfl_sklearn._typing import Floats

# Tails beyond this many standard deviations, a mass of 1e-23, count as infinite losses. That is far
# below any delta in use, and it keeps the grid finite.
_TAIL_STDS = 10.0
_COARSEST_STEP = 1.0  # in nats; a coarser grid is useless
# Range of a grid, in nats, at the largest step. A grid has at most 200 / step points whatever its
# final step, which limits memory and time: two million points for reports.
_WIDEST_SPAN = 200.0
LARGEST_EXPONENT = 700.0  # the exponential overflows at 709.8
# Upper bounds on the error of delta by rounding in Fourier transforms; measured: 2e-17 per round.
# Without them a tiny delta is answered too low: 7.213 instead of 7.238 at 1e-12 after 1e4 rounds.
_ROUNDING_OF_DELTA, _ROUNDING_PER_ROUND = 1e-12, 1e-16


class SampledRound(NamedTuple):
    """One round of Gaussian noise on a sum over sampled clients.

    `sample` is "poisson" or "without_replacement" if the adversary cannot know whether the client
    takes part, and "known" if it can.
    """

    noise_multiplier: float
    rate: float
    sample: str
    replace: bool  # one client's contribution replaced by another, else by nothing

    @property
    def mu(self) -> float:
        """Gaussian-DP parameter of the round if every client took part."""
        return (2.0 if self.replace else 1.0) / self.noise_multiplier


RoundCounts = tuple[tuple[SampledRound, int], ...]
PairCounts = tuple[tuple[tuple[float, float], int], ...]


def composed_epsilon(
    mu: float, rounds: RoundCounts, pure: PairCounts, delta: float, largest_step: float
) -> float:
    """Upper estimate of the total epsilon of mu-GDP, sampled rounds and (epsilon, delta) events.

    `rounds` and `pure` are pairs of an event and its count. Losses are rounded up to steps of
    `largest_step` nats: smaller ones where losses are small, larger ones where too many would be
    needed. The answer is infinite where limits on memory or rounding errors rule out an estimate.
    """
    step = _affordable_step(mu, rounds, pure, largest_step)
    counts = sum(count for _, count in rounds) + sum(count for _, count in pure)
    rest = delta - _ROUNDING_OF_DELTA - counts * _ROUNDING_PER_ROUND
    if step > _COARSEST_STEP or rest <= 0:
        return math.inf  # the caller has the bound without credit for sampling
    losses = [_losses_of_round(round_, step).self_compose(count) for round_, count in rounds]
    losses += [_losses_of_pairs(*pair, count, step) for pair, count in pure]
    if mu > 0:
        # Without sampling the two directions and all relations agree: mu holds the sensitivity.
        losses.append(_losses_of_gaussian(1 / mu, 1.0, False, step))
    total = functools.reduce(lambda total, other: total.compose(other), losses)
    return float(total.get_epsilon_for_delta(rest))


def without_replacement_delta(mu: float, rate: float, epsilon: Floats) -> Floats:
    r"""Profile (e,) of a mu-GDP mechanism on a sample of fixed size, under replacement.

    It is q delta(log(1 + (e^epsilon - 1) / q)) for `epsilon` (e,) >= 0, by Theorem 9 of Balle,
    Barthe and Gaboardi (2018).
    """
    # From 500 nats on, 1 is negligible against e^epsilon / q, and the exponential nears its
    # overflow.
    small = np.log1p(np.expm1(np.minimum(epsilon, 500.0)) / rate)
    return rate * _gdp_profile(mu, np.where(epsilon < 500.0, small, epsilon - math.log(rate)))


def _gdp_profile(mu: float, epsilon: Floats) -> Floats:
    """Gaussian-DP profile (e,), accurate in its tail."""
    # In the tail both terms of the profile are e^(-low^2 / 2) times half a scaled erfc. We take the
    # difference before that factor, because it would lose all digits afterwards.
    low = epsilon / mu - mu / 2
    high = low + mu
    tail = np.maximum(low, 0.0)
    mills = erfcx(tail / math.sqrt(2)) - erfcx(np.maximum(high, tail) / math.sqrt(2))
    near = ndtr(-low) - np.exp(np.minimum(epsilon + log_ndtr(-high), 0.0))
    return np.maximum(np.where(low > 0, np.exp(-tail * tail / 2) * mills / 2, near), 0.0)


@functools.lru_cache(maxsize=4)
def _losses_of_round(round_: SampledRound, step: float) -> Any:
    """Loss distribution of one round on a sample of the clients."""
    if round_.sample == "poisson":
        return _losses_of_gaussian(round_.noise_multiplier, round_.rate, round_.replace, step)
    return _losses_of_profile(round_, step)


def _losses_of_pairs(epsilon: float, delta: float, count: int, step: float) -> Any:
    """Loss distribution of `count` releases with the same pair (epsilon, delta)."""
    # The worst distribution with this pair, which dominates every mechanism that has it.
    common = dp_accounting("pld.common")
    parameters = common.DifferentialPrivacyParameters(epsilon, delta)
    return _loss_module().from_privacy_parameters(parameters, step).self_compose(count)


def _losses_of_gaussian(noise_multiplier: float, rate: float, replace: bool, step: float) -> Any:
    """Loss distribution of Gaussian noise on a Poisson sample, or on all clients at rate 1."""
    # Under replacement this accountant doubles the sensitivity itself; twice would be wrong.
    relations = dp_accounting("privacy_accountant").NeighboringRelation
    return _loss_module().from_gaussian_mechanism(
        noise_multiplier,
        sampling_prob=rate,
        value_discretization_interval=step,
        neighboring_relation=relations.REPLACE_ONE if replace else relations.ADD_OR_REMOVE_ONE,
    )


def _losses_of_profile(round_: SampledRound, step: float) -> Any:
    """Loss distribution of a profile; below epsilon = 0, that of the two tables swapped."""
    # delta(-e) = 1 - e^-e + e^-e delta(e) for a profile that holds in both directions.
    n = math.ceil(_largest_loss(round_) / step)
    epsilon = step * np.arange(n + 1, dtype=np.float64)
    if round_.sample == "without_replacement":
        above = without_replacement_delta(round_.mu, round_.rate, epsilon)
    else:  # the adversary sees who takes part, so participation lowers delta alone
        above = round_.rate * _gdp_profile(round_.mu, epsilon)
    shrink = np.arange(n, 0, -1) * step
    below = -np.expm1(-shrink) + np.exp(-shrink) * above[:0:-1]
    deltas = np.clip(np.concatenate([below, above]), 0.0, 1.0)
    # Straight lines between the points lie above the convex profile: an upper estimate.
    make = dp_accounting("pld.pld_pmf").create_pmf_pessimistic_connect_dots_fixed_gap
    return _loss_module().PrivacyLossDistribution(make(step, -n, n, deltas))


def _affordable_step(
    mu: float, rounds: RoundCounts, pure: PairCounts, largest_step: float
) -> float:
    """Step of the grid: finer where losses are small, coarser where there are too many points."""
    # The step is divided by 10 or multiplied by 2, so the points of a grid of ten times the step
    # are points of the finer grid, whose answer is the larger one.
    step = largest_step
    spread = min((_typical_loss(round_) for round_, _ in rounds), default=math.inf)
    # Five points within a standard deviation of the loss: with fewer, rounding up would dominate
    # many rounds. Below 1e-6 nats, rounding in the accountant dominates.
    while step > spread / 5 and step > 1e-6:
        step /= 10
    # The Gaussian part has a loss of mean mu^2 / 2 and variance mu^2; pairs lose at most epsilon in
    # either direction.
    span = mu * mu / 2 + _TAIL_STDS * mu + sum(2 * epsilon * count for (epsilon, _), count in pure)
    for round_, count in rounds:
        # The mean loss by two bounds; a small loss has a variance of about twice its mean, and the
        # number of rounds with the client varies where participation is known.
        mean = count * min(_log_chi_square(round_), round_.rate * round_.mu**2 / 2)
        variance = 2 * mean
        if round_.sample == "known":
            variance += count * round_.rate * round_.mu**4 / 4
        span += mean + _TAIL_STDS * math.sqrt(variance) + _largest_loss(round_)
    while span / step > _WIDEST_SPAN / largest_step:
        step *= 2
    return step


def _typical_loss(round_: SampledRound) -> float:
    """Standard deviation of the loss of one round (with the client); accurate where it is small."""
    if round_.sample == "known":
        return round_.mu
    return math.sqrt(math.expm1(min(_log_chi_square(round_), LARGEST_EXPONENT)))


def _log_chi_square(round_: SampledRound) -> float:
    """log(1 + q^2 (e^(mu^2) - 1)), an upper bound on the mean loss of a Poisson round."""
    # With known participation it has q in place of q^2.
    share = round_.rate if round_.sample == "known" else round_.rate**2
    return max(0.0, float(np.logaddexp(math.log1p(-share), math.log(share) + round_.mu**2)))


def _largest_loss(round_: SampledRound) -> float:
    """Loss that one round exceeds with negligible probability."""
    unsampled = round_.mu**2 / 2 + _TAIL_STDS * round_.mu
    if round_.sample == "known":
        return unsampled
    # log(1 - q + q e^loss): the ratio of densities is a mixture with weight q.
    return float(np.logaddexp(math.log1p(-round_.rate), math.log(round_.rate) + unsampled))


def _loss_module() -> Any:
    """Module of dp-accounting that makes loss distributions."""
    return dp_accounting("pld.privacy_loss_distribution")


def dp_accounting(
    name: str, purpose: str = "sampled rounds and for several kinds of events"
) -> Any:
    """A module of dp-accounting; ImportError with the `purpose` that needs it if it is missing."""
    # Imported late: it is optional, and slow to import where only Gaussian noise is accounted for.
    try:
        return importlib.import_module(f"dp_accounting.{name}")
    except ImportError as error:
        raise ImportError(
            f"accounting for {purpose} needs dp-accounting: pip install dp-accounting."
        ) from error
