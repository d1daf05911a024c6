"""Bounded message of a client about the frequencies of its labels."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pfl_sklearn._typing import Floats
from pfl_sklearn.privacy._mechanisms._noise import gaussian_on_grid


@dataclass(frozen=True)
class FrequencyMoments:
    r"""Bounded message of a client about its label frequencies.

    The message has up to two parts, in this order:

    - the frequencies :math:`f_i` of the client's labels, if `frequencies`;
    - their squared norm :math:`|f_i|^2`, if `square`.

    A client without rows sends 0. Nothing is clipped: frequencies are bounded by nature.

    Parameters
    ----------
    frequencies, square : bool, default=True
        Which parts the message has.

    Notes
    -----
    Let f and g be frequencies and a and b their squared norms, all in [0, 1]. Replacing one client
    moves the message by at most :math:`\sqrt 2`:

    .. math:: |f - g|^2 + (a - b)^2 \le a + b + (a - b)^2 \le 2,

    because :math:`f \cdot g \ge 0` and the middle term, convex in a and in b, is largest at the
    corners. Two clients with a single, different label each attain it. A client that contributes
    nothing moves the sum by :math:`a + a^2 \le 2`. Under replacement the squared norm costs nothing
    next to the frequencies.

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn.privacy import FrequencyMoments
    >>> FrequencyMoments().messages(np.array([[3, 1, 0], [0, 0, 2]]))
    array([[0.75 , 0.25 , 0.   , 0.625],
           [0.   , 0.   , 1.   , 1.   ]])
    """

    frequencies: bool = True
    square: bool = True

    @property
    def sensitivity(self) -> float:
        """L2 sensitivity of the sum of messages when one client is replaced."""
        # The squared norm is free next to the frequencies; by itself it lies in [0, 1].
        return math.sqrt(2) if self.frequencies else float(self.square)

    @property
    def zero_out_sensitivity(self) -> float:
        """L2 sensitivity of the sum of messages when one client contributes nothing."""
        return math.sqrt(self.frequencies + self.square)

    def messages(self, counts: Floats) -> Floats:
        """Messages (m, p) of clients.

        Parameters
        ----------
        counts : ndarray of shape (m, n_labels)
            Number of rows of each client with each label. Negative numbers, infinity and NaN
            count as 0.
        """
        # NaN and negative counts would leave the simplex, and with it the bound.
        valid = np.isfinite(counts) & (counts > 0)
        positive = np.where(valid, counts, 0.0)
        # Divided by the largest first, since a sum of large counts may overflow. Then the sum is at
        # least 1, unless the client has no rows.
        largest = positive.max(axis=1, keepdims=True)
        scaled = np.divide(positive, largest, out=np.zeros_like(positive), where=largest > 0)
        total = np.maximum(scaled.sum(axis=1, keepdims=True), 1.0)
        shares = scaled / total
        parts = []
        if self.frequencies:
            parts.append(shares)
        if self.square:
            # Rounding may put the square of a single label slightly above 1.
            parts.append(np.minimum(np.einsum("mk,mk->m", shares, shares), 1.0)[:, None])
        return np.concatenate(parts, axis=1)

    def release(
        self, counts: Floats, noise_std: float, rng: np.random.Generator
    ) -> dict[str, Floats]:
        """Parts (see :meth:`split`) of the sum of messages with noise, rounded to a public grid.

        Parameters
        ----------
        counts : ndarray of shape (m, n_labels)
            As in :meth:`messages`.
        noise_std : float, > 0
            Standard deviation of the Gaussian noise in every coordinate.
        rng : numpy.random.Generator
            Source of the noise.
        """
        return self.split(gaussian_on_grid(self.messages(counts).sum(axis=0), noise_std, rng))

    def split(self, message: Floats) -> dict[str, Floats]:
        """Parts "frequencies" (..., n_labels) and "square" (..., 1), those that the message has.

        Parameters
        ----------
        message : ndarray of shape (..., p)
            Messages, or the release of their sum.
        """
        end = message.shape[-1] - self.square
        parts = {"frequencies": message[..., :end], "square": message[..., end:]}
        return {name: part for name, part in parts.items() if getattr(self, name)}
