"""Release of clients' means: rows on a public grid, and exact whole-number noise on their sums.

Which client a row belongs to is public; a neighbouring table has one row with another value. That
row changes the sum of one client, and the squares around the mean of the same client: epsilons of
the two add up, and clients, which have no rows in common, share each of them. Values are never
refused, because a refusal would reveal them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pfl_sklearn._typing import Floats, Integers
from pfl_sklearn.estimation._published._population import ReleasedMeans, ReleasedSquares
from pfl_sklearn.privacy import DiscreteLaplaceMechanism
from pfl_sklearn.privacy._mechanisms._noise import noise_generator

# Of epsilon, for the squares: the variance within clients is one number for all of them.
SQUARES_SHARE = 0.1
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


class RowRelease(NamedTuple):
    """ReleasedMeans, and the mechanisms that made them; None: nothing was released by it."""

    released: ReleasedMeans
    sums: DiscreteLaplaceMechanism
    squares: DiscreteLaplaceMechanism | None


def release_means(
    y: Floats,
    codes: Integers,
    n_rows: Integers,
    grid: PublicGrid,
    epsilon: float,
    noise_is_known: bool,
    random_state: Any,
) -> RowRelease:
    """Release the mean of every client, and the squares of rows around them if they are needed."""
    seeded = random_state is not None
    rng = noise_generator(random_state)[0] if seeded else None
    positions, dof = grid.positions(y), len(y) - len(n_rows)
    needs_squares = dof > 0 and not noise_is_known
    for_squares = SQUARES_SHARE * epsilon if needs_squares else 0.0
    sums = DiscreteLaplaceMechanism(grid.n_steps, epsilon - for_squares)
    totals = _integer_sums(positions, codes, len(n_rows))
    noisy = sums.privatize(totals, rng)
    means = grid.low + grid.step * noisy / n_rows
    squares = mechanism = None
    if needs_squares:
        mechanism = _squares_mechanism(grid, int(n_rows.max()), for_squares)
        of_rows = _integer_sums(positions**2, codes, len(n_rows))
        coarse = _unit_of_squares(grid)
        exact = sum(
            _around_mean(*client, coarse)
            for client in zip(of_rows.tolist(), totals.tolist(), n_rows.tolist(), strict=True)
        )
        value = float(mechanism.privatize(np.array([exact]), rng)[0])
        unit = coarse * grid.step**2
        squares = ReleasedSquares(unit * value, unit * mechanism.scale, dof)
    scales = grid.step * sums.scale / n_rows
    released = ReleasedMeans(means, scales, n_rows, grid.bounds, squares)
    return RowRelease(released, sums, mechanism)


def _squares_mechanism(grid, largest_client, epsilon):
    """Noise for squares around the mean, of which a row changes those of one client."""
    # A replaced row moves n - 1 over n of the squared distance of the bounds, at most.
    n, unit = largest_client, _unit_of_squares(grid)
    moved = -(-(grid.n_steps**2 * (n - 1)) // (n * unit))  # rounded up
    return DiscreteLaplaceMechanism(moved, epsilon)


def _unit_of_squares(grid):
    """Squared steps of the grid that count as one where squares are released."""
    return max(grid.n_steps // _STEPS_OF_SQUARES, 1) ** 2


def _around_mean(of_rows, total, n, unit):
    """Squares of a client's rows around their mean, rounded down; whole numbers of any size."""
    # The sensitivity is that of the exact squares, rounded up, which covers that they are rounded.
    return (n * of_rows - total**2) // (n * unit)


def _integer_sums(values, codes, m):
    """Sums (m,) of integers (n,) by client, in whole numbers."""
    result = np.zeros(m, dtype=np.int64)
    np.add.at(result, codes, values)
    return result
