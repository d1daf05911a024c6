"""Moments of clients by the engine of a lazy frame: a query for the scale, and some for sums."""

import itertools
import logging
from typing import Any, NamedTuple

import narwhals as nw
import numpy as np

from pfl_sklearn._clients import encode_clients
from pfl_sklearn.statistics._clipping import clip_frame_to_limits, units_of, with_squared_factors
from pfl_sklearn.statistics._frames import GROUP, WEIGHT, select_numbers
from pfl_sklearn.statistics._moments import CHANGED, fields_of_moments, moment_names, read_moments
from pfl_sklearn.statistics._rows import check_range, check_scale

_LOGGER = logging.getLogger("pfl_sklearn.statistics")  # of progress
_BOUNDS = "min", "max"
_CHECK = "check"  # sum of columns by client that tells whether two queries read the same rows
_SUMS_AT_ONCE = 40  # a million clients then take an engine a gigabyte or two
_TILE = 6  # columns, whose products with those of another tile are about one query
_SUM_ROUNDING = 1e-7  # of a sum, by the order in which an engine adds


def query_fields(frame, columns, names, missing, private):
    """Fields of ClientStatistics of a lazy frame with columns that become numbers of these names.

    `private` are Limits, within which the numbers are put, or None, and RegressionMoments to whose
    bounds rows are scaled, too, or None.
    """
    limits, clipping = private
    p, k = len(names), columns.n_targets

    def numbers(needed=None):
        return select_numbers(frame, columns, needed)

    def limited(needed=None):
        return clip_frame_to_limits(limits, numbers(needed))

    def clipped(needed=None):  # a row's factor depends on all of its columns
        return with_squared_factors(limited(), clipping, WEIGHT)

    scale = query_scale(numbers(), p)
    check_scale(scale, missing)
    if limits is None:
        check_range((scale.lowest[None], scale.highest[None]), p - k, scale.heaviest)
        sources = [(numbers, scale.centre, scale.spread)]
    else:  # no number of a client may depend on the rows of others
        sources = [(limited, np.zeros(p), np.ones(p))]
    if clipping is not None:
        sources.append((clipped, np.zeros(p), units_of(clipping)))
    sums = []
    for source, *constants in sources:
        ids, moments = query_moments(source, constants, scale)
        sums.append(read_moments(ids, moments, *constants))
    return fields_of_moments(sums, names, k, scale.n_incomplete, limits is not None)


class Scale(NamedTuple):
    """What a first pass finds."""

    n_rows: int
    n_incomplete: int  # rows with missing values, weights or clients
    n_used: int  # complete rows of positive weight
    least_weight: float
    heaviest: float
    centre: np.ndarray  # (p,), weighted means
    spread: np.ndarray  # (p,), above 0
    lowest: np.ndarray  # (p,)
    highest: np.ndarray  # (p,)


def query_scale(frame, n_values):
    """Scale of a frame of numbers."""
    names = [f"v_{j}" for j in range(n_values)]
    complete = nw.all_horizontal(
        *(~nw.col(name).is_null() for name in (GROUP, WEIGHT, *names)), ignore_nulls=True
    )
    frame = frame.with_columns(complete.alias("complete"))
    frame = frame.with_columns((nw.col("complete") & (nw.col(WEIGHT) > 0)).alias("used"))
    used = [nw.when(nw.col("used")).then(nw.col(name)).alias(name) for name in names]
    frame = frame.with_columns(*used)
    weight = nw.when(nw.col("used")).then(nw.col(WEIGHT))
    frame = frame.with_columns(
        weight.alias("weight_used"), *((nw.col(name) * weight).alias(f"w{name}") for name in names)
    )
    facts = [
        nw.len().alias("rows"),
        *(nw.col(name).cast(nw.Int64).sum() for name in ("complete", "used")),
        nw.col(WEIGHT).min().alias("least"),
        nw.col(WEIGHT).max().alias("heaviest"),
        *(nw.col(name).sum() for name in ("weight_used", *(f"w{name}" for name in names))),
    ]
    for bound, name in itertools.product(_BOUNDS, names):
        facts.append(getattr(nw.col(name), bound)().alias(f"{bound}_{name}"))
    collected: Any = frame.select(*facts).collect()
    values = {name: collected[name].to_list()[0] for name in collected.columns}

    def of(*keys):
        return np.array(
            [np.nan if values[key] is None else values[key] for key in keys], dtype=float
        )

    least, heaviest, weight = of("least", "heaviest", "weight_used")
    lowest, highest = (of(*(f"{bound}_{name}" for name in names)) for bound in _BOUNDS)
    # Without rows, which is refused, and of values that overflow, whose scale nobody asks for.
    with np.errstate(all="ignore"):
        centre, half_range = of(*(f"w{name}" for name in names)) / weight, (highest - lowest) / 2
    return Scale(
        int(values["rows"]),
        int(values["rows"]) - int(values["complete"] or 0),
        int(values["used"] or 0),
        float(least),
        float(heaviest),
        centre,
        # Half the range serves as a scale; a standard deviation would take one more pass.
        np.where(highest > lowest, half_range, 1.0),
        lowest,
        highest,
    )


def query_moments(numbers, constants, scale):
    """Sorted client ids, and a dict of the moments (m,) of a frame of numbers.

    `numbers` takes positions of columns, or None for all, and gives a lazy frame of these. The pair
    `constants` of arrays (p,) is subtracted from and divides the columns; `scale` is that of the
    first pass over the same rows. Raises ValueError if queries read different rows.
    """
    columns = _columns_of_sums(len(constants[0]))
    names, ids = list(columns), None
    sums: dict[str, np.ndarray] = {}
    for start in range(0, len(names), _SUMS_AT_ONCE):
        part = {name: columns[name] for name in names[start : start + _SUMS_AT_ONCE]}
        needed = sorted({j for pair in part.values() for j in pair})
        # Columns whose own sum is there by then, so that this query can be compared with it.
        checked = [j for j in needed if f"s_{j}" in sums or f"s_{j}" in part]
        # Rows that lack a value of some other column are to be left out, if there are any.
        frame = numbers(None if scale.n_incomplete else needed)
        _LOGGER.info("query %d of %d", start // _SUMS_AT_ONCE + 1, -(-len(names) // _SUMS_AT_ONCE))
        collected = _query(frame, part, needed, checked, constants).collect()
        before, (ids, codes) = ids, encode_clients(collected[GROUP], len(collected))
        order = np.argsort(codes)
        values = {name: collected[name].to_numpy()[order] for name in ("n", _CHECK, *part)}
        check = values.pop(_CHECK)
        same = values["n"].sum() == scale.n_used
        if before is not None:
            same &= np.array_equal(ids, before) and np.array_equal(values["n"], sums["n"])
        sums |= values
        if not (same and _same_rows(check, sums, checked, constants)):
            raise ValueError(CHANGED)
    return ids, sums


def _same_rows(check, sums, columns, constants):
    """Whether the sum (m,) of some columns is that of their sums up to rounding."""
    weights, room = sums["w"], 0.0
    for j, centre, scale in zip(columns, *(of[columns] for of in constants), strict=True):
        check = check - sums[f"s_{j}"]
        sizes = np.maximum(np.abs(sums[f"low_{j}"] - centre), np.abs(sums[f"high_{j}"] - centre))
        room = room + _SUM_ROUNDING * weights * sizes / scale
    return not (np.abs(check) > room).any()


def _columns_of_sums(p):
    """Dict from sums by client to the columns that each is made of, in the order of the queries."""
    # Sums of one column come first. Products are in tiles, so that a query reads few columns.
    sums, products, lowest, highest = moment_names(p)
    pairs = [(i, j) for i in range(p) for j in range(i, p)]
    products_of = dict(zip(pairs, products, strict=True))
    tiled = sorted(pairs, key=lambda pair: [j // _TILE for j in pair])
    singles = zip(lowest, highest, sums, strict=True)
    return {
        "w": (),
        "log_w": (),
        **{name: (j,) for j, names in enumerate(singles) for name in names},
        **{products_of[pair]: pair for pair in tiled},
    }


def _query(frame, part, needed, checked, constants):
    """Query of some sums by client, of their number of rows, and of the sum of some columns."""
    # It selects only the columns that it needs: with the text of all products in every query, times
    # would grow with the cube of the number of columns.
    weight, names = nw.col(WEIGHT), frame.collect_schema().names()
    frame = frame.filter(*(~nw.col(name).is_null() for name in names), weight > 0)
    centred = {
        j: (nw.col(f"v_{j}") - float(constants[0][j])) * (1 / float(constants[1][j]))
        for j in needed
    }
    frame = frame.select(
        GROUP,
        WEIGHT,
        weight.log().alias("log_w"),
        *(nw.col(f"v_{j}") for j in needed),
        *(value.alias(f"u_{j}") for j, value in centred.items()),
        *((value * weight).alias(f"s_{j}") for j, value in centred.items()),
    )
    total = nw.lit(0.0)
    for j in checked:
        total = total + nw.col(f"s_{j}")
    # A product inside agg is more than some engines know.
    products = {name: pair for name, pair in part.items() if len(pair) == 2}
    frame = frame.with_columns(
        total.alias(_CHECK),
        *((nw.col(f"s_{i}") * nw.col(f"u_{j}")).alias(name) for name, (i, j) in products.items()),
    )
    return frame.group_by(GROUP).agg(
        nw.len().alias("n"), nw.col(_CHECK).sum(), *(_aggregate(name) for name in part)
    )


def _aggregate(name):
    kind, _, column = name.partition("_")
    if kind in ("low", "high"):
        values = nw.col(f"v_{column}")
        return (values.min() if kind == "low" else values.max()).alias(name)
    return nw.col(WEIGHT if name == "w" else name).sum().alias(name)
