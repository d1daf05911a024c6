"""Client ids of statistics that are put together."""

import numpy as np
import pandas as pd

from pfl_sklearn._clients import encode_clients, match_clients


def encode_ids(ids):
    """EncodedClients of ids (n,) that were known before; floats among them are labels."""
    return encode_clients(
        pd.Categorical(ids) if ids.dtype.kind == "f" else ids, len(ids), "clients"
    )


def joined(first, second):
    """Ids of both, one after the other; ValueError if they are of different kinds."""
    of_floats = "f" in (first.dtype.kind, second.dtype.kind)
    match_clients(pd.Categorical(second) if of_floats else second, len(second), first, "clients")
    if {first.dtype.kind, second.dtype.kind} == {"i", "u"}:  # together they would become floats
        first, second = first.astype(object), second.astype(object)
    return np.concatenate([first, second])
