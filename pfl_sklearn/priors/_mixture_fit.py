"""Normal mixtures of vectors seen with noise, fitted to their marginal likelihood.

Client i shows x_i (d,): theta_i plus normal noise of variance s_i in every coordinate (0 without
noise). Its theta_i comes from component l with probability w_l. Only the component is latent, so
the steps for means and variances maximize the likelihood of x given the responsibilities, not
that of theta.

A fit has three stages: k-means gives several starts, EM improves each of them, and quasi-Newton
steps take the best one to the maximum. EM alone needs thousands of steps when the noise is large
compared with the distances between the groups.
"""

import warnings
from copy import copy
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize
from scipy.special import softmax
from sklearn.exceptions import ConvergenceWarning

from pfl_sklearn._parallel import batch_mapper
from pfl_sklearn._typing import Floats, Integers

# Smallest variance of a component with its noise, over the clients' spread. The likelihood grows
# without bound as a component shrinks onto one client.
_VARIANCE_FLOOR = 1e-6
# The floor where clients do not differ at all; its square is still a number.
_NO_SPREAD_FLOOR = 1e-100
# Clients that the starts look at: enough to find the groups, few enough for ten starts.
_START_CLIENTS = 20_000
# Steps of k-means before EM. A start need not be a fixed point.
_LLOYD_STEPS = 10
# EM from every start: steps, and nats per client that a step must gain. It only ranks the starts.
_RANKING_EM_STEPS, _RANKING_TOLERANCE = 50, 1e-5
# EM from the best start with all clients, before the quasi-Newton steps, which go to the maximum.
_EM_STEPS, _EM_TOLERANCE = 20, 1e-8
# Of a variance step that overshoots; after them it has moved by 1 / 4,096 of its way.
_VARIANCE_HALVINGS = 12
# Summed responsibilities of a component that has lost its clients and is left as it is.
_EMPTY_COMPONENT = 1e-10
_POLISH_STEPS = 500
# Largest slope per client at the end, in units of the clients' spread.
_POLISH_TOLERANCE = 1e-7
# Weights of empty components in the logs that quasi-Newton steps move.
_LEAST_LOGGED_WEIGHT = 1e-10


class NormalMixture(NamedTuple):
    """Components. A covariance is given by eigenvalues and, if it is not diagonal, vectors."""

    means: Floats  # (k, d)
    values: Floats  # (k, d)
    vectors: Any  # (k, d, d), columns; None if all covariances are diagonal
    weights: Floats  # (k,)

    def times(self, unit):
        """The mixture of the vectors times `unit`."""
        return self._replace(means=self.means * unit, values=self.values * unit**2)

    @property
    def covariances(self):
        """Matrices (k, d, d)."""
        if self.vectors is None:
            return self.values[:, :, None] * np.eye(self.means.shape[1])
        return np.einsum("kij,kj,klj->kil", self.vectors, self.values, self.vectors)


class Shape(NamedTuple):
    """Parts of a mixture that a fit estimates."""

    covariance_type: str  # "spherical", "diag", "full", or "fixed"
    means: bool = True
    weights: bool = True

    def n_parameters(self, k, d):
        """Number of free parameters of k components in d dimensions."""
        n_variances = {"spherical": 1, "diag": d, "full": d * (d + 1) // 2, "fixed": 0}
        return k * (d * self.means + n_variances[self.covariance_type]) + (k - 1) * self.weights


class MixtureFit(NamedTuple):
    """A fitted mixture."""

    mixture: NormalMixture
    log_likelihood: float
    interior: bool  # no component lies at the floor of its variance
    converged: bool


def from_covariances(means, covariances, weights):
    """Mixture of given components (k, d), (k, d, d), (k,)."""
    diagonal = np.einsum("kdd->kd", covariances)
    if np.count_nonzero(covariances) == np.count_nonzero(diagonal):
        return NormalMixture(means, diagonal.copy(), None, weights)
    values, vectors = np.linalg.eigh(covariances)
    return NormalMixture(means, np.maximum(values, 0.0), vectors, weights)


def fit_mixture(x, s, sizes, shape, *, n_init, rng, known):
    """MixtureFit with the number k of components, of ascending `sizes`, that has the smallest BIC.

    `x` (m, d) are the clients' vectors, `s` (m,) their sampling variances, `shape` is a Shape, and
    ``known(k)`` a NormalMixture with the given parts, in which those to estimate are ignored.
    Starts use at most 20,000 clients, drawn at random. A solution with a component at the floor of
    its variance is kept only if every start ends in one.
    """
    floor = variance_floor(x, s)
    noise = noise_above_floor(s, shape, floor)

    def best_fit(k):
        start = _best_start(x, s, k, shape, floor, n_init, rng, known(k))
        fit = run_em(start, x, noise, shape, floor, _EM_STEPS, _EM_TOLERANCE)
        return polish(fit, x, noise, shape, floor)

    return least_bic(best_fit, sizes, shape, x.shape[1], len(x))


def least_bic(best_fit, sizes, shape, d, n_clients):
    """The fit of k components of a shape in d dimensions, k of ascending sizes, of smallest BIC.

    `best_fit` makes one from k. Clients, not rows, are what components are learned from.
    """
    fits: list[tuple[float, int, Any]] = []
    for k in sizes:
        fit = best_fit(k)
        size = shape.n_parameters(k, d) * np.log(n_clients)
        fits.append((size - 2 * fit.log_likelihood, k, fit))
        _, best_k, best = min(fits, key=itemgetter(0))
        # One more component may have to split a group before the next one gains.
        if k >= best_k + 2:
            break
    return best


def weight_order(means: Floats, weights: Floats) -> Integers:
    """Order of components: heaviest first, ties by first coordinate."""
    return np.lexsort((means[:, 0], -weights))


def heaviest_first(mixture: NormalMixture) -> NormalMixture:
    """The same components in the order of their weights, so that labels do not depend on starts."""
    order = weight_order(mixture.means, mixture.weights)
    parts: Any = (None if part is None else part[order] for part in mixture)
    return NormalMixture(*parts)


def variance_floor(x, s):
    """Smallest variance of a component. With the noise it is a millionth of the clients' spread."""
    spread = float(np.mean(np.var(x, axis=0)))
    return max(_VARIANCE_FLOOR * spread - float(s.min()), 0.0) if spread > 0 else _NO_SPREAD_FLOOR


def noise_above_floor(s, shape, floor):
    """Sampling variances (m,), or (1,) if all are equal, which is faster."""
    # If the components' variances are fixed, the floor applies to the noise instead.
    s = s[:1] if np.ptp(s) == 0 else s
    return np.maximum(s, floor) if shape.covariance_type == "fixed" else s


def _best_start(x, s, k, shape, floor, n_init, rng, known):
    """Mixture after a few steps on some clients from the best of `n_init` starts."""
    subset = slice(None)
    if len(x) > _START_CLIENTS:
        subset = rng.choice(len(x), _START_CLIENTS, replace=False)
    x, noise = x[subset], noise_above_floor(s[subset], shape, floor)
    fits = []
    for attempt in range(n_init if shape.means else 1):  # given means leave nothing to draw
        start = _starting_mixture(x, noise, k, shape, floor, rng, known, attempt % 2 == 1)
        fits.append(run_em(start, x, noise, shape, floor, _RANKING_EM_STEPS, _RANKING_TOLERANCE))
    # The likelihood of a component at the floor is as large as the floor is small.
    return max(fits, key=lambda fit: (fit.interior, fit.log_likelihood)).mixture


def _starting_mixture(x, s, k, shape, floor, rng, known, projected):
    """Components from k-means on the clients, or on their leading directions."""
    d = x.shape[1]
    spread = np.mean(np.var(x, axis=0))
    # Some of the clients may be alike, and without noise.
    precision = np.broadcast_to(1 / (s + spread + 1e-300), len(x))
    if shape.means:
        # Noise in many directions hides groups that the leading ones show.
        space = leading_coordinates(x, k) if projected and k < d else x
        labels = k_means(space, k, rng, weights=precision, n_steps=_LLOYD_STEPS)[1]
        means = cluster_means(x, labels, precision, np.tile(x.mean(axis=0), (k, 1)))
    else:
        means = known.means
        labels = nearest_centre(x, means)
    weights = np.full(k, 1 / k) if shape.weights else known.weights
    if shape.covariance_type == "fixed":
        return NormalMixture(means, known.values, known.vectors, weights)
    within = np.mean((x - means[labels]) ** 2, axis=0) - s.mean()
    # A full covariance would stay at 0: the step with theta latent is proportional to it.
    value = max(within.mean(), 0.01 * spread, floor)
    vectors = np.broadcast_to(np.eye(d), (k, d, d)) if shape.covariance_type == "full" else None
    return NormalMixture(means, np.full((k, d), value), vectors, weights)


def leading_coordinates(x, k):
    """Coordinates (m, k) of the clients in the directions of largest spread."""
    centred = x - x.mean(axis=0)
    return centred @ np.linalg.eigh(centred.T @ centred)[1][:, -k:]


def k_means(x, k, rng, *, weights=None, n_init=1, n_steps=300):
    """Weighted means (k, d) and labels (m,) of the clusters with the least squares."""
    # Rows that differ only by rounding may share a cluster and leave another one empty.
    # Slow to import, and nothing but a fit of a mixture needs it.
    from sklearn.cluster import KMeans

    clusters = KMeans(k, n_init=n_init, max_iter=n_steps, tol=0.0, random_state=rng)
    with batch_mapper(), warnings.catch_warnings():  # on one thread: sums depend on how many
        warnings.simplefilter("ignore", ConvergenceWarning)  # of empty clusters
        clusters.fit(x, sample_weight=weights)
    labels = clusters.labels_
    weights = np.ones(len(x)) if weights is None else weights
    return cluster_means(x, labels, weights, clusters.cluster_centers_), labels


def nearest_centre(x, centres):
    """Index (m,) of the nearest of `centres` (k, d), the first on a tie."""
    squares = [np.einsum("md,md->m", x - centre, x - centre) for centre in centres]
    return np.argmin(squares, axis=0)


def cluster_means(x, labels, weights, empty):
    """Weighted means (k, d) of the clusters; rows of `empty` (k, d) for those without members."""
    k = len(empty)
    totals = np.bincount(labels, weights=weights, minlength=k)[:, None]
    sums = np.stack([np.bincount(labels, weights * column, k) for column in x.T], axis=1)
    return np.divide(sums, totals, out=np.array(empty, dtype=float), where=totals > 0)


def e_step(mixture, x, s):
    """Responsibilities (k, m) and the log-likelihood."""
    rows, ones = [], np.ones(x.shape[1])
    for k in range(len(mixture.weights)):
        z, total = component_coordinates(mixture, k, x), mixture.values[k] + s[:, None]
        rows.append(-0.5 * ((z**2 / total) @ ones + np.log(2 * np.pi * total) @ ones))
    with np.errstate(divide="ignore"):  # a weight of 0
        joint = np.stack(rows) + np.log(mixture.weights)[:, None]
    largest = joint.max(axis=0)
    shares = np.exp(joint - largest)
    totals = shares.sum(axis=0)
    return shares / totals, float(np.sum(largest + np.log(totals)))


def m_step(mixture, r, x, s, shape, floor):
    """Components that raise the expected log-likelihood under responsibilities `r`."""
    counts = r.sum(axis=1)
    means, values, vectors = map(copy, mixture[:3])
    for k in np.flatnonzero(counts > _EMPTY_COMPONENT):
        if shape.means:  # before the variances: their step measures from the new mean
            means[k] = _weighted_mean(mixture, k, r[k], x, s)
        deviations = x - means[k]
        if shape.covariance_type == "full":
            values[k], vectors[k] = _full_step(values[k], vectors[k], r[k], deviations, s, floor)
        elif shape.covariance_type != "fixed":
            shared = shape.covariance_type == "spherical"
            values[k] = _variance_step(values[k], r[k], deviations**2, s, floor, shared)
    weights = counts / len(x) if shape.weights else mixture.weights
    return NormalMixture(means, values, vectors, weights)


def run_em(mixture, x, s, shape, floor, n_steps, tolerance):
    """Fit after EM, which ends when a step gains less than `tolerance` nats per client."""
    r, value = e_step(mixture, x, s)
    converged = False
    for _ in range(n_steps):
        mixture = m_step(mixture, r, x, s, shape, floor)
        r, new = e_step(mixture, x, s)
        converged = new - value < tolerance * len(x)
        value = new
        if converged:
            break
    return MixtureFit(mixture, value, is_interior(mixture, shape, floor), converged)


def is_interior(mixture, shape, floor):
    """Whether no component lies at the floor of its variance."""
    if shape.covariance_type == "fixed" or floor == 0:  # the noise alone is above the floor
        return True
    return bool(mixture.values.min() > floor * (1 + 1e-6))


def component_coordinates(mixture, k, x):
    """Deviations (m, d) from component k, in its own directions."""
    deviations = x - mixture.means[k]
    return deviations if mixture.vectors is None else deviations @ mixture.vectors[k]


def _weighted_mean(mixture, k, r, x, s):
    """Mean (d,) that maximizes the likelihood, coordinate by coordinate in the component's axes."""
    precision = r[:, None] / (mixture.values[k] + s[:, None])
    z = component_coordinates(mixture, k, x)
    shift = np.einsum("md,md->d", precision, z) / np.einsum("md->d", precision)
    return mixture.means[k] + (shift if mixture.vectors is None else mixture.vectors[k] @ shift)


def expected_log_likelihood(values, r, squares, s):
    """Expected log-likelihood of a component with these variances, up to a constant."""
    total = values + s[:, None]
    scaled = r @ (squares / total)
    return -0.5 * float(np.sum(scaled) + np.sum(r @ np.broadcast_to(np.log(total), squares.shape)))


def _variance_step(values, r, squares, s, floor, shared):
    """Fisher scoring for the variances (d,) of a component, halved until the likelihood rises."""
    weight = r[:, None] / (values + s[:, None]) ** 2
    above = np.einsum("md,md->d", weight, squares - s[:, None])
    total = np.einsum("md->d", weight)
    if shared:  # spherical
        above, total = np.full_like(above, above.sum()), np.full_like(total, total.sum())
    target = np.maximum(above / total, floor)
    current = expected_log_likelihood(values, r, squares, s)
    for _ in range(_VARIANCE_HALVINGS):
        if expected_log_likelihood(target, r, squares, s) >= current:
            return target
        target = (target + values) / 2
    return values


def _full_step(values, vectors, r, deviations, s, floor):
    """Covariance (eigenvalues and vectors) of a component: the better of two steps."""
    # Subtracting the noise from the scatter is exact if all clients have the same noise. The other
    # step, with theta latent, never lowers the likelihood.
    z = deviations @ vectors
    own_weights = values / (values + s[:, None])
    seen = np.einsum("md,me->de", r[:, None] * own_weights * z, own_weights * z)
    latent = seen + np.diag(r @ np.broadcast_to(own_weights * s[:, None], z.shape))
    precisions = r / (values.mean() + s) ** 2
    scatter = np.einsum("md,me->de", precisions[:, None] * z, z) / precisions.sum()
    candidates = [
        latent / r.sum(),
        scatter - np.eye(len(values)) * np.sum(precisions * s) / precisions.sum(),
    ]
    steps = []
    for candidate in candidates:
        new, turned = np.linalg.eigh(candidate)
        new = np.maximum(new, floor)
        steps.append((expected_log_likelihood(new, r, (z @ turned) ** 2, s), new, vectors @ turned))
    return max(steps, key=itemgetter(0))[1:]


def polish(start, x, s, shape, floor):
    """Mixture at the maximum that quasi-Newton steps reach from `start` (a MixtureFit)."""
    # The clients' spread, or the noise if they are all alike.
    scale = float(np.mean(np.var(x, axis=0))) or float(np.mean(s)) or 1.0
    centre, unit = x.mean(axis=0), np.sqrt(scale)
    model = _Coordinates(start.mixture, shape, floor / scale, centre, unit)
    if not model.size:
        return start
    z, noise = (x - centre) / unit, s / scale

    def negative(point):
        mixture = model.mixture(point)
        r, value = e_step(mixture, z, noise)
        return -value / len(x), -model.slope(point, mixture, r, z, noise) / len(x)

    optimum = minimize(
        negative,
        model.start,
        jac=True,
        method="L-BFGS-B",
        bounds=model.bounds,
        options={"maxiter": _POLISH_STEPS, "gtol": _POLISH_TOLERANCE, "ftol": 1e-14, "maxcor": 20},
    )
    inside = model.mixture(optimum.x)
    mixture = inside._replace(means=centre + unit * inside.means, values=inside.values * scale)
    value = e_step(mixture, x, s)[1]
    converged = optimum.nit < _POLISH_STEPS
    if not value >= start.log_likelihood:  # by rounding, or NaN
        return start._replace(converged=converged)
    return MixtureFit(mixture, value, is_interior(mixture, shape, floor), converged)


class _Coordinates:
    """The estimated parts of a mixture as one vector: means, spreads, log weights.

    The vector is centred at the clients' mean, in units of their spread. Variances are bounded
    below by the floor; a full covariance is the floor plus the square of a matrix.
    """

    def __init__(self, mixture, shape, floor, centre, unit):
        self.shape, self.floor = shape, floor
        values = mixture.values / unit**2
        self.given = mixture._replace(means=(mixture.means - centre) / unit, values=values)
        log_weights = np.log(np.maximum(mixture.weights, _LEAST_LOGGED_WEIGHT))
        self.parts = [self.given.means, self._spread(values, mixture.vectors), log_weights]
        # One weight is 1.
        estimated = [shape.means, True, shape.weights and len(log_weights) > 1]
        sizes = [part.size for part in self.parts]
        self.estimated = np.repeat(estimated, sizes)
        self.whole = np.concatenate([part.ravel() for part in self.parts])
        self.start = self.whole[self.estimated]
        self.size = len(self.start)
        low = floor if shape.covariance_type in ("spherical", "diag") else None
        bounds = np.repeat(np.array([None, low, None]), sizes)[self.estimated]
        self.bounds = [(least, None) for least in bounds]

    def mixture(self, point):
        """The mixture at a point."""
        means, spread, log_weights = self._split(point)
        values, vectors = self.given.values, self.given.vectors
        if self.shape.covariance_type == "full":
            values, vectors = np.linalg.eigh(spread @ spread.transpose(0, 2, 1))
            values = np.maximum(values, 0.0) + self.floor
        elif self.shape.covariance_type != "fixed":
            values = np.broadcast_to(spread, values.shape)
        # Given ones may be 0, which has no log.
        weights = softmax(log_weights) if self.shape.weights else self.given.weights
        return NormalMixture(means, values, vectors, weights)

    def slope(self, point, mixture, r, x, s):
        """Gradient of the log-likelihood, by the responsibilities (k, m)."""
        means, spread, _ = self._split(point)
        by_means, by_spread, counts = np.zeros_like(means), np.zeros_like(spread), r.sum(axis=1)
        for k in range(len(counts)):
            precision = 1 / (mixture.values[k] + s[:, None])
            pull = component_coordinates(mixture, k, x) * precision
            along = r[k] @ pull
            by_means[k] = along if mixture.vectors is None else mixture.vectors[k] @ along
            if spread.size:
                by_spread[k] = self._spread_slope(spread[k], mixture, k, r[k], pull, precision)
        by_weights = counts - counts.sum() * mixture.weights
        slopes = np.concatenate([by_means.ravel(), by_spread.ravel(), by_weights])
        return slopes[self.estimated]

    def _spread_slope(self, spread, mixture, k, r, pull, precision):
        """Gradient by the spread parameters of component k."""
        summed = r @ np.broadcast_to(precision, pull.shape)
        if self.shape.covariance_type == "full":
            inner = np.einsum("md,me->de", r[:, None] * pull, pull) - np.diag(summed)
            vectors = mixture.vectors[k]
            return vectors @ inner @ vectors.T @ spread
        slopes = 0.5 * (r @ pull**2 - summed)
        return slopes.sum() if self.shape.covariance_type == "spherical" else slopes

    def _spread(self, values, vectors):
        """Starting spread: (k, 1), (k, d), roots (k, d, d), or (k, 0) if covariances are given."""
        kind = self.shape.covariance_type
        if kind == "full":
            return vectors * np.sqrt(np.maximum(values - self.floor, 0.0))[:, None, :]
        width = {"fixed": 0, "spherical": 1, "diag": values.shape[1]}[kind]
        return np.maximum(values, self.floor)[:, :width]

    def _split(self, point):
        """Means, spread and log weights at a point, in their shapes."""
        whole = self.whole.copy()
        whole[self.estimated] = point
        parts = np.split(whole, np.cumsum([part.size for part in self.parts])[:-1])
        return [values.reshape(part.shape) for values, part in zip(parts, self.parts, strict=True)]
