"""PPSGD: additive global and local linear models by private stochastic gradients."""

from typing import Any, Self

import numpy as np
from scipy.special import log_softmax
from sklearn.utils.validation import check_is_fitted

from pfl_sklearn._clients import Array
from pfl_sklearn._compat import StrOptions, available_if, fit_context, with_callbacks
from pfl_sklearn._labels import (
    CLASSES,
    check_labels,
    class_assumption,
    given_classes,
    read_known_classes,
)
from pfl_sklearn._parameters import parameter, with_parameters
from pfl_sklearn._rounds.privacy import is_private
from pfl_sklearn._rounds.run import CheckedTable, without_weights
from pfl_sklearn._typing import Floats, TableLike
from pfl_sklearn.base import ClientClassifierMixin, ClientRegressorMixin
from pfl_sklearn.linear_model._algebra import class_probabilities, likeliest_class
from pfl_sklearn.linear_model._ppsgd._base import BasePPSGD
from pfl_sklearn.linear_model._ppsgd._updates import LOSSES


@with_parameters
class PPSGDRegressor(ClientRegressorMixin, BasePPSGD):
    r"""Linear regression by PPSGD: a global and a local model, by private stochastic gradients.

    .. math:: \min_{w, \theta_{1:N}} \frac{1}{N} \sum_i \frac{1}{2} E_i
        \bigl( y - (w + \theta_i)^\top x \bigr)^2

    In every round each sampled client takes a step on its own model :math:`\theta_i`, which never
    leaves the client. Its gradient in w is clipped, summed with those of the others, and noised.
    `alpha` is the ratio of the two steps: the smaller it is, the more is learned locally, and the
    less the noise matters.

    Attributes
    ----------
    coef_ : ndarray of shape (n_clients, [n_outputs,] d)
        :math:`w + \theta_i`; row i belongs to ``clients_[i]``. Computed when asked for.
    population_coef_ : ndarray of shape ([n_outputs,] d)
        :math:`w`.
    local_coef_ : ndarray of shape (n_clients, [n_outputs,] d)
        :math:`\theta_i`. For sparse `X` this is a sparse array of shape (n_clients * n_outputs, d),
        with the rows of each client together.
    intercept_, local_intercept_ : ndarray of shape (n_clients[, n_outputs])
        Intercepts of the clients' models, and of their local parts.
    population_intercept_ : float or ndarray of shape (n_outputs,)
        Intercept of the population model.

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn import PPSGDRegressor
    >>> rng = np.random.default_rng(0)
    >>> groups = np.repeat(np.arange(20), 30)
    >>> X = rng.normal(size=(600, 2))
    >>> y = X @ [1.0, 2.0] + 0.5 * groups / 20 * X[:, 0]
    >>> model = PPSGDRegressor(tol=1e-6, random_state=0).fit(X, y, groups=groups)
    >>> model.coef_[[0, -1]].round(2)
    array([[1.  , 2.  ],
           [1.48, 2.  ]])
    """

    _loss = LOSSES["squared_error"]

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    @without_weights
    @with_callbacks
    @fit_context(prefer_skip_nested_validation=True)
    def partial_fit(self, X: TableLike, y: Any, *, groups: Any = None) -> Self:
        """Go on over rows, of clients seen before or new ones.

        Without noise this is one pass over the rows. With noise it is `n_rounds` rounds for any
        rows, charged before any data are read.

        Parameters
        ----------
        X : {array-like, sparse matrix} of shape (n_rows, d)
            Features of the new rows.
        y : array-like of shape (n_rows,) or (n_rows, n_outputs)
            Responses, with as many columns as in the first call.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row. Clients that have no rows here keep their models.

        Returns
        -------
        self
        """
        return self._partial_fit(X, y, groups)

    def _read(self, X, y, earlier, classes=None):
        features, y = self._check_table(X, y, earlier, multi_output=True, y_numeric=True)
        single = y.ndim == 1
        y = y.astype(np.float64, copy=False).reshape(len(y), -1)
        # Models of earlier rounds have a column for each output.
        if earlier is not None and y.shape[1] != self._population.shape[1]:
            raise ValueError(
                f"y has {y.shape[1]} outputs; the earlier rounds had {self._population.shape[1]}. "
                "Give y as many columns, or fit anew."
            )
        attributes = {**self._column_attributes(X), "_single": single}
        return CheckedTable(features, y, attributes, y.shape[1])

    def predict(self, X: TableLike, *, groups: Any = None) -> Array:
        """Prediction for every row's client; the population's for unseen clients.

        Parameters
        ----------
        X : {array-like, sparse matrix} of shape (n_rows, d)
            Features, with the columns that ``fit`` saw.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.

        Returns
        -------
        ndarray of shape (n_rows,) or (n_rows, n_outputs)
        """
        return self._predictors(X, groups)


def _has_probabilities(self):
    # The squared loss predicts indicators, which may lie outside 0 and 1.
    if self.loss != "log_loss":
        raise AttributeError(
            f"probabilities need loss='log_loss'; got {self.loss!r}, which has predict and "
            "decision_function."
        )
    return True


@with_parameters
class PPSGDClassifier(ClientClassifierMixin, BasePPSGD):
    r"""Linear classification by PPSGD: a global and a local model, by private stochastic gradients.

    .. math:: \min_{w, \theta_{1:N}} \frac{1}{N} \sum_i
        E_i\, \ell \bigl( y, (w + \theta_i)^\top x \bigr)

    In every round each sampled client takes a step on its own model :math:`\theta_i`, which never
    leaves the client. Its gradient in w is clipped, summed with those of the others, and noised.
    `alpha` is the ratio of the two steps: the smaller it is, the more is learned locally, and the
    less the noise matters.

    Attributes
    ----------
    coef_ : ndarray of shape (n_clients, [n_classes,] d)
        :math:`w + \theta_i`; row i belongs to ``clients_[i]``. Under the logistic loss of two
        classes they are those of the log odds of ``classes_[1]``. Computed when asked for.
    population_coef_ : ndarray of shape ([n_classes,] d)
        :math:`w`.
    local_coef_ : ndarray of shape (n_clients, [n_classes,] d)
        :math:`\theta_i`. For sparse `X` this is a sparse array of shape (n_clients * n_classes, d),
        with the rows of each client together.
    intercept_, local_intercept_ : ndarray of shape (n_clients[, n_classes])
        Intercepts of the clients' models, and of their local parts.
    population_intercept_ : float or ndarray of shape (n_classes,)
        Intercept of the population model.

    Examples
    --------
    >>> from pfl_sklearn import PPSGDClassifier
    >>> from pfl_sklearn.datasets import load_digits_clients
    >>> digits = load_digits_clients(n_clients=30, classes_per_client=3, random_state=0)
    >>> model = PPSGDClassifier(n_rounds=300, random_state=0)
    >>> model = model.fit(digits.data, digits.target, groups=digits.groups)
    >>> model.score(digits.data, digits.target, groups=digits.groups) > 0.95
    True
    """

    classes: Any = CLASSES
    loss: str = parameter(
        default="log_loss",
        ranges=[StrOptions({"log_loss", "squared_error"})],
        text="""
            {"log_loss", "squared_error"}
                Logistic loss (two classes) or softmax loss of the labels. "squared_error" is half
                the squared error of their indicators less 1 / n_classes, with one model for each
                class, as in the paper.
            """,
    )

    @without_weights
    @with_callbacks
    @fit_context(prefer_skip_nested_validation=True)
    def partial_fit(self, X: TableLike, y: Any, classes: Any = None, *, groups: Any = None) -> Self:
        """Go on over rows, of clients seen before or new ones.

        Without noise this is one pass over the rows. With noise it is `n_rounds` rounds for any
        rows, charged before any data are read.

        Parameters
        ----------
        X : {array-like, sparse matrix} of shape (n_rows, d)
            Features of the new rows.
        y : array-like of shape (n_rows,)
            Class labels.
        classes : array-like of shape (n_classes,), default=None
            All labels that are to occur, in the first call; None: those of `y`.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row. Clients without rows here keep their models.

        Returns
        -------
        self
        """
        return self._partial_fit(X, y, groups, classes=classes)

    def _read(self, X, y, earlier, classes=None):
        features, y = self._check_table(X, y, earlier)
        check_labels(y)
        # Earlier rounds fix the classes: a new one would need an output that they did not learn.
        seen = None if earlier is None else self.classes_
        classes = given_classes(self, classes)
        classes, labels = read_known_classes(y, seen, classes, self, is_private(self))
        # Two classes have one predictor, whose sign decides; more have one each.
        n_outputs = 1 if len(classes) == 2 else len(classes)
        attributes = {**self._column_attributes(X), "classes_": classes, "_single": n_outputs == 1}
        return CheckedTable(features, labels, attributes, n_outputs)

    @property
    def _assumptions(self):
        return (*super()._assumptions, class_assumption(self))

    @property
    def _loss(self):
        return LOSSES["one_versus_all" if self.loss == "squared_error" else "log_loss"]

    def decision_function(self, X: TableLike, *, groups: Any = None) -> Floats:
        """Linear predictors of every row's client; the population's for unseen clients.

        Parameters
        ----------
        X : {array-like, sparse matrix} of shape (n_rows, d)
            Features, with the columns that ``fit`` saw.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.

        Returns
        -------
        ndarray of shape (n_rows,) for two classes, else (n_rows, n_classes)
        """
        return self._predictors(X, groups)

    def predict(self, X: TableLike, *, groups: Any = None) -> Array:
        """Most likely class of every row.

        Parameters
        ----------
        X, groups
            As in :meth:`decision_function`.

        Returns
        -------
        ndarray of shape (n_rows,)
        """
        check_is_fitted(self)
        return likeliest_class(self.classes_, self.decision_function(X, groups=groups))

    @available_if(_has_probabilities)
    def predict_proba(self, X: TableLike, *, groups: Any = None) -> Floats:
        """Probabilities of the classes, in the order of ``classes_``.

        Parameters
        ----------
        X, groups
            As in :meth:`decision_function`.

        Returns
        -------
        ndarray of shape (n_rows, n_classes)
        """
        return class_probabilities(self.decision_function(X, groups=groups))

    @available_if(_has_probabilities)
    def predict_log_proba(self, X: TableLike, *, groups: Any = None) -> Floats:
        """Logarithms of the probabilities of the classes.

        Parameters
        ----------
        X, groups
            As in :meth:`decision_function`.

        Returns
        -------
        ndarray of shape (n_rows, n_classes)
        """
        predictors = self.decision_function(X, groups=groups)
        if self._single:
            # From the predictors: a probability may underflow to 0, which has no log.
            return -np.logaddexp(0.0, np.column_stack([predictors, -predictors]))
        return log_softmax(predictors, axis=1)
