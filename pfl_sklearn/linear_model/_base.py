"""Base of the regressions with one coefficient vector per client."""

import math
from numbers import Integral
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
from scipy.sparse import issparse
from sklearn.utils import check_X_y
from sklearn.utils.validation import check_is_fitted

from pfl_sklearn._client_tables import CoefTableMixin
from pfl_sklearn._clients import check_not_column_name, warn_of_client_ids
from pfl_sklearn._columns import name_bad_columns, replace_empty_frame, validate_data
from pfl_sklearn._compat import BaseEstimator
from pfl_sklearn._parameters import AT_LEAST_ONE, POSITIVE, PrivateFit
from pfl_sklearn._typing import Floats
from pfl_sklearn._unwrap import without_groupings
from pfl_sklearn.base import ClientMixin, check_level, read_rows
from pfl_sklearn.linear_model._algebra import client_predictors
from pfl_sklearn.linear_model._contrasts import ContrastMixin
from pfl_sklearn.linear_model._design import column_names, resolve_design
from pfl_sklearn.linear_model._effect_table import EffectTableMixin
from pfl_sklearn.linear_model._made_up_rows import PlansRegressions
from pfl_sklearn.linear_model._mixed._posterior import PopulationErrors, normal_bounds
from pfl_sklearn.linear_model._row_space import RowSpace, warn_rows_outside
from pfl_sklearn.linear_model._simulation import SimulationMixin
from pfl_sklearn.linear_model._summary_tables import PopulationSummaryMixin
from pfl_sklearn.linear_model._totals import TotalsMixin
from pfl_sklearn.priors._resolve import default_prior
from pfl_sklearn.privacy import PrivacyReport
from pfl_sklearn.privacy._ledger import charge_fit
from pfl_sklearn.privacy._report import finalize_report


class FitParameters(SimpleNamespace):
    """All parameters of a regression as they were when its fit began; the fit cannot set them."""

    def __setattr__(self, name, value):
        raise AttributeError(f"a fit cannot set {name}; got {value!r}")

    def replaced(self, **values):
        """A copy with other values."""
        return FitParameters(**{**vars(self), **values})


class BasePersonalizedRegression(
    ContrastMixin,
    TotalsMixin,
    SimulationMixin,
    PopulationSummaryMixin,
    EffectTableMixin,
    CoefTableMixin,
    PlansRegressions,
    ClientMixin,
    PrivateFit,
    BaseEstimator,
):
    """Base of the mixed models: it reads rows, and gives predictors, posteriors and tables.

    The fit of a subclass calls ``_check_and_charge``, ``_read_rows`` and ``_fit_table``. It has

    - ``_check_private`` and ``_check_private_rows``: raise ValueError where the parameters alone,
      or public numbers of the rows, rule out a private fit;
    - ``_fit_without_privacy`` and ``_fit_privately``: return estimates, the latter with a report;
    - ``_variance_within``: variance of a response given its client, on the predictors' scale;
    - ``_unknown_variances``: returns `_shape`;
    - ``_exact_state``: fitted attributes for comparisons of models, such as `_evidence`. They are
      sums over exact rows, so a private model must not keep them.

    It sets `_errors`, the PopulationErrors; `_row_space`, the RowSpace of the population's design
    (None at full rank, and in private fits, as it depends on exact rows); `_posterior`, if any; and
    `_shape`: the shape of an estimated covariance (None: given) and whether the noise variance was
    estimated, or None where the estimates maximize no likelihood.

    Attributes
    ----------
    clients_ : ndarray of shape (n_clients,)
        Sorted ids; row i of every per-client array is ``clients_[i]``.
    n_samples_per_client_ : ndarray of shape (n_clients,)
    coef_names_ : ndarray of shape (d,)
        Names of the columns of `coef_`: the features of ``fit``, or x0, x1, ...
    coef_std_, intercept_std_ : ndarrays of the shapes of `coef_` and `intercept_`
        Posterior standard deviations; `uncertainty` says whether they allow for the variances
        being estimated. NaN for coefficients that are not identified.
    shrinkage_, intercept_shrinkage_ : ndarrays of the shapes of `coef_` and `intercept_`
        Posterior variance over prior variance, given the population: 0 where the client's own rows
        determine the coefficient, 1 where the population does, or where it does not vary.
    population_coef_std_, population_intercept_std_ : ndarrays of the shapes of the coefficients
        Standard errors; NaN for coefficients that are not identified (:ref:`row_space`).
    population_covariance_ : ndarray of shape (p, p), or (K p, K p) with K > 2 classes
        Covariance of the population coefficients: the intercept (if fitted) first, class by class.
    prior_ : prior object
        The prior with the values that the fit used.
    log_likelihood_ : float
        Log marginal likelihood at the estimates in nats (restricted for "reml"), without penalties.
    aic_, bic_ : float
        Information criteria; smaller is better.
    icc_ : float
        Intraclass correlation: the variance between clients over that variance and the variance
        within clients. The variances of `groupings` count in the total.
    iccs_ : Series
        Such shares of "client" (`icc_`) and of each of the `groupings`, by name.
    marginal_r2_, conditional_r2_ : float
        Shares of the response's variance that the population coefficients explain, and that these
        and the clients' coefficients explain.
    n_iter_, n_features_in_ : int
    feature_names_in_ : ndarray of shape (`n_features_in_`,)
    privacy_ : PrivacyReport
    """

    _default_component = default_prior
    _client_attributes: ClassVar[tuple[str, ...]] = (
        "n_samples_per_client_",
        "coef_",
        "intercept_",
        "_posterior",
        "_effects",
        "responsibilities_",
        "_statistics",
    )
    _population_attributes: ClassVar[tuple[str, ...]] = (
        "population_coef_",
        "population_intercept_",
        "prior_",
        "_between",
        "_errors",
        "_row_space",
    )
    _state_attributes: ClassVar[tuple[str, ...]] = ("_design", "_with_offset", "_largest_rate")
    # Released and unreleased attributes in the report of a private fit.
    _released: ClassVar[tuple[str, ...]] = (
        "population_coef_",
        "population_intercept_",
        "population_coef_std_",
        "population_intercept_std_",
        "population_covariance_",
        "prior_",
    )
    _not_released: ClassVar[tuple[str, ...]] = (
        "coef_",
        "intercept_",
        "coef_std_",
        "intercept_std_",
        "shrinkage_",
        "intercept_shrinkage_",
        "clients_",
        "n_samples_per_client_",
        "log_likelihood_",  # exact, so it depends on every row
    )
    _fits_a_copy = True
    _sparse_alternative: ClassVar[str | None] = None  # an estimator that takes sparse rows
    _row_space: RowSpace | None = None
    _row_arguments: ClassVar[tuple[str, ...]] = ()  # of predictions, such as an offset
    _intercept_alone = True  # whether a table of ids alone will do
    _parameter_constraints = {
        "prior": "no_validation",
        "random": [str, "array-like"],
        "max_iter": [AT_LEAST_ONE],
        "tol": [POSITIVE],
        "n_jobs": [Integral, None],
    }

    def _fit_parameters(self):
        """The FitParameters of a fit that begins now."""
        return FitParameters(**{name: getattr(self, name) for name in self._fields_of_parameters})

    def _check_and_charge(self, prior, X, groups, sample_weight):
        """Refuse a fit that parameters, public numbers of the rows or the ledger do not allow."""
        # No value is read before: an error that depends on values may reveal a client's, so it is
        # charged like a fit.
        self._check_dense(X)
        check_not_column_name(groups)
        if math.isfinite(self.epsilon):
            self._check_private(prior, sample_weight)
            self._check_private_rows(prior, X, groups)
        charge_fit(self)

    def _check_dense(self, X):
        """Raise TypeError for a sparse `X`, naming an estimator that takes one, if any."""
        is_sparse = issparse(X)
        if is_sparse:
            instead = self._sparse_alternative
            way_out = "" if instead is None else f", or use {instead}, which takes sparse X"
            raise TypeError(
                f"{type(self).__name__} takes dense X; got a sparse {type(X).__name__} of shape "
                f"{X.shape}. Give X.toarray(), or in a step before sparse_output=False (encoders) "
                f"or sparse_threshold=0 (ColumnTransformer){way_out}."
            )

    def _checked_xy(self, X, y, groups, **options):
        """Features (n, d) and responses (n,) as ``check_X_y`` returns them."""
        # Clients may have an intercept alone. Without ids or an intercept only one mean would be
        # left to fit, or nothing.
        least = 0 if groups is not None and self.fit_intercept else 1
        return check_X_y(
            replace_empty_frame(X),
            y,
            order="C",
            ensure_min_features=least,
            estimator=self,
            **options,
        )

    def _read_rows(self, X, features, y, groups, sample_weight):
        """State, features and FitRows (targets, clients, weights) of the rows of positive weight.

        Column names are those of `X`; values are those of the checked `features` and `y`.
        """
        rows = read_rows(self, features, np.arange(len(y)), groups, sample_weight)
        if math.isinf(self.epsilon):
            warn_of_client_ids(X, groups)
        if len(rows.y) < len(y):  # the others have weight 0, and so are absent
            features, y = features[rows.y], y[rows.y]
        state = self._state_of(X, features.shape[1], rows.clients.ids, groups is not None)
        return state, features, rows._replace(y=y)

    def _state_of(self, X, n_features, ids, with_groups):
        """Fitted attributes that columns and ids decide."""
        names = column_names(X)
        design = resolve_design(self.random, n_features, self.fit_intercept, names)
        # Earlier checks saw an array; the column names are those of `X`.
        columns = self._column_attributes(X)
        return {**columns, "_design": design, "_fitted_with_groups": with_groups, "clients_": ids}

    def _fit_table(self, table, state, prior):
        """Fit of reduced rows; nothing here reads a row."""
        if math.isfinite(self.epsilon):
            estimates, report = self._fit_privately(table, prior, state)
        else:
            estimates = self._fit_without_privacy(table, prior, state)
            state = {**state, **self._exact_state(table, prior, estimates, state)}
            report = PrivacyReport.unprotected(
                "epsilon=inf was asked for.",
                not_released=(*self._released, *self._not_released),
                n_clients=table.n_clients,
                assumptions=self._notes_on_privacy(state),
            )
        fitted = self._fitted_state(state, table, estimates)
        fitted["_shape"] = self._unknown_variances(prior, len(table.sizes))
        # A warning that is an error leaves the last fit as it was.
        self._set_fitted({**fitted, "privacy_": finalize_report(self, report)})
        return self

    def _notes_on_privacy(self, state):
        """Sentences (tuple) about what a fit without privacy gives away."""
        return ()

    def _fitted_state(self, state, table, estimates):
        """Fitted attributes, in the order of the features."""
        design, space = state["_design"], estimates.row_space
        back = np.argsort(design.order)
        coef, intercept = design.coefficients(estimates.coefficients[..., back])
        population = design.coefficients(estimates.population[..., back])
        posterior = {} if estimates.posterior is None else {"_posterior": estimates.posterior}
        return {
            **state,
            **posterior,  # none where a prior or a published algorithm gives modes alone
            "_between": design.embedded(estimates.covariance),
            "_row_space": None if space is None else space.reordered(design.order),
            # The covariance is that of the user's columns; its shape holds at this centre.
            "_centre": None if estimates.centre is None else estimates.centre[back],
            "coef_": coef,
            "intercept_": intercept,
            "population_coef_": population[0],
            "population_intercept_": population[1] if population[1].ndim else float(population[1]),
            "prior_": estimates.prior,
            "log_likelihood_": estimates.log_likelihood,
            "n_iter_": estimates.n_iter,
            "n_samples_per_client_": table.sizes,
        }

    @property
    def _n_coefficients(self):
        return len(self._design.names) - self._design.fit_intercept

    def _named_design(self, feature_names):
        """The design with other names of the features; None keeps them."""
        if feature_names is None:
            return self._design
        return self._design.named(without_groupings(self, list(feature_names)))

    @property
    def random_(self) -> list[str]:
        """Names of the coefficients that may vary by client."""
        check_is_fitted(self)
        return list(self._design.random_names)

    @property
    def population_covariance_(self) -> Floats:
        """Covariance of the population coefficients."""
        return self._errors.covariance

    @property
    def population_coef_std_(self) -> Floats:
        """Standard errors of the population coefficients."""
        return self._design.coefficients(self._population_stds())[0]

    @property
    def population_intercept_std_(self) -> Floats | float:
        """Standard error of the population's intercept."""
        intercept = self._design.coefficients(self._population_stds())[1]
        return intercept if np.ndim(intercept) else float(intercept)

    @property
    def coef_std_(self) -> Floats:
        """Posterior standard deviations of the clients' coefficients, as `coef_`."""
        return self._design.coefficients(self._coefficient_variances() ** 0.5)[0]

    @property
    def intercept_std_(self) -> Floats:
        """Posterior standard deviations of the clients' intercepts, as `intercept_`."""
        return self._design.coefficients(self._coefficient_variances() ** 0.5)[1]

    @property
    def shrinkage_(self) -> Floats:
        """Posterior over prior variance of the clients' coefficients, as `coef_`."""
        return self._design.coefficients(self._posterior_values("shrinkage"))[0]

    @property
    def intercept_shrinkage_(self) -> Floats:
        """Posterior over prior variance of the clients' intercepts, as `intercept_`."""
        return self._design.coefficients(self._posterior_values("shrinkage"))[1]

    def credible_interval(self, level: float = 0.95) -> tuple[Floats, Floats]:
        """Central posterior intervals of the clients' coefficients.

        Parameters
        ----------
        level : float in (0, 1), default=0.95
            Posterior probability of the intervals.

        Returns
        -------
        lower, upper : ndarrays of shape (n_clients, p)
            The intercept (if fitted) first, then the features; of shape (n_clients, K, p) with
            K > 2 classes. Quantiles of the posterior where it is averaged over the variances,
            otherwise of a normal distribution.
        """
        check_level(level)
        return self._coefficient_bounds(level)

    def _coefficient_bounds(self, level):
        variances = self._coefficient_variances()
        means = self._design.vectors(self.coef_, self.intercept_)
        if not hasattr(self._posterior, "interval"):  # given the variances it is normal
            return normal_bounds(means, variances, level)
        back = np.argsort(self._design.order)
        lower, upper = (bound[:, back] for bound in self._posterior.interval(level))
        unknown = np.isnan(variances)
        return np.where(unknown, np.nan, lower), np.where(unknown, np.nan, upper)

    def _coefficient_stds(self):
        if not hasattr(self, "_posterior"):  # a mode alone
            return None
        return self._coefficient_variances() ** 0.5

    def _coefficient_variances(self):
        """Variances (n_clients, [K,] p) of the clients' coefficients, NaN if not estimable."""
        variances = self._posterior_values("coefficient_variances")
        # A client's coefficient is the population's, whose error is infinite, and its deviation.
        return np.where(self._errors.is_open.reshape(variances.shape[1:]), np.nan, variances)

    def _population_stds(self):
        """Standard errors (p,) or (K, p) of the population coefficients."""
        stds = np.sqrt(np.diag(self._errors.covariance))
        return stds.reshape(*np.shape(self.population_intercept_), -1)

    def _predictors(self, X, groups):
        """Linear predictors (n,) or (n, K) of rows, the checked rows, and their clients' codes."""
        codes = self._encode_predict(X, groups)
        with name_bad_columns(X):
            X = self._checked_features(replace_empty_frame(X))
        # A released model has no clients.
        client = getattr(self, "coef_", None), getattr(self, "intercept_", None)
        population = self.population_coef_, self.population_intercept_
        predictors = client_predictors(X, codes, *client, *population)
        if self._row_space is not None:
            warn_rows_outside(self._row_space, self._design.matrix(X))
        return predictors, X, codes

    def _checked_features(self, X):
        """Features (n, d) of rows to predict."""
        return validate_data(self, X, reset=False, dtype=np.float64, ensure_min_features=0)

    def _mask_inestimable(self, x, errors):
        """Errors (n, ...) of rows x (n, p) of the design; NaN where these are not estimable."""
        inside = self._estimable_rows(x).reshape(-1, *[1] * (errors.ndim - 1))
        return np.where(inside, errors, np.nan)

    def _estimable_rows(self, x):
        """Whether the data determine the predictors of rows x (n, p) of the design; (n,)."""
        if self._row_space is None:
            return np.ones(len(x), dtype=bool)
        return ~self._row_space.violated(x).any(axis=1)

    def _variances(self, x, codes, combination=(1.0,)):
        """Variance (n,) of a combination (c,) of the predictors of rows x (n, p) of the design.

        Averages need a number everywhere; reported variances go through `_mask_inestimable`.
        """
        seen = codes >= 0
        variances = np.empty(len(x))
        if not seen.all():
            variances[~seen] = self._errors.new_variances(np.kron(combination, x[~seen]))
        if seen.any():
            if not hasattr(self, "_posterior"):
                raise ValueError(
                    "return_std=True and predict_interval need a posterior; a fit with "
                    f"{self._parameter_text()} gives its mode only."
                )
            ordered = np.kron(combination, x[seen][:, self._design.order])
            variances[seen] = self._posterior.variances(ordered, codes[seen])
        return variances

    def _posterior_values(self, quantity):
        """Values (n_clients, [K,] p) of the posterior, in the order of the design."""
        self._require_fitted("clients_")
        if not hasattr(self, "_posterior"):
            raise AttributeError(
                "standard deviations and shrinkage need a posterior; a fit with "
                f"{self._parameter_text()} gives the clients' coefficients only."
            )
        values = getattr(self._posterior, quantity)().reshape(*self.coef_.shape[:-1], -1)
        return values[..., np.argsort(self._design.order)]

    def _parameter_text(self):
        """Text for errors: the parameters on which it depends whether there is a posterior."""
        names = ("prior", "method", "solver")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)


def population_errors(design, estimates, is_open, between, from_roots=False):
    """PopulationErrors in the order of the features; c outputs are output by output.

    `is_open` (c p,) says which coefficients are not estimable, in the order of the table; the
    covariance, a generalized inverse, does not say it. `between` (p, p) is the covariance between
    clients. With `from_roots` variances are by the roots of the posterior, if it has any.
    """
    p = estimates.population.shape[-1]
    c = estimates.population.size // p
    at = (np.arange(c)[:, None] * p + np.argsort(design.order)).ravel()
    plug_in = getattr(estimates.posterior, "plug_in", estimates.posterior)
    roots = None
    if from_roots and hasattr(plug_in, "ratio_root"):  # one client alone has none
        both = plug_in.error_root, plug_in.ratio_root
        roots = tuple((root * plug_in.scale[:, None])[at] for root in both)
    return PopulationErrors(
        estimates.population_covariance[np.ix_(at, at)],
        between if c == 1 else np.kron(np.eye(c), between),
        estimates.posterior,
        design.order,
        is_open[at],
        roots,
    )
