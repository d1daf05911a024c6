"""Label counts and frequencies of clients: checks, likelihoods, and the base of their priors."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import minimize_scalar
from scipy.special import gammaln, logsumexp, psi
from sklearn.utils import check_array

from pfl_sklearn._typing import Floats, TableLike
from pfl_sklearn.priors._prior import Prior, is_distribution

# Likelihoods of concentrations can have two maxima, so the search starts at the best of a grid.
_SEARCH_POINTS = 24
# From here on four terms of Stirling's series are exact to rounding.
_STIRLING = 10.0


class LabelCounts(NamedTuple):
    """Non-zero counts of m clients and K labels; equal ones of a label are stored once."""

    n_rows: np.ndarray  # (m,)
    n_seen: np.ndarray  # (m,), distinct labels of each client
    owner: np.ndarray  # (e,), client of each non-zero count
    position: np.ndarray  # (e,), where its label and value are in the next two
    labels: np.ndarray  # (u,)
    values: np.ndarray  # (u,)

    def by_client(self, terms):
        """Sums (m,) over each client's labels of terms (u,), one for each label and value."""
        return np.bincount(self.owner, terms[self.position], len(self.n_rows))

    def occurrences(self, weights):
        """Summed weights (u,) of the clients that have each label and value."""
        return np.bincount(self.position, weights[self.owner], len(self.values))


class FrequencyPrior(Prior):
    """Methods that priors of label frequencies share."""

    _fit_counts: Any
    _log_likelihood: Any
    _posterior: Any
    _log_frequencies: Any

    @property
    def is_known(self) -> bool:
        """Whether all parameters are given; checks those that are frequencies."""
        known_frequencies(self, "mean")
        return super().is_known

    def fit_counts(self, counts: TableLike, client_weights: ArrayLike | None = None) -> Self:
        """Fit the prior to the clients' label counts.

        Parameters
        ----------
        counts : array-like of shape (n_clients, n_labels), >= 0
            Number of rows of each client with each label. Clients without rows count for nothing.
        client_weights : array-like of shape (n_clients,), >= 0, or None, default=None
            Weights of the clients' frequencies in the mean, as in the average of a training;
            numbers of rows give the frequencies of the table. None: equal weights. In the
            likelihood of the other parameters, clients always have equal weights.
        """
        self._validate_params()
        counts = check_label_counts(counts)
        weights = check_client_weights(client_weights, len(counts))
        return self._fit_counts(counts, self._given("mean", mean_frequencies(counts, weights)))

    def log_likelihood(self, counts: TableLike) -> Floats:
        """Log probability (n_clients,), in nats, of each client's labels in their order.

        Parameters
        ----------
        counts : array-like of shape (n_clients, n_labels), >= 0
            Number of rows of each client with each label.
        """
        return self._log_likelihood(check_label_counts(counts))

    def posterior(self, counts: TableLike) -> tuple[Floats, Floats]:
        """Posterior means and variances (n_clients, n_labels) of frequencies given counts.

        Parameters
        ----------
        counts : array-like of shape (n_clients, n_labels), >= 0
            Number of rows of each client with each label.
        """
        return self._posterior(check_label_counts(counts))

    def log_frequencies(self, counts: TableLike) -> Floats:
        """Log of the posterior means (n_clients, n_labels) of label frequencies, finite, in nats.

        Parameters
        ----------
        counts : array-like of shape (n_clients, n_labels), >= 0
            Number of rows of each client with each label.
        """
        return self._log_frequencies(check_label_counts(counts))

    def _given(self, name, estimate):
        """The given frequencies `name`, or an estimate of as many labels."""
        frequencies = known_frequencies(self, name, len(estimate))
        return estimate if frequencies is None else frequencies


def check_label_counts(counts: TableLike) -> Floats:
    """Label counts as an array (m, K) of finite, non-negative floats."""
    counts = check_array(counts, dtype=float)
    if counts.min() < 0:
        raise ValueError(f"counts of labels must not be negative; got {counts.min():g}.")
    return counts


def check_frequencies(prior: Prior, theta: TableLike, zeros: bool) -> Floats:
    """Label frequencies (m, K) of clients with sum 1, positive unless there may be `zeros`."""
    theta = check_array(theta, dtype=float)
    sums = theta.sum(axis=1)
    if not (theta >= 0 if zeros else theta > 0).all() or np.abs(sums - 1).max() > 1e-6:
        raise ValueError(
            f"theta must be {'non-negative' if zeros else 'positive'} frequencies with sum 1 per "
            f"client to fit a {type(prior).__name__}; got a smallest one of {theta.min():g} and "
            f"sums from {sums.min():g} to {sums.max():g}."
        )
    return theta


def known_frequencies(prior: Prior, name: str, n_labels: int | None = None) -> Floats | None:
    """Parameter `name` of a prior: frequencies (K,), positive and with sum 1; None if not given."""
    value = getattr(prior, name)
    if value is None:
        return None
    value = np.asarray(value, dtype=float)
    if value.ndim != 1 or not (value > 0).all() or not is_distribution(value):
        raise ValueError(
            f"{name} of {type(prior).__name__} must be positive numbers of shape (n_labels,) that "
            f"sum to 1; got shape {value.shape} with sum {value.sum():.6g} and a smallest one of "
            f"{value.min(initial=np.inf):.3g}."
        )
    if n_labels not in (None, len(value)):
        raise ValueError(
            f"{name} of {type(prior).__name__} must have one number for each of {n_labels} labels; "
            f"got {len(value)}."
        )
    return value


def check_client_weights(weights: ArrayLike | None, n_clients: int) -> Floats:
    """Weights (m,) of clients, not all 0; equal ones for None."""
    if weights is None:
        return np.ones(n_clients)
    weights = np.asarray(weights, dtype=float)
    if weights.shape != (n_clients,) or not (weights >= 0).all() or not weights.any():
        raise ValueError(
            f"client_weights must be {n_clients} non-negative numbers, one for each client and not "
            f"all 0; got shape {weights.shape} with sum {weights.sum():g}."
        )
    return weights


def compress(counts):
    """LabelCounts of a table (m, K)."""
    owner, label = np.nonzero(counts)
    value = counts[owner, label]
    distinct, rank = np.unique(value, return_inverse=True)
    keys, position = np.unique(label * len(distinct) + rank, return_inverse=True)
    labels, ranks = np.divmod(keys, max(len(distinct), 1))  # none is distinct if all are 0
    n_seen = np.bincount(owner, minlength=len(counts))
    return LabelCounts(counts.sum(axis=1), n_seen, owner, position, labels, distinct[ranks])


def log_rising(base, counts):
    """Log of base (base + 1) ... (base + counts - 1), which is 0 for no count."""
    # Log-gamma functions of a large base would cancel; Stirling's series does so before rounding.
    large = np.maximum(base, _STIRLING)
    top = large + counts
    series = (large - 0.5) * np.log1p(counts / large) + counts * (np.log(top) - 1)
    series = series + _stirling_rest(top) - _stirling_rest(large)
    return np.where(base < _STIRLING, gammaln(base + counts) - gammaln(base), series)


def _stirling_rest(z):
    """Log-gamma function minus its first terms (z - 1/2) log z - z + log(2 pi) / 2, for z >= 10."""
    squared = 1 / z**2
    return (1 / 12 - squared * (1 / 360 - squared * (1 / 1260 - squared / 1680))) / z


def log_likelihoods(table, mean, concentration):
    """Log probability (m,) of each client's labels, in their order, under a Dirichlet prior."""
    rising = log_rising(concentration * mean[table.labels], table.values)
    return table.by_client(rising) - log_rising(concentration, table.n_rows)


def ml_concentration(table, mean, weights):
    """Concentration with the largest Dirichlet-multinomial likelihood, clients weighted (m,)."""
    times = table.occurrences(weights)
    sizes, position = np.unique(table.n_rows, return_inverse=True)
    clients = np.bincount(position, weights)

    def log_likelihood(log_concentration):
        total = np.exp(log_concentration)
        seen = times @ log_rising(total * mean[table.labels], table.values)
        return seen - clients @ log_rising(total, sizes)

    return maximum_on(log_likelihood, *concentration_range(table.n_rows))


def maximum_on(value, low, high):
    """Argument in [low, high] at which `value`, of its log, is largest; a tie goes to the top."""
    grid = np.linspace(np.log(low), np.log(high), _SEARCH_POINTS)
    values = np.array([value(point) for point in grid])
    # Where rounding alone tells values apart, the clients say nothing: they count as alike.
    tie = 1e-9 * (1 + np.abs(values.max()))
    best = int(np.flatnonzero(values >= values.max() - tie)[-1])
    if best == _SEARCH_POINTS - 1:
        return float(high)
    bounds = grid[max(best - 1, 0)], grid[best + 1]
    optimum = minimize_scalar(
        lambda point: -value(point), bounds=bounds, method="bounded", options={"xatol": 1e-7}
    )
    # The bounded search never tries the ends of its interval.
    return float(np.exp(optimum.x if -optimum.fun > values[best] else grid[best]))


def concentration_range(n_rows):
    """Concentrations that stand for "one label a client" and for "all clients alike"."""
    # Under the first, one row of all clients' rows is expected to bring its client a further label.
    # The second is 10,000 times the largest client.
    # Under a small concentration c the n-th row brings a further label with chance c / (n - 1):
    # these sum to c (psi(n) + gamma) over a client's rows.
    further = np.sum(psi(np.maximum(n_rows, 1.0)) + np.euler_gamma)
    return 1 / max(further, 1.0), 1e4 * max(float(np.max(n_rows)), 100.0)


def mean_frequencies(counts, weights):
    """Weighted mean (K,) of the clients' label frequencies, with one more row spread evenly."""
    # That row keeps labels that no client has above 0.
    n_rows = counts.sum(axis=1)
    # Clients without rows have no frequencies, whatever their weights.
    frequencies = counts / np.maximum(n_rows, np.finfo(float).tiny)[:, None]
    weights = np.where(n_rows > 0, weights, 0.0)
    mean = weights @ frequencies / max(weights.sum(), np.finfo(float).tiny)
    total = n_rows.sum() if weights.sum() > 0 else 0.0
    return (total * mean + 1 / counts.shape[1]) / (total + 1)


def onto_simplex(vector):
    """Nearest point of the probability simplex to a vector (K,)."""
    # This moves no nearest point, and keeps 1 from rounding off where noise made entries huge.
    vector = vector - vector.max()
    falling = np.sort(vector)[::-1]
    excess = (np.cumsum(falling) - 1) / np.arange(1, len(vector) + 1)
    return np.maximum(vector - excess[np.flatnonzero(falling > excess)[-1]], 0.0)


def dirichlet_draws(shapes, rng):
    """Draws from Dirichlet distributions with parameters (m, K); 0 marks what has no mass."""
    # Gamma variates are drawn as logs, because those of small parameters underflow.
    present = shapes > 0
    shapes = np.where(present, shapes, 1.0)
    logs = np.log(rng.gamma(shapes + 1)) + np.log(1 - rng.uniform(size=shapes.shape)) / shapes
    logs = np.where(present, logs, -np.inf)
    return np.exp(logs - logsumexp(logs, axis=1, keepdims=True))
