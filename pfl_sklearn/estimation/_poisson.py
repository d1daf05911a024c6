"""Personalized rates of clients under a gamma or a non-parametric prior: credibility."""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any, Self

import numpy as np
import pandas as pd
from scipy.special import xlogy
from sklearn.utils import check_consistent_length

from pfl_sklearn._client_means import (
    CLIENT_ATTRIBUTES,
    BaseClientMean,
    MeanRegressorMixin,
    participant_mask,
    report_of_fit,
)
from pfl_sklearn._compat import Interval, StrOptions, fit_context
from pfl_sklearn._parameters import UNSEEN, PrivateFit, parameter, with_parameters
from pfl_sklearn._typing import Floats, TableLike
from pfl_sklearn.base import FitRows, read_rows
from pfl_sklearn.estimation._category_reports import (
    HISTOGRAM_SENSITIVITY,
    HISTOGRAM_ZERO_OUT_SENSITIVITY,
    check_central_delta,
    count_events,
)
from pfl_sklearn.estimation._count_estimates import (
    central_intervals,
    estimate_exactly,
    keep_own_if_single,
)
from pfl_sklearn.estimation._counts import (
    LARGEST_TOTAL,
    check_columns_of_statistics,
    check_exposed_counts,
    check_fractions,
    clients_of_table,
    counts_of_statistics,
    events_and_exposure,
    exposure_table,
    nearly_whole,
)
from pfl_sklearn.estimation._fields import (
    PARTICIPANTS,
    PUBLISH,
    ROWS_PER_PERSON,
    TARGET,
    UNCERTAINTY,
)
from pfl_sklearn.estimation._made_up_tables import PlansRates
from pfl_sklearn.estimation._plausible_gammas import GammaPriors, new_client_variance
from pfl_sklearn.estimation._published._base import (
    PublishesClients,
    is_publishing,
    published_events,
)
from pfl_sklearn.estimation._published._count_attributes import (
    check_published_counts,
    check_published_totals,
    publish_counts,
)
from pfl_sklearn.estimation._published._counts import POISSON
from pfl_sklearn.estimation._rate_reports import rates_from_release
from pfl_sklearn.priors import GammaPrior, GridPrior
from pfl_sklearn.priors._resolve import default_prior, resolve_prior
from pfl_sklearn.statistics import ClientStatistics
from pfl_sklearn.statistics._accumulate import (
    AccumulatedStatisticsMixin,
    accumulate_statistics,
    check_accumulates,
    check_statistics,
)

_PUBLIC_OF_RATES = ("population_mean_", "population_mean_std_", "prior_", "icc_")


@with_parameters
class PoissonMean(
    MeanRegressorMixin,
    PlansRates,
    PublishesClients,
    AccumulatedStatisticsMixin,
    PrivateFit,
    BaseClientMean,
):
    r"""Each client's rate of events, shrunk as far as the data warrant: credibility.

    Client i has :math:`y_i` events over an exposure :math:`E_i`:

    .. math:: y_i \sim \mathrm{Poisson}(E_i \lambda_i), \qquad \lambda_i \sim \mathrm{Gamma}(a, b),

    and the estimate is the posterior mean, with the credibility :math:`Z_i` of the client's own
    rate:

    .. math::

       \hat\lambda_i = \frac{a + y_i}{b + E_i}
       = Z_i \frac{y_i}{E_i} + (1 - Z_i) \frac{a}{b}, \qquad Z_i = \frac{E_i}{E_i + b} .

    Every row is a count with its own exposure: claims in a policy's years, cases in a week's
    person-years. Features have no effect. For tables of counts use :meth:`fit_counts`.

    Attributes
    ----------
    clients_ : ndarray of shape (n_clients,)
        Sorted ids; row i of every per-client array is ``clients_[i]``.
    n_samples_per_client_, exposure_per_client_ : ndarrays of shape (n_clients,)
        Number of rows of each client, and their summed exposure.
    means_, stds_ : ndarrays of shape (n_clients,)
        Posterior mean and standard deviation of each client's rate, per unit of exposure.
    local_means_ : ndarray of shape (n_clients,)
        Each client's own rate, events over exposure; with ``publish="clients"`` plus noise.
    noise_std_ : ndarray of shape (n_clients,)
        Standard deviation of that noise, with ``publish="clients"``.
    shrinkage_ : ndarray of shape (n_clients,)
        Weight on the population, one minus the credibility: 0 is the client's own rate, 1 the
        population's. For a grid prior, the weight under the gamma prior with the same mean and
        variance.
    prior_ : GammaPrior or GridPrior
        The prior with its values. After a private fit with a gamma prior, its mean and variance are
        those of an average over all priors that the release leaves plausible.
    population_mean_, population_mean_std_ : float
        Population rate and its standard error; 0 if the prior was given.
    icc_ : float
        Intraclass correlation of counts over an exposure of 1: the share of their variance that
        lies between clients, ``1 / (1 + b)`` for a gamma prior. It depends on the unit of exposure.
    n_features_in_, feature_names_in_ : int, and ndarray of str
        Number of columns of `X`, and their names, if it has any.
    privacy_ : PrivacyReport
        What the fit protects, how, and what is released.

    Raises
    ------
    ValueError
        - For ids that are missing or of mixed types, and fewer than two participants.
        - For counts that are negative, fractional, or above 1e9 in a row, fractional weights, and
          exposure outside [1e-60, 1e60]. With a finite `epsilon` an error would reveal values:
          counts are rounded and cut, and exposure is cut.
        - For prior, method and trust that do not go together, and a finite `epsilon` without `cap`
          or with weights.

    Warns
    -----
    UserWarning
        If `y` or the weights hold fractions, or if a release shows clearly that over a quarter of
        the counts are at `cap` or above.

    Notes
    -----
    Formulas and figures are in :ref:`credibility` and :ref:`private-counts`. Predictions are
    expected counts: rates times the exposure of the rows. Clients that differ by chance alone get a
    prior under which the largest of them has a credibility of 1 in 10,000.

    Errors are averaged over gamma priors by their likelihood (:ref:`few-clients`): in full up to
    100 clients, not at all from 1,000, in part in between; with a grid prior for any number of
    clients. A priori :math:`1 / (1 + a)` is Beta(1/2, 1/2), so the coefficient of variation of the
    rates is half-Cauchy; given a, the population mean has Jeffreys' prior. A single client without
    a known prior keeps its own rate, with the error that Jeffreys' prior gives it.

    *Privacy.* Counts are sorted into 8 to 16 public cells in equal steps of the root (a cell for
    every count if `cap` is smaller); the last is "`cap` or more". Clients report their cell by
    subset selection (Ye and Barg, 2018), or a trusted server adds Gaussian noise to the histogram
    of cells (L2 sensitivity :math:`\sqrt 2`, replace one client). Estimates are averaged over gamma
    priors by the likelihood of the release, and intervals are those of gamma distributions with
    mean `means_` and standard deviation `stds_`. A grid prior takes 60 EM steps from that average;
    without a `high` it ends at four times the rate of `cap` events in the median exposure.

    *Published tables* (``unit="event"``, ``publish="clients"``; :ref:`publishing`): every client's
    number of events gets discrete Laplace noise. All attributes follow from the noised counts and
    from public numbers; :meth:`for_client` and :meth:`release` hand out the whole table. `delta`,
    `trust`, `method` and `uncertainty` have no effect.

    Otherwise the privacy promise does not cover the clients' own estimates: client i may see its
    own (joint differential privacy). Hand it over with :meth:`for_client`. Clients outside
    `participants` have an epsilon of 0, unless scores of their rows choose parameters.

    Memory beyond the input: 33 bytes per row and 64 per client (120 if their exposures differ); for
    subset selection another 17 bytes per cell and client while it draws.

    References
    ----------
    Bühlmann, H. and Gisler, A. (2005). A course in credibility theory and its applications.
    Springer.

    Ye, M. and Barg, A. (2018). Optimal schemes for discrete distribution estimation under locally
    differential privacy. IEEE Transactions on Information Theory, 64, 5662-5676.

    Examples
    --------
    >>> from pfl_sklearn.estimation import PoissonMean
    >>> model = PoissonMean().fit_counts([0, 3, 12, 4], exposure=[2.0, 5.0, 6.0, 8.0])
    >>> model.local_means_
    array([0. , 0.6, 2. , 0.5])
    >>> model.means_.round(2)
    array([0.49, 0.69, 1.64, 0.59])
    """

    # Exposure belongs to counts as ids belong to rows: without asking, a search would drop it.
    __metadata_request__fit = {"exposure": True}
    __metadata_request__predict = {"exposure": True}
    __metadata_request__score = {"exposure": True}

    _likelihood = "rate"
    _default_component = default_prior
    # The priors are those that intervals average over.
    _population_attributes = (*_PUBLIC_OF_RATES, "_new_client_std", "_priors")
    _range_of_means = (0.0, math.inf)
    _client_attributes = (
        *BaseClientMean._client_attributes,
        *("exposure_per_client_", "noise_std_", "_intervals"),
    )
    _state_attributes = ("_fitted_with_exposure", "_posterior_is_exact")

    prior: Any = parameter(
        default="gamma",
        ranges="no_validation",
        kw_only=False,
        text="""
            {"gamma", "grid"}, GammaPrior or GridPrior
                Population prior. Parameters that it leaves None are estimated. "grid" fits a
                population of any shape.
        """,
    )
    method: str = parameter(
        default="ml",
        ranges=[StrOptions({"ml", "moments"})],
        text="""
            {"ml", "moments"}
                How the prior is estimated:

                - "ml": marginal likelihood, which is negative binomial under a gamma prior. Grid
                  priors and private fits need it;
                - "moments": the credibility estimators of Bühlmann and Straub, with the variance
                  within clients that of the Poisson distribution.
        """,
    )
    uncertainty: str = UNCERTAINTY
    epsilon = parameter(
        also="""
            It protects a client's whole counts in the pooled statistics. Exposures and numbers of
            rows are public.
        """,
    )
    delta = parameter(
        default=0.0,
        also="""
            ``trust="central"`` adds such noise; local reports, the default, are pure and do not use
            it.
        """,
    )
    trust: str = parameter(
        default="local",
        ranges=[StrOptions({"local", "central"})],
        text="""
            {"local", "central"}
                "local": every client randomizes its own report, by subset selection. "central": a
                trusted server adds Gaussian noise to a histogram of counts; grid priors do not
                support it. The default trusts nobody, because answers of one of few kinds stand the
                noise; means do not. It has no effect with `publish`, whose server is trusted.
        """,
    )
    cap: int | None = parameter(
        default=None,
        ranges=[Interval(Integral, 1, 2**53, closed="both"), None],
        text="""
            int in [1, 2**53] or None
                Total count of a client up to which private reports tell counts apart; larger ones
                count as `cap`. It must be given when `epsilon` is finite, and has no effect
                otherwise. Choose a number that hardly any client exceeds, without looking at the
                data. A client's own estimate uses its whole count.
        """,
    )
    participants: Any = PARTICIPANTS
    unit: str = parameter(
        default="client",
        ranges=[StrOptions({"client", "event"})],
        text="""
            {"client", "event"}
                Whom `epsilon` protects: a client with all its counts, or a single event, which is
                there or not. "event" goes with ``publish="clients"``.
        """,
    )
    publish: str | None = PUBLISH
    target: str = TARGET
    rows_per_person: int | None = ROWS_PER_PERSON
    ledger = parameter()
    unseen: str = UNSEEN
    random_state = parameter()

    @fit_context(prefer_skip_nested_validation=True)
    def fit(
        self,
        X: TableLike,
        y: TableLike = None,
        *,
        groups: TableLike = None,
        exposure: TableLike = None,
        sample_weight: TableLike = None,
    ) -> Self:
        """Estimate the population and every client's rate.

        Parameters
        ----------
        X : array-like of n_rows rows
            Only its length and feature names are read.
        y : array-like of shape (n_rows,)
            Whole numbers of events, from 0 to 1e9. Without exposure they may be rates, as for
            scikit-learn's PoissonRegressor, with a warning.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row. None: one client, with a warning.
        exposure : array-like of shape (n_rows,), > 0, default=None
            Exposure in which the events of a row happened, in any unit. None: 1 for every row.
        sample_weight : array-like of shape (n_rows,), default=None
            Whole number of rows that each row stands for; a row of weight 0 is absent. Weights of
            rates are their exposure, and may be fractions. Refused when `epsilon` is finite.
        """
        prior = self._charged_prior(sample_weight)
        self._require_targets(y)
        private = math.isfinite(self.epsilon)
        columns = check_exposed_counts("y", y, exposure, private, rates=True)
        rows = read_rows(self, X, columns, groups, sample_weight)
        check_fractions(rows, exposure is not None)
        reduced = events_and_exposure(rows)
        attributes, report = self._estimate(prior, rows.clients.ids, reduced, exposure is not None)
        return self._store(
            rows.clients.ids, attributes, report, with_groups=groups is not None, X=X
        )

    @fit_context(prefer_skip_nested_validation=True)
    def fit_counts(
        self, counts: TableLike, exposure: TableLike = None, *, groups: TableLike = None
    ) -> Self:
        """Estimate from a table of counts.

        Parameters
        ----------
        counts : array-like of whole numbers, shape (n_rows,)
            Events, from 0 to 1e9.
        exposure : array-like of shape (n_rows,), > 0, default=None
            Exposure of every row. None: 1.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; rows of one client are added up. None: row i is client i.
        """
        prior = self._charged_prior(None)
        columns = check_exposed_counts("counts", counts, exposure, math.isfinite(self.epsilon))
        rows = FitRows(columns, clients_of_table(groups, len(columns)), None)
        reduced = events_and_exposure(rows)
        attributes, report = self._estimate(prior, rows.clients.ids, reduced, exposure is not None)
        # Rows of a table are clients in any case, so that predictions need their ids.
        return self._store(rows.clients.ids, attributes, report, with_groups=True)

    @fit_context(prefer_skip_nested_validation=True)
    def fit_statistics(self, statistics: ClientStatistics, *, exposure: str | None = None) -> Self:
        """Estimate from statistics of counts.

        Parameters
        ----------
        statistics : ClientStatistics
            Of one target, the counts; weights are numbers of rows, also with a finite `epsilon` (as
            rows of :meth:`fit_counts` are).
        exposure : str or None, default=None
            Feature that holds the exposure of every row. None: 1.

        Raises
        ------
        ValueError
            For several targets, counts or exposures out of their ranges, sums of counts or weights
            by client that are not whole numbers, and an exposure that is no feature. With a finite
            `epsilon` sums of counts are rounded, and both are cut to their ranges, unless clients
            are published.
        """
        check_statistics(statistics)
        check_columns_of_statistics(statistics, exposure)
        participant_mask(self.participants, statistics.clients)
        # A table that is published needs rows that were checked before they were summed.
        private = math.isfinite(self.epsilon) and self.publish is None
        if self.publish is not None:
            check_published_totals(statistics, counts_of_statistics(statistics, exposure, False)[0])
        prior = self._charged_prior(None)
        reduced = counts_of_statistics(statistics, exposure, private)
        ids = statistics.clients
        attributes, report = self._estimate(prior, ids, reduced, exposure is not None)
        return self._store(ids, attributes, report, with_groups=True)

    @fit_context(prefer_skip_nested_validation=True)
    def partial_fit(
        self,
        X: TableLike,
        y: TableLike = None,
        *,
        groups: TableLike = None,
        exposure: TableLike = None,
        sample_weight: TableLike = None,
    ) -> Self:
        """Fit to the rows of earlier calls and to these, of which statistics are kept.

        Parameters
        ----------
        X, y, groups, sample_weight : rows
            As in :meth:`fit`, with whole numbers of events; clients may be new.
        exposure : array-like of shape (n_rows,), > 0, default=None
            Exposure of every row; in all calls or in none. None: 1.

        Raises
        ------
        ValueError
            As ``fit``, with a finite `epsilon`, and after a fit by other methods, which keep no
            statistics.
        """
        check_accumulates(self)
        self._require_targets(y)
        counts, exposed = check_exposed_counts("y", y, exposure).T
        features, name = None, None
        if exposure is not None:
            features, name = pd.DataFrame({"exposure": exposed}), "exposure"
        statistics = accumulate_statistics(self, X, counts, groups, sample_weight, features)
        return self._fit_accumulated(X, statistics, exposure=name)

    def _fit_statistics_params(self, statistics: ClientStatistics) -> dict[str, Any]:
        return {"exposure": "exposure"} if statistics.n_features else {}

    def predict(
        self,
        X: TableLike,
        *,
        groups: TableLike = None,
        exposure: TableLike = None,
        return_std: bool = False,
    ) -> Floats | tuple[Floats, Floats]:
        """Expected count of every row: its exposure times its client's or the population's rate.

        Parameters
        ----------
        X : array-like of n_rows rows
            Only its length and feature names are read.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.
        exposure : array-like of shape (n_rows,), > 0, default=None
            Exposure of every row; needed if ``fit`` got exposure. None: 1 for every row.
        return_std : bool, default=False
            Also return the standard deviation of the expected count (not of a new count).
        """
        rates, stds = super().predict(X, groups=groups, return_std=True)
        exposure = self._exposure_of(rates, exposure)
        return (exposure * rates, exposure * stds) if return_std else exposure * rates

    def score(
        self,
        X: TableLike,
        y: TableLike = None,
        *,
        groups: TableLike = None,
        exposure: TableLike = None,
        sample_weight: TableLike = None,
    ) -> float:
        """Share of the Poisson deviance explained, each row by its own client's rate.

        Parameters
        ----------
        X, groups, exposure : rows, their clients and exposures
            As in :meth:`predict`.
        y : array-like of shape (n_rows,)
            Observed counts.
        sample_weight : array-like of shape (n_rows,), default=None
            Weights of the rows in the score.

        Returns
        -------
        float
            One minus the deviance over that of one rate for all rows. It is 1 if no row is missed,
            and minus infinity if there are events where none are possible.
        """
        expected = self.predict(X, groups=groups, exposure=exposure)
        counts, exposed = check_exposed_counts("y", y, exposure, rates=True).T
        check_consistent_length(X, counts)
        weights = np.ones(len(counts)) if sample_weight is None else np.asarray(sample_weight)
        pooled = exposed * ((weights @ counts) / (weights @ exposed))
        deviance, baseline = (_deviance(counts, mean, weights) for mean in (expected, pooled))
        if baseline > 0:
            return float(1 - deviance / baseline)
        return 1.0 if deviance == 0 else 0.0  # nothing to explain, as in scikit-learn's R^2

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = True
        return tags

    def _interval(self, level):
        """Bounds of the central intervals: quantiles of the posterior, or of a matched gamma."""
        if hasattr(self, "_intervals"):  # of a published table
            return self._intervals.central(level)
        if not self._posterior_is_exact:  # an average over priors, as after a release
            tails = (1 - level) / 2, (1 + level) / 2
            return GammaPriors.matched_quantiles(self.means_, self.stds_, tails)
        table = exposure_table(*self._client_counts())
        return central_intervals(table, self.prior_, self._priors, level)

    def _client_counts(self):
        """Events and exposure (m,) of the clients."""
        # A model of for_client has its client's rate alone, from which the counts follow.
        exposure = self.exposure_per_client_
        return nearly_whole(self.local_means_ * exposure), exposure

    def _privacy_events(self):
        """Accounting events of a fit: () if nothing is released."""
        if self.publish is not None:
            return published_events(self)
        zero_out = HISTOGRAM_ZERO_OUT_SENSITIVITY / HISTOGRAM_SENSITIVITY
        return count_events(resolve_prior(self), self, zero_out)

    def _check_parameters(self, prior, sample_weight):
        """Refuse combinations of parameters that do not go together."""
        if is_publishing(self, "event"):
            check_published_counts(self, prior, POISSON, ("participants", "cap"), sample_weight)
            return
        if math.isfinite(self.epsilon) and sample_weight is not None:
            raise ValueError("sample_weight is not supported with a finite epsilon.")
        # With a known prior clients send nothing, so that trust and cap do not matter.
        releases = math.isfinite(self.epsilon) and not prior.is_known
        if releases:
            check_central_delta(self)
            if self.cap is None:
                raise ValueError(
                    "cap must be given when epsilon is finite: the count that hardly any client "
                    "exceeds, chosen without looking at the data; got None."
                )
            if self.trust == "central" and not isinstance(prior, GammaPrior):
                raise ValueError(
                    f"prior={type(prior).__name__} does not go with trust='central' and a finite "
                    "epsilon; expected 'gamma', or trust='local'."
                )
        if self.method == "moments" and (releases or isinstance(prior, GridPrior)):
            raise ValueError(
                f"method='moments' does not go with {type(prior).__name__} and epsilon="
                f"{self.epsilon!r}; expected 'ml'."
            )

    def _exposure_of(self, rates, exposure):
        """Checked exposure (n,) of the rows of a prediction, or 1."""
        if exposure is not None:
            return check_exposed_counts("predictions", np.zeros(len(rates)), exposure)[:, 1]
        if self._fitted_with_exposure:
            raise ValueError(
                f"This {type(self).__name__} was fitted with exposure, and predicts counts. Pass "
                "exposure=, which may be ones for the rates of a unit of exposure (inside "
                "scikit-learn's tools: sklearn.set_config(enable_metadata_routing=True))."
            )
        return 1.0

    def _estimate(self, prior, ids, reduced, with_exposure):
        """Fit to events, exposure and numbers of rows of clients: attributes and privacy report."""
        events, exposed, n_rows = reduced
        if math.isfinite(self.epsilon):  # else too many are refused
            events = np.minimum(events, LARGEST_TOTAL)
        if self.publish is not None:
            attributes, report, spread = publish_counts(
                self, prior, POISSON, events, exposed, "exposures are public"
            )
            return attributes | _of_exposure(n_rows, exposed, spread, with_exposure), report
        table = exposure_table(events, exposed)
        sends = participant_mask(self.participants, ids)
        senders = table if sends.all() else exposure_table(events[sends], exposed[sends])
        # In a private fit under a known prior, clients send nothing.
        entries: dict[str, Any] | None = {} if math.isinf(self.epsilon) else None
        releases = math.isfinite(self.epsilon) and not prior.is_known
        if releases:
            fitted, entries = rates_from_release(table, senders, sends, prior, self)
        else:
            fitted = estimate_exactly(table, senders, prior, self, GammaPriors)
        new_variance = new_client_variance(fitted)  # follows from the population alone
        if releases:
            fitted = keep_own_if_single(fitted, table, GammaPriors)
        attributes = fitted.attributes(table)
        attributes |= _of_exposure(n_rows, exposed, math.sqrt(new_variance), with_exposure)
        per_client = (*CLIENT_ATTRIBUTES, "exposure_per_client_")
        report = report_of_fit(self, _PUBLIC_OF_RATES, per_client, sends, entries)
        return attributes, report


def _of_exposure(n_rows, exposed, new_client_std, with_exposure):
    """Fitted attributes that other counts do not have."""
    return {
        "n_samples_per_client_": n_rows,
        "exposure_per_client_": exposed,
        "_new_client_std": new_client_std,
        "_fitted_with_exposure": with_exposure,
    }


def _deviance(counts, expected, weights):
    """Poisson deviance of counts (n,), infinite for events where none are expected."""
    with np.errstate(divide="ignore"):
        return 2 * weights @ (xlogy(counts, counts) - xlogy(counts, expected) - counts + expected)
