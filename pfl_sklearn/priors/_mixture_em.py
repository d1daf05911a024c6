"""Normal mixtures of vectors that are seen with noise: EM on the marginal likelihood.

Client i shows x_i (d,), which is theta_i plus normal noise of variance s_i in every coordinate
(0 without noise), and theta_i comes from component l with probability w_l. Only the component is
latent, so that the steps for means and variances maximize the likelihood of x given the
responsibilities, not that of theta. Where groups overlap EM is slow all the same, and
``_mixture_polish`` takes over.
"""

from typing import NamedTuple

import numpy as np

_HALVINGS = 12
_TINY = 1e-300
_EMPTY = 1e-10


class Mixture(NamedTuple):
    """Components; their covariances by eigenvalues and, if they are not diagonal, vectors."""

    means: np.ndarray  # (k, d)
    values: np.ndarray  # (k, d)
    vectors: np.ndarray | None  # (k, d, d), columns
    weights: np.ndarray  # (k,)

    @property
    def covariances(self):
        """Matrices (k, d, d)."""
        if self.vectors is None:
            return self.values[:, :, None] * np.eye(self.means.shape[1])
        return np.einsum("kij,kj,klj->kil", self.vectors, self.values, self.vectors)


class Shape(NamedTuple):
    """What EM estimates."""

    covariance_type: str  # "spherical", "diag", "full", or "fixed"
    means: bool = True
    weights: bool = True

    def n_parameters(self, k, d):
        """Free parameters of k components in d dimensions."""
        each = {"spherical": 1, "diag": d, "full": d * (d + 1) // 2, "fixed": 0}
        return k * (d * self.means + each[self.covariance_type]) + (k - 1) * self.weights


class MixtureFit(NamedTuple):
    """A fitted mixture."""

    mixture: Mixture
    log_likelihood: float
    interior: bool  # no component lies at the floor of its variance
    converged: bool


def from_covariances(means, covariances, weights):
    """Mixture of given components (k, d), (k, d, d), (k,)."""
    diagonal = np.einsum("kdd->kd", covariances)
    if np.count_nonzero(covariances) == np.count_nonzero(diagonal):
        return Mixture(means, diagonal.copy(), None, weights)
    values, vectors = np.linalg.eigh(covariances)
    return Mixture(means, np.maximum(values, 0.0), vectors, weights)


def log_joint(mixture, x, s):
    """Log of weight times marginal density, (k, m)."""
    rows, ones = [], np.ones(x.shape[1])
    for k in range(len(mixture.weights)):
        z, total = coordinates(mixture, k, x), mixture.values[k] + s[:, None]
        rows.append(-0.5 * ((z**2 / total) @ ones + np.log(2 * np.pi * total) @ ones))
    with np.errstate(divide="ignore"):
        return np.stack(rows) + np.log(mixture.weights)[:, None]


def e_step(mixture, x, s):
    """Responsibilities (k, m) and the log-likelihood."""
    joint = log_joint(mixture, x, s)
    largest = joint.max(axis=0)
    shares = np.exp(joint - largest)
    totals = shares.sum(axis=0)
    return shares / totals, float(np.sum(largest + np.log(totals)))


def m_step(mixture, r, x, s, shape, floor):
    """Components that raise the expected log-likelihood under responsibilities `r`."""
    counts = r.sum(axis=1)
    means, values = mixture.means.copy(), mixture.values.copy()
    vectors = None if mixture.vectors is None else mixture.vectors.copy()
    for k in np.flatnonzero(counts > _EMPTY):
        if shape.means:
            means[k] = _weighted_mean(mixture, k, r[k], x, s)
        deviations = x - means[k]
        if shape.covariance_type == "full":
            values[k], vectors[k] = _full_step(values[k], vectors[k], r[k], deviations, s, floor)
        elif shape.covariance_type != "fixed":
            shared = shape.covariance_type == "spherical"
            values[k] = _variance_step(values[k], r[k], deviations**2, s, floor, shared)
    weights = counts / len(x) if shape.weights else mixture.weights
    return Mixture(means, values, vectors, weights)


def run(mixture, x, s, shape, floor, n_steps, tolerance):
    """EM until a step gains less than `tolerance` nats per client; whether that came to pass."""
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
    if shape.covariance_type == "fixed" or floor == 0:
        return True
    return bool(mixture.values.min() > floor * (1 + 1e-6))


def coordinates(mixture, k, x):
    """Deviations (m, d) from component k, in its own directions."""
    deviations = x - mixture.means[k]
    return deviations if mixture.vectors is None else deviations @ mixture.vectors[k]


def _weighted_mean(mixture, k, r, x, s):
    """Mean (d,) that maximizes the likelihood, by coordinates in the component's directions."""
    precision = r[:, None] / np.maximum(mixture.values[k] + s[:, None], _TINY)
    z = coordinates(mixture, k, x)
    moved = np.einsum("md,md->d", precision, z) / np.einsum("md->d", precision)
    return mixture.means[k] + (moved if mixture.vectors is None else mixture.vectors[k] @ moved)


def _expected(values, r, squares, s):
    """Expected log-likelihood of a component with these variances, up to a constant."""
    total = values + s[:, None]
    each = r @ (squares / total)
    return -0.5 * float(np.sum(each) + np.sum(r @ np.broadcast_to(np.log(total), squares.shape)))


def _variance_step(values, r, squares, s, floor, shared):
    """Fisher scoring for the variances (d,) of a component, halved until it is no loss."""
    weight = r[:, None] / (values + s[:, None]) ** 2
    above = np.einsum("md,md->d", weight, squares - s[:, None])
    total = np.einsum("md->d", weight)
    if shared:
        above, total = np.full_like(above, above.sum()), np.full_like(total, total.sum())
    target = np.maximum(above / total, floor)
    current = _expected(values, r, squares, s)
    for _ in range(_HALVINGS):
        if _expected(target, r, squares, s) >= current:
            return target
        target = (target + values) / 2
    return values


def _full_step(values, vectors, r, deviations, s, floor):
    """Covariance (eigenvalues and vectors) of a component: the better of two steps.

    Subtracting the noise from the scatter is exact if it is common to all clients; the other step,
    with theta latent, never loses.
    """
    z = deviations @ vectors
    own = values / np.maximum(values + s[:, None], _TINY)
    seen = np.einsum("md,me->de", r[:, None] * own * z, own * z)
    latent = seen + np.diag(r @ np.broadcast_to(own * s[:, None], z.shape))
    weight = r / (values.mean() + s) ** 2
    scatter = np.einsum("md,me->de", weight[:, None] * z, z) / weight.sum()
    candidates = [
        latent / r.sum(),
        scatter - np.eye(len(values)) * np.sum(weight * s) / weight.sum(),
    ]
    scored = []
    for candidate in candidates:
        new, turned = np.linalg.eigh(candidate)
        new = np.maximum(new, floor)
        scored.append((_expected(new, r, (z @ turned) ** 2, s), new, vectors @ turned))
    _, new, turned = max(scored, key=lambda score: score[0])
    return new, turned
