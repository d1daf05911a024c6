"""Warnings that point at the caller's own line."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from types import FrameType

_OURS = ("pfl_sklearn", "sklearn", "joblib")
_SHOWN_TEXTS = "__pfl_sklearn_shown__"  # local variable that holds the texts of warnings


def warn_caller(message: str, category: type[Warning], once: bool = False) -> None:
    """Warn from the first frame outside this package, scikit-learn and joblib.

    With `once`, one call from there warns once. Python alone would not see to that: scikit-learn
    resets the filters for every task of ``Parallel``, and Python then forgets what it has shown.
    """
    entered, level = sys._getframe(), 1
    # The outermost frame of ours was entered by the caller, whose line the warning is to show.
    while entered.f_back is not None and _is_ours(entered.f_back):
        entered, level = entered.f_back, level + 1
    shown = entered.f_locals.setdefault(_SHOWN_TEXTS, set())  # lives as long as the call
    if not (once and message in shown):
        warnings.warn(message, category, stacklevel=level + 1)
        shown.add(message)


def callers() -> Iterator[FrameType]:
    """Frames of the calls that led here, innermost first."""
    frame = sys._getframe(1).f_back
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).split(".")[0] in _OURS
