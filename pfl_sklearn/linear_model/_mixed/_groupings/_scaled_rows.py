"""Rows of a fit with several groupings, with columns that are centred and of unit size."""

from typing import Any, NamedTuple

import numpy as np

from pfl_sklearn.linear_model._mixed._groupings._posterior import Frame, Layout
from pfl_sklearn.linear_model._mixed._groupings._products import Grouping
from pfl_sklearn.linear_model._mixed._groupings._search import RatioShape
from pfl_sklearn.linear_model._mixed._groupings._variances import is_fold, make_parameters
from pfl_sklearn.linear_model._mixed._identifiability import varying_columns
from pfl_sklearn.linear_model._mixed._posterior import ColumnScaling

MOST_DENSE = 4000  # outer columns, whose dense factor takes 128 MB
# Of linear models in folds: beyond, conjugate gradients take less time and predict the same.
_MOST_DENSE_IN_FOLDS = 1000
_MOST_CELLS = 1 << 25  # of dense rows of the first grouping's effects: 256 MB
_DEPENDENT = 1e-9  # length of what a column adds to those before it, over its own length
# The same beside columns that come in single precision, over their length before centring, and at
# most over that after it: of their sums rounding errors remain, which would have huge coefficients.
_ROUNDED, _MOST_ROUNDED = 3e-7, 1e-4
_NO_DIGITS = 1e-13  # share of the largest eigenvalue; sums of products are exact to about that
_SHARED = 0.5  # of the largest weight in a dependence: a column that the others give exactly enough
_SPARSE_SHARE = 0.5  # of zeros, from which on a column stays sparse, and roots centre it


class GroupingColumn(NamedTuple):
    """A column of X that groups rows, read in a fit."""

    name: Any
    levels: np.ndarray  # (L,), sorted
    codes: np.ndarray  # (n,), -1 for missing values
    positions: np.ndarray  # (q,), of the columns whose coefficients vary by level
    prior: Any  # GroupingPrior


class GroupedRows(NamedTuple):
    """Rows of a fit, with columns in the order of the table."""

    columns: np.ndarray  # (n, p)
    target: np.ndarray  # (n,)
    weights: Any  # (n,) or None
    codes: np.ndarray  # (n,), of clients
    groupings: list  # GroupingColumn


class ScaledRows(NamedTuple):
    """Groupings and columns of scaled rows, and the way back to the data's columns."""

    groupings: list  # Grouping, in the order of the equations
    columns: np.ndarray  # (n, f), of the population
    is_dense: bool
    parameters: list  # Parameters of every grouping, in the order of the equations
    layout: Layout
    centre: np.ndarray  # (p,), means of the columns next to a free intercept, otherwise 0
    free: np.ndarray  # (f,), columns with coefficients of the population that are estimated
    scale: np.ndarray  # (f,), factors of these columns

    @property
    def backs(self):
        """Matrices (q, q) to the data's columns, in the order of the equations."""
        return [self.layout.frames[k].back for k in np.argsort(self.layout.back)]


def scale_rows(table, prior, covariance, rows, keep_dependent=False, by_size=False):
    """ScaledRows of GroupedRows; `covariance` (q, q) of the clients is None if it is unknown.

    Columns of the population that depend on others are left out, unless they are to be kept. The
    first grouping, which is eliminated, is that of the clients, or with `by_size` the largest.
    """
    first = 0 if prior.mean is None else table.n_random
    scale, centre = _scale_and_centre(table, first)
    frames, parameters = _frames(table, prior, covariance, rows, scale, centre)
    p = rows.columns.shape[1]
    candidates = np.arange(first, p)
    frame = _frame(candidates, scale, centre, table.intercept, True)
    columns = frame.columns(rows.columns)
    if keep_dependent:  # but for constant columns beside an intercept
        kept = np.flatnonzero(columns.any(axis=0))
    else:
        kept = _independent(columns, rows.columns[:, candidates], rows.weights)
    population = np.zeros((p, len(kept)))
    population[candidates] = frame.back @ _spread_over(columns, kept, rows.weights)
    codes = [rows.codes, *(each.codes for each in rows.groupings)]
    sizes = [table.n_clients, *(len(each.levels) for each in rows.groupings)]
    groupings = [
        Grouping(code, frame.columns(rows.columns), size)
        for code, frame, size in zip(codes, frames, sizes, strict=True)
    ]
    # Large groupings come first; names decide where numbers are equal, so that draws do not depend
    # on the order in which groupings are given.
    names = ["", *(str(each.name) for each in rows.groupings)]
    order = sorted(range(len(names)), key=lambda k: (-groupings[k].n_effects, names[k]))
    if not by_size:
        order.sort(key=lambda k: k > 0)
    n_outer = sum(groupings[k].n_effects for k in order[1:]) + len(kept)
    # Leverages behind a link take a dense row for every effect of the first grouping.
    is_narrow = not by_size or n_outer * groupings[order[0]].n_effects <= _MOST_CELLS
    most = _MOST_DENSE_IN_FOLDS if is_fold() and not by_size else MOST_DENSE
    return ScaledRows(
        [groupings[k] for k in order],
        columns[:, kept],
        n_outer <= most and is_narrow,
        [parameters[k] for k in order],
        Layout(np.argsort(order), frames, Frame(np.arange(p), population)),
        centre,
        candidates[kept],
        scale[candidates[kept]],
    )


def _frames(table, prior, covariance, rows, scale, centre):
    """Frame and Parameters of every grouping, clients first."""
    q = table.n_random
    kinds = [(np.arange(q), prior, varying_columns(table, prior))]
    kinds += [(g.positions, g.prior, np.ones(len(g.positions), bool)) for g in rows.groupings]
    known = [covariance]
    known += [each.prior.known_covariance(len(each.positions)) for each in rows.groupings]
    # Shapes hold for centred columns; sparse ones stay as they are, and roots turn to these.
    is_sparse = np.mean(rows.columns == 0, axis=0) > _SPARSE_SHARE
    frames, parameters = [], []
    for (at, each, varies), covariance in zip(kinds, known, strict=True):
        shaped = _frame(at, scale, centre, table.intercept, each.centered)
        frame = _frame(at, scale, centre * ~is_sparse, table.intercept, each.centered)
        turn = np.linalg.solve(frame.back, shaped.back)
        shape = RatioShape(each.covariance_type or "diag", varies)
        frames.append(frame)
        parameters.append(make_parameters(shape, covariance, shaped.back, turn))
    return frames, parameters


def _scale_and_centre(table, first):
    """Factors (p,) that bring the columns to unit size, and the means (p,) that go before."""
    means, weight = table.means()
    centre = means[:-1].copy()
    if table.intercept is None or table.intercept < first:
        centre[:] = 0.0
    else:
        centre[table.intercept] = 0.0
    squares = np.diag(table.squares_about(np.append(centre, 0.0)))[:-1] / weight
    return np.where(squares > 0, squares, 1.0) ** -0.5, centre


def _frame(positions, scale, centre, intercept, centered):
    """Frame of columns, centred if they have the intercept among them."""
    scale = scale[positions]
    at = np.flatnonzero(positions == (-1 if intercept is None else intercept))
    centre = centre[positions] if centered and len(at) else np.zeros(len(positions))
    return Frame(positions, ColumnScaling(scale, centre, at[0] if len(at) else None).back)


def _spread_over(columns, kept, weights):
    """Matrix (p, f) from coefficients of the columns that are kept to the shortest of all columns.

    Both have the same predictors in the rows of the fit; rows elsewhere get no extreme ones.
    """
    p = columns.shape[1]
    if len(kept) == p:
        return np.eye(p)
    if weights is not None:
        columns = columns * np.sqrt(weights)[:, None]
    combined = np.zeros((len(kept), p))
    combined[:, kept] = np.eye(len(kept))
    others = np.setdiff1d(np.arange(p), kept)
    combined[:, others] = np.linalg.lstsq(columns[:, kept], columns[:, others])[0]
    return np.linalg.pinv(combined)


def _independent(columns, raw, weights):
    """Positions of the columns (n, p) that do not depend linearly on those before them.

    `raw` (n, p) are the same before they were centred and scaled.
    """
    least = _smallest_addition(raw)
    if weights is not None:
        columns = columns * np.sqrt(weights)[:, None]
    lengths = np.linalg.norm(columns, axis=0)
    triangle: Any = np.linalg.qr(columns / np.where(lengths > 0, lengths, 1.0), mode="r")
    left = np.zeros(len(lengths))
    left[: len(triangle)] = np.abs(np.diag(triangle))
    kept = np.flatnonzero(left > least)
    # Several columns may leave a direction of rounding errors that each of them adds enough to, as
    # a total and amounts in cents: their products, which the fit rests on, have no digits for it.
    products = triangle.T @ triangle
    while len(kept):
        values, vectors = np.linalg.eigh(products[np.ix_(kept, kept)])
        if values[0] > _NO_DIGITS * values[-1]:
            break
        weights = np.abs(vectors[:, 0])
        kept = np.delete(kept, np.flatnonzero(weights > _SHARED * weights.max())[-1])
    return kept


def _smallest_addition(raw):
    """Length that a column (n, p) adds at least to those before it, over its own length."""
    with np.errstate(over="ignore"):  # beyond single precision
        is_single = raw == raw.astype(np.float32)
    is_fraction = raw != np.round(raw)
    # Values that were filled in may be of double precision; whole numbers are exact in both.
    single = 2 * np.sum(is_single & is_fraction, axis=0) > np.sum(is_fraction, axis=0)
    spread, size = np.std(raw, axis=0), np.sqrt(np.mean(raw**2, axis=0))
    shares = np.divide(_ROUNDED * size, spread, out=np.zeros_like(spread), where=spread > 0)
    return float(np.clip(np.max(shares, where=single, initial=0.0), _DEPENDENT, _MOST_ROUNDED))
