"""Which combinations of the population's coefficients the rows of a fit determine.

Columns may be combinations of others in all rows: a full set of indicators with an intercept, a
column and twice that column, a column of zeros. Then x' beta is estimable only for rows x of the
same kind, which lie in the row space of the design. Other rows get a prediction, but no error.
"""

from functools import partial
from typing import NamedTuple

import numpy as np

from pfl_sklearn._warnings import format_names, warn_caller
from pfl_sklearn.linear_model._algebra import near_combinations, row_slices

# How far a row may be off a relation, in root mean squares of the columns: R's predict.lm has the
# same. Rows of a fit whose relation is not exact may be off by as much as these are.
_OFF_RELATION, _OFF_INEXACT = 1e-6, 10.0
_CONSTANT = 1e-3  # scale of a constant column over its value: a change of 1e-9 is no rounding error
_ZERO_COLUMN_SCALE = 1e-150  # scale of a column of zeros: no other value is one
_GOOD_PIVOT = 0.3  # share of the largest entry; later columns are expressed by earlier ones
_LEAST_SHARE = 1e-6  # coefficient, at columns of like length, that a text leaves out
_INEXACT = 1e-10  # root mean square of a relation that is more than rounding errors
_CHECKED_CELLS = 1 << 20  # numbers of rows that are checked at a time
_MOST_TERMS, _MOST_RELATIONS = 6, 3  # in a warning, which should fit on a screen


class NotEstimableWarning(UserWarning):
    """The data do not determine coefficients, or predictions.

    Columns are linear combinations of others in all rows of a fit, and rows to predict may break
    that.
    """


class RowSpace(NamedTuple):
    """Row space of a design, by the r linear relations that hold in all rows.

    With a free intercept columns are centred. They are divided by `scale`, so that neither units
    nor origins matter.
    """

    columns: np.ndarray  # (k,), positions of the columns that take part
    names: list  # (k,), theirs
    centre: np.ndarray  # (k,)
    scale: np.ndarray  # (k,)
    relations: np.ndarray  # (k, r), of length 1: products with rows of the fit are 0
    pivots: np.ndarray  # (r,), the column that a relation expresses by the others
    errors: np.ndarray  # (r,), root mean squares of the products
    intercept: int | None  # position of a free intercept, which absorbs the centre

    def violated(self, x):
        """Which relations (n, r) rows x (n, p) of the design break."""
        result = np.empty((len(x), len(self.errors)), dtype=bool)
        for part in row_slices(len(x), len(self.columns), _CHECKED_CELLS):
            rows = x[part]
            ones = 0.0 if self.intercept is None else rows[:, [self.intercept]]
            # Huge values may overflow; a row that is not known to lie inside does not.
            with np.errstate(over="ignore", invalid="ignore"):
                scaled = (rows[:, self.columns] - ones * self.centre) / self.scale
                off = np.abs(scaled @ self.relations)
                size = np.abs(scaled) @ np.abs(self.relations)
                allowed = _OFF_RELATION * np.maximum(size, 1.0) + _OFF_INEXACT * self.errors
                result[part] = ~(off <= allowed)
        return result

    def unidentified_coefficients(self, p):
        """Which of p coefficients (p,) are not estimable."""
        # A coefficient in units of its column, or a small one would count as rounding.
        units = np.ones(p)
        units[self.columns] = self.scale
        return self.violated(np.diag(units)).any(axis=1)

    def reordered(self, order):
        """The same where column k of the table is column ``order[k]`` of the design."""
        intercept = None if self.intercept is None else int(order[self.intercept])
        return self._replace(columns=order[self.columns], intercept=intercept)

    def texts(self, relations):
        """Text of the relations at these positions."""
        texts = [self._text(k) for k in relations[:_MOST_RELATIONS]]
        more = len(relations) - len(texts)
        return ", ".join(texts) + (f", and {more} more of the kind" if more else "")

    def _text(self, k):
        """Text of a relation: 'b' is 1 - 'a'."""
        pivot, relation = self.pivots[k], self.relations[:, k]
        shares = -relation / relation[pivot]
        shares[pivot] = 0.0
        used = np.flatnonzero(np.abs(shares) > _LEAST_SHARE)
        end = f" up to a relative {self.errors[k]:.0e}" if self.errors[k] > _INEXACT else ""
        if len(used) > _MOST_TERMS:
            names = format_names(self.names[j] for j in used)
            return f"{self.names[pivot]!r} is a combination of {names}{end}"
        factors = shares[used] * self.scale[pivot] / self.scale[used]
        parts = factors * self.centre[used]
        constant = self.centre[pivot] - parts.sum()
        terms = list(zip(factors, [f"{self.names[j]!r}" for j in used], strict=True))
        # Less than that is left of a difference of means by rounding, or by rows that are off.
        rounding = 1e-9 * (abs(self.centre[pivot]) + np.abs(parts).sum())
        inexact = self.errors[k] * self.scale[pivot] / abs(relation[pivot])
        if abs(constant) > rounding + inexact or not terms:
            terms.insert(0, (constant, ""))
        return f"{self.names[pivot]!r} is {_format_sum(terms)}{end}"


def space_of_left_out(table, free, first):
    """RowSpace by which a fit left out the columns that are not `free`; None if it kept all.

    `first` is the first column with a free population coefficient.
    """
    columns = np.arange(first, len(table.names))
    left_out = np.setdiff1d(columns, free)
    return find_row_space(table, columns, first, left_out) if len(left_out) else None


def find_row_space(table, at, first, left_out=None):
    """RowSpace of a table among its columns `at`; None if they are linearly independent.

    `first` is the first column with a free population coefficient. The relations are those that
    hold up to rounding or, given columns that a fit left out, those of these with all others.
    """
    means, weight = table.means()
    centre, intercept = np.zeros(len(table.names)), table.intercept
    if intercept is not None and intercept < first:  # it is known
        intercept = None
    if intercept is not None:  # a mean far from 0 would make any two columns look alike
        centre, at = means[:-1], at[at != intercept]
    if not len(at):
        return None
    centre = centre[at]
    normal = sum(rows.T @ rows for rows in table.centred_columns(at, centre))
    if left_out is None:
        find = _nearly_dependent
    else:
        rows = np.vstack(list(table.centred_columns(at, centre)))
        find = partial(_expressed_by_others, rows, np.isin(at, left_out))
    relations, scale, pivots = _relations(normal / weight, centre, find)
    if not len(pivots):
        return None
    errors = sum(
        np.sum((rows @ (relations / scale[:, None])) ** 2, axis=0)
        for rows in table.centred_columns(at, centre)
    )
    involved = np.abs(relations).max(axis=1) > 0
    return RowSpace(
        at[involved],
        [table.names[k] for k in at[involved]],
        centre[involved],
        scale[involved],
        relations[involved],
        (np.cumsum(involved) - 1)[pivots],
        np.sqrt(errors / weight),
        intercept,
    )


def warn_unidentified(space, names):
    """Warn of coefficients that the rows of a fit do not determine, and say why."""
    # A column of zeros blurs no other coefficient. Models without features have one, and so have
    # folds without a rare level.
    if space is None or (space.scale[space.pivots] == _ZERO_COLUMN_SCALE).all():
        return
    is_open = space.unidentified_coefficients(len(names))
    warn_caller(
        "The standard errors of the coefficients of "
        f"{format_names(names[k] for k in np.flatnonzero(is_open))} are NaN, because in all rows "
        f"{space.texts(np.arange(len(space.errors)))}: the data cannot tell these coefficients "
        "apart, and only predictions for rows of that kind have errors. For errors of coefficients "
        "leave one of the columns out: indicators by OneHotEncoder(drop='first') or TableEncoder.",
        NotEstimableWarning,
    )


def warn_rows_outside(space, x):
    """Warn of rows x (n, p) of a design whose predictions the data do not determine."""
    violated = space.violated(x)
    n_rows = int(violated.any(axis=1).sum())
    if n_rows:
        warn_caller(
            f"{n_rows} of {len(x)} rows break what held in all rows of fit "
            f"({space.texts(np.flatnonzero(violated.any(axis=0)))}), so the data do not determine "
            "their predictions, whose standard errors are NaN.",
            NotEstimableWarning,
        )


def _relations(squares, centre, find):
    """Relations (k, r) at scaled columns, the scale (k,) and pivots (r,), from mean squares.

    ``find(squares, live)`` has those among the columns that are not constant.
    """
    alive = np.diag(squares) > 0
    scale = np.sqrt(np.where(alive, np.diag(squares), 1.0))
    scale[~alive] = np.maximum(_CONSTANT * np.abs(centre[~alive]), _ZERO_COLUMN_SCALE)
    live, dead = np.flatnonzero(alive), np.flatnonzero(~alive)
    vectors, at = find(squares, live)
    relations = np.zeros((len(scale), len(at) + len(dead)))
    relations[live, : len(at)] = vectors.T
    relations[dead, len(at) + np.arange(len(dead))] = 1.0  # each by itself
    pivots = np.concatenate([live[at], dead])
    order = np.argsort(pivots)
    return relations[:, order], scale, pivots[order]


def _nearly_dependent(squares, live):
    return _echelon(near_combinations(squares[np.ix_(live, live)]).T)


def _expressed_by_others(rows, left_out, squares, live):
    """Vectors (r, k) that express columns that were left out by the others, and their pivots."""
    is_out = left_out[live]
    scaled = rows[:, live] / np.sqrt(np.diag(squares)[live])
    vectors = np.zeros((is_out.sum(), len(live)))
    vectors[:, is_out] = np.eye(len(vectors))
    vectors[:, ~is_out] = -np.linalg.lstsq(scaled[:, ~is_out], scaled[:, is_out])[0].T
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True), np.flatnonzero(is_out)


def _echelon(vectors):
    """The same space by vectors (r, k) of length 1, each with a pivot (r,) that no other has."""
    remaining, pivots = vectors, []
    for _ in vectors:
        size = np.abs(remaining).max(axis=0)
        column = int(np.flatnonzero(size >= _GOOD_PIVOT * size.max())[-1])
        row = remaining[np.abs(remaining[:, column]).argmax()]
        remaining = remaining - np.multiply.outer(remaining[:, column] / row[column], row)
        pivots.append(column)
    rows = np.linalg.solve(vectors[:, pivots], vectors)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True), np.array(pivots, dtype=np.intp)


def _format_sum(terms):
    """Text of a sum of terms (factor, name): 1 - 2 'a' + 'b'."""
    text = ""
    for factor, name in terms:
        number = f"{abs(factor):.3g}"
        if name:
            number = name if number == "1" else f"{number} {name}"
        sign = "-" if factor < 0 else "+"
        text += f" {sign} {number}" if text else ("-" if factor < 0 else "") + number
    return text
