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
    OWN_ESTIMATES,
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
from pfl_sklearn._variance_averaging import UNCERTAINTIES
from pfl_sklearn.base import read_rows
from pfl_sklearn.estimation._gaussian_release import (
    gaussian_from_release,
    gaussian_prior_events,
)
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
    release_of,
)
from pfl_sklearn.estimation._mixture_means import (
    check_mixture_prior,
    mixture_from_means,
    mixture_from_release,
    mixture_prior_events,
)
from pfl_sklearn.priors import DiscretePrior, GaussianMixturePrior, GaussianPrior
from pfl_sklearn.priors._prior import known_vector
from pfl_sklearn.priors._support import default_prior, resolve_prior
from pfl_sklearn.privacy._spending import UNPROTECTED
from pfl_sklearn.statistics import ClientStatistics
from pfl_sklearn.statistics._accumulate import KeepsStatisticsMixin, check_statistics, with_kept

_PUBLIC_OF_MEANS = ("population_mean_", "population_mean_std_", "prior_", "noise_variance_", "icc_")


class _Estimators(NamedTuple):
    """Estimators of the clients' means under one class of priors."""

    methods: tuple[str, ...]  # the estimators of the variances that the prior has
    check: Callable[..., None]  # of the other parameters, before any data is touched
    events: Callable[..., tuple[Any, ...]]  # of the accounting, for a finite epsilon
    from_means: Callable[..., Any]  # FittedMeans, where clients send exact means
    from_release: Callable[..., tuple[Any, ...]]  # the same, with entries of the report


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
class GaussianMean(MeanRegressorMixin, KeepsStatisticsMixin, PrivateFit, BaseClientMean):
    r"""Each client's mean, shrunk towards the population as far as the data warrant.

    Rows :math:`x_{ij}` of client i vary around its mean, and the means around the population's:

    .. math:: x_{ij} \sim N(\theta_i, \sigma_x^2 I), \qquad \theta_i \sim N(\mu, \sigma_\theta^2 I).

    With :math:`s_i^2 = \sigma_x^2 / n_i` the estimate is
    :math:`a_i \bar x_i + (1 - a_i) \hat\mu`, :math:`a_i = \sigma_\theta^2 /
    (\sigma_\theta^2 + s_i^2)`, where :math:`\hat\mu` weighs clients by
    :math:`1 / (\sigma_\theta^2 + s_i^2)`. The observations are the targets `y`. Of `X` only the
    length and the feature names are read, so the estimator can serve as a baseline in pipelines and
    searches.

    Attributes
    ----------
    clients_ : ndarray of shape (n_clients,)
        Sorted ids; row i of every per-client array is ``clients_[i]``.
    n_samples_per_client_ : ndarray of shape (n_clients,)
        Number of rows of each client.
    means_, stds_ : ndarrays of shape (n_clients,) or (n_clients, d)
        Posterior mean and standard deviation of each client's mean. The standard deviation includes
        the uncertainty of the population mean and, as `uncertainty` says, of the variances. With a
        mixture prior it includes only the uncertainty that a release added to the components'
        means. Where a released noise variance is of no use, it is the standard error of the
        client's own rows, and NaN for a single row.
    local_means_ : ndarray of shape (n_clients,) or (n_clients, d)
        Each client's own (weighted) mean.
    shrinkage_ : ndarray of the shape of `means_`
        Weight on the population: 0 is the client's own mean, 1 the population's. With a mixture
        prior, one minus the weight on the client's own mean, averaged over components by
        responsibility. It is always 1 for a DiscretePrior, whose estimates are averages of points.
    responsibilities_ : ndarray of shape (n_clients, n_components)
        Posterior probability of each component, for mixture priors.
    prior_ : GaussianPrior, GaussianMixturePrior or DiscretePrior
        The prior with its values: `mean` (d,) and `covariance` (d, d), or `weights` (k,) with
        `means` (k, d) and `covariances` (k, d, d), or with `points` (k, d).
    noise_variance_ : float, or ndarray of shape (d,)
        Variance of a row around its client's mean. An array if the prior is diagonal or a mixture
        and `y` is two-dimensional.
    population_mean_, population_mean_std_ : float or ndarray of shape (d,)
        Population mean and its standard error (0 if the mean was given). With a mixture prior, the
        mixture's mean and the standard error of a weighted mean of clients with the mixture's
        variances.
    icc_ : float or ndarray of shape (d,)
        Intraclass correlation: the share of a row's variance that lies between clients.
    log_likelihood_ : float
        Maximized criterion (restricted for "reml"), in nats. NaN after a release, and under a
        mixture prior for a single client. Infinity if the rows of every client are equal.
    n_features_in_ : int
        Number of columns of `X`.
    feature_names_in_ : ndarray of shape (`n_features_in_`,)
        Names of the columns of `X`, if it has any.
    privacy_ : PrivacyReport
        What the fit protects, how, and what is released.

    Raises
    ------
    ValueError
        - If ids are missing or of mixed types, or `y` holds NaN.
        - If the noise variance is unknown and no client has two rows.
        - If nothing is released and `y` holds values above 1e150, or only values below 1e-140 (and
          not 0).
        - If `epsilon` is finite without `clip_norm`, or with weights or a quantizer.
        - If discrete Gaussian noise is asked for with central trust, or with too few bits.
        - If `method`, the covariance type, the release or `participants` does not go with the
          prior, or fewer than two clients of the table take part.
        - If fewer client means differ (by more than rounding) than an unknown mixture has
          components.
    ImportError
        If discrete Gaussian noise is asked for without opendp.

    See Also
    --------
    BernoulliMean : The same for proportions.
    pfl_sklearn.inspection.ShrinkageDisplay : Plot of local and shrunk estimates.

    Notes
    -----
    The estimator follows Theorems 1 and 2 (ICLR) of Ozkara et al. (2023), but numbers of rows may
    differ and the variances are estimated. Weights are precision weights: a row of weight w has
    variance :math:`\sigma_x^2 / w`, and a row of weight 0 is absent.

    *Few clients.* Estimates use the best variances alone. Their errors are averaged over other
    variances, weighted by the restricted likelihood and a weak prior: the intraclass correlation is
    Beta(1/2, 1/2). :meth:`credible_interval` gives the quantiles of the average. That applies in
    full up to 100 clients, not at all from 1,000, and in between to a share that falls with the
    logarithm of their number (:ref:`few-clients`). It leaves out variances that are given, mixture
    priors and releases: there, variances count as known.

    *Private releases* (:ref:`estimation` has the formulas). Means are clipped in L2 and get the
    noise of the analytic Gaussian mechanism (the printed noise per coordinate is :math:`\sqrt d`
    too small). Every client leaves its own release out of the mean that it shrinks towards, which
    does not require equal n. The same release pays for unknown variances: the summed squares of the
    clipped means, and a weighted sum of the variances of the clients' own rows, each cut at
    `noise_variance_bound`. A warning says so if the noise variance exceeds 0.9 of the bound. It is
    useless if the sum is below two standard deviations of its noise; every client then keeps its
    own mean, with a warning. A between-client variance below one standard deviation of its noise is
    raised to that value. Give `noise_variance` where you can, above all under local trust. A
    private fit refuses "diag" unless all variances are known. A quantizer whose rounding adds more
    than a tenth of the sampling variance refuses an unknown covariance.

    *Participants* (Remark 7, ICLR). All sums, and the number of clients in them, are those of the K
    clients that take part. A client that does not has no release to leave out. It shrinks towards
    the mean over all participants, whose variance V adds to that between clients: its weight on its
    own mean is :math:`(\sigma_\theta^2 + V) / (\sigma_\theta^2 + V + s_i^2)`. It sends nothing, so
    its own epsilon is 0, whatever the report states for the participants, unless scores of its rows
    choose parameters. Who takes part is a parameter, as the choice is public, must not depend on
    the data, and is the same in all folds of a search. A random choice does not lower the epsilon
    that is reported.

    *Discrete Gaussian noise* (Remark 4, ICLR) is 7 to 11 % larger at a delta of 1e-5 and
    an epsilon from 8 down to 0.1, mostly because its accounting is less tight
    (:class:`~pfl_sklearn.privacy.DiscreteGaussianMechanism`). The variance of the rounding is
    counted at its largest. A ledger counts such a fit by its epsilon and delta alone, so several
    fits need a smaller `delta` each.

    *Mixture priors* (Theorem 6 and Algorithm 3, ICLR) are fitted to the marginal
    likelihood of the client means. The noise variance is pooled from the rows within clients, so a
    wrong number of components cannot bias it. The printed alternation (10 rounds) clusters averages
    of its points, which draws the points together, in the long run into one. Releases need
    `noise_variance` and estimate only spherical covariances:

    - Central trust: noisy k-means and EM in 8 releases under one budget
      (:class:`~pfl_sklearn.privacy.PrivateClustering`). The last release estimates how much the
      clients' error falls. Unless this exceeds two standard deviations of its noise, every client
      keeps its own mean, with a warning.
    - Local trust, or a quantizer: every client keeps its own mean, with a warning, if BIC prefers
      one Gaussian to the mixture of the reports.

    A client combines its exact mean with components whose uncertainty includes that of the release.
    Its own release is among those that are pooled. The client keeps its own mean, which costs no
    privacy, in two cases: if the mean was cut to fit into the release, or if it is implausibly far
    from every component (squared distance over variances above the .999 quantile of chi-square with
    d degrees of freedom). Under local trust and quantizers, the spread of a component is at least
    what the reports show, or one standard deviation of that.

    The privacy promise does not cover the clients' own estimates (`means_`): client i may see its
    own (joint differential privacy). Hand it over with :meth:`for_client`.

    Memory beyond the input: ``8 (d + 1)`` bytes per row and ``40 (d + 1)`` per client, and 14 MB of
    work space if d > 1. A mixture of k components takes another ``8 (2 d k + d + 3 k + 5)`` bytes
    per client. `participants` take another ``8 (d + 1)`` bytes per row of theirs, and if they are
    fewer than 1,000, with ``uncertainty="full"``, 3,700 d bytes per client, of which 920 d stay.

    References
    ----------
    Ozkara, K., Girgis, A. M., Data, D. and Diggavi, S. (2023). A statistical framework for
    personalized federated learning and estimation: theory, algorithms, and privacy. ICLR.

    Efron, B. and Morris, C. (1975). Data analysis using Stein's estimator and its
    generalizations. JASA.

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn.estimation import GaussianMean
    >>> y = np.array([1.0, 3.0, 5.0, 7.0, 2.0, 4.0])
    >>> clinic = np.array(["a", "a", "b", "b", "c", "c"])
    >>> model = GaussianMean().fit(np.zeros((6, 1)), y, groups=clinic)
    >>> model.means_.round(2)
    array([2.38, 5.46, 3.15])
    >>> model.predict(np.zeros((3, 1)), groups=["a", "b", "new"]).round(2)
    array([2.38, 5.46, 3.67])

    Clinics of two kinds:

    >>> y, clinic = np.array([0.9, 1.1, 5.2, 4.8, 1.2, 0.8, 5.0, 5.4]), np.repeat(list("abcd"), 2)
    >>> model = GaussianMean("discrete").fit(np.zeros((8, 1)), y, groups=clinic)
    >>> model.prior_.points.round(2)
    array([[1. ],
           [5.1]])
    """

    _likelihood = "mean"
    _default_component = default_prior
    # Intervals are cut to a client as arrays are, so that its model holds its own posterior alone.
    _client_attributes = (*BaseClientMean._client_attributes, "responsibilities_", "_intervals")
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
    uncertainty: str = parameter(
        default="full",
        ranges=[StrOptions(UNCERTAINTIES)],
        text="""
            {"full", "plug_in"}
                Whether standard deviations and intervals include that the variances were estimated.
                With "full" they do, under a GaussianPrior without a release. With "plug_in", the
                variances count as known, which makes intervals of few clients too short. See Notes.
        """,
    )
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
                mean.
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
    participants: Any = parameter(
        default=None,
        ranges=["array-like", None],
        text="""
            array-like of client ids or None
                Clients that take part in estimating the population, at least two; None: all. The
                others send nothing, receive the population, and shrink their own means towards it.
                Choose them without looking at the data: who takes part is public. Ids that the
                table lacks are passed over. Only a GaussianPrior supports it.
        """,
    )
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

        Returns
        -------
        self
        """
        prior = self._charged_prior(sample_weight)
        y = self._checked_targets(y)
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
            Rows are not scaled to it: `clip_norm` bounds the means of clients.

        Returns
        -------
        self

        Raises
        ------
        ValueError
            As ``fit``; with a finite `epsilon` or a quantizer also for statistics of weighted rows,
            and with a finite `epsilon` for those without `target_bound`.
        """
        check_statistics(statistics)
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
        X : array-like of n_rows rows
            Only its length and feature names are read.
        y : array-like of shape (n_rows,) or (n_rows, d)
            Observations.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row, seen before or new. None: one client, with a warning.
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
        y = self._checked_targets(y)
        statistics = with_kept(self, X, y, groups, sample_weight, None)
        return self._fit_kept(X, statistics)

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        tags.target_tags.single_output = True
        return tags

    def _check_parameters(self, prior, sample_weight):
        """Refuse parameters that do not go together, before any data is touched."""
        estimators = _ESTIMATORS[type(prior)]
        check_release(self, sample_weight)
        if self.method not in estimators.methods:
            raise ValueError(
                f"method={self.method!r} does not go with {type(prior).__name__}; expected "
                f"{' or '.join(map(repr, estimators.methods))}."
            )
        estimators.check(prior, self)

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
        with name_bad_columns(private=release_of(self) is not None):
            y = check_array(
                y, dtype=np.float64, ensure_2d=False, input_name="y", ensure_min_samples=0
            )
        if release_of(self) is None:  # a refusal would reveal a client's values
            check_float_range("y", y.ravel())
        return y

    def _estimate(self, prior, ids, exact, bounded):
        """Fitted population and clients, and the privacy report.

        ``exact(sends)`` are the ClientMeans of some clients, ``bounded()`` the BoundedMeans of all.
        """
        estimators, release = _ESTIMATORS[type(prior)], release_of(self)
        sends = participant_mask(self.participants, ids)
        if release is None:
            fitted, entries = estimators.from_means(exact, sends, prior, self), {}
        else:
            fitted, entries = estimators.from_release(release, bounded(), sends, prior, self)
        of_mixtures = () if fitted.responsibilities is None else ("responsibilities_",)
        kept = (*OWN_ESTIMATES, "log_likelihood_", *of_mixtures)
        return fitted, report_of_fit(self, _PUBLIC_OF_MEANS, kept, sends, entries)

    def _interval(self, level):
        """Bounds of the central intervals; quantiles where errors are averaged over variances."""
        # Releases, mixture priors and "plug_in" count variances as known: posteriors are normal.
        if not hasattr(self, "_intervals"):
            return super()._interval(level)
        return tuple(each.reshape(self.means_.shape) for each in self._intervals.central(level))

    def _privacy_events(self):
        """Accounting events of a fit: () if nothing is released."""
        prior = resolve_prior(self)
        private = math.isfinite(self.epsilon)  # a quantizer sends messages that nothing hides
        return _ESTIMATORS[type(prior)].events(prior, self) if private else UNPROTECTED

    @property
    def _noise_seed(self):
        """Seed with which the noise can be drawn again, or None."""
        release = release_of(self)
        # Where the operating system draws the noise, a seed gives no one a second copy of it.
        return None if release is not None and not release.follows_seed else self.random_state
