"""Likelihood of a linear mixed model with several groupings, from its mixed-model equations.

Covariances are relative to the noise variance: level l of grouping k has the effects R_k u, with
R_k a root of the ratio and u of covariance noise * I. With W = [Z R, X] and D the identity for
effects and zero for the population's columns, the equations are (W'W + D) solution = W'y. The
effects of the first grouping are eliminated level by level; what is left is the Schur complement S
of the outer columns. A root may be singular: a variance of zero is a point like any other.
"""

from abc import ABC, abstractmethod
from functools import cached_property
from typing import NamedTuple

import numpy as np
from scipy import sparse
from scipy.linalg import cho_solve, lapack

from pfl_sklearn.linear_model._algebra import row_slices, solve_lower
from pfl_sklearn.linear_model._mixed._groupings._products import CELLS_AT_ONCE, MOST_EXACT

_ROUNDED_SQUARES = 1e-14  # residual squares over squares of the target that count as rounding
_TINY_SQUARES = 1e-280  # where all targets are 0, whose logarithm does not exist
_SMALL_RATIO = 1e-3  # of a ratio times the rows of a level
N_PROBES = 30  # random signs that estimate the traces of large groupings
_N_DRAWS, _DRAWS_AT_ONCE = 200, 20  # of the posterior: a standard deviation is right to 5 %
PROBE_SEED = 0  # the same signs in every step and every fit
SOLVED = 1e-9  # norm of what conjugate gradients leave, over that of the right side
SEARCHED = 1e-5  # the same in a search, where a looser one prevents convergence, and for draws
_MOST_CG_STEPS = 1000  # of conjugate gradients
_STILL_GOING = 0.75  # share of columns below which we leave out those that are solved


class Slopes(NamedTuple):
    """Derivatives of the criterion in the ratio (q, q) of every grouping: traces less squares."""

    traces: list  # of Z'PZ, summed over the blocks of levels
    squares: list  # of Z'Py, over the noise, summed over levels

    def of(self, k):
        """The derivative for grouping k."""
        return self.traces[k] - self.squares[k]


class Equations(ABC):
    """The equations at roots (q, q) of the groupings' ratios.

    The criterion is minus twice the log-likelihood, `restricted` or full, at the best noise
    variance or a given one.
    """

    def __init__(self, products, roots, restricted=True, noise=None):
        self.products, self.roots, self.restricted = products, roots, restricted
        root = roots[0]
        self.lower = np.linalg.cholesky(root.T @ products.inner @ root + np.eye(len(root)))
        # Inverse factors times R': what of the first grouping's columns the rest may explain.
        self.whitening = solve_lower(self.lower, np.broadcast_to(root.T, products.inner.shape))
        self._inner_target = (self.whitening @ products.inner_target[..., None]).ravel()
        self._set_up()
        left = products.outer_target[:, None] - self._unexplained(self._inner_target[:, None])
        right = self._scaled(left[:, 0])
        self._outer = self._solve(right[:, None])[:, 0]
        square = products.square - np.sum(self._inner_target**2) - right @ self._outer
        rounding = max(_ROUNDED_SQUARES * products.square, _TINY_SQUARES)
        self.square, self.is_exact = max(square, rounding), square <= rounding
        # As many columns as rows fit exactly, so whatever divides rounding errors will do.
        self.n_free = max(products.n_rows - (products.n_columns if restricted else 0), 1)
        self.noise = self.square / self.n_free if noise is None else noise
        self.profiles_noise = noise is None

    @abstractmethod
    def _set_up(self):
        """Prepare the solutions of equations with S."""

    @abstractmethod
    def _solve(self, right):
        """The inverse of S times columns (r, k)."""

    @cached_property
    @abstractmethod
    def slopes(self):
        """Slopes of the criterion."""

    @cached_property
    @abstractmethod
    def criterion(self):
        """Minus twice the log-likelihood of weighted rows, without the logarithms of weights."""

    @cached_property
    def explained(self):
        """Whitened rows (L q, r) of the first grouping by the outer columns; sparse as `cross`."""
        cross = self.products.cross
        if isinstance(cross, np.ndarray):
            return apply_blocks(self.whitening, cross)
        return block_diagonal(self.whitening) @ cross

    def _explained(self, outer):
        """The same times outer columns (r, k)."""
        return apply_blocks(self.whitening, self.products.cross @ outer)

    def _unexplained(self, inner):
        """Its transpose times columns (L q, k)."""
        turned = apply_blocks(self.whitening.transpose(0, 2, 1), inner)
        return self.products.cross_transposed @ turned

    @cached_property
    def solution(self):
        """Effects (L, q) of every grouping, and the population's coefficients (p,)."""
        products, outer = self.products, self._unscaled(self._outer)
        left = self._inner_target - self._explained(outer[:, None])[:, 0]
        left = left.reshape(products.inner_target.shape)
        inner = (self.whitening.transpose(0, 2, 1) @ left[..., None])[..., 0]
        return [inner, *products.by_level(outer)], outer[products.n_outer_effects :]

    @cached_property
    def pulls(self):
        """Z'Py (L, q) of every grouping."""
        products, (effects, population) = self.products, self.solution
        outer = np.concatenate([*(e.ravel() for e in effects[1:]), population])
        inner, outer = products.times(effects[0], outer)
        return [products.inner_target - inner, *products.by_level(products.outer_target - outer)]

    def information(self, directions):
        """Average information (t, t) of the criterion in directions (k, (q, q)) of the ratios.

        For grouping k and a symmetric direction of its ratio, with the noise variance profiled
        out if it is unknown (Gilmour, Thompson and Cullis, 1995).
        """
        products, pulls, n = self.products, self.pulls, len(directions)
        inner = np.zeros((*products.inner_target.shape, n))
        outer = np.zeros((len(products.outer_target), n))
        for t, (k, direction) in enumerate(directions):
            moved = pulls[k] @ direction
            if k == 0:
                inner[..., t] = moved
            else:
                outer[products.outer_slices[k - 1], t] = moved.ravel()
        all_inner, all_outer = products.times(inner, outer)
        left = (self.whitening @ all_inner).reshape(-1, n)
        right = self._scaled(all_outer - self._unexplained(left))
        square = inner.reshape(-1, n).T @ all_inner.reshape(-1, n) + outer.T @ all_outer
        result = (square - left.T @ left - right.T @ self._solve(right)) / self.noise
        if self.profiles_noise:
            share = [np.vdot(direction, self.slopes.squares[k]) for k, direction in directions]
            result -= np.multiply.outer(share, share) / self.n_free
        return (result + result.T) / 2

    def _scaled(self, outer):
        """R' times outer values (r, ...)."""
        return self._by_roots(outer, [root.T for root in self.roots[1:]])

    def _unscaled(self, outer):
        """R times outer values (r, ...)."""
        return self._by_roots(outer, self.roots[1:])

    def _by_roots(self, outer, roots):
        result = np.array(outer)
        for at, root in zip(self.products.outer_slices, roots, strict=True):
            if len(root) == 1:  # the product of blocks takes three times as long
                result[at] *= root[0, 0]
            else:
                blocks = outer[at].reshape(-1, len(root), outer[0].size)
                result[at] = (root @ blocks).reshape(outer[at].shape)
        return result


class DenseEquations(Equations):
    """Equations by a dense factor of S: exact, and as large as the outer columns allow."""

    def _set_up(self):
        products = self.products
        self.reduced = products.outer - self._squares(products.n_outer_effects)
        system = self._scaled(self._scaled(self.reduced).T)
        effects = np.arange(products.n_outer_effects)
        system[effects, effects] += 1.0
        self.factor, failed = lapack.dpotrf(system, lower=1, clean=1)
        if failed:
            raise np.linalg.LinAlgError("population columns are linearly dependent")

    def _squares(self, n_effects):
        """Products (r, r) of the explained rows."""
        if isinstance(self.explained, np.ndarray):
            return self.explained.T @ self.explained
        # The population's columns have no zeros, so sparse products would take much longer.
        effects, columns = self.explained[:, :n_effects], self.explained[:, n_effects:].toarray()
        border = effects.T @ columns
        within = (effects.T @ effects).toarray()
        return np.block([[within, border], [border.T, columns.T @ columns]])

    def _solve(self, right):
        return cho_solve((self.factor, True), right)

    @cached_property
    def criterion(self):
        """The criterion, exactly."""
        counted = np.diag(self.factor)
        if not self.restricted:
            counted = counted[: self.products.n_outer_effects]
        volume = 2 * np.log(np.einsum("laa->la", self.lower)).sum() + 2 * np.log(counted).sum()
        return volume + self.n_free * np.log(2 * np.pi * self.noise) + self.square / self.noise

    @cached_property
    def _inverse_factor(self):
        """Inverse of the factor (r, r), a lower triangle."""
        inverse, failed = lapack.dtrtri(self.factor, lower=1)
        assert not failed
        return inverse

    @cached_property
    def inverse_root(self):
        """R times the inverse factor's transpose (r, s): its square is R S^-1 R'."""
        return self._unscaled(self._inverse_factor.T)

    @cached_property
    def slopes(self):
        """Slopes of the criterion, exactly."""
        products, root = self.products, self.inverse_root
        if not self.restricted:
            root = root[:, : products.n_outer_effects]
        # Blocks (I - Z'Z R A^-1 R') of the first grouping: Z'P without the outer columns.
        whitened = self.whitening @ products.inner
        inner = products.inner - whitened.transpose(0, 2, 1) @ whitened
        left = np.eye(products.widths[0]) - whitened.transpose(0, 2, 1) @ self.whitening
        cross = block_diagonal(left) @ products.cross
        traces = [inner.sum(axis=0) - _summed_squares(cross, root, products.widths[0])]
        n_counted = root.shape[1]
        for at, q, ratio_root in zip(
            products.outer_slices, products.widths[1:], self.roots[1:], strict=True
        ):
            blocks = level_blocks(self.reduced, at, q).sum(axis=0)
            n_levels = (at.stop - at.start) // q
            share = np.linalg.eigvalsh(ratio_root.T @ blocks @ ratio_root)[0] / n_levels
            if share < _SMALL_RATIO:
                traces.append(blocks - _summed_squares(self.reduced[at], root, q))
                continue
            # Z'PZ is R^-T (I - S^-1) R^-1, which loses digits where ratios are small.
            factor = self._inverse_factor[:n_counted, at].T.reshape(n_levels, q, -1)
            inverse = np.einsum("lar,lbr->ab", factor, factor, optimize=True)
            left = np.linalg.inv(ratio_root)
            traces.append(left.T @ (n_levels * np.eye(q) - inverse) @ left)
        return Slopes(traces, [pull.T @ pull / self.noise for pull in self.pulls])


class IterativeEquations(Equations):
    """Equations by conjugate gradients on large groupings, with traces by random signs.

    The large groupings come first among the outer columns and are eliminated, too. What is left of
    the others, with up to `MOST_EXACT` effects each, and of the population's columns is solved
    exactly. There is no criterion: its determinant is not computed.
    """

    criterion = np.nan

    def __init__(self, products, roots, restricted=True, noise=None, start=None, tol=SOLVED):
        self._start = start  # solutions of the last point, near which those of this one are
        self._tol, self.probed = tol, None
        super().__init__(products, roots, restricted, noise)

    def _set_up(self):
        products, large = self.products, self.products.n_large_effects
        scaling = self._outer_roots()
        self._large_root, self._exact_root = scaling[:large, :large], scaling[large:, large:]
        explained = self.explained[:, :large] @ self._large_root
        within = self._large_root.T @ products.large_outer @ self._large_root
        squares = np.asarray(explained.multiply(explained).sum(axis=0)).ravel()
        self._diagonal = within.diagonal() + 1.0 - squares
        n_outer = len(products.outer_target)
        border = self._reduced(np.eye(n_outer, n_outer - large, -large))
        self._border = self._large_root.T @ border[:large]
        start = None if self._start is None else self._start.eliminated
        self.eliminated = self._solve_large(self._border, start)
        self.reduced = border[large:] - self._border.T @ self.eliminated
        system = self._exact_root.T @ (self._exact_root.T @ self.reduced).T
        effects = np.arange(products.n_outer_effects - large)
        system[effects, effects] += 1.0
        self._inverse = np.linalg.inv(system)

    def _outer_roots(self):
        """Sparse matrix (r, r) with the outer groupings' roots on its diagonal, and ones."""
        products = self.products
        blocks = [
            block_diagonal(np.broadcast_to(root, (n, *root.shape)))
            for root, n in zip(self.roots[1:], products.n_levels[1:], strict=True)
        ]
        return sparse.block_diag([*blocks, sparse.eye_array(products.n_columns)], format="csr")

    def _reduced(self, outer):
        """What the first grouping leaves of the outer products, times outer columns (r, k)."""
        return self.products.outer @ outer - self._unexplained(self._explained(outer))

    def _times_large(self, effects):
        """The large groupings' part of S times their effects (l, k)."""
        products, scaled = self.products, self._large_root @ effects
        explained = apply_blocks(self.whitening, products.large_cross @ scaled)
        explained = apply_blocks(self.whitening.transpose(0, 2, 1), explained)
        left = products.large_outer @ scaled - products.large_cross_transposed @ explained
        return self._large_root.T @ left + effects

    def _solve_large(self, right, start=None, tol=None):
        tol = self._tol if tol is None else tol
        return conjugate_gradients(self._times_large, self._diagonal, right, tol, start)

    def _solve(self, right):
        large = self.products.n_large_effects
        effects = self._solve_large(right[:large])
        return self._with_exact(effects, right[large:], self._inverse)

    def _with_exact(self, effects, right, inverse):
        """Solutions (r, k) from those of the large groupings alone."""
        exact = inverse @ (right - self._exact_root.T @ (self._border.T @ effects))
        return np.concatenate([effects - self.eliminated @ (self._exact_root @ exact), exact])

    @cached_property
    def inverse_root(self):
        """Root (r, s) of R S^-1 R': exact for the exact columns, the rest from posterior draws.

        A draw is the error of estimates of the large groupings' effects from a simulated table
        (Henderson's equations give its covariance).
        """
        products, rng = self.products, np.random.default_rng(PROBE_SEED)
        inner, outside = products.rows
        large = products.n_large_effects
        outside, blocks = outside[:, :large], []
        for _ in range(_N_DRAWS // _DRAWS_AT_ONCE if large else 0):
            effects = rng.standard_normal((large, _DRAWS_AT_ONCE))
            first = rng.standard_normal((inner.shape[1], _DRAWS_AT_ONCE))
            first = first.reshape(*products.inner_target.shape, -1)
            first = np.einsum("ab,lb...->la...", self.roots[0], first).reshape(inner.shape[1], -1)
            target = inner @ first + outside @ (self._large_root @ effects)
            target += rng.standard_normal(target.shape)
            explained = apply_blocks(self.whitening, inner.T @ target)
            explained = apply_blocks(self.whitening.transpose(0, 2, 1), explained)
            right = outside.T @ target - products.large_cross_transposed @ explained
            blocks.append(self._solve_large(self._large_root.T @ right, tol=SEARCHED) - effects)
        # An upper triangle: its last columns are the error of the population, which comes last.
        exact = np.linalg.cholesky(self._inverse[::-1, ::-1])[::-1, ::-1]
        border = -self.eliminated @ (self._exact_root @ exact)
        drawn = np.hstack([np.zeros((large, 0)), *blocks]) / np.sqrt(_N_DRAWS)
        result = np.zeros((len(products.outer_target), drawn.shape[1] + len(exact)))
        result[:large] = np.hstack([drawn, border])
        result[large:, drawn.shape[1] :] = exact
        return self._unscaled(result)

    @cached_property
    def _effect_inverse(self):
        """Inverse of the exact part of S without the population's columns, which hold zeros."""
        effects = slice(self.products.n_outer_effects - self.products.n_large_effects)
        block = np.linalg.inv(np.linalg.inv(self._inverse)[effects, effects])
        inverse = np.zeros_like(self._inverse)
        inverse[effects, effects] = block
        return inverse

    @cached_property
    def slopes(self):
        """Slopes of the criterion; traces of large groupings by random signs."""
        products, large, q = self.products, self.products.n_large_effects, self.products.widths[0]
        inverse = self._inverse if self.restricted else self._effect_inverse
        n_inner = products.inner[..., 0].size
        signs = random_signs(n_inner + large)
        # Random signs are exact on average over levels, so few levels get unit vectors.
        few = n_inner <= MOST_EXACT
        inner_signs = np.eye(n_inner) * np.sqrt(n_inner) if few else signs[:n_inner]
        outer_signs = signs[n_inner:]
        # Z'PZ of the first grouping is I - Z'Z R A^-1 R' times what the outer columns leave.
        whitened = self.whitening @ products.inner
        inner = products.inner - whitened.transpose(0, 2, 1) @ whitened
        left = np.eye(q) - whitened.transpose(0, 2, 1) @ self.whitening
        right = products.cross_transposed @ apply_blocks(left.transpose(0, 2, 1), inner_signs)
        padded = np.zeros((len(products.outer_target), outer_signs.shape[1]))
        padded[:large] = outer_signs
        pulled = self._reduced(padded)
        right = self._scaled(np.hstack([right, pulled]))
        start = None if self._start is None else self._start.probed
        self.probed = self._solve_large(right[:large], start)
        solved = self._unscaled(self._with_exact(self.probed, right[large:], inverse))
        n_probes = inner_signs.shape[1]
        back = apply_blocks(left, products.cross @ solved[:, :n_probes])
        traces = [inner.sum(axis=0) - _paired(back, inner_signs, q)]
        left = pulled - self._reduced(solved[:, n_probes:])
        exact = self._exact_root @ inverse @ self._exact_root.T
        exact = self.reduced - self.reduced @ exact @ self.reduced
        for at, q in zip(products.outer_slices, products.widths[1:], strict=True):
            if at.stop <= large:
                traces.append(_paired(left[at], outer_signs[at], q))
            else:
                part = slice(at.start - large, at.stop - large)
                traces.append(level_blocks(exact, part, q).sum(axis=0))
        return Slopes(traces, [pull.T @ pull / self.noise for pull in self.pulls])


def conjugate_gradients(times, diagonal, right, tol, start=None):
    """Solutions (l, k) of equations with a positive matrix, by its products with columns."""
    if not right.size:
        return np.zeros_like(right)
    scale = 1 / diagonal[:, None]
    result = np.zeros_like(right)
    if start is not None and start.shape == right.shape:
        # For a right side of zero, 0 is the solution, and relative errors are not defined.
        result += np.where(right.any(axis=0), start, 0.0)
    left = right - times(result) if result.any() else right.copy()
    least = tol**2 * np.sum(right * scale * right, axis=0)
    turned = scale * left
    move, length = turned.copy(), np.sum(left * turned, axis=0)
    at, tiny = np.arange(right.shape[1]), np.finfo(float).tiny
    for _ in range(_MOST_CG_STEPS):
        going = length > least[at]
        if not going.any():
            break
        if going.mean() < _STILL_GOING:  # the others need no products any more
            at, length = at[going], length[going]
            left, move = left[:, going], move[:, going]
        product = times(move)
        step = length / np.maximum(np.sum(move * product, axis=0), tiny)
        result[:, at] += step * move
        left -= step * product
        turned = scale * left
        after = np.sum(left * turned, axis=0)
        move = turned + after / np.maximum(length, tiny) * move
        length = after
    return result


def random_signs(n):
    """Signs (n, k) whose outer product is the identity on average, the same in every call."""
    return np.random.default_rng(PROBE_SEED).choice([-1.0, 1.0], (n, N_PROBES))


def apply_blocks(blocks, columns):
    """Blocks (L, q, q) times columns (L q, k)."""
    if blocks.shape[1] == 1:
        return blocks[:, 0] * columns
    n, q, _ = blocks.shape
    return (blocks @ columns.reshape(n, q, -1)).reshape(columns.shape)


def block_diagonal(blocks):
    """Sparse matrix with blocks (L, q, q) on its diagonal."""
    n, q, _ = blocks.shape
    return sparse.bsr_array(
        (np.ascontiguousarray(blocks), np.arange(n), np.arange(n + 1)), (n * q, n * q)
    ).tocsr()


def level_blocks(matrix, at, q):
    """Blocks (L, q, q) of levels on the diagonal of a part of a dense matrix."""
    part = matrix[at, at]
    n = len(part) // q
    levels = np.arange(n)
    return part.reshape(n, q, n, q)[levels, :, levels]


def _paired(solved, signs, q):
    """Estimate (q, q) of the summed blocks of a matrix from its products (L q, k) with signs."""
    n = signs.shape[1]
    total = np.einsum("lak,lbk->ab", solved.reshape(-1, q, n), signs.reshape(-1, q, n)) / n
    return (total + total.T) / 2


def _summed_squares(matrix, root, q):
    """Sum (q, q) over levels of M H H'M' for the rows M (q, r) of each level, given H (r, s)."""
    total = np.zeros((q, q))
    for part in row_slices(matrix.shape[0] // q, q * root.shape[1], CELLS_AT_ONCE):
        block = matrix[part.start * q : part.stop * q] @ root
        block = block.reshape(len(block) // q, q, -1).transpose(1, 0, 2).reshape(q, -1)
        total += block @ block.T
    return total
