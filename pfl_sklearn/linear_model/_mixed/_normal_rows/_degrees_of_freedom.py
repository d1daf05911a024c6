"""Tests of a linear mixed model's population, with degrees of freedom for estimated variances.

A variance of the population's coefficients, l' C l, is a function of the estimated variances. Its
degrees of freedom are those of a chi-square distribution with the same mean and variance. The
variance components are the directions in which the covariance between clients may move, and the
noise variance; the covariance of the rows is linear in them. Satterthwaite's approximation needs
the observed information on them, that of Kenward and Roger (1997) the expected one.

Everything follows from a client's whitened rows. In a basis where the covariance between clients,
over the noise variance, is the identity, and that of the coefficients, too, a client has the
products S (r, r) of its random columns and D (r, p) of these with all columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from scipy.special import chdtrc, fdtrc

from pfl_sklearn._typing import Floats
from pfl_sklearn.linear_model._algebra import row_slices

_ZERO = 1e-10  # share of the largest variance, below which another is 0
_INDEFINITE = 1e-6  # smallest eigenvalue of a scaled information
_CELLS = 1 << 22  # numbers of a block of clients; products take a few times that


class VarianceInformation(NamedTuple):
    """Information of a fit on its v variance components, in units of its noise variance."""

    slopes: Floats  # (v, k, k), of the coefficients' covariance over the noise variance
    products: Floats  # (v, v, k, k), X' V^-1 V_a V^-1 V_b V^-1 X
    expected: Floats  # (v, v), information of the restricted likelihood
    observed: Floats  # (v, v)
    root: Floats  # (p, k), of the coefficients' covariance; the basis of the matrices above
    noise: float

    def variances(self, L: Floats) -> Floats:
        """Variances (k,) of combinations L (k, p), given the variances of the model."""
        return self.noise * np.sum((L @ self.root) ** 2, axis=1)

    def satterthwaite(self, L: Floats) -> Floats:
        """Degrees of freedom (k,) of combinations L (k, p)."""
        x = L @ self.root
        variances, errors = np.sum(x**2, axis=1), self._errors()
        gradients = np.einsum("kp,vpr,kr->kv", x, self.slopes, x)
        of_variances = np.einsum("kv,vw,kw->k", gradients, errors, gradients)
        # Without an estimated variance the test is a normal one.
        with np.errstate(divide="ignore"):
            return 2 * variances**2 / of_variances

    def _errors(self):
        """Covariance (v, v) of the variance components, by the observed information."""
        scaled, _ = _scaled(self.observed)
        # Where the noise is all but 0, the observed information is rounding errors.
        is_definite = not len(scaled) or np.linalg.eigvalsh(scaled)[0] > _INDEFINITE
        return _inverse(self.observed if is_definite else self.expected)

    def joint_satterthwaite(self, L: Floats, estimates: Floats) -> JointTest:
        """F test of L beta = 0 for L (k, p) of full rank; its mean is that of the t tests'."""
        # Singular values of the root keep twice the digits of eigenvalues of the covariance.
        left, sizes, _ = np.linalg.svd(L @ self.root, full_matrices=False)
        t2 = (left.T @ estimates) ** 2 / (self.noise * sizes**2)
        dfs, rank = self.satterthwaite(left.T @ L), len(L)
        if rank == 1 or np.isinf(dfs).any():
            return JointTest(float(t2.mean()), rank, float(dfs.max()))
        if (dfs <= 2).any():  # such an F variable has no mean; as lmerTest
            return JointTest(float(t2.mean()), rank, 2.0)
        mean = np.sum(dfs / (dfs - 2))
        return JointTest(float(t2.mean()), rank, float(2 * mean / (mean - rank)))

    def kenward_roger(self) -> KenwardRoger:
        """Their adjusted covariance, and what their degrees of freedom need."""
        errors = _inverse(self.expected)
        squares = np.einsum("vpr,wrs->vwps", self.slopes, self.slopes)
        adjustment = np.einsum("vw,vwps->ps", errors, self.products - squares)
        adjustment = (adjustment + adjustment.T) / 2
        return KenwardRoger(self, errors, np.eye(len(adjustment)) + 2 * adjustment)


class JointTest(NamedTuple):
    """An F test."""

    statistic: float
    numerator_df: int
    df: float

    @property
    def p_value(self) -> float:
        """Probability of as large a statistic under the hypothesis."""
        if np.isinf(self.df):
            return float(chdtrc(self.numerator_df, self.statistic * self.numerator_df))
        return float(fdtrc(self.numerator_df, self.df, self.statistic)) if self.df > 0 else np.nan


class KenwardRoger(NamedTuple):
    """Tests with the covariance and degrees of freedom of Kenward and Roger (1997)."""

    information: VarianceInformation
    errors: Floats  # (v, v), of the variance components
    adjusted: Floats  # (k, k), covariance in the basis of the root

    def variances(self, L: Floats) -> Floats:
        """Variances (k,) of combinations L (k, p)."""
        x = L @ self.information.root
        return self.information.noise * np.sum((x @ self.adjusted) * x, axis=1)

    def test(self, L: Floats, estimates: Floats) -> JointTest:
        """F test of L beta = 0 for L (k, p) of full rank, with its scale."""
        x = L @ self.information.root
        rank = len(x)
        middle = x.T @ np.linalg.solve(x @ x.T, x)  # of the unadjusted covariance
        pulled = np.einsum("pr,vrs->vps", middle, self.information.slopes)
        traces = np.einsum("vpp->v", pulled)
        a1 = traces @ self.errors @ traces
        a2 = np.einsum("vw,vpr,wrp->", self.errors, pulled, pulled)
        covariance = self.information.noise * x @ self.adjusted @ x.T
        statistic = float(estimates @ np.linalg.solve(covariance, estimates) / rank)
        if rank == 1 or a2 <= 0:  # what follows has 0 / 0 at four degrees of freedom
            return JointTest(statistic, rank, float(2 / a2) if a2 > 0 else np.inf)
        b = (a1 + 6 * a2) / (2 * rank)
        g = ((rank + 1) * a1 - (rank + 4) * a2) / ((rank + 2) * a2)
        divisor = 3 * rank + 2 * (1 - g)
        c1, c2, c3 = g / divisor, (rank - g) / divisor, (rank + 2 - g) / divisor
        mean = 1 / (1 - a2 / rank)
        variance = 2 / rank * (1 + c1 * b) / ((1 - c2 * b) ** 2 * (1 - c3 * b))
        df = 4 + (rank + 2) / (rank * variance / (2 * mean**2) - 1)
        return JointTest(float(df / (mean * (df - 2))) * statistic, rank, float(df))

    def degrees_of_freedom(self, L: Floats) -> Floats:
        """Degrees of freedom (k,) of each combination alone."""
        return np.array([self.test(row[None], np.zeros(1)).df for row in L])


def variance_information(
    posterior: Any,
    deviations: Floats,
    directions: Floats | None,
    noise_is_free: bool,
    n_rows: int,
    restricted: bool,
) -> VarianceInformation:
    """VarianceInformation of a fit with a RowPosterior, n_rows rows and deviations (m, q).

    `directions` (v, q, q) are those of the covariance between clients over the noise variance, in
    units of the data's columns, as `deviations` are; None: it is known.
    """
    q, scale, noise = deviations.shape[1], posterior.scale, posterior.noise
    basis = _root(posterior.ratio[:q, :q])
    free = _free_directions(directions, basis, scale[:q])
    root = posterior.error_root / np.sqrt(noise)
    pulls = np.linalg.lstsq(basis, (deviations / scale[:q]).T, rcond=None)[0].T  # (m, r)
    sums = _ClientSums.zeros(len(free), root.shape[1])
    for part in row_slices(len(pulls), posterior.rows.shape[1] * root.shape[1], _CELLS):
        rows = posterior.whitened(part)
        sums = sums.plus(rows[:, :, :q] @ basis, rows @ root, pulls[part], free)
    return sums.information(
        n_rows, restricted, noise, noise_is_free, scale[:, None] * posterior.error_root
    )


def _root(matrix):
    """Root (q, r) of a positive semidefinite matrix (q, q), of full rank r."""
    size = np.sqrt(np.diag(matrix))
    unit = np.divide(1, size, out=np.zeros_like(size), where=size > 0)
    values, vectors = np.linalg.eigh(matrix * unit * unit[:, None])
    positive = values > _ZERO
    return size[:, None] * vectors[:, positive] * np.sqrt(values[positive])


def _free_directions(directions, basis, scale):
    """Directions (v, r, r) in the basis; what is 0 stays so, and counts as known."""
    if directions is None or not basis.shape[1]:
        return np.zeros((0, basis.shape[1], basis.shape[1]))
    q, r = basis.shape
    if len(directions) == q * (q + 1) // 2:  # of a full covariance: all that keep its rank
        entries = [(a, b) for a in range(r) for b in range(a + 1)]
        result = np.zeros((len(entries), r, r))
        for each, (a, b) in zip(result, entries, strict=True):
            each[a, b] = each[b, a] = 1.0
        return result
    inverse = np.linalg.pinv(basis)
    moved = directions / np.multiply.outer(scale, scale)
    result = inverse @ moved @ inverse.T
    # What a direction has outside the basis is at the limit of what covariances can be.
    inside = np.linalg.norm(basis @ result @ basis.T - moved, axis=(1, 2))
    return result[inside <= 1e-6 * np.linalg.norm(moved, axis=(1, 2))]


class _ClientSums(NamedTuple):
    """Sums over clients; v directions, then the noise variance."""

    slopes: Floats  # (v + 1, k, k); the last over all rows, without those that have no clients
    products: Floats  # (v + 1, v + 1, k, k)
    traces: Floats  # (v + 1, v + 1)
    squares: Floats  # (v + 1, v + 1), of the residuals
    crossed: Floats  # (v + 1, k)

    @classmethod
    def zeros(cls, v, k):
        n = v + 1
        shapes = (n, k, k), (n, n, k, k), (n, n), (n, n), (n, k)
        return cls._make(np.zeros(shape) for shape in shapes)

    def plus(self, random, columns, pulls, directions):
        """With clients of whitened columns (b, n, r) and (b, n, k), and residuals' pulls (b, r)."""
        s = random.transpose(0, 2, 1) @ random
        d = random.transpose(0, 2, 1) @ columns
        # The noise variance is the direction of the identity, less that of the whole covariance.
        # So a step in it is one of -I in the basis, and one of all rows, which is added in the end.
        steps = np.concatenate([directions, -np.eye(s.shape[1])[None]])
        moved = np.einsum("vrs,bsk->vbrk", steps, d)
        slopes = np.einsum("brk,vbrl->vkl", d, moved, optimize=True)
        products = np.einsum("vbrk,brs,wbsl->vwkl", moved, s, moved, optimize=True)
        pulled = np.einsum("vrs,bst->vbrt", steps, s)
        traces = np.einsum("vbrs,wbsr->vw", pulled, pulled, optimize=True)
        weights = np.einsum("vrs,bs->vbr", steps, pulls)
        squares = np.einsum("vbr,brs,wbs->vw", weights, s, weights, optimize=True)
        crossed = np.einsum("vbr,brk->vk", weights, d, optimize=True)
        # The noise variance times all rows adds products of one step alone.
        once = np.einsum("vbrr->v", pulled), np.einsum("vbr,br->v", weights, pulls)
        traces[-1] += once[0]
        traces[:, -1] += once[0]
        squares[-1] += once[1]
        squares[:, -1] += once[1]
        products[-1] += slopes
        products[:, -1] += slopes
        parts = slopes, products, traces, squares, crossed
        return _ClientSums._make(mine + more for mine, more in zip(self, parts, strict=True))

    def information(self, n_rows, restricted, noise, noise_is_free, root):
        """VarianceInformation of all rows; `root` (p, k) is that of the errors' covariance."""
        k = root.shape[1]
        slopes, products, traces, squares = (np.array(part) for part in self[:4])
        slopes[-1] += np.eye(k)
        products[-1, -1] += np.eye(k)
        traces[-1, -1] += n_rows
        # Residual squares of all rows are those of an estimated noise variance.
        squares[-1, -1] += noise * (n_rows - k if restricted else n_rows)
        squares = squares - self.crossed @ self.crossed.T
        if restricted:
            traces = traces - 2 * np.einsum("vwkk->vw", products)
            traces += np.einsum("vkl,wlk->vw", slopes, slopes)
        free = slice(None) if noise_is_free else slice(-1)
        observed = squares / noise - traces / 2
        return VarianceInformation(
            slopes[free],
            products[free, free],
            traces[free, free] / 2,
            observed[free, free],
            root / np.sqrt(noise),
            noise,
        )


def _scaled(information):
    """Information (v, v) scaled to a diagonal of 1, and the factors (v,)."""
    size = np.sqrt(np.abs(np.diag(information)))
    unit = np.divide(1, size, out=np.zeros_like(size), where=size > 0)
    return information * unit * unit[:, None], unit


def _inverse(information):
    """Covariance (v, v) of estimates with that information; 0 along flat directions."""
    scaled, unit = _scaled(information)
    return np.linalg.pinv(scaled, hermitian=True) * unit * unit[:, None]
