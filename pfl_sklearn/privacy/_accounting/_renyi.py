"""From Rényi differential privacy (RDP) to (epsilon, delta)."""

import numpy as np

from pfl_sklearn._typing import TableLike
from pfl_sklearn.privacy._accounting._events import check_positive_delta, check_value


def rdp_to_dp(orders: TableLike, rdp: TableLike, delta: float) -> float:
    r"""Epsilon, in nats, at which a mechanism with given Rényi divergences is (epsilon, delta)-DP.

    .. math:: \epsilon = \min_\lambda \; \epsilon(\lambda) + \frac{\log(1 / \delta) + (\lambda - 1)
              \log(1 - 1 / \lambda) - \log \lambda}{\lambda - 1}

    Parameters
    ----------
    orders : array-like of shape (n_orders,)
        Orders :math:`\lambda` > 1. Every order gives a sound epsilon, and the smallest is returned:
        more orders give a smaller one.
    rdp : array-like of shape (n_orders,)
        Divergence :math:`\epsilon(\lambda)` >= 0 at each order, in nats. Those of several releases
        of one mechanism, or of several mechanisms, add up.
    delta : float in (0, 1)
        Delta at which epsilon is wanted.

    Raises
    ------
    ValueError
        If a number is out of its range, or `orders` and `rdp` differ in length.

    Notes
    -----
    Proposition 12 of Canonne, Kamath and Steinke (2020); Lemma 1 (ICLR) of Ozkara et al. (2023).
    The older conversion, :math:`\epsilon(\lambda) + \log(1 / \delta) / (\lambda - 1)`, is never
    smaller. For Gaussian noise, :func:`gdp_epsilon` is exact and smaller.

    References
    ----------
    Canonne, C. L., Kamath, G. and Steinke, T. (2020). The discrete Gaussian for differential
    privacy. NeurIPS.

    Ozkara, K., Girgis, A. M., Data, D. and Diggavi, S. (2023). A statistical framework for
    personalized federated learning and estimation: theory, algorithms, and privacy. ICLR.

    Examples
    --------
    Gaussian noise of one sensitivity has the divergence half the order:

    >>> import numpy as np
    >>> from pfl_sklearn.privacy import gdp_epsilon, rdp_to_dp
    >>> orders = np.linspace(1.5, 20, 1000)
    >>> round(rdp_to_dp(orders, orders / 2, delta=1e-5), 3), round(gdp_epsilon(1.0, 1e-5), 3)
    (4.728, 4.377)
    """
    orders, rdp = np.asarray(orders, dtype=float), np.asarray(rdp, dtype=float)
    if orders.ndim != 1 or orders.shape != rdp.shape or not len(orders):
        raise ValueError(
            "orders and rdp must be two sequences of one length, at least 1; got shapes "
            f"{orders.shape} and {rdp.shape}."
        )
    # NaN fails every comparison. An infinite divergence is that of an order which says nothing.
    check_value("orders", orders, bool(np.all((orders > 1) & (orders < np.inf))), "in (1, inf)")
    check_value("rdp", rdp, bool(np.all(rdp >= 0)), "at least 0")
    check_positive_delta(delta)
    excess = orders - 1
    epsilons = rdp + np.log1p(-1 / orders) - (np.log(delta) + np.log(orders)) / excess
    return max(0.0, float(epsilons.min()))
