r"""Means of agents who receive values one at a time: errors, and variances of noisy means.

Agent a has t rows with variance :math:`\sigma_a^2`, all in a range of length 2 L. It sends a noisy
mean at the times :math:`t_1 < \dots < t_k`. The noise is a sum of independent noises, each of
variance :math:`s^2`, on sums of consecutive rows ("partial sums").
"""

import math
from typing import Any

import numpy as np

from pfl_sklearn._typing import Floats
from pfl_sklearn.privacy import calibrate_noise
from pfl_sklearn.theory._checks import check_numbers, check_one_of


def stream_error(n_rows: Any, noise_variance: Any, class_size: Any = 1) -> float | Floats:
    r"""Mean squared error of agents who know all rows of their class, averaged over the agents.

    .. math:: \frac{1}{M t} \sum_{a=1}^M \frac{\sigma_a^2}{|C_a|}

    Section V of Yakimenka et al. (2024). A `class_size` of 1 gives Proposition 1, the local error.
    The true sizes give the error with public data and known classes, which no method can beat.

    Parameters
    ----------
    n_rows : int or ndarray
        Rows t of every agent.
    noise_variance : float or array-like of shape (n_agents,)
        Variance :math:`\sigma_a^2` of an agent's rows.
    class_size : int or array-like of shape (n_agents,), default=1
        Agents :math:`|C_a|` in the class of an agent, itself included. 1: every agent works alone.

    Returns
    -------
    float or ndarray
        Of the shape of `n_rows`.

    Examples
    --------
    Three agents with 50 rows each, of whom the first two are of one class:

    >>> from pfl_sklearn.theory import stream_error
    >>> stream_error(50, 0.25), round(stream_error(50, 0.25, class_size=[2, 2, 1]), 5)
    (0.005, 0.00333)
    """
    check_numbers("finite and at least 1", n_rows=n_rows, class_size=class_size)
    check_numbers("finite and at least 0", noise_variance=noise_variance)
    error = np.mean(np.asarray(noise_variance) / np.asarray(class_size)) / n_rows
    return error if np.ndim(n_rows) else float(error)


def received_mean_variance(
    times: Any,
    noise_variance: float,
    release_variance: float,
    *,
    mechanism: str = "pm1",
    weights: Any = "last",
) -> float:
    r"""Variance of a weighted sum T of the noisy means that a recipient got from one sender.

    .. math:: \mathrm{Var}\, T = \sigma^2 \sum_{i=1}^k (t_i - t_{i-1}) c_{i,k}^2
              + s^2 \sum_{(i, j)} c_{i,j}^2, \qquad c_{i,j} = \sum_{l=i}^{j} \frac{w_l}{t_l},

    with :math:`t_0 = 0`. The second sum is over partial sums, each of which is in messages i to j.

    Parameters
    ----------
    times : array-like of shape (n_messages,)
        Rows :math:`t_i` that the sender had at each message: increasing, from 1 on.
    noise_variance : float, >= 0
        Variance :math:`\sigma^2` of the sender's rows.
    release_variance : float, >= 0
        Variance :math:`s^2` of the noise on a partial sum, see :func:`partial_sum_variance`.
    mechanism : {"pm1", "pm2"}, default="pm1"
        Partial sums lie between two messages ("pm1"), or are those of a binary tree over these
        ("pm2").
    weights : {"last", "mom", "wmom"} or array-like of shape (n_messages,), default="last"
        Weights :math:`w_i` of the means: all on the last one, equal ("mom"), equal from the last
        message on whose number is a power of two ("wmom"), or any others.

    Notes
    -----
    Equation (2) of Yakimenka et al. (2024), with the noise of Section IV, for which they leave the
    formula out. :class:`~pfl_sklearn.online.CollaborativeMean` updates this variance from one
    message to the next.

    Examples
    --------
    >>> from pfl_sklearn.theory import received_mean_variance
    >>> received_mean_variance([5, 10, 15], 0.0, 9.0)  # 9 * 3 / 15 ** 2
    0.12
    >>> round(received_mean_variance([5, 10, 15], 0.0, 9.0, mechanism="pm2"), 3)
    0.08
    """
    check_numbers("finite and at least 1", times=times)
    check_numbers("finite and at least 0", noise_variance=noise_variance)
    check_numbers("finite and at least 0", release_variance=release_variance)
    steps = np.diff(times, prepend=0)
    if not (len(steps) and (steps > 0).all()):
        raise ValueError(f"times must increase, from 1 on; got {times!r}.")
    k = len(steps)
    # Sums from 1 to j of w_l / t_l: every c_ij is a difference of two of them.
    cumulative = np.concatenate(
        [[0.0], np.cumsum(_message_weights(weights, k) / np.asarray(times))]
    )
    first = np.arange(1, k + 1)  # message that first has the noise of a partial sum
    data = noise_variance * steps @ (cumulative[k] - cumulative[first - 1]) ** 2
    if mechanism == "pm1":
        last = np.full(k, k)
    elif mechanism == "pm2":  # it is as long as the lowest power of two in its number
        last = np.minimum(first + (first & -first) - 1, k)
    else:
        raise ValueError(f"mechanism must be 'pm1' or 'pm2'; got {mechanism!r}.")
    release = release_variance * np.sum((cumulative[last] - cumulative[first - 1]) ** 2)
    return float(data + release)


def oracle_stream_error(
    n_rows: Any,
    noise_variance: float,
    release_variance: float,
    labels: Any,
    *,
    mechanism: str = "pm1",
    weights: Any = "last",
) -> float | Floats:
    r"""Mean squared error of agents who know the classes, averaged over the agents.

    .. math:: \frac{1}{M} \sum_{a=1}^M \Bigl( \frac{t}{\sigma^2}
              + \sum_{b \in C_a \setminus a} \frac{1}{\mathrm{Var}\, T_{ba}} \Bigr)^{-1}

    At each step every agent asks the next of the others ("round robin"). It weights its own mean
    and those that it got from its class by their inverse variances; agents that it has not asked
    yet are left out. The middle and right plot of Figure 1 of Yakimenka et al. (2024), who do not
    print the formula.

    Parameters
    ----------
    n_rows : int or array-like of ints of shape (n_times,)
        Rows t of every agent, at least 1.
    noise_variance, release_variance, mechanism, weights
        As in :func:`received_mean_variance`; `noise_variance` is above 0.
    labels : array-like of shape (n_agents,)
        Class of every agent; agents ask one another in this order.

    Returns
    -------
    float or ndarray
        Of the shape of `n_rows`.

    Examples
    --------
    Two agents of three are of one class. Without noise, each gets a mean of nearly as many rows:

    >>> from pfl_sklearn.theory import oracle_stream_error
    >>> round(oracle_stream_error(100, 0.25, 0.0, [0, 0, 1]), 6)
    0.001669
    """
    check_numbers("finite and at least 1", n_rows=n_rows)
    check_numbers("finite and above 0", noise_variance=noise_variance)
    labels = np.asarray(labels)
    if labels.ndim != 1 or not len(labels):
        raise ValueError(f"labels must be one class an agent; got shape {labels.shape}.")
    # Row p of `same`: whether the agent whom each one asks as number p is of its class.
    turned = [np.roll(labels, -shift) for shift in range(1, len(labels))]
    same = np.array(turned, dtype=labels.dtype).reshape(-1, len(labels)) == labels
    found = []
    for t in np.atleast_1d(n_rows):
        precision = np.full(len(labels), t / noise_variance)
        for first, asked in enumerate(same[:t], 1):
            times = np.arange(first, t + 1, len(same))
            received = received_mean_variance(
                times, noise_variance, release_variance, mechanism=mechanism, weights=weights
            )
            precision += asked / received
        found.append(np.mean(1 / precision))
    return np.array(found) if np.ndim(n_rows) else float(found[0])


def _message_weights(weights, k):
    """Weights (k,) of the messages, given by name or as numbers."""
    if not isinstance(weights, str):
        check_numbers("finite", weights=weights)
        weights = np.asarray(weights, dtype=float)
        if weights.shape != (k,):
            raise ValueError(f"weights must be {k}, one a message; got shape {weights.shape}.")
        return weights
    # "wmom" begins at a power of two, where the tree of PM-II has one sum for all rows so far.
    since = {"last": k, "mom": 1, "wmom": 1 << (k.bit_length() - 1)}
    if weights not in since:
        raise ValueError(f"weights must be one of {', '.join(since)}, or numbers; got {weights!r}.")
    return np.where(np.arange(1, k + 1) >= since[weights], 1 / (k - since[weights] + 1), 0.0)


def partial_sum_variance(
    half_width: float, epsilon: float, delta: float, *, levels: int = 1, version: str = "sound"
) -> float:
    r"""Variance of the noise on a partial sum of rows, for one guarantee over all messages.

    .. math:: s^2 = \ell \Bigl( \frac{2 L}{\mu} \Bigr)^2,

    where :math:`\mu` is the Gaussian-DP parameter of (epsilon, delta).

    Lemma 1 and Section IV of Yakimenka et al. (2024).

    Parameters
    ----------
    half_width : float, > 0
        Half the length L of the range that contains every row.
    epsilon, delta : float
        Privacy of a single row against one recipient, over all messages: above 0, and in (0, 1).
    levels : int, >= 1, default=1
        Partial sums :math:`\ell` that a row is in: 1 with PM-I,
        :math:`\lfloor \log_2 k \rfloor + 1` with PM-II and k messages.
    version : {"sound", "printed"}, default="sound"
        "printed" is :math:`8 L^2 \ell^2 \log(1.25\, \ell / \delta) / \epsilon^2`, which holds for
        an epsilon of up to 1. It divides epsilon and delta by the number of levels, where
        the squares of :math:`\mu` add up.

    Examples
    --------
    The paper's setting: a standard deviation of .5, an epsilon of 1, and 15 levels of PM-II.

    >>> from pfl_sklearn.theory import partial_sum_variance
    >>> promise = {"half_width": 0.75**0.5, "epsilon": 1.0, "delta": 1e-6}
    >>> [round(partial_sum_variance(**promise, version=v), 1) for v in ("sound", "printed")]
    [53.5, 84.2]
    >>> [round(partial_sum_variance(**promise, levels=15, version=v)) for v in ("sound", "printed")]
    [803, 22608]
    """
    check_numbers("finite and above 0", half_width=half_width)
    check_numbers("above 0", epsilon=epsilon)
    check_numbers("in (0, 1)", delta=delta)
    check_numbers("finite and at least 1", levels=levels)
    check_one_of("version", version, ("sound", "printed"))
    if version == "printed":
        return 8 * (half_width * levels / epsilon) ** 2 * math.log(1.25 * levels / delta)
    # A row is in one partial sum of each level, so its replacement moves that many releases.
    return calibrate_noise(epsilon, delta, 2 * half_width, n_releases=levels) ** 2
