"""Calibration: from noise to epsilon and back, and the search for the least noise."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import lru_cache

from pfl_sklearn.privacy._accounting._composition import REPORT_STEP, epsilon_on_grid
from pfl_sklearn.privacy._accounting._events import (
    UNBOUNDED,
    GaussianEvent,
    SampledGaussian,
    check_positive_delta,
    check_relation,
    check_value,
    contribution_sensitivity,
)
from pfl_sklearn.privacy._accounting._gaussian_dp import gdp_epsilon, gdp_mu
from pfl_sklearn.privacy._accounting._losses import LARGEST_EXPONENT

# Ten times coarser than the grid of reports, so ten times as fast. Its points are points of that
# grid as well, so its epsilon is the larger one and noise that suffices here suffices there.
_SEARCH_STEP = 10 * REPORT_STEP
_NOISE_PRECISION = 1e-3  # of a noise multiplier, relative
_RATE_PRECISION = 1e-4  # of what a trial may spend, relative
# Share of epsilon kept back in the search: without it, rounding could put the reported epsilon
# above the target.
_EPSILON_MARGIN = 1e-6


def epsilon_spent(
    noise_std: float,
    sensitivity: float,
    *,
    delta: float,
    relation: str = "replace_one",
    under: str | None = None,
    n_releases: int = 1,
) -> float:
    """Epsilon of Gaussian noise on a quantity of given L2 sensitivity.

    Parameters
    ----------
    noise_std : float, > 0
        Standard deviation of the noise in every coordinate, in the units of `sensitivity`.
    sensitivity : float, > 0
        Largest L2 distance between the values of the quantity on two tables that are neighbours
        under `relation`. For a sum over clients of vectors with norm at most C it is C under
        "add_remove" and "zero_out", and 2 C under "replace_one".
    delta : float in (0, 1)
        Delta of all releases together.
    relation : {"add_remove", "replace_one", "zero_out"}, default="replace_one"
        The neighbouring relation that `sensitivity` is stated for.
    under : {"add_remove", "replace_one", "zero_out"} or None, default=None
        The neighbouring relation of the answer; None means `relation`. Only an add/remove
        sensitivity can be converted (it at most doubles under replacement).
    n_releases : int, default=1
        Number of releases with this noise on the same data. They are accounted for together.

    Raises
    ------
    ValueError
        If a parameter is out of range, or `sensitivity` does not determine the one under `under`.

    Notes
    -----
    Exact (Gaussian DP; Dong, Roth and Su, 2022) if every client takes part in every release, and an
    upper bound for sampled clients.

    Examples
    --------
    The noise standard deviation equals the clip norm, so the noise multiplier is 1:

    >>> from pfl_sklearn.privacy import epsilon_spent
    >>> round(epsilon_spent(1.0, 1.0, delta=1e-5, relation="zero_out"), 4)
    4.3772
    >>> round(epsilon_spent(1.0, 1.0, delta=1e-5, relation="add_remove", under="replace_one"), 4)
    9.9973
    """
    sensitivity = _sensitivity_under(sensitivity, relation, under)
    check_value("noise_std", noise_std, noise_std > 0, "above 0")
    return gdp_epsilon(_over_releases(sensitivity / noise_std, n_releases), delta)


def calibrate_noise(
    epsilon: float,
    delta: float,
    sensitivity: float,
    *,
    relation: str = "replace_one",
    under: str | None = None,
    n_releases: int = 1,
) -> float:
    """Smallest standard deviation of Gaussian noise that spends at most (epsilon, delta).

    Parameters
    ----------
    epsilon, delta : float, > 0 and float in (0, 1)
        Cost of all releases together.
    sensitivity, relation, under, n_releases
        As in :func:`epsilon_spent`, of which this function is the inverse.

    Examples
    --------
    >>> from pfl_sklearn.privacy import calibrate_noise
    >>> round(calibrate_noise(9.9973, 1e-5, sensitivity=2.0), 4)
    1.0
    """
    sensitivity = _sensitivity_under(sensitivity, relation, under)
    return _over_releases(sensitivity, n_releases) / gdp_mu(epsilon, delta)


def calibrate_rounds(
    epsilon: float,
    delta: float,
    *,
    n_rounds: int,
    rate: float,
    sampling: str = "poisson",
    relation: str | None = None,
    besides: GaussianEvent | None = None,
) -> float:
    """Smallest noise multiplier at which sampled rounds spend at most (epsilon, delta).

    Parameters
    ----------
    epsilon, delta : float, > 0 and float in (0, 1)
        Cost of all rounds and the releases `besides` together.
    n_rounds, rate, sampling
        As in :class:`SampledGaussian`.
    relation : {"add_remove", "replace_one", "zero_out"} or None, default=None
        Neighbouring relation. None means the native relation of the sampling scheme: "zero_out"
        with Poisson sampling, "replace_one" with a fixed size.
    besides : GaussianEvent or None, default=None
        Other releases on the same data, which take a part of `epsilon`.

    Returns
    -------
    float
        Exact without sampling. Otherwise at most 0.2 percent larger than :func:`events_epsilon`
        requires, and never smaller: privacy losses are discretized upwards. 0 if `epsilon` is
        infinite or `n_rounds` is 0.

    Raises
    ------
    ValueError
        If a parameter is out of range, the rounds are not defined under `relation`, or the releases
        `besides` leave them nothing to spend.
    ImportError
        If `rate` is below 1 and dp-accounting is not installed.

    Examples
    --------
    >>> from pfl_sklearn.privacy import calibrate_rounds
    >>> round(calibrate_rounds(4.3772, 1e-5, n_rounds=4, rate=1.0), 3)
    2.0
    >>> 0.99 < calibrate_rounds(4.84, 1e-4, n_rounds=2000, rate=0.02) < 1.01
    True
    """
    check_value("epsilon", epsilon, epsilon > 0, "above 0")
    check_positive_delta(delta)
    valid = besides is None or isinstance(besides, GaussianEvent)
    check_value("besides", besides, valid, "a GaussianEvent or None")
    rounds = SampledGaussian(1.0, n_rounds, rate, sampling)
    relation = rounds.native_relation if relation is None else relation
    check_relation(relation)
    if math.isinf(epsilon) or n_rounds == 0:
        return 0.0  # no promise, or no release
    if rounds.spending(relation) is UNBOUNDED:
        raise ValueError(
            f"relation must be 'zero_out' or 'replace_one' for rounds; got {relation!r}. Rounds "
            "protect what a client contributes. Their figures under 'zero_out' are those that are "
            "usually stated for adding and removing a client."
        )
    return _calibrated(float(epsilon), float(delta), rounds, relation, besides)


@lru_cache(maxsize=256)
def _calibrated(
    epsilon: float,
    delta: float,
    rounds: SampledGaussian,
    relation: str,
    besides: GaussianEvent | None,
) -> float:
    """Smallest noise multiplier for `rounds`, whose own one is ignored."""
    others = () if besides is None else ((besides, 1),)

    def spent(noise_multiplier: float, largest_step: float) -> float:
        event = dataclasses.replace(rounds, noise_multiplier=noise_multiplier)
        return epsilon_on_grid(((event, 1), *others), delta, relation, largest_step)

    mu = _remaining_mu(gdp_mu(epsilon, delta), besides, relation)
    sensitivity = contribution_sensitivity(relation)
    # Enough without sampling, as T rounds are Gaussian DP with sqrt(T) times the sensitivity. Hence
    # enough with sampling: the total never exceeds the cost without credit for it.
    noise = sensitivity * math.sqrt(rounds.n_rounds) / mu
    if rounds.rate < 1:
        # The search has a target slightly below epsilon, so it may need slightly more noise.
        target, enough = epsilon * (1 - _EPSILON_MARGIN), noise * (1 + 2 * _EPSILON_MARGIN)
        smallest = _smallest_affordable(
            lambda z: spent(z, _SEARCH_STEP) / target,
            sensitivity / _approximate_mu_of_round(rounds, mu),
            bounds=(0.0, enough),
            precision=_NOISE_PRECISION,
            widening=1.05,  # the guess is mostly within a few percent
        )
        noise = enough if smallest is None else smallest
        return _verified_noise(noise, enough, spent, epsilon) if rounds.rate <= 2 * delta else noise
    # The closed form is exact but for rounding, which may put the reported epsilon above the
    # target. The step doubles, since other releases may leave little of it.
    step = 1e-9
    while spent(noise, REPORT_STEP) > epsilon:
        noise, step = noise * (1 + step), 2 * step
    return noise


def _remaining_mu(mu: float, besides: GaussianEvent | None, relation: str) -> float:
    """Gaussian-DP parameter that other releases leave of `mu`."""
    taken = 0.0 if besides is None else besides.spending(relation).mu
    if not taken < mu:
        raise ValueError(
            f"besides={besides!r} spends mu={taken:.4g} under {relation!r}; expected less than the "
            f"{mu:.4g} of epsilon and delta."
        )
    # sqrt(mu^2 - taken^2), as squares of mu add up; the product keeps digits where they are close.
    return math.sqrt((mu - taken) * (mu + taken))


def _verified_noise(
    noise: float, enough: float, spent: Callable[[float, float], float], epsilon: float
) -> float:
    """Noise multiplier from `noise` to `enough` that spends at most `epsilon` on the fine grid."""
    # If a client takes part with a probability of almost exactly delta, rounding errors decide, and
    # the finer grid may give a larger epsilon than that of the search.
    # Each factor is the square of the one before: `enough` may be many orders of magnitude away.
    growth = 2.0
    while noise < enough and spent(noise, REPORT_STEP) > epsilon:
        noise, growth = min(noise * growth, enough), growth**2
    return noise


def _approximate_mu_of_round(rounds: SampledGaussian, mu: float) -> float:
    """Gaussian-DP parameter of one round with the client, if all rounds are mu-GDP together."""
    # It holds in the limit of many rounds: a guess, not a bound.
    if rounds.sampling == "fixed":
        # Participation is known: about q T rounds count, each in full.
        return mu / math.sqrt(rounds.rate * rounds.n_rounds)
    # Central limit theorem of Gaussian DP for Poisson samples (Bu, Dong, Long and Su, 2020):
    # mu^2 = q^2 T (e^(mu_1^2) - 1).
    per_round = mu / (rounds.rate * math.sqrt(rounds.n_rounds))
    return math.sqrt(math.log1p(per_round * per_round))


def approximate_mu(rounds: SampledGaussian, relation: str) -> float:
    """Gaussian-DP parameter of all rounds together, in the limit of many rounds."""
    # It is at most that of rounds with all clients, and inverts ``_approximate_mu_of_round``. It
    # splits a budget between releases and promises nothing.
    mu_of_round = contribution_sensitivity(relation) / rounds.noise_multiplier
    everyone = mu_of_round * math.sqrt(rounds.n_rounds)
    if rounds.sampling == "fixed":
        return everyone * math.sqrt(rounds.rate)
    square = mu_of_round * mu_of_round
    if square > LARGEST_EXPONENT:  # so little noise that sampling gives no credit
        return everyone
    sampled = rounds.rate * math.sqrt(rounds.n_rounds * math.expm1(square))
    return min(everyone, sampled) if rounds.rate < 1 else everyone


def largest_affordable_rate(
    epsilon: float, spent: Callable[[float], float], low: float, high: float, guess: float
) -> float | None:
    """Largest rate in [low, high] (to 1e-4) that spends at most `epsilon`, or None."""
    # `spent` increases with the rate. It is slow and hard to compute where it is large, so the
    # search starts at `guess`.
    # The factor that shrinks the rate acts like noise: the larger it is, the less is spent.
    reduction = _smallest_affordable(
        lambda reduction: spent(high / reduction) / epsilon,
        high / guess,
        bounds=(1.0, high / low),
        precision=_RATE_PRECISION,
        widening=2.0,
    )
    return None if reduction is None else high / reduction


def _smallest_affordable(
    share: Callable[[float], float],
    guess: float,
    *,
    bounds: tuple[float, float],
    precision: float,
    widening: float,
) -> float | None:
    """Smallest x in `bounds`, to a relative precision, with share(x) <= 1; None without one."""
    # `share` decreases. The search widens a bracket around `guess`, first by the factor `widening`
    # and then by its square each time, and narrows it by power laws through its ends.
    # Throughout, share(high) <= 1 once the first loop ends, so what is returned never overspends.
    lowest, highest = bounds
    high, low = min(guess, highest), None
    while share(high) > 1:
        if high == highest:
            return None
        low, high = high, min(high * widening, highest)
        widening *= widening
    while low is None:
        if high == lowest:
            return lowest
        smaller = max(high / widening, lowest)
        if share(smaller) > 1:
            low = smaller
        else:
            high = smaller
        widening *= widening
    while high / low > 1 + precision:
        middle = _interpolate(low, high, share(low), share(high), precision)
        if share(middle) > 1:
            low = middle
        else:
            high = middle
    return high


def _interpolate(low: float, high: float, above: float, below: float, precision: float) -> float:
    """Point of the bracket, off its ends, where a power law through both shares reaches 1."""
    width = math.log(high / low)
    fraction = 0.5  # a share of 0 or infinity has no logarithm: bisect
    if below > 0 and math.isfinite(above):
        fraction = math.log(above) / math.log(above / below)
    # At least 0.4 of the precision off the ends, or the bracket might shrink from one side for
    # ever; aiming slightly high makes the upper end, which is the answer, move.
    margin = min(0.5, 0.4 * precision / width)
    inside = min(max(fraction + margin / 2, margin), 1 - margin)
    return low * math.exp(inside * width)


def _over_releases(value: float, n_releases: int) -> float:
    """Sensitivity or Gaussian-DP parameter of all releases together, from that of one."""
    check_value("n_releases", n_releases, 1 <= n_releases < math.inf, "finite and at least 1")
    return value * math.sqrt(n_releases)


def _sensitivity_under(sensitivity: float, relation: str, under: str | None) -> float:
    """Sensitivity under `under`, from the one under `relation`; None stands for `relation`."""
    # An infinite sensitivity has no meaning; with infinite noise the ratio would be NaN.
    check_value("sensitivity", sensitivity, 0 < sensitivity < math.inf, "finite and above 0")
    check_relation(relation)
    if under is None or under == relation:
        return sensitivity
    check_relation(under, "under")
    # A bound on replacements implies none on one contribution; zeroing out implies none on a new
    # client.
    if relation != "add_remove":
        raise ValueError(
            f"a sensitivity under relation={relation!r} does not determine the one "
            f"under={under!r}; give the sensitivity under relation='add_remove'."
        )
    # A replacement removes one contribution and adds another; zeroing out removes one.
    return sensitivity * contribution_sensitivity(under)
