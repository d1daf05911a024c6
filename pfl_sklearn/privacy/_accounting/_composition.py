"""Total epsilon of accounting events, and the noise of sampled rounds."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable
from functools import lru_cache

from pfl_sklearn.privacy._accounting._events import (
    UNBOUNDED,
    Event,
    GaussianEvent,
    PureEvent,
    SampledGaussian,
    check_relation,
    event_from_dict,
)
from pfl_sklearn.privacy._accounting._gaussian_dp import compose_gdp, gdp_epsilon, gdp_mu
from pfl_sklearn.privacy._accounting._losses import Grid, Round, composed_epsilon

__all__ = [
    "GaussianEvent",
    "PureEvent",
    "SampledGaussian",
    "calibrate_rounds",
    "event_from_dict",
    "events_epsilon",
]

_REPORT = Grid(step=1e-4, most_points=2_000_000)
_CALIBRATION = Grid(step=1e-3, most_points=200_000)
_PRECISION = 1e-3
# Kept back in the search, so that rounding does not make the finer answer the larger one.
_MARGIN = 1e-6


def events_epsilon(events: Iterable[Event], delta: float, relation: str) -> float:
    """Total epsilon of several events on the same data.

    Parameters
    ----------
    events : iterable of SampledGaussian, GaussianEvent or PureEvent
        In any order. Each may have been chosen in view of what the others gave.
    delta : float in (0, 1)
        Of all the events together.
    relation : {"add_remove", "replace_one", "zero_out"}
        Neighbouring relation that the answer is wanted for.

    Returns
    -------
    float
        Infinity if an event is not defined under `relation` or has no noise.

    Raises
    ------
    ValueError
        If `delta` or `relation` is not one of those above.
    ImportError
        If sampled rounds or several kinds of events are to be accounted for and dp-accounting is
        not installed.

    Notes
    -----
    Unsampled Gaussian noise alone is accounted exactly, by Gaussian DP. All else is composed by
    privacy loss distributions (Koskela, Jalkoe and Honkela, 2020; Doroshenko et al., 2022), which
    give an upper estimate: losses are discretized upwards with a step of 1e-4 nats (finer for
    losses below 5e-4, coarser where more than two million steps would be needed), and
    1e-12 + 1e-16 per round of `delta` is set aside for rounding errors. The answer is never above
    what the same events cost with no credit for sampling and basic composition of the pairs.

    - Poisson sampling: the exact distribution of the sampled Gaussian under add/remove, and the
      pair (1 - q) N(0) + q N(+-1) under replacement.
    - Fixed size: the profile of Balle, Barthe and Gaboardi (2018) for sampling without
      replacement, taken to hold in both directions. It is an upper bound for every table, not the
      profile of one pair of tables.
    - Pairs (epsilon, delta): the worst distribution with that pair.

    References
    ----------
    Balle, B., Barthe, G. and Gaboardi, M. (2018). Privacy amplification by subsampling: tight
    analyses via couplings and divergences. NeurIPS. Doroshenko, V., Ghazi, B., Kamath, P.,
    Kumar, R. and Manurangsi, P. (2022). Connect the dots: tighter discrete approximations of
    privacy loss distributions. PoPETs. Koskela, A., Jalkoe, J. and Honkela, A. (2020). Computing
    tight differential privacy guarantees using FFT. AISTATS.

    Examples
    --------
    The same sampling rate costs far more if exactly that share of the clients is drawn:

    >>> from pfl_sklearn.privacy import SampledGaussian, events_epsilon
    >>> poisson = SampledGaussian(1.0, n_rounds=2000, rate=0.02)
    >>> fixed = SampledGaussian(1.0, n_rounds=2000, rate=0.02, sampling="fixed")
    >>> round(events_epsilon([poisson], delta=1e-4, relation="add_remove"), 2)
    4.84
    >>> round(events_epsilon([fixed], delta=1e-4, relation="replace_one"), 1)
    37.8
    """
    _check_delta(delta)
    check_relation(relation)
    counts = Counter(events)
    return _epsilon(tuple(sorted(counts.items(), key=repr)), float(delta), relation, _REPORT)


def calibrate_rounds(
    epsilon: float,
    delta: float,
    *,
    n_rounds: int,
    rate: float,
    sampling: str = "poisson",
    n_sampled: int | None = None,
    relation: str | None = None,
) -> float:
    """Smallest noise multiplier at which sampled rounds spend at most (epsilon, delta).

    Parameters
    ----------
    epsilon : float, > 0
    delta : float in (0, 1)
    n_rounds, rate, sampling, n_sampled
        Of :class:`SampledGaussian`.
    relation : {"add_remove", "replace_one", "zero_out"}, default=None
        None is the one that the way of sampling is made for: "add_remove" with Poisson sampling,
        "replace_one" with a fixed size.

    Returns
    -------
    float
        At most 0.2 percent larger than :func:`events_epsilon` asks for, never smaller; 0 if
        `epsilon` is infinite or `n_rounds` is 0. Exact without sampling.

    Raises
    ------
    ValueError
        If a parameter is out of its range, or the rounds are not defined under `relation`.

    Notes
    -----
    Searched with losses discretized at 1e-3 nats, which is never below the figure of
    :func:`events_epsilon`.

    Examples
    --------
    >>> from pfl_sklearn.privacy import calibrate_rounds
    >>> round(calibrate_rounds(4.3772, 1e-5, n_rounds=4, rate=1.0), 3)
    2.0
    >>> 0.99 < calibrate_rounds(4.84, 1e-4, n_rounds=2000, rate=0.02) < 1.01
    True
    """
    if not epsilon > 0:
        raise ValueError(f"epsilon must be above 0; got {epsilon!r}.")
    _check_delta(delta)
    rounds = SampledGaussian(1.0, n_rounds, rate, sampling, n_sampled)
    relation = rounds.native_relation if relation is None else relation
    check_relation(relation)
    if math.isinf(epsilon) or n_rounds == 0:
        return 0.0
    if rounds.spending(relation) is UNBOUNDED:
        raise ValueError(
            f"relation must be 'replace_one' for sampling='fixed' with rate below 1; got "
            f"{relation!r}."
        )
    return _calibrated(float(epsilon), float(delta), rounds, relation)


@lru_cache(maxsize=256)
def _calibrated(epsilon: float, delta: float, rounds: SampledGaussian, relation: str) -> float:
    def spent(noise_multiplier: float, grid: Grid) -> float:
        event = dataclasses.replace(rounds, noise_multiplier=noise_multiplier)
        return _epsilon(((event, 1),), delta, relation, grid)

    mu = gdp_mu(epsilon, delta)
    sensitivity = 2.0 if relation == "replace_one" else 1.0
    noise = sensitivity * math.sqrt(rounds.n_rounds) / mu  # enough without sampling
    if rounds.rate < 1:
        per_round = mu / (rounds.rate * math.sqrt(rounds.n_rounds))  # in the limit of many rounds
        guess = sensitivity / math.sqrt(math.log1p(per_round * per_round))
        target = epsilon * (1 - _MARGIN)
        return _smallest(
            lambda z: spent(z, _CALIBRATION) / target, guess, noise * (1 + 2 * _MARGIN)
        )
    while spent(noise, _REPORT) > epsilon:
        noise *= 1 + 1e-9
    return noise


def _smallest(share: Callable[[float], float], guess: float, enough: float) -> float:
    """Smallest z up to `enough`, to `_PRECISION`, with share(z) <= 1, for a decreasing share."""
    high, low = min(guess, enough), None
    widening = 1.05
    while share(high) > 1:
        low, high = high, min(high * widening, enough)
        if high == enough:
            break
        widening *= widening
    while low is None:
        smaller = high / widening
        if share(smaller) > 1:
            low = smaller
        else:
            high = smaller
        widening *= widening
    while high / low > 1 + _PRECISION:
        middle = _between(low, high, share(low), share(high))
        if share(middle) > 1:
            low = middle
        else:
            high = middle
    return high


def _between(low: float, high: float, above: float, below: float) -> float:
    """Where a power law through two shares reaches 1, kept off the ends of the bracket."""
    width = math.log(high / low)
    fraction = 0.5
    if below > 0 and math.isfinite(above):
        fraction = math.log(above) / math.log(above / below)
    margin = min(0.5, 0.4 * _PRECISION / width)
    inside = min(max(fraction + margin / 2, margin), 1 - margin)
    return low * math.exp(inside * width)


@lru_cache(maxsize=4096)
def _epsilon(
    events: tuple[tuple[Event, int], ...], delta: float, relation: str, grid: Grid
) -> float:
    mus: list[float] = []
    rounds: Counter[Round] = Counter()
    pure: Counter[tuple[float, float]] = Counter()
    for event, times in events:
        spending = event.spending(relation)
        mus.append(spending.mu * math.sqrt(times))
        rounds.update({one: count * times for one, count in spending.rounds})
        pure.update(dict.fromkeys(spending.pure, times))
    mu = compose_gdp(mus)
    bound = _without_amplification(mu, rounds, pure, delta)
    exact = not rounds and pure.total() + (mu > 0) <= 1
    if exact or bound == 0 or math.isinf(mu):
        return bound
    parts = tuple(sorted(rounds.items())), tuple(sorted(pure.items()))
    return min(bound, composed_epsilon(mu, *parts, delta, grid))


def _without_amplification(
    mu: float, rounds: Counter[Round], pure: Counter[tuple[float, float]], delta: float
) -> float:
    """Epsilon if every client took part, with basic composition of the pairs."""
    left = delta - math.fsum(count * spent for (_, spent), count in pure.items())
    everyone = compose_gdp([mu, *(one.mu * math.sqrt(count) for one, count in rounds.items())])
    if left < 0 or math.isinf(everyone):
        return math.inf
    return gdp_epsilon(everyone, left) + math.fsum(
        count * epsilon for (epsilon, _), count in pure.items()
    )


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise ValueError(f"delta must be in (0, 1); got {delta!r}.")
