"""Parts of a stack: what may predict for known and for new clients, and how well it does."""

from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from sklearn import config_context
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from pfl_sklearn.compose._inner_tables import Table
from pfl_sklearn.compose._loss_comparison import first_as_good, judged, mean_losses
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

# The final estimator on all it gets, or on columns of X alone; models of these without clients.
STACK, FINAL, POOLED, MEAN = "stack", "final_estimator", "pooled", "mean"
_FEWEST_CLIENTS = 10  # whose losses say which of the plain models is better


class Parts(NamedTuple):
    """Estimators behind the base estimators with their rows, by name, and what predicts.

    `losses` are means; `chosen` is the name of the part that predicts.
    `warned` has what base estimators warned of in every fold, as texts and categories by name.
    """

    finals: dict[str, tuple[Named, Table]]
    losses: dict[str, float]
    chosen: str
    warned: dict[str, list[tuple[str, type[Warning]]]]


class Fitted(NamedTuple):
    """Base estimators by name, and the part of known and of new clients with what is behind it."""

    bases: dict[str, Any]
    known: tuple[str, Any]
    new: tuple[str, Any]


def plain_models(classes, n_columns):
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
    means = mean_losses(losses, table.weights)
    plainest = [each.name for each in plain]
    if codes is not None and codes.max() + 1 >= _FEWEST_CLIENTS:
        plainest.sort(key=means.__getitem__)
    losses = {name: losses[name] for name in (*plainest, *losses)}
    chosen = first_as_good(losses, table.weights, codes)
    if len(folds) > 2:  # else nothing is outside of two
        stack = _Stack(named, final, table, own, found, folds, {}, n_jobs)
        tests = [test for _, test in folds]
        means[STACK], wins = judged(STACK, stack.losses, losses, tests, table.weights, codes)
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

    def losses(self, k, rough=False):
        """Losses on the test rows of a fold.

        The rows that the final estimator learns from come from fits that saw nothing of the fold.
        Otherwise clients of few rows would give away what is to be predicted: of a client with two
        rows, the prediction for one is made of the other. If it may be `rough`, they are taken
        nevertheless, since they are there already.
        """
        train, test = self.folds[k]
        if rough:
            inside = [part[train] for part in self.found]
        else:
            fit_pairs(self.named, self.table, self.folds, k, self.pairs, self.n_jobs)
            inside = outside_of(k, self.folds, self.pairs, len(self.table.y))
        outside = [part[test] for part in self.found]
        known, new = self.own.take(train), self.own.take(test)
        found = tested(
            self.final,
            known._replace(X=stacked(self.named, inside, known.X)),
            new._replace(X=stacked(self.named, outside, new.X)),
        )
        return row_losses(found, new.y, self.final.classes)


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
