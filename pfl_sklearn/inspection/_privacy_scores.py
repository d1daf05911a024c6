"""Scores and their epsilons, read from a search or from arrays."""

from __future__ import annotations

import math
from numbers import Real
from typing import NamedTuple

import numpy as np
import pandas as pd
from sklearn.utils.validation import check_is_fitted

from pfl_sklearn._typing import Floats
from pfl_sklearn.privacy._spending import stated_cost, total_epsilon, with_params

_RELATION_WORDS = {
    "add_remove": "one {} added or removed",
    "replace_one": "one {} replaced",
    "zero_out": "contribution of one {} left out",
}


class ScoreCurve(NamedTuple):
    """Scores (n,) and their spread (n,) at epsilons (n,), in ascending order of epsilon."""

    label: str | None
    epsilon: Floats
    score: Floats
    spread: Floats


def table_of_search(search, line, metric):
    """Table of a search's candidates (line, epsilon, score, spread), promise, and line's name."""
    check_is_fitted(search)
    results = getattr(search, "cv_results_", {})
    if f"mean_test_{metric}" not in results:
        raise ValueError(
            f"search must be a fitted search whose cv_results_ holds 'mean_test_{metric}'; got "
            f"{type(search).__name__}."
        )
    candidates = results["params"]
    names = {name for params in candidates for name in params}
    own = {name for name in names if _ends(name, "epsilon")}
    noise = {name for name in names if _ends(name, "noise_multiplier")}
    line = _line_of(names - own - noise, line)
    costs = [stated_cost(with_params(search.estimator, params)) for params in candidates]
    epsilons = [
        _epsilon_of(params, own, cost) for params, cost in zip(candidates, costs, strict=True)
    ]
    table = pd.DataFrame(
        {
            "line": [params.get(line) for params in candidates],
            "epsilon": epsilons,
            "score": results[f"mean_test_{metric}"],
            "spread": results[f"std_test_{metric}"],
        }
    )
    return table, _common_promise(costs), line


def _ends(name, end):
    """Whether a parameter, nested or not, is called `end`."""
    return name == end or name.endswith(f"__{end}")


def _line_of(names, line):
    """Full name of the parameter that makes the lines, or None."""
    if line is None:
        return next(iter(names)) if len(names) == 1 else None
    matching = [name for name in sorted(names) if _ends(name, line)]
    if len(matching) != 1:
        raise ValueError(
            f"line must name one parameter that was searched besides epsilon, of {sorted(names)}; "
            f"got {line!r}."
        )
    return matching[0]


def _epsilon_of(params, own, cost):
    """Requested epsilon, or the one that follows from the other parameters.

    The requested value is not used if the candidate has no privacy, or fits several times.
    """
    if cost.events is None:  # some step learns without noise, whatever was asked for
        return math.inf
    asked = [params[name] for name in own if name in params]
    if asked and cost.n_fits == 1:
        return float(asked[0])
    return total_epsilon(cost.events, cost.delta, cost.relation)


def _common_promise(costs):
    """Promise of all candidates that are private; None if there is none."""
    promises = {(c.unit, c.relation, c.delta) for c in costs if c.events is not None}
    if len(promises) > 1:
        raise ValueError(
            "the candidates differ in unit, relation or delta, so their epsilons are not "
            f"comparable: {sorted(promises)}."
        )
    return promise_of(*promises.pop()) if promises else None


def promise_of(unit: str, relation: str, delta: float) -> str:
    """Unit, relation and delta in words."""
    if relation not in _RELATION_WORDS:
        raise ValueError(f"relation must be one of {', '.join(_RELATION_WORDS)}; got {relation!r}.")
    return f"{_RELATION_WORDS[relation].format(unit)}; delta = {delta:g}"


def table_of_scores(columns, lines):
    """Table of one-dimensional columns of equal length, with the label of the line."""
    arrays = {name: np.asarray(values, dtype=float) for name, values in columns.items()}
    shape = arrays["epsilon"].shape
    for name, values in arrays.items():
        if values.shape != shape or values.ndim != 1 or not len(values):
            raise ValueError(f"{name} must have the shape of epsilon, (n,); got {values.shape}.")
    if not (arrays["epsilon"] >= 0).all():
        raise ValueError("epsilon must be numbers of at least 0; got a negative one or NaN.")
    labels = [None] * len(arrays["score"]) if lines is None else [str(label) for label in lines]
    if len(labels) != shape[0]:
        raise ValueError(f"lines must have one label for every score; got {len(labels)}.")
    table = pd.DataFrame({"spread": np.nan, **arrays})
    table["line"] = pd.Series(labels, dtype=object)  # None stays None, not NaN
    if table.duplicated(["line", "epsilon"]).any():
        raise ValueError(
            "epsilon must differ within a line, but one value occurs twice; give lines, or one "
            "score for each epsilon."
        )
    return table


def curves_of(table):
    """Curves of a table (line, epsilon, score, spread): the best score of each epsilon."""
    best = table.sort_values("score", ascending=False, kind="stable")
    best = best.drop_duplicates(["line", "epsilon"]).sort_values("epsilon")
    return [
        ScoreCurve(label, *(rows[name].to_numpy() for name in ("epsilon", "score", "spread")))
        for label in table["line"].unique()
        for rows in [best[best["line"].isna() if label is None else best["line"] == label]]
    ]


def label_of(name, value):
    """Label of a line: the last part of the parameter's name, and its value."""
    if name is None:
        return None
    return f"{name.split('__')[-1]} = {f'{value:g}' if isinstance(value, Real) else value}"
