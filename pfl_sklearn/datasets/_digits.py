"""Handwritten digits, distributed so that every client has only a few of the classes."""

from typing import Any

import pandas as pd
from sklearn.datasets import load_digits
from sklearn.utils import Bunch

from pfl_sklearn._typing import RandomState
from pfl_sklearn.datasets._label_skew import make_label_skew_clients

_LARGEST_DIGIT_PIXEL = 16.0  # counts of dots in 4 x 4 squares of a bitmap


def load_digits_clients(
    n_clients: int = 20,
    classes_per_client: int = 2,
    *,
    random_state: RandomState = 0,
    return_X_y: bool = False,
    as_frame: bool = False,
) -> Any:
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

    See Also
    --------
    make_label_skew_clients : The same split of any table.

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
    digits = load_digits(as_frame=as_frame)
    groups = make_label_skew_clients(
        digits.data, digits.target, n_clients, classes_per_client, random_state=random_state
    ).groups
    data, target, frame = digits.data / _LARGEST_DIGIT_PIXEL, digits.target, None
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
