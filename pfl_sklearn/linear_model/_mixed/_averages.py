"""Posteriors of clients and population, averaged over the variances of a mixed model.

The averages may take a second, so they are computed when they are first asked for.
"""

from typing import Any, NamedTuple

import numpy as np

from pfl_sklearn._variance_averaging import ClientIntervals, Mixture
from pfl_sklearn.linear_model._mixed._posterior import normal_bounds

_LARGEST_SIZE = 1e150  # of a row: its square is finite


class ColumnScaling(NamedTuple):
    """How the columns of the fit were centred and scaled, and the way back."""

    scale: np.ndarray  # (p,), that multiplied the columns
    centre: np.ndarray  # (p,), that was subtracted from the columns before
    intercept: int | None

    def rows(self, x):
        """Rows x (n, p) of the data, centred and scaled."""
        if self.centre.any():
            x = x - x[:, [self.intercept]] * self.centre
        return x * self.scale

    @property
    def back(self):
        """Matrix (p, p) from coefficients of centred, scaled columns to those of the data."""
        matrix = np.diag(self.scale)
        if self.centre.any():
            matrix[self.intercept] -= self.centre * self.scale
        return matrix


class Averages(NamedTuple):
    """Posterior averaged over the variances; for the columns of the data unless it says scaled."""

    frame: ColumnScaling
    population_covariance: np.ndarray  # (p, p), around the estimates
    new_covariance: np.ndarray  # (p, p), scaled: of the coefficients of a client not seen
    population: Mixture  # (1, p, k)
    components: np.ndarray  # (draws, q q + 1), covariance between clients and noise variance
    component_weights: np.ndarray  # (draws,)
    fixed: np.ndarray  # (p - q, p - q), scaled: covariance of the fixed coefficients
    blocks: np.ndarray  # (m, q, p), scaled: of a client's random coefficients with all
    clients: Mixture  # (m, q, k), of the random coefficients

    def of_clients(self, clients):
        """The averages of some clients alone."""
        return self._replace(blocks=self.blocks[clients], clients=self.clients.of_clients(clients))

    def variances(self, x, codes):
        """Variance (n,) of x' theta for rows x (n, p) of known clients."""
        rows, q = self.frame.rows(x), self.blocks.shape[1]
        # Features of new rows may be huge: sums of infinite terms of either sign would be NaN.
        size = np.abs(rows).max(axis=1, initial=0.0)
        rows = np.divide(rows, size[:, None], out=np.zeros_like(rows), where=size[:, None] > 0)
        random, fixed = rows[:, :q], rows[:, q:]
        doubled = np.hstack([random, 2 * fixed])
        own = np.einsum("nq,nqp,np->n", random, self.blocks[codes], doubled, optimize=True)
        shared = np.einsum("nf,nf->n", fixed @ self.fixed, fixed)
        size = np.minimum(size, _LARGEST_SIZE)
        return np.maximum(own + shared, 0.0) * size**2

    def new_variances(self, x):
        """Variance (n,) of x' theta for rows x (n, p) of clients that were not seen."""
        rows = self.frame.rows(x)
        return np.einsum("np,np->n", rows @ self.new_covariance, rows)

    def coefficient_variances(self):
        """Variances (m, p) of the coefficients."""
        m, p = len(self.blocks), self.blocks.shape[2]
        result = np.empty((m, p))
        for j, row in enumerate(np.eye(p)):
            result[:, j] = self.variances(np.tile(row, (m, 1)), np.arange(m))
        return result

    def component_quantiles(self, tail):
        """Quantiles (q q + 1,) of the components."""
        order = np.argsort(self.components, axis=0)
        # Each draw stands in the middle of its weight, or medians of symmetric draws would be off.
        below = np.cumsum(self.component_weights[order], axis=0) - self.component_weights[order] / 2
        values = np.take_along_axis(self.components, order, axis=0)
        return np.array(
            [np.interp(tail, below[:, j], values[:, j]) for j in range(values.shape[1])]
        )


class LazyAverages:
    """Averages that are computed on first use.

    Parameters
    ----------
    averages : Averages or callable
        They, or the function without arguments that computes them.
    p_values : callable or None
        Computes p-values (q,) of variances of zero; those of estimates without a likelihood are 0.
    """

    def __init__(self, averages, p_values=None):
        self._averages, self._p_values = averages, p_values

    def get(self):
        """The averages."""
        if callable(self._averages):
            self._averages = self._averages()
        return self._averages

    def without_clients(self):
        """The same, but for what belongs to single clients."""
        return LazyAverages(self.get().of_clients(slice(0, 0)))

    def zero_p_values(self):
        """P-values (q,) of variances of zero."""
        if callable(self._p_values):
            self._p_values = self._p_values()
        return np.zeros(self.get().blocks.shape[1]) if self._p_values is None else self._p_values


class AveragedPosterior:
    """Posterior of clients: a mean, weighted by `share`, of the averaged and the plug-in one."""

    def __init__(self, plug_in, share, source, coefficients):
        self.plug_in, self.share, self.source = plug_in, share, source
        self.coefficients = coefficients  # (m, p)

    def of_clients(self, clients):
        """The posterior of some clients alone."""
        own = LazyAverages(self.source.get().of_clients(clients))
        plug_in = self.plug_in.of_clients(clients)
        return AveragedPosterior(plug_in, self.share, own, self.coefficients[clients])

    def variances(self, x, codes):
        """Variance (n,) of x' theta for rows x (n, p) of known clients."""
        averaged = self.source.get().variances(x, codes)
        return self._with_plug_in(averaged, lambda: self.plug_in.variances(x, codes))

    def given_population(self, x, codes):
        """Covariances (n, a, a) of x theta for x (n, a, p), were population and variances known."""
        return self.plug_in.given_population(x, codes)

    def coefficient_variances(self):
        """Variances (m, p) of the coefficients."""
        averaged = self.source.get().coefficient_variances()
        return self._with_plug_in(averaged, self.plug_in.coefficient_variances)

    def shrinkage(self):
        """Posterior over prior variance (m, p) of the coefficients, given the population's."""
        return self.plug_in.shrinkage()

    def interval(self, level):
        """Bounds (m, p) of the clients' coefficients."""
        averages = self.source.get()
        q = averages.blocks.shape[1]
        stds = np.sqrt(self.plug_in.coefficient_variances())
        own = ClientIntervals(
            averages.clients, self.share, self.coefficients[:, :q], stds[:, :q]
        ).central(level)
        m = len(self.coefficients)
        common = ClientIntervals(
            averages.population, self.share, self.coefficients[:1], stds[:1]
        ).central(level)
        # Fixed coefficients are the population's, whoever the client is.
        return tuple(
            np.hstack([random, np.repeat(fixed[:, q:], m, axis=0)])
            for random, fixed in zip(own, common, strict=True)
        )

    def _with_plug_in(self, averaged, plug_in):
        if self.share == 1:  # most tables: the plug-in need not be computed
            return averaged
        return self.share * averaged + (1 - self.share) * plug_in()


class PopulationErrors:
    """Errors of the population: averaged over the variances, the rest of `share` plug-in.

    Parameters
    ----------
    covariance : ndarray of shape (p, p)
        Of the population coefficients, given the variances: a generalized inverse, which is right
        for estimable combinations. NaN where there are no errors.
    between : ndarray of shape (p, p)
        Covariance between clients.
    averages : LazyAverages or None
    share : float
    order : ndarray of shape (p,)
        Positions of the columns of `averages` in the design.
    roots : pair of ndarrays of shape (p, rank) and (p, r), or None
        Of `covariance` and `between`. For columns at a distance D from zero, variances of
        predictors are exact to 1e-16 D by these, and to 1e-16 D^2 without them.
    is_open : ndarray of shape (p,), bool, default=None
        Which coefficients are not estimable.
    """

    def __init__(
        self, covariance, between, averages=None, share=0.0, order=None, roots=None, is_open=None
    ):
        self._covariance, self._between, self._roots = covariance, between, roots
        self.averages, self.share, self._order = averages, share, order
        self.is_open = np.zeros(len(covariance), dtype=bool) if is_open is None else is_open

    def __deepcopy__(self, memo):
        """A copy that knows nothing of single clients, so that a model may be handed out."""
        averages = self.averages
        # Averages hold means and variances of every client; the copy drops them all.
        if averages is not None:
            averages = averages.without_clients()
        return PopulationErrors(
            self._covariance.copy(),
            self._between.copy(),
            averages,
            self.share,
            self._order,
            self._roots,
            self.is_open.copy(),
        )

    @property
    def covariance(self):
        """Covariance (p, p) of the population coefficients; NaN where they are not estimable."""
        return np.where(self.is_open | self.is_open[:, None], np.nan, self._estimable_covariance)

    @property
    def _estimable_covariance(self):
        """Matrix (p, p) of which v' C v is the variance of an estimable combination v."""
        if self.averages is None:
            return self._covariance
        averaged = self._ordered(self.averages.get().population_covariance)
        # An average has no errors either where there are none: 0 * NaN is NaN.
        return self.share * averaged + (1 - self.share) * self._covariance + 0 * self._covariance

    def variances(self, x):
        """Variances (n,) of x' beta for rows x (n, p) of the population, which are estimable."""
        # Rounding may leave a small variance below 0.
        return np.maximum(np.sum((x @ self._estimable_covariance) * x, axis=1), 0.0)

    def new_variances(self, x):
        """Variances (n,) of x' theta for rows x (n, p) of clients that were not seen."""
        variances = np.zeros(len(x))
        if self.averages is not None:
            variances += self.share * self.averages.get().new_variances(x[:, self._order])
        if self.share < 1:  # the plug-in may be infinite, and 0 times that is NaN
            variances += (1 - self.share) * self._plug_in_variances(x)
        return np.maximum(variances, 0.0)

    def between_variances(self, x):
        """The same given the population: of the clients alone."""
        return np.maximum(self.between_covariances(x[:, None])[:, 0, 0], 0.0)

    def between_covariances(self, x):
        """Covariances (n, a, a) of x theta for x (n, a, p), given the population."""
        if self._roots is not None:
            effects = x @ self._roots[1]
            return effects @ effects.transpose(0, 2, 1)
        return x @ self._between @ x.transpose(0, 2, 1)

    def _plug_in_variances(self, x):
        if self._roots is not None:
            return np.sum((x @ self._roots[0]) ** 2, axis=1) + self.between_variances(x)
        # Where there is no standard error, the variance between clients is all that is known.
        spread = np.nan_to_num(self._covariance, nan=0.0, posinf=np.inf) + self._between
        if np.isinf(spread).any():  # a product would make NaN of infinity times 0
            return np.full(len(x), np.inf)
        return np.einsum("np,np->n", x @ spread, x)

    def interval(self, estimates, level):
        """Bounds (p,) of the coefficients."""
        if self.averages is None:
            return normal_bounds(estimates, np.diag(self.covariance), level)
        stds = np.sqrt(np.diag(self._covariance))
        mixture = self.averages.get().population
        at = np.argsort(self._order)
        mixture = mixture._replace(means=mixture.means[0][at], scales=mixture.scales[0][at])
        bounds = ClientIntervals(mixture, self.share, estimates, stds).central(level)
        return tuple(np.where(self.is_open, np.nan, bound) for bound in bounds)

    def component_bounds(self, level, covariance, noise):
        """Bounds (q q + 1,) around a covariance between clients (q, q) and a noise variance.

        They are quantiles, moved to the estimate where that lies outside, and 0 for a variance that
        a likelihood ratio test at 1 - level does not tell from 0. None without averages.
        """
        if self.averages is None:
            return None
        averages, estimates = self.averages.get(), np.append(covariance, noise)
        # The estimate maximizes the likelihood; it may lie outside of the posterior's quantiles.
        lower = np.minimum(averages.component_quantiles((1 - level) / 2), estimates)
        upper = np.maximum(averages.component_quantiles((1 + level) / 2), estimates)
        variances = np.arange(len(covariance)) * (len(covariance) + 1)
        # Under the prior no variance is 0, so quantiles alone would never cover a true 0.
        lower[variances[self.averages.zero_p_values() > 1 - level]] = 0.0
        return lower, upper

    def _ordered(self, matrix):
        at = np.argsort(self._order)
        return matrix[np.ix_(at, at)]


def with_averages(estimates, share, source):
    """Estimates whose errors are averaged over the variances, in a share of the whole."""
    posterior = AveragedPosterior(estimates.posterior, share, source, estimates.coefficients)
    return estimates._replace(posterior=posterior, averages=source)


class PointPosterior(NamedTuple):
    """Population and clients at one covariance, relative to the noise variance."""

    population: np.ndarray  # (p,)
    root: np.ndarray  # (p, rank), of the population's error
    deviations: np.ndarray  # (m, q)
    own: np.ndarray  # (m, q, q), covariance of the deviations, given the population
    moved: np.ndarray  # (m, q, rank), what the population's error does to random coefficients
    ratio: np.ndarray  # (q, q)


class WeightedPoints(NamedTuple):
    """Covariances over which errors are averaged; they are relative to noise variances."""

    posteriors: Any  # iterable of k PointPosteriors, in which one is held at a time
    noises: np.ndarray  # (k,)
    weights: np.ndarray  # (k,), which sum to 1
    dof: float = np.inf  # of the noise variance at a point
    larger: float = 1.0  # mean of the noise variance over that of the point


def averages_around(frame, estimates, offset, points, components, component_weights):
    """Averages around estimates that stay: their distance from each point's counts as error.

    Parameters
    ----------
    frame : ColumnScaling
    estimates : pair of ndarrays of shape (p,) and (m, q)
        Population and deviations of the clients, in the scale of the frame.
    offset : ndarray of shape (p,)
        Of the population's coefficients of the data's columns.
    points : WeightedPoints
    components, component_weights : ndarrays of shape (n, q q + 1) and (n,)
        Draws of the covariance between clients and the noise variance.
    """
    population, estimated = estimates
    back, (m, q), p, larger = frame.back, estimated.shape, len(population), points.larger
    covariance, new_covariance = np.zeros((p, p)), np.zeros((p, p))
    blocks = np.zeros((m, q, p))
    located, spread, centres, errors = [], [], [], []
    for point, noise, weight in zip(points.posteriors, points.noises, points.weights, strict=True):
        root, off = point.root, point.population - population
        covariance += weight * (larger * noise * root @ root.T + np.outer(off, off))
        new_covariance[:q, :q] += weight * larger * noise * point.ratio
        own = point.own + point.moved @ point.moved.transpose(0, 2, 1)
        blocks[:, :, :q] += weight * larger * noise * own
        blocks[:, :, q:] += weight * larger * noise * (point.moved @ root[q:].T)
        wrong = point.deviations - estimated + off[:q]
        blocks[:, :, :q] += weight * wrong[:, :, None] * wrong[:, None, :]
        blocks[:, :, q:] += weight * wrong[:, :, None] * off[q:]
        means, variances = _in_the_datas_columns(point, back)
        located.append(means + offset[:q])
        spread.append(np.sqrt(noise * variances))
        centres.append(back @ point.population + offset)
        errors.append(np.sqrt(noise * np.sum((back @ root) ** 2, axis=1)))
    new_covariance += covariance
    at = points.weights
    return Averages(
        frame,
        back @ covariance @ back.T,
        new_covariance,
        Mixture(at, np.array(centres).T[None], np.array(errors).T[None], points.dof),
        components,
        component_weights,
        covariance[q:, q:],
        blocks,
        Mixture(at, np.stack(located, axis=-1), np.stack(spread, axis=-1), points.dof),
    )


def _in_the_datas_columns(point, back):
    """Means and variances (m, q) of random coefficients of the data's columns.

    Variances are relative to the noise variance.
    """
    q = point.deviations.shape[1]
    random, fixed = back[:q, :q], back[:q, q:]
    means = (point.deviations + point.population[:q]) @ random.T
    means += fixed @ point.population[q:]
    moved = random @ point.moved + fixed @ point.root[q:]
    own = np.einsum("jq,mqr,jr->mj", random, point.own, random, optimize=True)
    return means, np.maximum(own, 0.0) + np.sum(moved**2, axis=2)
