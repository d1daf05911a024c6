"""What statistics consist of: facts about the table, and values of every client that add up."""

import numpy as np
import pandas as pd

from pfl_sklearn._clients import encode_ids, joined, match_clients, shown
from pfl_sklearn.statistics._cholesky import merged

# What statistics that add up have in common.
COLUMNS = ("n_features", "n_targets", "feature_names", "target_names")
BOUNDS = ("feature_bound", "target_bound")
FACTS = (*COLUMNS, "n_left_out", *BOUNDS, "parts")
_TRIANGLES = None  # join by a factorization, which needs the joined bounds
# Fields with a value per client besides its id: column of a file, and how values of two tables
# join. A field may be None. Triangles come after the bounds.
PER_CLIENT = {
    "n_samples_per_client": ("n", np.add),
    "log_weights": ("log_weight", np.add),
    "lowest": ("lowest", np.minimum),
    "highest": ("highest", np.maximum),
    "packed": ("triangle", _TRIANGLES),
    "clipped": ("clipped_triangle", _TRIANGLES),
}


def of_clients(statistics, clients):
    """Fields of some clients alone, in order."""
    ids = statistics.clients
    if not (isinstance(clients, slice) and (clients.step or 1) > 0):  # which copies nothing
        positions = np.atleast_1d(np.arange(len(ids))[clients])
        clients, counts = np.unique(positions, return_counts=True)
        if (counts > 1).any():  # it would count twice
            raise ValueError(
                f"of_clients takes each client once; got {shown(ids[clients[np.argmax(counts)]])} "
                "twice or more."
            )
    names = ("clients", *(name for name in PER_CLIENT if getattr(statistics, name) is not None))
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
            f"{shown(list(clients)[absent[0]])}; unknown='ignore' passes over them."
        )
    others = np.setdiff1d(np.arange(len(ids)), positions)
    if not len(others):
        raise ValueError("clients are all that the statistics have; expected others, too.")
    return others


def added(first, second):
    """Fields of the rows of both.

    Raises
    ------
    ValueError
        For other columns, other bounds, ids of another kind, and rows that would count twice.
    """
    for names, what in ((COLUMNS, "the same columns"), (BOUNDS, "the same bounds")):
        for name in names:
            ours, theirs = getattr(first, name), getattr(second, name)
            if ours != theirs:
                raise ValueError(
                    f"statistics of {what} add up; got {name}={ours!r} and {theirs!r}."
                )
    ids, codes = encode_ids(joined(first.clients, second.clients))
    at_first, at_second = np.split(codes, [len(first.clients)])
    shared = np.isin(at_second, at_first)
    there = at_second[shared]
    common = set(first.parts) & set(second.parts)
    if common and len(there):  # clients of one part may come apart and together again
        raise ValueError(
            f"rows of client {shown(ids[there[0]])} would count twice: both statistics have the "
            f"part {min(common)!r}."
        )
    fields = {"clients": ids, "n_left_out": first.n_left_out + second.n_left_out}
    fields["parts"] = tuple(sorted({*first.parts, *second.parts}))
    for name, (_, join) in PER_CLIENT.items():
        ours, theirs = getattr(first, name), getattr(second, name)
        if ours is None:
            continue
        values = np.empty((len(ids), *ours.shape[1:]), dtype=np.result_type(ours, theirs))
        values[at_second], values[at_first] = theirs, ours
        if join is _TRIANGLES:
            low, high = fields["lowest"][there], fields["highest"][there]
            values[there] = merged(values[there], theirs[shared], low, high)
        else:
            values[there] = join(values[there], theirs[shared])
        fields[name] = values
    return fields
