"""Statistics of clients as a Parquet file that any engine reads: a row per client, no code."""

import json

import numpy as np

from pfl_sklearn._clients import encode_ids

_FORMAT = "pfl_sklearn client statistics 1"
_FACTS = ("n_features", "n_targets", "feature_names", "target_names", "n_left_out")
_LISTS = {"triangle": "packed", "lowest": "lowest", "highest": "highest"}


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
    columns = {
        "client": pa.array(_known_to_parquet(statistics.clients)),
        "n": pa.array(statistics.n_samples_per_client),
        "log_weight": pa.array(statistics.log_weights),
    }
    for name, field in _LISTS.items():
        values = getattr(statistics, field)
        flat = pa.array(np.ascontiguousarray(values).ravel())
        columns[name] = pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
    facts = {name: getattr(statistics, name) for name in _FACTS}
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
        For a file that holds no statistics.
    """
    table = _pyarrow().parquet.read_table(path)
    facts = json.loads((table.schema.metadata or {}).get(b"pfl_sklearn", b"{}"))
    if facts.pop("format", None) != _FORMAT:
        raise ValueError(f"{path} is no file that ClientStatistics.to_parquet wrote.")
    for name in ("feature_names", "target_names"):
        facts[name] = None if facts[name] is None else tuple(facts[name])
    ids, codes = encode_ids(table["client"].to_numpy().astype(facts.pop("ids")))
    order = np.argsort(codes)

    def matrix(name):
        values = table[name].combine_chunks().flatten().to_numpy()
        return values.reshape(len(order), -1)[order]

    return {
        **facts,
        "clients": ids,
        "n_samples_per_client": table["n"].to_numpy()[order],
        "log_weights": table["log_weight"].to_numpy()[order],
        **{field: matrix(name) for name, field in _LISTS.items()},
    }
