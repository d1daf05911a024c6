"""Observed information of Laplace's approximation, for outcomes of one predictor a row.

A client's criterion is c = f - log det(H) / 2 at the mode V of f, its log-likelihood less the
penalty, where f has the slope f_V = 0 and the curvature -H. With the multiplier
mu = -H^-1 (log det H)_V / 2, the second derivatives of c are those of

    f + mu' f_V - log det(H) / 2

along directions in which a parameter moves itself and the mode: its slope in V is 0, so how the
mode bends does not matter. We write effects in units in which H is the identity.
"""

from typing import Any, NamedTuple

import numpy as np

from pfl_sklearn.linear_model._algebra import invert_lower, row_slices
from pfl_sklearn.linear_model._glmm._likelihood import Primal, find_mode, form_of
from pfl_sklearn.linear_model._glmm._table import RowStack

_CELLS_AT_A_TIME = 1 << 17  # of rows by features and parameters, so that they fit the cache
_STEP = 1e-4  # of predictors: differences of the third derivative are then exact to about 1e-8


class _Modes(NamedTuple):
    """Clients at their modes; derivatives of rows in their predictors have shape (b, n)."""

    effects: np.ndarray  # (b, r)
    whitening: np.ndarray  # (b, r, r), C with C'C the inverse of H
    score: np.ndarray
    weight: np.ndarray
    bend: np.ndarray  # slope of the weight
    second_bend: np.ndarray  # slope of that


def laplace_information(
    clients, x, y, w, offset, state, *, outcome, population, factor, directions
):
    """Minus the second derivatives (p + t, p + t) in the population and t parameters of the factor.

    With these the factor moves along `directions` (t, q, r). Other arguments are those of
    `evaluate_stack`.
    """
    stack, (b, n, p), (t, _, r) = RowStack(clients, x, y, w, offset), x.shape, directions.shape
    information = np.zeros((p + t, p + t))
    for part in row_slices(b, n * r * (t + r), _CELLS_AT_A_TIME):
        some = stack.of_clients(part)
        information += _information_of(some, outcome, population, factor, directions, state[part])
    return information


def _information_of(stack, outcome, population, factor, directions, state):
    """Minus the second derivatives (p + t, p + t) of the clients of a stack."""
    x, p = stack.x, stack.x.shape[2]
    features, modes = _at_modes(stack, outcome, population, factor, state)
    features = features @ modes.whitening.transpose(0, 2, 1)
    # What a parameter of the factor does to the features, (b, n, t, r), and at once to predictors.
    turned = np.einsum("bnq,tqr->bntr", x[:, :, : len(factor)], directions, optimize=True)
    predictors = np.concatenate([x, turned_by(turned, modes.effects)], axis=2)
    turned = turned @ modes.whitening.transpose(0, 2, 1)[:, None]
    # What parameters do to the mode (b, r, p + t), and through it to predictors (b, n, p + t).
    effects = -features.transpose(0, 2, 1) @ (modes.weight[..., None] * predictors)
    effects[:, :, p:] += np.einsum("bn,bntr->brt", modes.score, turned)
    predictors += features @ effects
    length = np.sum(features**2, axis=2)
    multiplier = -0.5 * np.einsum("bnr,bn->br", features, modes.bend * length)
    shift = np.einsum("bnr,br->bn", features, multiplier)
    curvature = modes.weight + modes.bend * shift + 0.5 * modes.second_bend * length
    information = _summed(curvature[..., None] * predictors, predictors)
    penalized = modes.whitening.transpose(0, 2, 1) @ effects  # in the units of the penalty
    information += _summed(penalized, penalized)
    slopes = _slopes_of_h(features, turned, modes, predictors)
    information -= 0.5 * _summed(slopes, slopes)
    # A parameter of the factor turns the features, and with them what others do to the mode.
    total = modes.score - modes.weight * shift - 0.5 * modes.bend * length
    along = modes.weight[..., None] * turned_by(turned, multiplier)
    along += modes.bend[..., None] * np.einsum("bntr,bnr->bnt", turned, features)
    across = _summed(along, predictors)
    across -= _summed(np.einsum("bn,bntr->brt", total, turned), effects)
    information[p:] += across
    information[:, p:] += across.T
    turned = turned.transpose(0, 1, 3, 2)
    weighted = modes.weight[..., None, None] * turned
    information[p:, p:] += weighted.reshape(-1, len(directions)).T @ turned.reshape(
        -1, len(directions)
    )
    return information


def turned_by(turned, effects):
    """Products (b, n, t) of turned features (b, n, t, r) and effects (b, r)."""
    return np.einsum("bntr,br->bnt", turned, effects)


def _at_modes(stack, outcome, population, factor, state):
    """Features (b, n, r) and _Modes of a stack."""
    form = form_of(stack.x, factor)
    mode = find_mode(form, outcome, stack.predictors(population), stack, state)
    one = np.ones((*mode.predictors.shape, 1))

    def bend_at(u):
        return outcome.weight_slopes(u, stack.y, stack.w, one)[..., 0]

    u = mode.predictors
    lower = np.linalg.cholesky(Primal(form.features).system(mode.terms.weight))
    modes = _Modes(
        form.effects(mode.state)[..., 0],
        invert_lower(lower),
        mode.terms.score[..., 0],
        mode.terms.weight[..., 0, 0],
        bend_at(u),
        (bend_at(u + _STEP) - bend_at(u - _STEP)) / (2 * _STEP),
    )
    return form.features, modes


def _slopes_of_h(features, turned, modes, predictors):
    """Slopes (b, r r, p + t) of the whitened H in the parameters."""
    b, n, r = features.shape
    squares = (features[..., :, None] * features[..., None, :]).reshape(b, n, r * r)
    slopes = squares.transpose(0, 2, 1) @ (modes.bend[..., None] * predictors)
    weighted = (modes.weight[..., None] * features).transpose(0, 2, 1)
    t = turned.shape[2]
    own = (weighted @ turned.reshape(b, n, t * r)).reshape(b, r, t, r)
    own = own.transpose(0, 1, 3, 2) + own.transpose(0, 3, 1, 2)
    slopes[:, :, slopes.shape[2] - t :] += own.reshape(b, r * r, t)
    return slopes


def _summed(left: Any, right: Any):
    """Products (k, l), summed over clients and rows, of arrays (b, n, k) and (b, n, l)."""
    return left.reshape(-1, left.shape[2]).T @ right.reshape(-1, right.shape[2])
