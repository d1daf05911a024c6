"""Out-of-fold predictions of estimators, some of which take client ids, and their losses."""

import itertools
import math
import warnings
from inspect import signature
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
from sklearn import config_context
from sklearn.base import clone
from sklearn.model_selection import GroupKFold, check_cv

from pfl_sklearn._nesting import final_estimator, predicting_estimator, takes_groups
from pfl_sklearn._parallel import map_batches
from pfl_sklearn.compose._frozen_estimators import is_frozen, own_copy
from pfl_sklearn.compose._inner_tables import as_groups
from pfl_sklearn.model_selection import ClientKFold

SMALLEST = 1e-6  # probability that a loss or log odds are computed of, at least
_SLACK = 1e-3  # of a sum of probabilities, which may be of single precision


class Named(NamedTuple):
    """An estimator and its name; for a classifier, the sorted classes of all rows."""

    name: str
    estimator: Any
    classes: np.ndarray | None


def prepared(estimator, seed):
    """Clone that draws from a seed, unless it has its own, and gives new clients the population.

    Private estimators get no seed, with which anyone could remove their noise.
    """
    if is_frozen(estimator):
        return own_copy(estimator)
    found = clone(estimator)
    rng, given = np.random.default_rng(seed), found.get_params()
    for name in sorted(given):
        prefix, _, last = name.rpartition("__")
        if last == "random_state" and given[name] is None and not _is_private(prefix, given):
            found.set_params(**{name: int(rng.integers(2**31))})
        if last == "unseen":
            found.set_params(**{name: "population"})
    return found


def _is_private(prefix, params):
    """Whether the parameters behind a prefix ask for noise."""
    at = f"{prefix}__" if prefix else ""
    epsilon = params.get(f"{at}epsilon", math.inf)
    return epsilon != math.inf or params.get(f"{at}noise_multiplier") is not None


def fit(named, table):
    """Fitted clone of an estimator."""
    given = {}
    if table.weights is not None:
        given["sample_weight"] = table.weights
    with config_context(enable_metadata_routing=True):  # of pipelines and searches
        if takes_groups(named.estimator, "fit"):
            given["groups"] = as_groups(table.ids)
        return clone(named.estimator).fit(table.X, table.y, **given)


def outputs(named, fitted, X, ids):
    """What a fitted estimator predicts: responses (n,), or probabilities (n, K) of the classes.

    Raises
    ------
    ValueError
        If it predicts NaN, no probabilities, or classes in another order.
    """
    predicting = predicting_estimator(fitted)
    if named.classes is None:
        found = _numbers(named, _call(named, predicting, "predict", X, ids), (len(X),))
    else:
        given = {"integrate": True} if _averages(predicting, ids) else {}
        made = _call(named, predicting, "predict_proba", X, ids, given)
        found = _of_all_classes(named, predicting, made, len(X))
    return found


def _averages(fitted, ids):
    """Whether probabilities can be averages over what is not known of the rows' clients.

    After a fit of one client nothing is known of how new ones differ.
    """
    if "integrate" not in signature(fitted.predict_proba).parameters:
        return False
    core = final_estimator(fitted)
    if not np.isnan(core.prior_.covariance).any():
        return True
    return bool(np.isin(ids, getattr(core, "clients_", ())).all())


def _numbers(named, found, shape):
    """Finite numbers of this shape."""
    what = f"{named.name!r} ({type(named.estimator).__name__}) predicted"
    found = np.asarray(found)
    if found.shape != shape:
        raise ValueError(f"{what} an array of shape {found.shape}; expected {shape}.")
    casting = "safe" if found.dtype.kind == "c" else "unsafe"  # complex numbers have no order
    try:
        found = found.astype(np.float64, casting=casting, copy=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what} {found.ravel()[0]!r}; expected real numbers.") from error
    bad = ~np.isfinite(found.reshape(len(found), -1)).all(axis=1)
    if bad.any():
        raise ValueError(
            f"{what} {found[bad][0].tolist()!r} for {bad.sum()} of {len(found)} rows; expected "
            "finite numbers."
        )
    return found


def with_std(fitted, X, ids):
    """Predictions (n,) of a fitted estimator and their standard deviations (n,).

    Raises
    ------
    ValueError
        If it gives none.
    """
    predicting = predicting_estimator(fitted)
    try:
        named = Named("final_estimator", fitted, None)
        return _call(named, predicting, "predict", X, ids, {"return_std": True}, ValueError)
    except TypeError as error:
        raise ValueError(
            f"return_std=True needs a final estimator whose predict takes it; "
            f"{type(fitted).__name__}.predict does not."
        ) from error


def _call(named, estimator, method, X, ids, given=None, caught=(TypeError, ValueError)):
    with config_context(enable_metadata_routing=True):
        groups = {"groups": as_groups(ids)} if takes_groups(estimator, method) else {}
        try:
            return getattr(estimator, method)(X, **groups, **(given or {}))
        except caught as error:
            raise _kind_of(error)(
                f"{named.name!r} ({type(estimator).__name__}) failed to predict: {error}"
            ) from error


def _kind_of(error):
    return TypeError if isinstance(error, TypeError) else ValueError


def _of_all_classes(named, fitted, probabilities, n_rows):
    """Probabilities (n, K) of all classes; those that a fold lacked have none."""
    own = np.asarray(getattr(fitted, "classes_", ()))
    if not len(own):
        raise ValueError(
            f"{named.name!r} ({type(named.estimator).__name__}) has no classes_; expected a "
            "classifier that says which class each probability is of."
        )
    where = np.searchsorted(named.classes, own).clip(max=len(named.classes) - 1)
    if not np.array_equal(named.classes[where], own) or (np.diff(where) <= 0).any():
        raise ValueError(
            f"{named.name!r} ({type(named.estimator).__name__}) has classes_={own.tolist()}; "
            f"expected those of y in sorted order, {named.classes.tolist()}."
        )
    probabilities = _numbers(named, probabilities, (n_rows, len(own)))
    off = (probabilities < -_SLACK).any(axis=1) | (np.abs(probabilities.sum(axis=1) - 1) > _SLACK)
    if off.any():
        raise ValueError(
            f"{named.name!r} ({type(named.estimator).__name__}) predicted probabilities "
            f"{probabilities[off][0].tolist()!r} for {off.sum()} of {n_rows} rows; expected "
            "numbers from 0 on with sum 1."
        )
    found = np.zeros((n_rows, len(named.classes)))
    found[:, where] = probabilities
    return found


def out_of_fold(named, tables, folds, n_jobs, warned=None):
    """Outputs of each estimator for the rows of its table, by fits to the other folds.

    Warnings of the folds are kept back. Fits to all rows give them again, if there are any.

    Parameters
    ----------
    named : list of Named
    tables : list of Table
        One for each estimator, with the same rows.
    folds : list of (train, test)
        The test rows are a partition of all.
    n_jobs : int or None
    warned : dict or None
        Gets, by the name of an estimator, its first warnings of each category that every fold gave.

    Returns
    -------
    list of ndarray of shape (n,) or (n, K)
    """
    tasks = [
        (train, test, each, table)
        for each, table in zip(named, tables, strict=True)
        for train, test in folds
    ]
    done, found = iter(map_batches(_test_outputs, tasks, n_jobs)), []
    for each in named:
        parts, told = zip(*[next(done) for _ in folds], strict=True)
        found.append(_in_order(parts, [test for _, test in folds]))
        if warned is not None:
            always = set.intersection(*[{category for category, _ in fold} for fold in told])
            first = dict(reversed(told[0]))
            warned[each.name] = [(first[category], category) for category in always]
    return found


def out_of_two_folds(named, table, folds, n_jobs):
    """Outputs of each estimator for the rows outside of one fold, by fits to the rest.

    For each fold a, outputs for a row of another fold b are of fits to the rows of neither: what is
    learned from them knows nothing of fold a.

    Parameters
    ----------
    named : list of Named
    table : Table
    folds : list of (train, test)
    n_jobs : int or None

    Returns
    -------
    list of list of ndarray
        For each fold and each estimator, outputs (n_train, ...) for the fold's training rows.
    """
    pairs = {}
    for k in range(len(folds)):
        fit_pairs(named, table, folds, k, pairs, n_jobs)
    return [outside_of(k, folds, pairs, len(table.y)) for k in range(len(folds))]


def fit_pairs(named, table, folds, k, pairs, n_jobs):
    """Add to `pairs` what estimators say of the rows of two folds, by fits to the rest.

    Those pairs of fold k are added that are not there yet. Each has a list of outputs, by
    estimator, for the rows of both folds in ascending order.
    """
    every = itertools.combinations(range(len(folds)), 2)
    new = [pair for pair in every if k in pair and pair not in pairs]
    tasks = [
        (np.intersect1d(folds[a][0], folds[b][0]), _rows_of_pair(folds, (a, b)), each, table)
        for a, b in new
        for each in named
    ]
    done = iter(map_batches(_test_outputs, tasks, n_jobs))
    pairs.update({pair: [next(done)[0] for _ in named] for pair in new})


def outside_of(k, folds, pairs, n_rows):
    """Outputs (n_train, ...) of each estimator for the training rows of a fold, from its pairs."""
    found = []
    own = {pair: parts for pair, parts in pairs.items() if k in pair}
    for parts in zip(*own.values(), strict=True):
        values = np.empty((n_rows, *parts[0].shape[1:]))
        for pair, part in zip(own, parts, strict=True):
            other = folds[sum(pair) - k][1]
            values[other] = part[np.searchsorted(_rows_of_pair(folds, pair), other)]
        found.append(values[folds[k][0]])
    return found


def _rows_of_pair(folds, pair):
    return np.sort(np.concatenate([folds[k][1] for k in pair]))


def tested(named, train, test):
    """Outputs for the rows of one table, by a fit to another."""
    return map_batches(_tested, [(test.y, named, train, test)])[0][0]


def _tested(_, named, train, test):
    """Outputs for the test rows, and the categories and texts of the warnings of the fit."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        one_class = named.classes is not None and len(np.unique(train.y)) == 1
        if one_class and not is_frozen(named.estimator):  # too few rows to learn from
            found = np.tile((named.classes == train.y[0]).astype(float), (len(test.y), 1))
        else:
            found = _fitted_outputs(named, train, test)
    return found, [(each.category, str(each.message)) for each in told]


def _fitted_outputs(named, train, test):
    try:
        fitted = fit(named, train)
    except (TypeError, ValueError) as error:
        raise _kind_of(error)(
            f"in one of the folds {named.name!r} ({type(named.estimator).__name__}) failed on "
            f"{len(train.y)} rows of {len(train.clients.ids)} clients: {error}"
        ) from error
    return outputs(named, fitted, test.X, test.ids)


def _in_order(parts, rows):
    """Parts for some rows each, in the order of all of them."""
    return np.concatenate(parts)[np.argsort(np.concatenate(rows))]


def _test_outputs(train, test, named, table):
    return _tested(None, named, table.take(train), table.take(test))


def fit_all(named, tables, n_jobs):
    """Fits of estimators to all rows of their tables."""
    tasks = [(table.y, each, table) for each, table in zip(named, tables, strict=True)]
    return map_batches(_fit_one, tasks, n_jobs)


def _fit_one(_, named, table):
    return fit(named, table)


def log_odds(probabilities):
    """Log odds (n, K - 1) of all classes but the first against the first."""
    logs = np.log(np.maximum(probabilities, SMALLEST))
    return logs[:, 1:] - logs[:, :1]


def row_losses(found, y, classes):
    """Squared errors (n,) of responses, or minus log probabilities of the true classes."""
    if classes is None:
        with np.errstate(over="ignore"):  # one row may carry a prediction away
            return (found - y) ** 2
    own = found[np.arange(len(y)), np.searchsorted(classes, y)]
    return -np.log(np.maximum(own, SMALLEST))


def splitter_of(cv, has_classes, seed):
    """Splitter that `cv` stands for; of a number of folds, or None for five, inside clients."""
    cv = 5 if cv is None else cv
    if isinstance(cv, Integral):
        return ClientKFold(cv, stratify=has_classes, random_state=seed)
    if hasattr(cv, "__next__"):
        raise ValueError(
            f"cv={cv!r} is used up after one fit; expected a number of folds, a splitter or a list."
        )
    for k, parts in enumerate([] if hasattr(cv, "split") else cv):
        if len(parts) != 2:
            raise ValueError(
                f"fold {k} of cv has {len(parts)} parts; expected the rows to fit and to test."
            )
    return check_cv(cv)


def folds_within(cv, table, owner):
    """Folds of a splitter as a list of row positions, whose test rows must be a partition."""
    n_rows, folds = len(table.y), []
    for k, pair in enumerate(cv.split(table.X, table.y, groups=as_groups(table.ids))):
        train, test = (_positions(rows, n_rows) for rows in pair)
        shared = np.intersect1d(train, test)
        if not (len(train) and len(test)) or len(shared):
            raise ValueError(
                f"fold {k} of cv has {len(train)} rows to fit and {len(test)} to test, of which "
                f"{len(shared)} are the same; expected some of each, and none in both."
            )
        folds.append((train, test))
    times = np.bincount(np.concatenate([[], *(test for _, test in folds)]).astype(np.intp))
    wrong = n_rows - np.count_nonzero(times == 1)
    if wrong:
        raise ValueError(
            f"cv of {type(owner).__name__} tests {wrong} of {n_rows} rows never or more than "
            "once; expected a partition, such as ClientKFold."
        )
    return folds


def _positions(rows, n_rows):
    """Positions of rows, which may be given as a mask."""
    rows = np.asarray(rows)
    if rows.dtype == bool and len(rows) == n_rows:
        return np.flatnonzero(rows)
    if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
        raise ValueError(
            f"cv has rows of type {rows.dtype} and shape {rows.shape}; expected positions from 0 "
            f"to {n_rows - 1}, or a mask of {n_rows} rows."
        )
    rows = rows.astype(np.intp)
    if len(np.unique(rows)) < len(rows):
        raise ValueError(f"cv has row {_repeated(rows)} more than once in a part of a fold.")
    if rows.size and (rows.min() < 0 or rows.max() >= n_rows):
        raise ValueError(
            f"cv has row {rows.min() if rows.min() < 0 else rows.max()}; expected positions from 0 "
            f"to {n_rows - 1}."
        )
    return rows


def _repeated(rows):
    found, times = np.unique(rows, return_counts=True)
    return found[times > 1][0]


def folds_of_clients(n_splits, codes, seed):
    """Folds of whole clients, of which there are several."""
    n_clients = codes.max() + 1
    splitter = GroupKFold(min(n_splits, n_clients), shuffle=True, random_state=seed)
    return list(splitter.split(codes[:, None], groups=codes))
