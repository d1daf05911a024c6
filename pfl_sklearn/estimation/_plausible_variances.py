"""Means of few clients: their posteriors averaged over the variances that the rows leave plausible.

A variance between clients of 0 is seldom certain, and a plug-in of 0 gives every client the
population mean with an error near 0. The average has the errors of all plausible variances.
"""

from typing import NamedTuple

import numpy as np

from pfl_sklearn._typing import Bools, Floats
from pfl_sklearn._variance_averaging import (
    LEAST_LIKELY_RATIO,
    Mixture,
    averaging_share,
    ratio_nodes,
)
from pfl_sklearn.estimation._variance_components import ClientMeans, likelihood_in_units


class AllClients(NamedTuple):
    """All clients, and which of them the population was estimated from."""

    table: ClientMeans
    sends: Bools  # (m,)

    def outputs(self, outputs):
        """The same for a slice of the outputs; the squares within clients are not needed."""
        return self._replace(table=self.table._replace(means=self.table.means[:, outputs]))


class AveragedMeans(NamedTuple):
    """Posterior of d outputs, averaged over the variances."""

    share: float  # of these values; the rest is that of the plug-in
    variances: Floats  # (m, d), of the clients' means
    mean_variance: Floats  # (d,), of the population mean
    new_variance: Floats  # (d,), of the mean of a client that was not seen
    mixture: Mixture  # weights (d, k), means and scales (m, d, k)


def average_over_variances(senders, known, components, clients, estimates):
    """AveragedMeans of d outputs that share their variances; None without anything to average.

    Parameters
    ----------
    senders : ClientMeans
        Of the clients that the population was estimated from.
    known : Known
        Population mean (d,), variance between clients and noise variance; None where estimated.
    components : Components
        The population with its estimates.
    clients : AllClients
    estimates : ndarray of shape (m, d)
        The clients' estimates: their distance from the posterior counts as error.
    """
    m, d = senders.means.shape
    share = averaging_share(m)
    scatter = senders.within.sum() if known.noise is None else known.noise
    # One client shows no spread; without scatter the ratio of the variances is infinite.
    if share == 0 or m < 2 or known.between is not None or scatter == 0:
        return None
    model = likelihood_in_units(senders, True, known.mean, None, known.noise)
    log_likelihood, noise_at, dof = _likelihood_of_ratio(model, known.noise)
    likely = max(
        components.between / components.noise, LEAST_LIKELY_RATIO * model.inverse_weights.min()
    )
    ratios, weights = ratio_nodes(log_likelihood, 1.0, likely)
    unit, noise = model.unit, noise_at(ratios)
    # Variance of Student's distribution over its squared scale. With 1 or 2 degrees of freedom it
    # is infinite; the floor keeps the stated error finite. Intervals use quantiles, which exist.
    inflation = dof / max(dof - 2, 1) if np.isfinite(dof) else 1.0
    centre, total, _ = model.weighted(1 / (ratios[:, None] + model.inverse_weights))
    centre = np.broadcast_to(centre, (len(ratios), d)) + model.centre
    error = noise * (0.0 if known.mean is not None else 1 / total)
    sampling = 1 / clients.table.weights[:, None, None]
    sends = clients.sends[:, None, None]
    # The population mean is independent of clients that it was not estimated from.
    around = ratios + np.where(sends, 0.0, error / noise)
    own = around / (around + sampling)  # (m, 1, k)
    located = own * clients.table.means[..., None] / unit + (1 - own) * centre.T
    borrowed = np.where(sends, (1 - own) ** 2 * error, 0.0)
    spread = np.broadcast_to(own * sampling * noise + borrowed, located.shape)
    squares = inflation * spread + (located - estimates[..., None] / unit) ** 2
    distance = (centre - components.mean / unit) ** 2
    return AveragedMeans(
        share,
        unit**2 * squares @ weights,
        unit**2 * weights @ (inflation * error[:, None] + distance),
        unit**2 * weights @ (inflation * (ratios * noise + error)[:, None] + distance),
        Mixture(np.tile(weights, (d, 1)), unit * located, unit * np.sqrt(spread), dof),
    )


def join_outputs(blocks):
    """AveragedMeans of all outputs, from those of blocks of outputs."""

    def joined(parts, names, axis):
        arrays = [np.concatenate([getattr(part, name) for part in parts], axis) for name in names]
        return parts[0]._replace(**dict(zip(names, arrays, strict=True)))

    # Outputs are the last axis but for the nodes of the mixture.
    mixture = joined([block.mixture for block in blocks], ("weights", "means", "scales"), -2)
    variances = joined(blocks, ("variances", "mean_variance", "new_variance"), -1)
    return variances._replace(mixture=mixture)


def _likelihood_of_ratio(model, noise):
    """Log-likelihood of ratios, the noise variance at each, and its degrees of freedom."""
    if noise is None:  # integrated out: what remains is Student's distribution
        return (
            lambda ratios: -0.5 * model.at_ratio(ratios)[1],
            lambda ratios: model.at_ratio(ratios)[0],
            float(model.n_free),
        )
    noise = noise / model.unit**2

    def log_likelihood(ratios):
        return -0.5 * model.of_means(noise * ratios, np.full(len(ratios), noise))

    return log_likelihood, lambda ratios: np.full(len(ratios), noise), np.inf
