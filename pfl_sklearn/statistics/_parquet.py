"""Statistics of clients as a Parquet file that any engine reads: a row per client, no code."""

import json

import numpy as np

from pfl_sklearn._clients import encode_ids, shown
from pfl_sklearn.statistics._clipping import check_clipped, checked_bounds, clipping_of
from pfl_sklearn.statistics._fields import BOUNDS, FACTS, PER_CLIENT
from pfl_sklearn.statistics._moments import beyond
from pfl_sklearn.statistics._triangles import blocks_of_clients, packed_length, unpack

_FORMAT = "pfl_sklearn client statistics 1"
_ROUNDING = 1e-6  # of means, over the largest values of their column
_NAMES, _BOUND = (list, type(None)), (float, int, type(None))
# What a file says about the table, and the types that it may have.
_TYPES = {
    "ids": (str,),
    "n_features": (int,),
    "n_targets": (int,),
    "n_left_out": (int,),
    "feature_names": _NAMES,
    "target_names": _NAMES,
    "feature_bound": _BOUND,
    "target_bound": _BOUND,
}
_LEAST = {"n_features": 0, "n_targets": 1, "n_left_out": 0}


def _pyarrow():
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("Parquet files need pyarrow: pip install pyarrow.") from error
    return pyarrow


def _known_to_parquet(ids):
    """Ids with dates of whole days, hours or minutes in seconds, which the format knows."""
    if ids.dtype.kind in "mM" and np.datetime_data(ids.dtype)[0] not in ("s", "ms", "us", "ns"):
        return ids.astype(f"{ids.dtype.kind}8[s]")
    return ids


def write(statistics, path):
    """Write fields of ClientStatistics to a Parquet file."""
    pa = _pyarrow()
    columns = {"client": pa.array(_known_to_parquet(statistics.clients))}
    for field, (name, _) in PER_CLIENT.items():
        values = getattr(statistics, field)
        if values is None:
            continue
        columns[name] = pa.array(np.ascontiguousarray(values).ravel())
        if values.ndim == 2:
            columns[name] = pa.FixedSizeListArray.from_arrays(columns[name], values.shape[1])
    facts = {name: getattr(statistics, name) for name in FACTS}
    metadata = {
        "pfl_sklearn": json.dumps({"format": _FORMAT, **facts, "ids": statistics.clients.dtype.str})
    }
    table = pa.table(columns).replace_schema_metadata(metadata)
    pa.parquet.write_table(table, path)


def read(path):
    """Fields of ClientStatistics from a Parquet file.

    Raises
    ------
    ValueError
        For a file that holds no statistics, and for triangles and bounds that no rows have.
    """
    table = _pyarrow().parquet.read_table(path)
    facts = json.loads((table.schema.metadata or {}).get(b"pfl_sklearn", b"{}"))
    if not isinstance(facts, dict) or facts.pop("format", None) != _FORMAT:
        raise ValueError(f"{path} is no file that ClientStatistics.to_parquet wrote.")
    _check_facts(path, facts)
    d, k, kind = facts["n_features"], facts["n_targets"], facts.pop("ids")
    bounds = checked_bounds(d, k, None, *(facts[name] for name in BOUNDS))
    clipping = clipping_of(d, bounds)
    names = {name for field, (name, _) in PER_CLIENT.items() if clipping or field != "clipped"}
    if set(table.column_names) != {"client", *names}:
        raise ValueError(
            f"{path} has the columns {table.column_names}; expected client, {sorted(names)}."
        )
    if table["client"].null_count:
        raise ValueError(f"{path} has rows without a client.")
    try:
        ids, codes = encode_ids(table["client"].to_numpy().astype(kind))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} has clients that are no ids of type {kind!r}: {error}") from error
    if len(ids) < len(codes):
        raise ValueError(f"{path} has {len(codes)} rows of {len(ids)} clients; expected one each.")
    order, fields = np.argsort(codes), {"clients": ids}
    for field, (name, _) in PER_CLIENT.items():
        if name in names:
            fields[field] = _numbers(path, table, field, d + k)[order]
    _check(path, fields, clipping)
    return {**facts, **bounds, **fields}


def _check_facts(path, facts):
    """Raise ValueError for facts about the table that no statistics have; names become tuples."""
    if facts.keys() != _TYPES.keys():
        raise ValueError(f"{path} has the fields {sorted(facts)}; expected {sorted(_TYPES)}.")
    for name, types in _TYPES.items():
        value, right = facts[name], type(facts[name]) in types
        if right and isinstance(value, list):
            n = facts[f"n_{name.removesuffix('_names')}s"]
            right = len(value) == n and all(isinstance(each, str) for each in value)
            facts[name] = tuple(value)
        if not right or (name in _LEAST and value < _LEAST[name]):
            raise ValueError(f"{path} has {name}={value!r}, which no statistics have.")


def _numbers(path, table, field, p):
    """Numbers (m,) or (m, k) of a field, p columns."""
    name, m = PER_CLIENT[field][0], len(table)
    width = {"lowest": p, "highest": p, "packed": packed_length(p + 1)}
    width["clipped"] = width["packed"]
    values = table[name].combine_chunks()
    if field in width and hasattr(values, "flatten"):
        values = values.flatten()
        if len(values) != m * width[field]:
            raise ValueError(
                f"{path} has {len(values) / m:g} numbers of a client as {name}; expected "
                f"{width[field]} for {p} columns."
            )
    numbers = np.asarray(values)
    kinds = "iu" if field == "n_samples_per_client" else "f"
    if numbers.dtype.kind not in kinds or not np.isfinite(numbers).all():
        what = "whole" if kinds == "iu" else "finite"
        raise ValueError(f"{path} must have {what} numbers as {name}.")
    return numbers.reshape(m, width[field]) if field in width else numbers


def _check(path, fields, clipping):
    """Raise ValueError for fields that no rows have."""
    ids, sizes, p = fields["clients"], fields["n_samples_per_client"], fields["lowest"].shape[1]
    low, high = fields["lowest"], fields["highest"]
    # Engines subtract a constant of the table first, so that is where digits end.
    room = _ROUNDING * np.maximum(np.abs(low), np.abs(high)).max(axis=0, initial=0.0)
    problems = {"n must be at least 1": sizes < 1, "lowest is above highest": (low > high).any(1)}
    for field in ("packed", "clipped"):
        if field not in fields:
            continue
        packed, name = fields[field], PER_CLIENT[field][0]
        whole = packed[:, 0] != 0
        means = packed[:, 1 : p + 1] / np.where(whole, packed[:, 0], 1.0)[:, None]
        wrong = ~whole | beyond(means, low, high, room)
        problems[f"its {name} is no triangle of rows"] = wrong
    for what, wrong in problems.items():
        if wrong.any():
            raise ValueError(f"{path}: client {shown(ids[np.argmax(wrong)])} is wrong: {what}.")
    if clipping is not None:
        for part in blocks_of_clients(len(ids), p + 1):
            triangles = unpack(fields["clipped"][part], p + 1)
            check_clipped(clipping, ids[part], sizes[part], triangles)
