"""Designs with an intercept, the coordinates that they are in, and predictors of their rows."""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import csr_array, hstack

from pfl_sklearn._rounds.rows import is_sparse
from pfl_sklearn._rounds.stored import StoredRows, blocks_of
from pfl_sklearn._typing import Floats, Integers
from pfl_sklearn.linear_model._algebra import client_predictors
from pfl_sklearn.linear_model._ppsgd._sparse import LocalModels

_SMALLEST_FEATURE = 1e-304  # per target: coefficients of 1e304 leave room for steps
_CONSTANT_COLUMN = 1e-12  # of its mean: a smaller spread is rounding, and its inverse is noise


class Coordinates(NamedTuple):
    """Features in which steps are taken: x becomes (x - center) / scale; both (p,)."""

    center: Floats
    scale: Floats

    def of(self, design: Any) -> Any:
        """Rows (n, p), dense, CSR or stored, in these coordinates."""
        if isinstance(design, StoredRows):
            return design.changed(self.of)
        if is_sparse(design):  # the centre is 0: rows less a centre would be dense
            return csr_array(design.multiply(1 / self.scale))
        return (design - self.center) / self.scale

    def back(self, values: Any) -> Any:
        """Models (..., p, c), or LocalModels, of the features as given; the intercept is last."""
        if isinstance(values, LocalModels):  # sparse features are never centred
            scale = self.scale[values.pairs.features, None]
            return values._replace(values=values.values / scale)
        coef = values / self.scale[:, None]
        if self.center.any():
            coef[..., -1, :] -= np.einsum("...pc,p->...c", coef, self.center)
        return coef


def coordinates_in(server: dict[str, Floats]) -> Coordinates | None:
    """Coordinates that a server's state keeps; None if steps are taken in the features as given."""
    return Coordinates(server["center"], server["scale"]) if "center" in server else None


def standard_coordinates(design: Any, fit_intercept: bool, target: float = 1.0) -> Coordinates:
    """Features of rows (n, p) less their means, over the fourth root of their mean fourth power.

    That is 1.3 standard deviations of normal features, but three of an indicator that is 1 in one
    of a hundred rows: clients would overfit what they hardly see if it were in units of its
    standard deviation. Sparse rows are not centred, nor are any without an intercept. It looks at
    the data.

    Raises
    ------
    ValueError
        If features are so small that coefficients, for targets of size `target`, overflow.
    """
    center = np.zeros(design.shape[1])
    if is_sparse(design):
        design = csr_array(design, copy=True)  # the arrays may be the caller's
        design.sum_duplicates()
        size = np.asarray(abs(design).max(axis=0).todense()).ravel()
        size = np.where(size > 0, size, 1.0)
        # Divided, since one over the size may be infinite.
        shares = design.data / size[design.indices]
        powers = np.bincount(design.indices, shares**4, design.shape[1])
    else:
        if fit_intercept:  # it takes up what the centre moves; without one, it would be lost
            sums = sum(rows[:, :-1].sum(axis=0) for _, rows in blocks_of(design))
            center[:-1] = sums / len(design)
        sizes = [np.abs(rows - center).max(axis=0) for _, rows in blocks_of(design)]
        size = np.max(sizes, axis=0)
        size = np.where(size > 0, size, 1.0)  # before fourth powers, which overflow beyond 1e77
        powers = np.zeros(design.shape[1])
        for _, rows in blocks_of(design):
            squares = ((rows - center) / size) ** 2
            powers += np.einsum("np,np->p", squares, squares)
    scale = size * (powers / design.shape[0]) ** 0.25
    constant = scale <= _CONSTANT_COLUMN * np.abs(center)
    tiny = ~constant & (scale < target * _SMALLEST_FEATURE)
    if tiny.any():
        raise ValueError(
            f"X has a column of size {scale[tiny][0]:.1e} and the target is of size {target:.1e}, "
            "so that coefficients are too large for floats; rescale X."
        )
    return Coordinates(center, np.where(constant, 1.0, scale))


def with_intercept(features: Any, fit_intercept: bool) -> Any:
    """Columns of the design: the features, and ones last."""
    if not fit_intercept:
        return features
    if isinstance(features, StoredRows):
        return features.changed(partial(with_intercept, fit_intercept=True))
    if is_sparse(features):
        ones: Any = np.ones((features.shape[0], 1))
        return hstack([features, ones], format="csr")
    return np.concatenate([features, np.ones((len(features), 1))], axis=1)


def predictors_of(design: Any, codes: Integers, population: Floats, local: Any) -> Floats:
    """Predictors (n, c) of rows (n, p) of clients; of the population where codes are -1.

    `local` are models (m, p, c) or :class:`LocalModels`, or None if no client is known.
    """
    parts = [
        _predictors_of(rows, codes[part], population, local) for part, rows in blocks_of(design)
    ]
    return np.concatenate(parts)


def _predictors_of(design, codes, population, local):
    """The same for rows that are not stored."""
    predictors = design @ population
    if local is None:
        return predictors
    if isinstance(local, LocalModels):
        rows = np.flatnonzero(codes >= 0)  # of clients that fit saw
        predictors[rows] += local.predictors(csr_array(design[rows]), codes[rows])
        return predictors
    unseen = np.zeros(population.shape[::-1])  # a client that fit did not see adds nothing
    coef = local.swapaxes(-1, -2)
    return predictors + client_predictors(design, codes, coef, None, unseen, unseen[:, 0])
