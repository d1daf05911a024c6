"""Whether all coefficients vary by client or the intercept alone, by losses of held-out rows.

With few rows a client, slopes that vary follow chance; with many, a common slope misses what
clients differ in. Laplace's approximation is no judge of that where clients have few rows.
"""

import numpy as np

from pfl_sklearn._clients import row_counts
from pfl_sklearn.linear_model._mixed._fit import fit_link
from pfl_sklearn.linear_model._mixed._identification import varying_columns
from pfl_sklearn.linear_model._mixed._predictions import averaged_log_likelihoods, law_of_table

_FOLDS = 3
_CLIENTS = 500  # at most, so that a trial costs less than the fit: it may miss gains below 1 %
_ROUGHLY = 0.1  # nats per standard error: losses are then off by much less than their own error
_ITERATIONS = 50  # a search that takes more shows that rows say little of the slopes
# Share of the loss that slopes have to gain: a level is simpler, and its fit is more exact. Without
# it they would vary in a tenth of tables in which they do not, instead of a twentieth.
_WORTHWHILE = 0.005
_ERRORS = 2.0  # standard errors by which a difference is clear


def held_out_losses(table, prior, family, options):
    """Mean log-losses of held-out rows of known clients, or None where their rows cannot tell.

    They are in nats, by what varies: "intercept" or "all".

    Parameters
    ----------
    table : RegressionTable
        All of its columns vary, and the first is the intercept.
    prior : GaussianPrior
        With an unknown mean and an unknown covariance.
    family : Family
    options : FitParameters

    Returns
    -------
    dict or None
    """
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
            level, every, weights = _asked_folds(table, folds, prior, family, options)
    except ValueError:  # a column may be constant in the rows that are left
        return None
    both = {"intercept": level, "all": every}
    return {name: float(np.average(each, weights=weights)) for name, each in both.items()}


def _asked_folds(table, folds, prior, family, options):
    """Losses (n,) of held-out rows with a level, and with all; their weights."""
    losses, weights = [], []
    for k in range(_FOLDS):
        held, kept = folds == k, folds != k
        losses.append(
            [
                _losses(fit_link(_rows_of(each, kept), prior, family, options), each, held)
                for each in (table.level_alone, table)
            ]
        )
        weights.append(np.ones(held.sum()) if table.weights is None else table.weights[held])
        (level, every), by = np.concatenate(losses, axis=1), np.concatenate(weights)
        if _is_clear(level, every, by):
            break
    return level, every, by


def all_vary(losses):
    """Whether all coefficients vary, by held-out losses or None."""
    return losses is not None and losses["all"] < (1 - _WORTHWHILE) * losses["intercept"]


def _some_clients(table, rng):
    """The rows of at most so many clients, drawn by their rows among those that have several."""
    sizes = np.where(table.sizes > 1, table.sizes, 0)
    chosen = np.flatnonzero(sizes)
    if len(chosen) > _CLIENTS:
        chosen = rng.choice(len(sizes), _CLIENTS, replace=False, p=sizes / sizes.sum())
        chosen.sort()
    rows = np.isin(table.codes, chosen)
    table = _rows_of(table, rows)
    return table._replace(codes=np.searchsorted(chosen, table.codes), n_clients=len(chosen))


def _folds_within(table, rng):
    """Fold (n,) of every row: each client's rows, and those of each label, in equal parts."""
    # By their contents first, so that the order of the rows decides nothing.
    columns = table.columns.T if table.offset is None else [*table.columns.T, table.offset]
    chance = np.empty(len(table.y))
    chance[np.lexsort([*columns, table.y, table.codes])] = rng.random(len(table.y))
    order = np.lexsort([chance, table.y, table.codes])
    sizes = row_counts(table.codes, table.n_clients)
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


def _losses(estimates, table, held):
    """Log-losses (n,) of held-out rows, under the posterior of their clients."""
    table = _rows_of(table, held)
    law = law_of_table(estimates, table)
    return -averaged_log_likelihoods(estimates.family, law, table.y)


def _is_clear(level, every, weights):
    """Whether losses (n,) tell which is better, or that slopes would gain little.

    Predictions are for these clients: rows are drawn, not clients.
    """
    differences = every - level
    mean = np.average(differences, weights=weights)
    error = np.sqrt(np.sum((weights * (differences - mean)) ** 2)) / weights.sum()
    little = 2 * _WORTHWHILE * np.average(level, weights=weights)
    return abs(mean) > _ERRORS * error or mean - _ERRORS * error > -little
