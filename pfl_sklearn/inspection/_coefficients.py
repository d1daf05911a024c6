"""One coefficient of every client of a fitted linear model."""

from __future__ import annotations

from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.special import ndtri

from pfl_sklearn._nesting import feature_names_of, innermost_estimator

_INTERCEPT = "intercept"


class Coefficients(NamedTuple):
    """One coefficient of m clients and of the population, with intervals.

    Bounds are NaN without a posterior, and infinite where nothing is known.
    """

    label: str  # for an axis
    clients: np.ndarray  # (m,)
    values: np.ndarray  # (m,)
    lower: np.ndarray  # (m,)
    upper: np.ndarray  # (m,)
    population: float
    population_lower: float
    population_upper: float


def is_linear_model(estimator: Any) -> bool:
    """Whether an estimator has one coefficient vector per client."""
    return "population_coef_" in getattr(estimator, "_population_attributes", ())


def coefficients_of(estimator: Any, feature: Any, *, output: int, level: float) -> Coefficients:
    """Coefficient of one feature, or the intercept.

    Parameters
    ----------
    estimator : fitted linear model, or a pipeline, wrapper or search around one
    feature : "intercept", or the name or index of a feature
    output : int
        Which class of a multinomial model.
    level : float in (0, 1)

    Returns
    -------
    Coefficients

    Raises
    ------
    ValueError
        - If `estimator` has no such coefficient.
        - If `level` is out of range.
    """
    fitted = innermost_estimator(estimator)
    if not is_linear_model(fitted):
        raise ValueError(
            "expected a fitted linear model with one coefficient vector per client, such as "
            f"PersonalizedLinearRegression; got {type(fitted).__name__}."
        )
    if not 0 < level < 1:
        raise ValueError(f"level must be in (0, 1); got {level!r}.")
    fitted._require_fitted("coef_")
    at, label = find_feature(estimator, feature)
    half = ndtri(0.5 + level / 2)
    values, stds = _values_of(fitted, "", at)
    population, population_std = _values_of(fitted, "population_", at)
    if values.ndim == 2:  # multinomial: one coefficient for each class
        if not 0 <= output < values.shape[1]:
            raise ValueError(f"output={output!r}, but the model has {values.shape[1]} classes.")
        label = f"{label}, class {fitted.classes_[output]}"
        values, stds = values[:, output], stds[:, output]
        population, population_std = population[output], population_std[output]
    return Coefficients(
        label,
        fitted.clients_,
        values,
        values - half * stds,
        values + half * stds,
        float(population),
        float(population - half * population_std),
        float(population + half * population_std),
    )


def find_feature(estimator: Any, feature: Any) -> tuple[int | None, str]:
    """Index of a feature of a linear model (None: the intercept), and a label of its coefficient.

    Parameters are those of `coefficients_of`; ValueError if there is no such coefficient.
    """
    fitted = innermost_estimator(estimator)
    names = feature_names_of(estimator) or [f"x{k}" for k in range(fitted.coef_.shape[-1])]
    at = _feature_index(feature, names, fitted.fit_intercept)
    return at, _INTERCEPT if at is None else f"coefficient of {names[at]}"


def local_coefficients(model, shown, feature, *, output, level):
    """The same coefficient of a second model, in the order of the clients of `shown`.

    None if there is no second model.
    """
    if model is None:
        return None
    own = coefficients_of(model, feature, output=output, level=level)
    codes = pd.Index(own.clients).get_indexer(pd.Index(shown.clients))
    if (codes < 0).any():
        missing = shown.clients[codes < 0].tolist()[0]
        raise ValueError(f"local lacks the client {missing!r}; fit it to the same clients.")
    return own._replace(
        clients=shown.clients,
        values=own.values[codes],
        lower=own.lower[codes],
        upper=own.upper[codes],
    )


def _feature_index(feature, names, fit_intercept):
    """Index of a feature, or None for the intercept."""
    # True is an Integral: as a mask it would silently be feature 1.
    if isinstance(feature, Integral) and not isinstance(feature, bool | np.bool_):
        if not 0 <= int(feature) < len(names):
            raise ValueError(
                f"feature={feature} is out of range; the model has {len(names)} features."
            )
        return int(feature)
    if feature == _INTERCEPT and fit_intercept:
        if _INTERCEPT in names:
            raise ValueError(
                "feature='intercept' is ambiguous: a feature has that name; give its index."
            )
        return None
    if feature in names:
        return names.index(feature)
    expected = [_INTERCEPT, *names] if fit_intercept else names
    raise ValueError(
        f"feature must be one of {', '.join(map(repr, expected[:20]))}; got {feature!r}."
    )


def _values_of(fitted, owner, at):
    """Values and standard deviations of a coefficient; these are NaN without a posterior.

    Of the clients (`owner` "") they have the shape (m,) or (m, n_classes), of the population
    ("population_") they are numbers or (n_classes,).
    """
    name = f"{owner}intercept_" if at is None else f"{owner}coef_"
    values = np.asarray(getattr(fitted, name))
    stds = np.asarray(getattr(fitted, f"{name}std_", np.full_like(values, np.nan)))
    return (values, stds) if at is None else (values[..., at], stds[..., at])
