"""Linear regressions under a Laplace prior: clients differ in few coefficients."""

import numpy as np

from pfl_sklearn.linear_model._algebra import inverse_root
from pfl_sklearn.linear_model._mixed._identifiability import check_noise_identified
from pfl_sklearn.linear_model._mixed._normal_rows._profiled_likelihood import (
    ProfiledLikelihood,
    flat_rows,
    reduce_table,
)
from pfl_sklearn.linear_model._mixed._normal_rows._variance_search import search_ratio
from pfl_sklearn.linear_model._mixed._reduction import centre_table, point_estimates, uncentre

_SMALLEST_SCALE = 1e-150  # stands for identical clients; a prior of scale 0 has no density
_NO_CURVATURE = 1e-300  # of a client whose random columns are zero: its deviations stay at zero


def fit_laplace_prior(table, prior, options):
    """Joint mode of the clients' and the population's coefficients, as MixedModelEstimates."""
    # An accelerated proximal method minimizes the residual squares over twice the noise variance
    # plus the clients' absolute deviations over the scale. Unknown noise variances and scales b
    # come from the fit under a spherical Gaussian prior, whose variance is ``2 b**2``.
    q = table.n_random
    location = prior.known_location(q)
    table, offset, centre = centre_table(table, location)
    scale, noise = _scale_and_noise(table, prior, options)
    reduced = reduce_table(table, spectral=True, common_scale=False)
    first = 0 if location is None else q
    with np.errstate(over="ignore"):  # an infinite penalty leaves no deviations, as it should
        penalty = noise / scale * np.abs(reduced.scale[:q])
    population, deviations, n_iter, converged = minimize_deviations(
        reduced, penalty, first, options.max_iter, options.tol
    )
    population = offset + uncentre(population * reduced.scale, table.intercept, centre)
    coefficients = np.tile(population, (table.n_clients, 1))
    coefficients[:, :q] += deviations * reduced.scale[:q]
    fitted = prior.with_values(population[:q], scale if np.ndim(prior.scale) else float(scale[0]))
    variances = np.where(scale > _SMALLEST_SCALE, 2 * scale**2, 0.0)
    return point_estimates(
        population, coefficients, fitted, np.diag(variances), noise, n_iter, converged
    )._replace(first=first)


def _scale_and_noise(table, prior, options):
    """Scale (q,) and noise variance; a spherical Gaussian fit estimates unknown ones."""
    scale, noise = prior.known_scale(table.n_random), options.noise_variance
    if scale is not None and noise is not None:
        return scale, noise
    if table.n_clients == 1 and scale is None:
        raise ValueError(
            "a single client cannot identify the scale of a LaplacePrior; give scale, or groups."
        )
    check_noise_identified(table, noise)
    # The joint mode has no lower bound in the scale, so a Gaussian fit stands in.
    reduced = reduce_table(table, spectral=True)
    likelihood = ProfiledLikelihood(reduced, options.method == "reml", 0, noise)
    fit = search_ratio(likelihood, options.max_iter, options.tol)
    noise = fit.noise
    if scale is None:
        variance = fit.ratio[0, 0] * noise * reduced.scale[0] ** 2
        scale = np.full(table.n_random, max(np.sqrt(variance / 2), _SMALLEST_SCALE))
    return scale, noise


def minimize_deviations(reduced, penalty, first, max_iter, tol):
    """Population (p,) and deviations (m, q), number of proximal steps, and whether they converged.

    `penalty` (q,) weighs the absolute deviations next to half the residual squares; `first` is the
    first free population coefficient. The steps end when no coefficient, in units of its column,
    moves by more than `tol` times the largest one, with momentum or without.
    """
    solve = _population_solver(reduced, first)
    # Each client's own step is the longest that surely descends.
    curvatures = reduced.by_client([stack.eigenvalues.max(axis=1) for stack in reduced.stacks])
    steps = 1 / np.maximum(curvatures, _NO_CURVATURE)[:, None]
    deviations = np.zeros((reduced.n_clients, reduced.n_random))
    ahead, momentum, population = deviations, 1.0, solve(deviations)
    for n_iter in range(1, max_iter + 1):
        gradient_step = ahead + steps * _downhill(reduced, population, ahead)
        new = np.sign(gradient_step) * np.maximum(np.abs(gradient_step) - steps * penalty, 0.0)
        change = new - deviations
        start = ahead
        if np.vdot(ahead - new, change) > 0:  # momentum points uphill: start it again
            momentum = 1.0
        faster = (1 + np.sqrt(1 + 4 * momentum**2)) / 2
        ahead = new + (momentum - 1) / faster * change
        deviations, momentum = new, faster
        population = solve(ahead)
        largest = max(np.abs(deviations).max(), np.abs(population).max())
        # Momentum carries on where a step alone would stop, so both have to be small.
        moves = max(np.abs(change).max(), np.abs(new - start).max())
        if moves <= tol * largest and n_iter > 1:
            return solve(deviations), deviations, n_iter, True
    return solve(deviations), deviations, max_iter, False


def _population_solver(reduced, first):
    """Function from deviations (m, q) to the least-squares population coefficients (p,)."""
    gram = reduced.gram(reduced.rows, first)
    root, _ = inverse_root(gram[:-1, :-1])

    def solve(deviations):
        right = gram[:-1, -1].copy()
        for stack in reduced.stacks:
            fitted = _random_part(stack, deviations).ravel()
            right -= flat_rows(stack.rows)[:, first:-1].T @ fitted
        return np.append(np.zeros(first), root @ (root.T @ right))

    return solve


def _downhill(reduced, population, deviations):
    """Z' residuals (m, q) of every client: minus the slope of half the residual squares."""
    residuals = [
        stack.rows[:, :, -1] - stack.rows[:, :, :-1] @ population - _random_part(stack, deviations)
        for stack in reduced.stacks
    ]
    # With the identity as their variance ratio, deviations are Z' residuals.
    return reduced.deviations(reduced.rows, residuals, np.eye(reduced.n_random))


def _random_part(stack, deviations):
    """What the deviations of its clients add to the targets (b, k) of a stack."""
    q = deviations.shape[1]
    return np.einsum("bkq,bq->bk", stack.rows[:, :, :q], deviations[stack.clients])
