r"""PPSGD: the geometry that alpha sets, and the constants of its bounds.

Client i's share of the objective is :math:`p_i`: its rows' share of a round
(``weighting="samples"``, Algorithm 2 of the paper) or one over the number of clients
(``weighting="clients"``, Algorithm 3). Algorithm 1 is one row each and everybody sampled.
"""

import math

import numpy as np


def alpha_norm(w, thetas, alpha):
    r"""Norm of a global and many local models in the geometry of PPSGD.

    .. math:: \|z\|_\alpha^2 = \frac{1}{\alpha} \|w\|^2 + \sum_i \|\theta_i\|^2

    Parameters
    ----------
    w : array-like
        Global parameters, of any shape.
    thetas : array-like of shape (n_clients, ...)
        Local parameters.
    alpha : float in [0, inf]
        Step of the global over that of the local parameters.

    Returns
    -------
    float
        Infinity at ``alpha=0`` if `w` is not 0. At ``alpha=inf`` the unit is the global step:
        the norm of `w`, and infinity if a local model is not 0.

    Notes
    -----
    Equation (5) of Bietti et al. (2022).

    References
    ----------
    Bietti, A., Wei, C.-Y., Dudik, M., Langford, J. and Wu, Z. S. (2022). Personalization improves
    privacy-accuracy tradeoffs in federated learning. ICML.

    Examples
    --------
    >>> from pfl_sklearn.theory import alpha_norm
    >>> alpha_norm([2.0], [[1.0], [2.0]], alpha=1.0)
    3.0
    """
    squares = np.sum(np.square(w, dtype=float)), np.sum(np.square(thetas, dtype=float))
    parts = zip(squares, step_scales(alpha), strict=True)
    return math.sqrt(sum(_over(float(square), scale) for square, scale in parts))


def minimal_norm_solution(coef, alpha, n_clients=None):
    r"""The split of the clients' models into global and local ones that PPSGD tends to.

    Of all `w`, :math:`\theta_i` that add up to the clients' models :math:`v_i`, the one with the
    least :func:`alpha_norm`:

    .. math::

       w = \frac{\alpha N}{\alpha N + 1} \bar v, \qquad \theta_i = v_i - w .

    Parameters
    ----------
    coef : array-like of shape (n_features,) or (n_clients, n_features)
        One model for all clients, or each client's.
    alpha : float in [0, inf]
        At infinity `w` is the clients' mean.
    n_clients : int, default=None
        Needed for one model for all.

    Returns
    -------
    w : ndarray of shape (n_features,)
    thetas : ndarray of shape (n_clients, n_features)

    Raises
    ------
    ValueError
        If `n_clients` is missing or differs from the rows of `coef`.

    Notes
    -----
    Lemma 4.6 of Bietti et al. (2022), which has equal clients (then :math:`\theta_i = \bar v /
    (\alpha N + 1)`); unequal ones follow in the same way.

    Examples
    --------
    >>> from pfl_sklearn.theory import minimal_norm_solution
    >>> w, thetas = minimal_norm_solution([3.0], alpha=1.0, n_clients=2)
    >>> w, thetas[:, 0]
    (array([2.]), array([1., 1.]))
    """
    coef = np.asarray(coef, dtype=float)
    if coef.ndim == 1:
        if n_clients is None:
            raise ValueError("n_clients must be given with one model for all clients; got None.")
        coef = np.broadcast_to(coef, (n_clients, len(coef)))
    if n_clients not in (None, len(coef)):
        raise ValueError(f"n_clients must be the rows of coef, {len(coef)}; got {n_clients!r}.")
    on_global, on_local = step_scales(alpha)
    weight = on_global * len(coef)
    w = weight / (weight + on_local) * coef.mean(axis=0)
    return w, coef - w


def smoothness_alpha(
    smoothness,
    alpha,
    n_clients,
    *,
    batch_sizes=1,
    client_fraction=1.0,
    weighting="samples",
    version="sharp",
):
    r"""Smoothness constant of PPSGD's objective in the geometry of alpha.

    .. math::

       L_\alpha = L \max\Bigl(\alpha + \alpha (1 - q) \frac{p}{q},\; \frac{p}{q}\Bigr),
       \qquad p = \max_i p_i

    with :math:`p` the largest client's share: :math:`m_{\max} / M` for samples, 1/N for clients.

    Parameters
    ----------
    smoothness : float, > 0
        L: the gradients in (w, theta_i) jointly are L-Lipschitz on every row. For half the
        squared error of an additive model it is twice the largest squared norm of a row.
    alpha : float in [0, inf]
        Step of the global parameters over that of the local ones.
    n_clients : int
        N.
    batch_sizes : int or array-like of shape (n_clients,), default=1
        Rows of each client in a round, :math:`m_i`.
    client_fraction : float in (0, 1], default=1.0
        Probability q of each client to be sampled in a round.
    weighting : {"samples", "clients"}, default="samples"
        Whether clients count by their rows or all alike.
    version : {"sharp", "lemma", "printed"}, default="sharp"
        "lemma": without the factor (1 - q), never smaller. "printed": p for both p/q and
        (1 - q) p/q, which is too small when clients are sampled.

    Returns
    -------
    float
        At ``alpha=inf`` in units of the global step.

    Raises
    ------
    ValueError
        If a parameter is out of its range.

    Notes
    -----
    Theorem 4.5 (everybody sampled, one row each) and Lemma B.3 of Bietti et al. (2022). The lemma
    drops (1 - q) in its last step; with it Theorem 4.5 is the case q = 1, and the constant is
    attained. Theorems 5.2 and B.4 lack the q; for Algorithm 3 the lemma's proof goes through with
    1/N in place of the largest share, though not by the substitution that the paper names, which
    changes L as well.

    Examples
    --------
    >>> from pfl_sklearn.theory import smoothness_alpha
    >>> smoothness_alpha(2.0, 0.1, 100)
    0.2
    >>> smoothness_alpha(2.0, 0.1, 100, client_fraction=0.01)
    2.0
    """
    _check_at_least_0("smoothness", smoothness)
    shares, _ = client_shares(n_clients, batch_sizes, weighting)
    q, p = _check_fraction(client_fraction), float(shares.max())
    extra = {"sharp": (1 - q) * p / q, "lemma": p / q, "printed": p}
    _check_choice("version", version, extra)
    on_global, on_local = step_scales(alpha)
    local = on_local * (p if version == "printed" else p / q)
    return smoothness * max(on_global * (1 + extra[version]), local)


def total_gradient_variance(
    alpha,
    n_clients,
    w_variance,
    theta_variance,
    *,
    gradient_norms=0.0,
    n_features=0,
    noise_std=0.0,
    batch_sizes=1,
    client_fraction=1.0,
    weighting="samples",
    version="sound",
):
    r"""Variance of PPSGD's step at a minimizer, in the geometry of alpha.

    .. math::

       \sigma_\alpha^2 = \sum_i \frac{p_i^2}{q} \Bigl( \frac{\alpha \sigma_{w,i}^2 +
       \sigma_{\theta,i}^2}{m_i} + \alpha (1 - q) \|\nabla_w f_i(z^*)\|^2 \Bigr)
       + \alpha d \sigma_\zeta^2

    Parameters
    ----------
    alpha : float in [0, inf]
        Step of the global parameters over that of the local ones.
    n_clients : int
        N.
    w_variance, theta_variance : float or array-like of shape (n_clients,)
        Variance, summed over coordinates, of one row's gradient in the global and in the local
        parameters at the minimizer. Both are :math:`\tau^2 \operatorname{tr} E x x^\top` for half
        the squared error of an additive model with label noise of variance :math:`\tau^2`.
    gradient_norms : float or array-like of shape (n_clients,), default=0.0
        Norm of each client's expected gradient in w at the minimizer; 0 in additive models.
    n_features : int, default=0
        Number d of global parameters.
    noise_std : float, >= 0, default=0.0
        :math:`\sigma_\zeta`, of the noise on the averaged gradient; see :func:`ppsgd_noise_std`.
    batch_sizes, client_fraction, weighting
        As in :func:`smoothness_alpha`.
    version : {"sound", "printed"}, default="sound"
        "printed" has q (1 - q) for (1 - q), which is too small.

    Returns
    -------
    float
        At ``alpha=inf`` in units of the global step.

    Raises
    ------
    ValueError
        If a parameter is out of its range.

    Notes
    -----
    Equations (6), (13) and (35) of Bietti et al. (2022). An identity, up to clipping. The proof of
    (13) loses a q on the way from (31) to (32).

    Examples
    --------
    >>> from pfl_sklearn.theory import total_gradient_variance
    >>> total_gradient_variance(1.0, 10, 2.0, 3.0, n_features=5, noise_std=0.1)
    0.55
    """
    shares, sizes = client_shares(n_clients, batch_sizes, weighting)
    q = _check_fraction(client_fraction)
    _check_choice("version", version, ("sound", "printed"))
    _check_at_least_0("noise_std", noise_std)
    on_global, on_local = step_scales(alpha)
    sampling = (1 - q) * (q if version == "printed" else 1.0)
    rows = on_global * np.asarray(w_variance) + on_local * np.asarray(theta_variance)
    clients = rows / sizes + on_global * sampling * np.square(gradient_norms)
    return float(shares**2 @ clients / q + on_global * n_features * noise_std**2)


def ppsgd_noise_std(
    noise_multiplier,
    clip_norm,
    n_clients,
    *,
    batch_sizes=1,
    client_fraction=1.0,
    weighting="samples",
):
    r"""Standard deviation of the noise on PPSGD's averaged gradient.

    .. math:: \sigma_\zeta = \frac{z C}{q M}, \qquad \text{with N for M if clients weigh alike}

    Parameters
    ----------
    noise_multiplier : float, >= 0
        z: noise on the sum of clipped gradients over the clip norm. Of T rounds with everybody
        sampled it is ``calibrate_noise(epsilon, delta, 1.0, relation="add_remove",
        n_releases=T)`` of :mod:`pfl_sklearn.privacy`.
    clip_norm : float, > 0
        C, of one client's message: the *sum* of its rows' gradients under
        ``weighting="samples"``, their mean under "clients".
    n_clients, batch_sizes, client_fraction, weighting
        As in :func:`smoothness_alpha`.

    Returns
    -------
    float

    Notes
    -----
    Equations (4) and (12) of Bietti et al. (2022) give its order of magnitude, with unspecified
    constants. The "sigma_zeta = sigma C" of its Section 6 is the noise on the sum.

    Examples
    --------
    >>> from pfl_sklearn.theory import ppsgd_noise_std
    >>> ppsgd_noise_std(2.0, 10.0, 1000, client_fraction=0.01)
    2.0
    """
    _check_at_least_0("noise_multiplier", noise_multiplier)
    _, sizes = client_shares(n_clients, batch_sizes, weighting)
    divisor = sizes.sum() if weighting == "samples" else n_clients
    return float(noise_multiplier * clip_norm / (_check_fraction(client_fraction) * divisor))


def ppsgd_learning_rate(smoothness, norm, gradient_std, n_rounds):
    r"""Step size of PPSGD's guarantee.

    .. math:: \eta = \min\Bigl(\frac{1}{4 L_\alpha}, \frac{\|z^*\|_\alpha}{\sqrt{T} \sigma}\Bigr)

    Parameters
    ----------
    smoothness : float, > 0
        :math:`L_\alpha`, from :func:`smoothness_alpha`.
    norm : float, >= 0
        :math:`\|z^*\|_\alpha`, from :func:`alpha_norm`: distance of the minimizer from the start.
    gradient_std : float, >= 0
        Root of :func:`total_gradient_variance`.
    n_rounds : int, >= 1
        T.

    Returns
    -------
    float
        Step of the local models (over q M or q N, as the algorithms have it); the global one is
        alpha times that. At ``alpha=inf`` the step of the global model.

    Notes
    -----
    Theorems 4.5, 5.2 and B.4 of Bietti et al. (2022). All of it has to be known beforehand: values
    estimated from the data would leak.

    Examples
    --------
    >>> from pfl_sklearn.theory import ppsgd_learning_rate
    >>> ppsgd_learning_rate(2.0, norm=1.0, gradient_std=0.5, n_rounds=400)
    0.1
    """
    longest = 1 / (4 * smoothness) if smoothness > 0 else math.inf
    if gradient_std == 0:
        return longest
    return min(longest, norm / (math.sqrt(n_rounds) * gradient_std))


def step_scales(alpha):
    """Steps of the global and the local parameters: (alpha, 1), or (1, 0) at infinity."""
    if not alpha >= 0:
        raise ValueError(f"alpha must be at least 0; got {alpha!r}.")
    return (1.0, 0.0) if math.isinf(alpha) else (float(alpha), 1.0)


def client_shares(n_clients, batch_sizes, weighting):
    """Every client's share of the objective, and its rows in a round: arrays (n_clients,)."""
    _check_choice("weighting", weighting, ("samples", "clients"))
    if not n_clients >= 1:
        raise ValueError(f"n_clients must be at least 1; got {n_clients!r}.")
    sizes = np.asarray(batch_sizes, dtype=float)
    if sizes.shape not in ((), (n_clients,)) or not (sizes >= 1).all():
        raise ValueError(
            f"batch_sizes must be a number of at least 1, or {n_clients} of them; got "
            f"{batch_sizes!r}."
        )
    sizes = np.broadcast_to(sizes, (n_clients,))
    if weighting == "clients":
        return np.full(n_clients, 1 / n_clients), sizes
    return sizes / sizes.sum(), sizes


def _over(value, scale):
    """Ratio; 0 over 0 is 0."""
    if value == 0:
        return 0.0
    return value / scale if scale > 0 else math.inf


def _check_fraction(client_fraction):
    if not 0 < client_fraction <= 1:
        raise ValueError(f"client_fraction must be in (0, 1]; got {client_fraction!r}.")
    return float(client_fraction)


def _check_at_least_0(name, value):
    if not value >= 0:
        raise ValueError(f"{name} must be at least 0; got {value!r}.")


def _check_choice(name, value, allowed):
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}.")
