"""Estimators that hold a list of others by name."""

from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from sklearn.base import is_classifier, is_regressor
from sklearn.frozen import FrozenEstimator
from sklearn.utils import get_tags

from pfl_sklearn._compat import (
    BaseComposition,
    MetaEstimatorMixin,
    StrOptions,
    VisualBlock,
    available_if,
    names_class,
)
from pfl_sklearn._labels import check_several_classes
from pfl_sklearn._parameters import UNSEEN, parameter, with_parameters
from pfl_sklearn._typing import Floats, RandomState, TableLike
from pfl_sklearn._unwrap import final_estimator
from pfl_sklearn.compose._client_column import ClientColumn
from pfl_sklearn.compose._inner_estimators import is_frozen

if TYPE_CHECKING:
    from pfl_sklearn._compat import CallbackSupportMixin
else:
    from sklearn.callback import CallbackSupportMixin


@with_parameters
class NamedEstimators(CallbackSupportMixin, MetaEstimatorMixin, BaseComposition):
    """Base of estimators with a parameter `estimators`, a list of (name, estimator).

    A subclass whose parameter may also be None or a string overrides ``_default_estimators``.
    """

    if TYPE_CHECKING:  # each subclass declares it, because that fixes its position
        estimators: Any

    cv: Any = parameter(default=5, ranges=["cv_object", StrOptions({"time"})])
    unseen: str = UNSEEN
    n_jobs: int | None = parameter(default=None, ranges=[Integral, None])
    random_state: RandomState = parameter(default=None, ranges=["random_state"])

    _reserved_names: ClassVar[tuple[str, ...]] = ()

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Parameters of this estimator and, if `deep`, of those inside it by name.

        Parameters
        ----------
        deep : bool, default=True
            Include them. Default estimators are not listed, but their parameters can be set.
        """
        return self._get_params("estimators", deep=deep)

    def set_params(self, **params: Any) -> Self:
        """Set the parameters of this estimator.

        Parameters
        ----------
        **params : dict
            Parameters by name; those of an estimator in `estimators` as ``<name>__<parameter>``.
            Setting an estimator to "drop" leaves it out.
        """
        estimators = params.get("estimators", self.estimators)
        if not isinstance(estimators, list):
            defaults = self._default_estimators(estimators)
            if any(name.partition("__")[0] in dict(defaults) for name in params):
                params["estimators"] = defaults  # None or a string has no parameters to set
        self._set_params("estimators", **params)
        return self

    def _default_estimators(self, library: str | None) -> list[tuple[str, Any]]:
        return []

    def _requested_estimators(self):
        """Pairs in `estimators`, or the default ones; unchecked."""
        if isinstance(self.estimators, list):
            return self.estimators
        return self._default_estimators(self.estimators)

    def _requested_final(self):
        """Estimator behind those in the list; None if there is none."""
        return None

    def _sk_visual_block_(self):
        """Diagram in a notebook: named estimators in parallel, then the final one."""
        pairs = [pair for pair in self._requested_estimators() if is_pair(pair)]
        final = self._requested_final()
        estimators, names = [pair[1] for pair in pairs], [str(pair[0]) for pair in pairs]
        branches = VisualBlock("parallel", estimators, names=names, dash_wrapped=final is None)
        if final is None:
            return branches
        last = VisualBlock("parallel", [final], names=["final_estimator"], dash_wrapped=False)
        return VisualBlock("serial", [branches, last], dash_wrapped=False)

    def _estimator_objects(self):
        """Estimators in the list, unchecked: scikit-learn asks for tags before any check."""
        pairs = [pair for pair in self._requested_estimators() if is_pair(pair)]
        return [estimator for _, estimator in pairs if _is_estimator_object(estimator)]

    def _checked_estimators(self):
        """Names and estimators that are not dropped.

        Raises ValueError unless `estimators` is a list of names and estimators of the right kind,
        and if a name is reserved.
        """
        pairs = self._requested_estimators()
        for pair in pairs:
            if not (is_pair(pair) and isinstance(pair[0], str)):
                raise ValueError(
                    f"estimators must be a list of (name, estimator); got {pair!r} in it."
                )
        names = [name for name, _ in pairs]
        self._validate_names(names)
        for name in set(self._reserved_names).intersection(names):
            raise ValueError(f"estimators has the name {name!r}, which is reserved; rename it.")
        kind = "classifier" if is_classifier(self) else "regressor"
        used = [pair for pair in pairs if not (isinstance(pair[1], str) and pair[1] == "drop")]
        for name, estimator in used:
            check_kind(estimator, kind, f"estimators has {name!r}, {estimator!r}")
            check_parameters(estimator, f"estimators has {name!r}")
        if not used:
            raise ValueError("estimators must have at least one that is not dropped; got none.")
        return used

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        inner = [get_tags(estimator).input_tags for estimator in self._estimator_objects()]
        # A single one that refuses missing values makes the whole refuse them.
        tags.input_tags.allow_nan = all(tag.allow_nan for tag in inner)
        tags.input_tags.sparse = False
        return tags


def _classifies(estimator):
    """Whether the estimator was fitted to classes; before a fit, whether it would be."""
    if estimator.__sklearn_is_fitted__():
        return hasattr(estimator, "classes_")
    return is_classifier(estimator)


class OutputsMixin:
    """Predictions from an estimator's ``_outputs``, which are responses or class probabilities."""

    _outputs: Any
    classes_: Any

    @available_if(_classifies)
    @names_class
    def predict_proba(self, X: TableLike, *, groups: TableLike = None) -> Floats:
        """Class probabilities (n_rows, n_classes), in the order of ``classes_``, of each row.

        New clients get those of the population model.

        Parameters
        ----------
        X, groups : object
            As in :meth:`predict`.
        """
        return self._outputs(X, groups)

    @available_if(_classifies)
    @names_class
    def predict_log_proba(self, X: TableLike, *, groups: TableLike = None) -> Floats:
        """Logarithms of :meth:`predict_proba`; minus infinity where a probability is 0.

        Parameters
        ----------
        X, groups : object
            As in :meth:`predict`.
        """
        with np.errstate(divide="ignore"):  # as documented
            return np.log(self._outputs(X, groups))

    @names_class
    def predict(self, X: TableLike, *, groups: TableLike = None) -> np.ndarray:
        """Response, or most likely class, of each row; for new clients by the population model.

        Parameters
        ----------
        X : dataframe or array-like of shape (n_rows, d)
            As in ``fit``.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.
        """
        predicted = self._outputs(X, groups)
        return self.classes_[predicted.argmax(axis=1)] if hasattr(self, "classes_") else predicted


def is_pair(value):
    return isinstance(value, tuple | list) and len(value) == 2


def _is_estimator_object(value):
    """Whether this is an instance of an estimator, not a class."""
    return hasattr(value, "fit") and not isinstance(value, type)


def check_kind(estimator, kind, description):
    """Raise ValueError unless this is a regressor, or a classifier with ``predict_proba``."""
    is_of_kind = is_classifier if kind == "classifier" else is_regressor
    if not (_is_estimator_object(estimator) and is_of_kind(estimator)):
        raise ValueError(f"{description}; expected a {kind}.")
    if kind == "classifier" and not hasattr(estimator, "predict_proba"):
        raise ValueError(
            f"{description}, which has no predict_proba; expected a classifier that has it."
        )


def check_parameters(estimator, description):
    """Raise ValueError if an estimator holds a ClientColumn or a checkpoint."""
    core = final_estimator(estimator)
    inside = [core, *(core.get_params().values() if hasattr(core, "get_params") else ())]
    # The ids would not be in X, or they would be a feature of the other estimators.
    if any(isinstance(value, ClientColumn) for value in inside):
        kind = "a ClientColumn" if isinstance(core, ClientColumn) else "which holds a ClientColumn"
        raise ValueError(
            f"{description}, {kind}, but here client ids are passed on as groups=; give the "
            "estimator inside it, and wrap the whole in a ClientColumn."
        )
    if is_frozen(estimator):  # it is not fitted again
        return
    for key, value in estimator.get_params().items():
        if key.rpartition("__")[2] == "checkpoint" and value is not None:
            raise ValueError(
                f"{description} with {key}={value!r}, but it is fitted in several folds, which "
                "cannot share a file; set it to None."
            )


def check_frozen_clients(pairs, groups):
    """Raise ValueError if a frozen estimator knows several clients, but fit got no ids."""
    # All rows would belong to one unknown client, which gets the population model.
    for name, estimator in pairs if groups is None else ():
        clients = getattr(final_estimator(estimator), "clients_", ())
        if is_frozen(estimator) and len(clients) > 1:
            raise ValueError(
                f"{name!r} is a frozen model of {len(clients)} clients, but fit got no groups= and "
                "cannot know whose rows these are; give groups=, or freeze one client's model "
                "(for_client)."
            )


def classes_of(estimator, labels, pairs=()):
    """Sorted classes of the labels and of frozen estimators; None if they are responses."""
    # A frozen classifier may know classes that none of the rows has, and gives them probabilities.
    if not is_classifier(estimator):
        return None
    classes = np.unique(labels)
    for _, frozen in pairs:
        known = getattr(frozen, "classes_", None) if is_frozen(frozen) else None
        # Strings and numbers have no common order; the estimator's outputs are refused later.
        if known is not None and (known.dtype.kind in "OU") == (classes.dtype.kind in "OU"):
            classes = np.union1d(classes, known)
    check_several_classes(classes, estimator)
    return classes


def without_originals(model):
    """Replace the parameters of a model for one client by its fitted estimators."""
    # The original estimators may know all clients or hold seeds, callbacks and ledgers; listed
    # splits are positions of all clients' rows.
    params: dict[str, Any] = {}
    if isinstance(model.estimators, list):
        frozen = {name: _frozen(fitted) for name, fitted in model.named_estimators_.items()}
        params["estimators"] = [(name, frozen.get(name, "drop")) for name, _ in model.estimators]
    if getattr(model, "final_estimator", None) is not None:
        fitted = model.final_estimator_
        params["final_estimator"] = None if fitted is None else _frozen(fitted)
    if not isinstance(model.cv, Integral):
        params["cv"] = 5  # the default
    return model.set_params(**params)


def _frozen(estimator):
    return estimator if is_frozen(estimator) else FrozenEstimator(estimator)
