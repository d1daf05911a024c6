"""Handwritten digits, distributed so that every client has only a few of the classes."""

from numbers import Integral

import numpy as np
import pandas as pd
from sklearn.datasets import load_digits
from sklearn.utils import Bunch, check_random_state

_N_CLASSES = 10
_LARGEST_PIXEL = 16.0


def load_digits_clients(
    n_clients=20, classes_per_client=2, *, random_state=0, return_X_y=False, as_frame=False
):
    """Load scikit-learn's digits, distributed over clients with a few of the ten classes each.

    Parameters
    ----------
    n_clients : int, default=20
        Number of clients.
    classes_per_client : int, default=2
        Number of classes of every client, 1 to 10. Together the clients must have all ten, so
        ``n_clients * classes_per_client >= 10``.
    random_state : int, RandomState instance or None, default=0
        Seed of the split; the digits are always the same.
    return_X_y : bool, default=False
        Return ``data, target, groups`` instead of a Bunch.
    as_frame : bool, default=False
        Return `data` as a DataFrame, and `target` and `groups` as Series.

    Returns
    -------
    Bunch
        - ``data``: ndarray of shape (1797, 64), pixels over 16, in [0, 1];
        - ``target``: ndarray of shape (1797,), digits 0 to 9;
        - ``groups``: ndarray of shape (1797,), 0 to n_clients - 1;
        - ``frame``: None, or with `as_frame` a DataFrame that also holds ``target`` and ``client``;
        - ``feature_names``, ``target_names``: lists.

    data, target, groups : as above
        With `return_X_y`.

    Raises
    ------
    ValueError
        - If a parameter is not a whole number in its range.
        - If there are too few digits for all clients, or too few clients for all classes.

    Notes
    -----
    Row k is row k of :func:`sklearn.datasets.load_digits`. Every row belongs to one client. Classes
    are distributed evenly: exactly if `n_clients` is a multiple of ten, otherwise up to one client.
    The rows of a class are distributed evenly over the clients that have it. The scale, 16, is the
    largest possible pixel value; it is not taken from the data.

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn.datasets import load_digits_clients
    >>> digits = load_digits_clients(5, classes_per_client=2)
    >>> [np.unique(digits.target[digits.groups == k]).tolist() for k in range(5)]
    [[2, 8], [4, 9], [1, 6], [3, 7], [0, 5]]
    """
    for name, value in (("n_clients", n_clients), ("classes_per_client", classes_per_client)):
        if not isinstance(value, Integral) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1; got {value!r}.")
    if classes_per_client > _N_CLASSES:
        raise ValueError(f"classes_per_client must be at most 10; got {classes_per_client!r}.")
    if n_clients * classes_per_client < _N_CLASSES:
        raise ValueError(
            "n_clients * classes_per_client must be at least 10, so that every digit has a client; "
            f"got {n_clients} * {classes_per_client}."
        )
    rng = check_random_state(random_state)
    digits = load_digits(as_frame=as_frame)
    classes = _deal_classes(n_clients, classes_per_client, rng)
    groups = _deal_rows(np.asarray(digits.target), classes, rng)
    data, target, frame = digits.data / _LARGEST_PIXEL, digits.target, None
    if as_frame:
        groups = pd.Series(groups, name="client")
        frame = pd.concat([data, target, groups], axis=1)
    if return_X_y:
        return data, target, groups
    return Bunch(
        data=data,
        target=target,
        groups=groups,
        frame=frame,
        feature_names=digits.feature_names,
        target_names=digits.target_names.tolist(),
    )


def _deal_classes(n_clients, classes_per_client, rng):
    """Classes (n_clients, classes_per_client), different within a client and evenly used.

    Ten consecutive clients start at the ten classes and take the same steps from there, so each
    class is used equally often; the steps differ between tens. The remaining clients take
    consecutive classes without gaps, which reaches all classes.
    """
    n_tens, rest = divmod(n_clients, _N_CLASSES)
    steps = rng.random((n_tens, _N_CLASSES)).argsort(axis=1)[:, :classes_per_client]
    starts = np.arange(_N_CLASSES)
    tens = starts[None, :, None] + steps[:, None, :]
    left = classes_per_client * np.arange(rest)[:, None] + np.arange(classes_per_client)
    positions = np.concatenate([tens.reshape(-1, classes_per_client), left])
    return rng.permutation(_N_CLASSES)[positions % _N_CLASSES]


def _deal_rows(target, classes, rng):
    """Client (n_rows,) of every row, given the clients' classes (n_clients, k)."""
    wanted = classes.ravel()
    holders = np.argsort(wanted, kind="stable")  # positions in `wanted`, by class
    n_holders = np.bincount(wanted, minlength=_N_CLASSES)
    n_rows = np.bincount(target, minlength=_N_CLASSES)
    if (n_holders > n_rows).any():
        raise ValueError(
            f"{len(classes)} clients with {classes.shape[1]} classes are too many: there are "
            f"{n_rows.min()} to {n_rows.max()} rows per digit, and up to {n_holders.max()} clients "
            "would share one."
        )
    shuffled = rng.permutation(len(target))
    order = shuffled[np.argsort(target[shuffled], kind="stable")]  # rows by class, shuffled within
    by_class = target[order]
    rank = np.arange(len(order)) - (np.cumsum(n_rows) - n_rows)[by_class]
    first = (np.cumsum(n_holders) - n_holders)[by_class]
    groups = np.empty(len(target), dtype=np.intp)
    groups[order] = holders[first + rank % n_holders[by_class]] // classes.shape[1]
    return groups
