"""Memory beyond the input, as the docstrings state it."""

import tracemalloc

import numpy as np
import pytest

from pfl_sklearn import BernoulliMean, GaussianMean

N_CLIENTS = 40_000


def peak_bytes(function):
    """Largest memory allocated during the call beyond what there was before."""
    function()
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("n_rows", [2, 40])
@pytest.mark.parametrize(
    ("estimator", "d", "per_row", "per_client"),
    [(GaussianMean(), 1, 16, 80), (GaussianMean(), 4, 40, 200), (BernoulliMean(), 1, 28, 60)],
)
def test_memory_is_as_stated(estimator, d, per_row, per_client, n_rows):
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(N_CLIENTS), n_rows)
    y = rng.normal(size=(len(groups), d)) if d > 1 else rng.normal(size=len(groups))
    y = (y > 0).astype(int) if isinstance(estimator, BernoulliMean) else y
    X = np.broadcast_to(0.0, (len(groups), 1))
    peak = peak_bytes(lambda: estimator.fit(X, y, groups=groups))
    stated = per_row * len(groups) + per_client * N_CLIENTS
    work_space = 14e6 if d > 1 else 0.2e6
    assert 0.6 * stated < peak < 1.02 * stated + work_space
