"""Variances of several groupings, of which some may be known."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq

from pfl_sklearn.linear_model._mixed._groupings._equations import (
    SEARCHED,
    SOLVED,
    DenseEquations,
    IterativeEquations,
)
from pfl_sklearn.linear_model._mixed._groupings._search import RatioShape, search_ratios

_START = 0.25  # ratio of every variance to the noise's, for columns of unit size
_LARGEST_START = 100.0  # root of a ratio of another fold
_NOISE_MARGIN, _NOISE_STEP, _LOWEST_NOISE = 1.0, 2.0, 30.0  # of log noise, in a search for it
_NOISE_TOLERANCE = 1e-9  # of the logarithm


# Where searches for variances ended, roots of the ratios by shapes and numbers of columns.
Roots = dict[tuple, list[np.ndarray]]
_fold: ContextVar[tuple[Roots, Roots] | None] = ContextVar("fold", default=None)


@contextmanager
def fit_of_fold(other: Roots) -> Iterator[Roots]:
    """Fit to rows of a fold: the first search starts where that of another fold ended (`other`).

    What is yielded holds where the fit's searches end.
    """
    found: Roots = {}
    token = _fold.set((dict(other), found))
    try:
        yield found
    finally:
        _fold.reset(token)


def is_fold() -> bool:
    """Whether a fit is one of a fold, of which only predictions are used."""
    return _fold.get() is not None


class Parameters(NamedTuple):
    """What a search knows of a grouping's covariance, in the columns to which its shape refers."""

    shape: RatioShape | None  # None where the covariance is known
    root: np.ndarray  # (q, q), of the covariance if that is known, otherwise of the first ratio
    turn: np.ndarray  # (q, q), leads to the columns of the equations


def make_parameters(shape, covariance, back, turn):
    """Parameters of a grouping; `back` leads from the shape's columns to the covariance's.

    `covariance` (q, q) is known, or None.
    """
    if covariance is None:
        varies = np.ones(len(turn), bool) if shape.name == "full" else shape.varies
        return Parameters(shape, np.sqrt(_START) * np.diag(varies.astype(float)), turn)
    left = np.linalg.inv(back)
    values, vectors = np.linalg.eigh(left @ covariance @ left.T)
    return Parameters(None, vectors * np.sqrt(np.maximum(values, 0.0)), turn)


class SuccessiveEquations:
    """Equations at one point after the other; iterative ones start from the last solutions."""

    def __init__(self, products, restricted, dense):
        self._products, self._restricted, self._dense = products, restricted, dense
        self._last = None

    def at(self, roots, noise=None, tol=SEARCHED):
        """Equations at roots of the ratios, with a known noise variance or the best one."""
        if self._dense:
            return DenseEquations(self._products, roots, self._restricted, noise)
        before, self._last = (
            self._last,
            IterativeEquations(self._products, roots, self._restricted, noise, self._last, tol),
        )
        if before is not None:
            before._start = None  # or all points would stay in memory
        return self._last

    def solved(self, equations):
        """The same equations, solved as exactly as a result is."""
        if self._dense:
            return equations
        noise = None if equations.profiles_noise else equations.noise
        return self.at(equations.roots, noise, SOLVED)


def search_grouped_variances(points, parameters, noise, limits):
    """SearchResult for groupings with these Parameters; limits are of iterations and gain."""
    shapes, turns = [each.shape for each in parameters], [each.turn for each in parameters]
    starts, known = [each.root for each in parameters], [shape is None for shape in shapes]
    other, found = _fold.get() or ({}, {})
    key = tuple((each.shape and each.shape.name, len(each.turn)) for each in parameters)
    for k, root in enumerate(other.pop(key, ())):
        # A full root near 0 hardly grows again, and one of an exact fit leaves no digits.
        if not known[k] and shapes[k].name != "full" and root.max() < _LARGEST_START:
            starts[k] = root * shapes[k].varies

    def at_noise(noise):
        # Ratios of known covariances fall as the noise rises.
        unit = 1.0 if noise is None else np.sqrt(noise)
        roots = [start / unit if k else start for start, k in zip(starts, known, strict=True)]
        result = search_ratios(partial(points.at, noise=noise), roots, shapes, turns, *limits)
        pairs = zip(turns, result.equations.roots, strict=True)
        found[key] = [np.linalg.solve(turn, root) for turn, root in pairs]
        return result

    if noise is not None or not any(known):
        return at_noise(noise)

    def slope(log_noise):
        """Slope of the best criterion in the logarithm of the noise variance."""
        equations = at_noise(np.exp(log_noise)).equations
        moved = 0.0
        for k, (turn, root) in enumerate(zip(turns, equations.roots, strict=True)):
            if known[k]:
                moved += np.vdot(root @ root.T, equations.slopes.of(k))
            else:  # the next search starts here
                starts[k] = np.linalg.solve(turn, root)
        return equations.n_free - equations.square / equations.noise - moved

    # Without the known effects, the noise explains all that they would explain.
    without = [start * (not k) for start, k in zip(starts, known, strict=True)]
    high = np.log(points.at(without).noise) + _NOISE_MARGIN
    low = high - _NOISE_MARGIN
    while slope(low) > 0 and low > high - _LOWEST_NOISE:
        low -= _NOISE_STEP
    return at_noise(np.exp(brentq(slope, low, high, xtol=_NOISE_TOLERANCE)))
