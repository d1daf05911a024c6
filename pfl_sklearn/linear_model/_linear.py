"""Personalized linear regression: one coefficient vector per client under a population prior."""

import math
from collections.abc import Sequence
from typing import Any, Literal, Self, overload

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils import assert_all_finite

from pfl_sklearn._clients import check_no_name
from pfl_sklearn._columns import name_bad_columns
from pfl_sklearn._compat import StrOptions, fit_context
from pfl_sklearn._parameters import FIT_INTERCEPT, POSITIVE, UNSEEN, parameter, with_parameters
from pfl_sklearn._typing import Floats, TableLike
from pfl_sklearn._variance_averaging import UNCERTAINTIES
from pfl_sklearn.base import ClientRegressorMixin, check_level
from pfl_sklearn.linear_model._base import BasePersonalizedRegression, population_errors
from pfl_sklearn.linear_model._fit_warnings import warn_not_converged
from pfl_sklearn.linear_model._mixed._identifiability import (
    Evidence,
    gaussian_evidence,
    mixture_evidence,
    row_moments,
    warn_of_exact_fit,
)
from pfl_sklearn.linear_model._mixed._normal_rows._linear_fits import LINEAR_FITS, check_fit
from pfl_sklearn.linear_model._mixed._posterior import normal_bounds
from pfl_sklearn.linear_model._mixed._reduction import rotated_table, table_of_statistics
from pfl_sklearn.linear_model._private._checks import (
    check_linear_parameters,
    check_linear_rows,
    check_linear_statistics,
    linear_events,
)
from pfl_sklearn.linear_model._private._linear_fit import (
    fit_private_linear,
    private_table,
    private_table_of_statistics,
)
from pfl_sklearn.linear_model._row_space import find_row_space, warn_of_open_coefficients
from pfl_sklearn.priors import GaussianPrior
from pfl_sklearn.priors._support import resolve_prior
from pfl_sklearn.privacy._ledger import charge_events
from pfl_sklearn.statistics import ClientStatistics
from pfl_sklearn.statistics._accumulate import (
    KeepsStatisticsMixin,
    check_statistics,
    fit_kept,
    with_kept,
)


@with_parameters
class PersonalizedLinearRegression(
    ClientRegressorMixin, KeepsStatisticsMixin, BasePersonalizedRegression
):
    r"""Linear regression with one coefficient vector per client, drawn from a population.

    .. math:: y_{ij} = x_{ij}^\top \theta_i + w_{ij}, \qquad w_{ij} \sim N(0, \sigma^2), \qquad
        \theta_i \sim \text{prior}.

    The coefficients that vary by client (`random`) have a population prior; all clients share the
    others. Under a Gaussian prior this is the linear mixed model with one grouping factor. The
    :ref:`user guide <linear_models>` has the mathematics, examples and lme4's formulas.

    Attributes
    ----------
    clients_ : ndarray of shape (n_clients,)
        Sorted ids; row i of every per-client array is ``clients_[i]``.
    n_samples_per_client_ : ndarray of shape (n_clients,)
    coef_ : ndarray of shape (n_clients, d)
        Posterior means of the clients' coefficients (modes under a Laplace prior).
    intercept_ : ndarray of shape (n_clients,)
    coef_std_, intercept_std_ : ndarrays of shape (n_clients, d) and (n_clients,)
        Posterior standard deviations, with the uncertainty of the variances as `uncertainty` says.
        Not available under a Laplace prior and for the published algorithms. NaN for coefficients
        that are not identified, and where a released noise variance is of no use.
    shrinkage_, intercept_shrinkage_ : ndarrays of shape (n_clients, d) and (n_clients,)
        Posterior variance over prior variance of every coefficient, given the population: 0 where
        the client's own rows determine it, 1 where the population does. 1 also for coefficients
        that do not vary.
    population_coef_ : ndarray of shape (d,)
    population_intercept_ : float
    population_coef_std_, population_intercept_std_ : ndarray of shape (d,) and float
        Standard errors. NaN for coefficients that are not identified (of a column of zeros, of
        columns that are combinations of others, and the intercept beside a full set of indicators)
        and under priors other than the Gaussian.
    population_covariance_ : ndarray of shape (p, p)
        Covariance of the population coefficients, the intercept (if fitted) first.
    prior_ : prior
        The prior with the values that the fit used.
    noise_variance_ : float
    log_likelihood_ : float
        Maximum of the log-likelihood in nats, restricted for "reml" with a Gaussian prior. NaN
        where several clients share nothing, where posterior means stand in for the maximum (see
        Notes), under a Laplace prior and for the published algorithms.
    aic_, bic_ : float
        Information criteria; smaller is better. After fits by REML they compare only models with
        the same population columns. NaN where `log_likelihood_` is NaN.
    icc_ : float
        Intraclass correlation: the variance between clients (its mean over the rows, if slopes
        vary) over that variance and `noise_variance_`.
    marginal_r2_, conditional_r2_ : float
        Share of the response's variance that the population coefficients explain, and that they
        and the clients' coefficients explain.
    responsibilities_ : ndarray of shape (n_clients, n_components)
        Posterior probabilities of the components, under mixture priors.
    n_iter_ : int
    n_features_in_ : int
    feature_names_in_ : ndarray of shape (`n_features_in_`,)
    privacy_ : PrivacyReport

    Raises
    ------
    ValueError
        For ids that are missing or of mixed types, NaN or infinity, unknown or ambiguous names in
        `random`, and, without a release, values above 1e150 or only values below 1e-140 (and not 0)
        in `y` or a column of `X`.

        For variances that the data do not identify: every client has one row; a column named in
        `random` is constant over all rows, beside a random intercept, and the covariance is not
        spherical; the covariance is full and there are fewer clients than random coefficients.

        With a finite `epsilon` also for a missing bound, sample weights, a prior that is not
        Gaussian, a known mean unless all is known, ``unit="row"`` with ``relation="add_remove"``
        and several clients, and an unknown covariance, unless there is one client (and its number
        is public), or rounds estimate it with little enough noise (:ref:`private_variances`). These
        are found before the ledger is charged.

    Warns
    -----
    ConvergenceWarning
        If the search reached `max_iter` before it converged, or if a covariance of low rank has so
        few rows that no search finds its maximum for sure.
    UserWarning
        If the coefficients fit all rows exactly, so that an unknown noise variance means nothing;
        under a Gaussian prior also if the data say nothing about a variance between clients.
    NotEstimableWarning
        If columns are combinations of others, so that their coefficients are not identified, and in
        predictions for rows of which that is not true (:ref:`row_space`).
    PrivacyWarning
        If a private fit released variances that are mostly noise, or clipped most messages.

    See Also
    --------
    PersonalizedLogisticRegression : The same model for class labels.
    pfl_sklearn.inspection.CoefficientDisplay : Plot of the clients' coefficients.
    pfl_sklearn.inspection.likelihood_ratio_test : Test of what a larger model adds.

    Notes
    -----
    The model is that of Section 3 and Appendix E of Ozkara et al. (2023); Theorem 7 (ICLR) gives
    the posterior means, Appendix J the low-rank covariance. We differ from the paper as follows.

    - Variances maximize the marginal likelihood. The printed joint objective, equation 54 (ICLR),
      has no lower bound, and Algorithm 4 (ICLR) drives variances below zero.
    - Clients may have different numbers of rows, and some coefficients may be common to all.
    - For mixtures we run EM on the marginal likelihood. The printed Algorithms 1 and 6 (ICLR)
      cluster point estimates and inherit their error. They take the noise variance as known, and
      so does ``method="printed"``, whose components have the density of a Gaussian: equation 10
      (ICLR) prints :math:`(2 \pi \sigma)^{d/2}`, without the square.
    - Under a Laplace prior an unknown scale b is the one whose variance :math:`2 b^2` is that of
      the Gaussian fit, since the joint mode in it is unbounded.

    *Weights.* A row of weight w has the variance :math:`\sigma^2 / w`; one of weight 0 is absent.

    *Few rows.* If the coefficients that vary fit the rows of every client exactly, the likelihood
    cannot tell noise from differences between clients. The estimates are then posterior means
    under a weak prior, with a warning (see :ref:`few-clients`).

    *Privacy.* A finite `epsilon` protects the population, from one noisy sum
    (:class:`~pfl_sklearn.privacy.RegressionMoments`), or from four (:ref:`private_variances`), but
    not the clients' posteriors, which use their own exact rows: client i may see its own (joint
    differential privacy), by :meth:`for_client`. Private models have no criteria and no R2.

    *Memory* beyond the input, with p columns of which q vary: ``8 min(n_i, q) (p + 1)`` bytes per
    client, twice during the fit and once after it. During the fit also 32 bytes per row, ``48 p``
    per client, and ``8 (p + 1) (p + 2)`` for one of many rows; in a private fit up to
    ``16 (p + 2)^2`` for every client. With up to 1,000 clients errors need another
    ``8 q (p + 1)`` bytes per client, and ``8 q (p + 300)`` more once they are computed. A fit
    without privacy keeps 8 p^2 bytes for comparisons.

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
    array([1. , 1.7, 3.3, 4.1, 5.3])
    >>> model.predict([[2.0], [2.0], [2.0]], groups=["a", "e", "new"]).round(1)
    array([12. , 19.5, 16.3])
    """

    __metadata_request__predict = {"groups": True, "return_std": True}

    _likelihood = "linear"
    _population_attributes = (*BasePersonalizedRegression._population_attributes, "noise_variance_")
    _released = (*BasePersonalizedRegression._released, "noise_variance_")
    _not_released = (*BasePersonalizedRegression._not_released, "responsibilities_")
    _sparse_alternative = "PPSGDRegressor"
    _check_private = check_linear_parameters
    _check_private_rows = check_linear_rows

    prior: str | BaseEstimator = parameter(
        default="gaussian",
        kw_only=False,
        text="""
            str or prior object
                Population prior of the coefficients that vary: the intercept first, then the
                features in their order. Parameters that a prior object leaves None are estimated,
                the others known.

                - "gaussian", :class:`~pfl_sklearn.priors.GaussianPrior`: by default a variance for
                  each coefficient ("diag") of centred columns.
                - "laplace", :class:`~pfl_sklearn.priors.LaplacePrior`: clients differ in few
                  coefficients.
                - "gaussian_mixture", :class:`~pfl_sklearn.priors.GaussianMixturePrior`: clients
                  form groups (AdaMix).
                - "discrete", :class:`~pfl_sklearn.priors.DiscretePrior`: clients of a group are
                  identical (the model of FedEM).
        """,
    )
    random: str | Sequence[str | int] = parameter(
        default="all",
        text="""
            "all", "intercept", the name of a feature, or a list
                Coefficients that vary by client: all, the intercept alone, one feature's alone, or
                a list of feature names or indices, which may include "intercept". With "all" and
                the default prior a feature that is constant within every client has a common
                coefficient.
        """,
    )
    fit_intercept: bool = FIT_INTERCEPT
    method: str = parameter(
        default="reml",
        ranges=[StrOptions({"reml", "ml", "printed"})],
        text="""
            {"reml", "ml", "printed"}
                "reml" is restricted and "ml" full maximum likelihood; mixture priors use full
                likelihood in both cases. "printed" is the published algorithm for mixture priors,
                which clusters point estimates and needs `noise_variance`.
        """,
    )
    noise_variance: float | None = parameter(
        default=None,
        ranges=[POSITIVE, None],
        text=r"""
            float, > 0, or None
                Residual variance :math:`\sigma^2` of a row of weight 1. None: estimated.
        """,
    )
    uncertainty: str = parameter(
        default="full",
        ranges=[StrOptions(UNCERTAINTIES)],
        text="""
            {"full", "plug_in"}
                Whether errors include that the variances were estimated. With "full" they do, for
                up to 1,000 clients under a Gaussian prior that is not of low rank and lets at most
                20 coefficients vary. "plug_in" counts variances as known, so intervals of few
                clients are too short (see :ref:`few-clients`).
        """,
    )
    solver: str = parameter(
        default="auto",
        ranges=[StrOptions({"auto", "spectral", "quasi_newton", "gd"})],
        text="""
            {"auto", "spectral", "quasi_newton", "gd"}
                Search under a Gaussian prior. "spectral" needs one variance for all coefficients,
                "quasi_newton" takes any shape (average information if it is diagonal, unless the
                table is small), and "auto" chooses between them. "gd" is the published gradient
                descent, for variances that are known or have a floor.
        """,
    )
    max_iter: int = parameter(
        default=500,
        text="""
            int
                Largest number of iterations of the search for the population and the variances.
        """,
    )
    tol: float = parameter(
        default=1e-6,
        text="""
            float, > 0
                Stopping rule: relative change of the variance ("spectral"), largest slope of the
                criterion per client ("quasi_newton"; by average information, the gain in nats per
                client is below the square of a tenth of tol), gain in nats per client (mixtures),
                or change of a coefficient relative to the largest one ("laplace", "gd").
        """,
    )
    learning_rate: float | None = parameter(
        default=None,
        ranges=[POSITIVE, None],
        text="""
            float, > 0, or None
                Step size of "gd" and of ``method="printed"`` with a Gaussian mixture. None:
                computed from the largest curvature. The latter cuts longer steps to one over it,
                with a warning.
        """,
    )
    variance_floor: float | None = parameter(
        default=None,
        ranges=[POSITIVE, None],
        text="""
            float, > 0, or None
                Smallest variance that "gd" may estimate. Its objective has no minimum without one.
        """,
    )
    epsilon = parameter(
        also="""
            It is that of one `unit`, through the released population. A finite value needs a
            Gaussian prior. Variances of several clients are given, or estimated
            (:ref:`private_variances`); `method`, `solver` and their parameters have no effect.
        """,
    )
    delta = parameter()
    feature_bound: float | None = parameter(
        default=None,
        ranges=[POSITIVE, None],
        text="""
            float, > 0, or None
                L2 bound on a row of X, without the intercept's 1; required when `epsilon` is
                finite. Rows beyond it are scaled down with their target, or, where variances are
                estimated, clients: a tight bound then biases the variances towards 0, and a loose
                one is better. Choose it without looking at the data. Features should have similar
                scales.
        """,
    )
    target_bound: float | None = parameter(
        default=None,
        ranges=[POSITIVE, None],
        text="""
            float, > 0, or None
                Bound on the absolute value of `y`, likewise.
        """,
    )
    unit: str = parameter(
        default="client",
        ranges=[StrOptions({"client", "row"})],
        text="""
            {"client", "row"}
                Unit of privacy: all rows of a client together, or one row.
        """,
    )
    relation: str = parameter(
        default="replace_one",
        ranges=[StrOptions({"replace_one", "add_remove"})],
        text="""
            {"replace_one", "add_remove"}
                Neighbouring tables differ in one unit that is replaced (numbers of clients and of
                their rows are public), or that is added or removed (no number is public, but that
                of clients with ``unit="row"``). The report states epsilon under other relations,
                too.
        """,
    )
    ledger = parameter()
    unseen: str = UNSEEN
    n_jobs: int | None = parameter(
        default=None,
        text="""
            int or None
                Has no effect. A fit reads its rows once, so to send them to a worker costs what the
                fit does.
        """,
    )
    random_state = parameter()

    @fit_context(prefer_skip_nested_validation=True)
    def fit(
        self, X: TableLike, y: TableLike, *, groups: TableLike = None, sample_weight: Any = None
    ) -> Self:
        """Estimate the population and every client's coefficients.

        Parameters
        ----------
        X : array-like of shape (n_rows, d)
            Features; an intercept is added if `fit_intercept` is True. With it and `groups` there
            may be no features (d = 0): clients then have an intercept alone.
        y : array-like of shape (n_rows,)
            Responses.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row. None: all rows belong to one client, with a warning.
        sample_weight : array-like of shape (n_rows,), default=None
            Precision weights; a row of weight 0 is absent.

        Returns
        -------
        self
        """
        prior, private = resolve_prior(self), math.isfinite(self.epsilon)
        check_fit(prior, self.method, self.solver, self.noise_variance)
        self._admit(prior, X, groups, sample_weight)
        # Single precision stays, until blocks of rows are reduced in double precision.
        dtypes = (np.float64, np.float32)
        with name_bad_columns(X, private):
            features, y = self._checked_xy(X, y, groups, dtype=dtypes, y_numeric=True)
            y = y.astype(np.float64, copy=False)
            assert_all_finite(y, input_name="y")  # in objects None and infinity have passed so far
        state, features, rows = self._read_rows(X, features, y, groups, sample_weight)
        if private:
            table = private_table(state["_design"], features, rows, prior, self)
        else:
            table = rotated_table(state["_design"], features, rows)
        return self._fit_table(table, state, prior)

    @fit_context(prefer_skip_nested_validation=True)
    def fit_statistics(self, statistics: ClientStatistics) -> Self:
        """Estimate the population and every client's coefficients from statistics of the rows.

        The model is that of the rows, up to rounding; with a finite `epsilon` and the same
        `random_state` its noise, its promise and its report are, too.

        Parameters
        ----------
        statistics : ClientStatistics
            With features and one target; with a finite `epsilon` of rows that were scaled to
            `feature_bound` and `target_bound`, which the constructors of statistics take.

        Returns
        -------
        self

        Raises
        ------
        ValueError
            For statistics of several targets, and for those without features unless there is an
            intercept and no privacy. With a finite `epsilon` for statistics of rows that were not
            scaled, or to other bounds, and, where all variances are known, with
            ``relation="add_remove"`` or without an intercept, which scale rows otherwise. Nothing
            is charged to the ledger then.
        """
        check_statistics(statistics)
        prior, private = resolve_prior(self), math.isfinite(self.epsilon)
        check_fit(prior, self.method, self.solver, self.noise_variance)
        if private:
            self._check_private(prior, None)
        needed = 0 if self.fit_intercept and not private else 1
        if statistics.n_targets != 1 or statistics.n_features < needed:
            raise ValueError(
                "a regression needs statistics of features and one target; got "
                f"{statistics.n_features} features and {statistics.n_targets} targets."
            )
        header, ids = statistics._header(), statistics.clients
        state = self._state_of(header, statistics.n_features, ids, with_groups=True)
        if private:
            check_linear_statistics(self, prior, state["_design"], statistics)
        if self.ledger is not None:
            charge_events(self, self._privacy_events())
        if private:
            table = private_table_of_statistics(state["_design"], statistics, prior, self)
        else:
            table = table_of_statistics(statistics, state["_design"])
        return self._fit_table(table, state, prior)

    @fit_context(prefer_skip_nested_validation=True)
    def partial_fit(
        self, X: TableLike, y: TableLike, *, groups: TableLike = None, sample_weight: Any = None
    ) -> Self:
        """Fit to the rows of earlier calls and to these.

        The model keeps statistics of all rows and is fitted again from them: it is that of all rows
        together.

        Parameters
        ----------
        X : array-like of shape (n_rows, d)
            Features of the new rows.
        y : array-like of shape (n_rows,)
            Responses.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row, seen before or new. None: all rows belong to one client, with a
            warning.
        sample_weight : array-like of shape (n_rows,), default=None
            Precision weights; a row of weight 0 is absent.

        Returns
        -------
        self

        Raises
        ------
        ValueError
            As ``fit``, with a finite `epsilon`, and after a fit by other methods, which keep no
            statistics.
        """
        self._check_dense(X)
        check_no_name(groups)
        with name_bad_columns(X):
            features, checked = self._checked_xy(X, y, groups, dtype="float64", y_numeric=True)
        features = X if features.shape[1] else None
        statistics = with_kept(self, X, checked, groups, sample_weight, features)
        return fit_kept(self, statistics)

    def _fit_openly(self, table, prior, state):
        options = self._fit_parameters()
        fit = LINEAR_FITS[type(prior).__name__, options.method, options.solver]
        estimates = fit(table, prior, options)
        at = estimates.left_open
        if at is None or estimates.unpooled:
            at = np.arange(estimates.first, table.n_columns)
        if len(at):  # the design may be short of full rank
            estimates = estimates._replace(row_space=find_row_space(table, at, estimates.first))
            warn_of_open_coefficients(estimates.row_space, table.names)
        if options.noise_variance is None and table.n_clients > 1:  # one client: least squares
            warn_of_exact_fit(table, estimates)
        if not estimates.converged:
            warn_not_converged(self, estimates, prior)
        return estimates

    def _fit_privately(self, table, prior, state):
        names = self._released, self._not_released
        return fit_private_linear(table, prior, self, names)

    def _unknown_variances(self, prior, n_clients):
        """Shape of an estimated covariance, and whether the noise was; None without likelihood."""
        # Intervals rest on the curvature of a Gaussian marginal likelihood between several clients.
        if type(prior) is not GaussianPrior or self.solver == "gd" or n_clients == 1:
            return None
        if math.isfinite(self.epsilon):  # variances of a release are not those of a likelihood
            return None, False
        shape = prior.covariance_type if prior.covariance is None else None
        return shape, self.noise_variance is None

    def _exact_state(self, table, prior, estimates, state):
        design, noise = state["_design"], self.noise_variance
        if type(prior) is GaussianPrior and self.solver != "gd":
            evidence = gaussian_evidence(table, design, prior, noise, self.method)
        elif estimates.responsibilities is not None and self.method != "printed":
            evidence = mixture_evidence(table, design, prior, estimates, noise)
        else:  # no likelihood is maximal, so the moments are all that can be compared
            evidence = Evidence(row_moments(table, design.order), None, None)
        return {"_evidence": evidence}

    def _variance_within(self, name):
        return self.noise_variance_

    def _privacy_events(self):
        """Accounting events of a fit; () if it releases nothing."""
        return linear_events(self, resolve_prior(self))

    def _fitted_state(self, state, table, estimates):
        fitted = super()._fitted_state(state, table, estimates)
        fitted["population_intercept_"] = float(fitted["population_intercept_"])
        fitted["noise_variance_"] = estimates.noise
        between, is_open = fitted["_between"], estimates.is_open
        fitted["_errors"] = population_errors(state["_design"], estimates, is_open, between)
        fitted["_unbounded"] = estimates.unbounded
        if estimates.responsibilities is not None:
            fitted["responsibilities_"] = estimates.responsibilities
        return fitted

    def _component_bounds(self, level):
        covariance, noise = super()._component_bounds(level)
        # The restricted likelihood is flat in these variances: the data do not bound them.
        if self._unbounded is not None:
            covariance[1][self._unbounded, self._unbounded] = np.inf
        return covariance, noise

    @overload
    def predict(
        self, X: TableLike, *, groups: TableLike = None, return_std: Literal[False] = False
    ) -> Floats: ...
    @overload
    def predict(
        self, X: TableLike, *, groups: TableLike = None, return_std: Literal[True]
    ) -> tuple[Floats, Floats]: ...
    def predict(
        self, X: TableLike, *, groups: TableLike = None, return_std: bool = False
    ) -> Floats | tuple[Floats, Floats]:
        """Mean response of every row's client; the population's for unseen clients.

        Parameters
        ----------
        X : array-like of shape (n_rows, d)
            Features, with the columns that ``fit`` saw.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.
        return_std : bool, default=False
            Also return the standard deviation of the client's mean response, not of a new row.
            For unseen clients it is that of the prior prediction. NaN, with a warning, for rows
            whose prediction the data do not determine (:ref:`row_space`).

        Returns
        -------
        y : ndarray of shape (n_rows,)
        std : ndarray of shape (n_rows,)
            If `return_std`.
        """
        mean, X, codes = self._predictors(X, groups)
        if not return_std:  # no posterior is needed, and none is averaged
            return mean
        x = self._design.matrix(X)
        return mean, self._where_estimable(x, np.sqrt(self._variances(x, codes)))

    def predict_interval(
        self, X: TableLike, *, groups: TableLike = None, level: float = 0.95, new_row: bool = False
    ) -> tuple[Floats, Floats]:
        """Central intervals of the clients' mean responses, or of new rows.

        Parameters
        ----------
        X : array-like of shape (n_rows, d)
            Features, with the columns that ``fit`` saw.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.
        level : float in (0, 1), default=0.95
            Posterior probability of the intervals.
        new_row : bool, default=False
            Whether they are for the response of a new row of weight 1, so that its noise counts
            too. Otherwise they are for the mean response.

        Returns
        -------
        lower, upper : ndarrays of shape (n_rows,)
            Normal quantiles, with the mean and standard deviation of :meth:`predict`; also under
            priors that are mixtures. NaN where that is NaN.

        Raises
        ------
        ValueError
            For rows of known clients, if the fit gives no posterior.
        """
        check_level(level)
        mean, X, codes = self._predictors(X, groups)
        x = self._design.matrix(X)
        variances = self._where_estimable(x, self._variances(x, codes))
        return normal_bounds(mean, variances + new_row * self.noise_variance_, level)
