"""Candidate models that each client mixes, or picks from, by its own errors."""

import math
from typing import Any, Self

import numpy as np
import pandas as pd
from sklearn.base import is_classifier
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils import Bunch, check_random_state, get_tags
from sklearn.utils.validation import check_is_fitted

from pfl_sklearn._client_tables import mark_coverage
from pfl_sklearn._compat import StrOptions, fit_context, with_callbacks
from pfl_sklearn._parallel import batch_mapper, phases
from pfl_sklearn._parameters import parameter, with_parameters
from pfl_sklearn._typing import TableLike
from pfl_sklearn._unwrap import call_behind_steps, final_estimator
from pfl_sklearn.base import ClientMixin, client_values
from pfl_sklearn.compose._client_mixtures import client_weights, errors_of, population_mean
from pfl_sklearn.compose._client_rows import (
    check_responses,
    client_attributes,
    read_client_rows,
    row_ids,
    rows_to_predict,
    take_rows,
)
from pfl_sklearn.compose._inner_estimators import (
    InnerEstimator,
    for_new_clients,
    is_frozen,
    may_be_private,
    model_of_client,
    predict_inner,
    seeded_clones,
    with_kind_of,
    without_clients,
)
from pfl_sklearn.compose._many_levels import many_level_columns, with_levels
from pfl_sklearn.compose._named_estimators import (
    NamedEstimators,
    OutputsMixin,
    check_frozen_clients,
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
from pfl_sklearn.compose._selector_report import selector_report, unprotected_selector
from pfl_sklearn.priors import DirichletPrior

_SELECTOR = "selector"
# Rows that the prior counts for. The strongest is first, and makes all clients alike; a weaker one
# replaces it only if it is clearly better.
_CONCENTRATIONS = (1e6, 3000.0, 1000.0, 300.0, 100.0, 30.0, 10.0, 3.0, 1.0)


@with_parameters
class ClientSelector(OutputsMixin, ClientMixin, NamedEstimators):
    r"""Let each client mix candidate models, or pick one, by its own errors.

    Candidates may be a model without clients, a personalized one and one of each client alone, or
    models of different kinds. A client with few rows mostly follows the population.

    Parameters
    ----------
    estimators : list of (str, estimator)
        Candidates by name, all regressors or all classifiers; client-aware ones get the client ids.
        A candidate in a :class:`~sklearn.frozen.FrozenEstimator` is not fitted again; give rows
        that it has not seen, or its errors look too small. Models with ``groupings="auto"`` and
        boosted trees take columns of a data frame with more than 10 levels as in
        :class:`~pfl_sklearn.compose.PersonalizedStackingRegressor`.
    how : {"weights", "best"}, default="weights"
        "weights": predictions (for classes, probabilities) are averaged with the client's own
        weights. "best": each client has one candidate.
    prior : DirichletPrior or None, default=None
        Weights of clients without rows, and the number of rows that these count for. With
        ``how="best"``, the mean is the share of rows that each candidate would generate. What is
        not given is learned.
    cv : int, "time", splitter or list, default=5
        Folds that estimate the errors: their number inside clients (None: 5), or a splitter or
        splits that test each row once; at least 3 to learn the concentration of the prior. Folds
        may also go forward in time: "time" is
        :class:`~pfl_sklearn.model_selection.ClientTimeSeriesSplit` of rows in order of time, with 5
        splits, or 4 if no client has 7 rows. If no client has 6, and for splitters of fewer than
        three splits, folds inside clients replace them, with a warning. Errors for new clients come
        from as many folds of whole clients.
    unseen : {"warn", "population", "error"}, default="warn"
        What to do about clients that ``fit`` did not see. "warn" warns if they have at least half
        of the rows.
    n_jobs : int or None, default=None
        Folds to fit at once, with one thread each; results do not depend on it.
    random_state : int, RandomState instance or None, default=None
        Seed of the folds, and of candidates that have none of their own.

    Attributes
    ----------
    weights_ : ndarray of shape (n_clients, n_candidates)
        Weights of each client, with sum 1; with ``how="best"`` one of them is 1.
    new_weights_ : ndarray of shape (n_candidates,)
        Weights for clients that ``fit`` did not see.
    prior_ : DirichletPrior
        The given or learned prior.
    folds_ : str
        How folds were made for known clients: "forward in time", "inside clients" (with a reason
        if forward folds were asked for) or "given".
    losses_ : DataFrame
        Out-of-fold losses of the candidates, squared errors or log-losses, for known clients and,
        if the mean of the prior is learned, for new ones; also that of the selector for known
        clients, if the concentration is learned. Forward folds count once a client has two tested
        rows before them.
    named_estimators_ : Bunch
        Fitted candidates by name.
    clients_ : ndarray of shape (n_clients,)
        Sorted client ids.
    n_samples_per_client_ : ndarray of shape (n_clients,)
        Rows of each client.
    classes_ : ndarray of shape (n_classes,)
        Sorted class labels, if the candidates are classifiers.
    privacy_ : PrivacyReport
        Sum of the candidates' promises if the prior is given; otherwise nothing protects the fit.
    n_features_in_, feature_names_in_ : int, and ndarray of str
        Number of columns of `X`, and their names, if it has any.

    Notes
    -----
    Client i's weights w on the simplex maximize, for a prior with mean :math:`\pi` and
    concentration c,

    .. math::

        \sum_j \log p(y_{ij} \mid w) + c \sum_k \pi_k \log w_k .

    For classes p is the mixture's probability of the true class. For responses it is a normal
    density around the mixture's prediction, with the client's variance integrated out (three
    degrees of freedom at its mean squared error under :math:`\pi`). With ``how="best"`` the client
    takes the candidate of the largest :math:`\sum_j \log p_k(y_{ij}) + c \log \pi_k`.

    The mean is learned from all rows as one client's. New clients get the first candidate that is
    not clearly worse than the best one, or than the best mixture, on clients that it has not seen,
    so list simpler candidates first. The concentration is the largest of 1 to 1,000,000 rows that
    is not clearly worse than the best, in a one-sided test at level 0.1 on rows that neither
    weights nor candidates have seen. With k folds this takes k (k + 3) / 2 + 1 fits of each
    candidate; k (k + 1) / 2 + 1 with a given mean, 2 k + 1 with a given concentration or forward
    folds, and k + 1 with both given.

    **Privacy.** Each client computes its weights from its own rows and keeps them, so with a given
    prior the choice costs nothing. Candidates must then be public, released before (in a
    ``FrozenEstimator``), or fitted to each client's own rows. A learned prior, and candidates that
    are fitted here to all clients' rows, make ``privacy_.epsilon`` infinite.

    Deviation: the papers have no such method. It extends the mixture of local and global models of
    AdaMix and APFL to candidates of any kind, without rounds of training.

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
            Weights of the rows, which count like repetitions. Candidates that are fitted here must
            take them.
        """
        pairs = self._checked_estimators()
        prior = self._checked_prior(len(pairs))
        private = prior.is_known and all(may_be_private(candidate) for _, candidate in pairs)
        table = read_client_rows(self, X, y, groups, sample_weight, is_classifier(self), private)
        if not prior.is_known:  # else the fit may promise privacy, and an error would show a row
            check_responses(self, table)
        check_frozen_clients(pairs, groups)
        classes = classes_of(self, table.y, pairs)
        if not private:  # which columns have many levels depends on the rows
            levels = many_level_columns(table.X)
            pairs = [(name, with_levels(each, levels, classes)) for name, each in pairs]
        seeds = check_random_state(self.random_state).randint(2**31 - 1, size=len(pairs) + 2)
        named = seeded_clones(pairs, classes, seeds[2:], table.weights is not None, private)
        folds, made = self._folds(table, prior, classes, int(seeds[0]))
        n_phases = 2 + (prior.mean is None) + (prior.concentration is None)
        with batch_mapper(self.n_jobs) as run, phases(self, n_phases) as phase:
            place = keep_table(run, table)
            with phase("known-clients", run) as watched:
                predicted, _ = out_of_fold([(inner, place) for inner in named], folds, watched)
            tested = tested_rows(folds, table.clients.codes)
            errors = errors_of(predicted, table, tested.rows, classes)
            losses = {"known": _candidate_losses(named, errors.take(tested.scored))}
            if prior.mean is None:
                mean = population_mean(errors, self.how)
                with phase("new-clients", run) as watched:
                    new_weights, losses["new"] = self._weights_for_new_clients(
                        named, table, place, folds, int(seeds[1]), watched
                    )
            else:
                mean = np.asarray(prior.mean, dtype=float)
                # With one candidate per client, new ones get the likeliest.
                new_weights = mean if self.how == "weights" else np.eye(len(mean))[np.argmax(mean)]
            concentration = prior.concentration
            if concentration is None:
                if tested.go_forward:  # predictions saw nothing of later folds
                    outside = [errors.take(train) for train, _ in tested.folds]
                else:
                    with phase("concentration", run) as watched:
                        outside = _errors_outside_folds(named, table, place, folds, watched)
                concentration, loss = self._learn_concentration(tested, errors, outside, prior)
                losses["known"][_SELECTOR] = loss
            (weights,) = client_weights(errors, self.how, mean, [concentration])
            with phase("final-fits", run) as watched:
                fitted = fit_all([(inner, place) for inner in named], watched)
        by_name = dict(zip([inner.name for inner in named], fitted, strict=True))
        attributes = {
            **client_attributes(self, X, table.clients, groups, classes),
            "named_estimators_": Bunch(**by_name),
            "weights_": weights,
            "new_weights_": new_weights,
            "prior_": DirichletPrior(mean, float(concentration)),
            "losses_": pd.DataFrame(losses),
            "folds_": made,
            "privacy_": self._report(named, by_name, prior, errors.n_clients),
        }
        self._set_fitted(attributes)
        return self

    def _checked_prior(self, n_candidates):
        """The given prior, or the default one, with a valid mean."""
        prior = DirichletPrior() if self.prior is None else self.prior
        prior._validate_params()
        if prior.mean is not None:
            mean = np.asarray(prior.mean, dtype=float)
            # Positive, since its logarithm enters, and Newton steps are in units of the weights.
            positive = mean.shape == (n_candidates,) and (mean > 0).all()
            if not positive or abs(mean.sum() - 1) > 1e-8:  # typed decimals do not sum to 1 exactly
                raise ValueError(
                    f"mean of prior must have a positive number for each of the {n_candidates} "
                    f"estimators, and these must sum to 1; got {mean.tolist()}."
                )
        return prior

    def _folds(self, table, prior, classes, seed):
        """Folds inside clients: at least three if the concentration is learned."""
        splitter, made = splitter_of(self.cv, table, classes is not None, seed)
        folds = folds_within(splitter, table, self)
        if prior.concentration is None and len(folds) < 3:
            raise ValueError(
                f"cv={self.cv!r} gives {len(folds)} folds, but a concentration of the prior is "
                "learned from at least 3 folds; take more, or give "
                "prior=DirichletPrior(concentration=...)."
            )
        return folds, made

    def _weights_for_new_clients(self, named, table, place, folds, seed, run):
        """Weights (K,) for new clients, and the losses of the candidates for them."""
        clients = table.clients
        if len(clients.ids) > 1:  # with one client, its own rows have to do
            folds = folds_of_clients(len(folds), clients.codes, seed)
        for_new = [(without_clients(inner), place) for inner in named]
        predicted, _ = out_of_fold(for_new, folds, run)
        tested = tested_rows(folds, clients.codes)
        errors = errors_of(predicted, table, tested.rows, named[0].classes).take(tested.scored)
        mixtures = dict(zip([inner.name for inner in named], np.eye(len(named)), strict=True))
        if self.how == "weights":  # last, because single candidates are simpler
            mixtures[_SELECTOR] = population_mean(errors, self.how)
        losses = {name: errors.losses(weights) for name, weights in mixtures.items()}
        # New clients are a sample of clients, so clients are independent, not rows.
        best = simplest_not_worse(losses, errors.weights, errors.codes)
        return mixtures[best], _candidate_losses(named, errors)

    def _learn_concentration(self, tested, errors, outside, prior):
        """Concentration of the prior, and the selector's mean loss out of fold.

        `outside` are the errors on the rows outside each fold, by fits that also saw nothing of it.
        """
        losses = {rows: np.empty(len(tested.scored)) for rows in _CONCENTRATIONS}
        for (_, test), positions, train in zip(tested.folds, tested.tests, outside, strict=True):
            errors_in_fold = errors.take(test)
            mean = population_mean(train, self.how) if prior.mean is None else prior.mean
            path = client_weights(train, self.how, np.asarray(mean, dtype=float), _CONCENTRATIONS)
            for rows, weights in zip(_CONCENTRATIONS, path, strict=True):
                losses[rows][positions] = errors_in_fold.losses(weights[errors_in_fold.codes])
        # By rows, because predictions are for these same clients, not for a sample of clients.
        row_weights = errors.take(tested.scored).weights
        concentration = simplest_not_worse(losses, row_weights)
        return concentration, np.average(losses[concentration], weights=row_weights)

    def _report(self, named, fitted, prior, n_clients):
        """Privacy report: no promise with a learned prior, otherwise the sum of the candidates'."""
        released = self._population_attributes
        not_released = ("weights_", "losses_", "folds_", "clients_", "n_samples_per_client_")
        if not prior.is_known:
            reason = "the prior is learned from the rows of all clients without noise"
            return unprotected_selector(reason, (*released, *not_released), n_clients)
        frozen = {inner.name for inner in named if is_frozen(inner.estimator)}
        labels = ("classes_",) if is_classifier(self) else ()
        return selector_report(fitted, frozen, (*released, *labels), not_released, n_clients)

    def score(
        self, X: TableLike, y: TableLike, *, groups: TableLike = None, sample_weight: Any = None
    ) -> float:
        """R squared or accuracy of the predictions, each row by its own client's mixture.

        Parameters
        ----------
        X, y, groups : object
            As in :meth:`fit`; `groups` is needed if it saw several clients.
        sample_weight : array-like of shape (n_rows,), default=None
            Weights of the rows in the score.
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
        table = pd.DataFrame(
            self.weights_, index=pd.Index(self.clients_), columns=list(self.named_estimators_)
        )
        table.insert(0, "rows", self.n_samples_per_client_, allow_duplicates=True)
        return mark_coverage(table, self)

    def for_client(self, client_id: Any) -> Self:
        """Model of one client alone: its weights, and its candidates.

        Candidates without a ``for_client`` are handed out as they are. Nothing protects what they
        learned from other clients' rows, unless `privacy_` says so.

        Parameters
        ----------
        client_id : int, str, ...
            One of ``clients_``.
        """
        model = super().for_client(client_id)
        handed_out = {
            name: model_of_client(fitted, client_id)
            for name, fitted in self.named_estimators_.items()
        }
        model._set_fitted({"named_estimators_": Bunch(**handed_out)}, dropped=())
        return without_originals(model)

    def release(self) -> Self:
        """Candidates and weights for clients without rows: what ``privacy_`` covers.

        Candidates are released by their own ``release``, if they have one.

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
                "released before, or fitted to each client's own rows."
            )
        model = super().release()
        released = {
            name: call_behind_steps(self.named_estimators_[name], "release")
            if hasattr(final_estimator(copied), "release")
            else copied
            for name, copied in model.named_estimators_.items()
        }
        model._set_fitted({"named_estimators_": Bunch(**released)}, dropped=())
        return without_originals(model)

    def _outputs(self, X, groups):
        """Responses (n,) or probabilities (n, n_classes) of rows."""
        X, codes = rows_to_predict(self, X, groups)
        # A released model has no clients' weights, so everybody gets those of new clients.
        weights = client_values(getattr(self, "weights_", None), self.new_weights_, codes)
        ids, classes = row_ids(self, groups, codes), getattr(self, "classes_", None)
        mixed = np.zeros((len(codes), *np.shape(0 if classes is None else classes)))
        for (name, fitted), weight in zip(self.named_estimators_.items(), weights.T, strict=True):
            for is_new in (False, True):
                # Only rows with weight: a candidate may be unable to predict the others.
                rows = np.flatnonzero(weight * ((codes < 0) == is_new))
                if not len(rows):
                    continue
                inner = InnerEstimator(name, for_new_clients(fitted) if is_new else fitted, classes)
                predicted = predict_inner(inner, take_rows(X, rows), ids[rows])
                mixed[rows] += (weight[rows] * predicted.T).T
        return mixed

    def __sklearn_tags__(self):
        tags, inner = super().__sklearn_tags__(), self._estimator_objects()
        if inner:
            tags = with_kind_of(tags, get_tags(inner[0]))
        tags.target_tags.required = True
        return tags


def _candidate_losses(named, errors):
    """Mean loss of each candidate, by name."""
    losses = errors.mean_losses_of_candidates()
    return dict(zip([inner.name for inner in named], losses, strict=True))


def _errors_outside_folds(named, table, place, folds, run):
    """CandidateErrors on the training rows of each fold, by fits that saw nothing of the fold."""
    predicted = out_of_two_folds(named, place, folds, run)
    return [
        errors_of(values, table, train, named[0].classes)
        for (train, _), values in zip(folds, predicted, strict=True)
    ]
