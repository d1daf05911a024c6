"""Estimated marginal means of the values of a column, and their pairwise differences."""

import math
from collections.abc import Mapping
from itertools import combinations
from typing import Any

import narwhals as nw
import numpy as np
from numpy.polynomial import Chebyshev
from pandas import DataFrame, Index, Series
from scipy.stats import studentized_range

from pfl_sklearn._clients import split_columns
from pfl_sklearn._columns import column_labels, name_bad_columns
from pfl_sklearn._typing import TableLike
from pfl_sklearn._unwrap import predicting_estimator
from pfl_sklearn._warnings import format_names
from pfl_sklearn.compose import ClientColumn
from pfl_sklearn.inspection import _residual_values as residual_values

_ADJUSTMENTS = ("tukey", "none")
_MOST_VALUES = 20  # that are taken from X: a column with more holds numbers, as a rule
_SAME_NUMBER = 1e-6  # relative difference that single precision may make
_NODES = 12  # degrees of freedom at which quantiles are computed


def marginal_means(
    estimator: Any,
    X: TableLike,
    column: Any,
    *,
    values: TableLike = None,
    at: Mapping[Any, Any] | None = None,
    pairs: bool = False,
    adjust: str = "tukey",
    level: float = 0.95,
    df: str = "auto",
    groups: TableLike = None,
    sample_weight: TableLike = None,
) -> DataFrame:
    r"""Estimate the population's mean at each value of a column, or their pairwise differences.

    With :math:`x_i(v)` row i of the model's design after the column is set to v, the marginal mean
    is the combination :math:`\bar x(v)^\top \beta` of the population's coefficients, with the
    average :math:`\bar x(v) = \sum_i w_i x_i(v) / \sum_i w_i`. The model's ``contrast`` gives its
    standard error and degrees of freedom.

    Parameters
    ----------
    estimator : fitted estimator
        A ``PersonalizedLinearRegression``, ``PersonalizedLogisticRegression`` (of two classes) or
        ``PersonalizedPoissonRegression``, or a pipeline, ``ClientColumn``,
        ``TransformedTargetRegressor`` or search around one.
    X : DataFrame of n_rows rows, of pandas or polars
        Rows to average over, with the columns that `estimator` takes.
    column : str
        Column of X, which steps of `estimator` may encode.
    values : array-like of shape (k,), default=None
        Values of the column, which need not occur in X; those that ``fit`` did not see are what
        the encoder makes of them (a ``TableEncoder`` the average). None: those in X, sorted, up to
        20.
    at : dict, default=None
        Values at which to hold other columns of X.
    pairs : bool, default=False
        Return the differences of all pairs of values, later minus earlier, instead of the means.
    adjust : {"tukey", "none"}, default="tukey"
        "tukey": p-values and simultaneous intervals of pairs by the studentized range of k means.
    level : float in (0, 1), default=0.95
        Coverage of the intervals.
    df : {"auto", "satterthwaite", "kenward_roger", "averaged", "normal"}, default="auto"
        Degrees of freedom, as for ``contrast``.
    groups : array-like of shape (n_rows,), default=None
        Client ids, for steps that use them without a ``ClientColumn``.
    sample_weight : array-like of shape (n_rows,), default=None
        Weights :math:`w_i` of the rows. None: 1.

    Returns
    -------
    DataFrame
        Indexed by the values, or for pairs by "b - a", with the columns of ``contrast``. Estimates
        are on the scale of the linear predictor: the response of linear models (transformed under a
        ``TransformedTargetRegressor``), log odds of the second class, or the logarithm of the rate
        per unit of exposure. For classes exp of a difference is an odds ratio, for counts a rate
        ratio.

    Raises
    ------
    TypeError
        If `estimator` holds no such model, or a wrapper hides the rows that it gets.
    ValueError
        For columns that are not in X or hold client ids, values that a column cannot hold, that a
        step refuses or that make no difference to the model (as those of groupings), means that the
        rows of ``fit`` do not determine, and more than two classes.

    Notes
    -----
    These are the marginal means of Searle, Speed and Milliken (1980) with the weights of the rows
    of X. R's emmeans gives equal weights to all combinations of the other factors; in models
    without interactions the differences are the same.

    With q the studentized range of k means with the degrees of freedom of the pair, the p-value of
    Tukey and Kramer (1956) is :math:`P(q > \sqrt2\, |t|)`. It is exact for independent means with
    equal errors.

    References
    ----------
    Kramer, C. Y. (1956). Extension of multiple range tests to group means with unequal numbers of
    replications. Biometrics.

    Searle, S. R., Speed, F. M. and Milliken, G. A. (1980). Population
    marginal means in the linear model. The American Statistician.

    Examples
    --------
    >>> from sklearn.pipeline import make_pipeline
    >>> from pfl_sklearn.compose import ClientColumn, TableEncoder
    >>> from pfl_sklearn.datasets import load_county_elections
    >>> from pfl_sklearn.inspection import marginal_means
    >>> from pfl_sklearn.linear_model import PersonalizedLinearRegression
    >>> votes = load_county_elections().frame.query("state == 'IA' and year > 2010")
    >>> share = 100 * votes["votes_rep"] / (votes["votes_rep"] + votes["votes_dem"])
    >>> X = votes[["fips", "year"]].astype(str)
    >>> model = make_pipeline(TableEncoder(), PersonalizedLinearRegression(random="intercept"))
    >>> model = ClientColumn(model, "fips").fit(X, share)
    >>> marginal_means(model, X, "year")[["estimate", "std_error", "df"]].round(2)
          estimate  std_error      df
    year
    2012     52.18       0.91  113.11
    2016     64.61       0.91  113.11
    2020     65.02       0.91  113.11
    >>> marginal_means(model, X, "year", pairs=True)[["estimate", "lower", "upper"]].round(2)
                 estimate  lower  upper
    year
    2016 - 2012     12.43  11.44  13.42
    2020 - 2012     12.84  11.84  13.83
    2020 - 2016      0.41  -0.58   1.40
    """
    fitted = _checked_model(estimator)
    if adjust not in _ADJUSTMENTS:
        raise ValueError(f"adjust must be one of {', '.join(_ADJUSTMENTS)}; got {adjust!r}.")
    at = at or {}
    _check_columns(estimator, X, column, at)
    rows = residual_values.present_rows(X, None, groups, sample_weight, {})
    frame = nw.from_native(rows.X, eager_only=True)
    values = _checked_values(frame, column, values, 1 + pairs)
    for name, value in at.items():
        frame = _with_value(frame, name, value)
    means = []
    for value in values:
        changed = rows._replace(X=_with_value(frame, column, value).to_native())
        means.append(_mean_row(fitted, estimator, changed, f"{column}={value!r}"))
    L, labels, index = np.array(means), [str(value) for value in values], Index(values, name=column)
    _check_rows_differ(L, column, labels, pairs)
    if pairs:
        first, second = np.array(list(combinations(range(len(L)), 2))).T
        L = L[second] - L[first]
        labels = [f"{labels[b]} - {labels[a]}" for a, b in zip(first, second, strict=True)]
        index = Index(labels, name=column)
    fitted._check_estimable(labels, L)  # whose error then names the values
    table: DataFrame = fitted.contrast(L, df=df, level=level)[: len(L)]  # without the joint test
    table.attrs.clear()
    table.index = index
    if not pairs or adjust == "none" or len(values) == 2:  # of two, the range is their difference
        return table
    return _adjusted(table, len(values), level)


def _checked_model(estimator):
    """The mixed model inside `estimator`; TypeError or ValueError if it has no marginal means."""
    fitted = residual_values.mixed_model(estimator)
    if np.ndim(fitted.population_coef_) == 2:
        raise ValueError(
            f"marginal means need two classes; this {type(fitted).__name__} has "
            f"{len(fitted.classes_)}. Fit one model per class, against the others."
        )
    return fitted


def _check_columns(estimator, X, column, at):
    """Raise ValueError unless `column` and those in `at` are different features of X."""
    names = column_labels(X)
    if names is None:
        raise ValueError(f"X must be a data frame with column names; got {type(X).__name__}.")
    outer = residual_values.unfrozen(predicting_estimator(residual_values.unfrozen(estimator)))
    if isinstance(outer, ClientColumn):  # no population mean depends on the client
        names = column_labels(split_columns(X, {"client": outer.column})[0])
    others = [name for name in names if name != column]
    for parameter, given, allowed in (("column", [column], names), ("at", at, others)):
        for name in given:
            if name not in allowed:
                among = format_names(map(str, allowed), 20)
                raise ValueError(f"{parameter} must name a feature of X, of {among}; got {name!r}.")


def _checked_values(frame, column, values, fewest):
    """The values to compare, a list; None: those of the column, sorted."""
    if values is None:
        # Categories sort in their own order, such as low, middle, high.
        present = frame.get_column(column).drop_nulls().unique().sort().to_list()
        values = [value for value in present if value == value]  # polars keeps NaN
        if len(values) > _MOST_VALUES:
            expected = f"expected at most {_MOST_VALUES}, or values=[...]"
            raise ValueError(f"column {column!r} has {len(values)} values; {expected}.")
    if np.ndim(values) != 1 or len(values) < fewest:
        expected = f"a list of at least {fewest} values of column {column!r}"
        raise ValueError(f"values must be {expected}; got {values!r}.")
    return list(values)


def _with_value(frame, name, value):
    """The frame with one value in all rows of a column, in the type of the column."""
    cells = frame.get_column(name)
    position = {cell: k for k, cell in enumerate(cells.to_list())}.get(value)
    # A row of the column keeps its categories, which an encoder may compare with those of fit.
    cell = _cast(cells, value) if position is None else cells[[position]]
    return frame.with_columns(cell[np.zeros(len(frame), dtype=int)].alias(name))


def _cast(cells, value):
    """Series of one value in the type of a column; ValueError if that changes the value."""
    native = cells.to_native()
    try:
        if hasattr(native, "iloc"):  # narwhals would replace pandas' categories
            cell = nw.from_native(Series([value]).astype(native.dtype), series_only=True)
        else:
            cell = nw.new_series("", [value], cells.dtype, backend=cells.implementation)
        held = cell.to_list()[0]
        is_same = held == value or math.isclose(held, value, rel_tol=_SAME_NUMBER)
    except Exception:  # polars has errors of its own
        is_same = False
    if not is_same:
        holder = f"column {cells.name!r} of type {native.dtype}"
        raise ValueError(f"{holder} cannot hold {value!r}; expected a value or category of it.")
    return cell


def _mean_row(fitted, estimator, rows, setting):
    """Mean (p,) of the rows of the design; ValueError if they do not pass through the steps."""
    try:
        inside = residual_values.rows_inside(estimator, rows)
        with name_bad_columns(inside.X):
            fitted._column_attributes(inside.X, reset=False)  # which checks the names
            x, _ = residual_values.design_rows(fitted, inside.X)
    except ValueError as error:
        raise ValueError(f"estimator takes no rows with {setting}: {error}") from error
    return np.average(x, axis=0, weights=inside.weights)


def _check_rows_differ(L, column, labels, pairs):
    """Raise ValueError if means L (k, p) are all the same, or two of `pairs`."""
    _, first, codes = np.unique(L, axis=0, return_index=True, return_inverse=True)
    repeated = np.setdiff1d(np.arange(len(L)), first)
    if len(repeated) and (pairs or len(first) == 1):
        one, other = labels[first[codes.ravel()[repeated[0]]]], labels[repeated[0]]
        raise ValueError(
            f"values {one!r} and {other!r} of column {column!r} have the same features in the "
            "model; expected values that differ there, and no column of a grouping."
        )


def _adjusted(table, k, level):
    """Table of the pairs of k means, with p-values and bounds by the studentized range."""
    dfs, roots = table["df"].to_numpy(), table["std_error"] / np.sqrt(2)
    p_values = studentized_range.sf(np.abs(table["estimate"] / roots), k, dfs)
    # The unadjusted one is a lower bound, with more digits in the tail.
    p_values = np.maximum(p_values, table["p_value"])
    half = _critical_values(level, k, dfs) * roots
    bounds = {"lower": table["estimate"] - half, "upper": table["estimate"] + half}
    return table.assign(p_value=p_values, **bounds)


def _critical_values(level, k, dfs):
    """Quantiles (n,) of the range of k means, studentized with degrees of freedom (n,)."""

    def quantiles(dfs):
        return np.asarray(studentized_range.ppf(level, k, dfs))

    distinct, back = np.unique(dfs, return_inverse=True)
    if len(distinct) <= _NODES:
        return quantiles(distinct)[back]
    # A quantile takes 0.2 s, and is a smooth function of 1 / df.
    domain = [1 / distinct[-1], 1 / distinct[0]]
    return Chebyshev.interpolate(lambda u: quantiles(1 / u), _NODES - 1, domain)(1 / dfs)
