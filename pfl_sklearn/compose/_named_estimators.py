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
    """Base of estimators with a parameter `estimators`: a list of (name, estimator), or for one.

    A subclass says by ``_default_estimators`` what None and words stand for.
    """

    if TYPE_CHECKING:  # of every subclass, as positional parameters stand where they are declared
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
            Include them. Those that None stands for are not listed, but can be set.

        Returns
        -------
        dict
        """
        return self._get_params("estimators", deep=deep)

    def set_params(self, **params: Any) -> Self:
        """Set the parameters of this estimator.

        Parameters
        ----------
        **params : dict
            Parameters by name; those of an estimator in `estimators` as ``<name>__<parameter>``.
            An estimator that is set to "drop" is left out.

        Returns
        -------
        self
        """
        given = params.get("estimators", self.estimators)
        if not isinstance(given, list):
            defaults = self._default_estimators(given)
            if any(name.partition("__")[0] in dict(defaults) for name in params):
                params["estimators"] = defaults  # the objects that it stands for, to be changed
        self._set_params("estimators", **params)
        return self

    def _default_estimators(self, library: str | None) -> list[tuple[str, Any]]:
        return []

    @property
    def _has_list(self):
        """Whether `estimators` is a list, and does not stand for one."""
        return isinstance(self.estimators, list)

    def _given_estimators(self):
        return self.estimators if self._has_list else self._default_estimators(self.estimators)

    def _given_final(self):
        """Estimator behind those in the list, if there is one."""
        return None

    def _sk_visual_block_(self):
        """Picture in a notebook: estimators by name beside each other, and the final one behind."""
        pairs, final = [each for each in self._given_estimators() if is_pair(each)], []
        if (last := self._given_final()) is not None:
            block = VisualBlock("parallel", [last], names=["final_estimator"], dash_wrapped=False)
            final = [block]
        names, estimators = [str(name) for name, _ in pairs], [each for _, each in pairs]
        branches = VisualBlock("parallel", estimators, names=names, dash_wrapped=not final)
        return VisualBlock("serial", [branches, *final], dash_wrapped=False) if final else branches

    def _estimator_objects(self):
        """Estimators in the list, unchecked: scikit-learn asks for tags before any check."""
        pairs = [each for each in self._given_estimators() if is_pair(each)]
        return [each for _, each in pairs if _is_estimator_object(each)]

    def _checked_estimators(self):
        """Names and estimators that are not dropped.

        Raises
        ------
        ValueError
            If they are no list of names and estimators of the right kind, or a name is taken.
        """
        pairs = self._given_estimators()
        for each in pairs:
            if not (is_pair(each) and isinstance(each[0], str)):
                raise ValueError(
                    f"estimators must be a list of (name, estimator); got {each!r} in it."
                )
        names = [name for name, _ in pairs]
        self._validate_names(names)
        for name in set(self._reserved_names).intersection(names):
            raise ValueError(f"estimators has the name {name!r}, which is that of another part.")
        kind = "classifier" if is_classifier(self) else "regressor"
        used = [pair for pair in pairs if not (isinstance(pair[1], str) and pair[1] == "drop")]
        for name, each in used:
            check_kind(each, kind, f"estimators has {name!r}, {each!r}")
            check_parameters(each, f"estimators has {name!r}")
        if not used:
            raise ValueError("estimators must hold at least one that is not dropped; got none.")
        return used

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        inner = [get_tags(each) for each in self._estimator_objects()]
        # One that takes no missing values is enough to refuse a table.
        tags.input_tags.allow_nan = all(each.input_tags.allow_nan for each in inner)
        tags.input_tags.sparse = False
        return tags


def _classifies(estimator):
    """Whether the estimator was fitted to classes; before a fit, whether it would be."""
    if estimator.__sklearn_is_fitted__():
        return hasattr(estimator, "classes_")
    return is_classifier(estimator)


class OutputsMixin:
    """Predictions of an estimator from its ``_outputs``: responses or class probabilities."""

    _outputs: Any
    classes_: Any

    @available_if(_classifies)
    @names_class
    def predict_proba(self, X: TableLike, *, groups: TableLike = None) -> Floats:
        """Class probabilities for every row's client; for new clients those of the population.

        Parameters
        ----------
        X : dataframe or array-like of shape (n_rows, d)
            As in ``fit``.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.

        Returns
        -------
        ndarray of shape (n_rows, n_classes)
            In the order of ``classes_``.
        """
        return self._outputs(X, groups)

    @available_if(_classifies)
    @names_class
    def predict_log_proba(self, X: TableLike, *, groups: TableLike = None) -> Floats:
        """Logarithms of :meth:`predict_proba`; minus infinity where a probability is 0.

        Parameters
        ----------
        X : dataframe or array-like of shape (n_rows, d)
            As in ``fit``.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.

        Returns
        -------
        ndarray of shape (n_rows, n_classes)
        """
        with np.errstate(divide="ignore"):  # as documented
            return np.log(self._outputs(X, groups))

    @names_class
    def predict(self, X: TableLike, *, groups: TableLike = None) -> np.ndarray:
        """Response, or most likely class, of every row; for new clients that of the population.

        Parameters
        ----------
        X : dataframe or array-like of shape (n_rows, d)
            As in ``fit``.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.

        Returns
        -------
        ndarray of shape (n_rows,)
        """
        predicted = self._outputs(X, groups)
        return self.classes_[predicted.argmax(axis=1)] if hasattr(self, "classes_") else predicted


def is_pair(value):
    return isinstance(value, tuple | list) and len(value) == 2


def _is_estimator_object(value):
    """Whether this is an instance of an estimator, not a class."""
    return hasattr(value, "fit") and not isinstance(value, type)


def check_kind(estimator, kind, what):
    """Raise ValueError unless this is a regressor, or a classifier with ``predict_proba``."""
    is_of_kind = is_classifier if kind == "classifier" else is_regressor
    if not (_is_estimator_object(estimator) and is_of_kind(estimator)):
        raise ValueError(f"{what}; expected a {kind}.")
    if kind == "classifier" and not hasattr(estimator, "predict_proba"):
        raise ValueError(f"{what}, which has no predict_proba; expected a classifier that has.")


def check_parameters(estimator, what):
    """Raise ValueError if an estimator holds a ClientColumn or a checkpoint."""
    core = final_estimator(estimator)
    inside = [core, *(core.get_params().values() if hasattr(core, "get_params") else ())]
    # A column of ids would not be in X, or be a feature of the other estimators, too.
    if any(isinstance(each, ClientColumn) for each in inside):
        kind = "a ClientColumn" if isinstance(core, ClientColumn) else "which holds a ClientColumn"
        raise ValueError(
            f"{what}, {kind}, but here client ids are handed on as groups=; give the estimator "
            "inside it, and wrap the whole in a ClientColumn."
        )
    if is_frozen(estimator):  # it is not fitted again
        return
    for key, value in estimator.get_params().items():
        if key.rpartition("__")[2] == "checkpoint" and value is not None:
            raise ValueError(
                f"{what} with {key}={value!r}, but it is fitted in several folds, which cannot "
                "share a file; set it to None."
            )


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


def without_originals(model):
    """Give a handed-out model its fitted estimators as parameters, in place of the originals.

    Given estimators may know all their clients or hold seeds, callbacks and ledgers, and splits are
    positions of all clients' rows.
    """
    params: dict[str, Any] = {}
    if isinstance(model.estimators, list):
        handed = {name: _frozen(each) for name, each in model.named_estimators_.items()}
        params["estimators"] = [(name, handed.get(name, "drop")) for name, _ in model.estimators]
    if getattr(model, "final_estimator", None) is not None:
        fitted = model.final_estimator_
        params["final_estimator"] = None if fitted is None else _frozen(fitted)
    if not isinstance(model.cv, Integral):
        params["cv"] = 5  # the default
    return model.set_params(**params)


def _frozen(estimator):
    return estimator if is_frozen(estimator) else FrozenEstimator(estimator)
