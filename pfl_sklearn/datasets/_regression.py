"""Clients with linear models that share most of their coefficients."""

from typing import Any

import numpy as np
from sklearn.utils import Bunch, check_random_state

from pfl_sklearn._typing import RandomState
from pfl_sklearn.datasets._generators import rows_per_client


def make_ppsgd_regression(
    n_clients: int = 1000,
    n_rows: Any = 20,
    n_features: int = 100,
    n_private_features: int = 5,
    *,
    coef_std: float = 10.0,
    between_std: float = 0.01,
    noise_std: float = 0.01,
    random_state: RandomState = None,
) -> Bunch:
    r"""Draw clients with linear models that differ in the last few coefficients.

    .. math::

       \beta_0 \sim N(0, 10^2 I), \quad
       \beta_i = \beta_0 + (0, \dots, 0, \delta_i), \quad \delta_i \sim N(0, 0.01^2 I_5), \quad
       x \sim N(0, \operatorname{diag}(1, 1/2, \dots, 1/d)), \quad
       y = \beta_i^\top x + N(0, \tau^2)

    Parameters
    ----------
    n_clients : int, default=1000
        Number of clients.
    n_rows : int or array-like of shape (n_clients,), default=20
        Number of rows of every client, at least 1.
    n_features : int, default=100
        Number d of features.
    n_private_features : int, default=5
        Number of coordinates in which clients differ, at most `n_features`. They come last.
    coef_std : float, default=10.0
        Standard deviation of the shared coefficients.
    between_std : float, default=0.01
        Standard deviation of the clients' own deviations :math:`\delta_i`.
    noise_std : float, default=0.01
        Standard deviation :math:`\tau` of the rows around their client's model.
    random_state : int, RandomState instance or None, default=None
        Seed of the draws.

    Returns
    -------
    Bunch
        - ``data``: ndarray of shape (n, n_features);
        - ``target``: ndarray of shape (n,);
        - ``groups``: ndarray of shape (n,), 0 to n_clients - 1;
        - ``coef``: ndarray of shape (n_clients, n_features), the clients' true coefficients;
        - ``population_coef``: ndarray of shape (n_features,), :math:`\beta_0`;
        - ``feature_variance``: ndarray of shape (n_features,), variances of the columns.

    Raises
    ------
    ValueError
        If a size is out of its range.

    See Also
    --------
    pfl_sklearn.theory.linear_excess_risk : Excess squared error, in closed form:
        ``linear_excess_risk(fitted_coef, coef, feature_variance)``.

    Notes
    -----
    This is the "Synthetic dataset" of Section 6 of Bietti et al. (2022). The paper does not print
    :math:`\tau`; the default is that of the authors' code. Coefficients are drawn in the order of
    that code, so a seed gives the same clients. A round of the paper takes 10 fresh rows of every
    client. Memory: 8 bytes times n times `n_features`, and twice that during the draw.

    References
    ----------
    Bietti, A., Wei, C.-Y., Dudik, M., Langford, J. and Wu, Z. S. (2022). Personalization improves
    privacy-accuracy tradeoffs in federated learning. ICML.

    Examples
    --------
    >>> from pfl_sklearn.datasets import make_ppsgd_regression
    >>> clients = make_ppsgd_regression(3, 4, n_features=6, n_private_features=2, random_state=0)
    >>> clients.data.shape, (clients.coef[0] == clients.coef[1]).tolist()
    ((12, 6), [True, True, True, True, False, False])
    """
    if not 0 <= n_private_features <= n_features:
        raise ValueError(
            f"n_private_features must be from 0 to n_features={n_features}; got "
            f"{n_private_features!r}."
        )
    rng = check_random_state(random_state)
    sizes = rows_per_client("n_rows", n_rows, n_clients)
    shared = coef_std * rng.standard_normal(n_features)
    # Drawn for all coordinates, as in the authors' code: a seed gives their clients.
    own = between_std * rng.standard_normal((n_clients, n_features))
    own[:, : n_features - n_private_features] = 0
    coef = shared + own
    variance = 1 / np.arange(1, n_features + 1)
    groups = np.repeat(np.arange(n_clients), sizes)
    data = rng.standard_normal((len(groups), n_features))
    data *= np.sqrt(variance)
    noise = noise_std * rng.standard_normal(len(groups))
    target = np.einsum("nd,nd->n", data, coef[groups]) + noise
    return Bunch(
        data=data,
        target=target,
        groups=groups,
        coef=coef,
        population_coef=shared,
        feature_variance=variance,
    )
