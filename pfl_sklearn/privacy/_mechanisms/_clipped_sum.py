"""The release of one round: a sum over clients, clipped and with noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pfl_sklearn._typing import Bools, Floats
from pfl_sklearn.privacy._accounting._events import SampledGaussian, check_value
from pfl_sklearn.privacy._mechanisms._gaussian import clip_l2
from pfl_sklearn.privacy._mechanisms._noise import gaussian_on_grid
from pfl_sklearn.privacy._mechanisms._report_fields import (
    check_bound,
    check_noise_multiplier,
    rounds_fields,
)

# Factor by which the bound may move away from `clip_norm`, so that nothing over- or underflows.
_FARTHEST_BOUND = 1e6
_CONVERTED_AT_ONCE = 1 << 17  # numbers, a megabyte in double precision
# Squared norms above it may have overflowed, those below the other underflowed, and NaN is neither.
_LARGEST_SQUARE, _SMALLEST_SQUARE = 1e300, 1e-300


class Released(NamedTuple):
    """Release of one round, and one exact number that is not released."""

    total: Any
    """Noisy sum, of the shape of one message (of sparse messages a sparse total)."""
    bound_next: float
    """Clipping bound of the next round."""
    clipped: float
    """Share of the clients whose message was clipped: exact, hence not private."""


@dataclass(frozen=True)
class ClippedSum:
    r"""Noisy sum over clients of messages clipped to a common L2 norm: one round's release.

    With `clip_quantile`, the bound follows a quantile of the norms from round to round:

    .. math:: C \leftarrow C \exp(-\eta (\tilde b - \gamma))

    where :math:`\tilde b` is the noisy share of clients with a norm of at most C and :math:`\gamma`
    the quantile. With `normalize`, short messages are scaled up to the bound as well: then no bound
    has to suit the messages, but their lengths are lost.

    Parameters
    ----------
    clip_norm : float or None
        L2 bound of one message, with `clip_quantile` of the first round. It is in the units of the
        messages, from 1e-100 to 1e100. None means no clipping, without noise only.
    noise_multiplier : float, default=0.0
        Standard deviation of the noise divided by the bound: 0, or at least 1e-12. This is what
        one round spends, the bits of `clip_quantile` included.
    clip_quantile : float in [0, 1], default=None
        Quantile of the norms that the bound follows. None keeps the bound.
    bits_noise_multiplier : float, > 0.5, default=2.5
        Standard deviation of the noise on the number of messages within the bound, in clients and
        divided by `noise_multiplier`. At 2.5 the sum gets 2.1 percent more noise.
    clip_learning_rate : float, > 0, default=0.2
        How fast the bound moves.
    normalize : bool, default=False
        Scale every message to the norm `clip_norm`, which must be given, without `clip_quantile`. A
        message that is 0, or whose norm is outside [1e-150, 1e150], counts as 0.

    Notes
    -----
    Algorithm 1 of Andrew, Thakkar, McMahan and Ramaswamy (2021). Bits are centred, so that one
    client moves their sum by 1/2 (by 1 under replacement); a sum with noise
    :math:`z_\Delta = (z^{-2} - (2 z_b)^{-2})^{-1/2}` and bits with noise :math:`z_b` together are
    one Gaussian release with multiplier z, under either relation. Deviations: the noise on the
    bits is a multiple of z, not a twentieth of the number of clients; the noisy share is cut to
    [0, 1]; and the bound stays within a factor of 10^6 of `clip_norm`.

    A message with NaN or infinity counts as 0, and its bit as above the bound; without clipping
    nothing is changed, so that divergence shows. A round in which nobody takes part is noise.
    Releases are rounded to a public grid, a power of two of about a millionth of the noise.

    `normalize` is the automatic clipping of Bu, Wang, Zha and Karypis (2023) without their
    :math:`\gamma`, which would again have to suit the lengths of the messages.

    References
    ----------
    Andrew, G., Thakkar, O., McMahan, H. B. and Ramaswamy, S. (2021). Differentially private
    learning with adaptive clipping. NeurIPS.

    Bu, Z., Wang, Y.-X., Zha, S. and Karypis, G. (2023). Automatic clipping: differentially private
    deep learning made easier and stronger. NeurIPS.

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
    normalize: bool = False

    def __post_init__(self) -> None:
        z, bound, quantile = self.noise_multiplier, self.clip_norm, self.clip_quantile
        check_noise_multiplier(z)
        # Noise is calibrated to the bound: without one, a client moves the sum by any amount.
        if bound is None and (z > 0 or quantile is not None):
            needs = "noise_multiplier above 0" if z > 0 else "clip_quantile"
            raise ValueError(f"clip_norm must be given with {needs}; got None.")
        if self.normalize and (bound is None or quantile is not None):
            raise ValueError(
                "normalize=True needs clip_norm, the length of all messages, and no clip_quantile, "
                f"as no norm is left to follow; got {bound!r} and {quantile!r}."
            )
        if bound is not None:
            check_bound("clip_norm", bound)
        valid = quantile is None or 0 <= quantile <= 1
        check_value("clip_quantile", quantile, valid, "in [0, 1]")
        # Centred bits have sensitivity 1/2: at 0.5 they alone would spend what the round may.
        bits, rate = self.bits_noise_multiplier, self.clip_learning_rate
        check_value("bits_noise_multiplier", bits, 0.5 < bits < math.inf, "finite and above 0.5")
        check_value("clip_learning_rate", rate, 0 < rate <= 10, "in (0, 10]")

    @cached_property
    def sum_noise_multiplier(self) -> float:
        """Standard deviation of the noise on the sum, divided by the bound."""
        if self.clip_quantile is None:
            return self.noise_multiplier
        # Solves z^-2 = z_sum^-2 + (2 z_b)^-2, as squares of mu add up: sum and bits together spend
        # what the sum alone would with `noise_multiplier`.
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
        """One round: the noisy sum, the next bound, and the share of clipped messages.

        Parameters
        ----------
        messages : ndarray of shape (k, ...)
            One message for each client that takes part, in client order; k may be 0. Norms are
            over all axes but the first. Norms and sums are computed in double precision.
        bound : float
            :meth:`start`, or `bound_next` of the round before.
        n_expected : float, > 0
            Expected number of clients in a round: a public constant, never k.
        rng : numpy.random.Generator
            Source of the noise.
        """
        if math.isinf(bound):  # without clipping there is no noise either
            return Released(messages.sum(axis=0, dtype=np.float64), bound, 0.0)
        # Clip first, then noise: the noise is calibrated to what clipping bounds.
        clip = _normalize_messages if self.normalize else _clip_messages
        exact, within = _clipped_sum(messages, bound, clip)
        total = _add_noise(exact, self.sum_noise_multiplier * bound, rng)
        following, share = self.next_bound(within, bound, n_expected, rng)
        return Released(total, following, share)

    def next_bound(
        self, within: Bools, bound: float, n_expected: float, rng: np.random.Generator
    ) -> tuple[float, float]:
        """Bound of the next round (unchanged without `clip_quantile`), and the exact share clipped.

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
        """
        # Without any client, the release is noise and looks like any other round's.
        inside = int(np.count_nonzero(within))
        share = 1 - inside / len(within) if len(within) else 0.0
        if self.clip_quantile is None:
            return bound, share
        # Centred: a client counts +1/2 or -1/2, so its participation moves the sum by 1/2 and not
        # by 1. The divisor is public; the number of clients that took part would need noise.
        centred = np.array([inside - len(within) / 2])
        noisy = 0.5 + float(_add_noise(centred, self.bits_noise_std, rng)[0]) / n_expected
        # Cutting a noisy share is post-processing.
        excess = min(max(noisy, 0.0), 1.0) - self.clip_quantile
        following, first = bound * math.exp(-self.clip_learning_rate * excess), self.start()
        return min(max(following, first / _FARTHEST_BOUND), first * _FARTHEST_BOUND), share

    def facts(self, rounds: SampledGaussian, delta: float, relation: str) -> dict[str, Any]:
        """Fields of the :class:`PrivacyReport` of all rounds together, by name.

        Noise and sensitivity are those of the first round; with `clip_quantile` both follow the
        bound.

        Parameters
        ----------
        rounds : SampledGaussian
            Noise multiplier, number and sampling of the rounds.
        delta : float in [0, 1)
            Delta of the guarantee.
        relation : {"add_remove", "replace_one", "zero_out"}
            Neighbouring relation of the guarantee.
        """
        assert self.clip_norm is not None
        adaptive = "" if self.clip_quantile is None else ", with a bound that follows a quantile"
        changed = "normalized" if self.normalize else "clipped"
        return {
            **rounds_fields(rounds, delta, relation, self.clip_norm),
            "mechanism": f"Gaussian noise on the sum of {changed} messages of a round{adaptive}, "
            "rounded to a grid",
            "noise_std": self.sum_noise_multiplier * self.clip_norm,
            "trust": "central",
        }


def _clipped_sum(
    messages: npt.NDArray[Any], bound: float, clip: Callable[[Floats, float], tuple[Floats, Bools]]
) -> tuple[Floats, Bools]:
    """Sum of messages (k, ...) that `clip` bounds, in float64, and which (k,) were within the
    bound.
    """
    # Messages of another type are converted a few at a time: a copy of all would take more memory
    # than anything else in a round.
    if messages.dtype == np.float64:
        clipped, within = clip(messages, bound)
        return clipped.sum(axis=0), within
    # Norms in single precision could be too small, and a sum of clipped messages too large.
    total, within = np.zeros(messages.shape[1:]), np.zeros(len(messages), dtype=np.bool_)
    step = max(_CONVERTED_AT_ONCE // max(math.prod(messages.shape[1:]), 1), 1)
    for start in range(0, len(messages), step):
        part = slice(start, start + step)
        clipped, within[part] = clip(messages[part].astype(np.float64), bound)
        total += clipped.sum(axis=0)
    return total, within


def _clip_messages(messages: Floats, bound: float) -> tuple[Floats, Bools]:
    """Messages (k, ...) clipped to the L2 norm `bound`, and which of them (k,) were within it."""
    # Every message is clipped by itself, so that no message changes another by a rounding error.
    flat = messages.reshape(len(messages), math.prod(messages.shape[1:]))
    squares = np.einsum("kp,kp->k", flat, flat)
    within = squares <= bound * bound  # false for NaN
    if within.all():
        return messages, within  # no copy in the common case
    factor = np.ones(len(flat))
    np.divide(bound, np.sqrt(squares), out=factor, where=~within)
    plain = squares <= _LARGEST_SQUARE
    if plain.all():
        return (flat * factor[:, None]).reshape(messages.shape), within
    # Messages of models that diverged: the slower function bounds these as well.
    clipped = np.zeros_like(flat)
    clipped[plain] = flat[plain] * factor[plain, None]
    clipped[~plain] = clip_l2(flat[~plain], bound)
    return clipped.reshape(messages.shape), within


def _normalize_messages(messages: Floats, bound: float) -> tuple[Floats, Bools]:
    """Messages (k, ...) scaled to the L2 norm `bound`, and which of them (k,) count as 0."""
    flat = messages.reshape(len(messages), math.prod(messages.shape[1:]))
    factor = normalizing_factors(np.einsum("kp,kp->k", flat, flat), bound)[:, None]
    # Not multiplied where the factor is 0: times infinity it would be NaN.
    scaled = np.multiply(flat, factor, out=np.zeros_like(flat), where=factor > 0)
    return scaled.reshape(messages.shape), factor[:, 0] == 0


def normalizing_factors(squares: Floats, bound: float) -> Floats:
    """Factors (k,) that take messages of squared norms (k,) to the norm `bound`."""
    # A factor is 0 where the square is inaccurate and the scaled message might be too long.
    accurate = (squares >= _SMALLEST_SQUARE) & (squares <= _LARGEST_SQUARE)  # false for NaN
    return np.divide(bound, np.sqrt(squares), out=np.zeros(len(squares)), where=accurate)


def _add_noise(exact: Floats, std: float, rng: np.random.Generator) -> Floats:
    """Exact values plus noise of `std`, on a public grid; unchanged if `std` is 0."""
    return exact if std == 0 else gaussian_on_grid(exact, std, rng)
