"""Statistics of clients as a Parquet file that any engine reads: a row per client, no code."""

import json

import numpy as np

from pfl_sklearn._clients import encode_ids, shown
from pfl_sklearn.statistics._clipping import check_clipped, checked_bounds, clipping_of
from pfl_sklearn.statistics._fields import BOUNDS, FACTS, PER_CLIENT
from pfl_sklearn.statistics._triangles import blocks_of_clients, packed_length, unpack

_FORMAT = "pfl_sklearn client statistics 1"
_ROUNDING = 1e-6  # of means, over the largest values of their column


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
    if facts.pop("format", None) != _FORMAT:
        raise ValueError(f"{path} is no file that ClientStatistics.to_parquet wrote.")
    for name in ("feature_names", "target_names"):
        facts[name] = None if facts[name] is None else tuple(facts[name])
    ids, codes = encode_ids(table["client"].to_numpy().astype(facts.pop("ids")))
    if len(ids) < len(codes):
        raise ValueError(f"{path} has {len(codes)} rows of {len(ids)} clients; expected one each.")
    order = np.argsort(codes)
    fields = {"clients": ids}
    for field, (name, _) in PER_CLIENT.items():
        if name not in table.column_names:
            continue
        values = table[name].combine_chunks()
        if hasattr(values, "flatten"):  # a list for each client
            values = values.flatten().to_numpy().reshape(len(order), -1)
        fields[field] = np.asarray(values)[order]
    _check(path, facts, fields)
    return {**facts, **fields}


def _check(path, facts, fields):
    """Raise ValueError for fields that no rows have."""
    ids, sizes = fields["clients"], fields["n_samples_per_client"]
    d, k = facts["n_features"], facts["n_targets"]
    p = d + k
    widths = {"packed": packed_length(p + 1), "lowest": p, "highest": p}
    clipping = clipping_of(d, checked_bounds(d, k, None, *(facts[name] for name in BOUNDS)))
    if (clipping is None) != ("clipped" not in fields):
        raise ValueError(f"{path} has bounds without clipped triangles, or triangles without them.")
    if clipping is not None:
        widths["clipped"] = widths["packed"]
    for field, width in widths.items():
        if fields[field].shape[1] != width:
            raise ValueError(
                f"{path} has {fields[field].shape[1]} numbers of a client as "
                f"{PER_CLIENT[field][0]}; expected {width} for {p} columns."
            )
    low, high = fields["lowest"], fields["highest"]
    # Engines subtract a constant of the table first, so that is where digits end.
    room = _ROUNDING * np.maximum(np.abs(low), np.abs(high)).max(axis=0)
    problems = {"n must be at least 1": sizes < 1, "lowest is above highest": (low > high).any(1)}
    for field in ("packed", "clipped"):
        if field not in fields:
            continue
        packed, name = fields[field], PER_CLIENT[field][0]
        whole = np.isfinite(packed).all(axis=1) & (packed[:, 0] != 0)
        means = packed[:, 1 : p + 1] / np.where(whole, packed[:, 0], 1.0)[:, None]
        outside = ((means < low - room) | (means > high + room)).any(axis=1)
        problems[f"its {name} is no triangle of rows"] = ~whole | outside
    for what, wrong in problems.items():
        if wrong.any():
            raise ValueError(f"{path}: client {shown(ids[np.argmax(wrong)])} is wrong: {what}.")
    if clipping is not None:
        for part in blocks_of_clients(len(ids), p + 1):
            triangles = unpack(fields["clipped"][part], p + 1)
            check_clipped(clipping, ids[part], sizes[part], triangles)
