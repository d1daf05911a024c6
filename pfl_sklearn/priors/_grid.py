"""Non-parametric population prior of proportions or rates on a grid."""

from __future__ import annotations

from numbers import Integral
from typing import Self

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import nnls
from scipy.special import xlog1py, xlogy
from sklearn.base import clone

from pfl_sklearn._compat import Interval, StrOptions
from pfl_sklearn._parameters import NOT_NEGATIVE, parameter, with_parameters
from pfl_sklearn._typing import Floats, Integers, TableLike
from pfl_sklearn._warnings import warn_caller
from pfl_sklearn.priors._prior import CountPrior, is_distribution, one_per_client

# Fits of 50 to 5,000 clients took 5 to 75; a bound for those that rounding keeps from the end.
_NEWTON_STEPS = 200
# Nats per client that the log-likelihood may still rise by at the end.
_GAP = 1e-6
# Weight of the row that holds the sum of the weights at 1: the sum is then off by about 1e-6.
_SUM_WEIGHT = 1e3


@with_parameters
class GridPrior(CountPrior):
    r"""Any distribution of the clients' proportions or rates, as weights on a grid.

    .. math::

        P(p_i = g_k) = w_k, \qquad g_k = l + (h - l) k / (K - 1), \quad k = 0, \dots, K - 1.

    For rates the steps of :math:`\sqrt{g_k}` are equal: a Poisson count leaves the root of its
    rate with the same error everywhere.

    Parameters
    ----------
    n_points : int, >= 2, default=201
        Number K of grid points.
    weights : array-like of shape (n_points,) or None, default=None
        Known weights, non-negative and with sum 1. None: estimated.
    low, high : float, >= 0, or None, default=None
        Ends l and h of the grid, at most 1 for proportions. None: 0 and 1. Where weights are
        estimated from exact counts, None is the smallest and the largest share or rate; the
        estimate lies between them.
    outcome : {"binomial", "poisson"} or None, default=None
        Distribution of the counts: of successes in trials, with a proportion, or of events over an
        exposure, with a rate. None: that of the estimator, and "binomial" without one.

    Notes
    -----
    Weights are estimated by non-parametric maximum likelihood (Kiefer and Wolfowitz, 1956), with
    Newton steps that solve non-negative least-squares problems (Wang, 2007). Steps end when the
    log-likelihood per client can rise by at most 1e-6.

    References
    ----------
    Kiefer, J. and Wolfowitz, J. (1956). Consistency of the maximum likelihood estimator in the
    presence of infinitely many incidental parameters. Annals of Mathematical Statistics.

    Wang, Y. (2007). On fast computation of the non-parametric maximum likelihood estimate of a
    mixing distribution. JRSS B.

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn.priors import GridPrior
    >>> prior = GridPrior(n_points=3, weights=[0.5, 0.0, 0.5])
    >>> prior.posterior(np.array([2, 0]), np.array([2, 2]))[0]
    array([1., 0.])
    """

    _estimated = ("weights",)

    n_points: int = parameter(
        default=201, ranges=[Interval(Integral, 2, None, closed="left")], kw_only=False
    )
    weights: ArrayLike | None = parameter(default=None, ranges=["array-like", None], kw_only=False)
    low: float | None = parameter(default=None, ranges=[NOT_NEGATIVE, None], kw_only=False)
    high: float | None = parameter(default=None, ranges=[NOT_NEGATIVE, None], kw_only=False)
    outcome: str | None = parameter(
        default=None, ranges=[StrOptions({"binomial", "poisson"}), None]
    )

    @property
    def is_known(self) -> bool:
        """Whether the weights are given; checks them."""
        if self.weights is None:
            return False
        weights = np.asarray(self.weights, dtype=float)
        if weights.shape != (self.n_points,) or not is_distribution(weights):
            raise ValueError(
                f"weights of GridPrior must be {self.n_points} non-negative numbers that sum to 1; "
                f"got shape {weights.shape} with sum {weights.sum():.6g}."
            )
        return True

    @property
    def support(self) -> Floats:
        """Grid (n_points,)."""
        low, high = self._ends(0.0, 1.0)
        return self._unscaled(np.linspace(self._scaled(low), self._scaled(high), self.n_points))

    def with_weights(self, weights: ArrayLike) -> Self:
        """Copy of this prior with known weights.

        Parameters
        ----------
        weights : array-like of shape (n_points,)
            Probabilities of the grid points; they sum to 1.
        """
        return clone(self).set_params(weights=weights)

    def _ends(self, low, high):
        """Ends of the grid: given ones, else `low` and `high`, which may not lie beyond those."""
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(
                f"low of GridPrior must not be above high; got {self.low:g} and {self.high:g}."
            )
        if self.low is not None:
            low, high = self.low, max(self.low, high)
        if self.high is not None:
            low, high = min(low, self.high), self.high
        if high > 1 and not self._of_rates:
            raise ValueError(
                f"low and high of GridPrior must be at most 1 for proportions; got {high:g}."
            )
        return low, high

    @property
    def _of_rates(self):
        return self.outcome == "poisson"

    def _scaled(self, values):
        """Values on the scale on which the grid has equal steps."""
        return np.sqrt(values) if self._of_rates else values

    def _unscaled(self, values):
        return values**2 if self._of_rates else values

    def _known_weights(self):
        """Given weights (n_points,)."""
        (weights,) = self._require_known()
        return np.asarray(weights, dtype=float)

    def moments(self) -> tuple[float, float]:
        """Mean and variance of a known prior."""
        weights = self._known_weights()
        mean = weights @ self.support
        return float(mean), float(weights @ (self.support - mean) ** 2)

    def fit(self, theta: TableLike) -> Self:
        """Fit the prior to proportions or rates observed without noise.

        The weight of a grid point is the share of values that lie nearest to it.

        Parameters
        ----------
        theta : array-like of shape (n_clients,) or (n_clients, 1), within [low, high]
            One proportion or rate per client.
        """
        self._validate_params()
        if self.is_known:
            return clone(self)
        nearest = self._nearest(one_per_client(theta))
        return self.with_weights(np.bincount(nearest, minlength=self.n_points) / len(nearest))

    def _fit_counts(self, successes, trials, counts, method):
        shares = successes / trials
        low, high = self._ends(float(shares.min()), float(shares.max()))
        ranged = clone(self).set_params(low=low, high=high)
        if low == high:  # all points of the grid are one
            return ranged.with_weights(np.eye(1, self.n_points)[0])
        self._warn_if_coarse(shares, trials, low, high)
        return ranged.with_weights(mixing_weights(ranged.likelihood(successes, trials), counts))

    def _warn_if_coarse(self, shares, trials, low, high):
        """Warn if the likelihood of the largest clients could lie between two points."""
        if self._of_rates:  # the root of a rate has a standard deviation of 1/2 over root exposure
            finest = 0.5 / np.sqrt(np.max(trials, where=shares > 0, initial=0.0))
            clients, of_what, instead = (
                f"with exposure up to {trials.max():g}",
                "root of a rate's",
                "GammaPrior",
            )
        else:
            # Shares of 0 and 1 have an estimated deviation of 0, which asks for no grid.
            inner = (shares > 0) & (shares < 1)
            finest = np.sqrt(np.min(shares * (1 - shares) / trials, where=inner, initial=np.inf))
            clients, of_what, instead = f"with up to {trials.max()} trials", "share's", "BetaPrior"
        if (self._scaled(high) - self._scaled(low)) / (self.n_points - 1) > finest / 2:
            warn_caller(
                f"n_points={self.n_points} is too coarse for clients {clients}: the grid's step is "
                f"more than half of a {of_what} standard deviation, {finest:.2g}; take more points "
                f"or a {instead}.",
                UserWarning,
            )

    def likelihood(self, successes: Integers, trials: Integers) -> Floats:
        """Likelihood (n_pairs, n_points) of counts, divided by each row's largest value.

        Parameters
        ----------
        successes, trials : ndarrays of shape (n_pairs,)
            Counts, one pair per client or one per distinct pair.

        Raises
        ------
        ValueError
            If the counts are impossible at every point with a weight.
        """
        log = xlogy(successes[:, None], self.support)
        if self._of_rates:
            log = log - trials[:, None] * self.support
        else:
            log = log + xlog1py((trials - successes)[:, None], -self.support)
        if self.weights is not None:
            log = np.where(np.asarray(self.weights) > 0, log, -np.inf)
        largest = log.max(axis=1, keepdims=True)
        impossible = np.flatnonzero(np.isneginf(largest[:, 0]))
        if len(impossible):
            first = impossible[0]
            happened = f"{successes[first]} successes in {trials[first]} trials"
            if self._of_rates:
                happened = f"{successes[first]} events over an exposure of {trials[first]:g}"
            raise ValueError(
                f"{happened} are impossible at every point of the GridPrior with a weight, "
                f"from {self.support[0]:g} to {self.support[-1]:g}; give it more points or another "
                "range."
            )
        return np.exp(log - largest)

    def _log_prob(self, theta):
        with np.errstate(divide="ignore"):
            return np.log(self._known_weights())[self._nearest(theta)]

    def _draw(self, n_samples, rng):
        return rng.choice(self.support, size=(n_samples, 1), p=self._known_weights())

    def _posterior(self, successes, trials):
        posterior = self.posterior_weights(successes, trials)
        # A matrix product rounds a row by how many there are: how many counts other clients have.
        # Rounding may put a mean beyond the last point.
        mean = np.clip(np.einsum("uk,k->u", posterior, self.support), *self.support[[0, -1]])
        squares = (self.support - mean[:, None]) ** 2
        return mean, np.einsum("uk,uk->u", posterior, squares)

    def posterior_weights(self, successes: Integers, trials: Integers) -> Floats:
        """Posterior probabilities (n_clients, n_points) of the grid points.

        Parameters
        ----------
        successes, trials : ndarrays of shape (n_clients,)
            As in :meth:`posterior`.
        """
        weights = self._known_weights()
        joint = self.likelihood(successes, trials) * weights
        return joint / joint.sum(axis=1, keepdims=True)

    def _posterior_quantiles(self, successes, trials, tails):
        below = self.posterior_weights(successes, trials).cumsum(axis=1)
        # A cumulative sum that rounding leaves below its tail has reached it; the last one may be
        # below 1.
        positions = ((below < tail - 1e-12).sum(axis=1) for tail in tails)
        return [self.support[np.minimum(at, self.n_points - 1)] for at in positions]

    def _nearest(self, theta):
        """Index (n_clients,) of the grid point nearest to each proportion."""
        low, high = self._ends(0.0, 1.0)
        if not ((theta >= low) & (theta <= high)).all():
            raise ValueError(f"theta must lie within [{low:g}, {high:g}] for this GridPrior.")
        theta, low, high = (self._scaled(values) for values in (theta, low, high))
        width = max(high - low, np.finfo(float).tiny)  # a grid of one point
        return np.rint((theta - low) / width * (self.n_points - 1)).astype(np.intp)


def mixing_weights(likelihood: Floats, counts: Floats) -> Floats:
    """Weights w (K,) that maximize sum_u counts_u log (likelihood_u . w) over the simplex."""
    # Newton's method on the simplex: with r = L w' / L w the log-likelihood of w' is, to second
    # order, minus half the weighted squares of r - 2, a least-squares problem with w' >= 0 and one
    # heavy row that keeps the sum at 1.
    share = np.sqrt(counts / counts.sum())
    weights = np.full(likelihood.shape[1], 1 / likelihood.shape[1])
    current = likelihood @ weights
    value = share**2 @ np.log(current)
    for _ in range(_NEWTON_STEPS):
        ratio = likelihood / current[:, None]
        # The largest gradient bounds how far the log-likelihood is from its maximum.
        if np.max(share**2 @ ratio) - 1 <= _GAP:
            break
        rows = np.vstack([ratio * share[:, None], np.full(likelihood.shape[1], _SUM_WEIGHT)])
        target = nnls(rows, np.append(2 * share, _SUM_WEIGHT))[0]
        step, direction = 1.0, target / target.sum() - weights
        slope = share**2 @ (ratio @ direction)
        while True:
            candidate = weights + step * direction
            marginal = likelihood @ candidate
            # A full step may leave a client without likelihood.
            gained = share**2 @ np.log(marginal) - value if np.all(marginal > 0) else -np.inf
            if gained >= step * slope / 3 or step < 1e-10:  # Armijo's rule, or no gain by rounding
                break
            step /= 2
        weights, current, value = candidate, marginal, value + gained
    weights = np.maximum(weights, 0.0)
    return weights / weights.sum()
