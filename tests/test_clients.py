"""Client ids of every kind, against numpy's ``unique`` and plain loops."""

import datetime as dt
import decimal
import tracemalloc
import uuid
import warnings

import numpy as np
import pandas as pd
import polars as pl
import pytest
import scipy.sparse as sp
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from pfl_sklearn import _clients
from pfl_sklearn._clients import (
    client_batches,
    encode_clients,
    match_clients,
    row_counts,
    rows_by_client,
    same_ids,
    segment_sums,
    split_client_column,
)

quick = settings(max_examples=60, deadline=None)
CODES = np.array([2, 0, 2, 1, 0, 2])


def take(values):
    """Values of the rows of CODES, as a list."""
    return [values[code] for code in CODES]


def one_column(values):
    """The values as NumPy's matrix, of which it warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        return np.asmatrix(values).T


def day(k, **zone):
    return pd.Timestamp(2020, 1, 1 + k, **zone)


NUMBERS = [5, 7, 1000]
NAMES = ["Ab", "b", "\u00e9t\u00e9"]
DAYS = [dt.date(2020, 1, 1 + k) for k in range(3)]
TIMES = [dt.datetime(2020, 1, 1 + k, 12) for k in range(3)]
ZONED = [day(k, tz="Europe/Rome") for k in range(3)]
# A container of the rows of CODES, the sorted ids expected, and the kind of their dtype.
KINDS = {
    "list of int": (take(NUMBERS), NUMBERS, "i"),
    "tuple of int": (tuple(take(NUMBERS)), NUMBERS, "i"),
    "range": (range(6), range(6), "i"),
    "int64 dense": (np.array(take([5, 6, 7])), [5, 6, 7], "i"),
    "int64 sparse": (np.array(take([0, 10**9, 10**15])), [0, 10**9, 10**15], "i"),
    "int64 negative": (np.array(take([-9, -2, 3])), [-9, -2, 3], "i"),
    "int64 extremes": (np.array(take([-(2**63), 0, 2**63 - 1])), [-(2**63), 0, 2**63 - 1], "i"),
    "int8": (np.array(take([-128, 0, 127]), dtype=np.int8), [-128, 0, 127], "i"),
    "uint8": (np.array(take([0, 1, 255]), dtype=np.uint8), [0, 1, 255], "u"),
    "uint64 dense": (
        np.array(take([2**64 - 3, 2**64 - 2, 2**64 - 1]), dtype=np.uint64),
        [2**64 - 3, 2**64 - 2, 2**64 - 1],
        "u",
    ),
    "uint64 sparse": (np.array(take([0, 3, 2**64 - 1]), dtype=np.uint64), [0, 3, 2**64 - 1], "u"),
    "list of huge int": (take([1, 2**63, 2**64 - 1]), [1, 2**63, 2**64 - 1], "u"),
    "big-endian int": (np.array(take([1, 2, 2 * 10**9]), dtype=">i4"), [1, 2, 2 * 10**9], "i"),
    "whole floats": (np.array(take([-1.0, 0.0, 3.0])), [-1, 0, 3], "i"),
    "float16": (np.array(take([-1.0, 0.0, 3.0]), dtype=np.float16), [-1, 0, 3], "i"),
    "list of whole floats": (take([-1.0, 0.0, 3.0]), [-1, 0, 3], "i"),
    "pandas int": (pd.Series(take(NUMBERS), index=list("fedcba")), NUMBERS, "i"),
    "pandas Int64": (pd.Series(take(NUMBERS), dtype="Int64"), NUMBERS, "i"),
    "polars int": (pl.Series(take(NUMBERS)), NUMBERS, "i"),
    "column of int": (np.array(take(NUMBERS))[:, None], NUMBERS, "i"),
    "matrix of one column": (one_column(take(NUMBERS)), NUMBERS, "i"),
    "data frame of one column": (pd.DataFrame({"id": take(NUMBERS)}), NUMBERS, "i"),
    "every other row": (np.repeat(take(NUMBERS), 2)[::2], NUMBERS, "i"),
    "nothing masked": (np.ma.masked_array(take(NUMBERS), mask=False), NUMBERS, "i"),
    "list of str": (take(NAMES), NAMES, "O"),
    "numpy str": (np.array(take(NAMES)), NAMES, "U"),
    "numpy object": (np.array(take(NAMES), dtype=object), NAMES, "O"),
    "numpy StringDType": (np.array(take(NAMES), dtype=np.dtypes.StringDType()), NAMES, "O"),
    "numpy bytes": (np.array(take([b"a", b"b", b"bb"])), [b"a", b"b", b"bb"], "S"),
    "pandas str": (pd.Series(take(NAMES)), NAMES, "O"),
    "pandas string": (pd.Series(take(NAMES), dtype="string"), NAMES, "O"),
    "pandas object": (pd.Series(take(NAMES), dtype=object), NAMES, "O"),
    "pandas index": (pd.Index(take(NAMES)), NAMES, "O"),
    "polars str": (pl.Series(take(NAMES)), NAMES, "O"),
    "polars categorical": (pl.Series(take(NAMES), dtype=pl.Categorical), NAMES, "O"),
    "polars enum": (pl.Series(take(NAMES), dtype=pl.Enum([*NAMES[::-1], "unused"])), NAMES, "O"),
    "categorical": (pd.Categorical(take(NAMES)), NAMES, "O"),
    "ordered categorical, unused": (
        pd.Categorical(take(NAMES), categories=["z", *NAMES[::-1], "a"], ordered=True),
        NAMES,
        "O",
    ),
    "categorical series": (pd.Series(take(NUMBERS), dtype="category"), NUMBERS, "i"),
    "categorical index": (pd.CategoricalIndex(take(NAMES)), NAMES, "O"),
    "categorical of fractions": (pd.Categorical(take([-0.5, 0.25, 2.0])), [-0.5, 0.25, 2.0], "f"),
    "categorical, infinity unused": (
        pd.Categorical(take([0.25, 0.5, 2.0]), categories=[2.0, 0.5, 0.25, np.inf]),
        [0.25, 0.5, 2.0],
        "f",
    ),
    "categorical, mixed unused": (pd.Categorical(take(NAMES), categories=[*NAMES, 1]), NAMES, "O"),
    "categorical of zoned times": (
        pd.Categorical(take(ZONED)),
        [day(k) - pd.Timedelta(hours=1) for k in range(3)],
        "M",
    ),
    "numpy datetime64": (np.array(take(DAYS), dtype="datetime64[D]"), DAYS, "M"),
    "list of dates": (take(DAYS), DAYS, "M"),
    "list of far dates": (
        take([dt.date(1, 1, 1), dt.date(2020, 1, 1), dt.date(9999, 1, 1)]),
        [dt.date(1, 1, 1), dt.date(2020, 1, 1), dt.date(9999, 1, 1)],
        "M",
    ),
    "list of datetimes": (take(TIMES), TIMES, "M"),
    "list of far datetimes": (
        take([TIMES[0], TIMES[1], TIMES[2].replace(year=2920)]),
        [TIMES[0], TIMES[1], TIMES[2].replace(year=2920)],
        "M",
    ),
    "list of timestamps": (take([day(0), day(1), day(2)]), [day(0), day(1), day(2)], "M"),
    "timestamps a nanosecond apart": (
        take([day(0), day(0) + pd.Timedelta(1, "ns"), day(1)]),
        [day(0), day(0) + pd.Timedelta(1, "ns"), day(1)],
        "M",
    ),
    "list of zoned times": (take(ZONED), [day(k) - pd.Timedelta(hours=1) for k in range(3)], "M"),
    "several zones": (
        take([day(0, tz="Asia/Tokyo"), day(0, tz="UTC"), day(0, tz="America/New_York")]),
        [day(0) - pd.Timedelta(hours=9), day(0), day(0) + pd.Timedelta(hours=5)],
        "M",
    ),
    "pandas zoned times": (
        pd.Series(take(ZONED)),
        [day(k) - pd.Timedelta(hours=1) for k in range(3)],
        "M",
    ),
    "polars dates": (pl.Series(take(DAYS)), DAYS, "M"),
    "polars datetimes": (pl.Series(take(TIMES)), TIMES, "M"),
    "timedeltas": (
        take([dt.timedelta(days=k) for k in (1, 2, 200_000)]),
        [np.timedelta64(k, "D") for k in (1, 2, 200_000)],
        "m",
    ),
    "decimals": (
        take([decimal.Decimal(k) / 4 for k in range(3)]),
        [decimal.Decimal(k) / 4 for k in range(3)],
        "O",
    ),
}


@pytest.mark.parametrize("case", KINDS)
def test_kinds_of_ids(case):
    groups, ids, kind = KINDS[case]
    expected = CODES if case != "range" else np.arange(6)
    encoded = encode_clients(groups, 6)
    np.testing.assert_array_equal(encoded.codes, expected)
    assert encoded.codes.dtype == np.intp
    assert encoded.ids.dtype.kind == kind
    assert encoded.ids.dtype.isnative
    assert [encoded.ids[k] == value for k, value in enumerate(ids)] == [True] * len(encoded.ids)


@pytest.mark.parametrize("case", KINDS)
def test_every_kind_matches_itself_and_only_itself(case):
    groups, _, kind = KINDS[case]
    encoded = encode_clients(groups, 6)
    np.testing.assert_array_equal(match_clients(groups, 6, encoded.ids), encoded.codes)
    without_first = np.where(encoded.codes == 0, -1, encoded.codes - 1)
    np.testing.assert_array_equal(match_clients(groups, 6, encoded.ids[1:]), without_first)
    other = np.array([1, 2]) if kind not in "iuf" else np.array(["a", "b"])
    with pytest.raises(ValueError, match=r"groups.* ids .* ids "):
        match_clients(groups, 6, other)


@pytest.mark.parametrize("frame", [pd.DataFrame, pl.DataFrame])
def test_strings_that_differ_by_a_last_nul(frame):
    """Strings of a fixed width end before it, and have room for the longest one."""
    groups = ["a", "a\0", "b" * 1000]
    X = frame({"x": [0.0, 1.0, 2.0], "g": groups})
    assert encode_clients(X["g"], 3).ids.tolist() == groups
    assert split_client_column(X, "g")[1].tolist() == groups


@pytest.mark.parametrize("container", [list, np.array, pd.Series, pd.array, pl.Series])
def test_booleans(container):
    ids, codes = encode_clients(container([True, False, True]), 3)
    assert ids.dtype == bool
    assert ids.tolist() == [False, True]
    assert codes.tolist() == [1, 0, 1]


@quick
@given(
    st.one_of(
        hnp.arrays(dtype, st.integers(1, 40), elements=hnp.from_dtype(np.dtype(dtype)))
        for dtype in ("int64", "int8", "uint16", "uint64", "bool", "U3", "S2", "datetime64[s]")
    )
)
def test_arrays_as_unique_has_them(groups):
    if groups.dtype.kind == "M":
        groups = np.where(np.isnat(groups), np.datetime64(0, "s"), groups)
    ids, codes = encode_clients(groups, len(groups))
    expected_ids, expected_codes = np.unique(groups, return_inverse=True)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_array_equal(codes, expected_codes)
    assert ids.dtype == groups.dtype


@quick
@given(st.lists(st.text(max_size=4), min_size=1, max_size=30), st.randoms())
def test_strings_and_shuffles(groups, random):
    ids, codes = encode_clients(groups, len(groups))
    assert ids.tolist() == sorted(set(groups))
    assert ids[codes].tolist() == groups
    shuffled = groups.copy()
    random.shuffle(shuffled)
    again = encode_clients(shuffled, len(groups))
    assert again.ids.tolist() == ids.tolist()
    assert again.ids[again.codes].tolist() == shuffled


@quick
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=30), st.integers(-(2**62), 2**62))
def test_dense_and_hashed_integers_agree(offsets, base):
    dense = np.array(offsets) + base
    sparse = np.array(offsets) * 2**59
    np.testing.assert_array_equal(encode_clients(dense, len(dense)).codes, _unique_codes(offsets))
    np.testing.assert_array_equal(encode_clients(sparse, len(dense)).codes, _unique_codes(offsets))


def _unique_codes(values):
    return np.unique(values, return_inverse=True)[1]


@quick
@given(st.lists(st.sampled_from([-0.5, 0.1, 2.0, 1e300]), min_size=1, max_size=20), st.randoms())
def test_categoricals_do_not_depend_on_their_categories(values, random):
    categories = [-0.5, 0.1, 2.0, 1e300, 7.0]
    random.shuffle(categories)
    ids, codes = encode_clients(pd.Categorical(values, categories=categories), len(values))
    assert ids.tolist() == sorted(set(values))
    assert ids[codes].tolist() == values


def test_no_rows():
    assert encode_clients(np.empty(0, dtype=int), 0).ids.shape == (0,)
    for nothing in ([], np.empty(0), np.empty(0, dtype=object)):
        assert match_clients(nothing, 0, np.array(["a", "b"])).shape == (0,)


MISSING = r"who.*None.*NaN.*row 1\b"
NOT_FINITE = r"who.*NaN.*infinity.*row 1\b"
BAD = {
    "wrong length": ([1, 2], r"who.*\b2 ids.*\b3 rows"),
    "wrong length of a categorical": (pd.Categorical([1, 2]), r"who.*\b2 ids.*\b3 rows"),
    "None": ([1, None, 2], MISSING),
    "None among strings": (["a", None, "b"], MISSING),
    "NaN": (np.array([1, np.nan, 2]), NOT_FINITE),
    "NaN in a list": ([1.0, np.nan, 2.0], MISSING),
    "NaN among strings": (["a", np.nan, "b"], MISSING),
    "infinity": (np.array([1, np.inf, 2]), NOT_FINITE),
    "NaT": (np.array([0, "NaT", 1], dtype="datetime64[D]"), MISSING),
    "NaT among timestamps": ([day(0), pd.NaT, day(1)], MISSING),
    "NaT of timedeltas": (np.array([0, "NaT", 1], dtype="timedelta64[D]"), MISSING),
    "pd.NA": ([1, pd.NA, 2], MISSING),
    "pandas Int64": (pd.array([1, None, 2]), NOT_FINITE),
    "pandas string": (pd.array(["a", None, "b"]), MISSING),
    "pandas boolean": (pd.array([True, None, False]), MISSING),
    "pandas str": (pd.Series(["a", None, "b"]), MISSING),
    "categorical": (pd.Categorical(["a", None, "b"]), MISSING),
    "categorical of infinity": (pd.Categorical([1.5, np.inf, 2]), r"who.*infinit.*row 1\b"),
    "polars int": (pl.Series([1, None, 2]), NOT_FINITE),
    "polars str": (pl.Series(["a", None, "b"]), MISSING),
    "polars categorical": (pl.Series(["a", None, "b"], dtype=pl.Categorical), MISSING),
    "masked": (np.ma.masked_array([1, 2, 3], mask=[0, 1, 0]), MISSING),
    "int and str": ([1, "a", 2], r"who.*\(int, str\)"),
    "bool and int": ([True, 2, 3], r"who.*\(bool, int\)"),
    "int and float": ([1, 2.0, 3], r"who.*\(float, int\)"),
    "date and datetime": ([DAYS[0], DAYS[1], TIMES[2]], r"who.*\(date, datetime\)"),
    "mixed categorical": (pd.Categorical([1, "a", 2]), r"who.*\(\w+, \w+\)"),
    "some with a zone": ([day(0), day(1), ZONED[2]], r"who.*Timestamp.*time zone"),
    "tuples": ([(1,), (1, 2), (3,)], r"who.*tuple.*integers"),
    "uuids": ([uuid.UUID(int=k) for k in range(3)], r"who.*UUID"),
    "intervals": (pd.cut(pd.Series([1.0, 2, 3]), 2), r"who.*Interval"),
    "fraction": (np.array([1, 2.5, 3]), r"who.*float.*\b2\.5\b"),
    "float above 2**53": (
        np.array([1, 2.0**54, 3]),
        r"who.*float.*1\.8014398509481984e\+16; floats beyond 2\*\*53",
    ),
    "huge integers": ([1, 2**70, 3], r"who.*integers.*64-bit"),
    "negative and huge": ([-1, 2**63, 3], r"who.*integers.*64-bit"),
    "complex": (np.array([1j, 2, 3]), r"who.*complex128"),
    "two columns": (np.zeros((3, 2), dtype=int), r"who.*\(3, 2\)"),
    "frame of two columns": (pd.DataFrame(np.eye(3, 2)), r"who.*\(3, 2\)"),
    "row": (np.zeros((1, 3), dtype=int), r"who.*\(1, 3\)"),
    "scalar": (3, r"who.*\(\)"),
    "string": ("abc", r"who.* string 'abc'\.$"),
    "set": ({1, 2, 3}, r"who.*\(\)"),
    "sparse": (sp.csr_array([[1], [2], [3]]), r"who.*\(\)"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_ids_are_named(case):
    groups, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        encode_clients(groups, 3, name="who")


@pytest.mark.parametrize(
    ("groups", "known", "expected"),
    [
        ([1, 9], np.array([1, 2], dtype=np.int8), [0, -1]),
        ([300, 2], np.array([1, 2], dtype=np.int8), [-1, 1]),
        ([1.0, 2.0], np.array([1, 2]), [0, 1]),
        (pd.Categorical([1.0, 2.5]), np.array([1, 2]), [0, -1]),
        ([1, 2], np.array([1.0, 2.5]), [0, -1]),
        (np.array([2**63 + 1, 5], dtype=np.uint64), np.array([2**63, 2**63 + 1]), [1, -1]),
        (np.array([2**53 + 1, 2**53], dtype=np.uint64), np.array([2**53, 2**53 + 1]), [1, 0]),
        (np.array([2**64 - 1], dtype=np.uint64), np.array([-1, 4]), [-1]),
        (np.array(["a", "long"]), np.array(["a", "lo"], dtype=object), [0, -1]),
        (pl.Series(["lo", "x"]), np.array(["a", "lo"]), [1, -1]),
        ([dt.date(2020, 1, 2)], np.array(["2020-01-01", "2020-01-02"], "datetime64[us]"), [1]),
        ([dt.datetime(2020, 1, 2)], np.array(["2020-01-01", "2020-01-02"], "datetime64[D]"), [1]),
        ([day(1, tz="UTC")], np.array(["2020-01-01", "2020-01-02"], "datetime64[ns]"), [1]),
    ],
)
def test_match_across_containers_of_one_kind(groups, known, expected):
    assert match_clients(groups, len(groups), known).tolist() == expected


@quick
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=20),
    st.lists(st.integers(0, 20), min_size=1, max_size=20),
)
def test_match_is_a_dictionary_look_up(groups, seen):
    known = np.unique(seen)
    position = {client: k for k, client in enumerate(known.tolist())}
    expected = [position.get(client, -1) for client in groups]
    assert match_clients(groups, len(groups), known).tolist() == expected
    names = np.array([f"c{client:02d}" for client in known])
    assert match_clients([f"c{k:02d}" for k in groups], len(groups), names).tolist() == expected


def test_match_names_both_kinds():
    with pytest.raises(ValueError, match=r"who.*string.*'1'.*number.*\b1\b"):
        match_clients(["1", "2"], 2, np.array([1, 2]), name="who")
    for groups, known in (([True], [0, 1]), ([b"a"], ["a", "b"]), ([day(0)], [0, 1])):
        with pytest.raises(ValueError, match=r"groups.* ids .* ids "):
            match_clients(groups, 1, np.array(known))


@quick
@given(st.data())
def test_segment_sums_are_the_loop(data):
    n_clients = data.draw(st.integers(1, 6))
    codes = np.array(data.draw(st.lists(st.integers(0, n_clients - 1), max_size=25)), dtype=np.intp)
    shape = data.draw(st.sampled_from([(len(codes),), (len(codes), 1), (len(codes), 3)]))
    values = data.draw(hnp.arrays(float, shape, elements=st.floats(-9, 9, allow_subnormal=False)))
    expected = np.zeros((n_clients, *shape[1:]))
    for code, value in zip(codes, values, strict=True):
        expected[code] += value
    np.testing.assert_allclose(segment_sums(values, codes, n_clients), expected, atol=1e-12)
    assert row_counts(codes, n_clients).tolist() == [sum(codes == k) for k in range(n_clients)]


def test_segment_sums_of_several_blocks(monkeypatch):
    rng = np.random.default_rng(0)
    codes, values = rng.integers(0, 5, 50), rng.normal(size=(50, 2))
    whole = segment_sums(values, codes, 5)
    monkeypatch.setattr(_clients, "_ROWS_AT_ONCE", 7)
    np.testing.assert_allclose(segment_sums(values, codes, 5), whole, rtol=1e-13)
    assert segment_sums(np.ones(50, dtype=bool), codes, 5).tolist() == row_counts(codes, 5).tolist()


@quick
@given(st.lists(st.integers(0, 7), max_size=40))
def test_rows_by_client_are_stable_and_complete(values):
    codes = np.array(values, dtype=np.intp)
    order, offsets = rows_by_client(codes, 8)
    np.testing.assert_array_equal(order, np.argsort(codes, kind="stable"))
    np.testing.assert_array_equal(np.diff(offsets), row_counts(codes, 8))
    for k in range(8):
        assert (codes[order[offsets[k] : offsets[k + 1]]] == k).all()


X = np.array([[1.5, 7.0, 0.0], [2.5, 8.0, 0.25], [3.5, 9.0, 0.0]])
FRAME = pd.DataFrame({"a": [1.5, 2.5, 3.5], "id": ["x", "y", "x"], "b": [7.0, 8.0, 9.0]})


@pytest.mark.parametrize("column", [2, -1, np.int64(2)])
@pytest.mark.parametrize("table", [np.asarray, sp.csr_array, sp.csc_matrix, sp.coo_array])
def test_split_of_arrays(table, column):
    rest, ids = split_client_column(table(X), column)
    dense = rest.toarray() if sp.issparse(rest) else rest
    np.testing.assert_array_equal(dense, X[:, :2])
    assert not sp.issparse(rest) or rest.format == table(X).format
    assert encode_clients(ids, 3).ids.tolist() == [0.0, 0.25]
    assert encode_clients(ids, 3).codes.tolist() == [0, 1, 0]


@pytest.mark.parametrize("column", ["id", 1, -2, np.int64(1)])
@pytest.mark.parametrize("table", [lambda frame: frame, pl.from_dict], ids=["pandas", "polars"])
def test_split_of_frames(table, column):
    frame = table(FRAME if table is not pl.from_dict else FRAME.to_dict("list"))
    rest, ids = split_client_column(frame, column)
    assert type(rest) is type(frame)
    assert list(rest.columns) == ["a", "b"]
    np.testing.assert_array_equal(rest["b"].to_numpy(), [7.0, 8.0, 9.0])
    assert encode_clients(ids, 3).codes.tolist() == [0, 1, 0]


def test_split_prefers_names_to_positions():
    frame = pd.DataFrame(X, columns=[2, 1, 0])
    np.testing.assert_array_equal(split_client_column(frame, 0)[0], X[:, :2])


@pytest.mark.parametrize(
    ("table", "column", "message"),
    [
        (FRAME, "nobody", r"'nobody'.*\['a', 'id', 'b'\]"),
        (FRAME, 3, r"\b3\b.*\['a', 'id', 'b'\]"),
        (X, "id", r"'id'.*no column names.*ndarray.*position.*pipeline"),
        (X, 3, r"\b3\b.*\b3 columns"),
        (X, -4, r"-4\b.*\b3 columns"),
        (X[0], 0, "Expected 2D array, got 1D array"),
        (np.array([[1, np.nan], [2, 3]]), 1, r"column 1\b.*NaN.*row 0\b"),
        (np.array([[1, 3], [2, np.inf]]), 1, r"column 1\b.*NaN.*row 1\b"),
        (FRAME.assign(id=[1, None, 2]), "id", r"column 'id'.*NaN.*row 1\b"),
    ],
)
def test_split_of_bad_tables(table, column, message):
    with pytest.raises(ValueError, match=message):
        split_client_column(table, column)


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ([1, 2, 1], np.array([1.0, 2.0, 1.0]), True),
        (["a", "b", "a"], pd.Categorical(["a", "b", "a"], categories=["b", "a"]), True),
        ([1, 2, 1], [1, 2, 2], False),
        ([1, 2, 1], [1, 3, 1], False),
        ([1, 2, 1], ["1", "2", "1"], False),
        ([1, 2, 1], DAYS, False),
        ([1, 1, 1], [1, 2, 1], False),
    ],
)
def test_same_ids(first, second, same):
    assert same_ids(first, second, 3) is same
    assert same_ids(second, first, 3) is same


@quick
@given(st.lists(st.integers(0, 7), max_size=60), st.integers(1, 25))
def test_batches_stack_clients_of_equal_size(values, max_rows):
    codes = np.array(values, dtype=np.intp)
    counts = row_counts(codes, 8)
    batches = client_batches(codes, 8, max_rows)
    clients = np.concatenate([batch.clients for batch in batches])
    assert sorted(clients.tolist()) == list(range(8))
    for batch in batches:
        size = batch.rows.shape[1]
        assert batch.rows.shape == (len(batch.clients), size)
        assert (counts[batch.clients] == size).all()
        assert len(batch.clients) == 1 or batch.rows.size <= max_rows or size == 0
        for client, rows in zip(batch.clients, batch.rows, strict=True):
            np.testing.assert_array_equal(rows, np.flatnonzero(codes == client))
    sizes = [batch.rows.shape[1] for batch in batches]
    assert sizes == sorted(sizes)


def test_batches_are_as_few_as_may_be():
    codes = np.repeat(np.arange(10), 4)
    assert [len(batch.clients) for batch in client_batches(codes, 10)] == [10]
    assert [len(batch.clients) for batch in client_batches(codes, 10, 13)] == [3, 3, 3, 1]
    assert [len(batch.clients) for batch in client_batches(codes, 10, 1)] == [1] * 10
    assert [batch.clients.tolist() for batch in client_batches(codes[::-1], 10)] == [[*range(10)]]


NAMES = [f"c{k:03d}" for k in range(0, 200, 2)]
DAYS = np.datetime64("2020-01-01", "D") + np.arange(0, 200, 2)
BIG = 2**63 - 50 + np.arange(0, 100, 1, dtype=np.uint64)


@pytest.mark.parametrize(
    ("known", "ids"),
    [
        (np.arange(0, 200, 2), np.array([-7, 4, 5, 198, 10**15])),
        (np.arange(0, 200, 2, dtype=np.int8), np.array([4, 260, -252])),
        (BIG, np.array([-(2**63) + 10, -1, 2**63 - 20])),
        (BIG, np.array([2**63 + 3, 2**63 + 80], dtype=np.uint64)),
        (np.arange(-50, 50), np.array([2**64 - 10, 10], dtype=np.uint64)),
        (np.arange(100) / 2, pd.Categorical([0.5, 0.25, 49.5])),
        (np.arange(100) / 2, np.array([3, 80])),
        (np.arange(100) + 2**53, pd.Categorical([2.0**53, 0.5])),
        (np.array(NAMES), np.array(["c004", "c00", "c004x", "d"])),
        (np.array(NAMES), ["c004", "c0041", "", "c004\0"]),
        (np.array(NAMES, dtype=object), np.array(["c004", "c005", "c0066"])),
        (np.array(NAMES, dtype=object), ["c198", "c199", "b"]),
        (np.array(NAMES).astype("S"), np.array([b"c004", b"c0041"])),
        (np.array(NAMES).astype("S").astype(object), [b"c004", b"a", b"z"]),
        (np.array([decimal.Decimal(k) for k in range(100)]), [decimal.Decimal("4.0")]),
        (DAYS, DAYS[[3, 4]] + np.array([0, 1])),
        (DAYS, [dt.datetime(2020, 1, 7), dt.datetime(2020, 1, 7, 12), dt.datetime(2020, 1, 8)]),
        (DAYS.astype("datetime64[ns]"), [dt.date(2020, 1, 7), dt.date(2100, 1, 1)]),
        (np.arange(0, 200, 2).astype("timedelta64[s]"), [pd.Timedelta(4, "s")]),
        (np.array([True]), [True, False]),
    ],
)
def test_a_few_ids_are_found_as_many_are(known, ids, monkeypatch):
    few = match_clients(ids, len(ids), known)
    monkeypatch.setattr(_clients, "_HASHED_BEYOND", len(known) + 1)  # hash them all
    np.testing.assert_array_equal(few, match_clients(ids, len(ids), known))
    assert few.dtype == np.intp


@quick
@given(hnp.arrays(np.int64, 80, elements=st.integers(-30, 200)), st.integers(-30, 200))
def test_bisection_is_the_hash_table(values, wanted):
    known = np.unique(values)
    expected = np.flatnonzero(known == wanted)
    assert match_clients([wanted], 1, known)[0] == (expected[0] if len(expected) else -1)


def test_a_few_ids_copy_no_known_ones():
    names = np.sort(np.arange(10**5).astype("U6"))
    for known in (np.arange(10**5), names, names.astype(object)):
        wanted = known[7:8].tolist()
        tracemalloc.start()
        try:
            assert match_clients(wanted, 1, known)[0] == 7
            assert tracemalloc.get_traced_memory()[1] < 50_000
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("n_known", [10, 100])
@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16])
def test_an_id_that_a_narrow_type_cannot_hold_is_unseen(dtype, n_known):
    """As an 8-bit number 260 is 4, which is another client. So by hashing and by bisection."""
    known = np.arange(0, 100, 100 // n_known, dtype=dtype)
    wide = np.array([4 + 2**8, 4 + 2**16, -252, 4])
    expected = [-1, -1, -1, 4 * n_known // 100 if n_known == 100 else -1]
    for ids in (wide, np.repeat(wide, 50)):
        found = match_clients(ids, len(ids), known)
        np.testing.assert_array_equal(found, np.repeat(expected, len(ids) // 4))
