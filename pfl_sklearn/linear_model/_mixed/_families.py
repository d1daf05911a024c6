"""Families of responses: log-likelihood of a row and its derivatives in the linear predictors u.

A family says all that the fits, predictions, intervals and residuals of a regression ask of its
responses, so nothing outside asks which family it is. :class:`Family` lists it. With one predictor
a row, a new family needs `evaluate`, `score`, `curvature` and `curvature_slope`, and what of its
attributes differs; where the mean is exp(u), it also needs what :class:`LogLink` names.
"""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np
from scipy.linalg import helmert
from scipy.special import betaln, digamma, expit, gammaln, log_expit, softmax, zeta
from scipy.stats import nbinom, poisson

_LARGEST_LOG_MEAN = 600.0  # exponentials of 709 overflow; no data are likely at either
_FACTORS = 1000  # at most: a product of numbers below 2 is below 2^1000, and floats end at 2^1024
_SMALLEST_DISPERSION = 1e-13  # below it counts of 1e9 have the variance of Poisson counts to 1e-4
# Variance by a dispersion, over that of a Poisson count, from which its search starts: a root near
# 0 is nearly stationary.
_LEAST_DISPERSION = 0.02


class RowTerms(NamedTuple):
    """Log-likelihood of every row, its gradient in u, and its negative Hessian."""

    value: np.ndarray  # (..., n)
    score: np.ndarray  # (..., n, a)
    curvature: np.ndarray  # (..., n, a, a)


class Family:
    """Distribution of a row's response, given its linear predictors.

    A subclass with one predictor has ``evaluate(u, y)``: log-likelihoods without the part that is
    free of u (`constants`), and a `state` from which ``score(state, y)``, ``curvature(state, y)``
    (minus the second derivative) and ``curvature_slope(state, y)`` follow without another
    exponential. All else has a default, which a subclass may speed up.
    """

    evaluate: Callable[..., tuple[np.ndarray, np.ndarray]]
    score: Callable[..., np.ndarray]
    curvature: Callable[..., np.ndarray]
    curvature_slope: Callable[..., np.ndarray]

    link: ClassVar[str]  # "logit" or "log": how predictions average over predictors
    n_outputs = 1  # predictors a row
    coding = np.array([[1.0]])  # from them to the logits of the classes
    bounded = False  # whether the likelihood of any row may reach 1 as its predictor diverges
    needs_repeats = False  # whether a client's single row says nothing of the clients' variance
    longest_step = np.inf  # of a predictor, in Newton's method: exponentials grow fast
    discrete = True  # whether responses are whole numbers
    # Whether there is a `dispersion`, which the search estimates; the family at another one is
    # ``with_dispersion(dispersion)``. Differences of likelihoods then have to be exact.
    has_dispersion = False
    dispersion = 0.0
    limit: Any = None  # simpler family at a dispersion of 0; None if there is none

    def intercept_start(self, y, w, offset):
        """Predictor, but for the offset, from which the search for coefficients starts."""
        return 0.0

    def constants(self, y):
        """Part of the log-likelihoods (n,) that is free of u."""
        return np.zeros(len(y))

    def signs(self, y):
        """Factors of predictors that make all responses alike; derivatives are in the products."""
        return 1.0

    def is_complete(self, y):
        """Whether responses (n,) have a finite estimate without differences between clients."""
        return True

    def response_sums(self, y, w):
        """Weighted sums (K,) of the responses, or of the rows of every class."""
        return np.array([w @ y])

    def rising_directions(self, y):
        """Kinds (n,) of rows, and directions of u (n_kinds, r, a) that must not fall for each."""
        # A row's likelihood falls only where one of these does; with a maximum in u, it falls on
        # both sides.
        return np.zeros(len(y), dtype=np.intp), np.array([[[1.0], [-1.0]]])

    def terms(self, u, y, w):
        """RowTerms of predictors (..., n, 1), responses (..., n) and weights (..., n)."""
        value, state = self.evaluate(u[..., 0], y)
        score, curvature = self.score(state, y), self.curvature(state, y)
        if not np.all(w == 1):  # without weights we save three products
            value, score, curvature = w * value, w * score, w * curvature
        return RowTerms(value, score[..., None], curvature[..., None, None])

    def log_likelihood(self, u, y):
        """Log-likelihoods (...) of predictors (..., 1) and responses (...), without `constants`."""
        return self.evaluate(u[..., 0], y)[0]

    def log_likelihood_at_nodes(self, u, y, w):
        """Log-likelihoods (b, k), summed over rows, at predictors (b, n, k, 1) of nodes."""
        # Rows come first, as the sum has them; it overwrites the predictors.
        u, y, w = (values.swapaxes(0, 1) for values in (u[..., 0], y[..., None], w[..., None]))
        u = u * self.signs(y)
        return self.summed_log_likelihood(u, y, None if np.all(w == 1) else w, np.empty_like(u))

    def curvature_roots(self, u, y, w):
        """Roots (..., n, a, c) of the curvatures."""
        return np.sqrt(self.terms(u, y, w).curvature)

    def curvature_slopes(self, u, y, w, spread):
        """Derivatives (..., n, 1) of sum(curvature * spread) in u; spread is (..., n, 1, 1)."""
        state = self.evaluate(u[..., 0], y)[1]
        return (w * self.curvature_slope(state, y) * spread[..., 0, 0])[..., None]

    def summed_log_likelihood(self, u, y, w, state):
        """Log-likelihoods (b,) summed over rows (n, b); overwrites u and `state`. w may be None."""
        value, state[...] = self.evaluate(u, y)
        return value.sum(axis=0) if w is None else (w * value).sum(axis=0)


class _Classes(Family):
    """Classes, with labels 0 to K - 1 and the logit link."""

    link = "logit"
    bounded = needs_repeats = True

    def is_complete(self, y):
        return len(np.unique(y)) == self.n_outputs + 1

    def response_sums(self, y, w):
        return np.bincount(y, w, minlength=self.n_outputs + 1)

    def rising_directions(self, y):
        """Labels, and for each what its logit has over those of the others."""
        coding = np.array([[0.0], [1.0]]) if self.n_outputs == 1 else self.coding
        others = [np.delete(coding, k, axis=0) for k in range(len(coding))]
        return y.astype(np.intp), coding[:, None] - np.array(others)


class Binomial(_Classes):
    """Two classes, labels 0 and 1; u is the logit of 1.

    The state is the probability of the label that a row does not have, with all its digits.
    """

    def signs(self, y):
        """Signs that make predictors the log odds of the row's own label."""
        return np.where(y > 0, 1.0, -1.0)

    def log_likelihood(self, u, y):
        return log_expit(u[..., 0] * self.signs(y))

    def score(self, state, y):
        return state

    def curvature(self, state, y):
        return state - state**2

    def curvature_slope(self, state, y):
        return (state - state**2) * (2 * state - 1)

    def terms(self, u, y, w):
        sign = self.signs(y)
        odds = u[..., 0] * sign
        # log p = min(u, 0) - log(1 + exp(-|u|)), which neither overflows nor cancels.
        low = np.minimum(odds, 0.0)
        small = np.exp(-np.abs(odds))
        total = 1 + small
        value = low - np.log(total)
        score = np.exp(low - odds)  # a second exponential is cheaper than a choice
        score /= total
        score *= sign
        small /= total
        small /= total
        if not np.all(w == 1):  # without weights we save three products
            value, score, small = w * value, w * score, w * small
        return RowTerms(value, score[..., None], small[..., None, None])

    def curvature_slopes(self, u, y, w, spread):
        half = np.tanh(u[..., 0] / 2)  # 2 p - 1; p (1 - p) has the slope -p (1 - p) (2 p - 1)
        return (-0.25 * w * (1 - half**2) * half * spread[..., 0, 0])[..., None]

    def summed_log_likelihood(self, u, y, w, state):
        np.minimum(u, 0.0, out=state)
        value = state.sum(axis=0) if w is None else (w * state).sum(axis=0)
        state -= u
        np.exp(state, out=state)
        np.abs(u, out=u)
        np.negative(u, out=u)
        np.exp(u, out=u)
        u += 1.0
        state /= u
        if w is None:
            return value - _log_product(u)  # one logarithm for many rows
        return value - (w * np.log(u, out=u)).sum(axis=0)


class Categorical(_Classes):
    """K classes, labels 0 to K - 1, in symmetric coding.

    The logits are ``coding @ u`` with K - 1 orthonormal contrasts: the direction that changes no
    probability is left out. Normal deviations that are independent over the classes are independent
    over the contrasts, with the same variance.
    """

    def __init__(self, n_classes):
        self.n_outputs = n_classes - 1
        self.coding = helmert_contrasts(n_classes)
        outer = self.coding[:, :, None] * self.coding[:, None, :]
        self._squares = outer.reshape(n_classes, -1)  # of every class, so that sums are products

    def log_likelihood(self, u, y):
        logits = u @ self.coding.T
        logits -= logits.max(axis=-1, keepdims=True)
        labels = np.broadcast_to(y, logits.shape[:-1])
        chosen = np.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
        return chosen - np.log(np.exp(logits, out=logits).sum(axis=-1))

    def log_likelihood_at_nodes(self, u, y, w):
        return np.einsum("bn,bnk->bk", w, self.log_likelihood(u, y[..., None]))

    def terms(self, u, y, w):
        logits = u @ self.coding.T
        # The largest logit is 0, so that no exponential overflows.
        logits -= logits.max(axis=-1, keepdims=True)
        p = np.exp(logits)
        total = p.sum(axis=-1)
        p /= total[..., None]
        chosen = np.take_along_axis(logits, y[..., None], axis=-1)[..., 0]
        mean = p @ self.coding
        score = w[..., None] * (self.coding[y] - mean)
        square = (p @ self._squares).reshape(*mean.shape, -1)
        weight = square - mean[..., :, None] * mean[..., None, :]
        return RowTerms(w * (chosen - np.log(total)), score, w[..., None, None] * weight)

    def curvature_roots(self, u, y, w):
        p = self._probabilities(u)
        mean = p @ self.coding
        centred = np.sqrt(p)[..., None, :] * (self.coding.T - mean[..., :, None])
        return np.sqrt(w)[..., None, None] * centred

    def curvature_slopes(self, u, y, w, spread):
        p = self._probabilities(u)
        variances = spread.reshape(*p.shape[:-1], -1) @ self._squares.T
        cross = (spread @ (p @ self.coding)[..., None])[..., 0] @ self.coding.T
        centre = np.sum(p * (2 * cross - variances), axis=-1, keepdims=True)
        return w[..., None] * ((p * (variances - 2 * cross + centre)) @ self.coding)

    def _probabilities(self, u):
        """Class probabilities (..., n, K)."""
        return softmax(u @ self.coding.T, axis=-1)


class LogLink(Family):
    """Positive responses with the mean exp(u).

    A subclass has ``variance(mean)``; ``distribution(mean)``, from scipy; and ``threshold(y)``, the
    mean and the variance of a random number that u exceeds if and only if a response exceeds y.
    """

    link = "log"
    longest_step = 3.0

    def intercept_start(self, y, w, offset):
        """Log of the rate: responses over exp(offset)."""
        return float(np.log(w @ y) - np.log(w @ bounded_exp(offset)))

    def mean(self, u):
        """Means of responses."""
        return bounded_exp(u)


class Poisson(LogLink):
    """Poisson counts with mean exp(u), which is the state."""

    def evaluate(self, u, y):
        mean = bounded_exp(u)
        return y * u - mean, mean

    def score(self, state, y):
        return y - state

    def curvature(self, state, y):
        return state

    curvature_slope = curvature  # an exponential is its own derivative

    def constants(self, y):
        return -gammaln(y + 1)

    def is_complete(self, y):
        return bool(y.any())

    def rising_directions(self, y):
        """Whether a count is above 0; one of 0 wants its mean to fall."""
        return (y > 0).astype(np.intp), np.array([[[-1.0], [-1.0]], [[1.0], [-1.0]]])

    def variance(self, mean):
        return mean

    def distribution(self, mean):
        return poisson(mean)

    def threshold(self, y):
        """Moments of the log of a gamma variable with shape y + 1: the time of event y + 1."""
        return digamma(y + 1), zeta(2, y + 1)  # zeta(2, a) is the trigamma function


class NegativeBinomial(LogLink):
    """Negative binomial counts with mean exp(u) and variance mean + dispersion * mean^2.

    With k = 1 / dispersion this is the likelihood of y successes in y + k trials, whose probability
    is the state and whose logit is u - log k.
    """

    needs_repeats = True  # the dispersion between rows looks like that between clients
    has_dispersion = True
    limit = Poisson()
    is_complete, rising_directions = Poisson.is_complete, Poisson.rising_directions

    def __init__(self, dispersion=1.0):
        self.dispersion = dispersion
        self._k = 1 / dispersion

    def with_dispersion(self, dispersion):
        """The family at another dispersion, 0 or more."""
        if dispersion < _SMALLEST_DISPERSION:
            return _NegativeBinomialLimit()
        return NegativeBinomial(dispersion)

    def least_dispersion(self, mean):
        """Least dispersion from which a search starts, for counts with this mean."""
        return _LEAST_DISPERSION / max(mean, 1.0)

    def dispersion_by_moments(self, y, mean, w):
        """Dispersion of counts with means (n,) and weights; half of it, as clients differ, too."""
        return 0.5 * (w @ ((y - mean) ** 2 - mean)) / (w @ mean**2)

    def evaluate(self, u, y):
        odds = u - np.log(self._k)
        high, small = np.maximum(odds, 0.0), np.exp(-np.abs(odds))
        # y log p + k log(1 - p), which neither overflows nor cancels.
        value = -self._k * high - y * (high - odds) - (y + self._k) * np.log1p(small)
        return value, expit(odds)

    def score(self, state, y):
        return y - (y + self._k) * state

    def curvature(self, state, y):
        return (y + self._k) * state * (1 - state)

    def curvature_slope(self, state, y):
        return self.curvature(state, y) * (1 - 2 * state)

    def constants(self, y):
        # log Gamma(y + k) - log Gamma(k) - log y!, by a function that does not cancel for large k.
        result, positive = np.zeros(len(y)), y > 0
        result[positive] = -betaln(self._k, y[positive]) - np.log(y[positive])
        return result

    def variance(self, mean):
        return mean * (1 + self.dispersion * mean)

    def distribution(self, mean):
        return nbinom(self._k, self._k / (self._k + mean))

    def threshold(self, y):
        """Moments as of Poisson counts, less those of the log of the gamma factor of their mean."""
        centre, width = self.limit.threshold(y)
        return centre - digamma(self._k) + np.log(self._k), width + zeta(2, self._k)


class _NegativeBinomialLimit(Poisson):
    """Negative binomial counts at a dispersion of 0, where an estimate of it may end."""

    has_dispersion, limit = True, Poisson()
    with_dispersion = NegativeBinomial.with_dispersion
    least_dispersion = NegativeBinomial.least_dispersion


def class_family(n_classes):
    """The family of labels of so many classes."""
    return Binomial() if n_classes == 2 else Categorical(n_classes)


def helmert_contrasts(n_classes):
    """Orthonormal contrasts (K, K - 1): columns of length 1 that sum to 0."""
    return np.ascontiguousarray(helmert(n_classes).T)


def bounded_exp(u):
    """Exponentials that do not overflow."""
    return np.exp(np.minimum(u, _LARGEST_LOG_MEAN))


def _log_product(values):
    """Logs (b,) of the products over rows of values (n, b) between 1 and 2."""
    parts = [values[k : k + _FACTORS].prod(axis=0) for k in range(0, len(values), _FACTORS)]
    return sum(np.log(part) for part in parts)
