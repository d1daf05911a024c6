"""Population prior of label frequencies for clients that have only some of the labels."""

from numbers import Real

import numpy as np
from scipy.special import gammaln, log_softmax, logsumexp, xlogy
from sklearn.base import BaseEstimator, clone
from sklearn.utils import check_array, check_random_state

from pfl_sklearn._compat import Interval
from pfl_sklearn.priors._dirichlet import DirichletPrior
from pfl_sklearn.priors._label_counts import (
    check_counts,
    check_theta,
    check_weights,
    compress,
    dirichlet_draws,
    given_frequencies,
    log_rising,
    maximum_on,
    mean_frequencies,
)
from pfl_sklearn.priors._sparse_dirichlet_fit import Parameters, log_choose, log_joint, maximize

_MANY_ROWS = 1e6  # stands for frequencies without noise


class SparseDirichletPrior(BaseEstimator):
    r"""Label frequencies of clients that may have only some of the labels.

    The number s of labels that a client has is drawn first. A client with all K labels has
    frequencies from a Dirichlet distribution around the population's. Otherwise any s labels are
    equally likely to be its labels S, and their frequencies are symmetric:

    .. math::

        P(s_i = s) = w_s, \qquad
        \pi_i \mid s_i = K \sim \mathrm{Dirichlet}(\alpha \pi), \qquad
        \pi_{i, S} \mid s_i < K, S \sim \mathrm{Dirichlet}(a, \dots, a).

    Parameters
    ----------
    mean : array-like of shape (n_labels,) or None, default=None
        Population frequencies :math:`\pi`, positive and with sum 1. None: estimated.
    concentration : float, > 0, or None, default=None
        Concentration :math:`\alpha` of the clients that have all labels, in rows. None: estimated.
    weights : array-like of shape (n_labels,) or None, default=None
        Probabilities :math:`w_1, \dots, w_K`, positive and with sum 1. None: estimated.
    sparse_concentration : float, > 0, or None, default=None
        Concentration a for each label of a client that has only some. None: estimated.

    See Also
    --------
    DirichletPrior : All clients have all labels.

    Notes
    -----
    Given counts c in n rows, with o labels seen, s has the posterior (s < K)

    .. math::

        p(s \mid c) \propto w_s \binom{K - o}{s - o} \binom{K}{s}^{-1}
        \frac{\Gamma(s a)}{\Gamma(s a + n)} \prod_{k: c_k > 0} \frac{\Gamma(c_k + a)}{\Gamma(a)}

    and the posterior mean of a label is :math:`\sum_s p(s \mid c) (c_k + a) / (s a + n)` if it is
    seen and :math:`\sum_s p(s \mid c) \frac{s - o}{K - o} \frac{a}{s a + n}` if not; the term of
    s = K is :math:`p(K \mid c) (c_k + \alpha \pi_k) / (n + \alpha)` for both. A client without
    rows has :math:`(1 - w_K) / K + w_K \pi_k`, which is not the population's frequency unless
    labels are equally frequent.

    The mean is estimated as by :class:`DirichletPrior`. The other parameters maximize the marginal
    likelihood of the clients: the weights and :math:`\alpha` by EM, a on a grid from 0.1 to 500.
    The weights count one more client, spread evenly over the numbers of labels, so that none is
    impossible.

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn.priors import SparseDirichletPrior
    >>> counts = np.array([[9, 7, 0, 0], [0, 8, 8, 0], [6, 0, 0, 10], [0, 0, 5, 11]])
    >>> prior = SparseDirichletPrior().fit_counts(counts)
    >>> prior.weights.round(2)
    array([0.05, 0.84, 0.05, 0.06])
    >>> prior.posterior(np.array([[9, 0, 7, 0], [1, 0, 0, 0]]))[0].round(2)
    array([[0.5 , 0.  , 0.5 , 0.  ],
           [0.53, 0.16, 0.16, 0.16]])
    """

    _parameter_constraints = {
        "mean": ["array-like", None],
        "concentration": [Interval(Real, 0, None, closed="neither"), None],
        "weights": ["array-like", None],
        "sparse_concentration": [Interval(Real, 0, None, closed="neither"), None],
    }

    def __init__(self, mean=None, concentration=None, weights=None, sparse_concentration=None):
        self.mean = mean
        self.concentration = concentration
        self.weights = weights
        self.sparse_concentration = sparse_concentration

    @property
    def is_known(self):
        """Whether all parameters are given; checks the mean and the weights."""
        mean = given_frequencies(self, "mean")
        given_frequencies(self, "weights", None if mean is None else len(mean))
        return all(value is not None for value in self._values())

    def _values(self):
        names = ("mean", "concentration", "weights", "sparse_concentration")
        return [getattr(self, name) for name in names]

    def _known(self):
        """Parameters of a known prior."""
        if not self.is_known:
            raise ValueError(
                "this SparseDirichletPrior is not known yet; give mean, concentration, weights and "
                "sparse_concentration, or fit it."
            )
        mean, full, weights, sparse = self._values()
        return Parameters(np.asarray(mean, float), full, np.asarray(weights, float), sparse)

    def fit(self, theta):
        """Fit the prior to label frequencies observed without noise.

        A client's labels are those with a frequency above 0. The parameters maximize the
        likelihood; the mean and alpha are those of the clients that have all labels, or by moments
        those of all clients if there is none.

        Parameters
        ----------
        theta : array-like of shape (n_clients, n_labels), >= 0
            Frequencies of one client per row, with sum 1.

        Returns
        -------
        SparseDirichletPrior
            A new, known prior; this prior does not change. A known prior is copied.
        """
        self._validate_params()
        theta = check_theta(self, theta, zeros=True)
        m, n_labels = theta.shape
        size = (theta > 0).sum(axis=1)
        dense = self._fit_full(theta, theta[size == n_labels])
        weights = given_frequencies(self, "weights", n_labels)
        if weights is None:
            weights = (np.bincount(size, minlength=n_labels + 1)[1:] + 1 / n_labels) / (m + 1)
        sparse = self.sparse_concentration or _ml_symmetric(theta, size)
        return self._with(Parameters(dense.mean, dense.concentration, weights, sparse))

    def _fit_full(self, theta, full):
        """Dirichlet prior of the clients with all labels; by moments of all clients without any."""
        mean = given_frequencies(self, "mean", theta.shape[1])
        prior = DirichletPrior(mean, self.concentration)
        if len(full):
            return prior.fit(full)
        return prior.fit_sums(theta.sum(axis=0), np.sum(theta**2), np.full(len(theta), _MANY_ROWS))

    def fit_counts(self, counts, client_weights=None):
        """Fit the prior to the clients' label counts.

        Parameters
        ----------
        counts : array-like of shape (n_clients, n_labels), >= 0
            Number of rows of each client with each label. Clients without rows count for nothing.
        client_weights : array-like of shape (n_clients,), >= 0, or None, default=None
            Weights of the clients' frequencies in the mean: those with which a training averages
            the clients. Numbers of rows give the frequencies of the table. None: equal weights.
            Clients have equal weights in the likelihood of the other parameters always.

        Returns
        -------
        SparseDirichletPrior
            A new, known prior; this prior does not change. A known prior is copied.
        """
        self._validate_params()
        counts = check_counts(counts)
        client_weights = check_weights(client_weights, len(counts))
        mean = given_frequencies(self, "mean", counts.shape[1])
        if mean is None:
            mean = mean_frequencies(counts, client_weights)
        if self.is_known:
            return clone(self)
        weights = given_frequencies(self, "weights", counts.shape[1])
        given = self.concentration, weights, self.sparse_concentration
        table = compress(counts[counts.any(axis=1)] if counts.any() else counts)
        return self._with(maximize(table, mean, *given))

    def _with(self, found):
        return clone(self).set_params(
            mean=found.mean,
            concentration=float(found.full),
            weights=found.weights,
            sparse_concentration=float(found.sparse),
        )

    def log_prob(self, theta):
        """Log density of label frequencies under a known prior.

        Parameters
        ----------
        theta : array-like of shape (n_clients, n_labels)
            Frequencies of one client per row, with sum 1. A client's labels are those with a
            frequency above 0.

        Returns
        -------
        ndarray of shape (n_clients,), in nats
            With respect to the frequencies of the client's labels but the last.
        """
        known = self._known()
        theta = check_array(theta, dtype=float)
        n_labels, present = theta.shape[1], theta > 0
        size = present.sum(axis=1)
        symmetric = xlogy(known.sparse - 1, np.where(present, theta, 1.0)).sum(axis=1)
        symmetric += gammaln(size * known.sparse) - size * gammaln(known.sparse)
        dense = DirichletPrior(known.mean, known.full).log_prob(np.where(present, theta, 1.0))
        some = symmetric - log_choose(n_labels, size)
        return np.log(known.weights)[size - 1] + np.where(size == n_labels, dense, some)

    def sample(self, n_samples=1, random_state=None):
        """Draw label frequencies from a known prior.

        Parameters
        ----------
        n_samples : int, default=1
            Number of draws.
        random_state : int, RandomState instance or None, default=None
            Seed of the draws.

        Returns
        -------
        ndarray of shape (n_samples, n_labels)
        """
        known, rng = self._known(), check_random_state(random_state)
        n_labels = len(known.mean)
        size = 1 + rng.choice(n_labels, size=(n_samples, 1), p=known.weights)
        place = rng.uniform(size=(n_samples, n_labels)).argsort(axis=1).argsort(axis=1)
        some = np.where(place < size, known.sparse, 0.0)
        return dirichlet_draws(np.where(size == n_labels, known.full * known.mean, some), rng)

    def log_likelihood(self, counts):
        """Log probability of each client's labels, in their order, under a known prior.

        Parameters
        ----------
        counts : array-like of shape (n_clients, n_labels), >= 0
            Number of rows of each client with each label.

        Returns
        -------
        ndarray of shape (n_clients,), in nats
        """
        return logsumexp(log_joint(compress(check_counts(counts)), self._known()), axis=1)

    def label_numbers(self, counts):
        """Posterior of the number of labels that each client has.

        Parameters
        ----------
        counts : array-like of shape (n_clients, n_labels), >= 0
            Number of rows of each client with each label.

        Returns
        -------
        ndarray of shape (n_clients, n_labels)
            Probabilities of 1, ..., n_labels labels.
        """
        return np.exp(_log_label_numbers(compress(check_counts(counts)), self._known()))

    def posterior(self, counts):
        """Posterior of the clients' label frequencies given their counts.

        Parameters
        ----------
        counts : array-like of shape (n_clients, n_labels), >= 0
            Number of rows of each client with each label.

        Returns
        -------
        mean, variance : ndarrays of shape (n_clients, n_labels)
            The rows of `mean` sum to 1.
        """
        first, second = self._log_moments(counts, orders=(1, 2))
        mean = np.exp(first)
        return mean, np.maximum(np.exp(second) - mean**2, 0.0)

    def log_frequencies(self, counts):
        """Log of the posterior means of the clients' label frequencies.

        Parameters
        ----------
        counts : array-like of shape (n_clients, n_labels), >= 0
            Number of rows of each client with each label.

        Returns
        -------
        ndarray of shape (n_clients, n_labels)
            Finite, in nats.
        """
        return self._log_moments(counts, orders=(1,))[0]

    def _log_moments(self, counts, orders):
        """Logs (m, K) of the posterior moments of the frequencies, of each order."""
        known, counts = self._known(), check_counts(counts)
        given_frequencies(self, "mean", counts.shape[1])
        log_sizes = _log_label_numbers(compress(counts), known)
        return [_log_moment(counts, log_sizes, known, order) for order in orders]


def _log_label_numbers(table, known):
    """Log posterior (m, K) of the numbers of labels; large logs are subtracted before rounding."""
    joint = log_joint(table, known)
    return log_softmax(joint - joint.max(axis=1, keepdims=True), axis=1)


def _log_moment(counts, log_sizes, known, order):
    """Log (m, K) of the posterior moment of the frequencies, of order 1 or 2."""
    n_labels = counts.shape[1]
    n_rows = counts.sum(axis=1, keepdims=True)
    n_seen = np.count_nonzero(counts, axis=1)[:, None]
    size = np.arange(1, n_labels)
    below = log_sizes[:, :-1] - log_rising(size * known.sparse + n_rows, order)
    with np.errstate(divide="ignore"):
        share = np.log(np.maximum(size - n_seen, 0)) - np.log(np.maximum(n_labels - n_seen, 1))
    unseen = logsumexp(below + share, axis=1, keepdims=True) + log_rising(known.sparse, order)
    seen = logsumexp(below, axis=1, keepdims=True) + log_rising(known.sparse + counts, order)
    full = log_rising(counts + known.full * known.mean, order)
    full = full + log_sizes[:, -1:] - log_rising(known.full + n_rows, order)
    return np.logaddexp(full, np.where(counts > 0, seen, unseen))


def _ml_symmetric(theta, size):
    """Concentration a of the clients that have from two labels to all but one; 1 without any."""
    chosen = (size > 1) & (size < theta.shape[1])
    if not chosen.any():
        return 1.0
    size, theta = size[chosen], theta[chosen]
    logs = np.log(theta[theta > 0]).sum()

    def likelihood(point):
        a = np.exp(point)
        return np.sum(gammaln(size * a) - size * gammaln(a)) + (a - 1) * logs

    return maximum_on(likelihood, 1e-3, 1e6)
