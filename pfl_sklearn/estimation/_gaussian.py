"""Personalized means of clients under a Gaussian or a mixture prior."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from numbers import Integral, Real
from typing import Any, NamedTuple, Self

import numpy as np
from sklearn.utils import check_array

from pfl_sklearn._client_means import (
    CLIENT_ATTRIBUTES,
    BaseClientMean,
    MeanRegressorMixin,
    participant_mask,
    report_of_fit,
)
from pfl_sklearn._columns import check_float_range, name_bad_columns
from pfl_sklearn._compat import Interval, StrOptions, fit_context
from pfl_sklearn._parameters import (
    NOT_NEGATIVE,
    POSITIVE,
    UNSEEN,
    PrivateFit,
    parameter,
    with_parameters,
)
from pfl_sklearn._typing import TableLike
from pfl_sklearn.base import read_rows
from pfl_sklearn.estimation._fields import (
    BOUNDS,
    CLIENTS,
    GRID,
    PARTICIPANTS,
    PUBLISH,
    ROWS_PER_PERSON,
    TARGET,
    UNCERTAINTY,
)
from pfl_sklearn.estimation._gaussian_release import (
    gaussian_from_release,
    gaussian_prior_events,
)
from pfl_sklearn.estimation._made_up_tables import PlansGaussianMeans
from pfl_sklearn.estimation._mean_estimates import (
    exact_means,
    gaussian_from_means,
    means_of_statistics,
)
from pfl_sklearn.estimation._mean_releases import (
    MECHANISMS,
    bounded_means,
    bounded_means_of_statistics,
    check_gaussian_prior,
    check_release,
    selected_release,
)
from pfl_sklearn.estimation._mixture_means import (
    check_mixture_prior,
    mixture_from_means,
    mixture_from_release,
    mixture_prior_events,
)
from pfl_sklearn.estimation._published._base import (
    PublishesClients,
    is_publishing,
    published_events,
)
from pfl_sklearn.estimation._published._gaussian import (
    check_has_groups,
    check_published_means,
    published_of_rows,
    published_of_statistics,
)
from pfl_sklearn.estimation._published._release import as_numbers
from pfl_sklearn.priors import DiscretePrior, GaussianMixturePrior, GaussianPrior
from pfl_sklearn.priors._prior import known_vector
from pfl_sklearn.priors._resolve import default_prior, resolve_prior
from pfl_sklearn.privacy._spending import UNPROTECTED
from pfl_sklearn.statistics import ClientStatistics
from pfl_sklearn.statistics._accumulate import (
    AccumulatedStatisticsMixin,
    accumulate_statistics,
    check_accumulates,
    check_statistics,
)

_PUBLIC_OF_MEANS = ("population_mean_", "population_mean_std_", "prior_", "noise_variance_", "icc_")


class _Estimators(NamedTuple):
    """Estimators of the clients' means under one class of priors."""

    methods: tuple[str, ...]  # estimators of the variances
    check: Callable[..., None]  # of the other parameters, before any data is touched
    events: Callable[..., tuple[Any, ...]]  # accounting events, for a finite epsilon
    from_means: Callable[..., Any]  # FittedMeans from exact means
    from_release: Callable[..., tuple[Any, ...]]  # FittedMeans and entries of the report


_GAUSSIAN = check_gaussian_prior, gaussian_prior_events, gaussian_from_means, gaussian_from_release
_MIXTURE = check_mixture_prior, mixture_prior_events, mixture_from_means, mixture_from_release
# A mixture has no restricted likelihood, so "reml", the default, means "ml" there. Two moments do
# not identify its components, and Algorithm 3 (ICLR) is for points alone.
_ESTIMATORS = {
    GaussianPrior: _Estimators(("reml", "ml", "moments"), *_GAUSSIAN),
    GaussianMixturePrior: _Estimators(("reml", "ml"), *_MIXTURE),
    DiscretePrior: _Estimators(("reml", "ml", "printed"), *_MIXTURE),
}


@with_parameters
class GaussianMean(
    MeanRegressorMixin,
    PlansGaussianMeans,
    PublishesClients,
    AccumulatedStatisticsMixin,
    PrivateFit,
    BaseClientMean,
):
    r"""Each client's mean, shrunk towards the population as far as the data warrant.

    Rows :math:`x_{ij}` of client i vary around its mean, and the means around the population's:

    .. math:: x_{ij} \sim N(\theta_i, \sigma_x^2 I), \qquad \theta_i \sim N(\mu, \sigma_\theta^2 I).

    With :math:`s_i^2 = \sigma_x^2 / n_i` the estimate is
    :math:`a_i \bar x_i + (1 - a_i) \hat\mu`, :math:`a_i = \sigma_\theta^2 /
    (\sigma_\theta^2 + s_i^2)`, where :math:`\hat\mu` weighs clients by
    :math:`1 / (\sigma_\theta^2 + s_i^2)`. The observations are the targets `y`; features have no
    effect.

    Attributes
    ----------
    clients_ : ndarray of shape (n_clients,)
        Sorted ids; row i of every per-client array is ``clients_[i]``.
    n_samples_per_client_ : ndarray of shape (n_clients,)
        Number of rows of each client; with a list of `clients` the mean of what noised ones leave
        plausible, at least 1.
    means_, stds_ : ndarrays of shape (n_clients,) or (n_clients, d)
        Posterior mean and standard deviation of each client's mean. The standard deviation includes
        the uncertainty of the population mean and, as `uncertainty` says, of the variances. Under a
        mixture prior it includes only what a release adds to the components' means.
    local_means_ : ndarray of shape (n_clients,) or (n_clients, d)
        Each client's own (weighted) mean; with ``publish="clients"`` plus noise.
    noise_std_ : ndarray of shape (n_clients,)
        Standard deviation of that noise, with ``publish="clients"``.
    shrinkage_ : ndarray of the shape of `means_`
        Weight on the population: 0 is the client's own mean, 1 the population's. Under a mixture
        prior it is averaged over components; under a DiscretePrior it is 1.
    responsibilities_ : ndarray of shape (n_clients, n_components)
        Posterior probability of each component, for mixture priors.
    prior_ : GaussianPrior, GaussianMixturePrior or DiscretePrior
        The prior with its values: `mean` (d,) and `covariance` (d, d), or `weights` (k,) with
        `means` (k, d) and `covariances` (k, d, d), or with `points` (k, d).
    noise_variance_ : float, or ndarray of shape (d,)
        Variance of a row around its client's mean. An array if the prior is diagonal or a mixture
        and `y` is two-dimensional.
    population_mean_, population_mean_std_ : float or ndarray of shape (d,)
        Population mean and its standard error (0 if the mean was given).
    icc_ : float or ndarray of shape (d,)
        Intraclass correlation: the share of a row's variance that lies between clients.
    log_likelihood_ : float
        Maximized criterion (restricted for "reml"), in nats. NaN after a release, and under a
        mixture prior for a single client. Infinity if the rows of every client are equal.
    n_features_in_, feature_names_in_ : int, and ndarray of str
        Number of columns of `X`, and their names, if it has any.
    privacy_ : PrivacyReport
        What the fit protects, how, and what is released.

    Raises
    ------
    ValueError
        For ids that are missing or of mixed types, missing values in `y`, values above 1e150 or all
        below 1e-140 (if nothing is released), an unknown noise variance where no client has two
        rows, fewer distinct client means than components, a finite `epsilon` without `clip_norm` or
        with weights, fewer than two participants, and options that do not go together.
    ImportError
        For discrete Gaussian noise without opendp.

    Notes
    -----
    Theorems 1 and 2 (ICLR) of Ozkara et al. (2023), with unequal numbers of rows and estimated
    variances; :ref:`estimation` has the formulas. A row of weight w has variance
    :math:`\sigma_x^2 / w`.

    *Few clients* (:ref:`few-clients`). Errors and :meth:`credible_interval` are averaged over
    variances by the restricted likelihood, with a Beta(1/2, 1/2) prior of the intraclass
    correlation: in full up to 100 clients, not at all from 1,000, in part in between. Mixture
    priors and releases take variances as known.

    *Private releases.* Means are clipped in L2 and get the noise of the analytic Gaussian mechanism
    (the printed noise per coordinate is :math:`\sqrt d` too small). Every client leaves its own
    release out of the mean that it shrinks towards. The same release pays for unknown variances:
    squared clipped means, and row variances cut at `noise_variance_bound` (with a warning if the
    noise variance is close to it). All variances of a ``covariance_type="diag"`` prior have to be
    known, and so has the variance between clients for a coarse quantizer. Every client keeps its
    own mean, with a warning, if the released noise variance is below two standard deviations of its
    noise; then `stds_` are standard errors of the client's own rows (NaN for one row). Give
    `noise_variance` where you can, above all under local trust.

    *Participants* (Remark 7, ICLR). The others send nothing and have an epsilon of 0, unless scores
    of their rows choose parameters. A random choice of participants does not lower the epsilon.

    *Discrete Gaussian noise* (Remark 4, ICLR) is 7 to 11 % larger at a delta of 1e-5 and an
    epsilon from 8 down to 0.1. A ledger counts such a fit by its epsilon and delta alone, so
    several fits need a smaller `delta` each.

    *Mixture priors* (Theorem 6 and Algorithm 3, ICLR) maximize the marginal likelihood of the
    client means, with the noise variance pooled within clients. Releases need `noise_variance` and
    estimate spherical covariances: by :class:`~pfl_sklearn.privacy.PrivateClustering` under central
    trust, from the reports otherwise. Every client keeps its own mean, with a warning, if the
    released gain is too small for its noise, or if BIC prefers one Gaussian. So does a client that
    was clipped, or is implausibly far from every component (probability 1e-3).

    *Published tables* (``unit="row"``, ``publish="clients"``; :ref:`publishing`). Sums of rows get
    discrete Laplace noise, with .9 of `epsilon`, and squares of rows around their clients' means
    with the rest, unless `noise_variance` is given. All attributes follow from these and from
    public numbers, and may be published; :meth:`for_client` and :meth:`release` hand out the whole
    table. Estimates and intervals are averaged over the populations that the release leaves
    plausible, with uniform priors within `bounds`. With a list of `clients`, numbers of
    rows get .3 of `epsilon`, squares .1 and sums the rest. Otherwise, where every client has one
    row, and `noise_variance` is not given, `target` must be "table", and `noise_variance_` is NaN.
    `delta`, `trust`, `mechanism`, `method` and `uncertainty` have no effect.

    Otherwise the privacy promise does not cover the clients' own estimates (`means_`): client i may
    see its own (joint differential privacy). Hand it over with :meth:`for_client`.

    Memory beyond the input: ``8 (d + 1)`` bytes per row and ``40 (d + 1)`` per client; for k
    components another ``8 (2 d k + d + 3 k + 5)`` per client; below 1,000 clients with
    ``uncertainty="full"`` another 3,700 d per client, of which 920 d stay.

    References
    ----------
    Ozkara, K., Girgis, A. M., Data, D. and Diggavi, S. (2023). A statistical framework for
    personalized federated learning and estimation: theory, algorithms, and privacy. ICLR.

    Examples
    --------
    >>> from pfl_sklearn.estimation import GaussianMean
    >>> y = [1.0, 3.0, 5.0, 7.0, 2.0, 4.0]
    >>> model = GaussianMean().fit([[0]] * 6, y, groups=["a", "a", "b", "b", "c", "c"])
    >>> model.means_.round(2)
    array([2.38, 5.46, 3.15])
    >>> model.predict([[0]] * 3, groups=["a", "b", "new"]).round(2)
    array([2.38, 5.46, 3.67])
    """

    _likelihood = "mean"
    _default_component = default_prior
    # Intervals are cut to a client as arrays are, so that its model holds its own posterior alone.
    _client_attributes = (
        *BaseClientMean._client_attributes,
        *("responsibilities_", "noise_std_", "_intervals"),
    )
    # The deviation of a new client follows from the population, so that it costs no privacy.
    _population_attributes = (*_PUBLIC_OF_MEANS, "_new_client_std")

    prior: Any = parameter(
        default="gaussian",
        ranges="no_validation",
        kw_only=False,
        text="""
            {"gaussian", "gaussian_mixture", "discrete"} or a prior
                Population prior: a name, or a GaussianPrior, GaussianMixturePrior or DiscretePrior.
                Parameters of the prior that are None are estimated; given ones are known. With
                ``covariance_type="diag"`` of a GaussianPrior, every output has its own variances;
                "full" and "low_rank" are refused.
        """,
    )
    method: str = parameter(
        default="reml",
        ranges=[
            StrOptions({name for estimators in _ESTIMATORS.values() for name in estimators.methods})
        ],
        text="""
            {"reml", "ml", "moments", "printed"}
                How unknown variances are estimated:

                - "reml", "ml": restricted or full maximum likelihood of the client means. For
                  mixture priors both mean "ml";
                - "moments": the credibility estimators of Bühlmann and Straub, with the clients'
                  sums of weights (or numbers of rows), at least 0;
                - "printed": Algorithm 3 (ICLR) of the paper, for a DiscretePrior.

                With a finite `epsilon` and central trust, moments are released and `method` has no
                effect.
        """,
    )
    noise_variance: Any = parameter(
        default=None,
        ranges=[NOT_NEGATIVE, "array-like", None],
        text=r"""
            float, array-like of shape (d,) or None
                Variance :math:`\sigma_x^2` of a row around its client's mean. None: estimated.
                Mixture priors take a single number, and require it when means are released.
        """,
    )
    uncertainty: str = UNCERTAINTY
    epsilon = parameter(also="It protects a client's whole data in the pooled statistics.")
    delta = parameter()
    clip_norm: float | None = parameter(
        default=None,
        ranges=[POSITIVE, None],
        text="""
            float or None
                L2 radius, in units of `y`, of a ball around `center`. Client means are projected to
                this ball before they are released. Choose it without looking at the data; it is
                needed when `epsilon` is finite. With ``mechanism="quantizer"`` it is the half width
                of each coordinate's range.
        """,
    )
    center: Any = parameter(
        default=0.0,
        ranges=[Interval(Real, None, None, closed="neither"), "array-like"],
        text="""
            float or array-like of shape (d,)
                Centre of this ball. The closer it is to the clients' means, the smaller `clip_norm`
                can be.
        """,
    )
    noise_variance_bound: float | None = parameter(
        default=None,
        ranges=[POSITIVE, None],
        text="""
            float or None
                Upper bound, in squared units of `y`, on the variance of a row around its client's
                mean, summed over outputs. Each client's own estimate is cut at this bound before it
                is released. Choose it without looking at the data. It is needed only if `epsilon`
                is finite and `noise_variance` is None; None takes ``clip_norm ** 2``.
        """,
    )
    trust: str = parameter(
        default="central",
        ranges=[StrOptions({"central", "local"})],
        text="""
            {"central", "local"}
                Who adds the noise: a trusted server, once to the sum, or every client to its own
                mean. The default trusts a server, because local noise needs thousands of clients.
        """,
    )
    mechanism: str = parameter(
        default="gaussian",
        ranges=[StrOptions(MECHANISMS)],
        text="""
            {"gaussian", "discrete_gaussian", "quantizer"}
                How messages are released:

                - "gaussian": with Gaussian noise;
                - "discrete_gaussian": every client rounds its message at random to a public grid
                  and adds whole-number noise, which opendp draws exactly (``trust="local"`` only;
                  ``pip install opendp``). It takes 20 to 40 microseconds per client and coordinate;
                - "quantizer": rounded to `n_bits` per coordinate. This claims no privacy (`epsilon`
                  must be inf).
        """,
    )
    n_bits: int | None = parameter(
        default=None,
        ranges=[Interval(Integral, 1, 32, closed="both"), None],
        text="""
            int or None
                Bits per coordinate, 1 to 32. Needed for ``mechanism="quantizer"``. With
                "discrete_gaussian", None takes enough bits to keep what rounding adds to the noise
                below 1 %; fewer make the noise larger.
        """,
    )
    participants: Any = PARTICIPANTS
    unit: str = parameter(
        default="client",
        ranges=[StrOptions({"client", "row"})],
        text="""
            {"client", "row"}
                Whom `epsilon` protects: a client with all its rows, or a single row, whose client
                is public. "row" goes with ``publish="clients"``.
        """,
    )
    publish: str | None = PUBLISH
    bounds: Any = BOUNDS
    grid: float | None = GRID
    clients: Any = CLIENTS
    target: str = TARGET
    rows_per_person: int | None = ROWS_PER_PERSON
    ledger = parameter()
    unseen: str = UNSEEN
    random_state = parameter(
        also="""
            With ``mechanism="discrete_gaussian"`` a seed fixes the roundings alone, and fits
            differ: the noise always comes from the operating system.
        """,
    )

    @fit_context(prefer_skip_nested_validation=True)
    def fit(
        self,
        X: TableLike,
        y: TableLike = None,
        *,
        groups: TableLike = None,
        sample_weight: TableLike = None,
    ) -> Self:
        """Estimate the population and every client's mean.

        Parameters
        ----------
        X : array-like of n_rows rows
            Only its length and feature names are read.
        y : array-like of shape (n_rows,) or (n_rows, d)
            Observations.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row. None: one client, with a warning.
        sample_weight : array-like of shape (n_rows,), default=None
            Precision weights; a row of weight 0 is absent. Refused when `epsilon` is finite.
        """
        check_has_groups(self, groups)
        prior = self._charged_prior(sample_weight)
        y = self._checked_targets(y)
        if self.publish is not None:
            published = published_of_rows(self, prior, X, y, groups)
            return self._store(*published, with_groups=groups is not None, X=X)
        # Estimates see outputs as columns; `attributes` takes the axis away again.
        columns = y[:, None] if y.ndim == 1 else y
        rows = read_rows(self, X, columns, groups, sample_weight)
        sources = partial(exact_means, rows), partial(bounded_means, rows, self)
        fitted, report = self._estimate(prior, rows.clients.ids, *sources)
        attributes = fitted.attributes(one_output=y.ndim == 1)
        return self._store(
            rows.clients.ids, attributes, report, with_groups=groups is not None, X=X
        )

    @fit_context(prefer_skip_nested_validation=True)
    def fit_statistics(self, statistics: ClientStatistics) -> Self:
        """Estimate the population and every client's mean from statistics of the rows.

        Parameters
        ----------
        statistics : ClientStatistics
            Of one target or several; features have no effect. With a finite `epsilon` they need a
            `target_bound`, whatever it is, so that their sums have no centre that depends on rows.
            Rows are not scaled to it: `clip_norm` bounds the means of clients. With
            ``publish="clients"`` rows have to be cut to `bounds` before.

        Raises
        ------
        ValueError
            As ``fit``; with a finite `epsilon` or a quantizer also for statistics of weighted rows,
            with a finite `epsilon` for those without `target_bound`, and with
            ``publish="clients"`` for those of several targets, of rows beyond `bounds` or left out,
            too inexact for their grid, without `target_bound`, or with a list of `clients`.
        """
        check_statistics(statistics)
        if self.publish is not None:
            published = published_of_statistics(self, statistics)
            return self._store(*published, with_groups=True)
        weights = statistics._weights()
        self._check_statistics(statistics, weights)
        prior = self._charged_prior(weights)
        exact = partial(means_of_statistics, statistics)
        bounded = partial(bounded_means_of_statistics, statistics, self)
        fitted, report = self._estimate(prior, statistics.clients, exact, bounded)
        attributes = fitted.attributes(one_output=statistics.n_targets == 1)
        return self._store(statistics.clients, attributes, report, with_groups=True)

    @fit_context(prefer_skip_nested_validation=True)
    def partial_fit(
        self,
        X: TableLike,
        y: TableLike = None,
        *,
        groups: TableLike = None,
        sample_weight: TableLike = None,
    ) -> Self:
        """Fit to the rows of earlier calls and to these, of which statistics are kept.

        Parameters
        ----------
        X, y, groups, sample_weight : rows
            As in :meth:`fit`; clients may be new.

        Raises
        ------
        ValueError
            As ``fit``, with a finite `epsilon`, and after a fit by other methods, which keep no
            statistics.
        """
        check_accumulates(self)
        y = self._checked_targets(y)
        statistics = accumulate_statistics(self, X, y, groups, sample_weight, None)
        return self._fit_accumulated(X, statistics)

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        tags.target_tags.single_output = True
        return tags

    def _check_parameters(self, prior, sample_weight):
        """Refuse parameters that do not go together, before any data is touched."""
        if is_publishing(self, "row"):
            check_published_means(self, prior, sample_weight)
            return
        estimators, release = _ESTIMATORS[type(prior)], selected_release(self)
        if release is not None:
            check_release(release, self, sample_weight)
        if self.method not in estimators.methods:
            raise ValueError(
                f"method={self.method!r} does not go with {type(prior).__name__}; expected "
                f"{' or '.join(map(repr, estimators.methods))}."
            )
        estimators.check(release, prior, self)

    def _check_statistics(self, statistics, weights):
        """Refuse what does not go with the columns and clients, before the ledger is charged."""
        d = statistics.n_targets
        known_vector("center", self.center, d)
        known_vector("noise_variance", self.noise_variance, d, "finite and non-negative")
        participant_mask(self.participants, statistics.clients)
        if math.isfinite(self.epsilon) and weights is None and statistics.target_bound is None:
            raise ValueError(
                "statistics of a private fit need a public target_bound, which sets the unit of "
                "their sums; give it to from_rows, from_frame or from_chunks."
            )

    def _checked_targets(self, y):
        """Validated observations (n,) or (n, d)."""
        self._require_targets(y)
        is_released = selected_release(self) is not None
        if self.publish is not None:  # a refusal of an odd value would tell that it is there
            y = as_numbers(y)
        with name_bad_columns(private=is_released):
            y = check_array(
                y,
                dtype=np.float64,
                ensure_2d=False,
                input_name="y",
                ensure_min_samples=0,
                ensure_all_finite=self.publish is None,
            )
        if not is_released:  # with a release, a refusal would reveal a client's values
            check_float_range("y", y.ravel())
        return y

    def _estimate(self, prior, ids, exact, bounded):
        """Fitted population and clients, and the privacy report.

        ``exact(sends)`` are the ClientMeans of some clients, ``bounded()`` the BoundedMeans of all.
        """
        estimators, release = _ESTIMATORS[type(prior)], selected_release(self)
        sends = participant_mask(self.participants, ids)
        if release is None:
            fitted, entries = estimators.from_means(exact, sends, prior, self), {}
        else:
            fitted, entries = estimators.from_release(release, bounded(), sends, prior, self)
        of_mixtures = () if fitted.responsibilities is None else ("responsibilities_",)
        unprotected = (*CLIENT_ATTRIBUTES, "log_likelihood_", *of_mixtures)
        return fitted, report_of_fit(self, _PUBLIC_OF_MEANS, unprotected, sends, entries)

    def _interval(self, level):
        """Bounds of the central intervals; quantiles where errors are averaged over variances."""
        # Releases, mixture priors and "plug_in" count variances as known: posteriors are normal.
        if not hasattr(self, "_intervals"):
            return super()._interval(level)
        bounds = self._intervals.central(level)
        return tuple(bound.reshape(self.means_.shape) for bound in bounds)

    def _privacy_events(self):
        """Accounting events of a fit: () if nothing is released."""
        if math.isinf(self.epsilon):  # a quantizer, too, protects nobody
            return UNPROTECTED
        if self.publish is not None:
            return published_events(self)
        prior = resolve_prior(self)
        return _ESTIMATORS[type(prior)].events(selected_release(self), prior, self)

    @property
    def _noise_seed(self):
        """Seed with which the noise can be drawn again, or None."""
        release = selected_release(self)
        # Where the operating system draws the noise, a seed does not reproduce it.
        return None if release is not None and not release.follows_seed else self.random_state
