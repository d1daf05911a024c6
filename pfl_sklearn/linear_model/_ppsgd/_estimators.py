"""PPSGD: additive global and local linear models by private stochastic gradients."""

import math

import numpy as np
from scipy.special import log_softmax
from sklearn.utils import check_X_y
from sklearn.utils.validation import check_is_fitted, validate_data

from pfl_sklearn._compat import StrOptions, available_if, fit_context, with_callbacks
from pfl_sklearn._docs import ROUNDS, fill_doc
from pfl_sklearn._labels import check_labels, read_known_classes
from pfl_sklearn._rounds.privacy import is_private
from pfl_sklearn._rounds.task import CheckedTable
from pfl_sklearn.base import ClientClassifierMixin, ClientRegressorMixin
from pfl_sklearn.linear_model._base import (
    class_probabilities,
    likeliest_class,
)
from pfl_sklearn.linear_model._ppsgd._base import BasePPSGD

_TEXTS = {
    **ROUNDS,
    "idea": r"""
        In every round each sampled client draws a batch and takes a step on its own model
        :math:`\theta_i`, which never leaves the client. Its gradient with respect to w is clipped,
        summed with those of the others, and noised. `alpha` is the ratio of the two steps: the
        smaller it is, the more is learned locally, and the less the noise matters.
        """,
    "steps": """
        alpha : float in [0, inf] or "auto", default="auto"
            How much is learned globally: 0 fits local models only, inf a global model only. Both
            models take equal steps at ``alpha * n_clients * client_fraction == 1``; "auto" makes
            the global step 30 times a local one, so that this product is 30. The notes say what
            the paper's figures and its authors' code call alpha.
        learning_rate : float, "theory" or "auto", default="auto"
            Learning rate, on an average gradient, of the model that takes the larger step; `alpha`
            sets the ratio. "auto" looks at the data, so it is refused with noise: features are
            centred and scaled inside (sparse ones only scaled), w starts at the best constant, and
            the step is the inverse curvature of an average round. Clients whose batches are too
            steep for it take smaller local steps. Given `clip_norm`, features stay as they are.
            "theory" is the step of Theorems 4.5 and 5.2 for `smoothness`, and for `solution_norm`
            and `gradient_std` if they are given.
        n_rounds : int or None, default=None
            Rounds of communication. None: ``fit`` goes on until the loss of held-out rows is flat.
            With noise the data must have no say in it, and None is 100 rounds.
        """,
    "max_rounds": """
        max_rounds : int, default=10000
            Rounds after which ``fit`` ends with a ``ConvergenceWarning`` if the loss is not flat.
        """,
    "batches": """
        batch_size : int or None, default=10
            Rows of a client in a round, at most all it has. None uses all rows. A client's rows
            are used in turn, so none is used twice before all others were used once.
        """,
    "weighting": """
        weighting : {"samples", "clients"}, default="samples"
            Which average loss is minimized: over rows (Algorithm 2, messages are sums over a
            batch) or over clients (Algorithm 3, messages are means over a batch).
        """,
    "iterates": r"""
        average : bool, default=False
            Return the average of the iterates over rounds, which the theorems are about, instead of
            the last iterate.
        fit_intercept : bool, default=True
            Add a column of ones. Its gradient is clipped together with the others.
        shuffle : bool, default=True
            Put each client's rows in random order first. Otherwise they are used as they come.
        smoothness : float or None, default=None
            Bound L on the curvature of a row's loss in both models together, for "theory". For the
            squared loss it is twice the largest squared norm of a row of `X`, intercept included.
        solution_norm, gradient_std : float or None, default=None
            :math:`\|z^*\|_\alpha` of the solution and :math:`\sigma_{tot,\alpha}`, for "theory".
        """,
    "warm_start": """
        warm_start : bool, default=False
            Let ``fit`` continue to `n_rounds` rounds in all, or until the loss is flat again, with
            the noise multiplier that it had unless another is given. With an integer `random_state`
            the result of a number of rounds is the same, bit by bit, as that of all of them at once
            with ``warm_start=True``. The exception is "theory" with `solution_norm`, whose step
            depends on `n_rounds`.
        """,
    "learning_rate_": """
        learning_rate_ : float
            The number that `learning_rate` stood for. That of "auto" is for the features inside.
        """,
    "notes": r"""
        This is Algorithms 1, 2 and 3 of Bietti et al. (2022). Algorithm 1 is
        ``client_fraction=1, batch_size=1``; Algorithm 3 is ``weighting="clients"`` with sampling.
        With N clients, Q = q N of them expected in a round, and the paper's :math:`\alpha` and
        :math:`\eta`:

        ==========================  ====================================================
        the paper's text            `alpha`
        the figures' alpha Q        ``alpha * Q``
        alpha in the authors' code  ``alpha * Q``; -1 there is ``alpha=inf``
        step in the authors' code   `learning_rate`
        step of w                   ``learning_rate * min(alpha * Q, 1)`` = alpha eta
        step of theta_i             ``learning_rate * min(1 / (alpha * Q), 1)`` = eta / Q
        noise on w (the paper's     ``noise_multiplier * clip_norm / Q``, or over Q times
        sigma_zeta)                 the mean batch for ``weighting="samples"``
        ==========================  ====================================================

        With ``weighting="samples"`` clients with larger batches take larger local steps; the table
        gives the step of a client with an average batch. `clip_norm` bounds sums over a batch
        there, and means over a batch for ``weighting="clients"``.

        "auto" divides features by the fourth root of the mean fourth power of what is left after
        centring: 1.3 standard deviations of normal features, and three of an indicator that is 1 in
        one row of a hundred, of which clients would otherwise learn too much.

        Without noise the defaults need no choice. A share of each client's rows is held out, and
        the loss on it is looked at whenever the rounds have grown by a quarter. The models returned
        are those with the lowest loss: local models have no penalty, and the end of the rounds is
        what keeps them from overfitting. If the training loss rises between two looks, the rounds
        go back to the best models so far, with half the step.

        We deviate from the paper in two ways. A client's rows are used in turn, from a random
        order, instead of being drawn independently. And we sample clients independently by default:
        the paper's experiments draw a fixed number of clients but account for them as if each had
        been drawn independently, which understates epsilon. For a fraction of .02, 2,000 rounds, a
        noise multiplier of 1 and a delta of 1e-4 that gives 4.84. The other clients together know
        who takes part in a sample of a fixed size, so against them epsilon is 48.3 if a client's
        contribution is replaced by nothing, and 153.4 if it is replaced by another one.

        The guarantee is joint differential privacy for one client. It covers all iterates of the
        population model together, against anybody who sees them, including all other clients
        together. What a client computes from the population model and its own rows does not harm
        the others. Local models are not protected, nor are ``coef_``, predictions and ``history_``.
        The number of clients, their numbers of rows, the number of rounds and the labels that occur
        are taken to be public. How many clients take part in a round has to stay secret if each is
        sampled independently.

        With sparse `X` a client's model has values only on the features of its own rows. The noise
        on a feature waits until somebody is about to see it, unless callbacks, `average` or
        `warm_start` need all noise in every round. The distribution is the same, in less time.
        """,
    "references": """
        Bietti, A., Wei, C.-Y., Dudik, M., Langford, J. and Wu, Z. S. (2022). Personalization
        improves privacy-accuracy tradeoffs in federated learning. ICML.
        """,
}


@fill_doc(_TEXTS)
class PPSGDRegressor(ClientRegressorMixin, BasePPSGD):
    r"""Linear regression by PPSGD: a global and a local model, by private stochastic gradients.

    .. math:: \min_{w, \theta_{1:N}} \frac{1}{N} \sum_i \frac{1}{2} E_i
        \bigl( y - (w + \theta_i)^\top x \bigr)^2

    %(idea)s

    Parameters
    ----------
    %(steps)s
    %(tol)s
    %(max_rounds)s
    %(validation_fraction)s
    %(batches)s
    %(sampling)s
    %(weighting)s
    %(iterates)s
    %(privacy)s
    %(warm_start)s
    %(checkpoint)s

    Attributes
    ----------
    coef_ : ndarray of shape (n_clients, [n_outputs,] d)
        :math:`w + \theta_i`; row i belongs to ``clients_[i]``. Computed when asked for.
    intercept_ : ndarray of shape (n_clients[, n_outputs])
        Intercepts of the clients' models.
    population_coef_ : ndarray of shape ([n_outputs,] d)
        :math:`w`.
    population_intercept_ : float or ndarray of shape (n_outputs,)
        Intercept of the population model.
    local_coef_ : ndarray of shape (n_clients, [n_outputs,] d)
        :math:`\theta_i`. For sparse `X` this is a sparse array of shape (n_clients * n_outputs, d),
        with the rows of each client together.
    local_intercept_ : ndarray of shape (n_clients[, n_outputs])
        Intercepts of the local models.
    %(learning_rate_)s
    %(rounds_attributes)s

    See Also
    --------
    PersonalizedLinearRegression : the same model with a prior and its marginal likelihood.

    Notes
    -----
    %(notes)s

    Memory: ``n_clients * (d + 1) * n_outputs`` numbers, twice as many with `average`, and all of
    them twice while ``n_rounds=None`` keeps the best models. For sparse
    `X` it is n_outputs numbers for each pair of a client and a feature of its rows. A round takes
    as much again for its sampled clients.

    References
    ----------
    %(references)s

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

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        tags.target_tags.single_output = True
        return tags

    @with_callbacks
    @fit_context(prefer_skip_nested_validation=True)
    def partial_fit(self, X, y, *, groups=None):
        """Go on over rows, of clients seen before or new ones.

        Without noise this is one pass over the rows. With noise it is `n_rounds` rounds, whatever
        the rows are, and they are charged before any data are read.

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
        features, y = check_X_y(
            X,
            y,
            accept_sparse="csr",
            dtype=np.float64,
            order="C",
            multi_output=True,
            y_numeric=True,
            estimator=self,
        )
        if earlier is not None:
            validate_data(self, X, reset=False, skip_check_array=True)
        single = y.ndim == 1
        y = y.astype(np.float64, copy=False).reshape(len(y), -1)
        attributes = {**self._inputs(X), "_single": single}
        if earlier is not None and y.shape[1] != self._population.shape[1]:
            raise ValueError(
                f"y has {y.shape[1]} outputs, but the rounds before had "
                f"{self._population.shape[1]}."
            )
        details = (y.shape[1], "squared_error")
        return CheckedTable(self._features(features, earlier), y, attributes, details)

    def predict(self, X, *, groups=None):
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
        predictors = self._predictors(X, groups)
        return predictors[:, 0] if self._single else predictors


def _has_probabilities(self):
    if self.loss != "log_loss":
        raise AttributeError(
            f"probabilities need loss='log_loss'; got {self.loss!r}, which has predict and "
            "decision_function."
        )
    return True


@fill_doc(_TEXTS)
class PPSGDClassifier(ClientClassifierMixin, BasePPSGD):
    r"""Linear classification by PPSGD: a global and a local model, by private stochastic gradients.

    .. math:: \min_{w, \theta_{1:N}} \frac{1}{N} \sum_i
        E_i\, \ell \bigl( y, (w + \theta_i)^\top x \bigr)

    %(idea)s

    Parameters
    ----------
    %(steps)s
    %(tol)s
    %(max_rounds)s
    %(validation_fraction)s
    %(batches)s
    %(sampling)s
    %(weighting)s
    loss : {"log_loss", "squared_error"}, default="log_loss"
        Logistic loss (two classes) or softmax loss of the labels. "squared_error" is half the
        squared error of their indicators less 1 / n_classes, with one model for each class, as in
        the paper.
    %(iterates)s
    %(privacy)s
    %(warm_start)s
    %(checkpoint)s

    Attributes
    ----------
    coef_ : ndarray of shape (n_clients, [n_classes,] d)
        :math:`w + \theta_i`; row i belongs to ``clients_[i]``. Computed when asked for.
    intercept_ : ndarray of shape (n_clients[, n_classes])
        Intercepts of the clients' models.
    population_coef_ : ndarray of shape ([n_classes,] d)
        :math:`w`.
    population_intercept_ : float or ndarray of shape (n_classes,)
        Intercept of the population model.
    local_coef_ : ndarray of shape (n_clients, [n_classes,] d)
        :math:`\theta_i`. For sparse `X` this is a sparse array of shape (n_clients * n_classes, d),
        with the rows of each client together.
    local_intercept_ : ndarray of shape (n_clients[, n_classes])
        Intercepts of the local models.
    %(learning_rate_)s
    %(rounds_attributes)s

    See Also
    --------
    PersonalizedLogisticRegression : the logistic model with a prior.

    Notes
    -----
    %(notes)s

    Memory: ``n_clients * (d + 1) * n_classes`` numbers, twice as many with `average`, and all of
    them twice while ``n_rounds=None`` keeps the best models. For sparse
    `X` it is n_classes numbers for each pair of a client and a feature of its rows. A round takes
    as much again for its sampled clients.

    References
    ----------
    %(references)s

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

    _parameter_constraints = {
        **BasePPSGD._parameter_constraints,
        "loss": [StrOptions({"log_loss", "squared_error"})],
    }

    def __init__(
        self,
        *,
        alpha="auto",
        learning_rate="auto",
        n_rounds=None,
        tol=1e-3,
        max_rounds=10_000,
        validation_fraction=0.2,
        batch_size=10,
        client_fraction=1.0,
        sampling="poisson",
        weighting="samples",
        loss="log_loss",
        average=False,
        fit_intercept=True,
        shuffle=True,
        smoothness=None,
        solution_norm=None,
        gradient_std=None,
        epsilon=math.inf,
        noise_multiplier=None,
        delta=1e-5,
        clip_norm=None,
        clip_quantile=None,
        ledger=None,
        warm_start=False,
        checkpoint=None,
        checkpoint_every=10,
        unseen="warn",
        n_jobs=None,
        random_state=None,
    ):
        super().__init__(
            alpha=alpha,
            learning_rate=learning_rate,
            n_rounds=n_rounds,
            tol=tol,
            max_rounds=max_rounds,
            validation_fraction=validation_fraction,
            batch_size=batch_size,
            client_fraction=client_fraction,
            sampling=sampling,
            weighting=weighting,
            average=average,
            fit_intercept=fit_intercept,
            shuffle=shuffle,
            smoothness=smoothness,
            solution_norm=solution_norm,
            gradient_std=gradient_std,
            epsilon=epsilon,
            noise_multiplier=noise_multiplier,
            delta=delta,
            clip_norm=clip_norm,
            clip_quantile=clip_quantile,
            ledger=ledger,
            warm_start=warm_start,
            checkpoint=checkpoint,
            checkpoint_every=checkpoint_every,
            unseen=unseen,
            n_jobs=n_jobs,
            random_state=random_state,
        )
        self.loss = loss

    @with_callbacks
    @fit_context(prefer_skip_nested_validation=True)
    def partial_fit(self, X, y, classes=None, *, groups=None):
        """Go on over rows, of clients seen before or new ones.

        Without noise this is one pass over the rows. With noise it is `n_rounds` rounds, whatever
        the rows are, and they are charged before any data are read.

        Parameters
        ----------
        X : {array-like, sparse matrix} of shape (n_rows, d)
            Features of the new rows.
        y : array-like of shape (n_rows,)
            Class labels.
        classes : array-like of shape (n_classes,), default=None
            All labels that are to occur, in the first call; None: those of `y`.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row. Clients that have no rows here keep their models.

        Returns
        -------
        self
        """
        return self._partial_fit(X, y, groups, classes=classes)

    def _read(self, X, y, earlier, classes=None):
        features, y = check_X_y(
            X, y, accept_sparse="csr", dtype=np.float64, order="C", estimator=self
        )
        check_labels(y)
        if earlier is not None:
            validate_data(self, X, reset=False, skip_check_array=True)
        known = None if earlier is None else self.classes_
        classes, labels = read_known_classes(y, known, classes, self, is_private(self))
        n_outputs = 1 if len(classes) == 2 else len(classes)
        attributes = {**self._inputs(X), "classes_": classes, "_single": n_outputs == 1}
        loss = "one_versus_all" if self.loss == "squared_error" else "log_loss"
        return CheckedTable(
            self._features(features, earlier), labels, attributes, (n_outputs, loss)
        )

    def decision_function(self, X, *, groups=None):
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
        predictors = self._predictors(X, groups)
        return predictors[:, 0] if self._single else predictors

    def predict(self, X, *, groups=None):
        """Most likely class of every row.

        Parameters
        ----------
        X : {array-like, sparse matrix} of shape (n_rows, d)
            Features, with the columns that ``fit`` saw.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.

        Returns
        -------
        ndarray of shape (n_rows,)
        """
        check_is_fitted(self)
        return likeliest_class(self.classes_, self.decision_function(X, groups=groups))

    @available_if(_has_probabilities)
    def predict_proba(self, X, *, groups=None):
        """Probabilities of the classes, in the order of ``classes_``.

        Parameters
        ----------
        X : {array-like, sparse matrix} of shape (n_rows, d)
            Features, with the columns that ``fit`` saw.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.

        Returns
        -------
        ndarray of shape (n_rows, n_classes)
        """
        return class_probabilities(self.decision_function(X, groups=groups))

    @available_if(_has_probabilities)
    def predict_log_proba(self, X, *, groups=None):
        """Logarithms of the probabilities of the classes.

        Parameters
        ----------
        X : {array-like, sparse matrix} of shape (n_rows, d)
            Features, with the columns that ``fit`` saw.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.

        Returns
        -------
        ndarray of shape (n_rows, n_classes)
        """
        predictors = self.decision_function(X, groups=groups)
        if self._single:
            return -np.logaddexp(0.0, np.column_stack([predictors, -predictors]))
        return log_softmax(predictors, axis=1)
