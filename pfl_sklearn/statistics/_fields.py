"""Fields of statistics: of the table as a whole, and values of every client that add up."""

import numpy as np
import pandas as pd

from pfl_sklearn._clients import concatenate_ids, encode_ids, format_id, match_clients
from pfl_sklearn.statistics._cholesky import merge_triangles

# What statistics that add up have in common.
COLUMN_FIELDS = ("n_features", "n_targets", "feature_names", "target_names")
BOUND_FIELDS = ("feature_bound", "target_bound")
TABLE_FIELDS = (*COLUMN_FIELDS, "n_left_out", *BOUND_FIELDS, "parts")
_JOINED_BY_FACTORIZATION = None  # join by a factorization, which needs the joined bounds
# Fields with a value per client besides its id: column of a file, and how values of two tables
# join. A field may be None. Triangles come after the bounds.
CLIENT_FIELDS = {
    "n_samples_per_client": ("n", np.add),
    "log_weights": ("log_weight", np.add),
    "lowest": ("lowest", np.minimum),
    "highest": ("highest", np.maximum),
    "packed": ("triangle", _JOINED_BY_FACTORIZATION),
    "clipped": ("clipped_triangle", _JOINED_BY_FACTORIZATION),
}


def select_clients(statistics, clients):
    """Fields of some clients alone, in order."""
    ids = statistics.clients
    if not (isinstance(clients, slice) and (clients.step or 1) > 0):  # which copies nothing
        positions = np.atleast_1d(np.arange(len(ids))[clients])
        clients, counts = np.unique(positions, return_counts=True)
        if (counts > 1).any():  # it would count twice
            twice = format_id(ids[clients[np.argmax(counts)]])
            raise ValueError(f"of_clients takes each client once; got {twice} more than once.")
    names = ("clients", *(name for name in CLIENT_FIELDS if getattr(statistics, name) is not None))
    return {name: getattr(statistics, name)[clients] for name in names}


def positions_of_others(ids, clients, unknown):
    """Positions in sorted `ids` of all but some `clients`."""
    if unknown not in ("error", "ignore"):
        raise ValueError(f"unknown must be 'error' or 'ignore'; got {unknown!r}.")
    if np.ndim(clients) != 1:
        raise ValueError(f"clients must be a list of ids; got {clients!r}.")
    if ids.dtype.kind == "f":  # labels, matched by their exact values
        clients = pd.Categorical(clients)
    positions = match_clients(clients, len(clients), ids, "clients", "the statistics")
    absent = np.flatnonzero(positions < 0)
    if len(absent) and unknown == "error":  # a misspelt id would keep its data silently
        raise ValueError(
            f"clients has {len(absent)} ids that are not in the statistics, such as "
            f"{format_id(list(clients)[absent[0]])}; unknown='ignore' passes over them."
        )
    others = np.setdiff1d(np.arange(len(ids)), positions)
    if not len(others):
        raise ValueError("clients are all that the statistics have; expected others, too.")
    return others


def add_fields(first, second):
    """Fields of the rows of both.

    Raises ValueError for other columns or bounds, ids of another kind, and rows that would count
    twice.
    """
    for names, same in ((COLUMN_FIELDS, "the same columns"), (BOUND_FIELDS, "the same bounds")):
        for name in names:
            ours, theirs = getattr(first, name), getattr(second, name)
            if ours != theirs:
                raise ValueError(
                    f"statistics of {same} add up; got {name}={ours!r} and {theirs!r}."
                )
    ids, codes = encode_ids(concatenate_ids(first.clients, second.clients))
    at_first, at_second = np.split(codes, [len(first.clients)])
    shared = np.isin(at_second, at_first)
    at_both = at_second[shared]
    common = set(first.parts) & set(second.parts)
    if common and len(at_both):  # clients of one part may come apart and together again
        raise ValueError(
            f"rows of client {format_id(ids[at_both[0]])} would count twice: both statistics have "
            f"the part {min(common)!r}."
        )
    fields = {"clients": ids, "n_left_out": first.n_left_out + second.n_left_out}
    fields["parts"] = tuple(sorted({*first.parts, *second.parts}))
    for name, (_, join) in CLIENT_FIELDS.items():
        ours, theirs = getattr(first, name), getattr(second, name)
        if ours is None:
            continue
        values = np.empty((len(ids), *ours.shape[1:]), dtype=np.result_type(ours, theirs))
        values[at_second], values[at_first] = theirs, ours
        if join is _JOINED_BY_FACTORIZATION:
            low, high = fields["lowest"][at_both], fields["highest"][at_both]
            values[at_both] = merge_triangles(values[at_both], theirs[shared], low, high)
        else:
            values[at_both] = join(values[at_both], theirs[shared])
        fields[name] = values
    return fields
