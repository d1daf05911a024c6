"""The release of a round of sparse messages, whose noise is drawn when a row is first shown."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.sparse import csc_array

from pfl_sklearn._clients import Codes
from pfl_sklearn._typing import Bools, Floats
from pfl_sklearn.privacy._mechanisms._clipped_sum import ClippedSum, Released, normalizing_factors
from pfl_sklearn.privacy._mechanisms._noise import public_grid


class SparseMessages(NamedTuple):
    """Messages of k clients: values (n, c) of those `owner` (n,) in `rows` (n,), 0 elsewhere."""

    values: Floats
    rows: Codes
    owner: Codes
    k: int

    @property
    def nbytes(self) -> int:
        """Bytes that the clients send: values, and the numbers of their rows."""
        return self.values.nbytes + self.rows.nbytes


class SparseTotal(NamedTuple):
    """Sum over clients in `rows` (n,), 0 elsewhere, and the variance of noise due in every row."""

    rows: Codes
    values: Floats
    pending_variance: float


@dataclass(frozen=True)
class SparseClippedSum:
    """:class:`ClippedSum` of sparse messages (d, c), with noise drawn only when a row is shown.

    A row that nobody saw for r rounds gets one draw with the variance of r draws. Nobody can tell
    that from noise in every round: the increments of a row are independent Gaussians, and only
    their sums up to the rounds in which the row is shown are ever used.
    """

    dense: ClippedSum

    def start(self) -> float:
        """Bound of the first round."""
        return self.dense.start()

    def release(
        self, messages: SparseMessages, bound: float, n_expected: float, rng: np.random.Generator
    ) -> Released:
        """One round: a :class:`SparseTotal`, the next bound, and the share of clipped clients."""
        change = _normalized_values if self.dense.normalize else _clipped_values
        values, within = change(messages, bound)
        # One entry for each row that a client sent: the total is as sparse as the messages.
        rows, position = np.unique(messages.rows, return_inverse=True)
        spread = csc_array(
            (np.ones(len(position)), position, np.arange(len(position) + 1)),
            shape=(len(rows), len(position)),
        )
        summed = np.asarray(spread @ values)
        if math.isinf(bound):  # without clipping there is no noise either
            return Released(SparseTotal(rows, summed, 0.0), bound, 0.0)
        # The next bound is shown in every round, so the noise of its bits cannot wait.
        following, share = self.dense.next_bound(within, bound, n_expected, rng)
        variance = (self.dense.sum_noise_multiplier * bound) ** 2
        return Released(SparseTotal(rows, summed, variance), following, share)

    @property
    def noisy(self) -> bool:
        """Whether there is any noise."""
        return self.dense.noise_multiplier > 0

    def due_noise(
        self, drawn_variance: Floats, variance: float, rows: Codes, c: int, rng: np.random.Generator
    ) -> Floats:
        """Noise (n, c) that is due in `rows` (n,) before they are shown.

        `drawn_variance` (d,) of the noise in every row so far changes to `variance`.
        """
        # Variances of independent rounds add up. A row without variance due gets no draw: two draws
        # for the same sum would average out.
        due = np.sqrt(np.maximum(variance - drawn_variance[rows], 0.0))
        drawn_variance[rows] = variance
        noise = rng.standard_normal((len(rows), c))
        noise *= due[:, None]
        return noise

    def rounded(self, values: Floats, step: float) -> Floats:
        """Noisy values, `step` for each unit of the sum, on a public grid."""
        # From the first bound, which is public and does not move.
        grid = public_grid(step * self.dense.sum_noise_multiplier * self.dense.start())
        return np.rint(values / grid) * grid


def _clipped_values(messages: SparseMessages, bound: float) -> tuple[Floats, Bools]:
    """Values of messages clipped to the L2 norm `bound`, and which clients (k,) were within it."""
    # A message that is not finite, or whose squared norm is not, becomes 0.
    if math.isinf(bound):
        return messages.values, np.ones(messages.k, dtype=bool)
    norms = np.sqrt(_squared_norms(messages))
    within = norms <= bound  # false for NaN
    if within.all():  # no copy in the common case
        return messages.values, within
    finite = np.isfinite(norms)
    scale = np.where(within, 1.0, bound / np.where(finite & (norms > 0), norms, 1.0))
    # Not multiplied where the norm is not finite: a value might overflow, or become NaN.
    clipped = np.multiply(
        messages.values,
        scale[messages.owner][:, None],
        out=np.zeros_like(messages.values),
        where=finite[messages.owner][:, None],
    )
    return clipped, within


def _normalized_values(messages: SparseMessages, bound: float) -> tuple[Floats, Bools]:
    """Values of messages scaled to the L2 norm `bound`, and which clients (k,) count as 0."""
    factors = normalizing_factors(_squared_norms(messages), bound)
    values, factor = messages.values, factors[messages.owner][:, None]
    # Not multiplied where the factor is 0: times infinity it would be NaN.
    scaled = np.multiply(values, factor, out=np.zeros_like(values), where=factor > 0)
    return scaled, factors == 0


def _squared_norms(messages: SparseMessages) -> Floats:
    """Squared norms (k,) of messages; infinity or NaN where they are not finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.einsum("nc,nc->n", messages.values, messages.values)
        squares = np.bincount(messages.owner, squares, messages.k)
    return squares.astype(np.float64, copy=False)  # without any message they are integers
