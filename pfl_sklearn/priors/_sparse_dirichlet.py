"""Population prior of label frequencies for clients that have only some of the labels."""

from __future__ import annotations

from typing import NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import expit, gammaln, log_softmax, logsumexp, xlogy
from sklearn.base import clone

from pfl_sklearn._parameters import POSITIVE, parameter, with_parameters
from pfl_sklearn._typing import Floats, TableLike
from pfl_sklearn.priors import _label_counts as labels
from pfl_sklearn.priors._dirichlet import DirichletPrior
from pfl_sklearn.priors._label_counts import (
    FrequencyPrior,
    LabelCounts,
    log_likelihoods,
    log_rising,
    ml_concentration,
)

# Rows of a client whose frequencies are observed without noise.
_NOISE_FREE_ROWS = 1e6
# Concentrations a: from one label that has nearly all rows of a client to equal frequencies.
_SPARSE_GRID = np.geomspace(0.1, 500.0, 18)
# Further starts: the fit to all clients is far off where few of them have all labels.
_FULL_GRID = np.array([0.5, 5.0, 50.0, 500.0])
# Steps of EM for each pair of starts: enough to rank them.
_RANKING_STEPS = 8
_EM_STEPS_TO_END = 300
# A concentration costs as much as many steps for the weights, and changes little between them.
_STEPS_PER_CONCENTRATION = 10
# Nats per client that the steps for a concentration must gain.
_GAIN_TO_GO_ON = 1e-7


@with_parameters
class SparseDirichletPrior(FrequencyPrior):
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
    likelihood, a on a grid from 0.1 to 500. The weights count one more client, spread evenly over
    the numbers of labels, so that none is impossible.

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn.priors import SparseDirichletPrior
    >>> counts = np.array([[9, 7, 0, 0], [0, 8, 8, 0], [6, 0, 0, 10], [0, 0, 5, 11]])
    >>> SparseDirichletPrior().fit_counts(counts).weights.round(2)
    array([0.05, 0.84, 0.05, 0.06])
    """

    _estimated = ("mean", "concentration", "weights", "sparse_concentration")

    mean: ArrayLike | None = parameter(default=None, ranges=["array-like", None], kw_only=False)
    concentration: float | None = parameter(default=None, ranges=[POSITIVE, None], kw_only=False)
    weights: ArrayLike | None = parameter(default=None, ranges=["array-like", None], kw_only=False)
    sparse_concentration: float | None = parameter(
        default=None, ranges=[POSITIVE, None], kw_only=False
    )

    @property
    def is_known(self) -> bool:
        """Whether all parameters are given; checks those that are frequencies."""
        is_known = super().is_known
        labels.known_frequencies(self, "weights", None if self.mean is None else np.size(self.mean))
        return is_known

    def _parameters(self):
        """Parameters of a known prior."""
        mean, full, weights, sparse = self._require_known()
        return SparseParameters(np.asarray(mean, float), full, np.asarray(weights, float), sparse)

    def fit(self, theta: TableLike) -> Self:
        """Fit the prior to label frequencies observed without noise.

        A client's labels are those with a frequency above 0. The parameters maximize the
        likelihood; the mean and alpha are those of the clients that have all labels, or by moments
        those of all clients if there is none.

        Parameters
        ----------
        theta : array-like of shape (n_clients, n_labels), >= 0
            Frequencies of one client per row, with sum 1.
        """
        self._validate_params()
        theta = labels.check_frequencies(self, theta, zeros=True)
        m, n_labels = theta.shape
        size = (theta > 0).sum(axis=1)
        dense = self._fit_full(theta, theta[size == n_labels])
        shares = (np.bincount(size, minlength=n_labels + 1)[1:] + 1 / n_labels) / (m + 1)
        weights = self._given("weights", shares)
        sparse = self.sparse_concentration or _ml_symmetric(theta, size)
        return self._with(SparseParameters(dense.mean, dense.concentration, weights, sparse))

    def _fit_full(self, theta, full):
        """Dirichlet prior of the clients with all labels; by moments of all clients without any."""
        prior = DirichletPrior(
            labels.known_frequencies(self, "mean", theta.shape[1]), self.concentration
        )
        if len(full):
            return prior.fit(full)
        return prior.fit_sums(
            theta.sum(axis=0), np.sum(theta**2), np.full(len(theta), _NOISE_FREE_ROWS)
        )

    def _fit_counts(self, counts, mean):
        if self.is_known:
            return clone(self)
        weights = labels.known_frequencies(self, "weights", counts.shape[1])
        # A client without rows would pull the weights towards where they start.
        table = labels.compress(counts[counts.any(axis=1)] if counts.any() else counts)
        concentrations = self.concentration, self.sparse_concentration
        return self._with(fit_sparse_parameters(table, mean, weights, *concentrations))

    def _with(self, parameters):
        """Copy of this prior with given SparseParameters."""
        return clone(self).set_params(**dict(zip(self._estimated, parameters, strict=True)))

    def _log_prob(self, theta):
        prior = self._parameters()
        n_labels, present = theta.shape[1], theta > 0
        size = present.sum(axis=1)
        symmetric = xlogy(prior.sparse - 1, np.where(present, theta, 1.0)).sum(axis=1)
        symmetric += gammaln(size * prior.sparse) - size * gammaln(prior.sparse)
        dense = DirichletPrior(prior.mean, prior.full).log_prob(np.where(present, theta, 1.0))
        sparse = symmetric - log_choose(n_labels, size)  # any labels are equally likely
        return np.log(prior.weights)[size - 1] + np.where(size == n_labels, dense, sparse)

    def _draw(self, n_samples, rng):
        prior = self._parameters()
        n_labels = len(prior.mean)
        size = 1 + rng.choice(n_labels, size=(n_samples, 1), p=prior.weights)
        place = rng.uniform(size=(n_samples, n_labels)).argsort(axis=1).argsort(axis=1)
        sparse = np.where(place < size, prior.sparse, 0.0)
        return labels.dirichlet_draws(
            np.where(size == n_labels, prior.full * prior.mean, sparse), rng
        )

    def _log_likelihood(self, counts):
        return logsumexp(log_joint_of_sizes(labels.compress(counts), self._parameters()), axis=1)

    def label_numbers(self, counts: TableLike) -> Floats:
        """Posterior probabilities (n_clients, n_labels) of having 1, ..., n_labels labels.

        Parameters
        ----------
        counts : array-like of shape (n_clients, n_labels), >= 0
            Number of rows of each client with each label.
        """
        table = labels.compress(labels.check_label_counts(counts))
        return np.exp(_log_label_numbers(table, self._parameters()))

    def _posterior(self, counts):
        first, second = self._log_moments(counts, orders=(1, 2))
        mean = np.exp(first)
        return mean, np.maximum(np.exp(second) - mean**2, 0.0)  # rounding

    def _log_frequencies(self, counts):
        return self._log_moments(counts, orders=(1,))[0]

    def _log_moments(self, counts, orders):
        """Logs (m, K) of the posterior moments of the frequencies, of each order."""
        prior = self._parameters()
        labels.known_frequencies(self, "mean", counts.shape[1])
        log_sizes = _log_label_numbers(labels.compress(counts), prior)
        return [_log_moment(counts, log_sizes, prior, order) for order in orders]


def _log_label_numbers(table, prior):
    """Log posterior (m, K) of the numbers of labels that clients have."""
    joint = log_joint_of_sizes(table, prior)
    # Logs of many rows are large: their digits go into the difference, not into the normalizer.
    return log_softmax(joint - joint.max(axis=1, keepdims=True), axis=1)


def _log_moment(counts, log_sizes, prior, order):
    """Log (m, K) of the posterior moment of the frequencies, of order 1 or 2."""
    n_labels = counts.shape[1]
    n_rows = counts.sum(axis=1, keepdims=True)
    n_seen = np.count_nonzero(counts, axis=1)[:, None]
    size = np.arange(1, n_labels)
    # An unseen label is one of the client's s labels with chance (s - o) / (K - o).
    below = log_sizes[:, :-1] - labels.log_rising(size * prior.sparse + n_rows, order)
    with np.errstate(divide="ignore"):
        share = np.log(np.maximum(size - n_seen, 0)) - np.log(np.maximum(n_labels - n_seen, 1))
    unseen = logsumexp(below + share, axis=1, keepdims=True) + labels.log_rising(
        prior.sparse, order
    )
    seen = logsumexp(below, axis=1, keepdims=True) + labels.log_rising(prior.sparse + counts, order)
    full = labels.log_rising(counts + prior.full * prior.mean, order)
    full = full + log_sizes[:, -1:] - labels.log_rising(prior.full + n_rows, order)
    return np.logaddexp(full, np.where(counts > 0, seen, unseen))


def _ml_symmetric(theta, size):
    """Concentration a of the clients that have from two labels to all but one; 1 without any."""
    # A client with one label has frequency 1 for every a.
    chosen = (size > 1) & (size < theta.shape[1])
    if not chosen.any():
        return 1.0
    size, theta = size[chosen], theta[chosen]
    logs = np.log(theta[theta > 0]).sum()

    def likelihood(point):
        a = np.exp(point)
        return np.sum(gammaln(size * a) - size * gammaln(a)) + (a - 1) * logs

    return labels.maximum_on(likelihood, 1e-3, 1e6)


class SparseParameters(NamedTuple):
    """Parameters of a sparse Dirichlet prior, in the order of its constructor."""

    mean: Floats  # (K,)
    full: float  # alpha
    weights: Floats  # (K,)
    sparse: float  # a


def log_choose(n, k):
    """Log of the binomial coefficient, minus infinity for k < 0."""
    at_least_0 = np.maximum(k, 0)
    value = gammaln(n + 1.0) - gammaln(at_least_0 + 1.0) - gammaln(n - at_least_0 + 1.0)
    return np.where(k < 0, -np.inf, value)


def log_spikes(n_seen, n_rows, sparse, n_labels):
    """Log probability (p, K - 1) of clients' labels for each number of labels below K.

    It lacks the product over the labels seen. `n_seen` (p,) labels were seen in `n_rows` (p,) rows.
    """
    size = np.arange(1, n_labels)
    unseen = size - n_seen[:, None]
    which = log_choose((n_labels - n_seen)[:, None], unseen) - log_choose(n_labels, size)
    return which - log_rising(size * sparse, n_rows[:, None])


def log_joint_of_sizes(table: LabelCounts, prior: SparseParameters) -> Floats:
    """Log probability (m, K) of each number of labels together with the client's labels."""
    n_labels = len(prior.mean)
    own_logs = table.by_client(log_rising(prior.sparse, table.values))
    spikes = log_spikes(table.n_seen, table.n_rows, prior.sparse, n_labels)
    full = log_likelihoods(table, prior.mean, prior.full)
    return np.column_stack([spikes + own_logs[:, None], full]) + np.log(prior.weights)


def spike_chances(table, groups, sparse, n_labels):
    """Chances (p, K - 1) of each number of labels, logs (m,) to add, and each client's row (m,)."""
    # The largest chance in a row is 1, so that they do not all underflow.
    pairs, position = groups
    logs = log_spikes(pairs[:, 0], pairs[:, 1], sparse, n_labels)
    largest = logs.max(axis=1, initial=-np.inf)
    largest = np.where(np.isfinite(largest), largest, 0.0)  # clients with all labels seen
    own_logs = table.by_client(log_rising(sparse, table.values))
    return np.exp(logs - largest[:, None]), own_logs + largest[position], position


def fit_sparse_parameters(table, mean, weights, full, sparse):
    """Parameters with the largest marginal likelihood; those that are not None are known."""
    n_labels = len(mean)
    # Chances depend on these two numbers alone, and many clients may share them.
    keys = np.column_stack([table.n_seen, table.n_rows])
    groups = np.unique(keys, axis=0, return_inverse=True)
    start = np.full(n_labels, 1 / n_labels) if weights is None else weights
    fulls = [full]
    if full is None:
        fulls = [ml_concentration(table, mean, np.ones(len(table.n_rows))), *_FULL_GRID]
    denses = [log_likelihoods(table, mean, alpha) for alpha in fulls]
    fits = []
    for a in _SPARSE_GRID if sparse is None else [sparse]:
        spikes = spike_chances(table, groups, a, n_labels)
        for alpha, dense in zip(fulls, denses, strict=True):
            w = start
            for _ in range(_RANKING_STEPS):
                value, w, _ = _em_step(spikes, dense, w, weights is None)
            fits.append((value, SparseParameters(mean, float(alpha), w, float(a))))
    _, best = max(fits, key=lambda fit: fit[0])
    return _polish_weights(table, groups, best, full is None, weights is None)


def _em_step(spikes, dense, w, free_weights):
    """Value of the weights w, the next weights, and each client's chance (m,) of all labels."""
    # The value is the log-likelihood with one more client, spread evenly over the numbers of
    # labels.
    chances, own_logs, position = spikes
    mixed = chances @ w[:-1]
    with np.errstate(divide="ignore"):
        below = np.log(mixed)[position] + own_logs
    above = dense + np.log(w[-1])
    value = np.logaddexp(below, above).sum() + np.log(w).mean()
    has_all = expit(above - below)
    if not free_weights:
        return value, w, has_all
    below_all = np.bincount(position, 1 - has_all, len(mixed))
    share = np.divide(below_all, mixed, out=np.zeros_like(mixed), where=mixed > 0)
    counts = np.append((share @ chances) * w[:-1], has_all.sum())
    return value, (counts + 1 / len(w)) / (len(has_all) + 1), has_all


def _polish_weights(table, groups, start, free_full, free_weights):
    """Parameters after EM in the weights and the concentration of clients with all labels."""
    # The concentration of the other clients stays on its grid, in steps of a factor of 1.65.
    mean = start.mean
    spikes = spike_chances(table, groups, start.sparse, len(mean))
    full, w, before = start.full, start.weights, -np.inf
    dense = log_likelihoods(table, mean, full)
    for step in range(_EM_STEPS_TO_END):
        value, w, has_all = _em_step(spikes, dense, w, free_weights)
        if step % _STEPS_PER_CONCENTRATION:
            continue
        if value - before < _GAIN_TO_GO_ON * len(has_all):
            break
        before = value
        if free_full:
            full = ml_concentration(table, mean, has_all)
            dense = log_likelihoods(table, mean, full)
    return SparseParameters(mean, full, w, start.sparse)
