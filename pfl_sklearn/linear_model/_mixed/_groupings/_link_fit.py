"""Fit of a mixed model with a link and several groupings, of which the clients are the first."""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize_scalar

from pfl_sklearn.linear_model._algebra import estimable, square_root
from pfl_sklearn.linear_model._mixed._client_posterior import EffectPosterior
from pfl_sklearn.linear_model._mixed._fit import (
    check_covariance,
    check_fitted_to_several,
    coded_mean,
)
from pfl_sklearn.linear_model._mixed._groupings._fit import STOP, fitted_levels
from pfl_sklearn.linear_model._mixed._groupings._link_equations import (
    SETTLED,
    LinkModel,
    LinkPoints,
    LinkState,
)
from pfl_sklearn.linear_model._mixed._groupings._products import grouped_design
from pfl_sklearn.linear_model._mixed._groupings._scaled_rows import MOST_DENSE, scale_rows
from pfl_sklearn.linear_model._mixed._groupings._variance_bounds import fitted_variances
from pfl_sklearn.linear_model._mixed._groupings._variances import search_grouped_variances
from pfl_sklearn.linear_model._mixed._identifiability import is_centred, varying_columns
from pfl_sklearn.linear_model._mixed._marginal_likelihood import FAR_APART
from pfl_sklearn.linear_model._mixed._marginal_maximum import WeakPriors
from pfl_sklearn.linear_model._mixed._population_fit import (
    SUPPORTED_SHARE,
    TIGHT_SD,
    WEAK_SD,
    pooled_start,
)
from pfl_sklearn.linear_model._mixed._predictions import FittedRows
from pfl_sklearn.linear_model._mixed._reduction import MixedModelEstimates
from pfl_sklearn.linear_model._mixed._table import varies_within_clients
from pfl_sklearn.linear_model._row_space import find_row_space, space_of_left_out

_DISPERSION_REACH = 1.5  # of log dispersions around the start
_NEAR_BOUND, _MOST_WINDOWS = 0.1, 10  # of the same; windows move on from their bounds
_DISPERSION_TOLERANCE = 1e-4  # of the logarithm
_STEP = 0.05  # standard errors, of differences of slopes
_LARGEST_SHARE = 0.3  # of a variance, for the same
_LOG_STEP = 0.1  # the same, of the logarithm of a dispersion
_ROUNDING = 1e-12  # of an eigenvalue, over the trace
_TINY = np.finfo(float).tiny
_MOST_COEFFICIENTS_MOVED = (
    30  # coefficients of the population: each takes two fits near the maximum
)


class _Fit(NamedTuple):
    """Maximum for a family, and what found it."""

    points: LinkPoints
    result: Any  # SearchResult

    @property
    def criterion(self):
        """Minus twice the log-likelihood, with penalties."""
        model = self.points.model
        return self.result.equations.criterion - 2 * model.weights @ model.family.constants(model.y)


def fit_grouped_link(table, prior, family, options, rows):
    """MixedModelEstimates of a RegressionTable and GroupedRows, with FittedLevels.

    By Laplace's approximation for all groupings. `y` holds labels 0 and 1 or counts.
    """
    check_fitted_to_several(prior)
    known, mean = np.zeros(rows.columns.shape[1]), coded_mean(prior, family, table.n_random)
    if mean is not None:
        known[: table.n_random] = mean[0]
    covariance = _client_covariance(table, prior, family)
    # A penalty identifies columns that depend on one another.
    scaled = scale_rows(
        table, prior, covariance, rows, bool(options.population_penalty), by_size=True
    )
    if family.has_dispersion and not scaled.is_dense:
        raise ValueError(
            "family='negative_binomial' takes up to 4,000 effects besides those of the largest "
            "grouping, and 2**25 products of both numbers; let fewer coefficients vary, or take "
            "family='poisson'."
        )
    scaled = scaled._replace(parameters=_starts(scaled))
    model, start, weak = _model(table, rows.groupings, family, scaled, known, options)
    if family.has_dispersion:  # the pooled one holds the differences between levels
        model = replace(model, family=family.with_dispersion(0.0))
    try:
        fit = _fit_family(model, start, scaled.parameters, options)
    except np.linalg.LinAlgError:
        raise ValueError(
            "the rows hold no information on the population's coefficients, because the offset "
            f"(up to {np.abs(model.offset).max():g} in size) or the features leave rows without "
            "any; expected an offset near the predictors of the responses."
        ) from None
    fit, weak = _regularized(fit, start, scaled, options, rows, weak)
    if family.has_dispersion:
        fit = _fit_dispersion(fit, family, scaled.parameters, options)
    equations = fit.points.solved(fit.result.equations)
    fit = fit._replace(result=fit.result._replace(equations=equations))
    return _estimates(table, prior, rows, scaled, options, known, weak, fit)


def _client_covariance(table, prior, family):
    """Covariance (q, q) of the clients' coefficients if it is known or zero, otherwise None."""
    zero, covariance = np.zeros((table.n_random,) * 2), prior.known_covariance(table.n_random)
    if covariance is None and table.n_clients == 1:  # its deviation is part of the population
        return zero
    check_covariance(table, prior, covariance, family)
    return zero if covariance is None and not varying_columns(table, prior).any() else covariance


def _starts(scaled):
    """Parameters of all groupings, of which rare columns start near zero."""
    # A column of unit size has large values in the few rows in which it is not zero, whose
    # predictors would be tens of logits apart. Of a normal one the fourth moment is 3.
    parameters = []
    for grouping, searched in zip(scaled.groupings, scaled.parameters, strict=True):
        if searched.shape is not None:
            squares = grouping.columns**2
            share = 3 * squares.mean(axis=0) ** 2 / np.maximum((squares**2).mean(axis=0), _TINY)
            share = np.minimum(share, 1.0)
            if searched.shape.name == "spherical":
                share[:] = share.min()
            searched = searched._replace(root=searched.root * np.sqrt(share))
        parameters.append(searched)
    return parameters


def _is_pure(y, grouping):
    """Whether no level of a grouping has two classes, so that levels may be infinitely apart."""
    seen = grouping.codes >= 0
    return not varies_within_clients(y[seen], grouping.codes[seen], grouping.n_levels)


def _model(table, groupings, family, scaled, known, options):
    """LinkModel and LinkState at a fit without effects, and the WeakPriors that it needs."""
    offset = table.predictors(known[None])[:, 0]
    at = np.flatnonzero(scaled.free == (-1 if table.intercept is None else table.intercept))
    free = table._replace(
        columns=scaled.columns, intercept=int(at[0]) if len(at) else None, offset=offset
    )
    none = np.zeros((1, scaled.columns.shape[1]))
    pooled, family = pooled_start(free, family, none, 0, options.population_penalty)
    design = grouped_design(scaled.groupings, scaled.columns, scaled.is_dense)
    spread = [np.zeros((grouping.width,) * 2) for grouping in scaled.groupings]
    is_known = [parameters.shape is None for parameters in scaled.parameters]
    pure = [
        k
        for k, grouping in enumerate(scaled.groupings)
        if family.bounded and not is_known[k] and _is_pure(table.y, grouping)
    ]
    for k in pure:
        spread[k] = WEAK_SD**-2 * np.eye(len(spread[k]))
    names = [None, *(column.name for column in groupings)]
    order = np.argsort(scaled.layout.back)
    weak = WeakPriors(
        pooled.precision,
        np.diag(spread[scaled.layout.back[0]]),
        separated=pooled.separated,
        pure=tuple(names[order[k]] for k in pure if order[k] > 0),
    )
    rows = table.y, table.row_weights, offset
    model = LinkModel(design, scaled.groupings, family, *rows, np.diag(pooled.precision), spread)
    n_effects = sum(grouping.n_effects for grouping in scaled.groupings[1:])
    outer = np.append(np.zeros(n_effects), pooled.coefficients)
    none = np.zeros(len(pooled.precision))
    return model, LinkState(np.zeros(scaled.groupings[0].n_effects), outer, none), weak


def _fit_family(model, start, parameters, options):
    """The _Fit of a LinkModel from a LinkState."""
    points = LinkPoints(model, start)
    limits = _limits(model, options)
    return _Fit(points, search_grouped_variances(points, parameters, 1.0, limits))


def _limits(model, options):
    """Limits of a search, of iterations and gain."""
    return options.max_iter, options.tol if model.design.dense else STOP


def _regularized(fit, start, scaled, options, rows, weak):
    """The fit, under tight priors if the data do not support how far levels are apart."""
    spreads = _spreads(fit)
    is_unknown = np.array([parameters.shape is not None for parameters in scaled.parameters])
    diverged = np.flatnonzero(is_unknown & (spreads > FAR_APART))
    if not len(diverged):
        return fit, weak
    penalties = list(fit.points.model.spread)
    for k in diverged:
        penalties[k] = TIGHT_SD**-2 * np.eye(len(penalties[k]))
    model = replace(fit.points.model, spread=penalties)
    tight = _fit_family(model, start, scaled.parameters, options)
    # So weak a prior hardly moves a spread that the data support.
    if np.all(_spreads(tight)[diverged] >= SUPPORTED_SHARE * spreads[diverged]):
        return fit, weak
    names = [None, *(column.name for column in rows.groupings)]
    order = np.argsort(scaled.layout.back)
    named = tuple(names[order[k]] for k in diverged if order[k] > 0)
    first = scaled.layout.back[0]
    weak = weak._replace(
        spread=np.diag(penalties[first]), runaway=first in diverged, far_apart=named
    )
    return tight, weak


def _spreads(fit):
    """Standard deviations (K,) of the predictors between levels of each grouping."""
    equations = fit.result.equations
    pairs = zip(fit.points.model.groupings, equations.roots, strict=True)
    return np.array([np.sqrt(np.mean(np.sum((g.columns @ root) ** 2, 1))) for g, root in pairs])


def _fit_dispersion(fit, family, parameters, options):
    """The _Fit at the likeliest dispersion, from one without any."""
    limit, model = fit, fit.points.model

    def fit_at(family):
        nonlocal fit  # the last one is near the next one
        roots = fit.result.equations.roots
        starts = [
            searched
            if searched.shape is None
            else searched._replace(root=np.linalg.solve(searched.turn, root))
            for searched, root in zip(parameters, roots, strict=True)
        ]
        fit = _fit_family(replace(model, family=family), fit.points.state, starts, options)
        return fit

    def criterion(log):
        try:
            return fit_at(family.with_dispersion(np.exp(log))).criterion
        except np.linalg.LinAlgError:  # so large that rows hold no information
            return np.inf

    mean = family.mean(limit.result.equations.predictors)
    moments = family.dispersion_by_moments(model.y, mean, model.weights)
    least = family.least_dispersion(np.average(model.y, weights=model.weights))
    best = np.log(max(moments, least))
    for _ in range(_MOST_WINDOWS):
        low, high = best - _DISPERSION_REACH, best + _DISPERSION_REACH
        search: Any = {"method": "bounded", "options": {"xatol": _DISPERSION_TOLERANCE}}
        best = minimize_scalar(criterion, bounds=(low, high), **search).x
        if low + _NEAR_BOUND < best < high - _NEAR_BOUND:
            break
    return min(limit, fit_at(family.with_dispersion(np.exp(best))), key=_criterion)


def _criterion(fit):
    return fit.criterion


def _estimates(table, prior, rows, scaled, options, known, weak, fit):
    equations, layout, q = fit.result.equations, scaled.layout, table.n_random
    model, p, converged = fit.points.model, scaled.columns.shape[1], fit.points.converged
    variances = fitted_variances(
        fit.result,
        scaled.parameters,
        scaled.backs,
        layout.back,
        1.0,
        fit.points if model.design.dense else None,
        _limits(model, options),
    )
    effects, coefficients = layout.solution(equations)
    shifts = [equations.shifts[k] for k in layout.back]
    back, client_back = layout.population.back, layout.frames[0].back
    population, deviations = known + back @ coefficients, np.zeros((table.n_clients, len(known)))
    deviations[:, :q] = effects[0] @ client_back.T
    posterior = _posterior(fit, scaled)
    root = posterior.inverse_root[-p:, -p:] if p else np.zeros((0, 0))
    # Under a weak prior the curvature of the likelihood means nothing.
    is_regular = not (weak.separated or weak.pure or weak.far_apart or weak.spread.any())
    is_exact = model.design.dense and fit.result.converged
    if options.uncertainty == "full" and p and is_regular and is_exact:
        joint = _joint_root(fit, root, variances)
        if joint is not None:
            # Levels follow an error of the population, so their errors hold its own.
            border = posterior.inverse_root[:, -p:] @ np.linalg.solve(root, joint)
            inverse_root = np.hstack([posterior.inverse_root[:, :-p], border])
            posterior, root = posterior._replace(inverse_root=inverse_root), joint
    covariances = layout.covariances(equations)
    is_estimated = scaled.parameters[layout.back[0]].shape is not None
    is_shaped = is_estimated and is_centred(table, prior)
    if table.n_clients == 1 and prior.covariance is None:
        covariances[0] = np.full((q, q), np.nan)
    shift = shifts[0] @ client_back.T
    identified, row_space = _identified(table, rows.columns, scaled, prior, weak.slopes)
    return MixedModelEstimates(
        population[None],
        back @ root @ root.T @ back.T,
        (population + deviations)[:, None],
        posterior,
        prior.with_values(population[:q], covariances[0]),
        covariances[0],
        None,
        -0.5 * (fit.criterion - equations.penalties),
        fit.result.n_iter,
        fit.result.converged,
        row_space=row_space,
        estimable=identified[None],
        centre=scaled.centre if is_shaped else None,
        effects=EffectPosterior(np.eye(q), 1, 1, shift, None, None),
        family=model.family,
        modes_found=converged,
        weak=weak,
        levels=fitted_levels(rows, scaled, effects, covariances, table.intercept, shifts),
        variances=variances,
        rows=FittedRows(equations.predictors, model.changes(equations.shifts), equations.leverages),
    )


def _posterior(fit, scaled):
    """GroupingsPosterior, whose equations eliminate the clients."""
    points, equations, layout = fit.points, fit.result.equations, scaled.layout
    order = [layout.back[0], *(k for k in range(len(layout.back)) if k != layout.back[0])]
    if order[0] > 0:
        inner, outer = equations.standardized
        effects = [inner, *(e.ravel() for e in equations.products.by_level(outer))]
        first, *others = (effects[k] for k in order)
        population = outer[equations.products.n_outer_effects :]
        groupings = [scaled.groupings[k] for k in order]
        dense = sum(map(len, others)) + len(population) <= MOST_DENSE
        design = grouped_design(groupings, scaled.columns, dense)
        model = replace(points.model, design=design, groupings=groupings)
        state = LinkState(first, np.concatenate([*others, population]), points.state.tilt)
        equations = LinkPoints(model, state).mode([equations.roots[k] for k in order])
        layout = layout._replace(back=np.argsort(order)[layout.back])
    return layout.posterior(equations)


def _identified(table, columns, scaled, prior, precision):
    """Whether (p,) rows (n, p) determine the population's coefficients, or a penalty does.

    Also the RowSpace by which they do not. `precision` is that of the free ones (f,).
    """
    first = 0 if prior.mean is None else len(scaled.layout.frames[0].positions)
    result, free = np.ones(columns.shape[1], dtype=bool), columns[:, first:]
    if len(scaled.free) == free.shape[1]:
        return result, None
    if precision.any():
        normal, at = free.T @ free, scaled.free - first
        normal[at, at] += len(columns) * (precision > 0)
        result[first:] = estimable(normal)
        return result, find_row_space(table, np.flatnonzero(~result), first)
    space = space_of_left_out(table, scaled.free, first)
    result[first:] = np.isin(np.arange(first, len(result)), scaled.free)
    if space is not None:
        result &= ~space.unidentified_coefficients(len(result))
    return result, space


def _joint_root(fit, root, variances):
    """Root (p, p) of the population's covariance by the information in all parameters, or None.

    The covariance is that of the maximum as all parameters move: a slope (p, t) of the best
    population in the variances, and their information (t, t) with the population at its best.
    None if differences find no maximum.
    """
    information = np.linalg.inv(root @ root.T)
    if len(root) <= _MOST_COEFFICIENTS_MOVED:  # a small part, which takes most of the time
        information = information - _tilt_slopes(fit, root)
    moves = _moves(fit, variances)
    n_moves = len(moves) + (fit.points.model.family.dispersion > 0)
    slopes, others = np.empty((len(root), n_moves)), np.empty((n_moves, n_moves))
    for j, move in enumerate(moves):
        ends = [move.end(fit, sign) for sign in (1, -1)]
        slopes[:, j] = (ends[0].solution[1] - ends[1].solution[1]) / 2
        others[j, : len(moves)] = _slope_changes(moves, ends)
    if n_moves > len(moves):
        ends = [_at_dispersion(fit, np.exp(sign * _LOG_STEP)) for sign in (1, -1)]
        equations = [end.result.equations for end in ends]
        slopes[:, -1] = (equations[0].solution[1] - equations[1].solution[1]) / 2
        others[-1, :-1] = others[:-1, -1] = _slope_changes(moves, equations)
        others[-1, -1] = (ends[0].criterion - 2 * fit.criterion + ends[1].criterion) / 2
    others = (others + others.T) / 2
    if n_moves and np.linalg.eigvalsh(others)[0] <= 0:
        return None
    return square_root(np.linalg.inv(information) + slopes @ np.linalg.solve(others, slopes.T))


def _slope_changes(moves, ends):
    """Changes (t,) of half the slopes of the criterion along moves, for half of the way."""
    slopes = np.array([[move.slope(end) for move in moves] for end in ends])
    return (slopes[0] - slopes[1]) / 4  # the criterion is minus twice the log-likelihood


def _at_dispersion(fit, factor):
    """The fit with equations at a multiple of the dispersion."""
    model = fit.points.model
    family = model.family.with_dispersion(factor * model.family.dispersion)
    points = LinkPoints(replace(model, family=family), fit.points.state)
    equations = points.at(fit.result.equations.roots, tol=SETTLED)
    return _Fit(points, fit.result._replace(equations=equations))


def _tilt_slopes(fit, root):
    """Slopes (p, p) of the addition to the population's score in the population."""
    equations, changes, tilts = fit.result.equations, np.empty_like(root), np.empty_like(root)
    for j, pull in enumerate(np.linalg.inv(root)):
        ends = [fit.points.pulled(equations, sign * _STEP * pull) for sign in (1, -1)]
        changes[:, j] = ends[0].solution[1] - ends[1].solution[1]
        tilts[:, j] = ends[0].tilt - ends[1].tilt
    slopes = np.linalg.solve(changes.T, tilts.T).T
    return (slopes + slopes.T) / 2


class _Move(NamedTuple):
    """Change (q, q) of the covariance of grouping k, for differences."""

    k: int
    change: np.ndarray

    def end(self, fit, sign):
        """Equations after a step that way."""
        roots = list(fit.result.equations.roots)
        roots[self.k] = _root(roots[self.k] @ roots[self.k].T + sign * self.change)
        return fit.points.at(roots, tol=SETTLED)

    def slope(self, equations):
        """Slope of the criterion along the change."""
        return np.vdot(self.change, equations.slopes.of(self.k))


def _moves(fit, variances):
    """Moves of the estimated covariances that may go both ways."""
    moves, roots = [], fit.result.equations.roots
    errors = np.sqrt(np.diag(variances.errors))
    for (k, direction), error in zip(variances.directions, errors, strict=False):
        if variances.known[k]:
            continue
        # A variance of 0 beside those that move stays where it is.
        covariance, moving = roots[k] @ roots[k].T, np.flatnonzero(direction.any(axis=0))
        least = np.linalg.eigvalsh(covariance[np.ix_(moving, moving)])[0]
        share = _LARGEST_SHARE * least / np.linalg.norm(direction, 2)
        change = min(_STEP * error, share) * direction
        lowest = min(np.linalg.eigvalsh(covariance + sign * change)[0] for sign in (1, -1))
        if least > 0 and lowest > -_ROUNDING * np.trace(covariance):
            moves.append(_Move(k, change))
    return moves


def _root(covariance):
    """Root (q, q) of a covariance, whose columns are near those of a search."""
    variances = np.diag(covariance)
    if np.array_equal(covariance, np.diag(variances)):
        return np.diag(np.sqrt(np.maximum(variances, 0.0)))
    try:
        return np.linalg.cholesky(covariance)
    except np.linalg.LinAlgError:
        return square_root(covariance)
