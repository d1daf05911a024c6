"""Laplace's approximation for rows with a link and several groupings, by the linear equations.

At the mode of all effects the equations are those of a linear model with noise variance 1: the
curvatures W of the rows' log-likelihoods are its weights, and W times the predictors plus the
scores stands for the weighted target. With H the matrix of the effects' equations, the
log-likelihood is that of the rows, less (|u|^2 + log det H) / 2. Given the roots of the
covariances, the population maximizes it. As log det H depends on the population through W, the
population's score has an addition, the `tilt`; without it the estimates would be those of
penalized quasi-likelihood.
"""

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from scipy.linalg import cho_solve

from pfl_sklearn.linear_model._algebra import invert_lower, row_slices
from pfl_sklearn.linear_model._mixed._groupings._equations import (
    N_PROBES,
    PROBE_SEED,
    SEARCHED,
    DenseEquations,
    Equations,
    IterativeEquations,
    apply_blocks,
)
from pfl_sklearn.linear_model._mixed._groupings._products import (
    CELLS_AT_ONCE,
    GroupedDesign,
    as_dense,
)

_LAST_DECREMENT = 1e-12  # twice the nats, of the step after which a mode counts as found
_LOOSE_DECREMENT, _LOOSE_TILT = 1e-3, 0.05  # the same and `TILTED`, by conjugate gradients
_SLACK = 1e-12  # relative decrease of an objective that counts as rounding
_SHORTEST = 1e-8  # share of a Newton step
_MOST_STEPS = 100  # of Newton's method to a mode
_MOST_TILTS = 30  # the addition to the score shrinks by a factor of five or more at each
_ASTRAY = 100.0  # times the smallest error, where the additions grow without bound
_LEAST_RESPONSE = 0.1  # of the error to a step, over the step; the rest is no information
TILTED = 1e-5  # standard errors by which the population may be off in a search
SETTLED = 1e-6  # the same in a result, of which differences are taken


@dataclass(frozen=True)
class LinkModel:
    """Rows of a model with a link, and what holds its estimates besides the rows."""

    design: GroupedDesign
    groupings: list  # Grouping
    family: Any
    y: np.ndarray  # (n,)
    weights: np.ndarray  # (n,)
    offset: np.ndarray  # (n,), known part of the predictors
    penalty: np.ndarray  # (p, p), precision of the population's prior
    spread: list  # (q, q) of every grouping: slopes of a penalty on its covariance

    def terms(self, predictors):
        """RowTerms at predictors (n,)."""
        return self.family.terms(predictors[:, None], self.y, self.weights)

    def predictors(self, inner, outer):
        """Predictors (n,) of effects (L, q) and outer values (r,)."""
        return self.offset + self.design.predictors(inner.ravel(), outer)

    def curvature_slopes(self, predictors, spread):
        """Slopes (n,) of the curvatures at predictors (n,), times a spread (n,)."""
        at = predictors[:, None], self.y, self.weights, spread[:, None, None]
        return self.family.curvature_slopes(*at)[:, 0]

    def changes(self, effects):
        """Changes (n,) of the predictors by effects (L, q) of every grouping."""
        outer = [
            *(values.ravel() for values in effects[1:]),
            np.zeros(self.design.columns.shape[1]),
        ]
        return self.predictors(effects[0], np.concatenate(outer)) - self.offset

    @cached_property
    def entries(self):
        """Entries (n, s) of the rows in the outer effects, and their places (n, s)."""
        values, places, start = [], [], 0
        for grouping in self.groupings[1:]:
            seen, q = (grouping.codes >= 0)[:, None], grouping.width
            values.append(np.where(seen, grouping.columns, 0.0))
            at = start + grouping.codes[:, None] * q + np.arange(q)
            places.append(np.where(seen, at, 0))
            start += grouping.n_effects
        return np.hstack(values), np.hstack(places)

    @cached_property
    def blocks(self):
        """Slices of clients, and their rows (k,), of the first grouping, a block at a time."""
        first = self.groupings[0]
        codes = np.maximum(first.codes, 0)
        order = np.argsort(codes, kind="stable")
        ends = np.searchsorted(codes[order], np.arange(first.n_levels + 1))
        size = first.width * self.design.others.shape[1]
        starts = [part.start for part in row_slices(first.n_levels, size, CELLS_AT_ONCE)]
        stops = [*starts[1:], first.n_levels]
        return [
            (slice(start, stop), order[ends[start] : ends[stop]])
            for start, stop in zip(starts, stops, strict=True)
        ]


class LinkState(NamedTuple):
    """Where a search for modes starts."""

    inner: np.ndarray  # (L q,), standardized effects of the first grouping
    outer: np.ndarray  # (r,), those of the others, and the population's coefficients
    tilt: np.ndarray  # (p,), addition to the population's score


class LinkEquations(Equations):
    """Equations at the mode of a LinkModel; the criterion is minus twice its log-likelihood.

    Penalties count in it. The noise variance is 1, so ratios are covariances.
    """

    is_exact = False

    def at_mode(self, model, predictors, value):
        """The same, where `predictors` (n,) are those of the mode and `value` those of the rows."""
        self.model, self.predictors, self.value = model, predictors, value
        return self

    @abstractmethod
    def _solve_effects(self, right):
        """The inverse of the outer effects' part of S times columns (e, k)."""

    @property
    @abstractmethod
    def population_covariance(self):
        """Covariance (p, p) of the population's coefficients at known variances."""

    @property
    @abstractmethod
    def leverages(self):
        """Variances (n,) of the predictors given the population's coefficients."""

    @cached_property
    def standardized(self):
        """Effects over their standard deviations, flat, and the outer values (r,)."""
        residual = self._inner_target - self._explained(self._unscaled(self._outer)[:, None])[:, 0]
        residual = residual.reshape(self.products.inner_target.shape)
        inner = invert_lower(self.lower).transpose(0, 2, 1) @ residual[..., None]
        return inner.ravel(), self._outer

    @cached_property
    def penalties(self):
        """Twice the penalties of the population's coefficients and of the covariances."""
        population, spread = self.solution[1], zip(self.model.spread, self.roots, strict=True)
        return population @ self.model.penalty @ population + sum(
            np.vdot(penalty @ root, root) for penalty, root in spread
        )

    def _effects_of(self, whitened, outer, standardized=0.0):
        """Effects of right sides: (L q, k) times the whitening, and (r, k) of the outer columns.

        `standardized` (e, k) is added to the latter after their scaling.
        """
        n_effects = self.products.n_outer_effects
        right = self._scaled(outer - self._unexplained(whitened))[:n_effects] + standardized
        solved = np.zeros_like(outer)
        solved[:n_effects] = self._solve_effects(right)
        solved = self._unscaled(solved)
        residual = whitened - self._explained(solved)
        return apply_blocks(self.whitening.transpose(0, 2, 1), residual), solved

    @cached_property
    def _third_order(self):
        """Shifts (L, q) and (r,) from the mode to the mean, and what they leave of the slopes."""
        slopes = -0.5 * self.model.curvature_slopes(self.predictors, self.leverages)
        shape, (inner, outer) = self.products.inner_target.shape, self.model.design.sums(slopes)
        whitened = apply_blocks(self.whitening, inner[:, None])
        first, shift = self._effects_of(whitened, outer[:, None])
        first, shift = first.reshape(shape), shift[:, 0]
        back = self.products.times(first, shift)
        return (first, shift), (inner.reshape(shape) - back[0], outer - back[1])

    @property
    def shifts(self):
        """Posterior means less modes of the effects (L, q) of every grouping.

        To third order, given the population's coefficients.
        """
        inner, outer = self._third_order[0]
        return [inner, *self.products.by_level(outer)]

    @property
    def tilt(self):
        """Addition (p,) to the population's score, by the slope of log det H."""
        return self._third_order[1][1][self.products.n_outer_effects :]

    def _with_curvature(self, slopes):
        """Slopes in the covariances, from those at known curvatures."""
        inner, outer = self._third_order[1]
        others = [inner, *self.products.by_level(outer)]
        parts = zip(slopes.squares, self.pulls, others, self.model.spread, strict=True)
        squares = [
            square + pull.T @ other + other.T @ pull - penalty
            for square, pull, other, penalty in parts
        ]
        return slopes._replace(squares=squares)


class DenseLinkEquations(LinkEquations, DenseEquations):
    """LinkEquations by a dense factor of S."""

    @cached_property
    def criterion(self):
        """Minus twice the log-likelihood, and penalties."""
        n_effects = self.products.n_outer_effects
        counted = np.diag(self.factor)[:n_effects]
        volume = 2 * np.log(np.einsum("laa->la", self.lower)).sum() + 2 * np.log(counted).sum()
        inner, outer = self.standardized
        square = inner @ inner + outer[:n_effects] @ outer[:n_effects]
        return volume + square - 2 * self.value + self.penalties

    @cached_property
    def slopes(self):
        """Slopes of the criterion in the covariances."""
        return self._with_curvature(super().slopes)

    @property
    def population_covariance(self):
        """Covariance (p, p) of the population's coefficients at known variances."""
        inverse = self._inverse_factor[self.products.n_outer_effects :]
        inverse = inverse[:, self.products.n_outer_effects :]
        return inverse.T @ inverse

    def _solve_effects(self, right):
        n_effects = self.products.n_outer_effects
        return cho_solve((self.factor[:n_effects, :n_effects], True), right)

    @cached_property
    def leverages(self):
        """Variances (n,) of the predictors given the population's coefficients, exactly."""
        first, (values, places) = self.model.groupings[0], self.model.entries
        n_effects, q = self.products.n_outer_effects, first.width
        root = self.inverse_root[:n_effects, :n_effects]
        outer, explained = root @ root.T, self.explained[:, :n_effects]
        result = np.empty(len(values))
        for part, rows in self.model.blocks:
            known, at = (first.codes[rows] >= 0)[:, None], np.maximum(first.codes[rows], 0)
            inner = np.where(known, first.columns[rows], 0.0)
            inner = np.einsum("nab,nb->na", self.whitening[at], inner)
            within = explained[part.start * q : part.stop * q]
            across = (within @ outer).reshape(-1, q, n_effects)
            within = across @ as_dense(within).reshape(across.shape).transpose(0, 2, 1)
            at, v, p = at - part.start, values[rows], places[rows]
            total = np.einsum("na,nab,nb->n", v, outer[p[:, :, None], p[:, None]], v)
            cross = across[at[:, None, None], np.arange(q)[:, None], p[:, None]]
            total -= 2 * np.einsum("na,nas,ns->n", inner, cross, v)
            total += np.einsum("na,nab,nb->n", inner, within[at], inner)
            result[rows] = total + np.sum(inner**2, axis=1)
        return result


class IterativeLinkEquations(LinkEquations, IterativeEquations):
    """LinkEquations by conjugate gradients, with leverages by draws of the posterior."""

    @cached_property
    def slopes(self):
        """Slopes of the criterion in the covariances."""
        return self._with_curvature(super().slopes)

    @property
    def population_covariance(self):
        """Covariance (p, p) of the population's coefficients at known variances."""
        first = len(self._inverse) - self.products.n_columns
        return self._inverse[first:, first:]

    def _solve_effects(self, right):
        large = self.products.n_large_effects
        right = np.vstack([right, np.zeros((self.products.n_columns, right.shape[1]))])
        effects = self._solve_large(right[:large])
        solved = self._with_exact(effects, right[large:], self._effect_inverse)
        return solved[: self.products.n_outer_effects]

    @cached_property
    def leverages(self):
        """Variances (n,) of the predictors given the population's coefficients."""
        design, rng = self.model.design, np.random.default_rng(PROBE_SEED)
        weights = self.model.terms(self.predictors).curvature[:, 0, 0]
        noise = rng.standard_normal((len(weights), N_PROBES)) * np.sqrt(weights)[:, None]
        inner, outer = design.sums(noise)
        # Draws around a mean of 0: the prior's part has a root of the identity.
        whitened = apply_blocks(self.whitening, inner) + apply_blocks(
            invert_lower(self.lower), rng.standard_normal(inner.shape)
        )
        n_effects = self.products.n_outer_effects
        prior = rng.standard_normal((n_effects, N_PROBES))
        inner, outer = self._effects_of(whitened, outer, prior)
        return np.mean(design.predictors(inner, outer) ** 2, axis=1)


class LinkPoints:
    """Equations at one point after the other, each from the mode of the last one."""

    def __init__(self, model, start):
        self.model, self.state, self.converged = model, start, True
        self._last = None  # IterativeLinkEquations, near whose solutions others are
        # From the error of a tilt to the step that removes it; at first, the error itself.
        self._inverse = np.eye(len(start.tilt))

    def at(self, roots, noise=None, tol=TILTED):
        """LinkEquations at roots of the covariances; the noise variance is 1."""
        state = self.state
        if not self.model.design.dense:
            tol = max(tol, _LOOSE_TILT)
        step, change, best = None, None, np.inf
        for _ in range(_MOST_TILTS):
            found = self._mode(roots, state)
            before, change = change, found.tilt - state.tilt
            if step is not None:
                self._learn(step, change - before)
            # By conjugate gradients rounding may leave a small square below 0.
            distance = np.sqrt(abs(change @ found.population_covariance @ change))
            step = self._inverse @ change
            inner, outer = found.standardized
            state = LinkState(inner, outer, state.tilt + step)
            if distance < best:
                best, equations, self.state = distance, found, state
            if distance <= tol or distance > _ASTRAY * best:
                break
        self.converged = best <= tol
        if not self.converged:  # what was learnt led astray: begin again near the best point
            inner, outer = equations.standardized
            self.state = LinkState(inner, outer, equations.tilt)
            self._inverse = np.eye(len(equations.tilt))
        return equations

    def _learn(self, step, change):
        """Let a step of the tilt teach how its error responds (Broyden, 1965)."""
        response = self._inverse @ change
        size = step @ response
        if abs(size) > _LEAST_RESPONSE * (step @ step):
            self._inverse -= np.outer(response + step, step @ self._inverse) / size

    def solved(self, equations):
        """The same equations, solved as exactly as a result is."""
        return self.at(equations.roots, tol=SETTLED)

    def pulled(self, equations, pull):
        """Equations at the same roots, for the population after a pull (p,) on its score.

        The tilt stays.
        """
        state = self.state._replace(tilt=self.state.tilt + pull)
        return self._mode(equations.roots, state)

    def mode(self, roots):
        """LinkEquations at the mode under the tilt that was found last."""
        return self._mode(roots, self.state)

    def _mode(self, roots, state):
        """LinkEquations at the mode, from a state and under its tilt."""
        model, (inner, outer, tilt) = self.model, state
        value, predictors, terms = self._evaluate(roots, inner, outer, tilt)
        for _ in range(_MOST_STEPS):
            equations = self._equations(roots, predictors, terms, tilt)
            inner_step, outer_step = (
                new - old for new, old in zip(equations.standardized, (inner, outer), strict=True)
            )
            shift = model.predictors(*self._unscaled(roots, inner_step, outer_step))
            shift -= model.offset
            slope = self._penalty_slope(inner, outer, tilt)
            gain = terms.score[:, 0] @ shift - inner_step @ slope[0] - outer_step @ slope[1]
            size = min(1.0, model.family.longest_step / max(np.abs(shift).max(), 1e-300))
            while True:
                trial = inner + size * inner_step, outer + size * outer_step
                after = self._evaluate(roots, *trial, tilt)
                if after[0] >= value - _SLACK * (1 + abs(value)) or size < _SHORTEST:
                    break
                size /= 2
            (inner, outer), (value, predictors, terms) = trial, after
            if gain < (_LAST_DECREMENT if model.design.dense else _LOOSE_DECREMENT):
                break
        return equations.at_mode(model, predictors, float(terms.value.sum()))

    def _penalty_slope(self, inner, outer, tilt):
        """Slopes of the penalties, less the tilt, in the standardized effects and the outer."""
        slope, p = outer.copy(), len(tilt)
        slope[len(outer) - p :] = self.model.penalty @ outer[len(outer) - p :] - tilt
        return inner, slope

    def _evaluate(self, roots, inner, outer, tilt):
        """Objective of a mode, predictors (n,) and RowTerms."""
        predictors = self.model.predictors(*self._unscaled(roots, inner, outer))
        terms = self.model.terms(predictors)
        n_effects = len(outer) - len(tilt)
        effects, population = outer[:n_effects], outer[n_effects:]
        penalty = inner @ inner + effects @ effects + population @ self.model.penalty @ population
        value = terms.value.sum() - penalty / 2 + tilt @ population
        return value, predictors, terms

    def _unscaled(self, roots, inner, outer):
        """Effects (L, q), and outer values (r,), from standardized ones."""
        first = inner.reshape(-1, len(roots[0])) @ roots[0].T
        result, start = outer.copy(), 0
        for grouping, root in zip(self.model.groupings[1:], roots[1:], strict=True):
            at = slice(start, start + grouping.n_effects)
            result[at] = (outer[at].reshape(-1, len(root)) @ root.T).ravel()
            start += grouping.n_effects
        return first, result

    def _equations(self, roots, predictors, terms, tilt):
        """LinkEquations of one step of Newton's method from predictors (n,)."""
        model, weights = self.model, terms.curvature[:, 0, 0]
        pull = weights * (predictors - model.offset) + terms.score[:, 0]
        products, p = model.design.products(pull, weights), len(tilt)
        if p:
            products.outer_target[-p:] += tilt
        if model.penalty.any():
            products = products.with_penalty(model.penalty)
        if model.design.dense:
            return DenseLinkEquations(products, roots, False, 1.0)
        before, self._last = (
            self._last,
            IterativeLinkEquations(products, roots, False, 1.0, self._last, SEARCHED),
        )
        if before is not None:
            before._start = None  # or all points would stay in memory
        return self._last
