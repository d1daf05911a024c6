"""Reading the rows of a table: checks that the estimators share."""

from typing import NamedTuple

import numpy as np
from sklearn.utils import check_consistent_length

from pfl_sklearn._clients import EncodedClients
from pfl_sklearn._compat import check_sample_weight, num_samples


class Rows(NamedTuple):
    """Observations (n,) or (n, d), their clients, and their weights (n,) or None."""

    y: np.ndarray
    clients: EncodedClients
    weights: np.ndarray | None


def read_rows(estimator, X, y, groups, sample_weight):
    """Rows of fit with a positive weight; `y` is validated already.

    Of `X` only the length is read. A row of weight 0 is absent, and so is a client without any
    other row.
    """
    n_rows = num_samples(X)
    if n_rows == 0:
        raise ValueError(
            f"Found array with 0 sample(s) while a minimum of 1 is required by "
            f"{type(estimator).__name__}."
        )
    check_consistent_length(X, y)
    ids, codes = estimator._encode_fit(groups, n_rows)
    if sample_weight is None:
        return Rows(y, EncodedClients(ids, codes), None)
    weights = check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
    present = weights > 0
    if present.all():
        return Rows(y, EncodedClients(ids, codes), weights)
    used = np.bincount(codes[present], minlength=len(ids)) > 0
    kept = EncodedClients(ids[used], (np.cumsum(used) - 1)[codes[present]])
    return Rows(y[present], kept, weights[present])
