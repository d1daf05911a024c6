r"""PPSGD: the geometry that alpha sets, and the constants of its bounds.

Client i's share of the objective is :math:`p_i`. With ``weighting="samples"`` (Algorithm 2 of the
paper) it is the client's share of the rows of a round, with ``weighting="clients"`` (Algorithm 3)
one over the number of clients. In Algorithm 1 every client takes part in every round with one row.
"""

import math
from typing import Any

import numpy as np

from pfl_sklearn._typing import Floats
from pfl_sklearn.theory._checks import check_numbers, check_one_of


def alpha_norm(w: Any, thetas: Any, alpha: float) -> float:
    r"""Norm of a global and many local models in the geometry of PPSGD.

    .. math:: \|z\|_\alpha^2 = \frac{1}{\alpha} \|w\|^2 + \sum_i \|\theta_i\|^2

    Equation (5) of Bietti et al. (2022).

    Parameters
    ----------
    w : array-like
        Global parameters, of any shape.
    thetas : array-like of shape (n_clients, ...)
        Local parameters.
    alpha : float in [0, inf]
        Step of the global parameters, divided by that of the local ones.

    Returns
    -------
    float
        At ``alpha=0`` the norm is infinite unless `w` is 0. At ``alpha=inf`` the unit is the
        global step: the norm is that of `w`, and infinite unless all local models are 0.

    Examples
    --------
    >>> from pfl_sklearn.theory import alpha_norm
    >>> alpha_norm([2.0], [[1.0], [2.0]], alpha=1.0)
    3.0
    """
    check_numbers("finite", w=w, thetas=thetas)
    parts = np.sum(np.square(w, dtype=float)), np.sum(np.square(thetas, dtype=float))
    # A model that takes no steps stays at 0: no other value of it can be reached.
    pairs = list(zip(parts, step_scales(alpha), strict=True))
    if any(square > 0 and scale == 0 for square, scale in pairs):
        return math.inf
    return math.sqrt(sum(square / (scale or 1.0) for square, scale in pairs))


def minimal_norm_solution(
    coef: Any, alpha: float, n_clients: int | None = None
) -> tuple[Floats, Floats]:
    r"""Global and local models to which PPSGD converges, for given models of the clients.

    Of all `w` and :math:`\theta_i` that add up to the clients' models :math:`v_i`, this pair has
    the smallest :func:`alpha_norm`:

    .. math::

       w = \frac{\alpha N}{\alpha N + 1} \bar v, \qquad \theta_i = v_i - w .

    Lemma 4.6 of Bietti et al. (2022), for equal clients (then :math:`\theta_i = \bar v /
    (\alpha N + 1)`). Unequal clients follow in the same way.

    Parameters
    ----------
    coef : array-like of shape (n_features,) or (n_clients, n_features)
        One model for all clients, or one for each client.
    alpha : float in [0, inf]
        As in :func:`alpha_norm`. At infinity `w` is the mean of the clients' models.
    n_clients : int, default=None
        Needed if `coef` is one model for all clients; otherwise it must equal the number of rows.

    Returns
    -------
    w : ndarray of shape (n_features,)
    thetas : ndarray of shape (n_clients, n_features)

    Examples
    --------
    >>> from pfl_sklearn.theory import minimal_norm_solution
    >>> w, thetas = minimal_norm_solution([3.0], alpha=1.0, n_clients=2)
    >>> w, thetas[:, 0]
    (array([2.]), array([1., 1.]))
    """
    check_numbers("finite", coef=coef)
    coef = np.asarray(coef, dtype=float)
    if coef.ndim == 1:
        if n_clients is None:
            raise ValueError("n_clients must be given with one model for all clients; got None.")
        check_numbers("finite and at least 1", n_clients=n_clients)
        coef = np.broadcast_to(coef, (n_clients, len(coef)))
    if n_clients not in (None, len(coef)):
        raise ValueError(f"n_clients must be the rows of coef, {len(coef)}; got {n_clients!r}.")
    # At an infinite alpha the scales are (1, 0), and w is the mean of the models.
    on_global, on_local = step_scales(alpha)
    weight = on_global * len(coef)
    w = weight / (weight + on_local) * coef.mean(axis=0)
    return w, coef - w


def smoothness_alpha(
    smoothness: float,
    alpha: float,
    n_clients: int,
    *,
    batch_sizes: Any = 1,
    client_fraction: float = 1.0,
    weighting: str = "samples",
    version: str = "sharp",
) -> float:
    r"""Smoothness constant of PPSGD's objective in the geometry of alpha.

    .. math::

       L_\alpha = L \max\Bigl(\alpha + \alpha (1 - q) \frac{p}{q},\; \frac{p}{q}\Bigr),
       \qquad p = \max_i p_i

    Parameters
    ----------
    smoothness : float, > 0
        Lipschitz constant L of every row's gradient in (w, theta_i) jointly. For half the squared
        error of an additive model it is twice the largest squared norm of a row.
    alpha : float in [0, inf]
        As in :func:`alpha_norm`.
    n_clients : int
        Number N of clients.
    batch_sizes : int or array-like of shape (n_clients,), default=1
        Rows :math:`m_i` of each client in a round.
    client_fraction : float in (0, 1], default=1.0
        Probability q that a client is sampled in a round.
    weighting : {"samples", "clients"}, default="samples"
        Clients count by their rows, :math:`p_i = m_i / M`, or equally, :math:`p_i = 1 / N`.
    version : {"sharp", "lemma", "printed"}, default="sharp"
        "lemma" lacks the factor (1 - q) and is never smaller. "printed" has p for both p/q and
        (1 - q) p/q, which is too small when clients are sampled.

    Returns
    -------
    float
        In units of the global step at ``alpha=inf``.

    Notes
    -----
    Theorem 4.5 (all clients in every round, one row each) and Lemma B.3 of Bietti et al. (2022).
    The lemma drops (1 - q) in its last step; with it Theorem 4.5 is the case q = 1, and the
    constant is attained. Theorems 5.2 and B.4 lack the q. For Algorithm 3 the lemma's proof holds
    with 1/N for the largest share; the substitution that the paper names would also change L.

    Examples
    --------
    >>> from pfl_sklearn.theory import smoothness_alpha
    >>> smoothness_alpha(2.0, 0.1, 100)
    0.2
    >>> smoothness_alpha(2.0, 0.1, 100, client_fraction=0.01)
    2.0
    """
    check_numbers("finite and at least 0", smoothness=smoothness)
    shares, _ = client_shares(n_clients, batch_sizes, weighting)
    q, p = _check_fraction(client_fraction), float(shares.max())
    # What the sampling of clients adds to the curvature in w, over that with all clients.
    extra = {"sharp": (1 - q) * p / q, "lemma": p / q, "printed": p}
    check_one_of("version", version, extra)
    on_global, on_local = step_scales(alpha)
    # A client's local gradient comes with chance q, and counts 1 / q times when it does.
    local = on_local * (p if version == "printed" else p / q)
    return smoothness * max(on_global * (1 + extra[version]), local)


def total_gradient_variance(
    alpha: float,
    n_clients: int,
    w_variance: Any,
    theta_variance: Any,
    *,
    gradient_norms: Any = 0.0,
    n_features: int = 0,
    noise_std: float = 0.0,
    batch_sizes: Any = 1,
    client_fraction: float = 1.0,
    weighting: str = "samples",
    version: str = "sound",
) -> float:
    r"""Variance of PPSGD's step at a minimizer, in the geometry of alpha.

    .. math::

       \sigma_\alpha^2 = \sum_i \frac{p_i^2}{q} \Bigl( \frac{\alpha \sigma_{w,i}^2 +
       \sigma_{\theta,i}^2}{m_i} + \alpha (1 - q) \|\nabla_w f_i(z^*)\|^2 \Bigr)
       + \alpha d \sigma_\zeta^2

    Equations (6), (13) and (35) of Bietti et al. (2022). Without clipping this is an identity. The
    proof of (13) loses a q between (31) and (32).

    Parameters
    ----------
    alpha, n_clients, batch_sizes, client_fraction, weighting
        As in :func:`smoothness_alpha`.
    w_variance, theta_variance : float or array-like of shape (n_clients,)
        Variance of one row's gradient in the global and in the local parameters at the minimizer,
        summed over coordinates. Both are :math:`\tau^2 \operatorname{tr} E x x^\top` for half the
        squared error of an additive model with label noise of variance :math:`\tau^2`.
    gradient_norms : float or array-like of shape (n_clients,), default=0.0
        Norm of each client's expected gradient in w at the minimizer; 0 in additive models.
    n_features : int, default=0
        Number d of global parameters.
    noise_std : float, >= 0, default=0.0
        Standard deviation :math:`\sigma_\zeta` of the noise on the averaged gradient; see
        :func:`ppsgd_noise_std`.
    version : {"sound", "printed"}, default="sound"
        "printed" has q (1 - q) instead of (1 - q), which is too small.

    Returns
    -------
    float
        In units of the global step at ``alpha=inf``.

    Examples
    --------
    >>> from pfl_sklearn.theory import total_gradient_variance
    >>> total_gradient_variance(1.0, 10, 2.0, 3.0, n_features=5, noise_std=0.1)
    0.55
    """
    shares, sizes = client_shares(n_clients, batch_sizes, weighting)
    q = _check_fraction(client_fraction)
    check_one_of("version", version, ("sound", "printed"))
    check_numbers("finite and at least 0", noise_std=noise_std, n_features=n_features)
    check_numbers("finite and at least 0", w_variance=w_variance, theta_variance=theta_variance)
    check_numbers("finite and at least 0", gradient_norms=gradient_norms)
    on_global, on_local = step_scales(alpha)
    # Without the clients that are left out, the mean of the others' gradients is off.
    sampling = (1 - q) * (q if version == "printed" else 1.0)
    # A step alpha g of w has the squared norm alpha |g|^2, a local step |g|^2.
    rows = on_global * np.asarray(w_variance) + on_local * np.asarray(theta_variance)
    clients = rows / sizes + on_global * sampling * np.square(gradient_norms)
    return float(shares**2 @ clients / q + on_global * n_features * noise_std**2)


def ppsgd_noise_std(
    noise_multiplier: float,
    clip_norm: float,
    n_clients: int,
    *,
    batch_sizes: Any = 1,
    client_fraction: float = 1.0,
    weighting: str = "samples",
) -> float:
    r"""Standard deviation of the noise on PPSGD's averaged gradient.

    .. math:: \sigma_\zeta = \frac{z C}{q M}, \qquad \text{with N for M if clients weigh alike}

    Equations (4) and (12) of Bietti et al. (2022) leave the constants open. In their Section 6,
    "sigma_zeta = sigma C" is the noise on the sum.

    Parameters
    ----------
    noise_multiplier : float, >= 0
        Noise z on the sum of clipped gradients, over the clip norm. For T rounds with all clients
        it is ``calibrate_noise(epsilon, delta, 1.0, relation="zero_out", n_releases=T)`` of
        :mod:`pfl_sklearn.privacy`.
    clip_norm : float, > 0
        Largest norm C of a client's message: the *sum* of its rows' gradients under
        ``weighting="samples"``, their mean under "clients".
    n_clients, batch_sizes, client_fraction, weighting
        As in :func:`smoothness_alpha`.

    Examples
    --------
    >>> from pfl_sklearn.theory import ppsgd_noise_std
    >>> ppsgd_noise_std(2.0, 10.0, 1000, client_fraction=0.01)
    2.0
    """
    check_numbers("finite and at least 0", noise_multiplier=noise_multiplier)
    check_numbers("finite and above 0", clip_norm=clip_norm)
    _, sizes = client_shares(n_clients, batch_sizes, weighting)
    # The expected number of rows or clients: the number drawn would reveal who was sampled.
    divisor = sizes.sum() if weighting == "samples" else n_clients
    return float(noise_multiplier * clip_norm / (_check_fraction(client_fraction) * divisor))


def ppsgd_learning_rate(
    smoothness: float, norm: float, gradient_std: float, n_rounds: int
) -> float:
    r"""Step size for which PPSGD's guarantee holds.

    .. math:: \eta = \min\Bigl(\frac{1}{4 L_\alpha}, \frac{\|z^*\|_\alpha}{\sqrt{T} \sigma}\Bigr)

    Theorems 4.5, 5.2 and B.4 of Bietti et al. (2022). All parameters must be known in advance:
    values estimated from the data would leak.

    Parameters
    ----------
    smoothness : float, > 0
        :math:`L_\alpha`, from :func:`smoothness_alpha`.
    norm : float, >= 0
        Distance :math:`\|z^*\|_\alpha` of the minimizer from the start, from :func:`alpha_norm`.
    gradient_std : float, >= 0
        Square root of :func:`total_gradient_variance`.
    n_rounds : int, >= 1
        Number T of rounds.

    Returns
    -------
    float
        Step of the local models, divided by q M or q N as in the algorithms; the global step is
        alpha times that. At ``alpha=inf`` the step of the global model.

    Examples
    --------
    >>> from pfl_sklearn.theory import ppsgd_learning_rate
    >>> ppsgd_learning_rate(2.0, norm=1.0, gradient_std=0.5, n_rounds=400)
    0.1
    """
    check_numbers("at least 0", norm=norm)
    check_numbers("finite and at least 0", smoothness=smoothness, gradient_std=gradient_std)
    check_numbers("finite and at least 1", n_rounds=n_rounds)
    # A linear loss has no curvature that limits the step.
    longest = 1 / (4 * smoothness) if smoothness > 0 else math.inf
    if gradient_std == 0:  # exact gradients need no small steps
        return longest
    return min(longest, norm / (math.sqrt(n_rounds) * gradient_std))


def step_scales(alpha: float) -> tuple[float, float]:
    """Steps of the global and the local parameters: (alpha, 1), or (1, 0) at infinity."""
    # At infinity only the ratio of the two is defined, so the unit is the global step.
    check_numbers("at least 0", alpha=alpha)
    return (1.0, 0.0) if math.isinf(alpha) else (float(alpha), 1.0)


def client_shares(n_clients: int, batch_sizes: Any, weighting: str) -> tuple[Floats, Floats]:
    """Every client's share of the objective, and its rows in a round: arrays (n_clients,)."""
    check_one_of("weighting", weighting, ("samples", "clients"))
    check_numbers("finite and at least 1", n_clients=n_clients)
    sizes = np.asarray(batch_sizes, dtype=float)
    if sizes.shape not in ((), (n_clients,)) or not ((sizes >= 1) & (sizes < np.inf)).all():
        raise ValueError(
            f"batch_sizes must be a number of at least 1, or {n_clients} of them; got "
            f"{batch_sizes!r}."
        )
    sizes = np.broadcast_to(sizes, (n_clients,))
    # Algorithm 3 averages a client's rows first, so their number does not count.
    if weighting == "clients":
        return np.full(n_clients, 1 / n_clients), sizes
    return sizes / sizes.sum(), sizes


def _check_fraction(client_fraction):
    check_numbers("in (0, 1]", client_fraction=client_fraction)
    return float(client_fraction)
