"""Identifiability of a mixed model: checks before a fit, warnings after it, and evidence.

The rows may say nothing about a variance between clients, and they may be fitted exactly. Evidence
for comparisons of models is the moments of the rows and the number of parameters that these
identify; a private fit keeps none of it.
"""

from typing import NamedTuple

import numpy as np

from pfl_sklearn._warnings import format_names, warn_caller
from pfl_sklearn.linear_model._algebra import covariance_factor, inverse_root, n_independent

# Noise variances over the mean square of the targets: rounding errors alone, and so small that
# the residuals have to be looked at and draws of a covariance lose their digits.
EXACT_NOISE, NEARLY_EXACT_NOISE = 1e-20, 1e-10
_SPANNED_SHARE = 1e-8  # share of a client's column outside the population's that counts as rounding
_LEAST_LOADING = 1e-6  # coefficient, at columns of like length, of a column that is not named
_ZERO_TARGET_NOISE = 1e-270  # noise variance that a fit reports if all targets are 0
_EXACT_RESIDUAL = 1e-9  # over the standard deviation of the targets
_ROUNDING_ERRORS = 8 * np.finfo(float).eps  # of a residual, over the numbers that it is made of
_CONSTANT_COLUMN = 1e-24  # variance over squared mean; a smaller one is rounding error


def is_centred(table, prior):
    """Whether an unknown covariance has its shape ("diag", ...) for centred columns."""
    # Full covariances are the same set at every centre, and the search goes better there.
    return table.random_intercept and (prior.centered or prior.covariance_type == "full")


def varying_columns(table, prior):
    """Which random columns (q,) may differ between clients under an unknown covariance."""
    # If all columns were asked to vary, a column of zeros stays common. So does, next to an
    # intercept, a column that is constant within every client: only the assumed shape would
    # separate its slope's variance from the intercept's.
    q = table.n_random
    if not (table.all_random and prior.centered and prior.covariance_type == "diag"):
        return np.ones(q, dtype=bool)
    if not table.random_intercept:
        return np.any(table.bounds, axis=0)[:q]
    varies = table.varies_within[:q]
    varies[table.intercept] = True
    return varies


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


def check_noise_identified(table, noise, alternative=""):
    """Raise ValueError if the noise variance is unknown and every client has a single row."""
    if noise is None and table.n_rows == table.n_clients:
        raise ValueError(
            f"each of the {table.n_clients} clients has one row, so the data cannot separate the "
            f"noise variance from the variance between clients; give noise_variance{alternative}."
        )


def residual_dof(table, varies):
    """Rows that the clients' own coefficients do not fit exactly: sum of n_i - rank Z_i.

    `varies` (q,) says which of the random columns belong to Z_i.
    """
    at = np.flatnonzero(varies)
    dof = table.n_rows - int(np.minimum(table.sizes, len(at)).sum())
    if dof:  # a lower bound, and the caller asks for 0 only: no ranks are needed
        return dof
    blocks = [rows[..., at] for _, rows in table.batches]
    # Ranks should not depend on the features' units.
    scale = np.max([np.abs(block).max(axis=(0, 1)) for block in blocks], axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    ranks = sum(int(np.linalg.matrix_rank(block / scale).sum()) for block in blocks)
    return table.n_rows - ranks


def warn_of_few_rows(table, averaged=True):
    """Warn that the rows cannot separate noise from differences between clients."""
    sizes, names = table.sizes, table.names[: table.n_random]
    outcome = "The noise variance is estimated as 0, and standard deviations are too small."
    if averaged:
        outcome = "The estimates are posterior means under a weak prior instead."
    warn_caller(
        f"The {len(names)} coefficients that vary ({format_names(names)}) fit the rows of every "
        f"client exactly ({sizes.min()} to {sizes.max()} rows), so restricted likelihood cannot "
        f"tell noise from differences between clients. {outcome} Let fewer coefficients vary "
        "(random), or give noise_variance.",
        UserWarning,
    )


def flat_variances(reduced, first):
    """Variances (q,) in which restricted likelihood is flat, and the columns (p,) that cause it.

    Restricted likelihood is that of contrasts K'y with K'X = 0. If the population's columns span
    the values of a coefficient's column in each client, these values have no part in any contrast:
    columns that differ between m hospitals only, m - 1 of them, span the hospitals' intercepts.
    Columns from `first` on have a free population coefficient.
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
    root = inverse_root(reduced.gram(reduced.rows, first)[:-1, :-1])[0]
    for k in np.flatnonzero(possible):
        across = np.concatenate(
            [np.einsum("bk,bkp->bp", rows[..., k], rows[..., first:-1]) for rows in reduced.rows]
        )
        inside = np.sum((across @ root) ** 2, axis=1)
        if np.all(squares[:, k] - inside <= _SPANNED_SHARE * squares[:, k]):
            flat[k] = True
            spanning[first:] |= np.abs(root @ (root.T @ across.T)).max(axis=1) > _LEAST_LOADING
    return flat, spanning


def warn_of_flat_variances(table, flat, spanning):
    """Warn of variances that are set to 0 because the data carry no information on them."""
    coefficients = format_names(table.names[k] for k in np.flatnonzero(flat))
    columns = format_names(table.names[k] for k in np.flatnonzero(spanning))
    warn_caller(
        f"The data do not inform on the variance between clients of {coefficients}: the "
        f"population's columns {columns} already give each of the {table.n_clients} clients a "
        "value of its own. The variance is set to 0: that changes no prediction for these clients, "
        "but standard errors and predictions for new clients depend on it. Leave columns out, or "
        "give the prior's covariance.",
        UserWarning,
    )


def warn_of_exact_fit(table, estimates):
    """Warn that the residuals are rounding errors."""
    square = sum(np.vdot(rows[..., -2], rows[..., -2]) for _, rows in table.batches)
    if not estimates.noise <= NEARLY_EXACT_NOISE * square / table.n_rows + _ZERO_TARGET_NOISE:
        return
    everybody = np.broadcast_to(estimates.population, estimates.coefficients.shape)
    if _fit_exactly(table, everybody):
        warn_caller(
            f"The population's coefficients fit all {table.n_rows} rows exactly, so no residual "
            "informs on noise or on differences between clients. Variances and standard deviations "
            "are meaningless. Leave features out, or give noise_variance and the prior's "
            "covariance.",
            UserWarning,
        )
    # Without residual degrees of freedom an exact fit is expected, and another warning advises.
    elif table.sizes.max() > table.n_random and _fit_exactly(table, estimates.coefficients):
        warn_caller(
            f"The clients' coefficients fit all {table.n_rows} rows exactly: no residual informs "
            "on noise. The noise variance and the standard deviations of clients are rounding "
            "errors. Let fewer coefficients vary (random), or give noise_variance.",
            UserWarning,
        )


def _fit_exactly(table, coefficients):
    """Whether coefficients (m, p) leave residuals of rounding errors only."""
    means, weight = table.means()
    spread, square, largest = table.squares_about(means)[-1, -1], 0.0, 0.0
    for clients, rows in table.batches:
        # Residuals are sums over columns and target, with -1 for the target.
        augmented = np.column_stack([coefficients[clients], np.full(len(clients), -1.0)])
        square += np.sum(np.einsum("bkp,bp->bk", rows[..., :-1], augmented) ** 2)
        terms = np.einsum("bkp,bp->bk", np.abs(rows[..., :-1]), np.abs(augmented))
        # A rotated row is longer than the rows that it stands for, by their number at most.
        largest = max(largest, (terms / np.sqrt(table.sizes[clients])[:, None]).max())
    allowed = _ROUNDING_ERRORS * largest
    return np.sqrt(square / weight) <= _EXACT_RESIDUAL * np.sqrt(spread / weight) + allowed


class RowMoments(NamedTuple):
    """Weighted moments of the columns in the order of the design, with the response last."""

    n_rows: int  # of positive weight
    weight: float  # sum of the weights
    means: np.ndarray  # (p + 1,)
    covariance: np.ndarray  # (p + 1, p + 1)

    def mean_square(self, matrix):
        """Mean (float) of x' A x over the rows, for a matrix A (p, p); NaN if A is not finite."""
        if not np.isfinite(matrix).all():  # clients share nothing, or there is one alone
            return np.nan
        means, covariance = self.means[:-1], self.covariance[:-1, :-1]
        return max(float(np.sum(matrix * covariance) + means @ matrix @ means), 0.0)

    def variance(self, coefficients):
        """Variance (float) of x' beta over the rows, for coefficients (p,)."""
        return max(float(coefficients @ self.covariance[:-1, :-1] @ coefficients), 0.0)


class ModelForm(NamedTuple):
    """Known and estimated parts of a Gaussian model, in the order of the design."""

    means: np.ndarray  # (c, p), given population coefficients of c outputs; NaN where estimated
    varying: np.ndarray  # (v,), positions of the coefficients that vary by client
    shape: str  # "zero", "given", "spherical", "diag", "low_rank" or "full"
    rank: int  # of "low_rank"
    covariance: np.ndarray | None  # (p, p), if the shape is "given"
    centre: np.ndarray | None  # (p,), at which the covariance has its shape
    noise: float | None  # given noise variance
    criterion: str  # name of the log-likelihood: models compare if it is the same


class GroupingForm(NamedTuple):
    """Levels of a further grouping, and the form of a model whose clients these would be."""

    levels: np.ndarray  # (L,)
    n_rows: np.ndarray  # (L,)
    form: ModelForm


class Evidence(NamedTuple):
    """Moments of the rows, number of estimated parameters, and the form of a Gaussian model."""

    moments: RowMoments
    n_parameters: int | None  # None without a likelihood
    form: ModelForm | None
    n_coefficients: int = 0  # those of the parameters that are population coefficients
    offset: tuple = (0.0, 0.0)  # weighted mean and mean square of the rows' known predictors
    groupings: tuple = ()  # pairs of the name of a further grouping and its GroupingForm


def row_moments(table, order):
    """Moments of the rows of a table, whose columns are those of the design in `order`."""
    means, weight = table.means()
    # About the means: squares about a far origin, such as years, cancel.
    covariance = table.squares_about(means) / weight
    back, n_rows = np.append(np.argsort(order), len(order)), int(table.sizes.sum())
    return RowMoments(n_rows, weight, means[back], covariance[np.ix_(back, back)])


def n_identified(moments, free, intercept):
    """Rank (int) of the `free` (p,) columns, centred if the intercept at that position is free."""
    means, covariance = moments.means[:-1], moments.covariance[:-1, :-1]
    if intercept is None or not free[intercept]:
        seconds = covariance + np.multiply.outer(means, means)
        return n_independent(seconds[np.ix_(free, free)])
    varying = free & (np.diag(covariance) > _CONSTANT_COLUMN * means**2)
    varying[intercept] = False
    return 1 + n_independent(covariance[np.ix_(varying, varying)])


def n_covariance_parameters(shape, q, rank=1):
    """Free parameters of a covariance of q coefficients."""
    if shape in ("zero", "given") or q == 0:
        return 0
    return len(covariance_factor(shape, q, rank).start)


def gaussian_evidence(table, design, prior, noise, criterion, n_outputs=1):
    """Evidence of a model under a Gaussian prior.

    `noise` is known, None (estimated) or 0 (absent). `criterion` is a name, or a function that
    gives one from the covariance's shape, number of coefficients and rank.
    """
    moments, order = row_moments(table, design.order), design.order
    q, p = table.n_random, len(order)
    n_classes = 1 if n_outputs == 1 else n_outputs + 1
    mean, covariance = prior.known_mean(n_classes * q), prior.known_covariance(q)
    means = np.full((n_classes, p), np.nan)
    # NaN: the population's mean is estimated.
    if mean is not None:
        means[:, order[:q]] = mean.reshape(n_classes, q)
    varying, shape, rank, known, centre = order[:0], "zero", 0, None, None
    if covariance is not None and covariance.any():
        varying, shape = order[:q][np.diag(covariance) > 0], "given"
        known = design.embedded(covariance)
    elif covariance is None and table.n_clients > 1:  # one client has no covariance to estimate
        varying = order[:q][varying_columns(table, prior)]
        shape, rank = _free_shape(prior, len(varying))
        centre = moments.means[:-1].copy() if is_centred(table, prior) else np.zeros(p)
    if not isinstance(criterion, str):
        criterion = criterion(shape, len(varying), rank)
    form = ModelForm(means, varying, shape, rank, known, centre, noise, criterion)
    intercept = 0 if design.fit_intercept else None
    n_coefficients = n_outputs * n_identified(moments, np.isnan(means[0]), intercept)
    n_parameters = n_coefficients + n_covariance_parameters(shape, len(varying), rank)
    return Evidence(moments, n_parameters + (noise is None), form, n_coefficients)


def with_groupings(evidence, order, levels, known):
    """Evidence with FittedLevels of further groupings, whose covariances may be `known`."""
    means, groupings, n_parameters = evidence.moments.means[:-1], [], evidence.n_parameters
    for each, is_known in zip(levels, known, strict=True):
        varying, shape, covariance = order[each.positions], "given", None
        if not is_known:
            shape = _free_shape(each.prior, len(varying))[0]
        elif each.covariance.any():
            covariance = np.zeros((len(order), len(order)))
            covariance[np.ix_(varying, varying)] = each.covariance
        else:
            varying, shape = order[:0], "zero"
        centre = np.zeros(len(order)) if each.mean_row is None else means.copy()
        form = evidence.form._replace(
            varying=varying, shape=shape, rank=0, covariance=covariance, centre=centre
        )
        groupings.append((each.name, GroupingForm(each.levels, each.n_rows, form)))
        n_parameters += n_covariance_parameters(shape, len(varying))
    return evidence._replace(groupings=tuple(groupings), n_parameters=n_parameters)


def _free_shape(prior, q):
    """Simplest name and rank of the set of covariances of q coefficients that a prior allows."""
    # Two models with one set of covariances must have one name, or a test would compare them.
    rank = prior.rank or 1 if prior.covariance_type == "low_rank" else 0
    if q == 0:
        return "zero", 0
    if q == 1 or rank >= q - 1 > 0:
        return "full", 0
    return prior.covariance_type, rank


def mixture_evidence(table, design, prior, estimates, noise):
    """Evidence of a linear model under a mixture prior, fitted as `estimates`."""
    moments = row_moments(table, design.order)
    free = np.isin(np.arange(len(design.order)), design.fixed)
    n_parameters = n_identified(moments, free, 0 if design.fit_intercept else None)
    if not prior.is_known:
        n_components = estimates.responsibilities.shape[1]
        n_parameters += prior._shape().n_parameters(n_components, table.n_random)
    return Evidence(moments, n_parameters + (noise is None), None)


def variance_shares(fixed, between, noise):
    """Marginal and conditional R2, from the variances of fixed effects, clients and noise."""
    with np.errstate(invalid="ignore"):  # a response without variance has no shares
        shares = np.array([fixed, fixed + between]) / np.float64(fixed + between + noise)
    return float(shares[0]), float(shares[1])
