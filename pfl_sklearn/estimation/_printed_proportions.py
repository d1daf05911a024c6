"""The weights of the paper, kept so that its figures can be reproduced.

They take the variance of the local proportions for the variance of the clients' true ones, which
counts the sampling variance twice.
"""

import numpy as np

from pfl_sklearn.priors import BetaPrior
from pfl_sklearn.theory import beta_own_weight


def printed_estimates(shares, trials, messages, with_minus_one, cut=True):
    """Leave-one-out estimates of equation (6), or of equation (32) without the -1.

    Parameters
    ----------
    shares, trials : ndarrays of shape (m,)
        Each client's own proportion and number of trials; m >= 3.
    messages : ndarray of shape (m,)
        What the clients sent: their proportions, or private versions of them.
    with_minus_one : bool
        Equation (6) subtracts 1 from mean (1 - mean) / variance.
    cut : bool
        Cut the weights of equation (6) at 1; with private messages nearly all are above it.

    Returns
    -------
    means, own : ndarrays of shape (m,)
        Estimates and the weights on the clients' own proportions.
    """
    m = len(messages)
    if m < 3:
        raise ValueError(f"method='printed' needs at least 3 clients; got {m}.")
    others = (messages.sum() - messages) / (m - 1)
    variance = (messages @ messages - messages**2 - (m - 1) * others**2) / (m - 2)
    own = beta_own_weight(others, variance, trials, with_minus_one)
    if cut and with_minus_one:
        own = np.where(variance >= others * (1 - others), 1.0, own)
    return own * shares + (1 - own) * others, own


def printed_prior(messages, trials, with_minus_one):
    """Beta prior with the mean and (uncorrected) variance of the messages."""
    mean, variance = messages.mean(), messages.var(ddof=1)
    own = beta_own_weight(np.array([mean]), np.array([variance]), np.ones(1), with_minus_one)[0]
    largest = 1e4 * max(float(trials.max()), 100.0)
    concentration = np.clip(1 / own - 1, 1e-6, largest) if own > 0 else largest
    return BetaPrior().with_moments(mean, concentration)
