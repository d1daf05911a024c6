"""Forward chaining inside clients: who is trained on and tested when, and which times sort."""

from datetime import date

import numpy as np
import pandas as pd
import polars as pl
import pytest
from hypothesis import assume, example, given, settings, strategies as st
from sklearn import config_context
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, TimeSeriesSplit, cross_val_score

from pfl_sklearn import ClientColumn, ClientTimeSeriesSplit, GaussianMean
from pfl_sklearn.metrics import ClientScorer

tables = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), min_size=1, max_size=60)


def splits_of(splitter, X, groups=None):
    return [(train.tolist(), test.tolist()) for train, test in splitter.split(X, groups=groups)]


def one_client(times, **params):
    """Splits of one client's rows."""
    X = pd.DataFrame({"time": times})
    return splits_of(ClientTimeSeriesSplit(time_column="time", **params), X, [7] * len(X))


@settings(max_examples=150, deadline=None)
@given(tables, st.integers(1, 5), st.integers(0, 3), st.booleans(), st.data())
@pytest.mark.slow
def test_no_training_row_is_later_than_a_tested_one(rows, n_splits, gap, by_column, data):
    groups, times = np.array(rows).T
    if not by_column:  # each row is a step, in order of the table
        times = np.arange(len(groups))
    steps = {who: np.unique(times[groups == who]) for who in np.unique(groups)}
    splitter = ClientTimeSeriesSplit(n_splits, gap=gap, time_column=0 if by_column else None)
    most, X = max(map(len, steps.values())), times[:, None]
    if most < (n_splits + 1) * (gap + 1):
        with pytest.raises(ValueError, match=rf"n_splits={n_splits}\b.*gap={gap}\b.*\b{most}\b"):
            splits_of(splitter, X, groups)
        return
    splits = splits_of(splitter, X, groups)
    assert len(splits) == splitter.get_n_splits(X, None, groups) == n_splits
    n_tested, later = np.zeros(len(groups), dtype=int), np.zeros(len(groups), dtype=bool)
    for train, test in splits[::-1]:
        assert test
        n_tested[test] += 1
        later[test] = True
        assert not later[train].any()  # a row is tested after it has been in training, if at all
        for who, own in steps.items():
            kept, asked = (times[[k for k in part if groups[k] == who]] for part in (train, test))
            assert len(kept)  # every client has training rows in every split
            assert not np.isin(asked, kept).any()  # rows of one time stay together
            assert np.isin(times[groups == who], kept).sum() == len(kept)
            if len(asked):
                before = own[own < asked.min()]
                np.testing.assert_array_equal(np.unique(kept), before[: len(before) - gap])
    assert n_tested.max() == 1
    if by_column:
        order = np.array(data.draw(st.permutations(range(len(groups)))))
        moved = splits_of(splitter, X[order], groups[order])
        back = [tuple(sorted(order[part].tolist()) for part in pair) for pair in moved]
        assert back == splits


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 14), min_size=1, max_size=5), st.integers(1, 6))
@example([3, 20], 5)
def test_blocks_are_even_and_short_clients_are_tested_last(sizes, n_splits):
    assume(max(sizes) > n_splits)
    groups = np.repeat(np.arange(len(sizes)), sizes)
    splits = splits_of(ClientTimeSeriesSplit(n_splits), np.zeros((len(groups), 1)), groups)
    for who, size in enumerate(sizes):
        tested = [int((groups[test] == who).sum()) for _, test in splits]
        if size > n_splits:
            blocks = [size - sum(tested), *tested]
            assert blocks[0] == max(blocks) <= min(blocks) + 1
        else:
            assert tested == [0] * (n_splits - size + 1) + [1] * (size - 1)


@pytest.mark.parametrize("gap", [0, 1])
def test_one_client_is_split_as_scikit_learn_does(gap):
    X = np.zeros((24, 1))
    expected = splits_of(TimeSeriesSplit(5, gap=gap), X)
    assert splits_of(ClientTimeSeriesSplit(5, gap=gap), X, [0] * 24) == expected


def test_a_client_without_a_past_is_not_tested():
    """With a gap of one step, the second of two rows has nothing before it."""
    groups = np.repeat([0, 1], [6, 2])
    splits = splits_of(ClientTimeSeriesSplit(2, gap=1), np.zeros((8, 1)), groups)
    assert splits == [([0, 6], [2, 3]), ([0, 1, 2, 6], [4, 5])]


@pytest.mark.parametrize(
    "times",
    [
        [30, 10, 20, 10],
        [0.3, -0.1, 0.2, -0.1],
        ["c", "a", "b", "a"],
        ["2021-03-01", "2021-01-31", "2021-02-01", "2021-01-31"],
        [date(2021, 3, 1), date(2021, 1, 31), date(2021, 2, 1), date(2021, 1, 31)],
        pd.to_datetime(["2021-03-01", "2021-01-31", "2021-02-01", "2021-01-31"]),
        pd.to_datetime(["2021-03-01", "2021-01-31", "2021-02-01", "2021-01-31"], utc=True),
        pd.PeriodIndex(["2021-03", "2021-01", "2021-02", "2021-01"], freq="M"),
        pd.array([30, 10, 20, 10], dtype="Int64"),
        pd.Categorical(["late", "early", "mid", "early"], ["early", "mid", "late"], ordered=True),
        pd.Categorical(["c", "a", "b", "a"], ["c", "b", "a"]),  # no order: sorted
    ],
    ids=lambda times: f"{type(times).__name__}-{times[0]}",
)
def test_times_that_sort(times):
    expected = [([1, 3], [2]), ([1, 2, 3], [0])]
    assert one_client(times, n_splits=2) == expected
    table = pd.DataFrame({"client": ["x"] * 4, "time": times})
    splitter = ClientTimeSeriesSplit(2, time_column="time", client_column="client")
    assert splits_of(splitter, table) == expected
    if not isinstance(times, pd.PeriodIndex) and not isinstance(times, pd.Categorical):
        assert splits_of(splitter, pl.from_pandas(table)) == expected
    if not isinstance(times, pd.Categorical):  # an array of objects forgets their order
        by_position = ClientTimeSeriesSplit(2, time_column=1, client_column=0)
        assert splits_of(by_position, table.to_numpy()) == expected


def test_missing_times_in_a_series_are_no_steps():
    assert one_client([1, 50, 51], n_splits=2) == [([0], [1]), ([0, 1], [2])]


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ([1.0, np.nan, 2.0, 3.0], r"time column 'time'.*missing.*row 1\b"),
        (["a", "b", None, "c"], r"time column 'time'.*missing.*row 2\b"),
        (pd.to_datetime(["2021-01-01", None]), r"time column 'time'.*missing.*row 1\b"),
        (pd.array([1, None, 2], dtype="Int64"), r"time column 'time'.*missing.*row 1\b"),
        (pd.Categorical(["a", None]), r"time column 'time'.*missing.*row 1\b"),
        ([1, "2", 3], r"time column 'time'.*\bint, str\b"),
        ([date(2021, 1, 1), 2021], r"time column 'time'.*\bdate, int\b"),
        (["8", "9", "10"], r"time column 'time'.*'10' before '8'"),
    ],
    ids=str,
)
def test_times_that_do_not_sort(times, message):
    with pytest.raises(ValueError, match=message):
        one_client(times, n_splits=1)
    if "missing" in message and not isinstance(times, pd.Categorical):
        table = pl.from_pandas(pd.DataFrame({"time": times}))
        with pytest.raises(ValueError, match=message):
            splits_of(ClientTimeSeriesSplit(1, time_column="time"), table, [0] * len(table))


@pytest.mark.parametrize(
    ("splitter", "message"),
    [
        (ClientTimeSeriesSplit(0), r"n_splits.*\b1\b.*\b0\b"),
        (ClientTimeSeriesSplit(2.0), r"n_splits.*\b1\b.*2\.0"),
        (ClientTimeSeriesSplit(gap=-1), r"gap.*\b0\b.*-1"),
        (ClientTimeSeriesSplit(gap=0.5), r"gap.*\b0\b.*0\.5"),
        (ClientTimeSeriesSplit(4), r"n_splits=4\b.*gap=0\b.*\b4 steps.*\b5 are needed"),
        (ClientTimeSeriesSplit(1, gap=2), r"n_splits=1\b.*gap=2\b.*\b4 steps.*\b6 are needed"),
        (ClientTimeSeriesSplit(1, time_column="day"), r"time column 'day'.*\['a'\]"),
        (ClientTimeSeriesSplit(1, time_column=1), r"time column 1\b.*\['a'\]"),
    ],
    ids=repr,
)
def test_bad_parameters(splitter, message):
    with pytest.raises(ValueError, match=message):
        splits_of(splitter, pd.DataFrame({"a": np.zeros(6)}), [1, 1, 1, 1, 2, 2])


def test_groups_are_needed():
    with pytest.raises(ValueError, match=r"ClientTimeSeriesSplit.*'groups'.*client_column"):
        splits_of(ClientTimeSeriesSplit(), np.zeros((9, 1)))


def test_clients_of_one_row_alone():
    with pytest.raises(ValueError, match=r"\b1 steps"):
        splits_of(ClientTimeSeriesSplit(1), np.zeros((9, 1)), np.arange(9))


def test_in_tools_of_scikit_learn():
    rng = np.random.default_rng(0)
    groups = rng.permutation(np.repeat(np.arange(6), 9))
    X = np.column_stack([rng.permutation(54), groups]).astype(float)
    y = groups + rng.normal(size=54)
    folds = ClientTimeSeriesSplit(3, time_column=0)
    by_hand = [
        GaussianMean()
        .fit(X[train], y[train], groups=groups[train])
        .score(X[test], y[test], groups=groups[test])
        for train, test in folds.split(X, None, groups)
    ]
    with config_context(enable_metadata_routing=True):
        assert folds.get_metadata_routing().consumes("split", ["groups"]) == {"groups"}
        scorer = ClientScorer("r2")
        search = GridSearchCV(GaussianMean(), {"method": ["reml"]}, cv=folds, scoring=scorer)
        search.fit(X, y, groups=groups)
    np.testing.assert_allclose(search.cv_results_["mean_test_score"], np.mean(by_hand))
    by_column = clone(folds, safe=False)
    by_column.client_column = 1
    scores = cross_val_score(ClientColumn(GaussianMean(), 1), X, y, cv=by_column)
    np.testing.assert_allclose(scores, by_hand)
    assert repr(folds).startswith("ClientTimeSeriesSplit(") and "time_column=0" in repr(folds)


def test_levels_of_an_enum_are_in_their_order():
    levels = ["low", "mid", "high"]
    table = pl.DataFrame({"time": pl.Series(levels, dtype=pl.Enum(levels))})
    for X in (table, table.to_pandas()):
        splits = ClientTimeSeriesSplit(1, time_column="time").split(X, groups=[0, 0, 0])
        ((train, test),) = splits
        assert (train.tolist(), test.tolist()) == ([0, 1], [2])
