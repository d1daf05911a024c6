"""Observed information of Laplace's approximation.

A client's criterion is c = f - log det(H) / 2 at the mode V of f, its log-likelihood less the
penalty, where f has the slope f_V = 0 and the curvature -H. With the multiplier
mu = -H^-1 (log det H)_V / 2, the second derivatives of c are those of

    f + mu' f_V - log det(H) / 2

along directions in which a parameter moves itself and the mode: its slope in V is 0, so how the
mode bends does not matter. We write effects in units in which H is the identity. Differences of
gradients give the same, but take an evaluation for each parameter.

A row has a predictors, with a block D (a, r a) for the effects. Arrays have clients and rows first.
"""

from typing import Any, NamedTuple

import numpy as np

from pfl_sklearn.linear_model._algebra import invert_lower, row_slices
from pfl_sklearn.linear_model._mixed._likelihood import Primal, find_mode, form_of

_CELLS_AT_A_TIME = 1 << 17  # of rows by effects and parameters, so that they fit the cache
_STEP = 1e-4  # of predictors: differences of derivatives are then exact to about 1e-8


class _Modes(NamedTuple):
    """Clients at their modes, and derivatives of the rows' log-likelihoods there."""

    effects: np.ndarray  # (b, r, a)
    whitening: np.ndarray  # (b, r a, r a), C with C'C the inverse of H
    predictors: np.ndarray  # (b, n, a)
    score: np.ndarray  # (b, n, a)
    weight: np.ndarray  # (b, n, a, a)
    bend: np.ndarray  # (b, n, a, a, a), slopes of the weight


def laplace_information(stack, state, *, family, population, factor, directions):
    """Minus the second derivatives (a p + t, a p + t) in the population and in t parameters.

    With these the factor moves along `directions` (t, q, r). Other arguments are those of
    `evaluate_stack`.
    """
    (a, p), (t, _, r) = population.shape, directions.shape
    total, cells = np.zeros((a * p + t, a * p + t)), a * a * r * (t + a * r) + a * (a * p + t)
    for part in row_slices(len(stack.x), stack.x.shape[1] * cells, _CELLS_AT_A_TIME):
        some = stack.of_clients(part)
        total += _information_of(some, family, population, factor, directions, state[part])
    return total


def _information_of(stack, family, population, factor, directions, state):
    """Minus the second derivatives (a p + t, a p + t) of the clients of a stack."""
    x, a = stack.x, len(population)
    b, n, p = x.shape
    features, modes = _at_modes(stack, family, population, factor, state)
    blocks = _blocks(features[:, :, None], a)[..., 0, :] @ modes.whitening[:, None].swapaxes(2, 3)
    # What a parameter of the factor does to features, and so to predictors and their blocks.
    turned = np.einsum("bnq,tqr->bntr", x[:, :, : len(factor)], directions, optimize=True)
    direct = np.einsum("bntr,bra->bnat", turned, modes.effects, optimize=True)
    predictors = np.concatenate([np.kron(np.eye(a), x[:, :, None]), direct], axis=3)
    turned = _blocks(turned, a) @ modes.whitening[:, None, None].swapaxes(3, 4)  # (b, n, a, t, r a)
    # What parameters do to the mode (b, r a, a p + t), and through it to predictors.
    rows = blocks.reshape(b, n * a, -1)
    effects = -rows.swapaxes(1, 2) @ (modes.weight @ predictors).reshape(b, n * a, -1)
    effects[:, :, a * p :] += np.einsum("bna,bnatr->brt", modes.score, turned)
    predictors += (rows @ effects).reshape(predictors.shape)
    spread = blocks @ blocks.swapaxes(2, 3)
    bent = np.einsum("bncd,bncde->bne", spread, modes.bend)
    multiplier = -0.5 * np.einsum("bnar,bna->br", blocks, bent)
    shift = np.einsum("bnar,br->bna", blocks, multiplier)
    curvature = modes.weight + (modes.bend @ shift[:, :, None, :, None])[..., 0]
    curvature += 0.5 * _second_bend(stack, family, modes, spread)
    information = _summed(curvature @ predictors, predictors)
    penalized = modes.whitening.swapaxes(1, 2) @ effects  # in the units of the penalty
    information += _summed(penalized, penalized)
    slopes = _slopes_of_h(blocks, turned, modes, predictors)
    information -= 0.5 * _summed(slopes, slopes)
    # A parameter of the factor turns the blocks, and with them what others do to the mode.
    along = modes.weight @ np.einsum("bnatr,br->bnat", turned, multiplier)
    along += np.einsum("bnctr,bndr,bncde->bnet", turned, blocks, modes.bend, optimize=True)
    slope = modes.score - (modes.weight @ shift[..., None])[..., 0] - 0.5 * bent
    across = _summed(along, predictors)
    across -= _summed(np.einsum("bna,bnatr->brt", slope, turned), effects)
    information[a * p :] += across
    information[:, a * p :] += across.T
    weighted = np.einsum("bnac,bnctr->bnart", modes.weight, turned, optimize=True)
    information[a * p :, a * p :] += _summed(weighted, turned.swapaxes(3, 4))
    return information


def _blocks(features, a):
    """Blocks (b, n, a, t, r a) of features (b, n, t, r), the same for every predictor."""
    b, n, t, r = features.shape
    blocks = np.zeros((b, n, a, t, r, a))
    for k in range(a):
        blocks[:, :, k, :, :, k] = features
    return blocks.reshape(b, n, a, t, r * a)


def _at_modes(stack, family, population, factor, state):
    """Features (b, n, r) and _Modes of a stack."""
    form = form_of(stack.x, factor)
    mode = find_mode(form, family, stack.predictors(population), stack, state)
    lower = np.linalg.cholesky(Primal(form.features).system(mode.terms.curvature))

    def weight_at(u):
        return family.terms(u, stack.y, stack.w).curvature

    steps = _STEP * np.eye(len(population))
    u = mode.predictors
    bend = [(weight_at(u + step) - weight_at(u - step)) / (2 * _STEP) for step in steps]
    modes = _Modes(
        form.effects(mode.state),
        invert_lower(lower),
        u,
        mode.terms.score,
        mode.terms.curvature,
        np.stack(bend, axis=-1),
    )
    return form.features, modes


def _second_bend(stack, family, modes, spread):
    """Second derivatives (b, n, a, a) of sum(weight * spread) in the predictors."""

    def bent_at(u):
        return family.curvature_slopes(u, stack.y, stack.w, spread)

    u, steps = modes.predictors, _STEP * np.eye(spread.shape[-1])
    slopes = [(bent_at(u + step) - bent_at(u - step)) / (2 * _STEP) for step in steps]
    return np.stack(slopes, axis=-1)


def _slopes_of_h(blocks, turned, modes, predictors):
    """Slopes (b, r a r a, a p + t) of the whitened H in the parameters."""
    b, n, a, r = blocks.shape
    t = turned.shape[3]
    bent = np.einsum("bncde,bndr->bnecr", modes.bend, blocks, optimize=True)
    squares = blocks[:, :, None].swapaxes(3, 4) @ bent
    flat = predictors.reshape(b, n * a, -1)
    slopes = squares.reshape(b, n * a, r * r).swapaxes(1, 2) @ flat
    weighted = (modes.weight @ blocks).reshape(b, n * a, r).swapaxes(1, 2)
    own = (weighted @ turned.reshape(b, n * a, t * r)).reshape(b, r, t, r)
    own = own.transpose(0, 1, 3, 2) + own.transpose(0, 3, 1, 2)
    slopes[:, :, slopes.shape[2] - t :] += own.reshape(b, r * r, t)
    return slopes


def _summed(left: Any, right: Any):
    """Products (k, l) of arrays (..., k) and (..., l), summed over all else."""
    others = tuple(range(left.ndim - 1))
    return np.tensordot(left, right, (others, others))
