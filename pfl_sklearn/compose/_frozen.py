"""Frozen estimators among those that are given: they know clients of their own."""

from numbers import Integral

from sklearn.base import BaseEstimator
from sklearn.frozen import FrozenEstimator

from pfl_sklearn._nesting import final_estimator, hand_out, is_ours


def is_frozen(estimator):
    """Whether an estimator is not to be fitted again."""
    return isinstance(estimator, FrozenEstimator)


def without_clients(named):
    """The same estimator as new clients see it: a frozen one forgets the clients that it knows."""
    if not is_frozen(named.estimator):
        return named
    return named._replace(estimator=FrozenEstimator(population_of(named.estimator)))


def population_of(fitted):
    """A fitted estimator that knows no clients; as it is, if none of this package is inside."""
    if not hasattr(final_estimator(fitted), "_population_copy"):
        return fitted
    return hand_out(fitted, "_population_copy")


def check_strangers(pairs):
    """Raise ValueError if a frozen estimator knows several clients, but fit got no ids.

    Rows without ids are one client's, who would get its population model alone.
    """
    for name, each in pairs:
        known = getattr(final_estimator(each), "clients_", ())
        if is_frozen(each) and len(known) > 1:
            raise ValueError(
                f"{name!r} is a frozen model of {len(known)} clients, but fit got no groups= and "
                "cannot know whose rows these are; give groups=, or freeze one client's model "
                "(for_client)."
            )


def without_originals(model):
    """A model that is handed out, with what it hands out as its parameters, too.

    Frozen estimators among its parameters know all their clients, and splits are positions of all
    clients' rows.
    """
    if model.estimators is not None:
        handed = {name: _frozen(each) for name, each in model.named_estimators_.items()}
        model.estimators = [(name, handed.get(name, "drop")) for name, _ in model.estimators]
    final = getattr(model, "final_estimator", None)
    if is_frozen(final):
        fitted = model.final_estimator_
        model.final_estimator = None if fitted is None else _frozen(fitted)
    if not isinstance(model.cv, Integral):
        model.cv = 5
    return model


def _frozen(estimator):
    return estimator if is_frozen(estimator) else FrozenEstimator(estimator)


def holds_ours(value):
    """Whether an estimator of this package is inside of something, at any depth."""
    if isinstance(value, dict):
        return any(map(holds_ours, value.values()))
    if isinstance(value, list | tuple | set):
        return any(map(holds_ours, value))
    if isinstance(value, type) or not isinstance(value, BaseEstimator):
        return False
    return is_ours(value) or holds_ours(vars(value))
