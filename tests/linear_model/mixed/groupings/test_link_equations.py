"""Laplace's approximation with several groupings, against all effects written out."""

import numpy as np
import pytest
from numpy.testing import assert_allclose

from pfl_sklearn.linear_model._mixed._families import Binomial, NegativeBinomial, Poisson
from pfl_sklearn.linear_model._mixed._groupings import _equations, _link_equations, _products
from pfl_sklearn.linear_model._mixed._groupings._link_equations import (
    SETTLED,
    LinkModel,
    LinkPoints,
    LinkState,
)
from pfl_sklearn.linear_model._mixed._groupings._products import Grouping, grouped_design
from tests.helpers.dense_link import DenseLinkModel

N, P = 60, 2
FAMILIES = {"classes": Binomial(), "counts": Poisson(), "dispersed": NegativeBinomial(0.7)}
ROOTS = [np.array([[0.9, 0.0], [0.3, 0.5]]), np.array([[0.7]]), np.array([[1.1]])]


def make(family, dense=True):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, 2))
    codes = [rng.integers(size, size=N) for size in (7, 5, 4)]
    codes[1][:6] = -1  # rows of no level
    columns = [np.column_stack([np.ones(N), x[:, 0]]), np.ones((N, 1)), np.ones((N, 1))]
    groupings = [
        Grouping(code, column, size)
        for code, column, size in zip(codes, columns, (7, 5, 4), strict=True)
    ]
    eta = 0.3 + 0.6 * x[:, 0] + rng.normal(size=7)[codes[0]] + rng.normal(size=4)[codes[2]]
    if family.bounded:
        y = (rng.random(N) < 1 / (1 + np.exp(-eta))).astype(float)
    else:
        y = rng.poisson(np.exp(eta)).astype(float)
    design = grouped_design(groupings, np.column_stack([np.ones(N), x[:, 1]]), dense)
    weights, offset = rng.uniform(0.5, 2.0, size=N), 0.3 * rng.normal(size=N)
    spread = [np.diag([0.2, 0.1]), np.zeros((1, 1)), np.zeros((1, 1))]
    penalty = np.diag([0.0, 0.4])
    model = LinkModel(design, groupings, family, y, weights, offset, penalty, spread)
    return DenseLinkModel.of(model)


def solve(model, roots=ROOTS, tol=SETTLED):
    return points_of(model).at(roots, tol=tol)


def points_of(model):
    n_effects = sum(each.n_effects for each in model.groupings[1:])
    start = LinkState(np.zeros(model.groupings[0].n_effects), np.zeros(n_effects + P), np.zeros(P))
    return LinkPoints(model, start)


@pytest.fixture(scope="module", params=FAMILIES)
def case(request):
    dense = make(FAMILIES[request.param])
    return dense, solve(dense.model)


def covariances(roots=ROOTS):
    return [root @ root.T for root in roots]


def test_criterion_at_its_best_population(case):
    dense, equations = case
    population = equations.solution[1]
    penalties = sum(np.vdot(*pair) for pair in zip(dense.model.spread, covariances(), strict=True))
    expected = dense.criterion(population, covariances())
    assert equations.criterion == pytest.approx(expected + penalties, abs=1e-9)
    for k in range(P):
        step = 1e-4 * np.eye(P)[k]
        ends = [dense.criterion(population + sign * step, covariances()) for sign in (1, -1)]
        assert abs(ends[0] - ends[1]) / 2e-4 < 1e-4


def test_modes_shifts_and_variances(case):
    dense, equations = case
    effects, population = equations.solution
    mode, H = dense.mode(population, covariances())
    assert_allclose(np.concatenate([e.ravel() for e in effects]), mode, atol=1e-7)
    assert_allclose(equations.predictors, dense.predictors(population, mode), atol=1e-6)
    variances = np.einsum("ne,ef,nf->n", dense.Z, np.linalg.inv(H), dense.Z)
    assert_allclose(equations.leverages, variances, rtol=1e-6)
    slopes = dense.model.curvature_slopes(equations.predictors, variances)
    shifts = np.linalg.solve(H, -0.5 * dense.Z.T @ slopes)
    found = np.concatenate([each.ravel() for each in equations.shifts])
    assert_allclose(found, shifts, atol=1e-7)
    assert_allclose(dense.model.changes(equations.shifts), dense.Z @ shifts, atol=1e-7)


def test_a_tilt_that_is_not_found_leaves_the_points_where_they_were(case, monkeypatch):
    dense, equations = case
    points = points_of(dense.model)
    with monkeypatch.context() as patch:
        patch.setattr(
            LinkPoints, "_learn", lambda self, *_: setattr(self, "_inverse", -9 * np.eye(P))
        )
        assert np.isfinite(points.at(ROOTS, tol=SETTLED).criterion)
        assert not points.converged
    again = points.at(ROOTS, tol=SETTLED)
    assert points.converged
    assert again.criterion == pytest.approx(equations.criterion, abs=1e-8)


def test_slopes_by_differences(case):
    """At the best population, so the slope at a fixed one is that of the profile."""
    dense, equations = case
    population, steps = equations.solution[1], 1e-4
    for k, S in enumerate(covariances()):
        for a, b in zip(*np.tril_indices(len(S)), strict=True):
            direction = np.zeros_like(S)
            direction[a, b] = direction[b, a] = 1.0
            ends = []
            for sign in (1, -1):
                moved = covariances()
                moved[k] = S + sign * steps * direction
                ends.append(dense.criterion(population, moved))
            expected = (ends[0] - ends[1]) / (2 * steps)
            expected += np.vdot(direction, dense.model.spread[k])
            found = np.vdot(direction, equations.slopes.of(k))
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.slow_but_first
def test_iterative_equations_are_dense_ones(case, monkeypatch):
    _, equations = case
    monkeypatch.setattr(_products, "MOST_EXACT", 4)
    monkeypatch.setattr(_equations, "MOST_EXACT", 4)
    # Leverages are then by draws, whose number makes them nearly exact.
    monkeypatch.setattr(_link_equations, "N_PROBES", 20_000)
    monkeypatch.setattr(_link_equations, "_LOOSE_TILT", 1e-3)
    family = equations.model.family
    found = solve(make(family, dense=False).model, tol=0.0)
    assert_allclose(found.leverages, equations.leverages, rtol=0.06)
    assert_allclose(found.solution[1], equations.solution[1], atol=0.01)
    assert_allclose(found.population_covariance, equations.population_covariance, rtol=0.01)
    for one, other in zip(found.solution[0], equations.solution[0], strict=True):
        assert_allclose(one, other, atol=0.02)
    for one, other in zip(found.shifts, equations.shifts, strict=True):
        assert_allclose(one, other, atol=0.02)


def test_a_variance_of_zero_is_a_point_like_others(case):
    dense, _ = case
    roots = [ROOTS[0], np.zeros((1, 1)), ROOTS[2]]
    found = solve(dense.model, roots)
    assert not found.solution[0][1].any()
    near = [ROOTS[0], np.full((1, 1), 1e-5), ROOTS[2]]
    assert found.criterion == pytest.approx(solve(dense.model, near).criterion, abs=1e-6)
