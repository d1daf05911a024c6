"""Base of the estimators of one mean per client, which read no features.

A new likelihood is a subclass that reads observations, fits them, and names the attributes of its
population. With a private fit it also inherits from `PrivateFit`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from numbers import Integral, Real
from typing import Any, ClassVar, Self

import numpy as np
import pandas as pd
from scipy.optimize import brentq
from scipy.special import ndtr, ndtri
from sklearn.utils import check_random_state, check_scalar

from pfl_sklearn._client_tables import (
    class_quantity,
    client_table,
    coverage_note,
    mark_coverage,
    rank_table,
)
from pfl_sklearn._clients import Array, EncodedClients, format_id, match_clients
from pfl_sklearn._columns import validate_data
from pfl_sklearn._compat import BaseEstimator, names_class, num_samples
from pfl_sklearn._typing import Floats, RandomState, TableLike
from pfl_sklearn.base import ClientMixin, ClientRegressorMixin, FitRows, check_level, client_values
from pfl_sklearn.priors._resolve import resolve_prior
from pfl_sklearn.privacy import PrivacyReport
from pfl_sklearn.privacy._ledger import charge_fit
from pfl_sklearn.privacy._report import finalize_report, private_report
from pfl_sklearn.privacy._spending import noise_seed
from pfl_sklearn.statistics._accumulate import fit_accumulated

_MOST_DOUBLINGS = 200  # of a step: means then differ by a factor of 1e60
# Attributes that use a client's exact rows, which no release covers.
CLIENT_ATTRIBUTES = (
    "means_",
    "stds_",
    "shrinkage_",
    "local_means_",
    "clients_",
    "n_samples_per_client_",
)


def moved_to_total(
    means: Floats, variances: Floats, weights: Floats, total: float, limits: tuple[float, float]
) -> Floats:
    """Means (m,) within limits whose weighted sum is a total, with the smallest squared moves.

    Each move is over the variance of its mean. Those at a limit stay there, and the others make up
    for them.
    """
    low, high = limits
    gains, whole = weights * variances, weights.sum()
    if not gains @ weights > 0:
        raise ValueError("none of the means that count is uncertain, so none can move.")
    possible = isinstance(total, Real) and low * whole < total < high * whole
    if not possible:
        raise ValueError(
            f"total must be a finite number between {low * whole:.6g} and {high * whole:.6g}, the "
            f"limits of sums with these weights; got {total!r}."
        )

    def excess(step):
        return np.clip(means + step * gains, low, high) @ weights - total

    # Without limits this is the step. With limits it is too short, as some means stop there.
    start = excess(0.0)
    step = -start / (gains @ weights)
    if not start or (math.isinf(low) and math.isinf(high)):
        return means + step * gains
    for _ in range(_MOST_DOUBLINGS):
        step *= 2
        if start * excess(step) <= 0:
            step = brentq(excess, 0.0, step, xtol=abs(step) * 1e-14)
            return np.clip(means + step * gains, low, high)
    raise ValueError(f"the means that are uncertain cannot make up for total={total!r}.")


class BaseClientMean(ClientMixin, BaseEstimator):
    """Estimator of one mean per client, whose predictions do not depend on features."""

    _fits_a_copy = True
    _range_of_means: ClassVar[tuple[float, float]] = (-math.inf, math.inf)
    _client_attributes: ClassVar[tuple[str, ...]] = (*CLIENT_ATTRIBUTES, "_statistics")

    # Set by fit; these are no defaults.
    means_: Floats
    stds_: Floats

    def credible_interval(self, level: float = 0.95) -> tuple[Floats, Floats]:
        """Central posterior interval of every client's mean; see Notes for what it is based on.

        Parameters
        ----------
        level : float in (0, 1), default=0.95
            Posterior probability of the interval.

        Returns
        -------
        lower, upper : ndarrays of the shape of `means_`
        """
        self._require_fitted("means_")
        check_level(level)
        return self._interval(level)

    def summary(self, level: float = 0.95) -> pd.DataFrame:
        """Table of the clients.

        Parameters
        ----------
        level : float in (0, 1), default=0.95
            Posterior probability of the intervals.

        Returns
        -------
        DataFrame
            One row per client (and output), indexed by client id: rows (and exposure), the mean of
            its own rows, its personalized mean with standard deviation and interval, and shrinkage
            if there is any. ``columns.name`` says of which class proportions are. After a private
            fit a note below the table says whether the promise covers it (``attrs["privacy"]``).

            Published tables also have the standard deviation of the discrete Laplace noise on the
            mean of the client's own rows ("noise_std"), and a "quality": "mostly noise" where its
            variance exceeds that between clients, "mostly population" where the client's own rows
            have less than half of the weight otherwise, and "own rows".
        """
        lower, upper = self.credible_interval(level)
        columns = {"n_samples": self.n_samples_per_client_}
        if hasattr(self, "exposure_per_client_"):
            columns["exposure"] = self.exposure_per_client_
        columns["local_mean"] = self.local_means_
        if hasattr(self, "noise_std_"):  # of the local mean, which is published
            columns["noise_std"] = self.noise_std_
        columns |= {
            "mean": self.means_,
            "std": self.stds_,
            "lower": lower,
            "upper": upper,
        }
        if hasattr(self, "shrinkage_"):  # means of others have many weights, not one
            columns["shrinkage"] = self.shrinkage_
        if hasattr(self, "noise_std_"):
            is_noise = self.noise_std_ > self._spread_between()
            columns["quality"] = np.select(
                [is_noise, self.shrinkage_ > 0.5], ["mostly noise", "mostly population"], "own rows"
            )
        index = pd.Index(self.clients_, name="client")
        if self.means_.ndim == 2:
            d = self.means_.shape[1]
            index = pd.MultiIndex.from_product([index, range(d)], names=["client", "output"])
            columns = {
                name: np.repeat(values, d) if values.ndim == 1 else values.ravel()
                for name, values in columns.items()
            }
        table = mark_coverage(pd.DataFrame(columns, index=index), self)
        table.columns.name = class_quantity(self, "probability")
        return table

    def benchmark(self, total: float, *, weights: TableLike = None) -> pd.Series:
        """Clients' means, moved so that they add up to a total that was published elsewhere.

        Parameters
        ----------
        total : float
            What the weighted sum of the means is to be.
        weights : Series indexed by client, or array-like of shape (n_clients,), default=None
            Weights in that sum, >= 0, such as numbers of inhabitants; an array is in the order of
            ``clients_``. None: the numbers of rows (or the exposure) of the clients, so that
            `total` is a sum over rows.

        Returns
        -------
        Series
            Means indexed by client. Among those that add up, they have the smallest sum of squared
            moves, each over its variance (`stds_`): precise means move least. Proportions stay
            between 0 and 1, and rates above 0. After a private fit ``attrs["privacy"]`` says
            whether the promise covers them.

        Raises
        ------
        ValueError
            If means have several outputs, weights are negative or all 0, or no means in their range
            add up to `total`.

        Notes
        -----
        It reads nothing but the fitted values and `total`, so it costs no privacy if both are
        covered. Intervals do not move along: they are those of the means before.

        References
        ----------
        Wang, J., Fuller, W. A. and Qu, Y. (2008). Small area estimation under a restriction. Survey
        Methodology, 34, 29-36.
        """
        self._require_fitted("means_")
        if self.means_.ndim == 2:
            raise ValueError("benchmark takes means of one output; fit each output by itself.")
        if weights is None:
            weights = getattr(self, "exposure_per_client_", self.n_samples_per_client_)
        if hasattr(weights, "reindex"):  # by client, in any order
            weights = weights.reindex(self.clients_)
        w = np.asarray(weights, dtype=float)
        if w.shape != self.means_.shape or not ((w >= 0) & np.isfinite(w)).all() or not w.any():
            raise ValueError(
                f"weights must be {len(self.means_)} finite numbers of at least 0, not all 0; got "
                f"{weights!r}."
            )
        means = moved_to_total(self.means_, self.stds_**2, w, total, self._range_of_means)
        index = pd.Index(self.clients_, name="client")
        series = pd.Series(means, index, name="mean")
        if note := coverage_note(self):
            series.attrs["privacy"] = note
        return series

    def exceedance(self, threshold: Any) -> pd.Series:
        """Posterior probability that a client's mean is above a threshold.

        Parameters
        ----------
        threshold : float, Series indexed by client, or array-like of shape (n_clients,)
            Threshold of all clients, or of each in the order of ``clients_``, in units of the
            means; of proportions within (0, 1), of rates above 0.

        Returns
        -------
        Series
            Probabilities indexed by client. After a private fit ``attrs["privacy"]`` says whether
            the promise covers them.

        Raises
        ------
        ValueError
            If means have several outputs, or a threshold is out of range.

        Notes
        -----
        They are of the posterior of :meth:`credible_interval`. Of means and published tables its
        quantiles are interpolated on the scale of a normal variable: probabilities are exact to
        about 3e-4 between 1e-6 and 1 - 1e-6, and 0 or 1 beyond.
        """
        self._require_fitted("means_")
        if self.means_.ndim == 2:
            raise ValueError("exceedance takes means of one output; fit each output by itself.")
        if hasattr(threshold, "reindex"):  # by client, in any order
            missing = pd.Index(self.clients_).difference(threshold.index)
            if len(missing):
                raise ValueError(f"threshold has none for client {format_id(missing[0])}.")
            threshold = threshold.reindex(self.clients_)
        values, (low, high) = np.asarray(threshold), self._range_of_means
        is_number = values.dtype.kind in "iuf" and values.shape in ((), self.means_.shape)
        if not is_number or not ((values > low) & (values < high)).all():
            raise ValueError(
                f"threshold must be one number or {len(self.means_)}, between {low:g} and {high:g};"
                f" got {threshold!r}."
            )
        thresholds = np.broadcast_to(values, self.means_.shape).astype(np.float64)
        if (posterior := self._averaged_posterior()) is not None:
            priors, *counts = posterior
            above = 1 - priors.below(*counts, thresholds)
        else:
            scores, quantiles = self._quantiles()
            found = [
                np.interp(t, each, scores, left=-np.inf, right=np.inf)
                for t, each in zip(thresholds, quantiles.T, strict=True)
            ]
            above = ndtr(-np.array(found))
        index = pd.Index(self.clients_, name="client")
        series = pd.Series(above, index, name="exceedance")
        if note := coverage_note(self):
            series.attrs["privacy"] = note
        return series

    def ranks(
        self, *, level: float = 0.95, n_draws: int = 2000, random_state: RandomState = 0
    ) -> pd.DataFrame:
        """Ranks of the clients, with intervals that say how little a ranking may tell.

        Parameters
        ----------
        level : float in (0, 1), default=0.95
            Posterior probability of the intervals.
        n_draws : int, default=2000
            Draws from the posterior.
        random_state : int, RandomState instance or None, default=0
            Seed of the draws.

        Returns
        -------
        DataFrame
            Indexed by client and sorted: estimate, rank (its posterior mean; 1 is the largest),
            lower and upper (quantiles), and probability_largest. After a private fit a note below
            the table says whether the promise covers it (``attrs["privacy"]``).

        Raises
        ------
        ValueError
            If means have several outputs.

        Notes
        -----
        The mean of a client's rank minimizes the expected squared error of ranks (Laird and Louis,
        1989). Clients' posteriors are those of :meth:`credible_interval`. Of proportions and rates
        the population is drawn, too; means are drawn independently of one another.

        References
        ----------
        Laird, N. M. and Louis, T. A. (1989). Empirical Bayes ranking methods. Journal of
        Educational Statistics, 14, 29-46.
        """
        self._require_fitted("means_")
        check_level(level)
        if self.means_.ndim == 2:
            raise ValueError("ranks takes means of one output; fit each output by itself.")
        n = check_scalar(n_draws, "n_draws", Integral, min_val=1)
        rng = check_random_state(random_state)
        if (posterior := self._averaged_posterior()) is not None:
            priors, *counts = posterior
            draws = priors.draws(*counts, n, rng)
        else:
            scores, quantiles = self._quantiles()
            drawn = rng.normal(size=(len(self.means_), n))
            parts = zip(drawn, quantiles.T, strict=True)
            draws = np.transpose([np.interp(z, scores, each) for z, each in parts])
        table = rank_table(draws, self.means_, self.clients_, level)
        return mark_coverage(table, self)

    def _averaged_posterior(self: Any):
        """Priors that errors are averaged over, and clients' counts (m,) and sizes; or None."""
        priors = getattr(self, "_priors", None)
        # Published tables have intervals of their own, and releases conjugate ones.
        if priors is None or hasattr(self, "_intervals") or not self._posterior_is_exact:
            return None
        return (priors, *self._client_counts())

    def _quantiles(self):
        """Normal scores (k,), and the posterior quantiles (k, m) of the means at them."""
        scores = 0.01 + 4.79 * np.linspace(0, 1, 33) ** 1.4
        bounds = np.array([self._interval(level) for level in 2 * ndtr(scores) - 1])
        quantiles = np.concatenate([bounds[::-1, 0], bounds[:, 1]])
        return np.concatenate([-scores[::-1], scores]), quantiles

    def coef_table(self) -> pd.DataFrame:
        """Table of the clients' means, for a join with rows in a database.

        Returns
        -------
        DataFrame
            One row per client: its id as "client", "mean" and "mean_std"; with outputs in columns
            "mean_0", "mean_1", ..., and their standard deviations after them.
        """
        self._require_fitted("means_")
        names = ["mean"]
        if self.means_.ndim == 2:
            names = [f"mean_{k}" for k in range(self.means_.shape[1])]
        m = len(self.means_)
        values, stds = self.means_.reshape(m, -1), self.stds_.reshape(m, -1)
        table = client_table("client", self.clients_, names, values, stds)
        return mark_coverage(table, self)

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.no_validation = True
        # Features are not read, so that any kind of them will do.
        tags.input_tags.sparse = True
        tags.input_tags.allow_nan = True
        tags.input_tags.string = True
        return tags

    def _interval(self, level):
        """Bounds of the clients' central intervals: those of normal posteriors, unless refined."""
        half = ndtri(0.5 + level / 2) * self.stds_
        return self.means_ - half, self.means_ + half

    def _charged_prior(self, sample_weight):
        """Validated prior of a fit, whose promise the ledger has recorded."""
        prior = resolve_prior(self)
        self._check_parameters(prior, sample_weight)
        self._charge()
        return prior

    def _charge(self):
        """Let the ledger, if there is one, record the promise of a fit, or refuse the fit."""
        # Before any data is read: a fit that fails later may already have revealed something.
        charge_fit(self)  # without a private fit there is none

    def _check_parameters(self, prior, sample_weight):
        """Refuse parameters that do not go together, before any data is touched."""

    def _require_targets(self, y):
        """Raise ValueError without targets, which scikit-learn's tools may leave out."""
        if y is None:
            raise ValueError(
                f"{type(self).__name__} requires y to be passed, but the target y is None."
            )

    def _encode_rows(self, X, groups):
        """Position in `clients_` of every row's client; refuses other columns than those of fit."""
        codes = self._encode_predict(X, groups)
        if hasattr(self, "n_features_in_"):  # a fit to counts saw no columns
            validate_data(self, X, reset=False, skip_check_array=True)
        return codes

    def _fit_accumulated(
        self, X: TableLike, statistics: Any, more: Any = None, **params: Any
    ) -> Self:
        """Fit to statistics, and store them with the fit and `more` attributes."""
        columns = self._column_attributes(X)  # may be refused, so before anything is fitted
        return fit_accumulated(self, statistics, {**columns, **(more or {})}, **params)

    def _store(
        self,
        ids: Array,
        attributes: dict[str, Any],
        report: PrivacyReport,
        *,
        with_groups: bool,
        X: TableLike = None,
    ) -> Self:
        """Set the fitted attributes, all at once: a fit that fails leaves those of the last.

        `X` is None for a fit to counts, which sees no columns.
        """
        columns = {} if X is None else self._column_attributes(X)
        report = finalize_report(
            self, report
        )  # a warning that is an error leaves the last fit as it was
        common = {"clients_": ids, "_fitted_with_groups": with_groups, "privacy_": report}
        self._set_fitted({**columns, **attributes, **common})
        return self


class MeanRegressorMixin(ClientRegressorMixin):
    """Predictions of estimators of means that have a standard deviation for every client.

    A subclass sets `_new_client_std`, that of the mean of a client without rows in fit.
    """

    __metadata_request__predict = {"groups": True, "return_std": True}

    @names_class
    def predict(
        self, X: TableLike, *, groups: TableLike = None, return_std: bool = False
    ) -> Floats | tuple[Floats, Floats]:
        """Mean of every row's client; the population mean for clients without rows in fit.

        Parameters
        ----------
        X : array-like of n_rows rows
            Only its length and feature names are read.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.
        return_std : bool, default=False
            Also return the standard deviation of the client's mean (not of a new row).

        Returns
        -------
        y, std : ndarrays of shape (n_rows,) or (n_rows, d)
            `std` only if `return_std`.
        """
        codes = self._encode_rows(X, groups)
        means = client_values(getattr(self, "means_", None), self.population_mean_, codes)
        if not return_std:
            return means
        return means, client_values(getattr(self, "stds_", None), self._new_client_std, codes)

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = True  # without features, no score is good on other tables
        return tags


def report_of_fit(
    model: Any,
    published: tuple[str, ...],
    unpublished: tuple[str, ...],
    sends: Any,
    entries: dict[str, Any] | None,
) -> PrivacyReport:
    """Report of a fit of `model` to the messages of the clients in the mask `sends` (m,).

    A release covers the attributes `published`, not those `unpublished`. `entries` has what a
    mechanism says of its noise or rounding ("facts") and other fields of the report: it is empty if
    messages are exact, and None if the user gave the population, so that nothing is sent.
    """
    if entries is None:
        return PrivacyReport.of_known_population(published, unpublished, len(sends))
    n_senders = int(sends.sum())
    if math.isfinite(getattr(model, "epsilon", math.inf)):
        seeded = noise_seed(model) is not None
        names: dict[str, Any] = {"released": published, "not_released": unpublished}
        return private_report(n_clients=n_senders, seeded=seeded, **names, **entries)
    reason = "epsilon=inf was asked for."
    if not hasattr(model, "epsilon"):
        reason = f"{type(model).__name__} has no private fit."
    elif entries:
        reason = "a quantizer saves communication and protects nobody."
    return PrivacyReport.unprotected(
        reason,
        **entries.get("facts", {}),
        not_released=published + unpublished,
        n_clients=n_senders,
    )


def participant_mask(participants: Any, ids: Array) -> Any:
    """Mask (m,) of the clients that send something: those in `participants`, or all for None."""
    # Ids that the table lacks are skipped, because a fold may lack clients.
    if participants is None:
        return np.ones(len(ids), dtype=bool)
    if isinstance(participants, Set | Mapping):  # NumPy makes one object of them
        participants = list(participants)
    # Ids match as they do in predictions: those of another kind are refused, not passed over.
    codes = match_clients(participants, num_samples(participants), ids, "participants")
    sends = np.zeros(len(ids), dtype=bool)
    sends[codes[codes >= 0]] = True
    if sends.sum() < 2:  # a single one shows no spread between clients
        raise ValueError(
            f"participants must name at least two clients of the table; got {sends.sum()} of "
            f"{len(ids)}. Give ids as in groups=, or participants=None for all clients."
        )
    return sends


def select_senders(rows: FitRows, sends: Any) -> FitRows:
    """Rows of the clients that send something."""
    if sends.all():
        return rows
    ids, codes = rows.clients
    sent = sends[codes]
    clients = EncodedClients(ids[sends], (np.cumsum(sends) - 1)[codes[sent]])
    return FitRows(rows.y[sent], clients, None if rows.weights is None else rows.weights[sent])


def participation_assumption(sends: Any) -> tuple[str, ...]:
    """Assumption of a report on a fit in which only some clients take part: those that send."""
    if sends.all():
        return ()
    return (
        f"{sends.sum()} of {len(sends)} clients take part in the fit, a public choice made "
        "without the data; the others send nothing for it",
    )
