"""Parts of a stack: what may predict for known and for new clients, and how well it does."""

import math
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.special import stdtrit
from sklearn import config_context
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from pfl_sklearn.compose._out_of_fold import (
    Named,
    fit_all,
    log_odds,
    out_of_fold,
    out_of_two_folds,
    row_losses,
    tested,
)
from pfl_sklearn.compose._rows import Table

# The final estimator on all it gets, or on columns of X alone; models of these without clients.
STACK, FINAL, POOLED, MEAN = "stack", "final_estimator", "pooled", "mean"
_LEVEL = 0.1


class Parts(NamedTuple):
    """Estimators behind the base estimators with their rows, and losses (n,), by name.

    Parts with losses are in order of preference. `warned` has what base estimators warned of in
    every fold, as texts and categories by name.
    """

    finals: dict[str, tuple[Named, Table]]
    losses: dict[str, np.ndarray]
    warned: dict[str, list[tuple[str, type[Warning]]]] = {}

    def means(self, weights):
        """Mean loss of each part."""
        return {name: np.average(rows, weights=weights) for name, rows in self.losses.items()}

    def chosen(self, weights, codes=None):
        """Name of the part that predicts; the stack without losses."""
        return first_as_good(self.losses, weights, codes) if self.losses else STACK


def first_as_good(losses, weights, codes=None):
    """Name of the first of some losses (n,) that is not clearly worse than the best of all.

    Clearly: a one-sided test of the mean difference at level 0.1. Its errors are clustered by the
    clients of the rows if `codes` (n,) are given, as is right for new clients. Known clients are
    the ones that predictions are for: rows are drawn, not clients.
    """
    means = {name: np.average(rows, weights=weights) for name, rows in losses.items()}
    best = min(means, key=means.__getitem__)
    if codes is None or codes.max() == 0:
        codes = np.arange(len(losses[best]))
    quantile = stdtrit(codes.max(), 1 - _LEVEL)
    for name, rows in losses.items():
        gap = means[name] - means[best]
        if gap <= quantile * _clustered_error(rows - losses[best] - gap, codes, weights):
            return name
    return best


def _clustered_error(residuals, codes, weights):
    """Standard error of a mean, from residuals (n,) whose clusters these are."""
    weights = np.ones(len(residuals)) if weights is None else weights
    sums = np.bincount(codes, residuals * weights)
    return np.linalg.norm(sums) / weights.sum() * math.sqrt(len(sums) / (len(sums) - 1))


class Fitted(NamedTuple):
    """Base estimators by name, and the part of known and of new clients with what is behind it."""

    bases: dict[str, Any]
    known: tuple[str, Any]
    new: tuple[str, Any]


def without_clients(classes, n_columns):
    """Models of columns of `X` that know no clients; a linear one only if there are any."""
    plain = DummyRegressor() if classes is None else DummyClassifier(strategy="prior")
    found = []
    if n_columns:
        linear = LinearRegression() if classes is None else LogisticRegression()
        with config_context(enable_metadata_routing=True):
            scaler = StandardScaler().set_fit_request(sample_weight=True)
            linear.set_fit_request(sample_weight=True)
        found.append(Named(POOLED, make_pipeline(scaler, linear), classes))
    return [*found, Named(MEAN, plain, classes)]


def parts_of(named, final, plain, table, own, folds, fallback, n_jobs):
    """Parts of one kind of clients, whose folds these are.

    Parameters
    ----------
    named : list of Named
        Base estimators.
    final : Named
    plain : list of Named
        Models that know no clients.
    table, own : Table
        Rows of the base estimators, and of the final one on columns of `X` alone.
    folds : list of (train, test)
    fallback : bool
        Whether other parts than the stack are of interest.
    n_jobs : int or None

    Returns
    -------
    Parts
    """
    warned = {}
    found = out_of_fold(named, [table] * len(named), folds, n_jobs, warned)
    finals = {STACK: (final, own._replace(X=stacked(named, found, own.X)))}
    if not fallback:
        return Parts(finals, {}, warned)
    others = {each.name: (each, own) for each in plain}
    if own.X.shape[1]:
        others[FINAL] = final, own
    done = out_of_fold(*zip(*others.values(), strict=True), folds, n_jobs) if others else []
    by_name = dict(zip(others, done, strict=True))
    by_name |= {each.name: part for each, part in zip(named, found, strict=True)}
    if len(folds) > 2:  # else nothing is outside of two
        by_name[STACK] = _stack_outputs(named, final, table, own, found, folds, n_jobs)
    losses = {name: row_losses(part, table.y, final.classes) for name, part in by_name.items()}
    return Parts(finals | others, losses, warned)


def _stack_outputs(named, final, table, own, found, folds, n_jobs):
    """Out-of-fold outputs of all estimators together.

    The rows that the final estimator learns from come from fits that saw nothing of the fold it is
    tested on. Otherwise clients of few rows would give away what is to be predicted: of a client
    with two rows, the prediction for one is made of the other.
    """
    pairs, inside = [], out_of_two_folds(named, table, folds, n_jobs)
    for (train, test), trained in zip(folds, inside, strict=True):
        known, new = own.take(train), own.take(test)
        first = known._replace(X=stacked(named, trained, known.X))
        pairs.append((first, new._replace(X=stacked(named, [part[test] for part in found], new.X))))
    return tested(final, pairs, folds, n_jobs)


def stacked(named, found, columns):
    """Predictions, as responses or log odds, beside other columns: a frame."""
    beside = {}
    for each, values in zip(named, found, strict=True):
        if each.classes is None:
            beside[each.name] = values
            continue
        beside |= dict(zip(names_of(each), log_odds(values).T, strict=True))
    return pd.DataFrame(beside, index=columns.index).join(columns)


def names_of(named):
    """Names of the columns that an estimator's predictions make."""
    if named.classes is None or len(named.classes) == 2:
        return [named.name]
    return [f"{named.name}: {label}" for label in named.classes[1:]]


def fit_chosen(chosen, parts, named, table, n_jobs):
    """Fit to all rows what predicts for known and for new clients.

    Parameters
    ----------
    chosen : dict of str to str
        Name of the part of "known" and, if there are several clients, of "new" ones.
    parts : dict of str to Parts
        The same for what to choose from.
    named : list of Named
    table : Table
    n_jobs : int or None

    Returns
    -------
    Fitted
    """
    tasks, behind = {}, {}
    for kind, name in chosen.items():
        used = [each for each in named if name in (STACK, each.name)]
        tasks |= {("base", each.name): (each, table) for each in used}
        if name in parts[kind].finals:
            behind[kind] = name, kind if name == STACK else "both"
            tasks[behind[kind]] = parts[kind].finals[name]
    done = dict(zip(tasks, fit_all(*zip(*tasks.values(), strict=True), n_jobs), strict=True))
    bases = {each.name: done["base", each.name] for each in named if ("base", each.name) in done}
    ends = {kind: (name, done.get(behind.get(kind))) for kind, name in chosen.items()}
    return Fitted(bases, ends["known"], ends.get("new", ends["known"]))
