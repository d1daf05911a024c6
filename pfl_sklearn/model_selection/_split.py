"""Cross-validation inside clients."""

from collections.abc import Iterator
from numbers import Integral
from typing import ClassVar, TypeAlias

import numpy as np
from sklearn.utils import check_consistent_length, check_random_state, column_or_1d

from pfl_sklearn._clients import encode_clients, ids_of_rows, row_counts, rows_by_client
from pfl_sklearn._compat import BaseCrossValidator, Interval, num_samples
from pfl_sklearn._parameters import (
    AT_LEAST_ONE,
    BELOW_ONE,
    BETWEEN_0_AND_1,
    parameter,
    with_parameters,
)
from pfl_sklearn._typing import Integers, RandomState, TableLike

Splits: TypeAlias = Iterator[tuple[Integers, Integers]]


@with_parameters
class _ClientSplitter(BaseCrossValidator):
    """Base of the splitters: random ranks of the rows within their client.

    A subclass yields masks (n,) of test rows by ``_tests``.
    """

    __metadata_request__split = {"groups": True}

    n_splits: int = parameter(kw_only=False)
    stratify: bool = False
    client_column: str | int | None = None
    random_state: RandomState = None

    _parameter_constraints: ClassVar[dict[str, list[Interval]]]

    def get_n_splits(
        self, X: TableLike = None, y: TableLike = None, groups: TableLike = None
    ) -> int:
        """Number of splits.

        Parameters
        ----------
        X, y, groups : object, default=None
            Ignored; scikit-learn passes them to every splitter.

        Returns
        -------
        int
        """
        return self.n_splits

    def split(self, X: TableLike, y: TableLike = None, groups: TableLike = None) -> Splits:
        """Generate training and test positions.

        Parameters
        ----------
        X : array-like of n_rows rows
            Only its length is read, and the column of ids if `client_column` is set.
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
        for test in self._tests(*self._codes(X, groups), y):
            yield np.flatnonzero(~test), np.flatnonzero(test)

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

    def _ranks(self, codes, sizes, y, rng):
        """Random rank (n,) of every row within its client; by class first if stratified."""
        shuffled = rng.permutation(len(codes))
        if self.stratify:
            if y is None:
                raise ValueError("stratify=True needs y; got None.")
            check_consistent_length(codes, y)
            _, labels = np.unique(column_or_1d(y), return_inverse=True)
            # Rows of a class follow one another, in random order, so that equal steps through the
            # ranks of a client take the same share of each.
            by_class, _ = rows_by_client(labels[shuffled], labels.max() + 1)
            shuffled = shuffled[by_class]
        order, offsets = rows_by_client(codes[shuffled], len(sizes))
        ranks = np.empty(len(codes), dtype=np.intp)
        ranks[shuffled[order]] = np.arange(len(codes)) - np.repeat(offsets[:-1], sizes)
        return ranks

    def _generator(self):
        """Random generator of one call of ``split``."""
        # As in scikit-learn, an int gives equal splits at each call and a RandomState others.
        seeds = check_random_state(self.random_state).randint(2**31 - 1, size=4)
        return np.random.default_rng(seeds)


@with_parameters
class ClientKFold(_ClientSplitter):
    """K folds within every client.

    scikit-learn's group splitters hold out whole clients, but a personalized model needs rows of
    every client on both sides. The test sets are a partition of all rows. A client with fewer rows
    than folds is tested in as many folds as it has rows. A client with one row is tested with the
    population model. If most clients have one row, set ``unseen="population"`` on the estimator, so
    that its predictions do not warn of them.

    Parameters
    ----------
    n_splits : int, default=5
        Number of folds, at least 2.
    stratify : bool, default=False
        Spread the classes of `y` evenly over the folds within every client.
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

    def _tests(self, codes, sizes, y):
        if self.n_splits > len(codes):  # a fold would test nothing
            raise ValueError(f"n_splits={self.n_splits} is above the number of rows, {len(codes)}.")
        rng = self._generator()
        ranks = self._ranks(codes, sizes, y, rng)
        # Clients take turns in which fold they start, so that folds stay even with small clients.
        turn = rng.permutation(len(sizes))
        start = np.empty(len(sizes), dtype=np.intp)
        start[turn] = np.cumsum(sizes[turn]) - sizes[turn]
        # Consecutive ranks go to consecutive folds: sizes within a client differ by one at most.
        fold = (ranks + start[codes]) % self.n_splits
        for k in range(self.n_splits):
            yield fold == k


@with_parameters
class ClientShuffleSplit(_ClientSplitter):
    """Random test rows within every client, and optionally whole new clients.

    Every client that is not held out keeps at least one training row. Its number of test rows is
    `test_size` times its rows, rounded up or down at random so that the total is rounded too.

    Parameters
    ----------
    n_splits : int, default=10
        Number of splits.
    test_size : float in (0, 1), default=0.2
        Share of each client's rows to test.
    new_clients : float in [0, 1), default=0.0
        Share of clients that are held out whole, so that one split tests known and new clients. If
        it is above 0, at least one client is held out. Set ``unseen="population"`` on the
        estimator: it says that new clients are meant, and predictions do not warn of them.
    stratify : bool, default=False
        Test the same share of every class of `y` within every client.
    client_column : str or int, default=None
        Column of ids of `X`, for use with :class:`~pfl_sklearn.compose.ClientColumn`. None: ids
        come as ``groups``.
    random_state : int, RandomState instance or None, default=None
        Seed of the draws.

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

    def _tests(self, codes, sizes, y):
        n_new = self._n_new(sizes)
        rng = self._generator()
        for _ in range(self.n_splits):
            test = self._inside(codes, sizes, y, rng)
            if n_new:
                new = np.zeros(len(sizes), dtype=bool)
                new[rng.choice(len(sizes), n_new, replace=False)] = True
                test |= new[codes]
            if not test.any():
                raise ValueError(
                    "no row can be tested; take larger clients, test_size or new_clients."
                )
            yield test

    def _n_new(self, sizes):
        """Number of clients that are held out whole."""
        if self.new_clients == 0:
            return 0
        if len(sizes) < 2:
            raise ValueError("new_clients above 0 needs at least two clients; got 1.")
        # At least one, as the share is above 0; and one client must stay to be fitted.
        return int(np.clip(round(self.new_clients * len(sizes)), 1, len(sizes) - 1))

    def _inside(self, codes, sizes, y, rng):
        """Test rows (n,) of every client: evenly spaced ranks from a random start."""
        # One row of each client stays to fit, also after rounding up.
        expected = np.minimum(self.test_size * sizes, sizes - 1)
        n_test = np.minimum(_rounded(expected, rng), sizes - 1)
        ranks = self._ranks(codes, sizes, y, rng)
        # A random start, so that no rank is tested more often than others.
        position = ranks + rng.integers(0, sizes)[codes]
        passed = position * n_test[codes] // sizes[codes]
        return (position + 1) * n_test[codes] // sizes[codes] > passed


def _rounded(wanted, rng):
    """Numbers (m,) rounded up or down at random, so that their total is rounded too."""
    # In random order, or neighbours in the list would be rounded against each other.
    order = rng.permutation(len(wanted))
    total = np.floor(np.cumsum(wanted[order]) + rng.random())
    rounded = np.empty(len(wanted), dtype=np.intp)
    rounded[order] = np.diff(total, prepend=0)
    return rounded
