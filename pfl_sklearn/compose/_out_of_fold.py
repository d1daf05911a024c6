"""Folds, out-of-fold predictions, and tests of their losses."""

import math
import warnings
from contextlib import nullcontext
from numbers import Integral
from typing import NamedTuple, TypeAlias

import numpy as np
from scipy.special import stdtrit
from sklearn.model_selection import GroupKFold, check_cv

from pfl_sklearn._columns import unit_near
from pfl_sklearn._parallel import batch_mapper
from pfl_sklearn._typing import Integers
from pfl_sklearn._warnings import warn_caller
from pfl_sklearn.compose._client_rows import TableRows, as_groups
from pfl_sklearn.compose._inner_estimators import (
    fit_inner,
    is_frozen,
    predict_inner,
    with_message,
)
from pfl_sklearn.compose._stack.final_rows import passed_columns
from pfl_sklearn.linear_model._mixed._groupings._variances import fit_of_fold
from pfl_sklearn.model_selection import ClientKFold, ClientTimeSeriesSplit
from pfl_sklearn.model_selection._split import ranks_of_times

# One-sided significance level at which a better candidate replaces an earlier, simpler one.
SIGNIFICANCE_LEVEL = 0.1
EQUAL_LOSSES = 1e-9  # relative difference of mean losses that rounding errors explain

# Five rows give two origins of forecasts that models are compared on. With folds inside clients the
# squared errors of forecasts were 2 % smaller then (geometric mean of eleven samples of six
# tables); with seven rows they were 4 % larger (six samples of three tables).
_FEWEST_TIMES = 6
_FEWEST_ORIGINS = 3  # of a splitter, the first of which compares nothing

Fold: TypeAlias = tuple[Integers, Integers]  # positions of the rows to fit and to test


class TestedRows(NamedTuple):
    """Rows that folds test, and the folds that may learn from their out-of-fold predictions.

    In general these are all rows of a table. If folds go forward, the rows before the first test
    are missing. Predictions for rows of earlier folds then saw nothing of later ones, so a model
    fitted to them is tested honestly without any more fits.
    """

    rows: Integers  # (n_tested,) positions in the table, in ascending order
    folds: list[Fold]  # positions among `rows`; without folds that have too little to learn from
    scored: Integers  # (n_scored,) positions among `rows` of those that `folds` test
    go_forward: bool

    def of(self, table: TableRows) -> TableRows:
        """These rows of the table, not copied if they are all."""
        return table if len(self.rows) == len(table.y) else table.take(self.rows)

    @property
    def tests(self) -> list[Integers]:
        """Rows that each of `folds` tests, as positions among `scored`."""
        return [np.searchsorted(self.scored, test) for _, test in self.folds]


def tested_rows(folds, codes):
    """TestedRows of folds, as of :func:`folds_within`, of a table with these clients (n,)."""
    rows = np.sort(np.concatenate([test for _, test in folds]))
    position = np.full(len(codes), -1)
    position[rows] = np.arange(len(rows))
    within = [tuple(position[part][position[part] >= 0] for part in fold) for fold in folds]
    # In a partition, the training rows of the first fold are tested by others.
    go_forward = not len(within[0][0])
    if go_forward:  # a personalized model cannot learn from one row of each client, or none
        sizes = [np.bincount(codes[rows[train]]).max(initial=0) for train, _ in within]
        within = [fold for fold, size in zip(within, sizes, strict=True) if size > 1]
    scored = np.sort(np.concatenate([[], *(test for _, test in within)]).astype(np.intp))
    return TestedRows(rows, within, scored, go_forward)


def keep_table(run, table):
    """Place of a table that workers keep, since every fold's fits use most of its rows.

    A place is the table and a fitted transformer that makes X of it, or None.
    """
    return run.store(table, everywhere=True), None


def out_of_fold(pairs, folds, run):
    """Predictions (n_tested, ...) of estimators for the tested rows, in the order of the table.

    `pairs` are (InnerEstimator, place of its table); each row is tested at most once. Also, by
    name, the estimators' first warning (text, category) of each category that occurred in every
    fold; other warnings are dropped, and fits to all rows repeat theirs.
    """
    by_row = np.argsort(np.concatenate([test for _, test in folds]))
    packed = [[_packed(rows) for rows in fold] for fold in folds]
    results = _predict_in_folds(pairs, packed[:1], run)
    # Searches of mixed models with groupings, on most of the same rows, end nearby.
    pairs = [
        (named._replace(starts=found), place)
        for (named, place), [(*_, found)] in zip(pairs, results, strict=True)
    ]
    predicted, warned = [], {}
    later = _predict_in_folds(pairs, packed[1:], run)
    for (named, _), before, after in zip(pairs, results, later, strict=True):
        parts, caught, _ = zip(*before, *after, strict=True)
        predicted.append(np.concatenate(parts)[by_row])
        # A single fold may warn because it is small; a warning of all concerns the estimator.
        always = set.intersection(*[{category for category, _ in fold} for fold in caught])
        first = dict(reversed(caught[0]))
        warned[named.name] = [(first[category], category) for category in always]
    return predicted, warned


def _predict_in_folds(pairs, folds, run):
    """What `_predict_test_rows` gives for each of the pairs and folds, as a list of lists."""
    tasks = [(*place, *fold, named) for named, place in pairs for fold in folds]
    results = iter(run(_predict_test_rows, tasks, np.ones(len(tasks), dtype=int)))
    return [[next(results) for _ in folds] for _ in pairs]


def out_of_two_folds(named, place, folds, run):
    """Predictions (n_train, ...) for the training rows of each fold, of each estimator."""
    # For fold a, predictions for a row of another fold b come from fits to the rows of neither, so
    # a model that is fitted to them has seen nothing of fold a.
    pairs: dict[tuple[int, int], list[np.ndarray]] = {}
    return [out_of_two(k, named, place, folds, pairs, run) for k in range(len(folds))]


def out_of_two(k, named, place, folds, pairs, run):
    """Predictions (n_train, ...) of each estimator for the training rows of fold k.

    Those for rows of another fold come from fits to the rows of neither. `pairs` caches them by the
    two folds, for the rows of both in ascending order.
    """
    others = [(min(k, other), max(k, other)) for other in range(len(folds)) if other != k]
    new = [pair for pair in others if pair not in pairs]
    n_rows = sum(len(test) for _, test in folds)
    tasks = []
    for a, b in new:
        neither, both = np.intersect1d(folds[a][0], folds[b][0]), _rows_of_pair(folds, (a, b))
        fold = _packed(neither), _packed(both)
        tasks += [(*place, *fold, inner) for inner in named]
    results = iter(run(_predict_test_rows, tasks, np.ones(len(tasks), dtype=int)))
    pairs.update({pair: [next(results)[0] for _ in named] for pair in new})
    outside = []
    for at in range(len(named)):
        values = np.empty((n_rows, *pairs[others[0]][at].shape[1:]))
        for pair in others:  # each pair includes rows of fold k, which are not used
            values[_rows_of_pair(folds, pair)] = pairs[pair][at]
        outside.append(values[folds[k][0]])
    return outside


def _packed(rows):
    """Row numbers as bits of a mask, a 64th of the size to send; unsorted ones stay as they are."""
    mask = np.zeros(rows.max(initial=-1) + 1, dtype=bool)
    mask[rows] = True
    is_sorted = np.array_equal(np.flatnonzero(mask), rows)  # and no row comes twice
    return np.packbits(mask) if is_sorted else rows


def _unpacked(rows):
    # Padding bits of the last byte are 0 and give no row numbers.
    return np.flatnonzero(np.unpackbits(rows)) if rows.dtype == np.uint8 else rows


def _rows_of_pair(folds, pair):
    """Sorted test rows of two folds."""
    return np.sort(np.concatenate([folds[k][1] for k in pair]))


def fit_and_predict(named, train, test):
    """Predictions for the rows of `test` by a fit to `train`, and where its searches ended.

    Warnings are dropped.
    """
    with batch_mapper(1):
        predicted, _, found = _predict_and_record(named, train, test)
    return predicted, found


def _predict_and_record(named, train, test):
    """Predictions for the test rows, the fit's warnings, and where its searches ended.

    Warnings are categories and texts.
    """
    with _fold_of(named) as found, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        one_class = named.classes is not None and len(np.unique(train.y)) == 1
        if one_class and not is_frozen(named.estimator):  # many classifiers refuse one class
            probabilities = (named.classes == train.y[0]).astype(float)
            predicted = np.tile(probabilities, (len(test.y), 1))
        else:
            predicted = _fit_and_predict(named, train, test)
    return predicted, [(warning.category, str(warning.message)) for warning in caught], found


def _fold_of(named):
    """Context of a fit to a fold, for models that search for variances themselves.

    Fits that other estimators make, perhaps in workers, are like all others.
    """
    searches = hasattr(named.estimator, "groupings") or hasattr(
        named.estimator, "residual_estimator"
    )
    return fit_of_fold(named.starts or {}) if searches else nullcontext({})


def _fit_and_predict(named, train, test):
    """Predictions for the test rows; errors of the fit name the estimator and the rows."""
    try:
        fitted = fit_inner(named, train)
    except (TypeError, ValueError) as error:
        message = (
            f"{named.title} failed in one of the folds, on {len(train.y)} rows of "
            f"{len(train.clients.ids)} clients: {error}"
        )
        raise with_message(error, message) from error
    return predict_inner(named._replace(estimator=fitted), test.X, test.ids)


def _table_at(table, passthrough):
    if passthrough is None:
        return table
    return table._replace(X=passed_columns(passthrough, table.X))


def _predict_test_rows(table, passthrough, train, test, named):
    table = _table_at(table, passthrough)
    return _predict_and_record(named, table.take(_unpacked(train)), table.take(_unpacked(test)))


def fit_all(pairs, run):
    """Fits of estimators to all rows of their tables; `pairs` as in :func:`out_of_fold`."""
    tasks = [(*place, named) for named, place in pairs]
    return run(_fit_one, tasks, np.ones(len(tasks), dtype=int))


def _fit_one(table, passthrough, named):
    return fit_inner(named, _table_at(table, passthrough))


def in_order_of_time(cv, table):
    """Rows in order of the splitter's column of times, if it has one."""
    column = getattr(cv, "time_column", None)
    if column is None:
        return table
    return table.take(np.argsort(ranks_of_times(table.X, column), kind="stable"))


def splitter_of(cv, table, has_classes, seed):
    """Splitter for `cv`; a number of folds, or None for 5, means folds inside clients.

    Also, in words, how it makes folds, if it is one of ours. Forward folds of too few origins are
    replaced by folds inside clients, with a warning.
    """
    longest, inside = int(np.bincount(table.clients.codes).max()), "inside clients"
    reason = _too_few_origins(cv, longest)
    if reason is not None:
        warn_caller(f"Folds inside clients replace folds forward in time: {reason}.", UserWarning)
        cv, inside = None, f"{inside}, because {reason}"
    if isinstance(cv, str):
        # The first fold has two rows of the longest client, as a personalized model needs.
        return ClientTimeSeriesSplit(min(longest - 2, 5)), "forward in time"
    if cv is None or isinstance(cv, Integral):
        # scikit-learn's KFold would hold whole clients out of a sorted table.
        n_splits = 5 if cv is None else int(cv)
        return ClientKFold(n_splits, stratify=has_classes, random_state=seed), inside
    if hasattr(cv, "__next__"):
        raise ValueError(
            f"cv={cv!r} is used up after one fit; expected a number of folds, a splitter or a list."
        )
    for k, fold in enumerate([] if hasattr(cv, "split") else cv):
        if len(fold) != 2:
            raise ValueError(
                f"fold {k} of cv has {len(fold)} parts; expected the rows to fit and to test."
            )
    return check_cv(cv), "forward in time" if isinstance(cv, ClientTimeSeriesSplit) else "given"


def _too_few_origins(cv, longest):
    """Why forward folds would tell models apart by luck; None if they are none, or enough."""
    if isinstance(cv, str) and longest < _FEWEST_TIMES:
        return f"cv='time' needs a client with {_FEWEST_TIMES} rows, and the longest has {longest}"
    if isinstance(cv, ClientTimeSeriesSplit) and cv.n_splits < _FEWEST_ORIGINS:
        return f"at least {_FEWEST_ORIGINS} splits are needed, and cv={cv!r} has {cv.n_splits}"
    return None


def folds_within(cv, table, owner):
    """Folds of a splitter as a list of row positions."""
    # Their test rows must be a partition, because a row that no fold tests has no prediction to
    # learn from. Folds that go forward in time cannot test the first rows.
    n_rows, folds = len(table.y), []
    for k, pair in enumerate(cv.split(table.X, table.y, groups=as_groups(table.ids))):
        train, test = (_row_positions(rows, n_rows) for rows in pair)
        shared = np.intersect1d(train, test)
        if not (len(train) and len(test)) or len(shared):
            raise ValueError(
                f"fold {k} of cv has {len(train)} rows to fit and {len(test)} to test, of which "
                f"{len(shared)} are the same; expected rows of each kind, and none in both."
            )
        folds.append((train, test))
    tested = np.concatenate([[], *(test for _, test in folds)]).astype(np.intp)
    times = np.bincount(tested, minlength=n_rows)
    wrong = n_rows - np.count_nonzero(times == 1)
    if wrong and not (times.max() == 1 and _go_forward(folds, table.clients.codes)):
        raise ValueError(
            f"cv of {type(owner).__name__} tests {wrong} of {n_rows} rows never or more than "
            "once; expected a partition, such as ClientKFold, or folds forward in time, such as "
            "ClientTimeSeriesSplit. Forward folds are not fitted to rows that they or later folds "
            "test, and the last ones are fitted to several rows of a client that earlier ones test."
        )
    return folds


def _go_forward(folds, codes):
    """Whether no fold is fitted to rows tested later, and some to enough rows tested earlier."""
    fold_of_row = np.full(len(codes), -1)  # the fold that tests the row, -1 for none
    for k, (_, test) in enumerate(folds):
        fold_of_row[test] = k
    looks_back = all(fold_of_row[train].max() < k for k, (train, _) in enumerate(folds))
    return looks_back and len(tested_rows(folds, codes).folds) > 0


def _row_positions(rows, n_rows):
    """Positions of rows from positions or a mask; ValueError for anything else."""
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
    outside = values[(values < 0) | (values >= n_rows)]  # negative ones count from the end
    if len(outside):
        raise ValueError(f"cv has row {outside[0]}; expected positions from 0 to {n_rows - 1}.")
    return rows


def folds_of_clients(n_splits, codes, seed):
    """Folds of whole clients; there must be several clients."""
    n_clients = codes.max() + 1
    # A fold without clients would test nothing.
    splitter = GroupKFold(min(n_splits, n_clients), shuffle=True, random_state=seed)
    return list(splitter.split(codes[:, None], groups=codes))


def simplest_not_worse(losses, weights, codes=None, level=SIGNIFICANCE_LEVEL):
    """Name of the first candidate whose losses (n,) are not clearly worse than the best one's.

    "Clearly" means a one-sided test of the mean difference at `level`. Errors are clustered by the
    clients `codes` (n,) of the rows if these are given, because new clients are a sample of
    clients. For known clients, rows are the sample: predictions are for these same clients.
    """
    means = mean_losses(losses, weights)
    best = min(means, key=means.__getitem__)
    if codes is None or codes.max() == 0:  # rows of one client are clusters of their own
        codes = np.arange(len(losses[best]))
    if codes.max() == 0:  # a single row decides nothing
        return next(iter(losses))
    quantile = stdtrit(codes.max(), 1 - level)  # degrees of freedom: clusters minus one
    for name, rows in losses.items():
        difference = means[name] - means[best]
        if not math.isfinite(difference):  # squares of a very bad candidate overflow
            continue
        if difference <= EQUAL_LOSSES * abs(means[best]):
            return name
        if difference <= quantile * _clustered_error(
            rows - losses[best] - difference, codes, weights
        ):
            return name
    return best


def mean_losses(losses, weights):
    """Mean of each candidate's losses (n,), by name."""
    with np.errstate(over="ignore"):  # of a very bad candidate
        return {name: float(np.average(rows, weights=weights)) for name, rows in losses.items()}


def _clustered_error(residuals, codes, weights):
    """Cluster-robust standard error (CR1) of a mean, from residuals (n,)."""
    weights = np.ones(len(residuals)) if weights is None else weights
    sums = np.bincount(codes, residuals * weights)
    unit = unit_near(np.abs(sums).max())  # losses are squares, whose squares could overflow
    norm = unit * np.linalg.norm(sums / unit)
    return norm / weights.sum() * math.sqrt(len(sums) / (len(sums) - 1))
