"""What recipients make of messages: unbiased means with the stated variances."""

import math

import numpy as np
import pytest

from pfl_sklearn.online._messages import received_means
from pfl_sklearn.privacy._mechanisms._binary_tree import BinaryTree
from pfl_sklearn.privacy._mechanisms._printed._partial_sums import PartialSums
from pfl_sklearn.privacy._mechanisms._square_root import SquareRootSums
from tests.helpers.noise import noise_matrix
from tests.helpers.oracles import read_oracle

TABLE = read_oracle("colme_var_T_table")["rows"]
N_RELEASES = 13
BLOCKS = np.cumsum([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9])
EVERY_STEP = np.arange(1, N_RELEASES + 1)
CASES = [
    (mechanism, weights, times)
    for mechanism, weights, times in (
        (PartialSums(1.3), ("last", "mom", "wmom", "blue"), BLOCKS),
        (BinaryTree(1.3, 20), ("last", "mom", "wmom", "blue"), BLOCKS),
        (BinaryTree(1.3), ("last", "mom", "wmom", "blue"), EVERY_STEP),
        (SquareRootSums(1.3, 20), ("last", "blue"), EVERY_STEP),
        (SquareRootSums(1.3), ("last", "blue"), EVERY_STEP),
    )
    for weights in weights
]
every = pytest.mark.parametrize(("mechanism", "weights", "times"), CASES, ids=repr)


def listen(mechanism, weights, times, sums):
    """Means after messages `sums` (releases, streams) over rows `times`."""
    found = received_means(weights, mechanism, np.zeros((1, sums.shape[1])))
    everyone = np.arange(sums.shape[1])
    for k, (rows, received) in enumerate(zip(times, sums, strict=True), 1):
        index, rows = np.full(len(everyone), k), np.full(len(everyone), rows)
        found.receive(everyone, index, rows, received[None])
    return found.means(everyone, np.full(len(everyone), len(times)))


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"pm{row['mech']}-{row['weights']}")
def test_variances_of_the_paper(row):
    std = math.sqrt(row["s2"])
    mechanism = PartialSums(1 / std) if row["mech"] == 1 else BinaryTree(math.sqrt(10) / std, 1000)
    for n, expected in enumerate(row["var"], 1):
        found = listen(mechanism, row["weights"], row["times"][:n], np.zeros((n, 1)))
        assert 0.25 * found.data + found.noise == pytest.approx([expected], rel=1e-10)


@every
def test_means_are_unbiased_with_the_stated_variance_of_the_data(mechanism, weights, times):
    """Streams with a single 1: the mean is the weight of that row."""
    sums = np.tril(np.ones((times[-1], times[-1])))[times - 1]
    found = listen(mechanism, weights, times, sums)
    assert found.values.sum() == pytest.approx(1)
    np.testing.assert_allclose(found.data, (found.values**2).sum())


@every
def test_noise_has_the_stated_variance(mechanism, weights, times):
    """Streams with a single draw of 1: squares of the means add up to their variance."""
    found = listen(mechanism, weights, times, noise_matrix(mechanism, len(times)))
    np.testing.assert_allclose(found.noise, (found.values**2).sum(), rtol=1e-9)


@pytest.mark.parametrize("mechanism", {id(case[0]): case[0] for case in CASES}.values(), ids=repr)
def test_the_best_weights_have_the_least_noise(mechanism):
    found = {
        weights: listen(mechanism, weights, times, np.zeros((len(times), 1))).noise[0]
        for other, weights, times in CASES
        if other is mechanism
    }
    assert found["blue"] == min(found.values())


def test_data_lose_little_by_the_best_weights():
    n = np.arange(1, 30_001)
    largest = SquareRootSums(1.0, 30_000).response(30_000).squares[0]
    assert largest == pytest.approx(1, rel=1e-12)
    spread, squares = (
        getattr(SquareRootSums(1.0, 30_000).response(30_000), name)
        for name in ("spread", "squares")
    )
    assert (n * spread / squares**2).max() < 1.065


@every
def test_new_streams_do_not_disturb_the_old_ones(mechanism, weights, times):
    rng = np.random.default_rng(0)
    sums = rng.normal(size=(len(times), 3))
    alone = listen(mechanism, weights, times, sums)
    found, streams = received_means(weights, mechanism, np.zeros((1, 3))), np.arange(3)
    for k, (rows, received) in enumerate(zip(times, sums, strict=True), 1):
        if k == 6:
            found.move(5, np.array([4, 0, 2]))
            streams = np.array([4, 0, 2])
        found.receive(streams, np.full(3, k), np.full(3, rows), received[None])
    index = np.zeros(5, int)
    index[streams] = len(times)
    means = found.means(slice(None), index)
    for one, other in zip(means, alone, strict=True):
        np.testing.assert_array_equal(one[..., streams], other)
    assert np.isinf(means.data[[1, 3]]).all()
