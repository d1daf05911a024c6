"""Personalized logistic regression: one coefficient vector per client under a Gaussian prior."""

from numbers import Integral, Real

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_X_y
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from pfl_sklearn._compat import Interval, StrOptions, fit_context
from pfl_sklearn._warnings import warn_caller
from pfl_sklearn.base import ClientClassifierMixin, ClientMixin, read_rows
from pfl_sklearn.linear_model._convergence import warn_not_converged
from pfl_sklearn.linear_model._design import feature_names, resolve_design
from pfl_sklearn.linear_model._estimates import make_table
from pfl_sklearn.linear_model._glmm._fit import fit_logistic
from pfl_sklearn.linear_model._glmm._outcomes import outcome_of
from pfl_sklearn.linear_model._glmm._predictions import (
    averaged_probabilities,
    class_probabilities,
    row_logits,
)
from pfl_sklearn.linear_model._summary import components_table
from pfl_sklearn.priors._support import default_prior, resolve_prior
from pfl_sklearn.privacy import PrivacyReport

_POPULATION = (
    "population_coef_",
    "population_intercept_",
    "population_coef_std_",
    "population_intercept_std_",
    "population_covariance_",
    "prior_",
)
_CLIENTS = (
    "coef_",
    "intercept_",
    "coef_std_",
    "intercept_std_",
    "shrinkage_",
    "intercept_shrinkage_",
    "clients_",
    "n_samples_per_client_",
    "log_likelihood_",
)


class SeparationWarning(UserWarning):
    """The features, or the clients, separate the classes, so that no maximum is finite."""


class PersonalizedLogisticRegression(ClientMixin, ClientClassifierMixin, BaseEstimator):
    r"""Logistic regression with coefficients that vary by client around the population's.

    Row j of client i belongs to the second of two classes with the log odds

    .. math:: \eta_{ij} = x_{ij}^\top (\beta + E b_i), \qquad b_i \sim N(0, S),

    where E picks the coefficients that `random` lets vary by client (the others are common to all
    clients). :math:`\beta` and S maximize the marginal likelihood, the :math:`b_i` integrated out
    by Laplace's approximation; a client's coefficients are its posterior mode. With K > 2 classes
    every class has coefficients :math:`\beta_k` and deviations :math:`b_{ik} \sim N(0, S)`,
    independent over the classes, and probabilities are their softmax.

    Parameters
    ----------
    prior : "gaussian" or GaussianPrior, default="gaussian"
        Distribution of the coefficients that vary by client, in the order intercept, features.
        What it leaves None is estimated, what it gives is known. With K > 2 classes its mean is a
        number or K q numbers, class by class, and its covariance (q, q) is that of every class.
    random : "all", "intercept" or list of str and int, default="all"
        Coefficients that vary by client: names or indices of features, and "intercept".
    fit_intercept : bool, default=True
    max_iter : int, default=200
        Iterations of the search for the population and the covariance.
    tol : float, default=1e-6
        The search ends when the criterion's gradient is below `tol` nats per standard error in
        every direction: estimates are then within about `tol` standard errors of the maximum.
    unseen : {"population", "error"}, default="population"
        What clients get in ``predict`` that ``fit`` did not see.
    n_jobs : int or None, default=None
        Blocks of clients run in parallel; results do not depend on it.

    Attributes
    ----------
    classes_ : ndarray of shape (K,)
    clients_ : ndarray of shape (n_clients,)
        Sorted ids; row i of every per-client array is ``clients_[i]``.
    n_samples_per_client_ : ndarray of shape (n_clients,)
    coef_ : ndarray of shape (n_clients, d), or (n_clients, K, d)
        Posterior modes. With K > 2 classes they sum to 0 over the classes.
    intercept_ : ndarray of shape (n_clients,), or (n_clients, K)
    coef_std_, intercept_std_ : ndarrays of the shapes of `coef_` and `intercept_`
        Posterior standard deviations: curvature at the mode, and the uncertainty of the population
        coefficients; that of the covariance is not counted.
    shrinkage_, intercept_shrinkage_ : ndarrays of the shapes of `coef_` and `intercept_`
        Posterior over prior variance, given the population: 1 where a client's rows tell nothing
        (and for coefficients that do not vary), 0 where they tell all.
    population_coef_, population_intercept_ : ndarrays of shape (d,) and (), or (K, d) and (K,)
        The typical client's. Averaged over clients, probabilities are less extreme.
    population_coef_std_, population_intercept_std_ : ndarrays of the same shapes
        Standard errors from the information at the clients' modes, given the covariance. NaN for
        what the data do not tell: a feature that is 0 or constant, or a combination of others.
    population_covariance_ : ndarray of shape (p, p), or (K p, K p)
        Covariance behind these standard errors: intercept first, then features, class by class. A
        pseudo-inverse where the data do not tell all.
    prior_ : GaussianPrior
        The prior that was used; `mean` and `covariance` hold the values.
    log_likelihood_ : float
        Maximized criterion, in nats.
    n_iter_ : int
        Iterations of the search (of Newton's method for a single client).
    n_features_in_ : int
    feature_names_in_ : ndarray of shape (`n_features_in_`,)
    privacy_ : PrivacyReport

    Raises
    ------
    ValueError
        For missing or mixed ids, NaN or infinity in `X`, only one class, unknown names in `random`,
        for a covariance with NaN (the `prior_` of a single client's fit), or if the covariance
        cannot be told: every client has one row, a column that is constant has a variance of its
        own beside the intercept's (under "diag", "full" and "low_rank"; "spherical" has only one
        variance), or "full" with fewer clients than coefficients.

    Warns
    -----
    SeparationWarning
        If a combination of the features separates the classes over all clients, so that the
        likelihood has no finite maximum. Then, and only then, the population slopes have a normal
        prior with standard deviation 2.5 per standard deviation of their feature. If no client has
        rows of two classes, the factor of an unknown covariance has such a prior; it has one with
        standard deviation 1 if the differences between clients ran away (see Notes).
    ConvergenceWarning
        If `max_iter` was too small, or if rounding stopped the search (more iterations do not help
        then).

    See Also
    --------
    PersonalizedLinearRegression : The same for continuous outcomes.
    sklearn.linear_model.LogisticRegression : One model for all, or per client.

    Notes
    -----
    The population model of Section 3 and Appendix F of Ozkara et al. (2023), which minimizes the
    joint density of its equation (55) over all :math:`\theta_i`, the mean and the variance. That
    has no minimum (all :math:`\theta_i` equal, variance to 0), its equation lacks a minus sign, and
    the prior's gradient in its Algorithm 5 has the wrong sign. Here the marginal likelihood is
    maximized directly, by a quasi-Newton search with exact gradients (through the modes and the
    determinants); EM steps on the Laplace approximation would drift past the maximum. The modes
    come from damped Newton steps for all clients at a time, in the coefficients or in the rows of
    a client, whichever are fewer.

    Laplace's approximation needs more rows per client than coefficients that vary. For a random
    intercept it is close (the standard deviation is 0.7 % below that of adaptive quadrature for 60
    districts of 2 to 118 women, 0.5 % for 316 persons with 24 answers). In simulations with 10 rows
    per client a standard deviation of 1 came out as 1.01 with 2 random coefficients and as .95 with
    3, but .5 as .30 with 10 and .3 as .07 with 50: there give a covariance, and choose it by
    cross-validation.

    With fewer rows per client than coefficients that vary the error can go either way: often the
    variance comes out too small, but the criterion may also keep rising with it. This is taken to
    have happened if the predictors differ between clients by a standard deviation of more than 10
    logits (root mean square over the rows) and a normal prior on the rows of the factor, with
    standard deviation 1 over the root mean square of the column, brings that below a third. The fit
    under this prior is then reported, with a SeparationWarning. A spread that the data do support
    withstands so weak a prior, and is left as it is. (400 clients with 2 rows, 3 coefficients and a
    standard deviation of 1: 16.4 without it, 1.0 with it.)

    Columns are centred where a free intercept can take up their means: features with common
    coefficients, and those that vary beside a random intercept under "full". Centre other features
    that lie far from zero.

    With K > 2 classes the model is invariant to the same change of all classes; coefficients are
    reported with mean 0 over the classes, hence with variance (1 - 1/K) S around the population.
    Weights multiply a row's log-likelihood, as if the row occurred that often; weight 0 is an
    absent row. If all is known only the modes are computed.

    A single client gets the maximum of its own likelihood, without any prior, and the covariance
    is NaN.

    Memory beyond the input: two copies of `X`, and ``8 k p`` bytes per client, where k is the
    smaller of p and the largest number of rows of a client (times K squared for K > 2 classes).

    References
    ----------
    Ozkara, K., Girgis, A. M., Data, D. and Diggavi, S. (2023). A statistical framework for
    personalized federated learning and estimation: theory, algorithms, and privacy. ICLR.

    Breslow, N. E. and Clayton, D. G. (1993). Approximate inference in generalized linear mixed
    models. JASA.

    Rasmussen, C. E. and Williams, C. K. I. (2006). Gaussian processes for machine learning,
    Section 3.4 (Newton's method in the rows). MIT Press.

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
    _default_component = default_prior
    _client_attributes = ("n_samples_per_client_", "coef_", "intercept_", "_posterior")
    _population_attributes = (*_POPULATION, "classes_", "_between")
    _state_attributes = ("_design",)

    _parameter_constraints = {
        "prior": "no_validation",
        "random": [StrOptions({"all", "intercept"}), "array-like"],
        "fit_intercept": ["boolean"],
        "max_iter": [Interval(Integral, 1, None, closed="left")],
        "tol": [Interval(Real, 0, None, closed="neither")],
        "unseen": [StrOptions({"population", "error"})],
        "n_jobs": [Integral, None],
    }

    def __init__(
        self,
        prior="gaussian",
        *,
        random="all",
        fit_intercept=True,
        max_iter=200,
        tol=1e-6,
        unseen="population",
        n_jobs=None,
    ):
        self.prior = prior
        self.random = random
        self.fit_intercept = fit_intercept
        self.max_iter = max_iter
        self.tol = tol
        self.unseen = unseen
        self.n_jobs = n_jobs

    @fit_context(prefer_skip_nested_validation=True)
    def fit(self, X, y, *, groups=None, sample_weight=None):
        """Estimate the population and every client's coefficients.

        Parameters
        ----------
        X : array-like of shape (n_rows, d)
        y : array-like of shape (n_rows,)
            Class labels.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row. None: one client, with a warning.
        sample_weight : array-like of shape (n_rows,), default=None
            How often a row counts; 0 is an absent row.

        Returns
        -------
        self
        """
        prior = resolve_prior(self)
        features, y = check_X_y(X, y, dtype=np.float64, order="C", estimator=self)
        check_classification_targets(y)
        rows = read_rows(self, features, np.arange(len(y)), groups, sample_weight)
        classes, labels = self._encode_labels(y[rows.y])
        design = resolve_design(
            self.random, features.shape[1], self.fit_intercept, feature_names(X)
        )
        present = features if len(labels) == len(features) else features[rows.y]
        found = fit_logistic(
            make_table(design, present, labels, rows),
            prior,
            outcome_of(len(classes)),
            self.max_iter,
            self.tol,
            self.n_jobs,
        )
        self._warn(found, len(classes))
        self._store(X, design, rows.clients, classes, found, groups is not None)
        return self

    def _encode_labels(self, y):
        classes, labels = np.unique(y, return_inverse=True)
        if len(classes) < 2:
            only = classes[0].item() if isinstance(classes[0], np.generic) else classes[0]
            raise ValueError(
                f"{type(self).__name__} needs rows of at least two classes, but the data contains "
                f"only one class: {only!r}."
            )
        return classes, labels

    def _warn(self, found, n_classes):
        if found.separated:
            warn_caller(
                "A combination of the features separates the classes, so the likelihood has no "
                "finite maximum. The population slopes have been given a normal prior with "
                "standard deviation 2.5 per standard deviation of their feature.",
                SeparationWarning,
            )
        if found.unmixed:
            message = (
                "No client has rows of two classes, so the likelihood has no finite maximum in the "
                "differences between clients. Their standard deviations have been given a normal "
                "prior with standard deviation 2.5 (in logits)"
            )
            if n_classes > 2:
                message += ", and their level is that of this prior: the data do not tell it"
            warn_caller(message + ". Better give a known covariance.", SeparationWarning)
        if found.runaway:
            warn_caller(
                "The differences between clients ran away, to a standard deviation of more than 10 "
                "logits: too few rows per client for so many random coefficients, or they separate "
                "the classes of (nearly) every client. Their standard deviations have been given a "
                "normal prior with standard deviation 1 (in logits). Better give a known "
                "covariance, or let fewer coefficients vary by client (random).",
                SeparationWarning,
            )
        self._warn_unfinished(found)

    def _warn_unfinished(self, found):
        """Warn with what helps: iterations only help a search that ran out of them."""
        if found.modes_found and found.n_iter >= self.max_iter:
            warn_not_converged(self, found)
        elif not (found.modes_found and found.converged):
            warn_caller(
                f"{type(self).__name__} did not reach full accuracy: rounding stopped the search "
                "or the clients' modes. More iterations do not help; give a smaller covariance, "
                "or bring the features to a common scale.",
                ConvergenceWarning,
            )

    def _store(self, X, design, clients, classes, found, with_groups):
        """Set all fitted attributes, in the order of the features."""
        validate_data(self, X, skip_check_array=True)
        n_outputs, p = found.population.shape
        back = np.argsort(design.order)
        flat = (lambda values: values[..., 0, :]) if n_outputs == 1 else (lambda values: values)
        at = (np.arange(n_outputs)[:, None] * p + back).ravel()
        self.classes_ = classes
        self.clients_ = clients.ids
        self.n_samples_per_client_ = np.bincount(clients.codes)
        coefficients = design.coefficients(flat(found.coefficients[..., back]))
        self.coef_, self.intercept_ = coefficients
        population = design.coefficients(flat(found.population[:, back]))
        self.population_coef_, self.population_intercept_ = population
        self.population_covariance_ = found.population_covariance[np.ix_(at, at)]
        stds = np.sqrt(np.diag(self.population_covariance_)).reshape(n_outputs, p)
        stds[~found.estimable[:, back]] = np.nan
        self.population_coef_std_, self.population_intercept_std_ = design.coefficients(flat(stds))
        self._between = design.embedded(found.covariance)
        self.prior_ = found.prior
        self.log_likelihood_ = found.log_likelihood
        self.n_iter_ = found.n_iter
        self._posterior = found.posterior
        self._design = design
        self._fitted_with_groups = with_groups
        self.privacy_ = PrivacyReport.unprotected(
            "PersonalizedLogisticRegression has no private fit.",
            not_released=(*_POPULATION, *_CLIENTS),
            n_clients=len(clients.ids),
        )

    def decision_function(self, X, *, groups=None):
        """Log odds of the second class, or logits of all K > 2 classes (which sum to 0).

        Parameters
        ----------
        X : array-like of shape (n_rows, d)
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.

        Returns
        -------
        ndarray of shape (n_rows,) or (n_rows, K)
        """
        logits = self._logits(X, groups)[0]
        return logits[:, 0] if logits.shape[1] == 1 else logits

    def predict_proba(self, X, *, groups=None, integrate=False):
        """Class probabilities of rows under their client's coefficients.

        Parameters
        ----------
        X : array-like of shape (n_rows, d)
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.
        integrate : bool, default=False
            Average the probability over the client's posterior (for unseen clients over the
            prior), which is less extreme than the one at its mode: by the trapezoidal rule, or with
            K > 2 classes by 512 quasi-random points (errors of about 1e-3).

        Returns
        -------
        ndarray of shape (n_rows, K)
            In the order of ``classes_``.
        """
        logits, X, codes = self._logits(X, groups)
        if not integrate:
            return class_probabilities(logits)
        x = self._design.matrix(X)
        contrasts = outcome_of(len(self.classes_)).coding
        return averaged_probabilities(logits, contrasts, lambda g: self._variances(x, codes, g))

    def predict_log_proba(self, X, *, groups=None, integrate=False):
        """Logarithms of :meth:`predict_proba`, with the same parameters."""
        with np.errstate(divide="ignore"):
            return np.log(self.predict_proba(X, groups=groups, integrate=integrate))

    def predict(self, X, *, groups=None):
        """Likeliest class of rows under their client's coefficients.

        Parameters
        ----------
        X : array-like of shape (n_rows, d)
        groups : array-like of shape (n_rows,), default=None

        Returns
        -------
        ndarray of shape (n_rows,)
        """
        logits = self._logits(X, groups)[0]
        if logits.shape[1] == 1:
            return self.classes_[(logits[:, 0] > 0).astype(np.intp)]
        return self.classes_[logits.argmax(axis=1)]

    @property
    def coef_std_(self):
        """Posterior standard deviations of the clients' coefficients."""
        return self._design.coefficients(self._of_posterior("coefficient_variances") ** 0.5)[0]

    @property
    def intercept_std_(self):
        """Posterior standard deviations of the clients' intercepts."""
        return self._design.coefficients(self._of_posterior("coefficient_variances") ** 0.5)[1]

    @property
    def shrinkage_(self):
        """Posterior over prior variance of every coefficient."""
        return self._design.coefficients(self._of_posterior("shrinkage"))[0]

    @property
    def intercept_shrinkage_(self):
        """Posterior over prior variance of the intercepts."""
        return self._design.coefficients(self._of_posterior("shrinkage"))[1]

    def summary(self):
        """Table of the population: fixed effects and variance components.

        Returns
        -------
        DataFrame
            Indexed by part ("fixed", "between") and term, with the columns estimate, std_error (of
            the fixed effects), sd and correlation (of the variance components). With K > 2 classes
            there are fixed effects "class: term".
        """
        check_is_fitted(self)
        design, random = self._design, self._design.random
        population, stds = self.population_coef_, self.population_coef_std_
        if design.fit_intercept:
            population = _with_first(self.population_intercept_, population)
            stds = _with_first(self.population_intercept_std_, stds)
        names = design.names
        if population.ndim == 2:
            names = [f"{label}: {name}" for label in self.classes_ for name in design.names]
        return components_table(
            names,
            population.ravel(),
            stds.ravel(),
            design.random_names,
            self._between[np.ix_(random, random)],
        )

    def _logits(self, X, groups):
        """Logits (n, c), the validated rows, and the positions of their clients."""
        codes = self._encode_predict(X, groups)
        X = validate_data(self, X, reset=False, dtype=np.float64)
        coef = self._with_population("coef_", self.population_coef_)
        intercept = self._with_population("intercept_", self.population_intercept_)
        if coef.ndim == 2:
            coef, intercept = coef[:, None], intercept[:, None]
        return row_logits(X, coef, intercept, codes), X, codes

    def _of_posterior(self, quantity):
        """Values (n_clients, [K,] p) of the posterior, in the order of the design."""
        self._require_fitted("clients_")
        shape = self.coef_.shape[:-1]
        values = getattr(self._posterior, quantity)().reshape(*shape, -1)
        return values[..., np.argsort(self._design.order)]

    def _variances(self, x, codes, combination):
        """Variance (n,) of a combination (c,) of the logits of rows x (n, p) of the design."""
        known = codes >= 0
        variances = np.empty(len(x))
        if not known.all():
            if np.isnan(self._between).any():
                raise ValueError(
                    "integrate=True needs the variance between clients for a client that fit did "
                    "not see, and a fit of one client does not tell it."
                )
            variances[~known] = self._prior_variances(x[~known], combination)
        if known.any():
            ordered = np.kron(combination, x[known][:, self._design.order])
            variances[known] = self._posterior.variances(ordered, codes[known])
        return variances

    def _prior_variances(self, x, combination):
        """The same (n,) for clients that were not seen."""
        between = np.einsum("np,np->n", x @ self._between, x) * (combination @ combination)
        rows = np.kron(combination, x)
        return between + np.einsum("np,np->n", rows @ self.population_covariance_, rows)


def _with_first(intercept, coef):
    """Vectors (..., 1 + d) of intercepts (...,) and coefficients (..., d)."""
    return np.concatenate([np.expand_dims(intercept, -1), coef], axis=-1)
