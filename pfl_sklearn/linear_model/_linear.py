"""Personalized linear regression: one coefficient vector per client under a population prior."""

import math
from numbers import Integral, Real

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils import check_X_y
from sklearn.utils.validation import check_is_fitted, validate_data

from pfl_sklearn._compat import Interval, StrOptions, fit_context
from pfl_sklearn.base import ClientMixin, ClientRegressorMixin, read_rows
from pfl_sklearn.linear_model._convergence import warn_not_converged
from pfl_sklearn.linear_model._design import feature_names, resolve_design
from pfl_sklearn.linear_model._estimates import Options, make_table
from pfl_sklearn.linear_model._fits import find_fit
from pfl_sklearn.linear_model._mixed._private_release import Release, release_events, with_report
from pfl_sklearn.linear_model._summary import components_table
from pfl_sklearn.priors._support import default_prior, resolve_prior
from pfl_sklearn.privacy import PrivacyLedger
from pfl_sklearn.privacy._ledger import charge
from pfl_sklearn.privacy._report import warn_once

_POPULATION = (
    "population_coef_",
    "population_intercept_",
    "population_coef_std_",
    "population_intercept_std_",
    "prior_",
    "noise_variance_",
    "population_covariance_",
)
_CLIENTS = (
    "coef_",
    "intercept_",
    "coef_std_",
    "intercept_std_",
    "shrinkage_",
    "intercept_shrinkage_",
    "responsibilities_",
    "clients_",
    "n_samples_per_client_",
    "log_likelihood_",
)


class PersonalizedLinearRegression(ClientMixin, ClientRegressorMixin, BaseEstimator):
    r"""Linear regression with one coefficient vector per client and a population of them.

    .. math:: y_{ij} = x_{ij}^\top \theta_i + w_{ij}, \qquad w_{ij} \sim N(0, \sigma^2), \qquad
        \theta_i \sim \text{prior}.

    Coefficients that vary by client (`random`) have a population prior; the others are common to
    all. Under a Gaussian prior with mean :math:`\mu` and covariance S this is the linear mixed
    model with one grouping: S, :math:`\sigma^2` and :math:`\mu` maximize the marginal likelihood,
    in which the clients' coefficients are integrated out, and every client gets the posterior mean

    .. math:: \hat\theta_i = (S^{-1} + X_i^\top X_i / \sigma^2)^{-1}
        (S^{-1} \mu + X_i^\top y_i / \sigma^2).

    Parameters
    ----------
    prior : str or prior object, default="gaussian"
        "gaussian", "laplace", "gaussian_mixture", "discrete", or an object of these kinds.
        Population prior of the coefficients that vary, the intercept first and then in the order
        of the features. What an object leaves None is estimated, what it gives is known.
        :class:`~pfl_sklearn.priors.GaussianPrior` with ``covariance_type="spherical"`` (one
        variance for all of them: features should have like scales), "diag", "full" or "low_rank";
        :class:`~pfl_sklearn.priors.LaplacePrior` (clients differ in few coefficients);
        :class:`~pfl_sklearn.priors.GaussianMixturePrior` (groups of clients: AdaMix) and
        :class:`~pfl_sklearn.priors.DiscretePrior` (alike within a group: FedEM's model).
    random : {"all", "intercept"} or list, default="all"
        Which coefficients vary by client: all, the intercept alone, or a list of feature names
        or indices, with "intercept" in it if that varies too.
    fit_intercept : bool, default=True
    method : {"reml", "ml", "printed"}, default="reml"
        Restricted or full maximum likelihood. Mixture priors are fitted by full likelihood in
        both cases; with them "printed" is the published algorithm, which clusters point estimates.
    noise_variance : float, > 0, or None, default=None
        Variance :math:`\sigma^2` of a row of weight 1 around its client's line. None: estimated.
    solver : {"auto", "spectral", "quasi_newton", "gd"}, default="auto"
        For Gaussian priors. "spectral": one eigendecomposition per client, then Fisher scoring
        (one variance for all coefficients). "quasi_newton": L-BFGS on a factor of the covariance
        (any shape). "auto" takes the first that fits. "gd": the published gradient descent on
        point estimates and variances together, for known or floored variances.
    max_iter : int, default=500
    tol : float, > 0, default=1e-6
        "spectral": relative change of the variance; "quasi_newton": largest slope of the criterion
        per client, on the scale of the data; mixtures: gain in nats per client; "laplace" and
        "gd": change of a coefficient relative to the largest.
    learning_rate : float, > 0, or None, default=None
        Step of "gd" and of ``method="printed"``. None: from the largest curvature.
    variance_floor : float, > 0, or None, default=None
        Where "gd" stops variances that it estimates; their objective has no minimum.
    epsilon : float in (0, inf], default=inf
        Privacy of one `unit` in what is released of the population. Infinity: no privacy. A finite
        one is for a Gaussian prior, whose covariance has to be given if there are several clients;
        `method`, `solver` and what belongs to them then have no effect.
    delta : float in [0, 1), default=1e-5
        Must be above 0 when `epsilon` is finite.
    feature_bound : float, > 0, or None, default=None
        L2 bound on a row of X (without the intercept's 1); rows beyond it are scaled down, target
        and all. Yours, never taken from the data; needed when `epsilon` is finite. Features should
        have like scales.
    target_bound : float, > 0, or None, default=None
        Bound on the absolute `y`, likewise.
    unit : {"client", "row"}, default="client"
        What is protected: all rows of a client together, or one row.
    relation : {"replace_one", "add_remove"}, default="replace_one"
        Neighbouring tables: one unit replaced, with public numbers of clients and of their rows,
        or one unit more, where no number is taken as public. The report has epsilon under both.
    ledger : PrivacyLedger or None, default=None
        File to which every fit is written before it reads any data, and which refuses a fit beyond
        its budget.
    unseen : {"population", "error"}, default="population"
        What clients get in ``predict`` that ``fit`` did not see.
    n_jobs : int or None, default=None
        Jobs for what is done client by client; the result is the same, bit for bit.
    random_state : int, RandomState instance or None, default=None
        Seed of the privacy noise. None draws it from the operating system. A seed makes the noise
        reproducible, hence not private to whoever knows it: the report says so.

    Attributes
    ----------
    clients_ : ndarray of shape (n_clients,)
        Sorted ids; row i of every per-client array is ``clients_[i]``.
    n_samples_per_client_ : ndarray of shape (n_clients,)
    coef_ : ndarray of shape (n_clients, d)
        Posterior means (modes under a Laplace prior) of the clients' coefficients.
    intercept_ : ndarray of shape (n_clients,)
    coef_std_, intercept_std_ : ndarrays of shape (n_clients, d) and (n_clients,)
        Posterior standard deviations. They count the uncertainty of the population coefficients
        under a Gaussian prior, and of the group under a mixture, not that of the variances. Not
        there under a Laplace prior and for the published algorithms.
    shrinkage_, intercept_shrinkage_ : ndarrays of shape (n_clients, d) and (n_clients,)
        Posterior over prior variance of every coefficient, given the population: 0 where the
        client's own rows decide, 1 where the population does (and for what does not vary).
    population_coef_ : ndarray of shape (d,)
    population_intercept_ : float
    population_coef_std_, population_intercept_std_ : ndarray of shape (d,) and float
        Standard errors given the variances; NaN for what the rows leave open (a column of zeros,
        one of two equal columns) and under priors other than the Gaussian.
    population_covariance_ : ndarray of shape (p, p)
        Covariance of the population coefficients, the intercept (if fitted) first.
    prior_ : prior
        The prior that was used; its parameters hold the values.
    noise_variance_ : float
    log_likelihood_ : float
        Maximized criterion (restricted for "reml" with a Gaussian prior), in nats; NaN under a
        Laplace prior and for the published algorithms.
    responsibilities_ : ndarray of shape (n_clients, n_components)
        Posterior probabilities of the components, under mixture priors.
    n_iter_ : int
    n_features_in_ : int
    feature_names_in_ : ndarray of shape (`n_features_in_`,)
    privacy_ : PrivacyReport

    Raises
    ------
    ValueError
        For missing or mixed ids, NaN or infinity in `X` or `y`, unknown names in `random`, and for
        variances that the data cannot tell apart: every client has one row; unless the covariance
        is spherical, a random column that is constant over all rows beside a random intercept;
        with a full one, fewer clients than random coefficients. With a finite `epsilon` also for a
        missing bound, weights, another than a Gaussian prior, an unknown covariance of several
        clients, ``unit="row"`` with ``relation="add_remove"`` and several clients, and a known
        mean unless all else is known too.

    Warns
    -----
    ConvergenceWarning
        If `max_iter` was reached.

    See Also
    --------
    PersonalizedLogisticRegression : The same for classes.
    pfl_sklearn.inspection.CoefficientDisplay : Plot of the clients' coefficients.

    Notes
    -----
    Section 3 and Appendix E of Ozkara et al. (2023): Theorem 6 is the posterior above,
    Appendix J the low-rank covariance. Differences: variances maximize the marginal likelihood,
    because the printed joint objective (equations 19 and 54) falls without bound as
    :math:`\theta_i \to \mu` and the variance between clients vanishes, and Algorithm 4 (2 in the
    long version) drives variances below zero; numbers of rows may differ; some coefficients may be
    common. Mixtures: EM on the marginal likelihood from groups found in the leading directions of
    the clients' deviations, where the printed Algorithms 1 and 6 cluster point estimates and
    inherit their error. Laplace prior: mode of clients and population together; an unknown scale
    is the one whose variance :math:`2 b^2` is the Gaussian fit's, because the joint mode in it is
    unbounded as well; the constant that the paper omits is kept.

    A variance of zero between clients is an answer, not an error: the clients' coefficients are
    then the population's. Infinite prior variances give every client its own least squares (of
    minimum norm), and so does a single client.

    Sample weights are precision weights: a row of weight w has the variance
    :math:`\sigma^2 / w`; weight 0 is an absent row.

    Private fits (`epsilon` finite) release the population once: second moments of the rows (of
    every client's mean row, with ``unit="client"``, so that clients count alike), bounded as
    :class:`~pfl_sklearn.privacy.RegressionMoments` says, summed and noised by the analytic
    Gaussian mechanism. The noisy normal equations are solved with a ridge that the bounds alone
    give (a coefficient of 2 `target_bound` / `feature_bound` is one prior standard deviation), and
    negative eigenvalues raised to 0; standard errors count the privacy noise, which is known, and
    the sampling, for features of one distribution in all clients, but not the bias from targets
    beyond `target_bound`. `feature_bound` may well leave rows outside: their weights depend on
    their features alone, which costs no bias, and half of them outside is a good choice where
    noise dominates. An unknown `noise_variance` is bought in the same release (for nothing under
    "replace_one"), kept between one standard deviation of its noise and ``target_bound ** 2``;
    where it drowns (below four of them) every client keeps its own regression, with a warning. The
    clients' posteriors are computed from their own exact rows around what was released, its error
    added to the prior covariance. They are not covered by the promise: client i may see its own
    (joint differential privacy); hand it over with :meth:`for_client`. A single client keeps its
    own least squares.

    Memory beyond the input: a copy of the rows, cut to as many as there are random coefficients
    for clients with more, ``8 min(n_i, q) (p + 1)`` bytes a client, twice during the fit and
    once after it, with p columns of which q vary.

    References
    ----------
    Ozkara, K., Girgis, A. M., Data, D. and Diggavi, S. (2023). A statistical framework for
    personalized federated learning and estimation: theory, algorithms, and privacy. ICLR.

    Laird, N. M. and Ware, J. H. (1982). Random-effects models for longitudinal data. Biometrics.

    Patterson, H. D. and Thompson, R. (1971). Recovery of inter-block information when block sizes
    are unequal. Biometrika.

    Examples
    --------
    Slopes that differ between schools:

    >>> import numpy as np
    >>> from pfl_sklearn.linear_model import PersonalizedLinearRegression
    >>> rng = np.random.default_rng(0)
    >>> school = np.repeat(["a", "b", "c", "d", "e"], 6)
    >>> slope = np.repeat([1.0, 2.0, 3.0, 4.0, 5.0], 6)
    >>> hours = rng.uniform(0, 4, 30)
    >>> score = 10 + slope * hours + rng.normal(size=30)
    >>> model = PersonalizedLinearRegression().fit(hours[:, None], score, groups=school)
    >>> model.coef_.ravel().round(1)
    array([1. , 1.8, 3.3, 4.1, 5. ])
    >>> model.predict([[2.0], [2.0]], groups=["a", "new"]).round(1)
    array([12. , 16.3])
    """

    __metadata_request__predict = {"groups": True, "return_std": True}

    _likelihood = "linear"
    _default_component = default_prior
    _client_attributes = (
        "n_samples_per_client_",
        "coef_",
        "intercept_",
        "responsibilities_",
        "_posterior",
    )
    _population_attributes = (*_POPULATION, "_between")
    _state_attributes = ("_design",)

    _parameter_constraints = {
        "prior": "no_validation",
        "random": [StrOptions({"all", "intercept"}), "array-like"],
        "fit_intercept": ["boolean"],
        "method": [StrOptions({"reml", "ml", "printed"})],
        "noise_variance": [Interval(Real, 0, None, closed="neither"), None],
        "solver": [StrOptions({"auto", "spectral", "quasi_newton", "gd"})],
        "max_iter": [Interval(Integral, 1, None, closed="left")],
        "tol": [Interval(Real, 0, None, closed="neither")],
        "learning_rate": [Interval(Real, 0, None, closed="neither"), None],
        "variance_floor": [Interval(Real, 0, None, closed="neither"), None],
        "epsilon": [Interval(Real, 0, math.inf, closed="right")],
        "delta": [Interval(Real, 0, 1, closed="left")],
        "feature_bound": [Interval(Real, 0, None, closed="neither"), None],
        "target_bound": [Interval(Real, 0, None, closed="neither"), None],
        "unit": [StrOptions({"client", "row"})],
        "relation": [StrOptions({"replace_one", "add_remove"})],
        "ledger": [PrivacyLedger, None],
        "unseen": [StrOptions({"population", "error"})],
        "n_jobs": [Integral, None],
        "random_state": ["random_state"],
    }

    def __init__(
        self,
        prior="gaussian",
        *,
        random="all",
        fit_intercept=True,
        method="reml",
        noise_variance=None,
        solver="auto",
        max_iter=500,
        tol=1e-6,
        learning_rate=None,
        variance_floor=None,
        epsilon=math.inf,
        delta=1e-5,
        feature_bound=None,
        target_bound=None,
        unit="client",
        relation="replace_one",
        ledger=None,
        unseen="population",
        n_jobs=None,
        random_state=None,
    ):
        self.prior = prior
        self.random = random
        self.fit_intercept = fit_intercept
        self.method = method
        self.noise_variance = noise_variance
        self.solver = solver
        self.max_iter = max_iter
        self.tol = tol
        self.learning_rate = learning_rate
        self.variance_floor = variance_floor
        self.epsilon = epsilon
        self.delta = delta
        self.feature_bound = feature_bound
        self.target_bound = target_bound
        self.unit = unit
        self.relation = relation
        self.ledger = ledger
        self.unseen = unseen
        self.n_jobs = n_jobs
        self.random_state = random_state

    @fit_context(prefer_skip_nested_validation=True)
    def fit(self, X, y, *, groups=None, sample_weight=None):
        """Estimate the population and every client's coefficients.

        Parameters
        ----------
        X : array-like of shape (n_rows, d)
        y : array-like of shape (n_rows,)
        groups : array-like of shape (n_rows,), default=None
            Client id of every row. None: one client, with a warning.
        sample_weight : array-like of shape (n_rows,), default=None
            Precision weights; 0 is an absent row.

        Returns
        -------
        self
        """
        prior = resolve_prior(self)
        fit = find_fit(prior, self.method, self.solver)
        release = Release(*(getattr(self, name) for name in Release._fields))
        fit = with_report(fit, prior, release, sample_weight, (_POPULATION, _CLIENTS))
        charge(self)
        features, y = check_X_y(X, y, dtype=np.float64, order="C", y_numeric=True, estimator=self)
        y = y.astype(np.float64, copy=False)
        rows = read_rows(self, features, np.arange(len(y)), groups, sample_weight)
        design = resolve_design(
            self.random, features.shape[1], self.fit_intercept, feature_names(X)
        )
        if rows.weights is not None:
            features, y = features[rows.y], y[rows.y]
        table = make_table(design, features, y, rows)
        found, report = fit(table, prior, self._options())
        warn_not_converged(self, found, prior)
        self._store(X, design, rows.clients, found, report, groups is not None)
        warn_once(report)
        return self

    def _privacy_events(self):
        """Accounting events of a fit: () if nothing is released."""
        return release_events(resolve_prior(self), self)

    def _options(self):
        return Options(
            self.method,
            self.noise_variance,
            self.solver,
            self.max_iter,
            self.tol,
            self.learning_rate,
            self.variance_floor,
            self.n_jobs,
        )

    def _store(self, X, design, clients, found, report, with_groups):
        """Set all fitted attributes, in the order of the features."""
        back = np.argsort(design.order)
        self._design = design
        self._fitted_with_groups = with_groups
        self.population_covariance_ = found.population_covariance[np.ix_(back, back)]
        self._between = design.embedded(found.covariance)
        stds = np.sqrt(np.diag(self.population_covariance_))
        coef, intercept = design.coefficients(found.population[back])
        self.population_coef_, self.population_intercept_ = coef, float(intercept)
        coef_std, intercept_std = design.coefficients(stds)
        self.population_coef_std_, self.population_intercept_std_ = coef_std, float(intercept_std)
        self.coef_, self.intercept_ = design.coefficients(found.coefficients[:, back])
        for name in ("_posterior", "responsibilities_"):  # of an earlier fit
            self.__dict__.pop(name, None)
        if found.posterior is not None:
            self._posterior = found.posterior
        self.prior_ = found.prior
        self.noise_variance_ = found.noise
        self.log_likelihood_ = found.log_likelihood
        self.n_iter_ = found.n_iter
        self.clients_ = clients.ids
        self.n_samples_per_client_ = np.bincount(clients.codes)
        if found.responsibilities is not None:
            self.responsibilities_ = found.responsibilities
        validate_data(self, X, skip_check_array=True)
        self.privacy_ = report

    def predict(self, X, *, groups=None, return_std=False):
        """Mean response of every row's client; the population's for unseen clients.

        Parameters
        ----------
        X : array-like of shape (n_rows, d)
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.
        return_std : bool, default=False
            Also return the standard deviation of the client's mean response (not of a new row);
            for unseen clients that of the prior prediction.

        Returns
        -------
        y : ndarray of shape (n_rows,)
        std : ndarray of shape (n_rows,)
            If `return_std`.
        """
        codes = self._encode_predict(X, groups)
        X = validate_data(self, X, reset=False, dtype=np.float64)
        coef = self._with_population("coef_", self.population_coef_)[codes]
        intercept = self._with_population("intercept_", self.population_intercept_)[codes]
        mean = np.einsum("nd,nd->n", X, coef) + intercept
        if not return_std:
            return mean
        return mean, np.sqrt(self._variances(self._design.matrix(X), codes))

    @property
    def coef_std_(self):
        """Posterior standard deviations (n_clients, d) of the clients' coefficients."""
        return self._design.coefficients(self._by_column("coefficient_variances") ** 0.5)[0]

    @property
    def intercept_std_(self):
        """Posterior standard deviations (n_clients,) of the clients' intercepts."""
        return self._design.coefficients(self._by_column("coefficient_variances") ** 0.5)[1]

    @property
    def shrinkage_(self):
        """Posterior over prior variance (n_clients, d) of every coefficient."""
        return self._design.coefficients(self._by_column("shrinkage"))[0]

    @property
    def intercept_shrinkage_(self):
        """Posterior over prior variance (n_clients,) of the intercepts."""
        return self._design.coefficients(self._by_column("shrinkage"))[1]

    def summary(self):
        """Table of the population: fixed effects and variance components.

        Returns
        -------
        DataFrame
            Indexed by part ("fixed", "between", "within") and term, with the columns estimate,
            std_error (of the fixed effects), sd and correlation (of the variance components).
        """
        check_is_fitted(self)
        design, random = self._design, self._design.random
        if design.fit_intercept:
            coefficients = np.append(self.population_intercept_, self.population_coef_)
        else:
            coefficients = self.population_coef_
        return components_table(
            design.names,
            coefficients,
            np.sqrt(np.diag(self.population_covariance_)),
            design.random_names,
            self._between[np.ix_(random, random)],
            self.noise_variance_,
        )

    def _by_column(self, quantity):
        """Values (n_clients, p) of the posterior, in the order of the design."""
        self._require_fitted("clients_")
        if not hasattr(self, "_posterior"):
            raise AttributeError(
                f"there is no posterior, hence no standard deviation and no shrinkage: "
                f"prior={self.prior!r} with method={self.method!r} and solver={self.solver!r} "
                "gives the clients' coefficients only."
            )
        return getattr(self._posterior, quantity)()[:, np.argsort(self._design.order)]

    def _variances(self, x, codes):
        """Variance (n,) of the mean response for rows x (n, p) of the design."""
        with np.errstate(invalid="ignore"):
            spread = np.nan_to_num(self.population_covariance_, nan=0.0, posinf=np.inf)
            spread = spread + self._between
            variances = np.einsum("np,np->n", x @ spread, x)
        if np.isinf(spread).any():
            variances = np.full(len(x), np.inf)
        known = codes >= 0
        if known.any():
            if not hasattr(self, "_posterior"):
                raise ValueError(
                    f"return_std=True needs a posterior, and prior={self.prior!r} gives its mode "
                    "only."
                )
            ordered = x[known][:, self._design.order]
            variances[known] = self._posterior.variances(ordered, codes[known])
        return variances
