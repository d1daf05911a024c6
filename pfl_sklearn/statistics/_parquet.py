"""Statistics of clients as a Parquet file that any engine reads: a row per client, no code."""

import json
import reprlib
import zlib

import numpy as np

from pfl_sklearn._clients import encode_ids, format_id
from pfl_sklearn._columns import LARGEST_EXACT
from pfl_sklearn._files import remove_abandoned, replaced_file
from pfl_sklearn.statistics._cholesky import blocks_of_clients, packed_length, unpack
from pfl_sklearn.statistics._clipping import (
    check_clipped,
    check_release_bounds,
    clipping_of,
    limits_of,
)
from pfl_sklearn.statistics._fields import BOUND_FIELDS, CLIENT_FIELDS, TABLE_FIELDS
from pfl_sklearn.statistics._plausibility import (
    MOMENT_ROUNDING,
    too_many_rows,
    wrong_triangles,
    wrong_weights,
)
from pfl_sklearn.statistics._rows import check_range

_FORMAT = "pfl_sklearn client statistics 2"
_LONGEST_ID = 8  # bytes of an id, but for strings, whose type has no length
_STRINGS, _BOUND = (list, type(None)), (float, int, type(None))
# What a file says about the table, and the types that it may have.
_TYPES = {
    "ids": (str,),
    "parts": (list,),
    "n_features": (int,),
    "n_targets": (int,),
    "n_left_out": (int,),
    "feature_names": _STRINGS,
    "target_names": _STRINGS,
    "feature_bound": _BOUND,
    "target_bound": _BOUND,
}
_LOWEST_COUNTS = {"n_features": 0, "n_targets": 1, "n_left_out": 0}


def _pyarrow():
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("Parquet files need pyarrow: pip install pyarrow.") from error
    return pyarrow


def _column_of_ids(ids):
    """A column of ids; those with dates of whole days, hours or minutes in seconds."""
    # The format knows no such dates.
    if ids.dtype.kind in "mM" and np.datetime_data(ids.dtype)[0] not in ("s", "ms", "us", "ns"):
        ids = ids.astype(f"{ids.dtype.kind}8[s]")
    return _pyarrow().table({"client": ids})["client"]


def _type_of_ids(ids):
    """Type of ids as numpy spells it; of strings without a length, which the ids have."""
    return ids.dtype.kind if ids.dtype.kind in "US" else ids.dtype.str


def write_parquet(statistics, path):
    """Write fields of ClientStatistics to a Parquet file, or to a file that is open.

    Raises OSError if the file cannot be written; its old contents then stay as they were.
    """
    pa = _pyarrow()
    columns = {"client": _column_of_ids(statistics.clients)}
    for field, (name, _) in CLIENT_FIELDS.items():
        values = getattr(statistics, field)
        if values is None:
            continue
        columns[name] = pa.array(np.ascontiguousarray(values).ravel())
        if values.ndim == 2:
            columns[name] = pa.FixedSizeListArray.from_arrays(columns[name], values.shape[1])
    facts = {name: getattr(statistics, name) for name in TABLE_FIELDS}
    facts = {"format": _FORMAT, **facts, "ids": _type_of_ids(statistics.clients)}
    text = json.dumps(facts)
    # Checksums of pages do not cover the end of a file, where this is.
    metadata = {"pfl_sklearn": text, "pfl_sklearn_crc32": str(zlib.crc32(text.encode()))}
    table = pa.table(columns).replace_schema_metadata(metadata)
    if hasattr(path, "write"):
        pa.parquet.write_table(table, path, write_page_checksum=True)
        return
    try:
        with replaced_file(path) as file:
            pa.parquet.write_table(table, file, write_page_checksum=True)
    except OSError as error:
        raise type(error)(
            f"statistics cannot be written to {path} ({error.strerror or error}); what the file "
            "held is as it was. Give a file in an existing folder with room."
        ) from error
    remove_abandoned(path)


def read_parquet(path):
    """Fields of ClientStatistics from a Parquet file.

    Raises ValueError for a file that is damaged or holds no statistics, and for values that no rows
    have.
    """
    table = _read_table(path)
    metadata = table.schema.metadata or {}
    facts = _read_table_fields(path, metadata)
    d, k, kind = facts["n_features"], facts["n_targets"], facts.pop("ids")
    try:
        bounds = check_release_bounds(d, k, None, *(facts[name] for name in BOUND_FIELDS))
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{path} has bounds that no statistics have: {error}") from error
    clipping, limits = clipping_of(d, bounds), limits_of(d, k, bounds)
    names = {name for field, (name, _) in CLIENT_FIELDS.items() if clipping or field != "clipped"}
    if sorted(table.column_names) != sorted(["client", *names]):
        raise ValueError(
            f"{path} has the columns {table.column_names}; expected client, {sorted(names)}."
        )
    ids, order = _sorted_ids(path, table["client"], kind)
    fields = {"clients": ids}
    for field, (name, _) in CLIENT_FIELDS.items():
        if name in names:
            fields[field] = _numbers(path, table, field, d + k)[order]
    _check_fields(path, fields, clipping, limits, d)
    # Last, as other errors say what is wrong.
    if metadata.get(b"pfl_sklearn_crc32") != b"%d" % zlib.crc32(metadata[b"pfl_sklearn"]):
        raise ValueError(f"{path} has facts about its table that changed after they were written.")
    return {**facts, **bounds, **fields}


def _read_table(path):
    """Table of a file, whose pages must have the checksums that were written with them."""
    pa = _pyarrow()
    try:
        with pa.parquet.ParquetFile(path, page_checksum_verification=True) as file:
            return file.read()
    except (OSError, ValueError, TypeError, pa.ArrowException) as error:
        # Only the system's own errors, such as of a file that is not there, have a number.
        if getattr(error, "errno", None) is not None:
            raise
        raise ValueError(f"{path} cannot be read: it is damaged, or no Parquet file.") from error


def _read_table_fields(path, metadata):
    """Facts about the table of a file, by name."""
    try:
        facts = json.loads(metadata.get(b"pfl_sklearn", b"{}"))
    except (ValueError, RecursionError):  # the latter of lists in lists in lists
        facts = {}
    form = facts.pop("format", None) if isinstance(facts, dict) else None
    if not isinstance(form, str) or not form.startswith(_FORMAT[:-1]):
        raise ValueError(f"{path} is no file that ClientStatistics.to_parquet wrote.")
    if form != _FORMAT:
        raise ValueError(f"{path} has the format {reprlib.repr(form)}; expected {_FORMAT!r}.")
    _check_table_fields(path, facts)
    return facts


def _check_table_fields(path, facts):
    """Raise ValueError for facts about the table that no statistics have; lists become tuples."""
    if facts.keys() != _TYPES.keys():
        raise ValueError(f"{path} has the fields {sorted(facts)}; expected {sorted(_TYPES)}.")
    for name, types in _TYPES.items():
        value, valid = facts[name], type(facts[name]) in types
        if valid and isinstance(value, list):
            valid = all(isinstance(text, str) for text in value) and len(set(value)) == len(value)
            if name != "parts":
                valid = valid and len(value) == facts[f"n_{name.removesuffix('_names')}s"]
            facts[name] = tuple(value)
        if valid and name in _LOWEST_COUNTS:
            valid = _LOWEST_COUNTS[name] <= value <= LARGEST_EXACT
        if not valid:
            raise ValueError(f"{path} has {name}={reprlib.repr(value)}, which no statistics have.")


def _sorted_ids(path, column, kind):
    """Sorted ids (m,) of a column of this type, as numpy spells it, and the order of its rows."""
    if column.null_count:
        raise ValueError(f"{path} has rows without a client.")
    try:
        if np.dtype(kind).itemsize > _LONGEST_ID:
            raise ValueError("no such type is written")
        ids = column.to_numpy().astype(kind)
        # Neither 0.5 as 0, nor large numbers as negative ones, nor strings cut off.
        if not _column_of_ids(ids).cast(column.type).equals(column):
            raise ValueError(f"they are of type {column.type}")
        distinct, codes = encode_ids(ids)
    except (TypeError, ValueError, OverflowError, NotImplementedError, SyntaxError) as error:
        raise ValueError(f"{path} has clients that are no ids of type {kind!r}: {error}") from error
    if len(distinct) < len(codes):
        raise ValueError(
            f"{path} has {len(codes)} rows of {len(distinct)} clients; expected one each."
        )
    return distinct, np.argsort(codes)


def _numbers(path, table, field, p):
    """Numbers (m,) or (m, k) of a field, p columns."""
    name, m = CLIENT_FIELDS[field][0], len(table)
    width = {"lowest": p, "highest": p, "packed": packed_length(p + 1)}
    width["clipped"] = width["packed"]
    values = table[name].combine_chunks()
    if field in width:
        values = _flattened(path, name, values, width[field])
    numbers = np.asarray(values)
    kind, expected = "float64", "finite"
    if field == "n_samples_per_client":
        kind, expected = "int64", "whole"
    if numbers.dtype != kind or not np.isfinite(numbers).all():
        raise ValueError(f"{path} must have {expected} numbers as {name}.")
    return numbers.reshape(m, width[field]) if field in width else numbers


def _flattened(path, name, lists, width):
    """Numbers of all clients of lists of `width` numbers."""
    pa = _pyarrow()
    if not (pa.types.is_list(lists.type) or pa.types.is_fixed_size_list(lists.type)):
        raise ValueError(f"{path} must have a list of numbers of each client as {name}.")
    values = lists.flatten()
    if len(values) != len(lists) * width:
        raise ValueError(
            f"{path} has {len(values) / len(lists):g} numbers of a client as {name}; expected "
            f"{width}."
        )
    if (np.asarray(lists.value_lengths()) != width).any():
        raise ValueError(f"{path} has lists of different lengths as {name}; expected {width}.")
    return values


def _check_fields(path, fields, clipping, limits, n_features):
    """Raise ValueError for fields that no rows have."""
    ids, sizes = fields["clients"], fields["n_samples_per_client"]
    low, high = fields["lowest"], fields["highest"]
    if not len(ids):
        return
    _raise_for_client(path, ids, sizes < 1, "n must be at least 1")
    if too_many_rows(sizes):
        raise ValueError(f"{path} has n of more rows than can be counted.")
    _raise_for_client(path, ids, (low > high).any(axis=1), "lowest is above highest")
    largest = np.maximum(np.abs(low), np.abs(high))
    # Engines subtract a constant of the table first, so that is where digits end.
    room = MOMENT_ROUNDING * largest.max(axis=0)
    for part in blocks_of_clients(len(ids), low.shape[1] + 1):
        for field in ("packed", "clipped"):
            if field in fields:
                triangles = unpack(fields[field][part], low.shape[1] + 1)
                wrong = wrong_triangles(triangles, sizes[part], low[part], high[part], room)
                fault = f"its {CLIENT_FIELDS[field][0]} is no triangle of rows"
                _raise_for_client(path, ids[part], wrong, fault)
        if clipping is not None:  # `triangles` are those of scaled rows
            check_clipped(clipping, ids[part], sizes[part], triangles)
    with np.errstate(over="ignore"):  # infinite weights are refused with the range
        weights, private = fields["packed"][:, 0] ** 2, limits is not None
    wrong = wrong_weights(sizes, weights, fields["log_weights"], private)
    _raise_for_client(path, ids, wrong, "n rows have no weights with its triangle and log_weight")
    if private:
        beyond = (largest > limits.largest).any(axis=1)
        _raise_for_client(path, ids, beyond, "its values are beyond those of a private fit")
        return
    try:
        check_range((low, high), n_features, float(np.max(weights / sizes)))
    except ValueError as error:
        raise ValueError(f"{path} has values that no statistics have: {error}") from error


def _raise_for_client(path, ids, wrong, fault):
    """Raise ValueError for the first client that is wrong."""
    if wrong.any():
        raise ValueError(f"{path}: client {format_id(ids[np.argmax(wrong)])} is wrong: {fault}.")
