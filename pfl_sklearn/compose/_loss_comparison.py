"""Comparison of out-of-fold losses: which candidates are clearly worse, and when that is clear."""

import math
from functools import partial

import numpy as np
from scipy.special import stdtrit

from pfl_sklearn._float_range import unit_near

_LEVEL = 0.1  # one-sided: a candidate gives way to a later one that is better at this level
# By which a candidate may be in before the last fold. With five folds there are four such looks;
# by Bonferroni their chances of a false alarm add up to at most 0.1.
_EARLY_LEVEL = 0.025
_FEWEST_ROWS = 30  # before the last fold; squared errors are too skew for a t test of fewer


def first_as_good(losses, weights, codes=None, level=_LEVEL):
    """Name of the first candidate whose losses (n,) are not clearly worse than the best one's.

    Clearly: a one-sided test of the mean difference at a level. Its errors are clustered by the
    clients of the rows if `codes` (n,) are given, as is right for new clients. Known clients are
    the ones that predictions are for: rows are drawn, not clients.
    """
    means = mean_losses(losses, weights)
    best = min(means, key=means.__getitem__)
    if codes is None or codes.max() == 0:  # rows of one client are clusters of their own
        codes = np.arange(len(losses[best]))
    if codes.max() == 0:  # one row: nothing is clear
        return next(iter(losses))
    quantile = stdtrit(codes.max(), 1 - level)  # as many degrees of freedom as clusters less one
    for name, rows in losses.items():
        gap = means[name] - means[best]
        if not math.isfinite(gap):  # squares of a candidate that is far off are infinite
            continue
        if gap <= quantile * _clustered_error(rows - losses[best] - gap, codes, weights):
            return name
    return best


def mean_losses(losses, weights):
    """Mean of each candidate's losses (n,), by name."""
    with np.errstate(over="ignore"):  # a candidate may be far off
        return {name: float(np.average(rows, weights=weights)) for name, rows in losses.items()}


def _clustered_error(residuals, codes, weights):
    """Cluster-robust standard error (CR1) of a mean, from residuals (n,)."""
    weights = np.ones(len(residuals)) if weights is None else weights
    sums = np.bincount(codes, residuals * weights)
    unit = unit_near(np.abs(sums).max())  # losses are squares already, and are squared again here
    size = unit * np.linalg.norm(sums / unit)
    return size / weights.sum() * math.sqrt(len(sums) / (len(sums) - 1))


def judged(name, losses_in, losses, tests, weights, codes=None):
    """Test fold by fold whether one more candidate is clearly better than the others.

    It is in before the last fold if it is clearly better than each of the others at level 0.025,
    of which four looks make 0.1. It is out if it is clearly worse than the best of them at level
    0.1 or, after two folds, worse than one of them. Both take 30 rows, and several clients if
    these are drawn. All folds decide by :func:`first_as_good`. Before that, a rough look at two
    folds may rule it out, which needs no more fits of base estimators. On radon and contraception,
    where it does, all folds would take 1.8 to 2.8 times as long.

    Parameters
    ----------
    name : str
        Of the candidate, which comes after all others.
    losses_in : callable
        Its losses on the test rows of a fold, whose position it gets. With ``rough=True`` they may
        be off, but cheap to have.
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
        Its mean loss. Where some folds decided, that of the best other one times the ratio of the
        two in these folds.
    wins : bool
    """
    data = losses, weights, codes
    _, loss, wins = _until_clear(name, partial(losses_in, rough=True), tests[:2], *data)
    if wins is not False:  # what has seen the tested rows may rule a candidate out, but not in
        own, loss, wins = _until_clear(name, losses_in, tests[:-1], *data)
    if wins is None:
        own[tests[-1]] = losses_in(len(tests) - 1)
        loss = float(np.average(own, weights=weights))
        wins = first_as_good({**losses, name: own}, weights, codes) == name
    return loss, wins


def _until_clear(name, losses_in, tests, losses, weights, codes):
    """Test a candidate in folds: its losses (n,), mean loss, and whether it wins (None: open)."""
    means = mean_losses(losses, weights)
    rival = min(means, key=means.__getitem__)
    own = np.full(len(losses[rival]), np.nan)
    for k, test in enumerate(tests):
        own[test] = losses_in(k)
        rows = np.flatnonzero(~np.isnan(own))
        tested = {each: values[rows] for each, values in {**losses, name: own}.items()}
        clients = None if codes is None else np.unique(codes[rows], return_inverse=True)[1]
        row_weights = None if weights is None else weights[rows]
        one_client = clients is not None and not clients.any()  # a cluster has no standard error
        if _effective_rows(row_weights, len(rows)) < _FEWEST_ROWS or one_client:
            continue
        tested_means = mean_losses(tested, row_weights)
        wins = first_as_good(tested, row_weights, clients, _EARLY_LEVEL) == name
        pair = {name: tested[name], rival: tested[rival]}
        worse = first_as_good(pair, row_weights, clients) == rival
        # One that is behind after two folds would have to be clearly ahead of all in the end.
        if wins or worse or (k > 0 and tested_means[name] > min(tested_means.values())):
            loss = tested_means[name]
            if tested_means[rival]:  # else both are 0, or no ratio says anything
                # Folds differ in how hard they are; the rival's loss in all of them is known.
                loss *= means[rival] / tested_means[rival]
            return own, loss, wins
    return own, None, None


def _effective_rows(weights, n_rows):
    """Kish's effective sample size of weighted rows."""
    return n_rows if weights is None else weights.sum() ** 2 / (weights**2).sum()
