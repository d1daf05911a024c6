"""Clients that an estimator knows, and its score for each of them."""

import copy
from collections.abc import Collection
from typing import Any

import numpy as np
import pandas as pd
from sklearn.frozen import FrozenEstimator
from sklearn.utils.validation import check_consistent_length, check_is_fitted

from pfl_sklearn._clients import (
    encode_clients,
    ids_of_rows,
    match_levels,
    rows_by_client,
    split_columns,
)
from pfl_sklearn._compat import num_samples
from pfl_sklearn._typing import TableLike
from pfl_sklearn._unwrap import (
    fitted_attribute,
    inner_estimator,
    predicting_estimator,
    transform_for_inner,
)
from pfl_sklearn.metrics._responses import Responses, score_clients, scorer_for


def known_clients(estimator: Any) -> np.ndarray:
    """Sorted ids of the clients that a fitted estimator saw.

    Parameters
    ----------
    estimator : fitted estimator
        A client-aware estimator, or a pipeline, ClientColumn or search around one.

    Returns
    -------
    ndarray of shape (n_clients,)

    Raises
    ------
    ValueError
        If `estimator` contains no client-aware estimator.

    Examples
    --------
    >>> from pfl_sklearn.estimation import BernoulliMean
    >>> from pfl_sklearn.metrics import known_clients
    >>> known_clients(BernoulliMean().fit_counts([3, 5], [9, 9], groups=["b", "a"]))
    array(['a', 'b'], dtype=object)
    """
    inner = _estimators_inside(estimator)[-1]
    if hasattr(inner, "clients_"):
        return inner.clients_
    raise ValueError(
        f"{type(inner).__name__} knows no clients; expected a client-aware estimator, or a "
        "pipeline, ClientColumn or search around one. Members of an ensemble may know different "
        "clients; to score clients only, use ClientScorer(..., average=None)."
    )


def level_codes(
    estimator: Any, X: TableLike, groups: TableLike, names: Collection[str | int]
) -> list[np.ndarray]:
    """Codes (n,) of every row's level in each of some columns; -1 for unknown and missing levels.

    `X` and `groups` (ids or None) are as the fitted estimator takes them. `names` are the columns'
    in the table that the client-aware estimator inside gets; the prefix of a ColumnTransformer may
    be left out. Raises ValueError for columns by which it does not group rows.
    """
    *outer, inner = _estimators_inside(estimator)
    levels = getattr(inner, "levels_", {})
    columns = [_grouping_column(name, levels, inner) for name in names]
    params = {"groups": groups}
    # Its own table, because steps may have moved the columns or encoded their levels.
    for wrapper in outer:
        X, params = transform_for_inner(wrapper, X, params)
    values = [split_columns(X, {"grouping": column})[1][0] for column in columns]
    return [
        match_levels(each, levels[column], f"column {column!r}")
        for column, each in zip(columns, values, strict=True)
    ]


def _grouping_column(name, levels, estimator):
    """Column among those with `levels` that is called `name`, as it is or behind a prefix."""
    ends = [name] if name in levels else [key for key in levels if f"{key}".endswith(f"__{name}")]
    if len(ends) == 1:
        return ends[0]
    known = ", ".join(repr(key) for key in levels) or "clients alone"
    raise ValueError(
        f"subset names {name!r}, but {type(estimator).__name__} groups rows by {known}."
    )


def client_scores(
    estimator: Any,
    X: TableLike,
    y: TableLike,
    *,
    groups: TableLike = None,
    scoring: Any,
    client_column: str | int | None = None,
    **params: Any,
) -> pd.DataFrame:
    """Score of every client, and its gain from personalization.

    Parameters
    ----------
    estimator : fitted estimator
        A client-aware estimator, or a pipeline, ClientColumn or search around one.
    X : array-like of n_rows rows
        Features, as the estimator's ``predict`` takes them.
    y : array-like of shape (n_rows,)
        True values.
    groups : array-like of shape (n_rows,), default=None
        Client id of every row; needed without `client_column`.
    scoring : str or scorer
        As in scikit-learn; larger is better.
    client_column : str or int, default=None
        Column of ids of `X`, for estimators wrapped in
        :class:`~pfl_sklearn.compose.ClientColumn`.
    **params : dict
        What else the estimator's predictions take, such as ``exposure``.

    Returns
    -------
    DataFrame
        One row per client in `groups`, indexed by id, with the columns

        - ``n_rows``: number of rows;
        - ``score``: score of the client's model, NaN where it is not defined (such as the ROC AUC
          of one class);
        - ``known``: whether ``fit`` saw the client;
        - ``population_score``: score of the population model on the same rows;
        - ``gain``: ``score`` minus ``population_score``.

        ``attrs`` holds ``worst_decile`` (mean of the lowest tenth of the scores), ``mean_gain`` and
        ``share_improved`` (share of clients with a positive gain).

    Raises
    ------
    ValueError
        - If there are neither `groups` nor `client_column`, or if they differ.
        - If `estimator` contains no client-aware estimator, or an ensemble of them.

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn.estimation import GaussianMean
    >>> from pfl_sklearn.metrics import client_scores
    >>> X, y, site = np.zeros((6, 1)), np.array([1.0, 2, 3, 7, 8, 9]), [1, 1, 1, 2, 2, 2]
    >>> model = GaussianMean().fit(X, y, groups=site)
    >>> scores = client_scores(model, X, y, groups=site, scoring="neg_mean_squared_error")
    >>> bool((scores["gain"] > 0).all())
    True
    """
    check_consistent_length(X, y)
    # The predict of a search takes no client ids; that of its best estimator does.
    clients, estimator = known_clients(estimator), predicting_estimator(estimator)
    row_ids = ids_of_rows(X, groups, client_column)
    if row_ids is None:
        raise ValueError("client_scores got no client ids; give groups= or client_column=.")
    ids, codes = encode_clients(row_ids, num_samples(X))
    order, offsets = rows_by_client(codes, len(ids))
    scorer = scorer_for(scoring, estimator)
    personal = Responses(estimator, X, groups, params)
    scores = score_clients(scoring, scorer, personal, y, order, offsets)
    # The population model knows no clients, so it needs no ids.
    population = Responses(population_model(estimator), X, None, params)
    baseline = score_clients(scoring, scorer, population, y, order, offsets)
    gain = scores - baseline
    table = pd.DataFrame(
        {
            "n_rows": np.diff(offsets),
            "score": scores,
            "known": np.isin(ids, clients),
            "population_score": baseline,
            "gain": gain,
        },
        index=pd.Index(ids, name="client"),
    )
    table.attrs = _summaries(scores, gain)
    return table


def _summaries(scores, gain):
    """Mean of the worst decile, mean gain, and share of clients with a positive gain."""
    # An undefined score, such as the ROC AUC of one class, says nothing about the client.
    scores, gain = np.sort(scores[np.isfinite(scores)]), gain[np.isfinite(gain)]
    worst = scores[: max(1, len(scores) // 10)]  # at least one client
    return {
        "worst_decile": float(worst.mean()) if len(worst) else np.nan,
        "mean_gain": float(gain.mean()) if len(gain) else np.nan,
        "share_improved": float(np.mean(gain > 0)) if len(gain) else np.nan,
    }


def _estimators_inside(estimator):
    """A fitted estimator and those inside it, down to the client-aware one if there is one."""
    check_is_fitted(estimator)
    path = [estimator]
    # One inside may know no clients, as behind a column of them.
    while not _is_client_aware(path[-1]) and (inner := inner_estimator(path[-1])) is not None:
        path.append(inner)
    return path


def _is_client_aware(estimator):
    return hasattr(estimator, "_population_copy")


def population_model(estimator: Any) -> Any:
    """Copy of a fitted estimator that predicts every row with the population model."""
    inner = inner_estimator(estimator)
    if inner is None or _is_client_aware(estimator):
        return estimator._population_copy()
    if hasattr(estimator, "best_estimator_"):
        return population_model(inner)
    if isinstance(estimator, FrozenEstimator):  # whose attributes are those of what it holds
        return FrozenEstimator(population_model(estimator.estimator))
    # Shallow copies on the way down: the user's estimator keeps its clients.
    outer, name = copy.copy(estimator), fitted_attribute(estimator)
    if name is None:
        steps = [*estimator.steps[:-1], (estimator.steps[-1][0], population_model(inner))]
        return outer.set_params(steps=steps)
    setattr(outer, name, population_model(inner))
    return outer
