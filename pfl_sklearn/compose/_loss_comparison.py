"""Choices by out-of-fold losses: which parts are clearly worse, and when that is clear."""

import math
from functools import partial

import numpy as np
from scipy.special import stdtrit

from pfl_sklearn._float_range import unit_near

_LEVEL, _EARLY_LEVEL = 0.1, 0.025
_FEWEST_ROWS = 30  # that decide before the last fold


def first_as_good(losses, weights, codes=None, level=_LEVEL):
    """Name of the first of some losses (n,) that is not clearly worse than the best of all.

    Clearly: a one-sided test of the mean difference at a level. Its errors are clustered by the
    clients of the rows if `codes` (n,) are given, as is right for new clients. Known clients are
    the ones that predictions are for: rows are drawn, not clients.
    """
    means = mean_losses(losses, weights)
    best = min(means, key=means.__getitem__)
    if codes is None or codes.max() == 0:
        codes = np.arange(len(losses[best]))
    if codes.max() == 0:  # one row: nothing is clear
        return next(iter(losses))
    quantile = stdtrit(codes.max(), 1 - level)
    for name, rows in losses.items():
        gap = means[name] - means[best]
        if not math.isfinite(gap):  # squares of a candidate that is far off are infinite
            continue
        if gap <= quantile * _clustered_error(rows - losses[best] - gap, codes, weights):
            return name
    return best


def mean_losses(losses, weights):
    """Mean of each of some losses (n,), by name."""
    with np.errstate(over="ignore"):  # a candidate may be far off
        return {name: float(np.average(rows, weights=weights)) for name, rows in losses.items()}


def _clustered_error(residuals, codes, weights):
    """Standard error of a mean, from residuals (n,) whose clusters these are."""
    weights = np.ones(len(residuals)) if weights is None else weights
    sums = np.bincount(codes, residuals * weights)
    unit = unit_near(np.abs(sums).max())  # losses are squares already
    size = unit * np.linalg.norm(sums / unit)
    return size / weights.sum() * math.sqrt(len(sums) / (len(sums) - 1))


def judged(name, losses_in, losses, tests, weights, codes=None):
    """Whether one more part is clearly better than others, tested fold after fold until that shows.

    The part is in before the last fold if it is clearly better than each of the others at level
    0.025, of which four looks make 0.1. It is out if it is clearly worse than the best of them at
    level 0.1 or, after two folds, worse than one of them. Both take 30 rows, and several clients if
    these are drawn. All folds decide by :func:`first_as_good`. Before that, a rough look at two
    folds may rule the part out.

    Parameters
    ----------
    name : str
        Of the part, which comes after all others.
    losses_in : callable
        Losses of the part on the test rows of a fold, whose position it gets. With ``rough=True``
        they may be off, but cheap to have.
    losses : dict of str to ndarray of shape (n,)
        Losses of the others, in order of preference.
    tests : list of ndarray
        Test rows of the folds, a partition.
    weights : ndarray of shape (n,) or None
    codes : ndarray of shape (n,) or None
        Clients of the rows, if clients are drawn.

    Returns
    -------
    loss : float
        Mean loss of the part. Where some folds decided, that of the best other one times the ratio
        of the two in these folds.
    wins : bool
    """
    given = losses, weights, codes
    _, loss, wins = _until_clear(name, partial(losses_in, rough=True), tests[:2], *given)
    if wins is not False:
        own, loss, wins = _until_clear(name, losses_in, tests[:-1], *given)
    if wins is None:
        own[tests[-1]] = losses_in(len(tests) - 1)
        loss = float(np.average(own, weights=weights))
        wins = first_as_good({**losses, name: own}, weights, codes) == name
    return loss, wins


def _until_clear(name, losses_in, tests, losses, weights, codes):
    """Losses (n,) of a part in folds until it is in or out; its mean loss; and which, or None."""
    means = mean_losses(losses, weights)
    rival = min(means, key=means.__getitem__)
    own = np.full(len(losses[rival]), np.nan)
    for k, test in enumerate(tests):
        own[test] = losses_in(k)
        rows = np.flatnonzero(~np.isnan(own))
        some = {each: values[rows] for each, values in {**losses, name: own}.items()}
        drawn = None if codes is None else np.unique(codes[rows], return_inverse=True)[1]
        given = None if weights is None else weights[rows]
        one_client = drawn is not None and not drawn.any()
        if _effective_rows(given, len(rows)) < _FEWEST_ROWS or one_client:
            continue
        here = mean_losses(some, given)
        pair = {name: some[name], rival: some[rival]}
        wins = first_as_good(some, given, drawn, _EARLY_LEVEL) == name
        worse = first_as_good(pair, given, drawn) == rival
        if wins or worse or (k > 0 and here[name] > min(here.values())):
            loss = here[name]
            if here[rival]:
                loss *= means[rival] / here[rival]
            return own, loss, wins
    return own, None, None


def _effective_rows(weights, n_rows):
    """Number of rows of equal weight that have as exact a mean (Kish)."""
    return n_rows if weights is None else weights.sum() ** 2 / (weights**2).sum()
