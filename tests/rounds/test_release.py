"""Messages of several parts: one clip, one noise, in double precision."""

import numpy as np
import pytest

from pfl_sklearn._rounds.privacy import JointSum
from pfl_sklearn.privacy import ClippedSum
from tests.helpers.draws import ROUNDING, Ones

SHAPES = {"weights": (4, 2), "scale": ()}


def messages(k, seed=0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(k, *shape)).astype(dtype) for name, shape in SHAPES.items()}


def joint_norms(sent, scales):
    return np.sqrt(
        sum(
            np.sum((sent[name].reshape(len(sent[name]), -1) / scales[name]) ** 2, axis=1)
            for name in SHAPES
        )
    )


@pytest.mark.parametrize("scales", [None, {"weights": 0.3, "scale": 5.0}])
def test_parts_are_clipped_together(scales):
    sent = messages(6)
    release = JointSum(ClippedSum(1.0), SHAPES, scales)
    found = release.release(sent, release.start(), 6, np.random.default_rng(0))
    factor = np.minimum(1, 1 / joint_norms(sent, scales or dict.fromkeys(SHAPES, 1.0)))
    for name, shape in SHAPES.items():
        expected = np.einsum("k,k...->...", factor, sent[name])
        assert found.total[name].shape == shape
        np.testing.assert_allclose(found.total[name], expected, rtol=1e-12)
    assert found.clipped == pytest.approx(np.mean(factor < 1))


def test_one_client_moves_the_scaled_sum_by_at_most_the_bound():
    scales = {"weights": 0.3, "scale": 5.0}
    release, sent = JointSum(ClippedSum(0.8), SHAPES, scales), messages(5)
    sent["weights"][2] *= 1e6
    sent["scale"][3] = -1e9
    totals = []
    for kept in (slice(None), [0, 1, 3, 4], [0, 1, 2, 4]):
        some = {name: values[kept] for name, values in sent.items()}
        totals.append(release.release(some, 0.8, 5, np.random.default_rng(0)).total)
    for other in totals[1:]:
        moved = [(totals[0][name] - other[name]) / scales[name] for name in SHAPES]
        assert np.linalg.norm(np.concatenate([np.ravel(part) for part in moved])) <= 0.8 * (
            1 + 1e-9
        )


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf])
def test_scales_are_positive_and_finite(scale):
    with pytest.raises(ValueError, match=r"scales\['scale'\].*" + str(scale)):
        JointSum(ClippedSum(1.0), SHAPES, {"weights": 1.0, "scale": scale})


@pytest.mark.parametrize("scales", [{"weights": 1.0}, {"weights": 1.0, "scale": 1.0, "bias": 1.0}])
def test_every_part_has_a_scale_or_none_has(scales):
    """A scale that is forgotten or misspelt would change what is clipped."""
    with pytest.raises(ValueError, match=r"scales.*'weights'.*'scale', 'weights'"):
        JointSum(ClippedSum(1.0), SHAPES, scales)


def test_messages_of_another_shape_are_refused():
    release = JointSum(ClippedSum(1.0), {"weights": (4, 2)})
    with pytest.raises(ValueError, match=r"'weights'.*\(8,\).*\(4, 2\)"):
        release.release({"weights": np.zeros((3, 8))}, 1.0, 3, np.random.default_rng(0))


def test_the_noise_is_that_of_one_release():
    """Of every part in its own units, and drawn once for all of them."""
    scales = {"weights": 0.3, "scale": 5.0}
    release = JointSum(ClippedSum(1.0, 2.0), SHAPES, scales)
    nothing = {name: np.zeros((3, *shape)) for name, shape in SHAPES.items()}
    rng = np.random.default_rng(0)
    totals = [release.release(nothing, 1.0, 3, rng).total for _ in range(4000)]
    drawn = np.array(
        [[*(total["weights"].ravel() / 0.3), total["scale"] / 5.0] for total in totals]
    )
    np.testing.assert_allclose(drawn.std(axis=0), 2.0, rtol=0.06)
    assert np.abs(np.corrcoef(drawn.T) - np.eye(9)).max() < 0.08


def test_the_noise_of_every_part_is_exactly_what_is_stated():
    """Every draw is 1, in units of the part's scale."""
    scales = {"weights": 0.3, "scale": 5.0}
    release = JointSum(ClippedSum(1.0, 2.0), SHAPES, scales)
    nothing = {name: np.zeros((3, *shape)) for name, shape in SHAPES.items()}
    total = release.release(nothing, 1.0, 3, Ones()).total
    for name, scale in scales.items():
        np.testing.assert_allclose(total[name], 2.0 * scale, rtol=ROUNDING)


@pytest.mark.parametrize("mechanism", [ClippedSum(None), ClippedSum(1.0), ClippedSum(1.0, 1.0)])
def test_an_empty_round(mechanism):
    release = JointSum(mechanism, SHAPES)
    total = release.release(messages(0), release.start(), 2, np.random.default_rng(0)).total
    assert {name: part.shape for name, part in total.items()} == SHAPES
    silent = mechanism.noise_multiplier == 0
    assert all(np.all((part == 0) == silent) for part in total.values())


def test_single_precision_messages_are_clipped_in_double_precision():
    """The norm of a million equal numbers is off by 3e-5 in single precision."""
    vector = np.full((2, 1_000_000), 0.1, dtype=np.float32)
    release = ClippedSum(1.0).release(vector, 1.0, 2, np.random.default_rng(0))
    assert release.total.dtype == np.float64
    assert np.linalg.norm(release.total) == pytest.approx(2.0, rel=1e-12)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_single_precision_messages_that_overflow_count_as_nothing_or_are_clipped(bad):
    vectors = np.zeros((2, 3), dtype=np.float32)
    vectors[0, 1], vectors[1, 0] = bad, 0.25
    found = ClippedSum(1.0).release(vectors, 1.0, 2, np.random.default_rng(0))
    expected = [0.25, 1.0, 0] if np.isfinite(bad) else [0.25, 0, 0]
    np.testing.assert_allclose(found.total, expected, rtol=1e-12)
    assert found.clipped == 0.5
