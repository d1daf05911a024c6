"""Warnings that point at the caller's own line."""

from __future__ import annotations

import sys
import warnings

_OURS = ("pfl_sklearn", "sklearn", "joblib")


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warn from the first frame outside this package, scikit-learn and joblib."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def _is_ours(module: str) -> bool:
    return module.split(".")[0] in _OURS
