"""Trials of a private selection: their parameters, their scores, and the best of them."""

import math
import warnings
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from sklearn import config_context
from sklearn.base import clone
from sklearn.metrics import get_scorer
from sklearn.utils import assert_all_finite, indexable
from sklearn.utils.metadata_routing import get_routing_for_object

from pfl_sklearn._clients import encode_clients, ids_of_rows, row_counts, rows_by_client
from pfl_sklearn._columns import name_bad_columns
from pfl_sklearn._compat import check_method_params, num_samples, safe_indexing
from pfl_sklearn._typing import Integers
from pfl_sklearn._unwrap import innermost_estimator, predicting_estimator
from pfl_sklearn._warnings import warn_caller
from pfl_sklearn.metrics._client_scores import population_model
from pfl_sklearn.metrics._responses import Responses, mean_row_scores, row_scores, scorer_for
from pfl_sklearn.model_selection._selection_plan import (
    check_candidate,
    client_scoring,
    different_costs,
    distributions_of,
    spending_of,
)
from pfl_sklearn.privacy import PrivacyWarning
from pfl_sklearn.privacy._mechanisms._noise import draw_n_trials


class RoutedRows(NamedTuple):
    """Rows with the metadata of ``fit``, by name."""

    X: Any
    y: Any
    fit_params: dict[str, Any]

    def take(self, indices: Integers) -> "RoutedRows":
        """The rows at these positions, with their metadata."""
        return RoutedRows(
            safe_indexing(self.X, indices),
            None if self.y is None else safe_indexing(self.y, indices),
            check_method_params(self.X, params=self.fit_params, indices=indices),
        )


class PublicScore:
    """Score of the population model on public rows, which reveals only released values.

    The population model also predicts public rows of clients of the fit, because their own models
    are not released.
    """

    def __init__(self, holdout, scoring):
        self.X, self.y = holdout[:2]
        groups = holdout[2] if len(holdout) == 3 else None
        self.scorer = get_scorer(scoring)
        takes_ids = get_routing_for_object(self.scorer).consumes("score", ["groups"])
        self.metadata = {"groups": groups} if groups is not None and takes_ids else {}

    def __call__(self, model, rng):
        # The promise does not cover the clients' own models, which their scores would reveal.
        if hasattr(innermost_estimator(model), "_population_copy"):
            model = population_model(model)
        return float(self.scorer(model, self.X, self.y, **self.metadata))


class HeldOutScore:
    """Mean of the clients' scores on their own held-out rows, bounded and with noise.

    Every client scores its personalized model on its own rows and sends one number between 0 and 1.
    With noise, errors and warnings of a score are dropped, because they would reveal rows; a client
    whose score fails sends the lowest.
    """

    def __init__(self, rows, codes, scoring, bounds, mechanism):
        self.rows, self.scoring, self.bounds, self.mechanism = rows, scoring, bounds, mechanism
        _, codes = np.unique(codes, return_inverse=True)  # only clients with held-out rows count
        self.order, self.offsets = rows_by_client(codes, codes.max() + 1)

    def __call__(self, model, rng):
        model = predicting_estimator(model)
        scores = self._of_clients(model) if self.mechanism is None else self._silently(model)
        if self.mechanism is None and np.isnan(scores).all():
            return math.nan  # with noise, a selection cannot show that nothing is scored
        if self.bounds is None:
            defined = scores[np.isfinite(scores)]
            return float(np.mean(defined)) if len(defined) else math.nan
        low, high = self.bounds
        # A client without a score sends the lowest: sending nothing would reveal its rows.
        bounded = np.clip(np.where(np.isnan(scores), low, scores), low, high)
        shares = (bounded - low) / (high - low)
        if self.mechanism is None:
            return low + (high - low) * float(np.mean(shares))
        total = self.mechanism.privatize(shares[:, None], rng)[0]
        return low + (high - low) * float(total) / len(shares)

    def _silently(self, model):
        """Scores (m,) of the clients without warnings or errors; NaN where scoring fails."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return self._of_clients(model)
            except Exception:  # one client's failure must not change the others' scores
                return np.array([self._score_alone(model, rows) for rows in self._clients()])

    def _score_alone(self, model, rows):
        """Score of one client from its own rows alone; NaN if that fails."""
        codes = np.zeros(len(rows), int)
        one_client = HeldOutScore(self.rows.take(rows), codes, self.scoring, None, None)
        try:
            return float(one_client._of_clients(model)[0])
        except Exception:
            return math.nan

    def _clients(self):
        """Row positions of each client."""
        return np.split(self.order, self.offsets[1:-1])

    def _of_clients(self, model):
        """Scores (m,) of the clients from their own rows; NaN where they are not defined."""
        responses = Responses(model, self.rows.X, self.rows.fit_params.get("groups"))
        y, unknown = _public_targets(self.rows.y, model)
        with np.errstate(all="ignore"):
            rows = _row_scores(self.scoring, y, unknown, responses)
            if rows is not None:
                return mean_row_scores(rows, self.order, self.offsets)
            scorer = scorer_for(self.scoring, model)
            scores = [
                # The stand-in for an unknown label must not be scored.
                math.nan if unknown[rows].any() else _score_one(scorer, responses, y, rows)
                for rows in self._clients()
            ]
        failed = [score for score in scores if isinstance(score, ValueError)]
        if len(failed) == len(scores):
            raise failed[0]
        return np.array([math.nan if isinstance(score, ValueError) else score for score in scores])


def _public_targets(y, model):
    """Targets of the model's type, and whether each row (n,) holds another kind of value."""
    # The values of one client's rows must not change the type of the others' targets.
    if np.ndim(y) > 1:
        y = np.asarray(y)
        return y, np.zeros(len(y), dtype=bool)
    values = pd.Series(list(y), dtype=object)
    if not hasattr(model, "classes_"):
        numbers = pd.to_numeric(values, errors="coerce").to_numpy(dtype=float)
        return numbers, np.isnan(numbers)
    classes = np.asarray(model.classes_)
    codes = pd.Index(classes.astype(object)).get_indexer(pd.Index(values))
    return classes[np.maximum(codes, 0)], codes < 0


def _row_scores(scoring, y, unknown, responses):
    """Scores (n,) of rows, if a client's score is their mean, else None."""
    # An unknown label counts as an error; a target that is not a number has no score.
    if isinstance(scoring, str) and scoring == "accuracy" and y.ndim == 1:
        predicted = np.asarray(responses.predict(None))
        same_shape = predicted.shape == y.shape
        return (~unknown & (y == predicted)).astype(float) if same_shape else None
    return row_scores(scoring, y, responses)


def _score_one(scorer, responses, y, rows):
    """Score of a client from its rows, or the error if it is not defined."""
    try:
        return float(scorer(responses.only(rows), rows, y[rows]))
    except ValueError as error:
        return error


def draw_candidates(select, plan, rng):
    """Parameters of a random number of trials, drawn with replacement.

    Raises RuntimeError if the number is 0, which a Poisson number can be, and ValueError if a
    candidate spends more than was planned.
    """
    n_trials = draw_n_trials(select.expected_trials, select.distribution, rng)
    if n_trials == 0:
        raise RuntimeError(
            f"the number of trials came out as 0, which a Poisson number of mean "
            f"{select.expected_trials!r} does with probability "
            f"{math.exp(-select.expected_trials):.2g}, so nothing was fitted. The privacy promise "
            "covers this outcome, so the epsilon counts as spent. distribution='geometric' and "
            "'logarithmic' have at least one trial."
        )
    spaces = distributions_of(select)
    candidates = [_draw(spaces[rng.integers(len(spaces))], rng) for _ in range(n_trials)]
    if plan.params:  # values from a distribution, and most of a large grid, are unchecked so far
        for candidate in candidates:
            params = {**candidate, **plan.params}
            check_candidate(select, params)
            spending = spending_of(select, params, plan.relation)
            if spending and spending != plan.spending:
                raise different_costs(candidate)
    return candidates


def _draw(space, rng):
    """One random value of every parameter of a search space."""
    return {
        name: values.rvs(random_state=rng)
        if hasattr(values, "rvs")
        else values[rng.integers(len(values))]
        for name, values in sorted(space.items())  # a seed draws the same from any order
    }


def read_data(select, plan, X, y, params, rng):
    """Rows to fit, and the function that scores a fitted model."""
    scoring = client_scoring(select)
    X, y = indexable(X, y)
    n_rows = num_samples(X)
    params = check_method_params(X, params=params)
    column = select.client_column
    if column is None:  # the ids are needed to hold out rows of each client
        column = getattr(select.estimator, "column", None)  # of a ClientColumn
    ids = ids_of_rows(X, params.get("groups"), column)
    if select.holdout is not None:  # all of the clients' rows are fitted
        return RoutedRows(X, y, params), PublicScore(select.holdout, select.scoring or scoring)
    if y is not None:
        with name_bad_columns(private=math.isfinite(select.epsilon)):
            assert_all_finite(y, input_name="y")
    codes, sizes = _client_codes(ids, n_rows)
    tested = held_out_rows(codes, sizes, select.test_size, rng)
    if not tested.any():
        raise ValueError(
            f"no client has two rows, so no row can be held out (found {n_rows} sample(s) of "
            f"{len(sizes)} clients: 1 sample each); give holdout=(X, y) with public rows."
        )
    train, test = (
        RoutedRows(X, y, params).take(np.flatnonzero(rows)) for rows in (~tested, tested)
    )
    return train, HeldOutScore(test, codes[tested], scoring, plan.score_range, plan.mechanism)


def held_out_rows(codes, sizes, test_size, rng):
    """Mask (n,) of rows to score, drawn for each client separately.

    The share `test_size` of each client's rows is held out, rounded, at least one; the client keeps
    at least one. The number depends only on the client's own rows, so that adding or removing a
    client changes no other client's number.
    """
    n_test = np.clip(np.floor(test_size * sizes + 0.5), 1, sizes - 1).astype(np.intp)
    ranks = pd.Series(rng.random(len(codes))).groupby(codes).rank(method="first").to_numpy()
    return ranks <= n_test[codes]


def best_trial(select, plan, candidates, rows, score, rng, seeded):
    """Model, parameters and score of the trial with the highest score; ties go to the first.

    Its warnings are repeated, except those on privacy, which its report has. Raises
    ArithmeticError, that of the first trial, if all diverged, and ValueError if no trial has a
    score.
    """
    best: Any = None
    diverged: Any = None
    any_score = False
    for candidate in candidates:  # one by one, because losing models must not be kept
        seed = int(rng.integers(2**31 - 1)) if seeded else None
        model = _unfitted_model(select, plan, candidate, seed)
        with (
            config_context(enable_metadata_routing=True),
            warnings.catch_warnings(record=True) as warned,
        ):
            warnings.simplefilter("always")
            try:
                model.fit(rows.X, rows.y, **rows.fit_params)
            except ArithmeticError as error:  # a diverged trial loses to all others
                diverged = diverged or error
                continue
            # Not the seed of the fit, which would repeat the draws of its noise.
            value = score(model, np.random.default_rng(None if seed is None else [seed, 1]))
        any_score = any_score or not math.isnan(value)
        value = -math.inf if math.isnan(value) else value
        if best is None or value > best[2]:
            best = model, candidate, value, list(warned)
    if best is None:
        raise diverged
    model, params, value, warned = best
    if not any_score:
        rows = "one client's held-out rows" if select.holdout is None else "the rows of holdout"
        raise ValueError(
            f"scoring={select.scoring!r} gave NaN in all trials; expected one that is defined for "
            f"{rows}."
        )
    for caught in warned:
        if not issubclass(caught.category, PrivacyWarning):
            warn_caller(str(caught.message), caught.category)
    return model, params, value


def _unfitted_model(select, plan, candidate, seed):
    """Clone of the estimator with a candidate's parameters, and a seed if it takes one."""
    model = clone(select.estimator).set_params(**clone(candidate, safe=False), **plan.params)
    return model if plan.seed_name is None else model.set_params(**{plan.seed_name: seed})


def _client_codes(ids, n_rows):
    """Codes (n,) of the rows' clients, and numbers of rows (m,); one client without ids."""
    if ids is None:
        return np.zeros(n_rows, dtype=np.intp), np.array([n_rows])
    clients, codes = encode_clients(ids, n_rows)
    return codes, row_counts(codes, len(clients))
