"""Cross-validation inside clients."""

from collections.abc import Iterator, Mapping
from numbers import Integral
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import narwhals as nw
import numpy as np
import pandas as pd
from sklearn.utils import check_consistent_length, check_random_state, column_or_1d

from pfl_sklearn._clients import (
    encode_clients,
    encode_levels,
    ids_of_rows,
    row_counts,
    rows_by_client,
    split_columns,
)
from pfl_sklearn._columns import column_labels
from pfl_sklearn._compat import BaseCrossValidator, Interval, num_samples
from pfl_sklearn._parameters import (
    AT_LEAST_ONE,
    BELOW_ONE,
    BETWEEN_0_AND_1,
    parameter,
    with_parameters,
)
from pfl_sklearn._typing import Integers, RandomState, TableLike
from pfl_sklearn.model_selection._stratify import stratified_folds, stratified_test_rows

Splits: TypeAlias = Iterator[tuple[Integers, Integers]]


@with_parameters
class _ClientSplitter(BaseCrossValidator):
    """Base of the splitters: a subclass yields training and test rows as masks by ``_masks``."""

    __metadata_request__split = {"groups": True}

    n_splits: int = parameter(kw_only=False)
    if TYPE_CHECKING:  # each subclass declares it, because that fixes its position
        client_column: str | int | None

    _parameter_constraints: ClassVar[dict[str, list[Interval]]]

    def get_n_splits(
        self, X: TableLike = None, y: TableLike = None, groups: TableLike = None
    ) -> int:
        """Number of splits.

        Parameters
        ----------
        X, y, groups : object, default=None
            Ignored; scikit-learn passes them to every splitter.
        """
        return self.n_splits

    def split(self, X: TableLike, y: TableLike = None, groups: TableLike = None) -> Splits:
        """Generate training and test positions.

        Parameters
        ----------
        X : array-like of n_rows rows
            Only its length and the columns named by the splitter's parameters are read.
        y : array-like of shape (n_rows,), default=None
            Classes, needed if `stratify` is True.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row.

        Yields
        ------
        train, test : ndarrays of int
        """
        for name, (interval,) in self._parameter_constraints.items():
            value = getattr(self, name)
            if not interval.is_satisfied_by(value):
                raise ValueError(f"{name} must be {interval}; got {value!r}.")
        for train, test in self._masks(X, y, *self._codes(X, groups)):
            yield np.flatnonzero(train), np.flatnonzero(test)

    def _codes(self, X, groups):
        """Code (n,) of every row's client and rows (m,) of every client."""
        groups = ids_of_rows(X, groups, self.client_column)
        if groups is None:
            raise ValueError(
                f"{type(self).__name__} splits inside clients and got no client ids: the 'groups' "
                "parameter should not be None, unless client_column is given. Pass groups (inside "
                "scikit-learn's tools after sklearn.set_config(enable_metadata_routing=True)), or "
                "keep the ids as a column of X: set client_column here and wrap the estimator in "
                "pfl_sklearn.compose.ClientColumn."
            )
        ids, codes = encode_clients(groups, num_samples(X))
        return codes, row_counts(codes, len(ids))


@with_parameters
class _RandomSplitter(_ClientSplitter):
    """Base of splitters that draw test rows, by random ranks of the rows within their client.

    A subclass yields masks (n,) of test rows by ``_tests``; all other rows are training rows.
    """

    stratify: bool = False
    client_column: str | int | None = None
    random_state: RandomState = None

    def _masks(self, X, y, codes, sizes):
        for test in self._tests(X, y, codes, sizes):
            yield ~test, test

    def _labels(self, codes, y):
        """Code (n,) of every row's class."""
        if y is None:
            raise ValueError("stratify=True needs y; got None.")
        check_consistent_length(codes, y)
        return np.unique(column_or_1d(y), return_inverse=True)[1]

    def _ranks(self, codes, sizes, rng):
        """Random rank (n,) of every row within its client."""
        shuffled = rng.permutation(len(codes))
        order, offsets = rows_by_client(codes[shuffled], len(sizes))
        ranks = np.empty(len(codes), dtype=np.intp)
        ranks[shuffled[order]] = np.arange(len(codes)) - np.repeat(offsets[:-1], sizes)
        return ranks

    def _generator(self):
        """Random generator of one call of ``split``."""
        # As in scikit-learn, an int gives the same splits at each call, a RandomState new ones.
        seeds = check_random_state(self.random_state).randint(2**31 - 1, size=4)
        return np.random.default_rng(seeds)


@with_parameters
class ClientKFold(_RandomSplitter):
    """K folds within every client.

    scikit-learn's group splitters hold out whole clients, but a personalized model needs rows of
    every client on both sides. The test sets are a partition of all rows. Their sizes differ by at
    most one row, in total and for each client. A client with fewer rows than folds is tested in as
    many folds as it has rows. A client with one row is tested with the population model; if most
    clients have one row, set ``unseen="population"`` on the estimator to avoid warnings. For
    forecasts see :class:`ClientTimeSeriesSplit`.

    Parameters
    ----------
    n_splits : int, default=5
        Number of folds, at least 2.
    stratify : bool, default=False
        Spread the classes of `y` evenly over the folds. The test sizes of two folds then differ by
        at most one: for each class, each class within a client, each client, and in total.
    client_column : str or int, default=None
        Column of ids of `X`, for use with :class:`~pfl_sklearn.compose.ClientColumn`. None: ids
        come as ``groups``.
    random_state : int, RandomState instance or None, default=None
        Seed of the shuffling.

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn.model_selection import ClientKFold
    >>> site = np.array(["a", "a", "b", "b"])
    >>> for train, test in ClientKFold(2, random_state=0).split(np.zeros((4, 1)), groups=site):
    ...     print(*sorted(site[train]), "|", *sorted(site[test]))
    a b | a b
    a b | a b
    """

    n_splits = parameter(default=5, ranges=[Interval(Integral, 2, None, closed="left")])

    def _tests(self, X, y, codes, sizes):
        if self.n_splits > len(codes):  # a fold would test nothing
            raise ValueError(f"n_splits={self.n_splits} is above the number of rows, {len(codes)}.")
        rng = self._generator()
        if self.stratify:
            fold = stratified_folds(codes, self._labels(codes, y), self.n_splits, rng)
        else:
            fold = self._folds(codes, sizes, rng)
        for k in range(self.n_splits):
            yield fold == k

    def _folds(self, codes, sizes, rng):
        """Fold (n,) of every row, whatever its class."""
        ranks = self._ranks(codes, sizes, rng)
        # Clients take turns in which fold they start, so that folds stay even with small clients.
        turn = rng.permutation(len(sizes))
        start = np.empty(len(sizes), dtype=np.intp)
        start[turn] = np.cumsum(sizes[turn]) - sizes[turn]
        # Consecutive ranks go to consecutive folds: sizes within a client differ by one at most.
        return (ranks + start[codes]) % self.n_splits


@with_parameters
class ClientShuffleSplit(_RandomSplitter):
    """Random test rows within every client, and optionally whole new clients or levels.

    Every client that is not held out keeps at least one training row. Its number of test rows is
    `test_size` times its rows, rounded up or down at random so that the total is rounded too.
    Held-out levels add their rows to these, and may leave a client without training rows.

    Parameters
    ----------
    n_splits : int, default=10
        Number of splits.
    test_size : float in (0, 1), default=0.2
        Share of each client's rows to test.
    new_clients : float in [0, 1), default=0.0
        Share of clients that are held out whole, so that one split tests known and new clients; at
        least one client if it is above 0. Set ``unseen="population"`` on the estimator to avoid
        warnings about new clients.
    new_levels : dict of floats in [0, 1) by column, default=None
        Share of the levels of a column of `X`, by its name or position, that are held out whole,
        such as ``{"movie": 0.2}``; at least one level if it is above 0, and at most all but one.
        All their rows are test rows, beside those that `test_size` and `new_clients` draw. A
        missing value is no level.
    stratify : bool, default=False
        Test the same share of every class of `y`, overall and within every client. The numbers of
        test rows are the expected ones rounded up or down: for each class, each class within a
        client, each client, and in total.
    client_column : str or int, default=None
        Column of ids of `X`, for use with :class:`~pfl_sklearn.compose.ClientColumn`. None: ids
        come as ``groups``.
    random_state : int, RandomState instance or None, default=None
        Seed of the draws.

    Raises
    ------
    ValueError
        From ``split``: if a split has no test row or no training row, or if clients or levels are
        to be held out and there is only one.

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn.model_selection import ClientShuffleSplit
    >>> site = np.repeat(["a", "b", "c"], 5)
    >>> splitter = ClientShuffleSplit(1, new_clients=0.3, random_state=0)
    >>> train, test = next(splitter.split(np.zeros((15, 1)), groups=site))
    >>> sorted(set(site[train].tolist())), len(test)
    (['b', 'c'], 7)
    """

    n_splits = parameter(default=10, ranges=[AT_LEAST_ONE])
    test_size: float = parameter(default=0.2, ranges=[BETWEEN_0_AND_1])
    new_clients: float = parameter(default=0.0, ranges=[BELOW_ONE])
    new_levels: Mapping[str | int, float] | None = None

    def _tests(self, X, y, codes, sizes):
        n_new = _n_held_out(self.new_clients, len(sizes), "new_clients", "clients")
        columns = [self._levels(X, *item) for item in self._shares().items()]
        rng = self._generator()
        # Of their own, so that held-out levels do not change the other test rows.
        (rng_of_levels,) = rng.spawn(1)
        for _ in range(self.n_splits):
            test = self._inside(codes, sizes, y, rng)
            if n_new:
                test |= _held_out(codes, len(sizes), n_new, rng)
            for levels, n_levels, n_new_levels in columns:
                test |= _held_out(levels, n_levels, n_new_levels, rng_of_levels)
            if not test.any():
                raise ValueError(
                    "no row can be tested; take larger clients, test_size, new_clients or "
                    "new_levels."
                )
            if test.all():
                raise ValueError(
                    f"a split has no training row with new_levels={self.new_levels!r}, "
                    f"new_clients={self.new_clients} and test_size={self.test_size}; take smaller "
                    "shares."
                )
            yield test

    def _shares(self):
        """Share of the levels to hold out, by column."""
        shares = {} if self.new_levels is None else self.new_levels
        if not isinstance(shares, Mapping):
            raise ValueError(f"new_levels must be a dict of shares by column; got {shares!r}.")
        for column, share in shares.items():
            if not BELOW_ONE.is_satisfied_by(share):
                raise ValueError(f"new_levels[{column!r}] must be {BELOW_ONE}; got {share!r}.")
        return shares

    def _levels(self, X, column, share):
        """Code (n,) of every row's level in a column, number of levels and of those to hold out."""
        _, (values,) = split_columns(X, {"new_levels": column})
        levels, codes = encode_levels(values, f"column {column!r}")
        name = f"new_levels[{column!r}]"
        return codes, len(levels), _n_held_out(share, len(levels), name, "levels")

    def _inside(self, codes, sizes, y, rng):
        """Test rows (n,) of every client."""
        # Each client keeps one row to fit, also after rounding up.
        expected = np.minimum(self.test_size * sizes, sizes - 1)
        if self.stratify:
            return stratified_test_rows(codes, self._labels(codes, y), expected, rng)
        n_test = np.minimum(_rounded(expected, rng), sizes - 1)
        ranks = self._ranks(codes, sizes, rng)
        # A random start, so that no rank is tested more often than others.
        position = ranks + rng.integers(0, sizes)[codes]
        passed = position * n_test[codes] // sizes[codes]
        return (position + 1) * n_test[codes] // sizes[codes] > passed


def _n_held_out(share, n, name, kind):
    """Number of `n` clients or levels that are held out whole."""
    if share == 0:
        return 0
    if n < 2:
        raise ValueError(f"{name} above 0 needs at least two {kind}; got {n}.")
    # At least one, as the share is above 0; and one must stay to be fitted.
    return int(np.clip(round(share * n), 1, n - 1))


def _held_out(codes, n, n_new, rng):
    """Rows (n_rows,) of `n_new` of `n` clients or levels, drawn at random; no row of code -1."""
    new = np.zeros(n + 1, dtype=bool)  # the last is what the code -1 picks
    new[rng.choice(n, n_new, replace=False)] = True
    return new[codes]


def _rounded(wanted, rng):
    """Numbers (m,) rounded up or down at random, so that their total is rounded as well."""
    # In random order; otherwise neighbours would be rounded in opposite directions.
    order = rng.permutation(len(wanted))
    total = np.floor(np.cumsum(wanted[order]) + rng.random())
    rounded = np.empty(len(wanted), dtype=np.intp)
    rounded[order] = np.diff(total, prepend=0)
    return rounded


@with_parameters
class ClientTimeSeriesSplit(_ClientSplitter):
    """Forward chaining within every client: train on its past, test what comes next.

    Random folds are optimistic for forecasts, because neighbouring rows leak the tested one. Here
    each client's time is cut into `n_splits` + 1 blocks of about equally many steps. Split k trains
    on the client's blocks before block k and tests that block.

    Parameters
    ----------
    n_splits : int, default=5
        Number of splits, at least 1.
    gap : int, default=0
        Steps of the client just before a tested block that are left out of training, at least 0.
        Choose the number between the last known row and the first forecast in practice.
    time_column : str or int, default=None
        Column of `X` with the time: numbers, dates, or strings that sort. Each distinct time of a
        client is one step, whose rows stay on the same side. None: rows are in order of time, and
        each row is a step.
    client_column : str or int, default=None
        Column of ids of `X`, for use with :class:`~pfl_sklearn.compose.ClientColumn`. None: ids
        come as ``groups``.

    Notes
    -----
    - Test sets are not a partition: a client's first block is never tested.
    - A client with fewer steps than blocks is tested in the last splits, one step in each; a client
      with a single step is never tested. Both have training rows in all splits.
    - If `gap` leaves a client no training row before a block, the block is not tested, and all of
      the client's earlier rows are in training.

    Time is each client's own, not the calendar's. If clients share shocks of a date, such as an
    epidemic, later training rows of other clients leak them. Then give splits by date, as a list
    that scikit-learn's tools and the stacks accept::

        [(np.flatnonzero(date < start), np.flatnonzero((date >= start) & (date < end)))
         for start, end in itertools.pairwise(starts)]

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn.model_selection import ClientTimeSeriesSplit
    >>> X = np.array([[2021], [2022], [2023], [2024], [2023], [2024]])
    >>> site = np.array(["a", "a", "a", "a", "b", "b"])
    >>> splitter = ClientTimeSeriesSplit(3, time_column=0)
    >>> for train, test in splitter.split(X, groups=site):
    ...     for rows in (train, test):
    ...         print(*(f"{site[k]}{X[k, 0]}" for k in rows), end=" | ")
    ...     print()
    a2021 b2023 | a2022 |
    a2021 a2022 b2023 | a2023 |
    a2021 a2022 a2023 b2023 | a2024 b2024 |
    """

    n_splits = parameter(default=5, ranges=[AT_LEAST_ONE])
    gap: int = parameter(default=0, ranges=[Interval(Integral, 0, None, closed="left")])
    time_column: str | int | None = None
    client_column: str | int | None = None

    def _masks(self, X, y, codes, sizes):
        column = self.time_column
        times = np.arange(len(codes)) if column is None else ranks_of_times(X, column)
        steps, n_steps = _steps_of_clients(times, codes, len(sizes))
        # Each block of some client is then longer than the gap, so that each split tests a row.
        most, needed = n_steps.max(), (self.n_splits + 1) * (self.gap + 1)
        if most < needed:
            raise ValueError(
                f"n_splits={self.n_splits} with gap={self.gap} can test no row in some split: no "
                f"client has more than {most} steps in time, but (n_splits + 1) * (gap + 1) = "
                f"{needed} are needed; take fewer splits or a smaller gap."
            )
        for k in range(1, self.n_splits + 1):
            start, stop = (self._first_steps(block, n_steps) for block in (k, k + 1))
            # Without a past there is nothing to forecast from.
            is_tested = (start < stop) & (start > self.gap)
            test = is_tested[codes] & (start[codes] <= steps) & (steps < stop[codes])
            yield steps < (start - self.gap * is_tested)[codes], test

    def _first_steps(self, block, n_steps):
        """First step (m,) of each client in a block after the first; past the last, its number."""
        n_blocks = self.n_splits + 1
        size, extra = np.divmod(n_steps, n_blocks)
        # One extra step goes to the first block, because a single step does not show a client's
        # noise. The others go to the last blocks, so that clients with few steps are tested when
        # other clients have most history.
        return block * size + np.minimum(extra, 1) + np.maximum(extra - 1 - (n_blocks - block), 0)


def _steps_of_clients(times, codes, n_clients):
    """Position (n,) of each row's time among its client's, and how many (m,) a client has."""
    n_times = times.max() + 1
    keys, steps = np.unique(codes * n_times + times, return_inverse=True)
    n_steps = np.bincount(keys // n_times, minlength=n_clients)
    return steps - (np.cumsum(n_steps) - n_steps)[codes], n_steps


def ranks_of_times(X, column):
    """Rank (n,) of each row's time among all times in the table."""
    _, (values,) = split_columns(X, {"time": column})
    missing = np.asarray(pd.isna(values))
    if missing.any():
        raise ValueError(
            f"time column {column!r} has a missing value in row {np.flatnonzero(missing)[0]}; "
            "every row needs a time."
        )
    if isinstance(values.dtype, pd.CategoricalDtype) and values.dtype.ordered:
        return np.asarray(values.cat.codes, dtype=np.intp)
    if hasattr(X, "columns") and not hasattr(X, "iloc"):
        name = column if isinstance(column, str) else column_labels(X)[column]
        kind = nw.from_native(X, eager_only=True).schema[name]
        if isinstance(
            kind, nw.Enum
        ):  # its levels are ordered, like those of an ordered categorical
            codes = pd.Categorical(values, categories=kind.categories).codes
            return np.asarray(codes, dtype=np.intp)
    try:
        times, ranks = np.unique(np.asarray(values), return_inverse=True)
    except TypeError as error:
        kinds = sorted({type(value).__name__ for value in values})
        raise ValueError(
            f"time column {column!r} mixes {', '.join(kinds)}, which have no common order; give "
            "all times the same type."
        ) from error
    _check_sorted_text(times, column)
    return ranks


def _check_sorted_text(times, column):
    """Raise ValueError if sorted times (k,) are numbers as strings, because "10" is before "9"."""
    if not isinstance(times[0], str):
        return
    numbers = pd.to_numeric(pd.Series(times), errors="coerce").to_numpy()
    falls = np.flatnonzero(numbers[:-1] >= numbers[1:])
    if len(falls) and not np.isnan(numbers).any():
        earlier, later = times[falls[0]], times[falls[0] + 1]
        raise ValueError(
            f"time column {column!r} has numbers as strings, which sort {str(earlier)!r} before "
            f"{str(later)!r}; give numbers."
        )
