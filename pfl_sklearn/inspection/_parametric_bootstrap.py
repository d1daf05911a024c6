"""Parametric bootstrap of mixed models."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from sklearn.base import clone
from sklearn.compose import TransformedTargetRegressor
from sklearn.frozen import FrozenEstimator

from pfl_sklearn._parallel import map_batches
from pfl_sklearn._typing import RandomState, TableLike
from pfl_sklearn._unwrap import inner_estimator, predicting_estimator
from pfl_sklearn._warnings import warn_caller
from pfl_sklearn.inspection._residual_values import mixed_model, present_rows, rows_inside, unfrozen


def parametric_bootstrap(
    estimator: Any,
    statistic: Callable[[Any], Any],
    X: TableLike,
    *,
    groups: TableLike = None,
    n: int = 200,
    clients: str = "new",
    sample_weight: TableLike = None,
    n_jobs: int | None = None,
    random_state: RandomState = None,
    **known: TableLike,
) -> pd.DataFrame:
    """Sampling distribution of any function of a fitted mixed model.

    Responses are simulated from the model, and the estimator is fitted to each set of them.

    Parameters
    ----------
    estimator : fitted mixed model, or a pipeline, ClientColumn or search around one
        The fits take what a search has chosen; a search inside a ``ClientColumn`` is repeated.
    statistic : callable
        Function of a fitted estimator (of the best one of a search) that returns a number, or
        several as a dict, a Series or an array: ``lambda model: model.icc_``.
    X : array-like of n_rows rows
        The rows of ``fit``, as it takes them.
    groups : array-like of shape (n_rows,), default=None
        Client id of every row.
    n : int, default=200
        Number of fits. A standard error then is off by 5 %; an interval's ends need 1,000.
    clients : {"new", "same"}, default="new"
        Whether clients' effects are drawn anew from the population, as the sampling distribution
        has it, or those of ``fit`` keep theirs up to their posterior.
    sample_weight : array-like of shape (n_rows,), default=None
        Precision weights of linear models, as in ``fit``.
    n_jobs : int, default=None
        Workers, with the same results for any number.
    random_state : int, RandomState instance or None, default=None
        Seed of the responses.
    **known : array-likes of shape (n_rows,)
        `offset`, or for counts `exposure`, as in ``fit``.

    Returns
    -------
    DataFrame of shape (n, k)
        The statistics of the fits; those of the estimator itself are in ``attrs["estimate"]``. NaN
        for fits that failed, such as to labels of one class.

    Raises
    ------
    TypeError
        For other estimators, behind a ``TransformedTargetRegressor``, and around a
        ``FrozenEstimator``.
    ValueError
        As ``simulate``; after a private fit, whose errors count its noise already; and if more than
        half of the fits fail.

    Warns
    -----
    UserWarning
        If some fits fail.

    Notes
    -----
    The truth behind the simulated rows is the fitted model: where an estimate is biased, the
    distribution is off by about as much again. Responses take ``8 n n_rows`` bytes.

    Examples
    --------
    >>> from pfl_sklearn.datasets import load_radon
    >>> from pfl_sklearn.inspection import parametric_bootstrap
    >>> from pfl_sklearn.linear_model import PersonalizedLinearRegression
    >>> homes = load_radon("MN").frame
    >>> X, y, county = homes[["floor"]], homes["log_radon"], homes["county_fips"]
    >>> model = PersonalizedLinearRegression(random="intercept").fit(X, y, groups=county)
    >>> fits = parametric_bootstrap(
    ...     model, lambda fit: {"icc": fit.icc_}, X, groups=county, n=40, random_state=0)
    >>> fits["icc"].quantile([0.05, 0.95]).round(2).tolist()
    [0.11, 0.2]
    """
    model = simulating_model(estimator)
    if np.isfinite(model.epsilon):
        raise ValueError(
            "parametric_bootstrap is for fits without privacy; the errors of a fit with a finite "
            "epsilon (conf_int) count its noise already."
        )
    chosen = predicting_estimator(unfrozen(estimator))
    _check_refits(chosen)
    rows = present_rows(X, None, groups, sample_weight, known)
    weights = {} if rows.weights is None else {"sample_weight": rows.weights}
    inside = rows_inside(estimator, rows)
    responses = model.simulate(
        inside.X,
        groups=inside.groups,
        n=n,
        clients=clients,
        random_state=random_state,
        **weights,
        **inside.metadata,
    )
    estimate = _numbers(statistic(chosen))
    ids = {} if rows.groups is None else {"groups": rows.groups}
    given = {**rows.metadata, **weights, **ids}
    blank = clone(chosen)
    tasks = [(y, blank, statistic, rows.X, given) for y in responses]
    found = map_batches(_refitted, tasks, n_jobs)
    errors = [each for each in found if isinstance(each, str)]
    if errors:
        text = (
            f"{len(errors)} of {len(found)} fits to simulated rows failed; the first: {errors[0]}"
        )
        if len(errors) > len(found) / 2:
            raise ValueError(text)
        warn_caller(text, UserWarning)
    nothing = dict.fromkeys(estimate, np.nan)
    table = pd.DataFrame([nothing if isinstance(each, str) else each for each in found])
    table.index.name = "fit"
    table.attrs["estimate"] = estimate
    return table


def simulating_model(estimator: Any) -> Any:
    """The mixed model inside `estimator`, whose simulated responses are those that this one takes.

    Raises TypeError for other estimators, and where the target is transformed.
    """
    model, outer = mixed_model(estimator), estimator
    while outer is not None:
        outer = unfrozen(outer)
        if isinstance(outer, TransformedTargetRegressor):
            raise TypeError(
                "simulated responses are those of the transformed target; give the estimator "
                "inside the TransformedTargetRegressor, fitted to that target."
            )
        outer = inner_estimator(outer)
    return model


def _check_refits(estimator):
    """Raise TypeError for estimators around a frozen one, which no fit changes."""
    while (estimator := inner_estimator(estimator)) is not None:
        if isinstance(estimator, FrozenEstimator):
            raise TypeError(
                "parametric_bootstrap cannot fit a FrozenEstimator again; put the estimator that "
                "it freezes in its place."
            )


def _refitted(y, blank, statistic, X, given):
    """Statistics of a fit to simulated responses, or the text of its error."""
    with warnings.catch_warnings():
        # Variances of 0 and slow searches are part of the distribution.
        warnings.simplefilter("ignore")
        try:
            return _numbers(statistic(clone(blank).fit(X, y, **given)))
        except ValueError as error:
            return str(error)


def _numbers(value):
    """Statistics by name."""
    if isinstance(value, Mapping | pd.Series):
        items = dict(value)
    else:
        values = np.ravel(value)
        items = {"statistic": values[0]} if np.ndim(value) == 0 else dict(enumerate(values))
    try:
        return {name: float(number) for name, number in items.items()}
    except (TypeError, ValueError):
        raise TypeError(f"statistic must return numbers; got {value!r}.") from None
