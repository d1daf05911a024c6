"""Class labels as positions among the sorted classes."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from sklearn.base import BaseEstimator
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d

from pfl_sklearn._clients import Array, Codes
from pfl_sklearn._columns import LARGEST_EXACT
from pfl_sklearn._compat import check_sample_weight
from pfl_sklearn._parameters import parameter
from pfl_sklearn._warnings import warn_caller

_MANY_CLASSES = 20  # classes; more than digits, ratings and months have


def check_labels(y: Any) -> None:
    """Raise ValueError if y (n,) holds no class labels, but numbers that vary."""
    y = np.asarray(y)
    if y.dtype.kind == "f" and (np.isfinite(y) & (np.abs(y) > LARGEST_EXACT)).any():
        raise ValueError(
            "Unknown label type: y holds floats beyond 2**53, which do not tell whole numbers "
            "apart; expected class labels, such as smaller whole numbers, or strings."
        )
    try:
        check_classification_targets(y)
    except ValueError as error:
        if "label type: continuous." not in str(error):
            raise
        raise ValueError(
            "Unknown label type: continuous; y holds fractions, not class labels. For shares of "
            "trials, give a row of each class with its number of trials as sample_weight, or the "
            "counts to BernoulliMean.fit_counts. For other numbers, fit a regressor."
        ) from None


def check_several_classes(classes: Array, estimator: BaseEstimator) -> None:
    """Raise ValueError if there is only one class."""
    if len(classes) < 2:
        raise ValueError(
            f"{type(estimator).__name__} needs rows of at least two classes, but the data contains "
            f"only one class: {classes.tolist()[0]!r}."
        )


def read_classes(y: Array, estimator: BaseEstimator, private: bool = False) -> tuple[Array, Codes]:
    """Sorted classes, and the position of every row's label among them.

    Warns if the classes look like counts, but not about what single rows decide in a private fit.
    """
    classes, labels, sizes = np.unique(y, return_inverse=True, return_counts=True)
    check_several_classes(classes, estimator)
    if not private and _look_like_counts(classes, sizes):
        warn_caller(
            f"{type(estimator).__name__} got {len(classes)} classes that are whole numbers from "
            f"{classes[0]:.0f} to {classes[-1]:.0f}, {np.sum(sizes == 1)} of them with a single "
            "row; if they are counts, fit a regressor instead, such as "
            "PersonalizedPoissonRegression.",
            UserWarning,
        )
    return classes, labels


def _look_like_counts(classes, sizes):
    """Whether sorted classes with so many rows each are more likely counts than codes."""
    # The largest count is rare and mostly occurs once; the largest code is as frequent as the
    # others.
    # Codes of strings or dates are no counts, nor are negative ones.
    many_numbers = len(classes) > _MANY_CLASSES and classes.dtype.kind in "iuf"
    return bool(many_numbers and classes[0] >= 0 and sizes[-1] == 1)


def class_weighted(estimator: Any, y: Array, sample_weight: Any) -> Any:
    """Weights (n,) of rows times those that the estimator gives to their classes, if to any."""
    # "balanced" counts the rows of a class by their weights; a row of weight 0 is absent.
    class_weight = getattr(estimator, "class_weight", None)
    if class_weight is None:
        return sample_weight
    weights = check_sample_weight(sample_weight, y, dtype=np.float64, copy=True)
    rows = weights > 0
    classes, labels = np.unique(y[rows], return_inverse=True)
    if isinstance(class_weight, Mapping):  # of which folds may lack a class
        factors = np.array([class_weight.get(label, 1.0) for label in classes.tolist()])
    else:
        factors = compute_class_weight(
            class_weight, classes=classes, y=y[rows], sample_weight=weights[rows]
        )
    weights[rows] *= factors[labels]
    return weights


CLASSES = parameter(
    default=None,
    ranges=["array-like", None],
    text="""
        array-like of shape (n_classes,) or None
            All labels that may occur; others are refused. None: those of `y`. Which labels occur in
            a single row is then part of what a private fit releases (``classes_``), without noise:
            give them.
    """,
)


def check_classes(classes: Any, n: int | None = None) -> None:
    """Raise ValueError unless a parameter `classes` is None or lists (`n`) labels."""
    if classes is None:
        return
    labels = np.asarray(classes)
    distinct = pd.unique(labels.ravel())
    wrong = labels.ndim != 1 or pd.isna(labels).any() or len(distinct) < 2
    if wrong or (n is not None and len(distinct) != n):
        raise ValueError(f"classes must list {n or 'at least 2'} labels; got {classes!r}.")


def given_classes(estimator: Any, classes: Any) -> Any:
    """Classes of the estimator, or those that a call gives; they must agree."""
    own = estimator.classes
    if own is None or classes is None:
        return classes if own is None else own
    if not np.array_equal(np.unique(classes), np.unique(own)):
        raise ValueError(
            f"got classes={classes!r}, but the {type(estimator).__name__} has classes={own!r}."
        )
    return own


def class_assumption(estimator: Any) -> str:
    """What a private fit assumes of the labels."""
    if estimator.classes is None:
        return "the labels that occur are public; classes= would fix them beforehand"
    return "classes are the user's, not the data's"


def read_known_classes(
    y: Array, known: Array | None, classes: Any, estimator: BaseEstimator, private: bool
) -> tuple[Array, Codes]:
    """Sorted classes and positions of labels `y` (n_rows,), where classes may be known beforehand.

    `known` are sorted classes of an earlier call, which `classes`, those that the user lists, must
    equal; either may be None. `private` is that of :func:`read_classes`.
    """
    if known is None and classes is None:
        return read_classes(y, estimator, private)
    known = np.unique(column_or_1d(classes)) if known is None else known
    if classes is not None and not np.array_equal(np.unique(classes), known):
        raise ValueError(f"got classes={classes!r}; the first call had {known.tolist()}.")
    seen, labels = np.unique(y, return_inverse=True)
    missing = np.setdiff1d(seen, known)
    if len(missing):
        label = "a label" if private else f"the label {missing[:1].tolist()[0]!r}"
        raise ValueError(
            f"y holds {label}, which is not one of the {len(known)} classes given before."
        )
    check_several_classes(known, estimator)
    return known, np.searchsorted(known, seen)[labels]
