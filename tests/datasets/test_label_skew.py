"""Rows of a table, distributed over clients by class."""

import hashlib

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings, strategies as st
from scipy.stats import chi2, kstest

from pfl_sklearn.datasets import (
    load_digits_clients,
    make_dirichlet_clients,
    make_label_skew_clients,
)

SPLITTERS = [make_label_skew_clients, make_dirichlet_clients]


def counts_of(clients, n_clients):
    """Rows of each class in each client, (n_clients, n_classes)."""
    counts = np.zeros((n_clients, len(clients.classes)), dtype=int)
    codes = np.searchsorted(clients.classes, clients.target)
    np.add.at(counts, (clients.groups, codes), 1)
    return counts


def a_table(n_rows, n_classes=10, seed=0):
    """Rows that hold their position, and labels with every class in equal numbers, shuffled."""
    y = np.random.default_rng(seed).permutation(np.arange(n_rows) % n_classes)
    return np.arange(n_rows), y


@st.composite
def labels(draw):
    """Labels with two to six classes of 1 to 30 rows, as numbers or strings, in any order."""
    sizes = draw(st.lists(st.integers(1, 30), min_size=2, max_size=6))
    names = draw(st.sampled_from([[3, 5, 7, 11, 13, 17], ["f", "aa", "b", "c", "e", "d"]]))
    y = np.repeat(names[: len(sizes)], sizes)
    return np.random.default_rng(draw(st.integers(0, 9))).permutation(y)


def assert_each_row_once(clients, y):
    assert (np.diff(clients.rows) > 0).all()
    np.testing.assert_array_equal(clients.data, clients.rows)
    np.testing.assert_array_equal(clients.target, y[clients.rows])
    assert len(clients.groups) == len(clients.rows)
    np.testing.assert_array_equal(clients.classes, np.unique(y))
    np.testing.assert_allclose(clients.class_shares.sum(axis=1), 1, rtol=1e-12)


@settings(deadline=None, max_examples=25)
@given(y=labels(), n_clients=st.integers(1, 12), k=st.integers(1, 6), seed=st.integers(0, 5))
def test_few_classes_partition_the_table(y, n_clients, k, seed):
    names, sizes = np.unique(y, return_counts=True)
    k = min(k, len(names))
    rows = np.arange(len(y))
    if n_clients * k < len(names):
        with pytest.raises(ValueError, match=rf"n_clients.*\b{len(names)}\b.*{n_clients} \* {k}"):
            make_label_skew_clients(rows, y, n_clients, k, random_state=seed)
        return
    try:
        clients = make_label_skew_clients(rows, y, n_clients, k, random_state=seed)
    except ValueError as error:
        assert f"{n_clients} clients with {k} classes each are too many" in str(error)
        assert sizes.min() < -(-n_clients * k // len(names))
        return
    assert_each_row_once(clients, y)
    assert len(clients.rows) == len(y)
    counts = counts_of(clients, n_clients)
    has = counts > 0
    assert (has.sum(axis=1) == k).all()
    assert np.ptp(has.sum(axis=0)) <= (0 if n_clients % len(names) == 0 else 1)
    for code in range(len(names)):
        assert np.ptp(counts[has[:, code], code]) <= 1
    expected = has * sizes / has.sum(axis=0)
    np.testing.assert_allclose(
        clients.class_shares, expected / expected.sum(axis=1, keepdims=True), rtol=1e-12
    )


@settings(deadline=None, max_examples=25)
@given(
    n_classes=st.integers(2, 8),
    n_clients=st.integers(1, 12),
    k=st.integers(1, 8),
    n_samples=st.integers(1, 25),
    seed=st.integers(0, 5),
)
def test_exactly_so_many_rows_of_few_classes(n_classes, n_clients, k, n_samples, seed):
    k = min(k, n_classes, n_samples)
    X, y = a_table(12 * 25 * n_classes, n_classes)
    clients = make_label_skew_clients(X, y, n_clients, k, n_samples=n_samples, random_state=seed)
    assert_each_row_once(clients, y)
    counts = counts_of(clients, n_clients)
    assert (counts.sum(axis=1) == n_samples).all()
    assert ((counts > 0).sum(axis=1) == k).all()
    for own in counts:
        assert np.ptp(own[own > 0]) <= 1
    np.testing.assert_allclose(clients.class_shares, (counts > 0) / k)
    if n_clients % n_classes == 0:
        assert np.ptp(counts.sum(axis=0)) == 0


@settings(deadline=None, max_examples=25)
@given(
    y=labels(),
    n_clients=st.integers(1, 40),
    concentration=st.sampled_from([1e-9, 0.01, 0.3, 5.0, 1e6]),
    seed=st.integers(0, 5),
)
def test_dirichlet_clients_partition_the_table(y, n_clients, concentration, seed):
    X = np.arange(len(y))
    n_clients = min(n_clients, len(y))
    clients = make_dirichlet_clients(X, y, n_clients, concentration, random_state=seed)
    assert_each_row_once(clients, y)
    assert len(clients.rows) == len(y)
    assert counts_of(clients, n_clients).sum(axis=1).min() >= 1


@settings(deadline=None, max_examples=20)
@given(
    n_clients=st.integers(1, 12),
    n_samples=st.integers(1, 25),
    concentration=st.sampled_from([1e-9, 0.01, 0.3, 5.0, 1e6]),
    seed=st.integers(0, 5),
)
def test_exactly_so_many_rows_of_a_dirichlet(n_clients, n_samples, concentration, seed):
    X, y = a_table(12 * 25 * 4, 4)
    clients = make_dirichlet_clients(
        X, y, n_clients, concentration, n_samples=n_samples, random_state=seed
    )
    assert_each_row_once(clients, y)
    counts = counts_of(clients, n_clients)
    assert (counts.sum(axis=1) == n_samples).all()
    assert (counts[clients.class_shares == 0] == 0).all()
    if concentration == 1e6:
        np.testing.assert_allclose(clients.class_shares, 0.25, atol=2e-3)
    if concentration == 1e-9:
        assert ((counts > 0).sum(axis=1) == 1).all()


@pytest.mark.parametrize("concentration", [0.05, 0.3, 2.0])
def test_shares_are_dirichlet(concentration):
    """A share of a Dirichlet is a beta; sums of shares are betas, too."""
    X, y = a_table(80_000, 4)
    shares = make_dirichlet_clients(
        X, y, 4000, concentration, n_samples=1, random_state=0
    ).class_shares
    for one in shares.T:
        assert kstest(one, "beta", (concentration, 3 * concentration)).pvalue > 1e-3
    two = shares[:, 0] + shares[:, 2]
    assert kstest(two, "beta", (2 * concentration, 2 * concentration)).pvalue > 1e-3


def test_shares_follow_the_table_on_average():
    y = np.repeat([0, 1, 2], [70_000, 20_000, 10_000])
    shares = make_dirichlet_clients(
        np.zeros(len(y)), y, 3000, 0.5, n_samples=1, random_state=0
    ).class_shares
    for one, frequency in zip(shares.T, (0.7, 0.2, 0.1), strict=True):
        assert kstest(one, "beta", (1.5 * frequency, 1.5 * (1 - frequency))).pvalue > 1e-3


def test_rows_follow_the_shares():
    """Pearson's statistic of the counts against the clients' shares."""
    X, y = a_table(200_000, 4)
    clients = make_dirichlet_clients(X, y, 500, 50.0, n_samples=100, random_state=0)
    expected = 100 * clients.class_shares
    statistic = np.sum((counts_of(clients, 500) - expected) ** 2 / expected)
    assert 1e-3 < chi2(500 * 3).sf(statistic) < 1 - 1e-3


def test_all_rows_follow_the_shares():
    """Each class is divided in proportion to the clients' distributions, to one row."""
    y, sizes = np.repeat([0, 1, 2], [7000, 2000, 1000]), [7000, 2000, 1000]
    X = np.arange(10_000)
    drawn = make_dirichlet_clients(X, y, 20, 1.0, n_samples=1, random_state=0).class_shares
    clients = make_dirichlet_clients(X, y, 20, 1.0, random_state=0)
    counts = counts_of(clients, 20)
    np.testing.assert_array_equal(counts.sum(axis=0), sizes)
    expected = sizes * drawn / drawn.sum(axis=0)
    assert np.abs(counts - expected).max() < 1
    np.testing.assert_allclose(
        clients.class_shares, expected / expected.sum(axis=1, keepdims=True), rtol=1e-9
    )


def test_as_many_clients_as_rows():
    X, y = a_table(40)
    for seed in range(5):
        clients = make_dirichlet_clients(X, y, 40, 0.01, random_state=seed)
        assert np.bincount(clients.groups).tolist() == [1] * 40
    with pytest.raises(ValueError, match=r"n_clients.*\b40\b.*\b41\b"):
        make_dirichlet_clients(X, y, 41)


def test_sizes_per_client():
    X, y = a_table(1000)
    sizes = np.arange(5, 25)
    for make in SPLITTERS:
        clients = make(X, y, 20, n_samples=sizes, random_state=0)
        np.testing.assert_array_equal(np.bincount(clients.groups), sizes)


def test_classes_without_a_client_are_left_out():
    X, y = a_table(1000)
    clients = make_label_skew_clients(X, y, 2, 3, n_samples=6, random_state=0)
    assert len(np.unique(clients.target)) == 6
    assert clients.class_shares.shape == (2, 10)


@pytest.mark.parametrize("make", SPLITTERS)
def test_splits_repeat_with_a_seed(make):
    X, y = a_table(500)
    for n_samples in (None, 8):
        a, b, c = (
            make(X, y, 20, n_samples=n_samples, random_state=seed)
            for seed in (0, np.random.RandomState(0), 1)
        )
        np.testing.assert_array_equal(a.rows, b.rows)
        np.testing.assert_array_equal(a.groups, b.groups)
        assert len(a.groups) != len(c.groups) or (a.groups != c.groups).mean() > 0.5


@pytest.mark.parametrize("make", SPLITTERS)
def test_rows_are_drawn_without_regard_to_their_order(make):
    """Both halves of a table have the same chance."""
    X, y = a_table(20_000)
    clients = make(X, y, 50, n_samples=20, random_state=0)
    assert kstest(clients.rows / 20_000, "uniform").pvalue > 1e-3
    first = clients.rows[clients.groups < 25] / 20_000
    assert kstest(first, "uniform").pvalue > 1e-3


@pytest.mark.parametrize("make", SPLITTERS)
def test_tables_of_any_kind(make):
    _, y = a_table(200, 4)
    images = np.random.default_rng(0).normal(size=(200, 1, 3, 3)).astype(np.float32)
    frame = pd.DataFrame({"a": np.arange(200), "b": y.astype(str)}, index=np.arange(200) * 7)
    texts = [f"row {k}" for k in range(200)]
    few = make(images, y, 8, n_samples=10, random_state=0)
    assert few.data.shape == (80, 1, 3, 3)
    assert few.data.dtype == np.float32
    np.testing.assert_array_equal(few.data, images[few.rows])
    framed = make(frame, frame["b"], 8, n_samples=10, random_state=0)
    pd.testing.assert_frame_equal(framed.data, frame.iloc[few.rows])
    assert framed.target.tolist() == y[few.rows].astype(str).tolist()
    assert framed.classes.tolist() == ["0", "1", "2", "3"]
    listed = make(texts, y.tolist(), 8, n_samples=10, random_state=0)
    assert listed.data == [texts[k] for k in few.rows]
    for one in (framed, listed):
        np.testing.assert_array_equal(one.groups, few.groups)


@pytest.mark.parametrize("make", SPLITTERS)
def test_a_whole_table_is_not_copied(make):
    _, y = a_table(200, 4)
    images = np.zeros((200, 1, 3, 3))
    assert make(images, y, 8, random_state=0).data is images


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"n_clients": 0}, r"n_clients.*\b1\b.*\b0\b"),
        ({"n_clients": 2.5}, r"n_clients.*\b1\b.*2\.5"),
        ({"n_samples": 0}, r"n_samples.*\b1\b.*\b0\b"),
        ({"n_samples": [3, 4]}, r"n_samples.*\b20\b.*\[3, 4\]"),
        ({"n_samples": 2.5}, r"n_samples.*\b20\b.*2\.5"),
    ],
)
@pytest.mark.parametrize("make", SPLITTERS)
def test_both_refuse(make, parameters, message):
    X, y = a_table(200)
    with pytest.raises(ValueError, match=message):
        make(X, y, **({"n_clients": 20} | parameters))


@pytest.mark.parametrize("make", SPLITTERS)
def test_both_refuse_tables(make):
    X, y = a_table(200)
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        make(X, y[1:], 5)
    with pytest.raises(ValueError, match="continuous"):
        make(X, y + 0.5, 5)
    with pytest.raises(ValueError, match="1d array"):
        make(X, np.eye(200, dtype=int), 5)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"classes_per_client": 0}, r"classes_per_client.*\b1\b.*\b0\b"),
        ({"classes_per_client": 11}, r"classes_per_client.*\b10\b.*\b11\b"),
        ({"n_clients": 4, "classes_per_client": 2}, r"n_clients.*\b10\b.*4 \* 2"),
        ({"n_samples": 2}, r"n_samples.*classes_per_client=3.*\b2\b"),
        (
            {"n_samples": 12},
            r"20 clients with 3 classes each.*\b240 rows.*\b20 rows.*\b24\b.*n_samples",
        ),
        (
            {"n_clients": 100, "classes_per_client": 10},
            r"100 clients with 10 classes each.*\b20 rows.*\b100\b.*classes_per_client",
        ),
    ],
)
def test_few_classes_refuse(parameters, message):
    X, y = a_table(200)
    with pytest.raises(ValueError, match=message):
        make_label_skew_clients(X, y, **({"n_clients": 20, "random_state": 0} | parameters))


@pytest.mark.parametrize("concentration", [0, -1.0, np.nan, np.inf, "a", None])
def test_dirichlet_refuses_a_concentration(concentration):
    X, y = a_table(200)
    with pytest.raises(ValueError, match=f"concentration.*0.*{concentration}"):
        make_dirichlet_clients(X, y, 5, concentration)


def test_dirichlet_refuses_too_many_rows():
    X, y = a_table(200)
    with pytest.raises(
        ValueError, match=r"20 clients.*concentration=0\.3.*\b200 rows.*\b20 rows.*n_samples"
    ):
        make_dirichlet_clients(X, y, 20, n_samples=10, random_state=0)
    with pytest.raises(ValueError, match=r"20 clients.*\b220 rows.*\b20 rows.*n_samples"):
        make_dirichlet_clients(X, y, 20, n_samples=11, random_state=0)


# Computed before the split served other tables. They are those of whole numbers, from shuffles of
# the generator that numpy has frozen, so every machine has the same.
DIGITS = {
    (20, 2, 0): "63c87b6fbe068e7a",
    (7, 3, 1): "95038b4f89932f01",
    (23, 4, 2): "a4361ffef55479a1",
    (170, 10, 3): "a5ad4569757c351a",
    (1, 10, 4): "b6326ebad33657b9",
    (10, 1, 5): "2e2bb9cbc64e951d",
}


@pytest.mark.parametrize("given", DIGITS)
def test_digits_are_split_as_ever(given):
    n_clients, k, seed = given
    groups = load_digits_clients(n_clients, k, random_state=seed).groups
    assert hashlib.sha256(groups.astype("<i8").tobytes()).hexdigest()[:16] == DIGITS[given]
