"""Warnings that point at the caller's own line."""

from __future__ import annotations

import sys
import warnings
from typing import Any

_OURS = ("pfl_sklearn", "sklearn", "joblib")


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warn from the first frame outside this package, scikit-learn and joblib.

    In a worker process that is a line of the process pool, not of the caller.
    """
    frame, level = sys._getframe(1), 2
    # Python counts for us from 3.12 on (`skip_file_prefixes`); 3.11 wants a number.
    while frame.f_back is not None and _is_ours(frame.f_globals):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def warn_of_fractions(values: Any, row: int) -> None:
    """Warn of counts, or weights, that are fractions; `row` is the first of them."""
    warn_caller(
        f"y or sample_weight holds fractions, the first in row {row} ({values[row]:g}). The fit "
        "reads them as scikit-learn's PoissonRegressor does: y as rates, and the weights as their "
        "exposure. Errors and intervals are right if y times the weight are counts; better give "
        "the counts, and exposure=.",
        UserWarning,
    )


def _is_ours(names: dict[str, object]) -> bool:
    return str(names.get("__name__", "")).split(".")[0] in _OURS
