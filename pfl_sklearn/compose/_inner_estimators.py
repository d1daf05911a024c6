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
from pfl_sklearn._unwrap import (
    call_behind_steps,
    final_estimator,
    predicting_estimator,
    takes_groups,
)
from pfl_sklearn.compose._client_rows import as_groups
from pfl_sklearn.linear_model import NotEstimableWarning
from pfl_sklearn.linear_model._grouping_columns import same_partition
from pfl_sklearn.linear_model._mixed._groupings._variances import Roots
from pfl_sklearn.privacy import PrivacyReport

# Lower bound of probabilities in losses and log odds: a leaf of one class says 0, and a single row
# of another class would then make the loss of a whole table infinite.
SMALLEST_PROBABILITY = 1e-6
_REFUSED_CHARACTERS = frozenset('",:[]{}')  # in column names, by LightGBM, which writes JSON
# Probabilities may be of single precision, or rounded by the estimator.
_PROBABILITY_TOLERANCE = 1e-3


class InnerEstimator(NamedTuple):
    """An estimator and its name; for a classifier, the sorted classes of all rows.

    Where a fit may promise privacy (`private`), predictions that overflow are clipped, and errors
    show nothing of the rows. In folds, searches for variances may begin at `starts`, which were
    found in another fold.
    """

    name: str
    estimator: Any
    classes: np.ndarray | None
    private: bool = False
    starts: Roots | None = None

    @property
    def title(self) -> str:
        """Name and class of the estimator, for error messages."""
        return f"{self.name!r} ({type(self.estimator).__name__})"


class SettledGroupings(tuple[str, ...]):
    """Names of columns that group the rows of a table, in fits to parts of them as well.

    Columns that cannot group the rows of such a part have no effects there, without an error.
    """

    __slots__ = ()


def seeded_clones(pairs, classes, seeds, weighted, private=False):
    """InnerEstimators with seeds, ready to be fitted; `weighted` if the rows have weights.

    Raises ValueError if rows have weights that an estimator does not take.
    """
    named = [
        InnerEstimator(name, _seeded(estimator, seed), classes, private)
        for (name, estimator), seed in zip(pairs, seeds, strict=True)
    ]
    for inner in named:
        if weighted and not is_frozen(inner.estimator):  # a frozen one is not fitted
            check_takes_weights(inner.estimator, inner.name)
    return named


def _seeded(estimator, seed):
    """Clone with a seed, unless it has its own, that gives new clients the population model."""
    if is_frozen(estimator):
        return _copy_of_frozen(estimator)
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
    path = f"{prefix}__" if prefix else ""
    epsilon = params.get(f"{path}epsilon", math.inf)
    return epsilon != math.inf or params.get(f"{path}noise_multiplier") is not None


def adds_noise(estimator):
    """Whether an estimator, or one inside it, is private by its parameters."""
    params = (estimator.estimator if is_frozen(estimator) else estimator).get_params()
    return any(_is_private(name.rpartition("__")[0], params) for name in params)


def may_be_private(estimator):
    """Whether a candidate may be protected: it is not fitted here, or it adds noise."""
    return is_frozen(estimator) or adds_noise(estimator)


def unprotected_report(estimator, inner, n_clients):
    """Report of a fit without noise around `inner` estimators, whose own promises it breaks."""
    reason = f"{type(estimator).__name__} has no private fit"
    if any(map(adds_noise, inner)):
        reason += ", whatever the estimators inside it promise alone"
    fitted = (*estimator._population_attributes, *estimator._client_attributes)
    public = [name for name in fitted if not name.startswith("_")]
    return PrivacyReport.unprotected(
        f"{reason}.", not_released=("clients_", *public), n_clients=n_clients
    )


def with_kind_of(tags, inner):
    """Tags of an estimator that is a classifier or a regressor like the one inside it."""
    return replace(
        tags,
        estimator_type=inner.estimator_type,
        classifier_tags=inner.classifier_tags,
        regressor_tags=inner.regressor_tags,
    )


def is_frozen(estimator):
    """Whether an estimator is frozen, so that it is not fitted again."""
    return isinstance(estimator, FrozenEstimator)


def _copy_of_frozen(frozen):
    """Deep copy of a frozen estimator, so that a later fit of the original changes nothing."""
    inner = copy.deepcopy(frozen.estimator)
    core = final_estimator(inner)
    if hasattr(core, "unseen"):  # the outer estimator decides about new clients
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
            "A pipeline or a search takes it if the estimator inside requests it: "
            "set_fit_request(sample_weight=True)."
        )


def library_of(estimator):
    """Boosting library that defines the class of an estimator: "lightgbm", "catboost" or None."""
    packages = {base.__module__.partition(".")[0] for base in type(estimator).__mro__}
    return next((name for name in ("lightgbm", "catboost") if name in packages), None)


def with_accepted_names(estimator, X):
    """`X`; for LightGBM, columns become x0, x1, ... if it refuses one of their names."""
    if library_of(estimator) != "lightgbm" or (labels := column_labels(X)) is None:
        return X
    if not any(_REFUSED_CHARACTERS.intersection(str(label)) for label in labels):
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
        groupings = getattr(named.estimator, "groupings", None)
        if isinstance(groupings, SettledGroupings):
            X = _without_useless_levels(X, groupings)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Grouping column .* because it has no level")
            warnings.filterwarnings("ignore", "Column .* holds the client ids")  # outside said so
            # Collinear columns are no mistake of the user here: encoders mark missing values of two
            # columns by the same indicator, and predictions may agree.
            warnings.simplefilter("ignore", NotEstimableWarning)
            return clone(named.estimator).fit(X, table.y, **metadata)


def _without_useless_levels(X, names):
    """A frame without the values in those of these columns that cannot group its rows.

    Each row may have a level of its own, or levels may be those of a column before.
    """
    frame = nw.from_native(X, eager_only=True)
    before: list[Any] = []
    useless = []
    for name in names:
        codes = pd.factorize(np.asarray(frame[name].to_list(), dtype=object))[0]
        if codes.max() + 1 == np.sum(codes >= 0) or any(
            same_partition(codes, other) for other in before
        ):
            useless.append(nw.lit(None, dtype=nw.String).alias(name))
        else:
            before.append(codes)
    return frame.with_columns(useless).to_native() if useless else X


def predict_inner(named, X, ids):
    """Predictions of a fitted estimator: responses (n,), or probabilities (n, K) of the classes.

    Raises ValueError if it predicts NaN, no probabilities, or classes in another order.
    """
    predicting = predicting_estimator(named.estimator)  # a search does not pass ids on
    if named.classes is None:
        return _finite_numbers(named, _call(named, predicting, "predict", X, ids), (len(X),))
    probabilities = _call(named, predicting, "predict_proba", X, ids)
    return _of_all_classes(named, predicting, probabilities, len(X))


def predict_with_std(fitted, X, ids):
    """Predictions (n,) of a fitted estimator and their standard deviations (n,).

    Raises ValueError if its ``predict`` has no `return_std`.
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
    values = np.asarray(values, dtype=np.float64)
    if values.shape != shape:
        raise ValueError(
            f"{named.title} predicted an array of shape {values.shape}; expected {shape}."
        )
    if named.private:  # an error would reveal that a client has such a row
        values = np.nan_to_num(values, nan=0.0, posinf=LARGEST, neginf=-LARGEST)
        return np.clip(values, -LARGEST, LARGEST)
    bad = ~np.isfinite(values.reshape(len(values), -1)).all(axis=1)
    if bad.any():
        raise ValueError(
            f"{named.title} predicted {values[bad][0].tolist()!r} for {bad.sum()} of {len(values)} "
            "rows; expected finite numbers."
        )
    return values


def _of_all_classes(named, fitted, probabilities, n_rows):
    """Probabilities (n, K) of all classes; 0 for a class that the fold did not contain."""
    classes = np.asarray(fitted.classes_)
    # A class behind all others would have the position after the last.
    positions = np.searchsorted(named.classes, classes).clip(max=len(named.classes) - 1)
    same = np.array_equal(named.classes[positions], classes)
    if not same or (np.diff(positions) <= 0).any():
        raise ValueError(
            f"{named.title} has classes_={classes.tolist()}; expected those of y in sorted order, "
            f"{named.classes.tolist()}."
        )
    probabilities = _finite_numbers(named, probabilities, (n_rows, len(classes)))
    off_one = np.abs(probabilities.sum(axis=1) - 1) > _PROBABILITY_TOLERANCE
    invalid = (probabilities < -_PROBABILITY_TOLERANCE).any(axis=1) | off_one
    if named.private:
        probabilities[invalid] = 1 / len(classes)
    elif invalid.any():
        raise ValueError(
            f"{named.title} predicted probabilities {probabilities[invalid][0].tolist()!r} for "
            f"{invalid.sum()} of {n_rows} rows; expected non-negative numbers with sum 1."
        )
    of_all_classes = np.zeros((n_rows, len(named.classes)))
    of_all_classes[:, positions] = probabilities
    return of_all_classes


def for_new_clients(fitted):
    """The estimator as it predicts for new clients: of a frozen one, the population model."""
    return FrozenEstimator(population_or_self(fitted)) if is_frozen(fitted) else fitted


def without_clients(named):
    """The named estimator as it predicts for new clients."""
    return named._replace(estimator=for_new_clients(named.estimator))


def population_or_self(fitted):
    """The population model of a fitted estimator; the estimator itself if it has no clients."""
    if not hasattr(final_estimator(fitted), "_population_copy"):
        return fitted
    return call_behind_steps(fitted, "_population_copy")


def model_of_client(fitted, client_id):
    """Fitted estimator's model of one client, or of the population if it lacks that client."""
    # None stays None, and an estimator without clients is copied.
    if fitted is None:
        return None
    fitted = predicting_estimator(fitted)
    with config_context(enable_metadata_routing=True):
        if not takes_groups(fitted, "predict"):
            return copy.deepcopy(fitted)
    core = final_estimator(fitted)
    if not hasattr(core, "for_client"):
        raise ValueError(
            f"for_client needs a model of one client alone, but {type(fitted).__name__}, which "
            "knows all clients, has no for_client."
        )
    clients = getattr(core, "clients_", None)
    ids = pd.Categorical([client_id])
    if clients is None or match_clients(ids, 1, clients, "client_id")[0] < 0:
        return population_or_self(fitted)  # a released model, or one of other clients
    return call_behind_steps(fitted, "for_client", client_id)
