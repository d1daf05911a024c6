"""Class outcomes: log-likelihood of a row and its derivatives in the linear predictors.

There is one predictor u (..., a) less than there are classes. For two classes u is the logit of
the second one. For K classes the logits are ``coding @ u`` with orthonormal contrasts: softmax
in symmetric coding, without the direction that changes no probability. Normal deviations that are
independent over the classes are independent over the contrasts too, with the same variance.
"""

from typing import NamedTuple

import numpy as np
from scipy.special import softmax


class RowTerms(NamedTuple):
    """Log-likelihood of every row, its gradient in u, and its negative Hessian."""

    value: np.ndarray  # (..., n)
    score: np.ndarray  # (..., n, a)
    weight: np.ndarray  # (..., n, a, a)


class BinaryLogit:
    """Two classes, labels 0 and 1."""

    n_outputs = 1
    coding = np.array([[1.0]])  # reported logits: that of the second class

    def terms(self, u, y, w):
        """RowTerms of predictors (..., n, 1), labels (..., n) and weights (..., n)."""
        sign = np.where(y > 0, 1.0, -1.0)
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

    def roots(self, u, w):
        """Roots (..., n, 1, 1) of the weights."""
        small = np.exp(-np.abs(u[..., 0]))
        return (np.sqrt(w * small) / (1 + small))[..., None, None]

    def weight_slopes(self, u, w, spread):
        """Derivatives (..., n, 1) of sum(weight * spread) in u; spread is (..., n, 1, 1)."""
        half = np.tanh(u[..., 0] / 2)  # 2 p - 1; p (1 - p) has the slope -p (1 - p) (2 p - 1)
        return (-0.25 * w * (1 - half**2) * half * spread[..., 0, 0])[..., None]


class SoftmaxLogit:
    """K classes, labels 0 to K - 1."""

    def __init__(self, n_classes):
        self.n_outputs = n_classes - 1
        self.coding = helmert_contrasts(n_classes)
        outer = self.coding[:, :, None] * self.coding[:, None, :]
        self._squares = outer.reshape(n_classes, -1)  # of every class, so that sums are products

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

    def roots(self, u, w):
        """Roots (..., n, a, K) of the weights."""
        p = self._probabilities(u)
        mean = p @ self.coding
        centred = np.sqrt(p)[..., None, :] * (self.coding.T - mean[..., :, None])
        return np.sqrt(w)[..., None, None] * centred

    def weight_slopes(self, u, w, spread):
        """Derivatives (..., n, a) of sum(weight * spread) in u; spread (..., n, a, a) symmetric."""
        p = self._probabilities(u)
        own = spread.reshape(*p.shape[:-1], -1) @ self._squares.T
        cross = (spread @ (p @ self.coding)[..., None])[..., 0] @ self.coding.T
        centre = np.sum(p * (2 * cross - own), axis=-1, keepdims=True)
        return w[..., None] * ((p * (own - 2 * cross + centre)) @ self.coding)

    def _probabilities(self, u):
        """Class probabilities (..., n, K)."""
        return softmax(u @ self.coding.T, axis=-1)


def outcome_of(n_classes):
    """The outcome for a number of classes."""
    return BinaryLogit() if n_classes == 2 else SoftmaxLogit(n_classes)


def helmert_contrasts(n_classes):
    """Orthonormal contrasts (K, K - 1): columns of length 1 that sum to 0."""
    columns = np.triu(np.ones((n_classes, n_classes - 1)))
    k = np.arange(1, n_classes)
    columns[k, k - 1] = -k
    return columns / np.sqrt(k * (k + 1.0))
