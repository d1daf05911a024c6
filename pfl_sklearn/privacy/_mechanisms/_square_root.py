"""Noise on the running sums of a stream, correlated over time: the square-root factorization."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.linalg import solve_banded
from scipy.optimize import brentq

from pfl_sklearn._typing import Floats
from pfl_sklearn.privacy._mechanisms._running_sums import RunningSums

_UNKNOWN_HORIZON = 0.45  # exponent of the encoder where any number of steps may follow
_LONGEST_STREAM = 10**8  # steps at which the exponentials still follow the power without a horizon
_TERMS_ONE_BY_ONE = 10_000  # beyond, closed forms, which lose digits where sums are short
_SPACING = 1.5  # of the exponentials' rates, as a logarithm
_SLOWEST, _FASTEST = 0.2, 6.0  # rates, the first in units of one over the horizon


class Exponentials(NamedTuple):
    """The sequence of weights @ (1 - gaps) ** k; gaps (d,) in [0, 1], weights (d,)."""

    gaps: Floats
    weights: Floats

    @property
    def decay(self) -> Floats:
        """Factors (d,) by which the terms shrink in a step."""
        return 1 - self.gaps

    def squares(self, n: float) -> float:
        """Sum of the squares of the first n values; n may be infinity."""
        with np.errstate(divide="ignore", invalid="ignore"):  # a gap of 1 or two of 0
            product = np.log1p(-self.gaps)[:, None] + np.log1p(-self.gaps)
            steps = np.where(product == 0, n, np.expm1(n * product) / np.expm1(product))
        return float(self.weights @ steps @ self.weights)

    def squared_sums(self, n: float) -> float:
        """Sum of the squares of the first n running sums."""
        if n <= _TERMS_ONE_BY_ONE:
            steps = np.arange(n)[:, None]
            return float(np.sum(np.cumsum(self.decay**steps @ self.weights) ** 2))
        scale = self.weights / self.gaps  # a running sum is sum(scale * (1 - decay ** k))
        with np.errstate(divide="ignore"):  # a gap of 1
            logs = np.log1p(-self.gaps)
        product = logs[:, None] + logs
        single = self.decay * -np.expm1(n * logs) / self.gaps
        pairs = np.exp(product) * np.expm1(n * product) / np.expm1(product)
        total = n * scale.sum() ** 2 - 2 * scale.sum() * (scale @ single) + scale @ pairs @ scale
        return float(total)


class StreamResponse(NamedTuple):
    """Response of a message to a constant stream, by step; arrays (n,), first step first."""

    gain: Floats  # message of a stream of ones, without noise
    squares: Floats  # sum of the squared gains up to the step
    spread: Floats  # sum of the squared weights on the values in the sum of gain times message


@dataclass(frozen=True)
class SquareRootSums(RunningSums):
    r"""Running sums of a stream with noise that later sums partly take back.

    The lower-triangular matrix of ones, which maps a stream to its running sums, is the product
    :math:`B C` of two Toeplitz matrices. The sums :math:`B (C x + z)` reveal as much as
    :math:`C x + z`, where z is white noise. Both factors are square roots of the matrix of ones,
    up to an approximation that costs noise, not privacy: the first column of C is
    :math:`\binom{2k}{k} 4^{-k}` to 5 %, by sums of exponentials. So a stream needs a few numbers
    and not its whole history.

    Without a `horizon`, C is a little less than a square root (:math:`(1 - L)^{-.45}` for the lag
    L), so that its columns have a finite length. The noise on the sum after 30,000 steps has a
    variance of :math:`18.9 / \mu^2` with that horizon, and of :math:`30{,}000 / \mu^2` if every
    value has noise of its own.

    References
    ----------
    Fichtenberger, H., Henzinger, M. and Upadhyay, J. (2023). Constant matters: fine-grained error
    bound on differentially private continual observation. ICML. McMahan, H. B., Xu, Z. and Zhang,
    Y. (2024). A hassle-free algorithm for strong differential privacy in federated learning
    systems. EMNLP. Denisov, S. et al. (2022). Improved differential privacy for SGD via optimal
    private linear operators on adaptive streams. NeurIPS.
    """

    mu: float
    horizon: int | None = None

    @cached_property
    def encoder(self) -> Exponentials:
        """First column of C."""
        # The terms of (1 - L)^-a are an integral of e^(-k rate) over rates with this density: the
        # trapezoidal rule in the logarithm of the rate turns it into a sum of exponentials.
        exponent, steps = 0.5, self.horizon
        if steps is None:
            exponent, steps = _UNKNOWN_HORIZON, _LONGEST_STREAM
        slowest = _SLOWEST / steps
        n_terms = math.ceil(math.log(_FASTEST / slowest) / _SPACING) + 1
        rates = slowest * np.exp(_SPACING * np.arange(n_terms))
        density = np.exp(-exponent * rates) * (-np.expm1(-rates)) ** -exponent
        weights = density * rates * _SPACING
        # Rates below the slowest one, whose density is rate^-a, count as it.
        weights[0] += (slowest * math.exp(-_SPACING / 2)) ** (1 - exponent) / (1 - exponent)
        return Exponentials(-np.expm1(-rates), weights / weights.sum())

    @cached_property
    def decoder(self) -> Exponentials:
        """First column of B, from the zeros of the generating function of C."""
        gaps, weights = self.encoder

        def slope(gap: float, low: float, high: float) -> float:
            others = weights / np.where((gaps == low) | (gaps == high), 1.0, gaps - gap)
            inner = others[(gaps != low) & (gaps != high)].sum()
            ends = weights[gaps == low][0] * (high - gap) + weights[gaps == high][0] * (low - gap)
            return float(ends + inner * (low - gap) * (high - gap))

        pairs = itertools.pairwise(gaps)
        zeros = [brentq(slope, *pair, args=pair, xtol=1e-300, rtol=1e-14) for pair in pairs]
        # Partial fractions of 1 / ((1 - L) C(L)). The zero at gap 0 is the running sum itself; the
        # exponential that dies at once (gap 1) makes the first term 1.
        poles = np.array([0.0, *zeros])
        inner = [zero * (weights / (gaps - zero) ** 2).sum() for zero in zeros]
        later = 1 / (np.array([(weights / gaps).sum(), *inner]) * (1 - poles))
        return Exponentials(np.append(poles, 1.0), np.append(later, 1 - later.sum()))

    @cached_property
    def sensitivity(self) -> float:
        """L2 length of a column of C."""
        # A value enters Cx through one column; the first is the longest. Its length is that of the
        # approximate encoder itself, so the approximation costs no privacy.
        return math.sqrt(self.encoder.squares(self.horizon or math.inf))

    @property
    def noise_std(self) -> float:
        """Standard deviation of the white noise."""
        return self.sensitivity / self.mu

    def n_registers(self, n_releases: int) -> int:
        """Numbers that the noise of a stream needs between two of its releases."""
        return len(self.decoder.gaps)

    def advance(self, registers: Floats, index: npt.ArrayLike, rng: np.random.Generator) -> Floats:
        """Noise of the next running sums, one of each stream."""
        decay, weights = self.decoder.decay, self.decoder.weights
        # B z, one register for each exponential of B.
        fresh = rng.standard_normal(registers.shape[1:]) * self.noise_std
        registers *= decay.reshape(-1, *[1] * fresh.ndim)
        registers += fresh
        return np.tensordot(weights, registers, axes=1)

    def variance(self, index: npt.ArrayLike) -> Floats:
        """Variance of the noise on the running sums at releases `index` (...)."""
        # Streams that began together share an index, so few distinct ones are worked out.
        steps, place = np.unique(index, return_inverse=True)
        squares = np.array([self.decoder.squares(step) for step in steps.tolist()])
        return (self.noise_std**2 * squares)[place].reshape(np.shape(index))

    def all_values_mu(self, n_releases: int) -> float:
        """Gaussian-DP parameter of the first releases, one for each value, if all are replaced."""
        return math.sqrt(self.encoder.squared_sums(n_releases)) / self.noise_std

    def response(self, n: int) -> StreamResponse:
        """Response of the messages Cx + z to a constant stream, in the first n steps."""
        decay, weights = self.encoder.decay, self.encoder.weights
        column = weights @ decay[:, None] ** np.arange(n)
        gain = np.cumsum(column)
        cross = np.zeros(n)
        for factor, weight in zip(decay, weights, strict=True):
            follow = gain * np.cumsum(column * factor ** np.arange(n))
            diagonals = np.stack([np.ones(n), np.full(n, -factor)])
            decayed = solve_banded((1, 0), diagonals, follow)  # after each step
            before = np.concatenate([[0.0], decayed[:-1]])
            cross += weight * factor * before
        grown = 2 * gain * cross + gain**2 * np.cumsum(column**2)
        return StreamResponse(gain, np.cumsum(gain**2), np.cumsum(grown))
