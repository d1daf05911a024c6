"""PPSGD: additive global and local linear models by private stochastic gradients."""

import math

import numpy as np
from scipy.special import expit, log_softmax, softmax
from sklearn.callback import with_callbacks
from sklearn.utils import check_X_y
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d, validate_data

from pfl_sklearn._compat import StrOptions, fit_context
from pfl_sklearn.base import ClientClassifierMixin, ClientRegressorMixin
from pfl_sklearn.linear_model._ppsgd._base import BasePPSGD
from pfl_sklearn.linear_model._ppsgd._fit import Targets


class PPSGDRegressor(ClientRegressorMixin, BasePPSGD):
    r"""Linear regression w + theta_i: a global model and a local one, by private gradients.

    .. math:: \min_{w, \theta_{1:N}} \frac{1}{N} \sum_i \frac{1}{2} E_i
        \bigl( y - (w + \theta_i)^\top x \bigr)^2

    In every round the sampled clients draw a batch and take a step on their own model
    :math:`\theta_i`, which never leaves them; gradients with respect to w are clipped, summed,
    and get noise. `alpha` is the ratio of the two steps: the smaller it is, the more is learned
    locally, and the less noise matters.

    Parameters
    ----------
    alpha : float in [0, inf], default=1.0
        How much is learned globally: 0 is local models only, inf a global model only. See the notes
        for what the paper's figures and its authors' code call alpha. At ``alpha * n_clients *
        client_fraction == 1`` both models take equal steps.
    learning_rate : float, "theory" or "auto", default="auto"
        Larger of the two models' steps on an average gradient; `alpha` says how the other compares.
        "auto" is half the inverse curvature of the steepest batch (less if few clients are expected
        in a round): it looks at the data and is refused when noise is added. "theory" is the step
        of Theorems 4.5 and 5.2 for `smoothness`, and `solution_norm` and `gradient_std` if given.
    n_rounds : int, default=100
        Rounds of communication.
    batch_size : int or None, default=10
        Rows of a client in a round, at most all it has; None: all. A client's rows are taken in
        turn, so that none is used twice before every other one was once.
    client_fraction : float in (0, 1], default=1.0
        Probability q that a client takes part in a round, or with ``sampling="fixed"`` the share
        of clients that do.
    sampling : {"poisson", "fixed"}, default="poisson"
        Whether every client takes part by itself, with this probability, or a fixed number of
        clients is drawn without replacement. The latter is accounted by an accountant of its own
        (under replacement of a client) and costs far more epsilon.
    weighting : {"samples", "clients"}, default="samples"
        Which average loss is minimized: over rows (Algorithm 2: messages are sums over a batch) or
        over clients (Algorithm 3: averages over a batch).
    loss : {"squared_error"}, default="squared_error"
        Half the squared error, summed over outputs.
    average : bool, default=False
        Give the average of the iterates over rounds (what the theorems are about) instead of the
        last one.
    fit_intercept : bool, default=True
        Add a column of ones. Its gradient is clipped with the others.
    shuffle : bool, default=True
        Put the rows of every client in random order first; without it they are taken as they come.
    smoothness : float or None, default=None
        Bound L on the curvature of a row's loss in both models together, for "theory": for the
        squared loss twice the largest squared norm of a row of `X` (with its intercept).
    solution_norm, gradient_std : float or None, default=None
        :math:`\|z^*\|_\alpha` of the solution and :math:`\sigma_{tot,\alpha}`, for "theory".
    epsilon : float in (0, inf], default=inf
        Privacy of the population model, in nats; the noise follows from it, from `delta`,
        `n_rounds` and `client_fraction`. Every call to ``fit`` or ``partial_fit`` spends so much.
    noise_multiplier : float or None, default=None
        Standard deviation of the noise on the sum of messages over `clip_norm`, instead of
        `epsilon`.
    delta : float in [0, 1), default=1e-5
    clip_norm : float or None, default=None
        L2 norm that a client's message is clipped to; the user's, never from the data. Needed when
        noise is added. Local models are not clipped.
    clip_quantile : float in (0, 1) or None, default=None
        Move the bound towards this quantile of the messages' norms, from `clip_norm` on. It is
        found from noisy counts, whose share of the budget is taken off that of the sums.
    ledger : PrivacyLedger or None, default=None
        File to which every fit is written before it reads any data, and which refuses a fit beyond
        its budget.
    warm_start : bool, default=False
        Let ``fit`` go on to `n_rounds` rounds in all, with the noise multiplier that it had unless
        another is given. With an integer `random_state` that is the same, bit by bit, as all
        rounds at once with ``warm_start=True`` (but for "theory" with `solution_norm`, whose step
        depends on `n_rounds`).
    checkpoint : path or None, default=None
        File that ``fit`` writes its state to and, if it is there, goes on from; removed when the
        fit has ended. It holds every client's model and what noise is drawn from: protect it. One
        fit, one file.
    checkpoint_every : int, default=10
        Rounds between two writes.
    unseen : {"population", "error"}, default="population"
        What clients get in ``predict`` that ``fit`` did not see.
    n_jobs : int or None, default=None
        Workers for blocks of clients within a round. Results are the same bits. Clients' models
        travel to the workers in every round: processes cost more than they save unless batches are
        large, and threads (``joblib.parallel_config("threading")``) are no slower.
    random_state : int, RandomState instance or None, default=None
        Order of rows, sampling and noise. None draws from the operating system; with a seed
        whoever knows it can take the noise off, and the report says so.

    Attributes
    ----------
    coef_ : ndarray of shape (n_clients, [n_outputs,] d)
        :math:`w + \theta_i`, row i is ``clients_[i]``; made when asked for.
    intercept_ : ndarray of shape (n_clients[, n_outputs])
    population_coef_ : ndarray of shape ([n_outputs,] d)
        :math:`w`.
    population_intercept_ : float or ndarray of shape (n_outputs,)
    local_coef_ : ndarray of shape (n_clients, [n_outputs,] d)
        :math:`\theta_i`. If `X` was sparse a sparse array of shape (n_clients * n_outputs, d), with
        the rows of a client together.
    local_intercept_ : ndarray of shape (n_clients[, n_outputs])
    clients_ : ndarray of shape (n_clients,)
        Sorted client ids.
    n_samples_per_client_ : ndarray of shape (n_clients,)
        Rows of every client; with ``partial_fit`` of all calls together.
    n_rounds_ : int
        Rounds run so far.
    learning_rate_ : float
        The number that `learning_rate` stood for.
    noise_multiplier_ : float
        Of the last call; 0 without noise.
    history_ : dict of ndarrays, one value per round
        Of every round "n_clients" that took part, their mean "loss" before it, the share of them
        that was "clipped", and the bound "clip_norm". Exact, hence not protected.
    privacy_ : PrivacyReport
    n_features_in_ : int
    feature_names_in_ : ndarray of shape (d,)
        If `X` was a data frame.

    See Also
    --------
    PersonalizedLinearRegression : the same model with a prior and its marginal likelihood.

    Notes
    -----
    Algorithms 1, 2 and 3 of Bietti et al. (2022): Algorithm 1 is ``client_fraction=1,
    batch_size=1``; ``weighting="clients"`` with sampling is Algorithm 3. With N clients, Q = q N of
    them expected in a round, and the paper's :math:`\alpha` and :math:`\eta`:

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

    Local steps of ``weighting="samples"`` are larger for clients with larger batches: those of the
    table are a client's with an average one. `clip_norm` bounds sums over a batch there, and
    averages for ``weighting="clients"``.

    Deviations: rows are drawn in turn, from a random order, instead of independently. The paper's
    experiments account a fixed number of clients as if each had been drawn by itself, which
    understates epsilon (for a fraction of .02, 2,000 rounds, a noise multiplier of 1 and a delta
    of 1e-4 as 4.84, where it is at least 31 under replacement of a client); so Poisson sampling is
    the default, and the other has its own accountant.

    Privacy is joint differential privacy for one client: what is protected is the population model,
    all its iterates together, against whoever sees them, all other clients together included. What
    a client computes with it and its own rows does not harm the others. Local models, hence
    ``coef_`` and predictions, and ``history_`` are not protected. How many clients there are, how
    many rows each has, and which labels occur, is taken to be public.

    With sparse `X` a client's model has values on the features of its own rows only, and the noise
    on a feature waits until somebody is to see it (unless callbacks, `average` or `warm_start`
    need all of it in every round): the same distribution in less time.

    Memory: ``n_clients * (d + 1) * n_outputs`` numbers, twice as many with `average`; for sparse
    `X` as many as there are pairs of a client and a feature of its rows, times n_outputs. A round
    takes as much again for its sampled clients.

    References
    ----------
    Bietti, A., Wei, C.-Y., Dudik, M., Langford, J. and Wu, Z. S. (2022). Personalization improves
    privacy-accuracy tradeoffs in federated learning. ICML.

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn import PPSGDRegressor
    >>> rng = np.random.default_rng(0)
    >>> groups = np.repeat(np.arange(20), 30)
    >>> X = rng.normal(size=(600, 2))
    >>> y = X @ [1.0, 2.0] + 0.5 * groups / 20 * X[:, 0]
    >>> model = PPSGDRegressor(alpha=0.05, random_state=0).fit(X, y, groups=groups)
    >>> model.coef_[[0, -1]].round(2)
    array([[1.  , 2.  ],
           [1.47, 2.  ]])
    """

    _parameter_constraints = {
        **BasePPSGD._parameter_constraints,
        "loss": [StrOptions({"squared_error"})],
    }

    def __init__(
        self,
        *,
        alpha=1.0,
        learning_rate="auto",
        n_rounds=100,
        batch_size=10,
        client_fraction=1.0,
        sampling="poisson",
        weighting="samples",
        loss="squared_error",
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
        unseen="population",
        n_jobs=None,
        random_state=None,
    ):
        self.alpha = alpha
        self.learning_rate = learning_rate
        self.n_rounds = n_rounds
        self.batch_size = batch_size
        self.client_fraction = client_fraction
        self.sampling = sampling
        self.weighting = weighting
        self.loss = loss
        self.average = average
        self.fit_intercept = fit_intercept
        self.shuffle = shuffle
        self.smoothness = smoothness
        self.solution_norm = solution_norm
        self.gradient_std = gradient_std
        self.epsilon = epsilon
        self.noise_multiplier = noise_multiplier
        self.delta = delta
        self.clip_norm = clip_norm
        self.clip_quantile = clip_quantile
        self.ledger = ledger
        self.warm_start = warm_start
        self.checkpoint = checkpoint
        self.checkpoint_every = checkpoint_every
        self.unseen = unseen
        self.n_jobs = n_jobs
        self.random_state = random_state

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        tags.target_tags.single_output = True
        return tags

    @with_callbacks
    @fit_context(prefer_skip_nested_validation=True)
    def partial_fit(self, X, y, *, groups=None):
        """Go on for one more pass over rows, of clients seen before or new ones.

        Parameters
        ----------
        X : {array-like, sparse matrix} of shape (n_rows, d)
        y : array-like of shape (n_rows,) or (n_rows, n_outputs)
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
        return Targets(
            self._features(features, earlier), y, y.shape[1], "squared_error", attributes
        )

    def predict(self, X, *, groups=None):
        """Prediction for every row's client; the population's for unseen clients.

        Parameters
        ----------
        X : {array-like, sparse matrix} of shape (n_rows, d)
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


class PPSGDClassifier(ClientClassifierMixin, BasePPSGD):
    r"""Linear classification w + theta_i: a global model and a local one, by private gradients.

    .. math:: \min_{w, \theta_{1:N}} \frac{1}{N} \sum_i
        E_i\, \ell \bigl( y, (w + \theta_i)^\top x \bigr)

    In every round the sampled clients draw a batch and take a step on their own model
    :math:`\theta_i`, which never leaves them; gradients with respect to w are clipped, summed,
    and get noise. `alpha` is the ratio of the two steps: the smaller it is, the more is learned
    locally, and the less noise matters.

    Parameters
    ----------
    alpha : float in [0, inf], default=1.0
        How much is learned globally: 0 is local models only, inf a global model only. See the notes
        for what the paper's figures and its authors' code call alpha. At ``alpha * n_clients *
        client_fraction == 1`` both models take equal steps.
    learning_rate : float, "theory" or "auto", default="auto"
        Larger of the two models' steps on an average gradient; `alpha` says how the other compares.
        "auto" is half the inverse curvature of the steepest batch (less if few clients are expected
        in a round): it looks at the data and is refused when noise is added. "theory" is the step
        of Theorems 4.5 and 5.2 for `smoothness`, and `solution_norm` and `gradient_std` if given.
    n_rounds : int, default=100
        Rounds of communication.
    batch_size : int or None, default=10
        Rows of a client in a round, at most all it has; None: all. A client's rows are taken in
        turn, so that none is used twice before every other one was once.
    client_fraction : float in (0, 1], default=1.0
        Probability q that a client takes part in a round, or with ``sampling="fixed"`` the share
        of clients that do.
    sampling : {"poisson", "fixed"}, default="poisson"
        Whether every client takes part by itself, with this probability, or a fixed number of
        clients is drawn without replacement. The latter is accounted by an accountant of its own
        (under replacement of a client) and costs far more epsilon.
    weighting : {"samples", "clients"}, default="samples"
        Which average loss is minimized: over rows (Algorithm 2: messages are sums over a batch) or
        over clients (Algorithm 3: averages over a batch).
    loss : {"log_loss", "squared_error"}, default="log_loss"
        Logistic loss (two classes) or softmax loss of the labels, or half the squared error of
        their indicators less 1 / n_classes, one model for every class, as in the paper.
    average : bool, default=False
        Give the average of the iterates over rounds (what the theorems are about) instead of the
        last one.
    fit_intercept : bool, default=True
        Add a column of ones. Its gradient is clipped with the others.
    shuffle : bool, default=True
        Put the rows of every client in random order first; without it they are taken as they come.
    smoothness : float or None, default=None
        Bound L on the curvature of a row's loss in both models together, for "theory": for the
        squared loss twice the largest squared norm of a row of `X` (with its intercept).
    solution_norm, gradient_std : float or None, default=None
        :math:`\|z^*\|_\alpha` of the solution and :math:`\sigma_{tot,\alpha}`, for "theory".
    epsilon : float in (0, inf], default=inf
        Privacy of the population model, in nats; the noise follows from it, from `delta`,
        `n_rounds` and `client_fraction`. Every call to ``fit`` or ``partial_fit`` spends so much.
    noise_multiplier : float or None, default=None
        Standard deviation of the noise on the sum of messages over `clip_norm`, instead of
        `epsilon`.
    delta : float in [0, 1), default=1e-5
    clip_norm : float or None, default=None
        L2 norm that a client's message is clipped to; the user's, never from the data. Needed when
        noise is added. Local models are not clipped.
    clip_quantile : float in (0, 1) or None, default=None
        Move the bound towards this quantile of the messages' norms, from `clip_norm` on. It is
        found from noisy counts, whose share of the budget is taken off that of the sums.
    ledger : PrivacyLedger or None, default=None
        File to which every fit is written before it reads any data, and which refuses a fit beyond
        its budget.
    warm_start : bool, default=False
        Let ``fit`` go on to `n_rounds` rounds in all, with the noise multiplier that it had unless
        another is given. With an integer `random_state` that is the same, bit by bit, as all
        rounds at once with ``warm_start=True`` (but for "theory" with `solution_norm`, whose step
        depends on `n_rounds`).
    checkpoint : path or None, default=None
        File that ``fit`` writes its state to and, if it is there, goes on from; removed when the
        fit has ended. It holds every client's model and what noise is drawn from: protect it. One
        fit, one file.
    checkpoint_every : int, default=10
        Rounds between two writes.
    unseen : {"population", "error"}, default="population"
        What clients get in ``predict`` that ``fit`` did not see.
    n_jobs : int or None, default=None
        Workers for blocks of clients within a round. Results are the same bits. Clients' models
        travel to the workers in every round: processes cost more than they save unless batches are
        large, and threads (``joblib.parallel_config("threading")``) are no slower.
    random_state : int, RandomState instance or None, default=None
        Order of rows, sampling and noise. None draws from the operating system; with a seed
        whoever knows it can take the noise off, and the report says so.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
        Sorted labels. With two classes arrays have no axis for them.
    coef_ : ndarray of shape (n_clients, [n_classes,] d)
        :math:`w + \theta_i`, row i is ``clients_[i]``; made when asked for.
    intercept_ : ndarray of shape (n_clients[, n_classes])
    population_coef_ : ndarray of shape ([n_classes,] d)
        :math:`w`.
    population_intercept_ : float or ndarray of shape (n_classes,)
    local_coef_ : ndarray of shape (n_clients, [n_classes,] d)
        :math:`\theta_i`. If `X` was sparse a sparse array of shape (n_clients * n_classes, d), with
        the rows of a client together.
    local_intercept_ : ndarray of shape (n_clients[, n_classes])
    clients_ : ndarray of shape (n_clients,)
        Sorted client ids.
    n_samples_per_client_ : ndarray of shape (n_clients,)
        Rows of every client; with ``partial_fit`` of all calls together.
    n_rounds_ : int
        Rounds run so far.
    learning_rate_ : float
        The number that `learning_rate` stood for.
    noise_multiplier_ : float
        Of the last call; 0 without noise.
    history_ : dict of ndarrays, one value per round
        Of every round "n_clients" that took part, their mean "loss" before it, the share of them
        that was "clipped", and the bound "clip_norm". Exact, hence not protected.
    privacy_ : PrivacyReport
    n_features_in_ : int
    feature_names_in_ : ndarray of shape (d,)
        If `X` was a data frame.

    See Also
    --------
    PersonalizedLogisticRegression : the logistic model with a prior.

    Notes
    -----
    Algorithms 1, 2 and 3 of Bietti et al. (2022): Algorithm 1 is ``client_fraction=1,
    batch_size=1``; ``weighting="clients"`` with sampling is Algorithm 3. With N clients, Q = q N of
    them expected in a round, and the paper's :math:`\alpha` and :math:`\eta`:

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

    Local steps of ``weighting="samples"`` are larger for clients with larger batches: those of the
    table are a client's with an average one. `clip_norm` bounds sums over a batch there, and
    averages for ``weighting="clients"``.

    Deviations: rows are drawn in turn, from a random order, instead of independently. The paper's
    experiments account a fixed number of clients as if each had been drawn by itself, which
    understates epsilon (for a fraction of .02, 2,000 rounds, a noise multiplier of 1 and a delta
    of 1e-4 as 4.84, where it is at least 31 under replacement of a client); so Poisson sampling is
    the default, and the other has its own accountant.

    Privacy is joint differential privacy for one client: what is protected is the population model,
    all its iterates together, against whoever sees them, all other clients together included. What
    a client computes with it and its own rows does not harm the others. Local models, hence
    ``coef_`` and predictions, and ``history_`` are not protected. How many clients there are, how
    many rows each has, and which labels occur, is taken to be public.

    With sparse `X` a client's model has values on the features of its own rows only, and the noise
    on a feature waits until somebody is to see it (unless callbacks, `average` or `warm_start`
    need all of it in every round): the same distribution in less time.

    Memory: ``n_clients * (d + 1) * n_classes`` numbers, twice as many with `average`; for sparse
    `X` as many as there are pairs of a client and a feature of its rows, times n_classes. A round
    takes as much again for its sampled clients.

    References
    ----------
    Bietti, A., Wei, C.-Y., Dudik, M., Langford, J. and Wu, Z. S. (2022). Personalization improves
    privacy-accuracy tradeoffs in federated learning. ICML.

    Examples
    --------
    >>> from pfl_sklearn import PPSGDClassifier
    >>> from pfl_sklearn.datasets import load_digits_clients
    >>> digits = load_digits_clients(n_clients=30, classes_per_client=3, random_state=0)
    >>> model = PPSGDClassifier(alpha=0.03, random_state=0)
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
        alpha=1.0,
        learning_rate="auto",
        n_rounds=100,
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
        unseen="population",
        n_jobs=None,
        random_state=None,
    ):
        self.alpha = alpha
        self.learning_rate = learning_rate
        self.n_rounds = n_rounds
        self.batch_size = batch_size
        self.client_fraction = client_fraction
        self.sampling = sampling
        self.weighting = weighting
        self.loss = loss
        self.average = average
        self.fit_intercept = fit_intercept
        self.shuffle = shuffle
        self.smoothness = smoothness
        self.solution_norm = solution_norm
        self.gradient_std = gradient_std
        self.epsilon = epsilon
        self.noise_multiplier = noise_multiplier
        self.delta = delta
        self.clip_norm = clip_norm
        self.clip_quantile = clip_quantile
        self.ledger = ledger
        self.warm_start = warm_start
        self.checkpoint = checkpoint
        self.checkpoint_every = checkpoint_every
        self.unseen = unseen
        self.n_jobs = n_jobs
        self.random_state = random_state

    @with_callbacks
    @fit_context(prefer_skip_nested_validation=True)
    def partial_fit(self, X, y, classes=None, *, groups=None):
        """Go on for one more pass over rows, of clients seen before or new ones.

        Parameters
        ----------
        X : {array-like, sparse matrix} of shape (n_rows, d)
        y : array-like of shape (n_rows,)
        classes : array-like of shape (n_classes,), default=None
            All labels that are to occur, in the first call; None: those of `y`.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row. Clients that have no rows here keep their models.

        Returns
        -------
        self
        """
        return self._partial_fit(X, y, groups, classes)

    def _read(self, X, y, earlier, classes=None):
        features, y = check_X_y(
            X, y, accept_sparse="csr", dtype=np.float64, order="C", estimator=self
        )
        check_classification_targets(y)
        if earlier is not None:
            validate_data(self, X, reset=False, skip_check_array=True)
        classes, labels = self._labels(y, earlier, classes)
        n_outputs = 1 if len(classes) == 2 else len(classes)
        attributes = {**self._inputs(X), "classes_": classes, "_single": n_outputs == 1}
        loss = "one_versus_all" if self.loss == "squared_error" else "log_loss"
        return Targets(self._features(features, earlier), labels, n_outputs, loss, attributes)

    def _labels(self, y, earlier, classes):
        """Sorted classes, and the position of every row's among them."""
        found, labels = np.unique(y, return_inverse=True)
        known = self.classes_ if earlier is not None else classes
        if known is not None:
            known = np.unique(column_or_1d(known))
            if classes is not None and not np.array_equal(np.unique(classes), known):
                raise ValueError(
                    f"classes={classes!r} is not the same as in the first call: {known.tolist()}."
                )
            missing = np.setdiff1d(found, known)
            if len(missing):
                raise ValueError(
                    f"y holds the label {missing[:1].tolist()[0]!r}, which is not among the "
                    f"{len(known)} classes given before."
                )
            labels, found = np.searchsorted(known, found)[labels], known
        if len(found) < 2:
            raise ValueError(
                f"{type(self).__name__} needs rows of at least two classes, but the data contains "
                f"only one class: {found.tolist()[0]!r}."
            )
        return found, labels

    def decision_function(self, X, *, groups=None):
        """Linear predictors of every row's client; the population's for unseen clients.

        Parameters
        ----------
        X : {array-like, sparse matrix} of shape (n_rows, d)
        groups : array-like of shape (n_rows,), default=None

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
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.

        Returns
        -------
        ndarray of shape (n_rows,)
        """
        predictors = self.decision_function(X, groups=groups)
        chosen = (predictors > 0).astype(int) if self._single else predictors.argmax(axis=1)
        return self.classes_[chosen]

    @available_if(_has_probabilities)
    def predict_proba(self, X, *, groups=None):
        """Probabilities of the classes, in the order of ``classes_``.

        Parameters
        ----------
        X : {array-like, sparse matrix} of shape (n_rows, d)
        groups : array-like of shape (n_rows,), default=None

        Returns
        -------
        ndarray of shape (n_rows, n_classes)
        """
        predictors = self.decision_function(X, groups=groups)
        if self._single:
            return expit(np.column_stack([-predictors, predictors]))
        return softmax(predictors, axis=1)

    @available_if(_has_probabilities)
    def predict_log_proba(self, X, *, groups=None):
        """Logarithms of the probabilities of the classes.

        Parameters
        ----------
        X : {array-like, sparse matrix} of shape (n_rows, d)
        groups : array-like of shape (n_rows,), default=None

        Returns
        -------
        ndarray of shape (n_rows, n_classes)
        """
        predictors = self.decision_function(X, groups=groups)
        if self._single:
            return -np.logaddexp(0.0, np.column_stack([predictors, -predictors]))
        return log_softmax(predictors, axis=1)
