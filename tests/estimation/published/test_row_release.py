"""The release of sums of rows: its sensitivity, its budget, and mutants that break the promise."""

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings, strategies as st

from pfl_sklearn.estimation._published import _release
from pfl_sklearn.estimation._published._release import (
    PublicGrid,
    public_grid,
    release_means,
    release_with_sizes,
    sums_of_rows,
    sums_of_statistics,
)
from pfl_sklearn.privacy import DiscreteLaplaceMechanism
from pfl_sklearn.privacy.auditing import odds_lower_bound
from pfl_sklearn.statistics import ClientStatistics

EPSILON, N_DRAWS, ALPHA = 1.5, 1000, 1e-4
GRID = PublicGrid(0.0, 0.1, 10)


class Recorder:
    """Mechanisms that release what they get, and remember what is exact."""

    def __init__(self, monkeypatch):
        self.exact, self.mechanisms = [], []

        def privatize(mechanism, values, rng=None):
            self.exact.append(np.array(values))
            self.mechanisms.append(mechanism)
            return values

        monkeypatch.setattr(DiscreteLaplaceMechanism, "privatize", privatize)


def release(y, codes, grid=GRID, noise_is_known=False, random_state=None, epsilon=EPSILON):
    y, codes = np.asarray(y, dtype=float), np.asarray(codes)
    sums = sums_of_rows(y, codes, codes.max() + 1, grid)
    return release_means(sums, grid, epsilon, noise_is_known, random_state)


def release_listed(y, codes, m=3, noise_is_known=False, random_state=None):
    sums = sums_of_rows(np.asarray(y, dtype=float), np.asarray(codes, dtype=int), m, GRID)
    return release_with_sizes(sums, GRID, EPSILON, noise_is_known, random_state)


# Sensitivity --------------------------------------------------------------------------------------

VALUES = st.one_of(
    st.floats(-0.5, 1.5), st.sampled_from([np.nan, np.inf, -np.inf, 1e308, -1e308, 0.0, 1.0, 0.05])
)


@settings(deadline=None, max_examples=200)
@given(st.data())
@pytest.mark.slow
def test_a_replaced_row_moves_no_more_than_the_noise_covers(data):
    codes = [*data.draw(st.lists(st.integers(0, 2), min_size=3, max_size=12)), 0, 1, 2]
    y = data.draw(st.lists(VALUES, min_size=len(codes), max_size=len(codes)))
    row, other = data.draw(st.integers(0, len(y) - 1)), list(y)
    other[row] = data.draw(VALUES)
    with pytest.MonkeyPatch.context() as patch:
        records = Recorder(patch)
        for values in (y, other):
            release(values, codes)
    half = len(records.exact) // 2
    for before, after, mechanism in zip(
        records.exact[:half], records.exact[half:], records.mechanisms, strict=False
    ):
        assert np.abs(before - after).sum() <= mechanism.sensitivity
    moved = np.flatnonzero(records.exact[0] != records.exact[half])
    assert set(moved) <= {codes[row]}


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_a_row_more_moves_no_more_than_the_noise_covers(data):
    codes = data.draw(st.lists(st.integers(0, 2), max_size=12))
    y = data.draw(st.lists(VALUES, min_size=len(codes), max_size=len(codes)))
    with pytest.MonkeyPatch.context() as patch:
        records = Recorder(patch)
        release_listed(y, codes)
        client = data.draw(st.integers(0, 2))
        release_listed([*y, data.draw(VALUES)], [*codes, client])
    half = len(records.exact) // 2
    assert half == 3
    for before, after, mechanism in zip(
        records.exact[:half], records.exact[half:], records.mechanisms, strict=False
    ):
        assert np.abs(before - after).sum() <= mechanism.sensitivity
    for before, after in zip(records.exact[:2], records.exact[half : half + 2], strict=True):
        assert set(np.flatnonzero(before != after)) <= {client}


def statistics_of(y, codes):
    return ClientStatistics.from_rows(None, y, groups=codes, target_bound=1.0)


def test_no_total_of_statistics_depends_on_the_rows_of_others():
    """With a centre that all rows move, others' totals that end in a half would be rounded."""
    grid, rng = PublicGrid(0.0, 1.0, 1), np.random.default_rng(0)
    rows = np.round(rng.uniform(0, 1, (400, 4)), 3)
    last = np.round(2.5 - rows.sum(axis=1), 3)
    rows = np.column_stack([rows, last])[(last >= 0) & (last <= 1)]
    table = pl.DataFrame({"group": np.repeat(np.arange(len(rows)), 5), "y": rows.ravel()})
    totals = []
    for first in (0.0, 1.0):
        changed = table.with_columns(
            pl.when(pl.int_range(pl.len()) == 0).then(first).otherwise("y").alias("y")
        )
        statistics = ClientStatistics.from_frame(
            changed.lazy(), groups="group", target="y", target_bound=1.0
        )
        totals.append(sums_of_statistics(statistics, (0.0, 1.0), grid).totals)
    np.testing.assert_array_equal(totals[0][1:], totals[1][1:])


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_replaced_row_of_statistics_moves_no_more_than_the_noise_covers(data):
    grid, values = PublicGrid(-1.0, 0.25, 8), st.floats(-1, 1).map(lambda y: round(y, 50))
    codes = np.array([*data.draw(st.lists(st.integers(0, 1), max_size=8)), 0, 0, 1, 1])
    y = np.array(data.draw(st.lists(values, min_size=len(codes), max_size=len(codes))))
    other = y.copy()
    other[data.draw(st.integers(0, len(y) - 1))] = data.draw(values)
    before, after = (
        sums_of_statistics(statistics_of(rows, codes), (-1, 1), grid) for rows in (y, other)
    )
    assert np.abs(before.totals - after.totals).sum() <= grid.n_steps + before.rounding == 9
    moved = abs(before.squares.sum() - after.squares.sum())
    most = -(-(grid.n_steps**2) * (before.n_rows.max() - 1) // before.n_rows.max())
    assert moved <= most + before.rounding_of_squares
    of_rows = sums_of_rows(y, codes, 2, grid)
    assert (np.abs(of_rows.totals - before.totals) <= 0.5 * before.n_rows + 0.5).all()


def test_the_sensitivities_are_reached(monkeypatch):
    records = Recorder(monkeypatch)
    for last in (0.0, 1.0):
        release([0.0, 0.0, last], [0, 0, 0])
    sums, squares, more_sums, more_squares = records.exact
    assert more_sums - sums == records.mechanisms[0].sensitivity == 10
    assert more_squares - squares == 66  # 100 times 2 / 3, rounded down
    assert records.mechanisms[1].sensitivity == 67


def test_the_budget_is_spent_once(monkeypatch):
    records = Recorder(monkeypatch)
    release([0.2, 0.4, 0.1], [0, 0, 1])
    assert sum(one.epsilon for one in records.mechanisms) == pytest.approx(EPSILON)
    records.mechanisms.clear()
    for known in (False, True):
        release_listed([0.2, 0.4, 0.1], [0, 0, 1], noise_is_known=known)
    epsilons = [one.epsilon for one in records.mechanisms]
    np.testing.assert_allclose(np.divide(epsilons, EPSILON), [0.3, 0.6, 0.1, 0.3, 0.7])
    for y, codes, known in (([0.2, 0.4], [0, 1], False), ([0.2, 0.4], [0, 0], True)):
        records.mechanisms.clear()
        assert release(y, codes, noise_is_known=known).squares is None
        assert [one.epsilon for one in records.mechanisms] == [EPSILON]


def test_values_are_cut_and_rounded(monkeypatch):
    Recorder(monkeypatch)
    made = release([-1e308, 0.44, 9.0, np.nan, np.inf, 0.5], [0, 0, 0, 1, 1, 1])
    np.testing.assert_allclose(made.released.means, [1.4 / 3, 0.5])
    assert made.released.squares.value == pytest.approx(0.01 * (50 + 0), abs=0.01)


# Audits -------------------------------------------------------------------------------------------


def lower_bound(release_of, happens, n_draws=N_DRAWS):
    """Lower bound on epsilon from how often an event happens with the last row at 0 and at 1."""
    counts = []
    for last in (1.0, 0.0):
        rng = np.random.default_rng(int(last))
        draws = (release_of([0.0, last], rng) for _ in range(n_draws))
        counts.append(sum(map(happens, draws)))
    return odds_lower_bound(*counts, n_draws, ALPHA)


def both(made):
    """Whether the sum and the squares are as large as they are with the row at 1."""
    squares = made.released.squares
    return made.released.means[0] >= 0.5 and (squares is None or squares.value >= 0.5)


def honest(y, rng):
    return release(y, [0, 0], random_state=rng)


def listed(y, rng):
    """Nine rows, and one more if the last is at 1."""
    return release_listed([0.0] * 9 + [1.0] * int(y[-1]), [0] * (9 + int(y[-1])), 1, False, rng)


def all_three(made):
    """Whether rows, sum and squares are as large as they are with the row."""
    sizes = made.released
    return sizes.n_rows[0] >= 10 and sizes.sizes.sums[0] >= -4.2 and sizes.squares.value >= 0.45


KINDS = {"replaced": (honest, both), "one more": (listed, all_three)}
# So that each part alone tells much of whether the row is there.
SHARES = {"SQUARES_SHARE": 0.4, "SIZES_SHARE": 0.2}


def audited(monkeypatch, kind):
    """Lower bound on epsilon of a release with a seed."""
    for name, share in SHARES.items():
        if not isinstance(getattr(_release, name), Everything):
            monkeypatch.setattr(_release, name, share)
    monkeypatch.setattr(_release, "noise_generator", lambda rng: (rng, True))
    return lower_bound(*KINDS[kind])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_promise_holds_and_is_used(kind, monkeypatch):
    assert 0.5 < audited(monkeypatch, kind) < EPSILON


MUTANTS = {
    "half the noise on sums": lambda patch: patch.setattr(
        DiscreteLaplaceMechanism, "_numerator", property(_twice_the_numerator)
    ),
    "squares without noise": lambda patch: patch.setattr(
        _release, "_squares_mechanism", lambda *_: DiscreteLaplaceMechanism(1, 50.0)
    ),
    "all of epsilon for both": lambda patch: patch.setattr(_release, "SQUARES_SHARE", Everything()),
}


class Everything:
    """A share of the squares that leaves the sums as much as it takes."""

    def __mul__(self, epsilon):
        return _Whole(epsilon)


class _Whole(float):
    def __rsub__(self, epsilon):
        return float(self)


_NUMERATOR = DiscreteLaplaceMechanism._numerator.fget


def _twice_the_numerator(mechanism):
    return 2 * _NUMERATOR(mechanism)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutant", "kind"),
    [
        *((mutant, "replaced") for mutant in MUTANTS),
        *((name, "one more") for name in [*MUTANTS][:2]),
    ],
)
def test_mutants_are_convicted(mutant, kind, monkeypatch):
    MUTANTS[mutant](monkeypatch)
    assert audited(monkeypatch, kind) > EPSILON


@pytest.mark.slow
def test_bounds_from_the_data_are_convicted(monkeypatch):
    monkeypatch.setattr(_release, "noise_generator", lambda rng: (rng, True))

    def from_data(y, rng):
        grid = PublicGrid(min(y), (max(y) - min(y) or 1e-3) / 10, 10)
        return release(y, [0, 0], grid, random_state=rng)

    assert lower_bound(from_data, lambda made: abs(made.released.means[0]) > 0.1) > EPSILON


# Input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bounds", "step", "message"),
    [
        (None, None, "bounds must be given"),
        ((1.0, 0.0), None, "bounds must be two finite numbers"),
        ((0.0, 0.0), None, "bounds must be two finite numbers"),
        ((0.0, np.inf), None, "bounds must be two finite numbers"),
        ((0.0, 1.0, 2.0), None, "bounds must be two finite numbers"),
        ((0.0, 1e-321), None, "bounds must be at least 1e-290 and less than 1e308 apart"),
        ((-1e308, 1e308), None, "bounds must be at least 1e-290 and less than 1e308 apart"),
        ((0.0, 1.0), 2.0, "grid=2.0 must divide"),
        ((0.0, 1.0), 1e-9, "grid=1e-09 must divide"),
        ((0.0, 1.0), 0.3, "whole number of steps of grid=0.3"),
    ],
)
def test_bounds_and_grids_that_do_not_fit(bounds, step, message):
    with pytest.raises(ValueError, match=message):
        public_grid(bounds, step)


def test_grids():
    assert public_grid((-2.5, 4.5), None) == (-2.5, 7 / 2**16, 2**16)
    assert public_grid([0, 1], 0.1).n_steps == 10
    assert public_grid((0.0, 7.0), 1).bounds == (0.0, 7.0)
