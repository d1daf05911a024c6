"""Laplace criterion of logistic regressions: values, gradients and modes against brute force."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy.optimize import linprog, minimize
from scipy.special import log_softmax

from pfl_sklearn.linear_model._algebra import _eliminate, invert_lower
from pfl_sklearn.linear_model._mixed import _laplace as laplace, _table
from pfl_sklearn.linear_model._mixed._client_posterior import n_whitened, whitened_rows
from pfl_sklearn.linear_model._mixed._families import class_family, helmert_contrasts
from pfl_sklearn.linear_model._mixed._laplace import (
    Dual,
    Primal,
    choose_mode_system,
    criterion_slopes,
    find_mode,
)
from pfl_sklearn.linear_model._mixed._marginal_likelihood import MarginalLikelihood
from pfl_sklearn.linear_model._mixed._marginal_maximum import MarginalMaximum
from pfl_sklearn.linear_model._mixed._population_fit import fit_pooled
from pfl_sklearn.linear_model._mixed._table import RegressionTable, SharedStacks, stack_rows
from tests.helpers.slow import slow

seeds = st.integers(0, 10_000)


def logits_of(n_classes):
    """Logits (K, a) of the classes in the predictors, up to a constant."""
    return np.array([[0.0], [1.0]]) if n_classes == 2 else helmert_contrasts(n_classes)


def make_rows(seed, n_classes, q, largest, m=6):
    """Columns (n, q + 2), labels, weights, codes, population (a, q + 2) and factor (q, r)."""
    rng = np.random.default_rng(seed)
    codes = rng.permutation(np.repeat(np.arange(m), rng.integers(1, largest + 1, m)))
    columns = rng.normal(size=(len(codes), q + 2))
    labels = rng.integers(0, n_classes, len(codes))
    weights = rng.random(len(codes)) + 0.2
    population = 0.5 * rng.normal(size=(class_family(n_classes).n_outputs, q + 2))
    return columns, labels, weights, codes, population, rng.normal(size=(q, q + seed % 2))


def criterion_of(rows, n_classes):
    columns, labels, weights, codes, *_ = rows
    m, q = codes.max() + 1, columns.shape[1] - 2
    table = RegressionTable(columns, labels, codes, m, weights, q, None, [], True)
    start = MarginalMaximum(*rows[4:], class_family(n_classes), 0, True)
    return MarginalLikelihood(table, SharedStacks(table.stacks()), start, 1)


def symmetric_laplace(rows, n_classes):
    """The criterion with one deviation per class and dense matrices, client by client."""
    columns, labels, weights, codes, population, factor = rows
    coding = class_family(n_classes).coding
    # One logit with deviation v is softmax with deviations of half the difference.
    symmetric = np.array([[-0.5], [0.5]]) @ population if n_classes == 2 else coding @ population
    shrink = 1 / np.sqrt(2) if n_classes == 2 else 1.0
    total = 0.0
    for client in range(codes.max() + 1):
        members = codes == client
        x, y, w = columns[members], labels[members], weights[members]
        z = shrink * x[:, : len(factor)] @ factor
        shape = z.shape[1], n_classes

        def minus(v, x=x, y=y, w=w, z=z, shape=shape):
            log_p = log_softmax(x @ symmetric.T + z @ v.reshape(shape), axis=1)
            score = w[:, None] * (np.eye(n_classes)[y] - np.exp(log_p))
            value = 0.5 * v @ v - w @ log_p[np.arange(len(y)), y]
            return value, v - (z.T @ score).ravel()

        result = minimize(minus, np.zeros(np.prod(shape)), jac=True, tol=1e-13)
        p = np.exp(log_softmax(x @ symmetric.T + z @ result.x.reshape(shape), axis=1))
        hessian = np.eye(result.x.size)
        for zj, pj, wj in zip(z, p, w, strict=True):
            hessian += wj * np.kron(np.outer(zj, zj), np.diag(pj) - np.outer(pj, pj))
        total += -result.fun - 0.5 * np.linalg.slogdet(hessian)[1]
    return total


@pytest.mark.parametrize("n_classes", [2, 5])
@pytest.mark.parametrize(("q", "largest"), [(1, 6), (3, 8), (4, 3)])
def test_criterion_is_that_of_one_deviation_per_class(n_classes, q, largest):
    rows = make_rows(7, n_classes, q, largest)
    value = criterion_of(rows, n_classes)(*rows[4:])[0]
    assert value == pytest.approx(symmetric_laplace(rows, n_classes), abs=1e-6)


@given(seeds, st.sampled_from([2, 3, 4]), st.integers(1, 5), st.integers(1, 9))
@settings(max_examples=12, deadline=None)
def test_gradient_by_finite_differences(seed, n_classes, q, largest):
    rows = make_rows(seed, n_classes, q, largest)
    population, factor = rows[4:]
    criterion = criterion_of(rows, n_classes)
    _, by_population, by_factor = criterion(population, factor)
    step = 1e-5
    for values, gradient in ((population, by_population), (factor, by_factor)):
        rng = np.random.default_rng(seed)
        for _ in range(3):
            direction = rng.normal(size=values.shape)
            ends = []
            for sign in (1, -1):
                values += sign * step * direction
                ends.append(criterion(population, factor)[0])
                values -= sign * step * direction
            slope = (ends[0] - ends[1]) / (2 * step)
            assert slope == pytest.approx(np.vdot(gradient, direction), rel=1e-5, abs=1e-5)


@given(seeds, st.sampled_from([2, 3]), st.integers(1, 5), st.integers(1, 9))
@settings(max_examples=10, deadline=None)
def test_both_systems_give_the_same(seed, n_classes, q, largest):
    columns, labels, weights, codes, population, factor = make_rows(seed, n_classes, q, largest)
    outcome = class_family(n_classes)
    for stack in stack_rows(columns, labels, weights, codes, codes.max() + 1):
        features = stack.x[:, :, :q] @ factor
        offset = stack.x @ population.T
        result = []
        for form in (Primal(features), Dual(features, features @ features.transpose(0, 2, 1))):
            size = features.shape[2] if isinstance(form, Primal) else features.shape[1]
            start = np.zeros((len(features), size, outcome.n_outputs))
            mode = find_mode(form, outcome, offset, stack, start)
            inverse = np.linalg.inv(form.system(mode.terms.curvature))
            slopes = criterion_slopes(
                form,
                mode,
                inverse,
                lambda s, mode=mode, stack=stack: outcome.curvature_slopes(
                    mode.predictors, stack.y, stack.w, s
                ),
            )
            log_det = np.linalg.slogdet(form.system(mode.terms.curvature))[1]
            result.append((mode.value, form.effects(mode.state), log_det, *slopes))
        for first, second in zip(*result, strict=True):
            np.testing.assert_allclose(first, second, atol=1e-8)


@pytest.mark.parametrize("n_classes", [2, *slow([5])])
@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_damped_steps_find_the_mode_from_afar(n_classes, scale):
    """With 5 classes 3 of 6 modes were given up at 1e3, on every processor."""
    columns, labels, _, codes, population, factor = make_rows(3, n_classes, 3, 8)
    outcome = class_family(n_classes)
    for stack in stack_rows(columns, labels, None, codes, codes.max() + 1):
        form = choose_mode_system(stack.x, scale * factor)
        start = np.zeros((len(stack.y), min(form.features.shape[1:]), outcome.n_outputs))
        for state in (start, start + 5.0, start + 50.0):
            mode = find_mode(form, outcome, scale * stack.x @ population.T, stack, state)
            assert mode.converged.all()
            np.testing.assert_allclose(form.residual(mode.terms.score, mode.state), 0, atol=1e-7)


@pytest.mark.parametrize("n_classes", [2, 3])
def test_no_mode_counts_as_found_that_is_not(n_classes, monkeypatch):
    columns, labels, _, codes, population, factor = make_rows(3, n_classes, 3, 8)
    outcome = class_family(n_classes)
    (stack,) = stack_rows(columns, labels, None, codes, codes.max() + 1)
    form, offset = choose_mode_system(stack.x, 1e3 * factor), 1e3 * stack.x @ population.T
    start = np.zeros((len(stack.y), min(form.features.shape[1:]), outcome.n_outputs))
    offset[2] = np.nan
    result = find_mode(form, outcome, offset, stack, start).converged
    np.testing.assert_array_equal(result, np.arange(6) != 2)
    offset[2] = 0.0
    monkeypatch.setattr(laplace, "_PATIENCE", 2)
    monkeypatch.setattr(laplace, "MAX_NEWTON", 2)
    assert not find_mode(form, outcome, offset, stack, start + 5.0).converged.all()


@pytest.mark.parametrize("n_classes", [2, 4])
@pytest.mark.parametrize(("q", "largest", "seed"), [(1, 7, 2), (1, 20, 2), (2, 7, 1), (5, 2, 1)])
def test_whitened_rows_carry_the_information(n_classes, q, largest, seed):
    columns, labels, weights, codes, population, factor = make_rows(seed, n_classes, q, largest)
    outcome = class_family(n_classes)
    a = outcome.n_outputs
    for stack in stack_rows(columns, labels, weights, codes, codes.max() + 1):
        u = stack.x @ population.T
        form = choose_mode_system(stack.x, factor)
        rows, log_det = whitened_rows(form, outcome.curvature_roots(u, stack.y, stack.w), stack.x)
        _, n, p = stack.x.shape
        assert rows.shape[1] == n_whitened(n, p, form.features.shape[2], outcome)
        weight = outcome.terms(u, stack.y, stack.w).curvature
        expected = 0.0
        for x, z, w, t in zip(stack.x, form.features, weight, rows, strict=True):
            dense = np.zeros((len(x) * a, len(x) * a))
            for j, block in enumerate(w):
                dense[j * a : (j + 1) * a, j * a : (j + 1) * a] = block
            wide = np.vstack([np.kron(np.eye(a), row) for row in x])
            effects = np.vstack([np.kron(np.eye(a), row) for row in z])
            hessian = np.eye(effects.shape[1]) + effects.T @ dense @ effects
            shifted = effects.T @ dense @ wide
            information = wide.T @ dense @ wide - shifted.T @ np.linalg.solve(hessian, shifted)
            np.testing.assert_allclose(t.T @ t, information, atol=1e-10)
            expected += np.linalg.slogdet(hessian)[1]
        assert log_det == pytest.approx(expected)


@given(seeds, st.integers(2, 6))
@settings(max_examples=12, deadline=None)
def test_derivatives_of_a_row(seed, n_classes):
    rng = np.random.default_rng(seed)
    outcome = class_family(n_classes)
    a = outcome.n_outputs
    u, y, w = 2 * rng.normal(size=(4, a)), rng.integers(0, n_classes, 4), rng.random(4)
    spread = rng.normal(size=(4, a, a))
    spread = spread + spread.transpose(0, 2, 1)
    terms = outcome.terms(u, y, w)
    np.testing.assert_allclose(
        terms.value,
        w * log_softmax(u @ logits_of(n_classes).T, axis=1)[np.arange(4), y],
        atol=1e-12,
    )
    roots = outcome.curvature_roots(u, y, w)
    np.testing.assert_allclose(roots @ roots.transpose(0, 2, 1), terms.curvature, atol=1e-12)
    slopes = outcome.curvature_slopes(u, y, w, spread)
    for k in range(a):
        step = 1e-6 * np.eye(a)[k]
        up, down = outcome.terms(u + step, y, w), outcome.terms(u - step, y, w)
        difference = [(first - second) / 2e-6 for first, second in zip(up, down, strict=True)]
        np.testing.assert_allclose(difference[0], terms.score[:, k], atol=1e-8)
        np.testing.assert_allclose(-difference[1], terms.curvature[:, :, k], atol=1e-8)
        np.testing.assert_allclose(
            np.sum(difference[2] * spread, axis=(1, 2)), slopes[:, k], atol=1e-8
        )


def test_contrasts_are_orthonormal_and_sum_to_zero():
    for n_classes in (2, 3, 7):
        contrasts = helmert_contrasts(n_classes)
        np.testing.assert_allclose(contrasts.T @ contrasts, np.eye(n_classes - 1), atol=1e-15)
        np.testing.assert_allclose(contrasts.sum(axis=0), 0, atol=1e-15)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), seeds)
@settings(max_examples=15, deadline=None)
def test_stacks_hold_every_row_once(sizes, seed):
    codes = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    columns = np.arange(1.0, 1 + len(codes))[:, None]
    stacks = stack_rows(columns, np.ones(len(codes), dtype=int), None, codes, len(sizes))
    clients = np.concatenate([stack.clients for stack in stacks])
    assert sorted(clients) == list(range(len(sizes)))
    for stack in stacks:
        assert stack.w.sum(axis=1).astype(int).tolist() == [sizes[k] for k in stack.clients]
        assert stack.w.shape[1] == max(sizes[k] for k in stack.clients)
        n_rows = stack.w.sum()
        assert stack.w.size - n_rows <= _table._PADDING + 0.5 * n_rows + len(stack.clients)
        for client, x, w in zip(stack.clients, stack.x[..., 0], stack.w, strict=True):
            assert sorted(x[w > 0]) == sorted(columns[codes == client, 0])
            assert not x[w == 0].any()


def test_small_tables_make_few_stacks():
    """Each stack costs as much time as a thousand rows."""
    sizes = np.arange(1, 41)
    codes = np.repeat(np.arange(40), sizes)
    stacks = stack_rows(np.ones((len(codes), 1)), codes % 2, None, codes, 40)
    assert len(stacks) == 1
    sizes = 100 * sizes
    codes = np.repeat(np.arange(40), sizes)
    stacks = stack_rows(np.ones((len(codes), 1)), codes % 2, None, codes, 40)
    assert len(stacks) > 5


def test_large_tables_make_several_stacks(monkeypatch):
    monkeypatch.setattr(_table, "_STACK_CELLS", 64)
    rows = make_rows(0, 2, 2, 6, m=30)
    several = criterion_of(rows, 2)
    assert len(several.states) > 5
    monkeypatch.undo()
    one = criterion_of(rows, 2)
    for first, second in zip(several(*rows[4:]), one(*rows[4:]), strict=True):
        np.testing.assert_allclose(first, second, rtol=1e-10)


def test_elimination_and_triangles():
    rng = np.random.default_rng(0)
    roots = rng.normal(size=(5, 7, 7))
    systems = np.eye(7) + roots @ roots.transpose(0, 2, 1)
    right = rng.normal(size=(5, 7))
    expected = np.linalg.solve(systems, right[..., None])[..., 0]
    np.testing.assert_allclose(_eliminate(systems, right), expected, rtol=1e-9)
    lower = np.linalg.cholesky(systems)
    np.testing.assert_allclose(invert_lower(lower), np.linalg.inv(lower), atol=1e-12)


def separable(columns, labels, n_classes):
    """Whether some coefficients put no row on the wrong side and one on the right: a program."""
    contrasts = logits_of(n_classes)
    margins = []
    for x, y in zip(columns, labels, strict=True):
        others = np.delete(np.arange(n_classes), y)
        margins += [np.kron(contrasts[y] - contrasts[k], x) for k in others]
    margins = np.array(margins)
    result = linprog(
        -margins.sum(axis=0), A_ub=-margins, b_ub=np.zeros(len(margins)), bounds=(-1, 1)
    )
    return -result.fun > 1e-6


@given(seeds, st.sampled_from([2, 3]), st.integers(5, 14), st.integers(1, 3))
@settings(max_examples=12, deadline=None)
def test_separation_is_found_as_by_linear_programming(seed, n_classes, n, d):
    rng = np.random.default_rng(seed)
    columns = np.column_stack([np.ones(n), rng.integers(-2, 3, size=(n, d))]).astype(float)
    labels = np.append(rng.integers(0, n_classes, n - n_classes), np.arange(n_classes))
    table = RegressionTable(columns, labels, np.zeros(n, int), 1, None, d + 1, 0, [], True)
    outcome = class_family(n_classes)
    start = np.zeros((outcome.n_outputs, d + 1))
    pooled = fit_pooled(columns, table, outcome, columns @ start.T, np.zeros(d + 1), start)
    assert pooled.separated == separable(columns, labels, n_classes)
