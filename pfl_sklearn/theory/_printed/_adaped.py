"""The privacy that the paper claims for DP-AdaPeD, which does not hold."""

from pfl_sklearn._warnings import warn_caller
from pfl_sklearn.privacy import PrivacyWarning
from pfl_sklearn.theory._checks import check_numbers


def printed_adaped_rdp(
    order: float,
    n_rounds: int,
    n_clients: int,
    n_sampled: int,
    clip_norm: float,
    noise_std: float,
    psi_clip_norm: float,
    psi_noise_std: float,
) -> float:
    r"""Rényi divergence that the paper claims for DP-AdaPeD. It is not a valid bound.

    .. math::

       \epsilon(\alpha) = \Bigl( \frac{K}{m} \Bigr)^2 \, 6 \, \frac{T}{\tau} \, \alpha
       \Bigl( \frac{C_1^2}{K \sigma_1^2} + \frac{C_2^2}{K \sigma_2^2} \Bigr)

    Use it to compare published figures, never to protect anybody: it always emits a PrivacyWarning.
    :class:`~pfl_sklearn.AdaPeDClassifier` with ``noise="per_step"`` reports an epsilon that holds.

    Parameters
    ----------
    order : float, > 1
        Order :math:`\alpha` of the divergence.
    n_rounds : int
        Rounds :math:`T / \tau`, each of :math:`\tau` local steps.
    n_clients, n_sampled : int
        All clients m, and those of a round, K.
    clip_norm, psi_clip_norm : float, > 0
        Bounds :math:`C_1` and :math:`C_2` on the gradients of the global network and of psi.
    noise_std, psi_noise_std : float, > 0
        Standard deviations :math:`\sigma_1` and :math:`\sigma_2` of the noise on these gradients,
        in the same units as their bounds.

    Returns
    -------
    float
        In nats; :func:`~pfl_sklearn.privacy.rdp_to_dp` converts it to epsilon as the paper does.

    Notes
    -----
    Theorem 5 (ICLR) of Ozkara et al. (2023). It fails for four reasons:

    - The gradients of a client's :math:`\tau` steps count as one. Their sum moves :math:`\tau`
      times as far, but the noise grows only with :math:`\sqrt \tau`.
    - A fixed number of clients is accounted as if each took part independently.
    - The constant 6 needs more noise than is used in practice.
    - Noise that is fed back in later local steps can be undone there.

    If all clients take part with gradients at their bounds, the divergence between a client's data
    and the opposite data is
    :math:`2 (T / \tau) \tau \alpha (C_1^2 / (K \sigma_1^2) + C_2^2 / (K \sigma_2^2))`. That exceeds
    the paper's claim from :math:`\tau = 4` on.

    Examples
    --------
    >>> import warnings
    >>> from pfl_sklearn.theory import printed_adaped_rdp
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     stated = printed_adaped_rdp(2.0, 100, 50, 10, clip_norm=1.0, noise_std=4.0,
    ...                                 psi_clip_norm=0.1, psi_noise_std=0.4)
    >>> round(stated, 6)
    0.6
    """
    check_numbers("finite and above 1", order=order)
    check_numbers("finite and at least 1", n_rounds=n_rounds, n_clients=n_clients)
    check_numbers("finite and at least 1", n_sampled=n_sampled)
    check_numbers("finite and above 0", clip_norm=clip_norm, psi_clip_norm=psi_clip_norm)
    check_numbers("finite and above 0", noise_std=noise_std, psi_noise_std=psi_noise_std)
    warn_caller(
        "printed_adaped_rdp is the figure that the paper claims for DP-AdaPeD. It does not bound "
        "the privacy loss; AdaPeDClassifier(noise='per_step') reports an epsilon that does.",
        PrivacyWarning,
    )
    # Kept as printed, errors included: published figures are to be compared with it.
    loss = (clip_norm / noise_std) ** 2 + (psi_clip_norm / psi_noise_std) ** 2
    return (n_sampled / n_clients) ** 2 * 6 * n_rounds * order * loss / n_sampled
