"""Search for the ratios of several groupings, by damped average information."""

from itertools import compress
from typing import NamedTuple

import numpy as np
from scipy.optimize import lsq_linear

from pfl_sklearn._parallel import note_iteration

_DAMPING, _LEAST_DAMPING, _FAILED_DAMPING = 1e-4, 1e-8, 0.1  # shares of expected information
_LARGEST_GROWTH = 10.0  # factor by which a variance grows in one step, at most
_SHRINKAGE, _LEAST_ROOT = 0.9, 1e-8  # of a diagonal entry of a root in one step, and in the end
_LEAST_INFORMATION = 1e-12  # eigenvalue of information, at a unit diagonal
_ROUNDING = 1e-13  # of the criterion, per row
_MOST_DAMPING = 1e8
_FLAT = 1e-6  # nats, to first and second order, that a move of the size of a ratio or of 1 changes


class RatioShape(NamedTuple):
    """Ratios (q, q) of a grouping that are searched; columns that do not vary keep theirs."""

    name: str  # "diag", "spherical" or "full"
    varies: np.ndarray  # (q,), bool; all for "full"


class SearchResult(NamedTuple):
    """Equations at the maximum."""

    equations: object
    n_iter: int
    converged: bool


def search_ratios(equations_at, starts, shapes, turns, max_iter, tol):
    """SearchResult for roots of the ratios, from starts (q, q), each a RatioShape or None if known.

    ``equations_at(roots)`` gives the equations, for roots times `turns` (q, q) on their left, as
    shapes hold for other columns than the equations'. A diagonal ratio moves by steps of its
    variances, which end at 0; a full one by steps of its Cholesky factor, since at a
    singular maximum it has to turn as well as to shrink.
    """
    roots = list(starts)

    def turned(roots):
        return equations_at([turn @ root for turn, root in zip(turns, roots, strict=True)])

    equations, damping, n_iter = turned(roots), _DAMPING, 0
    bent = np.zeros(len(free_moves(roots, shapes, turns)))
    done = all(shape is None for shape in shapes)
    least = _ROUNDING * equations.products.n_rows
    while not done and n_iter < max_iter:
        n_iter += 1
        note_iteration()
        all_moves = free_moves(roots, shapes, turns)
        slopes = _slopes(equations, all_moves)
        # Variances of 0 that a step would lower stay there, and make it no larger.
        active = [not move.rests(slope) for move, slope in zip(all_moves, slopes, strict=True)]
        moves, slope = list(compress(all_moves, active)), slopes[active]
        if not moves:
            return SearchResult(equations, n_iter, True)
        average = equations.information([(move.k, move.direction) for move in moves])
        # Near zero average information may be far too small, and steps would go to and fro.
        average += np.diag(np.maximum(bent[active] - np.diag(average), 0.0))
        average += _root_curvature(moves, turns, equations.slopes)
        expected = np.array([expected_information(move, equations) for move in moves])
        bounds = np.array([(move.lowest, move.highest) for move in moves]).T
        held = _flat_directions(slope, average, np.array([move.size for move in moves]))
        steps = np.zeros(len(all_moves))
        while True:
            second = average + damping * np.diag(expected)
            step = steps[active] = _bounded_step(slope, second + held, bounds)
            gain = -step @ (slope + second @ step / 2)
            trial_roots = _after(roots, shapes, all_moves, steps)
            trial = _tried(turned, trial_roots)
            done = gain <= max(tol**2, least)
            # Without a criterion, steps are only as long as average information says.
            if trial is not None and not trial.criterion > equations.criterion + least:
                roots, equations = trial_roots, trial
                damping = max(damping / 10, _LEAST_DAMPING)
                bent = _secants(equations, all_moves, slopes, steps)
                break
            damping = max(damping * 10, _FAILED_DAMPING)
            if damping > _MOST_DAMPING:
                return SearchResult(equations, n_iter, done)
    return SearchResult(equations, n_iter, done)


def _tried(equations_at, roots):
    """Equations at these roots, or None where an exact fit leaves them without digits."""
    try:
        return equations_at(roots)
    except np.linalg.LinAlgError:
        return None


def _slopes(equations, moves):
    """Slopes (t,) of the criterion along moves."""
    slopes = {k: equations.slopes.of(k) for k in {move.k for move in moves}}
    return np.array([np.vdot(move.left, slopes[move.k] @ move.right) for move in moves])


def _secants(equations, moves, slope, step):
    """Curvatures (t,) along the moves whose slope a step turned round; 0 for the others."""
    change = _slopes(equations, moves) - slope
    turned = (slope + change) * slope < 0
    return np.divide(change, step, out=np.zeros_like(step), where=turned & (step != 0))


class Move(NamedTuple):
    """A direction of the ratio (q, q) of grouping k, left times right', and how far it may go."""

    k: int
    left: np.ndarray  # (q, m)
    right: np.ndarray  # (q, m)
    lowest: float
    highest: float = np.inf
    size: float = 1.0  # of a move as large as the ratio, or of 1
    entry: tuple | None = None  # of the Cholesky factor that moves, where the shape is full

    def rests(self, slope):
        """Whether a single variance is 0 and the slope of the criterion holds it there."""
        return self.entry is None and self.lowest == 0 and slope >= 0

    @property
    def direction(self):
        """The direction (q, q)."""
        return self.left @ self.right.T


def free_moves(roots, shapes, turns):
    """Moves of the ratios that a search may make from roots before their turns."""
    moves = []
    for k, (root, shape) in enumerate(zip(roots, shapes, strict=True)):
        if shape is None:
            continue
        if shape.name == "full":
            places = np.argwhere(np.tri(len(root)))
            moves += [_entry_move(k, root, turns[k], a, b) for a, b in places]
            continue
        variances = np.diag(root) ** 2
        for together in _columns_together(shape):
            columns, variance = turns[k][:, together], variances[together].max()
            moves.append(Move(k, columns, columns, -variance, size=max(variance, 1.0)))
    return moves


def _entry_move(k, root, turn, a, b):
    """Move of the entry (a, b) of a lower triangular root before its turn."""
    pair = np.column_stack([turn[:, a], turn @ root[:, b]])
    size = max(float(np.linalg.norm(root[a])), 1.0)
    farthest = np.sqrt(_LARGEST_GROWTH) * size
    lowest = -farthest
    if a == b:  # a diagonal of zero could not grow any more
        lowest = -min(_SHRINKAGE * root[a, a], max(root[a, a] - _LEAST_ROOT, 0.0))
    return Move(k, pair, pair[:, ::-1], lowest, farthest, size, (a, b))


def _root_curvature(moves, turns, slopes):
    """What the squares of steps of Cholesky factors add to the second derivatives (t, t)."""
    result = np.zeros((len(moves), len(moves)))
    for k in {move.k for move in moves if move.entry is not None}:
        values, vectors = np.linalg.eigh(turns[k].T @ slopes.of(k) @ turns[k])
        # Negative curvature would lead to a saddle point.
        slope = (vectors * np.maximum(values, 0.0)) @ vectors.T
        for s, first in enumerate(moves):
            for t, second in enumerate(moves):
                if first.k == second.k == k and first.entry[1] == second.entry[1]:
                    result[s, t] = 2 * slope[first.entry[0], second.entry[0]]
    return result


def _columns_together(shape):
    """Masks (q,) of the columns that share a variance."""
    if shape.name == "spherical":
        return [shape.varies]
    return [np.arange(len(shape.varies)) == a for a in np.flatnonzero(shape.varies)]


def expected_information(move, equations):
    """A lower bound of the expected information in a direction."""
    # That of levels with equal shares of the trace.
    product = move.right.T @ equations.slopes.traces[move.k] @ move.left
    n_levels = equations.products.n_levels[move.k]
    return max(np.vdot(product, product.T) / n_levels, np.finfo(float).tiny)


def _flat_directions(slope, second, sizes):
    """Curvature (t, t) that keeps a search where it is along flat directions.

    The likelihood is flat in the variance and covariances of a coefficient that one level alone
    informs, and rounding errors would lead anywhere.
    """
    values, vectors = np.linalg.eigh(second * sizes * sizes[:, None])
    is_flat = (np.abs(values) < _FLAT) & (np.abs(vectors.T @ (slope * sizes)) < _FLAT)
    flat = vectors[:, is_flat] / sizes[:, None]
    return flat @ flat.T


def _bounded_step(slope, second, bounds):
    """Step (t,) to the minimum of a quadratic between bounds (2, t)."""
    unit = np.sqrt(np.diag(second))
    values, vectors = np.linalg.eigh(second / unit / unit[:, None])
    roots = np.sqrt(np.maximum(values, _LEAST_INFORMATION))
    aim = -(vectors.T @ (slope / unit)) / roots
    # A bound of zero must be below the upper one, and is: some step up is free.
    step = lsq_linear(roots[:, None] * vectors.T, aim, bounds * unit, method="bvls").x
    return np.clip(step / unit, *bounds)


def _after(roots, shapes, moves, step):
    """Roots after a step."""
    result, used = [], 0
    for k, (root, shape) in enumerate(zip(roots, shapes, strict=True)):
        if shape is None:
            result.append(root)
            continue
        n = sum(move.k == k for move in moves)
        part, used = step[used : used + n], used + n
        if shape.name == "full":
            moved = root.copy()
            moved[np.tril_indices(len(root))] += part
            result.append(moved)
            continue
        variances = np.diag(root) ** 2
        aim = variances.copy()
        for together, change in zip(_columns_together(shape), part, strict=True):
            aim[together] += change
        most = _LARGEST_GROWTH * np.maximum(variances, 1.0)
        after = np.where(shape.varies, np.clip(aim, 0.0, most), variances)
        result.append(np.diag(np.sqrt(after)))
    return result
