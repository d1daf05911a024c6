"""Clients' proportions under a beta prior: moments, weights and risk."""

import math
from typing import Any

import numpy as np

from pfl_sklearn._typing import Floats
from pfl_sklearn.theory._checks import check_numbers, check_one_of


def beta_moments(alpha: Any, beta: Any) -> tuple[Any, Any]:
    r"""Mean and variance of a beta distribution.

    .. math::

       \mu = \frac{\alpha}{\alpha + \beta}, \qquad
       \sigma^2 = \frac{\mu (1 - \mu)}{\alpha + \beta + 1}

    Section 2.2 of Ozkara et al. (2023).

    Parameters
    ----------
    alpha, beta : float or ndarray, > 0
        Parameters of the beta distribution.

    Returns
    -------
    mean, variance : float or ndarray

    Examples
    --------
    >>> from pfl_sklearn.theory import beta_moments
    >>> beta_moments(1.0, 3.0)
    (0.25, 0.0375)
    """
    check_numbers("finite and above 0", alpha=alpha, beta=beta)
    total = alpha + beta
    mean = alpha / total
    return mean, mean * (1 - mean) / (total + 1)


def beta_own_weight(mean: Floats, variance: Floats, trials: Any, minus_one: bool = True) -> Floats:
    r"""Weight on a client's own share of successes, from the population's mean and variance.

    .. math:: a = \frac{n}{\alpha + \beta + n} = \frac{n}{\mu (1 - \mu) / \sigma^2 - 1 + n}

    Parameters
    ----------
    mean, variance : ndarray
        Mean and variance of the clients' probabilities.
    trials : ndarray, >= 1
        The client's number of trials n.
    minus_one : bool, default=True
        True gives equation 6 (ICLR). False drops the -1, which gives equation 32 (ICLR) and the
        weight of Theorem 4 (ICLR).

    Returns
    -------
    ndarray
        0 where the variance is not positive. Where the variance is too large for any beta
        distribution, the weight is negative or above 1.

    Notes
    -----
    The weight is exact for the population's own moments. The paper uses the mean and variance of
    the clients' *shares* instead, which include sampling variance;
    :func:`debiased_share_variance` removes it.

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn.theory import beta_own_weight
    >>> beta_own_weight(np.array(0.25), np.array(0.0375), np.array([4, 12]))
    array([0.5 , 0.75])
    """
    # Means and variances of noisy reports may be anywhere.
    check_numbers("finite", mean=mean, variance=variance)
    check_numbers("finite and at least 1", trials=trials)
    limit = mean * (1 - mean)
    with np.errstate(divide="ignore", invalid="ignore"):  # where the variance is 0, see below
        weight = trials / (limit / np.asarray(variance) - minus_one + trials)
    return np.where(variance <= 0, 0.0, weight)


def beta_shrinkage(icc: float, trials: Any) -> Floats:
    r"""Weight on the population under the beta prior with this intraclass correlation.

    .. math:: 1 - a = \frac{\alpha + \beta}{\alpha + \beta + n}, \qquad
       \alpha + \beta = \frac{1}{\text{icc}} - 1

    Parameters
    ----------
    icc : float in [0, 1]
        Intraclass correlation: variance of the clients' probabilities over mean (1 - mean).
    trials : ndarray of shape (n_clients,)
        Number of trials n of every client.

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn.theory import beta_shrinkage
    >>> beta_shrinkage(0.2, np.array([4, 12]))
    array([0.5 , 0.25])
    """
    check_numbers("finite", icc=icc)
    check_numbers("finite and at least 0", trials=trials)
    if icc <= 0:  # alpha + beta is infinite
        return np.ones(len(trials))
    concentration = max(1 / icc - 1, 0.0)  # rounding may leave an icc just above 1
    return concentration / (concentration + trials)


def debiased_share_variance(mean: float, spread: float, inverse_trials: float) -> float:
    r"""Variance between clients' probabilities, from the spread of their shares.

    .. math:: \sigma^2 = \frac{S^2 - \mu (1 - \mu) h}{1 - h}

    The estimate is unbiased. Ozkara et al. (2023) use :math:`S^2` instead.

    Parameters
    ----------
    mean : float
        Mean of the clients' shares of successes.
    spread : float
        Their variance :math:`S^2`.
    inverse_trials : float in (0, 1)
        Mean h over clients of one over their number of trials.

    Returns
    -------
    float
        Negative where the shares differ less than chance alone would make them.

    Examples
    --------
    >>> from pfl_sklearn.theory import debiased_share_variance
    >>> round(debiased_share_variance(0.25, 0.0375 + 0.15 / 10, 1 / 10), 4)
    0.0375
    """
    check_numbers("finite", mean=mean, spread=spread)
    check_numbers("in (0, 1)", inverse_trials=inverse_trials)
    return (spread - mean * (1 - mean) * inverse_trials) / (1 - inverse_trials)


def beta_risk(alpha: float, beta: float, trials: Any) -> float | Floats:
    r"""Expected squared error of a client's posterior mean under a known beta prior.

    .. math::

       E (\hat p_i - p_i)^2 = \frac{\alpha \beta}
       {(\alpha + \beta) (\alpha + \beta + 1) (\alpha + \beta + n)}

    Remark 5 (ICLR) in the appendix of Ozkara et al. (2023).

    Parameters
    ----------
    alpha, beta : float, > 0
        Parameters of the prior.
    trials : int or ndarray, >= 1
        Number of trials n.

    Returns
    -------
    float or ndarray
        The client's own proportion has (alpha + beta + n) / n times this error.

    Examples
    --------
    >>> from pfl_sklearn.theory import beta_risk
    >>> round(beta_risk(5.0, 5.0, 14), 4)
    0.0095
    """
    check_numbers("finite and above 0", alpha=alpha, beta=beta)
    check_numbers("finite and at least 1", trials=trials)
    total = alpha + beta
    return alpha * beta / (total * (total + 1) * (total + trials))


def beta_risk_bound(
    alpha: float,
    beta: float,
    trials: int,
    n_clients: int,
    weight: float | Floats,
    *,
    epsilon: float = math.inf,
    version: str = "sound",
) -> float | Floats:
    r"""Bound on the squared error of the leave-one-out estimates of equation 6 (ICLR).

    A client shrinks its share towards the mean :math:`\hat\mu_i` of the others' reports, with a
    weight a that depends on these reports alone:

    .. math::

       a^2 \frac{\alpha \beta}{n (\alpha + \beta) (\alpha + \beta + 1)} + (1 - a)^2 \Bigl(
       \frac{\alpha \beta}{(\alpha + \beta)^2 (\alpha + \beta + 1)} + c^2 \Bigr), \qquad
       c^2 = \frac{w^2 \log(2 m^2 n)}{2 (m - 1)},

    where w is the width of the reports' range: 1 for exact shares, and
    :math:`(e^\epsilon + 1) / (e^\epsilon - 1)` for messages of one bit.

    Parameters
    ----------
    alpha, beta : float, > 0
        Parameters of the prior of the clients' probabilities.
    trials : int, >= 1
        Number of trials n of every client.
    n_clients : int, >= 2
        Number m of clients.
    weight : float or ndarray
        Weight a on the client's own share, as of :func:`beta_own_weight`. The theorems have the
        mean over draws of the weight: average the result.
    epsilon : float in (0, inf], default=inf
        Local privacy of the messages of ``mechanism="one_bit"``. Infinity: exact shares, as in
        Theorem 3 (ICLR).
    version : {"sound", "printed"}, default="sound"
        "printed" has :math:`3 \log(4 m^2 n) / (m - 1)` for :math:`c^2` without privacy
        (Theorem 3, ICLR), which is larger than it need be, and :math:`w^2 \log(4 m^2 n) / (3 (m -
        1))` with it (Theorem 4, ICLR), which is smaller than Hoeffding's inequality allows.

    Returns
    -------
    float or ndarray
        Of the shape of `weight`. With probability at least 1 - 1 / (m n) over all reports, the
        expected squared error of every client, given the others' reports, is at most that.

    Notes
    -----
    Theorems 3 and 4 (ICLR) of Ozkara et al. (2023), for the estimates of ``BernoulliMean`` with
    ``method="printed"`` or "printed_eq32". The bound is attained where :math:`\hat\mu_i` is off by
    c. The exponent of the paper's (35) is one and a half times that of Hoeffding's inequality.

    Examples
    --------
    >>> from pfl_sklearn.theory import beta_risk_bound
    >>> for version in ("sound", "printed"):
    ...     print(version, round(beta_risk_bound(5.0, 5.0, 14, 1000, 0.6, version=version), 4))
    sound 0.0109
    printed 0.0181
    """
    check_numbers("finite and above 0", alpha=alpha, beta=beta)
    check_numbers("finite and at least 1", trials=trials)
    check_numbers("finite and at least 2", n_clients=n_clients)
    check_numbers("finite", weight=weight)
    check_numbers("above 0", epsilon=epsilon)
    width = 1.0 if math.isinf(epsilon) else 1 / math.tanh(epsilon / 2)  # (E + 1) / (E - 1)
    # Hoeffding's inequality for the mean of m - 1 reports, with a chance of failing of 1 / (m^2 n)
    # for each of the m clients, on both sides.
    calls = n_clients**2 * trials
    limits = {
        "sound": width**2 * math.log(2 * calls) / 2,
        "printed": math.log(4 * calls) * (3 if math.isinf(epsilon) else width**2 / 3),
    }
    check_one_of("version", version, limits)
    mean, variance = beta_moments(alpha, beta)
    sampling = (mean * (1 - mean) - variance) / trials
    return weight**2 * sampling + (1 - weight) ** 2 * (variance + limits[version] / (n_clients - 1))
