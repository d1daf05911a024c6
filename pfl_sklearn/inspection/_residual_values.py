"""Residuals of rows and standardized deviations of clients, for checks of a mixed model."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from scipy.special import ndtri
from sklearn.base import is_classifier
from sklearn.compose import TransformedTargetRegressor
from sklearn.frozen import FrozenEstimator
from sklearn.pipeline import Pipeline
from sklearn.utils import (
    assert_all_finite,
    check_array,
    check_consistent_length,
    check_random_state,
    column_or_1d,
)
from sklearn.utils.validation import check_is_fitted

from pfl_sklearn._clients import encode_clients
from pfl_sklearn._columns import check_one_per_row, replace_empty_frame
from pfl_sklearn._compat import check_sample_weight, num_samples, safe_indexing
from pfl_sklearn._typing import Floats, RandomState, TableLike
from pfl_sklearn._unwrap import inner_estimator, innermost_estimator, transform_for_inner
from pfl_sklearn.base import client_values
from pfl_sklearn.compose import ClientColumn
from pfl_sklearn.estimation import GaussianMean
from pfl_sklearn.inspection._coefficients import find_feature, is_linear_model
from pfl_sklearn.linear_model import (
    PersonalizedLinearRegression,
    PersonalizedLogisticRegression,
    PersonalizedPoissonRegression,
)
from pfl_sklearn.linear_model._base import BasePersonalizedRegression
from pfl_sklearn.linear_model._mixed._predictions import average_tail, normal_average
from pfl_sklearn.priors import GaussianPrior

_MODELS = (
    PersonalizedLinearRegression,
    PersonalizedLogisticRegression,
    PersonalizedPoissonRegression,
    GaussianMean,
)
_NEGLIGIBLE_SHARE = 1e-9  # of the noise variance or of the prior variance
_NEGLIGIBLE_NOISE = 1e-12  # standard deviation over the largest response: rounding errors only
_ZERO_RESPONSE = 1e-100  # stands for the largest response if all are 0
_SMALLEST_TAIL = 1e-300  # probability of a residual: the normal quantile of 0 is infinite


class _RowsToCheck(NamedTuple):
    """Rows X, targets (n,) or None, client ids (n,), weights (n,) or None, exposure and offset."""

    X: Any
    y: Any
    groups: Any
    weights: Floats | None
    metadata: dict[str, Any]


def _checked_model(estimator):
    """The innermost estimator; TypeError or ValueError if it has no residuals of one dimension."""
    check_is_fitted(estimator)
    fitted = unfrozen(innermost_estimator(estimator))
    if not (isinstance(fitted, _MODELS) or _has_link(fitted)):
        raise TypeError(
            f"expected a fitted {', '.join(model.__name__ for model in _MODELS[:-1])} or "
            f"{_MODELS[-1].__name__}, or a pipeline, ClientColumn or search around one; got "
            f"{type(fitted).__name__}."
        )
    if is_classifier(fitted) and len(fitted.classes_) > 2:
        raise ValueError(
            f"residuals need two classes; this {type(fitted).__name__} has "
            f"{len(fitted.classes_)}. Fit one model per class, against the others."
        )
    if np.ndim(getattr(fitted, "population_mean_", 0.0)):
        raise ValueError(
            f"residuals need one target; this {type(fitted).__name__} was fitted to "
            f"{len(fitted.population_mean_)}. Fit it to one column at a time."
        )
    return fitted


def mixed_model(estimator: Any) -> Any:
    """The mixed model inside a fitted estimator; TypeError if there is none."""
    check_is_fitted(estimator)
    fitted = unfrozen(innermost_estimator(estimator))
    if not isinstance(fitted, BasePersonalizedRegression):
        raise TypeError(
            "expected a fitted PersonalizedLinearRegression, PersonalizedLogisticRegression or "
            "PersonalizedPoissonRegression, or a pipeline, ClientColumn or search around one; got "
            f"{type(fitted).__name__}."
        )
    return fitted


def _has_link(fitted):
    """Whether this is a regression with a link function, also one of another package."""
    return hasattr(fitted, "_row_family")


def residuals_of(
    estimator: Any,
    X: TableLike,
    y: TableLike,
    groups: TableLike,
    sample_weight: TableLike,
    held_out: bool,
    random_state: RandomState,
    metadata: dict[str, TableLike] | None = None,
) -> dict[str, Any]:
    """Residuals of the n rows with positive weights, as parameters of ResidualsDisplay.

    `held_out` says whether fit did not see the rows; `random_state` seeds the residuals of classes
    and counts; `metadata` has exposure and offset. The result has clients (m,), those of these
    rows, and codes (n,), their positions in clients; fitted (n,); residuals (n,), times the root of
    the weight; expected (n,), the mean of a residual given its prediction, or None if unknown;
    standardized (n,), NaN where the model leaves no variance; variance_share (n,), the variance of
    a residual over that of the noise; fitted_label and residual_label.
    """
    fitted = _checked_model(estimator)
    rows = present_rows(X, y, groups, sample_weight, metadata or {})
    rows = rows_inside(estimator, rows)
    n = num_samples(rows.X)
    ids = np.zeros(n, dtype=int) if rows.groups is None else rows.groups
    clients, codes = encode_clients(ids, n)
    if is_classifier(fitted):
        values = _residuals_of_classes(fitted, rows, held_out, random_state)
    elif _has_link(fitted):
        values = _residuals_of_counts(fitted, rows, held_out, random_state)
    else:
        values = _residuals_of_responses(fitted, rows, held_out)
    return {"clients": clients, "codes": codes, **values}


def deviations_of(estimator: Any, feature: str | int | None) -> dict[str, Any]:
    """Deviations of the clients' intercepts or slopes, each in its own standard deviation."""
    # Returned as parameters of ResidualsDisplay, or as the reason why there are none. The variance
    # of a posterior mean around the population's is the prior variance minus the posterior
    # variance. Clients whose rows say nothing about the coefficient are left out.
    fitted = _checked_model(estimator)
    label, reason = "deviation of the client", _reason_of_model(fitted)
    if reason is not None:
        return {"deviation_label": label, "without_deviations": reason}
    if is_linear_model(fitted):
        label, deviations, prior, share = _deviations_of_coefficients(estimator, fitted, feature)
    elif feature is not None:
        raise ValueError(
            f"feature={feature!r} belongs to linear models; {type(fitted).__name__} has one mean "
            "per client."
        )
    else:
        deviations = fitted.means_ - fitted.population_mean_
        prior, share = fitted.prior_.covariance[0, 0], fitted.shrinkage_
    reason = _reason_of_variances(prior, share)
    if reason is not None:
        return {"deviation_label": label, "without_deviations": reason}
    informed = share < 1 - _NEGLIGIBLE_SHARE
    values = deviations[informed] / np.sqrt(prior * (1 - share[informed]))
    clients = fitted.clients_[informed]
    return {"deviation_label": label, "deviation_clients": clients, "deviations": values}


def _reason_of_model(fitted):
    """Why a model has no standardized deviations of clients; None if it may have some."""
    name = type(fitted).__name__
    if not hasattr(fitted, "clients_"):
        return f"this {name} is a released population model, without clients"
    if len(fitted.clients_) < 2:
        return "there is one client"
    if type(fitted.prior_) is not GaussianPrior:
        return f"the clients' prior is a {type(fitted.prior_).__name__}, not a normal distribution"
    if is_linear_model(fitted) and not hasattr(fitted, "_posterior"):
        return "the model has no posterior variances"
    return None


def _reason_of_variances(prior, share):
    """Why these variances give no standardized deviations of clients; None if they do."""
    if np.isnan(prior) or np.isnan(share).all():
        return "the variance between clients, or that of a row, is unknown"
    if np.isinf(prior):
        return "clients share nothing: their prior variance is infinite"
    if not prior > 0:
        return "the variance between clients is 0"
    if not np.any(share < 1 - _NEGLIGIBLE_SHARE):
        return "no client's rows say anything about its deviation"
    return None


def _deviations_of_coefficients(estimator, fitted, feature):
    """Label, deviations (m,), prior variance and shrinkage (m,) of one coefficient."""
    design = fitted._design
    if feature is None:  # the first that varies; column 0 of the design is the intercept
        feature = int(design.random[0]) - design.fit_intercept
        feature = "intercept" if feature < 0 else feature
    index, label = find_feature(estimator, feature)
    at = 0 if index is None else index + design.fit_intercept
    clients = design.vectors(fitted.coef_, fitted.intercept_)[:, at]
    population = design.vectors(fitted.population_coef_, fitted.population_intercept_)[at]
    share = design.vectors(fitted.shrinkage_, fitted.intercept_shrinkage_)[:, at]
    prior = _prior_covariance(fitted)[at, at]
    return f"deviation of the {label}", clients - population, prior, share


def _prior_covariance(fitted):
    """Covariance between clients (p, p) that the posterior used, in the order of the design."""
    posterior = _plug_in(fitted)
    if not hasattr(posterior, "ratio"):  # mixtures and logistic models keep covariances only
        return fitted._between
    back = np.argsort(fitted._design.order)
    scaled = posterior.noise * posterior.ratio * np.outer(posterior.scale, posterior.scale)
    return scaled[np.ix_(back, back)]  # after a private release, it includes the release's error


def _plug_in(fitted):
    """Posterior of the clients given the variances."""
    return getattr(fitted._posterior, "plug_in", fitted._posterior)


def unfrozen(estimator):
    """The estimator inside a FrozenEstimator."""
    while isinstance(estimator, FrozenEstimator):
        estimator = estimator.estimator
    return estimator


def present_rows(X, y, groups, sample_weight, metadata):
    """Rows with positive weights, as the outermost estimator takes them."""
    metadata = {name: values for name, values in metadata.items() if values is not None}
    for name, values in metadata.items():
        check_one_per_row(name, values)
    metadata = {name: np.asarray(values) for name, values in metadata.items()}
    check_consistent_length(X, y, *metadata.values())
    if sample_weight is None:
        return _RowsToCheck(X, y, groups, None, metadata)
    # Rows of weight 0 had no part in the fit, so their residuals have another variance.
    weights = check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
    present = np.flatnonzero(weights > 0)
    if len(present) == len(weights):
        return _RowsToCheck(X, y, groups, weights, metadata)
    check_consistent_length(X, groups)
    X, y, groups = (
        None if part is None else safe_indexing(part, present) for part in (X, y, groups)
    )
    metadata = {name: values[present] for name, values in metadata.items()}
    return _RowsToCheck(X, y, groups, weights[present], metadata)


def rows_inside(estimator, rows):
    """Rows as the innermost estimator gets them; TypeError for wrappers that hide them."""
    # Each wrapper changes rows in its own way, which has to be repeated here.
    while (inner := inner_estimator(estimator)) is not None:
        estimator = unfrozen(estimator)
        if isinstance(estimator, Pipeline | ClientColumn):
            params = {**rows.metadata, "groups": rows.groups}
            X, params = transform_for_inner(estimator, rows.X, params)
            rows = rows._replace(X=X, groups=params.pop("groups"), metadata=params)
        elif isinstance(estimator, TransformedTargetRegressor):
            if rows.y is not None:
                y = np.reshape(column_or_1d(rows.y), (-1, 1))
                rows = rows._replace(y=estimator.transformer_.transform(y).ravel())
        elif not hasattr(estimator, "best_estimator_"):
            raise TypeError(
                f"the rows inside {type(estimator).__name__} are unknown; give the "
                f"{type(inner).__name__} in it, with the rows that this one takes."
            )
        estimator = inner
    return rows


def _residuals_of_responses(fitted, rows, held_out):
    """Residuals of a model of means, as in :func:`residuals_of`."""
    y = checked_responses(fitted, rows.y)
    predicted = fitted.predict(rows.X, groups=rows.groups)
    codes = fitted._encode_predict(rows.X, rows.groups)
    weights = np.ones(len(y)) if rows.weights is None else rows.weights
    x, levels = design_rows(fitted, rows.X) if is_linear_model(fitted) else (None, None)
    population, variances, prior = _moments_of_predictions(fitted, x, codes, levels)
    in_fit = (codes >= 0) & (not held_out)
    for level in levels or []:  # a row of a level that fit did not see is new
        in_fit &= level >= 0
    noise = fitted.noise_variance_
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.nan_to_num(weights * variances / noise, nan=0.0, posinf=np.inf)
        # The fit pulls the prediction towards a row that it saw, so the residual varies less.
        share = np.where(in_fit, np.maximum(1 - share, 0.0), 1 + share)
        residuals = (y - predicted) * np.sqrt(weights)
        standardized = residuals / np.sqrt(noise * share)
    # Such residuals are rounding errors; if all responses are 0, so is the estimated noise.
    exact = noise <= (_NEGLIGIBLE_NOISE * max(np.abs(y).max(), _ZERO_RESPONSE)) ** 2
    standardized[exact | (share <= _NEGLIGIBLE_SHARE) | ~np.isfinite(share)] = np.nan
    expected = None
    if prior is not None and in_fit.any():
        expected = _expected_residuals(predicted - population, variances, prior, in_fit)
        expected = expected * np.sqrt(weights)
    # Equal weights multiply all residuals by one factor.
    equal = np.all(weights == weights[0])
    return {
        "fitted": predicted,
        "residuals": residuals,
        "expected": expected,
        "standardized": standardized,
        "variance_share": share,
        "fitted_label": "prediction of the client's model",
        "residual_label": "residual" if equal else "residual times root of weight",
    }


def _expected_residuals(deviations, variances, prior, in_fit):
    """Mean (n,) of the residual of a row of fit, given its prediction."""
    # Shrinkage makes it m / (s - m) times the distance between the client's and the population's
    # prediction, with prior variance s and posterior variance m of the row's mean.
    # If rows say nothing about the mean, the prediction is the population's: the distance is 0.
    informed = in_fit & np.isfinite(prior) & (prior - variances > _NEGLIGIBLE_SHARE * prior)
    return deviations * np.divide(
        variances, prior - variances, out=np.zeros(len(prior)), where=informed
    )


def design_rows(fitted, X):
    """Rows (n, p) of the design, and codes (n,) of the levels of each grouping; None without."""
    columns = getattr(fitted, "_grouping_columns", None)
    if columns is None:
        return fitted._design.matrix(_features(X)), None
    features, levels = columns.read(X)
    return fitted._design.matrix(_features(features)), levels


def _moments_of_predictions(fitted, x, codes, levels):
    """Population predictions (n,), variances (n,) of the rows' predictions, and prior variances.

    Rows x (n, p) and levels are those of `design_rows`. Variances are NaN without a posterior;
    prior variances are None unless the prior is normal.
    """
    normal = type(fitted.prior_) is GaussianPrior
    if not is_linear_model(fitted):
        population = np.full(len(codes), fitted.population_mean_)
        return population, *_variances_of_means(fitted, codes, normal)
    is_known = codes >= 0
    population = x @ fitted._design.vectors(fitted.population_coef_, fitted.population_intercept_)
    if levels:
        return population, *_variances_with_levels(fitted, x, codes, levels)
    variances = np.full(len(x), np.nan)
    if not is_known.all():
        variances[~is_known] = fitted._variances(x[~is_known], codes[~is_known])
    if not hasattr(fitted, "_posterior"):
        return population, variances, None
    ordered = x[is_known][:, fitted._design.order]
    variances[is_known] = _plug_in(fitted).variances(ordered, codes[is_known])
    variances[~fitted._estimable_rows(x)] = np.inf  # then there is no standardized residual
    prior = np.einsum("np,np->n", x @ _prior_covariance(fitted), x) if normal else None
    return population, variances, prior


def _variances_with_levels(fitted, x, codes, levels):
    """Variances (n,) of predictions by client and levels, and their prior variances."""
    variances = _plug_in(fitted).variances(x[:, fitted._design.order], codes, levels)
    variances[~fitted._estimable_rows(x)] = np.inf  # then there is no standardized residual
    prior = np.einsum("np,np->n", x @ fitted._between, x)
    for grouping, level in zip(fitted._levels, levels, strict=True):
        covariance = grouping.embedded_covariance(fitted._design)
        prior += np.where(level < 0, 0.0, np.einsum("np,np->n", x @ covariance, x))
    return variances, prior


def _variances_of_means(fitted, codes, normal):
    """Variances (n,) of the clients' means and their prior variances, for a GaussianMean."""
    new = fitted._new_client_std**2
    if not normal:
        return client_values(getattr(fitted, "stds_", None), new**0.5, codes) ** 2, None
    prior = fitted.prior_.covariance[0, 0]
    variances = prior * fitted.shrinkage_ if hasattr(fitted, "shrinkage_") else None
    return client_values(variances, new, codes), np.full(len(codes), prior)


def _residuals_of_classes(fitted, rows, held_out, random_state):
    """Randomized quantile residuals of a model of two classes, as in :func:`residuals_of`."""
    # For a label with probability p we draw a uniform number below p and take its normal quantile,
    # with a plus sign for the second class.
    second = checked_responses(fitted, rows.y) == 1
    options = {"groups": rows.groups, **rows.metadata}
    chances = fitted.predict_proba(rows.X, integrate=False, **options)
    new = held_out | (fitted._encode_predict(rows.X, rows.groups) < 0)
    if new.any():
        chances[new] = fitted.predict_proba(rows.X, **options)[new]
    drawn = 1 - check_random_state(random_state).uniform(size=len(second))  # above 0
    tail = np.maximum(drawn * chances[np.arange(len(second)), second.astype(int)], _SMALLEST_TAIL)
    residuals = np.where(second, -1, 1) * ndtri(tail)
    return _randomized(chances[:, 1], residuals, f"probability of {fitted.classes_[1]}")


def checked_responses(fitted: Any, y: Any) -> Floats:
    """Responses (n,) of rows as numbers: for two classes 1 is the second."""
    y = np.asarray(column_or_1d(y))
    if is_classifier(fitted):
        unknown = ~np.isin(y, fitted.classes_)
        if unknown.any():
            raise ValueError(
                f"y holds {y[unknown].tolist()[0]!r}, but the classes of fit are "
                f"{fitted.classes_.tolist()}."
            )
        return (y == fitted.classes_[1]).astype(np.float64)
    if _has_link(fitted):
        return fitted._checked_response(y, with_offset=True)  # rates are no counts
    y = y.astype(np.float64)
    assert_all_finite(y, input_name="y")
    return y


def _randomized(predicted, residuals, fitted_label):
    """Result of :func:`residuals_of` for randomized quantile residuals, which have variance 1."""
    return {
        "fitted": predicted,
        "residuals": residuals,
        "expected": None,
        "standardized": residuals,
        "variance_share": np.ones(len(residuals)),
        "fitted_label": fitted_label,
        "residual_label": "randomized quantile residual",
    }


def _features(X):
    """Features (n, d) of a table; d may be 0."""
    return check_array(replace_empty_frame(X), dtype=np.float64, ensure_min_features=0)


def _residuals_of_counts(fitted, rows, held_out, random_state):
    """Randomized quantile residuals of a regression with a link, as in :func:`residuals_of`."""
    # Normal quantiles of a uniform number between the probability of smaller responses and that of
    # responses up to the observed one.
    y = checked_responses(fitted, rows.y)
    predicted = fitted.predict(rows.X, groups=rows.groups, integrate=False, **rows.metadata)
    # Exposure and offset shift predictors, which takes no part in their errors.
    law, x = fitted._predictor_law(rows.X, rows.groups, np.zeros(len(y)))
    new, family = held_out | (law.codes < 0), fitted._row_family
    for level in law.levels or []:  # a row of a level that fit did not see is new
        new |= level < 0
    # Rows that fit saw have pulled their client's mode; for other rows the mode's error counts.
    shifts, variances, _ = fitted._posterior_moments(x, law) * new

    def pmf(block, predictors):
        return family.distribution(np.exp(predictors)).pmf(y[block, None])

    means = np.log(predicted) + shifts
    # A continuous response has no probability of its own.
    chance = normal_average(pmf, means, variances) if family.discrete else 0.0
    drawn = check_random_state(random_state).uniform(size=len(y))
    smaller = y - 1 if family.discrete else y
    below = average_tail(family, "cdf", smaller, means, variances) + drawn * chance
    above = average_tail(family, "sf", y, means, variances) + (1 - drawn) * chance
    # From the smaller tail, which has all its digits.
    tail = ndtri(np.maximum(np.minimum(below, above), _SMALLEST_TAIL))
    residuals = np.where(below < above, tail, -tail)
    label = "expected count" if family.discrete else "expectation"
    return _randomized(predicted, residuals, label)
