"""Frozen estimators among those that are given: they know clients of their own."""

import copy
from numbers import Integral

import numpy as np
from sklearn.base import is_classifier
from sklearn.frozen import FrozenEstimator

from pfl_sklearn._contents import everything_in
from pfl_sklearn._labels import check_several_classes
from pfl_sklearn._nesting import final_estimator, hand_out, is_ours
from pfl_sklearn.base import ClientMixin


def is_frozen(estimator):
    """Whether an estimator is frozen, and so is not fitted again."""
    return isinstance(estimator, FrozenEstimator)


def without_clients(named):
    """The named estimator as it predicts for new clients."""
    return named._replace(estimator=for_new_clients(named.estimator))


def population_of(fitted):
    """The population model of a fitted estimator; the estimator itself if it has no clients."""
    if not hasattr(final_estimator(fitted), "_population_copy"):  # it has one model for all
        return fitted
    return hand_out(fitted, "_population_copy")


def check_strangers(pairs, groups):
    """Raise ValueError if a frozen estimator knows several clients, but fit got no ids.

    Rows without ids are one client's, who would get its population model alone.
    """
    for name, each in pairs if groups is None else ():
        clients = getattr(final_estimator(each), "clients_", ())
        if is_frozen(each) and len(clients) > 1:
            raise ValueError(
                f"{name!r} is a frozen model of {len(clients)} clients, but fit got no groups= and "
                "cannot know whose rows these are; give groups=, or freeze one client's model "
                "(for_client)."
            )


def classes_of(estimator, labels, pairs=()):
    """Sorted classes of the labels and of frozen estimators; None if they are responses.

    A frozen classifier may know classes that none of the rows has, and gives them probabilities.
    """
    if not is_classifier(estimator):
        return None
    classes = np.unique(labels)
    for _, each in pairs:
        own = getattr(each, "classes_", None) if is_frozen(each) else None
        # Words and numbers have no common order; outputs of that estimator are refused by name.
        if own is not None and (own.dtype.kind in "OU") == (classes.dtype.kind in "OU"):
            classes = np.union1d(classes, own)
    check_several_classes(classes, estimator)
    return classes


def own_copy(frozen):
    """Deep copy of a frozen estimator, which a later fit of the original cannot change."""
    inner = copy.deepcopy(frozen.estimator)
    core = final_estimator(inner)
    if hasattr(core, "unseen"):  # what becomes of new clients is for the outer estimator to say
        core.unseen = "population"
    return FrozenEstimator(inner)


def for_new_clients(fitted):
    """The estimator as it predicts for new clients: a frozen one by its population model."""
    return FrozenEstimator(population_of(fitted)) if is_frozen(fitted) else fitted


def without_originals(model):
    """Give a handed-out model its fitted estimators as parameters, in place of the originals.

    Given estimators may know all their clients or hold seeds, callbacks and ledgers, and splits are
    positions of all clients' rows.
    """
    if model.estimators is not None:
        handed = {name: _frozen(each) for name, each in model.named_estimators_.items()}
        model.estimators = [(name, handed.get(name, "drop")) for name, _ in model.estimators]
    if getattr(model, "final_estimator", None) is not None:
        fitted = model.final_estimator_
        model.final_estimator = None if fitted is None else _frozen(fitted)
    if not isinstance(model.cv, Integral):
        model.cv = 5  # the default
    return model


def _frozen(estimator):
    return estimator if is_frozen(estimator) else FrozenEstimator(estimator)


def holds_ours(value):
    """Whether `value` contains an estimator of this package, or of a subclass, at any depth."""
    return any(
        is_ours(each) or issubclass(type(each), ClientMixin) for each in everything_in(value)
    )
