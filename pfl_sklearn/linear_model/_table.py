"""The rows that a fit takes and the estimates that it returns, whatever the prior.

Columns are in the order of the prior: the random ones first, then the fixed ones.
"""

from typing import Any, NamedTuple

import numpy as np

from pfl_sklearn._clients import row_counts
from pfl_sklearn._float_range import check_float_range, column_bounds


class RegressionTable(NamedTuple):
    """Rows of m clients."""

    columns: np.ndarray  # (n, p), the q random columns first
    y: np.ndarray  # (n,)
    codes: np.ndarray  # (n,)
    n_clients: int
    weights: np.ndarray | None  # (n,), precision
    n_random: int
    intercept: int | None  # position of the intercept among the columns
    names: list  # names of the columns
    all_random: bool  # whether all columns were asked to vary, and not certain ones

    @property
    def random_intercept(self):
        """Whether the intercept varies."""
        return self.intercept is not None and self.intercept < self.n_random

    @property
    def sizes(self):
        """Rows (m,) of every client."""
        return row_counts(self.codes, self.n_clients)

    @property
    def varies_within(self):
        """Which columns (p,) differ between rows of some client."""
        return varies_within_clients(self.columns, self.codes, self.n_clients)

    @property
    def bounds(self):
        """Smallest and largest values (p,) of the columns."""
        return column_bounds(self.columns)


def make_table(design, features, rows):
    """Table of features (n, d); `rows` holds targets, clients and weights."""
    columns = design.matrix(features)
    # If all coefficients vary, the columns are in order, and a second copy would be in vain.
    if np.any(np.diff(design.order) != 1):
        columns = columns[:, design.order]
    return RegressionTable(
        columns,
        rows.y,
        rows.clients.codes,
        len(rows.clients.ids),
        rows.weights,
        *column_facts(design),
    )


def column_facts(design):
    """Number of random columns, position of the intercept, names, and whether all may vary."""
    intercept = int(np.argmin(design.order)) if design.fit_intercept else None
    names = [design.names[k] for k in design.order]
    return len(design.random), intercept, names, design.all_random


class Options(NamedTuple):
    """Parameters of a fit besides those of the prior."""

    method: str
    noise_variance: float | None
    solver: str
    max_iter: int
    tol: float
    learning_rate: float | None
    variance_floor: float | None
    n_jobs: int | None
    uncertainty: str = "plug_in"


class MixedModelEstimates(NamedTuple):
    """Fitted population and clients."""

    population: np.ndarray  # (p,)
    population_covariance: np.ndarray  # (p, p)
    coefficients: np.ndarray  # (m, p)
    posterior: Any  # RowPosterior or CovariancePosterior; None if the clients have a mode only
    prior: Any  # with the fitted values
    covariance: np.ndarray  # (q, q), of the random coefficients between clients
    noise: float
    log_likelihood: float
    n_iter: int
    converged: bool
    responsibilities: np.ndarray | None = None  # (m, k)
    centre: np.ndarray | None = None  # (p,), at which the covariance has its shape
    averages: Any = None  # LazyAverages over the variances; None where they count as known
    unbounded: np.ndarray | None = None  # (q,), variances that the data do not bound


def is_centred(table, prior):
    """Whether an unknown covariance has its shape ("diag", ...) for centred columns."""
    # Full covariances are the same set at every centre, and the search goes better there.
    return table.random_intercept and (prior.centered or prior.covariance_type == "full")


def varying_columns(table, prior):
    """Which random columns (q,) may differ between clients under an unknown covariance.

    Where all columns were asked to vary, a column of zeros stays common, and beside an intercept
    one that is constant within every client: nothing but the assumed shape would separate its
    slope's variance from the intercept's.
    """
    q = table.n_random
    if not (table.all_random and prior.centered and prior.covariance_type == "diag"):
        return np.ones(q, dtype=bool)
    if not table.random_intercept:
        return np.any(table.bounds, axis=0)[:q]
    varies = table.varies_within[:q]
    varies[table.intercept] = True
    return varies


def varies_within_clients(values, codes, n_clients):
    """Whether values (n, ...) differ between rows of some client; an array (...)."""
    # One row stands for its client, whichever was written last.
    representative = np.empty((n_clients, *values.shape[1:]), dtype=values.dtype)
    representative[codes] = values
    return np.any(representative[codes] != values, axis=0)


def centred(table, known_mean, random_too=False):
    """The rotated table that is moved, and the offset and centre that undo it.

    We subtract a known mean of the random part from the targets. A free intercept of the population
    absorbs the mean of what is left of the targets, and the means of the fixed columns. With
    `random_too` the random columns are centred, too; their intercept, which varies, absorbs that.

    Returns
    -------
    table : RotatedTable
    offset : ndarray of shape (p,)
        Added to the population afterwards.
    centre : ndarray of shape (p,)
        Subtracted from the columns.
    """
    q, offset, centre = table.n_random, np.zeros(table.n_columns), np.zeros(table.n_columns)
    if known_mean is not None:
        offset[:q] = known_mean
    if table.intercept is not None:
        means = table.means()[0]
        # A fixed intercept is free also beside a known mean, which is that of the random part.
        if known_mean is None or table.intercept >= q:
            offset[table.intercept] = means[-1] - means[:-1] @ offset
            centre[q:] = means[q:-1]
        if random_too:
            centre[:q] = means[:q]
        centre[table.intercept] = 0.0  # it absorbs the means, so it must stay
    return table._replace(offset=offset, centre=centre), offset, centre


def uncentred(vectors, intercept, centre):
    """Coefficients (..., p) of the original columns, from those of the centred columns."""
    if centre.any():
        vectors = vectors.copy()
        vectors[..., intercept] -= vectors @ centre
    return vectors


def check_table_range(X, y, weights):
    """Raise ValueError if values are too large or too small to be squared.

    A fit with privacy must not call this: the error would reveal a client's values.
    """
    # Squares are weighted, so a heavy row leaves less room.
    heaviest = 1.0 if weights is None else max(weights.max(), 1.0)
    for name, values in (("X", X), ("y", y)):
        check_float_range(name, values, heaviest)


def check_covariance_identified(table, prior):
    """Raise ValueError if the columns do not identify the entries of an unknown covariance."""
    m, q = table.n_clients, table.n_random
    # All columns inform on one variance.
    if prior.covariance_type == "spherical":
        return
    if prior.covariance_type == "full" and m < q:
        raise ValueError(
            f"covariance_type='full' needs at least as many clients as random coefficients; got "
            f"{m} clients and {q} coefficients. Use 'diag' or 'spherical', or fewer in random."
        )
    lowest, highest = (bound[:q] for bound in table.bounds)
    for k in np.flatnonzero((lowest == highest) & varying_columns(table, prior)):
        # Without a random intercept a constant column stands in for it, unless it is 0.
        if k == table.intercept or (not table.random_intercept and lowest[k] != 0):
            continue
        raise ValueError(
            f"the column {table.names[k]!r} is constant over all rows, so the data cannot separate "
            "its coefficient's variance from the intercept's; leave it out of random or of X."
        )


def point_estimates(population, coefficients, prior, covariance, noise, n_iter, done, shares=None):
    """Estimates without a posterior."""
    unknown = np.full((len(population), len(population)), np.nan)
    return MixedModelEstimates(
        population,
        unknown,
        coefficients,
        None,
        prior,
        covariance,
        float(noise),
        np.nan,
        n_iter,
        done,
        shares,
    )
