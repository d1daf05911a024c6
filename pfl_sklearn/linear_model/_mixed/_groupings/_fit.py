"""Fit of a linear mixed model with several groupings, of which the clients are the first."""

import os
from typing import Any, NamedTuple

import numpy as np
from sklearn.base import clone

from pfl_sklearn._warnings import format_names, warn_caller
from pfl_sklearn.linear_model._mixed._groupings._averaging import with_averaged_variances
from pfl_sklearn.linear_model._mixed._groupings._products import products_of
from pfl_sklearn.linear_model._mixed._groupings._scaled_rows import MOST_DENSE, scale_rows
from pfl_sklearn.linear_model._mixed._groupings._variance_bounds import fitted_variances
from pfl_sklearn.linear_model._mixed._groupings._variances import (
    SuccessiveEquations,
    search_grouped_variances,
)
from pfl_sklearn.linear_model._mixed._identifiability import (
    check_covariance_identified,
    check_noise_identified,
    is_centred,
    varying_columns,
)
from pfl_sklearn.linear_model._mixed._reduction import MixedModelEstimates
from pfl_sklearn.linear_model._row_space import space_of_left_out

_BYTES_PER_EFFECT = 14_000  # at the peak of a larger fit, measured: 200 draws, probes and copies
STOP = 1e-2  # root of the gain, in twice the nats, at which a search by random signs ends


class FittedLevels(NamedTuple):
    """Estimates of the levels of a grouping."""

    name: Any  # of the column
    levels: np.ndarray  # (L,), sorted
    positions: np.ndarray  # (q,), of the coefficients that vary by level, in the table's order
    effects: np.ndarray  # (L, q), of the data's columns
    covariance: np.ndarray  # (q, q)
    n_rows: np.ndarray  # (L,)
    prior: Any  # GroupingPrior, with its covariance
    mean_row: Any  # (q,), the columns' means, where the covariance has its shape; else None
    shifts: Any = None  # (L, q), of the posterior means from the modes, behind a link

    @property
    def part(self):
        """Name of the part of a summary, also of a column without a name."""
        column = "" if isinstance(self.name, str) else "column "
        return f"between {column}{self.name}"

    def terms(self, design):
        """Names of the coefficients that vary by level."""
        return [design.names[k] for k in design.order[self.positions]]

    def embedded_covariance(self, design):
        """Covariance (p, p) of all coefficients of the design."""
        full, at = np.zeros((len(design.names),) * 2), design.order[self.positions]
        full[np.ix_(at, at)] = self.covariance
        return full


def check_memory(groupings):
    """Raise ValueError if the levels of GroupingColumns have more effects than fit into memory."""
    n_effects = sum(len(grouping.levels) * len(grouping.positions) for grouping in groupings)
    if n_effects <= MOST_DENSE or not hasattr(os, "sysconf"):
        return
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    needed = n_effects * _BYTES_PER_EFFECT
    if needed > available:
        named = format_names(str(grouping.name) for grouping in groupings)
        raise ValueError(
            f"groupings by {named} have {n_effects} effects, whose fit needs about "
            f"{needed / 2**30:.0f} GB of memory; this machine has {available / 2**30:.0f} GB. Let "
            "fewer coefficients vary by level (random of GroupingPrior), or merge rare levels."
        )


def fit_groupings(table, prior, options, rows):
    """MixedModelEstimates of GroupedRows, with FittedLevels of every further grouping."""
    covariance = _client_covariance(table, prior, options.noise_variance)
    scaled = scale_rows(table, prior, covariance, rows)
    offset = _offset(table, prior)
    target, dense = rows.target - rows.columns @ offset, scaled.is_dense
    products = products_of(scaled.groupings, scaled.columns, target, rows.weights, dense)
    points = SuccessiveEquations(products, options.method == "reml", dense)
    limits = options.max_iter, options.tol if dense else STOP
    result = search_grouped_variances(points, scaled.parameters, options.noise_variance, limits)
    result = result._replace(equations=points.solved(result.equations))
    variances = fitted_variances(
        result,
        scaled.parameters,
        scaled.backs,
        scaled.layout.back,
        options.noise_variance,
        points if dense else None,  # iterative ones have no criterion
        limits,
    )
    estimates = _estimates(table, prior, rows, scaled, offset, result)
    estimates = estimates._replace(variances=variances)
    if options.uncertainty == "plug_in" or not dense:
        return estimates
    return with_averaged_variances(estimates, result.equations, scaled.parameters, scaled.layout)


def _client_covariance(table, prior, noise):
    """Covariance (q, q) of the clients' coefficients if it is known or zero, otherwise None."""
    q = table.n_random
    covariance = prior.known_covariance(q)
    if covariance is not None:
        return covariance
    if table.n_clients == 1:  # its deviation from the population is part of the population
        return np.zeros((q, q))
    check_noise_identified(table, noise, ", or a prior with a known covariance")
    check_covariance_identified(table, prior)
    # Columns that are constant within clients do not vary between them.
    return None if varying_columns(table, prior).any() else np.zeros((q, q))


def _offset(table, prior):
    """Coefficients (p,) that are known, and an intercept that leaves targets of mean 0."""
    q = table.n_random
    mean, offset = prior.known_mean(q), np.zeros(table.n_columns)
    if mean is not None:
        offset[:q] = mean
    if table.intercept is not None and (mean is None or table.intercept >= q):
        means = table.means()[0]
        offset[table.intercept] = means[-1] - means[:-1] @ offset
    return offset


def _estimates(table, prior, rows, scaled, offset, result):
    equations, layout, q = result.equations, scaled.layout, table.n_random
    noise, back = equations.noise, layout.population.back
    effects, coefficients = layout.solution(equations)
    _warn_of_exact_fit(table, equations, effects)
    population = offset + back @ coefficients
    deviations = np.zeros((table.n_clients, table.n_columns))
    deviations[:, :q] = effects[0] @ layout.frames[0].back.T
    n_effects = equations.products.n_outer_effects
    error_root = np.sqrt(noise) * back @ equations.inverse_root[n_effects:]
    covariances = layout.covariances(equations)
    is_shaped = scaled.parameters[0].shape is not None and is_centred(table, prior)
    if table.n_clients == 1 and prior.covariance is None:  # which says nothing about a variance
        covariances[0] = np.full((q, q), np.nan)
    log_weights = table.log_weights
    if equations.restricted:  # scaled columns change it by their volume
        log_weights += 2 * np.log(scaled.scale).sum()
    first = 0 if prior.known_mean(q) is None else q
    return MixedModelEstimates(
        population,
        error_root @ error_root.T,
        population + deviations,
        layout.posterior(equations),
        prior.with_values(population[:q], covariances[0]),
        covariances[0],
        noise,
        -0.5 * (equations.criterion - log_weights),
        result.n_iter,
        result.converged or equations.is_exact,  # more iterations find nothing
        unidentified=np.setdiff1d(np.arange(first, table.n_columns), scaled.free),
        row_space=space_of_left_out(table, scaled.free, first),
        first=first,
        centre=scaled.centre if is_shaped else None,
        levels=fitted_levels(rows, scaled, effects, covariances, table.intercept),
    )


def _warn_of_exact_fit(table, equations, effects):
    known_noise = not equations.profiles_noise
    # Where no level has an effect, the population fits exactly, and another warning says so.
    if known_noise or not equations.is_exact or not any(each.any() for each in effects):
        return
    warn_caller(
        f"Clients and levels together fit all {table.n_rows} rows exactly, so there are no "
        "residuals to estimate the noise variance from. Variances and standard deviations are "
        "meaningless. Leave a grouping out, or give noise_variance.",
        UserWarning,
    )


def fitted_levels(rows, scaled, effects, covariances, intercept, shifts=None):
    """FittedLevels of every further grouping; effects and the like are clients first."""
    fitted = []
    for k, each in enumerate(rows.groupings, start=1):
        at, codes, prior = each.positions, each.codes[each.codes >= 0], each.prior
        has_slopes = len(at) > 1 and intercept in at and prior.centered
        mean_row = np.where(at == intercept, 1.0, scaled.centre[at])
        fitted.append(
            FittedLevels(
                each.name,
                each.levels,
                at,
                effects[k] @ scaled.layout.frames[k].back.T,
                covariances[k],
                np.bincount(codes, minlength=len(each.levels)),
                clone(prior).set_params(covariance=covariances[k]),
                mean_row if has_slopes and prior.covariance is None else None,
                None if shifts is None else shifts[k] @ scaled.layout.frames[k].back.T,
            )
        )
    return fitted
