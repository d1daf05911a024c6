"""Statistics of clients' rows, from which means and linear regressions are fitted."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import narwhals as nw
import numpy as np
import pandas as pd

from pfl_sklearn._clients import encode_clients, format_id
from pfl_sklearn._typing import Floats, Integers, TableLike
from pfl_sklearn.statistics._cholesky import blocks_of_clients, unpack
from pfl_sklearn.statistics._chunks import sum_chunks
from pfl_sklearn.statistics._clipping import (
    check_release_bounds,
    clipping_of,
    limits_of,
)
from pfl_sklearn.statistics._fields import add_fields, positions_of_others, select_clients
from pfl_sklearn.statistics._frames import (
    check_columns,
    check_distinct_columns,
    column_names,
    is_lazy,
    name_engine,
    read_columns_argument,
    to_arrays,
    value_names,
)
from pfl_sklearn.statistics._moments import (
    check_moments,
    fields_of_moments,
    read_constants,
    read_moments,
)
from pfl_sklearn.statistics._parquet import read_parquet, write_parquet
from pfl_sklearn.statistics._queries import query_fields
from pfl_sklearn.statistics._rows import (
    NOTHING,
    check_missing,
    check_range,
    fields_of_values,
    read_columns,
)

_WEIGHT_ROUNDING = 1e-9  # of a summed weight


def _new_part_id():
    """The id of a part that no other has."""
    return (uuid.uuid4().hex,)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ClientStatistics:
    r"""Statistics of clients' rows for means and linear regressions: one triangular factor each.

    Under a Gaussian linear model the rows :math:`(1, x, y)` of a client, times the roots of their
    weights, enter through their second moments alone. Those are kept as the upper triangle R with
    :math:`R^\top R` equal to the moments, which has twice their digits. Statistics of parts of a
    table (chunks, days, hospitals) add up to those of the whole: ``a + b``.

    Take one of the constructors :meth:`from_rows`, :meth:`from_frame`, :meth:`from_chunks` or
    :meth:`from_moments` (not the parameters below, which become attributes), and hand the result to
    ``fit_statistics`` of an estimator. Statistics are clients' data: nothing protects them. See the
    :ref:`user guide <large_data>`.

    Parameters
    ----------
    clients : ndarray of shape (n_clients,)
        Sorted ids.
    n_samples_per_client : ndarray of shape (n_clients,)
        Rows of positive weight.
    n_features : int
        Number of features.
    n_targets : int
        Number of targets.
    feature_names : tuple of str, or None
        None if the features came without names.
    target_names : tuple of str, or None
        None if the targets came without names.
    n_left_out : int
        Rows with missing values, which are not counted.
    packed : ndarray of shape (n_clients, K)
        Upper triangles of the columns 1, features and targets, row by row.
    log_weights : ndarray of shape (n_clients,)
        Sums of the logarithms of the rows' weights.
    lowest : ndarray of shape (n_clients, `n_features` + `n_targets`)
        Smallest values of features and targets.
    highest : ndarray of shape (n_clients, `n_features` + `n_targets`)
        Largest values; equal to the smallest where a column is constant within a client.
    feature_bound, target_bound : float, or None
        Bounds of a private fit; None without bounds. A `target_bound` alone, without features, is
        for :class:`~pfl_sklearn.estimation.GaussianMean`.
    clipped : ndarray of shape (n_clients, K), or None
        As `packed`, of rows that were scaled to the bounds. A private regression with known
        variances releases a sum of these, and `packed` is for the client's own posterior. Where
        variances are estimated, rounds compute messages from `packed` and scale them as a whole.
    parts : tuple of str
        Ids of what was added up. Each call of a constructor gives a new one, which files keep.

    Notes
    -----
    With p = `n_features` + `n_targets` + 1 columns a client takes ``4 p (p + 1) + 16 p`` bytes,
    and its id; with bounds another ``4 p (p + 1)``.

    Parts that are added must share no rows; a shared row counts twice, also in a private fit.
    Adding statistics with a common part and a common client is an error, but statistics that are
    computed anew from the same rows are a new part.

    Residuals, the influence of rows, models of classes and choices by folds need the rows
    themselves; each fold may have statistics of its own.

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn.linear_model import PersonalizedLinearRegression
    >>> from pfl_sklearn.statistics import ClientStatistics
    >>> rng = np.random.default_rng(0)
    >>> X, shop = rng.normal(size=(60, 1)), np.repeat(["a", "b", "c"], 20)
    >>> y = X[:, 0] + rng.normal(size=60)
    >>> monday = ClientStatistics.from_rows(X[::2], y[::2], groups=shop[::2])
    >>> tuesday = ClientStatistics.from_rows(X[1::2], y[1::2], groups=shop[1::2])
    >>> model = PersonalizedLinearRegression().fit_statistics(monday + tuesday)
    >>> rows = PersonalizedLinearRegression().fit(X, y, groups=shop)
    >>> np.allclose(model.coef_, rows.coef_)
    True
    """

    clients: Any
    n_samples_per_client: Integers
    n_features: int
    n_targets: int
    feature_names: tuple[str, ...] | None
    target_names: tuple[str, ...] | None
    n_left_out: int
    packed: Floats  # (m, K), packed, of the ones, the features and the targets
    log_weights: Floats  # (m,), sums of the logarithms of the weights
    lowest: Floats  # (m, p), smallest values of features and targets
    highest: Floats  # (m, p)
    feature_bound: float | None = None
    target_bound: float | None = None
    clipped: Floats | None = None  # (m, K), packed, of rows scaled to the bounds
    parts: tuple[str, ...] = dataclasses.field(default_factory=_new_part_id)

    def _header(self) -> Any:
        """Table without rows that has the features as its columns: of names, if there are any."""
        if self.feature_names is None:
            return np.empty((0, self.n_features))
        return pd.DataFrame(columns=list(self.feature_names), dtype=np.float64)

    def _blocks(self) -> list[slice]:
        """Slices of clients whose triangles fit the processor's cache."""
        return blocks_of_clients(len(self.clients), self.lowest.shape[1] + 1)

    def _triangles(self, block: slice, clipped: bool = False) -> Floats:
        """Triangles (b, p, p) of the columns 1, features and targets of some clients.

        Of the rows scaled to the bounds if they are `clipped`.
        """
        packed: Any = self.clipped if clipped else self.packed
        return unpack(packed[block], self.lowest.shape[1] + 1)

    def of_clients(self, clients: Any) -> ClientStatistics:
        """Statistics of some clients alone.

        Parameters
        ----------
        clients : slice or array-like of positions or flags
            Which clients.

        Returns
        -------
        ClientStatistics
            In the order of `clients`, which is sorted.

        Raises
        ------
        ValueError
            For a client that is named twice.
        """
        return dataclasses.replace(self, **select_clients(self, clients))

    def without(self, clients: TableLike, *, unknown: str = "error") -> ClientStatistics:
        """Statistics of all clients but some, as if these had never been there.

        Parameters
        ----------
        clients : array-like of ids
            Clients to forget.
        unknown : {"error", "ignore"}, default="error"
            What to do with ids that are not there.

        Returns
        -------
        ClientStatistics
            The other clients' numbers are unchanged, and so is `n_left_out`, because it is unknown
            whose rows those were.

        Raises
        ------
        ValueError
            For unknown ids, ids of another kind, and if no client remains.
        """
        return self.of_clients(positions_of_others(self.clients, clients, unknown))

    def _target_means(self, clients: Any = slice(None)) -> tuple[Floats, Floats, Floats, Floats]:
        """Weights (b,), means and squares about them (b, k), log weights (b,) of some clients."""
        first, last = self.n_features + 1, self.lowest.shape[1] + 1
        rows, columns = np.triu_indices(last)
        packed = self.packed[clients]
        means = packed[:, first:last] / packed[:, :1]
        within = np.empty_like(means)
        for k in range(self.n_targets):  # the rows of a triangle after that of the ones
            of_target = (columns == first + k) & (rows > 0)
            within[:, k] = np.sum(packed[:, of_target] ** 2, axis=1)
        return packed[:, 0] ** 2, means, within, self.log_weights[clients]

    def _weights(self) -> Floats | None:
        """Summed weights (m,) of the rows; None if each row has the weight 1."""
        weights = self.packed[:, 0] ** 2
        unweighted = np.abs(weights - self.n_samples_per_client) <= _WEIGHT_ROUNDING * weights
        return None if unweighted.all() and not self.log_weights.any() else weights

    def _sums(self) -> Floats:
        """Weighted sums (m, P) of the ones, the features and the targets."""
        return self.packed[:, :1] * self.packed[:, : self.lowest.shape[1] + 1]

    @classmethod
    def from_rows(
        cls,
        X: TableLike,
        y: TableLike,
        *,
        groups: TableLike,
        sample_weight: TableLike = None,
        missing: str = "error",
        feature_bound: float | None = None,
        target_bound: float | None = None,
    ) -> Self:
        """Statistics of rows in memory, by QR factorizations.

        Parameters
        ----------
        X : array-like of shape (n_rows, d), or None
            Features; None for means of `y` alone.
        y : array-like of shape (n_rows,) or (n_rows, k)
            Targets.
        groups : array-like of shape (n_rows,)
            Client id of every row.
        sample_weight : array-like of shape (n_rows,), default=None
            Precision weights; a row of weight 0 is absent.
        missing : {"error", "drop"}, default="error"
            What to do with rows that hold NaN in `X` or `y`: raise an error, or leave them out and
            count them in `n_left_out`.
        feature_bound, target_bound : float, default=None
            Bounds of a private :class:`~pfl_sklearn.linear_model.PersonalizedLinearRegression`, to
            which rows are scaled for the release, as by its ``fit``; unscaled statistics are kept
            as well. Give both or neither, or without features `target_bound` alone, for a private
            :class:`~pfl_sklearn.estimation.GaussianMean`; not with `sample_weight`. With bounds any
            finite value is accepted: sizes above 1e150 (times the bound, if that is below 1) are
            cut, and those below 1e-140 (times the bound, if that is above 1) count as 0.

        Raises
        ------
        ValueError
            For ids that are missing or of mixed types, infinite values, NaN with
            ``missing="error"``, without rows of positive weight, and for bounds that do not go with
            the columns; without bounds also for values too large or too small to be squared. Such
            an error may tell of a client; nothing protects it.
        """
        check_missing(missing)
        values, names, d = read_columns(X, y, missing, target_bound is not None)
        k = values.shape[1] - d
        bounds = check_release_bounds(d, k, sample_weight, feature_bound, target_bound)
        private = limits_of(d, k, bounds), clipping_of(d, bounds)
        fields = fields_of_values(values, names, d, groups, sample_weight, missing, private)
        return cls(**fields, **bounds)

    @classmethod
    def from_frame(
        cls,
        frame: TableLike,
        *,
        groups: str,
        target: str | Sequence[str],
        features: Sequence[str] = (),
        sample_weight: str | None = None,
        levels: Mapping[str, Sequence[Any]] | None = None,
        missing: str = "error",
        feature_bound: float | None = None,
        target_bound: float | None = None,
    ) -> Self:
        """Statistics of a data frame, summed where the data lie if it is lazy.

        Parameters
        ----------
        frame : data frame
            Lazy (a Polars ``LazyFrame``, a DuckDB relation, a table of PySpark, Dask or Ibis): its
            engine reads the rows once for the scale of the columns, and once for every forty sums
            by client (with two columns there are 11, with nine 74). Above about 30 columns
            :meth:`from_chunks` is faster. The data must not change in between. Eager: as
            :meth:`from_rows`, which keeps more digits.
        groups : str
            Column of the client ids.
        target : str or list of str
            Columns of the targets.
        features : list of str, default=()
            Columns of the features.
        sample_weight : str or None, default=None
            Column of the precision weights; a row of weight 0 is absent.
        levels : dict of lists, default=None
            Levels of columns of categories. Each level but the first becomes a feature that is 1
            where it occurs and 0 elsewhere, called column_level. Other values are missing ones.
        missing : {"error", "drop"}, default="error"
            What to do with rows that lack a value (null or NaN), a weight or a client: raise an
            error, or leave them out and count them in `n_left_out`.
        feature_bound, target_bound : float, default=None
            As for :meth:`from_rows`. A lazy frame then takes twice as many queries, and columns
            are summed about 0: no number of a client depends on the rows of another.

        Raises
        ------
        ValueError
            For columns that are not there, or hold anything but numbers and booleans, for rows that
            change between the queries of a lazy frame, and as :meth:`from_rows`.
        NotImplementedError
            If the engine of a lazy frame lacks an operation. Its own errors pass as they are.
        """
        check_missing(missing)
        columns = read_columns_argument(groups, target, features, sample_weight, levels)
        names = check_columns(frame, columns)
        d, k = len(names) - columns.n_targets, columns.n_targets
        bounds = check_release_bounds(d, k, sample_weight, feature_bound, target_bound)
        private = limits_of(d, k, bounds), clipping_of(d, bounds)
        if not is_lazy(frame):
            values, weights, ids, n_lost = to_arrays(nw.from_native(frame), columns)
            both = tuple(names[:d]), tuple(names[d:])
            fields = fields_of_values(values, both, d, ids, weights, missing, private, n_lost)
            return cls(**fields, **bounds)
        with name_engine(frame):
            fields = query_fields(frame, columns, names, missing, private)
        return cls(**fields, **bounds)

    @classmethod
    def from_chunks(
        cls,
        chunks: Iterable[TableLike],
        *,
        groups: str,
        target: str | Sequence[str],
        features: Sequence[str] = (),
        sample_weight: str | None = None,
        levels: Mapping[str, Sequence[Any]] | None = None,
        missing: str = "error",
        feature_bound: float | None = None,
        target_bound: float | None = None,
    ) -> Self:
        """Statistics of data frames that need not fit in memory together.

        Parameters
        ----------
        chunks : iterable of data frames
            Batches of rows, such as those of ``iter_batches()`` of a
            ``pyarrow.parquet.ParquetFile(path, pre_buffer=False)``, which else keeps what it has
            read. A client may have rows in many.
        groups, target, features, sample_weight, levels, missing, feature_bound, target_bound
            As for :meth:`from_frame`.

        Returns
        -------
        ClientStatistics
            By sums of products, which keep half the digits that :meth:`from_rows` keeps.

        Raises
        ------
        ValueError
            As :meth:`from_frame`, and for ids of different kinds in different chunks.
        """
        check_missing(missing)
        columns = read_columns_argument(groups, target, features, sample_weight, levels)
        d, k = len(value_names(columns)) - columns.n_targets, columns.n_targets
        bounds = check_release_bounds(d, k, sample_weight, feature_bound, target_bound)
        limits = limits_of(d, k, bounds)
        private = limits, clipping_of(d, bounds)
        names, n_left_out, sums = sum_chunks(chunks, columns, missing, private)
        heaviest, moments = sums[0].heaviest, [sums_of_rows.sorted() for sums_of_rows in sums]
        if limits is None:
            check_range((moments[0].lowest, moments[0].highest), d, heaviest)
        fields = fields_of_moments(moments, names, k, n_left_out, limits is not None)
        return cls(**fields, **bounds)

    @classmethod
    def from_moments(
        cls,
        moments: TableLike,
        *,
        groups: str,
        target: str | Sequence[str],
        features: Sequence[str] = (),
        centre: TableLike = None,
        scale: TableLike = None,
    ) -> Self:
        """Statistics from moments that your own query summed.

        Number the features and then the targets from 0, and subtract a constant from every column
        and divide by another, which keep the digits: about its mean and standard deviation. The
        query gives one row per client, with the columns

        - `groups`, and ``n``: the id and the number of rows;
        - ``s_0``, ``s_1``, ...: sums of the columns;
        - ``p_0_0``, ``p_0_1``, ``p_1_1``, ...: sums of products of columns i <= j;
        - ``low_0``, ``high_0``, ...: smallest and largest values, neither centred nor scaled;
        - for weighted rows ``w`` and ``log_w``: sums of weights and of their logarithms. The sums
          ``s`` and ``p`` are weighted then, and rows of weight 0 are left out.

        Parameters
        ----------
        moments : data frame
            One row per client.
        groups : str
            Column of the client ids.
        target : str or list of str
            Names of the targets.
        features : list of str, default=()
            Names of the features.
        centre, scale : array-like of shape (p,), default=None
            Constants that the query subtracted and divided by. None: 0 and 1.

        Raises
        ------
        ValueError
            For columns that are not there, ids that occur twice, numbers of rows below 1, values
            that are not finite, and products that no rows have.
        """
        targets = column_names("target", target)
        names = [*column_names("features", features), *targets]
        check_distinct_columns(names)
        constants = read_constants(names, centre, scale)
        table = nw.from_native(moments)
        if isinstance(table, nw.LazyFrame):
            table = table.collect()
        if groups not in table.columns:
            raise ValueError(f"moments have no column {groups!r}; they have {table.columns[:20]}.")
        if not len(table):
            raise ValueError(NOTHING.format(0))
        ids, codes = encode_clients(table[groups], len(table))
        if len(ids) < len(codes):
            twice = format_id(ids[np.argmax(np.bincount(codes) > 1)])
            raise ValueError(f"moments must have one row per client; got {twice} twice.")
        order = np.argsort(codes)
        columns = {name: table[name].to_numpy()[order] for name in table.columns if name != groups}
        sums = read_moments(ids, columns, *constants)
        check_moments(sums)
        return cls(**fields_of_moments([sums], names, len(targets), 0))

    def to_parquet(self, path: Any) -> None:
        """Write the statistics to a Parquet file; needs pyarrow.

        Parameters
        ----------
        path : str, path or binary file
            File to write. It holds clients' data, unprotected. A file that is there is replaced as
            a whole: after a full disk or a kill it is as before. Given an open file, such as one of
            an object store, the statistics are written into it.

        Raises
        ------
        OSError
            If the file cannot be written.
        """
        write_parquet(self, path)

    @classmethod
    def from_parquet(cls, path: Any) -> Self:
        """Read what :meth:`to_parquet` wrote.

        Parameters
        ----------
        path : str, path or binary file
            File to read.

        Raises
        ------
        ValueError
            For a file that is damaged (pages have checksums) or holds no statistics, and for
            numbers that no rows have.
        """
        return cls(**read_parquet(path))

    def __add__(self, other: ClientStatistics) -> ClientStatistics:
        """Statistics of the rows of both; ValueError if they have a part and a client in common."""
        if not isinstance(other, ClientStatistics):
            return NotImplemented
        return dataclasses.replace(self, **add_fields(self, other))

    def __radd__(self, other: Any) -> ClientStatistics:
        """The same statistics, so that ``sum`` adds a list of them up."""
        return self if other == 0 else NotImplemented

    def __repr__(self) -> str:
        rows = int(self.n_samples_per_client.sum())
        return (
            f"<ClientStatistics: rows: {rows}; clients: {len(self.clients)}; features: "
            f"{self.n_features}; targets: {self.n_targets}>"
        )
