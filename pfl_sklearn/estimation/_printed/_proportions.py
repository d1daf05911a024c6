"""Proportions by the weights of equations 6 and 32 of Ozkara et al. (2023, ICLR), as printed.

The weights use the variance of the local proportions as that of the true ones, which counts the
sampling variance twice. One-bit messages show no spread between clients at all. Both exist to
reproduce the paper's figures; do not use them for analysis.
"""

import math

import numpy as np

from pfl_sklearn.estimation._count_estimates import FittedCounts
from pfl_sklearn.estimation._plausible_betas import BetaPriors
from pfl_sklearn.priors import BetaPrior
from pfl_sklearn.privacy import OneBit
from pfl_sklearn.theory import beta_own_weight

PRINTED_WEIGHTS = ("printed", "printed_eq32")  # methods: equations 6 and 32 (ICLR)
_ONE_BIT_CAVEAT = (
    "one-bit messages carry no information on the spread between clients, so the shrinkage is "
    "arbitrary; mechanism='one_bit' exists to reproduce published figures."
)


def one_bit_proportions(table, params, rng):
    """Estimates from one decoded bit per client, and entries of the report."""
    mechanism = OneBit(params.epsilon)
    bits = mechanism.privatize(table.per_client(table.successes / table.trials), rng)
    # Uncut: nearly all weights are above 1, and cutting them would hide that.
    fitted = with_printed_weights(table, mechanism.decode(bits), params.method, cut=False)
    return fitted, {"facts": mechanism.facts(), "caveats": (_ONE_BIT_CAVEAT,)}


def proportions_of_shares(table, params):
    """Estimates from the clients' shares: the rules take messages, and these are exact ones."""
    return with_printed_weights(
        table, table.per_client(table.successes / table.trials), params.method
    )


def with_printed_weights(table, messages, method, cut=True):
    """Leave-one-out estimates of the paper from the clients' messages (m,)."""
    # Weights that are not cut (private messages) may give estimates outside [0, 1] and have no
    # posterior.
    trials = table.per_client(table.trials)
    shares = table.per_client(table.successes) / trials
    with_minus_one = method == "printed"  # in equation 6 (ICLR)
    prior = printed_prior(messages, trials, with_minus_one)
    means, weights = printed_estimates(shares, trials, messages, with_minus_one, cut)
    mean, variance = prior.moments()
    spread = np.clip(means * (1 - means), 0, None) / (prior.alpha + prior.beta + trials + 1)
    return FittedCounts(
        prior,
        mean,
        float(messages.std(ddof=1) / math.sqrt(len(messages))),
        BetaPriors.icc(mean, variance),
        means,
        np.sqrt(spread) if cut else np.full(len(means), np.nan),
        1 - weights,
        exact=False,
    )


def printed_estimates(shares, trials, messages, with_minus_one, cut=True):
    """Leave-one-out estimates (m,) of m >= 3 clients, and weights (m,) on their own `shares`.

    They are those of equation 6 (ICLR), which subtracts 1 from mean (1 - mean) / variance, or of
    equation 32 (ICLR), which does not. `messages` (m,) are the shares, or private versions of them;
    then nearly all weights are above 1, unless they are `cut` there.
    """
    m = len(messages)
    if m < 3:  # the others' variance has m - 2 degrees of freedom
        raise ValueError(f"method='printed' needs at least 3 clients; got {m}.")
    others = (messages.sum() - messages) / (m - 1)
    variance = (messages @ messages - messages**2 - (m - 1) * others**2) / (m - 2)
    weights = beta_own_weight(others, variance, trials, with_minus_one)
    if cut and with_minus_one:
        # No beta distribution has such a variance; its weight would be negative or above 1.
        weights = np.where(variance >= others * (1 - others), 1.0, weights)
    return weights * shares + (1 - weights) * others, weights


def printed_prior(messages, trials, with_minus_one):
    """Beta prior with the mean and (uncorrected) variance of the messages."""
    mean, variance = messages.mean(), messages.var(ddof=1)
    weights = beta_own_weight(np.array([mean]), np.array([variance]), np.ones(1), with_minus_one)[0]
    # As good as infinite: shares of equal size, whose variance is 0, give a weight of 0.
    largest = 1e4 * max(float(trials.max()), 100.0)
    concentration = np.clip(1 / weights - 1, 1e-6, largest) if weights > 0 else largest
    return BetaPrior().with_moments(mean, concentration)
