"""Schedules of rows: passes, orders, what is kept between runs, and X of any kind."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy.sparse import csr_array

from pfl_sklearn._rounds import rows as _rows
from pfl_sklearn._rounds.rows import CatchingUp, ClientRows, InTurn, Reshuffled

SIZES = np.array([1, 7, 2, 7, 5, 1, 12, 3])


def rows_of(sizes, schedule, X=None):
    """Rows whose feature is their own number."""
    n = int(np.sum(sizes))
    X = np.arange(float(n))[:, None] if X is None else X
    offsets = np.cumsum([0, *sizes])
    return ClientRows(X, np.arange(n), offsets, np.arange(len(sizes)), schedule)


def taken(rows, n_rounds, rng, sampled=None, state=None):
    """Numbers of the rows that each client uses, in order, and the state."""
    state = rows.schedule.start(rows, rows.n_clients) if state is None else state
    found = {i: [] for i in range(rows.n_clients)}
    for t in range(n_rounds):
        now = np.arange(rows.n_clients) if sampled is None else sampled(rng)
        for block in rows.blocks(now, state, t, rng):
            for i, numbers in zip(block.clients.tolist(), block.batch.y, strict=True):
                found[i].append(numbers)
    return found, state


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    batch_size=st.one_of(st.none(), st.integers(1, 6)),
    n_batches=st.integers(1, 7),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_pass_uses_each_row_once(sizes, batch_size, n_batches, seed):
    rows = rows_of(sizes, Reshuffled(batch_size, n_batches))
    rng = np.random.default_rng(seed)
    found, _ = taken(rows, 9, rng, lambda rng: np.flatnonzero(rng.random(len(sizes)) < 0.6))
    for i, batches in found.items():
        size = sizes[i] if batch_size is None else min(batch_size, sizes[i])
        assert {batch.shape for batch in batches} <= {(n_batches, size)}
        stream = np.concatenate([batch.ravel() for batch in batches]) if batches else np.zeros(0)
        own = np.arange(rows.offsets[i], rows.offsets[i + 1])
        for start in range(0, len(stream), sizes[i]):
            part = stream[start : start + sizes[i]]
            assert set(part) <= set(own)
            assert len(set(part)) == len(part)


@settings(deadline=None, max_examples=20)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    most=st.integers(1, 4),
    since=st.sampled_from([-1, 2]),
    seed=st.integers(0, 2**32 - 1),
)
def test_batches_of_missed_rounds_come_first(sizes, most, since, seed):
    """And each pass uses each row once."""
    schedule = CatchingUp(Reshuffled(3, 2), most, since=since)
    rows, rng = rows_of(sizes, schedule), np.random.default_rng(seed)
    state, latest = schedule.start(rows, len(sizes)), np.full(len(sizes), -1)
    streams = [[] for _ in sizes]
    for t in range(9):
        sampled = np.flatnonzero(rng.random(len(sizes)) < 0.4)
        if t == 8:
            sampled, rows = np.arange(len(sizes)), rows.with_schedule(replace(schedule, now=False))
            state = rows.schedule.after_rounds(rows, state)
        found = {}
        for block in rows.blocks(sampled, state, t, rng):
            found |= dict(zip(block.clients.tolist(), block.batch.y, strict=True))
        for i in sampled:
            missed = min(t - latest[i] - 1, most) if latest[i] >= since else 0
            numbers = found.pop(i, np.zeros((0, 0), dtype=int))
            assert len(numbers) == 2 * (missed + (t < 8))
            streams[i] += [numbers.ravel()]
        assert not found
        latest[sampled] = t
    for i, stream in enumerate(map(np.concatenate, streams)):
        own = np.arange(rows.offsets[i], rows.offsets[i + 1])
        for start in range(0, len(stream) - sizes[i] + 1, sizes[i]):
            np.testing.assert_array_equal(np.sort(stream[start : start + sizes[i]]), own)


def test_clients_without_rows_miss_rounds_and_new_ones_do_not():
    """Clients 0 and 1 of a run become 0 and 2 of four, of whom 0, 1 and 3 have rows."""
    schedule, rng = CatchingUp(Reshuffled(3, 1), 9), np.random.default_rng(0)
    _, state = taken(rows_of([5, 6], schedule), 4, rng)
    rows = rows_of([5, 4, 7], replace(schedule, joined=4))._replace(clients=np.array([0, 1, 3]))
    state = rows.schedule.resume(rows, 4, state, np.array([0, 2]))
    assert batches_drawn(rows, [0, 1], state, 6, rng) == {0: 3, 1: 3}
    rows = rows_of([5, 4, 6, 7], replace(schedule, joined=7))
    state = rows.schedule.resume(rows, 4, state, np.arange(4))
    assert batches_drawn(rows, [0, 1, 2, 3], state, 8, rng) == {0: 2, 1: 2, 2: 5, 3: 5}


def batches_drawn(rows, sampled, state, t, rng):
    """Number of batches of each client."""
    blocks = rows.blocks(np.array(sampled), state, t, rng)
    pairs = ((block.clients.tolist(), map(len, block.chosen)) for block in blocks)
    return {i: n for clients, numbers in pairs for i, n in zip(clients, numbers, strict=True)}


def test_orders_are_uniform():
    rows = rows_of([3] * 6000, Reshuffled(3, 1))
    found, _ = taken(rows, 2, np.random.default_rng(0))
    for t in range(2):
        orders = np.array([batches[t].ravel() % 3 for batches in found.values()])
        _, counts = np.unique(orders, axis=0, return_counts=True)
        assert len(counts) == 6
        assert np.abs(counts - 1000).max() < 5 * np.sqrt(1000)


def test_an_order_stays_for_its_pass_and_a_later_run_goes_on():
    """Ten rows in batches of four: a batch holds the end of one pass and the start of the next."""
    rows = rows_of([10, 10], Reshuffled(4, 1))
    whole, _ = taken(rows, 10, np.random.default_rng(1))
    rng = np.random.default_rng(1)
    first, state = taken(rows, 6, rng)
    kept = {name: values.copy() for name, values in state.items()}
    resumed = rows.schedule.resume(rows, 2, state, np.arange(2))
    rest, _ = taken(rows, 4, rng, state=resumed)
    for i in range(2):
        np.testing.assert_array_equal(np.array(first[i] + rest[i]), np.array(whole[i]))
    for name, values in kept.items():
        np.testing.assert_array_equal(state[name], values)


def test_clients_with_other_rows_start_a_new_pass_and_the_others_go_on():
    """Clients 0, 1 and 2 of three become 0, 2 and 3 of four; client 2 has one more row."""
    rows = rows_of([5, 6, 4], Reshuffled(3, 1))
    _, state = taken(rows, 3, np.random.default_rng(0))
    other = rows_of([5, 4, 7, 4], Reshuffled(3, 1))
    got = other.schedule.resume(other, 4, state, np.array([0, 2, 3]))
    np.testing.assert_array_equal(
        got["position"], [state["position"][0], 4, 7, *state["position"][2:]]
    )
    np.testing.assert_array_equal(got["order"][:5], state["order"][:5])
    np.testing.assert_array_equal(got["order"][5:16], np.arange(5, 16))
    np.testing.assert_array_equal(got["order"][16:], state["order"][11:] + 5)
    assert set(got["position"][[0, 3]]) != {5, 4}  # they are within a pass


def test_rows_of_absent_clients_do_not_decide_for_new_ones():
    """As many rows, but of other clients."""
    rows = rows_of([8, 8], Reshuffled(3, 1))
    _, state = taken(rows, 2, np.random.default_rng(0))
    other = rows_of([8, 8], Reshuffled(3, 1))._replace(clients=np.array([2, 3]))
    got = other.schedule.resume(other, 4, state, np.array([0, 1]))
    np.testing.assert_array_equal(got["order"], np.arange(16))
    np.testing.assert_array_equal(got["position"], [8, 8])


@pytest.mark.parametrize("schedule", [InTurn(np.minimum(SIZES, 3)), Reshuffled(3, 2)], ids=repr)
def test_rows_without_features(schedule):
    rows = rows_of(SIZES, schedule, np.zeros((SIZES.sum(), 0)))
    state = schedule.start(rows, len(SIZES))
    blocks = rows.blocks(np.arange(8), state, 0, np.random.default_rng(0))
    assert sum(len(block.members) for block in blocks) == 8


@pytest.mark.parametrize(
    ("schedule", "kind", "dtype"),
    [
        (InTurn(np.minimum(SIZES, 3)), "matrix", np.float64),
        (InTurn(np.minimum(SIZES, 3)), "sparse", np.float32),
        (Reshuffled(3, 2), "images", np.float32),
        (Reshuffled(3, 2), "sparse", np.float64),
    ],
    ids=str,
)
def test_x_of_any_kind(schedule, kind, dtype):
    shape = (SIZES.sum(), 2, 3, 4) if kind == "images" else (SIZES.sum(), 5)
    X = np.random.default_rng(0).normal(size=shape).astype(dtype)
    rows = rows_of(SIZES, schedule, csr_array(X) if kind == "sparse" else X)
    state = schedule.start(rows, len(SIZES))
    members = []
    for block in rows.blocks(np.arange(8), state, 0, np.random.default_rng(0)):
        assert block.batch.X.dtype == dtype
        np.testing.assert_array_equal(block.batch.X, X[block.batch.y])
        members += block.members.tolist()
    assert sorted(members) == list(range(8))


def test_passes_over_large_clients_are_gathered_a_few_at_a_time(monkeypatch):
    """A block of ten clients with 2 x 6 rows each would hold 120 numbers."""
    rows = rows_of([6] * 10, Reshuffled(4, 0, 2))._replace(at_once=64)
    found = {}
    for most, size in ((1 << 26, 10), (40, 3), (5, 1)):
        monkeypatch.setattr(_rows, "_MOST_GATHERED", most)
        rng, state = np.random.default_rng(0), rows.schedule.start(rows, 10)
        blocks = rows.blocks(np.arange(10), state, 0, rng)
        assert max(len(block.clients) for block in blocks) == size
        found[most] = np.concatenate([block.batch.y for block in blocks])
        assert found[most].shape == (10, 3, 4)
    np.testing.assert_array_equal(found[40], found[5])
    np.testing.assert_array_equal(found[40], found[1 << 26])
