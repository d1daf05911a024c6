"""One estimator inside others: its seed, its fit with client ids, and its checked predictions."""

import copy
import math
import warnings
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import narwhals as nw
import numpy as np
import pandas as pd
from sklearn import config_context
from sklearn.base import clone
from sklearn.frozen import FrozenEstimator
from sklearn.utils.metadata_routing import get_routing_for_object
from sklearn.utils.validation import has_fit_parameter

from pfl_sklearn._clients import match_clients
from pfl_sklearn._columns import LARGEST, column_labels
from pfl_sklearn._unwrap import final_estimator, hand_out, predicting_estimator, takes_groups
from pfl_sklearn.compose._client_rows import as_groups
from pfl_sklearn.linear_model._row_space import NotEstimableWarning

# Probabilities are at least this in losses and log odds: a leaf of one class says 0, and a single
# row of another class would then make the loss of a whole table infinite.
SMALLEST = 1e-6
_REFUSED = frozenset('",:[]{}')  # in names of columns by LightGBM, which writes JSON
_SUM_TOLERANCE = 1e-3  # probabilities may be of single precision, or rounded by the estimator


class InnerEstimator(NamedTuple):
    """An estimator and its name; for a classifier, the sorted classes of all rows.

    Where a fit may promise privacy (`private`), predictions that overflow are cut, and errors say
    nothing of the rows.
    """

    name: str
    estimator: Any
    classes: np.ndarray | None
    private: bool = False

    @property
    def title(self) -> str:
        """Name and class of the estimator, for error messages."""
        return f"{self.name!r} ({type(self.estimator).__name__})"


def prepared(pairs, classes, seeds, weighted, private=False):
    """Named clones with seeds, ready to be fitted; `weighted` if the rows have weights.

    Raises
    ------
    ValueError
        If rows have weights that an estimator does not take.
    """
    named = [
        InnerEstimator(name, _seeded(each, seed), classes, private)
        for (name, each), seed in zip(pairs, seeds, strict=True)
    ]
    for each in named:
        if weighted and not is_frozen(each.estimator):  # a frozen one is fitted to no rows
            check_takes_weights(each.estimator, each.name)
    return named


def _seeded(estimator, seed):
    """Clone that draws from a seed unless it has its own, and gives new clients the population."""
    if is_frozen(estimator):
        return _own_copy(estimator)
    seeded = clone(estimator)
    rng, params = np.random.default_rng(seed), seeded.get_params()
    for name in sorted(params):  # so that seeds do not depend on the order of parameters
        prefix, _, last = name.rpartition("__")
        # Anyone who knows the seed of a private estimator can subtract its noise.
        if last == "random_state" and params[name] is None and not _is_private(prefix, params):
            seeded.set_params(**{name: int(rng.integers(2**31))})
        if last == "unseen":  # folds of whole clients are unseen on purpose
            seeded.set_params(**{name: "population"})
    return seeded


def _is_private(prefix, params):
    """Whether the estimator whose parameters have this prefix adds noise."""
    at = f"{prefix}__" if prefix else ""
    epsilon = params.get(f"{at}epsilon", math.inf)
    return epsilon != math.inf or params.get(f"{at}noise_multiplier") is not None


def may_be_private(estimator):
    """Whether a candidate may be protected: it is not fitted here, or has an epsilon."""
    params = estimator.get_params()
    return is_frozen(estimator) or any(
        _is_private(name.rpartition("__")[0], params) for name in params
    )


def lost_guarantees(estimators):
    """End of a report's reason: that what these estimators promise is not kept, if they do."""
    for each in estimators:
        params = (each.estimator if is_frozen(each) else each).get_params()
        if any(_is_private(name.rpartition("__")[0], params) for name in params):
            return ", whatever the estimators inside it promise alone."
    return "."


def of_kind(tags, inner):
    """Tags of an estimator that is a classifier or a regressor as the one inside it is."""
    return replace(
        tags,
        estimator_type=inner.estimator_type,
        classifier_tags=inner.classifier_tags,
        regressor_tags=inner.regressor_tags,
    )


def is_frozen(estimator):
    """Whether an estimator is frozen, and so is not fitted again."""
    return isinstance(estimator, FrozenEstimator)


def _own_copy(frozen):
    """Deep copy of a frozen estimator, which a later fit of the original cannot change."""
    inner = copy.deepcopy(frozen.estimator)
    core = final_estimator(inner)
    if hasattr(core, "unseen"):  # what becomes of new clients is for the outer estimator to say
        core.set_params(unseen="population")
    return FrozenEstimator(inner)


def check_takes_weights(estimator, name):
    """Raise ValueError if the estimator of this name does not take sample_weight."""
    with config_context(enable_metadata_routing=True):
        routed = hasattr(estimator, "get_metadata_routing") and "sample_weight" in (
            get_routing_for_object(estimator).consumes("fit", ["sample_weight"])
        )
    if not (routed or has_fit_parameter(estimator, "sample_weight")):
        raise ValueError(
            f"sample_weight was given, but {name!r} ({type(estimator).__name__}) does not take it. "
            "A pipeline or a search takes it if what is inside requests it: "
            "set_fit_request(sample_weight=True)."
        )


def library_of(estimator):
    """The boosting library that an estimator is of: "lightgbm", "catboost" or None."""
    packages = {each.__module__.partition(".")[0] for each in type(estimator).__mro__}
    return next((name for name in ("lightgbm", "catboost") if name in packages), None)


def with_accepted_names(estimator, X):
    """`X`, for LightGBM with columns x0, x1, ... if it has names that LightGBM refuses."""
    if library_of(estimator) != "lightgbm" or (labels := column_labels(X)) is None:
        return X
    if not any(_REFUSED.intersection(str(label)) for label in labels):
        return X
    names = {label: f"x{k}" for k, label in enumerate(labels)}
    return nw.from_native(X, eager_only=True).rename(names).to_native()


def fit_inner(named, table):
    """Fitted clone of an estimator."""
    metadata = {} if table.weights is None else {"sample_weight": table.weights}
    with config_context(enable_metadata_routing=True):  # of pipelines and searches
        if takes_groups(named.estimator, "fit"):
            metadata["groups"] = as_groups(table.ids)
        X = with_accepted_names(named.estimator, table.X)
        with warnings.catch_warnings():
            # Nobody chose these columns: encoders mark missing values of two columns by the same
            # indicator, and predictions may agree. Rows that tell them apart are warned of.
            warnings.simplefilter("ignore", NotEstimableWarning)
            return clone(named.estimator).fit(X, table.y, **metadata)


def outputs(named, X, ids):
    """Predictions of a fitted estimator: responses (n,), or probabilities (n, K) of the classes.

    Raises
    ------
    ValueError
        If it predicts NaN, no probabilities, or classes in another order.
    """
    predicting = predicting_estimator(named.estimator)  # a search hands no client ids on
    if named.classes is None:
        return _finite_numbers(named, _call(named, predicting, "predict", X, ids), (len(X),))
    probabilities = _call(named, predicting, "predict_proba", X, ids)
    return _of_all_classes(named, predicting, probabilities, len(X))


def with_std(fitted, X, ids):
    """Predictions (n,) of a fitted estimator and their standard deviations (n,).

    Raises
    ------
    ValueError
        If it gives none.
    """
    named = InnerEstimator("final_estimator", fitted, None)
    predicting = predicting_estimator(fitted)
    try:
        return _call(named, predicting, "predict", X, ids, {"return_std": True}, ValueError)
    except TypeError as error:
        raise ValueError(
            f"return_std=True needs a final estimator whose predict takes it; "
            f"{type(fitted).__name__}.predict does not."
        ) from error


def _call(named, estimator, method, X, ids, params=None, caught=(TypeError, ValueError)):
    """Result of a method of a fitted estimator; errors name the estimator."""
    with config_context(enable_metadata_routing=True):
        groups = {"groups": as_groups(ids)} if takes_groups(estimator, method) else {}
        quiet = np.errstate(over="ignore", invalid="ignore") if named.private else nullcontext()
        try:
            rows = with_accepted_names(estimator, X)
            with quiet:
                return getattr(estimator, method)(rows, **groups, **(params or {}))
        except caught as error:
            name = f"{named.name!r} ({type(estimator).__name__})"
            if named.private:
                raise with_message(error, f"{name} failed to predict.") from None
            raise with_message(error, f"{name} failed to predict: {error}") from error


def with_message(error, message):
    """A TypeError or ValueError, as `error` is, with another message."""
    # No others: the constructor of another type may take more than a text.
    return TypeError(message) if isinstance(error, TypeError) else ValueError(message)


def _finite_numbers(named, values, shape):
    """Predictions as floats, checked to be finite and of this shape."""
    what = f"{named.title} predicted"
    values = np.asarray(values, dtype=np.float64)
    if values.shape != shape:
        raise ValueError(f"{what} an array of shape {values.shape}; expected {shape}.")
    if named.private:  # an error would tell that a client has such a row
        values = np.nan_to_num(values, nan=0.0, posinf=LARGEST, neginf=-LARGEST)
        return np.clip(values, -LARGEST, LARGEST)
    bad = ~np.isfinite(values.reshape(len(values), -1)).all(axis=1)
    if bad.any():
        raise ValueError(
            f"{what} {values[bad][0].tolist()!r} for {bad.sum()} of {len(values)} rows; expected "
            "finite numbers."
        )
    return values


def _of_all_classes(named, fitted, probabilities, n_rows):
    """Probabilities (n, K) of all classes; 0 for a class that the fold did not contain."""
    own = np.asarray(fitted.classes_)
    # A class behind all others has the position after the last.
    where = np.searchsorted(named.classes, own).clip(max=len(named.classes) - 1)
    if not np.array_equal(named.classes[where], own) or (np.diff(where) <= 0).any():
        raise ValueError(
            f"{named.title} has classes_={own.tolist()}; expected those of y in sorted order, "
            f"{named.classes.tolist()}."
        )
    probabilities = _finite_numbers(named, probabilities, (n_rows, len(own)))
    sums = probabilities.sum(axis=1)
    off = (probabilities < -_SUM_TOLERANCE).any(axis=1) | (np.abs(sums - 1) > _SUM_TOLERANCE)
    if named.private:
        probabilities[off] = 1 / len(own)
    elif off.any():
        raise ValueError(
            f"{named.title} predicted probabilities {probabilities[off][0].tolist()!r} for "
            f"{off.sum()} of {n_rows} rows; expected numbers from 0 on with sum 1."
        )
    of_all = np.zeros((n_rows, len(named.classes)))
    of_all[:, where] = probabilities
    return of_all


def for_new_clients(fitted):
    """The estimator as it predicts for new clients: a frozen one by its population model."""
    return FrozenEstimator(population_of(fitted)) if is_frozen(fitted) else fitted


def without_clients(named):
    """The named estimator as it predicts for new clients."""
    return named._replace(estimator=for_new_clients(named.estimator))


def population_of(fitted):
    """The population model of a fitted estimator; the estimator itself if it has no clients."""
    if not hasattr(final_estimator(fitted), "_population_copy"):  # it has one model for all
        return fitted
    return hand_out(fitted, "_population_copy")


def of_client(fitted, client_id):
    """A fitted estimator's model of one client, or of the population if it lacks that client."""
    if fitted is None:  # nothing is behind the base estimators
        return None
    fitted = predicting_estimator(fitted)
    with config_context(enable_metadata_routing=True):
        if not takes_groups(fitted, "predict"):  # it has one model for all
            return copy.deepcopy(fitted)
    core = final_estimator(fitted)
    if not hasattr(core, "for_client"):
        raise ValueError(
            f"for_client needs a model of one client alone, and {type(fitted).__name__}, which "
            "knows all of them, has no for_client."
        )
    clients = getattr(core, "clients_", None)
    ids = pd.Categorical([client_id])
    if clients is None or match_clients(ids, 1, clients, "client_id")[0] < 0:
        return population_of(fitted)  # of a release, or of other clients
    return hand_out(fitted, "for_client", client_id)
