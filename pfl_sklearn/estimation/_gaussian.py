"""Personalized means of clients under a Gaussian prior."""

import math
from numbers import Integral, Real

import numpy as np
from scipy.special import ndtri
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.metrics import r2_score
from sklearn.utils import check_array
from sklearn.utils.validation import validate_data

from pfl_sklearn._compat import Interval, StrOptions, fit_context
from pfl_sklearn._warnings import warn_caller
from pfl_sklearn.base import ClientMixin
from pfl_sklearn.estimation import _gaussian_release as release
from pfl_sklearn.estimation._mean_estimates import (
    fit_exact,
    known_values,
    shared_values,
    shrink_releases,
)
from pfl_sklearn.estimation._rows import read_rows
from pfl_sklearn.estimation._summary import client_summary
from pfl_sklearn.estimation._variance_components import check_noise_is_identified, client_means
from pfl_sklearn.priors._support import resolve_prior
from pfl_sklearn.privacy import GaussianMechanism, PrivacyReport, StochasticQuantizer
from pfl_sklearn.privacy._noise import noise_generator
from pfl_sklearn.privacy._report import private_report, warn_once

_RELEASED = ("population_mean_", "population_mean_std_", "prior_", "noise_variance_", "icc_")
_PRIVATE = (
    "means_",
    "stds_",
    "shrinkage_",
    "local_means_",
    "clients_",
    "n_samples_per_client_",
    "log_likelihood_",
)

_COARSE = 0.1  # largest rounding variance, as a share of the sampling variance
_DROWNED = (
    "The released noise variance drowns in the privacy noise, so every client keeps its own mean. "
    "Give noise_variance, a smaller clip_norm or a larger epsilon."
)


class GaussianMean(ClientMixin, RegressorMixin, BaseEstimator):
    r"""Each client's mean, shrunk towards the population as far as the data warrant.

    Rows :math:`x_{ij}` of client i scatter around its mean, the means around the population's:

    .. math:: x_{ij} \sim N(\theta_i, \sigma_x^2 I), \qquad \theta_i \sim N(\mu, \sigma_\theta^2 I).

    With :math:`s_i^2 = \sigma_x^2 / n_i` the estimate is
    :math:`a_i \bar x_i + (1 - a_i) \hat\mu`, :math:`a_i = \sigma_\theta^2 /
    (\sigma_\theta^2 + s_i^2)`, where :math:`\hat\mu` weighs clients by
    :math:`1 / (\sigma_\theta^2 + s_i^2)`. Targets are the observations; of `X` only the length and
    the feature names are read, so that the estimator is a baseline in pipelines and searches.

    Parameters
    ----------
    prior : "gaussian" or GaussianPrior, default="gaussian"
        Population prior; what it leaves None is estimated, what it gives is known. With
        ``covariance_type="diag"`` every output has variances of its own.
    method : {"reml", "ml", "moments"}, default="reml"
        How unknown variances are estimated: restricted or full maximum likelihood of the client
        means, or debiased moments (floored at 0). With a finite `epsilon` and central trust it
        has no effect: moments are what is released.
    noise_variance : float, array-like of shape (d,) or None, default=None
        Variance :math:`\sigma_x^2` of a row around its client's mean. None: estimated.
    epsilon : float in (0, inf], default=inf
        Privacy of one client's whole data in what is pooled. Infinity: no privacy.
    delta : float in [0, 1), default=1e-5
        Must be above 0 when `epsilon` is finite.
    clip_norm : float or None, default=None
        L2 radius, in the units of `y`, of a ball around `center` to which client means are
        projected before they are released. Yours, never taken from the data; needed when `epsilon`
        is finite. With ``mechanism="quantizer"`` the half width of the range of each coordinate.
    center : float or array-like of shape (d,), default=0.0
        Centre of that ball.
    trust : {"central", "local"}, default="central"
        Who adds the noise: a trusted server once on the sum, or every client on its own mean.
    mechanism : {"gaussian", "quantizer"}, default="gaussian"
        "quantizer" sends `n_bits` per coordinate and claims no privacy (`epsilon` must be inf).
    n_bits : int or None, default=None
        Bits per coordinate, 1 to 32, for ``mechanism="quantizer"``.
    unseen : {"population", "error"}, default="population"
        What clients get in ``predict`` that ``fit`` did not see.
    random_state : int, RandomState instance or None, default=None
        Seed of the noise. None draws it from the operating system. A seed makes the noise
        reproducible, hence not private to whoever knows it: the report says so.

    Attributes
    ----------
    clients_ : ndarray of shape (n_clients,)
        Sorted ids; row i of every per-client array is ``clients_[i]``.
    n_samples_per_client_ : ndarray of shape (n_clients,)
    means_, stds_ : ndarrays of shape (n_clients,) or (n_clients, d)
        Posterior mean and standard deviation of each client's mean. The latter counts the
        uncertainty of the population mean, not of the variances.
    local_means_ : ndarray of shape (n_clients,) or (n_clients, d)
        Each client's own (weighted) mean.
    shrinkage_ : ndarray of the shape of `means_`
        Weight on the population: 0 is the client's own mean, 1 the population's.
    prior_ : GaussianPrior
        The prior that was used; `mean` (d,) and `covariance` (d, d) hold the values.
    noise_variance_ : float, or ndarray of shape (d,)
        One per output if the prior is diagonal and `y` is two-dimensional.
    population_mean_, population_mean_std_ : float or ndarray of shape (d,)
        Population mean and its standard error given the variances; 0 if the mean was given.
    icc_ : float or ndarray of shape (d,)
        Intraclass correlation: the share of a row's variance that lies between clients.
    log_likelihood_ : float
        Maximized criterion (restricted for "reml"), in nats; NaN if a release stood between.
    n_features_in_ : int
    feature_names_in_ : ndarray of shape (`n_features_in_`,)
    privacy_ : PrivacyReport

    Raises
    ------
    ValueError
        For missing or mixed ids, NaN in `y`, no client with two rows while the noise variance is
        unknown, a finite `epsilon` without `clip_norm` or with weights or a quantizer.

    See Also
    --------
    BernoulliMean : The same for proportions.
    pfl_sklearn.inspection.ShrinkageDisplay : Plot of what was shrunk and how far.

    Notes
    -----
    Theorems 1 and 2 of Ozkara et al. (2023), with these differences. Numbers of rows may differ
    and the variances are estimated. Weights are precision weights: a row of weight w has variance
    :math:`\sigma_x^2 / w`; weight 0 is an absent row. Private releases: means are clipped in L2
    and noised by the analytic Gaussian mechanism (the printed per-coordinate noise is
    :math:`\sqrt d` too small), and every client leaves its own release out of the mean that it
    shrinks towards, which needs no equal n. Unknown variances are bought in the same release: the
    summed squares of the clipped means and the clients' own sampling variances cut at
    ``clip_norm ** 2`` (under local trust at ``clip_norm ** 2 d / (sqrt(d) + 2) ** 2``, which a ball
    that holds the means with two standard deviations to spare allows). A between-client variance
    below one standard deviation of its noise is raised to that; if the noise variance drowns in
    noise (below two standard deviations of it, or if even the largest possible one would be), the
    fit falls back to local means and warns: give `noise_variance` where you can, under local trust
    above all. A private fit refuses "diag" unless all variances are known, and a quantizer whose
    rounding adds more than a tenth of the sampling variance an unknown covariance.

    Estimates of the clients (`means_`) are not covered by the privacy promise: client i may see
    its own (joint differential privacy); hand it over with :meth:`for_client`.

    Memory beyond the input: ``8 (d + 1)`` bytes per row and ``40 (d + 1)`` per client, and 14 MB of
    work space if d > 1.

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
    >>> model.predict(np.zeros((2, 1)), groups=["b", "new"]).round(2)
    array([5.46, 3.67])
    """

    __metadata_request__predict = {"groups": True, "return_std": True}

    _client_attributes = ("n_samples_per_client_", "means_", "stds_", "local_means_", "shrinkage_")
    _population_attributes = _RELEASED

    _parameter_constraints = {
        "prior": "no_validation",
        "method": [StrOptions({"reml", "ml", "moments"})],
        "noise_variance": [Interval(Real, 0, None, closed="left"), "array-like", None],
        "epsilon": [Interval(Real, 0, math.inf, closed="right")],
        "delta": [Interval(Real, 0, 1, closed="left")],
        "clip_norm": [Interval(Real, 0, None, closed="neither"), None],
        "center": [Interval(Real, None, None, closed="neither"), "array-like"],
        "trust": [StrOptions({"central", "local"})],
        "mechanism": [StrOptions({"gaussian", "quantizer"})],
        "n_bits": [Interval(Integral, 1, 32, closed="both"), None],
        "unseen": [StrOptions({"population", "error"})],
        "random_state": ["random_state"],
    }

    def __init__(
        self,
        prior="gaussian",
        *,
        method="reml",
        noise_variance=None,
        epsilon=math.inf,
        delta=1e-5,
        clip_norm=None,
        center=0.0,
        trust="central",
        mechanism="gaussian",
        n_bits=None,
        unseen="population",
        random_state=None,
    ):
        self.prior = prior
        self.method = method
        self.noise_variance = noise_variance
        self.epsilon = epsilon
        self.delta = delta
        self.clip_norm = clip_norm
        self.center = center
        self.trust = trust
        self.mechanism = mechanism
        self.n_bits = n_bits
        self.unseen = unseen
        self.random_state = random_state

    @fit_context(prefer_skip_nested_validation=True)
    def fit(self, X, y=None, *, groups=None, sample_weight=None):
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
            Precision weights; 0 is an absent row. Refused when `epsilon` is finite.

        Returns
        -------
        self
        """
        prior = resolve_prior(self.prior, "GaussianMean")
        self._check_release(prior, sample_weight)
        y = self._check_targets(y)
        columns = y[:, None] if y.ndim == 1 else y
        rows = read_rows(self, X, columns, groups, sample_weight)
        ids, codes = rows.clients
        known = known_values(prior, self.noise_variance, rows.y.shape[1])
        if self._releases():
            table, found, report = self._fit_released(rows, known)
        else:
            table = client_means(rows.y, codes, len(ids), rows.weights)
            found = fit_exact(table, known, self.method, prior.covariance_type)
            report = PrivacyReport.unprotected(
                "epsilon=inf was asked for.", not_released=_RELEASED + _PRIVATE, n_clients=len(ids)
            )
        self._store(X, y, prior, ids, table, found, report, groups is not None)
        warn_once(report)
        return self

    def predict(self, X, *, groups=None, return_std=False):
        """Posterior mean of every row's client; the population mean for unseen clients.

        Parameters
        ----------
        X : array-like of n_rows rows
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.
        return_std : bool, default=False
            Also return the standard deviation of the client's mean (not of a new row).

        Returns
        -------
        y : ndarray of shape (n_rows,) or (n_rows, d)
        std : ndarray of the same shape
            If `return_std`.
        """
        codes = self._encode_predict(X, groups)
        validate_data(self, X, reset=False, skip_check_array=True)
        means = self._with_population("means_", self.population_mean_)[codes]
        if not return_std:
            return means
        between = np.diag(self.prior_.covariance).reshape(np.shape(self.population_mean_))
        spread = np.sqrt(between + self.population_mean_std_**2)
        return means, self._with_population("stds_", spread)[codes]

    def score(self, X, y=None, *, groups=None, sample_weight=None):
        """Coefficient of determination of the rows.

        Parameters
        ----------
        X : array-like of n_rows rows
        y : array-like of shape (n_rows,) or (n_rows, d)
        groups : array-like of shape (n_rows,), default=None
        sample_weight : array-like of shape (n_rows,), default=None

        Returns
        -------
        float
        """
        return r2_score(y, self.predict(X, groups=groups), sample_weight=sample_weight)

    def credible_interval(self, level=0.95):
        """Central posterior interval of every client's mean.

        Parameters
        ----------
        level : float in (0, 1), default=0.95

        Returns
        -------
        lower, upper : ndarrays of the shape of `means_`
        """
        self._require_fitted("means_")
        if not 0 < level < 1:
            raise ValueError(f"level must be in (0, 1); got {level!r}.")
        half = ndtri(0.5 + level / 2) * self.stds_
        return self.means_ - half, self.means_ + half

    def summary(self, level=0.95):
        """Table of the clients.

        Parameters
        ----------
        level : float in (0, 1), default=0.95
            Of the interval.

        Returns
        -------
        DataFrame
            One row per client (and output), indexed by client id: rows, local mean, personalized
            mean and its standard deviation and interval, shrinkage.
        """
        return client_summary(self, level)

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.no_validation = True
        tags.input_tags.sparse = True
        tags.input_tags.allow_nan = True
        tags.input_tags.string = True
        tags.target_tags.multi_output = True
        tags.target_tags.single_output = True
        tags.regressor_tags.poor_score = True
        return tags

    def _releases(self):
        return math.isfinite(self.epsilon) or self.mechanism == "quantizer"

    def _check_release(self, prior, sample_weight):
        """Refuse combinations of privacy parameters that have no meaning."""
        private = math.isfinite(self.epsilon)
        if self.mechanism == "quantizer":
            _check_quantizer(self)
        if private and self.clip_norm is None:
            raise ValueError(
                "clip_norm must be given when epsilon is finite: the L2 radius of a ball around "
                "center that holds the client means. It is your bound, never taken from the data."
            )
        if private and self.delta == 0:
            raise ValueError("delta must be above 0 for the Gaussian mechanism; got 0.")
        if self._releases() and sample_weight is not None:
            raise ValueError(
                "sample_weight is not supported when means are released (finite epsilon or "
                "quantizer): its effect on the sensitivity is not defined."
            )
        needed = prior.covariance is None or self.noise_variance is None
        if self._releases() and prior.covariance_type == "diag" and needed:
            raise ValueError(
                "covariance_type='diag' with a finite epsilon or a quantizer needs a known "
                "covariance and noise_variance; only one variance for all outputs can be released."
            )

    def _check_targets(self, y):
        if y is None:
            raise ValueError(
                f"{type(self).__name__} requires y to be passed, but the target y is None."
            )
        return check_array(
            y, dtype=np.float64, ensure_2d=False, input_name="y", ensure_min_samples=0
        )

    def _fit_released(self, rows, known):
        """Client statistics, fitted population and report, when clients release their means."""
        ids, codes = rows.clients
        centre = _check_center(self.center, rows.y.shape[1])
        with np.errstate(over="ignore", invalid="ignore"):
            table = client_means(rows.y, codes, len(ids), centre=centre)
            own = release.sampling_variances(rows.y, codes, table)
        if self.mechanism == "quantizer":
            return table, *self._fit_quantized(table, centre, shared_values(known))
        if all(values is not None for values in known):
            found = fit_exact(table, known, self.method, "diag")._replace(log_likelihood=math.nan)
            return table, found, PrivacyReport.of_known_population(_RELEASED, _PRIVATE, len(ids))
        shared = shared_values(known)
        moments = release.client_moments(shared, self.clip_norm, self.trust, len(centre))
        if shared.noise is None:
            check_noise_is_identified(table)
        rng, seeded = noise_generator(self.random_state)
        mechanism = GaussianMechanism(moments.sensitivity, self.epsilon, self.delta, self.trust)
        if self.trust == "central":
            found = release.central_means(table, own, moments, mechanism, centre, shared, rng)
        else:
            found = release.local_means(
                table, own, moments, mechanism, centre, shared, self.method, rng
            )
        if not found.trusted:
            warn_caller(_DROWNED, UserWarning)
        report = self._private_report(mechanism, moments, len(ids), seeded)
        with np.errstate(over="ignore", invalid="ignore"):
            return table, shrink_releases(table, found, own), report

    def _fit_quantized(self, table, centre, known):
        """Fitted population and report of quantized means."""
        quantizer = StochasticQuantizer(self.n_bits, self.clip_norm)
        if known.between is None:
            _check_fine(quantizer, table, known.noise)
        rng, _ = noise_generator(self.random_state)
        found = release.quantized_means(table, quantizer, centre, known, self.method, rng)
        report = PrivacyReport.unprotected(
            "a quantizer saves communication and protects nobody.",
            **quantizer.facts(),
            not_released=_RELEASED + _PRIVATE,
            n_clients=len(table.means),
        )
        return shrink_releases(table, found), report

    def _private_report(self, mechanism, moments, n_clients, seeded):
        central = self.trust == "central"
        under = mechanism.under_add_remove(moments.add_remove_sensitivity) if central else ()
        return private_report(
            mechanism.facts(),
            n_clients=n_clients,
            seeded=seeded,
            epsilon_under=under,
            released=_RELEASED,
            not_released=_PRIVATE,
            assumptions=(
                f"clip_norm = {self.clip_norm:.4g}, center and known variances are the user's, not "
                "the data's",
                "noise and sensitivity are in units of clip_norm",
            ),
        )

    def _store(self, X, y, prior, ids, table, found, report, with_groups):
        """Set the fitted attributes, all at once."""
        validate_data(self, X, skip_check_array=True)
        one = y.ndim == 1
        flat = (lambda values: values[..., 0][()]) if one else (lambda values: values)
        self.clients_ = ids
        self.n_samples_per_client_ = table.n_rows
        self.means_ = flat(found.means)
        self.stds_ = flat(np.sqrt(found.variances))
        self.local_means_ = flat(table.means)
        self.shrinkage_ = flat(1 - found.own)
        self.prior_ = prior.with_values(found.mean, found.between)
        per_output = not one and prior.covariance_type == "diag"
        self.noise_variance_ = found.noise.copy() if per_output else float(found.noise[0])
        self.population_mean_ = flat(found.mean)
        self.population_mean_std_ = flat(np.sqrt(found.mean_variance))
        total = found.between + found.noise
        finite = (total != 0) & ~np.isinf(total)
        icc = np.divide(found.between, total, out=np.isinf(total).astype(float), where=finite)
        self.icc_ = icc if per_output else float(icc[0])
        self.log_likelihood_ = found.log_likelihood
        self.privacy_ = report
        self._fitted_with_groups = with_groups

    def _with_population(self, name, value):
        """Rows of all clients, then the population's (which index -1 picks)."""
        population = np.asarray(value)[None]
        if not hasattr(self, name):
            return population
        return np.concatenate([getattr(self, name), population])


def _check_center(center, d):
    """The centre as an array (d,)."""
    values = np.asarray(center, dtype=float)
    if values.shape not in ((), (1,), (d,)) or not np.isfinite(values).all():
        raise ValueError(f"center must be finite, a number or of shape ({d},); got {center!r}.")
    return np.broadcast_to(values, (d,))


def _check_fine(quantizer, table, noise):
    """Rounding must be small beside the sampling of the means, or it hides the clients' spread."""
    if quantizer.noise_variance > _COARSE * noise * np.mean(1 / table.weights):
        raise ValueError(
            f"n_bits={quantizer.bits} is too coarse to estimate the spread between clients: "
            f"rounding adds a variance of up to {quantizer.noise_variance:.3g} to each mean, whose "
            f"sampling variance is {noise * np.mean(1 / table.weights):.3g}. Give the prior's "
            "covariance, or more bits."
        )


def _check_quantizer(estimator):
    if math.isfinite(estimator.epsilon):
        raise ValueError(
            f"mechanism='quantizer' claims no privacy and cannot go with epsilon="
            f"{estimator.epsilon!r}; use epsilon=inf, or mechanism='gaussian'."
        )
    for name in ("n_bits", "clip_norm", "noise_variance"):
        if getattr(estimator, name) is None:
            raise ValueError(f"{name} must be given for mechanism='quantizer'; got None.")
