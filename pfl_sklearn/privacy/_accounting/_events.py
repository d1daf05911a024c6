"""Accounting events: what a release cost, in the form in which it is written down and composed."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NamedTuple, Self

from pfl_sklearn.privacy._accounting._calibration import RELATIONS
from pfl_sklearn.privacy._accounting._losses import Round

__all__ = ["GaussianEvent", "PureEvent", "SampledGaussian", "event_from_dict"]

_SAMPLINGS = ("poisson", "fixed")
_LEAST_NOISE = 1e-12


class Spending(NamedTuple):
    """What an event costs under a relation: exact Gaussian DP, sampled rounds, or a pair."""

    mu: float = 0.0
    rounds: tuple[tuple[Round, int], ...] = ()
    pure: tuple[tuple[float, float], ...] = ()


UNBOUNDED = Spending(mu=math.inf)


class _Event:
    """To and from plain values; infinity is "inf"."""

    KIND = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values that ``json.dumps(..., allow_nan=False)`` takes."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        return {"kind": self.KIND, **{name: _to_json(value) for name, value in values.items()}}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Inverse of :meth:`to_dict`.

        Raises
        ------
        ValueError
            If `values` describe an event of another kind.
        """
        if values.get("kind") != cls.KIND:
            raise ValueError(f"kind must be {cls.KIND!r}; got {values.get('kind')!r}.")
        plain = {name: value for name, value in values.items() if name != "kind"}
        return cls(**{name: math.inf if v == "inf" else v for name, v in plain.items()})


@dataclass(frozen=True)
class SampledGaussian(_Event):
    """Rounds of Gaussian noise on a sum over clients that are sampled anew in every round.

    Parameters
    ----------
    noise_multiplier : float, >= 0
        Standard deviation of the noise on the sum, divided by the L2 bound of one client's
        contribution, whatever the relation. Less than 1e-12 counts as none.
    n_rounds : int, >= 0
    rate : float in (0, 1], default=1.0
        Probability of each client in a round; or size of the sample over number of clients.
    sampling : {"poisson", "fixed"}, default="poisson"
        Each client by itself, or a fixed number of clients without replacement.
    n_sampled : int, default=None
        Size of the sample if `sampling` is "fixed"; for the record only.

    Notes
    -----
    Native to "add_remove" with Poisson sampling and to "replace_one" with a fixed size. A fixed
    size has no meaning when clients come or go, so that epsilon is infinite there, and what zeroing
    out costs is not claimed. Without sampling (rate 1) the rounds are Gaussian DP with parameter
    sqrt(n_rounds) / noise_multiplier, twice that under "replace_one".

    Examples
    --------
    >>> from pfl_sklearn.privacy import SampledGaussian, events_epsilon
    >>> rounds = SampledGaussian(noise_multiplier=2.0, n_rounds=4)
    >>> round(events_epsilon([rounds], delta=1e-5, relation="add_remove"), 4)
    4.3772
    >>> SampledGaussian.from_dict(rounds.to_dict()) == rounds
    True
    """

    noise_multiplier: float
    n_rounds: int
    rate: float = 1.0
    sampling: str = "poisson"
    n_sampled: int | None = None

    KIND = "sampled_gaussian"

    def __post_init__(self) -> None:
        if not self.noise_multiplier >= 0:
            raise ValueError(f"noise_multiplier must be at least 0; got {self.noise_multiplier!r}.")
        if not (self.n_rounds >= 0 and self.n_rounds == int(self.n_rounds)):
            raise ValueError(f"n_rounds must be a whole number from 0; got {self.n_rounds!r}.")
        if not 0 < self.rate <= 1:
            raise ValueError(f"rate must be in (0, 1]; got {self.rate!r}.")
        if self.sampling not in _SAMPLINGS:
            raise ValueError(f"sampling must be 'poisson' or 'fixed'; got {self.sampling!r}.")
        if self.n_sampled is not None and not self.n_sampled >= 1:
            raise ValueError(f"n_sampled must be at least 1 or None; got {self.n_sampled!r}.")

    @property
    def native_relation(self) -> str:
        """The relation that the way of sampling is made for."""
        return "replace_one" if self.sampling == "fixed" else "add_remove"

    def spending(self, relation: str) -> Spending:
        """What the rounds cost under `relation`."""
        if self.n_rounds == 0:
            return Spending()
        replace, fixed = relation == "replace_one", self.sampling == "fixed"
        if self.noise_multiplier < _LEAST_NOISE or (fixed and self.rate < 1 and not replace):
            return UNBOUNDED
        if self.rate == 1 or math.isinf(self.noise_multiplier):
            sensitivity = 2.0 if replace else 1.0
            return Spending(mu=sensitivity * math.sqrt(self.n_rounds) / self.noise_multiplier)
        one = Round(float(self.noise_multiplier), float(self.rate), fixed, replace)
        return Spending(rounds=((one, int(self.n_rounds)),))


@dataclass(frozen=True)
class GaussianEvent(_Event):
    """Gaussian releases in which every client takes part.

    Parameters
    ----------
    mu_add_remove, mu_replace_one : float, >= 0, or None
        Gaussian-DP parameter of one release under either relation: L2 sensitivity over standard
        deviation of the noise. None if it is not known.
    n_releases : int, default=1

    Notes
    -----
    Zeroing out a contribution costs what removing it does. A replacement is a removal and an
    addition, which is at most twice `mu_add_remove`; nothing follows from `mu_replace_one` alone
    for the other relations, so that epsilon is infinite there.

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

    KIND = "gaussian"

    def __post_init__(self) -> None:
        for name in ("mu_add_remove", "mu_replace_one"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"{name} must be at least 0 or None; got {value!r}.")
        if not (self.n_releases >= 0 and self.n_releases == int(self.n_releases)):
            raise ValueError(f"n_releases must be a whole number from 0; got {self.n_releases!r}.")

    def spending(self, relation: str) -> Spending:
        """What the releases cost under `relation`."""
        if self.n_releases == 0:
            return Spending()
        known = [] if self.mu_add_remove is None else [self.mu_add_remove]
        if relation == "replace_one":
            known = [2 * mu for mu in known]
            known += [] if self.mu_replace_one is None else [self.mu_replace_one]
        return Spending(mu=min(known) * math.sqrt(self.n_releases)) if known else UNBOUNDED


@dataclass(frozen=True)
class PureEvent(_Event):
    """Anything of which only its (epsilon, delta) under one relation is known.

    Parameters
    ----------
    epsilon : float, >= 0
    delta : float in [0, 1]
    relation : {"add_remove", "replace_one", "zero_out"}

    Notes
    -----
    Under "replace_one" an event that is known under one of the other two costs
    (2 epsilon, (1 + e^epsilon) delta), by way of the table without the client: group privacy.
    Nothing follows in any other direction, so that epsilon is infinite there.

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
        if not self.epsilon >= 0:
            raise ValueError(f"epsilon must be at least 0; got {self.epsilon!r}.")
        if not 0 <= self.delta <= 1:
            raise ValueError(f"delta must be in [0, 1]; got {self.delta!r}.")
        check_relation(self.relation)

    def spending(self, relation: str) -> Spending:
        """What the event costs under `relation`."""
        epsilon, delta = self.epsilon, self.delta
        if relation != self.relation:
            if relation != "replace_one":
                return UNBOUNDED
            delta = min(1.0, delta * (1 + math.exp(min(epsilon, 700.0))))
            epsilon = 2 * epsilon
        if math.isinf(epsilon) or delta == 1:
            return UNBOUNDED
        return Spending(pure=((float(epsilon), float(delta)),))


Event = SampledGaussian | GaussianEvent | PureEvent
_KINDS: dict[str, type[SampledGaussian] | type[GaussianEvent] | type[PureEvent]] = {
    cls.KIND: cls for cls in (SampledGaussian, GaussianEvent, PureEvent)
}


def event_from_dict(values: dict[str, Any]) -> Event:
    """Event of any kind from what its ``to_dict`` wrote."""
    if values.get("kind") not in _KINDS:
        raise ValueError(f"kind must be one of {', '.join(_KINDS)}; got {values.get('kind')!r}.")
    return _KINDS[values["kind"]].from_dict(values)


def check_relation(relation: str) -> None:
    if relation not in RELATIONS:
        raise ValueError(f"relation must be one of {', '.join(RELATIONS)}; got {relation!r}.")


def _to_json(value: Any) -> Any:
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return "inf" if math.isinf(value) else float(value)
    return value
