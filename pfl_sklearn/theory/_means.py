r"""Clients' means: how far to shrink them, and how much that reduces the error.

Client i's mean of :math:`n_i` rows has sampling variance :math:`s_i^2 = \sigma_x^2 / n_i` around
:math:`\theta_i`. The :math:`\theta_i` are normal around the population mean with variance
:math:`\sigma_\theta^2`.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from pfl_sklearn._typing import Floats
from pfl_sklearn.privacy import StochasticQuantizer, calibrate_noise
from pfl_sklearn.theory._checks import check_numbers, check_one_of


class WeightAndRisk(NamedTuple):
    """Weight on a client's own mean, and the expected squared error of the estimate.

    Parameters
    ----------
    weight : float or ndarray of shape (n_clients,)
        Weight on the client's own mean, between 0 and 1.
    risk : float or ndarray of shape (n_clients,)
        Expected squared error of one client's estimate, summed over coordinates.
    """

    weight: float | Floats
    risk: float | Floats


def own_weight(prior_variance: float | Floats, sampling_variance: float | Floats) -> Floats:
    r"""Weight on a client's own estimate.

    .. math:: a = \frac{\sigma_\theta^2}{\sigma_\theta^2 + s^2}

    Theorem 1 (ICLR) of Ozkara et al. (2023).

    Parameters
    ----------
    prior_variance, sampling_variance : float or ndarray, in [0, inf]
        Variance between clients, and of the client's own estimate.

    Returns
    -------
    ndarray
        0 where both variances are 0 (nothing differs); 1 where one is infinite.

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn.theory import own_weight
    >>> own_weight(np.array([0.0, 1.0, np.inf]), 1.0)
    array([0. , 0.5, 1. ])
    """
    check_numbers("at least 0", prior_variance=prior_variance, sampling_variance=sampling_variance)
    total = prior_variance + sampling_variance
    finite = (total > 0) & (total < np.inf)
    # Infinity over infinity is 1 here: without pooling there is nothing to shrink towards.
    limits = np.array(np.isinf(total), dtype=float)
    return np.divide(prior_variance, total, out=limits, where=finite)


def mean_risk(
    n_clients: int, n_rows: int, between_variance: float, noise_variance: float, n_features: int = 1
) -> WeightAndRisk:
    r"""Weight and risk of personalized means, with known variances and an unknown population mean.

    .. math::

       a = \frac{\sigma_\theta^2}{\sigma_\theta^2 + \sigma_x^2 / n}, \qquad
       E \|\hat\theta_i - \theta_i\|^2
       = \frac{d \sigma_x^2}{n} \Bigl( \frac{1 - a}{m} + a \Bigr)

    Theorem 1 (ICLR) of Ozkara et al. (2023), whose upper bound is attained: it is the minimax risk.

    Parameters
    ----------
    n_clients, n_rows : int
        Clients m, and rows n of every client.
    between_variance, noise_variance : float, >= 0
        Variances of a coordinate between clients and of a row around its client.
    n_features : int, default=1
        Number d of coordinates.

    Returns
    -------
    WeightAndRisk
        The other part of the weight is on the mean of all clients, this one included.

    Examples
    --------
    >>> from pfl_sklearn.theory import mean_risk
    >>> weight, risk = mean_risk(10_000, 15, between_variance=0.01, noise_variance=0.25)
    >>> round(weight, 3), round(risk, 5)
    (0.375, 0.00625)
    """
    check_numbers("finite and at least 1", n_clients=n_clients, n_rows=n_rows)
    check_numbers("finite and at least 1", n_features=n_features)
    check_numbers("at least 0", between_variance=between_variance)
    check_numbers("finite and at least 0", noise_variance=noise_variance)
    sampling = noise_variance / n_rows
    weight = float(own_weight(between_variance, sampling))
    return WeightAndRisk(weight, n_features * sampling * ((1 - weight) / n_clients + weight))


def released_mean_risk(
    n_clients: int,
    n_rows: Any,
    between_variance: float,
    noise_variance: float,
    release_variance: Any,
    *,
    n_features: int = 1,
    version: str = "left_out",
) -> WeightAndRisk:
    r"""Weight and risk of personalized means when each client sees the others through a release.

    Each client shrinks towards a mean that leaves its own release out:

    .. math::

       V_i = \Bigl( \sum_{j \ne i} \frac{1}{\sigma_\theta^2 + s_j^2 + q_j^2} \Bigr)^{-1}, \qquad
       a_i = \frac{\sigma_\theta^2 + V_i}{\sigma_\theta^2 + V_i + s_i^2}, \qquad
       E \|\hat\theta_i - \theta_i\|^2 = d a_i s_i^2 .

    Theorem 2 (ICLR) of Ozkara et al. (2023). Its bound is attained too. Both versions assume
    unbiased releases, so nothing may be clipped.

    Parameters
    ----------
    n_clients : int, >= 2
        Number m of clients.
    n_rows : int or array-like of shape (n_clients,)
        Rows of every client.
    between_variance, noise_variance, n_features
        As in :func:`mean_risk`.
    release_variance : float or array-like of shape (n_clients,), in [0, inf]
        Variance :math:`q_j^2` that the release adds to every coordinate; infinite for a client
        that sends nothing.
    version : {"left_out", "printed"}, default="left_out"
        "printed" shrinks towards the mean of all releases, including the client's own, with
        :math:`q^2 / (m - 1)` for :math:`V_i` and the risk of :func:`mean_risk`. It is never better
        and needs equal clients.

    Returns
    -------
    WeightAndRisk
        Arrays of shape (n_clients,) unless all clients are equal.

    Examples
    --------
    >>> from pfl_sklearn.theory import released_mean_risk
    >>> round(released_mean_risk(5, 1, 0.2, 1.0, 5.0).risk, 3)
    0.636
    >>> round(released_mean_risk(5, 1, 0.2, 1.0, 5.0, version="printed").risk, 3)
    0.673
    """
    check_numbers("finite and at least 2", n_clients=n_clients)
    check_numbers("finite and at least 1", n_rows=n_rows, n_features=n_features)
    check_numbers("at least 0", between_variance=between_variance)
    check_numbers("at least 0", release_variance=release_variance)
    check_numbers("finite and at least 0", noise_variance=noise_variance)
    check_one_of("version", version, ("left_out", "printed"))
    sampling, release = noise_variance / np.asarray(n_rows), np.asarray(release_variance)
    equal = sampling.ndim == release.ndim == 0
    if version == "printed":
        if not equal:
            raise ValueError("version='printed' needs one n_rows and one release_variance for all.")
        # The theorem is Theorem 1 (ICLR) with the noise of the others' mean as spread between
        # clients.
        spread = between_variance + float(release) / (n_clients - 1)
        return mean_risk(n_clients, n_rows, spread, noise_variance, n_features)
    # One weight a client, also of equal ones: each leaves its own out of the sum.
    weights = np.broadcast_to(1 / (between_variance + sampling + release), (n_clients,))
    with np.errstate(divide="ignore"):  # infinite if none of the others sends anything
        others = 1 / (weights.sum() - weights)
    weight = own_weight(between_variance + others, sampling)
    risk = n_features * weight * sampling
    if equal:
        return WeightAndRisk(float(weight[0]), float(risk[0]))
    return WeightAndRisk(weight, risk)


def mean_half_width(
    n_clients: int,
    n_rows: int,
    between_std: float,
    noise_std: float,
    *,
    mean_bound: float = 0.0,
    n_features: int = 1,
    version: str = "sound",
) -> float:
    r"""Half width of a range that holds every client's mean, with high probability.

    .. math:: b = r + \Bigl(\sigma_\theta + \frac{\sigma_x}{\sqrt n}\Bigr) \sqrt{2 \log(2 m^2 n d)}

    Theorem 2 (ICLR) of Ozkara et al. (2023), which states the probability 2 / (m n).

    Parameters
    ----------
    n_clients, n_rows : int
        Clients m, and rows n of every client.
    between_std, noise_std : float, >= 0
        Standard deviations of a coordinate between clients and of a row around its client.
    mean_bound : float, >= 0, default=0.0
        Bound r on the coordinates of the population mean.
    n_features : int, default=1
        Number d of coordinates.
    version : {"sound", "printed"}, default="sound"
        "printed" uses :math:`\sqrt{\log(m^2 n)}`. Some client exceeds that range far more often
        than the theorem states.

    Returns
    -------
    float
        With probability at least 1 - 1 / (m n), every coordinate of every client lies inside.

    Examples
    --------
    >>> from pfl_sklearn.theory import mean_half_width
    >>> round(mean_half_width(10_000, 15, 0.1, 0.5), 2)
    1.51
    """
    check_numbers("finite and at least 1", n_clients=n_clients, n_rows=n_rows)
    check_numbers("finite and at least 1", n_features=n_features)
    check_numbers("finite and at least 0", between_std=between_std, noise_std=noise_std)
    check_numbers("finite and at least 0", mean_bound=mean_bound)
    # A normal variable exceeds sqrt(2 log(2 / p)) deviations with probability below p; p is
    # 1 / (m n) over m d coordinates. The printed width has neither of the factors 2.
    logs = {
        "sound": 2 * math.log(2 * n_clients**2 * n_rows * n_features),
        "printed": math.log(n_clients**2 * n_rows),
    }
    check_one_of("version", version, logs)
    spread = between_std + noise_std / math.sqrt(n_rows)
    return mean_bound + spread * math.sqrt(logs[version])


def mixture_mean_radius(
    n_clients: int,
    n_rows: int,
    noise_std: float,
    *,
    n_features: int = 1,
    point_bound: float = 0.0,
    version: str = "sound",
) -> float:
    r"""Radius of a ball around 0 that holds every client's mean, under a discrete prior.

    .. math:: r + \frac{\sigma_x}{\sqrt n} \Bigl(\sqrt d + \sqrt{2 \log(m^2 n)}\Bigr)

    Lemma 3 (ICLR) of Ozkara et al. (2023). For private and quantized fits of Algorithm 3 (ICLR) the
    paper clips to the printed radius.

    Parameters
    ----------
    n_clients, n_rows, noise_std, n_features
        As in :func:`mean_half_width`.
    point_bound : float, >= 0, default=0.0
        Bound r on the L2 norms of the prior's points.
    version : {"sound", "printed"}, default="sound"
        "printed" is :math:`r + (\sigma_x / \sqrt n) (4 \sqrt d + 2 \sqrt{\log(m^2 n)})`. It holds
        too, but is up to four times as large as it need be.

    Returns
    -------
    float
        With probability at least 1 - 1 / (m n), every client's mean lies inside. It may serve as
        `clip_norm`, if its arguments are known without the data.

    Examples
    --------
    >>> from pfl_sklearn.theory import mixture_mean_radius
    >>> for version in ("sound", "printed"):
    ...     radius = mixture_mean_radius(1000, 10, 1.0, n_features=10, version=version)
    ...     print(version, round(radius, 2))
    sound 2.8
    printed 6.54
    """
    check_numbers("finite and at least 1", n_clients=n_clients, n_rows=n_rows)
    check_numbers("finite and at least 1", n_features=n_features)
    check_numbers("finite and at least 0", noise_std=noise_std, point_bound=point_bound)
    log = math.log(n_clients**2 * n_rows)
    # The norm of d standard normals is at most sqrt(d) on average, and concentrates as one of them.
    factors = {
        "sound": math.sqrt(n_features) + math.sqrt(2 * log),
        "printed": 4 * math.sqrt(n_features) + 2 * math.sqrt(log),
    }
    check_one_of("version", version, factors)
    return point_bound + noise_std / math.sqrt(n_rows) * factors[version]


def quantizer_variance(half_width: float, n_bits: int) -> float:
    r"""Largest variance of stochastic rounding to :math:`2^k` levels on [-b, b].

    .. math:: \sigma_q^2 = \Bigl( \frac{b}{2^k - 1} \Bigr)^2

    Theorem 2 (ICLR), part 1, of Ozkara et al. (2023). See
    :class:`~pfl_sklearn.privacy.StochasticQuantizer`.

    Parameters
    ----------
    half_width : float, > 0
        b.
    n_bits : int, >= 1
        Bits k per coordinate.

    Examples
    --------
    >>> from pfl_sklearn.theory import quantizer_variance
    >>> quantizer_variance(3.0, 2)
    1.0
    """
    check_numbers("finite and above 0", half_width=half_width)
    check_numbers("finite and at least 1", n_bits=n_bits)
    return StochasticQuantizer(n_bits, half_width).noise_variance


def local_noise_std(
    half_width: float, epsilon: float, delta: float, n_features: int = 1, *, version: str = "sound"
) -> float:
    r"""Noise that local privacy needs on every coordinate of a mean in :math:`[-b, b]^d`.

    It is the smallest noise for the :math:`L_2` sensitivity :math:`2 b \sqrt d`.

    Theorem 2 (ICLR), part 2, of Ozkara et al. (2023).

    Parameters
    ----------
    half_width : float, > 0
        Half b of a coordinate's range.
    epsilon, delta : float
        Privacy of one client's report: above 0, and in (0, 1).
    n_features : int, default=1
        Number d of coordinates.
    version : {"sound", "printed"}, default="sound"
        "printed" is :math:`(b / \epsilon) \sqrt{8 \log(2 / \delta)}` for every d. That is enough
        for one coordinate and, as the theorem requires, an epsilon below 1. With 100 coordinates
        and delta = 1e-4, a stated epsilon of 1 is really 10.3.

    Returns
    -------
    float
        Standard deviation.

    Examples
    --------
    >>> from pfl_sklearn.theory import local_noise_std
    >>> [round(local_noise_std(1.0, 0.5, 1e-4, version=v), 1) for v in ("sound", "printed")]
    [11.8, 17.8]
    """
    check_numbers("finite and above 0", half_width=half_width)
    check_numbers("above 0", epsilon=epsilon)
    check_numbers("in (0, 1)", delta=delta)
    check_numbers("finite and at least 1", n_features=n_features)
    check_one_of("version", version, ("sound", "printed"))
    if version == "printed":
        return half_width / epsilon * math.sqrt(8 * math.log(2 / delta))
    # Another client's mean may lie at the opposite corner of the cube.
    return calibrate_noise(epsilon, delta, 2 * half_width * math.sqrt(n_features))
