"""Means of few clients: their posteriors averaged over the variances."""

from typing import NamedTuple

import numpy as np

from pfl_sklearn._variance_averaging import Mixture, averaging_share, ratio_nodes
from pfl_sklearn.estimation._variance_components import ClientMeans, profile_in_units

_SMALL = 0.3  # ratio, in sampling variances of the largest client, below which it is as good as 0


class Everyone(NamedTuple):
    """All clients, and which of them the population was estimated from."""

    table: ClientMeans
    sends: np.ndarray  # (m,)

    def outputs(self, at):
        """The same for some of the outputs."""
        return self._replace(table=self.table._replace(means=self.table.means[:, at]))


class AveragedMeans(NamedTuple):
    """Posterior of d outputs, averaged over the variances."""

    share: float  # of these values; the rest is that of the plug-in
    variances: np.ndarray  # (m, d), of the clients' means
    mean_variance: np.ndarray  # (d,), of the population mean
    new_variance: np.ndarray  # (d,), of the mean of a client that was not seen
    mixture: Mixture  # weights (d, k), means and scales (m, d, k)

    def beside(self, name, plug_in):
        """Share of a field's values, beside those of the plug-in."""
        return self.share * getattr(self, name) + (1 - self.share) * plug_in


def average_over_variances(table, known, found, everyone, estimates):
    """AveragedMeans of d outputs that share their variances; None without anything to average.

    Parameters
    ----------
    table : ClientMeans
        Of the clients that the population was estimated from.
    known : tuple
        Population mean (d,), variance between clients and noise variance; None where estimated.
    found : Components
        The population with its estimates.
    everyone : Everyone
    estimates : ndarray of shape (m, d)
        The clients' estimates: their distance from the posterior counts as error.
    """
    (m, d), (known_mean, known_between, known_noise) = table.means.shape, known
    share = averaging_share(m)
    scatter = table.within.sum() if known_noise is None else known_noise
    if share == 0 or m < 2 or known_between is not None or scatter == 0:
        return None
    model, unit = profile_in_units(table, known_mean, known_noise)
    likelihood, scale, dof = _likelihood(model, known_noise, unit)
    likely = max(found.between / found.noise, _SMALL * model.unit.min())
    ratios, weights = ratio_nodes(likelihood, 1.0, likely)
    scale, larger = scale(ratios), dof / max(dof - 2, 1) if np.isfinite(dof) else 1.0
    centre, total, _ = model.weighted(1 / (ratios[:, None] + model.unit))
    centre = np.broadcast_to(centre, (len(ratios), d)) + model.centre
    error = scale * (0.0 if known_mean is not None else 1 / total)
    sampling, sends = 1 / everyone.table.weights[:, None, None], everyone.sends[:, None, None]
    around = ratios + np.where(sends, 0.0, error / scale)  # the centre is independent of the rest
    own = around / (around + sampling)  # (m, 1, k)
    located = own * everyone.table.means[..., None] / unit + (1 - own) * centre.T
    borrowed = np.where(sends, (1 - own) ** 2 * error, 0.0)
    spread = np.broadcast_to(own * sampling * scale + borrowed, located.shape)
    squares = larger * spread + (located - estimates[..., None] / unit) ** 2
    off = (centre - found.mean / unit) ** 2
    return AveragedMeans(
        share,
        unit**2 * squares @ weights,
        unit**2 * weights @ (larger * error[:, None] + off),
        unit**2 * weights @ (larger * (ratios * scale + error)[:, None] + off),
        Mixture(np.tile(weights, (d, 1)), unit * located, unit * np.sqrt(spread), dof),
    )


def joined(parts):
    """AveragedMeans of all outputs, from those of its blocks."""
    if len(parts) == 1:
        return parts[0]
    mixtures = [part.mixture for part in parts]
    mixture = Mixture(
        np.concatenate([part.weights for part in mixtures]),
        np.concatenate([part.means for part in mixtures], axis=1),
        np.concatenate([part.scales for part in mixtures], axis=1),
        mixtures[0].dof,
    )
    names = "variances", "mean_variance", "new_variance"
    values = [np.concatenate([getattr(part, name) for part in parts], axis=-1) for name in names]
    return AveragedMeans(parts[0].share, *values, mixture)


def _likelihood(model, noise, unit):
    """Log-likelihood of ratios, their noise variance, and its degrees of freedom."""
    if noise is None:
        found = model.at_ratio
        return lambda r: -0.5 * found(r)[1], lambda r: found(r)[0], float(model.n_free)
    noise = noise / unit**2

    def likelihood(ratios):
        return -0.5 * model.of_means(noise * ratios, np.full(len(ratios), noise))

    return likelihood, lambda ratios: np.full(len(ratios), noise), np.inf
