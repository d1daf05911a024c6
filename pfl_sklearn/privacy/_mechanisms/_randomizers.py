"""Local randomizers with finitely many outputs: pure epsilon and exact probabilities."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit

from pfl_sklearn._typing import Bools, Floats, Integers
from pfl_sklearn.privacy._accounting._events import check_value
from pfl_sklearn.privacy._mechanisms._noise import bernoulli
from pfl_sklearn.privacy._mechanisms._report_fields import check_positive, release_fields

# From here on, e^epsilon - 1 has four digits or more in floating point.
_LEAST_EPSILON = 1e-12


class _LocalRandomizer:
    """Mechanism that each client applies to its own answer, with pure epsilon."""

    epsilon: float

    def __post_init__(self) -> None:
        check_positive("epsilon", self.epsilon)
        expected = f"at least {_LEAST_EPSILON}, where odds of e^epsilon begin to differ from 1"
        check_value("epsilon", self.epsilon, self.epsilon >= _LEAST_EPSILON, expected)

    @property
    def sensitivity(self) -> float:
        """Largest change of an answer before it is randomized: any may become any other."""
        return 1.0

    def facts(self) -> dict[str, Any]:
        """Facts about this mechanism for the privacy report."""
        accountant = "exact (largest ratio of output probabilities)"
        return release_fields(self, self._description, accountant)

    @property
    def _description(self) -> str:
        raise NotImplementedError


@dataclass(frozen=True)
class OneBit(_LocalRandomizer):
    """One bit per client whose expectation carries a number in [0, 1].

    Parameters
    ----------
    epsilon : float, > 0
        Local privacy of the client's whole data.

    Notes
    -----
    Equation 7 (ICLR) of Ozkara et al. (2023): the bit is 1 with probability
    ``(1 + x (E - 1)) / (E + 1)``, where E = exp(epsilon), and its decoded value is unbiased.
    Two-valued messages carry no information about the spread of x over clients.

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn.privacy import OneBit
    >>> OneBit(epsilon=np.log(3)).probability(np.array([0.0, 0.5, 1.0]))
    array([0.25, 0.5 , 0.75])
    """

    epsilon: float
    _description = "one randomized-response bit on the client's mean"

    @property
    def noise_variance(self) -> float:
        """Largest variance of a decoded bit (at x = 1/2)."""
        # p (1 - p) / tanh^2 with p = 1/2.
        return 0.25 / math.tanh(self.epsilon / 2) ** 2

    def probability(self, x: Floats) -> Floats:
        """Probability (m,) that a client reports a 1.

        Parameters
        ----------
        x : ndarray of shape (m,)
            One number per client in [0, 1]. Values outside are projected onto the range; NaN
            counts as 1/2.
        """
        # Equation 7 (ICLR) with 1 / (E + 1) = expit(-epsilon) and (E - 1) / (E + 1) = tanh(epsilon
        # / 2), where E cannot overflow.
        x = np.clip(np.nan_to_num(x, nan=0.5), 0.0, 1.0)
        return expit(-self.epsilon) + x * math.tanh(self.epsilon / 2)

    def privatize(self, x: Floats, rng: np.random.Generator) -> Bools:
        """One bit per client, (m,).

        Parameters
        ----------
        x : ndarray of shape (m,)
            As in :meth:`probability`.
        rng : numpy.random.Generator
            Source of the randomized responses.
        """
        # No probability may fall below that of a 1 at x = 0, or the ratio would exceed E.
        return bernoulli(self.probability(x), float(expit(-self.epsilon)), rng)

    def decode(self, bits: Bools) -> Floats:
        """Unbiased estimates (m,) of the numbers behind the bits, each outside [0, 1].

        Parameters
        ----------
        bits : ndarray of shape (m,) of bool
            The clients' reports.
        """
        return (bits - expit(-self.epsilon)) / math.tanh(self.epsilon / 2)


class TwoBitReports(NamedTuple):
    """One bit per client, and which of two questions it answers; the server sees both."""

    bits: Bools
    asks_spread: Bools


@dataclass(frozen=True)
class TwoBit(_LocalRandomizer):
    """One bit per client, about its mean or its spread as decided by a public coin.

    About half of the clients with two or more trials report ``w = 4 z (n - z) / n**2``, all others
    their mean ``z / n``. The coins do not depend on the outcomes. Together the reports identify the
    mean and the spread of the clients' probabilities for any numbers of trials.

    Parameters
    ----------
    epsilon : float, > 0
        Local privacy of the client's whole data.

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn.privacy import TwoBit
    >>> reports = TwoBit(epsilon=1.0).privatize(
    ...     np.array([3, 1]), np.array([9, 1]), np.random.default_rng(0))
    >>> reports.bits.shape, bool(reports.asks_spread[1])
    ((2,), False)
    """

    epsilon: float
    _description = "one randomized-response bit on the client's mean or spread (two-bit scheme)"

    @property
    def response(self) -> OneBit:
        """The randomized response behind both questions."""
        return OneBit(self.epsilon)

    @property
    def noise_variance(self) -> float:
        """Largest variance of a decoded bit."""
        return self.response.noise_variance

    def privatize(
        self, successes: Integers, trials: Integers, rng: np.random.Generator
    ) -> TwoBitReports:
        """One bit per client, and the question that it answers.

        Parameters
        ----------
        successes : ndarray of shape (m,) of int
            Each client's successes, from 0 to its trials.
        trials : ndarray of shape (m,) of int, >= 1
            Each client's trials. The server may learn which of them are at least 2.
        rng : numpy.random.Generator
            Source of the coins and of the randomized responses.
        """
        # A public coin, so that the question reveals nothing; a single trial has no spread.
        asks_spread = (rng.random(len(trials)) < 0.5) & (trials >= 2)
        mean = successes / trials
        answer = np.where(asks_spread, 4 * mean * (1 - mean), mean)
        # One bit about one question: either answer is in [0, 1], so the whole report costs epsilon.
        return TwoBitReports(self.response.privatize(answer, rng), asks_spread)


@dataclass(frozen=True)
class SubsetSelection(_LocalRandomizer):
    """A random subset of the categories that contains the true one more often than any other.

    Parameters
    ----------
    n_categories : int, >= 2
        Number k of categories.
    epsilon : float, > 0
        Local privacy of the client's whole data.

    References
    ----------
    Ye, M. and Barg, A. (2018). Optimal schemes for discrete distribution estimation under locally
    differential privacy. IEEE Transactions on Information Theory.

    Examples
    --------
    >>> from pfl_sklearn.privacy import SubsetSelection
    >>> mechanism = SubsetSelection(n_categories=15, epsilon=1.0)
    >>> mechanism.subset_size, round(mechanism.inside_probability, 3)
    (4, 0.497)
    """

    n_categories: int
    epsilon: float

    def __post_init__(self) -> None:
        super().__post_init__()
        valid = 2 <= self.n_categories < math.inf
        check_value("n_categories", self.n_categories, valid, "finite and at least 2")

    @cached_property
    def subset_size(self) -> int:
        """Size s of the subsets: k / (exp(epsilon) + 1) rounded to the smaller L2 risk, or 1."""
        ideal = self.n_categories * float(expit(-self.epsilon))
        sizes = {max(1, math.floor(ideal)), max(1, math.ceil(ideal))}
        return min(sizes, key=lambda size: (self._l2_risk(size), size))

    @property
    def inside_probability(self) -> float:
        """Probability s E / (s E + k - s) of the true category in a subset, E = exp(epsilon)."""
        return self._inside(self.subset_size)

    @property
    def noise_variance(self) -> float:
        """Largest variance that one report adds to an estimated frequency."""
        inside, other = self.inside_probability, self._other(self.subset_size)
        return max(inside * (1 - inside), other * (1 - other)) / (inside - other) ** 2

    def privatize(self, categories: Integers, rng: np.random.Generator) -> Bools:
        """One random subset per client: booleans (m, k), true for the categories it contains.

        Parameters
        ----------
        categories : ndarray of shape (m,) of int
            Each client's category, from 0 to k - 1.
        rng : numpy.random.Generator
            Source of the subsets.
        """
        m, k = len(categories), self.n_categories
        # The probability that the true category is missing is rounded up, which can only lower
        # epsilon, to at least one unit of the resolution, so that it never becomes impossible.
        outside = bernoulli(np.full(m, self._outside(self.subset_size)), math.ulp(0.0), rng)
        # The true category comes first or last, the others in random order.
        order = rng.random((m, k))
        order[np.arange(m), categories] = np.where(outside, 2.0, -1.0)
        chosen = np.argpartition(order, self.subset_size - 1, axis=1)[:, : self.subset_size]
        subsets = np.zeros((m, k), dtype=bool)
        np.put_along_axis(subsets, chosen, True, axis=1)
        return subsets

    def log_likelihood(self, subsets: Bools, probabilities: Floats) -> Floats:
        """Log-likelihood (m, h), up to a constant, of subsets under distributions of the category.

        Parameters
        ----------
        subsets : ndarray of shape (m, k) of bool
            The clients' reports, as :meth:`privatize` returns them.
        probabilities : ndarray of shape (k, h)
            One distribution of the categories per column.
        """
        # A subset is E times as likely if it contains the category. The floor keeps the logarithm
        # finite where exp(-epsilon) underflows.
        least = max(math.exp(-self.epsilon), 1e-300)
        return np.log(least + (1 - least) * (subsets.astype(float) @ probabilities))

    @property
    def _description(self) -> str:
        return f"subset selection, {self.subset_size} of {self.n_categories} categories"

    def _inside(self, size: int) -> float:
        """Probability that a subset contains the true category."""
        return size / (size + (self.n_categories - size) * math.exp(-self.epsilon))

    def _outside(self, size: int) -> float:
        """Probability that a subset lacks the true category, accurate where it is tiny."""
        rest = (self.n_categories - size) * math.exp(-self.epsilon)
        return rest / (size + rest)

    def _other(self, size: int) -> float:
        """Probability that a subset contains a given wrong category."""
        # Of the k - 1 wrong categories, s - 1 are in a subset with the true one, and s in another.
        inside = self._inside(size)
        return (inside * (size - 1) + (1 - inside) * size) / (self.n_categories - 1)

    def _l2_risk(self, size: int) -> float:
        """L2 risk of frequencies estimated from subsets of a size, up to a factor."""
        if size >= self.n_categories:
            return math.inf  # every subset would be the whole
        inside, other = self._inside(size), self._other(size)
        spread = inside * (1 - inside) + (self.n_categories - 1) * other * (1 - other)
        return spread / (inside - other) ** 2
