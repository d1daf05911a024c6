"""Clipped and noisy gradients inside the local steps of a client, certified by the last step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pfl_sklearn._typing import Floats
from pfl_sklearn.privacy._accounting._events import SampledGaussian
from pfl_sklearn.privacy._mechanisms._clipped_sum import Released
from pfl_sklearn.privacy._mechanisms._gaussian import clip_l2
from pfl_sklearn.privacy._mechanisms._noise import gaussian_on_grid
from pfl_sklearn.privacy._mechanisms._report_fields import (
    check_bound,
    check_noise_multiplier,
    rounds_fields,
)


@dataclass(frozen=True)
class NoisySteps:
    r"""Local steps whose gradients are clipped and get noise, one part of the model at a time.

    In each of `n_steps` steps of one length, part j follows its gradient clipped to the L2 norm
    :math:`C_j` (`clip_norms`, from 1e-100 to 1e100), plus noise of standard deviation
    :math:`z C_j`. Clients send the result of the last step. The server sums the messages without
    further noise.

    The certificate counts the noise of the last step alone. Anyone who knows the client's noise of
    all earlier steps, which does not depend on data, sees a function of the data plus the noise of
    the last step. Replacing the data moves part j of that function by at most :math:`2 \tau C_j` in
    units of the step, because each of the :math:`\tau` clipped gradients moves it by at most
    :math:`2 C_j`, and weight decay or a floor in between never widens a difference. A floor after
    the last step works on noisy values, and where the last gradient of a part is computed from the
    last noisy value of another, the parts compose adaptively. So J parts are Gaussian DP with
    :math:`\mu = 2 \tau \sqrt J / z` for each round with the client, and with half of it where the
    clipped gradients are replaced by zeros.

    The noise of other clients does not count, as they know it. A client that takes no part adds no
    noise either, so everybody may know who takes part: rounds are accounted like samples of known
    members, whatever the sampling, and the promise holds against the server too. Earlier noise
    cannot count like that of separate releases: the gradients in between are not released with it,
    and may undo it.

    Gradients with NaN or infinity count as 0. Noisy gradients are rounded to a public grid.
    """

    clip_norms: Sequence[float]
    n_steps: int
    noise_multiplier: float = 0.0

    def __post_init__(self) -> None:
        check_noise_multiplier(self.noise_multiplier)
        for bound in self.clip_norms:
            # Messages themselves have no bound: what clients send is noisy already.
            check_bound("bounds of gradients", bound)

    @property
    def largest_norm(self) -> float:
        """Largest L2 norm of a client's gradients of a round, in units of the bounds."""
        # Steps add up, as each gradient moves the result; parts are orthogonal, so squares add up.
        return self.n_steps * math.sqrt(len(self.clip_norms))

    def generators(self, seeds: Sequence[int]) -> list[np.random.Generator]:
        """Sources of the noise of clients in a round, from their seeds (g,)."""
        # The 1 separates the noise from other draws with a client's seed.
        return [np.random.default_rng((int(seed), 1)) for seed in seeds]

    def privatize(
        self, slopes: Floats, part: int, generators: Sequence[np.random.Generator]
    ) -> Floats:
        """Clipped and noisy gradients of one part and step; `slopes` (g, p) has one per client."""
        bound = self.clip_norms[part]
        clipped, std = clip_l2(slopes, bound), self.noise_multiplier * bound
        # Without noise there is no grid, which is a share of the noise.
        if std == 0:
            return clipped
        # Each client draws its own, or the noise would depend on who else is in the block.
        pairs = zip(clipped, generators, strict=True)
        return np.stack([gaussian_on_grid(slope, std, rng) for slope, rng in pairs])

    def start(self) -> float:
        """Bound of messages: none."""
        return math.inf

    def release(
        self, messages: Floats, bound: float, n_expected: float, rng: np.random.Generator
    ) -> Released:
        """Sum of messages (k, ...), which are noisy already."""
        return Released(messages.sum(axis=0, dtype=np.float64), bound, 0.0)

    def facts(self, rounds: SampledGaussian, delta: float, relation: str) -> dict[str, Any]:
        """Fields of the privacy report of all rounds together, in units of the first part's
        gradients.

        The noise multiplier of `rounds` is in units of :attr:`largest_norm`.
        """
        bound = self.clip_norms[0]
        facts = rounds_fields(rounds, delta, relation, self.largest_norm * bound)
        # A client that takes no part adds no noise, so participation is no secret.
        if rounds.rate < 1:
            facts["sampling"] = "clients are sampled in every round, and everybody may know which"
        return {
            **facts,
            "mechanism": "Gaussian noise that clients add to their clipped gradients in each of "
            f"{self.n_steps} local steps, rounded to a grid",
            "noise_std": self.noise_multiplier * bound,
            "trust": "local",
            "accountant": "certificate by the noise of the last local step of a round, then "
            f"{facts['accountant']}",
        }
