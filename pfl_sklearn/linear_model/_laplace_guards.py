"""What can go wrong with clients' logistic regressions, and what holds it.

Covariances that the data cannot tell, coefficients that they cannot tell, maxima that are not
finite, and columns far from zero.
"""

import numpy as np

_WEAK_SD = 2.5  # of the prior on separated slopes, in logits per standard deviation of a column
_TIGHT_SD = 1.0  # of the prior on a factor that ran away, in logits per size of a column
AWAY = 10.0  # logits; standard deviation of predictors between clients that is looked into
HELD = 1 / 3  # share of it, left under the tight prior, up to which the data did not tell it
_RANK = 1e-11  # share of the largest eigenvalue of scaled information that counts as nothing
_OUTSIDE = 1e-5  # share of a combination outside the row space, above which it is not estimable


def check_identified(table, covariance_type):
    """Raise ValueError if the data cannot tell the covariance between clients."""
    m, q = table.n_clients, table.n_random
    if len(table.y) == m:
        raise ValueError(
            f"every one of the {m} clients has one row, so the variance between clients cannot be "
            "told from chance; give a prior with a known covariance."
        )
    if covariance_type == "spherical":
        return
    if covariance_type == "full" and m < q:
        raise ValueError(
            f"covariance_type='full' needs at least as many clients as random coefficients; got "
            f"{m} clients and {q} coefficients. Use 'diag' or 'spherical', or fewer in random."
        )
    constant = np.ptp(table.columns[:, :q], axis=0) == 0
    has_intercept = table.intercept is not None and table.intercept < q
    for k in np.flatnonzero(constant):
        if k == table.intercept or (not has_intercept and table.columns[0, k] != 0):
            continue
        raise ValueError(
            f"the column {table.names[k]!r} is constant over all rows, so its coefficient cannot "
            "vary by client beside the intercept's; leave it out of random or of X."
        )


def is_unmixed(table):
    """Whether no client has rows of two classes."""
    some = np.empty(table.n_clients, dtype=table.y.dtype)
    some[table.codes] = table.y
    return bool(np.all(some[table.codes] == table.y))


def weak_slopes(columns, weights, intercept):
    """Precision (f,) of the prior that keeps separated slopes finite; none on the intercept."""
    mean = np.average(columns, axis=0, weights=weights)
    square = np.average(columns**2, axis=0, weights=weights)
    spread = np.average((columns - mean) ** 2, axis=0, weights=weights)
    unit = np.where(spread > 1e-12 * square, spread, square)
    precision = unit / _WEAK_SD**2
    if intercept is not None:
        precision[intercept] = 0.0
    return precision


def weak_spread(random, weights, tight=False):
    """Precision (q,) of the prior that keeps the differences between clients finite."""
    sd = _TIGHT_SD if tight else _WEAK_SD
    return np.average(random**2, axis=0, weights=weights) / sd**2


def predictor_spread(random, weights, factor):
    """Standard deviation between clients of the predictors of random columns (n, q).

    That is the root mean square over the rows, under a factor (q, r).
    """
    weighted = random if weights is None else weights[:, None] * random
    total = len(random) if weights is None else weights.sum()
    moments = weighted.T @ random / total
    return float(np.sqrt(np.vdot(factor, moments @ factor)))


def centred_columns(table, first):
    """The table with the columns from `first` on around their means, and the means (p,).

    It needs a free intercept, which takes them up.
    """
    columns = table.columns
    centre = np.zeros(columns.shape[1])
    centre[first:] = np.average(columns[:, first:], axis=0, weights=table.weights)
    same = np.ptp(columns[:, first:], axis=0) == 0
    centre[first:][same] = columns[0, first:][same]
    centre[table.intercept] = 0.0
    return table._replace(columns=columns - centre), centre


def uncentred(vectors, intercept, centre):
    """Coefficients (..., p) of the columns as they were, from those of centred columns."""
    if centre.any():
        vectors = vectors.copy()
        vectors[..., intercept] -= vectors @ centre
    return vectors


def inverse_root(normal):
    """Root (f, rank) of the pseudo-inverse of a positive semi-definite matrix."""
    scale, values, vectors, kept = _scaled_spectrum(normal)
    return scale[:, None] * vectors[:, kept] / np.sqrt(values[kept])


def are_estimable(normal, combinations):
    """Whether combinations (k, f) of coefficients lie in the row space of the information (f, f).

    The others have no standard error.
    """
    scale, _, vectors, kept = _scaled_spectrum(normal)
    scaled = combinations * np.where(scale > 0, scale, 1.0)
    outside = np.linalg.norm(scaled @ vectors[:, ~kept], axis=1)
    return outside <= _OUTSIDE * np.linalg.norm(scaled, axis=1)


def _scaled_spectrum(normal):
    """Scale (f,), eigenvalues and vectors of a matrix with unit diagonal, and what is not zero."""
    size = np.sqrt(np.diag(normal))
    scale = np.divide(1, size, out=np.zeros_like(size), where=size > 0)
    values, vectors = np.linalg.eigh(normal * np.multiply.outer(scale, scale))
    kept = values > _RANK * max(values[-1], 0.0) if len(values) else np.zeros(0, dtype=bool)
    return scale, values, vectors, kept
