"""Composition: the total epsilon of accounting events."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

from pfl_sklearn.privacy._accounting._events import (
    Event,
    check_positive_delta,
    check_relation,
    check_value,
)
from pfl_sklearn.privacy._accounting._gaussian_dp import compose_gdp, gdp_epsilon
from pfl_sklearn.privacy._accounting._losses import SampledRound, composed_epsilon
from pfl_sklearn.privacy._accounting._selection import renyi_epsilon

# Discretization is pessimistic: a smaller step gives a smaller epsilon, which is still an upper
# estimate. At this one, in nats, a grid has at most two million points.
REPORT_STEP = 1e-4
# From this delta down, what rounding errors may take of it shows in epsilon, or leaves none.
_TINY_DELTA = 1e-10


def events_epsilon(
    events: Iterable[Event], delta: float, relation: str, adversary: str = "clients"
) -> float:
    r"""Total epsilon of several events on the same data.

    Parameters
    ----------
    events : iterable of SampledGaussian, GaussianEvent or PureEvent
        In any order. Each event may have been chosen after seeing the results of the others.
    delta : float in (0, 1)
        Delta of all events together.
    relation : {"add_remove", "replace_one", "zero_out"}
        Neighbouring relation of the total.
    adversary : {"clients", "outsiders"}, default="clients"
        Who tries to tell neighbouring tables apart: everybody else including all other clients
        together, or outsiders alone, who see the releases and nothing of a client. It matters for
        rounds on samples of a fixed size under "replace_one" only.

    Returns
    -------
    float
        Infinity if an event is not defined under `relation` or has no noise.

    Raises
    ------
    ValueError
        If `delta`, `relation` or `adversary` is invalid.
    ImportError
        If dp-accounting is not installed, for sampled rounds and mixtures of kinds of events.

    Notes
    -----
    Unsampled Gaussian noise alone is accounted for exactly, by Gaussian DP. Everything else is
    composed by privacy loss distributions (Koskela, Jalkoe and Honkela, 2020; Doroshenko et al.,
    2022), an upper estimate: losses are rounded up to steps of 1e-4 nats (finer for losses below
    5e-4, coarser where more than two million steps would be needed). We set aside 1e-12 + 1e-16 per
    round of `delta` for rounding errors. From a delta of 1e-10 down, where this shows, the answer
    is at most the bound by Renyi divergences (Mironov, Talwar and Zhang, 2019), where one is known.
    It never exceeds the cost without credit for sampling and with basic composition of the pairs.

    - Poisson sampling: the exact distribution of the sampled Gaussian under "zero_out" (it is that
      of adding and removing a client), and the pair (1 - q) N(0) + q N(+-1) under replacement. Both
      hold against other clients only while they do not learn how many take part in a round.
    - Fixed size, against the other clients, who know who takes part: with T rounds, rate q and
      sensitivity c (2 under replacement, else 1) in units of the clip norm,

      .. math:: \delta(\epsilon) = \sum_k \binom{T}{k} q^k (1 - q)^{T - k}
                \, \delta_{c \sqrt{k} / z}(\epsilon) ,

      where :math:`\delta_\mu` is the profile of Gaussian DP (:func:`gdp_delta`).
    - Fixed size, against outsiders under replacement: the profile of Balle, Barthe and Gaboardi
      (2018) for sampling without replacement, which we take to hold in both directions. It is an
      upper bound for every table, not the profile of one pair of tables.
    - Pairs (epsilon, delta): the worst distribution with that pair.

    References
    ----------
    Balle, B., Barthe, G. and Gaboardi, M. (2018). Privacy amplification by subsampling: tight
    analyses via couplings and divergences. NeurIPS. Doroshenko, V., Ghazi, B., Kamath, P.,
    Kumar, R. and Manurangsi, P. (2022). Connect the dots: tighter discrete approximations of
    privacy loss distributions. PoPETs. Koskela, A., Jalkoe, J. and Honkela, A. (2020). Computing
    tight differential privacy guarantees using FFT. AISTATS. Mironov, I., Talwar, K. and Zhang, L.
    (2019). Renyi differential privacy of the sampled Gaussian mechanism. arXiv:1908.10530.

    Examples
    --------
    At the same sampling rate, samples of a fixed size cost far more than Poisson samples, above
    all against the other clients:

    >>> from pfl_sklearn.privacy import SampledGaussian, events_epsilon
    >>> poisson = SampledGaussian(1.0, n_rounds=2000, rate=0.02)
    >>> fixed = SampledGaussian(1.0, n_rounds=2000, rate=0.02, sampling="fixed")
    >>> round(events_epsilon([poisson], delta=1e-4, relation="zero_out"), 2)
    4.84
    >>> round(events_epsilon([fixed], delta=1e-4, relation="zero_out"), 1)
    48.3
    """
    check_positive_delta(delta)
    check_relation(relation)
    valid = adversary in ("clients", "outsiders")
    check_value("adversary", adversary, valid, "'clients' or 'outsiders'")
    # Sorted, so that the order of events changes neither the sum's rounding nor the cache's key.
    counts = tuple(sorted(Counter(events).items(), key=repr))
    return epsilon_on_grid(counts, float(delta), relation, REPORT_STEP, adversary)


@lru_cache(maxsize=4096)
def epsilon_on_grid(
    events: tuple[tuple[Event, int], ...],
    delta: float,
    relation: str,
    largest_step: float,
    adversary: str = "clients",
) -> float:
    """Total epsilon of events, each with its count, from losses in steps of `largest_step`."""
    mus: list[float] = []
    rounds: Counter[SampledRound] = Counter()
    pure: Counter[tuple[float, float]] = Counter()
    for event, times in events:
        spending = event.spending(relation)
        mus.append(spending.mu * math.sqrt(times))
        rounds.update(
            {_seen_by(round_, adversary): count * times for round_, count in spending.rounds}
        )
        pure.update(dict.fromkeys(spending.pure, times))
    mu = compose_gdp(mus)
    bound = _without_amplification(mu, rounds, pure, delta)
    # Gaussian releases alone, or one pair alone, have a closed form. The numerical answer may be
    # too small at a tiny delta.
    exact = not rounds and pure.total() + (mu > 0) <= 1
    if exact or bound == 0 or math.isinf(mu):
        return bound
    counted = tuple(sorted(rounds.items())), tuple(sorted(pure.items()))
    # All are upper bounds on the same epsilon, so the smallest one is.
    bound = min(bound, composed_epsilon(mu, *counted, delta, largest_step))
    return min(bound, renyi_epsilon(events, delta, relation)) if delta <= _TINY_DELTA else bound


def _seen_by(round_: SampledRound, adversary: str) -> SampledRound:
    """A round as an adversary sees it, since outsiders do not know who takes part."""
    # Only for replacements, the relation that the profile of these samples is proved for.
    if adversary == "outsiders" and round_.sample == "known" and round_.replace:
        return round_._replace(sample="without_replacement")
    return round_


def _without_amplification(
    mu: float, rounds: Counter[SampledRound], pure: Counter[tuple[float, float]], delta: float
) -> float:
    """Epsilon without credit for sampling, with basic composition of the pairs."""
    # The pairs take their deltas and add their epsilons; the Gaussian part gets the rest of delta.
    rest = delta - math.fsum(count * spent for (_, spent), count in pure.items())
    round_mus = [round_.mu * math.sqrt(count) for round_, count in rounds.items()]
    mu_of_everyone = compose_gdp([mu, *round_mus])
    if rest < 0 or math.isinf(mu_of_everyone):
        return math.inf
    return gdp_epsilon(mu_of_everyone, rest) + math.fsum(
        count * epsilon for (epsilon, _), count in pure.items()
    )
