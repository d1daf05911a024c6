"""Mixed-model equations against the covariance of all rows written out."""

from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.linalg import hadamard

from pfl_sklearn.linear_model._mixed._groupings import _equations, _products
from pfl_sklearn.linear_model._mixed._groupings._equations import (
    DenseEquations,
    IterativeEquations,
    conjugate_gradients,
)
from pfl_sklearn.linear_model._mixed._groupings._products import Grouping, products_of
from tests.helpers.dense_groupings import Effects, solve

N_ROWS = 60
# Levels and coefficients per level of every grouping, and the population's columns.
DESIGNS = [
    ((7, 5), (1, 1), 2),
    ((6, 4, 3), (2, 1, 2), 3),
    ((5,), (2,), 2),
    ((4, 9, 3), (3, 2, 1), 4),
]
# Weights, REML and noise, with every pair of their values.
SETTINGS = [(False, True, None), (False, False, 0.7), (True, True, 0.7), (True, False, None)]
MIXED = ((9, 8, 5, 3), (2, 1, 1, 1), 2)


class Case(NamedTuple):
    """Rows, and roots of the ratios of their groupings."""

    X: np.ndarray
    y: np.ndarray
    weights: Any
    groupings: list
    roots: list

    def products(self, dense=True):
        return products_of(self.groupings, self.X, self.y, self.weights, dense)

    def effects(self):
        pairs = zip(self.groupings, self.roots, strict=True)
        return [Effects(g.codes, g.columns, root @ root.T) for g, root in pairs]

    def brute_force(self, restricted, noise):
        """Fit at ratios, the noise variance, and the fit at variances."""
        weights = np.ones(len(self.y)) if self.weights is None else self.weights
        rows = self.X, self.y, weights
        unit = solve(*rows, self.effects(), 1.0, restricted)
        n_free = len(self.y) - self.X.shape[1] * restricted
        noise = unit.residuals @ unit.pull / n_free if noise is None else noise
        effects = [e._replace(covariance=noise * e.covariance) for e in self.effects()]
        return unit, noise, solve(*rows, effects, noise, restricted)


def draw(design, *, weighted=False, singular=False, seed=0):
    """A Case with rows of no level; singular: variances of zero and a covariance of rank one."""
    (sizes, widths, p), rng = design, np.random.default_rng(seed)
    X = np.column_stack([np.ones(N_ROWS), rng.normal(size=(N_ROWS, p - 1))])
    groupings = [
        Grouping(rng.integers(-1 if k else 0, size, N_ROWS), X[:, :q].copy(), size)
        for k, (size, q) in enumerate(zip(sizes, widths, strict=True))
    ]
    roots = [np.tril(rng.normal(size=(q, q))) for q in widths]
    if singular:
        roots = [root * (np.arange(len(root)) == len(root) - 1) for root in roots]
        roots[-1] = np.zeros_like(roots[-1])
    y = X.sum(axis=1) + rng.normal(size=N_ROWS)
    return Case(X, y, rng.uniform(0.2, 3, N_ROWS) if weighted else None, groupings, roots)


@pytest.mark.parametrize("singular", [False, True])
@pytest.mark.parametrize(("weighted", "restricted", "noise"), SETTINGS)
@pytest.mark.parametrize("design", DESIGNS)
def test_dense_equations(design, weighted, restricted, noise, singular):
    case = draw(design, weighted=weighted, singular=singular)
    equations = DenseEquations(case.products(), case.roots, restricted, noise)
    unit, noise, fit = case.brute_force(restricted, noise)
    log_weights = 0.0 if case.weights is None else np.log(case.weights).sum()
    assert equations.noise == pytest.approx(noise, rel=1e-8)
    assert equations.criterion == pytest.approx(-2 * fit.log_likelihood + log_weights, abs=1e-8)
    effects, population = equations.solution
    assert_allclose(population, fit.population, atol=1e-8)
    covariance = fit.population_covariance
    own = equations.inverse_root[-len(population) :]
    assert_allclose(noise * own @ own.T, covariance, atol=1e-8)
    left = unit.projection(case.X)
    counted = left if restricted else unit.inverse
    for k, (grouping, each) in enumerate(zip(case.groupings, case.effects(), strict=True)):
        q, Z = grouping.width, each.indicator(grouping.n_levels)
        pull = (Z.T @ unit.pull).reshape(-1, q)
        assert_allclose(effects[k], pull @ each.covariance, atol=1e-8)
        assert_allclose(equations.pulls[k], pull, atol=1e-8)
        blocks = (Z.T @ counted @ Z).reshape(-1, q, grouping.n_levels, q)
        assert_allclose(equations.slopes.traces[k], np.einsum("lalb->ab", blocks), atol=1e-8)
        assert_allclose(equations.slopes.squares[k], pull.T @ pull / noise, atol=1e-8)


@pytest.mark.parametrize(("weighted", "restricted", "noise"), SETTINGS)
@pytest.mark.parametrize("design", DESIGNS)
def test_slopes_and_information_are_derivatives(design, weighted, restricted, noise):
    case = draw(design, weighted=weighted)
    products = case.products()
    equations = DenseEquations(products, case.roots, restricted, noise)
    unit, value, _ = case.brute_force(restricted, noise)
    rng = np.random.default_rng(1)
    directions, working, step = [], [], 1e-6
    for k, (root, effects) in enumerate(zip(case.roots, case.effects(), strict=True)):
        direction = rng.normal(size=root.shape)
        direction += direction.T
        criteria = []
        for sign in (1, -1):
            roots = list(case.roots)
            roots[k] = np.linalg.cholesky(root @ root.T + sign * step * direction)
            criteria.append(DenseEquations(products, roots, restricted, noise).criterion)
        slope = (criteria[0] - criteria[1]) / (2 * step)
        assert np.vdot(equations.slopes.of(k), direction) == pytest.approx(slope, abs=1e-5)
        directions.append((k, direction))
        moved = effects._replace(covariance=direction)
        working.append(moved.shared(moved) @ unit.pull)
    working = np.array(working)
    expected = working @ unit.projection(case.X) @ working.T / value
    if noise is None:
        share = working @ unit.pull / value
        n_free = N_ROWS - case.X.shape[1] * restricted
        expected -= np.outer(share, share) / n_free
    assert_allclose(equations.information(directions), expected, rtol=1e-8, atol=1e-8)


@pytest.fixture(params=[300, 6, 0], ids=["all exact", "some exact", "none exact"])
def most_exact(request, monkeypatch):
    """Effects of a grouping that are solved exactly, with signs that give exact traces."""
    for module in (_products, _equations):
        monkeypatch.setattr(module, "MOST_EXACT", request.param)
    monkeypatch.setattr(_equations, "random_signs", lambda n: hadamard(64)[:n].astype(float))
    return request.param


@pytest.mark.parametrize(("weighted", "restricted", "noise"), SETTINGS)
def test_iterative_equations_are_the_dense_ones(most_exact, weighted, restricted, noise):
    case = draw(MIXED, weighted=weighted)
    exact = DenseEquations(case.products(), case.roots, restricted, noise)
    near = IterativeEquations(case.products(dense=False), case.roots, restricted, noise)
    assert near.products.n_large_effects == {300: 0, 6: 8, 0: 16}[most_exact]
    assert np.isnan(near.criterion)
    assert near.noise == pytest.approx(exact.noise, rel=1e-8)
    assert_solutions(near, exact, 1e-7)
    directions = [(k, root @ root.T) for k, root in enumerate(case.roots)]
    assert_allclose(near.information(directions), exact.information(directions), rtol=1e-6)


@pytest.mark.parametrize("singular", [False, True])
def test_iterative_equations_from_other_solutions(most_exact, singular):
    case = draw(MIXED, singular=singular, seed=3)
    products = case.products(dense=False)
    before = IterativeEquations(products, [2 * root + 0.1 for root in case.roots])
    assert before.slopes.of(0).shape == (2, 2)  # leaves solutions for the next point, too
    near = IterativeEquations(products, case.roots, start=before)
    assert_solutions(near, DenseEquations(case.products(), case.roots), 1e-7)


def assert_solutions(near, exact, tol):
    """The same effects, coefficients and slopes, and the same covariance of the population."""
    for mine, other in zip(near.solution[0], exact.solution[0], strict=True):
        assert_allclose(mine, other, atol=tol)
    assert_allclose(near.solution[1], exact.solution[1], atol=tol)
    for mine, other in zip(near.slopes.traces, exact.slopes.traces, strict=True):
        assert_allclose(mine, other, rtol=10 * tol, atol=10 * tol)
    for mine, other in zip(near.slopes.squares, exact.slopes.squares, strict=True):
        assert_allclose(mine, other, rtol=10 * tol, atol=10 * tol)
    p = exact.products.n_columns
    mine, other = near.inverse_root[-p:], exact.inverse_root[-p:]
    assert_allclose(mine @ mine.T, other @ other.T, rtol=10 * tol)


def test_draws_of_the_posterior_have_its_covariance(most_exact, monkeypatch):
    monkeypatch.setattr(_equations, "_N_DRAWS", 16_000)
    monkeypatch.setattr(_equations, "_DRAWS_AT_ONCE", 4_000)
    case = draw(MIXED)
    exact = DenseEquations(case.products(), case.roots).inverse_root
    near = IterativeEquations(case.products(dense=False), case.roots).inverse_root
    covariance = exact @ exact.T
    sds = np.sqrt(np.diag(covariance))
    # A correlation from so many draws has an error of up to .008.
    assert_allclose(
        (near @ near.T) / np.outer(sds, sds), covariance / np.outer(sds, sds), atol=0.035
    )


def test_random_signs_are_right_on_average():
    """What makes traces by random signs unbiased."""
    signs = np.hstack([_signs_of_seed(seed) for seed in range(200)])
    assert set(np.unique(signs)) == {-1.0, 1.0}
    assert_allclose(signs @ signs.T / signs.shape[1], np.eye(len(signs)), atol=0.07)


def _signs_of_seed(seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_equations, "PROBE_SEED", seed)
        return _equations.random_signs(12)


def test_conjugate_gradients():
    """Columns that need many steps, and some that need none, from zero and from nearby."""
    rng = np.random.default_rng(0)
    root = rng.normal(size=(40, 40)) * np.geomspace(0.1, 10, 40)
    matrix = root.T @ root + np.eye(40)
    right = np.column_stack([rng.normal(size=(40, 6)), np.zeros((40, 10))])
    expected = np.linalg.solve(matrix, right)
    products = []

    def times(columns):
        products.append(columns.shape[1])
        return matrix @ columns

    found = conjugate_gradients(times, np.diag(matrix), right, 1e-12)
    assert_allclose(found, expected, atol=1e-9)
    assert max(products) == 6  # solved columns are left out
    from_zero = len(products)
    conjugate_gradients(times, np.diag(matrix), right, 1e-12, start=expected + 1e-9)
    assert len(products) - from_zero < from_zero


def test_dependent_population_columns_are_refused():
    case = draw(DESIGNS[0])
    case = case._replace(X=np.zeros_like(case.X))
    with pytest.raises(np.linalg.LinAlgError, match="linearly dependent"):
        DenseEquations(case.products(), case.roots)
