"""Checks of the arguments of formulas. A range is named by the text that its error shows."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from pfl_sklearn._typing import Bools, Floats

# NaN fails every comparison, so it is in no range.
_CONDITIONS: dict[str, Callable[[Floats], Bools]] = {
    "finite": np.isfinite,
    "a number": lambda values: ~np.isnan(values),
    "at least 0": lambda values: values >= 0,
    "finite and at least 0": lambda values: (values >= 0) & (values < math.inf),
    "above 0": lambda values: values > 0,
    "finite and above 0": lambda values: (values > 0) & (values < math.inf),
    "finite and above 1": lambda values: (values > 1) & (values < math.inf),
    "finite and at least 1": lambda values: (values >= 1) & (values < math.inf),
    "finite and at least 2": lambda values: (values >= 2) & (values < math.inf),
    "in (0, 1)": lambda values: (values > 0) & (values < 1),
    "in (0, 1]": lambda values: (values > 0) & (values <= 1),
}


def check_numbers(expected: str, **values: Any) -> None:
    """Raise ValueError unless all numbers of every named value are in the expected range."""
    for name, value in values.items():
        if not np.all(_CONDITIONS[expected](np.asarray(value, dtype=float))):
            raise ValueError(f"{name} must be {expected}; got {value!r}.")


def check_one_of(name: str, value: Any, allowed: Iterable[Any]) -> None:
    """Raise ValueError unless a value is one of those allowed."""
    allowed = tuple(allowed)
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}.")
