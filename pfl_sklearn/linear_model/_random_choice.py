"""Whether all coefficients vary by client or the intercept alone.

With few rows per client, varying slopes fit noise; with many, a common slope misses differences
between clients. For linear models the likelihood decides. Laplace's approximation cannot where
clients have few rows, so for classes and counts losses of held-out rows do.
"""

import math
import warnings

import numpy as np

from pfl_sklearn._warnings import warn_caller
from pfl_sklearn.linear_model._mixed._fit import fit_link
from pfl_sklearn.linear_model._mixed._identifiability import varying_columns
from pfl_sklearn.linear_model._mixed._predictions import averaged_log_likelihoods, table_law

_FOLDS = 3
_CLIENTS = 500  # at most, so that a trial costs less than the fit: it may miss gains below 1 %
_LOOSE_TOL = 0.1  # nats per standard error: losses are then off by much less than their own error
_ITERATIONS = 50  # a search that takes more shows that rows say little of the slopes
# A fit with a link takes some 75 evaluations, mostly of products and factors of the clients'
# curvatures. In five tables of 19,000 rows, 2 or 5 classes and 10 to 80 columns, it took 0.8 to 1.8
# times as long.
_SECONDS_PER_PRODUCT = 1.5e-7
_MOST_TRIAL_SECONDS = 60.0  # of a fit to the sample; where it takes longer, the intercept varies
_LONG_SECONDS = 300.0  # of a fit that begins with a warning
_VANISHING_SHARE = 1e-6  # of the noise: a search goes to 0 in steps
# Share of the loss that slopes have to gain: a random intercept is simpler, and its fit more exact.
# Without it slopes would vary in a tenth of the tables in which they do not, not in a twentieth.
_LEAST_GAIN = 0.005
_CLEAR_ERRORS = 2.0  # standard errors by which a difference is clear


def choose_random(table, design, prior, family, options):
    """Table and design with the coefficients that vary under ``random="auto"``, and the losses.

    These are mean log-losses of held-out rows of known clients, in nats, under "intercept" and
    "all"; None if there was nothing to compare or the rows cannot decide. If `random` is "auto",
    all columns of the RegressionTable vary, and the intercept is the first.
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
    if not slopes_gain(losses):
        table, design = table.intercept_only, design.intercept_only
    return table, design, losses


def slopes_gain(losses):
    """Whether held-out losses of :func:`choose_random` are clearly smaller if slopes vary."""
    return losses is not None and losses["all"] < (1 - _LEAST_GAIN) * losses["intercept"]


def warn_of_long_fit(table, family):
    """Warn before a fit with a link that takes minutes because many coefficients vary."""
    seconds, n_coefficients = _link_seconds(table, family), table.n_random * family.n_outputs
    if seconds > _LONG_SECONDS:
        warn_caller(
            f"This fit will take about {seconds / 60:.0f} minutes of the processor, since "
            f"{n_coefficients} coefficients of {table.n_clients} clients vary, over "
            f"{len(table.y)} rows. Name fewer features in random=, or take random='intercept'.",
            UserWarning,
        )


def _link_seconds(table, family):
    """Rough time of the fit of a RegressionTable with a link."""
    n_coefficients = table.n_random * family.n_outputs
    products = len(table.y) * n_coefficients**2 + table.n_clients * n_coefficients**3
    return _SECONDS_PER_PRODUCT * products


def choose_by_likelihood(table, design, prior, options, fit):
    """RotatedTable and design with the coefficients that vary under ``random="auto"``.

    That is the intercept alone if most rows are of clients with too few for all slopes, and
    Akaike's criterion says that their variances explain less than chance would, or they explain all
    noise. `fit` takes a table, the prior and options.
    """
    # A mean or a covariance is that of all coefficients; another shape is one of slopes.
    free = prior.mean is None and prior.covariance is None and prior.covariance_type == "diag"
    if not (free and table.random_intercept and table.n_clients > 1):
        return table, design
    n_varying = int(varying_columns(table, prior).sum())
    # Elsewhere slopes without variance change little, and a second fit would take time.
    if n_varying < 2 or not few_rows(table.sizes, n_varying):
        return table, design
    options = options.replaced(
        uncertainty="plug_in", tol=max(options.tol, _LOOSE_TOL), max_iter=_ITERATIONS
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the fit of what is chosen repeats its own
        all_vary, intercept = (
            fit(candidate, prior, options) for candidate in (table, table.intercept_only)
        )
    gain = all_vary.log_likelihood - intercept.log_likelihood
    # Slopes that fit every row exactly leave nothing that errors could rest on.
    fits_noise = all_vary.noise < _VANISHING_SHARE * intercept.noise
    if gain > n_varying - 1 and not fits_noise:  # the criterion counts 1 a variance
        return table, design
    return table.intercept_only, design.intercept_only


def few_rows(sizes, n_varying):
    """Whether most rows are of clients with no more of them than varying coefficients."""
    return 2 * sizes[sizes > n_varying].sum() < sizes.sum()


def _held_out_losses(table, prior, family, options):
    """Mean held-out losses under "intercept" and "all", or None if the rows cannot decide."""
    n_varying = int(varying_columns(table, prior).sum())
    # A client with no more rows than coefficients could follow any of them, and Laplace's
    # approximation fails there. Predictions are for rows, so half of these have to be elsewhere.
    # Quadrature by a number of points goes with one coefficient.
    by_points = options.quadrature not in ("auto", "laplace")
    if n_varying < 2 or few_rows(table.sizes, n_varying * family.n_outputs) or by_points:
        return None
    rng = np.random.default_rng(0)  # the same choice in every fit
    table = _sample_clients(table, rng)
    if _link_seconds(table, family) > _MOST_TRIAL_SECONDS:
        return None
    folds = _assign_folds(table, rng)
    training = [folds != k for k in range(_FOLDS)]
    if table.n_clients < 2 or not all(family.is_complete(table.y[rows]) for rows in training):
        return None
    options = options.replaced(
        quadrature="laplace",
        uncertainty="plug_in",
        tol=max(options.tol, _LOOSE_TOL),
        max_iter=min(options.max_iter, _ITERATIONS),
        n_jobs=1,  # so few rows take less time than workers
    )
    try:
        with np.errstate(all="ignore"):  # of slopes that rows say nothing of
            return _fold_losses(table, folds, prior, family, options)
    except ValueError:  # a column may be constant in the rows that are left
        return None


def _fold_losses(table, folds, prior, family, options):
    """Mean held-out losses, over as many folds as it takes until one is clearly smaller."""
    tables = {"intercept": table.intercept_only, "all": table}
    losses = np.empty((2, len(folds)))
    weights = np.ones(len(folds)) if table.weights is None else table.weights
    for k in range(_FOLDS):
        test = folds == k
        for i, candidate in enumerate(tables.values()):
            estimates = fit_link(_select_rows(candidate, ~test), prior, family, options)
            rows = _select_rows(candidate, test)
            law = table_law(estimates, rows)
            losses[i, test] = -averaged_log_likelihoods(estimates.family, law, rows.y)
        tested = folds <= k
        if _is_decisive(losses[:, tested], weights[tested]):
            break
    means = np.average(losses[:, tested], axis=1, weights=weights[tested])
    return dict(zip(tables, means.tolist(), strict=True))


def _sample_clients(table, rng):
    """The rows of at most `_CLIENTS` clients with several rows, drawn in proportion to these."""
    sizes = np.where(table.sizes > 1, table.sizes, 0)
    chosen = np.flatnonzero(sizes)
    if len(chosen) > _CLIENTS:
        chosen = rng.choice(len(sizes), _CLIENTS, replace=False, p=sizes / sizes.sum())
        chosen.sort()
    table = _select_rows(table, np.isin(table.codes, chosen))
    return table._replace(codes=np.searchsorted(chosen, table.codes), n_clients=len(chosen))


def _assign_folds(table, rng):
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


def _select_rows(table, rows):
    """The table with some of its rows."""
    parts = {name: getattr(table, name) for name in ("columns", "y", "codes", "weights", "offset")}
    return table._replace(
        **{name: part if part is None else part[rows] for name, part in parts.items()}
    )


def _is_decisive(losses, weights):
    """Whether losses (2, n) show which is smaller, or that varying slopes would gain little."""
    intercept, all_vary = losses
    differences = all_vary - intercept
    mean = np.average(differences, weights=weights)
    error = np.sqrt(np.sum((weights * (differences - mean)) ** 2)) / weights.sum()
    little = 2 * _LEAST_GAIN * np.average(intercept, weights=weights)
    return abs(mean) > _CLEAR_ERRORS * error or mean - _CLEAR_ERRORS * error > -little
