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
    - "scores": for every candidate start, the squared distance to its nearest centre, cut at 1;
    - `n_steps` "steps": the vector times the client's shares of the components, and the shares;
    - "gain": one number per client, how much the result improves its fit.

    Parameters
    ----------
    epsilon, delta : float, > 0 and float in (0, 1)
        Cost of all releases together.
    n_features : int
        Length of the vectors.
    n_clients : int
        Number of clients, which is public.
    squares : bool, default=False
        Whether steps also release shares times half the squared norm.
    n_steps, n_candidates : int, default=5 and 32
        Numbers of steps of k-means or EM, and of candidate starts.

    Notes
    -----
    L2 sensitivities when one client is replaced: :math:`\sqrt{4.5}` for "moments" (2 for numbers);
    :math:`\sqrt J` for the "scores" of J candidates; :math:`\sqrt{4 + 2 q^2}` for a step, with
    q = 1/2 with squares and 0 without, attained by two clients of different components; 1 for
    "gain", where gains are clipped to [-L, 2] and divided by L + 2. L is the largest value that
    keeps the noise below a tenth of the number of clients, and at least 3.

    A release with share f of the budget has noise sensitivity / (mu sqrt f), where mu is the
    Gaussian-DP parameter of (epsilon, delta). The shares sum to 1, so the composition is exact. We
    claim nothing under add/remove, because L and the importance of a client's gain depend on the
    number of clients and on their sizes.

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
        # Squared sensitivities, for c.c' = rho and shares r: of moments 2 - 2 rho + 2 - 2 rho^2 for
        # unit vectors, at most 4.5 (at rho = -1/2); of a step at most 2 (2 + q^2), since r.r' >= 0.
        # Any shares that sum to 1 spend the same. Later steps forget the noise of starts and of
        # early steps, so those get little.
        step_sensitivity = math.sqrt(4 + 2 * _SQUARE_SCALE**2 * self.squares)
        step = 0.7 / (self.n_steps + 2)
        parts = {
            "moments": (0.15, 2.0 if self.n_features == 1 else math.sqrt(4.5)),
            "scores": (0.1, math.sqrt(self.n_candidates)),
            "gain": (0.05, 1.0),
            "last": (3 * step, step_sensitivity),
        }
        return parts | {f"step {t}": (step, step_sensitivity) for t in range(self.n_steps - 1)}

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
        """
        return "last" if t == self.n_steps - 1 else f"step {t}"

    def moments(self, vectors: Floats) -> Floats:
        """Exact sums (d + d (d + 1) / 2,) over clients of c and of the upper triangle of c c'.

        Off-diagonal entries are multiplied by the square root of 2.

        Parameters
        ----------
        vectors : ndarray of shape (m, d)
            One vector c per client, in the unit ball.
        """
        # Once, times sqrt(2), an off-diagonal entry weighs as much as its two copies: the L2 norm
        # of the message is the Frobenius norm of the matrix.
        products = vectors.T @ vectors * self._off_diagonal_factors()
        upper = np.triu_indices(self.n_features)
        return np.concatenate([vectors.sum(axis=0), products[upper]])

    def split_moments(self, released: Floats) -> tuple[Floats, Floats]:
        """Mean (d,) and covariance (d, d), perhaps indefinite by noise, of the clients' vectors.

        Parameters
        ----------
        released : ndarray of shape (d + d (d + 1) / 2,)
            :meth:`moments` plus noise.
        """
        d = self.n_features
        products = np.zeros((d, d))
        products[np.triu_indices(d)] = released[d:]
        products = products / self._off_diagonal_factors()
        products = (products + np.triu(products, 1).T) / self.n_clients
        mean = released[:d] / self.n_clients
        return mean, products - np.outer(mean, mean)

    def scores(self, vectors: Floats, candidates: list[Floats]) -> Floats:
        """Exact sums (n_candidates,) of squared distances to the nearest centre, each cut at 1.

        Parameters
        ----------
        vectors : ndarray of shape (m, d)
            One vector per client, in the unit ball.
        candidates : list of ndarrays of shape (k, d)
            Centres of every candidate start.
        """
        nearest = [
            np.min([np.sum((vectors - centre) ** 2, axis=1) for centre in centres], axis=0)
            for centres in candidates
        ]
        return np.array([np.minimum(squares, 1.0).sum() for squares in nearest])

    def step(self, vectors: Floats, shares: Floats) -> Floats:
        """Exact sums (k (d + 1),) over clients of shares times vectors and of shares.

        With `squares`, k more sums of shares times half the squared norms.

        Parameters
        ----------
        vectors : ndarray of shape (m, d)
            One vector per client, in the unit ball.
        shares : ndarray of shape (m, k)
            Each client's shares of the k components, which sum to at most 1.
        """
        sums = [(shares.T @ vectors).ravel(), shares.sum(axis=0)]
        if self.squares:
            # Rounding may put a squared norm slightly above 1.
            norms = np.minimum(np.einsum("md,md->m", vectors, vectors), 1.0)
            sums.append(_SQUARE_SCALE * (norms @ shares))
        return np.concatenate(sums)

    def split_step(self, released: Floats, k: int) -> tuple[Floats, Floats, Floats | None]:
        """Sums of vectors (k, d), of shares (k,) and of squared norms (k,) of a released step.

        The last is None without `squares`.

        Parameters
        ----------
        released : ndarray of shape (k (d + 1),), or (k (d + 2),) with `squares`
            :meth:`step` plus noise.
        k : int
            Number of components.
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
        """
        return self.mechanism(part).noise_std / _SQUARE_SCALE

    def gain(self, gains: Floats, importance: Floats) -> Floats:
        """Exact weighted sum (1,) of the clients' clipped and scaled gains.

        Parameters
        ----------
        gains : ndarray of shape (m,)
            How much the result improves each client's fit, clipped to [-L, 2]. NaN counts as -L.
        importance : ndarray of shape (m,)
            Weight of each client's gain, in [0, 1].
        """
        # Divided by the width of the range, so that one client moves the sum by at most 1.
        cut = np.clip(np.nan_to_num(gains, nan=-np.inf), -self.lowest_gain, _HIGHEST_GAIN)
        return np.array([importance @ cut]) / (self.lowest_gain + _HIGHEST_GAIN)

    def split_gain(self, released: Floats) -> tuple[float, float]:
        """Sum of the clients' gains on their own scale, and the standard deviation of its noise.

        Parameters
        ----------
        released : ndarray of shape (1,)
            :meth:`gain` plus noise.
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

    def _off_diagonal_factors(self) -> Floats:
        """Square root of 2 off the diagonal (d, d)."""
        return np.where(np.eye(self.n_features) > 0, 1.0, math.sqrt(2))
