"""The sparse release against the dense one, and noise that waits until it is seen."""

import math

import numpy as np
import pytest

from pfl_sklearn.privacy import ClippedSum
from pfl_sklearn.privacy._mechanisms._sparse_sum import SparseClippedSum, SparseMessages
from tests.helpers.draws import Ones

D, C = 7, 2


def messages(k=5, seed=0, scale=1.0):
    """Sparse messages of k clients, and the same as an array (k, D, C)."""
    rng = np.random.default_rng(seed)
    has = rng.random((k, D)) < 0.4
    has[1] = False  # a client without any row
    owner, rows = np.nonzero(has)
    values = scale * rng.normal(size=(len(rows), C))
    dense = np.zeros((k, D, C))
    dense[owner, rows] = values
    return SparseMessages(values, rows, owner, k), dense


def spread(total):
    dense = np.zeros((D, C))
    dense[total.rows] = total.values
    return dense


@pytest.mark.parametrize("clip_norm", [None, 0.3, 1.5, 100.0])
@pytest.mark.parametrize("quantile", [None, 0.3])
def test_agrees_with_the_dense_release(clip_norm, quantile):
    if clip_norm is None and quantile is not None:
        quantile = None
    sparse, dense = messages()
    release = ClippedSum(clip_norm, 0.0, quantile)
    expected = release.release(dense, release.start(), 5.0, np.random.default_rng(0))
    got = SparseClippedSum(release).release(sparse, release.start(), 5.0, np.random.default_rng(0))
    np.testing.assert_allclose(spread(got.total), expected.total, rtol=1e-13, atol=1e-15)
    assert got[1:] == pytest.approx(expected[1:])
    assert got.total.pending_variance == 0
    assert (np.diff(got.total.rows) > 0).all()


@pytest.mark.parametrize("value", [1.0, math.nan, math.inf, -math.inf, 1e308, 1e-161, 5e-324])
def test_normalized_messages_agree_with_the_dense_release(value):
    sparse, dense = messages()
    own = sparse.owner == 0
    sparse.values[own] = value
    dense[0][sparse.rows[own]] = value
    release, rng = ClippedSum(2.0, normalize=True), np.random.default_rng(0)
    expected = release.release(dense, 2.0, 5.0, rng)
    got = SparseClippedSum(release).release(sparse, 2.0, 5.0, rng)
    np.testing.assert_allclose(spread(got.total), expected.total, rtol=1e-13, atol=1e-15)
    assert got[1:] == pytest.approx(expected[1:])
    assert got.clipped == (0.8 if value == 1.0 else 0.6)  # client 1 has no row


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308, 1e200])
def test_extreme_messages_are_kept_in_the_bound(value):
    sparse, dense = messages()
    first = int(np.flatnonzero(sparse.owner == 0)[0])
    sparse.values[first] = value
    bound = 0.5
    got = SparseClippedSum(ClippedSum(bound)).release(sparse, bound, 5.0, np.random.default_rng(0))
    dense[0] = 0
    others = ClippedSum(bound).release(dense, bound, 5.0, np.random.default_rng(0)).total
    assert np.isfinite(got.total.values).all()
    assert np.linalg.norm(spread(got.total) - others) <= bound * (1 + 1e-12)


def test_a_client_moves_no_bit_of_the_others():
    """Each client's part of the sum is the same whoever else is there."""
    sparse, _ = messages(seed=3)
    alone = sparse.owner == 2
    changed = SparseMessages(
        np.where(alone[:, None], sparse.values, 1e308), sparse.rows, sparse.owner, sparse.k
    )
    release, rng = SparseClippedSum(ClippedSum(0.5)), np.random.default_rng(0)
    got = release.release(changed, 0.5, 5.0, rng).total  # overflowing messages count as 0
    own = SparseMessages(sparse.values[alone], sparse.rows[alone], sparse.owner[alone], sparse.k)
    np.testing.assert_array_equal(spread(got), spread(release.release(own, 0.5, 5.0, rng).total))


def test_an_empty_round_owes_noise():
    none = SparseMessages(np.zeros((0, C)), np.zeros(0, np.intp), np.zeros(0, np.intp), 0)
    for quantile in (None, 0.5):
        mechanism = ClippedSum(2.0, 3.0, quantile)
        got = SparseClippedSum(mechanism).release(none, 2.0, 5.0, np.random.default_rng(0))
        assert spread(got.total).tolist() == np.zeros((D, C)).tolist()
        owed = (mechanism.sum_noise_multiplier * 2.0) ** 2
        assert got.total.pending_variance == pytest.approx(owed, rel=1e-12)
        assert got.clipped == 0


def test_settled_noise_is_exactly_what_was_due():
    """Every draw is 1: a row's noise is the root of the variance that came since it was seen."""
    release, settled = SparseClippedSum(ClippedSum(1.0, 1.0)), np.zeros(3)
    found = release.due_noise(settled, 4.0, np.array([1]), C, Ones())
    np.testing.assert_array_equal(found, [[2.0, 2.0]])
    found = release.due_noise(settled, 9.0, np.array([0, 1]), C, Ones())
    np.testing.assert_array_equal(found[:, 0], [3.0, math.sqrt(5)])
    assert settled.tolist() == [9.0, 9.0, 0.0]


def test_nothing_is_due_twice():
    release, rng = SparseClippedSum(ClippedSum(1.0, 1.0)), np.random.default_rng(0)
    settled = np.zeros(4)
    assert release.due_noise(settled, 3.0, np.array([1, 2]), 2, rng).all()
    assert settled.tolist() == [0, 3, 3, 0]
    assert not release.due_noise(settled, 3.0, np.array([1, 2]), 2, rng).any()


@pytest.mark.parametrize("noise", [1e-9, 0.3, 1.0, 7.0, 1e12])
def test_values_are_rounded_to_a_power_of_two_far_below_the_noise(noise):
    release = SparseClippedSum(ClippedSum(noise, 1.0))
    values = np.random.default_rng(0).normal(size=1000) * noise
    got = release.rounded(values, 1.0)
    moved = np.abs(got - values)
    assert moved.max() < 1e-6 * noise
    assert moved.min() > 0
    grid = 2.0 ** (math.floor(math.log2(noise)) - 20)
    np.testing.assert_array_equal(got / grid, np.rint(got / grid))
