"""What a fit on rounds holds by round: its history, recorded scores and the epsilon spent."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from sklearn.utils.validation import check_is_fitted

from pfl_sklearn._nesting import innermost_estimator
from pfl_sklearn._rounds.privacy import epsilon_by_round, rounds_of
from pfl_sklearn._typing import Floats, Integers
from pfl_sklearn.inspection._privacy_scores import promise_of
from pfl_sklearn.privacy import privacy_of

_AXIS_LABELS = {
    "loss": "mean loss",
    "clipped": "share clipped",
    "clip_norm": "clipping bound",
    "n_clients": "clients in the round",
}
_MOST_EPSILONS = 12  # each may take a second where clients are sampled
_AGAINST = {
    "central": "against all other clients together; the server is trusted",
    "local": "against the server and all other clients together",
}
_NOT_COVERED = "It covers what is released, not the losses, clipped shares and scores drawn here."
_LOG_COLUMNS = {  # that the monitor adds to the scores
    "task_id_path",
    "parent_task_id_path",
    "estimator_name",
    "task_name",
    "task_id",
    "sequential_subtasks",
}


class RoundCurve(NamedTuple):
    """Values (m,) of a quantity at rounds (m,), counted from 1.

    `n_clients` (m,) is given if the values are means over so many clients. `band` (2, m) are the
    deciles of the clients around a median, `target` is where the values should settle, and `note`
    is what has to be said about them.
    """

    name: str
    label: str
    rounds: Integers
    values: Floats
    n_clients: Integers | None = None
    band: Floats | None = None
    target: float | None = None
    note: str = ""


def round_curves(
    estimator: Any, quantities: str | list[str] | None, scores: Any
) -> list[RoundCurve]:
    """Curves of a fitted estimator: the quantities asked for, then the scores."""
    check_is_fitted(estimator)
    fitted = innermost_estimator(estimator)
    history = getattr(fitted, "history_", None)
    if history is None:
        raise ValueError(
            f"{type(fitted).__name__} has no history_; expected a fitted estimator on rounds that "
            "was not handed out, such as PPSGDRegressor."
        )
    report = privacy_of(estimator)
    if quantities is None:
        quantities = _worth_drawing(fitted, report)
    names = [quantities] if isinstance(quantities, str) else list(quantities)
    curves = [_curve_of(fitted, report, name) for name in names]
    if scores is not None:
        curves += _score_curves(fitted, scores)
    if not curves:
        raise ValueError("quantities is empty; name at least one of them, or give scores.")
    return curves


def _worth_drawing(fitted, report):
    """Names of the quantities to draw by default: those that are defined and not constant."""
    history = fitted.history_
    bound = history.get("clip_norm", np.array([math.inf]))
    clips = np.isfinite(bound).any()
    further = [name for name in _columns(history) if name not in _AXIS_LABELS]
    return [
        "loss",
        *further,
        *(["clipped"] if clips else []),
        *(["clip_norm"] if clips and np.ptp(bound) > 0 else []),  # a constant says nothing
        *(["epsilon"] if _spent(fitted, report) else []),
    ]


def _columns(history):
    """Names of the columns with one value per round."""
    return [name for name, values in history.items() if np.ndim(values) == 1]


def _spent(fitted, report):
    """Events of the rounds if they have a finite epsilon above 0; () otherwise."""
    progress = getattr(fitted, "_progress", None)
    if progress is None or not 0 < report.epsilon < math.inf:
        return ()
    return progress.spent if rounds_of(progress.spent) else ()


def _curve_of(fitted, report, name):
    """Curve of a column of the history, or of epsilon."""
    if name == "epsilon":
        return _epsilon_curve(fitted, report)
    history = fitted.history_
    if name not in (known := _columns(history)):
        raise ValueError(f"quantities must be of {[*known, 'epsilon']}; got {name!r}.")
    values = np.asarray(history[name], dtype=float)
    curve = RoundCurve(name, _AXIS_LABELS.get(name, name), np.arange(1, len(values) + 1), values)
    if name not in ("loss", "clipped"):
        return curve
    curve = curve._replace(n_clients=np.asarray(history["n_clients"]))
    quantile = getattr(fitted, "clip_quantile", None)
    if name == "loss" or quantile is None:
        return curve
    # An adaptive bound moves until this share of the messages is clipped.
    label = f"{curve.label}\n(dotted: aim {1 - quantile:.3g})"
    return curve._replace(target=1 - quantile, label=label)


def _epsilon_curve(fitted, report):
    spent = _spent(fitted, report)
    if not spent:
        raise ValueError(
            f"there is no epsilon to draw by round: got privacy_of(...) with epsilon = "
            f"{report.epsilon:g}; expected one above 0 and finite, of rounds that were not handed "
            f"out. {' '.join(report.warnings)}"
        )
    rounds = _some_rounds(sum(event.n_rounds for event in rounds_of(spent)))
    values = np.array(epsilon_by_round(spent, report.delta, report.relation, rounds))
    promise = promise_of(report.unit, report.relation, report.delta)
    note = f"epsilon of the first rounds: {promise};\n{_AGAINST[report.trust]}.\n{_NOT_COVERED}"
    return RoundCurve("epsilon", "epsilon", rounds, values, note=note)


def _some_rounds(n_rounds):
    """Rounds at which to compute epsilon: all of a few, otherwise more of the early ones."""
    if n_rounds <= _MOST_EPSILONS:
        return np.arange(1, n_rounds + 1)
    grid = np.linspace(0, 1, _MOST_EPSILONS) ** 2  # epsilon grows with about the root
    return np.unique(np.maximum(np.rint(grid * n_rounds), 1)).astype(int)


def _score_curves(fitted, scores):
    """One curve per score; the clients' own scores are one together."""
    rows = ""
    if hasattr(scores, "get_logs"):
        table, rows = _logged(fitted, scores), "\n(rows of the fit)"
    elif isinstance(scores, pd.Series | pd.DataFrame):
        table = pd.DataFrame(scores).sort_index()
    else:
        raise TypeError(
            "scores must be a ScoringMonitor, or a Series or DataFrame indexed by round; got "
            f"{type(scores).__name__}."
        )
    rounds = table.index.to_numpy()
    if rounds.dtype.kind not in "iu" or (rounds < 1).any():
        raise ValueError(
            f"the index of scores must hold rounds, counted from 1; got {rounds[:3].tolist()}."
        )
    names = [str(name) for name in table.columns]
    if len(names) > 1 and set(names) <= {str(client) for client in fitted.clients_}:
        return [_clients_curve(rounds, table.to_numpy(dtype=float), rows)]
    return [
        RoundCurve(name, name + rows, rounds, table[column].to_numpy(dtype=float))
        for name, column in zip(names, table.columns, strict=True)
    ]


def _clients_curve(rounds, scores, rows):
    """Median of the scores (m, n_clients) and the deciles around it; clients may lack a score."""
    scores = scores[:, np.isfinite(scores).any(axis=0)]  # quantiles of no number would warn
    low, middle, high = np.nanquantile(scores, [0.1, 0.5, 0.9], axis=1)
    label = f"score of {scores.shape[1]} clients{rows}"
    return RoundCurve("client scores", label, rounds, middle, band=np.stack([low, high]))


def _logged(fitted, monitor):
    """Scores of the last fit that a ScoringMonitor recorded, indexed by round."""
    log = monitor.get_logs().data_as_pandas
    log = log[log["task_name"] == "round"]
    if len(log):  # a monitor keeps the rounds of all fits that it watched
        last = log["parent_task_id_path"].iloc[-1]
        log = log[[path == last for path in log["parent_task_id_path"]]]
    n_rounds = fitted.n_rounds_
    # After a return to the best models, rounds of the log and of the model are not the same.
    went_back = getattr(fitted, "_ends_when_flat", False) and (
        fitted.warm_start or len(log) < n_rounds
    )
    if not 0 < len(log) <= n_rounds or went_back:
        raise ValueError(
            f"scores holds {len(log)} rounds, which are not those of the model, of {n_rounds} "
            "rounds. A fit that ends when its loss is flat goes back to its best models: give it "
            "n_rounds. Otherwise give the monitor of the last fit."
        )
    names = [name for name in log.columns if name not in _LOG_COLUMNS]
    table = log[names].dropna(axis=1, how="all")
    return table.set_axis(np.arange(n_rounds - len(log), n_rounds) + 1, axis=0)
