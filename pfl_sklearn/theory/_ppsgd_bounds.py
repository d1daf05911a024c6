"""PPSGD: bounds on its excess risk, and when local learning pays."""

import math
from typing import Any, NamedTuple

import numpy as np

from pfl_sklearn.privacy import calibrate_noise
from pfl_sklearn.theory._checks import check_numbers, check_one_of
from pfl_sklearn.theory._ppsgd import (
    alpha_norm,
    ppsgd_noise_std,
    smoothness_alpha,
    step_scales,
    total_gradient_variance,
)


class RiskBound(NamedTuple):
    """Terms of an upper bound on an expected excess risk after T rounds.

    Parameters
    ----------
    bias : float
        Contribution of the starting point; it falls as 1 / T.
    variance : float
        Contribution of the rows and of the sampling of clients; it falls as the root of 1 / T.
    privacy : float
        Contribution of the noise. For a given epsilon it does not depend on T.
    """

    bias: float
    variance: float
    privacy: float

    @property
    def total(self) -> float:
        """The bound: the bias, plus the root sum of squares of the other two terms."""
        return self.bias + math.hypot(self.variance, self.privacy)


def ppsgd_bound(smoothness: float, norm: float, gradient_std: float, n_rounds: int) -> float:
    r"""Upper bound on the expected excess risk of PPSGD's averaged iterate.

    .. math::

       E f(\bar z_T) - f(z^*) \le \frac{4 L_\alpha \|z^*\|_\alpha^2}{T}
       + \frac{3 \sigma \|z^*\|_\alpha}{\sqrt T}

    Theorems 4.5 (equation 7), 5.2 and B.4 of Bietti et al. (2022): convex loss, no clipping, a
    start at 0, fresh rows in every round, and the average of the iterates *before* each round.

    Parameters
    ----------
    smoothness, norm, gradient_std, n_rounds
        As in :func:`ppsgd_learning_rate`. The bound holds for that step.

    Returns
    -------
    float
        In units of the loss. Infinite if PPSGD cannot reach the minimizer: at ``alpha=0`` if the
        minimizer has a global part, at ``alpha=inf`` if it has a local one.

    Examples
    --------
    >>> from pfl_sklearn.theory import ppsgd_bound
    >>> round(ppsgd_bound(2.0, norm=1.0, gradient_std=0.5, n_rounds=400), 3)
    0.095
    """
    check_numbers("at least 0", norm=norm)
    check_numbers("finite and at least 0", smoothness=smoothness, gradient_std=gradient_std)
    check_numbers("finite and at least 1", n_rounds=n_rounds)
    if math.isinf(norm):  # also with exact gradients, where infinity times 0 would be NaN
        return math.inf
    return 4 * smoothness * norm**2 / n_rounds + 3 * gradient_std * norm / math.sqrt(n_rounds)


def ppsgd_private_bound(
    smoothness: float,
    alpha: float,
    w: Any,
    thetas: Any,
    *,
    w_variance: Any,
    theta_variance: Any,
    n_rounds: int,
    clip_norm: float,
    epsilon: float = math.inf,
    delta: float | None = None,
    noise_multiplier: float | None = None,
    gradient_norms: Any = 0.0,
    batch_sizes: Any = 1,
    client_fraction: float = 1.0,
    weighting: str = "samples",
) -> RiskBound:
    r"""Terms of :func:`ppsgd_bound` for a private run.

    Parameters
    ----------
    smoothness, alpha, batch_sizes, client_fraction, weighting
        As in :func:`smoothness_alpha`.
    w, thetas : array-like
        Global part of a minimizer, and its local parts (n_clients, ...); see
        :func:`minimal_norm_solution`.
    w_variance, theta_variance, gradient_norms
        As in :func:`total_gradient_variance`.
    n_rounds : int, >= 1
        Number T of rounds.
    clip_norm : float, > 0
        Clip norm C. The bound holds only if no client's message is larger.
    epsilon : float in (0, inf], default=inf
        User-level joint privacy of all rounds, when one client contributes nothing.
    delta : float in (0, 1), default=None
        Needed with a finite `epsilon`.
    noise_multiplier : float, >= 0, default=None
        Noise multiplier to use instead of `epsilon`; giving both is a ValueError.

    Returns
    -------
    RiskBound
        Its ``total`` is the bound. Inequalities (8) and (9) state the sum of its terms, which is
        never smaller.

    Notes
    -----
    Inequalities (8)-(9), (14) and (36) of Bietti et al. (2022) leave out absolute constants. The
    constants here come from (7) and from the exact calibration of T Gaussian releases,
    :math:`\sigma_\zeta = C \sqrt T / (q M \mu)` with :math:`\mu` from
    :func:`~pfl_sklearn.privacy.gdp_mu`. The calibration treats every client as sampled in every
    round, which is exact at q = 1 and conservative below. For less noise, give the
    `noise_multiplier` of an accountant for sampled rounds.

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn.theory import minimal_norm_solution, ppsgd_private_bound
    >>> alpha, n_clients = 0.1, 100
    >>> w, thetas = minimal_norm_solution(np.ones(3), alpha, n_clients)
    >>> bound = ppsgd_private_bound(
    ...     2.0, alpha, w, thetas, w_variance=1.0, theta_variance=1.0, n_rounds=50,
    ...     clip_norm=1.0, epsilon=1.0, delta=1e-5,
    ... )
    >>> [round(term, 2) for term in bound]
    [0.44, 0.23, 0.32]
    """
    check_numbers("finite and at least 0", smoothness=smoothness)
    check_numbers("finite and at least 1", n_rounds=n_rounds)
    check_numbers("finite and above 0", clip_norm=clip_norm)
    check_numbers("above 0", epsilon=epsilon)
    thetas = np.asarray(thetas, dtype=float)
    n_clients = len(thetas)
    rounds: dict[str, Any] = {
        "batch_sizes": batch_sizes,
        "client_fraction": client_fraction,
        "weighting": weighting,
    }
    z = _noise_multiplier(epsilon, delta, noise_multiplier, n_rounds)
    norm = alpha_norm(w, thetas, alpha)
    if math.isinf(norm):  # PPSGD cannot reach the minimizer at this alpha
        return RiskBound(math.inf, math.inf, math.inf)
    curvature = smoothness_alpha(smoothness, alpha, n_clients, **rounds)
    # The variances of rows and of noise add up, so each has a term of its own in the bound.
    rows = total_gradient_variance(
        alpha, n_clients, w_variance, theta_variance, gradient_norms=gradient_norms, **rounds
    )
    noise_std = ppsgd_noise_std(z, clip_norm, n_clients, **rounds)
    noise = step_scales(alpha)[0] * np.size(w) * noise_std**2
    bias = ppsgd_bound(curvature, norm, 0.0, n_rounds)
    slopes = (ppsgd_bound(0.0, norm, math.sqrt(part), n_rounds) for part in (rows, noise))
    return RiskBound(bias, *slopes)


def personalization_threshold(
    n_clients: int,
    gradient_variance: float,
    clip_norm: float,
    n_features: int,
    epsilon: float,
    delta: float,
    *,
    version: str = "exact",
) -> float:
    r"""Number of rows per client above which more local learning pays, with equal clients.

    .. math:: n \ge \frac{N (N - 1) \sigma^2 \mu^2}{d C^2}

    Above the threshold, the variance term of the bound falls when alpha falls; below, it grows.

    Lemma 4.6 of Bietti et al. (2022). For every calibration the criterion is :math:`N d
    \sigma_\zeta^2 \ge (N - 1) \sigma^2`.

    Parameters
    ----------
    n_clients, n_features : int
        N and d.
    gradient_variance : float, >= 0
        Common value :math:`\sigma^2` of :math:`\bar\sigma_w^2` and :math:`\bar\sigma_\theta^2`.
    clip_norm : float, > 0
        Clip norm C.
    epsilon, delta : float
        Privacy of n rounds of one row with all clients, when one client contributes nothing: in
        (0, inf] and in (0, 1).
    version : {"exact", "order", "printed"}, default="exact"
        "exact" takes for :math:`\mu` the Gaussian-DP parameter of (epsilon, delta). "order" is
        inequality (10), with :math:`\epsilon^2 / \log(1 / \delta)` for :math:`\mu^2`; it is right
        up to a constant. "printed" has epsilon instead of its square, as the text after (10) and
        the proof do.

    Returns
    -------
    float
        Infinite without privacy.

    Examples
    --------
    >>> from pfl_sklearn.theory import personalization_threshold
    >>> round(personalization_threshold(100, 1.0, 1.0, 10, epsilon=1.0, delta=1e-5))
    71
    """
    check_numbers("finite and at least 1", n_clients=n_clients, n_features=n_features)
    check_numbers("finite and at least 0", gradient_variance=gradient_variance)
    check_numbers("finite and above 0", clip_norm=clip_norm)
    check_numbers("above 0", epsilon=epsilon)
    check_numbers("in (0, 1)", delta=delta)
    if math.isinf(epsilon):  # without noise more local learning never pays
        return math.inf
    # Squares of mu. Only the named one is computed: a calibration takes a root search.
    squares = {
        "exact": lambda: calibrate_noise(epsilon, delta, 1.0, relation="zero_out") ** -2,
        "order": lambda: epsilon**2 / math.log(1 / delta),
        "printed": lambda: epsilon / math.log(1 / delta),
    }
    check_one_of("version", version, squares)
    scale = n_clients * (n_clients - 1) * gradient_variance / (n_features * clip_norm**2)
    return scale * squares[version]()


def linear_excess_risk(coef: Any, true_coef: Any, covariance: Any, weights: Any = None) -> float:
    r"""Excess squared error of linear models, averaged over clients.

    .. math::

       \frac{1}{N} \sum_i (\hat\beta_i - \beta_i)^\top \Sigma (\hat\beta_i - \beta_i)

    Figure 1a of Bietti et al. (2022) shows this quantity (Section 6, "Synthetic dataset").

    Parameters
    ----------
    coef, true_coef : array-like of shape (n_clients, n_features) or (n_features,)
        Fitted and true coefficients. For PPSGD the fitted ones are w + theta_i.
    covariance : array-like of shape (n_features,) or (n_features, n_features)
        Second moments of the rows: a diagonal, or a matrix.
    weights : array-like of shape (n_clients,), default=None
        Clients' weights. None: equal.

    Returns
    -------
    float
        Excess of the squared error. For half the squared error, f(z) - f(z*) is half of it.

    Examples
    --------
    >>> from pfl_sklearn.theory import linear_excess_risk
    >>> linear_excess_risk([[1.0, 0.0], [3.0, 0.0]], [1.0, 1.0], [1.0, 0.5])
    2.5
    """
    check_numbers("finite", coef=coef, true_coef=true_coef, covariance=covariance)
    if weights is not None:
        check_numbers("finite and at least 0", weights=weights)
    # One true model for all clients is a row that broadcasts.
    errors = np.atleast_2d(np.subtract(coef, true_coef, dtype=float))
    covariance = np.asarray(covariance, dtype=float)
    products = errors * covariance if covariance.ndim == 1 else errors @ covariance
    return float(np.average(np.einsum("md,md->m", errors, products), weights=weights))


def _noise_multiplier(epsilon, delta, noise_multiplier, n_rounds):
    """The given multiplier, or that of `n_rounds` releases in which everybody takes part."""
    if math.isinf(epsilon):
        return 0.0 if noise_multiplier is None else noise_multiplier
    if noise_multiplier is not None:
        raise ValueError(
            f"give epsilon or noise_multiplier, not both; got {epsilon!r} and {noise_multiplier!r}."
        )
    # Gaussian noise gives no guarantee with a delta of 0.
    if delta is None:
        raise ValueError("delta must be given with a finite epsilon; got None.")
    return calibrate_noise(epsilon, delta, 1.0, relation="zero_out", n_releases=n_rounds)
