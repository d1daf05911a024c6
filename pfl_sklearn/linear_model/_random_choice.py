"""Whether all coefficients vary by client or the intercept alone, by losses of held-out rows.

With few rows a client, slopes that vary follow chance; with many, a common slope misses what
clients differ in. Laplace's approximation is no judge of that where clients have few rows.
"""

import math

import numpy as np

from pfl_sklearn.linear_model._mixed._fit import fit_link
from pfl_sklearn.linear_model._mixed._identifiability import varying_columns
from pfl_sklearn.linear_model._mixed._predictions import averaged_log_likelihoods, law_of_table

_FOLDS = 3
_CLIENTS = 500  # at most, so that a trial costs less than the fit: it may miss gains below 1 %
_ROUGHLY = 0.1  # nats per standard error: losses are then off by much less than their own error
_ITERATIONS = 50  # a search that takes more shows that rows say little of the slopes
# Share of the loss that slopes have to gain: a level is simpler, and its fit is more exact. Without
# it they would vary in a tenth of tables in which they do not, instead of a twentieth.
_WORTHWHILE = 0.005
_ERRORS = 2.0  # standard errors by which a difference is clear


def choose_random(table, design, prior, family, options):
    """Table and design with what varies by client under ``random="auto"``, and the losses.

    These are mean log-losses of held-out rows of known clients in nats, by what varies:
    "intercept" or "all"; None where there was nothing to compare, or the rows cannot tell.

    Parameters
    ----------
    table : RegressionTable
        All of its columns vary, if `random` is "auto", and an intercept is the first.
    design : Design
    prior : GaussianPrior
    family : Family
    options : FitParameters

    Returns
    -------
    RegressionTable, Design, dict or None
    """
    if not isinstance(options.random, str) or options.random != "auto":
        return table, design, None
    losses = None
    if math.isinf(options.epsilon):  # rows of a private fit are not asked
        # A mean or a covariance is that of all coefficients; another shape is one of slopes.
        free = prior.mean is None and prior.covariance is None and prior.covariance_type == "diag"
        if not (free and design.fit_intercept and table.n_clients > 1):
            return table, design, None
        losses = _held_out_losses(table, prior, family, options)
    gains = losses is not None and losses["all"] < (1 - _WORTHWHILE) * losses["intercept"]
    if not gains:
        table, design = table.level_alone, design.level_alone
    return table, design, losses


def _held_out_losses(table, prior, family, options):
    """Mean losses by what varies, or None where the rows cannot tell."""
    n_varying, sizes = int(varying_columns(table, prior).sum()), table.sizes
    # A client with no more rows than coefficients could follow any of them, and Laplace's
    # approximation fails there. Predictions are for rows, so half of these have to be elsewhere.
    # Quadrature by a number of points goes with one coefficient.
    enough = 2 * sizes[sizes > n_varying].sum() >= len(table.y)
    if n_varying < 2 or not enough or options.quadrature not in ("auto", "laplace"):
        return None
    rng = np.random.default_rng(0)  # the same choice in every fit
    table = _some_clients(table, rng)
    folds = _folds_within(table, rng)
    kept = [folds != k for k in range(_FOLDS)]
    if table.n_clients < 2 or not all(family.is_complete(table.y[rows]) for rows in kept):
        return None
    options = options.replaced(
        quadrature="laplace",
        uncertainty="plug_in",
        tol=max(options.tol, _ROUGHLY),
        max_iter=min(options.max_iter, _ITERATIONS),
        n_jobs=1,  # so few rows take less time than workers
    )
    try:
        with np.errstate(all="ignore"):  # of slopes that rows say nothing of
            return _losses_of_folds(table, folds, prior, family, options)
    except ValueError:  # a column may be constant in the rows that are left
        return None


def _losses_of_folds(table, folds, prior, family, options):
    """Mean losses by what varies, of folds that are asked until it is clear which is better."""
    tables = {"intercept": table.level_alone, "all": table}
    losses = np.empty((2, len(folds)))
    weights = np.ones(len(folds)) if table.weights is None else table.weights
    for k in range(_FOLDS):
        held = folds == k
        for i, each in enumerate(tables.values()):
            estimates = fit_link(_rows_of(each, ~held), prior, family, options)
            rows = _rows_of(each, held)
            law = law_of_table(estimates, rows)
            losses[i, held] = -averaged_log_likelihoods(estimates.family, law, rows.y)
        asked = folds <= k
        if _is_clear(losses[:, asked], weights[asked]):
            break
    means = np.average(losses[:, asked], axis=1, weights=weights[asked])
    return dict(zip(tables, means.tolist(), strict=True))


def _some_clients(table, rng):
    """The rows of at most so many clients, drawn by their rows among those that have several."""
    sizes = np.where(table.sizes > 1, table.sizes, 0)
    chosen = np.flatnonzero(sizes)
    if len(chosen) > _CLIENTS:
        chosen = rng.choice(len(sizes), _CLIENTS, replace=False, p=sizes / sizes.sum())
        chosen.sort()
    table = _rows_of(table, np.isin(table.codes, chosen))
    return table._replace(codes=np.searchsorted(chosen, table.codes), n_clients=len(chosen))


def _folds_within(table, rng):
    """Fold (n,) of every row: each client's rows, and those of each label, in equal parts."""
    # By their contents first, so that the order of the rows decides nothing.
    columns = table.columns.T if table.offset is None else [*table.columns.T, table.offset]
    chance = np.empty(len(table.y))
    chance[np.lexsort([*columns, table.y, table.codes])] = rng.random(len(table.y))
    order = np.lexsort([chance, table.y, table.codes])
    sizes = table.sizes
    rank = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    folds = np.empty(len(order), dtype=np.intp)
    folds[order] = (rank + np.repeat(rng.integers(_FOLDS, size=len(sizes)), sizes)) % _FOLDS
    return folds


def _rows_of(table, rows):
    """The table with some of its rows."""
    parts = {name: getattr(table, name) for name in ("columns", "y", "codes", "weights", "offset")}
    return table._replace(
        **{name: part if part is None else part[rows] for name, part in parts.items()}
    )


def _is_clear(losses, weights):
    """Whether losses (2, n) tell which is better, or that slopes would gain little.

    Predictions are for these clients: rows are drawn, not clients.
    """
    level, every = losses
    differences = every - level
    mean = np.average(differences, weights=weights)
    error = np.sqrt(np.sum((weights * (differences - mean)) ** 2)) / weights.sum()
    little = 2 * _WORTHWHILE * np.average(level, weights=weights)
    return abs(mean) > _ERRORS * error or mean - _ERRORS * error > -little
