"""Private clustering of clients: bounded messages, and one budget for all releases."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from pfl_sklearn._typing import Floats
from pfl_sklearn.privacy._accounting._events import check_value
from pfl_sklearn.privacy._accounting._gaussian_dp import gdp_mu
from pfl_sklearn.privacy._mechanisms._gaussian import GaussianMechanism

# Factor q of squared norms in a step: at 1/2 they raise the squared sensitivity from 4 to 4.5.
_SQUARE_SCALE = 0.5
# Gains are in units of a client's sampling variance. They are at most 2 and have no lower bound.
_HIGHEST_GAIN, _LEAST_LOWEST_GAIN = 2.0, 3.0
_GAIN_NOISE = 0.1  # noise on the sum of gains, as a share of the number of clients


@dataclass(frozen=True)
class PrivateClustering:
    r"""Noisy k-means: Gaussian releases of clients' vectors under one (epsilon, delta).

    Vectors c lie in the unit ball. Each release is a sum over clients and may depend on earlier
    releases:

    - "moments": c and :math:`c c^\top`, from which starting points are computed;
    - "scores": for every candidate start, the squared distance to its nearest centre, clipped at 1;
    - `n_steps` "steps": the vector times the client's shares of the components, and the shares;
    - "gain": one number per client, how much the result improves its fit.

    Parameters
    ----------
    epsilon : float, > 0
        Epsilon of all releases together.
    delta : float in (0, 1)
        Delta of all releases together.
    n_features : int
        Length of the vectors.
    n_clients : int
        Number of clients, which is public.
    squares : bool, default=False
        Whether steps also release shares times half the squared norm.
    n_steps : int, default=5
        Number of steps of k-means or EM.
    n_candidates : int, default=32
        Number of candidate starts.

    Notes
    -----
    L2 sensitivities when one client is replaced:

    - moments: the message has each off-diagonal entry once, times :math:`\sqrt 2`. For vectors c,
      c' and :math:`\rho = c \cdot c'` the squared distance is :math:`|c|^2 + |c'|^2 - 2 \rho +
      |c|^4 + |c'|^4 - 2 \rho^2`. It is at most 4.5 (at :math:`\rho = -1/2`), and 4 for numbers.
    - scores: each of J candidates changes by at most 1, so the sensitivity is :math:`\sqrt J`.
    - a step: for shares r, r', with :math:`|r| \le 1`, and :math:`q = 1/2` with squares (0
      without), the squared distance is :math:`|r|^2 (1 + |c|^2 + q^2 |c|^4) + |r'|^2 (1 + |c'|^2 +
      q^2 |c'|^4) - 2 r \cdot r' (1 + c \cdot c' + q^2 |c|^2 |c'|^2)`. The last term is not
      positive, so the squared distance is at most :math:`4 + 2 q^2`, for two clients of different
      components. Counts add nothing to the cost of sums: two clients of one component are already
      2 apart.
    - gain: gains are clipped to [-L, 2] and divided by L + 2, so the sensitivity is 1. L is the
      largest value that keeps the noise below a tenth of the number of clients, and at least 3.

    A release with share f of the budget has noise sensitivity / (mu sqrt f), where mu is the
    Gaussian-DP parameter of (epsilon, delta). The shares sum to 1, so the composition is exact.
    We claim nothing under add/remove: L and the importance of every client's gain depend on the
    number of clients and on their sizes, so the gain is not a plain sum.

    Examples
    --------
    >>> from pfl_sklearn.privacy import PrivateClustering
    >>> clustering = PrivateClustering(1.0, 1e-5, n_features=10, n_clients=1000)
    >>> round(sum(share for share, _ in clustering.parts.values()), 12)
    1.0
    """

    epsilon: float
    delta: float
    n_features: int
    n_clients: int
    squares: bool = False
    n_steps: int = 5
    n_candidates: int = 32

    def __post_init__(self) -> None:
        gdp_mu(self.epsilon, self.delta)  # refuses what is out of range
        for name in ("n_features", "n_clients", "n_steps", "n_candidates"):
            value = getattr(self, name)
            check_value(name, value, 1 <= value < math.inf, "finite and at least 1")

    @property
    def parts(self) -> dict[str, tuple[float, float]]:
        """Share of the budget and L2 sensitivity of every release, by name.

        The last step has three times the share of the others, because its noise remains in the
        result.
        """
        # The sensitivities are derived in the notes of this class. Any shares that sum to 1 spend
        # the same. Noise of starts and of early steps is forgotten, so they get little.
        moved = math.sqrt(4 + 2 * _SQUARE_SCALE**2 * self.squares)
        step = 0.7 / (self.n_steps + 2)
        parts = {
            "moments": (0.15, 2.0 if self.n_features == 1 else math.sqrt(4.5)),
            "scores": (0.1, math.sqrt(self.n_candidates)),
            "gain": (0.05, 1.0),
            "last": (3 * step, moved),
        }
        return parts | {f"step {t}": (step, moved) for t in range(self.n_steps - 1)}

    @property
    def lowest_gain(self) -> float:
        """L: gains are clipped at -L from below."""
        allowed = _GAIN_NOISE * self.n_clients / self.mechanism("gain").noise_std
        return max(allowed - _HIGHEST_GAIN, _LEAST_LOWEST_GAIN)

    def mechanism(self, part: str) -> GaussianMechanism:
        """Mechanism of one release.

        Parameters
        ----------
        part : str
            Name of the release, a key of `parts`.

        Returns
        -------
        GaussianMechanism
        """
        share, sensitivity = self.parts[part]
        # Noise sensitivity / (mu sqrt(share)): a release is (mu sqrt(share))-GDP, and the squares
        # add up to mu^2.
        return GaussianMechanism(sensitivity / math.sqrt(share), self.epsilon, self.delta)

    def step_name(self, t: int) -> str:
        """Name of a step among the `parts`.

        Parameters
        ----------
        t : int
            Number of the step, from 0 to `n_steps` - 1.

        Returns
        -------
        str
        """
        return "last" if t == self.n_steps - 1 else f"step {t}"

    def moments(self, vectors: Floats) -> Floats:
        """Exact sums over clients of c and of the upper triangle of c c'.

        Parameters
        ----------
        vectors : ndarray of shape (m, d)
            One vector c per client, in the unit ball.

        Returns
        -------
        ndarray of shape (d + d (d + 1) / 2,)
            Off-diagonal entries are multiplied by the square root of 2.
        """
        # Once each and times sqrt(2), an off-diagonal entry weighs what its two copies would: the
        # L2 norm of the message is the Frobenius norm of the matrix.
        products, upper = vectors.T @ vectors * self._off(), np.triu_indices(self.n_features)
        return np.concatenate([vectors.sum(axis=0), products[upper]])

    def split_moments(self, released: Floats) -> tuple[Floats, Floats]:
        """Mean and covariance of the clients' vectors.

        Parameters
        ----------
        released : ndarray of shape (d + d (d + 1) / 2,)
            :meth:`moments` plus noise.

        Returns
        -------
        mean : ndarray of shape (d,)
        covariance : ndarray of shape (d, d)
            Not always positive semi-definite, because of the noise.
        """
        d = self.n_features
        products = np.zeros((d, d))
        products[np.triu_indices(d)] = released[d:]
        products = products / self._off()
        products = (products + np.triu(products, 1).T) / self.n_clients
        mean = released[:d] / self.n_clients
        return mean, products - np.outer(mean, mean)

    def scores(self, vectors: Floats, candidates: list[Floats]) -> Floats:
        """Exact sums over clients of clipped squared distances to the nearest centre.

        Parameters
        ----------
        vectors : ndarray of shape (m, d)
            One vector per client, in the unit ball.
        candidates : list of ndarrays of shape (k, d)
            Centres of every candidate start.

        Returns
        -------
        ndarray of shape (n_candidates,)
        """
        nearest = [
            np.min([np.sum((vectors - centre) ** 2, axis=1) for centre in centres], axis=0)
            for centres in candidates
        ]
        return np.array([np.minimum(squares, 1.0).sum() for squares in nearest])

    def step(self, vectors: Floats, shares: Floats) -> Floats:
        """Exact sums over clients of shares times vectors and of shares.

        With `squares` also of shares times half the squared norms, which are cut at 1.

        Parameters
        ----------
        vectors : ndarray of shape (m, d)
            One vector per client, in the unit ball.
        shares : ndarray of shape (m, k)
            Each client's shares of the k components, which sum to at most 1.

        Returns
        -------
        ndarray of shape (k (d + 1),), or (k (d + 2),) with `squares`
        """
        sums = [(shares.T @ vectors).ravel(), shares.sum(axis=0)]
        if self.squares:
            # Rounding may put a squared norm slightly above 1.
            norms = np.minimum(np.einsum("md,md->m", vectors, vectors), 1.0)
            sums.append(_SQUARE_SCALE * (norms @ shares))
        return np.concatenate(sums)

    def split_step(self, released: Floats, k: int) -> tuple[Floats, Floats, Floats | None]:
        """Parts of a released step.

        Parameters
        ----------
        released : ndarray of shape (k (d + 1),), or (k (d + 2),) with `squares`
            :meth:`step` plus noise.
        k : int
            Number of components.

        Returns
        -------
        sums : ndarray of shape (k, d)
            Sums of the vectors.
        counts : ndarray of shape (k,)
            Sums of the shares, in clients.
        squares : ndarray of shape (k,) or None
            Sums of the squared norms; None without `squares`.
        """
        size = k * self.n_features
        sums, counts = released[:size].reshape(k, self.n_features), released[size : size + k]
        return sums, counts, released[size + k :] / _SQUARE_SCALE if self.squares else None

    def square_noise(self, part: str) -> float:
        """Standard deviation of the noise on a summed squared norm.

        Parameters
        ----------
        part : str
            Name of a step, see :meth:`step_name`.

        Returns
        -------
        float
        """
        return self.mechanism(part).noise_std / _SQUARE_SCALE

    def gain(self, gains: Floats, importance: Floats) -> Floats:
        """Exact weighted sum of the clients' clipped and scaled gains.

        Parameters
        ----------
        gains : ndarray of shape (m,)
            How much the result improves each client's fit, clipped to [-L, 2]. NaN counts as -L.
        importance : ndarray of shape (m,)
            Weight of each client's gain, in [0, 1].

        Returns
        -------
        ndarray of shape (1,)
        """
        # Divided by the width of the range, so that one client moves the sum by at most 1.
        cut = np.clip(np.nan_to_num(gains, nan=-np.inf), -self.lowest_gain, _HIGHEST_GAIN)
        return np.array([importance @ cut]) / (self.lowest_gain + _HIGHEST_GAIN)

    def split_gain(self, released: Floats) -> tuple[float, float]:
        """Summed gain, back on the scale of the clients' gains.

        Parameters
        ----------
        released : ndarray of shape (1,)
            :meth:`gain` plus noise.

        Returns
        -------
        gain : float
        noise_std : float
            Standard deviation of the noise on it.
        """
        width = self.lowest_gain + _HIGHEST_GAIN
        return float(released[0]) * width, self.mechanism("gain").noise_std * width

    def facts(self) -> dict[str, Any]:
        """Facts for the privacy report; noise and sensitivity are those of the last step."""
        return {
            **self.mechanism("last").facts(),
            "mechanism": (
                f"analytic Gaussian mechanism on {len(self.parts)} sums over clients, rounded to a "
                f"grid: moments, {self.n_candidates} scores of starts, {self.n_steps} steps of "
                "k-means or EM, a check of the gain; figures of the last step"
            ),
            "sensitivity": self.parts["last"][1],
            "accountant": "exact (composition of Gaussian differential privacy)",
        }

    def _off(self) -> Floats:
        """Square root of 2 off the diagonal (d, d)."""
        return np.where(np.eye(self.n_features) > 0, 1.0, math.sqrt(2))
