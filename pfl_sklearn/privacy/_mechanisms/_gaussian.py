"""Gaussian releases: bounded messages of clients, and the noise on them or on their sum."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pfl_sklearn._typing import Floats
from pfl_sklearn.privacy._accounting._events import check_value
from pfl_sklearn.privacy._accounting._gaussian_dp import gdp_epsilon, gdp_mu
from pfl_sklearn.privacy._mechanisms._noise import gaussian_on_grid, public_grid
from pfl_sklearn.privacy._mechanisms._report_fields import EXACT, check_positive, release_fields


def clip_l2(vectors: Floats, radius: float) -> Floats:
    """Rows (m, d) projected onto the ball of `radius`; rows with NaN or infinity become 0."""
    # A refusal would reveal that some client holds NaN; 0 is within every ball.
    vectors = np.where(np.isfinite(vectors).all(axis=1, keepdims=True), vectors, 0.0)
    # Rows are scaled to a largest entry of 1: squares of the entries themselves may overflow to
    # infinity or underflow to 0, and a norm of 0 would let a long row through.
    largest = np.abs(vectors).max(axis=1, keepdims=True, initial=0.0)
    scaled = np.divide(vectors, largest, out=np.zeros_like(vectors), where=largest > 0)
    length = np.sqrt(np.einsum("md,md->m", scaled, scaled))[:, None]
    # A length is at most sqrt(d), so the product stays finite: infinity times 0 would be NaN.
    norms = length * np.minimum(largest, np.finfo(float).max / math.sqrt(2 + vectors.shape[1]))
    shrunk = np.divide(scaled * radius, length, out=np.zeros_like(scaled), where=length > 0)
    # Rows within the ball are returned bit for bit.
    return np.where(norms <= radius, vectors, shrunk)


@dataclass(frozen=True)
class ClientMoments:
    """Bounded message of a client about its mean and the variance of its rows.

    The message has up to three parts, in this order, each divided by its bound:

    - the client's mean minus the centre, clipped to L2 norm `radius`, if `mean`;
    - the squared norm of that, if `square`;
    - the variance of the client's rows around their mean, summed over coordinates and cut at
      `variance_bound`, if `variance`.

    Choose both bounds without looking at the data.

    Parameters
    ----------
    radius : float
        L2 radius of the ball that client means are clipped to.
    mean, square, variance : bool
        Which parts the message has.
    variance_bound : float or None, default=None
        Upper bound on the variance of a client's rows. None: ``radius**2``.

    Notes
    -----
    Replacing one client changes the mean by at most 2, the squared norm by at most 1 and the
    variance by at most 1. The first two cannot reach their maxima together: for clipped means of
    norms a and b the squared distance is at most (a + b)^2 (1 + (a - b)^2) <= 4. So the squared
    norm costs nothing next to the mean. Weights of variances are public and at most 1.
    """

    radius: float
    mean: bool = True
    square: bool = False
    variance: bool = False
    variance_bound: float | None = None

    def __post_init__(self) -> None:
        check_positive("radius", self.radius)
        if self.variance_bound is not None:
            check_positive("variance_bound", self.variance_bound)

    @property
    def largest_variance(self) -> float:
        """Where the variance of a client's rows is cut."""
        return self.radius**2 if self.variance_bound is None else float(self.variance_bound)

    @property
    def sensitivity(self) -> float:
        """L2 sensitivity of the sum of messages when one client is replaced."""
        # Mean and squared norm together move by at most 2 (see the notes), the norm alone by 1.
        return math.sqrt((4 if self.mean else int(self.square)) + int(self.variance))

    @property
    def zero_out_sensitivity(self) -> float:
        """L2 sensitivity of the sum of messages when one client contributes nothing."""
        # Each part has norm at most 1, and one client can reach all maxima at once.
        return math.sqrt(self.mean + self.square + self.variance)

    def width(self, d: int) -> int:
        """Length of a message.

        Parameters
        ----------
        d : int
            Number of coordinates of a client's mean.
        """
        return d * self.mean + self.square + self.variance

    def messages(self, means: Floats, variances: Floats, weights: Floats | float = 1.0) -> Floats:
        """Messages (m, p) of clients.

        Parameters
        ----------
        means : ndarray of shape (m, d)
            Each client's mean minus the centre. A row with NaN or infinity counts as 0.
        variances : ndarray of shape (m,)
            Variance of each client's rows, summed over coordinates; NaN counts as 0. Read only
            with `variance`.
        weights : float or ndarray of shape (m,), in [0, 1], default=1.0
            Factor of the variance part. It must be public.
        """
        clipped = clip_l2(means, self.radius) / self.radius
        parts = []
        if self.mean:
            parts.append(clipped)
        if self.square:
            # Rounding may put the norm of a clipped row slightly above 1.
            parts.append(np.minimum(np.einsum("md,md->m", clipped, clipped), 1.0)[:, None])
        if self.variance:
            # NaN is the variance of a single row.
            cut = np.clip(np.nan_to_num(variances, nan=0.0), 0.0, self.largest_variance)
            parts.append((np.clip(weights, 0.0, 1.0) * cut / self.largest_variance)[:, None])
        return np.concatenate(parts, axis=1)

    def split(self, message: Floats, d: int) -> dict[str, Floats]:
        """Parts "mean" (..., d), "square" (..., 1) and "variance" (..., 1), in the units of the
        data.

        Parts that the message lacks are left out.

        Parameters
        ----------
        message : ndarray of shape (..., p)
            Messages, or the release of their sum.
        d : int
            Number of coordinates of a client's mean.
        """
        parts, start = {}, 0
        for name, width, scale in (
            ("mean", d * self.mean, self.radius),
            ("square", int(self.square), self.radius**2),
            ("variance", int(self.variance), self.largest_variance),
        ):
            if width:
                parts[name] = message[..., start : start + width] * scale
                start += width
        return parts


@dataclass(frozen=True)
class GaussianMechanism:
    """Gaussian noise calibrated by the analytic Gaussian mechanism.

    Parameters
    ----------
    sensitivity : float
        L2 sensitivity under replacement: the largest change of one client's message (local trust)
        or of the sum of all messages (central trust) when one client's whole data are replaced.
    epsilon, delta : float, > 0 and float in (0, 1)
        Cost of the release.
    trust : {"central", "local"}, default="central"
        Who adds the noise: a trusted server, once to the sum ("central"), or every client to its
        own message ("local").

    References
    ----------
    Balle, B. and Wang, Y.-X. (2018). Improving the Gaussian mechanism for differential privacy:
    analytical calibration and optimal denoising. ICML.

    Examples
    --------
    >>> from pfl_sklearn.privacy import GaussianMechanism
    >>> round(GaussianMechanism(sensitivity=2.0, epsilon=9.9973, delta=1e-5).noise_std, 4)
    1.0
    """

    sensitivity: float
    epsilon: float
    delta: float
    trust: str = "central"

    def __post_init__(self) -> None:
        check_positive("sensitivity", self.sensitivity)
        valid = self.trust in ("central", "local")
        check_value("trust", self.trust, valid, "'central' or 'local'")
        gdp_mu(self.epsilon, self.delta)  # refuses what is out of range

    @cached_property
    def noise_std(self) -> float:
        """Standard deviation of the noise in every coordinate."""
        return self.sensitivity / gdp_mu(self.epsilon, self.delta)

    @property
    def noise_variance(self) -> float:
        """Variance that the release adds to every coordinate."""
        return self.noise_std**2

    @property
    def grid(self) -> float:
        """Step of the public grid that releases are rounded to, about a millionth of the noise."""
        return public_grid(self.noise_std)

    def privatize(self, messages: Floats, rng: np.random.Generator) -> Floats:
        """Messages (m, p) with noise; with central trust their sum (p,) with noise.

        The result is rounded to `grid`.

        Parameters
        ----------
        messages : ndarray of shape (m, p)
            One message per client. With central trust also their exact sum (p,).
        rng : numpy.random.Generator
            Source of the noise.
        """
        # A trusted server adds one draw to the sum: the noise does not grow with the clients.
        if self.trust == "central" and messages.ndim == 2:
            messages = messages.sum(axis=0)
        return gaussian_on_grid(messages, self.noise_std, rng)

    def under_zero_out(self, sensitivity: float) -> tuple[tuple[str, float], ...]:
        """Epsilon under "zero_out", as in `epsilon_under` of :class:`PrivacyReport`.

        Parameters
        ----------
        sensitivity : float, > 0
            L2 sensitivity of the sum of messages when one client contributes nothing.
        """
        return (("zero_out", gdp_epsilon(sensitivity / self.noise_std, self.delta)),)

    def facts(self) -> dict[str, Any]:
        """Facts about this mechanism for the privacy report."""
        where = "the sum over clients" if self.trust == "central" else "every client's message"
        text = f"analytic Gaussian mechanism on {where}, rounded to a grid"
        return release_fields(self, text, EXACT, self.trust)
