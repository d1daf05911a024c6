"""Estimates of clients' means under a Gaussian prior, from exact means.

With few clients, errors are averaged over the variances that the rows leave plausible. A variance
between clients of 0 is seldom certain, but as a plug-in it gives every client the population mean
with an error near 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pfl_sklearn._client_means import select_senders
from pfl_sklearn._typing import Floats
from pfl_sklearn._variance_averaging import (
    LEAST_LIKELY_RATIO,
    ClientIntervals,
    Mixture,
    averaging_share,
    blend,
    ratio_nodes,
)
from pfl_sklearn.estimation._variance_components import (
    ClientMeans,
    Population,
    client_means,
    estimate_components,
    likelihood_in_units,
)
from pfl_sklearn.priors._prior import known_vector
from pfl_sklearn.theory import own_weight


class FittedMeans(NamedTuple):
    """Fitted population, and estimates of its clients' means."""

    prior: Any
    population: Population  # its parameters are (d,)
    table: ClientMeans  # the clients' own means
    means: Floats  # (m, d)
    variances: Floats  # (m, d), of `means`
    own_weights: Floats  # (m, d), weights on the clients' own means
    shared: bool = False  # `between` and `noise` are one number for all outputs
    responsibilities: Floats | None = None  # (m, k), of the components of a mixture
    new_variance: Floats | None = None  # (d,), of a new client's mean; None: from the others
    intervals: ClientIntervals | None = None  # None: normal, from `variances`

    def attributes(self, one_output):
        """Fitted attributes by name; arrays lose the axis of outputs where `y` has none."""
        flat = (lambda values: values[..., 0][()]) if one_output else (lambda values: values)
        # A variance that all outputs share is a number, however many outputs there are.
        number = one_output or self.shared
        population, noise = self.population, self.population.noise
        icc = _intraclass_correlation(population.between, noise)
        new_variance = self.new_variance
        if new_variance is None:  # as far from the estimated population mean as clients are
            new_variance = np.diag(self.prior.moments()[1]) + population.mean_variance
        attributes = {
            "n_samples_per_client_": self.table.n_rows,
            "means_": flat(self.means),
            "stds_": flat(np.sqrt(self.variances)),
            "local_means_": flat(self.table.means),
            "shrinkage_": flat(1 - self.own_weights),
            "prior_": self.prior,
            "noise_variance_": float(noise[0]) if number else noise.copy(),
            "population_mean_": flat(population.mean),
            "population_mean_std_": flat(np.sqrt(population.mean_variance)),
            "_new_client_std": flat(np.sqrt(new_variance)),
            "icc_": float(icc[0]) if number else icc,
            "log_likelihood_": float(population.log_likelihood),
        }
        optional = {"responsibilities_": self.responsibilities, "_intervals": self.intervals}
        return attributes | {name: value for name, value in optional.items() if value is not None}


def _intraclass_correlation(between, noise):
    """Share (d,) of a row's variance that lies between clients; 0 if the row has no variance."""
    total = between + noise
    # An infinite variance between clients leaves no share for the rows.
    finite = (total != 0) & ~np.isinf(total)
    return np.divide(between, total, out=np.isinf(total).astype(float), where=finite)


def given_population(prior, noise_variance, d):
    """Population of the parameters that the user gave, each (d,) or None."""
    return Population(
        prior.known_mean(d),
        prior.known_variances(d),
        known_vector("noise_variance", noise_variance, d, "finite and non-negative"),
    )


def exact_means(rows, sends=None):
    """ClientMeans of rows of which nothing is released; `sends` are those of some clients."""
    if sends is not None:
        rows = select_senders(rows, sends)
    ids, codes = rows.clients
    return client_means(rows.y, codes, len(ids), rows.weights)


def means_of_statistics(statistics, sends=None):
    """ClientMeans of the targets of ClientStatistics, or those of some clients."""
    sends = slice(None) if sends is None else sends
    weights, means, within, log_weights = statistics._target_means(sends)
    n_rows = statistics.n_samples_per_client[sends]
    return ClientMeans(means, weights, n_rows, within.sum(axis=0), float(log_weights.sum()))


def gaussian_from_means(reduced, sends, prior, params):
    """Estimate the population from clients that send their means, and shrink those of all."""
    table = reduced(None)
    d = table.means.shape[1]
    given_values = given_population(prior, params.noise_variance, d)
    # All clients shrink, but only participants enter the population (Remark 7, ICLR).
    senders = table if sends.all() else reduced(sends)
    blocks = _outputs_of_one_variance(given_values, prior, d)
    sent = [senders.outputs(block) for block in blocks]
    known = [given_values.outputs(block) for block in blocks]
    # If the errors of one output cannot be averaged, those of no output are.
    averaged = params.uncertainty == "full" and all(map(_leaves_doubt, sent, known))
    fits = []
    for block, statistics, values in zip(blocks, sent, known, strict=True):
        population = estimate_components(statistics, params.method, *values[:3])
        fitted = shrink_towards(population, table.outputs(block), sends, prior)
        if averaged:
            fitted = _averaged_over_variances(fitted, statistics, values, sends)
        fits.append(fitted)
    return fits[0] if len(fits) == 1 else _side_by_side(fits, table, prior)


def _outputs_of_one_variance(known, prior, d):
    """Slices of the d outputs that are estimated together, because they share their variances."""
    differ = any(values is not None and np.any(values != values[0]) for values in known[1:3])
    apart = d > 1 and (differ or prior.covariance_type == "diag")
    return [[k] for k in range(d)] if apart else [slice(None)]


def shrink_towards(population, table, sends, prior):
    """Shrink every client's exact mean towards the population.

    The population mean is independent of clients that it was not estimated from, so for them its
    variance adds to `between`. The others' own means are part of it: their weights are those of
    Theorem 1 (ICLR).
    """
    population = population.of_width(table.means.shape[1])
    mean, between, noise, mean_variance, _ = population
    sampling, sends = noise / table.weights[:, None], sends[:, None]
    # One client shows no spread between clients (NaN), and keeps its own mean.
    spread = np.where(np.isnan(between), np.inf, between)
    own_weights = own_weight(spread + np.where(sends, 0.0, mean_variance), sampling)
    # Without pooling, `mean_variance` is infinite: 0 times infinity.
    shared = (own_weights < 1) & sends
    borrowed = np.where(shared, (1 - own_weights) ** 2, 0.0) * np.where(shared, mean_variance, 0.0)
    # With `own_weights` known, the population mean is the second source of error, by its weight.
    means, variances = (
        own_weights * table.means + (1 - own_weights) * mean,
        own_weights * sampling + borrowed,
    )
    fitted = prior.with_values(mean, between)
    per_output = prior.covariance_type == "diag"
    return FittedMeans(fitted, population, table, means, variances, own_weights, not per_output)


def _leaves_doubt(senders, known):
    """Whether there are variances to average over."""
    m = len(senders.means)
    scatter = senders.within.sum() if known.noise is None else known.noise
    # One client shows no spread; without scatter the ratio of the variances is infinite.
    return averaging_share(m) > 0 and m > 1 and known.between is None and scatter != 0


def _averaged_over_variances(fitted, senders, known, sends):
    """The same estimates of d outputs that share their variances, with averaged errors.

    `senders` are the ClientMeans that the population was estimated from, `sends` (m,) the mask of
    these clients, and `known` the given parameters. An estimate's distance from the posterior
    under other variances counts as error.
    """
    d, population, share = (
        fitted.means.shape[1],
        fitted.population,
        averaging_share(len(senders[0])),
    )
    model = likelihood_in_units(senders, True, known.mean, None, known.noise)
    log_likelihood, noise_at, dof = _likelihood_of_ratio(model, known.noise)
    likely = max(
        population.between[0] / population.noise[0],
        LEAST_LIKELY_RATIO * model.inverse_weights.min(),
    )
    ratios, weights = ratio_nodes(log_likelihood, 1.0, likely)
    unit, noise = model.unit, noise_at(ratios)
    # Variance of Student's distribution over its squared scale. With 1 or 2 degrees of freedom it
    # is infinite; the floor keeps the stated error finite. Intervals use quantiles, which exist.
    inflation = dof / max(dof - 2, 1) if np.isfinite(dof) else 1.0
    centre, total, _ = model.weighted(1 / (ratios[:, None] + model.inverse_weights))
    centre = np.broadcast_to(centre, (len(ratios), d)) + model.centre
    error = noise * (0.0 if known.mean is not None else 1 / total)
    sampling, sends = 1 / fitted.table.weights[:, None, None], sends[:, None, None]
    # The population mean is independent of clients that it was not estimated from.
    around = ratios + np.where(sends, 0.0, error / noise)
    own_weights = around / (around + sampling)  # (m, 1, k)
    located = own_weights * fitted.table.means[..., None] / unit + (1 - own_weights) * centre.T
    borrowed = np.where(sends, (1 - own_weights) ** 2 * error, 0.0)
    spread = np.broadcast_to(own_weights * sampling * noise + borrowed, located.shape)
    squares = inflation * spread + (located - fitted.means[..., None] / unit) ** 2
    distance = (centre - population.mean / unit) ** 2
    of_mean = unit**2 * weights @ (inflation * error[:, None] + distance)
    of_new = unit**2 * weights @ (inflation * (ratios * noise + error)[:, None] + distance)
    posteriors = Mixture(np.tile(weights, (d, 1)), unit * located, unit * np.sqrt(spread), dof)
    plug_in = fitted.variances
    return fitted._replace(
        population=population._replace(
            mean_variance=blend(share, of_mean, population.mean_variance)
        ),
        variances=blend(share, unit**2 * squares @ weights, plug_in),
        new_variance=blend(share, of_new, population.between + population.mean_variance),
        intervals=ClientIntervals(posteriors, share, fitted.means, np.sqrt(plug_in)),
    )


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


def _side_by_side(fits, table, prior):
    """Fit to all outputs of the clients in `table`, from fits to one output each."""
    populations = [fitted.population for fitted in fits]
    joint = _joined(populations, "mean", "between", "noise", "mean_variance")
    log_likelihood = sum(population.log_likelihood for population in populations)
    joined = _joined(fits, "means", "variances", "own_weights")._replace(
        prior=prior.with_values(joint.mean, joint.between),
        population=joint._replace(log_likelihood=log_likelihood),
        table=table,
    )
    if fits[0].intervals is None:
        return joined
    intervals = [fitted.intervals for fitted in fits]
    # Outputs are the last axis but for the nodes of the mixture.
    mixtures = [interval.mixture for interval in intervals]
    mixture = _joined(mixtures, "weights", "means", "scales", axis=-2)
    return joined._replace(
        new_variance=np.concatenate([fitted.new_variance for fitted in fits]),
        intervals=_joined(intervals, "means", "stds")._replace(mixture=mixture),
    )


def _joined(records, *names, axis=-1):
    """The first record, with the named arrays of all records side by side."""
    arrays = (np.concatenate([getattr(record, name) for record in records], axis) for name in names)
    return records[0]._replace(**dict(zip(names, arrays, strict=True)))
