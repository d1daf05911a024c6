"""Rows and clients: the only code that looks at ``groups``.

A client id per row comes in, in whatever container; sorted ids and one integer code per row go
out. Everything after that works on codes.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import date
from numbers import Integral, Real
from typing import Any, NamedTuple

import narwhals as nw
import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.sparse import csc_matrix

from pfl_sklearn._columns import LARGEST_EXACT, column_labels
from pfl_sklearn._warnings import warn_caller

Array = npt.NDArray[Any]
Codes = npt.NDArray[np.intp]

_ID_KINDS = {
    "b": "boolean",
    "i": "number",
    "u": "number",
    "f": "number",
    "U": "string",
    "S": "bytes",
    "M": "datetime",
    "m": "timedelta",
}
_OBJECT_KINDS = {"string": "string", "bytes": "bytes", "decimal": "decimal"}
WRONG_KIND = (
    "holds ids of type {}; expected integers, strings, booleans or dates (of one kind, all with a "
    "time zone or none). Strings made of them will do."
)
_CASTABLE = ("iu", "UO", "SO")  # kinds of arrays whose ids can be compared after a cast
_HASHED_BEYOND = 20  # known ids for each that is looked for, from which on bisection is faster
_ROWS_AT_ONCE = 1 << 19  # of an indicator matrix, which is as large as 1.5 columns of them


class EncodedClients(NamedTuple):
    """Sorted ids (n_clients,) and the position of every row's id in them (n_rows,)."""

    ids: Array
    codes: Codes


def encode_clients(groups: Any, n_rows: int, name: str = "groups") -> EncodedClients:
    """EncodedClients of one client id per row (n_rows,); error messages call the ids `name`.

    Ids are integers, strings, booleans, dates or a categorical, in a list, an array, or a pandas or
    polars series. Times with a zone become UTC. Floats must be whole numbers, unless they are the
    categories of a categorical (which declares that its values are labels). Raises ValueError for
    another length or dimension, and for missing, infinite, fractional or mixed-type ids.
    """
    if isinstance(getattr(groups, "dtype", None), pd.CategoricalDtype):
        return _encode_categorical(groups, n_rows, name)
    ids = _checked_ids(groups, n_rows, name)
    if ids.dtype.kind in "iu" and ids.size:
        low, high = int(ids.min()), int(ids.max())
        # Four entries of the table for each row: less memory than hashes, and no sort.
        if high - low <= 4 * ids.size + 1024:
            return _encode_dense(ids, low, high)
    codes, uniques = pd.factorize(ids, sort=False)
    # factorize may widen the type of the ids, and clients_ has that of the table.
    return _sort_ids(np.asarray(uniques).astype(ids.dtype, copy=False), codes)


def match_clients(
    groups: Any,
    n_rows: int,
    known: Array,
    name: str = "groups",
    of_known: str = "the clients seen in fit",
) -> Codes:
    """Position of every row's id in the sorted array `known`; -1 where it is not there.

    Ids of another kind than `known` (numbers, strings, ...) raise ValueError. Without it, every
    client would silently count as unseen.
    """
    new = encode_clients(groups, n_rows, name)
    if n_rows == 0:
        return new.codes
    kind, known_kind = _kind(new.ids), _kind(known[:1])  # known ids are of one kind
    if kind != known_kind:
        raise ValueError(
            f"{name} holds {kind} ids (such as {format_id(new.ids[0])}), but {of_known} "
            f"have {known_kind} ids (such as {format_id(known[0])}); give them in the same type."
        )
    return _positions_of_ids(new.ids, known)[new.codes]


def encode_levels(values: Any, name: str) -> EncodedClients:
    """EncodedClients of the levels in a column (n_rows,), whose missing values get the code -1."""
    present = ~np.asarray(pd.isna(values))
    codes = np.full(len(values), -1, dtype=np.intp)
    ids, codes[present] = encode_clients(_as_labels(values[present]), int(present.sum()), name)
    return EncodedClients(ids, codes)


def match_levels(values: Any, known: Array, name: str) -> Codes:
    """Position of every row's level in the sorted array `known`; -1 for others and missing ones."""
    present = ~np.asarray(pd.isna(values))
    codes = np.full(len(values), -1, dtype=np.intp)
    labels, of_known = _as_labels(values[present]), "its levels in fit"
    codes[present] = match_clients(labels, int(present.sum()), known, name, of_known)
    return codes


def _as_labels(values: Any) -> Any:
    # Levels are exact values, although floats: a missing value turns integers into floats.
    return pd.Categorical(values) if values.dtype.kind == "f" else values


def encode_ids(ids: Array) -> EncodedClients:
    """EncodedClients of ids (n,) that were known before; floats among them are labels."""
    return encode_clients(
        pd.Categorical(ids) if ids.dtype.kind == "f" else ids, len(ids), "clients"
    )


def concatenate_ids(first: Array, second: Array) -> Array:
    """Ids of both, one after the other; ValueError if they are of different kinds."""
    of_floats = "f" in (first.dtype.kind, second.dtype.kind)
    ids = pd.Categorical(second) if of_floats else second
    match_clients(ids, len(ids), first, "clients", "those before")
    if {first.dtype.kind, second.dtype.kind} == {"i", "u"}:  # together they would become floats
        first, second = first.astype(object), second.astype(object)
    return np.concatenate([first, second])


def _positions_of_ids(ids: Array, known: Array) -> Codes:
    """Position of every id in the sorted array `known`; -1 where it is not there."""
    # A few ids are looked up by bisection, which needs no hash table of all known ones. They take
    # the type of `known` first (never the other way round, which would copy all clients); an id
    # that it cannot hold is absent. Types between which that comparison is not exact are hashed.
    kinds = {ids.dtype.kind, known.dtype.kind}
    exact = ids.dtype == known.dtype or any(kinds <= set(pair) for pair in _CASTABLE)
    if not exact:
        return pd.Index(known).get_indexer(pd.Index(ids))
    wanted = ids.astype(known.dtype)
    fits = np.asarray(wanted == ids, dtype=bool)  # in a narrow type 260 may become 4
    if _HASHED_BEYOND * len(ids) > len(known):
        return np.where(fits, pd.Index(known).get_indexer(pd.Index(wanted)), -1)
    nearest = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    return np.where(fits & np.asarray(known[nearest] == wanted, dtype=bool), nearest, -1)


def row_counts(codes: Codes, n_clients: int) -> npt.NDArray[np.int64]:
    """Rows of every client (n_clients,)."""
    return np.bincount(codes, minlength=n_clients)


def segment_sums(values: Array, codes: Codes, n_clients: int) -> npt.NDArray[np.float64]:
    """Sum of `values` (n_rows,) or (n_rows, d) over the rows of every client."""
    values = np.asarray(values, dtype=np.float64)
    if values.ndim == 1:  # bincount is faster than a product with a sparse matrix
        return np.asarray(np.bincount(codes, values, n_clients), dtype=np.float64)
    if values.shape[1] == 1:
        return segment_sums(values[:, 0], codes, n_clients)[:, None]
    sums = np.zeros((n_clients, values.shape[1]))
    for start in range(0, len(codes), _ROWS_AT_ONCE):
        block = codes[start : start + _ROWS_AT_ONCE]
        indicator = csc_matrix(
            (np.ones(len(block)), block, np.arange(len(block) + 1)), (n_clients, len(block))
        )
        sums += indicator @ values[start : start + _ROWS_AT_ONCE]
    return sums


def rows_by_client(codes: Codes, n_clients: int) -> tuple[Codes, Codes]:
    """Row order (n_rows,) by client, and offsets (n_clients + 1,), by a stable counting sort."""
    # Client i has the rows ``order[offsets[i]:offsets[i + 1]]``.
    n_rows = len(codes)
    # From columns to rows of a sparse matrix is a counting sort: linear in the rows, and stable.
    by_row = csc_matrix(
        (np.ones(n_rows, dtype=np.int8), codes, np.arange(n_rows + 1)), (n_clients, n_rows)
    )
    by_client = by_row.tocsr()
    return by_client.indices.astype(np.intp), by_client.indptr.astype(np.intp)


class ClientBatch(NamedTuple):
    """Clients with equally many rows: positions (b,), and the rows (b, n) that they have."""

    clients: Codes
    rows: Codes


def client_batches(codes: Codes, n_clients: int, max_rows: int = 1 << 16) -> list[ClientBatch]:
    """Batches of clients of equal size, so that their rows stack to arrays (b, n, ...).

    A batch has at most `max_rows` rows, but whole clients; every client is in one batch, and its
    rows stay in the order of the table. Results for a client do not depend on the batches.
    """
    order, offsets = rows_by_client(codes, n_clients)
    sizes = np.diff(offsets)
    by_size = np.argsort(sizes, kind="stable")
    distinct, starts = np.unique(sizes[by_size], return_index=True)
    batches = []
    for size, members in zip(distinct.tolist(), np.split(by_size, starts[1:]), strict=True):
        step = max(max_rows // max(size, 1), 1)
        for start in range(0, len(members), step):
            clients = members[start : start + step]
            rows = order[offsets[clients][:, None] + np.arange(size)]
            batches.append(ClientBatch(clients, rows))
    return batches


def check_not_column_name(groups: Any, name: str = "groups") -> None:
    """Raise ValueError if ids are a string, such as the name of a column."""
    if isinstance(groups, str):
        way_out = f" To name a column of X: ClientColumn(..., column={groups!r})."
        raise ValueError(
            f"{name} must hold one client id per row; got the string {groups!r}."
            f"{way_out if name == 'groups' else ''}"
        )


def warn_of_client_ids(X: Any, groups: Any) -> None:
    """Warn of columns of integers in a data frame that hold the client ids (n_rows,)."""
    # A private fit must not call this.
    ids = np.asarray(groups)
    if ids.dtype.kind not in "iu" or not len(ids) or column_labels(X) is None:
        return
    frame = nw.from_native(X, eager_only=True)
    # The first row rules most columns out.
    names = [
        name
        for name, value in zip(frame.columns, frame.row(0), strict=True)
        if isinstance(value, Real) and value == ids[0]
    ]
    for column in map(frame.get_column, names):
        if column.dtype.is_integer() and np.array_equal(column.to_numpy(), ids):
            warn_caller(
                f"Column {column.name!r} of X holds the client ids as integers, and would be a "
                "feature. Leave it out of X; if it is a feature, such as a year, give floats.",
                UserWarning,
            )


def _checked_ids(groups: Any, n_rows: int, name: str) -> Array:
    """One-dimensional numpy array of ids of one type, none missing."""
    check_not_column_name(groups, name)
    ids = _as_numpy(groups, name)
    if ids.ndim == 2 and ids.shape[1] == 1:
        ids = ids[:, 0]
    if ids.ndim != 1:
        raise ValueError(
            f"{name} must hold one client id per row; got an array of shape {ids.shape}."
        )
    _check_length(len(ids), n_rows, name)
    if ids.dtype.kind in "OT":
        ids = _typed_objects(ids.astype(object, copy=False), name)
    if ids.dtype.kind == "f":
        return _ids_from_floats(ids, name)
    if ids.dtype.kind in "mM" and np.isnat(ids).any():
        raise _missing_id_error(name, int(np.flatnonzero(np.isnat(ids))[0]))
    if ids.dtype.kind not in _ID_KINDS and ids.dtype.kind != "O":
        raise ValueError(f"{name} must hold integers, strings, booleans or dates; got {ids.dtype}.")
    return ids


def _as_numpy(groups: Any, name: str) -> Array:
    """Any container as an array; a plain sequence keeps its objects, so that mixed types show."""
    if isinstance(groups, np.ndarray):
        if np.ma.is_masked(groups):
            raise _missing_id_error(name, int(np.flatnonzero(np.ma.getmaskarray(groups))[0]))
        # pandas hashes numbers in the byte order of the machine alone.
        native = groups.dtype if groups.dtype.isnative else groups.dtype.newbyteorder()
        return np.asarray(groups, dtype=native)
    series = nw.from_native(groups, allow_series=True, pass_through=True)
    if isinstance(series, nw.Series) and series.dtype.is_nested():
        raise ValueError(f"{name} {WRONG_KIND.format(series.dtype)}")
    if isinstance(series, nw.Series | nw.DataFrame):
        return _frame_values(series)
    if hasattr(groups, "__array__"):
        return np.asarray(groups)
    return np.asarray(groups, dtype=object)


def _frame_values(frame: Any) -> Array:
    """Values of a narwhals series or frame as an array; strings are objects."""
    if frame.implementation.is_polars():
        # narwhals asks for strings of a fixed width, which end before a last NUL ("a" and "a\0"
        # would be one client) and take the room of the longest one.
        frame = frame.to_native()
    return np.asarray(frame.to_numpy())


def _typed_objects(ids: Array, name: str) -> Array:
    """Object ids as the one type that they all have."""
    missing = pd.isna(ids)
    if missing.any():
        raise _missing_id_error(name, int(np.flatnonzero(missing)[0]))
    kind = pd.api.types.infer_dtype(ids, skipna=False)
    if kind == "integer":
        return _typed_integers(ids, name)
    if kind in ("date", "datetime", "datetime64"):
        return _typed_dates(ids, name)
    if kind == "timedelta":
        return pd.to_timedelta(ids).to_numpy()
    if kind == "mixed" and isinstance(ids[0], pd.DateOffset):
        return _typed_intervals(ids, name)
    if kind in ("floating", "boolean"):
        return ids.astype(np.float64 if kind == "floating" else np.bool_)
    if kind not in _OBJECT_KINDS and ids.size:
        raise _id_type_error(ids, name)
    return ids


def _typed_integers(ids: Array, name: str) -> Array:
    """Python's integers as 64-bit ones."""
    low, high = int(ids.min()), int(ids.max())
    for dtype in (np.int64, np.uint64):
        if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
            return ids.astype(dtype)
    raise ValueError(
        f"{name} holds integers from {low} to {high}, which no 64-bit type can hold; give strings."
    )


def _typed_dates(ids: Array, name: str) -> Array:
    """Dates as days; times in the precision that they need, those with a zone in UTC."""
    days = {type(value) is date for value in ids}
    with_zone = {getattr(value, "tzinfo", None) is not None for value in ids}
    if len(days) > 1 or len(with_zone) > 1:
        raise _id_type_error(ids, name)
    if days == {True}:  # kept apart from times, so that clients_ shows dates
        return ids.astype("datetime64[D]")
    return pd.to_datetime(ids, utc=True).tz_localize(None).to_numpy()


def _typed_intervals(ids: Array, name: str) -> Array:
    """Intervals, which DuckDB has for durations, as durations; a month has no fixed one."""
    parts = [getattr(value, "kwds", {"months": 1}) for value in ids]
    if any(part.get("months") for part in parts):
        raise _id_type_error(ids, name)
    durations = [pd.Timedelta(days=p["days"], nanoseconds=p["nanoseconds"]) for p in parts]
    return pd.to_timedelta(durations).to_numpy()


def _ids_from_floats(ids: Array, name: str) -> Array:
    """Float ids as integers."""
    if not np.isfinite(ids).all():
        raise _missing_id_error(name, int(np.flatnonzero(~np.isfinite(ids))[0]), "NaN or infinity")
    ids = ids.astype(np.float64, copy=False)
    beyond = np.abs(ids) > LARGEST_EXACT
    if beyond.any():
        raise ValueError(
            f"{name} holds the float id {format_id(ids[beyond][0])}; floats beyond 2**53 do not "
            "tell whole numbers apart. Give ids as integers or strings."
        )
    fractional = ids != np.rint(ids)
    if fractional.any():
        raise ValueError(
            f"{name} holds the float id {format_id(ids[fractional][0])}; float ids must be whole "
            "numbers. To use exact values as labels, pass a pandas categorical."
        )
    return ids.astype(np.int64)


def _encode_dense(ids: Array, low: int, high: int) -> EncodedClients:
    """Integer ids of a small range: a look-up table instead of hashing."""
    if ids.dtype == np.uint64:  # subtract first: a signed type cannot hold the largest ids
        shifted = (ids - np.uint64(low)).astype(np.intp)
    else:
        shifted = ids.astype(np.intp, copy=False) - low
    present = np.zeros(high - low + 1, dtype=bool)
    present[shifted] = True
    occurring = np.flatnonzero(present)
    if len(occurring) == len(present):  # none is missing: ids less the smallest are the codes
        codes = shifted
    else:
        codes = (np.cumsum(present) - 1)[shifted]
    as_seen = np.uint64 if ids.dtype == np.uint64 else np.intp
    return EncodedClients((occurring.astype(as_seen) + as_seen(low)).astype(ids.dtype), codes)


def _encode_categorical(groups: Any, n_rows: int, name: str) -> EncodedClients:
    """Codes of a categorical as they stand; unused categories are dropped."""
    values = groups.array if hasattr(groups, "array") else groups
    _check_length(len(values), n_rows, name)
    codes = np.asarray(values.codes, dtype=np.intp)
    # pandas writes missing values as the code -1.
    if (codes < 0).any():
        raise _missing_id_error(name, int(np.flatnonzero(codes < 0)[0]))
    used = np.bincount(codes, minlength=len(values.categories)) > 0
    codes = (np.cumsum(used) - 1)[codes]
    ids = _as_numpy(values.categories[used], name)
    # A categorical declares its values to be labels, so float categories keep their exact values.
    if ids.dtype.kind != "f":
        ids = _checked_ids(ids, len(ids), name)
    elif not np.isfinite(ids).all():
        raise _missing_id_error(
            name, int(np.flatnonzero(~np.isfinite(ids[codes]))[0]), "an infinite id"
        )
    return _sort_ids(ids, codes)


def _sort_ids(ids: Array, codes: Codes) -> EncodedClients:
    """Ids in order of appearance, made sorted."""
    if len(ids) < 2 or np.all(ids[:-1] < ids[1:]):
        return EncodedClients(ids, codes)
    order = np.argsort(ids, kind="stable")
    rank = np.empty(len(order), dtype=np.intp)
    rank[order] = np.arange(len(order))
    return EncodedClients(ids[order], rank[codes])


def _kind(ids: Array) -> str:
    """Kind of ids that can be compared with one another."""
    if ids.dtype.kind != "O":
        return _ID_KINDS.get(ids.dtype.kind, str(ids.dtype))
    return _OBJECT_KINDS.get(pd.api.types.infer_dtype(ids, skipna=False), "object")


def format_id(value: Any) -> str:
    """An id as its user would write it."""
    plain = value.item() if isinstance(value, np.bool_ | np.number | np.str_ | np.bytes_) else value
    return str(plain) if isinstance(plain, np.generic) else repr(plain)


def _check_length(length: int, n_rows: int, name: str) -> None:
    if length != n_rows:
        raise ValueError(f"{name} has {length} ids, but X has {n_rows} rows.")


def _id_type_error(ids: Array, name: str) -> ValueError:
    types = sorted({type(value).__name__ for value in ids})
    if len(types) > 1:
        return ValueError(
            f"{name} mixes ids of different types ({', '.join(types)}); give all of them one type."
        )
    return ValueError(f"{name} {WRONG_KIND.format(types[0])}")


def _missing_id_error(name: str, row: int, fault: str = "a missing id (None or NaN)") -> ValueError:
    return ValueError(f"{name} contains {fault} in row {row}; every row needs a client id.")


def split_client_column(X: Any, column: int | str) -> tuple[Any, Any]:
    """Split a table into its other columns and the client ids in `column`, a name or a position.

    A float column comes as a categorical, so that its exact values are the ids. Raises ValueError
    if `X` has no such column, a row has no id, or floats do not distinguish the ids.
    """
    rest, (ids,) = split_columns(X, {"client": column})
    # scikit-learn makes one float array of a table; ids in it need not be whole numbers.
    floats = getattr(getattr(ids, "dtype", None), "kind", "") == "f"
    missing = ~np.isfinite(ids) if floats else np.asarray(pd.isna(ids))
    if missing.any():
        raise _missing_id_error(f"client column {column!r}", int(np.flatnonzero(missing)[0]))
    # One fractional cell makes floats of a whole table of lists, and distinct ids the same.
    if floats and (np.abs(ids) >= LARGEST_EXACT).any():
        raise ValueError(
            f"client column {column!r} holds floats beyond 2**53, which do not tell whole numbers "
            "apart; give ids as integers, in a data frame, whose columns have types of their own, "
            "or as strings."
        )
    return rest, pd.Categorical(ids) if floats else ids


def split_columns(X: Any, columns: dict[str, int | str]) -> tuple[Any, list[Any]]:
    """Split a table into its other columns and the values of some columns, in order.

    `columns` are names or positions, by what they hold; errors are those of the client's column.
    """
    positions = [_position(X, column, role) for role, column in columns.items()]
    if len(set(positions)) < len(positions):
        raise ValueError(f"ClientColumn got one column of X for two purposes: {columns}.")
    return split_positions(X, positions)


def split_positions(X: Any, positions: Collection[int]) -> tuple[Any, list[Any]]:
    """Split a table into its other columns and the values of those at some positions, in order."""
    positions = list(positions)
    remaining = np.setdiff1d(np.arange(X.shape[1]), positions)
    if hasattr(X, "iloc"):
        values = [X.iloc[:, k] for k in positions]
        categorical = [isinstance(column.dtype, pd.CategoricalDtype) for column in values]
        values = [v if c else v.to_numpy() for v, c in zip(values, categorical, strict=True)]
        return X.iloc[:, remaining], values
    if (names := column_labels(X)) is not None:
        frame = nw.from_native(X, eager_only=True)
        values = [_frame_values(frame.get_column(names[k])) for k in positions]
        return frame.drop([names[k] for k in positions]).to_native(), values
    if hasattr(X, "tocsc"):
        by_column = X.tocsc()
        values = [by_column[:, [k]].toarray().ravel() for k in positions]
        return by_column[:, remaining].asformat(X.format), values
    return X[:, remaining], [X[:, k] for k in positions]


def _position(X: Any, column: int | str, role: str) -> int:
    """Position of a column of a table, or ValueError."""
    if (names := column_labels(X)) is not None:
        if column in names:
            return names.index(column)
        if isinstance(column, Integral) and -len(names) <= column < len(names):
            return int(column % len(names))
        raise ValueError(
            f"{role} column {column!r} is not a column of X, which has {names}. A step before may "
            "have dropped or renamed it. A ClientColumn takes it out: what is inside gets its "
            "values by keyword (ids as groups), and needs no column."
        )
    if isinstance(column, str):
        raise ValueError(
            f"{role} column {column!r} is a name, but X has no column names (its type is "
            f"{type(X).__name__}); give a position. The steps of a pipeline can also keep the "
            "names: set_output(transform='pandas')."
        )
    if X.ndim != 2:
        raise ValueError(
            f"Expected 2D array, got {X.ndim}D array instead. Reshape your data: the client ids "
            "are to be a column of X."
        )
    if not -X.shape[1] <= column < X.shape[1]:
        raise ValueError(f"{role} column {column} is out of range: X has {X.shape[1]} columns.")
    return int(column % X.shape[1])


def ids_of_rows(X: Any, groups: Any, column: int | str | None) -> Any:
    """Ids in `groups` or a column of `X`; None without either, ValueError if both differ."""
    if column is None:
        return groups
    ids = split_client_column(X, column)[1]
    check_same_ids(groups, ids, column)
    return ids


def check_same_ids(groups: Any, ids: Any, column: int | str) -> None:
    """Raise ValueError if `groups` are given and differ from the ids of a column."""
    if groups is not None and not same_ids(groups, ids, len(ids)):
        raise ValueError(f"groups= differs from column {column!r} of X; give only one of them.")


def same_ids(groups: Any, column: Any, n_rows: int) -> bool:
    """Whether `groups` and the ids of a column agree row by row."""
    first, second = encode_clients(groups, n_rows), encode_clients(column, n_rows)
    same = len(first.ids) == len(second.ids) and bool(np.all(first.ids == second.ids))
    return same and bool(np.array_equal(first.codes, second.codes))
