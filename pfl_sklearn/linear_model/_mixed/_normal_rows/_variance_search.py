"""Searches for the variances of a linear mixed model that maximize the profiled likelihood."""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import OptimizeResult, brentq, minimize, nnls

from pfl_sklearn.linear_model._algebra import snapped_to_zero, square_root
from pfl_sklearn.linear_model._mixed._normal_rows._profiled_likelihood import (
    Curvature,
    Profile,
    ReducedStack,
    Whitened,
    profile,
    refined,
    slope_diagonal,
    slope_matrix,
    slope_spectral,
    whiten,
    whiten_spectral,
)

_CHEAP_CELLS = 1 << 18  # size of the reduced rows up to which we try a whole grid of variances
_RATIO_GRID = np.geomspace(1e-5, 1e5, 21)  # every half decade
_LARGEST_STEP = 10.0  # factor: Fisher scoring is for points near the maximum
_FAR_FROM_ZERO = 100.0  # squared standard errors beyond which zero cannot be more likely
_ZERO_RATIO = 1e-9  # a variance ratio, on the scale of the reduction, that counts as zero
_LARGEST_SEARCHED = 1e14  # beyond it the noise is lost in the rounding errors of 1 + ratio
_START_CLIENTS, _START_STEPS, _START_TOL = 1000, 20, 3e-3  # of the stages that only find a start
_PREVIEW_TOL = 0.1  # of some clients' variances, which are far from those of all in any case
_SMALLEST_START = 1e-6  # of the next stage: steps are relative, so none leaves zero
_HALF_RANGE = 1e-12, 1e12  # root mean squares of targets, whose sums of squares single floats hold
_FEW_CELLS = 1 << 12  # size of the reduced rows up to which we try several starts
_N_TRIED, _N_STARTS, _MORE_STARTS = 48, 3, 10
_FEW_ROWS = 15  # per parameter, below which the likelihood often has several maxima
_TOO_FEW_ROWS = 4  # per parameter, below which no search finds the maximum with a ridge for sure
_SAME_MAXIMUM = 2e-3  # twice the nats by which searches may end apart at the same maximum
_AWAY_FROM_ZERO = 0.1  # where a parameter of zero begins its second search
_DAMPING, _LEAST_DAMPING, _FAILED_DAMPING = 1e-3, 1e-6, 0.1  # shares of expected information
_LEAST_CURVATURE = 1e-12  # eigenvalue of information, at a unit diagonal
_BEST_RATE = 1e-3  # of the gains of successive steps, that we trust
_ROUNDING = 1e-13  # of the criterion, per row
_ROUNDS, _FAR_OFF = 6, 3.0  # rounds of quasi-Newton steps; how wrong the units of one may be
_LARGEST_FACTOR = 1e7  # entry of a factor, whose square is the largest ratio
_NOISE_NATS = 60  # that the logarithm of a noise variance moves from its start, at most
_LAST_STEPS, _DIFFERENCE = 5, 1e-5  # at the end; of parameters, for differences of slopes
_LONGEST_LAST = 0.01  # over the rows of the factor, or 1
_FLAT = 1e-5  # of the tolerance, where these steps end
_LEAST_EIGENVALUE = 1e-9  # of second derivatives, over the largest, for a step that is no rounding


class FoundVariances(NamedTuple):
    """Between-client covariance over the noise variance, in the scale of the reduction."""

    ratio: np.ndarray  # (q, q)
    point: Profile
    whitened: Whitened
    n_iter: int
    converged: bool


def at_ratio(reduced, settings, ratio):
    """The profile at a given ratio, a number or a matrix (q, q)."""
    q = reduced.n_random
    if np.ndim(ratio) == 0:
        whitened, ratio = whiten_spectral(reduced, ratio), ratio * np.eye(q)
    else:
        whitened = whiten(reduced, square_root(ratio))
    point = profile(reduced, whitened, settings)
    return FoundVariances(ratio, refined(reduced, whitened, settings, point), whitened, 0, True)


def search_ratio(reduced, settings, max_iter, tol):
    """Best ratio of a spherical covariance (spectral rows).

    We use Fisher scoring. With few rows it starts from the best point of a grid. With many rows it
    starts from the unrestricted estimate of some clients, refined on all in single precision.
    """
    size = sum(stack.rows.size for stack in reduced.stacks)
    if size <= _CHEAP_CELLS:
        values = [at_ratio(reduced, settings, ratio).point.criterion for ratio in _RATIO_GRID]
        start = float(_RATIO_GRID[int(np.argmin(values))])
    else:
        start = 1.0
        # Restricted likelihood of a subset would charge it all coefficients of the population.
        unrestricted = settings._replace(restricted=False)
        for preview, how in ((_some_clients, unrestricted), (_half_precision, settings)):
            stage = preview(reduced)
            start = _fisher_steps(stage, how, start, _START_STEPS, _START_TOL)[2]
        del stage  # half as large as the rows, which are whitened next
    end, evidence, _ = _fisher_steps(reduced, settings, start, max_iter, tol)
    if evidence < _FAR_FROM_ZERO:  # steps are relative, so they come near zero but not to it
        zero = at_ratio(reduced, settings, 0.0)
        if zero.point.criterion <= end.point.criterion:
            return zero._replace(n_iter=end.n_iter, converged=end.converged)
    return end._replace(point=refined(reduced, end.whitened, settings, end.point))


def _fisher_steps(reduced, settings, start, max_iter, tol):
    """Fisher scoring for a ratio, bracketed by the last ratios with slopes of either sign.

    Returns the FoundVariances, their distance from zero in squared standard errors, and the ratio
    of the next step.
    """
    moved, low, high, n_iter, done = start, 0.0, np.inf, 0, False
    whitened: Any = None
    while not done and n_iter < max_iter:
        n_iter, ratio = n_iter + 1, moved
        whitened = whiten_spectral(reduced, ratio, whitened)
        point = profile(reduced, whitened, settings)
        slope, share, squares = slope_spectral(reduced, whitened, point, settings, ratio)
        low, high = (ratio, high) if slope < 0 else (low, ratio)
        information = squares - (share**2 / reduced.n_rows if settings.noise is None else 0.0)
        step = -slope / max(information, np.finfo(float).tiny)
        moved = np.clip(ratio + step, ratio / _LARGEST_STEP, ratio * _LARGEST_STEP)
        if not low < moved < high:  # bisect on a logarithmic scale, or go towards zero
            moved = np.sqrt(low * high) if low > 0 else ratio / _LARGEST_STEP
        done = abs(moved - ratio) <= tol * ratio or not _ZERO_RATIO < moved < _LARGEST_SEARCHED
    evidence, after = ratio**2 * information, max(float(moved), _SMALLEST_START)
    ratio = ratio * np.eye(reduced.n_random)
    return FoundVariances(ratio, point, whitened, n_iter, bool(done)), evidence, after


def _some_clients(reduced):
    """About `_START_CLIENTS` of the clients of every stack."""
    step = max(reduced.n_clients // max(_START_CLIENTS, reduced.n_columns), 1)
    stacks = [
        ReducedStack._make(None if part is None else part[::step] for part in stack)
        for stack in reduced.stacks
    ]
    left = reduced.n_rows - sum(stack.rows[..., 0].size for stack in reduced.stacks)
    rows = sum(stack.rows[..., 0].size for stack in stacks)
    return reduced._replace(
        stacks=stacks,
        remainder=reduced.remainder / step,
        n_rows=rows + left // step,
        n_clients=sum(len(stack.rows) for stack in stacks),
    )


def _half_precision(reduced):
    """The rows in single precision, unless the squares of the target exceed its range."""
    if not _HALF_RANGE[0] < np.sqrt(reduced.sum_of_squares / reduced.n_rows) < _HALF_RANGE[1]:
        return reduced
    stacks = [stack._replace(rows=stack.rows.astype(np.float32)) for stack in reduced.stacks]
    return reduced._replace(stacks=stacks)


class _Likelihood:
    """Criterion of the parameters (k,) of a CovarianceFactor; whitened rows share one memory."""

    def __init__(self, reduced, settings, factor):
        self.reduced, self.settings, self.factor = reduced, settings, factor
        self.parameters: Any = None  # of the last point
        self.whitened: Any = None
        self.point: Any = None

    def at(self, parameters):
        """The profile."""
        if not np.array_equal(parameters, self.parameters):
            lower = self.factor.matrix(parameters)
            root = lower.sum(axis=1) if self.factor.is_diagonal else lower
            self.whitened = whiten(self.reduced, root, self.whitened)
            self.point = profile(self.reduced, self.whitened, self.settings)
            self.parameters = parameters.copy()
        return self.point

    def rounding(self):
        """Difference of two values of the criterion, about the last point, that means nothing."""
        # Residuals lose the digits by which they are shorter than the targets.
        lost = np.sqrt(self.reduced.mean_square / self.point.noise)
        return _ROUNDING * self.reduced.n_rows * max(lost, 1.0)

    def per_client(self, parameters):
        """Criterion per client, and its slope in the parameters."""
        point = self.at(parameters)
        slope = slope_matrix(self.reduced, self.whitened, point, self.settings)
        slope = self.factor.pull_back(2 * slope @ self.factor.matrix(parameters))
        return point.criterion / self.reduced.n_clients, slope / self.reduced.n_clients

    def curved(self, variances):
        """Curvature in the variances (k,) of a diagonal covariance."""
        point = self.at(np.sqrt(variances))
        found = slope_diagonal(self.reduced, self.whitened, point, self.settings)
        at = self.factor.positions // self.factor.shape[1]
        return Curvature(found.slope[at], found.average[np.ix_(at, at)], found.expected[at])


def search_factor(reduced, settings, factor, max_iter, tol):
    """Best covariance of any shape: by average information, or quasi-Newton steps on its factor."""
    likelihood = _Likelihood(reduced, settings, factor)
    starts = _starts(likelihood)
    # Where there may be several maxima, quasi-Newton steps overshoot into more of them.
    scored = factor.is_diagonal and len(starts) <= _N_STARTS
    local = _average_information if scored else _quasi_newton
    search = partial(local, likelihood, max_iter=max_iter, tol=tol)
    runs = [search(start) for start in starts]
    result = min(runs, key=_rank)
    same = sum(run.fun < result.fun + _SAME_MAXIMUM / reduced.n_clients for run in runs)
    # With a ridge, a maximum that only one of many starts reaches may not be the largest.
    once = same == 1 and len(runs) > _N_STARTS
    hopeless = reduced.n_rows < _TOO_FEW_ROWS * len(factor.start)
    doubtful = factor.has_ridge and (once or hopeless)
    zero = result.x**2 < 1e3 * _ZERO_RATIO
    if zero.any() and not scored:  # a stationary point in any case; maybe no minimum
        moved = np.where(zero, _AWAY_FROM_ZERO, result.x)
        result = min(result, search(moved), key=_rank)
    # With more rows Newton's steps would take too long, and the criterion is less flat.
    if not scored and len(runs) > 1 and result.success:
        _end_by_newton(likelihood, result, tol)
    # A variance near zero is zero if that costs nothing: reports should not say 1e-12.
    small = (result.x != 0) & (result.x**2 < 1e3 * _ZERO_RATIO)
    parameters = snapped_to_zero(
        result.x, small, likelihood.per_client, lambda best: 1e-10 * abs(best)
    )
    steep = np.abs(result.jac).max() > 100 * tol
    # Searches fail in steps that rounding errors end; a flat slope is what counts.
    converged = bool(result.success or not steep) and not doubtful
    lower, point = factor.matrix(parameters), likelihood.at(parameters)
    point = refined(reduced, likelihood.whitened, settings, point)
    n_iter = int(result.nit)
    return FoundVariances(lower @ lower.T, point, likelihood.whitened, n_iter, converged)


def _rank(result):
    return not result.success, result.fun


def _starts(likelihood):
    """Starts of the search: the usual one, and with few rows the best of many others."""
    reduced, factor = likelihood.reduced, likelihood.factor
    if sum(stack.rows.size for stack in reduced.stacks) > _FEW_CELLS:
        return [_start_of_some(likelihood)] if factor.is_diagonal else factor.starts(0)[:1]
    starts = factor.starts(_N_TRIED)
    order = np.argsort([likelihood.at(start).criterion for start in starts], kind="stable")
    best = [starts[0], *(starts[k] for k in order if k)][:_N_STARTS]
    unlike = factor.has_ridge and np.max(factor.decades) > 1
    if reduced.n_rows >= _FEW_ROWS * len(factor.start) and not unlike:
        return best
    return [*best, *starts[3 : 3 + (1 + 2 * factor.has_ridge) * _MORE_STARTS]]


def _start_of_some(likelihood):
    """The usual start, or the estimate from some of many clients."""
    start, some = likelihood.factor.starts(0)[0], _some_clients(likelihood.reduced)
    if some.n_clients > likelihood.reduced.n_clients / 2:
        return start
    # Restricted likelihood of a subset would charge it all coefficients of the population.
    preview = _Likelihood(some, likelihood.settings._replace(restricted=False), likelihood.factor)
    return _average_information(preview, start, _START_STEPS, _PREVIEW_TOL).x


def _average_information(likelihood, start, max_iter, tol):
    """Search for variances from the roots of a start, by damped average information.

    A step minimizes the quadratic under the bound of zero. Where it fails, and where the
    information of few clients is singular, it is shortened by damping (Levenberg and Marquardt).
    """
    n_clients, variances = likelihood.reduced.n_clients, start**2
    value, curvature = likelihood.at(start).criterion, likelihood.curved(variances)
    damping, gain, n_iter, done = _DAMPING, 0.0, 0, False
    while not done and n_iter < max_iter:
        n_iter += 1
        second = curvature.average + damping * np.diag(curvature.expected)
        step = _step_above_zero(variances, curvature.slope, second)
        last, gain = gain, -step @ (curvature.slope + second @ step / 2)
        rounding = likelihood.rounding()
        # Each step gains less by about the same factor: this is what the next one would gain.
        left = gain * np.clip(gain / last, _BEST_RATE, 1.0) if last > 0 else gain
        # Where variances grow without end, what is left to gain falls slowly, like their slopes.
        flat = np.abs(curvature.slope) * np.where(step > 0, np.maximum(variances, 1.0), variances)
        done = left <= max((tol / 10) ** 2 * n_clients, rounding) or flat.max() <= tol
        moved = _moved(variances, step)
        after = likelihood.at(np.sqrt(moved)).criterion
        # In doubt we take the step: slopes have more digits than differences of the criterion.
        if after <= value + rounding:
            variances, value = moved, after
            damping = max(damping / 10, _LEAST_DAMPING)
            if not done:
                curvature = likelihood.curved(variances)
        else:
            damping, gain = max(damping * 10, _FAILED_DAMPING), 0.0
    roots, result = np.sqrt(variances), OptimizeResult()
    slope = 2 * roots * curvature.slope / n_clients
    success = bool(done and damping <= 1)  # rounding errors end a search that is damped more
    result.update(x=roots, fun=value / n_clients, jac=slope, success=success, nit=n_iter)
    return result


def _step_above_zero(variances, slope, second):
    """Step (k,) to the minimum of a quadratic among variances that are not negative."""
    step = np.zeros(len(variances))
    free = (variances < _LARGEST_SEARCHED) | (slope > 0)
    if free.any():
        unit = np.sqrt(np.diag(second)[free])
        scaled = second[np.ix_(free, free)] / unit / unit[:, None]
        values, vectors = np.linalg.eigh(scaled)
        # Rounding errors must not make the quadratic concave.
        roots = np.sqrt(np.maximum(values, _LEAST_CURVATURE))
        old, slope = variances[free] * unit, slope[free] / unit
        aim = roots * (vectors.T @ old) - vectors.T @ slope / roots
        moved, _ = nnls(roots[:, None] * vectors.T, aim, maxiter=100 * len(aim))
        step[free] = (moved - old) / unit
    return step


def _moved(variances, step):
    """Variances (k,) after a step, or the share of it that lets none grow more than tenfold.

    Far from the maximum the quadratic is too flat, and may be flat altogether.
    """
    room = np.minimum(_LARGEST_STEP * np.maximum(variances, 1.0), _LARGEST_SEARCHED)
    share = np.max(step / np.maximum(room - variances, 1.0), initial=1.0)
    return np.clip(variances + step / share, 0.0, _LARGEST_SEARCHED)


def _quasi_newton(likelihood, start, max_iter, tol):
    """Quasi-Newton search from a start, in units of the factor's rows once these are large.

    Where variances are large the criterion is flat, so tolerances must be relative there.
    """
    unit, x, n_iter = np.ones(len(start)), start, 0
    for _ in range(_ROUNDS):

        def scaled(t, unit=unit):
            value, slope = likelihood.per_client(t * unit)
            return value, slope * unit

        result = minimize(
            scaled,
            x / unit,
            jac=True,
            method="L-BFGS-B",
            bounds=[(-edge, edge) for edge in _LARGEST_FACTOR / unit],
            options={"maxiter": max_iter, "maxcor": 30, "ftol": 1e-15, "gtol": tol},
        )
        x, n_iter, before = result.x * unit, n_iter + int(result.nit), unit
        unit = np.maximum(likelihood.factor.row_scales(x), 1.0)
        if np.all(unit < _FAR_OFF * before):
            break
    result.update(x=x, nit=n_iter)
    return result


def _end_by_newton(likelihood, result, tol):
    """Take Newton's last steps in the parameters of a quasi-Newton search.

    It ends a slope of `tol` short of the maximum, or where values of the criterion are equal. In
    flat directions that is 1e-6 of a parameter, and depends on how the rows were summed.
    """
    unit = np.maximum(likelihood.factor.row_scales(result.x), 1.0)
    slope = likelihood.per_client(result.x)[1]
    for _ in range(_LAST_STEPS):
        ahead = [likelihood.per_client(result.x + step)[1] for step in np.diag(_DIFFERENCE * unit)]
        second = (np.array(ahead) - slope) * unit / _DIFFERENCE
        values, vectors = np.linalg.eigh((second + second.T) / 2)
        if values[0] <= _LEAST_EIGENVALUE * values[-1]:
            return
        step = vectors @ (vectors.T @ (slope * unit) / values)
        if np.abs(step).max() > _LONGEST_LAST:  # the search ended elsewhere than at a maximum
            return
        moved = result.x - unit * step
        value, after = likelihood.per_client(moved)
        if np.abs(after * unit).max() >= np.abs(slope * unit).max():
            return
        slope = after
        result.update(x=moved, fun=value, jac=slope)
        if np.abs(slope * unit).max() <= _FLAT * tol:
            return


def search_noise(reduced, settings, covariance):
    """Best noise variance when the between-client covariance (q, q), or number, is known."""

    def slope(log_noise):
        return _slope_in_noise(reduced, settings, covariance, np.exp(log_noise))

    log_noise = _noise_start(reduced, settings, covariance)
    largest = float(np.max(covariance))
    lowest = np.log(largest / _LARGEST_SEARCHED) if largest > 0 else log_noise - _NOISE_NATS
    # Bracket the maximum that is next to the start: with few rows there may be another.
    low = high = log_noise
    while slope(high) < 0 and high < log_noise + _NOISE_NATS:
        high += 1.0
    while slope(low) > 0 and low > lowest:
        low = max(low - 1.0, lowest)
    if slope(low) < 0 < slope(high):
        log_noise = brentq(slope, low, high, xtol=1e-12)
    elif low < log_noise:  # an exact fit: the smaller, the more likely
        log_noise = low
    noise = float(np.exp(log_noise))
    return at_ratio(reduced, settings._replace(noise=noise), covariance / noise)


def _noise_start(reduced, settings, covariance):
    """Log residual variance without client differences, or the best value below it for few rows."""
    log_noise = np.log(at_ratio(reduced, settings, 0.0 * covariance).point.noise)
    largest = float(np.max(covariance))
    if not largest > 0 or sum(stack.rows.size for stack in reduced.stacks) > _CHEAP_CELLS:
        return log_noise
    tried = log_noise - np.arange(
        0.0, min(20.0, log_noise - np.log(largest / _LARGEST_SEARCHED)), 1.0
    )
    values = [
        at_ratio(reduced, settings._replace(noise=noise), covariance / noise).point.criterion
        for noise in np.exp(tried)
    ]
    return tried[int(np.argmin(values))] if values else log_noise


def _slope_in_noise(reduced, settings, covariance, noise):
    """Derivative of the criterion in the logarithm of the noise variance."""
    fixed = settings._replace(noise=noise)
    ratio, point, whitened, *_ = at_ratio(reduced, fixed, covariance / noise)
    if np.ndim(covariance) == 0:
        ratio = covariance / noise
        by_ratio = slope_spectral(reduced, whitened, point, fixed, ratio)[0] * ratio
    else:
        by_ratio = np.vdot(slope_matrix(reduced, whitened, point, fixed), ratio)
    free = reduced.n_rows - (point.root.shape[1] if settings.restricted else 0)
    square = profile(reduced, whitened, settings._replace(noise=None)).noise * max(free, 1)
    return free - square / noise - by_ratio
