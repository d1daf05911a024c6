"""Small designs whose likelihood has several maxima: the search finds the largest.

The designs and the starts are those of ``benchmarks/fuzz.py``.
"""

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[4] / "benchmarks"


@pytest.fixture
def fuzz(monkeypatch):
    """The benchmark as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import fuzz

    monkeypatch.setattr(fuzz, "STARTS", 10)  # some end at the largest maximum of these designs
    return fuzz


@pytest.mark.parametrize(
    ("covariance_type", "seed"),
    [
        ("diag", 38),
        pytest.param("full", 14, marks=pytest.mark.slow),
        pytest.param("low_rank", 33, marks=pytest.mark.slow),
    ],
)
def test_the_largest_maximum_is_found(fuzz, covariance_type, seed):
    """Searches from one start, or without uncorrelated columns, ended .07 to 10 nats below."""
    short, _ = fuzz.shortfall(seed, covariance_type)
    assert short < 1e-3
