"""Weights with which each client mixes candidates, or picks one, from its errors and a prior."""

from functools import partial
from typing import NamedTuple

import numpy as np

from pfl_sklearn._clients import segment_sums
from pfl_sklearn._typing import Floats, Integers
from pfl_sklearn.compose._inner_estimators import SMALLEST_PROBABILITY

# Degrees of freedom of the prior of a client's error variance. Without that prior, candidates whose
# errors cancel in a client's only row would have an infinite likelihood.
_VARIANCE_PRIOR_DF = 3.0
_SMALLEST_TYPICAL = 1e-12  # mean squared error of a client whose largest error is 1
# Each step lowers the objective; the limits end searches that rounding errors keep from converging.
_MAX_NEWTON_STEPS, _MAX_STEP_HALVINGS, _NEWTON_TOLERANCE = 100, 40, 1e-12
_MOST_NATS = 30.0  # between shares of candidates: exp(-30) = 1e-13, so no prior mean is 0


class CandidateErrors(NamedTuple):
    """Out-of-fold errors of K candidates on n rows.

    `values` (n, K) are residuals or, with classes, probabilities of the true class; `codes` (n,)
    are the positions of the rows' clients, `weights` (n,) those of the rows.
    """

    values: np.ndarray
    has_classes: bool
    codes: np.ndarray
    weights: np.ndarray
    n_clients: int

    def losses(self, mixtures: Floats) -> Floats:
        """Squared errors (n,) or log-losses of mixtures: weights (n, K) by row, or (K,) for all."""
        mixed = np.einsum("nk,nk->n", self.values, np.broadcast_to(mixtures, self.values.shape))
        if self.has_classes:
            return -np.log(np.maximum(mixed, SMALLEST_PROBABILITY))
        with np.errstate(over="ignore"):  # a warning would reveal a single client's row
            return mixed**2

    def take(self, rows: Integers) -> "CandidateErrors":
        """The errors on these rows; clients keep their positions."""
        parts = {name: getattr(self, name)[rows] for name in ("values", "codes", "weights")}
        return self._replace(**parts)

    def mean_losses_of_candidates(self) -> Floats:
        """Mean losses (K,) of single candidates; infinite if a square overflows."""
        losses = np.array([self.losses(vertex) for vertex in np.eye(self.values.shape[1])])
        with np.errstate(over="ignore"):
            return np.average(losses, axis=1, weights=self.weights)

    def as_one_client(self) -> "CandidateErrors":
        """The same errors, with all rows assigned to one client."""
        return self._replace(codes=np.zeros_like(self.codes), n_clients=1)


def errors_of(predicted, table, rows, classes):
    """CandidateErrors on `rows` of a TableRows, whose clients keep their positions.

    `predicted` are responses (n,) or probabilities (n, n_classes) of each candidate for these rows.
    """
    clients, y = table.clients, table.y[rows]
    weights = np.ones(len(y)) if table.weights is None else table.weights[rows]
    if classes is None:
        values = np.column_stack(predicted) - y[:, None]
    else:
        true = np.searchsorted(classes, y)
        at_true = np.arange(len(true)), true
        values = np.column_stack([probabilities[at_true] for probabilities in predicted])
        values = np.maximum(values, SMALLEST_PROBABILITY)
    codes = clients.codes[rows]
    return CandidateErrors(values, classes is not None, codes, weights, len(clients.ids))


def population_mean(errors, how):
    """Mean (K,) of a prior, learned from the rows of all clients as if they were one."""
    # For "weights" it is the best mixture, with a prior of one row per candidate. For "best" it is
    # the shares in proportion to how likely each candidate makes an average row.
    n_candidates = errors.values.shape[1]
    if how == "weights":
        return best_mixture(errors, n_candidates)
    even = np.full(n_candidates, 1 / n_candidates)
    totals = _candidate_log_losses(
        _client_likelihoods(errors.as_one_client(), even), 1, n_candidates
    )[0]
    nats = totals / errors.weights.sum()
    shares = np.exp(-np.minimum(nats - nats.min(), _MOST_NATS))
    return shares / shares.sum()


def best_mixture(errors, rows=0.1):
    """Weights (K,) of the best mixture on the rows of all clients as if they were one.

    A prior worth `rows` rows of average weight keeps the weights above 0.
    """
    n_candidates = errors.values.shape[1]
    even = np.full(n_candidates, 1 / n_candidates)
    # The weights of rows have no unit.
    weights = errors.weights / max(errors.weights.mean(), np.finfo(float).tiny)
    pooled = errors.as_one_client()._replace(weights=weights)
    # Errors are scaled by the best candidate: a very bad one would hide all differences.
    best = np.eye(n_candidates)[np.argmin(pooled.mean_losses_of_candidates())]
    return _minimum(_client_likelihoods(pooled, best), even[None], rows * even)[0]


def client_weights(errors, how, mean, concentrations):
    """Weights (m, K) of the clients for each concentration (in rows), given in descending order."""
    # Clients without rows get the prior's weights.
    if how == "weights":
        return _mixtures(errors, mean, concentrations)
    nats = _candidate_log_losses(_client_likelihoods(errors, mean), errors.n_clients, len(mean))
    picked = [np.argmin(nats - rows * np.log(mean), axis=1) for rows in concentrations]
    return [np.eye(len(mean))[best] for best in picked]


def _mixtures(errors, mean, concentrations):
    """Weights (m, K) that maximize a client's likelihood times the density of the prior.

    The density is that of a Dirichlet distribution with `mean` as its mode.
    """
    terms, path = _client_likelihoods(errors, mean), []
    weights = np.tile(mean, (errors.n_clients, 1))
    for rows in concentrations:  # warm starts: each begins at the solution for a stronger prior
        weights = _minimum(terms, weights, rows * mean)
        path.append(weights)
    return path


def _candidate_log_losses(terms, n_clients, n_candidates):
    """Negative log likelihoods (m, K) of single candidates, by client."""
    tiled = (np.tile(vertex, (n_clients, 1)) for vertex in np.eye(n_candidates))
    return np.column_stack([terms(weights)[0] for weights in tiled])


def _client_likelihoods(errors, mean):
    """Function of weights (m, K): minus log likelihoods (m,), gradients and curvatures (m, K, K).

    With classes the likelihood is the mixture's probability of the true classes. A response has a
    normal error with a variance of the client's own, which is integrated out; its prior has three
    degrees of freedom at the client's mean squared error under the mixture `mean`. So mixtures for
    a client with few rows differ by few nats, however small its errors are.
    """
    if errors.has_classes:
        return partial(_class_terms, errors)
    values, _, codes, weights, n_clients = errors
    # In units of each client's largest error: that shifts likelihoods by a constant and keeps
    # squares of huge or tiny responses in range.
    largest = np.zeros(n_clients)
    np.maximum.at(largest, codes, np.abs(values).max(axis=1))
    values = values / np.where(largest > 0, largest, 1.0)[codes, None]
    moments = _second_moments(values, weights, codes, n_clients)
    rows = segment_sums(weights, codes, n_clients)
    typical = (mean @ moments @ mean) / np.maximum(rows, np.finfo(float).tiny)
    extra = _VARIANCE_PRIOR_DF * np.maximum(typical, _SMALLEST_TYPICAL)
    return partial(_response_terms, moments, rows + _VARIANCE_PRIOR_DF, extra)


def _class_terms(errors, mixtures):
    """Terms of :func:`_client_likelihoods` for classes."""
    values, _, codes, weights, n_clients = errors
    chances = np.einsum("nk,nk->n", values, mixtures[codes])
    ratios = values / chances[:, None]
    return (
        -segment_sums(weights * np.log(chances), codes, n_clients),
        -segment_sums(weights[:, None] * ratios, codes, n_clients),
        _second_moments(ratios, weights, codes, n_clients),
    )


def _response_terms(moments, degrees, extra, mixtures):
    """Terms of :func:`_client_likelihoods` for responses, from second moments (m, K, K)."""
    slopes = np.einsum("mkl,ml->mk", moments, mixtures)
    squares = np.einsum("mk,mk->m", slopes, mixtures) + extra
    factors = degrees / squares
    return (
        degrees / 2 * np.log(squares),
        factors[:, None] * slopes,
        factors[:, None, None] * moments,  # an upper bound, because the logarithm is concave
    )


def _second_moments(values, weights, codes, n_clients):
    """Weighted sums (m, K, K) over each client's rows of products of values (n, K)."""
    n_candidates = values.shape[1]
    products = values[:, :, None] * (weights[:, None] * values)[:, None]
    sums = segment_sums(products.reshape(-1, n_candidates**2), codes, n_clients)
    return sums.reshape(-1, n_candidates, n_candidates)


def _minimum(terms, start, prior):
    """Weights (m, K) on the simplex that minimize terms - prior @ log(weights), by Newton."""
    weights, diagonal = start, np.arange(len(prior))

    def objective(mixtures):
        value, gradient, curvature = terms(mixtures)
        return value - np.log(mixtures) @ prior, gradient, curvature

    value, gradient, curvature = objective(weights)
    for _ in range(_MAX_NEWTON_STEPS):
        # In units of the weights, which may be tiny.
        slopes = weights * gradient - prior
        systems = weights[:, :, None] * curvature * weights[:, None]
        systems[:, diagonal, diagonal] += prior
        solved = np.linalg.solve(systems, np.stack([slopes, weights], axis=2))
        # The multiplier of the constraint that weights sum to 1.
        multiplier = (weights * solved[..., 0]).sum(axis=1) / (weights * solved[..., 1]).sum(axis=1)
        step = multiplier[:, None] * solved[..., 1] - solved[..., 0]
        gain = -(slopes * step).sum(axis=1)
        is_open = gain > _NEWTON_TOLERANCE * (1 + prior.sum())
        if not is_open.any():
            break
        # At most 99 % of the way to the edge, where the logarithm is infinite.
        length = np.where(is_open, np.minimum(1.0, 0.99 / np.maximum(-step.min(axis=1), 0.99)), 0.0)
        for _ in range(_MAX_STEP_HALVINGS):
            trial = weights * (1 + length[:, None] * step)
            trial_terms = objective(trial / trial.sum(axis=1, keepdims=True))
            # Armijo's rule; the last term is the rounding error of the values.
            largest = value - 1e-4 * length * gain + 1e-13 * np.abs(value)
            worse = trial_terms[0] > largest
            if not (worse & is_open).any():
                break
            length = np.where(worse, length / 2, length)
        weights = trial / trial.sum(axis=1, keepdims=True)
        value, gradient, curvature = trial_terms
    return weights
