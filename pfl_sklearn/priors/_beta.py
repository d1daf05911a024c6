"""Beta population prior of proportions."""

from numbers import Real

import numpy as np
from scipy.optimize import minimize
from scipy.special import betaincinv, betaln, digamma, expit, logit, xlog1py, xlogy
from sklearn.base import BaseEstimator, clone
from sklearn.utils import check_array, check_random_state

from pfl_sklearn._compat import Interval
from pfl_sklearn.theory import beta_moments, debiased_share_variance

_MAX_LOGIT = 30.0
_SMALLEST_MEAN = 1e-12
_GRID_POINTS = 24
_MIN_CONCENTRATION = 1e-6


class BetaPrior(BaseEstimator):
    r"""Beta distribution of the clients' proportions.

    .. math:: p_i \sim \mathrm{Beta}(\alpha, \beta), \qquad i = 1, \dots, m.

    Its mean is :math:`\alpha / (\alpha + \beta)`. Clients are more alike the larger the
    concentration :math:`\alpha + \beta` is.

    Parameters
    ----------
    alpha, beta : float, > 0, or None, default=None
        Parameters of the distribution. Give both (known) or neither (estimated).

    See Also
    --------
    GridPrior : A population of any shape.
    pfl_sklearn.estimation.BernoulliMean : Clients' proportions under this prior.

    Notes
    -----
    Section 2.2 of Ozkara et al. (2023).

    References
    ----------
    Ozkara, K., Girgis, A. M., Data, D. and Diggavi, S. (2023). A statistical framework for
    personalized federated learning and estimation: theory, algorithms, and privacy. ICLR.

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn.priors import BetaPrior
    >>> mean, variance = BetaPrior(alpha=1.0, beta=1.0).posterior(np.array([3]), np.array([4]))
    >>> mean.round(3), variance.round(4)
    (array([0.667]), array([0.0317]))
    """

    _parameter_constraints = {
        "alpha": [Interval(Real, 0, None, closed="neither"), None],
        "beta": [Interval(Real, 0, None, closed="neither"), None],
    }

    def __init__(self, alpha=None, beta=None):
        self.alpha = alpha
        self.beta = beta

    @property
    def is_known(self):
        """Whether both parameters are given."""
        if (self.alpha is None) != (self.beta is None):
            raise ValueError(
                f"BetaPrior needs both alpha and beta or neither; got alpha={self.alpha!r}, "
                f"beta={self.beta!r}."
            )
        return self.alpha is not None

    def with_moments(self, mean, concentration):
        r"""Copy of this prior with a given mean and concentration.

        Parameters
        ----------
        mean : float in [0, 1]
            Mean :math:`\alpha / (\alpha + \beta)`, moved off 0 and 1 where necessary.
        concentration : float, > 0
            Sum :math:`\alpha + \beta`.

        Returns
        -------
        BetaPrior
        """
        mean = np.clip(mean, _SMALLEST_MEAN, 1 - _SMALLEST_MEAN)
        return clone(self).set_params(
            alpha=float(mean * concentration), beta=float((1 - mean) * concentration)
        )

    def _check_known(self):
        if not self.is_known:
            raise ValueError("this BetaPrior is not known yet; give alpha and beta, or fit it.")

    def moments(self):
        """Mean and variance of a known prior."""
        self._check_known()
        return beta_moments(self.alpha, self.beta)

    def fit(self, theta):
        """Fit the prior by maximum likelihood to proportions observed without noise.

        Parameters
        ----------
        theta : array-like of shape (n_clients,) or (n_clients, 1), within (0, 1)
            One proportion per client.

        Returns
        -------
        BetaPrior
            A new, known prior; this prior does not change. A known prior is copied.
        """
        self._validate_params()
        theta = check_array(theta, dtype=float, ensure_2d=False).ravel()
        if not ((theta > 0) & (theta < 1)).all():
            raise ValueError("theta must lie within (0, 1) to fit a BetaPrior.")
        if self.is_known:
            return clone(self)
        logs = np.log(theta).mean(), np.log1p(-theta).mean()

        def negative(point):
            mean, total = expit(point[0]), np.exp(point[1])
            alpha, beta = mean * total, (1 - mean) * total
            slopes = [
                logs[k] - digamma(value) + digamma(total) for k, value in enumerate((alpha, beta))
            ]
            value = (alpha - 1) * logs[0] + (beta - 1) * logs[1] - betaln(alpha, beta)
            return -value, -_chain(slopes, mean, total)

        return self.with_moments(*_maximize(negative, theta.mean(), 10.0, 1e8))

    def fit_counts(self, successes, trials, counts, method):
        """Fit the prior to a table of counts.

        Parameters
        ----------
        successes, trials, counts : ndarrays of shape (n_pairs,)
            Distinct pairs and how many clients have each.
        method : {"ml", "moments"}
            Beta-binomial marginal likelihood, or debiased moments.

        Returns
        -------
        BetaPrior
            A new, known prior. A known prior is copied.
        """
        if self.is_known:
            return clone(self)
        mean, concentration = moment_estimates(successes, trials, counts)
        if method == "ml":
            mean, concentration = _beta_binomial_ml(successes, trials, counts, mean)
        return self.with_moments(mean, concentration)

    def log_prob(self, theta):
        """Log density of proportions under a known prior.

        Parameters
        ----------
        theta : array-like of shape (n_clients,) or (n_clients, 1)
            One proportion per client.

        Returns
        -------
        ndarray of shape (n_clients,), in nats
        """
        self._check_known()
        theta = check_array(theta, dtype=float, ensure_2d=False).ravel()
        kernel = xlogy(self.alpha - 1, theta) + xlog1py(self.beta - 1, -theta)
        return kernel - betaln(self.alpha, self.beta)

    def sample(self, n_samples=1, random_state=None):
        """Draw proportions from a known prior.

        Parameters
        ----------
        n_samples : int, default=1
            Number of draws.
        random_state : int, RandomState instance or None, default=None
            Seed of the draws.

        Returns
        -------
        ndarray of shape (n_samples, 1)
        """
        self._check_known()
        return check_random_state(random_state).beta(self.alpha, self.beta, size=(n_samples, 1))

    def posterior(self, successes, trials):
        """Posterior of the clients' proportions given their counts.

        Parameters
        ----------
        successes, trials : ndarrays of shape (n_clients,)
            Each client's counts.

        Returns
        -------
        mean, variance : ndarrays of shape (n_clients,)
        """
        self._check_known()
        total = self.alpha + self.beta + trials
        mean = (self.alpha + successes) / total
        return mean, mean * (1 - mean) / (total + 1)

    def posterior_quantiles(self, successes, trials, tails):
        """Quantiles of the clients' posteriors.

        Parameters
        ----------
        successes, trials : ndarrays of shape (n_clients,)
            Each client's counts.
        tails : iterable of float in [0, 1]
            Lower-tail probabilities of the quantiles, such as 0.05 and 0.95.

        Returns
        -------
        list of ndarrays of shape (n_clients,)
            One array for each of `tails`.
        """
        self._check_known()
        parameters = self.alpha + successes, self.beta + trials - successes
        return [betaincinv(*parameters, tail) for tail in tails]


def moment_estimates(successes, trials, counts):
    """Mean and concentration that match mean and debiased variance of the local proportions.

    With infinite spread (all clients at 0 or 1) the concentration is the smallest, with no spread
    beyond sampling the largest.
    """
    n_clients = counts.sum()
    local = successes / trials
    mean = counts @ local / n_clients
    spread = counts @ (local - mean) ** 2 / max(n_clients - 1, 1)
    share = counts @ (1 / trials) / n_clients
    limit = mean * (1 - mean)
    variance = debiased_share_variance(mean, spread, share) if share < 1 else 0.0
    largest = largest_concentration(trials)
    if variance <= limit / (largest + 1):
        return mean, largest
    return mean, float(np.clip(limit / variance - 1, _MIN_CONCENTRATION, largest))


def largest_concentration(trials):
    """Concentration that stands for "all clients alike": 10,000 times the largest client."""
    return 1e4 * max(float(np.max(trials)), 100.0)


def _beta_binomial_ml(successes, trials, counts, mean):
    """Mean and concentration that maximize the marginal likelihood."""
    failures, share = trials - successes, counts / counts.sum()

    def negative(point):
        mean, total = expit(point[0]), np.exp(point[1])
        alpha, beta = mean * total, (1 - mean) * total
        value = share @ (betaln(successes + alpha, failures + beta) - betaln(alpha, beta))
        common = digamma(total) - share @ digamma(trials + total)
        slopes = [
            share @ digamma(seen + value) - digamma(value) + common
            for seen, value in ((successes, alpha), (failures, beta))
        ]
        return -value, -_chain(slopes, mean, total)

    largest = largest_concentration(trials)
    grid = np.geomspace(1e-2, largest, _GRID_POINTS)
    point = logit(np.clip(mean, 1e-9, 1 - 1e-9))
    values = [negative((point, np.log(total)))[0] for total in grid]
    return _maximize(negative, mean, grid[int(np.argmin(values))], largest)


def _chain(slopes, mean, total):
    """Slopes in alpha and beta as slopes in logit(mean) and log(total)."""
    by_alpha, by_beta = slopes
    return np.array(
        [
            mean * (1 - mean) * total * (by_alpha - by_beta),
            total * (mean * by_alpha + (1 - mean) * by_beta),
        ]
    )


def _maximize(negative, mean, concentration, largest):
    """Mean and concentration at the minimum of `negative(logit mean, log concentration)`."""
    bounds = [(-_MAX_LOGIT, _MAX_LOGIT), (np.log(_MIN_CONCENTRATION), np.log(largest))]
    start = [
        np.clip(logit(mean), -_MAX_LOGIT, _MAX_LOGIT),
        np.log(concentration),
    ]
    found = minimize(
        negative,
        start,
        jac=True,
        method="L-BFGS-B",
        bounds=bounds,
        options={"ftol": 1e-15, "gtol": 1e-10, "maxiter": 500},
    )
    return float(expit(found.x[0])), float(np.exp(found.x[1]))
