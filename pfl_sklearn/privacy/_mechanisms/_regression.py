"""Bounded messages for linear regression: second moments of rows, or of clients' rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from pfl_sklearn._typing import Floats
from pfl_sklearn.privacy._accounting._events import check_value
from pfl_sklearn.privacy._mechanisms._report_fields import check_positive

_HUGE = 1e150  # largest value in units of its bound; squares beyond it would overflow
_EXTRA_SHARE = 1 / 8  # norm of an extra entry, as a share of the norm of the moments
_SQUARE_SHARE = 1 / 4  # likewise of the squared target, under the relation where it costs something


class NoisyMoments(NamedTuple):
    """Sums of moments in the units of the message, and the noise on them."""

    gram: Floats  # (p, p); the noise has sd `std`, and `std` / sqrt(2) off the diagonal
    cross: Floats  # (p,), with the target; sd `std` / sqrt(2)
    square: float | None  # of the target
    weight: float  # number of rows or clients; those scaled down count less than one
    inverse_sizes: float | None  # sum over clients of 1 / (number of rows)
    std: float
    square_std: float
    weight_std: float
    inverse_sizes_std: float


@dataclass(frozen=True)
class RegressionMoments:
    r"""Bounded message of a row, or of a client, for linear regression.

    With v = (:math:`\kappa`, x / `feature_bound`, :math:`\tau` y / `target_bound`) the message is
    the upper triangle of the matrix v v', with off-diagonal entries times :math:`\sqrt 2`. So its
    L2 norm is the Frobenius norm of the matrix. Rows outside the bounds are scaled down, all of v
    by one factor. The message of a client is the mean over its rows.

    Parameters
    ----------
    n_features : int
        Number of features.
    feature_bound : float
        L2 bound on the features of a row. Choose both bounds without looking at the data.
    target_bound : float
        Bound on the absolute target.
    intercept : bool, default=True
        Whether v has the constant :math:`\kappa`. Without it the message has one more entry, a
        constant times the row's squared factor, whose sum replaces the number of rows.
    relation : {"replace_one", "add_remove"}, default="replace_one"
        The neighbouring relation that the scales are chosen for.
    square : bool, default=True
        Whether the message has the squared target. Under "replace_one" the squared target costs
        nothing and is always included.
    sizes : bool, default=False
        Whether a client's message has the inverse of its number of rows.

    Notes
    -----
    *Sensitivity.* A row within the bounds has a message of norm at most C, that of a row at both
    bounds; so has the mean of such messages. C is the sensitivity when one row (or client) is added
    or removed. Under replacement it is :math:`\sqrt 2 C` and not 2 C: two positive semi-definite
    matrices have a non-negative inner product, so :math:`|M_1 - M_2|^2 \le |M_1|^2 + |M_2|^2`.
    Orthogonal rows attain the bound. With the squared target scaled by w < 1 (0 leaves it out), the
    inner product can be as low as :math:`-(1 - w^2) \tau^4`: under replacement the squared target
    is free.

    *Scaling.* A row whose target exceeds its bound is scaled, features included, until the target
    is at the bound. If :math:`|v|` is then still too large, the row is scaled until its message
    would have norm C with the target at its bound. So as long as targets are within their bound,
    the factor depends on the features alone: a weighted regression, without the bias of clipping x
    and y separately.

    *Scales.* :math:`\kappa^2 = 1 / (2 \sqrt d)` and, with g = (d + 1) / 9, :math:`\tau^2 =
    (\sqrt{1 + 8 g} - 1) / (4 g)` under replacement and :math:`1 / \sqrt{2 g}` otherwise. They come
    within 3 % of the smallest error, to first order in the noise, of a typical regression.

    References
    ----------
    Wang, Y.-X. (2018). Revisiting differentially private linear regression: optimal and adaptive
    prediction and estimation in unbounded domain. UAI. (Noise on the moments, with x'x and x'y
    bounded and noised one by one.)

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn.privacy import RegressionMoments
    >>> moments = RegressionMoments(2, feature_bound=2.0, target_bound=10.0)
    >>> message = moments.messages(np.array([[6.0, 8.0]]), np.array([30.0]))
    >>> bool(np.linalg.norm(message) <= moments.add_remove_sensitivity)
    True
    >>> round(moments.sensitivity / moments.add_remove_sensitivity, 4)
    1.4142
    """

    n_features: int
    feature_bound: float
    target_bound: float
    intercept: bool = True
    relation: str = "replace_one"
    square: bool = True
    sizes: bool = False

    def __post_init__(self) -> None:
        valid = 1 <= self.n_features < math.inf
        check_value("n_features", self.n_features, valid, "finite and at least 1")
        for name in ("feature_bound", "target_bound"):
            check_positive(name, getattr(self, name))
        valid = self.relation in ("replace_one", "add_remove")
        check_value("relation", self.relation, valid, "'replace_one' or 'add_remove'")

    @property
    def sensitivity(self) -> float:
        """L2 sensitivity of the sum of messages under `relation`."""
        replaced = self.relation == "replace_one"
        return self.replace_one_sensitivity if replaced else self.add_remove_sensitivity

    @property
    def add_remove_sensitivity(self) -> float:
        """L2 sensitivity of the sum of messages when one of them is added or removed."""
        return math.hypot(self._row_norm, self._size_scale * self.sizes)

    @property
    def replace_one_sensitivity(self) -> float:
        """L2 sensitivity of the sum of messages when one of them is replaced."""
        # |M_1 - M_2|^2 <= 2 C^2 - 2 <M_1, M_2>, and without the whole squared target the inner
        # product can be as low as -(1 - w^2) tau^4.
        opposed = self.target_scale**4 * (1 - self._square_scale**2)
        rows = math.sqrt(2 * self._row_norm**2 + 2 * opposed)
        return math.hypot(rows, self._size_scale * self.sizes)

    @property
    def column_scales(self) -> Floats:
        """Factors (p,) of the intercept, if there is one, and the features."""
        features = np.full(self.n_features, 1 / self.feature_bound)
        return np.append(self.intercept_scale, features) if self.intercept else features

    @property
    def intercept_scale(self) -> float:
        r"""The constant :math:`\kappa`."""
        return math.sqrt(0.5 / math.sqrt(max(self.n_features, 1)))

    @cached_property
    def target_scale(self) -> float:
        r"""The factor :math:`\tau` of targets in units of their bound."""
        # From the first-order error of a regression where the mean and the linear part of the
        # target each have a root mean square of a quarter of its bound, and the features one of 1 /
        # sqrt(2).
        g = (self.n_features + 1) / 9
        if self.relation == "add_remove":
            return (2 * g) ** -0.25
        return math.sqrt((math.sqrt(1 + 8 * g) - 1) / (4 * g))

    @cached_property
    def _features_square(self) -> float:
        """Squared norm of the intercept and the features of a row at the bound."""
        return 1 + self.intercept * self.intercept_scale**2

    @cached_property
    def _base_norm(self) -> float:
        """Norm of the moments of a row at both bounds; with the squared target if it is free."""
        full = (self._features_square + self.target_scale**2) ** 2
        return math.sqrt(full - self.target_scale**4 * (self.relation == "add_remove"))

    @cached_property
    def _square_scale(self) -> float:
        """Factor of the squared target; 0 leaves it out."""
        if self.relation == "replace_one":
            return 1.0  # it keeps the inner product of two messages from being negative
        return min(1.0, _SQUARE_SHARE * self._base_norm / self.target_scale**2) * self.square

    @cached_property
    def _constant(self) -> float:
        """Norm of the message of a row at the bounds, without the parts of gram and cross."""
        weight = 0.0 if self.intercept else self._weight_scale
        return math.hypot(self._square_scale * self.target_scale**2, weight)

    @property
    def _weight_scale(self) -> float:
        """Summand of a row within the bounds in the entry that counts rows."""
        return self.intercept_scale**2 if self.intercept else _EXTRA_SHARE * self._base_norm

    @property
    def _size_scale(self) -> float:
        """Factor of the inverse number of a client's rows in its message."""
        return _EXTRA_SHARE * self._base_norm

    @cached_property
    def _row_norm(self) -> float:
        """Largest norm of the message of a row."""
        return float(self._norms(np.array([self._features_square]))[0])

    def _norms(self, squares: Floats) -> Floats:
        """Norms (n,) of messages of rows with targets at the bound, from |z|^2 (n,)."""
        # |vv'|^2 = (|z|^2 + tau^2)^2 less the target's own tau^4, which `_constant` has scaled. As
        # roots, since squares of squares would overflow.
        moments = np.sqrt(squares) * np.sqrt(squares + 2 * self.target_scale**2)
        return np.hypot(moments, self._constant)

    def scaled(self, X: Floats, y: Floats) -> tuple[Floats, Floats]:
        """Rows scaled to the bounds.

        Parameters
        ----------
        X : ndarray of shape (n, d)
            Features, in the units of `feature_bound`. NaN counts as 0.
        y : ndarray of shape (n,)
            Targets, in the units of `target_bound`. NaN counts as 0.

        Returns
        -------
        v : ndarray of shape (n, p + 1)
            The scaled rows: the constant, if there is an intercept, the features and the target.
        factors : ndarray of shape (n,)
            Factor of each row; 1 within the bounds.
        """
        # Divided by the bounds, then cut: infinity becomes a huge value, whose row is scaled.
        with np.errstate(over="ignore"):
            features = np.nan_to_num(X / self.feature_bound, nan=0.0)
            target = np.nan_to_num(y / self.target_bound, nan=0.0)
        v = np.empty((len(y), self.n_features + self.intercept + 1))
        v[:, 0] = self.intercept_scale  # overwritten if there is no intercept
        np.clip(features, -_HUGE, _HUGE, out=v[:, self.intercept : -1])
        np.clip(target, -_HUGE, _HUGE, out=v[:, -1])
        # One factor for the whole row: clipping x and y separately would bias the slope.
        factors = 1 / np.maximum(np.abs(v[:, -1]), 1.0)
        squares = np.einsum("np,np->n", v[:, :-1], v[:, :-1]) * factors**2
        outside = squares > self._features_square
        # As if the target were at its bound: a factor that depended on targets within the bound
        # would give large residuals less weight. The root, as messages are products of two entries.
        factors[outside] *= np.sqrt(self._row_norm / self._norms(squares[outside]))
        v[:, -1] *= self.target_scale
        return v * factors[:, None], factors

    def messages(self, X: Floats, y: Floats) -> Floats:
        """Messages (n, length) of rows, without the entry for `sizes`.

        Parameters
        ----------
        X, y : ndarrays of shape (n, d) and (n,)
            As in :meth:`scaled`.
        """
        v, factors = self.scaled(X, y)
        return self._pack(v[:, :, None] * v[:, None, :], factors**2)

    def total(
        self, X: Floats, y: Floats, shares: Floats | None = None, inverse_sizes: float = 0.0
    ) -> Floats:
        """Sums (..., length) of the messages of rows, or of clients.

        Parameters
        ----------
        X : ndarray of shape (..., n, d)
            As in :meth:`scaled`. Axes before the last two hold tables with a sum each, such as
            those of clients.
        y : ndarray of shape (..., n)
            As in :meth:`scaled`.
        shares : ndarray of shape (..., n) or None, default=None
            Weight of each row. One over the number of rows of its client gives the sum of the
            clients' messages. None gives every row the weight 1.
        inverse_sizes : float, default=0.0
            Sum over clients of one over the client's number of rows. Read only with `sizes`.
        """
        v, factors = self.scaled(X.reshape(y.size, X.shape[-1]), y.ravel())
        if shares is not None:
            # Shares sum to 1 over a client's rows: the mean of messages in the ball is in the ball.
            roots = np.sqrt(shares).ravel()
            v, factors = v * roots[:, None], factors * roots
        return self._summed(
            v.reshape(*y.shape, v.shape[1]), factors.reshape(y.shape), inverse_sizes
        )

    def _summed(self, v: Floats, factors: Floats, inverse_sizes: float = 0.0) -> Floats:
        """Sums (..., length) of the messages of scaled rows v (..., n, p + 1); factors (..., n)."""
        # A rotation of the n rows, their factors among them, changes no sum.
        packed = self._pack(v.swapaxes(-1, -2) @ v, np.einsum("...n,...n->...", factors, factors))
        if not self.sizes:
            return packed
        inverse = np.full((*packed.shape[:-1], 1), self._size_scale * inverse_sizes)
        return np.concatenate([packed, inverse], axis=-1)

    def _pack(self, second: Floats, weight: Floats) -> Floats:
        """Messages (..., length) from matrices v v' (..., p + 1, p + 1) and squared factors."""
        rows, columns = np.triu_indices(second.shape[-1])
        # An entry off the diagonal stands for two equal ones.
        message = second[..., rows, columns] * np.where(rows == columns, 1.0, math.sqrt(2))
        message[..., -1] *= self._square_scale
        if not self._square_scale:
            message = message[..., :-1]
        if self.intercept:
            return message
        return np.concatenate([message, self._weight_scale * weight[..., None]], axis=-1)

    def split(self, message: Floats, noise_std: float) -> NoisyMoments:
        """Parts of a released sum, in the units of the message.

        Parameters
        ----------
        message : ndarray of shape (length,)
            :meth:`total` plus noise.
        noise_std : float, >= 0
            Standard deviation of the noise in every entry of `message`.
        """
        p = self.n_features + self.intercept
        rows, columns = np.triu_indices(p + 1)
        has_square = self._square_scale > 0
        n_moments = len(rows) - (not has_square)
        entries = np.zeros(len(rows))
        entries[:n_moments] = message[:n_moments]
        extras = message[n_moments:]
        second = np.zeros((p + 1, p + 1))
        second[rows, columns] = np.where(rows == columns, 1.0, math.sqrt(0.5)) * entries
        second[columns, rows] = second[rows, columns]
        # The constant's square is kappa^2 for every row, so its sum counts the rows.
        weight = second[0, 0] if self.intercept else extras[0]
        return NoisyMoments(
            second[:-1, :-1],
            second[:-1, -1],
            second[-1, -1] / self._square_scale if has_square else None,
            float(weight / self._weight_scale),
            float(extras[-1] / self._size_scale) if self.sizes else None,
            noise_std,
            noise_std / self._square_scale if has_square else math.inf,
            noise_std / self._weight_scale,
            noise_std / self._size_scale,
        )
