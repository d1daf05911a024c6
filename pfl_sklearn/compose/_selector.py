"""Each client mixes candidate models, or picks one, by its own errors."""

import math
from typing import Any, Self

import numpy as np
import pandas as pd
from sklearn.base import is_classifier
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils import Bunch, check_random_state, get_tags
from sklearn.utils.validation import check_is_fitted

from pfl_sklearn._client_tables import SummaryTable
from pfl_sklearn._compat import StrOptions, fit_context, with_callbacks
from pfl_sklearn._parallel import batch_mapper, phases
from pfl_sklearn._parameters import parameter, with_parameters
from pfl_sklearn._typing import TableLike
from pfl_sklearn._unwrap import final_estimator, hand_out
from pfl_sklearn.base import ClientMixin, client_values
from pfl_sklearn.compose._client_mixtures import client_weights, errors_of, population_mean
from pfl_sklearn.compose._client_rows import (
    check_responses,
    fitted_to,
    read_client_rows,
    row_ids,
    rows_at,
    rows_to_predict,
)
from pfl_sklearn.compose._inner_estimators import (
    InnerEstimator,
    for_new_clients,
    is_frozen,
    may_be_private,
    of_client,
    of_kind,
    outputs,
    prepared,
    without_clients,
)
from pfl_sklearn.compose._named_estimators import (
    NamedEstimators,
    OutputsMixin,
    check_strangers,
    classes_of,
    without_originals,
)
from pfl_sklearn.compose._out_of_fold import (
    fit_all,
    folds_of_clients,
    folds_within,
    keep_table,
    out_of_fold,
    out_of_two_folds,
    simplest_not_worse,
    splitter_of,
    tested_rows,
)
from pfl_sklearn.compose._selector_report import selector_report, unprotected
from pfl_sklearn.priors import DirichletPrior

_SELECTOR = "selector"
# Rows that the prior counts for, the strongest prior first: it keeps its place unless a weaker one
# is clearly better. With the first, clients are all alike.
_CONCENTRATIONS = (1e6, 3000.0, 1000.0, 300.0, 100.0, 30.0, 10.0, 3.0, 1.0)


@with_parameters
class ClientSelector(OutputsMixin, ClientMixin, NamedEstimators):
    r"""Candidate models of which each client mixes its own, or picks one, by its own errors.

    Candidates may be a model without clients, a personalized one and one of each client alone, or
    models of different kinds. A client of few rows mostly follows the population.

    Parameters
    ----------
    estimators : list of (str, estimator)
        Candidates by name, all regressors or all classifiers; client-aware ones get the client ids.
        A candidate in a :class:`~sklearn.frozen.FrozenEstimator` is not fitted again; give rows
        that it has not seen, or its errors look smaller than they are.
    how : {"weights", "best"}, default="weights"
        "weights": predictions (for classes, probabilities) are averages of the candidates' with
        weights of the client's own. "best": each client has one candidate.
    prior : DirichletPrior or None, default=None
        What clients without rows do, and how many rows that counts for. With ``how="best"``, the
        mean says in which shares candidates would make a row. What is not given is learned.
    cv : int, "time", splitter or list, default=5
        Folds that the candidates' errors are estimated in: how many inside clients (None: 5), or a
        splitter or splits that test each row once; at least 3 if the concentration of the prior is
        learned. For forecasts "time", which is
        :class:`~pfl_sklearn.model_selection.ClientTimeSeriesSplit` of rows in order of time, with 5
        splits, or fewer if no client has 7 rows, or any folds that go forward: none is fitted to
        rows that it or a later one tests. Errors for new clients are estimated in as many folds of
        whole clients.
    unseen : {"warn", "population", "error"}, default="warn"
        What to do about clients that ``fit`` did not see. "warn" warns if at least half of the rows
        are theirs.
    n_jobs : int or None, default=None
        Folds to fit at once. Results do not depend on it. Every worker gets the table once. The
        estimators inside it run one job each.
    random_state : int, RandomState instance or None, default=None
        Seed of the folds, and of the candidates that have none of their own.

    Attributes
    ----------
    weights_ : ndarray of shape (n_clients, n_candidates)
        Weights of each client. Rows sum to 1; with ``how="best"`` one of them is 1.
    new_weights_ : ndarray of shape (n_candidates,)
        Weights for clients that ``fit`` did not see.
    prior_ : DirichletPrior
        The given prior, or with what was learned.
    losses_ : DataFrame
        Out-of-fold losses of the candidates, squared errors or log-losses, for known clients and,
        if the mean of the prior is learned, for new ones; and of the selector for known clients, if
        the concentration is learned. The smaller, the better. Of folds that go forward, those count
        for known clients before which two rows of a client or more are tested.
    named_estimators_ : Bunch
        Fitted candidates by name.
    clients_ : ndarray of shape (n_clients,)
        Sorted ids of the clients.
    n_samples_per_client_ : ndarray of shape (n_clients,)
        Rows of each client.
    classes_ : ndarray of shape (n_classes,)
        Sorted class labels, if the candidates are classifiers.
    privacy_ : PrivacyReport
        What protects the fit; see Notes.
    n_features_in_ : int
        Number of columns of `X`.
    feature_names_in_ : ndarray of shape (`n_features_in_`,)
        Names of the columns of `X`, if it has any.

    See Also
    --------
    PersonalizedStackingRegressor : One personalized linear model of the candidates' predictions.
    pfl_sklearn.metrics.client_scores : Scores of one model, client by client.

    Notes
    -----
    With weights w on the simplex, client i maximizes

    .. math::

        \sum_j \log p(y_{ij} \mid w) + c \sum_k \pi_k \log w_k

    for a prior with mean :math:`\pi` and concentration c: a client without rows has the weights
    :math:`\pi`, and c rows count as much as the client's own. For classes p is the mixture's
    probability of the true class. For responses it is a normal density around the mixture's
    prediction, with a variance of the client's own that is integrated out (three degrees of freedom
    at the client's mean squared error under :math:`\pi`), so that noisy clients and outliers
    decide little. With ``how="best"`` the client takes the candidate of the largest
    :math:`\sum_j \log p_k(y_{ij}) + c \log \pi_k`.

    The mean is learned from the rows of all clients as one. New clients get the first candidate
    that is not clearly worse than the best one, or than the best mixture, on rows of clients that
    the candidates have not seen; so list simpler candidates first. The concentration is the largest
    of 1 to 1,000,000 rows, with two a decade up to 3,000, that is not clearly worse than the best:
    by a one-sided test of the mean loss at level 0.1. Weights are
    judged on rows of which neither they nor the candidates behind them have seen anything, which
    takes fits to the rows outside of two folds. With k folds each candidate is fitted k (k + 3) / 2
    + 1 times, 21 by default; with a given mean k (k + 1) / 2 + 1 times, with a given concentration
    2 k + 1 times, with both k + 1 times. Callbacks of scikit-learn's kind (``set_callbacks``), such
    as its ``ProgressBar``, see the phases "known-clients", "new-clients", "concentration" and
    "final-fits", and in them each fit; of fits that workers share, the end of all.

    In folds that go forward in time, weights come from the tested rows, and a client of which none
    is tested has the weights :math:`\pi`. The concentration is judged in each fold by weights from
    earlier ones, which takes no more fits: 2 k + 1, or k + 1 with a given mean.

    **Privacy.** Weights are computed by each client from its own rows and stay with it. If the
    prior is given, choosing costs no privacy: the promise is that of the candidates. Those may be
    frozen ones that were released under a promise of their own, or public; or estimators of each
    client's own rows, whose report has ``epsilon`` 0, such as ``PersonalizedLinearRegression`` with
    a known prior and a finite epsilon. A promise of several candidates is the sum of theirs. A
    learned prior, and candidates that are fitted here to the rows of all clients, are not
    protected: ``privacy_.epsilon`` is infinite and says why.

    Deviation: the papers have no such method. It is the mixture of local and global models of
    AdaMix and APFL for candidates of any kind, without rounds of training.

    Examples
    --------
    >>> from sklearn.linear_model import LinearRegression
    >>> from pfl_sklearn import PersonalizedLinearRegression
    >>> from pfl_sklearn.compose import ClientSelector
    >>> from pfl_sklearn.datasets import load_parkinsons
    >>> visits = load_parkinsons().frame.query("subject <= 12")
    >>> X, y = visits[["test_time", "PPE"]], visits["total_UPDRS"]
    >>> candidates = [
    ...     ("population", LinearRegression()),
    ...     ("personal", PersonalizedLinearRegression()),
    ... ]
    >>> model = ClientSelector(candidates, how="best", random_state=0)
    >>> model = model.fit(X, y, groups=visits["subject"])
    >>> model.summary().head(2)
       rows  population  personal
    1   149         0.0       1.0
    2   145         0.0       1.0
    >>> model.new_weights_
    array([1., 0.])
    """

    estimators: list[tuple[str, Any]] = parameter(ranges=[list], kw_only=False)
    how: str = parameter(default="weights", ranges=[StrOptions({"weights", "best"})])
    prior: DirichletPrior | None = parameter(default=None, ranges=[DirichletPrior, None])

    _reserved_names = (_SELECTOR,)
    _population_attributes = ("named_estimators_", "prior_", "new_weights_")
    _client_attributes = ("weights_", "n_samples_per_client_")
    _state_attributes = ("classes_",)

    def _default_component(self, name: str, value: Any) -> Any:
        return DirichletPrior() if name == "prior" and value is None else None

    @with_callbacks
    @fit_context(prefer_skip_nested_validation=False)
    def fit(
        self, X: TableLike, y: TableLike, *, groups: TableLike = None, sample_weight: Any = None
    ) -> Self:
        """Fit candidates in folds and to all rows, and the weights of clients to their errors.

        Parameters
        ----------
        X : dataframe or array-like of shape (n_rows, d)
            Features, as the candidates take them.
        y : array-like of shape (n_rows,)
            Responses or class labels.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; None: all rows are one client's.
        sample_weight : array-like of shape (n_rows,), default=None
            Weights of the rows, which count as if they were there so many times. Candidates that
            are fitted here must take them.

        Returns
        -------
        self
        """
        pairs = self._checked_estimators()
        prior = self._checked_prior(len(pairs))
        private = prior.is_known and all(may_be_private(each) for _, each in pairs)
        table = read_client_rows(self, X, y, groups, sample_weight, is_classifier(self), private)
        if not prior.is_known:  # else the fit may promise privacy, and an error would show a row
            check_responses(self, table)
        check_strangers(pairs, groups)
        classes = classes_of(self, table.y, pairs)
        seeds = check_random_state(self.random_state).randint(2**31 - 1, size=len(pairs) + 2)
        named = prepared(pairs, classes, seeds[2:], table.weights is not None, private)
        folds = self._folds(table, prior, classes, int(seeds[0]))
        n_phases = 2 + (prior.mean is None) + (prior.concentration is None)
        with batch_mapper(self.n_jobs) as run, phases(self, n_phases) as phase:
            place = keep_table(run, table)
            with phase("known-clients", run) as watched:
                predicted, _ = out_of_fold([(each, place) for each in named], folds, watched)
            seen = tested_rows(folds, table.clients.codes)
            errors = errors_of(predicted, table, seen.rows, classes)
            losses = {"known": _candidate_losses(named, errors.take(seen.judged))}
            if prior.mean is None:
                mean = population_mean(errors, self.how)
                rows = table, place
                with phase("new-clients", run) as watched:
                    new_weights, losses["new"] = self._for_new(
                        named, rows, folds, int(seeds[1]), watched
                    )
            else:
                mean = np.asarray(prior.mean, dtype=float)
                # With one candidate per client, new ones get the likeliest.
                new_weights = mean if self.how == "weights" else np.eye(len(mean))[np.argmax(mean)]
            concentration = prior.concentration
            if concentration is None:
                if seen.go_forward:  # predictions saw nothing of later folds
                    inside = [errors.take(train) for train, _ in seen.folds]
                else:
                    with phase("concentration", run) as watched:
                        outside = out_of_two_folds(named, place, folds, watched)
                    inside = [
                        errors_of(each, table, train, classes)
                        for (train, _), each in zip(folds, outside, strict=True)
                    ]
                concentration, loss = self._learned_concentration(seen, errors, inside, prior)
                losses["known"][_SELECTOR] = loss
            (weights,) = client_weights(errors, self.how, mean, [concentration])
            with phase("final-fits", run) as watched:
                fitted = fit_all([(each, place) for each in named], watched)
        by_name = dict(zip([each.name for each in named], fitted, strict=True))
        report = self._report(named, by_name, prior, errors.n_clients)

        attributes = {
            **fitted_to(self, X, table.clients, groups),
            "named_estimators_": Bunch(**by_name),
            "weights_": weights,
            "new_weights_": new_weights,
            "prior_": DirichletPrior(mean, float(concentration)),
            "losses_": pd.DataFrame(losses),
            "privacy_": report,
        }
        if classes is not None:
            attributes["classes_"] = classes
        self._set_fitted(attributes)
        return self

    def _checked_prior(self, n_candidates):
        """The given prior, or the default one, with a valid mean."""
        prior = DirichletPrior() if self.prior is None else self.prior
        prior._validate_params()
        if prior.mean is not None:
            mean = np.asarray(prior.mean, dtype=float)
            # The logarithm of the mean enters, and Newton's steps are in units of the weights.
            positive = mean.shape == (n_candidates,) and (mean > 0).all()
            if not positive or abs(mean.sum() - 1) > 1e-8:  # as typed decimals, not exactly 1
                raise ValueError(
                    f"mean of prior must have a positive number for each of the {n_candidates} "
                    f"estimators, with sum 1; got {mean.tolist()}."
                )
        return prior

    def _folds(self, table, prior, classes, seed):
        """Folds inside clients: at least three if the concentration is learned."""
        folds = folds_within(splitter_of(self.cv, table, classes is not None, seed), table, self)
        if prior.concentration is None and len(folds) < 3:
            raise ValueError(
                f"cv={self.cv!r} gives {len(folds)} folds, but a concentration of the prior is "
                "learned from at least 3; take more folds, or give "
                "prior=DirichletPrior(concentration=...)."
            )
        return folds

    def _for_new(self, named, rows, folds, seed, run):
        """Weights (K,) for new clients, and the losses of the candidates for them."""
        table, place = rows
        clients = table.clients
        if len(clients.ids) > 1:  # else nobody is new
            folds = folds_of_clients(len(folds), clients.codes, seed)
        strangers = [without_clients(each) for each in named]
        predicted, _ = out_of_fold([(each, place) for each in strangers], folds, run)
        seen = tested_rows(folds, clients.codes)
        errors = errors_of(predicted, table, seen.rows, named[0].classes).take(seen.judged)
        mixtures = dict(zip([each.name for each in named], np.eye(len(named)), strict=True))
        if self.how == "weights":  # last, so that single candidates, which are simpler, go before
            mixtures[_SELECTOR] = population_mean(errors, self.how)
        losses = {name: errors.losses(weights) for name, weights in mixtures.items()}
        # New clients are a draw of clients, so that clients are independent, not rows.
        best = simplest_not_worse(losses, errors.weights, errors.codes)
        return mixtures[best], _candidate_losses(named, errors)

    def _learned_concentration(self, seen, errors, inside, prior):
        """Concentration of the prior, and the selector's mean loss out of fold.

        Weights come from rows outside of a fold, whose errors are of fits outside of it, too: those
        `inside`, for each fold.
        """
        losses = {rows: np.empty(len(seen.judged)) for rows in _CONCENTRATIONS}
        for (_, test), at, known in zip(seen.folds, seen.tests, inside, strict=True):
            asked = errors.take(test)
            mean = population_mean(known, self.how) if prior.mean is None else prior.mean
            path = client_weights(known, self.how, np.asarray(mean, dtype=float), _CONCENTRATIONS)
            for rows, weights in zip(_CONCENTRATIONS, path, strict=True):
                losses[rows][at] = asked.losses(weights[asked.codes])
        # By rows, not clients: predictions are for these clients, not for a draw of them.
        row_weights = errors.take(seen.judged).weights
        concentration = simplest_not_worse(losses, row_weights)
        return concentration, np.average(losses[concentration], weights=row_weights)

    def _report(self, named, fitted, prior, n_clients):
        """Privacy report: no promise with a learned prior, otherwise the sum of the candidates'."""
        released = self._population_attributes
        own = ("weights_", "losses_", "clients_", "n_samples_per_client_")
        if not prior.is_known:
            why = "the prior is learned from the rows of all clients without noise"
            return unprotected(why, (*released, *own), n_clients)
        frozen = {each.name for each in named if is_frozen(each.estimator)}
        labels = ("classes_",) if is_classifier(self) else ()
        return selector_report(fitted, frozen, (*released, *labels), own, n_clients)

    def score(
        self, X: TableLike, y: TableLike, *, groups: TableLike = None, sample_weight: Any = None
    ) -> float:
        """R squared or accuracy of the predictions, each row by its own client's mixture.

        Parameters
        ----------
        X : dataframe or array-like of shape (n_rows, d)
            As in ``fit``.
        y : array-like of shape (n_rows,)
            True responses or labels.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.
        sample_weight : array-like of shape (n_rows,), default=None
            Weights of the rows in the score.

        Returns
        -------
        float
        """
        score = accuracy_score if hasattr(self, "classes_") else r2_score
        return float(score(y, self.predict(X, groups=groups), sample_weight=sample_weight))

    def summary(self) -> pd.DataFrame:
        """Table of the clients' weights and numbers of rows.

        Returns
        -------
        DataFrame
            Clients in the rows; columns "rows" and the names of the candidates.
        """
        self._require_fitted("clients_")
        table = SummaryTable(
            self.weights_, index=pd.Index(self.clients_), columns=list(self.named_estimators_)
        )
        table.insert(0, "rows", self.n_samples_per_client_, allow_duplicates=True)
        return table

    def for_client(self, client_id: Any) -> Self:
        """Model of one client alone: its weights, and its candidates.

        Candidates are handed out as they are, unless they have a ``for_client`` of their own.
        Nothing protects what the others learned of all clients' rows, unless `privacy_` says so.

        Parameters
        ----------
        client_id : int, str, ...
            One of ``clients_``.

        Returns
        -------
        estimator
            Fitted estimator of the same class, with ``clients_ == [client_id]``.
        """
        model = super().for_client(client_id)
        handed = {name: of_client(each, client_id) for name, each in self.named_estimators_.items()}
        model._set_fitted({"named_estimators_": Bunch(**handed)}, dropped=())
        return without_originals(model)

    def release(self) -> Self:
        """Candidates and weights for clients without rows: what ``privacy_`` covers.

        Returns
        -------
        estimator
            Fitted estimator of the same class. Candidates are released by their own ``release``.

        Raises
        ------
        ValueError
            If ``privacy_.epsilon`` is infinite.
        """
        check_is_fitted(self)
        if not math.isfinite(self.privacy_.epsilon):
            raise ValueError(
                f"release() would publish unprotected values (epsilon is infinite). "
                f"{self.privacy_.warnings[0]} Give a prior, and candidates that are public, "
                "released before, or each client's own."
            )
        model = super().release()
        handed = {
            name: hand_out(self.named_estimators_[name], "release")
            if hasattr(final_estimator(copied), "release")
            else copied
            for name, copied in model.named_estimators_.items()
        }
        model._set_fitted({"named_estimators_": Bunch(**handed)}, dropped=())
        return without_originals(model)

    def _outputs(self, X, groups):
        """Responses (n,) or probabilities (n, n_classes) of rows."""
        X, codes = rows_to_predict(self, X, groups)
        # A released model has no weights of clients, and mixes for everybody as for new ones.
        weights = client_values(getattr(self, "weights_", None), self.new_weights_, codes)
        ids, classes = row_ids(self, groups, codes), getattr(self, "classes_", None)
        mixed = np.zeros((len(codes), *np.shape(0 if classes is None else classes)))
        for (name, fitted), own in zip(self.named_estimators_.items(), weights.T, strict=True):
            for is_new in (False, True):
                # Rows that give a candidate no weight do not need what it may fail to predict.
                rows = np.flatnonzero(own * ((codes < 0) == is_new))
                if not len(rows):
                    continue
                each = for_new_clients(fitted) if is_new else fitted
                predicted = outputs(
                    InnerEstimator(name, each, classes), rows_at(X, rows), ids[rows]
                )
                mixed[rows] += (own[rows] * predicted.T).T
        return mixed

    def __sklearn_tags__(self):
        tags, inner = super().__sklearn_tags__(), self._estimator_objects()
        if inner:
            tags = of_kind(tags, get_tags(inner[0]))
        tags.target_tags.required = True
        return tags


def _candidate_losses(named, errors):
    """Mean loss of each candidate, by name."""
    return dict(zip([each.name for each in named], errors.of_candidates(), strict=True))
