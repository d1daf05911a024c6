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
    fit_pairs,
    log_odds,
    out_of_fold,
    outside_of,
    row_losses,
    tested,
)
from pfl_sklearn.compose._rows import Table

# The final estimator on all it gets, or on columns of X alone; models of these without clients.
STACK, FINAL, POOLED, MEAN = "stack", "final_estimator", "pooled", "mean"
_LEVEL, _EARLY_LEVEL = 0.1, 0.01
_EARLY_ROWS = 30  # of the first fold, for it to decide


class Parts(NamedTuple):
    """Estimators behind the base estimators with their rows, by name, and what predicts.

    `losses` are means, in order of preference; `chosen` is the name of the part that predicts.
    `warned` has what base estimators warned of in every fold, as texts and categories by name.
    """

    finals: dict[str, tuple[Named, Table]]
    losses: dict[str, float]
    chosen: str
    warned: dict[str, list[tuple[str, type[Warning]]]]


def first_as_good(losses, weights, codes=None, level=_LEVEL):
    """Name of the first of some losses (n,) that is not clearly worse than the best of all.

    Clearly: a one-sided test of the mean difference at a level. Its errors are clustered by the
    clients of the rows if `codes` (n,) are given, as is right for new clients. Known clients are
    the ones that predictions are for: rows are drawn, not clients.
    """
    means = {name: np.average(rows, weights=weights) for name, rows in losses.items()}
    best = min(means, key=means.__getitem__)
    if codes is None or codes.max() == 0:
        codes = np.arange(len(losses[best]))
    if codes.max() == 0:  # one row: nothing is clear
        return next(iter(losses))
    quantile = stdtrit(codes.max(), 1 - level)
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


def parts_of(named, final, plain, table, own, folds, codes, fallback, n_jobs):
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
    codes : ndarray of shape (n,) or None
        Clients of the rows, if clients are drawn: the folds are of new ones.
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
        return Parts(finals, {}, STACK, warned)
    others = {each.name: (each, own) for each in plain}
    if own.X.shape[1]:
        others[FINAL] = final, own
    done = out_of_fold(*zip(*others.values(), strict=True), folds, n_jobs) if others else []
    by_name = dict(zip(others, done, strict=True))
    by_name |= {each.name: part for each, part in zip(named, found, strict=True)}
    losses = {name: row_losses(part, table.y, final.classes) for name, part in by_name.items()}
    means = {name: np.average(rows, weights=table.weights) for name, rows in losses.items()}
    plainest = sorted((each.name for each in plain), key=means.__getitem__)
    losses = {name: losses[name] for name in (*plainest, *losses)}
    chosen = first_as_good(losses, table.weights, codes)
    if len(folds) > 2:  # else nothing is outside of two
        stack = _Stack(named, final, table, own, found, folds, {}, n_jobs)
        judge = _judged_for_known if codes is None else _judged_for_new
        means[STACK], wins = judge(stack, losses, codes)
        chosen = STACK if wins else chosen
    return Parts(finals | others, means, chosen, warned)


class _Stack(NamedTuple):
    """All estimators together, to be tested on folds; `pairs` keeps fits to the rest of two."""

    named: list[Named]
    final: Named
    table: Table
    own: Table
    found: list[np.ndarray]  # out-of-fold outputs of the base estimators
    folds: list[tuple[np.ndarray, np.ndarray]]
    pairs: dict[tuple[int, int], list[np.ndarray]]
    n_jobs: int | None

    def losses(self, tests, honest=True):
        """Losses (n,) on the rows of some folds; NaN on others.

        The rows that the final estimator learns from come from fits that saw nothing of the fold it
        is tested on. Otherwise (not `honest`) clients of few rows would give away what is to be
        predicted: of a client with two rows, the prediction for one is made of the other.
        """
        tables = []
        if honest:
            fit_pairs(self.named, self.table, self.folds, tests, self.pairs, self.n_jobs)
        for k in tests:
            train, test = self.folds[k]
            known, new = self.own.take(train), self.own.take(test)
            if honest:
                inside = outside_of(k, self.folds, self.pairs, len(self.table.y))
            else:
                inside = [part[train] for part in self.found]
            outside = [part[test] for part in self.found]
            tables.append(
                (
                    known._replace(X=stacked(self.named, inside, known.X)),
                    new._replace(X=stacked(self.named, outside, new.X)),
                )
            )
        losses = np.full(len(self.table.y), np.nan)
        parts = tested(self.final, tables, self.n_jobs)
        for k, part in zip(tests, parts, strict=True):
            rows = self.folds[k][1]
            losses[rows] = row_losses(part, self.table.y[rows], self.final.classes)
        return losses


def _judged_for_known(stack, losses, _):
    """Mean loss of the stack for known clients, and whether it predicts.

    Losses (n,) are those of the other parts. A first fold of 30 rows decides if the stack is no
    better there than the best of these, or clearly better than each at level 0.01. Its mean loss is
    then that of the best, and the difference in this fold.
    """
    weights, rows = stack.table.weights, stack.folds[0][1]
    means = {name: np.average(each, weights=weights) for name, each in losses.items()}
    rival = min(means, key=means.__getitem__)
    own = stack.losses([0])
    some = None if weights is None else weights[rows]
    gain = np.average((losses[rival] - own)[rows], weights=some)
    first = {name: each[rows] for name, each in {**losses, STACK: own}.items()}
    wins = gain > 0 and first_as_good(first, some, level=_EARLY_LEVEL) == STACK
    if len(rows) >= _EARLY_ROWS and (gain <= 0 or wins):
        return means[rival] - gain, wins
    own = np.where(np.isnan(own), stack.losses(range(1, len(stack.folds))), own)
    wins = first_as_good({**losses, STACK: own}, weights) == STACK
    return np.average(own, weights=weights), wins


def _judged_for_new(stack, losses, codes):
    """Mean loss of the stack for new clients, of these `codes` (n,), and whether it predicts.

    A first look takes the base estimators' fits as they are, which flatters the stack. Only if it
    would win by that, it is tested on clients that nothing in it has seen; else its loss is NaN.
    """
    weights = stack.table.weights
    for honest in (False, True):
        own = stack.losses(range(len(stack.folds)), honest)
        if first_as_good({**losses, STACK: own}, weights, codes) != STACK:
            return np.average(own, weights=weights) if honest else np.nan, False
    return np.average(own, weights=weights), True


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
