"""Accounting for the selection of the best of a random number of private trials.

Papernot and Steinke (2022) draw the number of trials from one of three distributions and release
only the best trial. The total then costs little more than one trial.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from pfl_sklearn._typing import Floats
from pfl_sklearn.privacy._accounting._events import (
    Event,
    check_positive_delta,
    check_relation,
    check_value,
)
from pfl_sklearn.privacy._accounting._losses import LARGEST_EXPONENT, SampledRound, dp_accounting

# Shape of the truncated negative binomial distribution; infinity means Poisson.
_NEGATIVE_BINOMIAL = {"geometric": 1.0, "poisson": math.inf, "logarithmic": 0.0}
DISTRIBUTIONS = tuple(_NEGATIVE_BINOMIAL)
# The accountant takes logarithms of zero below it. A larger mu is an upper bound.
_SMALLEST_MU = 1e-6


class _PurePair(NamedTuple):
    """A release that is epsilon-DP, with a delta of 0."""

    epsilon: float


def selection_epsilon(
    events: Iterable[Event],
    *,
    expected_trials: float,
    distribution: str = "geometric",
    delta: float,
    relation: str = "replace_one",
) -> float:
    r"""Epsilon of releasing only the best of a random number of private trials.

    Parameters
    ----------
    events : iterable of SampledGaussian, GaussianEvent or PureEvent
        What one trial spends, including its private score.
    expected_trials : float, >= 1
        Mean of the number of trials.
    distribution : {"geometric", "poisson", "logarithmic"}, default="geometric"
        Distribution of the number of trials. A Poisson number can be 0.
    delta : float in (0, 1)
        Delta of the selection as a whole.
    relation : {"replace_one", "zero_out", "add_remove"}, default="replace_one"
        Neighbouring relation of the answer.

    Returns
    -------
    float
        Infinity if no bound is known on the Renyi divergence of the trials under `relation`: for
        rounds on Poisson samples under replacement, and for a `PureEvent` with a positive delta.

    Raises
    ------
    ValueError
        If a parameter is out of range.
    ImportError
        If dp-accounting is not installed.

    Notes
    -----
    Theorems 2 and 6 of Papernot and Steinke, as implemented by ``RepeatAndSelectDpEvent`` and the
    Renyi accountant of dp-accounting, with sensitivities converted to `relation`. A `PureEvent` has
    the divergence of randomized response, which is the largest. A round on a fixed number of
    clients, where all other clients together know whether the last one takes part, has the exact
    divergence of order a,

    .. math:: \frac{1}{a - 1} \log\bigl(1 - q + q e^{c^2 a (a - 1) / (2 z^2)}\bigr) ,

    with rate q, noise multiplier z, and c = 2 under replacement, else 1.

    References
    ----------
    Papernot, N. and Steinke, T. (2022). Hyperparameter tuning with Renyi differential privacy.
    ICLR. Kairouz, P., Oh, S. and Viswanath, P. (2015). The composition theorem for differential
    privacy. ICML.

    Examples
    --------
    A single trial of 200 rounds with noise multiplier 1, each on a twentieth of the clients, and
    the best of 9 such trials on average:

    >>> from pfl_sklearn.privacy import SampledGaussian, selection_epsilon
    >>> trial = [SampledGaussian(1.0, 200, rate=0.05)]
    >>> how = {"delta": 1e-5, "relation": "zero_out"}
    >>> round(selection_epsilon(trial, expected_trials=1, **how), 2)
    5.37
    >>> round(selection_epsilon(trial, expected_trials=9, **how), 2)
    9.11
    """
    check_distribution(expected_trials, distribution)
    check_positive_delta(delta)
    check_relation(relation)
    return _renyi_epsilon(
        tuple(events), float(expected_trials), distribution, float(delta), relation
    )


def check_distribution(expected_trials: float, distribution: str) -> None:
    """Raise ValueError for an invalid distribution of the number of trials."""
    valid, choices = distribution in DISTRIBUTIONS, ", ".join(DISTRIBUTIONS)
    check_value("distribution", distribution, valid, f"one of {choices}")
    valid = 1 <= expected_trials < math.inf
    check_value("expected_trials", expected_trials, valid, "finite and at least 1")


@lru_cache(maxsize=512)
def _renyi_epsilon(
    events: tuple[Event, ...], mean: float, distribution: str, delta: float, relation: str
) -> float:
    """Epsilon of the best of a number of trials with this mean, by Renyi divergences."""
    if not events:
        return 0.0
    # Otherwise there is one trial and no choice. A Poisson number with mean 1 still varies.
    selects = mean > 1 or distribution == "poisson"
    trials = (mean, _NEGATIVE_BINOMIAL[distribution]) if selects else None
    epsilon_at = _renyi_curve(tuple((event, 1) for event in events), relation, trials)
    return math.inf if epsilon_at is None else epsilon_at(delta)


@lru_cache(maxsize=512)
def renyi_epsilon(events: tuple[tuple[Event, int], ...], delta: float, relation: str) -> float:
    """Upper bound on the total epsilon of events, each with its count, by Renyi divergences."""
    # It needs no grid of losses, so it holds at any delta; infinity where no divergence is known.
    epsilon_at = _renyi_curve(events, relation)
    if epsilon_at is not None:
        return epsilon_at(delta)
    zeroed = _renyi_curve(events, "zero_out") if relation == "replace_one" else None
    if zeroed is None:
        return math.inf
    # Group privacy for two steps, from a contribution to none and to another: twice epsilon, with
    # 1 + e^epsilon times delta.
    delta_of_step, epsilon = delta, zeroed(delta)
    while (growth := 1 + math.exp(min(epsilon, LARGEST_EXPONENT))) * delta_of_step > delta:
        delta_of_step = 0.99 * delta / growth
        if delta_of_step == 0:
            return math.inf
        epsilon = zeroed(delta_of_step)
    return 2 * epsilon


def _renyi_curve(
    events: tuple[tuple[Event, int], ...],
    relation: str,
    trials: tuple[float, float] | None = None,
) -> Callable[[float], float] | None:
    """Epsilon as a function of delta, by Renyi divergences; None where one is not known.

    With `trials`, the mean and the shape of their number, only the best of the trials is released.
    """
    purpose = "sampled rounds" if trials is None else "a selection among private trials"
    dp_event, accountant = _accounting(relation, purpose)
    parts = [
        (part, times)
        for event, times in events
        for part in _renyi_events(event, relation, dp_event)
    ]
    if None in [part for part, _ in parts]:
        return None
    total = dp_event.ComposedDpEvent([dp_event.SelfComposedDpEvent(*part) for part in parts])
    if trials is not None:
        total = dp_event.RepeatAndSelectDpEvent(total, *trials)
    logger = logging.getLogger("absl")
    with ExitStack() as at_the_end:
        # The accountant logs Renyi orders that did not converge, and skips them.
        at_the_end.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)
        accountant.compose(total)
    return lambda delta: float(accountant.get_epsilon(delta))


def _accounting(relation: str, purpose: str) -> tuple[Any, Any]:
    """Module of events of dp-accounting, and a Renyi accountant that knows participation too."""
    dp_event, rdp, relations = (
        dp_accounting(name, purpose) for name in ("dp_event", "rdp", "privacy_accountant")
    )

    class Accountant(rdp.RdpAccountant):  # type: ignore[name-defined]
        def _maybe_compose(self, event: Any, count: int, do_compose: bool) -> Any:
            divergence = _DIVERGENCES.get(type(event))
            if divergence is None:
                return super()._maybe_compose(event, count, do_compose)
            if do_compose:
                self._rdp += count * divergence(event, self._orders)
            return None

    # Events carry their sensitivities under `relation`, which this accountant does not double. It
    # needs the relation because it accepts Poisson samples under the other two only.
    replaced = relation == "replace_one"
    kinds = relations.NeighboringRelation
    return dp_event, Accountant(
        neighboring_relation=kinds.REPLACE_ONE if replaced else kinds.ADD_OR_REMOVE_ONE
    )


def _known_participation_divergence(round_: SampledRound, orders: Floats) -> Floats:
    """Renyi divergences (k,), of `orders` (k,) above 1, of a round whose clients are known."""
    # Logarithm of 1 - q + q e^(mu^2 a (a - 1) / 2): the adversary sees whether the client takes
    # part.
    with_client = round_.mu**2 * orders * (orders - 1) / 2
    moments = np.logaddexp(math.log1p(-round_.rate), math.log(round_.rate) + with_client)
    return np.asarray(moments / (orders - 1))


def _randomized_response_divergence(pair: _PurePair, orders: Floats) -> Floats:
    """Renyi divergences (k,), of `orders` (k,) above 1, of a coin whose odds are e^epsilon or less.

    Every pure epsilon-DP release can be computed from such a coin (Kairouz, Oh and Viswanath,
    2015), under any relation.
    """
    # Logarithm of p^a (1 - p)^(1 - a) + (1 - p)^a p^(1 - a), with odds of e^epsilon for p.
    moments = np.logaddexp(orders * pair.epsilon, (1 - orders) * pair.epsilon)
    return np.asarray((moments - np.logaddexp(0.0, pair.epsilon)) / (orders - 1))


_DIVERGENCES: dict[type, Callable[[Any, Floats], Floats]] = {
    SampledRound: _known_participation_divergence,
    _PurePair: _randomized_response_divergence,
}


def _renyi_events(event: Event, relation: str, dp_event: Any) -> list[Any]:
    """Parts of an event for dp-accounting's Renyi accountant; None for a part without a bound.

    Sensitivities are those under `relation`, because the accountant uses a noise multiplier as it
    is given, whatever the relation.
    """
    spending = event.spending(relation)
    if math.isinf(spending.mu):
        return [None]
    parts = [_sampled_rounds(round_, count, dp_event) for round_, count in spending.rounds]
    # With a delta above 0 the divergence has no bound.
    parts += [None if delta > 0 else _PurePair(epsilon) for epsilon, delta in spending.pure]
    if spending.mu > 0:
        parts.append(dp_event.GaussianDpEvent(1 / max(spending.mu, _SMALLEST_MU)))
    return parts


def _sampled_rounds(round_: SampledRound, count: int, dp_event: Any) -> Any:
    """Rounds on samples of the clients; None for Poisson samples under replacement."""
    sampled: Any = round_  # an event of our own accountant, if it is known who takes part
    if round_.sample == "poisson":
        if round_.replace:
            return None  # no Renyi divergence is known for the mixtures of both tables
        gaussian = dp_event.GaussianDpEvent(round_.noise_multiplier)
        sampled = dp_event.PoissonSampledDpEvent(round_.rate, gaussian)
    return dp_event.SelfComposedDpEvent(sampled, count)
