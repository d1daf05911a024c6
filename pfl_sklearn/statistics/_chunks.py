"""Moments of clients summed over chunks of rows that need not fit in memory together."""

import itertools
from typing import Any

import numpy as np
import pandas as pd

from pfl_sklearn._clients import concatenate_ids, encode_clients, encode_ids, rows_by_client
from pfl_sklearn.statistics._cholesky import packed_length
from pfl_sklearn.statistics._clipping import clip_to_limits, squared_factors, units_of
from pfl_sklearn.statistics._frames import check_chunks, check_columns, collect_frame, to_arrays
from pfl_sklearn.statistics._moments import MomentTable
from pfl_sklearn.statistics._rows import INFINITE, LACKING, NOTHING, rows_used

_ROOM_GROWTH = 1.2  # of the room for clients, where a chunk brings new ones
_CHUNK_ROWS = 1 << 13  # their numbers fit the processor's cache


def sum_chunks(chunks, columns, missing, private):
    """Names of the numbers, how many rows were left out, and MomentSums of data frames.

    `private` are Limits, within which the numbers are put, or None, and RegressionMoments, or None:
    MomentSums of the rows scaled to its bounds come second.
    """
    limits, clipping = private
    check_chunks(chunks)
    sums: list[MomentSums] = []
    names, n_rows, n_left_out = [], 0, 0
    for chunk in chunks:
        frame = collect_frame(chunk)
        names = check_columns(frame, columns)
        values, weights, ids, n_lost = to_arrays(frame, columns)
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
        if limits is not None:
            clip_to_limits(limits, values)
        if not sums:
            sums = [MomentSums(values.shape[1])]
            if clipping is not None:
                sums.append(MomentSums(values.shape[1], units_of(clipping)))
        sums[0].add(values, ids, weights)
        if clipping is not None:
            sums[1].add(values, ids, squared_factors(clipping, values))
    if not sums:
        raise ValueError(NOTHING.format(n_rows))
    return names, n_left_out, sums


class MomentSums:
    """Moments of clients so far, in the order in which the clients came.

    Rows of a client are taken about its first one, so that no other client costs it digits; those
    that were scaled to bounds about 0, in units (p,) of the bounds.
    """

    def __init__(self, n_columns, units=None):
        self.units, self.n_columns = units, n_columns
        self.ids: Any = None
        self._index = pd.Index([])
        p = n_columns
        # Rows, log weights and weights, sums, products; smallest and largest values; first rows.
        self._starts = [0.0] * (2 + packed_length(p + 1)) + [np.inf] * p + [-np.inf] * p
        self._starts += [0.0] * p if units is None else []
        self._columns = [np.empty(0) for _ in self._starts]
        self.heaviest = 0.0

    def add(self, values, groups, weights):
        """Add rows (n, p) of positive weight, their clients' ids and weights (n,) or None."""
        ids, codes = encode_clients(groups, len(values))
        n_before = 0 if self.ids is None else len(self.ids)
        places = self._places(ids)[codes]
        # In the order of the places, which are all over the memory otherwise.
        order, starts = rows_by_client(places, len(self.ids))
        if self.units is None:
            first = values[order[starts[n_before : len(self.ids)]]]
            for column, new in zip(self._columns[-self.n_columns :], first.T, strict=True):
                column[n_before : len(self.ids)] = new
        for start in range(0, len(order), _CHUNK_ROWS):
            block = order[start : start + _CHUNK_ROWS]
            block_weights = None if weights is None else weights[block]
            with np.errstate(over="ignore", invalid="ignore"):  # is refused when all have come
                self._add(np.ascontiguousarray(values[block].T), places[block], block_weights)
        self.heaviest = max(self.heaviest, 1.0 if weights is None else float(weights.max()))

    def _add(self, raw, places, weights):
        """Add columns (p, b) of rows, whose clients have these places (b,)."""
        if self.units is None:
            first = [column[places] for column in self._columns[-self.n_columns :]]
            centred = raw - np.array(first)
        else:
            centred = raw / self.units[:, None]
        ones = np.ones(len(places)) if weights is None else weights
        weighted = centred if weights is None else centred * weights
        rest = iter(self._columns)

        def join(function, values):
            function.at(next(rest), places, values)

        join(np.add, np.ones(len(places)))
        join(np.add, np.log(ones))
        join(np.add, ones)
        for column in weighted:
            join(np.add, column)
        for i, column in enumerate(weighted):
            for other in centred[i:]:
                join(np.add, column * other)
        for function in (np.minimum, np.maximum):
            for column in raw:
                join(function, column)

    def _places(self, ids):
        """Places (u,) of sorted distinct ids; new ones come last."""
        if self.ids is None:
            self.ids, n_before = ids, 0
            places = np.arange(len(ids))
        else:
            concatenate_ids(self.ids[:1], ids)  # raises for ids of another kind
            places, n_before = self._index.get_indexer(pd.Index(ids)), len(self.ids)
            new = places < 0
            places[new] = n_before + np.arange(int(new.sum()))
            if new.any():
                self.ids = concatenate_ids(self.ids, ids[new])
        if len(self.ids) > n_before:
            self._index = pd.Index(self.ids)
            # One at a time, so that no second copy of all is ever there.
            for k, start in enumerate(self._starts):
                self._columns[k] = _extend_column(self._columns[k], n_before, len(self.ids), start)
        return places

    def sorted(self):
        """Moments of the clients, sorted; nothing is left here."""
        ids, codes = encode_ids(self.ids)
        order, p = np.argsort(codes), self.n_columns

        def taken(start, end):
            result = np.empty((len(ids), end - start))
            for j, k in enumerate(range(start, end)):
                result[:, j] = self._columns[k][order]
                self._columns[k] = np.empty(0)
            return result

        ends = np.cumsum([1, 1, packed_length(p + 1), p, p])
        sizes, log_weights = taken(0, 1)[:, 0], taken(1, 2)[:, 0]
        packed, low, high = (taken(start, end) for start, end in itertools.pairwise(ends[1:]))
        centre, scale = np.zeros(p), self.units
        if scale is None:
            centre, scale = taken(ends[-1], ends[-1] + p), np.ones(p)
        n_rows = sizes.astype(np.int64)
        return MomentTable(ids, n_rows, log_weights, packed, low, high, centre, scale)


def _extend_column(column, n_before, n, start):
    """Column whose first `n_before` numbers stay, with a starting value up to the n-th."""
    if n > len(column):
        # What is not needed yet is not written, and so takes no memory.
        room = np.empty(max(n, int(_ROOM_GROWTH * len(column))))
        room[:n_before] = column[:n_before]
        column = room
    column[n_before:n] = start
    return column
