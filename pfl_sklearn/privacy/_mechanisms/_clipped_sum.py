"""The release of one round: a sum over clients, clipped and with noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pfl_sklearn._typing import Bools, Floats
from pfl_sklearn.privacy._accounting._composition import events_epsilon
from pfl_sklearn.privacy._accounting._events import SampledGaussian
from pfl_sklearn.privacy._mechanisms._gaussian import clip_l2
from pfl_sklearn.privacy._mechanisms._noise import gaussian_on_grid

_SMALLEST_BOUND, _LARGEST_BOUND = 1e-100, 1e100
_SMALLEST_NOISE = 1e-12
# How far the bound may move from where it started: nothing over- or underflows.
_FARTHEST = 1e6
_CONVERTED = 1 << 17  # numbers that are converted to double precision at a time
# Squared norms above it may have overflowed, and NaN is not below it.
_LARGEST_SQUARE = 1e300


class Released(NamedTuple):
    """What one round lets out, and what it does not."""

    total: Any
    """Noisy sum, of the shape of one message (of sparse messages a sparse total)."""
    bound_next: float
    """Clipping bound of the next round."""
    clipped: float
    """Share of the clients whose message was clipped: exact, hence not private."""


@dataclass(frozen=True)
class ClippedSum:
    r"""Noisy sum over clients of messages clipped to a common L2 norm: one round's release.

    The bound may be moved, from round to round, towards a quantile of the norms of the messages:

    .. math:: C \leftarrow C \exp(-\eta (\tilde b - \gamma))

    where :math:`\tilde b` is the noisy share of clients with a norm of at most C and
    :math:`\gamma` the quantile.

    Parameters
    ----------
    clip_norm : float or None
        L2 bound of one message; where it starts if `clip_quantile` is given. The user's, in the
        units of the messages, from 1e-100 to 1e100. None means no clipping, without noise only.
    noise_multiplier : float, default=0.0
        Standard deviation of the noise divided by the bound: 0, or at least 1e-12. This is what
        one round spends, the bits of `clip_quantile` included.
    clip_quantile : float in [0, 1], default=None
        Quantile of the norms that the bound moves to. None keeps the bound.
    bits_noise_multiplier : float, > 0.5, default=2.5
        Standard deviation of the noise on the number of messages within the bound, in clients and
        divided by `noise_multiplier`. At 2.5 the sum gets 2.1 percent more noise.
    clip_learning_rate : float, > 0, default=0.2
        How fast the bound moves.

    Notes
    -----
    Algorithm 1 of Andrew, Thakkar, McMahan and Ramaswamy (2021). Bits are centred, so that one
    client moves their sum by 1/2 (by 1 under replacement); a sum with noise
    :math:`z_\Delta = (z^{-2} - (2 z_b)^{-2})^{-1/2}` and bits with noise :math:`z_b` together are
    one Gaussian release with multiplier z, under either relation. Deviations: the noise on the
    bits is a multiple of z, not a twentieth of the number of clients; the noisy share is cut to
    [0, 1]; and the bound stays within a factor of 10^6 of where it started.

    Whether a message is clipped, and to what, depends on that message and the bound alone. A
    message with NaN or infinity counts as 0, and its bit as above the bound. Without clipping
    nothing is changed, so that divergence shows. A round in which nobody takes part is noise.
    Releases are rounded to a public grid, a power of two of about a millionth of the noise.

    References
    ----------
    Andrew, G., Thakkar, O., McMahan, H. B. and Ramaswamy, S. (2021). Differentially private
    learning with adaptive clipping. NeurIPS.

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn.privacy import ClippedSum
    >>> mechanism = ClippedSum(clip_norm=5.0)
    >>> messages = np.array([[3.0, 4.0], [30.0, 40.0]])
    >>> rng = np.random.default_rng(0)
    >>> mechanism.release(messages, mechanism.start(), n_expected=2, rng=rng)
    Released(total=array([6., 8.]), bound_next=5.0, clipped=0.5)
    """

    clip_norm: float | None
    noise_multiplier: float = 0.0
    clip_quantile: float | None = None
    bits_noise_multiplier: float = 2.5
    clip_learning_rate: float = 0.2

    def __post_init__(self) -> None:
        z, bound, quantile = self.noise_multiplier, self.clip_norm, self.clip_quantile
        if z != 0 and not _SMALLEST_NOISE <= z < math.inf:
            raise ValueError(
                f"noise_multiplier must be 0, or finite and at least {_SMALLEST_NOISE}; got {z!r}."
            )
        if bound is None and (z > 0 or quantile is not None):
            needs = "noise_multiplier above 0" if z > 0 else "clip_quantile"
            raise ValueError(f"clip_norm must be given with {needs}; got None.")
        if bound is not None and not _SMALLEST_BOUND <= bound <= _LARGEST_BOUND:
            raise ValueError(f"clip_norm must be in [1e-100, 1e100]; got {bound!r}.")
        if quantile is not None and not 0 <= quantile <= 1:
            raise ValueError(f"clip_quantile must be in [0, 1]; got {quantile!r}.")
        if not 0.5 < self.bits_noise_multiplier < math.inf:
            raise ValueError(
                "bits_noise_multiplier must be finite and above 0.5; got "
                f"{self.bits_noise_multiplier!r}."
            )
        if not 0 < self.clip_learning_rate <= 10:
            raise ValueError(
                f"clip_learning_rate must be in (0, 10]; got {self.clip_learning_rate!r}."
            )

    @cached_property
    def sum_noise_multiplier(self) -> float:
        """Standard deviation of the noise on the sum, divided by the bound."""
        if self.clip_quantile is None:
            return self.noise_multiplier
        return self.noise_multiplier / math.sqrt(1 - (2 * self.bits_noise_multiplier) ** -2)

    @property
    def bits_noise_std(self) -> float:
        """Standard deviation of the noise on the number of messages within the bound."""
        return self.bits_noise_multiplier * self.noise_multiplier

    def start(self) -> float:
        """Bound of the first round; infinity if nothing is clipped."""
        return math.inf if self.clip_norm is None else float(self.clip_norm)

    def release(
        self, messages: Floats, bound: float, n_expected: float, rng: np.random.Generator
    ) -> Released:
        """One round.

        Parameters
        ----------
        messages : ndarray of shape (k, ...)
            One message for each client that takes part, in client order; k may be 0. Norms are
            over all axes but the first. Norms and sums are computed in double precision, whatever
            the type of the messages is.
        bound : float
            :meth:`start`, or what the round before returned.
        n_expected : float, > 0
            Expected number of clients in a round: a public constant, never k.
        rng : numpy.random.Generator
            Source of the noise.

        Returns
        -------
        Released
        """
        if math.isinf(bound):
            return Released(messages.sum(axis=0, dtype=np.float64), bound, 0.0)
        exact, within = _clipped_sum(messages, bound)
        total = _with_noise(exact, self.sum_noise_multiplier * bound, rng)
        following, share = self.next_bound(within, bound, n_expected, rng)
        return Released(total, following, share)

    def next_bound(
        self,
        within: Bools,
        bound: float,
        n_expected: float,
        rng: np.random.Generator,
    ) -> tuple[float, float]:
        """Clipping bound of the next round, and the share of messages that this one clipped.

        Parameters
        ----------
        within : ndarray of shape (k,) of bool
            Whether each message was within the bound, in client order; k may be 0.
        bound : float
            Clipping bound of this round.
        n_expected : float, > 0
            Expected number of clients in a round: a public constant, never k.
        rng : numpy.random.Generator
            Source of the noise on the number of messages within. Unused without `clip_quantile`.

        Returns
        -------
        bound_next : float
            Equal to `bound` without `clip_quantile`.
        clipped : float
            Share of the clients whose message was clipped: exact, hence not private.
        """
        inside = int(np.count_nonzero(within))
        share = 1 - inside / len(within) if len(within) else 0.0
        if self.clip_quantile is None:
            return bound, share
        centred = np.array([inside - len(within) / 2])
        noisy = 0.5 + float(_with_noise(centred, self.bits_noise_std, rng)[0]) / n_expected
        return self._moved(bound, noisy), share

    def _moved(self, bound: float, share_within: float) -> float:
        """Next bound, from the noisy share of messages within this one."""
        assert self.clip_norm is not None
        assert self.clip_quantile is not None
        excess = min(max(share_within, 0.0), 1.0) - self.clip_quantile
        moved = bound * math.exp(-self.clip_learning_rate * excess)
        return min(max(moved, self.clip_norm / _FARTHEST), self.clip_norm * _FARTHEST)

    def facts(self, rounds: SampledGaussian, delta: float, relation: str) -> dict[str, Any]:
        """Facts about the rounds, all together, for the privacy report.

        Noise and sensitivity are those of the first round; with `clip_quantile` both move with the
        bound.

        Parameters
        ----------
        rounds : SampledGaussian
            Noise multiplier, number and sampling of the rounds.
        delta : float in [0, 1)
            Delta of the guarantee.
        relation : {"add_remove", "replace_one", "zero_out"}
            Neighbouring relation of the guarantee.

        Returns
        -------
        dict
            Fields of :class:`~pfl_sklearn.privacy.PrivacyReport`, by name.
        """
        assert self.clip_norm is not None
        sensitivity = (2.0 if relation == "replace_one" else 1.0) * self.clip_norm
        adaptive = "" if self.clip_quantile is None else ", with a bound that follows a quantile"
        exact = rounds.rate == 1
        return {
            "mechanism": f"Gaussian noise on the sum of clipped messages of a round{adaptive}, "
            "rounded to a grid",
            "epsilon": events_epsilon([rounds], delta, relation),
            "delta": delta,
            "relation": relation,
            "noise_std": self.sum_noise_multiplier * self.clip_norm,
            "sensitivity": sensitivity,
            "trust": "central",
            "sampling": _SAMPLING_NAMES["none" if exact else rounds.sampling],
            "sampling_rate": rounds.rate,
            "accountant": "exact (Gaussian differential privacy)"
            if exact
            else "privacy loss distributions (dp-accounting), an upper estimate",
        }


_SAMPLING_NAMES = {
    "none": "none: every client takes part",
    "poisson": "Poisson: every client by itself in every round",
    "fixed": "a fixed number of clients in every round, without replacement",
}


def _clipped_sum(messages: npt.NDArray[Any], bound: float) -> tuple[Floats, Bools]:
    """Sum of clipped messages (k, ...) in float64, and which of them (k,) were within the bound.

    Messages of another type are converted a few at a time: a copy of all would take the most
    memory of a round.
    """
    if messages.dtype == np.float64:
        kept, within = _clipped(messages, bound)
        return kept.sum(axis=0), within
    total, within = np.zeros(messages.shape[1:]), np.zeros(len(messages), dtype=np.bool_)
    step = max(_CONVERTED // max(math.prod(messages.shape[1:]), 1), 1)
    for start in range(0, len(messages), step):
        part = slice(start, start + step)
        kept, within[part] = _clipped(messages[part].astype(np.float64), bound)
        total += kept.sum(axis=0)
    return total, within


def _clipped(messages: Floats, bound: float) -> tuple[Floats, Bools]:
    """Messages (k, ...) of L2 norm at most `bound`, and which of them (k,) were so before.

    Every message is judged and changed by itself, so that none moves another by a rounding error.
    """
    flat = messages.reshape(len(messages), math.prod(messages.shape[1:]))
    squares = np.einsum("kp,kp->k", flat, flat)
    within = squares <= bound * bound
    if within.all():
        return messages, within
    factor = np.ones(len(flat))
    np.divide(bound, np.sqrt(squares), out=factor, where=~within)
    plain = squares <= _LARGEST_SQUARE
    if plain.all():
        return (flat * factor[:, None]).reshape(messages.shape), within
    kept = np.zeros_like(flat)
    kept[plain] = flat[plain] * factor[plain, None]
    kept[~plain] = clip_l2(flat[~plain], bound)
    return kept.reshape(messages.shape), within


def _with_noise(exact: Floats, std: float, rng: np.random.Generator) -> Floats:
    """Exact values plus noise of `std`, on a public grid; unchanged if `std` is 0."""
    return exact if std == 0 else gaussian_on_grid(exact, std, rng)
