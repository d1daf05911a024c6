"""Weights by which each client mixes candidates, or picks one: its own errors, and a prior."""

from typing import NamedTuple

import numpy as np

from pfl_sklearn._clients import segment_sums
from pfl_sklearn.compose._out_of_fold import SMALLEST

_DEGREES = 3.0  # of freedom of the prior of a client's error variance
_SMALLEST_SQUARE = 1e-12  # of its mode, for a largest error of 1
_STEPS, _HALVINGS, _TOLERANCE = 100, 40, 1e-12


class Errors(NamedTuple):
    """What candidates do on rows of clients.

    `values` (n, K) are residuals or, with classes, probabilities of the true class; `codes` (n,)
    are the positions of the rows' clients, `weights` (n,) those of the rows.
    """

    values: np.ndarray
    has_classes: bool
    codes: np.ndarray
    weights: np.ndarray
    n_clients: int

    def losses(self, mixtures):
        """Squared errors (n,) or log-losses of mixtures, whose weights (n, K) these are."""
        mixed = np.einsum("nk,nk->n", self.values, mixtures)
        if self.has_classes:
            return -np.log(np.maximum(mixed, SMALLEST))
        with np.errstate(over="ignore"):  # a warning would tell of one client's row
            return mixed**2

    def of_candidates(self):
        """Mean losses (K,) of the candidates alone; infinite if squares are."""
        shape, alone = self.values.shape, np.eye(self.values.shape[1])
        losses = np.array([self.losses(np.broadcast_to(each, shape)) for each in alone])
        with np.errstate(over="ignore"):
            return np.average(losses, axis=1, weights=self.weights)

    def pooled(self):
        """The same rows as those of one client."""
        return self._replace(codes=np.zeros_like(self.codes), n_clients=1)


def errors_of(found, table, clients, classes):
    """Errors of candidates.

    Parameters
    ----------
    found : list of ndarray of shape (n,) or (n, n_classes)
        Responses or probabilities of each candidate.
    table : Table
    clients : EncodedClients
    classes : ndarray or None
        Sorted classes, of a classifier.

    Returns
    -------
    Errors
    """
    weights = np.ones(len(table.y)) if table.weights is None else table.weights
    if classes is None:
        values = np.column_stack(found) - table.y[:, None]
    else:
        true = np.searchsorted(classes, table.y)
        values = np.column_stack([each[np.arange(len(true)), true] for each in found])
        values = np.maximum(values, SMALLEST)
    return Errors(values, classes is not None, clients.codes, weights, len(clients.ids))


def population_mean(errors, how):
    """Mean (K,) of a prior, learned from the rows of all clients as if they were one.

    The mixture that does best, one more row for each candidate apart; for "best", shares in
    proportion to how likely each candidate makes a row on average.
    """
    pooled, n_candidates = errors.pooled(), errors.values.shape[1]
    even = np.full(n_candidates, 1 / n_candidates)
    if how == "weights":
        return _mixtures(pooled, even, [n_candidates])[0][0]
    each = _of_vertices(_likelihood(pooled, even), 1, n_candidates)[0] / errors.weights.sum()
    shares = np.exp(-np.minimum(each - each.min(), 30.0))
    return shares / shares.sum()


def client_weights(errors, how, mean, concentrations):
    """Weights (m, K) of clients under a prior of each concentration in rows, given in descent.

    Clients without rows have the weights that the prior says.
    """
    if how == "weights":
        return _mixtures(errors, mean, concentrations)
    each = _of_vertices(_likelihood(errors, mean), errors.n_clients, len(mean))
    picked = [np.argmin(each - rows * np.log(mean), axis=1) for rows in concentrations]
    return [np.eye(len(mean))[best] for best in picked]


def _mixtures(errors, mean, concentrations):
    """Weights (m, K) that maximize a client's likelihood times the density of the prior.

    The density is that of a Dirichlet distribution with `mean` as its mode.
    """
    terms, found = _likelihood(errors, mean), []
    weights = np.tile(mean, (errors.n_clients, 1))
    for rows in concentrations:
        weights = _minimum(terms, weights, rows * mean)
        found.append(weights)
    return found


def _of_vertices(terms, n_clients, n_candidates):
    """Minus log likelihoods (m, K) of the candidates alone."""
    alone = np.eye(n_candidates)
    return np.column_stack([terms(np.tile(each, (n_clients, 1)))[0] for each in alone])


def _likelihood(errors, mean):
    """Function of weights (m, K): minus log likelihoods (m,), gradients and curvatures (m, K, K).

    With classes the likelihood is the mixture's probability of the true ones. A response has a
    normal error with a variance of the client's own, which is integrated out; its prior has three
    degrees of freedom at the client's mean squared error under the mixture `mean`. So the mixtures
    of a client with few rows differ by few nats, however good its errors look.
    """
    values, _, codes, weights, n_clients = errors
    n_candidates = values.shape[1]
    if errors.has_classes:

        def terms(mixtures):
            chances = np.einsum("nk,nk->n", values, mixtures[codes])
            ratios = values / chances[:, None]
            squares = (ratios[:, :, None] * (weights[:, None] * ratios)[:, None]).reshape(
                -1, n_candidates**2
            )
            return (
                -segment_sums(weights * np.log(chances), codes, n_clients),
                -segment_sums(weights[:, None] * ratios, codes, n_clients),
                segment_sums(squares, codes, n_clients).reshape(-1, n_candidates, n_candidates),
            )

        return terms
    # In units of each client's largest error: likelihoods change by a constant.
    largest = np.zeros(n_clients)
    np.maximum.at(largest, codes, np.abs(values).max(axis=1))
    values = values / np.where(largest > 0, largest, 1.0)[codes, None]
    products = values[:, :, None] * (weights[:, None] * values)[:, None]
    moments = segment_sums(products.reshape(-1, n_candidates**2), codes, n_clients)
    moments = moments.reshape(-1, n_candidates, n_candidates)
    rows = segment_sums(weights, codes, n_clients)
    typical = (mean @ moments @ mean) / np.maximum(rows, np.finfo(float).tiny)
    extra = _DEGREES * np.maximum(typical, _SMALLEST_SQUARE)

    def terms(mixtures):
        slopes = np.einsum("mkl,ml->mk", moments, mixtures)
        squares = np.einsum("mk,mk->m", slopes, mixtures) + extra
        factors = (rows + _DEGREES) / squares
        return (
            (rows + _DEGREES) / 2 * np.log(squares),
            factors[:, None] * slopes,
            factors[:, None, None] * moments,  # at least the curvature, as the logarithm is concave
        )

    return terms


def _minimum(terms, start, prior):
    """Weights (m, K) on the simplex that minimize terms minus prior @ log(weights), by Newton."""
    weights, diagonal = start, np.arange(len(prior))

    def objective(mixtures):
        value, gradient, curvature = terms(mixtures)
        return value - np.log(mixtures) @ prior, gradient, curvature

    value, gradient, curvature = objective(weights)
    for _ in range(_STEPS):
        # in units of the weights, which may be tiny
        slopes = weights * gradient - prior
        systems = weights[:, :, None] * curvature * weights[:, None]
        systems[:, diagonal, diagonal] += prior
        solved = np.linalg.solve(systems, np.stack([slopes, weights], axis=2))
        level = (weights * solved[..., 0]).sum(axis=1) / (weights * solved[..., 1]).sum(axis=1)
        step = level[:, None] * solved[..., 1] - solved[..., 0]
        gain = -(slopes * step).sum(axis=1)
        open_ = gain > _TOLERANCE * (1 + prior.sum())
        if not open_.any():
            break
        length = np.where(open_, np.minimum(1.0, 0.99 / np.maximum(-step.min(axis=1), 0.99)), 0.0)
        for _ in range(_HALVINGS):
            moved = weights * (1 + length[:, None] * step)
            found = objective(moved / moved.sum(axis=1, keepdims=True))
            worse = found[0] > value - 1e-4 * length * gain + 1e-13 * np.abs(value)
            if not (worse & open_).any():
                break
            length = np.where(worse, length / 2, length)
        weights = moved / moved.sum(axis=1, keepdims=True)
        value, gradient, curvature = found
    return weights
