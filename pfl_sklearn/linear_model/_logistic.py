"""Personalized logistic regression: one coefficient vector per client under a Gaussian prior."""

from collections.abc import Sequence
from functools import partial
from numbers import Integral
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_X_y

from pfl_sklearn._compat import Interval, StrOptions, fit_context
from pfl_sklearn._labels import check_labels, read_classes
from pfl_sklearn._parameters import NOT_NEGATIVE, parameter, with_parameters
from pfl_sklearn._typing import Floats, TableLike
from pfl_sklearn._warnings import warn_caller
from pfl_sklearn.base import ClientClassifierMixin
from pfl_sklearn.linear_model._base import (
    CLIENTS,
    POPULATION,
    BasePersonalizedRegression,
    check_dense,
    class_probabilities,
    likeliest_class,
    warn_not_converged,
)
from pfl_sklearn.linear_model._glmm._fit import fit_logistic
from pfl_sklearn.linear_model._glmm._outcomes import outcome_of
from pfl_sklearn.linear_model._glmm._population_search import LogitOptions, n_points_of
from pfl_sklearn.linear_model._glmm._predictions import averaged_probabilities
from pfl_sklearn.linear_model._glmm._table import make_table
from pfl_sklearn.linear_model._identification import gaussian_evidence
from pfl_sklearn.priors import GaussianPrior
from pfl_sklearn.priors._support import resolve_prior
from pfl_sklearn.privacy import PrivacyReport

_MOST_NAMED = 10  # features that a warning names


class SeparationWarning(UserWarning):
    """The features or the clients separate the classes, so the likelihood has no finite maximum."""


@with_parameters
class PersonalizedLogisticRegression(ClientClassifierMixin, BasePersonalizedRegression):
    r"""Logistic regression with coefficients that vary by client around those of the population.

    Row j of client i belongs to the second of two classes with log odds

    .. math:: \eta_{ij} = x_{ij}^\top (\beta + E b_i), \qquad b_i \sim N(0, S),

    where E selects the coefficients that vary by client (`random`); all clients share the others.
    :math:`\beta` and S maximize the marginal likelihood, with the :math:`b_i` integrated out by
    adaptive quadrature or Laplace's approximation (`quadrature`). A client's coefficients are its
    posterior mode. With K > 2 classes every class has coefficients :math:`\beta_k` and deviations
    :math:`b_{ik} \sim N(0, S)`, independent over the classes, and the probabilities are the softmax
    of the logits. The :ref:`user guide <logistic_regression>` has the mathematics and examples.

    Parameters
    ----------
    prior : "gaussian" or GaussianPrior, default="gaussian"
        Distribution of the q coefficients that vary by client: the intercept first, then the
        features in their order. Parameters that the prior leaves None are estimated, the others
        known; by default there is a variance for each coefficient ("diag") of centred columns. With
        K > 2 classes the mean is one number, or K q numbers class by class.
    random : "all", "intercept", the name of a feature, or list of str and int, default="all"
        Coefficients that vary by client: names or indices of features, and "intercept". With "all"
        and the default prior a feature that is constant within every client has a common
        coefficient.
    fit_intercept : bool, default=True
        Whether the model has an intercept; otherwise rows are modelled through the origin.
    population_penalty : float, >= 0, default=0.0
        L2 penalty on the population's slopes, per standard deviation of their features; 1 / C of
        scikit-learn's LogisticRegression on standardized features. With few clients it keeps common
        slopes from fitting chance.
    quadrature : {"auto", "laplace"} or int in [1, 100], default="auto"
        How a client's effects are integrated out: by adaptive Gauss-Hermite quadrature with that
        many points, or by Laplace's approximation (one point). Quadrature needs two classes and one
        varying coefficient. "auto" then takes 15 points, 61 or 121 where clients are further apart,
        and Laplace's approximation elsewhere.
    max_iter : int, default=200
        Largest number of iterations of the search for the population and the covariance.
    tol : float, default=1e-4
        The search ends when the gradient of the criterion is below `tol` nats per standard error in
        every direction. Estimates are then within about `tol` standard errors of the maximum.
    unseen : {"warn", "population", "error"}, default="warn"
        What to do for clients that ``fit`` did not see. "warn" and "population" use the
        population model; "warn" says so when they have at least half of the rows. "error"
        raises an error.
    n_jobs : int or None, default=None
        Number of jobs that work on blocks of clients. Results do not depend on it.

    Attributes
    ----------
    classes_ : ndarray of shape (K,)
    clients_ : ndarray of shape (n_clients,)
        Sorted ids; row i of every per-client array is ``clients_[i]``.
    n_samples_per_client_ : ndarray of shape (n_clients,)
    coef_ : ndarray of shape (n_clients, d), or (n_clients, K, d)
        Posterior modes of the clients' coefficients. With K > 2 classes they sum to 0 over the
        classes.
    intercept_ : ndarray of shape (n_clients,), or (n_clients, K)
    coef_std_, intercept_std_ : ndarrays of the shapes of `coef_` and `intercept_`
        Posterior standard deviations, from the curvature at the mode and the uncertainty of the
        population coefficients. They do not include the uncertainty of the covariance, so with few
        clients they are too small.
    shrinkage_, intercept_shrinkage_ : ndarrays of the shapes of `coef_` and `intercept_`
        Posterior variance over prior variance, given the population: 0 where the client's own rows
        determine a coefficient, 1 where the population does. 1 also for coefficients that do not
        vary.
    population_coef_, population_intercept_ : ndarrays of shape (d,) and (), or (K, d) and (K,)
        Coefficients of a typical client. Probabilities averaged over clients are less extreme than
        those of a typical client.
    population_coef_std_, population_intercept_std_ : ndarrays of the same shapes
        Standard errors from the information at the clients' modes, given the covariance. NaN for
        coefficients that are not identified: the feature is 0 or constant, or a combination of
        others.
    population_covariance_ : ndarray of shape (p, p), or (K p, K p)
        Covariance behind these standard errors: the intercept first, then the features, class by
        class. It is a pseudo-inverse where some coefficients are not identified.
    prior_ : GaussianPrior
        The prior with the mean and the covariance that the fit used.
    log_likelihood_ : float
        Approximate log marginal likelihood at the estimates, in nats, without penalties.
    aic_, bic_ : float
        Information criteria; smaller is better. They count the estimated population coefficients
        that are identified (for K - 1 classes), also where a penalty shrinks them, and the free
        parameters of the covariance.
    icc_ : float
        Intraclass correlation of the log odds, for two classes: the variance between clients (its
        mean over the rows, if slopes vary) over that variance and :math:`\pi^2 / 3`, the variance
        of the logistic distribution.
    marginal_r2_, conditional_r2_ : float
        Share of the variance of the latent response that the population coefficients explain, and
        that they and the clients' coefficients explain, for two classes (Nakagawa and Schielzeth,
        2013; Johnson, 2014).
    n_iter_ : int
        Iterations of the search, or of Newton's method for a single client.
    n_features_in_ : int
    feature_names_in_ : ndarray of shape (`n_features_in_`,)
    privacy_ : PrivacyReport

    Raises
    ------
    ValueError
        For ids that are missing or of mixed types, NaN or infinity, values above 1e150 or only
        values below 1e-140 (and not 0) in a column of `X`, only one class, a row's weight above 1e6
        or weights that sum to less than 1e-3.

        For unknown or ambiguous names in `random`, a number of quadrature points where several
        coefficients vary or K > 2, and a known covariance that holds NaN (the `prior_` of a fit of
        a single client) or infinity, or lets the predictors vary by more than 1e7 logits.

        For a covariance that the data do not identify: every client has one row; a column named in
        `random` is constant over all rows, beside a random intercept, and the covariance is not
        spherical; the covariance is full and there are fewer clients than random coefficients.

    Warns
    -----
    SeparationWarning
        If the likelihood has no finite maximum, because a combination of the features separates the
        classes, no client has rows of two classes, or the differences between clients diverge. A
        weak normal prior then keeps the estimates finite (see the user guide).
    ConvergenceWarning
        If `max_iter` was too small, or if rounding stopped the search. More iterations do not help
        in the second case.
    UserWarning
        If the labels look like counts: more than 20 classes that are whole numbers, the largest of
        which has a single row.

    See Also
    --------
    PersonalizedLinearRegression : The same model for continuous responses.
    sklearn.linear_model.LogisticRegression : One model for all clients, or one for each alone.
    pfl_sklearn.inspection.likelihood_ratio_test : Test of what a larger model adds.

    Notes
    -----
    The model is that of Section 3 and Appendix F of Ozkara et al. (2023). The joint density that
    the paper minimizes (equation 55) has no minimum and lacks a minus sign, and the prior's
    gradient in Algorithm 5 has the wrong sign. We maximize the marginal likelihood directly.

    *Accuracy.* Laplace's approximation needs more rows per client than random coefficients. With
    fewer, estimated variances are often too small: give a covariance, and choose it by
    cross-validation. Standard deviations of few clients are too small in any case.

    *Centring.* We centre columns where an intercept can absorb their means: features with common
    coefficients, and features that vary beside a random intercept, unless the prior has
    ``centered=False``. Centre other features yourself if they lie far from zero.

    *Classes and weights.* We report coefficients with mean 0 over K > 2 classes, so their variance
    around the population is (1 - 1/K) S. A weight multiplies the log-likelihood of its row, as if
    the row occurred that often; a row of weight 0 is absent.

    If everything is known we only compute the modes. A single client gets the maximum of its own
    likelihood, without any prior, and its covariance is NaN.

    *Memory* beyond the input: two copies of `X` and ``8 k p`` bytes per client, where k is the
    smaller of p and the largest number of rows of a client; K squared times that for K > 2 classes.

    References
    ----------
    Ozkara, K., Girgis, A. M., Data, D. and Diggavi, S. (2023). A statistical framework for
    personalized federated learning and estimation: theory, algorithms, and privacy. ICLR.

    Johnson, P. C. D. (2014). Extension of Nakagawa & Schielzeth's R2_GLMM to random slopes models.
    Methods in Ecology and Evolution.

    Nakagawa, S. and Schielzeth, H. (2013). A general and simple method for obtaining R2 from
    generalized linear mixed-effects models. Methods in Ecology and Evolution.

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn.linear_model import PersonalizedLogisticRegression
    >>> rng = np.random.default_rng(0)
    >>> X, hospital = rng.normal(size=(600, 1)), np.repeat(np.arange(20), 30)
    >>> odds = 2 * X[:, 0] + rng.normal(size=20)[hospital]
    >>> y = rng.random(600) < 1 / (1 + np.exp(-odds))
    >>> model = PersonalizedLogisticRegression(random="intercept").fit(X, y, groups=hospital)
    >>> model.population_coef_.round(1), model.intercept_.shape
    (array([2.3]), (20,))
    >>> model.predict_proba(X[:1], groups=[3]).shape
    (1, 2)
    """

    __metadata_request__predict_proba = {"groups": True, "integrate": True}
    __metadata_request__predict_log_proba = {"groups": True, "integrate": True}

    _likelihood = "logistic"
    _population_attributes = (*POPULATION, "classes_", "_between")

    prior: str | GaussianPrior = parameter(default="gaussian", kw_only=False)
    random: str | Sequence[str | int] = parameter(default="all")
    fit_intercept: bool = parameter(default=True)
    population_penalty: float = parameter(default=0.0, ranges=[NOT_NEGATIVE])
    quadrature: str | int = parameter(
        default="auto",
        ranges=[Interval(Integral, 1, 100, closed="both"), StrOptions({"auto", "laplace"})],
    )
    max_iter: int = parameter(default=200)
    tol: float = parameter(default=1e-4)
    unseen: str = parameter(default="warn")
    n_jobs: int | None = parameter(default=None)

    @fit_context(prefer_skip_nested_validation=True)
    def fit(
        self, X: TableLike, y: TableLike, *, groups: TableLike = None, sample_weight: Any = None
    ) -> Self:
        """Estimate the population and every client's coefficients.

        Parameters
        ----------
        X : array-like of shape (n_rows, d)
            Features; an intercept is added if `fit_intercept` is True.
        y : array-like of shape (n_rows,)
            Class labels.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row. None: all rows belong to one client, with a warning.
        sample_weight : array-like of shape (n_rows,), default=None
            How often each row counts; a row of weight 0 is absent.

        Returns
        -------
        self
        """
        prior = resolve_prior(self)
        check_dense(X, self, "PPSGDClassifier")
        features, y = check_X_y(X, y, dtype=np.float64, order="C", estimator=self)
        check_labels(y)
        design, features, rows = self._read_rows(X, features, y, groups, sample_weight)
        # Classes that only rows of weight 0 have are absent, as these rows are.
        classes, labels = read_classes(rows.y, self)
        table = make_table(design, features, rows._replace(y=labels))
        outcome, ids = outcome_of(len(classes)), rows.clients.ids
        estimates = fit_logistic(table, prior, outcome, self._parameters_of(LogitOptions))
        self._warn(estimates, len(classes), design)
        self.classes_ = classes
        self._store(X, design, ids, table.sizes, estimates, groups is not None)
        integration = partial(_integration, self.quadrature, outcome)
        self._evidence = gaussian_evidence(
            table, design, prior, 0.0, integration, outcome.n_outputs
        )
        shape = prior.covariance_type if prior.covariance is None else None
        self._family = (shape, False) if len(ids) > 1 else None
        self.privacy_ = PrivacyReport.unprotected(
            "PersonalizedLogisticRegression has no private fit.",
            not_released=(*POPULATION, *CLIENTS),
            n_clients=len(ids),
        )
        return self

    def _warn(self, estimates, n_classes, design):
        if estimates.separating:
            names = [repr(design.names[design.order[k]]) for k in estimates.separating]
            # With many columns a list of all that take part would say little.
            n_more = len(names) - _MOST_NAMED
            more = f" and {n_more} more" if n_more > 0 else ""
            warn_caller(
                f"A combination of the features, mainly {', '.join(names[:_MOST_NAMED])}{more}, "
                "separates the classes, so the likelihood has no finite maximum. The population "
                "slopes got a normal prior with standard deviation 2.5 per standard deviation of "
                "their feature.",
                SeparationWarning,
            )
        if estimates.unmixed:
            message = (
                "No client has rows of two classes, so the likelihood has no finite maximum in the "
                "differences between clients. Their standard deviations got a normal prior with "
                "standard deviation 2.5 (in logits)"
            )
            if n_classes > 2:
                message += ", which alone sets their level: the data do not determine it"
            warn_caller(message + ". Give a known covariance instead.", SeparationWarning)
        if estimates.runaway:
            warn_caller(
                "The differences between clients diverged to a standard deviation of more than 10 "
                "logits: clients have too few rows for so many random coefficients, or these "
                "separate the classes of nearly every client. Their standard deviations got a "
                "normal prior with standard deviation 1 (in logits). Give a known covariance "
                "instead, or let fewer coefficients vary by client (random).",
                SeparationWarning,
            )
        self._warn_unfinished(estimates)

    def _warn_unfinished(self, estimates):
        """Advise more iterations only if the search ran out of them."""
        # Rounding ends a search below max_iter, and modes that are lost stay lost.
        if estimates.modes_found and estimates.n_iter >= self.max_iter:
            warn_not_converged(self, estimates)
        elif not (estimates.modes_found and estimates.converged):
            warn_caller(
                f"{type(self).__name__} did not reach full accuracy: rounding stopped the search "
                "or the clients' modes. More iterations do not help; give a smaller covariance, "
                "or bring the features to a common scale.",
                ConvergenceWarning,
            )

    def _store(self, X, design, ids, sizes, estimates, with_groups):
        """Set the fitted attributes, in the order of the features; two classes have no axis."""
        n_outputs, p = estimates.population.shape
        back = np.argsort(design.order)
        at = (np.arange(n_outputs)[:, None] * p + back).ravel()
        self.population_covariance_ = estimates.population_covariance[np.ix_(at, at)]
        stds = np.sqrt(np.diag(self.population_covariance_)).reshape(n_outputs, p)
        # The covariance is a pseudo-inverse, which says nothing of what the data leave open.
        stds[~estimates.estimable[:, back]] = np.nan
        if n_outputs == 1:
            population, coefficients = estimates.population[0], estimates.coefficients[:, 0]
            estimates = estimates._replace(population=population, coefficients=coefficients)
            stds = stds[0]
        self.population_coef_std_, self.population_intercept_std_ = design.coefficients(stds)
        super()._store(X, design, ids, sizes, estimates, with_groups)
        self._posterior = estimates.posterior

    def decision_function(self, X: TableLike, *, groups: TableLike = None) -> Floats:
        """Log odds of the second class, or logits of all K > 2 classes, which sum to 0.

        Parameters
        ----------
        X : array-like of shape (n_rows, d)
            Features, with the columns that ``fit`` saw.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.

        Returns
        -------
        ndarray of shape (n_rows,) or (n_rows, K)
        """
        return self._predictors(X, groups)[0]

    def predict_proba(
        self, X: TableLike, *, groups: TableLike = None, integrate: bool = False
    ) -> Floats:
        """Class probabilities of rows under their client's coefficients.

        Parameters
        ----------
        X : array-like of shape (n_rows, d)
            Features, with the columns that ``fit`` saw.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.
        integrate : bool, default=False
            Average the probability over the client's posterior, or over the prior for unseen
            clients. The average is less extreme than the probability at the mode. For K > 2
            classes its error is about 1e-3.

        Returns
        -------
        ndarray of shape (n_rows, K)
            In the order of ``classes_``.
        """
        logits, X, codes = self._predictors(X, groups)
        if not integrate:
            return class_probabilities(logits)
        x = self._design.matrix(X)
        contrasts = outcome_of(len(self.classes_)).coding
        logits = logits.reshape(len(x), -1)
        return averaged_probabilities(logits, contrasts, lambda g: self._variances(x, codes, g))

    def predict_log_proba(
        self, X: TableLike, *, groups: TableLike = None, integrate: bool = False
    ) -> Floats:
        """Logarithms of :meth:`predict_proba`; minus infinity where a probability is 0.

        Parameters
        ----------
        X : array-like of shape (n_rows, d)
            Features, with the columns that ``fit`` saw.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.
        integrate : bool, default=False
            Average the probability over the client's posterior before taking the logarithm.

        Returns
        -------
        ndarray of shape (n_rows, K)
            In the order of ``classes_``.
        """
        with np.errstate(divide="ignore"):  # the logarithm of 0 is minus infinity, as documented
            return np.log(self.predict_proba(X, groups=groups, integrate=integrate))

    def predict(self, X: TableLike, *, groups: TableLike = None) -> NDArray[Any]:
        """Most likely class of rows under their client's coefficients.

        Parameters
        ----------
        X : array-like of shape (n_rows, d)
            Features, with the columns that ``fit`` saw.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.

        Returns
        -------
        ndarray of shape (n_rows,)
        """
        logits = self._predictors(X, groups)[0]
        return likeliest_class(self.classes_, logits)

    def _new_variances(self, x, combination):
        """Variance (n,) of a combination of the logits of clients that fit did not see."""
        if np.isnan(self._between).any():
            raise ValueError(
                "integrate=True needs the variance between clients for a client that fit did "
                "not see, and a fit of one client cannot estimate it."
            )
        # Deviations of the classes are independent and have one covariance.
        between = np.einsum("np,np->n", x @ self._between, x) * (combination @ combination)
        rows = np.kron(combination, x)
        return between + np.einsum("np,np->n", rows @ self.population_covariance_, rows)


def _integration(quadrature, outcome, shape, n_varying, rank):
    """How the log-likelihood under a covariance of `n_varying` coefficients was computed."""
    if shape == "zero":  # nothing is left to integrate
        return "exact"
    n_points = n_points_of(quadrature, outcome, np.empty((0, n_varying + rank)))
    return "laplace" if n_points == 1 else f"quadrature with {n_points} points"
