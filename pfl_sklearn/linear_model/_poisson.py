"""Personalized regression of counts: one coefficient vector per client under a Gaussian prior."""

import math
from functools import partial
from numbers import Real
from typing import Any, Literal, Self, overload

import numpy as np
from sklearn.metrics import d2_tweedie_score
from sklearn.utils import check_array

from pfl_sklearn._compat import StrOptions, fit_context
from pfl_sklearn._parameters import parameter, with_parameters
from pfl_sklearn._typing import Floats, TableLike
from pfl_sklearn._warnings import warn_fractional_counts
from pfl_sklearn.base import ClientRegressorMixin, check_level
from pfl_sklearn.linear_model._fit_warnings import warn_of_overdispersion
from pfl_sklearn.linear_model._link import LinkRegression, checked_offset
from pfl_sklearn.linear_model._mixed._families import NegativeBinomial, Poisson, bounded_exp
from pfl_sklearn.linear_model._mixed._posterior import skewed_bounds
from pfl_sklearn.linear_model._mixed._predictions import averaged_exponentials, response_bounds
from pfl_sklearn.linear_model._private import _constants as tuned
from pfl_sklearn.linear_model._private._link_server import PrivateStart
from pfl_sklearn.linear_model._totals import RowMeans

_LARGEST_LOG_VARIANCE = 200.0  # of a log rate: e^600 times e^100 is finite
_LARGEST_EXPOSURE = 1e100  # and 1 over the smallest: exponentials of log rates stay finite
_LARGEST_RESPONSE = 1e9  # beyond it rounding of log-likelihoods hides differences of clients


@with_parameters
class PersonalizedPoissonRegression(ClientRegressorMixin, LinkRegression):
    r"""Regression of counts with coefficients that vary by client around those of the population.

    The count of row j of client i has the expectation

    .. math:: E_{ij} \exp(x_{ij}^\top (\beta + E b_i)), \qquad b_i \sim N(0, S),

    with the row's exposure :math:`E_{ij}` (such as insured years, or 1), where E selects the
    coefficients that vary by client (`random`); all clients share the others. Levels of further
    columns of X may have effects, too (`groupings`). Given its expectation :math:`\mu`, a count is
    Poisson, or negative binomial with the variance :math:`\mu + \phi \mu^2`. A client's
    coefficients are its posterior mode. See the :ref:`user guide <poisson_regression>`.

    Attributes
    ----------
    coef_, intercept_ : ndarrays of shape (n_clients, d) and (n_clients,)
        Posterior modes, on the scale of log rates.
    population_coef_, population_intercept_ : ndarray of shape (d,) and float
        Coefficients of a typical client. The expectation over clients is larger, by the factor
        :math:`\exp(x^\top S x / 2)`.
    dispersion_ : float
        The dispersion :math:`\phi`; 0 for Poisson counts.

    Raises
    ------
    ValueError
        For counts that are negative, above 1e9 or all 0, fractional counts with exposure or an
        offset or with `family` "negative_binomial", exposure that is not positive, missing ids or
        ids of mixed types, NaN or infinity, values above 1e150 or a column whose nonzero values are
        all below 1e-140, a row's weight above 1e6 or weights that sum to less than 1e-3.

        For unknown or ambiguous names in `random`, a number of quadrature points where several
        coefficients vary, and a known covariance that holds NaN (the `prior_` of a fit of a single
        client) or infinity.

        If the data do not identify the covariance: every client has one row and the counts are
        negative binomial; a column named in `random` is constant over all rows, there is a random
        intercept, and the covariance is not spherical; the covariance is full and there are fewer
        clients than random coefficients.

        For `groupings` with a number of quadrature points; for a column of `groupings` that holds
        dates, lists, or strings that read as dates (or, under "auto", as numbers); has as many
        levels as rows, unless the counts are Poisson and it is named; groups the rows as another
        one does; or has fewer levels than coefficients with a full covariance. For more effects
        than fit into memory; for negative binomial counts, than 4,000 besides those of the largest
        grouping.

        With a finite `epsilon`: for `groupings`, a missing bound, sample weights, an intercept that
        does not vary, an estimated covariance of several coefficients that is not "diag", noise of
        half of a coefficient's variance or more where several vary, a prior with a mean, and
        `family` "negative_binomial". Numbers in `X`, `y`, exposure or offset, and covariances that
        the data do not identify, then raise no error, which would reveal them: they are clipped
        (see `privacy_`), and counts are rounded.

    Warns
    -----
    SeparationWarning
        If the likelihood has no finite maximum: a combination of the features takes its largest
        value in rows of count 0 alone, or the differences between clients, or levels, diverge. A
        weak normal prior then keeps the estimates finite.
    UserWarning
        If `y` holds fractions, counts of ``family="poisson"`` are clearly overdispersed, so that
        intervals are too short, or a column of `groupings` is left out.
    ConvergenceWarning
        If `max_iter` was too small, or rounding stopped the search; more iterations help only in
        the first case.
    NotEstimableWarning
        If columns are linear combinations of others, and if rows to predict break such a relation
        (:ref:`row_space`).
    PrivacyWarning
        If a private fit released mostly noise, or numbers that the bounds make implausible.

    Notes
    -----
    The model of clients is that of Section 3 of Ozkara et al. (2023), with another likelihood;
    estimates are those of lme4's ``glmer`` and ``glmer.nb``.

    *Exposure.* ``exposure=E`` is the same as ``offset=log(E)``; both together add up. A model that
    was fitted with either needs it for predictions. Counts per exposure with the exposure as
    `sample_weight`, as for scikit-learn's PoissonRegressor, have the same coefficients and errors;
    criteria, residuals and the check for overdispersion need counts.

    With one varying coefficient and no `groupings`, the predictions sum to the counts of the fit.
    Those of private fits are at most the highest of `rate_range` per unit of exposure. Rows that
    repeat within a client identify the dispersion. `icc_` and R2 take :math:`\log(1 + 1 / m +
    \phi)` as the variance within clients, with the mean count m (Nakagawa, Johnson and Schielzeth,
    2017).

    References
    ----------
    Nakagawa, S., Johnson, P. C. D. and Schielzeth, H. (2017). The coefficient of determination R2
    and intra-class correlation coefficient from generalized linear mixed-effects models revisited
    and expanded. Journal of the Royal Society Interface.

    Ozkara, K., Girgis, A. M., Data, D. and Diggavi, S. (2023). A statistical framework for
    personalized federated learning and estimation: theory, algorithms, and privacy. ICLR.

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn.linear_model import PersonalizedPoissonRegression
    >>> rng = np.random.default_rng(0)
    >>> X, garage = rng.normal(size=(600, 1)), np.repeat(np.arange(20), 30)
    >>> years = rng.uniform(0.5, 2, size=600)
    >>> rate = np.exp(0.5 * X[:, 0] + 0.7 * rng.normal(size=20)[garage] - 1)
    >>> y = rng.poisson(years * rate)
    >>> model = PersonalizedPoissonRegression(random="intercept")
    >>> model = model.fit(X, y, groups=garage, exposure=years)
    >>> model.population_coef_.round(1), model.intercept_.shape
    (array([0.5]), (20,))
    >>> model.predict(X[:1], groups=[3], exposure=[1.0]).shape
    (1,)
    """

    __metadata_request__fit = {"exposure": True}
    __metadata_request__predict = {"exposure": True}
    __metadata_request__score = {"exposure": True}

    _likelihood = "poisson"
    _range_of_means = (0.0, math.inf)
    _row_arguments = ("offset", "exposure")
    _scale, _separated = "log rates", "rows of count 0 from the others"
    _clipped_ranges = (
        f"counts to whole numbers from 0 to {_LARGEST_RESPONSE:g}, exposures to "
        f"{1 / _LARGEST_EXPOSURE:g} to {_LARGEST_EXPOSURE:g}, {LinkRegression._clipped_ranges}"
    )
    _population_attributes = (*LinkRegression._population_attributes, "dispersion_")
    _MISSING_OFFSET = (
        "this {name} was fitted with exposure or offset; give that of the rows to predict, such as "
        "exposure=np.ones(len(X)) for rates."
    )

    family: str = parameter(
        default="poisson",
        ranges=[StrOptions({"poisson", "negative_binomial"})],
        text="""
            {"poisson", "negative_binomial"}
                Distribution of a count given its expectation. "negative_binomial" also estimates a
                dispersion of rows. "poisson" warns where squared residuals are clearly three times
                as large as expected, or more.
        """,
    )

    rate_range: tuple[float, float] | None = parameter(
        default=None,
        ranges=[tuple, list, None],
        text="""
            pair of float, 0 < lowest < highest, or None
                Plausible expected counts of a row whose exposure is 1, from 1e-4 to 1e4; required
                when `epsilon` is finite. The search starts between them, and the larger one sets
                the scale of the messages: measure exposure so that about 1 is usual.
        """,
    )

    @fit_context(prefer_skip_nested_validation=True)
    def fit(
        self,
        X: TableLike,
        y: TableLike,
        *,
        groups: TableLike = None,
        sample_weight: Any = None,
        exposure: TableLike = None,
        offset: TableLike = None,
    ) -> Self:
        """Estimate the population and every client's coefficients.

        Parameters
        ----------
        X : array-like of shape (n_rows, d)
            Features and columns of `groupings`; an intercept is added if `fit_intercept` is True.
            With it and `groups` there may be no features (d = 0): clients then have an intercept
            alone.
        y : array-like of shape (n_rows,)
            Counts: whole numbers from 0 to 1e9, not all of them 0. Without exposure and offset
            they may be rates with `family` "poisson", as for scikit-learn's PoissonRegressor, with
            a warning.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row. None: all rows belong to one client, with a warning.
        sample_weight : array-like of shape (n_rows,), default=None
            How often each row counts; a row of weight 0 is absent.
        exposure : array-like of shape (n_rows,), default=None
            Positive factors of the expected counts, such as years, area or population; None: 1.
        offset : array-like of shape (n_rows,), default=None
            Known part of the log of the expected counts.

        Returns
        -------
        self
        """
        return self._fit_link(X, y, groups, sample_weight, partial(_log_offset, exposure, offset))

    @staticmethod
    def _draw_response(predictors, noise_variance, rng):
        # Beyond what a count may be: such a guess has no plan.
        return rng.poisson(np.minimum(np.exp(np.minimum(predictors, 700.0)), _LARGEST_RESPONSE))

    def _checked_response(self, y, with_offset=False):
        y = check_array(y, dtype=np.float64, ensure_2d=False, input_name="y")
        fractional = y != np.floor(y)
        # Of rates with weights the Poisson likelihood is that of counts with exposure, up to a
        # constant. The negative binomial one is not.
        rates = self.family == "poisson" and not with_offset
        wrong = ~((y >= 0) & (y <= _LARGEST_RESPONSE)) | (fractional & (not rates))
        if wrong.any():
            raise ValueError(
                f"y must hold counts, whole numbers from 0 to {_LARGEST_RESPONSE:g}; got "
                f"{y[wrong][0]:g}. For rates, give the counts, and pass exposure=."
            )
        if fractional.any():
            warn_fractional_counts("y", y[fractional][0])
        return y

    def _cut_response(self, y):
        y = check_array(y, dtype=np.float64, ensure_2d=False, input_name="y")
        return np.clip(np.rint(y), 0.0, _LARGEST_RESPONSE)

    def _private_start(self):
        if self.family != "poisson":
            raise ValueError(f"a private fit takes family='poisson'; got {self.family!r}.")
        low, high = _checked_range(self.rate_range)
        spread = np.log(high / low)
        return PrivateStart(
            np.log(low) + spread / 2,
            max(spread / tuned.RANGE_SDS, tuned.LEAST_INTERCEPT_SD),
            float(high),  # a row's information is its expected count
            "a wider rate_range",
            float(np.exp(-spread * tuned.BELOW_TOP)),
        )

    def _family_of(self, y):
        if not y.any() and np.isinf(self.epsilon):
            raise ValueError(
                f"all {len(y)} counts in y are 0, so no rate is above 0; expected some that are."
            )
        return Poisson() if self.family == "poisson" else NegativeBinomial(), y, {}

    def _fitted_state(self, state, table, estimates):
        fitted = super()._fitted_state(state, table, estimates)
        # Noise on slopes leaves exponentials of any size, so the user's plausible range caps them.
        private = math.isfinite(self.epsilon)
        largest = float(_checked_range(self.rate_range)[1]) if private else math.inf
        return {**fitted, "dispersion_": estimates.family.dispersion, "_largest_rate": largest}

    def _fit_without_privacy(self, table, prior, state):
        estimates = super()._fit_without_privacy(table, prior, state)
        # A weight of a rate is an exposure, and no number of rows: their dispersion is another.
        if self.family == "poisson" and np.all(table.y == np.floor(table.y)):
            warn_of_overdispersion(estimates, table)
        return estimates

    @overload
    def predict(
        self,
        X: TableLike,
        *,
        groups: TableLike = None,
        exposure: TableLike = None,
        offset: TableLike = None,
        integrate: bool = True,
        return_std: Literal[False] = False,
    ) -> Floats: ...
    @overload
    def predict(
        self,
        X: TableLike,
        *,
        groups: TableLike = None,
        exposure: TableLike = None,
        offset: TableLike = None,
        integrate: bool = True,
        return_std: Literal[True],
    ) -> tuple[Floats, Floats]: ...
    def predict(
        self,
        X: TableLike,
        *,
        groups: TableLike = None,
        exposure: TableLike = None,
        offset: TableLike = None,
        integrate: bool = True,
        return_std: bool = False,
    ) -> Floats | tuple[Floats, Floats]:
        """Expected counts of rows of their clients.

        Parameters
        ----------
        X : array-like of shape (n_rows, d)
            Features and groupings, with the columns that ``fit`` saw.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.
        exposure : array-like of shape (n_rows,), default=None
            Positive factors of the expected counts; needed if ``fit`` got exposure or an offset and
            `offset` is None.
        offset : array-like of shape (n_rows,), default=None
            Known part of the log of the expected counts.
        integrate : bool, default=True
            Whether to average over the client's posterior given the estimates, or over the prior
            for unseen clients (if ``fit`` saw several clients). Otherwise the expectation is that
            of the posterior mode, and of a typical client.
        return_std : bool, default=False
            Also return the standard deviation of the expected count, given the data; not that of a
            new count. NaN, with a warning, for rows whose prediction the data do not determine
            (:ref:`row_space`).

        Returns
        -------
        y : ndarray of shape (n_rows,)
        std : ndarray of shape (n_rows,)
            If `return_std`.
        """
        known = _log_offset(exposure, offset, X)
        law, x = self._predictor_law(X, groups, known)
        mean = bounded_exp(law.predictors[:, 0])
        if integrate or return_std:
            log_average = averaged_exponentials(law)
        if integrate:
            mean = bounded_exp(log_average)
        mean = np.minimum(mean, self._largest_rate * (1.0 if known is None else np.exp(known)))
        if not return_std:
            return mean
        # The client's posterior and the errors of the estimates enter as independent factors.
        spread = averaged_exponentials(law, 2.0) - 2 * log_average
        conditional = law.covariances_of(np.arange(len(x)), np.ones((1, 1)))[:, 0, 0]
        errors = np.maximum(self._row_variances(x, law.codes, law.levels) - conditional, 0.0)
        far = np.minimum(spread + errors, _LARGEST_LOG_VARIANCE)
        std = bounded_exp(log_average) * np.sqrt(np.expm1(np.maximum(far, 0.0)))
        return mean, self._mask_inestimable(x, std)

    def _rows_with(self, X, groups, exposure=None, offset=None):
        return self._predictors_with(X, groups, _log_offset(exposure, offset, X))

    def _mean_responses(self, predictors):
        return bounded_exp(predictors)

    def _drawn_responses(self, predictors, weights, rng):
        means = np.minimum(bounded_exp(predictors), _LARGEST_RESPONSE)
        return self._row_family.distribution(means).rvs(random_state=rng).astype(np.float64)

    def _row_means(self, X, groups, exposure=None, offset=None):
        means = self.predict(X, groups=groups, exposure=exposure, offset=offset)
        _, x, codes, _ = self._row_predictions(X, groups)
        noise = means + (self.dispersion_ if self._row_family.has_dispersion else 0.0) * means**2
        # Of a lognormal mean, whose standard deviation is larger than that of the delta method.
        # Where rates are hardly known (a variance of 2 of their logarithm), that says nothing more.
        spread = np.clip(self._variances(x, codes), 1e-12, 2.0)
        slopes = means * np.sqrt(np.expm1(spread) / spread)
        return RowMeans(x, codes, means, slopes, noise, "log")

    def predict_interval(
        self,
        X: TableLike,
        *,
        groups: TableLike = None,
        exposure: TableLike = None,
        offset: TableLike = None,
        level: float = 0.95,
        new_row: bool = False,
    ) -> tuple[Floats, Floats]:
        """Central intervals of the expected counts of rows of their clients, or of new counts.

        Parameters
        ----------
        X : array-like of shape (n_rows, d)
            Features and groupings, with the columns that ``fit`` saw.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.
        exposure : array-like of shape (n_rows,), default=None
            As for :meth:`predict`.
        offset : array-like of shape (n_rows,), default=None
            As for :meth:`predict`.
        level : float in (0, 1), default=0.95
            Posterior probability of the intervals.
        new_row : bool, default=False
            Whether they are for the count of a new row. Otherwise they are for its expectation.

        Returns
        -------
        lower, upper : ndarrays of shape (n_rows,)
            Exponentials of quantiles of the log rate. For a new row they are whole numbers:
            the least that leave at least (1 - `level`) / 2 at or below `lower`, and at most that
            above `upper`. NaN where the standard deviation is.

        Notes
        -----
        The mean of :meth:`predict` lies above `upper` where a normal log rate has a standard
        deviation of more than twice the normal quantile (3.9 for the default level).
        """
        check_level(level)
        law, x = self._predictor_law(X, groups, _log_offset(exposure, offset, X))
        moments = self._posterior_moments(x, law)
        if new_row:
            means = law.predictors[:, 0] + moments[0]
            bounds = response_bounds(self._row_family, means, moments[1], level)
        else:
            bounds = map(np.exp, skewed_bounds(law.predictors[:, 0], moments, level))
        lower, upper = (self._mask_inestimable(x, bound) for bound in bounds)
        return lower, upper

    def score(
        self,
        X: TableLike,
        y: TableLike = None,
        *,
        groups: TableLike = None,
        sample_weight: Any = None,
        exposure: TableLike = None,
        offset: TableLike = None,
    ) -> float:
        r"""Share D² of the Poisson deviance that the predictions explain.

        It is 1 minus the deviance of the predictions over that of one rate for all rows: at most 1.
        That is the score of scikit-learn's PoissonRegressor for counts per exposure, weighted by
        exposure.

        Parameters
        ----------
        X : array-like of shape (n_rows, d)
            Features and groupings, with the columns that ``fit`` saw.
        y : array-like of shape (n_rows,)
            Observed counts; if all are 0, the score is 0.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.
        sample_weight : array-like of shape (n_rows,), default=None
            Weights of the rows in the score.
        exposure : array-like of shape (n_rows,), default=None
            As for :meth:`predict`.
        offset : array-like of shape (n_rows,), default=None
            As for :meth:`predict`.

        Returns
        -------
        float
        """
        predicted = self.predict(X, groups=groups, exposure=exposure, offset=offset)
        if not np.any(y):  # one rate of 0 for all rows leaves no deviance to explain
            return 0.0
        known = _log_offset(exposure, offset, X)
        unit = np.ones(len(predicted)) if known is None else np.exp(known)
        weights = unit if sample_weight is None else unit * np.asarray(sample_weight)
        # The deviance of a count is that of its rate, times the exposure.
        rates = np.asarray(y) / unit, predicted / unit
        return float(d2_tweedie_score(*rates, sample_weight=weights, power=1))

    def _variance_within(self, name):
        mean = self._evidence_for(name).moments.means[-1]
        return float(np.log1p(1 / mean + self.dispersion_))

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = True
        return tags


def _checked_range(rates):
    """Lowest and highest plausible rate."""
    if rates is None:
        raise ValueError(
            "rate_range must be given when epsilon is finite: the plausible rates (lowest, "
            "highest), chosen without looking at the data."
        )
    numbers = all(isinstance(rate, Real) for rate in rates)
    least = 1 / tuned.LARGEST_RATE
    if len(rates) != 2 or not numbers or not least <= rates[0] < rates[1] <= tuned.LARGEST_RATE:
        raise ValueError(
            f"rate_range must be two numbers from {least:g} to {tuned.LARGEST_RATE:g}, the smaller "
            f"one first; got {rates!r}. Rates beyond need another unit of exposure."
        )
    return rates


def _log_offset(exposure, offset, X, cut=False):
    """Sum of the offset and the log of the exposure, or None without either."""
    # Values out of range are an error, or are cut.
    known = checked_offset(offset, X, cut=cut)
    if exposure is None:
        return known
    exposure = checked_offset(exposure, X, "exposure", largest=_LARGEST_EXPOSURE, cut=cut)
    if cut:
        exposure = np.maximum(exposure, 1 / _LARGEST_EXPOSURE)
    elif not np.all(exposure > 1 / _LARGEST_EXPOSURE):
        wrong = exposure[exposure <= 1 / _LARGEST_EXPOSURE][0]
        raise ValueError(f"exposure must be above 0 in every row; got {wrong:g}.")
    return np.log(exposure) if known is None else np.log(exposure) + known
