"""Outcomes of rows: log-likelihood of a row and its derivatives in the linear predictors u.

An outcome has `n_outputs` predictors a row. Those of one predictor say four things of it, each from
what `at` returns: the log-likelihood less a part that is free of u (`constants`), its slope, its
curvature (minus the second derivative), and the slope of the curvature, `bend`. Quadrature,
Laplace's approximation, intervals and residuals ask for no more.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.special import betaln, expit, gammaln, log_expit, softmax
from scipy.stats import nbinom, poisson

_LARGEST_LOG_MEAN = 600.0  # exponentials of 709 overflow; no data are likely at either
_FACTORS = 1000  # at most: a product of numbers below 2 is below 2^1000, and floats end at 2^1024
_SMALLEST_DISPERSION = 1e-13  # below it counts of 1e9 have the variance of Poisson counts to 1e-4


class RowTerms(NamedTuple):
    """Log-likelihood of every row, its gradient in u, and its negative Hessian."""

    value: np.ndarray  # (..., n)
    score: np.ndarray  # (..., n, a)
    weight: np.ndarray  # (..., n, a, a)


class OnePredictor:
    """Outcomes with one linear predictor a row.

    A subclass has ``at(u, y)``, which returns the log-likelihoods and a `state`: the array from
    which the derivatives come without another exponential.
    """

    at: Callable[..., tuple[np.ndarray, np.ndarray]]
    slope: Callable[..., np.ndarray]
    curvature: Callable[..., np.ndarray]
    bend: Callable[..., np.ndarray]

    n_outputs = 1
    coding = np.array([[1.0]])
    bounded = False  # whether the likelihood of any row may reach 1 as its predictor diverges
    needs_repeats = False  # whether a client's single row says nothing of the clients' variance
    longest_step = np.inf  # of a predictor, in Newton's method: exponentials grow fast
    differenced = False  # whether a search takes differences of likelihoods, which have to be exact

    def level(self, y, w, offset):
        """Predictor, but for the offset, from which the search for coefficients starts."""
        return 0.0

    def constants(self, y):
        """Part of the log-likelihoods (n,) that is free of u."""
        return np.zeros(len(y))

    def signs(self, y):
        """Factors of predictors that make all responses alike; None if there are none.

        `summed`, `slope` and the other derivatives of a state are in predictors times these.
        """
        return None

    def terms(self, u, y, w):
        """RowTerms of predictors (..., n, 1), responses (..., n) and weights (..., n)."""
        value, state = self.at(u[..., 0], y)
        score, weight = self.slope(state, y), self.curvature(state, y)
        if not np.all(w == 1):  # without weights we save three products
            value, score, weight = w * value, w * score, w * weight
        return RowTerms(value, score[..., None], weight[..., None, None])

    def log_likelihoods(self, u, y):
        """Log-likelihoods (...) of predictors (..., 1) and responses (...), without `constants`."""
        return self.at(u[..., 0], y)[0]

    def likelihoods_at_nodes(self, u, y, w):
        """Log-likelihoods (b, k), summed over rows, at predictors (b, n, k, 1) of nodes."""
        # Rows come first, as `summed` has them; it overwrites the predictors.
        u, y, w = (each.swapaxes(0, 1) for each in (u[..., 0], y[..., None], w[..., None]))
        signs = self.signs(y)
        u = u.copy() if signs is None else u * signs
        return self.summed(u, y, None if np.all(w == 1) else w, np.empty_like(u))

    def roots(self, u, y, w):
        """Roots (..., n, 1, 1) of the weights."""
        state = self.at(u[..., 0], y)[1]
        return np.sqrt(w * self.curvature(state, y))[..., None, None]

    def weight_slopes(self, u, y, w, spread):
        """Derivatives (..., n, 1) of sum(weight * spread) in u; spread is (..., n, 1, 1)."""
        state = self.at(u[..., 0], y)[1]
        return (w * self.bend(state, y) * spread[..., 0, 0])[..., None]

    def summed(self, u, y, w, state):
        """Log-likelihoods (b,), summed over rows (n, b); `state` becomes the state, `u` is lost."""
        value, state[...] = self.at(u, y)
        return value.sum(axis=0) if w is None else (w * value).sum(axis=0)


class Binomial(OnePredictor):
    """Two classes, labels 0 and 1; u is the logit of 1.

    The state is the probability of the label that a row does not have: all its digits are there,
    however small it is.
    """

    bounded = needs_repeats = True

    def signs(self, y):
        """Signs that make predictors the log odds of the row's own label."""
        return np.where(y > 0, 1.0, -1.0)

    def log_likelihoods(self, u, y):
        """Log-likelihoods (...) of predictors (..., 1) and labels (...)."""
        return log_expit(u[..., 0] * self.signs(y))

    def slope(self, state, y):
        """First derivative of the log-likelihood."""
        return state

    def curvature(self, state, y):
        """Minus its second derivative."""
        return state - state**2

    def bend(self, state, y):
        """First derivative of the curvature."""
        return (state - state**2) * (2 * state - 1)

    def terms(self, u, y, w):
        """As of any outcome, with all digits of the curvature."""
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

    def roots(self, u, y, w):
        """Roots (..., n, 1, 1) of the weights."""
        small = np.exp(-np.abs(u[..., 0]))
        return (np.sqrt(w * small) / (1 + small))[..., None, None]

    def weight_slopes(self, u, y, w, spread):
        """Derivatives (..., n, 1) of sum(weight * spread) in u; spread is (..., n, 1, 1)."""
        half = np.tanh(u[..., 0] / 2)  # 2 p - 1; p (1 - p) has the slope -p (1 - p) (2 p - 1)
        return (-0.25 * w * (1 - half**2) * half * spread[..., 0, 0])[..., None]

    def summed(self, u, y, w, state):
        """Log-likelihoods (b,), summed over rows (n, b); `state` becomes the state, `u` is lost."""
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


class Categorical:
    """K classes, labels 0 to K - 1.

    There is one predictor less than there are classes: the logits are ``coding @ u`` with
    orthonormal contrasts, that is softmax in symmetric coding, without the direction that changes
    no probability. Normal deviations that are independent over the classes are independent over the
    contrasts too, with the same variance.
    """

    bounded = needs_repeats = True
    longest_step = np.inf

    def __init__(self, n_classes):
        self.n_outputs = n_classes - 1
        self.coding = helmert_contrasts(n_classes)
        outer = self.coding[:, :, None] * self.coding[:, None, :]
        self._squares = outer.reshape(n_classes, -1)  # of every class, so that sums are products

    def level(self, y, w, offset):
        """Predictors from which the search for coefficients starts."""
        return 0.0

    def constants(self, y):
        """Part of the log-likelihoods (n,) that is free of u."""
        return np.zeros(len(y))

    def log_likelihoods(self, u, y):
        """Log-likelihoods (...) of predictors (..., a) and labels (...)."""
        logits = u @ self.coding.T
        logits -= logits.max(axis=-1, keepdims=True)
        labels = np.broadcast_to(y, logits.shape[:-1])
        chosen = np.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
        return chosen - np.log(np.exp(logits, out=logits).sum(axis=-1))

    def likelihoods_at_nodes(self, u, y, w):
        """Log-likelihoods (b, k), summed over rows, at predictors (b, n, k, a) of nodes."""
        return np.einsum("bn,bnk->bk", w, self.log_likelihoods(u, y[..., None]))

    def terms(self, u, y, w):
        """RowTerms of predictors (..., n, a), labels (..., n) and weights (..., n)."""
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

    def roots(self, u, y, w):
        """Roots (..., n, a, K) of the weights."""
        p = self._probabilities(u)
        mean = p @ self.coding
        centred = np.sqrt(p)[..., None, :] * (self.coding.T - mean[..., :, None])
        return np.sqrt(w)[..., None, None] * centred

    def weight_slopes(self, u, y, w, spread):
        """Derivatives (..., n, a) of sum(weight * spread) in u; spread (..., n, a, a) symmetric."""
        p = self._probabilities(u)
        own = spread.reshape(*p.shape[:-1], -1) @ self._squares.T
        cross = (spread @ (p @ self.coding)[..., None])[..., 0] @ self.coding.T
        centre = np.sum(p * (2 * cross - own), axis=-1, keepdims=True)
        return w[..., None] * ((p * (own - 2 * cross + centre)) @ self.coding)

    def _probabilities(self, u):
        """Class probabilities (..., n, K)."""
        return softmax(u @ self.coding.T, axis=-1)


class _Count(OnePredictor):
    """Counts whose mean is exp(u)."""

    longest_step = 3.0

    def level(self, y, w, offset):
        """Log of the rate: counts over exp(offset)."""
        return float(np.log(w @ y) - np.log(w @ bounded_exp(offset)))


class Poisson(_Count):
    """Poisson counts with mean exp(u), which is the state."""

    dispersion = 0.0

    def at(self, u, y):
        """Log-likelihoods, and the state."""
        mean = bounded_exp(u)
        return y * u - mean, mean

    def slope(self, state, y):
        """First derivative of the log-likelihood."""
        return y - state

    def curvature(self, state, y):
        """Minus its second derivative."""
        return state

    def bend(self, state, y):
        """First derivative of the curvature."""
        return state

    def constants(self, y):
        """Part of the log-likelihoods (n,) that is free of u."""
        return -gammaln(y + 1)

    def distribution(self, mean):
        """The distribution of counts with these means, from scipy."""
        return poisson(mean)


class NegativeBinomial(_Count):
    """Negative binomial counts with mean exp(u) and variance mean + dispersion * mean^2.

    With k = 1 / dispersion, it is the likelihood of y successes in y + k trials whose logit is
    u - log k. The state is that probability.
    """

    needs_repeats = True  # the dispersion between rows looks like that between clients
    differenced = True

    def __init__(self, dispersion):
        self.dispersion = dispersion
        self._k = 1 / dispersion

    def at(self, u, y):
        """Log-likelihoods, and the state."""
        odds = u - np.log(self._k)
        high, small = np.maximum(odds, 0.0), np.exp(-np.abs(odds))
        # y log p + k log(1 - p), which neither overflows nor cancels.
        value = -self._k * high - y * (high - odds) - (y + self._k) * np.log1p(small)
        return value, expit(odds)

    def slope(self, state, y):
        """First derivative of the log-likelihood."""
        return y - (y + self._k) * state

    def curvature(self, state, y):
        """Minus its second derivative."""
        return (y + self._k) * state * (1 - state)

    def bend(self, state, y):
        """First derivative of the curvature."""
        return self.curvature(state, y) * (1 - 2 * state)

    def constants(self, y):
        """Part of the log-likelihoods (n,) that is free of u."""
        # log Gamma(y + k) - log Gamma(k) - log y!, by a function that does not cancel for large k.
        result, positive = np.zeros(len(y)), y > 0
        result[positive] = -betaln(self._k, y[positive]) - np.log(y[positive])
        return result

    def distribution(self, mean):
        """The distribution of counts with these means, from scipy."""
        return nbinom(self._k, self._k / (self._k + mean))


def class_outcome(n_classes):
    """The outcome for a number of classes."""
    return Binomial() if n_classes == 2 else Categorical(n_classes)


def count_outcome(dispersion):
    """The outcome for counts with a variance of mean + dispersion * mean^2."""
    return Poisson() if dispersion < _SMALLEST_DISPERSION else NegativeBinomial(dispersion)


def helmert_contrasts(n_classes):
    """Orthonormal contrasts (K, K - 1): columns of length 1 that sum to 0."""
    columns = np.triu(np.ones((n_classes, n_classes - 1)))
    k = np.arange(1, n_classes)
    columns[k, k - 1] = -k
    return columns / np.sqrt(k * (k + 1.0))


def bounded_exp(u):
    """Exponentials that do not overflow."""
    return np.exp(np.minimum(u, _LARGEST_LOG_MEAN))


def _log_product(values):
    """Logs (b,) of the products over rows of values (n, b) between 1 and 2."""
    parts = [values[k : k + _FACTORS].prod(axis=0) for k in range(0, len(values), _FACTORS)]
    return sum(np.log(part) for part in parts)
