"""Release of clients' means: rows on a public grid, and exact whole-number noise on their sums.

Which client a row belongs to is public; a neighbouring table has one row with another value. That
row changes the sum of one client, and the squares around the mean of the same client: epsilons of
the two add up, and clients, which have no rows in common, share each of them. Values are never
refused, because a refusal would reveal them.

Given a public list of clients, a neighbouring table may also have one row more or less: then the
number of rows of each client gets noise as well.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from scipy.special import softmax

from pfl_sklearn._typing import Floats, Integers
from pfl_sklearn.estimation._published._base import refuse_left_out
from pfl_sklearn.estimation._published._population import (
    PlausibleSizes,
    ReleasedMeans,
    ReleasedSquares,
)
from pfl_sklearn.privacy import DiscreteLaplaceMechanism
from pfl_sklearn.privacy._mechanisms._noise import noise_generator
from pfl_sklearn.statistics import ClientStatistics

# Of epsilon, for the squares: the variance within clients is one number for all of them.
SQUARES_SHARE = 0.1
# For numbers of rows: errors are least for means .18 of the bounds' distance from their middle.
SIZES_SHARE = 0.3
# Nodes of a number of rows, how far they reach in scales of its noise, and one without rows.
_N_SIZES, _REACH_OF_SIZES, _NO_ROWS = 11, 5.0, 1e-6
_MOST_LOST = 0.01  # to inexact sums, of what a row may change
# Steps of the grid between the bounds: with the default, rounding moves a mean by less than a
# hundredth of its noise for clients of up to a thousand rows over epsilon.
_DEFAULT_STEPS, _MOST_STEPS = 1 << 16, 1 << 19
_STEPS_OF_SQUARES = 1 << 10  # squares need no finer grid than one of so many steps
_ROUNDING = 1e-6  # of a step, by which bounds may miss the grid


class PublicGrid(NamedTuple):
    """Grid of public values between public bounds."""

    low: float
    step: float
    n_steps: int

    @property
    def bounds(self):
        """Bounds of a row's value."""
        return self.low, self.low + self.step * self.n_steps

    def positions(self, y: Floats) -> Integers:
        """Steps (n,) from the lower bound to the nearest points; the middle for no number."""
        # Cut first: a difference of huge values would overflow, with a warning.
        steps = (np.clip(y, *self.bounds) - self.low) / self.step
        return np.rint(np.where(np.isfinite(y), steps, self.n_steps / 2)).astype(np.int64)


def public_grid(bounds: Any, step: float | None) -> PublicGrid:
    """PublicGrid of parameters, or ValueError."""
    if bounds is None:
        raise ValueError(
            "bounds must be given with publish='clients': the smallest and the largest value of a "
            "row, chosen without looking at the data; got None."
        )
    pair = np.asarray(bounds, dtype=float)
    if pair.shape != (2,) or not (np.isfinite(pair).all() and pair[0] < pair[1]):
        raise ValueError(f"bounds must be two finite numbers, (lower, upper); got {bounds!r}.")
    with np.errstate(over="ignore"):
        low, distance = float(pair[0]), float(pair[1] - pair[0])
    if not 1e-290 < distance < np.inf:
        raise ValueError(
            f"bounds must be at least 1e-290 and less than 1e308 apart; got {bounds!r}."
        )
    if step is None:
        return PublicGrid(low, distance / _DEFAULT_STEPS, _DEFAULT_STEPS)
    n_steps = distance / step
    if n_steps < 1 - _ROUNDING or n_steps > _MOST_STEPS:
        raise ValueError(
            f"grid={step!r} must divide the distance {distance:.6g} of the bounds into 1 to "
            f"{_MOST_STEPS} steps; got {n_steps:.3g}."
        )
    if abs(n_steps - round(n_steps)) > _ROUNDING * n_steps:
        raise ValueError(
            f"bounds={bounds!r} must be a whole number of steps of grid={step!r} apart; got "
            f"{n_steps:.6g}."
        )
    return PublicGrid(low, distance / round(n_steps), round(n_steps))


def as_numbers(y: Any) -> Any:
    """Values (n,) or (n, d) as floats, NaN where one is no number; columns of numbers stay."""
    values = y.to_numpy() if hasattr(y, "to_numpy") else np.asarray(y)
    if values.dtype.kind not in "OSU":
        return y
    numbers = [_as_number(value) for value in values.ravel()]
    return np.array(numbers, dtype=np.float64).reshape(values.shape)


def _as_number(value):
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return np.nan


class RowSums(NamedTuple):
    """Sums of the rows of m clients, in steps of a grid; what is released of them gets noise."""

    n_rows: Integers  # (m,)
    totals: Integers  # (m,), from the lower bound
    squares: Integers  # (m,), around the client's mean, in units of `_unit_of_squares`
    # Whole numbers beyond what a row changes, which sums of floating-point numbers may be wrong by.
    rounding: int = 0
    rounding_of_squares: int = 0


def sums_of_rows(y: Floats, codes: Integers, m: int, grid: PublicGrid) -> RowSums:
    """RowSums of values (n,), cut and rounded to the grid; exact."""
    n_rows, positions = np.bincount(codes, minlength=m), grid.positions(y)
    totals, unit = _integer_sums(positions, codes, m), _unit_of_squares(grid)
    # Squares have up to 38 bits. In two parts their sums cannot overflow, however many rows.
    high, low = (_integer_sums(part, codes, m) for part in np.divmod(positions**2, 1 << 20))
    of_rows = ((int(a) << 20) + int(b) for a, b in zip(high, low, strict=True))
    clients = zip(of_rows, totals.tolist(), n_rows.tolist(), strict=True)
    # The sensitivity is that of the exact squares, rounded up, which covers that they are rounded.
    squares = [(n * of_client - total**2) // (max(n, 1) * unit) for of_client, total, n in clients]
    return RowSums(n_rows, totals, np.array(squares, dtype=np.int64))


def sums_of_statistics(statistics: ClientStatistics, bounds: Any, grid: PublicGrid) -> RowSums:
    """RowSums of statistics of rows that lie within the bounds; ValueError for others."""
    (low, high), n_rows = np.asarray(bounds, dtype=float), statistics.n_samples_per_client
    if statistics.n_targets != 1:
        raise ValueError(
            f"publish='clients' needs one target; got statistics of {statistics.n_targets}."
        )
    if statistics._weights() is not None:
        raise ValueError("statistics of weighted rows are not supported with publish='clients'.")
    refuse_left_out(statistics)
    # Without it, sums may have a centre that all rows of the table move, and so their digits.
    if statistics.target_bound is None:
        raise ValueError(
            "statistics need a target_bound with publish='clients', so that no number of a client "
            "depends on the rows of others; give it to from_rows, from_frame or from_chunks."
        )
    last = statistics.n_features  # the target
    is_cut = (statistics.lowest[:, last] >= low) & (statistics.highest[:, last] <= high)
    if not is_cut.all():
        raise ValueError(
            f"statistics need rows that were cut to bounds=({low:.6g}, {high:.6g}) before they "
            "were summed (as 64-bit numbers); got rows beyond them."
        )
    _, means, within, _ = statistics._target_means()
    unit = _unit_of_squares(grid)
    totals = np.rint((means[:, 0] - low) / grid.step * n_rows).astype(np.int64)
    squares = np.floor(within[:, 0] / (unit * grid.step**2)).astype(np.int64)
    # Sums of n numbers up to M are wrong by n^2 M times the precision, in the worst order, and
    # triangles of p columns count n p M as rounding. One row changes two sums that both are wrong,
    # and whole numbers that they are rounded to.
    n, largest = float(n_rows.max()), max(abs(low), abs(high))
    terms = n * max(n, 4.0 * (last + 2))
    lost = 4 * np.finfo(float).eps * terms * np.array([largest, largest**2])
    lost = np.floor(lost / [grid.step, unit * grid.step**2])
    if (lost > _MOST_LOST * np.array([grid.n_steps, grid.n_steps**2 / unit])).any():
        raise ValueError(
            f"statistics of clients of up to {n:.0f} rows are too inexact for bounds=({low:.6g}, "
            f"{high:.6g}) and this grid; move y and the bounds to about 0, take a grid of larger "
            "steps, or fit with the rows."
        )
    return RowSums(n_rows, totals, squares, *(int(number) + 1 for number in lost))


class RowRelease(NamedTuple):
    """ReleasedMeans, and the mechanisms that made them; None: nothing was released by it."""

    released: ReleasedMeans
    sums: DiscreteLaplaceMechanism
    squares: DiscreteLaplaceMechanism | None
    sizes: DiscreteLaplaceMechanism | None = None
    n_rows: int = 0  # sum of the noised numbers of rows


def release_means(
    sums: RowSums, grid: PublicGrid, epsilon: float, noise_is_known: bool, random_state: Any
) -> RowRelease:
    """Release the mean of every client, and the squares of rows around them if they are needed."""
    rng = None if random_state is None else noise_generator(random_state)[0]
    n_rows, dof = sums.n_rows, int(sums.n_rows.sum()) - len(sums.n_rows)
    needs_squares = dof > 0 and not noise_is_known
    for_squares = SQUARES_SHARE * epsilon if needs_squares else 0.0
    of_sums = DiscreteLaplaceMechanism(grid.n_steps + sums.rounding, epsilon - for_squares)
    means = grid.low + grid.step * of_sums.privatize(sums.totals, rng) / n_rows
    squares = of_squares = None
    if needs_squares:
        # A replaced row moves n - 1 over n of the squared distance of the bounds, at most.
        largest = int(n_rows.max())
        moved = (grid.n_steps**2 * (largest - 1), largest)
        of_squares = _squares_mechanism(sums, grid, moved, for_squares)
        value, scale = _released_squares(sums, grid, of_squares, rng)
        squares = ReleasedSquares(value, scale, dof)
    scales = grid.step * of_sums.scale / n_rows
    released = ReleasedMeans(means, scales, n_rows, grid.bounds, squares)
    return RowRelease(released, of_sums, of_squares)


def release_with_sizes(
    sums: RowSums, grid: PublicGrid, epsilon: float, noise_is_known: bool, random_state: Any
) -> RowRelease:
    """Release the numbers of rows of listed clients, too, which one row changes by one."""
    rng = None if random_state is None else noise_generator(random_state)[0]
    shares = np.array([SIZES_SHARE, 0.0 if noise_is_known else SQUARES_SHARE]) * epsilon
    of_sizes = DiscreteLaplaceMechanism(1, shares[0])
    sizes = of_sizes.privatize(sums.n_rows, rng)
    # Distances from the middle, which are half as large as those from a bound, in half steps.
    of_sums = DiscreteLaplaceMechanism(grid.n_steps, epsilon - shares.sum())
    noisy = of_sums.privatize(2 * sums.totals - grid.n_steps * sums.n_rows, rng)
    scale = grid.step / 2 * of_sums.scale
    values, log_weights = _plausible_sizes(sizes, of_sizes.scale)
    plausible = PlausibleSizes(grid.step / 2 * noisy, scale, values, log_weights)
    squares = of_squares = None
    chances = softmax(log_weights, axis=0)
    if not noise_is_known:
        of_squares = _squares_mechanism(sums, grid, (grid.n_steps**2, 1), shares[1])
        value, of_value = _released_squares(sums, grid, of_squares, rng)
        dof, variance = _moments_of(np.maximum(values - 1, 0), chances)
        squares = ReleasedSquares(value, of_value, max(dof.sum(), 1.0), variance.sum())
    # As if these were the numbers of rows: where the population may be, and what is shown.
    n_rows, variance = _moments_of(values, chances)
    n_rows = np.maximum(n_rows, 1.0)  # a mean of no rows has no value
    distances = plausible.sums / n_rows
    largest = np.minimum(np.abs(distances), grid.step * grid.n_steps / 2)
    scales = np.hypot(scale, largest * np.sqrt(variance / 2)) / n_rows
    means = sum(grid.bounds) / 2 + distances
    released = ReleasedMeans(means, scales, n_rows, grid.bounds, squares, plausible)
    return RowRelease(released, of_sums, of_squares, of_sizes, int(sizes.sum()))


def _moments_of(values, chances):
    """Means and variances (m,) of values (k, m)."""
    mean = np.sum(chances * values, axis=0)
    return mean, np.sum(chances * (values - mean) ** 2, axis=0)


def _plausible_sizes(noisy, scale):
    """Numbers of rows (k, m) by noised ones (m,), and the logarithms of their weights."""
    step = max(-(-int(2 * _REACH_OF_SIZES * scale) // _N_SIZES), 1)
    first = np.maximum(noisy - step * (_N_SIZES // 2), 0)
    # The middle of `step` whole numbers each stands for them. A client without rows is one of next
    # to none, whose sum says nothing.
    values = np.maximum(first + step * np.arange(_N_SIZES)[:, None] + (step - 1) / 2, _NO_ROWS)
    # Numbers of rows are as far apart as noised ones are beyond their noise, and a standard error
    # of that: without this, small clients would have too many rows on average. Student's t with 3
    # degrees of freedom leaves a client that is much larger than all others where its noise is.
    m, of_noise = len(noisy), 2 * scale**2
    between = max(np.var(noisy) - of_noise, 0.0) + of_noise * np.sqrt(5 / m)
    prior = -2 * np.log1p((values - noisy.mean()) ** 2 / between)
    return values, prior - np.abs(values - noisy) / scale


def _squares_mechanism(sums, grid, moved, epsilon):
    """Noise for squares around the mean, of which a row moves a fraction, in squared steps."""
    numerator, denominator = moved
    units = -(-numerator // (denominator * _unit_of_squares(grid)))  # rounded up
    return DiscreteLaplaceMechanism(units + sums.rounding_of_squares, epsilon)


def _released_squares(sums, grid, mechanism, rng):
    """Noised squares, and the scale of their noise, in squared units of `y`."""
    unit = _unit_of_squares(grid) * grid.step**2
    noisy = float(mechanism.privatize(np.array([sums.squares.sum()]), rng)[0])
    return unit * noisy, unit * mechanism.scale


def _unit_of_squares(grid):
    """Squared steps of the grid that count as one where squares are released."""
    return max(grid.n_steps // _STEPS_OF_SQUARES, 1) ** 2


def _integer_sums(values, codes, m):
    """Sums (m,) of integers (n,) by client, in whole numbers."""
    result = np.zeros(m, dtype=np.int64)
    np.add.at(result, codes, values)
    return result
