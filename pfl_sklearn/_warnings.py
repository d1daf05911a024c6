"""Warnings that point at the caller's own line."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from types import FrameType

_OURS = ("pfl_sklearn", "sklearn", "joblib")


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warn from the first frame outside this package, scikit-learn and joblib."""
    frames = [sys._getframe(), *callers()]
    outside = (level for level, frame in enumerate(frames, 1) if not _is_ours(frame))
    warnings.warn(message, category, stacklevel=next(outside, len(frames)))


def callers() -> Iterator[FrameType]:
    """Frames of the calls that led here, innermost first."""
    frame = sys._getframe(1).f_back
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).split(".")[0] in _OURS
