"""From a table of counts to one row per trial."""

import numpy as np
from sklearn.utils import check_consistent_length


def expand_counts(successes, trials, groups=None):
    """One 0/1 row per trial of a table of counts.

    Parameters
    ----------
    successes, trials : array-like of whole numbers, shape (n_clients,)
    groups : array-like of shape (n_clients,), default=None
        Client ids. None: positions.

    Returns
    -------
    y : ndarray of shape (n_rows,)
        The successes of a client before its failures.
    groups : ndarray of shape (n_rows,)

    Raises
    ------
    ValueError
        If lengths differ or not ``0 <= successes <= trials``.

    Examples
    --------
    >>> from pfl_sklearn.datasets import expand_counts
    >>> y, groups = expand_counts([1, 2], [2, 3], ["a", "b"])
    >>> y.tolist(), groups.tolist()
    ([1, 0, 1, 1, 0], ['a', 'a', 'b', 'b', 'b'])
    """
    successes, trials = np.asarray(successes), np.asarray(trials)
    check_consistent_length(successes, trials, groups)
    if ((successes < 0) | (successes > trials)).any():
        raise ValueError("successes must be between 0 and trials.")
    ids = np.arange(len(trials)) if groups is None else np.asarray(groups)
    counts = np.column_stack([successes, trials - successes]).ravel()
    y = np.repeat(np.tile([1, 0], len(trials)), counts)
    return y, np.repeat(ids, trials)
