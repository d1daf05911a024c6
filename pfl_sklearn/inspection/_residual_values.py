"""Residuals of rows and standardized deviations of clients, for checks of a mixed model."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.special import betaincinv, chdtri, ndtri
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

from pfl_sklearn._clients import encode_clients, row_counts, segment_sums
from pfl_sklearn._columns import check_one_per_row, without_columns
from pfl_sklearn._compat import check_sample_weight, num_samples
from pfl_sklearn._typing import Floats, Integers, RandomState, TableLike
from pfl_sklearn._unwrap import inner_estimator, innermost_estimator, rows_behind_steps
from pfl_sklearn.base import client_values
from pfl_sklearn.compose import ClientColumn
from pfl_sklearn.compose._client_rows import TableRows
from pfl_sklearn.estimation import GaussianMean
from pfl_sklearn.inspection._coefficients import find_feature, is_linear_model
from pfl_sklearn.linear_model import (
    PersonalizedLinearRegression,
    PersonalizedLogisticRegression,
    PersonalizedPoissonRegression,
)
from pfl_sklearn.linear_model._link import LinkRegression
from pfl_sklearn.linear_model._mixed._predictions import averaged, averaged_tail
from pfl_sklearn.priors import GaussianPrior

_MODELS = (
    PersonalizedLinearRegression,
    PersonalizedLogisticRegression,
    PersonalizedPoissonRegression,
    GaussianMean,
)
_NO_SHARE = 1e-9  # of the noise variance, or of the prior variance, that counts as none
_NO_STD = 1e-12  # standard deviation of the noise over the largest response, that counts as 0
_ZERO_RESPONSE = 1e-100  # stands for the largest response where all are 0
_SMALLEST_TAIL = 1e-300  # probability of a residual: the normal quantile of 0 is infinite


def _checked_model(estimator):
    """The innermost estimator; TypeError or ValueError if it has no residuals of one dimension."""
    check_is_fitted(estimator)
    fitted = _unfrozen(innermost_estimator(estimator))
    if not isinstance(fitted, (*_MODELS, LinkRegression)):
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


def residuals_of(
    estimator: Any,
    X: TableLike,
    y: TableLike,
    groups: TableLike,
    sample_weight: TableLike,
    held_out: bool,
    random_state: RandomState,
    known: dict[str, TableLike] | None = None,
) -> dict[str, Any]:
    """Residuals of the n rows with positive weights, and their variances by the model.

    They come as parameters of ResidualsDisplay.

    Parameters
    ----------
    estimator : fitted estimator
    X, y, groups, sample_weight : as for the estimator's ``fit``
    held_out : bool
        Whether fit did not see the rows.
    random_state : int, RandomState instance or None
        Of the residuals of classes and counts.
    known : dict, default=None
        What else the model's predictions take: exposure and offset.

    Returns
    -------
    dict
        clients (m,), those of these rows, and codes (n,), their positions in clients; fitted (n,);
        residuals (n,), times the root of the weight; expected (n,), the mean of a residual given
        its prediction, or None if unknown; standardized (n,), NaN where the model leaves no
        variance; variance_share (n,), the variance of a residual over that of the noise;
        fitted_label and residual_label.
    """
    fitted = _checked_model(estimator)
    rows, known = _present_rows(X, y, groups, sample_weight, known or {})
    rows, known = _rows_inside(estimator, rows, known)
    n = num_samples(rows.X)
    one_client = np.zeros(n, dtype=int)
    clients, codes = encode_clients(one_client if rows.ids is None else rows.ids, n)
    if is_classifier(fitted):
        of_rows = _residuals_of_classes(fitted, rows, known, held_out, random_state)
    elif isinstance(fitted, LinkRegression):
        of_rows = _residuals_of_link(fitted, rows, known, held_out, random_state)
    else:
        of_rows = _residuals_of_responses(fitted, rows, held_out)
    return {"clients": clients, "codes": codes, **of_rows}


def deviations_of(estimator: Any, feature: str | int | None) -> dict[str, Any]:
    """Deviations of the clients' intercepts or slopes, each in its own standard deviation.

    They come as parameters of ResidualsDisplay, or the reason does why there are none.
    A posterior mean varies around the population by the prior variance minus its posterior
    variance. Clients whose rows say nothing about the coefficient are left out.
    """
    fitted = _checked_model(estimator)
    label, reason = "deviation of the client", _without_deviations(fitted)
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
    reason = _without_variance(prior, share)
    if reason is not None:
        return {"deviation_label": label, "without_deviations": reason}
    informed = share < 1 - _NO_SHARE
    values = deviations[informed] / np.sqrt(prior * (1 - share[informed]))
    clients = fitted.clients_[informed]
    return {"deviation_label": label, "deviation_clients": clients, "deviations": values}


def _without_deviations(fitted):
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


def _without_variance(prior, share):
    """Why clients with these prior variances and shrinkages have no standardized deviations."""
    if np.isnan(prior) or np.isnan(share).all():
        return "the variance between clients, or that of a row, is unknown"
    if np.isinf(prior):
        return "clients share nothing: their prior variance is infinite"
    if not prior > 0:
        return "the variance between clients is 0"
    if not np.any(share < 1 - _NO_SHARE):
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
    own = design.vectors(fitted.coef_, fitted.intercept_)[:, at]
    population = design.vectors(fitted.population_coef_, fitted.population_intercept_)[at]
    share = design.vectors(fitted.shrinkage_, fitted.intercept_shrinkage_)[:, at]
    return f"deviation of the {label}", own - population, _prior_covariance(fitted)[at, at], share


def _prior_covariance(fitted):
    """Covariance between clients (p, p) that the posterior used, in the order of the design."""
    posterior = _plug_in(fitted)
    if not hasattr(posterior, "ratio"):  # mixtures and logistic models keep covariances only
        return fitted._between
    back = np.argsort(fitted._design.order)
    scaled = posterior.noise * posterior.ratio * np.outer(posterior.scale, posterior.scale)
    return scaled[np.ix_(back, back)]  # after a release, with the error of the release


def _plug_in(fitted):
    """Posterior of the clients given the variances, as a sampling variance is."""
    return getattr(fitted._posterior, "plug_in", fitted._posterior)


def _unfrozen(estimator):
    """The estimator inside a FrozenEstimator."""
    while isinstance(estimator, FrozenEstimator):
        estimator = estimator.estimator
    return estimator


def _present_rows(X, y, groups, sample_weight, known):
    """Rows with positive weights, as the outermost estimator takes them, and what is known."""
    known = {name: values for name, values in known.items() if values is not None}
    for name, values in known.items():
        check_one_per_row(name, values)
    known = {name: np.asarray(values) for name, values in known.items()}
    check_consistent_length(X, y, *known.values())
    if sample_weight is None:
        return TableRows(X, y, groups, None), known
    # Rows of weight 0 had no part in the fit, so their residuals have another variance.
    weights = check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
    at = np.flatnonzero(weights > 0)
    if len(at) == len(weights):
        return TableRows(X, y, groups, weights), known
    check_consistent_length(X, groups)
    known = {name: values[at] for name, values in known.items()}
    return TableRows(X, y, groups, weights).take(at), known


def _rows_inside(estimator, rows, known):
    """Rows and what is known as the innermost estimator gets them; TypeError for other wrappers."""
    # Each wrapper sees other rows: what it does to them has to be done again.
    while (inner := inner_estimator(estimator)) is not None:
        estimator = _unfrozen(estimator)
        if isinstance(estimator, Pipeline):
            rows = rows._replace(X=rows_behind_steps(estimator, rows.X, rows.ids))
        elif isinstance(estimator, ClientColumn):
            params = {} if rows.ids is None else {"groups": rows.ids}
            X, params = estimator._handed_on(rows.X, {**known, **params})
            rows = rows._replace(X=X, ids=params.pop("groups"))
            known = params
        elif isinstance(estimator, TransformedTargetRegressor):
            y = np.reshape(column_or_1d(rows.y), (-1, 1))
            rows = rows._replace(y=estimator.transformer_.transform(y).ravel())
        elif not hasattr(estimator, "best_estimator_"):
            raise TypeError(
                f"the rows inside {type(estimator).__name__} are unknown; give the "
                f"{type(inner).__name__} in it, with the rows that this one takes."
            )
        estimator = inner
    return rows, known


def _residuals_of_responses(fitted, rows, held_out):
    """What :func:`residuals_of` says of rows, for a model of means."""
    y = column_or_1d(rows.y, dtype=np.float64)
    assert_all_finite(y, input_name="y")
    predicted = fitted.predict(rows.X, groups=rows.ids)
    codes = fitted._encode_predict(rows.X, rows.ids)
    weights = np.ones(len(y)) if rows.weights is None else rows.weights
    population, variances, prior = _moments_of_predictions(fitted, rows.X, codes)
    seen = (codes >= 0) & (not held_out)
    noise = fitted.noise_variance_
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.nan_to_num(weights * variances / noise, nan=0.0, posinf=np.inf)
        # The prediction has moved towards a row that fit saw, so its residual varies less.
        share = np.where(seen, np.maximum(1 - share, 0.0), 1 + share)
        residuals = (y - predicted) * np.sqrt(weights)
        standardized = residuals / np.sqrt(noise * share)
    # Only rounding errors are left; where all responses are 0, the noise is one of the search.
    exact = noise <= (_NO_STD * max(np.abs(y).max(), _ZERO_RESPONSE)) ** 2
    standardized[exact | (share <= _NO_SHARE) | ~np.isfinite(share)] = np.nan
    expected = None
    if prior is not None and seen.any():
        expected = _expected_residuals(predicted - population, variances, prior, seen)
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


def _expected_residuals(deviations, variances, prior, seen):
    """Mean (n,) of the residual of a row of fit, given its prediction.

    A shrunken prediction is too close to the population's by a part that it predicts itself: with
    the prior variance s and the posterior variance m of the row's mean, by m / (s - m) times its
    distance.
    """
    # Where rows say nothing about the mean, the prediction is the population's: no distance.
    informed = seen & np.isfinite(prior) & (prior - variances > _NO_SHARE * prior)
    return deviations * np.divide(
        variances, prior - variances, out=np.zeros(len(prior)), where=informed
    )


def _moments_of_predictions(fitted, X, codes):
    """Population's predictions (n,), variances (n,) of the clients', and their prior variances.

    Variances are NaN without a posterior; prior variances are None unless the prior is normal.
    """
    normal = type(fitted.prior_) is GaussianPrior
    if not is_linear_model(fitted):
        population = np.full(len(codes), fitted.population_mean_)
        return population, *_variances_of_means(fitted, codes, normal)
    x, known = fitted._design.matrix(_features(X)), codes >= 0
    population = x @ fitted._design.vectors(fitted.population_coef_, fitted.population_intercept_)
    variances = np.full(len(x), np.nan)
    if not known.all():
        variances[~known] = fitted._variances(x[~known], codes[~known])
    if not hasattr(fitted, "_posterior"):
        return population, variances, None
    ordered = x[known][:, fitted._design.order]
    variances[known] = _plug_in(fitted).variances(ordered, codes[known])
    variances[~fitted._is_estimable(x)] = np.inf  # of no standardized residual, then
    prior = np.einsum("np,np->n", x @ _prior_covariance(fitted), x) if normal else None
    return population, variances, prior


def _variances_of_means(fitted, codes, normal):
    """Variances (n,) of the clients' means and their prior variances, for a GaussianMean."""
    new = fitted._new_client_std**2
    if not normal:
        return client_values(getattr(fitted, "stds_", None), new**0.5, codes) ** 2, None
    prior = fitted.prior_.covariance[0, 0]
    own = prior * fitted.shrinkage_ if hasattr(fitted, "shrinkage_") else None
    return client_values(own, new, codes), np.full(len(codes), prior)


def _residuals_of_classes(fitted, rows, known, held_out, random_state):
    """What :func:`residuals_of` says of rows, for a model of two classes.

    Randomized quantile residuals: for a label with the probability p we draw a uniform number
    below p, and take its normal quantile, with a plus for the second class.
    """
    y = np.asarray(column_or_1d(rows.y))
    unknown = ~np.isin(y, fitted.classes_)
    if unknown.any():
        raise ValueError(
            f"y holds {y[unknown].tolist()[0]!r}, but the classes of fit are "
            f"{fitted.classes_.tolist()}."
        )
    chances = fitted.predict_proba(rows.X, groups=rows.ids, integrate=False, **known)
    new = held_out | (fitted._encode_predict(rows.X, rows.ids) < 0)
    if new.any():
        chances[new] = fitted.predict_proba(rows.X, groups=rows.ids, **known)[new]
    second = y == fitted.classes_[1]
    drawn = 1 - check_random_state(random_state).uniform(size=len(y))  # above 0
    tail = np.maximum(drawn * chances[np.arange(len(y)), second.astype(int)], _SMALLEST_TAIL)
    residuals = np.where(second, -1, 1) * ndtri(tail)
    return {
        "fitted": chances[:, 1],
        "residuals": residuals,
        "expected": None,
        "standardized": residuals,
        "variance_share": np.ones(len(y)),
        "fitted_label": f"probability of {fitted.classes_[1]}",
        "residual_label": "randomized quantile residual",
    }


def _features(X):
    """Features (n, d) of a table; d may be 0."""
    return check_array(without_columns(X), dtype=np.float64, ensure_min_features=0)


def _residuals_of_link(fitted, rows, known, held_out, random_state):
    """What :func:`residuals_of` says of rows, for a regression with a link.

    Randomized quantile residuals: the normal quantile of a uniform number between the probabilities
    of smaller responses, and of those that are no larger.
    """
    y = fitted._checked_response(column_or_1d(rows.y), with_offset=True)  # rates have no quantile
    predicted = fitted.predict(rows.X, groups=rows.ids, integrate=False, **known)
    codes = fitted._encode_predict(rows.X, rows.ids)
    new, family = held_out | (codes < 0), fitted._row_family
    # Rows that fit saw have moved their client's mode; for the others its error counts.
    x = fitted._design.matrix(_features(rows.X))
    shifts, variances, _ = fitted._posterior_moments(x, codes) * new

    def pmf(block, predictors):
        return family.distribution(np.exp(predictors)).pmf(y[block, None])

    means = np.log(predicted) + shifts
    # A response that is no whole number has no probability of its own.
    chance = averaged(pmf, means, variances) if family.discrete else 0.0
    drawn = check_random_state(random_state).uniform(size=len(y))
    smaller = y - 1 if family.discrete else y
    below = averaged_tail(family, "cdf", smaller, means, variances) + drawn * chance
    above = averaged_tail(family, "sf", y, means, variances) + (1 - drawn) * chance
    # The smaller of the two has all its digits.
    tail = ndtri(np.maximum(np.minimum(below, above), _SMALLEST_TAIL))
    residuals = np.where(below < above, tail, -tail)
    return {
        "fitted": predicted,
        "residuals": residuals,
        "expected": None,
        "standardized": residuals,
        "variance_share": np.ones(len(y)),
        "fitted_label": "expected count" if family.discrete else "expectation",
        "residual_label": "randomized quantile residual",
    }


_LEVELS = 0.025, 0.5, 0.975  # of limits that hold 95 %, and of the median between them
_MOST_BINS, _ROWS_PER_BIN = 20, 20  # a mean of 20 rows has a fifth of a residual's spread


def binned_residuals(fitted: Floats, residuals: Floats, expected: Floats | None = None) -> Any:
    """Means by fitted value, in bins of equally many rows.

    Returns
    -------
    at, mean, std, expected : ndarrays of shape (n_bins,)
        Mean fitted value, mean residual, standard deviation of residuals, and mean of `expected`
        (None if that is None).
    """
    n_bins = int(np.clip(len(fitted) // _ROWS_PER_BIN, 1, _MOST_BINS))
    # Fitted values may be tied, where features are constant: equal edges are one edge.
    edges = np.unique(np.quantile(fitted, np.linspace(0, 1, n_bins + 1)))
    codes = np.searchsorted(edges[1:-1], fitted, side="right")
    counts = row_counts(codes, max(len(edges) - 1, 1))
    codes = (np.cumsum(counts > 0) - 1)[codes]  # of bins that hold rows
    counts = counts[counts > 0]
    at, mean = (segment_sums(each, codes, len(counts)) / counts for each in (fitted, residuals))
    squares = segment_sums((residuals - mean[codes]) ** 2, codes, len(counts))
    std = np.sqrt(squares / np.maximum(counts - 1, 1))  # 0 for a single row
    if expected is not None:
        expected = segment_sums(expected, codes, len(counts)) / counts
    return at, mean, std, expected


def quantile_limits(n: int, ranks: Integers | None = None) -> Any:
    """Quantiles of the ordered values of n standard normal ones.

    Parameters
    ----------
    n : int
    ranks : ndarray of shape (k,), default=None
        Which of them, from 1 to n. None: all.

    Returns
    -------
    lower, median, upper : ndarrays of shape (k,)
        At levels 2.5, 50 and 97.5 %: order statistics of uniform values are Beta(i, n + 1 - i).
    """
    ranks = np.arange(1, n + 1) if ranks is None else ranks
    return tuple(ndtri(betaincinv(ranks, n + 1 - ranks, p)) for p in _LEVELS)


def client_spreads(standardized, share, codes, n_clients):
    """Spread of each client's standardized residuals; clients that are fitted exactly have none.

    Parameters
    ----------
    standardized : ndarray of shape (n,)
        Standardized residuals; NaN where exact.
    share : ndarray of shape (n,)
        Variance of a residual over that of the noise.
    codes : ndarray of shape (n,)
    n_clients : int

    Returns
    -------
    dof, spread : ndarrays of shape (m,)
        Degrees of freedom, and root mean squares, which are 1 if the model holds.
    """
    usable = np.isfinite(standardized)
    share, codes = share[usable], codes[usable]
    squares = segment_sums(standardized[usable] ** 2 * share, codes, n_clients)
    # A share below 1 is what the fit left of a row's own residual; new rows count fully.
    dof = segment_sums(np.minimum(share, 1), codes, n_clients)
    total, has_residuals = segment_sums(share, codes, n_clients), dof > 0
    return dof[has_residuals], np.sqrt(squares[has_residuals] / total[has_residuals])


def spread_limits(dof):
    """95 % limits (m,) of the root mean square of normal values with these degrees of freedom."""
    return tuple(np.sqrt(chdtri(dof, tail) / dof) for tail in (_LEVELS[2], _LEVELS[0]))
