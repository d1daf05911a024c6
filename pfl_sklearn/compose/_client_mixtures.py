"""Weights by which each client mixes candidates, or picks one: its own errors, and a prior."""

from functools import partial
from typing import NamedTuple

import numpy as np

from pfl_sklearn._clients import segment_sums
from pfl_sklearn._typing import Floats, Integers
from pfl_sklearn.compose._inner_estimators import SMALLEST

# Degrees of freedom of the prior of a client's error variance. Without it, candidates that cancel
# in the only row of a client have an error of 0, whose likelihood is infinite.
_VARIANCE_PRIOR_DF = 3.0
_SMALLEST_TYPICAL = 1e-12  # mean squared error of a client whose largest error is 1
# Each step lowers the objective; the bounds end what rounding errors keep from converging.
_MAX_NEWTON_STEPS, _MAX_STEP_HALVINGS, _NEWTON_TOLERANCE = 100, 40, 1e-12
_MOST_NATS = 30.0  # between the shares of candidates: 1e-13, so that no prior mean is 0


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
        """Squared errors (n,) or log-losses of mixtures (n, K) of the rows, or of one (K,)."""
        mixed = np.einsum("nk,nk->n", self.values, np.broadcast_to(mixtures, self.values.shape))
        if self.has_classes:
            return -np.log(np.maximum(mixed, SMALLEST))
        with np.errstate(over="ignore"):  # a warning would tell of one client's row
            return mixed**2

    def take(self, rows: Integers) -> "CandidateErrors":
        """The errors on these rows; clients keep their positions."""
        parts = {name: getattr(self, name)[rows] for name in ("values", "codes", "weights")}
        return self._replace(**parts)

    def of_candidates(self) -> Floats:
        """Mean losses (K,) of the candidates alone; infinite if squares are."""
        losses = np.array([self.losses(alone) for alone in np.eye(self.values.shape[1])])
        with np.errstate(over="ignore"):
            return np.average(losses, axis=1, weights=self.weights)

    def pooled(self) -> "CandidateErrors":
        """The same errors, with all rows assigned to one client."""
        return self._replace(codes=np.zeros_like(self.codes), n_clients=1)


def errors_of(predicted, table, rows, classes):
    """Errors of candidates on some rows of a table, whose clients keep their positions.

    Parameters
    ----------
    predicted : list of ndarray of shape (n,) or (n, n_classes)
        Responses or probabilities of each candidate for these rows.
    table : TableRows
    rows : ndarray of shape (n,)
        Positions in the table.
    classes : ndarray or None
        Sorted classes, of a classifier.

    Returns
    -------
    CandidateErrors
    """
    clients, y = table.clients, table.y[rows]
    weights = np.ones(len(y)) if table.weights is None else table.weights[rows]
    if classes is None:
        values = np.column_stack(predicted) - y[:, None]
    else:
        true = np.searchsorted(classes, y)
        values = np.column_stack([each[np.arange(len(true)), true] for each in predicted])
        values = np.maximum(values, SMALLEST)
    codes = clients.codes[rows]
    return CandidateErrors(values, classes is not None, codes, weights, len(clients.ids))


def population_mean(errors, how):
    """Mean (K,) of a prior, learned from the rows of all clients as if they were one.

    The mixture that does best, one more row for each candidate apart; for "best", shares in
    proportion to how likely each candidate makes a row on average.
    """
    n_candidates = errors.values.shape[1]
    if how == "weights":
        return best_mixture(errors, n_candidates)
    even = np.full(n_candidates, 1 / n_candidates)
    totals = _of_vertices(_client_likelihoods(errors.pooled(), even), 1, n_candidates)[0]
    nats = totals / errors.weights.sum()
    shares = np.exp(-np.minimum(nats - nats.min(), _MOST_NATS))
    return shares / shares.sum()


def best_mixture(errors, rows=0.1):
    """Weights (K,) of the mixture that does best on the rows of all clients as if they were one.

    A prior that counts for some `rows` of average weight keeps weights above 0.
    """
    n_candidates = errors.values.shape[1]
    even = np.full(n_candidates, 1 / n_candidates)
    # The weights of rows have no unit.
    weights = errors.weights / max(errors.weights.mean(), np.finfo(float).tiny)
    pooled = errors.pooled()._replace(weights=weights)
    # The best candidate says how large errors are: one that is far off would hide all differences.
    best = np.eye(n_candidates)[np.argmin(pooled.of_candidates())]
    return _minimum(_client_likelihoods(pooled, best), even[None], rows * even)[0]


def client_weights(errors, how, mean, concentrations):
    """Weights (m, K) of clients under a prior of each concentration in rows, given in descent.

    Clients without rows have the weights that the prior says.
    """
    if how == "weights":
        return _mixtures(errors, mean, concentrations)
    nats = _of_vertices(_client_likelihoods(errors, mean), errors.n_clients, len(mean))
    picked = [np.argmin(nats - rows * np.log(mean), axis=1) for rows in concentrations]
    return [np.eye(len(mean))[best] for best in picked]


def _mixtures(errors, mean, concentrations):
    """Weights (m, K) that maximize a client's likelihood times the density of the prior.

    The density is that of a Dirichlet distribution with `mean` as its mode.
    """
    terms, path = _client_likelihoods(errors, mean), []
    weights = np.tile(mean, (errors.n_clients, 1))
    for rows in concentrations:  # each starts where a stronger prior ended, which is near
        weights = _minimum(terms, weights, rows * mean)
        path.append(weights)
    return path


def _of_vertices(terms, n_clients, n_candidates):
    """Negative log likelihoods (m, K) of single candidates, by client."""
    alone = np.eye(n_candidates)
    return np.column_stack([terms(np.tile(each, (n_clients, 1)))[0] for each in alone])


def _client_likelihoods(errors, mean):
    """Function of weights (m, K): minus log likelihoods (m,), gradients and curvatures (m, K, K).

    With classes the likelihood is the mixture's probability of the true ones. A response has a
    normal error with a variance of the client's own, which is integrated out; its prior has three
    degrees of freedom at the client's mean squared error under the mixture `mean`. So the mixtures
    of a client with few rows differ by few nats, however good its errors look.
    """
    if errors.has_classes:
        return partial(_class_terms, errors)
    values, _, codes, weights, n_clients = errors
    # In units of each client's largest error: likelihoods change by a constant, and squares of huge
    # or tiny responses stay in range.
    largest = np.zeros(n_clients)
    np.maximum.at(largest, codes, np.abs(values).max(axis=1))
    values = values / np.where(largest > 0, largest, 1.0)[codes, None]
    moments = _products(values, weights, codes, n_clients)
    rows = segment_sums(weights, codes, n_clients)
    typical = (mean @ moments @ mean) / np.maximum(rows, np.finfo(float).tiny)
    extra = _VARIANCE_PRIOR_DF * np.maximum(typical, _SMALLEST_TYPICAL)
    return partial(_response_terms, moments, rows + _VARIANCE_PRIOR_DF, extra)


def _class_terms(errors, mixtures):
    """What :func:`_client_likelihoods` computes, for classes."""
    values, _, codes, weights, n_clients = errors
    chances = np.einsum("nk,nk->n", values, mixtures[codes])
    ratios = values / chances[:, None]
    return (
        -segment_sums(weights * np.log(chances), codes, n_clients),
        -segment_sums(weights[:, None] * ratios, codes, n_clients),
        _products(ratios, weights, codes, n_clients),
    )


def _response_terms(moments, degrees, extra, mixtures):
    """What :func:`_client_likelihoods` computes, for responses; `moments` are (m, K, K)."""
    slopes = np.einsum("mkl,ml->mk", moments, mixtures)
    squares = np.einsum("mk,mk->m", slopes, mixtures) + extra
    factors = degrees / squares
    return (
        degrees / 2 * np.log(squares),
        factors[:, None] * slopes,
        factors[:, None, None] * moments,  # at least the curvature, as the logarithm is concave
    )


def _products(values, weights, codes, n_clients):
    """Weighted sums (m, K, K) over each client's rows of products of values (n, K)."""
    n_candidates = values.shape[1]
    products = values[:, :, None] * (weights[:, None] * values)[:, None]
    sums = segment_sums(products.reshape(-1, n_candidates**2), codes, n_clients)
    return sums.reshape(-1, n_candidates, n_candidates)


def _minimum(terms, start, prior):
    """Weights (m, K) on the simplex that minimize terms minus prior @ log(weights), by Newton."""
    weights, diagonal = start, np.arange(len(prior))

    def objective(mixtures):
        value, gradient, curvature = terms(mixtures)
        return value - np.log(mixtures) @ prior, gradient, curvature

    value, gradient, curvature = objective(weights)
    for _ in range(_MAX_NEWTON_STEPS):
        # in units of the weights, which may be tiny
        slopes = weights * gradient - prior
        systems = weights[:, :, None] * curvature * weights[:, None]
        systems[:, diagonal, diagonal] += prior
        solved = np.linalg.solve(systems, np.stack([slopes, weights], axis=2))
        # The multiplier of the constraint that weights sum to 1.
        level = (weights * solved[..., 0]).sum(axis=1) / (weights * solved[..., 1]).sum(axis=1)
        step = level[:, None] * solved[..., 1] - solved[..., 0]
        gain = -(slopes * step).sum(axis=1)
        is_open = gain > _NEWTON_TOLERANCE * (1 + prior.sum())
        if not is_open.any():
            break
        # At most 99 % of the way to the edge, where the logarithm is infinite.
        length = np.where(is_open, np.minimum(1.0, 0.99 / np.maximum(-step.min(axis=1), 0.99)), 0.0)
        for _ in range(_MAX_STEP_HALVINGS):
            moved = weights * (1 + length[:, None] * step)
            terms_there = objective(moved / moved.sum(axis=1, keepdims=True))
            # Armijo's rule; the last term is the rounding error of the values.
            largest = value - 1e-4 * length * gain + 1e-13 * np.abs(value)
            worse = terms_there[0] > largest
            if not (worse & is_open).any():
                break
            length = np.where(worse, length / 2, length)
        weights = moved / moved.sum(axis=1, keepdims=True)
        value, gradient, curvature = terms_there
    return weights
