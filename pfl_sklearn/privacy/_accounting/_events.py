"""Accounting events: what a release costs, in a form that can be stored and composed."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NamedTuple, Self

from pfl_sklearn.privacy._accounting._losses import LARGEST_EXPONENT, RoundCounts, SampledRound

RELATIONS = ("add_remove", "replace_one", "zero_out")
# Less noise has a mu above 1e12 in Gaussian DP: it protects nobody, so it counts as none.
LEAST_NOISE_MULTIPLIER = 1e-12


class Spending(NamedTuple):
    """Cost of an event under a relation: Gaussian DP, sampled rounds, or (epsilon, delta) pairs."""

    mu: float = 0.0
    rounds: RoundCounts = ()
    pure: tuple[tuple[float, float], ...] = ()


UNBOUNDED = Spending(mu=math.inf)


class _Event:
    """Conversion of events to plain values and back; infinity is "inf"."""

    KIND = ""

    def spending(self, relation: str) -> Spending:
        """Cost under a relation; unbounded if the event implies no bound under it.

        Parameters
        ----------
        relation : {"add_remove", "replace_one", "zero_out"}
            Neighbouring relation to state the cost for.
        """
        check_relation(relation)
        return self._spending(relation)

    def _spending(self, relation: str) -> Spending:
        """Cost under a valid relation."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Plain values that ``json.dumps(..., allow_nan=False)`` accepts."""
        # Every event is a dataclass, which mypy cannot know of this base.
        fields: dict[str, Any] = as_json(dataclasses.asdict(self))  # type: ignore[call-overload]
        return {"kind": self.KIND, **fields}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Event from the values of :meth:`to_dict`; ValueError if they are of another kind.

        Parameters
        ----------
        values : dict
            As :meth:`to_dict` returned them, or read from JSON.
        """
        kind = values.get("kind")
        check_value("kind", kind, kind == cls.KIND, repr(cls.KIND))
        return cls(**{name: from_json(value) for name, value in values.items() if name != "kind"})


@dataclass(frozen=True)
class SampledGaussian(_Event):
    """Rounds of Gaussian noise on a sum over clients, with a new sample of clients in every round.

    Parameters
    ----------
    noise_multiplier : float, >= 0
        Standard deviation of the noise on the sum, divided by the L2 bound of one client's
        contribution, whatever the relation. Values below 1e-12 count as no noise.
    n_rounds : int, >= 0
        Number of rounds.
    rate : float in (0, 1], default=1.0
        With Poisson sampling, the probability that a client takes part in a round. With a fixed
        sample size, that size divided by the number of clients.
    sampling : {"poisson", "fixed"}, default="poisson"
        "poisson" samples every client independently. "fixed" samples a fixed number of clients
        without replacement.

    Notes
    -----
    Rounds protect a client's contribution. The number of clients and of their rows is public, so
    epsilon is infinite under "add_remove". The native relation is "zero_out" with Poisson sampling
    and "replace_one" with a fixed size.

    With Poisson sampling nobody but the server may learn how many clients take part in a round.
    With a fixed size all other clients together know whether the last one takes part. Participation
    is then no secret, and lowers delta alone.

    Without sampling (rate 1) the rounds satisfy Gaussian DP with parameter
    sqrt(n_rounds) / noise_multiplier, and twice that under "replace_one".

    Examples
    --------
    >>> from pfl_sklearn.privacy import SampledGaussian, events_epsilon
    >>> rounds = SampledGaussian(noise_multiplier=2.0, n_rounds=4)
    >>> round(events_epsilon([rounds], delta=1e-5, relation="zero_out"), 4)
    4.3772
    >>> SampledGaussian.from_dict(rounds.to_dict()) == rounds
    True
    """

    noise_multiplier: float
    n_rounds: int
    rate: float = 1.0
    sampling: str = "poisson"

    KIND = "sampled_gaussian"

    def __post_init__(self) -> None:
        z, sampling = self.noise_multiplier, self.sampling
        check_value("noise_multiplier", z, z >= 0, "at least 0")
        _check_count("n_rounds", self.n_rounds)
        check_value("rate", self.rate, 0 < self.rate <= 1, "in (0, 1]")
        check_value("sampling", sampling, sampling in ("poisson", "fixed"), "'poisson' or 'fixed'")

    @property
    def native_relation(self) -> str:
        """The relation that the sampling scheme is made for."""
        return "replace_one" if self.sampling == "fixed" else "zero_out"

    def _spending(self, relation: str) -> Spending:
        if self.n_rounds == 0 or math.isinf(self.noise_multiplier):
            return Spending()
        # Rounds, step sizes and divisors depend on the number of clients, which "add_remove" hides.
        if self.noise_multiplier < LEAST_NOISE_MULTIPLIER or relation == "add_remove":
            return UNBOUNDED
        if self.rate == 1:
            # Without sampling T rounds are one Gaussian release with sqrt(T) times the sensitivity.
            sensitivity = contribution_sensitivity(relation)
            return Spending(mu=sensitivity * math.sqrt(self.n_rounds) / self.noise_multiplier)
        # With a fixed size, all other clients together know whether the last one takes part.
        sample = "known" if self.sampling == "fixed" else "poisson"
        replace = relation == "replace_one"
        round_ = SampledRound(float(self.noise_multiplier), float(self.rate), sample, replace)
        return Spending(rounds=((round_, int(self.n_rounds)),))


@dataclass(frozen=True)
class GaussianEvent(_Event):
    """Gaussian releases in which every client takes part.

    Parameters
    ----------
    mu_add_remove, mu_replace_one : float, >= 0, or None
        Gaussian-DP parameter of one release under each relation: the L2 sensitivity divided by
        the standard deviation of the noise. None means unknown.
    n_releases : int, default=1
        Number of releases.
    mu_zero_out : float, >= 0, or None, default=None
        Likewise under "zero_out".

    Notes
    -----
    Zeroing out a contribution costs no more than removing its client, and a replacement costs at
    most twice as much as zeroing out. No other parameter is implied, so epsilon is infinite where
    it is unknown.

    Examples
    --------
    >>> from pfl_sklearn.privacy import GaussianEvent, events_epsilon
    >>> release = GaussianEvent(mu_add_remove=0.5, mu_replace_one=None, n_releases=4)
    >>> round(events_epsilon([release], delta=1e-5, relation="replace_one"), 4)
    9.9973
    """

    mu_add_remove: float | None
    mu_replace_one: float | None
    n_releases: int = 1
    mu_zero_out: float | None = None

    KIND = "gaussian"

    def __post_init__(self) -> None:
        for name in ("mu_add_remove", "mu_replace_one", "mu_zero_out"):
            mu = getattr(self, name)
            check_value(name, mu, mu is None or mu >= 0, "at least 0 or None")
        _check_count("n_releases", self.n_releases)

    def _spending(self, relation: str) -> Spending:
        if self.n_releases == 0:
            return Spending()
        # A replacement goes through the table without the contribution: at most twice the distance.
        # No bound follows for removals from the others, as they keep the number of clients.
        removed, replaced, zeroed = self.mu_add_remove, self.mu_replace_one, self.mu_zero_out
        factors = {
            "add_remove": [(1.0, removed)],
            "zero_out": [(1.0, removed), (1.0, zeroed)],
            "replace_one": [(1.0, replaced), (2.0, removed), (2.0, zeroed)],
        }
        # Every bound holds, hence the smallest does.
        bounds = [factor * mu for factor, mu in factors[relation] if mu is not None]
        return Spending(mu=min(bounds) * math.sqrt(self.n_releases)) if bounds else UNBOUNDED


@dataclass(frozen=True)
class PureEvent(_Event):
    """A release of which only (epsilon, delta) under one relation is known.

    Parameters
    ----------
    epsilon, delta : float, >= 0 and float in [0, 1]
        Cost of the release.
    relation : {"add_remove", "replace_one", "zero_out"}
        The neighbouring relation that the pair is stated for.

    Notes
    -----
    An event stated under "add_remove" or "zero_out" costs (2 epsilon, (1 + e^epsilon) delta) under
    "replace_one", by group privacy through the table without the client. One stated under
    "add_remove" costs the same under "zero_out". No other conversion is possible, so epsilon is
    infinite there.

    Examples
    --------
    >>> from pfl_sklearn.privacy import PureEvent, events_epsilon
    >>> bits = PureEvent(epsilon=0.5, delta=0.0, relation="add_remove")
    >>> events_epsilon([bits], delta=1e-5, relation="replace_one")
    1.0
    """

    epsilon: float
    delta: float
    relation: str

    KIND = "pure"

    def __post_init__(self) -> None:
        check_value("epsilon", self.epsilon, self.epsilon >= 0, "at least 0")
        check_value("delta", self.delta, 0 <= self.delta <= 1, "in [0, 1]")
        check_relation(self.relation)

    def _spending(self, relation: str) -> Spending:
        epsilon, delta = self.epsilon, self.delta
        # Zeroing out costs what removing does: both take one contribution out of the sum.
        if relation != self.relation and (relation, self.relation) != ("zero_out", "add_remove"):
            if relation != "replace_one":
                return UNBOUNDED
            # Group privacy for two steps: delta' = (1 + e^epsilon) delta, epsilon' = 2 epsilon.
            delta = min(1.0, delta * (1 + math.exp(min(epsilon, LARGEST_EXPONENT))))
            epsilon = 2 * epsilon
        # A delta of 1 allows everything, whatever epsilon says.
        if math.isinf(epsilon) or delta == 1:
            return UNBOUNDED
        return Spending(pure=((float(epsilon), float(delta)),))


Event = SampledGaussian | GaussianEvent | PureEvent
_EVENT_CLASSES: dict[str, type[Event]] = {
    cls.KIND: cls for cls in (SampledGaussian, GaussianEvent, PureEvent)
}


def event_from_dict(values: dict[str, Any]) -> Event:
    """Event of any kind from the values that its ``to_dict`` returned."""
    # An unknown kind is an error: a skipped event would be spent and not counted.
    kind, kinds = values.get("kind"), ", ".join(_EVENT_CLASSES)
    check_value("kind", kind, kind in _EVENT_CLASSES, f"one of {kinds}")
    return _EVENT_CLASSES[values["kind"]].from_dict(values)


def check_value(name: str, value: Any, valid: bool, expected: str) -> None:
    """Raise ValueError unless the value of a parameter is valid; `expected` says which ones are."""
    # Callers state which values are valid, since NaN fails every comparison.
    if not valid:
        raise ValueError(f"{name} must be {expected}; got {value!r}.")


def check_positive_delta(delta: float) -> None:
    """Raise ValueError unless `delta` is in (0, 1)."""
    check_value("delta", delta, 0 < delta < 1, "in (0, 1)")


def check_relation(relation: str, name: str = "relation") -> None:
    """Raise ValueError for an unknown neighbouring relation; `name` is that of the parameter."""
    check_value(name, relation, relation in RELATIONS, f"one of {', '.join(RELATIONS)}")


def _check_count(name: str, value: float) -> None:
    """Raise ValueError unless a number of rounds or releases is a whole one, of any type."""
    valid = 0 <= value < math.inf and value == int(value)
    check_value(name, value, valid, "a non-negative integer")


def contribution_sensitivity(relation: str) -> float:
    """L2 sensitivity of a sum of contributions with norm at most 1."""
    # Under replacement a contribution may turn into its negative; otherwise one appears or goes.
    return 2.0 if relation == "replace_one" else 1.0


def as_json(value: Any) -> Any:
    """Plain values for JSON, which has no infinity and no tuples: "inf" and lists."""
    if isinstance(value, tuple | list):
        return [as_json(item) for item in value]
    if isinstance(value, dict):
        return {name: as_json(item) for name, item in value.items()}
    if isinstance(value, bool) or not isinstance(value, Real):  # a bool is an Integral, too
        return value
    if isinstance(value, Integral):
        return int(value)
    return "inf" if math.isinf(value) else float(value)


def from_json(value: Any) -> Any:
    """Inverse of :func:`as_json`, with tuples for lists."""
    if isinstance(value, list):
        return tuple(from_json(item) for item in value)
    if isinstance(value, dict):
        return {name: from_json(item) for name, item in value.items()}
    return math.inf if value == "inf" else value
