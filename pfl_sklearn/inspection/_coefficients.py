"""One coefficient of all clients of a linear model, with intervals: the caterpillar plot."""

from __future__ import annotations

from numbers import Integral
from typing import Any, NamedTuple, Self, cast

import numpy as np
import pandas as pd
from scipy.special import ndtri

from pfl_sklearn._client_tables import class_quantity
from pfl_sklearn._parameters import with_parameters
from pfl_sklearn._typing import Floats, TableLike
from pfl_sklearn._unwrap import feature_names_of, innermost_estimator
from pfl_sklearn.base import check_level
from pfl_sklearn.inspection import _drawing as drawing
from pfl_sklearn.inspection._drawing import COLORS

# A "level" is the intercept at the features' means; where all features are 0 may be far from any
# row.
_INTERCEPT, _LEVEL = "intercept", "level"


class Coefficients(NamedTuple):
    """One coefficient of m clients and of the population, with intervals.

    Bounds are NaN without a posterior, and infinite if the rows say nothing.
    """

    label: str  # for an axis
    clients: np.ndarray  # (m,)
    values: np.ndarray  # (m,)
    lower: np.ndarray  # (m,)
    upper: np.ndarray  # (m,)
    population: float
    population_lower: float
    population_upper: float


class InterceptAt(NamedTuple):
    """The intercept at means (d,) of features: the predictor of a row with these values."""

    names: list[str]
    means: np.ndarray


def is_linear_model(estimator: Any) -> bool:
    """Whether an estimator has one coefficient vector per client."""
    return "population_coef_" in getattr(estimator, "_population_attributes", ())


def coefficients_of(estimator: Any, feature: Any, *, output: int, level: float) -> Coefficients:
    """Coefficients of one feature, or intercepts, of a fitted linear model or a wrapper around one.

    `feature` is "intercept", the name or index of a feature, or an InterceptAt; `output` is the
    class of a multinomial model. ValueError if there is no such coefficient or `level` is out of
    range.
    """
    fitted = _linear_model_in(estimator)
    check_level(level)
    quantile = ndtri(0.5 + level / 2)  # two-sided intervals
    if isinstance(feature, InterceptAt):
        label = "intercept at the features' means"
        moments = _predictors_at(fitted, _design_row(estimator, feature))
        (values, stds), (population, population_std) = moments
    else:
        index, label = find_feature(estimator, feature)
        values, stds = _values_of(fitted, "", index)
        population, population_std = _values_of(fitted, "population_", index)
    if values.ndim == 2:  # multinomial: one coefficient for each class
        if not 0 <= output < values.shape[1]:
            raise ValueError(f"output={output!r}, but the model has {values.shape[1]} classes.")
        label = f"{label}, class {fitted.classes_[output]}"
        values, stds = values[:, output], stds[:, output]
        population, population_std = population[output], population_std[output]
    else:
        label = class_quantity(fitted, f"{label}, log odds") or label
    return Coefficients(
        label,
        fitted.clients_,
        values,
        values - quantile * stds,
        values + quantile * stds,
        float(population),
        float(population - quantile * population_std),
        float(population + quantile * population_std),
    )


def _linear_model_in(estimator):
    """Fitted linear model inside wrappers; ValueError if there is none."""
    fitted = innermost_estimator(estimator)
    if not is_linear_model(fitted):
        raise ValueError(
            "expected a fitted linear model with one coefficient vector per client, such as "
            f"PersonalizedLinearRegression; got {type(fitted).__name__}."
        )
    fitted._require_fitted("coef_")
    return fitted


def resolve_feature(estimator: Any, feature: Any) -> Any:
    """The feature as given; for None and "level", the intercept at the features' means."""
    # That is the plain intercept if the model has no features or does not keep their means.
    fitted, names = _linear_model_in(estimator), _feature_names(estimator)
    if feature is not None and (feature != _LEVEL or _LEVEL in names):  # a feature's name wins
        return feature
    # Private fits and models of one client keep no means, which would be somebody's data.
    if not (hasattr(fitted, "_evidence") and fitted.fit_intercept and names):
        return _INTERCEPT
    means = fitted._evidence.moments.means  # of the intercept, the features and the response
    return InterceptAt(names, means[1:-1])


def _feature_names(estimator):
    """Names of the features of a linear model, or x0, x1, ..."""
    coef = innermost_estimator(estimator).coef_
    return feature_names_of(estimator) or [f"x{k}" for k in range(coef.shape[-1])]


def _design_row(estimator, feature):
    """Row (p,) of the design at the means of an InterceptAt; ValueError for other features."""
    names = _feature_names(estimator)
    if names != feature.names or not innermost_estimator(estimator).fit_intercept:
        raise ValueError(
            f"local must have an intercept and the features {feature.names[:20]}, to be compared "
            f"at their means; got {names[:20]}. Give feature=."
        )
    return np.concatenate([[1.0], feature.means])


def _predictors_at(fitted, row):
    """Predictors and standard deviations at a row (p,): of the clients, and of the population."""
    values = fitted.intercept_ + fitted.coef_ @ row[1:]
    population = fitted.population_intercept_ + fitted.population_coef_ @ row[1:]
    stds, population_stds = np.full_like(values, np.nan), np.full_like(population, np.nan)
    # At the means of another model's rows the predictor may not be estimable.
    if hasattr(fitted, "_posterior") and fitted._estimable_rows(row[None])[0]:
        m, outputs = len(values), np.eye(np.size(population))
        rows, codes = np.tile(row, (m, 1)), np.arange(m)
        variances = [fitted._variances(rows, codes, contrast) for contrast in outputs]
        stds = np.sqrt(np.transpose(variances)).reshape(values.shape)
        errors = fitted._errors.variances(np.kron(outputs, row))
        population_stds = np.sqrt(errors).reshape(np.shape(population))
    return (values, stds), (np.asarray(population), population_stds)


def find_feature(estimator: Any, feature: Any) -> tuple[int | None, str]:
    """Index of a feature of a linear model (None: the intercept), and a label of its coefficient.

    Parameters are those of `coefficients_of`; ValueError if there is no such coefficient.
    """
    fitted = innermost_estimator(estimator)
    names = _feature_names(estimator)
    index = _feature_index(feature, names, fitted.fit_intercept)
    return index, _INTERCEPT if index is None else f"coefficient of {names[index]}"


def local_coefficients(model, shown, feature, *, output, level):
    """The same coefficient of a second model, in the order of the clients of `shown`.

    None if there is no second model.
    """
    if model is None:
        return None
    local = coefficients_of(model, feature, output=output, level=level)
    # By id: the second model may have more clients, or another order.
    codes = pd.Index(local.clients).get_indexer(pd.Index(shown.clients))
    if (codes < 0).any():
        missing = shown.clients[codes < 0].tolist()[0]
        raise ValueError(f"local lacks the client {missing!r}; fit it to the same clients.")
    by_client = ("clients", "values", "lower", "upper")
    return local._replace(**{name: getattr(local, name)[codes] for name in by_client})


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


def _values_of(fitted, prefix, index):
    """Values and standard deviations of a coefficient; these are NaN without a posterior.

    With the prefix "" they are the clients', (m,) or (m, n_classes); with "population_" numbers or
    (n_classes,).
    """
    name = f"{prefix}intercept_" if index is None else f"{prefix}coef_"
    values = np.asarray(getattr(fitted, name))
    # Estimates under a Laplace prior are modes, without a posterior.
    stds = np.asarray(getattr(fitted, f"{name}std_", np.full_like(values, np.nan)))
    return (values, stds) if index is None else (values[..., index], stds[..., index])


_LOCAL_OFFSET = 0.3  # of local below personalized estimates, as a share of a row


class CoefficientPanel(NamedTuple):
    """Content of one axes of a CoefficientDisplay."""

    coefficients: Coefficients
    local: Coefficients | None
    truth: Floats | None  # (n_clients,)
    unit: str = "client"  # or the name of another grouping


@with_parameters
class CoefficientDisplay:
    """Coefficients of all clients around the population's, sorted, with their intervals.

    Few clients are drawn one per row (a caterpillar plot), many as points over their rank. The line
    is the population's coefficient, the band its interval. Local coefficients are rings, whose
    whiskers are cut at the axes.

    Parameters
    ----------
    panels : list of CoefficientPanel
        One per axes, with the coefficients of the clients and the population, and local and true
        coefficients, or None.
    level : float in (0, 1), default=0.95
        Posterior probability of the intervals.

    Attributes
    ----------
    axes_ : ndarray of matplotlib Axes, of shape (n_panels,)
        The axes, one per panel.
    ax_, figure_ : matplotlib Axes and Figure
        The first of the axes, and their figure.

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn.inspection import CoefficientDisplay
    >>> from pfl_sklearn.linear_model import PersonalizedLinearRegression
    >>> rng = np.random.default_rng(0)
    >>> clinic, X = np.repeat(list("abcd"), 10), rng.normal(size=(40, 1))
    >>> slopes = np.repeat(rng.normal(size=4), 10)
    >>> y = slopes * X[:, 0] + rng.normal(size=40)
    >>> model = PersonalizedLinearRegression().fit(X, y, groups=clinic)
    >>> CoefficientDisplay.from_estimator(
    ...     model, feature=["level", "x0"])  # doctest: +SKIP
    """

    panels: list[CoefficientPanel]
    level: float = 0.95

    @classmethod
    def from_estimator(
        cls,
        estimator: Any,
        *,
        feature: str | int | list[str | int | None] | None = None,
        level: float = 0.95,
        kind: str = "auto",
        truth: TableLike = None,
        local: Any = None,
        output: int = 0,
        ax: Any = None,
    ) -> Self:
        """Plot one or more coefficients of a fitted linear model.

        Parameters
        ----------
        estimator : fitted PersonalizedLinearRegression or PersonalizedLogisticRegression, or a \
                pipeline, wrapper or search around one
            The model. After a scaler, coefficients are those of the scaled features.
        feature : "level", "intercept", str, int, or list of these, default=None
            Name or index of a feature. "intercept": the intercept, where all features are 0, which
            may be far from any row. None or "level": the intercept at the features' means over all
            rows of the fit, or the intercept itself for private fits and models of one client,
            which keep no means. A list draws one axes per feature; rows are then in the order of
            the first feature, points are sorted in each axes.
        level : float in (0, 1), default=0.95
            Posterior probability of the intervals, which are Gaussian. Estimators without a
            posterior are drawn without intervals.
        kind : {"auto", "rows", "points"}, default="auto"
            "auto" draws rows for up to 60 clients.
        truth : Series or DataFrame indexed by client, or array-like of shape (n_clients,) or \
                (n_clients, n_features), default=None
            True values to add to the plot, in the order of ``clients_`` unless indexed, with one
            column per feature of a list.
        local : fitted estimator, default=None
            Second model with local coefficients, such as one fitted with
            ``GaussianPrior(covariance=np.inf)`` (for classes and counts a large number).
        output : int, default=0
            Class of a multinomial model, as a position in ``classes_``.
        ax : matplotlib Axes, or a sequence of one per feature, default=None
            Where to draw. None: a new figure.

        Raises
        ------
        ValueError
            - If `estimator` is not a linear model with one coefficient vector per client.
            - If it has no coefficient `feature`.
            - If `truth`, `local` or `ax` does not match the clients or features.
        """
        if isinstance(feature, list | tuple):
            features, truths = list(feature), _truth_by_feature(truth, len(feature))
        else:
            features, truths = [feature], [truth]
        if not features:
            raise ValueError("feature must name at least one coefficient; got an empty list.")
        panels = []
        for requested, column in zip(features, truths, strict=True):
            resolved = resolve_feature(estimator, requested)
            shown = coefficients_of(estimator, resolved, output=output, level=level)
            matched = local_coefficients(local, shown, resolved, output=output, level=level)
            true_values = None if column is None else drawing.truth_of(shown.clients, column)
            panels.append(CoefficientPanel(shown, matched, true_values))
        display = cls(panels=panels, level=level).plot(kind=kind, ax=ax)
        return cast(Self, drawing.with_coverage(display, estimator))

    @classmethod
    def from_effects(
        cls,
        estimator: Any,
        *,
        grouping: Any = None,
        term: str = "intercept",
        errors: str = "conditional",
        level: float = 0.95,
        kind: str = "auto",
        ax: Any = None,
    ) -> Self:
        """Plot the effects of clients or levels: deviations from the population, which is at 0.

        Conditional intervals leave out the error of the population, which all effects share. They
        are for comparisons of clients, or levels, with one another.

        Parameters
        ----------
        estimator : fitted mixed model, or a pipeline, wrapper or search around one
            Any with a method ``effects``.
        grouping : "client" or the name of a grouping column, default=None
            Whose effects to draw; None: the clients'.
        term : str, default="intercept"
            The coefficient, as in the table of ``effects``.
        errors : {"conditional", "total"}, default="conditional"
            As for ``effects``: whether the errors of the population and of the variances count.
        level : float in (0, 1), default=0.95
            Posterior probability of the intervals.
        kind : {"auto", "rows", "points"}, default="auto"
            "auto" draws rows for up to 60 effects.
        ax : matplotlib Axes, default=None
            Where to draw. None: a new figure.

        Raises
        ------
        ValueError
            If `estimator` is no linear model with one coefficient vector per client, and for an
            unknown grouping, term or kind of errors.
        AttributeError
            If it has no Gaussian posterior of effects.
        """
        fitted, names = _linear_model_in(estimator), feature_names_of(estimator)
        chosen = "client" if grouping is None else grouping
        table = fitted.effects(chosen, level, errors, names)
        shown = table[table["term"] == term]
        if not len(shown):
            terms = list(table["term"].unique())
            raise ValueError(f"term must be one of {terms[:20]}; got {term!r}.")
        label = class_quantity(fitted, f"{term}, log odds") or term
        effects = Coefficients(
            f"effect on the {label}",
            shown["level"].to_numpy(),
            shown["estimate"].to_numpy(),
            shown["lower"].to_numpy(),
            shown["upper"].to_numpy(),
            0.0,
            np.nan,  # the population has no error of its own here
            np.nan,
        )
        panel = CoefficientPanel(effects, None, None, str(chosen))
        display = cls(panels=[panel], level=level).plot(kind=kind, ax=ax)
        return cast(Self, drawing.with_coverage(display, estimator))

    def plot(self, *, kind: str = "auto", ax: Any = None) -> Self:
        """Draw the display.

        Parameters
        ----------
        kind, ax : object
            As in :meth:`from_estimator`.
        """
        n_clients = len(self.panels[0].coefficients.clients)
        rows = drawing.in_rows(kind, n_clients)
        axes = drawing.axes_for_clients(ax, n_clients, rows, len(self.panels))
        # Rows run through all panels, so one order serves them all.
        order = np.argsort(self.panels[0].coefficients.values, kind="stable")
        for one, panel in zip(axes, self.panels, strict=True):
            if rows:
                _draw_rows(one, panel, order, self.level)
                one.grid(axis="y", lw=0.4, alpha=0.5)
            else:
                _draw_points(one, panel, self.level)
        if rows:
            drawing.name_rows(axes[0], self.panels[0].coefficients.clients[order])
            _legend_of_rows(axes, own_figure=ax is None)
        else:
            drawing.legend_inside(axes[0], "upper left")
        self.axes_, self.ax_, self.figure_ = axes, axes[0], axes[0].figure
        return self


def _draw_rows(ax, panel, order, level):
    """One row per client, in the given order."""
    shown, at = panel.coefficients, np.arange(len(order))
    _draw_population(ax.axvline, ax.axvspan, shown)
    drawing.draw_intervals(ax, at, shown.lower[order], shown.upper[order], level, rows=True)
    if panel.local is not None:
        below = at - _LOCAL_OFFSET
        _draw_whiskers(ax, below, panel.local.lower[order], panel.local.upper[order])
        drawing.draw_local(ax, panel.local.values[order], below)
    drawing.draw_personalized(ax, shown.values[order], at, rows=True)
    if panel.truth is not None:
        drawing.draw_truth(ax, panel.truth[order], at, rows=True)
    ax.set_xlabel(shown.label)


def _draw_points(ax, panel, level):
    """Over the rank of every client."""
    shown = panel.coefficients
    order = np.argsort(shown.values, kind="stable")
    at = np.arange(len(order))
    _draw_population(ax.axhline, ax.axhspan, shown)
    if panel.local is not None:
        # Smaller marks for more clients, down to what can be seen.
        local, size = panel.local.values[order], float(np.clip(300 / len(at), 2, 6))
        ax.plot(at, local, ".", color=COLORS["local"], ms=size, alpha=0.6, label="local", zorder=1)
    drawing.draw_intervals(ax, at, shown.lower[order], shown.upper[order], level, rows=False)
    if panel.truth is not None:
        drawing.draw_truth(ax, at, panel.truth[order], rows=False)
    drawing.draw_personalized(ax, at, shown.values[order], rows=False)
    ax.set(xlabel=f"{panel.unit}, sorted", ylabel=shown.label)


def _draw_population(line, span, shown):
    """Draw the population's coefficient, with its interval as a band if it has one."""
    color = COLORS["population"]
    # The error is infinite if clients share nothing, and NaN if it is not estimable.
    if np.isfinite([shown.population_lower, shown.population_upper]).all():
        span(shown.population_lower, shown.population_upper, color=color, alpha=0.15, lw=0)
    line(shown.population, color=color, lw=1, label="population")


def _draw_whiskers(ax, at, lower, upper):
    """Draw intervals of local estimates without stretching the axes."""
    from matplotlib.collections import LineCollection

    finite = np.isfinite(lower) & np.isfinite(upper)  # few rows may not determine a coefficient
    segments = np.stack([np.c_[lower, at], np.c_[upper, at]], axis=1)[finite]
    ax.add_collection(LineCollection(segments, colors=COLORS["local"], lw=0.8), autolim=False)


def _legend_of_rows(axes, own_figure):
    """Draw one legend for all panels, below our own figure or the first of the given axes."""
    if len(axes) == 1 or not own_figure:
        drawing.legend_below(axes[0])
        return
    handles, labels = axes[0].get_legend_handles_labels()
    axes[0].figure.legend(
        handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize="small"
    )


def _truth_by_feature(truth, n_features):
    """One column of true values per feature, or None for each."""
    if truth is None:
        return [None] * n_features
    if np.ndim(truth) != 2 or np.shape(truth)[1] != n_features:
        raise ValueError(
            f"truth must have one column per feature, {n_features}; got the shape "
            f"{np.shape(truth)}."
        )
    if hasattr(truth, "iloc"):  # columns of a data frame keep the index, by which we match
        return [truth.iloc[:, k] for k in range(n_features)]
    return list(np.asarray(truth).T)
