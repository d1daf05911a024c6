"""Searches for the variances of a linear mixed model that maximize the profiled likelihood."""

from typing import Any

import numpy as np
from scipy.optimize import OptimizeResult, brentq, minimize, nnls

from pfl_sklearn.linear_model._algebra import covariance_factor, snap_to_zero, uncorrelating

_CHEAP_CELLS = 1 << 18  # size of the reduced rows up to which we try a whole grid of variances
_RATIO_GRID = np.geomspace(1e-5, 1e5, 21)  # every half decade
_LARGEST_STEP = 10.0  # factor: Fisher scoring is for points near the maximum
_FAR_FROM_ZERO = 100.0  # squared standard errors beyond which zero cannot be more likely
_ZERO_RATIO = 1e-9  # a variance ratio, on the scale of the reduction, that counts as zero
_LARGEST_SEARCHED = 1e14  # beyond it the noise is lost in the rounding errors of 1 + ratio
_START_CLIENTS, _START_STEPS, _START_TOL = 1000, 20, 3e-3  # of the stages that only find a start
_PREVIEW_TOL = 0.1  # of some clients' variances, which are far from those of all in any case
_SMALLEST_START = 1e-6  # of the next stage: steps are relative, so none leaves zero
_SINGLE_RANGE = 1e-12, 1e12  # root mean squares of targets, whose squares single floats can sum
_FEW_CELLS = 1 << 12  # size of the reduced rows up to which we try several starts
_N_TRIED, _N_STARTS, _MORE_STARTS = 48, 3, 10
_FEW_ROWS = 15  # per parameter, below which the likelihood often has several maxima
_TOO_FEW_ROWS = 4  # per parameter, below which no search finds the maximum with a ridge for sure
_SAME_MAXIMUM = 2e-3  # twice the nats by which searches may end apart at the same maximum
_AWAY_FROM_ZERO = 0.1  # where a parameter of zero begins its second search
_DAMPING, _LEAST_DAMPING, _FAILED_DAMPING = 1e-3, 1e-6, 0.1  # shares of expected information
_LEAST_CURVATURE = 1e-12  # eigenvalue of information, at a unit diagonal
_BEST_RATE = 1e-3  # of the gains of successive steps, that we trust
_CRITERION_ROUNDING = 1e-13  # of the criterion, per row
_ROUNDS, _FAR_OFF = 6, 3.0  # rounds of quasi-Newton steps; how wrong the units of one may be
_LARGEST_FACTOR = 1e7  # entry of a factor, whose square is the largest ratio
_NOISE_NATS = 60  # that the logarithm of a noise variance moves from its start, at most
_NOISE_GRID = 20  # nats below the residual variance, where we look for a start
_LAST_STEPS, _DIFFERENCE = 5, 1e-5  # at the end; of parameters, for differences of slopes
_LONGEST_LAST = 0.01  # over the rows of the factor, or 1
_FLAT = 1e-5  # of the tolerance, where these steps end
_LEAST_EIGENVALUE = 1e-9  # of second derivatives, over the largest, for a step that is no rounding


def search_variances(likelihood, shape, covariance, options):
    """Profile at the best variances of a CovarianceShape, or the best noise at a known covariance.

    The known covariance (q, q) is that of coefficients of the data's columns.
    """
    reduced, q = likelihood.reduced, likelihood.reduced.n_random
    if shape is not None and reduced.is_spectral:
        return search_ratio(likelihood, options.max_iter, options.tol)
    if shape is not None:
        # The model is the same in all coordinates, but a search in correlated ones stops short.
        basis = None if shape.name == "diag" else uncorrelating(reduced.random_moments())
        factor = covariance_factor(shape.name, q, shape.rank, shape.varies, basis)
        return search_factor(likelihood, factor, options.max_iter, options.tol)
    scaled = covariance / np.multiply.outer(reduced.scale[:q], reduced.scale[:q])
    if likelihood.noise is None:
        return search_noise(likelihood, scaled)
    return likelihood.at_ratio(scaled / likelihood.noise)


def search_ratio(likelihood, max_iter, tol):
    """Best ratio of a spherical covariance (spectral rows), by Fisher scoring."""
    # With few rows the search starts from the best point of a grid; with many, from the
    # unrestricted estimate of some clients, refined on all in single precision.
    if likelihood.reduced.size <= _CHEAP_CELLS:
        values = [likelihood.at(root).criterion for root in np.sqrt(_RATIO_GRID)]
        start = float(_RATIO_GRID[int(np.argmin(values))])
    else:
        start = 1.0
        for preview in (_subsample_clients, _in_single_precision):
            stage = preview(likelihood)
            start = _fisher_steps(stage, start, _START_STEPS, _START_TOL)[2]
        del stage  # half as large as the rows, which are whitened next
    end, evidence, _ = _fisher_steps(likelihood, start, max_iter, tol)
    if evidence < _FAR_FROM_ZERO:  # steps are relative, so they come near zero but not to it
        zero = likelihood.refined(likelihood.at(0.0))
        if zero.criterion <= end.criterion:
            return zero._replace(n_iter=end.n_iter, converged=end.converged)
    return likelihood.refined(end)


def _fisher_steps(likelihood, start, max_iter, tol):
    """Fisher scoring for a ratio, bracketed by the last ratios with slopes of either sign.

    Returns the Profile, its squared distance from zero in standard errors, and the next ratio.
    """
    trial, low, high, n_iter, done = start, 0.0, np.inf, 0, False
    point: Any = None
    while not done and n_iter < max_iter:
        n_iter, ratio = n_iter + 1, trial
        point = likelihood.at(np.sqrt(ratio), point)
        slope, share, information = likelihood.slope_spectral(point)
        low, high = (ratio, high) if slope < 0 else (low, ratio)
        if likelihood.noise is None:
            information -= share**2 / likelihood.reduced.n_rows
        step = -slope / max(information, np.finfo(float).tiny)
        trial = np.clip(ratio + step, ratio / _LARGEST_STEP, ratio * _LARGEST_STEP)
        if not low < trial < high:  # bisect on a logarithmic scale, or go towards zero
            trial = np.sqrt(low * high) if low > 0 else ratio / _LARGEST_STEP
        done = abs(trial - ratio) <= tol * ratio or not _ZERO_RATIO < trial < _LARGEST_SEARCHED
    point = point._replace(n_iter=n_iter, converged=bool(done))
    return point, ratio**2 * information, max(float(trial), _SMALLEST_START)


def _subsample_clients(likelihood):
    """The full likelihood of about `_START_CLIENTS` clients; REML would charge all coefficients."""
    reduced = likelihood.reduced
    step = max(reduced.n_clients // max(_START_CLIENTS, reduced.n_columns), 1)
    stacks = [
        stack._make(None if part is None else part[::step] for part in stack)
        for stack in reduced.stacks
    ]
    remaining = reduced.n_rows - sum(stack.rows[..., 0].size for stack in reduced.stacks)
    rows = sum(stack.rows[..., 0].size for stack in stacks)
    subsample = reduced._replace(
        stacks=stacks,
        remainder=reduced.remainder / step,
        n_rows=rows + remaining // step,
        n_clients=sum(len(stack.rows) for stack in stacks),
    )
    return likelihood._replace(reduced=subsample, restricted=False)


def _in_single_precision(likelihood):
    """The likelihood of rounded rows, unless squares of the target exceed the range of singles."""
    reduced = likelihood.reduced
    if not _SINGLE_RANGE[0] < np.sqrt(reduced.mean_square) < _SINGLE_RANGE[1]:
        return likelihood
    stacks = [stack._replace(rows=stack.rows.astype(np.float32)) for stack in reduced.stacks]
    return likelihood._replace(reduced=reduced._replace(stacks=stacks))


class _FactorCriterion:
    """Criterion of the parameters (k,) of a CovarianceFactor; whitened rows share one memory."""

    def __init__(self, likelihood, factor):
        self.likelihood, self.factor = likelihood, factor
        self.n_clients = likelihood.reduced.n_clients
        self.parameters: Any = None  # of the last point
        self.point: Any = None

    def at(self, parameters):
        """The profile."""
        if not np.array_equal(parameters, self.parameters):
            lower = self.factor.matrix(parameters)
            root = lower.sum(axis=1) if self.factor.is_diagonal else lower
            self.point = self.likelihood.at(root, self.point)
            self.parameters = parameters.copy()
        return self.point

    def rounding(self):
        """Difference of two values of the criterion, about the last point, that means nothing."""
        # Residuals lose the digits by which they are shorter than the targets.
        reduced = self.likelihood.reduced
        lost = np.sqrt(reduced.mean_square / self.point.noise)
        return _CRITERION_ROUNDING * reduced.n_rows * max(lost, 1.0)

    def per_client(self, parameters):
        """Criterion per client, and its slope in the parameters."""
        point = self.at(parameters)
        slope = 2 * self.likelihood.slope_matrix(point) @ self.factor.matrix(parameters)
        return point.criterion / self.n_clients, self.factor.pull_back(slope) / self.n_clients

    def curved(self, variances):
        """Curvature in the variances (k,) of a diagonal covariance."""
        curvature = self.likelihood.slope_diagonal(self.at(np.sqrt(variances)))
        at = self.factor.positions // self.factor.shape[1]
        return curvature._make(
            [curvature.slope[at], curvature.average[np.ix_(at, at)], curvature.expected[at]]
        )


def search_factor(likelihood, factor, max_iter, tol):
    """Best covariance of any shape: by average information, or quasi-Newton steps on its factor."""
    criterion, n_rows = _FactorCriterion(likelihood, factor), likelihood.reduced.n_rows
    starts = _starts(criterion)
    # Where there may be several maxima, quasi-Newton steps overshoot into more of them.
    scored = factor.is_diagonal and len(starts) <= _N_STARTS
    search = _average_information if scored else _quasi_newton
    runs = [search(criterion, start, max_iter, tol) for start in starts]
    result = min(runs, key=_search_rank)
    same = sum(run.fun < result.fun + _SAME_MAXIMUM / criterion.n_clients for run in runs)
    # With a ridge, a maximum that only one of many starts reaches may not be the largest.
    once = same == 1 and len(runs) > _N_STARTS
    doubtful = factor.has_ridge and (once or n_rows < _TOO_FEW_ROWS * len(factor.start))
    zero = result.x**2 < 1e3 * _ZERO_RATIO
    if zero.any() and not scored:  # a stationary point in any case; maybe no minimum
        nonzero = np.where(zero, _AWAY_FROM_ZERO, result.x)
        result = min(result, search(criterion, nonzero, max_iter, tol), key=_search_rank)
    # With more rows Newton's steps would take too long, and the criterion is less flat.
    if not scored and len(runs) > 1 and result.success:
        _polish_by_newton(criterion, result, tol)
    # A variance near zero is zero if that costs nothing: reports should not say 1e-12.
    small = (result.x != 0) & (result.x**2 < 1e3 * _ZERO_RATIO)
    parameters = snap_to_zero(result.x, small, criterion.per_client, lambda best: 1e-10 * abs(best))
    # Searches fail in steps that rounding errors end; a flat slope is what counts.
    ended = result.success or np.abs(result.jac).max() <= 100 * tol
    point = likelihood.refined(criterion.at(parameters))
    return point._replace(n_iter=int(result.nit), converged=bool(ended) and not doubtful)


def _search_rank(result):
    return not result.success, result.fun


def _starts(criterion):
    """Starts of the search: the usual one, and with few rows the best of many others."""
    reduced, factor = criterion.likelihood.reduced, criterion.factor
    if reduced.size > _FEW_CELLS:
        return [_start_from_subsample(criterion)] if factor.is_diagonal else factor.starts(0)[:1]
    starts = factor.starts(_N_TRIED)
    order = np.argsort([criterion.at(start).criterion for start in starts], kind="stable")
    best = [starts[0], *(starts[k] for k in order if k)][:_N_STARTS]
    unlike = factor.has_ridge and np.max(factor.decades) > 1
    if reduced.n_rows >= _FEW_ROWS * len(factor.start) and not unlike:
        return best
    return [*best, *starts[3 : 3 + (1 + 2 * factor.has_ridge) * _MORE_STARTS]]


def _start_from_subsample(criterion):
    """The usual start, or the estimate from some of many clients."""
    start, subsample = criterion.factor.starts(0)[0], _subsample_clients(criterion.likelihood)
    if subsample.reduced.n_clients > criterion.n_clients / 2:
        return start
    preview = _FactorCriterion(subsample, criterion.factor)
    return _average_information(preview, start, _START_STEPS, _PREVIEW_TOL).x


def _average_information(criterion, start, max_iter, tol):
    """Search for variances from the roots of a start, by damped average information."""
    # A step minimizes the quadratic under the bound of zero. Damping (Levenberg and Marquardt)
    # shortens steps that fail, and steps under the singular information of few clients.
    n_clients, variances = criterion.n_clients, start**2
    value, curvature = criterion.at(start).criterion, criterion.curved(variances)
    damping, gain, n_iter, done = _DAMPING, 0.0, 0, False
    while not done and n_iter < max_iter:
        n_iter += 1
        second = curvature.average + damping * np.diag(curvature.expected)
        step = _nonnegative_step(variances, curvature.slope, second)
        last, gain = gain, -step @ (curvature.slope + second @ step / 2)
        rounding = criterion.rounding()
        # Gains fall by about the same factor a step: this is the gain of the next one.
        remaining = gain * np.clip(gain / last, _BEST_RATE, 1.0) if last > 0 else gain
        # Where variances grow without end, the remaining gain falls slowly, like their slopes.
        flat = np.abs(curvature.slope) * np.where(step > 0, np.maximum(variances, 1.0), variances)
        done = remaining <= max((tol / 10) ** 2 * n_clients, rounding) or flat.max() <= tol
        trial = _limit_growth(variances, step)
        after = criterion.at(np.sqrt(trial)).criterion
        # In doubt we take the step: slopes have more digits than differences of the criterion.
        if after <= value + rounding:
            variances, value = trial, after
            damping = max(damping / 10, _LEAST_DAMPING)
            if not done:
                curvature = criterion.curved(variances)
        else:
            damping, gain = max(damping * 10, _FAILED_DAMPING), 0.0
    roots, result = np.sqrt(variances), OptimizeResult()
    slope = 2 * roots * curvature.slope / n_clients
    success = bool(done and damping <= 1)  # rounding errors end a search that is damped more
    result.update(x=roots, fun=value / n_clients, jac=slope, success=success, nit=n_iter)
    return result


def _nonnegative_step(variances, slope, second):
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
        solution, _ = nnls(roots[:, None] * vectors.T, aim, maxiter=100 * len(aim))
        step[free] = (solution - old) / unit
    return step


def _limit_growth(variances, step):
    """Variances (k,) after a step, or the share of it that lets none grow more than tenfold."""
    room = np.minimum(_LARGEST_STEP * np.maximum(variances, 1.0), _LARGEST_SEARCHED)
    share = np.max(step / np.maximum(room - variances, 1.0), initial=1.0)
    return np.clip(variances + step / share, 0.0, _LARGEST_SEARCHED)


def _quasi_newton(criterion, start, max_iter, tol):
    """Quasi-Newton search from a start, in units of the factor's rows once these are large."""
    unit, x, n_iter = np.ones(len(start)), start, 0
    for _ in range(_ROUNDS):

        def scaled(t, unit=unit):
            value, slope = criterion.per_client(t * unit)
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
        unit = np.maximum(criterion.factor.row_scales(x), 1.0)
        if np.all(unit < _FAR_OFF * before):
            break
    result.update(x=x, nit=n_iter)
    return result


def _polish_by_newton(criterion, result, tol):
    """Newton's last steps in the parameters of a quasi-Newton search, which ends early."""
    # In flat directions the quasi-Newton search ends 1e-6 of a parameter apart, depending on how
    # the rows were summed.
    unit = np.maximum(criterion.factor.row_scales(result.x), 1.0)
    slope = criterion.per_client(result.x)[1]
    for _ in range(_LAST_STEPS):
        ahead = [criterion.per_client(result.x + step)[1] for step in np.diag(_DIFFERENCE * unit)]
        second = (np.array(ahead) - slope) * unit / _DIFFERENCE
        values, vectors = np.linalg.eigh((second + second.T) / 2)
        if values[0] <= _LEAST_EIGENVALUE * values[-1]:
            return
        step = vectors @ (vectors.T @ (slope * unit) / values)
        if np.abs(step).max() > _LONGEST_LAST:  # the search ended elsewhere than at a maximum
            return
        trial = result.x - unit * step
        value, after = criterion.per_client(trial)
        if np.abs(after * unit).max() >= np.abs(slope * unit).max():
            return
        slope = after
        result.update(x=trial, fun=value, jac=slope)
        if np.abs(slope * unit).max() <= _FLAT * tol:
            return


def search_noise(likelihood, covariance):
    """Best noise variance when the between-client covariance (q, q) is known."""

    def at(log_noise):
        noise = float(np.exp(log_noise))
        return likelihood._replace(noise=noise).at_ratio(covariance / noise)

    def slope(log_noise):
        return _slope_in_noise(likelihood, at(log_noise))

    start = np.log(likelihood.at_ratio(0.0 * covariance).noise)  # without client differences
    largest = float(np.max(covariance))
    lowest = np.log(largest / _LARGEST_SEARCHED) if largest > 0 else start - _NOISE_NATS
    # With few rows the best value below stands for the start, as there may be several maxima.
    if largest > 0 and likelihood.reduced.size <= _CHEAP_CELLS:
        tried = start - np.arange(0.0, min(_NOISE_GRID, start - lowest), 1.0)
        start = min(tried, key=lambda log_noise: at(log_noise).criterion, default=start)
    # Bracket the maximum that is next to the start.
    low = high = start
    while slope(high) < 0 and high < start + _NOISE_NATS:
        high += 1.0
    while slope(low) > 0 and low > lowest:
        low = max(low - 1.0, lowest)
    if slope(low) < 0 < slope(high):
        return at(brentq(slope, low, high, xtol=1e-12))
    return at(low)  # an exact fit: the smaller, the more likely


def _slope_in_noise(likelihood, point):
    """Derivative of the criterion in the logarithm of the noise, under a known covariance."""
    if likelihood.reduced.is_spectral:
        by_ratio = likelihood.slope_spectral(point)[0] * point.ratio[0, 0]
    else:
        by_ratio = np.vdot(likelihood.slope_matrix(point), point.ratio)
    return point.n_free - point.square / point.noise - by_ratio
