"""Moments of clients summed over chunks of rows that need not fit in memory together."""

import itertools
from typing import Any

import numpy as np
import pandas as pd

from pfl_sklearn._clients import encode_clients, encode_ids, joined
from pfl_sklearn.statistics._clipping import squared_factors
from pfl_sklearn.statistics._frames import arrays, check_columns, eager
from pfl_sklearn.statistics._moments import Moments
from pfl_sklearn.statistics._rows import INFINITE, LACKING, NOTHING, rows_used
from pfl_sklearn.statistics._triangles import packed_length

_GROWTH = 1.2  # of the room for clients, where a chunk brings new ones


def summed_chunks(chunks, columns, missing, clipping=None):
    """Names of the numbers, how many rows were left out, and MomentSums of data frames.

    With `clipping`, RegressionMoments, MomentSums of the rows scaled to its bounds come second.
    """
    sums: list[MomentSums] = []
    names, n_rows, n_left_out = [], 0, 0
    for chunk in chunks:
        frame = eager(chunk)
        names = check_columns(frame, columns)
        values, weights, ids, n_lost = arrays(frame, columns)
        complete, used = rows_used(values, weights)
        n_rows += len(values) + n_lost
        n_left_out += len(values) + n_lost - int(complete.sum())
        if n_left_out and missing == "error":
            raise ValueError(LACKING.format(n_left_out, n_rows))
        if not used.any():
            continue
        if not used.all():
            values, ids = values[used], ids.filter(used.tolist())
            weights = None if weights is None else weights[used]
        if not np.isfinite(values).all():
            raise ValueError(INFINITE)
        each_weights = [weights]
        if clipping is not None:
            each_weights.append(squared_factors(clipping, values))
        # About the mean of scaled rows, or rows far beyond the bounds would cost the others digits.
        sums = sums or [MomentSums(values, each_weights[-1]) for _ in each_weights]
        for each, own in zip(sums, each_weights, strict=True):
            each.add(values, ids, own)
    if not sums:
        raise ValueError(NOTHING.format(n_rows))
    return names, n_left_out, sums


class MomentSums:
    """Moments of clients so far, in the order in which the clients came.

    Columns are centred and scaled by constants, those of the first chunk.
    """

    def __init__(self, values, weights=None):
        # Half the range is a scale as good as a standard deviation.
        self.centre = np.average(values, axis=0, weights=weights)
        spread = np.ptp(values, axis=0) / 2
        self.scale = np.where(spread > 0, spread, 1.0)
        self.ids: Any = None
        self._index = pd.Index([])
        p = len(self.centre)
        n_products = p * (p + 1) // 2
        # A column at a time grows, so that no second copy of all is ever there.
        starts = [0.0] * (3 + p + n_products) + [np.inf] * p + [-np.inf] * p
        self._columns = [_Column(start) for start in starts]
        self.heaviest = 0.0

    def add(self, values, groups, weights):
        """Add rows (n, p) of positive weight, their clients' ids and weights (n,) or None."""
        ids, codes = encode_clients(groups, len(values))
        places = self._places(ids)
        order = np.argsort(codes, kind="stable")
        starts = np.flatnonzero(np.diff(codes[order], prepend=-1))
        sizes = np.diff(np.append(starts, len(order)))
        p, columns = values.shape[1], iter(self._columns)
        ones = None if weights is None else weights[order]
        next(columns).add(places, sizes)
        if ones is None:  # weights of 1, whose logarithms are 0
            next(columns)
            next(columns).add(places, sizes)
        else:
            next(columns).add(places, np.add.reduceat(np.log(ones), starts))
            next(columns).add(places, np.add.reduceat(ones, starts))
        raw = [values[order, j] for j in range(p)]
        centred = [
            (column - c) / s for column, c, s in zip(raw, self.centre, self.scale, strict=True)
        ]
        weighted = centred if ones is None else [column * ones for column in centred]
        for column in weighted:
            next(columns).add(places, np.add.reduceat(column, starts))
        for i in range(p):
            for j in range(i, p):
                next(columns).add(places, np.add.reduceat(weighted[i] * centred[j], starts))
        for join in (np.minimum, np.maximum):
            for column in raw:
                next(columns).join(places, join.reduceat(column, starts), join)
        self.heaviest = max(self.heaviest, 1.0 if weights is None else float(weights.max()))

    def _places(self, ids):
        """Places (u,) of sorted distinct ids; new ones come last."""
        if self.ids is None:
            self.ids, self._index = ids, pd.Index(ids)
            n_new = len(ids)
            places = np.arange(n_new)
        else:
            joined(self.ids[:1], ids)  # raises for ids of another kind
            places = self._index.get_indexer(pd.Index(ids))
            new = places < 0
            n_new = int(new.sum())
            if n_new:
                places[new] = len(self.ids) + np.arange(n_new)
                self.ids = joined(self.ids, ids[new])
                self._index = pd.Index(self.ids)
        for column in self._columns:
            column.lengthen(len(self.ids))
        return places

    def sorted(self):
        """Moments of the clients, sorted; nothing is left here."""
        ids, codes = encode_ids(self.ids)
        order, p = np.argsort(codes), len(self.centre)

        def taken(start, end):
            columns = self._columns[start:end]
            result = np.empty((len(ids), len(columns)))
            for j, column in enumerate(columns):
                result[:, j] = column.values(len(ids))[order]
                column.clear()
            return result

        ends = np.cumsum([1, 1, packed_length(p + 1), p, p])
        sizes, log_weights = taken(0, 1)[:, 0], taken(1, 2)[:, 0]
        rest = (taken(start, end) for start, end in itertools.pairwise(ends[1:]))
        return Moments(ids, sizes.astype(np.int64), log_weights, *rest)


class _Column:
    """Numbers of clients that become more."""

    def __init__(self, start):
        self._start, self._values = start, np.empty(0)

    def lengthen(self, n):
        """Have room for n clients."""
        have = len(self._values)
        if n > have:
            values = np.full(max(n, int(_GROWTH * have)), self._start)
            values[:have] = self._values
            self._values = values

    def add(self, places, sums):
        self._values[places] += sums

    def join(self, places, bounds, function):
        self._values[places] = function(self._values[places], bounds)

    def values(self, n):
        """Those of the first n clients."""
        return self._values[:n]

    def clear(self):
        self._values = np.empty(0)
