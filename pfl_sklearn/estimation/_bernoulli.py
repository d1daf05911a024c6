"""Personalized proportions of clients under a beta or a non-parametric prior."""

import math
from numbers import Real
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.special import betaincinv
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.metrics import accuracy_score
from sklearn.utils import check_array, check_consistent_length, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data

from pfl_sklearn._clients import encode_clients, row_counts, segment_sums
from pfl_sklearn._compat import Interval, StrOptions, fit_context
from pfl_sklearn.base import ClientMixin
from pfl_sklearn.estimation import _proportion_reports as reports
from pfl_sklearn.estimation._counts import count_table
from pfl_sklearn.estimation._printed_proportions import printed_estimates, printed_prior
from pfl_sklearn.estimation._rows import read_rows
from pfl_sklearn.estimation._summary import client_summary
from pfl_sklearn.priors import BetaPrior, GridPrior
from pfl_sklearn.priors._support import resolve_prior
from pfl_sklearn.privacy import GaussianMechanism, OneBit, PrivacyReport, SubsetSelection, TwoBit
from pfl_sklearn.privacy._noise import noise_generator
from pfl_sklearn.privacy._report import private_report, warn_once

_RELEASED = ("population_mean_", "population_mean_std_", "prior_", "icc_")
_PRIVATE = ("means_", "stds_", "shrinkage_", "local_means_", "clients_")
# (prior, method) pairs that each way of pooling supports.
_SUPPORTED = {
    "none": {"BetaPrior": ("ml", "moments", "printed", "printed_eq32"), "GridPrior": ("ml",)},
    "subset_selection": {"BetaPrior": ("ml",), "GridPrior": ("ml",)},
    "two_bit": {"BetaPrior": ("ml",)},
    "one_bit": {"BetaPrior": ("printed", "printed_eq32")},
    "gaussian": {"BetaPrior": ("ml",)},
}
_ONE_BIT_CAVEAT = (
    "one-bit messages carry no information on the spread between clients, so the shrinkage is "
    "arbitrary; mechanism='one_bit' is kept to reproduce published figures."
)


class BernoulliMean(ClientMixin, ClassifierMixin, BaseEstimator):
    r"""Each client's probability of a binary outcome, shrunk as far as the data warrant.

    Client i has :math:`z_i` successes in :math:`n_i` trials:

    .. math:: z_i \sim \mathrm{Binomial}(n_i, p_i), \qquad p_i \sim \mathrm{Beta}(\alpha, \beta),

    and the estimate is the posterior mean :math:`(\alpha + z_i) / (\alpha + \beta + n_i)`. As a
    classifier it gives every row its client's probability; of `X` only the length and the feature
    names are read, so that it is a baseline in pipelines and searches. Tables of counts go to
    :meth:`fit_counts`.

    Parameters
    ----------
    prior : {"beta", "grid"}, BetaPrior or GridPrior, default="beta"
        Population prior; what it leaves None is estimated. "grid" takes any shape.
    method : {"ml", "moments", "printed", "printed_eq32"}, default="ml"
        Marginal likelihood, debiased moments, or the published weights: "printed" is equation (6)
        and "printed_eq32" equation (32), which lacks a -1. A grid prior needs "ml", private fits
        too, except for ``mechanism="one_bit"``, which needs a printed one ("printed_eq32" is the
        weight at Theorem 4).
    epsilon : float in (0, inf], default=inf
        Privacy of one client's whole data in what is pooled. Infinity: no privacy.
    delta : float in [0, 1), default=0.0
        Local mechanisms are pure (0); ``trust="central"`` needs one above 0.
    trust : {"local", "central"}, default="local"
        Every client randomizes its own report, or a trusted server adds Gaussian noise to the
        histogram of counts (common number of trials) or to two moments.
    mechanism : {"auto", "subset_selection", "two_bit", "one_bit", "gaussian"}, default="auto"
        "auto" is subset selection if all clients have the same number of trials, else two bits,
        and "gaussian" under central trust.
    unseen : {"population", "error"}, default="population"
        What clients get in ``predict`` that ``fit`` did not see.
    random_state : int, RandomState instance or None, default=None
        Seed of the randomization. None draws it from the operating system. A seed makes it
        reproducible, hence not private to whoever knows it: the report says so.

    Attributes
    ----------
    classes_ : ndarray of shape (2,)
        Class labels; the second is the success.
    clients_ : ndarray of shape (n_clients,)
        Sorted ids; row i of every per-client array is ``clients_[i]``.
    n_samples_per_client_ : ndarray of shape (n_clients,)
        Trials of each client.
    means_, stds_ : ndarrays of shape (n_clients,)
        Posterior mean and standard deviation of each client's probability of ``classes_[1]``.
    local_means_ : ndarray of shape (n_clients,)
        Each client's own share of successes.
    shrinkage_ : ndarray of shape (n_clients,)
        Weight on the population: 0 is the client's own share, 1 the population's. For other
        than beta priors: that of the beta prior with the same mean and variance.
    prior_ : BetaPrior or GridPrior
        The prior that was used, with its values. After a private fit with a beta prior: the one
        with the mean and variance of the average over all priors that the reports leave plausible.
    population_mean_, population_mean_std_ : float
        Population probability and its standard error.
    icc_ : float
        Intraclass correlation, ``1 / (alpha + beta + 1)`` for a beta prior.
    n_features_in_ : int
    feature_names_in_ : ndarray of shape (n_features_in_,)
    privacy_ : PrivacyReport

    Raises
    ------
    ValueError
        For missing or mixed ids, other than two classes, fractional weights, one trial for every
        client while the prior is unknown, or an unsupported pair of prior, method and mechanism.

    See Also
    --------
    GaussianMean : The same for continuous outcomes.
    pfl_sklearn.inspection.ShrinkageDisplay : Plot of what was shrunk and how far.

    Notes
    -----
    Section 2.2 of Ozkara et al. (2023), with these differences. Numbers of trials may differ. The
    printed weights take the variance of the shares for that of the probabilities; the default
    maximizes the beta-binomial likelihood. The printed private mechanism (equation 7) sends
    two-valued messages, which say nothing of the prior's variance; subset selection (Ye and Barg,
    2018) and the two-bit scheme do, and their likelihood on a grid of beta priors (means .02 to
    .98, concentrations .5 to 400, log-concentration a priori N(log 8, 1.5^2)) is averaged over. A
    private grid prior starts there and takes 60 EM steps. A client's own report is counted with
    the others', a difference of the order of one in the number of clients.

    Estimates of the clients are not covered by the privacy promise: client i may see its own
    (joint differential privacy); hand it over with :meth:`for_client`. Random bits are compared
    as integers with a fixed-point threshold.

    Memory beyond the input: 28 bytes per row and 60 per client; subset selection needs another
    ``17 (n + 1)`` bytes per client while it draws.

    References
    ----------
    Ozkara, K., Girgis, A. M., Data, D. and Diggavi, S. (2023). A statistical framework for
    personalized federated learning and estimation: theory, algorithms, and privacy. ICLR.

    Examples
    --------
    >>> from pfl_sklearn.estimation import BernoulliMean
    >>> model = BernoulliMean().fit_counts([9, 5, 1, 6], [10, 10, 10, 10])
    >>> model.means_.round(2)
    array([0.81, 0.5 , 0.2 , 0.58])
    >>> model.prior_.alpha > 0
    True
    """

    _client_attributes = ("n_samples_per_client_", "means_", "stds_", "local_means_", "shrinkage_")
    _population_attributes = (*_RELEASED, "classes_")

    _parameter_constraints = {
        "prior": "no_validation",
        "method": [StrOptions({"ml", "moments", "printed", "printed_eq32"})],
        "epsilon": [Interval(Real, 0, math.inf, closed="right")],
        "delta": [Interval(Real, 0, 1, closed="left")],
        "trust": [StrOptions({"local", "central"})],
        "mechanism": [StrOptions({"auto", "subset_selection", "two_bit", "one_bit", "gaussian"})],
        "unseen": [StrOptions({"population", "error"})],
        "random_state": ["random_state"],
    }

    def __init__(
        self,
        prior="beta",
        *,
        method="ml",
        epsilon=math.inf,
        delta=0.0,
        trust="local",
        mechanism="auto",
        unseen="population",
        random_state=None,
    ):
        self.prior = prior
        self.method = method
        self.epsilon = epsilon
        self.delta = delta
        self.trust = trust
        self.mechanism = mechanism
        self.unseen = unseen
        self.random_state = random_state

    @fit_context(prefer_skip_nested_validation=True)
    def fit(self, X, y=None, *, groups=None, sample_weight=None):
        """Estimate the population and every client's probability.

        Parameters
        ----------
        X : array-like of n_rows rows
            Only its length and feature names are read.
        y : array-like of shape (n_rows,)
            One of two classes per row.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row. None: one client, with a warning.
        sample_weight : array-like of shape (n_rows,), default=None
            Whole numbers of trials that a row stands for; 0 is an absent row. Refused when
            `epsilon` is finite.

        Returns
        -------
        self
        """
        prior = self._check_parameters(sample_weight)
        classes, labels = _encode_labels(y)
        rows = read_rows(self, X, labels, groups, sample_weight)
        _check_two_classes(classes, rows)
        ids, codes = rows.clients
        if rows.weights is None:
            trials = row_counts(codes, len(ids))
            successes = np.bincount(codes, weights=rows.y, minlength=len(ids))
        else:
            _check_whole("sample_weight", rows.weights)
            trials = segment_sums(rows.weights, codes, len(ids))
            successes = segment_sums(rows.weights * rows.y, codes, len(ids))
        table = count_table(successes.astype(np.int64), trials.astype(np.int64))
        found = self._fit_table(table, prior)
        validate_data(self, X, skip_check_array=True)
        return self._store(ids, classes, table, found, groups is not None)

    @fit_context(prefer_skip_nested_validation=True)
    def fit_counts(self, successes, trials, *, groups=None):
        """Estimate from a table of counts.

        Parameters
        ----------
        successes, trials : array-like of whole numbers, shape (n_rows,)
            ``0 <= successes <= trials`` and ``trials >= 1``.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; rows of one client are added up. None: row i is client i.

        Returns
        -------
        self
            With ``classes_ == [0, 1]``.
        """
        prior = self._check_parameters(None)
        successes, trials = (
            check_array(values, dtype=np.float64, ensure_2d=False, input_name=name)
            for name, values in (("successes", successes), ("trials", trials))
        )
        successes, trials = column_or_1d(successes), column_or_1d(trials)
        check_consistent_length(successes, trials)
        _check_counts(successes, trials)
        ids = np.arange(len(trials))
        if groups is not None:
            ids, codes = encode_clients(groups, len(trials))
            successes = segment_sums(successes, codes, len(ids))
            trials = segment_sums(trials, codes, len(ids))
        table = count_table(successes.astype(np.int64), trials.astype(np.int64))
        found = self._fit_table(table, prior)
        for name in ("n_features_in_", "feature_names_in_"):
            self.__dict__.pop(name, None)
        return self._store(ids, np.array([0, 1]), table, found, True)

    def predict_proba(self, X, *, groups=None):
        """Class probabilities of every row's client; the population's for unseen clients.

        Parameters
        ----------
        X : array-like of n_rows rows
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.

        Returns
        -------
        ndarray of shape (n_rows, 2)
            In the order of ``classes_``.
        """
        codes = self._encode_predict(X, groups)
        if hasattr(self, "n_features_in_"):
            validate_data(self, X, reset=False, skip_check_array=True)
        clients = getattr(self, "means_", np.empty(0))
        probability = np.append(clients, self.population_mean_)[codes]
        return np.column_stack([1 - probability, probability])

    def predict_log_proba(self, X, *, groups=None):
        """Logarithms of :meth:`predict_proba`, with the same parameters."""
        with np.errstate(divide="ignore"):
            return np.log(self.predict_proba(X, groups=groups))

    def predict(self, X, *, groups=None):
        """Likelier class of every row's client (the first on a tie).

        Parameters
        ----------
        X : array-like of n_rows rows
        groups : array-like of shape (n_rows,), default=None

        Returns
        -------
        ndarray of shape (n_rows,)
        """
        probability = self.predict_proba(X, groups=groups)[:, 1]
        return self.classes_[(probability > 0.5).astype(np.intp)]

    def score(self, X, y=None, *, groups=None, sample_weight=None):
        """Accuracy on the rows.

        Parameters
        ----------
        X : array-like of n_rows rows
        y : array-like of shape (n_rows,)
        groups : array-like of shape (n_rows,), default=None
        sample_weight : array-like of shape (n_rows,), default=None

        Returns
        -------
        float
        """
        return accuracy_score(y, self.predict(X, groups=groups), sample_weight=sample_weight)

    def credible_interval(self, level=0.95):
        """Central posterior interval of every client's probability.

        Exact for a beta and a grid prior; where priors were averaged (private fits), that of the
        beta distribution with the posterior's mean and variance. An *estimated* grid prior is a
        few spikes, so its intervals are too narrow: nominal 90 % covered 68 % of 5,000 clients
        with 14 trials from Beta(4, 4).

        Parameters
        ----------
        level : float in (0, 1), default=0.95

        Returns
        -------
        lower, upper : ndarrays of shape (n_clients,)
        """
        self._require_fitted("means_")
        if not 0 < level < 1:
            raise ValueError(f"level must be in (0, 1); got {level!r}.")
        tails = (1 - level) / 2, (1 + level) / 2
        if isinstance(self.prior_, GridPrior):
            return _grid_quantiles(self, tails)
        return _beta_quantiles(self.means_, self.stds_, tails)

    def summary(self, level=0.95):
        """Table of the clients.

        Parameters
        ----------
        level : float in (0, 1), default=0.95
            Of the interval.

        Returns
        -------
        DataFrame
            One row per client, indexed by client id: trials, local share, personalized
            probability with its standard deviation and interval, shrinkage.
        """
        return client_summary(self, level)

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.no_validation = True
        tags.input_tags.sparse = True
        tags.input_tags.allow_nan = True
        tags.input_tags.string = True
        tags.classifier_tags.multi_class = False
        tags.classifier_tags.poor_score = True
        return tags

    def _check_parameters(self, sample_weight):
        """Validated prior; refuse combinations of parameters that have no meaning."""
        prior = resolve_prior(self.prior, "BernoulliMean")
        private = math.isfinite(self.epsilon)
        known = prior.is_known
        if private and sample_weight is not None:
            raise ValueError("sample_weight is not supported with a finite epsilon.")
        if private and not known:
            _check_trust(self)
        if self.mechanism == "auto" or known or not private:
            way = "gaussian" if self.trust == "central" and private and not known else "none"
        else:
            way = self.mechanism
        allowed = _SUPPORTED[way].get(type(prior).__name__, ())
        if self.method not in allowed:
            raise ValueError(
                f"method={self.method!r} does not go with {type(prior).__name__} and "
                f"mechanism={self.mechanism!r}; expected "
                f"{' or '.join(map(repr, allowed)) or 'another prior'}."
            )
        if private and self.mechanism == "auto" and self.method != "ml" and not known:
            raise ValueError(
                f"method={self.method!r} needs epsilon=inf or mechanism='one_bit'; private fits "
                "use method='ml'."
            )
        return prior

    def _fit_table(self, table, prior):
        """Fit a CountTable, through a release if privacy was asked for."""
        if math.isfinite(self.epsilon) and not prior.is_known:
            return self._fit_released(table, prior)
        report = PrivacyReport.unprotected(
            "epsilon=inf was asked for.",
            not_released=_RELEASED + _PRIVATE,
            n_clients=table.n_clients,
        )
        if math.isfinite(self.epsilon):
            report = PrivacyReport(
                0.0,
                0.0,
                "nothing is released: the population is known",
                n_clients=table.n_clients,
                released=_RELEASED,
                not_released=_PRIVATE,
            )
        if table.n_clients == 1 and not prior.is_known:
            return _single_client(table, prior, report)
        if self.method.startswith("printed") and not prior.is_known:
            trials = table.per_client(table.trials)
            shares = table.per_client(table.successes) / trials
            return _printed(shares, trials, shares, self.method == "printed", report)
        if not prior.is_known and np.all(table.trials == 1):
            raise ValueError(
                "every client has one trial, so the spread between clients cannot be told from "
                "chance; give the prior (BetaPrior(alpha, beta)) or more rows per client."
            )
        prior = prior.fit_counts(table.successes, table.trials, table.counts, self.method)
        return _with_prior(table, prior, report)

    def _fit_released(self, table, prior):
        """Fit through what the clients release."""
        rng, seeded = noise_generator(self.random_state)
        way, n = self.mechanism, table.common_trials
        if way == "auto":
            way = "gaussian" if self.trust == "central" else "subset_selection"
            if way == "subset_selection" and n is None:
                way = "two_bit"
        if n is None and (way == "subset_selection" or isinstance(prior, GridPrior)):
            raise ValueError(
                "subset selection needs the same number of trials for every client; got "
                f"{table.trials.min()} to {table.trials.max()}. Use prior='beta' with "
                "mechanism='two_bit' (or 'auto')."
            )
        trials = table.per_client(table.trials)
        successes = table.per_client(table.successes)
        caveats, under = (_ONE_BIT_CAVEAT,) if way == "one_bit" else (), ()
        if way == "one_bit":
            mechanism = OneBit(self.epsilon)
            messages = mechanism.decode(mechanism.privatize(successes / trials, rng))
        elif way == "two_bit":
            mechanism = TwoBit(self.epsilon)
            answers = mechanism.privatize(successes, trials, rng)
            likelihood = reports.two_bit_log_likelihood(mechanism, answers, trials)
        elif way == "subset_selection":
            mechanism = SubsetSelection(n + 1, self.epsilon)
            subsets = mechanism.privatize(successes, rng)
            likelihood = reports.subset_log_likelihood(mechanism, subsets, n)
        else:
            mechanism, likelihood, under = self._central(table, successes, trials, rng)
        report = private_report(
            mechanism.facts(),
            n_clients=table.n_clients,
            seeded=seeded,
            caveats=caveats,
            epsilon_under=under,
            released=_RELEASED,
            not_released=_PRIVATE,
            assumptions=("the two class labels are public",),
        )
        if way == "one_bit":
            shares = successes / trials
            return _printed(shares, trials, messages, self.method == "printed", report, False)
        average = reports.average_priors(likelihood)
        if isinstance(prior, GridPrior):
            refined = reports.refine_on_grid(prior, average, mechanism, subsets, n)
            return _with_prior(table, refined, report)._replace(mean_std=average.mean()[1])
        return _with_average(table, average, report)

    def _central(self, table, successes, trials, rng):
        """Gaussian release of a histogram or of two moments, its likelihood, other relations."""
        n = table.common_trials
        if n is not None:
            mechanism = GaussianMechanism(
                reports.HISTOGRAM_SENSITIVITY, self.epsilon, self.delta, "central"
            )
            histogram = np.bincount(successes, minlength=n + 1).astype(float)
            noisy = mechanism.privatize(histogram, rng)
            likelihood = reports.histogram_log_likelihood(
                noisy, mechanism.noise_variance, table.n_clients
            )
            return (
                mechanism,
                likelihood,
                mechanism.under_add_remove(reports.HISTOGRAM_ADD_REMOVE_SENSITIVITY),
            )
        mechanism = GaussianMechanism(
            reports.MOMENT_SENSITIVITY, self.epsilon, self.delta, "central"
        )
        noisy = mechanism.privatize(reports.moment_messages(successes, trials), rng)
        likelihood = reports.moment_log_likelihood(noisy, mechanism.noise_variance, trials)
        return mechanism, likelihood, mechanism.under_add_remove(reports.MOMENT_SENSITIVITY)

    def _store(self, ids, classes, table, found, with_groups):
        """Set the fitted attributes, all at once."""
        self.clients_ = ids
        self.classes_ = classes
        self.n_samples_per_client_ = table.per_client(table.trials)
        self.local_means_ = table.per_client(table.successes / table.trials)
        self.means_ = found.means
        self.stds_ = found.stds
        self.shrinkage_ = found.shrinkage
        self.prior_ = found.prior
        self.population_mean_ = found.mean
        self.population_mean_std_ = found.mean_std
        self.icc_ = found.icc
        self.privacy_ = found.report
        self._fitted_with_groups = with_groups
        warn_once(found.report, stacklevel=4)
        return self


class _Found(NamedTuple):
    """A fitted population and its clients."""

    prior: object
    mean: float
    mean_std: float
    icc: float
    means: np.ndarray  # (m,)
    stds: np.ndarray  # (m,)
    shrinkage: np.ndarray  # (m,)
    report: PrivacyReport


def _encode_labels(y):
    """Sorted classes (at most two) and labels 0/1 as floats (n,)."""
    if y is None:
        raise ValueError("BernoulliMean requires y to be passed, but the target y is None.")
    y = column_or_1d(y, warn=True)
    codes, found = pd.factorize(y)
    if (codes < 0).any():
        raise ValueError("Input y contains NaN.")
    if len(found) > 2:
        check_classification_targets(y)
        raise ValueError(
            "Only binary classification is supported. The type of the target is multiclass: "
            f"y has {len(found)} classes."
        )
    if len(found):
        check_classification_targets(found)
    order = np.argsort(found, kind="stable")
    rank = np.empty(len(found))
    rank[order] = np.arange(len(found))
    return np.asarray(found)[order], rank[codes]


def _check_two_classes(classes, rows):
    if len(classes) < 2 or np.all(rows.y == rows.y[0]):
        only = classes[int(rows.y[0])] if len(rows.y) else None
        raise ValueError(
            f"BernoulliMean needs rows of two classes, but the data contains only one class: "
            f"{only!r}. For counts without successes use fit_counts."
        )


def _check_whole(name, values):
    fractional = values != np.rint(values)
    if fractional.any():
        raise ValueError(
            f"{name} must hold whole numbers (of trials); got {values[fractional][0]:g}."
        )


def _check_counts(successes, trials):
    _check_whole("successes", successes)
    _check_whole("trials", trials)
    for wrong, message in (
        (trials < 1, "trials must be at least 1"),
        (successes < 0, "successes must not be negative"),
        (successes > trials, "successes must not exceed trials"),
    ):
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise ValueError(
                f"{message}; row {row} has {successes[row]:g} successes in {trials[row]:g} trials."
            )


def _check_trust(estimator):
    central = estimator.mechanism in ("auto", "gaussian")
    if estimator.trust == "central" and not central:
        raise ValueError(
            f"mechanism={estimator.mechanism!r} is local; trust='central' takes 'gaussian'."
        )
    if estimator.trust == "local" and estimator.mechanism == "gaussian":
        raise ValueError("mechanism='gaussian' needs trust='central'.")
    if estimator.trust == "central" and estimator.delta == 0:
        raise ValueError("delta must be above 0 for trust='central' (Gaussian noise); got 0.")


def _population_std(table, mean, icc):
    """Standard error of the population mean given the intraclass correlation."""
    variance = mean * (1 - mean) * (icc + (1 - icc) / table.trials)
    if not np.all(variance > 0):
        return 0.0
    return float(np.sqrt(1 / np.sum(table.counts / variance)))


def _linear_shrinkage(mean, variance, trials):
    """Weight on the population of the beta prior with this mean and variance."""
    limit = mean * (1 - mean)
    if limit == 0 or variance <= 0:
        return np.ones(len(trials))
    concentration = max(limit / variance - 1, 0.0)
    return concentration / (concentration + trials)


def _describe(prior, mean, variance, mean_std, table, posterior, report):
    limit = mean * (1 - mean)
    per_client = [table.per_client(values) for values in posterior]
    shrinkage = table.per_client(_linear_shrinkage(mean, variance, table.trials))
    icc = variance / limit if limit > 0 else 0.0
    return _Found(
        prior, mean, mean_std, icc, per_client[0], np.sqrt(per_client[1]), shrinkage, report
    )


def _with_prior(table, prior, report):
    mean, variance = prior.moments()
    limit = mean * (1 - mean)
    std = _population_std(table, mean, variance / limit if limit > 0 else 0.0)
    posterior = prior.posterior(table.successes, table.trials)
    return _describe(prior, mean, variance, std, table, posterior, report)


def _with_average(table, average, report):
    mean, variance = average.moments()
    prior = BetaPrior().with_moments(mean, mean * (1 - mean) / variance - 1)
    posterior = average.posterior(table.successes, table.trials)
    return _describe(prior, mean, variance, average.mean()[1], table, posterior, report)


def _printed(shares, trials, messages, with_minus_one, report, cut=True):
    prior = printed_prior(messages, trials, with_minus_one)
    means, own = printed_estimates(shares, trials, messages, with_minus_one, cut)
    mean, variance = prior.moments()
    stds = np.sqrt(np.clip(means * (1 - means), 0, None) / (prior.alpha + prior.beta + trials + 1))
    std = float(messages.std(ddof=1) / np.sqrt(len(messages)))
    return _Found(prior, mean, std, variance / (mean * (1 - mean)), means, stds, 1 - own, report)


def _single_client(table, prior, report):
    """One client without a known prior keeps its own share; nothing is known of the spread."""
    share = float(table.successes[0] / table.trials[0])
    std = math.sqrt(share * (1 - share) / table.trials[0])
    return _Found(
        prior, share, std, math.nan, np.array([share]), np.array([std]), np.zeros(1), report
    )


def _beta_quantiles(means, stds, tails):
    """Quantiles of the beta distributions with these means and standard deviations."""
    inner = (stds > 0) & (means > 0) & (means < 1)
    mean = np.where(inner, means, 0.5)
    total = mean * (1 - mean) / np.where(inner, stds, 0.25) ** 2 - 1
    return tuple(
        np.where(inner, betaincinv(mean * total, (1 - mean) * total, tail), means) for tail in tails
    )


def _grid_quantiles(estimator, tails):
    """Quantiles of the posteriors on the grid."""
    trials = estimator.n_samples_per_client_
    successes = np.rint(estimator.local_means_ * trials).astype(np.int64)
    table = count_table(successes, trials)
    prior = estimator.prior_
    if not prior.is_known:
        return _beta_quantiles(estimator.means_, estimator.stds_, tails)
    below = prior.posterior_weights(table.successes, table.trials).cumsum(axis=1)
    points = ((below < tail - 1e-12).sum(axis=1) for tail in tails)
    last = len(prior.support) - 1
    return tuple(table.per_client(prior.support[np.minimum(at, last)]) for at in points)
