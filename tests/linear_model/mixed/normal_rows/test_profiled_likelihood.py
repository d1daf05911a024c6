"""The profiled likelihood, its slopes and maxima, against dense matrices and simplex searches."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from pfl_sklearn.linear_model._algebra import (
    covariance_factor,
    inverse_root,
    solve_lower,
    square_root,
)
from pfl_sklearn.linear_model._mixed import _reduction
from pfl_sklearn.linear_model._mixed._normal_rows import _variance_search
from pfl_sklearn.linear_model._mixed._normal_rows._profiled_likelihood import ProfiledLikelihood
from pfl_sklearn.linear_model._mixed._normal_rows._variance_search import (
    _slope_in_noise,
    search_factor,
    search_noise,
    search_ratio,
)
from tests.helpers.dense_mixed_model import (
    SHAPES,
    Problem,
    brute_force,
    coefficients,
    draw_covariance,
    draw_problem,
    n_parameters,
    reduce_rows,
    solve,
)

seeds = st.integers(0, 2**32 - 1)
flags = st.booleans()
randoms = st.sampled_from(["all", (0,), (2,), (1, 2)])


def reduced_rows(problem, spectral, **params):
    """Reduction of a problem, random columns first, and the settings of its profile."""
    fixed = np.setdiff1d(np.arange(problem.X.shape[1]), problem.random)
    order = np.concatenate([problem.random, fixed])
    return reduce_rows(
        problem.X[:, order],
        problem.target,
        problem.codes,
        problem.codes.max() + 1,
        len(problem.random),
        weights=problem.weights,
        spectral=spectral,
        **params,
    )


def likelihood_of(problem, reduced, restricted, noise):
    """The profiled likelihood of the reduction of a problem."""
    first = 0 if problem.mean is None else len(problem.random)
    return ProfiledLikelihood(reduced, restricted, first, noise)


def scaled(reduced, S):
    """A covariance (q, q) in the scale of the reduction."""
    scale = reduced.scale[: reduced.n_random]
    return S / np.multiply.outer(scale, scale)


def in_order(problem, vectors):
    """Vectors (..., p) with the random columns first, in the order of the design."""
    fixed = np.setdiff1d(np.arange(problem.X.shape[1]), problem.random)
    return vectors[..., np.argsort(np.concatenate([problem.random, fixed]))]


@settings(max_examples=12, deadline=None)
@given(seeds, randoms, st.sampled_from(SHAPES), flags, flags, flags, flags)
def test_profile_is_the_dense_likelihood(
    seed, random, covariance_type, restricted, weighted, known, free_noise
):
    rng = np.random.default_rng(seed)
    problem = draw_problem(rng, random=random, weighted=weighted, known=known)
    S = draw_covariance(rng, covariance_type, len(problem.random))
    noise = float(np.exp(rng.normal()))
    spectral = covariance_type == "spherical"
    reduced = reduced_rows(problem, spectral)
    ratio = scaled(reduced, S / noise)
    likelihood = likelihood_of(problem, reduced, restricted, None if free_noise else noise)
    result = likelihood.at_ratio(ratio)
    expected = solve(problem, S * result.noise / noise, result.noise, restricted)
    assert result.criterion == pytest.approx(expected.criterion, abs=1e-8)
    beta = result.coefficients * reduced.scale
    if known:
        beta[: likelihood.first] = problem.mean
    np.testing.assert_allclose(in_order(problem, beta), expected.population, atol=1e-9)
    error = result.covariance() * np.outer(reduced.scale, reduced.scale)
    np.testing.assert_allclose(
        in_order(problem, in_order(problem, error).T).T,
        expected.population_covariance,
        atol=1e-9 * (1 + expected.population_covariance.max()),
    )
    deviations = reduced.deviations(result.whitened.rows, result.residuals, result.ratio)
    theta = coefficients(problem, expected, S * result.noise / noise)
    np.testing.assert_allclose(
        deviations * reduced.scale[: len(problem.random)],
        (theta - expected.population)[:, problem.random],
        atol=1e-8,
    )


@settings(max_examples=10, deadline=None)
@given(seeds, randoms, flags, flags, flags, flags)
def test_slope_in_a_common_ratio(seed, random, restricted, weighted, known, free_noise):
    rng = np.random.default_rng(seed)
    problem = draw_problem(rng, random=random, weighted=weighted, known=known)
    reduced = reduced_rows(problem, True)
    likelihood = likelihood_of(problem, reduced, restricted, None if free_noise else 0.7)

    def criterion(log_ratio):
        return likelihood.at(float(np.exp(log_ratio[0] / 2))).criterion

    log_ratio = rng.normal(size=1)
    ratio = float(np.exp(log_ratio[0]))
    slope, first, second = likelihood.slope_spectral(likelihood.at(np.sqrt(ratio)))
    step = 1e-5
    numeric = (criterion(log_ratio + step) - criterion(log_ratio - step)) / (2 * step)
    assert slope * ratio == pytest.approx(numeric, abs=1e-5)
    eigenvalues = np.concatenate([stack.eigenvalues.ravel() for stack in reduced.stacks])
    shares = eigenvalues / (1 + ratio * eigenvalues)
    assert (first, second) == pytest.approx((shares.sum(), (shares**2).sum()))


@settings(max_examples=10, deadline=None)
@given(seeds, randoms, st.sampled_from(SHAPES), flags, flags, flags)
def test_slope_in_the_parameters_of_a_factor(
    seed, random, covariance_type, restricted, known, free_noise
):
    rng = np.random.default_rng(seed)
    problem = draw_problem(rng, random=random, weighted=True, known=known)
    reduced = reduced_rows(problem, False)
    likelihood = likelihood_of(problem, reduced, restricted, None if free_noise else 0.7)
    factor = covariance_factor(covariance_type, len(problem.random), 1)
    parameters = rng.normal(size=len(factor.start))

    def criterion(values):
        return likelihood.at(factor.matrix(values)).criterion

    lower = factor.matrix(parameters)
    slope = likelihood.slope_matrix(likelihood.at(lower))
    np.testing.assert_allclose(slope, slope.T, atol=1e-9)
    steps = 1e-5 * np.eye(len(parameters))
    numeric = [(criterion(parameters + h) - criterion(parameters - h)) / 2e-5 for h in steps]
    np.testing.assert_allclose(factor.pull_back(2 * slope @ lower), numeric, atol=2e-4, rtol=1e-5)


@settings(max_examples=10, deadline=None)
@given(seeds, randoms, flags, flags, flags)
def test_average_information_is_that_of_dense_matrices(seed, random, restricted, known, free_noise):
    rng = np.random.default_rng(seed)
    problem = draw_problem(rng, random=random, weighted=True, known=known)
    reduced, q = reduced_rows(problem, False), len(problem.random)
    likelihood = likelihood_of(problem, reduced, restricted, None if free_noise else 0.7)
    variances = np.exp(rng.normal(size=q)) * rng.integers(2, size=q)
    point = likelihood.at(np.sqrt(variances))
    result = likelihood.slope_diagonal(point)
    slope = np.diag(likelihood.slope_matrix(point))
    np.testing.assert_allclose(result.slope, slope, atol=1e-9)
    scale, noise = reduced.scale[:q], point.noise
    dense = solve(problem, np.diag(variances * scale**2) * noise, noise, restricted)
    pulled = dense.inverse @ problem.X
    projection = dense.inverse - pulled @ dense.population_covariance @ pulled.T
    target, columns = projection @ problem.target, problem.X[:, problem.random] * scale
    same = problem.codes[:, None] == problem.codes
    shifted = noise * columns * (same @ (columns * target[:, None]))
    expected = shifted.T @ projection @ shifted
    if free_noise:
        shared = shifted.T @ target
        expected -= np.outer(shared, shared) / (problem.target @ target)
    tolerance = 1e-5  # curvatures are in single precision
    np.testing.assert_allclose(
        result.average, expected, atol=tolerance * (1 + np.abs(expected).max())
    )
    lengths = [
        np.diag(columns[members].T @ dense.inverse[np.ix_(members, members)] @ columns[members])
        for members in (problem.codes == k for k in range(reduced.n_clients))
    ]
    squares = noise**2 * np.sum(np.square(lengths), axis=0)
    np.testing.assert_allclose(result.expected, squares, rtol=tolerance)


@settings(max_examples=10, deadline=None)
@given(seeds, randoms, flags, flags, flags)
def test_slope_in_the_noise_under_a_known_covariance(seed, random, spherical, restricted, known):
    rng = np.random.default_rng(seed)
    problem = draw_problem(rng, random=random, weighted=True, known=known)
    reduced = reduced_rows(problem, spherical)
    likelihood = likelihood_of(problem, reduced, restricted, None)
    q = len(problem.random)
    covariance = 0.8 * np.eye(q) if spherical else draw_covariance(rng, "full", q)

    def at(log_noise):
        noise = float(np.exp(log_noise))
        return likelihood._replace(noise=noise).at_ratio(covariance / noise)

    log_noise, step = rng.normal(), 1e-5
    numeric = (at(log_noise + step).criterion - at(log_noise - step).criterion) / (2 * step)
    slope = _slope_in_noise(likelihood, at(log_noise))
    assert slope == pytest.approx(numeric, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("covariance_type", SHAPES)
@settings(max_examples=2, deadline=None)
@given(seeds, st.sampled_from(["all", (0,), (1,)]), flags, flags, flags)
def test_no_simplex_search_finds_a_better_covariance(
    covariance_type, seed, random, restricted, known, free_noise
):
    rng = np.random.default_rng(seed)
    sizes = np.append(rng.integers(4, 7, 4), [1, 2])
    problem = draw_problem(rng, sizes=sizes, n_features=1, random=random, known=known)
    noise = None if free_noise else float(np.exp(rng.normal()))
    spectral = covariance_type == "spherical"
    reduced = reduced_rows(
        problem, spectral, common_scale=spectral or covariance_type == "low_rank"
    )
    likelihood = likelihood_of(problem, reduced, restricted, noise)
    if spectral:
        result = search_ratio(likelihood, 500, 1e-8)
    else:
        factor = covariance_factor(covariance_type, reduced.n_random, 1)
        result = search_factor(likelihood, factor, 500, 1e-8)
    best = brute_force(problem, covariance_type, restricted, noise, n_starts=3)
    assert result.converged
    assert result.criterion <= best + 1e-6


@settings(max_examples=6, deadline=None)
@given(seeds, randoms, flags, flags, flags)
def test_no_grid_finds_a_better_noise_variance(seed, random, spherical, restricted, known):
    rng = np.random.default_rng(seed)
    problem = draw_problem(rng, random=random, known=known)
    q = len(problem.random)
    S = np.exp(rng.normal()) * (np.eye(q) if spherical else draw_covariance(rng, "full", q))
    reduced = reduced_rows(problem, spherical)
    covariance = scaled(reduced, S)
    likelihood = likelihood_of(problem, reduced, restricted, None)
    result = search_noise(likelihood, covariance)
    best = min(solve(problem, S, np.exp(t), restricted).criterion for t in np.linspace(-8, 8, 41))
    assert result.criterion <= best + 1e-9


@pytest.mark.parametrize("spread", [0.7, 0.9])
def test_two_noise_variances_that_are_both_locally_best(spread):
    """Clients' slopes vary more than is known: far slopes and no noise, or nothing but noise."""
    rng = np.random.default_rng(0)
    codes, x = np.repeat(np.arange(6), 4), np.tile([1.0, 1.1, 0.9, 1.0], 6)
    y = x * spread * np.array([-1, 1, -1, 1, -1, 1])[codes] + 0.01 * rng.normal(size=24)
    problem = Problem(x[:, None], y, codes, np.array([0]), np.ones(24))
    S = np.array([[0.02]])
    grid = np.linspace(-12, 6, 400)
    values = np.array([solve(problem, S, np.exp(t), False).criterion for t in grid])
    inner = values[1:-1]
    assert np.sum((inner < values[:-2]) & (inner < values[2:])) == 2
    reduced = reduced_rows(problem, True)
    result = search_noise(likelihood_of(problem, reduced, False, None), scaled(reduced, S))
    assert result.criterion <= values.min() + 1e-9
    assert np.log(result.noise) == pytest.approx(grid[np.argmin(values)], abs=0.1)


@pytest.mark.parametrize("covariance_type", SHAPES)
@pytest.mark.parametrize("sd", [1e-3, 3.0, 1e6])
def test_balanced_random_intercepts_are_the_analysis_of_variance(covariance_type, sd):
    """REML is the mean squares where they give a positive variance, at any ratio of the two."""
    rng = np.random.default_rng(3)
    m, n = 12, 5
    y = np.repeat(sd * rng.normal(size=m), n) + rng.normal(size=m * n)
    codes = np.repeat(np.arange(m), n)
    means = y.reshape(m, n).mean(axis=1)
    within = np.sum((y - means[codes]) ** 2) / (m * (n - 1))
    between = max(np.var(means, ddof=1) - within / n, 0.0)
    noise = within if between > 0 else np.var(y, ddof=1)
    reduced = reduce_rows(
        np.ones((m * n, 1)), y - y.mean(), codes, m, 1, spectral=covariance_type == "spherical"
    )
    likelihood = ProfiledLikelihood(reduced, True, 0, None)
    if covariance_type == "spherical":
        result = search_ratio(likelihood, 500, 1e-8)
    else:
        factor = covariance_factor(covariance_type, reduced.n_random, 1)
        result = search_factor(likelihood, factor, 500, 1e-8)
    variance = result.noise * result.ratio[0, 0] * reduced.scale[0] ** 2
    assert result.converged
    assert result.noise == pytest.approx(noise, rel=1e-5)
    assert variance == pytest.approx(between, rel=1e-4)


def test_a_start_at_a_stationary_point_is_left():
    """A unit step from a factor of 1 leads to 0, where the slope in the factor is always zero."""
    codes, rng = np.repeat(np.arange(9), 4), np.random.default_rng(99)
    y = 0.5 * rng.normal(size=9)[codes] + rng.normal(size=36)
    for scale in (0.5, 0.8, 1.0, 1.5):
        problem = Problem(np.full((36, 1), scale), y, codes, np.array([0]), np.ones(36))
        reduced = reduced_rows(problem, False, scale=np.ones(1))
        likelihood = ProfiledLikelihood(reduced, False, 0, None)
        result = search_factor(likelihood, covariance_factor("full", reduced.n_random), 500, 1e-8)
        best = brute_force(problem, "full", False, n_starts=3)
        assert result.criterion == pytest.approx(best, abs=1e-6)
        assert result.ratio[0, 0] > 0.01


@pytest.mark.parametrize("factor", [1.0, 1e30, 1e-30])
@pytest.mark.parametrize("restricted", [True, False])
def test_many_rows_are_searched_in_stages_to_the_same_end(factor, restricted, monkeypatch):
    """Some clients, then all in half the precision: also for targets that are beyond its range."""
    problem = draw_problem(np.random.default_rng(4), sizes=[4, 3, 5] * 20, random=(0, 1))
    likelihood = likelihood_of(problem, reduced_rows(problem, True), restricted, None)
    expected = search_ratio(likelihood, 500, 1e-8)
    monkeypatch.setattr(_variance_search, "_CHEAP_CELLS", 0)
    monkeypatch.setattr(_variance_search, "_START_CLIENTS", 10)
    reduced = reduced_rows(problem._replace(y=factor * problem.y), True)
    result = search_ratio(likelihood._replace(reduced=reduced), 500, 1e-8)
    assert expected.ratio[0, 0] > 0.1
    np.testing.assert_allclose(result.ratio, expected.ratio, rtol=1e-6)
    assert result.noise == pytest.approx(factor**2 * expected.noise, rel=1e-6)


@pytest.mark.parametrize("restricted", [True, False])
@pytest.mark.parametrize("noise", [None, 0.7])
def test_variances_of_many_clients_are_searched_from_those_of_some(restricted, noise, monkeypatch):
    problem = draw_problem(np.random.default_rng(4), sizes=[4, 3, 5] * 20)
    reduced = reduced_rows(problem, False)
    likelihood = likelihood_of(problem, reduced, restricted, noise)
    factor = covariance_factor("diag", reduced.n_random)
    expected = search_factor(likelihood, factor, 500, 1e-8)
    monkeypatch.setattr(_variance_search, "_FEW_CELLS", 0)
    monkeypatch.setattr(_variance_search, "_START_CLIENTS", 10)
    result = search_factor(likelihood, factor, 500, 1e-8)
    assert result.converged
    assert np.diag(expected.ratio).max() > 0.1
    np.testing.assert_allclose(result.ratio, expected.ratio, rtol=1e-5, atol=1e-7)
    assert result.criterion == pytest.approx(expected.criterion, abs=1e-9)


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(seeds, flags, flags)
def test_a_variance_that_falls_to_zero_is_zero(seed, restricted, known):
    """Where one is zero the likelihood falls in it, and it is flat in the others."""
    rng = np.random.default_rng(seed)
    problem = draw_problem(rng, sizes=rng.integers(3, 9, 8), n_features=3, known=known)
    reduced = reduced_rows(problem, False)
    likelihood = likelihood_of(problem, reduced, restricted, None)
    result = search_factor(likelihood, covariance_factor("diag", reduced.n_random), 500, 1e-8)
    variances = np.diag(result.ratio)
    curvature = likelihood.slope_diagonal(result)
    zero = variances == 0
    assert np.all(curvature.slope[zero] >= -1e-5)
    np.testing.assert_allclose((curvature.slope * variances)[~zero], 0.0, atol=1e-5)


@pytest.mark.parametrize("spectral", [True, False])
def test_reduction_does_not_depend_on_its_batches(spectral, monkeypatch):
    problem = draw_problem(np.random.default_rng(0), sizes=[3] * 9 + [5] * 8 + [1], random=(0, 1))
    whole = reduced_rows(problem, spectral)
    monkeypatch.setattr(_reduction, "CACHED_CELLS", 20)
    parts = reduced_rows(problem, spectral)
    assert len(whole.stacks) == len(parts.stacks)
    for one, other in zip(whole.stacks, parts.stacks, strict=True):
        np.testing.assert_array_equal(one.clients, other.clients)
        np.testing.assert_array_equal(one.rows, other.rows)
    np.testing.assert_allclose(whole.remainder, parts.remainder, rtol=1e-12)


def test_reduction_keeps_all_products_of_a_client():
    problem = draw_problem(np.random.default_rng(1), weighted=True, random=(0, 2))
    for spectral in (True, False):
        reduced = reduced_rows(problem, spectral)
        order = [0, 2, 1]
        table = np.column_stack([problem.X[:, order] * reduced.scale, problem.y])
        table *= np.sqrt(problem.weights)[:, None]
        remaining = np.zeros((2, 2))
        for stack in reduced.stacks:
            for client, rows in zip(stack.clients, stack.rows, strict=True):
                block = table[problem.codes == client]
                np.testing.assert_allclose(rows[:, :2].T @ rows, block[:, :2].T @ block, atol=1e-10)
                remaining += (block.T @ block - rows.T @ rows)[2:, 2:]
                if spectral:
                    square = rows[:, :2] @ rows[:, :2].T
                    np.testing.assert_allclose(square, np.diag(np.diag(square)), atol=1e-10)
        np.testing.assert_allclose(reduced.remainder, remaining, atol=1e-10)


@settings(max_examples=12, deadline=None)
@given(seeds, st.integers(1, 4), st.integers(0, 2), st.sampled_from([1.0, 1e3, 1e6]))
def test_inverse_roots(seed, rank, n_more, spread):
    """X = A C': the pseudo-determinant of X' X is |A' A| |C' C|, however the columns are scaled."""
    rng = np.random.default_rng(seed)
    A = rng.normal(size=(12, rank)) * spread ** rng.uniform(-1, 1, rank)
    C = np.vstack([np.eye(rank), rng.integers(-1, 2, (n_more, rank))])
    X = A @ C.T
    root, log_det = inverse_root(X.T @ X)
    assert root.shape == (rank + n_more, rank)
    target = X @ rng.normal(size=rank + n_more)
    np.testing.assert_allclose(X @ (root @ (root.T @ (X.T @ target))), target, rtol=1e-5)
    expected = np.linalg.slogdet(A.T @ A)[1] + np.linalg.slogdet(C.T @ C)[1]
    assert log_det == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("size", [1, 16, 40])
def test_triangular_systems_of_many_clients(size):
    rng = np.random.default_rng(size)
    lower = np.tril(rng.normal(size=(5, size, size)) / size) + np.eye(size)
    right = rng.normal(size=(5, size, 4))
    solved = solve_lower(lower, right)
    np.testing.assert_allclose(lower @ solved, right, atol=1e-12)
    np.testing.assert_array_equal(solve_lower(lower[2:3], right[2:3])[0], solved[2])


def test_square_root_of_a_singular_matrix():
    half = np.random.default_rng(0).normal(size=(4, 2))
    root = square_root(half @ half.T)
    np.testing.assert_allclose(root @ root.T, half @ half.T, atol=1e-14)
    scale = np.array([1e9, 1.0, 1e-9, 0.0])
    matrix = half @ half.T * np.outer(scale, scale)
    root = square_root(matrix)
    np.testing.assert_allclose((root**2).sum(axis=1), np.diag(matrix), rtol=1e-12)
    np.testing.assert_allclose(root @ root.T, matrix, rtol=1e-12)


def test_inverse_root_of_nothing():
    root, log_det = inverse_root(np.zeros((0, 0)))
    assert root.shape == (0, 0)
    assert log_det == 0.0
    root, log_det = inverse_root(np.zeros((2, 2)))
    assert root.shape == (2, 0)
    assert log_det == 0.0


@pytest.mark.parametrize(
    ("covariance_type", "rank"),
    [("spherical", None), ("diag", None), ("full", None), ("low_rank", 1), ("low_rank", 2)],
)
def test_factors_reach_every_covariance_of_their_shape_and_no_other(covariance_type, rank):
    rng = np.random.default_rng(0)
    q = 3
    factor = covariance_factor(covariance_type, q, rank)
    sizes = {"spherical": 1, "diag": 3, "full": 6}
    assert len(factor.start) == sizes.get(covariance_type, {1: 4, 2: 6}.get(rank))
    if covariance_type != "low_rank":
        assert len(factor.start) == n_parameters(covariance_type, q)
    lower = factor.matrix(rng.normal(size=len(factor.start)))
    covariance = lower @ lower.T
    values = np.linalg.eigvalsh(covariance)
    if covariance_type == "spherical":
        np.testing.assert_allclose(covariance, covariance[0, 0] * np.eye(q), atol=1e-15)
    elif covariance_type == "diag":
        np.testing.assert_array_equal(covariance, np.diag(np.diag(covariance)))
    elif covariance_type == "low_rank":
        np.testing.assert_allclose(values[: q - rank], values[0])
    for start in factor.starts(33):
        assert np.linalg.eigvalsh(factor.matrix(start) @ factor.matrix(start).T)[0] > 0
    assert covariance_factor("low_rank", 2, 5).shape == (2, 4)
