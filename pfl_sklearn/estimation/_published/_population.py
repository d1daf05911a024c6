"""Means of clients given noised means alone, averaged over the plausible populations.

Client i has n_i rows with variance sigma^2 around theta_i ~ N(mu, tau^2), and its mean is released
with Laplace noise. With noise as large as the spread, estimates of mu, tau and sigma say little:
intervals that take them as known cover half of what they should. So we average over all three, with
uniform priors in what the public bounds allow: mu between them, tau and sigma up to half their
distance. Where the numbers of rows have noise, too, we average over those as well.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.polynomial.legendre import leggauss
from scipy.special import logsumexp, ndtr, softmax

from pfl_sklearn.estimation._published._noisy_normal import distribution, log_density, moments

_N_SIGMAS, _N_TAUS, _N_MEANS = 9, 11, 9  # nodes of each parameter given those before it
_FINE, _NEGLIGIBLE = 2000, 1e-3  # points of a scan for sigma; weight of a node over the largest
_NATS, _ROUNDS, _MOST_CENTRING = 9.0, 6, 20  # below the maximum; scans for tau; steps to a mode
_ENOUGH = 6  # of the nodes of tau that are not negligible
_REACH = 5.0  # standard errors around the mode of mu
_LEAST_SPREAD = 1e-7  # over the distance of the bounds; a spread of 0 has no density
_CENTRED = 0.05  # standard errors of the last step to a mode
_BISECTIONS = 16  # of a bracket of some 13 standard deviations, to 2e-4 of one
_CELLS_AT_ONCE = 1 << 18  # clients times populations: 2 MB an array


class ReleasedSquares(NamedTuple):
    """Released sum of squares of rows around their clients' means."""

    value: float
    scale: float  # of its Laplace noise
    dof: float  # rows less clients
    dof_variance: float = 0.0  # where the numbers of rows have noise


class PlausibleSizes(NamedTuple):
    """Numbers of rows that m clients may have, given noised ones; and their noised sums."""

    sums: np.ndarray  # (m,), of distances from the middle of the bounds
    scale: float  # of the Laplace noise of a sum
    values: np.ndarray  # (k, m), above 0
    log_weights: np.ndarray  # (k, m)


class ReleasedMeans(NamedTuple):
    """Released means of m clients, and what is public."""

    means: np.ndarray  # (m,), with noise
    scales: np.ndarray  # (m,), of the Laplace noise
    n_rows: np.ndarray  # (m,)
    bounds: tuple  # of a row
    squares: ReleasedSquares | None  # None: that variance is known, or not identifiable
    sizes: PlausibleSizes | None = None  # None: `n_rows` is public

    def of_clients(self, clients):
        """The release of some clients alone."""
        means, scales, n_rows = (values[clients] for values in self[:3])
        sizes = self.sizes
        if sizes is not None:
            sums, values, log_weights = (
                values[..., clients] for values in (sizes.sums, sizes.values, sizes.log_weights)
            )
            sizes = PlausibleSizes(sums, sizes.scale, values, log_weights)
        return self._replace(means=means, scales=scales, n_rows=n_rows, sizes=sizes)

    def by_size(self):
        """The release as one of k m clients, each of m with its k plausible sizes."""
        if self.sizes is None:
            return self
        sums, scale, sizes, _ = self.sizes
        means = (sum(self.bounds) / 2 + sums / sizes).ravel()
        return self._replace(means=means, scales=(scale / sizes).ravel(), n_rows=sizes.ravel())

    def weights_of_sizes(self, log_densities):
        """Log densities (t, m) of clients, and weights (t, k, m) of their sizes, of (t, k m)."""
        if self.sizes is None:
            return log_densities, 1.0
        k, m = self.sizes.values.shape
        # Of sums, whose densities are those of means over the number of rows.
        known = self.sizes.log_weights - np.log(self.sizes.values)
        fits = log_densities.reshape(-1, k, m) + known
        return logsumexp(fits, axis=1), softmax(fits, axis=1)

    def over_sizes(self, weights, values):
        """Averages (t, m) of values (t, k m) of clients by size."""
        if self.sizes is None:
            return values
        return np.sum(weights * values.reshape(weights.shape), axis=1)


class KnownPopulation(NamedTuple):
    """Parameters that the user gave; None: unknown."""

    mean: Any
    between: Any  # variance of the clients' means
    noise: Any  # variance of a row


class PopulationNodes(NamedTuple):
    """Populations that stand for their posterior, and their weights."""

    means: np.ndarray  # (k,)
    taus: np.ndarray  # (k,)
    sigmas: np.ndarray  # (k,)
    weights: np.ndarray  # (k,)
    log_likelihood: float  # the largest


def plausible_populations(released, known):
    """PopulationNodes for ReleasedMeans and a KnownPopulation."""
    nodes = []
    for sigma in _sigmas(released, known):
        taus, width = _taus(released, known, sigma)
        means, widths = _means(released, known, _spreads(released, taus, sigma))  # (t, k)
        taus, means = np.repeat(taus, means.shape[1]), means.ravel()
        fits = _log_likelihoods(released, means, taus, sigma)
        sigmas, weights = np.full(len(taus), sigma), fits + np.log(width * widths.ravel())
        nodes.append((means, taus, sigmas, fits, weights))
    means, taus, sigmas, fits, weights = np.concatenate(nodes, axis=1)
    weights = np.exp(weights - weights.max())
    kept = weights > _NEGLIGIBLE
    weights = weights[kept] / weights[kept].sum()
    return PopulationNodes(means[kept], taus[kept], sigmas[kept], weights, float(fits.max()))


def _sigmas(released, known):
    """Standard deviations (k,) of a row, equally likely by the released squares."""
    low, high = released.bounds
    if known.noise is not None:
        return [np.sqrt(known.noise)]
    if released.squares is None:  # it is part of the spread of means of one row
        return [0.0]
    value, scale, dof, dof_variance = released.squares
    start, end = 0.0, (high - low) / 2
    for _ in range(2):  # once to find where, and once to look closer
        points = start + (end - start) * (np.arange(_FINE) + 0.5) / _FINE
        # Sums of squares are nearly normal where their noise does not hide their distribution.
        squares = points**2 * dof
        width = points**2 * np.sqrt(2 * dof + dof_variance)
        density = log_density(value - squares, width, scale).total
        weights = np.exp(density - density.max())
        likely = np.flatnonzero(weights > _NEGLIGIBLE)
        step = (end - start) / _FINE
        start = max(points[likely[0]] - step, 0.0)
        end = min(points[likely[-1]] + step, (high - low) / 2)
    shares = np.cumsum(weights) / weights.sum()
    return np.interp((np.arange(_N_SIGMAS) + 0.5) / _N_SIGMAS, shares, points)


def _taus(released, known, sigma):
    """Standard deviations (t,) between clients that are plausible beside `sigma`; their width."""
    if known.between is not None:
        return np.array([np.sqrt(known.between)]), 1.0
    start, end = 0.0, (released.bounds[1] - released.bounds[0]) / 2
    for _ in range(_ROUNDS):
        width = (end - start) / _N_TAUS
        taus = start + width * (np.arange(_N_TAUS) + 0.5)
        spreads = _spreads(released, taus, sigma)
        means, errors = _modes(released, known, spreads)
        # Integrated over mu as if it were normal there.
        heights = _log_likelihoods(released, means, taus, sigma) + np.log(errors)
        likely = np.flatnonzero(heights > heights.max() - _NATS)
        if len(likely) >= _ENOUGH:
            break
        start, end = max(taus[likely[0]] - width, start), min(taus[likely[-1]] + width, end)
    return taus[likely], width


def _spreads(released, taus, sigmas):
    """Standard deviations (t, m) of the clients' exact means around the population's."""
    least = _LEAST_SPREAD * (released.bounds[1] - released.bounds[0])
    taus, sigmas = np.reshape(taus, (-1, 1)), np.reshape(sigmas, (-1, 1))
    return np.sqrt(taus**2 + sigmas**2 / released.n_rows + least**2)


def _log_likelihoods(released, means, taus, sigma):
    """Log-likelihoods (t,) of population means (t,) and spreads (t,) beside `sigma`."""
    clients, blocks = released.by_size(), []
    step = max(_CELLS_AT_ONCE // len(clients.means), 1)
    for part in (slice(start, start + step) for start in range(0, len(means), step)):
        distances = clients.means - means[part, None]
        spreads = _spreads(clients, taus[part], sigma)
        densities = log_density(distances, spreads, clients.scales).total
        blocks.append(released.weights_of_sizes(densities)[0].sum(axis=1))
    return np.concatenate(blocks)


def _modes(released, known, spreads):
    """Most likely population means (t,), and standard errors of that size."""
    # The likelihood is log-concave in mu, so each maximum is the only one. Its curvature there is
    # no measure of the error: between Laplace variables it has sharp bends.
    information = np.sum(1 / (spreads**2 + released.scales**2), axis=1)
    errors = 1 / np.sqrt(information)
    if known.mean is not None:
        return np.full(len(spreads), known.mean), errors
    weights = 1 / (spreads**2 + 2 * released.scales**2)
    means = np.clip(weights @ released.means / weights.sum(axis=1), *released.bounds)
    for _ in range(_MOST_CENTRING):
        expected, _, _ = moments(released.means - means[:, None], spreads, released.scales)
        steps = np.sum(expected / spreads**2, axis=1) / information
        means, before = np.clip(means + steps, *released.bounds), means
        if np.all(np.abs(means - before) < _CENTRED * errors):
            break
    return means, errors


def _means(released, known, spreads):
    """Nodes (t, k) of the population mean, and their widths."""
    means, errors = _modes(released, known, spreads)
    if known.mean is not None:
        return means[:, None], np.ones((len(means), 1))
    low = np.maximum(released.bounds[0], means - _REACH * errors)[:, None]
    high = np.minimum(released.bounds[1], means + _REACH * errors)[:, None]
    points, widths = leggauss(_N_MEANS)
    return (low + high) / 2 + (high - low) / 2 * points, (high - low) / 2 * widths


class PublishedPosterior(NamedTuple):
    """Posterior of every client's mean; all of it follows from noised values."""

    released: ReleasedMeans
    nodes: PopulationNodes
    of_table: bool  # whether it is of the means of the rows that are there, or of theta

    def of_clients(self, clients):
        """The posterior of some clients alone."""
        return self._replace(released=self.released.of_clients(clients))

    def moments(self):
        """Means, standard deviations, and average weights of the population, each (m,)."""
        return self._by_clients(lambda part: part._moments())

    def central(self, level):
        """Bounds (m,) of the central intervals."""
        tails = (1 - level) / 2, (1 + level) / 2
        return self._by_clients(lambda part: [part._quantiles(tail) for tail in tails])

    def _by_clients(self, values_of):
        """Arrays (m,) of a function of the posterior, for blocks of clients."""
        m, k = len(self.released.means), len(self.nodes.weights)
        if self.released.sizes is not None:
            k *= len(self.released.sizes.values)
        step = max(_CELLS_AT_ONCE // k, 1)
        blocks = []
        for part in (slice(start, start + step) for start in range(0, m, step)):
            blocks.append(values_of(self.of_clients(part)))
        return tuple(np.concatenate(values) for values in zip(*blocks, strict=True))

    def _moments(self):
        means, variances, shares, of_sizes = self._by_node()
        weights, over_sizes = self.nodes.weights, partial(self.released.over_sizes, of_sizes)
        by_node = over_sizes(means)
        spread = over_sizes((means - self._for_sizes(by_node)) ** 2)
        variances, shares = over_sizes(variances) + spread, over_sizes(shares)
        mean = weights @ by_node
        return mean, np.sqrt(weights @ (variances + (by_node - mean) ** 2)), weights @ shares

    def _by_node(self):
        """Means, variances, shares of the population (t, k m) by population; weights of sizes."""
        clients, centre = self.released.by_size(), self.nodes.means[:, None]
        spreads = _spreads(clients, self.nodes.taus, self.nodes.sigmas)
        deviations, variances, density = moments(clients.means - centre, spreads, clients.scales)
        of_sizes = self.released.weights_of_sizes(density)[1]
        shares = 2 * clients.scales**2 / (spreads**2 + 2 * clients.scales**2)
        if not self.of_table:
            # theta given the exact mean has a share `own` of its deviation, and a variance.
            between = self.nodes.taus[:, None] ** 2
            own = between / spreads**2
            least = (_LEAST_SPREAD * (clients.bounds[1] - clients.bounds[0])) ** 2
            variances = np.maximum(between * (1 - own) + own**2 * variances, least)
            deviations, shares = own * deviations, 1 - own * (1 - shares)
        return centre + deviations, variances, shares, of_sizes

    def _for_sizes(self, values):
        """Values (..., k m) for clients by size, of values (..., m) of clients."""
        sizes = self.released.sizes
        return values if sizes is None else np.concatenate([values] * len(sizes.values), axis=-1)

    def _quantiles(self, tail):
        """Quantiles (m,) of the clients' posteriors, by bisection."""
        mean, std, _ = self._moments()
        # Chebyshev: no more than 1 / reach^2 lies beyond.
        reach = 1.5 * std / np.sqrt(min(tail, 1 - tail))
        low, high = mean - reach, mean + reach
        probability = self._distribution()
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            is_low = self.nodes.weights @ probability(middle) < tail
            low, high = np.where(is_low, middle, low), np.where(is_low, high, middle)
        return (low + high) / 2

    def _distribution(self):
        """Function of t (m,): probabilities (k, m) of values up to t in each of the populations."""
        released = self.released
        if self.of_table:  # whose sizes are public
            spreads = _spreads(released, self.nodes.taus, self.nodes.sigmas)
            centre = self.nodes.means[:, None]
            of_sum = released.means - centre
            return lambda t: distribution(t - centre, of_sum, spreads, released.scales)
        means, variances, _, of_sizes = self._by_node()  # theta is nearly normal in each population
        stds = np.sqrt(variances)
        return lambda t: released.over_sizes(of_sizes, ndtr((self._for_sizes(t) - means) / stds))
