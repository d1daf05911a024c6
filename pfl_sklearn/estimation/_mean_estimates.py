"""Clients' means from known or estimated variances, or from what the others released."""

import math
from typing import NamedTuple

import numpy as np

from pfl_sklearn.estimation._gaussian_release import Known
from pfl_sklearn.estimation._variance_components import estimate_components
from pfl_sklearn.priors._normal import own_weight


class FittedMeans(NamedTuple):
    """A fitted population and its clients; arrays over outputs are (d,)."""

    mean: np.ndarray
    mean_variance: np.ndarray
    between: np.ndarray
    noise: np.ndarray
    means: np.ndarray  # (m, d)
    variances: np.ndarray  # (m, d)
    own: np.ndarray  # (m, d)
    log_likelihood: float


def known_values(prior, noise_variance, d):
    """Given mean, between-client and noise variances as arrays (d,), or None."""
    noise = None
    if noise_variance is not None:
        noise = np.asarray(noise_variance, dtype=float)
        if noise.shape not in ((), (1,), (d,)) or not (np.isfinite(noise) & (noise >= 0)).all():
            raise ValueError(
                f"noise_variance must be finite and non-negative, a number or of shape ({d},); "
                f"got {noise_variance!r}."
            )
        noise = np.broadcast_to(noise, (d,)).copy()
    return Known(prior.known_mean(d), prior.known_variances(d), noise)


def shared_values(known):
    """The same with one variance for all outputs."""
    if known.between is not None and np.isinf(known.between).any():
        raise ValueError("covariance must be finite when means are released; got infinity.")
    for name, values in (("covariance", known.between), ("noise_variance", known.noise)):
        if values is not None and np.any(values != values[0]):
            raise ValueError(
                f"{name} must be the same for all outputs when means are released; got {values}."
            )
    first = [None if values is None else float(values[0]) for values in known[1:]]
    return Known(known.mean, *first)


def fit_exact(table, known, method, covariance_type):
    """Population and clients when everything may be pooled."""
    d = table.means.shape[1]
    differ = any(values is not None and np.any(values != values[0]) for values in known[1:])
    split = covariance_type == "diag" or differ
    blocks = [table.coordinate(k) for k in range(d)] if split else [table]
    found = []
    for k, block in enumerate(blocks):
        mean, between, noise = known
        if len(blocks) > 1:
            mean = None if mean is None else mean[[k]]
        between, noise = (None if value is None else value[k] for value in (between, noise))
        found.append(estimate_components(block, method, mean, between, noise))
    width = d // len(found)
    mean = np.concatenate([part.mean for part in found])
    mean_variance, between, noise = (
        np.repeat([getattr(part, name) for part in found], width).astype(float)
        for name in ("mean_variance", "between", "noise")
    )
    sampling = noise / table.weights[:, None]
    own = np.where(np.isnan(between), 1.0, own_weight(between, sampling))
    borrowed = np.where(own < 1, (1 - own) ** 2, 0.0) * np.where(own < 1, mean_variance, 0.0)
    return FittedMeans(
        mean,
        mean_variance,
        between,
        noise,
        own * table.means + (1 - own) * mean,
        own * sampling + borrowed,
        own,
        float(sum(part.log_likelihood for part in found)),
    )


def shrink_releases(table, found, own_variances=None):
    """Clients' means given everybody else's releases (Theorem 2 with one's own left out).

    Where the released noise variance is of no use, clients keep their means, with the standard
    errors of their own rows (NaN for a single row).
    """
    d = table.means.shape[1]
    sampling = found.noise / table.weights[:, None]
    if not found.trusted:
        sampling = np.where(table.n_rows > 1, own_variances / d, np.nan)[:, None]
    prior_variance = np.nan_to_num(found.between) + found.others_variance[:, None]
    total = prior_variance + sampling
    shrink = np.divide(sampling, total, out=np.zeros_like(total), where=total > 0)
    if np.isnan(found.between) or not found.trusted:
        shrink = np.zeros_like(shrink)
    own = np.broadcast_to(1 - shrink, table.means.shape)
    full = np.ones(d)
    return FittedMeans(
        found.mean,
        found.mean_variance * full,
        found.between * full,
        found.noise * full,
        own * table.means + (1 - own) * found.others,
        own * sampling,
        own,
        math.nan,
    )
