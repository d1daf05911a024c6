"""Grouping columns of X: which they are, and the level of every row."""

from collections.abc import Iterable, Mapping
from itertools import combinations
from numbers import Integral
from typing import NamedTuple

import narwhals as nw
import numpy as np
import pandas as pd
from sklearn.base import clone

from pfl_sklearn._clients import encode_levels, format_id, match_levels, split_positions
from pfl_sklearn._columns import (
    LARGEST_EXACT,
    check_distinct,
    column_labels,
    holds_dates,
    kind_of,
    suits_grouping,
)
from pfl_sklearn._dates import date_format
from pfl_sklearn._warnings import format_names, warn_caller
from pfl_sklearn.linear_model._design import resolve_design
from pfl_sklearn.linear_model._mixed._groupings._fit import check_memory
from pfl_sklearn.linear_model._mixed._groupings._scaled_rows import GroupingColumn
from pfl_sklearn.linear_model._summary_tables import CLIENT
from pfl_sklearn.priors import GroupingPrior

# pandas' names of Python objects that can be levels.
_LEVEL_KINDS = {"string", "bytes", "integer", "boolean", "floating", "mixed-integer-float"}
_LEVEL_KINDS |= {"decimal", "empty"}
_FLOAT_KINDS = {"floating", "mixed-integer-float"}


class GroupingColumns(NamedTuple):
    """Grouping columns of a table and what is known of their levels after a fit."""

    positions: tuple  # of all columns that are not features
    labels: tuple  # their names, or their positions in a table without names
    kept: tuple = ()  # places among them of those that have effects
    levels: tuple = ()  # sorted ids of each of these
    are_named: bool = True  # by the user; otherwise chosen for their many levels

    @property
    def names(self):
        """Names of the columns that have effects."""
        return tuple(self.labels[k] for k in self.kept)

    def split(self, X):
        """The features of a table, and the values (n,) of each of its grouping columns."""
        X = X if hasattr(X, "shape") else np.asarray(X, dtype=object)
        _check_two_dimensions(X)
        features, values = split_positions(X, self.positions)
        pairs = zip(self.labels, self.positions, values, strict=True)
        return features, [_level_values(X, at, v, label) for label, at, v in pairs]

    def others(self, names):
        """The names of the features, from the names of all columns of a table."""
        return [name for k, name in enumerate(names) if k not in self.positions]

    def check_present(self, X):
        """Raise ValueError if a table to predict lacks a grouping column that has a name."""
        present = column_labels(X)
        if present is None:
            return
        # Indices are those of a table without names.
        lacking = [each for each in self.labels if isinstance(each, str) and each not in present]
        if lacking:
            raise ValueError(
                f"X lacks column {lacking[0]!r}, which grouped the rows in fit; expected it, with "
                "missing values where a level is unknown."
            )

    def read(self, X):
        """The features of a table to predict, and codes (n,) of the levels in each column.

        Unknown levels and missing values have the code -1.
        """
        features, values = self.split(X)
        codes = [
            match_levels(values[k], levels, f"column {name!r}")
            for k, name, levels in zip(self.kept, self.names, self.levels, strict=True)
        ]
        return features, codes


def asks_for_groupings(groupings):
    """Whether the parameter `groupings` names columns, whatever the table."""
    if groupings is None or (isinstance(groupings, str) and groupings == "auto"):
        return False
    return not isinstance(groupings, Iterable) or len(list(groupings)) > 0


def check_no_groupings(groupings, reason):
    """Raise ValueError if `groupings` name columns where there can be none."""
    if asks_for_groupings(groupings):
        raise ValueError(f"groupings={groupings!r} {reason}; set groupings=None.")


def check_grouped_prior(prior):
    """Raise ValueError for a prior that does not go with groupings."""
    if type(prior).__name__ != "GaussianPrior" or prior.covariance_type == "low_rank":
        raise ValueError(f"groupings need a GaussianPrior that is not of low rank; got {prior!r}.")
    if np.isinf(np.asarray(0.0 if prior.covariance is None else prior.covariance, float)).any():
        raise ValueError(
            f"groupings need a prior with finite variances; got covariance={prior.covariance!r}."
        )


def resolve_groupings(X, groupings, weights=None):
    """Columns of a table that group rows, and the prior of each.

    GroupingColumns without levels, and a list of GroupingPrior. `weights` of rows are those of the
    fit: a row of weight 0 is absent.
    """
    if groupings is None:
        return GroupingColumns((), ()), []
    are_named = not (isinstance(groupings, str) and groupings == "auto")
    if not are_named:
        groupings = _columns_of_many_levels(X, weights)
    elif isinstance(groupings, str | Integral):
        groupings = [groupings]
    if not isinstance(groupings, Mapping):
        groupings = {name: GroupingPrior() for name in _checked_names(groupings)}
    if not groupings:
        return GroupingColumns((), ()), []
    X = X if hasattr(X, "shape") else np.asarray(X, dtype=object)
    _check_two_dimensions(X)
    labels = column_labels(X)
    positions = [_named_position(X, labels, name) for name in groupings]
    names = [labels[k] for k in positions] if labels is not None else positions
    if len(set(positions)) < len(positions):
        raise ValueError(f"groupings names a column twice; got {list(groupings)}.")
    priors = [
        _checked_prior(prior, name) for name, prior in zip(names, groupings.values(), strict=True)
    ]
    return GroupingColumns(tuple(positions), tuple(names), are_named=are_named), priors


def read_groupings(split, values, priors, clients, resolve_random, keeps_rows=False):
    """GroupingColumns of a fit and a GroupingColumn for each that has effects.

    `values` (n,) of each column and `clients` (n,), codes, are those of the rows with weight;
    ``resolve_random(random)`` are the positions of coefficients. A column with as many levels as
    rows is refused unless the model `keeps_rows`.
    """
    kept, columns = [], []
    for k, (name, prior) in enumerate(zip(split.labels, priors, strict=True)):
        levels, codes = encode_levels(values[k], f"column {name!r}")
        _check_no_numbers_or_dates(values[k], levels, name, split.are_named)
        positions = _random_positions(prior, name, resolve_random)
        reason = _reason_to_leave_out(codes, len(levels), clients)
        if reason is not None:
            _check_no_slopes(prior, name, len(levels), reason)
            warn_caller(
                f"Grouping column {name!r} is left out, because {reason}.",
                UserWarning,
            )
            continue
        n_rows = np.inf if keeps_rows else np.sum(codes >= 0)
        _check_enough_rows(prior, name, len(levels), n_rows, len(positions))
        if name == CLIENT:
            raise ValueError(
                f"a grouping column is called {name!r}, which is the name of the clients in "
                "effects and iccs_; rename the column."
            )
        kept.append(k)
        columns.append(GroupingColumn(name, levels, codes, positions, prior))
    for one, other in combinations(columns, 2):
        if same_partition(one.codes, other.codes):
            raise ValueError(
                f"grouping columns {one.name!r} and {other.name!r} group the rows in the same way, "
                "so the data cannot separate their effects; leave one of them out of X."
            )
    check_memory(columns)
    all_levels = tuple(column.levels for column in columns)
    return split._replace(kept=tuple(kept), levels=all_levels), columns


def positions_of(random, design):
    """Positions (q,), in the order of the table, of the coefficients that vary by level."""
    features = list(design.names[design.fit_intercept :])
    chosen = resolve_design(random, len(features), design.fit_intercept, features, ("all",))
    return np.argsort(design.order)[chosen.random]


# Which columns ------------------------------------------------------------------------------------


def _columns_of_many_levels(X, weights):
    """Names of the columns of strings and categories that have many levels."""
    labels = column_labels(X)
    if labels is None:
        return []
    # Skip wide frames of numbers early: narwhals would look at every column.
    if hasattr(X, "dtypes") and hasattr(X, "iloc") and not any(t.kind == "O" for t in X.dtypes):
        return []
    check_distinct([str(label) for label in labels])
    frame = nw.from_native(X, eager_only=True, pass_through=True)
    if not isinstance(frame, nw.DataFrame):
        return []
    kinds = frame.schema
    texts = [name for name in labels if _holds_text(kinds[name], frame, name)]
    if texts and weights is not None and np.shape(weights) == (len(frame),):
        frame = frame.filter((np.asarray(weights) > 0).tolist())
    counts = {name: frame.get_column(name).drop_nulls().n_unique() for name in texts}
    return [name for name, count in counts.items() if suits_grouping(count, len(frame))]


def columns_of_clients(frame, clients):
    """Names of the columns of strings and categories with one level for each client.

    `clients` (n,) are codes; missing values count as a level.
    """
    if clients.max(initial=0) == 0:  # no column tells a single client apart
        return []
    kinds = frame.schema
    texts = [name for name in frame.columns if _holds_text(kinds[name], frame, name)]
    return [name for name in texts if _has_levels_of(frame.get_column(name), clients)]


def _has_levels_of(column, clients):
    for n_rows in (1000, len(clients)):  # the first rows rule most columns out
        codes = pd.factorize(np.asarray(column.head(n_rows).to_list(), dtype=object))[0]
        if not same_partition(codes, clients[:n_rows]):
            return False
    return True


def _holds_text(dtype, frame, name):
    """Whether a column of a narwhals frame holds strings or categories."""
    if dtype in (nw.Object, nw.Unknown):
        return kind_of(frame.get_column(name)) == "string"
    return dtype in (nw.String, nw.Categorical, nw.Enum)


def _checked_names(names):
    """Names of columns, a list without repeats."""
    names = list(names)
    for name in names:
        if not isinstance(name, str | Integral):
            raise ValueError(f"groupings must hold names or indices of columns; got {name!r}.")
    repeated = [name for k, name in enumerate(names) if name in names[:k]]
    if repeated:
        raise ValueError(f"groupings names {repeated[0]!r} twice; got {names}.")
    return names


def _named_position(X, labels, name):
    """Position of a column of a table by its name or position, or ValueError."""
    if labels is not None:
        check_distinct([str(label) for label in labels])
    # True would be column 1: a mask of columns is no list of positions.
    is_index = isinstance(name, Integral) and not isinstance(name, bool | np.bool_)
    if labels is not None and name in labels and (is_index or isinstance(name, str)):
        return labels.index(name)
    if is_index and 0 <= name < X.shape[1]:
        return int(name)
    shown = f"has {X.shape[1]} columns and no names of them"
    if labels is not None:
        shown = f"has {format_names(map(str, labels), 20)}"
    ends = [label for label in labels or [] if str(label).endswith(f"__{name}")]
    hint = f"; a ColumnTransformer calls it {ends[0]!r}" if ends else ""
    raise ValueError(f"groupings names {name!r}, which is no column of X; X {shown}{hint}.")


def _checked_prior(prior, name):
    if not isinstance(prior, GroupingPrior):
        raise ValueError(f"groupings must hold a GroupingPrior for {name!r}; got {prior!r}.")
    prior = clone(prior)
    prior._validate_params()
    return prior


def _check_two_dimensions(X):
    if len(X.shape) != 2:
        raise ValueError(
            f"Expected 2D array, got {len(X.shape)}D array instead. Reshape your data: a grouping "
            "is a column of X."
        )


# Levels -------------------------------------------------------------------------------------------


def _level_values(X, position, values, name):
    """Values (n,) of a column of X as an array or a pandas categorical.

    Raises ValueError for dates, lists, and numbers that floats do not tell apart.
    """
    if _is_categorical(X, position, values):
        values = pd.Categorical(values)
    kind = getattr(getattr(values, "categories", values), "dtype", values.dtype).kind
    if kind == "O" and not isinstance(values, pd.Categorical):
        kind = pd.api.types.infer_dtype(values, skipna=True)
        if kind in _FLOAT_KINDS:
            values = np.where(pd.isna(values), np.nan, values).astype(np.float64)
    if kind in ("m", "M") or holds_dates(None, kind):
        raise ValueError(
            f"column {name!r} of X holds dates or times, which cannot be levels of a grouping; "
            "make strings of them, such as '2024 week 7', or leave the column out of groupings."
        )
    if len(kind) > 1 and kind not in _LEVEL_KINDS:
        raise ValueError(
            f"column {name!r} of X holds {kind} values, which cannot be levels of a grouping; "
            "expected strings, categories, numbers or booleans, all of one type."
        )
    # A missing value turns integers into floats, which do not tell large ones apart.
    if values.dtype.kind == "f" and (np.abs(values) >= LARGEST_EXACT).any():
        raise ValueError(
            f"column {name!r} of X holds floats beyond 2**53 or infinite ones, which may stand for "
            "several whole numbers; give integers without missing values, or strings."
        )
    return values


def _is_categorical(X, position, values):
    """Whether a column declares its values to be labels, in pandas or another library."""
    if isinstance(values.dtype, pd.CategoricalDtype):
        return True
    if column_labels(X) is None or hasattr(X, "iloc"):
        return False
    schema = nw.from_native(X, eager_only=True).schema
    return list(schema.dtypes())[position] in (nw.Categorical, nw.Enum)


def _check_no_numbers_or_dates(values, levels, name, is_named):
    """Raise ValueError for strings that all read as dates, or as numbers in a column not named."""
    # A categorical declares that its values are labels. A user who names a column of "1" and "2"
    # knows that these are ids; dates have an order that effects of levels would lose.
    if isinstance(values, pd.Categorical) or not len(levels) or not isinstance(levels[0], str):
        return
    are_dates = date_format(levels) is not None
    if are_dates or (not is_named and _read_as_numbers(levels)):
        what, remedy = "numbers", ""
        if are_dates:
            what, remedy = "dates", ", such as days since a start, as a TableEncoder does"
        raise ValueError(
            f"column {name!r} of X holds strings that read as {what}, such as "
            f"{format_id(levels[0])}; make numbers of them{remedy}, or, if they are labels, make "
            "them a categorical or put a letter in front."
        )


def _read_as_numbers(levels):
    try:
        levels.astype(np.float64)
    except ValueError:
        return False
    return True


def _reason_to_leave_out(codes, n_levels, clients):
    if n_levels < 2:
        return f"it has {n_levels or 'no'} level"
    seen = codes >= 0
    if same_partition(codes[seen], clients[seen]):
        return "its levels are the clients"
    return None


def same_partition(first, second):
    """Whether two codes (n,) have the same rows together; -1 is a code like any other."""
    first, second = first + 1, second + 1
    n_first, n_second = (np.count_nonzero(np.bincount(codes)) for codes in (first, second))
    if n_first != n_second:
        return False
    return n_first == len(pd.unique(first * (second.max(initial=0) + 1) + second))


def _random_positions(prior, name, resolve_random):
    """Positions (q,) of the coefficients that vary by level; ValueError for a bad prior."""
    try:
        positions = resolve_random(prior.random)
        prior.known_covariance(len(positions))
    except ValueError as error:
        raise ValueError(f"grouping column {name!r}: {error}") from None
    return positions


def _check_no_slopes(prior, name, n_levels, reason):
    if n_levels < 2 and prior.random != "intercept":
        raise ValueError(
            f"coefficients cannot vary by grouping column {name!r}, because {reason} "
            f"(random={prior.random!r}); expected at least 2 levels."
        )


def _check_enough_rows(prior, name, n_levels, n_rows, q):
    if n_levels == n_rows:
        raise ValueError(
            f"grouping column {name!r} has as many levels as rows ({n_rows}), so the data cannot "
            "separate its effects from noise; leave it out."
        )
    if prior.covariance is None and prior.covariance_type == "full" and n_levels < q:
        raise ValueError(
            f"grouping column {name!r} has {n_levels} levels and {q} coefficients that vary by "
            "level; covariance_type='full' needs at least as many levels. Use 'diag', or fewer in "
            "random."
        )
