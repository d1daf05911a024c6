r"""Class probabilities of clients whose labels are distributed differently.

With p(y|x) of the population and its label frequencies :math:`\pi`, a client with frequencies
:math:`\pi_i` has, by Bayes' rule, if its rows of a label look like the population's,

.. math:: p_i(y \mid x) \propto p(y \mid x) \left(\frac{\pi_i(y)}{\pi(y)}\right)^t, \qquad t = 1.

A model that was trained further on the client's own rows knows :math:`\pi_i` in part. For it the
exponent t lies between 0 and 1.
"""

import numpy as np
from scipy.special import log_softmax, logsumexp, softmax

_EXPONENTS = np.linspace(0.0, 1.0, 21)
_SPREADS = (1e-6, 0.05, 0.1, 0.2, 0.4, 100.0)  # from all clients alike to any exponent alike
_TIE = 1e-9


def shift_labels(log_proba, log_population, log_client, exponent=1.0):
    """Log-probabilities (n, K) of rows after the correction for their client's label frequencies.

    `log_population` is (K,). `log_client` and `exponent` hold for all rows, (K,) and a number, or
    there is one for each row, (n, K) and (n,).
    """
    exponent = np.asarray(exponent)[..., None]
    return log_softmax(log_proba + exponent * (log_client - log_population), axis=-1)


def log_frequencies_of_others(prior, counts, codes, labels):
    """Log posterior frequencies (n, K) of each row's client, given its other rows alone.

    `counts` (m, K) are the clients' label counts, `codes` and `labels` (n,) a row's client and
    label. Equal rows of a client have the same others.
    """
    n_labels = counts.shape[1]
    pairs, position = np.unique(codes * n_labels + labels, return_inverse=True)
    clients, own = np.divmod(pairs, n_labels)
    others = np.asarray(counts, dtype=float)[clients]
    others[np.arange(len(pairs)), own] -= 1
    return prior.log_frequencies(others)[position]


def exponent_losses(log_proba, labels, codes, log_population, log_others, n_clients):
    """Summed log-loss (m, 21) of each client's rows at exponents 0, 0.05, ..., 1.

    `log_proba` (n, K) must come from models that were trained without the row, and `log_others`
    (n, K) from the client's other rows: :func:`log_frequencies_of_others`.
    """
    shift = log_others - log_population
    rows = np.arange(len(labels))
    known, moved = log_proba[rows, labels], shift[rows, labels]
    losses = np.empty((n_clients, len(_EXPONENTS)))
    for at, exponent in enumerate(_EXPONENTS):
        each = logsumexp(log_proba + exponent * shift, axis=1) - known - exponent * moved
        losses[:, at] = np.bincount(codes, each, n_clients)
    return losses


def shrunken_exponents(losses):
    """Exponents (m,) of clients, shrunk towards the population's, from :func:`exponent_losses`.

    Clients' exponents are normal on the grid, with the mean and spread of the largest marginal
    likelihood: minus the loss is a client's log-likelihood. The result is the posterior mean. All
    clients share an exponent if they do not differ by more than chance. A client without rows gets
    the population's mean; if no client has rows, nothing is corrected. The population is estimated
    without noise, hence not privately.
    """
    likelihood = np.exp(losses.min(axis=1, keepdims=True) - losses)
    best, chosen = -np.inf, None
    for spread in _SPREADS:
        weights = np.exp(-0.5 * ((_EXPONENTS - _EXPONENTS[:, None]) / spread) ** 2)
        weights /= weights.sum(axis=1, keepdims=True)
        mixed = np.maximum(likelihood @ weights.T, np.finfo(float).tiny)
        values = np.log(mixed).sum(axis=0)
        at = int(np.argmax(values))
        if values[at] > best + _TIE:
            best, chosen = values[at], weights[at]
    log_joint = np.log(np.maximum(chosen, np.finfo(float).tiny)) - losses
    return softmax(log_joint, axis=1) @ _EXPONENTS
