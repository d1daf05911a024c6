"""Folds, predictions for the rows outside of a fit, and tests of their losses."""

import math
import warnings
from numbers import Integral
from typing import NamedTuple, TypeAlias

import numpy as np
from scipy.special import stdtrit
from sklearn.model_selection import GroupKFold, check_cv

from pfl_sklearn._columns import unit_near
from pfl_sklearn._parallel import batch_mapper
from pfl_sklearn._typing import Integers
from pfl_sklearn.compose._client_rows import TableRows, as_groups
from pfl_sklearn.compose._inner_estimators import fit_inner, is_frozen, outputs, with_message
from pfl_sklearn.compose._stack.final_rows import passed_columns
from pfl_sklearn.model_selection import ClientKFold, ClientTimeSeriesSplit
from pfl_sklearn.model_selection._split import ranks_of_times

LEVEL = 0.1  # one-sided: a candidate gives way to a later one that is better at this level
ROUNDING = 1e-9  # relative difference of mean losses, up to which two candidates are the same

Fold: TypeAlias = tuple[Integers, Integers]  # positions of the rows to fit and to test


class TestedRows(NamedTuple):
    """Rows that folds test, and what can be learned from their out-of-fold predictions.

    All rows of a table; or, if folds go forward, those behind the first. Then predictions for rows
    of earlier folds saw nothing of later ones, so that these are an honest test of what is learned
    from them, without any more fits.
    """

    rows: Integers  # (n_tested,) positions in the table, in ascending order
    folds: list[Fold]  # positions among `rows`; without those before which too little is tested
    judged: Integers  # (n_judged,) positions among `rows` of those that `folds` test
    go_forward: bool

    def of(self, table: TableRows) -> TableRows:
        """These rows of the table; all of them are not copied."""
        return table if len(self.rows) == len(table.y) else table.take(self.rows)

    @property
    def tests(self) -> list[Integers]:
        """Rows that each of `folds` tests, as positions among `judged`."""
        return [np.searchsorted(self.judged, test) for _, test in self.folds]


def tested_rows(folds, codes):
    """TestedRows of folds, as of :func:`folds_within`, of a table with these clients (n,)."""
    rows = np.sort(np.concatenate([test for _, test in folds]))
    position = np.full(len(codes), -1)
    position[rows] = np.arange(len(rows))
    among = [tuple(own[own >= 0] for own in (position[each] for each in fold)) for fold in folds]
    go_forward = not len(among[0][0])  # as a partition tests whatever the first fold is fitted to
    if go_forward:  # from one row of each client, or none, a personalized model cannot learn
        sizes = [np.bincount(codes[rows[train]]).max(initial=0) for train, _ in among]
        among = [fold for fold, size in zip(among, sizes, strict=True) if size > 1]
    judged = np.sort(np.concatenate([[], *(test for _, test in among)]).astype(np.intp))
    return TestedRows(rows, among, judged, go_forward)


def keep_table(run, table):
    """Place of a table that workers keep, of which most rows are in the fits of each fold.

    A place is the table and a fitted passthrough, whose columns of it stand for X, or None.
    """
    return run.keep(table, everywhere=True), None


def out_of_fold(pairs, folds, run):
    """Outputs of each estimator for the rows of its table, by fits to the other folds.

    Warnings of the folds are kept back. Fits to all rows give them again, if there are any.

    Parameters
    ----------
    pairs : list of (InnerEstimator, place)
        Places of tables with the same rows, as of :func:`keep_table`.
    folds : list of (train, test)
        Each row is tested at most once.
    run : BatchMapper

    Returns
    -------
    predicted : list of ndarray of shape (n_tested,) or (n_tested, K)
        In the order of the tested rows in the table.
    warned : dict of str to list of (str, type)
        By the name of an estimator, its first warning of each category that every fold gave.
    """
    by_row = np.argsort(np.concatenate([test for _, test in folds]))
    packed = [[_packed(rows) for rows in fold] for fold in folds]
    tasks = [(*place, *fold, named) for named, place in pairs for fold in packed]
    results = iter(run(_test_outputs, tasks, np.ones(len(tasks), dtype=int)))
    predicted, warned = [], {}
    for named, _ in pairs:
        parts, caught = zip(*[next(results) for _ in folds], strict=True)
        predicted.append(np.concatenate(parts)[by_row])
        # One fold may warn because it is small; what all warn of is the estimator's own.
        always = set.intersection(*[{category for category, _ in fold} for fold in caught])
        first = dict(reversed(caught[0]))
        warned[named.name] = [(first[category], category) for category in always]
    return predicted, warned


def out_of_two_folds(named, place, folds, run):
    """Outputs of each estimator for the rows outside of one fold, by fits to the rest.

    For each fold a, outputs for a row of another fold b are of fits to the rows of neither: what is
    learned from them knows nothing of fold a.

    Parameters
    ----------
    named : list of InnerEstimator
    place : tuple
        Of a table, as of :func:`keep_table`.
    folds : list of (train, test)
    run : BatchMapper

    Returns
    -------
    list of list of ndarray
        For each fold and each estimator, outputs (n_train, ...) for the fold's training rows.
    """
    pairs: dict[tuple[int, int], list[np.ndarray]] = {}
    return [outside_of(k, named, place, folds, pairs, run) for k in range(len(folds))]


def outside_of(k, named, place, folds, pairs, run):
    """Outputs (n_train, ...) of each estimator for the training rows of fold k.

    Those for another fold's rows are of fits to the rows of neither. `pairs` keeps them for the
    other fold's turn; a pair's outputs are of the rows of both folds, in ascending order.
    """
    others = [(min(k, each), max(k, each)) for each in range(len(folds)) if each != k]
    new = [pair for pair in others if pair not in pairs]
    n_rows = sum(len(test) for _, test in folds)
    tasks = []
    for a, b in new:
        neither, both = np.intersect1d(folds[a][0], folds[b][0]), _rows_of_pair(folds, (a, b))
        fold = _packed(neither), _packed(both)
        tasks += [(*place, *fold, each) for each in named]
    results = iter(run(_test_outputs, tasks, np.ones(len(tasks), dtype=int)))
    pairs.update({pair: [next(results)[0] for _ in named] for pair in new})
    outside = []
    for at in range(len(named)):
        values = np.empty((n_rows, *pairs[others[0]][at].shape[1:]))
        for pair in others:  # each also has rows of fold k, which are no training rows
            values[_rows_of_pair(folds, pair)] = pairs[pair][at]
        outside.append(values[folds[k][0]])
    return outside


def _packed(rows):
    """Row numbers as bits of a mask, if it is all that they say: a bit for eight bytes."""
    mask = np.zeros(rows.max(initial=-1) + 1, dtype=bool)
    mask[rows] = True
    plain = np.array_equal(np.flatnonzero(mask), rows)  # in order, and each of them once
    return np.packbits(mask) if plain else rows


def _unpacked(rows):
    # Bits that fill the last byte are 0, so no row numbers.
    return np.flatnonzero(np.unpackbits(rows)) if rows.dtype == np.uint8 else rows


def _rows_of_pair(folds, pair):
    """Sorted test rows of two folds."""
    return np.sort(np.concatenate([folds[k][1] for k in pair]))


def tested(named, train, test):
    """Predictions for the rows of `test` by a fit to `train`."""
    with batch_mapper(1):
        return _tested(named, train, test)[0]


def _tested(named, train, test):
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
        fitted = fit_inner(named, train)
    except (TypeError, ValueError) as error:
        message = (
            f"in one of the folds {named.title} failed on {len(train.y)} rows of "
            f"{len(train.clients.ids)} clients: {error}"
        )
        raise with_message(error, message) from error
    return outputs(named._replace(estimator=fitted), test.X, test.ids)


def _table_at(table, passthrough):
    if passthrough is None:
        return table
    return table._replace(X=passed_columns(passthrough, table.X))


def _test_outputs(table, passthrough, train, test, named):
    table = _table_at(table, passthrough)
    return _tested(named, table.take(_unpacked(train)), table.take(_unpacked(test)))


def fit_all(pairs, run):
    """Fits of estimators to all rows of their tables; `pairs` as in :func:`out_of_fold`."""
    tasks = [(*place, named) for named, place in pairs]
    return run(_fit_one, tasks, np.ones(len(tasks), dtype=int))


def _fit_one(table, passthrough, named):
    return fit_inner(named, _table_at(table, passthrough))


def in_order_of_time(cv, table):
    """Rows in order of the column of times that a splitter has, if it has one."""
    column = getattr(cv, "time_column", None)
    if column is None:
        return table
    return table.take(np.argsort(ranks_of_times(table.X, column), kind="stable"))


def splitter_of(cv, table, has_classes, seed):
    """Splitter for `cv`; a number of folds, or None for five, means folds inside clients."""
    if isinstance(cv, str):  # "time"
        # The first fold has two rows of the longest client, as a personalized model needs.
        most = np.unique(table.clients.codes, return_counts=True)[1].max()
        if most < 5:
            raise ValueError(f"cv='time' needs a client with 5 rows; the longest has {most}.")
        return ClientTimeSeriesSplit(min(int(most) - 2, 5))
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
    """Folds of a splitter as a list of row positions.

    Their test rows must be a partition, as a row that no fold tests has no prediction to learn
    from; unless the folds go forward in time, which cannot test the first rows.
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
    tested = np.concatenate([[], *(test for _, test in folds)]).astype(np.intp)
    times = np.bincount(tested, minlength=n_rows)
    wrong = n_rows - np.count_nonzero(times == 1)
    if wrong and not (times.max() == 1 and _go_forward(folds, table.clients.codes)):
        raise ValueError(
            f"cv of {type(owner).__name__} tests {wrong} of {n_rows} rows never or more than "
            "once; expected a partition, such as ClientKFold, or folds forward in time, such as "
            "ClientTimeSeriesSplit: none fitted to rows that it or a later one tests, and the last "
            "ones to several rows of a client that earlier ones test."
        )
    return folds


def _go_forward(folds, codes):
    """Whether no fold is fitted to rows of later tests, and some to enough of earlier ones."""
    fold_of_row = np.full(len(codes), -1)  # that tests it, -1 for none
    for k, (_, test) in enumerate(folds):
        fold_of_row[test] = k
    looks_back = all(fold_of_row[train].max() < k for k, (train, _) in enumerate(folds))
    return looks_back and len(tested_rows(folds, codes).folds) > 0


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


def simplest_not_worse(losses, weights, codes=None, level=LEVEL):
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
        if gap <= ROUNDING * abs(means[best]):
            return name
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
