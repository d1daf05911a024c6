"""The last stretch to a maximum of a mixture's marginal likelihood: quasi-Newton steps.

EM takes thousands of steps where the noise is large beside what lies between the groups.
"""

import numpy as np
from scipy.optimize import minimize
from scipy.special import softmax

from pfl_sklearn.priors._mixture_em import Mixture, MixtureFit, coordinates, e_step, is_interior

_STEPS = 500
_TOLERANCE = 1e-7  # largest slope per client at the end, in units of the spread of the clients
_SMALLEST_SHARE = 1e-10


def polish(start, x, s, shape, floor):
    """Mixture at the maximum that quasi-Newton steps reach from `start` (a MixtureFit)."""
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

    found = minimize(
        negative,
        model.start,
        jac=True,
        method="L-BFGS-B",
        bounds=model.bounds,
        options={"maxiter": _STEPS, "gtol": _TOLERANCE, "ftol": 1e-14, "maxcor": 20},
    )
    inside = model.mixture(found.x)
    mixture = inside._replace(means=centre + unit * inside.means, values=inside.values * scale)
    value = e_step(mixture, x, s)[1]
    converged = found.nit < _STEPS
    if not value >= start.log_likelihood:
        return start._replace(converged=converged)
    return MixtureFit(mixture, value, is_interior(mixture, shape, floor), converged)


class _Coordinates:
    """What is estimated of a mixture as one vector: means, spreads, log weights.

    In units of the clients' spread, around their mean. Variances are bounded below by the floor;
    a full covariance is the floor plus the square of a matrix.
    """

    def __init__(self, mixture, shape, floor, centre, unit):
        self.shape, self.floor = shape, floor
        values = mixture.values / unit**2
        self.given = mixture._replace(means=(mixture.means - centre) / unit, values=values)
        k = len(mixture.weights)
        log_weights = np.log(np.maximum(mixture.weights, _SMALLEST_SHARE))
        parts = {
            "means": self.given.means if shape.means else None,
            "spread": self._spread(values, mixture.vectors),
            "weights": log_weights if shape.weights and k > 1 else None,
        }
        self.parts = {name: part for name, part in parts.items() if part is not None}
        self.start = np.concatenate([part.ravel() for part in self.parts.values()] or [[]])
        self.size = len(self.start)
        low = {"spread": floor if shape.covariance_type in ("spherical", "diag") else None}
        self.bounds = [
            (low.get(name), None) for name, part in self.parts.items() for _ in range(part.size)
        ]

    def mixture(self, point):
        """The mixture at a point."""
        parts = self._split(point)
        values, vectors = self.given.values, self.given.vectors
        k, d = values.shape
        if self.shape.covariance_type == "full":
            roots = parts["spread"]
            values, vectors = np.linalg.eigh(roots @ roots.transpose(0, 2, 1))
            values = np.maximum(values, 0.0) + self.floor
        elif "spread" in parts:
            values = np.broadcast_to(parts["spread"], (k, d))
        weights = softmax(parts["weights"]) if "weights" in parts else self.given.weights
        return Mixture(parts.get("means", self.given.means), values, vectors, weights)

    def slope(self, point, mixture, r, x, s):
        """Gradient of the log-likelihood, by the responsibilities (k, m)."""
        parts, counts = self._split(point), r.sum(axis=1)
        slopes = {name: np.zeros_like(part) for name, part in parts.items()}
        for k in range(len(counts)):
            precision = 1 / (mixture.values[k] + s[:, None])
            pull = coordinates(mixture, k, x) * precision
            if "means" in parts:
                along = r[k] @ pull
                along = along if mixture.vectors is None else mixture.vectors[k] @ along
                slopes["means"][k] = along
            if "spread" in parts:
                slopes["spread"][k] = self._spread_slope(parts, mixture, k, r[k], pull, precision)
        if "weights" in parts:
            slopes["weights"] = counts - counts.sum() * mixture.weights
        return np.concatenate([part.ravel() for part in slopes.values()])

    def _spread_slope(self, parts, mixture, k, r, pull, precision):
        """Gradient by the spread parameters of component k."""
        summed = r @ np.broadcast_to(precision, pull.shape)
        if self.shape.covariance_type == "full":
            inner = np.einsum("md,me->de", r[:, None] * pull, pull) - np.diag(summed)
            vectors = mixture.vectors[k]
            return vectors @ inner @ vectors.T @ parts["spread"][k]
        each = 0.5 * (r @ pull**2 - summed)
        return each.sum() if self.shape.covariance_type == "spherical" else each

    def _spread(self, values, vectors):
        """Starting spread: (k, 1), (k, d), roots (k, d, d), or None where nothing is estimated."""
        kind = self.shape.covariance_type
        if kind == "fixed":
            return None
        if kind == "full":
            return vectors * np.sqrt(np.maximum(values - self.floor, 0.0))[:, None, :]
        values = np.maximum(values, self.floor)
        return values[:, :1] if kind == "spherical" else values

    def _split(self, point):
        """Parts of the vector by name, in their shapes."""
        ends = np.cumsum([part.size for part in self.parts.values()])[:-1]
        pieces = np.split(point, ends)
        return {
            name: piece.reshape(part.shape)
            for (name, part), piece in zip(self.parts.items(), pieces, strict=True)
        }
