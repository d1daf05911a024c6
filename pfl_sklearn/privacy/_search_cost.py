"""The privacy cost of a search over private models."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from sklearn.frozen import FrozenEstimator
from sklearn.utils.validation import check_is_fitted

from pfl_sklearn import __version__
from pfl_sklearn._unwrap import core_estimator, inner_estimator, is_search, is_transparent
from pfl_sklearn.privacy._accounting._events import as_json, check_value
from pfl_sklearn.privacy._pipeline_report import describe_leak
from pfl_sklearn.privacy._report import report_lines
from pfl_sklearn.privacy._spending import (
    StatedCost,
    cost_if_repeated,
    have_finite_epsilon,
    merge_events,
    stated_cost,
    sum_of_deltas,
    total_epsilon,
    with_params,
)

# Splitters whose folds are whole clients: each client is missing from some training sets, so the
# total over all fits is above the cost of any single client.
_GROUP_SPLITTERS = (
    "GroupKFold",
    "GroupShuffleSplit",
    "LeaveOneGroupOut",
    "LeavePGroupsOut",
    "StratifiedGroupKFold",
)
# The protection of scores is a statement of the user: a fitted search does not show whether the
# held-out rows were public or the scorer added noise. Without a statement nothing protects them.
_UNPROTECTED = (
    "not protected at all: cv_results_ holds scores of clients' rows without noise, and "
    "best_params_ was chosen by them, so no epsilon covers either"
)
_PUBLIC = (
    "cost nothing by themselves: you state that the held-out rows are public, so the scores and "
    "the choice follow from private models and public rows. No held-out client may be a client of "
    "the fits, because the clients' own models are not private"
)
_NOISED = (
    "private: you state the noise on every score, and epsilon includes it; the choice follows "
    "from the noisy scores"
)
_TRAIN_SCORES = "; but return_train_score=True keeps scores of the private rows without noise"


@dataclass(frozen=True)
class FitCost:
    """Privacy cost of the fits of one candidate.

    Parameters
    ----------
    params : str
        Parameters of the candidate. The fit on all rows has the prefix "refit: ".
    n_fits : int
        Number of fits.
    epsilon, events : float, tuple of dict
        Epsilon and accounting events of one fit.
    reason : str
        Why `epsilon` is infinite, if it is.
    fits_within : int
        Fits of the private estimator in one of these fits, all in `events`: more than one if the
        candidate is itself a search.
    """

    params: str
    n_fits: int
    epsilon: float
    events: tuple[dict[str, Any], ...]  # plain values, so that the cost can be stored
    reason: str = ""
    fits_within: int = 1


@dataclass(frozen=True)
class SearchCost:
    """Privacy cost of a search; see :func:`search_cost`.

    Parameters
    ----------
    epsilon, delta : float
        Cost of releasing all models that the search fitted.
    unit : {"client", "row"}
        What is protected.
    relation : {"replace_one", "zero_out", "add_remove"}
        Neighbouring relation of `epsilon`.
    n_fits : int
        Number of fits of the private estimator, as far as it is known.
    fits : tuple of FitCost
        One entry per candidate, and one for the refit.
    scores_protected, scores : bool, str
        Whether the scores are private or of public rows, and a sentence that gives the reason.
    notes : tuple of str
        Assumptions, and reasons for an infinite `epsilon`.
    package_version : str
        Version of pfl_sklearn that computed the cost.
    """

    epsilon: float
    delta: float
    unit: str
    relation: str
    n_fits: int
    fits: tuple[FitCost, ...]
    scores_protected: bool
    scores: str
    notes: tuple[str, ...] = ()
    package_version: str = __version__

    def to_dict(self) -> dict[str, Any]:
        """Plain values that ``json.dumps(..., allow_nan=False)`` accepts; infinity is "inf"."""
        plain: dict[str, Any] = as_json(dataclasses.asdict(self))
        return plain

    def to_json(self) -> str:
        """The cost as JSON text."""
        return json.dumps(self.to_dict(), allow_nan=False, indent=2)

    def __str__(self) -> str:
        total = (
            "NONE: epsilon = inf" if math.isinf(self.epsilon) else f"epsilon = {self.epsilon:.4g}"
        )
        together = "1 fit" if self.n_fits == 1 else f"all {self.n_fits} fits together"
        promise = f"{total}, delta = {self.delta:.4g} for {together}; unit: one {self.unit}"
        rows = [
            ("models", f"{promise}; neighbours: {self.relation}"),
            ("scores", self.scores),
            *(("note", note) for note in self.notes),
        ]
        for fit in self.fits:
            why = f" ({fit.reason})" if fit.reason else ""
            within = f" for {fit.fits_within} fits" if fit.fits_within > 1 else ""
            cost_per_fit = f"{fit.n_fits} x epsilon = {fit.epsilon:.4g}{within}{why}"
            rows.append(("fits", f"{cost_per_fit}: {fit.params}"))
        return "\n".join(["Cost of a search", *report_lines(rows)])

    __repr__ = __str__


class _CandidateFits(NamedTuple):
    """The fits of one candidate, and the cost of each of them."""

    params: str
    n_fits: int
    stated: StatedCost


def search_cost(
    fitted_search: Any,
    *,
    delta: float | None = None,
    public_holdout: bool = False,
    score_events: Iterable[Any] = (),
) -> SearchCost:
    """SearchCost: the total privacy cost of the models of a search, and what protects its scores.

    A search fits every candidate on every split, and the best one once more. All of these models
    are of the same clients, so their costs compose. A search also uses scores of clients' rows,
    which usually have no noise.

    Parameters
    ----------
    fitted_search : fitted search
        ``GridSearchCV``, ``RandomizedSearchCV`` or a halving search over a private estimator (or a
        pipeline, ClientColumn or ``GridSearchCV`` around one), or
        :class:`~pfl_sklearn.model_selection.PrivateSelectCV`; or a pipeline or
        :class:`~pfl_sklearn.compose.ClientColumn` around such a search. With any other
        meta-estimator in between, such as bagging, epsilon is infinite, because the number of its
        fits is unknown.
    delta : float in [0, 1) or None, default=None
        Delta of all models together. None means the `delta` of the estimator that was searched
        over. Where only epsilon and delta of a fit are known, `delta` must exceed the sum of the
        deltas of the fits.
    public_holdout : bool, default=False
        Your statement that all held-out rows are public, and that they belong to clients that
        were not fitted.
    score_events : iterable of events, default=()
        Your statement of the noise on every single score: its accounting events, such as
        :class:`GaussianEvent`. The total includes them.

    Raises
    ------
    ValueError
        If there is no fitted search, `delta` is out of range, or the candidates differ in the unit
        or the neighbouring relation.

    Notes
    -----
    Costs compose as in :func:`events_epsilon`, as if every fit saw every client and the candidates
    had been fixed before the search. The total is exact for folds of rows inside clients
    (:class:`~pfl_sklearn.model_selection.ClientKFold`), and an upper bound for folds of whole
    clients or if some fits failed.

    A search gives all its fits the same `random_state`. Unless it is None, all fits have the same
    noise, which cancels in differences of the models: epsilon is infinite.

    To refuse fits beyond a budget beforehand, give the estimator a :class:`PrivacyLedger`.

    Examples
    --------
    >>> import warnings
    >>> import numpy as np
    >>> from sklearn.model_selection import GridSearchCV
    >>> from pfl_sklearn.compose import ClientColumn
    >>> from pfl_sklearn.estimation import GaussianMean
    >>> from pfl_sklearn.privacy import PrivacyWarning, search_cost
    >>> X, y = np.repeat(np.arange(20), 5)[:, None] * [[1, 0]], np.tile(np.arange(5.0), 20)
    >>> model = ClientColumn(GaussianMean(noise_variance=2.0, epsilon=1.0), column=0)
    >>> search = GridSearchCV(model, {"estimator__clip_norm": [2.0, 4.0]}, scoring="r2", cv=3)
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     search = search.fit(X, y)
    >>> cost = search_cost(search)
    >>> cost.n_fits, round(cost.epsilon, 2), cost.scores_protected
    (7, 2.95, False)
    """
    search, leaks = _find_search(fitted_search)
    # PrivateSelectCV keeps no scores and fixes its total in advance: there is nothing to compose.
    if not hasattr(search, "cv_results_"):
        return _selection_cost(search, delta, leaks)
    fits = _fits_of(search)
    unit, relation = _unit_and_relation(fits)
    delta = _estimator_delta(search.estimator) if delta is None else delta
    # Zero is allowed, unlike in a single Gaussian release: pure events add up without any delta.
    check_value("delta", delta, 0 <= delta < 1, "in [0, 1)")
    costs = tuple(_candidate_cost(fit, delta, relation) for fit in fits)
    # Every candidate is scored once on every split. The refit is never scored.
    scores = tuple(score_events) * (len(search.cv_results_["params"]) * int(search.n_splits_))
    statement, protected = _describe_scores(search, public_holdout, scores)
    epsilon, reasons = _total(fits, scores, delta, relation)
    return SearchCost(
        # A step that learnt without noise lies outside of all events, so no total covers it.
        math.inf if leaks else epsilon,
        delta,
        unit,
        relation,
        _count_fits(fits),
        costs,
        protected,
        statement,
        (*leaks, *reasons, *_notes(search, costs)),
    )


def _estimator_delta(estimator: Any) -> float:
    """`delta` of an estimator that is searched over, which may lack what its candidates give."""
    core = core_estimator(estimator)
    if is_search(core):
        return _estimator_delta(core.estimator)
    return float(core.delta) if hasattr(type(core), "_privacy_events") else 0.0


def _find_search(estimator: Any) -> tuple[Any, list[str]]:
    """Search in a fitted estimator, and sentences about what was learnt around it without noise."""
    check_is_fitted(estimator)
    leaks: list[str] = []
    inner = estimator
    while inner is not None:
        if isinstance(inner, FrozenEstimator):  # it has the attributes of its estimator
            inner = inner.estimator
            continue
        # PrivateSelectCV is known by trial_params_: it releases one model and no table of scores.
        if hasattr(inner, "cv_results_") or hasattr(inner, "trial_params_"):
            return inner, leaks
        # The last step holds the search; the others were fitted to the same clients before it.
        steps = getattr(inner, "steps", [])[:-1]
        leaks += [leak for name, step in steps if (leak := describe_leak(name, step))]
        # Any other wrapper may fit the search several times, or learn something of its own.
        if not is_transparent(inner):
            leaks.append(f"{type(inner).__name__} around the search gives no privacy guarantee")
        inner = inner_estimator(inner)
    raise ValueError(
        f"{type(estimator).__name__} contains no search: expected a fitted GridSearchCV, "
        "RandomizedSearchCV, halving search or PrivateSelectCV, or a wrapper around one."
    )


def _fits_of(search: Any) -> list[_CandidateFits]:
    """Fits of each candidate on the splits, and the refit on all rows."""
    fits = []
    for params in search.cv_results_["params"]:
        stated = stated_cost(with_params(search.estimator, params))
        # n_splits_ and not cv, which may be a generator of splits that the search has used up.
        fits.append(_CandidateFits(_describe_params(params), int(search.n_splits_), stated))
    # The refit is one more release of the same clients, although its parameters were fitted before.
    if search.refit:
        stated = stated_cost(with_params(search.estimator, search.best_params_))
        fits.append(_CandidateFits(f"refit: {_describe_params(search.best_params_)}", 1, stated))
    # At the end, because a seed cancels noise only if there are several fits.
    n_all = _count_fits(fits)
    return [fit._replace(stated=cost_if_repeated(fit.stated, n_all)) for fit in fits]


def _count_fits(fits: list[_CandidateFits]) -> int:
    """Number of fits of the private estimator, those inside inner searches included."""
    return sum(fit.n_fits * fit.stated.n_fits for fit in fits)


def _describe_params(params: dict[str, Any]) -> str:
    """Parameters of a candidate as text."""
    return ", ".join(f"{name}={value!r}" for name, value in params.items()) or "as it is"


def _unit_and_relation(fits: list[_CandidateFits]) -> tuple[str, str]:
    """Unit and relation that all fits have in common."""
    # A fit that releases nothing keeps every promise; an unprotected one (None) still has a unit.
    promises = {(fit.stated.unit, fit.stated.relation) for fit in fits if fit.stated.events != ()}
    # Epsilons for different neighbours do not add up; converting them would hide what was promised.
    if len(promises) > 1:
        several = " and ".join(f"unit={unit!r} with {how!r}" for unit, how in sorted(promises))
        raise ValueError(
            f"the candidates of the search differ in unit or relation, {several}, so their costs "
            "do not compose; search over estimators with one unit and one relation."
        )
    return promises.pop() if promises else (fits[0].stated.unit, fits[0].stated.relation)


def _candidate_cost(fit: _CandidateFits, delta: float, relation: str) -> FitCost:
    """Entry of one candidate in the cost of a search."""
    # Unprotected fits have no events to describe, but a reason.
    events, reason, epsilon = fit.stated.events, fit.stated.reason, math.inf
    if events is not None:
        epsilon = total_epsilon(merge_events(events), delta, relation)
        # The events are protected, so only the delta or the relation can make this infinite.
        if math.isinf(epsilon):
            reason = f"not defined at delta = {delta:.4g} under {relation}"
    described = tuple(event.to_dict() for event in events or ())
    return FitCost(fit.params, fit.n_fits, epsilon, described, reason, fit.stated.n_fits)


def _total(
    fits: list[_CandidateFits], scores: tuple[Any, ...], delta: float, relation: str
) -> tuple[float, list[str]]:
    """Total epsilon, and the reason if it is infinite although that of every fit is finite."""
    events = list(scores)
    for fit in fits:
        # One unprotected model reveals its clients, whatever the others do. Its reason is a note.
        if fit.stated.events is None:
            return math.inf, []
        events += fit.stated.events * fit.n_fits
    # Pairs (epsilon, delta) compose only within a total delta of at least the sum of theirs.
    deltas = sum_of_deltas(events, relation)
    epsilon = total_epsilon(merge_events(events), delta, relation)
    if math.isinf(epsilon) and delta <= deltas:
        return epsilon, [
            f"the deltas of the fits add up to {deltas:.4g}, which uses up delta = {delta:.4g}; "
            "give a larger delta="
        ]
    return epsilon, []


def _describe_scores(search: Any, public: bool, scores: tuple[Any, ...]) -> tuple[str, bool]:
    """Statement about the scores and the choice, and whether they are protected."""
    if not public and not scores:
        return _UNPROTECTED, False
    statement = _PUBLIC if public else _NOISED
    # Training scores are of the rows that were fitted. Neither statement is about those.
    if getattr(search, "return_train_score", False):
        return statement + _TRAIN_SCORES, False
    return statement, public or have_finite_epsilon(scores)


def _notes(search: Any, costs: tuple[FitCost, ...]) -> tuple[str, ...]:
    """Reasons for infinite costs, and assumptions behind the total."""
    notes = [f"{cost.params}: {cost.reason}" for cost in costs if cost.reason]
    # Every fit is counted either way; the note says for which folds that is more than was spent.
    if type(search.cv).__name__ in _GROUP_SPLITTERS:
        notes.append(
            f"{type(search.cv).__name__} leaves whole clients out of some training sets; the total "
            "composes all fits nevertheless, so it is an upper bound"
        )
    else:
        notes.append(
            "the total assumes that every client is in every training set, as with folds of rows "
            "inside clients; it is an upper bound for other folds"
        )
    # ScoringMonitor keeps the scores of every fit in logs of its own, next to cv_results_.
    callbacks = getattr(search, "_skl_callbacks", ())
    if any(type(callback).__name__ == "ScoringMonitor" for callback in callbacks):
        notes.append("the logs of ScoringMonitor hold scores without noise: not protected")
    return tuple(notes)


def _selection_cost(select: Any, delta: float | None, leaks: list[str]) -> SearchCost:
    """Cost of a PrivateSelectCV, whose total is stated in advance."""
    report = select.privacy_
    # The report has one pair (epsilon, delta) and no events, so no other delta can be answered.
    expected = f"None or that of the selection, {report.delta!r}"
    check_value("delta", delta, delta in (None, report.delta), expected)
    # The selection pays for its scores itself: if epsilon is finite, it covers them.
    private = math.isfinite(report.epsilon)
    return SearchCost(
        math.inf if leaks else report.epsilon,
        report.delta,
        report.unit,
        report.relation,
        1,  # the number of trials is random and stays secret
        (),
        private,
        "private: included in epsilon, or of public rows" if private else _UNPROTECTED,
        (*leaks, "one model is released; the number of trials is not", *report.warnings),
    )
