"""Labels and counts, and tables of distinct pairs (successes, trials) or (events, exposure)."""

from typing import NamedTuple

import numpy as np
import pandas as pd
from sklearn.utils import check_array, check_consistent_length, column_or_1d

from pfl_sklearn._clients import (
    EncodedClients,
    encode_clients,
    format_id,
    row_counts,
    segment_sums,
)
from pfl_sklearn._columns import check_one_per_row, name_bad_columns
from pfl_sklearn._labels import check_labels
from pfl_sklearn._typing import Floats, Integers
from pfl_sklearn._warnings import warn_fractional_counts

_CHECKED_AT_ONCE = 1 << 16  # numbers: no copy of all of them

_LARGEST_ROW_COUNT = 1e9  # of a row
_LEAST_EXPOSURE, _LARGEST_EXPOSURE = 1e-60, 1e60  # of which products and quotients are finite
_RATE_ROUNDING = 1e-9  # relative, of a rate times its exposure
LARGEST_TOTAL = 2**53  # of a client: sums of floats miss odd numbers above it


class CountTable(NamedTuple):
    """Distinct pairs of successes and trials of m clients, and how many clients have each.

    Of Poisson counts, `successes` are events and `trials` the exposure in which they happened.
    """

    successes: Integers  # (u,)
    trials: Integers | Floats  # (u,)
    counts: Integers  # (u,), clients that have the pair
    pair: Integers  # (m,), position of every client's pair

    @property
    def n_clients(self):
        return len(self.pair)

    @property
    def common_trials(self):
        """The number of trials that all clients share, or None."""
        return int(self.trials[0]) if np.all(self.trials == self.trials[0]) else None

    def per_client(self, values):
        """Values (m, ...) of the clients, each that of its pair (u, ...)."""
        return values[self.pair]


def count_table(successes, trials):
    """Compress whole-number `successes` and `trials` (m,) of the clients."""
    _check_total("trials", trials)
    return _compressed(successes.astype(np.int64), trials.astype(np.int64))


def exposure_table(events, exposure):
    """Compress events, whole numbers as a rule, and any exposure, both (m,), of the clients."""
    _check_total("counts", events)
    levels, level = np.unique(exposure, return_inverse=True)
    sums, events = _whole_codes(events)
    table = _compressed(events, level.astype(np.int64))
    table = table._replace(trials=levels[table.trials])
    return table if sums is None else table._replace(successes=sums[table.successes])


def _whole_codes(events):
    """Events (m,) as integers; of fractions their distinct values (u,), and positions there."""
    if np.all(events == np.rint(events)):
        return None, events.astype(np.int64)
    sums, codes = np.unique(events, return_inverse=True)
    return sums, codes.astype(np.int64)


def nearly_whole(values):
    """Values, rounded where they are whole but for rounding errors."""
    whole = np.rint(values)
    return np.where(
        np.abs(values - whole) <= _RATE_ROUNDING * np.maximum(whole, 1.0), whole, values
    )


def _check_total(name, values):
    """Refuse totals of clients that floats do not hold exactly."""
    if values.max() > LARGEST_TOTAL:
        raise ValueError(
            f"{name} of a client must be at most 2**53 together; got {values.max():g}."
        )


def _compressed(first, second):
    """CountTable of the distinct pairs of two columns (m,) of integers."""
    base = int(max(first.max(), second.max())) + 1
    if base < 2**31:  # otherwise the square of the base overflows
        key = second * base + first
        if base * base <= 4 * len(key) + 1024:  # counting is faster than sorting and needs less
            seen = np.bincount(key, minlength=1)
            distinct = np.flatnonzero(seen)
            position = np.zeros(len(seen), dtype=np.intp)
            position[distinct] = np.arange(len(distinct))
            return CountTable(distinct % base, distinct // base, seen[distinct], position[key])
        distinct, pair, counts = np.unique(key, return_inverse=True, return_counts=True)
        return CountTable(distinct % base, distinct // base, counts, pair)
    pairs, pair, counts = np.unique(
        np.column_stack([first, second]), axis=0, return_inverse=True, return_counts=True
    )
    return CountTable(pairs[:, 0], pairs[:, 1], counts, pair.ravel())


def encode_labels(y, both=False, known=None):
    """Sorted classes (at most two) and labels 0/1 as floats (n,).

    Labels besides two `known` classes are refused. With `both`, labels that are all 0 or all 1
    count as two classes, one of which does not occur.
    Whether a class occurs would be a release of its own.
    """
    y = column_or_1d(y, warn=True)
    codes, classes = pd.factorize(y, sort=True)
    if (codes < 0).any():
        raise ValueError("Input y contains NaN.")
    if known is not None:
        known = np.unique(known)
        if not np.isin(classes, known).all():
            raise ValueError("y holds a label that is not one of the two classes given before.")
        return known, (y == known[1]).astype(float)
    if len(classes) > 2:
        check_labels(y)  # its message on labels that are no classes is more specific
        raise ValueError(
            "Only binary classification is supported. The type of the target is multiclass: "
            f"y has {len(classes)} classes."
        )
    if len(classes):
        check_labels(classes)
    if both and len(classes) == 1 and classes[0] in (0, 1):
        return np.array([0, 1]).astype(classes.dtype), np.full(len(y), float(classes[0]))
    return np.asarray(classes), codes.astype(float)


def check_two_classes(classes, rows, private):
    """Raise ValueError if all rows are of one class."""
    # In a private fit the labels of all rows decide: whether a class occurs would be a release.
    if len(classes) < 2 or (not private and np.all(rows.y == rows.y[0])):
        only = classes[int(rows.y[0])] if len(rows.y) else None
        only = only.item() if isinstance(only, np.generic) else only
        raise ValueError(
            f"BernoulliMean needs rows of two classes, but the data contains only one class: "
            f"{only!r}. For counts without successes, use fit_counts."
        )


def check_whole(name, values):
    """Refuse numbers of trials or events that are not whole."""
    fraction = _first_fraction(values)
    if fraction is not None:
        raise ValueError(f"{name} must hold whole numbers; got {fraction:g}.")


def _first_fraction(values):
    """The first number (n,) that is not whole, or None."""
    for start in range(0, len(values), _CHECKED_AT_ONCE):
        part = values[start : start + _CHECKED_AT_ONCE]
        fractional = part != np.rint(part)
        if fractional.any():
            return part[np.argmax(fractional)]
    return None


def check_spread_is_identified(table):
    """Refuse clients of one trial each: any spread explains them as well as any other."""
    if np.all(table.trials == 1):
        raise ValueError(
            "every client has one trial, so the data cannot separate the spread between clients "
            "from chance; give the prior (BetaPrior(alpha, beta)) or more rows per client."
        )


def successes_and_trials(rows):
    """Counts (m,) of the clients of rows with labels 0 and 1; weights are numbers of trials."""
    ids, codes = rows.clients
    if rows.weights is None:  # faster than weights of 1
        successes = np.bincount(codes, weights=rows.y, minlength=len(ids))
        return successes, row_counts(codes, len(ids))
    check_whole("sample_weight", rows.weights)
    trials = segment_sums(rows.weights, codes, len(ids))
    return segment_sums(rows.weights * rows.y, codes, len(ids)), trials


def check_counts_table(successes, trials, private):
    """Columns of a table of counts as floats (n,); the first row that is wrong is named.

    A `private` fit takes any finite successes, and names no row whose trials are wrong.
    """
    successes, trials = _finite_columns({"successes": successes, "trials": trials}, private)
    if private:
        if not ((trials >= 1) & (trials <= LARGEST_TOTAL) & (trials == np.rint(trials))).all():
            raise ValueError("trials must be whole numbers from 1 to 2**53; got others.")
        return np.clip(np.rint(successes), 0.0, trials), trials
    check_whole("successes", successes)
    check_whole("trials", trials)
    for wrong, message in (
        (trials < 1, "trials must be at least 1"),
        (trials > LARGEST_TOTAL, "trials must be at most 2**53"),
        (successes < 0, "successes must not be negative"),
        (successes > trials, "successes must not exceed trials"),
    ):
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise ValueError(
                f"{message}; row {row} has {successes[row]:g} successes in {trials[row]:g} trials."
            )
    return successes, trials


def _finite_columns(named, private=False):
    """Columns (n,) of finite numbers; errors of a `private` fit show no value."""
    for name, values in named.items():
        check_one_per_row(name, values)
    with name_bad_columns(private=private):
        columns = [
            column_or_1d(
                check_array(values, dtype=np.float64, ensure_2d=False, input_name=name), warn=True
            )
            for name, values in named.items()
        ]
    check_consistent_length(*columns)
    return columns


def check_exposed_counts(name, counts, exposure, private=False, rates=False):
    """Columns (n, 2) of counts and exposure, 1 where it is not given; a wrong row is named.

    With `rates` counts without exposure may be fractions. A `private` fit takes any finite numbers:
    counts are rounded, and both are cut to their ranges.
    """
    named = {name: counts} if exposure is None else {name: counts, "exposure": exposure}
    columns = _finite_columns(named, private)
    if private:
        columns[0] = np.clip(np.rint(columns[0]), 0.0, _LARGEST_ROW_COUNT)
        columns[1:] = (
            np.clip(column, _LEAST_EXPOSURE, _LARGEST_EXPOSURE) for column in columns[1:]
        )
    if exposure is not None or not rates:
        check_whole(name, columns[0])
    _raise_at_row(columns[0] < 0, columns[0], f"{name} must not be negative")
    _raise_at_row(
        columns[0] > _LARGEST_ROW_COUNT, columns[0], f"{name} must be at most 1e9 in a row"
    )
    if exposure is None:
        return np.column_stack([columns[0], np.ones(len(columns[0]))])
    exposure = columns[1]
    _raise_at_row(exposure <= 0, exposure, "exposure must be above 0")
    outside = (exposure < _LEAST_EXPOSURE) | (exposure > _LARGEST_EXPOSURE)
    _raise_at_row(outside, exposure, "exposure must lie within 1e-60 and 1e60")
    return np.column_stack(columns)


def _raise_at_row(wrong, values, message):
    """Raise ValueError that names the first of the values (n,) that is wrong."""
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise ValueError(f"{message}; row {row} has {values[row]:g}.")


def events_and_exposure(rows):
    """Events, exposure and number of rows, each (m,), of the clients of rows of both."""
    # Weights are numbers of rows; with fractions among them, the exposure of rates.
    ids, codes = rows.clients
    n_rows, weighted = row_counts(codes, len(ids)), rows.y
    if rows.weights is not None:
        weighted = rows.weights[:, None] * rows.y
        if np.all(rows.weights == np.rint(rows.weights)):
            n_rows = segment_sums(rows.weights, codes, len(ids)).astype(np.int64)
    events, exposure = (segment_sums(column, codes, len(ids)) for column in weighted.T)
    return nearly_whole(events), exposure, n_rows


def check_fractions(rows, with_exposure):
    """Warn of fractions among counts and weights; with exposure, refuse fractional weights."""
    weights = () if rows.weights is None else rows.weights
    if with_exposure:  # counts with exposure are whole
        check_whole("sample_weight", weights)
    for name, values in (("y", rows.y[:, 0]), ("sample_weight", weights)):
        fraction = _first_fraction(values)
        if fraction is not None:
            return warn_fractional_counts(name, fraction)


def clients_of_table(groups, n_rows):
    """Clients of the rows of a table of counts: without ids, every row is one."""
    if groups is None:
        return EncodedClients(np.arange(n_rows), np.arange(n_rows))
    return encode_clients(groups, n_rows)


def binary_counts(statistics, private):
    """Successes and trials (m,) of a target that is 0 or 1; a `private` fit cuts other totals."""
    trials, successes, squares = _totals_of_target(statistics, private)
    if private:
        return np.clip(successes, 0.0, trials), trials
    # A square is as large as its value for 0 and 1 alone.
    distance = np.abs(squares - successes)
    binary = (
        (statistics.lowest[:, -1] >= 0)
        & (statistics.highest[:, -1] <= 1)
        & (distance <= 1e-9 * trials)
    )
    if not binary.all():
        worst = format_id(statistics.clients[np.argmin(binary)])
        raise ValueError(f"the target must be 0 or 1; that of client {worst} is not.")
    return successes, trials


def check_columns_of_statistics(statistics, exposure=None):
    """Raise ValueError without one target or the exposure; no value is read."""
    if statistics.n_targets != 1:
        raise ValueError(f"the statistics must be of one target; got {statistics.n_targets}.")
    names = statistics.feature_names or ()
    if exposure is not None and exposure not in names:
        raise ValueError(f"exposure={exposure!r} is none of the features {names}.")


def counts_of_statistics(statistics, exposure, private):
    """Events, exposure and numbers of rows (m,) of a target of counts.

    A `private` fit cuts the totals of a client to those of rows within the ranges.
    """
    n, events, _ = _totals_of_target(statistics, private)
    at = None if exposure is None else statistics.feature_names.index(exposure)
    if private:
        exposed = n if at is None else statistics._sums()[:, at + 1]
        exposed = np.clip(exposed, n * _LEAST_EXPOSURE, n * _LARGEST_EXPOSURE)
        return np.clip(events, 0.0, n * _LARGEST_ROW_COUNT), exposed, n.astype(np.int64)
    low, high = statistics.lowest[:, -1].min(), statistics.highest[:, -1].max()
    if low < 0 or high > _LARGEST_ROW_COUNT:
        raise ValueError(f"counts must lie within 0 and 1e9; got {low if low < 0 else high:g}.")
    exposed = n
    if at is not None:
        low, high = statistics.lowest[:, at].min(), statistics.highest[:, at].max()
        if not _LEAST_EXPOSURE <= low <= high <= _LARGEST_EXPOSURE:
            raise ValueError(
                f"exposure must lie within 1e-60 and 1e60; got values from {low:g} to {high:g}."
            )
        exposed = statistics._sums()[:, at + 1]
    return events, exposed, n.astype(np.int64)


def _totals_of_target(statistics, private):
    """Rows, sums and squares (m,) of the only target, which are whole numbers but the last.

    Sums of the target that are not are rounded in a `private` fit; weights are public.
    """
    n, means, within, _ = statistics._target_means()
    sums, means = n * means[:, 0], means[:, 0]
    checked = {"weights": n} if private else {"weights": n, "target": sums}
    for name, values in checked.items():
        whole = np.rint(values)
        if (np.abs(values - whole) > 1e-6 * np.maximum(np.abs(values) * 1e-6, 1)).any():
            raise ValueError(f"the sums of the {name} by client must be whole numbers.")
    return np.rint(n), np.rint(sums), within[:, 0] + n * means**2
