"""Moments of regressions: sensitivity, joint scaling, scales, and what is left after the noise."""

import itertools
import math

import numpy as np
import pytest

from pfl_sklearn.privacy import RegressionMoments
from tests.helpers.hostile import hostile
from tests.helpers.slow import slow

# Under "replace_one" the squared target is always included.
SHAPES = [
    RegressionMoments(3, 2.0, 5.0, intercept, relation, square, sizes)
    for relation, square in (("replace_one", True), ("add_remove", True), ("add_remove", False))
    for intercept in (True, False)
    for sizes in (True, False)
]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=repr)


def message_of(shape, rows):
    """Message of one client with rows (features, target), or of a single row."""
    share = 1 / len(rows)
    return shape.total(rows[:, :-1], rows[:, -1], np.full(len(rows), share), share)


@every_shape
def test_sensitivity_is_never_exceeded(shape):
    """Clients with rows of any size; a client of one row is a row."""
    with np.errstate(invalid="ignore"):
        messages = [message_of(shape, hostile((1 + k % 4, 4), 8.0, k)) for k in range(100)]
    assert np.isfinite(messages).all()
    assert np.linalg.norm(messages, axis=1).max() <= shape.add_remove_sensitivity * (1 + 1e-12)
    messages = np.array(messages)
    moves = np.linalg.norm(messages[:, None] - messages, axis=2)
    assert moves.max() <= shape.replace_one_sensitivity * (1 + 1e-12)
    assert shape.sensitivity in (shape.add_remove_sensitivity, shape.replace_one_sensitivity)


def extreme_pair(shape):
    """Rows at both bounds with opposite targets, whose vectors v are orthogonal if they can be."""
    constant = shape.intercept_scale**2 if shape.intercept else 0.0
    cosine = min(shape.target_scale**2 - constant, 1.0)
    first = shape.feature_bound * np.array([1.0, 0.0, 0.0])
    second = shape.feature_bound * np.array([cosine, math.sqrt(1 - cosine**2), 0.0])
    return (first, shape.target_bound), (second, -shape.target_bound)


@every_shape
def test_sensitivity_is_attained(shape):
    """Up to the small entries that the message has beside the moments."""
    (x, y), (other_x, other_y) = extreme_pair(shape)
    one = shape.total(x[None], np.array([y]), None, 1.0)
    other = shape.total(other_x[None], np.array([other_y]), None, 0.0)
    assert np.linalg.norm(one) == pytest.approx(shape.add_remove_sensitivity)
    moved = np.linalg.norm(one - other)
    assert 0.98 * shape.replace_one_sensitivity < moved <= shape.replace_one_sensitivity + 1e-12
    if shape.intercept and shape.relation == "replace_one":
        assert moved == pytest.approx(shape.replace_one_sensitivity)


def test_mutants_exceed_the_sensitivity():
    """Rows that are not scaled, and the sensitivity of coming and going for a replacement."""
    shape = RegressionMoments(3, 2.0, 5.0, intercept=False)
    (x, y), (other_x, other_y) = extreme_pair(shape)
    X, targets = np.array([x, other_x]), np.array([y, other_y])
    scaled = shape.messages(X, targets)
    assert np.linalg.norm(scaled[0] - scaled[1]) > 1.39 * shape.add_remove_sensitivity
    np.testing.assert_allclose(shape.messages(9 * X, 9 * targets)[:, :-1], scaled[:, :-1])
    unscaled = 4 * RegressionMoments(3, 4.0, 10.0, intercept=False).messages(2 * X, 2 * targets)
    assert np.linalg.norm(unscaled[0] - unscaled[1]) > 2 * shape.sensitivity


@every_shape
def test_rows_within_the_bounds_enter_as_they_are(shape):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40, 3))
    X *= 2.0 * rng.uniform(0.1, 1, 40)[:, None] / np.linalg.norm(X, axis=1)[:, None]
    y = rng.uniform(-5, 5, 40)
    found = shape.split(shape.total(X, y, None, 7.0), 1.0)
    design = np.column_stack([np.ones(40), X]) if shape.intercept else X
    outside = np.multiply.outer(shape.column_scales, shape.column_scales)
    np.testing.assert_allclose(found.gram, outside * (design.T @ design))
    target = shape.target_scale / 5.0
    np.testing.assert_allclose(found.cross, shape.column_scales * target * (design.T @ y))
    assert found.weight == pytest.approx(40)
    if shape.square or shape.relation == "replace_one":
        assert found.square == pytest.approx(target**2 * (y @ y))
    else:
        assert found.square is None
    assert found.inverse_sizes == (pytest.approx(7.0) if shape.sizes else None)


@every_shape
def test_the_sum_is_that_of_the_messages(shape):
    rng = np.random.default_rng(0)
    X, y = rng.standard_t(1, size=(60, 3)) * 2, rng.standard_t(1, size=60) * 5
    shares = rng.uniform(size=60)
    messages = shape.messages(X, y)
    total = shape.total(X, y, shares, 3.0)[: messages.shape[1]]
    np.testing.assert_allclose(total, shares @ messages, rtol=1e-10, atol=1e-12)
    order = rng.permutation(60)
    again = shape.total(X[order], y[order], shares[order], 3.0)[: messages.shape[1]]
    np.testing.assert_allclose(again, total, rtol=1e-10, atol=1e-12)


@every_shape
def test_noise_of_the_parts_is_what_they_state(shape):
    """The split is linear: the root of the summed squares of its answers to unit vectors."""
    length = len(shape.total(np.zeros((1, 3)), np.zeros(1)))
    units = [shape.split(unit, 2.0) for unit in 2.0 * np.eye(length)]
    gram = np.linalg.norm([unit.gram for unit in units], axis=0)
    np.testing.assert_allclose(gram, np.where(np.eye(len(gram)), 2.0, math.sqrt(2)))
    np.testing.assert_allclose(np.linalg.norm([n.cross for n in units], axis=0), math.sqrt(2))
    for part in ("square", "weight", "inverse_sizes"):
        answers = [getattr(unit, part) for unit in units]
        if answers[0] is not None:
            assert np.linalg.norm(answers) == pytest.approx(getattr(units[0], f"{part}_std"))


def test_rows_outside_are_scaled_as_a_whole():
    shape = RegressionMoments(3, 2.0, 5.0)
    rng = np.random.default_rng(0)
    X, y = 10 * rng.normal(size=(100, 3)), 20 * rng.normal(size=100)
    v, factors = shape.scaled(X, y)
    whole = np.column_stack(
        [np.full(100, shape.intercept_scale), X / 2, shape.target_scale * y / 5]
    )
    np.testing.assert_allclose(v, whole * factors[:, None])
    assert (factors < 1).all()
    assert (np.abs(v[:, -1]) <= shape.target_scale * (1 + 1e-12)).all()


def test_the_factor_depends_on_features_alone_within_the_target_bound():
    shape = RegressionMoments(3, 2.0, 5.0)
    X = 4 * np.random.default_rng(0).normal(size=(50, 3))
    factors = [shape.scaled(X, np.full(50, target))[1] for target in (-5.0, 0.0, 3.0)]
    np.testing.assert_array_equal(factors[0], factors[1])
    np.testing.assert_array_equal(factors[0], factors[2])
    assert factors[0].min() < 0.5


def test_joint_scaling_leaves_the_slope_where_separate_clipping_bends_it():
    """60,000 rows, a third of them outside the feature bound, next to none outside the other."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60_000, 3))
    y = X @ [1.0, -1.0, 0.5] + rng.normal(size=60_000)
    shape = RegressionMoments(3, 1.9, 12.0, intercept=False)
    found = shape.split(shape.total(X, y), 0.0)
    theta = np.linalg.solve(found.gram, found.cross) * 12.0 / (1.9 * shape.target_scale)
    np.testing.assert_allclose(theta, [1.0, -1.0, 0.5], atol=0.02)
    clipped = X * np.minimum(1, 1.9 / np.linalg.norm(X, axis=1))[:, None]
    apart = np.linalg.lstsq(clipped, np.clip(y, -12, 12))[0]
    assert apart[0] > 1.06


@pytest.mark.parametrize("relation", ["replace_one", "add_remove"])
@pytest.mark.parametrize("d", [2, *slow([20])])
def test_scales_are_close_to_the_best(relation, d):
    """Error of a regression under drawn noise, against scales that are half or twice as large."""
    n = 4000
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, d)) * math.sqrt(0.5 / d)
    slope = rng.normal(size=d)
    slope *= math.sqrt(1 / 18) / np.sqrt(np.mean((x @ slope) ** 2))
    y = math.sqrt(1 / 18) + x @ slope + math.sqrt(1 / 18) * rng.normal(size=n)
    theta = np.append(math.sqrt(1 / 18), slope)
    design = np.column_stack([np.ones(n), x])
    moments = design.T @ design, design.T @ y

    def error(intercept_factor, target_factor):
        shape = RegressionMoments(d, 1.0, 1.0, True, relation, square=False)
        constant = intercept_factor * shape.intercept_scale
        target = target_factor * shape.target_scale
        norm = (1 + constant**2 + target**2) ** 2 - target**4 * (relation == "add_remove")
        unit = np.append(constant, np.ones(d))
        draw, total = np.random.default_rng(1), 0.0
        for _ in range(400):
            raw = draw.normal(size=(d + 1, d + 1))
            noise = (raw + raw.T) / 2 * math.sqrt(norm) / np.multiply.outer(unit, unit)
            side = draw.normal(size=d + 1) * math.sqrt(norm / 2) / (unit * target)
            moved = np.linalg.solve(moments[0], side - noise @ theta)
            total += moved @ moments[0] @ moved
        return total

    best = error(1.0, 1.0)
    others = [error(*f) for f in itertools.product((0.7, 1.0, 1.4), repeat=2)]
    assert best < 1.03 * min(others)
    assert max(others) > 1.1 * best


def test_no_rows_are_no_error():
    shape = RegressionMoments(2, 1.0, 1.0)
    assert shape.messages(np.empty((0, 2)), np.empty(0)).shape == (0, 10)
    assert not shape.total(np.empty((0, 2)), np.empty(0)).any()


@pytest.mark.parametrize(
    ("params", "error"),
    [
        ((3, 0.0, 1.0), r"feature_bound.*\b0\.0\b"),
        ((3, 1.0, 1.0, True, "zero_out"), r"relation.*'replace_one'.*'add_remove'.*'zero_out'"),
    ],
)
def test_bad_parameters(params, error):
    with pytest.raises(ValueError, match=error):
        RegressionMoments(*params)


@every_shape
def test_a_sum_for_each_client_at_once(shape):
    """Axes before the rows stand for clients of equally many rows."""
    rng = np.random.default_rng(0)
    X, y = rng.standard_t(1, size=(6, 5, 3)), rng.standard_t(1, size=(6, 5))
    shares = np.full((6, 5), 0.2)
    together = shape.total(X, y, shares, 0.2)
    alone = [shape.total(*one, 0.2) for one in zip(X, y, shares, strict=True)]
    np.testing.assert_allclose(together, alone, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("relation", ["replace_one", "add_remove"])
@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("square", [True, False])
@pytest.mark.parametrize("sizes", [True, False])
def test_one_feature_has_the_largest_ratio_of_sensitivities(relation, intercept, square, sizes):
    """The ledger takes it, because it does not know the number of features."""
    sizes &= relation == "add_remove"
    ratios = []
    for d in [*range(1, 40), 100, 1000, 10_000]:
        moments = RegressionMoments(d, 1.0, 1.0, intercept, relation, square=square, sizes=sizes)
        ratios.append(moments.replace_one_sensitivity / moments.add_remove_sensitivity)
    if relation == "replace_one":
        np.testing.assert_allclose(ratios, math.sqrt(2), rtol=1e-12)
    assert max(ratios[1:]) <= ratios[0] * (1 + 1e-12)
