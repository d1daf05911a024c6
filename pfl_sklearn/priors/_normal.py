"""Normal vectors seen with normal noise: densities and posteriors of many clients at once.

A prior covariance is a vector (d,), its diagonal, or a matrix (d, d). Sampling variances of the
clients' estimates are (m, 1), (m, d), or matrices (m, d, d).
"""

import numpy as np

from pfl_sklearn.theory import own_weight

# Stands for a variance of zero in a density, so that the nearest mean wins.
_POINT_VARIANCE = 1e-200
# Squared distance in standard deviations; its square root lies beyond all components alike.
_LARGEST_DISTANCE = 1e300
# Eigenvalues below this share of the largest are rounding.
_ROUNDING_EIGENVALUE = 1e-14


def check_covariance(name, covariance):
    """Symmetric, positive semi-definite covariance (d, d) without rounding errors."""
    # If one variance is infinite, all must be, with zeros off the diagonal.
    d = len(covariance)
    diagonal = np.diag(covariance)
    if np.isinf(diagonal).any():
        if not (np.all(diagonal == np.inf) and np.count_nonzero(covariance) == d):
            raise ValueError(
                f"{name} may only be infinite on its whole diagonal, with zeros off it; got "
                f"{covariance.tolist()}."
            )
        return covariance
    largest = np.abs(covariance).max(initial=0.0)
    # Fitted covariances come back in with the rounding of the numbers that they are sums of.
    valid = np.isfinite(largest) and np.abs(covariance - covariance.T).max() <= 1e-8 * largest
    if not valid or np.linalg.eigvalsh(covariance).min() < -1e-10 * d * largest:
        raise ValueError(
            f"{name} must be symmetric, finite and positive semi-definite; got "
            f"{covariance.tolist()}."
        )
    return (covariance + covariance.T) / 2


def diagonal_or_matrix(covariance):
    """Diagonal (d,) of a covariance (d, d) without other entries, which is faster, else itself."""
    if covariance.ndim == 1:
        return covariance
    diagonal = np.diag(covariance)
    off_diagonal = np.count_nonzero(covariance) - np.count_nonzero(diagonal)
    return covariance if off_diagonal else diagonal.copy()


def condition(mean, covariance, estimates, sampling):
    """Posterior means (m, d) of N(mean, covariance) vectors given noisy estimates (m, d).

    The posterior variances come in the form of `sampling`: (m, d), or matrices (m, d, d).
    """
    deviations = estimates - mean
    if sampling.ndim == 3:
        return _condition_on_matrices(mean, covariance, deviations, sampling)
    if covariance.ndim == 1:
        weights = own_weight(covariance, sampling)
        return weights * estimates + (1 - weights) * mean, weights * sampling
    if sampling.shape[1] == 1:  # coordinates are independent along the prior's axes
        values, vectors = np.linalg.eigh(covariance)
        weights = own_weight(np.maximum(values, 0.0), sampling)
        return mean + (weights * (deviations @ vectors)) @ vectors.T, (
            weights * sampling
        ) @ vectors.T**2
    means, matrices = _condition_on_matrices(mean, covariance, deviations, diagonals(sampling))
    return means, np.einsum("mdd->md", matrices).copy()


def log_density(mean, covariance, estimates, sampling):
    """Log marginal density (m,) of noisy estimates (m, d) of N(mean, covariance) vectors."""
    deviations = estimates - mean
    if sampling.ndim == 2 and covariance.ndim == 1:
        return _log_density_of_coordinates(deviations, covariance + sampling)
    if sampling.ndim == 2 and sampling.shape[1] == 1:
        values, vectors = np.linalg.eigh(covariance)
        return _log_density_of_coordinates(deviations @ vectors, values + sampling)
    total = _matrix(covariance) + (diagonals(sampling) if sampling.ndim == 2 else sampling)
    values, vectors = np.linalg.eigh(total)
    # A singular total has no density; the floor keeps the nearest component nearest.
    floor = _ROUNDING_EIGENVALUE * np.abs(values).max(axis=1, keepdims=True)
    rotated = np.einsum("mde,md->me", vectors, deviations)
    return _log_density_of_coordinates(rotated, np.maximum(values, floor))


def draw(mean, covariance, normal):
    """Vectors (n, d) of N(mean, covariance) from standard normal ones."""
    if covariance.ndim == 1:
        return mean + np.sqrt(covariance) * normal
    values, vectors = np.linalg.eigh(covariance)
    return mean + (np.sqrt(np.maximum(values, 0.0)) * normal) @ vectors.T


def diagonals(variances):
    """Variances (m, d) as matrices (m, d, d)."""
    return variances[:, :, None] * np.eye(variances.shape[1])


def check_sampling(estimates, sampling):
    """Estimates (m, d) and sampling variances (m, 1), (m, d) or (m, d, d) as arrays."""
    estimates, sampling = np.asarray(estimates, float), np.asarray(sampling, float)
    m, d = estimates.shape if estimates.ndim == 2 else (-1, -1)
    if sampling.shape not in ((m, 1), (m, d), (m, d, d)):
        raise ValueError(
            "estimates must have shape (n_clients, d) and their variances (n_clients, 1), "
            f"(n_clients, d) or (n_clients, d, d); got {estimates.shape} and {sampling.shape}."
        )
    variances = np.einsum("mdd->md", sampling) if sampling.ndim == 3 else sampling
    if np.any(variances < 0):
        raise ValueError(f"sampling variances must not be below 0; got {variances.min():.3g}.")
    return estimates, sampling


def _log_density_of_coordinates(deviations, variances):
    """Log density (m,) of independent normal deviations (m, d)."""
    total = np.maximum(np.broadcast_to(variances, deviations.shape), _POINT_VARIANCE)
    with np.errstate(over="ignore"):
        squares = np.minimum(deviations**2 / total, _LARGEST_DISTANCE)
    return -0.5 * np.sum(squares + np.log(2 * np.pi * total), axis=1)


def _condition_on_matrices(mean, covariance, deviations, sampling):
    """The general case: gains S (S + V)^-1, with a pseudo-inverse where nothing varies."""
    covariance = _matrix(covariance)
    if np.isinf(covariance).any():  # no prior: every client keeps its own estimate
        return mean + deviations, sampling.copy()
    total = covariance + sampling
    gain = covariance @ np.linalg.pinv(
        total, rcond=_ROUNDING_EIGENVALUE * len(mean), hermitian=True
    )
    posterior = covariance - gain @ covariance
    posterior = (posterior + posterior.transpose(0, 2, 1)) / 2
    return mean + np.einsum("mde,me->md", gain, deviations), posterior


def _matrix(covariance):
    """Covariance as a matrix (d, d)."""
    return np.diag(covariance) if covariance.ndim == 1 else covariance
