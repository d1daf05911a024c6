"""Rows of a fit with several groupings, with columns that are centred and of unit size."""

from typing import Any, NamedTuple

import numpy as np

from pfl_sklearn.linear_model._mixed._groupings._posterior import Frame, Layout
from pfl_sklearn.linear_model._mixed._groupings._products import Grouping, Products, products_of
from pfl_sklearn.linear_model._mixed._groupings._search import RatioShape
from pfl_sklearn.linear_model._mixed._groupings._variances import make_parameters
from pfl_sklearn.linear_model._mixed._identifiability import (
    check_covariance_identified,
    check_noise_identified,
    varying_columns,
)
from pfl_sklearn.linear_model._mixed._posterior import ColumnScaling

MOST_DENSE = 4000  # outer columns, whose dense factor takes 128 MB
_DEPENDENT = 1e-9  # length of what a column adds to those before it, over its own length
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
    """The products of scaled rows, and the way back to the data's columns."""

    products: Products
    is_dense: bool
    parameters: list  # Parameters of every grouping, in the order of the equations
    layout: Layout
    offset: np.ndarray  # (p,), coefficients that were subtracted before
    centre: np.ndarray  # (p,), means of the columns next to a free intercept, otherwise 0
    free: np.ndarray  # (f,), columns with coefficients of the population that are estimated
    scale: np.ndarray  # (f,), factors of these columns

    @property
    def backs(self):
        """Matrices (q, q) to the data's columns, in the order of the equations."""
        return [self.layout.frames[k].back for k in np.argsort(self.layout.back)]


def scale_rows(table, prior, noise, rows):
    """ScaledRows of GroupedRows; `noise` is the noise variance if it is known."""
    q, mean = table.n_random, prior.known_mean(table.n_random)
    first = 0 if mean is None else q
    scale, centre = _scale_and_centre(table, first)
    offset = _offset(table, mean, first)
    frames, parameters = _frames(table, prior, noise, rows, scale, centre)
    candidates = np.arange(first, table.n_columns)
    frame = _frame(candidates, scale, centre, table.intercept, True)
    columns = frame.columns(rows.columns)
    kept = _independent(columns, rows.weights)
    population = np.zeros((table.n_columns, len(kept)))
    population[candidates] = frame.back[:, kept]
    codes = [rows.codes, *(each.codes for each in rows.groupings)]
    sizes = [table.n_clients, *(len(each.levels) for each in rows.groupings)]
    groupings = [
        Grouping(code, frame.columns(rows.columns), size)
        for code, frame, size in zip(codes, frames, sizes, strict=True)
    ]
    # Clients are eliminated, large groupings follow; names decide where numbers are equal, so that
    # draws do not depend on the order in which groupings are given.
    names = ["", *(str(each.name) for each in rows.groupings)]
    later = sorted(range(1, len(names)), key=lambda k: (-groupings[k].n_effects, names[k]))
    order = np.array([0, *later])
    dense = sum(each.n_effects for each in groupings[1:]) + len(kept) <= MOST_DENSE
    ordered = [groupings[k] for k in order]
    target = rows.target - rows.columns @ offset
    return ScaledRows(
        products_of(ordered, columns[:, kept], target, rows.weights, dense),
        dense,
        [parameters[k] for k in order],
        Layout(np.argsort(order), frames, Frame(np.arange(table.n_columns), population)),
        offset,
        centre,
        candidates[kept],
        scale[candidates[kept]],
    )


def _offset(table, mean, first):
    """Coefficients (p,) that are known, and an intercept that leaves targets of mean 0."""
    offset = np.zeros(table.n_columns)
    if mean is not None:
        offset[:first] = mean
    if table.intercept is not None and table.intercept >= first:
        means = table.means()[0]
        offset[table.intercept] = means[-1] - means[:-1] @ offset
    return offset


def _frames(table, prior, noise, rows, scale, centre):
    """Frame and Parameters of every grouping, clients first."""
    q = table.n_random
    kinds = [(np.arange(q), prior, varying_columns(table, prior))]
    kinds += [(g.positions, g.prior, np.ones(len(g.positions), bool)) for g in rows.groupings]
    known = [_client_covariance(table, prior, noise)]
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


def _client_covariance(table, prior, noise):
    """Covariance (q, q) of the clients' coefficients if it is known or zero, otherwise None."""
    q = table.n_random
    covariance = prior.known_covariance(q)
    if covariance is not None:
        return covariance
    if table.n_clients == 1:  # its deviation from the population is part of the population
        return np.zeros((q, q))
    check_noise_identified(table, noise, ", or a prior with a known covariance")
    check_covariance_identified(table, prior)
    # Columns that are constant within clients do not vary between them.
    return None if varying_columns(table, prior).any() else np.zeros((q, q))


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


def _independent(columns, weights):
    """Positions of the columns (n, p) that do not depend linearly on those before them."""
    if weights is not None:
        columns = columns * np.sqrt(weights)[:, None]
    lengths = np.linalg.norm(columns, axis=0)
    triangle = np.linalg.qr(columns / np.where(lengths > 0, lengths, 1.0), mode="r")
    left = np.zeros(len(lengths))
    left[: len(triangle)] = np.abs(np.diag(triangle))
    return np.flatnonzero(left > _DEPENDENT)
