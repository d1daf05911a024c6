"""Errors of a model with several groupings, averaged over the variances that it estimates.

The standard deviations of effects over that of the noise are half-Cauchy with scale 1, for columns
of unit size; correlations are uniform, the logarithm of the noise variance and the population flat.
Noise and population are integrated exactly, the rest by the points of `_points.py`.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from pfl_sklearn._variance_averaging import averaging_share
from pfl_sklearn.linear_model._algebra import row_slices
from pfl_sklearn.linear_model._mixed._groupings._equations import (
    DenseEquations,
    apply_blocks,
    level_blocks,
)
from pfl_sklearn.linear_model._mixed._groupings._points import (
    find_points,
    log_variance_prior,
    n_parameters,
    parameters_near,
    root_at,
)
from pfl_sklearn.linear_model._mixed._groupings._posterior import level_slices, outer_entries
from pfl_sklearn.linear_model._mixed._groupings._products import CELLS_AT_ONCE
from pfl_sklearn.linear_model._mixed._identifiability import NEARLY_EXACT_NOISE
from pfl_sklearn.linear_model._mixed._posterior import AveragedPosterior, normal_bounds

_MOST_OUTER = 1000  # outer columns: a point takes a tenth of a second
_MOST_CELLS = 1 << 20  # covariances of effects with outer columns: 8 MB
_MOST_PARAMETERS = 12  # of which importance sampling with 256 points is still worth its errors


class VariancesCase(NamedTuple):
    """Which variances are averaged, and the equations in which they are unknown."""

    products: Any
    roots: list  # (q, q) of every grouping's ratio, at the estimates
    noise: float | None  # None: integrated
    parameters: dict  # Parameters of the groupings that are averaged, by position
    layout: Any

    def roots_at(self, values):
        """Roots of all ratios at parameters (t,) of those that are averaged."""
        roots, start = list(self.roots), 0
        for k, each in self.parameters.items():
            end = start + n_parameters(each.shape)
            roots[k] = each.turn @ root_at(each.shape, values[start:end])
            start = end
        return roots

    def at(self, values):
        """Equations at parameters (t,); the population is integrated out in any case."""
        return DenseEquations(self.products, self.roots_at(values), True, self.noise)

    def log_density(self, values):
        """Log posterior density (unnormalized) of parameters (t,)."""
        try:
            result = -0.5 * self.at(values).criterion
        except np.linalg.LinAlgError:  # so far out that the equations are singular in rounding
            return -np.inf
        start = 0
        for each in self.parameters.values():
            end = start + n_parameters(each.shape)
            result += log_variance_prior(each.shape, values[start:end])
            start = end
        return result

    def start(self):
        """Parameters (t,) near the estimates."""
        parts = []
        for k, each in self.parameters.items():
            root = np.linalg.solve(each.turn, self.roots[k])
            parts.append(parameters_near(each.shape, root @ root.T))
        return np.concatenate(parts)


def with_averaged_variances(estimates, equations, parameters, layout):
    """Estimates whose posterior allows for the variances being estimated, if there are few levels.

    `parameters` are those of the groupings in the order of the equations. Errors are averaged to a
    share that falls from 1 at 100 levels of the smallest grouping to 0 at 1,000; variances of
    groupings with that many levels stay at their estimates. So do those of the groupings with most
    levels as long as there are more than 12 parameters. Errors stay plug-in beyond 1,000 outer
    columns (levels of the groupings after the clients, and the population's coefficients) or 2^20
    pairs of these with all effects.
    """
    products, sizes = equations.products, equations.products.n_levels
    n_outer = len(products.outer_target)
    n_cells = (products.inner_target.size + n_outer) * n_outer
    is_exact = equations.noise <= NEARLY_EXACT_NOISE * products.square / products.n_rows
    known = [each.shape is None for each in parameters]
    chosen = [
        k
        for k in np.argsort(sizes, kind="stable")
        if not known[k] and averaging_share(sizes[k]) > 0 and n_parameters(parameters[k].shape)
    ]
    counts = np.cumsum([n_parameters(parameters[k].shape) for k in chosen], dtype=int)
    chosen = [k for k, count in zip(chosen, counts, strict=True) if count <= _MOST_PARAMETERS]
    if not chosen or is_exact or n_outer > _MOST_OUTER or n_cells > _MOST_CELLS:
        return estimates
    # Known covariances are no multiples of the noise variance, which then stays at its estimate.
    integrated = equations.profiles_noise and not any(
        each.root.any() for each, is_known in zip(parameters, known, strict=True) if is_known
    )
    case = VariancesCase(
        products,
        equations.roots,
        None if integrated else equations.noise,
        {k: parameters[k] for k in sorted(chosen)},
        layout,
    )
    share = averaging_share(sizes[chosen[0]])
    averages = partial(average_moments, case, estimates.posterior, share)
    posterior = AveragedGroupings(estimates.posterior, estimates.coefficients, 1.0, averages)
    return estimates._replace(posterior=posterior)


def average_moments(case, plug_in, share):
    """EffectCovariances around the mean of all points, and for the rest of the share plug-in."""
    case = case._replace(products=case.products.with_dense_cross())
    points = find_points(case.log_density, case.start())
    total, solutions = _scaled(_covariances(plug_in), 1 - share), []
    for values, weight in zip(points.values, points.weights, strict=True):
        equations = case.at(values)
        point = case.layout.posterior(equations)
        if case.noise is None:  # the mean of a scaled inverse chi-square
            mean = equations.square / max(equations.n_free - 2, 1)
            point = point._replace(noise=mean)
        added = _scaled(_covariances(point), share * weight)
        total = [former + part for former, part in zip(total, added, strict=True)]
        effects, coefficients = case.layout.solution(equations)
        others = np.concatenate([*(e.ravel() for e in effects[1:]), coefficients])
        solutions.append((effects[0], others))
    # The points' estimates differ, and their spread is an error, too.
    inner, outer = (np.array(values) for values in zip(*solutions, strict=True))
    weights = share * points.weights
    inner -= np.tensordot(points.weights, inner, 1)
    outer -= points.weights @ outer
    clients, cross, shared, *between = total
    clients += np.einsum("s,sma,smb->mab", weights, inner, inner, optimize=True)
    cross += np.einsum("s,sma,sr->mar", weights, inner, outer, optimize=True)
    shared += (weights[:, None] * outer).T @ outer
    layout, n_levels = case.layout, plug_in.n_levels
    return EffectCovariances(
        clients, cross, shared, between, layout.frames, layout.population, n_levels
    )


def _covariances(posterior):
    """Arrays of EffectCovariances of a GroupingsPosterior."""
    whitening, root = posterior.whitening, posterior.inverse_root
    m, q = whitening.shape[:2]
    explained = apply_blocks(whitening.transpose(0, 2, 1), posterior.explained.toarray())
    pulled = explained @ root
    blocks = pulled.reshape(m, q, -1)
    clients = whitening.transpose(0, 2, 1) @ whitening + blocks @ blocks.transpose(0, 2, 1)
    cross = -(pulled @ root.T).reshape(m, q, -1)
    between = [each @ each.T for each in posterior.roots]
    return _scaled([clients, cross, root @ root.T, *between], posterior.noise)


def _scaled(arrays, factor):
    return [factor * array for array in arrays]


class EffectCovariances(NamedTuple):
    """Covariances of the clients' effects, and of all others with one another.

    The outer ones are the effects of the levels and the population's coefficients. All are for the
    columns of the fit.
    """

    clients: np.ndarray  # (m, q, q)
    cross: np.ndarray  # (m, q, r), of a client's effects with the outer ones
    outer: np.ndarray  # (r, r)
    between: list  # (q, q) of every grouping: of the effects of a level that was not seen
    frames: list  # Frame of every grouping
    free: Any  # Frame of the free columns of the population
    n_levels: tuple  # of the groupings after the clients

    @property
    def population(self):
        """None: only moments are known, not a mixture."""
        return None

    def of_clients(self, clients):
        """The covariances of some clients alone, with all levels."""
        return self._replace(clients=self.clients[clients], cross=self.cross[clients])

    def variances(self, x, codes, levels=None):
        """Variance (n,) of predictors, as of a GroupingsPosterior."""
        result = np.empty(len(x))
        widths = [len(frame.positions) for frame in self.frames]
        cells = (sum(widths) + self.free.back.shape[1]) ** 2
        for part in row_slices(len(x), cells, CELLS_AT_ONCE):
            chosen = None if levels is None else [level[part] for level in levels]
            result[part] = self._block_variances(x[part], codes[part], chosen)
        # Differences, which rounding may leave below 0.
        return np.maximum(result, 0.0)

    def _block_variances(self, x, codes, levels):
        frames = self.frames[1:] if levels is not None else []
        columns, levels = [frame.columns(x) for frame in frames], levels or []
        shared = self.free.columns(x)
        values, at = outer_entries(columns, levels, shared, self.n_levels, self.frames)
        pairs = self.outer[at[:, :, None], at[:, None, :]]
        result = np.einsum("nk,nkl,nl->n", values, pairs, values)
        inner, seen = self.frames[0].columns(x), codes >= 0
        own, code = inner[seen], codes[seen]
        result[seen] += np.einsum("nq,nqr,nr->n", own, self.clients[code], own)
        pairs = self.cross[code[:, None, None], np.arange(own.shape[1])[:, None], at[seen][:, None]]
        result[seen] += 2 * np.einsum("nq,nqk,nk->n", own, pairs, values[seen])
        # Of an unknown client or level all that is known is its variance.
        groupings = zip([inner, *columns], [codes, *levels], self.between, strict=False)
        for column, code, between in groupings:
            unknown = column[code < 0]
            result[code < 0] += np.einsum("nq,qr,nr->n", unknown, between, unknown)
        return result

    def new_variances(self, x):
        """Variance (n,) of x' theta for rows x (n, p) of clients that were not seen."""
        return self.variances(x, np.full(len(x), -1))

    def coefficient_variances(self):
        """Variances (m, p) of the clients' coefficients."""
        every = np.eye(len(self.free.back))
        own, shared = self.frames[0].columns(every), self.free.columns(every)
        first = len(self.outer) - shared.shape[1]
        result = np.einsum("pa,mab,pb->mp", own, self.clients, own, optimize=True)
        cross = self.cross[:, :, first:]
        result += 2 * np.einsum("pa,mab,pb->mp", own, cross, shared, optimize=True)
        return np.maximum(result + np.diag(self.population_covariance), 0.0)

    @property
    def population_covariance(self):
        """Covariance (p, p) of the population's coefficients."""
        first = len(self.outer) - self.free.back.shape[1]
        return self.free.back @ self.outer[first:, first:] @ self.free.back.T

    def level_variances(self, k):
        """Variances (L, q) of the effects of grouping k (0: clients), in the data's columns."""
        back, blocks = self.frames[k].back, self.clients
        if k > 0:
            at = level_slices(self.n_levels, self.frames)[k - 1]
            blocks = level_blocks(self.outer, at, len(back))
        return np.einsum("ab,lbc,ac->la", back, blocks, back, optimize=True)

    def deviation_variances(self):
        """Variances (m, p) of the clients' deviations from the population."""
        result = np.zeros((len(self.clients), len(self.free.back)))
        result[:, self.frames[0].positions] = self.level_variances(0)
        return result


class AveragedGroupings(AveragedPosterior):
    """Posterior of clients and levels, with EffectCovariances that hold the plug-in's share."""

    def variances(self, x, codes, levels=None):
        """Variance (n,) of predictors, as of a GroupingsPosterior."""
        return self.averages.variances(x, codes, levels)

    def level_variances(self, k, conditional):
        """Variances (L, q) of the effects of grouping k; conditional ones are plug-in."""
        if conditional:
            return self.plug_in.level_variances(k, True)
        return self.averages.level_variances(k)

    def interval(self, level):
        """Bounds (m, p) of the clients' coefficients, from normal quantiles."""
        return normal_bounds(self.coefficients, self.coefficient_variances(), level)
