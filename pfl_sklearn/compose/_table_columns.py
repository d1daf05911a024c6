"""Columns of a table as numbers: what each becomes, and what has to be known for that."""

from typing import Any, NamedTuple

import narwhals as nw
import numpy as np
import pandas as pd

from pfl_sklearn._columns import NUMBER_KINDS, as_floats
from pfl_sklearn._typing import Floats

NUMBERS, WORDS = "numbers", "words"
# Names that pandas has for columns of Python objects.
_OBJECTS = {"string": WORDS, **dict.fromkeys(NUMBER_KINDS, NUMBERS)}


class NumberPlan(NamedTuple):
    """A column that stays a number: what fills its gaps, and whether a column marks them."""

    fill: float
    marks_gaps: bool
    kind: str = NUMBERS

    @property
    def suffixes(self):
        """What the names of the output have behind that of the column."""
        return ["", "_missing"] if self.marks_gaps else [""]

    def numbers(self, values):
        """Output (n, 1) or (n, 2) of values (n,)."""
        gaps = np.isnan(values)
        filled = np.where(gaps, self.fill, values)
        return np.column_stack([filled, gaps] if self.marks_gaps else [filled])


class WordPlan(NamedTuple):
    """A column of words: its levels, of which the first is left out, and shares of rows."""

    levels: list[Any]  # as they are in the table
    shares: Floats  # (k,), of the levels, then of all others and of gaps if these are levels
    other: int = -1  # position of the level of all others among the k, -1 for none
    gap: int = -1
    kind: str = WORDS

    @property
    def suffixes(self):
        """What the names of the output have behind that of the column."""
        labels = [str(level) for level in self.levels]
        labels += ["other"] * (self.other >= 0) + ["missing"] * (self.gap >= 0)
        return [f"_{label}" for label in labels[1:]]

    def numbers(self, values):
        """Output (n, k - 1) of values (n,)."""
        codes, distinct_values = pd.factorize(values)  # a gap is -1
        # By hashes of objects: 1 is 1.0, which a missing value makes of whole numbers in pandas.
        found = pd.Index(self.levels, dtype=object).get_indexer(distinct_values)
        found = np.append(np.where(found < 0, self.other, found), -1)[codes]
        found = np.where(codes < 0, self.gap if self.gap >= 0 else self.other, found)
        # At -1: what no level stands for is the average row, not one of the level left out.
        return np.vstack([np.eye(len(self.shares)), self.shares])[found][:, 1:]


def read_column(column):
    """Kind of a narwhals series and its values (n,), or what it holds and None.

    Numbers and truth values are floats, gaps NaN; words and categories are objects.
    """
    held = column.dtype
    if held.is_numeric() or held == nw.Boolean:
        return NUMBERS, as_floats(column)
    if held in (nw.String, nw.Categorical, nw.Enum):
        return WORDS, exact_values(column)
    if held not in (nw.Object, nw.Unknown):
        return str(held), None
    values = exact_values(column)
    found = pd.api.types.infer_dtype(values, skipna=True)
    if _OBJECTS.get(found) == NUMBERS:
        return NUMBERS, np.where(pd.isna(values), np.nan, values).astype(np.float64)
    return (WORDS, values) if found in _OBJECTS else (f"{found} values", None)


def exact_values(column):
    """Values (n,) of a narwhals series as objects, integers exactly.

    An array of the column would hold floats where a value is missing, and those beyond 2**53 are
    other integers.
    """
    return np.fromiter(map(_plain, column.to_list()), dtype=object, count=len(column))


def _plain(value):
    """A number of NumPy as Python's, which is compared exactly with one of another type."""
    return value.item() if isinstance(value, np.number | np.bool_) else value


def number_plan(values, min_rows):
    """NumberPlan of values (n,), or None if all are missing."""
    gaps = np.isnan(values)
    if gaps.all():
        return None
    # Fewer rows tell no coefficient of their own.
    return NumberPlan(float(np.median(values[~gaps])), bool(gaps.sum() >= min_rows))


def word_plan(values, categories, min_rows, max_levels):
    """WordPlan of values (n,), or None if they make one level; `categories` may state an order."""
    gaps = pd.isna(values)
    counts = pd.Series(values[~gaps], dtype=object).value_counts()
    if categories is None:
        order = sorted(counts.index, key=_by_type)
    else:
        order = [each for each in categories if each in counts.index]
    rows = np.array([counts[each] for each in order], dtype=np.float64)
    common = np.argsort(-rows, kind="stable")[:max_levels]
    kept = np.sort(common[rows[common] >= min_rows])
    shares, n_gaps = list(rows[kept]), int(gaps.sum())
    n_other = len(values) - n_gaps - sum(shares)
    if n_gaps < min_rows:  # too few for a level of their own
        n_other, n_gaps = n_other + n_gaps, 0
    other = gap = -1
    if n_other >= min_rows:
        other, shares = len(shares), [*shares, n_other]
    if n_gaps:
        gap, shares = len(shares), [*shares, n_gaps]
    if len(shares) < 2:
        return None
    return WordPlan([order[k] for k in kept], np.array(shares) / sum(shares), other, gap)


def given_plan(levels):
    """WordPlan of given levels; a value that is none of them is an equal mixture of them."""
    return WordPlan([_plain(level) for level in levels], np.full(len(levels), 1 / len(levels)))


def _by_type(level):
    """Key that sorts numbers as numbers, and levels of mixed types as well."""
    is_number = isinstance(level, int | float | np.number)
    return (not is_number, level if is_number else 0, str(level))


def distinct(names):
    """Names, with underscores behind those that come again."""
    taken, found = set(names), []
    for k, name in enumerate(names):
        if name in names[:k]:
            while name in taken:
                name += "_"
            taken.add(name)
        found.append(name)
    return found
