"""Uncertainty of variances that were estimated from few clients.

An interval that takes estimated variances as known is too short where clients are few. We average
over the variances instead, with weights from the marginal likelihood and a weak prior: the share of
a row's variance that lies between clients is Beta(1/2, 1/2). With tau^2 between clients and sigma^2
within, that is a half-Cauchy distribution of tau / sigma.
"""

from typing import NamedTuple

import numpy as np
from scipy.optimize.elementwise import find_root
from scipy.special import ndtr, ndtri, stdtr, stdtrit

UNCERTAINTIES = {"full", "plug_in"}
# Clients: coverage of plug-in intervals is close to nominal at 100, and 1,000 leave no difference.
_FULL_UP_TO, _NONE_FROM = 100, 1000
# The nodes are spread around the likely ratio of the variances, between clients over within. A
# ratio of .3 sampling variances of the largest client changes no client's weight by much, so nodes
# around an estimate of 0 start there. Around 0 itself they would all be one.
LEAST_LIKELY_RATIO = 0.3
_COARSE_NODES, _NODES = 96, 57  # that find where the posterior is, and that integrate over it
_NEGLIGIBLE_NATS = 12.0  # below the maximum; what lies further has a weight of 6e-6 at most
_QUANTILE_TOLERANCE = 1e-10  # relative to the bounds between which it lies
_NORMAL_DOF = 1e3  # degrees of freedom from which Student's distribution counts as normal


def averaging_share(n_clients):
    """Weight of errors that are averaged over the variances: 1 up to 100 clients, 0 from 1,000."""
    # Plug-in errors get the rest. In between the two hardly differ, and the weight falls with the
    # logarithm of the number of clients.
    distance = np.log(_NONE_FROM / n_clients) / np.log(_NONE_FROM / _FULL_UP_TO)
    return float(np.clip(distance, 0.0, 1.0))


def blend(share, averaged, plug_in):
    """Values that count to this share, and those of the plug-in for the rest."""
    return share * averaged + (1 - share) * plug_in


class Nodes(NamedTuple):
    """Points that stand for a posterior, and their weights."""

    values: np.ndarray  # (k,)
    weights: np.ndarray  # (k,)


def ratio_nodes(log_likelihood, unit, scale):
    """Nodes for the posterior of a ratio of variances, between clients over within.

    `log_likelihood` maps ratios (k,) to restricted log-likelihoods (k,). `unit` turns the ratio
    into that of a row's variances, to which the prior applies; `scale` > 0 is a likely size of the
    ratio.
    """

    # Under the prior the angles are uniform when `unit` is 1 over the scale: no tail is cut off.
    def evaluate(angles):
        squares = np.tan(angles) ** 2
        ratios = scale * squares
        prior = np.log1p(squares) - np.log1p(unit * ratios)
        return ratios, np.nan_to_num(log_likelihood(ratios) + prior, nan=-np.inf)

    step = np.pi / 2 / _COARSE_NODES
    angles = step * (np.arange(_COARSE_NODES) + 0.5)
    value = evaluate(angles)[1]
    near = angles[value > value.max() - _NEGLIGIBLE_NATS]
    low, high = max(near[0] - step, 0.0), min(near[-1] + step, np.pi / 2)
    ratios, value = evaluate(low + (high - low) / _NODES * (np.arange(_NODES) + 0.5))
    weights = np.exp(value - value.max())
    return Nodes(ratios, weights / weights.sum())


class Mixture(NamedTuple):
    """Posteriors of clients: mixtures of Student's distributions."""

    weights: np.ndarray  # (..., k), the same for all clients
    means: np.ndarray  # (m, ..., k)
    scales: np.ndarray  # (m, ..., k)
    dof: float

    def of_clients(self, clients):
        """The posteriors of some clients alone."""
        return self._replace(means=self.means[clients], scales=self.scales[clients])

    def quantiles(self, level):
        """Quantiles (m, ...). They lie between those of the mixture's parts."""
        size = np.maximum(np.abs(self.means), np.max(self.scales, axis=-1, keepdims=True))
        scales = np.maximum(self.scales, 1e-12 * size)  # a step would have no unique quantile
        reach = ndtri(level) if self.dof >= _NORMAL_DOF else stdtrit(self.dof, level)
        parts = self.means + reach * scales
        # Rounding must not leave the root outside its bracket.
        margin = 1e-3 * np.max(scales, axis=-1)
        low, high = np.min(parts, axis=-1) - margin, np.max(parts, axis=-1) + margin
        scales = np.where(scales > 0, scales, 1.0)
        means, scales, weights = (
            np.broadcast_to(values, scales.shape).reshape(-1, scales.shape[-1])
            for values in (self.means, scales, self.weights)
        )

        def distribution(values, at):
            z = (values[:, None] - means[at]) / scales[at]
            values = ndtr(z) if self.dof >= _NORMAL_DOF else stdtr(self.dof, z)
            return np.sum(weights[at] * values, axis=1)

        return quantiles_between(distribution, low, high, level)


def quantiles_between(distribution, low, high, level):
    """Solve for quantiles between bounds `low` and `high` of any shape, one by one.

    `distribution` takes values (k,) and their positions (k,) among the flattened bounds, and
    returns the probability (k,) of smaller values.
    """
    start, width = low.ravel(), (high - low).ravel()

    def distance(share, at):
        at = at.astype(np.intp)
        return distribution(start[at] + width[at] * share, at) - level

    ends = np.zeros(len(start)), np.ones(len(start))
    shares = find_root(
        distance,
        ends,
        args=(np.arange(len(start)),),
        tolerances={"xatol": _QUANTILE_TOLERANCE, "xrtol": 0.0},
    ).x
    # Equal bounds have no root between them, and are the quantile.
    return (start + np.where(width > 0, width * shares, 0.0)).reshape(low.shape)


class ClientIntervals(NamedTuple):
    """Intervals of clients from mixtures, and for the rest of the share from normal posteriors."""

    mixture: Mixture
    share: float
    means: np.ndarray  # (m, ...)
    stds: np.ndarray  # (m, ...), of the plug-in

    def of_clients(self, clients):
        """The intervals of some clients alone."""
        mixture = self.mixture.of_clients(clients)
        return self._replace(mixture=mixture, means=self.means[clients], stds=self.stds[clients])

    def central(self, level):
        """Bounds (m, ...) of the central intervals."""
        return tuple(
            blend(self.share, self.mixture.quantiles(tail), self.means + ndtri(tail) * self.stds)
            for tail in ((1 - level) / 2, (1 + level) / 2)
        )
