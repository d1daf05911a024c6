"""Checks of what the rows of a linear model identify, and warnings that name the columns.

The rows may say nothing about a variance between clients or about a coefficient of the population,
and they may be fitted exactly.
"""

from collections.abc import Iterable

import numpy as np

from pfl_sklearn._warnings import warn_caller
from pfl_sklearn.linear_model._algebra import inverse_root, near_combinations
from pfl_sklearn.linear_model._mixed._profile import normal_matrix
from pfl_sklearn.linear_model._mixed._reduction import flat_rows

# Noise variances over the mean square of the targets: rounding errors alone, and so small that
# the residuals have to be looked at and draws of a covariance lose their digits.
EXACT_NOISE, NEARLY_EXACT_NOISE = 1e-20, 1e-10
_MOST_LISTED = 6  # names in a warning, which should fit on a screen
_SPANNED = 1e-8  # share of a client's column outside the population's that counts as rounding
_NOT_INVOLVED = 1e-6  # coefficient, at columns of like length, of a column that is not named
_EXACT_COMBINATION = 1e-12  # length of a combination of columns of length 1 that counts as rounding
_ZERO_TARGETS = 1e-270  # noise variance that a fit reports if all targets are 0
_EXACT_RESIDUAL = 1e-9  # over the standard deviation of the targets
_ROUNDING_ERRORS = 8 * np.finfo(float).eps  # of a residual, over the numbers that it is made of


def check_noise_identified(table, noise, alternative=""):
    """Raise ValueError if the noise variance is unknown and every client has a single row."""
    if noise is None and table.n_rows == table.n_clients:
        raise ValueError(
            f"each of the {table.n_clients} clients has one row, so the data cannot separate the "
            f"noise variance from the variance between clients; give noise_variance{alternative}."
        )


def flat_variances(reduced, first):
    """Variances (q,) that restricted likelihood does not depend on, and columns (p,) that cause it.

    Restricted likelihood is that of contrasts K'y with K'X = 0. Where the population's columns span
    a coefficient's column of every client (its values there, 0 elsewhere), these have no part in
    any contrast: hospital-level columns, one fewer than hospitals, span the hospitals' levels. The
    columns from `first` on have a free population coefficient.
    """
    q, p = reduced.n_random, reduced.n_columns
    squares = np.concatenate(
        [np.einsum("bkq,bkq->bq", rows[..., :q], rows[..., :q]) for rows in reduced.rows]
    )
    n_needed = np.sum(squares > 0, axis=0)
    flat, spanning = np.zeros(q, dtype=bool), np.zeros(p, dtype=bool)
    # Fewer columns than clients cannot span a value for each; that spares most tables the search.
    possible = (n_needed > 0) & (n_needed <= p - first)
    if not possible.any():
        return flat, spanning
    gram = normal_matrix(reduced, reduced.rows)[first:-1, first:-1]
    root = inverse_root(gram)[0]
    for k in np.flatnonzero(possible):
        across = np.concatenate(
            [np.einsum("bk,bkp->bp", rows[..., k], rows[..., first:-1]) for rows in reduced.rows]
        )
        inside = np.sum((across @ root) ** 2, axis=1)
        if np.all(squares[:, k] - inside <= _SPANNED * squares[:, k]):
            flat[k] = True
            spanning[first:] |= np.abs(root @ (root.T @ across.T)).max(axis=1) > _NOT_INVOLVED
    return flat, spanning


def warn_of_flat_variances(table, flat, spanning):
    """Name the coefficients whose variance is set to 0 for want of any information."""
    coefficients = listed_names(table.names[k] for k in np.flatnonzero(flat))
    columns = listed_names(table.names[k] for k in np.flatnonzero(spanning))
    warn_caller(
        f"The data say nothing about the variance between clients of {coefficients}, because the "
        f"population's columns {columns} already give each of the {table.n_clients} clients a "
        "value of its own. The variance is set to 0: that changes no prediction for these clients, "
        "but standard errors and predictions for new clients depend on it. Leave columns out, or "
        "give the prior's covariance.",
        UserWarning,
    )


def warn_of_what_is_open(table, estimates, options):
    """Name columns too close to each other for standard errors, and say if the fit is exact."""
    left_open = np.isnan(np.diag(estimates.population_covariance))
    if left_open.any() and not left_open.all():
        _warn_of_near_combinations(table, np.flatnonzero(left_open))
    if options.noise_variance is None and table.n_clients > 1:  # one client: least squares
        _warn_of_exact_fit(table, estimates)


def _warn_of_near_combinations(table, at):
    """Name those of the columns `at` that are nearly, but not exactly, combinations of others.

    Exact ones are the analyst's own (a column of zeros, a full set of indicators). Others look
    like features with coefficients of their own, until their standard errors are NaN.
    """
    if table.intercept is not None:  # large means would make any two columns look alike
        table = table._replace(centre=table.means()[0][:-1])
    columns = np.concatenate([flat_rows(rows)[:, at] for _, rows in table.moved_batches()])
    vectors, lengths = near_combinations(columns.T @ columns)
    left = np.linalg.norm(columns @ (vectors / lengths[:, None]), axis=0)
    near = left > _EXACT_COMBINATION
    if not near.any():
        return
    involved = np.abs(vectors[:, near]).max(axis=1) > _NOT_INVOLVED
    names = listed_names(table.names[k] for k in at[involved])
    warn_caller(
        f"The standard errors of the population's coefficients of {names} are NaN: one of these "
        f"columns is a combination of the others up to a relative {left.max():.0e}, which leaves "
        "too few digits to tell their coefficients apart. Leave it out, or replace it by its "
        "difference from that combination.",
        UserWarning,
    )


def _warn_of_exact_fit(table, estimates):
    """Say that no residual is left but rounding errors."""
    square = sum(np.vdot(rows[..., -2], rows[..., -2]) for _, rows in table.batches)
    if not estimates.noise <= NEARLY_EXACT_NOISE * square / table.n_rows + _ZERO_TARGETS:
        return
    everybody = np.broadcast_to(estimates.population, estimates.coefficients.shape)
    if _fit_exactly(table, everybody):
        warn_caller(
            f"The population's coefficients fit all {table.n_rows} rows exactly, so no residual "
            "tells of noise or of differences between clients. Variances and standard deviations "
            "are meaningless. Leave features out, or give noise_variance and the prior's "
            "covariance.",
            UserWarning,
        )
    # Without rows to spare an exact fit is no surprise, and another warning says what to do.
    elif table.sizes.max() > table.n_random and _fit_exactly(table, estimates.coefficients):
        warn_caller(
            f"The clients' coefficients fit all {table.n_rows} rows exactly, so no residual tells "
            "of noise. The noise variance and the standard deviations of clients are rounding "
            "errors. Let fewer coefficients vary (random), or give noise_variance.",
            UserWarning,
        )


def _fit_exactly(table, coefficients):
    """Whether coefficients (m, p) leave residuals of rounding errors only."""
    means, weight = table.means()
    square, spread, largest = 0.0, 0.0, 0.0
    for clients, rows in table.batches:
        columns, y, ones = rows[..., :-2], rows[..., -2], rows[..., -1]
        own = coefficients[clients]
        square += np.sum((y - np.einsum("bkp,bp->bk", columns, own)) ** 2)
        spread += np.sum((y - means[-1] * ones) ** 2)
        terms = np.einsum("bkp,bp->bk", np.abs(columns), np.abs(own))
        # A rotated row is longer than the rows that it stands for, by their number at most.
        terms += np.abs(y)
        largest = max(largest, (terms / np.sqrt(table.sizes[clients])[:, None]).max())
    allowed = _ROUNDING_ERRORS * largest
    return np.sqrt(square / weight) <= _EXACT_RESIDUAL * np.sqrt(spread / weight) + allowed


def listed_names(names: Iterable[str], most: int = _MOST_LISTED) -> str:
    """Names for a message: the first of them, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more
