"""Accounting for selection among a random number of private trials.

Papernot and Steinke (2022): if the number of trials is drawn from one of three distributions and
only the best trial is released, the whole costs little more than one trial.
"""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.optimize import brentq

from pfl_sklearn.privacy._accounting._events import Event
from pfl_sklearn.privacy._accounting._losses import Round

__all__ = ["selection_epsilon"]

# Shape of the truncated negative binomial distribution; infinity is Poisson.
_SHAPES = {"geometric": 1.0, "poisson": math.inf, "logarithmic": 0.0}
DISTRIBUTIONS = tuple(_SHAPES)
_TOLERANCE = 1e-4  # of the logarithm of what is calibrated
_STEP = 0.7  # of that logarithm, in search of a bracket
_SMALLEST_MU = 1e-6  # below it the accountant takes logarithms of zero
_MANY = 10**9  # clients; of a sample of fixed size only its share counts


def selection_epsilon(
    events: Iterable[Event],
    *,
    expected_trials: float,
    distribution: str = "geometric",
    delta: float,
    relation: str = "replace_one",
) -> float:
    r"""Epsilon of releasing the best of a random number of private trials, and nothing else.

    Parameters
    ----------
    events : iterable of events
        What one trial spends, its private score included: :class:`SampledGaussian`,
        :class:`GaussianEvent`, :class:`PureEvent`.
    expected_trials : float, >= 1
        Mean of the number of trials.
    distribution : {"geometric", "poisson", "logarithmic"}, default="geometric"
        Of the number of trials. A Poisson number can be 0.
    delta : float in (0, 1)
    relation : {"replace_one", "add_remove"}, default="replace_one"

    Returns
    -------
    float
        Infinity if no bound is known on the Renyi divergence of the trials under `relation`: for
        rounds on Poisson samples under replacement, for a `PureEvent` with delta.

    Raises
    ------
    ImportError
        Without dp-accounting.

    Notes
    -----
    Theorems 2 and 6 of Papernot and Steinke, as ``RepeatAndSelectDpEvent`` of dp-accounting has
    them, for its Renyi accountant. Sensitivities are converted here and not by that accountant,
    which does not double them under replacement. Rounds on a fixed number of clients have a loose
    bound only (Wang, Balle and Kasiviswanathan, 2019).

    References
    ----------
    Papernot, N. and Steinke, T. (2022). Hyperparameter tuning with Renyi differential privacy.
    ICLR.

    Examples
    --------
    200 rounds with noise multiplier 1 on a twentieth of the clients, alone and as the best of 9:

    >>> from pfl_sklearn.privacy import SampledGaussian, selection_epsilon
    >>> trial = [SampledGaussian(1.0, 200, rate=0.05)]
    >>> how = {"delta": 1e-5, "relation": "add_remove"}
    >>> round(selection_epsilon(trial, expected_trials=1, **how), 2)
    5.37
    >>> round(selection_epsilon(trial, expected_trials=9, **how), 2)
    9.11
    >>> round(selection_epsilon(trial, expected_trials=9, distribution="poisson", **how), 2)
    10.05
    """
    check_distribution(expected_trials, distribution)
    if not 0 < delta < 1:
        raise ValueError(f"delta must be in (0, 1); got {delta!r}.")
    if relation not in ("replace_one", "add_remove"):
        raise ValueError(f"relation must be 'replace_one' or 'add_remove'; got {relation!r}.")
    return _epsilon(tuple(events), float(expected_trials), distribution, float(delta), relation)


def check_distribution(expected_trials: float, distribution: str) -> None:
    """Refuse a distribution of the number of trials that does not exist."""
    if distribution not in _SHAPES:
        raise ValueError(
            f"distribution must be one of {', '.join(DISTRIBUTIONS)}; got {distribution!r}."
        )
    if not 1 <= expected_trials < math.inf:
        raise ValueError(
            f"expected_trials must be a number of at least 1; got {expected_trials!r}."
        )


def draw_n_trials(expected_trials: float, distribution: str, rng: np.random.Generator) -> int:
    """Number of trials; 0 is possible for "poisson" only."""
    if distribution == "poisson":
        return int(rng.poisson(expected_trials))
    stop = stopping_probability(expected_trials, distribution)
    return int(rng.geometric(stop) if distribution == "geometric" else rng.logseries(1 - stop))


def stopping_probability(expected_trials: float, distribution: str) -> float:
    """Parameter gamma of the geometric or logarithmic distribution with that mean."""
    if distribution == "geometric" or expected_trials == 1:
        return 1 / expected_trials

    def excess(log_stop: float) -> float:
        return math.expm1(-log_stop) / -log_stop - expected_trials

    # The mean is below 1 / stop, and above the root of it.
    found = brentq(excess, -2 * math.log(expected_trials) - 1e-9, -1e-12, xtol=1e-14)
    return math.exp(float(found))


def largest_within(
    epsilon: float, spent: Callable[[float], float], low: float, high: float, guess: float
) -> float | None:
    """Largest rate in [low, high] (to 1e-4) that spends no more than `epsilon`; None if none does.

    `spent` grows with the rate, and is slow and hard to compute where it is large.
    """

    def excess(log_rate: float) -> float:
        return min(spent(math.exp(log_rate)) - epsilon, 1.0 + epsilon)

    bottom, top = math.log(low), math.log(high)
    left = right = math.log(guess)
    while excess(left) > 0:
        if left == bottom:
            return None
        left, right = max(left - _STEP, bottom), left
    while left == right or excess(right) <= 0:
        if right == top:
            return high
        left, right = right, min(right + _STEP, top)
    found = float(brentq(excess, left, right, xtol=_TOLERANCE / 4))
    while excess(found) > 0:
        found -= _TOLERANCE / 4
    return math.exp(found)


@lru_cache(maxsize=512)
def _epsilon(
    events: tuple[Event, ...], mean: float, distribution: str, delta: float, relation: str
) -> float:
    if not events:
        return 0.0
    dp_event, rdp, relations = _accounting()
    trial = [one for event in events for one in _renyi_events(event, relation, dp_event)]
    if any(one is None for one in trial):
        return math.inf
    whole = dp_event.ComposedDpEvent(trial)
    if mean > 1 or distribution == "poisson":  # else there is one trial, and no choice
        whole = dp_event.RepeatAndSelectDpEvent(whole, mean, _SHAPES[distribution])
    accountant = rdp.RdpAccountant(neighboring_relation=relations[relation])
    with _quiet():
        accountant.compose(whole)
    return float(accountant.get_epsilon(delta))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the log of orders that did not converge, which the accountant leaves out."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _accounting() -> tuple[Any, Any, dict[str, Any]]:
    try:
        dp_event, rdp, accountant = (
            importlib.import_module(f"dp_accounting.{name}")
            for name in ("dp_event", "rdp", "privacy_accountant")
        )
    except ImportError as error:
        raise ImportError(
            "selection among private trials needs dp-accounting: pip install "
            "'pfl-sklearn[accounting]'."
        ) from error
    relations = {
        "add_remove": accountant.NeighboringRelation.ADD_OR_REMOVE_ONE,
        "replace_one": accountant.NeighboringRelation.REPLACE_ONE,
    }
    return dp_event, rdp, relations


def _renyi_events(event: Event, relation: str, dp_event: Any) -> list[Any]:
    """The event for dp-accounting's Renyi accountant; None for a part that has no bound there.

    Sensitivities are those under `relation`: under either that accountant takes a noise multiplier
    as it is given.
    """
    spending = event.spending(relation)
    found = []
    if math.isinf(spending.mu):
        return [None]
    if spending.mu > 0:
        found.append(dp_event.GaussianDpEvent(1 / max(spending.mu, _SMALLEST_MU)))
    for one, count in spending.rounds:
        found.append(_sampled(one, count, dp_event))
    for epsilon, delta in spending.pure:
        found.append(_pure(epsilon, delta, relation, dp_event))
    return found


def _sampled(one: Round, count: int, dp_event: Any) -> Any:
    """Rounds on a share of the clients; on Poisson samples only if clients come or go."""
    if one.fixed:
        gaussian = dp_event.GaussianDpEvent(one.noise_multiplier / 2)
        drawn = math.ceil(one.rate * _MANY)
        sampled = dp_event.SampledWithoutReplacementDpEvent(_MANY, drawn, gaussian)
    elif one.replace:
        return None
    else:
        gaussian = dp_event.GaussianDpEvent(one.noise_multiplier)
        sampled = dp_event.PoissonSampledDpEvent(one.rate, gaussian)
    return dp_event.SelfComposedDpEvent(sampled, count)


def _pure(epsilon: float, delta: float, relation: str, dp_event: Any) -> Any:
    """What is known by its epsilon only: no worse than randomized response with that epsilon."""
    if delta > 0:
        return None
    if relation == "replace_one":
        return dp_event.RandomizedResponseDpEvent(2 / (math.exp(epsilon) + 1), 2)
    return dp_event.ZCDpEvent(0.0, epsilon**2 / 2)
