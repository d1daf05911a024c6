"""Class labels as positions among the sorted classes."""

import numpy as np
from sklearn.utils.validation import column_or_1d


def check_several_classes(classes, estimator):
    """Raise ValueError if there is only one class."""
    if len(classes) < 2:
        raise ValueError(
            f"{type(estimator).__name__} needs rows of at least two classes, but the data contains "
            f"only one class: {classes.tolist()[0]!r}."
        )


def read_classes(y, estimator):
    """Sorted classes, and the position of every row's label among them."""
    classes, labels = np.unique(y, return_inverse=True)
    check_several_classes(classes, estimator)
    return classes, labels


def read_known_classes(y, known, classes, estimator):
    """Sorted classes and positions, where classes may be known before the rows are.

    Parameters
    ----------
    y : ndarray of shape (n_rows,)
    known : ndarray or None
        Sorted classes of an earlier call.
    classes : array-like or None
        Those that the user lists; they must be the `known` ones.
    estimator : estimator
    """
    if known is None and classes is None:
        return read_classes(y, estimator)
    known = np.unique(column_or_1d(classes)) if known is None else known
    if classes is not None and not np.array_equal(np.unique(classes), known):
        raise ValueError(f"got classes={classes!r}; the first call had {known.tolist()}.")
    found, labels = np.unique(y, return_inverse=True)
    missing = np.setdiff1d(found, known)
    if len(missing):
        raise ValueError(
            f"y holds the label {missing[:1].tolist()[0]!r}, which is not one of the "
            f"{len(known)} classes given before."
        )
    check_several_classes(known, estimator)
    return known, np.searchsorted(known, found)[labels]
