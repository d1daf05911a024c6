"""Parameters of tests that stand for many."""

import pytest


def slow(values):
    """The values as parameters of slow tests; a tuple is one parameter set."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
        for value in values
    ]
