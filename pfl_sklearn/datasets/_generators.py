"""Clients drawn from the papers' populations, and tables of counts as rows."""

from typing import Any

import numpy as np
from scipy.stats import truncnorm
from sklearn.utils import Bunch, check_consistent_length, check_random_state

from pfl_sklearn._typing import Integers, RandomState


def make_gaussian_clients(
    n_clients: int = 100,
    n_rows: Any = 10,
    *,
    mean: Any = 0.0,
    between_std: float = 1.0,
    noise_std: float = 1.0,
    n_outputs: int | None = None,
    random_state: RandomState = None,
) -> Bunch:
    """Draw Gaussian clients: means around the population mean, rows around the clients' means.

    Parameters
    ----------
    n_clients : int, default=100
        Number of clients.
    n_rows : int or array-like of shape (n_clients,), default=10
        Number of rows of every client, at least 1.
    mean : float or array-like of shape (n_outputs,), default=0.0
        Population mean.
    between_std, noise_std : float, default=1.0
        Standard deviations of the clients' means and of the rows around them.
    n_outputs : int or None, default=None
        Number of outputs. None: one-dimensional targets.
    random_state : int, RandomState instance or None, default=None
        Seed of the draws.

    Returns
    -------
    Bunch
        - ``data``: ndarray of shape (n, 1), zeros;
        - ``target``: ndarray of shape (n,) or (n, n_outputs);
        - ``groups``: ndarray of shape (n,), 0 to n_clients - 1;
        - ``client_means``: ndarray of shape (n_clients,) or (n_clients, n_outputs).

    Notes
    -----
    The population of Section 2.1 of Ozkara et al. (2023). Their experiment has 10,000 clients with
    15 rows, ``between_std=0.1`` and ``noise_std=0.5``.

    Examples
    --------
    >>> from pfl_sklearn.datasets import make_gaussian_clients
    >>> clients = make_gaussian_clients(3, [1, 2, 3], random_state=0)
    >>> clients.groups
    array([0, 1, 1, 2, 2, 2])
    """
    rng = check_random_state(random_state)
    sizes = rows_per_client("n_rows", n_rows, n_clients)
    width = 1 if n_outputs is None else n_outputs
    means = np.broadcast_to(mean, (width,)) + between_std * rng.standard_normal((n_clients, width))
    groups = np.repeat(np.arange(n_clients), sizes)
    target = means[groups] + noise_std * rng.standard_normal((len(groups), width))
    if n_outputs is None:
        means, target = means[:, 0], target[:, 0]
    # Means need no features, but scikit-learn's tools want a column.
    return Bunch(data=np.zeros((len(groups), 1)), target=target, groups=groups, client_means=means)


def make_bernoulli_clients(
    n_clients: int = 10000,
    n_trials: Any = 14,
    *,
    prior: str = "beta",
    random_state: RandomState = None,
) -> Bunch:
    """Draw clients with binary outcomes from the populations of the paper's experiment.

    Parameters
    ----------
    n_clients : int, default=10000
        Number of clients.
    n_trials : int or array-like of shape (n_clients,), default=14
        Number of trials of every client, at least 1.
    prior : {"beta", "normal", "uniform", "3-spike"}, default="beta"
        Population of the probabilities: Beta(4, 4); a normal with mean 1/2 and standard deviation
        .15, truncated to [0, 1]; uniform; or 1/4, 1/2 and 3/4 with equal weights.
    random_state : int, RandomState instance or None, default=None
        Seed of the draws.

    Returns
    -------
    Bunch
        - ``successes``, ``trials``: ndarrays of shape (n_clients,);
        - ``groups``: ndarray of shape (n_clients,), 0 to n_clients - 1;
        - ``probabilities``: ndarray of shape (n_clients,).

    Notes
    -----
    "Synthetic experiments in Bernoulli setting" in the appendix of Ozkara et al. (2023).

    Examples
    --------
    >>> from pfl_sklearn.datasets import make_bernoulli_clients
    >>> clients = make_bernoulli_clients(1000, prior="3-spike", random_state=0)
    >>> sorted(set(clients.probabilities.tolist()))
    [0.25, 0.5, 0.75]
    """
    rng = check_random_state(random_state)
    draws = {
        "beta": lambda: rng.beta(4, 4, n_clients),
        # Bounds are in standard deviations from the mean.
        "normal": lambda: truncnorm.rvs(
            -0.5 / 0.15, 0.5 / 0.15, loc=0.5, scale=0.15, size=n_clients, random_state=rng
        ),
        "uniform": lambda: rng.uniform(size=n_clients),
        "3-spike": lambda: rng.choice([0.25, 0.5, 0.75], n_clients),
    }
    if prior not in draws:
        raise ValueError(f"prior must be one of {', '.join(draws)}; got {prior!r}.")
    probabilities = draws[prior]()
    trials = rows_per_client("n_trials", n_trials, n_clients)
    return Bunch(
        successes=rng.binomial(trials, probabilities),
        trials=trials,
        groups=np.arange(n_clients),
        probabilities=probabilities,
    )


def rows_per_client(name: str, values: Any, n_clients: int) -> Integers:
    """One whole number of at least 1 per client, as an array."""
    values = np.asarray(values)
    # No floats: 0.2 is a share, which would be rounded to no rows.
    if values.shape not in ((), (n_clients,)) or values.dtype.kind not in "iu":
        raise ValueError(f"{name} must be a whole number or {n_clients} of them; got {values!r}.")
    if (values < 1).any():
        raise ValueError(f"{name} must be at least 1; got {values.min()}.")
    # A copy, as a broadcast array cannot be written to.
    return np.broadcast_to(values, (n_clients,)).copy()


def expand_counts(successes: Any, trials: Any, groups: Any = None) -> tuple[Integers, np.ndarray]:
    """Expand a table of counts to one 0/1 row per trial.

    Parameters
    ----------
    successes, trials : array-like of whole numbers, shape (n_clients,)
        Each client's counts, with ``0 <= successes <= trials``.
    groups : array-like of shape (n_clients,), default=None
        Client ids. None: positions in the table.

    Returns
    -------
    y : ndarray of shape (n_rows,)
        Outcomes, with each client's successes before its failures.
    groups : ndarray of shape (n_rows,)
        Client id of every row.

    Raises
    ------
    ValueError
        If lengths differ, or unless ``0 <= successes <= trials``.

    Examples
    --------
    >>> from pfl_sklearn.datasets import expand_counts
    >>> y, groups = expand_counts([1, 2], [2, 3], ["a", "b"])
    >>> y.tolist(), groups.tolist()
    ([1, 0, 1, 1, 0], ['a', 'a', 'b', 'b', 'b'])
    """
    successes, trials = np.asarray(successes), np.asarray(trials)
    check_consistent_length(successes, trials, groups)
    if ((successes < 0) | (successes > trials)).any():
        raise ValueError("successes must be between 0 and trials in every row.")
    ids = np.arange(len(trials)) if groups is None else np.asarray(groups)
    # The order of a client's trials is not in the counts, and means do not depend on it.
    counts = np.column_stack([successes, trials - successes]).ravel()
    y = np.repeat(np.tile([1, 0], len(trials)), counts)
    return y, np.repeat(ids, trials)


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

    Notes
    -----
    This is the "Synthetic dataset" of Section 6 of Bietti et al. (2022, ICML).
    ``theory.linear_excess_risk(fitted_coef, coef, feature_variance)`` is the excess squared error.
    The paper does not print :math:`\tau`; the default is that of the authors' code. Coefficients
    are drawn in the order of that code, so a seed gives the same clients. A round of the paper
    takes 10 fresh rows of every client. Memory: 8 bytes times n times `n_features`, and twice that
    during the draw.

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
    deviations = between_std * rng.standard_normal((n_clients, n_features))
    deviations[:, : n_features - n_private_features] = 0
    coef = shared + deviations
    # The covariance of Section 6: the first features vary most.
    variance = 1 / np.arange(1, n_features + 1)
    groups = np.repeat(np.arange(n_clients), sizes)
    data = rng.standard_normal((len(groups), n_features))
    # In place: a product would be a second array of the size of the table.
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
