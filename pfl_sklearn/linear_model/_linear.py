"""Personalized linear regression: one coefficient vector per client under a population prior."""

import math
from collections.abc import Sequence
from typing import Any, Literal, Self, overload

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils import assert_all_finite

from pfl_sklearn._clients import check_not_column_name
from pfl_sklearn._columns import name_bad_columns
from pfl_sklearn._compat import StrOptions, fit_context
from pfl_sklearn._parameters import FIT_INTERCEPT, POSITIVE, UNSEEN, parameter, with_parameters
from pfl_sklearn._typing import Floats, TableLike
from pfl_sklearn._variance_averaging import UNCERTAINTIES
from pfl_sklearn.base import ClientRegressorMixin, check_level
from pfl_sklearn.linear_model._base import population_errors
from pfl_sklearn.linear_model._fit_warnings import warn_not_converged
from pfl_sklearn.linear_model._grouped_rows import GROUPINGS, GroupedRegression
from pfl_sklearn.linear_model._grouping_columns import check_no_groupings, resolve_groupings
from pfl_sklearn.linear_model._influence import InfluenceMixin
from pfl_sklearn.linear_model._mixed._groupings._fit import fit_groupings
from pfl_sklearn.linear_model._mixed._identifiability import (
    Evidence,
    gaussian_evidence,
    mixture_evidence,
    row_moments,
    warn_of_exact_fit,
    with_groupings,
)
from pfl_sklearn.linear_model._mixed._normal_rows._gaussian_prior import LINEAR_FITS, check_fit
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
from pfl_sklearn.linear_model._random_choice import choose_by_likelihood
from pfl_sklearn.linear_model._row_space import find_row_space, warn_unidentified
from pfl_sklearn.linear_model._totals import RowMeans
from pfl_sklearn.priors import GaussianPrior
from pfl_sklearn.priors._resolve import resolve_prior
from pfl_sklearn.privacy._ledger import charge_fit
from pfl_sklearn.statistics import ClientStatistics
from pfl_sklearn.statistics._accumulate import (
    AccumulatedStatisticsMixin,
    accumulate_statistics,
    check_accumulates,
    check_statistics,
    fit_accumulated,
)

_WITHOUT_ROWS = "needs the rows at once: the statistics of a client do not tell levels apart"


@with_parameters
class PersonalizedLinearRegression(
    InfluenceMixin, ClientRegressorMixin, AccumulatedStatisticsMixin, GroupedRegression
):
    r"""Linear regression with one coefficient vector per client, drawn from a population.

    .. math:: y_{ij} = x_{ij}^\top \theta_i + w_{ij}, \qquad w_{ij} \sim N(0, \sigma^2), \qquad
        \theta_i \sim \text{prior}.

    The coefficients that vary by client (`random`) have a population prior; all clients share the
    others. Under a Gaussian prior this is the linear mixed model with one grouping factor, or with
    several (`groupings`). The :ref:`user guide <linear_models>` has the mathematics and examples.

    Attributes
    ----------
    coef_, intercept_ : ndarrays of shape (n_clients, d) and (n_clients,)
        Posterior means of the clients' coefficients (modes under a Laplace prior). They have no
        standard deviations under a Laplace prior and for the published algorithms.
    population_coef_, population_intercept_ : ndarray of shape (d,) and float
        Their standard errors are NaN under priors other than the Gaussian.
    noise_variance_ : float
    responsibilities_ : ndarray of shape (n_clients, n_components)
        Posterior probabilities of the components, under mixture priors.

    Raises
    ------
    ValueError
        For missing ids or ids of mixed types, NaN or infinity, unknown or ambiguous names in
        `random` and `groupings`. Without a release, also for values above 1e150, and for columns
        and targets whose nonzero values are all below 1e-140.

        If the data do not identify the variances: every client has one row; a column named in
        `random` is constant over all rows, there is a random intercept, and the covariance is not
        spherical; the covariance is full and there are fewer clients than random coefficients.

        For a column of `groupings` that holds dates, lists, or strings that read as dates (or,
        under "auto", as numbers); has as many levels as rows; groups the rows as another one does;
        or has fewer levels than coefficients with a full covariance. For more effects than fit into
        memory.

        With a finite `epsilon`, before the ledger is charged: for `groupings`, a missing bound,
        sample weights, a prior that is not Gaussian, a known mean unless all is known,
        ``unit="row"`` with ``relation="add_remove"`` and several clients, and an unknown covariance
        unless there is one client (and that is public), or the noise leaves enough to estimate it
        (:ref:`private_variances`).

    Warns
    -----
    ConvergenceWarning
        If the search reached `max_iter`, or a low-rank covariance has too few rows for a search
        that is certain to find its maximum.
    UserWarning
        If the coefficients fit all rows exactly, so that the noise variance is meaningless, or the
        data carry no information about a variance between clients (Gaussian prior), or a column of
        `groupings` is left out.
    NotEstimableWarning
        If columns are linear combinations of others, and if rows to predict break such a relation
        (:ref:`row_space`).
    PrivacyWarning
        If a private fit released variances that are mostly noise, or clipped most messages.

    Notes
    -----
    The model is that of Section 3 and Appendix E of Ozkara et al. (2023); Theorem 7 (ICLR) gives
    the posterior means, Appendix J the low-rank covariance. We differ from the paper as follows.

    - Variances maximize the marginal likelihood. The printed joint objective, equation 54 (ICLR),
      has no lower bound, and Algorithm 4 (ICLR) drives variances below zero.
    - Clients may have different numbers of rows, and some coefficients may be common to all.
    - Mixtures are fitted by EM on the marginal likelihood. The printed Algorithms 1 and 6 (ICLR)
      cluster point estimates and inherit their error; ``method="printed"`` runs them. They take the
      noise variance as known. Equation 10 (ICLR) prints :math:`(2 \pi \sigma)^{d/2}`, without the
      square; we use the Gaussian density.
    - An unknown scale b of a Laplace prior has the variance :math:`2 b^2` of the Gaussian fit,
      because the joint mode in b is unbounded.

    *Weights.* A row of weight w has the variance :math:`\sigma^2 / w`; a row of weight 0 is absent.

    *Few rows.* If the varying coefficients fit the rows of every client exactly, the likelihood
    cannot separate noise from differences between clients. The estimates are then posterior means
    under a weak prior, with a warning (:ref:`few-clients`), and `log_likelihood_` is NaN. It is
    also NaN without pooling, under a Laplace prior and for the published algorithms.

    *Privacy.* A finite `epsilon` protects the population, from one noisy sum
    (:class:`~pfl_sklearn.privacy.RegressionMoments`) or from four (:ref:`private_variances`).
    Clients' posteriors use their own exact rows: client i may see its own, by :meth:`for_client`
    (joint differential privacy). Private models have no criteria and no R2.

    *Memory* beyond the input, with p columns of which q vary: ``8 min(n_i, q) (p + 1)`` bytes per
    client, twice during the fit and once after it. During the fit also 32 bytes per row, ``48 p``
    per client, and ``8 (p + 1) (p + 2)`` for one of many rows; in a private fit up to
    ``16 (p + 2)^2`` for every client. With up to 1,000 clients errors need another
    ``8 q (p + 1)`` bytes per client, and ``8 q (p + 300)`` more once they are computed.

    References
    ----------
    Ozkara, K., Girgis, A. M., Data, D. and Diggavi, S. (2023). A statistical framework for
    personalized federated learning and estimation: theory, algorithms, and privacy. ICLR.

    Examples
    --------
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
    _range_of_means = (-math.inf, math.inf)
    _population_attributes = (*GroupedRegression._population_attributes, "noise_variance_")
    _released = (*GroupedRegression._released, "noise_variance_")
    _not_released = (*GroupedRegression._not_released, "responsibilities_")
    _sparse_alternative = "PPSGDRegressor"
    _check_private = check_linear_parameters
    _check_private_rows = check_linear_rows

    prior: str | BaseEstimator = parameter(
        default="gaussian",
        kw_only=False,
        text="""
            str or prior object
                Population prior of the varying coefficients, the intercept first. What a prior
                object leaves None is estimated.

                - "gaussian", :class:`~pfl_sklearn.priors.GaussianPrior`: by default a variance for
                  each coefficient ("diag") of centred columns.
                - "laplace", :class:`~pfl_sklearn.priors.LaplacePrior`: clients differ in few
                  coefficients.
                - "gaussian_mixture", :class:`~pfl_sklearn.priors.GaussianMixturePrior`: groups
                  (AdaMix).
                - "discrete", :class:`~pfl_sklearn.priors.DiscretePrior`: groups of identical
                  clients (the model of FedEM).
        """,
    )
    random: str | Sequence[str | int] = parameter(
        default="auto",
        text="""
            "auto", "all", "intercept", the name of a feature, or a list
                Coefficients that vary by client; a list holds names or indices of features, and
                "intercept". "auto" is "intercept" if most rows are of clients with fewer rows than
                coefficients and Akaike's criterion prefers it, and else "all"; it is also "all" in
                a private fit, without an intercept, for a single client, and where the prior gives
                a mean, a covariance or a shape other than "diag". With "all" and the default prior,
                features that are constant within every client have a common coefficient.
        """,
    )
    fit_intercept: bool = FIT_INTERCEPT
    groupings: Any = GROUPINGS
    method: str = parameter(
        default="reml",
        ranges=[StrOptions({"reml", "ml", "printed"})],
        text="""
            {"reml", "ml", "printed"}
                Restricted or full maximum likelihood; mixture priors always use the latter.
                "printed" is the published algorithm for mixture priors, and needs `noise_variance`.
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
                Whether errors allow for the variances being estimated. "full" does so for up to
                1,000 clients and 20 varying coefficients, under a Gaussian prior that is not of low
                rank; with `groupings`, for clients and levels of up to 1,000, if the effects of
                levels and the population's coefficients are at most 1,000 together, and 2^20 pairs
                with the clients' effects. With "plug_in", intervals of few clients are too short
                (:ref:`few-clients`).
        """,
    )
    solver: str = parameter(
        default="auto",
        ranges=[StrOptions({"auto", "spectral", "quasi_newton", "gd"})],
        text="""
            {"auto", "spectral", "quasi_newton", "gd"}
                Search under a Gaussian prior. "spectral" needs one variance for all coefficients,
                "quasi_newton" takes any shape (average information if diagonal, unless the table is
                small), "auto" chooses. "gd" is the published gradient descent, for variances that
                are known or have a floor.
        """,
    )
    max_iter: int = parameter(
        default=500, text="int\n    Largest number of iterations of the search."
    )
    tol: float = parameter(
        default=1e-6,
        text="""
            float, > 0
                Stopping rule: relative change of the variance ("spectral"), largest slope of the
                criterion per client ("quasi_newton"; average information: a gain of (tol / 10)^2
                nats per client), gain in nats per client (mixtures), or change of a coefficient
                relative to the largest one ("laplace", "gd").
        """,
    )
    learning_rate: float | None = parameter(
        default=None,
        ranges=[POSITIVE, None],
        text="""
            float, > 0, or None
                Step size of "gd", and of ``method="printed"`` with a Gaussian mixture, which cuts
                it to one over the largest curvature, with a warning. None: computed from that
                curvature.
        """,
    )
    variance_floor: float | None = parameter(
        default=None,
        ranges=[POSITIVE, None],
        text="""
            float, > 0, or None
                Smallest variance that "gd" may estimate: its objective has no minimum without one.
        """,
    )
    epsilon = parameter(
        also="""
            It is that of one `unit`, through the released population. A finite value needs a
            Gaussian prior, and variances that are given, or estimated (:ref:`private_variances`);
            `method`, `solver` and their parameters then have no effect.
        """
    )
    delta = parameter()
    feature_bound: float | None = parameter(
        default=None,
        ranges=[POSITIVE, None],
        text="""
            float, > 0, or None
                L2 bound on a row of X, without the intercept's 1; required when `epsilon` is
                finite. Longer rows are scaled down with their target, or, where variances are
                estimated, whole clients: a tight bound then biases the variances towards 0. Choose
                it without looking at the data. Features should have similar scales.
        """,
    )
    target_bound: float | None = parameter(
        default=None,
        ranges=[POSITIVE, None],
        text="float, > 0, or None\n    Bound on the absolute value of `y`, likewise.",
    )
    unit: str = parameter(
        default="client",
        ranges=[StrOptions({"client", "row"})],
        text='{"client", "row"}\n    Unit of privacy: all rows of a client together, or one row.',
    )
    relation: str = parameter(
        default="replace_one",
        ranges=[StrOptions({"replace_one", "add_remove"})],
        text="""
            {"replace_one", "add_remove"}
                Neighbouring tables differ in one unit that is replaced (numbers of clients and of
                their rows are public), or added or removed (only the number of clients is public,
                and only with ``unit="row"``). The report also states epsilon under other relations.
        """,
    )
    ledger = parameter()
    unseen: str = UNSEEN
    n_jobs: int | None = parameter(
        default=None,
        text="""
            int or None
                Has no effect: a fit reads its rows once, and sending them to workers costs as much.
        """,
    )
    random_state = parameter()

    _guesses = (True, True)

    @staticmethod
    def _draw_response(predictors, noise_variance, rng):
        return predictors + np.sqrt(noise_variance) * rng.normal(size=len(predictors))

    @fit_context(prefer_skip_nested_validation=True)
    def fit(
        self, X: TableLike, y: TableLike, *, groups: TableLike = None, sample_weight: Any = None
    ) -> Self:
        """Estimate the population and every client's coefficients.

        Parameters
        ----------
        X : array-like of shape (n_rows, d)
            Features and columns of `groupings`; an intercept is added if `fit_intercept` is True.
            With it and `groups` there may be no features (d = 0): clients then have an intercept
            alone.
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
        self._check_and_charge(prior, X, groups, sample_weight)
        # A private fit must not choose columns by their values.
        groupings = None if private else self.groupings
        table_of_all, (columns, priors) = X, resolve_groupings(X, groupings, sample_weight)
        if priors:
            self._check_groupings(prior)
            X, values = columns.split(X)
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
            table, state["_design"] = self._choose_random(table, state["_design"], prior)
        if priors:
            read = columns, values, priors
            state |= self._grouped_state(table_of_all, *read, state, features, rows, sample_weight)
        return self._fit_table(table, state, prior)

    def _check_groupings(self, prior):
        super()._check_groupings(prior)
        if self.method == "printed" or self.solver == "gd":
            raise ValueError(
                f"groupings do not go with the published algorithms; got method={self.method!r} "
                f"and solver={self.solver!r}, expected 'reml' or 'ml', and 'auto'."
            )

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
            For `groupings`, for statistics of several targets, and for those without features
            unless there is an intercept and no privacy. With a finite `epsilon` for statistics of
            rows that were not scaled, or to other bounds, and, where all variances are known, with
            ``relation="add_remove"`` or without an intercept, which scale rows otherwise. Nothing
            is charged to the ledger then.
        """
        check_statistics(statistics)
        check_no_groupings(self.groupings, _WITHOUT_ROWS)
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
        charge_fit(self)
        if private:
            table = private_table_of_statistics(state["_design"], statistics, prior, self)
        else:
            table = table_of_statistics(statistics, state["_design"])
            table, state["_design"] = self._choose_random(table, state["_design"], prior)
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
            As ``fit``, for `groupings`, with a finite `epsilon`, and after a fit by other methods,
            which keep no statistics.
        """
        check_accumulates(self)
        self._check_dense(X)
        check_not_column_name(groups)
        check_no_groupings(self.groupings, _WITHOUT_ROWS)
        with name_bad_columns(X):
            features, checked = self._checked_xy(X, y, groups, dtype="float64", y_numeric=True)
        features = X if features.shape[1] else None
        statistics = accumulate_statistics(self, X, checked, groups, sample_weight, features)
        return fit_accumulated(self, statistics)

    def _choose_random(self, table, design, prior):
        """Table and design with the coefficients that vary."""
        is_auto = isinstance(self.random, str) and self.random == "auto"
        if not is_auto or type(prior) is not GaussianPrior or self.solver == "gd":
            return table, design
        options = self._fit_parameters()
        fit = LINEAR_FITS[type(prior).__name__, options.method, options.solver]
        return choose_by_likelihood(table, design, prior, options, fit)

    def _fit_without_privacy(self, table, prior, state):
        options, grouped = self._fit_parameters(), state.pop("_grouped", None)
        if grouped is None:
            fit = LINEAR_FITS[type(prior).__name__, options.method, options.solver]
            estimates = fit(table, prior, options)
            at = estimates.unidentified
            if at is None or estimates.no_pooling:
                at = np.arange(estimates.first, table.n_columns)
            if len(at):  # the design may be short of full rank
                estimates = estimates._replace(row_space=find_row_space(table, at, estimates.first))
        else:
            estimates = fit_groupings(table, prior, options, grouped)
        warn_unidentified(estimates.row_space, table.names)
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
            if estimates.levels is not None:
                known = estimates.variances.is_known[1:]
                evidence = with_groupings(evidence, design.order, estimates.levels, known)
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
            Features and groupings, with the columns that ``fit`` saw.
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
        mean, x, codes, levels = self._row_predictions(X, groups)
        if not return_std:  # no posterior is needed, and none is averaged
            return mean
        return mean, self._mask_inestimable(x, np.sqrt(self._row_variances(x, codes, levels)))

    def _rows_with(self, X, groups):
        return self._row_predictions(X, groups)

    def _mean_responses(self, predictors):
        return predictors

    def _drawn_responses(self, predictors, weights, rng):
        return self._draw_response(predictors, self.noise_variance_ / weights, rng)

    def _row_means(self, X, groups):
        means, x, codes, _ = self._row_predictions(X, groups)
        noise = np.full(len(x), self.noise_variance_)
        return RowMeans(x, codes, means, np.ones(len(x)), noise, "identity")

    def predict_interval(
        self, X: TableLike, *, groups: TableLike = None, level: float = 0.95, new_row: bool = False
    ) -> tuple[Floats, Floats]:
        """Central intervals of the clients' mean responses, or of new rows.

        Parameters
        ----------
        X : array-like of shape (n_rows, d)
            Features and groupings, with the columns that ``fit`` saw.
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
        mean, x, codes, levels = self._row_predictions(X, groups)
        variances = self._mask_inestimable(x, self._row_variances(x, codes, levels))
        return normal_bounds(mean, variances + new_row * self.noise_variance_, level)
