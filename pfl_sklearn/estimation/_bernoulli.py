"""Personalized proportions of clients under a beta or a non-parametric prior."""

from __future__ import annotations

import math
from typing import Any, Self

import numpy as np
from sklearn.utils import column_or_1d

from pfl_sklearn._client_means import (
    CLIENT_ATTRIBUTES,
    BaseClientMean,
    participant_mask,
    participation_assumption,
    report_of_fit,
)
from pfl_sklearn._clients import segment_sums
from pfl_sklearn._compat import StrOptions, fit_context
from pfl_sklearn._labels import (
    CLASSES,
    check_classes,
    check_labels,
    class_assumption,
    given_classes,
    read_known_classes,
)
from pfl_sklearn._parameters import UNSEEN, PrivateFit, parameter, with_parameters
from pfl_sklearn._typing import Floats, TableLike
from pfl_sklearn.base import ClientClassifierMixin, client_values, read_rows
from pfl_sklearn.estimation._category_reports import count_events
from pfl_sklearn.estimation._count_estimates import central_intervals, estimate_exactly
from pfl_sklearn.estimation._counts import (
    binary_counts,
    check_columns_of_statistics,
    check_counts_table,
    check_spread_is_identified,
    check_two_classes,
    clients_of_table,
    count_table,
    encode_labels,
    successes_and_trials,
)
from pfl_sklearn.estimation._fields import (
    PARTICIPANTS,
    PUBLISH,
    ROWS_PER_PERSON,
    TARGET,
    UNCERTAINTY,
)
from pfl_sklearn.estimation._made_up_tables import PlansProportions
from pfl_sklearn.estimation._plausible_betas import BetaPriors
from pfl_sklearn.estimation._printed._proportions import (
    PRINTED_WEIGHTS,
    one_bit_proportions,
    proportions_of_shares,
)
from pfl_sklearn.estimation._proportion_reports import check_trust, proportions_from_release
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
from pfl_sklearn.estimation._published._counts import BINOMIAL
from pfl_sklearn.priors import BetaPrior, GridPrior
from pfl_sklearn.priors._resolve import default_prior, resolve_prior
from pfl_sklearn.privacy._mechanisms._noise import noise_generator
from pfl_sklearn.statistics import ClientStatistics
from pfl_sklearn.statistics._accumulate import (
    AccumulatedStatisticsMixin,
    accumulate_statistics,
    check_accumulates,
    check_statistics,
)

_PUBLIC_OF_PROPORTIONS = ("population_mean_", "population_mean_std_", "prior_", "icc_")
# Methods by prior for every mechanism ("none": counts are exact). Two bits and noisy sums identify
# a mean and a variance, which is all that a beta prior has; a grid needs reports of the counts.
_SUPPORTED: dict[str, dict[type, tuple[str, ...]]] = {
    "none": {BetaPrior: ("ml", "moments", *PRINTED_WEIGHTS), GridPrior: ("ml",)},
    "auto": {BetaPrior: ("ml",), GridPrior: ("ml",)},
    "subset_selection": {BetaPrior: ("ml",), GridPrior: ("ml",)},
    "two_bit": {BetaPrior: ("ml",)},
    "one_bit": {BetaPrior: PRINTED_WEIGHTS},
    "gaussian": {BetaPrior: ("ml",)},
}


@with_parameters
class BernoulliMean(
    ClientClassifierMixin,
    PlansProportions,
    PublishesClients,
    AccumulatedStatisticsMixin,
    PrivateFit,
    BaseClientMean,
):
    r"""Each client's probability of a binary outcome, shrunk as far as the data warrant.

    Client i has :math:`z_i` successes in :math:`n_i` trials:

    .. math:: z_i \sim \mathrm{Binomial}(n_i, p_i), \qquad p_i \sim \mathrm{Beta}(\alpha, \beta),

    and the estimate is the posterior mean :math:`(\alpha + z_i) / (\alpha + \beta + n_i)`. As a
    classifier it predicts every row with its client's probability; features have no effect. For
    tables of counts use :meth:`fit_counts`.

    Attributes
    ----------
    classes_ : ndarray of shape (2,)
        Class labels; the second one counts as success.
    clients_ : ndarray of shape (n_clients,)
        Sorted ids; row i of every per-client array is ``clients_[i]``.
    n_samples_per_client_ : ndarray of shape (n_clients,)
        Number of trials of each client.
    means_, stds_ : ndarrays of shape (n_clients,)
        Posterior mean and standard deviation of each client's probability of ``classes_[1]``. With
        ``mechanism="one_bit"`` means may lie outside [0, 1] (predicted probabilities are clipped),
        and `stds_` is NaN.
    local_means_ : ndarray of shape (n_clients,)
        Each client's own share of successes; with ``publish="clients"`` plus noise.
    noise_std_ : ndarray of shape (n_clients,)
        Standard deviation of that noise, with ``publish="clients"``.
    shrinkage_ : ndarray of shape (n_clients,)
        Weight on the population: 0 is the client's own share, 1 the population's. For a grid prior,
        the weight under the beta prior with the same mean and variance.
    prior_ : BetaPrior or GridPrior
        The prior with its values. After a private fit with a beta prior, its mean and variance are
        those of an average over all priors that the reports leave plausible.
    population_mean_, population_mean_std_ : float
        Population probability and its standard error; 0 if the prior was given.
    icc_ : float
        Intraclass correlation, ``1 / (alpha + beta + 1)`` for a beta prior.
    n_features_in_, feature_names_in_ : int, and ndarray of str
        Number of columns of `X`, and their names, if it has any.
    privacy_ : PrivacyReport
        What the fit protects, how, and what is released.

    Raises
    ------
    ValueError
        For ids that are missing or of mixed types, other than two classes, fractional weights, an
        unknown prior where every client has one trial, a combination of prior, method and mechanism
        that does not exist, fewer than two participants, and participants with a printed method.

    Notes
    -----
    Section 2.2 of Ozkara et al. (2023), with these differences; :ref:`estimation` has the formulas:

    - Numbers of trials may differ, and the default maximizes the beta-binomial likelihood. The
      printed weights use the variance of the shares as that of the probabilities.
    - Subset selection (Ye and Barg, 2018) and the two-bit scheme replace the one-bit messages of
      equation 7 (ICLR). Estimates are averaged over beta priors by the likelihood of the reports.
    - Errors are averaged over beta priors by their likelihood (:ref:`few-clients`): in full up to
      100 clients, not at all from 1,000, in part in between; with a grid prior for any number of
      clients, but not after a release.
    - A participant's own report is among those that are pooled. The effect is of order 1 / m.
    - Only the numbers of trials of `participants` decide how reports are randomized (Remark 7,
      ICLR). The other clients have an epsilon of 0, unless scores of their rows choose parameters.

    :meth:`credible_interval` gives quantiles of the posterior, averaged over priors as
    `uncertainty` says; after private fits, of the beta distribution with mean `means_` and standard
    deviation `stds_`.

    *Published tables* (``unit="row"``, ``publish="clients"``; :ref:`publishing`): every client's
    number of successes gets discrete Laplace noise. All attributes follow from the noised counts
    and from public numbers; :meth:`for_client` and :meth:`release` hand out the whole table.
    `delta`, `trust`, `mechanism`, `method` and `uncertainty` have no effect.

    Otherwise the privacy promise does not cover the clients' own estimates: client i may see its
    own (joint differential privacy). Hand it over with :meth:`for_client`. Random bits are drawn by
    comparing integers with a fixed-point threshold.

    Memory beyond the input: 28 bytes per row and 60 per client (80 with `participants`); for subset
    selection another ``17 (n + 1)`` bytes per client while it draws.

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
    """

    _likelihood = "proportion"
    _default_component = default_prior
    # The priors are those that intervals average over. After a release they are None.
    _population_attributes = (*_PUBLIC_OF_PROPORTIONS, "classes_", "_priors")
    _state_attributes = ("_posterior_is_exact",)
    _range_of_means = (0.0, 1.0)
    _client_attributes = (*BaseClientMean._client_attributes, "noise_std_", "_intervals")

    prior: Any = parameter(
        default="beta",
        ranges="no_validation",
        kw_only=False,
        text="""
            {"beta", "grid"}, BetaPrior or GridPrior
                Population prior. Parameters that it leaves None are estimated. "grid" fits a
                population of any shape.
        """,
    )
    method: str = parameter(
        default="ml",
        ranges=[StrOptions({"ml", "moments", "printed", "printed_eq32"})],
        text="""
            {"ml", "moments", "printed", "printed_eq32"}
                How the prior is estimated:

                - "ml": marginal likelihood. Grid priors need it, and so do private fits other than
                  ``mechanism="one_bit"``;
                - "moments": debiased moments, in which clients weigh as their trials do;
                - "printed", "printed_eq32": the published weights of equation 6 (ICLR), and of
                  equation 32 (ICLR), which lacks a -1 and is the weight at Theorem 4 (ICLR).
                  ``mechanism="one_bit"`` needs one of them.
        """,
    )
    uncertainty: str = UNCERTAINTY
    epsilon = parameter(also="It protects a client's whole data in the pooled statistics.")
    delta = parameter(
        default=0.0,
        also="""
            ``trust="central"`` adds such noise; local mechanisms, the default, are pure and do not
            use it.
        """,
    )
    trust: str = parameter(
        default="local",
        ranges=[StrOptions({"local", "central"})],
        text="""
            {"local", "central"}
                "local": every client randomizes its own report. "central": a trusted server adds
                Gaussian noise to the histogram of counts if all clients have the same number of
                trials, otherwise to two moments. The default trusts nobody, because answers of one
                of few kinds stand the noise; means do not. It has no effect with `publish`, whose
                server is trusted.
        """,
    )
    mechanism: str = parameter(
        default="auto",
        ranges=[StrOptions({"auto", "subset_selection", "two_bit", "one_bit", "gaussian"})],
        text="""
            {"auto", "subset_selection", "two_bit", "one_bit", "gaussian"}
                How reports are randomized. Under central trust "auto" is "gaussian". Under local
                trust it is subset selection if all clients have the same number of trials, at most
                500, and otherwise two bits.
        """,
    )
    classes: Any = CLASSES
    participants: Any = PARTICIPANTS
    unit: str = parameter(
        default="client",
        ranges=[StrOptions({"client", "row"})],
        text="""
            {"client", "row"}
                Whom `epsilon` protects: a client with all its trials, or the outcome of a single
                trial. "row" goes with ``publish="clients"``.
        """,
    )
    publish: str | None = PUBLISH
    target: str = TARGET
    rows_per_person: int | None = ROWS_PER_PERSON
    ledger = parameter()
    unseen: str = UNSEEN
    random_state = parameter()

    @property
    def _public_labels(self):
        if self.classes is None:
            return "the two class labels are public, and that both occur unless they are 0 and 1"
        return class_assumption(self)

    @fit_context(prefer_skip_nested_validation=True)
    def fit(
        self,
        X: TableLike,
        y: TableLike = None,
        *,
        groups: TableLike = None,
        sample_weight: TableLike = None,
    ) -> Self:
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
            Whole number of trials that each row stands for; a row of weight 0 is absent. Refused
            when `epsilon` is finite.
        """
        prior = self._charged_prior(sample_weight)
        self._require_targets(y)
        # In a private fit, which labels occur would be a release; `encode_labels` allows for it.
        private = math.isfinite(self.epsilon)
        classes, labels = encode_labels(y, private, self.classes)
        rows = read_rows(self, X, labels, groups, sample_weight)
        check_two_classes(classes, rows, private or self.classes is not None)
        ids = rows.clients.ids
        attributes, report = self._estimate(prior, ids, *successes_and_trials(rows))
        attributes["classes_"] = classes
        return self._store(ids, attributes, report, with_groups=groups is not None, X=X)

    @fit_context(prefer_skip_nested_validation=True)
    def fit_counts(
        self, successes: TableLike, trials: TableLike, *, groups: TableLike = None
    ) -> Self:
        """Estimate from a table of counts; without `classes`, ``classes_`` is [0, 1].

        Parameters
        ----------
        successes, trials : array-like of whole numbers, shape (n_rows,)
            Counts with ``0 <= successes <= trials`` and ``trials >= 1``. With a finite `epsilon`
            other successes are rounded and cut to this range, as an error would reveal them.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; rows of one client are added up. None: row i is client i.
        """
        prior = self._charged_prior(None)
        successes, trials = check_counts_table(successes, trials, math.isfinite(self.epsilon))
        ids, codes = clients_of_table(groups, len(trials))
        successes = segment_sums(successes, codes, len(ids))
        trials = segment_sums(trials, codes, len(ids))
        attributes, report = self._estimate(prior, ids, successes, trials)
        attributes["classes_"] = self._classes_of_counts()
        # Rows of a table are clients in any case, so that predictions need their ids.
        return self._store(ids, attributes, report, with_groups=True)

    @fit_context(prefer_skip_nested_validation=True)
    def fit_statistics(self, statistics: ClientStatistics) -> Self:
        """Estimate from statistics of labels 0 and 1; without `classes`, ``classes_`` is [0, 1].

        Parameters
        ----------
        statistics : ClientStatistics
            Of one target that is 0 or 1 in every row; weights are numbers of trials, also with a
            finite `epsilon` (as in :meth:`fit_counts`).

        Raises
        ------
        ValueError
            For several targets, other values than 0 and 1 (with a finite `epsilon` a client's
            successes are cut to its trials instead, unless clients are published), and weights
            whose sums by client are not whole numbers.
        """
        check_statistics(statistics)
        check_columns_of_statistics(statistics)
        participant_mask(self.participants, statistics.clients)
        # A table that is published needs rows that were checked before they were summed.
        private = math.isfinite(self.epsilon) and self.publish is None
        if self.publish is not None:
            check_published_totals(statistics, binary_counts(statistics, private)[0])
        prior = self._charged_prior(None)
        successes, trials = binary_counts(statistics, private)
        ids = statistics.clients
        attributes, report = self._estimate(prior, ids, successes, trials)
        attributes["classes_"] = self._classes_of_counts()
        return self._store(ids, attributes, report, with_groups=True)

    def _classes_of_counts(self):
        """Classes of successes and trials: the second is a success."""
        return np.array([0, 1]) if self.classes is None else np.unique(self.classes)

    @fit_context(prefer_skip_nested_validation=True)
    def partial_fit(
        self,
        X: TableLike,
        y: TableLike = None,
        classes: TableLike = None,
        *,
        groups: TableLike = None,
        sample_weight: TableLike = None,
    ) -> Self:
        """Fit to the rows of earlier calls and to these, of which statistics are kept.

        Parameters
        ----------
        X, y, groups, sample_weight : rows
            As in :meth:`fit`; clients may be new.
        classes : array-like of shape (2,), default=None
            Both classes, in the first call; None: those of `y`, which must hold both then.

        Returns
        -------
        self

        Raises
        ------
        ValueError
            As ``fit``, with a finite `epsilon`, and after a fit by other methods, which keep no
            statistics.
        """
        check_accumulates(self)
        self._require_targets(y)
        y = column_or_1d(y)
        check_labels(y)
        known = getattr(self, "classes_", None) if hasattr(self, "_statistics") else None
        check_classes(self.classes, 2)
        classes = given_classes(self, classes)
        known, labels = read_known_classes(y, known, classes, self, private=False)
        if len(known) > 2:
            raise ValueError(f"BernoulliMean takes two classes; got {known.tolist()[:20]}.")
        statistics = accumulate_statistics(self, X, labels, groups, sample_weight, None)
        return self._fit_accumulated(X, statistics, {"classes_": known})

    def predict_proba(self, X: TableLike, *, groups: TableLike = None) -> Floats:
        """Class probabilities (n_rows, 2) of every row's client; the population's if it is unseen.

        Parameters
        ----------
        X : array-like of n_rows rows
            Only its length and feature names are read.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.
        """
        codes = self._encode_rows(X, groups)
        means = client_values(getattr(self, "means_", None), self.population_mean_, codes)
        probability = np.clip(means, 0.0, 1.0)  # printed weights may be negative or above 1
        return np.column_stack([1 - probability, probability])

    def predict_log_proba(self, X: TableLike, *, groups: TableLike = None) -> Floats:
        """Logarithms of :meth:`predict_proba`; minus infinity where a probability is 0.

        Parameters
        ----------
        X, groups : rows and their clients
            As in :meth:`predict_proba`.
        """
        with np.errstate(divide="ignore"):
            return np.log(self.predict_proba(X, groups=groups))

    def predict(self, X: TableLike, *, groups: TableLike = None) -> np.ndarray:
        """More probable class of every row's client (n_rows,); the first on a tie.

        Parameters
        ----------
        X, groups : rows and their clients
            As in :meth:`predict_proba`.
        """
        probability = self.predict_proba(X, groups=groups)[:, 1]
        return self.classes_[(probability > 0.5).astype(np.intp)]

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        tags.classifier_tags.poor_score = True
        return tags

    def _interval(self, level):
        """Bounds of the central intervals: quantiles of the posterior, or of a matched beta."""
        if hasattr(self, "_intervals"):  # of a published table
            return self._intervals.central(level)
        # Averages over priors, as after a release, and printed weights are no prior's posterior.
        if not self._posterior_is_exact:
            tails = (1 - level) / 2, (1 + level) / 2
            return BetaPriors.matched_quantiles(self.means_, self.stds_, tails)
        table = count_table(*self._client_counts())
        return central_intervals(table, self.prior_, self._priors, level)

    def _client_counts(self):
        """Successes and trials (m,) of the clients."""
        # A model of for_client has its client's share alone, from which the counts follow.
        trials = self.n_samples_per_client_
        return np.rint(self.local_means_ * trials), trials

    def _privacy_events(self):
        """Accounting events of a fit: () if nothing is released."""
        if self.publish is not None:
            return published_events(self)
        # The numbers of trials decide whether a server releases a histogram or moments. When a
        # client contributes nothing, the moments have the larger relative sensitivity.
        return count_events(resolve_prior(self), self, zero_out=1.0)

    def _check_parameters(self, prior, sample_weight):
        """Refuse combinations of parameters that do not go together."""
        check_classes(self.classes, 2)
        if is_publishing(self, "row"):
            check_published_counts(self, prior, BINOMIAL, ("participants",), sample_weight)
            return
        # With a known prior clients send nothing, so that trust and mechanism do not matter.
        releases = math.isfinite(self.epsilon) and not prior.is_known
        if math.isfinite(self.epsilon) and sample_weight is not None:
            raise ValueError("sample_weight is not supported with a finite epsilon.")
        if releases:
            check_trust(self)
        if self.participants is not None and self.method in PRINTED_WEIGHTS:
            raise ValueError(
                f"participants does not go with method={self.method!r}, whose weights need every "
                "client's message; leave it None, or use method='ml'."
            )
        way = "none"
        if releases:
            # A server's noise is Gaussian, whether "auto" or "gaussian" was asked for.
            way = self.mechanism if self.trust == "local" else "gaussian"
        allowed = _SUPPORTED[way].get(type(prior), ())
        if self.method not in allowed:
            raise ValueError(
                f"method={self.method!r} does not go with {type(prior).__name__}, mechanism="
                f"{self.mechanism!r} and epsilon={self.epsilon!r}; expected "
                f"{' or '.join(map(repr, allowed)) or 'another prior'}."
            )

    def _estimate(self, prior, ids, successes, trials):
        """Fit to the counts of the clients: fitted attributes and privacy report."""
        if self.publish is not None:
            attributes, report, _ = publish_counts(
                self, prior, BINOMIAL, successes, trials, self._public_labels
            )
            return {**attributes, "n_samples_per_client_": trials.astype(np.int64)}, report
        table, sends = count_table(successes, trials), participant_mask(self.participants, ids)
        senders = table if sends.all() else count_table(successes[sends], trials[sends])
        if math.isfinite(self.epsilon) and not prior.is_known:
            fitted, entries = self._estimate_from_release(table, senders, sends, prior)
        else:  # in a private fit under a known prior, clients send nothing
            fitted = self._estimate_exactly(table, senders, prior)
            entries = {} if math.isinf(self.epsilon) else None
        # Own estimates use a client's exact counts, which only that client may see.
        report = report_of_fit(self, _PUBLIC_OF_PROPORTIONS, CLIENT_ATTRIBUTES, sends, entries)
        return fitted.attributes(table), report

    def _estimate_exactly(self, table, senders, prior):
        """Fit the prior to exact counts, and estimate every client's proportion under it."""
        if not prior.is_known and table.n_clients > 1:
            if self.method in PRINTED_WEIGHTS:
                return proportions_of_shares(table, self)
            check_spread_is_identified(senders)
        return estimate_exactly(table, senders, prior, self, BetaPriors)

    def _estimate_from_release(self, table, senders, sends, prior):
        """Randomize the counts of `senders`, and fit to these; with entries of the report."""
        rng, _ = noise_generator(self.random_state)
        # One bit carries no information on the spread, whatever the numbers of trials.
        if self.mechanism == "one_bit":
            fitted, entries = one_bit_proportions(table, self, rng)
        else:
            fitted, entries = proportions_from_release(table, senders, prior, self, rng)
        # Labels are read before anything is randomized.
        return fitted, {
            **entries,
            "assumptions": (self._public_labels, *participation_assumption(sends)),
        }
