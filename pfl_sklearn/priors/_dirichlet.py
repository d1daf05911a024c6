"""Dirichlet population prior of label frequencies."""

from __future__ import annotations

from typing import Self

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import gammaln, xlogy
from sklearn.base import clone

from pfl_sklearn._parameters import POSITIVE, parameter, with_parameters
from pfl_sklearn._typing import Floats, Integers, TableLike
from pfl_sklearn.priors import _label_counts as labels
from pfl_sklearn.priors._label_counts import FrequencyPrior


@with_parameters
class DirichletPrior(FrequencyPrior):
    r"""Dirichlet distribution of the clients' label frequencies.

    .. math:: \pi_i \sim \mathrm{Dirichlet}(\alpha \pi), \qquad i = 1, \dots, m.

    Clients are more alike the larger the concentration :math:`\alpha` is. A client with counts
    :math:`c_i` in :math:`n_i` rows has the posterior mean
    :math:`(c_i + \alpha \pi) / (n_i + \alpha)`.

    Parameters
    ----------
    mean : array-like of shape (n_labels,) or None, default=None
        Population frequencies :math:`\pi`, positive and with sum 1. None: estimated.
    concentration : float, > 0, or None, default=None
        Concentration :math:`\alpha`, in rows. None: estimated.

    Notes
    -----
    The estimated mean is the average of the clients' frequencies, with one more row that is spread
    evenly over the labels, so that none has frequency 0. The estimated concentration maximizes the
    Dirichlet-multinomial likelihood at that mean. It is at most 10,000 times the number of rows of
    the largest client (at least 10^6), the value if all clients have one row, and at least so large
    that one of all clients' rows is expected to bring its client a further label.

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn.priors import DirichletPrior
    >>> prior = DirichletPrior(mean=[0.5, 0.3, 0.2], concentration=10.0)
    >>> mean, variance = prior.posterior(np.array([[5, 0, 0], [0, 0, 0]]))
    >>> mean.round(3)
    array([[0.667, 0.2  , 0.133],
           [0.5  , 0.3  , 0.2  ]])
    """

    _estimated = ("mean", "concentration")

    mean: ArrayLike | None = parameter(default=None, ranges=["array-like", None], kw_only=False)
    concentration: float | None = parameter(default=None, ranges=[POSITIVE, None], kw_only=False)

    def _parameters(self):
        """Mean (K,) and concentration of a known prior."""
        mean, concentration = self._require_known()
        return np.asarray(mean, dtype=float), float(concentration)

    def fit(self, theta: TableLike) -> Self:
        """Fit the prior to label frequencies observed without noise.

        The mean is their average, and the concentration maximizes the likelihood at that mean.

        Parameters
        ----------
        theta : array-like of shape (n_clients, n_labels), > 0
            Frequencies of one client per row, with sum 1.
        """
        self._validate_params()
        theta = labels.check_frequencies(self, theta, zeros=False)
        mean = self._given("mean", theta.mean(axis=0) / theta.mean(axis=0).sum())
        concentration = self.concentration
        if concentration is None:
            logs = np.log(theta).mean(axis=0)

            def likelihood(point):
                shapes = np.exp(point) * mean
                return gammaln(shapes.sum()) - gammaln(shapes).sum() + (shapes - 1) @ logs

            # From one label a client to clients alike: there are no rows to set the ends by.
            concentration = labels.maximum_on(likelihood, 1e-6, 1e8)
        return self._with(mean, concentration)

    def _fit_counts(self, counts, mean):
        concentration = self.concentration
        if concentration is None:
            concentration = labels.ml_concentration(
                labels.compress(counts), mean, np.ones(len(counts))
            )
        return self._with(mean, concentration)

    def fit_sums(
        self, frequencies: Floats, square: float, n_rows: Integers, noise_std: float = 0.0
    ) -> Self:
        r"""Fit the prior to sums over clients, which may have noise.

        With the mean A of the clients' squared norms and the mean c of :math:`1 / n_i`,
        :math:`H = (A - c) / (1 - c)` estimates the mean of :math:`|\pi_i|^2`, and
        :math:`\alpha = (1 - H) / (H - |\pi|^2)`. The squared norm of the mean is debiased for noise
        and for the clients' own deviations; :math:`H - |\pi|^2` is at least the noise on A. The
        mean is the nearest point of the simplex, with no label below the noise (or an even share,
        if that is smaller), because a correction of predictions divides by it.

        Parameters
        ----------
        frequencies : ndarray of shape (n_labels,)
            Sum of the clients' label frequencies.
        square : float
            Sum of the squared norms of the clients' label frequencies.
        n_rows : ndarray of shape (n_clients,), >= 0
            Number of rows of each client: public. Clients without rows count for nothing.
        noise_std : float, >= 0, default=0.0
            Standard deviation of the noise in every coordinate of the sums.
        """
        self._validate_params()
        sizes = np.asarray(n_rows, dtype=float)
        sizes = sizes[sizes > 0]
        m, n_labels = max(len(sizes), 1), len(frequencies)
        average, noise = np.asarray(frequencies, dtype=float) / m, noise_std / m
        # One more row, spread evenly, as where counts are exact.
        lowest = 1 / (n_labels * (sizes.sum() + 1))
        raised = np.maximum(labels.onto_simplex(average), max(min(noise, 1 / n_labels), lowest))
        mean = self._given("mean", raised / raised.sum())
        concentration = self.concentration
        if concentration is None:
            alike = mean @ mean
            if self.mean is None and m > 1:  # an estimated mean holds noise and the clients' own
                alike = squared_norm_of_mean(average, square / m, m, noise)
                alike = np.clip(alike, 1 / n_labels, 1.0)
            concentration = _moment_concentration(square / m, alike, sizes, noise)
        return self._with(mean, concentration)

    def _with(self, mean, concentration):
        return clone(self).set_params(mean=mean, concentration=float(concentration))

    def _log_prob(self, theta):
        mean, concentration = self._parameters()
        shapes = concentration * mean
        return xlogy(shapes - 1, theta).sum(axis=1) + gammaln(concentration) - gammaln(shapes).sum()

    def _draw(self, n_samples, rng):
        mean, concentration = self._parameters()
        return labels.dirichlet_draws(np.tile(concentration * mean, (n_samples, 1)), rng)

    def _log_likelihood(self, counts):
        return labels.log_likelihoods(labels.compress(counts), *self._parameters())

    def _posterior(self, counts):
        mean, concentration = self._parameters()
        total = counts.sum(axis=1, keepdims=True) + concentration
        posterior = (counts + concentration * mean) / total
        return posterior, posterior * (1 - posterior) / (total + 1)

    def _log_frequencies(self, counts):
        return np.log(self._posterior(counts)[0])


def squared_norm_of_mean(average, square, m, noise):
    """Unbiased estimate of |pi|^2 from noisy means of f_i and |f_i|^2 over m >= 2 clients."""
    of_average = average @ average - len(average) * noise**2
    return (m * of_average - square) / (m - 1)


def _moment_concentration(square, alike, n_rows, noise):
    """Concentration from noisy mean |f_i|^2, an estimate of |pi|^2, and numbers of rows (m,)."""
    low, high = labels.concentration_range(n_rows if len(n_rows) else np.ones(1))
    if len(n_rows) < 2 or n_rows.max() <= 1:  # nothing shows how clients differ
        return high
    # Of a client's pairs of rows 1 / n are a row with itself; the others agree with chance H.
    share = np.mean(1 / n_rows)
    within_agreement = np.clip((square - share) / (1 - share), 0.0, 1.0)
    spread = max(
        within_agreement - alike, noise
    )  # clients are never more alike than the noise can tell
    return (
        high if spread * high <= 1 - within_agreement else max((1 - within_agreement) / spread, low)
    )
