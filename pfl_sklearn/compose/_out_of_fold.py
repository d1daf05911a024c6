"""Out-of-fold predictions of estimators, some of which take client ids, and their losses."""

import math
import warnings
from inspect import signature
from numbers import Integral
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from sklearn import config_context
from sklearn.base import clone
from sklearn.model_selection import GroupKFold, check_cv

from pfl_sklearn._nesting import final_estimator, predicting_estimator, takes_groups
from pfl_sklearn._parallel import map_batches
from pfl_sklearn._typing import Integers
from pfl_sklearn.compose._frozen_estimators import is_frozen, own_copy
from pfl_sklearn.compose._inner_tables import as_groups, check_takes_weights
from pfl_sklearn.model_selection import ClientKFold

# Probabilities are at least this in losses and log odds: a leaf of one class says 0, and a single
# row of another class would then make the loss of a whole table infinite.
SMALLEST = 1e-6
_SUM_TOLERANCE = 1e-3  # probabilities may be of single precision, or rounded by the estimator

Fold: TypeAlias = tuple[Integers, Integers]  # positions of the rows to fit and to test


class Named(NamedTuple):
    """An estimator and its name; for a classifier, the sorted classes of all rows."""

    name: str
    estimator: Any
    classes: np.ndarray | None

    @property
    def title(self) -> str:
        """Name and class of the estimator, for error messages."""
        return f"{self.name!r} ({type(self.estimator).__name__})"


def prepared(pairs, classes, seeds, weighted):
    """Named clones with seeds, ready to be fitted; `weighted` if the rows have weights.

    Raises
    ------
    ValueError
        If rows have weights that an estimator does not take.
    """
    named = [
        Named(name, _seeded(each, seed), classes)
        for (name, each), seed in zip(pairs, seeds, strict=True)
    ]
    for each in named:
        if weighted and not is_frozen(each.estimator):  # a frozen one is fitted to no rows
            check_takes_weights(each.estimator, each.name)
    return named


def _seeded(estimator, seed):
    """Clone that draws from a seed unless it has its own, and gives new clients the population."""
    if is_frozen(estimator):
        return own_copy(estimator)
    seeded = clone(estimator)
    rng, params = np.random.default_rng(seed), seeded.get_params()
    for name in sorted(params):  # so that seeds do not depend on the order of parameters
        prefix, _, last = name.rpartition("__")
        # Anyone who knows the seed of a private estimator can subtract its noise.
        if last == "random_state" and params[name] is None and not _is_private(prefix, params):
            seeded.set_params(**{name: int(rng.integers(2**31))})
        if last == "unseen":  # folds of whole clients are unseen on purpose
            seeded.set_params(**{name: "population"})
    return seeded


def _is_private(prefix, params):
    """Whether the estimator whose parameters have this prefix adds noise."""
    at = f"{prefix}__" if prefix else ""
    epsilon = params.get(f"{at}epsilon", math.inf)
    return epsilon != math.inf or params.get(f"{at}noise_multiplier") is not None


def fit_named(named, table):
    """Fitted clone of an estimator."""
    metadata = {} if table.weights is None else {"sample_weight": table.weights}
    with config_context(enable_metadata_routing=True):  # of pipelines and searches
        if takes_groups(named.estimator, "fit"):
            metadata["groups"] = as_groups(table.ids)
        return clone(named.estimator).fit(table.X, table.y, **metadata)


def outputs(named, X, ids):
    """Predictions of a fitted estimator: responses (n,), or probabilities (n, K) of the classes.

    Raises
    ------
    ValueError
        If it predicts NaN, no probabilities, or classes in another order.
    """
    predicting = predicting_estimator(named.estimator)  # a search hands no client ids on
    if named.classes is None:
        return _finite_numbers(named, _call(named, predicting, "predict", X, ids), (len(X),))
    params = {"integrate": True} if _averages(predicting, ids) else {}
    probabilities = _call(named, predicting, "predict_proba", X, ids, params)
    return _of_all_classes(named, predicting, probabilities, len(X))


def _averages(fitted, ids):
    """Whether probabilities can be averages over a posterior of the rows' clients.

    Averages are never clearly worse than probabilities at the mode, and far better for new clients
    and for clients of few rows.
    """
    if "integrate" not in signature(fitted.predict_proba).parameters:
        return False
    core = final_estimator(fitted)
    if not np.isnan(core.prior_.covariance).any():
        return True
    # After a fit of one client the variance between clients is unknown: only that client's own
    # posterior is.
    return bool(np.isin(ids, getattr(core, "clients_", ())).all())


def _finite_numbers(named, values, shape):
    """Predictions as floats, checked to be finite and of this shape."""
    what = f"{named.title} predicted"
    values = np.asarray(values, dtype=np.float64)
    if values.shape != shape:
        raise ValueError(f"{what} an array of shape {values.shape}; expected {shape}.")
    bad = ~np.isfinite(values.reshape(len(values), -1)).all(axis=1)
    if bad.any():
        raise ValueError(
            f"{what} {values[bad][0].tolist()!r} for {bad.sum()} of {len(values)} rows; expected "
            "finite numbers."
        )
    return values


def with_std(fitted, X, ids):
    """Predictions (n,) of a fitted estimator and their standard deviations (n,).

    Raises
    ------
    ValueError
        If it gives none.
    """
    named = Named("final_estimator", fitted, None)
    predicting = predicting_estimator(fitted)
    try:
        return _call(named, predicting, "predict", X, ids, {"return_std": True}, ValueError)
    except TypeError as error:
        raise ValueError(
            f"return_std=True needs a final estimator whose predict takes it; "
            f"{type(fitted).__name__}.predict does not."
        ) from error


def _call(named, estimator, method, X, ids, params=None, caught=(TypeError, ValueError)):
    """Result of a method of a fitted estimator; errors name the estimator."""
    with config_context(enable_metadata_routing=True):
        groups = {"groups": as_groups(ids)} if takes_groups(estimator, method) else {}
        try:
            return getattr(estimator, method)(X, **groups, **(params or {}))
        except caught as error:
            name = f"{named.name!r} ({type(estimator).__name__})"
            raise _retold(error, f"{name} failed to predict: {error}") from error


def _retold(error, message):
    """A TypeError or ValueError, as `error` is, with another message."""
    # No others: the constructor of another type may take more than a text.
    return TypeError(message) if isinstance(error, TypeError) else ValueError(message)


def _of_all_classes(named, fitted, probabilities, n_rows):
    """Probabilities (n, K) of all classes; 0 for a class that the fold did not contain."""
    own = np.asarray(fitted.classes_)
    # A class behind all others has the position after the last.
    where = np.searchsorted(named.classes, own).clip(max=len(named.classes) - 1)
    if not np.array_equal(named.classes[where], own) or (np.diff(where) <= 0).any():
        raise ValueError(
            f"{named.title} has classes_={own.tolist()}; expected those of y in sorted order, "
            f"{named.classes.tolist()}."
        )
    probabilities = _finite_numbers(named, probabilities, (n_rows, len(own)))
    sums = probabilities.sum(axis=1)
    off = (probabilities < -_SUM_TOLERANCE).any(axis=1) | (np.abs(sums - 1) > _SUM_TOLERANCE)
    if off.any():
        raise ValueError(
            f"{named.title} predicted probabilities {probabilities[off][0].tolist()!r} for "
            f"{off.sum()} of {n_rows} rows; expected numbers from 0 on with sum 1."
        )
    of_all = np.zeros((n_rows, len(named.classes)))
    of_all[:, where] = probabilities
    return of_all


def out_of_fold(pairs, folds, n_jobs, warned=None):
    """Outputs of each estimator for the rows of its table, by fits to the other folds.

    Warnings of the folds are kept back. Fits to all rows give them again, if there are any.

    Parameters
    ----------
    pairs : list of (Named, InnerTable)
        Tables have the same rows.
    folds : list of (train, test)
        The test rows are a partition of all.
    n_jobs : int or None
    warned : dict or None
        Gets, by the name of an estimator, its first warnings of each category that every fold gave.

    Returns
    -------
    list of ndarray of shape (n,) or (n, K)
    """
    tasks = [(train, test, *pair) for pair in pairs for train, test in folds]
    results, out = iter(map_batches(_test_outputs, tasks, n_jobs)), []
    by_row = np.argsort(np.concatenate([test for _, test in folds]))
    for named, _ in pairs:
        parts, caught = zip(*[next(results) for _ in folds], strict=True)
        out.append(np.concatenate(parts)[by_row])
        if warned is not None:
            # One fold may warn because it is small; what all warn of is the estimator's own.
            always = set.intersection(*[{category for category, _ in fold} for fold in caught])
            first = dict(reversed(caught[0]))
            warned[named.name] = [(first[category], category) for category in always]
    return out


def out_of_two_folds(named, table, folds, n_jobs):
    """Outputs of each estimator for the rows outside of one fold, by fits to the rest.

    For each fold a, outputs for a row of another fold b are of fits to the rows of neither: what is
    learned from them knows nothing of fold a.

    Parameters
    ----------
    named : list of Named
    table : InnerTable
    folds : list of (train, test)
    n_jobs : int or None

    Returns
    -------
    list of list of ndarray
        For each fold and each estimator, outputs (n_train, ...) for the fold's training rows.
    """
    pairs: dict[tuple[int, int], list[np.ndarray]] = {}
    return [outside_of(k, named, table, folds, pairs, n_jobs) for k in range(len(folds))]


def outside_of(k, named, table, folds, pairs, n_jobs):
    """Outputs (n_train, ...) of each estimator for the training rows of fold k.

    Those for another fold's rows are of fits to the rows of neither. `pairs` keeps them for the
    other fold's turn; a pair's outputs are of the rows of both folds, in ascending order.
    """
    others = [(min(k, each), max(k, each)) for each in range(len(folds)) if each != k]
    new = [pair for pair in others if pair not in pairs]
    tasks = [
        (np.intersect1d(folds[a][0], folds[b][0]), _rows_of_pair(folds, (a, b)), each, table)
        for a, b in new
        for each in named
    ]
    results = iter(map_batches(_test_outputs, tasks, n_jobs))
    pairs.update({pair: [next(results)[0] for _ in named] for pair in new})
    outside = []
    for at in range(len(named)):
        values = np.empty((len(table.y), *pairs[others[0]][at].shape[1:]))
        for pair in others:  # each also has rows of fold k, which are no training rows
            values[_rows_of_pair(folds, pair)] = pairs[pair][at]
        outside.append(values[folds[k][0]])
    return outside


def _rows_of_pair(folds, pair):
    """Sorted test rows of two folds."""
    return np.sort(np.concatenate([folds[k][1] for k in pair]))


def tested(named, train, test):
    """Predictions for the rows of `test` by a fit to `train`."""
    return map_batches(_tested, [(test.y, named, train, test)])[0][0]


def _tested(_, named, train, test):
    """Predictions for the test rows, and the categories and texts of the fit's warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        one_class = named.classes is not None and len(np.unique(train.y)) == 1
        if one_class and not is_frozen(named.estimator):  # many classifiers refuse one class
            probabilities = (named.classes == train.y[0]).astype(float)
            predicted = np.tile(probabilities, (len(test.y), 1))
        else:
            predicted = _fitted_outputs(named, train, test)
    return predicted, [(each.category, str(each.message)) for each in caught]


def _fitted_outputs(named, train, test):
    """Predictions for the test rows; errors of the fit name the estimator and the rows."""
    try:
        fitted = fit_named(named, train)
    except (TypeError, ValueError) as error:
        message = (
            f"in one of the folds {named.title} failed on {len(train.y)} rows of "
            f"{len(train.clients.ids)} clients: {error}"
        )
        raise _retold(error, message) from error
    return outputs(named._replace(estimator=fitted), test.X, test.ids)


def _test_outputs(train, test, named, table):
    return _tested(None, named, table.take(train), table.take(test))


def fit_all(pairs, n_jobs):
    """Fits of estimators to all rows of their tables; `pairs` as in :func:`out_of_fold`."""
    return map_batches(_fit_one, [(table.y, named, table) for named, table in pairs], n_jobs)


def _fit_one(_, named, table):
    return fit_named(named, table)


def log_odds(probabilities):
    """Log odds (n, K - 1) of all classes but the first against the first."""
    logs = np.log(np.maximum(probabilities, SMALLEST))
    return logs[:, 1:] - logs[:, :1]


def row_losses(predicted, y, classes):
    """Squared errors (n,) of responses, or minus log probabilities of the true classes."""
    if classes is None:
        with np.errstate(over="ignore"):  # one row may carry a prediction away
            return (predicted - y) ** 2
    own = predicted[np.arange(len(y)), np.searchsorted(classes, y)]
    return -np.log(np.maximum(own, SMALLEST))


def splitter_of(cv, has_classes, seed):
    """Splitter for `cv`; a number of folds, or None for five, means folds inside clients."""
    if cv is None or isinstance(cv, Integral):
        # Not scikit-learn's, which would hold whole clients out of a sorted table.
        return ClientKFold(5 if cv is None else int(cv), stratify=has_classes, random_state=seed)
    if hasattr(cv, "__next__"):
        raise ValueError(
            f"cv={cv!r} is used up after one fit; expected a number of folds, a splitter or a list."
        )
    for k, fold in enumerate([] if hasattr(cv, "split") else cv):
        if len(fold) != 2:
            raise ValueError(
                f"fold {k} of cv has {len(fold)} parts; expected the rows to fit and to test."
            )
    return check_cv(cv)


def folds_within(cv, table, owner):
    """Folds of a splitter as a list of row positions, whose test rows must be a partition.

    A row that no fold tests would have no prediction for the final estimator to learn from.
    """
    n_rows, folds = len(table.y), []
    for k, pair in enumerate(cv.split(table.X, table.y, groups=as_groups(table.ids))):
        train, test = (_row_positions(rows, n_rows) for rows in pair)
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


def _row_positions(rows, n_rows):
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
    values, times = np.unique(rows, return_counts=True)
    if (times > 1).any():
        raise ValueError(f"cv has row {values[times > 1][0]} more than once in a part of a fold.")
    outside = values[(values < 0) | (values >= n_rows)]  # negative ones would count from the end
    if len(outside):
        raise ValueError(f"cv has row {outside[0]}; expected positions from 0 to {n_rows - 1}.")
    return rows


def folds_of_clients(n_splits, codes, seed):
    """Folds of whole clients, of which there are several."""
    n_clients = codes.max() + 1
    # A fold without clients would test nothing.
    splitter = GroupKFold(min(n_splits, n_clients), shuffle=True, random_state=seed)
    return list(splitter.split(codes[:, None], groups=codes))
