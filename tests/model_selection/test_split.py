"""Splitters: what every split must keep, over drawn client sizes."""

import numpy as np
import pandas as pd
import polars as pl
import pytest
from hypothesis import given, settings, strategies as st
from scipy.stats import chi2
from sklearn import config_context
from sklearn.base import clone

from pfl_sklearn.model_selection import ClientKFold, ClientShuffleSplit

quick = settings(max_examples=60, deadline=None)
sizes_of_clients = st.lists(st.integers(1, 12), min_size=1, max_size=12)
seeds = st.integers(0, 2**31 - 1)


def rows_of(sizes, seed=0):
    """Shuffled client ids, and a placeholder for X."""
    groups = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    return np.zeros((len(groups), 1)), groups


def splits_of(splitter, X, groups, y=None):
    return list(splitter.split(X, y, groups=groups))


def as_lists(splits):
    return [(train.tolist(), test.tolist()) for train, test in splits]


@quick
@given(sizes_of_clients, st.integers(2, 6), seeds)
def test_folds_are_a_partition_and_even(sizes, n_splits, seed):
    X, groups = rows_of(sizes, seed)
    if n_splits > len(groups):
        with pytest.raises(ValueError, match=rf"n_splits={n_splits}\b.*rows"):
            splits_of(ClientKFold(n_splits), X, groups)
        return
    splits = splits_of(ClientKFold(n_splits, random_state=seed), X, groups)
    assert len(splits) == ClientKFold(n_splits).get_n_splits(X, None, groups) == n_splits
    fold = np.full(len(groups), -1)
    for k, (train, test) in enumerate(splits):
        assert (fold[test] == -1).all()
        fold[test] = k
        np.testing.assert_array_equal(np.union1d(train, test), np.arange(len(groups)))
        assert len(train) + len(test) == len(groups)
    tested = np.array(
        [np.bincount(fold[groups == k], minlength=n_splits) for k in range(len(sizes))]
    )
    assert np.ptp(tested, axis=1).max() <= 1
    assert np.ptp(tested.sum(axis=0)) <= 1
    in_train = np.array(sizes)[:, None] - tested
    assert (in_train[np.array(sizes) >= 2] >= 1).all()


@pytest.mark.parametrize("stratify", [False, True])
def test_folds_are_random_inside_clients(stratify):
    X, groups = rows_of([50, 50])
    labels = np.arange(100) % 3 == 0
    first = np.zeros(len(groups))
    for seed in range(200):
        splitter = ClientKFold(5, stratify=stratify, random_state=seed)
        _, test = splits_of(splitter, X, groups, labels)[0]
        first[test] += 1
    # Every row is as likely as any other: a chi-squared statistic within its central range.
    statistic = np.sum((first - 40) ** 2 / (40 * 0.8))
    assert chi2.ppf(1e-4, 98) < statistic < chi2.ppf(1 - 1e-4, 98)


@st.composite
def tables_with_classes(draw):
    """Shuffled client ids and classes, of which some may be rare or of one client alone."""
    n_clients, most = draw(st.integers(1, 40)), draw(st.integers(1, 13))
    n_classes, rarity = draw(st.integers(1, 6)), draw(st.floats(0.05, 1))
    rng = np.random.default_rng(draw(seeds))
    equal = draw(st.booleans())
    sizes = np.full(n_clients, most) if equal else rng.integers(1, most + 1, n_clients)
    groups = rng.permutation(np.repeat(np.arange(n_clients), sizes))
    labels = np.minimum(rng.geometric(rarity, len(groups)), n_classes)
    if draw(st.booleans()):  # each client has one row of a class, as matched cases have
        labels[np.unique(groups, return_index=True)[1]] = 0
    return groups, labels


def parts_of(groups, labels):
    """Which rows (n,) are of all, of each client, of each class, and of a class within a client."""
    yield np.ones(len(groups), dtype=bool)
    for client in np.unique(groups):
        yield groups == client
    for label in np.unique(labels):
        yield labels == label
        for client in np.unique(groups[labels == label]):
            yield (groups == client) & (labels == label)


@quick
@given(tables_with_classes(), st.integers(2, 12), seeds)
def test_stratified_folds_share_every_client_and_class(table, n_splits, seed):
    groups, labels = table
    n_splits = min(n_splits, len(groups))
    if n_splits < 2:
        return
    splitter = ClientKFold(n_splits, stratify=True, random_state=seed)
    folds = np.full(len(groups), -1)
    for k, (train, test) in enumerate(
        splits_of(splitter, np.zeros((len(groups), 1)), groups, labels)
    ):
        assert (folds[test] == -1).all()
        assert len(train) + len(test) == len(groups)
        folds[test] = k
    assert (folds >= 0).all()
    for rows in parts_of(groups, labels):
        assert np.ptp(np.bincount(folds[rows], minlength=n_splits)) <= 1


@pytest.mark.parametrize(("n_rows", "n_events", "n_splits"), [(5, 1, 5), (10, 1, 5), (12, 2, 3)])
def test_events_of_equal_clients_are_not_in_one_fold(n_rows, n_events, n_splits):
    X, groups = rows_of([n_rows] * 41)
    events = np.zeros(len(groups), dtype=int)
    events[np.argsort(groups, kind="stable").reshape(41, n_rows)[:, :n_events]] = 1
    splitter = ClientKFold(n_splits, stratify=True, random_state=0)
    tested = [events[test].sum() for _, test in splits_of(splitter, X, groups, events)]
    assert np.ptp(tested) <= 1


def test_many_classes_of_one_row_are_a_partition():
    X, groups = rows_of([3, 5, 1, 7])
    for n_splits in (2, 5, len(X)):
        splitter = ClientKFold(n_splits, stratify=True, random_state=0)
        splits = splits_of(splitter, X, groups, np.arange(len(X)))
        tested = np.concatenate([test for _, test in splits])
        np.testing.assert_array_equal(np.sort(tested), np.arange(len(X)))


@quick
@given(sizes_of_clients, st.floats(0.05, 0.95), seeds)
def test_shuffled_test_rows_inside_every_client(sizes, test_size, seed):
    X, groups = rows_of(sizes, seed)
    sizes = np.array(sizes)
    wanted = np.minimum(test_size * sizes, sizes - 1)
    splitter = ClientShuffleSplit(3, test_size=test_size, random_state=seed)
    if wanted.sum() < 1:
        return
    splits = splits_of(splitter, X, groups)
    assert len(splits) == splitter.get_n_splits() == 3
    for train, test in splits:
        np.testing.assert_array_equal(np.sort(np.r_[train, test]), np.arange(len(groups)))
        tested = np.bincount(groups[test], minlength=len(sizes))
        assert (tested <= sizes - 1).all()
        assert (np.abs(tested - wanted) < 1 + 1e-9).all()
        assert abs(len(test) - wanted.sum()) < 1 + 1e-9


@quick
@given(sizes_of_clients.filter(lambda sizes: len(sizes) > 1), st.floats(0.01, 0.99), seeds)
def test_new_clients_are_held_out_whole(sizes, new_clients, seed):
    X, groups = rows_of(sizes, seed)
    splitter = ClientShuffleSplit(2, new_clients=new_clients, random_state=seed)
    expected = min(max(round(new_clients * len(sizes)), 1), len(sizes) - 1)
    held_out = []
    for train, test in splits_of(splitter, X, groups):
        new = np.setdiff1d(groups, groups[train])
        assert len(new) == expected
        assert len(np.intersect1d(groups[train], new)) == 0
        assert np.isin(np.flatnonzero(np.isin(groups, new)), test).all()
        assert len(train) + len(test) == len(groups)
        held_out.append(new)
    np.testing.assert_array_equal(held_out[0].shape, held_out[1].shape)


def test_new_clients_change_from_split_to_split():
    X, groups = rows_of([3] * 20)
    held_out = {
        tuple(np.setdiff1d(groups, groups[train]))
        for train, _ in ClientShuffleSplit(10, new_clients=0.2, random_state=0).split(
            X, None, groups
        )
    }
    assert len(held_out) > 5
    assert {len(clients) for clients in held_out} == {4}


def test_splits_without_new_levels_keep_their_rows():
    X, groups = np.zeros((12, 1)), np.repeat([0, 1, 2], [3, 4, 5])
    splitter = ClientShuffleSplit(3, test_size=0.4, new_clients=0.3, random_state=0)
    tested = [
        [1, 4, 5, 7, 8, 9, 10, 11],
        [0, 3, 5, 7, 8, 9, 10, 11],
        [1, 5, 6, 7, 8, 9, 10, 11],
    ]
    for nothing in (None, {}, {0: 0.0}):
        same = ClientShuffleSplit(**{**vars(splitter), "new_levels": nothing})
        splits = splits_of(same, X, groups)
        assert [test.tolist() for _, test in splits] == tested


@quick
@given(
    st.integers(2, 12),
    st.floats(0.01, 0.99),
    st.sampled_from([0.0, 0.3]),
    st.booleans(),
    seeds,
)
@pytest.mark.slow
def test_new_levels_are_held_out_whole(n_levels, share, new_clients, stratify, seed):
    rng = np.random.default_rng(seed)
    movie = np.r_[np.arange(n_levels), rng.integers(0, n_levels, 200)].astype(float)
    movie[rng.random(len(movie)) < 0.1] = np.nan
    groups, y = rng.integers(0, 8, len(movie)), rng.integers(0, 2, len(movie))
    parameters = {"new_clients": new_clients, "stratify": stratify, "random_state": seed}
    levels = np.unique(movie[~np.isnan(movie)])
    if len(levels) < 2:
        return
    expected = min(max(round(share * len(levels)), 1), len(levels) - 1)
    splits = splits_of(
        ClientShuffleSplit(3, new_levels={0: share}, **parameters), movie[:, None], groups, y
    )
    without = splits_of(ClientShuffleSplit(3, **parameters), movie[:, None], groups, y)
    for (train, test), (_, inside) in zip(splits, without, strict=True):
        np.testing.assert_array_equal(np.sort(np.r_[train, test]), np.arange(len(movie)))
        held_out = np.setdiff1d(test, inside)
        # Beside the rows that are tested anyway, whole levels are, and no missing value is.
        new = np.setdiff1d(levels, movie[train])
        assert set(movie[held_out]) <= set(new)
        assert len(set(movie[held_out])) <= expected <= len(new)


def test_new_levels_of_several_columns_in_any_table():
    rng = np.random.default_rng(0)
    movie, state = rng.integers(0, 20, 400), rng.integers(0, 10, 400)
    groups = rng.integers(0, 15, 400)
    names = {
        "movie": [f"m{k:02}" for k in movie],
        "state": pd.Categorical([f"s{k}" for k in state]),
    }
    shares, seed = {"movie": 0.2, "state": 0.3}, {"random_state": 1}
    frame = pd.DataFrame(names)
    splits = splits_of(ClientShuffleSplit(4, new_levels=shares, **seed), frame, groups)
    drawn = []
    for train, _ in splits:
        new = [np.setdiff1d(column, column[train]) for column in (movie, state)]
        assert [len(levels) for levels in new] == [4, 3]
        drawn.append(tuple(new[0]))
    assert len(set(drawn)) == 4
    tables = [
        (pl.DataFrame({"movie": names["movie"], "state": list(names["state"])}), shares),
        (frame.astype(str).to_numpy(), {0: 0.2, 1: 0.3}),
        (np.column_stack([movie, state]), {0: 0.2, -1: 0.3}),
    ]
    for table, by_column in tables:
        again = splits_of(ClientShuffleSplit(4, new_levels=by_column, **seed), table, groups)
        assert as_lists(again) == as_lists(splits)


@pytest.mark.parametrize(
    ("new_levels", "message"),
    [
        (0.2, r"new_levels.*dict.*\b0\.2\b"),
        ({"movie": 1.0}, r"new_levels\['movie'\].*\[0\.0, 1\.0\).*\b1\.0\b"),
        ({"movie": "some"}, r"new_levels\['movie'\].*\[0\.0, 1\.0\).*'some'"),
        ({"film": 0.2}, r"column 'film' is not a column of X.*'movie', 'one'"),
        ({5: 0.2}, r"column 5 is not a column of X.*'movie', 'one'"),
        ({"one": 0.2}, r"new_levels\['one'\].*two levels.*got 1\b"),
        ({"none": 0.2}, r"new_levels\['none'\].*two levels.*got 0\b"),
        ({"movie": 0.9, "twin": 0.9}, r"no training row.*new_levels"),
    ],
)
def test_bad_new_levels(new_levels, message):
    movie = np.array(["a", "b"] * 4)
    table = pd.DataFrame({"movie": movie, "one": "x", "none": None, "twin": movie})
    # Of two levels each, different ones may be held out, so that none is left.
    splitter = ClientShuffleSplit(60, test_size=0.1, new_levels=new_levels, random_state=0)
    with pytest.raises(ValueError, match=message):
        splits_of(splitter, table, np.repeat([1, 2], 4))


@quick
@given(tables_with_classes(), st.floats(0.01, 0.99), seeds)
def test_stratified_shuffles_round_what_is_expected_of_every_class(table, test_size, seed):
    groups, labels = table
    sizes = np.bincount(groups)
    expected = (np.minimum(test_size * sizes, sizes - 1) / sizes)[groups]
    if expected.sum() < 1:
        return
    splitter = ClientShuffleSplit(1, test_size=test_size, stratify=True, random_state=seed)
    ((_, test),) = splits_of(splitter, np.zeros((len(groups), 1)), groups, labels)
    tested = np.isin(np.arange(len(groups)), test)
    for rows in parts_of(groups, labels):
        assert abs(tested[rows].sum() - expected[rows].sum()) < 1 + 1e-3
    in_train = np.bincount(groups[~tested], minlength=len(sizes))
    assert (in_train >= 1).all()


@pytest.mark.parametrize("stratify", [False, True])
def test_every_row_is_tested_equally_often(stratify):
    X, groups = rows_of([1, 2, 5, 12])
    sizes = np.bincount(groups)[groups]
    counts = np.zeros(len(groups))
    labels = np.random.default_rng(1).integers(0, 2, len(groups))
    splitter = ClientShuffleSplit(200, test_size=0.3, stratify=stratify, random_state=0)
    for _, test in splitter.split(X, labels, groups):
        counts[test] += 1
    share = np.where(sizes == 1, 0, 0.3)
    np.testing.assert_allclose(counts / 200, share, atol=4 * np.sqrt(0.21 / 200))


@pytest.mark.parametrize(
    "splitter",
    [
        ClientKFold(3),
        ClientKFold(3, stratify=True),
        ClientShuffleSplit(3),
        ClientShuffleSplit(3, new_clients=0.3, stratify=True),
    ],
    ids=repr,
)
class TestBoth:
    X, groups = rows_of([4, 5, 6, 7])
    y = np.arange(22) % 2

    def test_random_state(self, splitter):
        def made(seed):
            seeded = type(splitter)(**{**vars(splitter), "random_state": seed})
            return as_lists(seeded.split(self.X, self.y, groups=self.groups))

        assert made(3) == made(3)
        assert made(3) != made(4)
        assert made(np.random.RandomState(3)) == made(np.random.RandomState(3))
        assert made(None) != made(None)
        once = type(splitter)(**{**vars(splitter), "random_state": 7})
        assert as_lists(once.split(self.X, self.y, self.groups)) == as_lists(
            once.split(self.X, self.y, self.groups)
        )

    def test_column_is_groups(self, splitter):
        seeded = {**vars(splitter), "random_state": 0}
        expected = as_lists(type(splitter)(**seeded).split(self.X, self.y, groups=self.groups))
        names = np.array([f"site {k}" for k in self.groups])
        tables = [
            (np.column_stack([self.X, self.groups]), 1),
            (pd.DataFrame({"x": self.X[:, 0], "site": names}), "site"),
            (pl.DataFrame({"x": self.X[:, 0], "site": names}), "site"),
        ]
        for table, column in tables:
            by_column = type(splitter)(**{**seeded, "client_column": column})
            assert as_lists(by_column.split(table, self.y)) == expected
            given = self.groups if column == 1 else names
            assert as_lists(by_column.split(table, self.y, groups=given)) == expected
            with pytest.raises(ValueError, match=r"groups=.*('site'|\b1\b)"):
                next(by_column.split(table, self.y, groups=given[::-1]))

    def test_groups_are_needed_and_checked(self, splitter):
        out = r"set_config\(enable_metadata_routing=True\).*client_column.*ClientColumn"
        with pytest.raises(ValueError, match=rf"'groups' parameter should not be None.*{out}"):
            next(splitter.split(self.X, self.y))
        with pytest.raises(ValueError, match=r"groups.*\b21 ids.*\b22 rows"):
            next(splitter.split(self.X, self.y, groups=self.groups[1:]))
        with pytest.raises(ValueError, match=r"groups.*\bNaN\b.*row 0\b"):
            next(splitter.split(self.X, self.y, groups=np.r_[np.nan, self.groups[1:]]))

    def test_repr_and_names_of_ids(self, splitter):
        assert repr(splitter).startswith(type(splitter).__name__ + "(")
        assert "n_splits=3" in repr(splitter)
        seeded = type(splitter)(**{**vars(splitter), "random_state": 0})
        names = np.array([f"site {k}" for k in self.groups])
        assert as_lists(seeded.split(self.X, self.y, names)) == as_lists(
            seeded.split(self.X, self.y, self.groups)
        )


@pytest.mark.parametrize(
    ("splitter", "message"),
    [
        (ClientKFold(1), r"n_splits.*\b2\b.*\b1\b"),
        (ClientKFold(2.0), r"n_splits.*\b2\b.*\b2\.0\b"),
        (ClientKFold("5"), r"n_splits.*\b2\b.*'5'"),
        (ClientKFold(7), r"n_splits=7\b.*\b6\b"),
        (ClientShuffleSplit(0), r"n_splits.*\b1\b.*\b0\b"),
        (ClientShuffleSplit(test_size=0), r"test_size.*\(0\.0, 1\.0\).*\b0\b"),
        (ClientShuffleSplit(test_size=1), r"test_size.*\(0\.0, 1\.0\).*\b1\b"),
        (ClientShuffleSplit(test_size=np.nan), r"test_size.*\(0\.0, 1\.0\).*\bnan\b"),
        (ClientShuffleSplit(test_size="half"), r"test_size.*\(0\.0, 1\.0\).*'half'"),
        (ClientShuffleSplit(test_size=None), r"test_size.*\(0\.0, 1\.0\).*\bNone\b"),
        (ClientShuffleSplit(new_clients=-0.1), r"new_clients.*\[0\.0, 1\.0\).*-0\.1\b"),
        (ClientShuffleSplit(new_clients=1.0), r"new_clients.*\[0\.0, 1\.0\).*\b1\.0\b"),
        (ClientShuffleSplit(new_clients="one"), r"new_clients.*\[0\.0, 1\.0\).*'one'"),
        (ClientKFold(2, stratify=True), r"stratify=True.*\by\b"),
        (ClientShuffleSplit(stratify=True), r"stratify=True.*\by\b"),
        (ClientKFold(2, client_column="id"), r"'id'.*ndarray"),
    ],
    ids=repr,
)
def test_bad_parameters(splitter, message):
    with pytest.raises(ValueError, match=message):
        next(splitter.split(np.zeros((6, 1)), None, [1, 1, 1, 2, 2, 2]))


def test_labels_of_another_length():
    for splitter in (ClientKFold(2, stratify=True), ClientShuffleSplit(stratify=True)):
        with pytest.raises(ValueError, match="inconsistent numbers of samples"):
            next(splitter.split(np.zeros((6, 1)), [0, 1], [1, 1, 1, 2, 2, 2]))
        with pytest.raises(ValueError, match="y should be a 1d array"):
            next(splitter.split(np.zeros((6, 1)), np.eye(6), [1, 1, 1, 2, 2, 2]))


def test_clients_of_one_row():
    X, groups = rows_of([1] * 7)
    splits = splits_of(ClientKFold(3, random_state=0), X, groups)
    assert sorted(len(test) for _, test in splits) == [2, 2, 3]
    with pytest.raises(ValueError, match=r"test_size.*new_clients"):
        next(ClientShuffleSplit().split(X, None, groups))
    _, test = next(ClientShuffleSplit(new_clients=0.3).split(X, None, groups))
    assert len(test) == 2
    with pytest.raises(ValueError, match=r"new_clients.*two clients"):
        next(ClientShuffleSplit(new_clients=0.3).split(X, None, np.zeros(7, dtype=int)))


def test_small_clients_are_always_split():
    X, groups = rows_of([2, 2, 2])
    for seed in range(200):
        _, test = next(ClientShuffleSplit(random_state=seed).split(X, None, groups))
        assert len(test) in (1, 2)


def test_routing_asks_for_groups():
    for splitter in (ClientKFold(), ClientShuffleSplit()):
        with config_context(enable_metadata_routing=True):
            assert splitter.get_metadata_routing().consumes("split", ["groups"]) == {"groups"}
        assert vars(clone(splitter, safe=False)) == vars(splitter)
