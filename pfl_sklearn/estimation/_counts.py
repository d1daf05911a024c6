"""Labels and counts, and tables of distinct pairs (successes, trials)."""

from typing import NamedTuple

import numpy as np
import pandas as pd
from sklearn.utils import column_or_1d

from pfl_sklearn._labels import check_labels


class CountTable(NamedTuple):
    """Distinct pairs of m clients."""

    successes: np.ndarray  # (u,)
    trials: np.ndarray  # (u,)
    counts: np.ndarray  # (u,), clients that have the pair
    pair: np.ndarray  # (m,), position of every client's pair

    @property
    def n_clients(self):
        return len(self.pair)

    @property
    def common_trials(self):
        """The number of trials that all clients share, or None."""
        return int(self.trials[0]) if np.all(self.trials == self.trials[0]) else None

    def per_client(self, values):
        """Values (u, ...) of the pairs, given to the clients (m, ...)."""
        return values[self.pair]


def count_table(successes, trials):
    """Compress whole-number `successes` and `trials` (m,) of the clients."""
    if trials.max() > 2**53:  # floats of sums do not tell larger ones apart
        raise ValueError(
            f"trials of a client must be at most 2**53 together; got {trials.max():g}."
        )
    successes, trials = successes.astype(np.int64), trials.astype(np.int64)
    base = int(trials.max()) + 1
    if base < 2**31:
        key = trials * base + successes
        if base * base <= 4 * len(key) + 1024:
            seen = np.bincount(key, minlength=1)
            distinct = np.flatnonzero(seen)
            position = np.zeros(len(seen), dtype=np.intp)
            position[distinct] = np.arange(len(distinct))
            return CountTable(distinct % base, distinct // base, seen[distinct], position[key])
        distinct, pair, counts = np.unique(key, return_inverse=True, return_counts=True)
        return CountTable(distinct % base, distinct // base, counts, pair)
    pairs, pair, counts = np.unique(
        np.column_stack([successes, trials]), axis=0, return_inverse=True, return_counts=True
    )
    return CountTable(pairs[:, 0], pairs[:, 1], counts, pair.ravel())


def encode_labels(y, both=False):
    """Sorted classes (at most two) and labels 0/1 as floats (n,).

    With `both`, labels that are all 0 or all 1 count as two classes, one of which does not occur.
    Whether a class occurs would be a release of its own.
    """
    if y is None:
        raise ValueError("BernoulliMean requires y to be passed, but the target y is None.")
    y = column_or_1d(y, warn=True)
    codes, found = pd.factorize(y)
    if (codes < 0).any():
        raise ValueError("Input y contains NaN.")
    if len(found) > 2:
        check_labels(y)
        raise ValueError(
            "Only binary classification is supported. The type of the target is multiclass: "
            f"y has {len(found)} classes."
        )
    if len(found):
        check_labels(found)
    if both and len(found) == 1 and found[0] in (0, 1):
        return np.array([0, 1]).astype(found.dtype), np.full(len(y), float(found[0]))
    order = np.argsort(found, kind="stable")
    rank = np.empty(len(found))
    rank[order] = np.arange(len(found))
    return np.asarray(found)[order], rank[codes]


def check_two_classes(classes, rows, private):
    if len(classes) < 2 or (not private and np.all(rows.y == rows.y[0])):
        only = classes[int(rows.y[0])] if len(rows.y) else None
        only = only.item() if isinstance(only, np.generic) else only
        raise ValueError(
            f"BernoulliMean needs rows of two classes, but the data contains only one class: "
            f"{only!r}. For counts without successes, use fit_counts."
        )


def check_whole(name, values):
    fractional = values != np.rint(values)
    if fractional.any():
        raise ValueError(
            f"{name} must hold whole numbers (of trials); got {values[fractional][0]:g}."
        )


def check_counts(successes, trials):
    check_whole("successes", successes)
    check_whole("trials", trials)
    for wrong, message in (
        (trials < 1, "trials must be at least 1"),
        (trials > 2**53, "trials must be at most 2**53"),
        (successes < 0, "successes must not be negative"),
        (successes > trials, "successes must not exceed trials"),
    ):
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise ValueError(
                f"{message}; row {row} has {successes[row]:g} successes in {trials[row]:g} trials."
            )
