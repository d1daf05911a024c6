"""Warnings that point at the caller's own line."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable

_MOST_LISTED = 6  # names in a warning, which should fit on a screen
_LIBRARY_PACKAGES = ("pfl_sklearn", "sklearn", "joblib")


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warn from the first frame outside this package, scikit-learn and joblib."""
    # In a worker process this is a line of the process pool, not of the caller.
    frame, level = sys._getframe(1), 2
    # Python counts for us from 3.12 on (`skip_file_prefixes`); 3.11 wants a number.
    while frame.f_back is not None and _is_library_frame(frame.f_globals):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def warn_fractional_counts(name: str, value: float) -> None:
    """Warn of counts, or their weights, that are fractions such as `value`."""
    warn_caller(
        f"{name} holds fractions, such as {value:g}. The fit reads y as scikit-learn's "
        "PoissonRegressor does: as rates, with sample_weight as their exposure. Errors and "
        "intervals are right if y times the weight are counts; better give counts and exposure=.",
        UserWarning,
    )


def format_names(names: Iterable[str], most: int = _MOST_LISTED) -> str:
    """Names for a message: the first of them, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more


def _is_library_frame(names: dict[str, object]) -> bool:
    return str(names.get("__name__", "")).split(".")[0] in _LIBRARY_PACKAGES
