"""Confidence bounds of the variances of several groupings, and of the noise variance.

Bounds of a single variance are by the profile likelihood of its ratio to the noise variance where
the equations are small; all others are normal, from average information.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import brentq, minimize_scalar
from scipy.special import lambertw, ndtri

from pfl_sklearn.linear_model._mixed._groupings._search import (
    RatioShape,
    expected_information,
    free_moves,
    search_ratios,
)

_MOST_PROFILED = 500  # outer columns: a search from nearby then takes a tenth of a second
_WIDER = 2.0  # factor by which the bracket of a bound grows, on the logarithmic scale
_MOST_WIDENINGS = 30
_LONGEST_BRACKET = 3.0  # of the logarithm, to the first bracket
_TOLERANCE = 1e-4  # of the logarithm of a bound
_FLAT_RATIO = 0.03  # of the logarithm of a ratio: at a maximum that is 1e-4 of the value


class FittedVariances(NamedTuple):
    """Ratios of all groupings in the order of the equations, and what their bounds rest on."""

    noise: float
    free_noise: bool
    ratios: list  # (q, q), in the columns of the equations
    backs: list  # (q, q), lead to those of the data
    known: list  # bool: whether the covariance was given
    directions: list  # (k, (q, q)), t of them, in which ratio k may move
    errors: np.ndarray  # (t + 1, t + 1), covariance of the estimates along these and of log noise
    edges: list  # (q,), standard errors, over the noise, of ratios that are estimated as 0
    profile: Any  # RatioProfile; None for large equations and known covariances
    places: np.ndarray  # (K,), of the groupings in this order; clients are first

    @property
    def is_known(self):
        """Whether the covariance of each grouping was given, clients first."""
        return [self.known[k] for k in self.places]

    def bounds(self, level):
        """Bounds (lower, upper) of every covariance (q, q), and of the noise; None where given."""
        z = ndtri(0.5 + level / 2)
        bounds = [None if self.known[k] else self._bounds(k, z) for k in self.places]
        if not self.free_noise:
            return bounds, None
        loss = z**2 * self.errors[-1, -1] / 2
        return bounds, tuple(self.noise * np.exp(_log_change(loss, sign)) for sign in (-1, 1))

    def _bounds(self, k, z):
        covariance = self.noise * self.backs[k] @ self.ratios[k] @ self.backs[k].T
        error, of_ratio, dof = self._standard_errors(k)
        lower, upper = covariance - z * error, covariance + z * error
        variances, half = np.diag(covariance), z * np.diag(error)
        # Estimates of variances are closer to normal on the logarithmic scale, unless they say
        # little more than that the variance is not large.
        informed = np.diag(error) < variances
        factor = np.exp(np.divide(half, variances, out=np.zeros_like(half), where=informed))
        largest = np.where(informed, variances * factor, variances + half)
        np.fill_diagonal(lower, np.where(informed, variances / factor, 0.0))
        np.fill_diagonal(upper, largest + z * self.noise * self.edges[k])
        if self.profile is not None:
            for a in self.profile.single_variances(k, self.backs[k]):
                share = of_ratio[a, a] / variances[a] if variances[a] > 0 else np.inf
                pair = self._profile_bounds(k, a, z, share, dof[a, a])
                lower[a, a], upper[a, a] = pair
        return lower, upper

    def _profile_bounds(self, k, a, z, share, dof):
        root = self.profile.roots[k][a, a]
        unit = (self.backs[k][a] @ self.profile.turns[k][:, a]) ** 2
        if root > 0:
            start, step = np.log(root**2), min(z * share, _LONGEST_BRACKET)
            lower = self.profile.lower(k, a, start, step, z, dof)
        else:  # a small share of the upper bound is allowed
            start, step, lower = np.log(z * self.edges[k][a] / unit) - 1.0, 1.0, 0.0
        return unit * lower, unit * self.profile.upper(k, a, start, step, z, dof)

    def _standard_errors(self, k):
        """Standard errors (q, q) of a covariance, the same of its part by the ratio, and dof.

        The degrees of freedom (q, q) are those of the noise variance were that part known.
        """
        back = self.noise * np.kron(self.backs[k], self.backs[k])
        moved = np.zeros((len(self.errors), back.shape[0]))
        for j, (at, direction) in enumerate(self.directions):
            if at == k:
                moved[j] = back @ direction.ravel()
        of_ratio = np.einsum("ae,ab,be->e", moved, self.errors, moved)
        shared, noise = self.errors[-1] @ moved, self.errors[-1, -1]
        explained = np.divide(shared**2, of_ratio, out=np.zeros_like(shared), where=of_ratio > 0)
        dof = np.divide(2.0, noise - explained, out=np.full_like(shared, np.inf), where=noise > 0)
        # The covariance is the product of ratio and noise, so the noise's error counts.
        moved[-1] = back @ self.ratios[k].ravel()
        full = np.einsum("ae,ab,be->e", moved, self.errors, moved)
        errors = [np.sqrt(np.maximum(each, 0.0)) for each in (full, of_ratio)]
        return tuple(each.reshape(self.ratios[k].shape) for each in (*errors, dof))


class RatioProfile(NamedTuple):
    """Profile likelihood of single ratios: the others and the noise are at their best."""

    points: Any  # gives the equations at roots of the ratios
    shapes: list  # RatioShape of every grouping
    turns: list  # (q, q), lead to the columns of the equations
    roots: list  # (q, q), of the estimated ratios
    noise: float | None  # if known
    criterion: float  # at the estimates
    limits: tuple  # of iterations and gain

    def single_variances(self, k, back):
        """Columns of the data, to which `back` leads, whose variance is one of those searched."""
        shape = self.shapes[k]
        if shape is None or (shape.name != "diag" and len(shape.varies) > 1):
            return np.arange(0)
        used = back @ self.turns[k] * shape.varies != 0
        return np.flatnonzero(used.sum(axis=1) == 1)

    def lower(self, k, a, start, step, z, dof):
        """Smallest variance of column a that a likelihood ratio test with the quantile z allows."""
        if self._excess(k, a, 0.0, z)[0] <= 0:
            return 0.0
        return self._bound(k, a, start, -step, z, dof)

    def upper(self, k, a, start, step, z, dof):
        """The largest one, from the logarithm of an allowed ratio and a step on that scale."""
        return self._bound(k, a, start, step, z, dof)

    def _bound(self, k, a, start, step, z, dof):
        def excess(log_ratio):
            return self._excess(k, a, np.exp(log_ratio), z)[0]

        inside, sign = start, np.sign(step)
        for _ in range(_MOST_WIDENINGS):
            outside = inside + step
            if excess(outside) > 0:
                break
            inside, step = outside, step * _WIDER
        else:
            return 0.0 if step < 0 else np.inf  # the data do not bound it
        ends = min(inside, outside), max(inside, outside)
        end = brentq(excess, *ends, xtol=_TOLERANCE)

        # The variance is the ratio times the noise, which may be what the ratio leaves to it.
        def against(log_ratio):
            left, noise = self._excess(k, a, np.exp(log_ratio), z)
            change = _log_change(-left / dof, sign)
            return -sign * (log_ratio + np.log(noise) + change)

        if self.noise is not None:
            return self.noise * np.exp(end)
        ends = min(start, end), max(start, end)
        best = minimize_scalar(
            against, bounds=ends, method="bounded", options={"xatol": _FLAT_RATIO}
        )
        return np.exp(-sign * best.fun)

    def _excess(self, k, a, ratio, z):
        """What the best criterion at a ratio has over the allowed one, and the noise variance."""
        roots, shapes = list(self.roots), list(self.shapes)
        roots[k] = roots[k].copy()
        roots[k][a, a] = np.sqrt(ratio)
        varies = shapes[k].varies.copy()
        varies[a] = False
        shapes[k] = RatioShape("diag", varies) if varies.any() else None
        equations_at = partial(self.points.at, noise=self.noise)
        equations = search_ratios(equations_at, roots, shapes, self.turns, *self.limits).equations
        return equations.criterion - self.criterion - z**2, equations.noise


def _log_change(loss, sign):
    """Change of a log noise variance that costs a `loss` of the criterion, over its dof."""
    # Of u + exp(-u) - 1 = loss, whose other solution has the other sign.
    branch = 0 if sign > 0 else -1
    return -np.log(-lambertw(-np.exp(-1.0 - max(loss, 0.0)), branch).real)


def fitted_variances(result, parameters, backs, places, noise, points, limits):
    """FittedVariances of a SearchResult, all in the order of the equations.

    `noise` is the known variance or None, `points` give further equations or are None.
    """
    equations = result.equations
    shapes, turns = [each.shape for each in parameters], [each.turn for each in parameters]
    roots = [np.linalg.solve(turn, root) for turn, root in zip(turns, equations.roots, strict=True)]
    ratios = [root @ root.T for root in equations.roots]
    moves, edges = free_moves(roots, shapes, turns), [np.zeros(len(back)) for back in backs]
    moves = [move for move in moves if move.entry is None]  # of single variances
    for move in moves:
        if not move.lowest < 0:  # estimated as 0, where average information may be far too small
            error = np.sqrt(2 / expected_information(move, equations))
            edges[move.k] += error * np.diag(backs[move.k] @ move.direction @ backs[move.k].T)
    free = _free_directions(shapes, turns, moves)
    known = [shape is None for shape in shapes]
    given = [(k, ratios[k]) for k in np.flatnonzero(known) if ratios[k].any()]
    profile = None
    is_small = len(equations.products.outer_target) <= _MOST_PROFILED
    if points is not None and is_small and (noise is not None or not given):
        criterion = equations.criterion
        profile = RatioProfile(points, shapes, turns, roots, noise, criterion, limits)
    return FittedVariances(
        float(equations.noise),
        noise is None,
        ratios,
        backs,
        known,
        [*free, *given],
        estimation_errors(equations, free, given, noise is None),
        edges,
        profile,
        places,
    )


def _free_directions(shapes, turns, moves):
    """Directions (k, (q, q)) in which ratios may move both ways."""
    free = [(move.k, move.direction) for move in moves if move.lowest < 0]
    for k, shape in enumerate(shapes):
        if shape is not None and shape.name == "full":
            # Those of a search vanish with the root's columns; single entries do not.
            for a, b in zip(*np.tril_indices(len(turns[k])), strict=True):
                entry = np.zeros_like(turns[k])
                entry[a, b] = entry[b, a] = 1.0
                free.append((k, entry))
    return free


def estimation_errors(equations, free, given, free_noise):
    """Covariance (t + 1, t + 1) of estimates along free and given directions, and of log noise."""
    directions, n_free = [*free, *given], len(free)
    t, n_rows = len(directions), equations.n_free
    pulls = equations.pulls
    share = [np.vdot(step, pulls[k].T @ pulls[k]) / equations.noise for k, step in directions]
    information = np.zeros((t + 1, t + 1))
    if t:
        information[:t, :t] = equations.information(directions)
    if equations.profiles_noise:
        information[:t, :t] += np.multiply.outer(share, share) / n_rows
    information[t, :t] = information[:t, t] = share
    information[t, t] = n_rows
    # Given covariances are constant, so their ratios fall as the noise rises.
    moves = np.eye(t + 1)
    moves[n_free:t, t] = -1.0
    moves = np.delete(moves, np.arange(n_free, t if free_noise else t + 1), axis=1)
    information = moves.T @ information @ moves / 2
    # An exact fit has no information on the variances, and rounding may leave negative numbers.
    diagonal = np.diag(information)
    unit = np.divide(
        1.0, np.sqrt(np.abs(diagonal)), out=np.zeros_like(diagonal), where=diagonal > 0
    )
    inverse = np.linalg.pinv(information * np.multiply.outer(unit, unit), hermitian=True)
    return moves @ (inverse * np.multiply.outer(unit, unit)) @ moves.T
